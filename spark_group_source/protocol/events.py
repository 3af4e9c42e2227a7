"""What can happen to a stream and its group, and what is ordered in answer: frozen values, one class per thing.

Runs in: the stream reader, tests. Deliberately absent: behaviour. Three kinds: *events* come in through
:meth:`Run.handle`, *commands* are carried out by the shell at once, and a *step* tells the thread of Spark's call
what to do next.

A *slot* is one member of ours, numbered from 0; a *client* counts the consumers that a slot has had, so that a late
event of a consumer that was replaced is told apart from its successor's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from spark_group_source.errors import BrokerUnavailable, SourceError
from spark_group_source.model import OffsetRange, StartAt, TopicPartition
from spark_group_source.protocol.offsets import StreamOffset

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
    """The consumer is dead; its slot joins again. Partitions that it had count as lost."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFenced(MemberEvent):
    """Another client holds the slot's instance id, of a newer driver or of an older process that came back; or it may
    do so, because the member lost its membership or its thread stood still.

    ``seen``: the broker said so. False: it is only possible, so where nobody can tell, the slot joins again.
    """

    reason: str
    seen: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberEnded(MemberEvent):
    """The consumer is closed and its thread at its end, for whatever reason."""


# --- events: what the hosts of members do ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConnected:
    """An agent said hello: anew, or again because its channel was cut.

    ``host``: its own id, which nobody else has. ``fresh``: it was never admitted, by this run or another.
    """

    host: str
    executor: str
    name: str = ""
    fresh: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHeartbeat:
    """A sign of life: its lease begins anew."""

    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentDisconnected:
    """Its channel is cut. It may come back within its lease."""

    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEnded:
    """It ended, and said so; or it cannot be reached in a way that a new channel would mend."""

    host: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionsChecked:
    """Whether the brokers take this run's transactions. Only then members may live at agents: where transactions are
    refused for good, members commit, which they do on threads of this process alone."""

    allowed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffered:
    """What an agent has read ahead of one slot's partitions, as it says."""

    slot: int
    bytes: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchReported:
    """What an agent has read ahead, slot by slot."""

    host: str
    stock: tuple[Buffered, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReported:
    """What one try of a task of batch ``seq`` read: rows by partition, from its agent's memory and from brokers.

    ``lost``: what it skipped of its ranges, because it was gone; told only by a try that came to its end.
    """

    seq: int
    memory: Mapping[TopicPartition, int]
    brokers: Mapping[TopicPartition, int]
    lost: tuple[OffsetRange, ...]


# --- events: what Spark says ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Durable:
    """Sink and commit log have the batch that ends at ``offset``."""

    offset: StreamOffset


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The next batch was cut by :class:`Planner` and goes to Spark."""

    offset: StreamOffset


@dataclass(frozen=True, slots=True, kw_only=True)
class MembersClosing:
    """The members are closed now. ``leave``: the slots leave the group, else they stay for the next start."""

    leave: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NextBatchRequested:
    """Spark asks what comes after ``start``, which is durable.

    ``unlimited``: Trigger.Once, which takes all there is. ``drain``: somebody wants this run to plan no other batch.
    ``name``: the stream's id if it has none yet.
    """

    start: StreamOffset
    unlimited: bool = False
    drain: bool = False
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStarted:
    """Spark is about to read the batch that ends at ``offset``: one that was just planned, or a former run's."""

    offset: StreamOffset


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRequested:
    """Spark begins an AvailableNow run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRead:
    """An AvailableNow run ends where every partition ends now: the answer to :class:`ReadTarget`."""

    ends: Mapping[TopicPartition, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """Spark ends the run. ``durable``: number of the last batch that the sink says it has, if it says so; else -1."""

    durable: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class InternalFailure:
    """Something in this process failed in a way that no other event tells of: a thread, a question that was refused."""

    error: SourceError


# --- events: what Kafka answered ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A committed offset and what the note beside it says (:mod:`names`): ``stream`` is None for anyone else's."""

    offset: int
    stream: str | None = None
    seq: int = -1
    epoch: int = 0
    followed: bool = False
    cut: int | None = None
    at_ms: int | None = None
    """When it was committed, on the run's clock; None: the note does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedOffsetsRead:
    """The group's committed offsets; None where there is none. What was asked and is not in it was not answered.

    ``epoch``: the newest reset that any of the group's notes tells of; None if only what was asked was looked at.
    ``silent``: partitions that were asked for their notes alone, and not answered.
    """

    offsets: Mapping[TopicPartition, Committed | None]
    asked: tuple[TopicPartition, ...] = ()
    epoch: int | None = None
    silent: tuple[TopicPartition, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StartsResolved:
    """What the broker said to :class:`ResolveStarts`; None where no record is as young as the time that was asked for.

    What was asked and is not in it was not answered.
    """

    offsets: Mapping[TopicPartition, int | None]
    asked: tuple[TopicPartition, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupFailed:
    """A :class:`FetchCommittedOffsets` or :class:`ResolveStarts` failed; it is ordered again after a pause."""

    partitions: tuple[TopicPartition, ...]
    error: BrokerUnavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetsCommitted:
    """These offsets are committed and a plain read shows them.

    ``left``: the slots whose shares were left out because their member is not in the group at the moment, and what was
    said of that. Their offsets are ordered again.
    """

    offsets: Mapping[TopicPartition, int]
    left: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetCommitFailed:
    """Kafka refused the commit; the next one covers it.

    ``stale``: a member of ours is in another generation than when it was ordered, or in none. Nothing is wrong with
    that; what is still held is ordered again.
    """

    reason: str
    stale: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicsChanged:
    """The topics that the subscription stands for now (they change under a pattern)."""

    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NotReplaced:
    """The broker takes commits of this run's transactional id: whoever took the slot's place is an older process."""

    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacedUnclear:
    """Whether this run was replaced is not known. ``final``: nor will it be, where transactions are not allowed."""

    slot: int
    reason: str
    final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """A newer driver commits for this stream: the run is over."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicsListed:
    """The subscribed topics and how many partitions each has: the answer to :class:`ListTopics`."""

    topics: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDescribed:
    """The group as the broker describes it: the answer to :class:`DescribeGroup`.

    ``state``: Kafka's word in lower case. ``given``: by client id, what the group says each member has.
    """

    state: str
    given: Mapping[str, frozenset[TopicPartition]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEndsRead:
    """What the brokers said to :class:`ReadLogEnds`. Who is missing in it was not answered, or is not there.

    ``leader_epochs``: of the leaders that told the ends. ``epoch_ends``: None where a leader cannot say. ``topic_ids``:
    of the topics that were described; ``took_ms``: how long the questions took together.
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
    """The brokers did not answer the question of a step; the run says when it is asked again."""

    error: BrokerUnavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsMissing:
    """Positions that had to change because their records, or their whole topic, are gone.

    ``topics``: those that were made again; what is remembered of their other partitions is of the former ones.
    ``cut``: those of the partitions that go back to where their log was cut.
    """

    offsets: Mapping[TopicPartition, int]
    reason: str
    topics: tuple[str, ...] = ()
    cut: frozenset[TopicPartition] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A deadline of the run may have passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchBoundary:
    """Between two batches, before the next is planned: slots may go where they belong."""


MemberReport = Assigned | Revoking | Lost | MemberFailed | MemberFenced
AgentEvent = AgentConnected | AgentHeartbeat | AgentDisconnected | AgentEnded

GroupEvent = (
    MemberReport
    | MemberEnded
    | AgentEvent
    | TransactionsChecked
    | BatchBoundary
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
"""What changes slots, partitions or commits: the joint rules are looked at after it, and a run that has closed ignores
it."""

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
    | MembersClosing
    | InternalFailure
    | PrefetchReported
    | TaskReported
)
"""What Spark says and its thread was answered, how a run ends, and numbers."""

Event = GroupEvent | CallEvent
"""What a run takes in."""

# --- commands -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Make the slot's consumer number ``client`` and subscribe it to ``topics``.

    ``client_id`` and ``instance_id`` are its names in the group; no instance id makes a dynamic member. ``host``: the
    agent where it is to live; empty is the stream reader itself. ``takes``: the place may still be that of a member of
    this run that vanished, and is taken from it (KIP-848; a classic broker gives it to whoever joins last).
    """

    slot: int
    client: int
    topics: tuple[str, ...]
    client_id: str = ""
    instance_id: str | None = None
    host: str = ""
    takes: bool = False


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
class ReleaseAll(Release):
    """The same for a slot that gives up everything and joins anew (eager)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Close the slot's consumer; ``leave``: out of the group, else it stays a member until its session ends."""

    slot: int
    leave: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptAgent:
    """Tell an agent that it is one of this run's hosts: it may be asked to host members."""

    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DismissAgent:
    """Tell an agent, if it can be reached, to close its members and end."""

    host: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchCommittedOffsets:
    """Read the group's committed offsets, stable ones only (KIP-447).

    ``beside``: partitions that are read for their notes alone, which may tell of a reset.
    """

    partitions: tuple[TopicPartition, ...]
    beside: tuple[TopicPartition, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolveStarts:
    """Ask the broker for the offset that each of these words stands for."""

    starts: Mapping[TopicPartition, StartAt]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitOffsets:
    """Commit these offsets to the group, then read them back.

    ``slots``: which member holds each partition now. The commit says so to the broker, which refuses a share when that
    is no longer true: an order that was overtaken by a loss moves no offset back. ``followed``: partitions whose
    position came from a commit that no stream made. ``cut``: those that went back to where their log was cut, and where
    they stood before. These, ``stream``, ``seq`` and ``epoch`` go into the note beside it.
    """

    offsets: Mapping[TopicPartition, int]
    slots: Mapping[TopicPartition, int] = field(default_factory=dict, compare=False)
    stream: str
    seq: int
    epoch: int = 0
    followed: frozenset[TopicPartition] = frozenset()
    cut: Mapping[TopicPartition, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReplaced:
    """Ask the broker whether a newer driver has taken this stream over. Answered by :class:`NotReplaced`,
    :class:`Replaced` or :class:`ReplacedUnclear`. ``seen``: the broker said that another client has the place."""

    slot: int
    seen: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line for the log. ``warn``: someone should look at it."""

    text: str
    warn: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The run cannot go on: the next call of Spark raises this."""

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

# --- causes: what is noticed inside, for the tables of states ------------------------------------------------------


class StreamCreated:
    """A stream without a past has a name; its members join."""


class Replay:
    """The batch in flight is a former run's, which Spark runs again."""


class PositionsKnown:
    """The slots have their partitions, and these their positions, as far as the next batch waits for them."""


class GroupStable:
    """No assignment is on its way any more, or it was not worth asking."""


class GroupUnstable:
    """A bounded run has nothing to read, but the group was not at rest when it looked."""


class PauseEnded:
    """The pause before the next look is over, or there was no need for one."""


class NothingToRead:
    """Nothing, or not enough yet."""


class TargetReached:
    """A bounded run has read all that it was to read."""


class DrainRequested:
    """Somebody wants this run to plan no other batch."""


class AllCommitted:
    """Kafka has every position, or it did not take them in time."""


class ForeignCommit:
    """The committed offset of a partition stands under somebody else's name."""


class ResetDetected:
    """A commit shows a reset of the group that this run did not know of."""


class SlotMoves:
    """The slot's member closes where it is, to join from another host under the same name."""


class AgentLost:
    """The host of the slot's member is gone."""


class AgentStable:
    """An agent has stayed for long enough to be lent slots."""


class LeaseExpired:
    """An agent was not heard for as long as its lease."""


class AgentSuperseded:
    """A newer agent of the same executor has come."""


# --- steps: what the thread of Spark's call does next ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ListTopics:
    """List the subscribed topics; answer with :class:`TopicsListed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTarget:
    """Ask where every partition of the subscription ends now; answer with :class:`TargetRead`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Until any event was handled, or the time has come; then ask for the next step."""

    until_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeGroup:
    """Ask the broker who is in the group; answer with :class:`GroupDescribed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLogEnds:
    """Ask the brokers; answer with :class:`LogEndsRead`. The questions are asked in the order of the fields: topic ids
    that are read after the ends say that the ends are of that very topic.

    ``ends``: how far they may be read (the last stable offset under read_committed). ``log_ends``: where the log itself
    ends. ``firsts``: the first record that is left. ``epoch_ends``: where the records end that leaders of these epochs,
    or earlier ones, wrote.
    """

    ends: tuple[TopicPartition, ...] = ()
    epoch_ends: Mapping[TopicPartition, int] = field(default_factory=dict)
    topics: tuple[str, ...] = ()
    firsts: tuple[TopicPartition, ...] = ()
    log_ends: tuple[TopicPartition, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseMembers:
    """Hand in :class:`MembersClosing` and wait, within the shell's bound, until the members have closed."""

    leave: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnOffset:
    """Hand this to Spark: the end of the next batch, or the start itself when there is nothing to read."""

    offset: StreamOffset


@dataclass(frozen=True, slots=True, kw_only=True)
class RaiseError:
    """The call fails with this."""

    error: SourceError


BrokerQuery = ListTopics | ReadTarget | DescribeGroup | ReadLogEnds
"""Steps that ask the brokers. Where they do not answer, :class:`RequestFailed` comes back."""

Step = BrokerQuery | Wait | CloseMembers | ReturnOffset | RaiseError
