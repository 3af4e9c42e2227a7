"""What agents hold and tasks read is counted for each slot; what tasks skipped is counted once."""

import pytest
from kit.harness import tps
from kit.run_harness import RunHarness

from spark_group_source.model import OffsetRange, TaskCounts
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.run import Run
from spark_group_source.protocol.statistics import Statistics

A, B, ELSEWHERE = tps("orders", 0, 1, 2)


@pytest.fixture
def run() -> Run:
    """Two slots with a partition each, and the first batch planned."""
    harness = RunHarness(slots=2)
    harness.assignments = {0: (A,), 1: (B,)}
    harness.ends = {A: 10, B: 10}
    harness.latest()
    assert harness.run.statistics().assigned == (1, 1)
    return harness.run


def skipped(run: Run, seq: int, *ranges: tuple[int, int]) -> int:
    """A task reports these offsets of partition A as skipped; returns how many records count as lost then."""
    lost = tuple(OffsetRange(A, start, end) for start, end in ranges)
    run.handle(ev.TaskReported(seq=seq, counts=TaskCounts(skipped=lost)), now_ms=1)
    return run.statistics().records_lost


def test_rows_count_for_the_slot_that_holds_the_partition(run: Run) -> None:
    run.handle(
        ev.TaskReported(seq=0, counts=TaskCounts({A: 3, B: 4}, {A: 1, ELSEWHERE: 9})),
        now_ms=1,
    )
    run.handle(ev.TaskReported(seq=0, counts=TaskCounts(rows_from_brokers={B: 2})), now_ms=1)
    found = run.statistics()
    assert (found.rows_from_memory, found.rows_from_brokers) == ((3, 4), (1, 2))


def test_skipped_offsets_count_once_for_all_attempts(run: Run) -> None:
    assert skipped(run, 0, (2, 5)) == 3
    assert skipped(run, 0, (2, 5)) == 3, "the same task again, or its twin"
    assert skipped(run, 0, (1, 3), (4, 7)) == 6
    assert skipped(run, 1, (7, 9)) == 8
    assert skipped(run, 0, (0, 1)) == 9, "a late report"
    assert skipped(run, 5, (20, 21)) == 10
    assert skipped(run, 1, (7, 9)) == 10, "of a batch that is long done"
    assert skipped(run, 0, (30, 31)) == 10, "also what it did not report before"


def test_buffered_rows_are_shown_while_the_slot_is_placed_on_the_reporting_agent(run: Run) -> None:
    stock = ev.PrefetchReported(agent="h1", buffered=(ev.Buffered(slot=1, bytes=100, rows=7),))
    run.handle(stock, now_ms=1)
    assert run.statistics().buffered_rows == (0, 0), "its slot is at home"
    run.slots.all[1].agent = "h1"
    run.handle(stock, now_ms=1)
    assert (run.statistics().buffered_rows, run.statistics().buffered_bytes) == ((0, 7), (0, 100))


def test_statistics_survive_their_json(run: Run) -> None:
    assert Statistics.from_dict(run.statistics().as_dict()) == run.statistics()


def test_statistics_of_another_version_are_read() -> None:
    doc = {"group": "etl", "seq": 4, "slots": ["joining"], "of_a_newer_version": 1}
    assert Statistics.from_dict(doc) == Statistics(group="etl", seq=4, slots=("joining",))


def test_buffered_rows_are_not_shown_after_the_slot_left_the_agent(run: Run) -> None:
    slot = run.slots.all[1]
    slot.agent = "h1"
    run.handle(ev.PrefetchReported(agent="h1", buffered=(ev.Buffered(slot=1, bytes=100, rows=7),)), now_ms=1)
    run.handle(ev.MemberFailed(slot=1, client=slot.client, reason="x"), now_ms=1)
    run.handle(ev.Tick(), now_ms=60_000)
    assert slot.agent == "", "no agent is known here"
    assert run.statistics().buffered_rows == (0, 0)
