"""The folder of one agent: its lock, its socket, what it says, and how often it was tried to start it.

Runs in: executor workers and agents. Deliberately absent: starting (``start``), listening (``server``).

All agents of a user on a host are below one directory of this user's (``host.runs``). An agent is named after its run
and its executor; it holds the lock as long as it lives, by a file that it inherits from the task that starts it, so
there is no moment without.
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

from spark_group_source.agents.processes import Process
from spark_group_source.host.run_files import directory, unusable_reason

LOG_BYTES_MAX = 1 << 20
"""What an agent keeps of what it said."""
LAST_WORDS_CHARS_MAX = 300
SWEPT_MAX = 100
"""Folders that one look for leftovers looks at."""


class Home:
    """The folder of the agent of one run at one executor; it may not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log, self.tries = path / "log", path / "tries"

    @classmethod
    def of(cls, run: str, executor: Process) -> "Home":
        # Containers that share a temporary folder count processes each from 1.
        space = os.readlink("/proc/self/ns/pid")
        digest = hashlib.sha256(f"{run}\0{space}".encode()).hexdigest()[:16]
        return cls(agents() / f"{executor.pid}-{executor.started}-{digest}")

    def make(self) -> None:
        """Make it, for this user alone.

        Raises:
            OSError: it cannot be made, or the place is somebody else's.
        """
        for folder in (directory(), agents(), self.path):
            folder.mkdir(mode=0o700, exist_ok=True)
            if why := unusable_reason(folder):
                raise OSError(why)

    def try_lock(self) -> int | None:
        """The lock, as a file to be closed; None while an agent has it."""
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
        """Of the agent that lives there; 0 if it has not said so yet, or there is none."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.path / "lock").read_text())
        return 0

    @contextlib.contextmanager
    def address(self, name: str = "socket") -> Iterator[str]:
        """Where the agent's socket is: a path to it may have 107 characters, and a folder's path more."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield f"/proc/self/fd/{fd}/{name}"
        finally:
            os.close(fd)

    def last_words(self) -> str:
        """The end of what an agent said; it was to be the reason why it ended."""
        with contextlib.suppress(OSError):
            lines = self.log.read_text(errors="replace").strip().splitlines()
            return lines[-1][:LAST_WORDS_CHARS_MAX] if lines else ""
        return ""

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def agents() -> Path:
    return directory() / "agents"


def sweep() -> None:
    """Remove what agents left that were killed, together with their executors."""
    with contextlib.suppress(OSError):
        for path in sorted(agents().iterdir())[:SWEPT_MAX]:
            with contextlib.suppress(OSError, ValueError):
                pid, started, _ = path.name.split("-")
                home = Home(path)
                if not Process(int(pid), int(started)).lives() and (fd := home.try_lock()) is not None:
                    home.remove()
                    os.close(fd)


def is_ours(connection: socket.socket) -> bool:
    """Whether the other end of a socket is a process of this user."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", told)
    return bool(uid == os.getuid())
