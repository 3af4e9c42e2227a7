"""Agents of executors as tests see them: started, asked, looked at, ended.

Runs in: tests, and the last classes in agents that tests start. Deliberately absent: fixtures
(``executor/agent/conftest.py``).
"""

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kafka_words import await_until

from spark_group_source.executor.agent import near, start
from spark_group_source.executor.agent.home import Home
from spark_group_source.executor.agent.messages import Ahead, Buffered, Nobody
from spark_group_source.executor.agent.processes import Process

READY_S = 20.0
END_S = 10.0
"""An agent is gone so long after its reason to live."""


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


def state(home: Home) -> dict[str, Any]:
    """What the agent says of itself; empty while it does not answer."""
    try:
        return near.exchange(home, {"ask": "state"})
    except OSError:
        return {}


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


class Noted(Nobody):
    """A hosted object that leaves files where it is told, and ends when it finds one."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.folder = Path(given["folder"])
        (self.folder / "package").write_text(str(near.__file__))

    def start(self, read_ahead: Callable[[Ahead], None], buffered: Buffered) -> None:
        (self.folder / "started").touch()

    def ended(self) -> str:
        return "the run is over" if (self.folder / "over").exists() else ""

    def stop(self, timeout_s: float) -> None:
        (self.folder / "stopped").touch()


class Hanging(Nobody):
    """One that never ends by itself."""

    def stop(self, timeout_s: float) -> None:
        threading.Event().wait()


class Impatient(Nobody):
    """In an agent that waits for nobody."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        from spark_group_source.executor.agent import main

        main.IDLE_S = 0.5


class Talkative(Nobody):
    """One that says more than there is room for, also past the log."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        import logging

        from spark_group_source.executor.agent.home import LOG_BYTES_MAX

        for _ in range(3 * LOG_BYTES_MAX // 1000):
            logging.getLogger(__name__).warning("%s", "x" * 1000)
        for _ in range(3 * LOG_BYTES_MAX // 1000):
            try:
                os.write(2, b"x" * 1000)
            except OSError:
                break
