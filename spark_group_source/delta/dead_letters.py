"""DeadLetters: rows that a table must not have go to another one, with the records that they come from.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``). Deliberately absent: what is
decided about a batch (:mod:`ledger_decision`), the commit of the good rows (:mod:`sink`).

The bad records of a batch are committed before its good rows, so a crash in between leaves them in the dead-letter
table only. The next attempt reads there which records of its ranges are bad, and keeps to that, even if the code or the
table's constraints have changed: each record is in one of the two tables. The commits of a table's bad records have
``SetTransaction`` numbers of their own, so of two writers one commits first and the other decides again.
"""

import logging
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from spark_group_source.delta import table_names, table_writer
from spark_group_source.delta.checkpoint import PlannedBatch
from spark_group_source.delta.ledger_format import APP_PREFIX, Ledger
from spark_group_source.delta.table_history import LedgerExpired, LogFiles, TableHistory, note_of
from spark_group_source.delta.table_writer import TableWriter
from spark_group_source.errors import BadRecords, OptionError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

log = logging.getLogger(__name__)

EXAMPLES_MAX = 3
"""How many bad records an error or a log line names."""

COLUMNS = {
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "topic_id": "string",
    "timestamp": "timestamp",
    "timestampType": "int",
    "key": "binary",
    "value": "binary",
    "headers": "array<struct<key: string, value: binary>>",
    "error_class": "string",
    "error": "string",
    "table": "string",
    "table_id": "string",
    "query_id": "string",
    "batch_id": "bigint",
    "written_at": "timestamp",
    "replay": "bigint",
}
"""The columns of a dead-letter table, with their types. Columns of the record that the query does not read are null.
``replay`` is the number of the replay that took the record into its table; null if none did."""

_OF_RECORD = ("topic", "partition", "offset", "timestamp", "timestampType", "key", "value", "headers")
"""Those of the record, which a transform gets in a replay."""

_ERROR, _CLASS = "_bad_record_error", "_bad_record_class"
_RECORD = list(table_names.RECORD_COLUMNS)
_CHECK = "delta.constraints."


class Rule(NamedTuple):
    """What each row of a table must fulfil."""

    error_class: str
    """``RULE``, ``CAST``, ``NOT_NULL`` or ``CHECK``."""
    name: str
    expression: str
    """In SQL. A row is good if it is true, so not if it is null."""


@dataclass
class TableLetters:
    """What a process knows of the bad records of one table."""

    counted: int = 0
    """The rows since the share of bad ones was compared last."""
    bad: int = 0
    """The bad ones of them."""
    ends: dict[tuple[str, str, int], int] | None = None
    """By topic, its id and partition: the offset after the last bad record in the dead-letter table; None: not read."""
    version: int = -1
    """The version of the dead-letter table to which ``ends`` belongs."""


class DeadLetters:
    """The table for records whose rows must not be in a sink's table:
    ``DeltaSink("/lake/orders", transform=parse, dead_letters=DeadLetters("/lake/bad", valid="id IS NOT NULL"))``.

    A row is bad if one of its values cannot be cast to the type of its column in the table, if one of the rules is not
    true for it, or if it violates a ``NOT NULL`` or ``CHECK`` constraint of the table. All rows of its record are
    left out then. Errors that the transform itself raises end the query, so use functions that return null for a
    broken value, such as ``try_cast``, ``try_to_timestamp`` or ``from_json``, and a rule.

    Args:
        table: a path or a name, like that of a sink. The first batch creates it. Several sinks may share one.
        valid: the SQL expression that is true for good rows, or several by their names. Its columns are those that the
            sink's transform returns; among them must be ``topic``, ``partition`` and ``offset``.
        max_fraction: the largest share of bad records, from 0 to 1. With more, nothing is written and the query ends.
        min_rows: how many rows at least are counted before the share is compared; small batches are added up.

    Errors are raised when a batch is written.

    Raises:
        BadRecords: too many records are bad. Nothing was written.
        OptionError: an argument cannot work, or the rows lack one of the three columns.
    """

    def __init__(
        self,
        table: str | os.PathLike[str],
        *,
        valid: str | Mapping[str, str] = "true",
        max_fraction: float = 0.1,
        min_rows: int = 100,
    ) -> None:
        if not 0 <= max_fraction <= 1:
            raise OptionError(f"max_fraction is {max_fraction}; it must be between 0 and 1")
        if min_rows < 1:
            raise OptionError(f"min_rows is {min_rows}; it must be 1 or more")
        self.table = table_names.canonical(table)
        self.rules = {"valid": valid} if isinstance(valid, str) else dict(valid)
        self.max_fraction, self.min_rows = max_fraction, min_rows
        self._of_tables: dict[str, TableLetters] = {}
        self._idle_logs: list[LogFiles] = []
        """Opened logs of the dead-letter table that no batch uses now."""

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_idle_logs": []}

    def __repr__(self) -> str:
        return f"DeadLetters({self.table!r})"

    def open(self, table: TableWriter, planned: PlannedBatch, storage_options: Mapping[str, str] | None) -> "LetterBox":
        """Open the dead-letter table for one batch of a sink's table. The first batch creates it.

        Raises:
            OptionError: both are one table.
        """
        own = self.open_table(table, storage_options)
        if own.identity() == table.identity():
            raise OptionError(f"table {table.table} has its own bad records: dead_letters needs another table")
        return LetterBox(self, table, own, planned)

    def open_table(self, table: TableWriter, storage_options: Mapping[str, str] | None) -> TableWriter:
        """Open the dead-letter table of a sink's table, and create it if it does not exist."""
        idle_log = self._idle_logs.pop() if self._idle_logs else None
        own = TableWriter(table.spark, self.table, storage_options=storage_options, log=idle_log)
        if not own.exists():
            own.create(table.spark.createDataFrame([], ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())))
        return own

    def close(self, box: "LetterBox") -> None:
        """Release what a batch used."""
        box.release()
        if box.own.log is not None:
            self._idle_logs.append(box.own.log)

    def of_table(self, table_id: str) -> "TableLetters":
        """Return what is known of the bad records of one table."""
        return self._of_tables.setdefault(table_id, TableLetters())

    def count(self, table: TableWriter, rows: int, bad: int, examples: Iterable[str]) -> None:
        """Count the rows of a batch.

        Raises:
            BadRecords: too many are bad.
        """
        known = self.of_table(table.identity())
        counted, all_bad = known.counted + rows, known.bad + bad
        is_share = counted >= self.min_rows
        if is_share and all_bad > self.max_fraction * counted:
            raise BadRecords(
                f"{all_bad} of the last {counted} rows for table {table.table} are bad, more than max_fraction="
                f"{self.max_fraction:g} of them. Nothing of this batch was written. The first ones: "
                f"{'; '.join(examples)}. Correct the transform, the rules or the table, or raise max_fraction, and "
                "start the query with the same checkpoint",
                table=table.table,
                rows=counted,
                bad=all_bad,
            )
        known.counted, known.bad = (0, 0) if is_share else (counted, all_bad)


class LetterBox:
    """Takes the bad records out of one batch for one table.

    Args:
        letters: the dead-letter table and the rules.
        table: the table of the good rows.
        own: the dead-letter table.
    """

    def __init__(self, letters: DeadLetters, table: TableWriter, own: TableWriter, planned: PlannedBatch) -> None:
        self.letters, self.table, self.own, self.planned = letters, table, own, planned
        self._known = letters.of_table(table.identity())
        self._key = f"letters.{table.identity()}"
        """In place of a group's name, in the numbers and notes of the commits."""
        self._kept: list[DataFrame] = []

    def release(self) -> None:
        """Let Spark forget the rows that it keeps."""
        while self._kept:
            self._kept.pop().unpersist()

    def good_rows(self, source: "DataFrame", rows: "DataFrame") -> "DataFrame":
        """Commit the bad records of a batch, and return the other rows.

        Args:
            source: the rows of the batch, as the query reads them.
            rows: what the sink's transform made of them.

        Raises:
            BadRecords, OptionError: as in :class:`DeadLetters`. Nothing was written.
        """
        _require_record_columns(rows, self.letters)
        what = f"bad records of batch {self.planned.batch_id} to table {self.letters.table}"
        return table_writer.retry_races(lambda: self._attempt(source, rows), what=what)

    def _attempt(self, source: "DataFrame", rows: "DataFrame") -> "DataFrame":
        from pyspark.sql import functions as F

        self.release()
        history = self.own.history()
        if known := self._known_records(history):  # an earlier attempt has decided
            rows = rows.join(F.broadcast(_records(rows.sparkSession, known)), _RECORD, "left_anti")
        flagged = self._keep(flag(self.letters.rules, self.table, rows))
        is_bad, record = F.col(_ERROR).isNotNull(), F.struct(*_RECORD)
        totals = flagged.agg(F.count(F.lit(1)), F.count(_ERROR), F.count_distinct(F.when(is_bad, record)))
        ((counted, bad, bad_records),) = totals.collect()
        good = flagged.drop(_ERROR, _CLASS)
        if not bad:
            self.letters.count(self.table, counted, 0, ())
            return good
        found = flagged.where(is_bad).select(*_RECORD, _CLASS, _ERROR).dropDuplicates(_RECORD)
        first = found.orderBy(*_RECORD).take(EXAMPLES_MAX)
        examples = [f"{topic}-{partition} offset {at}, {error}" for topic, partition, at, _, error in first]
        self.letters.count(self.table, counted, bad, examples)
        letters = self._keep(self._letters(source, found))
        if missing := bad_records - letters.count():
            raise OptionError(
                f"{missing} bad rows for table {self.table.table} have a topic, partition and offset that no record of "
                "the batch has. Keep these columns as they are in the sink's transform",
                table=self.table.table,
            )
        self._commit(history, letters)
        log.warning(
            "table %s: %d of %d rows of batch %d are bad, and their records are in table %s: %s",
            self.table.table,
            bad,
            counted,
            self.planned.batch_id,
            self.letters.table,
            "; ".join(examples),
        )
        return good.join(F.broadcast(found.select(*_RECORD)), _RECORD, "left_anti")

    def _keep(self, rows: "DataFrame") -> "DataFrame":
        from pyspark import StorageLevel

        self._kept.append(rows.persist(StorageLevel.MEMORY_AND_DISK))
        return self._kept[-1]

    # --- the dead-letter table --------------------------------------------------------------------------------------

    def _known_records(self, history: TableHistory) -> list[tuple[str, int, int]]:
        """Return the records of the batch that are in the dead-letter table already."""
        known = self._known
        after = known.version if known.ends is not None else -1
        if known.ends is None or any(commit.ledger_entry(self._key) for commit in history.commits(after=after)):
            known.ends = {}
            for topic, partition, at, topic_id in self._read_records(0):
                place = (topic, topic_id, partition)
                known.ends[place] = max(at + 1, known.ends.get(place, 0))
        known.version = history.version
        ranges = {
            (r.tp.topic, offset.topic_ids.get(r.tp.topic, ""), r.tp.partition): r
            for offset in self.planned.offsets
            for r in offset.batch()
        }
        begun = [r.start for place, r in ranges.items() if r.start < known.ends.get(place, 0)]
        found = set()
        for topic, partition, at, topic_id in self._read_records(min(begun)) if begun else ():
            r = ranges.get((topic, topic_id, partition))
            if r is not None and r.start <= at < r.end:
                found.add((topic, partition, at))
        return sorted(found)

    def _read_records(self, lowest: int) -> list[tuple[str, int, int, str]]:
        """Read the bad records of the sink's table from this offset on, with the ids of their topics."""
        columns, table_id = [*_RECORD, "topic_id"], self.table.identity()
        if table_writer.has_delta(self.own.spark):
            from pyspark.sql import functions as F

            rows = table_names.read(self.own.spark, self.own.table)
            rows = rows.where((F.col("table_id") == table_id) & (F.col("offset") >= lowest))
            return [(row[0], row[1], row[2], row[3]) for row in rows.select(*columns).collect()]
        import pyarrow.dataset as ds

        assert self.own.log is not None
        found = self.own.log.opened.to_pyarrow_dataset().to_table(
            columns=[*columns, "table_id"], filter=ds.field("offset") >= lowest
        )
        return [
            (r["topic"], r["partition"], r["offset"], r["topic_id"])
            for r in found.to_pylist()
            if r["table_id"] == table_id
        ]

    def _letters(self, source: "DataFrame", found: "DataFrame") -> "DataFrame":
        """Return the rows of the dead-letter table for the bad records."""
        from pyspark.sql import functions as F

        ids = {topic: id_ for offset in self.planned.offsets for topic, id_ in offset.topic_ids.items()}
        ours = {
            "topic_id": F.coalesce(*(F.when(F.col("topic") == t, F.lit(i)) for t, i in ids.items()), F.lit("")),
            "error_class": F.col(_CLASS),
            "error": F.col(_ERROR),
            "table": F.lit(self.table.table),
            "table_id": F.lit(self.table.identity()),
            "query_id": F.lit(self.planned.query_id),
            "batch_id": F.lit(self.planned.batch_id),
            "written_at": F.current_timestamp(),
        }
        of_record = {name: F.col(name) for name in COLUMNS if name in source.columns and name not in ours}
        joined = source.join(F.broadcast(found), _RECORD)
        return joined.select(
            *((ours | of_record).get(name, F.lit(None)).cast(kind).alias(name) for name, kind in COLUMNS.items())
        )

    def _commit(self, history: TableHistory, letters: "DataFrame") -> None:
        """Commit bad records with the next number of this table. Raises CommitRace."""
        _commit(self.own, history, letters, self._key, _last_commit(self.own, history, self._key))


def _commit(table: TableWriter, history: TableHistory, rows: "DataFrame", key: str, before: Ledger) -> None:
    """Commit rows with the next number of a key. Raises CommitRace."""
    ledger, text = before.with_next_number().to_commit(before, now_ms=table_writer.now_ms())
    note = note_of({key: text}, read=history.version)
    table.commit(history, rows, {APP_PREFIX + key: ledger.number}, note, needed=False)


def _last_commit(table: TableWriter, history: TableHistory, key: str) -> Ledger:
    """Return the newest number of a key, as a ledger without offsets."""
    try:
        return history.ledger(key) or Ledger(group=key)
    except LedgerExpired as expired:
        number = expired.number
        found = table.commit_first_ledger(history, key) if number is None else number
        return found if isinstance(found, Ledger) else Ledger(group=key, number=found)


# --- what is bad ------------------------------------------------------------------------------------------------------


def flag(named: Mapping[str, str], table: TableWriter, rows: "DataFrame") -> "DataFrame":
    """Return the rows with the types of the table, and with the first rule that a row violates; null in a good row."""
    from pyspark.sql import functions as F

    casts = {} if table.merge_schema else _casts(table, rows)
    cast_rules = [
        Rule("CAST", name, f"{table_names.quoted(name)} IS NULL OR {cast} IS NOT NULL") for name, cast in casts.items()
    ]
    cast_rows = rows.withColumns(_violated(cast_rules))
    if casts:
        cast_rows = cast_rows.withColumns({name: F.expr(cast) for name, cast in casts.items()})
    rules = [Rule("RULE", name, text) for name, text in named.items()]
    return cast_rows.withColumns(_violated([*rules, *_constraints(table, cast_rows)], F.col))


def _violated(rules: Sequence[Rule], former: "Callable[[str], Column] | None" = None) -> "dict[str, Column]":
    """Return the columns with the text and the class of the first rule that a row violates.

    Args:
        former: returns a column of an earlier call, for other rules, which come first; None: there was none.
    """
    from pyspark.sql import functions as F

    is_bad = [~F.coalesce(F.expr(rule.expression), F.lit(False)) for rule in rules]
    found = {
        _ERROR: [F.when(bad, f"{rule.name}: {rule.expression}") for bad, rule in zip(is_bad, rules, strict=True)],
        _CLASS: [F.when(bad, rule.error_class) for bad, rule in zip(is_bad, rules, strict=True)],
    }
    none = F.lit(None).cast("string")
    return {name: F.coalesce(*([former(name)] if former else []), *each, none) for name, each in found.items()}


def _casts(table: TableWriter, rows: "DataFrame") -> dict[str, str]:
    """Return in SQL the columns whose types differ from the table's, with its types; null for a value that has none.
    Nested types are Delta's to refuse."""
    types = {field.name: field.dataType.simpleString() for field in rows.schema.fields}
    of_table = {field.name: field.dataType.simpleString() for field in table.schema().fields if field.name in types}
    return {
        name: f"try_cast({table_names.quoted(name)} AS {kind})"
        for name, kind in of_table.items()
        if kind != types[name] and "<" not in kind + types[name]
    }


def _constraints(table: TableWriter, rows: "DataFrame") -> list[Rule]:
    """Return the constraints of a table on columns that these rows have. One on others is Delta's to check: their
    values may be generated."""
    columns = set(rows.columns)
    rules = [
        Rule("NOT_NULL", field.name, f"{table_names.quoted(field.name)} IS NOT NULL")
        for field in table.schema().fields
        if field.name in columns and not field.nullable
    ]
    for key, text in sorted(table.properties().items()):
        if key.startswith(_CHECK) and _is_known(rows, text):
            rules.append(Rule("CHECK", key.removeprefix(_CHECK), text))
    return rules


def _is_known(rows: "DataFrame", expression: str) -> bool:
    """Return whether the rows have all columns of an expression."""
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions as F

    try:
        return len(rows.select(F.expr(expression)).schema) == 1
    except AnalysisException:
        return False


def _records(spark: "SparkSession", records: Sequence[tuple[Any, ...]]) -> "DataFrame":
    return spark.createDataFrame(records, "topic string, partition int, offset bigint")


def _require_record_columns(rows: "DataFrame", letters: DeadLetters) -> None:
    types = [(field.name, field.dataType.simpleString()) for field in rows.schema.fields]
    if missing := [name for name, kind in table_names.RECORD_COLUMNS.items() if types.count((name, kind)) != 1]:
        raise OptionError(
            f"the sink's transform returns no column {missing[0]} of the source's type, by which {letters!r} finds the "
            f"record of a bad row: it returns {dict(types)}. Keep topic, partition and offset"
        )


# --- replay -----------------------------------------------------------------------------------------------------------


class LetterReplay:
    """Writes the records of a dead-letter table that are good now into their table, each once.

    A replay has a number. It first gives this number to the records in the dead-letter table, and then commits their
    rows under the same number. The next replay finishes one that was interrupted in between, so of a number's records
    either all are in the table or none. Records of one topic id have a replay of their own: offsets of a recreated
    topic start again.

    Args:
        letters: the dead-letter table and the rules.
        table: the table of the good rows.
        own: the dead-letter table.
        transform: the sink's transform.
    """

    def __init__(
        self,
        letters: DeadLetters,
        table: TableWriter,
        own: TableWriter,
        transform: "Callable[[DataFrame], DataFrame]",
    ) -> None:
        self.letters, self.table, self.own, self.transform = letters, table, own, transform
        self._key = f"replay.{own.identity()}"
        """In place of a group's name, in the numbers and notes of the commits."""

    def run(self) -> int:
        """Return how many records were written.

        Raises:
            OptionError: the rows lack a column, the session has no Delta Lake, or a replay was interrupted and its
                records are not good any more.
        """
        from pyspark.sql import functions as F

        spark = self.table.spark
        if not table_writer.has_delta(spark):
            raise OptionError("a replay of dead letters needs Delta Lake in the Spark session: it updates their table")
        all_letters = table_names.read(spark, self.own.table).where(F.col("table_id") == self.table.identity())
        last = all_letters.agg(F.max("replay")).collect()[0][0] or 0
        done = _last_commit(self.table, self.table.history(), self._key).number
        written = self._write(all_letters, last) if last > done else 0
        left = all_letters.where(F.col("replay").isNull())
        number = max(last, done) + 1
        for (topic_id,) in left.select("topic_id").distinct().orderBy("topic_id").collect():
            if self._claim(left.where(F.col("topic_id") == topic_id), topic_id, number):
                written += self._write(all_letters, number)
                number += 1
        return written

    def _claim(self, letters: "DataFrame", topic_id: str, number: int) -> bool:
        """Give the records that are good now a number. Returns whether there are any."""
        from pyspark.sql import functions as F

        spark = self.table.spark
        with self._flagged(letters) as flagged:
            bad = flagged.where(F.col(_ERROR).isNotNull()).select(*_RECORD).distinct()
            good = flagged.select(*_RECORD).distinct().join(F.broadcast(bad), _RECORD, "left_anti")
            records = [tuple(row) for row in good.collect()]
        if records:
            view = f"replay_{uuid.uuid4().hex}"
            _records(spark, records).createOrReplaceTempView(view)
            same = " AND ".join(f"t.{name} = r.{name}" for name in _RECORD)
            spark.sql(
                f"MERGE INTO {table_names.sql_name(self.own.table)} t USING {view} r ON {same} AND t.replay IS NULL "
                f"AND t.table_id = '{self.table.identity()}' AND t.topic_id = '{topic_id}' "
                f"WHEN MATCHED THEN UPDATE SET replay = {number}L"
            ).collect()
            spark.catalog.dropTempView(view)
        return bool(records)

    def _write(self, all_letters: "DataFrame", number: int) -> int:
        """Commit the rows of the records that have this number, unless another process has. They are read and
        transformed again, because the update of the dead-letter table has changed them."""
        from pyspark.sql import functions as F

        letters = all_letters.where(F.col("replay") == number)
        with self._flagged(letters) as flagged:
            if bad := flagged.where(F.col(_ERROR).isNotNull()).select(*_RECORD, _ERROR).take(EXAMPLES_MAX):
                examples = [f"{topic}-{partition} offset {at}, {error}" for topic, partition, at, error in bad]
                raise OptionError(
                    f"replay {number} of table {self.letters.table} was interrupted before its records were written, "
                    f"and they are not good any more: {'; '.join(examples)}. Run it with the transform and the rules "
                    "that it began with"
                )
            rows = flagged.drop(_ERROR, _CLASS)

            def attempt() -> None:
                history = self.table.history()
                before = _last_commit(self.table, history, self._key)
                if before.number < number:
                    _commit(self.table, history, rows, self._key, replace(before, number=number - 1))

            table_writer.retry_races(attempt, what=f"replay {number} to table {self.table.table}")
        return letters.count()

    @contextmanager
    def _flagged(self, letters: "DataFrame") -> "Iterator[DataFrame]":
        from pyspark import StorageLevel

        rows = self.transform(letters.select(*_OF_RECORD))
        _require_record_columns(rows, self.letters)
        flagged = flag(self.letters.rules, self.table, rows).persist(StorageLevel.MEMORY_AND_DISK)
        try:
            yield flagged
        finally:
            flagged.unpersist()
