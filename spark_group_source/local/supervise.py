"""Run a command that never outlives the process that started it.

Runs in: a small process of its own between that process and the command, started by path
(``python -I -S supervise.py``) so that nothing but the standard library is loaded. Deliberately absent: restarts, logs,
Kafka.

Three mechanisms, because each one has a gap:

- the parent holds the other end of stdin: when it ends, the read returns and the command is killed;
- the parent's pid is checked every second: a forked copy of the parent could hold the pipe open;
- the command gets a death signal from *this* process, whose only thread is its main thread, so killing the
  supervisor kills the command too (Linux only; elsewhere the first two remain).

It prints the command's pid and exits with the command's code. ``--remove DIR`` is deleted when the parent has
ended, because the parent cannot do it then.
"""

import argparse
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys

PARENT_CHECK_MS = 1_000
"""Interval in which the parent's pid is checked."""

_PR_SET_PDEATHSIG = 1


def _begin(supervisor: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a JVM that inherits it ignored would never stop in order
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:  # it died before the request was in place
            os._exit(1)


def main() -> int:
    """Start the command after ``--`` and watch both sides until one ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--log", required=True, help="the command's stdout and stderr are appended here")
    parser.add_argument("--remove", help="directory to delete when the parent is gone")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()

    # A Ctrl-C in the terminal is the parent's to handle: it stops the command in its own order.
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    me = os.getpid()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)

    with open(args.log, "ab") as log:
        child = subprocess.Popen(
            args.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=lambda: _begin(me),  # noqa: PLW1509 - safe: this process has one thread
        )
    print(child.pid, flush=True)
    stdin = sys.stdin.fileno()
    orphaned = False
    try:
        while child.poll() is None:
            ready, _, _ = select.select([stdin, wake_read], [], [], PARENT_CHECK_MS / 1000)
            if wake_read in ready:
                os.read(wake_read, 4096)
            # The pipe closes a moment before the parent counts as gone, so either sign is enough.
            if (stdin in ready and not os.read(stdin, 4096)) or os.getppid() != args.parent:
                orphaned = True
                break
    finally:
        if child.poll() is None:
            child.kill()  # also ends a stopped process, which a termination request would not
        code = child.wait()
    if args.remove and orphaned:
        shutil.rmtree(args.remove, ignore_errors=True)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
