"""Spark's calls: what they wait for, when batches are planned, and how a run ends."""

from dataclasses import replace
from typing import Any

import pytest
from kit.harness import GROUP, JOINING_BUDGET_MS, STREAM, GroupHarness, only, tps
from kit.run_harness import ANSWER_MS, RunHarness

from spark_group_source.errors import (
    AccessDenied,
    BrokerUnavailable,
    CommitFailed,
    Fenced,
    InvariantBroken,
    OptionError,
    RebalanceTimeout,
)
from spark_group_source.model import LATEST
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.data_loss import EARLIER_MS
from spark_group_source.protocol.group_assignment import ASSIGNMENT_WARNING_MS, DESCRIBE_PAUSE_MS
from spark_group_source.protocol.offsets import BatchKey, StreamOffset
from spark_group_source.protocol.rules import StartingPosition
from spark_group_source.protocol.run import (
    COMMIT_MS_MAX,
    IDLE_LOAD_MAX,
    IDLE_PAUSES_MS,
    LEADER_MS_MAX,
    SETTLE_MS_MAX,
    STOP_COMMIT_MS_MAX,
    UNSETTLED_MS_MIN,
)
from spark_group_source.protocol.states import BEFORE_PLAN, RunState

A, B, C = tps("orders", 0, 1, 2)
BEGAN_MS = 1_000
PAST = StreamOffset(
    group=GROUP,
    stream=STREAM,
    seq=7,
    topic_ids={"orders": "id-orders"},
    known={"orders": 2},
    ranges={A: (100, 150), B: (40, 40)},
)


def idle(**rules: Any) -> RunHarness:
    """A run that has read all there is, and has looked once in vain."""
    run = RunHarness(**rules)
    run.ends[A] = 10
    assert run.batch().seq == 0
    assert run.batch().seq == 0
    return run


def waited_ms(run: RunHarness) -> int:
    return run.clock() - BEGAN_MS


# --- the first batch -------------------------------------------------------------------------------------------------


def test_first_batch_waits_until_every_slot_has_an_assignment() -> None:
    run = RunHarness(slots=2)
    run.assignments = {0: (A,)}
    run.ends = {A: 5, B: 7}
    run.later(ev.Assigned(slot=1, client=1, partitions=(B,)), ms=6_000)
    run.assignments[1] = (B,)  # as the group describes it
    run.silent = {ev.Join}
    run.later(ev.Assigned(slot=0, client=1, partitions=(A,)), ms=100)
    assert run.latest().ranges == {A: (0, 5), B: (0, 7)}
    assert waited_ms(run) >= 6_000


def test_first_batch_of_a_stream_is_planned_even_if_it_reads_nothing() -> None:
    run = RunHarness()
    first = run.latest()
    assert (first.stream, first.seq, first.batch()) == (STREAM, 0, [])
    assert first.positions() == {A: 0, B: 0}


def test_first_batch_waits_for_an_assignment_that_is_on_its_way() -> None:
    run = RunHarness()
    run.assignments = {0: (A, B)}
    run.silent = {ev.Join}
    run.later(ev.Assigned(slot=0, client=1, partitions=(A,)), ms=100)
    run.later(ev.Assigned(slot=0, client=1, partitions=(B,)), ms=3_000)  # KIP-848 assigns them one by one
    run.ends = {A: 5, B: 7}
    assert run.latest().ranges == {A: (0, 5), B: (0, 7)}
    assert 3_000 <= waited_ms(run) < 3_500
    assert len(run.steps_of(ev.DescribeGroup)) <= 3_000 // DESCRIBE_PAUSE_MS + 2


@pytest.mark.parametrize("state", ["stable", "preparing_rebalance"])
def test_first_batch_waits_a_bounded_time_for_a_stable_group(state: str) -> None:
    run = RunHarness()
    run.group_state = state
    run.assignments = {0: (A, B)}
    run.silent = {ev.Join}
    run.later(ev.Assigned(slot=0, client=1, partitions=(A,)), ms=100)  # the other one is never assigned
    run.ends = {A: 5, B: 7}
    assert run.latest().ranges == {A: (0, 5)}
    assert SETTLE_MS_MAX <= waited_ms(run) <= SETTLE_MS_MAX + 200


def test_first_batch_waits_for_partitions_of_members_of_an_earlier_run() -> None:
    """A run of this stream was killed: the partitions of its members are assigned here when their session ends."""
    run = RunHarness(slots=2)
    run.assignments = {0: (A,), 1: ()}
    run.ends = {A: 5, B: 7}
    run.later(ev.Assigned(slot=1, client=1, partitions=(B,)), ms=5_000)
    run.silent = {ev.Join}
    for slot in (0, 1):
        run.later(ev.Assigned(slot=slot, client=1, partitions=run.assignments[slot]), ms=10)
    run.assignments[1] = (B,)
    assert run.latest().ranges == {A: (0, 5), B: (0, 7)}


def test_missing_assignment_is_logged_and_fails_the_run_after_its_budget() -> None:
    run = RunHarness(group="our etl")
    run.silent = {ev.Join}
    with pytest.raises(RebalanceTimeout) as failure:
        run.latest()
    assert waited_ms(run) == JOINING_BUDGET_MS
    assert "has not assigned partitions within 75 s for all 1 members of this query (slot states: joining)" in str(
        failure.value
    )
    assert "`spark-group describe --bootstrap-servers broker:9092 --group 'our etl' --members`" in str(failure.value)
    assert "Join(slot=0" in str(failure.value)
    (warning,) = run.warned()
    assert "not all 1 members of this query have an assignment after 10 s; waiting up to 75 s" in warning


def test_a_user_without_permission_on_the_group_learns_it_before_a_warning_guesses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The library reports a refused search for the coordinator to a member once only, which could be a moment's."""
    run = RunHarness()
    run.silent = {ev.Join}
    denied = ev.InternalFailure(error=AccessDenied("the user needs Describe on the group"))
    answer = run.answer
    monkeypatch.setattr(run, "answer", lambda step: denied if isinstance(step, ev.DescribeGroup) else answer(step))
    with pytest.raises(AccessDenied):
        run.latest()
    assert waited_ms(run) <= ASSIGNMENT_WARNING_MS and run.warned() == []


LEFT_OUT = {0: "UNKNOWN_MEMBER_ID", 1: "ILLEGAL_GENERATION", 2: "ILLEGAL_GENERATION"}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (ev.OffsetCommitFailed(reason="GROUP_MAX_SIZE_REACHED"), "GROUP_MAX_SIZE_REACHED"),
        (ev.OffsetsCommitted(offsets={}, left_out=LEFT_OUT), "ILLEGAL_GENERATION; UNKNOWN_MEMBER_ID"),
        (None, "none"),
    ],
)
def test_offsets_that_cannot_be_adopted_fail_the_run_after_its_budget_with_the_last_answer(
    answer: ev.OffsetCommitFailed | ev.OffsetsCommitted | None, reason: str
) -> None:
    run = RunHarness()
    run.committed = {A: ev.Committed(offset=20)}
    run.silent = {ev.CommitOffsets}
    run.later(ev.Tick(), ms=ASSIGNMENT_WARNING_MS + 1)
    if answer is not None:
        run.later(answer, ms=1_000)
    with pytest.raises(RebalanceTimeout if answer is None else CommitFailed) as failure:
        run.latest()
    assert waited_ms(run) == JOINING_BUDGET_MS
    for text in str(failure.value), run.warned()[-1]:
        assert "the positions of some partitions are not committed by this query yet" in text
        assert f"(the last answer: {reason})" in text
        assert "assign" not in text


def test_starting_offsets_of_unknown_partitions_fail_before_members_join() -> None:
    run = RunHarness(starting=StartingPosition(each=((C, LATEST),)))
    with pytest.raises(OptionError):
        run.latest()
    assert only(ev.Join, run.history) == []


# --- a stream that continues -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("late_ms", [10, 7_000])
def test_resumed_run_continues_after_its_durable_batch_once_it_has_its_partitions(late_ms: int) -> None:
    run = RunHarness.resumed(PAST)
    run.silent = {ev.Join}
    run.ends = {A: 160, B: 40}
    run.later(ev.Assigned(slot=0, client=1, partitions=(A, B)), ms=late_ms)
    following = run.latest()
    assert (following.seq, following.ranges) == (8, {A: (150, 160), B: (40, 40)})
    assert run.steps_of(ev.DescribeGroup) == []


def test_resumed_run_waits_for_its_partitions_once_and_for_a_bounded_time() -> None:
    run = RunHarness.resumed(PAST)
    run.silent = {ev.Join}
    assert run.latest() is run.start
    assert waited_ms(run) == SETTLE_MS_MAX
    run.latest()
    assert waited_ms(run) <= SETTLE_MS_MAX + IDLE_PAUSES_MS[1]


def test_resumed_run_waits_until_a_foreign_commit_is_adopted() -> None:
    """A partition with a foreign commit cannot be planned before it is committed under this stream's name."""
    run = RunHarness.resumed(PAST)
    run.committed[A] = ev.Committed(offset=20)
    assert run.latest().ranges == {A: (20, 150), B: (40, 40)}


def test_replayed_batch_is_read_before_its_partitions_are_assigned() -> None:
    run = RunHarness.resumed(PAST)
    run.silent = {ev.Join}
    assert run.call(ev.BatchStarted(offset=PAST)) == PAST
    assert waited_ms(run) == 0 and run.state() is RunState.READING
    assert run.call(ev.BatchStarted(offset=PAST)) == PAST  # a task's stage is tried again
    run.assigned(A, B)
    run.ends = {A: 160, B: 40}
    assert run.latest().ranges == {A: (150, 160), B: (40, 40)}


# --- nothing to read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("look_ms", "pause_ms"),
    [(0, IDLE_PAUSES_MS[0]), (12, int(12 / IDLE_LOAD_MAX)), (500, IDLE_PAUSES_MS[1])],
)
def test_idle_pause_grows_with_the_duration_of_reading_log_ends(look_ms: int, pause_ms: int) -> None:
    run = idle()
    run.ends_took_ms = look_ms
    run.latest()
    asked_at_ms = run.clock()
    run.latest()
    assert run.clock() - asked_at_ms == pause_ms + look_ms


def test_query_with_records_to_read_does_not_pause() -> None:
    run = RunHarness()
    run.batch()
    before_ms = run.clock()
    for end in (10, 20, 30):
        run.ends[A] = end
        assert run.batch().ranges[A][1] == end
    assert run.clock() == before_ms


def test_rebalance_ends_the_idle_pause() -> None:
    run = idle()
    run.ends_took_ms = 500
    run.latest()
    run.ends[A] = 20
    run.later(ev.Revoking(slot=0, client=1, partitions=(B,), eager=False), ms=300)
    began_ms = run.clock()
    assert run.latest().ranges == {A: (10, 20)}
    assert run.clock() == began_ms + 300 + 2 * run.ends_took_ms  # the ends, and whether it is the same topic


def test_batch_of_another_source_of_the_query_ends_the_idle_pause() -> None:
    run = idle()
    run.ends_took_ms = 10
    run.latest()
    began_ms = run.clock()
    assert run.call(ev.NextBatchRequested(start=run.start, new_stream=STREAM, after_batch=True)) is run.start
    assert run.clock() - began_ms <= 2 * run.ends_took_ms


def test_partition_revoked_while_log_ends_are_read_is_not_planned() -> None:
    run = idle()
    run.ends = {A: 20, B: 5}
    run.feed(ev.NextBatchRequested(start=run.start, new_stream=STREAM))
    run.pass_time(200)
    step = run.step()
    assert isinstance(step, ev.ReadLogEnds) and set(step.ends) == {A, B}
    run.lost(B)
    assert run.call(ev.LogEndsRead(ends={A: 20, B: 5})).ranges == {A: (10, 20)}


# --- AvailableNow and Once -------------------------------------------------------------------------------------------


def test_available_now_reads_to_its_target_commits_and_leaves() -> None:
    run = RunHarness(max_offsets=8)
    run.ends = {A: 10, B: 4}
    run.set_target(dict(run.ends))
    run.ends = {A: 1_000, B: 4}  # later records are left for the next run
    while (before := run.start) != run.batch():
        pass
    assert before.positions() == {A: 10, B: 4}
    assert {tp: at.offset for tp, at in run.committed.items()} == {A: 10, B: 4}
    assert only(ev.Leave, run.history) == [ev.Leave(slot=0, leave=True)]
    assert run.state() is RunState.CLOSED
    assert run.latest() is run.start


def test_resumed_available_now_run_reads_nothing_before_all_its_members_have_an_assignment() -> None:
    """It may end after the batch that reads up to its target."""
    run = RunHarness.resumed(PAST, slots=2)
    run.assignments = {0: (A,)}
    run.ends = {A: 160, B: 50}
    run.set_target(dict(run.ends))
    run.begin(ev.NextBatchRequested(start=PAST, new_stream=STREAM), RunState.GATHERING)
    run.later(ev.Assigned(slot=1, client=run.clients[1], partitions=(B,)), ms=2 * SETTLE_MS_MAX)
    assert run.continue_call().ranges == {A: (150, 160), B: (40, 50)}


def test_bounded_run_whose_partitions_leave_after_the_comparison_with_the_group_compares_again() -> None:
    """A consumer joins while the log ends are read: the run has no partition for a moment, and its target is unread."""
    run = RunHarness(max_offsets=4)
    run.ends = {A: 10, B: 10}
    run.set_target(run.ends)
    run.batch()
    run.pass_time(200)
    run.begin(ev.NextBatchRequested(start=run.start, new_stream=STREAM), RunState.FETCHING_ENDS)
    step = run.step()
    run.feed(ev.Revoking(slot=0, client=1, partitions=(A, B), eager=True))
    run.later(ev.Assigned(slot=0, client=1, partitions=(A, B), generation=2), ms=3_000)
    run.feed(run.answer(step))
    assert run.continue_call().ranges == {A: (2, 4), B: (2, 4)}


def test_bounded_run_waits_for_the_partitions_of_members_that_an_earlier_run_had_more() -> None:
    """The broker keeps them in the group until their sessions end."""
    run = RunHarness.resumed(PAST)
    run.ends = {A: 160, B: 50}
    run.set_target(run.ends)
    run.assignments, run.former_slots = {0: (A,), 1: (B,)}, {1}
    run.batch()
    answer, ends_ms = run.answer, run.clock() + 45_000

    def until_the_session_ends(step: ev.Step) -> ev.Event:
        if run.clock() >= ends_ms:
            run.former_slots, run.assignments = set(), {0: (A, B)}
        return answer(step)

    run.answer = until_the_session_ends  # type: ignore[method-assign]
    run.later(ev.Assigned(slot=0, client=1, partitions=(B,)), ms=45_000)
    while run.start != run.batch():
        pass
    assert run.state() is RunState.CLOSED
    assert {tp: at.offset for tp, at in run.committed.items()} == {A: 160, B: 50}


def go_on(run: RunHarness, until: RunState | int) -> None:
    """Execute the steps of a call until the run is in this state, or until this time."""
    while run.state() is not until and (isinstance(until, RunState) or run.clock() < until):
        step = run.step()
        assert not isinstance(step, ev.RaiseError), step
        if isinstance(step, ev.Wait):
            run._wait(min(step.until_ms, run.clock() + 100))
        elif run.state() is not until:
            run.feed(run.answer(step))


def test_an_outage_is_not_part_of_the_time_for_a_stable_group() -> None:
    run = RunHarness()
    run.set_target({A: 5, B: 5})
    run.ends = {A: 5, B: 5}
    run.batch()
    run.pass_time(100)
    run.group_state = "preparing_rebalancing"
    run.begin(ev.NextBatchRequested(start=run.start, new_stream=STREAM), RunState.FETCHING_ENDS)
    go_on(run, run.clock() + 2_000)
    run.down_until_ms = run.clock() + max(JOINING_BUDGET_MS, UNSETTLED_MS_MIN) + 10_000
    go_on(run, run.down_until_ms + 10_000)
    run.group_state = "stable"
    run.continue_call()
    assert run.state() is RunState.CLOSED


def test_bounded_run_whose_member_is_expelled_in_its_last_commit_commits_when_it_is_back() -> None:
    run = RunHarness()
    run.ends = {A: 5, B: 5}
    run.set_target(run.ends)
    run.batch()
    run.pass_time(100)
    run.silent = {ev.CommitOffsets}
    run.feed(ev.NextBatchRequested(start=run.start, new_stream=STREAM))
    go_on(run, RunState.ENDING)
    run.silent = set()
    run.feed(ev.MemberFailed(slot=0, client=1, reason="UNKNOWN_MEMBER_ID"))
    run.feed(ev.OffsetsCommitted(offsets={}, left_out={0: "UNKNOWN_MEMBER_ID"}))
    run.continue_call()
    assert run.state() is RunState.CLOSED
    assert {tp: at.offset for tp, at in run.committed.items()} == {A: 5, B: 5}


def test_partitions_outside_the_target_are_not_read_but_their_positions_are_planned() -> None:
    run = RunHarness(topics={"orders": 3})
    run.ends = {A: 10, B: 4, C: 5}
    run.set_target({A: 10, B: 4})
    assert run.batch().ranges == {A: (0, 10), B: (0, 4), C: (0, 0)}
    assert run.batch().seq == 0
    assert run.state() is RunState.CLOSED


def test_bounded_run_stays_in_the_group_with_leave_on_stop_never() -> None:
    run = RunHarness(leave_on_stop="never")
    run.set_target(dict(run.ends))
    run.batch()
    assert run.batch().seq == 0
    assert run.state() is RunState.OPEN
    assert run.batch().seq == 0  # the same batch again
    run.stop()
    assert only(ev.Leave, run.history) == [ev.Leave(slot=0, leave=False)]


def test_bounded_run_has_dynamic_members_under_kip_848() -> None:
    run = RunHarness(classic=False)
    run.set_target(dict(run.ends))
    run.latest()
    assert [join.instance_id for join in only(ev.Join, run.history)] == [None]
    once = RunHarness(classic=False)
    once.latest(unlimited=True)
    assert [join.instance_id for join in only(ev.Join, once.history)] == [None]
    unbounded = RunHarness(classic=False)
    unbounded.latest()
    assert [join.instance_id for join in only(ev.Join, unbounded.history)] == ["etl.9f2c.0"]


def test_bounded_run_does_not_end_while_an_assignment_is_on_its_way() -> None:
    run = RunHarness.resumed(PAST)
    run.set_target({A: 150, B: 50})
    run.silent = {ev.Join}
    run.ends = {A: 150, B: 50}
    run.later(ev.Assigned(slot=0, client=1, partitions=(A,)), ms=10)
    run.later(ev.Assigned(slot=0, client=1, partitions=(B,)), ms=20_000)
    assert run.batch().ranges == {A: (150, 150), B: (40, 50)}
    assert run.batch().seq == 8 and run.state() is RunState.CLOSED


def test_bounded_run_ends_without_a_member_that_a_full_group_refused() -> None:
    run = RunHarness(slots=2, auto_slots=True)
    run.ends = {A: 10, B: 4}
    run.set_target(dict(run.ends))
    run.silent = {ev.Join}
    del run.assignments[1]
    run.later(ev.Assigned(slot=0, client=1, partitions=(A, B)), ms=10)
    run.later(ev.MemberFailed(slot=1, client=1, reason="the group is full", group_full=True), ms=10)
    assert run.batch().ranges == {A: (0, 10), B: (0, 4)}
    assert run.batch().seq == 0 and run.state() is RunState.CLOSED
    assert run.clock() < SETTLE_MS_MAX


def test_bounded_run_does_not_end_while_a_log_end_is_unknown() -> None:
    run = RunHarness()
    run.ends = {A: 10, B: 4}
    run.set_target(dict(run.ends))
    del run.ends[B]  # its leader has just moved
    assert run.batch().ranges == {A: (0, 10), B: (0, 0)}
    run.feed(ev.NextBatchRequested(start=run.start, new_stream=STREAM))
    for _ in range(20):
        step = run.step()
        if isinstance(step, ev.Wait):
            run.pass_time(step.until_ms - run.clock())
        else:
            run.feed(run.answer(step))
    assert run.state() in (RunState.FETCHING_ENDS, RunState.SETTLING, RunState.PAUSING)
    run.ends[B] = 4
    assert run.call(ev.Tick()).ranges == {A: (10, 10), B: (0, 4)}


def test_bounded_run_fails_if_the_group_does_not_become_stable_in_time() -> None:
    run = RunHarness.resumed(PAST)
    run.set_target(PAST.positions())
    run.group_state = "completing_rebalance"
    with pytest.raises(RebalanceTimeout) as failure:
        run.latest()
    assert JOINING_BUDGET_MS <= waited_ms(run) <= JOINING_BUDGET_MS + 1_000
    assert "has not reached a stable assignment" in str(failure.value)
    assert len(run.steps_of(ev.DescribeGroup)) <= JOINING_BUDGET_MS // DESCRIBE_PAUSE_MS + 2


def test_bounded_run_waits_for_the_present_leader_longer_than_a_short_joining_budget() -> None:
    run = RunHarness.resumed(replace(PAST, leader_epochs={A: 2}), joining_budget_ms=EARLIER_MS // 2)
    run.set_target({A: 150, B: 45})
    run.leader_epochs, run.ends = {A: 0, B: 0}, {A: 150, B: 45}
    assert run.batch().ranges == {A: (150, 150), B: (40, 45)}
    assert run.batch().seq == 8 and run.state() is RunState.CLOSED
    assert run.clock() >= EARLIER_MS


def test_error_names_partitions_that_another_driver_of_the_stream_holds() -> None:
    run = RunHarness.resumed(PAST)
    run.set_target(PAST.positions())
    run.silent = {ev.Join}
    run.later(ev.Assigned(slot=0, client=1, partitions=(A,)), ms=10)
    with pytest.raises(
        RebalanceTimeout, match=r"do not belong to this run have 1 partitions, such as orders-1: another driver"
    ):
        run.latest()


def test_a_planned_batch_restarts_the_budget_for_a_stable_group() -> None:
    run = RunHarness.resumed(PAST, max_offsets=1)
    run.set_target({A: 160, B: 40})
    run.ends = {A: 160, B: 40}
    run.group_state = "completing_rebalance"
    for seq in range(8, 18):
        assert run.batch().seq == seq
    with pytest.raises(RebalanceTimeout):
        run.latest()


def test_once_reads_everything_available() -> None:
    run = RunHarness(max_offsets=3, min_offsets=1_000)
    run.ends = {A: 10, B: 4}
    assert run.batch(unlimited=True).ranges == {A: (0, 10), B: (0, 4)}


@pytest.mark.parametrize(("durable", "has_them"), [(0, True), (-1, False), (3, False)])
def test_once_commits_at_the_stop_if_the_sink_reports_its_batch_as_durable(durable: int, has_them: bool) -> None:
    run = RunHarness()
    run.ends = {A: 10, B: 4}
    run.batch(unlimited=True)
    run.stop(durable=durable)
    assert {tp: at.offset for tp, at in run.committed.items()} == ({A: 10, B: 4} if has_them else {A: 0, B: 0})
    assert only(ev.Leave, run.history) == [ev.Leave(slot=0, leave=True)]
    assert any("only batch" in text and "at the next start" in text for text in run.logged()) != has_them


def test_once_with_nothing_to_read_returns_the_start() -> None:
    run = RunHarness.resumed(PAST)
    assert run.latest(unlimited=True) is run.start
    assert run.state() is RunState.OPEN


def test_members_that_lose_their_assignment_for_good_fail_the_run_after_its_budget() -> None:
    """Nothing else would show it: each call ends, with nothing to read."""
    run = RunHarness()
    run.ends = {A: 5, B: 7}
    run.batch()
    run.latest()
    run.silent = {ev.Join}
    run.feed(ev.Lost(slot=0, client=1, partitions=(A, B)))
    lost_ms = run.clock()
    while run.clock() < lost_ms + JOINING_BUDGET_MS:
        run.latest()
        run.pass_time(1_000)
    with pytest.raises(RebalanceTimeout, match="has not assigned partitions"):
        run.latest()


# --- runs that Spark may end after one batch, without another call ----------------------------------------------------


@pytest.mark.parametrize(("single", "reads_all"), [("no", False), ("maybe", True), ("yes", True)])
def test_a_batch_that_may_be_the_last_one_waits_a_bounded_time_for_the_end_of_a_partition(
    single: str, reads_all: bool
) -> None:
    run = RunHarness.resumed(PAST, single_batch=single)
    run.ends = {A: 160}
    began_ms = run.clock()
    assert run.latest().ranges[A] == (150, 160)
    assert (run.clock() - began_ms >= LEADER_MS_MAX) == reads_all  # an election takes less


def test_a_batch_that_may_be_the_last_one_waits_for_a_stable_group_and_the_next_one_does_not() -> None:
    run = RunHarness.resumed(PAST, single_batch="maybe")
    run.ends[A] = 160
    run.batch()
    assert ev.DescribeGroup() in run.steps
    run.group_state = "completing_rebalance"
    run.ends[A] = 170
    assert run.latest().ranges[A] == (160, 170)
    unstable = RunHarness.resumed(PAST, single_batch="maybe")
    unstable.group_state = "completing_rebalance"
    with pytest.raises(RebalanceTimeout):
        unstable.latest()


def test_a_declared_single_batch_reads_everything_and_leaves_the_group_at_the_stop() -> None:
    run = RunHarness(max_offsets=3, single_batch="yes")
    run.ends = {A: 10, B: 4}
    assert run.batch().ranges == {A: (0, 10), B: (0, 4)}
    run.stop(durable=0)
    assert only(ev.Leave, run.history) == [ev.Leave(slot=0, leave=True)]
    assert run.warned() == []


def test_offsets_of_a_batch_that_may_be_the_last_one_are_committed_when_the_sink_has_it() -> None:
    run = RunHarness(single_batch="maybe")
    run.ends = {A: 10, B: 4}
    plan = run.batch()
    assert run.run.last_batch == plan.seq
    run.feed(ev.Durable(offset=plan))
    run.pass_time(1_000)
    assert {tp: at.offset for tp, at in run.committed.items()} == {A: 10, B: 4}
    assert run.run.last_batch == -1
    run.ends[A] = 12
    following = run.batch()
    assert (following.seq, following.ranges[A]) == (plan.seq + 1, (10, 12))
    assert run.run.last_batch == -1, "a second call shows that Spark requests every batch"


@pytest.mark.parametrize(("calls", "reports"), [(1, True), (2, False)])
def test_a_run_that_may_have_ended_after_a_limited_batch_reports_what_it_left(calls: int, reports: bool) -> None:
    run = RunHarness(max_offsets=3, single_batch="maybe")
    run.ends = {A: 10, B: 4}
    for _ in range(calls):
        run.batch()
    run.stop(durable=calls - 1)
    assert any("11 offsets are left" in text and "option trigger" in text for text in run.warned()) == reports


def test_a_run_that_ends_after_the_batch_of_an_earlier_run_reports_that_it_read_no_more() -> None:
    run = RunHarness(single_batch="maybe")
    run.call(ev.BatchStarted(offset=PAST))
    run.stop(durable=PAST.seq)
    assert any("batch 7 of an earlier run" in text and "run it again" in text for text in run.warned())


# --- between two triggers --------------------------------------------------------------------------------------------


def reading(**rules: Any) -> tuple[RunHarness, StreamOffset]:
    """A run of which Spark has read a batch, in the middle of a trigger interval."""
    run = RunHarness(**rules)
    run.ends = {A: 10, B: 4}
    return run, run.batch()


def test_G2_a_batch_that_the_sink_has_marked_is_committed_before_spark_requests_the_next_one() -> None:
    run, batch = reading()
    run.feed(ev.BatchMarked(batch=BatchKey.of(batch)))
    run.pass_time(1_000)
    assert {tp: at.offset for tp, at in run.committed.items()} == {A: 10, B: 4}
    run.ends[A] = 12
    assert run.latest().ranges == {A: (10, 12), B: (4, 4)}


def test_G3_a_revocation_between_two_triggers_is_released_when_the_sink_has_the_batch() -> None:
    run, batch = reading()
    revoking = ev.Revoking(slot=0, client=run.clients[0], partitions=(A, B), eager=True)
    assert run.feed(revoking) == [], "held"
    run.feed(ev.BatchMarked(batch=BatchKey.of(batch)))
    run.pass_time(1_000)
    assert run.committed[A].offset == 10
    assert len(only(ev.Release, run.history)) == 1


def test_a_batch_that_a_query_reads_twice_may_be_durable_before_the_second_time() -> None:
    """A union of one load() with itself, after a kill behind the sink's mark: the mark of the run before is found
    between the two calls."""
    run, batch = reading()
    run.feed(ev.BatchMarked(batch=BatchKey.of(batch)))
    run.call(ev.BatchStarted(offset=batch))
    assert run.state() is RunState.OPEN


def test_a_mark_of_another_batch_with_this_number_changes_nothing() -> None:
    """A run that was killed left it, and the checkpoint was restored since."""
    run, batch = reading()
    run.feed(ev.BatchMarked(batch=BatchKey.of(replace(batch, ranges={A: (0, 9), B: (0, 4)}))))
    run.pass_time(1_000)
    assert run.committed[A].offset == 0
    assert run.state() is RunState.READING


def test_without_a_mark_a_batch_is_committed_when_spark_requests_the_next_one() -> None:
    """Another sink, or a driver that shares no folder with the stream reader."""
    run, _ = reading()
    run.feed(ev.DrainRequested())
    run.pass_time(600_000)
    assert run.committed[A].offset == 0 and not run.drained()
    assert run.latest() is run.start
    assert run.committed[A].offset == 10 and run.drained()


def test_a_drain_between_two_triggers_needs_no_call_of_spark() -> None:
    run, batch = reading()
    run.feed(ev.BatchMarked(batch=BatchKey.of(batch)))
    run.feed(ev.DrainRequested())
    assert not run.drained(), "its offsets are not committed yet"
    run.pass_time(1_000)
    assert run.drained()
    run.ends[A] = 20
    assert run.latest() is run.start, "nothing is planned after it"
    assert run.drained()


# --- drain -----------------------------------------------------------------------------------------------------------


def test_drain_commits_durable_offsets_and_plans_no_more_batches() -> None:
    run = RunHarness()
    run.ends[A] = 10
    run.batch()
    run.ends[A] = 20
    assert run.latest(drain=True) is run.start
    assert run.state() is RunState.DRAINED and run.drained()
    assert run.run.statistics().state == "drained"
    assert run.committed[A].offset == 10
    began_ms = run.clock()
    assert run.latest(drain=True) is run.start
    assert run.clock() == began_ms + IDLE_PAUSES_MS[1]  # Spark calls repeatedly


def test_drain_waits_for_the_batch_in_flight() -> None:
    run = RunHarness()
    run.ends[A] = 10
    planned = run.latest()
    assert run.latest(drain=True) == planned
    assert not run.drained()
    run.call(ev.BatchStarted(offset=planned))
    run.start = planned
    assert run.latest(drain=True) is planned
    assert run.drained() and run.committed[A].offset == 10


@pytest.mark.parametrize("state", BEFORE_PLAN)
def test_a_drain_in_mid_call_plans_no_batch(state: RunState) -> None:
    run = RunHarness()
    for _ in range(2 * (state is RunState.PAUSING)):  # a pause follows a look in vain
        run.batch()
    run.ends[A] = 10
    run.begin(ev.NextBatchRequested(start=run.start, new_stream=STREAM), state)
    run.feed(ev.DrainRequested())
    assert run.continue_call() is run.start
    assert run.drained()


def test_a_drain_during_an_outage_leaves_no_outage_open() -> None:
    """A drained run sends no further request whose answer could end it."""
    run = RunHarness()
    run.batch()
    run.down_until_ms = run.clock() + 20_000
    run.begin(ev.NextBatchRequested(start=run.start, new_stream=STREAM), RunState.FETCHING_ENDS)
    run.feed(run.answer(run.step()))
    assert run.run.statistics().unreachable_since_ms
    run.feed(ev.DrainRequested())
    run.continue_call()
    assert run.drained() and not run.run.statistics().unreachable_since_ms


def test_a_drain_ends_the_wait_of_a_bounded_run_for_its_group() -> None:
    run = RunHarness()
    run.set_target(run.ends)
    run.batch()
    run.group_state = "rebalancing"
    run.later(ev.DrainRequested(), ms=5_000)
    began_ms = run.clock()
    assert run.latest() is run.start
    assert run.drained() and run.clock() - began_ms < 10_000


def test_drain_without_a_commit_returns_after_its_bound_and_is_not_drained() -> None:
    run = RunHarness()
    run.ends[A] = 10
    run.batch()
    run.pass_time(ANSWER_MS)
    run.silent = {ev.CommitOffsets}
    began_ms = run.clock()
    assert run.latest(drain=True) is run.start
    assert run.clock() - began_ms == COMMIT_MS_MAX
    assert not run.drained()
    assert any("were not committed within 60 s" in text for text in run.warned())


def test_drain_waits_for_a_member_that_lost_the_partitions_of_the_last_batch() -> None:
    """It is about to get them back and to commit their offsets."""
    run = RunHarness()
    run.ends = {A: 5, B: 5}
    plan = run.batch()
    run.pass_time(100)
    run.feed(ev.MemberFailed(slot=0, client=1, reason="expelled"), ev.DrainRequested())
    run.feed(ev.BatchMarked(batch=BatchKey.of(plan)))
    assert run.state() is RunState.OPEN and not run.drained()
    run.pass_time(1_000)
    assert run.drained() and {tp: at.offset for tp, at in run.committed.items()} == {A: 5, B: 5}


def test_drain_of_a_resumed_run_waits_for_a_member_that_joins_late() -> None:
    run = RunHarness.resumed(PAST)
    run.committed = {tp: ev.Committed(offset=0, stream=STREAM, seq=2) for tp in (A, B)}
    run.assignments = {}
    run.latest()
    run.feed(ev.DrainRequested())
    assert not run.drained()


def test_uncommitted_offsets_are_counted_until_their_commit_succeeds() -> None:
    run = RunHarness()
    run.ends = {A: 10, B: 7}
    run.batch()
    assert run.run.statistics().uncommitted_offsets == 0, "no batch of it is durable yet"
    run.silent = {ev.CommitOffsets}
    run.ends = {A: 15, B: 7}
    run.batch()
    assert run.run.statistics().uncommitted_offsets == 17
    run.feed(ev.OffsetsCommitted(offsets={A: 10, B: 7}))
    assert run.run.statistics().uncommitted_offsets == 0


@pytest.mark.parametrize("committed", [True, False])
def test_stopped_run_reports_its_last_batch_as_committed_only_if_kafka_has_all_positions(committed: bool) -> None:
    run = RunHarness()
    run.ends = {A: 10, B: 7}
    plan = run.batch()
    run.silent = set() if committed else {ev.CommitOffsets}
    assert run.run.committed_offset is None
    run.stop(durable=plan.seq)
    assert run.state() is RunState.CLOSED
    assert run.run.committed_offset == (plan if committed else None)


def test_stopped_run_that_followed_a_commit_inside_its_last_batch_does_not_report_that_batch_as_committed() -> None:
    """The next run would take the next commit of that consumer, further in the batch, for a move back."""
    run = RunHarness.resumed(PAST)
    run.committed[A] = ev.Committed(offset=120)
    run.latest()
    run.stop(durable=PAST.seq)
    assert run.committed[A] == replace(run.committed[A], offset=120, stream=STREAM), "it is committed by this stream"
    assert run.run.committed_offset is None


def test_stopped_run_with_a_commit_on_its_way_does_not_report_its_last_batch_as_committed() -> None:
    """Its topic was recreated, so it has no position to compare; the commit may fail all the same."""
    group = GroupHarness()
    group.start_stream()
    group.reads({A: (100, 150)})
    assert only(ev.CommitOffsets, group.durable())
    group.feed(ev.RecordsMissing(offsets={}, reason="topic orders was recreated", topics=("orders",)))
    group.close(leave=False)
    assert group.run.committed_offset is None


# --- failures --------------------------------------------------------------------------------------------------------


def test_failure_is_raised_by_the_next_call() -> None:
    run = idle()
    run.feed(ev.Replaced(reason="INVALID_PRODUCER_EPOCH"))
    assert run.state() is RunState.FAILED
    with pytest.raises(Fenced):
        run.latest()
    with pytest.raises(Fenced):
        run.latest()
    run.feed(ev.InternalFailure(error=BrokerUnavailable("later")))
    with pytest.raises(Fenced):
        run.call(ev.BatchStarted(offset=run.start))
    run.stop()
    assert run.state() is RunState.CLOSED


def test_failure_ends_a_waiting_call() -> None:
    run = RunHarness()
    run.silent = {ev.Join}
    run.later(ev.InternalFailure(error=InvariantBroken("thread worker died")), ms=500)
    with pytest.raises(InvariantBroken, match="thread worker died"):
        run.latest()
    assert waited_ms(run) == 500


def test_no_member_joins_after_a_failure_during_the_start() -> None:
    run = RunHarness.resumed(PAST)
    run.feed(
        ev.NextBatchRequested(start=PAST, new_stream=STREAM),
        ev.InternalFailure(error=BrokerUnavailable("no answer")),
    )
    with pytest.raises(BrokerUnavailable):
        run.latest()
    run.feed(ev.Durable(offset=PAST))
    with pytest.raises(BrokerUnavailable):
        run.latest()
    run.stop()
    assert only(ev.Join, run.history) == []


def test_broken_invariant_fails_the_run_with_the_last_events() -> None:
    run = idle()
    impossible = StreamOffset(group=GROUP, stream=STREAM, seq=99)
    assert only(ev.Fail, run.feed(ev.Durable(offset=impossible)))
    with pytest.raises(InvariantBroken) as failure:
        run.latest()
    assert "batch 99 is durable, but this run did not plan it. The last events:" in str(failure.value)
    assert "Planned(offset=batch 0" in str(failure.value)


def test_transition_missing_in_the_table_fails_the_run_with_the_last_events() -> None:
    run = idle()
    run.feed(ev.MembersClosing(leave=False))
    with pytest.raises(InvariantBroken) as failure:
        run.latest()
    assert "the run: MembersClosing in state open. The last events:" in str(failure.value)


# --- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "bounded", "leave"),
    [
        ("auto", False, False),
        ("auto", True, True),
        ("always", False, True),
        ("never", True, False),
    ],
)
def test_members_leave_at_the_stop_according_to_leave_on_stop(rule: str, bounded: bool, leave: bool) -> None:
    run = RunHarness(leave_on_stop=rule)
    run.batch(unlimited=bounded)
    run.stop()
    assert only(ev.Leave, run.history) == [ev.Leave(slot=0, leave=leave)]
    assert run.steps_of(ev.CloseMembers) == [ev.CloseMembers(leave=leave)]


def test_stop_waits_a_bounded_time_for_the_last_commit() -> None:
    run = RunHarness()
    run.ends[A] = 10
    end = run.batch()
    began_ms = run.clock()
    run.stop(durable=end.seq)
    assert run.committed[A].offset == 10
    assert run.clock() - began_ms <= 3 * ANSWER_MS

    run = idle()
    run.silent = {ev.CommitOffsets}
    run.ends[A] = 20
    end = run.batch()
    began_ms = run.clock()
    run.stop(durable=end.seq)
    assert run.clock() - began_ms == STOP_COMMIT_MS_MAX
    assert run.state() is RunState.CLOSED


def test_failure_during_the_stop_ends_the_wait_and_closes_the_members() -> None:
    run = idle()
    run.silent = {ev.CommitOffsets}
    run.ends[A] = 20
    run.batch()
    run.later(ev.InternalFailure(error=InvariantBroken("thread worker died")), ms=100)
    began_ms = run.clock()
    run.stop(durable=1)
    assert run.clock() - began_ms == 100
    assert run.steps_of(ev.CloseMembers) and run.state() is RunState.CLOSED


def test_run_without_a_call_stops_at_once() -> None:
    run = RunHarness()
    run.stop()
    assert run.state() is RunState.CLOSED
    assert run.steps_of(ev.CloseMembers) == []
    run.stop()
