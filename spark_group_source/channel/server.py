"""The stream reader's end of the control channel: one thread, one loop, any number of peers that cannot hurt it.

Runs in: the stream reader. Deliberately absent: what messages mean, and waiting: a peer that is slow, silent, damaged
or hostile is closed at a named bound, and until then costs the others nothing.
"""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from spark_group_source.channel.peer import Limits, Peer
from spark_group_source.channel.proof import Secret
from spark_group_source.channel.wire import Codec
from spark_group_source.errors import ChannelBroken

log = logging.getLogger(__name__)

START_S: Final = 10.0
STOP_S: Final = 3.0
SWEEP_S: Final = 0.5
"""How often deadlines of peers are looked at."""
REFUSALS_EVERY_S: Final = 60.0
"""Refused connections are one line of the log in this time, however many there are."""
BACKLOG: Final = 128
"""Connections that the system keeps until they are taken, and that are taken in one go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Connections: open ones, those of them that have not shown that they know the secret, and refused ones so far."""

    connections: int
    unproven: int
    refused: int


class Server:
    """Listens, and hands on what proven peers say.

    All callbacks come from the server's own thread: they must not wait. What leaves one of them ends the server.

    Args:
        codec, secret: the run's.
        on_open: a peer has shown that it knows the secret.
        on_message: peer, message, and the number to :meth:`Peer.answer` when it is a question, else 0.
        on_closed: a peer that was open is gone, and why. Once for each.
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
        on_open: Callable[[Peer], None],
        on_message: Callable[[Peer, Any, int], None],
        on_closed: Callable[[Peer, str], None],
        died: Callable[[BaseException], None],
        hosts: Sequence[str] = (),
        port: int = 0,
        limits: Limits | None = None,
    ) -> None:
        self._codec, self._secret = codec, secret
        self._on_open, self._on_message, self._on_closed, self._died = on_open, on_message, on_closed, died
        self._hosts, self._wanted_port = tuple(hosts), port
        self._limits = limits or Limits.of_this_process()
        self._listening: list[socket.socket] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._started = threading.Event()
        self._over: asyncio.Future[None] | None = None
        self._servers: list[asyncio.Server] = []
        self._stopping = False
        self._peers: set[Peer] = set()
        self._unproven: dict[Peer, None] = {}  # in the order in which they came
        self._refused = 0
        self._refused_since_log = 0
        self._log_refusals_at_s = 0.0

    # --- for any thread ---------------------------------------------------------------------------------------------

    def start(self, deadline_s: float = START_S) -> int:
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
        if not self._started.wait(deadline_s) or self._loop is None:
            raise ChannelBroken(f"the control channel did not start within {deadline_s:.0f} s")
        return port

    def stop(self, deadline_s: float = STOP_S) -> bool:
        """End it: what was sent goes out, within the deadline. Returns whether the thread ended."""
        if self._thread is None or self._loop is None:
            return True
        self._stopping = True
        try:
            self._loop.call_soon_threadsafe(self._shut, deadline_s / 2)
        except RuntimeError:  # it has ended already
            pass
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def counts(self) -> Counts:
        """As of now."""
        return Counts(connections=len(self._peers), unproven=len(self._unproven), refused=self._refused)

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
            self._servers.append(await loop.create_server(self._new_peer, sock=each, backlog=BACKLOG))
        sweeping = loop.create_task(self._sweep())
        sweeping.add_done_callback(lambda task: None if task.cancelled() else self._end(task.exception()))
        self._started.set()
        try:
            await self._over
        finally:
            sweeping.cancel()
            for server in self._servers:
                server.close()
            for peer in list(self._peers):
                peer.close("the stream reader ends", at_once=True)
            await asyncio.sleep(0)  # one round of the loop: aborted connections say so in it

    def _new_peer(self) -> Peer:
        return Peer(self._codec, self._secret, self._limits, self)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            for peer in list(self._peers):
                peer.look_at_deadlines()
            self._log_refusals()

    def _shut(self, flush_s: float) -> None:
        """Close every peer behind what was sent to it, and end when all are gone or the time is over."""
        assert self._loop is not None and self._over is not None
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

    def _log_refusals(self) -> None:
        assert self._loop is not None
        if self._refused_since_log and self._loop.time() >= self._log_refusals_at_s:
            log.warning("refused %d connections to the control channel", self._refused_since_log)
            self._refused_since_log = 0
            self._log_refusals_at_s = self._loop.time() + REFUSALS_EVERY_S

    # --- what peers tell, on the same thread ------------------------------------------------------------------------

    def came(self, peer: Peer) -> str | None:
        """A connection was made; returns why it is not wanted."""
        if self._stopping:
            return "the stream reader ends"
        if len(self._peers) >= self._limits.connections:
            self.refused()
            return f"{self._limits.connections} connections are open already"
        self._peers.add(peer)
        self._unproven[peer] = None
        if len(self._unproven) > self._limits.unproven:
            # The oldest one: whoever knows the secret needs two round trips, and is no longer among them by then.
            oldest = next(iter(self._unproven))
            del self._unproven[oldest]
            oldest.close("too many connections without a proof", at_once=True)
        return None

    def refused(self) -> None:
        self._refused += 1
        self._refused_since_log += 1

    def proven(self, peer: Peer) -> None:
        self._unproven.pop(peer, None)
        self._guarded(self._on_open, peer)

    def heard(self, peer: Peer, message: Any, asks: int) -> None:
        self._guarded(self._on_message, peer, message, asks)

    def gone(self, peer: Peer, reason: str, *, was_open: bool) -> None:
        self._peers.discard(peer)
        self._unproven.pop(peer, None)
        if was_open:
            self._guarded(self._on_closed, peer, reason)
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
