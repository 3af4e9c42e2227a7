"""The sinks of a simulated query: a table with a ledger, a sink that is idempotent by batch id, and a plain one.

Runs in: tests. The product decides what a table with a ledger does with a batch (``delta.ledger_decision.decide``); the
table, its commits and an operator's resets are modelled here. Deliberately absent: files, and rows other than their
offsets.
"""

from collections.abc import Mapping

from kit.invariants import Invariants
from kit.spark import Read, SparkRun
from kit.world import World
from spark_group_source.delta import ledger_decision
from spark_group_source.delta.ledger_decision import WriteBatch
from spark_group_source.delta.ledger_format import Ledger
from spark_group_source.errors import LedgerConflict
from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.protocol.offsets import BatchKey, StreamOffset

WRITE_MS = (5, 60)
"""The time between reading the table and the commit, in which another writer may commit."""


class Plain:
    """Writes every batch, also a replayed one."""

    def __init__(self, truth: Invariants) -> None:
        self._truth = truth
        self._written: set[tuple[str, int]] = set()

    def write(self, run: SparkRun, offset: StreamOffset, read: Read) -> None:
        key = (run.query.checkpoint.query_id, offset.seq)
        rows = read(offset.batch())
        self._truth.processed_by(run.reader, rows, again=key in self._written)
        self._written.add(key)


class Idempotent:
    """Skips a batch whose number it has written."""

    def __init__(self, truth: Invariants) -> None:
        self._truth = truth
        self._written: set[tuple[str, int]] = set()

    def write(self, run: SparkRun, offset: StreamOffset, read: Read) -> None:
        key = (run.query.checkpoint.query_id, offset.seq)
        rows = read(offset.batch()) if key not in self._written else {}
        if key not in self._written:  # another run may have been faster
            self._written.add(key)
            self._truth.processed_by(run.reader, rows)


class Table:
    """A table with the ledger of one group. Several queries may write to it."""

    def __init__(self, world: World, truth: Invariants, name: str, group: str) -> None:
        self.name = name
        self.conflicts = 0
        self.voids = 0
        self._world, self._truth, self._group = world, truth, group
        self.ledger: Ledger | None = None
        """The ledger in the newest version of the table; None before the first commit."""

    def write(self, run: SparkRun, offset: StreamOffset, read: Read) -> None:
        """Write one batch, attempting it until no other writer is faster.

        Raises:
            LedgerConflict: it must not be written.
        """
        while True:
            seen = self.ledger
            try:
                decision = ledger_decision.decide([offset], {self._group: seen}, table=self.name, batch_id=offset.seq)
            except LedgerConflict:
                self.conflicts += 1
                raise
            if not isinstance(decision, WriteBatch) or self._commit(run, offset, read, seen, decision):
                break
        for done in decision.durable:
            run.query.durable[done.stream] = BatchKey.of(done)
            run.marked = None if run.watched is None else run.watched.plan
        if offset not in decision.durable and self.ledger is not None:
            run.query.void[offset.stream, offset.seq] = self.ledger.reset_number

    def _commit(
        self, run: SparkRun, offset: StreamOffset, read: Read, seen: Ledger | None, decision: WriteBatch
    ) -> bool:
        rows = read(_without(offset.batch(), decision.drop)) if decision.reads_rows else {}
        run.pause(*WRITE_MS)
        if not (rows or decision.drop or decision.changes_ledger):
            return True
        if self.ledger is not seen:
            return False
        if any(comparison.void for comparison in decision.comparisons):
            self.voids += 1
        self._world.note(lambda: f"table {self.name}: batch {offset.seq} of {offset.stream}, without {decision.drop}")
        self.ledger = decision.ledgers[self._group].with_next_number()
        self._truth.processed_by(run.reader, rows, table=self.name)
        self._truth.has_already({r.tp: (r.start, r.end) for r in decision.drop}, table=self.name)
        return True

    def set_ledger(
        self, offsets: Mapping[TopicPartition, int], *, topic_ids: Mapping[str, str], reset_number: int
    ) -> None:
        """Set the ledger like ``spark-group reset`` (``delta.ledger_store.set_ledger``)."""
        old = self.ledger or Ledger(group=self._group)
        self._truth.ledger_moved(self.name, offsets)
        self._world.note(lambda: f"table {self.name}: the ledger is set by reset #{reset_number}")
        self.ledger = old.after_reset(reset_number, offsets, topic_ids).with_next_number()


def _without(ranges: list[OffsetRange], drop: tuple[OffsetRange, ...]) -> list[OffsetRange]:
    """Return the ranges without the dropped parts, which are at their starts."""
    dropped = {r.tp: r for r in drop}
    left = []
    for r in ranges:
        part = dropped.get(r.tp)
        start = r.start if part is None else max(r.start, part.end)
        if start < r.end:
            left.append(OffsetRange(r.tp, start, r.end))
    return left
