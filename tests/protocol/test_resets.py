"""Operators move a group: by the notes, a run distinguishes resets, rewinds and its own commits."""

import pytest
from kit.harness import STREAM, GroupHarness, only, tps

from spark_group_source.errors import BrokerUnavailable
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.lookups import UNANSWERED_MAX
from spark_group_source.protocol.offsets import StreamOffset
from spark_group_source.protocol.request_schedule import RETRY_PAUSES_MS

A, B, C = tps("orders", 0, 1, 2)


@pytest.mark.parametrize(
    ("seq", "goes_on"),
    [(7, 20), (6, 20), (5, 150)],
    ids=["as new as our memory", "moved back during our last batch", "older than our memory"],
)
def test_which_lower_commits_of_the_stream_are_accepted(fresh: GroupHarness, seq: int, goes_on: int) -> None:
    """A former run followed an operator back, committed that under our name, and failed before the next plan; or batch
    7 was planned before the move, or it would begin at 20."""
    fresh.durable({A: (100, 150)})
    fresh.assigned(A)
    fresh.committed({A: ev.Committed(offset=20, stream=STREAM, seq=seq, followed=True)})
    assert fresh.run.plannable() == {A: goes_on}
    assert fresh.followed() == ({A} if goes_on == 20 else frozenset())


def reset(offset: int, reset_number: int = 1) -> ev.Committed:
    return ev.Committed(offset=offset, reset_number=reset_number)


def test_reset_voids_the_plan_in_flight_and_all_remembered_positions(fresh: GroupHarness) -> None:
    replayed = fresh.replays({A: (100, 150), B: (40, 40)}, uncommitted={C: 9})
    assert fresh.run.partitions.uncommitted() == {A: 100, B: 40, C: 9}
    fresh.assigned(A, B)
    again = fresh.committed({A: reset(20), B: reset(30)})
    assert again == [ev.FetchCommittedOffsets(partitions=(A, B))]  # all are looked up again, in the light of it
    assert fresh.run.partitions.uncommitted() == {}
    assert any("the group was reset (reset #1)" in text for text in fresh.logged())
    assert fresh.committed({A: reset(20), B: reset(30)}) == [
        ev.CommitOffsets(offsets={A: 20, B: 30}, stream=STREAM, seq=2, reset_number=1, followed=frozenset({A, B}))
    ]
    fresh.commit_succeeds()
    fresh.feed(ev.Durable(offset=replayed))  # a sink with a ledger wrote nothing of it
    assert fresh.run.plannable() == {A: 20, B: 30}
    assert not any("operator moved" in text for text in fresh.logged())


@pytest.mark.proves("G5", level="core")
def test_batch_voided_by_a_hidden_reset_does_not_count_as_read(fresh: GroupHarness) -> None:
    """A batch of a former run was pending when an operator reset the group with its table: the table leaves it out.
    Ordinary consumers had every partition since, so that no note shows the reset: what they have not read of the
    batch has no reader."""
    replayed = StreamOffset(group="etl", stream=STREAM, seq=3, known={"orders": 2}, ranges={A: (100, 150), B: (40, 60)})
    fresh.replay(replayed)
    fresh.feed(ev.Durable(offset=replayed))
    fresh.assigned(A, B)
    fresh.adopt({A: ev.Committed(offset=149), B: ev.Committed(offset=40)})
    assert fresh.run.plannable() == {A: 149, B: 40}


def test_reset_that_only_the_sink_reports_voids_the_last_batch(group: GroupHarness) -> None:
    """Other consumers replaced all metadata of the reset; the batch was planned after it and not written."""
    group.settled(A)
    batch = group.offset({A: (100, 150)}, group.run.seq + 1)
    group.planned(batch)
    requested = group.feed(ev.NextBatchRequested(start=batch, new_stream="another", void_by=3))
    assert only(ev.CommitOffsets, requested) == []
    assert only(ev.FetchCommittedOffsets, requested) == [ev.FetchCommittedOffsets(partitions=(A,))]
    group.adopt({A: ev.Committed(offset=100)})
    assert group.run.plannable() == {A: 100}
    assert group.run.partitions.reset_number == 3


def test_G5_a_stream_says_that_the_offset_of_a_reset_was_lost_before_it_was_read(group: GroupHarness) -> None:
    """It continues where it was before the reset. The sink refuses that above its ledger, which the reset has set."""
    group.settled(A)
    batch = group.offset({A: (100, 150)}, group.run.seq + 1)
    group.planned(batch)
    group.feed(ev.NextBatchRequested(start=batch, new_stream="another", void_by=3))
    group.commit_succeeds(group.committed({A: None}))
    assert group.run.plannable() == {A: 100}
    assert group.run.lookups.started == {A}


@pytest.mark.parametrize(("reset_number", "followed"), [(2, True), (3, False)])
def test_own_commit_that_does_not_know_the_reset_is_a_foreign_move(
    group: GroupHarness, reset_number: int, followed: bool
) -> None:
    """It was made at a foreign commit after the reset, inside a batch that the reset has voided; or where the stream
    was before the reset, whose offset was lost. The sink refuses it if the table's ledger, which the reset has set, is
    beyond it, or behind it."""
    group.settled(A)
    batch = group.offset({A: (100, 150)}, group.run.seq + 1)
    group.planned(batch)
    group.feed(ev.NextBatchRequested(start=batch, new_stream="another", void_by=3))
    group.committed({A: ev.Committed(offset=100, stream=STREAM, seq=0, reset_number=reset_number)})
    assert group.run.plannable() == {A: 100}
    assert group.followed() == ({A} if followed else frozenset())
    assert group.run.lookups.started == ({A} if followed else set())


def test_reset_that_the_sink_reported_to_an_earlier_run_is_applied_at_the_start(fresh: GroupHarness) -> None:
    past = StreamOffset(group="etl", stream=STREAM, seq=3, known={"orders": 2}, ranges={A: (100, 150)})
    fresh.feed(
        ev.NextBatchRequested(start=past, new_stream="another", void_by=1), ev.TopicsListed(topics={"orders": 2})
    )
    fresh.assigned(A)
    fresh.adopt({A: ev.Committed(offset=100)})
    assert fresh.run.plannable() == {A: 100}


def test_later_commits_and_plans_contain_the_reset_number(group: GroupHarness) -> None:
    group.assigned(A)
    group.committed({A: reset(20, reset_number=2)})
    group.adopt({A: reset(20, reset_number=2)})
    group.plan({A: (20, 30)})
    assert only(ev.CommitOffsets, group.durable()) == [
        ev.CommitOffsets(offsets={A: 30}, stream=STREAM, seq=0, reset_number=2)
    ]


def test_own_commit_after_a_reset_shows_the_reset(fresh: GroupHarness) -> None:
    """An earlier run had detected the reset, and failed before it planned a batch."""
    fresh.durable({A: (100, 150)})
    fresh.assigned(A)
    ours = ev.Committed(offset=20, stream=STREAM, seq=6, reset_number=1, followed=True)
    assert fresh.committed({A: ours}) == [ev.FetchCommittedOffsets(partitions=(A,))]
    fresh.committed({A: ours})
    assert fresh.run.plannable() == {A: 20}
    assert fresh.followed() == {A}
    assert fresh.run.partitions.reset_number == 1


def test_first_lookup_reads_all_notes_for_a_reset(
    pair: GroupHarness,
) -> None:
    """Otherwise 500 slots that join at once would fetch the notes of all partitions 500 times."""
    first = pair.assigned(A, slot=0)
    assert first == [ev.FetchCommittedOffsets(partitions=(A,))] and set(first[0].notes_only) >= {B}  # type: ignore[union-attr]
    assert pair.assigned(B, slot=1) == []
    answered = pair.committed({A: 100})
    assert answered == [ev.FetchCommittedOffsets(partitions=(B,))]
    assert answered[0].notes_only == ()  # type: ignore[union-attr]


def test_failure_of_an_earlier_lookup_does_not_repeat_the_first_lookup_of_all_notes(group: GroupHarness) -> None:
    group.settled(A)
    late = only(ev.FetchCommittedOffsets, group.assigned(B))[0]
    group.lost(A, B)
    assert set(only(ev.FetchCommittedOffsets, group.assigned(A))[0].notes_only) >= {B, C}
    group.feed(ev.LookupFailed(partitions=late.partitions, error=BrokerUnavailable("no coordinator")))
    assert group.assigned(C) == []


def test_never_committed_partition_repeats_its_last_batch_after_a_reset(fresh: GroupHarness) -> None:
    """The reset has no offset of it, and startingOffsets=latest would leave out what came since. A table may have left
    the batch out, because it was planned before the reset."""
    fresh.durable({A: (100, 150), B: (40, 50)})
    fresh.assigned(A, B)
    fresh.committed({A: reset(20), B: None})
    assert only(ev.ResolveStarts, fresh.committed({A: reset(20), B: None})) == []
    fresh.commit_succeeds()
    assert fresh.run.plannable() == {A: 20, B: 40}


def test_never_committed_partition_repeats_its_last_batch_when_the_reset_is_found_later(fresh: GroupHarness) -> None:
    """Its position was known already, and its commit had failed, when a partition of the reset was assigned."""
    fresh.durable({A: (100, 150), B: (40, 50)})
    fresh.assigned(B)
    fresh.committed({B: None})
    fresh.feed(ev.OffsetCommitFailed(reason="coordinator moved"))
    assert fresh.run.partitions.position(B) == 50
    fresh.assigned(A)
    fresh.committed({A: reset(20)})
    fresh.committed({A: reset(20), B: None})
    fresh.commit_succeeds(fresh.tick(ms=100))
    assert fresh.run.plannable() == {A: 20, B: 40}


def test_response_without_a_requested_note_is_retried(group: GroupHarness) -> None:
    lookups = group.assigned(A)
    silent = ev.CommittedOffsetsRead(
        offsets={A: ev.Committed(offset=100, stream=STREAM)}, requested=(A,), reset_number=0, unanswered=(B,)
    )
    assert group.feed(silent) == []
    assert not group.run.partitions.all_known()
    assert group.tick(ms=RETRY_PAUSES_MS[0]) == lookups
    group.committed({A: ev.Committed(offset=100, stream=STREAM)})
    assert group.run.plannable() == {A: 100}


def test_note_that_never_arrives_does_not_block_planning(group: GroupHarness) -> None:
    group.assigned(A)
    silent = ev.CommittedOffsetsRead(
        offsets={A: ev.Committed(offset=100, stream=STREAM)}, requested=(A,), reset_number=0, unanswered=(B,)
    )
    for _ in range(UNANSWERED_MAX):
        group.feed(silent)
        group.tick(ms=RETRY_PAUSES_MS[-1])
        assert group.run.plannable() == {}
    group.feed(silent)
    assert group.run.plannable() == {A: 100}
