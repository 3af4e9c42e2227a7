"""The folder of one agent: its lock, its socket, its log, and the count of attempts to start it.

Runs in: executor workers and agents. Deliberately absent: starting agents (``start``), listening (``prefetch.server``).

The folders of all agents of a user on a host are in one directory (``host.run_files``). A folder is named after the run
and the executor. An agent holds the lock as long as it lives: it inherits the locked file from the task that starts it,
so there is no moment without the lock.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from spark_group_source.agents.processes import ProcessId
from spark_group_source.host.run_files import directory, unusable_reason

LOG_BYTES_MAX = 1 << 20
"""Size limit of an agent's log."""
LAST_LINE_CHARS_MAX = 300
STALE_FOLDERS_MAX = 100
"""Folders that one search for leftovers checks."""


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
