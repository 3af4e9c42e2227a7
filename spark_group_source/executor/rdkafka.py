"""librdkafka by ctypes: its calls, the checks that make them safe to use, and raw memory as arrays.

Runs in: executor workers, on 64-bit little-endian POSIX machines. Deliberately absent: any call back from C into
Python (errors and log lines are polled as events), and the confluent_kafka package: only the library that it ships is
loaded.

What the fast client relies on:

- the public struct ``rd_kafka_message_t`` and public calls: librdkafka's ABI;
- two private facts, both checked where they are used: that a list for ``rd_kafka_messages_destroy`` is a count
  followed by pointers (asked back through its public accessors when the library is loaded; otherwise the fast client
  is refused), and where a message keeps its timestamp (``native`` compares with the public call in every batch).
"""

import ctypes as c
import functools
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

OLDEST_VERSION = 0x02_0F_00_FF
"""librdkafka 2.15.0, the oldest that was looked at. Newer ones have to pass the checks."""

_INLINE_MAX = 12
"""A binary view keeps values up to this length in itself, longer ones as a reference."""
_WINDOW_BITS = 30
"""References of a view are 31 bits wide, so memory is named in windows of 1 GiB."""

Words = npt.NDArray[np.uint64]


class _Partition(c.Structure):
    _fields_ = [
        ("topic", c.c_char_p),
        ("partition", c.c_int32),
        ("offset", c.c_int64),
        ("metadata", c.c_void_p),
        ("metadata_size", c.c_size_t),
        ("opaque", c.c_void_p),
        ("err", c.c_int),
        ("private", c.c_void_p),
    ]


class _PartitionList(c.Structure):
    _fields_ = [("cnt", c.c_int), ("size", c.c_int), ("elems", c.POINTER(_Partition))]


_P, _PP, _INT, _I64, _SIZE, _STR = c.c_void_p, c.POINTER(c.c_void_p), c.c_int, c.c_int64, c.c_size_t, c.c_char_p
_LIST = c.POINTER(_PartitionList)
_CALLS: dict[str, tuple[Any, ...]] = {  # name: result, arguments
    "version": (_INT,),
    "err2str": (_STR, _INT),
    "conf_new": (_P,),
    "conf_destroy": (None, _P),
    "conf_set": (_INT, _P, _STR, _STR, _STR, _SIZE),
    "conf_set_events": (None, _P, _INT),
    "new": (_P, _INT, _P, _STR, _SIZE),
    "set_log_queue": (_INT, _P, _P),
    "destroy_flags": (None, _P, _INT),
    "queue_get_consumer": (_P, _P),
    "queue_get_main": (_P, _P),
    "queue_new": (_P, _P),
    "queue_destroy": (None, _P),
    "queue_poll": (_P, _P, _INT),
    "event_type": (_INT, _P),
    "event_error": (_INT, _P),
    "event_error_string": (_STR, _P),
    "event_log": (_INT, _P, c.POINTER(_STR), c.POINTER(_STR), c.POINTER(_INT)),
    "event_opaque": (_P, _P),
    "event_destroy": (None, _P),
    "topic_partition_list_new": (_LIST, _INT),
    "topic_partition_list_add": (c.POINTER(_Partition), _LIST, _STR, c.c_int32),
    "topic_partition_list_destroy": (None, _LIST),
    "topic_partition_get_leader_epoch": (c.c_int32, c.POINTER(_Partition)),
    "assign": (_INT, _P, _LIST),
    "incremental_assign": (_P, _P, _LIST),
    "incremental_unassign": (_P, _P, _LIST),
    "error_string": (_STR, _P),
    "error_code": (_INT, _P),
    "error_destroy": (None, _P),
    "metadata": (_INT, _P, _INT, _P, _PP, _INT),
    "metadata_destroy": (None, _P),
    "position": (_INT, _P, _LIST),
    "consume_batch_queue": (c.c_ssize_t, _P, _INT, _P, _SIZE),
    "topic_name": (_STR, _P),
    "messages_count": (_SIZE, _P),
    "messages_get": (_P, _P, _SIZE),
    "messages_destroy": (None, _P),
    "message_timestamp": (_I64, _P, c.POINTER(_INT)),
    "message_leader_epoch": (c.c_int32, _P),
    "message_headers": (_INT, _P, _PP),
    "AdminOptions_new": (_P, _P, _INT),
    "AdminOptions_set_request_timeout": (_INT, _P, _INT, _STR, _SIZE),
    "AdminOptions_set_isolation_level": (_P, _P, _INT),
    "AdminOptions_set_opaque": (None, _P, _P),
    "AdminOptions_destroy": (None, _P),
    "TopicCollection_of_topic_names": (_P, c.POINTER(_STR), _SIZE),
    "TopicCollection_destroy": (None, _P),
    "DescribeTopics": (None, _P, _P, _P, _P),
    "event_DescribeTopics_result": (_P, _P),
    "DescribeTopics_result_topics": (_PP, _P, c.POINTER(_SIZE)),
    "TopicDescription_name": (_STR, _P),
    "TopicDescription_error": (_P, _P),
    "TopicDescription_topic_id": (_P, _P),
    "TopicDescription_partitions": (_PP, _P, c.POINTER(_SIZE)),
    "Uuid_base64str": (_STR, _P),
    "ListOffsets": (None, _P, _LIST, _P, _P),
    "event_ListOffsets_result": (_P, _P),
    "ListOffsets_result_infos": (_PP, _P, c.POINTER(_SIZE)),
    "ListOffsetsResultInfo_topic_partition": (c.POINTER(_Partition), _P),
    "header_get_all": (_INT, _P, _SIZE, c.POINTER(_STR), _PP, c.POINTER(_SIZE)),
}


class Library:
    """librdkafka's calls by their names without ``rd_kafka_``, and libc's allocator."""

    def __init__(self) -> None:
        if sys.byteorder != "little" or c.sizeof(c.c_void_p) != 8 or os.name != "posix":
            raise ImportError("the fast client needs a 64-bit little-endian POSIX machine")
        vars(self).update(calls(_CALLS))
        libc = c.CDLL(None)
        self.malloc, self.release = libc.malloc, libc.free
        self.malloc.restype, self.malloc.argtypes = _P, [_SIZE]
        self.release.restype, self.release.argtypes = None, [_P]
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


def calls(signatures: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """librdkafka's functions by their names without ``rd_kafka_``.

    Args:
        signatures: by name, the type of what is returned and those of the arguments.

    Raises:
        ImportError: the library is not there, or has no such function.
    """
    rdkafka = c.CDLL(str(extension()))
    found = {}
    for name, (result, *arguments) in signatures.items():
        call = getattr(rdkafka, f"rd_kafka_{name}", None)
        if call is None:
            raise ImportError(f"librdkafka has no rd_kafka_{name}")
        call.restype, call.argtypes = result, arguments
        found[name] = call
    return found


def extension() -> Path:
    """confluent_kafka's extension module, found without importing the package: it brings librdkafka with it."""
    package = importlib.util.find_spec("confluent_kafka")
    for folder in (package.submodule_search_locations or []) if package else []:
        for path in Path(folder).glob("cimpl*.so"):
            return path
    raise ImportError("confluent_kafka is not installed")


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
