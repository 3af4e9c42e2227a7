"""The states of a run, a slot, a partition and an agent, and every allowed transition between them.

Runs in: the stream reader, tests. Deliberately absent: what is done on a transition (``run``, ``slots``,
``partitions``, ``placement``). The four tables are complete: a transition that is not in them raises
:class:`InvariantBroken`. The tables and diagrams of ``docs/states.md`` are rendered from them. A cause is a class
of ``events``: an event, a command, or a condition that the run detected itself.
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
    ADOPTING = "adopting"  # its position comes from a foreign commit: it is committed under this stream's name first
    READY = "ready"  # the next batch may read it
    IN_FLIGHT = "in flight"  # the batch in flight reads it


class AgentState(State):
    """What this run knows about one agent."""

    NEW = "new"  # connected, and must stay connected for a while
    READY = "ready"  # slots may be placed on it
    DISCONNECTED = "disconnected"  # its channel is closed; it may reconnect within its lease
    ENDED = "ended"  # its slots are placed elsewhere; it is dismissed if it reconnects


ENDED = frozenset({RunState.FAILED, RunState.STOPPING, RunState.CLOSED})
"""States in which the run plans no further batch and can only close."""

BEFORE_PLAN = (RunState.GATHERING, RunState.SETTLING, RunState.PAUSING, RunState.FETCHING_ENDS)
"""States of a call that has not planned its batch: a drain ends it without one."""

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
    (RunState.SETTLING, ev.GroupStable): RunState.PAUSING,
    (RunState.PAUSING, ev.PauseEnded): RunState.FETCHING_ENDS,
    (RunState.FETCHING_ENDS, ev.Planned): RunState.PLANNED,
    (RunState.FETCHING_ENDS, ev.NothingToRead): RunState.OPEN,
    (RunState.FETCHING_ENDS, ev.GroupUnstable): RunState.SETTLING,
    (RunState.FETCHING_ENDS, ev.TargetReached): RunState.ENDING,
    (RunState.PLANNED, ev.NextBatchRequested): RunState.PLANNED,
    (RunState.PLANNED, ev.BatchStarted): RunState.READING,
    (RunState.PLANNED, ev.Durable): RunState.OPEN,
    (RunState.READING, ev.NextBatchRequested): RunState.READING,
    (RunState.READING, ev.BatchStarted): RunState.READING,
    (RunState.READING, ev.Durable): RunState.OPEN,
    **{(state, ev.DrainRequested): RunState.DRAINING for state in BEFORE_PLAN},
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

_ASSIGNED = [state for state in PartitionState if state is not PartitionState.UNASSIGNED]

PARTITIONS: Mapping[tuple[PartitionState, type], PartitionState] = {
    (PartitionState.UNASSIGNED, ev.Assigned): PartitionState.UNRESOLVED,
    (PartitionState.UNRESOLVED, ev.FetchCommittedOffsets): PartitionState.FETCHING,
    (PartitionState.FETCHING, ev.LookupFailed): PartitionState.UNRESOLVED,
    (PartitionState.FETCHING, ev.CommittedOffsetsRead): PartitionState.READY,
    (PartitionState.FETCHING, ev.ForeignCommit): PartitionState.ADOPTING,
    (PartitionState.FETCHING, ev.ResolveStarts): PartitionState.RESOLVING,
    (PartitionState.RESOLVING, ev.LookupFailed): PartitionState.UNRESOLVED,
    (PartitionState.RESOLVING, ev.StartsResolved): PartitionState.READY,
    (PartitionState.ADOPTING, ev.OffsetsCommitted): PartitionState.READY,
    (PartitionState.READY, ev.Planned): PartitionState.IN_FLIGHT,
    (PartitionState.READY, ev.Replay): PartitionState.IN_FLIGHT,
    (PartitionState.ADOPTING, ev.Replay): PartitionState.IN_FLIGHT,
    (PartitionState.READY, ev.RecordsMissing): PartitionState.READY,
    **{
        (state, ev.RecreatedUnchecked): PartitionState.UNRESOLVED
        for state in (PartitionState.RESOLVING, PartitionState.ADOPTING, PartitionState.READY)
    },
    (PartitionState.READY, ev.SlotMoves): PartitionState.UNASSIGNED,
    (PartitionState.IN_FLIGHT, ev.Durable): PartitionState.READY,
    (PartitionState.IN_FLIGHT, ev.ForeignCommit): PartitionState.ADOPTING,
    **{(state, ev.ResetDetected): PartitionState.UNRESOLVED for state in _ASSIGNED},
    **{(state, ev.Release): PartitionState.UNASSIGNED for state in _ASSIGNED if state is not PartitionState.IN_FLIGHT},
    **{(state, ev.Lost): PartitionState.UNASSIGNED for state in _ASSIGNED},
}

_LIVE = [AgentState.NEW, AgentState.READY, AgentState.DISCONNECTED]

AGENTS: Mapping[tuple[AgentState, type], AgentState] = {
    (AgentState.NEW, ev.AgentStable): AgentState.READY,
    (AgentState.NEW, ev.AgentConnected): AgentState.NEW,
    (AgentState.READY, ev.AgentConnected): AgentState.READY,
    (AgentState.DISCONNECTED, ev.AgentConnected): AgentState.NEW,
    (AgentState.NEW, ev.AgentDisconnected): AgentState.DISCONNECTED,
    (AgentState.READY, ev.AgentDisconnected): AgentState.DISCONNECTED,
    **{(state, ev.AgentEnded): AgentState.ENDED for state in _LIVE},
    **{(state, ev.LeaseExpired): AgentState.ENDED for state in _LIVE},
    **{(state, ev.AgentSuperseded): AgentState.ENDED for state in _LIVE},
}

S = TypeVar("S", bound=State)


def next_state(table: Mapping[tuple[S, type], S], state: S, cause: type, what: object) -> S:
    """Return the state after a transition.

    Raises:
        InvariantBroken: the table has no such transition.
    """
    to = table.get((state, cause))
    if to is None:
        raise InvariantBroken(f"{what}: {cause.__name__} in state {state.value}")
    return to


def require_change(table: Mapping[tuple[S, type], S], before: S, cause: type, after: S, what: object) -> None:
    """Raise :class:`InvariantBroken` unless a cause leads from one state to another one."""
    if next_state(table, before, cause, what) is not after:
        raise InvariantBroken(f"{what}: {cause.__name__} leads from state {before.value} to {after.value}")
