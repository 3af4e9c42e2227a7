"""An executor's end of the control channel: one connection, from the first address that answers to its end.

Runs in: executor processes, tasks. Deliberately absent: connecting again. A connection that ended stays ended; whoever
wants another makes another :class:`Client`, and knows why and for how long.
"""

import errno
import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Final

from spark_group_source.channel.asking import Talking
from spark_group_source.channel.frames import Frames
from spark_group_source.channel.proof import (
    HANDSHAKE_BYTES_MAX,
    MAC_BYTES,
    ClientSide,
    Refused,
    Seal,
    Secret,
    challenge,
)
from spark_group_source.channel.wire import FRAME_BYTES_MAX, Codec, Envelope, WireError
from spark_group_source.errors import ChannelBroken

log = logging.getLogger(__name__)

Address = tuple[str, int]

STAGGER_S: Final = 0.2
"""An address that has not answered for so long gets company from the next one."""
CONNECT_S: Final = 5.0
"""After this long in one round an address swallows what is sent to it."""
HANDSHAKE_S: Final = 5.0
"""Two round trips, and a server that may be busy. What listens at an address may be something else, and mute."""
AGAIN_S: Final = 0.5
"""Between two rounds over all addresses."""
SEND_S: Final = 10.0
"""The server takes what it is sent at once; in this time it would have been found dead."""
KEEP_ALIVE_S: Final = 10.0
"""A connection on which nothing is said for this long says that it is still there."""
UNHEARD_MS: Final = 30_000
"""Until the system gives a connection up whose other end does not confirm what it was sent."""
RECEIVE_BYTES: Final = 1 << 16


class Client(Talking):
    """One connection to the stream reader. Any thread may call anything; sending waits at most :data:`SEND_S`.

    Args:
        addresses: where the stream reader may be reached, the likeliest first.
        codec, secret: the run's.
        on_message: this client, the message, and the number to :meth:`answer` when it is a question, else 0. Called on
            the client's own thread.
        on_closed: the connection ended, and why; once, after :meth:`open` had succeeded, whoever ended it.
        name: of the thread.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        codec: Codec,
        secret: Secret,
        *,
        on_message: Callable[["Client", Any, int], None],
        on_closed: Callable[["Client", str], None],
        name: str = "channel",
    ) -> None:
        super().__init__()
        self._addresses, self._codec, self._secret = tuple(addresses), codec, secret
        self._on_message, self._on_closed, self._name = on_message, on_closed, name
        self._socket: socket.socket | None = None
        self._in: Seal | None = None
        self._out: Seal | None = None
        self._frames = Frames(HANDSHAKE_BYTES_MAX)
        self._sending = threading.Lock()
        self._sent_s = 0.0
        self._ending = threading.Lock()
        self._ended: str | None = None
        self._thread: threading.Thread | None = None

    def open(self, within_s: float) -> Address:
        """Connect; returns the address that answered. All of them are tried, again and again until the time is over.

        A name among them is looked up first, which takes as long as this host's resolver does.

        Raises:
            ChannelBroken: none answered, and of each it says what happened; or :meth:`close` was called.
        """
        until_s = monotonic() + within_s
        met: dict[Address, str] = {}
        while True:
            if self._ended is not None:
                raise ChannelBroken(f"the control channel is closed: {self._ended}")
            found = self._round(until_s, met)
            if found is not None:
                return found
            left_s = until_s - monotonic()
            if left_s <= 0:
                told = "; ".join(
                    f"{host}:{port}: {met.get((host, port), 'not tried')}" for host, port in self._addresses
                )
                raise ChannelBroken(
                    f"the stream reader was not reached within {within_s:.1f} s: {told or 'it has no address'}",
                    waited_ms=int(within_s * 1000),
                    refused=bool(met) and set(met.values()) == {os.strerror(errno.ECONNREFUSED)},
                )
            threading.Event().wait(min(AGAIN_S, left_s))

    def request(self, message: Any, within_s: float) -> Any:
        assert threading.current_thread() is not self._thread, "the thread that reads the answer must not wait for it"
        assert self._socket is not None, "open() comes first"
        return super().request(message, within_s)

    def close(self) -> None:
        """End it."""
        self._end("closed by this side")

    @property
    def ended(self) -> str | None:
        """Why it ended, if it has."""
        return self._ended

    # --- connecting -------------------------------------------------------------------------------------------------

    def _round(self, until_s: float, met: dict[Address, str]) -> Address | None:
        """Try every address once, side by side; ``met`` gets what happened to those that failed."""
        with _Race(self._addresses, min(until_s, monotonic() + CONNECT_S), met) as race:
            while (won := race.next()) is not None:
                address, connected = won
                try:
                    self._prove(connected, min(HANDSHAKE_S, max(until_s - monotonic(), 0.001)))
                except (OSError, Refused, WireError) as exc:
                    _note(met, address, exc)
                    connected.close()
                else:
                    self._start(connected)
                    return address
        return None

    def _prove(self, connected: socket.socket, within_s: float) -> None:
        until_s = monotonic() + within_s
        frames = Frames(HANDSHAKE_BYTES_MAX)
        proof = ClientSide(self._secret, self._codec, challenge())
        connected.sendall(proof.answer(_one(connected, frames, until_s)))
        proof.check(_one(connected, frames, until_s))
        self._in, self._out, self._frames = proof.seal("server"), proof.seal("client"), frames
        frames.bytes_max = FRAME_BYTES_MAX + MAC_BYTES

    def _start(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNHEARD_MS)
        connected.settimeout(min(SEND_S, KEEP_ALIVE_S))
        with self._ending:
            if self._ended is not None:
                connected.close()
                raise ChannelBroken(f"the control channel is closed: {self._ended}")
            self._socket = connected
            self._sent_s = monotonic()
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as exc:
            self._socket = None
            connected.close()
            raise ChannelBroken(f"the control channel's thread cannot be started: {exc}") from exc

    # --- talking ----------------------------------------------------------------------------------------------------

    def _post(self, envelope: Envelope) -> bool:
        return self._put(self._codec.encode(envelope))

    def _put(self, data: bytes) -> bool:
        try:
            with self._sending:
                if self._ended is not None or self._socket is None or self._out is None:
                    return False
                self._socket.sendall(self._out.close(data))
                self._sent_s = monotonic()
        except OSError as exc:  # a part may be out: what follows would be nonsense to the other end
            self._end(_told(exc))
            return False
        return True

    def _run(self) -> None:
        try:
            reason = self._read()
        except WireError as exc:
            log.warning("control channel closed: %s", exc)
            reason = str(exc)
        except OSError as exc:
            reason = _told(exc)
        except BaseException as exc:  # what on_message let out
            log.exception("thread %s died", self._name)
            reason = f"{type(exc).__name__} in this process: {exc}"
        self._end(reason)

    def _read(self) -> str:
        assert self._socket is not None and self._in is not None
        while self._ended is None:
            while (body := self._frames.next()) is not None:
                message, asks, answers = self._codec.decode(self._in.open(body))
                if answers:
                    self._questions.answered(answers, message)
                else:
                    self._on_message(self, message, asks)
            if monotonic() - self._sent_s >= KEEP_ALIVE_S:
                self._put(b"")
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except TimeoutError:
                continue
            if not data:
                return "closed by the stream reader"
            self._frames.feed(data)
        return self._ended

    def _end(self, reason: str) -> None:
        with self._ending:
            if self._ended is not None:
                return
            self._ended = reason
        self._questions.end(reason)
        if self._socket is None:
            return
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
        except OSError:
            pass
        self._socket.close()
        self._on_closed(self, reason)


def _one(connected: socket.socket, frames: Frames, until_s: float) -> bytes:
    """One frame of the handshake."""
    while (body := frames.next()) is None:
        connected.settimeout(max(until_s - monotonic(), 0.001))
        data = connected.recv(RECEIVE_BYTES)
        if not data:
            raise ConnectionResetError("closed by the other end")
        frames.feed(data)
    return body


def _note(met: dict[Address, str], address: Address, exc: BaseException) -> None:
    """What an address said stays, also when the time is over before it says it again."""
    if isinstance(exc, TimeoutError):
        met.setdefault(address, _told(exc))
    else:
        met[address] = _told(exc)


def _told(exc: BaseException) -> str:
    if isinstance(exc, TimeoutError):
        return "no answer in time"
    if isinstance(exc, OSError):
        return exc.strerror or str(exc)
    return str(exc)


class _Race:
    """Connects to several addresses side by side, each a moment after the one before.

    A name with several addresses counts as all of them.
    """

    def __init__(self, addresses: Sequence[Address], until_s: float, met: dict[Address, str]) -> None:
        self._waiting = list(addresses)
        self._until_s, self._met = until_s, met
        self._selector = selectors.DefaultSelector()
        self._next_s = 0.0

    def __enter__(self) -> "_Race":
        return self

    def __exit__(self, *_: object) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def next(self) -> tuple[Address, socket.socket] | None:
        """The next one that is connected, or None when there is none left, or no time."""
        while True:
            now_s = monotonic()
            if self._waiting and (now_s >= self._next_s or not self._selector.get_map()):
                self._begin(self._waiting.pop(0))
                self._next_s = now_s + STAGGER_S
                continue
            running = self._selector.get_map()
            if not running or now_s >= self._until_s:
                for key in running.values():
                    _note(self._met, key.data, TimeoutError())
                return None
            wait_s = min(self._until_s, self._next_s if self._waiting else self._until_s) - now_s
            for key, _ in self._selector.select(max(wait_s, 0.0)):
                connected = key.fileobj
                assert isinstance(connected, socket.socket)
                self._selector.unregister(connected)
                error = connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if not error:
                    return key.data, connected
                connected.close()
                _note(self._met, key.data, OSError(error, os.strerror(error)))

    def _begin(self, address: Address) -> None:
        try:
            found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        except OSError as exc:
            _note(self._met, address, exc)
            return
        for family, kind, protocol, _, where in found:
            attempt = socket.socket(family, kind, protocol)
            attempt.setblocking(False)
            try:
                attempt.connect(where)
            except BlockingIOError:
                pass
            except OSError as exc:
                _note(self._met, address, exc)
                attempt.close()
                continue
            self._selector.register(attempt, selectors.EVENT_WRITE, address)
