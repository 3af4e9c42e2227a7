"""How an agent is found on its host: its executor's process, and the folder that is named after it.

Runs in: executor workers and agents, on Linux. Deliberately absent: starting agents (``start``), listening
(``prefetch.server``), and what an agent does when its executor ends (``main``).

The folder contains the agent's lock, its socket, its log, and the count of attempts to start it. The folders of all
agents of a user on a host are in one directory (``host.run_files``). A folder is named after the run and the executor.
An agent holds the lock as long as it lives: it inherits the locked file from the task that starts it, so there is no
moment without the lock.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spark_group_source.host.run_files import directory, unusable_reason

LOG_BYTES_MAX = 1 << 20
"""Size limit of an agent's log."""
LAST_LINE_CHARS_MAX = 300
STALE_FOLDERS_MAX = 100
"""Folders that one search for leftovers checks."""
ENDED_STATES = ("Z", "X")
"""States in proc(5) of a process that has ended and that its parent has not waited for yet."""


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
        stat = _stat(pid)
        return None if stat is None or stat[0] in ENDED_STATES else cls(pid, int(stat[19]))

    def is_alive(self) -> bool:
        return ProcessId.of(self.pid) == self


def find_executor() -> ProcessId | None:
    """The executor of the task that runs in this process; None if it cannot be determined.

    A worker's parent is Spark's worker daemon, whose parent is the executor's JVM. Without the daemon
    (``spark.python.use.daemon=false``) the parent is the JVM itself. A forked worker has its daemon's command line.
    """
    parent = os.getppid()
    command = _command_line(parent)
    # Whole arguments: a JVM may have the text in a --conf.
    if command == _command_line(os.getpid()) or b"pyspark.daemon" in command.split(b"\0"):
        stat = _stat(parent)
        parent = int(stat[1]) if stat else 0
    return ProcessId.of(parent)


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat from the third on (proc(5)); None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


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
        """JSON: how often it was tried to start the agent, and when last, in seconds since the epoch."""

    @classmethod
    def of(cls, run: str, executor: ProcessId) -> "AgentFolder":
        # The pids of containers that share a temporary directory are not unique.
        namespace = os.readlink("/proc/self/ns/pid")
        digest = hashlib.sha256(f"{run}\0{namespace}".encode()).hexdigest()[:16]
        return cls(agents_directory() / f"{executor.pid}-{executor.started}-{digest}")

    def create(self) -> None:
        """Create the folder, for this user only.

        Raises:
            OSError: it cannot be created, or the path belongs to another user.
        """
        for folder in (directory(), agents_directory(), self.path):
            folder.mkdir(mode=0o700, exist_ok=True)
            if why := unusable_reason(folder):
                raise OSError(why)

    def try_lock(self) -> int | None:
        """The lock, as a file descriptor to close; None while an agent holds it."""
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(self.path / "lock").st_ino == os.fstat(fd).st_ino:
                return fd
        except BlockingIOError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    @property
    def pid(self) -> int:
        """Of the agent that holds the lock; 0 if it has not written it yet, or there is none."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.path / "lock").read_text())
        return 0

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
        shutil.rmtree(self.path, ignore_errors=True)


def agents_directory() -> Path:
    return directory() / "agents"


def remove_stale_folders() -> None:
    """Remove the folders of agents that were killed together with their executors."""
    with contextlib.suppress(OSError):
        for path in sorted(agents_directory().iterdir())[:STALE_FOLDERS_MAX]:
            with contextlib.suppress(OSError, ValueError):
                pid, started, _ = path.name.split("-")
                folder = AgentFolder(path)
                executor = ProcessId(int(pid), int(started))
                if not executor.is_alive() and (fd := folder.try_lock()) is not None:
                    folder.remove()
                    os.close(fd)


def is_same_user(connection: socket.socket) -> bool:
    """Whether the peer of a Unix socket is a process of this user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.getuid())
