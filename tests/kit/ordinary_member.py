"""An ordinary consumer of a simulated group: it processes, commits, and releases partitions at once.

Runs in: tests. It processes at least once, as ordinary consumers do. Deliberately absent: commits in a transaction.
"""

from collections.abc import Callable

from kit.books import Reader
from kit.cluster import Cluster
from kit.invariants import Invariants
from kit.kafka_client import Kind, Op, Tps, client_class
from kit.kafka_group import Code, Entry, Group
from kit.world import Process, World
from spark_group_source.model import TopicPartition

UNSTORED_MAX = 3
"""Offsets that it has processed and leaves out of a commit by timer, as if it were still at them."""


class OrdinaryMember:
    """An ordinary consumer: it processes, commits, and releases partitions at once.

    Args:
        brief: whether it leaves after its first commit.
        commits_every_ms: it commits by a timer, in the middle of what it processed; None: after each range.
    """

    def __init__(
        self,
        world: World,
        cluster: Cluster,
        group: Group,
        truth: Invariants,
        *,
        name: str,
        brief: bool = False,
        commits_every_ms: int | None = None,
    ) -> None:
        self.timed_commits = 0
        self._brief, self._every_ms, self._timed_ms = brief, commits_every_ms, 0
        self._stored: dict[TopicPartition, int] = {}  # where it started, or what it committed by timer last
        self.process = Process(world, name)
        self.reader = Reader(name, name)
        self._draws = self.process.draws("processing")
        self._commits_epoch_0 = self.process.draws("epochs").chance(0.5)  # as IBM/sarama does
        self._world, self._cluster, self._group, self._truth = world, cluster, group, truth
        truth.reads_as(name, self.reader)
        self._client = client_class(group)(self.process, "main", f"{name}/0.1", group, self, truth, instance=None)
        self._at: dict[TopicPartition, int] = {}
        self._ids: dict[TopicPartition, str] = {}  # the topic ids that its positions belong to
        self._epochs: dict[TopicPartition, int] = {}  # leader epochs that it commits
        self._busy = False
        self._next: Callable[[], None] | None = None  # a callback that waits for the current commit

    def start(self) -> None:
        self._client.subscribe(frozenset(self._cluster.topics))
        self._later(100, self._loop)

    def end(self) -> None:
        if self.process.alive:
            self.process.kill()
            self._truth.ended(self.reader)

    def leave(self) -> None:
        """Commit, leave the group, stop."""

        def gone() -> None:
            self._truth.released(self._client.owned, self._client)
            self._client.close(leave=True)
            self.end()

        def commit() -> None:
            self._busy = True  # stops processing
            self._commit(dict(self._at), gone)

        self._when_free(commit)

    def rebalance(self, op: Op) -> None:
        op.begin()
        match op.kind:
            case Kind.ASSIGN:
                self._assigned(op)
            case Kind.REVOKE:
                self._revoked(op)
            case Kind.LOST:
                self._world.note(f"{self.process.name} lost {_names(op.tps)}")
                for tp in op.tps:
                    self._at.pop(tp, None)
                op.done()

    def _assigned(self, op: Op) -> None:
        def positions(found: dict[TopicPartition, Entry | None]) -> None:
            for tp, entry in found.items():
                if tp in self._client.owned and tp not in self._at:
                    log = self._cluster.log(tp)
                    at = entry.offset if entry is not None else 0 if log is None else log.first
                    self._at[tp] = self._stored[tp] = at
                    self._ids.pop(tp, None)
                    self._epochs.pop(tp, None)

        self._world.note(f"{self.process.name} has {_names(op.tps)} in addition")
        op.done()
        # Offsets committed by a transaction may not be visible yet: this is a read that is not stable, as in any
        # consumer.
        if op.tps:
            self.process.call("main", lambda reply: self._group.read(sorted(op.tps), False, reply), positions)

    def _revoked(self, op: Op) -> None:
        def release() -> None:
            for tp in op.tps:
                self._at.pop(tp, None)
            op.done()

        self._world.note(f"{self.process.name} gives back {_names(op.tps)}")
        self._when_free(lambda: self._commit({tp: self._at[tp] for tp in sorted(op.tps) if tp in self._at}, release))

    def renamed(self) -> None:
        """It needs no identity of its own."""

    def full(self) -> None:
        """It gives up, as applications do that take the error for a fatal one."""
        self.end()

    def dead(self, code: Code) -> None:
        del code
        self.end()

    def _loop(self) -> None:
        self._later(self._draws.between(50, 400), self._loop)
        if self._busy or self._client.holding:
            return
        ranges = {}
        for tp, before in sorted(self._at.items()):
            log = self._cluster.log(tp)
            if log is None:
                continue
            id_ = self._cluster.topics[tp.topic].id
            known, self._ids[tp] = self._ids.get(tp, id_), id_
            at = self._at[tp] = max(log.first, before) if known == id_ else log.first
            self._stored[tp] = self._stored[tp] if known == id_ else at
            end = min(log.end, at + self._draws.between(1, 10))
            if end > at:
                ranges[tp] = (at, end)
                if self._cluster.reports_epochs:
                    self._epochs[tp] = 0 if self._commits_epoch_0 else log.epoch_of(end - 1)
        if ranges:
            self._truth.processed_by(self.reader, ranges)
            self._at.update({tp: end for tp, (_, end) in ranges.items()})
            if self._every_ms is None:
                self._busy = True
                self._commit({tp: end for tp, (_, end) in ranges.items()}, self._free)
            if self._brief:
                self.leave()
        if self._every_ms is not None and self._world.now_ms - self._timed_ms >= self._every_ms:
            self._commit_by_timer(UNSTORED_MAX if ranges else 0)

    def _commit_by_timer(self, unstored_max: int) -> None:
        draws, self._timed_ms = self.process.draws("timer"), self._world.now_ms
        stored = {tp: at - draws.between(0, unstored_max) for tp, at in sorted(self._at.items())}
        offsets = {tp: at for tp, at in stored.items() if at > self._stored.get(tp, at)}
        if offsets:
            self._busy = True
            self._stored |= offsets
            self.timed_commits += 1
            self._commit(offsets, self._free)

    def _free(self) -> None:
        self._busy = False
        if self._next is not None:
            do, self._next = self._next, None
            do()

    def _when_free(self, do: Callable[[], None]) -> None:
        if self._busy:
            self._next = do
        else:
            do()

    def _commit(self, offsets: dict[TopicPartition, int], then: Callable[[], None]) -> None:
        if not offsets:
            then()
            return

        def answer(code: Code) -> None:
            if code in (Code.OK, Code.UNKNOWN_MEMBER):
                self._client.refused(code)  # expelled: the library reports it later
                then()
            else:
                now = {tp: at for tp, at in offsets.items() if self._at.get(tp) == at}
                self._later(200, lambda: self._commit(now, then))

        member, generation = self._client.member, self._client.generation

        def commit(reply: Callable[[Code], None]) -> None:
            there = {tp: offset for tp, offset in offsets.items() if self._cluster.log(tp) is not None}
            entries = {
                tp: Entry(offset, None, self.process.name, 0, leader_epoch=self._epochs.get(tp))
                for tp, offset in there.items()
            }
            reply(self._group.commit(member, generation, entries))

        self.process.call("main", commit, answer)

    def _later(self, delay_ms: int, do: Callable[[], None]) -> None:
        self.process.later("main", delay_ms, do)


def _names(tps: Tps) -> str:
    return ", ".join(map(str, sorted(tps))) or "nothing"
