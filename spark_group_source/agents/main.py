"""The agent process, from its start to its end.

Runs in: agents. Deliberately absent: what it does meanwhile (``reader``, ``server``, ``membership``).

It ends when its executor does, its folder is gone, or its coordinator dismisses it or is gone. Whatever then hangs, the
process is gone :data:`END_S` later.
"""

import contextlib
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spark_group_source.agents.agent_folder import LOG_BYTES_MAX, Home
from spark_group_source.agents.membership import Membership
from spark_group_source.agents.prefetch.confirm import Confirmer
from spark_group_source.agents.prefetch.reader import Reader, Stock
from spark_group_source.agents.prefetch.server import Server
from spark_group_source.agents.processes import Process, Watch
from spark_group_source.reader.fetch import open_client
from spark_group_source.reader.native_client import NativeClient

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks at what cannot wake the agent."""
END_S = 5.0
"""From the reason to end to the end."""
MEMBERS_END_S = 3.0
"""Of that, for the members."""
STAYED_S = 10.0
"""An agent that lived for so long may be started again at once."""
QUEUE_KBYTES, QUEUE_MESSAGES, FETCH_BYTES = "8192", "10000", "8388608"
"""What the reader's library holds besides the buffers: its queue, and one response."""
FETCH_WAIT_MS = "100"
"""Records are told as they come; a new position waits so long behind a fetch at the log's end."""


class Agent:
    """Everything that lives in the process."""

    def __init__(
        self,
        given: Mapping[str, Any],
        *,
        members: Callable[[Mapping[str, Any]], Membership] = Membership,
        server: type[Server] = Server,
    ) -> None:
        self._home = Home(Path(given["home"]))
        self._executor = Process(*given["executor"])
        self._settings: Mapping[str, str] = given["settings"]
        self._why = ""
        self._ears = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stock = Stock(int(given["memory_bytes"]))
        headers = bool(given["include_headers"])
        self._reader = Reader(self._stock, self._reading_client, include_headers=headers)
        self._confirmer = Confirmer(self._stock, lambda: open_client(self._settings))
        self._members = members(given["given"])
        self._server = server(self._home, self._stock, self._confirmer, include_headers=headers)

    def _reading_client(self) -> NativeClient:
        return open_client(
            self._settings,
            queued_max_messages_kbytes=QUEUE_KBYTES,
            queued_min_messages=QUEUE_MESSAGES,
            fetch_max_bytes=FETCH_BYTES,
            fetch_wait_max_ms=FETCH_WAIT_MS,
        )

    def end(self, why: str) -> None:
        """Ask it to end. From any thread, and from a signal's handler."""
        self._why = self._why or why
        with contextlib.suppress(BlockingIOError):
            os.write(self._ears[1], b"x")

    def run(self) -> None:
        watch = Watch(self._executor)
        self._reader.start()
        self._server.start()
        self._members.start(self._stock.follow, self._stock.held_of)
        log.info("agent %d of executor %d is ready", os.getpid(), self._executor.pid)
        began_s, folder = time.monotonic(), _identity(self._home.path)
        while not self._why:
            if watch.wait_ended(LOOK_S, self._ears[0]):
                self.end("its executor ended")
            elif _identity(self._home.path) != folder:
                self.end("its folder is gone")
            elif why := self._members.ended():
                self.end(why)
            elif began_s and time.monotonic() - began_s > STAYED_S:
                began_s = 0.0
                self._home.tries.unlink(missing_ok=True)
        self._close()

    def _close(self) -> None:
        log.info("the agent ends: %s", self._why)
        overdue = threading.Timer(END_S, os._exit, (1,))
        overdue.daemon = True
        overdue.start()
        self._server.stop()
        self._members.stop(MEMBERS_END_S)
        self._reader.stop(END_S)
        self._home.remove()


def main(given: Mapping[str, Any], make: Callable[[Mapping[str, Any]], Agent] = Agent) -> None:
    """Run the agent process.

    Args:
        given: JSON from its standard input: see ``start``.
        make: makes the agent.
    """
    _take_over_files(int(given["lock"]))
    handler = BoundedHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(threadName)s %(name)s: %(message)s"))
    logging.basicConfig(level=os.environ.get("SPARK_GROUP_LOG_LEVEL", "INFO"), handlers=[handler])
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the application, whose end the agent sees by itself
    agent = make(given)
    signal.signal(signal.SIGTERM, lambda *_: agent.end("SIGTERM"))
    agent.run()
    logging.shutdown()
    os._exit(0)  # the libraries' threads have nothing left to do


class BoundedHandler(logging.StreamHandler[Any]):
    """Standard error as a file of bounded size: begun anew when it is full."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            if os.fstat(2).st_size > LOG_BYTES_MAX // 2:
                os.ftruncate(2, 0)
        super().emit(record)


def _take_over_files(lock: int) -> None:
    """Standard input held secrets, the lock is this process's alone, and the log has its bound whoever writes."""
    os.set_inheritable(lock, False)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LOG_BYTES_MAX, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    logging.raiseExceptions = False
    sys.stdin.close()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
