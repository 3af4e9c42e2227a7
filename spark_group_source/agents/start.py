"""Find the agent of this executor, or start it.

Runs in: executor workers. Deliberately absent: waiting. A task finds a running agent, or starts one that later tasks
find; it never waits until an agent is ready. If an agent cannot be started, or ends soon after its start, the next
attempt is delayed, each time for longer. The reason is logged once for each executor.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spark_group_source.agents.agent_folder import AgentFolder, Attempts, ProcessId, remove_stale_folders, warn_once
from spark_group_source.options.table import COLUMNS

BUFFER_BYTES = 64 << 20
"""Default size of an agent's prefetch buffer."""
_MAIN = (
    "import json, sys; given = json.load(sys.stdin); sys.path[:] = given['path']; "
    "from spark_group_source.agents.main import main; main(given)"
)
_ENVIRONMENT = {"MALLOC_ARENA_MAX": "2", "OPENBLAS_NUM_THREADS": "1"}
"""Bounds glibc's heaps, one for each thread otherwise, which return little memory to the system; and the threads of
numpy, one for each core otherwise, which an agent never uses."""

_started: list[subprocess.Popen[bytes]] = []
"""Agents that this process started."""


@dataclass(frozen=True, repr=False)
class AgentSettings:
    """What an agent is started with; the same for all tasks of a run. Contains secrets and therefore has no repr."""

    run: str
    """The run's id; each run has agents of its own."""
    reader_settings: Mapping[str, str]
    """librdkafka settings that tasks read with."""
    columns: Sequence[str] = COLUMNS[:-1]
    """The columns of the rows that tasks read."""
    buffer_bytes: int = BUFFER_BYTES
    connection: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``ControlConnection`` as JSON, the run's secret included: they travel through a pipe."""


def open_folder(run: str, executor: ProcessId | None) -> AgentFolder | None:
    """The folder of this executor's agent, whether it runs or not; None if there can be none.

    Args:
        executor: None if it cannot be determined.
    """
    try:
        folder = AgentFolder.of(run, executor)
        folder.create()
    except OSError as exc:
        _warn(None, exc)
        return None
    return folder


def start_agent(settings: AgentSettings, executor: ProcessId | None, folder: AgentFolder) -> bool:
    """Start this executor's agent for a run, unless it runs already, or an attempt has failed just now.

    Returns at once, whether the agent is ready or not.

    Args:
        executor, folder: as in :func:`open_folder`.

    Returns:
        Whether tasks may find an agent.
    """
    _reap()
    try:
        if executor is None:
            raise OSError("this task's executor cannot be determined (no /proc?)")
        if executor.user != os.geteuid():  # each user would start an agent, and each agent would replace the others
            raise PermissionError(f"the executor runs as user {executor.user}, and this task as user {os.geteuid()}")
        lock = folder.try_lock()
        if lock is not None:
            try:
                if not _is_due(folder):
                    return False
                remove_stale_folders()
                _spawn(settings, folder, executor, lock)
            finally:
                os.close(lock)
    except (OSError, AttributeError, subprocess.SubprocessError) as exc:  # a Python without memfd_create
        _warn(folder, exc)
        return False
    return True


def _is_due(folder: AgentFolder) -> bool:
    """Whether the agent may be started now. Counts the attempt."""
    attempts = Attempts(folder.attempts)
    if attempts.last[0]:
        _warn(folder, f"the agent in {folder.path} ended. The last line of its log: {folder.last_log_line() or 'none'}")
    if not attempts.is_due:
        return False
    attempts.add(time.time())
    return True


def _warn(folder: AgentFolder | None, reason: object) -> None:
    warn_once(folder, "agent", f"no agent runs on this executor: {reason}; tasks read from the brokers")


def _spawn(settings: AgentSettings, folder: AgentFolder, executor: ProcessId, lock: int) -> None:
    given = {
        "path": [os.path.abspath(place) for place in sys.path],
        "folder": str(folder.path),
        "lock": lock,
        "executor": [executor.pid, executor.started],
        "reader_settings": dict(settings.reader_settings),
        "columns": list(settings.columns),
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
