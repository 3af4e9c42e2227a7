"""The stream reader's end of the control channel: one thread, one loop, any number of peers that cannot hurt it.

Runs in: the stream reader. Deliberately absent: what messages mean, and waiting: a peer that is slow, silent, damaged
or hostile is closed at a named bound, and until then costs the others nothing.
"""

import asyncio
import logging
import resource
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from spark_group_source.agents.channel.codec import FRAME_BYTES_MAX, Codec, WireError
from spark_group_source.agents.channel.frames import HEAD_BYTES, length_of
from spark_group_source.agents.channel.handshake import (
    FIELD_BYTES,
    GREETING,
    MAC_BYTES,
    REFUSED,
    Refused,
    Seal,
    Secret,
    answered,
    challenge,
)
from spark_group_source.errors import ChannelBroken

log = logging.getLogger(__name__)

START_S: Final = 10.0
STOP_S: Final = 3.0
REFUSALS_EVERY_S: Final = 60.0
"""Refused connections are one line of the log in this time, however many there are."""
BACKLOG: Final = 128
"""Connections that the system keeps until they are taken, and that are taken in one go."""
MESSAGES_A_TURN: Final = 16
"""Messages of one peer that are handled before the others have a turn: about a millisecond."""
ROUNDS_MAX: Final = 100
"""Of the loop, until the tasks of aborted connections have ended."""
READ_BYTES: Final = 1 << 16
"""Of one peer that are kept before it has its turn, or its frame is complete."""
CONNECTIONS_MAX: Final = 10_000
"""Agents, and tasks that have no agent."""
UNPROVEN_MAX: Final = 256
"""A connection is unproven for two round trips, unless it has no business here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a peer may cost."""

    handshake_s: float = 5.0
    idle_s: float = 60.0
    """After this long without a whole message a connection is closed. An agent sends one every few seconds, and a task
    opens a new connection after half of this."""
    outbox_bytes: int = 8 * FRAME_BYTES_MAX
    """Sent and not taken by the peer."""
    connections: int = CONNECTIONS_MAX
    unproven: int = UNPROVEN_MAX

    @classmethod
    def of_this_process(cls) -> "Limits":
        """At most half of the files that the process may open: the others are Kafka's."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files == resource.RLIM_INFINITY:
            return cls()
        connections = max(2, min(CONNECTIONS_MAX, files // 2))
        return cls(connections=connections, unproven=min(UNPROVEN_MAX, connections // 2))


class Peer:
    """One connection. :meth:`send` and :meth:`drop` are for any thread; sending never waits, and closes a peer
    that does not take what it is sent."""

    def __init__(self, server: "Server", writer: asyncio.StreamWriter) -> None:
        self._server, self._writer = server, writer
        self._thread = threading.get_ident()
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._queued_bytes = 0  # given to send(), and not to the transport yet
        self._out: Seal | None = None
        self.reason = ""
        """Why it was closed, or is about to be."""
        name = writer.get_extra_info("peername")
        self.address = f"{name[0]}:{name[1]}" if name else "?"
        """Of the other end, for logs."""

    def __repr__(self) -> str:
        return f"Peer({self.address})"

    def send(self, message: Any, *, answers: int = 0) -> bool:
        """Send a message, as the answer to the question with that number or as none. False: the connection has ended.

        Raises:
            WireError: this is no message of the channel.
        """
        data = self._server.codec.encode(message, answers=answers)
        with self._lock:
            if self.reason:
                return False
            self._queued_bytes += len(data)
            if self._queued_bytes > self._server.limits.outbox_bytes:
                self.reason = self._not_taken()
            # Under the lock: messages of several threads are written in the order in which they were counted.
            call = self._loop.call_soon if threading.get_ident() == self._thread else self._loop.call_soon_threadsafe
            with suppress(RuntimeError):  # the server has ended
                call(self._write, data)
        return not self.reason

    @property
    def is_proven(self) -> bool:
        """Whether it has proven that it knows the secret."""
        return self._out is not None

    def drop(self, reason: str) -> None:
        """Close the connection, behind what was sent."""
        with suppress(RuntimeError):  # the server has ended, and so has this
            self._loop.call_soon_threadsafe(self.close, reason)

    # --- on the server's thread -------------------------------------------------------------------------------------

    def close(self, reason: str, *, at_once: bool = False) -> None:
        """End the connection, behind what was sent or at once."""
        with self._lock:
            self.reason = self.reason or reason
        transport = self._writer.transport
        if at_once:
            transport.abort()
        elif not transport.is_closing():
            # Not close(): what is still on its way here would make the system throw away what is on its way there. The
            # other end closes when it has read this, or its time is over.
            self._loop.call_later(self._server.limits.handshake_s, transport.abort)
            try:
                transport.write_eof()
            except OSError:  # it is gone already
                transport.abort()

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Let the peer prove that it knows the secret, and hand on what it sends, until the connection ends."""
        limits = self._server.limits
        try:
            incoming = await asyncio.wait_for(self._prove(reader), limits.handshake_s)
        except TimeoutError:
            raise Refused(f"no proof within {limits.handshake_s:.0f} s") from None
        self._server.proven(self)
        count = 0
        while True:
            try:
                async with asyncio.timeout(limits.idle_s):
                    length = length_of(await reader.readexactly(HEAD_BYTES), FRAME_BYTES_MAX + MAC_BYTES)
                    body = await reader.readexactly(length)
            except TimeoutError:
                raise TimeoutError(f"it sent nothing for {limits.idle_s:.0f} s") from None
            if self.reason:  # closed behind what was sent to it: what it says meanwhile is not for us
                continue
            found = self._server.codec.decode(incoming.open(body))
            self._server.heard(self, found.message, found.asks)
            count += 1
            if count % MESSAGES_A_TURN == 0:
                await asyncio.sleep(0)

    async def _prove(self, reader: asyncio.StreamReader) -> Seal:
        mine = challenge()
        self._writer.write(GREETING + mine)
        hands = answered(self._server.secret, mine, await reader.readexactly(2 * FIELD_BYTES))
        self._writer.write(hands.proof("server"))
        self._out = hands.seal("server")
        return hands.seal("client")

    def _write(self, data: bytes) -> None:
        with self._lock:
            self._queued_bytes -= len(data)
        transport = self._writer.transport
        if self._out is None or transport.is_closing():
            return
        if self.reason == self._not_taken():
            transport.abort()
            return
        transport.write(self._out.close(data))
        if transport.get_write_buffer_size() > self._server.limits.outbox_bytes:
            self.close(self._not_taken(), at_once=True)

    def _not_taken(self) -> str:
        return f"it did not take {self._server.limits.outbox_bytes} bytes that it was sent"


class Server:
    """Listens, and hands on what proven peers say.

    All callbacks come from the server's own thread: they must not wait. What leaves one of them ends the server.

    Args:
        codec, secret: the run's.
        on_message: peer, message, and the number to answer when it is a question, else 0.
        on_closed: a peer that was proven is gone, and why. Once for each.
        died: is given what ended the server's thread before :meth:`stop`.
        hosts: addresses to listen at; none means all that this host has.
        port: 0 means any that is free.
        limits: of peers.
    """

    def __init__(
        self,
        codec: Codec,
        secret: Secret,
        *,
        on_message: Callable[[Peer, Any, int], None],
        on_closed: Callable[[Peer, str], None],
        died: Callable[[BaseException], None],
        hosts: Sequence[str] = (),
        port: int = 0,
        limits: Limits | None = None,
    ) -> None:
        self.codec, self.secret = codec, secret
        self.limits = limits or Limits.of_this_process()
        self._on_message, self._on_closed, self._died = on_message, on_closed, died
        self._hosts, self._wanted_port = tuple(hosts), port
        self._listening: list[socket.socket] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._started = threading.Event()
        self._over: asyncio.Future[None] | None = None
        self._servers: list[asyncio.Server] = []
        self._stopping = False
        self._peers: dict[Peer, None] = {}
        self._unproven: dict[Peer, None] = {}  # in the order in which they came
        self.refused = 0
        """Connections that were refused so far."""
        self._refusals_logged, self._log_refusals_at_s = 0, 0.0

    # --- for any thread ---------------------------------------------------------------------------------------------

    def start(self) -> int:
        """Listen; returns the port.

        Raises:
            ChannelBroken: the port is taken, an address is not this host's, or the thread does not start.
        """
        self._listening = listening(self._hosts, self._wanted_port)
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
        """End it: what was sent goes out, within the deadline. Returns whether the thread ended."""
        if self._thread is None or self._loop is None:
            return True
        self._stopping = True
        with suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._shut, deadline_s / 2)
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
                self._died(ChannelBroken("the control channel ended by itself"))
        finally:
            self._close_listening()

    async def _serve(self) -> None:
        loop = self._loop = asyncio.get_running_loop()
        loop.set_exception_handler(_trouble)
        self._over = loop.create_future()
        for each in self._listening:
            server = await asyncio.start_server(self._connected, sock=each, backlog=BACKLOG, limit=READ_BYTES)
            self._servers.append(server)
        self._started.set()
        try:
            await self._over
        finally:
            for server in self._servers:
                server.close()
            for peer in list(self._peers):
                peer.close("the stream reader ends", at_once=True)
            for _ in range(ROUNDS_MAX):
                if self._peers:
                    await asyncio.sleep(0)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its first byte to its end."""
        peer = Peer(self, writer)
        if self._stopping or len(self._peers) >= self.limits.connections:
            self._refuse(peer, "the stream reader ends" if self._stopping else "too many connections")
            writer.transport.abort()
            return
        self._peers[peer] = self._unproven[peer] = None
        if len(self._unproven) > self.limits.unproven:
            # The oldest one: whoever knows the secret needs two round trips, and is no longer among them by then.
            oldest = next(iter(self._unproven))
            del self._unproven[oldest]
            oldest.close("too many connections without a proof", at_once=True)
        try:
            await peer.serve(reader)
        except Refused as exc:
            self._refuse(peer, str(exc))
            writer.write(REFUSED)
            peer.close(str(exc))
            with suppress(OSError):
                while await reader.read(READ_BYTES):  # until it has taken that and closes, or its time is over
                    pass
        except WireError as exc:
            log.warning("%s: closed: %s", peer.address, exc)
            peer.close(str(exc), at_once=True)
        except (OSError, EOFError, TimeoutError) as exc:
            peer.close(
                "closed by the peer" if isinstance(exc, EOFError) else str(exc) or type(exc).__name__, at_once=True
            )
        finally:
            writer.transport.abort()
            self._gone(peer)

    def _shut(self, flush_s: float) -> None:
        """Close every peer behind what was sent to it, and end when all are gone or the time is over."""
        assert self._loop is not None
        for server in self._servers:
            server.close()
        for peer in list(self._peers):
            peer.close("the stream reader ends")
        if self._peers:
            self._loop.call_later(flush_s, self._end)
        else:
            self._end()

    def _end(self, failed: BaseException | None = None) -> None:
        assert self._over is not None
        if self._over.done():
            return
        if failed is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(failed)

    def _close_listening(self) -> None:
        for each in self._listening:
            each.close()

    def _refuse(self, peer: Peer, reason: str) -> None:
        assert self._loop is not None
        log.debug("%s: refused: %s", peer.address, reason)
        self.refused += 1
        if self._loop.time() >= self._log_refusals_at_s:
            log.warning("refused %d connections to the control channel", self.refused - self._refusals_logged)
            self._refusals_logged = self.refused
            self._log_refusals_at_s = self._loop.time() + REFUSALS_EVERY_S

    # --- what peers tell, on the same thread ------------------------------------------------------------------------

    def proven(self, peer: Peer) -> None:
        """It knows the secret."""
        self._unproven.pop(peer, None)

    def heard(self, peer: Peer, message: Any, asks: int) -> None:
        """It sent a message."""
        self._guarded(self._on_message, peer, message, asks)

    def _gone(self, peer: Peer) -> None:
        del self._peers[peer]
        self._unproven.pop(peer, None)
        if peer.is_proven:
            self._guarded(self._on_closed, peer, peer.reason)
        if self._stopping and not self._peers:
            self._end()

    def _guarded(self, call: Callable[..., None], *arguments: Any) -> None:
        """What a callback lets out is a bug of ours. asyncio would only log it, and go on without the message."""
        try:
            call(*arguments)
        except BaseException as exc:  # noqa: BLE001 - handed on to whoever is told of the thread's death
            self._end(exc if isinstance(exc, Exception) else RuntimeError(repr(exc)))


def _trouble(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What asyncio cannot tell anybody, such as that there are no more file descriptors for a new connection."""
    log.warning("control channel: %s: %r", context.get("message"), context.get("exception"))


def listening(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Sockets for these addresses of this host, all with one port; for none: one for all of them.

    Raises:
        ChannelBroken: not possible.
    """
    try:
        if not hosts:
            return [_everywhere(port)]
        sockets: list[socket.socket] = []
        for host in hosts:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            chosen = sockets[0].getsockname()[1] if sockets else port
            sockets.append(socket.create_server((host, chosen), family=family, backlog=BACKLOG))
        return sockets
    except OSError as exc:
        where = ", ".join(hosts) or "all addresses of this host"
        raise ChannelBroken(
            f"the control channel cannot listen at {where}, port {port or 'any'}: {exc.strerror or exc}. Set "
            "coordinatorPort to a free port, and coordinatorHost to an address of the driver's host",
            port=port,
        ) from exc


def _everywhere(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
        except OSError:  # compiled in, and switched off
            pass
    return socket.create_server(("", port), backlog=BACKLOG)
