"""A ``RESTORE`` of the table: find it, refuse the next batch, and compute the ledger that fits the remaining rows.

Runs in: the user's driver, the command line. Deliberately absent: reading the table's log (:mod:`table_history`), and
setting a ledger (:mod:`ledger_store`).

``RESTORE`` removes rows and leaves the group's newest ledger as it is, so a query that continued would leave a gap. A
batch is refused until an operator moves Kafka's offsets and the ledger to one position with ``spark-group reset``.
"""

from dataclasses import replace
from typing import NamedTuple

from spark_group_source import command_line
from spark_group_source.delta import table_names
from spark_group_source.delta.ledger_decision import format_ranges
from spark_group_source.delta.ledger_format import Ledger, first_offsets
from spark_group_source.delta.table_history import TableHistory
from spark_group_source.errors import LedgerConflict
from spark_group_source.model import OffsetRange, TopicPartition


class Restore(NamedTuple):
    """A ``RESTORE`` after which no reset has set the ledger of the group."""

    version: int
    """The version of the table that the ``RESTORE`` made."""
    restored_to: int
    """The version whose rows the table has since then."""
    concurrent_batch: int | None = None
    """The version of a batch that was decided before the ``RESTORE`` and committed after it; None: there is none."""


def refuse_restored_table(history: TableHistory, ledger: Ledger, *, after: int, checkpoint: str, batch_id: int) -> None:
    """Refuse a batch if a ``RESTORE`` removed rows that the ledger counts.

    Args:
        ledger: the group's newest ledger in the table's log.
        after: only commits newer than this version are read: up to it no such ``RESTORE`` exists. -1 reads all.
        checkpoint, batch_id: the query's checkpoint and the refused batch, for the command that continues there.

    Raises:
        LedgerConflict: rows are missing; the message has the commands that settle it.
    """
    restore = find_restore(history, ledger.group, after=after)
    remaining = None if restore is None else ledger_of_rows(history, ledger.group, restore)
    if restore is None or remaining is None or remaining.offsets == ledger.offsets:
        return
    missing = [
        OffsetRange(tp, offset, ledger.offsets[tp])
        for tp, offset in sorted(remaining.offsets.items())
        if offset < ledger.offsets[tp]
    ]
    group, table = ledger.group, history.table
    here = ("--to-checkpoint", checkpoint, "--batch", str(batch_id))
    raise LedgerConflict(
        f"table {table} was restored to version {restore.restored_to} (by its version {restore.version}), which "
        f"removed rows of group {group!r}: {format_ranges(missing)}. The next batch would leave a gap, so nothing was "
        "written. Stop the query, run one of these commands, and start the query with the same checkpoint; the "
        "refused batch is void after either of them:"
        + command_line.alternatives(
            {
                "write the missing records again": table_names.reset_command(group, table, "--to-ledger"),
                "leave them out": table_names.reset_command(group, table, *here),
            }
        ),
        table=table,
        group=group,
        missing=[(r.tp.topic, r.tp.partition, r.start, r.end) for r in missing],
    )


def find_restore(history: TableHistory, group: str, *, after: int = -1) -> Restore | None:
    """Find a ``RESTORE`` that came after the decision behind the group's newest ledger.

    Args:
        after: only commits newer than this version are read.

    Raises:
        LedgerConflict: the version that the table was restored to cannot be determined.
    """
    decided_at, batch_version = -1, None  # of the group's newest commit, once it is found
    for commit in history.commits(after=after):
        if batch_version is not None and commit.version <= decided_at:
            return None
        if commit.restore is not None:
            return Restore(commit.version, history.source.restored_to(commit), batch_version)
        if batch_version is None and commit.ledger_entry(group) is not None:
            decided_at, batch_version = commit.read, commit.version
    return None


def ledger_of_rows(history: TableHistory, group: str, restore: Restore | None = None) -> Ledger | None:
    """Compute the ledger that fits the rows of this version; without a ``RESTORE`` it is the newest one.

    A partition that has no rows in the restored version gets the offset at which its first removed batch started.

    Args:
        restore: the newest ``RESTORE`` of the group, where the caller has found it.

    Returns:
        None if the group never wrote to the table.

    Raises:
        LedgerExpired: the log does not reach back to the group's last commit.
        LedgerConflict: a batch was committed behind the ``RESTORE``, or the ledger cannot be read.
    """
    newest = history.ledger(group)
    restore = restore or (find_restore(history, group) if newest is not None else None)
    if newest is None or restore is None:
        return newest
    if restore.concurrent_batch is not None:
        raise _batch_behind_restore(history.table, group, restore)
    restored = ledger_of_rows(history.at(restore.restored_to), group) or Ledger(group=group)
    starts: dict[TopicPartition, int] = {}
    for commit in history.at(restore.version - 1).commits(after=restore.restored_to):  # newest first
        if (entry := commit.ledger_entry(group)) is not None:
            starts |= first_offsets(entry["ledger"])
    same_topics = {
        name: topic.id
        for name, topic in restored.topics.items()
        if name not in newest.topics or newest.topics[name].is_same(topic.id)
    }
    offsets = {tp: starts.get(tp, 0) for tp in newest.offsets} | {
        tp: n for tp, n in restored.offsets.items() if tp.topic in same_topics
    }
    recreated = {topic.id: topic for name, topic in restored.topics.items() if name not in same_topics}
    ledger = replace(newest, former={**restored.former, **recreated}, table_version=history.version)
    return ledger.with_offsets(offsets, same_topics)


def _batch_behind_restore(table: str, group: str, restore: Restore) -> LedgerConflict:
    return LedgerConflict(
        f"table {table} was restored to version {restore.restored_to} (by its version {restore.version}) while a batch "
        f"of group {group!r} was being written: the batch is version {restore.concurrent_batch}. Its rows are in the "
        "table and the rows before them are missing. Stop the queries that write the table, restore it without the "
        "batch, move the group back, and start the queries with the same checkpoints:"
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
