"""Reads the history of one Delta table and commits to it, for one batch or one command.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``), the command line.
Deliberately absent: what is decided about a batch (:mod:`ledger_decision`, :mod:`sink`).

The native writer (:mod:`native_writer`) commits where it works; elsewhere :class:`OptionsWriter` does. With either one,
a commit holds the rows, the group's next ``SetTransaction`` number and the note with the ledger after it, and of two
commits with one number one wins. So both writers may be used for one table, also in turns; at the same time only where
their commits exclude each other, which is not so on S3 (:meth:`TableWriter.warn_of_other_drivers`).

Delta may skip a commit with a used number without an error, so each commit is looked for in the table's history
afterwards.
"""

import contextlib
import functools
import json
import logging
import random
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from pyspark.errors import ParseException, PySparkException

from spark_group_source import compatibility
from spark_group_source.delta import Writer, checkpoint, native_writer, session_setting, table_names
from spark_group_source.delta.ledger_format import APP_PREFIX, Ledger
from spark_group_source.delta.merge import Merge, MergeWriter, session_lock
from spark_group_source.delta.native_writer import NativeWriter
from spark_group_source.delta.table_history import (
    NOT_A_TABLE,
    BatchSkipped,
    ChangedRows,
    Commit,
    CommitRace,
    CommitSource,
    DescribedHistory,
    LogFiles,
    TableHistory,
    note_of,
)
from spark_group_source.errors import GroupError, LedgerConflict, OptionError
from spark_group_source.model import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

log = logging.getLogger(__name__)

CATALOG_FEATURES = frozenset({"catalogManaged", "catalogOwned-preview", "coordinatedCommits-preview"})
"""Table features with which the newest commits are not in the log's files: only Spark reads and writes such a table."""

_FEATURE_ERRORS = ("Max catalog version", "Unsupported: Feature")
"""Texts in the errors with which ``deltalake`` refuses a table that has a feature it does not support."""

COMMIT_ATTEMPTS_MAX = 30
"""How often a commit is attempted; each lost race means that another writer made progress."""

RESTART_S = 3600
"""All ledgers of a group that start anew in this time, in seconds, have the same number. No ledger leaves the log so
early."""

RACE_WAIT_MAX_S = 0.5
"""Longest wait between two attempts, in seconds. They are random, so that writers of one table do not collide again."""

_RACE_CONDITIONS = ("DELTA_CONCURRENT_", "DELTA_METADATA_CHANGED", "DELTA_PROTOCOL_CHANGED")
"""Prefixes of the error conditions by which Delta reports a concurrent commit."""

SNAPSHOT_PARTITIONS = "spark.databricks.delta.snapshotPartitions"
"""The number of tasks by which Delta computes the table's state, which each write with ``txnVersion`` does; the default
of 50 takes several seconds on a machine with two cores."""

CREATE_ATTEMPTS_MAX = 10
"""How often the creation of a table is attempted while another writer creates it; usually two suffice."""

CREATE_WAIT_MAX_S = 1.0
"""Longest wait between two attempts, in seconds; creating a directory and the first commit in it takes less."""

LOG_FOLDER = "_delta_log"

S3_SCHEMES = ("s3", "s3a", "s3n")
"""Schemes for which Delta's default LogStore, S3SingleDriverLogStore, keeps only the writers of one JVM apart."""

_OTHER_LOCAL = re.compile(r"%[0-9a-fA-F]{2}|[\\\x00-\x1f\x7f]")
"""In a local path: what ``deltalake`` decodes, takes for a slash, or cannot read."""

_OTHER_REMOTE = re.compile(r"[^A-Za-z0-9/_.,;:=&'!@$()+-]")
"""In a path of another file system: what ``deltalake`` encodes, while Spark writes the data files to the path as it is;
or ends the path at."""

_FOLDER_EXISTS = {
    "TABLE_OR_VIEW_ALREADY_EXISTS",
    "DELTA_TABLE_ALREADY_EXISTS",
    "DELTA_CREATE_TABLE_WITH_NON_EMPTY_LOCATION",
    "DELTA_TABLE_NOT_FOUND",
    "DELTA_MISSING_DELTA_TABLE",
}
"""Error conditions for a folder that has a table, a table that another writer is creating, or other files."""

_OTHER_TYPES = {"DELTA_METADATA_MISMATCH", "DELTA_FAILED_TO_MERGE_FIELDS", "DELTA_MERGE_INCOMPATIBLE_DATATYPE"}
"""Conditions of Delta's errors about types."""
_IDENTITY = "DELTA_IDENTITY_COLUMNS_EXPLICIT_INSERT_NOT_SUPPORTED"
"""The error condition of a frame that has a GENERATED ALWAYS AS IDENTITY column, even without rows."""

_T = TypeVar("_T")


class TableWriter:
    """Reads the history of one table and commits to it, during one batch. Nothing is opened until it is used.

    Args:
        table: a path or a name in the session's catalog.
        writer: "native" and "options" name a writer; "auto" uses the native one where it works.
        partition_by, merge_schema, merge: as in :class:`spark_group_source.DeltaSink`.
        storage_options: for ``deltalake``; None opens the table's files natively on a local file system only.
        share_folders: whether all hosts share local folders. Who names the native writer says so.
        log: the log that an earlier writer opened and no longer uses; opening a log reads the names of all files.
    """

    def __init__(
        self,
        spark: "SparkSession",
        table: str,
        *,
        writer: Writer = "auto",
        partition_by: tuple[str, ...] = (),
        merge_schema: bool = False,
        merge: Merge | None = None,
        storage_options: Mapping[str, str] | None = None,
        share_folders: bool = False,
        log: LogFiles | None = None,
    ) -> None:
        self.spark, self.table, self.writer = spark, table_names.qualified(spark, table), writer
        self.partition_by, self.merge_schema, self.merge = partition_by, merge_schema, merge
        self.storage_options = dict(storage_options) if storage_options is not None else None
        self.share_folders = share_folders or writer == "native"
        self._source: CommitSource | None = log if log is not None and log.newest() >= 0 else None
        self._described: Any = None
        """The row of ``DESCRIBE DETAIL``; None until it is read."""
        self._native: NativeWriter | None = None
        self.changed = ChangedRows()
        """The rows that the last commit changed."""

    @property
    def log(self) -> LogFiles | None:
        """The opened log, for a later writer; None where the log cannot be opened."""
        return self._source if isinstance(self._source, LogFiles) else None

    def exists(self) -> bool:
        """Return whether the Delta table exists."""
        return self._find_source() is not None

    def create(self, rows: "DataFrame") -> None:
        """Create the table with the columns of these rows, unless it exists. Other writers may do so at the same time.

        Raises:
            OptionError: the table can be created neither natively nor by Delta.
        """
        location = table_names.location(self.spark, self.table) if table_names.is_path(self.table) else None
        location = location or self.table
        local = native_writer.local_path(location)
        is_native = local is None and self.storage_options is not None and self.writer != "options"
        if has_delta(self.spark) and not is_native:
            OptionsWriter(self).create(rows)
            return
        if not table_names.is_path(self.table):
            raise OptionError(
                f"table {self.table} does not exist, and this Spark session has no Delta Lake, which is needed to "
                "create a table by name. Add Delta Lake to the session, or pass a path"
            )
        if local is None and self.storage_options is None:
            raise OptionError(
                f"table {self.table} is not on a local file system, and this Spark session has no Delta Lake. Pass "
                "storage_options, with which deltalake creates and writes the table",
                table=self.table,
            )
        from deltalake import CommitProperties, DeltaTable, Schema
        from deltalake.exceptions import CommitFailedError

        if void := [
            field["name"] for field in json.loads(rows.schema.json())["fields"] if native_writer.has_void(field)
        ]:
            raise OptionError(
                f"table {self.table} cannot be created: column {void[0]} of the batch has values of type void, "
                "such as lit(None), and Spark writes none to Parquet files. Cast them: lit(None).cast('string')",
                table=self.table,
            )
        schema = native_writer.nullable_types(json.loads(rows.schema.json()))
        try:
            DeltaTable.create(
                local or location,
                Schema.from_json(json.dumps(schema)),
                "ignore",
                partition_by=list(self.partition_by) or None,
                storage_options=self.storage_options,
                # With a retry, deltalake adds a second creation, with another id, behind that of another writer.
                commit_properties=CommitProperties(max_commit_retries=0),
            )
        except CommitFailedError:
            if not self.exists():
                raise

    def identity(self) -> str:
        """Return the id of this very table, however its name or path is written."""
        source = self._require_source()
        return str(source.opened.metadata().id if isinstance(source, LogFiles) else self._described["id"])

    def properties(self) -> dict[str, str]:
        """Return the properties that the table sets."""
        source = self._require_source()
        if isinstance(source, LogFiles):
            return dict(source.opened.metadata().configuration)
        return dict(self._described["properties"])

    def schema(self) -> "StructType":
        """Return the table's columns."""
        from pyspark.sql.types import StructType

        source = self._require_source()
        if isinstance(source, LogFiles):
            return StructType.fromJson(json.loads(source.opened.schema().to_json()))
        return table_names.read(self.spark, self.table).schema

    def lacking(self, rows: "DataFrame") -> list[str]:
        """Return the columns of the rows that the table lacks. Delta does not distinguish upper and lower case."""
        known = {field.name.lower() for field in self.schema().fields}
        return [field.name for field in rows.schema.fields if field.name.lower() not in known]

    def other_types(self, rows: "DataFrame") -> list[str]:
        """Return the columns of the rows whose types are not those of the table, with both types."""
        of_table = {field.name.lower(): field.dataType.simpleString() for field in self.schema().fields}
        return [
            f"{field.name}: {kind} in the batch, {of_table[field.name.lower()]} in the table"
            for field in rows.schema.fields
            if (kind := field.dataType.simpleString()) != of_table.get(field.name.lower(), kind)
        ]

    def history(self) -> TableHistory:
        """Return the newest version of the table and its commits; version -1 if the table no longer exists."""
        version = None if self.log is None else self.log.newest()
        if version == -1:
            self._source = version = None
        source = self._find_source()
        if source is None:
            return TableHistory(DescribedHistory(self.spark, self.table), -1)
        return TableHistory(source, version)

    def row_ends(self, starts: Mapping[TopicPartition, int] | None = None) -> dict[TopicPartition, int] | None:
        """Return the offset after the last row of each partition that has rows at or just below its start.

        Args:
            starts: None: all partitions that have rows.

        Returns:
            None if the table does not have the columns by which they are found.
        """
        if not table_names.RECORD_COLUMNS.items() <= {f.name: f.dataType.simpleString() for f in self.schema()}.items():
            return None
        if starts is not None and not starts:
            return {}
        where = ""
        if starts is not None:
            # Kafka's names of topics have nothing that SQL would have to escape.
            topics = ", ".join(f"'{topic}'" for topic in sorted({tp.topic for tp in starts}))
            where = f"WHERE topic IN ({topics}) AND `offset` >= {min(starts.values()) - 1} "
        found = self.select("topic, `partition`, max(`offset`)", f"{where}GROUP BY topic, `partition`")
        # Rows without a record's place are of other writers.
        ends = {TopicPartition(row[0], row[1]): row[2] + 1 for row in found if None not in row}
        return {tp: end for tp, end in ends.items() if starts is None or (tp in starts and end >= starts[tp])}

    def select(self, columns: str, more: str) -> list[tuple[Any, ...]]:
        """Return columns of the rows of the table, by the SQL before and after its name. Spark and DataFusion, by which
        ``deltalake`` reads the table in a session without Delta Lake, must both understand it, as names in backticks.
        """
        if not has_delta(self.spark):
            return self._select_by_deltalake(columns, more)
        return [
            tuple(row)
            for row in self.spark.sql(f"SELECT {columns} FROM {table_names.sql_name(self.table)} {more}").collect()
        ]

    def _select_by_deltalake(self, columns: str, more: str) -> list[tuple[Any, ...]]:
        import pyarrow as pa
        from deltalake import QueryBuilder

        assert self.log is not None
        query = QueryBuilder().register("t", self.log.opened).execute(f"SELECT {columns} FROM t {more}")
        return list(zip(*(column.to_pylist() for column in pa.table(query.read_all()).columns), strict=True))

    def reason_not_native(self, rows: "DataFrame | None") -> str | None:
        """Return why a commit of these rows cannot be written natively; None if it can."""
        if self.writer == "options":
            return "writer='options'"
        if self.merge is not None:
            return "batches are merged by key"
        if compatibility.on_databricks():
            # "Transactional writes with DBIO": which files are those of finished tasks is in files that only its own
            # readers know.
            return "Databricks' Spark leaves files of failed tasks beside the others"
        source = self._require_source()
        if not isinstance(source, LogFiles):
            return (
                "its log cannot be opened by deltalake: it is not on a local file system, a catalog manages it, or it "
                "has a feature that deltalake does not support"
            )
        if rows is not None and (reason := self._reason_of_hosts()) is not None:
            return reason
        reason = native_writer.reason_not_native(source.opened)
        if reason is None and rows is not None and native_writer.new_columns(source.opened, rows) is None:
            return "the batch has other columns or types"
        partitions = self.partition_columns() or ()
        if reason is None and self.partition_by and self.partition_by != partitions:
            return f"it is partitioned by {', '.join(partitions) or 'nothing'}, not by {', '.join(self.partition_by)}"
        return reason

    def partition_columns(self) -> tuple[str, ...] | None:
        """Return the columns by which the table is partitioned; None if deltalake cannot open its log."""
        source = self._require_source()
        return tuple(source.opened.metadata().partition_columns) if isinstance(source, LogFiles) else None

    def _reason_of_hosts(self) -> str | None:
        """Return why files of executors may not be in the table's folder; None if they are."""
        is_local = isinstance(self._source, LogFiles) and native_writer.local_path(self._source.location) is not None
        if self.share_folders or not is_local or not has_other_hosts(self.spark):
            return None
        return (
            "executors may run on other hosts, which may have another folder of its name; writer='native' says that "
            "all hosts share it"
        )

    def described_writer(self) -> str:
        """Return the writer of this table and the reason for it, for a log line."""
        reason = self.reason_not_native(None) or self._reason_of_hosts()
        return "natively" if reason is None else f"by Delta's writer options, because {reason}"

    def commit(
        self, history: TableHistory, rows: "DataFrame | None", numbers: Mapping[str, int], note: str, *, needed: bool
    ) -> int | None:
        """Commit rows, ``SetTransaction`` numbers and a note.

        Args:
            history: the version by which this commit was decided.
            rows: None for a commit without rows.
            numbers: the ``SetTransaction`` number of each application.
            note: the commit's ``userMetadata``. It has the number and the time in it, by which the commit is found.
            needed: whether to commit even if there are no rows.

        Returns:
            The version that the commit made; None if nothing had to be committed.

        Raises:
            BatchSkipped: Delta's writer skipped a batch without a ledger that the table has.
            CommitRace: another writer committed first, changed the table's columns or its protocol, or this one added
                columns; read the history and decide again.
            OptionError: the commit needs a writer that does not work here.
            Exception: that of Delta, ``deltalake`` or the storage, unchanged. Nothing was written, unless the storage
                fails so that it cannot be read, either.
        """
        if rows is not None:
            self._refuse_new_columns(rows)
        reason = self.reason_not_native(rows)
        if reason is None:
            assert self.log is not None
            self._native = self._native or NativeWriter(self.spark, self.log)
            try:
                committed = self._native.commit(rows, numbers, note, needed=needed)
            except CommitRace:
                raise
            except Exception as exc:
                if not self._is_committed(history, note, exc):
                    raise
                committed = True
        elif self.writer == "native" or not has_delta(self.spark):
            raise OptionError(
                f"table {self.table} cannot be written natively: {reason}. Nothing was written. Use a Spark session "
                "that has Delta Lake, with writer='auto'",
                table=self.table,
            )
        else:
            self.warn_of_other_drivers(reason)
            committed = OptionsWriter(self).commit(rows, numbers, note, needed=needed)
        if not committed:
            return None
        if (commit := self._find_commit(history, note)) is not None:
            self.changed = commit.changed
            return commit.version
        if reason is not None and not any(app_id.startswith(APP_PREFIX) for app_id in numbers):
            raise BatchSkipped
        raise CommitRace(f"another commit has the number {dict(numbers)}")

    def _refuse_new_columns(self, rows: "DataFrame") -> None:
        """Raise OptionError for rows with new columns without ``merge_schema``. Delta's own error names options of its
        writer, which a sink does not have."""
        if self.merge_schema or not (new := self.lacking(rows if self.merge is None else self.merge.table_rows(rows))):
            return
        of_merge = "" if self.merge is None else ", or name them in Merge(without=...)"
        raise OptionError(
            f"table {self.table} lacks the columns {', '.join(new)} of the batch, and merge_schema is False. Nothing "
            "was written. To add them, set merge_schema=True (--merge-schema of the command run); otherwise leave "
            f"them out in the transform{of_merge}",
            table=self.table,
            columns=new,
        )

    def _find_commit(self, history: TableHistory, note: str) -> Commit | None:
        """Return the commit with this note that is newer than a version of the table; None if there is none."""
        return next((found for found in self.history().commits(after=history.version) if found.note == note), None)

    def _is_committed(self, history: TableHistory, note: str, failure: Exception) -> bool:
        """Return whether a native commit was made and only what ``deltalake`` does after it fails; then log it."""
        found = None
        with contextlib.suppress(Exception):  # of the storage: the error is the first one
            found = self._find_commit(history, note)
        if found is None:
            return False
        log.warning(
            "table %s: version %d is committed, and a checkpoint of the log or its clean-up failed after that: %s",
            self.table,
            found.version,
            str(failure).partition("\n")[0],
        )
        return True

    def compact(self) -> None:
        """Combine small files: by Delta's ``OPTIMIZE``; or by ``deltalake`` in a session without Delta Lake, and where
        it writes a table of another file system.

        Raises:
            Exception: that of Delta or ``deltalake``, also where another writer changed the files meanwhile. The table
                is as it was.
        """
        is_native = (self.reason_not_native(None) or self._reason_of_hosts()) is None
        # On S3 the commits of deltalake and of Delta may replace each other.
        by_deltalake = is_native and self.storage_options is not None
        if has_delta(self.spark) and not by_deltalake:
            with session_lock:  # it would take the settings of a merge
                self.spark.sql(f"OPTIMIZE {table_names.sql_name(self.table)}").collect()
            return
        from deltalake import DeltaTable

        assert self.log is not None
        table = DeltaTable(self.log.opened.table_uri, storage_options=self.storage_options)
        # It would name the files after the columns, and Delta's VACUUM compares such names in two spellings.
        if names := [name for name in table.metadata().partition_columns if not name.isascii()]:
            raise GroupError(
                f"deltalake writes files for the partition column {names[0]} that a later VACUUM deletes. Run "
                "OPTIMIZE in a Spark with Delta Lake"
            )
        table.optimize.compact()

    def commit_ledger(
        self,
        history: TableHistory,
        ledger: Ledger,
        rows: "DataFrame | None" = None,
        *,
        reason: str | None = None,
        decided_at: int | None = None,
        before: Ledger | None = None,
    ) -> Ledger:
        """Commit a ledger with the group's next number, and return it with the version of the table. Raises CommitRace.

        Args:
            rows: None for a commit without rows.
            reason: of an operator's commit: what set the ledger.
            decided_at: the version whose rows the ledger fits; None: that of ``history``.
            before: the group's ledger before; None: there is none.
        """
        ledger = ledger.with_next_number()
        doc = ledger.to_json_dict(before, now_ms=now_ms())
        note = note_of({ledger.group: doc}, read=history.version if decided_at is None else decided_at, reason=reason)
        version = self.commit(history, rows, {APP_PREFIX + ledger.group: ledger.number}, note, needed=True)
        assert version is not None
        return ledger.at_version(version)

    def restarted_ledger(self, history: TableHistory, group: str) -> Ledger:
        """Return an empty ledger in place of one that cannot be read, with a number that is not below any of the
        group's.

        Where the group's last number cannot be read, its first ledger is committed, with number 1. Delta skips a commit
        whose number is used, so this shows whether the group ever wrote to the table. If it did not, the ledger that
        was committed is returned, with its version.

        Raises:
            CommitRace: another query of the group has started its ledger since ``history``.
        """
        number = history.number(group)
        if number is None:
            try:
                return self.commit_ledger(history, Ledger(group=group), reason="the group's first commit")
            except CommitRace:
                if any(commit.ledger_entry(group) for commit in self.history().commits(after=history.version)):
                    raise  # another query of the group was faster: its ledger is in the log
                # Above the group's numbers, as no group commits a thousand times a second, and the same for two queries
                # that decide at once: Delta lets one of them commit, and the other one decides again.
                number = int(time.time()) // RESTART_S * RESTART_S * 1000
        return Ledger(group=group, number=number)

    def warn_of_other_drivers(self, reason: str) -> None:
        """Log once that Delta's commits of this table replace those of another driver, if they do."""
        scheme = urlsplit(str(self._described["location"]) if self._described is not None else self.table).scheme
        if scheme not in S3_SCHEMES or compatibility.on_databricks():
            return
        setting = f"spark.delta.logStore.{scheme}.impl"
        features = () if self._described is None else self._described["tableFeatures"]
        if self.spark.conf.get(setting, None) is None and CATALOG_FEATURES.isdisjoint(features or ()):
            _warn_once(
                f"table {self.table}: Delta's writer commits, because {reason}, and on S3 its commits replace those of "
                "other drivers made at the same time. Let only one driver write the table; or set storage_options and "
                f"writer='native' in all of them; or set {setting} to a LogStore for several drivers"
            )

    # --- the table's commits ----------------------------------------------------------------------------------------

    def _require_source(self) -> CommitSource:
        """Return the table's commits. Raises OptionError if there is no table."""
        source = self._find_source()
        if source is None:
            raise OptionError(table_names.no_table(self.spark, self.table), table=self.table)
        return source

    def _find_source(self) -> CommitSource | None:
        """Return the table's commits; None if there is no table."""
        if self._source is None:
            location = table_names.location(self.spark, self.table) if table_names.is_path(self.table) else None
            if location is None and self._is_described():
                location = str(self._described["location"])
            if location is None and table_names.is_path(self.table) and not has_delta(self.spark):
                location = self.table  # Spark Connect without Delta Lake
            self._source = None if location is None else open_log(self.table, location, self.storage_options)
            if self._source is None and location is not None and self._is_described():
                self._source = DescribedHistory(self.spark, self.table)
        return self._source

    def _is_described(self) -> bool:
        """Return whether there is a table, and keep what Delta reports about it. Raises OptionError for one of another
        format, and for a name that Spark cannot parse."""
        if self._described is None and has_delta(self.spark):
            try:
                self._described = self.spark.sql(f"DESCRIBE DETAIL {table_names.sql_name(self.table)}").first()
            except PySparkException as exc:
                if isinstance(exc, ParseException) and not table_names.is_path(self.table):
                    raise OptionError(
                        f"the table is {self.table!r}, which is no table name in Spark's SQL ({exc.getCondition()}). A "
                        f"path contains a slash: ./{self.table}. A name with other characters needs backticks",
                        table=self.table,
                    ) from None
                if exc.getCondition() not in NOT_A_TABLE:
                    raise
            if self._described is not None and (kind := self._described["format"]) != "delta":
                raise OptionError(
                    f"table {self.table} is not a Delta table, but {kind}, whose commits cannot have a ledger. Name "
                    "another table, which the first batch creates, or convert this one to Delta",
                    table=self.table,
                )
        return self._described is not None


def now_ms() -> int:
    """Return the time in ms since 1970."""
    return int(time.time() * 1000)


def has_delta(spark: "SparkSession") -> bool:
    """Return whether the session has Delta Lake. On Spark Connect, where its classes cannot be checked, it has unless
    Delta Lake has no release for this Spark and the session's catalog is not Delta's."""
    jvm: Any = getattr(spark, "_jvm", None) if hasattr(spark, "_jsparkSession") else None
    if jvm is not None:
        return type(jvm.io.delta.tables.DeltaTable).__name__ == "JavaClass"
    if compatibility.has_delta_release() or compatibility.on_databricks():
        return True
    return "delta" in str(spark.conf.get("spark.sql.catalog.spark_catalog", "")).lower()


def has_other_hosts(spark: "SparkSession") -> bool:
    """Return whether the session's executors may run on other hosts than its driver."""
    return not str(spark.conf.get("spark.master", "local")).startswith("local")


def open_log(table: str, location: str, storage_options: Mapping[str, str] | None) -> LogFiles | None:
    """Open the log of a table with ``deltalake``; None where that is not possible or would miss commits. Raises
    OptionError where ``deltalake`` would open another folder."""
    local = native_writer.local_path(location)
    if local is None and storage_options is None:
        return None
    unlike = re.search(_OTHER_LOCAL if local is not None else _OTHER_REMOTE, local or location)
    if unlike is not None:
        more = (
            "" if local is not None else ", or leave out storage_options, so that Delta's own writer writes the table"
        )
        raise OptionError(
            f"table {table} has {unlike[0]!r} in its path: deltalake would open another folder than Spark. Use a path "
            f"without it{more}",
            table=table,
        )
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError, TableNotFoundError

    try:
        opened = DeltaTable(local or location, storage_options=dict(storage_options or {}) or None)
    except TableNotFoundError:
        return None
    except DeltaError as exc:
        if any(text in str(exc) for text in _FEATURE_ERRORS):
            return None
        raise
    protocol = opened.protocol()
    if CATALOG_FEATURES & {*(protocol.writer_features or ()), *(protocol.reader_features or ())}:
        return None
    return LogFiles(table, location, opened, storage_options)


@functools.cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


def open_existing(spark: "SparkSession", table: str) -> TableWriter:
    """Open a table; raise OptionError if it does not exist."""
    writer = TableWriter(spark, table_names.canonical(table))
    if not writer.exists():
        raise OptionError(table_names.no_table(spark, writer.table), table=writer.table)
    return writer


# --- lost races -------------------------------------------------------------------------------------------------------


RESTART = (
    "It is safe to start the query again. If the error returns, too many queries write this table: use longer trigger "
    "intervals"
)


def retry_races(attempt: Callable[[], _T], *, what: str, remedy: str = RESTART) -> _T:
    """Run ``attempt`` again while it raises :class:`CommitRace`, at most COMMIT_ATTEMPTS_MAX times in all.

    Args:
        what: what is committed; it starts log lines and the error.
        remedy: what to do if every attempt lost its race; it ends the error.

    Raises:
        LedgerConflict: every attempt lost its race.
    """
    last_race: CommitRace | None = None
    for n in range(1, COMMIT_ATTEMPTS_MAX + 1):
        try:
            return attempt()
        except CommitRace as exc:
            last_race = exc
            log.info("%s: the table has changed meanwhile (attempt %d of %d)", what, n, COMMIT_ATTEMPTS_MAX)
            threading.Event().wait(random.uniform(0, RACE_WAIT_MAX_S * n / COMMIT_ATTEMPTS_MAX))
    raise LedgerConflict(
        f"{what} lost to concurrent writers {COMMIT_ATTEMPTS_MAX} times in a row; nothing was written. " + remedy
    ) from last_race


def is_race(exc: Exception) -> bool:
    """Return whether Delta reports a concurrent commit.

    On classic Spark all such errors extend one class of the JDK, on Spark Connect they have a known error condition.
    """
    if isinstance(exc, PySparkException) and str(exc.getCondition() or "").startswith(_RACE_CONDITIONS):
        return True
    # Raised by py4j, or translated by PySpark if the delta package is imported.
    java: Any = getattr(exc, "java_exception", None) or getattr(exc, "_origin", None)
    while java is not None:
        kind = java.getClass()
        while kind is not None:
            if kind.getName() == "java.util.ConcurrentModificationException":
                return True
            kind = kind.getSuperclass()
        java = java.getCause()
    return False


# --- Delta's own writer -----------------------------------------------------------------------------------------------


class OptionsWriter:
    """Appends to one table through Delta's DataFrame writer, or merges by key.

    The documented options for idempotent writes name one application and its number (``txnAppId``, ``txnVersion``), so
    all sources of a query share one group. The files of an attempt that lost a race are written again.
    """

    def __init__(self, owner: TableWriter) -> None:
        self._spark, self._table, self._owner = owner.spark, owner.table, owner

    def create(self, rows: "DataFrame") -> None:
        """Create the table as :meth:`TableWriter.create`. Raises OptionError if the folder has other files."""
        # Not by writeTo().create(): it writes a file before the log, and Delta takes the folder that a kill in between
        # leaves for one with other data.
        statement = (
            f"CREATE TABLE {table_names.sql_name(self._table)} ({table_names.sql_columns(rows.schema)}) USING delta"
        )
        if self._owner.partition_by:
            statement += f" PARTITIONED BY ({', '.join(map(table_names.quoted, self._owner.partition_by))})"
        for attempt in range(1, CREATE_ATTEMPTS_MAX + 1):
            try:
                with session_lock:
                    self._spark.sql(statement)
                return
            except Exception as exc:  # raised by py4j where PySpark does not translate the class
                condition = exc.getCondition() if isinstance(exc, PySparkException) else None
                # Spark reports any folder with files as an existing table.
                if condition in _FOLDER_EXISTS and self._owner.exists():
                    return
                if condition in _FOLDER_EXISTS and attempt == CREATE_ATTEMPTS_MAX and self._is_unfinished():
                    self._finish(rows)
                    return
                if condition in _FOLDER_EXISTS and attempt == CREATE_ATTEMPTS_MAX:
                    raise OptionError(
                        f"table {self._table} cannot be created: its folder is not empty and has no Delta table. Use "
                        "another folder, or remove the files from it",
                        table=self._table,
                    ) from exc
                if attempt == CREATE_ATTEMPTS_MAX or not (is_race(exc) or condition in _FOLDER_EXISTS):
                    raise
                threading.Event().wait(random.uniform(0, CREATE_WAIT_MAX_S))

    def _is_unfinished(self) -> bool:
        """Return whether the folder has a log without a commit, and nothing else: a writer was killed while it created
        the table. False where the folder cannot be listed."""
        if not table_names.is_path(self._table):
            return False
        local = native_writer.local_path(self._table)
        if local is None and not hasattr(self._spark, "_jsparkSession"):
            return False
        files = checkpoint.spark_files(self._spark) if local is None else checkpoint.local_files()
        folder = local or self._table
        names = files.names(folder)
        return names == [LOG_FOLDER] and all(name[0] in "._" for name in files.names(f"{folder}/{LOG_FOLDER}"))

    def _finish(self, rows: "DataFrame") -> None:
        """Create the table in an unfinished folder: an append does so, while Delta's own ``create`` refuses it."""
        try:
            self._save(self._spark.createDataFrame([], rows.schema).write.format("delta").mode("append"))
        except CommitRace:
            if not self._owner.exists():
                raise

    def commit(
        self,
        rows: "DataFrame | None",
        numbers: Mapping[str, int],
        note: str,
        *,
        needed: bool,
    ) -> bool:
        """Commit like :meth:`NativeWriter.commit`; but Delta skips a commit whose number is used, without an error, and
        a DataFrame without rows is committed, too: whether it has rows is known when it is written.

        Raises:
            OptionError: the batch has several groups.
            CommitRace: another writer committed first.
        """
        if rows is None and not needed:
            return False
        if len(numbers) > 1:
            groups = sorted(name.removeprefix(APP_PREFIX) for name in numbers)
            raise OptionError(
                f"the sources of this query have the groups {', '.join(groups)}, and a commit of Delta's writer has "
                f"one SetTransaction number, so a query can write only one group to table {self._table}. Nothing was "
                "written. Use one query for each group, or read all topics with one group",
                groups=groups,
            )
        ((app_id, number),) = numbers.items()
        few_tasks = session_setting(self._spark, SNAPSHOT_PARTITIONS, "2", only_if_unset=True)
        if self._owner.merge is not None and rows is not None:
            merging = MergeWriter(self._spark, self._table, self._owner.merge, adds_columns=self._owner.merge_schema)
            with few_tasks, races():
                merging.commit(rows, app_id, number, note, self._owner.identity())
            return True
        options: dict[str, str | int | bool] = {
            "txnAppId": app_id,
            "txnVersion": number,
            "userMetadata": note,
            "mergeSchema": self._owner.merge_schema,
        }
        identity = set[str]()
        with few_tasks:
            while True:
                frame = self._empty(identity) if rows is None else rows
                try:
                    self._save(frame.write.format("delta").mode("append").options(**options))
                except PySparkException as exc:  # before anything is written; Spark's schema hides such columns
                    name = (exc.getMessageParameters() or {}).get("colName")
                    if exc.getCondition() in _OTHER_TYPES and rows is not None:
                        self._refuse_other_types(rows, exc)
                    if rows is not None or exc.getCondition() != _IDENTITY or name is None or name in identity:
                        raise
                    identity.add(name)
                else:
                    return True

    def _refuse_other_types(self, rows: "DataFrame", cause: Exception) -> None:
        """Raise OptionError for rows with other types than the table. Delta's own error names options of its writer,
        which a sink does not have."""
        if other := self._owner.other_types(rows):
            raise OptionError(
                f"Delta refuses types of the batch for table {self._table} ({'; '.join(other)}). Nothing was written. "
                "Cast these columns in the transform; or, if the table has type widening (the property "
                "delta.enableTypeWidening) and its type is the narrower one, set merge_schema=True",
                table=self._table,
                columns=other,
            ) from cause

    def _save(self, writer: Any) -> None:
        if self._owner.partition_by:
            writer = writer.partitionBy(*self._owner.partition_by)
        with races():
            if table_names.is_path(self._table):
                writer.save(self._table)
            else:
                writer.saveAsTable(self._table)

    def _empty(self, identity: Collection[str]) -> "DataFrame":
        """Return no rows, with all columns of the table but identity columns."""
        from pyspark.sql.types import StructType

        fields = table_names.read(self._spark, self._table).schema.fields
        return self._spark.createDataFrame([], StructType([field for field in fields if field.name not in identity]))


@contextlib.contextmanager
def races() -> Iterator[None]:
    """Raise CommitRace where Delta reports a concurrent commit."""
    try:
        yield
    except Exception as exc:  # raised by py4j where PySpark does not translate the class
        if is_race(exc):
            raise CommitRace(str(exc)) from exc
        raise
