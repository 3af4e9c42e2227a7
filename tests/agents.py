"""Agents of executors as tests see them: started, asked, looked at, ended.

Runs in: tests, and in the agents that they start: the shipped one, with a server that also takes the next plan's start
and tells how the agent is, and members that a test chooses. Deliberately absent: fixtures
(``executor/agent/conftest.py``).
"""

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kafka_words import await_until

from spark_group_source.channel.messages import Ahead
from spark_group_source.executor.agent import main as agent_main
from spark_group_source.executor.agent import near, server, start, wire
from spark_group_source.executor.agent.home import LOG_BYTES_MAX, Home
from spark_group_source.executor.agent.membership import Membership
from spark_group_source.executor.agent.processes import Process
from spark_group_source.members.hosted import Buffered
from spark_group_source.model import TopicPartition

READY_S = 20.0
END_S = 10.0
"""An agent is gone so long after its reason to live."""
BEGIN = start._BEGIN.replace("spark_group_source.executor.agent.main", "agents")
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


def exchange(home: Home, request: wire.Frame) -> wire.Frame:
    """One request and its answer. Raises OSError or WireError where there was none."""
    until_s = near.time.monotonic() + near.ASK_S
    with near.connected(home, until_s) as connection:
        wire.send(connection, request, until_s)
        return wire.receive(connection, until_s)


def tell(home: Home, ahead: Ahead) -> None:
    """Let the agent read on from there."""
    told = {
        "positions": wire.numbers_out(ahead.positions),
        "keep": wire.numbers_out(ahead.keep),
        "topic_ids": dict(ahead.topic_ids),
        "leader_epochs": wire.numbers_out(ahead.leader_epochs),
    }
    exchange(home, {"ahead": told})


def state(home: Home) -> dict[str, Any]:
    """What the agent says of itself; empty while it does not answer."""
    try:
        return exchange(home, {"ask": "state"})
    except OSError:
        return {}


def bye(home: Home) -> None:
    """Let the agent end."""
    exchange(home, {"ask": "bye"})


def await_ready(home: Home) -> None:
    await_until(lambda: state(home), READY_S, what=f"an answer of the agent in {home.path}")


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


def await_read(home: Home, positions: Mapping[Any, int]) -> dict[str, Any]:
    """Until the agent has read up to these positions; its state then."""

    def read() -> dict[str, Any]:
        told = state(home)
        at = {(topic, partition): position for topic, partition, _, position in told.get("partitions", ())}
        return told if all(at.get(tuple(tp), -1) >= position for tp, position in positions.items()) else {}

    return await_until(read, READY_S, what=f"an agent that has read up to {dict(positions)}; it is at {state(home)}")


# --- in the agents that tests start ---------------------------------------------------------------------------------


def main(given: Mapping[str, Any]) -> None:
    members: Mapping[str, type[Nobody]] = {each.__name__: each for each in (Nobody, Noted, Hanging, Talkative)}
    chosen = members[given["given"].get("members", "Nobody")]
    agent_main.main(given, partial(agent_main.Agent, members=chosen, server=Server))


class Server(server.Server):
    """The shipped one, which answers tests besides."""

    rows = 0

    def _answer(self, connection: socket.socket, request: wire.Frame) -> None:
        until_s = near.time.monotonic() + server.ANSWER_S
        if "ahead" in request:
            told = request["ahead"]
            self._stock.follow(
                Ahead(
                    positions=wire.numbers_in(told["positions"]),
                    keep=wire.numbers_in(told["keep"]),
                    topic_ids=wire.texts_in(told["topic_ids"]),
                    leader_epochs=wire.numbers_in(told["leader_epochs"]),
                )
            )
            wire.send(connection, {}, until_s)
        elif request.get("ask") == "state":
            wire.send(connection, self._state(), until_s)
        elif request.get("ask") == "bye":
            wire.send(connection, {}, until_s)
            os.kill(os.getpid(), 15)
        else:
            super()._answer(connection, request)

    def _take(self, request: wire.Frame) -> list[server.Taken]:
        taken = super()._take(request)
        self.rows += sum(piece.last - piece.first for one in taken for piece in one.pieces)
        return taken

    def _state(self) -> wire.Frame:
        with self._stock.locked() as buffers:
            return {
                "used": buffers.used,
                "partitions": [
                    [tp.topic, tp.partition, held.pieces[0].start if held.pieces else held.position, held.position]
                    for tp, held in buffers.partitions.items()
                ],
                "rows": self.rows,
            }


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
