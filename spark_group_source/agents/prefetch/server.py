"""Serve buffered records to the tasks of the agent's executor, over a Unix socket.

Runs in: agents. Deliberately absent: the contents of the buffers (``buffers``), the client (``client``).

One connection carries one request with ranges, and one response: the records buffered from the start of each range.
Records are served once. If a request is repeated (a task retry, speculation, a second action, a stage that runs again),
nothing is left, and the task reads from the brokers.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import pyarrow as pa

from spark_group_source.agents.agent_folder import AgentFolder, is_same_user
from spark_group_source.agents.channel.wire import WireError, set_deadline
from spark_group_source.agents.messages import ClaimGranted, ServedRange, ServedRanges
from spark_group_source.agents.prefetch import client
from spark_group_source.agents.prefetch.buffers import BufferedRange, TakenRanges
from spark_group_source.agents.prefetch.prefetcher import SharedBuffers
from spark_group_source.agents.prefetch.topic_ids import TopicIdChecker
from spark_group_source.reader.records import BATCH_ROWS_MAX, arrow_schema

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 32
"""Concurrent connections; more are closed at once, and their tasks read from the brokers."""
REQUEST_S = 2.0
"""Limit for receiving a request."""
RESPONSE_S = 10.0
"""Limit for sending a response. A task receives all of it before it yields any row."""
JOINED_BYTES_MAX = 1 << 20
"""Rows of small buffered ranges are sent as one batch of up to this size."""
WRITE_BYTES = 64 << 10
"""Larger columns are written from their own memory; a larger buffer would hold a copy of each."""


class PrefetchServer:
    """Serves the buffers of one agent."""

    def __init__(
        self, folder: AgentFolder, buffers: SharedBuffers, checker: TopicIdChecker, *, include_headers: bool
    ) -> None:
        self._buffers, self._checker = buffers, checker
        self._schema = arrow_schema(include_headers)
        self._slots = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with folder.socket_path("socket.new") as path:
            self._listener.bind(path)
        self._listener.listen(CONNECTIONS_MAX)
        (folder.path / "socket.new").rename(folder.path / "socket")  # a task that finds it can connect
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
            if not self._slots.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="task", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                if is_same_user(connection):
                    self._respond(connection, client.receive(connection, ClaimGranted, time.monotonic() + REQUEST_S))
        except (OSError, WireError) as exc:
            log.info("a task's connection failed: %s: %s; it reads from the brokers", type(exc).__name__, exc)
        finally:
            self._slots.release()

    def _respond(self, connection: socket.socket, request: ClaimGranted) -> None:
        until_s = time.monotonic() + RESPONSE_S
        taken = self._take(request)
        unsent = [each for one in taken for each in one.ranges]
        try:
            rows = sum(each.last - each.first for each in unsent)
            client.send(connection, ServedRanges(ranges=tuple(map(_served, taken)), rows=rows), until_s)
            if not rows:
                return
            set_deadline(connection, until_s)
            with (
                connection.makefile("wb", buffering=WRITE_BYTES) as file,
                pa.ipc.new_stream(file, self._schema) as stream,
            ):
                for ranges in joined(unsent):
                    set_deadline(connection, until_s)
                    stream.write_batch(_one_batch(ranges))
                    self._buffers.free(ranges)
                    del unsent[: len(ranges)]
        finally:
            self._buffers.free(unsent)

    def _take(self, request: ClaimGranted) -> list[TakenRanges]:
        with self._buffers.locked() as buffers:
            needed = buffers.last_arrivals(request.ranges)
        checked = self._checker.checked(needed, request.topic_ids) if needed else {}
        with self._buffers.locked() as buffers:
            return buffers.take(request.ranges, request.topic_ids, request.leader_epochs, checked)


def joined(ranges: Sequence[BufferedRange]) -> Iterator[list[BufferedRange]]:
    """Group buffered ranges in order for sending: small ones together, those without rows with their neighbours."""
    group: list[BufferedRange] = []
    rows = size = 0
    for each in list(ranges):
        count = each.last - each.first
        if rows and count and (rows + count > BATCH_ROWS_MAX or size + each.bytes > JOINED_BYTES_MAX):
            yield group
            group, rows, size = [], 0, 0
        group.append(each)
        rows, size = rows + count, size + each.bytes
    if rows:
        yield group


def _served(taken: TakenRanges) -> ServedRange:
    rows = sum(each.last - each.first for each in taken.ranges)
    return ServedRange(index=taken.request_index, until=taken.until, rows=rows)


def _one_batch(ranges: Sequence[BufferedRange]) -> pa.RecordBatch:
    batches = [batch for each in ranges if (batch := each.rows()) is not None]
    if len(batches) == 1:
        return batches[0]
    (whole,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return whole
