"""The thread of an agent that reads ahead, and the buffers that it shares with those who serve tasks.

Runs in: agents. Deliberately absent: what may be held (``buffers``), what a trouble means. A partition that meets any
is left alone until something new is told of it: the task that reads it directly judges, and says it.

Records of a leader later than the one that told the last plan's end are not taken (KIP-320). So everything that is held
of a partition stood in the log of that very leader, and a plan that was told by another one is not served from it.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator

import numpy as np

from spark_group_source.agents.prefetch.buffers import UNKNOWN, Buffers, Piece, Reached
from spark_group_source.agents.task_messages import Ahead
from spark_group_source.errors import SourceError
from spark_group_source.model import TopicPartition
from spark_group_source.reader.native_client import NativeChunk, NativeClient
from spark_group_source.reader.planned_rows import EOF, RecordSize, select_rows
from spark_group_source.reader.range_reader import LINGER_S
from spark_group_source.reader.records import ClientEvent, Ints, PartitionRows, RowSlice, group_by_batch

log = logging.getLogger(__name__)

IDLE_S = 0.1
"""How long one poll waits where nothing comes; something new that was told waits as long."""
ROOM_S = 1.0
"""How long it waits at a time for room, or for something to read."""
REOPEN_S = 5.0
"""After a client that failed for good."""
OFFSET_MAX = 2**63 - 1
SMALL_ROW_BYTES = 64
"""One poll brings at most as many rows as there is room for, were they this small."""


class Stock:
    """The buffers, with the lock that reader and servers share. Methods of the buffers are called under it."""

    def __init__(self, memory_bytes: int) -> None:
        self.buffers = Buffers(memory_bytes)
        self.version = 0
        """Another one whenever somebody else than the reader changed something."""
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def locked(self) -> Iterator[Buffers]:
        with self._changed:
            yield self.buffers

    @contextlib.contextmanager
    def changing(self) -> Iterator[Buffers]:
        with self._changed:
            yield self.buffers
            self.version += 1
            self._changed.notify_all()

    def follow(self, ahead: Ahead) -> None:
        """Read on from where it says."""
        with self.changing() as buffers:
            buffers.follow(ahead)

    def free(self, pieces: Collection[Piece]) -> None:
        with self.changing() as buffers:
            buffers.free(pieces)

    def held_of(self, tps: Iterable[TopicPartition]) -> tuple[int, int]:
        """Bytes and rows that are held of partitions."""
        with self._changed:
            held = [found for tp in tps if (found := self.buffers.partitions.get(tp)) is not None]
            rows = sum(piece.last - piece.first for one in held for piece in one.pieces)
            return sum(one.bytes for one in held), rows

    def wait_changed(self, version: int, wait_s: float) -> None:
        """Until somebody changes something, or for so long."""
        with self._changed:
            self._changed.wait_for(lambda: self.version != version, wait_s)


class Reader:
    """Fills the stock.

    Args:
        open_client: makes the client; one that fails for good is followed by another.
    """

    def __init__(self, stock: Stock, open_client: Callable[[], NativeClient], *, include_headers: bool) -> None:
        self._stock, self._open, self._include_headers = stock, open_client, include_headers
        self._stopping = threading.Event()
        self._assigned: dict[TopicPartition, int] = {}
        """What the client reads, each for which turn."""
        self._full: set[TopicPartition] = set()
        self._seen = -1
        self._busy = False
        self._record_size = RecordSize()
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        self._stopping.set()
        with self._stock.changing():
            pass
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._read()
            except (SourceError, RuntimeError, MemoryError) as exc:
                log.warning("reading ahead begins anew in %.0f s: %s", REOPEN_S, exc)
            with self._stock.changing() as buffers:
                buffers.drop_all()
            self._stopping.wait(REOPEN_S)

    def _read(self) -> None:
        with self._stock.locked() as buffers:
            nothing = not buffers.partitions
        while nothing and not self._stopping.is_set():  # a client that has nothing to read costs all the same
            self._stock.wait_changed(self._stock.version, ROOM_S)
            with self._stock.locked() as buffers:
                nothing = not buffers.partitions
        if self._stopping.is_set():
            return
        client = self._open()
        self._assigned, self._full, self._seen = {}, set(), -1
        try:
            while not self._stopping.is_set():
                version = self._stock.version
                if version != self._seen or self._full:
                    self._adjust(client)
                    self._seen = version
                if self._assigned.keys() <= self._full:
                    self._stock.wait_changed(version, ROOM_S)
                else:
                    self._poll(client)
        finally:
            client.close()

    # --- which partitions are read

    def _adjust(self, client: NativeClient) -> None:
        """Read those that are to be read and have room. A full one waits, unassigned, unless all are full: then nothing
        is polled, and what the library has fetched meanwhile is not lost."""
        with self._stock.locked() as buffers:
            wanted = {tp: held for tp, held in buffers.partitions.items() if not held.halted}
            kept = {tp for tp, turn in self._assigned.items() if tp in wanted and wanted[tp].turn == turn}
            full = {tp for tp in kept if buffers.is_full(tp)}
            others = {tp for tp in wanted.keys() - kept if buffers.has_room_again(tp)}
            if others or full < kept:
                kept -= full
                full = set()
            new = [(tp, wanted[tp].position) for tp in others]
            turns = {tp: wanted[tp].turn for tp in kept | others}
        dropped = self._assigned.keys() - kept
        if dropped:
            client.incremental_unassign(list(dropped))
        if new:
            client.incremental_assign(new)
        self._assigned, self._full = turns, full

    def _poll(self, client: NativeClient) -> None:
        with self._stock.locked() as buffers:
            rows_max = self._record_size.rows_max(max(1, buffers.free_bytes // SMALL_ROW_BYTES))
        chunk = client.poll(rows_max, LINGER_S) if self._busy else client.poll(1, IDLE_S)
        try:
            self._busy = bool(chunk.partition_rows)
            if self._busy and self._include_headers:
                chunk.count_headers()
            self._record_size.update(chunk.sizes)
            self._take_in(chunk)
        finally:
            chunk.free()

    # --- what came

    def _take_in(self, chunk: NativeChunk) -> None:
        # What came damaged has its place somewhere among the rows: none of them is taken.
        stopped = {event.tp for event in chunk.events if event.code != EOF and event.tp is not None}
        torn = frozenset(stopped)
        if chunk.partition_rows:
            offsets = np.concatenate([run.offsets for run in chunk.partition_rows])
            cuts = [RowSlice(run.tp, run.first, run.first + len(run.offsets)) for run in chunk.partition_rows]
            for group in group_by_batch(cuts, chunk.sizes):
                self._convert(chunk, group, offsets, stopped)
        with self._stock.locked() as buffers:
            for event in chunk.events:
                self._on_event(buffers, event, stopped)
            for tp in torn:
                buffers.halt(tp)
            for tp in {run.tp for run in chunk.partition_rows}:
                if tp in buffers.partitions and buffers.is_full(tp):
                    self._full.add(tp)
            cut_short = stopped & self._assigned.keys()
        for tp in cut_short:
            self._assigned[tp] = 0  # no turn: what its client has is not next
            self._full.add(tp)  # look again

    def _convert(self, chunk: NativeChunk, group: list[RowSlice], offsets: Ints, stopped: set[TopicPartition]) -> None:
        """Take in those rows of the group that are next and that there is room for."""
        parts: list[Reached] = []
        reached: dict[TopicPartition, int] = {}
        with self._stock.locked() as buffers:
            for cut in group:
                if cut.tp in stopped:
                    continue
                part = self._accepted(buffers, chunk, cut, offsets[cut.first : cut.last], reached, stopped)
                if part is not None:
                    parts.append(part)
                    reached[cut.tp] = part.end
        if not parts:
            return
        try:
            batch = chunk.batch([part.cut for part in parts], self._include_headers)
        except SourceError:  # a record that Spark cannot hold: the task that reads it says so
            with self._stock.locked() as buffers:
                buffers.cancel(parts)
                for tp in reached:
                    buffers.halt(tp)
            stopped |= reached.keys()
            return
        with self._stock.locked() as buffers:
            buffers.add(batch, parts)

    def _accepted(
        self,
        buffers: Buffers,
        chunk: NativeChunk,
        cut: RowSlice,
        offsets: Ints,
        reached: dict[TopicPartition, int],
        stopped: set[TopicPartition],
    ) -> Reached | None:
        held = buffers.partitions.get(cut.tp)
        if held is None or held.halted or held.turn != self._assigned.get(cut.tp):
            return None
        start = reached.get(cut.tp, held.position)
        epoch = held.epoch if held.epoch != UNKNOWN else None
        first, last, _, later = select_rows(chunk, PartitionRows(cut.tp, cut.first, offsets), start, OFFSET_MAX, epoch)
        if later is not None:
            held.halted = True
            stopped.add(cut.tp)
        if first >= last:
            return None
        count, room = buffers.reserve(cut.tp, chunk.sizes[cut.first + first : cut.first + last])
        if count < last - first:
            stopped.add(cut.tp)
        if not count:
            return None
        wanted = RowSlice(cut.tp, cut.first + first, cut.first + first + count)
        return Reached(wanted, held, held.turn, start, int(offsets[first + count - 1]) + 1, room)

    def _on_event(self, buffers: Buffers, event: ClientEvent, stopped: Collection[TopicPartition]) -> None:
        if event.code != EOF:
            log.info("reading ahead of %s: %s", event.tp or "all partitions", event.text)
        elif event.tp is not None and event.tp not in stopped and event.tp in self._assigned:
            buffers.advance(event.tp, self._assigned[event.tp], event.offset)
