"""What a task does to read its piece of a batch.

Runs in: executor workers. Deliberately absent: reading (``fetch``, ``agent.near``) and which piece it is (the stream
reader says).

Where members live beside executors a task finds or starts its executor's agent, asks the stream reader which piece it
is to read, and takes from the agent what that has in memory. Under a *fixed* binding its piece is known beforehand: it
asks only so that the stream reader knows that it could, and not reaching it costs nothing but the agent. Under a *late*
binding it must be told.

Where they may not, a task reads what was planned, and speaks to the stream reader only if records were lost.
"""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spark_group_source.agents import start
from spark_group_source.agents.channel.client import Address, Client
from spark_group_source.agents.channel.codec import WireError
from spark_group_source.agents.channel.handshake import Secret
from spark_group_source.agents.member_messages import CODEC
from spark_group_source.agents.prefetch import near
from spark_group_source.agents.processes import Process, executor
from spark_group_source.agents.task_messages import Claim, ClaimGranted, ClaimRefused, TaskEnded
from spark_group_source.errors import ChannelBroken
from spark_group_source.model import Piece
from spark_group_source.options.table import Options
from spark_group_source.reader.fetch import read_ranges
from spark_group_source.reader.range_reader import ReadOptions
from spark_group_source.reader.read_counts import ReadCounts

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_group_source.agents.agent_folder import Home

log = logging.getLogger(__name__)

REACH_S = 2.0
"""How long a task whose piece is known tries to reach the stream reader."""
AGAIN_S = 60.0
"""After that did not work, this worker does not try again for so long."""
CLAIM_S = 60.0
"""How long a task that has to be told its piece waits for it."""
IDLE_S = 30.0
"""A connection on which nothing was sent for so long is not used again: the stream reader closes it after 60 s."""
TRY_S, PAUSE_S = 5.0, 0.5
"""Of that, for one try, and before the next one on a new connection."""


@dataclass(frozen=True, slots=True, repr=False)
class Call:
    """Where the stream reader is reached, and what the task is to it. Holds the run's secret, so it has no repr."""

    addresses: tuple[Address, ...]
    secret: Secret
    run: str
    plan: str
    task: int
    late: bool
    agents: bool = True
    """Whether members may live beside executors."""


def read_piece(options: Options, piece: Piece, call: Call, read: ReadOptions) -> "Iterator[pa.RecordBatch]":
    """The records of a task's piece.

    Args:
        options: the query's, as this executor has them.
        piece: what it reads, unless the stream reader assigns another one.
        read: how it reads.

    Raises:
        ChannelBroken: the stream reader assigns the piece, and cannot be reached.
        GroupError: see :func:`fetch.read_ranges`.
    """
    counts = ReadCounts()
    if not call.agents:
        yield from read_ranges(piece, read, counts)
        if counts.lost:
            ended = TaskEnded(plan=call.plan, task=call.task, executor=name_of(executor()), lost=counts.lost)
            _line(call).report(ended, connect=True)
        return
    at = executor()
    home = _agent(options, call, at) if at is not None else None
    with _claimed(call, piece, name_of(at), counts) as given:
        if home is None:
            yield from read_ranges(given, read, counts)
        else:
            yield from near.read_near(home, given, read, counts)


def name_of(at: Process | None) -> str:
    """An executor as this module names it: no two living ones of a cluster have one name."""
    host = socket.gethostname()
    return f"{host}-{at.pid}-{at.started}" if at is not None else f"{host}-worker-{os.getpid()}"


def _agent(options: Options, call: Call, at: Process) -> "Home | None":
    return start.start(
        start.Order(
            run=call.run,
            settings=options.consumer_settings(),
            include_headers=options.include_headers,
            memory_bytes=options.agent_memory_bytes,
            given={
                "addresses": call.addresses,
                "secret": call.secret.reveal(),
                "executor": name_of(at),
                "name": f"{socket.gethostname()}-{at.pid}",
                "settings": options.member_settings(),
            },
        ),
        at,
    )


# --- claims ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _claimed(call: Call, piece: Piece, executor_name: str, counts: ReadCounts) -> "Iterator[Piece]":
    """The task's piece, as long as it reads; then the stream reader gets a report of what it read."""
    claim = Claim(plan=call.plan, task=call.task, executor=executor_name)
    line = _line(call)
    if call.late:
        piece = line.await_piece(claim)
    else:
        line.confirm(claim)
    try:
        yield piece
    finally:
        ended = TaskEnded(plan=call.plan, task=call.task, executor=executor_name)
        line.report(replace(ended, memory=counts.rows_from_agent, brokers=counts.rows_from_brokers, lost=counts.lost))


class _Line:
    """This worker's connection to one stream reader, kept from task to task."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._client: Client | None = None
        self._again_s = 0.0

    def confirm(self, claim: Claim) -> None:
        """Claim the piece that is known, so that the stream reader knows where it is read. Nothing depends on it."""
        if time.monotonic() < self._again_s:
            return
        try:
            self._ask(claim, REACH_S)
        except ChannelBroken as exc:
            self._again_s = time.monotonic() + AGAIN_S
            log.warning("this task reads what was planned for it, and the stream reader does not know: %s", exc)

    def await_piece(self, claim: Claim) -> Piece:
        """Claim a piece, and wait for it.

        Raises:
            ChannelBroken: none was assigned, in time.
        """
        until_s = time.monotonic() + CLAIM_S
        while True:
            try:
                answer = self._ask(claim, TRY_S)
                break
            except ChannelBroken as exc:
                threading.Event().wait(PAUSE_S)
                if time.monotonic() >= until_s:
                    raise ChannelBroken(
                        f"this task was not told what to read within {CLAIM_S:.0f} s: {exc}. See that executors reach "
                        "the driver's host (options coordinatorHost and coordinatorPort), or set memberHost to driver",
                        waited_ms=int(CLAIM_S * 1000),
                    ) from None
        if isinstance(answer, ClaimGranted):
            return Piece(tuple(answer.ranges), answer.topic_ids, answer.leader_epochs)
        reason = answer.reason if isinstance(answer, ClaimRefused) else f"it answered {type(answer).__name__}"
        raise ChannelBroken(f"this task was not told what to read: {reason}")

    def report(self, message: TaskEnded, *, connect: bool = False) -> None:
        """Report what a task read, if the stream reader can be reached. A report that is too long goes without counts.

        Args:
            connect: also where no task of this worker had a connection.
        """
        if not (connect or self._client) or time.monotonic() < self._again_s:
            return
        try:
            client = self._open(REACH_S)
        except ChannelBroken as exc:
            self._again_s = time.monotonic() + AGAIN_S
            log.warning("what this task read and skipped is not counted: %s", exc)
            return
        try:
            client.send(message)
        except WireError as exc:
            log.warning("the stream reader gets no counts of what this task read: %s", exc)
            client.send(TaskEnded(plan=message.plan, task=message.task, executor=message.executor))

    def _ask(self, claim: Claim, within_s: float) -> object:
        """One try. A connection on which no answer came may be cut without a word, and is not used again."""
        until_s = time.monotonic() + within_s
        client = self._open(within_s)
        try:
            return client.request(claim, max(until_s - time.monotonic(), 0.1))
        except ChannelBroken:
            client.close()
            raise

    def _open(self, within_s: float) -> Client:
        if self._client is not None and time.monotonic() - self._client.used_s > IDLE_S:
            self._client.close()
        if self._client is None or self._client.ended is not None:
            self._client = Client(self._call.addresses, CODEC, self._call.secret, within_s)
        return self._client

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


_lines: dict[str, _Line] = {}
"""By run; a worker reads for one run at a time."""
os.register_at_fork(after_in_child=_lines.clear)


def _line(call: Call) -> _Line:
    if call.run not in _lines:
        while _lines:
            _lines.popitem()[1].close()
        _lines[call.run] = _Line(call)
    return _lines[call.run]
