"""Decides what the sink does with a batch: compares its ranges with the ledgers of the table.

Runs in: the user's driver, the command line, tests. Deliberately absent: any I/O (:mod:`ledger_store` reads and sets
ledgers, :mod:`sink` carries out the decision), rows, and any decision by time or by the content of rows.

The ledger and its format: :mod:`ledger_format`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple

from spark_group_source import command_line
from spark_group_source.delta import table_names
from spark_group_source.delta.ledger_format import LATER_MAX, LaterRows, Ledger, LedgerPartition, LedgerTopic
from spark_group_source.errors import LedgerConflict
from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.protocol.offsets import RECREATED, BatchKey, StreamOffset

SHOWN_MAX = 5
"""How many partitions an error or a log line lists; the ``fields`` of an error have all of them."""


# --- one source's part of a batch -----------------------------------------------------------------------------------


class RefusedPartition(NamedTuple):
    """A partition for which a batch must not be written."""

    tp: TopicPartition
    start: int
    """Where the batch starts: below ``recorded`` after a foreign commit, or above it after the group's committed offset
    was lost."""
    recorded: int
    """The next offset in the ledger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of :func:`compare`. The batch may be written only if ``refused`` is empty, and without ``drop``
    and ``removed``."""

    ledger: Ledger
    """The ledger after the batch is written."""
    drop: tuple[OffsetRange, ...] = ()
    """The ranges that the table already holds; all ranges of a void batch."""
    removed: tuple[OffsetRange, ...] = ()
    """The ranges that are left out because their log was truncated since they were planned."""
    skipped: tuple[OffsetRange, ...] = ()
    """The ranges between ledger and batch, which another consumer of the group read."""
    refused: tuple[RefusedPartition, ...] = ()
    """The partitions for which the batch must not be written."""
    recreated: tuple[str, ...] = ()
    """The topics whose id changed, so that their offsets start again."""
    void: bool = False
    """Whether the batch was planned before the newest reset."""


def compare(batch: StreamOffset, ledger: Ledger | None) -> Comparison:
    """Compare a batch, range by range ``[from, until)``, with the next offset L in the ledger. The first of these rules
    that fits a range applies:

    - The batch was planned before a reset that the ledger knows: void. The ledger does not move; partitions that it
      does not know get the offset at which the batch starts, so that a reset to the ledger loses nothing.
    - The batch says that the log was truncated at from after a leader epoch, and L is not from after that truncation:
      the records are new. An unclean leader election removed the records that the table has of these offsets, and
      other records have these offsets now. The ledger keeps the leader epoch after the truncation, by which a replay,
      or another query, after the same truncation is compared like any other batch. So it is if all that the table has
      was read under later epochs. If that holds from an offset on, the table has the records from there on: L moves to
      their end, or, if the batch does not reach them, a later batch leaves them out. Offsets between L and from are
      refused or skipped, as below.
    - L is unknown: the records are new.
    - The batch was planned under a leader epoch before a truncation that the ledger knows: its records are below L, or
      no longer in the log. They are left out, and L stays, because other records have these offsets.
    - from > L, and the group had no committed offset, so that ``startingOffsets``, or a checkpoint that is older than a
      reset, decided: refused. No consumer read [L, from).
    - from < L, and the position came from a foreign commit: refused. An operator must move Kafka and the ledger
      together, or the table would hold records twice.
    - from > L: another consumer of the group read [L, from).
    - from <= L: the offsets were not committed to Kafka before a checkpoint was lost, or another query of the group
      wrote first. [from, min(L, until)) is in the table; the rest is new.

    L belongs to the topic id by which the batch was planned: the ledger keeps former topics. The resulting ledger is
    never below the given one, except where a log was truncated.

    Args:
        ledger: the group's ledger; None if the group never wrote to the table.
    """
    known = ledger if ledger is not None else Ledger(group=batch.group)
    void = batch.reset_number < known.reset_number
    # A newer reset makes the batches of all streams void that were planned before it.
    after = (
        known
        if batch.reset_number <= known.reset_number
        else replace(known, reset_number=batch.reset_number, void=frozenset())
    )
    found = _Found([], [], [], [])
    topics: list[LedgerTopic] = []
    for name, id_, ranges in _by_topic(batch):
        if void and id_ in known.former:
            continue
        topic = known.topic(name, id_)
        changed: dict[int, LedgerPartition] = {}
        for r in ranges:
            rows = changed[r.tp.partition] = topic.partition(r.tp.partition)
            if not void:
                _compare_range(batch, r, rows, found)
            elif rows.offset is None:
                rows.offset = r.start
        topics.append(topic.with_partitions(changed))
    return Comparison(
        ledger=after.with_batch(batch, void=void).with_topics(topics),
        drop=tuple(batch.batch() if void else found.drop),
        removed=tuple(found.removed),
        skipped=tuple(found.skipped),
        refused=tuple(found.refused),
        recreated=() if void else tuple(topic.name for topic in topics if not known.knows_topic(topic.name, topic.id)),
        void=void,
    )


def _by_topic(batch: StreamOffset) -> Iterator[tuple[str, str, list[OffsetRange]]]:
    """Yield each topic of a batch with its id and its ranges, also those without offsets."""
    for name, ranges in groupby(sorted(batch.ranges.items()), key=lambda item: item[0].topic):
        yield name, batch.topic_ids.get(name, ""), [OffsetRange(tp, start, end) for tp, (start, end) in ranges]


class _Found(NamedTuple):
    """The ranges of a :class:`Comparison`."""

    drop: list[OffsetRange]
    removed: list[OffsetRange]
    skipped: list[OffsetRange]
    refused: list[RefusedPartition]


def _compare_range(batch: StreamOffset, r: OffsetRange, rows: LedgerPartition, found: _Found) -> None:
    """Move the rows of a partition to what they are after the batch, by the rules of :func:`compare`."""
    tp, start, end = r.tp, r.start, r.end
    recorded, rows_end = rows.offset, rows.end
    before, epoch = batch.truncated_after.get(tp, RECREATED), batch.leader_epochs.get(tp, 0)
    known_epoch = epoch if batch.topic_ids.get(tp.topic) and tp in batch.leader_epochs else None
    later = _rows_after(rows, before, epoch)
    if before != RECREATED and before >= rows.epoch and not (later and start >= later[0].start):
        _move_back(rows, end, before, epoch, later)
        if later:
            _add(found.drop, tp, later[0].start, min(rows_end, end))
            if rows_end < end:
                _add_rows(rows, rows_end, known_epoch)
        elif recorded is not None and start > recorded:
            _add_gap(batch, tp, recorded, start, found)
        return
    is_proven = known_epoch is not None and tp not in batch.followed and tp not in batch.started
    if recorded is None:
        rows.offset = end
        if is_proven and start < end:
            rows.epoch = epoch
        return
    if is_proven and rows.gone is not None and epoch <= rows.gone:
        _add(found.removed, tp, start, end)
        return
    if start > recorded:
        _add_gap(batch, tp, recorded, start, found)
    elif start < recorded and tp in batch.followed:
        found.refused.append(RefusedPartition(tp, start, recorded))
    else:
        _add(found.drop, tp, start, min(recorded, end))
    rows.offset = max(recorded, end)
    if rows.ahead is not None and end >= (first := rows.later[0].start):
        _add(found.drop, tp, max(start, first), min(rows.ahead, end))
        rows.offset, rows.ahead = max(rows.ahead, end), None
    if max(start, rows_end) < end:
        _add_rows(rows, max(start, rows_end), known_epoch)


def _add(ranges: list[OffsetRange], tp: TopicPartition, start: int, end: int) -> None:
    """Add a range that has offsets."""
    if start < end:
        ranges.append(OffsetRange(tp, start, end))


def _add_gap(batch: StreamOffset, tp: TopicPartition, recorded: int, start: int, found: _Found) -> None:
    """Add the offsets between the ledger and a batch."""
    if tp in batch.started:
        found.refused.append(RefusedPartition(tp, start, recorded))
    else:
        found.skipped.append(OffsetRange(tp, recorded, start))


def _rows_after(rows: LedgerPartition, before: int, now: int) -> tuple[LaterRows, ...]:
    """Return the rows that were read under leader epochs after a truncation.

    Args:
        before: the last leader epoch that was known before the truncation.
        now: the leader epoch under which it was found. None of the rows count if it is later than those of the rows,
            or unknown (0): another truncation may have removed them since.
    """
    if not rows.later or not before < now <= rows.later[-1].epoch:
        return ()
    return tuple(each for each in rows.later if each.epoch > before)


def _move_back(rows: LedgerPartition, to: int | None, before: int, epoch: int, later: tuple[LaterRows, ...]) -> None:
    """Move the offset to where a batch ends that follows a truncation.

    Args:
        to: None if the offset is unknown.
        before: the last leader epoch that was known before the truncation.
        epoch: the earliest leader epoch under which rows were read since; 0 if it is unknown.
        later: the rows that replace those which the truncation removed; they stay known.
    """
    end = rows.end
    rows.offset, rows.epoch, rows.gone, rows.ahead, rows.later = to, max(before + 1, epoch), before, None, later
    if not later or to is None:
        return
    rows.epoch = min(rows.epoch, later[0].epoch)  # the next truncation may remove rows of that epoch
    if later[0].start > to:
        rows.ahead = end
        return
    rows.offset, rows.later = max(to, end), tuple(each for each in later if each.epoch > rows.epoch)


def _add_rows(rows: LedgerPartition, start: int, epoch: int | None) -> None:
    """Add rows behind the end to the known leader epochs.

    Args:
        epoch: that under which they were read, which may be earlier than that of rows below them: the batch was planned
            before those were. None: it is unknown.
    """
    if epoch is None:
        rows.later = ()
        return
    rows.epoch = min(rows.epoch, epoch)
    later = [each for each in rows.later if rows.epoch < each.epoch <= epoch]
    if epoch > max([rows.epoch, *(each.epoch for each in later)]):
        later.append(LaterRows(epoch, start))
    rows.later = tuple(later[-LATER_MAX:])


def catch_up(ledger: Ledger, common: Ledger, batch: StreamOffset) -> Ledger:
    """Return the ledger of a table that gets only batches with rows for it, as if it had got the others too.

    A table that gets each batch after all others shows what these have: all of their rows below its next offset C. For
    each partition of the batch ``[from, until)``, with the next offset L of the ledger:

    - L is unknown: the table has no rows. What ``common`` knows of truncations was before them.
    - ``common`` knows a truncation that is newer than these rows: no batch of the truncated log had rows for the table,
      and of its rows above C none is left in the log, except for those that were read under later leader epochs. L is
      at most C, and a batch that reaches the other rows leaves them out.
    - L < from: no row between L and the lower one of C and from is missing. L never moves beyond from, because C may be
      ahead of a table that an operator moved back.

    Args:
        common: the group's ledger in the table that gets each batch after all others, as read before this batch.
    """
    topics = []
    for name, id_, ranges in _by_topic(batch):
        topic, other = ledger.topic(name, id_), common.topic(name, id_)
        changed: dict[int, LedgerPartition] = {}
        for r in ranges:
            rows = changed[r.tp.partition] = topic.partition(r.tp.partition)
            all_rows = other.partition(r.tp.partition)
            truncated, all_have = RECREATED if all_rows.gone is None else all_rows.gone, all_rows.offset or 0
            if truncated > max(RECREATED if rows.gone is None else rows.gone, rows.epoch - 1):
                to, epoch = None if rows.offset is None else min(rows.offset, all_have), all_rows.epoch
                now = max([epoch, *(each.epoch for each in all_rows.later)])
                _move_back(rows, to, truncated, epoch, _rows_after(rows, truncated, now))
            if rows.offset is not None:
                rows.offset = max(rows.offset, min(r.start, all_have))
        if ledger.knows_topic(name, id_):
            topics.append(topic.with_partitions(changed))
    return ledger.with_topics(topics)


# --- a whole batch --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AlreadyWritten:
    """The table already has the batch; nothing is written."""

    durable: tuple[StreamOffset, ...]
    """The offsets whose rows the table has: all but void ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteBatch:
    """The batch is written, without the rows in ``drop``, in one commit with the ledgers after it."""

    drop: tuple[OffsetRange, ...]
    """The ranges whose rows are left out."""
    reads_rows: bool
    """False if all rows are left out, so that they need not be read."""
    ledgers: Mapping[str, Ledger]
    """The ledgers after the batch, by group."""
    changes_ledger: bool
    """Whether a ledger changes; if not, a batch without rows needs no commit."""
    comparisons: tuple[Comparison, ...]
    """One for each source, in the order of the offsets."""
    durable: tuple[StreamOffset, ...]
    """The offsets whose rows the table has after the commit: all but void ones."""


def decide(
    offsets: Sequence[StreamOffset],
    ledgers: Mapping[str, Ledger | None],
    *,
    table: str,
    batch_id: int,
    other_sources: bool = False,
    common: Mapping[str, Ledger] = MappingProxyType({}),
    scope: tuple[str, ...] = (),
) -> AlreadyWritten | WriteBatch:
    """Decide what the sink does with a batch.

    Args:
        offsets: one for each kafka-group source that has a part in the batch.
        ledgers: of their groups, as read from the table; None for a group that never wrote.
        table, batch_id: for messages.
        other_sources: whether sources of other kinds may have rows in the batch.
        common: by group, the ledgers of the table that gets each batch after this one (:func:`catch_up`); none for a
            table that gets all batches with records of its topics.
        scope: as in :class:`checkpoint.PlannedBatch`, for messages.

    Raises:
        LedgerConflict: nothing may be written; the message has the commands that settle it.
    """
    current = {group: Ledger(group=group) if ledger is None else ledger for group, ledger in ledgers.items()}
    if any(_is_recorded(offset, current[offset.group]) for offset in offsets):
        for offset in offsets:
            if missing := missing_from_ledger(offset, current[offset.group]):
                raise _other_batch_of_this_number(table, offset, batch_id, missing)
        return AlreadyWritten(durable=tuple(o for o in offsets if o.reset_number >= current[o.group].reset_number))
    comparisons = []
    for offset in offsets:
        before = current[offset.group]
        if (other := common.get(offset.group)) is not None:
            before = catch_up(before, other, offset)
        comparison = compare(offset, before)
        if comparison.refused:
            resets = before.reset_number, offset.reset_number
            raise _refused_partitions(table, offset.group, comparison.refused, resets, scope)
        if comparison.void and offset.stream in before.void:
            raise _unknown_reset(table, offset, before.reset_number, batch_id)
        current[offset.group] = comparison.ledger
        comparisons.append(comparison)
    drop = tuple(r for comparison in comparisons for r in (*comparison.drop, *comparison.removed))
    reads_rows = other_sources or not comparisons or any(not comparison.void for comparison in comparisons)
    readers = Counter(r.tp for offset in offsets for r in offset.batch())
    ambiguous = sorted({r.tp for r in drop if readers[r.tp] > 1})
    if reads_rows and ambiguous:
        raise _rows_of_several_sources(table, ambiguous, batch_id)
    # Of several offsets of one group, the last comparison has the ledger after all of them.
    after = {comparison.ledger.group: comparison.ledger for comparison in comparisons}
    return WriteBatch(
        drop=drop,
        reads_rows=reads_rows,
        ledgers=after,
        changes_ledger=any(not ledger.has_same_content(ledgers[group]) for group, ledger in after.items()),
        comparisons=tuple(comparisons),
        durable=tuple(offset for offset, found in zip(offsets, comparisons, strict=True) if not found.void),
    )


def _is_recorded(batch: StreamOffset, ledger: Ledger) -> bool:
    """Return whether the table has a batch of this number, or a later one, of the same stream."""
    last = ledger.streams.get(batch.stream)
    return last is not None and last.seq >= batch.seq


def missing_from_ledger(batch: StreamOffset, ledger: Ledger) -> list[OffsetRange]:
    """Return the ranges of a recorded batch that the ledger does not cover.

    None are missing if the batch is the stream's newest one in the table, wherever the ledger was moved since, or if
    it is void, because its positions are not comparable.
    """
    if batch.reset_number < ledger.reset_number or ledger.streams.get(batch.stream) == BatchKey.of(batch):
        return []
    missing = []
    for r in batch.batch():
        recorded = ledger.offset_of(r.tp, batch.topic_ids.get(r.tp.topic, "")) or 0
        if recorded < r.end:
            missing.append(OffsetRange(r.tp, max(r.start, recorded), r.end))
    return missing


# --- refusals -------------------------------------------------------------------------------------------------------


def _other_batch_of_this_number(
    table: str, offset: StreamOffset, batch_id: int, missing: Sequence[OffsetRange]
) -> LedgerConflict:
    return LedgerConflict(
        f"table {table} already has batch {offset.seq} of stream {offset.stream}, but its ledger of group "
        f"{offset.group!r} does not cover {listed(missing)} of batch {batch_id}: another run of this query "
        "wrote a different batch under this number (is the checkpoint used twice?). Nothing was written. Stop the "
        "other run, then start this query with a new checkpointLocation: it continues at the ledger",
        table=table,
        group=offset.group,
        batch_id=batch_id,
        missing=[(r.tp.topic, r.tp.partition, r.start, r.end) for r in missing],
    )


def _refused_partitions(
    table: str, group: str, refused: Sequence[RefusedPartition], resets: tuple[int, int], scope: tuple[str, ...]
) -> LedgerConflict:
    """The group was moved back below the ledger; or its committed offsets were lost and the batch starts above it.

    Args:
        resets: the numbers of the newest resets that the ledger and the batch know.
    """
    above = [r for r in refused if r.start > r.recorded]
    shown = above or refused
    start = "starts at" if above else "committed offset"
    places = "; ".join(f"{r.tp}: {start} {r.start}, the table holds up to {r.recorded}" for r in shown[:SHOWN_MAX])
    places += f" (and {len(shown) - SHOWN_MAX} more partitions)" if len(shown) > SHOWN_MAX else ""
    if above:
        why = (
            f"Kafka had no committed offsets of group {group!r} for these partitions (expired, deleted, or not "
            "committed before another query was killed), so startingOffsets, or a checkpoint older than a reset "
            f"of the group, decided where this query starts, which is above the ledger of table {table}: {places}. The "
            "records in between would never be read"
        )
        purpose, to = "leave them out", "--to-further"  # other partitions may be behind the ledger
    else:
        cause = "a foreign commit"
        if resets[0] < resets[1]:
            cause = f"reset #{resets[1]}, which was run without --table {table}, or a foreign commit after it,"
        why = (
            f"{cause} put group {group!r} below the ledger of table {table}: {places}. The records in between "
            "would be written twice"
        )
        purpose, to = "write them again, and continue at the offsets in Kafka", "--to-current"
    commands = {
        "continue where the table ends": table_names.reset_command(group, table, "--to-ledger"),
        purpose: table_names.reset_command(group, table, to, *scope),
    }
    return LedgerConflict(
        f"{why}, so nothing was written. Stop the query, run one of these commands, and start the query with the same "
        "checkpoint; the refused batch is void after either of them:" + command_line.alternatives(commands),
        table=table,
        group=group,
        refused=[(r.tp.topic, r.tp.partition, r.start, r.recorded) for r in refused],
    )


def _unknown_reset(table: str, offset: StreamOffset, reset_number: int, batch_id: int) -> LedgerConflict:
    """The stream's last batch was void already: Kafka no longer has the note of the reset, and leaving out more batches
    would lose records."""
    group = offset.group
    return LedgerConflict(
        f"table {table} knows reset #{reset_number} of group {group!r}, and stream {offset.stream} does not, although "
        f"its last batch was left out for that reason; so batch {batch_id} was not written. The notes beside the "
        "group's offsets in Kafka have no record of the reset: the offsets were removed, or the table belongs to a "
        "group of another cluster. Stop the query, run this command, and start the query with the same checkpoint:"
        + command_line.alternatives(
            {"continue where the table ends": table_names.reset_command(group, table, "--to-ledger")}
        ),
        table=table,
        group=group,
        stream=offset.stream,
        reset=reset_number,
    )


def _rows_of_several_sources(table: str, partitions: Sequence[TopicPartition], batch_id: int) -> LedgerConflict:
    return LedgerConflict(
        f"rows that batch {batch_id} read of {partitions[0]} must be left out of table {table} (they are there "
        "already, or were planned before a reset), and several kafka-group sources of this query read that partition, "
        "so these rows cannot be distinguished. Nothing was written. Read each topic with one source, and use its "
        "DataFrame as often as needed",
        table=table,
        partitions=[tuple(tp) for tp in partitions],
    )


def listed(values: Iterable[object]) -> str:
    """Return the first SHOWN_MAX values as text, and how many more there are."""
    texts = list(map(str, values))
    more = f" and {len(texts) - SHOWN_MAX} more" if len(texts) > SHOWN_MAX else ""
    return ", ".join(texts[:SHOWN_MAX]) + more
