"""A task's side of its agent: what it has in memory first, all else from the brokers.

Runs in: executor workers. Deliberately absent: starting the agent (``start``), reading from brokers (``fetch``).

An answer is taken as a whole before any of it is handed on. So an agent that ends half way, or is slow, costs time and
nothing else: its rows are dropped, and everything is read directly. No row comes twice.
"""

import contextlib
import logging
import socket
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

import pyarrow as pa

from spark_group_source.agents.agent_folder import Home, is_ours
from spark_group_source.agents.channel import frames
from spark_group_source.agents.channel.codec import Codec, WireError
from spark_group_source.agents.task_messages import ClaimGranted, Part, Served
from spark_group_source.model import OffsetRange, Piece
from spark_group_source.reader.fetch import read_ranges
from spark_group_source.reader.range_reader import ReadOptions
from spark_group_source.reader.read_counts import ReadCounts
from spark_group_source.reader.records import arrow_schema

T = TypeVar("T")
log = logging.getLogger(__name__)

CODEC = Codec((ClaimGranted, Served), bytes_max=16 << 20)
"""A task shows its agent what it is to read, and the agent says what of it follows. 100,000 ranges take 3 MB."""
ASK_S = 5.0
"""For the agent's whole answer; then its task reads directly."""
READ_BYTES = 64 << 10
"""Columns that are larger are read into their place; a larger buffer would hold a copy of each."""


def read_near(home: Home, piece: Piece, options: ReadOptions, counts: ReadCounts) -> Iterator[pa.RecordBatch]:
    """What :func:`~spark_group_source.reader.fetch.read_ranges` yields, and from the agent what that has in memory.

    Raises:
        GroupError: as ``read_ranges`` does. Nothing is raised for an agent.
    """
    batches, rest = ask(home, piece, include_headers=options.include_headers, counts=counts)
    batches.reverse()
    while batches:
        yield batches.pop()  # and its memory goes when Spark has it
    yield from read_ranges(piece._replace(ranges=tuple(rest)), options, counts)


def ask(
    home: Home, piece: Piece, *, include_headers: bool, counts: ReadCounts | None = None
) -> tuple[list[pa.RecordBatch], list[OffsetRange]]:
    """The rows that the agent has of the beginnings of a piece's ranges, and what is left of them."""
    ranges = piece.ranges
    if not ranges:
        return [], []
    wanted = ClaimGranted(**piece._asdict())
    until_s = time.monotonic() + ASK_S
    try:
        with connected(home, until_s) as connection:
            send(connection, wanted, until_s)
            served = receive(connection, Served, until_s)
            rest = _left(ranges, served.parts)
            batches = _batches(connection, served.rows, include_headers, until_s)
    except FileNotFoundError:
        return [], list(ranges)  # it has only been started, or has ended
    except (OSError, WireError, pa.ArrowException) as exc:
        log.info("reading directly, because the agent in %s did not answer: %s: %s", home.path, type(exc).__name__, exc)
        return [], list(ranges)
    if counts is not None:
        counts.rows_from_agent.update({ranges[part.place].tp: part.rows for part in served.parts if part.rows})
    return batches, rest


@contextlib.contextmanager
def connected(home: Home, until_s: float) -> Iterator[socket.socket]:
    """A connection to the agent, for one request. Raises OSError where none listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, home.address() as address:
        frames.limit(connection, until_s)
        connection.connect(address)
        if not is_ours(connection):
            raise PermissionError(f"another user listens in {home.path}")
        yield connection


def send(connection: socket.socket, message: object, until_s: float) -> None:
    """Send a message of :data:`CODEC`. Raises OSError, WireError."""
    frames.limit(connection, until_s)
    connection.sendall(frames.framed(CODEC.encode(message)))


def receive(connection: socket.socket, wanted: type[T], until_s: float) -> T:
    """The next message, which has to be of this type. Raises OSError, WireError."""
    message = CODEC.decode(frames.receive(connection, CODEC.bytes_max, until_s)).message
    if not isinstance(message, wanted):
        raise WireError(f"a {type(message).__name__}, not a {wanted.__name__}")
    return message


def _left(ranges: Sequence[OffsetRange], served: Sequence[Part]) -> list[OffsetRange]:
    ends = {part.place: part.until for part in served}
    if not ends.keys() <= set(range(len(ranges))):
        raise WireError(f"{len(ranges)} ranges, and the agent serves those at {sorted(ends)}")
    left = []
    for place, r in enumerate(ranges):
        until = ends.get(place, r.start)
        if not r.start <= until <= r.end:
            raise WireError(f"{r} was served until {until}")
        if until < r.end:
            left.append(OffsetRange(r.tp, until, r.end))
    return left


def _batches(connection: socket.socket, rows: int, include_headers: bool, until_s: float) -> list[pa.RecordBatch]:
    found: list[pa.RecordBatch] = []
    if not rows:
        return found
    frames.limit(connection, until_s)
    with connection.makefile("rb", buffering=READ_BYTES) as file, pa.ipc.open_stream(file) as stream:
        if not stream.schema.equals(arrow_schema(include_headers)):
            raise WireError("the agent's rows have other columns")
        for batch in stream:
            found.append(batch)
            frames.limit(connection, until_s)
    # A stream that ends too early looks like one that is at its end.
    if sum(batch.num_rows for batch in found) != rows:
        raise WireError("the agent's rows are not all there")
    return found
