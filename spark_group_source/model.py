"""The values that every part of the source speaks about.

Runs in: every process. Deliberately absent: behaviour, I/O, anything of Kafka or Spark. They are named tuples
because a plan over 100,000 partitions makes and compares millions of them.
"""

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


class StartAt(NamedTuple):
    """The start of one partition, as a question to the broker.

    ``value`` is the offset (kind "offset") or milliseconds since the epoch (kind "time": the first record that is not
    older); it is 0 for the other kinds.
    """

    kind: Literal["earliest", "latest", "offset", "time"]
    value: int = 0


EARLIEST = StartAt("earliest")
LATEST = StartAt("latest")
