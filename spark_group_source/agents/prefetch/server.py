"""Serve buffered records of the planned topics to the tasks of the agent's executor, over a Unix socket.

Runs in: agents. Deliberately absent: the contents of the buffers (``buffers``), the client (``client``).

One connection carries one request with ranges, and one response: the records buffered from the start of each range, up
to RESPONSE_BYTES_MAX. Records are served once. If a request is repeated (a task retry, speculation, a second action, a
stage that runs again), nothing is left, and the task reads from the brokers.
"""

import contextlib
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import pyarrow as pa

from spark_group_source.agents.agent_folder import AgentFolder, is_same_user
from spark_group_source.agents.channel.wire import WireError, set_deadline
from spark_group_source.agents.messages import ClaimGranted, ServedRange, ServedRanges
from spark_group_source.agents.prefetch import client
from spark_group_source.agents.prefetch.buffers import BufferedRange, TakenRanges
from spark_group_source.agents.prefetch.prefetcher import SharedBuffers
from spark_group_source.errors import SourceError
from spark_group_source.reader.native_client import NativeClient
from spark_group_source.reader.records import BATCH_ROWS_MAX, arrow_schema, payload_bytes

log = logging.getLogger(__name__)

TASK_THREAD = "task"
"""Name of the threads that serve one task each."""
CONNECTIONS_MAX = 128
"""Concurrent connections, each with a thread: one for each core of a large executor. More are closed at once, and their
tasks read from the brokers."""
REQUEST_S = 2.0
"""Limit for receiving a request."""
ACCEPT_RETRIED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
"""Errors of accept(2) that pass: the system or the process has too many open files, or the client has gone."""
ACCEPT_PAUSE_S = 1.0
"""Pause after one. Meanwhile tasks wait in the backlog, and then read from the brokers."""
RESPONSE_S = client.TRANSFER_S
"""Limit for sending a response. A task receives all of it before it yields any row."""
RESPONSE_BYTES_MAX = 16 << 20
"""Bound of the rows of one response, which a task holds in memory; a buffered range, which is one Arrow batch at most
(``reader.records.BATCH_BYTES_MAX``), is sent alone if it is larger. The task requests what is left again."""
JOINED_BYTES_MAX = 1 << 20
"""Rows of small buffered ranges are sent as one batch of up to this size."""
CHECK_S = 0.9
"""Limit for the response to a check of topic ids, shorter than the client's retry interval. Then tasks read from the
brokers, which wait for outages."""
CHECK_PAUSE_S = 2.0
"""Pause after a check without a response, so that not every task waits for one."""
UNUSED_S_MAX = 60.0
"""How long the client of the checks stays open without a check. Opening it takes some milliseconds of the next one."""
WRITE_BYTES = 64 << 10
"""Larger columns are written from their own memory; a larger buffer would hold a copy of each."""


class PrefetchServer:
    """Serves the buffers of one agent.

    Args:
        open_client: opens the client that checks topic ids.
        columns: the columns of the rows.
    """

    def __init__(
        self,
        folder: AgentFolder,
        buffers: SharedBuffers,
        open_client: Callable[[], NativeClient],
        columns: Sequence[str],
    ) -> None:
        self._buffers, self._checker = buffers, TopicIdChecker(buffers, open_client)
        self._schema = arrow_schema(columns)
        self._slots = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._stopping = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with folder.socket_path("socket.new") as path:
            self._listener.bind(path)
        self._listener.listen(CONNECTIONS_MAX)
        (folder.path / "socket.new").rename(folder.path / "socket")  # a task that finds it can connect
        self._thread = threading.Thread(target=self._accept, name="server", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Accept no more connections. Responses that are being sent are not interrupted."""
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()

    def close_unused_client(self) -> None:
        """As :meth:`TopicIdChecker.close_unused`."""
        self._checker.close_unused()

    def _accept(self) -> None:
        """Accept connections until :meth:`stop`. Any other error is raised: the agent ends with this thread."""
        while not self._stopping.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as exc:
                if self._stopping.is_set():
                    return
                if exc.errno not in ACCEPT_RETRIED:
                    raise
                log.warning("cannot accept a task's connection: %s; trying again in %.0f s", exc, ACCEPT_PAUSE_S)
                self._stopping.wait(ACCEPT_PAUSE_S)
                continue
            if not self._slots.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), name=TASK_THREAD, daemon=True).start()
            except RuntimeError as exc:  # a pids limit
                log.warning("cannot serve a task: %s; it reads from the brokers", exc)
                connection.close()
                self._slots.release()

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
        taken, is_cut = self._take(request)
        unsent = [each for one in taken for each in one.ranges]
        try:
            rows = sum(each.last - each.first for each in unsent)
            served = ServedRanges(ranges=tuple(map(_served, taken)), rows=rows, is_cut=is_cut)
            client.send(connection, served, until_s)
            if not rows:
                return
            set_deadline(connection, until_s)
            with (
                connection.makefile("wb", buffering=WRITE_BYTES) as file,
                pa.ipc.new_stream(file, self._schema) as stream,
            ):
                for ranges in joined(unsent):
                    set_deadline(connection, until_s)
                    stream.write_batch(_one_batch(ranges, self._schema.names))
                    self._buffers.free(ranges)
                    del unsent[: len(ranges)]
        finally:
            self._buffers.free(unsent)

    def _take(self, request: ClaimGranted) -> tuple[list[TakenRanges], bool]:
        with self._buffers.locked() as buffers:
            needed = buffers.last_arrivals(request.piece.ranges)
        checked = self._checker.checked(needed, request.piece.topic_ids) if needed else {}
        with self._buffers.locked() as buffers:
            return buffers.take(*request.piece, checked, RESPONSE_BYTES_MAX)


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
    batches = [batch for each in taken.ranges if (batch := each.rows()) is not None]
    return ServedRange(
        index=taken.request_index,
        until=taken.until,
        rows=sum(batch.num_rows for batch in batches),
        bytes=sum(map(payload_bytes, batches)),
    )


def _one_batch(ranges: Sequence[BufferedRange], columns: Sequence[str]) -> pa.RecordBatch:
    batches = [batch.select(columns) for each in ranges if (batch := each.rows()) is not None]
    if len(batches) == 1:
        return batches[0]
    (whole,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return whole


class TopicIdChecker:
    """Checks that buffered records belong to the planned topics: one request at a time, whose response all tasks use.

    A request that is sent after records arrived, and returns the planned id, proves it: see ``reader.broker_checks``.

    The checks use a client of their own: a request of the prefetching client would wait behind a fetch at the end of a
    log.
    """

    def __init__(self, buffers: SharedBuffers, open_client: Callable[[], NativeClient]) -> None:
        self._buffers, self._open_client = buffers, open_client
        self._requesting = threading.Lock()
        self._client: NativeClient | None = None
        self._checked: dict[tuple[str, str], int] = {}
        """By topic name and id, the last arrival (:attr:`PrefetchBuffers.last_arrival`) that is known to belong to that
        topic."""
        self._requested_s = 0.0
        """When the last request was sent, on the clock of ``time.monotonic``."""
        self._not_before_s = 0.0
        """When the next request may be sent, on the clock of ``time.monotonic``."""

    def checked(self, needed: Mapping[str, int], ids: Mapping[str, str]) -> dict[str, int]:
        """Return, by topic, the last arrival that is known to belong to the planned topic.

        Args:
            needed: by topic, the last arrival to serve.
            ids: topic ids when the batch was planned. A topic without an id is not checked, as in tasks.
        """
        if not self._requesting.acquire(timeout=CHECK_S):
            return {}
        try:
            without_id = {name: arrival for name, arrival in needed.items() if not ids.get(name)}
            with_id = {(name, ids[name]): arrival for name, arrival in needed.items() if ids.get(name)}
            unchecked = sorted(name for (name, id_), arrival in with_id.items() if self._last(name, id_) < arrival)
            if unchecked and time.monotonic() >= self._not_before_s:
                self._request(unchecked, ids)
            return without_id | {name: self._last(name, id_) for name, id_ in with_id if self._last(name, id_) >= 0}
        finally:
            self._requesting.release()

    def close_unused(self) -> None:
        """Close the client if it was not used for :data:`UNUSED_S_MAX`: during an outage the library reports lost
        connections again and again, and keeps each report until the client is used."""
        if self._requesting.acquire(blocking=False):
            try:
                if time.monotonic() >= self._requested_s + UNUSED_S_MAX:
                    self._close()
            finally:
                self._requesting.release()

    def _last(self, name: str, id_: str) -> int:
        return self._checked.get((name, id_), -1)

    def _request(self, names: list[str], ids: Mapping[str, str]) -> None:
        with self._buffers.locked() as buffers:
            arrival = buffers.last_arrival
        self._requested_s = time.monotonic()
        try:
            self._client = self._client or self._open_client()
            request = self._client.describe_topics(names)
            response = request.receive(CHECK_S)
            request.cancel()
        except (SourceError, RuntimeError) as exc:
            log.warning("topic ids cannot be requested: %s; tasks read from the brokers", exc)
            response = None
        topics = response[0] if response else None
        if not isinstance(topics, dict):
            self._not_before_s = time.monotonic() + CHECK_PAUSE_S
            self._close()
            return
        for name, topic in topics.items():
            if topic.code == 0 and topic.id == ids[name]:
                self._checked[name, topic.id] = arrival
            elif topic.code == 0:
                with self._buffers.changing() as buffers:
                    buffers.drop_topic(name)

    def _close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()
