"""Broker outages: a run waits for them, logs them once, and fails only after its bound."""

from dataclasses import replace
from typing import Any

import pytest
from kit.harness import JOINING_BUDGET_MS, STREAM, only, tps
from kit.run_harness import GIVEN_UP_MS, RunHarness

from spark_group_source.errors import BrokerUnavailable, RebalanceTimeout
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.request_schedule import JITTER_SHARE, LATE_MS, RETRY_PAUSE_MS_MAX, Outage, Requester
from spark_group_source.protocol.run import START_MS_MAX
from spark_group_source.protocol.states import RunState

A, B = tps("orders", 0, 1)
MINUTE_MS = 60_000


def reading(**rules: Any) -> RunHarness:
    """A run that has read a batch."""
    run = RunHarness(**rules)
    run.ends[A] = 10
    assert run.batch().seq == 0
    return run


def down(run: RunHarness, ms: int) -> int:
    """No broker answers for so long from now on; returns when that is over."""
    run.down_until_ms = run.clock() + ms
    return run.down_until_ms


@pytest.mark.parametrize("minutes", [1, 3, 9])
def test_run_waits_for_an_outage_to_end_and_logs_it_once(minutes: int) -> None:
    run = reading()
    run.ends[A] = 20
    over_ms = down(run, minutes * MINUTE_MS)
    assert run.latest().batch()[0][1:] == (10, 20)
    assert over_ms <= run.clock() <= over_ms + RETRY_PAUSE_MS_MAX * (1 + JITTER_SHARE) + GIVEN_UP_MS + 1_000
    begun, ended = run.warned()
    assert begun == "brokers do not answer (no leaders); retrying"
    assert ended.startswith("brokers answer again after ")


def test_statistics_show_an_outage_while_it_lasts() -> None:
    run = reading()
    began_ms = run.clock()
    down(run, MINUTE_MS)
    run.begin(ev.NextBatchRequested(start=run.start, new_stream="x"), until=RunState.FETCHING_ENDS)
    assert run.run.statistics().unreachable_since_ms == 0
    run.feed(run.answer(run.step()))
    assert began_ms <= run.run.statistics().unreachable_since_ms <= began_ms + 1_000
    run.continue_call()
    assert run.run.statistics().unreachable_since_ms == 0


@pytest.mark.proves("G8", level="core")
def test_outage_longer_than_the_broker_timeout_fails_the_run_with_the_last_error() -> None:
    run = reading(broker_timeout_ms=2 * MINUTE_MS)
    began_ms = run.clock()
    down(run, 10 * MINUTE_MS)
    error = r"not answered for 1\d\d s, in \d+ attempts, .*\. The last attempt: no leaders"
    with pytest.raises(BrokerUnavailable, match=error):
        run.latest()
    assert 2 * MINUTE_MS <= run.clock() - began_ms <= 2 * MINUTE_MS + 10_000


def test_run_without_broker_timeout_waits_for_any_outage() -> None:
    run = reading(broker_timeout_ms=0)
    run.ends[A] = 20
    down(run, 60 * MINUTE_MS)
    assert run.latest().batch()[0][1:] == (10, 20)


@pytest.mark.parametrize("available_now", [False, True])
def test_wrong_address_fails_the_start_within_30_s(available_now: bool) -> None:
    run = RunHarness()
    began_ms = run.clock()
    down(run, 10 * MINUTE_MS)
    with pytest.raises(BrokerUnavailable, match="have not answered"):
        run.call(ev.TargetRequested()) if available_now else run.latest()
    assert START_MS_MAX <= run.clock() - began_ms <= 30_000


@pytest.mark.parametrize("available_now", [False, True])
def test_run_waits_for_a_short_outage_at_the_start(available_now: bool) -> None:
    run = RunHarness()
    run.ends = {A: 5, B: 7}
    down(run, 6_000)
    if available_now:
        run.call(ev.TargetRequested())
    assert run.latest().ranges == {A: (0, 5), B: (0, 7)}


def test_missing_assignment_during_an_outage_does_not_fail_the_run() -> None:
    """Members do not report why they have no assignment, so the run describes the group before it fails."""
    run = RunHarness()
    run.silent = {ev.Join}
    run.ends = {A: 5, B: 7}
    run.begin(ev.NextBatchRequested(start=run.start, new_stream="9f2c"), until=RunState.GATHERING)
    over_ms = down(run, 3 * MINUTE_MS)
    run.later(ev.Assigned(slot=0, client=1, partitions=(A, B)), ms=3 * MINUTE_MS + 20_000)
    run.assignments = {0: (A, B)}
    assert run.continue_call().ranges == {A: (0, 5), B: (0, 7)}
    assert run.clock() > over_ms


def test_outage_restarts_the_joining_budget_once() -> None:
    run = RunHarness()
    run.silent = {ev.Join}
    run.begin(ev.NextBatchRequested(start=run.start, new_stream="9f2c"), until=RunState.GATHERING)
    over_ms = down(run, 3 * MINUTE_MS)
    with pytest.raises(RebalanceTimeout):
        run.continue_call()
    assert over_ms + JOINING_BUDGET_MS <= run.clock() <= over_ms + JOINING_BUDGET_MS + 10_000


@pytest.mark.parametrize("are_lost", [False, True])
def test_call_that_is_answered_before_a_lookup_after_an_outage_does_not_fail_the_run(are_lost: bool) -> None:
    """After more than the joining budget. The lookup pauses, or is not sent again: its partitions are lost."""
    run = RunHarness()
    run.ends = {A: 5, B: 7}
    run.silent = {ev.FetchCommittedOffsets}
    run.begin(ev.NextBatchRequested(start=run.start, new_stream=STREAM), until=RunState.GATHERING)
    over_ms = down(run, JOINING_BUDGET_MS + MINUTE_MS)
    run.pass_time(100)
    no_answer = ev.LookupFailed(partitions=(A, B), error=BrokerUnavailable("no coordinator"))
    run.feed(no_answer)
    while run.clock() < over_ms + 5_000:
        step = run.step()
        assert not isinstance(step, ev.RaiseError), step.error
        if isinstance(step, ev.Wait):
            run._wait(step.until_ms)
        else:
            run.feed(run.answer(step))
    run.silent = set()
    run.feed(no_answer)
    if are_lost:
        run.lost(A, B)
        run.later(ev.Assigned(slot=0, client=1, partitions=(A, B)), ms=10_000)
    assert run.continue_call().ranges == {A: (0, 5), B: (0, 7)}


def test_lookups_have_the_bound_of_an_outage_while_other_requests_are_answered() -> None:
    run = RunHarness(broker_timeout_ms=2 * JOINING_BUDGET_MS)
    run.silent = {ev.FetchCommittedOffsets}
    run.begin(ev.NextBatchRequested(start=run.start, new_stream=STREAM), until=RunState.GATHERING)
    began_ms = run.clock()
    for at_ms in range(1_000, 3 * JOINING_BUDGET_MS, 5_000):
        run.later(ev.LookupFailed(partitions=(A, B), error=BrokerUnavailable("no coordinator")), ms=at_ms)
    with pytest.raises(BrokerUnavailable, match="no coordinator"):
        run.continue_call()
    assert run.clock() >= began_ms + 2 * JOINING_BUDGET_MS


def test_an_outage_is_not_part_of_the_time_for_which_a_slot_fails_to_join() -> None:
    """Its member had failed once before, and the next one was joining."""
    run = reading()
    run.silent = {ev.Join}
    run.feed(ev.MemberFailed(slot=0, client=1, reason="expelled"))
    run.pass_time(500)
    down(run, JOINING_BUDGET_MS + MINUTE_MS)
    run.begin(ev.NextBatchRequested(start=run.start, new_stream=STREAM), RunState.FETCHING_ENDS)
    while not isinstance(step := run.step(), ev.ReturnOffset):
        if isinstance(step, ev.Wait):
            run._wait(step.until_ms)
        else:
            run.feed(run.answer(step))
    assert run.clock() > run.down_until_ms
    refused = ev.MemberFailed(slot=0, client=run.clients[0], reason="another member still has the instance id")
    assert not only(ev.Fail, run.feed(refused))


def test_an_outage_that_ends_during_a_check_does_not_prolong_the_joining_budget_twice() -> None:
    run = reading()
    run.silent = {ev.CheckReplaced}
    run.feed(ev.MemberFenced(slot=0, client=1, reason="lost its membership", confirmed=False))
    down(run, JOINING_BUDGET_MS)
    run.begin(ev.NextBatchRequested(start=run.start, new_stream=STREAM), RunState.FETCHING_ENDS)
    while run.run.outage.ended_ms == 0:
        step = run.step()
        if isinstance(step, ev.Wait):
            run._wait(step.until_ms)
        else:
            run.feed(run.answer(step))
    run.feed(ev.NotReplaced(slot=0))
    since_ms = run.run.slots.all[0].failing_since_ms
    assert since_ms is not None and since_ms <= run.clock()


def test_brokers_do_not_answer_again_because_the_partitions_of_a_failed_lookup_were_lost() -> None:
    run = reading()
    run.pass_time(500)
    run.silent = {ev.FetchCommittedOffsets, ev.CommitOffsets, ev.CheckReplaced}
    run.lost(B)
    run.assigned(B)
    run.feed(ev.LookupFailed(partitions=(B,), error=BrokerUnavailable("no answer", servers="b:9092", waited_ms=10_000)))
    run.pass_time(10_000)
    run.lost(A, B)
    run.feed(ev.Tick())
    assert run.run.outage.since_ms is None
    assert not [text for text in run.warned() if "answer again" in text]


def test_unanswered_lookups_are_an_outage_with_the_same_bound() -> None:
    run = RunHarness(broker_timeout_ms=30_000)
    run.silent = {ev.FetchCommittedOffsets}
    run.begin(ev.NextBatchRequested(start=run.start, new_stream="9f2c"), until=RunState.GATHERING)
    for at_ms in range(1_000, 40_000, 1_000):
        run.later(ev.LookupFailed(partitions=(A, B), error=BrokerUnavailable("moving", waited_ms=500)), ms=at_ms)
    with pytest.raises(BrokerUnavailable, match="moving"):
        run.continue_call()


def test_log_ends_are_read_again_after_an_outage() -> None:
    """Partitions may have left meanwhile; those are not planned."""
    run = reading()
    run.ends = {A: 20, B: 5}
    over_ms = down(run, MINUTE_MS)
    run.later(ev.Lost(slot=0, client=1, partitions=(A,)), ms=30_000)
    assert run.latest().batch() == [(B, 0, 5)]
    assert run.clock() >= over_ms
    last = run.steps_of(ev.ReadLogEnds)[-1]
    assert A not in last.ends + last.firsts


def test_streams_retry_at_different_times() -> None:
    pauses = set()
    for name in ("9f2c", "77ab", "c0de"):
        outage = Outage()
        for _ in range(6):
            outage.request_failed(Requester.CALL, BrokerUnavailable("x"), name=name, now_ms=0)
        at_ms = outage.retry_at_ms(Requester.CALL)
        assert RETRY_PAUSE_MS_MAX * (1 - JITTER_SHARE) <= at_ms <= RETRY_PAUSE_MS_MAX * (1 + JITTER_SHARE)
        pauses.add(at_ms)
    assert len(pauses) == 3


def test_outage_ends_when_the_last_request_is_answered() -> None:
    outage = Outage()
    assert outage.request_failed(Requester.CALL, BrokerUnavailable("x", waited_ms=500), name="n", now_ms=1_000)
    assert not outage.request_failed(Requester.LOOKUP, BrokerUnavailable("x"), name="n", now_ms=2_000)
    assert outage.since_ms == 500
    assert outage.end_requests(Requester.CALL, now_ms=3_000) is None
    assert outage.end_requests(Requester.LOOKUP, now_ms=4_000) == 2_000
    assert outage.retry_at_ms(Requester.CALL) == 0
    assert outage.ended_ms == 4_000


def test_an_outage_that_no_request_has_met_does_not_fail_the_next_call() -> None:
    """The brokers were down while the sink wrote a batch: only the members were affected."""
    run = reading()
    run.silent = {ev.Join}
    run.feed(ev.Lost(slot=0, client=1, partitions=(A, B)))
    run.pass_time(JOINING_BUDGET_MS + MINUTE_MS)
    run.later(ev.Assigned(slot=0, client=run.clients[0], partitions=(A, B)), ms=2_000)
    run.ends[A] = 20
    assert run.latest().batch()[0][1:] == (10, 20)


@pytest.mark.parametrize("fails", [True, False], ids=["no answer", "a late answer"])
def test_an_outage_while_a_call_waits_for_its_members_is_no_time_to_join(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """The call has no request of its own; it describes the group again and again, and one of these meets the outage."""
    run = RunHarness()
    run.silent = {ev.Join}
    answer, ended_ms = run.answer, 0

    def meets_outage(step: ev.Step) -> ev.Event:
        nonlocal ended_ms
        if ended_ms or run.clock() < JOINING_BUDGET_MS // 2 or not isinstance(step, ev.DescribeGroup):
            return answer(step)
        if fails:
            run.down_until_ms = run.clock() + 1
        else:
            run.clock.advance(ms=LATE_MS)
        found = answer(step)
        ended_ms = run.clock()
        return replace(found, took_ms=LATE_MS) if isinstance(found, ev.GroupDescribed) else found

    monkeypatch.setattr(run, "answer", meets_outage)
    with pytest.raises(RebalanceTimeout):
        run.latest()
    assert ended_ms and run.clock() - ended_ms >= JOINING_BUDGET_MS


def test_brokers_that_always_answer_late_do_not_let_a_call_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunHarness(broker_timeout_ms=2 * MINUTE_MS)
    run.silent = {ev.Join}
    answer = run.answer

    def late(step: ev.Step) -> ev.Event:
        if isinstance(step, ev.DescribeGroup):
            run.clock.advance(ms=LATE_MS)
        found = answer(step)
        return replace(found, took_ms=LATE_MS) if isinstance(found, ev.GroupDescribed) else found

    monkeypatch.setattr(run, "answer", late)
    with pytest.raises(RebalanceTimeout):
        run.latest()
    assert 2 * MINUTE_MS < run.clock() < 2 * MINUTE_MS + JOINING_BUDGET_MS + MINUTE_MS
    assert run.warned()[0] == "brokers answered after 10 s; continuing"
