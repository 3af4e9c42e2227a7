"""Headers of records, from the bytes that a broker sends."""

import ctypes as c
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_group_source.model import TopicPartition
from spark_group_source.reader.records import (
    HEADER_BYTES,
    HEADERS_MAX,
    NotHeaders,
    RecordHeaders,
    RowSlice,
    header_bytes,
    header_column,
    parse_headers,
)

TP = TopicPartition("orders", 0)
Row = list[tuple[str, bytes | None]]


def varint(number: int) -> bytes:
    left, found = (number << 1) ^ (number >> 63), bytearray()
    while left >= 0x80:
        found.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*found, left])


def sent(row: Sequence[tuple[bytes, bytes | None]]) -> bytes:
    """The headers of a record as a producer writes them."""
    parts = [varint(len(row))]
    for name, value in row:
        parts += [varint(len(name)), name, varint(-1 if value is None else len(value)), value or b""]
    return b"".join(parts)


class Memory:
    """The headers of records, each somewhere else."""

    def __init__(self, rows: Sequence[bytes]) -> None:
        self.buffers = [c.create_string_buffer(row, max(1, len(row))) for row in rows]
        self.at = np.array([c.addressof(buffer) for buffer in self.buffers], dtype=np.uint64)
        self.lengths = np.array([len(row) for row in rows], dtype=np.int64)


def parsed(memory: Memory) -> RecordHeaders:
    found = parse_headers(memory.at, memory.lengths)
    assert found is not None
    return found


_rows = st.lists(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=80),
            st.none() | st.binary(max_size=20) | st.just(b"v" * 9_000),
        ),
        max_size=4,
    ),
    min_size=1,
    max_size=12,
)


@given(rows=_rows, border=st.integers(0, 12))
def test_headers_are_those_that_were_sent(rows: list[Row], border: int) -> None:
    memory = Memory([sent([(name.encode(), value) for name, value in row]) for row in rows])
    headers = parsed(memory)
    assert headers.row_bytes().tolist() == header_bytes(rows).tolist()
    edge = min(border, len(rows))
    slices = [RowSlice(TP, first, last) for first, last in [(0, edge), (edge, len(rows))] if first < last]
    found = headers.column(slices)
    found.validate(full=True)
    assert found.to_pylist() == header_column(rows).to_pylist()


def test_headers_of_some_rows() -> None:
    memory = Memory([sent([(b"a", b"%d" % row)] * row) for row in range(6)])
    found = parsed(memory).column([RowSlice(TP, 1, 2), RowSlice(TP, 3, 5)])
    assert [len(row) for row in found.to_pylist()] == [1, 3, 4]
    assert {header["value"] for row in found.to_pylist() for header in row} == {b"1", b"3", b"4"}


def test_a_name_that_is_not_utf_8_is_replaced_as_by_spark() -> None:
    memory = Memory([sent([(b"\xffa", b"1"), ("ü".encode(), None), (b"with\0zero", b"")])])
    headers = parsed(memory)
    assert headers.column([RowSlice(TP, 0, 1)]).to_pylist() == [
        [{"key": "\ufffda", "value": b"1"}, {"key": "ü", "value": None}, {"key": "with\0zero", "value": b""}]
    ]
    assert headers.row_bytes().tolist() == [2 + 1 + 2 + 9 + 3 * HEADER_BYTES]


@pytest.mark.parametrize(
    "wrong",
    [
        sent([(b"name", b"value")])[:-1],
        sent([(b"name", b"value")]) + b"\0",
        varint(1) + varint(-2),
        varint(1) + varint(1_000_000) + b"a",
        varint(-1),
        varint(1 << 30),
        b"\xff" * 9,
        b"",
    ],
    ids=["too short", "too long", "negative", "beyond the end", "negative count", "huge count", "no number", "nothing"],
)
def test_other_bytes_are_refused(wrong: bytes) -> None:
    memory = Memory([sent([(b"a", b"b")]), wrong])
    with pytest.raises(NotHeaders):
        parse_headers(memory.at, memory.lengths)


def test_no_record_has_headers() -> None:
    memory = Memory([sent([]), sent([])])
    column = parsed(memory).column([RowSlice(TP, 0, 2)])
    assert column.to_pylist() == [None, None] and isinstance(column, pa.ListArray)


@pytest.mark.parametrize("more", [0, 1])
def test_a_record_with_very_many_headers_is_left_to_librdkafka(more: int) -> None:
    memory = Memory([sent([(b"a", b"b")]), sent([(b"", b"")] * (HEADERS_MAX + more))])
    assert (parse_headers(memory.at, memory.lengths) is None) == bool(more)
