"""What others did to a table: the commits of its log, newest first.

Runs in: the user's driver, the command line. Deliberately absent: what follows from it (:mod:`kept`, :mod:`sink`), and
the rows.

``RESTORE`` takes rows away, and leaves metadata domains as they are: the ledger then still says what was once written.
So the ledger of a table is that of its newest commit with one, unless a ``RESTORE`` came after it; then it is the one
of the version that the table was restored to.
"""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from spark_group_source.delta import deltalog
from spark_group_source.group.offsets import StreamOffset, parse

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HISTORY_STEPS = (1, 20, 1000)
"""How many of the table's last commits are searched for a batch, in turns: normally it is the very last."""

HISTORY_CHARS_MAX = 32_000_000
"""The commits of a search are all in memory at once, each with the offsets of its batch."""

COMMITS_MAX = 1000
"""How far back a look for a ``RESTORE`` goes, among commits without a ledger: one costs some milliseconds."""


def steps(note: str) -> list[int]:
    """How many commits to search for a batch with these offsets: those of other batches are about as long."""
    most = max(HISTORY_CHARS_MAX // max(len(note), 1), 1)
    return sorted({min(commits, most) for commits in HISTORY_STEPS})


def recorded(spark: "SparkSession", table: str, note: str) -> bool:
    """Whether one of the table's last commits has exactly this ``userMetadata``."""
    from pyspark.sql import functions as F

    for commits in steps(note):
        history: Any = spark.sql(f"DESCRIBE HISTORY {deltalog.sql_name(table)} LIMIT {commits}")
        # The notes stay where they are: one number comes back.
        found = history.agg(F.max(F.col("userMetadata") == note).alias("it"), F.count("*").alias("all")).first()
        if found[0]:
            return True
        if found[1] < commits:
            return False
    return False


class Commit(NamedTuple):
    """One commit.

    ``docs`` is what the writer of a ledger wrote beside it: the offsets of a batch, or why an operator set it; ``read``
    the version of the table that it knew; ``restored_to`` the version that a ``RESTORE`` went back to.
    """

    version: int
    read: int
    docs: tuple[dict[str, Any], ...] = ()
    restored_to: int | None = None

    def has_ledger(self, group: str) -> bool:
        """Whether it wrote the ledger of a group."""
        return any(doc.get("group") == group for doc in self.docs)

    def batch(self, group: str) -> list[StreamOffset]:
        """What a batch had of a group."""
        return [parse(doc) for doc in self.docs if doc.get("group") == group and "ledger" not in doc]


def at(spark: "SparkSession", snapshot: deltalog.Snapshot, version: int) -> deltalog.Snapshot:
    """An earlier version of the same table."""
    jvm: Any = spark._jvm
    none = jvm.scala.Option.empty()
    return deltalog.Snapshot(snapshot.java.deltaLog().getSnapshotAt(version, none, none, False))


def commits(spark: "SparkSession", snapshot: deltalog.Snapshot, *, after: int = -1) -> Iterator[Commit]:
    """The commits up to a version of the table, newest first, as long as the log has them; at most COMMITS_MAX."""
    jvm: Any = spark._jvm
    delta = jvm.org.apache.spark.sql.delta
    log = snapshot.java.deltaLog()
    files, conf = delta.util.DeltaCommitFileProvider.apply(snapshot.java), log.newDeltaHadoopConf()
    for version in range(snapshot.version, max(after, snapshot.version - COMMITS_MAX), -1):
        file = files.deltaFile(version)
        if not file.getFileSystem(conf).exists(file):
            return  # the log was cleaned up
        found = delta.DeltaHistoryManager.getCommitInfoOpt(log.store(), file, conf)
        yield _commit(spark, snapshot, version, found.get()) if found.isDefined() else Commit(version, version - 1)


def _commit(spark: "SparkSession", snapshot: deltalog.Snapshot, version: int, info: Any) -> Commit:
    operation, read, note = info.operation(), info.readVersion(), info.userMetadata()
    return Commit(
        version,
        int(read.get()) if read.isDefined() else version - 1,
        _docs(operation, str(note.get())) if note.isDefined() else (),
        _restored_to(spark, snapshot, info, version) if operation == "RESTORE" else None,
    )


def _docs(operation: str, note: str) -> tuple[dict[str, Any], ...]:
    """What a writer of a ledger noted; nothing, if it is somebody else's note, or of the tier without a ledger."""
    try:
        found = json.loads(note)
    except ValueError:
        return ()
    docs = [doc for doc in (found if isinstance(found, list) else [found]) if isinstance(doc, dict)]
    return tuple(doc for doc in docs if operation == "STREAMING UPDATE" or "ledger" in doc)


def _restored_to(spark: "SparkSession", snapshot: deltalog.Snapshot, info: Any, version: int) -> int:
    given = {name: info.operationParameters().get(name) for name in ("version", "timestamp")}
    values = {name: str(found.get()).strip('"') for name, found in given.items() if found.isDefined()}
    if values.get("version", "null").isdecimal():
        return int(values["version"])
    table = deltalog.sql_name(snapshot.java.deltaLog().dataPath().toString())
    history: Any = spark.sql(f"DESCRIBE HISTORY {table} LIMIT {COMMITS_MAX}")
    before = history.where(f"version < {version} AND timestamp <= timestamp'{values['timestamp']}'")
    return int(before.selectExpr("coalesce(max(version), 0)").first()[0])
