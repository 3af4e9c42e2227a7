"""What others did to a table: its versions and commits, through the classes of the Delta jar.

Runs in: the user's driver, the command line. Deliberately absent: what follows from it (:mod:`kept`, :mod:`sink`), the
rows, and sessions without these classes (:mod:`told`).

``RESTORE`` takes rows away, and leaves metadata domains and the numbers of applications as they are: the ledger then
still says what was once written. So the ledger of a table is that of its newest commit with one, unless a ``RESTORE``
came after it; then it is the one of the version that the table was restored to.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from spark_group_source.delta import deltalog, names
from spark_group_source.delta.entries import DOMAIN_PREFIX, Ledger
from spark_group_source.delta.notes import Commit

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COMMITS_MAX = 1000
"""How far back a look for a ``RESTORE`` goes, among commits without a ledger: one costs some milliseconds."""


class Aged(Exception):
    """A group wrote to the table, and its log has nothing of that any more.

    ``number``: of its last commit, or one that none is beyond; None, if not even that is known.
    """

    def __init__(self, group: str, number: int | None) -> None:
        super().__init__(group)
        self.group, self.number = group, number


class Commits(Protocol):
    """Those of a table."""

    def commits(self, *, after: int = -1) -> Iterator[Commit]:
        """Newest first, as long as the log has them; at most COMMITS_MAX."""


class Past(Commits, Protocol):
    """A version of a table and what came before it."""

    @property
    def table(self) -> str: ...

    @property
    def version(self) -> int:
        """-1: there is no table."""

    def at(self, version: int) -> "Past":
        """An earlier version of the same table."""

    def groups(self) -> list[str]:
        """Those that have a ledger, sorted."""

    def ledger(self, group: str) -> Ledger | None:
        """The newest ledger of a group, whatever was restored since.

        Raises:
            Aged: there was one.
            LedgerConflict: it is damaged or of a newer release.
        """


class Logged:
    """The past of a snapshot."""

    def __init__(self, spark: "SparkSession", table: str, snapshot: deltalog.Snapshot) -> None:
        self.table, self.snapshot, self._spark = table, snapshot, spark

    @property
    def version(self) -> int:
        return self.snapshot.version

    def at(self, version: int) -> "Logged":
        jvm: Any = self._spark._jvm
        none = jvm.scala.Option.empty()
        java = self.snapshot.java.deltaLog().getSnapshotAt(version, none, none, False)
        return Logged(self._spark, self.table, deltalog.Snapshot(java))

    def groups(self) -> list[str]:
        found = {*self.snapshot.domains(), *self.snapshot.applications()}
        return sorted(name.removeprefix(DOMAIN_PREFIX) for name in found if name.startswith(DOMAIN_PREFIX))

    def ledger(self, group: str) -> Ledger | None:
        text = self.snapshot.domains().get(DOMAIN_PREFIX + group)
        found = None if text is None else Ledger.from_json(group, text, table_version=self.version)
        number, least = self.snapshot.recorded(DOMAIN_PREFIX + group), -1 if found is None else found.number
        forgotten = number < least or (found is None and names.RETENTION in self.snapshot.properties())
        if number <= least and not forgotten:
            return found
        # Somebody wrote it who cannot write domains, or did so and Delta has forgotten the number.
        from spark_group_source.delta.told import Told

        noted = Told(self._spark, self.table, version=self.version).noted(group)
        if noted is not None and noted.number >= max(number, least):
            return noted
        if number <= least:
            return found
        raise Aged(group, number)

    def commits(self, *, after: int = -1) -> Iterator[Commit]:
        jvm: Any = self._spark._jvm
        delta = jvm.org.apache.spark.sql.delta
        log = self.snapshot.java.deltaLog()
        files, conf = delta.util.DeltaCommitFileProvider.apply(self.snapshot.java), log.newDeltaHadoopConf()
        for version in range(self.version, max(after, self.version - COMMITS_MAX), -1):
            file = files.deltaFile(version)
            if not file.getFileSystem(conf).exists(file):
                return  # the log was cleaned up
            found = delta.DeltaHistoryManager.getCommitInfoOpt(log.store(), file, conf)
            yield self._commit(version, found.get()) if found.isDefined() else Commit(version, version - 1)

    def _commit(self, version: int, info: Any) -> Commit:
        operation, read, note = str(info.operation()), info.readVersion(), info.userMetadata()
        return Commit.of(
            version,
            int(read.get()) if read.isDefined() else None,
            operation,
            str(note.get()) if note.isDefined() else None,
            self._restored_to(info, version) if operation == "RESTORE" else None,
        )

    def _restored_to(self, info: Any, version: int) -> int:
        given = {name: info.operationParameters().get(name) for name in ("version", "timestamp")}
        values = {name: str(found.get()) for name, found in given.items() if found.isDefined()}
        table = names.sql_name(self.snapshot.java.deltaLog().dataPath().toString())
        return restored_to(lambda: self._spark.sql(f"DESCRIBE HISTORY {table} LIMIT {COMMITS_MAX}"), version, values)


def restored_to(history: "Callable[[], DataFrame]", version: int, given: Mapping[str, str]) -> int:
    """The version that a ``RESTORE`` went back to, which it was told by number or by time.

    Args:
        history: of the table; asked for only where the time counts, because that is a Spark job.
        version: what the ``RESTORE`` made.
        given: its parameters.
    """
    to = str(given.get("version")).strip('"')
    if to.isdecimal():
        return int(to)
    moment = str(given.get("timestamp")).strip('"')
    before = history().where(f"version < {version} AND timestamp <= timestamp'{moment}'")
    first: Any = before.selectExpr("coalesce(max(version), 0)").first()
    return int(first[0])
