"""The sinks of a simulated query: a table with a ledger, a sink that is idempotent by batch id, and a plain one.

Runs in: tests. What ships writes to a table with a ledger, over a model of its log. Deliberately absent: files,
rows other than their offsets, changes of the table by its users (``table_histories`` has them), and the write guard.
"""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from kit.invariants import Invariants
from kit.spark import Read, SparkRun
from kit.world import World
from spark_group_source.delta import table_writer
from spark_group_source.delta.checkpoint import PlannedBatch
from spark_group_source.delta.ledger_decision import WriteBatch
from spark_group_source.delta.ledger_format import Ledger
from spark_group_source.delta.sink import BatchCommit, DeltaSink
from spark_group_source.delta.table_history import Commit, CommitRace, TableHistory
from spark_group_source.delta.table_writer import TableWriter
from spark_group_source.host.run_files import NO_MARK, is_later
from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.protocol.offsets import BatchKey, StreamOffset

WRITE_MS = (5, 60)
"""The time between reading the table and the commit, in which another writer may commit."""
NO_ROWS: Any = SimpleNamespace(sparkSession=None)
"""In place of a batch's DataFrame."""


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


class Idempotent(Plain):
    """Skips a batch whose number it has written."""

    def write(self, run: SparkRun, offset: StreamOffset, read: Read) -> None:
        key = (run.query.checkpoint.query_id, offset.seq)
        rows = read(offset.batch()) if key not in self._written else {}
        if key not in self._written:  # another run may have been faster
            self._written.add(key)
            self._truth.processed_by(run.reader, rows)


class TableLog:
    """A model of a table's log: its commits, and the newest ``SetTransaction`` of each application.

    ``tests/delta/test_fakes.py`` runs the same cases on real logs.

    Args:
        is_described: whether Delta's writer commits, and ``DESCRIBE HISTORY`` reads, which does not report these
            numbers; else ``deltalake`` does both.
    """

    def __init__(self, table: str, *, is_described: bool) -> None:
        self.table, self._is_described = table, is_described
        self._commits = [Commit.of(0, {"operation": "CREATE TABLE"})]
        self._numbers: dict[str, int] = {}
        self._made: dict[str, int] = {}
        """The version of each application's newest commit."""

    def newest(self) -> int:
        return len(self._commits) - 1

    def commits(self, newest: int, after: int) -> Iterator[Commit]:
        yield from reversed(self._commits[after + 1 : newest + 1])

    def number(self, app_id: str) -> int | None:
        return None if self._is_described else self._numbers.get(app_id, -1)

    def restored_to(self, restore: Commit) -> int | None:
        raise AssertionError("nothing restores this table")

    def commit(self, read: int, numbers: Mapping[str, int], note: str) -> int:
        """Commit, and return the version. Of two commits with one number, one wins: no number is committed that is not
        above the application's last one, and ``deltalake`` refuses an application that committed since ``read``."""
        is_used = any(self._numbers.get(app_id, -1) >= number for app_id, number in numbers.items())
        is_late = any(self._made.get(app_id, -1) > read for app_id in numbers)
        if is_used or (is_late and not self._is_described):
            raise CommitRace(f"another commit has the number {dict(numbers)}")
        version = len(self._commits)
        self._numbers |= numbers
        self._made |= dict.fromkeys(numbers, version)
        self._commits.append(Commit.of(version, {"operation": "WRITE", "userMetadata": note, "readVersion": read}))
        return version


class Table:
    """A table with the ledger of one group. Several queries may write to it.

    What ships reads the log, decides, and makes the note of each commit (``delta.sink``, ``delta.table_history``).
    """

    def __init__(self, world: World, truth: Invariants, name: str, group: str) -> None:
        self.name = name
        self.world, self.truth, self._group = world, truth, group
        self.log = TableLog(f"/{name}", is_described=world.draws(f"log/{name}").chance(0.3))
        self._sinks: dict[str, DeltaSink] = {}  # by the name of the driver's process

    @property
    def ledger(self) -> Ledger | None:
        """The ledger in the newest version of the table; None before the first commit."""
        return TableHistory(self.log).ledger(self._group)

    def write(self, run: SparkRun, offset: StreamOffset, read: Read) -> None:
        """Write one batch, attempting it until no other writer is faster.

        Raises:
            LedgerConflict: it must not be written.
        """
        sink = self._sinks.setdefault(run.process.name, DeltaSink(f"/{self.name}"))
        query_id = run.query.checkpoint.query_id
        sink._runs[query_id] = None, self.name
        planned = PlannedBatch(query_id=query_id, batch_id=offset.seq, offsets=(offset,), root=f"/{run.query.name}")
        batch = SimulatedCommit(sink, SimulatedWriter(self, run, offset, read), NO_ROWS, planned)
        durable = table_writer.retry_races(batch.attempt, what=f"batch {offset.seq}")
        for done in durable:
            self.truth.durable(run.reader, done)  # at once: the run may act on the mark
            if not is_later(run.query.durable.get(done.stream, NO_MARK), done.seq):
                run.query.durable[done.stream] = BatchKey.of(done)
            run.marked = None if run.watched is None else run.watched.plan
        if offset not in durable and (ledger := sink._ledgers.get(offset.group)) is not None:
            run.query.void[offset.stream, offset.seq] = ledger.reset_number


class SimulatedCommit(BatchCommit):
    """The commit of a batch. Its rows are what is left out of it: :class:`SimulatedWriter` reads the others."""

    def rows_of(self, decision: WriteBatch, before: Mapping[str, Ledger | None]) -> Any:
        return decision.drop


class SimulatedWriter(TableWriter):
    """Commits to a :class:`TableLog`.

    Args:
        run, offset, read: the driver, its batch and how to read it; None for a commit of an operator.
    """

    def __init__(
        self,
        table: Table,
        run: SparkRun | None = None,
        offset: StreamOffset | None = None,
        read: Read | None = None,
    ) -> None:
        self.table = table.log.table
        self._source = table.log
        self._table, self._run, self._offset, self._read = table, run, offset, read

    def identity(self) -> str:
        return self._table.name

    def row_ends(self, starts: Mapping[TopicPartition, int] | None = None) -> dict[TopicPartition, int] | None:
        raise AssertionError("the log has every ledger")

    def commit_ledger(self, history: TableHistory, ledger: Ledger, *args: Any, **kwargs: Any) -> Ledger:
        if self._run is None:  # an operator sets it
            self._table.truth.ledger_moved(self._table.name, ledger.offsets)
            self._table.world.note(f"table {self._table.name}: the ledger is set by reset #{ledger.reset_number}")
        return super().commit_ledger(history, ledger, *args, **kwargs)

    def commit(
        self, history: TableHistory, rows: Any, numbers: Mapping[str, int], note: str, *, needed: bool
    ) -> int | None:
        table, run, offset = self._table, self._run, self._offset
        if run is None or offset is None or self._read is None:
            return table.log.commit(history.version, numbers, note)
        drop: tuple[OffsetRange, ...] = tuple(offset.batch()) if rows is None else rows
        found = {} if rows is None else self._read(_without(offset.batch(), drop))
        when_read = table.truth.truncations(found)
        run.pause(*WRITE_MS)
        if not (found or needed):
            return None
        version = table.log.commit(history.version, numbers, note)
        table.world.note(lambda: f"table {table.name}: batch {offset.seq} of {offset.stream}, without {drop}")
        table.truth.processed_by(run.reader, found, table=table.name, when_read=when_read)
        table.truth.has_already(run.reader, _held(drop, offset, history.ledger(offset.group)), table=table.name)
        return version


def _held(
    drop: tuple[OffsetRange, ...], offset: StreamOffset, ledger: Ledger | None
) -> dict[TopicPartition, tuple[int, int]]:
    """Return the dropped ranges as far as the ledger had them: the sink leaves out other records too."""
    if ledger is None:
        return {}
    found = {}
    for r in drop:
        recorded = ledger.offset_of(r.tp, offset.topic_ids.get(r.tp.topic, ""))
        if recorded is not None and r.start < (end := min(r.end, recorded)):
            found[r.tp] = (r.start, end)
    return found


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
