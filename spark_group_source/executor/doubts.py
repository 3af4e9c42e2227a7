"""What was told that may be wrong, and what of it is believed; and the records that are lost for it.

Runs in: executor workers. Deliberately absent: asking (``ranges``), what codes mean (``answers``), a clock.
"""

import logging
from collections.abc import Hashable
from typing import NamedTuple

from spark_group_source.model import OffsetRange, TopicPartition

log = logging.getLogger(__name__)

GRACE_S = 3.0
"""How long brokers must have told the same before it is believed that a topic is gone or another one, that a log is
short, or that we are refused: a broker that just started, and a new leader, can say each of these for a moment."""
TOLD_MIN = 2
"""How often, at least."""
RANGES_IN_WARNING_MAX = 100


class Doubts:
    """Suspicions by what they are about: each since when, and how often it was told."""

    def __init__(self) -> None:
        self._told: dict[Hashable, tuple[float, int]] = {}

    def hear(self, what: Hashable, now_s: float) -> bool:
        """It was told (again). Returns whether it is believed now."""
        since_s, told = self._told.get(what, (now_s, 0))
        self._told[what] = since_s, told + 1
        return told + 1 >= TOLD_MIN and now_s - since_s >= GRACE_S

    def forget(self, *what: Hashable) -> None:
        """Something else was told, or happened."""
        for one in what:
            self._told.pop(one, None)

    def since_s(self, what: Hashable) -> float | None:
        return self._told[what][0] if what in self._told else None


class Lost(NamedTuple):
    """Planned offsets that were skipped, and why."""

    range: OffsetRange
    reason: str


class Losses:
    """What one task skipped, told in one warning when it is at its end.

    An offset is at most one record: compaction and transaction markers leave offsets without one.
    """

    def __init__(self) -> None:
        self._lost: list[Lost] = []

    def add(self, tp: TopicPartition, start: int, end: int, reason: str) -> None:
        if start < end:
            self._lost.append(Lost(OffsetRange(tp, start, end), reason))

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

    @property
    def offsets(self) -> int:
        """How many were skipped."""
        return sum(lost.range.size for lost in self._lost)

    def warn(self) -> None:
        joined = self.joined()
        if not joined:
            return
        named = [f"{lost.range} ({lost.range.size}): {lost.reason}" for lost in joined[:RANGES_IN_WARNING_MAX]]
        more = len(joined) - len(named)
        log.warning(
            "data loss: %d planned offsets were skipped, failOnDataLoss is false: %s%s",
            self.offsets,
            "; ".join(named),
            f"; and {more} more ranges" if more else "",
        )
