"""The records that an agent has prefetched, by the offset ranges that they cover completely.

Runs in: agents. Deliberately absent: a clock, threads, locks, sockets, Kafka. Of Arrow batches only the column
``offset`` is read.

A **buffered range** covers the offsets [start, end) of one partition completely: its rows are all records there that a
reader of this isolation level sees. It has no rows if those offsets are aborted or compacted. The rows lie in a
**shared batch**, one Arrow batch that ranges of several partitions share. A batch's memory is counted until its last
range is freed, with a fixed overhead for each batch and range for Python and Arrow.

Each record is served once. Ranges that were taken are counted until they are freed.

Each of ``n`` partitions is guaranteed a share of half the memory divided by n. The rest goes to any partition, as long
as the shares of the others stay available.
"""

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from spark_group_source.agents.messages import PrefetchPositions
from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.reader.records import Ints, RowSlice

ROW_BYTES = 48
"""Upper bound of a row's memory beside key, value, headers and topic name: the ends of three texts, four numbers, the
null bits, and the end of its headers."""
BATCH_BYTES = 4_096
"""Overhead of a batch."""
RANGE_BYTES = 256
"""Overhead of a range."""
UNKNOWN = -1
"""An unknown leader epoch."""


@dataclass(slots=True, eq=False)
class SharedBatch:
    """One Arrow batch, its memory, and the number of ranges that have rows in it."""

    batch: pa.RecordBatch
    bytes: int
    ranges: int = 0


@dataclass(slots=True, eq=False)
class BufferedRange:
    """The offsets [start, end) of a partition and their records: the rows [first, last) of a batch."""

    start: int
    end: int
    batch: SharedBatch | None
    """None if there is no record in the range."""
    first: int
    last: int
    bytes: int
    """Memory counted against the partition's share."""
    arrival: int
    """The arrival with which the range became complete. A topic check that started after it covers the range."""
    overhead: int = RANGE_BYTES
    """Memory counted for the range itself. Of a range that was split, only one part has it."""

    def rows(self) -> pa.RecordBatch | None:
        """The records; None if there are none."""
        if self.batch is None:
            return None
        return self.batch.batch.slice(self.first, self.last - self.first)


class AcceptedRows(NamedTuple):
    """Rows for which memory is reserved: the rows of ``row_slice`` are all records of [start, end)."""

    row_slice: RowSlice
    partition: "PartitionBuffer"
    """The buffer for which the memory is reserved."""
    seek: int
    """Its seek at the reservation. If it has another one when the rows are added, they are dropped."""
    start: int
    end: int
    bytes: int
    """Reserved memory."""


class TakenRanges(NamedTuple):
    """What is served of the requested range with index ``request_index``: [its start, until), complete."""

    request_index: int
    until: int
    ranges: Sequence[BufferedRange]


@dataclass(slots=True)
class PartitionBuffer:
    """One partition that is prefetched."""

    topic_id: str
    """The topic id in the plan (KIP-516); empty if it is unknown."""
    leader_epoch: int
    """The epoch of the leader that reported the end of the plan (KIP-320), or :data:`UNKNOWN`."""
    requested: int
    """The position that was requested last."""
    position: int
    """The next offset to fetch."""
    seek: int
    """Changes whenever the position is set from outside: rows fetched for a former seek do not follow the buffer."""
    ranges: list[BufferedRange]
    """In order, without gaps."""
    bytes: int = 0
    """Memory counted against the partition's share, reservations included."""
    next_bytes: int = 0
    """Memory of the next record, if it did not fit; 0 otherwise."""
    halted: bool = False
    """Whether fetching failed: the partition waits for its next requested position."""
    removed: bool = False
    """Whether the partition is not prefetched any more; rows on their way are dropped."""


class PrefetchBuffers:
    """The buffered ranges of all partitions. Not thread-safe.

    Args:
        memory_bytes: bound of batches, ranges and reservations together.
    """

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self.partitions: dict[TopicPartition, PartitionBuffer] = {}
        self.used_bytes = 0
        """Memory of batches and ranges, including those that were taken and not freed yet."""
        self.reserved_bytes = 0
        self.last_arrival = 0
        """The number of arrivals so far: batches that were added, and positions that moved without a record."""
        self._unused_shares = 0
        """The sum of what each partition has not used of its share, in bytes."""
        self._seeks = 0
        """The number of seeks so far; each has its own number."""

    # --- requested positions

    def follow(self, request: PrefetchPositions) -> None:
        """Prefetch from these positions, and drop what they make obsolete."""
        for tp in self.partitions.keys() - request.positions.keys():
            self._remove(tp)
        for tp, position in request.positions.items():
            partition = self.partitions.get(tp)
            epoch = request.leader_epochs.get(tp, partition.leader_epoch if partition else UNKNOWN)
            topic_id = request.topic_ids.get(tp.topic, "")
            if (
                partition is None
                or (partition.topic_id, partition.leader_epoch) != (topic_id, epoch)
                or position < partition.requested
            ):
                self._remove(tp)
                self.partitions[tp] = PartitionBuffer(topic_id, epoch, position, position, self._next_seek(), [])
                continue
            partition.requested = position
            self._drop_below(partition, min(position, request.keep.get(tp, position)))
            if partition.position < position or partition.halted:
                partition.position, partition.seek = max(partition.position, position), self._next_seek()
                partition.halted, partition.next_bytes = False, 0
        share = self._share
        self._unused_shares = sum(max(0, share - partition.bytes) for partition in self.partitions.values())

    def drop_topic(self, topic: str) -> None:
        """The topic was recreated: drop its records, and fetch none before the next requested position."""
        for tp, partition in self.partitions.items():
            if tp.topic == topic:
                self._clear(partition)
                partition.halted = True

    def drop_all(self) -> None:
        """Drop all records. Fetching starts again at the positions after them."""
        for partition in self.partitions.values():
            self._clear(partition)

    def halt(self, tp: TopicPartition) -> None:
        """Fetch nothing of the partition before its next requested position."""
        if tp in self.partitions:
            self.partitions[tp].halted = True

    def _next_seek(self) -> int:
        self._seeks += 1
        return self._seeks

    def _remove(self, tp: TopicPartition) -> None:
        if tp in self.partitions:
            partition = self.partitions.pop(tp)
            partition.removed = True
            self._clear(partition)

    def _clear(self, partition: PartitionBuffer) -> None:
        ranges, partition.ranges = partition.ranges, []
        self._free(partition, ranges)
        partition.seek = self._next_seek()

    def _drop_below(self, partition: PartitionBuffer, offset: int) -> None:
        at = self._split(partition, offset)
        self._free(partition, partition.ranges[:at])
        del partition.ranges[:at]

    # --- fetched records

    @property
    def free_bytes(self) -> int:
        """Memory that is neither used nor reserved, of all partitions together; for one see :meth:`room`."""
        return self.memory_bytes - self.used_bytes - self.reserved_bytes

    @property
    def _share(self) -> int:
        return self.memory_bytes // (2 * max(1, len(self.partitions)))

    def room(self, tp: TopicPartition) -> int:
        """Bytes that may be reserved for a partition now."""
        own = max(0, self._share - self.partitions[tp].bytes)
        return max(0, min(self.free_bytes, max(own, self.free_bytes - (self._unused_shares - own))))

    def is_full(self, tp: TopicPartition) -> bool:
        """Whether fetching more must wait: less than an eighth of the partition's share is available, or less than its
        next record needs."""
        return not self._fits(tp, self._share // 8)

    def has_room_again(self, tp: TopicPartition) -> bool:
        """Whether a full partition is fetched again: half its share is available, so that it is not full at once."""
        return self._fits(tp, self._share // 2)

    def _fits(self, tp: TopicPartition, least: int) -> bool:
        needed = self.partitions[tp].next_bytes
        is_empty = not self.used_bytes + self.reserved_bytes
        return self.room(tp) >= max(least, needed) or (is_empty and needed <= self.memory_bytes)

    def reserve(self, tp: TopicPartition, sizes: Ints) -> tuple[int, int]:
        """Reserve memory for as many of these rows as fit, in order and without gaps.

        Args:
            sizes: bytes of key, value and headers of each row.

        Returns:
            The number of rows, and the reserved bytes.
        """
        partition = self.partitions[tp]
        overhead = BATCH_BYTES + RANGE_BYTES
        needed = np.cumsum(sizes + (ROW_BYTES + 4 * len(tp.topic))) + overhead  # by the first row, the first two, ...
        count = int(np.searchsorted(needed, self.room(tp), side="right"))
        if not count and not self.used_bytes + self.reserved_bytes and needed[0] <= self.memory_bytes:
            count = 1  # larger than any share: buffered alone
        reserved = int(needed[count - 1]) if count else 0
        # The next row is the first one of another batch and range, so it needs their overhead again.
        rows_bytes = reserved - overhead if count else 0
        partition.next_bytes = int(needed[count]) - rows_bytes if count < len(needed) else 0
        self.reserved_bytes += reserved
        self._change_bytes(partition, reserved)
        return count, reserved

    def add(self, batch: pa.RecordBatch, accepted: Sequence[AcceptedRows]) -> None:
        """Buffer rows for which memory is reserved.

        Args:
            batch: the accepted rows, in order, with the column ``offset``.
        """
        self.last_arrival += 1
        shared = SharedBatch(batch, batch.get_total_buffer_size() + BATCH_BYTES)
        first = 0
        for rows in accepted:
            last = first + rows.row_slice.last - rows.row_slice.first
            self.reserved_bytes -= rows.bytes
            partition = rows.partition
            if self.partitions.get(rows.row_slice.tp) is partition and partition.seek == rows.seek:
                partition.ranges.append(
                    BufferedRange(rows.start, rows.end, shared, first, last, rows.bytes, self.last_arrival)
                )
                partition.position = rows.end
                self._use(shared)
            else:
                self._change_bytes(partition, -rows.bytes)
            first = last

    def cancel(self, accepted: Iterable[AcceptedRows]) -> None:
        """Release the reservations of rows that are not added."""
        for rows in accepted:
            self.reserved_bytes -= rows.bytes
            self._change_bytes(rows.partition, -rows.bytes)

    def advance(self, tp: TopicPartition, seek: int, position: int) -> None:
        """No record is left below this position."""
        partition = self.partitions.get(tp)
        if partition is None or partition.seek != seek or position <= partition.position:
            return
        self.last_arrival += 1
        last = partition.ranges[-1] if partition.ranges else None
        if last is not None and last.end == partition.position:
            last.end, last.arrival = position, self.last_arrival
        elif self.free_bytes >= RANGE_BYTES:
            partition.ranges.append(BufferedRange(partition.position, position, None, 0, 0, 0, self.last_arrival))
            self.used_bytes += RANGE_BYTES
        partition.position = position

    def _use(self, shared: SharedBatch) -> None:
        if not shared.ranges:
            self.used_bytes += shared.bytes
        shared.ranges += 1
        self.used_bytes += RANGE_BYTES

    def size_of(self, tps: Iterable[TopicPartition]) -> tuple[int, int]:
        """How much is buffered of these partitions: the bytes counted against their shares, reservations included, and
        the rows."""
        found = [partition for tp in tps if (partition := self.partitions.get(tp)) is not None]
        rows = sum(each.last - each.first for partition in found for each in partition.ranges)
        return sum(partition.bytes for partition in found), rows

    # --- served records

    def last_arrivals(self, ranges: Sequence[OffsetRange]) -> dict[str, int]:
        """By topic, the last arrival among what is buffered of these ranges."""
        found: dict[str, int] = {}
        for r in ranges:
            partition = self.partitions.get(r.tp)
            for each in self._start_of(partition, r) if partition else ():
                found[r.tp.topic] = max(found.get(r.tp.topic, 0), each.arrival)
        return found

    def take(
        self,
        ranges: Sequence[OffsetRange],
        topic_ids: Mapping[str, str],
        leader_epochs: Mapping[TopicPartition, int],
        checked: Mapping[str, int],
        bytes_max: int,
    ) -> tuple[list[TakenRanges], bool]:
        """Take what is buffered from the start of these ranges. The caller has to free it.

        Args:
            topic_ids, leader_epochs: those of the plan; records of others are not served.
            checked: by topic, the last arrival that is known to belong to the planned topic.
            bytes_max: bound of the memory of all that is taken. A buffered range above it is taken alone.

        Returns:
            What was taken, and whether it was cut at ``bytes_max``.
        """
        found: list[TakenRanges] = []
        used = 0
        is_cut = False
        for index, r in enumerate(ranges):
            partition = self.partitions.get(r.tp)
            planned = topic_ids.get(r.tp.topic, ""), leader_epochs.get(r.tp, UNKNOWN)
            if (
                partition is None
                or (partition.topic_id, partition.leader_epoch) != planned
                or r.tp.topic not in checked
            ):
                continue
            first = self._split(partition, r.start)
            self._split(partition, r.end)
            taken = []
            for each in self._start_of(partition, r):
                if each.arrival > checked[r.tp.topic]:
                    break
                if is_cut := used > 0 and used + each.bytes > bytes_max:
                    break
                taken.append(each)
                used += each.bytes
            if taken:
                del partition.ranges[first : first + len(taken)]
                self._change_bytes(partition, -sum(each.bytes for each in taken))
                found.append(TakenRanges(index, taken[-1].end, taken))
            if is_cut:
                break
        return found, is_cut

    def free(self, ranges: Iterable[BufferedRange]) -> None:
        """Free ranges that were taken."""
        for each in ranges:
            self.used_bytes -= each.overhead
            if each.batch is not None:
                each.batch.ranges -= 1
                if not each.batch.ranges:
                    self.used_bytes -= each.batch.bytes
                each.batch = None

    def _free(self, partition: PartitionBuffer, ranges: Sequence[BufferedRange]) -> None:
        self._change_bytes(partition, -sum(each.bytes for each in ranges))
        self.free(ranges)

    def _change_bytes(self, partition: PartitionBuffer, more: int) -> None:
        """Change the memory counted against a partition's share by ``more`` bytes, and with it the sum of the unused
        shares: summing over all partitions for each record batch would be too slow."""
        if not partition.removed:
            self._unused_shares += max(0, self._share - partition.bytes - more) - max(0, self._share - partition.bytes)
        partition.bytes += more

    def _start_of(self, partition: PartitionBuffer, r: OffsetRange) -> list[BufferedRange]:
        """The buffered ranges that cover the start of a range, without gaps."""
        at = _first_ending_after(partition.ranges, r.start)
        found: list[BufferedRange] = []
        until = r.start
        while at < len(partition.ranges) and partition.ranges[at].start <= until < r.end:
            found.append(partition.ranges[at])
            until, at = partition.ranges[at].end, at + 1
        return found

    def _split(self, partition: PartitionBuffer, offset: int) -> int:
        """Split the range that contains this offset. Returns the index of the first range that ends after it."""
        at = _first_ending_after(partition.ranges, offset)
        if at == len(partition.ranges) or partition.ranges[at].start >= offset:
            return at
        right, shared = partition.ranges[at], partition.ranges[at].batch
        left = BufferedRange(right.start, offset, None, 0, 0, 0, right.arrival, overhead=0)
        if shared is not None:
            offsets = shared.batch.column("offset").slice(right.first, right.last - right.first).to_numpy()
            middle = right.first + int(np.searchsorted(offsets, offset))
            if middle > right.first:
                left.batch, left.first, left.last = shared, right.first, middle
                left.bytes = right.bytes * (middle - right.first) // (right.last - right.first)
                shared.ranges += 1
            if middle == right.last:
                right.batch = None
                shared.ranges -= 1
            right.first, right.bytes = middle, right.bytes - left.bytes
        right.start = offset
        partition.ranges.insert(at, left)
        return at + 1


def _first_ending_after(ranges: Sequence[BufferedRange], offset: int) -> int:
    return bisect.bisect_right(ranges, offset, key=lambda each: each.end)
