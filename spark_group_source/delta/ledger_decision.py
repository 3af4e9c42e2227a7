"""The ledger: the next offset of every partition, kept in the table itself, and what it says of a batch.

Runs in: the user's driver, the command line, tests. Deliberately absent: any I/O (:mod:`kept` reads and sets it,
:mod:`sink` carries out what is decided here), rows, and any decision by time or by the content of rows.

What a ledger is and how it is written down: :mod:`entries`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from spark_group_source.delta.ledger_format import Batch, Ledger, Topic
from spark_group_source.errors import LedgerConflict
from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.protocol.offsets import StreamOffset

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
    void = batch.epoch < known.epoch
    # Whoever planned before the batch's reset is void from now on.
    after = known if batch.epoch <= known.epoch else replace(known, epoch=batch.epoch, void=frozenset())
    drop: list[OffsetRange] = []
    skipped: list[OffsetRange] = []
    refused: list[Refusal] = []
    topics: list[Topic] = []
    for name, ranges in groupby(sorted(batch.ranges.items()), key=lambda item: item[0].topic):
        id_ = batch.topic_ids.get(name, "")
        if void and id_ in known.former:
            continue
        offsets = dict(known.under(name, id_))
        topics.append(Topic(name, id_, offsets))
        for tp, (start, end) in ranges:
            recorded = offsets.get(tp.partition)
            if void:
                offsets.setdefault(tp.partition, start)
            elif recorded is None or start >= recorded or batch.cut.get(tp) == recorded:
                if recorded is not None and start > recorded:
                    if tp in batch.began:
                        refused.append(Refusal(tp, start, recorded))
                        continue
                    skipped.append(OffsetRange(tp, recorded, start))
                offsets[tp.partition] = end
            elif tp in batch.followed:
                refused.append(Refusal(tp, start, recorded))
            else:
                if start < end:
                    drop.append(OffsetRange(tp, start, min(recorded, end)))
                offsets[tp.partition] = max(recorded, end)
    return Verdict(
        ledger=after.with_batch(batch, void=void).put(topics),
        drop=tuple(batch.batch() if void else drop),
        skipped=tuple(skipped),
        refused=tuple(refused),
        recreated=() if void else tuple(topic.name for topic in topics if not known.knows(topic.name, topic.id)),
        void=void,
    )


# --- a whole batch --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The table has the batch, and nothing is to be written. ``durable``: the offsets whose rows it has."""

    durable: tuple[StreamOffset, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """The batch is to be written without the rows in ``drop``, and with it the ledgers.

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


def decide(
    offsets: Sequence[StreamOffset],
    ledgers: Mapping[str, Ledger | None],
    *,
    table: str,
    batch_id: int,
    others: bool = False,
) -> Recorded | Write:
    """What a sink does with a batch.

    Args:
        offsets: of each source of ours that has something in the batch.
        ledgers: of their groups, as the table has them; None where a group never wrote.
        table, batch_id: for messages.
        others: whether sources of other kinds may have rows in the batch.

    Raises:
        LedgerConflict: nothing may be written; the message says what settles it.
    """
    current = {group: Ledger(group=group) if found is None else found for group, found in ledgers.items()}
    if any(_is_recorded(offset, current[offset.group]) for offset in offsets):
        for offset in offsets:
            if missing := behind(offset, current[offset.group]):
                raise _another(table, offset, batch_id, missing)
        return Recorded(durable=tuple(each for each in offsets if each.epoch >= current[each.group].epoch))
    verdicts = []
    for offset in offsets:
        before = current[offset.group]
        verdict = judge(offset, before)
        if verdict.refused:
            raise _refused(table, offset.group, verdict.refused)
        if verdict.void and offset.stream in before.void:
            raise _unaware(table, offset, before.epoch, batch_id)
        current[offset.group] = verdict.ledger
        verdicts.append(verdict)
    drop = tuple(r for verdict in verdicts for r in verdict.drop)
    rows = others or not verdicts or any(not verdict.void for verdict in verdicts)
    readers = Counter(r.tp for offset in offsets for r in offset.batch())
    twice = sorted({r.tp for r in drop if readers[r.tp] > 1})
    if rows and twice:
        raise _mixed(table, twice, batch_id)
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


def _is_recorded(batch: StreamOffset, known: Ledger) -> bool:
    """Whether the table has a batch of this number, or a later one, of the same stream."""
    last = known.streams.get(batch.stream)
    return last is not None and last.seq >= batch.seq


def behind(batch: StreamOffset, known: Ledger) -> list[OffsetRange]:
    """The parts of a recorded batch that the ledger does not cover. None, if it is the very batch that was written
    last, wherever the ledger was moved since, or if it is void: its positions are not comparable."""
    if batch.epoch < known.epoch or known.streams.get(batch.stream) == Batch.of(batch):
        return []
    missing = []
    for r in batch.batch():
        recorded = known.under(r.tp.topic, batch.topic_ids.get(r.tp.topic, "")).get(r.tp.partition, 0)
        if recorded < r.end:
            missing.append(OffsetRange(r.tp, max(r.start, recorded), r.end))
    return missing


# --- refusals -------------------------------------------------------------------------------------------------------


def _another(table: str, offset: StreamOffset, batch_id: int, missing: Sequence[OffsetRange]) -> LedgerConflict:
    """Another batch of this number is in the table."""
    return LedgerConflict(
        f"table {table} has batch {offset.seq} of stream {offset.stream} already, but its ledger of group "
        f"{offset.group!r} does not cover {shown(missing)} of batch {batch_id}. A second run of this query wrote "
        "another batch under this number (is the checkpoint used twice?). Nothing was written. Stop the other run. "
        "Then start this query with a new checkpointLocation: it continues at the ledger",
        table=table,
        group=offset.group,
        batch_id=batch_id,
        missing=[(r.tp.topic, r.tp.partition, r.start, r.end) for r in missing],
    )


def _refused(table: str, group: str, refused: Sequence[Refusal]) -> LedgerConflict:
    """Someone moved the group back, below what the table holds; or its offsets were forgotten, and it begins above."""
    ahead = [r for r in refused if r.start > r.recorded]
    those = ahead or refused
    at = "" if ahead else "Kafka says "
    listed = "; ".join(f"{r.tp}: {at}{r.start}, the table holds up to {r.recorded}" for r in those[:SHOWN_MAX])
    listed += f" (and {len(those) - SHOWN_MAX} more partitions)" if len(those) > SHOWN_MAX else ""
    reset = f"`spark-group reset --group {group}"
    if ahead:
        why = (
            f"Kafka has no offsets of group {group!r} any more (expired, or deleted), so this query begins where "
            f"startingOffsets says, behind what table {table} holds: {listed}. What lies between would be read by "
            "nobody, so nothing was written"
        )
        otherwise = f"or skip it on purpose: {reset} --to-latest --table {table}`"
    else:
        why = (
            f"group {group!r} was moved back by someone else, below what table {table} already holds: {listed}. "
            "Reading on would write these records twice, so nothing was written"
        )
        otherwise = (
            f"or write them again on purpose, by moving Kafka and the ledger together: {reset} --table {table}` with "
            "the position you want"
        )
    return LedgerConflict(
        f"{why}. Stop the query, then either continue where the table stands: {reset} --to-ledger --table {table}`, "
        f"{otherwise}. Then start the query again with the same checkpoint: this batch is void after either of them",
        table=table,
        group=group,
        refused=[(r.tp.topic, r.tp.partition, r.start, r.recorded) for r in refused],
    )


def _unaware(table: str, offset: StreamOffset, epoch: int, batch_id: int) -> LedgerConflict:
    """The stream's batch before this one was void already. Kafka does not have the note of that reset any more, and
    leaving out more batches would lose records."""
    return LedgerConflict(
        f"stream {offset.stream} of group {offset.group!r} does not know of reset {epoch} of the group, which table "
        f"{table} knows of, so batch {batch_id} was not written. Its last batch was left out for that reason: the "
        "group's offsets at Kafka say nothing of the reset any more. They were removed, or the table belongs to a "
        "group of another cluster. Stop the query; to go on where the table stands: `spark-group reset "
        f"--group {offset.group} --to-ledger --table {table}`; then start it again with the same checkpoint",
        table=table,
        group=offset.group,
        stream=offset.stream,
        epoch=epoch,
    )


def _mixed(table: str, partitions: Sequence[TopicPartition], batch_id: int) -> LedgerConflict:
    """Rows of these partitions must be left out, and several sources may have read them."""
    return LedgerConflict(
        f"table {table} must not get part of what batch {batch_id} read of {partitions[0]} (again), but several "
        "kafka-group sources of this query read that partition, and their rows cannot be told apart. Nothing was "
        "written. Read each topic with one source, and use its DataFrame as often as needed",
        table=table,
        partitions=[tuple(tp) for tp in partitions],
    )


def shown(ranges: Iterable[OffsetRange]) -> str:
    """A few ranges for a log line."""
    listed = list(ranges)
    more = f" and {len(listed) - SHOWN_MAX} more" if len(listed) > SHOWN_MAX else ""
    return ", ".join(map(str, listed[:SHOWN_MAX])) + more
