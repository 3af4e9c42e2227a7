"""A TCP proxy before a server that injects network faults into its connections.

Runs in: tests; one thread per proxy. Deliberately absent: the protocol of the connections (the proxy counts bytes, not
messages), and the schedule of faults (``faulty_cluster``).

Buffers are bounded: a side that does not read blocks the sender of the other side, as without a proxy.
"""

import asyncio
import contextlib
import enum
import math
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

CHUNK_BYTES = 16 * 1024
CHUNKS_MAX = 64
"""Delayed chunks in one direction of a connection: 1 MiB."""
STREAM_BYTES = 64 * 1024
"""Bytes read ahead, or written and not sent, on each side of a connection."""
CONNECT_S = 60
"""The timeout of a connection to the server; after it the client's connection is reset."""
CALL_S = 600
"""The bound of a hang of every switch: it takes one iteration of the proxy's loop."""
SLICES_PER_S = 20
"""With a limited bandwidth, bytes pass in this many portions per second."""

T = TypeVar("T")


class Direction(enum.StrEnum):
    """The direction of bytes."""

    TO_SERVER = "to server"
    TO_CLIENT = "to client"


@dataclass(frozen=True)
class Conditions:
    """The faults of one direction, for all connections.

    Args:
        delay_s: each byte arrives this much later.
        bytes_per_s: the bandwidth of all connections together; None: unlimited.
        drop: bytes are dropped and the connection stays open. A connection that lost bytes is reset when this ends:
            bytes after a gap are never passed on.
        stop_at_bytes: bytes wait when the proxy has passed this many (:attr:`Proxy.passed`), until other conditions are
            set.
        reset_after_bytes: each connection is closed when it has passed this many bytes from now on.
        spoil: creates the function that changes a connection's bytes, from its start: open connections are reset.
    """

    delay_s: float = 0.0
    bytes_per_s: int | None = None
    drop: bool = False
    stop_at_bytes: int | None = None
    reset_after_bytes: int | None = None
    spoil: Callable[[], Callable[[bytes], bytes]] | None = None


CLEAR = Conditions()


class Proxy:
    """Listens on a port of 127.0.0.1 and forwards every connection to ``target``; a context manager.

    Any thread may switch faults; a switch has taken effect when the call returns.

    Args:
        port: the port to listen on; 0: any free one.
        target: the address of the server. It may be set later, and changed; open connections keep theirs.
    """

    def __init__(self, *, port: int = 0, target: tuple[str, int] | None = None) -> None:
        self.target = target
        self.port = port
        self.passed = dict.fromkeys(Direction, 0)
        """Bytes that were forwarded, in each direction."""
        self._conditions = dict.fromkeys(Direction, CLEAR)
        self._free_at_s = dict.fromkeys(Direction, 0.0)
        self._links: set[_Link] = set()
        self._server: asyncio.Server | None = None
        self._held: socket.socket | None = None
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name=f"proxy-{port}", daemon=True)

    # --- switches ---------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        self._held = _bound(self.port)
        self.port = self._held.getsockname()[1]
        self._thread.start()
        assert self._up.wait(CALL_S), "the proxy's thread did not begin"
        return self

    def close(self) -> None:
        """Reset every connection and free the port."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join(CALL_S)
            assert not self._thread.is_alive(), "the proxy's thread did not end"

    @property
    def connections(self) -> int:
        """Return the number of open connections."""
        return len(self._links)

    @property
    def refusing(self) -> bool:
        return self._server is None

    def set_conditions(self, conditions: Conditions, *directions: Direction) -> None:
        """Apply conditions from now on, in these directions or in both."""
        self._call(self._set_conditions(conditions, directions or tuple(Direction)))

    def refuse(self) -> None:
        """Reset every connection and refuse new ones, like a server that is down."""
        self._call(self._refuse())

    def accept(self) -> None:
        """Accept connections again."""
        self._call(self._accept())

    def reset(self) -> int:
        """Reset every connection; new ones are accepted. Returns their number."""
        return self._call(self._reset_all(_every))

    def half_open(self, keep: Direction = Direction.TO_CLIENT) -> int:
        """Of every open connection keep one end, the client's or the server's, and reset the other: the kept end
        receives nothing, not even the reset. Returns their number."""
        return self._call(self._half_open(keep))

    def heal(self) -> None:
        """End every fault."""
        self._call(self._heal())

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- on the loop ------------------------------------------------------------------------------------------------

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_S)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ending, self._changed = asyncio.Event(), asyncio.Event()
        await self._accept()
        self._up.set()
        try:
            await self._ending.wait()
        finally:
            await self._refuse()
            if self._held is not None:
                self._held.close()

    async def _accept(self) -> None:
        if self._held is not None:
            self._server = await asyncio.start_server(self._accepted, sock=self._held, limit=STREAM_BYTES)
            self._held = None

    async def _refuse(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
            self._held = _bound(self.port)  # reserves the port; nothing listens, so connections are refused
        await self._reset_all(_every)

    async def _reset_all(self, which: Callable[["_Link"], bool]) -> int:
        chosen = [link for link in self._links if which(link)]
        for link in chosen:
            link.task.cancel()
        await asyncio.gather(*(link.task for link in chosen), return_exceptions=True)
        return len(chosen)

    async def _half_open(self, keep: Direction) -> int:
        await self._reset_all(lambda link: not link.whole)  # a connection with one end only cannot lose the other
        chosen = [link for link in self._links if link.kept is None]
        for link in chosen:
            link.keep_only(keep)
        return len(chosen)

    async def _set_conditions(self, conditions: Conditions, directions: tuple[Direction, ...]) -> None:
        for direction in directions:
            self._conditions[direction] = conditions
            self._free_at_s[direction] = 0.0
        self._changed.set()
        self._changed = asyncio.Event()
        if conditions.spoil is not None:
            await self._reset_all(_every)
        elif not conditions.drop:
            await self._reset_all(lambda link: not link.lost.isdisjoint(directions))

    async def _heal(self) -> None:
        spoiled = any(conditions.spoil is not None for conditions in self._conditions.values())
        await self._set_conditions(CLEAR, tuple(Direction))
        await self._reset_all(lambda link: spoiled or link.kept is not None)
        await self._accept()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:  # it arrived while the port was being closed
            _reset(writer)
            return
        link = _Link(self, reader, writer)
        self._links.add(link)
        link.task = self._loop.create_task(link.run())
        link.task.add_done_callback(link.end)  # not in the task, which may be cancelled before its first step

    def forget(self, link: "_Link") -> None:
        self._links.discard(link)

    def conditions_of(self, direction: Direction) -> Conditions:
        return self._conditions[direction]

    async def until(self, due: Callable[[Conditions], float], direction: Direction) -> Conditions:
        """Wait until the time that the conditions set, which may change meanwhile; return the conditions then."""
        while True:
            conditions = self._conditions[direction]
            left_s = due(conditions) - self._loop.time()
            if left_s <= 0:
                return conditions
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()

    async def take_turn(self, count: int, direction: Direction) -> None:
        """Wait for the bandwidth of ``count`` bytes, and while the direction is stopped."""

        def stopped(now: Conditions) -> float:
            return math.inf if now.stop_at_bytes is not None and self.passed[direction] >= now.stop_at_bytes else 0.0

        await self.until(stopped, direction)
        conditions = self._conditions[direction]
        if conditions.bytes_per_s is not None:
            at_s = max(self._loop.time(), self._free_at_s[direction]) + count / conditions.bytes_per_s
            self._free_at_s[direction] = at_s
            await self.until(lambda now: at_s if now is conditions else 0.0, direction)


class _Link:
    """A client's connection and the one to the server."""

    def __init__(self, proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.task: asyncio.Task[None]
        self.kept: Direction | None = None
        """The remaining end of a half-open connection."""
        self.lost: set[Direction] = set()
        """The directions in which bytes were dropped."""
        self._proxy = proxy
        self._ends = {Direction.TO_CLIENT: (reader, writer)}
        self._pumps: list[asyncio.Task[None]] = []

    @property
    def whole(self) -> bool:
        """Whether the server has accepted it, too."""
        return len(self._ends) == len(Direction)

    async def run(self) -> None:
        try:
            if self._proxy.target is None:
                return
            async with asyncio.timeout(CONNECT_S):  # wait_for may lose a cancellation that arrives with the result
                connection = await asyncio.open_connection(*self._proxy.target, limit=STREAM_BYTES)
            self._ends[Direction.TO_SERVER] = connection
            await self._pass_on()
            if self.kept is not None:
                reader, _ = self._ends[self.kept]
                while await reader.read(CHUNK_BYTES):
                    pass
        except OSError:
            pass  # one side has failed; end() resets the other

    def end(self, _task: asyncio.Task[None]) -> None:
        """Reset both connections."""
        for pump in self._pumps:
            pump.cancel()
        for _, writer in self._ends.values():
            _reset(writer)
        self._proxy.forget(self)

    def keep_only(self, end: Direction) -> None:
        self.kept = end
        for pump in self._pumps:
            pump.cancel()
        _reset(next(writer for direction, (_, writer) in self._ends.items() if direction is not end))

    async def _pass_on(self) -> None:
        """Run until both directions have ended, or one has failed."""
        client, server = self._ends[Direction.TO_CLIENT], self._ends[Direction.TO_SERVER]
        for direction, reader, writer in (
            (Direction.TO_SERVER, client[0], server[1]),
            (Direction.TO_CLIENT, server[0], client[1]),
        ):
            waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(CHUNKS_MAX)
            self._pumps.append(asyncio.create_task(_read(reader, waiting)))
            self._pumps.append(asyncio.create_task(self._write(waiting, writer, direction)))
        done, _ = await asyncio.wait(self._pumps, return_when=asyncio.FIRST_EXCEPTION)
        for pump in done:
            if not pump.cancelled() and (error := pump.exception()) is not None:
                raise error
        if self.kept is None:
            for _, writer in self._ends.values():
                writer.close()
                await writer.wait_closed()

    async def _write(
        self, waiting: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        counted, passed = CLEAR, 0
        spoiled = spoil() if (spoil := self._proxy.conditions_of(direction).spoil) is not None else None
        while True:
            came_s, data = await waiting.get()
            conditions = await self._proxy.until(lambda now, came_s=came_s: came_s + now.delay_s, direction)  # type: ignore[misc]
            if not data:
                if direction not in self.lost:
                    writer.write_eof()
                return
            if conditions is not counted:
                counted, passed = conditions, 0
            if conditions.drop or direction in self.lost:
                self.lost.add(direction)
                continue
            if spoiled is not None:
                data = spoiled(data)
            if conditions.reset_after_bytes is not None:
                data = data[: conditions.reset_after_bytes - passed]
            await self._portions(data, writer, direction)
            passed += len(data)
            if conditions.reset_after_bytes is not None and passed >= conditions.reset_after_bytes:
                writer.close()
                await writer.wait_closed()
                raise ConnectionAbortedError(f"reset after {passed} bytes")

    async def _portions(self, data: bytes, writer: asyncio.StreamWriter, direction: Direction) -> None:
        while data:
            rate = self._proxy.conditions_of(direction).bytes_per_s
            size = len(data) if rate is None else max(1, rate // SLICES_PER_S)
            portion, data = data[:size], data[size:]
            await self._proxy.take_turn(len(portion), direction)
            self._proxy.passed[direction] += len(portion)
            writer.write(portion)
            await writer.drain()


async def _read(reader: asyncio.StreamReader, waiting: asyncio.Queue[tuple[float, bytes]]) -> None:
    """Read chunks with their arrival times; an empty chunk is the end."""
    loop = asyncio.get_running_loop()
    data = b"more"
    while data:
        data = await reader.read(CHUNK_BYTES)
        await waiting.put((loop.time(), data))


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection with a RST, so that the other side fails at once."""
    sock = writer.get_extra_info("socket")
    if not writer.is_closing() and sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _every(link: _Link) -> bool:
    del link
    return True


def _bound(port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(("127.0.0.1", port))
    except OSError:
        sock.close()
        raise
    return sock
