"""Reading and setting the ledgers that a table keeps.

Runs in: the user's driver, the command line. Deliberately absent: what a ledger means (:mod:`ledger`), Kafka.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from spark_group_source.delta import commit_race, table_names, table_writer
from spark_group_source.delta.ledger_decision import shown
from spark_group_source.delta.ledger_format import APP_PREFIX, Ledger, LedgerDamaged
from spark_group_source.delta.table_history import Aged, TableHistory
from spark_group_source.errors import LedgerConflict, OptionError
from spark_group_source.model import OffsetRange, TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)


def read_ledger(spark: "SparkSession", table: str, group: str) -> Ledger | None:
    """The ledger of one group in a table (a path or a table name), or None if the group never wrote there.

    Of a table that was restored it is where the rows are now, not what was written last.

    Raises:
        OptionError: there is no such Delta table.
        LedgerConflict: the ledger is damaged, of a newer release, or older than what the table's log keeps.
    """
    try:
        return standing(table_writer.existing(spark, table).history(), group)
    except Aged as exc:
        raise LedgerDamaged(
            f"group {group!r} wrote to table {table}, but its last commit is older than the table's log "
            "(delta.logRetentionDuration), so its ledger cannot be read. The next batch of the group begins a new "
            f"ledger where the query stands; to set it: `spark-group reset --group {group} --table {table}` with a "
            "position",
            table=table,
            group=group,
        ) from exc


def required_ledger(spark: "SparkSession", table: str, group: str) -> Ledger:
    """The same where there must be one.

    Raises:
        OptionError: the group never wrote there; and as :func:`read_ledger`.
        LedgerConflict: as :func:`read_ledger`.
    """
    found = read_ledger(spark, table, group)
    if found is None:
        raise OptionError(f"group {group!r} never wrote to {table}; the table has no ledger of it")
    return found


def ledgers(now: TableHistory) -> dict[str, Ledger | None]:
    """The ledgers of all groups that ever wrote to a table; None of one that the table's log does not go back to.

    Raises:
        LedgerConflict: one is damaged, of a newer release, or torn by a ``RESTORE``.
    """
    found: dict[str, Ledger | None] = {}
    for group in now.groups():
        try:
            found[group] = standing(now, group)
        except Aged:
            found[group] = None
    return found


def set_ledger(
    spark: "SparkSession",
    table: str,
    group: str,
    offsets: Mapping[TopicPartition, int],
    *,
    reason: str,
    epoch: int,
    topic_ids: Mapping[str, str] = MappingProxyType({}),
    deleted: Iterable[str] = (),
) -> Ledger:
    """Put the ledger of a group where an operator wants it, in one Delta commit that holds nothing else.

    Unlike a batch this may move it backwards, so only a stopped group's ledger should be set. A damaged ledger is
    written anew and then holds nothing but what is given here.

    Args:
        offsets: the next offset of each partition to set; others stay as they are.
        reason: who asked for it and why; kept in the commit's ``userMetadata``.
        epoch: number of the reset that this is a part of: batches of before it are void from now on.
        topic_ids: the topics' ids, where known; they are needed only for topics that the ledger has not seen.
        deleted: topics that do not exist any more. A batch that reads one of them all the same is compared with what
            the table has of it.

    Raises:
        OptionError: there is no such Delta table, or it knows of a newer reset.
        LedgerConflict: the ledger is of a newer release, or other writers won every one of the bounded attempts.
    """
    there = table_writer.existing(spark, table)

    def attempt() -> Ledger:
        history = there.history()
        old = _readable(there, history, group)
        if epoch < old.epoch:
            raise OptionError(
                f"table {table} knows of reset {old.epoch} of group {group!r} already, so reset {epoch} comes too "
                "late. Nothing was written; run the reset again",
                table=table,
                group=group,
            )
        return there.restate(history, old.after_reset(epoch, offsets, topic_ids, deleted).written(), reason)

    return commit_race.retry_races(attempt, what=f"setting the ledger of group {group!r} in table {table}")


class Restored(NamedTuple):
    """A ``RESTORE`` that nobody settled: it made ``version`` of the table, and went back to ``to``. ``batch`` is the
    version of a batch that was on its way then and came after it."""

    version: int
    to: int
    batch: int | None = None


def restored(now: TableHistory, group: str, *, after: int = -1) -> Restored | None:
    """Whether the table was restored since a group's ledger was written, looking at the commits after a version."""
    inside: tuple[int, int] | None = None
    for commit in now.commits(after=after):
        if inside is not None and commit.version <= inside[0]:
            return None
        if commit.restore is not None:
            return Restored(commit.version, now.source.restored_to(commit), None if inside is None else inside[1])
        if inside is None and commit.has_ledger(group):
            inside = commit.read, commit.version
    return None


def standing(there: TableHistory, group: str, found: Restored | None = None) -> Ledger | None:
    """The ledger that fits the rows of a version of the table. Errors as in :func:`read_ledger`, and Aged.

    Of a partition that the table had no rows of in the version it was restored to, it is where the first batch began
    that is gone.

    Args:
        found: the ``RESTORE``, where it is known.
    """
    now = there.ledger(group)
    found = found or (restored(there, group) if now is not None else None)
    if now is None or found is None:
        return now
    if found.batch is not None:
        raise _torn(there, group, found)
    then = standing(there.at(found.to), group) or Ledger(group=group)
    begun: dict[TopicPartition, int] = {}
    for commit in there.at(found.version - 1).commits(after=found.to):
        for batch in commit.batch(group):
            begun |= {tp: start for tp, (start, _) in batch.ranges.items()}
    same = {
        name: topic.id
        for name, topic in then.topics.items()
        if name not in now.topics or now.topics[name].is_same(topic.id)
    }
    offsets = {tp: begun.get(tp, 0) for tp in now.offsets} | {
        tp: n for tp, n in then.offsets.items() if tp.topic in same
    }
    others = {topic.id: topic for name, topic in then.topics.items() if name not in same}
    return replace(now, former={**then.former, **others}, table_version=there.version).moved(offsets, same)


def refuse_restored(history: TableHistory, now: Ledger, *, after: int) -> None:
    """Refuse a batch while rows that the ledger stands for are gone by a ``RESTORE``.

    Args:
        now: the group's ledger, as it was written last.
        after: the version up to which that is known not to be.

    Raises:
        LedgerConflict: with what settles it.
    """
    found, table = restored(history, now.group, after=after), history.table
    there = standing(history, now.group, found) if found is not None else now
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


def _torn(there: TableHistory, group: str, found: Restored) -> LedgerConflict:
    table = there.table
    return LedgerConflict(
        f"table {table} was restored to version {found.to} (this is its version {found.version}) while a batch of "
        f"group {group!r} was on its way: that is version {found.batch}. The rows of the batch are there, those before "
        "them are gone. Stop the queries that write the table, and restore it without the batch: `RESTORE TABLE "
        f"{table_names.sql_name(table)} TO VERSION AS OF {found.version}`. Then read all of them again: `spark-group "
        f"reset --group {group} --to-ledger --table {table}`, and start the queries with the checkpoints they have",
        table=table,
        group=group,
        restored=found.version,
        batch=found.batch,
    )


def _readable(there: table_writer.TableWriter, history: TableHistory, group: str) -> Ledger:
    """The ledger that an operator's takes the place of; an empty one with its number, if it cannot be read."""
    number = history.source.number(APP_PREFIX + group)
    try:
        found = history.ledger(group)
        return Ledger(group=group) if found is None else standing(history, group) or found
    except LedgerDamaged as exc:
        log.warning("group %s: %s; the ledger is replaced", group, exc)
    except Aged:
        log.warning(
            "group %s: its last commit is older than the log of table %s; it gets a new ledger", group, there.table
        )
    if number is None:
        counted = there.number_of(history, group)
        return counted if isinstance(counted, Ledger) else Ledger(group=group, number=counted)
    return Ledger(group=group, number=number)
