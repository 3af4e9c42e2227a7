"""Where a partition starts: our own position, the group's committed offset, or the starting options."""

from typing import Literal

import pytest
from kit.harness import STREAM, GroupHarness, only, tps

from spark_group_source.errors import BrokerUnavailable, DataLoss, OptionError
from spark_group_source.model import EARLIEST, LATEST, StartAt, TopicPartition
from spark_group_source.options.starting import StartingPosition
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.offsets import StreamOffset

A, B, C, D = tps("orders", 0, 1, 2, 3)
NEW = tps("orders", 4)[0]
OTHER = tps("payments", 0)[0]
FROM_THE_END = StartingPosition(everywhere=LATEST)


def by_no_stream(offset: int) -> ev.Committed:
    """The commit of an ordinary consumer, or of an operator."""
    return ev.Committed(offset=offset)


@pytest.mark.proves("G5", level="core")
def test_what_is_held_goes_on_at_its_own_position_and_is_not_asked_for_again(group: GroupHarness) -> None:
    group.reads({A: (100, 150)})
    group.durable()
    assert only(ev.FetchCommittedOffsets, group.assigned(B)) == [ev.FetchCommittedOffsets(partitions=(B,))]
    assert group.run.plannable() == {A: 150}


def test_a_partition_that_was_never_ours_starts_where_the_group_committed(group: GroupHarness) -> None:
    group.assigned(A, B)
    group.claim({A: by_no_stream(70), B: ev.Committed(offset=80, stream="another")})
    assert group.run.plannable() == {A: 70, B: 80}
    assert group.logged() == []  # nothing of ours was moved
    # An ordinary consumer's commit is marked in the offset, a stream's is not.
    assert group.followed() == {A}


def test_what_somebody_else_committed_is_committed_under_our_name_before_it_is_read(group: GroupHarness) -> None:
    """Else a crash before the first echo leaves their commit, and it would look newer than our rows."""
    group.assigned(A, B)
    assert group.committed({A: by_no_stream(70), B: 80}) == [
        ev.CommitOffsets(offsets={A: 70}, stream=STREAM, seq=-1, followed=frozenset({A}))
    ]
    assert group.run.partitions.all_known and not group.gathered()
    assert group.run.plannable() == {B: 80}
    group.feed(ev.OffsetCommitFailed(reason="coordinator moved"))
    assert group.run.plannable() == {B: 80}
    group.commit_succeeds(group.tick(ms=100))
    assert group.gathered()
    assert group.run.plannable() == {A: 70, B: 80}


def test_our_own_commit_that_is_further_wins_over_our_position(fresh: GroupHarness) -> None:
    # An old checkpoint was put back: the group knows better.
    fresh.durable({A: (100, 150)})
    fresh.assigned(A)
    assert fresh.committed({A: 400}) == []
    assert fresh.run.plannable() == {A: 400}


@pytest.mark.parametrize("offset", [20, 300])
def test_somebody_elses_commit_is_followed_in_both_directions_and_said(group: GroupHarness, offset: int) -> None:
    group.settled(A)
    group.revoking(A)
    group.assigned(A)
    group.claim({A: by_no_stream(offset)})
    assert group.run.plannable() == {A: offset}
    assert group.followed() == {A}
    assert any(f"from 100 to {offset}" in text for text in group.logged())


def test_what_was_never_committed_starts_as_the_options_say_and_is_committed_at_once(group: GroupHarness) -> None:
    group.assigned(A, B)
    assert group.committed({A: None, B: 7}) == [ev.ResolveStarts(starts={A: EARLIEST})]
    assert not group.run.partitions.all_known
    assert group.resolved({A: 31}) == [ev.CommitOffsets(offsets={A: 31}, stream=STREAM, seq=-1)]
    assert group.run.plannable() == {A: 31, B: 7}


def test_partitions_added_after_the_stream_began_start_at_their_beginning() -> None:
    group = GroupHarness(starting=FROM_THE_END)
    group.start_stream()
    group.assigned(A, NEW, OTHER)
    commands = group.committed({A: None, NEW: None, OTHER: None})
    assert commands == [ev.ResolveStarts(starts={A: LATEST, NEW: EARLIEST, OTHER: EARLIEST})]


def test_a_restart_still_knows_which_partitions_are_new() -> None:
    fresh = GroupHarness(starting=FROM_THE_END)
    offset = group_offset(known={"orders": 2})
    fresh.resume(offset)
    fresh.assigned(A, B, C)
    assert fresh.committed({A: None, B: None, C: None}) == [
        ev.ResolveStarts(starts={A: LATEST, B: LATEST, C: EARLIEST})
    ]
    assert fresh.run.lookups.known == {"orders": 2}


def test_partitions_of_a_topic_that_was_made_again_start_at_their_beginning() -> None:
    """Also those that another member had when the former topic was deleted, whatever startingOffsets says."""
    group = GroupHarness(starting=FROM_THE_END)
    group.start_stream()
    group.settled(A)
    group.feed(ev.RecordsMissing(offsets={A: 0}, reason="topic orders was made again", topics=("orders",)))
    group.commit_succeeds()
    group.assigned(B)
    assert group.committed({B: None}) == [ev.ResolveStarts(starts={B: EARLIEST})]


@pytest.mark.parametrize("starts", [False, True], ids=["the committed offset", "the start"])
def test_a_lookup_that_fails_is_asked_again_after_a_growing_pause(group: GroupHarness, starts: bool) -> None:
    group.assigned(A)
    for pause_ms in (100, 200, 500, 1_000, 2_000, 5_000, 5_000):
        if starts:
            assert group.committed({A: None}) == [ev.ResolveStarts(starts={A: EARLIEST})]
        assert group.feed(ev.LookupFailed(partitions=(A,), error=BrokerUnavailable("no broker"))) == []
        assert group.run.next_deadline_ms() == group.clock() + pause_ms
        assert group.tick(ms=pause_ms - 1) == []
        assert group.tick(ms=1) == [ev.FetchCommittedOffsets(partitions=(A,))]
    group.committed({A: None if starts else 3})
    if starts:
        group.resolved({A: 3})
    assert group.run.plannable() == {A: 3}
    group.assigned(B)
    group.feed(ev.LookupFailed(partitions=(B,), error=BrokerUnavailable("no broker")))
    assert group.run.next_deadline_ms() == group.clock() + 100


def test_an_answer_older_than_a_partitions_return_is_asked_for_again(group: GroupHarness) -> None:
    assert only(ev.FetchCommittedOffsets, group.assigned(A)) == [ev.FetchCommittedOffsets(partitions=(A,))]
    group.revoking(A)  # it leaves, another member reads and commits, and it comes back
    assert only(ev.FetchCommittedOffsets, group.assigned(A)) == []
    assert group.committed({A: 100}) == [ev.FetchCommittedOffsets(partitions=(A,))]
    assert group.run.plannable() == {}
    group.claim({A: by_no_stream(300)})
    assert group.run.plannable() == {A: 300}


def test_the_next_offset_carries_what_its_ranges_do_not_and_kafka_may_not_know(fresh: GroupHarness) -> None:
    fresh.durable({A: (100, 150), B: (40, 40), C: (5, 9)})
    assert fresh.run.partitions.uncommitted() == {A: 150, B: 40, C: 9}  # whether Kafka has them shows when they come
    fresh.assigned(A, B)
    commands = fresh.committed({A: 100, B: 40})
    assert fresh.run.partitions.uncommitted() == {A: 150, C: 9}
    fresh.commit_succeeds(commands)
    assert fresh.run.partitions.uncommitted() == {C: 9}


def test_a_topic_made_again_goes_on_at_its_new_beginning_and_is_committed_there(group: GroupHarness) -> None:
    group.settled(A, B)
    assert group.feed(ev.RecordsMissing(offsets={A: 0}, reason="topic orders was made again")) == [
        ev.CommitOffsets(offsets={A: 0}, stream=STREAM, seq=-1)
    ]
    assert group.run.plannable() == {A: 0, B: 100}
    assert group.warned() == ["topic orders was made again"]


def test_a_move_back_while_the_old_position_is_being_committed_is_committed_next(group: GroupHarness) -> None:
    group.reads({A: (100, 150)})
    group.durable()
    assert group.feed(ev.RecordsMissing(offsets={A: 0}, reason="topic orders was made again")) == []
    assert group.commit_succeeds() == [ev.CommitOffsets(offsets={A: 0}, stream=STREAM, seq=0)]


def test_what_a_batch_is_reading_is_not_moved(group: GroupHarness) -> None:
    group.reads({A: (100, 150)}, B)
    group.feed(ev.RecordsMissing(offsets={A: 120, B: 120, C: 120}, reason="records are gone"))
    assert group.run.plannable() == {B: 120}
    group.durable()
    assert group.run.plannable() == {A: 150, B: 120}


def group_offset(known: dict[str, int]) -> StreamOffset:
    return StreamOffset(group="etl", stream=STREAM, seq=7, known=known, ranges={})


# --- answers that leave something out --------------------------------------------------------------------------------


def test_an_answer_that_leaves_a_partition_out_is_asked_again_after_a_growing_pause(group: GroupHarness) -> None:
    """A fresh partition: the broker that answers has not heard of it yet."""
    group.assigned(A, B)
    found: dict[TopicPartition, ev.Committed | None] = {A: ev.Committed(offset=5, stream=STREAM)}
    assert group.feed(ev.CommittedOffsetsRead(offsets=found, requested=(A, B))) == []
    assert group.run.plannable() == {A: 5}
    for pause_ms in (100, 200, 500, 1_000, 2_000, 5_000, 5_000):
        assert not group.run.partitions.all_known
        assert group.run.next_deadline_ms() == group.clock() + pause_ms
        assert group.tick(ms=pause_ms) == [ev.FetchCommittedOffsets(partitions=(B,))]
        assert group.feed(ev.CommittedOffsetsRead(offsets={}, requested=(B,))) == []
    assert "offsets of 1 partitions could not be read: the answer did not name them" in group.warned()[0]
    group.tick(ms=5_000)
    group.committed({B: 7})
    assert group.run.plannable() == {A: 5, B: 7}


def test_a_start_that_the_answer_leaves_out_is_asked_again_too(group: GroupHarness) -> None:
    group.assigned(A, B)
    group.committed({A: None, B: None})
    group.feed(ev.StartsResolved(offsets={A: 3}, requested=(A, B)))
    assert group.tick(ms=100) == [ev.FetchCommittedOffsets(partitions=(B,))]
    assert group.committed({B: None}) == [ev.ResolveStarts(starts={B: EARLIEST})]
    group.resolved({B: 4})
    assert group.run.plannable() == {A: 3, B: 4}


# --- starting options ------------------------------------------------------------------------------------------------


def by_time(no_match: Literal["error", "latest"]) -> GroupHarness:
    group = GroupHarness(starting=StartingPosition(everywhere=StartAt("time", 1_700_000), no_match=no_match))
    group.start_stream()
    group.assigned(A, B)
    assert group.committed({A: None, B: None}) == [
        ev.ResolveStarts(starts=dict.fromkeys((A, B), StartAt("time", 1_700_000)))
    ]
    return group


def test_a_time_that_no_record_is_as_young_as_is_refused() -> None:
    (fail,) = only(ev.Fail, by_time("error").resolved({A: 3, B: None}))
    assert isinstance(fail.error, OptionError)
    assert "no record of orders-1 is as young as the starting timestamp 1700000" in str(fail.error)


def test_a_time_that_no_record_is_as_young_as_means_the_end_if_the_options_say_so() -> None:
    group = by_time("latest")
    assert ev.ResolveStarts(starts={B: LATEST}) in group.resolved({A: 3, B: None})
    group.resolved({B: 9})
    assert group.run.plannable() == {A: 3, B: 9}


@pytest.mark.parametrize("fail", [True, False])
def test_a_new_partition_whose_first_records_went_before_anyone_read_them_is_lost_data(fail: bool) -> None:
    group = GroupHarness(fail_on_data_loss=fail)
    group.start_stream()
    group.assigned(NEW)
    group.committed({NEW: None})
    errors = [command.error for command in only(ev.Fail, group.resolved({NEW: 3}))]
    assert [type(error) for error in errors] == ([DataLoss] if fail else [])
    if errors:
        assert errors[0].fields == {"topic": "orders", "partition": 4, "expected": 0, "available": 3}
    else:
        assert group.run.plannable() == {NEW: 3}


# --- lost during a batch, and back before it is known ----------------------------------------------------------------


@pytest.mark.proves("G5", level="core")
@pytest.mark.parametrize("first", ["durable", "answer"])
@pytest.mark.parametrize("offset", [100, 120, 150])
def test_a_partition_goes_on_where_others_committed_inside_the_batch_during_which_it_was_lost(
    group: GroupHarness, first: str, offset: int
) -> None:
    """Whether the sink took the batch is not known. A table with a ledger leaves out what it has, as the commit is not
    marked as followed; what another sink has twice was counted when the partition was lost."""
    group.reads({A: (100, 150)})
    group.lost(A)
    group.assigned(A)
    if first == "durable":
        group.durable()
        group.claim({A: by_no_stream(offset)})
    else:
        group.committed({A: by_no_stream(offset)})
        group.durable()
        group.commit_succeeds()
    assert group.run.plannable() == {A: offset}
    assert any("was moved from 150 to" in text for text in group.logged()) == (offset < 150)
    assert group.followed() == frozenset()
    assert group.run.statistics().possible_duplicates == 50
    assert group.run.all_committed


@pytest.mark.parametrize("first", ["durable", "answer"])
@pytest.mark.parametrize("offset", [20, 180])
def test_a_commit_outside_of_the_batch_is_followed_whenever_it_shows(
    group: GroupHarness, first: str, offset: int
) -> None:
    group.reads({A: (100, 150)})
    group.lost(A)
    group.assigned(A)
    if first == "durable":
        group.durable()
        group.claim({A: by_no_stream(offset)})
    else:
        group.claim({A: by_no_stream(offset)})
        group.durable()
    assert group.run.plannable() == {A: offset}
    assert group.followed() == {A}
    assert any(f"was moved from 100 to {offset}" in text for text in group.logged())


# --- logs that were cut ----------------------------------------------------------------------------------------------


def cut_below(group: GroupHarness, at: int) -> None:
    group.feed(ev.RecordsMissing(offsets={A: at}, reason="the log was cut", truncated=frozenset({A})))


def test_a_partition_that_goes_back_says_where_it_stood_until_kafka_has_more(group: GroupHarness) -> None:
    group.settled(A)
    cut_below(group, 60)
    assert group.run.plannable() == {A: 60} and group.truncated() == {A: 100}
    group.commit_succeeds()
    assert group.truncated() == {A: 100}, "no batch from there is durable"
    group.plan({A: (60, 80)})
    group.commit_succeeds(group.durable())
    assert group.run.plannable() == {A: 80} and group.truncated() == {}


def test_a_former_commit_of_ours_does_not_lead_a_cut_partition_forward_again(group: GroupHarness) -> None:
    """The commit of where it went back to was on its way, or was not made, when its member was lost."""
    group.settled(A)
    cut_below(group, 60)
    group.plan({A: (60, 80)})
    group.durable()
    group.lost(A)
    group.assigned(A)
    group.committed({A: ev.Committed(offset=100, stream=STREAM, seq=-1)})
    assert group.run.plannable() == {A: 80}


def test_after_a_restart_the_checkpoint_says_what_was_cut(fresh: GroupHarness) -> None:
    past = StreamOffset(group="etl", stream=STREAM, seq=7, ranges={A: (60, 80)}, truncated_from={A: 100})
    fresh.resume(past)
    fresh.join()
    fresh.assigned(A)
    fresh.committed({A: ev.Committed(offset=100, stream=STREAM, seq=6)})
    assert fresh.run.plannable() == {A: 80}


@pytest.mark.parametrize("cut", [100, None])
def test_our_own_commit_below_our_position_says_whether_the_log_was_cut(fresh: GroupHarness, cut: int | None) -> None:
    """The run ended after that commit, before it planned from there. Or it went on where another stream had committed:
    then the table has those rows."""
    past = StreamOffset(group="etl", stream=STREAM, seq=7, ranges={A: (90, 100)})
    fresh.resume(past)
    fresh.join()
    fresh.assigned(A)
    fresh.committed({A: ev.Committed(offset=60, stream=STREAM, seq=7, truncated_from=cut)})
    assert fresh.run.plannable() == {A: 60}
    assert fresh.truncated() == ({} if cut is None else {A: cut})


def test_a_commit_where_the_log_was_cut_says_where_we_stood(group: GroupHarness) -> None:
    group.settled(A)
    commands = group.feed(ev.RecordsMissing(offsets={A: 60}, reason="the log was cut", truncated=frozenset({A})))
    assert only(ev.CommitOffsets, commands)[-1].truncated_from == {A: 100}
