"""Counts of one task attempt: rows by their source, and offsets that were skipped.

Runs in: executor workers. Deliberately absent: why records count as lost (``range_reader``), and the report to the
stream reader (``agents.task``).
"""

import logging
from collections import Counter
from typing import NamedTuple

from spark_group_source.model import OffsetRange, TopicPartition

log = logging.getLogger(__name__)

RANGES_IN_WARNING_MAX = 100


class SkippedRange(NamedTuple):
    """Planned offsets that were skipped, and the reason."""

    range: OffsetRange
    reason: str


class ReadCounts:
    """What one task attempt read and skipped."""

    def __init__(self) -> None:
        self.rows_from_agent: Counter[TopicPartition] = Counter()
        """Rows that came from the memory of the executor's agent."""
        self.rows_from_brokers: Counter[TopicPartition] = Counter()
        """Rows that were fetched from brokers."""
        self._skipped: list[SkippedRange] = []
        self._is_complete = False

    def skip(self, tp: TopicPartition, start: int, end: int, reason: str) -> None:
        """Count [start, end) as lost. An offset is at most one record; compaction and transaction markers leave
        offsets without one."""
        if start < end:
            self._skipped.append(SkippedRange(OffsetRange(tp, start, end), reason))

    def complete(self, group_id: str) -> None:
        """Note that every planned offset was read or skipped, and log one warning with the skipped ranges."""
        self._is_complete = True
        if not (merged := self.merged()):
            return
        named = [f"{one.range} ({one.range.size}): {one.reason}" for one in merged[:RANGES_IN_WARNING_MAX]]
        more = len(merged) - len(named)
        log.warning(
            "group %s: data loss: skipped %d planned offsets because failOnDataLoss is false: %s%s",
            group_id,
            sum(one.range.size for one in merged),
            "; ".join(named),
            f"; and {more} more ranges" if more else "",
        )

    @property
    def lost(self) -> tuple[OffsetRange, ...]:
        """The skipped ranges of a complete attempt; empty before, because a retry may skip other offsets."""
        return tuple(one.range for one in self.merged()) if self._is_complete else ()

    def merged(self) -> list[SkippedRange]:
        """The skipped ranges in order; adjacent ones with the same reason are merged."""
        found: list[SkippedRange] = []
        for one in sorted(self._skipped):
            last = found[-1].range if found else None
            if last and (last.tp, last.end) == (one.range.tp, one.range.start) and found[-1].reason == one.reason:
                found[-1] = SkippedRange(OffsetRange(last.tp, last.start, one.range.end), one.reason)
            else:
                found.append(one)
        return found
