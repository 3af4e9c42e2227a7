"""Find the process of this task's executor, and detect its end.

Runs in: executor workers and agents, on Linux. Deliberately absent: what an agent does when its executor ends
(``main``).
"""

import contextlib
import os
import select
from dataclasses import dataclass
from pathlib import Path

ENDED_STATES = ("Z", "X")
"""States in proc(5) of a process that has ended and that its parent has not waited for yet."""


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


class ProcessWatch:
    """Detects the end of a process: at once where the kernel has pidfd, else whenever it is checked."""

    def __init__(self, process: ProcessId) -> None:
        self._process = process
        self._pidfd: int | None = None
        with contextlib.suppress(OSError, AttributeError):  # a kernel before 5.3, or a sandbox
            self._pidfd = os.pidfd_open(process.pid)

    def wait_ended(self, wait_s: float, *wake_fds: int) -> bool:
        """Wait until the process has ended, ``wait_s`` are over, or one of ``wake_fds`` is readable.

        Returns:
            Whether the process has ended.
        """
        poll = select.poll()
        for fd in (*wake_fds, *(() if self._pidfd is None else (self._pidfd,))):
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(round(wait_s * 1000))}
        return self._pidfd in ready or not self._process.is_alive()


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
