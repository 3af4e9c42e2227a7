"""Parses the headers of many records at once, from the bytes that the broker sent.

Runs in: executor workers, agents. Deliberately absent: where the bytes are in librdkafka's memory (``native_client``).

librdkafka has a function for one header of one record. Called from Python for each, it takes many times as long as all
other columns together. Here numpy takes the same step for all records: the count of headers, then for each header
the length of its name, the name, the length of its value (-1: null) and the value. Numbers are zigzag varints
(the `record format <https://kafka.apache.org/documentation/#recordheader>`_).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from spark_group_source.reader.records import (
    HEADER_BYTES,
    HEADERS_TYPE,
    Ints,
    RowSlice,
    Words,
    binary_column,
    bytes_from,
    header_lists,
    variable_width,
)

VARINT_BYTES_MAX = 5
"""Of a number of 32 bits."""
HEADERS_MAX = 1_000
"""The most headers of a record here: each one is a step for numpy, so for one record with 100,000 headers the calls of
librdkafka are faster."""


class NotHeaders(Exception):
    """The bytes are not the headers of records."""


@dataclass(frozen=True, slots=True)
class RecordHeaders:
    """The headers of some records, one after the other: where each name and value is in memory. Lengths are in
    bytes."""

    starts: Ints
    """The first header of each record, and at the end the count of all headers."""
    names: Words
    name_lengths: Ints
    values: Words
    """0: the value is null."""
    value_lengths: Ints

    def row_bytes(self) -> Ints:
        """The memory in bytes that the headers of each record take in Arrow."""
        ends = np.zeros(len(self.names) + 1, dtype=np.int64)
        np.cumsum(self.name_lengths + self.value_lengths + HEADER_BYTES, out=ends[1:])
        return ends[self.starts[1:]] - ends[self.starts[:-1]]

    def column(self, slices: Sequence[RowSlice]) -> pa.Array:
        """The headers of the records of these slices."""
        counts = np.concatenate([np.diff(self.starts[one.first : one.last + 1]) for one in slices])
        at = np.concatenate([np.arange(self.starts[one.first], self.starts[one.last]) for one in slices])
        if not len(at):
            return pa.nulls(len(counts), HEADERS_TYPE)
        names = _strings(binary_column(self.names[at], self.name_lengths[at].view(np.uint64)))
        return header_lists(counts, names, binary_column(self.values[at], self.value_lengths[at].view(np.uint64)))


def parse(addresses: Words, lengths: Ints) -> RecordHeaders | None:
    """Parse the headers of one or more records. Returns None if one has more than :data:`HEADERS_MAX`.

    Args:
        addresses: where the headers of each record are, their count first.
        lengths: their bytes.

    Raises:
        NotHeaders: they do not fill exactly these bytes.
    """
    cursor = _Cursor(addresses, lengths)
    counts = cursor.number(np.arange(len(addresses)))
    if (counts < 0).any() or (counts > lengths).any():
        raise NotHeaders
    if counts.max() > HEADERS_MAX:
        return None
    starts = np.zeros(len(addresses) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    names, values = (np.zeros(int(starts[-1]), dtype=np.uint64) for _ in range(2))
    name_lengths, value_lengths = (np.zeros(int(starts[-1]), dtype=np.int64) for _ in range(2))
    for number in range(int(counts.max())):
        rows = np.flatnonzero(counts > number)
        at = starts[rows] + number
        name_lengths[at] = length = cursor.number(rows)
        if (length < 0).any():
            raise NotHeaders
        names[at] = cursor.skip(rows, length)
        length = cursor.number(rows)
        value_lengths[at] = known = np.maximum(length, 0)
        values[at] = np.where(length < 0, np.uint64(0), cursor.skip(rows, known))
    if (cursor.at != cursor.end).any():
        raise NotHeaders
    return RecordHeaders(starts, names, name_lengths, values, value_lengths)


class _Cursor:
    """A position in the headers of each of some records."""

    def __init__(self, addresses: Words, lengths: Ints) -> None:
        self._base = int(addresses.min())
        self.at = (addresses - np.uint64(self._base)).astype(np.int64)
        self.end = self.at + lengths
        self._memory = bytes_from(self._base, int(self.end.max()))

    def number(self, rows: Ints) -> Ints:
        """Read a number of each of these records."""
        found = np.zeros(len(rows), dtype=np.int64)
        left = np.arange(len(rows))
        for place in range(VARINT_BYTES_MAX):
            at = self.at[rows[left]]
            if (at >= self.end[rows[left]]).any():
                raise NotHeaders
            byte = self._memory[at].astype(np.int64)
            found[left] |= (byte & 0x7F) << (7 * place)
            self.at[rows[left]] += 1
            left = left[byte >= 0x80]
            if not len(left):
                return (found >> 1) ^ -(found & 1)
        raise NotHeaders

    def skip(self, rows: Ints, lengths: Ints) -> Words:
        """Move behind so many bytes of each of these records. Returns where they start."""
        start = self.at[rows]
        self.at[rows] = start + lengths
        if (self.at[rows] > self.end[rows]).any():
            raise NotHeaders
        return start.astype(np.uint64) + np.uint64(self._base)


def _strings(names: pa.Array) -> pa.Array:
    """UTF-8 text; what is none is replaced, as in Spark's Kafka source."""
    text = pa.Array.from_buffers(pa.string(), len(names), names.buffers())
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        return variable_width([name.as_py().decode(errors="replace").encode() for name in names], pa.string())
    return text
