"""The commits of a Delta table, and what ours has in them beside rows.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``), the command line, tests.
Deliberately absent: rows, and what follows from the commits (:mod:`kept`, :mod:`sink`).

Commits are read from the files of the table's log (:class:`LogFiles`). ``deltalake`` opens the table; each commit is
then read by its version, because ``deltalake``'s own ``history()`` numbers the newest commits from the version that it
loaded, which is wrong when another writer commits meanwhile. Where the log cannot be read that way (a catalog manages
the commits, no credentials, ``deltalake`` is not installed), ``DESCRIBE HISTORY`` has the same facts, one Spark job a
look (:class:`DescribedHistory`).

What ours has is the ``userMetadata`` of the commit: the offsets of the batch, then the ledger of each of its groups as
it is after that commit. ``read`` is the version of the table that the writer decided by::

    [{"group":"etl","seq":17,"stream":"9f2c","topics":{...},"v":1},
     {"group":"etl","ledger":{...},"read":41,"v":1}]

An operator's is one such ledger, with the ``reason``.

``RESTORE`` takes rows away and leaves the numbers of applications as they are, so the newest ledger still says what was
once written; :mod:`kept` compares the two.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pyspark.errors import PySparkException

from spark_group_source.delta import table_names
from spark_group_source.delta.ledger_format import APP_PREFIX, VERSION, Ledger
from spark_group_source.errors import LedgerConflict
from spark_group_source.protocol.offsets import StreamOffset, parse

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from pyspark.sql import DataFrame, SparkSession

LOOK_COMMITS = (2, 20, 1000)
"""How many of the newest commits ``DESCRIBE HISTORY`` is asked for, one after the other; after that for all of them."""

NOT_A_TABLE = {
    "TABLE_OR_VIEW_NOT_FOUND",
    "DELTA_MISSING_DELTA_TABLE",
    "DELTA_TABLE_NOT_FOUND",
    "DELTA_TABLE_ONLY_OPERATION",
    "DELTA_PATH_DOES_NOT_EXIST",
}
"""The conditions under which Delta says that there is no table."""


def note_of(offsets: Sequence[StreamOffset], ledgers: Iterable[Ledger], *, read: int, reason: str | None = None) -> str:
    """The note of a commit."""
    texts = [offset.to_json() for offset in offsets]
    for ledger in ledgers:
        more = "" if reason is None else f',"reason":{json.dumps(reason)}'
        group = json.dumps(ledger.group)
        texts.append(f'{{"group":{group},"ledger":{ledger.to_json()},"read":{read}{more},"v":{VERSION}}}')
    return texts[0] if len(texts) == 1 else "[" + ",".join(texts) + "]"


def _docs(note: str | None) -> tuple[dict[str, Any], ...]:
    """The parts of a note; none, if it is somebody else's."""
    try:
        found = json.loads(note or "[]")
    except ValueError:
        return ()
    return tuple(
        doc for doc in (found if isinstance(found, list) else [found]) if isinstance(doc, dict) and "group" in doc
    )


class Commit(NamedTuple):
    """One commit of a table.

    ``read`` is the version that its writer knew, ``note`` its ``userMetadata``. ``restore`` has the parameters of a
    ``RESTORE``, and is None for every other operation.
    """

    version: int
    read: int
    note: str | None = None
    docs: tuple[dict[str, Any], ...] = ()
    restore: Mapping[str, Any] | None = None
    operation: str = ""

    @classmethod
    def of(cls, version: int, info: Mapping[str, Any]) -> "Commit":
        """From the commit's ``commitInfo``, or the row of ``DESCRIBE HISTORY``."""
        operation, note, read = str(info.get("operation") or ""), info.get("userMetadata"), info.get("readVersion")
        docs = _docs(note)
        known = [version - 1 if read is None else read, *(d["read"] for d in docs if isinstance(d.get("read"), int))]
        restore = dict(info.get("operationParameters") or {}) if operation == "RESTORE" else None
        return cls(version, min(known), note, docs, restore, operation)

    def has_ledger(self, group: str) -> bool:
        """Whether it wrote the ledger of a group."""
        return any(doc["group"] == group and "ledger" in doc for doc in self.docs)

    def ledger(self, group: str) -> Ledger | None:
        """The ledger in its note.

        Raises:
            LedgerConflict: it is damaged or of a newer release.
        """
        for doc in self.docs:
            if doc["group"] == group and "ledger" in doc:
                return Ledger.from_json(group, json.dumps(doc["ledger"]), table_version=self.version)
        return None

    def batch(self, group: str) -> list[StreamOffset]:
        """What a batch had of a group."""
        return [parse(doc) for doc in self.docs if doc["group"] == group and "ledger" not in doc]


class Aged(Exception):
    """A group wrote to the table, and the table's log does not go back to its last commit.

    ``number`` is the number of that commit, or None where only Delta knows it.
    """

    def __init__(self, group: str, number: int | None) -> None:
        super().__init__(group)
        self.group, self.number = group, number


class CommitSource(Protocol):
    """Where the commits of one table are read."""

    table: str

    def newest(self) -> int:
        """The newest version; -1 if there is no table."""

    def commits(self, newest: int, after: int) -> Iterator[Commit]:
        """The commits from version ``newest`` down to ``after + 1``, as far as the log has them."""

    def number(self, app_id: str) -> int | None:
        """The newest ``SetTransaction`` of an application; -1 if there is none, None where this source cannot tell."""

    def restored_to(self, restore: Commit) -> int:
        """The version that a ``RESTORE`` went back to. Raises LedgerConflict if that cannot be found out."""


class TableHistory:
    """A version of a table and the commits up to it."""

    def __init__(self, source: CommitSource, version: int | None = None) -> None:
        self.source = source
        self.version = source.newest() if version is None else version

    @property
    def table(self) -> str:
        return self.source.table

    def at(self, version: int) -> "TableHistory":
        """An earlier version of the same table."""
        return TableHistory(self.source, version)

    def commits(self, *, after: int = -1) -> Iterator[Commit]:
        """The commits newer than version ``after``, newest first, as far as the log has them."""
        return self.source.commits(self.version, after)

    def groups(self) -> list[str]:
        """The groups that have a ledger in the log, sorted."""
        return sorted({str(doc["group"]) for commit in self.commits() for doc in commit.docs if "ledger" in doc})

    def ledger(self, group: str, known: Ledger | None = None) -> Ledger | None:
        """The newest ledger of a group, whatever was restored since; None if the group never wrote to the table.

        Args:
            known: a ledger from an earlier version, so that only newer commits are read.

        Raises:
            Aged: the group wrote, and the log does not go back to its last commit.
            LedgerConflict: the ledger is damaged or of a newer release.
        """
        number = self.source.number(APP_PREFIX + group)
        if number == -1:
            return None
        after = -1 if known is None else known.table_version
        least = self.version + 1
        for commit in self.commits(after=after):
            least = commit.version
            if (found := commit.ledger(group)) is not None:
                return found
        if known is not None and least == after + 1:
            return known
        if least == 0:
            return None
        raise Aged(group, number)


class LogFiles:
    """The commits of a table whose log ``deltalake`` can open.

    ``opened`` is the state by which ``deltalake`` judges whether a commit lost a race, so one batch at a time uses it.
    """

    def __init__(
        self, table: str, location: str, opened: "DeltaTable", storage_options: Mapping[str, str] | None = None
    ) -> None:
        from deltalake.fs import DeltaStorageHandler
        from pyarrow.fs import PyFileSystem

        self.table, self.location, self.opened = table, location, opened
        self._options = dict(storage_options or {})
        self.files: Any = PyFileSystem(DeltaStorageHandler(opened.table_uri, self._options))

    def newest(self) -> int:
        self.opened.update_incremental()
        version = int(self.opened.version())
        # The log always has its newest commit. Without it the table was deleted, and perhaps created again.
        return version if self.actions(version) is not None else -1

    def commits(self, newest: int, after: int) -> Iterator[Commit]:
        for version in range(newest, after, -1):
            text = self.actions(version)
            if text is None:
                return
            yield Commit.of(version, _commit_info(text))

    def actions(self, version: int) -> bytes | None:
        """The commit file of a version, one action a line; None if the log does not have it any more."""
        try:
            with self.files.open_input_file(f"_delta_log/{version:020}.json") as file:
                return bytes(file.readall())
        except FileNotFoundError:
            return None

    def number(self, app_id: str) -> int | None:
        found = self.opened.transaction_version(app_id)
        return -1 if found is None else int(found)

    def restored_to(self, restore: Commit) -> int:
        if (given := _number(restore)) is not None:
            return given
        # A time was given: Delta records the local time of the session that ran RESTORE, without its zone. The version
        # it chose has the files that the table has after the RESTORE, and so does each other version with these files.
        wanted = self._content(restore.version)
        try:
            for earlier in range(restore.version - 1, -1, -1):
                if self._content(earlier) == wanted:
                    return earlier
        except Exception as exc:
            raise _unknown_restore(self.table, restore.version) from exc
        raise _unknown_restore(self.table, restore.version)

    def _content(self, version: int) -> set[tuple[object, ...]]:
        import pyarrow as pa
        from deltalake import DeltaTable

        table = DeltaTable(self.opened.table_uri, version=version, storage_options=self._options or None)

        actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
        return {
            (action["path"], *(str(value) for key, value in sorted(action.items()) if "deletion" in key.lower()))
            for action in actions
        }


class DescribedHistory:
    """The commits of a table as ``DESCRIBE HISTORY`` shows them, in any session that has Delta."""

    def __init__(self, spark: "SparkSession", table: str) -> None:
        self._spark, self.table = spark, table
        self._seen: list[Commit] = []

    def newest(self) -> int:
        try:
            self._seen = self._load(LOOK_COMMITS[0])
        except PySparkException as exc:
            if exc.getCondition() in NOT_A_TABLE:
                return -1
            raise
        return self._seen[0].version

    def commits(self, newest: int, after: int) -> Iterator[Commit]:
        least = newest + 1
        limits: list[int | None] = [len(self._seen), *LOOK_COMMITS, None]
        for limit in limits:
            if limit is None or limit > len(self._seen):
                self._seen = self._load(limit)
            for commit in self._seen:
                if after < commit.version < least:
                    yield commit
                    least = commit.version
            if least <= after + 1 or (limit is not None and len(self._seen) < limit):
                return

    def number(self, app_id: str) -> int | None:
        del app_id
        return None

    def restored_to(self, restore: Commit) -> int:
        if (given := _number(restore)) is None:
            raise _unknown_restore(self.table, restore.version)
        return given

    def _load(self, limit: int | None) -> list[Commit]:
        last = "" if limit is None else f" LIMIT {limit}"
        history: DataFrame = self._spark.sql(f"DESCRIBE HISTORY {table_names.sql_name(self.table)}{last}")
        wanted = ("version", "operation", "operationParameters", "readVersion")
        note = "CASE WHEN contains(userMetadata, '\"group\"') THEN userMetadata END AS userMetadata"
        rows = history.selectExpr(*wanted, note).collect()
        found = [row.asDict() for row in rows]
        return [Commit.of(row["version"], row) for row in sorted(found, key=lambda row: -row["version"])]


def _commit_info(text: bytes) -> dict[str, Any]:
    for line in text.splitlines():
        if line.startswith(b'{"commitInfo"'):
            found: dict[str, Any] = json.loads(line)["commitInfo"]
            return found
    return {}


def _number(restore: Commit) -> int | None:
    text = str((restore.restore or {}).get("version")).strip('"')
    return int(text) if text.isdecimal() else None


def _unknown_restore(table: str, version: int) -> LedgerConflict:
    return LedgerConflict(
        f"version {version} of table {table} is a RESTORE to a time, and which version that is cannot be found out. "
        "Nothing was written. Run the RESTORE again with the version: `RESTORE TABLE "
        f"{table_names.sql_name(table)} TO VERSION AS OF` the version that you mean (DESCRIBE HISTORY lists them)",
        table=table,
        restored=version,
    )
