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
    AIMING = "aiming"  # an AvailableNow run asks where everything ends now: that is its target
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

    OUT = "out"  # has no consumer
    JOINING = "joining"  # has a consumer and waits for an assignment
    ASSIGNED = "assigned"  # has an assignment, maybe an empty one
    REVOKING = "revoking"  # holds a revocation; heartbeats go on
    ASKING = "asking"  # its place was taken: asks the broker whether by a newer driver of this stream
    MOVING = "moving"  # its member closes where it is, and the next one joins from another host


class PartitionState(State):
    """Where one partition stands, as far as this run is concerned."""

    AWAY = "away"  # with nobody of ours; its last position is remembered
    CAME = "came"  # ours; where it stands now is not known, and nobody asks
    ASKED = "asked"  # the group's committed offset is being read
    STARTING = "starting"  # there is none: the starting options are being resolved
    TAKING = "taking"  # its position is known, under somebody else's name: it is committed under ours first
    READY = "ready"  # may be planned
    PLANNED = "planned"  # the batch in flight reads it


class HostState(State):
    """Where an agent stands that may host members."""

    NEW = "new"  # came, and must stay for a while
    HERE = "here"  # slots are lent to it
    CUT = "cut"  # its channel is cut; it may come back within its lease
    GONE = "gone"  # its slots are elsewhere; if it comes back, it is dismissed


ENDED = frozenset({RunState.FAILED, RunState.STOPPING, RunState.CLOSED})
"""Nothing but an end can come after these."""

RUN: Mapping[tuple[RunState, type], RunState] = {
    (RunState.NEW, ev.TargetAsked): RunState.AIMING,
    (RunState.AIMING, ev.TargetTaken): RunState.NEW,
    (RunState.NEW, ev.Asked): RunState.STARTING,
    (RunState.NEW, ev.Reading): RunState.STARTING,
    (RunState.STARTING, ev.Born): RunState.GATHERING,
    (RunState.STARTING, ev.Durable): RunState.GATHERING,
    (RunState.STARTING, ev.Replay): RunState.READING,
    (RunState.OPEN, ev.Asked): RunState.GATHERING,
    (RunState.GATHERING, ev.Gathered): RunState.SETTLING,
    (RunState.GATHERING, ev.DrainAsked): RunState.DRAINING,
    (RunState.SETTLING, ev.Settled): RunState.RESTING,
    (RunState.RESTING, ev.Rested): RunState.LOOKING,
    (RunState.LOOKING, ev.Planned): RunState.PLANNED,
    (RunState.LOOKING, ev.NothingToRead): RunState.OPEN,
    (RunState.LOOKING, ev.Unsettled): RunState.SETTLING,
    (RunState.LOOKING, ev.TargetReached): RunState.ENDING,
    (RunState.PLANNED, ev.Asked): RunState.PLANNED,
    (RunState.PLANNED, ev.Reading): RunState.READING,
    (RunState.PLANNED, ev.Durable): RunState.OPEN,
    (RunState.READING, ev.Asked): RunState.READING,
    (RunState.READING, ev.Reading): RunState.READING,
    (RunState.READING, ev.Durable): RunState.OPEN,
    (RunState.DRAINING, ev.Asked): RunState.DRAINING,
    (RunState.DRAINING, ev.Echoed): RunState.DRAINED,
    (RunState.DRAINED, ev.Asked): RunState.DRAINED,
    (RunState.ENDING, ev.Echoed): RunState.OPEN,
    (RunState.ENDING, ev.Closing): RunState.CLOSED,
    (RunState.STOPPING, ev.Closing): RunState.CLOSED,
    (RunState.CLOSED, ev.Asked): RunState.CLOSED,
    (RunState.CLOSED, ev.Stopping): RunState.CLOSED,
    (RunState.NEW, ev.Stopping): RunState.CLOSED,
    **{
        (state, ev.Stopping): RunState.STOPPING
        for state in RunState
        if state not in (RunState.NEW, RunState.CLOSED, RunState.STOPPING)
    },
    (RunState.STOPPING, ev.Fail): RunState.STOPPING,
    **{(state, ev.Fail): RunState.FAILED for state in RunState if state not in ENDED},
}

SLOTS: Mapping[tuple[SlotState, type], SlotState] = {
    (SlotState.OUT, ev.Join): SlotState.JOINING,
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
    (SlotState.JOINING, ev.MemberFailed): SlotState.OUT,
    (SlotState.ASSIGNED, ev.MemberFailed): SlotState.OUT,
    (SlotState.REVOKING, ev.MemberFailed): SlotState.OUT,
    (SlotState.JOINING, ev.MemberFenced): SlotState.ASKING,
    (SlotState.ASSIGNED, ev.MemberFenced): SlotState.ASKING,
    (SlotState.REVOKING, ev.MemberFenced): SlotState.ASKING,
    (SlotState.ASKING, ev.NotReplaced): SlotState.OUT,
    (SlotState.ASKING, ev.ReplacedUnknown): SlotState.ASKING,
    (SlotState.JOINING, ev.Leave): SlotState.OUT,
    (SlotState.ASSIGNED, ev.Leave): SlotState.OUT,
    (SlotState.REVOKING, ev.Leave): SlotState.OUT,
    (SlotState.ASKING, ev.Leave): SlotState.OUT,
    (SlotState.JOINING, ev.Moves): SlotState.MOVING,
    (SlotState.ASSIGNED, ev.Moves): SlotState.MOVING,
    (SlotState.MOVING, ev.Join): SlotState.JOINING,
    (SlotState.MOVING, ev.Leave): SlotState.OUT,
    (SlotState.JOINING, ev.HostLost): SlotState.OUT,
    (SlotState.ASSIGNED, ev.HostLost): SlotState.OUT,
    (SlotState.REVOKING, ev.HostLost): SlotState.OUT,
}

_OURS = [state for state in PartitionState if state is not PartitionState.AWAY]

PARTITIONS: Mapping[tuple[PartitionState, type], PartitionState] = {
    (PartitionState.AWAY, ev.Assigned): PartitionState.CAME,
    (PartitionState.CAME, ev.FetchCommitted): PartitionState.ASKED,
    (PartitionState.ASKED, ev.LookupFailed): PartitionState.CAME,
    (PartitionState.ASKED, ev.CommittedRead): PartitionState.READY,
    (PartitionState.ASKED, ev.TheirCommit): PartitionState.TAKING,
    (PartitionState.ASKED, ev.ResolveStarts): PartitionState.STARTING,
    (PartitionState.STARTING, ev.LookupFailed): PartitionState.CAME,
    (PartitionState.STARTING, ev.StartsResolved): PartitionState.READY,
    (PartitionState.TAKING, ev.EchoDone): PartitionState.READY,
    (PartitionState.READY, ev.Planned): PartitionState.PLANNED,
    (PartitionState.READY, ev.Replay): PartitionState.PLANNED,
    (PartitionState.TAKING, ev.Replay): PartitionState.PLANNED,
    (PartitionState.READY, ev.RecordsGone): PartitionState.READY,
    (PartitionState.READY, ev.Moves): PartitionState.AWAY,
    (PartitionState.PLANNED, ev.Durable): PartitionState.READY,
    (PartitionState.PLANNED, ev.TheirCommit): PartitionState.TAKING,
    **{(state, ev.ResetSeen): PartitionState.CAME for state in _OURS},
    **{(state, ev.Release): PartitionState.AWAY for state in _OURS if state is not PartitionState.PLANNED},
    **{(state, ev.Lost): PartitionState.AWAY for state in _OURS},
}

_THERE = [HostState.NEW, HostState.HERE, HostState.CUT]

HOSTS: Mapping[tuple[HostState, type], HostState] = {
    (HostState.NEW, ev.Stayed): HostState.HERE,
    (HostState.NEW, ev.HostCame): HostState.NEW,
    (HostState.HERE, ev.HostCame): HostState.HERE,
    (HostState.CUT, ev.HostCame): HostState.NEW,
    (HostState.NEW, ev.HostCut): HostState.CUT,
    (HostState.HERE, ev.HostCut): HostState.CUT,
    **{(state, ev.HostGone): HostState.GONE for state in _THERE},
    **{(state, ev.LeaseOver): HostState.GONE for state in _THERE},
    **{(state, ev.TwinCame): HostState.GONE for state in _THERE},
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
