"""One connection at the stream reader, from its first byte to its end.

Runs in: the stream reader, on the server's thread but for what says otherwise. Deliberately absent: waiting. Bytes come
in and go out as far as they can; everything else is a bound at which the peer is closed.
"""

import asyncio
import logging
import resource
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, Final, Protocol

from spark_group_source.channel.asking import Talking
from spark_group_source.channel.frames import Frames
from spark_group_source.channel.proof import (
    HANDSHAKE_BYTES_MAX,
    MAC_BYTES,
    Refused,
    Seal,
    Secret,
    ServerSide,
    challenge,
    refusal,
)
from spark_group_source.channel.wire import FRAME_BYTES_MAX, Codec, Envelope, WireError

log = logging.getLogger(__name__)

FRAMES_A_TURN: Final = 16
"""Messages of one peer that are handled before the others have a turn: about a millisecond."""
CONNECTIONS_MAX: Final = 10_000
"""Agents, and tasks that have no agent."""
UNPROVEN_MAX: Final = 256
"""A connection is unproven for two round trips, unless it has no business here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a peer may cost."""

    handshake_s: float = 5.0
    idle_s: float = 60.0
    """A client says every ten seconds that it is there. After this long without a word a connection is half of one."""
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


class Owner(Protocol):
    """What a peer needs of its server."""

    def came(self, peer: "Peer") -> str | None: ...
    def refused(self) -> None: ...
    def proven(self, peer: "Peer") -> None: ...
    def heard(self, peer: "Peer", message: Any, asks: int) -> None: ...
    def gone(self, peer: "Peer", reason: str, *, was_open: bool) -> None: ...


class Peer(Talking, asyncio.Protocol):
    """One connection. :meth:`send`, :meth:`answer`, :meth:`request` and :meth:`drop` are for any thread; sending never
    waits, and closes a peer that does not take what it is sent."""

    def __init__(self, codec: Codec, secret: Secret, limits: Limits, owner: Owner) -> None:
        super().__init__()
        self._codec, self._limits, self._owner = codec, limits, owner
        self._proof: ServerSide | None = ServerSide(secret, codec, challenge())
        self._in: Seal | None = None
        self._out: Seal | None = None
        self._frames = Frames(HANDSHAKE_BYTES_MAX)
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._came_s = self._heard_s = self._loop.time()
        self._lock = threading.Lock()
        self._outbox: deque[bytes] = deque()
        self._outbox_bytes = 0
        self._waking = self._closed = self._overfull = False
        self._closed_s = 0.0
        self._reason = ""
        self.address = "?"
        """Of the other end, for logs."""

    def __repr__(self) -> str:
        return f"Peer({self.address})"

    # --- for any thread ---------------------------------------------------------------------------------------------

    def request(self, message: Any, within_s: float) -> Any:
        assert threading.get_ident() != self._thread, "the thread that would take the answer must not wait for it"
        return super().request(message, within_s)

    def drop(self, reason: str) -> None:
        """Close the connection, behind what was sent."""
        try:
            self._loop.call_soon_threadsafe(self.close, reason)
        except RuntimeError:  # the server has ended, and so has this
            pass

    def _post(self, envelope: Envelope) -> bool:
        data = self._codec.encode(envelope)
        with self._lock:
            if self._closed or self._out is None:
                return False
            self._outbox.append(data)
            self._outbox_bytes += len(data)
            self._overfull = self._closed = full = self._outbox_bytes > self._limits.outbox_bytes
            wake, self._waking = not self._waking, True
        if wake:
            try:
                if threading.get_ident() == self._thread:
                    self._loop.call_soon(self._flush)
                else:
                    self._loop.call_soon_threadsafe(self._flush)
            except RuntimeError:  # the server has ended
                return False
        return not full

    # --- asyncio's calls --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) and self._proof is not None
        self._transport = transport
        name = transport.get_extra_info("peername")
        self.address = f"{name[0]}:{name[1]}" if name else "?"
        transport.set_write_buffer_limits(high=self._limits.outbox_bytes)
        unwanted = self._owner.came(self)
        if unwanted:
            self.close(unwanted, at_once=True)
        else:
            transport.write(self._proof.greeting())

    def data_received(self, data: bytes) -> None:
        if not self._closed:
            self._frames.feed(data)
            self._take()

    def connection_lost(self, exc: Exception | None) -> None:
        with self._lock:
            self._closed = True
            reason = self._reason = self._reason or (f"{type(exc).__name__}: {exc}" if exc else "closed by the peer")
        self._questions.end(reason)
        self._owner.gone(self, reason, was_open=self._out is not None)

    def pause_writing(self) -> None:
        """asyncio calls this when the transport has more than ``outbox_bytes`` that the peer does not take."""
        self.close(f"it did not take {self._limits.outbox_bytes} bytes that it was sent", at_once=True)

    # --- on the server's thread -------------------------------------------------------------------------------------

    def close(self, reason: str, *, at_once: bool = False) -> None:
        """End the connection, behind what was sent or at once."""
        if self._transport is None:
            return
        with self._lock:
            self._closed = True
            self._reason = self._reason or reason
        self._closed_s = self._closed_s or self._loop.time()
        if at_once:
            self._transport.abort()
        elif not self._transport.is_closing():
            self._write_out()
            # Not close(): what is still on its way here would make the system throw away what is on its way there. The
            # other end closes when it has read this, or look_at_deadlines does.
            try:
                self._transport.write_eof()
            except OSError:  # it is gone already, and connection_lost is on its way
                self._transport.abort()

    def look_at_deadlines(self) -> None:
        now_s = self._loop.time()
        if self._closed_s:
            if now_s - self._closed_s > self._limits.handshake_s:
                self.close("", at_once=True)  # it does not take the end of what it was sent
        elif self._out is None:
            if now_s - self._came_s > self._limits.handshake_s:
                self._refuse(f"no proof within {self._limits.handshake_s:.0f} s")
        elif now_s - self._heard_s > self._limits.idle_s:
            self.close(f"it said nothing for {self._limits.idle_s:.0f} s", at_once=True)

    def _take(self) -> None:
        """Handle what has come, up to :data:`FRAMES_A_TURN`; then the other peers, and then the rest."""
        assert self._transport is not None
        try:
            for _ in range(FRAMES_A_TURN):
                if self._closed or (body := self._frames.next()) is None:
                    return
                if self._in is None:
                    self._prove(body)
                elif data := self._in.open(body):
                    self._hear(self._codec.decode(data))
                else:  # only to say that it is still there
                    self._heard_s = self._loop.time()
        except Refused as exc:
            self._refuse(str(exc))
        except WireError as exc:
            if self._out is None:
                self._refuse(str(exc))
            else:
                log.warning("%s: closed: %s", self.address, exc)
                self.close(str(exc), at_once=True)
        else:
            self._transport.pause_reading()
            self._loop.call_soon(self._take_again)

    def _take_again(self) -> None:
        assert self._transport is not None
        self._transport.resume_reading()
        if not self._closed:
            self._take()

    def _prove(self, body: bytes) -> None:
        assert self._proof is not None and self._transport is not None
        welcome = self._proof.welcome(body)
        self._transport.write(welcome)
        self._in, out = self._proof.seal("client"), self._proof.seal("server")
        self._proof = None
        self._frames.bytes_max = FRAME_BYTES_MAX + MAC_BYTES
        with self._lock:
            self._out = out
        self._heard_s = self._loop.time()
        self._owner.proven(self)

    def _hear(self, envelope: Envelope) -> None:
        self._heard_s = self._loop.time()
        if envelope.answers:
            self._questions.answered(envelope.answers, envelope.message)
        else:
            self._owner.heard(self, envelope.message, envelope.asks)

    def _refuse(self, reason: str) -> None:
        self._owner.refused()
        log.debug("%s: refused: %s", self.address, reason)
        assert self._transport is not None
        self._transport.write(refusal(reason))
        self.close(reason)

    def _flush(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if self._overfull:
            self.pause_writing()
        else:
            self._write_out()

    def _write_out(self) -> None:
        with self._lock:
            waiting, self._outbox = self._outbox, deque()
            self._outbox_bytes, self._waking = 0, False
            out = self._out
        if waiting and out is not None and self._transport is not None:
            self._transport.write(b"".join([out.close(data) for data in waiting]))
