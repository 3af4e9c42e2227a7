"""Selection of planned records: which rows of a fetched chunk continue a partition's range.

Runs in: executor workers and agents. Deliberately absent: what the caller does with the rows (``range_reader``,
``agents.prefetch.reader``).

Every record carries the epoch of the leader that wrote it, and a plan has the epoch of the leader that reported the
ranges' ends (KIP-320). A record with a higher epoch below a planned end was written after the plan: the log was
truncated in the meantime and has grown again with other records.
"""

from typing import NamedTuple

import numpy as np

from spark_group_source.error_codes import CODES
from spark_group_source.reader.native_client import NativeChunk
from spark_group_source.reader.records import BATCH_BYTES_MAX, BATCH_ROWS_MAX, Ints, PartitionRows

ASSUMED_RECORD_BYTES = 16 * 1024
"""Assumed size of a record before any was fetched. It limits the first poll to 1,024 records."""
EOF = CODES["_PARTITION_EOF"]
"""Not an error: the end of a partition, as far as the isolation level allows to read."""
DAMAGED = frozenset({CODES["_BAD_MSG"], CODES["_NOT_IMPLEMENTED"]})
"""A record batch with a wrong checksum. librdkafka drops it and continues after it, or inside it, where it finds an
unknown format."""


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


def select_rows(chunk: NativeChunk, fetched: PartitionRows, position: int, end: int, epoch: int | None) -> PlannedRows:
    """Select the planned rows with offsets in [position, end).

    Args:
        epoch: the leader epoch of the plan; None: it is unknown, and epochs are not compared.
    """
    first, last = np.searchsorted(fetched.offsets, (position, end)).tolist()
    reached = max(position, int(fetched.offsets[-1]) + 1)
    if epoch is None or first >= last or chunk.leader_epoch(fetched.first + last - 1) <= epoch:
        return PlannedRows(first, last, reached, None)
    low, high = first, last - 1
    while low < high:  # epochs never decrease within a log
        middle = (low + high) // 2
        if chunk.leader_epoch(fetched.first + middle) <= epoch:
            low = middle + 1
        else:
            high = middle
    offset = int(fetched.offsets[low])
    return PlannedRows(first, low, offset, NewerRecord(offset, chunk.leader_epoch(fetched.first + low)))


class RecordSize:
    """The mean size of the records in the last chunk, which limits the next poll."""

    def __init__(self) -> None:
        self._bytes = float(ASSUMED_RECORD_BYTES)

    def update(self, sizes: Ints) -> None:
        if len(sizes):
            self._bytes = max(1.0, float(sizes.mean()))

    def rows_max(self, remaining: int) -> int:
        """The maximum number of rows of one poll if ``remaining`` are wanted."""
        return max(1, min(remaining, BATCH_ROWS_MAX, int(BATCH_BYTES_MAX / self._bytes)))
