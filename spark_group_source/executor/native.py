"""The fast client: librdkafka's arrays of messages become Arrow columns without a Python object per record.

Runs in: executor workers. Deliberately absent: how the library is loaded and what is trusted of it (``rdkafka``), and
decisions about ranges (``ranges``).

One poll fills an array of message pointers. Numpy gathers the messages' structs by address, Arrow copies keys and
values once, straight from the fetch buffers, and one call destroys them all.
"""

import ctypes as c
import itertools
import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_group_source.executor import rdkafka
from spark_group_source.executor.client import METADATA_TIMEOUT_S
from spark_group_source.executor.questions import Questions
from spark_group_source.executor.rdkafka import Words
from spark_group_source.executor.records import (
    Bounds,
    Cut,
    Event,
    HeaderRow,
    Ints,
    Run,
    Told,
    assemble,
    header_bytes,
    header_column,
)
from spark_group_source.model import TopicPartition

log = logging.getLogger(__name__)

_MESSAGE_BYTES = 104
"""What is read of each message: the public struct of 72, and the private fields up to the timestamp."""
_ERR, _RKT, _PARTITION, _PAYLOAD, _LEN, _KEY, _KEY_LEN, _OFFSET, _STAMP_TYPE, _STAMP = 0, 1, 2, 3, 4, 5, 6, 7, 11, 12
"""Which 8-byte word of it holds what; err and partition are low halves, the timestamp's type is a high half."""

_CONSUMER = 1
_NO_CONSUMER_CLOSE = 8
_EVENT_LOG, _EVENT_ERROR = 4, 8
_OFFSET_INVALID = -1001


class NativeChunk:
    """Messages of one poll, in C's memory until ``free``."""

    def __init__(self, lib: rdkafka.Library, block: int, count: int, stamps_by_call: bool) -> None:
        self._lib = lib
        self._block = block
        self._pid = os.getpid()
        self._stamps_by_call = stamps_by_call
        self.runs: list[Run] = []
        self.events: list[Event] = []
        self.sizes: Ints = np.zeros(0, dtype=np.int64)
        self._header_rows: list[HeaderRow] = []
        self._addresses: Words = rdkafka.words_at(block + 8, count) if count else np.zeros(0, dtype=np.uint64)
        if count:
            self._read()

    def _read(self) -> None:
        # One struct after the other: they are scattered over memory, so each is touched once only.
        rows = rdkafka.gather(self._addresses, _MESSAGE_BYTES, 8).view(np.uint64).reshape(-1, _MESSAGE_BYTES // 8)
        failed = rows[:, _ERR].astype(np.uint32) != 0
        names: dict[int, str] = {0: ""}
        if failed.any():
            self.events = [self._event(row, names) for row in rows[failed]]
            rows, self._addresses = rows[~failed], self._addresses[~failed]
        self._rows: Words = rows
        if not len(rows):
            return
        self.sizes = (rows[:, _LEN] + rows[:, _KEY_LEN]).view(np.int64)
        offsets = rows[:, _OFFSET].view(np.int64)
        partitions = rows[:, _PARTITION].astype(np.uint32).view(np.int32)
        topics = rows[:, _RKT]
        changes = np.flatnonzero((topics[1:] != topics[:-1]) | (partitions[1:] != partitions[:-1])) + 1
        starts = [0, *changes.tolist(), len(rows)]
        for first, last in itertools.pairwise(starts):
            tp = TopicPartition(self._name(int(topics[first]), names), int(partitions[first]))
            self.runs.append(Run(tp, first, offsets[first:last]))

    def _name(self, rkt: int, names: dict[int, str]) -> str:
        """Names are looked up per chunk: only while a message lives does its topic's address stay its own."""
        if rkt not in names:
            names[rkt] = self._lib.topic_name(rkt).decode()
        return names[rkt]

    def _event(self, row: Words, names: dict[int, str]) -> Event:
        code = int(row[_ERR : _ERR + 1].view(np.int32)[0])
        partition = int(row[_PARTITION : _PARTITION + 1].view(np.int32)[0])
        topic = self._name(int(row[_RKT]), names)
        # For an error the payload is its text.
        text = c.string_at(int(row[_PAYLOAD]), int(row[_LEN])) if row[_PAYLOAD] else self._lib.err2str(code)
        tp = TopicPartition(topic, partition) if topic and partition >= 0 else None
        return Event(code, text.decode(errors="replace"), tp, int(row[_OFFSET : _OFFSET + 1].view(np.int64)[0]))

    def leader_epoch(self, row: int) -> int:
        return int(self._lib.message_leader_epoch(int(self._addresses[row])))

    def count_headers(self) -> None:
        self._header_rows = self._headers()
        self.sizes = self.sizes + header_bytes(self._header_rows)

    def batch(self, cuts: Sequence[Cut], include_headers: bool) -> pa.RecordBatch:
        first, last = cuts[0].first, cuts[-1].last
        if sum(cut.last - cut.first for cut in cuts) == last - first:
            rows, addresses = self._rows[first:last], self._addresses[first:last]
        else:
            at = np.concatenate([np.arange(cut.first, cut.last) for cut in cuts])
            rows, addresses = self._rows[at], self._addresses[at]
        stamps, stamp_types = self._stamps(rows, addresses)
        headers = [row for cut in cuts for row in self._header_rows[cut.first : cut.last]]
        return assemble(
            cuts,
            rdkafka.binary_column(rows[:, _KEY], rows[:, _KEY_LEN]),
            rdkafka.binary_column(rows[:, _PAYLOAD], rows[:, _LEN]),
            np.ascontiguousarray(rows[:, _OFFSET]).view(np.int64),
            stamps,
            stamp_types,
            header_column(headers) if include_headers else None,
        )

    def _stamps(self, rows: Words, addresses: Words) -> tuple[Ints, npt.NDArray[np.int32]]:
        """Timestamps in ms and librdkafka's type of each: read in one go if the first and the last agree with calls."""
        kind = c.c_int()
        sample = [0, len(rows) // 2, len(rows) - 1]
        if not self._stamps_by_call:
            stamps = np.ascontiguousarray(rows[:, _STAMP]).view(np.int64)
            kinds = (rows[:, _STAMP_TYPE] >> np.uint64(32)).astype(np.int32)
            if all(
                self._lib.message_timestamp(int(addresses[at]), c.byref(kind)) == stamps[at] and kind.value == kinds[at]
                for at in sample
            ):
                return stamps, kinds
            log.warning("this librdkafka keeps timestamps elsewhere; each is asked for singly, which is slower")
            self._stamps_by_call = True
        stamps, kinds = np.empty(len(rows), dtype=np.int64), np.empty(len(rows), dtype=np.int32)
        for at, address in enumerate(addresses.tolist()):
            stamps[at] = self._lib.message_timestamp(address, c.byref(kind))
            kinds[at] = kind.value
        return stamps, kinds

    def _headers(self) -> list[HeaderRow]:
        get, get_all = self._lib.message_headers, self._lib.header_get_all
        handle, name, value, size = c.c_void_p(), c.c_char_p(), c.c_void_p(), c.c_size_t()
        rows: list[HeaderRow] = []
        for address in self._addresses.tolist():
            row: list[tuple[str, bytes | None]] = []
            if get(address, c.byref(handle)) == 0:
                while get_all(handle, len(row), c.byref(name), c.byref(value), c.byref(size)) == 0:
                    body = None if value.value is None else c.string_at(value.value, size.value)
                    row.append(((name.value or b"").decode(errors="replace"), body))
            rows.append(row)
        return rows

    def free(self) -> None:
        """Give the messages back to librdkafka. Safe to call twice; does nothing in a forked child."""
        block, self._block = self._block, 0
        if block and self._pid == os.getpid():
            self._lib.messages_destroy(block)


class NativeClient:
    """A consumer made and used through ctypes; the methods are those of ``client.Client``.

    Raises:
        ValueError: librdkafka refuses a setting; the text may hold its value.
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        self._lib = lib = rdkafka.library()
        self.pid = os.getpid()
        self._stamps_by_call = False
        self._topics: set[str] = set()
        why = c.create_string_buffer(512)
        conf = lib.conf_new()
        lib.conf_set_events(conf, _EVENT_ERROR | _EVENT_LOG)
        for name, value in {**settings, "log.queue": "true"}.items():
            if lib.conf_set(conf, name.encode(), value.encode(), why, len(why)):
                lib.conf_destroy(conf)
                raise ValueError(why.value.decode(errors="replace"))
        self._rk = lib.new(_CONSUMER, conf, why, len(why))
        if not self._rk:
            lib.conf_destroy(conf)
            raise ValueError(why.value.decode(errors="replace"))
        lib.set_log_queue(self._rk, None)  # to the main queue, where errors arrive too
        self._main = lib.queue_get_main(self._rk)
        self._queue = lib.queue_get_consumer(self._rk)
        self._questions = Questions(lib, self._rk)

    def _list(self, positions: Iterable[tuple[TopicPartition, int]]) -> Any:  # Any: a ctypes pointer
        found = self._lib.topic_partition_list_new(16)
        for tp, offset in positions:
            self._lib.topic_partition_list_add(found, tp.topic.encode(), tp.partition).contents.offset = offset
        return found

    def _with_list(self, call: Any, positions: Iterable[tuple[TopicPartition, int]]) -> None:
        partitions = self._list(positions)
        try:
            error = call(self._rk, partitions)
        finally:
            self._lib.topic_partition_list_destroy(partitions)
        if call is self._lib.assign:
            if error:
                raise RuntimeError(self._lib.err2str(error).decode())
        elif error:
            text = self._lib.error_string(error).decode()
            self._lib.error_destroy(error)
            raise RuntimeError(text)

    def assign(self, positions: Sequence[tuple[TopicPartition, int]]) -> None:
        self._with_list(self._lib.assign, positions)
        self._look_for_leaders(positions)

    def add(self, positions: Sequence[tuple[TopicPartition, int]]) -> None:
        self._with_list(self._lib.incremental_assign, positions)
        self._look_for_leaders(positions)

    def _look_for_leaders(self, positions: Sequence[tuple[TopicPartition, int]]) -> None:
        new = {tp.topic for tp, _ in positions} - self._topics
        if new:
            self._topics |= new
            self.look_for_brokers()

    def look_for_brokers(self) -> None:
        found = c.c_void_p()
        if self._lib.metadata(self._rk, 0, None, c.byref(found), round(METADATA_TIMEOUT_S * 1000)) == 0:
            self._lib.metadata_destroy(found)

    def drop(self, tps: Sequence[TopicPartition]) -> None:
        self._with_list(self._lib.incremental_unassign, [(tp, _OFFSET_INVALID) for tp in tps])

    def move(self, tp: TopicPartition, offset: int) -> None:
        self.drop([tp])
        self.add([(tp, offset)])

    def poll(self, rows_max: int, wait_s: float) -> NativeChunk:
        lib = self._lib
        block = lib.malloc(8 * (rows_max + 1))
        if not block:
            raise MemoryError("no memory for the list of a poll")
        count = max(0, lib.consume_batch_queue(self._queue, round(wait_s * 1000), block + 8, rows_max))
        c.c_uint64.from_address(block).value = count
        chunk = NativeChunk(lib, block, count, self._stamps_by_call)
        chunk.events.extend(self._events())
        return chunk

    def _events(self) -> list[Event]:
        """Empty the main queue. Polling it also serves what librdkafka does on it by itself, such as token refresh."""
        lib, events = self._lib, []
        while event := lib.queue_poll(self._main, 0):
            kind = lib.event_type(event)
            if kind == _EVENT_ERROR:
                text = (lib.event_error_string(event) or b"").decode(errors="replace")
                events.append(Event(lib.event_error(event), text, None, -1))
            elif kind == _EVENT_LOG:
                facility, line, level = c.c_char_p(), c.c_char_p(), c.c_int()
                lib.event_log(event, c.byref(facility), c.byref(line), c.byref(level))
                quiet = level.value > 4 or facility.value == b"CONFWARN"  # a setting that does not concern consumers
                log.log(
                    logging.DEBUG if quiet else logging.INFO,
                    "%s: %s",
                    (facility.value or b"").decode(errors="replace"),
                    (line.value or b"").decode(errors="replace"),
                )
            lib.event_destroy(event)
        return events

    def positions(self, tps: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        partitions = self._list((tp, _OFFSET_INVALID) for tp in tps)
        try:
            self._lib.position(self._rk, partitions)
            elements = partitions.contents.elems
            return {tp: elements[at].offset for at, tp in enumerate(tps)}
        finally:
            self._lib.topic_partition_list_destroy(partitions)

    def ask_topics(self, names: Sequence[str]) -> int:
        return self._questions.ask_topics(names)

    def ask_bounds(self, tp: TopicPartition) -> int:
        return self._questions.ask_bounds(tp)

    def answer(self, numbers: Collection[int], wait_s: float) -> tuple[int, Told | Bounds | Event] | None:
        return self._questions.answer(numbers, wait_s)

    def give_up(self, numbers: Collection[int]) -> None:
        self._questions.give_up(numbers)

    def clear(self) -> None:
        self._questions.forget()
        error = self._lib.assign(self._rk, None)
        if error:
            raise RuntimeError(self._lib.err2str(error).decode())

    def close(self) -> None:
        """Stop the client's threads. It is in no group, so there is nothing to leave."""
        rk, self._rk = self._rk, None
        if rk and self.pid == os.getpid():
            self._questions.close()
            self._lib.queue_destroy(self._queue)
            self._lib.queue_destroy(self._main)
            self._lib.destroy_flags(rk, _NO_CONSUMER_CLOSE)
