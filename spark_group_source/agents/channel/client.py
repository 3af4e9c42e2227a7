"""An executor's end of the control channel: one connection, from the first address that answers to its end.

Runs in: agents, tasks. Deliberately absent: threads, and connecting again. A connection that ended stays ended; the
caller knows whether to make another :class:`Client`, and for how long.
"""

import contextlib
import errno
import os
import select
import socket
import threading
from collections.abc import Sequence
from time import monotonic
from typing import Any, Final

from spark_group_source.agents.channel.codec import FRAME_BYTES_MAX, Codec, Envelope, WireError
from spark_group_source.agents.channel.frames import exactly, receive
from spark_group_source.agents.channel.handshake import (
    FIELD_BYTES,
    MAC_BYTES,
    Refused,
    Secret,
    challenge,
    check_welcome,
    greeted,
)
from spark_group_source.errors import ChannelBroken

Address = tuple[str, int]

CONNECT_S: Final = 1.0
"""For one address of several. A packet that got lost is sent again after a second, at the next try."""
HANDSHAKE_S: Final = 5.0
"""Two round trips, and a server that may be busy. What listens at an address may be something else, and mute."""
AGAIN_S: Final = 0.5
"""Between two rounds over all addresses."""
SEND_S: Final = 10.0
"""The server takes what it is sent at once, and sends what it began: in this time it would have been found dead."""
UNHEARD_MS: Final = 30_000
"""Until the system gives a connection up whose other end does not confirm what it was sent."""


class Client:
    """One connection to the stream reader. Any thread may send; one thread receives.

    Args:
        addresses: where the stream reader may be reached, the likeliest first. They are tried one after the other, a
            name with several addresses as all of them, again and again until the time is over.
        codec, secret: the run's.
        within_s: for that. A name is looked up first, which takes as long as this host's resolver does.

    Raises:
        ChannelBroken: none answered, and of each it says what happened. ``refused``: nothing listens at any.
    """

    def __init__(self, addresses: Sequence[Address], codec: Codec, secret: Secret, within_s: float) -> None:
        self._codec, self._secret = codec, secret
        self._sending, self._receiving = threading.Lock(), threading.RLock()
        self._asked = 0
        self.ended: str | None = None
        """Why it ended, if it has."""
        self.address, self._socket = self._connected(addresses, within_s)
        self.used_s = monotonic()
        """When something was sent last."""
        self._socket.settimeout(SEND_S)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def _connected(self, addresses: Sequence[Address], within_s: float) -> tuple[Address, socket.socket]:
        until_s = monotonic() + within_s
        failed: dict[Address, str] = {}
        while True:
            for address in addresses:
                try:
                    return address, self._tried(address, until_s)
                except TimeoutError:  # what it said in a former round says more
                    failed.setdefault(address, "no answer in time")
                except (OSError, Refused, WireError) as exc:
                    failed[address] = _text(exc)
            if monotonic() + AGAIN_S >= until_s:
                break
            threading.Event().wait(AGAIN_S)
        said = "; ".join(f"{host}:{port}: {failed[host, port]}" for host, port in addresses)
        raise ChannelBroken(
            f"the stream reader was not reached within {within_s:.1f} s: {said or 'it has no address'}",
            waited_ms=int(within_s * 1000),
            refused=bool(failed) and set(failed.values()) == {os.strerror(errno.ECONNREFUSED)},
        )

    def _tried(self, address: Address, until_s: float) -> socket.socket:
        left_s = max(until_s - monotonic(), 0.001)
        connected = socket.create_connection(address, timeout=min(CONNECT_S, left_s))
        try:
            until_s = min(until_s, monotonic() + HANDSHAKE_S)
            mine = challenge()
            hands = greeted(self._secret, exactly(connected, 2 * FIELD_BYTES, until_s), mine)
            connected.sendall(mine + hands.proof("client"))
            check_welcome(hands, exactly(connected, FIELD_BYTES, until_s))
            self._in, self._out = hands.seal("server"), hands.seal("client")
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNHEARD_MS)
        except BaseException:
            connected.close()
            raise
        return connected

    # --- talking ----------------------------------------------------------------------------------------------------

    def send(self, message: Any, *, asks: int = 0) -> bool:
        """Send a message; waits at most :data:`SEND_S`. False: the connection has ended.

        Raises:
            WireError: this is no message of the channel.
        """
        data = self._codec.encode(message, asks=asks)
        try:
            with self._sending:
                if self.ended is not None:
                    return False
                self._socket.sendall(self._out.close(data))
                self.used_s = monotonic()
        except OSError as exc:  # a part may be out: what follows would be nonsense to the other end
            self.close(_text(exc))
            return False
        return True

    def receive(self, within_s: float) -> Envelope | None:
        """The next message; None when none came in time. On one thread.

        Raises:
            ChannelBroken: the connection has ended.
        """
        with self._receiving:
            try:
                if self.ended is None and not self._poll.poll(max(0, int(within_s * 1000))):
                    return None
                if self.ended is None:
                    body = receive(self._socket, FRAME_BYTES_MAX + MAC_BYTES, monotonic() + SEND_S)
                    return self._codec.decode(self._in.open(body))
            except (OSError, WireError, ValueError) as exc:
                self.close(_text(exc))
        raise ChannelBroken(f"the control channel is closed: {self.ended}")

    def request(self, message: Any, within_s: float) -> Any:
        """Ask, and return the answer; on the thread that receives. Other messages are dropped meanwhile.

        Raises:
            ChannelBroken: none came in time, or the connection has ended.
        """
        until_s = monotonic() + within_s
        self._asked += 1
        self.send(message, asks=self._asked)
        while (left_s := until_s - monotonic()) > 0:
            found = self.receive(left_s)
            if found is not None and found.answers == self._asked:
                return found.message
        raise ChannelBroken(f"no answer within {within_s:.1f} s", waited_ms=int(within_s * 1000))

    def close(self, reason: str = "closed by this side") -> None:
        """End it; any thread."""
        with contextlib.suppress(OSError):
            self.ended = self.ended or reason
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that receives
        with self._receiving:  # which may be about to wait: the number of a closed socket is soon another file's
            self._socket.close()


def _text(exc: BaseException) -> str:
    if isinstance(exc, TimeoutError):
        return "no answer in time"
    return exc.strerror or str(exc) if isinstance(exc, OSError) else str(exc)
