"""Kafka records as Arrow: the one schema, and batches put together from columns.

Runs in: executor workers; ``arrow_schema`` and ``spark_ddl`` also where the query is planned. Deliberately absent: the
Kafka client (``native``), any decision about which record belongs to a range, and pyspark.

The columns are those of Spark's own Kafka source, value by value: a record without headers has null (not an empty
list), the timestamp is the record's milliseconds even when they are -1, ``timestampType`` counts from -1 (none),
0 (create time), 1 (log-append time).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_group_source.errors import GroupError
from spark_group_source.model import TopicPartition

BATCH_ROWS_MAX = 32_768
"""Rows of one RecordBatch. Spark's Arrow path is fastest from about 10,000; more only costs memory."""

BATCH_BYTES_MAX = 16 * 1024 * 1024
"""Key, value and, if asked for, header bytes of one RecordBatch, except that one larger record makes a batch of its
own."""

HEADER_BYTES = 10
"""What Arrow needs of one header besides its texts."""

HEADERS_TYPE = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))

_FIELDS = [
    pa.field("key", pa.binary()),
    pa.field("value", pa.binary()),
    pa.field("topic", pa.string()),
    pa.field("partition", pa.int32()),
    pa.field("offset", pa.int64()),
    pa.field("timestamp", pa.timestamp("us", tz="UTC")),
    pa.field("timestampType", pa.int32()),
]
_DDL = "key BINARY, value BINARY, topic STRING, partition INT, offset BIGINT, timestamp TIMESTAMP, timestampType INT"

_INLINE_MAX = 12
"""A binary view keeps values up to this length in itself, longer ones as a reference."""
_WINDOW_BITS = 30
"""References of a view are 31 bits wide, so memory is named in windows of 1 GiB."""

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
HeaderRow = Sequence[tuple[str, bytes | None]]

TIMESTAMP_MS_MAX = (2**63 - 1) // 1000
"""Spark counts microseconds in 64 bits."""


def arrow_schema(include_headers: bool) -> pa.Schema:
    """The exact schema of every batch; all columns nullable. ``headers`` comes last and only when asked for."""
    return pa.schema([*_FIELDS, pa.field("headers", HEADERS_TYPE)] if include_headers else _FIELDS)


def spark_ddl(include_headers: bool) -> str:
    """The same schema in Spark's DDL, for ``DataSource.schema()``."""
    return _DDL + ", headers ARRAY<STRUCT<key: STRING, value: BINARY>>" if include_headers else _DDL


class Event(NamedTuple):
    """Something a client reports that is not a record. ``tp`` is None when it concerns the whole cluster."""

    code: int
    """librdkafka's error number; negative ones are its own, positive ones came from a broker."""
    text: str
    tp: TopicPartition | None
    offset: int


class TopicTold(NamedTuple):
    """What metadata says of one topic."""

    code: int
    """0: it is there."""
    text: str
    id: str
    """Changes when the topic is deleted and made anew (KIP-516); empty where brokers have no ids."""
    partitions: int


Told = dict[str, TopicTold]


class Bounds(NamedTuple):
    """What a leader tells of its log."""

    low: int
    """The first offset that is left."""
    high: int
    """The next to be written, open transactions included."""
    leader_epoch: int = -1
    """Of that leader; -1 if it did not tell."""


class Run(NamedTuple):
    """Neighbouring rows of one chunk that are of one partition; offsets ascend."""

    tp: TopicPartition
    first: int
    offsets: Ints


class Cut(NamedTuple):
    """The rows [first, last) of a chunk, all of one partition, that a plan wants."""

    tp: TopicPartition
    first: int
    last: int


def bounded(cuts: Sequence[Cut], sizes: Ints) -> Iterator[list[Cut]]:
    """Group cuts so that each group makes one batch within BATCH_ROWS_MAX and BATCH_BYTES_MAX; order is kept."""
    group: list[Cut] = []
    rows = size = 0
    for cut in cuts:
        first = cut.first
        while first < cut.last:
            ends = np.cumsum(sizes[first : min(cut.last, first + BATCH_ROWS_MAX - rows)])
            fit = int(np.searchsorted(ends, BATCH_BYTES_MAX - size, side="right"))
            if fit == 0 and not group:
                fit = 1  # one record above the bound still has to travel
            if fit:
                group.append(Cut(cut.tp, first, first + fit))
                rows, size, first = rows + fit, size + int(ends[fit - 1]), first + fit
            if first < cut.last:
                yield group
                group, rows, size = [], 0, 0
    if group:
        yield group


def assemble(
    cuts: Sequence[Cut],
    key: pa.Array,
    value: pa.Array,
    offset: Ints,
    timestamp_ms: Ints,
    timestamp_type: npt.NDArray[np.int32],
    headers: pa.Array | None,
) -> pa.RecordBatch:
    """One batch from the columns that the client gave, in the order of ``cuts``, and those that the cuts imply.

    Args:
        timestamp_ms: milliseconds since the epoch, -1 where the record has none.
        timestamp_type: librdkafka's numbers, one more than Spark's.
        headers: of HEADERS_TYPE, or None when the schema has none.
    """
    _check_stamps(cuts, offset, timestamp_ms)
    rows = np.array([cut.last - cut.first for cut in cuts], dtype=np.int64)
    names = sorted({cut.tp.topic for cut in cuts})
    index = {name: at for at, name in enumerate(names)}
    at = np.repeat(np.array([index[cut.tp.topic] for cut in cuts], dtype=np.int32), rows)
    topic = packed([name.encode() for name in names], pa.string()).take(column(at, pa.int32()))
    partition = np.repeat(np.array([cut.tp.partition for cut in cuts], dtype=np.int32), rows)
    columns = [
        key,
        value,
        topic,
        column(partition, pa.int32()),
        column(offset, pa.int64()),
        column(timestamp_ms * 1000, _FIELDS[5].type),
        column(timestamp_type - np.int32(1), pa.int32()),
    ]
    if headers is not None:
        columns.append(headers)
    return pa.RecordBatch.from_arrays(columns, schema=arrow_schema(headers is not None))


def _check_stamps(cuts: Sequence[Cut], offset: Ints, timestamp_ms: Ints) -> None:
    """Spark's own source ends with an ArithmeticException at a timestamp that its type cannot hold. So does this one,
    with its place: any other value would be invented."""
    wrong = np.flatnonzero((timestamp_ms > TIMESTAMP_MS_MAX) | (timestamp_ms < -TIMESTAMP_MS_MAX))
    if not len(wrong):
        return
    at = int(wrong[0])
    ends = np.cumsum([cut.last - cut.first for cut in cuts])
    tp = cuts[int(np.searchsorted(ends, at, side="right"))].tp
    raise GroupError(
        f"the record of {tp} at offset {offset[at]} has the timestamp {timestamp_ms[at]} ms, which Spark's timestamps "
        "cannot hold: remove it from the log, or move the group past it with spark-group reset",
        topic=tp.topic,
        partition=tp.partition,
        offset=int(offset[at]),
    )


def column(values: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """An array without nulls over numpy's memory. ``pa.array`` would import pandas for it: half a second per worker."""
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def packed(values: Sequence[bytes | None], kind: pa.DataType) -> pa.Array:
    """A binary or string array of bytes objects, None being null; without ``pa.array`` for the same reason."""
    ends = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum([len(v or b"") for v in values], out=ends[1:])
    validity = None
    if None in values:
        validity = pa.py_buffer(np.packbits([v is not None for v in values], bitorder="little"))
    data = pa.py_buffer(b"".join(v or b"" for v in values))
    return pa.Array.from_buffers(kind, len(values), [validity, pa.py_buffer(ends), data])


def header_bytes(rows: Sequence[HeaderRow]) -> Ints:
    """How much memory the headers of each row take: names and values, and the ends of both."""
    return np.array(
        [sum(len(name) + len(value or b"") + HEADER_BYTES for name, value in row) for row in rows], dtype=np.int64
    )


def header_column(rows: Sequence[HeaderRow]) -> pa.Array:
    """The headers of each row. A row without any is null, as in Spark's own source, not an empty list."""
    flat = [header for row in rows for header in row]
    ends = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(row) for row in rows], out=ends[1:])
    validity = pa.py_buffer(np.packbits([bool(row) for row in rows], bitorder="little"))
    entries = pa.StructArray.from_arrays(
        [packed([name.encode() for name, _ in flat], pa.string()), packed([value for _, value in flat], pa.binary())],
        fields=list(HEADERS_TYPE.value_type),
    )
    return pa.Array.from_buffers(HEADERS_TYPE, len(rows), [validity, pa.py_buffer(ends)], children=[entries])


# --- raw memory -------------------------------------------------------------------------------------------------------


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
