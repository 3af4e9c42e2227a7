"""Agents as real processes; none outlives its test."""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import agent_words
import pytest

from spark_group_source.agents import start
from spark_group_source.agents.agent_folder import Home
from spark_group_source.agents.processes import Process
from spark_group_source.agents.start import Order
from spark_group_source.local.broker import Broker

StartAgent = Callable[..., Home]


@pytest.fixture(autouse=True)
def no_agent_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A temporary folder of the test's own, for its processes too; what lives there at its end is killed."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(agent_words.__file__).parent))  # for what stands in for executors
    monkeypatch.setattr(start, "_BEGIN", agent_words.BEGIN)
    start._say_once.cache_clear()
    yield
    for pid in agent_words.living():
        os.kill(pid, signal.SIGKILL)
        agent_words.await_ended(pid)


@pytest.fixture
def agent() -> StartAgent:
    """``agent(**order)`` starts one whose executor is this process, and waits until it answers."""

    def started(**order: Any) -> Home:
        home = start.start(Order(**({"run": "run", "settings": {}} | order)), Process.of(os.getpid()))
        assert home is not None
        agent_words.await_ready(home)
        return home

    return started


@pytest.fixture
def reader(broker: Broker, agent: StartAgent) -> StartAgent:
    """The same, of this run's broker."""
    settings = {"bootstrap.servers": broker.bootstrap_servers, "isolation.level": "read_committed"}
    return lambda **order: agent(**({"settings": settings} | order))
