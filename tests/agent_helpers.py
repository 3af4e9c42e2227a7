"""Agents as tests use them: start them, request their state, end them.

Runs in: tests, and in the agents that they start. These are the shipped agent with a server that also takes positions
and returns the agent's state, and with a connection that the test chooses. Deliberately absent: fixtures
(``agents/conftest.py``).
"""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kafka_helpers import STALLED_S, await_progress, await_until, size_of

from spark_group_source.agents import agent_folder
from spark_group_source.agents import main as agent_main
from spark_group_source.agents.agent_folder import LOG_BYTES_MAX, AgentFolder, ProcessId, find_executor
from spark_group_source.agents.channel.wire import Codec, WireError, frame, receive_frame
from spark_group_source.agents.hosted_members import ControlConnection, PrefetchSize
from spark_group_source.agents.messages import ClaimGranted, PrefetchPositions, ServedRanges
from spark_group_source.agents.prefetch import client, server
from spark_group_source.agents.prefetch.buffers import TakenRanges
from spark_group_source.model import TopicPartition
from spark_group_source.options.table import COLUMNS

READY_S = END_S = STALLED_S
"""Bounds of a hang: of an agent that starts or prefetches, and of one that ends."""
MAIN = agent_folder._MAIN.replace("spark_group_source.agents.main", "agent_helpers")
"""The program of an agent of a test, in place of ``agent_folder._MAIN``."""


def living() -> list[int]:
    """The agents that use this process's temporary directory, in any stage of their start."""
    place = f"TMPDIR={os.environ['TMPDIR']}".encode()
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if is_agent(pid) and place in _read(pid, "environ").split(b"\0")]


def is_agent(pid: int) -> bool:
    return b"spark-group-agent" in _read(pid, "cmdline") and ProcessId.of(pid) is not None


def pid_of(folder: AgentFolder) -> int:
    """The agent of this folder, which must be the only one."""
    (pid,) = (pid for pid in living() if _read(pid, "cmdline").endswith(f"\0{folder.path.name}\0".encode()))
    return pid


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


@dataclass(frozen=True, slots=True)
class StateRequest:
    """Requests the state of an agent."""


@dataclass(frozen=True, slots=True)
class AgentState:
    """The response. ``first``, ``next``: by partition, the first buffered offset, and the next one to fetch."""

    used_bytes: int
    rows: int
    first: Mapping[TopicPartition, int]
    next: Mapping[TopicPartition, int]


@dataclass(frozen=True, slots=True)
class End:
    """Orders the agent to end; also the response to it, and to positions."""


CODEC = Codec((ClaimGranted, ServedRanges, PrefetchPositions, StateRequest, AgentState, End))
"""The messages of agents of tests."""


def start_agent(executor: ProcessId | None = None, *, run: str = "run", **given: Any) -> AgentFolder | None:
    """Start the agent as a task does that has reached the stream reader.

    Args:
        executor: if it is not the one of this process.
        given: the agent's settings that differ from those of most tests.
    """
    defaults = {"reader_settings": {}, "columns": COLUMNS[:-1], "buffer_bytes": 64 << 20, "connection": {}}
    executor = executor or find_executor()
    folder = agent_folder.open_folder(run, executor)
    return folder if folder is not None and agent_folder.start_agent(defaults | given, executor, folder) else None


def exchange(folder: AgentFolder, message: object) -> object:
    """Send a request and return its response. Raises OSError or WireError if there is none, which may be because this
    process was too slow: an agent waits for a request for seconds only."""
    until_s = time.monotonic() + STALLED_S
    with client.connect(folder, until_s) as connection:
        connection.sendall(frame(CODEC.encode(message)))
        return CODEC.decode(receive_frame(connection, CODEC.bytes_max, until_s))


def prefetch(folder: AgentFolder, positions: PrefetchPositions) -> None:
    """Let the agent prefetch from these positions."""

    def accepted() -> bool:
        try:
            return exchange(folder, positions) == End()
        except (OSError, WireError):
            return False

    await_until(accepted, what=f"positions at the agent in {folder.path}")


def state(folder: AgentFolder) -> AgentState | None:
    """The agent's state; None while it does not answer."""
    try:
        found = exchange(folder, StateRequest())
    except (OSError, WireError):
        return None
    assert isinstance(found, AgentState)
    return found


def state_of(folder: AgentFolder) -> AgentState:
    """The state of an agent that answers."""
    found = await_until(lambda: state(folder), what=f"the state of the agent in {folder.path}")
    assert found is not None
    return found


def end(folder: AgentFolder) -> None:
    """Let the agent end."""
    exchange(folder, End())


def await_ready(folder: AgentFolder) -> None:
    await_progress(lambda: state(folder), lambda: size_of(folder.log), what=f"an answer of the agent in {folder.path}")


def await_ended(pid: int) -> None:
    def ended() -> bool:
        agent_folder._reap()
        return ProcessId.of(pid) is None  # /proc may lose the command line before the lock is released

    await_until(ended, END_S, what="the end of the agent")


def is_unlocked(folder: AgentFolder) -> bool:
    """Whether no agent holds the lock. A killed process releases it when the last of its threads has ended."""
    lock = folder.try_lock()
    if lock is not None:
        os.close(lock)
    return lock is not None


def await_prefetched(folder: AgentFolder, positions: Mapping[TopicPartition, int]) -> AgentState:
    """Wait until the agent has prefetched up to these positions; returns its state."""

    def prefetched() -> AgentState | None:
        found = state(folder)
        there = found is not None and all(found.next.get(tp, -1) >= position for tp, position in positions.items())
        return found if there else None

    found = await_progress(
        prefetched, lambda: state(folder), what=f"an agent that has prefetched up to {dict(positions)}"
    )
    assert found is not None
    return found


# --- in the agents that tests start ---------------------------------------------------------------------------------


def main(given: Mapping[str, Any]) -> None:
    kinds: Mapping[str, type[NoConnection]] = {
        each.__name__: each
        for each in (NoConnection, FailingConnection, NotingConnection, HangingConnection, LoggingConnection)
    }
    chosen = kinds[given["connection"].get("kind", "NoConnection")]
    with patch.multiple(agent_main, ControlConnection=chosen, PrefetchServer=TestedServer):
        agent_main.main(given)


class TestedServer(server.PrefetchServer):
    """The shipped server, which also answers requests of tests."""

    rows = 0

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                until_s = time.monotonic() + server.REQUEST_S
                message = CODEC.decode(receive_frame(connection, CODEC.bytes_max, until_s))
                match message:
                    case ClaimGranted():
                        self._respond(connection, message)
                    case PrefetchPositions():
                        self._buffers.follow(message)
                        connection.sendall(frame(CODEC.encode(End())))
                    case StateRequest():
                        connection.sendall(frame(CODEC.encode(self._state())))
                    case End():
                        connection.sendall(frame(CODEC.encode(message)))
                        os.kill(os.getpid(), signal.SIGTERM)
        except (OSError, WireError) as exc:
            logging.getLogger(__name__).info("a connection ended: %s", exc)
        finally:
            self._slots.release()

    def _take(self, request: ClaimGranted) -> tuple[list[TakenRanges], bool]:
        taken, is_cut = super()._take(request)
        self.rows += sum(each.last - each.first for one in taken for each in one.ranges)
        return taken, is_cut

    def _state(self) -> AgentState:
        with self._buffers.locked() as buffers:
            partitions = buffers.partitions.items()
            first = {tp: one.ranges[0].start if one.ranges else one.position for tp, one in partitions}
            at = {tp: one.position for tp, one in partitions}
            return AgentState(buffers.used_bytes, self.rows, first, at)


class NoConnection(ControlConnection):
    """No members, and no stream reader."""

    def __init__(self, given: Mapping[str, Any], *_: object) -> None:
        """``given``: arguments of the test."""

    def start(self) -> None:
        """Nothing to start."""

    @property
    def end_reason(self) -> str:
        return ""

    def stop(self, timeout_s: float) -> None:
        """Nothing to end."""


class NotingConnection(NoConnection):
    """Writes files into a folder, and ends when it finds one there."""

    def __init__(self, given: Mapping[str, Any], _: object, prefetched: PrefetchSize) -> None:
        self.folder, self.prefetched = Path(given["folder"]), prefetched
        (self.folder / "package").write_text(str(client.__file__))

    def start(self) -> None:
        (self.folder / "started").touch()
        assert self.prefetched([TopicPartition("nothing", 0)]) == (0, 0)

    @property
    def end_reason(self) -> str:
        return "the run is over" if (self.folder / "over").exists() else ""

    def stop(self, timeout_s: float) -> None:
        (self.folder / "stopped").touch()


class FailingConnection(NoConnection):
    """Has a thread named ``thread`` that fails when it finds a file in ``folder``."""

    def __init__(self, given: Mapping[str, Any], *_: object) -> None:
        self.thread, self.fail = given["thread"], Path(given["folder"]) / "fail"

    def start(self) -> None:
        threading.Thread(target=self._run, name=self.thread).start()

    def _run(self) -> None:
        await_until(self.fail.exists, STALLED_S, what="the order to fail")
        raise ValueError("unexpected")


class HangingConnection(NoConnection):
    """Never ends."""

    def stop(self, timeout_s: float) -> None:
        threading.Event().wait()


class LoggingConnection(NoConnection):
    """Writes more than the log's limit, also directly to standard error."""

    def __init__(self, *_given: object) -> None:
        for _ in range(3 * LOG_BYTES_MAX // 1000):
            logging.getLogger(__name__).warning("%s", "x" * 1000)
        for _ in range(3 * LOG_BYTES_MAX // 1000):
            try:
                os.write(2, b"x" * 1000)
            except OSError:
                break
