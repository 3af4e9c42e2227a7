"""Where the rows of a simulated query go: a table with a ledger, a sink that knows its batches, one that knows nothing.

Runs in: tests. What a table with a ledger does with a batch is decided by what ships (``delta.ledger.decide``); here
are the table, its one commit at a time, and the operator's hand on the ledger. Deliberately absent: files, rows other
than their offsets.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kit.invariants import Invariants
from kit.spark import Read, SparkRun
from kit.world import World
from spark_group_source.delta import ledger
from spark_group_source.delta.ledger import Ledger, Mixed, Recorded, Refused, Retired, Unaware, Write
from spark_group_source.errors import LedgerConflict
from spark_group_source.group.offsets import StreamOffset
from spark_group_source.model import OffsetRange, TopicPartition

WRITE_MS = (5, 60)
"""From the look at the table to the commit: another writer may come first."""


class Plain:
    """Writes whatever it is given, each time."""

    def __init__(self, truth: Invariants) -> None:
        self._truth = truth
        self._written: set[tuple[str, int]] = set()

    def write(self, run: SparkRun, offset: StreamOffset, read: Read) -> None:
        key = (run.query.checkpoint.query_id, offset.seq)
        rows = read(offset.batch())
        self._truth.processed_by(run.reader, rows, again=key in self._written)
        self._written.add(key)


class Idempotent:
    """Knows the numbers of its batches, and nothing else."""

    def __init__(self, truth: Invariants) -> None:
        self._truth = truth
        self._written: set[tuple[str, int]] = set()

    def write(self, run: SparkRun, offset: StreamOffset, read: Read) -> None:
        key = (run.query.checkpoint.query_id, offset.seq)
        rows = read(offset.batch()) if key not in self._written else {}
        if key not in self._written:  # another run may have been faster
            self._written.add(key)
            self._truth.processed_by(run.reader, rows)


@dataclass(frozen=True)
class _Version:
    """What a commit of the table says."""

    number: int = 0
    ledger: Ledger | None = None
    batches: Mapping[str, int] = field(default_factory=dict)  # the last one of each query
    notes: frozenset[str] = frozenset()  # the offsets of every batch that was written


class Table:
    """A table with the ledger of the one group. Several queries may write to it."""

    def __init__(self, world: World, truth: Invariants, name: str, group: str) -> None:
        self.name = name
        self.conflicts = 0
        self.voids = 0
        self._world, self._truth, self._group = world, truth, group
        self._now = _Version()

    @property
    def ledger(self) -> Ledger | None:
        return self._now.ledger

    def write(self, run: SparkRun, offset: StreamOffset, read: Read) -> None:
        """One batch, with as many attempts as others come first.

        Raises:
            LedgerConflict: it may not be written.
        """
        while True:
            seen = self._now
            query, note = run.query.checkpoint.query_id, offset.to_json()
            decision = ledger.decide(
                [offset], {self._group: seen.ledger}, recorded=seen.batches.get(query, -1) >= offset.seq
            )
            match decision:
                case Refused() | Retired() | Unaware() | Mixed():
                    self.conflicts += 1
                    raise ledger.conflict(self.name, decision, offset.seq)
                case Recorded():
                    if decision.uncovered and note not in seen.notes:
                        raise LedgerConflict(f"table {self.name} has another batch {offset.seq} of {query}")
                    durable = decision.durable
                    break
                case Write():
                    if self._commit(run, offset, read, seen, decision):
                        durable = decision.durable
                        break
        for done in durable:
            run.query.durable[done.stream] = done.seq

    def _commit(self, run: SparkRun, offset: StreamOffset, read: Read, seen: _Version, decision: Write) -> bool:
        rows = read(_without(offset.batch(), decision.drop)) if decision.rows else {}
        run.pause(*WRITE_MS)
        if not (rows or decision.drop or decision.changed):
            return True
        if self._now is not seen:
            return False
        if any(verdict.void for verdict in decision.verdicts):
            self.voids += 1
            self._truth.left_out(offset.ranges)
        after = replace(decision.ledgers[self._group], table_version=-1)
        self._world.note(lambda: f"table {self.name}: batch {offset.seq} of {offset.stream}, without {decision.drop}")
        self._now = _Version(
            seen.number + 1,
            after,
            {**seen.batches, run.query.checkpoint.query_id: offset.seq},
            seen.notes | {offset.to_json()},
        )
        self._truth.processed_by(run.reader, rows, table=self.name)
        self._truth.has_already({r.tp: (r.start, r.end) for r in decision.drop}, table=self.name)
        return True

    def set_ledger(self, offsets: Mapping[TopicPartition, int], *, topic_ids: Mapping[str, str], epoch: int) -> None:
        """As ``spark-group reset`` with this table does (``delta.kept.set_ledger``)."""
        old = self._now.ledger or Ledger(group=self._group)
        after = Ledger(
            group=self._group,
            offsets={**old.offsets, **offsets},
            topic_ids={**old.topic_ids, **topic_ids},
            epoch=epoch,
            void=old.void if epoch == old.epoch else {},
        )
        self._truth.ledger_moved(self.name, offsets)
        self._world.note(lambda: f"table {self.name}: the ledger is set by reset {epoch}")
        self._now = replace(self._now, number=self._now.number + 1, ledger=after)


def _without(ranges: list[OffsetRange], drop: tuple[OffsetRange, ...]) -> list[OffsetRange]:
    """What is left of ranges; what is dropped of one is its beginning."""
    dropped = {r.tp: r for r in drop}
    left = []
    for r in ranges:
        cut = dropped.get(r.tp)
        start = r.start if cut is None else max(r.start, cut.end)
        if start < r.end:
            left.append(OffsetRange(r.tp, start, r.end))
    return left
