"""When the group's offsets are committed: one commit on its way at a time, pauses after failures, slots that are out.

Runs in: the stream reader, tests. Deliberately absent: which offsets (``positions``), and committing them (``worker``).
"""

from collections.abc import Mapping

from spark_group_source.group.rules import pause_ms
from spark_group_source.model import TopicPartition

SILENT_MS_MAX = 5_000
"""A slot that is out of the group for longer than this is told of: a rebalance takes less."""


class EchoSchedule:
    """The state of the echo."""

    def __init__(self) -> None:
        self.in_flight: Mapping[TopicPartition, int] | None = None
        """What is being committed now."""
        self._failures = 0
        self._again_at_ms: int | None = None
        self._durable_at_ms: int | None = None
        self._out_since_ms: dict[int, int] = {}  # slots whose share could not be committed
        self._out_until_ms: dict[int, int] = {}  # when it is tried again
        self._told: set[int] = set()

    @property
    def waiting_slots(self) -> set[int]:
        """Slots whose offsets are not to be tried now."""
        return set(self._out_until_ms)

    def may_order(self, now_ms: int) -> bool:
        return self.in_flight is None and (self._again_at_ms is None or now_ms >= self._again_at_ms)

    def durable(self, now_ms: int) -> None:
        """A batch became durable: from here the echo's latency counts."""
        self._durable_at_ms = now_ms

    def done(self, now_ms: int, *, left: Mapping[int, str], all_done: bool) -> int | None:
        """The commit was made, but for the shares of the slots in ``left``.

        Returns:
            The milliseconds from "the batch is durable" to "Kafka has all its offsets", when it has them now.
        """
        self.in_flight, self._failures, self._again_at_ms = None, 0, None
        for slot in left:
            since_ms = self._out_since_ms.setdefault(slot, now_ms)
            self._out_until_ms[slot] = now_ms + min(pause_ms(4), max(pause_ms(0), now_ms - since_ms))
        if not all_done or self._durable_at_ms is None:
            return None
        took_ms, self._durable_at_ms = now_ms - self._durable_at_ms, None
        return took_ms

    def failed(self, now_ms: int, *, stale: bool) -> None:
        """Nothing was committed. ``stale``: a member is in another generation than it was; nothing is wrong."""
        self.in_flight = None
        self._again_at_ms = now_ms + pause_ms(self._failures)
        self._failures += not stale

    def slot_is_back(self, slot: int) -> None:
        """It has an assignment: its offsets may be tried at once."""
        for of_slot in (self._out_since_ms, self._out_until_ms):
            of_slot.pop(slot, None)
        self._told.discard(slot)

    def silent(self, now_ms: int) -> list[int]:
        """Slots that have been out for long, each once."""
        late = [slot for slot, since_ms in self._out_since_ms.items() if now_ms - since_ms >= SILENT_MS_MAX]
        found = [slot for slot in late if slot not in self._told]
        self._told.update(found)
        return found

    def deadlines_ms(self) -> list[int]:
        return [*self._out_until_ms.values(), *([] if self._again_at_ms is None else [self._again_at_ms])]

    def tick(self, now_ms: int) -> None:
        if self._again_at_ms is not None and now_ms >= self._again_at_ms:
            self._again_at_ms = None
        for slot in [slot for slot, at_ms in self._out_until_ms.items() if now_ms >= at_ms]:
            del self._out_until_ms[slot]
