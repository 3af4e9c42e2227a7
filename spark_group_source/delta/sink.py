"""DeltaSink: the rows of a batch and the offsets they came from, in one Delta commit.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``). Deliberately absent: Kafka,
members, the source: what a batch holds comes from Spark's checkpoint (:mod:`checkpoint`), what the table holds from
its log (:mod:`kept`), and what follows from the two from :func:`ledger_decision.decide`.

Every commit holds the rows, the number of the group's commits as a ``SetTransaction``, and the offset JSON with the
ledger of the group in its ``userMetadata``. A batch is compared with the ledger before it; of two commits with one
number one wins, and the other batch is judged anew. A killed driver, a replay, a zombie, a deleted checkpoint and a
second query of the group all end with each record in the table once. Which writer makes the commit: :mod:`access`.
"""

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from spark_group_source import compatibility
from spark_group_source.delta import (
    checkpoint_status,
    commit_race,
    ledger_decision,
    ledger_store,
    table_names,
    table_writer,
    write_guard,
)
from spark_group_source.delta.checkpoint import ONLY_RUN, PlannedBatch, read_planned
from spark_group_source.delta.ledger_decision import Write
from spark_group_source.delta.ledger_format import APP_PREFIX, Ledger
from spark_group_source.delta.table_history import Aged, LogFiles, TableHistory, note_of
from spark_group_source.delta.table_writer import TableWriter, Writer
from spark_group_source.errors import LedgerConflict, OptionError
from spark_group_source.host import run_files
from spark_group_source.model import OffsetRange
from spark_group_source.protocol.offsets import StreamOffset

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)

ROW_COLUMNS = {"topic": "string", "partition": "int", "offset": "bigint"}
"""The columns that tell which record a row is."""


class DeltaSink:
    """Writes each batch to a Delta table exactly once: ``stream.writeStream.foreachBatch(DeltaSink("/lake/orders"))``.

    The table is created at the first batch, with the columns of that batch, if it does not exist.

    A batch without rows is committed only if it moves a position, so an idle group does not make the table's log grow.
    The ledger knows what was written, not what is there: after ``REPLACE`` or ``DELETE``, rows come back only if Kafka
    and the ledger are moved back together, by ``spark-group reset`` with ``--table``. After a ``RESTORE`` that took
    rows of the group away, the next batch is refused until that is done.

    A batch of a query goes into a table once: a second sink, or a second call, in one ``foreachBatch`` is refused.
    Several queries may write one table, and share a sink that has no ``checkpoint``.

    What the run does is also said in ``_spark_group`` of the query's checkpoint, for ``spark-group`` on other hosts.

    Args:
        table: a path (it has a slash in it) or a table name, looked up in the session's catalog.
        transform: makes the rows to write from the rows of the batch. Give the projection here, not before
            ``writeStream``: the sink needs the columns topic, partition and offset where it has to leave rows out.
            Rows must not be read more than once in it (no ``count()``): each action reads the batch again.
        partition_by: the partition columns, used when the table is created, and compared when it exists.
        merge_schema: whether new columns are added to the table; otherwise they are an error of Delta's.
        writer: "native": Spark's tasks write Parquet files and ``deltalake`` commits them. "options": Delta's own
            writer, by its documented options for idempotent writes; the sources of the query are of one group then.
            "auto" decides for each batch: natively, but for tables that are not on a local file system, whose commits
            a catalog manages, or with constraints, NOT NULL, generated or identity columns, column mapping or other
            features that need Delta's write path, and for batches with other columns or types than the table. The log
            has the reason, once.
        storage_options: credentials of the table's storage for ``deltalake``, by its names. With them a table is
            written natively that is not on a local file system.
        checkpoint: the query's ``checkpointLocation``. Needed on Spark Connect only.

    Raises (when a batch is written):
        LedgerConflict: the table and the batch contradict each other. Nothing was written; the message says what
            settles it. Do not retry before that.
        CheckpointMismatch: the query has no kafka-group source, or its offset cannot be read.
        OptionError: an argument cannot work in this session.
        SetupError: the session's Java or Delta Lake does not fit.
        Delta's own errors (schema, constraints, storage), unchanged. Nothing was written.
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
    ) -> None:
        table_writer.check_writer(writer)
        self.table = table_names.canonical(table)
        self.transform = transform
        self.partition_by = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)
        self.merge_schema = merge_schema
        self.writer: Writer = writer
        self.storage_options = None if storage_options is None else dict(storage_options)
        self.checkpoint = checkpoint.rstrip("/") if checkpoint else None
        self._table_id = ""  # once the table is there
        self._known: dict[str, Ledger] = {}  # of each group, with the version up to which the table's commits are known
        self._logs: list[LogFiles] = []  # opened by batches that are written

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_logs": []}

    def __repr__(self) -> str:
        return f"DeltaSink({self.table!r}, writer={self.writer!r})"

    def __call__(self, df: "DataFrame", batch_id: int) -> None:
        """Write one batch; ``foreachBatch`` calls this."""
        spark = df.sparkSession
        planned = read_planned(spark, batch_id, self.checkpoint)
        table = TableWriter(
            spark,
            self.table,
            writer=self.writer,
            partition_by=self.partition_by,
            merge_schema=self.merge_schema,
            storage_options=self.storage_options,
            log=self._logs.pop() if self._logs else None,
        )
        if not self._table_id:
            table_names.require_apart(self.table, planned.root)
            compatibility.check_session(spark)
            self._prepare(table, df)
        elif table.log is not None:
            self._refuse_retention(table)  # the properties are at hand
        with write_guard.turn(self._table_id, self.table, planned) as turn:
            attempt = _Attempt(self, table, df, planned, turn)
            written = commit_race.retry_races(attempt, what=f"batch {planned.batch_id} to table {self.table}")
        if table.log is not None:
            self._logs.append(table.log)
        safe = write_guard.everywhere(planned)
        for offset in written:
            if safe:
                run_files.mark_durable(offset.stream, offset.seq)
            _notify(spark, planned, offset)

    def _prepare(self, table: TableWriter, df: "DataFrame") -> None:
        """Make sure that the table is there and remembers the numbers of commits."""
        if not table.exists():
            table.create(self._transformed(df))
        self._refuse_retention(table)
        self._table_id = table.identity()
        log.info("table %s is written %s", self.table, table.described_writer())

    def _refuse_retention(self, table: TableWriter) -> None:
        retention = table.retention()
        if retention is not None:
            raise OptionError(
                f"table {self.table} sets {table_names.RETENTION} = {retention!r}: Delta would forget the "
                "numbers of the group's commits, which tell a replay from a new batch. Unset it: ALTER TABLE "
                f"{table_names.sql_name(self.table)} UNSET TBLPROPERTIES ('{table_names.RETENTION}')",
                table=self.table,
            )

    def _transformed(self, df: "DataFrame") -> "DataFrame":
        return df if self.transform is None else self.transform(df)


class _Attempt:
    """The attempts to commit one batch."""

    def __init__(
        self, sink: DeltaSink, table: TableWriter, df: "DataFrame", planned: PlannedBatch, turn: write_guard.Turn
    ) -> None:
        self.sink, self.table, self.df, self.planned, self.turn = sink, table, df, planned, turn
        self._rows: dict[tuple[OffsetRange, ...], DataFrame] = {}

    def __call__(self) -> tuple[StreamOffset, ...]:
        """One attempt; returns the offsets whose rows the table has now.

        Raises CommitRace if another writer was first; the next one decides anew.
        """
        sink, planned, known = self.sink, self.planned, dict(self.sink._known)  # other queries may use the sink, too
        history = self.table.history()
        newest_known = max((found.table_version for found in known.values()), default=0)
        if history.version < newest_known or self.table.identity() != sink._table_id:
            raise LedgerConflict(
                f"table {sink.table} was deleted while the query runs, with what it knew of the query. Nothing was "
                "written. Start the query again to create the table anew; it goes on at the group's position in Kafka",
                table=sink.table,
            )
        if not planned.offsets:  # rows of other sources only: the query itself counts as the application
            number = history.source.number(planned.query_id)  # None: Delta itself skips a number that is taken
            if number is not None and number >= planned.batch_id:
                return ()
        ledgers = {
            offset.group: self._ledger(history, offset.group, known.get(offset.group)) for offset in planned.offsets
        }
        others = planned.other_sources > 0
        decision = ledger_decision.decide(
            planned.offsets, ledgers, table=sink.table, batch_id=planned.batch_id, others=others
        )
        if isinstance(decision, Write):
            self._write(history, decision)
        else:
            log.info("batch %d of query %s is in table %s already", planned.batch_id, planned.query_id, sink.table)
        return decision.durable

    def _ledger(self, history: TableHistory, group: str, known: Ledger | None) -> Ledger | None:
        """The ledger of a group, if the rows that it stands for are still there."""
        try:
            found = history.ledger(group, known)
        except Aged as aged:
            return self._begun_anew(history, group, aged)
        if found is not None:
            ledger_store.refuse_restored(history, found, after=-1 if known is None else known.table_version)
            self.sink._known[group] = found.at(history.version)
        return found

    def _begun_anew(self, history: TableHistory, group: str, aged: Aged) -> Ledger:
        """A ledger in the place of one that the table's log does not go back to. Positions of the query's checkpoint,
        or committed at Kafka by a stream of the group, are where the table stands; others are not known to be."""
        counted = self.table.number_of(history, group) if aged.number is None else aged.number
        if isinstance(counted, Ledger):
            return counted
        mine = [offset for offset in self.planned.offsets if offset.group == group]
        unknown = sorted({tp for offset in mine for tp in offset.followed | offset.began})
        why = f"batch {self.planned.batch_id} begins {unknown[0]} at an offset no query committed" if unknown else ""
        if any(commit.restore is not None for commit in history.commits()):
            why = "the table was restored since"
        if why:
            table, reset = self.sink.table, f"`spark-group reset --group {group} --table {self.sink.table}`"
            raise LedgerConflict(
                f"group {group!r} wrote to table {table}, but its last commit is older than the table's log, and "
                f"{why}. Which records the table has is not known, so nothing was written. Stop the query, set where "
                f"it goes on: {reset} with the position you want, and start it again with the same checkpoint",
                table=table,
                group=group,
            )
        log.warning(
            "group %s: its last commit is older than the log of table %s; a new ledger begins where the query stands",
            group,
            self.sink.table,
        )
        return Ledger(group=group, number=counted, table_version=history.version)

    def _write(self, history: TableHistory, decision: Write) -> None:
        sink, planned = self.sink, self.planned
        after = {group: found.written() for group, found in decision.ledgers.items()}
        numbers = {APP_PREFIX + group: found.number for group, found in after.items()}
        version = self.table.commit(
            history,
            self._rows_without(decision.drop) if decision.rows else None,
            numbers or {planned.query_id: planned.batch_id},
            note_of(planned.offsets, after.values(), read=history.version),
            needed=bool(decision.drop) or decision.changed or (not after and planned.other_sources > 0),
        )
        if version is None:
            log.debug("batch %d of query %s: no rows, no new position", planned.batch_id, planned.query_id)
            return
        self.turn.version = version
        if version == history.version + 1:  # nobody came in between
            sink._known |= {group: found.at(version) for group, found in after.items()}
        self._tell(decision)
        log.debug("batch %d of query %s is version %d of %s", planned.batch_id, planned.query_id, version, sink.table)

    def _rows_without(self, drop: tuple[OffsetRange, ...]) -> "DataFrame":
        if drop not in self._rows:
            self._rows[drop] = self.sink._transformed(without(self.df, drop, self.sink.table))
        return self._rows[drop]

    def _tell(self, decision: Write) -> None:
        """What someone may want to know of a batch that was written."""
        for offset, verdict in zip(self.planned.offsets, decision.verdicts, strict=True):
            where = f"batch {self.planned.batch_id}, group {offset.group}, table {self.sink.table}"
            if verdict.void:
                log.warning(
                    "%s: planned before reset %d of the group, so nothing of it is written: %s",
                    where,
                    verdict.ledger.epoch,
                    ledger_decision.shown(verdict.drop),
                )
            elif verdict.drop:
                log.warning(
                    "%s: %d offsets are in the table already and are left out: %s",
                    where,
                    sum(r.size for r in verdict.drop),
                    ledger_decision.shown(verdict.drop),
                )
            if verdict.recreated:
                topics = ", ".join(verdict.recreated)
                log.warning("%s: topic %s was deleted and created again; its offsets start afresh", where, topics)
            if verdict.skipped:
                log.info("%s: others had %s", where, ledger_decision.shown(verdict.skipped))


def _notify(spark: "SparkSession", planned: PlannedBatch, offset: StreamOffset) -> None:
    """Have the run's notices kept in its checkpoint, where one is known and can be written."""
    if planned.run_id not in (None, ONLY_RUN):
        run = checkpoint_status.run_name(str(planned.run_id))
        checkpoint_status.keep(
            run, offset.group, offset.stream, lambda: checkpoint_status.place_of(spark, planned.root)
        )


def without(df: "DataFrame", drop: Sequence[OffsetRange], table: str) -> "DataFrame":
    """The rows of a batch but those in the given ranges, found by the columns topic, partition and offset.

    Raises:
        LedgerConflict: the rows do not have these columns (any more).
    """
    if not drop:
        return df
    from pyspark.sql import functions as F

    types = [(field.name, field.dataType.simpleString()) for field in df.schema.fields]
    if any(types.count(column) != 1 for column in ROW_COLUMNS.items()):
        raise LedgerConflict(
            f"table {table} must not get {ledger_decision.shown(drop)} (again), and the sink cannot leave these rows "
            f"out: it needs the columns {', '.join(ROW_COLUMNS)} as the source gives them, and the batch has "
            f"{dict(types)}. Nothing was written. Select and rename columns in DeltaSink(..., transform=...), not "
            "before writeStream",
            table=table,
        )
    # A join, not a chain of conditions: there may be thousands of ranges. Rows with a null topic stay.
    text = json.dumps([{"t": r.tp.topic, "p": r.tp.partition, "a": r.start, "b": r.end} for r in drop])
    each = F.explode(F.from_json(F.lit(text), "array<struct<t string, p int, a bigint, b bigint>>"))
    ranges = (
        df.sparkSession.range(1).select(each.alias("r")).select(*(F.col(f"r.{c}").alias(f"_drop_{c}") for c in "tpab"))
    )
    held = (
        (F.col("topic") == F.col("_drop_t"))
        & (F.col("partition") == F.col("_drop_p"))
        & (F.col("offset") >= F.col("_drop_a"))
        & (F.col("offset") < F.col("_drop_b"))
    )
    return df.join(F.broadcast(ranges), held, "left_anti")
