"""An executor's end of the control channel: one connection to the stream reader.

Runs in: agents, tasks. Deliberately absent: threads, and reconnecting. A connection that has ended stays ended; the
caller decides whether to open another :class:`ChannelClient`, and for how long to try.
"""

import contextlib
import random
import select
import socket
import threading
from collections.abc import Sequence
from time import monotonic
from typing import Any, Final

from spark_group_source.agents.channel.wire import (
    FIELD_BYTES,
    FRAME_BYTES_MAX,
    MAC_BYTES,
    Codec,
    HandshakeRefused,
    Secret,
    WireError,
    accept_greeting,
    new_challenge,
    receive_exactly,
    receive_frame,
    verify_server,
)
from spark_group_source.errors import ChannelBroken

Address = tuple[str, int]

CONNECT_S: Final = 1.0
"""Limit for connecting to one of several addresses. A lost packet is sent again after 1 s, by the next attempt."""
HANDSHAKE_S: Final = 5.0
"""Limit for the two round trips of the handshake. The server may be busy, and another server may never answer."""
RETRY_S: Final = 0.5
"""Longest pause between two rounds over all addresses; the shortest one is half of it."""
SEND_S: Final = 10.0
"""Limit for sending or receiving one message. The server reads at once and completes the messages that it starts."""
USER_TIMEOUT_MS: Final = 30_000
"""TCP_USER_TIMEOUT: the system closes a connection whose peer does not acknowledge sent data for this long."""

SILENT_MAX: Final = 100
"""How many silent addresses a process remembers."""

_silent: set[Address] = set()
"""Addresses that did not answer the last attempt of this process: something accepts the connection, or drops it, and
the attempt takes all of the time."""


class ChannelClient:
    """One connection to the stream reader. Any thread may send; one thread receives.

    Args:
        addresses: addresses of the stream reader, the likeliest first. They are tried in turn, a name with all its
            addresses, until one answers or the time is over; last those that did not answer before.
        codec: the messages of the channel.
        secret: the run's.
        within_s: limit for connecting. Looking up a name may take longer.

    Raises:
        ChannelBroken: no address answered; the text names each address and its error. The field ``refused`` is true if
            nothing listens at any of them, or the stream reader of another run; names that cannot be resolved do not
            count.
    """

    def __init__(self, addresses: Sequence[Address], codec: Codec, secret: Secret, within_s: float) -> None:
        self._codec, self._secret = codec, secret
        self._sending, self._receiving = threading.Lock(), threading.RLock()
        self.end_reason: str | None = None
        """Why the connection ended; None while it is open."""
        self.address, self._socket = self._connect(addresses, within_s)
        self.sent_s = monotonic()
        """When the last message was sent, on the clock of ``time.monotonic``."""
        self._socket.settimeout(SEND_S)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def _connect(self, addresses: Sequence[Address], within_s: float) -> tuple[Address, socket.socket]:
        until_s = monotonic() + within_s
        errors: dict[Address, str] = {}
        refused: dict[Address, bool] = {}
        """Of the addresses that can be resolved: whether the last attempt was refused."""
        while True:
            for address in sorted(addresses, key=_silent.__contains__):
                had_time = monotonic() < until_s
                try:
                    found = self._connect_to(address, until_s)
                    _silent.discard(address)
                    return address, found
                except TimeoutError:  # the error of an earlier round says more
                    if had_time and len(_silent) < SILENT_MAX:
                        _silent.add(address)
                    errors.setdefault(address, "no answer in time")
                    refused[address] = False
                except (socket.gaierror, UnicodeError) as exc:  # UnicodeError: no possible name of a host
                    errors[address] = _text(exc)
                    refused.pop(address, None)
                except (OSError, HandshakeRefused, WireError) as exc:
                    errors[address] = _text(exc)
                    refused[address] = isinstance(exc, ConnectionRefusedError | HandshakeRefused)
            pause_s = random.uniform(RETRY_S / 2, RETRY_S)  # many clients that were turned away do not return together
            if monotonic() + pause_s >= until_s:
                break
            threading.Event().wait(pause_s)
        named = "; ".join(f"{host}:{port}: {errors[host, port]}" for host, port in addresses)
        raise ChannelBroken(
            f"the stream reader could not be reached within {within_s:.1f} s: {named or 'no address is known'}",
            waited_ms=int(within_s * 1000),
            refused=bool(refused) and all(refused.values()),
        )

    def _connect_to(self, address: Address, until_s: float) -> socket.socket:
        left_s = max(until_s - monotonic(), 0.001)
        connection = socket.create_connection(address, timeout=min(CONNECT_S, left_s))
        try:
            until_s = min(until_s, monotonic() + HANDSHAKE_S)
            challenge = new_challenge()
            greeting = receive_exactly(connection, 2 * FIELD_BYTES, until_s)
            handshake = accept_greeting(self._secret, greeting, challenge)
            connection.sendall(challenge + handshake.proof("client"))
            verify_server(handshake, receive_exactly(connection, FIELD_BYTES, until_s))
            self._incoming, self._outgoing = handshake.signer("server"), handshake.signer("client")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
        except BaseException:
            connection.close()
            raise
        return connection

    # --- messages ---------------------------------------------------------------------------------------------------

    def send(self, message: Any) -> bool:
        """Send a message within :data:`SEND_S`. Returns False if the connection has ended.

        Raises:
            WireError: the message is not one of the channel's.
        """
        return self._send(self._codec.encode(message))

    def _send(self, data: bytes) -> bool:
        try:
            with self._sending:
                if self.end_reason is not None:
                    return False
                self._socket.sendall(self._outgoing.sign(data))
                self.sent_s = monotonic()
        except OSError as exc:  # part of the frame may be sent: no further frame can follow
            self.close(_text(exc))
            return False
        return True

    def receive(self, within_s: float) -> Any:
        """The next message; None if none arrives in time. On one thread.

        Raises:
            ChannelBroken: the connection has ended.
        """
        with self._receiving:
            try:
                if self.end_reason is None and not self._poll.poll(max(0, int(within_s * 1000))):
                    return None
                if self.end_reason is None:
                    body = receive_frame(self._socket, FRAME_BYTES_MAX + MAC_BYTES, monotonic() + SEND_S)
                    return self._codec.decode(self._incoming.verify(body))
            except (OSError, WireError, ValueError) as exc:
                self.close(_text(exc))
        raise ChannelBroken(f"the control channel is closed: {self.end_reason}")

    def request(self, message: Any, within_s: float) -> Any:
        """Send a request and return the next message, which is its response. On the thread that receives.

        A connection has one open request at most: without a response in time the connection is closed, because a late
        one would be taken for the response to the next request. The other end sends nothing else over it.

        Raises:
            ChannelBroken: no response arrived in time, or the connection has ended.
            WireError: the message is not one of the channel's; the connection stays open.
        """
        until_s = monotonic() + within_s
        data = self._codec.encode(message)
        try:
            self._send(data)
            response = self.receive(until_s - monotonic())
        except BaseException:
            self.close("a request was interrupted")
            raise
        if response is None:
            self.close("no answer in time")
            raise ChannelBroken(f"no answer within {within_s:.1f} s", waited_ms=int(within_s * 1000))
        return response

    def close(self, reason: str = "closed by this side") -> None:
        """Close the connection; any thread."""
        with contextlib.suppress(OSError):
            self.end_reason = self.end_reason or reason
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that receives
        # Not while that thread is about to poll: the number of a closed socket may already belong to another file.
        with self._receiving:
            self._socket.close()


def _text(exc: BaseException) -> str:
    if isinstance(exc, TimeoutError):
        return "no answer in time"
    return exc.strerror or str(exc) if isinstance(exc, OSError) else str(exc)
