"""Reads the history of one Delta table and commits to it, for one batch or one command.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``), the command line.
Deliberately absent: what is decided about a batch (:mod:`ledger_decision`, :mod:`sink`).

With either writer, a commit holds the rows, the group's next ``SetTransaction`` number and the note with the ledger
after it, and of two commits with one number one wins. So both writers may be used for one table, also in turns.
"""

import json
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from pyspark.errors import PySparkException

from spark_group_source.delta import native_writer, table_names
from spark_group_source.delta.commit_race import CommitRace
from spark_group_source.delta.ledger_format import APP_PREFIX, Ledger
from spark_group_source.delta.native_writer import NativeWriter
from spark_group_source.delta.options_writer import OptionsWriter
from spark_group_source.delta.table_history import (
    NOT_A_TABLE,
    CommitSource,
    DescribedHistory,
    LogFiles,
    TableHistory,
    note_of,
)
from spark_group_source.errors import OptionError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)

Writer = Literal["auto", "native", "options"]

CATALOG_FEATURES = frozenset({"catalogManaged", "catalogOwned-preview", "coordinatedCommits-preview"})
"""Table features with which the newest commits are not in the log's files: only Spark reads and writes such a table."""


class TableWriter:
    """Reads the history of one table and commits to it, during one batch. Nothing is opened until it is used.

    Args:
        table: a path or a name in the session's catalog.
        writer: "native" and "options" name a writer; "auto" uses the native one where it works.
        partition_by, merge_schema: as in :class:`spark_group_source.DeltaSink`.
        storage_options: for ``deltalake``; None opens the table's files natively on a local file system only.
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
        storage_options: Mapping[str, str] | None = None,
        log: LogFiles | None = None,
    ) -> None:
        self.spark, self.table, self.writer = spark, table_names.qualified(spark, table), writer
        self.partition_by, self.merge_schema = partition_by, merge_schema
        self.storage_options = dict(storage_options) if storage_options is not None else None
        self._source: CommitSource | None = log if log is not None and log.newest() >= 0 else None
        self._native: NativeWriter | None = None
        self._options = OptionsWriter(spark, self.table, partition_by, merge_schema)

    @property
    def log(self) -> LogFiles | None:
        """The opened log, for a later writer; None where the log cannot be opened."""
        return self._source if isinstance(self._source, LogFiles) else None

    def exists(self) -> bool:
        """Return whether the Delta table exists."""
        return self._find_source() is not None

    def create(self, rows: "DataFrame") -> None:
        """Create the table with the columns of these rows, unless it exists."""
        if has_delta(self.spark):
            self._options.create(rows, self.exists)
            return
        from deltalake import DeltaTable, Schema

        if not table_names.is_path(self.table):
            raise OptionError(
                f"table {self.table} does not exist, and this Spark session has no Delta Lake, which is needed to "
                "create a table by name. Add Delta Lake to the session, or pass a path"
            )
        schema = json.loads(rows.schema.json())
        for field in schema["fields"]:
            field["nullable"] = True  # as Delta's own writer creates tables
        columns = Schema.from_json(json.dumps(schema))
        DeltaTable.create(_uri(self.table), columns, "ignore", partition_by=list(self.partition_by) or None)

    def identity(self) -> str:
        """Return what identifies this very table: its id where the log can be read, else its name."""
        source = self._require_source()
        return str(source.opened.metadata().id) if isinstance(source, LogFiles) else self.table

    def transaction_retention(self) -> str | None:
        """Return the time after which Delta deletes ``SetTransaction`` numbers; None if the table sets none."""
        source = self._require_source()
        if isinstance(source, LogFiles):
            found: str | None = source.opened.metadata().configuration.get(table_names.RETENTION)
            return found
        detail: Any = self.spark.sql(f"DESCRIBE DETAIL {table_names.sql_name(self.table)}").first()
        return dict(detail["properties"]).get(table_names.RETENTION)

    def history(self) -> TableHistory:
        """Return the newest version of the table and its commits; version -1 if the table no longer exists."""
        if isinstance(self._source, LogFiles) and self._source.newest() < 0:
            self._source = None
        source = self._find_source()
        return (
            TableHistory(source) if source is not None else TableHistory(DescribedHistory(self.spark, self.table), -1)
        )

    def reason_not_native(self, rows: "DataFrame | None") -> str | None:
        """Return why a commit of these rows cannot be written natively; None if it can."""
        if self.writer == "options":
            return "writer='options'"
        source = self._require_source()
        if not isinstance(source, LogFiles):
            return "its log cannot be opened by deltalake: it is not on a local file system, or a catalog manages it"
        reason = native_writer.reason_not_native(source.opened)
        if reason is None and rows is not None and native_writer.has_other_columns(source.opened, rows):
            return "the batch has other columns or types"
        partitions = tuple(source.opened.metadata().partition_columns)
        if reason is None and self.partition_by and self.partition_by != partitions:
            return f"it is partitioned by {', '.join(partitions) or 'nothing'}, not by {', '.join(self.partition_by)}"
        return reason

    def described_writer(self) -> str:
        """Return the writer of this table and the reason for it, for a log line."""
        reason = self.reason_not_native(None)
        return "natively" if reason is None else f"by Delta's writer options, because {reason}"

    def commit(
        self, history: TableHistory, rows: "DataFrame | None", numbers: Mapping[str, int], note: str, *, needed: bool
    ) -> int | None:
        """Commit rows, ``SetTransaction`` numbers and a note.

        Args:
            history: the version by which this commit was decided.
            rows: None for a commit without rows.
            numbers: the ``SetTransaction`` number of each application.
            note: the commit's ``userMetadata``. It has the number in it, so no other commit has the same text.
            needed: whether to commit even if there are no rows.

        Returns:
            The version that the commit made; None if nothing had to be committed.

        Raises:
            CommitRace: another writer committed first; read the history and decide again.
            OptionError: the commit needs a writer that does not work here.
            Delta's own errors, unchanged. Nothing was written.
        """
        reason = self.reason_not_native(rows)
        if reason is None:
            assert self.log is not None
            self._native = self._native or NativeWriter(self.spark, self.log)
            committed = self._native.commit(rows, numbers, note, needed=needed)
        elif self.writer == "native" or not has_delta(self.spark):
            raise OptionError(
                f"table {self.table} cannot be written natively: {reason}. Nothing was written. Use a Spark session "
                "that has Delta Lake, with writer='auto'",
                table=self.table,
            )
        else:
            columns = None if self.log is None else native_writer.writable_columns(self.log.opened)
            committed = self._options.commit(rows, numbers, note, needed=needed, columns=columns)
        if not committed:
            return None
        for commit in self.history().commits(after=history.version):
            if commit.note == note:
                return commit.version
        raise CommitRace(f"another commit has the number {dict(numbers)}")

    def commit_ledger(self, history: TableHistory, ledger: Ledger, reason: str) -> Ledger:
        """Commit a ledger without rows, and return it with the version of the table. Raises CommitRace."""
        note = note_of((), [ledger], read=history.version, reason=reason)
        version = self.commit(history, None, {APP_PREFIX + ledger.group: ledger.number}, note, needed=True)
        assert version is not None
        return ledger.at_version(version)

    def commit_first_ledger(self, history: TableHistory, group: str) -> Ledger | int:
        """Try to commit a group's first ledger, with number 1, where the group's last number cannot be read.

        Delta skips a commit whose number is used, so this shows whether the group ever wrote to the table.

        Returns:
            The ledger that was committed; or, if the group wrote before, a number that is not below any of its numbers.
        """
        try:
            return self.commit_ledger(history, Ledger(group=group).with_next_number(), "the group's first commit")
        except CommitRace:
            return int(time.time() * 1000)  # no group commits a thousand times a second

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
            location = location or self._described_location()
            self._source = None if location is None else open_log(self.table, location, self.storage_options)
            if self._source is None and location is not None and self._described_location() is not None:
                self._source = DescribedHistory(self.spark, self.table)
        return self._source

    def _described_location(self) -> str | None:
        """Return the table's location as Delta reports it; None if there is no table."""
        if not has_delta(self.spark):
            return None
        try:
            detail: Any = self.spark.sql(f"DESCRIBE DETAIL {table_names.sql_name(self.table)}").first()
        except PySparkException as exc:
            if exc.getCondition() in NOT_A_TABLE:
                return None
            raise
        return str(detail["location"])


def check_writer(writer: str) -> None:
    """Raise OptionError for a writer that does not exist."""
    if writer not in get_args(Writer):
        raise OptionError(f"writer is {writer!r}; it must be one of {', '.join(get_args(Writer))}", writer=writer)


def has_delta(spark: "SparkSession") -> bool:
    """Return whether the session has Delta Lake; on Spark Connect, where it cannot be checked, True."""
    jvm: Any = getattr(spark, "_jvm", None) if hasattr(spark, "_jsparkSession") else None
    return jvm is None or type(jvm.io.delta.tables.DeltaTable).__name__ == "JavaClass"


def open_log(table: str, location: str, storage_options: Mapping[str, str] | None) -> LogFiles | None:
    """Open the log of a table with ``deltalake``; None where that is not possible or would miss commits."""
    if native_writer.local_path(location) is None and storage_options is None:
        return None
    try:
        from deltalake import DeltaTable
        from deltalake.exceptions import TableNotFoundError
    except ImportError:
        return None
    try:
        opened = DeltaTable(_uri(location), storage_options=dict(storage_options or {}) or None)
    except TableNotFoundError:
        return None
    protocol = opened.protocol()
    if CATALOG_FEATURES & {*(protocol.writer_features or ()), *(protocol.reader_features or ())}:
        return None
    return LogFiles(table, location, opened, storage_options)


def _uri(location: str) -> str:
    return native_writer.local_path(location) or location


def open_existing(spark: "SparkSession", table: str) -> TableWriter:
    """Open a table that must exist.

    Raises:
        OptionError: there is no such Delta table.
    """
    writer = TableWriter(spark, table_names.canonical(table))
    if not writer.exists():
        raise OptionError(table_names.no_table(spark, writer.table), table=writer.table)
    return writer
