"""The stream reader's end of the control channel: one thread, one event loop, any number of peers.

Runs in: the stream reader. Deliberately absent: the meaning of messages, and waiting. A peer that is slow, silent,
broken or hostile is closed at a named bound, and does not delay the other peers.
"""

import asyncio
import errno
import logging
import resource
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from spark_group_source.agents.channel.wire import (
    FIELD_BYTES,
    FRAME_BYTES_MAX,
    GREETING,
    HEAD_BYTES,
    MAC_BYTES,
    REFUSED,
    Codec,
    HandshakeRefused,
    MessageSigner,
    Secret,
    WireError,
    body_length,
    new_challenge,
    verify_client,
)
from spark_group_source.errors import ChannelBroken

log = logging.getLogger(__name__)

START_S: Final = 10.0
"""Limit for the start of the server's thread; after it the query fails."""
PORT_WAIT_S: Final = 12.0
"""How long to wait until a fixed port is free: the previous run of the query may take some seconds to stop."""
PORT_RETRY_S: Final = 0.2
"""Interval of the attempts."""
STOP_S: Final = 3.0
"""Limit for sending the last messages; then the connections are closed."""
REFUSAL_LOG_INTERVAL_S: Final = 60.0
"""Refused connections are logged at most once per interval, with their number."""
BACKLOG: Final = 128
"""Size of the listen backlog."""
ACCEPT_PAUSE_S: Final = 1.0
"""Pause after a connection could not be accepted, usually because no more files can be opened."""
MESSAGES_PER_TURN: Final = 16
"""Messages of one peer that are handled before the other peers get a turn: about 1 ms."""
LOOP_TURNS_MAX: Final = 100
"""Turns of the event loop in which the tasks of aborted connections have to end."""
READ_BYTES: Final = 1 << 16
"""Bytes of one peer that are buffered until its turn, or until its frame is complete."""
CONNECTIONS_MAX: Final = 10_000
"""Connections of agents and tasks."""
UNPROVEN_MAX: Final = 1_024
"""Connections whose handshake is not complete. A legitimate client needs two round trips for it."""
UNPROVEN_S: Final = 1.0
"""How long such a connection is kept when there are more. A client that is turned away tries again; if the oldest ones
were closed at any age, none would complete its handshake while many connect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelLimits:
    """Bounds on the cost of peers."""

    handshake_s: float = 5.0
    """Limit for the handshake, and for a peer to close after the server has."""
    idle_s: float = 60.0
    """A connection is closed after this long without a complete message. An agent sends one every few seconds; a task
    opens a new connection after half of this."""
    outbox_bytes: int = 2 * FRAME_BYTES_MAX
    """Bytes sent and not yet read by the peer."""
    connections: int = CONNECTIONS_MAX
    """Open connections, those in the handshake included. A further one is closed at once."""
    unproven: int = UNPROVEN_MAX
    """Connections in the handshake. For a further one, the oldest is closed if it is older than :data:`UNPROVEN_S`;
    otherwise the new one is."""

    @classmethod
    def of_this_process(cls) -> "ChannelLimits":
        """At most half of the file descriptors that the process may open: the Kafka clients need the others. Raises the
        process's limit as far as it may."""
        files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 2 * CONNECTIONS_MAX if most == resource.RLIM_INFINITY else min(2 * CONNECTIONS_MAX, most)
        if files == resource.RLIM_INFINITY:
            return cls()
        if files < wanted:
            with suppress(OSError, ValueError):  # a sandbox
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
                files = wanted
        connections = max(2, min(CONNECTIONS_MAX, files // 2))
        return cls(connections=connections, unproven=min(UNPROVEN_MAX, connections // 2))


class ChannelPeer:
    """One connection of the server. :meth:`send` and :meth:`drop` are for any thread. Sending never waits; a peer that
    does not read what it is sent is closed."""

    def __init__(self, server: "ChannelServer", writer: asyncio.StreamWriter) -> None:
        self._server, self._writer = server, writer
        self._thread = threading.get_ident()
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._queued_bytes = 0  # passed to send(), and not to the transport yet
        self._outgoing: MessageSigner | None = None
        self.reason = ""
        """Why the connection was closed or is being closed; empty while it is open."""
        name = writer.get_extra_info("peername")
        self.address = f"{name[0]}:{name[1]}" if name else "?"
        """The peer's address, for logs."""

    def __repr__(self) -> str:
        return f"ChannelPeer({self.address})"

    def send(self, message: Any) -> bool:
        """Send a message. Returns False if the connection has ended.

        Raises:
            WireError: the message is not one of the channel's.
        """
        data = self._server.codec.encode(message)
        with self._lock:
            if self.reason:
                return False
            self._queued_bytes += len(data)
            if self._queued_bytes > self._server.limits.outbox_bytes:
                self.reason = self._not_read()
            # Under the lock: messages of several threads are written in the order in which they were counted.
            call = self._loop.call_soon if threading.get_ident() == self._thread else self._loop.call_soon_threadsafe
            with suppress(RuntimeError):  # the server has ended
                call(self._write, data)
        return not self.reason

    @property
    def is_proven(self) -> bool:
        """Whether the peer has proven that it knows the secret."""
        return self._outgoing is not None

    def drop(self, reason: str) -> None:
        """Close the connection after the messages sent so far."""
        with suppress(RuntimeError):  # the server has ended, and with it the connection
            self._loop.call_soon_threadsafe(self.close, reason)

    # --- on the server's thread -------------------------------------------------------------------------------------

    def close(self, reason: str, *, at_once: bool = False) -> None:
        """Close the connection, after the messages sent so far or at once."""
        with self._lock:
            self.reason = self.reason or reason
        transport = self._writer.transport
        if at_once:
            transport.abort()
        elif not transport.is_closing():
            # Not close(): with unread incoming data the system would discard outgoing data too. The peer closes when it
            # has read everything, or the limit aborts the connection.
            self._loop.call_later(self._server.limits.handshake_s, transport.abort)
            try:
                transport.write_eof()
            except OSError:  # the connection has ended already
                transport.abort()

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Complete the handshake, then hand the peer's messages to the server until the connection ends."""
        limits = self._server.limits
        try:
            incoming = await asyncio.wait_for(self._shake_hands(reader), limits.handshake_s)
        except TimeoutError:
            raise HandshakeRefused(f"no proof within {limits.handshake_s:.0f} s") from None
        self._server.on_proven(self)
        count = 0
        while True:
            try:
                async with asyncio.timeout(limits.idle_s):
                    length = body_length(await reader.readexactly(HEAD_BYTES), FRAME_BYTES_MAX + MAC_BYTES)
                    body = await reader.readexactly(length)
            except TimeoutError:
                raise TimeoutError(f"the peer sent nothing for {limits.idle_s:.0f} s") from None
            if self.reason:  # the connection is being closed: further messages are dropped
                continue
            self._server.on_message(self, self._server.codec.decode(incoming.verify(body)))
            count += 1
            if count % MESSAGES_PER_TURN == 0:
                await asyncio.sleep(0)

    async def _shake_hands(self, reader: asyncio.StreamReader) -> MessageSigner:
        challenge = new_challenge()
        self._write_field(GREETING + challenge)
        handshake = verify_client(self._server.secret, challenge, await reader.readexactly(2 * FIELD_BYTES))
        self._write_field(handshake.proof("server"))
        self._outgoing = handshake.signer("server")
        return handshake.signer("client")

    def _write_field(self, data: bytes) -> None:
        """Write a part of the handshake."""
        if self.reason:  # asyncio refuses to write behind the end of the stream
            raise ConnectionAbortedError(self.reason)
        self._writer.write(data)

    def _write(self, data: bytes) -> None:
        with self._lock:
            self._queued_bytes -= len(data)
        transport = self._writer.transport
        if self.reason:  # sent after the connection was closed, or beyond the bound
            if self.reason == self._not_read():
                transport.abort()
        elif self._outgoing is not None and not transport.is_closing():
            transport.write(self._outgoing.sign(data))
            if transport.get_write_buffer_size() > self._server.limits.outbox_bytes:
                self.close(self._not_read(), at_once=True)

    def _not_read(self) -> str:
        return f"the peer did not read {self._server.limits.outbox_bytes} bytes that it was sent"


class ChannelServer:
    """Listens, authenticates peers, and hands their messages on.

    All callbacks run on the server's own thread and must not wait. An exception from a callback ends the server.

    Args:
        codec: the messages of the channel.
        secret: the run's.
        on_message: receives the peer and the message.
        on_closed: receives a proven peer whose connection has ended, and why. Once for each.
        died: receives the error that ended the server's thread before :meth:`stop`.
        hosts: addresses to listen at; none means all addresses of this host.
        port: 0 means any free port.
        limits: bounds on the cost of peers.
    """

    def __init__(
        self,
        codec: Codec,
        secret: Secret,
        *,
        on_message: Callable[[ChannelPeer, Any], None],
        on_closed: Callable[[ChannelPeer, str], None],
        died: Callable[[BaseException], None],
        hosts: Sequence[str] = (),
        port: int = 0,
        limits: ChannelLimits | None = None,
    ) -> None:
        self.codec, self.secret = codec, secret
        self.limits = limits or ChannelLimits.of_this_process()
        self._on_message, self._on_closed, self._died = on_message, on_closed, died
        self._hosts, self._port = tuple(hosts), port
        self._listening: list[socket.socket] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._started = threading.Event()
        self._over: asyncio.Future[None] | None = None
        self._accepting: list[asyncio.Task[None]] = []
        """A task for each listening socket."""
        self._serving: set[asyncio.Task[None]] = set()
        """A task for each connection: asyncio itself keeps no reference to tasks."""
        self._stopping = False
        self._peers: dict[ChannelPeer, None] = {}
        self._unproven: dict[ChannelPeer, float] = {}
        """When each one connected, the oldest first; on the loop's clock."""
        self.refused = 0
        """Connections refused so far."""
        self._refusals_logged, self._log_refusals_at_s = 0, 0.0

    # --- for any thread ---------------------------------------------------------------------------------------------

    def start(self) -> int:
        """Listen; returns the port.

        Raises:
            ChannelBroken: the port is taken, an address is not this host's, or the thread does not start.
        """
        self._listening = listen(self._hosts, self._port, wait_s=PORT_WAIT_S if self._port else 0.0)
        port = int(self._listening[0].getsockname()[1])
        self._thread = threading.Thread(target=self._run, name="channel", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as exc:
            self._close_listening()
            raise ChannelBroken(f"the control channel's thread cannot be started: {exc}") from exc
        if not self._started.wait(START_S) or self._loop is None:
            raise ChannelBroken(f"the control channel did not start within {START_S:.0f} s")
        return port

    def stop(self, deadline_s: float = STOP_S) -> bool:
        """Send what is queued and close all connections, within the deadline. Returns whether the thread ended."""
        if self._thread is None or self._loop is None:
            return True
        self._stopping = True
        with suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._shut_down, deadline_s / 2)
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    # --- on the server's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as exc:
            log.exception("the control channel's thread died")
            if not self._stopping:
                self._died(exc)
        else:
            if not self._stopping:
                self._died(ChannelBroken("the control channel's thread ended before it was stopped"))
        finally:
            self._close_listening()

    async def _serve(self) -> None:
        loop = self._loop = asyncio.get_running_loop()
        loop.set_exception_handler(_log_loop_error)
        self._over = loop.create_future()
        self._accepting = [loop.create_task(self._accept(each)) for each in self._listening]
        self._started.set()
        try:
            await self._over
        finally:
            self._stop_accepting()
            for peer in list(self._peers):
                peer.close("the stream reader stops", at_once=True)
            for _ in range(LOOP_TURNS_MAX):
                if self._peers:
                    await asyncio.sleep(0)

    async def _accept(self, listening: socket.socket) -> None:
        """Accept connections, until cancelled. Not by asyncio's own server: while no file can be opened, that one
        logs more lines in each second than in the one before."""
        loop = asyncio.get_running_loop()
        with listening:
            listening.setblocking(False)
            while True:
                try:
                    connection, _ = await loop.sock_accept(listening)
                    streams = await asyncio.open_connection(sock=connection, limit=READ_BYTES)
                except Exception as exc:  # noqa: BLE001 - a server that accepts no more would not be noticed
                    log.warning("control channel: cannot accept a connection: %s", exc)
                    await asyncio.sleep(ACCEPT_PAUSE_S)
                    continue
                task = loop.create_task(self._connected(*streams))
                self._serving.add(task)
                task.add_done_callback(self._serving.discard)

    def _stop_accepting(self) -> None:
        for task in self._accepting:
            task.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, from its first byte to its end."""
        peer = ChannelPeer(self, writer)
        if self._stopping or len(self._peers) >= self.limits.connections:
            self._refuse(peer, "the stream reader stops" if self._stopping else "too many connections")
            writer.transport.abort()
            return
        now_s = asyncio.get_running_loop().time()
        if len(self._unproven) >= self.limits.unproven:
            oldest, since_s = next(iter(self._unproven.items()))
            reason = "too many connections without a proof"
            if now_s - since_s < UNPROVEN_S:
                self._refuse(peer, reason)
                writer.transport.abort()
                return
            # A client that knows the secret needs two round trips, and has completed them by now.
            del self._unproven[oldest]
            self._refuse(oldest, reason)
            oldest.close(reason, at_once=True)
        self._peers[peer], self._unproven[peer] = None, now_s
        try:
            await peer.serve(reader)
        except HandshakeRefused as exc:
            self._refuse(peer, str(exc))
            if not peer.reason:
                writer.write(REFUSED)
            peer.close(str(exc))
            with suppress(OSError):
                while await reader.read(READ_BYTES):  # until the peer has read REFUSED and closes, or the limit aborts
                    pass
        except WireError as exc:
            log.warning("control channel: %s sent an invalid message: %s; closing", peer.address, exc)
            peer.close(str(exc), at_once=True)
        except (OSError, EOFError, TimeoutError) as exc:
            peer.close(
                "closed by the peer" if isinstance(exc, EOFError) else str(exc) or type(exc).__name__, at_once=True
            )
        finally:
            writer.transport.abort()
            self._on_gone(peer)

    def _shut_down(self, flush_s: float) -> None:
        """Close every peer after the messages sent so far, and end when all are gone or the time is over."""
        assert self._loop is not None
        self._stop_accepting()
        for peer in list(self._peers):
            peer.close("the stream reader stops")
        if self._peers:
            self._loop.call_later(flush_s, self._end)
        else:
            self._end()

    def _end(self, error: BaseException | None = None) -> None:
        assert self._over is not None
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)

    def _close_listening(self) -> None:
        for each in self._listening:
            each.close()

    def _refuse(self, peer: ChannelPeer, reason: str) -> None:
        assert self._loop is not None
        log.debug("control channel: %s: refused: %s", peer.address, reason)
        self.refused += 1
        if self._loop.time() >= self._log_refusals_at_s:
            log.warning("control channel: refused %d connections", self.refused - self._refusals_logged)
            self._refusals_logged = self.refused
            self._log_refusals_at_s = self._loop.time() + REFUSAL_LOG_INTERVAL_S

    # --- called by peers, on the same thread ------------------------------------------------------------------------

    def on_proven(self, peer: ChannelPeer) -> None:
        """The peer has proven that it knows the secret."""
        self._unproven.pop(peer, None)

    def on_message(self, peer: ChannelPeer, message: Any) -> None:
        """The peer has sent a message."""
        self._guarded(self._on_message, peer, message)

    def _on_gone(self, peer: ChannelPeer) -> None:
        del self._peers[peer]
        self._unproven.pop(peer, None)
        if peer.is_proven:
            self._guarded(self._on_closed, peer, peer.reason)
        if self._stopping and not self._peers:
            self._end()

    def _guarded(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call a callback, and end the server if it raises: asyncio would only log the error and drop the message."""
        try:
            call(*arguments)
        except BaseException as exc:  # noqa: BLE001 - passed on to ``died``
            self._end(exc if isinstance(exc, Exception) else RuntimeError(repr(exc)))


def _log_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error that asyncio cannot raise anywhere, such as one in a scheduled call."""
    log.warning("control channel: %s: %r", context.get("message"), context.get("exception"))


def listen(hosts: Sequence[str], port: int, *, wait_s: float = 0.0) -> list[socket.socket]:
    """Open listening sockets at these addresses of this host, all with one port; without addresses, one for all.

    Args:
        wait_s: how long to wait until the port is free.

    Raises:
        ChannelBroken: the port is taken, or an address is not this host's.
    """
    until_s, pause = time.monotonic() + wait_s, threading.Event()
    while True:
        try:
            return _listen(hosts, port)
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE or time.monotonic() >= until_s:
                where = ", ".join(hosts) or "all addresses of this host"
                raise ChannelBroken(
                    f"the control channel cannot listen at {where}, port {port or 'any'}: {exc.strerror or exc}. Set "
                    "coordinatorPort to a free port, and coordinatorHost to an address of the driver's host"
                ) from exc
        pause.wait(PORT_RETRY_S)


def _listen(hosts: Sequence[str], port: int) -> list[socket.socket]:
    if not hosts:
        return [_listen_everywhere(port)]
    sockets: list[socket.socket] = []
    for host in hosts:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        chosen = sockets[0].getsockname()[1] if sockets else port
        sockets.append(socket.create_server((host, chosen), family=family, backlog=BACKLOG))
    return sockets


def _listen_everywhere(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
        except OSError:  # IPv6 is compiled in, and switched off
            pass
    return socket.create_server(("", port), backlog=BACKLOG)
