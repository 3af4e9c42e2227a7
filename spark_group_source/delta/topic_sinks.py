"""DeltaSinks: writes each topic of a batch, or each value of an expression, to a table of its own, each record once.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``). Deliberately absent: how one
table is written and how its ledger decides (:mod:`sink`).

By topic, a table gets the part of the batch that has its topics, and its ledger has the offsets of these topics only.
So a table needs no commit in a batch without records for it, and no ledger says anything about another table. By an
expression, a record of any partition may be for any table, and a ledger has the offsets of all topics. Each table of a
dict has a commit in each batch, also without rows. Where a function names the tables, nobody knows all of them; so a
table has a commit in the batches with rows for it, and the table ``others`` in each one, after all others. Its ledger
shows that the tables without a commit lack nothing (:func:`ledger_decision.catch_up`).

A crash between two tables leaves the batch in some of them: Spark runs it again, those that have it write nothing, and
the others write theirs. The batch is durable, and Kafka gets its offsets, when all tables have it; so a query without
its checkpoint continues at the lowest position of all tables, and each one leaves out what it has.
"""

import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from types import CellType, FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from spark_group_source.delta import persisted
from spark_group_source.delta.checkpoint import PlannedBatch, has_state, read_planned
from spark_group_source.delta.durable_batches import report
from spark_group_source.delta.ledger_format import Ledger
from spark_group_source.delta.sink import DeltaSink
from spark_group_source.delta.table_names import comparable
from spark_group_source.delta.write_guard import refused_after_failure
from spark_group_source.errors import OptionError
from spark_group_source.protocol.offsets import StreamOffset

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

TABLES_MAX = 100
"""The default bound on the tables of one :class:`DeltaSinks`."""

AT_ONCE_MAX = 8
"""How many tables a batch is written to at the same time."""

KEYS_MAX = 1_000
"""How many values ``by`` may have in a batch, where a function returns the sink of each."""

NAMES_MAX = 10_000
"""How many topics or keys are remembered with their sinks; with a further one all are asked for again."""

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
    common: Mapping[str, Ledger] = MappingProxyType({})
    """By group, the ledgers of the table that gets each batch after this one."""

    @property
    def ranges(self) -> int:
        """The number of partitions of which it has records."""
        return sum(len(offset.batch()) for offset in self.planned.offsets)


class DeltaSinks:
    """Writes each topic to a Delta table of its own, exactly once:
    ``stream.writeStream.foreachBatch(DeltaSinks(lambda topic: DeltaSink(f"/lake/{topic}")))``; with ``by``, each value
    of an expression: ``DeltaSinks({"click": clicks, "view": views}, by="IF(key IS NULL, 'view', 'click')")``. Such
    tables too may be named by a function, of the key; ``others`` gets the rest.

    A batch with records for several tables is read from Kafka once: Spark keeps its rows, on disk, until
    all tables have them, also if one fails. Up to AT_ONCE_MAX tables are written side by side. A table that cannot be
    written fails the batch, and the others may have it; the next attempt writes the missing ones.

    Args:
        sinks: the sink of each topic or key, or a function that returns it, always the same one for the same name.
            Topics whose sinks name one table share the first of these sinks; the others must have the same settings. A
            table is created when its first record comes, and begins there.
        by: the SQL expression, or a function of the rows that returns the column, whose value is the key of a row's
            sink; None: the topic. It must be the same when a batch runs again. Each table of a dict then has a commit
            in each batch; one that is added later begins there. With a function of the key, at most KEYS_MAX different
            keys may be in a batch.
        others: the sink of rows for which a dict of sinks has none. A function of the key needs it: for rows whose key
            is null, or for which it returns None. This table has a commit in each batch, after all others.
        tables_max: how many tables there may be; a further one fails the batch before anything is written.
        checkpoint: the query's ``checkpointLocation``. Needed on Spark Connect only.

    Errors are raised when a batch is written: those of :class:`DeltaSink`, and

    Raises:
        OptionError: a topic or key has no sink, the sinks of a table differ, there are too many tables or keys, the
            rows lack the column ``topic`` or have other topics than the batch, or the query has other sources. Nothing
            was written.
    """

    def __init__(
        self,
        sinks: Mapping[str, DeltaSink] | Callable[[str], DeltaSink | None],
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
            if wrong := [key for key in sinks if not isinstance(key, str)]:
                raise OptionError(
                    f"DeltaSinks has a sink for {wrong[0]!r}; its keys must be text: Spark casts the values of by to "
                    "STRING, such as '0' and 'true'"
                )
            if len({comparable(sink.table) for sink in sinks.values()}) + (others is not None) > tables_max:
                raise OptionError(f"DeltaSinks has more tables than tables_max={tables_max}")
        elif not callable(sinks):
            raise OptionError(f"DeltaSinks needs sinks by topic, or a function, not {type(sinks).__name__}")
        elif by is None and others is not None:
            raise OptionError("others needs a dict of sinks, or by: a function returns the sink of each topic")
        elif by is not None and others is None:
            raise OptionError(
                "a function of the key needs others=DeltaSink(...): the table of rows without a key, or for whose key "
                "it returns None. Its ledger shows that a table without rows in a batch lacks nothing"
            )
        if not isinstance(others, DeltaSink | None):
            raise OptionError(f"others is {others!r}; it must be a DeltaSink")
        self._given = sinks
        self.by, self.others = by, others
        self.tables_max = tables_max
        self.checkpoint = checkpoint.rstrip("/") if checkpoint else None
        self._state: tuple[tuple[str, str | None], bool] | None = None
        """A query and its run, and whether the query is stateful; None until that is known."""
        self._by_name: dict[str | None, DeltaSink] = {}
        """By topic, or by key."""
        self._by_table: dict[str, DeltaSink] = {}
        for sink in [*sinks.values()] if isinstance(sinks, dict) else ():
            self._shared(sink)
        if others is not None:
            self._shared(others)

    def identity(self) -> object:
        """Return what the sinks that a function creates for each call have in common."""
        given = self._given
        sinks = {key: sink.table for key, sink in given.items()} if isinstance(given, dict) else content_of(given)
        return sinks, content_of(self.by), None if self.others is None else self.others.table

    def tables_of(self, planned: PlannedBatch) -> list[tuple[DeltaSink | None, PlannedBatch]]:
        """Return the tables that are reset after a failed batch, each with its part of the batch: all that are known,
        because a later batch that Spark runs again must be void in each of them. None: topics without a table. With
        ``by`` no table, and the whole batch."""
        if self.by is not None:
            return [(None, planned)]
        found: dict[DeltaSink | None, list[str]] = {}
        for topic in sorted({r.tp.topic for offset in planned.offsets for r in offset.batch()}):
            sink = None
            with suppress(Exception):  # of the user's function, or no sink: that may have failed the batch
                sink = self._sink_of(topic)
            found.setdefault(sink, []).append(topic)
        for sink in self._by_table.values():
            found.setdefault(sink, [])
        return [(sink, planned.of_topics(topics)) for sink, topics in found.items()]

    def __call__(self, df: "DataFrame", batch_id: int) -> None:
        """Write one batch; ``foreachBatch`` calls this."""
        spark = df.sparkSession
        with refused_after_failure(spark, batch_id, self) as call:
            call.planned = planned = read_planned(spark, batch_id, self.checkpoint)
            parts, durable_in = self._write(df, planned)
        void = {
            offset.stream
            for part, durable in zip(parts, durable_in, strict=True)
            for offset in part.planned.offsets
            if offset not in durable
        }
        durable = [offset for offset in planned.offsets if offset.stream not in void]
        report(spark, planned, durable, sys._getframe(1))
        for part in parts:
            part.sink.optimize_if_due(spark)

    def _write(
        self, df: "DataFrame", planned: PlannedBatch
    ) -> tuple[Sequence[TablePart], list[tuple[StreamOffset, ...]]]:
        """Write one batch. Returns the tables of the batch and the durable offsets of each."""
        spark = df.sparkSession
        if planned.other_sources:
            raise OptionError(
                f"query {planned.query_id} has sources of other kinds, and DeltaSinks chooses the table of each row. "
                "Use a query for each kind of source",
                query_id=planned.query_id,
            )
        with self._divided(df, planned) as (parts, rows):
            if not self._is_by_function:
                return parts, write_side_by_side(spark, parts, rows)
            named = write_side_by_side(spark, parts[:-1], rows[:-1])
            with _released_on_failure(parts[:-1]):  # the last part is that of others
                return parts, named + write_side_by_side(spark, parts[-1:], rows[-1:])

    @property
    def _is_by_function(self) -> bool:
        """Whether a function returns the sink of each key."""
        return self.by is not None and callable(self._given)

    @contextmanager
    def _divided(
        self, df: "DataFrame", planned: PlannedBatch
    ) -> "Iterator[tuple[Sequence[TablePart], Sequence[DataFrame]]]":
        """Return the tables of the batch and the rows of each."""
        if self.by is None:
            require_topics(df)
            topics = sorted({r.tp.topic for offset in planned.offsets for r in offset.batch()})
            parts = self._parts(df.sparkSession, planned, topics)
            persist = any(part.sink.persist for part in parts)
            tasks_of = {part.planned.topics: part.ranges for part in parts}
            is_stateful = len(parts) < 2 and self._has_state(df.sparkSession, planned)
            with rows_by_topics(df, tasks_of, persist=persist, is_stateful=is_stateful) as rows:
                yield parts, rows
            return
        with rows_with_key(df, self.by) as keyed:
            if isinstance(self._given, dict):
                counts = count_known_keys(keyed, self._given.keys(), has_others=self.others is not None)
                others = [] if self.others is None else [OTHERS]
                parts = self._parts(df.sparkSession, planned, [*self._given, *others])
            else:
                counts = count_keys(keyed)
                parts = self._parts(df.sparkSession, planned, sorted(key for key in counts if key is not OTHERS))
            tasks = max(part.ranges for part in parts)
            yield parts, divide_by_key(df, keyed, counts, [part.keys for part in parts], tasks=tasks)

    def _parts(self, spark: "SparkSession", planned: PlannedBatch, names: Iterable[str | None]) -> list[TablePart]:
        """Return the tables of these topics or keys; that of others is the last one where a function names them."""
        found: dict[DeltaSink, list[str | None]] = {}
        for name in names:
            found.setdefault(self._sink_of(name), []).append(name)
        if self.by is None:
            return [TablePart(sink, tuple(some), planned.of_topics([*map(str, some)])) for sink, some in found.items()]
        common: Mapping[str, Ledger] = {}
        if self._is_by_function and self.others is not None:
            common = self.others.read_ledgers(spark, {offset.group: None for offset in planned.offsets})
            found.pop(self.others, None)
            found[self.others] = [OTHERS]
        return [
            TablePart(sink, tuple(some), planned, {} if sink is self.others else common) for sink, some in found.items()
        ]

    def _has_state(self, spark: "SparkSession", planned: PlannedBatch) -> bool:
        """Return whether the query is stateful. The first batch of a query may not have stored its state yet."""
        run = planned.query_id, planned.run_id
        if self._state is None or self._state[0] != run or planned.batch_id == 0:
            self._state = run, has_state(spark, planned.root)
        return self._state[1]

    def _sink_of(self, name: str | None) -> DeltaSink:
        """Return the sink of a topic or key, or of OTHERS."""
        what = "topic" if self.by is None else "key"
        if name not in self._by_name:
            sink = None
            if name is not OTHERS:
                sink = self._given(name) if callable(self._given) else self._given.get(name)
            sink = self.others if sink is None else sink
            if not isinstance(sink, DeltaSink):
                raise OptionError(
                    f"{what} {name} has no table: DeltaSinks has {type(sink).__name__} for it, not a DeltaSink. Add a "
                    f"DeltaSink for the {what}"
                    + (", or leave the topic out of subscribe or subscribePattern" if self.by is None else ""),
                    **{what: name},
                )
            if comparable(sink.table) not in self._by_table and len(self._by_table) >= self.tables_max:
                raise OptionError(
                    f"{what} {name} would be written to table {sink.table}, and tables_max={self.tables_max} tables "
                    f"are in use. Raise tables_max, or let several {what}s share a table",
                    **{what: name},
                )
            shared = self._shared(sink)
            if len(self._by_name) >= NAMES_MAX:
                self._by_name.clear()
            self._by_name[name] = shared
        return self._by_name[name]

    def _shared(self, sink: DeltaSink) -> DeltaSink:
        """Return the sink that writes this sink's table. Raises OptionError if it would write it in another way."""
        first = self._by_table.setdefault(comparable(sink.table), sink)
        settings = settings_of(first)
        if differing := [name for name, value in settings_of(sink).items() if settings[name] != value]:
            raise OptionError(
                f"two sinks of DeltaSinks write table {sink.table}, with different {' and '.join(differing)}. Give one "
                "DeltaSink for all that goes to this table"
            )
        return first


# --- sinks of one table -----------------------------------------------------------------------------------------------


def settings_of(sink: DeltaSink) -> dict[str, object]:
    """Return what a sink was given besides its table and the query's checkpoint, by name."""
    names = ("partition_by", "merge_schema", "writer", "storage_options", "persist", "merge", "optimize_every")
    letters = None if sink.dead_letters is None else sink.dead_letters.settings()
    found = {"transform": content_of(sink.transform), **{name: getattr(sink, name) for name in names}}
    return found | {"dead_letters": letters}


def content_of(transform: object) -> object:
    """Return what makes two transforms the same, such as those that a function of the topic makes anew."""
    if isinstance(transform, partial):
        values, names = transform.args, transform.keywords
        code = content_of(transform.func)
    elif isinstance(transform, FunctionType):
        cells = [cell for cell in transform.__closure__ or () if cell != _EMPTY]
        values = (*(transform.__defaults__ or ()), *(cell.cell_contents for cell in cells))
        names, code = transform.__kwdefaults__ or {}, transform.__code__
    else:
        return transform
    return code, [_Value(value) for value in values], {name: _Value(value) for name, value in names.items()}


_EMPTY = CellType()
"""That of a variable without a value."""


class _Value:
    """A value of a transform. It is the same as an equal one; a value that cannot be compared, such as a Column, is the
    same as itself only."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Value):
            return False
        with suppress(Exception):
            return self.value is other.value or bool(self.value == other.value)
        return False


# --- the rows of each table -------------------------------------------------------------------------------------------


def require_topics(rows: "DataFrame") -> None:
    """Raise OptionError for rows without the column by which they are divided."""
    types = [field.dataType.simpleString() for field in rows.schema.fields if field.name == "topic"]
    if types != ["string"]:
        raise OptionError(
            f"the rows have {len(types)} columns topic of type {types}, and DeltaSinks needs one of type string. "
            "Select and rename columns in DeltaSink(..., transform=...), not before writeStream"
        )


@contextmanager
def rows_by_topics(
    df: "DataFrame", parts: Mapping[tuple[str, ...], int], *, persist: bool = False, is_stateful: bool = False
) -> "Iterator[list[DataFrame]]":
    """Return the rows of each part of a batch. Spark keeps those of several parts until the block ends.

    Args:
        parts: the topics of each part, and the most tasks in which its rows are written. Without such a bound there are
            as many for each table as the whole batch has, most of them without rows.
        persist: whether Spark keeps also the rows of a single part.
        is_stateful: whether there may be rows of topics without records, which the query's watermark released.

    Raises:
        OptionError: a row has another topic.
    """
    if len(parts) < 2 and not is_stateful:
        with persisted(df) if persist else nullcontext(df) as rows:
            yield [rows] * len(parts)
        return
    planned = sorted(topic for topics in parts for topic in topics)
    with persisted(df) as rows:
        if others := other_topics(rows, planned):
            raise OptionError(
                f"the batch has records of {', '.join(planned[:NAMED_MAX]) or 'no topic'}, and rows with topic "
                f"{', '.join(sorted(others)[:NAMED_MAX])}, which belong to no table. Nothing was written. Change the "
                "column topic in DeltaSink(..., transform=...), not before writeStream. For a stateful query, "
                'use a dict of sinks and by="topic"'
            )
        yield [rows_of(rows, topics).coalesce(tasks) for topics, tasks in parts.items()]


@contextmanager
def rows_with_key(df: "DataFrame", by: str | Key) -> "Iterator[DataFrame]":
    """Return the rows of a batch with the column of their keys. Spark keeps them until the block ends."""
    from pyspark.sql import functions as F

    of_row = F.expr(by) if isinstance(by, str) else by(df)
    # Python gets text with U+FFFD in place of broken UTF-8, which Spark would not find again among the rows.
    with persisted(df.withColumn(_KEY, F.make_valid_utf8(of_row.cast("string")))) as rows:
        yield rows


def count_known_keys(rows: "DataFrame", known: Collection[str], *, has_others: bool) -> dict[str | None, int]:
    """Return how many rows have each of these keys, and how many another one: OTHERS. Raises OptionError if a row has
    another key, and there are no others."""
    from pyspark.sql import functions as F

    is_known = F.coalesce(F.col(_KEY).isin(*known), F.lit(False))
    counts = _counted(rows.groupBy(F.when(is_known, F.col(_KEY)).alias(_KEY)).count())
    if counts.get(OTHERS) and not has_others:
        found = rows.where(~is_known).select(_KEY).distinct().limit(NAMED_MAX).collect()
        raise OptionError(
            f"{counts[OTHERS]} rows of the batch have no table: the value of by is "
            f"{', '.join(sorted(repr(key) for (key,) in found))}, and DeltaSinks has sinks for "
            f"{', '.join(map(repr, sorted(known)[:NAMED_MAX]))}. Nothing was written. Add a DeltaSink for it, or "
            "others="
        )
    return counts


def count_keys(rows: "DataFrame") -> dict[str | None, int]:
    """Return how many rows have each key; OTHERS: none. Raises OptionError for more than KEYS_MAX keys."""
    counts = _counted(rows.groupBy(_KEY).count().limit(KEYS_MAX + 2))
    if len(counts.keys() - {OTHERS}) > KEYS_MAX:
        some = ", ".join(sorted(repr(key) for key in counts if key is not OTHERS)[:NAMED_MAX])
        raise OptionError(
            f"by has more than {KEYS_MAX} values in a batch, such as {some}. Nothing was written. Let the expression "
            "return NULL for rows of the table others, or a value that names a table"
        )
    return counts


def _counted(rows: "DataFrame") -> dict[str | None, int]:
    return {row[0]: row[1] for row in rows.collect()}


def divide_by_key(
    df: "DataFrame",
    keyed: "DataFrame",
    counts: Mapping[str | None, int],
    parts: Sequence[Collection[str | None]],
    *,
    tasks: int,
) -> "list[DataFrame]":
    """Return the rows of each part of a batch, without their keys.

    Args:
        keyed: the rows of ``df`` with their keys.
        counts: how many rows have each key.
        parts: the keys of each part; OTHERS: all that no part has.
        tasks: the most tasks in which the rows of all parts are written.
    """
    from pyspark.sql import functions as F

    named = {key for keys in parts for key in keys if key is not OTHERS}
    total = sum(counts.values())

    def part(keys: Collection[str | None]) -> "DataFrame":
        count = sum(counts.get(key, 0) for key in named.intersection(keys))
        if OTHERS in keys:
            count += total - sum(counts.get(key, 0) for key in named)
        if not count:
            return df.where(F.lit(False))  # Spark reads nothing
        is_here = F.coalesce(F.col(_KEY).isin(*named.intersection(keys)), F.lit(False))
        if OTHERS in keys:
            is_here = is_here | ~F.coalesce(F.col(_KEY).isin(*named), F.lit(False))
        return keyed.where(is_here).drop(_KEY).coalesce(max(1, math.ceil(tasks * count / total)))

    return [part(keys) for keys in parts]


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


# --- writing ----------------------------------------------------------------------------------------------------------


def write_side_by_side(
    spark: "SparkSession", parts: Sequence[TablePart], rows: "Sequence[DataFrame]"
) -> list[tuple[StreamOffset, ...]]:
    """Write each part to its table. Returns when none is being written any more, with the durable offsets of each, or
    raises the exception of the first part that failed."""
    if len(parts) < 2:
        return [_write(part, df) for part, df in zip(parts, rows, strict=True)]
    from pyspark.util import inheritable_thread_target

    # So that stopping the query cancels the jobs. Spark 4.0 and 4.1 return the session itself where Python's threads
    # share one of Java.
    inherit: Any = inheritable_thread_target(spark)
    write = _write if inherit is spark else inherit(_write)
    running: list[Future[tuple[StreamOffset, ...]]] = [
        _threads.submit(write, part, df) for part, df in zip(parts, rows, strict=True)
    ]
    wait(running)
    with _released_on_failure([part for part, each in zip(parts, running, strict=True) if each.exception() is None]):
        return [each.result() for each in running]


@contextmanager
def _released_on_failure(parts: Sequence[TablePart]) -> Iterator[None]:
    """Let the run write the batch again to tables that have it, if another one fails: their ledgers leave it out."""
    try:
        yield
    except BaseException:
        for part in parts:
            part.sink.release(part.planned)
        raise


def _write(part: TablePart, df: "DataFrame") -> tuple[StreamOffset, ...]:
    return part.sink.write(df, part.planned, part.common)
