"""What the channel's tests say to each other."""

import queue
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from spark_group_source.channel.client import Client
from spark_group_source.channel.peer import Limits, Peer
from spark_group_source.channel.proof import Secret
from spark_group_source.channel.server import Server
from spark_group_source.channel.wire import Codec
from spark_group_source.model import OffsetRange, TopicPartition

SOON_S = 20.0
"""Far above what anything takes here, on any machine."""


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    number: int
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Everything:
    text: str = ""
    number: int = 0
    share: float = 0.0
    yes: bool = False
    maybe: int | None = None
    either: int | str | Inner = 0
    kind: Literal["fixed", "late"] = "late"
    colour: Colour = Colour.RED
    inner: Inner = Inner(number=1)
    ranges: tuple[OffsetRange, ...] = ()
    assigned: tuple[TopicPartition, ...] = ()
    held: frozenset[TopicPartition] = frozenset()
    names: frozenset[str] = frozenset()
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

    def __init__(self, *, limits: Limits | None = None, secret: Secret | None = None, codec: Codec = CODEC) -> None:
        self.secret = secret or Secret.new()
        self.opened: queue.Queue[Peer] = queue.Queue()
        self.heard: queue.Queue[tuple[Peer, Any]] = queue.Queue()
        self.closed: queue.Queue[tuple[Peer, str]] = queue.Queue()
        self.died: queue.Queue[BaseException] = queue.Queue()
        self.server = Server(
            codec,
            self.secret,
            on_open=self.opened.put,
            on_message=self._hear,
            on_closed=lambda peer, reason: self.closed.put((peer, reason)),
            died=self.died.put,
            hosts=["127.0.0.1"],
            limits=limits or Limits(),
        )
        self.port = self.server.start()

    def __enter__(self) -> "Listening":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.server.stop()
        assert self.died.empty()

    def _hear(self, peer: Peer, message: Any, asks: int) -> None:
        self.heard.put((peer, message))
        if asks:
            assert peer.answer(asks, Pong(number=message.number))

    def client(self, *, secret: Secret | None = None, codec: Codec = CODEC) -> "Connected":
        return Connected([("127.0.0.1", self.port)], secret or self.secret, codec)

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
    """A client that keeps what it is told."""

    def __init__(self, addresses: list[tuple[str, int]], secret: Secret, codec: Codec = CODEC) -> None:
        self.told: queue.Queue[tuple[Any, int]] = queue.Queue()
        self.gone: queue.Queue[str] = queue.Queue()
        super().__init__(
            addresses,
            codec,
            secret,
            on_message=lambda _, message, asks: self.told.put((message, asks)),
            on_closed=lambda _, reason: self.gone.put(reason),
        )

    def __enter__(self) -> "Connected":
        self.open(SOON_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def until_closed(connected: socket.socket) -> bytes:
    """All that comes until the other end closes."""
    found = b""
    try:
        while data := connected.recv(1 << 16):
            found += data
    except ConnectionError:
        pass
    return found
