"""What a run does before Kafka forgets an offset, and after it did."""

import pytest
from kit.harness import STREAM, GroupHarness, only, tps

from spark_group_source.model import LATEST
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.partitions import RENEW_CHECK_MS, RENEW_MS
from spark_group_source.protocol.rules import StartingPosition

A, B, C = tps("orders", 0, 1, 2)


def committed(offset: int, at_ms: int | None) -> ev.Committed:
    return ev.Committed(offset=offset, stream=STREAM, at_ms=at_ms)


def aged(group: GroupHarness) -> list[ev.Command]:
    """Time passes until all that was committed before is to be committed again."""
    return group.tick(ms=RENEW_MS + RENEW_CHECK_MS)


def test_offset_of_an_idle_partition_is_renewed_after_hours(group: GroupHarness) -> None:
    group.assigned(A, B)
    group.committed({A: committed(5, group.clock()), B: committed(6, group.clock() - RENEW_MS // 2)})
    assert group.tick(ms=RENEW_MS // 2 - RENEW_CHECK_MS) == []
    again = group.tick(ms=RENEW_CHECK_MS)
    assert again == [ev.CommitOffsets(offsets={B: 6}, stream=STREAM, seq=-1)]
    assert group.commit_succeeds(again) == []
    assert group.tick(ms=RENEW_MS // 2) == [ev.CommitOffsets(offsets={A: 5}, stream=STREAM, seq=-1)]
    group.commit_succeeds()
    statistics = group.run.statistics()
    assert (statistics.offsets_renewed, statistics.uncommitted_partitions) == (2, 0)
    assert group.warned() == []


def test_offset_is_never_older_than_the_smallest_supported_retention(group: GroupHarness) -> None:
    group.assigned(A)
    group.committed({A: committed(5, group.clock())})
    while not (again := group.tick(ms=RENEW_CHECK_MS - 1)):
        pass
    assert only(ev.CommitOffsets, again) and group.clock() <= 7 * 3_600_000


def test_commit_restarts_the_renewal_time(group: GroupHarness) -> None:
    group.assigned(A)
    group.committed({A: committed(5, group.clock())})
    group.tick(ms=RENEW_MS - 1)
    group.plan({A: (5, 9)})
    group.commit_succeeds(group.durable())
    assert group.tick(ms=RENEW_MS // 2) == []


def test_G10_offset_of_unknown_age_is_renewed(group: GroupHarness) -> None:
    group.settled(A)
    assert group.tick(ms=RENEW_CHECK_MS) == [ev.CommitOffsets(offsets={A: 100}, stream=STREAM, seq=-1)]


def test_G3_partition_is_released_after_its_renewal_is_committed(group: GroupHarness) -> None:
    """Otherwise the commit could arrive after the next owner's."""
    group.settled(A)
    again = aged(group)
    assert only(ev.Release, group.revoking(A)) == []
    assert len(only(ev.Release, group.commit_succeeds(again))) == 1
    assert group.run.statistics().possible_duplicates == 0


def test_G5_expired_offset_is_restored_from_the_checkpoint_and_counted(fresh: GroupHarness) -> None:
    fresh.durable({A: (100, 150), B: (40, 40)})
    fresh.assigned(A, B, C)
    commands = fresh.committed({A: None, B: None, C: None})
    assert [sorted(starts.starts) for starts in only(ev.ResolveStarts, commands)] == [[C]], "C was never read"
    assert only(ev.CommitOffsets, commands)[0].offsets == {A: 150, B: 40}
    assert fresh.run.plannable() == {}, "first Kafka has it again"
    fresh.commit_succeeds(commands)
    assert fresh.run.plannable() == {A: 150, B: 40}
    assert fresh.run.statistics().offsets_restored == 2
    assert any("not at startingOffsets" in text for text in fresh.logged())


def test_uncommitted_position_does_not_count_as_renewed(group: GroupHarness) -> None:
    group.reads({A: (100, 150)})
    group.durable()
    assert only(ev.CommitOffsets, aged(group)) == []
    assert group.run.statistics().offsets_renewed == 0


def test_G5_plan_lists_partitions_that_start_after_uncommitted_records() -> None:
    group = GroupHarness(starting=StartingPosition(everywhere=LATEST))
    group.start_stream({"orders": 2})
    group.assigned(A, B, C)
    group.committed({A: None, B: 7, C: None})
    assert group.run.lookups.started == {A}, "C was added later: it starts at its first record"
    group.commit_succeeds(group.resolved({A: 31, C: 0}))
    for end in (31, 40):  # a sink with a table for each topic compares nothing of a topic without records
        group.plan({A: (31, end)})
        assert group.run.lookups.started == {A}
        group.durable()
    assert group.run.lookups.started == frozenset()


def started_at_the_end() -> GroupHarness:
    """A stream with one partition, whose start at 31 is committed, and without a batch."""
    group = GroupHarness(starting=StartingPosition(everywhere=LATEST))
    group.start_stream()
    group.assigned(A)
    group.committed({A: None})
    group.commit_succeeds(group.resolved({A: 31}))
    return group


def test_partition_committed_meanwhile_is_not_listed_as_started() -> None:
    group = started_at_the_end()
    assert group.run.lookups.started == {A}
    group.lost(A)
    group.assigned(A)
    group.adopt({A: ev.Committed(offset=50)})
    assert group.run.lookups.started == frozenset()


def test_own_commit_where_another_consumer_was_is_not_listed_as_started() -> None:
    """The run followed another consumer's commit, and ended before a batch with the partition: the checkpoint knows the
    start only. The sink would refuse the position above its ledger."""
    group = started_at_the_end()
    group.lost(A)
    group.assigned(A)
    group.committed({A: ev.Committed(offset=50, stream=STREAM, followed=True)})
    assert group.run.lookups.started == frozenset()


@pytest.mark.parametrize("found", [ev.Committed(offset=31, stream=STREAM), None], ids=["committed", "not committed"])
def test_partition_that_returns_before_its_first_batch_is_durable_is_listed_as_started(
    found: ev.Committed | None,
) -> None:
    """Its start was only committed by this stream, or not even that: no consumer read the records before it."""
    group = started_at_the_end()
    group.revoking(A)
    group.assigned(A)
    group.committed({A: found})
    group.commit_succeeds()
    assert group.run.lookups.started == {A}
    assert group.run.plannable() == {A: 31}


@pytest.mark.parametrize("started", [True, False], ids=["nothing durable", "a batch, or at a foreign commit"])
@pytest.mark.parametrize("stream", [STREAM, "another"])
def test_G5_start_that_a_stream_committed_with_nothing_durable_is_listed_as_started(stream: str, started: bool) -> None:
    """Its driver was killed before a batch with the partition, or its user deleted the checkpoint after the sink had
    refused it: no consumer read the records before the start."""
    group = GroupHarness(starting=StartingPosition(everywhere=LATEST))
    group.start_stream()
    group.assigned(A)
    adopt = group.committed if stream == STREAM else group.adopt
    adopt({A: ev.Committed(offset=31, stream=stream, seq=4, started=started)})
    assert group.run.plannable() == {A: 31}
    assert group.run.lookups.started == ({A} if started else set())


def test_start_that_the_checkpoint_is_beyond_is_not_listed_as_started(fresh: GroupHarness) -> None:
    """A batch is durable that Kafka does not have."""
    fresh.durable({A: (31, 40)})
    fresh.assigned(A)
    fresh.committed({A: ev.Committed(offset=31, stream=STREAM, started=True)})
    assert fresh.run.plannable() == {A: 40}
    assert fresh.run.lookups.started == frozenset()


def test_commits_say_which_partitions_start_until_a_batch_is_durable() -> None:
    group = GroupHarness(starting=StartingPosition(everywhere=LATEST))
    group.start_stream()
    group.assigned(A)
    group.committed({A: None})
    first = group.resolved({A: 31})
    assert [order.started for order in only(ev.CommitOffsets, first)] == [{A}]
    group.commit_succeeds(first)
    group.plan({A: (31, 40)})
    assert [order.started for order in only(ev.CommitOffsets, group.durable())] == [frozenset()]


def test_partition_of_a_batch_that_a_reset_voids_is_listed_as_started() -> None:
    """The table refuses the next batch as well, instead of taking the records before the start as read."""
    group = started_at_the_end()
    batch = group.offset({A: (31, 40)}, group.run.seq + 1)
    group.planned(batch)
    group.feed(ev.NextBatchRequested(start=batch, new_stream="another", void_by=1))
    group.committed({A: ev.Committed(offset=31, stream=STREAM)})
    assert group.run.plannable() == {A: 31}
    assert group.run.lookups.started == {A}
    group.plan({A: (31, 40)})
    group.durable()
    assert group.run.lookups.started == frozenset()
