"""DeltaSink: writes the rows of a batch and the offsets they came from in one Delta commit.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``). Deliberately absent: Kafka,
members, the source. What a batch holds is read from Spark's checkpoint (:mod:`checkpoint`), what the table holds from
its log (:mod:`table_history`), and :func:`ledger_decision.decide` decides what is written.

The steps of a batch, in their order, are "A DeltaSink commit" in ``docs/architecture.md``. A killed driver, a replay, a
fenced driver, a deleted checkpoint and a second query of the group all end with each record in the table once.

What the ledger cannot see, :mod:`write_guard` refuses.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, get_args

from spark_group_source import command_line, compatibility
from spark_group_source.delta import (
    Writer,
    constant_rows,
    ledger_decision,
    ledger_store,
    persisted,
    replaced_rows,
    table_names,
    table_writer,
)
from spark_group_source.delta.checkpoint import PlannedBatch, keep_state, read_planned
from spark_group_source.delta.dead_letters import DeadLetters, LetterBox, LetterReplay
from spark_group_source.delta.durable_batches import report
from spark_group_source.delta.ledger_decision import SHOWN_MAX, AlreadyWritten, WriteBatch, listed
from spark_group_source.delta.ledger_format import APP_PREFIX, Ledger
from spark_group_source.delta.merge import Merge
from spark_group_source.delta.table_history import (
    BatchSkipped,
    LedgerExpired,
    LogFiles,
    OpenedLogs,
    TableHistory,
    note_of,
    note_without_ledger,
)
from spark_group_source.delta.table_writer import TableWriter
from spark_group_source.delta.write_guard import guarded_write, refused_after_failure, release_write, store_newest
from spark_group_source.errors import LedgerConflict, OptionError
from spark_group_source.host import run_files
from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.protocol.offsets import StreamOffset

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)

RECENT_COMMITS_MAX = 20
"""In how many commits a starting query looks for other groups, for a log line; one ``DESCRIBE HISTORY`` reads them."""


class DeltaSink:
    """Writes each batch to a Delta table exactly once: ``stream.writeStream.foreachBatch(DeltaSink("/lake/orders"))``.

    The first batch creates the table with its columns, if it does not exist.

    A batch without rows is committed only if it moves a position or has a part of another source, so an idle group does
    not make the table's log grow.
    The ledger knows what was written, not which rows exist: rows that ``DELETE``, ``UPDATE`` or ``MERGE`` changed are
    written again only if ``spark-group reset`` with ``--table`` moves Kafka's offsets and the ledger back together.
    After a ``RESTORE``, a ``REPLACE`` or an overwrite that removed rows of the group, the next batch is refused until
    that is done.

    A batch of a query is written to a table once: a second sink, or a second call, in one ``foreachBatch`` is refused.
    Several queries may write one table, and share a sink that has no ``checkpoint``.

    The run's statistics are also in ``_spark_group`` of the query's checkpoint, for ``spark-group`` on other hosts.

    Args:
        table: a path (it contains a slash) or a table name, looked up in the session's catalog.
        transform: returns the rows to write for the rows of the batch. Do projections here, not before ``writeStream``:
            the sink needs the columns topic, partition and offset where it leaves rows out. If it uses the rows more
            than once (``count()``, a join with themselves), set ``persist``: each use reads the batch from Kafka again.
        partition_by: the partition columns, used when the table is created, and compared when it exists.
        merge_schema: whether new columns are added to the table; otherwise they are refused. Columns of the table that
            the rows lack are null.
        writer: "native": Spark's tasks write Parquet files and ``deltalake`` commits them. "options": Delta's own
            writer, by its documented options for idempotent writes; all sources of the query then share one group.
            "auto" decides for each batch: natively, except for tables that are not on a local file system, that are on
            one while executors may run on other hosts, whose commits a catalog manages, or with constraints, NOT NULL,
            CHAR, VARCHAR, void, generated or identity columns, column mapping or other features that need Delta's write
            path, and for batches with other types than the table or with new columns that not every table can have.
            The reason is logged once.
        storage_options: credentials of the table's storage for ``deltalake``, by its names. With them a table that is
            not on a local file system is written natively.
        checkpoint: the query's ``checkpointLocation``. Needed on Spark Connect only.
        persist: whether Spark keeps the rows of a batch, on disk, until it is written.
        dead_letters: which records are bad, and the table that they are written to. None: a row that the table refuses
            ends the query.
        merge: how changes become rows, by key. None: rows are appended.
        optimize_every: after how many commits of a group the table's small files are combined (``OPTIMIZE``), when the
            batch is durable. A failure is logged. 0: never.

    Errors are raised when a batch is written.

    Raises:
        LedgerConflict: the table and the batch contradict each other. Nothing was written; the message has the commands
            that settle it. Do not retry before that.
        CheckpointMismatch: the query has no kafka-group source, or its offset cannot be read.
        BadRecords: more records are bad than ``dead_letters`` allows. Nothing was written.
        OptionError: an argument cannot work in this session.
        Exception: Delta's own errors (schema, constraints, storage), unchanged. Nothing was written, or the storage
            fails so that this cannot be read; a batch that was written is skipped when it runs again.
    """

    def __init__(
        self,
        table: str | os.PathLike[str],
        *,
        transform: "Callable[[DataFrame], DataFrame] | None" = None,
        partition_by: Sequence[str] = (),
        merge_schema: bool = False,
        writer: Writer = "auto",
        storage_options: Mapping[str, str] | None = None,
        checkpoint: str | None = None,
        persist: bool = False,
        dead_letters: DeadLetters | None = None,
        merge: Merge | None = None,
        optimize_every: int = 0,
    ) -> None:
        if writer not in get_args(Writer):
            raise OptionError(f"writer is {writer!r}; it must be one of {', '.join(get_args(Writer))}", writer=writer)
        if optimize_every < 0:
            raise OptionError(f"optimize_every is {optimize_every}; it must be 0 or more")
        self.table = table_names.canonical(table)
        self.transform = transform
        self.partition_by = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)
        self.merge_schema = merge_schema
        self.writer: Writer = writer
        self.storage_options = None if storage_options is None else dict(storage_options)
        self.checkpoint = checkpoint.rstrip("/") if checkpoint else None
        self.persist = persist
        if not isinstance(dead_letters, DeadLetters | None):
            raise OptionError(f"dead_letters is {dead_letters!r}; it must be DeadLetters({dead_letters!r})")
        self.dead_letters = dead_letters
        if merge is not None and writer == "native":
            raise OptionError("a merge is a commit of Delta Lake: leave out writer='native'")
        self.merge = merge
        self.optimize_every = optimize_every
        self._is_optimize_due = False
        self._runs: dict[str, tuple[str | None, str]] = {}
        """By query id: the id of the newest run, and the id of the table that its first batch found."""
        self._table_id = ""
        """The id of the table that has these ledgers; empty until the first batch."""
        self._ledgers: dict[str, Ledger] = {}
        """The newest ledger of each group, with the version of the table up to which it is known."""
        self._idle_logs = OpenedLogs()

    def __repr__(self) -> str:
        return f"DeltaSink({self.table!r}, writer={self.writer!r})"

    def identity(self) -> object:
        """Return what the sinks that a function creates for each call have in common."""
        return self.table

    def tables_of(self, planned: PlannedBatch) -> "list[tuple[DeltaSink | None, PlannedBatch]]":
        """As :meth:`DeltaSinks.tables_of`: the table, with the whole batch."""
        return [(self, planned)]

    def __call__(self, df: "DataFrame", batch_id: int) -> None:
        """Write one batch; ``foreachBatch`` calls this."""
        with refused_after_failure(df.sparkSession, batch_id, self) as call:
            call.planned = planned = read_planned(df.sparkSession, batch_id, self.checkpoint)
            with persisted(df) if self.persist else nullcontext(df) as rows:
                durable = self.write(rows, planned)
        report(df.sparkSession, planned, durable, sys._getframe(1))
        self.optimize_if_due(df.sparkSession)

    def optimize_if_due(self, spark: "SparkSession") -> None:
        """Combine the table's small files if the last batch made it due. A failure is logged, and tried again with the
        next one that does."""
        if not self._is_optimize_due:
            return
        self._is_optimize_due = False
        table = self.new_writer(spark)
        try:
            table.exists()  # opens it
            table.compact()
            log.info("table %s: small files are combined", self.table)
        except Exception as exc:  # noqa: BLE001 - the batch is written, whatever Delta or the storage raises
            log.warning("table %s: small files are not combined: %s", self.table, str(exc).partition("\n")[0])

    def read_ledgers(self, spark: "SparkSession", groups: Iterable[str]) -> dict[str, Ledger]:
        """Return the ledgers of these groups in the newest version of the table; none of a group that has none."""
        table = self.new_writer(spark, self._idle_logs.take())
        if not table.exists():
            return {}
        history, found = table.history(), {}
        if history.version < 0:
            return {}
        known = self._ledgers if table.identity() == self._table_id else {}
        for group in groups:
            with suppress(LedgerExpired):
                if (ledger := history.ledger(group, known.get(group))) is not None:
                    found[group] = ledger
        self._idle_logs.put(table.log)
        return found

    def write(
        self, df: "DataFrame", planned: PlannedBatch, common: Mapping[str, Ledger] = MappingProxyType({})
    ) -> tuple[StreamOffset, ...]:
        """Write the rows of a planned batch, and mark it as void for the run on this host if the table leaves it out.

        Args:
            common: as in :func:`ledger_decision.decide`.

        Returns:
            The offsets whose rows the table has now: all but void ones.
        """
        table = self._open_table(df, planned)
        box: AbstractContextManager[LetterBox | None] = (
            nullcontext() if self.dead_letters is None else self.dead_letters.open(table, planned, self.storage_options)
        )
        with guarded_write(self._runs[planned.query_id][1], table.table, planned) as write, box as letters:
            batch = BatchCommit(self, table, df, planned, letters, common)
            durable = table_writer.retry_races(batch.attempt, what=f"batch {planned.batch_id} to table {self.table}")
            write.find_version = batch.find_version
        if not batch.has_read_rows:
            keep_state(df, planned.root)
        self._idle_logs.put(table.log)
        if planned.offsets:
            rows = {**table.changed._asdict(), "bad": 0 if letters is None else letters.written}
            run_files.count_rows(planned.offsets[0].stream, self.table, rows)
        for offset in planned.offsets:
            if offset not in durable and (ledger := batch.ledgers.get(offset.group)) is not None:
                run_files.mark_void(offset.stream, offset.seq, ledger.reset_number)
        return durable

    def release(self, planned: PlannedBatch) -> None:
        """Let the run write a batch again, which this sink has written, because another sink's table failed."""
        release_write(self._runs[planned.query_id][1], planned)

    def refusal_of(self, df: "DataFrame", planned: PlannedBatch) -> str | None:
        """Return why the table would refuse a batch, with the commands that settle it; None if it would be written, or
        the table does not exist. Nothing is written.

        Args:
            df: any rows of the batch's session.
            planned: the batch; without a ``root`` if the checkpoint does not have it.
        """
        table = self.new_writer(df.sparkSession)
        if not table.exists():
            return None
        try:
            self._check_properties(table)
            BatchCommit(self, table, df, planned, writes=False).decide(table.history())
        except (LedgerConflict, OptionError) as exc:
            return str(exc)
        return None

    def replay(self, spark: "SparkSession") -> int:
        """Write the records of the dead-letter table that are good by today's ``transform`` and rules into the table,
        each once, also if it is interrupted and called again. Call it in one process. The query may run meanwhile; one
        that writes bad records in each batch may have to be stopped.

        Returns:
            How many records were written.

        Raises:
            OptionError: the sink has no ``dead_letters``, the table does not exist, or the session has no Delta Lake.
            LedgerConflict: the query wrote bad records during each attempt to update their table.
        """
        return self.open_replay(spark).run()

    def open_replay(self, spark: "SparkSession") -> LetterReplay:
        """Return the replay that :meth:`replay` runs. Raises OptionError as it does."""
        table = self.new_writer(spark)
        if self.dead_letters is None:
            raise OptionError(f"the sink of table {self.table} has no dead_letters, so there is nothing to replay")
        if not table.exists():
            raise OptionError(table_names.no_table(spark, self.table), table=self.table)
        if self.merge is not None and self.merge.sequence_by is None:
            raise OptionError(
                "a replay would write old changes over newer ones: the merge has no sequence_by, by which they lose"
            )
        own = self.dead_letters.open_table(table, self.storage_options)
        return LetterReplay(self.dead_letters, table, own, self._transformed)

    def _open_table(self, df: "DataFrame", planned: PlannedBatch) -> TableWriter:
        """Open the table; the first batch of a run creates it if it does not exist."""
        run = self._runs.get(planned.query_id)
        is_first = run is None or planned.run_id not in (None, run[0])
        idle_log = self._idle_logs.take()
        table = self.new_writer(df.sparkSession, None if is_first else idle_log)
        if is_first:
            table_names.require_separate_folders(self.table, planned.root)
            compatibility.check_session(df.sparkSession)
            if not table.exists():
                rows = self._transformed(df)
                rows = rows if self.dead_letters is None else self.dead_letters.table_rows(rows)
                table.create(rows if self.merge is None else self.merge.table_rows(rows))
            self._check_properties(table)
            # Since an earlier run the table may have been deleted, replaced, or copied back from a backup.
            self._table_id, self._ledgers, self._idle_logs = (table_id := table.identity()), {}, OpenedLogs()
            store_newest(self._runs, planned.query_id, (planned.run_id, table_id))
            log.info("table %s: written %s", self.table, table.described_writer())
        elif table.log is not None:  # the properties are read already
            self._check_properties(table)
        return table

    def new_writer(self, spark: "SparkSession", opened: LogFiles | None = None) -> TableWriter:
        """Return what reads and writes the table, with its log if that is open. Nothing is opened before it is used."""
        return TableWriter(
            spark,
            self.table,
            writer=self.writer,
            partition_by=self.partition_by,
            merge_schema=self.merge_schema,
            merge=self.merge,
            storage_options=self.storage_options,
            log=opened,
        )

    def _check_properties(self, table: TableWriter) -> None:
        """Raise OptionError if the table does not keep the numbers of commits."""
        if (retention := table.properties().get(table_names.RETENTION)) is not None:
            name = table_names.sql_name(table.table)
            unset = f"ALTER TABLE {name} UNSET TBLPROPERTIES ('{table_names.RETENTION}')"
            raise OptionError(
                f"table {self.table} sets {table_names.RETENTION} = {retention!r}: Delta would delete the numbers of "
                "the group's commits, which distinguish a replay from a new batch. Unset it:"
                + command_line.sequence([unset]),
                table=self.table,
            )

    def _transformed(self, df: "DataFrame") -> "DataFrame":
        return df if self.transform is None else self.transform(df)


class BatchCommit:
    """The commit of one batch, attempted until no other writer is faster.

    Args:
        writes: False: nothing is committed, and :meth:`decide` says what would be.
    """

    def __init__(
        self,
        sink: DeltaSink,
        table: TableWriter,
        df: "DataFrame",
        planned: PlannedBatch,
        letters: LetterBox | None = None,
        common: Mapping[str, Ledger] = MappingProxyType({}),
        *,
        writes: bool = True,
    ) -> None:
        self.sink, self.table, self.df, self.planned = sink, table, df, planned
        self.letters, self.common, self.writes = letters, common, writes
        self._rows: dict[tuple[OffsetRange, ...], DataFrame] = {}
        """The rows to write by the ranges that are left out: the same DataFrame again after a lost race."""
        self.ledgers = sink._ledgers
        """The ledgers of the sink's table; the first batch of another query's run gives the sink other ones."""
        self._known: dict[str, Ledger] = {}
        """The sink's ledgers when this attempt started; other queries may use the sink at the same time."""
        self.find_version: Callable[[], int | None] = lambda: None
        """Returns the version of the table that the commit of this batch made; None if there is none, or the log no
        longer has it."""

    def attempt(self) -> tuple[StreamOffset, ...]:
        """Decide about the batch and commit it once, and return the offsets whose rows the table has now.

        Raises:
            CommitRace: another writer committed first; the next attempt decides again.
            LedgerConflict: nothing may be written.
        """
        planned = self.planned
        self._known = dict(self.ledgers)
        history = self._read_history()
        if not planned.offsets and self._is_recorded_without_ledger(history):
            return ()
        ledgers, decision = self.decide(history)
        if isinstance(decision, AlreadyWritten):
            log.info("table %s: already has batch %d of query %s", self.sink.table, planned.batch_id, planned.query_id)
            self.find_version = partial(self._version_of_batch, history)
        else:
            try:
                self._commit(history, ledgers, decision)
            except BatchSkipped:
                self._rows.clear()
        return decision.durable

    def decide(self, history: TableHistory) -> tuple[dict[str, Ledger | None], AlreadyWritten | WriteBatch]:
        """Return the ledgers of the batch's groups in this version of the table, and what is done with the batch.
        Raises LedgerConflict if nothing may be written."""
        planned = self.planned
        ledgers = {group: self._read_ledger(history, group) for group in {o.group: None for o in planned.offsets}}
        return ledgers, ledger_decision.decide(
            planned.offsets,
            ledgers,
            table=self.table.table,
            batch_id=planned.batch_id,
            other_sources=planned.other_sources > 0,
            common=self.common,
            scope=planned.scope,
        )

    # --- read -------------------------------------------------------------------------------------------------------

    def _version_of_batch(self, history: TableHistory) -> int | None:
        """Return the version of the table that the commit of this batch made; None if the log no longer has it."""
        found = None
        for commit in history.commits():  # newest first; later commits of the group may name the batch again
            for offset in self.planned.offsets:
                entry = commit.ledger_entry(offset.group) or {"ledger": {}}
                batch = entry["ledger"].get("streams", {}).get(offset.stream)
                if batch is not None and batch[0] < offset.seq:
                    return found
                if batch is not None and batch[0] == offset.seq:
                    found = commit.version
        return found

    def _read_history(self) -> TableHistory:
        """Read the newest version of the table. Raises LedgerConflict if the table was deleted or replaced."""
        history = self.table.history()
        newest_known = max((ledger.table_version for ledger in self._known.values()), default=0)
        is_shorter = history.version < newest_known
        if is_shorter or self.table.identity() != self.sink._runs[self.planned.query_id][1]:
            for ledger in () if is_shorter else self._known.values():
                with suppress(LedgerExpired):  # a started query decides again
                    # REPLACE TABLE is a new table with the same log
                    replaced_rows.refuse_replaced_rows(history, ledger, known=ledger, scope=self.planned.scope)
            raise LedgerConflict(
                f"table {self.sink.table} was deleted or replaced while the query runs. Nothing was written. Start the "
                "query again: with a replaced table it continues at its ledger; a deleted table is created, and the "
                "query continues at the group's position",
                table=self.sink.table,
            )
        return history

    def _is_recorded_without_ledger(self, history: TableHistory) -> bool:
        """Return whether a batch with rows of other sources only is in the table: the query's id is its application."""
        number = history.source.number(self.planned.query_id)  # None: Delta itself skips a number that is used
        return number is not None and number >= self.planned.batch_id

    def _read_ledger(self, history: TableHistory, group: str) -> Ledger | None:
        """Read the ledger of a group; None if the group never wrote to the table. Raises LedgerConflict if rows that it
        counts were replaced, or it cannot be determined."""
        known = self._known.get(group)
        try:
            ledger = history.ledger(group, known)
            if known is None and self.writes:
                self._log_ledger(history, group, ledger)
            is_new = ledger is None or not (ledger.topics or ledger.streams or ledger.reset_number)
            if is_new:
                self._check_new_group(history, group)
            if ledger is not None:
                replaced_rows.refuse_replaced_rows(history, ledger, known=known, scope=self.planned.scope)
                if not is_new:
                    self._check_new_partitions(history, ledger)
                self.ledgers[group] = ledger.at_version(history.version)
        except LedgerExpired:
            return self._new_ledger(history, group)
        return ledger

    def _check_new_group(self, history: TableHistory, group: str) -> None:
        """Raise LedgerConflict if rows of a group's first batch could be written twice: the table has no ledger of the
        group, or one that :meth:`_new_ledger` started and no batch followed."""

        def ways() -> dict[str, str]:
            return self._ways_to_continue(group, self.table.row_ends(self.planned.starts(group)))

        for offset in (o for o in self.planned.offsets if o.group == group):
            ledger_store.check_new_group(self.df.sparkSession, history, offset, ways)
        if any(commit.version == 0 for commit in history.commits()):  # the log has no gap
            return
        # The log had the CLONE that names the table with the ledger.
        self._refuse_uncounted_rows(
            group, self.planned.starts(group), "no ledger", "it may be a clone of a table that has the ledger"
        )

    def _check_new_partitions(self, history: TableHistory, ledger: Ledger) -> None:
        """Raise LedgerConflict if rows of partitions that the ledger does not know would be written twice: it may have
        begun anew after an older one expired, with the partitions of one batch, so others may have uncounted rows.

        Not those of a topic of which a former one had the name: its rows cannot be distinguished. Nor those of a batch
        that was planned before a reset, of which no row is written.
        """
        former = {topic.name for topic in ledger.former.values()}
        new = {}
        for offset in (o for o in self.planned.offsets if o.group == ledger.group):
            if offset.reset_number < ledger.reset_number:
                continue
            for tp, (start, _) in offset.ranges.items():
                topic = ledger.topic(tp.topic, offset.topic_ids.get(tp.topic, ""))
                is_former = tp.topic in former or not ledger.knows_topic(tp.topic, topic.id)
                if not is_former and topic.partition(tp.partition).offset is None:
                    new[tp] = start
        if new and not history.has_creation():
            why = "the ledger may have begun anew after an older one expired"
            self._refuse_uncounted_rows(ledger.group, new, "a ledger without that partition", why, ledger.offsets)

    def _refuse_uncounted_rows(
        self,
        group: str,
        starts: Mapping[TopicPartition, int],
        found: str,
        why: str,
        counted: Mapping[TopicPartition, int] = MappingProxyType({}),
    ) -> None:
        """Raise LedgerConflict if the table, whose log does not reach back to its creation, has rows at or behind the
        starts of partitions that the ledger does not know.

        Args:
            found: what the table has of the ledger.
            why: where the rows may come from.
            counted: the next offset of each partition that the ledger knows.
        """
        ends = self.table.row_ends(starts)
        behind = sorted((tp, end) for tp, end in (ends or {}).items() if end > starts[tp])
        if not behind:
            return
        table, (tp, end) = self.table.table, behind[0]
        raise LedgerConflict(
            f"table {table} has rows of {tp} up to offset {end - 1}, and batch {self.planned.batch_id} starts at "
            f"{starts[tp]}; it has {found} of group {group!r}. The table's log does not reach back to its creation "
            f"(delta.logRetentionDuration), so {why}. Which records of the batch the table has is not recorded there, "
            "so nothing was written. Stop the query, run one of these commands, and start the query with the same "
            "checkpoint:" + command_line.alternatives(self._ways_to_continue(group, ends, counted)),
            table=table,
            group=group,
        )

    def _log_ledger(self, history: TableHistory, group: str, ledger: Ledger | None) -> None:
        """Log at the start of a query which ledger was found, and which groups share the table."""
        recent = islice(history.commits(), RECENT_COMMITS_MAX)
        others = {str(entry["group"]) for commit in recent for entry in commit.entries} - {group}
        if ledger is None:
            found = "has no ledger of the group, which starts at its positions"
        else:
            found = f"continues at its ledger #{ledger.number} of version {ledger.table_version}"
        log.info(
            "group %s: table %s (version %d) %s; other groups in its last %d commits: %s",
            group,
            self.sink.table,
            history.version,
            found,
            RECENT_COMMITS_MAX,
            ", ".join(sorted(others)) or "none",
        )

    def _new_ledger(self, history: TableHistory, group: str) -> Ledger:
        """Start a ledger in place of one that expired with the table's log.

        Positions from the query's checkpoint, or committed in Kafka by a stream of the group, are those of the table,
        unless its last batch was not committed, or rows were replaced by a commit that left the log, too. So the rows
        must end there.

        Raises:
            LedgerConflict: the batch starts at another position, or the rows do not end there; or the group may be new,
                and rows could be written twice.
        """
        if history.number(group) is None:  # DESCRIBE HISTORY shows none, so the group may be new
            self._check_new_group(history, group)  # no ledger can be copied to it after its first commit
            if not self.writes:
                return Ledger(group=group)  # only a commit shows whether the group is new
        ledger = self.table.restarted_ledger(history, group)
        if ledger.table_version >= 0:
            return ledger  # the group is new
        batch_id, table = self.planned.batch_id, self.table.table
        offsets = [offset for offset in self.planned.offsets if offset.group == group]
        unknown = sorted({tp for offset in offsets for tp in offset.followed | offset.started & offset.ranges.keys()})
        starts = self.planned.starts(group)
        ends = self.table.row_ends(starts)
        why = ""
        if unknown:
            why = f"batch {batch_id} starts {unknown[0]} at an offset that no query of the group committed"
        elif any(commit.unsettles_ledger for commit in history.commits()):
            why = "rows of the table were replaced since then"
        elif ends is None:
            why = "the table lacks the columns topic, partition and offset, which show where its rows end"
        elif differing := sorted(tp for tp, start in starts.items() if ends.get(tp, 0) != start):
            tp = differing[0]
            last = (
                f"its rows of {tp} end at offset {ends[tp]}"
                if tp in ends
                else f"it has no row {starts[tp] - 1} of {tp}"
            )
            why = f"batch {batch_id} starts {tp} at {starts[tp]}, where the table does not end: {last}"
        if why:
            raise LedgerConflict(
                f"the last commit of group {group!r} in table {table} is older than the table's log "
                f"(delta.logRetentionDuration), and {why}. Which records the table holds is unknown, so nothing was "
                "written. Stop the query, run one of these commands (or the same with another position of reset), and "
                "start the query with the same checkpoint:"
                + command_line.alternatives(self._ways_to_continue(group, ends)),
                table=table,
                group=group,
            )
        log.warning(
            "group %s: its last commit is older than the log of table %s; a new ledger starts at the query's positions",
            group,
            self.sink.table,
        )
        return ledger.at_version(history.version)

    def _ways_to_continue(
        self,
        group: str,
        ends: Mapping[TopicPartition, int] | None,
        counted: Mapping[TopicPartition, int] = MappingProxyType({}),
    ) -> dict[str, str]:
        """Return the commands by which a group continues whose ledger is unknown, by purpose: from the offset after the
        last row of each partition, where known, and the next offset of each one that the ledger knows."""
        table, batch_id, starts = self.table.table, self.planned.batch_id, self.planned.starts(group)
        here = table_names.reset_command(group, table, *self.planned.to_start(group))
        if not any(end > starts[tp] for tp, end in (ends or {}).items()):
            return {f"continue where batch {batch_id} starts": here}
        # Of all partitions: after a reset the query reads the committed offsets of those that are not named, which may
        # be behind the rows, or above rows that a RESTORE removed.
        all_ends = self.table.row_ends() or {}
        behind = {
            tp: max(start, counted[tp]) if tp in counted else all_ends.get(tp, start) for tp, start in starts.items()
        }
        to_ends = table_names.reset_command(group, table, *table_names.to_offsets(behind))
        return {
            "continue behind the rows in the table": to_ends,
            f"write them again, and continue where batch {batch_id} starts": here,
        }

    # --- write ------------------------------------------------------------------------------------------------------

    @property
    def has_read_rows(self) -> bool:
        """Whether the rows of the batch were read, so that Spark has the state of a stateful query."""
        return bool(self._rows)

    def _commit(self, history: TableHistory, before: Mapping[str, Ledger | None], decision: WriteBatch) -> None:
        sink, planned = self.sink, self.planned
        ledgers = {group: ledger.with_next_number() for group, ledger in decision.ledgers.items()}
        now_ms = table_writer.now_ms()
        docs = {
            group: ledger.to_json_dict(before[group], self.planned.starts(group), now_ms=now_ms)
            for group, ledger in ledgers.items()
        }
        numbers = {APP_PREFIX + group: ledger.number for group, ledger in ledgers.items()}
        version = self.table.commit(
            history,
            self.rows_of(decision, before) if decision.reads_rows else None,
            numbers or {planned.query_id: planned.batch_id},
            note_of(docs, read=history.version) if docs else note_without_ledger(planned.query_id, planned.batch_id),
            needed=bool(decision.drop) or decision.changes_ledger or planned.other_sources > 0,
        )
        if version is None:
            log.debug("table %s: no ledger to commit in batch %d of %s", sink.table, planned.batch_id, planned.query_id)
            return
        self.find_version = lambda: version
        every = sink.optimize_every
        sink._is_optimize_due |= every > 0 and any(ledger.number % every == 0 for ledger in ledgers.values())
        if version == history.version + 1:  # no other commit came in between
            self.ledgers |= {group: ledger.at_version(version) for group, ledger in ledgers.items()}
        self._log_decision(decision)
        log.debug(
            "table %s: batch %d of query %s is version %d", sink.table, planned.batch_id, planned.query_id, version
        )

    def rows_of(self, decision: WriteBatch, before: Mapping[str, Ledger | None]) -> "DataFrame":
        """Return the rows to write, after the commit of the bad records among them."""
        drop = decision.drop
        if drop not in self._rows:
            source = without_ranges(self.df, drop, self.sink.table)
            rows = self.sink._transformed(source)
            if self.letters is not None:
                rows = self.letters.good_rows(source, rows, before, decision.ledgers)
            self._rows[drop] = rows
        return self._rows[drop]

    def _log_decision(self, decision: WriteBatch) -> None:
        """Log the rows that were left out, and the ranges that another consumer read."""
        for offset, comparison in zip(self.planned.offsets, decision.comparisons, strict=True):
            where = f"group {offset.group}: batch {self.planned.batch_id}, table {self.sink.table}"
            if comparison.void:
                log.warning(
                    "%s: planned before reset #%d, so none of it is written: %s",
                    where,
                    comparison.ledger.reset_number,
                    listed(comparison.drop) or "it has no records",
                )
            elif comparison.drop:
                to = table_names.to_offsets({tp: start for tp, start, _ in comparison.drop[:SHOWN_MAX]})
                log.warning(
                    "%s: %d offsets are already in the table and are left out: %s; if the group was moved back to "
                    "write them again, stop the query, run %s, and start it with the same checkpoint",
                    where,
                    sum(r.size for r in comparison.drop),
                    listed(comparison.drop),
                    command_line.in_sentence(table_names.reset_command(offset.group, self.sink.table, *to)),
                )
            if comparison.removed:
                log.warning(
                    "%s: planned before its log was truncated, so these records are left out: %s; the query reads "
                    "those that are in the log now",
                    where,
                    listed(comparison.removed),
                )
            if comparison.recreated:
                topics = ", ".join(comparison.recreated)
                log.warning("%s: topic %s was deleted and recreated; its offsets start again", where, topics)
            if comparison.skipped:
                log.info("%s: another consumer of the group read %s", where, listed(comparison.skipped))


def without_ranges(df: "DataFrame", drop: Sequence[OffsetRange], table: str) -> "DataFrame":
    """Return the rows of a batch without the given ranges, found by the columns topic, partition and offset.

    Raises:
        LedgerConflict: the rows do not have these columns with their types.
    """
    if not drop:
        return df
    from pyspark.sql import functions as F

    types = [(field.name, field.dataType.simpleString()) for field in df.schema.fields]
    columns = table_names.RECORD_COLUMNS
    if any(types.count(column) != 1 for column in columns.items()):
        raise LedgerConflict(
            f"rows of {listed(drop)} must be left out of table {table} (they are there already, or were planned "
            f"before a reset), and the sink cannot find them: it needs the columns {', '.join(columns)} with the "
            f"source's types, and the batch has {dict(types)}. Nothing was written. Select and rename columns in "
            "DeltaSink(..., transform=...), not before writeStream",
            table=table,
        )
    # A join, not a chain of conditions: there may be thousands of ranges. Rows with a null topic stay.
    left_out = [dict(zip("tpab", (*r.tp, r.start, r.end), strict=True)) for r in drop]
    found = constant_rows(df.sparkSession, left_out, "t string, p int, a bigint, b bigint")
    ranges = found.select(*(F.col(c).alias(f"_drop_{c}") for c in "tpab"))
    is_dropped = (
        (F.col("topic") == F.col("_drop_t"))
        & (F.col("partition") == F.col("_drop_p"))
        & (F.col("offset") >= F.col("_drop_a"))
        & (F.col("offset") < F.col("_drop_b"))
    )
    return df.join(F.broadcast(ranges), is_dropped, "left_anti")
