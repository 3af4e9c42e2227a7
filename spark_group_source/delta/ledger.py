"""The ledger: the next offset of every partition, kept in the table itself.

Runs in: the user's driver, the command line. Deliberately absent: rows, Kafka, and any decision by time or by the
content of rows. The offsets of a batch come from Spark's checkpoint, the ledger from the table's log, and
:func:`judge` compares the two without any I/O.

A table keeps one ledger per group, as the configuration of the Delta metadata domain ``spark-group-source.<group>``::

    {"seq": 17, "stream": "9f2c", "topics": {"orders": {"id": "<topic id>", "offsets": {"0": 250, "1": 40}}}, "v": 1}

It survives log cleanup and checkpoints of the table. It does *not* follow the rows: after ``RESTORE``, ``REPLACE`` or a
``DELETE`` the ledger still says what was once written. ``spark-group reset`` with ``--table`` moves it back.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from spark_group_source.delta import deltalog
from spark_group_source.errors import LedgerConflict
from spark_group_source.group.offsets import StreamOffset
from spark_group_source.model import OffsetRange, TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VERSION = 1

DOMAIN_PREFIX = "spark-group-source."

SHOWN_MAX = 5
"""How many partitions an error or a log line lists; the ``fields`` of an error carry all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What a table holds of one group: ``offsets`` are the next ones to write, for every partition ever seen.

    ``stream`` and ``seq`` name the batch that wrote it last; an operator's reset leaves ``stream`` empty.
    ``table_version`` is the version of the table it was read from, or -1.
    """

    group: str
    offsets: Mapping[TopicPartition, int] = field(default_factory=dict)
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    stream: str = ""
    seq: int = -1
    table_version: int = -1

    def to_json(self) -> str:
        """The domain's configuration: keys sorted, integers only."""
        topics: dict[str, dict[str, Any]] = {}
        for topic in sorted({tp.topic for tp in self.offsets} | set(self.topic_ids)):
            topics[topic] = {"id": self.topic_ids.get(topic, ""), "offsets": {}}
        for tp, offset in sorted(self.offsets.items()):
            topics[tp.topic]["offsets"][str(tp.partition)] = offset
        doc = {"seq": self.seq, "stream": self.stream, "topics": topics, "v": VERSION}
        return json.dumps(doc, separators=(",", ":"))

    @classmethod
    def from_json(cls, group: str, text: str, *, table_version: int = -1) -> "Ledger":
        """Read a domain's configuration.

        Raises:
            LedgerConflict: it is damaged, or of a newer release. Nothing is assumed in its place.
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
                TopicPartition(topic, int(partition)): _offset(offset)
                for topic, entry in doc["topics"].items()
                for partition, offset in entry["offsets"].items()
            }
            ids = {topic: str(entry["id"]) for topic, entry in doc["topics"].items()}
            return cls(
                group=group,
                offsets=offsets,
                topic_ids=ids,
                stream=str(doc["stream"]),
                seq=_offset(doc["seq"], least=-1),
                table_version=table_version,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise LedgerConflict(
                f"the ledger of group {group!r} in the table is damaged ({exc!r}): {text[:200]}. It is the metadata "
                f"domain {DOMAIN_PREFIX + group!r}; `spark-group reset --group {group} --table T` writes it anew",
                group=group,
            ) from exc

    def same_position(self, other: "Ledger") -> bool:
        """Whether both stand at the same offsets of the same topics, whoever wrote them."""
        return self.offsets == other.offsets and self.topic_ids == other.topic_ids


class Refusal(NamedTuple):
    """A partition that someone else moved to ``start``, below the ledger's ``recorded`` offset."""

    tp: TopicPartition
    start: int
    recorded: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What :func:`judge` found. The batch may be written only if ``refused`` is empty, and without ``drop``.

    ``drop``: ranges that the table already holds. ``skipped``: ranges between the ledger and the batch that another
    member of the group had. ``recreated``: topics whose id changed, so that their offsets start afresh. ``ledger``: the
    ledger once the batch is written.
    """

    ledger: Ledger
    drop: tuple[OffsetRange, ...] = ()
    skipped: tuple[OffsetRange, ...] = ()
    refused: tuple[Refusal, ...] = ()
    recreated: tuple[str, ...] = ()


def judge(batch: StreamOffset, ledger: Ledger | None) -> Verdict:
    """Compare a batch, range by range ``[from, until)``, with the next offset L that the table recorded.

    - L unknown, or from == L: the records are new.
    - from > L: another member of the group had [L, from) in between.
    - from < L and the position came from a commit that no stream of ours made: refused. An operator's rewind must move
      Kafka and the ledger together, or the table would get records twice.
    - from < L otherwise: the echo to Kafka had not arrived when a checkpoint was lost, or another query of the group
      wrote first. [from, min(L, until)) is in the table; the rest is new.

    The resulting ledger never stands below the given one, but for topics that were created anew.
    """
    known = ledger if ledger is not None else Ledger(group=batch.group)
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

    Topics that were created anew since are left out: their old offsets are no longer comparable.
    """
    known = ledger if ledger is not None else Ledger(group=batch.group)
    recreated = _recreated(batch, known)
    missing = []
    for r in batch.batch():
        recorded = known.offsets.get(r.tp, 0)
        if r.tp.topic not in recreated and recorded < r.end:
            missing.append(OffsetRange(r.tp, max(r.start, recorded), r.end))
    return missing


def _recreated(batch: StreamOffset, ledger: Ledger) -> set[str]:
    # A broker that knows no topic ids leaves them empty, and then nothing can be told: the topic counts as the same.
    return {
        topic
        for topic, now in batch.topic_ids.items()
        if now and ledger.topic_ids.get(topic) and ledger.topic_ids[topic] != now
    }


def conflict(table: str, group: str, refused: Sequence[Refusal]) -> LedgerConflict:
    """The error for positions that someone moved below the ledger, with the two commands that settle it."""
    listed = "; ".join(f"{r.tp}: Kafka says {r.start}, the table holds up to {r.recorded}" for r in refused[:SHOWN_MAX])
    more = f" (and {len(refused) - SHOWN_MAX} more partitions)" if len(refused) > SHOWN_MAX else ""
    return LedgerConflict(
        f"group {group!r} was moved back by someone else, below what table {table} already holds: {listed}{more}. "
        "Reading on would write these records twice, so nothing was written. Stop the query, then either continue "
        f"where the table stands: `spark-group reset --group {group} --to-ledger --table {table}`, or write them "
        "again on purpose, by moving Kafka and the ledger together: "
        f"`spark-group reset --group {group} --table {table}` with the position you want",
        table=table,
        group=group,
        refused=[(r.tp.topic, r.tp.partition, r.start, r.recorded) for r in refused],
    )


def shown(ranges: Iterable[OffsetRange]) -> str:
    """A few ranges for a log line."""
    listed = list(ranges)
    more = f" and {len(listed) - SHOWN_MAX} more" if len(listed) > SHOWN_MAX else ""
    return ", ".join(map(str, listed[:SHOWN_MAX])) + more


def read_ledger(spark: "SparkSession", table: str, group: str) -> Ledger | None:
    """The ledger of one group in a table (a path or a table name), or None if the group never wrote there.

    Raises:
        OptionError: there is no such Delta table, or this session has no Delta classes (Spark Connect).
        LedgerConflict: the ledger is damaged or of a newer release.
    """
    return in_snapshot(deltalog.open_table(spark, table).snapshot(), group)


def ledgers(spark: "SparkSession", table: str) -> list[Ledger]:
    """The ledgers of all groups that ever wrote to a table, sorted by group. Errors as in :func:`read_ledger`."""
    snapshot = deltalog.open_table(spark, table).snapshot()
    groups = sorted(d.removeprefix(DOMAIN_PREFIX) for d in snapshot.domains() if d.startswith(DOMAIN_PREFIX))
    return [found for found in (in_snapshot(snapshot, group) for group in groups) if found is not None]


def set_ledger(
    spark: "SparkSession",
    table: str,
    group: str,
    offsets: Mapping[TopicPartition, int | None],
    *,
    reason: str,
    topic_ids: Mapping[str, str] | None = None,
) -> Ledger:
    """Put the ledger of a group where an operator wants it, in one Delta commit that holds nothing else.

    Unlike a batch this may move it backwards, so only a stopped group's ledger should be set.

    Args:
        offsets: the next offset of each partition to set, or None to forget the partition; others stay as they are.
        reason: who asked for it and why; kept in the commit's ``userMetadata``.
        topic_ids: the topics' ids, where known; they are needed only for topics that the ledger has not seen.

    Raises:
        OptionError: there is no such Delta table, or this session has no Delta classes (Spark Connect).
        LedgerConflict: the ledger is damaged or newer, or other writers won every one of the bounded attempts.
    """
    handle = deltalog.open_table(spark, table)
    handle.ensure_domains()

    def attempt() -> Ledger:
        txn = handle.begin()
        old = in_snapshot(txn.snapshot, group) or Ledger(group=group)
        kept = {**old.offsets, **{tp: _offset(n) for tp, n in offsets.items() if n is not None}}
        new = Ledger(
            group=group,
            offsets={tp: n for tp, n in kept.items() if offsets.get(tp, n) is not None},
            topic_ids={**old.topic_ids, **(topic_ids or {})},
        )
        note = {"group": group, "ledger": json.loads(new.to_json()), "reason": reason, "v": VERSION}
        domain = {DOMAIN_PREFIX + group: new.to_json()}
        version = txn.commit_domains(domain, user_metadata=json.dumps(note, sort_keys=True))
        return Ledger.from_json(group, new.to_json(), table_version=version)

    return deltalog.retry_races(attempt, what=f"setting the ledger of group {group!r} in table {table}")


def in_snapshot(snapshot: deltalog.Snapshot, group: str) -> Ledger | None:
    """The ledger of a group in a version of the table, or None."""
    text = snapshot.domains().get(DOMAIN_PREFIX + group)
    return None if text is None else Ledger.from_json(group, text, table_version=snapshot.version)


def _offset(value: object, *, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"offset {value!r}")
    return value
