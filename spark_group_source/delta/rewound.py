"""Whether a table went back behind what a query wrote to it, as any Delta tells: by ``DESCRIBE HISTORY``.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``). Deliberately absent: the
ledger and Delta's classes (:mod:`kept` goes by these), and ``DELETE`` and the like, which take rows away on purpose.

A ``RESTORE`` leaves the numbers of the batches that Delta has recorded as they are: a query would go on behind rows
that are gone. Here nothing in the table can say that this was settled, so the stream whose rows they were writes no
more. One with another checkpoint is another stream, and goes on where the group stands in Kafka.
"""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from spark_group_source.delta import deltalog
from spark_group_source.delta.history import COMMITS_MAX, HISTORY_STEPS, Commit, steps
from spark_group_source.delta.ledger import shown
from spark_group_source.errors import LedgerConflict
from spark_group_source.group.offsets import StreamOffset
from spark_group_source.model import OffsetRange, TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_NOTES = '"stream"'
"""Stands in every note of a batch or a ledger."""


class Rewound(NamedTuple):
    """A ``RESTORE`` that made ``version`` of a table and took batches of a group away; ``starts``: where the first of
    them began, ``ends``: where the last one ended. ``batch``: the version of one that was on its way then, and came
    after it."""

    version: int
    to: int
    starts: Mapping[TopicPartition, int]
    ends: Mapping[TopicPartition, int]
    batch: int | None


def refuse(spark: "SparkSession", table: str, offsets: Sequence[StreamOffset], *, after: int) -> int:
    """Refuse a batch whose stream wrote rows that are gone by a ``RESTORE``, or whose table has fewer versions by now.

    Args:
        offsets: of the batch's sources.
        after: the version of the table up to which this was looked for, or -1.

    Returns:
        The newest version, up to which it is looked for now: among the last COMMITS_MAX commits.

    Raises:
        LedgerConflict: with what settles it.
    """
    newest, restored = _look(spark, table, after)
    if newest < after:
        raise deleted(table)
    if restored:
        most = steps(max((offset.to_json() for offset in offsets), key=len, default=""))[-1]
        commits = _commits(_history(spark, table, most))
        for offset in offsets:
            if (found := rewound(commits, offset)) is not None:
                raise _conflict(table, offset.group, found)
    return newest


def deleted(table: str) -> LedgerConflict:
    """The error for a table that a running query wrote to, and that is not there any more."""
    return LedgerConflict(
        f"table {table} was deleted while the query runs, with what it knew of the query. Nothing was written. Start "
        "the query again to create the table anew; it goes on at the group's position in Kafka",
        table=table,
    )


def rewound(commits: Sequence[Commit], offset: StreamOffset) -> Rewound | None:
    """What of a stream's group is gone, if something of the stream is.

    Args:
        commits: the last ones of a table, oldest first. What came before them is not judged.
        offset: of a batch of the stream. What an operator settled by a reset that it knows of does not count.
    """
    there: frozenset[int] = frozenset()  # the versions whose batches the table has
    at: dict[int, frozenset[int]] = {}
    wrote: dict[int, list[StreamOffset]] = {}
    restore: Commit | None = None
    for commit in commits:
        if any("ledger" in doc and doc["ledger"].get("epoch", 0) <= offset.epoch for doc in _of(commit, offset.group)):
            there, at, wrote, restore = frozenset(), {}, {}, None
        if commit.restored_to is not None:
            there, restore = at.get(commit.restored_to, frozenset()), commit
        elif batches := commit.batch(offset.group):
            wrote[commit.version] = batches
            there |= {commit.version}
        at[commit.version] = there
    gone = [version for version in wrote if version not in there]
    if restore is None or not any(batch.stream == offset.stream for version in gone for batch in wrote[version]):
        return None
    since = [commit for commit in commits if commit.version > restore.version and commit.version in there]
    torn = next((commit.version for commit in since if commit.read < restore.version), None)
    again = gone if torn is None else [*gone, *(commit.version for commit in since)]
    ranges = [r for version in again for batch in wrote[version] for r in batch.batch()]
    starts = {tp: min(r.start for r in ranges if r.tp == tp) for tp in sorted({r.tp for r in ranges})}
    lost = [r for version in gone for batch in wrote[version] for r in batch.batch()]
    ends = {tp: max(r.end for r in lost if r.tp == tp) for tp in sorted({r.tp for r in lost})}
    return Rewound(restore.version, restore.restored_to or 0, starts, ends, torn) if lost else None


def _of(commit: Commit, group: str) -> list[dict[str, Any]]:
    return [doc for doc in commit.docs if doc.get("group") == group]


# --- the history, as SQL tells it -----------------------------------------------------------------------------------


def _history(spark: "SparkSession", table: str, commits: int) -> "DataFrame":
    return spark.sql(f"DESCRIBE HISTORY {deltalog.sql_name(table)} LIMIT {commits}")


def _look(spark: "SparkSession", table: str, after: int) -> tuple[int, bool]:
    """The newest version, and whether one after ``after`` is a ``RESTORE``: three values come back, once as a rule."""
    newest, found = -1, False
    first = HISTORY_STEPS[0] + 1  # our own last commit, and one before it
    for commits in (first, *HISTORY_STEPS[1:]) if after >= 0 else (COMMITS_MAX,):
        row = (
            _history(spark, table, commits)
            .selectExpr("version", f"operation = 'RESTORE' AND version > {after} AS restore")
            .selectExpr("max(version)", "min(version)", "coalesce(max(restore), false)")
            .first()
        )
        assert row is not None and row[0] is not None, "a table has at least one version"
        newest, oldest, found = row
        if found or oldest <= after + 1:
            break
    return newest, found


def _commits(history: "DataFrame") -> list[Commit]:
    """Oldest first, with the notes of those that a sink or an operator of ours left."""
    wanted = ("version", "operation", "operationParameters AS given", "readVersion AS read")
    note = f"CASE WHEN contains(userMetadata, '{_NOTES}') THEN userMetadata END AS note"
    rows = sorted((row.asDict() for row in history.selectExpr(*wanted, note).collect()), key=lambda row: row["version"])
    return [
        Commit(
            row["version"],
            row["version"] - 1 if row["read"] is None else row["read"],
            _docs(row["note"]),
            _restored_to(history, row["version"], row["given"]) if row["operation"] == "RESTORE" else None,
        )
        for row in rows
    ]


def _docs(note: str | None) -> tuple[dict[str, Any], ...]:
    try:
        found = json.loads(note or "[]")
    except ValueError:
        return ()
    return tuple(doc for doc in (found if isinstance(found, list) else [found]) if isinstance(doc, dict))


def _restored_to(history: "DataFrame", version: int, given: Mapping[str, Any]) -> int:
    to = str(given.get("version")).strip('"')
    if to.isdecimal():
        return int(to)
    moment = str(given.get("timestamp")).strip('"')
    before = history.where(f"version < {version} AND timestamp <= timestamp'{moment}'")
    row = before.selectExpr("coalesce(max(version), 0)").first()
    return int(row[0]) if row is not None else 0


def _conflict(table: str, group: str, found: Rewound) -> LedgerConflict:
    gone = [OffsetRange(tp, found.starts[tp], end) for tp, end in found.ends.items()]
    to: dict[str, dict[str, int]] = {}
    for tp, at in found.starts.items():
        to.setdefault(tp.topic, {})[str(tp.partition)] = at
    without = (
        ""
        if found.batch is None
        else f" Version {found.batch} is a batch that was on its way then: its rows are there, those before them are "
        f"not. Restore the table without it: `RESTORE TABLE {deltalog.sql_name(table)} TO VERSION AS OF "
        f"{found.version}`."
    )
    return LedgerConflict(
        f"table {table} was restored to version {found.to} (this is its version {found.version}), and rows of group "
        f"{group!r} are gone with that: {shown(gone)}. Going on would leave them out, so nothing was written. Stop the "
        f"query.{without} To read them again: `spark-group reset --group {group} --to-offsets '{json.dumps(to)}'`; to "
        "leave them out, go on where the group stands in Kafka. Then start it again with a new checkpointLocation: "
        "without a ledger the table cannot tell that this was settled",
        table=table,
        group=group,
        gone=[(r.tp.topic, r.tp.partition, r.start, r.end) for r in gone],
    )
