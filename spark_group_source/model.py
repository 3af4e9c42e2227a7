"""Values that all parts of the source use.

Runs in: every process. Deliberately absent: behaviour, I/O, the libraries of Kafka and Spark. They are named tuples,
because a plan over 100,000 partitions creates and compares millions of them."""

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple


class TopicPartition(NamedTuple):
    """One partition of a topic. "Partition" always means Kafka's; what a Spark task reads is a :class:`Piece`."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class Identity(NamedTuple):
    """A consumer's identity in its group, which the broker checks at every commit."""

    generation: int
    """The group generation (classic) or the member epoch (KIP-848)."""
    member: str
    """The member id."""
    metadata: bytes
    """The consumer group metadata as the client library serialises it, for transactions."""


class OffsetRange(NamedTuple):
    """The offsets [start, end) of one partition: ``end`` is the next offset after the range."""

    tp: TopicPartition
    start: int
    end: int

    @property
    def size(self) -> int:
        """The number of offsets; an upper bound of the records, because compaction and transaction markers leave
        gaps."""
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.tp}[{self.start},{self.end})"


class Piece(NamedTuple):
    """What one task reads: ranges of different partitions, and their topic ids and leader epochs in the plan."""

    ranges: tuple[OffsetRange, ...] = ()
    topic_ids: Mapping[str, str] = {}
    """The planned ids of topics. A topic that is deleted and recreated has another id (KIP-516)."""
    leader_epochs: Mapping[TopicPartition, int] = {}
    """The epochs of the leaders that reported the ends of the ranges. After a truncation, the log continues with
    records of a higher epoch (KIP-320)."""

    @classmethod
    def of(
        cls, ranges: Iterable[OffsetRange], topic_ids: Mapping[str, str], leader_epochs: Mapping[TopicPartition, int]
    ) -> "Piece":
        """Build a piece of these ranges, with the ids and epochs of their topics and partitions only."""
        ranges = tuple(ranges)
        return cls(
            ranges,
            {topic: topic_ids[topic] for topic in {r.tp.topic for r in ranges} & topic_ids.keys()},
            {tp: leader_epochs[tp] for tp in {r.tp for r in ranges} & leader_epochs.keys()},
        )


class TaskCounts(NamedTuple):
    """What one attempt of a task read, as it reports it to the run. ``reader.range_reader`` counts it."""

    rows_from_memory: Mapping[TopicPartition, int] = {}
    """Rows that came from the memory of the executor's agent."""
    rows_from_brokers: Mapping[TopicPartition, int] = {}
    """Rows that were fetched from brokers."""
    skipped: tuple[OffsetRange, ...] = ()
    """Planned offsets whose records were gone; empty if the attempt did not finish, because a retry may skip others."""
    bytes: Mapping[str, int] = {}
    """By topic: key, value and included header bytes of all these rows."""


class StartAt(NamedTuple):
    """The starting position of one partition."""

    kind: Literal["earliest", "latest", "offset", "time"]
    """"time": the first record with this timestamp or a later one."""
    value: int = 0
    """The offset (kind "offset") or milliseconds since the epoch (kind "time"); otherwise 0."""


EARLIEST = StartAt("earliest")
LATEST = StartAt("latest")


NO_TOPIC_ID = "A" * 22
"""The library's text of the zero id, with which brokers without topic ids answer (before Kafka 2.8)."""


def topic_id(text: str) -> str:
    """The id of a topic; empty if its brokers have no ids."""
    return "" if text == NO_TOPIC_ID else text
