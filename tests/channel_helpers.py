"""Messages, a server and a client for tests of the control channel."""

import queue
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from kafka_helpers import await_until

from spark_group_source.agents.channel.client import ChannelClient
from spark_group_source.agents.channel.server import ChannelLimits, ChannelPeer, ChannelServer
from spark_group_source.agents.channel.wire import Codec, Secret
from spark_group_source.errors import ChannelBroken
from spark_group_source.model import OffsetRange, TopicPartition

SOON_S = 600.0
"""Bound of a hang: far above what anything takes here, on any machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    number: int
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Everything:
    text: str = ""
    number: int = 0
    yes: bool = False
    maybe: int | None = None
    either: "Inner | Ping" = field(default_factory=lambda: Inner(number=0))
    inner: Inner = Inner(number=1)
    inners: tuple[Inner, ...] = ()
    ranges: tuple[OffsetRange, ...] = ()
    assigned: tuple[TopicPartition, ...] = ()
    offsets: Mapping[TopicPartition, int | None] = field(default_factory=dict)
    topics: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    number: int = 0
    load: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request; :class:`Pong` is the response."""

    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    number: int


CODEC = Codec([Everything, Ping, Question, Pong, Inner])


class RecordingServer:
    """A server that answers each Ping request with a Pong, and records messages and closed connections."""

    def __init__(
        self,
        *,
        limits: ChannelLimits | None = None,
        secret: Secret | None = None,
        codec: Codec = CODEC,
        hosts: Sequence[str] = ("127.0.0.1",),
        port: int = 0,
    ) -> None:
        self.secret = secret or Secret.new()
        self.received: queue.Queue[tuple[ChannelPeer, Any]] = queue.Queue()
        self.closed: queue.Queue[tuple[ChannelPeer, str]] = queue.Queue()
        self.died: queue.Queue[BaseException] = queue.Queue()
        self.server = ChannelServer(
            codec,
            self.secret,
            on_message=self._on_message,
            on_closed=lambda peer, reason: self.closed.put((peer, reason)),
            died=self.died.put,
            hosts=hosts,
            port=port,
            limits=limits or ChannelLimits(),
        )
        self.port = self.server.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.server.stop() or self.server.stop(SOON_S), "the server did not stop"
        assert self.died.empty()

    def _on_message(self, peer: ChannelPeer, message: Any) -> None:
        self.received.put((peer, message))
        if isinstance(message, Question):
            assert peer.send(Pong(number=message.number))

    def client(self, *, secret: Secret | None = None, within_s: float = SOON_S) -> "ScopedClient":
        return ScopedClient([("127.0.0.1", self.port)], secret or self.secret, within_s)

    def peer(self) -> ChannelPeer:
        """The peer whose message is the next in the record."""
        return self.received.get(timeout=SOON_S)[0]

    def raw(self) -> socket.socket:
        """A TCP connection without a handshake."""
        connected = socket.create_connection(("127.0.0.1", self.port), timeout=SOON_S)
        connected.settimeout(SOON_S)
        return connected

    def assert_serves(self) -> None:
        """A client with the secret is served."""
        with self.client() as client:
            assert client.request(Question(number=7), SOON_S) == Pong(number=7)


class ScopedClient(ChannelClient):
    """A client that closes at the end of its ``with`` block."""

    def __init__(self, addresses: list[tuple[str, int]], secret: Secret, within_s: float = SOON_S) -> None:
        super().__init__(addresses, CODEC, secret, within_s)

    def __enter__(self) -> "ScopedClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def next(self) -> Any:
        """The next message."""
        found = self.receive(SOON_S)
        assert found is not None
        return found

    def await_end(self) -> str:
        """Wait for the connection to end; returns why it did."""
        try:
            while self.receive(SOON_S):
                pass
        except ChannelBroken as exc:
            return str(exc)
        raise AssertionError("the connection is still open")


def await_refused(addresses: list[tuple[str, int]], *reasons: str, within_s: float = 1.0) -> ChannelBroken:
    """Connect with another secret until the error has these reasons; returns it. On a busy machine an address may not
    answer within the limit."""

    def refusal() -> ChannelBroken | None:
        try:
            ScopedClient(addresses, Secret.new(), within_s).close()
        except ChannelBroken as exc:
            return exc if all(reason in str(exc) for reason in reasons) else None
        raise AssertionError("the connection was accepted")

    found = await_until(refusal, SOON_S, what=f"a refusal because of {reasons}")
    assert found is not None
    return found


def until_closed(connected: socket.socket) -> bytes:
    """All bytes received until the peer closes."""
    found = b""
    try:
        while data := connected.recv(1 << 16):
            found += data
    except ConnectionError:
        pass
    return found
