"""Agents as real processes; none outlives its test."""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import agent_helpers
import pytest
from kafka_helpers import STALLED_S

from spark_group_source.agents import agent_folder
from spark_group_source.agents.agent_folder import AgentFolder, ProcessId
from spark_group_source.agents.prefetch import client
from spark_group_source.local.broker import Broker

StartAgent = Callable[..., AgentFolder]


@pytest.fixture(autouse=True)
def no_agent_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A temporary directory for the test and its processes; agents that still run at its end are killed."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tests = Path(agent_helpers.__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{tests.parent}:{tests}")  # for processes in place of executors
    monkeypatch.setattr(agent_folder, "_MAIN", agent_helpers.MAIN)
    monkeypatch.setattr(agent_folder, "_warned", set())
    for name in ("RESPONSE_S", "TRANSFER_S"):  # a task that was too slow would read from the brokers
        monkeypatch.setattr(client, name, STALLED_S)
    yield
    for pid in agent_helpers.living():
        os.kill(pid, signal.SIGKILL)
        agent_helpers.await_ended(pid)


@pytest.fixture
def agent() -> StartAgent:
    """``agent(**settings)`` starts an agent whose executor is this process, and waits until it answers."""

    def started(**settings: Any) -> AgentFolder:
        folder = agent_helpers.start_agent(ProcessId.of(os.getpid()), **settings)
        assert folder is not None
        agent_helpers.await_ready(folder)
        return folder

    return started


@pytest.fixture
def reader(broker: Broker, agent: StartAgent) -> StartAgent:
    """The same, of this run's broker."""
    reader_settings = {"bootstrap.servers": broker.bootstrap_servers, "isolation.level": "read_committed"}
    return lambda **settings: agent(**({"reader_settings": reader_settings} | settings))
