"""Which of the records that a client brings are the next planned ones of a partition, for tasks and for read-ahead.

Runs in: executor workers and agents. Deliberately absent: what follows from it (``ranges``, ``agent.reader``).

Every record carries the epoch of the leader that wrote it, and a plan the epoch of the leader that reported its ends
(KIP-320): what lay below them then was written by this leader or a former one. A record of a later leader below a
planned end is not a planned one. The log was cut there meanwhile, and has grown again with other records.
"""

from typing import NamedTuple

import numpy as np

from spark_group_source.answers import CODES
from spark_group_source.reader.native_client import NativeChunk
from spark_group_source.reader.records import BATCH_BYTES_MAX, BATCH_ROWS_MAX, Ints, Run

ASSUMED_RECORD_BYTES = 16 * 1024
"""Size taken for a record until the first ones were seen; it bounds the first poll to 1,024 records."""
EOF = CODES["_PARTITION_EOF"]
"""Not an error: the end of what can be read of a partition."""
DAMAGED = frozenset({CODES["_BAD_MSG"], CODES["_NOT_IMPLEMENTED"]})
"""A batch of records whose checksum is wrong. librdkafka leaves it out and goes on behind it, or in its middle, and
there it finds a format that it does not know."""


class LaterLeader(NamedTuple):
    """The first record of a leader that is later than the plan's."""

    offset: int
    epoch: int


class Next(NamedTuple):
    """The rows [first, last) of a run are the next planned ones."""

    first: int
    last: int
    reached: int
    """The next offset behind them: every planned record below it is among them or was there before."""
    later: LaterLeader | None
    """Why they end there, if it is not the plan's end."""


def next_rows(chunk: NativeChunk, run: Run, position: int, end: int, epoch: int | None) -> Next:
    """The rows of ``run`` in [position, end) that were planned.

    Args:
        epoch: of the plan's leader; None: nothing is known of it, and nothing compared.
    """
    first, last = np.searchsorted(run.offsets, (position, end)).tolist()
    reached = max(position, int(run.offsets[-1]) + 1)
    if epoch is None or first >= last or chunk.leader_epoch(run.first + last - 1) <= epoch:
        return Next(first, last, reached, None)
    low, high = first, last - 1
    while low < high:  # epochs never go back
        middle = (low + high) // 2
        if chunk.leader_epoch(run.first + middle) <= epoch:
            low = middle + 1
        else:
            high = middle
    at = int(run.offsets[low])
    return Next(first, low, at, LaterLeader(at, chunk.leader_epoch(run.first + low)))


class RecordSize:
    """How large records are, as far as they were seen."""

    def __init__(self) -> None:
        self._bytes = float(ASSUMED_RECORD_BYTES)

    def see(self, sizes: Ints) -> None:
        if len(sizes):
            self._bytes = max(1.0, float(sizes.mean()))

    def rows_max(self, left: int) -> int:
        """How many rows one poll may bring where so many are left."""
        return max(1, min(left, BATCH_ROWS_MAX, int(BATCH_BYTES_MAX / self._bytes)))
