"""Agents of executors as tests see them: started, asked, looked at, ended.

Runs in: tests, and in the agents that they start: the shipped one, with a server that also takes the next plan's start
and tells how the agent is, and members that a test chooses. Deliberately absent: fixtures
(``executor/agent/conftest.py``).
"""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kafka_words import STALLED_S, await_progress, await_until, size_of

from spark_group_source.agents import main as agent_main
from spark_group_source.agents import start
from spark_group_source.agents.agent_folder import LOG_BYTES_MAX, Home
from spark_group_source.agents.channel.codec import Codec, WireError
from spark_group_source.agents.channel.frames import framed, receive
from spark_group_source.agents.hosted_member import Buffered
from spark_group_source.agents.membership import Membership
from spark_group_source.agents.prefetch import near, server
from spark_group_source.agents.prefetch.buffers import Taken
from spark_group_source.agents.processes import Process
from spark_group_source.agents.task_messages import Ahead, ClaimGranted, Served
from spark_group_source.model import TopicPartition

READY_S = END_S = STALLED_S
"""Bounds of a hang, in an agent that starts or reads, and in one that ends."""
BEGIN = start._BEGIN.replace("spark_group_source.agents.main", "agent_words")
"""What a process runs that is to be such an agent, in place of ``start._BEGIN``."""


def living() -> list[int]:
    """The agents that have this process's temporary folder, however far they got."""
    place = f"TMPDIR={os.environ['TMPDIR']}".encode()
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if is_agent(pid) and place in _read(pid, "environ").split(b"\0")]


def is_agent(pid: int) -> bool:
    return b"spark-group-agent" in _read(pid, "cmdline") and Process.of(pid) is not None


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


@dataclass(frozen=True, slots=True)
class Look:
    """A question to an agent: how it is."""


@dataclass(frozen=True, slots=True)
class Looked:
    """The answer. ``first``, ``next``: of each partition the first offset in memory, and the next one to be read."""

    used: int
    rows: int
    first: Mapping[TopicPartition, int]
    next: Mapping[TopicPartition, int]


@dataclass(frozen=True, slots=True)
class Bye:
    """The agent is to end."""


CODEC = Codec((ClaimGranted, Served, Ahead, Look, Looked, Bye), bytes_max=near.CODEC.bytes_max)
"""What agents of tests understand."""


def exchange(home: Home, message: object) -> object:
    """One request and its answer. Raises OSError or WireError where there was none."""
    until_s = time.monotonic() + near.ASK_S
    with near.connected(home, until_s) as connection:
        connection.sendall(framed(CODEC.encode(message)))
        return CODEC.decode(receive(connection, CODEC.bytes_max, until_s)).message


def tell(home: Home, ahead: Ahead) -> None:
    """Let the agent read on from there."""
    assert exchange(home, ahead) == Bye()


def state(home: Home) -> Looked | None:
    """How the agent is; None while it does not answer."""
    try:
        found = exchange(home, Look())
    except OSError:
        return None
    assert isinstance(found, Looked)
    return found


def looked(home: Home) -> Looked:
    """How an agent is that answers."""
    found = state(home)
    assert found is not None
    return found


def bye(home: Home) -> None:
    """Let the agent end."""
    exchange(home, Bye())


def await_ready(home: Home) -> None:
    await_progress(lambda: state(home), lambda: size_of(home.log), what=f"an answer of the agent in {home.path}")


def await_ended(pid: int) -> None:
    def ended() -> bool:
        start._reap()
        return Process.of(pid) is None  # its command line is gone sooner than its lock

    await_until(ended, END_S, what="the end of the agent")


def has_let_go(home: Home) -> bool:
    """Whether nobody has the lock. A killed process lets go of it when the last of its threads is gone."""
    lock = home.try_lock()
    if lock is not None:
        os.close(lock)
    return lock is not None


def await_read(home: Home, positions: Mapping[TopicPartition, int]) -> Looked:
    """Until the agent has read up to these positions; its state then."""

    def read() -> Looked | None:
        found = state(home)
        there = found is not None and all(found.next.get(tp, -1) >= position for tp, position in positions.items())
        return found if there else None

    found = await_progress(read, lambda: state(home), what=f"an agent that has read up to {dict(positions)}")
    assert found is not None
    return found


# --- in the agents that tests start ---------------------------------------------------------------------------------


def main(given: Mapping[str, Any]) -> None:
    members: Mapping[str, type[Nobody]] = {each.__name__: each for each in (Nobody, Noted, Hanging, Talkative)}
    chosen = members[given["given"].get("members", "Nobody")]
    agent_main.main(given, partial(agent_main.Agent, members=chosen, server=Server))


class Server(server.Server):
    """The shipped one, which answers tests besides."""

    rows = 0

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                until_s = time.monotonic() + server.REQUEST_S
                message = CODEC.decode(receive(connection, CODEC.bytes_max, until_s)).message
                match message:
                    case ClaimGranted():
                        self._answer(connection, message)
                    case Ahead():
                        self._stock.follow(message)
                        connection.sendall(framed(CODEC.encode(Bye())))
                    case Look():
                        connection.sendall(framed(CODEC.encode(self._state())))
                    case Bye():
                        connection.sendall(framed(CODEC.encode(message)))
                        os.kill(os.getpid(), signal.SIGTERM)
        except (OSError, WireError) as exc:
            logging.getLogger(__name__).info("a connection ended: %s", exc)
        finally:
            self._places.release()

    def _take(self, wanted: ClaimGranted) -> list[Taken]:
        taken = super()._take(wanted)
        self.rows += sum(piece.last - piece.first for one in taken for piece in one.pieces)
        return taken

    def _state(self) -> Looked:
        with self._stock.locked() as buffers:
            held = buffers.partitions
            first = {tp: one.pieces[0].start if one.pieces else one.position for tp, one in held.items()}
            at = {tp: one.position for tp, one in held.items()}
            return Looked(buffers.used, self.rows, first, at)


class Nobody(Membership):
    """No members, and no coordinator."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        """``given``: what the test wants of it."""

    def start(self, read_ahead: Callable[[Ahead], None], buffered: Buffered) -> None:
        """Nothing to begin."""

    def ended(self) -> str:
        return ""

    def stop(self, timeout_s: float) -> None:
        """Nothing to end."""


class Noted(Nobody):
    """Leaves files where it is told, and ends when it finds one."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.folder = Path(given["folder"])
        (self.folder / "package").write_text(str(near.__file__))

    def start(self, read_ahead: Callable[[Ahead], None], buffered: Buffered) -> None:
        (self.folder / "started").touch()
        held = buffered([TopicPartition("nothing", 0)])
        assert held == (0, 0)

    def ended(self) -> str:
        return "the run is over" if (self.folder / "over").exists() else ""

    def stop(self, timeout_s: float) -> None:
        (self.folder / "stopped").touch()


class Hanging(Nobody):
    """One that never ends by itself."""

    def stop(self, timeout_s: float) -> None:
        threading.Event().wait()


class Talkative(Nobody):
    """One that says more than there is room for, also past the log."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        for _ in range(3 * LOG_BYTES_MAX // 1000):
            logging.getLogger(__name__).warning("%s", "x" * 1000)
        for _ in range(3 * LOG_BYTES_MAX // 1000):
            try:
                os.write(2, b"x" * 1000)
            except OSError:
                break
