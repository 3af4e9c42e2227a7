"""The reading client: librdkafka's message arrays become Arrow columns without a Python object per record.

Runs in: executor workers and agents, on 64-bit little-endian POSIX machines. Deliberately absent: creating the client
and serving its events (``librdkafka``), decisions about ranges (``range_reader``), the meaning of error codes
(``error_codes``), and ``query_watermark_offsets``, which sends two requests and may report one offset for both if one
of them fails.

One poll fills an array of message pointers. Numpy gathers the messages' structs by address, Arrow copies keys and
values once, directly from the fetch buffers, and one call destroys all messages.

It relies on the public struct ``rd_kafka_message_t`` and on public functions, which are librdkafka's ABI, and on two
private details, each with a slower public function as a fallback. First, the list that ``rd_kafka_messages_destroy``
takes is a count followed by pointers: assumed of tested releases only, and checked through its accessors when the
library is loaded; otherwise messages are destroyed one by one. Second, a message has its timestamp after the public
struct: compared with the public function in every batch, otherwise timestamps are read with that function.

librdkafka sends an admin request to the broker that it knows as the controller or the leader, and may not notice for
minutes that this broker is dead. So an overdue request is resent, after a metadata request to any broker. The earlier
request stays open, because its broker may only be slow; the first response counts.
"""

import contextlib
import ctypes as c
import functools
import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_group_source.errors import SetupError
from spark_group_source.librdkafka import (
    CLIENT,
    CONSUMER,
    INT,
    INT64,
    PARTITIONS,
    POINTER,
    POINTERS,
    POLL_MS,
    SIZE,
    TEXT,
    Client,
    Library,
    Partition,
    Signatures,
    text,
)
from spark_group_source.model import TopicPartition, topic_id
from spark_group_source.reader.records import (
    ClientEvent,
    HeaderRow,
    Ints,
    NotHeaders,
    PartitionRows,
    RecordHeaders,
    RowSlice,
    TopicDescription,
    TopicDescriptions,
    Watermarks,
    Words,
    binary_column,
    build_batch,
    gather,
    header_bytes,
    header_column,
    parse_headers,
    words_at,
)

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 5.0
"""The timeout of one request, with the search for the broker that can serve it."""
RESEND_AFTER_S = 1.0
"""A request without a response is resent after this time. Each one times out after :data:`REQUEST_TIMEOUT_S`, so at
most six are open at a time."""
METADATA_TIMEOUT_S = 1.0
"""The timeout of a metadata request: for topics that are new to the client, and before a request is resent."""

_READ_UNCOMMITTED = 0
EARLIEST, LATEST = -2, -1
"""Offset specifications of ListOffsets."""
TIMED_OUT = -185
"""librdkafka's ``_TIMED_OUT``."""

_MESSAGE_BYTES = 104
"""The bytes read of each message: the public struct of 72, and the private fields up to the timestamp."""
_ERR, _RKT, _PARTITION, _PAYLOAD, _LEN, _KEY, _KEY_LEN, _OFFSET, _STAMP_TYPE, _STAMP = 0, 1, 2, 3, 4, 5, 6, 7, 11, 12
"""The 8-byte word of each field; err and partition are the low halves, the timestamp's type is the high half."""

_HEADERS_AT = 120
"""Where a message has the length of its unparsed headers (32 bits), and in the next word their address. Both are 0 for
records in the formats before Kafka 0.11, which have no headers."""
_NO_HEADERS = np.zeros(1, dtype=np.uint8)
"""The headers of a record that has none: their count."""

_OFFSET_INVALID = -1001

T = TypeVar("T")

_CALLS: Signatures = {
    **CLIENT,
    "queue_get_consumer": (POINTER, POINTER),
    "event_opaque": (POINTER, POINTER),
    "topic_partition_get_leader_epoch": (c.c_int32, c.POINTER(Partition)),
    "assign": (INT, POINTER, PARTITIONS),
    "incremental_assign": (POINTER, POINTER, PARTITIONS),
    "incremental_unassign": (POINTER, POINTER, PARTITIONS),
    "error_destroy": (None, POINTER),
    "metadata": (INT, POINTER, INT, POINTER, POINTERS, INT),
    "metadata_destroy": (None, POINTER),
    "position": (INT, POINTER, PARTITIONS),
    "consume_batch_queue": (c.c_ssize_t, POINTER, INT, POINTER, SIZE),
    "topic_name": (TEXT, POINTER),
    "version_str": (TEXT,),
    "message_destroy": (None, POINTER),
    "message_timestamp": (INT64, POINTER, c.POINTER(INT)),
    "message_leader_epoch": (c.c_int32, POINTER),
    "message_headers": (INT, POINTER, POINTERS),
    "header_get_all": (INT, POINTER, SIZE, c.POINTER(TEXT), POINTERS, c.POINTER(SIZE)),
    "AdminOptions_set_isolation_level": (POINTER, POINTER, INT),
    "AdminOptions_set_opaque": (None, POINTER, POINTER),
    "TopicCollection_of_topic_names": (POINTER, c.POINTER(TEXT), SIZE),
    "TopicCollection_destroy": (None, POINTER),
    "DescribeTopics": (None, POINTER, POINTER, POINTER, POINTER),
    "event_DescribeTopics_result": (POINTER, POINTER),
    "DescribeTopics_result_topics": (POINTERS, POINTER, c.POINTER(SIZE)),
    "TopicDescription_name": (TEXT, POINTER),
    "TopicDescription_error": (POINTER, POINTER),
    "TopicDescription_topic_id": (POINTER, POINTER),
    "TopicDescription_partitions": (POINTERS, POINTER, c.POINTER(SIZE)),
    "Uuid_base64str": (TEXT, POINTER),
    "ListOffsets": (None, POINTER, PARTITIONS, POINTER, POINTER),
    "event_ListOffsets_result": (POINTER, POINTER),
    "ListOffsets_result_infos": (POINTERS, POINTER, c.POINTER(SIZE)),
    "ListOffsetsResultInfo_topic_partition": (c.POINTER(Partition), POINTER),
}
_LISTS: Signatures = {
    "messages_count": (SIZE, POINTER),
    "messages_get": (POINTER, POINTER, SIZE),
    "messages_destroy": (None, POINTER),
}
"""Experimental in librdkafka 2.16; a later release may change or remove them."""
LISTS_TESTED = ("2.16",)
"""The releases of librdkafka whose lists of messages are tested: ``tests/reader/test_native_client.py``."""


@functools.cache
def library() -> Library:
    """The functions of librdkafka that reading needs.

    Raises:
        SetupError: this machine is not supported, or librdkafka lacks a function.
    """
    if sys.byteorder != "little" or c.sizeof(c.c_void_p) != 8 or os.name != "posix":
        raise SetupError("this machine is not supported: executors need a 64-bit little-endian POSIX system")
    return Library(_CALLS)


_libc = c.CDLL(None)
_libc.malloc.restype, _libc.malloc.argtypes = POINTER, [SIZE]
_libc.free.restype, _libc.free.argtypes = None, [POINTER]


@functools.cache
def list_calls() -> Library | None:
    """The functions for whole lists of messages; None if they are missing, not tested, or a list has another layout."""
    version = text(library().version_str())
    if version.startswith(tuple(f"{tested}." for tested in LISTS_TESTED)):
        try:
            lists = Library(_LISTS)
        except SetupError as exc:
            reason = f"it lacks a function: {exc}"
        else:
            if _is_known_layout(lists):
                return lists
            reason = "its lists of messages have another layout"
    else:
        reason = f"its lists of messages are tested in {', '.join(LISTS_TESTED)} only"
    log.warning("librdkafka %s: %s; destroying messages one by one, which is slower", version, reason)
    return None


def _is_known_layout(lists: Library) -> bool:
    """Whether a list is a count followed by pointers. Each word of the list that is passed, the count included, is an
    address in its own memory: functions that expect another layout read there too, and nothing else."""
    block = np.empty(64, dtype=np.uint64)
    address = block.ctypes.data
    block[:] = address + 8 * ((np.arange(len(block), dtype=np.uint64) + 3) % 16)
    return lists.messages_count(address) == block[0] and all(
        lists.messages_get(address, at) == block[1 + at] for at in range(3)
    )


class NativeChunk:
    """The messages of one poll. Their memory is librdkafka's: ``read`` and convert it, then ``free`` it, before the
    next poll, and before the client is closed, which would wait for it without end."""

    def __init__(self, client: "NativeClient", block: int, count: int) -> None:
        self._lib, self._client = client.lib, client
        self._block, self._count = block, count
        self.partition_rows: list[PartitionRows] = []
        """The rows by partition, in the order of the poll."""
        self.events: list[ClientEvent] = []
        self.sizes: Ints = np.zeros(0, dtype=np.int64)
        """Key and value bytes of each row; plus header bytes after :meth:`count_headers`."""
        self._headers: RecordHeaders | None = None
        self._header_rows: list[HeaderRow] = []
        """The headers of each row, if they were read one by one."""

    def read(self) -> None:
        """Find the rows and the events among the messages."""
        if not self._count:
            return
        self._addresses: Words = words_at(self._block + 8, self._count)
        # The structs are scattered over memory: copy each one only once.
        rows = gather(self._addresses, _MESSAGE_BYTES, 8).view(np.uint64).reshape(-1, _MESSAGE_BYTES // 8)
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
            self.partition_rows.append(PartitionRows(tp, first, offsets[first:last]))

    def _name(self, rkt: int, names: dict[int, str]) -> str:
        """Look up a topic's name. Names are cached per chunk: the address is valid only as long as the messages."""
        if rkt not in names:
            names[rkt] = self._lib.topic_name(rkt).decode()
        return names[rkt]

    def _event(self, row: Words, names: dict[int, str]) -> ClientEvent:
        code = int(row[_ERR : _ERR + 1].view(np.int32)[0])
        partition = int(row[_PARTITION : _PARTITION + 1].view(np.int32)[0])
        topic = self._name(int(row[_RKT]), names)
        # The payload of an error is its text.
        words = c.string_at(int(row[_PAYLOAD]), int(row[_LEN])) if row[_PAYLOAD] else self._lib.err2str(code)
        tp = TopicPartition(topic, partition) if topic and partition >= 0 else None
        return ClientEvent(code, text(words), tp, int(row[_OFFSET : _OFFSET + 1].view(np.int64)[0]))

    def leader_epoch(self, row: int) -> int:
        """The epoch of the leader that wrote the record; -1 if it is unknown."""
        return int(self._lib.message_leader_epoch(int(self._addresses[row])))

    def count_headers(self) -> None:
        """Read the headers, and add their bytes to ``sizes``."""
        self._headers = self._parse_headers()
        if self._headers is not None:
            self.sizes = self.sizes + self._headers.row_bytes()
            return
        self._header_rows = self._headers_by_call()
        self.sizes = self.sizes + header_bytes(self._header_rows)

    def batch(self, slices: Sequence[RowSlice], columns: Sequence[str]) -> pa.RecordBatch:
        """Convert these columns of the rows of these slices.

        Raises:
            GroupError: Spark cannot store a record's timestamp.
        """
        first, last = slices[0].first, slices[-1].last
        if sum(one.last - one.first for one in slices) == last - first:
            rows, addresses = self._rows[first:last], self._addresses[first:last]
        else:
            at = np.concatenate([np.arange(one.first, one.last) for one in slices])
            rows, addresses = self._rows[at], self._addresses[at]
        stamps, stamp_types = self._timestamps(rows, addresses)
        return build_batch(
            columns,
            slices,
            key=binary_column(rows[:, _KEY], rows[:, _KEY_LEN]) if "key" in columns else None,
            value=binary_column(rows[:, _PAYLOAD], rows[:, _LEN]) if "value" in columns else None,
            offset=np.ascontiguousarray(rows[:, _OFFSET]).view(np.int64),
            timestamp_ms=stamps,
            timestamp_type=stamp_types,
            headers=self._header_column(slices) if "headers" in columns else None,
        )

    def _header_column(self, slices: Sequence[RowSlice]) -> pa.Array:
        if self._headers is not None:
            return self._headers.column(slices)
        return header_column([row for one in slices for row in self._header_rows[one.first : one.last]])

    def _timestamps(self, rows: Words, addresses: Words) -> tuple[Ints, npt.NDArray[np.int32]]:
        """Timestamps in ms and librdkafka's type of each. Read from memory if a sample agrees with the public function,
        otherwise with that function."""
        kind = c.c_int()
        sample = [0, len(rows) // 2, len(rows) - 1]
        if not self._client.stamps_by_call:
            stamps = np.ascontiguousarray(rows[:, _STAMP]).view(np.int64)
            kinds = (rows[:, _STAMP_TYPE] >> np.uint64(32)).astype(np.int32)
            if all(
                self._lib.message_timestamp(int(addresses[at]), c.byref(kind)) == stamps[at] and kind.value == kinds[at]
                for at in sample
            ):
                return stamps, kinds
            log.warning("librdkafka has another message layout; reading timestamps one by one, which is slower")
            self._client.stamps_by_call = True
        stamps, kinds = np.empty(len(rows), dtype=np.int64), np.empty(len(rows), dtype=np.int32)
        for at, address in enumerate(addresses.tolist()):
            stamps[at] = self._lib.message_timestamp(address, c.byref(kind))
            kinds[at] = kind.value
        return stamps, kinds

    def _parse_headers(self) -> RecordHeaders | None:
        """The headers as the broker sent them. None if they are not where they are expected, right behind the value, or
        if that cannot be seen, because no row has a key or a value; and if a row has too many."""
        rows = self._rows
        # By length: librdkafka has an empty value or key elsewhere. The length of a null or empty value is one byte.
        has_value, has_key = rows[:, _LEN] != 0, rows[:, _KEY_LEN] != 0
        if self._client.headers_by_call or not (has_value | has_key).any():
            return None
        words = gather(self._addresses + np.uint64(_HEADERS_AT), 16, 8).view(np.uint64).reshape(-1, 2)
        at, lengths = words[:, 1], words[:, 0].astype(np.uint32).astype(np.int64)
        value_end = rows[:, _PAYLOAD] + rows[:, _LEN]
        key_end = rows[:, _KEY] + rows[:, _KEY_LEN] + np.uint64(1)
        without = np.flatnonzero((at == 0) & (lengths == 0))
        handle = c.c_void_p()
        if all(self._lib.message_headers(address, c.byref(handle)) for address in self._addresses[without].tolist()):
            at[without], lengths[without] = _NO_HEADERS.ctypes.data, len(_NO_HEADERS)
            has_value[without] = has_key[without] = False
        expected = np.where(has_value, value_end, np.where(has_key, key_end, at))
        if (at == expected).all() and at.all():
            with contextlib.suppress(NotHeaders):
                return parse_headers(at, lengths)
        log.warning("librdkafka has headers elsewhere in its messages; reading them one by one, which is slower")
        self._client.headers_by_call = True
        return None

    def _headers_by_call(self) -> list[HeaderRow]:
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
        """Free the messages. Safe to call twice; does nothing after the client was closed, and in a forked child."""
        block, self._block = self._block, 0
        if not block or self._client.rk is None:
            return
        if lists := list_calls():
            lists.messages_destroy(block)  # and the list itself
            return
        for address in words_at(block + 8, self._count).tolist() if self._count else ():
            self._lib.message_destroy(address)
        _libc.free(block)


class AdminRequests:
    """The open admin requests of one client, by number, with the responses received so far."""

    def __init__(self, client: Client) -> None:
        self._client, self._lib = client, client.lib
        self._queue = client.lib.queue_new(client.rk)
        self._number = 0
        self._open: dict[int, int | None] = {}
        """The response to each request, an event of librdkafka; None until it arrives."""

    def describe_topics(self, names: Sequence[str]) -> int:
        """Send DescribeTopics. Returns the number of the request."""
        lib = self._lib
        texts = (c.c_char_p * len(names))(*(name.encode() for name in names))
        topics = lib.TopicCollection_of_topic_names(texts, len(names))
        number = self._send(lib.DescribeTopics, topics)
        lib.TopicCollection_destroy(topics)
        return number

    def list_offset(self, tp: TopicPartition, spec: int) -> int:
        """Send ListOffsets for :data:`EARLIEST` or :data:`LATEST`, the high watermark. Returns the number of the
        request."""
        partitions = self._client.partitions([(tp, spec)])
        number = self._send(self._lib.ListOffsets, partitions, isolation=_READ_UNCOMMITTED)
        self._lib.topic_partition_list_destroy(partitions)
        return number

    def _send(self, call: Callable[..., None], what: object, *, isolation: int | None = None) -> int:
        lib, options = self._lib, self._client.admin_options(REQUEST_TIMEOUT_S)
        if isolation is not None and (error := lib.AdminOptions_set_isolation_level(options, isolation)):
            lib.error_destroy(error)
        self._number += 1
        lib.AdminOptions_set_opaque(options, self._number)
        call(self._client.rk, what, options, self._queue)
        lib.AdminOptions_destroy(options)
        self._open[self._number] = None
        return self._number

    def receive(self, wait_s: float) -> None:
        """Receive responses. Waits for the first one up to ``wait_s``, and serves the client in the meantime."""
        until_s = time.monotonic() + wait_s
        event = None
        while not event:
            self._client.serve()
            left_ms = max(0, round((until_s - time.monotonic()) * 1000))
            event = self._lib.queue_poll(self._queue, min(left_ms, POLL_MS))
            if left_ms <= POLL_MS:
                break
        while event:
            number = self._lib.event_opaque(event)
            if number in self._open:
                self._open[number] = event
            else:  # the request was cancelled
                self._lib.event_destroy(event)
            event = self._lib.queue_poll(self._queue, 0)

    def responses(self, numbers: Sequence[int]) -> list[int] | None:
        """The responses to these requests; None while one is missing. This class destroys them."""
        found = [event for number in numbers if (event := self._open[number])]
        return found if len(found) == len(numbers) else None

    def cancel(self, numbers: Sequence[int]) -> None:
        """Drop these requests and their responses."""
        for number in numbers:
            if event := self._open.pop(number, None):
                self._lib.event_destroy(event)

    def cancel_all(self) -> None:
        self.cancel(list(self._open))

    def close(self) -> None:
        """Drop all requests. Call it once, before the client is closed."""
        self.cancel_all()
        self._lib.queue_destroy(self._queue)

    # --- parsing of responses

    def error_of(self, event: int) -> ClientEvent | None:
        """The error of a whole response, or None."""
        code = self._lib.event_error(event)
        return ClientEvent(code, text(self._lib.event_error_string(event)), None, -1) if code else None

    def topics_of(self, event: int) -> TopicDescriptions:
        """The topics in a response to :meth:`describe_topics`, those with an error included."""
        lib, count, partitions = self._lib, c.c_size_t(), c.c_size_t()
        topics: TopicDescriptions = {}
        found = lib.DescribeTopics_result_topics(lib.event_DescribeTopics_result(event), c.byref(count))
        for topic in found[: count.value]:
            error = lib.TopicDescription_error(topic)
            code, words = (lib.error_code(error), text(lib.error_string(error))) if error else (0, "")
            lib.TopicDescription_partitions(topic, c.byref(partitions))
            id_ = text(lib.Uuid_base64str(lib.TopicDescription_topic_id(topic)))
            name = text(lib.TopicDescription_name(topic))
            topics[name] = TopicDescription(code, words, "" if code else topic_id(id_), 0 if code else partitions.value)
        return topics

    def offset_of(self, event: int, tp: TopicPartition) -> tuple[int, int] | ClientEvent:
        """Return (offset, leader epoch), or the error."""
        lib, count = self._lib, c.c_size_t()
        found = lib.ListOffsets_result_infos(lib.event_ListOffsets_result(event), c.byref(count))
        if count.value != 1:
            return ClientEvent(TIMED_OUT, "the response lacks the partition", tp, -1)
        info = lib.ListOffsetsResultInfo_topic_partition(found[0])
        partition = info.contents
        if partition.err:
            return ClientEvent(partition.err, text(lib.err2str(partition.err)), tp, -1)
        if partition.offset < 0:  # librdkafka's initial value
            return ClientEvent(TIMED_OUT, "the response lacks the offset", tp, -1)
        return int(partition.offset), int(lib.topic_partition_get_leader_epoch(info))


class PendingRequest(Generic[T]):
    """A request that is resent until it has a response; sent when it is created. One thread.

    Args:
        requests: the client's admin requests.
        send: sends the admin requests that make up this one, and returns their numbers.
        parse: returns the result in their responses, or the error of one of them.
        refresh_metadata: requests metadata from any broker, before the request is resent.
    """

    def __init__(
        self,
        requests: AdminRequests,
        send: Callable[[], tuple[int, ...]],
        parse: Callable[[list[int]], "T | ClientEvent"],
        refresh_metadata: Callable[[], None],
    ) -> None:
        self._requests, self._send, self._parse = requests, send, parse
        self._refresh_metadata = refresh_metadata
        self._sent: dict[tuple[int, ...], float] = {}
        """When each group of request numbers was sent; monotonic seconds."""
        self._resend_s = 0.0
        self._send_again()

    def receive(self, wait_s: float) -> tuple[T | ClientEvent, float] | None:
        """Return a result and when its request was sent, within ``wait_s``.

        Returns:
            An error in place of the result if a request failed; this one is still pending then. None if there is no
            response yet.
        """
        until_s = time.monotonic() + wait_s
        pause_s = 0.0
        while True:
            self._requests.receive(pause_s)
            for numbers, sent_s in self._sent.items():
                if events := self._requests.responses(numbers):
                    return self._result(numbers, events), sent_s
            if time.monotonic() >= self._resend_s:
                self._refresh_metadata()
                self._send_again()
            elif time.monotonic() >= until_s:
                return None
            pause_s = max(0.0, min(until_s, self._resend_s) - time.monotonic())

    def _result(self, numbers: tuple[int, ...], events: list[int]) -> T | ClientEvent:
        errors = [error for event in events if (error := self._requests.error_of(event))]
        result = errors[0] if errors else self._parse(events)
        if isinstance(result, ClientEvent):
            del self._sent[numbers]
            self._requests.cancel(numbers)
        else:
            self.cancel()
        return result

    def _send_again(self) -> None:
        self._resend_s = time.monotonic() + RESEND_AFTER_S
        self._sent[self._send()] = self._resend_s - RESEND_AFTER_S

    def cancel(self) -> None:
        """Drop the request."""
        for numbers in self._sent:
            self._requests.cancel(numbers)
        self._sent = {}


class NativeClient(Client):
    """A consumer with assigned partitions: it joins no group and commits nothing. One thread, one reader at a time.

    Raises:
        OptionError: librdkafka refuses a setting.
        SetupError: librdkafka cannot be used here.
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        super().__init__(library(), CONSUMER, settings)
        self.stamps_by_call = False
        """Whether timestamps are read with the public function."""
        self.headers_by_call = False
        """Whether headers are read with the public function."""
        self.described: dict[str, tuple[TopicDescription, float]] = {}
        """The last description of each topic, and when its request was sent, in monotonic seconds. Readers set it."""
        self.used_s = 0.0
        """When a reader last used it, in monotonic seconds. Readers set it."""
        self._topics: set[str] = set()
        """Topics whose metadata was requested."""
        self._queue = self.lib.queue_get_consumer(self.rk)
        self._requests = AdminRequests(self)

    def assign(self, positions: Sequence[tuple[TopicPartition, int]]) -> None:
        """Replace the assignment; every position is the next offset to read."""
        partitions = self.partitions(positions)
        try:
            self._raise(self.lib.assign(self.rk, partitions))
        finally:
            self.lib.topic_partition_list_destroy(partitions)
        self._find_leaders(positions)

    def incremental_assign(self, positions: Sequence[tuple[TopicPartition, int]]) -> None:
        """Assign these partitions as well; fetching of the others continues."""
        self._change(self.lib.incremental_assign, positions)
        self._find_leaders(positions)

    def incremental_unassign(self, tps: Sequence[TopicPartition]) -> None:
        """Stop fetching these partitions; fetching of the others continues."""
        self._change(self.lib.incremental_unassign, [(tp, _OFFSET_INVALID) for tp in tps])

    def reassign(self, tp: TopicPartition, offset: int) -> None:
        """Continue with one assigned partition at another offset."""
        self.incremental_unassign([tp])
        self.incremental_assign([(tp, offset)])

    def _change(self, call: Callable[..., int], positions: Iterable[tuple[TopicPartition, int]]) -> None:
        partitions = self.partitions(positions)
        error = call(self.rk, partitions)
        self.lib.topic_partition_list_destroy(partitions)
        if error:
            words = text(self.lib.error_string(error))
            self.lib.error_destroy(error)
            raise RuntimeError(words)

    def _raise(self, code: int) -> None:
        if code:
            raise RuntimeError(text(self.lib.err2str(code)))

    def _find_leaders(self, positions: Sequence[tuple[TopicPartition, int]]) -> None:
        """Refresh the metadata for new topics; librdkafka itself does so up to a second later."""
        new = {tp.topic for tp, _ in positions} - self._topics
        if new:
            self._topics |= new
            self.refresh_metadata()

    def refresh_metadata(self) -> None:
        """Request metadata from any broker; waits for :data:`METADATA_TIMEOUT_S` at most."""
        found = c.c_void_p()
        if self.lib.metadata(self.rk, 0, None, c.byref(found), round(METADATA_TIMEOUT_S * 1000)) == 0:
            self.lib.metadata_destroy(found)

    def poll(self, rows_max: int, wait_s: float) -> NativeChunk:
        """Return the fetched records and events; waits up to ``wait_s`` if there are fewer than ``rows_max``."""
        block = _libc.malloc(8 * (rows_max + 1))
        count = max(0, self.lib.consume_batch_queue(self._queue, round(wait_s * 1000), block + 8, rows_max))
        c.c_uint64.from_address(block).value = count
        chunk = NativeChunk(self, block, count)
        try:
            chunk.read()
            self.serve()
            while self.errors:
                code, words = self.errors.popleft()
                chunk.events.append(ClientEvent(code, words, None, -1))
        except BaseException:  # such as a MemoryError: the caller has no chunk to free
            chunk.free()
            raise
        return chunk

    def positions(self, tps: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """The position of each partition: the offset after the last record that a poll returned."""
        partitions = self.partitions((tp, _OFFSET_INVALID) for tp in tps)
        self.lib.position(self.rk, partitions)
        found = {tp: int(partitions.contents.elems[at].offset) for at, tp in enumerate(tps)}
        self.lib.topic_partition_list_destroy(partitions)
        return found

    def describe_topics(self, names: Sequence[str]) -> PendingRequest[TopicDescriptions]:
        """Request the descriptions of topics."""
        requests = self._requests
        return PendingRequest(
            requests,
            lambda: (requests.describe_topics(names),),
            lambda events: requests.topics_of(events[0]),
            self.refresh_metadata,
        )

    def request_watermarks(self, tp: TopicPartition) -> PendingRequest[Watermarks]:
        """Request the bounds of a log from its leader. Takes two admin requests, because one returns only one offset of
        a partition."""
        requests = self._requests

        def parse(events: list[int]) -> Watermarks | ClientEvent:
            low, high = (requests.offset_of(event, tp) for event in events)
            if isinstance(low, ClientEvent):
                return low
            return high if isinstance(high, ClientEvent) else Watermarks(low[0], *high)

        return PendingRequest(
            requests,
            lambda: (requests.list_offset(tp, EARLIEST), requests.list_offset(tp, LATEST)),
            parse,
            self.refresh_metadata,
        )

    def clear(self) -> None:
        """Remove the assignment and cancel all requests."""
        if self.rk is not None:
            self._requests.cancel_all()
            self._raise(self.lib.assign(self.rk, None))

    def close(self) -> None:
        """Stop the client's threads. It is not in a group, so it leaves none."""
        if self.rk is not None:
            self._requests.close()
            self.lib.queue_destroy(self._queue)
        super().close()
