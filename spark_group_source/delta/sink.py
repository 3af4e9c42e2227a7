"""DeltaSink: the rows of a batch and the offsets they came from, in one Delta commit.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``). Deliberately absent: Kafka,
members, the source: what a batch holds comes from Spark's checkpoint (:mod:`checkpoint`), what the table holds from
its log (:mod:`kept`), and what follows from the two from :func:`ledger.decide`.

Two tiers, by the way that a commit takes (:mod:`doors`). In both it holds the rows, the offset JSON and the ledger of
the group, and the batch is compared with the ledger before it; of two writers of one group one wins, and the other is
judged anew. A killed driver, a replay, a zombie, a deleted checkpoint and a second query of the group all end with each
record in the table once.

- **transaction** (classic Spark with the delta-spark jar): through Delta's classes. The ledger is also kept where it
  does not age, sources of several groups have one commit, and a lost race does not write files again.
- **writer-options** (everywhere: Spark Connect, platforms with Delta classes of their own): by Delta's documented
  options, without a table feature. The sources of a query are of one group. A ledger that nobody renewed for as long as
  the table keeps its log is made anew from the rows.
"""

import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, assert_never, get_args

from spark_group_source import fits
from spark_group_source.delta import board, deltalog, doors, kept, ledger, names, notes, races, rebuilt, turns
from spark_group_source.delta.checkpoint import ONLY_RUN, PlannedBatch, read_planned
from spark_group_source.delta.draft import Draft
from spark_group_source.delta.history import Aged
from spark_group_source.delta.ledger import Ledger, Mixed, Recorded, Refused, Retired, Unaware, Write
from spark_group_source.delta.told import Told
from spark_group_source.errors import LedgerConflict, OptionError
from spark_group_source.group.offsets import StreamOffset
from spark_group_source.host import runs
from spark_group_source.model import OffsetRange

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)

Tier = Literal["auto", "transaction", "writer-options"]


class DeltaSink:
    """Writes each batch to a Delta table exactly once: ``stream.writeStream.foreachBatch(DeltaSink("/lake/orders"))``.

    The table is created at the first batch, with the columns of that batch, if it does not exist. A table that lacks
    Delta's ``domainMetadata`` feature gets it (the transaction tier only; a commit of its own, said in the log).

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
        tier: "auto" takes the transaction tier where it works and says in the log where it does not; "transaction"
            raises there; "writer-options" is described in this module.
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
        tier: Tier = "auto",
        checkpoint: str | None = None,
    ) -> None:
        if tier not in get_args(Tier):
            raise OptionError(f"tier {tier!r}: must be one of {', '.join(get_args(Tier))}", tier=tier)
        self.table = names.canonical(table)
        self.transform = transform
        self.partition_by = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)
        self.merge_schema = merge_schema
        self.tier = tier
        self.checkpoint = checkpoint.rstrip("/") if checkpoint else None
        self._told: set[str] = set()
        self._table_id = ""  # once the table is there
        self._looked_to: dict[str, int] = {}  # for each group the version that nobody restored the table before
        self._known: dict[str, Ledger] = {}

    def __repr__(self) -> str:
        return f"DeltaSink({self.table!r}, tier={self.tier!r})"

    def __call__(self, df: "DataFrame", batch_id: int) -> None:
        """Write one batch; ``foreachBatch`` calls this."""
        spark = df.sparkSession
        planned = read_planned(spark, batch_id, self.checkpoint)
        door = doors.of(
            spark,
            self.table,
            known=self._known,
            classes=self._has_transactions(spark),
            partition_by=self.partition_by,
            merge_schema=self.merge_schema,
        )
        if not self._table_id:
            names.require_apart(self.table, planned.root)
            fits.check_session(spark)
            self._table_id = door.prepare(lambda: self._transformed(df))
        with turns.turn(self._table_id, self.table, planned) as turn:
            attempt = _Attempt(self, door, df, planned, turn)
            written = races.retry_races(attempt, what=f"batch {planned.batch_id} to table {self.table}")
        safe = turns.everywhere(planned)
        for offset in written:
            if safe:
                runs.mark_durable(offset.stream, offset.seq)
            _notify(spark, planned, offset)

    def _has_transactions(self, spark: "SparkSession") -> bool:
        if self.tier == "writer-options":
            return False
        if deltalog.available(spark):
            return True
        if self.tier == "transaction":
            raise OptionError(
                "tier='transaction' needs Delta's open-source Java classes: a classic Spark session with the "
                "delta-spark jar, not Spark Connect. tier='writer-options' works here; its documentation lists what is "
                "different"
            )
        self._tell_once(
            "Delta's Java classes cannot be reached in this session, so DeltaSink uses writer options. Its guarantees "
            "are the same, for sources of one group, as long as the table's log goes back to the group's last commit"
        )
        return False

    def _tell_once(self, message: str, *args: object) -> None:
        if message not in self._told:
            self._told.add(message)
            log.warning(message, *args)

    def _transformed(self, df: "DataFrame") -> "DataFrame":
        return df if self.transform is None else self.transform(df)


class _Attempt:
    """The attempts to commit one batch."""

    def __init__(
        self, sink: DeltaSink, door: doors.Door, df: "DataFrame", planned: PlannedBatch, turn: turns.Turn
    ) -> None:
        self.sink, self.door, self.df, self.planned, self.turn = sink, door, df, planned, turn

    def __call__(self) -> tuple[StreamOffset, ...]:
        """One attempt; returns the offsets whose rows the table has now.

        Raises CommitRace if another writer was first; the next one decides anew.
        """
        sink, planned = self.sink, self.planned
        entry = self.door.begin()
        if entry.past.version < 0:
            raise self._deleted()
        if (retention := entry.forgets()) is not None:
            sink._tell_once(
                "table %s sets %s = %s: Delta forgets after that time which batches it has, and a replay later than "
                "that is recognised only by the ledger. Unset the property",
                sink.table,
                names.RETENTION,
                retention,
            )
        ledgers = {o.group: self._ledger(entry, o.group) for o in planned.offsets}
        decision = ledger.decide(
            planned.offsets,
            ledgers,
            recorded=entry.recorded(planned.query_id, ledgers) >= planned.batch_id,
            others=planned.other_sources > 0,
        )
        match decision:
            case Recorded():
                self._confirm(decision)
                return decision.durable
            case Refused() | Retired() | Unaware() | Mixed():
                raise ledger.conflict(sink.table, decision, planned.batch_id)
            case Write():
                self._write(entry, decision)
                return decision.durable
            case _:
                assert_never(decision)

    def _ledger(self, entry: doors.Entry, group: str) -> Ledger | None:
        """The ledger of a group, if the rows that it stands for are still there."""
        sink, past = self.sink, entry.past
        try:
            found = entry.ledger(group)
        except Aged as aged:
            mine = [offset for offset in self.planned.offsets if offset.group == group]
            anew = rebuilt.from_rows(
                self.df.sparkSession, past, group, mine, number=aged.number or entry.number(group)
            ).written()
            entry.restate(anew, notes.text((), [anew], read=past.version, reason="older than the log of the table"))
            raise races.CommitRace("the ledger was made anew") from aged
        if found is not None:
            kept.refuse_restored(past, found, after=sink._looked_to.get(group, -1))
        sink._looked_to[group] = past.version
        return found

    def _deleted(self) -> LedgerConflict:
        """The error for a table that a running query wrote to, and that is not there any more."""
        table = self.sink.table
        return LedgerConflict(
            f"table {table} was deleted while the query runs, with what it knew of the query. Nothing was written. "
            "Start the query again to create the table anew; it goes on at the group's position in Kafka",
            table=table,
        )

    def _confirm(self, decision: Recorded) -> None:
        """The table has a batch of this number. Make sure that it is this one."""
        sink, planned = self.sink, self.planned
        # The ledger may also be behind because a former release wrote the batch, or an operator set it back since.
        if decision.uncovered and not Told(self.df.sparkSession, sink.table).recorded(planned.offsets):
            group, missing = next(iter(decision.uncovered.items()))
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

    def _write(self, entry: doors.Entry, decision: Write) -> None:
        sink, planned = self.sink, self.planned
        after = {group: found.written(planned.query_id, planned.batch_id) for group, found in decision.ledgers.items()}
        draft = Draft(
            planned=planned,
            rows=self._rows_without(decision.drop) if decision.rows else None,
            ledgers=after,
            without=decision.drop,
            needed=bool(decision.drop) or decision.changed,
        )
        version = entry.write(draft)
        if version is None:
            log.debug("batch %d of query %s: no rows, no new position", planned.batch_id, planned.query_id)
            return
        self.turn.version = version
        sink._known |= {group: replace(found, table_version=version) for group, found in after.items()}
        if version == entry.past.version + 1:  # nobody came in between
            sink._looked_to |= dict.fromkeys(after, version)
        self._tell(decision)
        log.debug("batch %d of query %s is version %d of %s", planned.batch_id, planned.query_id, version, sink.table)

    def _rows_without(self, drop: tuple[OffsetRange, ...]) -> "Callable[[], DataFrame]":
        return lambda: self.sink._transformed(without(self.df, drop, self.sink.table))

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


def _notify(spark: "SparkSession", planned: PlannedBatch, offset: StreamOffset) -> None:
    """Have the run's notices kept in its checkpoint, where one is known and can be written."""
    if planned.run_id not in (None, ONLY_RUN):
        run = board.run_name(str(planned.run_id))
        board.keep(run, offset.group, offset.stream, lambda: board.place_of(spark, planned.root))


def without(df: "DataFrame", drop: Sequence[OffsetRange], table: str) -> "DataFrame":
    """The rows of a batch but those in the given ranges, found by the columns topic, partition and offset.

    Raises:
        LedgerConflict: the rows do not have these columns (any more).
    """
    if not drop:
        return df
    from pyspark.sql import functions as F

    types = [(field.name, field.dataType.simpleString()) for field in df.schema.fields]
    if any(types.count(column) != 1 for column in rebuilt.ROW_COLUMNS.items()):
        raise LedgerConflict(
            f"table {table} must not get {ledger.shown(drop)} (again), and the sink cannot leave these rows out: it "
            f"needs the columns {', '.join(rebuilt.ROW_COLUMNS)} as the source gives them, and the batch has "
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
