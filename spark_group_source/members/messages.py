"""What the stream reader and an agent say to each other about members.

Runs in: the stream reader, agents. Deliberately absent: bytes, channels, behaviour. Frozen values, whose fields are
texts, numbers, tuples, mappings of partitions and each other, so that any codec can carry them.

An agent says :class:`Hello` on each new channel, and is answered by :class:`Welcome` or :class:`Dismissed`. Everything
about members goes in :class:`Told`, numbered (``link``): orders one way, reports the other way. Pings carry what was
heard, and are the signs of life that leases count.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from spark_group_source.group import events as ev
from spark_group_source.model import TopicPartition

# --- both ways ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One of the numbered messages."""

    number: int
    body: "Order | Report"


# --- an agent to the stream reader ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """On each new channel. ``host``: its own id; ``fresh``: it was never welcomed; ``heard``: the last order."""

    host: str
    executor: str
    name: str
    fresh: bool
    heard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """It lives. ``heard``: the last order that it has. ``stock``:
    what it has read ahead for each member that lives there."""

    heard: int
    stock: tuple[ev.Buffered, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bye:
    """It has closed its members and ends."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """What a member reports."""

    event: ev.Assigned | ev.Revoking | ev.Lost | ev.MemberFailed | ev.MemberFenced | ev.MemberEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Who a member is in the group now. ``member`` is empty while it is none; ``metadata``: the library's, in hex."""

    slot: int
    client: int
    generation: int
    member: str
    metadata: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The answer to :class:`Commit`. ``failure`` is empty, or one of ``stale``, ``denied`` and ``failed``."""

    ask: int
    slot: int
    client: int
    failure: str = ""
    reason: str = ""
    thrown_out: bool = False


Report = Reported | Known | Committed

# --- the stream reader to an agent ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """It is a host of this run. ``lease_ms``: how long each may be silent; ``heard``: the last report."""

    lease_ms: int
    heard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dismissed:
    """It is none of this run's hosts, or not any more: it closes its members and ends."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    """The answer to :class:`Ping`. ``heard``: the last report."""

    heard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Make a member."""

    join: ev.Join


@dataclass(frozen=True, slots=True, kw_only=True)
class Give:
    """An order to a member."""

    slot: int
    client: int
    order: ev.Release | ev.ReleaseAll | ev.Subscribe | ev.Leave


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Commit as this member, if it is still who it was (the fields of :class:`Known`)."""

    ask: int
    slot: int
    client: int
    generation: int
    member: str
    metadata: str
    offsets: Mapping[TopicPartition, int]
    notes: Mapping[TopicPartition, str]


Order = Start | Give | Commit

FromAgent = Hello | Ping | Bye | Told
ToAgent = Welcome | Dismissed | Pong | Told

TYPES: tuple[type, ...] = (
    *(Told, Hello, Ping, Bye, Reported, Known, Committed, ev.Buffered),
    *(Welcome, Dismissed, Pong, Start, Give, Commit),
    *(ev.Assigned, ev.Revoking, ev.Lost, ev.MemberFailed, ev.MemberFenced, ev.MemberEnded),
    *(ev.Join, ev.Release, ev.ReleaseAll, ev.Subscribe, ev.Leave),
)
"""All that a codec has to know."""
