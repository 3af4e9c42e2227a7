"""Finds the agent of this executor, or starts it.

Runs in: executor workers. Deliberately absent: waiting. A task finds an agent that lives, or starts one that later
tasks will find; it never waits for one to be ready. One that ended soon after its start is tried again later, each time
after twice the pause, and the log says why once.
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

from spark_group_source.agents.agent_folder import Home, sweep
from spark_group_source.agents.processes import Process, executor

log = logging.getLogger(__name__)

AGAIN_S_MAX = 60.0
"""The longest pause before an agent that does not stay is tried again; the first is 2 s."""
MEMORY_BYTES = 64 << 20
"""What an agent holds, unless told otherwise."""
_BEGIN = (
    "import json, sys; given = json.load(sys.stdin); sys.path[:] = given['path']; "
    "from spark_group_source.agents.main import main; main(given)"
)
_ARENAS = {"MALLOC_ARENA_MAX": "2"}
"""glibc keeps a heap for each thread, and gives little of them back."""

_started: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True, repr=False)
class Order:
    """What an agent is to be: the same for all tasks of a run. Holds secrets, so it has no repr."""

    run: str
    """The run's id; tasks of another run have an agent of their own."""
    settings: Mapping[str, str]
    """librdkafka's, as tasks read with."""
    include_headers: bool = False
    memory_bytes: int = MEMORY_BYTES
    given: Mapping[str, Any] = field(default_factory=dict)
    """What ``Membership`` is made with. JSON, secrets included: it travels through a pipe."""


def start(order: Order, at: Process | None = None) -> Home | None:
    """The place of this executor's agent for a run; None where none can be.

    Returns at once: whether it answers yet, who asks will see.

    Args:
        at: the executor, if it is not the one of this task.
    """
    _reap()
    try:
        at = at or executor()
        if at is None:
            raise OSError("this task's executor cannot be seen (no /proc?)")
        home = Home.of(order.run, at)
        home.make()
        lock = home.try_lock()
        if lock is not None:
            try:
                if _is_due(home):
                    sweep()
                    _spawn(order, home, at, lock)
            finally:
                os.close(lock)
    except (OSError, AttributeError, subprocess.SubprocessError) as exc:  # a Python without memfd_create
        _say_once(f"no agent can be started here, tasks read directly: {exc}")
        return None
    return home


def _is_due(home: Home) -> bool:
    """Whether nothing speaks against another try, which is then counted."""
    tries, at_s, now_s = 0, 0.0, time.time()
    with contextlib.suppress(OSError, ValueError):
        tries, at_s = json.loads(home.tries.read_text())
    if tries:
        _say_once(
            f"the agent in {home.path} ended; tasks read directly until one stays. Its last words: "
            f"{home.last_words() or 'none'}"
        )
        if 0 <= now_s - at_s < min(2**tries, AGAIN_S_MAX):
            return False
    home.tries.write_text(json.dumps([tries + 1, now_s]))
    return True


def _spawn(order: Order, home: Home, at: Process, lock: int) -> None:
    given = {
        "path": [os.path.abspath(place) for place in sys.path],
        "home": str(home.path),
        "lock": lock,
        "executor": [at.pid, at.started],
        "settings": dict(order.settings),
        "include_headers": order.include_headers,
        "memory_bytes": order.memory_bytes,
        "given": dict(order.given),
    }
    for left in (home.path / "socket", home.log):
        left.unlink(missing_ok=True)
    with (
        os.fdopen(os.memfd_create("agent", os.MFD_CLOEXEC), "wb+") as stdin,  # a pipe may be too small for all of it
        home.log.open("ab") as log_file,
    ):
        stdin.write(json.dumps(given).encode())
        stdin.flush()
        stdin.seek(0)
        agent = subprocess.Popen(
            [sys.executable, "-c", _BEGIN, "spark-group-agent", home.path.name],
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=log_file,
            env={**os.environ, **_ARENAS},
            pass_fds=(lock,),
            start_new_session=True,
        )
    _started.append(agent)


def _reap() -> None:
    """Let go of agents that this process started and that have ended."""
    _started[:] = [agent for agent in _started if agent.poll() is None]


@functools.cache
def _say_once(text: str) -> None:
    log.warning("%s", text)
