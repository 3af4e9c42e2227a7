"""How old the next record of each partition is, and of which it must be read.

Runs in: the exporter, tests. Deliberately absent: asking (``sweep``), and any clock.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from spark_group_source.kafka.record_times import NO_TIME, RecordTime
from spark_group_source.model import TopicPartition

READ_AGAIN_MS = 300_000
"""A time that is known is read again after this: compaction may have taken the record, which nothing tells."""


@dataclass(frozen=True, slots=True)
class _Known:
    record: RecordTime | None
    end: int
    """Where the partition ended then: of "no record" the bound."""
    read_ms: int


class Ages:
    """The records that were read, one for each partition of a group and its committed offset."""

    def __init__(self) -> None:
        self._known: dict[tuple[TopicPartition, int], _Known] = {}

    def known(self, behind: Mapping[tuple[TopicPartition, int], int], *, now_ms: int) -> set[TopicPartition]:
        """Partitions where a record is known that may be gone since: where do their logs begin?"""
        return {key[0] for key in behind if (known := self._fresh(key, now_ms)) is not None and known.record}

    def missing(
        self,
        behind: Mapping[tuple[TopicPartition, int], int],
        firsts: Mapping[TopicPartition, int],
        *,
        now_ms: int,
    ) -> list[tuple[TopicPartition, int]]:
        """What must be read, those first that were never read.

        Args:
            behind: partition and committed offset -> where the partition ends.
            firsts: where logs begin, of :meth:`known`; one without an answer is read.
        """
        missing = []
        for key, end in behind.items():
            known = self._fresh(key, now_ms)
            if known is None or not _holds(known, end, firsts.get(key[0])):
                missing.append(key)
        return sorted(missing, key=lambda key: key in self._known)

    def take(
        self,
        read: Mapping[tuple[TopicPartition, int], RecordTime | None],
        behind: Mapping[tuple[TopicPartition, int], int],
        missing: Iterable[tuple[TopicPartition, int]],
        *,
        now_ms: int,
    ) -> None:
        """What was read of that; the rest of it is not known any more, and neither is what nobody is behind at now."""
        unanswered = set(missing) - read.keys()
        self._known = {key: k for key, k in self._known.items() if key in behind and key not in unanswered}
        self._known |= {key: _Known(record, behind[key], now_ms) for key, record in read.items()}

    def age_s(self, tp: TopicPartition, committed: int, *, wall_ms: int) -> float | None:
        """Seconds since the next record was made, 0 where there is none; None: not known."""
        known = self._known.get((tp, committed))
        if known is None or (known.record is not None and known.record.timestamp_ms == NO_TIME):
            return None
        return 0.0 if known.record is None else max(0, wall_ms - known.record.timestamp_ms) / 1000

    def _fresh(self, key: tuple[TopicPartition, int], now_ms: int) -> _Known | None:
        known = self._known.get(key)
        return known if known is not None and now_ms < known.read_ms + READ_AGAIN_MS else None


def _holds(known: _Known, end: int, first: int | None) -> bool:
    """Whether what was read is still so: the record is in the log, or nothing came behind what held none."""
    if known.record is None:
        return end <= known.end
    return first is not None and first <= known.record.offset
