"""What can happen to a group, and what the machine orders in answer: frozen values, one class per thing.

Runs in: the stream reader, tests. Deliberately absent: behaviour.

A *slot* is one member of ours, numbered from 0; a *client* counts the consumers that a slot has had, so that a late
event of a consumer that was replaced is told apart from its successor's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from spark_group_source.errors import SourceError
from spark_group_source.group.offsets import StreamOffset
from spark_group_source.model import TopicPartition

# --- events: what members report ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberEvent:
    """Something that the consumer number ``client`` of a slot met."""

    slot: int
    client: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned(MemberEvent):
    """Kafka gave these partitions, in addition to what the slot has. ``generation``: -1 where unknown."""

    partitions: tuple[TopicPartition, ...]
    generation: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Revoking(MemberEvent):
    """Kafka wants these back; the member waits in its callback until :class:`Release`.

    ``eager``: the slot gives up everything and joins anew (classic range and roundrobin).
    """

    partitions: tuple[TopicPartition, ...]
    eager: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost(MemberEvent):
    """These were taken away without asking (session or poll interval ran out): others may read them already."""

    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFailed(MemberEvent):
    """The consumer is dead; its slot can be founded again. Partitions that it had count as lost."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFenced(MemberEvent):
    """A newer process holds the slot's instance id: this run is a zombie and must stop."""

    reason: str


# --- events: what Spark says ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Born:
    """A stream without a past starts: its id, and the partitions that each topic has now."""

    stream: str
    known: Mapping[str, int]
    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Durable:
    """Sink and commit log have the batch that ends at ``offset``. The first one also names the stream."""

    offset: StreamOffset
    topics: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Spark runs a batch again that an earlier run planned: it is in flight until :class:`Durable` names it."""

    offset: StreamOffset
    topics: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The next batch was cut from :meth:`GroupMachine.plannable` and goes to Spark."""

    offset: StreamOffset


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """The query ends. ``leave``: the slots leave the group, else they stay for the next start."""

    leave: bool


# --- events: what Kafka answered ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A committed offset and the stream that its metadata names; ``stream`` is None for anyone else's commit."""

    offset: int
    stream: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedRead:
    """The group's committed offsets; None where there is none."""

    offsets: Mapping[TopicPartition, Committed | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartsResolved:
    """Where partitions without a committed offset start."""

    offsets: Mapping[TopicPartition, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupFailed:
    """A :class:`FetchCommitted` or :class:`ResolveStarts` was not answered; it is ordered again after a pause."""

    partitions: tuple[TopicPartition, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoDone:
    """These offsets are committed and a plain read shows them."""

    offsets: Mapping[TopicPartition, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoFailed:
    """Kafka refused the commit; the next one covers it.

    ``stale``: a member of ours is in another generation than when it was ordered, or in none. Nothing is wrong with
    that; what is still held is ordered again.
    """

    reason: str
    stale: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicsSeen:
    """The topics that the subscription stands for now (they change under a pattern)."""

    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A position had to change although nobody committed one: its records or its whole topic are gone."""

    offsets: Mapping[TopicPartition, int]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A deadline of the machine may have passed."""


Event = (
    Assigned
    | Revoking
    | Lost
    | MemberFailed
    | MemberFenced
    | Born
    | Durable
    | Replay
    | Planned
    | Closing
    | CommittedRead
    | StartsResolved
    | LookupFailed
    | EchoDone
    | EchoFailed
    | TopicsSeen
    | Moved
    | Tick
)

# --- commands -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Make the slot's consumer number ``client`` and subscribe it to ``topics``."""

    slot: int
    client: int
    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscribe:
    """Change the topics of the slot's consumer."""

    slot: int
    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Let the held revocation go."""

    slot: int
    client: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Close the slot's consumer; ``leave``: out of the group, else it stays a member until its session ends."""

    slot: int
    leave: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchCommitted:
    """Read the group's committed offsets, stable ones only (KIP-447)."""

    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolveStarts:
    """Find where these start: ``initial`` by ``startingOffsets``, ``new`` (added since) at their beginning."""

    initial: tuple[TopicPartition, ...]
    new: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """Commit these offsets to the group, all or none, then read them back.

    ``slots``: which member holds each partition now. The commit says so to the broker, which refuses it when that is no
    longer true: an order that was overtaken by a loss moves no offset back.
    """

    offsets: Mapping[TopicPartition, int]
    slots: Mapping[TopicPartition, int] = field(default_factory=dict, compare=False)
    stream: str
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    """One line for the log. ``warn``: someone should look at it."""

    text: str
    warn: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The run cannot go on: the next call of Spark raises this."""

    error: SourceError


Command = Join | Subscribe | Release | Leave | FetchCommitted | ResolveStarts | Echo | Say | Fail
