"""What a run does where partitions have no position yet: drains, outages, delays of commits, and members that are added
later. Deliberately absent: positions themselves (``test_restarts.py``)."""

import pytest
from kit.harness import GROUP, STREAM, only, tps
from kit.run_harness import RunHarness

from spark_group_source.errors import BrokerUnavailable
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.offsets import StreamOffset
from spark_group_source.protocol.states import RunState

A, B = tps("orders", 0, 1)
HOUR_MS = 3_600_000
PAST = StreamOffset(
    group=GROUP,
    stream=STREAM,
    seq=3,
    topic_ids={"orders": "id-orders"},
    known={"orders": 2},
    ranges={A: (100, 150), B: (40, 60)},
)
NO_COORDINATOR = BrokerUnavailable("no coordinator", servers="b", waited_ms=100)


def committed(run: RunHarness) -> dict[int, int]:
    return {tp.partition: at.offset for tp, at in run.committed.items() if at is not None}


@pytest.mark.parametrize("silent", [ev.Join, ev.FetchCommittedOffsets])
@pytest.mark.proves("G2", level="core")
def test_a_drain_waits_for_the_positions_that_a_run_has_not_read_yet(silent: type[ev.Command]) -> None:
    """The last batch of the run before it is durable, and Kafka does not have it."""
    run = RunHarness.resumed(PAST)
    run.committed = {
        A: ev.Committed(offset=100, stream=STREAM, seq=2),
        B: ev.Committed(offset=40, stream=STREAM, seq=2),
    }
    run.silent.add(silent)
    run.latest(drain=True)
    assert not run.drained() and committed(run) == {0: 100, 1: 40}


@pytest.mark.proves("G2", level="core")
def test_a_drain_waits_for_a_partition_that_came_back_during_the_batch() -> None:
    run = RunHarness()
    run.ends = {A: 5, B: 5}
    run.batch()
    run.pass_time(100)
    run.lost(B)
    run.silent.add(ev.FetchCommittedOffsets)
    run.assigned(B)
    run.latest(drain=True)
    assert not run.drained() and committed(run) == {0: 5, 1: 0}


def test_a_lookup_that_failed_for_partitions_that_were_revoked_is_no_outage() -> None:
    """Else a single failure, long after it, would end the run."""
    run = RunHarness()
    run.ends = {A: 5, B: 5}
    run.batch()
    run.latest()
    for _ in range(2):
        run.lost(B)
        run.silent.add(ev.FetchCommittedOffsets)
        run.assigned(B)
        run.feed(ev.LookupFailed(partitions=(B,), error=NO_COORDINATOR))
        assert run.run.statistics().unreachable_since_ms
        run.lost(B)
        run.silent.clear()
        run.pass_time(HOUR_MS)
        assert not run.run.statistics().unreachable_since_ms and run.state() is not RunState.FAILED


def test_the_delay_of_commits_counts_batches_only_that_left_something_to_commit() -> None:
    """A commit of unchanged offsets, hours after a batch without records, is not the commit of that batch."""
    run = RunHarness()
    run.batch()
    run.pass_time(1_000)
    run.latest()
    for _ in range(8):
        run.pass_time(HOUR_MS)
        run.latest()
    counted = run.run.statistics()
    assert counted.offsets_renewed > 0 and counted.commit_delay_max_ms < HOUR_MS


def test_a_member_that_is_added_later_joins_with_the_present_topics() -> None:
    """Those of the checkpoint are for members that Kafka still has from the run before."""
    (new,) = tps("new", 0)
    run = RunHarness(1, topics={"new": 1, "orders": 2}, auto_slots=True)
    run.start, run.ends = PAST, {A: 150, B: 60, new: 0}
    run.firsts = dict.fromkeys(run.ends, 0)
    run.committed = {tp: ev.Committed(offset=at, stream=STREAM, seq=3) for tp, at in PAST.positions().items()}
    run.assignments = {0: (A, B, new), 1: ()}
    run.latest()
    for _ in range(120):
        run.pass_time(1_000)
        run.latest()
    run.history.clear()
    run.feed(*(ev.AgentConnected(agent=name, executor=name, name=name) for name in "ab"))
    for _ in range(40):
        run.pass_time(1_000)
        run.feed(*(ev.AgentHeartbeat(agent=name) for name in "ab"))
        run.latest()
    joins = [(join.slot, join.topics) for join in only(ev.Join, run.history) if join.slot]
    assert joins == [(1, ("new", "orders"))] and not only(ev.Subscribe, run.history)
