"""The values that every part of the source speaks about.

Runs in: every process. Deliberately absent: behaviour, I/O, anything of Kafka or Spark. They are named tuples
because a plan over 100,000 partitions makes and compares millions of them.
"""

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple


class TopicPartition(NamedTuple):
    """One partition of one topic. "Partition" is always Kafka's word here; Spark's work is cut into lists of ranges."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class OffsetRange(NamedTuple):
    """The records [start, end) of one partition; an offset is always the *next* to read, so ``end=7`` means up to 6."""

    tp: TopicPartition
    start: int
    end: int

    @property
    def size(self) -> int:
        """Offsets in the range; an upper bound of its records (compaction and transaction markers leave gaps)."""
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.tp}[{self.start},{self.end})"


class Piece(NamedTuple):
    """What one task reads: ranges of different partitions, and their topics and leaders as they were planned."""

    ranges: tuple[OffsetRange, ...] = ()
    topic_ids: Mapping[str, str] = {}
    """The topics as they were planned: one that is deleted and made anew has another id (KIP-516)."""
    leader_epochs: Mapping[TopicPartition, int] = {}
    """Of the leaders that reported the ends of the ranges: a log that was cut goes on with records of a later one
    (KIP-320)."""

    @classmethod
    def of(
        cls, ranges: Iterable[OffsetRange], topic_ids: Mapping[str, str], leader_epochs: Mapping[TopicPartition, int]
    ) -> "Piece":
        """These ranges, with what of the ids and epochs concerns them."""
        ranges = tuple(ranges)
        return cls(
            ranges,
            {topic: topic_ids[topic] for topic in {r.tp.topic for r in ranges} & topic_ids.keys()},
            {tp: leader_epochs[tp] for tp in {r.tp for r in ranges} & leader_epochs.keys()},
        )


class StartAt(NamedTuple):
    """The start of one partition, as a question to the broker.

    ``value`` is the offset (kind "offset") or milliseconds since the epoch (kind "time": the first record that is not
    older); it is 0 for the other kinds.
    """

    kind: Literal["earliest", "latest", "offset", "time"]
    value: int = 0


EARLIEST = StartAt("earliest")
LATEST = StartAt("latest")
