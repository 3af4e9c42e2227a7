"""Writes a batch without Delta's classes: Spark's tasks write Parquet files, ``deltalake`` commits them.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``). Deliberately absent: what is
decided about a batch (:mod:`ledger`), and tables that need Delta's own write path (:func:`unfit` names the reason; such
a batch goes by :mod:`options_writer`).

The files go into a visible folder of the table, one for each attempt, so that ``VACUUM`` removes what a killed attempt
left; Spark's task commit protocol applies to them, retries and speculation included. The commit is one file of the
table's log, put there by ``deltalake`` under the number of the group's commits: of two commits with one number that
were decided by the same version of the table, ``deltalake`` and Delta let one through.
"""

import contextlib
import json
import math
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from spark_group_source.delta import table_names
from spark_group_source.delta.commit_race import CommitRace
from spark_group_source.delta.table_history import LogFiles

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame, SparkSession

FOLDER = "spark-group-source"
"""The folder of the table that the data files go to. Its name must not begin with ``_`` or ``.``: ``VACUUM`` leaves
such folders alone."""

STATS_COLUMNS_MAX = 32
"""Statistics are kept of the first columns only, as Delta does by default (``delta.dataSkippingNumIndexedCols``)."""

STATS_CHARS_MAX = 32
"""Longest text in a minimum or maximum, as in Delta."""

COMMIT_TRIES_MAX = 15
"""How often ``deltalake`` puts one commit behind those of other writers that do not conflict with it."""

FEATURES = frozenset(
    {"appendOnly", "invariants", "changeDataFeed", "deletionVectors", "timestampNtz", "vacuumProtocolCheck"}
)
"""Table features with which a plain append is right: they change nothing about it, or :func:`unfit` looks closer."""

LEGACY_WRITER_MAX = 6
"""Writer versions up to this one have no list of features; :func:`unfit` looks for what they stand for."""

_COLUMN_MARKS = (
    "delta.generationExpression",
    "delta.identity.",
    "delta.invariants",
    "delta.columnMapping",
    "CURRENT_DEFAULT",
)
"""What the metadata of a column that needs Delta's write path begins with."""

_PARTITION_TYPES = frozenset({"string", "integer", "long", "short", "byte", "boolean", "date"})
"""Types of partition columns that Spark writes into the names of folders as Delta writes them into its log."""


def unfit(opened: "DeltaTable") -> str | None:
    """Why a table must be written by Delta itself, or None."""
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
        if not field["nullable"]:
            return f"its column {field['name']} is NOT NULL"
        if marks := [key for key in field["metadata"] if key.startswith(_COLUMN_MARKS)]:
            return f"its column {field['name']} has {marks[0]}"
        if field["name"] in metadata.partition_columns and field["type"] not in _PARTITION_TYPES:
            return f"it is partitioned by {field['name']} of type {field['type']}"
    return None


def _fields(opened: "DeltaTable") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(opened.schema().to_json())["fields"]
    return found


def given_columns(opened: "DeltaTable") -> list[str]:
    """The columns that a writer gives values for: Delta makes those of the others."""
    made = ("delta.generationExpression", "delta.identity.")
    return [field["name"] for field in _fields(opened) if not any(key.startswith(made) for key in field["metadata"])]


def differs(opened: "DeltaTable", rows: "DataFrame") -> bool:
    """Whether the rows have other columns or types than the table, so that Delta has to cast, add or refuse them."""
    here = {field["name"]: field["type"] for field in json.loads(rows.schema.json())["fields"]}
    there = {field["name"]: field["type"] for field in _fields(opened)}
    return bool(_bare(here) != _bare(there))


def _bare(types: Any) -> Any:
    """A type without what says nothing of its values: nullability and comments."""
    if isinstance(types, list):
        return [_bare(value) for value in types]
    if not isinstance(types, dict):
        return types
    ignored = ("nullable", "containsNull", "valueContainsNull", "metadata")
    return {key: _bare(value) for key, value in types.items() if key not in ignored}


class NativeWriter:
    """Commits to one table; made for one batch, so that the files of an attempt that lost are committed by the next."""

    def __init__(self, spark: "SparkSession", log: LogFiles) -> None:
        self._spark, self._log = spark, log
        self._written: tuple[DataFrame, str, list[Any]] | None = None  # the rows, the table's columns, their files

    def commit(
        self,
        rows: "DataFrame | None",
        numbers: Mapping[str, int],
        note: str,
        *,
        needed: bool,
    ) -> bool:
        """Commit the rows with the numbers of applications and a note; False if there was nothing to commit.

        Args:
            rows: None for a commit without rows. Files that were written of the very same rows are committed again.
            numbers: the version of each application's ``SetTransaction``.
            note: the commit's ``userMetadata``.
            needed: whether to commit even if there are no rows.

        Raises:
            CommitRace: another writer committed one of the numbers, or changed the table's columns or protocol.
        """
        from deltalake import CommitProperties, Transaction
        from deltalake.exceptions import CommitFailedError

        actions = [] if rows is None else self._files(rows)
        if not (actions or needed):
            return False
        opened = self._log.opened
        properties = CommitProperties(
            custom_metadata={"userMetadata": note, "isBlindAppend": True},
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
        return True

    def _files(self, rows: "DataFrame") -> list[Any]:
        schema = self._log.opened.schema().to_json()
        if self._written is not None and self._written[0] is rows and self._written[1] == schema:
            return self._written[2]
        columns = [field["name"] for field in json.loads(schema)["fields"]]
        partitions = list(self._log.opened.metadata().partition_columns)
        folder = f"{FOLDER}/{uuid.uuid4()}"
        writer = rows.select(*map(table_names.quoted, columns)).write.mode("error")
        writer = writer.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
        with _timestamps_with_statistics(self._spark):
            (writer.partitionBy(*partitions) if partitions else writer).parquet(f"{self._log.location}/{folder}")
        actions = list(add_actions(self._log.files, folder, columns, partitions))
        self._written = rows, schema, actions
        return actions


@contextlib.contextmanager
def _timestamps_with_statistics(spark: "SparkSession") -> Iterator[None]:
    """Parquet keeps no minimum and maximum of Spark's default type of timestamps, INT96. ``foreachBatch`` has a session
    of its own, so no other query sees the setting."""
    key = "spark.sql.parquet.outputTimestampType"
    before = spark.conf.get(key)
    spark.conf.set(key, "TIMESTAMP_MICROS")
    try:
        yield
    finally:
        spark.conf.set(key, str(before))


# --- from files to the log ------------------------------------------------------------------------------------------


def add_actions(files: Any, folder: str, columns: list[str], partitions: list[str]) -> Iterator[Any]:
    """The action of Delta's log for each data file with rows below a folder.

    Args:
        files: a pyarrow file system whose root is the table.
        folder: relative to that.
        columns: of the table, in their order.
        partitions: the partition columns.
    """
    import pyarrow.parquet as pq
    from deltalake.transaction import AddAction
    from pyarrow.fs import FileSelector

    indexed = [name for name in columns if name not in partitions][:STATS_COLUMNS_MAX]
    for info in sorted(
        files.get_file_info(FileSelector(folder, recursive=True, allow_not_found=True)), key=attrgetter("path")
    ):
        if not info.path.endswith(".parquet"):
            continue
        with files.open_input_file(info.path) as file:
            footer = pq.ParquetFile(file).metadata
        if footer.num_rows == 0:
            continue
        steps = info.path.removeprefix(folder + "/").split("/")[:-1]
        values = {unquote(name): _value(text) for name, _, text in (step.partition("=") for step in steps)}
        modified_ms = int((info.mtime_ns or 0) / 1e6)
        stats = json.dumps(statistics(footer, indexed), separators=(",", ":"))
        yield AddAction(info.path, info.size, values, modified_ms, True, stats)


def _value(text: str) -> str | None:
    return None if text == "__HIVE_DEFAULT_PARTITION__" else unquote(text)


def statistics(footer: Any, columns: list[str]) -> dict[str, Any]:
    """What Delta keeps of a file to skip it in queries: number of rows; minimum, maximum and number of nulls of each
    top-level column whose Parquet footer has them."""
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    for index in range(footer.num_columns):
        name = footer.schema.column(index).path
        found: list[Any] = [group.column(index).statistics for group in groups]
        if name not in columns or any(each is None or not each.has_null_count for each in found):
            continue
        nulls[name] = sum(each.null_count for each in found)
        filled = [each for each in found if each.num_values > 0]
        if filled and all(each.has_min_max for each in filled):
            try:
                least, most = _low(min(each.min for each in filled)), _high(max(each.max for each in filled))
            except (OverflowError, ValueError):  # Python's times end in the year 9999
                continue
            if least is not None and most is not None:
                low[name], high[name] = least, most
    return {"numRecords": footer.num_rows, "minValues": low, "maxValues": high, "nullCount": nulls}


def _low(value: Any) -> Any:
    """A lower bound as Delta writes it; None where it keeps none (bytes, NaN)."""
    if isinstance(value, str):
        return value[:STATS_CHARS_MAX]
    if isinstance(value, datetime):
        return _moment(value)
    return _plain(value)


def _high(value: Any) -> Any:
    if isinstance(value, str):
        # Behind every text that begins with these characters stands the greatest of all characters.
        return value if len(value) <= STATS_CHARS_MAX else value[:STATS_CHARS_MAX] + "\U0010ffff"
    if isinstance(value, datetime):
        return _moment(value + timedelta(microseconds=999))
    return _plain(value)


def _moment(value: datetime) -> str:
    utc = value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    text = utc.strftime("%Y-%m-%dT%H:%M:%S.") + f"{utc.microsecond // 1000:03}"
    return text if value.tzinfo is None else text + "Z"


def _plain(value: Any) -> Any:
    if isinstance(value, bool | bytes | Decimal):
        return None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, date):
        return value.isoformat()
    return value if isinstance(value, int) else None


def local_path(location: str) -> str | None:
    """The path of a table on this machine's file system, or None if it is elsewhere."""
    parts = urlsplit(location)
    if parts.scheme not in ("", "file") or parts.netloc not in ("", "localhost"):
        return None
    return unquote(parts.path) if parts.scheme else location
