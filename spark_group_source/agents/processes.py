"""Which process is this task's executor, and whether it still lives.

Runs in: executor workers and agents, on Linux. Deliberately absent: what follows from its end (``main``).
"""

import contextlib
import os
import select
from dataclasses import dataclass
from pathlib import Path

ENDED = ("Z", "X")
"""States of a process that has ended and that its parent did not look at yet."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process; its number alone may be another one's later."""

    pid: int
    started: int
    """When, in the kernel's ticks."""

    @classmethod
    def of(cls, pid: int) -> "Process | None":
        """The living process with this number."""
        found = _stat(pid)
        return None if found is None or found[0] in ENDED else cls(pid, int(found[19]))

    def lives(self) -> bool:
        return Process.of(self.pid) == self


class Watch:
    """Tells when a process ends: at once, where the kernel can (pidfd), else when it is asked."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._fd: int | None = None
        with contextlib.suppress(OSError, AttributeError):  # a kernel before 5.3, or a sandbox
            self._fd = os.pidfd_open(process.pid)

    def wait_ended(self, wait_s: float, *wakers: int) -> bool:
        """Whether it has ended. Waits so long for it, or until one of ``wakers`` can be read."""
        poll = select.poll()
        for fd in (*wakers, *(() if self._fd is None else (self._fd,))):
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(round(wait_s * 1000))}
        return self._fd in ready or not self._process.lives()


def executor() -> Process | None:
    """The executor of the task that runs in this process; None where that cannot be seen.

    A worker's parent is Spark's daemon for workers, whose parent is the executor's JVM. Without that daemon
    (``spark.python.use.daemon=false``) it is the JVM itself. A forked worker has the command line of its daemon.
    """
    parent = os.getppid()
    command = _command(parent)
    if command == _command(os.getpid()) or b"pyspark.daemon" in command.split(b"\0"):  # a JVM may have it in a --conf
        found = _stat(parent)
        parent = int(found[1]) if found else 0
    return Process.of(parent)


def _stat(pid: int) -> list[str] | None:
    """The fields of proc(5) from the third on; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
