"""Offset commits: when, which offsets, and what happens when one fails."""

from itertools import pairwise

import pytest
from kit.harness import STREAM, GroupHarness, only, tps

from spark_group_source.errors import InvariantBroken
from spark_group_source.model import TopicPartition
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.offsets import StreamOffset
from spark_group_source.protocol.request_schedule import ABSENT_PAUSE_MS_MAX, ABSENT_WARNING_MS

A, B, C, D = tps("orders", 0, 1, 2, 3)


def commit(offsets: dict[TopicPartition, int], seq: int) -> ev.CommitOffsets:
    return ev.CommitOffsets(offsets=offsets, stream=STREAM, seq=seq)


def run_batch(group: GroupHarness, start: int, end: int) -> list[ev.Command]:
    group.plan({A: (start, end)})
    return group.durable()


@pytest.mark.proves("G2", level="core")
def test_batch_is_not_committed_before_it_is_durable(group: GroupHarness) -> None:
    group.settled(A)
    assert group.plan({A: (100, 150)}) == []
    assert group.tick(ms=10_000) == []
    assert group.run.all_committed
    assert group.durable() == [commit({A: 150}, 0)]
    assert not group.run.all_committed


def test_failed_commit_is_retried_after_growing_pauses(group: GroupHarness) -> None:
    group.settled(A)
    run_batch(group, 100, 150)
    for pause_ms in (100, 200, 500, 1_000, 2_000, 5_000, 5_000):
        assert group.feed(ev.OffsetCommitFailed(reason="coordinator moved")) == []
        assert not group.run.all_committed
        assert group.run.next_deadline_ms() == group.clock() + pause_ms
        assert group.tick(ms=pause_ms - 1) == []
        assert group.tick(ms=1) == [commit({A: 150}, 0)]
    group.commit_succeeds()
    assert group.run.statistics().commits_failed == 7
    assert len(group.warned()) == 7 and "no rows are lost" in group.warned()[0]
    run_batch(group, 150, 160)
    group.feed(ev.OffsetCommitFailed(reason="coordinator moved"))
    assert group.run.next_deadline_ms() == group.clock() + 100, "a success makes the next pause short again"


def test_commit_overtaken_by_a_rebalance_is_retried_and_does_not_count_as_failed(group: GroupHarness) -> None:
    group.settled(A)
    run_batch(group, 100, 150)
    for pause_ms in (100, 100, 200, 400):
        assert group.feed(ev.OffsetsCommitted(offsets={}, left_out={0: "ILLEGAL_GENERATION"})) == []
        assert group.tick(ms=pause_ms - 1) == []
        assert group.tick(ms=1) == [commit({A: 150}, 0)]
    assert (group.run.statistics().commits, group.run.statistics().commits_failed) == (0, 0)
    assert group.warned() == []


def test_commit_that_leaves_out_all_slots_does_not_shorten_the_pause_after_the_next_failure(
    group: GroupHarness,
) -> None:
    group.settled(A)
    run_batch(group, 100, 150)
    for pause_ms in (100, 200, 500, 1_000):
        group.feed(ev.OffsetCommitFailed(reason="coordinator moved"))
        assert group.tick(ms=pause_ms - 1) == []
        assert group.tick(ms=1) == [commit({A: 150}, 0)]
        assert group.feed(ev.OffsetsCommitted(offsets={}, left_out={0: "ILLEGAL_GENERATION"})) == []
        assert group.tick(ms=ABSENT_PAUSE_MS_MAX) == [commit({A: 150}, 0)]


def test_absent_slot_does_not_delay_commits_of_other_slots(pair: GroupHarness) -> None:
    pair.settled(A)
    pair.settled(B, slot=1)
    pair.plan({A: (100, 150), B: (100, 120)})
    pair.revoking(B, slot=1)
    pair.durable()
    left = {0: "UNKNOWN_MEMBER_ID"}
    assert pair.feed(ev.OffsetsCommitted(offsets={B: 120}, left_out=left)) == [ev.Release(slot=1, client=1)]
    assert not pair.run.all_committed
    pair.settled(C, slot=1)
    pair.plan({C: (100, 130)})
    assert pair.durable() == [commit({C: 130}, 1)]  # at once, without the absent slot
    pair.commit_succeeds()
    assert pair.tick(ms=100) == [commit({A: 150}, 1)]
    assert pair.commit_succeeds() == []
    assert pair.run.all_committed


def test_absent_slot_is_logged_once_and_retried(pair: GroupHarness) -> None:
    pair.settled(A)
    pair.settled(B, slot=1)
    pair.plan({A: (100, 150), B: (100, 120)})
    pair.durable()
    pair.feed(ev.OffsetsCommitted(offsets={B: 120}, left_out={0: "UNKNOWN_MEMBER_ID"}))
    tries = []
    for _ in range(20_000 // 50):
        if pair.tick(ms=50) == [commit({A: 150}, 0)]:
            tries.append(pair.clock())
            pair.feed(ev.OffsetsCommitted(offsets={}, left_out={0: "UNKNOWN_MEMBER_ID"}))
            assert bool(pair.warned()) == (pair.clock() >= ABSENT_WARNING_MS)
    assert max(later - sooner for sooner, later in pairwise(tries)) == ABSENT_PAUSE_MS_MAX
    (warning,) = pair.warned()
    assert "slot 0 is not in the group (UNKNOWN_MEMBER_ID)" in warning
    pair.assigned(generation=2)  # it is back: no pause any more
    assert commit({A: 150}, 0) in pair.history[-2:]


def test_absence_of_the_only_slot_is_logged(group: GroupHarness) -> None:
    group.settled(A)
    run_batch(group, 100, 150)
    while group.clock() < ABSENT_WARNING_MS + 2 * ABSENT_PAUSE_MS_MAX:
        group.feed(ev.OffsetsCommitted(offsets={}, left_out={0: "UNKNOWN_MEMBER_ID"}))
        group.tick(ms=ABSENT_PAUSE_MS_MAX)
    assert [("slot 0 is not in the group" in text) for text in group.warned()] == [True]


def test_short_absences_of_a_slot_do_not_add_up(pair: GroupHarness) -> None:
    pair.settled(A)
    pair.settled(B, slot=1)
    for start in (100, 150):
        pair.plan({A: (start, start + 50), B: (start, start + 50)})
        pair.durable()
        pair.feed(ev.OffsetsCommitted(offsets={B: start + 50}, left_out={0: "STALE_MEMBER_EPOCH"}))
        assert pair.tick(ms=100) == [commit({A: start + 50}, start // 50 - 2)]
        pair.commit_succeeds()
        pair.clock.advance(ms=ABSENT_WARNING_MS)
    assert pair.warned() == []


def test_late_response_does_not_hide_a_lower_commit(group: GroupHarness) -> None:
    """It was released during the commit, rewound by an operator, and assigned again: Kafka may have either offset."""
    group.settled(A)
    late = run_batch(group, 100, 150)
    group.lost(A)
    group.assigned(A)
    group.committed({A: ev.Committed(offset=20)})
    assert group.revoking(A) == []
    assert group.commit_succeeds(late) == [
        ev.CommitOffsets(offsets={A: 20}, stream=STREAM, seq=0, followed=frozenset({A}))
    ]
    assert group.commit_succeeds() == [ev.Release(slot=0, client=1)]


@pytest.mark.proves("G6", level="core")
def test_commit_of_a_removed_member_is_not_retried(group: GroupHarness) -> None:
    group.settled(A)
    run_batch(group, 100, 150)
    group.feed(
        ev.MemberFailed(slot=0, client=1, reason="unknown to the group"),
        ev.OffsetsCommitted(offsets={}, left_out={0: "UNKNOWN_MEMBER_ID"}),
    )
    assert only(ev.CommitOffsets, group.tick(ms=10_000)) == []
    assert group.run.statistics().possible_duplicates == 50


def test_commit_latency_ends_when_all_offsets_are_committed(group: GroupHarness) -> None:
    group.settled(A)
    run_batch(group, 100, 150)
    group.clock.advance(ms=40)
    group.feed(ev.OffsetCommitFailed(reason="x"))
    group.tick(ms=100)
    group.clock.advance(ms=10)
    group.commit_succeeds()
    assert (group.run.statistics().commit_delay_last_ms, group.run.statistics().commit_delay_max_ms) == (
        150,
        150,
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"stream": "another", "seq": 0},
        {"stream": STREAM, "seq": 5},
    ],
)
def test_durable_batch_without_a_plan_breaks_an_invariant(group: GroupHarness, wrong: dict[str, object]) -> None:
    group.settled(A)
    offset = StreamOffset(group="etl", **wrong)  # type: ignore[arg-type]
    with pytest.raises(InvariantBroken, match="The last events"):
        group.feed(ev.Durable(offset=offset))


@pytest.mark.parametrize(
    ("ranges", "seq"),
    [
        ({A: (100, 150)}, 1),  # a batch is left out
        ({A: (90, 150)}, 0),  # it starts before the position
        ({A: (110, 150)}, 0),  # it leaves a gap
        ({C: (0, 5)}, 0),  # the partition is another member's
        ({B: (100, 150)}, 0),  # the partition is leaving
    ],
)
def test_plan_that_does_not_start_at_the_positions_breaks_an_invariant(
    group: GroupHarness, ranges: dict[TopicPartition, tuple[int, int]], seq: int
) -> None:
    group.settled(A, B)
    group.feed(
        ev.OffsetCommitFailed(reason="x"), ev.RecordsMissing(offsets={B: 100}, reason="keeps the revocation waiting")
    )
    group.revoking(B)
    with pytest.raises(InvariantBroken):
        group.planned(group.offset(ranges, seq))


def test_second_plan_at_a_time_breaks_an_invariant(group: GroupHarness) -> None:
    group.reads({A: (100, 150)})
    with pytest.raises(InvariantBroken, match="does not follow"):
        group.plan({A: (100, 150)})


def test_reading_an_unplanned_batch_breaks_an_invariant(group: GroupHarness) -> None:
    group.settled(A)
    with pytest.raises(InvariantBroken, match="which this run did not plan"):
        group.feed(ev.BatchStarted(offset=group.offset({}, 4)))


def test_late_response_does_not_count_a_later_batch_as_committed(group: GroupHarness) -> None:
    group.settled(A)
    late = run_batch(group, 100, 150)
    group.feed(ev.RecordsMissing(offsets={A: 0}, reason="topic orders was made again"))
    back = group.commit_succeeds(late)
    assert back == [ev.CommitOffsets(offsets={A: 0}, stream=STREAM, seq=0)]
    run_batch(group, 0, 150)
    assert group.commit_succeeds(back) == [commit({A: 150}, 1)]
    assert group.commit_succeeds() == [] and group.run.all_committed
