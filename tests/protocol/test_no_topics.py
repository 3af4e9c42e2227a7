"""A subscription that no topic matches yet."""

from kit.harness import GROUP, STREAM, tps
from kit.run_harness import RunHarness

from spark_group_source.protocol import events as ev
from spark_group_source.protocol.offsets import StreamOffset
from spark_group_source.protocol.run import IDLE_PAUSES_MS
from spark_group_source.protocol.states import RunState

A, B = tps("orders", 0, 1)
SECONDS_MS = 5_000


def without_topics() -> RunHarness:
    """A run for which no topic exists; its group has no member, as a member without topics does not join."""
    run = RunHarness()
    run.topics, run.assignments, run.group_state = {}, {0: ()}, "empty"
    return run


def test_available_now_ends_when_no_topic_matches() -> None:
    run = without_topics()
    run.set_target({})
    began_ms = run.clock()
    first = run.batch()
    assert (first.seq, first.ranges) == (0, {})
    assert run.latest() is run.start
    assert run.state() is RunState.CLOSED
    assert run.clock() - began_ms <= SECONDS_MS
    assert any("no topic matches the subscription" in text for text in run.warned())


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


def test_resumed_query_whose_topics_are_all_gone_returns_its_start() -> None:
    past = StreamOffset(group=GROUP, stream=STREAM, seq=7, known={"orders": 2}, ranges={A: (100, 150)})
    run = RunHarness.resumed(past)
    run.topics, run.assignments, run.group_state = {}, {0: ()}, "empty"
    assert run.latest() is run.start
