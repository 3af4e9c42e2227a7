"""Merge: writes the latest change of each key into a Delta table, in place of all rows.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``). Deliberately absent: which
records of a batch are new (:mod:`ledger_decision`), decoding.

``MERGE`` runs a transaction of its own, so the number and the note with the ledger come from the session's settings
(``txnAppId``, ``txnVersion``, ``userMetadata``), and rows and ledger are one commit, as with :class:`OptionsWriter`.
The settings hold for every statement of the session that has no options of its own, so :data:`session_lock` covers
them all: those of this module, and the creation of tables. In ``foreachBatch`` Spark gives each query a session of its
own.
"""

import contextlib
import re
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from spark_group_source.delta import persisted, session_setting, table_names
from spark_group_source.errors import OptionError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

RETENTION_DAYS = 7
"""How long the sequence of a deleted key is kept by default."""
CLEAN_EVERY_S = 3600.0
"""The interval at which sequences of deleted keys are removed that are older than their retention."""
BOUND_CHARS_MAX = 200
"""Keys with longer text do not bound the files that a merge reads."""

_IS_DELETED, _ORDER, _CHANGE = "__is_deleted", "__order", "__change"
_COUNT, _UNORDERED = "__count", "__unordered"
_TABLE_ID = "_table_id"
"""The column of a table of deleted keys that has the id of the table of the rows."""
_PREFIX = "spark.databricks.delta."

session_lock = threading.Lock()
"""Held while a session has the settings of a merge, and by each other statement that would take them."""


@dataclass(frozen=True)
class Merge:
    """How changes become rows: ``DeltaSink("/lake/customers", transform=parse, merge=Merge(keys=["id"]))``.

    Of the changes of a key in a batch the latest one wins, and it replaces the key's row in the table. Without
    ``sequence_by`` that is the one with the highest offset, so all changes of a key must be in one partition, and the
    transform must return ``offset``.

    Args:
        keys: the columns that identify a row. They must not be null, and their values must be the same in the table's
            type, whatever their type in the batch.
        delete_when: the SQL expression that is true for a change that deletes the key's row.
        sequence_by: the column of the table by which changes are ordered, such as the position in a database's log. It
            must not be null. Changes that come late lose, also against a deletion. They are ordered as values of the
            table's type: as text, '9' is above '10'.
        deleted: the table that keeps keys of deleted rows with their sequence, needed with ``delete_when`` and
            ``sequence_by``. The first batch creates it. Merges of several tables with the same keys and
            ``sequence_by`` may share one.
        retention_days: how long it keeps them.
        without: columns of the transform that the table does not get, such as those of ``delete_when``.

    Raises:
        OptionError: an argument cannot work.
    """

    keys: Sequence[str]
    delete_when: str | None = None
    sequence_by: str | None = None
    deleted: str | None = None
    retention_days: float = RETENTION_DAYS
    without: Sequence[str] = ()
    is_late: ClassVar[bool] = False
    """Whether a change loses against a row or a deletion with the same sequence."""

    def __post_init__(self) -> None:
        if isinstance(self.keys, str) or not self.keys:
            raise OptionError(f"keys is {self.keys!r}; it must be a list of one or more columns")
        if self.delete_when and self.sequence_by and not self.deleted:
            raise OptionError(
                "delete_when with sequence_by needs deleted='/lake/…', a table that keeps the keys of deleted rows: a "
                "change that comes after a deletion, but is older, would bring the row back"
            )
        if self.deleted and not (self.delete_when and self.sequence_by):
            raise OptionError("deleted is used with both delete_when and sequence_by only")
        if lost := {*self.keys, self.sequence_by} & {*self.without}:
            raise OptionError(f"without names {', '.join(sorted(map(str, lost)))}, which the table needs")

    def table_rows(self, rows: "DataFrame") -> "DataFrame":
        """Return the columns of the transform that the table gets.

        Raises:
            OptionError: a column is missing.
        """
        order = [self.sequence_by or "offset"]
        if missing := [name for name in (*self.keys, *order, *self.without) if name not in rows.columns]:
            raise OptionError(
                f"the merge needs the column {missing[0]}, and the sink's transform returns {', '.join(rows.columns)}"
            )
        return rows.drop(*self.without)

    def latest(self, rows: "DataFrame") -> "DataFrame":
        """Return the latest change of each key, with the columns of the transform, ``_IS_DELETED``, and in ``_COUNT``
        and ``_UNORDERED`` the number of the key's changes and of those without a sequence."""
        from pyspark.sql import functions as F

        last = F.col("offset") if "offset" in rows.columns else F.lit(0)
        sequence = F.col(table_names.quoted(self.sequence_by)) if self.sequence_by else F.lit(0)
        order = F.struct(sequence.alias("sequence"), last.alias("offset"))
        is_deleted = F.coalesce(F.expr(self.delete_when or "false"), F.lit(False))
        columns = map(table_names.quoted, self.table_rows(rows).columns)
        changes = rows.select(
            *map(table_names.quoted, self.keys),
            order.alias(_ORDER),
            F.struct(*columns, is_deleted.alias(_IS_DELETED)).alias(_CHANGE),
        )
        unordered = F.count_if(F.col(f"{_ORDER}.sequence").isNull())
        newest = changes.groupBy(*map(table_names.quoted, self.keys)).agg(
            F.max_by(_CHANGE, _ORDER).alias(_CHANGE), F.count("*").alias(_COUNT), unordered.alias(_UNORDERED)
        )
        return newest.select(f"{_CHANGE}.*", _COUNT, _UNORDERED)


class LateMerge(Merge):
    """A merge of changes that may be older than the table's rows although their sequence is the same, as bad records
    are that are replayed: such a change loses, also against a deletion."""

    is_late = True


class MergeWriter:
    """Merges batches into one table."""

    def __init__(self, spark: "SparkSession", table: str, merge: Merge, *, adds_columns: bool) -> None:
        self._spark, self._table, self._merge, self._adds_columns = spark, table, merge, adds_columns

    def commit(self, rows: "DataFrame", app_id: str, number: int, note: str, table_id: str) -> None:
        """Merge rows, and commit the ``SetTransaction`` number and the note with them. Delta skips a number that is
        used, without an error.

        Args:
            table_id: the id of the table, by which its deleted keys are found.

        Raises:
            OptionError: a column is missing, a key or a sequence is null or a CHAR, or the table's type would change a
                value.
            Exception: Delta's own, also for a concurrent commit.
        """
        schema = table_names.read(self._spark, self._table).schema
        self._refuse_char(schema)
        with persisted(self._merge.latest(self._typed(rows, schema))) as latest:
            bounds, deletions = self._inspect(latest, schema)
            changes = latest.drop(_COUNT, _UNORDERED)
            with session_lock, contextlib.ExitStack() as stack:
                if self._adds_columns:
                    self._add_columns(changes)
                known = changes if self._merge.deleted is None else self._without_late(changes, deletions, table_id)
                settings = {"write.txnAppId": app_id, "write.txnVersion": number, "commitInfo.userMetadata": note}
                for name, value in settings.items():
                    stack.enter_context(session_setting(self._spark, _PREFIX + name, str(value), must=True))
                self._run(known, table_names.sql_name(self._table), self._clauses(changes), bounds)

    def _refuse_char(self, schema: "StructType") -> None:
        """Raise OptionError for a key or a sequence of type CHAR. Spark pads its values in the table only, and Delta
        Lake 4.4 ends a statement that compares them with an internal error."""
        names = {name.lower() for name in [*self._merge.keys, *filter(None, [self._merge.sequence_by])]}
        for field in schema.fields:
            kind = field.metadata.get("__CHAR_VARCHAR_TYPE_STRING", "")
            if field.name.lower() in names and kind.startswith("char"):
                raise OptionError(
                    f"column {field.name} of table {self._table} is {kind}, whose padded values cannot be compared "
                    "with those of changes. Nothing was written. Merge into a table in which it is STRING or VARCHAR"
                )

    def _typed(self, rows: "DataFrame", schema: "StructType") -> "DataFrame":
        """Return the rows with keys and sequence as the table has them: text has another order than numbers, and of two
        values that become one key, one would be lost. What does not fit becomes null and is refused."""
        from pyspark.sql import functions as F

        merge = self._merge
        names = {*merge.keys, merge.sequence_by}
        casts = table_names.casts_of(
            schema, rows.select(*(table_names.quoted(n) for n in rows.columns if n in names)), keys=merge.keys
        )
        typed = {n: F.expr(f"CASE WHEN {c.is_same} THEN {c.text} END") for n, c in casts.items()}
        return rows.withColumns(typed) if typed else rows  # Spark Connect refuses none

    def _inspect(self, changes: "DataFrame", schema: "StructType") -> tuple[str, int]:
        """Return the condition that bounds the keys of a batch, so that Delta skips files, and how many changes delete.

        Raises:
            OptionError: a key or a sequence is null, or the table's type would change a value, which Delta refuses in
                an append only.
        """
        from pyspark.sql import functions as F
        from pyspark.sql.types import ByteType, DateType, IntegerType, LongType, ShortType, StringType

        of_table = {field.name.lower(): field.dataType for field in schema.fields}
        of_batch = {f.name.lower(): f.dataType for f in changes.schema.fields}
        asked = []
        for name in self._merge.keys:
            column, kind = F.col(table_names.quoted(name)), of_batch[name.lower()]
            # As text: Python's dates have years 1 to 9999 only. Bounds of other types are not asked for that reason.
            cast = "string" if isinstance(kind, DateType) else kind
            has_bounds = isinstance(kind, ByteType | ShortType | IntegerType | LongType | DateType | StringType)
            bounds = [F.min(column).cast(cast), F.max(column).cast(cast)] if has_bounds else [F.lit(None), F.lit(None)]
            if isinstance(kind, StringType):  # other text has other bytes in Python and in the statistics of files
                bounds = [F.when(F.bool_and(F.is_valid_utf8(column)), bound) for bound in bounds]
            asked += [F.sum(F.when(column.isNull(), F.col(_COUNT))), *bounds]
        casts = table_names.casts_of(schema, changes, keys=self._merge.keys)  # those that _typed left
        asked += [F.count_if(~(F.col(_IS_DELETED) | F.expr(cast.is_same))) for cast in casts.values()]
        found = changes.agg(F.count_if(F.col(_IS_DELETED)), F.sum(_UNORDERED), *asked).collect()[0]
        if found[1]:
            raise self._lacks(found[1], str(self._merge.sequence_by), "which orders changes", of_table)
        conditions = []
        for n, key in enumerate(self._merge.keys):
            nulls, least, most = found[2 + 3 * n : 5 + 3 * n]
            if nulls:
                raise self._lacks(nulls, key, "which is a key", of_table)
            if of_batch[key.lower()] != of_table.get(key.lower()):
                continue  # a new column, or a nested one
            is_date = isinstance(of_batch[key.lower()], DateType)
            if (low := _literal(least, is_date=is_date)) and (high := _literal(most, is_date=is_date)):
                conditions.append(f"t.{table_names.quoted(key)} BETWEEN {low} AND {high}")
        for name, lost in zip(casts, found[2 + 3 * len(self._merge.keys) :], strict=True):
            if lost:
                kinds = [of[name.lower()].simpleString() for of in (of_batch, of_table)]
                raise OptionError(
                    f"{lost} changes for table {self._table} have a {name} whose value the table's type would change: "
                    f"it is {kinds[0]} in the batch and {kinds[1]} in the table. Nothing was written. Cast the column "
                    "in the transform, or make such changes bad records: dead_letters=DeadLetters('/lake/bad')"
                )
        return " AND ".join(conditions), int(found[0])

    def _lacks(self, count: int, column: str, what: str, of_table: "Mapping[str, DataType]") -> OptionError:
        of = of_table.get(column.lower())
        rule = f"{column if re.fullmatch('[A-Za-z_][A-Za-z0-9_]*', column) else table_names.quoted(column)} IS NOT NULL"
        in_table = "" if of is None else f" and has type {of.simpleString()} in the table"
        return OptionError(
            f"{count} changes for table {self._table} have no {column}, {what}{in_table}. Nothing was written. Leave "
            "them out in the transform, or make them bad records: "
            f"dead_letters=DeadLetters('/lake/bad', valid={rule!r})"
        )

    def _add_columns(self, changes: "DataFrame") -> None:
        """Add new columns to the table, in a commit of its own."""
        from pyspark.sql.types import StructType

        known = {name.lower() for name in table_names.read(self._spark, self._table).columns}
        new = [field for field in changes.drop(_IS_DELETED).schema.fields if field.name.lower() not in known]
        if new:
            columns = table_names.sql_columns(StructType(new))
            self._spark.sql(f"ALTER TABLE {table_names.sql_name(self._table)} ADD COLUMNS ({columns})")

    def _clauses(self, changes: "DataFrame") -> list[str]:
        names = [table_names.quoted(name) for name in changes.columns if name != _IS_DELETED]
        update = ", ".join(f"t.{name} = s.{name}" for name in names)
        insert = f"({', '.join(names)}) VALUES ({', '.join(f's.{name}' for name in names)})"
        if_newer = ""
        if self._merge.sequence_by:
            sequence = table_names.quoted(self._merge.sequence_by)
            wins = ">" if self._merge.is_late else ">="
            if_newer = f" AND (t.{sequence} IS NULL OR s.{sequence} {wins} t.{sequence})"
        return [
            f"WHEN MATCHED AND s.{_IS_DELETED}{if_newer} THEN DELETE",
            f"WHEN MATCHED AND NOT s.{_IS_DELETED}{if_newer} THEN UPDATE SET {update}",
            f"WHEN NOT MATCHED AND NOT s.{_IS_DELETED} THEN INSERT {insert}",
        ]

    def _run(self, source: "DataFrame", table: str, clauses: Sequence[str], bounds: str = "") -> None:
        view = f"changes_{uuid.uuid4().hex}"
        source.createOrReplaceTempView(view)
        keys = map(table_names.quoted, self._merge.keys)
        same = " AND ".join([*(f"t.{key} = s.{key}" for key in keys), *([bounds] if bounds else [])])
        try:
            self._spark.sql(f"MERGE INTO {table} t USING {view} s ON {same} {' '.join(clauses)}").collect()
        finally:
            self._spark.catalog.dropTempView(view)

    # --- deleted keys ----------------------------------------------------------------------------------------------

    def _without_late(self, changes: "DataFrame", deletions: int, table_id: str) -> "DataFrame":
        """Keep the sequences of deletions, and return the changes that do not lose against the deletion of their key.

        The sequences are kept before the rows are deleted. If the batch runs again, they are the same ones.
        """
        from pyspark.sql import functions as F

        merge = self._merge
        assert merge.deleted is not None and merge.sequence_by is not None
        name = table_names.qualified(self._spark, table_names.canonical(merge.deleted))
        table = table_names.sql_name(name)
        sequence = table_names.quoted(merge.sequence_by)
        kept = changes.select(*map(table_names.quoted, merge.keys), sequence)
        columns = table_names.sql_columns(kept.schema)
        is_mapped = any(map(table_names.needs_mapping, kept.columns))
        self._spark.sql(
            f"CREATE TABLE IF NOT EXISTS {table} ({columns}, deleted_at TIMESTAMP_LTZ, {_TABLE_ID} STRING) USING delta"
            + (" TBLPROPERTIES ('delta.columnMapping.mode' = 'name')" if is_mapped else "")
        )
        if deletions:
            names = [*map(table_names.quoted, merge.keys), sequence, "deleted_at", _TABLE_ID]
            of_table = F.current_timestamp().alias("deleted_at"), F.lit(table_id).alias(_TABLE_ID)
            now = changes.where(_IS_DELETED).select(*names[:-2], *of_table)
            update = f"UPDATE SET {sequence} = s.{sequence}, deleted_at = s.deleted_at"
            insert = f"INSERT ({', '.join(names)}) VALUES ({', '.join(f's.{name}' for name in names)})"
            clauses = [
                f"WHEN MATCHED AND s.{sequence} > t.{sequence} THEN {update}",
                f"WHEN NOT MATCHED THEN {insert}",
            ]
            self._run(now, table, clauses, f"t.{_TABLE_ID} = '{table_id}'")
            self._clean(table, table_id)
        same = [f"c.{key} = d.{key}" for key in map(table_names.quoted, merge.keys)]
        # A deletion does not lose against itself.
        ties = f" OR (c.{sequence} = d.{sequence} AND NOT c.{_IS_DELETED})" if merge.is_late else ""
        is_late = F.expr(" AND ".join([*same, f"(c.{sequence} < d.{sequence}{ties})"]))
        deletions_kept = table_names.read(self._spark, name).where(F.col(_TABLE_ID) == table_id)
        return changes.alias("c").join(deletions_kept.alias("d"), is_late, "left_anti")

    def _clean(self, table: str, table_id: str) -> None:
        """Remove sequences of deleted keys after their retention, at most once in CLEAN_EVERY_S."""
        if time.monotonic() - _cleaned.get((table, table_id), -CLEAN_EVERY_S) < CLEAN_EVERY_S:
            return
        _cleaned[table, table_id] = time.monotonic()
        seconds = round(self._merge.retention_days * 24 * 3600)
        self._spark.sql(
            f"DELETE FROM {table} WHERE {_TABLE_ID} = '{table_id}' "
            f"AND deleted_at < current_timestamp() - INTERVAL {seconds} SECONDS"
        )


_cleaned: dict[tuple[str, str], float] = {}
"""By table of deleted keys and id of the table of the rows: when the sequences were cleaned last, on the monotonic
clock."""


def _literal(value: int | str | None, *, is_date: bool) -> str:
    """Return a value as it is written in SQL; empty for one that does not bound files.

    Args:
        is_date: whether the value is a date as text.
    """
    if isinstance(value, int):
        return str(value)
    # Spark replaces ${...} in the text of a statement, also within a literal.
    if value is None or len(value) > BOUND_CHARS_MAX or not value.isprintable() or {*value} & {*"'\\$"}:
        return ""
    return f"DATE'{value}'" if is_date else f"'{value}'"
