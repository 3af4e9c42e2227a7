"""A partition leaves only between batches: holds, their order and budget, and what is lost instead."""

from collections.abc import Callable

import pytest
from kit.harness import HOLD_BUDGET_MS, STREAM, GroupHarness, only, tps

from spark_group_source.protocol import events as ev
from spark_group_source.protocol.states import SlotState

A, B, C, D = tps("orders", 0, 1, 2, 3)
RELEASE = [ev.Release(slot=0, client=1)]

Way = Callable[[GroupHarness], object]


def test_revocation_between_batches_is_released_at_once(group: GroupHarness) -> None:
    group.settled(A, B)
    assert group.revoking(A) == RELEASE
    assert group.run.partitions.ours.keys() == {B}
    assert group.run.statistics().slots == ("assigned",)
    assert group.run.statistics().holds == 0


@pytest.mark.proves("G3", level="core")
def test_revocation_waits_until_offsets_are_committed(group: GroupHarness) -> None:
    group.reads({A: (100, 150), B: (100, 110)})
    group.clock.advance(ms=10)
    assert group.revoking(A) == []
    group.clock.advance(ms=500)
    assert group.durable() == [ev.CommitOffsets(offsets={A: 150, B: 110}, stream=STREAM, seq=0)]
    group.clock.advance(ms=30)
    assert group.commit_succeeds() == RELEASE
    statistics = group.run.statistics()
    assert (statistics.holds, statistics.hold_last_ms, statistics.hold_max_ms) == (1, 530, 530)
    assert (statistics.hold_overruns, statistics.partitions_lost, statistics.possible_duplicates) == (0, 0, 0)
    assert (statistics.commits, statistics.commit_delay_last_ms) == (1, 30)


def test_revocation_of_unread_partitions_is_released_during_a_batch() -> None:
    for wanted, goes in (((B,), RELEASE), ((A, B), [])):
        group = GroupHarness()
        group.start_stream()
        group.reads({A: (100, 150)}, B)
        assert group.revoking(*wanted) == goes
        assert group.run.partitions.ours.keys() == ({A} if goes else {A, B})
        group.durable()
        assert group.run.plannable() == ({A: 150} if goes else {})


def test_replayed_batch_holds_its_partitions_before_their_position_is_known(fresh: GroupHarness) -> None:
    replayed = fresh.replays({A: (100, 150), B: (40, 40)})
    fresh.assigned(A)
    assert fresh.revoking(A) == []
    fresh.committed({A: 100})
    assert fresh.feed(ev.Durable(offset=replayed)) == [ev.CommitOffsets(offsets={A: 150}, stream=STREAM, seq=3)]
    assert fresh.commit_succeeds() == RELEASE


def test_second_revocation_extends_the_hold_but_not_its_budget(group: GroupHarness) -> None:
    group.reads({A: (100, 150), B: (100, 150)})
    group.revoking(A)
    group.clock.advance(ms=1_000)
    group.revoking(B)
    assert group.run.next_deadline_ms() == HOLD_BUDGET_MS
    group.durable()
    assert group.commit_succeeds() == RELEASE
    assert group.run.partitions.ours.keys() == set()


def test_eager_member_releases_all_partitions_and_rejoins(group: GroupHarness) -> None:
    group.reads({A: (100, 150)}, B)
    assert group.revoking(A, B, eager=True) == []
    group.durable()
    assert group.commit_succeeds() == [ev.Release(slot=0, client=1)]
    assert group.run.statistics().slots == (SlotState.JOINING.value,)
    group.assigned(A, generation=2)
    group.committed({A: 150})
    assert group.run.plannable() == {A: 150}


@pytest.mark.proves("G8", level="core")
def test_hold_beyond_its_budget_is_released_without_a_commit_and_counted(group: GroupHarness) -> None:
    group.reads({A: (100, 150)}, B)
    group.revoking(A, B)
    assert group.tick(ms=HOLD_BUDGET_MS - 1) == []
    assert group.tick(ms=1) == RELEASE
    statistics = group.run.statistics()
    assert (statistics.hold_overruns, statistics.holds, statistics.partitions_lost, statistics.possible_duplicates) == (
        1,
        1,
        1,
        50,
    )
    assert f"held a revocation for {HOLD_BUDGET_MS} ms, its whole budget; 1 partitions" in group.warned()[0]
    assert group.durable() == []  # the rows are safe, but the partition is another member's: nothing is committed
    assert group.run.partitions.ours.keys() == set()


def test_lost_partitions_are_never_committed_and_count_as_possible_duplicates(group: GroupHarness) -> None:
    group.reads({A: (100, 150), B: (100, 130)})
    group.lost(A)
    assert only(ev.CommitOffsets, group.durable()) == [ev.CommitOffsets(offsets={B: 130}, stream=STREAM, seq=0)]
    assert (group.run.statistics().partitions_lost, group.run.statistics().possible_duplicates) == (1, 50)
    assert group.warned() == [
        "slot 0 lost 1 partitions: the group revoked them without notice; 50 offsets may be read twice"
    ]


# --- how much of what is lost may be read twice ----------------------------------------------------------------------


def safe_but_not_committed(g: GroupHarness) -> None:
    g.start_stream()
    g.reads({A: (100, 150)})
    g.durable()
    g.feed(ev.OffsetCommitFailed(reason="coordinator moved"))
    g.plan({A: (150, 160)})


def never_committed(g: GroupHarness) -> None:
    g.start_stream()
    g.assigned(A)
    g.committed({A: None})
    g.commit_succeeds(g.resolved({A: 20}))
    g.plan({A: (20, 30)})
    g.durable()


def known_to_kafka(g: GroupHarness) -> None:
    g.start_stream()
    g.reads({B: (100, 150)}, A)


def replayed(g: GroupHarness) -> None:
    g.replays({A: (100, 150)})
    g.assigned(A)


def replayed_and_durable(g: GroupHarness) -> None:
    offset = g.replays({A: (100, 150), B: (40, 40)})
    g.assigned(A, B)
    g.feed(ev.Durable(offset=offset))


def read_by_a_former_run(g: GroupHarness) -> None:
    g.durable({A: (100, 150), B: (40, 40)})
    g.assigned(A, B)


def truncated_before_its_commit(g: GroupHarness) -> None:
    g.start_stream()
    g.reads({A: (100, 150)})
    g.durable()
    g.feed(ev.OffsetCommitFailed(reason="coordinator moved"))
    g.feed(ev.RecordsMissing(offsets={A: 130}, reason="the log was truncated", truncated={A: 3}))
    g.plan({A: (130, 160)})


def truncated_and_expired_before_its_commit(g: GroupHarness) -> None:
    g.start_stream()
    g.reads({A: (100, 150)})
    g.durable()
    g.feed(ev.OffsetCommitFailed(reason="coordinator moved"))
    g.feed(ev.RecordsMissing(offsets={A: 170}, reason="the log was truncated", truncated={A: 3}))
    g.plan({A: (170, 180)})


def expired_before_its_commit(g: GroupHarness) -> None:
    g.start_stream()
    g.reads({A: (100, 150)})
    g.durable()
    g.feed(ev.OffsetCommitFailed(reason="coordinator moved"))
    g.feed(ev.RecordsMissing(offsets={A: 170}, reason="retention"))
    g.plan({A: (170, 180)})


@pytest.mark.parametrize(
    ("way", "twice"),
    [
        (safe_but_not_committed, 60),  # the next reader starts at 100
        (never_committed, 10),
        (known_to_kafka, 0),
        (replayed, 50),
        (replayed_and_durable, 50),
        (read_by_a_former_run, 50),
        (truncated_before_its_commit, 60),
        (truncated_and_expired_before_its_commit, 10),
        (expired_before_its_commit, 10),  # the others do not exist any more
    ],
)
def test_possible_duplicates_of_a_lost_partition(fresh: GroupHarness, way: Way, twice: int) -> None:
    way(fresh)
    fresh.lost(A)
    assert (fresh.run.statistics().partitions_lost, fresh.run.statistics().possible_duplicates) == (1, twice)
    assert only(ev.CommitOffsets, fresh.tick(ms=5_000)) == []


def test_replay_durable_before_its_assignment_counts_when_its_hold_overruns(
    fresh: GroupHarness,
) -> None:
    offset = fresh.replays({A: (100, 150), B: (40, 40)})
    fresh.assigned()
    fresh.feed(ev.Durable(offset=offset))
    fresh.assigned(A, B)
    assert fresh.revoking(A, B) == []
    assert fresh.tick(ms=HOLD_BUDGET_MS) == RELEASE  # no broker ever answered
    assert fresh.run.statistics().possible_duplicates == 50


@pytest.mark.parametrize("at", [90, 100, 130, 150, 170])
@pytest.mark.parametrize("durable_first", [True, False])
def test_replayed_batch_counts_once_when_a_foreign_commit_shows(
    fresh: GroupHarness, at: int, durable_first: bool
) -> None:
    """What the other consumer has not read of it is read again after its commit."""
    offset = fresh.replays({A: (100, 150)})
    fresh.assigned(A)
    if durable_first:
        fresh.feed(ev.Durable(offset=offset))
    fresh.committed({A: ev.Committed(offset=at, stream="another")})
    if not durable_first:
        fresh.feed(ev.Durable(offset=offset))
    assert fresh.run.statistics().possible_duplicates == 50
    fresh.lost(A)
    assert fresh.run.statistics().possible_duplicates == 50


# --- lost partitions, and their return -------------------------------------------------------------------------------


def test_member_that_lost_all_partitions_rejoins_without_an_order(group: GroupHarness) -> None:
    group.settled(A, B)
    group.lost(A)
    assert group.run.statistics().slots == ("assigned",)
    assert group.lost(B) == []
    assert group.run.statistics().slots == ("joining",)
    assert not group.gathered()


def test_partition_half_read_by_another_consumer_continues_there(
    group: GroupHarness,
) -> None:
    """Not earlier: a commit under this stream's name from before the batch would look as if the batch came after it."""
    group.reads({A: (100, 150)})
    group.lost(A)
    group.assigned(A)
    assert group.committed({A: ev.Committed(offset=120)}) == []
    assert group.revoking(A) == []
    assert group.durable() == [ev.CommitOffsets(offsets={A: 120}, stream=STREAM, seq=0)]
    assert group.commit_succeeds() == RELEASE


def test_partition_assigned_to_another_slot_leaves_the_former_one(pair: GroupHarness) -> None:
    pair.reads({A: (100, 150)})
    pair.assigned(A, slot=1)
    assert pair.run.statistics().assigned == (0, 1)
    assert pair.run.statistics().possible_duplicates == 50
    pair.committed({A: 100})
    assert pair.lost(A, slot=0) == []  # the former slot reports it later
    assert pair.run.partitions.ours.keys() == {A}
    assert pair.revoking(A, slot=1) == []


def test_assignment_during_a_hold_ends_the_hold(group: GroupHarness) -> None:
    group.reads({A: (100, 150), B: (100, 110)}, D)
    group.revoking(A, D)
    group.assigned(C)
    assert group.run.partitions.ours.keys() == {B, C}
    assert group.run.statistics().possible_duplicates == 50
    assert only(ev.CommitOffsets, group.durable()) == [ev.CommitOffsets(offsets={B: 110}, stream=STREAM, seq=0)]


def test_every_event_that_changes_the_assignment_counts_as_a_rebalance(group: GroupHarness) -> None:
    def counted() -> tuple[int, int, str]:
        now = group.run.statistics()
        return now.rebalances, now.rebalanced_at_ms, now.reason

    assert counted() == (0, 0, "")
    group.assigned(A, B)
    assert counted() == (1, 0, "slot 0 was assigned 2 partitions")
    group.clock.advance(ms=7)
    group.assigned()
    group.revoking(B)
    assert counted() == (2, 7, "1 partitions of slot 0 were revoked")
    group.lost(A)
    assert counted() == (3, 7, "slot 0 lost 1 partitions: the group revoked them without notice")
