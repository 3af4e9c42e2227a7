"""The commits of a Delta table, and what this package stores in them beside the rows.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``), the command line, tests.
Deliberately absent: rows, and what follows from the commits (:mod:`replaced_rows`, :mod:`sink`).

Commits are read from the files of the table's log (:class:`LogFiles`). ``deltalake`` opens the table; each commit is
then read by its version, because ``deltalake``'s own ``history()`` numbers the newest commits from the version that it
loaded, which is wrong when another writer commits meanwhile. Where the log cannot be read that way (a catalog manages
the commits, there are no credentials), ``DESCRIBE HISTORY`` has the same facts, for one Spark job per query
(:class:`DescribedHistory`).

The *note* is the ``userMetadata`` of a commit: the ledger of each of its groups as it is after that commit
(:func:`note_of`, :mod:`ledger_format`).

``RESTORE``, ``REPLACE`` and an overwrite remove rows and leave ``SetTransaction`` numbers as they are, so the newest
ledger still counts the removed rows; :mod:`replaced_rows` compares the two.
"""

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pyspark.errors import PySparkException

from spark_group_source.delta import table_names
from spark_group_source.delta.ledger_format import APP_PREFIX, VERSION, Ledger, topic_names

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame, SparkSession

HISTORY_LIMITS = (2, 20, 1000)
"""The ``LIMIT`` of one ``DESCRIBE HISTORY`` after the other; after the last one the whole history is read."""

ROW_COMMANDS = frozenset({"DELETE", "UPDATE", "MERGE", "TRUNCATE"})
"""Operations with which a user changes or removes rows on purpose: the ledger does not follow them. ``TRUNCATE`` is
Databricks'."""

NOTE_START = '[{"'
"""How a note of this package starts; those of other writers may be long."""

PARTIAL_OVERWRITE = ("predicate", "isDynamicPartitionOverwrite")
"""Parameters of an overwrite that sets a part of the table only."""

INTERNAL_KEY = re.compile(r"(replay|letters)\.([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")
"""Keys of ledgers that belong to no group: of replays from a dead-letter table, and of the dead letters of a table."""

NOT_A_TABLE = {
    "TABLE_OR_VIEW_NOT_FOUND",
    "DELTA_MISSING_DELTA_TABLE",
    "DELTA_TABLE_NOT_FOUND",
    "DELTA_TABLE_ONLY_OPERATION",
    "DELTA_PATH_DOES_NOT_EXIST",
}
"""The error conditions by which Delta reports that there is no table."""


def note_of(ledgers: Mapping[str, Mapping[str, Any]], *, read: int, reason: str | None = None) -> str:
    """Return the note of a commit: each group's ledger after it (:meth:`Ledger.to_json_dict`), the version of the table
    by which it was decided, and, in an operator's commit, what set the ledger."""
    more = {} if reason is None else {"reason": reason}
    entries = [{"group": group, "ledger": doc, "read": read, **more, "v": VERSION} for group, doc in ledgers.items()]
    return json.dumps(entries, separators=(",", ":"))


def note_without_ledger(query_id: str, batch_id: int) -> str:
    """Return the note of a commit that has no ledger, by which it is found."""
    return json.dumps([{"query": query_id, "batch": batch_id}], separators=(",", ":"))


def _note_entries(note: str | None) -> tuple[dict[str, Any], ...]:
    """Return the entries of a note; none for the ``userMetadata`` of another writer."""
    try:
        found = json.loads(note or "[]")
    except ValueError:
        return ()
    return tuple(
        entry
        for entry in (found if isinstance(found, list) else [found])
        if isinstance(entry, dict) and {"group", "ledger"} <= entry.keys()
    )


class ChangedRows(NamedTuple):
    """How many rows a commit inserted, updated and deleted."""

    inserted: int = 0
    updated: int = 0
    deleted: int = 0

    @classmethod
    def of(cls, metrics: Mapping[str, Any]) -> "ChangedRows":
        """Read them from the ``operationMetrics`` of an append or a ``MERGE``; 0 where they are missing."""
        inserted = metrics.get("numTargetRowsInserted", metrics.get("numOutputRows"))
        counts = (inserted, metrics.get("numTargetRowsUpdated"), metrics.get("numTargetRowsDeleted"))
        return cls(*(int(count or 0) for count in counts))


class Commit(NamedTuple):
    """One commit of a table."""

    version: int
    """The version of the table that the commit made."""
    read: int
    """The newest version of the table that the writer knew when it decided about this commit."""
    note: str | None = None
    """The commit's ``userMetadata``; None for an ``OPTIMIZE``."""
    entries: tuple[dict[str, Any], ...] = ()
    """The ledgers in the note; empty for a commit of another writer."""
    operation: str = ""
    """The operation as Delta names it, such as ``WRITE``."""
    parameters: Mapping[str, Any] = MappingProxyType({})
    """The operation's parameters as Delta names them."""
    sets_content: bool = False
    """Whether the operation sets the content of the table, or of a part of it: a ``REPLACE``, an overwrite, a clone."""
    unsettles_ledger: bool = False
    """Whether the ledgers may not fit the rows any more: the commit is a ``RESTORE``, sets the content of the whole
    table (a ``REPLACE``, an overwrite, a clone into the table; it may bring back rows even if it removes none), or
    removed rows by an operation other than ROW_COMMANDS."""
    written_ms: int | None = None
    """When it was committed, in ms since 1970 by the writer's clock; None where that is not known."""
    changed: ChangedRows = ChangedRows()
    """The rows that it changed, by its metrics."""

    @classmethod
    def of(cls, version: int, info: Mapping[str, Any], removes_rows: bool | None = None) -> "Commit":
        """Build it from the commit's ``commitInfo`` or a row of ``DESCRIBE HISTORY``, and from whether an action of it
        removes rows; None: the operation decides."""
        operation, note, read = str(info.get("operation") or ""), info.get("userMetadata"), info.get("readVersion")
        if operation == "OPTIMIZE":
            note = None  # auto compaction after a merge has its settings, and so its note
        entries = _note_entries(note)
        known = [version - 1 if read is None else read, *(e["read"] for e in entries if isinstance(e.get("read"), int))]
        parameters = dict(info.get("operationParameters") or {})
        modes = {str(parameters.get(name)).strip('"') for name in ("mode", "outputMode")}
        sets_content = "REPLACE TABLE" in operation or operation == "CLONE"
        sets_content = version > 0 and (sets_content or not modes.isdisjoint({"Overwrite", "Complete"}))
        is_part = any(parameters.get(name) not in (None, "", "false") for name in PARTIAL_OVERWRITE)
        # An operation that sets all of the content may bring back rows of an empty table.
        may_replace_rows = sets_content if removes_rows is None else removes_rows or (sets_content and not is_part)
        unsettles_ledger = operation == "RESTORE" or (may_replace_rows and operation not in ROW_COMMANDS)
        written: Any = info.get("timestamp")
        written_ms = int(written.timestamp() * 1000) if isinstance(written, datetime) else written
        changed = ChangedRows.of(dict(info.get("operationMetrics") or {}))
        return cls(
            version=version,
            read=min(known),
            note=note,
            entries=entries,
            operation=operation,
            parameters=parameters,
            sets_content=sets_content,
            unsettles_ledger=unsettles_ledger,
            written_ms=written_ms,
            changed=changed,
        )

    def ledger_entry(self, group: str) -> dict[str, Any] | None:
        """Return the entry of a group, with its ``ledger``; None if the commit has none."""
        return next((entry for entry in self.entries if entry["group"] == group), None)

    def ledger(self, group: str, table: str) -> Ledger | None:
        """Return the ledger of a group; None if the commit has none. Raises as :meth:`Ledger.from_json`."""
        entry = self.ledger_entry(group)
        if entry is None:
            return None
        return Ledger.from_json(group, entry["ledger"], table=table, table_version=self.version)


class LedgerExpired(Exception):
    """The group wrote to the table, and the table's log does not reach back to the group's newest commit, or to the
    version by which that commit was decided."""


class CommitRace(Exception):
    """The table has changed since the decision about this commit; decide again from the table's new version."""


class BatchSkipped(Exception):
    """Delta's writer skipped a batch without a ledger, and did not read its rows: the table has its number."""


class CommitSource(Protocol):
    """Reads the commits of one table."""

    table: str

    def newest(self) -> int:
        """Return the newest version; -1 if there is no table."""

    def commits(self, newest: int, after: int) -> Iterator[Commit]:
        """Yield the commits from version ``newest`` down to ``after + 1``, as far as the log reaches back."""

    def number(self, app_id: str) -> int | None:
        """Return an application's newest ``SetTransaction``; -1 if there is none, None where it cannot be read."""

    def restored_to(self, restore: Commit) -> int | None:
        """Return the version whose rows a ``RESTORE`` brought back; None if the log does not have it."""


class TableHistory:
    """One version of a table, the newest one by default, and the commits up to it."""

    def __init__(self, source: CommitSource, version: int | None = None) -> None:
        self.source = source
        self.version = source.newest() if version is None else version

    @property
    def table(self) -> str:
        return self.source.table

    def at(self, version: int) -> "TableHistory":
        """Return an earlier version of the same table."""
        return TableHistory(self.source, version)

    def commits(self, *, after: int = -1) -> Iterator[Commit]:
        """Yield the commits newer than version ``after``, newest first, as far as the log reaches back."""
        return self.source.commits(self.version, after)

    def has_creation(self) -> bool:
        """Return whether the log has the commit that created the table; commits behind it may be missing."""
        return next(self.at(0).commits(), None) is not None

    def number(self, group: str) -> int | None:
        """Return the ``SetTransaction`` number of the group's newest commit; -1 if there is none, None where the commit
        source does not report numbers."""
        return self.source.number(APP_PREFIX + group)

    def groups(self) -> list[str]:
        """Return the groups that have a ledger in the log, sorted."""
        return [key for key in self.ledger_keys() if not INTERNAL_KEY.fullmatch(key)]

    def ledger_keys(self) -> list[str]:
        """Return what has a ledger in the log, sorted: the groups and INTERNAL_KEYs."""
        return sorted(self.topics())

    def topics(self) -> dict[str, set[str]]:
        """Return the topics in the ledgers of the log, by group."""
        found: dict[str, set[str]] = {}
        for entry in (entry for commit in self.commits() for entry in commit.entries):
            found.setdefault(str(entry["group"]), set()).update(topic_names(entry["ledger"]))
        return found

    def ledger(self, group: str, known: Ledger | None = None) -> Ledger | None:
        """Return the newest ledger of a group, also after a ``RESTORE``; None if the group never wrote to the table.

        Args:
            known: the group's ledger at an earlier version: only newer commits are read.

        Raises:
            LedgerExpired: the group wrote, and the log does not reach back to its newest commit.
            LedgerConflict: the ledger is damaged, or a newer release wrote it.
        """
        if self.number(group) == -1:
            return None
        after = -1 if known is None else known.table_version
        oldest_read = self.version + 1
        for commit in self.commits(after=after):
            oldest_read = commit.version
            if (found := commit.ledger(group, self.table)) is not None:
                return found
        if oldest_read > after + 1:
            raise LedgerExpired(group)
        return known


class LogFiles:
    """The commits of a table whose log ``deltalake`` can open.

    ``opened`` is the state against which ``deltalake`` checks commits for conflicts, so only one batch at a time uses
    it.
    """

    def __init__(
        self, table: str, location: str, opened: "DeltaTable", storage_options: Mapping[str, str] | None = None
    ) -> None:
        from deltalake.fs import DeltaStorageHandler
        from pyarrow.fs import PyFileSystem

        self.table, self.location, self.opened = table, location, opened
        self._storage_options = dict(storage_options or {})
        self._newest: tuple[int, bytes] | None = None
        """The newest commit that was read, by its version; None before the first."""
        self.files: Any = PyFileSystem(DeltaStorageHandler(opened.table_uri, self._storage_options))

    def newest(self) -> int:
        """Update ``opened`` and return its version; -1 if there is no table, or not the one that was opened any
        more."""
        from deltalake.exceptions import DeltaError

        try:
            self.opened.update_incremental()
        except DeltaError:
            if self.actions(int(self.opened.version())) is not None:
                raise
            return -1  # the log is shorter than it was
        version = int(self.opened.version())
        # The log always has its newest commit, and never another one of that version. Otherwise the table was deleted,
        # and perhaps created again: ``opened`` then has the former table, with the new one's commits behind it.
        if (text := self.actions(version)) is None:
            return -1
        if self._newest is not None:
            former, known = self._newest
            found = text if former == version else self.actions(former)
            if found is not None and found != known:
                return -1
        self._newest = version, text
        return version

    def commits(self, newest: int, after: int) -> Iterator[Commit]:
        for version in range(newest, after, -1):
            text = self.actions(version)
            if text is None:
                return
            yield _commit(version, text)

    def actions(self, version: int) -> bytes | None:
        """Return the commit file of a version, one action per line; None if it was deleted from the log."""
        try:
            with self.files.open_input_file(f"_delta_log/{version:020}.json") as file:
                return bytes(file.readall())
        except FileNotFoundError:
            return None

    def number(self, app_id: str) -> int:
        found = self.opened.transaction_version(app_id)
        return -1 if found is None else int(found)

    def restored_to(self, restore: Commit) -> int | None:
        if (version := _version_parameter(restore)) is not None:
            return version
        # RESTORE by timestamp: Delta records the local time of the session that ran it, without a time zone. The
        # version that it chose has the files that the RESTORE left, so its actions and those of the commits before it,
        # undone one by one, lead there. Commits between two versions with the same files have no rows.
        # If rows came and were removed again in between, several ledgers fit the files: then none is chosen.
        added, removed = _file_changes(self.actions(restore.version) or b"")
        found, has_other_files = None, False
        for earlier in range(restore.version - 1, -1, -1):
            # Now ``removed`` has the files of version ``earlier`` that the RESTORE left out, ``added`` those that only
            # the restored version has.
            if added or removed:
                has_other_files = found is not None
            elif has_other_files:
                return None
            elif found is None:
                found = earlier
            if (text := self.actions(earlier)) is None:
                return found
            came, went = _file_changes(text)
            added, removed = (added - went) | (came - removed), (removed - came) | (went - added)
        return found


class OpenedLogs(list[LogFiles]):
    """Opened logs of a table that no batch uses now; several queries may write at the same time. A pickled copy has
    none."""

    def __reduce__(self) -> tuple[type["OpenedLogs"], tuple[()]]:
        return OpenedLogs, ()

    def take(self) -> LogFiles | None:
        """Remove and return an opened log; None if there is none. Another thread may take the last one meanwhile."""
        try:
            return self.pop()
        except IndexError:
            return None

    def put(self, log: LogFiles | None) -> None:
        """Keep the log of a batch that has ended; None where it cannot be opened."""
        if log is not None:
            self.append(log)


class DescribedHistory:
    """The commits of a table as ``DESCRIBE HISTORY`` shows them, in any session that has Delta Lake."""

    def __init__(self, spark: "SparkSession", table: str) -> None:
        self._spark, self.table = spark, table
        self._loaded: list[Commit] = []

    def newest(self) -> int:
        try:
            self._loaded = self._load(HISTORY_LIMITS[0])
        except PySparkException as exc:
            if exc.getCondition() in NOT_A_TABLE:
                return -1
            raise
        return self._loaded[0].version

    def commits(self, newest: int, after: int) -> Iterator[Commit]:
        oldest_yielded = newest + 1
        limits: list[int | None] = [len(self._loaded), *HISTORY_LIMITS, None]
        for limit in limits:
            if limit is None or limit > len(self._loaded):
                self._loaded = self._load(limit)
            for commit in self._loaded:
                if after < commit.version < oldest_yielded:
                    yield commit
                    oldest_yielded = commit.version
            if oldest_yielded <= after + 1 or (limit is not None and len(self._loaded) < limit):
                return

    def number(self, app_id: str) -> int | None:
        """Return None: ``DESCRIBE HISTORY`` does not show ``SetTransaction``."""
        del app_id
        return None

    def restored_to(self, restore: Commit) -> int | None:
        return _version_parameter(restore)

    def _load(self, limit: int | None) -> list[Commit]:
        last = "" if limit is None else f" LIMIT {limit}"
        history: DataFrame = self._spark.sql(f"DESCRIBE HISTORY {table_names.sql_name(self.table)}{last}")
        columns = ("version", "operation", "operationParameters", "operationMetrics", "readVersion", "timestamp")
        note = f"CASE WHEN startswith(userMetadata, '{NOTE_START}') THEN userMetadata END AS userMetadata"
        rows = [row.asDict() for row in history.selectExpr(*columns, note).collect()]
        return [Commit.of(row["version"], row) for row in sorted(rows, key=lambda row: -row["version"])]


def actions_of(text: bytes, *kinds: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the actions of these kinds in the file of a commit, each with its kind."""
    starts = tuple(f'{{"{kind}"'.encode() for kind in kinds)
    for line in text.splitlines():
        if line.startswith(starts):
            yield from json.loads(line).items()


def _commit(version: int, text: bytes) -> Commit:
    """Read the file of a commit."""
    info: dict[str, Any] = {}
    removes_rows = False
    for kind, action in actions_of(text, "commitInfo", "remove"):
        if kind == "commitInfo":
            info = action
        else:
            removes_rows |= bool(action.get("dataChange", True))  # compaction removes files only
    return Commit.of(version, info, removes_rows)


def _file_changes(text: bytes) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Return the files that a commit added and removed, each with its deletion vector.

    A commit that adds files, removes none and does not change data lists files again, with other statistics.
    """
    added: set[tuple[str, str]] = set()
    removed: set[tuple[str, str]] = set()
    changes_data = False
    for kind, action in actions_of(text, "add", "remove"):
        vector = json.dumps(action.get("deletionVector"), sort_keys=True)
        (added if kind == "add" else removed).add((str(action["path"]), vector))
        changes_data |= bool(action.get("dataChange", True))
    return (added, removed) if changes_data or removed else (set(), set())


def _version_parameter(restore: Commit) -> int | None:
    """Return the version that a ``RESTORE ... TO VERSION AS OF`` names; None for a ``RESTORE`` by timestamp."""
    text = str(restore.parameters.get("version")).strip('"')
    return int(text) if text.isdecimal() else None
