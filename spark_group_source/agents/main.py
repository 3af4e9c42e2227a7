"""The agent process, from its start to its end.

Runs in: agents. Deliberately absent: prefetching (``prefetch``), members (``hosted_members``).

An agent ends when its executor has ended, when its folder is gone, and when the stream reader dismisses it or is gone.
If a thread then hangs, the process exits after :data:`END_S`.
"""

import contextlib
import logging
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spark_group_source.agents.agent_folder import LOG_BYTES_MAX, AgentFolder, ProcessId
from spark_group_source.agents.hosted_members import ControlConnection
from spark_group_source.agents.prefetch.prefetcher import Prefetcher, SharedBuffers
from spark_group_source.agents.prefetch.server import TASK_THREAD, PrefetchServer
from spark_group_source.reader.native_client import NativeClient
from spark_group_source.reader.range_reader import open_client

log = logging.getLogger(__name__)

CHECK_S = 1.0
"""Interval of the checks that nothing wakes the agent for."""
END_S = 5.0
"""Limit for ending, all threads included."""
MEMBERS_END_S = 3.0
"""Share of it for closing the members."""
STABLE_S = 10.0
"""An agent that has run this long may be started again without a pause."""
TOUCH_S = 3_600.0
"""Interval at which the files in the folder are made new."""
QUEUE_KBYTES, QUEUE_MESSAGES, FETCH_BYTES = "8192", "10000", 8 << 20
"""Bounds of the prefetching client beside the buffers: its queue, and one fetch response."""
FETCH_WAIT_MS = "100"
"""Longest wait of a fetch at the end of a log. Records are returned as they arrive; a new position waits behind it."""


class Agent:
    """The parts of an agent process.

    Args:
        given: the JSON document that ``start_agent`` writes: ``folder``, ``lock`` (its file descriptor), ``executor``,
            ``reader_settings`` and ``columns`` (as tasks read), ``buffer_bytes`` (the limit of the memory for
            prefetched records), and ``connection`` (see :class:`ControlConnection`).
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._folder, self._lock = AgentFolder(Path(given["folder"])), int(given["lock"])
        self._executor = ProcessId(*given["executor"])
        self._reader_settings: Mapping[str, str] = given["reader_settings"]
        self._end_reason = ""
        self._wake_pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._buffers = SharedBuffers(int(given["buffer_bytes"]))
        columns = tuple(given["columns"])
        self._prefetcher = Prefetcher(self._buffers, lambda: open_prefetching_client(self._reader_settings), columns)
        self._connection = ControlConnection(given["connection"], self._buffers.follow, self._buffers.size_of)
        self._server = PrefetchServer(self._folder, self._buffers, lambda: open_client(self._reader_settings), columns)

    def end(self, reason: str) -> None:
        """Let the agent end. Any thread, and signal handlers."""
        self._end_reason = self._end_reason or reason
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_pipe[1], b"x")

    def thread_failed(self, failure: threading.ExceptHookArgs) -> None:
        """End: without one of its threads the agent would keep tasks waiting. A task's thread concerns that task only;
        the client of the task reads from the brokers."""
        name = failure.thread.name if failure.thread else "?"
        log.error("unexpected error in the thread %s", name, exc_info=failure.exc_value)
        if name != TASK_THREAD:
            self.end(f"its thread {name} failed: {type(failure.exc_value).__name__}: {failure.exc_value}")

    def run(self) -> None:
        """Run until the agent has to end, then close everything."""
        watch = ProcessWatch(self._executor)
        self._prefetcher.start()
        self._server.start()
        self._connection.start()
        log.info("agent %d of executor %d is ready", os.getpid(), self._executor.pid)
        started_s = touched_s = time.monotonic()
        while not self._end_reason:
            self._server.close_unused_client()
            if watch.wait_ended(CHECK_S, self._wake_pipe[0]):
                self.end("its executor ended")
            elif not (self._folder.has_lock(self._lock) and (self._folder.path / "socket").exists()):
                self.end("its folder, or a file in it, is gone")
            elif reason := self._connection.end_reason:
                self.end(reason)
            elif started_s and time.monotonic() - started_s > STABLE_S:
                started_s = 0.0
                self._folder.attempts.unlink(missing_ok=True)
            elif time.monotonic() - touched_s > TOUCH_S:
                touched_s = time.monotonic()
                self._folder.touch()
        self._close()

    def _close(self) -> None:
        log.info("the agent ends: %s", self._end_reason)
        overdue = threading.Timer(END_S, os._exit, (1,))
        overdue.daemon = True
        overdue.start()
        self._server.stop()
        self._connection.stop(MEMBERS_END_S)
        self._prefetcher.stop(END_S)
        if self._folder.has_lock(self._lock):  # else it is that of a later agent
            self._folder.remove()


def open_prefetching_client(settings: Mapping[str, str]) -> NativeClient:
    """Open the client of the prefetcher. Its fetch responses have at least ``kafka.message.max.bytes``: librdkafka
    refuses a smaller bound."""
    defaults = {
        "queued.max.messages.kbytes": QUEUE_KBYTES,
        "queued.min.messages": QUEUE_MESSAGES,
        "fetch.max.bytes": str(max(FETCH_BYTES, int(settings.get("message.max.bytes", 0)))),
        "fetch.wait.max.ms": FETCH_WAIT_MS,
    }
    return open_client({**defaults, **settings})


def main(given: Mapping[str, Any]) -> None:
    """Run the agent process.

    Args:
        given: the JSON document from standard input: see :class:`Agent`.
    """
    _take_over_files(int(given["lock"]))
    handler = BoundedHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(threadName)s %(name)s: %(message)s"))
    logging.basicConfig(level=(os.environ.get("SPARK_GROUP_LOG_LEVEL") or "INFO").upper(), handlers=[handler])
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the application, whose end the agent detects itself
    agent = Agent(given)
    signal.signal(signal.SIGTERM, lambda *_: agent.end("SIGTERM"))
    threading.excepthook = agent.thread_failed
    agent.run()
    logging.shutdown()
    os._exit(0)  # do not wait for the threads of native libraries


class BoundedHandler(logging.StreamHandler[Any]):
    """Logs to standard error, a file, which is truncated when it is full."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            if os.fstat(2).st_size > LOG_BYTES_MAX // 2:
                os.ftruncate(2, 0)
        super().emit(record)


def _take_over_files(lock: int) -> None:
    """Close standard input, which contained secrets, keep the lock from child processes, and bound the log's size for
    native libraries too."""
    os.set_inheritable(lock, False)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LOG_BYTES_MAX, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    logging.raiseExceptions = False
    sys.stdin.close()


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
        # /proc cannot be read where no more files can be opened, which says nothing about the process.
        return self._pidfd in ready if self._pidfd is not None else not self._process.is_alive()
