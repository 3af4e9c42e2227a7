"""The agent's side of its Unix socket: who may ask what, and for how long.

Runs in: agents. Deliberately absent: what is held (``buffers``), how it is asked (``near``).

One connection is one request, ranges, and one answer: what is held of their beginnings. It is served once: a request
that comes again (a retry, speculation, a second action, a stage that is run anew) finds nothing, and its task reads
directly.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import pyarrow as pa

from spark_group_source.agents.agent_folder import Home, is_ours
from spark_group_source.agents.channel import frames
from spark_group_source.agents.channel.codec import WireError
from spark_group_source.agents.prefetch import near
from spark_group_source.agents.prefetch.buffers import Piece, Taken
from spark_group_source.agents.prefetch.confirm import Confirmer
from spark_group_source.agents.prefetch.reader import Stock
from spark_group_source.agents.task_messages import ClaimGranted, Part, Served
from spark_group_source.reader.records import BATCH_ROWS_MAX, arrow_schema

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 32
"""At the same time; more are closed at once, and their tasks read directly."""
REQUEST_S = 2.0
"""For a whole request to come."""
ANSWER_S = 10.0
"""For a whole answer to be taken. A task takes all of it before it hands on any."""
JOINED_BYTES_MAX = 1 << 20
"""Rows of small pieces travel together, up to this."""
WRITE_BYTES = 64 << 10
"""Columns that are larger go to the socket as they are; a larger buffer would hold a copy of each."""


class Server:
    """Serves one agent's stock."""

    def __init__(self, home: Home, stock: Stock, confirmer: Confirmer, *, include_headers: bool) -> None:
        self._stock, self._confirmer = stock, confirmer
        self._schema = arrow_schema(include_headers)
        self._places = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with home.address("socket.new") as new:
            self._listener.bind(new)
        self._listener.listen(CONNECTIONS_MAX)
        (home.path / "socket.new").rename(home.path / "socket")  # who finds it is answered
        self._thread = threading.Thread(target=self._accept, name="server", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # stopped
            if not self._places.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="task", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                if is_ours(connection):
                    self._answer(connection, near.receive(connection, ClaimGranted, time.monotonic() + REQUEST_S))
        except (OSError, WireError) as exc:
            log.info("a connection ended: %s: %s", type(exc).__name__, exc)
        finally:
            self._places.release()

    def _answer(self, connection: socket.socket, wanted: ClaimGranted) -> None:
        until_s = time.monotonic() + ANSWER_S
        taken = self._take(wanted)
        left = [piece for one in taken for piece in one.pieces]
        try:
            rows = sum(piece.last - piece.first for piece in left)
            near.send(connection, Served(parts=tuple(map(_part, taken)), rows=rows), until_s)
            if not rows:
                return
            frames.limit(connection, until_s)
            with (
                connection.makefile("wb", buffering=WRITE_BYTES) as file,
                pa.ipc.new_stream(file, self._schema) as stream,
            ):
                for pieces in joined(left):
                    frames.limit(connection, until_s)
                    stream.write_batch(_together(pieces))
                    self._stock.free(pieces)
                    del left[: len(pieces)]
        finally:
            self._stock.free(left)

    def _take(self, wanted: ClaimGranted) -> list[Taken]:
        with self._stock.locked() as buffers:
            needed = buffers.numbers(wanted.ranges)
        confirmed = self._confirmer.confirmed(needed, wanted.topic_ids) if needed else {}
        with self._stock.locked() as buffers:
            return buffers.take(wanted.ranges, wanted.topic_ids, wanted.leader_epochs, confirmed)


def joined(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Pieces in order, in groups: small ones together, those without rows with whatever is beside them."""
    group: list[Piece] = []
    rows = size = 0
    for piece in list(pieces):
        count = piece.last - piece.first
        if rows and count and (rows + count > BATCH_ROWS_MAX or size + piece.bytes > JOINED_BYTES_MAX):
            yield group
            group, rows, size = [], 0, 0
        group.append(piece)
        rows, size = rows + count, size + piece.bytes
    if rows:
        yield group


def _part(one: Taken) -> Part:
    rows = sum(piece.last - piece.first for piece in one.pieces)
    return Part(place=one.place, until=one.until, rows=rows)


def _together(pieces: Sequence[Piece]) -> pa.RecordBatch:
    batches = [batch for piece in pieces if (batch := piece.rows()) is not None]
    if len(batches) == 1:
        return batches[0]
    (whole,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return whole
