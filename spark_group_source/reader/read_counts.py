"""What one try of a task read, from where, and what it skipped.

Runs in: executor workers. Deliberately absent: why records count as lost (``ranges``), who is told of it (``tasks``).
"""

import logging
from collections import Counter
from typing import NamedTuple

from spark_group_source.model import OffsetRange, TopicPartition

log = logging.getLogger(__name__)

RANGES_IN_WARNING_MAX = 100


class Lost(NamedTuple):
    """Planned offsets that were skipped, and why."""

    range: OffsetRange
    reason: str


class Tally:
    """What one try of a task read and skipped."""

    def __init__(self) -> None:
        self.memory: Counter[TopicPartition] = Counter()
        """Rows that its agent had in memory."""
        self.brokers: Counter[TopicPartition] = Counter()
        """Rows that brokers gave."""
        self._lost: list[Lost] = []
        self._ended = False

    def skip(self, tp: TopicPartition, start: int, end: int, reason: str) -> None:
        """These offsets are gone. Each is at most one record: compaction and transaction markers leave offsets without
        one."""
        if start < end:
            self._lost.append(Lost(OffsetRange(tp, start, end), reason))

    def end(self) -> None:
        """All that was planned is read or skipped; one warning tells what was skipped."""
        self._ended = True
        if not (joined := self.joined()):
            return
        named = [f"{lost.range} ({lost.range.size}): {lost.reason}" for lost in joined[:RANGES_IN_WARNING_MAX]]
        more = len(joined) - len(named)
        log.warning(
            "data loss: %d planned offsets were skipped, failOnDataLoss is false: %s%s",
            sum(lost.range.size for lost in joined),
            "; ".join(named),
            f"; and {more} more ranges" if more else "",
        )

    @property
    def lost(self) -> tuple[OffsetRange, ...]:
        """What was skipped, once that is sure: another try may find more of it."""
        return tuple(lost.range for lost in self.joined()) if self._ended else ()

    def joined(self) -> list[Lost]:
        """The ranges in order, neighbours put together."""
        found: list[Lost] = []
        for lost in sorted(self._lost):
            last = found[-1].range if found else None
            if last and (last.tp, last.end) == (lost.range.tp, lost.range.start) and found[-1].reason == lost.reason:
                found[-1] = Lost(OffsetRange(last.tp, last.start, lost.range.end), lost.reason)
            else:
                found.append(lost)
        return found
