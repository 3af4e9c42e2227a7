"""A TCP proxy that delays every byte and limits the rate of each connection, in a process of its own.

Runs in: benchmarks. Deliberately absent: faults (``proxy`` has them, on the threads of a test).
"""

import multiprocessing
import os
import queue
import socket
import threading
import time
from contextlib import suppress
from typing import Self

import psutil

CHUNK_BYTES = 64 << 10
CHUNKS_MAX = 1_024
"""Chunks on their way in one direction of a connection."""
START_S = 120


class SlowNetwork:
    """The proxy's process; a context manager.

    Args:
        port: where it listens on 127.0.0.1.
        target: the port that it forwards connections to.
        round_trip_ms: added to every round trip, one half in each direction.
        bytes_per_s: rate of each connection in each direction.
    """

    def __init__(self, port: int, target: int, *, round_trip_ms: float, bytes_per_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._listening = context.Event()
        arguments = (port, target, round_trip_ms / 2_000, bytes_per_s, self._listening)
        self._process = context.Process(target=_serve, args=arguments, name="slow network", daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        assert self._listening.wait(START_S), "the proxy does not listen"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    @property
    def cpu_s(self) -> float:
        """The CPU time that the proxy has used."""
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system


def _end_with_parent() -> None:
    """A benchmark that is killed cannot stop the proxy."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(0)


def _serve(port: int, target: int, delay_s: float, bytes_per_s: float, listening: threading.Event) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with socket.create_server(("127.0.0.1", port), backlog=128) as server:
        listening.set()
        while True:
            client, _ = server.accept()
            try:
                broker = socket.create_connection(("127.0.0.1", target))
            except OSError:
                client.close()
                continue
            for source, sink in ((client, broker), (broker, client)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                chunks: queue.Queue[tuple[float, bytes]] = queue.Queue(CHUNKS_MAX)
                threading.Thread(target=_receive, args=(source, chunks, delay_s, bytes_per_s), daemon=True).start()
                threading.Thread(target=_send, args=(sink, chunks), daemon=True).start()


def _receive(source: socket.socket, chunks: "queue.Queue[tuple[float, bytes]]", delay_s: float, rate: float) -> None:
    """Queue chunks with the time at which they arrive at the other end. An empty one ends the direction."""
    line_free_s = 0.0
    data = b"x"
    while data:
        try:
            data = source.recv(CHUNK_BYTES)
        except OSError:
            data = b""
        line_free_s = max(line_free_s, time.monotonic()) + len(data) / rate
        chunks.put((line_free_s + delay_s, data))


def _send(sink: socket.socket, chunks: "queue.Queue[tuple[float, bytes]]") -> None:
    pause, is_open = threading.Event(), True
    while True:
        due_s, data = chunks.get()
        if not data:
            with suppress(OSError):
                sink.shutdown(socket.SHUT_WR)
            return
        if (wait_s := due_s - time.monotonic()) > 0:
            pause.wait(wait_s)
        if is_open:  # afterwards chunks are only drained, so that the receiving thread ends
            try:
                sink.sendall(data)
            except OSError:
                is_open = False
