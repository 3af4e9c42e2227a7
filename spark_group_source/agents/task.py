"""Read a task's piece of a batch, through the executor's agent if there is one.

Runs in: executor workers. Deliberately absent: reading (``reader.range_reader``, ``agents.prefetch.client``), and the
binding of pieces to tasks (``protocol.claims``).

Where members may be placed on agents, a task claims its piece from the stream reader, finds or starts its executor's
agent, and reads what the agent has buffered of the piece from there. Under a *fixed* binding the piece is known without
a claim: the claim only shows that this executor and the stream reader can reach each other. If it fails, the task reads
its piece all the same, and starts no agent, which could not reach the stream reader either. Under a *late* binding the
response to the claim names the piece.

Where members stay in the stream reader, a task reads its planned piece, and connects to the stream reader only to
report skipped records, or what it read if a limit of the batch needs sizes (``Options.tasks_report_sizes``).
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_group_source.agents.agent_folder import (
    Attempts,
    ProcessId,
    find_executor,
    open_folder,
    start_agent,
    warn_once,
)
from spark_group_source.agents.channel.client import Address, ChannelClient
from spark_group_source.agents.channel.wire import Secret, WireError
from spark_group_source.agents.messages import CODEC, Claim, ClaimGranted, ClaimRefused, TaskEnded
from spark_group_source.agents.prefetch.client import read_with_agent
from spark_group_source.errors import ChannelBroken
from spark_group_source.host.run_files import here
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
    """Whether members may be placed on agents. Without agents no task claims, so that no binding is late."""


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
    counts, worker = ReadCounts(), _worker_of(task)
    if not task.uses_agents:
        yield from read_ranges(piece, read, counts)
        reported = counts.reported
        if reported.skipped or options.tasks_report_sizes:
            worker.report(worker.ended(task, reported), connect=True)
        return
    folder = worker.agent_folder()
    claim = Claim(plan=task.plan, task=task.number, executor=worker.executor_name)
    if task.late:
        piece = worker.claim(claim)
    else:
        worker.claim_known_piece(claim)
    try:
        if folder is not None and worker.is_connected:
            is_started = start_agent(_agent_settings(options, task, worker), worker.executor, folder)
            folder = folder if is_started else None
        if folder is None:
            yield from read_ranges(piece, read, counts)
        else:
            yield from read_with_agent(folder, piece, read, counts)
    finally:
        worker.report(worker.ended(task, counts.reported))


def executor_name(executor: ProcessId | None) -> str:
    """The executor's name in claims, unique among the running executors of a cluster. Containers may share the name of
    their host."""
    process = f"worker-{os.getpid()}" if executor is None else f"{executor.pid}-{executor.started}"
    return f"{here()}-{process}"


def _agent_settings(options: Options, task: PlannedTask, worker: "_Worker") -> dict[str, Any]:
    pid = worker.executor.pid if worker.executor else os.getpid()
    return {
        "reader_settings": options.consumer_settings(),
        "columns": options.row_columns,
        "buffer_bytes": options.agent_memory_bytes,
        "connection": {
            "addresses": task.addresses,
            "secret": task.secret.to_hex(),
            "executor": worker.executor_name,
            "name": f"{socket.gethostname()}-{pid}",
            "settings": options.member_settings(),
        },
    }


# --- claims ---------------------------------------------------------------------------------------------------------


class _Worker:
    """This worker in one run, kept from task to task: its executor, and its connection to the stream reader."""

    def __init__(self, task: PlannedTask) -> None:
        self.executor: ProcessId | None = None
        self._task = task
        self._client: ChannelClient | None = None
        self._folder: AgentFolder | None = None
        self._unreached = Attempts(None)
        """The failed attempts to connect: of this worker, or with a folder of all workers of the executor."""
        self.find_executor()

    def find_executor(self) -> None:
        """Find this worker's executor, unless it is known. An attempt fails without /proc, and while the worker has no
        free file descriptors."""
        if self.executor is None:
            self.executor = find_executor()
            self.executor_name = executor_name(self.executor)

    def agent_folder(self) -> "AgentFolder | None":
        """The folder of the executor's agent; None if there can be none now."""
        folder = open_folder(self._task.run, self.executor)
        if folder is not None and self._folder is None:
            self._unreached = Attempts(folder.unreached)
        self._folder = folder
        return folder

    def ended(self, task: PlannedTask, counts: TaskCounts) -> TaskEnded:
        """The report of one of its tasks."""
        return TaskEnded(plan=task.plan, task=task.number, executor=self.executor_name, counts=counts)

    @property
    def is_connected(self) -> bool:
        return self._client is not None and self._client.end_reason is None

    def claim_known_piece(self, claim: Claim) -> None:
        """Claim the piece of a fixed binding. A failure is logged, and has no effect on this task."""
        began_s = time.time()
        if not self.is_connected and not self._unreached.is_due:
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
        """Claim the piece of a late binding. Raises ChannelBroken if none is granted in time."""
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
        """Report what a task read, if the stream reader can be reached; ``connect``: also if no task of this worker has
        connected before. A report that is too long is sent without counts."""
        began_s = time.time()
        if not (connect or self._client) or not (self.is_connected or self._unreached.is_due):
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
        """Try once. A connection without a response is closed."""
        until_s = time.monotonic() + within_s
        return self._connected(within_s).request(claim, max(until_s - time.monotonic(), 0.1))

    def _connected(self, within_s: float) -> ChannelClient:
        if self._client is not None and time.monotonic() - self._client.sent_s > IDLE_S:
            self._client.close()
        if self._client is None or self._client.end_reason is not None:
            self._client = ChannelClient(self._task.addresses, CODEC, self._task.secret, within_s)
        return self._client

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


_workers: dict[str, _Worker] = {}
"""By run. A worker reads for one run at a time, so there is at most one."""
os.register_at_fork(after_in_child=_workers.clear)


def _worker_of(task: PlannedTask) -> _Worker:
    if task.run in _workers:
        _workers[task.run].find_executor()
    else:
        while _workers:
            _workers.popitem()[1].close()
        _workers[task.run] = _Worker(task)
    return _workers[task.run]
