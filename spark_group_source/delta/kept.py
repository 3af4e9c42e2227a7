"""Reading and setting the ledgers that a table keeps.

Runs in: the user's driver, the command line. Deliberately absent: what a ledger means (:mod:`ledger`), Kafka.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from spark_group_source.delta import deltalog, history
from spark_group_source.delta.ledger import DOMAIN_PREFIX, VERSION, Ledger, LedgerDamaged, shown
from spark_group_source.errors import LedgerConflict, OptionError
from spark_group_source.model import OffsetRange, TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)


def read_ledger(spark: "SparkSession", table: str, group: str) -> Ledger | None:
    """The ledger of one group in a table (a path or a table name), or None if the group never wrote there.

    Of a table that was restored it is where the rows are now, not what the domain says.

    Raises:
        OptionError: there is no such Delta table, or this session has no Delta classes (Spark Connect).
        LedgerConflict: the ledger is damaged or of a newer release.
    """
    return standing(spark, deltalog.open_table(spark, table).snapshot(), group)


def ledgers(spark: "SparkSession", table: str) -> list[Ledger]:
    """The ledgers of all groups that ever wrote to a table, sorted by group. Errors as in :func:`read_ledger`."""
    snapshot = deltalog.open_table(spark, table).snapshot()
    groups = sorted(d.removeprefix(DOMAIN_PREFIX) for d in snapshot.domains() if d.startswith(DOMAIN_PREFIX))
    return [found for found in (standing(spark, snapshot, group) for group in groups) if found is not None]


def set_ledger(
    spark: "SparkSession",
    table: str,
    group: str,
    offsets: Mapping[TopicPartition, int | None],
    *,
    reason: str,
    topic_ids: Mapping[str, str] | None = None,
    epoch: int | None = None,
    deleted: Iterable[str] = (),
) -> Ledger:
    """Put the ledger of a group where an operator wants it, in one Delta commit that holds nothing else.

    Unlike a batch this may move it backwards, so only a stopped group's ledger should be set. A damaged ledger is
    written anew and then holds nothing but what is given here.

    Args:
        offsets: the next offset of each partition to set, or None to forget the partition; others stay as they are.
        reason: who asked for it and why; kept in the commit's ``userMetadata``.
        topic_ids: the topics' ids, where known; they are needed only for topics that the ledger has not seen.
        epoch: number of the reset that this is a part of: batches of before it are void from now on. None: it is part
            of no reset, and nothing becomes void.
        deleted: topics that do not exist any more. With a reset their entries go: no plan that has them is valid after
            it. The ids stay, and a batch that reads one of them all the same is refused.

    Raises:
        OptionError: there is no such Delta table, or this session has no Delta classes (Spark Connect); or the table
            knows of a newer reset.
        LedgerConflict: the ledger is of a newer release, or other writers won every one of the bounded attempts.
    """
    handle = deltalog.open_table(spark, table)
    handle.ensure_domains()

    def attempt() -> Ledger:
        txn = handle.begin()
        old = _readable(spark, txn.snapshot, group) or Ledger(group=group)
        now = old.epoch if epoch is None else epoch
        if now < old.epoch:
            raise OptionError(
                f"table {table} knows of reset {old.epoch} of group {group!r} already, so reset {now} comes too late. "
                "Nothing was written; run the reset again",
                table=table,
                group=group,
            )
        kept = {**old.offsets, **{tp: n for tp, n in offsets.items() if n is not None}}
        ids = {**old.topic_ids, **(topic_ids or {})}
        new = Ledger(
            group=group,
            offsets={tp: n for tp, n in kept.items() if offsets.get(tp, n) is not None},
            topic_ids=ids,
            former=old.former if now == old.epoch else {},
            retired=tuple(id_ for id_ in old.retired if id_ not in ids.values()),
            epoch=now,
            void=old.void if now == old.epoch else {},
        )
        if now > old.epoch:
            new = new.retire(deleted)
        text = new.to_json()
        note = {"group": group, "ledger": json.loads(text), "reason": reason, "v": VERSION}
        version = txn.commit_domains({DOMAIN_PREFIX + group: text}, user_metadata=json.dumps(note, sort_keys=True))
        return Ledger.from_json(group, text, table_version=version)

    return deltalog.retry_races(attempt, what=f"setting the ledger of group {group!r} in table {table}")


def in_snapshot(snapshot: deltalog.Snapshot, group: str) -> Ledger | None:
    """The ledger of a group in a version of the table, or None. Errors as in :func:`read_ledger`."""
    text = snapshot.domains().get(DOMAIN_PREFIX + group)
    return None if text is None else Ledger.from_json(group, text, table_version=snapshot.version)


class Restored(NamedTuple):
    """A ``RESTORE`` that nobody settled: it made ``version`` of the table, and went back to ``to``. ``batch`` is the
    version of a batch that was on its way then and came after it."""

    version: int
    to: int
    batch: int | None = None


def restored(spark: "SparkSession", snapshot: deltalog.Snapshot, group: str, *, after: int = -1) -> Restored | None:
    """Whether the table was restored since a group's ledger was written, looking at the commits after a version."""
    inside: tuple[int, int] | None = None
    for commit in history.commits(spark, snapshot, after=after):
        if inside is not None and commit.version <= inside[0]:
            return None
        if commit.restored_to is not None:
            return Restored(commit.version, commit.restored_to, None if inside is None else inside[1])
        if inside is None and commit.has_ledger(group):
            inside = commit.read, commit.version
    return None


def standing(
    spark: "SparkSession", snapshot: deltalog.Snapshot, group: str, found: Restored | None = None
) -> Ledger | None:
    """The ledger that fits the rows of a version of the table. Errors as in :func:`read_ledger`.

    Of a partition that the table had no rows of in the version it was restored to, it is where the first batch began
    that is gone.

    Args:
        found: the ``RESTORE``, where it is known.
    """
    now = in_snapshot(snapshot, group)
    found = found or (restored(spark, snapshot, group) if now is not None else None)
    if now is None or found is None:
        return now
    if found.batch is not None:
        raise _torn(snapshot, group, found)
    then = standing(spark, history.at(spark, snapshot, found.to), group) or Ledger(group=group)
    before = history.at(spark, snapshot, found.version - 1)
    offsets = dict.fromkeys(now.offsets, 0)
    for commit in history.commits(spark, before, after=found.to):
        for batch in commit.batch(group):
            offsets |= {tp: start for tp, (start, _) in batch.ranges.items() if tp in offsets}
    same = {topic for topic, id_ in then.topic_ids.items() if now.topic_ids.get(topic, id_) == id_}
    offsets |= {tp: at for tp, at in then.offsets.items() if tp.topic in same or tp.topic not in then.topic_ids}
    return replace(now, offsets=offsets, table_version=snapshot.version)


def refuse_restored(spark: "SparkSession", table: str, snapshot: deltalog.Snapshot, now: Ledger, *, after: int) -> None:
    """Refuse a batch while rows that the ledger stands for are gone by a ``RESTORE``.

    Args:
        now: the group's ledger, as the domain says.
        after: the version up to which that is known not to be.

    Raises:
        LedgerConflict: with what settles it.
    """
    found = restored(spark, snapshot, now.group, after=after)
    there = standing(spark, snapshot, now.group, found) if found is not None else now
    if found is None or there is None or there.offsets == now.offsets:
        return
    gone = [OffsetRange(tp, at, now.offsets[tp]) for tp, at in sorted(there.offsets.items()) if at < now.offsets[tp]]
    reset = f"`spark-group reset --group {now.group} "
    raise LedgerConflict(
        f"table {table} was restored to version {found.to} (this is its version {found.version}), and rows of group "
        f"{now.group!r} are gone with that: {shown(gone)}. Going on would leave them out, so nothing was written. Stop "
        f"the query. To read them again, go on where the table stands: {reset}--to-ledger --table {table}`; to leave "
        f"them out, go on where the query stands: {reset}--to-checkpoint C --table {table}`. Then start it again with "
        "the same checkpoint: this batch is void after either of them",
        table=table,
        group=now.group,
        gone=[(r.tp.topic, r.tp.partition, r.start, r.end) for r in gone],
    )


def _torn(snapshot: deltalog.Snapshot, group: str, found: Restored) -> LedgerConflict:
    table = snapshot.java.deltaLog().dataPath().toString()
    return LedgerConflict(
        f"table {table} was restored to version {found.to} (this is its version {found.version}) while a batch of "
        f"group {group!r} was on its way: that is version {found.batch}. The rows of the batch are there, those before "
        "them are gone. Stop the queries that write the table, and restore it without the batch: `RESTORE TABLE "
        f"{deltalog.sql_name(table)} TO VERSION AS OF {found.version}`. Then read all of them again: `spark-group "
        f"reset --group {group} --to-ledger --table {table}`, and start the queries with the checkpoints they have",
        table=table,
        group=group,
        restored=found.version,
        batch=found.batch,
    )


def _readable(spark: "SparkSession", snapshot: deltalog.Snapshot, group: str) -> Ledger | None:
    try:
        return standing(spark, snapshot, group)
    except LedgerDamaged as exc:
        log.warning("it is replaced: %s", exc)
        return None
