"""A subscription to topics that do not exist yet: none matches a pattern, or some of the named ones are missing."""

from typing import Any

import pytest
from kit.harness import GROUP, STREAM, only, tps
from kit.run_harness import RunHarness

from spark_group_source.errors import TopicMissing
from spark_group_source.model import LATEST
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.offsets import StreamOffset
from spark_group_source.protocol.rules import StartingPosition
from spark_group_source.protocol.run import IDLE_PAUSES_MS
from spark_group_source.protocol.states import RunState

A, B = tps("orders", 0, 1)
(NEW,) = tps("payments", 0)
BOTH = ("orders", "payments")
SECONDS_MS = 5_000


def without_topics(**rules: Any) -> RunHarness:
    """A run for which no topic exists; its group has no member, as a member without topics does not join."""
    run = RunHarness(**rules)
    run.topics, run.assignments, run.group_state = {}, {0: ()}, "empty"
    return run


@pytest.mark.parametrize(
    ("rules", "text"),
    [({}, "no topic matches subscribePattern"), ({"named_topics": BOTH}, "topic orders, payments does not exist")],
)
def test_available_now_ends_when_no_topic_exists(rules: dict[str, Any], text: str) -> None:
    run = without_topics(**rules)
    run.set_target({})
    began_ms = run.clock()
    first = run.batch()
    assert (first.seq, first.ranges) == (0, {})
    assert run.latest() is run.start
    assert run.state() is RunState.CLOSED
    assert run.clock() - began_ms <= SECONDS_MS
    assert sum(text in line for line in run.warned()) == 1


def test_query_waits_for_a_topic_and_reads_it_from_its_first_record() -> None:
    run = without_topics()
    run.batch()
    began_ms = run.clock()
    assert run.batch() is run.start
    assert run.clock() - began_ms <= IDLE_PAUSES_MS[1]
    run.group_state = "stable"
    run.ends = {A: 5, B: 7}
    assert [type(order) for order in run.feed(ev.TopicsChanged(topics=("orders",)))][-1] is ev.Subscribe
    run.assigned(A, B)
    run.pass_time(100)
    assert run.batch().ranges == {A: (0, 5), B: (0, 7)}


PAST = StreamOffset(group=GROUP, stream=STREAM, seq=7, known={"orders": 2}, ranges={A: (100, 150), B: (40, 40)})


def test_resumed_query_whose_topics_are_all_gone_returns_its_start() -> None:
    """Its member subscribes to none: with deleted topics alone it would not join, and never get an assignment."""
    run = RunHarness.resumed(PAST, named_topics=("orders",), fail_on_data_loss=False)
    run.topics, run.assignments, run.group_state = {}, {0: ()}, "empty"
    assert run.latest() is run.start
    assert [join.topics for join in only(ev.Join, run.history)] == [()]


def test_named_topic_that_does_not_exist_is_reported_and_the_others_are_read() -> None:
    run = RunHarness(named_topics=BOTH, starting=StartingPosition(everywhere=LATEST))
    run.ends = {A: 5, B: 7}
    first = run.batch()
    assert (first.ranges, first.known) == ({A: (5, 5), B: (7, 7)}, {"orders": 2})
    assert [text for text in run.warned() if "payments does not exist. It is read from its first record" in text]
    assert run.run.statistics().missing_topics == ("payments",)
    run.ends |= {A: 6}
    assert run.batch().ranges == {A: (5, 6), B: (7, 7)}
    assert len(run.warned()) == 1


def test_named_topic_is_read_from_its_first_record_once_it_exists() -> None:
    """Also with startingOffsets=latest: no record between its creation and its detection is lost."""
    run = RunHarness(named_topics=BOTH, starting=StartingPosition(everywhere=LATEST))
    run.batch()
    run.ends, run.firsts, run.ids = run.ends | {NEW: 3}, run.firsts | {NEW: 0}, run.ids | {"payments": "id-payments"}
    assert only(ev.Subscribe, run.feed(ev.TopicsChanged(topics=BOTH))) == [ev.Subscribe(slot=0, topics=BOTH)]
    run.assigned(NEW)
    run.pass_time(100)
    assert run.batch().ranges[NEW] == (0, 3)
    assert run.run.statistics().missing_topics == ()


def test_named_topic_that_was_never_read_may_be_missing_at_a_restart() -> None:
    run = RunHarness.resumed(PAST, named_topics=BOTH)
    assert run.latest() is run.start
    assert any("topic payments does not exist" in text for text in run.warned())


def test_named_topic_that_was_read_and_is_missing_at_a_restart_is_lost_data() -> None:
    run = RunHarness.resumed(PAST, named_topics=("orders",))
    run.topics = {}
    with pytest.raises(TopicMissing, match=r"topic orders does not exist any more.*Remove it from the subscription"):
        run.latest()
    assert not only(ev.Join, run.history)
