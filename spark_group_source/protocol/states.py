"""The states of a run, a slot, a partition and a host, and every change that is allowed.

Runs in: the stream reader, tests. Deliberately absent: what is done on a change (``machine``, ``slots``, ``positions``,
``lending``). The four tables are the whole of it: a change that is not in them raises :class:`InvariantBroken`, and the
tables and pictures of ``docs/architecture.md`` are rendered from them. A cause is a class of ``events``: an event, a
command, or what the run noticed itself.
"""

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from spark_group_source.errors import InvariantBroken
from spark_group_source.protocol import events as ev


class State(Enum):
    """A state. Hashed by identity, as there is one object of each: an enum's own hash costs more than all the rest of a
    change, and a plan over 10,000 partitions makes 20,000 of them."""

    __hash__ = object.__hash__


class RunState(State):
    """What the run does for Spark: where ``latestOffset`` stands, or what Spark does with its answer."""

    NEW = "new"  # nothing was asked yet
    TARGETING = "targeting"  # an AvailableNow run asks where everything ends now: that is its target
    STARTING = "starting"  # lists the topics; then the stream is named and its members join
    OPEN = "open"  # between two calls; every durable batch is known
    GATHERING = "gathering"  # waits until the slots have their partitions and each has its position
    SETTLING = "settling"  # asks the group whether an assignment is still on its way
    RESTING = "resting"  # nothing to read: a pause before the next look
    LOOKING = "looking"  # asks how far the partitions can be read, and whether all of it is still there
    PLANNED = "planned"  # Spark has the next batch and has not begun to read it
    READING = "reading"  # Spark reads the batch and writes it to the sink
    DRAINING = "draining"  # was asked to plan no more: brings its offsets to Kafka
    DRAINED = "drained"  # all is at Kafka; waits to be stopped
    ENDING = "ending"  # a bounded run at its target: brings its offsets to Kafka, then the members leave
    STOPPING = "stopping"  # Spark ends the run: last offsets to Kafka, then the members close
    FAILED = "failed"  # the next call of Spark raises the reason
    CLOSED = "closed"  # the members are closed


class SlotState(State):
    """Where one member of ours stands."""

    CLOSED = "closed"  # has no consumer
    JOINING = "joining"  # has a consumer and waits for an assignment
    ASSIGNED = "assigned"  # has an assignment, maybe an empty one
    REVOKING = "revoking"  # holds a revocation; heartbeats go on
    CHECKING = "checking"  # its place was taken: asks the broker whether by a newer driver of this stream
    MOVING = "moving"  # its member closes where it is, and the next one joins from another host


class PartitionState(State):
    """Where one partition stands, as far as this run is concerned."""

    UNASSIGNED = "unassigned"  # with nobody of ours; its last position is remembered
    UNRESOLVED = "unresolved"  # ours; where it stands now is not known, and nobody asks
    FETCHING = "fetching"  # the group's committed offset is being read
    RESOLVING = "resolving"  # there is none: the starting options are being resolved
    CLAIMING = "claiming"  # its position is known, under somebody else's name: it is committed under ours first
    READY = "ready"  # may be planned
    IN_FLIGHT = "in flight"  # the batch in flight reads it


class AgentState(State):
    """Where an agent stands that may host members."""

    NEW = "new"  # came, and must stay for a while
    READY = "ready"  # slots are lent to it
    DISCONNECTED = "disconnected"  # its channel is cut; it may come back within its lease
    ENDED = "ended"  # its slots are elsewhere; if it comes back, it is dismissed


ENDED = frozenset({RunState.FAILED, RunState.STOPPING, RunState.CLOSED})
"""Nothing but an end can come after these."""

RUN: Mapping[tuple[RunState, type], RunState] = {
    (RunState.NEW, ev.TargetRequested): RunState.TARGETING,
    (RunState.TARGETING, ev.TargetRead): RunState.NEW,
    (RunState.NEW, ev.NextBatchRequested): RunState.STARTING,
    (RunState.NEW, ev.BatchStarted): RunState.STARTING,
    (RunState.STARTING, ev.StreamCreated): RunState.GATHERING,
    (RunState.STARTING, ev.Durable): RunState.GATHERING,
    (RunState.STARTING, ev.Replay): RunState.READING,
    (RunState.OPEN, ev.NextBatchRequested): RunState.GATHERING,
    (RunState.GATHERING, ev.PositionsKnown): RunState.SETTLING,
    (RunState.GATHERING, ev.DrainRequested): RunState.DRAINING,
    (RunState.SETTLING, ev.GroupStable): RunState.RESTING,
    (RunState.RESTING, ev.PauseEnded): RunState.LOOKING,
    (RunState.LOOKING, ev.Planned): RunState.PLANNED,
    (RunState.LOOKING, ev.NothingToRead): RunState.OPEN,
    (RunState.LOOKING, ev.GroupUnstable): RunState.SETTLING,
    (RunState.LOOKING, ev.TargetReached): RunState.ENDING,
    (RunState.PLANNED, ev.NextBatchRequested): RunState.PLANNED,
    (RunState.PLANNED, ev.BatchStarted): RunState.READING,
    (RunState.PLANNED, ev.Durable): RunState.OPEN,
    (RunState.READING, ev.NextBatchRequested): RunState.READING,
    (RunState.READING, ev.BatchStarted): RunState.READING,
    (RunState.READING, ev.Durable): RunState.OPEN,
    (RunState.DRAINING, ev.NextBatchRequested): RunState.DRAINING,
    (RunState.DRAINING, ev.AllCommitted): RunState.DRAINED,
    (RunState.DRAINED, ev.NextBatchRequested): RunState.DRAINED,
    (RunState.ENDING, ev.AllCommitted): RunState.OPEN,
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

SLOTS: Mapping[tuple[SlotState, type], SlotState] = {
    (SlotState.CLOSED, ev.Join): SlotState.JOINING,
    (SlotState.JOINING, ev.Assigned): SlotState.ASSIGNED,
    (SlotState.ASSIGNED, ev.Assigned): SlotState.ASSIGNED,
    (SlotState.REVOKING, ev.Assigned): SlotState.ASSIGNED,
    (SlotState.JOINING, ev.Revoking): SlotState.REVOKING,
    (SlotState.ASSIGNED, ev.Revoking): SlotState.REVOKING,
    (SlotState.REVOKING, ev.Revoking): SlotState.REVOKING,
    (SlotState.REVOKING, ev.Release): SlotState.ASSIGNED,
    (SlotState.REVOKING, ev.ReleaseAll): SlotState.JOINING,
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
    (SlotState.JOINING, ev.SlotMoves): SlotState.MOVING,
    (SlotState.ASSIGNED, ev.SlotMoves): SlotState.MOVING,
    (SlotState.MOVING, ev.Join): SlotState.JOINING,
    (SlotState.MOVING, ev.Leave): SlotState.CLOSED,
    (SlotState.JOINING, ev.AgentLost): SlotState.CLOSED,
    (SlotState.ASSIGNED, ev.AgentLost): SlotState.CLOSED,
    (SlotState.REVOKING, ev.AgentLost): SlotState.CLOSED,
}

_OURS = [state for state in PartitionState if state is not PartitionState.UNASSIGNED]

PARTITIONS: Mapping[tuple[PartitionState, type], PartitionState] = {
    (PartitionState.UNASSIGNED, ev.Assigned): PartitionState.UNRESOLVED,
    (PartitionState.UNRESOLVED, ev.FetchCommittedOffsets): PartitionState.FETCHING,
    (PartitionState.FETCHING, ev.LookupFailed): PartitionState.UNRESOLVED,
    (PartitionState.FETCHING, ev.CommittedOffsetsRead): PartitionState.READY,
    (PartitionState.FETCHING, ev.ForeignCommit): PartitionState.CLAIMING,
    (PartitionState.FETCHING, ev.ResolveStarts): PartitionState.RESOLVING,
    (PartitionState.RESOLVING, ev.LookupFailed): PartitionState.UNRESOLVED,
    (PartitionState.RESOLVING, ev.StartsResolved): PartitionState.READY,
    (PartitionState.CLAIMING, ev.OffsetsCommitted): PartitionState.READY,
    (PartitionState.READY, ev.Planned): PartitionState.IN_FLIGHT,
    (PartitionState.READY, ev.Replay): PartitionState.IN_FLIGHT,
    (PartitionState.CLAIMING, ev.Replay): PartitionState.IN_FLIGHT,
    (PartitionState.READY, ev.RecordsMissing): PartitionState.READY,
    (PartitionState.READY, ev.SlotMoves): PartitionState.UNASSIGNED,
    (PartitionState.IN_FLIGHT, ev.Durable): PartitionState.READY,
    (PartitionState.IN_FLIGHT, ev.ForeignCommit): PartitionState.CLAIMING,
    **{(state, ev.ResetDetected): PartitionState.UNRESOLVED for state in _OURS},
    **{(state, ev.Release): PartitionState.UNASSIGNED for state in _OURS if state is not PartitionState.IN_FLIGHT},
    **{(state, ev.Lost): PartitionState.UNASSIGNED for state in _OURS},
}

_THERE = [AgentState.NEW, AgentState.READY, AgentState.DISCONNECTED]

HOSTS: Mapping[tuple[AgentState, type], AgentState] = {
    (AgentState.NEW, ev.AgentStable): AgentState.READY,
    (AgentState.NEW, ev.AgentConnected): AgentState.NEW,
    (AgentState.READY, ev.AgentConnected): AgentState.READY,
    (AgentState.DISCONNECTED, ev.AgentConnected): AgentState.NEW,
    (AgentState.NEW, ev.AgentDisconnected): AgentState.DISCONNECTED,
    (AgentState.READY, ev.AgentDisconnected): AgentState.DISCONNECTED,
    **{(state, ev.AgentEnded): AgentState.ENDED for state in _THERE},
    **{(state, ev.LeaseExpired): AgentState.ENDED for state in _THERE},
    **{(state, ev.AgentSuperseded): AgentState.ENDED for state in _THERE},
}

S = TypeVar("S", bound=State)


def moved(table: Mapping[tuple[S, type], S], state: S, cause: type, what: object) -> S:
    """Where a cause leads. ``what``: whose state it is, for the error.

    Raises:
        InvariantBroken: the table has no such change.
    """
    to = table.get((state, cause))
    if to is None:
        raise InvariantBroken(f"{what}: {cause.__name__} in state {state.value}")
    return to
