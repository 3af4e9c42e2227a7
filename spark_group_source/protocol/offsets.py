"""The offset JSON: what Spark keeps in its checkpoint and the sink keeps in the table.

Runs in: the stream reader, the user's driver. Deliberately absent: arithmetic on offsets (``plan``,
``positions``) and any I/O.

::

    {"group": "etl", "seq": 17, "stream": "9f2c", "topics": {"orders": {"id": "<topic id>", "known": 4,
     "ranges": {"0": [100, 250], "1": [40, 40]}}}, "v": 1}

``ranges`` lists every partition held when the batch was planned, as ``[from, until)``: the batch that *ends* at this
offset reads exactly these, whatever came before it, so a replay never depends on another offset. ``[n, n]`` is a
position where nothing was read. ``known`` is the number of partitions the topic had when the stream first saw it: the
ones beyond it are new and start at their beginning, whatever ``startingOffsets`` says. Eight optional members:
``leaders`` of a topic has, in the order of its ranges, the leader epochs under which their ends were planned
(:class:`data_loss.LeaderEpochs`), -1 where they were not told; ``cut`` has, for partitions that go back to where their
log was cut, the position that they had before; ``lost`` has it for those that begin after it, because their next
records were gone; ``began`` lists partitions of which the group had no offset, so that they begin where
``startingOffsets`` says, and that is not at their first record; ``epoch`` counts the resets of the group that this plan
knows of (:mod:`names`); ``followed`` lists the partitions whose start followed a commit that no stream of ours made (an
operator's reset, an ordinary consumer);
``owed`` has the next offset of partitions that were not held at the plan although Kafka may not
know yet how far the batches before it came; and ``since`` has, for some of them, the number of the last batch that read
them, and where it began.

Spark compares offsets as text, so the form is canonical: keys sorted, integers only, optional members absent when
empty.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spark_group_source.errors import CheckpointMismatch
from spark_group_source.model import OffsetRange, TopicPartition

VERSION = 1
NOT_TOLD = -1
"""In ``leaders``: nobody told the leader epoch of this partition."""
SHOWN_CHARS_MAX = 200
"""Of a damaged offset in an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOffset:
    """One point of a stream: the batch that ends there, and with it the position of every held partition.

    ``stream`` is empty and ``seq`` is -1 only in the constant that stands before batch 0 (:meth:`initial`).
    """

    group: str
    stream: str = ""
    seq: int = -1
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    known: Mapping[str, int] = field(default_factory=dict)
    ranges: Mapping[TopicPartition, tuple[int, int]] = field(default_factory=dict)
    epoch: int = 0
    followed: frozenset[TopicPartition] = frozenset()
    began: frozenset[TopicPartition] = frozenset()
    leader_epochs: Mapping[TopicPartition, int] = field(default_factory=dict)
    cut: Mapping[TopicPartition, int] = field(default_factory=dict)
    lost: Mapping[TopicPartition, int] = field(default_factory=dict)
    owed: Mapping[TopicPartition, int] = field(default_factory=dict)
    since: Mapping[TopicPartition, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def initial(cls, group: str) -> "StreamOffset":
        """The constant before batch 0. Spark asks for it again on a replay, so it must never depend on anything."""
        return cls(group=group)

    @property
    def is_initial(self) -> bool:
        return not self.stream

    def batch(self) -> list[OffsetRange]:
        """The ranges to read for the batch that ends here, without the empty ones, sorted."""
        return [OffsetRange(tp, a, b) for tp, (a, b) in sorted(self.ranges.items()) if a < b]

    @property
    def takes(self) -> Mapping[TopicPartition, tuple[int, int]]:
        """The ranges, each with the records before it that were gone: who stands there stands behind it afterwards."""
        if not self.lost:
            return self.ranges
        return {tp: (min(a, self.lost.get(tp, a)) if a < b else a, b) for tp, (a, b) in self.ranges.items()}

    def positions(self) -> dict[TopicPartition, int]:
        """The next offset of every partition held at the plan."""
        return {tp: until for tp, (_, until) in self.ranges.items()}

    def to_json_dict(self) -> dict[str, Any]:
        """The canonical form, with its keys in sorted order so that plain ``json.dumps`` keeps it."""
        by_topic: dict[str, dict[str, tuple[int, int]]] = {}
        leaders: dict[str, dict[str, int]] = {}
        for tp, bounds in self.ranges.items():
            partition = str(tp.partition)
            by_topic.setdefault(tp.topic, {})[partition] = bounds
            if (epoch := self.leader_epochs.get(tp)) is not None:
                leaders.setdefault(tp.topic, {})[partition] = epoch
        doc: dict[str, Any] = {"began": _listed(self.began)} if self.began else {}
        if self.cut:
            doc["cut"] = _nested(self.cut)
        if self.epoch:
            doc["epoch"] = self.epoch
        if self.followed:
            doc["followed"] = _listed(self.followed)
        doc["group"] = self.group
        if self.lost:
            doc["lost"] = _nested(self.lost)
        if self.owed:
            doc["owed"] = _nested(self.owed)
        doc["seq"] = self.seq
        if self.since:
            doc["since"] = _nested(self.since)
        doc["stream"] = self.stream
        doc["topics"] = {}
        for topic in sorted(by_topic.keys() | self.topic_ids.keys() | self.known.keys()):
            entry: dict[str, Any] = {"id": self.topic_ids.get(topic, ""), "known": self.known.get(topic, 0)}
            ranges = dict(sorted(by_topic.get(topic, {}).items()))
            if topic in leaders:
                entry["leaders"] = [leaders[topic].get(partition, NOT_TOLD) for partition in ranges]
            entry["ranges"] = ranges
            doc["topics"][topic] = entry
        doc["v"] = VERSION
        return doc

    def to_json(self) -> str:
        return json.dumps(self.to_json_dict(), separators=(",", ":"))


def parse(document: str | Mapping[str, Any]) -> StreamOffset:
    """Read an offset from its JSON text or from the dict that Spark hands back.

    Raises:
        CheckpointMismatch: it is not JSON, not an offset of this source, of another version, or damaged. The message
            shows the part at fault; no part of a damaged offset is ever used.
    """
    doc: Any = document
    if isinstance(document, str):
        try:
            doc = json.loads(document)
        except ValueError as exc:
            raise CheckpointMismatch(f"the offset in the checkpoint is not JSON: {_short(document)}") from exc
    if not isinstance(doc, Mapping) or "v" not in doc or "group" not in doc:
        raise CheckpointMismatch(
            f"the checkpoint's offset is not one of kafka-group: {_short(doc)}. A checkpoint belongs to one source; "
            "give this query a checkpointLocation of its own. To take over from Spark's Kafka connector: spark-group "
            "migrate"
        )
    if doc["v"] != VERSION:
        raise CheckpointMismatch(
            f"the checkpoint's offset has format version {doc['v']!r}; this release reads version {VERSION}. "
            "Run the release that wrote it, or a newer one",
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
    leaders: dict[TopicPartition, int] = {}
    for topic, entry in doc["topics"].items():
        if entry["id"]:  # empty for a topic that was known before any of its partitions was held
            ids[topic] = str(entry["id"])
        known[topic] = int(entry["known"])
        if "leaders" in entry:
            for partition, epoch in zip(sorted(entry["ranges"]), entry["leaders"], strict=True):
                if epoch != NOT_TOLD:
                    leaders[TopicPartition(topic, int(partition))] = int(epoch)
        for partition, pair in entry["ranges"].items():
            a, b = pair
            if type(a) is not int or type(b) is not int or not 0 <= a <= b:
                raise ValueError(f"range {pair!r} of {topic}-{partition}")
            ranges[TopicPartition(topic, int(partition))] = (a, b)
    stream, seq = doc["stream"], doc["seq"]
    if not isinstance(stream, str) or type(seq) is not int or bool(stream) != (seq >= 0):
        raise ValueError(f"stream {stream!r}, seq {seq!r}")
    epoch = doc.get("epoch", 0)
    if type(epoch) is not int or epoch < 0:
        raise ValueError(f"epoch {epoch!r}")
    return StreamOffset(
        group=str(doc["group"]),
        stream=stream,
        seq=seq,
        topic_ids=ids,
        known=known,
        ranges=ranges,
        epoch=epoch,
        followed=_partitions(doc.get("followed", {})),
        began=_partitions(doc.get("began", {})),
        leader_epochs=leaders,
        cut=_numbers(doc.get("cut", {})),
        lost=_numbers(doc.get("lost", {})),
        owed=_numbers(doc.get("owed", {})),
        since={tp: (int(seq), int(start)) for tp, (seq, start) in _flat(doc.get("since", {})).items()},
    )


def _listed(tps: Iterable[TopicPartition]) -> dict[str, list[int]]:
    """By topic, in sorted order."""
    found: dict[str, list[int]] = {}
    for tp in sorted(tps):
        found.setdefault(tp.topic, []).append(tp.partition)
    return found


def _partitions(listed: Mapping[str, Iterable[Any]]) -> frozenset[TopicPartition]:
    """The inverse."""
    return frozenset(TopicPartition(topic, int(p)) for topic, partitions in listed.items() for p in partitions)


def _nested(values: Mapping[TopicPartition, Any]) -> dict[str, dict[str, Any]]:
    """By topic and partition, in sorted order."""
    found: dict[str, dict[str, Any]] = {}
    for tp, value in values.items():
        found.setdefault(tp.topic, {})[str(tp.partition)] = value
    return {topic: dict(sorted(found[topic].items())) for topic in sorted(found)}


def _flat(nested: Mapping[str, Mapping[str, Any]]) -> dict[TopicPartition, Any]:
    """The inverse."""
    return {TopicPartition(t, int(p)): value for t, values in nested.items() for p, value in values.items()}


def _numbers(nested: Mapping[str, Mapping[str, Any]]) -> dict[TopicPartition, int]:
    return {tp: int(number) for tp, number in _flat(nested).items()}


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "…"
