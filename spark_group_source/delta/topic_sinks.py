"""DeltaSinks: writes each topic of a batch, or each value of an expression, to a table of its own, each record once.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``). Deliberately absent: how one
table is written and how its ledger decides (:mod:`sink`).

By topic, a table gets the part of the batch that has its topics, and its ledger has the offsets of these topics only.
So a table needs no commit in a batch without records for it, and no ledger says anything about another table. By an
expression, a record of any partition may be for any table; so each table has a commit in each batch, also without rows,
and its ledger has the offsets of all topics.

A crash between two tables leaves the batch in some of them: Spark runs it again, those that have it write nothing, and
the others write theirs. The batch is durable, and Kafka gets its offsets, when all tables have it; so a query without
its checkpoint continues at the lowest position of all tables, and each one leaves out what it has.
"""

import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from spark_group_source.delta import persisted
from spark_group_source.delta.checkpoint import PlannedBatch, read_planned
from spark_group_source.delta.sink import DeltaSink, is_called_by_spark, report
from spark_group_source.errors import OptionError
from spark_group_source.protocol.offsets import StreamOffset

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

TABLES_MAX = 100
"""The default bound on the tables of one :class:`DeltaSinks`."""

AT_ONCE_MAX = 8
"""How many tables a batch is written to at the same time."""

NAMED_MAX = 10
"""Topics or tables that an error names."""

_threads = ThreadPoolExecutor(AT_ONCE_MAX, "spark-group tables")
"""They write tables of all queries of this process. A thread that used the JVM keeps its connection open."""


_KEY = "__table_key"
OTHERS = None
"""In place of a key: all that have no table of their own."""

Key = Callable[["DataFrame"], "Column"]
"""Returns the column whose value names the table of a row."""


class TablePart(NamedTuple):
    """What one table gets of a batch."""

    sink: DeltaSink
    keys: tuple[str | None, ...]
    """Its topics, or the values of the expression."""
    planned: PlannedBatch

    @property
    def ranges(self) -> int:
        """The number of partitions of which it has records."""
        return sum(len(offset.batch()) for offset in self.planned.offsets)


class DeltaSinks:
    """Writes each topic to a Delta table of its own, exactly once:
    ``stream.writeStream.foreachBatch(DeltaSinks(lambda topic: DeltaSink(f"/lake/{topic}")))``; with ``by``, each value
    of an expression: ``DeltaSinks({"click": clicks, "view": views}, by="IF(key IS NULL, 'view', 'click')")``.

    A batch with records for several tables is read from Kafka once: Spark keeps its rows, on disk, until
    all tables have them, also if one fails. Up to AT_ONCE_MAX tables are written side by side. A table that cannot be
    written fails the batch, and the others may have it; the next attempt writes the missing ones.

    Args:
        sinks: the sink of each topic, or a function that returns the sink of a topic; it is called once for each topic.
            Topics whose sinks name one table share the first of these sinks; the others must have the same settings. A
            table is created when its first record comes, and begins there.
        by: the SQL expression, or a function of the rows that returns the column, whose value is the key of a row's
            sink; None: the topic. It must be the same when a batch runs again. Each table then has a commit in each
            batch; a table that is added later begins there.
        others: the sink of rows for which a dict of sinks has none.
        tables_max: how many tables there may be; a further one fails the batch before anything is written.
        checkpoint: the query's ``checkpointLocation``. Needed on Spark Connect only.

    Errors are raised when a batch is written: those of :class:`DeltaSink`, and

    Raises:
        OptionError: a topic or key has no sink, the sinks of a table differ, there are too many tables, the rows lack
            the column ``topic`` or have other topics than the batch, or the query has other sources. Nothing was
            written.
    """

    def __init__(
        self,
        sinks: Mapping[str, DeltaSink] | Callable[[str], DeltaSink],
        *,
        by: str | Key | None = None,
        others: DeltaSink | None = None,
        tables_max: int = TABLES_MAX,
        checkpoint: str | None = None,
    ) -> None:
        if isinstance(sinks, Mapping):
            sinks = dict(sinks)
            if not sinks or any(not isinstance(sink, DeltaSink) for sink in sinks.values()):
                raise OptionError("DeltaSinks needs a DeltaSink for each topic, or a function that returns one")
            if len({sink.table for sink in sinks.values()}) + (others is not None) > tables_max:
                raise OptionError(f"DeltaSinks has more tables than tables_max={tables_max}")
        elif not callable(sinks):
            raise OptionError(f"DeltaSinks needs sinks by topic, or a function, not {type(sinks).__name__}")
        elif by is not None or others is not None:
            raise OptionError("by and others need a dict of sinks: each table has a commit in each batch")
        if not isinstance(others, DeltaSink | None):
            raise OptionError(f"others is {others!r}; it must be a DeltaSink")
        self._given = sinks
        self.by, self.others = by, others
        self.tables_max = tables_max
        self.checkpoint = checkpoint.rstrip("/") if checkpoint else None
        self._by_topic: dict[str, DeltaSink] = {}
        self._by_table: dict[str, DeltaSink] = {}
        for sink in [*sinks.values()] if isinstance(sinks, dict) else ():
            self._shared(sink)
        if others is not None:
            self._shared(others)

    def __call__(self, df: "DataFrame", batch_id: int) -> None:
        """Write one batch; ``foreachBatch`` calls this."""
        spark = df.sparkSession
        planned = read_planned(spark, batch_id, self.checkpoint)
        if planned.other_sources:
            raise OptionError(
                f"query {planned.query_id} has sources of other kinds, and DeltaSinks chooses the table of each row. "
                "Use a query for each kind of source",
                query_id=planned.query_id,
            )
        parts = self._parts_by_topic(df, planned) if self.by is None else self._parts_by_key(planned)
        with self._rows_of(df, parts) as rows:
            written = write_side_by_side(spark, parts, rows)
        void = {
            offset.stream
            for part, durable in zip(parts, written, strict=True)
            for offset in part.planned.offsets
            if offset not in durable
        }
        durable = [offset for offset in planned.offsets if offset.stream not in void]
        report(spark, planned, durable, is_whole_sink=is_called_by_spark(sys._getframe(1)))
        for part in parts:
            part.sink.optimize_if_due(spark)

    def _rows_of(self, df: "DataFrame", parts: Sequence[TablePart]) -> "AbstractContextManager[list[DataFrame]]":
        """Return the rows of each part."""
        if self.by is not None:
            return rows_by_key(df, self.by, [part.keys for part in parts], tasks=max(part.ranges for part in parts))
        persist = any(part.sink.persist for part in parts)
        topics = {tuple(str(topic) for topic in part.keys): part.ranges for part in parts}
        return rows_by_topics(df, topics, persist=persist)

    def _parts_by_key(self, planned: PlannedBatch) -> list[TablePart]:
        """Return all tables."""
        assert isinstance(self._given, dict)
        others = [] if self.others is None else [(OTHERS, self.others)]
        keys: dict[DeltaSink, list[str | None]] = {}
        for key, sink in [*self._given.items(), *others]:
            keys.setdefault(self._by_table[sink.table], []).append(key)
        return [TablePart(sink, tuple(some), planned) for sink, some in keys.items()]

    def _parts_by_topic(self, df: "DataFrame", planned: PlannedBatch) -> list[TablePart]:
        """Return the tables for which the batch has records."""
        types = [field.dataType.simpleString() for field in df.schema.fields if field.name == "topic"]
        if types != ["string"]:
            raise OptionError(
                f"the rows have {len(types)} columns topic of type {types}, and DeltaSinks needs one of type string. "
                "Select and rename columns in DeltaSink(..., transform=...), not before writeStream"
            )
        topics: dict[DeltaSink, list[str]] = {}
        for topic in sorted({r.tp.topic for offset in planned.offsets for r in offset.batch()}):
            topics.setdefault(self._sink_of(topic), []).append(topic)
        return [TablePart(sink, tuple(some), planned.of_topics(some)) for sink, some in topics.items()]

    def _sink_of(self, topic: str) -> DeltaSink:
        if topic not in self._by_topic:
            sink = self._given(topic) if callable(self._given) else self._given.get(topic, self.others)
            if not isinstance(sink, DeltaSink):
                raise OptionError(
                    f"topic {topic} has no table: DeltaSinks has {type(sink).__name__} for it, not a DeltaSink. Add a "
                    "DeltaSink for the topic, or leave the topic out of subscribe or subscribePattern",
                    topic=topic,
                )
            if sink.table not in self._by_table and len(self._by_table) >= self.tables_max:
                raise OptionError(
                    f"topic {topic} would be written to table {sink.table}, and tables_max={self.tables_max} tables "
                    "are in use. Raise tables_max, or let several topics share a table",
                    topic=topic,
                )
            self._by_topic[topic] = self._shared(sink)
        return self._by_topic[topic]

    def _shared(self, sink: DeltaSink) -> DeltaSink:
        """Return the sink that writes this sink's table. Raises OptionError if it would write it in another way."""
        first = self._by_table.setdefault(sink.table, sink)
        settings = first.settings()
        if differing := [name for name, value in sink.settings().items() if settings[name] != value]:
            raise OptionError(
                f"two sinks of DeltaSinks write table {sink.table}, with different {' and '.join(differing)}. Give one "
                "DeltaSink for all that goes to this table"
            )
        return first


@contextmanager
def rows_by_topics(
    df: "DataFrame", parts: Mapping[tuple[str, ...], int], *, persist: bool = False
) -> "Iterator[list[DataFrame]]":
    """Return the rows of each part of a batch. Spark keeps those of several parts until the block ends.

    Args:
        parts: the topics of each part, and the most tasks in which its rows are written. Without such a bound there are
            as many for each table as the whole batch has, most of them without rows.
        persist: whether Spark keeps also the rows of a single part.

    Raises:
        OptionError: a row has another topic.
    """
    if len(parts) < 2:
        with persisted(df) if persist else nullcontext(df) as rows:
            yield [rows] * len(parts)
        return
    planned = sorted(topic for topics in parts for topic in topics)
    with persisted(df) as rows:
        if others := other_topics(rows, planned):
            raise OptionError(
                f"the batch has records of {', '.join(planned[:NAMED_MAX])}, and rows with topic "
                f"{', '.join(sorted(others)[:NAMED_MAX])}, which belong to no table. Change the column topic in "
                "DeltaSink(..., transform=...), not before writeStream"
            )
        yield [rows_of(rows, topics).coalesce(tasks) for topics, tasks in parts.items()]


@contextmanager
def rows_by_key(
    df: "DataFrame", by: str | Key, parts: Sequence[Collection[str | None]], *, tasks: int
) -> "Iterator[list[DataFrame]]":
    """Return the rows of each part of a batch. Spark keeps them until the block ends.

    Args:
        parts: the keys of each part.
        tasks: the most tasks in which the rows of all parts are written.

    Raises:
        OptionError: a row has another key.
    """
    from pyspark.sql import functions as F

    known = sorted(key for keys in parts for key in keys if key is not OTHERS)
    is_known = F.coalesce(F.col(_KEY).isin(*known), F.lit(False))
    of_row = F.expr(by) if isinstance(by, str) else by(df)
    with persisted(df.withColumn(_KEY, of_row.cast("string"))) as rows:
        counted = rows.groupBy(F.when(is_known, F.col(_KEY)).alias(_KEY)).count().collect()
        counts: dict[str | None, int] = {row[0]: row[1] for row in counted}
        if counts.get(OTHERS) and not any(OTHERS in keys for keys in parts):
            found = rows.where(~is_known).select(_KEY).distinct().limit(NAMED_MAX).collect()
            raise OptionError(
                f"{counts[OTHERS]} rows of the batch have no table: the value of by is "
                f"{', '.join(sorted(repr(key) for (key,) in found))}, and DeltaSinks has sinks for "
                f"{', '.join(map(repr, known[:NAMED_MAX]))}. Nothing was written. Add a DeltaSink for it, or others="
            )

        def part(keys: Collection[str | None]) -> "DataFrame":
            share = sum(counts.get(key, 0) for key in keys) / max(1, sum(counts.values()))
            if not share:
                return df.where(F.lit(False))  # Spark reads nothing
            is_here = F.coalesce(F.col(_KEY).isin(*(key for key in keys if key is not OTHERS)), F.lit(False))
            is_here = is_here | ~is_known if OTHERS in keys else is_here
            return rows.where(is_here).drop(_KEY).coalesce(max(1, math.ceil(tasks * share)))

        yield [part(keys) for keys in parts]


def other_topics(rows: "DataFrame", topics: Sequence[str]) -> list[str]:
    """Return the topics of the rows that are none of these; "null" for rows without one."""
    from pyspark.sql import functions as F

    is_other = ~F.coalesce(F.col("topic").isin(*topics), F.lit(False))
    ((found,),) = rows.agg(F.collect_set(F.when(is_other, F.coalesce("topic", F.lit("null"))))).collect()
    return list(found)


def rows_of(rows: "DataFrame", topics: Sequence[str]) -> "DataFrame":
    """Return the rows that have these topics."""
    from pyspark.sql import functions as F

    return rows.where(F.col("topic").isin(*topics))


def write_side_by_side(
    spark: "SparkSession", parts: Sequence[TablePart], rows: "Sequence[DataFrame]"
) -> list[tuple[StreamOffset, ...]]:
    """Write each part to its table. Returns when none is being written any more, with the durable offsets of each.

    Raises:
        Exception: that of the first part that failed.
    """
    if len(parts) < 2:
        return [part.sink.write(df, part.planned) for part, df in zip(parts, rows, strict=True)]
    from pyspark.util import inheritable_thread_target

    # So that stopping the query cancels the jobs. Spark 4.0 and 4.1 return the session itself where Python's threads
    # share one of Java.
    inherit: Any = inheritable_thread_target(spark)
    write = _write if inherit is spark else inherit(_write)
    running: list[Future[tuple[StreamOffset, ...]]] = [
        _threads.submit(write, part, df) for part, df in zip(parts, rows, strict=True)
    ]
    wait(running)
    return [each.result() for each in running]


def _write(part: TablePart, df: "DataFrame") -> tuple[StreamOffset, ...]:
    return part.sink.write(df, part.planned)
