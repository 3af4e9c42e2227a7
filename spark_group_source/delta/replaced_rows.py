"""A commit that replaced rows of the table: find it, refuse the next batch, and compute the ledger that fits the rows.

Runs in: the user's driver, the command line. Deliberately absent: reading the table's log (:mod:`table_history`), and
setting a ledger (:mod:`ledger_store`).

``RESTORE``, ``REPLACE``, an overwrite and a clone into the table remove rows and leave the group's newest ledger as it
is, so a query that continued would leave a gap. A batch is refused until an operator moves Kafka's offsets and the
ledger to one position with ``spark-group reset``. After a ``RESTORE`` the ledger of the restored version fits the rows.
After the others, where the log lacks that version, and where the ledger moved back since then and may count rows that
the version lacks, no ledger is known to fit them, and none is guessed.

``DELETE``, ``UPDATE``, ``MERGE`` and ``TRUNCATE`` change rows on purpose; the ledger counts these rows as written.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from spark_group_source import command_line
from spark_group_source.delta import table_names
from spark_group_source.delta.ledger_decision import listed
from spark_group_source.delta.ledger_format import Ledger, first_offsets
from spark_group_source.delta.table_history import ROW_COMMANDS, Commit, LedgerExpired, TableHistory
from spark_group_source.errors import LedgerConflict
from spark_group_source.model import OffsetRange, TopicPartition

REMOVING = ROW_COMMANDS - {"UPDATE"}
"""Operations with which a user may remove rows that the ledger goes on counting."""


class RowsReplaced(LedgerConflict):
    """Rows of the group were removed, and which ledger fits the remaining ones is unknown."""


class Replacement(NamedTuple):
    """A commit that replaced rows, after which no reset has set the ledger of the group."""

    version: int
    """The version of the table that the commit made."""
    operation: str
    """The operation as Delta names it, such as ``RESTORE``."""
    restored_to: int | None = None
    """The version whose rows the table has since then; None if it is not known to have those of an earlier version."""
    concurrent_batch: int | None = None
    """The version of a batch that was decided before the commit and is behind it; None: there is none."""


def refuse_replaced_rows(
    history: TableHistory, ledger: Ledger, *, known: Ledger | None = None, scope: tuple[str, ...] = ()
) -> None:
    """Refuse a batch if a commit replaced rows that the ledger counts.

    Args:
        ledger: the group's newest ledger in the table's log.
        known: its ledger in an older version, up to which no such commit exists.
        scope: as in :class:`checkpoint.PlannedBatch`, for messages.

    Raises:
        LedgerConflict: other rows are in the table than the ledger counts; the message has the commands that settle it.
        LedgerExpired: the log does not reach back to the decision behind the group's newest ledger.
    """
    replacement = find_replacement(history, ledger.group, after=-1 if known is None else known.table_version)
    if replacement is None:
        return
    remaining = ledger_of_rows(history, ledger.group, replacement, scope)
    if remaining is not None and remaining.offsets != ledger.offsets:
        raise _other_rows_restored(history.table, ledger, remaining, replacement, scope)


def find_unsettled(history: TableHistory, ledger: Ledger) -> Replacement | None:
    """Find the commit because of which the next batch of a group is refused; None: there is none.

    Raises:
        LedgerExpired: the log does not reach back to the decision behind the group's newest ledger.
    """
    try:
        refuse_replaced_rows(history, ledger)
    except LedgerConflict:
        return find_replacement(history, ledger.group)
    return None


def find_replacement(history: TableHistory, group: str, *, after: int = -1) -> Replacement | None:
    """Find a commit that replaced rows after the decision behind the group's newest ledger.

    Args:
        after: only commits newer than this version are read.

    Raises:
        LedgerExpired: the log does not reach back to that decision.
    """
    decided_at, batch_version = -1, None  # of the group's newest commit, once it is found
    newest_content: Commit | None = None
    oldest_read = history.version + 1
    for commit in history.commits(after=after):
        if batch_version is not None and commit.version <= decided_at:
            return None
        oldest_read = commit.version
        if commit.sets_content and newest_content is None:
            newest_content = commit
        if commit.unsettles_ledger:
            if newest_content is not None:  # it may have brought back rows that this commit removed
                return Replacement(newest_content.version, newest_content.operation, None, batch_version)
            restored_to = history.source.restored_to(commit) if commit.operation == "RESTORE" else None
            return Replacement(commit.version, commit.operation, restored_to, batch_version)
        if batch_version is None and commit.ledger_entry(group) is not None:
            decided_at, batch_version = commit.read, commit.version
    if oldest_read > max(after, decided_at) + 1:
        raise LedgerExpired(group)
    return None


def ledger_of_rows(
    history: TableHistory, group: str, replacement: Replacement | None = None, scope: tuple[str, ...] = ()
) -> Ledger | None:
    """Compute the ledger that fits the rows of this version; if no rows were replaced it is the newest one.

    A partition that has no rows in a restored version gets the offset at which its first removed batch started.

    Args:
        replacement: the newest commit that replaced rows, where the caller has found it.
        scope: as in :func:`refuse_replaced_rows`.

    Returns:
        None if the group never wrote to the table.

    Raises:
        LedgerExpired: the log does not reach back to the group's last commit.
        RowsReplaced: the rows do not have to be those of an earlier version, or the log lacks the ledger of that
            version, or the ledger may not fit its rows: it moved back since then, other than after rows were
            replaced, because of a truncation, or over rows that the version may lack; or the group's first ledger was
            set by an operator.
        LedgerConflict: a batch was committed behind a ``RESTORE``, or the ledger cannot be read.
    """
    found = _find_ledger_of_rows(history, group, replacement)
    if isinstance(found, Replacement):
        raise _rows_replaced(history, group, found, scope)
    return found


def _find_ledger_of_rows(
    history: TableHistory, group: str, replacement: Replacement | None = None
) -> Ledger | Replacement | None:
    """Return what :func:`ledger_of_rows` does, or the replacement since which no ledger is known to fit the rows."""
    newest = history.ledger(group)
    replacement = replacement or (find_replacement(history, group) if newest is not None else None)
    if newest is None or replacement is None:
        return newest
    if replacement.restored_to is None:
        return replacement
    if replacement.concurrent_batch is not None:
        raise _batch_behind_restore(history.table, group, replacement)
    undone = _undone_by(history, group, replacement.version, replacement.restored_to)
    if undone is None:
        return replacement
    then = history.at(replacement.restored_to)
    try:
        # If all of the group's commits are undone, the log need not reach back further.
        restored = Ledger(group=group) if undone.is_all else _find_ledger_of_rows(then, group) or Ledger(group=group)
    except LedgerExpired:
        return replacement
    if isinstance(restored, Replacement):
        return restored
    lowest = undone.lowest | _moved_back(restored, undone.oldest, undone.lowest)
    moved = {tp: lowest[tp] for tp, n in restored.offsets.items() if n > lowest.get(tp, n)}
    if moved and not _has_rows_above(moved, then, group):
        return replacement
    return _with_rows_of(restored, newest, undone.starts).at_version(history.version)


class _Undone(NamedTuple):
    """The commits of a group that a ``RESTORE`` undid."""

    starts: dict[TopicPartition, int]
    """Where the rows start of each partition that was new in one of them."""
    lowest: dict[TopicPartition, int]
    """The lowest offset of each partition that moved back between two of them."""
    oldest: Ledger | None
    """The ledger of the oldest one; None if there is none, or if rows were replaced before it: it was set to these."""
    is_all: bool
    """Whether the group's first commit is among them."""


def _undone_by(history: TableHistory, group: str, restore: int, restored_to: int) -> _Undone | None:
    """Return the commits of a group that a ``RESTORE`` undid; None if the log lacks one, or the oldest is the group's
    first, by which an operator counted rows that the restored version lacks and that no commit of the group wrote."""
    starts: dict[TopicPartition, int] = {}
    lowest: dict[TopicPartition, int] = {}
    oldest_read, oldest, is_all = restore, None, False
    operator_read = -1  # the version whose rows the oldest ledger fits, if an operator set it
    for commit in history.at(restore - 1).commits(after=restored_to):  # newest first
        oldest_read = commit.version
        if commit.unsettles_ledger:
            oldest = None
        if (entry := commit.ledger_entry(group)) is not None:
            ledger = Ledger.from_json(group, entry["ledger"], table=history.table, table_version=commit.version)
            new = first_offsets(entry["ledger"])
            starts = new | starts  # an older one is of a former topic of that name
            is_all = ledger.number == 1
            operator_read = commit.read if "reason" in entry and any(new.values()) else -1  # one at 0 counts no rows
            lowest |= _moved_back(ledger, oldest, lowest)
            oldest = ledger
    if oldest_read > restored_to + 1 or (is_all and restored_to < operator_read):
        return None
    return _Undone(starts, lowest, oldest, is_all)


def _with_rows_of(restored: Ledger, newest: Ledger, starts: Mapping[TopicPartition, int]) -> Ledger:
    """Return the newest ledger with the offsets of a restored version, and where the rows start of partitions that are
    new since then."""
    same_topics = {
        name: topic.id
        for name, topic in restored.topics.items()
        if (newest.topics[name].is_same(topic.id) if name in newest.topics else topic.id not in newest.former)
    }
    offsets = {tp: starts.get(tp, n) for tp, n in newest.offsets.items()} | {
        tp: n for tp, n in restored.offsets.items() if tp.topic in same_topics
    }
    recreated = {topic.id: topic for name, topic in restored.topics.items() if name not in same_topics}
    ledger = replace(newest, former={**restored.former, **recreated}).with_offsets(offsets, same_topics)
    topics = []
    for name in same_topics:
        changed = dict(ledger.topics[name].partitions)
        for p, rows in changed.items():  # the rows behind the ledger are there again
            then = restored.topics[name].partition(p)
            changed[p] = replace(rows, ahead=then.ahead, later=then.later)
        topics.append(ledger.topics[name].with_partitions(changed))
    return ledger.with_topics(topics, present=True)


def _moved_back(
    ledger: Ledger, next_ledger: Ledger | None, lowest: Mapping[TopicPartition, int]
) -> dict[TopicPartition, int]:
    """Return the partitions of which the next ledger of the group moved back, with the lowest offset of that and known
    moves. Rows of a restored version above that offset may have been removed by ``DELETE`` before, or are of records
    that a truncation removed; where its batch began is not known, so it moves to -1."""
    if next_ledger is None:
        return {}
    found = {}
    for name, topic in ledger.topics.items():
        later = next_ledger.topic(name, topic.id)
        for p, n in topic.offsets.items():
            rows = later.partition(p)
            to = -1 if rows.epoch > topic.partitions[p].epoch else n if rows.offset is None else rows.offset
            if to < n:
                found[TopicPartition(name, p)] = min(to, lowest.get(TopicPartition(name, p), to))
    return found


def _has_rows_above(offsets: Mapping[TopicPartition, int], history: TableHistory, group: str) -> bool:
    """Return whether a version is known to have all rows above these offsets that its ledger counts: since the ledger
    was there, no commit has removed rows, and no operator has moved it forward. An offset of -1 is before a truncation,
    and the ledger never was there."""
    set_to: dict[TopicPartition, int] = {}  # by the next commit of the group, if it is an operator's
    for commit in history.commits():
        if (ledger := commit.ledger(group, history.table)) is not None:
            at = {tp: ledger.offsets.get(tp, 0) for tp in offsets}
            if any(n < set_to.get(tp, n) for tp, n in at.items()):
                return False
            if all(n <= offsets[tp] for tp, n in at.items()):
                return True
            set_to = at if "reason" in (commit.ledger_entry(group) or ()) else {}
            if ledger.number == 1:
                return min(offsets.values()) >= 0 and not set_to
        elif commit.unsettles_ledger or (commit.operation in REMOVING and not commit.entries):
            return False
    return False


def _other_rows_restored(
    table: str, ledger: Ledger, remaining: Ledger, restore: Replacement, scope: tuple[str, ...]
) -> LedgerConflict:
    """The error for a ``RESTORE`` whose rows have a known ledger, which is not the group's newest one."""
    partitions = sorted(remaining.offsets.keys() | ledger.offsets.keys())
    ends = {tp: (remaining.offsets.get(tp, 0), ledger.offsets.get(tp, 0)) for tp in partitions}
    missing = [OffsetRange(tp, rows, counted) for tp, (rows, counted) in ends.items() if rows < counted]
    returned = [OffsetRange(tp, counted, rows) for tp, (rows, counted) in ends.items() if counted < rows]
    did, would, ways = list[str](), list[str](), dict[str, tuple[str, ...]]()
    if missing:
        did.append(f"removed rows of group {ledger.group!r}: {listed(missing)}")
        would.append("leave a gap")
        ways = {"write the missing records again": ("--to-ledger",), "leave them out": ("--to-further", *scope)}
    if returned:
        did.append(f"brought back rows of group {ledger.group!r}: {listed(returned)}")
        would.append("write records a second time")
        ways = ways or {"continue behind these rows": ("--to-ledger",)}
    run = "this command" if len(ways) == 1 else "one of these commands"
    return LedgerConflict(
        f"table {table} was restored to version {restore.restored_to} (by its version {restore.version}), which "
        f"{' and '.join(did)}. The next batch could {' and '.join(would)}, so nothing was written. Stop the query, run "
        f"{run}, and start the query with the same checkpoint; the refused batch is void then:"
        + command_line.alternatives(
            {purpose: table_names.reset_command(ledger.group, table, *to) for purpose, to in ways.items()}
        ),
        table=table,
        group=ledger.group,
        missing=[(r.tp.topic, r.tp.partition, r.start, r.end) for r in missing],
    )


def _rows_replaced(history: TableHistory, group: str, replacement: Replacement, scope: tuple[str, ...]) -> RowsReplaced:
    table, commands = history.table, {}
    if (before := _version_before(history, group, replacement)) is not None:
        undo = (table_names.restore_command(table, before), table_names.reset_command(group, table, "--to-ledger"))
        commands["take the table back to the version before, and the group to the end of its rows"] = "\n    ".join(
            undo
        )
    commands["keep the rows as they are, and continue behind the removed ones"] = table_names.reset_command(
        group, table, "--to-further", *scope
    )
    return RowsReplaced(
        f"version {replacement.version} of table {table} ({replacement.operation}) removed rows after the last commit "
        f"of group {group!r}, and which of its records are left is unknown. The next batch could leave a gap, so "
        "nothing was written. Stop the query, run the commands of one of these lines, and start the query with the "
        "same checkpoint:" + command_line.alternatives(commands),
        table=table,
        group=group,
        replaced=replacement.version,
    )


def _version_before(history: TableHistory, group: str, replacement: Replacement) -> int | None:
    """The newest version before a replacement, and before all those in a row, whose ledger is known to fit its rows."""
    before = replacement.version - 1
    while before >= 0:
        try:
            found = _find_ledger_of_rows(history.at(before), group)
        except (LedgerConflict, LedgerExpired):
            return None
        if not isinstance(found, Replacement):
            return before
        before = found.version - 1
    return None


def _batch_behind_restore(table: str, group: str, restore: Replacement) -> LedgerConflict:
    return LedgerConflict(
        f"table {table} was restored to version {restore.restored_to} (by its version {restore.version}) while a batch "
        f"of group {group!r} was being written: the batch is version {restore.concurrent_batch}. Its rows are in the "
        "table; rows before them may be missing, and rows that the RESTORE brought back may be there twice. Stop the "
        "queries that write the table, restore it without the batch, move the group back, and start the queries with "
        "the same checkpoints:"
        + command_line.sequence(
            (
                table_names.restore_command(table, restore.version),
                table_names.reset_command(group, table, "--to-ledger"),
            )
        ),
        table=table,
        group=group,
        restored=restore.version,
        batch=restore.concurrent_batch,
    )
