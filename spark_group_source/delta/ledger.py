"""The ledger: the next offset of every partition, kept in the table itself, and what it says of a batch.

Runs in: the user's driver, the command line, tests. Deliberately absent: any I/O (:mod:`kept` reads and sets it,
:mod:`sink` carries out what is decided here), rows, and any decision by time or by the content of rows.

A table keeps one ledger per group, as the configuration of the Delta metadata domain ``spark-group-source.<group>``::

    {"epoch": 2, "seq": 17, "stream": "9f2c",
     "topics": {"orders": {"id": "<topic id>", "offsets": {"0": 250, "1": 40}}}, "v": 1}

It survives log cleanup and checkpoints of the table. It does *not* follow the rows: after ``RESTORE``, ``REPLACE`` or a
``DELETE`` the ledger still says what was once written. ``spark-group reset`` with ``--table`` moves it back.

``epoch`` counts the group's resets, as the notes beside Kafka's offsets do (``group.names``). A batch that was planned
before the newest reset is *void*: its positions are those of before, so nothing of it is written, and the source goes
on where the reset says. ``void`` has the number of the last such batch of each stream, since that reset. Both are
absent while there is nothing to say; releases that know neither read the rest.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from spark_group_source.errors import LedgerConflict
from spark_group_source.group.offsets import StreamOffset
from spark_group_source.model import OffsetRange, TopicPartition

VERSION = 1

DOMAIN_PREFIX = "spark-group-source."

SHOWN_MAX = 5
"""How many partitions an error or a log line lists; the ``fields`` of an error carry all of them."""


class LedgerDamaged(LedgerConflict):
    """The ledger's text cannot be read: what the table holds is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What a table holds of one group: ``offsets`` are the next ones to write, for every partition ever seen.

    ``stream`` and ``seq`` name the batch that wrote it last; an operator's reset leaves ``stream`` empty. ``epoch`` is
    the newest reset that the table knows of, ``void`` the last batch of each stream that was void since.
    ``table_version`` is the version of the table it was read from, or -1.
    """

    group: str
    offsets: Mapping[TopicPartition, int] = field(default_factory=dict)
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    stream: str = ""
    seq: int = -1
    epoch: int = 0
    void: Mapping[str, int] = field(default_factory=dict)
    table_version: int = -1

    def to_json(self) -> str:
        """The domain's configuration: keys sorted, integers only, ``epoch`` and ``void`` absent when empty."""
        topics: dict[str, dict[str, Any]] = {}
        for topic in sorted({tp.topic for tp in self.offsets} | set(self.topic_ids)):
            topics[topic] = {"id": self.topic_ids.get(topic, ""), "offsets": {}}
        for tp, offset in sorted(self.offsets.items()):
            topics[tp.topic]["offsets"][str(tp.partition)] = offset
        doc: dict[str, Any] = {"epoch": self.epoch} if self.epoch else {}
        doc |= {"seq": self.seq, "stream": self.stream, "topics": topics, "v": VERSION}
        if self.void:
            doc["void"] = dict(sorted(self.void.items()))
        return json.dumps(doc, separators=(",", ":"))

    @classmethod
    def from_json(cls, group: str, text: str, *, table_version: int = -1) -> "Ledger":
        """Read a domain's configuration.

        Raises:
            LedgerDamaged: it cannot be read. Nothing is assumed in its place.
            LedgerConflict: it is of a newer release.
        """
        try:
            doc = json.loads(text)
            if doc["v"] != VERSION:
                raise LedgerConflict(
                    f"the ledger of group {group!r} in the table has format version {doc['v']!r}; this release reads "
                    f"version {VERSION}. Run the release that wrote it, or a newer one",
                    group=group,
                    found=doc["v"],
                )
            offsets = {
                TopicPartition(topic, int(partition)): _number(offset)
                for topic, entry in doc["topics"].items()
                for partition, offset in entry["offsets"].items()
            }
            ids = {topic: str(entry["id"]) for topic, entry in doc["topics"].items()}
            return cls(
                group=group,
                offsets=offsets,
                topic_ids=ids,
                stream=str(doc["stream"]),
                seq=_number(doc["seq"], least=-1),
                epoch=_number(doc.get("epoch", 0)),
                void={str(stream): _number(seq) for stream, seq in doc.get("void", {}).items()},
                table_version=table_version,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise LedgerDamaged(
                f"the ledger of group {group!r} in the table is damaged ({exc!r}): {text[:200]}. It is the metadata "
                f"domain {DOMAIN_PREFIX + group!r}. Stop the query; `spark-group reset --group {group} --table T` with "
                "the position you want writes it anew, and the query can go on with its checkpoint",
                group=group,
            ) from exc

    def same(self, other: "Ledger | None") -> bool:
        """Whether both say the same of the same topics, whoever wrote them."""
        return other is not None and (self.offsets, self.topic_ids, self.epoch, self.void) == (
            other.offsets,
            other.topic_ids,
            other.epoch,
            other.void,
        )


# --- one source's part of a batch -----------------------------------------------------------------------------------


class Refusal(NamedTuple):
    """A partition that someone else moved to ``start``, below the ledger's ``recorded`` offset."""

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
    - from > L: another member of the group had [L, from) in between.
    - from < L and the position came from a commit that no stream of ours made: refused. An operator's rewind must move
      Kafka and the ledger together, or the table would get records twice.
    - from < L otherwise: the echo to Kafka had not arrived when a checkpoint was lost, or another query of the group
      wrote first. [from, min(L, until)) is in the table; the rest is new.

    The resulting ledger never stands below the given one, but for topics that were created anew.
    """
    known = ledger if ledger is not None else Ledger(group=batch.group)
    if _is_void(batch, known):
        offsets = {tp: start for tp, (start, _) in batch.ranges.items()} | dict(known.offsets)
        ids = {topic: i for topic, i in batch.topic_ids.items() if i} | dict(known.topic_ids)
        void = {**known.void, batch.stream: batch.seq}
        left_out = replace(known, offsets=offsets, topic_ids=ids, void=void, table_version=-1)
        return Verdict(ledger=left_out, drop=tuple(batch.batch()), void=True)
    recreated = _recreated(batch, known)
    offsets = {tp: n for tp, n in known.offsets.items() if tp.topic not in recreated}
    drop: list[OffsetRange] = []
    skipped: list[OffsetRange] = []
    refused: list[Refusal] = []
    for tp, (start, end) in sorted(batch.ranges.items()):
        recorded = offsets.get(tp)
        if recorded is None or start >= recorded:
            if recorded is not None and start > recorded:
                skipped.append(OffsetRange(tp, recorded, start))
            offsets[tp] = end
        elif tp in batch.followed:
            refused.append(Refusal(tp, start, recorded))
        else:
            if start < end:
                drop.append(OffsetRange(tp, start, min(recorded, end)))
            offsets[tp] = max(recorded, end)
    after = Ledger(
        group=batch.group,
        offsets=offsets,
        topic_ids={**known.topic_ids, **{topic: i for topic, i in batch.topic_ids.items() if i}},
        stream=batch.stream,
        seq=batch.seq,
        epoch=batch.epoch,
        void=known.void if batch.epoch == known.epoch else {},
    )
    return Verdict(
        ledger=after,
        drop=tuple(drop),
        skipped=tuple(skipped),
        refused=tuple(refused),
        recreated=tuple(sorted(recreated)),
    )


def behind(batch: StreamOffset, ledger: Ledger | None) -> list[OffsetRange]:
    """The parts of a batch that the ledger does not cover; none, if the batch is in the table.

    Topics that were created anew since are left out, and all of a batch of before a reset: their old offsets are no
    longer comparable.
    """
    known = ledger if ledger is not None else Ledger(group=batch.group)
    if _is_void(batch, known):
        return []
    recreated = _recreated(batch, known)
    missing = []
    for r in batch.batch():
        recorded = known.offsets.get(r.tp, 0)
        if r.tp.topic not in recreated and recorded < r.end:
            missing.append(OffsetRange(r.tp, max(r.start, recorded), r.end))
    return missing


def _is_void(batch: StreamOffset, ledger: Ledger | None) -> bool:
    """Whether the batch was planned before a reset that the table knows of."""
    return ledger is not None and batch.epoch < ledger.epoch


def _recreated(batch: StreamOffset, ledger: Ledger) -> set[str]:
    # A broker that knows no topic ids leaves them empty, and then nothing can be told: the topic counts as the same.
    return {
        topic
        for topic, now in batch.topic_ids.items()
        if now and ledger.topic_ids.get(topic) and ledger.topic_ids[topic] != now
    }


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
    """Nothing may be written: someone moved the group back, below what the table holds."""

    group: str
    positions: tuple[Refusal, ...]


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


Decision = Recorded | Refused | Unaware | Mixed | Write


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


def conflict(table: str, decision: Refused | Unaware | Mixed, batch_id: int) -> LedgerConflict:
    """The error for a batch that may not be written, with what settles it."""
    match decision:
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


def _number(value: object, *, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"number {value!r}")
    return value
