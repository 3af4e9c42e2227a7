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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from spark_group_source.delta import constant_rows, kept, persisted, table_names, table_writer
from spark_group_source.delta.checkpoint import PlannedBatch
from spark_group_source.delta.ledger_format import Ledger
from spark_group_source.delta.merge import LateMerge
from spark_group_source.delta.table_history import LedgerExpired, OpenedLogs, TableHistory
from spark_group_source.delta.table_writer import TableWriter
from spark_group_source.errors import BadRecords, OptionError
from spark_group_source.model import OffsetRange

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
    "timestamp": "timestamp_ltz",
    "timestampType": "int",
    "key": "binary",
    "value": "binary",
    "headers": "array<struct<key: string, value: binary>>",
    "error_class": "string",
    "error": "string",
    "table": "string",
    "table_id": "string",
    "group_id": "string",
    "query_id": "string",
    "batch_id": "bigint",
    "written_at": "timestamp_ltz",
    "replay": "bigint",
}
"""The columns of a dead-letter table, with their types. Columns of the record that the query does not read are null.
``topic_id`` ends with ``#`` and the earliest leader epoch of the partition's rows, if it is not 0: after a truncation
other records have the same offsets. ``group_id`` is the group that read the record: another one writes rows of its own.
``replay`` is the number of the replay that took the record into its table; null if none did."""

_OF_RECORD = ("topic", "partition", "offset", "timestamp", "timestampType", "key", "value", "headers")
"""Those of the record, which a transform gets in a replay."""

BAD_MAX = 100_000
"""How many bad rows of one batch a sink takes: it has their topics, partitions and offsets in memory. A replay of more
records takes several commits."""

ERROR_CHARS_MAX = 300
"""How much of a transform's error text is kept."""

Record = tuple[str, int, int]
"""Topic, partition and offset."""

Place = tuple[str, str, str, int]
"""Group, topic, its id and partition."""

_RULE = "_violated_rule"
_RECORD = list(table_names.RECORD_COLUMNS)
_CHECK = "delta.constraints."
_TRANSFORM = "TRANSFORM"


class Rule(NamedTuple):
    """What each row of a table must fulfil."""

    error_class: str
    """``TRANSFORM``, ``RULE``, ``CAST``, ``NOT_NULL`` or ``CHECK``."""
    name: str
    expression: str
    """In SQL. A row is good if it is true, so not if it is null."""

    @property
    def text(self) -> str:
        """What a bad row violates, for people."""
        return f"{self.name}: {self.expression}"


@dataclass
class TableLetters:
    """What one run of a query knows of the bad records of one table."""

    run_id: str | None = None
    """As in :class:`PlannedBatch`."""
    counted: int = 0
    """The rows since the share of bad ones was compared last."""
    bad: int = 0
    """The bad ones of them."""
    ends: dict[Place, int] | None = None
    """No bad record of a place in the dead-letter table has this offset or a higher one; None: not read."""
    version: int = -1
    """The version of the dead-letter table to which ``ends`` belongs."""


class DeadLetters:
    """The table for records whose rows must not be in a sink's table:
    ``DeltaSink("/lake/orders", transform=parse, dead_letters=DeadLetters("/lake/bad", valid="id IS NOT NULL"))``.

    A row is bad if the transform says so, if one of its values cannot be cast to the type of its column in the table
    (1.9 is no ``INT``), if one of the rules is not true for it, or if it violates a ``NOT NULL`` or ``CHECK``
    constraint of the table. All rows of its record are left out then. Errors that the transform itself raises end the
    query, so use functions that return null for a broken value, such as ``try_cast``, ``try_to_timestamp`` or
    ``from_json``, and a rule.

    Args:
        table: a path or a name, like that of a sink. The first batch creates it. Several sinks may share one.
        valid: the SQL expression that is true for good rows, or several by their names. Its columns are those that the
            sink's transform returns; among them must be ``topic``, ``partition`` and ``offset``. Of a change that
            deletes a row, only rules over these, the keys and ``sequence_by`` are asked.
        error: a column of text that the transform returns, as ``decode.avro`` does: a row is bad if it is not null. The
            table does not get this column.
        max_fraction: the largest share of bad records, from 0 to 1. With more, nothing is written and the query ends.
        min_rows: how many rows at least are counted before the share is compared; small batches of a run of the query
            are added up.

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
        error: str | None = None,
        max_fraction: float = 0.1,
        min_rows: int = 100,
    ) -> None:
        if not 0 <= max_fraction <= 1:
            raise OptionError(f"max_fraction is {max_fraction}; it must be between 0 and 1")
        if min_rows < 1:
            raise OptionError(f"min_rows is {min_rows}; it must be 1 or more")
        self.table = table_names.canonical(table)
        self.rules = {"valid": valid} if isinstance(valid, str) else dict(valid)
        self.error = error
        self.max_fraction, self.min_rows = max_fraction, min_rows
        self._of_tables: dict[tuple[str, str], TableLetters] = {}
        """By the table's id and the query's."""
        self._idle_logs = OpenedLogs()

    def __repr__(self) -> str:
        return f"DeadLetters({self.table!r})"

    def settings(self) -> tuple[object, ...]:
        """Return what it was given."""
        return self.table, self.rules, self.error, self.max_fraction, self.min_rows

    @contextmanager
    def open(
        self, table: TableWriter, planned: PlannedBatch, storage_options: Mapping[str, str] | None
    ) -> "Iterator[LetterBox]":
        """Open the dead-letter table for one batch of a sink's table. The first batch creates it.

        Raises:
            OptionError: both are one table.
        """
        own = self.open_table(table, storage_options)
        if own.identity() == table.identity():
            raise OptionError(f"table {table.table} has its own bad records: dead_letters needs another table")
        box = LetterBox(self, table, own, planned, self._known(table, planned))
        try:
            yield box
        finally:
            box.release()
            self._idle_logs.put(own.log)

    def _known(self, table: TableWriter, planned: PlannedBatch) -> TableLetters:
        """Return what the query's run knows of a table's bad records."""
        key = table.identity(), planned.query_id
        known = self._of_tables.get(key)
        if known is None or planned.run_id not in (None, known.run_id):
            known = self._of_tables[key] = TableLetters(planned.run_id)
        return known

    def open_table(self, table: TableWriter, storage_options: Mapping[str, str] | None) -> TableWriter:
        """Open the dead-letter table of a sink's table, and create it if it does not exist. It is written natively
        where that works, unless its sink is not."""
        own = TableWriter(
            table.spark,
            self.table,
            writer="options" if table.writer == "options" else "auto",
            share_folders=table.writer == "native",
            storage_options=storage_options,
            log=self._idle_logs.take(),
        )
        if not own.exists():
            own.create(table.spark.createDataFrame([], ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())))
        return own

    def table_rows(self, rows: "DataFrame") -> "DataFrame":
        """Return the rows without the column of errors. Raises OptionError if they have none."""
        if self.error is not None and self.error not in rows.columns:
            raise OptionError(
                f"error is {self.error!r}, but the sink's transform returns the columns {', '.join(rows.columns)}"
            )
        return rows if self.error is None else rows.drop(self.error)


class LetterRange(NamedTuple):
    """The offsets of a partition that a batch reads, and which bad records of the same offsets are in its log."""

    start: int
    end: int
    epoch: int
    """The earliest leader epoch of the partition's rows in the ledger, which bad records get; 0: none."""
    oldest_epoch: int
    """Bad records with an earlier one were removed from the log: others have their offsets."""

    @classmethod
    def of(cls, r: OffsetRange, topic_id: str, before: Ledger | None, after: Ledger) -> "LetterRange":
        """Build it from the ledgers before and after the batch."""
        rows = after.topic(r.tp.topic, topic_id).partition(r.tp.partition)
        if rows.gone is not None:
            oldest = rows.gone + 1
        elif before is None or before.offset_of(r.tp, topic_id) is None:
            oldest = 0  # an attempt that did not get to the rows may have read it under another leader
        else:
            oldest = rows.epoch  # a reset forgets what is gone
        return cls(r.start, r.end, rows.epoch, oldest)


def _id_and_epoch(topic_id: str) -> tuple[str, int]:
    """Return the parts of a ``topic_id`` in a dead-letter table."""
    id_, _, epoch = topic_id.partition("#")
    return id_, int(epoch or 0)


class LetterBox:
    """Takes the bad records out of one batch for one table.

    Args:
        letters: the dead-letter table and the rules.
        table: the table of the good rows.
        own: the dead-letter table.
        known: what the query's run knows of the table's bad records.
    """

    def __init__(
        self, letters: DeadLetters, table: TableWriter, own: TableWriter, planned: PlannedBatch, known: TableLetters
    ) -> None:
        self.letters, self.table, self.own, self.planned = letters, table, own, planned
        self._known = known
        self._key = f"letters.{table.identity()}"
        """In place of a group's name, in the numbers and notes of the commits."""
        self._ranges: dict[Place, LetterRange] = {}
        """What the batch reads."""
        self._kept: DataFrame | None = None
        """The rows that Spark keeps."""
        self.written = 0
        """How many bad records of the batch were written."""

    def release(self) -> None:
        """Let Spark forget the rows that it keeps."""
        if self._kept is not None:
            self._kept.unpersist()
        self._kept = None

    def good_rows(
        self,
        source: "DataFrame",
        rows: "DataFrame",
        before: Mapping[str, Ledger | None],
        after: Mapping[str, Ledger],
    ) -> "DataFrame":
        """Commit the bad records of a batch, and return the other rows.

        Args:
            source: the rows of the batch, as the query reads them.
            rows: what the sink's transform made of them.
            before, after: by group, the ledgers of the sink's table before and after the batch.

        Raises:
            BadRecords, OptionError: as in :class:`DeadLetters`. Nothing was written.
        """
        _require_record_columns(rows, self.letters)
        self._require_one_reader()
        self._ranges = {
            (offset.group, r.tp.topic, id_, r.tp.partition): LetterRange.of(
                r, id_, before.get(offset.group), after[offset.group]
            )
            for offset in self.planned.offsets
            for r in offset.batch()
            for id_ in [offset.topic_ids.get(r.tp.topic, "")]
        }
        what = f"bad records of batch {self.planned.batch_id} to table {self.letters.table}"
        return table_writer.retry_races(lambda: self._attempt(source, rows), what=what)

    def _attempt(self, source: "DataFrame", rows: "DataFrame") -> "DataFrame":
        from pyspark.sql import functions as F

        self.release()
        history = self.own.history()
        if known := self._known_records(history):  # an earlier attempt has decided
            rows = _without_records(rows, known)
        frame, rules = flag(self.letters, self.table, rows)
        flagged = self._kept = kept(frame)
        ((counted, bad),) = flagged.agg(F.count(F.lit(1)), F.count(_RULE)).collect()
        found = bad_records(flagged, rules, bad, self.table.table) if bad else {}
        self._require_few(self._known.counted + counted, self._known.bad + bad, found)
        if found:
            self._require_planned(found)
            self._commit(history, source, found)
            self.written += len(found)
            log.warning(
                "table %s: %d of %d rows of batch %d are bad, and their records are in table %s: %s",
                self.table.table,
                bad,
                counted,
                self.planned.batch_id,
                self.letters.table,
                examples_of(found),
            )
        # Read again, because another query may have written to the table meanwhile.
        sums = self._known.counted + counted, self._known.bad + bad
        self._known.counted, self._known.bad = (0, 0) if sums[0] >= self.letters.min_rows else sums
        good = self.letters.table_rows(flagged.where(F.col(_RULE).isNull()).drop(_RULE))
        return _without_records(good, found) if found else good

    def _require_few(self, counted: int, bad: int, found: "Mapping[Record, Rule]") -> None:
        """Raise BadRecords if too many of the counted rows are bad."""
        letters, table = self.letters, self.table.table
        if counted >= letters.min_rows and bad > letters.max_fraction * counted:
            raise BadRecords(
                f"{bad} of the last {counted} rows for table {table} are bad, more than max_fraction="
                f"{letters.max_fraction:g} of them. Nothing of this batch was written. The first ones: "
                f"{examples_of(found)}. Correct the transform, the rules or the table, or raise max_fraction, and "
                "start the query with the same checkpoint",
                table=table,
                rows=counted,
                bad=bad,
            )

    def _require_one_reader(self) -> None:
        """Raise OptionError if several sources of the query read one partition."""
        readers = Counter(r.tp for offset in self.planned.offsets for r in offset.batch() if r.start < r.end)
        if several := sorted(tp for tp, n in readers.items() if n > 1):
            raise OptionError(
                f"several kafka-group sources of this query read {several[0]}, so the source of a bad record for table "
                f"{self.table.table} is unknown. Nothing was written. Read each topic with one source, and use "
                "its DataFrame as often as needed; or write the rows of each source with a query of its own",
                table=self.table.table,
            )

    def _require_planned(self, found: "Iterable[Record]") -> None:
        """Raise OptionError for a bad row of a record that the batch does not have."""
        ranges = {(topic, partition): r for (_, topic, _, partition), r in self._ranges.items()}
        for topic, partition, at in found:
            r = ranges.get((topic, partition))
            if r is None or not r.start <= at < r.end:
                raise OptionError(
                    f"a bad row for table {self.table.table} has topic {topic}, partition {partition} and offset {at}, "
                    "a record that the batch does not have. Nothing was written. Keep these columns as they are in the "
                    "sink's transform. A stateful query, such as a join of streams, also returns rows of earlier "
                    "records, which cannot be bad: leave them out in the transform, and start the query with the same "
                    "checkpoint",
                    table=self.table.table,
                )

    # --- the dead-letter table --------------------------------------------------------------------------------------

    def _known_records(self, history: TableHistory) -> list[tuple[str, int, int]]:
        """Return the records of the batch that are in the dead-letter table already."""
        known = self._known
        after = known.version if known.ends is not None else -1
        if known.ends is None or any(commit.ledger_entry(self._key) for commit in history.commits(after=after)):
            known.ends = self._read_ends()
        known.version = history.version
        begun = [r.start for place, r in self._ranges.items() if r.start < known.ends.get(place, 0)]
        if not begun:
            return []
        found = set()
        of_table = f"WHERE table_id = '{self.table.identity()}' AND `offset` >= {min(begun)}"
        for group, topic, partition, at, topic_id in self.own.select(
            "group_id, topic, `partition`, `offset`, topic_id", of_table
        ):
            id_, epoch = _id_and_epoch(topic_id)
            r = self._ranges.get((group, topic, id_, partition))
            if r is not None and r.start <= at < r.end and r.oldest_epoch <= epoch:
                found.add((topic, partition, at))
        return sorted(found)

    def _read_ends(self) -> dict[Place, int]:
        """Return where the bad records of the sink's table end."""
        ends: dict[Place, int] = {}
        of_table = f"WHERE table_id = '{self.table.identity()}' GROUP BY group_id, topic, topic_id, `partition`"
        for group, topic, topic_id, partition, last in self.own.select(
            "group_id, topic, topic_id, `partition`, max(`offset`)", of_table
        ):
            place = group, topic, _id_and_epoch(topic_id)[0], partition
            ends[place] = max(ends.get(place, 0), last + 1)
        return ends

    def _letters(self, source: "DataFrame", found: "Mapping[Record, Rule]") -> "DataFrame":
        """Return the rows of the dead-letter table for the bad records.

        The source reads the records again. One that it does not have any more, as its topic was compacted meanwhile,
        has a letter without key and value.
        """
        from pyspark.sql import functions as F

        readers = {
            (topic, partition): (group, f"{id_}#{r.epoch}" if r.epoch else id_)
            for (group, topic, id_, partition), r in self._ranges.items()
        }
        rows = [(*record, *readers[record[:2]], rule.error_class, rule.text) for record, rule in found.items()]
        names = [*_RECORD, "group_id", "topic_id", "error_class", "error"]
        ours = {
            "group_id": F.col("group_id"),
            "topic_id": F.col("topic_id"),
            "error_class": F.col("error_class"),
            "error": F.col("error"),
            "table": F.lit(self.table.table),
            "table_id": F.lit(self.table.identity()),
            "query_id": F.lit(self.planned.query_id),
            "batch_id": F.lit(self.planned.batch_id),
            "written_at": F.current_timestamp(),
        }
        columns = ours | {name: F.col(name) for name in _OF_RECORD if name in source.columns}
        of_record = source.select(*(name for name in _OF_RECORD if name in source.columns))
        bad = _frame(source.sparkSession, rows, names)
        # Only bad records are shuffled for the outer join, and one task writes them.
        of_bad = of_record.join(F.broadcast(bad.select(*_RECORD)), _RECORD, "left_semi")
        joined = bad.join(of_bad, _RECORD, "left").coalesce(1)
        return joined.select(*(columns.get(name, F.lit(None)).cast(kind).alias(name) for name, kind in COLUMNS.items()))

    def _commit(self, history: TableHistory, source: "DataFrame", found: "Mapping[Record, Rule]") -> None:
        """Commit bad records with the next number of this table. Raises CommitRace."""
        before = _last_commit(self.own, history, self._key)
        version = self.own.commit_ledger(history, before, self._letters(source, found)).table_version
        if version != history.version + 1 or self._known.ends is None:
            return  # another commit came in between: the next batch reads it
        self._known.version = version
        ends = self._known.ends
        ends |= {place: max(r.end, ends.get(place, 0)) for place, r in self._ranges.items()}


def _last_commit(table: TableWriter, history: TableHistory, key: str) -> Ledger:
    """Return the newest number of a key, as a ledger without offsets."""
    try:
        return history.ledger(key) or Ledger(group=key)
    except LedgerExpired:
        return table.restarted_ledger(history, key)


# --- what is bad ------------------------------------------------------------------------------------------------------


def flag(letters: DeadLetters, table: TableWriter, rows: "DataFrame") -> "tuple[DataFrame, list[Rule]]":
    """Return the rows with the types of the table, and with the number of the first rule that each violates, which is
    null in a good row; and the rules."""
    from pyspark.sql import functions as F

    merge = table.merge
    keys = () if merge is None else merge.keys
    widens = table.merge_schema and merge is None  # MERGE widens no type
    casts = {} if widens else table_names.casts_of(table.schema(), letters.table_rows(rows), keys=keys)
    finders = [] if merge is None else [*merge.keys, *filter(None, [merge.sequence_by])]
    of_deletion = dict.fromkeys([*finders, *_RECORD])
    is_deletion = ""
    if merge is not None and merge.delete_when is not None:
        merge.table_rows(rows)
        has_finders = [f"{table_names.quoted(name)} IS NOT NULL" for name in finders]
        is_deletion = f"({' AND '.join([f'({merge.delete_when})', *has_finders])}) OR "
    error = letters.error
    rules = [] if error is None else [Rule(_TRANSFORM, error, f"{table_names.quoted(error)} IS NULL")]
    for name, cast in casts.items():
        # A deletion may have only what finds its row, and the table does not get its values.
        excepted = is_deletion if name not in of_deletion else ""
        rules.append(Rule("CAST", cast.column, f"{excepted}({cast.is_same})" if excepted else cast.is_same))
    first = F.coalesce(*_violated(rules, 0), F.lit(None).cast("int"))
    typed = rows.withColumns({_RULE: first, **{name: F.expr(cast.text) for name, cast in casts.items()}})
    others = [Rule("RULE", name, text) for name, text in letters.rules.items()] + _constraints(table, typed)
    if is_deletion:
        known = typed.select(*map(table_names.quoted, of_deletion))
        others = [
            rule
            if rule.error_class == "RULE" and _is_known(known, rule.expression)
            else rule._replace(expression=f"{is_deletion}({rule.expression})")
            for rule in others
        ]
    return typed.withColumn(_RULE, F.coalesce(F.col(_RULE), *_violated(others, len(rules)))), rules + others


def _violated(rules: Sequence[Rule], first: int) -> "list[Column]":
    """Return the number of each rule where a row violates it, counted from ``first``."""
    from pyspark.sql import functions as F

    return [F.when(~F.coalesce(F.expr(r.expression), F.lit(False)), n) for n, r in enumerate(rules, first)]


def bad_records(flagged: "DataFrame", rules: Sequence[Rule], bad: int, table: str) -> "dict[Record, Rule]":
    """Return the records of the bad rows, with the first rule that one of their rows violates.

    Args:
        bad: the number of bad rows.

    Raises:
        BadRecords: there are more than BAD_MAX.
    """
    from pyspark.sql import functions as F

    if bad > BAD_MAX:
        raise BadRecords(
            f"{bad} rows of one batch for table {table} are bad, and a sink takes at most {BAD_MAX}. Nothing of this "
            "batch was written. Correct the transform, the rules or the table, and start the query with the same "
            "checkpoint: it runs this batch again. maxOffsetsPerTrigger bounds later batches",
            table=table,
            bad=bad,
        )
    errors = [rule.name for rule in rules if rule.error_class == _TRANSFORM]
    text = F.col(table_names.quoted(errors[0])).cast("string") if errors else F.lit("")
    text = F.make_valid_utf8(F.coalesce(text, F.lit("")))  # Spark Connect cannot collect other text
    bad_rows = flagged.where(F.col(_RULE).isNotNull())
    rows = bad_rows.select(*_RECORD, _RULE, F.substring(text, 1, ERROR_CHARS_MAX).alias("text")).collect()
    found = sorted(tuple(row) for row in rows if None not in row)
    if len(found) < len(rows):
        raise OptionError(f"a bad row for table {table} has no topic, partition or offset: keep them in the transform")
    return {
        (topic, partition, at): rules[number]._replace(expression=text) if number < len(errors) else rules[number]
        for topic, partition, at, number, text in reversed(found)
    }


def examples_of(found: "Mapping[Record, Rule]") -> str:
    """Return the first bad records in words."""
    return "; ".join(f"{t}-{p} offset {at}, {found[t, p, at].text}" for t, p, at in sorted(found)[:EXAMPLES_MAX])


def _constraints(table: TableWriter, rows: "DataFrame") -> list[Rule]:
    """Return the constraints of a table on columns that these rows have. One on others is Delta's to check: their
    values may be generated."""
    columns = {name.lower(): name for name in rows.columns}  # Delta compares names without their case
    rules = [
        Rule("NOT_NULL", field.name, f"{table_names.quoted(columns[field.name.lower()])} IS NOT NULL")
        for field in table.schema().fields
        if field.name.lower() in columns and not field.nullable
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


def _frame(spark: "SparkSession", rows: Iterable[Sequence[object]], names: Sequence[str]) -> "DataFrame":
    """Return rows of a dead-letter table's columns."""
    columns = ", ".join(f"{name}: {COLUMNS[name]}" for name in names)
    return constant_rows(spark, (dict(zip(names, row, strict=True)) for row in rows), columns)


def _without_records(rows: "DataFrame", records: "Iterable[Record]") -> "DataFrame":
    from pyspark.sql import functions as F

    return rows.join(F.broadcast(_frame(rows.sparkSession, records, _RECORD)), _RECORD, "left_anti")


def _require_record_columns(rows: "DataFrame", letters: DeadLetters) -> None:
    types = [(field.name, field.dataType.simpleString()) for field in rows.schema.fields]
    if missing := [name for name, kind in table_names.RECORD_COLUMNS.items() if types.count((name, kind)) != 1]:
        raise OptionError(
            f"the sink's transform returns no column {missing[0]} of the source's type, by which {letters!r} finds the "
            f"record of a bad row: it returns {dict(types)}. Keep topic, partition and offset"
        )


def _numbers_without_rows(history: TableHistory, key: str) -> set[int]:
    """Return the numbers of the replays that were ended without rows, or whose rows a ``RESTORE`` removed. Of replays
    before another commit that set the content of the table, and of those that left the log, none is returned: whether
    their rows are there is unknown."""
    removed: set[int] = set()
    below: int | None = None
    """Commits above this version are undone."""
    for commit in history.commits():  # newest first
        is_undone = below is not None and commit.version > below
        is_restore = commit.operation == "RESTORE"
        entry = commit.ledger_entry(key)
        if entry is not None and (is_undone or "reason" in entry):
            removed.add(int(entry["ledger"]["number"]))
        if not is_undone and is_restore:
            below = history.source.restored_to(commit)
        if not is_undone and (commit.sets_content or (is_restore and below is None)):
            break
    return removed


# --- replay -----------------------------------------------------------------------------------------------------------


class LetterReplay:
    """Writes the records of a dead-letter table that are good now into their table, each once.

    A replay has a number. It first gives this number to the records in the dead-letter table, and then commits their
    rows under the same number, so of a number's records either all are in the table or none. If it is interrupted in
    between, or its write fails, the next replay ends that number by a commit without rows, which excludes a late one
    with the rows, and its records are replayed anew. Records of one topic id have a replay of their own: offsets of a
    recreated topic start again.

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
        if table.merge is not None:
            table.merge = LateMerge(**vars(table.merge))
        self._key = f"replay.{own.identity()}"
        """In place of a group's name, in the numbers and notes of the commits."""
        self.left = 0
        """How many records of the table are not replayed after the run."""
        self.first_bad = ""
        """The first of them that is bad, in words; empty if none is: then the transform returns no row for them."""

    def run(self) -> int:
        """Write the records that are good, and return how many they were.

        Raises:
            OptionError: the rows lack a column, or the session has no Delta Lake.
            Exception: Delta's own, of a write that the table refuses. Nothing of this number was written.
        """
        from pyspark.sql import functions as F

        spark = self.table.spark
        if not table_writer.has_delta(spark):
            raise OptionError("a replay of dead letters needs Delta Lake in the Spark session: it updates their table")
        all_letters = table_names.read(spark, self.own.table).where(F.col("table_id") == self.table.identity())
        numbers = {row[0] for row in all_letters.select("replay").distinct().collect()} - {None}
        history = self.table.history()
        done = _last_commit(self.table, history, self._key)
        if (last := max(numbers, default=0)) > done.number:
            # A cluster may still finish the write of a driver that was killed: of the two commits one is made.
            self._commit_number(last, done, None, reason="a replay that ended without rows")
            history, done = self.table.history(), replace(done, number=last)
        self._release(numbers & _numbers_without_rows(history, self._key))
        written = 0
        left = all_letters.where(F.col("replay").isNull())
        number = done.number + 1
        for (topic_id,) in left.select("topic_id").distinct().orderBy("topic_id").collect():
            claimed = BAD_MAX
            while claimed == BAD_MAX:
                claimed = self._claim(left.where(F.col("topic_id") == topic_id), topic_id, number)
                if claimed:
                    written += self._write(all_letters, number, done)
                    number += 1
        self.left = left.count()
        return written

    def _release(self, numbers: "Set[int]") -> None:
        """Take these numbers from their records, so that they are replayed again."""
        if numbers:
            self._update(
                f"UPDATE {table_names.sql_name(self.own.table)} SET replay = NULL "
                f"WHERE table_id = '{self.table.identity()}' AND replay IN ({', '.join(map(str, sorted(numbers)))})"
            )

    def _update(self, statement: str) -> None:
        """Run a statement that changes the dead-letter table."""
        self.own.warn_of_other_drivers("a replay updates it")

        def attempt() -> None:
            with table_writer.races():
                self.table.spark.sql(statement).collect()

        table_writer.retry_races(
            attempt,
            what=f"a replay's update of table {self.letters.table}",
            remedy="Stop the queries that write bad records to it, or wait until they are idle, and run the replay "
            "again",
        )

    def _claim(self, letters: "DataFrame", topic_id: str, number: int) -> int:
        """Give records that are good now a number. Returns how many they are, at most :data:`BAD_MAX`."""
        from pyspark.sql import functions as F

        spark = self.table.spark
        with self._flagged(letters) as (flagged, rules):
            bad = flagged.where(F.col(_RULE).isNotNull()).select(*_RECORD).distinct()
            good = flagged.select(*_RECORD).distinct().join(bad, _RECORD, "left_anti")
            records = good.join(letters.select(*_RECORD), _RECORD, "left_semi").limit(BAD_MAX).collect()
            if len(records) < BAD_MAX and not self.first_bad:
                first = flagged.where(F.col(_RULE).isNotNull()).dropna(subset=_RECORD).orderBy(*_RECORD).limit(1)
                self.first_bad = examples_of(bad_records(first, rules, 1, self.table.table))
        if records:
            view = f"replay_{uuid.uuid4().hex}"
            _frame(spark, records, _RECORD).createOrReplaceTempView(view)
            same = " AND ".join(f"t.{name} = r.{name}" for name in _RECORD)
            try:
                self._update(
                    f"MERGE INTO {table_names.sql_name(self.own.table)} t USING {view} r ON {same} "
                    f"AND t.replay IS NULL AND t.table_id = '{self.table.identity()}' AND t.topic_id = '{topic_id}' "
                    f"WHEN MATCHED THEN UPDATE SET replay = {number}L"
                )
            finally:
                spark.catalog.dropTempView(view)
        return len(records)

    def _write(self, all_letters: "DataFrame", number: int, done: Ledger) -> int:
        """Commit the rows of the records that have this number, unless another process has. They are read and
        transformed again, because the update of the dead-letter table has changed them."""
        from pyspark.sql import functions as F

        letters = all_letters.where(F.col("replay") == number)
        with self._flagged(letters) as (flagged, rules):
            examples = ""
            if bad := flagged.where(F.col(_RULE).isNotNull()).count():
                examples = examples_of(bad_records(flagged, rules, bad, self.table.table))
            elif gone := letters.select(*_RECORD).join(flagged, _RECORD, "left_anti").orderBy(*_RECORD).take(1):
                examples = "{}-{} offset {}, the transform returns no row for it".format(*gone[0])
            if examples:
                raise OptionError(
                    f"records of table {self.letters.table} were good, and are not when they are read again: "
                    f"{examples}. They were not written. The transform and the rules must give the same result for a "
                    "record each time: leave out functions such as rand() and current_timestamp(), and run the replay "
                    "again"
                )
            rows = self.letters.table_rows(flagged.drop(_RULE))
            if self.table.merge is None:  # which may need columns that the table does not have
                # The query may read fewer columns, and its transform return all that it gets.
                known = {name.lower() for name in self.table.schema().names}
                rows = rows.drop(*(name for name in _OF_RECORD if name.lower() not in known))
            self._commit_number(number, done, rows)
        return letters.count()

    def _commit_number(self, number: int, done: Ledger, rows: "DataFrame | None", reason: str | None = None) -> None:
        """Commit a number, unless it is there; ``done`` was the last one before this run."""

        def attempt() -> None:
            history = self.table.history()
            try:
                before = history.ledger(self._key) or done
            except LedgerExpired:  # there is no commit of this run yet
                before = done
            if before.number < number:
                self.table.commit_ledger(history, replace(before, number=number - 1), rows, reason=reason)

        table_writer.retry_races(attempt, what=f"replay {number} to table {self.table.table}")

    @contextmanager
    def _flagged(self, letters: "DataFrame") -> "Iterator[tuple[DataFrame, list[Rule]]]":
        rows = self.transform(letters.select(*_OF_RECORD))
        _require_record_columns(rows, self.letters)
        frame, rules = flag(self.letters, self.table, rows)
        with persisted(frame) as flagged:
            yield flagged, rules
