"""When Kafka forgets a committed offset, and what a run does before that and after it. The rules are Kafka's own, as
``tests/kafka/test_expiry.py`` sees them on a real broker."""

import pytest
from kit.harness import STREAM, GroupHarness, only, tps

from spark_group_source.group import events as ev
from spark_group_source.group.expiry import Clock, Expiry, GroupState, clock_of, expiries, near
from spark_group_source.group.names import committed_ms, note_text, parse_note, reset_text
from spark_group_source.group.positions import RENEW_LOOK_MS, RENEW_MS
from spark_group_source.model import LATEST, TopicPartition
from spark_group_source.options.starting import StartingPosition

A, B, C = tps("orders", 0, 1, 2)
OLD = TopicPartition("former", 0)
DAY_MS = 86_400_000
WEEK_MS = 7 * DAY_MS
STATES = ("stable", "empty", "preparing_rebalancing", "completing_rebalancing", "assigning", "reconciling")


def seen(
    state: str = "stable", protocol: str = "classic", members: int = 1, *topics: str, simple: bool = False
) -> GroupState:
    return GroupState(state=state, protocol=protocol, members=members, simple=simple, topics=frozenset(topics))


# --- Kafka's rules --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
@pytest.mark.parametrize("state", STATES)
def test_nothing_of_a_topic_that_a_member_has_expires(state: str, protocol: str) -> None:
    assert clock_of("orders", seen(state, protocol, 1, "orders")) is Clock.NONE


@pytest.mark.parametrize(
    ("group", "clock"),
    [
        (seen("stable", "classic", 2, "orders"), Clock.COMMIT),
        (seen("preparing_rebalancing", "classic", 2, "orders"), Clock.NOT_STABLE),
        (seen("completing_rebalancing", "classic", 2, "orders"), Clock.NOT_STABLE),
        (seen("reconciling", "consumer", 2, "orders"), Clock.COMMIT),
        (seen("empty", "classic", 0), Clock.EMPTY),
        (seen("empty", "consumer", 0), Clock.COMMIT),
        (seen("empty", "classic", 0, simple=True), Clock.COMMIT),
    ],
)
def test_what_counts_for_a_topic_that_no_member_has(group: GroupState, clock: Clock) -> None:
    assert clock_of("former", group) is clock


def test_a_classic_group_without_members_keeps_all_offsets_for_a_retention_after_its_newest_commit() -> None:
    found = expiries(seen("empty", "classic", 0), {A: 0, B: DAY_MS, C: None}, retention_ms=WEEK_MS)
    later = Expiry(clock=Clock.EMPTY, earliest_ms=DAY_MS + WEEK_MS)
    assert found == dict.fromkeys((A, B, C), later), "the last member committed the newest one, and left after that"


def test_in_a_group_of_kip_848_without_members_each_offset_has_its_own_end() -> None:
    found = expiries(seen("empty", "consumer", 0), {A: 0, B: DAY_MS, C: None}, retention_ms=WEEK_MS)
    assert [found[tp].earliest_ms for tp in (A, B, C)] == [WEEK_MS, DAY_MS + WEEK_MS, None]
    assert all(found[tp].surely for tp in (A, B, C))
    assert near(found, now_ms=WEEK_MS - DAY_MS, retention_ms=WEEK_MS) == [A]


def test_G10_of_what_nobody_wrote_down_nothing_is_concluded() -> None:
    unknown = expiries(seen("empty", "consumer", 0), {A: None}, retention_ms=WEEK_MS)
    assert unknown[A].earliest_ms is None and not near(unknown, now_ms=10 * WEEK_MS, retention_ms=WEEK_MS)
    untold = expiries(seen("empty", "consumer", 0), {A: 0}, retention_ms=None)
    assert untold[A].earliest_ms is None and not near(untold, now_ms=10 * WEEK_MS, retention_ms=None)
    members = expiries(seen("stable", "classic", 1, "orders"), {OLD: 0, A: 0}, retention_ms=WEEK_MS)
    assert members[OLD] == Expiry(clock=Clock.COMMIT, earliest_ms=WEEK_MS), "a member may subscribe to it all the same"
    assert members[A] == Expiry(clock=Clock.NONE)


def test_a_streams_note_says_when_it_was_committed_and_who_reads_only_the_rest_is_not_disturbed() -> None:
    text = note_text("s", 4, 2, followed=True, cut=9, at_ms=1_700_000_000_123)
    assert committed_ms(text) == 1_700_000_000_123
    assert parse_note(text) == parse_note(note_text("s", 4, 2, followed=True, cut=9))
    assert committed_ms(note_text("s", 4, at_ms=5)) == 5
    for other in (note_text("s", 4), reset_text(1), "", "at=5", "x:y:1:2:at=5", "spark-group:s:1:2:at=x"):
        assert committed_ms(other) is None


# --- what a run does ------------------------------------------------------------------------------------------------


def committed(offset: int, at_ms: int | None) -> ev.Committed:
    return ev.Committed(offset=offset, stream=STREAM, at_ms=at_ms)


def aged(group: GroupHarness) -> list[ev.Command]:
    """Time passes until all that was committed before is to be committed again."""
    return group.tick(ms=RENEW_MS + RENEW_LOOK_MS)


def test_an_idle_partition_is_committed_again_after_some_hours(group: GroupHarness) -> None:
    group.assigned(A, B)
    group.committed({A: committed(5, group.clock()), B: committed(6, group.clock() - RENEW_MS // 2)})
    assert group.tick(ms=RENEW_MS // 2 - RENEW_LOOK_MS) == []
    again = group.tick(ms=RENEW_LOOK_MS)
    assert again == [ev.Echo(offsets={B: 6}, stream=STREAM, seq=-1)]
    assert group.echoed(again) == []
    assert group.tick(ms=RENEW_MS // 2) == [ev.Echo(offsets={A: 5}, stream=STREAM, seq=-1)]
    group.echoed()
    statistics = group.machine.statistics()
    assert (statistics.offsets_renewed, statistics.uncommitted) == (2, 0)
    assert group.warned() == []


def test_it_is_never_older_than_the_smallest_retention_that_is_served(group: GroupHarness) -> None:
    group.assigned(A)
    group.committed({A: committed(5, group.clock())})
    while not (again := group.tick(ms=RENEW_LOOK_MS - 1)):
        pass
    assert only(ev.Echo, again) and group.clock() <= 7 * 3_600_000


def test_a_commit_begins_the_time_anew(group: GroupHarness) -> None:
    group.assigned(A)
    group.committed({A: committed(5, group.clock())})
    group.tick(ms=RENEW_MS - 1)
    group.plan({A: (5, 9)})
    group.echoed(group.durable())
    assert group.tick(ms=RENEW_MS // 2) == []


def test_G10_an_offset_whose_age_nobody_wrote_down_counts_as_old(group: GroupHarness) -> None:
    group.settled(A)
    assert group.tick(ms=RENEW_LOOK_MS) == [ev.Echo(offsets={A: 100}, stream=STREAM, seq=-1)]


def test_G3_a_partition_that_is_committed_again_leaves_when_that_is_over(group: GroupHarness) -> None:
    """Else the commit could arrive behind the next owner's."""
    group.settled(A)
    again = aged(group)
    assert only(ev.Release, group.revoking(A)) == []
    assert len(only(ev.Release, group.echoed(again))) == 1
    assert group.machine.statistics().maybe_twice == 0


def test_one_that_was_lost_meanwhile_is_not_owed_when_it_comes_back(group: GroupHarness) -> None:
    group.settled(A)
    aged(group)
    group.lost(A)
    assert group.machine.statistics().maybe_twice == 0
    assert group.machine.positions.owed() == {}


def test_G5_what_expired_goes_on_where_the_checkpoint_says_and_is_counted(fresh: GroupHarness) -> None:
    fresh.durable({A: (100, 150), B: (40, 40)})
    fresh.assigned(A, B, C)
    commands = fresh.committed({A: None, B: None, C: None})
    assert [sorted(starts.starts) for starts in only(ev.ResolveStarts, commands)] == [[C]], "C was never read"
    assert fresh.machine.plannable() == {A: 150, B: 40}
    assert only(ev.Echo, commands)[0].offsets == {A: 150, B: 40}, "and Kafka has it again"
    assert fresh.machine.statistics().offsets_restored == 2
    assert any("not at startingOffsets" in text for text in fresh.said())


def test_what_kafka_is_owed_anyway_does_not_count_as_renewed(group: GroupHarness) -> None:
    group.settled(A)
    group.plan({A: (100, 150)})
    group.durable()
    assert only(ev.Echo, aged(group)) == []
    assert group.machine.statistics().offsets_renewed == 0


def test_G5_a_plan_says_which_partitions_begin_behind_records_that_nobody_committed() -> None:
    group = GroupHarness(starting=StartingPosition(everywhere=LATEST))
    group.born({"orders": 2})
    group.assigned(A, B, C)
    group.committed({A: None, B: 7, C: None})
    assert group.machine.lookups.began == {A}, "C came later: it begins at its first record"
    group.echoed(group.resolved({A: 31, C: 0}))
    group.plan({})
    assert group.machine.lookups.began == {A}
    group.durable()
    assert group.machine.lookups.began == frozenset()


def test_what_somebody_committed_meanwhile_does_not_count_as_begun() -> None:
    group = GroupHarness(starting=StartingPosition(everywhere=LATEST))
    group.born()
    group.assigned(A)
    group.committed({A: None})
    group.echoed(group.resolved({A: 31}))
    assert group.machine.lookups.began == {A}
    group.lost(A)
    group.assigned(A)
    group.taken({A: ev.Committed(offset=50)})
    assert group.machine.lookups.began == frozenset()


def test_at_its_first_record_nothing_is_skipped(group: GroupHarness) -> None:
    group.assigned(A)
    group.committed({A: None})
    assert group.machine.lookups.began == frozenset()
