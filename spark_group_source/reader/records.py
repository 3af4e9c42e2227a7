"""Kafka records as Arrow: the schema, the planned rows of a fetched chunk, record batches built from columns, and the
headers of many records from the bytes that the broker sent.

Runs in: executor workers and agents; ``arrow_schema`` and ``spark_ddl`` also where the query is planned. Deliberately
absent: the Kafka client, and where bytes are in librdkafka's memory (``native_client``), what the caller does with the
planned rows (``range_reader``, ``agents.prefetch``), and pyspark.

Columns and values are those of Spark's Kafka source: a record without headers has null (not an empty list), the
timestamp is the record's milliseconds even if they are -1, ``timestampType`` is -1 (none), 0 (create time) or 1
(log-append time).

Every record carries the epoch of the leader that wrote it, and a plan has the epoch of the leader that reported the
ranges' ends (KIP-320). A record with a higher epoch below a planned end was written after the plan: the log was
truncated in the meantime and has grown again with other records.

librdkafka has a function for one header of one record. Called from Python for each, it takes many times as long as all
other columns together. In :func:`parse_headers` numpy takes the same step for all records: the count of headers, then
for each header the length of its name, the name, the length of its value (-1: null) and the value. Numbers are zigzag
varints (the `record format <https://kafka.apache.org/documentation/#recordheader>`_).
"""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_group_source.error_codes import CODES
from spark_group_source.errors import GroupError, OptionError, SetupError
from spark_group_source.model import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from spark_group_source.reader.native_client import NativeChunk

EOF = CODES["_PARTITION_EOF"]
"""Not an error: the end of a partition, as far as the isolation level allows to read."""
DAMAGED = frozenset({CODES["_BAD_MSG"], CODES["_NOT_IMPLEMENTED"]})
"""A record batch with a wrong checksum. librdkafka drops it and continues after it, or inside it, where it finds an
unknown format."""

ASSUMED_RECORD_BYTES = 16 * 1024
"""Assumed size of a record before any was fetched. It limits the first poll to 1,024 records."""
BATCH_ROWS_MAX = 32_768
"""Maximum rows of one RecordBatch. Spark's Arrow path is fastest from about 10,000; more only costs memory."""

BATCH_BYTES_MAX = 16 * 1024 * 1024
"""Maximum key, value and (if included) header bytes of one RecordBatch. A larger record is a batch of its own."""

HEADER_BYTES = 10
"""Arrow's overhead for one header, besides its name and value."""

VARINT_BYTES_MAX = 5
"""Of a number of 32 bits."""
HEADERS_MAX = 1_000
"""The most headers of a record in :func:`parse_headers`: each one is a step for numpy, so for one record with 100,000
headers the calls of librdkafka are faster."""

HEADERS_TYPE = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))

_TYPES = {
    "key": (pa.binary(), "BINARY"),
    "value": (pa.binary(), "BINARY"),
    "topic": (pa.string(), "STRING"),
    "partition": (pa.int32(), "INT"),
    "offset": (pa.int64(), "BIGINT"),
    "timestamp": (pa.timestamp("us", tz="UTC"), "TIMESTAMP_LTZ"),
    "timestampType": (pa.int32(), "INT"),
    "headers": (HEADERS_TYPE, "ARRAY<STRUCT<key: STRING, value: BINARY>>"),
}
"""By column, its type in Arrow and in Spark's DDL. What TIMESTAMP is depends on the session."""

_INLINE_MAX = 12
"""An Arrow binary view stores values up to this length inline, longer ones as a reference."""
_WINDOW_BITS = 30
"""Offsets in a view's reference have 31 bits, so memory is addressed in windows of 1 GiB."""

PYARROW = "pyarrow>=19.0.1"
"""Older versions cannot make an array of binary views that refers to memory; 19.0.0 refuses some Parquet files."""

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
HeaderRow = Sequence[tuple[str, bytes | None]]

TIMESTAMP_MS_MAX = (2**63 - 1) // 1000
"""The largest timestamp that Spark can store: 64 bits of microseconds."""


def _check_pyarrow() -> None:
    """Refuse an older pyarrow when this module is imported: at ``load()``, and in each executor."""
    if int(pa.__version__.partition(".")[0]) < 19:
        raise SetupError(
            f"pyarrow {pa.__version__} ({pa.__file__}) is too old, columns cannot be built with it. Run "
            f"`pip install '{PYARROW}'` on the driver and on every executor"
        )


_check_pyarrow()


def arrow_schema(columns: Sequence[str]) -> pa.Schema:
    """The schema of every batch with these columns of the source; all are nullable."""
    return pa.schema([pa.field(name, _TYPES[name][0]) for name in columns])


def spark_ddl(columns: Sequence[str]) -> str:
    """The same schema in Spark's DDL, for ``DataSource.schema()``."""
    return ", ".join(f"{name} {_TYPES[name][1]}" for name in columns)


def require_own_schema(schema: "StructType", columns: Sequence[str]) -> None:
    """Refuse a schema that the user gave, and that is not the source's: the tasks would fail.

    Raises:
        OptionError: names or types are not those of ``columns``.
    """
    given = [(field.name, field.dataType.simpleString()) for field in schema.fields]
    own = [(name, _TYPES[name][1].lower().replace(" ", "").replace("timestamp_ltz", "timestamp")) for name in columns]
    if given and given != own:
        shown = [", ".join(f"{name} {type_}" for name, type_ in fields) for fields in (given, own)]
        raise OptionError(
            f".schema() names the columns {shown[0]}, and this source has {shown[1]}: leave .schema() out. The option "
            "columns chooses some of the columns; convert them in the query"
        )


class ClientEvent(NamedTuple):
    """An event of the client that is not a record: an error, or the end of a partition."""

    code: int
    """librdkafka's error code; a negative one is its own, a positive one is a broker's."""
    text: str
    tp: TopicPartition | None
    """None: the event concerns the whole cluster."""
    offset: int
    """The position, at the end of a partition; otherwise without meaning."""


class TopicDescription(NamedTuple):
    """A topic in a metadata response."""

    code: int
    """The error code; 0: the topic exists."""
    text: str
    """The error text; empty without an error."""
    id: str
    """Changes when the topic is deleted and recreated (KIP-516); empty if the brokers have no topic ids."""
    partitions: int
    """The number of partitions."""


TopicDescriptions = dict[str, TopicDescription]


class Watermarks(NamedTuple):
    """The bounds of a partition's log, as its leader reports them."""

    low: int
    """The first offset that still exists."""
    high: int
    """The next offset to be written; open transactions are below it."""
    leader_epoch: int = -1
    """The leader's epoch; -1 if it is unknown."""


class PartitionRows(NamedTuple):
    """Adjacent rows of one chunk with records of one partition."""

    tp: TopicPartition
    first: int
    """The first row."""
    offsets: Ints
    """The offsets of the records, ascending."""


class RowSlice(NamedTuple):
    """The rows [first, last) of a chunk: planned records of one partition."""

    tp: TopicPartition
    first: int
    last: int


class NewerRecord(NamedTuple):
    """The first record that was written by a newer leader than the plan's."""

    offset: int
    epoch: int


class PlannedRows(NamedTuple):
    """The rows [first, last) of one :class:`PartitionRows` are the next planned ones."""

    first: int
    last: int
    position: int
    """The partition's position after these rows: every planned record below it was fetched."""
    newer: NewerRecord | None
    """Set if the rows end before a record of a newer leader."""


def select_rows(
    chunk: "NativeChunk", fetched: PartitionRows, position: int, end: int, epoch: int | None
) -> PlannedRows:
    """Select the planned rows with offsets in [position, end).

    Args:
        epoch: the leader epoch of the plan; None: it is unknown, and epochs are not compared.
    """
    first, last = np.searchsorted(fetched.offsets, (position, end)).tolist()
    reached = max(position, int(fetched.offsets[-1]) + 1)
    if epoch is None or first >= last or chunk.leader_epoch(fetched.first + last - 1) <= epoch:
        return PlannedRows(first, last, reached, None)
    # Epochs never decrease within a log, and that of the last row is higher.
    newer = bisect.bisect_right(range(last - 1), epoch, first, key=lambda at: chunk.leader_epoch(fetched.first + at))
    offset = int(fetched.offsets[newer])
    return PlannedRows(first, newer, offset, NewerRecord(offset, chunk.leader_epoch(fetched.first + newer)))


class RecordSize:
    """The mean size of the records in the last chunk, which limits the next poll."""

    def __init__(self) -> None:
        self._bytes = float(ASSUMED_RECORD_BYTES)

    def update(self, sizes: Ints) -> None:
        """Replace the mean by that of these sizes in bytes; without any, keep it."""
        if len(sizes):
            self._bytes = max(1.0, float(sizes.mean()))

    def rows_max(self, remaining: int) -> int:
        """The maximum number of rows of one poll if ``remaining`` are wanted."""
        return max(1, min(remaining, BATCH_ROWS_MAX, int(BATCH_BYTES_MAX / self._bytes)))


def group_by_batch(slices: Sequence[RowSlice], sizes: Ints) -> Iterator[list[RowSlice]]:
    """Split and group slices so that each group is one batch within BATCH_ROWS_MAX and BATCH_BYTES_MAX, in order."""
    group: list[RowSlice] = []
    rows = size = 0
    for piece in slices:
        first = piece.first
        while first < piece.last:
            ends = np.cumsum(sizes[first : min(piece.last, first + BATCH_ROWS_MAX - rows)])
            fit = int(np.searchsorted(ends, BATCH_BYTES_MAX - size, side="right"))
            if fit == 0 and not group:
                fit = 1  # a record above the limit is a batch of its own
            if fit:
                group.append(RowSlice(piece.tp, first, first + fit))
                rows, size, first = rows + fit, size + int(ends[fit - 1]), first + fit
            if first < piece.last:
                yield group
                group, rows, size = [], 0, 0
    if group:
        yield group


def build_batch(
    columns: Sequence[str],
    slices: Sequence[RowSlice],
    *,
    key: pa.Array | None,
    value: pa.Array | None,
    offset: Ints,
    timestamp_ms: Ints,
    timestamp_type: npt.NDArray[np.int32],
    headers: pa.Array | None,
) -> pa.RecordBatch:
    """Build one batch from the columns of the client, in the order of ``slices``; topic and partition come from the
    slices.

    Args:
        columns: the columns of the batch; ``key``, ``value`` and ``headers`` are None if they are not among them.
        timestamp_ms: milliseconds since the epoch, -1 if the record has none.
        timestamp_type: librdkafka's numbers, one more than Spark's.
        headers: of HEADERS_TYPE.

    Raises:
        GroupError: Spark cannot store a record's timestamp.
    """
    built = {"key": key, "value": value, "headers": headers}
    rows = np.array([one.last - one.first for one in slices], dtype=np.int64)
    if "topic" in columns:
        names = sorted({one.tp.topic for one in slices})
        index = {name: number for number, name in enumerate(names)}
        numbers = np.repeat(np.array([index[one.tp.topic] for one in slices], dtype=np.int32), rows)
        each = variable_width([name.encode() for name in names], pa.string())
        built["topic"] = each.take(fixed_width(numbers, pa.int32()))
    if "partition" in columns:
        partition = np.repeat(np.array([one.tp.partition for one in slices], dtype=np.int32), rows)
        built["partition"] = fixed_width(partition, pa.int32())
    if "offset" in columns:
        built["offset"] = fixed_width(offset, pa.int64())
    if "timestamp" in columns:
        _check_timestamps(slices, offset, timestamp_ms)
        built["timestamp"] = fixed_width(timestamp_ms * 1000, _TYPES["timestamp"][0])
    if "timestampType" in columns:
        built["timestampType"] = fixed_width(timestamp_type - np.int32(1), pa.int32())
    return pa.RecordBatch.from_arrays([built[name] for name in columns], schema=arrow_schema(columns))


def payload_bytes(batch: pa.RecordBatch) -> int:
    """The bytes of keys, values and headers in a batch or a slice of one, with Arrow's 4 bytes for each."""
    return sum(batch.column(name).nbytes for name in batch.schema.names if name in ("key", "value", "headers"))


def _check_timestamps(slices: Sequence[RowSlice], offset: Ints, timestamp_ms: Ints) -> None:
    """Refuse a timestamp that Spark's type cannot store. Spark's Kafka source fails with an ArithmeticException; any
    other value would be wrong."""
    wrong = np.flatnonzero((timestamp_ms > TIMESTAMP_MS_MAX) | (timestamp_ms < -TIMESTAMP_MS_MAX))
    if not len(wrong):
        return
    at = int(wrong[0])
    ends = np.cumsum([one.last - one.first for one in slices])
    tp = slices[int(np.searchsorted(ends, at, side="right"))].tp
    raise GroupError(
        f"the record of {tp} at offset {offset[at]} has the timestamp {timestamp_ms[at]} ms, which Spark cannot store",
        topic=tp.topic,
        partition=tp.partition,
        offset=int(offset[at]),
    )


def fixed_width(values: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """An Arrow array without nulls over numpy's memory. ``pa.array`` would import pandas: half a second per worker."""
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def variable_width(values: Sequence[bytes | None], kind: pa.DataType) -> pa.Array:
    """A binary or string array of bytes objects, None as null; without ``pa.array`` for the same reason."""
    ends = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum([len(v or b"") for v in values], out=ends[1:])
    validity = None
    if None in values:
        validity = pa.py_buffer(np.packbits([v is not None for v in values], bitorder="little"))
    data = pa.py_buffer(b"".join(v or b"" for v in values))
    return pa.Array.from_buffers(kind, len(values), [validity, pa.py_buffer(ends), data])


def header_bytes(rows: Sequence[HeaderRow]) -> Ints:
    """The memory in bytes that the headers of each row take in Arrow."""
    return np.array(
        [sum(len(name.encode()) + len(value or b"") + HEADER_BYTES for name, value in row) for row in rows],
        dtype=np.int64,
    )


def header_column(rows: Sequence[HeaderRow]) -> pa.Array:
    """The headers of each row."""
    flat = [header for row in rows for header in row]
    return header_lists(
        np.array([len(row) for row in rows], dtype=np.int64),
        variable_width([name.encode() for name, _ in flat], pa.string()),
        variable_width([value for _, value in flat], pa.binary()),
    )


def header_lists(counts: Ints, names: pa.Array, values: pa.Array) -> pa.Array:
    """The headers of rows, from the number of each row and all headers one after the other. A row without headers is
    null, as in Spark's Kafka source, not an empty list."""
    ends = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=ends[1:])
    validity = pa.py_buffer(np.packbits(counts > 0, bitorder="little"))
    entries = pa.StructArray.from_arrays([names, values], fields=list(HEADERS_TYPE.value_type))
    return pa.Array.from_buffers(HEADERS_TYPE, len(counts), [validity, pa.py_buffer(ends)], children=[entries])


# --- raw memory -------------------------------------------------------------------------------------------------------


class _ArrayInterface:
    """Raw memory as numpy's array interface. ctypes would cache one array type for every length."""

    def __init__(self, address: int, typestr: str, count: int, stride: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "typestr": typestr,
            "shape": (count,),
            "strides": (stride,),
        }


def _memory(address: int, typestr: str, count: int, stride: int) -> npt.NDArray[Any]:
    """A view of ``count`` items in raw memory. It keeps nothing alive; only accessed items must exist."""
    return np.asarray(_ArrayInterface(address, typestr, count, stride))


def words_at(address: int, count: int) -> Words:
    """A view of ``count`` 8-byte words."""
    return _memory(address, "<u8", count, 8)


def bytes_from(address: int, count: int) -> npt.NDArray[np.uint8]:
    """A view of ``count`` bytes; only accessed ones must exist."""
    return _memory(address, "|u1", count, 1)


def can_gather(addresses: Words, size: int) -> bool:
    """Whether :func:`gather` can copy items of this size with a step of 1: numpy counts ``size`` bytes for each address
    of the whole span, in 63 bits. Heap and mapped memory are up to 2**47 bytes apart."""
    return (int(addresses.max()) - int(addresses.min()) + 1) * size < 1 << 63


def gather(addresses: Words, size: int, step: int) -> npt.NDArray[Any]:
    """Copy exactly ``size`` bytes from each address into one array; addresses differ by multiples of ``step``."""
    base = int(addresses.min())
    at = ((addresses - np.uint64(base)) // np.uint64(step)).astype(np.int64)
    return _memory(base, f"|V{size}", int(at.max()) + 1, step)[at]


def binary_column(addresses: Words, lengths: Words) -> pa.Array:
    """A binary array with a copy of the bytes at ``addresses``; address 0 is null."""
    count = len(addresses)
    present = addresses != 0
    nulls = count - int(np.count_nonzero(present))
    if nulls == count:
        return pa.nulls(count, pa.binary())
    validity = pa.py_buffer(np.packbits(present, bitorder="little")) if nulls else None
    lengths = lengths.astype(np.int32)
    if nulls:
        lengths[~present] = 0
    elif lengths[0] and (lengths == lengths[0]).all() and can_gather(addresses, int(lengths[0])):  # usual for keys
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


# --- headers as the broker sent them ----------------------------------------------------------------------------------


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
        names = _header_names(binary_column(self.names[at], self.name_lengths[at].view(np.uint64)))
        return header_lists(counts, names, binary_column(self.values[at], self.value_lengths[at].view(np.uint64)))


def parse_headers(addresses: Words, lengths: Ints) -> RecordHeaders | None:
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


def _header_names(names: pa.Array) -> pa.Array:
    """UTF-8 text; what is none is replaced, as in Spark's Kafka source."""
    text = pa.Array.from_buffers(pa.string(), len(names), names.buffers())
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        return variable_width([name.as_py().decode(errors="replace").encode() for name in names], pa.string())
    return text
