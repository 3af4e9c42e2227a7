"""Writes a batch without Delta's classes: Spark's tasks write Parquet files, ``deltalake`` commits them.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``). Deliberately absent: what is
decided about a batch (:mod:`ledger_decision`), and tables that need Delta's own write path
(:func:`reason_not_native`); :class:`table_writer.OptionsWriter` writes those.

The files of each attempt are in a visible folder of the table, so that ``VACUUM`` removes what a killed attempt left.
Spark's task commit protocol applies to them, with retries and speculation. ``deltalake`` adds one commit to the table's
log, with the group's next ``SetTransaction`` number: of two commits with one number that were decided by the same
version of the table, ``deltalake`` and Delta let one through.

New columns are a commit of their own before that of the rows. A driver that is killed between the two leaves a table
with columns that are null.
"""

import contextlib
import json
import logging
import math
import re
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from spark_group_source.delta import session_setting, table_names
from spark_group_source.delta.table_history import CommitRace, LogFiles

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)

FOLDER = "spark-group-source"
"""The table's folder for data files. Its name must not begin with ``_`` or ``.``: ``VACUUM`` ignores such folders."""

STATS_COLUMNS_MAX = 32
"""Only the first columns get statistics, as by default in Delta (``delta.dataSkippingNumIndexedCols``)."""

STATS_CHARS_MAX = 32
"""Longest text in a minimum or maximum, in characters, as in Delta."""

LEGACY_DATES = b"org.apache.spark.legacyDateTime"
"""A key in the footer of a file whose dates and timestamps count days of the Julian calendar before 1582
(``spark.sql.parquet.datetimeRebaseModeInWrite=LEGACY``)."""

COMMIT_TRIES_MAX = 15
"""How often ``deltalake`` retries one commit behind those of other writers that do not conflict with it."""

FEATURES = frozenset(
    {"appendOnly", "invariants", "changeDataFeed", "deletionVectors", "timestampNtz", "vacuumProtocolCheck"}
)
"""Table features with which a plain append is correct, or that :func:`reason_not_native` checks in detail."""

LEGACY_WRITER_MAX = 6
"""Writer versions up to this one have no list of features; :func:`reason_not_native` checks for each feature."""

_COLUMN_PROPERTIES = (
    "delta.generationExpression",
    "delta.identity.",
    "delta.invariants",
    "delta.columnMapping",
    "CURRENT_DEFAULT",
    "__CHAR_VARCHAR_TYPE_STRING",
)
"""Prefixes of the properties of columns that need Delta's write path."""

_NULLABILITY = ("nullable", "containsNull", "valueContainsNull")
"""The keys by which a field, an array and a map allow nulls."""

_PARTITION_TYPES = frozenset({"string", "integer", "long", "short", "byte", "boolean", "date"})
"""Types of partition columns whose values Spark writes in folder names as Delta writes them in its log."""

_NEW_TYPES = re.compile(
    r"string|long|integer|short|byte|float|double|boolean|binary|date|timestamp|decimal\(\d+,\d+\)|struct|array|map"
)
"""Types of new columns: those that need no table feature, which ``deltalake`` would add to the table."""


def reason_not_native(opened: "DeltaTable") -> str | None:
    """Return why Delta itself must write a table; None if it can be written natively."""
    protocol, metadata, fields = opened.protocol(), opened.metadata(), _fields(opened)
    features = {*(protocol.writer_features or ()), *(protocol.reader_features or ())}
    if others := sorted(features - FEATURES):
        return f"it has the table feature {others[0]}"
    if not features and protocol.min_writer_version > LEGACY_WRITER_MAX:
        return f"it has writer version {protocol.min_writer_version}"
    for key in sorted(metadata.configuration):
        if key.startswith("delta.constraints."):
            return f"it has a CHECK constraint ({key.removeprefix('delta.constraints.')})"
        if key == "delta.columnMapping.mode" and metadata.configuration[key] != "none":
            return "it has column mapping"
    for field in fields:
        if (reason := _reason_of(field["name"], field)) is not None:
            return reason
        if field["name"] in metadata.partition_columns and field["type"] not in _PARTITION_TYPES:
            return f"it is partitioned by {field['name']} of type {field['type']}"
    return None


def _reason_of(column: str, part: Any) -> str | None:
    """Return why Delta itself must write a field or a type of a column, nested ones included; None if not."""
    if not isinstance(part, dict):
        return f"its column {column} has values of type void" if part == "void" else None
    if False in (part.get(key) for key in _NULLABILITY):
        return f"its column {column} is NOT NULL" if "nullable" in part else f"its column {column} has NOT NULL values"
    if found := [key for key in part.get("metadata", ()) if key.startswith(_COLUMN_PROPERTIES)]:
        return f"its column {column} has {found[0]}"
    nested = [(f"{column}.{field['name']}", field) for field in part.get("fields", ())]
    nested += [(column, part[key]) for key in ("type", "elementType", "keyType", "valueType") if key in part]
    return next(filter(None, (_reason_of(*each) for each in nested)), None)


def has_void(part: Any) -> bool:
    """Return whether a field or a type is void, or has a nested one that is."""
    if not isinstance(part, dict):
        return bool(part == "void")
    nested = (part[key] for key in ("type", "elementType", "keyType", "valueType") if key in part)
    return any(map(has_void, (*nested, *part.get("fields", ()))))


def _fields(opened: "DeltaTable") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(opened.schema().to_json())["fields"]
    return found


def new_columns(opened: "DeltaTable", rows: "DataFrame") -> list[dict[str, Any]] | None:
    """Return the columns of the rows that the table lacks; None if only Delta itself can cast, add or refuse columns.

    The rows may lack columns of the table, which are null then, but no partition column.
    """
    from pyspark.sql.types import StructType

    schema = StructType.fromJson(json.loads(opened.schema().to_json()))
    # As Spark writes types in SQL: without nullability and metadata.
    of_table = {field.name: field.dataType.simpleString() for field in schema.fields}
    of_rows = {field.name: field.dataType.simpleString() for field in rows.schema.fields}
    new = [nullable_types(field) for field in json.loads(rows.schema.json())["fields"] if field["name"] not in of_table]
    names = [*of_table, *(field["name"] for field in new)]
    if any(of_rows.get(name, kind) != kind for name, kind in of_table.items()):
        return None
    if not of_rows.keys() >= set(opened.metadata().partition_columns):
        return None
    if len({name.lower() for name in names}) < len(names):  # Delta does not distinguish upper and lower case
        return None
    return new if all(map(_is_addable, new)) else None


def _is_addable(part: Any) -> bool:
    """Return whether every table can have a new column, by its field or type with the nested ones."""
    if not isinstance(part, dict):
        return _NEW_TYPES.fullmatch(part) is not None
    if part.get("metadata") or table_names.needs_mapping(part.get("name", "")):
        return False
    nested = (part[key] for key in ("type", "elementType", "keyType", "valueType") if key in part)
    return all(map(_is_addable, (*nested, *part.get("fields", ()))))


def nullable_types(types: Any) -> Any:
    """Return a type whose values may all be null, as Delta's own writer creates tables."""
    if isinstance(types, list):
        return [nullable_types(value) for value in types]
    if not isinstance(types, dict):
        return types
    return {key: True if key in _NULLABILITY else nullable_types(value) for key, value in types.items()}


class NativeWriter:
    """Commits to one table during one batch. After a lost race the next attempt commits the files that are written."""

    def __init__(self, spark: "SparkSession", log: LogFiles) -> None:
        self._spark, self._log = spark, log
        self._written: tuple[DataFrame, str, list[Any]] | None = None
        """The rows that were written, the table's schema then, and the actions that add their files."""

    def commit(
        self,
        rows: "DataFrame | None",
        numbers: Mapping[str, int],
        note: str,
        *,
        needed: bool,
    ) -> bool:
        """Commit rows, ``SetTransaction`` numbers and a note; or, if the table lacks columns, only these columns.

        Args:
            rows, numbers, note, needed: as in :meth:`table_writer.TableWriter.commit`. The files of the same DataFrame
                are written once.

        Returns:
            Whether a commit was made: False without rows, unless one is needed.

        Raises:
            CommitRace: as there; or a number is not above that of the table.
            Exception: that of ``deltalake`` or the storage. The commit may have been made: ``deltalake`` then writes a
                checkpoint of the log and cleans it up, and reports their failures, too.
        """
        from deltalake import CommitProperties, Transaction
        from deltalake.exceptions import CommitFailedError

        for app_id, number in numbers.items():
            # deltalake compares a number only with those of commits since the version that it opened.
            used = self._log.number(app_id)
            if used >= number:
                raise CommitRace(f"{app_id} has the number {used} already, and the commit has {number}")
        if rows is not None and (new := new_columns(self._log.opened, rows)):
            self._add_columns(new)
        actions = [] if rows is None else self._files(rows)
        if not (actions or needed):
            return False
        opened = self._log.opened
        metrics = {"numOutputRows": str(sum(json.loads(action.stats)["numRecords"] for action in actions))}
        properties = CommitProperties(
            custom_metadata={"userMetadata": note, "isBlindAppend": True, "operationMetrics": metrics},
            max_commit_retries=COMMIT_TRIES_MAX,
            app_transactions=[Transaction(app_id, number) for app_id, number in numbers.items()],
        )
        partitions = list(opened.metadata().partition_columns)
        try:
            opened.create_write_transaction(
                actions, "append", opened.schema(), partition_by=partitions or None, commit_properties=properties
            )
        except CommitFailedError as exc:
            raise CommitRace(str(exc)) from exc
        self._drop_stale_checksum()
        return True

    def _drop_stale_checksum(self) -> None:
        """Remove the checksum beside ``_last_checkpoint`` if ``deltalake`` has replaced that file. Hadoop's local file
        system writes the checksum and checks it: Delta would log the failure each time that it opens the table."""
        if (local := local_path(self._log.location)) is None:
            return
        checkpoint = Path(local, "_delta_log", "_last_checkpoint")
        checksum = checkpoint.with_name(f".{checkpoint.name}.crc")
        with contextlib.suppress(OSError):
            if checksum.stat().st_mtime_ns < checkpoint.stat().st_mtime_ns:
                checksum.unlink()

    def _add_columns(self, new: list[dict[str, Any]]) -> None:
        """Add columns in a commit of their own, and raise CommitRace.

        ``deltalake`` may put that commit behind those of other writers. A batch that was decided before these must not
        be committed behind them, so it is decided again.
        """
        from deltalake import CommitProperties, Field
        from deltalake.exceptions import CommitFailedError

        fields = [Field.from_json(json.dumps(field)) for field in new]
        properties = CommitProperties(max_commit_retries=COMMIT_TRIES_MAX)
        try:
            self._log.opened.alter.add_columns(fields, commit_properties=properties)
        except CommitFailedError as exc:
            raise CommitRace(str(exc)) from exc
        except Exception as exc:  # maybe of a checkpoint of the log or its clean-up, which follow the commit
            self._log.newest()
            found = {field["name"].lower() for field in json.loads(self._log.opened.schema().to_json())["fields"]}
            if not found.issuperset(field["name"].lower() for field in new):
                raise
            log.warning("table %s: what follows a commit has failed: %s", self._log.table, str(exc).partition("\n")[0])
        names = ", ".join(field["name"] for field in new)
        log.info("table %s: added the columns %s of the batch", self._log.table, names)
        raise CommitRace(f"added the columns {names}")

    def _files(self, rows: "DataFrame") -> list[Any]:
        schema = self._log.opened.schema().to_json()
        if self._written is not None and self._written[0] is rows and self._written[1] == schema:
            return self._written[2]
        of_rows = {field["name"] for field in json.loads(rows.schema.json())["fields"]}
        columns = [field["name"] for field in json.loads(schema)["fields"] if field["name"] in of_rows]
        partitions = list(self._log.opened.metadata().partition_columns)
        folder = f"{FOLDER}/{uuid.uuid4()}"
        writer = rows.select(*map(table_names.quoted, columns)).write.mode("error")
        writer = writer.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
        # Parquet keeps minimum and maximum of such timestamps; Spark's default, INT96, has none.
        with session_setting(self._spark, "spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS"):
            (writer.partitionBy(*partitions) if partitions else writer).parquet(f"{self._log.location}/{folder}")
        actions = list(add_actions(self._log.files, folder, columns, partitions))
        self._written = rows, schema, actions
        return actions


# --- the actions of the log ------------------------------------------------------------------------------------------


def add_actions(files: Any, folder: str, columns: list[str], partitions: list[str]) -> Iterator[Any]:
    """Yield the action that adds each data file with rows below a folder.

    A file whose path is not ASCII, because of its partition's value or column, is moved into the folder itself: in the
    log ``deltalake`` would encode the path otherwise than Delta, and Delta's ``VACUUM`` would take the file for one
    that the table does not have, and delete it. A reader takes the value from the action, not from the path.

    Args:
        files: a pyarrow file system whose root is the table.
        folder: the folder, relative to the table.
        columns: the table's columns in their order.
        partitions: the partition columns.
    """
    import pyarrow.parquet as pq
    from deltalake.transaction import AddAction
    from pyarrow.fs import FileSelector

    indexed = [name for name in columns if name not in partitions][:STATS_COLUMNS_MAX]
    listed = files.get_file_info(FileSelector(folder, recursive=True, allow_not_found=True))
    for number, info in enumerate(sorted(listed, key=attrgetter("path"))):
        # A task that Spark gave up may still write to the folder of files that are not committed.
        if not info.path.endswith(".parquet") or "_temporary" in info.path.split("/"):
            continue
        with files.open_input_file(info.path) as file:
            footer = pq.ParquetFile(file).metadata
        if footer.num_rows == 0:
            continue
        folders = info.path.removeprefix(folder + "/").split("/")[:-1]
        values = {unquote(name): _partition_value(text) for name, _, text in (part.partition("=") for part in folders)}
        modified_ms = int((info.mtime_ns or 0) / 1e6)
        stats = json.dumps(statistics(footer, indexed), separators=(",", ":"))
        path = info.path
        if not path.isascii():
            path = f"{folder}/{number}-{info.base_name}"
            files.move(info.path, path)
        yield AddAction(path, info.size, values, modified_ms, True, stats)


def _partition_value(text: str) -> str | None:
    return None if text == "__HIVE_DEFAULT_PARTITION__" else unquote(text)


def statistics(footer: Any, columns: list[str]) -> dict[str, Any]:
    """Return the statistics by which Delta skips a file in queries.

    They are the number of rows, and the minimum, maximum and number of nulls of each top-level column whose Parquet
    footer has them.
    """
    minimum: dict[str, Any] = {}
    maximum: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    has_julian_days = LEGACY_DATES in (footer.metadata or {})
    for index in range(footer.num_columns):
        column = footer.schema.column(index)
        found: list[Any] = [group.column(index).statistics for group in groups]
        if column.path not in columns or column.path != column.name:  # the path of a nested column has its parents
            continue
        if any(each is None or not each.has_null_count for each in found):
            continue
        nulls[column.path] = sum(each.null_count for each in found)
        filled = [each for each in found if each.num_values > 0]
        if filled and all(each.has_min_max for each in filled):
            try:
                lows, highs = [each.min for each in filled], [each.max for each in filled]
                if has_julian_days and isinstance(lows[0], date):  # a datetime is a date, too
                    continue
                # Of each row group: Python's max([1.0, nan]) is 1.0.
                if any(isinstance(value, float) and not math.isfinite(value) for value in lows + highs):
                    continue
                low, high = _lower_bound(min(lows)), _upper_bound(max(highs))
            except (OverflowError, ValueError):  # Python's datetimes end with the year 9999
                continue
            if low is not None and high is not None:
                minimum[column.path], maximum[column.path] = low, high
    return {"numRecords": footer.num_rows, "minValues": minimum, "maxValues": maximum, "nullCount": nulls}


def _lower_bound(value: Any) -> Any:
    """Return a minimum as Delta writes it; None for types without one (bytes)."""
    if isinstance(value, str):
        return value[:STATS_CHARS_MAX]
    if isinstance(value, datetime):
        return _timestamp(value)
    return _number_or_date(value)


def _upper_bound(value: Any) -> Any:
    """Return a maximum as Delta writes it; None for types without one (bytes), and for a text without one."""
    if isinstance(value, str):
        # With the greatest character appended, it is above every text that begins with these characters and continues
        # with another one.
        if len(value) <= STATS_CHARS_MAX:
            return value
        return None if value[STATS_CHARS_MAX] == "\U0010ffff" else value[:STATS_CHARS_MAX] + "\U0010ffff"
    if isinstance(value, datetime):
        return _timestamp(value + timedelta(microseconds=999))
    return _number_or_date(value)


def _timestamp(value: datetime) -> str:
    utc = value if value.tzinfo is None else value.astimezone(UTC).replace(tzinfo=None)
    # strftime("%Y") writes the year 1 as 1, and Delta's readers compare texts.
    return utc.isoformat(timespec="milliseconds") + ("" if value.tzinfo is None else "Z")


def _number_or_date(value: Any) -> Any:
    if isinstance(value, bool | bytes | Decimal):
        return None
    if isinstance(value, date):
        return value.isoformat()
    return value if isinstance(value, int | float) else None


def local_path(location: str) -> str | None:
    """Return the path of a table or a checkpoint on this machine's file system; None if it is elsewhere.

    Args:
        location: a path as Hadoop's ``Path`` reads and writes it: with or without a scheme, and never URL-encoded.
    """
    scheme = re.match(r"[a-zA-Z][\w+.-]*:", location)
    if scheme is not None and scheme[0].lower() != "file:":
        return None
    path = location if scheme is None else location[scheme.end() :]
    if path.startswith("//"):
        host, _, path = path[2:].partition("/")
        if host not in ("", "localhost"):
            return None
        path = "/" + path.lstrip("/")
    return path
