"""What agents hold and tasks read, slot by slot: numbers for people to look at.

Runs in: the stream reader (inside ``run``), tests. Deliberately absent: decisions. Nothing of this is sure to be told,
so nothing rests on it: an agent says it now and then, a task when it ends, if either reaches the stream reader.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from spark_group_source.group import events as ev
from spark_group_source.group.partition import Partition
from spark_group_source.group.slot import Slot
from spark_group_source.model import OffsetRange, TopicPartition

BATCHES_KEPT = 2
"""Batches whose tasks may still tell what they skipped: a word may come late."""
NOTHING = ev.Buffered(slot=-1, bytes=0, rows=0)


@dataclass(frozen=True, slots=True)
class SlotReading:
    """Of one slot: what its agent holds now, and the rows of its partitions that tasks read so far."""

    buffered_bytes: int = 0
    buffered_rows: int = 0
    from_memory: int = 0
    from_brokers: int = 0


class Reading:
    """The numbers of one run."""

    def __init__(self) -> None:
        self.records_lost = 0
        """Planned offsets that tasks skipped, each once however many tries told of it."""
        self._memory: Counter[int] = Counter()
        self._brokers: Counter[int] = Counter()
        self._stock: dict[int, tuple[str, ev.Buffered]] = {}  # by slot: who said it
        self._skipped: dict[int, dict[TopicPartition, list[tuple[int, int]]]] = {}

    def stocked(self, event: ev.HostStocked) -> None:
        """An agent tells what it holds."""
        self._stock |= {of.slot: (event.host, of) for of in event.stock}

    def task_read(self, event: ev.TaskRead, ours: Mapping[TopicPartition, Partition]) -> None:
        """A task tells what it read. Its rows are those of the slot that has the partition now, if one of ours has."""
        for counts, rows in ((self._memory, event.memory), (self._brokers, event.brokers)):
            for tp, count in rows.items():
                if (partition := ours.get(tp)) is not None:
                    counts[partition.slot] += count
        if not event.lost or event.seq <= max(self._skipped, default=-1) - BATCHES_KEPT:
            return
        told = self._skipped.setdefault(event.seq, {})
        for r in event.lost:
            self.records_lost += _added(told.setdefault(r.tp, []), r)
        while len(self._skipped) > BATCHES_KEPT:
            del self._skipped[min(self._skipped)]

    def of(self, slot: Slot) -> SlotReading:
        host, held = self._stock.get(slot.number, ("", NOTHING))
        held = held if host == slot.host else NOTHING
        return SlotReading(
            buffered_bytes=held.bytes,
            buffered_rows=held.rows,
            from_memory=self._memory[slot.number],
            from_brokers=self._brokers[slot.number],
        )


def _added(known: list[tuple[int, int]], r: OffsetRange) -> int:
    """How many offsets of a range are none of those that are known; after this they are."""
    before = sum(end - start for start, end in known)
    joined: list[tuple[int, int]] = []
    for start, end in sorted([*known, (r.start, r.end)]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    known[:] = joined
    return sum(end - start for start, end in joined) - before
