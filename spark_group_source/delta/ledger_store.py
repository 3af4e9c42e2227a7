"""Reads and sets the ledgers of a table for an operator, and carries one to a clone of the table or to a group's new
name.

Runs in: the command line, the user's driver. Deliberately absent: what a ledger means for a batch
(:mod:`ledger_decision`), Kafka, and the comparison with the rows (:mod:`verification`).

``CLONE`` copies rows, and neither ``SetTransaction`` numbers nor notes. A ledger belongs to a group's name. Where the
group has no ledger, the sink takes all records for new, so those that the table has already would be written again.
:func:`check_new_group` finds such a table, and :func:`transfer_ledger` gives it a ledger. A table whose folder was
moved or renamed has its log with it, and so its ledgers.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from pyspark.errors import PySparkException

from spark_group_source import command_line
from spark_group_source.delta import table_names, table_writer
from spark_group_source.delta.ledger_format import Ledger, LedgerDamaged
from spark_group_source.delta.replaced_rows import RowsReplaced, ledger_of_rows
from spark_group_source.delta.table_history import INTERNAL_KEY, CommitRace, LedgerExpired, TableHistory
from spark_group_source.errors import GroupError, LedgerConflict, OptionError
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.offsets import StreamOffset

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)


def read_ledger(
    spark: "SparkSession", table: str, group: str, *, to_reset: bool = False, topics: Collection[str] | None = None
) -> Ledger | None:
    """Read the ledger of one group in a table; None if the group never wrote to it.

    After a ``RESTORE`` it is the ledger that fits the remaining rows.

    Args:
        table: a path or a table name.
        to_reset: whether a reset will replace it: then it is the newest one where none is known to fit the rows.
        topics: of the group's committed offsets, where they are known. If the ledger expired, the error names the
            position behind the rows of these topics.

    Raises:
        OptionError: there is no such Delta table.
        LedgerConflict: the ledger is damaged, a newer release wrote it, it expired with the table's log, or which
            ledger fits the rows is unknown.
    """
    with _opened(spark, table, group, topics) as writer:
        return (ledger_to_reset if to_reset else ledger_of_rows)(writer.history(), group)


@contextmanager
def _opened(
    spark: "SparkSession", table: str, group: str, topics: Collection[str] | None
) -> Iterator[table_writer.TableWriter]:
    """Open a table that must exist, and report where the ledger of the group has expired."""
    writer = table_writer.open_existing(spark, table)
    try:
        yield writer
    except LedgerExpired as exc:
        raise LedgerDamaged(
            f"the last commit of group {group!r} in table {table} is older than the table's log "
            "(delta.logRetentionDuration), so its ledger cannot be read. The group's next batch starts a new ledger at "
            f"the query's positions; {_new_ledger(writer, table, group, topics)}",
            table=table,
            group=group,
        ) from exc


def _new_ledger(writer: table_writer.TableWriter, table: str, group: str, topics: Collection[str] | None) -> str:
    """How to set a new ledger at once, after the old one expired."""
    if topics is not None and not topics:
        return "Kafka has no offsets of the group: to set both now, name its positions with reset --to-offsets"
    purposes: dict[str, tuple[str, ...]] = {"continue at the group's offsets in Kafka": ("--to-current",)}
    if topics and (ends := {tp: end for tp, end in (writer.row_ends() or {}).items() if tp.topic in topics}):
        purposes = {"continue behind the rows in the table": table_names.to_offsets(ends)} | purposes
    commands = {purpose: table_names.reset_command(group, table, *to) for purpose, to in purposes.items()}
    return "to set it now, run this command (or the same with another position of reset):" + command_line.alternatives(
        commands
    )


def counted_ledger(spark: "SparkSession", table: str, group: str, topics: Collection[str]) -> Ledger:
    """Read the newest ledger of one group, though rows that it counts may have been removed. A partition of which the
    rows reach further, as after a reset and a ``RESTORE``, gets that offset.

    Raises:
        OptionError, LedgerConflict: as :func:`require_ledger`.
    """
    with _opened(spark, table, group, topics) as writer:
        history = writer.history()
        newest = _require(history.ledger(group), table, group)
        try:
            ends = (ledger_of_rows(history, group) or newest).offsets
        except RowsReplaced:  # rows of a former topic, or of another group, cannot be distinguished
            former = {topic.name for topic in newest.former.values()}
            others = {name for other, topics in history.topics().items() if other != group for name in topics}
            found = writer.row_ends() or {}
            ends = {tp: n for tp, n in found.items() if tp in newest.offsets and tp.topic not in former | others}
    return newest.with_offsets({tp: n for tp, n in ends.items() if n > newest.offsets.get(tp, 0)})


def require_ledger(spark: "SparkSession", table: str, group: str, *, topics: Collection[str]) -> Ledger:
    """Read the ledger of one group as :func:`read_ledger`. Raises OptionError also if the group never wrote."""
    return _require(read_ledger(spark, table, group, topics=topics), table, group)


def _require(ledger: Ledger | None, table: str, group: str) -> Ledger:
    if ledger is None:
        raise OptionError(f"group {group!r} never wrote to table {table}, so the table has no ledger of it")
    return ledger


def ledger_to_reset(history: TableHistory, group: str) -> Ledger | None:
    """Return the ledger from which a reset starts: the one that fits the rows, or the newest where none is known to.

    Raises:
        LedgerExpired, LedgerConflict: as :func:`ledger_of_rows`, except for RowsReplaced.
    """
    try:
        return ledger_of_rows(history, group)
    except RowsReplaced:
        return history.ledger(group)


def read_ledgers(history: TableHistory, groups: Collection[str] | None = None) -> dict[str, Ledger | None]:
    """Read the ledgers of groups that wrote to a table; None for a ledger that expired with the table's log.

    Where none is known to fit the rows it is the newest one.

    Args:
        groups: only these; None: all of the log, and those of replays and dead letters (INTERNAL_KEY), which count no
            rows.

    Raises:
        LedgerConflict: one is damaged, a newer release wrote it, or a batch was committed behind a ``RESTORE``.
    """
    found: dict[str, Ledger | None] = {}
    keys = history.ledger_keys()
    for group in keys if groups is None else groups:
        if group not in keys:
            if history.number(group) not in (-1, None):
                found[group] = None  # all of its commits have left the log
            continue
        try:
            read = TableHistory.ledger if INTERNAL_KEY.fullmatch(group) else ledger_to_reset
            found[group] = read(history, group)
        except LedgerExpired:
            found[group] = None
    return found


def set_ledger(
    spark: "SparkSession",
    table: str,
    group: str,
    offsets: Mapping[TopicPartition, int],
    *,
    reason: str,
    reset_number: int,
    topic_ids: Mapping[str, str] = MappingProxyType({}),
    deleted: Iterable[str] = (),
    since: int | None = None,
) -> Ledger:
    """Set the ledger of a group, in one Delta commit without rows.

    Unlike a batch this may move the ledger backwards, so only set the ledger of a stopped group. A damaged ledger is
    replaced by one that holds only the given offsets.

    Args:
        offsets: the next offset of each partition to set; other partitions keep theirs.
        reason: what set the ledger; stored in the commit's note.
        reset_number: the number of the reset: batches that were planned before it are void.
        topic_ids: the ids of the topics, where known; needed for topics that the ledger does not have yet.
        deleted: topics that no longer exist. A batch that still reads one is compared with its former offsets.
        since: the version of the table from which the offsets were planned; None if they do not depend on its rows.

    Raises:
        OptionError: there is no such Delta table, it knows a newer reset, or its rows were replaced since then.
        LedgerConflict: a newer release wrote the ledger, or other writers won every attempt.
    """
    writer = table_writer.open_existing(spark, table)

    def attempt() -> Ledger:
        history = writer.history()
        if since is not None:
            _refuse_replacement_since(history, since)
        old = _replaced_ledger(writer, history, group)
        if reset_number < old.reset_number:
            raise OptionError(
                f"table {table} already knows reset #{old.reset_number} of group {group!r}, so reset #{reset_number} "
                "is too old. Nothing was written to the table",
                table=table,
                group=group,
            )
        ledger = old.after_reset(reset_number, offsets, topic_ids, deleted)
        return writer.commit_ledger(history, ledger, reason=reason, before=old)

    return table_writer.retry_races(attempt, what=f"setting the ledger of group {group!r} in table {table}")


def _refuse_replacement_since(history: TableHistory, since: int) -> None:
    """Refuse offsets that were planned from rows which the table may not have any more."""
    for commit in history.commits(after=since):
        if commit.unsettles_ledger:
            raise OptionError(
                f"table {history.table} was changed by {commit.operation} (its version {commit.version}) while the "
                "reset was running, so its ledger was not set, and the query's next batch is refused",
                table=history.table,
            )


def _replaced_ledger(writer: table_writer.TableWriter, history: TableHistory, group: str) -> Ledger:
    """Return the ledger that is about to be replaced; if it cannot be read, an empty one with its number."""
    try:
        return ledger_to_reset(history, group) or Ledger(group=group)
    except LedgerDamaged as exc:
        log.warning("group %s: the ledger in table %s is replaced: %s", group, writer.table, exc)
    except LedgerExpired:
        log.warning(
            "group %s: its last commit is older than the log of table %s; it gets a new ledger", group, writer.table
        )
    return writer.restarted_ledger(history, group)


# --- clones and renamed groups ----------------------------------------------------------------------------------------


class Clone(NamedTuple):
    """The newest ``CLONE`` in a table's log."""

    source: str
    """The table that was cloned."""
    version: int
    """The version of the source whose rows the clone has."""
    made: int
    """The version of the clone that the ``CLONE`` made."""


def find_clone(history: TableHistory) -> Clone | None:
    """Return the newest ``CLONE`` in a table's log; None if there is none."""
    for commit in history.commits():
        if commit.operation == "CLONE":
            source, version = (str(commit.parameters.get(name)).strip('"') for name in ("source", "sourceVersion"))
            return Clone(table_names.canonical(source), int(version), commit.version) if version.isdecimal() else None
    return None


def check_new_group(
    spark: "SparkSession", history: TableHistory, batch: StreamOffset, ways: Callable[[], Mapping[str, str]]
) -> None:
    """Check the first batch of a group in a table, which has no ledger of it.

    Args:
        ways: returns the commands by which the group can continue without a ledger of the table, by purpose.

    Raises:
        LedgerConflict: the table is a clone of one that has a ledger of the group, or another group's ledger counts
            records of the batch's topics and does not end where the batch starts: rows could be written twice.
    """
    table, group, clone = history.table, batch.group, find_clone(history)
    to_ledger, to_further = (table_names.reset_command(group, table, to) for to in ("--to-ledger", "--to-further"))
    offers: dict[str, str] = {}
    why = ""
    if clone is not None:
        of_source = f"table {table} is a clone of version {clone.version} of table {clone.source}"
        copy = table_names.ledger_command("copy", clone.source, table, "--group", group)
        try:
            source = table_writer.TableWriter(spark, clone.source)
            if not source.exists():
                raise FileNotFoundError("there is no such table")
            cloned = source.history().at(clone.version)
            if ledger_of_rows(cloned, group) is not None:
                why = f"{of_source}, which has a ledger of group {group!r}, and the clone has none: CLONE copies none"
                offers["continue where the clone's rows end"] = f"{copy}\n    {to_ledger}"
                offers["leave out the records in between"] = f"{copy}\n    {to_further}"
            elif _was_cloned_from_ledger(spark, cloned, group):
                why = f"{of_source}, which is a clone, too, so records that the clone lacks are unknown"
                offers = dict(ways())
            else:
                why, offers = _renamed(cloned, table, batch, clone.source)
        except (GroupError, LedgerExpired, OSError, PySparkException) as exc:
            reason = str(exc).partition("\n")[0] or type(exc).__name__
            why = f"{of_source}, whose ledgers cannot be read, so records that the clone lacks are unknown: {reason}"
            offers = dict(ways())
    if not why:
        why, offers = _renamed(history, table, batch)
    if not why:
        return
    if clone is None or len(offers) == 1:
        offers |= ways()
    raise LedgerConflict(
        f"{why}. Which records of the batch the table has is not recorded there, so nothing was written. Stop the "
        "query, run the commands of one of these lines, and start the query with the same checkpoint:"
        + command_line.alternatives(offers),
        table=table,
        group=group,
    )


def _was_cloned_from_ledger(spark: "SparkSession", history: TableHistory, group: str) -> bool:
    """Return whether a table from which this one was cloned, directly or not, has a ledger of the group."""
    while (clone := find_clone(history)) is not None:
        source = table_writer.TableWriter(spark, clone.source)
        if not source.exists():
            raise FileNotFoundError(f"there is no table {clone.source}")
        history = source.history().at(clone.version)
        if ledger_of_rows(history, group) is not None:
            return True
    return False


def _renamed(
    history: TableHistory, table: str, batch: StreamOffset, source: str | None = None
) -> tuple[str, dict[str, str]]:
    """Return which other group has a ledger of the batch's topics, and the commands that give it to the batch's group.
    A group whose ledger ends where the batch starts is left out: no record is written twice, and none is missing.

    Args:
        source: the cloned table, if the history is that of one.
    """
    offers: dict[str, str] = {}
    group, named = batch.group, list[str]()
    for other, topics in sorted(history.topics().items()):
        if other == group or topics.isdisjoint(tp.topic for tp in batch.ranges):
            continue
        try:
            ledger = ledger_of_rows(history, other)
        except (LedgerConflict, LedgerExpired):  # the commands report it
            ledger = None
        if ledger is not None:
            ends = ((ledger.offset_of(tp, batch.topic_ids.get(tp.topic, "")), r[0]) for tp, r in batch.ranges.items())
            if all(end in (None, start) for end, start in ends):
                continue
        commands = [table_names.ledger_command("rename", table, "--group", other, "--to", group)]
        if source is not None:
            commands.insert(0, table_names.ledger_command("copy", source, table, "--group", other))
        commands.append(table_names.reset_command(group, table, "--to-ledger"))
        offers[f"continue where the rows of group {other} end, if that is its former name"] = "\n    ".join(commands)
        named.append(other)
    if not named:
        return "", {}
    where = f"table {table}" if source is None else f"table {table} is a clone of table {source}, which"
    return f"{where} has no ledger of group {group!r}, and has one of group {named[0]} with the same topics", offers


def transfer_ledger(
    spark: "SparkSession",
    source: str,
    former_group: str,
    table: str,
    group: str,
    *,
    version: int | None = None,
    decided_at: int | None = None,
    execute: bool,
) -> Ledger:
    """Return the ledger of a group that a table gets from another table or another group, and set it with ``execute``.

    Batches that were planned before are void, like after a reset: their positions do not have to fit this ledger.

    Args:
        version: the version of the source whose rows the table has; None: the newest one.
        decided_at: the version of the table that has these rows; None: the newest one. If rows were replaced since, the
            next batch is refused.

    Raises:
        OptionError: there is no such table or ledger, or the table has another ledger of the group already.
        LedgerConflict: the ledger cannot be read.
    """
    origin = table_writer.open_existing(spark, source).history()
    try:
        found = ledger_of_rows(origin if version is None else origin.at(version), former_group)
    except LedgerExpired:
        raise OptionError(
            f"the log of table {source} does not reach back to the last commit of group {former_group!r} in version "
            f"{origin.version if version is None else version}, so its ledger cannot be copied. Set one "
            "at a position that fits the rows, with reset and --table"
        ) from None
    if found is None:
        raise OptionError(f"group {former_group!r} never wrote to table {source}, so there is no ledger to carry over")
    ledger = replace(found, group=group, number=0).after_reset(found.reset_number + 1, {})
    writer = table_writer.open_existing(spark, table)

    def attempt() -> Ledger:
        history = writer.history()
        taken = OptionError(
            f"table {table} has a ledger of group {group!r} already. Nothing was written; reset with --table moves it"
        )
        is_unknown = False
        try:
            present = history.ledger(group)
        except LedgerExpired:
            if history.number(group) is not None:
                raise taken from None
            present, is_unknown = None, True  # Delta refuses the first number below if there is a ledger
        if present is not None:
            if ledger.has_same_content(present):
                return present  # this command ran before
            raise taken
        what = f"the ledger of group {former_group} in table {source}"
        if not execute:
            return ledger
        try:
            return writer.commit_ledger(history, ledger, reason=f"copy of {what}", decided_at=decided_at)
        except CommitRace:
            if is_unknown:
                raise taken from None
            raise

    return table_writer.retry_races(attempt, what=f"setting the ledger of group {group!r} in table {table}")
