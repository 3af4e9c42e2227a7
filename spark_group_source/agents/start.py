"""Find the agent of this executor, or start it.

Runs in: executor workers. Deliberately absent: waiting. A task finds a running agent, or starts one that later tasks
find; it never waits until an agent is ready. If an agent ends soon after its start, the next attempt is delayed, each
time by twice the pause, and the reason is logged once.
"""

import contextlib
import functools
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spark_group_source.agents.agent_folder import AgentFolder, ProcessId, find_executor, remove_stale_folders

log = logging.getLogger(__name__)

RETRY_S_MAX = 60.0
"""The longest pause before an agent that ended is started again; the first is 2 s."""
BUFFER_BYTES = 64 << 20
"""Default size of an agent's prefetch buffer."""
_MAIN = (
    "import json, sys; given = json.load(sys.stdin); sys.path[:] = given['path']; "
    "from spark_group_source.agents.main import main; main(given)"
)
_ENVIRONMENT = {"MALLOC_ARENA_MAX": "2"}
"""Bounds glibc's heaps, one for each thread otherwise, which return little memory to the system."""

_started: list[subprocess.Popen[bytes]] = []
"""Agents that this process started."""


@dataclass(frozen=True, repr=False)
class AgentSettings:
    """What an agent is started with; the same for all tasks of a run. Contains secrets and therefore has no repr."""

    run: str
    """The run's id; each run has agents of its own."""
    reader_settings: Mapping[str, str]
    """librdkafka settings that tasks read with."""
    include_headers: bool = False
    buffer_bytes: int = BUFFER_BYTES
    connection: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``ControlConnection`` as JSON, the run's secret included: they travel through a pipe."""


def start_agent(settings: AgentSettings, executor: ProcessId | None = None) -> AgentFolder | None:
    """Start this executor's agent for a run, unless it runs already.

    Returns at once, whether the agent is ready or not.

    Args:
        executor: the executor, if it is not the one of this task.

    Returns:
        The agent's folder; None if no agent can be started here.
    """
    _reap()
    try:
        executor = executor or find_executor()
        if executor is None:
            raise OSError("this task's executor cannot be determined (no /proc?)")
        folder = AgentFolder.of(settings.run, executor)
        folder.create()
        lock = folder.try_lock()
        if lock is not None:
            try:
                if _is_due(folder):
                    remove_stale_folders()
                    _spawn(settings, folder, executor, lock)
            finally:
                os.close(lock)
    except (OSError, AttributeError, subprocess.SubprocessError) as exc:  # a Python without memfd_create
        _warn_once(f"no agent can be started on this executor: {exc}; tasks read from the brokers")
        return None
    return folder


def _is_due(folder: AgentFolder) -> bool:
    """Whether the agent may be started now. Counts the attempt."""
    attempts, attempted_s, now_s = 0, 0.0, time.time()
    with contextlib.suppress(OSError, ValueError):
        attempts, attempted_s = json.loads(folder.attempts.read_text())
    if attempts:
        _warn_once(
            f"the agent in {folder.path} ended; tasks read from the brokers until one keeps running. The last line of "
            f"its log: {folder.last_log_line() or 'none'}"
        )
        if 0 <= now_s - attempted_s < min(2**attempts, RETRY_S_MAX):
            return False
    folder.attempts.write_text(json.dumps([attempts + 1, now_s]))
    return True


def _spawn(settings: AgentSettings, folder: AgentFolder, executor: ProcessId, lock: int) -> None:
    given = {
        "path": [os.path.abspath(place) for place in sys.path],
        "folder": str(folder.path),
        "lock": lock,
        "executor": [executor.pid, executor.started],
        "reader_settings": dict(settings.reader_settings),
        "include_headers": settings.include_headers,
        "buffer_bytes": settings.buffer_bytes,
        "connection": dict(settings.connection),
    }
    for leftover in (folder.path / "socket", folder.log):
        leftover.unlink(missing_ok=True)
    with (
        os.fdopen(os.memfd_create("agent", os.MFD_CLOEXEC), "wb+") as stdin,  # a pipe may be too small for all of it
        folder.log.open("ab") as log_file,
    ):
        stdin.write(json.dumps(given).encode())
        stdin.flush()
        stdin.seek(0)
        agent = subprocess.Popen(
            [sys.executable, "-c", _MAIN, "spark-group-agent", folder.path.name],
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=log_file,
            env={**os.environ, **_ENVIRONMENT},
            pass_fds=(lock,),
            start_new_session=True,
        )
    _started.append(agent)


def _reap() -> None:
    """Wait for agents that this process started and that have ended, so that no zombies remain."""
    _started[:] = [agent for agent in _started if agent.poll() is None]


@functools.cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)
