"""Read a task's piece of a batch, through the executor's agent if there is one.

Runs in: executor workers. Deliberately absent: reading (``reader.range_reader``, ``agents.prefetch.client``), and the
binding of pieces to tasks (``protocol.claims``).

Where members may be placed on agents, a task claims its piece from the stream reader, finds or starts its executor's
agent, and reads what the agent has buffered of the piece from there. Under a *fixed* binding the piece is known without
a claim: the claim only shows that this executor and the stream reader can reach each other. If it fails, the task reads
its piece all the same, and starts no agent, which could not reach the stream reader either. Under a *late* binding the
response to the claim names the piece.

Where members stay in the stream reader, a task reads its planned piece, and connects to the stream reader only to
report skipped records, or what it read if a limit of the batch needs sizes (``Options.tasks_report_sizes``). That is so
in local mode, too, where the driver's JVM is the only executor; there a worker's first task reports as well, since a
stream reader that no task reaches logs a warning.
"""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spark_group_source.agents.agent_folder import (
    AgentSettings,
    Attempts,
    ProcessId,
    find_executor,
    open_folder,
    pid_namespace,
    start_agent,
    warn_once,
)
from spark_group_source.agents.channel.client import Address, ChannelClient
from spark_group_source.agents.channel.handshake import Secret
from spark_group_source.agents.channel.wire import WireError
from spark_group_source.agents.messages import CODEC, Claim, ClaimGranted, ClaimRefused, TaskEnded
from spark_group_source.agents.prefetch.client import read_with_agent
from spark_group_source.errors import ChannelBroken
from spark_group_source.model import Piece, TaskCounts
from spark_group_source.options.table import Options
from spark_group_source.reader.range_reader import ReadCounts, ReadOptions, read_ranges

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_group_source.agents.agent_folder import AgentFolder

log = logging.getLogger(__name__)

CONNECT_S = 2.0
"""Limit for reaching the stream reader when the task's piece is known. After that failed, the executor's tasks do not
try again for a while."""
CLAIM_S = 60.0
"""Limit for claiming a piece under a late binding."""
ATTEMPT_S = 5.0
"""Limit of one attempt of that."""
PAUSE_S = 0.5
"""The pause before the next attempt, on a new connection."""
IDLE_S = 30.0
"""A connection on which nothing was sent for so long is not used again: the stream reader closes it after 60 s."""


@dataclass(frozen=True, slots=True, repr=False)
class PlannedTask:
    """A task of a plan, and where it reaches the stream reader. Contains the run's secret and therefore has no repr."""

    addresses: tuple[Address, ...]
    """Addresses of the stream reader, in the order in which they are tried."""
    secret: Secret
    run: str
    plan: str
    number: int
    """The task's index in the plan, from 0."""
    late: bool
    """Whether the binding is late: the task has to claim its piece."""
    uses_agents: bool = True
    """Whether members may be placed on agents."""
    driver: str = ""
    """The executor that gets no agent, because its JVM is the driver's: it is beside the stream reader already. Empty
    with ``memberHost=executor``."""


def read_piece(options: Options, piece: Piece, task: PlannedTask, read: ReadOptions) -> "Iterator[pa.RecordBatch]":
    """Yield the records of a task's piece.

    Args:
        options: the query's, as this executor has them.
        piece: the planned piece; ignored under a late binding.
        read: how to read.

    Raises:
        ChannelBroken: the binding is late, and the stream reader cannot be reached.
        GroupError: see :func:`~spark_group_source.reader.range_reader.read_ranges`.
    """
    counts = ReadCounts()
    executor = find_executor()
    name = executor_name(executor)
    if not task.uses_agents or name == task.driver:
        yield from read_ranges(piece, read, counts)
        connection = _connection_of(task, None)
        reported = counts.reported
        if reported.skipped or options.tasks_report_sizes:
            connection.report(_ended(task, name, reported), connect=True)
        elif task.uses_agents and not connection.is_open:  # without counts, which later tasks do not report
            connection.report(_ended(task, name, TaskCounts()), connect=True)
        return
    folder = open_folder(task.run, executor)
    connection = _connection_of(task, folder)
    with _claimed(connection, task, piece, name, counts) as claimed:
        if folder is not None and connection.is_open:
            settings = _agent_settings(options, task, executor)
            folder = folder if start_agent(settings, executor, folder) else None
        if folder is None:
            yield from read_ranges(claimed, read, counts)
        else:
            yield from read_with_agent(folder, claimed, read, counts)


def executor_name(executor: ProcessId | None) -> str:
    """The executor's name in claims, unique among the running executors of a cluster. Containers may share the name of
    their host."""
    process = f"worker-{os.getpid()}" if executor is None else f"{executor.pid}-{executor.started}"
    return f"{socket.gethostname()}-{pid_namespace()}-{process}"


def _agent_settings(options: Options, task: PlannedTask, executor: ProcessId | None) -> AgentSettings:
    return AgentSettings(
        run=task.run,
        reader_settings=options.consumer_settings(),
        columns=options.row_columns,
        buffer_bytes=options.agent_memory_bytes,
        connection={
            "addresses": task.addresses,
            "secret": task.secret.to_hex(),
            "executor": executor_name(executor),
            "name": f"{socket.gethostname()}-{executor.pid if executor else os.getpid()}",
            "settings": options.member_settings(),
        },
    )


# --- claims ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _claimed(
    connection: "_StreamReaderConnection", task: PlannedTask, piece: Piece, executor: str, counts: ReadCounts
) -> "Iterator[Piece]":
    """Claim the task's piece, and report what was read when the task ends."""
    claim = Claim(plan=task.plan, task=task.number, executor=executor)
    if task.late:
        piece = connection.claim(claim)
    else:
        connection.claim_known_piece(claim)
    try:
        yield piece
    finally:
        connection.report(_ended(task, executor, counts.reported))


def _ended(task: PlannedTask, executor: str, counts: TaskCounts) -> TaskEnded:
    return TaskEnded(plan=task.plan, task=task.number, executor=executor, counts=counts)


class _StreamReaderConnection:
    """This worker's connection to the stream reader of one run, kept from task to task.

    Args:
        folder: where the executor's workers count failed attempts to connect; None: each counts its own.
    """

    def __init__(self, task: PlannedTask, folder: "AgentFolder | None" = None) -> None:
        self._task, self._folder = task, folder
        self._client: ChannelClient | None = None
        self._unreached = Attempts(None if folder is None else folder.unreached)

    @property
    def is_open(self) -> bool:
        return self._client is not None and self._client.end_reason is None

    def claim_known_piece(self, claim: Claim) -> None:
        """Claim the piece of a fixed binding. A failure is logged, and has no effect on this task."""
        began_s = time.time()
        if not self.is_open and not self._unreached.is_due:
            return
        try:
            self._request(claim, CONNECT_S)
        except ChannelBroken as exc:
            self._failed(exc, began_s)
        else:
            self._unreached.clear()

    def _failed(self, exc: ChannelBroken, began_s: float) -> None:
        self._unreached.add(began_s)
        text = (
            f"this executor does not reach the stream reader: {exc}; tasks read from the brokers, and records that "
            "they skip are not counted. Let executors reach the driver's host (options coordinatorHost and "
            "coordinatorPort), or set memberHost to driver"
        )
        warn_once(self._folder, "reader", text)

    def claim(self, claim: Claim) -> Piece:
        """Claim the piece of a late binding.

        Raises:
            ChannelBroken: no piece was granted in time.
        """
        until_s = time.monotonic() + CLAIM_S
        while True:
            try:
                response = self._request(claim, ATTEMPT_S)
                break
            except ChannelBroken as exc:
                threading.Event().wait(PAUSE_S)
                if time.monotonic() >= until_s:
                    raise ChannelBroken(
                        f"this task could not claim its piece within {CLAIM_S:.0f} s: {exc}. Let executors reach the "
                        "driver's host (options coordinatorHost and coordinatorPort), or set memberHost to driver",
                        waited_ms=int(CLAIM_S * 1000),
                    ) from None
        if isinstance(response, ClaimGranted):
            return response.piece
        reason = response.reason if isinstance(response, ClaimRefused) else f"it sent {type(response).__name__}"
        raise ChannelBroken(f"the stream reader refused this task's claim: {reason}")

    def report(self, message: TaskEnded, *, connect: bool = False) -> None:
        """Report what a task read, if the stream reader can be reached. A report that is too long is sent without
        counts.

        Args:
            connect: also if no task of this worker has connected before.
        """
        began_s = time.time()
        if not (connect or self._client) or not (self.is_open or self._unreached.is_due):
            return
        try:
            client = self._connected(CONNECT_S)
        except ChannelBroken as exc:
            self._failed(exc, began_s)
            return
        try:
            client.send(message)
        except WireError as exc:
            log.warning("the task's report cannot be sent: %s; records of this task are not counted", exc)
            client.send(TaskEnded(plan=message.plan, task=message.task, executor=message.executor))

    def _request(self, claim: Claim, within_s: float) -> object:
        """Try once. A connection without a response may be dead, and is not used again."""
        until_s = time.monotonic() + within_s
        client = self._connected(within_s)
        try:
            return client.request(claim, max(until_s - time.monotonic(), 0.1))
        except ChannelBroken:
            client.close()
            raise

    def _connected(self, within_s: float) -> ChannelClient:
        if self._client is not None and time.monotonic() - self._client.sent_s > IDLE_S:
            self._client.close()
        if self._client is None or self._client.end_reason is not None:
            self._client = ChannelClient(self._task.addresses, CODEC, self._task.secret, within_s)
        return self._client

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


_connections: dict[str, _StreamReaderConnection] = {}
"""By run. A worker reads for one run at a time, so there is at most one."""
os.register_at_fork(after_in_child=_connections.clear)


def _connection_of(task: PlannedTask, folder: "AgentFolder | None") -> _StreamReaderConnection:
    if task.run not in _connections:
        while _connections:
            _connections.popitem()[1].close()
        _connections[task.run] = _StreamReaderConnection(task, folder)
    return _connections[task.run]
