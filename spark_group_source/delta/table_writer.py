"""One Delta table, for one batch or one operator: its history, and the writer that commits to it.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``), the command line.
Deliberately absent: what is decided about a batch (:mod:`ledger`, :mod:`sink`).

Whichever writer is used, a commit holds the rows, the number of the group's commits and the note with the ledger after
it, and of two commits with one number one wins. So both writers may be used of one table, also by turns.
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
"""With these the newest commits are not in the log's files: only Spark can read and write such a table."""


class TableWriter:
    """A table as one attempt, or several of one batch, see it. Nothing is opened until it is used.

    Args:
        table: a path or a name in the session's catalog.
        writer: "native" and "options" name a writer; "auto" takes the native one where it works.
        partition_by, merge_schema: as in :class:`spark_group_source.DeltaSink`.
        storage_options: for ``deltalake``; None: the table's files are opened natively on a local file system only.
        log: the opened log of a former access that nobody else uses now; opening one reads the names of all files.
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
        """The opened log, for a later access."""
        return self._source if isinstance(self._source, LogFiles) else None

    def exists(self) -> bool:
        """Whether there is a Delta table."""
        return self._open() is not None

    def create(self, rows: "DataFrame") -> None:
        """Create the table with the columns of these rows, unless it is there."""
        if has_delta(self.spark):
            self._options.create(rows, self.exists)
            return
        from deltalake import DeltaTable, Schema

        if not table_names.is_path(self.table):
            raise OptionError(f"there is no table {self.table}, and this Spark has no Delta Lake to create it by name")
        document = json.loads(rows.schema.json())
        for field in document["fields"]:
            field["nullable"] = True  # as Delta's own writer creates tables
        columns = Schema.from_json(json.dumps(document))
        DeltaTable.create(_uri(self.table), columns, "ignore", partition_by=list(self.partition_by) or None)

    def identity(self) -> str:
        """What names the table for good: its id where the log can be read, else its name."""
        source = self._opened()
        return str(source.opened.metadata().id) if isinstance(source, LogFiles) else self.table

    def retention(self) -> str | None:
        """After what time Delta forgets numbers of applications, if the table says so."""
        source = self._opened()
        if isinstance(source, LogFiles):
            found: str | None = source.opened.metadata().configuration.get(table_names.RETENTION)
            return found
        detail: Any = self.spark.sql(f"DESCRIBE DETAIL {table_names.sql_name(self.table)}").first()
        return dict(detail["properties"]).get(table_names.RETENTION)

    def history(self) -> TableHistory:
        """The newest version of the table; -1 if the table is not there any more."""
        if isinstance(self._source, LogFiles) and self._source.newest() < 0:
            self._source = None
        source = self._open()
        return (
            TableHistory(source) if source is not None else TableHistory(DescribedHistory(self.spark, self.table), -1)
        )

    def unfit(self, rows: "DataFrame | None") -> str | None:
        """Why this commit cannot be written natively, or None."""
        if self.writer == "options":
            return "writer='options'"
        source = self._opened()
        if not isinstance(source, LogFiles):
            return "its log cannot be opened by deltalake: it is not on a local file system, or a catalog manages it"
        reason = native_writer.unfit(source.opened)
        if reason is None and rows is not None and native_writer.differs(source.opened, rows):
            return "the batch has other columns or types"
        partitions = tuple(source.opened.metadata().partition_columns)
        if reason is None and self.partition_by and self.partition_by != partitions:
            return f"it is partitioned by {', '.join(partitions) or 'nothing'}, not by {', '.join(self.partition_by)}"
        return reason

    def described_writer(self) -> str:
        """Which writer this table has, and why, for a log line."""
        reason = self.unfit(None)
        return "natively" if reason is None else f"by Delta's writer options, because {reason}"

    def commit(
        self, history: TableHistory, rows: "DataFrame | None", numbers: Mapping[str, int], note: str, *, needed: bool
    ) -> int | None:
        """Commit rows, numbers of applications and a note; returns the version, or None if nothing had to be committed.

        Args:
            history: what this commit was decided by.
            rows: None for a commit without rows.
            numbers: the version of each application's ``SetTransaction``.
            note: names this commit among all: with the number in it there is no other of the same text.
            needed: whether there is something to commit even if there are no rows.

        Raises:
            CommitRace: another writer was first; look again and decide anew.
            OptionError: the commit needs a writer that does not work here.
            Delta's own errors, unchanged. Nothing was written.
        """
        reason = self.unfit(rows)
        if reason is None:
            assert self.log is not None
            self._native = self._native or NativeWriter(self.spark, self.log)
            committed = self._native.commit(rows, numbers, note, needed=needed)
        elif self.writer == "native" or not has_delta(self.spark):
            raise OptionError(
                f"table {self.table} cannot be written natively: {reason}. Nothing was written. Leave "
                "`writer` at 'auto' in a Spark session that has Delta Lake",
                table=self.table,
            )
        else:
            columns = None if self.log is None else native_writer.given_columns(self.log.opened)
            committed = self._options.commit(rows, numbers, note, needed=needed, columns=columns)
        if not committed:
            return None
        for commit in self.history().commits(after=history.version):
            if commit.note == note:
                return commit.version
        raise CommitRace(f"another commit has the number {dict(numbers)}")

    def restate(self, history: TableHistory, ledger: Ledger, reason: str) -> Ledger:
        """Commit a ledger and nothing else; returns it with its version. Raises CommitRace."""
        note = note_of((), [ledger], read=history.version, reason=reason)
        version = self.commit(history, None, {APP_PREFIX + ledger.group: ledger.number}, note, needed=True)
        assert version is not None
        return ledger.at(version)

    def number_of(self, history: TableHistory, group: str) -> Ledger | int:
        """Whether a group ever wrote to a table, where only Delta knows: it skips a number that is taken.

        Returns:
            A new group's ledger, which is in the table now; or a number that no commit of the group is beyond.
        """
        try:
            return self.restate(history, Ledger(group=group).written(), "the group's first commit")
        except CommitRace:
            return int(time.time() * 1000)  # no group commits a thousand times a second

    # --- which way --------------------------------------------------------------------------------------------------

    def _opened(self) -> CommitSource:
        source = self._open()
        if source is None:
            raise OptionError(table_names.no_table(self.spark, self.table), table=self.table)
        return source

    def _open(self) -> CommitSource | None:
        """The table's commits; None if there is no table."""
        if self._source is None:
            place = table_names.location(self.spark, self.table) if table_names.is_path(self.table) else None
            place = place or self._described()
            self._source = None if place is None else open_log(self.table, place, self.storage_options)
            if self._source is None and place is not None and self._described() is not None:
                self._source = DescribedHistory(self.spark, self.table)
        return self._source

    def _described(self) -> str | None:
        """The location that Delta knows; None if there is no table."""
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
    """Raises OptionError for a writer that does not exist."""
    if writer not in get_args(Writer):
        raise OptionError(f"writer {writer!r}: must be one of {', '.join(get_args(Writer))}", writer=writer)


def has_delta(spark: "SparkSession") -> bool:
    """Whether the session has Delta Lake; on Spark Connect it is taken for granted."""
    jvm: Any = getattr(spark, "_jvm", None) if hasattr(spark, "_jsparkSession") else None
    return jvm is None or type(jvm.io.delta.tables.DeltaTable).__name__ == "JavaClass"


def open_log(table: str, location: str, storage_options: Mapping[str, str] | None) -> LogFiles | None:
    """The log of a table through ``deltalake``, or None where it must not or cannot be read that way."""
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


def existing(spark: "SparkSession", table: str) -> TableWriter:
    """The access to a table that is there, for an operator.

    Raises:
        OptionError: there is no such Delta table.
    """
    access = TableWriter(spark, table_names.canonical(table))
    if not access.exists():
        raise OptionError(table_names.no_table(spark, access.table), table=access.table)
    return access
