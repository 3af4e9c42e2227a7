"""Records as Arrow columns: raw memory, the limits of a batch, and timestamps that Spark cannot store."""

import ctypes
import itertools
import mmap
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.fake_reader import FakeChunk, Message

from spark_group_source.errors import GroupError
from spark_group_source.model import TopicPartition
from spark_group_source.options.table import COLUMNS
from spark_group_source.reader import records
from spark_group_source.reader.records import RowSlice, group_by_batch

TP = TopicPartition("t", 0)
GIB = 1 << 30
MIB = 1 << 20


class Memory:
    """Address space that takes memory only where it is written; its middle is a multiple of 1 GiB."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, 3 * GIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.border = (self.start + GIB) // GIB * GIB + GIB

    def put(self, address: int, value: bytes) -> None:
        ctypes.memmove(address, value, len(value))


@pytest.fixture(scope="module")
def memory() -> Memory:
    return Memory()


def column(addresses: list[int], lengths: list[int]) -> pa.Array:
    found = records.binary_column(np.array(addresses, dtype=np.uint64), np.array(lengths, dtype=np.uint64))
    found.validate(full=True)
    return found


@settings(max_examples=60, deadline=None)
@given(
    gaps=st.lists(st.integers(0, 70_000), min_size=1, max_size=12),
    lengths=st.one_of(
        st.lists(st.one_of(st.none(), st.integers(0, 40), st.just(60_000)), min_size=12, max_size=12),
        st.integers(1, 60_000).map(lambda size: [size] * 12),
    ),
)
def test_values_at_the_border_of_a_memory_window_are_copied_exactly(
    memory: Memory, gaps: list[int], lengths: list[int | None]
) -> None:
    """References in a view are relative to windows of 1 GiB; a value may start in one and end in the next."""
    at, addresses, sizes, expected = memory.border - 100_000, [], [], []
    for number, (gap, length) in enumerate(zip(gaps, lengths, strict=False)):
        at += gap
        value = None if length is None else bytes([number + 1]) * length
        addresses.append(0 if value is None else at)
        sizes.append(length or 0)
        expected.append(value)
        if value:
            memory.put(at, value)
            at += len(value)
    assert column(addresses, sizes).to_pylist() == expected


@pytest.fixture
def low_memory() -> Iterator[int]:
    """The address of 1 MiB that is far below all other memory of this process, like a heap."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(1 << 40, MIB, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    yield address
    libc.munmap(address, MIB)


def test_large_values_of_equal_length_far_apart_in_memory_are_copied(memory: Memory, low_memory: int) -> None:
    """Heap and mapped memory are 2**45 bytes apart or more: numpy refuses an array of so many items of 1 MiB."""
    assert (memory.border - low_memory) * MIB > 1 << 63
    memory.put(memory.border, b"m" * MIB)
    memory.put(low_memory, b"h" * MIB)
    assert column([memory.border, low_memory], [MIB] * 2).to_pylist() == [b"m" * MIB, b"h" * MIB]


@given(low=st.integers(1, 2**47), far=st.integers(0, 2**47), size=st.integers(1, 2**31 - 1))
def test_values_are_gathered_only_if_numpy_can_address_the_span(low: int, far: int, size: int) -> None:
    addresses = np.array([low + far, low], dtype=np.uint64)
    fits = True
    try:
        records._memory(low, f"|V{size}", far + 1, 1)
    except ValueError:
        fits = False
    assert not records.can_gather(addresses, size) or fits


ROWS_MAX = 3
_large = st.sampled_from([records.BATCH_BYTES_MAX * thirds // 3 for thirds in (1, 2, 3, 5)])
_sizes = st.lists(st.one_of(st.integers(0, 2000), _large), max_size=12)


@given(sizes=_sizes, borders=st.lists(st.integers(0, 12), max_size=4))
def test_a_batch_is_within_its_limits_or_is_one_record(sizes: list[int], borders: list[int]) -> None:
    edges = sorted({0, len(sizes), *(at for at in borders if at < len(sizes))})
    cuts = [RowSlice(TP._replace(partition=at), a, b) for at, (a, b) in enumerate(itertools.pairwise(edges))]
    with patch.object(records, "BATCH_ROWS_MAX", ROWS_MAX):
        groups = list(group_by_batch(cuts, np.array(sizes, dtype=np.int64)))
    assert [row for group in groups for cut in group for row in range(cut.first, cut.last)] == list(range(len(sizes)))
    for group in groups:
        rows = [row for cut in group for row in range(cut.first, cut.last)]
        assert len(rows) == 1 or sum(sizes[row] for row in rows) <= records.BATCH_BYTES_MAX
        assert len(rows) <= ROWS_MAX


def test_header_bytes_count_towards_the_batch_limit() -> None:
    body = bytes(records.BATCH_BYTES_MAX // 3)
    chunk = FakeChunk([Message(TP, at, headers=[("name", body), ("none", None)]) for at in range(5)])
    assert len(list(group_by_batch([RowSlice(TP, 0, 5)], chunk.sizes))) == 1
    chunk.count_headers()
    groups = list(group_by_batch([RowSlice(TP, 0, 5)], chunk.sizes))
    assert [sum(cut.last - cut.first for cut in group) for group in groups] == [2, 2, 1]
    for group in groups:
        assert chunk.batch(group, ("headers",)).column("headers").nbytes <= records.BATCH_BYTES_MAX + 1000


# --- timestamps


def batch_of(*stamps_ms: int, kind: int = 1, columns: Sequence[str] = COLUMNS[:-1]) -> pa.RecordBatch:
    count = len(stamps_ms)
    return records.build_batch(
        columns,
        [RowSlice(TP, 0, 1), RowSlice(TP._replace(partition=1), 1, count)],
        key=pa.nulls(count, pa.binary()),
        value=pa.nulls(count, pa.binary()),
        offset=np.arange(100, 100 + count),
        timestamp_ms=np.array(stamps_ms, dtype=np.int64),
        timestamp_type=np.full(count, kind, dtype=np.int32),
        headers=None,
    )


def assembled(*stamps_ms: int) -> list[int]:
    return [int(us) for us in batch_of(*stamps_ms).column("timestamp").cast(pa.int64()).to_pylist()]


def test_a_record_without_timestamp_is_one_millisecond_before_the_epoch() -> None:
    """Only very old brokers send one."""
    row = batch_of(-1, -1, kind=0).to_pylist()[0]
    assert (row["timestamp"], row["timestampType"]) == (datetime(1969, 12, 31, 23, 59, 59, 999_000, UTC), -1)


@given(stamp_ms=st.integers(-records.TIMESTAMP_MS_MAX, records.TIMESTAMP_MS_MAX))
def test_a_timestamp_that_spark_can_store_is_exact(stamp_ms: int) -> None:
    assert assembled(stamp_ms, -1) == [stamp_ms * 1000, -1000]


@pytest.mark.parametrize("stamp_ms", [2**63 - 1, -(2**63), records.TIMESTAMP_MS_MAX + 1, -records.TIMESTAMP_MS_MAX - 1])
def test_a_timestamp_that_spark_cannot_store_fails_the_task_with_its_offset(stamp_ms: int) -> None:
    """Like Spark's Kafka source, which uses exact arithmetic; the timestamp never becomes another one."""
    with pytest.raises(GroupError, match=rf"t-1 at offset 102 .* {stamp_ms} ms") as caught:
        assembled(1, 2, stamp_ms, 3)
    assert caught.value.fields == {"topic": "t", "partition": 1, "offset": 102}
    without = [name for name in COLUMNS[:-1] if name != "timestamp"]
    assert batch_of(1, 2, stamp_ms, 3, columns=without).num_rows == 4
