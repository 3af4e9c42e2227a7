"""A child process that a test commands by lines on its stdin, freezes, kills or closes.

Runs in: tests. Deliberately absent: what the process does (``ordinary``, ``runs``).
"""

import contextlib
import signal
import subprocess
from pathlib import Path
from typing import Self


class Child:
    """A subclass starts ``process``, with a pipe to its stdin. It is killed at the end of a ``with`` block.

    Args:
        file: what the process writes; its log is beside it.
        end_s: the timeout of its end.
    """

    process: subprocess.Popen[str]

    def __init__(self, file: Path, end_s: float) -> None:
        self.file, self._end_s = file, end_s
        self._log = file.with_suffix(".log").open("ab")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._log.close()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it; the group is not notified."""
        self.process.kill()
        self.process.wait(self._end_s)

    def end(self, order: str) -> None:
        """End it gracefully, by its own command for that."""
        if self.process.poll() is None:
            with contextlib.suppress(BrokenPipeError):
                self.send(order)
            self.process.wait(self._end_s)
