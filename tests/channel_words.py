"""What the channel's tests say to each other."""

import queue
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from spark_group_source.agents.channel.client import Client
from spark_group_source.agents.channel.codec import Codec, Envelope
from spark_group_source.agents.channel.handshake import Secret
from spark_group_source.agents.channel.server import Limits, Peer, Server
from spark_group_source.errors import ChannelBroken
from spark_group_source.model import OffsetRange, TopicPartition

SOON_S = 20.0
"""Far above what anything takes here, on any machine."""


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
class Pong:
    number: int


CODEC = Codec([Everything, Ping, Pong, Inner])


class Listening:
    """A server that answers each Ping with its Pong, and keeps all that it is told."""

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        secret: Secret | None = None,
        codec: Codec = CODEC,
        hosts: Sequence[str] = ("127.0.0.1",),
        port: int = 0,
    ) -> None:
        self.secret = secret or Secret.new()
        self.heard: queue.Queue[tuple[Peer, Any]] = queue.Queue()
        self.closed: queue.Queue[tuple[Peer, str]] = queue.Queue()
        self.died: queue.Queue[BaseException] = queue.Queue()
        self.server = Server(
            codec,
            self.secret,
            on_message=self._hear,
            on_closed=lambda peer, reason: self.closed.put((peer, reason)),
            died=self.died.put,
            hosts=hosts,
            port=port,
            limits=limits or Limits(),
        )
        self.port = self.server.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.server.stop()
        assert self.died.empty()

    def _hear(self, peer: Peer, message: Any, asks: int) -> None:
        self.heard.put((peer, message))
        if asks:
            assert peer.send(Pong(number=message.number), answers=asks)

    def client(self, *, secret: Secret | None = None, within_s: float = SOON_S) -> "Connected":
        return Connected([("127.0.0.1", self.port)], secret or self.secret, within_s)

    def peer(self) -> Peer:
        """Of the client that sent something first."""
        return self.heard.get(timeout=SOON_S)[0]

    def raw(self) -> socket.socket:
        """A connection of somebody who speaks another language."""
        connected = socket.create_connection(("127.0.0.1", self.port), timeout=SOON_S)
        connected.settimeout(SOON_S)
        return connected

    def serves(self) -> None:
        """Somebody with the secret is served."""
        with self.client() as client:
            assert client.request(Ping(number=7), SOON_S) == Pong(number=7)


class Connected(Client):
    """A client as a test uses it."""

    def __init__(self, addresses: list[tuple[str, int]], secret: Secret, within_s: float = SOON_S) -> None:
        super().__init__(addresses, CODEC, secret, within_s)

    def __enter__(self) -> "Connected":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def next(self) -> Envelope:
        """The next message."""
        found = self.receive(SOON_S)
        assert found is not None
        return found

    def gone(self) -> str:
        """Why the connection ended, which it has or will."""
        try:
            while self.receive(SOON_S):
                pass
        except ChannelBroken as exc:
            return str(exc)
        raise AssertionError("it is still open")


def until_closed(connected: socket.socket) -> bytes:
    """All that comes until the other end closes."""
    found = b""
    try:
        while data := connected.recv(1 << 16):
            found += data
    except ConnectionError:
        pass
    return found
