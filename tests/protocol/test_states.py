"""The four tables of states: every row is reached by some events, and any other change is a bug."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pytest
from kit.harness import STREAM, GroupHarness, tps
from kit.run_harness import RunHarness

from spark_group_source.errors import BrokerUnavailable, SourceError
from spark_group_source.protocol import events as ev
from spark_group_source.protocol import partitions, placement, run, slots
from spark_group_source.protocol.offsets import StreamOffset
from spark_group_source.protocol.placement import READY_AFTER_MS
from spark_group_source.protocol.states import (
    AGENTS,
    BEFORE_PLAN,
    PARTITIONS,
    RUN,
    SLOTS,
    AgentState,
    AnyCause,
    Cause,
    PartitionState,
    RunState,
    SlotState,
    name_of,
)

A, B, C = tps("orders", 0, 1, 2)
REPLAYED = StreamOffset(group="etl", stream="9f2c", seq=3, known={"orders": 2}, ranges={A: (100, 150)})
BY_HAND = ev.Committed(offset=120)
RESET = ev.Committed(offset=5, reset_number=1)

Row = tuple[Any, AnyCause]
Path = list[Callable[[GroupHarness], object]]


# --- paths to the states ---------------------------------------------------------------------------------------


def stream_started(g: GroupHarness) -> None:
    g.start_stream()


def out(g: GroupHarness) -> None:
    g.start_stream()
    g.failed()


def assigned(g: GroupHarness) -> None:
    g.start_stream()
    g.settled(A, B)


def planned(g: GroupHarness) -> None:
    assigned(g)
    g.plan({A: (100, 150), B: (100, 110)})


def revoking(g: GroupHarness) -> None:
    planned(g)
    g.revoking(A)


def checking(g: GroupHarness) -> None:
    assigned(g)
    g.fenced()


def close(g: GroupHarness) -> None:
    g.close(leave=True)


def agent_connected(g: GroupHarness) -> None:
    g.agent_connects("h1")


def agent_ready(g: GroupHarness) -> None:
    agent_connected(g)
    g.tick(ms=READY_AFTER_MS)


def agent_disconnected(g: GroupHarness) -> None:
    agent_connected(g)
    g.feed(ev.AgentDisconnected(agent="h1"))


def moving(g: GroupHarness) -> None:
    assigned(g)
    agent_ready(g)
    g.start_moves()


def placed(g: GroupHarness) -> None:
    moving(g)
    g.member_ended()


def placed_and_assigned(g: GroupHarness) -> None:
    placed(g)
    g.settled(A, B)


def placed_and_revoking(g: GroupHarness) -> None:
    placed_and_assigned(g)
    g.plan({A: (100, 150)})
    g.revoking(A)


def agent_ended(g: GroupHarness) -> None:
    g.feed(ev.AgentEnded(agent="h1", reason="its executor is gone"))


def lease_expired(g: GroupHarness) -> None:
    g.tick(ms=g.run.rules.lease_ms)


def newer_agent_connected(g: GroupHarness) -> None:
    g.agent_connects("h2", executor="of h1")


SLOT_PATHS: dict[Row, Path] = {
    (SlotState.CLOSED, ev.Join): [out, lambda g: g.tick(ms=100)],
    (SlotState.JOINING, ev.Assigned): [stream_started, lambda g: g.assigned(A)],
    (SlotState.ASSIGNED, ev.Assigned): [assigned, lambda g: g.assigned()],
    (SlotState.REVOKING, ev.Assigned): [revoking, lambda g: g.assigned()],
    (SlotState.JOINING, ev.Revoking): [stream_started, lambda g: g.revoking()],
    (SlotState.ASSIGNED, ev.Revoking): [planned, lambda g: g.revoking(A)],
    (SlotState.REVOKING, ev.Revoking): [revoking, lambda g: g.revoking(B)],
    (SlotState.REVOKING, ev.Release): [revoking, lambda g: (g.durable(), g.commit_succeeds())],
    (SlotState.REVOKING, Cause.RELEASE_ALL): [
        planned,
        lambda g: g.revoking(A, B, eager=True),
        lambda g: (g.durable(), g.commit_succeeds()),
    ],
    (SlotState.JOINING, ev.Lost): [stream_started, lambda g: g.lost()],
    (SlotState.ASSIGNED, ev.Lost): [assigned, lambda g: g.lost(A, B)],
    (SlotState.REVOKING, ev.Lost): [revoking, lambda g: g.lost(A, B)],
    (SlotState.JOINING, ev.MemberFailed): [stream_started, lambda g: g.failed()],
    (SlotState.ASSIGNED, ev.MemberFailed): [assigned, lambda g: g.failed()],
    (SlotState.REVOKING, ev.MemberFailed): [revoking, lambda g: g.failed()],
    (SlotState.JOINING, ev.MemberFenced): [stream_started, lambda g: g.fenced()],
    (SlotState.ASSIGNED, ev.MemberFenced): [assigned, lambda g: g.fenced()],
    (SlotState.REVOKING, ev.MemberFenced): [revoking, lambda g: g.fenced()],
    (SlotState.CHECKING, ev.NotReplaced): [checking, lambda g: g.feed(ev.NotReplaced(slot=0))],
    (SlotState.CHECKING, ev.ReplacedUnclear): [checking, lambda g: g.feed(ev.ReplacedUnclear(slot=0, reason="x"))],
    (SlotState.JOINING, ev.Leave): [stream_started, close],
    (SlotState.ASSIGNED, ev.Leave): [assigned, close],
    (SlotState.REVOKING, ev.Leave): [revoking, close],
    (SlotState.CHECKING, ev.Leave): [checking, close],
    (SlotState.JOINING, Cause.SLOT_MOVES): [placed, lambda g: g.send_heartbeats(g.run.rules.joining_budget_ms // 2)],
    (SlotState.ASSIGNED, Cause.SLOT_MOVES): [moving],
    (SlotState.MOVING, ev.Join): [placed],
    (SlotState.MOVING, ev.Leave): [moving, close],
    (SlotState.JOINING, Cause.AGENT_LOST): [placed, agent_ended],
    (SlotState.ASSIGNED, Cause.AGENT_LOST): [placed_and_assigned, agent_ended],
    (SlotState.REVOKING, Cause.AGENT_LOST): [placed_and_revoking, agent_ended],
}

AGENT_PATHS: dict[Row, Path] = {
    (AgentState.NEW, Cause.AGENT_STABLE): [stream_started, agent_ready],
    (AgentState.NEW, ev.AgentConnected): [stream_started, agent_connected, agent_connected],
    (AgentState.READY, ev.AgentConnected): [stream_started, agent_ready, agent_connected],
    (AgentState.DISCONNECTED, ev.AgentConnected): [stream_started, agent_disconnected, agent_connected],
    (AgentState.NEW, ev.AgentDisconnected): [stream_started, agent_disconnected],
    (AgentState.READY, ev.AgentDisconnected): [
        stream_started,
        agent_ready,
        lambda g: g.feed(ev.AgentDisconnected(agent="h1")),
    ],
    **{
        (state, cause): [stream_started, there, way]
        for state, there in (
            (AgentState.NEW, agent_connected),
            (AgentState.READY, agent_ready),
            (AgentState.DISCONNECTED, agent_disconnected),
        )
        for cause, way in (
            (ev.AgentEnded, agent_ended),
            (Cause.LEASE_EXPIRED, lease_expired),
            (Cause.AGENT_SUPERSEDED, newer_agent_connected),
        )
    },
}


def lookup_failed(g: GroupHarness) -> None:
    """A waits: the pause after a lookup without an answer is not over."""
    fetching(g)
    g.feed(ev.LookupFailed(partitions=(A,), error=BrokerUnavailable("x")))


def fetching(g: GroupHarness) -> None:
    g.start_stream()
    g.assigned(A)


def starting(g: GroupHarness) -> None:
    fetching(g)
    g.committed({A: None})


def adopting(g: GroupHarness) -> None:
    fetching(g)
    g.committed({A: BY_HAND})
    g.feed(ev.OffsetCommitFailed(reason="x"))


def back_in_the_batch(g: GroupHarness) -> None:
    """A was lost during the batch, another consumer read a part of it, and it was assigned again."""
    planned(g)
    g.lost(A)
    g.assigned(A)
    g.committed({A: BY_HAND})


WAYS_TO: dict[PartitionState, Callable[[GroupHarness], None]] = {
    PartitionState.UNRESOLVED: lookup_failed,
    PartitionState.FETCHING: fetching,
    PartitionState.RESOLVING: starting,
    PartitionState.ADOPTING: adopting,
    PartitionState.READY: assigned,
    PartitionState.IN_FLIGHT: planned,
}


def reset_shows(g: GroupHarness) -> None:
    """Another partition is assigned, and its committed offset shows a reset of the group."""
    g.assigned(C)
    g.tick(ms=5_000)  # whatever pause there was is over
    g.committed({C: RESET})


def topic_is_recreated(g: GroupHarness) -> None:
    """The check did not have the partition."""
    g.feed(ev.RecordsMissing(offsets={}, reason="topic orders was recreated", topics=("orders",)))


PARTITION_PATHS: dict[Row, Path] = {
    (PartitionState.UNASSIGNED, ev.Assigned): [fetching],
    (PartitionState.UNRESOLVED, ev.FetchCommittedOffsets): [fetching],
    (PartitionState.FETCHING, ev.LookupFailed): [lookup_failed],
    (PartitionState.FETCHING, ev.CommittedOffsetsRead): [assigned],
    (PartitionState.FETCHING, Cause.FOREIGN_COMMIT): [adopting],
    (PartitionState.FETCHING, Cause.NOT_COMMITTED): [
        starting,
        lambda g: g.resolved({A: 0}),
        lambda g: g.lost(A),
        lambda g: g.assigned(A, generation=2),
        lambda g: g.committed({A: None}),
    ],
    (PartitionState.FETCHING, ev.ResolveStarts): [starting],
    (PartitionState.RESOLVING, ev.LookupFailed): [
        starting,
        lambda g: g.feed(ev.LookupFailed(partitions=(A,), error=BrokerUnavailable("x"))),
    ],
    (PartitionState.RESOLVING, ev.StartsResolved): [starting, lambda g: g.resolved({A: 0})],
    (PartitionState.ADOPTING, ev.OffsetsCommitted): [adopting, lambda g: g.tick(ms=100), lambda g: g.commit_succeeds()],
    (PartitionState.READY, ev.Planned): [planned],
    (PartitionState.READY, Cause.REPLAY): [
        lambda g: g.replay(REPLAYED),
        lambda g: g.settled(A),
    ],
    (PartitionState.ADOPTING, Cause.REPLAY): [back_in_the_batch],
    (PartitionState.READY, ev.RecordsMissing): [
        assigned,
        lambda g: g.feed(ev.RecordsMissing(offsets={A: 120}, reason="x")),
    ],
    **{
        (state, Cause.RECREATED_UNCHECKED): [WAYS_TO[state], topic_is_recreated]
        for state in (PartitionState.RESOLVING, PartitionState.ADOPTING, PartitionState.READY)
    },
    (PartitionState.READY, Cause.SLOT_MOVES): [moving],
    (PartitionState.IN_FLIGHT, ev.Durable): [planned, lambda g: g.durable()],
    (PartitionState.IN_FLIGHT, Cause.FOREIGN_COMMIT): [back_in_the_batch, lambda g: g.durable()],
    **{
        (state, ev.Release): [way, lambda g: g.revoking(A)]
        for state, way in WAYS_TO.items()
        if state is not PartitionState.IN_FLIGHT
    },
    **{(state, ev.Lost): [way, lambda g: g.lost(A)] for state, way in WAYS_TO.items()},
    **{(state, Cause.RESET_DETECTED): [way, reset_shows] for state, way in WAYS_TO.items()},
    (PartitionState.UNRESOLVED, Cause.RESET_DETECTED): [
        fetching,
        lambda g: g.assigned(B),
        lambda g: g.lost(A),
        lambda g: g.assigned(A),  # the lookup in flight is older: it waits
        lambda g: g.committed({B: RESET}),
    ],
}


# --- ways to the states of the run ----------------------------------------------------------------------------------


def next_batch_of(run: RunHarness) -> ev.NextBatchRequested:
    return ev.NextBatchRequested(start=run.start, new_stream=STREAM)


def at(state: RunState) -> Callable[[], RunHarness]:
    """A run that was left in the middle of its first call."""

    def begin() -> RunHarness:
        run = RunHarness()
        run.begin(next_batch_of(run), state)
        return run

    return begin


def idle() -> RunHarness:
    """All is read, and it has looked once in vain."""
    run = RunHarness()
    run.batch()
    run.batch()
    return run


def resting() -> RunHarness:
    run = idle()
    run.begin(next_batch_of(run), RunState.PAUSING)
    return run


def reading() -> RunHarness:
    run = RunHarness()
    run.call(ev.BatchStarted(offset=run.latest()))
    return run


def draining() -> RunHarness:
    run = idle()
    run.silent = {ev.CommitOffsets}
    run.ends[A] = 20
    run.batch()
    run.feed(ev.DrainRequested())
    run.begin(next_batch_of(run), RunState.DRAINING)
    return run


def drained() -> RunHarness:
    run = idle()
    run.latest(drain=True)
    return run


def ending() -> RunHarness:
    run = RunHarness()
    run.set_target(run.ends)
    run.batch()
    run.begin(next_batch_of(run), RunState.ENDING)
    return run


def never_leaving() -> None:
    run = RunHarness(leave_on_stop="never")
    run.set_target(run.ends)
    run.batch()
    run.batch()


def unsettled() -> None:
    run = RunHarness()
    run.set_target(run.ends)
    run.batch()
    run.group_state = "preparing_rebalance"
    with pytest.raises(SourceError):
        run.batch()


def continued(event: type) -> None:
    run = RunHarness()
    run.start = REPLAYED
    run.call(next_batch_of(run) if event is ev.NextBatchRequested else ev.BatchStarted(offset=REPLAYED))


def fed(way: Callable[[], RunHarness], *events: ev.Event) -> RunHarness:
    run = way()
    run.feed(*events)
    return run


def aiming() -> RunHarness:
    run = RunHarness()
    run.feed(ev.TargetRequested())
    return run


RUN_STATES: dict[RunState, Callable[[], RunHarness]] = {
    RunState.NEW: RunHarness,
    RunState.TARGETING: aiming,
    RunState.STARTING: at(RunState.STARTING),
    RunState.OPEN: idle,
    RunState.GATHERING: at(RunState.GATHERING),
    RunState.SETTLING: at(RunState.SETTLING),
    RunState.PAUSING: resting,
    RunState.FETCHING_ENDS: at(RunState.FETCHING_ENDS),
    RunState.PLANNED: at(RunState.PLANNED),
    RunState.READING: reading,
    RunState.DRAINING: draining,
    RunState.DRAINED: drained,
    RunState.ENDING: ending,
    RunState.STOPPING: lambda: fed(idle, ev.StopRequested()),
    RunState.FAILED: lambda: fed(idle, ev.Replaced(reason="x")),
    RunState.CLOSED: lambda: fed(RunHarness, ev.StopRequested()),
}


def drained_in(way: Callable[[], RunHarness]) -> None:
    fed(way, ev.DrainRequested()).continue_call()


def call_in(state: RunState) -> None:
    RUN_STATES[state]().latest()


RUN_PATHS: dict[Row, Callable[[], object]] = {
    (RunState.NEW, ev.TargetRequested): aiming,
    (RunState.TARGETING, ev.TargetRead): lambda: RunHarness().set_target({}),
    (RunState.NEW, ev.NextBatchRequested): at(RunState.STARTING),
    (RunState.NEW, ev.BatchStarted): lambda: continued(ev.BatchStarted),
    (RunState.STARTING, Cause.STREAM_CREATED): at(RunState.GATHERING),
    (RunState.STARTING, ev.Durable): lambda: continued(ev.NextBatchRequested),
    (RunState.STARTING, Cause.REPLAY): lambda: continued(ev.BatchStarted),
    (RunState.OPEN, ev.NextBatchRequested): resting,
    (RunState.GATHERING, Cause.POSITIONS_KNOWN): at(RunState.SETTLING),
    **{(state, ev.DrainRequested): partial(drained_in, RUN_STATES[state]) for state in BEFORE_PLAN},
    (RunState.SETTLING, Cause.GROUP_STABLE): at(RunState.FETCHING_ENDS),
    (RunState.PAUSING, Cause.PAUSE_ENDED): at(RunState.FETCHING_ENDS),
    (RunState.FETCHING_ENDS, ev.Planned): at(RunState.PLANNED),
    (RunState.FETCHING_ENDS, Cause.NOTHING_TO_READ): idle,
    (RunState.FETCHING_ENDS, Cause.GROUP_UNSTABLE): unsettled,
    (RunState.FETCHING_ENDS, Cause.TARGET_REACHED): ending,
    (RunState.PLANNED, ev.BatchStarted): reading,
    (RunState.PLANNED, ev.Durable): lambda: (run := at(RunState.PLANNED)()).feed(ev.Durable(offset=run.latest())),
    (RunState.READING, ev.BatchStarted): lambda: (run := reading()).call(ev.BatchStarted(offset=run.latest())),
    (RunState.READING, ev.Durable): idle,
    (RunState.DRAINING, Cause.ALL_COMMITTED): drained,
    (RunState.ENDING, Cause.ALL_COMMITTED): never_leaving,
    (RunState.ENDING, ev.MembersClosing): lambda: ending().continue_call(),
    (RunState.STOPPING, ev.MembersClosing): lambda: idle().stop(),
    **{
        (state, ev.NextBatchRequested): partial(call_in, state)
        for state in (RunState.PLANNED, RunState.READING, RunState.DRAINING, RunState.DRAINED, RunState.CLOSED)
    },
    **{
        (state, ev.StopRequested): partial(fed, RUN_STATES[state], ev.StopRequested())
        for state in RunState
        if state is not RunState.STOPPING
    },
    **{
        (state, ev.Fail): partial(fed, RUN_STATES[state], ev.InternalFailure(error=BrokerUnavailable("x")))
        for state in RunState
        if state not in (RunState.FAILED, RunState.CLOSED)
    },
}


# --- every row is reached -------------------------------------------------------------------------------------------


class Recorder(dict[Row, Any]):
    """A table that notes which of its rows were used."""

    def __init__(self, table: Mapping[Any, Any]) -> None:
        super().__init__(table)
        self.used: set[Row] = set()

    def get(self, row: Any, default: Any = None) -> Any:
        self.used |= {row} & self.keys()
        return super().get(row, default)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[Row]]:
    """The rows that were used so far, of all tables."""
    recorders = []
    tables = [(run, "RUN"), (slots, "SLOTS"), (partitions, "PARTITIONS"), (placement, "AGENTS")]
    for module, name in tables:
        recorders.append(Recorder(getattr(module, name)))
        monkeypatch.setattr(module, name, recorders[-1])
    return lambda: {row for recorder in recorders for row in recorder.used}


def by_name(rows: Iterable[Row]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", rows, ids=lambda row: f"{row[0].value}-{name_of(row[1])}")


def test_every_transition_of_the_tables_has_a_test_path() -> None:
    assert RUN_PATHS.keys() == RUN.keys()
    assert SLOT_PATHS.keys() == SLOTS.keys()
    assert PARTITION_PATHS.keys() == PARTITIONS.keys()
    assert AGENT_PATHS.keys() == AGENTS.keys()


@by_name([*SLOTS, *PARTITIONS, *AGENTS])
def test_every_transition_of_slots_partitions_and_agents_is_reached(
    row: Row, used: Callable[[], set[Row]], fresh: GroupHarness
) -> None:
    *before, step = (SLOT_PATHS | PARTITION_PATHS | AGENT_PATHS)[row]
    for lead in before:
        lead(fresh)
    step(fresh)
    assert row in used()


@by_name(RUN)
def test_every_transition_of_the_run_is_reached(row: Row, used: Callable[[], set[Row]]) -> None:
    RUN_PATHS[row]()
    assert row in used()


@pytest.mark.parametrize("state", RunState)
def test_call_in_every_state_returns(state: RunState) -> None:
    """Not always a good one, but never a loop without end, nor an error that is not ours."""
    calls: list[Callable[[RunHarness], ev.Event]] = [
        next_batch_of,
        lambda run: ev.BatchStarted(offset=run.start),
        lambda run: ev.StopRequested(),
    ]
    for event_of in calls:
        run = RUN_STATES[state]()
        assert run.state() is state
        try:
            run.call(event_of(run))
        except SourceError:
            assert run.state() is RunState.FAILED
        run.stop()
        assert run.state() is RunState.CLOSED


# --- every change is a row ------------------------------------------------------------------------------------------


def test_every_state_is_reachable() -> None:
    assert {*RUN.values(), RunState.NEW} == set(RunState)
    assert {*SLOTS.values()} == set(SlotState)
    assert {*PARTITIONS.values()} == set(PartitionState)
    assert {*AGENTS.values()} == set(AgentState)


def test_no_transition_leaves_a_final_state() -> None:
    assert {to for (state, _), to in RUN.items() if state is RunState.CLOSED} == {RunState.CLOSED}
