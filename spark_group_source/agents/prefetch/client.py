"""Read a piece through the executor's agent: buffered records from its memory, the others from the brokers.

Runs in: executor workers. Deliberately absent: starting the agent (``agents.agent_folder``), reading from brokers
(``reader.range_reader``).

A task receives the agent's whole response before it yields any of it. If the agent ends or is too slow meanwhile, the
rows of that response are dropped, and they and all that follows are read from the brokers: no row is read twice. After
a timeout, the executor's tasks send no request for a while: an agent that is frozen would delay each of them. A
response has a bound in bytes; the task requests the rest after it has yielded these rows.
"""

import contextlib
import logging
import socket
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import pyarrow as pa

from spark_group_source.agents.agent_folder import AgentFolder, Attempts, is_same_user
from spark_group_source.agents.channel.wire import Codec, WireError, frame, receive_frame, set_deadline
from spark_group_source.agents.messages import ClaimGranted, ServedRange, ServedRanges
from spark_group_source.model import OffsetRange, Piece
from spark_group_source.reader.range_reader import ReadCounts, ReadOptions, read_ranges
from spark_group_source.reader.records import arrow_schema

MessageT = TypeVar("MessageT")
log = logging.getLogger(__name__)

CODEC = Codec((ClaimGranted, ServedRanges))
"""A task sends the ranges that it reads, and the agent responds with those that it serves. 100,000 ranges take 3 MB."""
RESPONSE_S = 5.0
"""Limit for the start of the agent's response, and for each further part of it; then the task reads all from the
brokers."""
TRANSFER_S = 60.0
"""Limit for the whole response."""
READ_BYTES = 64 << 10
"""Larger columns are read into their own memory; a larger buffer would hold a copy of each."""


def read_with_agent(
    folder: AgentFolder, piece: Piece, options: ReadOptions, counts: ReadCounts
) -> Iterator[pa.RecordBatch]:
    """Yield what :func:`~spark_group_source.reader.range_reader.read_ranges` yields; buffered records
    come from the agent.

    Raises:
        GroupError: as ``read_ranges`` does. Failures of the agent raise nothing.
    """
    is_cut = True
    while is_cut:  # each response that is cut has served a part of the ranges
        batches, rest, is_cut = request_buffered(folder, piece, options.columns, counts)
        piece = piece._replace(ranges=tuple(rest))
        batches.reverse()
        while batches:
            yield batches.pop()  # the batch is freed as soon as Spark has consumed it
    yield from read_ranges(piece, options, counts)


class BufferedRows(NamedTuple):
    """One response of the agent."""

    batches: list[pa.RecordBatch]
    rest: list[OffsetRange]
    """What is left of the requested ranges."""
    is_cut: bool
    """Whether the agent has more of them buffered."""


def request_buffered(folder: AgentFolder, piece: Piece, columns: Sequence[str], counts: ReadCounts) -> BufferedRows:
    """Request the rows that the agent has buffered from the start of a piece's ranges; after a request that timed out,
    not before the pause is over."""
    ranges = piece.ranges
    nothing = BufferedRows([], list(ranges), is_cut=False)
    unanswered, began_s = Attempts(folder.unanswered), time.time()
    if not ranges or not unanswered.is_due:
        return nothing
    request = ClaimGranted(piece)
    until_s = time.monotonic() + RESPONSE_S
    try:
        with connect(folder, until_s) as connection:
            send(connection, request, until_s)
            served = receive(connection, ServedRanges, until_s)
            rest = _rest(ranges, served.ranges)
            if served.is_cut and not served.rows:
                raise WireError("the agent's response is cut and has no rows")
            until_s += TRANSFER_S - RESPONSE_S
            batches = _receive_batches(connection, served.rows, columns, until_s)
    except FileNotFoundError:
        return nothing  # the agent is still starting, or has ended
    except (OSError, WireError, pa.ArrowException) as exc:
        if isinstance(exc, TimeoutError):
            unanswered.add(began_s)
        log.info(
            "no response from the agent in %s: %s: %s; reading from the brokers", folder.path, type(exc).__name__, exc
        )
        return nothing
    unanswered.clear()
    counts.rows_from_memory.update({ranges[one.index].tp: one.rows for one in served.ranges if one.rows})
    for one in served.ranges:
        counts.bytes[ranges[one.index].tp.topic] += one.bytes
    return BufferedRows(batches, rest, served.is_cut)


@contextlib.contextmanager
def connect(folder: AgentFolder, until_s: float) -> Iterator[socket.socket]:
    """A connection to the agent, for one request. Raises OSError if no agent listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, folder.socket_path() as path:
        set_deadline(connection, until_s)
        connection.connect(path)
        if not is_same_user(connection):
            raise PermissionError(f"a process of another user listens in {folder.path}")
        yield connection


def send(connection: socket.socket, message: object, until_s: float) -> None:
    """Send a message of :data:`CODEC`. Raises OSError, WireError."""
    set_deadline(connection, until_s)
    connection.sendall(frame(CODEC.encode(message)))


def receive(connection: socket.socket, wanted: type[MessageT], until_s: float) -> MessageT:
    """The next message, which must be of this type. Raises OSError, WireError."""
    message = CODEC.decode(receive_frame(connection, CODEC.bytes_max, until_s))
    if not isinstance(message, wanted):
        raise WireError(f"received {type(message).__name__}, expected {wanted.__name__}")
    return message


def _rest(ranges: Sequence[OffsetRange], served: Sequence[ServedRange]) -> list[OffsetRange]:
    """What is left of the ranges. Raises WireError if the agent's response does not fit them."""
    ends = {one.index: one.until for one in served}
    if not ends.keys() <= set(range(len(ranges))):
        raise WireError(f"the agent served ranges {sorted(ends)} of {len(ranges)}")
    rest = []
    for index, r in enumerate(ranges):
        until = ends.get(index, r.start)
        if not r.start <= until <= r.end:
            raise WireError(f"the agent served {r} up to {until}")
        if until < r.end:
            rest.append(OffsetRange(r.tp, until, r.end))
    return rest


def _receive_batches(
    connection: socket.socket, rows: int, columns: Sequence[str], until_s: float
) -> list[pa.RecordBatch]:
    batches: list[pa.RecordBatch] = []
    if not rows:
        return batches
    set_deadline(connection, min(until_s, time.monotonic() + RESPONSE_S))
    with connection.makefile("rb", buffering=READ_BYTES) as file, pa.ipc.open_stream(file) as stream:
        if not stream.schema.equals(arrow_schema(columns)):
            raise WireError("the agent's rows have other columns")
        for batch in stream:
            batches.append(batch)
            set_deadline(connection, min(until_s, time.monotonic() + RESPONSE_S))
    # Reading a truncated Arrow stream raises no error.
    if sum(batch.num_rows for batch in batches) != rows:
        raise WireError("the agent's rows are incomplete")
    return batches
