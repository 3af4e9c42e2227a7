"""A subscription by pattern: a list of topics may lack some that exist."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from kit.harness import GROUP, STREAM, only, tps
from kit.run_harness import RunHarness

from spark_group_source.errors import TopicMissing
from spark_group_source.model import LATEST
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.data_loss import GRACE_MS
from spark_group_source.protocol.offsets import StreamOffset
from spark_group_source.protocol.rules import StartingPosition

ORDERS, PAYMENTS = tps("orders", 0) + tps("payments", 0)
ORDERS_ONLY, BOTH = {"orders": 1}, {"orders": 1, "payments": 1}
MATCHES = BOTH.__contains__
FROM_THE_END = StartingPosition(everywhere=LATEST)
READ = {ORDERS: (100, 150), PAYMENTS: (40, 40)}
PAST = StreamOffset(
    group=GROUP, stream=STREAM, seq=7, known=BOTH, ranges={ORDERS: (100, 150)}, uncommitted={PAYMENTS: 40}
)


class Lists(RunHarness):
    """A run whose brokers list these topics, one list after the other; the last one repeats."""

    def __init__(self, *lists: Mapping[str, int], **rules: Any) -> None:
        super().__init__(topics=BOTH, **{"matches": MATCHES} | rules)
        self.lists = list(lists)

    def answer(self, step: ev.Step) -> ev.Event:
        if isinstance(step, ev.ListTopics):
            return ev.TopicsListed(topics=self.lists.pop(0) if len(self.lists) > 1 else self.lists[0])
        return super().answer(step)

    def lists_read(self) -> int:
        return len(self.steps_of(ev.ListTopics))

    def subscribed(self) -> set[tuple[str, ...]]:
        return {join.topics for join in only(ev.Join, self.history)}


def resumed(*lists: Mapping[str, int], past: StreamOffset = PAST, **rules: Any) -> Lists:
    run, ends = Lists(*lists, **rules), {ORDERS: 150, PAYMENTS: 40}
    run.start, run.ends = past, ends
    run.committed = {tp: ev.Committed(offset=at, stream=STREAM, seq=past.seq) for tp, at in ends.items()}
    return run


def test_topic_that_the_first_list_of_a_new_stream_lacks_is_not_an_added_one() -> None:
    """It would start at its first record, whatever startingOffsets is."""
    run = Lists(ORDERS_ONLY, BOTH, starting=FROM_THE_END)
    run.ends = {ORDERS: 100, PAYMENTS: 100}
    began_ms = run.clock()
    first = run.batch()
    assert first.known == BOTH
    assert first.ranges == {ORDERS: (100, 100), PAYMENTS: (100, 100)}
    assert GRACE_MS <= run.clock() - began_ms < 2 * GRACE_MS and run.lists_read() == 2


def test_topic_that_the_second_list_of_a_new_stream_lacks_is_known() -> None:
    assert Lists({"orders": 2, "payments": 1}, ORDERS_ONLY).batch().known == {"orders": 2, "payments": 1}


def test_resumed_stream_keeps_a_topic_that_the_first_list_lacks() -> None:
    for past in PAST, StreamOffset(group=GROUP, stream=STREAM, seq=7, known=BOTH, ranges=READ):
        run = resumed(ORDERS_ONLY, BOTH, past=past)
        run.latest()
        assert run.subscribed() == {("orders", "payments")} and run.lists_read() == 2


def test_resumed_stream_reads_one_list_if_that_has_its_topics() -> None:
    for run in (
        resumed(BOTH),
        resumed(ORDERS_ONLY, matches=ORDERS_ONLY.__contains__),
        resumed(ORDERS_ONLY, matches=None),
    ):
        began_ms = run.clock()
        run.latest()
        assert run.lists_read() == 1 and run.clock() - began_ms < GRACE_MS


def test_replayed_batch_waits_for_the_second_list() -> None:
    run = resumed(ORDERS_ONLY, BOTH)
    assert run.call(ev.BatchStarted(offset=PAST)) == PAST
    assert run.subscribed() == {("orders", "payments")}


@pytest.mark.parametrize("call", [ev.NextBatchRequested(start=PAST, new_stream=STREAM), ev.BatchStarted(offset=PAST)])
def test_topic_that_was_deleted_between_two_runs_is_an_error(call: ev.Event) -> None:
    run = resumed(ORDERS_ONLY)
    with pytest.raises(TopicMissing) as failure:
        run.call(call)
    assert failure.value.fields == {"topics": ["payments"]}
    assert "topic payments does not exist any more" in str(failure.value)
    assert run.lists_read() == 2 and not run.subscribed()


@pytest.mark.parametrize("replays", [True, False])
def test_topic_that_was_deleted_between_two_runs_is_a_warning_without_failOnDataLoss(replays: bool) -> None:
    run = resumed(ORDERS_ONLY, fail_on_data_loss=False)
    run.assignments, run.ends = {0: (ORDERS,)}, {ORDERS: 200}
    del run.ids["payments"]
    if replays:
        run.call(ev.BatchStarted(offset=PAST))
    following = run.batch()
    assert following.ranges == {ORDERS: (150, 200)}
    assert run.subscribed() == {("orders",)}
    assert sum("topic payments does not exist any more" in text for text in run.warned()) == 1
    if not replays:
        assert not following.uncommitted
        assert resumed(ORDERS_ONLY, past=following).batch().seq == 8, "the next run does not miss it again"


def test_topic_that_the_pattern_does_not_match_any_more_is_not_missed() -> None:
    assert resumed(ORDERS_ONLY, matches=ORDERS_ONLY.__contains__).batch() == PAST


def test_the_message_lists_some_of_many_missing_topics() -> None:
    names = [f"t{number:02}" for number in range(30)]
    past = replace(PAST, uncommitted={tps(name, 0)[0]: 0 for name in names})
    run = resumed(ORDERS_ONLY, past=past, matches=names.__contains__)
    with pytest.raises(TopicMissing, match=r"topic t00, .*, t09 and 20 more does not exist any more") as failure:
        run.latest()
    assert failure.value.fields == {"topics": names}
