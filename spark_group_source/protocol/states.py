"""The states of a run, a slot, a partition and an agent, and every allowed transition between them.

Runs in: the stream reader, tests. Deliberately absent: what is done on a transition (``run``, ``slots``,
``partitions``, ``placement``). The four tables are complete: a transition that is not in them raises
:class:`InvariantBroken`. The tables and diagrams of ``docs/states.md`` are rendered from them. A cause is an event or
a command (their classes in ``events``), or a :class:`Cause`.
"""

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from spark_group_source.errors import InvariantBroken
from spark_group_source.protocol import events as ev


class State(Enum):
    """A state. Hashed by identity: each member is a single object, the hash of ``Enum`` costs more than the rest of a
    transition, and a plan over 10,000 partitions makes 20,000 transitions."""

    __hash__ = object.__hash__


class RunState(State):
    """What the run does for Spark: the progress of a ``latestOffset`` call, or what Spark does with its result."""

    NEW = "new"  # no call yet
    TARGETING = "targeting"  # an AvailableNow run reads the current end of every partition: its target
    STARTING = "starting"  # lists the topics; then the stream id is known and the members join
    OPEN = "open"  # between two calls; every planned batch is durable
    GATHERING = "gathering"  # waits until the slots have their partitions and each partition has its position
    SETTLING = "settling"  # describes the group: an assignment may still be on its way
    PAUSING = "pausing"  # nothing to read: pauses before the log ends are read again
    FETCHING_ENDS = "fetching ends"  # reads how far the partitions can be read, and whether all records are still there
    PLANNED = "planned"  # Spark has the next batch and has not started to read it
    READING = "reading"  # Spark reads the batch and writes it to the sink
    DRAINING = "draining"  # plans no more batches: commits the last offsets
    DRAINED = "drained"  # all offsets are committed; waits until the query is stopped
    ENDING = "ending"  # a bounded run at its target: commits the last offsets, then the members leave
    STOPPING = "stopping"  # Spark stops the run: commits the last offsets, then the members close
    FAILED = "failed"  # Spark's next call raises the error
    CLOSED = "closed"  # the members are closed


class SlotState(State):
    """What the member of one slot does."""

    CLOSED = "closed"  # has no consumer
    JOINING = "joining"  # has a consumer and waits for an assignment
    ASSIGNED = "assigned"  # has an assignment, possibly an empty one
    REVOKING = "revoking"  # holds a revocation; heartbeats continue
    CHECKING = "checking"  # another client has its instance id: checks whether a newer driver runs this stream
    MOVING = "moving"  # its member closes at one place, and the next one joins at another


class PartitionState(State):
    """What this run knows and does about one partition."""

    UNASSIGNED = "unassigned"  # no slot of this run has it; its last position is remembered
    UNRESOLVED = "unresolved"  # assigned; its position is unknown and no lookup is on its way
    FETCHING = "fetching"  # the group's committed offset is being fetched
    RESOLVING = "resolving"  # the group has no committed offset: the starting options are being resolved
    ADOPTING = "adopting"  # Kafka lacks its position under this stream's name: that is committed first
    READY = "ready"  # the next batch may read it
    IN_FLIGHT = "in flight"  # the batch in flight reads it


class AgentState(State):
    """What this run knows about one agent."""

    NEW = "new"  # connected, and must stay connected for a while
    READY = "ready"  # slots may be placed on it
    DISCONNECTED = "disconnected"  # its channel is closed; it may reconnect within its lease
    ENDED = "ended"  # its slots are placed elsewhere; it is dismissed if it reconnects


class Cause(Enum):
    """A condition that the run detects itself: it causes a change of a state like an event or a command. Hashed like
    :class:`State`."""

    __hash__ = object.__hash__

    STREAM_CREATED = "StreamCreated"  # a new stream has its id; its members join
    REPLAY = "Replay"  # the batch in flight is one of an earlier run, which Spark runs again
    POSITIONS_KNOWN = "PositionsKnown"  # the slots have the partitions and positions that the next batch needs
    GROUP_STABLE = "GroupStable"  # no assignment is on its way any more, or the next batch does not need to wait for it
    GROUP_UNSTABLE = "GroupUnstable"  # a bounded run has nothing to read, but the group was rebalancing meanwhile
    PAUSE_ENDED = "PauseEnded"  # the pause before the log ends are read again is over, or was not needed
    NOTHING_TO_READ = "NothingToRead"  # there is nothing to read, or less than ``minOffsetsPerTrigger``
    TARGET_REACHED = "TargetReached"  # a bounded run has read up to its target
    ALL_COMMITTED = "AllCommitted"  # Kafka has every position, or did not accept them in time
    NOT_COMMITTED = "NotCommitted"  # the group has no committed offset of a partition that the run remembers
    FOREIGN_COMMIT = "ForeignCommit"  # another stream, an operator or a consumer committed the offset of a partition
    RESET_DETECTED = "ResetDetected"  # a note shows a reset of the group that this run did not know
    RECREATED_UNCHECKED = "RecreatedUnchecked"  # the partition's topic was recreated, and its position was not checked
    RELEASE_ALL = "ReleaseAll"  # the revocation is released, and the slot gives up all partitions and rejoins (eager)
    SLOT_MOVES = "SlotMoves"  # the slot's member closes at one place, to join at another under the same instance id
    AGENT_LOST = "AgentLost"  # the agent of the slot's member is gone
    AGENT_STABLE = "AgentStable"  # an agent has stayed connected long enough to get slots
    LEASE_EXPIRED = "LeaseExpired"  # an agent has not sent a heartbeat for as long as its lease
    AGENT_SUPERSEDED = "AgentSuperseded"  # a newer agent of the same executor connected


AnyCause = type | Cause
"""The class of an event or a command, or a condition."""

ENDED = frozenset({RunState.FAILED, RunState.STOPPING, RunState.CLOSED})
"""States in which the run plans no further batch and can only close."""

BEFORE_PLAN = (RunState.GATHERING, RunState.SETTLING, RunState.PAUSING, RunState.FETCHING_ENDS)
"""States of a call that has not planned its batch: a drain ends it without one."""

RUN: Mapping[tuple[RunState, AnyCause], RunState] = {
    (RunState.NEW, ev.TargetRequested): RunState.TARGETING,
    (RunState.TARGETING, ev.TargetRead): RunState.NEW,
    (RunState.NEW, ev.NextBatchRequested): RunState.STARTING,
    (RunState.NEW, ev.BatchStarted): RunState.STARTING,
    (RunState.STARTING, Cause.STREAM_CREATED): RunState.GATHERING,
    (RunState.STARTING, ev.Durable): RunState.GATHERING,
    (RunState.STARTING, Cause.REPLAY): RunState.READING,
    (RunState.OPEN, ev.NextBatchRequested): RunState.GATHERING,
    (RunState.GATHERING, Cause.POSITIONS_KNOWN): RunState.SETTLING,
    (RunState.SETTLING, Cause.GROUP_STABLE): RunState.PAUSING,
    (RunState.PAUSING, Cause.PAUSE_ENDED): RunState.FETCHING_ENDS,
    (RunState.FETCHING_ENDS, ev.Planned): RunState.PLANNED,
    (RunState.FETCHING_ENDS, Cause.NOTHING_TO_READ): RunState.OPEN,
    (RunState.FETCHING_ENDS, Cause.GROUP_UNSTABLE): RunState.SETTLING,
    (RunState.FETCHING_ENDS, Cause.TARGET_REACHED): RunState.ENDING,
    (RunState.PLANNED, ev.NextBatchRequested): RunState.PLANNED,
    (RunState.PLANNED, ev.BatchStarted): RunState.READING,
    (RunState.PLANNED, ev.Durable): RunState.OPEN,
    (RunState.READING, ev.NextBatchRequested): RunState.READING,
    (RunState.READING, ev.BatchStarted): RunState.READING,
    (RunState.READING, ev.Durable): RunState.OPEN,
    **{(state, ev.DrainRequested): RunState.DRAINING for state in BEFORE_PLAN},
    (RunState.DRAINING, ev.NextBatchRequested): RunState.DRAINING,
    (RunState.DRAINING, Cause.ALL_COMMITTED): RunState.DRAINED,
    (RunState.DRAINED, ev.NextBatchRequested): RunState.DRAINED,
    (RunState.ENDING, Cause.ALL_COMMITTED): RunState.OPEN,
    (RunState.ENDING, ev.MembersClosing): RunState.CLOSED,
    (RunState.STOPPING, ev.MembersClosing): RunState.CLOSED,
    (RunState.CLOSED, ev.NextBatchRequested): RunState.CLOSED,
    (RunState.CLOSED, ev.StopRequested): RunState.CLOSED,
    (RunState.NEW, ev.StopRequested): RunState.CLOSED,
    **{
        (state, ev.StopRequested): RunState.STOPPING
        for state in RunState
        if state not in (RunState.NEW, RunState.CLOSED, RunState.STOPPING)
    },
    (RunState.STOPPING, ev.Fail): RunState.STOPPING,
    **{(state, ev.Fail): RunState.FAILED for state in RunState if state not in ENDED},
}

SLOTS: Mapping[tuple[SlotState, AnyCause], SlotState] = {
    (SlotState.CLOSED, ev.Join): SlotState.JOINING,
    (SlotState.JOINING, ev.Assigned): SlotState.ASSIGNED,
    (SlotState.ASSIGNED, ev.Assigned): SlotState.ASSIGNED,
    (SlotState.REVOKING, ev.Assigned): SlotState.ASSIGNED,
    (SlotState.JOINING, ev.Revoking): SlotState.REVOKING,
    (SlotState.ASSIGNED, ev.Revoking): SlotState.REVOKING,
    (SlotState.REVOKING, ev.Revoking): SlotState.REVOKING,
    (SlotState.REVOKING, ev.Release): SlotState.ASSIGNED,
    (SlotState.REVOKING, Cause.RELEASE_ALL): SlotState.JOINING,
    (SlotState.JOINING, ev.Lost): SlotState.JOINING,
    (SlotState.ASSIGNED, ev.Lost): SlotState.JOINING,
    (SlotState.REVOKING, ev.Lost): SlotState.JOINING,
    (SlotState.JOINING, ev.MemberFailed): SlotState.CLOSED,
    (SlotState.ASSIGNED, ev.MemberFailed): SlotState.CLOSED,
    (SlotState.REVOKING, ev.MemberFailed): SlotState.CLOSED,
    (SlotState.JOINING, ev.MemberFenced): SlotState.CHECKING,
    (SlotState.ASSIGNED, ev.MemberFenced): SlotState.CHECKING,
    (SlotState.REVOKING, ev.MemberFenced): SlotState.CHECKING,
    (SlotState.CHECKING, ev.NotReplaced): SlotState.CLOSED,
    (SlotState.CHECKING, ev.ReplacedUnclear): SlotState.CHECKING,
    (SlotState.JOINING, ev.Leave): SlotState.CLOSED,
    (SlotState.ASSIGNED, ev.Leave): SlotState.CLOSED,
    (SlotState.REVOKING, ev.Leave): SlotState.CLOSED,
    (SlotState.CHECKING, ev.Leave): SlotState.CLOSED,
    (SlotState.JOINING, Cause.SLOT_MOVES): SlotState.MOVING,
    (SlotState.ASSIGNED, Cause.SLOT_MOVES): SlotState.MOVING,
    (SlotState.MOVING, ev.Join): SlotState.JOINING,
    (SlotState.MOVING, ev.Leave): SlotState.CLOSED,
    (SlotState.JOINING, Cause.AGENT_LOST): SlotState.CLOSED,
    (SlotState.ASSIGNED, Cause.AGENT_LOST): SlotState.CLOSED,
    (SlotState.REVOKING, Cause.AGENT_LOST): SlotState.CLOSED,
}

_ASSIGNED = [state for state in PartitionState if state is not PartitionState.UNASSIGNED]

PARTITIONS: Mapping[tuple[PartitionState, AnyCause], PartitionState] = {
    (PartitionState.UNASSIGNED, ev.Assigned): PartitionState.UNRESOLVED,
    (PartitionState.UNRESOLVED, ev.FetchCommittedOffsets): PartitionState.FETCHING,
    (PartitionState.FETCHING, ev.LookupFailed): PartitionState.UNRESOLVED,
    (PartitionState.FETCHING, ev.CommittedOffsetsRead): PartitionState.READY,
    (PartitionState.FETCHING, Cause.FOREIGN_COMMIT): PartitionState.ADOPTING,
    (PartitionState.FETCHING, Cause.NOT_COMMITTED): PartitionState.ADOPTING,
    (PartitionState.FETCHING, ev.ResolveStarts): PartitionState.RESOLVING,
    (PartitionState.RESOLVING, ev.LookupFailed): PartitionState.UNRESOLVED,
    (PartitionState.RESOLVING, ev.StartsResolved): PartitionState.ADOPTING,
    (PartitionState.ADOPTING, ev.OffsetsCommitted): PartitionState.READY,
    (PartitionState.READY, ev.Planned): PartitionState.IN_FLIGHT,
    (PartitionState.READY, Cause.REPLAY): PartitionState.IN_FLIGHT,
    (PartitionState.ADOPTING, Cause.REPLAY): PartitionState.IN_FLIGHT,
    (PartitionState.READY, ev.RecordsMissing): PartitionState.READY,
    **{
        (state, Cause.RECREATED_UNCHECKED): PartitionState.UNRESOLVED
        for state in (PartitionState.RESOLVING, PartitionState.ADOPTING, PartitionState.READY)
    },
    (PartitionState.READY, Cause.SLOT_MOVES): PartitionState.UNASSIGNED,
    (PartitionState.IN_FLIGHT, ev.Durable): PartitionState.READY,
    (PartitionState.IN_FLIGHT, Cause.FOREIGN_COMMIT): PartitionState.ADOPTING,
    **{(state, Cause.RESET_DETECTED): PartitionState.UNRESOLVED for state in _ASSIGNED},
    **{(state, ev.Release): PartitionState.UNASSIGNED for state in _ASSIGNED if state is not PartitionState.IN_FLIGHT},
    **{(state, ev.Lost): PartitionState.UNASSIGNED for state in _ASSIGNED},
}

_LIVE = [AgentState.NEW, AgentState.READY, AgentState.DISCONNECTED]

AGENTS: Mapping[tuple[AgentState, AnyCause], AgentState] = {
    (AgentState.NEW, Cause.AGENT_STABLE): AgentState.READY,
    (AgentState.NEW, ev.AgentConnected): AgentState.NEW,
    (AgentState.READY, ev.AgentConnected): AgentState.READY,
    (AgentState.DISCONNECTED, ev.AgentConnected): AgentState.NEW,
    (AgentState.NEW, ev.AgentDisconnected): AgentState.DISCONNECTED,
    (AgentState.READY, ev.AgentDisconnected): AgentState.DISCONNECTED,
    **{(state, ev.AgentEnded): AgentState.ENDED for state in _LIVE},
    **{(state, Cause.LEASE_EXPIRED): AgentState.ENDED for state in _LIVE},
    **{(state, Cause.AGENT_SUPERSEDED): AgentState.ENDED for state in _LIVE},
}

S = TypeVar("S", bound=State)


def next_state(table: Mapping[tuple[S, AnyCause], S], state: S, cause: AnyCause, what: object) -> S:
    """Return the state after a transition.

    Raises:
        InvariantBroken: the table has no such transition.
    """
    to = table.get((state, cause))
    if to is None:
        raise InvariantBroken(f"{what}: {name_of(cause)} in state {state.value}")
    return to


def name_of(cause: AnyCause) -> str:
    """The name of a cause in texts and in ``docs/states.md``."""
    return cause.value if isinstance(cause, Cause) else cause.__name__


def require_change(table: Mapping[tuple[S, AnyCause], S], before: S, cause: AnyCause, after: S, what: object) -> None:
    """Raise :class:`InvariantBroken` unless a cause leads from one state to another one."""
    if next_state(table, before, cause, what) is not after:
        raise InvariantBroken(f"{what}: {name_of(cause)} leads from state {before.value} to {after.value}")
