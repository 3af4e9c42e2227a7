"""DeltaSink: the rows of a batch and the offsets they came from, in one Delta commit.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``). Deliberately absent: Kafka,
members, the source: what a batch holds comes from Spark's checkpoint (:mod:`checkpoint`), what the table holds from
its log (:mod:`kept`), and what follows from the two from :func:`ledger.decide`.

Two tiers:

- **transaction** (classic Spark with the delta-spark jar): one commit holds the rows, a ``SetTransaction(query id,
  batch id)``, the ledger of the group and the offset JSON. Before it the batch is compared with the ledger, in the same
  transaction. A killed driver, a replay, a zombie, a deleted checkpoint and a second query of the group all end with
  each record in the table once.
- **writer-options** (Spark Connect; platforms with Delta classes of their own): one commit holds the rows, the
  ``SetTransaction`` and the offset JSON. It protects from a killed driver, a replay and a zombie *of the same
  checkpoint*, and refuses to go on behind a ``RESTORE`` that took rows of the same checkpoint away. It does not protect
  from a deleted checkpoint, a second query of the group, or an operator's rewind: there the records between Kafka's
  committed offset and the table are written twice.
"""

import json
import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, assert_never, get_args

from pyspark.errors import PySparkException

from spark_group_source.delta import deltalog, history, kept, ledger, rewound, turns
from spark_group_source.delta.checkpoint import PlannedBatch, read_planned
from spark_group_source.delta.ledger import Mixed, Recorded, Refused, Retired, Unaware, Write
from spark_group_source.errors import LedgerConflict, OptionError
from spark_group_source.group.offsets import StreamOffset
from spark_group_source.host import runs
from spark_group_source.model import OffsetRange

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameWriter, SparkSession

log = logging.getLogger(__name__)

Tier = Literal["auto", "transaction", "writer-options"]

_NO_TABLE = {
    "TABLE_OR_VIEW_NOT_FOUND",
    "DELTA_MISSING_DELTA_TABLE",
    "DELTA_TABLE_NOT_FOUND",
    "DELTA_PATH_DOES_NOT_EXIST",
}
"""The conditions under which ``DESCRIBE DETAIL`` says that there is no table."""

_NOT_THERE = {*_NO_TABLE, "DELTA_TABLE_ONLY_OPERATION"}
"""The same for ``DESCRIBE HISTORY``."""

ROW_COLUMNS = {"topic": "string", "partition": "int", "offset": "bigint"}
"""The columns by which rows that are in the table already are left out."""


class DeltaSink:
    """Writes each batch to a Delta table exactly once: ``stream.writeStream.foreachBatch(DeltaSink("/lake/orders"))``.

    The table is created at the first batch, with the columns of that batch, if it does not exist. A table that lacks
    Delta's ``domainMetadata`` feature gets it (the transaction tier only; a commit of its own, said in the log).

    A batch without rows is committed only if it moves a position, so an idle group does not make the table's log grow.
    The ledger knows what was written, not what is there: after ``REPLACE`` or ``DELETE``, rows come back only if Kafka
    and the ledger are moved back together, by ``spark-group reset`` with ``--table``. After a ``RESTORE`` that took
    rows of the group away, the next batch is refused until that is done; with writer options, which keep no ledger,
    until the query has a new checkpoint.

    A batch of a query goes into a table once: a second sink, or a second call, in one ``foreachBatch`` is refused.
    Several queries may write one table, and share a sink that has no ``checkpoint``.

    Args:
        table: a path (it has a slash in it) or a table name, looked up in the session's catalog.
        transform: makes the rows to write from the rows of the batch. Give the projection here, not before
            ``writeStream``: the sink needs the columns topic, partition and offset where it has to leave rows out.
            Rows must not be read more than once in it (no ``count()``): each action reads the batch again.
        partition_by: the partition columns, used when the table is created, and compared when it exists.
        merge_schema: whether new columns are added to the table; otherwise they are an error of Delta's.
        tier: "auto" takes the transaction tier where it works and says in the log where it does not; "transaction"
            raises there; "writer-options" is described in this module.
        checkpoint: the query's ``checkpointLocation``. Needed on Spark Connect only.

    Raises (when a batch is written):
        LedgerConflict: the table and the batch contradict each other. Nothing was written; the message says what
            settles it. Do not retry before that.
        CheckpointMismatch: the query has no kafka-group source, or its offset cannot be read.
        OptionError: an argument cannot work in this session.
        Delta's own errors (schema, constraints, storage), unchanged. Nothing was written.
    """

    def __init__(
        self,
        table: str | os.PathLike[str],
        *,
        transform: "Callable[[DataFrame], DataFrame] | None" = None,
        partition_by: Sequence[str] = (),
        merge_schema: bool = False,
        tier: Tier = "auto",
        checkpoint: str | None = None,
    ) -> None:
        if tier not in get_args(Tier):
            raise OptionError(f"tier {tier!r}: must be one of {', '.join(get_args(Tier))}", tier=tier)
        self.table = deltalog.canonical(table)
        self.transform = transform
        self.partition_by = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)
        self.merge_schema = merge_schema
        self.tier = tier
        self.checkpoint = checkpoint.rstrip("/") if checkpoint else None
        self._told: set[str] = set()
        self._table_id = ""  # once the table is there
        self._looked_to: dict[str, int] = {}  # for each group the version that nobody restored the table before
        self._looked_back_to = -1  # the same with writer options, for all groups

    def __repr__(self) -> str:
        return f"DeltaSink({self.table!r}, tier={self.tier!r})"

    def __call__(self, df: "DataFrame", batch_id: int) -> None:
        """Write one batch; ``foreachBatch`` calls this."""
        planned = read_planned(df.sparkSession, batch_id, self.checkpoint)
        write = self._write_in_transaction if self._has_transactions(df.sparkSession) else self._write_by_options
        for offset in write(df, planned):
            runs.mark_durable(offset.stream, offset.seq)

    def _has_transactions(self, spark: "SparkSession") -> bool:
        if self.tier == "writer-options":
            return False
        if deltalog.available(spark):
            return True
        if self.tier == "transaction":
            raise OptionError(
                "tier='transaction' needs Delta's open-source Java classes: a classic Spark session with the "
                "delta-spark jar, not Spark Connect. tier='writer-options' works here, with the weaker guarantees that "
                "its documentation lists"
            )
        self._tell_once(
            "Delta's Java classes cannot be reached in this session, so DeltaSink uses writer options. A replayed "
            "batch is written once; a deleted checkpoint, a second query of the group or a rewind of it can write "
            "records twice"
        )
        return False

    def _tell_once(self, message: str, *args: object) -> None:
        if message not in self._told:
            self._told.add(message)
            log.warning(message, *args)

    # The transaction tier

    def _write_in_transaction(self, df: "DataFrame", planned: PlannedBatch) -> tuple[StreamOffset, ...]:
        target = deltalog.Table(df.sparkSession, self.table)
        if not self._table_id:
            if not target.exists():
                target.create(self._transformed(df), self.partition_by)
            target.ensure_domains()
            self._table_id = str(target.snapshot().java.metadata().id())
        with turns.turn(self._table_id, self.table, planned) as turn:
            attempt = _Attempt(self, target, df, planned, turn)
            return deltalog.retry_races(attempt, what=f"batch {planned.batch_id} to table {self.table}")

    def _transformed(self, df: "DataFrame") -> "DataFrame":
        return df if self.transform is None else self.transform(df)

    # The writer-options tier

    def _write_by_options(self, df: "DataFrame", planned: PlannedBatch) -> tuple[StreamOffset, ...]:
        spark = df.sparkSession
        if not self._table_id:
            self._ensure_table(spark, df)
            self._table_id = self.table
        with turns.turn(self._table_id, self.table, planned):
            return self._append(df, planned)

    def _append(self, df: "DataFrame", planned: PlannedBatch) -> tuple[StreamOffset, ...]:
        note = planned.user_metadata()
        try:
            at = rewound.refuse(df.sparkSession, self.table, planned.offsets, after=self._looked_back_to)
        except PySparkException as exc:
            raise rewound.deleted(self.table) if exc.getCondition() in _NOT_THERE else exc from exc
        self._looked_back_to = at
        writer = (
            self._transformed(df)
            .write.format("delta")
            .mode("append")
            .option("txnAppId", planned.query_id)
            .option("txnVersion", planned.batch_id)
            .option("userMetadata", note)
            .option("mergeSchema", self.merge_schema)
        )
        self._save(writer.partitionBy(*self.partition_by) if self.partition_by else writer)
        # Delta skips a batch that it has recorded, without a word, whatever that batch held.
        if planned.offsets and not history.recorded(df.sparkSession, self.table, note):
            raise self._other_content(planned)
        return planned.offsets

    def _ensure_table(self, spark: "SparkSession", df: "DataFrame") -> None:
        try:
            detail = spark.sql(f"DESCRIBE DETAIL {deltalog.sql_name(self.table)}").first()
        except PySparkException as exc:
            if exc.getCondition() not in _NO_TABLE:
                raise
            # A table of its own commit: CREATE AS SELECT would not compare the batch's number.
            empty = spark.createDataFrame([], self._transformed(df).schema).write.format("delta").mode("ignore")
            self._save(empty.partitionBy(*self.partition_by) if self.partition_by else empty)
            return
        retention = (detail["properties"] if detail else {}).get(deltalog.RETENTION)
        if retention is not None:
            raise OptionError(
                f"table {self.table} sets {deltalog.RETENTION} = {retention!r}. Delta would forget which batches it "
                "has, and here nothing else prevents a replay from being written twice. Unset it: ALTER TABLE "
                f"{deltalog.sql_name(self.table)} UNSET TBLPROPERTIES ('{deltalog.RETENTION}')",
                table=self.table,
            )

    def _save(self, writer: "DataFrameWriter") -> None:
        if deltalog.is_path(self.table):
            writer.save(self.table)
        else:
            writer.saveAsTable(self.table)

    def _other_content(self, planned: PlannedBatch) -> LedgerConflict:
        return LedgerConflict(
            f"table {self.table} has batch {planned.batch_id} of query {planned.query_id} already, but not with the "
            f"offsets {planned.user_metadata()[:500]}: none of the table's last "
            f"{history.steps(planned.user_metadata())[-1]} commits holds them, and its rows were not written. Either a "
            "second run of this query wrote another batch under this number (is the checkpoint used twice?), or the "
            "commit is too old to be seen. Look at "
            f"`DESCRIBE HISTORY {deltalog.sql_name(self.table)}` (userMetadata); to go on, start the query with a new "
            "checkpointLocation once the group's position in Kafka is right",
            table=self.table,
            query_id=planned.query_id,
            batch_id=planned.batch_id,
        )


class _Attempt:
    """The attempts to commit one batch. Files are written once, and again only if the rows to leave out changed."""

    def __init__(
        self, sink: DeltaSink, target: deltalog.Table, df: "DataFrame", planned: PlannedBatch, turn: turns.Turn
    ) -> None:
        self.sink, self.target, self.df, self.planned, self.turn = sink, target, df, planned, turn
        self._written: deltalog.Written | None = None
        self._without: tuple[OffsetRange, ...] = ()

    def __call__(self) -> tuple[StreamOffset, ...]:
        """One attempt; returns the offsets whose rows the table has now.

        Raises CommitRace if another writer was first; the next one decides anew.
        """
        sink, planned = self.sink, self.planned
        txn = self.target.begin()
        if txn.snapshot.version < 0:
            raise rewound.deleted(sink.table)
        self._check_retention(txn.snapshot)
        decision = ledger.decide(
            planned.offsets,
            {o.group: self._ledger(txn.snapshot, o.group) for o in planned.offsets},
            recorded=txn.recorded(planned.query_id) >= planned.batch_id,
            others=planned.other_sources > 0,
        )
        match decision:
            case Recorded():
                self._confirm(decision)
                return decision.durable
            case Refused() | Retired() | Unaware() | Mixed():
                raise ledger.conflict(sink.table, decision, planned.batch_id)
            case Write():
                self._write(txn, decision)
                return decision.durable
            case _:
                assert_never(decision)

    def _ledger(self, snapshot: deltalog.Snapshot, group: str) -> ledger.Ledger | None:
        """The ledger of a group, if the rows that it stands for are still there."""
        sink, found = self.sink, kept.in_snapshot(snapshot, group)
        if found is not None:
            kept.refuse_restored(
                self.df.sparkSession, sink.table, snapshot, found, after=sink._looked_to.get(group, -1)
            )
        sink._looked_to[group] = snapshot.version
        return found

    def _confirm(self, decision: Recorded) -> None:
        """The table has a batch of this number. Make sure that it is this one."""
        sink, planned = self.sink, self.planned
        for group, missing in decision.uncovered.items():
            # The ledger may also be behind because writer options wrote the batch, or an operator set it back since.
            if not history.recorded(self.df.sparkSession, sink.table, planned.user_metadata()):
                raise LedgerConflict(
                    f"table {sink.table} has batch {planned.batch_id} of query {planned.query_id} already, but its "
                    f"ledger of group {group!r} does not cover {ledger.shown(missing)}. A second run of this query "
                    "wrote another batch under this number (is the checkpoint used twice?). Nothing was written. Stop "
                    "the other run. Then start this query with a new checkpointLocation: it continues at the ledger",
                    table=sink.table,
                    query_id=planned.query_id,
                    batch_id=planned.batch_id,
                    missing=[(r.tp.topic, r.tp.partition, r.start, r.end) for r in missing],
                )
        log.info("batch %d of query %s is in table %s already", planned.batch_id, planned.query_id, sink.table)

    def _write(self, txn: deltalog.Transaction, decision: Write) -> None:
        sink, planned = self.sink, self.planned
        written = self._files(txn, decision) if decision.rows else deltalog.NO_FILES
        if not (written.actions or decision.drop or decision.changed):
            log.debug("batch %d of query %s: no rows, no new position", planned.batch_id, planned.query_id)
            return
        version = txn.commit(
            written,
            {ledger.DOMAIN_PREFIX + group: after.to_json() for group, after in decision.ledgers.items()},
            app_id=planned.query_id,
            batch_id=planned.batch_id,
            user_metadata=planned.user_metadata(),
        )
        self.turn.version = version
        if version == txn.snapshot.version + 1:  # nobody came in between
            self.sink._looked_to |= dict.fromkeys(decision.ledgers, version)
        self._tell(decision)
        log.debug("batch %d of query %s is version %d of %s", planned.batch_id, planned.query_id, version, sink.table)

    def _files(self, txn: deltalog.Transaction, decision: Write) -> deltalog.Written:
        if self._written is not None and self._without == decision.drop and txn.adopt(self._written):
            return self._written
        rows = self.sink._transformed(without(self.df, decision.drop, self.sink.table))
        self._written = txn.write(rows, partition_by=self.sink.partition_by, merge_schema=self.sink.merge_schema)
        self._without = decision.drop
        return self._written

    def _tell(self, decision: Write) -> None:
        """What someone may want to know of a batch that was written."""
        for offset, verdict in zip(self.planned.offsets, decision.verdicts, strict=True):
            where = f"batch {self.planned.batch_id}, group {offset.group}, table {self.sink.table}"
            if verdict.void:
                log.warning(
                    "%s: planned before reset %d of the group, so nothing of it is written: %s",
                    where,
                    verdict.ledger.epoch,
                    ledger.shown(verdict.drop),
                )
            elif verdict.drop:
                log.warning(
                    "%s: %d offsets are in the table already and are left out: %s",
                    where,
                    sum(r.size for r in verdict.drop),
                    ledger.shown(verdict.drop),
                )
            if verdict.recreated:
                topics = ", ".join(verdict.recreated)
                log.warning("%s: topic %s was deleted and created again; its offsets start afresh", where, topics)
            if verdict.skipped:
                log.info("%s: others had %s", where, ledger.shown(verdict.skipped))

    def _check_retention(self, snapshot: deltalog.Snapshot) -> None:
        retention = snapshot.properties().get(deltalog.RETENTION)
        if retention is not None:
            self.sink._tell_once(
                "table %s sets %s = %s: Delta forgets after that time which batches it has, and a replay later than "
                "that is recognised only by the ledger. Unset the property",
                self.sink.table,
                deltalog.RETENTION,
                retention,
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
            f"table {table} must not get {ledger.shown(drop)} (again), and the sink cannot leave these rows out: it "
            f"needs the columns {', '.join(ROW_COLUMNS)} as the source gives them, and the batch has {dict(types)}. "
            "Nothing was written. Select and rename columns in DeltaSink(..., transform=...), not before writeStream",
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
