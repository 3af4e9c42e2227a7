"""When the group's offsets are committed: one commit on its way at a time, pauses after failures, slots that are out.

Runs in: the stream reader, tests. Deliberately absent: which offsets (``positions``), committing them (``driver``).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from spark_group_source.model import TopicPartition
from spark_group_source.protocol.rules import pause_ms

SILENT_MS_MAX = 5_000
"""A slot that is out of the group for longer than this is told of: a rebalance takes less."""
OUT_PAUSE_MS_MAX = 2_000
"""The longest pause before the offsets of such a slot are tried again."""


@dataclass(slots=True)
class _Out:
    """A slot whose share was left out, because its member is not in the group at the moment."""

    since_ms: int
    until_ms: int | None = None  # when it is tried again; None: with the next commit
    reason: str = ""
    told: bool = False


class CommitSchedule:
    """The state of the echo."""

    def __init__(self) -> None:
        self.in_flight: Mapping[TopicPartition, int] | None = None
        """What is being committed now."""
        self._slots: set[int] = set()  # in whose members' names
        self._failures = 0
        self._again_at_ms: int | None = None
        self._durable_at_ms: int | None = None
        self._out: dict[int, _Out] = {}

    @property
    def waiting_slots(self) -> set[int]:
        """Slots whose offsets are not to be tried now."""
        return {slot for slot, out in self._out.items() if out.until_ms is not None}

    def may_order(self, now_ms: int) -> bool:
        return self.in_flight is None and (self._again_at_ms is None or now_ms >= self._again_at_ms)

    def durable(self, now_ms: int) -> None:
        """A batch became durable: from here the echo's latency counts."""
        self._durable_at_ms = now_ms

    def ordered(self, share: Mapping[TopicPartition, int], slots: Iterable[int]) -> None:
        """These are being committed, in the names of these slots' members."""
        self.in_flight, self._slots = share, set(slots)

    def done(self, now_ms: int, *, left: Mapping[int, str], all_done: bool) -> int | None:
        """The commit was made, but for the shares of the slots in ``left``.

        Returns:
            The milliseconds from "the batch is durable" to "Kafka has all its offsets", when it has them now.
        """
        self.in_flight, self._failures, self._again_at_ms = None, 0, None
        for slot in self._slots - left.keys():
            self.slot_is_back(slot)
        for slot, reason in left.items():
            self._left_out(slot, reason, now_ms)
        if not all_done or self._durable_at_ms is None:
            return None
        took_ms, self._durable_at_ms = now_ms - self._durable_at_ms, None
        return took_ms

    def failed(self, now_ms: int) -> None:
        """Nothing was committed, for a reason that the next try may not meet."""
        self.in_flight = None
        self._again_at_ms = now_ms + pause_ms(self._failures)
        self._failures += 1

    def stale(self, now_ms: int, reason: str) -> None:
        """Nothing was committed: every member is in another generation than when it was ordered, or in none."""
        self.in_flight = None
        for slot in self._slots:
            self._left_out(slot, reason, now_ms)

    def slot_is_back(self, slot: int) -> None:
        """It has an assignment, or its offsets were committed: the next ones may be tried at once."""
        self._out.pop(slot, None)

    def silent(self, now_ms: int) -> list[tuple[int, str]]:
        """Slots that have been out for long, and what was said of that: each once."""
        late = [
            (slot, out) for slot, out in self._out.items() if now_ms - out.since_ms >= SILENT_MS_MAX and not out.told
        ]
        for _, out in late:
            out.told = True
        return [(slot, out.reason) for slot, out in late]

    def deadlines_ms(self) -> list[int]:
        due = [out.until_ms for out in self._out.values()] + [self._again_at_ms]
        return [at_ms for at_ms in due if at_ms is not None]

    def tick(self, now_ms: int) -> None:
        if self._again_at_ms is not None and now_ms >= self._again_at_ms:
            self._again_at_ms = None
        for out in self._out.values():
            if out.until_ms is not None and now_ms >= out.until_ms:
                out.until_ms = None

    def _left_out(self, slot: int, reason: str, now_ms: int) -> None:
        out = self._out.setdefault(slot, _Out(now_ms))
        out.reason = reason
        out.until_ms = now_ms + min(OUT_PAUSE_MS_MAX, max(pause_ms(0), now_ms - out.since_ms))
