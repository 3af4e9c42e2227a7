"""How an agent is found on its host, or started: its executor's process, and the folder that is named after it.

Runs in: executor workers and agents, on Linux. Deliberately absent: listening (``prefetch.server``), and what an agent
does when its executor ends (``main``).

The folder contains the agent's lock, its socket, its log, and what the executor's workers share: the failed attempts,
and which warnings are logged. An agent holds the lock as long as it lives: it inherits the locked file from the task
that starts it, so there is no moment without the lock.

A task finds a running agent, or starts one that later tasks find; it never waits until an agent is ready. If an agent
cannot be started, or ends soon after its start, the next attempt is delayed, each time for longer. The reason is logged
once for each executor.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_group_source.host.run_files import ENDED_STATES, directory, here, process_stat, unusable_reason

log = logging.getLogger(__name__)

LOG_BYTES_MAX = 1 << 20
"""Size limit of an agent's log."""
LAST_LINE_CHARS_MAX = 300
STALE_FOLDERS_MAX = 100
"""Folders that one search for leftovers removes."""
UNUSED_S = 86_400
"""A folder of another container or host, whose processes are not visible here, is left over if nothing in it changed
for so long."""
PAUSE_S, PAUSE_FACTOR, PAUSE_S_MAX = 8.0, 8, 3_600.0
"""Pause after the first failed attempt, the factor of each further pause, and the longest one. What fails twice is
probably forbidden, and an agent that ends in its start costs a second of CPU time."""
PAUSES_MAX = 10
"""After so many the pause is the longest one. In weeks the power of a count that grows is too large for a float."""
_MAIN = (
    "import json, sys; given = json.load(sys.stdin); sys.path[:] = given['path']; "
    "from spark_group_source.agents.main import main; main(given)"
)
_ENVIRONMENT = {"MALLOC_ARENA_MAX": "2", "OPENBLAS_NUM_THREADS": "1"}
"""Bounds glibc's heaps, one for each thread otherwise, which return little memory to the system; and the threads of
numpy, one for each core otherwise, which an agent never uses."""
_UNKNOWN_START = 0
"""In the name of a folder: the start time of a process that cannot be determined."""
_EXECUTOR_THREAD = b"executor-heartb"
"""The first 15 characters of the name of a thread that each executor has until it ends; Linux keeps no more."""


# --- the executor ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProcessId:
    """Identifies a process; a pid alone may be reused by another process."""

    pid: int
    started: int
    """Start time, in the kernel's clock ticks since boot."""

    @classmethod
    def of(cls, pid: int) -> "ProcessId | None":
        """The living process with this pid, or None."""
        stat = process_stat(pid)
        return None if stat is None or stat[0] in ENDED_STATES else cls(pid, int(stat[19]))

    def is_alive(self) -> bool:
        """Whether the process still runs; False also if another process has its pid now."""
        return ProcessId.of(self.pid) == self

    @property
    def user(self) -> int:
        """The id of the user as whom the process runs. Raises OSError if it has ended."""
        # Not the owner of /proc/<pid>, which is root for a program with capabilities.
        lines = Path(f"/proc/{self.pid}/status").read_text(errors="replace").splitlines()
        return int(next(line for line in lines if line.startswith("Uid:")).split()[2])

    @property
    def runs_tasks(self) -> bool:
        """Whether this JVM has an executor."""
        for name in Path(f"/proc/{self.pid}/task").glob("*/comm"):
            with contextlib.suppress(OSError):  # a thread that has just ended
                if name.read_bytes().strip() == _EXECUTOR_THREAD:  # Linux may cut a name in mid-character
                    return True
        return False


def find_executor() -> ProcessId | None:
    """The executor of the task that runs in this process; None if it cannot be determined.

    A worker's parent is Spark's worker daemon, whose parent is the executor's JVM. Without the daemon
    (``spark.python.use.daemon=false``) the parent is the JVM itself. A forked worker has its daemon's command line.
    """
    parent = os.getppid()
    command = _command_line(parent)
    # Whole arguments: a JVM may have the text in a --conf.
    if command == _command_line(os.getpid()) or b"pyspark.daemon" in command.split(b"\0"):
        stat = process_stat(parent)
        parent = int(stat[1]) if stat else 0
    return ProcessId.of(parent)


def is_local_mode() -> bool:
    """Whether the query of this stream reader runs in local mode. Without /proc it is not detected.

    The parent of a stream reader is the driver's JVM, which has an executor in local mode only. It is the only one.
    """
    driver = find_executor()
    return driver is not None and driver.runs_tasks


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


# --- the folder -----------------------------------------------------------------------------------------------------


class AgentFolder:
    """The folder of the agent of one run on one executor. It may not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "log"
        self.attempts = path / "attempts"
        """Of starting the agent, until one keeps running: :class:`Attempts`."""
        self.unreached = path / "unreached"
        """Attempts to reach the stream reader since it was reached last: :class:`Attempts`."""
        self.unanswered = path / "unanswered"
        """Requests to the agent that timed out since its last response: :class:`Attempts`."""

    @classmethod
    def of(cls, run: str, executor: ProcessId | None) -> "AgentFolder":
        """The folder of a run's agent on an executor. Where the executor cannot be determined no agent can run, and the
        folder of the worker's parent has the other files."""
        executor = executor or ProcessId(os.getppid(), _UNKNOWN_START)
        # Hosts and containers may share a temporary directory.
        digest = hashlib.sha256(run.encode()).hexdigest()[:16]
        return cls(agents_directory() / f"{executor.pid}-{executor.started}-{here()}-{digest}")

    def create(self) -> bool:
        """Create the folder, for this user only. Returns whether it did not exist.

        Raises:
            OSError: it cannot be created, or the path belongs to another user.
        """
        is_new = not self.path.exists()
        for folder in (directory(), agents_directory(), self.path):
            folder.mkdir(mode=0o700, exist_ok=True)
            if why := unusable_reason(folder):
                raise OSError(why)
        return is_new

    @property
    def is_stale(self) -> bool:
        """Whether its executor has ended, or nothing changed in it for a day: unless it is locked, no agent needs it.
        Raises OSError, and ValueError for another folder."""
        pid, started, rest = self.path.name.split("-", 2)
        executor = ProcessId(int(pid), int(started))
        changed_s = max(path.lstat().st_mtime for path in (self.path, *self.path.iterdir()))
        if time.time() - changed_s > UNUSED_S:
            return True
        if rest.rpartition("-")[0] != here():
            return False
        process = ProcessId.of(executor.pid)
        return process is None or executor.started not in (process.started, _UNKNOWN_START)

    def try_lock(self) -> int | None:
        """The lock, as a file descriptor to close; None while an agent holds it."""
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self.has_lock(fd):
                return fd
        except BlockingIOError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def has_lock(self, fd: int) -> bool:
        """Whether this descriptor is of the lock in the folder: another process may have removed and created both."""
        try:
            return os.path.samestat(os.stat(self.path / "lock"), os.fstat(fd))
        except OSError:
            return False

    def touch(self) -> None:
        """Make the files new for programs that remove old ones from temporary folders."""
        with contextlib.suppress(OSError):
            for name in ("lock", "socket"):
                os.utime(self.path / name)

    @contextlib.contextmanager
    def socket_path(self, name: str = "socket") -> Iterator[str]:
        """A path of the agent's socket that fits the limit of 107 characters, however long the folder's path is."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield f"/proc/self/fd/{fd}/{name}"
        finally:
            os.close(fd)

    def last_log_line(self) -> str:
        """The last line of the agent's log, which names the reason if the agent ended; empty if there is none."""
        with contextlib.suppress(OSError):
            lines = self.log.read_text(errors="replace").strip().splitlines()
            return lines[-1][:LAST_LINE_CHARS_MAX] if lines else ""
        return ""

    def remove(self) -> None:
        """Remove the folder as far as possible. Only for the holder of the lock, which is a file in it."""
        shutil.rmtree(self.path, ignore_errors=True)


class Attempts:
    """Failed attempts, and the pause after them.

    Args:
        path: the file in which all workers of an executor count them, as JSON: how many, and when the last one was, in
            seconds since the epoch. None: this object counts its own.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._own = 0, 0.0

    @property
    def last(self) -> tuple[int, float]:
        """How many attempts failed in succession, and the time of the last one."""
        if self._path is None:
            return self._own
        with contextlib.suppress(OSError, ValueError):
            count, at_s = json.loads(self._path.read_text())
            return int(count), float(at_s)
        return 0, 0.0

    @property
    def is_due(self) -> bool:
        """Whether the pause after the last one is over."""
        count, at_s = self.last
        if count == 0:
            return True
        factor = PAUSE_FACTOR ** min(count - 1, PAUSES_MAX)
        return not 0 <= time.time() - at_s < min(PAUSE_S * factor, PAUSE_S_MAX)

    def add(self, began_s: float) -> None:
        """Count an attempt that began at this time, unless another one was counted since: simultaneous ones are one."""
        count, at_s = self.last
        if began_s < at_s <= time.time():
            return
        self._own = count + 1, time.time()
        if self._path is not None:
            try:
                self._path.write_text(json.dumps(self._own))
            except OSError:
                self._path = None

    def clear(self) -> None:
        """Count from 0 again."""
        self._own = 0, 0.0
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)


_warned: set[str] = set()
"""The subjects of warnings that this process logged without a folder."""


def warn_once(folder: AgentFolder | None, subject: str, text: str) -> None:
    """Log the first warning about a subject: one for each executor and run.

    Args:
        folder: where the executor's workers note that one of them logged it; None: one for each worker.
        subject: part of a file's name.
    """
    if subject in _warned:
        return
    if folder is not None:
        try:
            os.close(os.open(folder.path / f"warned-{subject}", os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
        except FileExistsError:
            return
        except OSError:
            folder = None
    if folder is None:
        _warned.add(subject)
    log.warning("%s", text)


def agents_directory() -> Path:
    """The directory of all agents of this user on this host; it may not exist."""
    return directory() / "agents"


def remove_stale_folders(but: AgentFolder) -> None:
    """Remove the folders of executors that have ended: no agent ran in them, or it was killed together with its
    executor.

    Args:
        but: a folder in use, whose executor may have ended just now.
    """
    if ProcessId.of(os.getpid()) is None:  # without /proc, every executor seems to have ended
        return
    removed = 0
    with contextlib.suppress(OSError):
        for path in agents_directory().iterdir():
            with contextlib.suppress(OSError, ValueError):
                folder = AgentFolder(path)
                if path != but.path and folder.is_stale and (fd := folder.try_lock()) is not None:
                    folder.remove()
                    os.close(fd)
                    removed += 1
            if removed == STALE_FOLDERS_MAX:
                return


def is_same_user(connection: socket.socket) -> bool:
    """Whether the peer of a Unix socket is a process of this user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.getuid())


# --- starting agents ------------------------------------------------------------------------------------------------

_started: list[subprocess.Popen[bytes]] = []
"""Agents that this process started."""


def open_folder(run: str, executor: ProcessId | None) -> AgentFolder | None:
    """The folder of this executor's agent, whether it runs or not; None if there can be none. The first task of an
    executor creates it, and removes those of executors that have ended.

    Args:
        run: the run's id; each run has agents of its own.
        executor: None if it cannot be determined.
    """
    try:
        folder = AgentFolder.of(run, executor)
        if folder.create():
            remove_stale_folders(but=folder)
    except OSError as exc:
        _warn(None, exc)
        return None
    return folder


def start_agent(settings: Mapping[str, Any], executor: ProcessId | None, folder: AgentFolder) -> bool:
    """Start this executor's agent for a run, unless it runs already, or an attempt has failed just now.

    Returns at once, whether the agent is ready or not.

    Args:
        settings: what ``main`` receives beside the folder and the executor, as JSON; the same for all tasks of a run.
            They contain secrets, and are not kept or logged.
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


def _spawn(settings: Mapping[str, Any], folder: AgentFolder, executor: ProcessId, lock: int) -> None:
    given = {
        **settings,
        "path": [os.path.abspath(place) for place in sys.path],
        "folder": str(folder.path),
        "lock": lock,
        "executor": [executor.pid, executor.started],
    }
    for leftover in (folder.path / "socket", folder.path / "socket.new", folder.log, folder.unanswered):
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
