"""The offset of a batch as JSON: Spark keeps it in the checkpoint, ``DeltaSink`` in the table.

Runs in: the stream reader, the user's driver. Deliberately absent: arithmetic on offsets (``planner``, ``partitions``)
and I/O. ``docs/formats.md`` describes each member. Spark compares offsets as text, so the form is canonical: keys are
sorted, numbers are integers, and optional members are absent when empty.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from spark_group_source.errors import CheckpointMismatch
from spark_group_source.model import OffsetRange, TopicPartition

T = TypeVar("T")

VERSION = 1
UNKNOWN_EPOCH = -1
"""In ``leaders``: the leader epoch of this partition is unknown."""
SHOWN_CHARS_MAX = 200
"""How much of a damaged offset an error shows."""
RECREATED = -1
"""In ``truncated_after``, in place of a leader epoch: the log is that of a recreated topic."""
DIGEST_CHARS = 16
"""Characters of a digest of an offset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOffset:
    """A point of a stream: the batch that ends there, and the position of every assigned partition.

    The constant before batch 0 (:meth:`initial`) has no stream id.
    """

    group: str
    stream: str = ""
    """The stream id; empty in the constant before batch 0."""
    seq: int = -1
    """The number of the batch; -1 in the constant before batch 0."""
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    """By topic; a topic whose id is unknown is missing."""
    known: Mapping[str, int] = field(default_factory=dict)
    """By topic: the number of partitions when the stream first saw it. Later partitions start at their first record."""
    ranges: Mapping[TopicPartition, tuple[int, int]] = field(default_factory=dict)
    """``(from, until)`` of every partition that was assigned at the plan; equal where nothing is read."""
    reset_number: int = 0
    """The number of the last reset of the group that the plan knows; 0 before the first."""
    followed: frozenset[TopicPartition] = frozenset()
    """Partitions whose start came from a commit that no stream made."""
    started: frozenset[TopicPartition] = frozenset()
    """Partitions without a committed offset that start where ``startingOffsets`` says, after their first record."""
    behind: Mapping[TopicPartition, int] = field(default_factory=dict)
    """How many offsets before its start, or its uncommitted position, a partition was read in batches of this stream
    that Kafka may lack."""
    leader_epochs: Mapping[TopicPartition, int] = field(default_factory=dict)
    """The leader epochs under which the ends were read, and those of uncommitted positions, where known
    (:class:`data_loss.LeaderEpochs`)."""
    truncated_after: Mapping[TopicPartition, int] = field(default_factory=dict)
    """Partitions that went back because their log was truncated: the last leader epoch that was known before that; or
    RECREATED, because their topic was recreated."""
    lost_from: Mapping[TopicPartition, int] = field(default_factory=dict)
    """Partitions whose next records were gone: their position before that."""
    read_to: Mapping[TopicPartition, int] = field(default_factory=dict)
    """Partitions that a foreign commit moved back: how far they were read before. They are read up to where their log
    was truncated in between, if it was."""
    durable_to: Mapping[TopicPartition, int] = field(default_factory=dict)
    """Partitions that a foreign commit moved back inside batches of this stream: the end of these batches, until
    another batch reads up to it."""
    uncommitted: Mapping[TopicPartition, int] = field(default_factory=dict)
    """Positions of partitions that the batch does not have, and that may not be committed yet or are in
    ``durable_to``."""
    last_batches: Mapping[TopicPartition, tuple[int, int]] = field(default_factory=dict)
    """For some of those: the number of the last batch that read them, and the start of its range."""

    @classmethod
    def initial(cls, group: str) -> "StreamOffset":
        """The constant before batch 0. Spark requests it again on a replay, so it depends on nothing else."""
        return cls(group=group)

    @property
    def is_initial(self) -> bool:
        """Whether this is the constant before batch 0."""
        return not self.stream

    def batch(self) -> list[OffsetRange]:
        """The non-empty ranges of the batch that ends here, sorted."""
        return [OffsetRange(tp, a, b) for tp, (a, b) in sorted(self.ranges.items()) if a < b]

    @property
    def spans(self) -> Mapping[TopicPartition, tuple[int, int]]:
        """The ranges, each with the lost records before it: a position in such a span is at its end after the batch."""
        if not self.lost_from:
            return self.ranges
        return {tp: (min(a, self.lost_from.get(tp, a)) if a < b else a, b) for tp, (a, b) in self.ranges.items()}

    def of_topics(self, topics: Collection[str]) -> "StreamOffset":
        """The ranges of these topics, with what a sink needs to know about them: the offset of a part of the batch."""

        def of(values: Mapping[TopicPartition, T]) -> dict[TopicPartition, T]:
            return {tp: value for tp, value in values.items() if tp.topic in topics}

        return StreamOffset(
            group=self.group,
            stream=self.stream,
            seq=self.seq,
            topic_ids={topic: id_ for topic, id_ in self.topic_ids.items() if topic in topics},
            ranges=of(self.ranges),
            reset_number=self.reset_number,
            followed=frozenset(tp for tp in self.followed if tp.topic in topics),
            started=frozenset(tp for tp in self.started if tp.topic in topics),
            leader_epochs=of(self.leader_epochs),
            truncated_after=of(self.truncated_after),
        )

    def positions(self) -> dict[TopicPartition, int]:
        """The next offset of every partition that was assigned at the plan."""
        return {tp: until for tp, (_, until) in self.ranges.items()}

    def unlisted_topics(self, listed: Collection[str], is_subscribed: Callable[[str], bool]) -> list[str]:
        """The topics that the stream has positions of, and that are subscribed, without the listed ones."""
        read = {tp.topic for tp in (*self.positions(), *self.uncommitted)}
        return sorted(topic for topic in read if topic not in listed and is_subscribed(topic))

    def to_json_dict(self) -> dict[str, Any]:
        """The canonical form, with sorted keys: plain ``json.dumps`` keeps their order."""
        by_topic: dict[str, list[TopicPartition]] = {}
        for tp in self.ranges:
            by_topic.setdefault(tp.topic, []).append(tp)
        epochs = self.leader_epochs
        optional = {
            "durable_to": _nested(self.durable_to),
            "followed": _listed(self.followed),
            "last_batches": _nested(self.last_batches),
            "leaders": _nested({tp: epochs[tp] for tp in self.uncommitted if tp in epochs}),
            "lost_from": _nested(self.lost_from),
            "read_to": _nested(self.read_to),
            "reset": self.reset_number,
            "started": _listed(self.started),
            "truncated_after": _nested(self.truncated_after),
            "uncommitted": _nested(
                {tp: [at, self.behind[tp]] if tp in self.behind else at for tp, at in self.uncommitted.items()}
            ),
        }
        topics: dict[str, dict[str, Any]] = {}
        doc = {name: value for name, value in optional.items() if value}
        doc |= {"group": self.group, "seq": self.seq, "stream": self.stream, "topics": topics, "v": VERSION}
        for topic in sorted(by_topic.keys() | self.topic_ids.keys() | self.known.keys()):
            tps = sorted(by_topic.get(topic, ()))
            bounds = [self.ranges[tp] for tp in tps]
            behind = [self.behind.get(tp, 0) for tp in tps]
            entry: dict[str, Any] = {"behind": behind} if any(behind) else {}
            entry |= {"from": [start for start, _ in bounds]}
            entry |= {"id": self.topic_ids.get(topic, ""), "known": self.known.get(topic, 0)}
            leaders = [epochs.get(tp, UNKNOWN_EPOCH) for tp in tps]
            if any(epoch != UNKNOWN_EPOCH for epoch in leaders):
                entry["leaders"] = leaders if len(set(leaders)) > 1 else leaders[0]
            entry |= {"partitions": _runs(tp.partition for tp in tps), "read": [end - start for start, end in bounds]}
            topics[topic] = entry
        return dict(sorted(doc.items()))

    def to_json(self) -> str:
        """The canonical form as text without spaces; :class:`BatchKey` has a digest of it."""
        return json.dumps(self.to_json_dict(), separators=(",", ":"))


class BatchKey(NamedTuple):
    """Identifies a batch of a stream."""

    seq: int
    """Its number in the stream."""
    digest: str
    """A digest of its offset, which distinguishes two batches of one number."""

    @classmethod
    def of(cls, offset: StreamOffset) -> "BatchKey":
        """The key of the batch that ends at this offset."""
        return cls(offset.seq, hashlib.sha256(offset.to_json().encode()).hexdigest()[:DIGEST_CHARS])


def parse(document: str | Mapping[str, Any]) -> StreamOffset:
    """Read an offset from its JSON text, or from the dict that Spark passes.

    Raises:
        CheckpointMismatch: it is not JSON, not an offset of this source, of another version, or damaged. The message
            shows the faulty part; no part of a damaged offset is ever used.
    """
    doc: Any = document
    if isinstance(document, str):
        try:
            doc = json.loads(document)
        except ValueError as exc:
            raise CheckpointMismatch(f"the offset in the checkpoint is not JSON: {_short(document)}") from exc
    if not isinstance(doc, Mapping) or "v" not in doc or "group" not in doc:
        raise CheckpointMismatch(
            f"the checkpoint's offset was not written by kafka-group: {_short(doc)}. A checkpoint belongs to one "
            "source: give this query its own checkpointLocation. To continue where a query of Spark's Kafka connector "
            "stopped, see `spark-group migrate --help`"
        )
    if doc["v"] != VERSION:
        raise CheckpointMismatch(
            f"the checkpoint's offset has format version {doc['v']!r}, and this release reads version {VERSION} only. "
            "Use the release that wrote it, or a newer one",
            found=doc["v"],
            known=VERSION,
        )
    try:
        return _parse(doc)
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise CheckpointMismatch(f"the checkpoint's offset is damaged ({exc!r}): {_short(doc)}") from exc


def _parse(doc: Mapping[str, Any]) -> StreamOffset:
    ranges: dict[TopicPartition, tuple[int, int]] = {}
    ids: dict[str, str] = {}
    known: dict[str, int] = {}
    leaders = _numbers(doc.get("leaders", {}))
    behind: dict[TopicPartition, int] = {}
    for topic, entry in doc["topics"].items():
        if entry["id"]:  # empty for a topic of which no partition was assigned yet
            ids[topic] = str(entry["id"])
        known[topic] = int(entry["known"])
        tps = [TopicPartition(topic, p) for p in _members(entry["partitions"], len(entry["from"]))]
        epochs = entry.get("leaders", UNKNOWN_EPOCH)
        if type(epochs) is int:
            epochs = [epochs] * len(tps)
        late = entry.get("behind", [0] * len(tps))
        for tp, start, size, epoch, count in zip(tps, entry["from"], entry["read"], epochs, late, strict=True):
            are_numbers = type(start) is type(size) is type(epoch) is type(count) is int
            if not are_numbers or size < 0 or not 0 <= count <= start:
                raise ValueError(f"range [{start!r}, +{size!r}), leader epoch {epoch!r}, behind {count!r} of {tp}")
            if count:
                behind[tp] = count
            ranges[tp] = (start, start + size)
            if epoch != UNKNOWN_EPOCH:
                leaders[tp] = epoch
    uncommitted: dict[TopicPartition, int] = {}
    for tp, value in _flat(doc.get("uncommitted", {})).items():
        at, count = value if isinstance(value, list) else (value, 0)
        uncommitted[tp] = int(at)
        if count:
            behind[tp] = int(count)
    stream, seq = doc["stream"], doc["seq"]
    if not isinstance(stream, str) or type(seq) is not int or bool(stream) != (seq >= 0):
        raise ValueError(f"stream {stream!r}, seq {seq!r}")
    reset_number = doc.get("reset", 0)
    if type(reset_number) is not int or reset_number < 0:
        raise ValueError(f"reset {reset_number!r}")
    return StreamOffset(
        group=str(doc["group"]),
        stream=stream,
        seq=seq,
        topic_ids=ids,
        known=known,
        ranges=ranges,
        reset_number=reset_number,
        followed=_partitions(doc.get("followed", {})),
        started=_partitions(doc.get("started", {})),
        behind=behind,
        leader_epochs=leaders,
        truncated_after=_numbers(doc.get("truncated_after", {})),
        lost_from=_numbers(doc.get("lost_from", {})),
        read_to=_numbers(doc.get("read_to", {})),
        durable_to=_numbers(doc.get("durable_to", {})),
        uncommitted=uncommitted,
        last_batches={tp: (int(seq), int(start)) for tp, (seq, start) in _flat(doc.get("last_batches", {})).items()},
    )


def _runs(partitions: Iterable[int]) -> list[list[int]]:
    """The first and the last number of each run of consecutive numbers, for sorted numbers."""
    found: list[list[int]] = []
    for partition in partitions:
        if found and found[-1][1] == partition - 1:
            found[-1][1] = partition
        else:
            found.append([partition, partition])
    return found


def _members(runs: list[list[int]], count: int) -> list[int]:
    """The inverse of :func:`_runs`. Raises ValueError if these are not ``count`` numbers."""
    if sum(last - first + 1 for first, last in runs) != count or any(first > last for first, last in runs):
        raise ValueError(f"partitions {runs!r} of {count} ranges")
    return [partition for first, last in runs for partition in range(first, last + 1)]


def _listed(tps: Iterable[TopicPartition]) -> dict[str, list[int]]:
    """Partitions by topic, sorted."""
    found: dict[str, list[int]] = {}
    for tp in sorted(tps):
        found.setdefault(tp.topic, []).append(tp.partition)
    return found


def _partitions(listed: Mapping[str, Iterable[Any]]) -> frozenset[TopicPartition]:
    """The inverse of :func:`_listed`."""
    return frozenset(TopicPartition(topic, int(p)) for topic, partitions in listed.items() for p in partitions)


def _nested(values: Mapping[TopicPartition, Any]) -> dict[str, dict[str, Any]]:
    """Values by topic and partition, sorted."""
    found: dict[str, dict[str, Any]] = {}
    for tp, value in values.items():
        found.setdefault(tp.topic, {})[str(tp.partition)] = value
    return {topic: dict(sorted(found[topic].items())) for topic in sorted(found)}


def _flat(nested: Mapping[str, Mapping[str, Any]]) -> dict[TopicPartition, Any]:
    """The inverse of :func:`_nested`."""
    return {TopicPartition(t, int(p)): value for t, values in nested.items() for p, value in values.items()}


def _numbers(nested: Mapping[str, Mapping[str, Any]]) -> dict[TopicPartition, int]:
    return {tp: int(number) for tp, number in _flat(nested).items()}


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "…"
