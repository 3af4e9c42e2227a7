"""A child process that a test commands by lines on its stdin, freezes, kills or closes.

Runs in: tests. Deliberately absent: what the process does (``ordinary``, ``runs``).
"""

import contextlib
import signal
import subprocess


class Child:
    """A subclass starts ``process``, with a pipe to its stdin.

    Args:
        end_s: the timeout of its end.
    """

    process: subprocess.Popen[str]

    def __init__(self, end_s: float) -> None:
        self._end_s = end_s

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

    def close_pipes(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
