"""The calls of librdkafka that reading takes, the checks that make them safe to use, and raw memory as arrays.

Runs in: executor workers, on 64-bit little-endian POSIX machines. Deliberately absent: finding the
library (``librdkafka``).

What the fast client relies on:

- the public struct ``rd_kafka_message_t`` and public calls: librdkafka's ABI;
- two private facts, both checked where they are used: that a list for ``rd_kafka_messages_destroy`` is a count
  followed by pointers (asked back through its public accessors when the library is loaded; otherwise the fast client
  is refused), and where a message keeps its timestamp (``native`` compares with the public call in every batch).
"""

import ctypes as c
import functools
import os
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_group_source.librdkafka import (
    CLIENT,
    INT,
    INT64,
    PARTITIONS,
    POINTER,
    POINTERS,
    SIZE,
    TEXT,
    Partition,
    Signatures,
    calls,
)

OLDEST_VERSION = 0x02_0F_00_FF
"""librdkafka 2.15.0, the oldest that was looked at. Newer ones have to pass the checks."""

_INLINE_MAX = 12
"""A binary view keeps values up to this length in itself, longer ones as a reference."""
_WINDOW_BITS = 30
"""References of a view are 31 bits wide, so memory is named in windows of 1 GiB."""

Words = npt.NDArray[np.uint64]

_CALLS: Signatures = {
    **CLIENT,
    "version": (INT,),
    "destroy_flags": (None, POINTER, INT),
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
    "messages_count": (SIZE, POINTER),
    "messages_get": (POINTER, POINTER, SIZE),
    "messages_destroy": (None, POINTER),
    "message_timestamp": (INT64, POINTER, c.POINTER(INT)),
    "message_leader_epoch": (c.c_int32, POINTER),
    "message_headers": (INT, POINTER, POINTERS),
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
    "header_get_all": (INT, POINTER, SIZE, c.POINTER(TEXT), POINTERS, c.POINTER(SIZE)),
}


class Library:
    """librdkafka's calls by their names without ``rd_kafka_``, and libc's allocator."""

    def __init__(self) -> None:
        if sys.byteorder != "little" or c.sizeof(c.c_void_p) != 8 or os.name != "posix":
            raise ImportError("the fast client needs a 64-bit little-endian POSIX machine")
        vars(self).update(calls(_CALLS))
        libc = c.CDLL(None)
        self.malloc, self.release = libc.malloc, libc.free
        self.malloc.restype, self.malloc.argtypes = POINTER, [SIZE]
        self.release.restype, self.release.argtypes = None, [POINTER]
        if self.version() < OLDEST_VERSION:
            raise ImportError(f"librdkafka {self.version():#x} is older than {OLDEST_VERSION:#x}")
        self._check_list()

    def __getattr__(self, name: str) -> Any:  # Any: ctypes functions, set by name above
        raise AttributeError(name)

    def _check_list(self) -> None:
        block = self.malloc(8 * 4)
        try:
            words = words_at(block, 4)
            words[:] = (3, 0x1110, 0x2220, 0x3330)
            found = [self.messages_count(block), *(self.messages_get(block, at) for at in range(3))]
            if found != words.tolist():
                raise ImportError("librdkafka keeps its lists of messages in another way than expected")
        finally:
            self.release(block)


@functools.cache
def library() -> Library:
    """The loaded and checked library.

    Raises:
        ImportError: it cannot be used here; ``fetch`` then takes the plain client.
    """
    return Library()


class _Raw:
    """Memory as numpy's array interface describes it. Unlike a ctypes array type per length, nothing is cached."""

    def __init__(self, address: int, typestr: str, count: int, stride: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "typestr": typestr,
            "shape": (count,),
            "strides": (stride,),
        }


def _memory(address: int, typestr: str, count: int, stride: int) -> npt.NDArray[Any]:
    """A view of ``count`` items in raw memory. It keeps nothing alive, and only items that are touched need exist."""

    return np.asarray(_Raw(address, typestr, count, stride))


def words_at(address: int, count: int) -> Words:
    return _memory(address, "<u8", count, 8)


def spans(addresses: Words, size: int) -> bool:
    """Whether :func:`gather` can copy these with steps of 1: numpy counts the bytes of the whole span in 63 bits, each
    as if it were an item. A heap and mapped memory are up to 2**47 bytes apart."""
    return (int(addresses.max()) - int(addresses.min()) + 1) * size < 1 << 63


def gather(addresses: Words, size: int, step: int) -> npt.NDArray[Any]:
    """Copy ``size`` bytes from each address, all multiples of ``step`` apart, into one array, and not a byte more."""
    base = int(addresses.min())
    at = ((addresses - np.uint64(base)) // np.uint64(step)).astype(np.int64)
    return _memory(base, f"|V{size}", int(at.max()) + 1, step)[at]


def binary_column(addresses: Words, lengths: Words) -> pa.Array:
    """A binary array of the bytes at ``addresses``; address 0 is null. The bytes are copied."""
    count = len(addresses)
    present = addresses != 0
    nulls = count - int(np.count_nonzero(present))
    if nulls == count:
        return pa.nulls(count, pa.binary())
    validity = pa.py_buffer(np.packbits(present, bitorder="little")) if nulls else None
    lengths = lengths.astype(np.int32)
    if nulls:
        lengths[~present] = 0
    elif lengths[0] and (lengths == lengths[0]).all() and spans(addresses, int(lengths[0])):  # the usual case of keys
        size = int(lengths[0])
        ends = np.arange(count + 1, dtype=np.int32) * np.int32(size)
        data = gather(addresses, size, 1)
        return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(data.view(np.uint8))])
    views = np.zeros((count, 4), dtype=np.int32)
    views[:, 0] = lengths
    long = lengths > _INLINE_MAX
    windows, window = np.unique(addresses[long] >> np.uint64(_WINDOW_BITS), return_inverse=True)
    views[long, 2] = window
    views[long, 3] = addresses[long] & np.uint64((1 << _WINDOW_BITS) - 1)
    inline = views.view(np.uint8)
    for size in range(1, _INLINE_MAX + 1):
        rows = np.flatnonzero(lengths == size)
        if len(rows):
            inline[rows, 4 : 4 + size] = gather(addresses[rows], size, 1).view(np.uint8).reshape(-1, size)
    memory = [pa.foreign_buffer(int(w) << _WINDOW_BITS, (2 << _WINDOW_BITS) - 1) for w in windows]
    view = pa.Array.from_buffers(pa.binary_view(), count, [validity, pa.py_buffer(views), *memory])
    return view.cast(pa.binary())
