"""The ledger: the next offset of every partition, kept in the table itself, and what it says of a batch.

Runs in: the user's driver, the command line, tests. Deliberately absent: any I/O (:mod:`kept` reads and sets it,
:mod:`sink` carries out what is decided here), rows, and any decision by time or by the content of rows.

What a ledger is and how it is written down: :mod:`entries`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from spark_group_source.delta.entries import APP_PREFIX, VERSION, Ledger, LedgerDamaged
from spark_group_source.errors import LedgerConflict
from spark_group_source.group.offsets import StreamOffset
from spark_group_source.model import OffsetRange, TopicPartition

__all__ = ["APP_PREFIX", "VERSION", "Ledger", "LedgerDamaged"]

SHOWN_MAX = 5
"""How many partitions an error or a log line lists; the ``fields`` of an error carry all of them."""


# --- one source's part of a batch -----------------------------------------------------------------------------------


class Refusal(NamedTuple):
    """A partition that someone else moved to ``start``, below the ledger's ``recorded`` offset; or that begins there,
    above it, because the group's offset was forgotten."""

    tp: TopicPartition
    start: int
    recorded: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What :func:`judge` found. The batch may be written only if ``refused`` is empty, and without ``drop``.

    ``drop``: ranges that the table already holds; all of them, if the batch is ``void``. ``skipped``: ranges between
    the ledger and the batch that another member of the group had. ``recreated``: topics whose id changed, so that their
    offsets start afresh. ``ledger``: the ledger once the batch is written.
    """

    ledger: Ledger
    drop: tuple[OffsetRange, ...] = ()
    skipped: tuple[OffsetRange, ...] = ()
    refused: tuple[Refusal, ...] = ()
    recreated: tuple[str, ...] = ()
    void: bool = False


def judge(batch: StreamOffset, ledger: Ledger | None) -> Verdict:
    """Compare a batch, range by range ``[from, until)``, with the next offset L that the table recorded.

    - The batch was planned before a reset that the ledger knows of: void. The ledger stays where it is; of partitions
      that it does not know it takes where the batch begins, so that going back to it loses nothing.
    - L unknown, or from == L: the records are new.
    - from > L and the group had no offset any more, so that the stream began where ``startingOffsets`` says: refused.
      Nobody had [L, from).
    - from > L otherwise: another member of the group had [L, from) in between.
    - from < L and the batch says that the log was cut there, and stood at L before: the records are new, too. An
      unclean election took away those that the table has of these offsets; others have their numbers now.
    - from < L and the position came from a commit that no stream of ours made: refused. An operator's rewind must move
      Kafka and the ledger together, or the table would get records twice.
    - from < L otherwise: the echo to Kafka had not arrived when a checkpoint was lost, or another query of the group
      wrote first. [from, min(L, until)) is in the table; the rest is new.

    L is that of the topic with the id that the batch was planned under: the ledger keeps former ones. The resulting
    ledger never stands below the given one, but where a log was cut.
    """
    known = ledger if ledger is not None else Ledger(group=batch.group)
    if _is_void(batch, known):
        ids = {tp.topic: batch.topic_ids.get(tp.topic, "") for tp in sorted(batch.ranges)}
        ids = {topic: id_ for topic, id_ in ids.items() if id_ not in known.retired}
        begins = known.under(ids)
        for tp, (start, _) in batch.ranges.items():
            if tp.topic in ids:
                begins[tp.topic].setdefault(tp.partition, start)
        left_out = replace(known.put(ids, begins), void={**known.void, batch.stream: batch.seq}, table_version=-1)
        return Verdict(ledger=left_out, drop=tuple(batch.batch()), void=True)
    topics = {topic: batch.topic_ids.get(topic, "") for topic in sorted({tp.topic for tp in batch.ranges})}
    offsets = known.under(topics)
    drop: list[OffsetRange] = []
    skipped: list[OffsetRange] = []
    refused: list[Refusal] = []
    for tp, (start, end) in sorted(batch.ranges.items()):
        entry = offsets[tp.topic]
        recorded = entry.get(tp.partition)
        if recorded is None or start >= recorded or batch.cut.get(tp) == recorded:
            if recorded is not None and start > recorded:
                if tp in batch.began:
                    refused.append(Refusal(tp, start, recorded))
                    continue
                skipped.append(OffsetRange(tp, recorded, start))
            entry[tp.partition] = end
        elif tp in batch.followed:
            refused.append(Refusal(tp, start, recorded))
        else:
            if start < end:
                drop.append(OffsetRange(tp, start, min(recorded, end)))
            entry[tp.partition] = max(recorded, end)
    after = replace(known, stream=batch.stream, seq=batch.seq, epoch=batch.epoch, table_version=-1)
    after = after.put(topics, offsets)
    if batch.epoch != known.epoch:  # whoever planned before that reset is void from now on
        after = replace(after, void={}, former={})
    return Verdict(
        ledger=after,
        drop=tuple(drop),
        skipped=tuple(skipped),
        refused=tuple(refused),
        recreated=tuple(topic for topic, id_ in topics.items() if not known.knows(topic, id_)),
    )


def behind(batch: StreamOffset, ledger: Ledger | None) -> list[OffsetRange]:
    """The parts of a batch that the ledger does not cover; none, if the batch is in the table.

    Topics that the ledger does not know under the batch's id are left out, and all of a batch of before a reset: their
    old offsets are no longer comparable.
    """
    known = ledger if ledger is not None else Ledger(group=batch.group)
    if _is_void(batch, known):
        return []
    ids = {r.tp.topic: batch.topic_ids.get(r.tp.topic, "") for r in batch.batch()}
    there = known.under({topic: id_ for topic, id_ in ids.items() if known.knows(topic, id_)})
    missing = []
    for r in batch.batch():
        entry = there.get(r.tp.topic)
        if entry is not None and (recorded := entry.get(r.tp.partition, 0)) < r.end:
            missing.append(OffsetRange(r.tp, max(r.start, recorded), r.end))
    return missing


def _is_void(batch: StreamOffset, ledger: Ledger | None) -> bool:
    """Whether the batch was planned before a reset that the table knows of."""
    return ledger is not None and batch.epoch < ledger.epoch


# --- a whole batch --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The table has a batch of this number, and nothing is to be written.

    ``uncovered``: by group, what of this batch the ledger does not cover. It is the very same batch only if the table's
    history has its offsets, else it has to be refused. ``durable``: the offsets whose rows the table has then.
    """

    uncovered: Mapping[str, tuple[OffsetRange, ...]]
    durable: tuple[StreamOffset, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Nothing may be written: someone moved the group back, below what the table holds; or its offsets were forgotten,
    and it begins above that."""

    group: str
    positions: tuple[Refusal, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retired:
    """Nothing may be written: a reset took these topics for deleted, and the table forgot what it has of them."""

    group: str
    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unaware:
    """Nothing may be written: the batch before this one was void already, and the stream has still not heard of reset
    ``epoch``. Kafka does not have the note of that reset any more, and leaving out more batches would lose records."""

    group: str
    stream: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """Nothing may be written: rows of these partitions must be left out, and several sources may have read them."""

    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """The batch is to be written without the rows in ``drop``, and with it the number of the batch and the ledgers.

    ``rows``: False if none of its rows is wanted, so that they need not be read. ``changed``: whether a ledger says
    something new; if not, a batch that turns out to have no rows needs no commit. ``durable``: the offsets whose rows
    the table has then.
    """

    drop: tuple[OffsetRange, ...]
    rows: bool
    ledgers: Mapping[str, Ledger]
    changed: bool
    verdicts: tuple[Verdict, ...]
    durable: tuple[StreamOffset, ...]


Decision = Recorded | Refused | Retired | Unaware | Mixed | Write


def decide(
    offsets: Sequence[StreamOffset], ledgers: Mapping[str, Ledger | None], *, recorded: bool, others: bool = False
) -> Decision:
    """What a sink does with a batch.

    Args:
        offsets: of each source of ours that has something in the batch.
        ledgers: of their groups, as the table has them; None where a group never wrote.
        recorded: whether the table has a batch of this number, or of a later one, of the same query.
        others: whether sources of other kinds may have rows in the batch.
    """
    if recorded:
        missing = [(offset.group, behind(offset, ledgers[offset.group])) for offset in offsets]
        return Recorded(
            uncovered={group: tuple(ranges) for group, ranges in missing if ranges},
            durable=tuple(offset for offset in offsets if not _is_void(offset, ledgers[offset.group])),
        )
    current = dict(ledgers)
    verdicts = []
    for offset in offsets:
        before = current[offset.group]
        if before is not None and before.retired and not _is_void(offset, before):
            ids = {tp.topic: offset.topic_ids.get(tp.topic, "") for tp in offset.ranges}
            if back := sorted(topic for topic, id_ in ids.items() if id_ in before.retired):
                return Retired(group=offset.group, topics=tuple(back))
        verdict = judge(offset, before)
        if verdict.refused:
            return Refused(group=offset.group, positions=verdict.refused)
        if verdict.void and before is not None and before.void.get(offset.stream, offset.seq) < offset.seq:
            return Unaware(group=offset.group, stream=offset.stream, epoch=before.epoch)
        current[offset.group] = verdict.ledger
        verdicts.append(verdict)
    drop = tuple(r for verdict in verdicts for r in verdict.drop)
    rows = others or not verdicts or any(not verdict.void for verdict in verdicts)
    readers = Counter(r.tp for offset in offsets for r in offset.batch())
    twice = sorted({r.tp for r in drop if readers[r.tp] > 1})
    if rows and twice:
        return Mixed(partitions=tuple(twice))
    # Of several offsets of one group the last verdict has all of them.
    after = {verdict.ledger.group: verdict.ledger for verdict in verdicts}
    return Write(
        drop=drop,
        rows=rows,
        ledgers=after,
        changed=any(not ledger.same(ledgers[group]) for group, ledger in after.items()),
        verdicts=tuple(verdicts),
        durable=tuple(offset for offset, verdict in zip(offsets, verdicts, strict=True) if not verdict.void),
    )


# --- texts ----------------------------------------------------------------------------------------------------------


def conflict(table: str, decision: Refused | Retired | Unaware | Mixed, batch_id: int) -> LedgerConflict:
    """The error for a batch that may not be written, with what settles it."""
    match decision:
        case Refused(group=group, positions=refused) if ahead := [r for r in refused if r.start > r.recorded]:
            listed = "; ".join(f"{r.tp}: {r.start}, the table holds up to {r.recorded}" for r in ahead[:SHOWN_MAX])
            more = f" (and {len(ahead) - SHOWN_MAX} more partitions)" if len(ahead) > SHOWN_MAX else ""
            return LedgerConflict(
                f"Kafka has no offsets of group {group!r} any more (expired, or deleted), so this query begins where "
                f"startingOffsets says, behind what table {table} holds: {listed}{more}. What lies between would be "
                "read by nobody, so nothing was written. Stop the query, then either continue where the table stands: "
                f"`spark-group reset --group {group} --to-ledger --table {table}`, or skip it on purpose: `spark-group "
                f"reset --group {group} --to-latest --table {table}`. Then start the query again with the same "
                "checkpoint: this batch is void after either of them",
                table=table,
                group=group,
                refused=[(r.tp.topic, r.tp.partition, r.start, r.recorded) for r in refused],
            )
        case Refused(group=group, positions=refused):
            listed = "; ".join(
                f"{r.tp}: Kafka says {r.start}, the table holds up to {r.recorded}" for r in refused[:SHOWN_MAX]
            )
            more = f" (and {len(refused) - SHOWN_MAX} more partitions)" if len(refused) > SHOWN_MAX else ""
            return LedgerConflict(
                f"group {group!r} was moved back by someone else, below what table {table} already holds: {listed}"
                f"{more}. Reading on would write these records twice, so nothing was written. Stop the query, then "
                f"either continue where the table stands: `spark-group reset --group {group} --to-ledger --table "
                f"{table}`, or write them again on purpose, by moving Kafka and the ledger together: `spark-group "
                f"reset --group {group} --table {table}` with the position you want. Then start the query again with "
                "the same checkpoint: this batch is void after either of them",
                table=table,
                group=group,
                refused=[(r.tp.topic, r.tp.partition, r.start, r.recorded) for r in refused],
            )
        case Retired(group=group, topics=topics):
            return LedgerConflict(
                f"a reset of group {group!r} found no topic {topics[0]!r}, so table {table} forgot what it has of it. "
                f"Batch {batch_id} reads that very topic, so nothing was written. Stop the query, and say where it "
                "goes on: "
                f"`spark-group reset --group {group} --topic {topics[0]} --table {table}` with the position you want, "
                "which is where the table's rows of it end. Then start the query again with the same checkpoint",
                table=table,
                group=group,
                topics=list(topics),
            )
        case Unaware(group=group, stream=stream, epoch=epoch):
            return LedgerConflict(
                f"stream {stream} of group {group!r} does not know of reset {epoch} of the group, which table {table} "
                f"knows of, so batch {batch_id} was not written. Its last batch was left out for that reason: the "
                "group's offsets at Kafka say nothing of the reset any more. They were removed, or the table belongs "
                "to a group of another cluster. Stop the query; to go on where the table stands: `spark-group reset "
                f"--group {group} --to-ledger --table {table}`; then start it again with the same checkpoint",
                table=table,
                group=group,
                stream=stream,
                epoch=epoch,
            )
        case Mixed(partitions=partitions):
            return LedgerConflict(
                f"table {table} must not get part of what batch {batch_id} read of {partitions[0]} (again), but "
                "several kafka-group sources of this query read that partition, and their rows cannot be told apart. "
                "Nothing was written. Read each topic with one source, and use its DataFrame as often as needed",
                table=table,
                partitions=[tuple(tp) for tp in partitions],
            )


def shown(ranges: Iterable[OffsetRange]) -> str:
    """A few ranges for a log line."""
    listed = list(ranges)
    more = f" and {len(listed) - SHOWN_MAX} more" if len(listed) > SHOWN_MAX else ""
    return ", ".join(map(str, listed[:SHOWN_MAX])) + more
