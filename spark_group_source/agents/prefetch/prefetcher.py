"""The prefetching thread of an agent, and the buffers that it shares with the threads that serve tasks.

Runs in: agents. Deliberately absent: limits of the buffers (``buffers``), and the meaning of errors. A partition with
an error is not prefetched until its next position arrives; the task that reads it from the brokers reports the error.

Records of a later leader than the one that reported the last plan's end are not buffered (KIP-320). So all buffered
records of a partition were in that leader's log, and a plan of another leader epoch is not served from them.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import numpy as np

from spark_group_source.agents.messages import PrefetchPositions
from spark_group_source.agents.prefetch.buffers import UNKNOWN, AcceptedRows, BufferedRange, PrefetchBuffers
from spark_group_source.errors import SourceError
from spark_group_source.model import TopicPartition
from spark_group_source.reader.native_client import NativeChunk, NativeClient
from spark_group_source.reader.range_reader import LINGER_S
from spark_group_source.reader.records import (
    EOF,
    ClientEvent,
    Ints,
    PartitionRows,
    RecordSize,
    RowSlice,
    group_by_batch,
    select_rows,
)

log = logging.getLogger(__name__)

IDLE_S = 0.1
"""Limit of one poll while no records arrive; new positions wait as long."""
ROOM_S = 1.0
"""Limit of one wait for room, or for positions."""
REOPEN_S = 5.0
"""Pause after a client failed for good, before another is opened."""
OFFSET_MAX = 2**63 - 1
SMALL_ROW_BYTES = 64
"""One poll returns at most as many rows as there is room for if each has this size."""


class SharedBuffers:
    """The buffers, and the lock under which the prefetcher and the serving threads use them."""

    def __init__(self, memory_bytes: int) -> None:
        self._buffers = PrefetchBuffers(memory_bytes)
        self.version = 0
        """Increases with each change that the prefetcher has to be notified of."""
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def locked(self) -> Iterator[PrefetchBuffers]:
        """The buffers, to read them, or for a change of the prefetcher."""
        with self._changed:
            yield self._buffers

    @contextlib.contextmanager
    def changing(self) -> Iterator[PrefetchBuffers]:
        """The buffers, for a change that the prefetcher is notified of."""
        with self._changed:
            yield self._buffers
            self.version += 1
            self._changed.notify_all()

    def follow(self, positions: PrefetchPositions) -> None:
        """Prefetch from these positions."""
        with self.changing() as buffers:
            buffers.follow(positions)

    def free(self, ranges: Collection[BufferedRange]) -> None:
        """Free ranges that were served."""
        with self.changing() as buffers:
            buffers.free(ranges)

    def size_of(self, tps: Iterable[TopicPartition]) -> tuple[int, int]:
        """How many bytes and rows are buffered of these partitions."""
        with self.locked() as buffers:
            return buffers.size_of(tps)

    def wait_changed(self, version: int) -> None:
        """Wait until ``version`` is outdated, or for :data:`ROOM_S`."""
        with self._changed:
            self._changed.wait_for(lambda: self.version != version, ROOM_S)


class Prefetcher:
    """Fills the buffers.

    Args:
        open_client: opens the client. A client that failed for good is replaced.
        columns: the columns that tasks read. ``offset`` is buffered too: ranges are split by it.
    """

    def __init__(self, buffers: SharedBuffers, open_client: Callable[[], NativeClient], columns: Sequence[str]) -> None:
        self._buffers, self._open_client = buffers, open_client
        self._columns = tuple(dict.fromkeys((*columns, "offset")))
        self._stopping = threading.Event()
        self._assigned: dict[TopicPartition, int] = {}
        """The partitions that the client reads, each with the number of the seek that it reads for; 0: for none."""
        self._full: set[TopicPartition] = set()
        """Assigned partitions that have no room."""
        self._seen_version = -1
        self._busy = False
        """Whether the last poll returned records."""
        self._record_size = RecordSize()
        self._thread = threading.Thread(target=self._run, name="prefetcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Stop the thread, and wait up to ``timeout_s`` until it has closed its client."""
        self._stopping.set()
        with self._buffers.changing():  # wakes the thread
            pass
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._prefetch()
            except (SourceError, RuntimeError, MemoryError) as exc:
                log.warning("prefetching failed: %s; starting again in %.0f s", exc, REOPEN_S)
            with self._buffers.changing() as buffers:
                buffers.drop_all()
            self._stopping.wait(REOPEN_S)

    def _prefetch(self) -> None:
        while True:  # a client costs memory and threads even when it reads nothing
            version = self._buffers.version
            if self._stopping.is_set():
                return
            with self._buffers.locked() as buffers:
                if buffers.partitions:
                    break
            self._buffers.wait_changed(version)
        client = self._open_client()
        self._assigned, self._full, self._seen_version = {}, set(), -1
        try:
            while not self._stopping.is_set():
                version = self._buffers.version
                if version != self._seen_version or self._full:
                    self._assign(client)
                    self._seen_version = version
                if self._assigned.keys() <= self._full:
                    self._buffers.wait_changed(version)
                    client.serve()
                else:
                    self._poll(client)
        finally:
            client.close()

    # --- which partitions are read

    def _assign(self, client: NativeClient) -> None:
        """Assign the partitions that have room. A full partition is unassigned, unless all partitions are full: then
        nothing is polled, and what the client has fetched meanwhile is kept."""
        with self._buffers.locked() as buffers:
            wanted = {tp: one for tp, one in buffers.partitions.items() if not one.halted}
            kept = {tp for tp, seek in self._assigned.items() if tp in wanted and wanted[tp].seek == seek}
            full = {tp for tp in kept if buffers.is_full(tp)}
            others = {tp for tp in wanted.keys() - kept if buffers.has_room_again(tp)}
            if others or full < kept:
                kept -= full
                full = set()
            added = [(tp, wanted[tp].position) for tp in others]
            seeks = {tp: wanted[tp].seek for tp in kept | others}
        dropped = self._assigned.keys() - kept
        if dropped:
            client.incremental_unassign(list(dropped))
        if added:
            client.incremental_assign(added)
        self._assigned, self._full = seeks, full

    def _poll(self, client: NativeClient) -> None:
        with self._buffers.locked() as buffers:
            rows_max = self._record_size.rows_max(max(1, buffers.free_bytes // SMALL_ROW_BYTES))
        chunk = client.poll(rows_max, LINGER_S) if self._busy else client.poll(1, IDLE_S)
        try:
            self._busy = bool(chunk.partition_rows)
            if self._busy and "headers" in self._columns:
                chunk.count_headers()
            self._record_size.update(chunk.sizes)
            self._buffer(chunk)
        finally:
            chunk.free()

    # --- what a poll returned

    def _buffer(self, chunk: NativeChunk) -> None:
        """Buffer the rows of one poll.

        ``stopped`` has the partitions of which no further row of this poll may be buffered, because a row before it is
        left out. At first these are the partitions with an error, which may belong anywhere between their rows;
        :meth:`_convert` adds those with rows that do not fit or cannot be used.
        """
        stopped = {event.tp for event in chunk.events if event.code != EOF and event.tp is not None}
        failed = frozenset(stopped)
        if chunk.partition_rows:
            offsets = np.concatenate([rows.offsets for rows in chunk.partition_rows])
            slices = [RowSlice(rows.tp, rows.first, rows.first + len(rows.offsets)) for rows in chunk.partition_rows]
            for group in group_by_batch(slices, chunk.sizes):
                self._convert(chunk, group, offsets, stopped)
        with self._buffers.locked() as buffers:
            for event in chunk.events:
                self._on_event(buffers, event, stopped)
            for tp in failed:
                buffers.halt(tp)
            for tp in {rows.tp for rows in chunk.partition_rows}:
                if tp in buffers.partitions and buffers.is_full(tp):
                    self._full.add(tp)
            incomplete = stopped & self._assigned.keys()
        for tp in incomplete:
            self._assigned[tp] = 0  # the next records of its client do not follow the buffered ones
            self._full.add(tp)  # so that it is assigned again before the next poll

    def _convert(self, chunk: NativeChunk, group: list[RowSlice], offsets: Ints, stopped: set[TopicPartition]) -> None:
        """Buffer those rows of the group that are the next ones of their partitions and that have room. Adds the
        partitions with other rows to ``stopped``."""
        accepted: list[AcceptedRows] = []
        ends: dict[TopicPartition, int] = {}
        with self._buffers.locked() as buffers:
            for row_slice in group:
                if row_slice.tp in stopped:
                    continue
                rows = self._accept(buffers, chunk, row_slice, offsets[row_slice.first : row_slice.last], ends, stopped)
                if rows is not None:
                    accepted.append(rows)
                    ends[row_slice.tp] = rows.end
        if not accepted:
            return
        try:
            batch = chunk.batch([rows.row_slice for rows in accepted], self._columns)
        except SourceError:  # a record that Spark cannot hold: the task that reads it reports it
            with self._buffers.locked() as buffers:
                buffers.cancel(accepted)
                for tp in ends:
                    buffers.halt(tp)
            stopped |= ends.keys()
            return
        except BaseException:  # such as a MemoryError, after which the thread tries again
            with self._buffers.locked() as buffers:
                buffers.cancel(accepted)
            raise
        with self._buffers.locked() as buffers:
            buffers.add(batch, accepted)

    def _accept(
        self,
        buffers: PrefetchBuffers,
        chunk: NativeChunk,
        row_slice: RowSlice,
        offsets: Ints,
        ends: dict[TopicPartition, int],
        stopped: set[TopicPartition],
    ) -> AcceptedRows | None:
        """Reserve memory for the rows of a slice that are the next ones of their partition, if there are any.

        ``ends``: where the rows end that are accepted for the same batch already. ``stopped`` receives the partition if
        a later leader wrote the next record, or if not all rows fit.
        """
        partition = buffers.partitions.get(row_slice.tp)
        if partition is None or partition.halted or partition.seek != self._assigned.get(row_slice.tp):
            return None
        start = ends.get(row_slice.tp, partition.position)
        epoch = partition.leader_epoch if partition.leader_epoch != UNKNOWN else None
        first, last, _, later = select_rows(
            chunk, PartitionRows(row_slice.tp, row_slice.first, offsets), start, OFFSET_MAX, epoch
        )
        if later is not None:
            partition.halted = True
            stopped.add(row_slice.tp)
        if first >= last:
            return None
        count, reserved = buffers.reserve(row_slice.tp, chunk.sizes[row_slice.first + first : row_slice.first + last])
        if count < last - first:
            stopped.add(row_slice.tp)
        if not count:
            return None
        accepted = RowSlice(row_slice.tp, row_slice.first + first, row_slice.first + first + count)
        end = int(offsets[first + count - 1]) + 1
        return AcceptedRows(accepted, partition, partition.seek, start, end, reserved)

    def _on_event(self, buffers: PrefetchBuffers, event: ClientEvent, stopped: Collection[TopicPartition]) -> None:
        if event.code != EOF:
            log.info("error while prefetching %s: %s", event.tp or "all partitions", event.text)
        elif event.tp is not None and event.tp not in stopped and event.tp in self._assigned:
            buffers.advance(event.tp, self._assigned[event.tp], event.offset)
