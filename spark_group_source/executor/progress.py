"""How far a reading task is: each range, and how much one poll may bring.

Runs in: executor workers. Deliberately absent: what moves it (``ranges``).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from spark_group_source.answers import CODES
from spark_group_source.executor.records import BATCH_BYTES_MAX, BATCH_ROWS_MAX, Event, Ints
from spark_group_source.model import TopicPartition

ASSUMED_RECORD_BYTES = 16 * 1024
"""Size taken for a record until the first ones were seen; it bounds the first poll to 1,024 records."""
DAMAGED = frozenset({CODES["_BAD_MSG"], CODES["_NOT_IMPLEMENTED"]})
"""A batch of records whose checksum is wrong. librdkafka leaves it out and goes on behind it, or in its middle, and
there it finds a format that it does not know."""


@dataclass(slots=True)
class Progress:
    """One range."""

    position: int
    end: int
    looked_s: float
    """When it last moved, or was asked about."""
    stopped: bool = False
    """The client gave it up: it needs a new start."""
    torn: bool = False
    """A batch came damaged: what its client gives behind it is not next. It needs a new start, too."""
    at_eof: bool = False
    """What can be read of the log ends here."""
    held: bool = False
    """And the log itself covers the plan: a transaction is open."""


def tear(left: Mapping[TopicPartition, Progress], events: Iterable[Event]) -> None:
    """Nothing is taken of a partition any more until what came damaged is fetched again."""
    for event in events:
        if event.code in DAMAGED and event.tp is not None and event.tp in left:
            left[event.tp].torn = True


class RecordSize:
    """How large records are, as far as they were seen."""

    def __init__(self) -> None:
        self._bytes = float(ASSUMED_RECORD_BYTES)

    def see(self, sizes: Ints) -> None:
        if len(sizes):
            self._bytes = max(1.0, float(sizes.mean()))

    def rows_max(self, left: int) -> int:
        """How many rows one poll may bring where so many are left."""
        return max(1, min(left, BATCH_ROWS_MAX, int(BATCH_BYTES_MAX / self._bytes)))
