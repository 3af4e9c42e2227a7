"""What a call of Spark waits for, when batches are planned, and how a run ends: the run through its two doors."""

from typing import Any

import pytest
from kit.harness import GROUP, JOINING_BUDGET_MS, STREAM, only, tps
from kit.run_harness import ANSWER_MS, RunHarness

from spark_group_source.errors import BrokerUnavailable, Fenced, InvariantBroken, OptionError, RebalanceTimeout
from spark_group_source.model import LATEST
from spark_group_source.options.starting import StartingPosition
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.offsets import StreamOffset
from spark_group_source.protocol.run import (
    ASSIGNMENT_WARNING_MS,
    COMMIT_MS_MAX,
    IDLE_LOAD_MAX,
    IDLE_PAUSES_MS,
    SETTLE_MS_MAX,
    STOP_COMMIT_MS_MAX,
)
from spark_group_source.protocol.states import RunState

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


def test_the_first_batch_waits_for_the_slowest_slot() -> None:
    run = RunHarness(slots=2)
    run.gives = {0: (A,)}
    run.ends = {A: 5, B: 7}
    run.later(ev.Assigned(slot=1, client=1, partitions=(B,)), ms=6_000)
    run.gives[1] = (B,)  # what the group says of it
    run.silent = {ev.Join}
    run.later(ev.Assigned(slot=0, client=1, partitions=(A,)), ms=100)
    assert run.latest().ranges == {A: (0, 5), B: (0, 7)}
    assert waited_ms(run) >= 6_000


def test_the_first_batch_of_a_stream_is_planned_even_when_there_is_nothing_to_read() -> None:
    run = RunHarness()
    first = run.latest()
    assert (first.stream, first.seq, first.batch()) == (STREAM, 0, [])
    assert first.positions() == {A: 0, B: 0}


def test_the_first_batch_waits_until_an_assignment_that_is_on_its_way_has_come() -> None:
    run = RunHarness()
    run.gives = {0: (A, B)}
    run.silent = {ev.Join}
    run.later(ev.Assigned(slot=0, client=1, partitions=(A,)), ms=100)
    run.later(ev.Assigned(slot=0, client=1, partitions=(B,)), ms=3_000)  # KIP-848 gives them one by one
    run.ends = {A: 5, B: 7}
    assert run.latest().ranges == {A: (0, 5), B: (0, 7)}
    assert 3_000 <= waited_ms(run) < 3_500
    assert len(run.took(ev.DescribeGroup)) <= 3_000 // IDLE_PAUSES_MS[0] + 2


@pytest.mark.parametrize("state", ["stable", "preparing_rebalance"])
def test_the_first_batch_does_not_wait_long_for_a_group_that_does_not_come_to_rest(state: str) -> None:
    run = RunHarness()
    run.group_state = state
    run.gives = {0: (A, B)}
    run.silent = {ev.Join}
    run.later(ev.Assigned(slot=0, client=1, partitions=(A,)), ms=100)  # the other one never comes
    run.ends = {A: 5, B: 7}
    assert run.latest().ranges == {A: (0, 5)}
    assert SETTLE_MS_MAX <= waited_ms(run) <= SETTLE_MS_MAX + 200


def test_members_of_a_former_run_that_still_have_partitions_are_waited_for() -> None:
    """A killed run of this stream: what its members have will be ours when their session ends."""
    run = RunHarness(slots=2)
    run.gives = {0: (A,), 1: ()}
    run.ends = {A: 5, B: 7}
    run.later(ev.Assigned(slot=1, client=1, partitions=(B,)), ms=5_000)
    run.silent = {ev.Join}
    for slot in (0, 1):
        run.later(ev.Assigned(slot=slot, client=1, partitions=run.gives[slot]), ms=10)
    run.gives[1] = (B,)
    assert run.latest().ranges == {A: (0, 5), B: (0, 7)}


def test_a_group_that_gives_nothing_is_told_of_and_then_given_up() -> None:
    run = RunHarness()
    run.silent = {ev.Join}
    run.later(ev.Tick(), ms=ASSIGNMENT_WARNING_MS + 1)
    with pytest.raises(RebalanceTimeout) as failure:
        run.latest()
    assert waited_ms(run) == JOINING_BUDGET_MS
    assert "has not assigned partitions within 75 s for all 1 members of this query (slot states: joining)" in str(
        failure.value
    )
    assert "Join(slot=0" in str(failure.value)
    (warning,) = run.warned()
    assert "not all 1 members of this query have an assignment after 10 s; waiting up to 75 s" in warning


def test_starting_offsets_for_other_partitions_than_there_are_fail_before_anyone_joins() -> None:
    run = RunHarness(starting=StartingPosition(each=((C, LATEST),)))
    with pytest.raises(OptionError):
        run.latest()
    assert only(ev.Join, run.history) == []


# --- a stream that continues -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("late_ms", [10, 7_000])
def test_a_returning_run_goes_on_after_its_durable_batch_when_it_has_its_partitions(late_ms: int) -> None:
    run = RunHarness.returning(PAST)
    run.silent = {ev.Join}
    run.ends = {A: 160, B: 40}
    run.later(ev.Assigned(slot=0, client=1, partitions=(A, B)), ms=late_ms)
    following = run.latest()
    assert (following.seq, following.ranges) == (8, {A: (150, 160), B: (40, 40)})
    assert run.took(ev.DescribeGroup) == []


def test_a_returning_run_waits_for_its_partitions_once_and_not_for_ever() -> None:
    run = RunHarness.returning(PAST)
    run.silent = {ev.Join}
    assert run.latest() is run.start
    assert waited_ms(run) == SETTLE_MS_MAX
    run.latest()
    assert waited_ms(run) <= SETTLE_MS_MAX + IDLE_PAUSES_MS[1]


def test_a_returning_run_waits_for_a_commit_that_it_takes_over() -> None:
    """A partition under somebody else's name cannot be planned before Kafka has it under ours."""
    run = RunHarness.returning(PAST)
    run.committed[A] = ev.Committed(offset=20)
    assert run.latest().ranges == {A: (20, 150), B: (40, 40)}


def test_a_replayed_batch_is_read_before_its_partitions_come() -> None:
    run = RunHarness.returning(PAST)
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
def test_idle_pauses_grow_with_the_cost_of_asking(look_ms: int, pause_ms: int) -> None:
    run = idle()
    run.look_ms = look_ms
    run.latest()
    asked_at_ms = run.clock()
    run.latest()
    assert run.clock() - asked_at_ms == pause_ms + look_ms


def test_a_query_that_is_not_idle_does_not_rest() -> None:
    run = RunHarness()
    run.batch()
    before_ms = run.clock()
    for end in (10, 20, 30):
        run.ends[A] = end
        assert run.batch().ranges[A][1] == end
    assert run.clock() == before_ms


def test_a_rebalance_ends_the_rest() -> None:
    run = idle()
    run.look_ms = 500
    run.latest()
    run.ends[A] = 20
    run.later(ev.Revoking(slot=0, client=1, partitions=(B,), eager=False), ms=300)
    began_ms = run.clock()
    assert run.latest().ranges == {A: (10, 20)}
    assert run.clock() == began_ms + 300 + 2 * run.look_ms  # the ends, and whether it is the same topic


def test_what_leaves_while_the_brokers_are_asked_is_not_planned() -> None:
    run = idle()
    run.ends = {A: 20, B: 5}
    run.feed(ev.NextBatchRequested(start=run.start, name=STREAM))
    run.pass_time(200)
    step = run.step()
    assert isinstance(step, ev.ReadLogEnds) and set(step.ends) == {A, B}
    run.lost(B)
    assert run.call(ev.LogEndsRead(ends={A: 20, B: 5})).ranges == {A: (10, 20)}


# --- AvailableNow and Once -------------------------------------------------------------------------------------------


def test_an_available_now_run_reads_to_its_target_brings_its_offsets_and_leaves() -> None:
    run = RunHarness(max_offsets=8)
    run.ends = {A: 10, B: 4}
    run.aim(dict(run.ends))
    run.ends = {A: 1_000, B: 4}  # what comes later is left for the next run
    while (before := run.start) != run.batch():
        pass
    assert before.positions() == {A: 10, B: 4}
    assert {tp: at.offset for tp, at in run.committed.items()} == {A: 10, B: 4}
    assert only(ev.Leave, run.history) == [ev.Leave(slot=0, leave=True)]
    assert run.state() is RunState.CLOSED
    assert run.latest() is run.start


def test_partitions_outside_the_target_are_not_read_but_their_positions_are_written_down() -> None:
    run = RunHarness(topics={"orders": 3})
    run.ends = {A: 10, B: 4, C: 5}
    run.aim({A: 10, B: 4})
    assert run.batch().ranges == {A: (0, 10), B: (0, 4), C: (0, 0)}
    assert run.batch().seq == 0
    assert run.state() is RunState.CLOSED


def test_a_bounded_run_that_must_not_leave_stays() -> None:
    run = RunHarness(leave_on_stop="never")
    run.aim(dict(run.ends))
    run.batch()
    assert run.batch().seq == 0
    assert run.state() is RunState.OPEN
    assert run.batch().seq == 0  # asked again, it says the same
    run.stop()
    assert only(ev.Leave, run.history) == [ev.Leave(slot=0, leave=False)]


def test_members_of_a_bounded_run_are_dynamic_where_static_ones_cannot_leave() -> None:
    run = RunHarness(classic=False)
    run.aim(dict(run.ends))
    run.latest()
    assert [join.instance_id for join in only(ev.Join, run.history)] == [None]
    once = RunHarness(classic=False)
    once.latest(unlimited=True)
    assert [join.instance_id for join in only(ev.Join, once.history)] == [None]
    unbounded = RunHarness(classic=False)
    unbounded.latest()
    assert [join.instance_id for join in only(ev.Join, unbounded.history)] == ["etl.9f2c.0"]


def test_a_bounded_run_does_not_end_while_an_assignment_is_on_its_way() -> None:
    run = RunHarness.returning(PAST)
    run.aim({A: 150, B: 50})
    run.silent = {ev.Join}
    run.ends = {A: 150, B: 50}
    run.later(ev.Assigned(slot=0, client=1, partitions=(A,)), ms=10)
    run.later(ev.Assigned(slot=0, client=1, partitions=(B,)), ms=20_000)
    assert run.batch().ranges == {A: (150, 150), B: (40, 50)}
    assert run.batch().seq == 8 and run.state() is RunState.CLOSED


def test_a_bounded_run_does_not_end_while_the_end_of_a_partition_is_not_told() -> None:
    run = RunHarness()
    run.ends = {A: 10, B: 4}
    run.aim(dict(run.ends))
    del run.ends[B]  # its leader has just moved
    assert run.batch().ranges == {A: (0, 10), B: (0, 0)}
    run.feed(ev.NextBatchRequested(start=run.start, name=STREAM))
    for _ in range(20):
        step = run.step()
        if isinstance(step, ev.Wait):
            run.pass_time(step.until_ms - run.clock())
        else:
            run.feed(run.answer(step))
    assert run.state() in (RunState.FETCHING_ENDS, RunState.SETTLING, RunState.PAUSING)
    run.ends[B] = 4
    assert run.call(ev.Tick()).ranges == {A: (10, 10), B: (0, 4)}


def test_settling_of_a_bounded_run_has_a_bound_and_says_what_it_waited_for() -> None:
    run = RunHarness.returning(PAST)
    run.aim(PAST.positions())
    run.group_state = "completing_rebalance"
    with pytest.raises(RebalanceTimeout) as failure:
        run.latest()
    assert JOINING_BUDGET_MS <= waited_ms(run) <= JOINING_BUDGET_MS + 1_000
    assert "has not reached a stable assignment" in str(failure.value)
    assert len(run.took(ev.DescribeGroup)) <= JOINING_BUDGET_MS // IDLE_PAUSES_MS[0] + 2


def test_a_bounded_run_that_another_driver_keeps_partitions_from_says_so() -> None:
    run = RunHarness.returning(PAST)
    run.aim(PAST.positions())
    run.silent = {ev.Join}
    run.later(ev.Assigned(slot=0, client=1, partitions=(A,)), ms=10)
    with pytest.raises(
        RebalanceTimeout, match=r"do not belong to this run have 1 partitions, such as orders-1: another driver"
    ):
        run.latest()


def test_reading_on_begins_the_bound_of_settling_anew() -> None:
    run = RunHarness.returning(PAST, max_offsets=1)
    run.aim({A: 160, B: 40})
    run.ends = {A: 160, B: 40}
    run.group_state = "completing_rebalance"
    for seq in range(8, 18):
        assert run.batch().seq == seq
    with pytest.raises(RebalanceTimeout):
        run.latest()


def test_once_takes_all_there_is() -> None:
    run = RunHarness(max_offsets=3, min_offsets=1_000)
    run.ends = {A: 10, B: 4}
    assert run.batch(unlimited=True).ranges == {A: (0, 10), B: (0, 4)}


@pytest.mark.parametrize(("durable", "has_them"), [(0, True), (-1, False), (3, False)])
def test_once_brings_its_offsets_at_the_stop_when_the_sink_says_that_it_has_them(durable: int, has_them: bool) -> None:
    run = RunHarness()
    run.ends = {A: 10, B: 4}
    run.batch(unlimited=True)
    run.stop(durable=durable)
    assert {tp: at.offset for tp, at in run.committed.items()} == ({A: 10, B: 4} if has_them else {A: 0, B: 0})
    assert only(ev.Leave, run.history) == [ev.Leave(slot=0, leave=True)]
    assert any("Trigger.Once" in text and "at the next start" in text for text in run.said()) != has_them


def test_once_with_nothing_to_read_returns_the_start() -> None:
    run = RunHarness.returning(PAST)
    assert run.latest(unlimited=True) is run.start
    assert run.state() is RunState.OPEN


# --- drain -----------------------------------------------------------------------------------------------------------


def test_a_drain_brings_what_is_durable_to_kafka_and_plans_no_more() -> None:
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
    assert run.clock() == began_ms + IDLE_PAUSES_MS[1]  # Spark asks again and again


def test_a_drain_waits_for_the_batch_that_spark_has() -> None:
    run = RunHarness()
    run.ends[A] = 10
    planned = run.latest()
    assert run.latest(drain=True) == planned
    assert not run.drained()
    run.call(ev.BatchStarted(offset=planned))
    run.start = planned
    assert run.latest(drain=True) is planned
    assert run.drained() and run.committed[A].offset == 10


def test_a_drain_that_kafka_does_not_answer_answers_all_the_same_and_is_not_drained() -> None:
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


def test_offsets_that_the_sink_has_and_kafka_has_not_are_counted_until_their_commit_is_done() -> None:
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


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_failure_reaches_the_next_call() -> None:
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


def test_a_failure_while_the_call_waits_ends_it() -> None:
    run = RunHarness()
    run.silent = {ev.Join}
    run.later(ev.InternalFailure(error=InvariantBroken("thread worker died")), ms=500)
    with pytest.raises(InvariantBroken, match="thread worker died"):
        run.latest()
    assert waited_ms(run) == 500


def test_a_failure_before_the_stream_has_a_name_makes_no_members_later() -> None:
    run = RunHarness.returning(PAST)
    run.feed(
        ev.NextBatchRequested(start=PAST, name=STREAM), ev.InternalFailure(error=BrokerUnavailable("nobody answered"))
    )
    with pytest.raises(BrokerUnavailable):
        run.latest()
    run.feed(ev.Durable(offset=PAST))
    with pytest.raises(BrokerUnavailable):
        run.latest()
    run.stop()
    assert only(ev.Join, run.history) == []


def test_a_broken_rule_fails_the_run_with_its_story() -> None:
    run = idle()
    impossible = StreamOffset(group=GROUP, stream=STREAM, seq=99)
    assert only(ev.Fail, run.feed(ev.Durable(offset=impossible)))
    with pytest.raises(InvariantBroken) as failure:
        run.latest()
    assert "batch 99 is durable, but this run did not plan it. The last events:" in str(failure.value)
    assert "Planned(offset=batch 0" in str(failure.value)


def test_a_change_that_is_not_in_the_table_fails_the_run_with_its_story() -> None:
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
def test_whether_members_leave_at_the_stop(rule: str, bounded: bool, leave: bool) -> None:
    run = RunHarness(leave_on_stop=rule)
    run.batch(unlimited=bounded)
    run.stop()
    assert only(ev.Leave, run.history) == [ev.Leave(slot=0, leave=leave)]
    assert run.took(ev.CloseMembers) == [ev.CloseMembers(leave=leave)]


def test_a_stop_waits_for_the_last_commit_within_a_bound() -> None:
    run = RunHarness()
    run.ends[A] = 10
    end = run.batch()
    began_ms = run.clock()
    run.stop(durable=end.seq)
    assert run.committed[A].offset == 10
    assert run.clock() - began_ms <= 3 * ANSWER_MS

    run = RunHarness()
    run.silent = {ev.CommitOffsets}
    run.batch()
    began_ms = run.clock()
    run.stop()
    assert run.clock() - began_ms == STOP_COMMIT_MS_MAX
    assert run.state() is RunState.CLOSED


def test_a_failure_during_the_stop_ends_the_wait_and_closes_the_members_all_the_same() -> None:
    run = idle()
    run.silent = {ev.CommitOffsets}
    run.ends[A] = 20
    run.batch()
    run.later(ev.InternalFailure(error=InvariantBroken("thread worker died")), ms=100)
    began_ms = run.clock()
    run.stop(durable=1)
    assert run.clock() - began_ms == 100
    assert run.took(ev.CloseMembers) and run.state() is RunState.CLOSED


def test_a_run_that_never_began_stops_at_once() -> None:
    run = RunHarness()
    run.stop()
    assert run.state() is RunState.CLOSED
    assert run.took(ev.CloseMembers) == []
    run.stop()
