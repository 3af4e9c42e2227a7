"""What librdkafka's own thread does for a consumer: it joins, heartbeats, and asks the application to take and give.

Runs in: tests. Here is what both protocols share, ``classic_client`` and ``consumer_client`` are these. The application
is a :class:`Listener`; ``fake_consumer`` makes callbacks inside ``poll()`` of it. The habits of the library that matter
are kept:

- heartbeats go on while the application is in a callback, such as one that holds a revocation;
- what happens meanwhile is not told: a classic holder that was thrown out takes what is added and joins again with what
  it kept, as another member; a KIP-848 one is told right after the callback;
- a fenced consumer is dead, without a callback for its partitions;
- an eager member gives back and loses also an empty list; a cooperative or KIP-848 one without partitions gets no
  callback at all, and joins again at once: a static classic one takes its place back from whoever has it now;
- KIP-848 tells nothing of an empty assignment.

Deliberately absent: fetching; requests of the application's (``wire``).
"""

from collections.abc import Callable
from enum import Enum
from typing import Protocol

from kit.kafka_group import Answer, Books, Code, Group
from kit.world import Process
from spark_group_source.model import TopicPartition

HEARTBEAT_MS = 1_000

Tps = frozenset[TopicPartition]


class Kind(Enum):
    ASSIGN = "assign"
    REVOKE = "revoke"
    LOST = "lost"


class Listener(Protocol):
    """The application around a consumer. Told on the library's thread, it may take its time."""

    def rebalance(self, op: "Op") -> None: ...
    def renamed(self) -> None: ...  # it is another member, or in another generation
    def dead(self, code: Code) -> None: ...


class Op:
    """Something that the application is asked to take, give back, or hear that it lost."""

    def __init__(self, client: "Client", kind: Kind, tps: Tps, then: Callable[[], None]) -> None:
        self.kind, self.tps = kind, tps
        self.generation = client.generation
        self._client, self._then = client, then
        self._open = True

    def begin(self) -> None:
        """The application hears of it."""
        if self.kind is Kind.LOST and self.tps:
            self._tell(self._client.truth.told)

    def done(self) -> None:
        """The application took them, or let them go. Only the first call counts."""
        client = self._client
        if not self._open:
            return
        self._open = False
        if client.closed or not client.process.alive:
            return
        if self.kind is Kind.ASSIGN:
            client.owned |= self.tps
            self._tell(client.truth.given)
        else:
            client.owned -= self.tps
            if self.kind is Kind.REVOKE:
                self._tell(client.truth.released)
        client.calling = None
        self._then()

    def _tell(self, hook: Callable[[Tps, "Client"], None]) -> None:
        try:
            hook(self.tps, self._client)
        except AssertionError as exc:  # a rule is broken: the application, which is told here, must not swallow that
            self._client.process.world.fail(exc)
            raise


class Client:
    """What both protocols share.

    Args:
        thread: name of the library's thread.
        name: tells one consumer from all others.
        instance: its group.instance.id.
        client_id: what the group calls it.
    """

    def __init__(
        self,
        process: Process,
        thread: str,
        name: str,
        group: Group,
        listener: Listener,
        truth: Books,
        *,
        instance: str | None,
        client_id: str = "",
    ) -> None:
        self.process, self.thread, self.name, self.instance, self.truth = process, thread, name, instance, truth
        self.client_id = client_id or name
        self.member = name if group.protocol == "consumer" else ""  # KIP-848: a UUID that the consumer makes
        self.owned: Tps = frozenset()
        self.topics: frozenset[str] = frozenset()
        self.generation = -1
        self.calling: Op | None = None  # the application is asked, and has not answered
        self.closed = False
        self._listener, self._group = listener, group
        self._leaving = self._closing = False
        self._heard_ms = process.world.now_ms

    @property
    def holding(self) -> bool:
        """Whether the application was asked to give back, and has not yet."""
        return self.calling is not None and self.calling.kind is Kind.REVOKE

    @property
    def leaving(self) -> bool:
        """Whether the application has unsubscribed, or closes."""
        return self._leaving or self._closing

    def subscribe(self, topics: frozenset[str]) -> None:
        """Join, or go on with other topics."""
        raise NotImplementedError

    def unsubscribe(self) -> None:
        """Give everything back, then leave."""
        if not self.closed:
            self._leaving = True
            if self.calling is None:
                self._goes()

    def breaks(self) -> None:
        """It ends here and now; the group hears nothing of it."""
        self._die(Code.UNKNOWN_MEMBER)

    def give_all_back(self) -> None:
        """Before :meth:`close`, if the application is not being asked for anything."""
        self._closing = True
        if self.owned and self.calling is None and not self.closed:
            self._ask(Kind.REVOKE, self.owned, lambda: None)

    def close(self, *, leave: bool) -> None:
        """The end. ``leave``: also of a static member's place, where the protocol knows such a thing."""
        raise NotImplementedError

    def refused(self, code: Code) -> None:
        """A commit of the application's was refused for what the member is."""
        raise NotImplementedError

    @property
    def is_out(self) -> bool:
        """Whether the group does not know it any more: its session ended, or another took its place."""
        return self.member not in self._group.members

    def entitled(self, tp: TopicPartition) -> bool:
        """Whether the group still says that it has the partition: an answer may come after the session ended."""
        member = self._group.members.get(self.member)
        return member is not None and tp in member.assigned

    # --- for the protocols ------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Out of the group; nothing is owned."""
        raise NotImplementedError

    def _goes(self) -> bool:
        """Go on with leaving, if that is under way."""
        if self._leaving:
            if self.owned:
                self._ask(Kind.REVOKE, self.owned, self._leave)
            else:
                self._leave()
        return self._leaving

    def _is(self, *, member: str | None = None, generation: int | None = None) -> None:
        """Who it is in the group from now on."""
        before = self.member, self.generation
        self.member = self.member if member is None else member
        self.generation = self.generation if generation is None else generation
        if before != (self.member, self.generation):
            self._listener.renamed()

    def _later(self, delay_ms: int, do: Callable[[], None]) -> None:
        self.process.later(self.thread, delay_ms, lambda: None if self.closed else do())

    def _ask(self, kind: Kind, tps: Tps, then: Callable[[], None]) -> None:
        """Ask the application; ``then`` runs when it is done."""
        self.calling = Op(self, kind, tps, then)
        self._listener.rebalance(self.calling)

    def _die(self, code: Code) -> None:
        self.closed = True
        self.owned = frozenset()
        self._listener.dead(code)


def ignore(_: Answer) -> None:
    """Nobody is left to hear it."""


def make_client(
    process: Process,
    thread: str,
    name: str,
    group: Group,
    listener: Listener,
    truth: Books,
    *,
    instance: str | None,
    client_id: str = "",
    takes: bool = False,
) -> Client:
    """``takes``: of the classic protocol, in a KIP-848 group."""
    from kit.classic_client import ClassicClient
    from kit.consumer_client import ConsumerClient, TakingClient

    kind = TakingClient if takes else ConsumerClient if group.protocol == "consumer" else ClassicClient
    return kind(process, thread, name, group, listener, truth, instance=instance, client_id=client_id)
