"""A consumer as librdkafka's callbacks show it, for both protocols: it joins, heartbeats, and holds a revocation.

Runs in: tests. Three habits of the library that matter are kept: heartbeats go on while a revocation is held; a holder
that was thrown out meanwhile is not told (classic), or only after the hold (KIP-848); a fenced client is dead without a
callback for its partitions. Deliberately absent: fetching.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from spark_group_source.model import TopicPartition
from spark_group_source.testing.classic_group import ClassicGroup
from spark_group_source.testing.consumer_group import LEFT, RELEASED, ConsumerGroup
from spark_group_source.testing.kafka_group import SESSION_MS, Answer, Code, Entry, Group
from spark_group_source.testing.world import Process

HEARTBEAT_MS = 1_000

Tps = frozenset[TopicPartition]


class Listener(Protocol):
    """The application around a consumer. Each call comes on the thread that polls."""

    def assigned(self, tps: Tps, generation: int) -> None: ...
    def revoked(self, tps: Tps, done: Callable[[], None]) -> None: ...
    def lost(self, tps: Tps) -> None: ...
    def dead(self, code: Code) -> None: ...


class Truth(Protocol):
    """Who really has what, for the checks."""

    def given(self, tps: Tps, client: "Client") -> None: ...
    def released(self, tps: Tps, client: "Client") -> None: ...
    def told(self, tps: Tps, client: "Client") -> None: ...


class Client:
    """What both protocols share. ``name`` tells one consumer from its successors."""

    def __init__(
        self,
        process: Process,
        thread: str,
        name: str,
        group: Group,
        listener: Listener,
        truth: Truth,
        *,
        instance: str | None,
    ) -> None:
        self.process, self.thread, self.name, self.instance = process, thread, name, instance
        self.owned: Tps = frozenset()
        self.member = ""
        self.generation = -1
        self.holding = False
        self.closed = False
        self._listener, self._truth, self._group = listener, truth, group
        self._heard_ms = process.world.now_ms

    def start(self) -> None:
        raise NotImplementedError

    def close(self, *, leave: bool) -> None:
        raise NotImplementedError

    def entitled(self, tp: TopicPartition) -> bool:
        """Whether the group still says that it has the partition: an answer may come after the session ended."""
        member = self._group.members.get(self.member)
        return member is not None and tp in member.assigned

    def abandon(self) -> None:
        """Gone without a word to anyone."""
        self.closed = True

    def commit(
        self,
        offsets: Mapping[TopicPartition, int],
        entry: Entry,
        answer: Callable[[Code], None],
        *,
        known: tuple[str, int] | None = None,
    ) -> None:
        """Commit as a member of the generation that it knows now, or ``known`` before."""
        member, generation = known or (self.member, self.generation)
        self.process.call(
            self.thread,
            lambda reply: reply(self._group.commit_as_member(member, generation, offsets, entry)),
            answer,
        )

    # --- for the protocols ------------------------------------------------------------------------------------------

    def _later(self, delay_ms: int, do: Callable[[], None]) -> None:
        self.process.later(self.thread, delay_ms, lambda: None if self.closed else do())

    def _give(self, tps: Tps) -> None:
        self.owned |= tps
        self._truth.given(tps, self)
        self._listener.assigned(tps, self.generation)

    def _hold(self, tps: Tps, then: Callable[[], None]) -> None:
        """Ask for the partitions and wait; ``then`` runs when the application let go."""
        self.holding = True

        def done() -> None:
            if not self.closed:
                self.holding = False
                self.owned -= tps
                self._truth.released(tps, self)
                then()

        self._listener.revoked(tps, done)

    def _lose_all(self) -> None:
        if self.owned:
            gone, self.owned = self.owned, frozenset()
            self._truth.told(gone, self)
            self._listener.lost(gone)

    def _die(self, code: Code) -> None:
        self.closed = True
        self._listener.dead(code)


def _ignore(_: Answer) -> None:
    """Nobody is left to hear it."""


class ClassicClient(Client):
    """Join, sync, heartbeat."""

    _group: ClassicGroup
    _joining = False

    def start(self) -> None:
        self._join()
        self._later(HEARTBEAT_MS, self._beat)

    def close(self, *, leave: bool) -> None:
        self.closed = True
        if self.member and (leave or self.instance is None):
            member = self.member
            self.process.call("closing", lambda reply: self._group.leave(member, reply), _ignore)

    def _join(self) -> None:
        if self._joining:
            return
        self._joining = True
        member, owned, generation = self.member, self.owned, self.generation
        self.process.call(
            self.thread,
            lambda reply: self._group.join(member, self.instance, self.name, set(owned), generation, reply),
            self._joined,
            repeat=False,
        )

    def _joined(self, answer: Answer) -> None:
        if self.closed:
            return
        self._heard_ms = self.process.world.now_ms
        if answer.code is Code.OK:
            self.member, self.generation = answer.member, answer.generation
            self.process.call(
                self.thread,
                lambda reply: self._group.sync(answer.member, answer.generation, reply),
                self._synced,
                repeat=False,
            )
        else:
            self._joining = False
            self._failed(answer.code)

    def _synced(self, answer: Answer) -> None:
        if self.closed:
            return
        self._joining = False
        self._heard_ms = self.process.world.now_ms
        if answer.code is not Code.OK:
            self._failed(answer.code)
            return
        assert answer.assignment is not None
        revoked, added = self.owned - answer.assignment, answer.assignment - self.owned
        if not revoked:
            self._give(added)
            return

        def then() -> None:
            if self.member:
                self._give(added)
            self._join()

        self._hold(revoked, then)

    def _beat(self) -> None:
        self._later(HEARTBEAT_MS, self._beat)
        if self._joining or not self.member:
            return
        if self.process.world.now_ms - self._heard_ms > SESSION_MS:
            self._failed(Code.UNKNOWN_MEMBER)  # the library's own session timer
            return
        member, generation = self.member, self.generation

        def answered(answer: Answer) -> None:
            self._beaten(answer, member, generation)

        self.process.call(
            self.thread,
            lambda reply: self._group.heartbeat(member, self.instance, generation, reply),
            answered,
        )

    def _beaten(self, answer: Answer, member: str, generation: int) -> None:
        if self.closed or (member, generation) != (self.member, self.generation) or self._joining:
            return
        if answer.code in (Code.OK, Code.REBALANCE):
            self._heard_ms = self.process.world.now_ms
        if answer.code is not Code.OK:
            self._failed(answer.code)

    def _failed(self, code: Code) -> None:
        if code is Code.FENCED_INSTANCE:
            self._die(code)
        elif code is Code.REBALANCE:
            if self.holding:
                return
            if self._group.incremental or not self.owned:
                self._join()
            else:
                self._hold(self.owned, self._join)
        else:
            self.member, self.generation = "", -1
            if not self.holding:  # a holder is not told
                self._lose_all()
                self._join()


class ConsumerClient(Client):
    """KIP-848: heartbeats alone."""

    _group: ConsumerGroup
    _asking = False
    _again = False
    _thrown_out = False

    def start(self) -> None:
        self.member = self.name
        self.generation = 0
        self._given = False
        self._beat_now()
        self._later(HEARTBEAT_MS, self._beat)

    def close(self, *, leave: bool) -> None:
        """A static member cannot leave for good, whatever is asked."""
        del leave
        self.closed = True
        if self.generation > 0:
            self._send("closing", RELEASED if self.instance else LEFT, None, _ignore)

    def _beat(self) -> None:
        self._later(HEARTBEAT_MS, self._beat)
        self._beat_now(full=False)

    def _beat_now(self, *, full: bool = True) -> None:
        if self._thrown_out:
            return
        if self._asking:
            self._again |= full
            return
        self._asking = True
        epoch = self.generation
        owned = self.owned if full and not self.holding else None
        self._send(self.thread, epoch, owned, self._beaten)

    def _send(self, thread: str, epoch: int, owned: Tps | None, answer: Callable[[Answer], None]) -> None:
        self.process.call(
            thread,
            lambda reply: self._group.heartbeat(self.member, self.instance, self.name, epoch, owned, reply),
            answer,
        )

    def _beaten(self, answer: Answer) -> None:
        self._asking = False
        if self.closed:
            return
        if answer.code is Code.OK:
            self._accept(answer)
        elif answer.code in (Code.FENCED_INSTANCE, Code.UNRELEASED):
            self._die(answer.code)
            return
        else:
            self._thrown_out = True
            if not self.holding:
                self._rejoin()
        if self._again:
            self._again = False
            self._beat_now()

    def _accept(self, answer: Answer) -> None:
        self.generation = answer.generation
        if self.holding or answer.assignment is None:
            return
        revoked, added = self.owned - answer.assignment, answer.assignment - self.owned
        if revoked:
            self._hold(revoked, self._held_on)
        elif added or not self._given:
            self._given = True
            self._give(added)
            self._beat_now()

    def _held_on(self) -> None:
        """The hold is over; librdkafka's F_WAIT_REJOIN waits for that. Until then nothing shows that it is out."""
        if self._thrown_out:
            self._rejoin()
        else:
            self._beat_now()

    def _rejoin(self) -> None:
        self._thrown_out, self._given, self.generation = False, False, 0
        self._lose_all()
        self._beat_now()


def make_client(
    process: Process, thread: str, name: str, group: Group, listener: Listener, truth: Truth, instance: str | None
) -> Client:
    kind = ConsumerClient if isinstance(group, ConsumerGroup) else ClassicClient
    return kind(process, thread, name, group, listener, truth, instance=instance)
