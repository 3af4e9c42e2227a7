"""The vocabulary of the protocol: events, commands and steps, as frozen values with one class each.

Runs in: the stream reader, tests. Deliberately absent: behaviour.

An *event* enters through :meth:`Run.handle`; :class:`Durable`, :class:`Planned` and :class:`RecordsMissing` are what
the run concludes from other events, and applies to itself. A *command* is the run's order to the coordinator, which
executes it at once. A *step* is what the thread of Spark's call does next (:meth:`Run.proceed`).

A *slot* is one group member of this run, numbered from 0. ``client`` counts the consumers that a slot has had: a late
event of a replaced consumer has a lower number than its successor.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from spark_group_source.errors import BrokerUnavailable, SourceError
from spark_group_source.model import StartAt, TaskCounts, TopicPartition
from spark_group_source.protocol.offsets import BatchKey, StreamOffset

# --- events: members --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberEvent:
    """An event of a slot's consumer number ``client``."""

    slot: int
    client: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned(MemberEvent):
    """Kafka assigned these partitions, in addition to those that the slot has. ``generation``: -1 where unknown."""

    partitions: tuple[TopicPartition, ...]
    generation: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Revoking(MemberEvent):
    """Kafka revokes these partitions. The member waits in its callback until :class:`Release`.

    ``eager``: the slot gives up all its partitions and rejoins (the classic assignors range and roundrobin).
    """

    partitions: tuple[TopicPartition, ...]
    eager: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost(MemberEvent):
    """The member lost these partitions without a revocation, because its session or poll interval expired. Another
    consumer may read them already."""

    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFailed(MemberEvent):
    """The consumer failed for good. Its partitions count as lost, and its slot joins again.

    ``group_full``: the group has as many members as the brokers allow.
    """

    reason: str
    group_full: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFenced(MemberEvent):
    """Another client uses the slot's instance id: that of a newer driver, or of an older process that came back.

    ``confirmed``: the broker reported it. False: it is only possible, because the member lost its membership or its
    thread was stalled; if the broker cannot confirm it, the slot joins again.
    """

    reason: str
    confirmed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberEnded(MemberEvent):
    """The consumer is closed and its thread has ended, for any reason."""


# --- events: agents and tasks -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConnected:
    """An agent connected, for the first time or again after its channel was closed.

    ``agent``: its unique id. ``executor``: the name of its executor in claims. ``name``: for logs and client ids.
    ``fresh``: no run has accepted it before.
    """

    agent: str
    executor: str
    name: str = ""
    fresh: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHeartbeat:
    """An agent sent a heartbeat: its lease starts again."""

    agent: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentDisconnected:
    """The channel to an agent is closed. It may reconnect within its lease."""

    agent: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEnded:
    """An agent ended and reported it, or it is unreachable in a way that a new channel does not fix."""

    agent: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionsChecked:
    """Whether the brokers accept this run's transactions. Members are placed on agents only then: without transactions
    each member commits its own offsets, which only members in the stream reader can do."""

    allowed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffered:
    """What an agent has prefetched of one slot's partitions."""

    slot: int
    bytes: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchReported:
    """What an agent has prefetched, by slot."""

    agent: str
    buffered: tuple[Buffered, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReported:
    """What one attempt of a task of batch ``seq`` read."""

    seq: int
    counts: TaskCounts


# --- events: Spark ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Durable:
    """The sink has the batch that ends at ``offset``. If the sink has marked it, Spark's commit log may follow."""

    offset: StreamOffset


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The next batch was planned by :class:`Planner`, and Spark receives it."""

    offset: StreamOffset


@dataclass(frozen=True, slots=True, kw_only=True)
class MembersClosing:
    """The members close now. ``leave``: they leave the group; otherwise they stay members for the next start."""

    leave: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NextBatchRequested:
    """Spark calls ``latestOffset`` with ``start``, which is durable.

    ``unlimited``: the trigger is Once, which reads everything available. ``new_stream``: the stream id if there is none
    yet. ``void_by``: the number of the reset because of which the sink wrote nothing of the batch that ends at
    ``start``; 0 if the sink reported none. ``committed``: the batch after which a run of the stream
    stopped with all offsets committed; None or another batch: Kafka may not have what is durable. ``after_batch``: the
    query has run a batch since the last call, maybe of other sources alone.
    """

    start: StreamOffset
    unlimited: bool = False
    new_stream: str
    void_by: int = 0
    committed: BatchKey | None = None
    after_batch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStarted:
    """Spark starts to read the batch that ends at ``offset``: the planned batch, or one of an earlier run."""

    offset: StreamOffset


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRequested:
    """Spark starts an AvailableNow run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRead:
    """The current end of every partition, at which an AvailableNow run ends: the response to :class:`ReadTarget`."""

    ends: Mapping[TopicPartition, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """Spark stops the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMarked:
    """The sink has marked this batch of the stream as durable, maybe in an earlier run."""

    batch: BatchKey


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested:
    """A drain of this run was requested: it plans no more batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InternalFailure:
    """A failure in this process that no other event reports: a thread failed, or a request was refused."""

    error: SourceError


# --- events: Kafka's responses ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A committed offset, its leader epoch (KIP-320), and the note in its metadata (:mod:`identifiers`).

    ``stream``: the id of the stream that committed it; None for a foreign commit. ``leader_epoch``: None if it was
    committed without one. The other fields are those of :class:`identifiers.Note`.
    """

    offset: int
    leader_epoch: int | None = None
    stream: str | None = None
    seq: int = -1
    reset_number: int = 0
    followed: bool = False
    started: bool = False
    truncated_after: int | None = None
    at_ms: int | None = None
    """When it was committed, on the run's clock; None if the note has no time."""
    topic_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedOffsetsRead:
    """The group's committed offsets: the response to :class:`FetchCommittedOffsets`.

    ``offsets``: None where the group has no committed offset; requested partitions that are missing got no answer.
    ``reset_number``: the highest reset number in any of the group's notes; None if only ``requested`` was read.
    ``unanswered``: partitions that were requested for their notes alone and got no answer. ``topic_ids``: of the
    requested topics, read before the offsets: a position may be one in a newer topic, which the next check finds, but
    not in an older one. Topics that do not exist are missing.
    """

    offsets: Mapping[TopicPartition, Committed | None]
    requested: tuple[TopicPartition, ...] = ()
    reset_number: int | None = None
    unanswered: tuple[TopicPartition, ...] = ()
    topic_ids: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartsResolved:
    """The offsets of the starting options: the response to :class:`ResolveStarts`.

    ``offsets``: None where no record is as young as the requested time; requested partitions that are missing got no
    answer. ``leader_epochs``: of those that start at the end of the log, where leaders returned them.
    """

    offsets: Mapping[TopicPartition, int | None]
    requested: tuple[TopicPartition, ...] = ()
    leader_epochs: Mapping[TopicPartition, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupFailed:
    """A :class:`FetchCommittedOffsets` failed; it is ordered again after a pause. A :class:`ResolveStarts` that fails
    leads to :class:`StartsResolved` without these partitions."""

    partitions: tuple[TopicPartition, ...]
    error: BrokerUnavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetsCommitted:
    """These offsets are committed, and a plain read shows them.

    ``left_out``: slots whose offsets are not committed, with the reason: their member is in another generation than
    when the commit was ordered, or in none, or has released partitions since; or the slot has no member. That is normal
    during a rebalance, and may concern all slots of the commit. The offsets of partitions that are still held are
    committed later.
    """

    offsets: Mapping[TopicPartition, int]
    left_out: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetCommitFailed:
    """Kafka refused the commit; the next one includes its offsets."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicsChanged:
    """The topics that a broker listed for a subscription by pattern. A broker may not know all topics for a moment."""

    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NotReplaced:
    """The broker accepts commits of this run's transactional id: the other client with the slot's instance id is an
    older process."""

    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacedUnclear:
    """It is unknown whether a newer driver replaced this run."""

    slot: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """A newer driver commits for this stream, or may do so and cannot be detected: this run must stop."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicsListed:
    """The subscribed topics and their partition counts: the response to :class:`ListTopics`."""

    topics: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDescribed:
    """The group as the broker describes it: the response to :class:`DescribeGroup`.

    ``state``: Kafka's group state in lower case. ``assigned``: the assigned partitions of each member, by client id.
    ``took_ms``: duration of the request.
    """

    state: str
    assigned: Mapping[str, frozenset[TopicPartition]]
    took_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEndsRead:
    """The response to :class:`ReadLogEnds`. Partitions that are missing got no answer or do not exist.

    ``leader_epochs``: those of the leaders that reported ``ends``. ``epoch_ends``: None where the leader does not know.
    ``firsts``, ``log_ends``: as in :class:`ReadLogEnds`. ``topic_ids``: of the topics that were described. ``took_ms``:
    duration of all requests together.
    """

    ends: Mapping[TopicPartition, int] = field(default_factory=dict)
    leader_epochs: Mapping[TopicPartition, int] = field(default_factory=dict)
    epoch_ends: Mapping[TopicPartition, int | None] = field(default_factory=dict)
    firsts: Mapping[TopicPartition, int] = field(default_factory=dict)
    log_ends: Mapping[TopicPartition, int] = field(default_factory=dict)
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    took_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailed:
    """The brokers did not answer the request of a step. The run decides when it is repeated."""

    error: BrokerUnavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsMissing:
    """Positions that must change because their records, or their whole topic, are gone.

    ``offsets``: the new positions. ``topics``: recreated topics; what is remembered of their other partitions belongs
    to the deleted ones. ``truncated``: the partitions that go back to the point where their log was truncated, and the
    last leader epoch that was known before.
    """

    offsets: Mapping[TopicPartition, int]
    reason: str
    topics: tuple[str, ...] = ()
    truncated: Mapping[TopicPartition, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A deadline of the run may have passed (:meth:`Run.next_deadline_ms`)."""


MemberReport = Assigned | Revoking | Lost | MemberFailed | MemberFenced
AgentEvent = AgentConnected | AgentHeartbeat | AgentDisconnected | AgentEnded

GroupEvent = (
    MemberReport
    | MemberEnded
    | AgentEvent
    | TransactionsChecked
    | Durable
    | Planned
    | CommittedOffsetsRead
    | StartsResolved
    | LookupFailed
    | OffsetsCommitted
    | OffsetCommitFailed
    | TopicsChanged
    | NotReplaced
    | ReplacedUnclear
    | Replaced
    | RecordsMissing
    | Tick
)
"""Events that change slots, partitions or commits. The joint rules run after each, except heartbeats of
agents; a closed run ignores them."""

CallEvent = (
    NextBatchRequested
    | BatchStarted
    | TargetRequested
    | TargetRead
    | TopicsListed
    | GroupDescribed
    | LogEndsRead
    | RequestFailed
    | StopRequested
    | BatchMarked
    | DrainRequested
    | MembersClosing
    | InternalFailure
    | PrefetchReported
    | TaskReported
)
"""Events of Spark's calls, responses to their requests, the end of a run, and counters."""

Event = GroupEvent | CallEvent
"""The events that a run handles."""

# --- commands -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Create the slot's consumer number ``client`` and subscribe it to ``topics``.

    ``client_id`` and ``instance_id`` are its names in the group; without an instance id it is a dynamic member.
    ``agent``: the agent on which it is placed; empty for the stream reader itself. ``takes_over``: the instance id may
    still belong to a vanished member of this run and is taken over (KIP-848; a classic broker always gives it to the
    client that joined last).
    """

    slot: int
    client: int
    topics: tuple[str, ...]
    client_id: str = ""
    instance_id: str | None = None
    agent: str = ""
    takes_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscribe:
    """Change the topics of the slot's consumer."""

    slot: int
    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Release the held revocation."""

    slot: int
    client: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Close the slot's consumer. ``leave``: it leaves the group; otherwise it stays a member until its session ends."""

    slot: int
    leave: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptAgent:
    """Notify an agent that this run accepted it: members may be placed on it."""

    agent: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DismissAgent:
    """Request an agent, if it is reachable, to close its members and end."""

    agent: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchCommittedOffsets:
    """Fetch the group's committed offsets, stable ones only (KIP-447).

    ``notes_only``: partitions that are fetched only for the reset numbers in their notes. ``topics``: their ids are
    read before the offsets, because none is known, or those in notes differ.
    """

    partitions: tuple[TopicPartition, ...]
    notes_only: tuple[TopicPartition, ...] = field(default=(), compare=False)
    topics: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolveStarts:
    """Look up the offset that each starting option stands for."""

    starts: Mapping[TopicPartition, StartAt]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitOffsets:
    """Commit these offsets to the group, then read them back.

    ``slots``: the slot that holds each partition now. The commit names its member as of now, and what that member has
    given up or lost meanwhile is left out: brokers refuse a member of another generation, but do not check who holds a
    partition.
    ``followed``: partitions whose position came from a commit that no stream made. ``started``: those that start behind
    records that the group did not read. ``truncated_after``: partitions that went back because their log was truncated,
    and the last leader epoch that was known before. ``topic_ids``: those that the run knows. These, ``stream``, ``seq``
    and ``reset_number`` are written into the note. ``leader_epochs``: those of the offsets, where they are known
    (KIP-320).
    """

    offsets: Mapping[TopicPartition, int]
    slots: Mapping[TopicPartition, int] = field(default_factory=dict, compare=False)
    stream: str
    seq: int
    reset_number: int = 0
    followed: frozenset[TopicPartition] = frozenset()
    started: frozenset[TopicPartition] = frozenset()
    truncated_after: Mapping[TopicPartition, int] = field(default_factory=dict)
    leader_epochs: Mapping[TopicPartition, int] = field(default_factory=dict)
    topic_ids: Mapping[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReplaced:
    """Check at the broker whether a newer driver runs this stream; the response is :class:`NotReplaced`,
    :class:`Replaced` or :class:`ReplacedUnclear`. ``confirmed``: the broker reported another client with the instance
    id."""

    slot: int
    confirmed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """Write one line to the log, without the group's name. ``warn``: at level WARNING."""

    text: str
    warn: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The run cannot continue: Spark's next call raises this."""

    error: SourceError


Command = (
    Join
    | Subscribe
    | Release
    | Leave
    | AcceptAgent
    | DismissAgent
    | FetchCommittedOffsets
    | ResolveStarts
    | CommitOffsets
    | CheckReplaced
    | LogLine
    | Fail
)

# --- steps of the thread of Spark's call ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ListTopics:
    """List the subscribed topics; the response is :class:`TopicsListed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTarget:
    """Read the current end of every subscribed partition; the response is :class:`TargetRead`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Wait until any event was handled, or until ``until_ms`` on the run's clock; then get the next step."""

    until_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeGroup:
    """Describe the group at the broker; the response is :class:`GroupDescribed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLogEnds:
    """Read the log ends; the response is :class:`LogEndsRead`.

    The requests are sent in the order of the fields: topic ids that are read after the ends show that the ends belong
    to that very topic. ``ends``: up to where the partitions may be read (the last stable offset under read_committed).
    ``epoch_ends``: where the records of these leader epochs, or earlier ones, end. ``topics``: those to describe.
    ``firsts``: the first records that are left. ``log_ends``: the ends of the logs themselves.
    """

    ends: tuple[TopicPartition, ...] = ()
    epoch_ends: Mapping[TopicPartition, int] = field(default_factory=dict)
    topics: tuple[str, ...] = field(default=(), compare=False)
    firsts: tuple[TopicPartition, ...] = ()
    log_ends: tuple[TopicPartition, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseMembers:
    """Handle :class:`MembersClosing` with this ``leave``, then wait a bounded time until the members have closed."""

    leave: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnOffset:
    """Return this to Spark: the end of the next batch, or the start if there is nothing to read."""

    offset: StreamOffset


@dataclass(frozen=True, slots=True, kw_only=True)
class RaiseError:
    """Raise this from Spark's call."""

    error: SourceError


BrokerQuery = ListTopics | ReadTarget | DescribeGroup | ReadLogEnds
"""Steps that send requests to brokers. If these do not answer, the response is :class:`RequestFailed`."""

Step = BrokerQuery | Wait | CloseMembers | ReturnOffset | RaiseError
