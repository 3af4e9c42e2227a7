"""Partitions whose brokers do not answer while those of others do: the others are read."""

from typing import Any

import pytest
from kit.harness import GROUP, STREAM, GroupHarness, ManualClock, only, tps
from kit.run_harness import GIVEN_UP_MS, RunHarness

from spark_group_source.errors import BrokerUnavailable
from spark_group_source.model import TopicPartition
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.lookups import POSITION_MS_MAX
from spark_group_source.protocol.offsets import StreamOffset
from spark_group_source.protocol.run import IDLE_PAUSES_MS, LEADER_MS_MAX
from spark_group_source.protocol.states import RunState

A, B = tps("orders", 0, 1)
BEGAN_MS = 1_000
PLANNED_MS_MAX = 10_000
"""How long the other partitions wait at most."""
PAST = StreamOffset(
    group=GROUP,
    stream=STREAM,
    seq=7,
    topic_ids={"orders": "id-orders"},
    known={"orders": 1},
    ranges={A: (100, 150)},
)
HOUR_MS = 3_600_000


def silent(kind: str, run: RunHarness | None = None, **rules: Any) -> RunHarness:
    """A run with records in both partitions. Of B, the start or the committed offset is not answered."""
    run = run or RunHarness(**rules)
    run.ends |= {A: 160, B: 7}
    run.firsts[B] = 0
    (run.unanswered_starts if kind == "start" else run.unanswered_commits).add(B)
    run.unreachable.add(B)
    return run


def returns(run: RunHarness) -> None:
    """The leader of B returns."""
    run.unreachable.clear()
    run.unanswered_starts.clear()
    run.unanswered_commits.clear()


KINDS = pytest.mark.parametrize("kind", ["start", "committed offset"])


@KINDS
def test_first_batch_reads_the_partitions_with_a_leader_and_a_later_one_the_others(kind: str) -> None:
    run = silent(kind)
    assert run.batch().ranges == {A: (0, 160)}
    assert run.clock() - BEGAN_MS <= PLANNED_MS_MAX
    returns(run)
    run.pass_time(6_000)
    assert run.batch().ranges == {A: (160, 160), B: (0, 7)}


@KINDS
def test_new_partition_without_a_leader_delays_no_batch_of_a_running_query(kind: str) -> None:
    run = RunHarness(topics={"orders": 1})
    run.ends[A] = 5
    assert run.batch().ranges == {A: (0, 5)}
    silent(kind, run)
    run.assigned(B)
    assert run.batch().ranges == {A: (5, 160)}
    assert run.clock() - BEGAN_MS <= PLANNED_MS_MAX
    for end in range(161, 171):
        began_ms, run.ends[A] = run.clock(), end
        assert run.batch().ranges == {A: (end - 1, end)}
        assert run.clock() - began_ms <= IDLE_PAUSES_MS[0]
    returns(run)
    run.pass_time(6_000)
    assert run.batch().ranges == {A: (170, 170), B: (0, 7)}


@KINDS
def test_resumed_run_reads_the_partitions_with_a_leader(kind: str) -> None:
    run = silent(kind, RunHarness.resumed(PAST))
    assert run.batch().ranges == {A: (150, 160)}
    assert run.clock() - BEGAN_MS <= PLANNED_MS_MAX


@KINDS
def test_rebalances_do_not_prolong_the_wait_for_a_partition_without_a_leader(kind: str) -> None:
    """A rebalance says nothing about leaders. With one every 3 s, the first batch would wait until the run fails."""
    run = silent(kind, slots=2)
    run.assignments = {0: (A,), 1: (B,)}
    for ms in range(3_000, 60_000, 3_000):
        for slot, tp in enumerate((A, B)):
            run.later(ev.Revoking(slot=slot, client=1, partitions=(tp,), eager=True), ms=ms)
            run.later(ev.Assigned(slot=slot, client=1, partitions=(tp,)), ms=ms + 100 + 200 * slot)
    assert run.batch().ranges == {A: (0, 160)}
    assert run.clock() - BEGAN_MS <= PLANNED_MS_MAX


def test_a_partition_that_comes_back_after_long_is_waited_for_anew() -> None:
    """Its leader may have returned meanwhile."""
    run = silent("start")
    run.batch()
    run.lost(B)
    run.pass_time(2 * POSITION_MS_MAX)
    run.assigned(B)
    assert run.run.lookups.late(POSITION_MS_MAX) == set()


def test_bounded_run_reads_a_partition_that_one_answer_left_out_before_it_was_lost_for_long() -> None:
    run = RunHarness()
    run.ends = {A: 5, B: 7}
    run.set_target(run.ends)
    run.unanswered_commits.add(B)
    run.begin(ev.NextBatchRequested(start=run.start, new_stream=STREAM), until=RunState.GATHERING)
    run.pass_time(50)
    returns(run)
    run.lost(B)
    run.start = run.continue_call()
    assert run.start.ranges == {A: (0, 5)}
    run.call(ev.BatchStarted(offset=run.start))
    run.pass_time(2 * LEADER_MS_MAX)
    run.silent = {ev.FetchCommittedOffsets}  # it is answered after a second
    run.assigned(B)
    run.later(ev.CommittedOffsetsRead(offsets={B: None}, requested=(B,)), ms=1_000)
    assert run.latest().ranges[B] == (0, 7)


def test_a_partition_without_a_leader_that_was_lost_is_neither_waited_for_nor_reported() -> None:
    group = GroupHarness()
    group.start_stream()
    group.assigned(A, B)
    read = ev.CommittedOffsetsRead(offsets={A: None}, requested=(A, B), reset_number=0)
    group.feed(read)
    group.tick(ms=POSITION_MS_MAX - 1)
    group.feed(read)
    group.lost(B)
    group.tick(ms=1)
    due_ms = group.run.next_deadline_ms()
    assert due_ms is None or due_ms > group.clock()
    assert not [text for text in group.warned() if "no broker reports" in text]


def test_a_partition_whose_leader_never_answers_does_not_hold_up_a_running_query() -> None:
    """Its first record is requested again before each batch, because it was not compared with the position yet."""
    run = RunHarness()
    run.ends |= {A: 160, B: 7}
    run.unreachable.add(B)
    run.committed = {B: ev.Committed(offset=3)}
    assert run.batch().ranges[A] == (0, 160)
    for end in (170, 180):
        run.ends[A] = end
        began_ms = run.clock()
        assert run.batch().ranges[A] == (end - 10, end)
        assert run.clock() - began_ms <= PLANNED_MS_MAX


def test_a_check_whose_second_request_always_fails_ends_after_the_broker_timeout() -> None:
    """The first one is answered each time."""
    run = RunHarness(broker_timeout_ms=60_000)
    run.ends |= {A: 160, B: 7}
    run.batch()
    run.ends[A] = 170
    answer = run.answer

    def fails(step: ev.Step) -> ev.Event:
        if isinstance(step, ev.ReadLogEnds) and step.topics:
            run.clock.advance(ms=GIVEN_UP_MS)
            return ev.RequestFailed(error=BrokerUnavailable("timed out", servers="b:9092", waited_ms=GIVEN_UP_MS))
        return answer(step)

    run.answer = fails  # type: ignore[method-assign]
    with pytest.raises(BrokerUnavailable, match="have not answered for 6"):
        run.batch()


@KINDS
def test_query_waits_forever_and_warns_once_for_a_partition_without_a_leader(kind: str) -> None:
    run = silent(kind)
    run.batch()
    while run.clock() < HOUR_MS:
        assert run.batch() is run.start
        run.pass_time(60_000)
    (warning,) = [text for text in run.warned() if "orders-1" in text]
    assert "1 partitions, such as orders-1" in warning and "the others are read" in warning
    assert not [text for text in run.warned() if "brokers do not answer" in text]
    returns(run)
    run.pass_time(6_000)
    run.batch()
    assert any("position of every partition is known again" in text for text in run.logged())


@KINDS
def test_bounded_run_leaves_a_partition_without_a_leader_to_the_next_run(kind: str) -> None:
    run = RunHarness()
    run.set_target({A: 160})
    silent(kind, run)
    assert run.batch().ranges == {A: (0, 160)}
    assert run.latest() is run.start
    assert run.state() is RunState.CLOSED
    assert LEADER_MS_MAX <= run.clock() - BEGAN_MS <= LEADER_MS_MAX + PLANNED_MS_MAX
    assert any("orders-1" in text for text in run.warned())


@pytest.mark.parametrize("target", [{A: 160, B: 7}, {A: 160}], ids=["in the target", "not in the target"])
def test_bounded_run_ends_although_a_partition_lost_its_leader(target: dict[Any, int]) -> None:
    run = RunHarness()
    run.set_target(target)
    run.ends |= {A: 160, B: 7}
    run.unreachable.add(B)
    assert run.batch().ranges == {A: (0, 160), B: (0, 0)}
    assert run.latest() is run.start
    assert run.state() is RunState.CLOSED
    assert LEADER_MS_MAX <= run.clock() - BEGAN_MS <= LEADER_MS_MAX + PLANNED_MS_MAX
    assert any("orders-1" in text for text in run.warned())


class Alternating(set[TopicPartition]):
    """First one partition has no leader, then the other one, and so on."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock

    def __contains__(self, tp: object) -> bool:
        return tp == (A, B)[self.clock() // (LEADER_MS_MAX * 2 // 3) % 2]


def test_bounded_run_ends_although_partitions_lose_their_leaders_one_after_the_other() -> None:
    run = RunHarness()
    run.set_target({A: 160, B: 7})
    run.ends |= {A: 160, B: 7}
    run.leaderless = Alternating(run.clock)
    while run.batch() is not run.start or run.state() is not RunState.CLOSED:
        assert run.clock() <= 4 * LEADER_MS_MAX
    assert run.run.closed


def test_no_batch_is_planned_while_no_broker_answers() -> None:
    run = RunHarness()
    run.down_until_ms = run.clock() + 3 * POSITION_MS_MAX
    run.ends = {A: 5, B: 7}
    assert run.batch().ranges == {A: (0, 5), B: (0, 7)}


def test_lookups_of_two_slots_that_are_not_answered_pause_both() -> None:
    run = RunHarness(slots=2)
    run.assignments = {0: (), 1: ()}
    run.begin(ev.NextBatchRequested(start=run.start, new_stream=STREAM), RunState.GATHERING)
    run.pass_time(100)
    run.unanswered_starts |= {A, B}
    for slot, tp in enumerate((A, B)):
        run.assigned(tp, slot=slot)
        run.pass_time(500)
    before = len(only(ev.FetchCommittedOffsets, run.history))
    run.pass_time(60_000)
    assert len(only(ev.FetchCommittedOffsets, run.history)) - before <= 2 * 60, "one a second for each of them at most"
