"""The background thread of librdkafka for one consumer: it joins, heartbeats, and runs rebalance operations.

Runs in: tests. This module has the parts that both protocols share; ``classic_client`` and ``consumer_client``
implement them. The application is a :class:`Listener`; ``fake_consumer`` turns its calls into callbacks inside
``poll()``. These habits of the library are modelled:

- heartbeats continue while the application is in a callback, such as one that holds a revocation;
- events during a callback are not reported: a fenced classic holder accepts the added partitions and rejoins as another
  member with the partitions it kept; a KIP-848 member is notified right after the callback;
- a fenced consumer stops, without a callback for its partitions;
- an eager member gets callbacks for an empty list too; a cooperative or KIP-848 member without partitions gets no
  callback and rejoins immediately: a static classic one fences the current holder of its instance id;
- KIP-848 reports no empty assignment.

Deliberately absent: fetching; the application's requests (``wire``).
"""

from collections.abc import Callable
from enum import Enum
from typing import Protocol

from kit.kafka_group import Answer, Books, Code, Group, Member
from kit.world import Process
from spark_group_source.model import TopicPartition

HEARTBEAT_MS = 1_000

Tps = frozenset[TopicPartition]


class Kind(Enum):
    ASSIGN = "assign"
    REVOKE = "revoke"
    LOST = "lost"


class Listener(Protocol):
    """The application around a consumer. Called on the library's thread; it may take its time."""

    def rebalance(self, op: "Op") -> None: ...
    def renamed(self) -> None: ...  # the member id or the generation changed
    def full(self) -> None: ...  # the group is; the library joins again
    def dead(self, code: Code) -> None: ...


class Op:
    """An operation for the application: assign, revoke or report as lost."""

    def __init__(self, client: "Client", kind: Kind, tps: Tps, then: Callable[[], None]) -> None:
        self.kind, self.tps = kind, tps
        self.generation = client.generation
        self._client, self._then = client, then
        self.is_open = True

    def begin(self) -> None:
        """The application starts to process the operation."""
        if self.kind is Kind.LOST and self.tps:
            self._call_hook(self._client.truth.lost)

    def done(self) -> None:
        """The application has assigned or released the partitions. Only the first call counts."""
        client = self._client
        if not self.is_open:
            return
        self.is_open = False
        if client.closed or not client.process.alive:
            return
        if self.kind is Kind.ASSIGN:
            client.owned |= self.tps
            self._call_hook(client.truth.assigned)
        else:
            client.owned -= self.tps
            if self.kind is Kind.REVOKE:
                self._call_hook(client.truth.released)
        client.calling = None
        self._then()

    def _call_hook(self, hook: Callable[[Tps, "Client"], None]) -> None:
        try:
            hook(self.tps, self._client)
        except AssertionError as exc:  # a rule is broken: the application, called here, must not swallow the error
            self._client.process.world.fail(exc)
            raise


class Client:
    """The parts that both protocols share.

    Args:
        thread: name of the library's thread.
        name: unique name of the consumer.
        instance: its group.instance.id.
        client_id: its client.id in the group.
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
        self.member = name if group.protocol == "consumer" else ""  # KIP-848: a UUID that the consumer generates
        self.owned: Tps = frozenset()
        self.topics: frozenset[str] = frozenset()
        self.generation = -1
        self.calling: Op | None = None  # the operation that the application has not completed
        self.closed = False
        self._listener, self._group = listener, group
        self._leaving = self._closing = False
        self._answered_ms = process.world.now_ms

    @property
    def holding(self) -> bool:
        """Whether the application has been requested to release partitions and has not yet."""
        return self.calling is not None and self.calling.kind is Kind.REVOKE

    @property
    def leaving(self) -> bool:
        """Whether the application has unsubscribed, or closes."""
        return self._leaving or self._closing

    def subscribe(self, topics: frozenset[str]) -> None:
        """Join, or change the subscription."""
        raise NotImplementedError

    def unsubscribe(self) -> None:
        """Release all partitions, then leave."""
        if not self.closed:
            self._leaving = True
            if self.calling is None:
                self._goes()

    def breaks(self) -> None:
        """Stop without notifying the group."""
        self._die(Code.UNKNOWN_MEMBER)

    def give_all_back(self) -> None:
        """Revoke all partitions before :meth:`close`, unless the application is in another operation."""
        self._closing = True
        if self.owned and self.calling is None and not self.closed:
            self._start_op(Kind.REVOKE, self.owned, lambda: None)

    def close(self, *, leave: bool) -> None:
        """Close. ``leave``: end a static membership too, where the protocol supports that."""
        raise NotImplementedError

    def refused(self, code: Code) -> None:
        """The broker refused a commit of the application because of the member's state."""
        raise NotImplementedError

    @property
    def listed(self) -> Member | None:
        """Its member in the group; None if the group does not list it."""
        return self._group.members.get(self.member)

    def expel(self, member: Member) -> None:
        """End its session at the coordinator."""
        self._group.remove(member, "its session ended")

    @property
    def is_out(self) -> bool:
        """Whether the group does not list it any more: its session ended, or it was replaced."""
        return self.member not in self._group.members

    def entitled(self, tp: TopicPartition) -> bool:
        """Whether the group still assigns the partition to it: a response may arrive after the session ended."""
        member = self._group.members.get(self.member)
        return member is not None and tp in member.assigned

    # --- for the protocols ------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Leave the group; no partition is owned."""
        raise NotImplementedError

    def _goes(self) -> bool:
        """Continue with leaving, if that is in progress. Returns whether it is."""
        if self._leaving:
            if self.owned:
                self._start_op(Kind.REVOKE, self.owned, self._leave)
            else:
                self._leave()
        return self._leaving

    def _is(self, *, member: str | None = None, generation: int | None = None) -> None:
        """Set its identity in the group."""
        before = self.member, self.generation
        self.member = self.member if member is None else member
        self.generation = self.generation if generation is None else generation
        if before != (self.member, self.generation):
            self._listener.renamed()

    def _later(self, delay_ms: int, do: Callable[[], None]) -> None:
        self.process.later(self.thread, delay_ms, lambda: None if self.closed else do())

    def _start_op(self, kind: Kind, tps: Tps, then: Callable[[], None]) -> None:
        """Start an operation of the application; ``then`` runs when it is done."""
        self.calling = Op(self, kind, tps, then)
        self._listener.rebalance(self.calling)

    def _die(self, code: Code) -> None:
        self.closed = True
        self.owned = frozenset()
        self._listener.dead(code)


def ignore(_: Answer) -> None:
    """Discard an answer that no caller needs."""


def client_class(group: Group, *, takes: bool = False) -> type[Client]:
    """Return the class of the group's clients. ``takes``: one of the classic protocol, in a KIP-848 group."""
    from kit.classic_client import ClassicClient
    from kit.consumer_client import ConsumerClient, TakingClient

    return TakingClient if takes else ConsumerClient if group.protocol == "consumer" else ClassicClient
