"""Where a partition starts: our own position, the group's committed offset, or the starting options."""

from typing import Any, Literal

import pytest
from kit.harness import STREAM, GroupHarness, only, plan_batch, tps

from spark_group_source.errors import BrokerUnavailable, DataLoss, OptionError
from spark_group_source.model import EARLIEST, LATEST, StartAt, TopicPartition
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.offsets import StreamOffset, parse
from spark_group_source.protocol.rules import StartingPosition

A, B, C, D = tps("orders", 0, 1, 2, 3)
NEW = tps("orders", 4)[0]
OTHER = tps("payments", 0)[0]
FROM_THE_END = StartingPosition(everywhere=LATEST)


def by_no_stream(offset: int) -> ev.Committed:
    """The commit of an ordinary consumer, or of an operator."""
    return ev.Committed(offset=offset)


@pytest.mark.proves("G5", level="core")
def test_assigned_partition_continues_at_its_position_without_a_lookup(group: GroupHarness) -> None:
    group.reads({A: (100, 150)})
    group.durable()
    assert only(ev.FetchCommittedOffsets, group.assigned(B)) == [ev.FetchCommittedOffsets(partitions=(B,))]
    assert group.run.plannable() == {A: 150}


def test_new_partition_starts_at_the_committed_offset(group: GroupHarness) -> None:
    group.assigned(A, B)
    group.adopt({A: by_no_stream(70), B: ev.Committed(offset=80, stream="another")})
    assert group.run.plannable() == {A: 70, B: 80}
    assert group.logged() == []  # nothing of ours was moved
    # An ordinary consumer's commit is marked in the offset, a stream's is not.
    assert group.followed() == {A}


def test_foreign_commit_is_adopted_before_the_partition_is_read(group: GroupHarness) -> None:
    """Else a crash before the first echo leaves their commit, and it would look newer than our rows."""
    group.assigned(A, B)
    assert group.committed({A: by_no_stream(70), B: 80}) == [
        ev.CommitOffsets(offsets={A: 70}, stream=STREAM, seq=-1, followed=frozenset({A}))
    ]
    assert group.run.partitions.all_known() and not group.gathered()
    assert group.run.plannable() == {B: 80}
    group.feed(ev.OffsetCommitFailed(reason="coordinator moved"))
    assert group.run.plannable() == {B: 80}
    group.commit_succeeds(group.tick(ms=100))
    assert group.gathered()
    assert group.run.plannable() == {A: 70, B: 80}


def test_own_commit_ahead_of_the_position_wins(fresh: GroupHarness) -> None:
    # An old checkpoint was put back: the group knows better.
    fresh.durable({A: (100, 150)})
    fresh.assigned(A)
    assert fresh.committed({A: 400}) == []
    assert fresh.run.plannable() == {A: 400}


@pytest.mark.parametrize("offset", [20, 300])
def test_foreign_commit_is_followed_in_both_directions_and_logged(group: GroupHarness, offset: int) -> None:
    group.settled(A)
    group.revoking(A)
    group.assigned(A)
    group.adopt({A: by_no_stream(offset)})
    assert group.run.plannable() == {A: offset}
    assert group.followed() == {A}
    assert any(f"from 100 to {offset}" in text for text in group.logged())


def test_partition_without_a_commit_starts_by_the_options_and_is_committed_before_it_is_read(
    group: GroupHarness,
) -> None:
    """Else its next owner, if this run is lost, would start where the options say then."""
    group.assigned(A, B)
    assert group.committed({A: None, B: 7}) == [ev.ResolveStarts(starts={A: EARLIEST})]
    assert not group.run.partitions.all_known()
    commands = group.resolved({A: 31})
    assert commands == [ev.CommitOffsets(offsets={A: 31}, stream=STREAM, seq=-1)]
    assert group.run.plannable() == {B: 7} and not group.gathered()
    group.commit_succeeds(commands)
    assert group.run.plannable() == {A: 31, B: 7} and group.gathered()


def test_partition_that_returns_before_its_start_is_committed_is_committed_first(group: GroupHarness) -> None:
    group.assigned(A)
    group.committed({A: None})
    group.resolved({A: 31})
    group.feed(ev.OffsetCommitFailed(reason="coordinator moved"))
    group.lost(A)
    group.assigned(A, generation=2)
    group.committed({A: None})
    assert group.run.plannable() == {}
    group.commit_succeeds(group.tick(ms=100))
    assert group.run.plannable() == {A: 31}


def test_partition_of_a_replayed_batch_that_kafka_lacks_stays_in_the_batch(fresh: GroupHarness) -> None:
    fresh.replays({A: (100, 150)})
    fresh.assigned(A)
    fresh.committed({A: None})
    fresh.durable()
    assert fresh.run.partitions.position(A) == 150, "it is not read again"


def test_partitions_added_later_start_at_their_first_record() -> None:
    group = GroupHarness(starting=FROM_THE_END)
    group.start_stream()
    group.assigned(A, NEW, OTHER)
    commands = group.committed({A: None, NEW: None, OTHER: None})
    assert commands == [ev.ResolveStarts(starts={A: LATEST, NEW: EARLIEST, OTHER: EARLIEST})]


def test_restarted_run_knows_which_partitions_were_added_later() -> None:
    fresh = GroupHarness(starting=FROM_THE_END)
    offset = group_offset(known={"orders": 2})
    fresh.resume(offset)
    fresh.assigned(A, B, C)
    assert fresh.committed({A: None, B: None, C: None}) == [
        ev.ResolveStarts(starts={A: LATEST, B: LATEST, C: EARLIEST})
    ]
    assert fresh.run.lookups.known == {"orders": 2}


def test_partitions_of_a_recreated_topic_start_at_their_first_record() -> None:
    """Also those that another member had when the former topic was deleted, whatever startingOffsets is."""
    group = GroupHarness(starting=FROM_THE_END)
    group.start_stream()
    group.settled(A)
    group.feed(ev.RecordsMissing(offsets={A: 0}, reason="topic orders was recreated", topics=("orders",)))
    group.commit_succeeds()
    group.assigned(B)
    assert group.committed({B: None}) == [ev.ResolveStarts(starts={B: EARLIEST})]


@pytest.mark.parametrize("resolved", [False, True], ids=["being resolved", "resolved"])
def test_G4_start_in_a_topic_that_turns_out_to_be_recreated_is_chosen_again(resolved: bool) -> None:
    """By startingOffsets it would leave out the first records of the new topic."""
    group = GroupHarness(starting=FROM_THE_END)
    group.start_stream()
    group.settled(A)
    group.assigned(B)
    group.committed({B: None})
    if resolved:
        group.resolved({B: 36})
    group.feed(ev.RecordsMissing(offsets={A: 0}, reason="topic orders was recreated", topics=("orders",)))
    if not resolved:
        assert group.resolved({B: 36}) == [ev.FetchCommittedOffsets(partitions=(B,))]
    assert group.run.plannable() == {A: 0}
    assert group.run.lookups.started == frozenset()
    assert group.committed({B: None}) == [ev.ResolveStarts(starts={B: EARLIEST})]


def test_G4_position_in_a_topic_that_was_recreated_is_not_committed_when_it_is_revoked(group: GroupHarness) -> None:
    """A commit has the name of the topic only: the next owner would start there in the new topic."""
    group.reads({A: (100, 150), B: (100, 150)})
    commit = group.durable()
    assert only(ev.Release, group.revoking(B)) == [], "its offset is being committed"
    released = group.feed(ev.RecordsMissing(offsets={A: 0}, reason="topic orders was recreated", topics=("orders",)))
    assert [release.slot for release in only(ev.Release, released)] == [0]
    assert only(ev.CommitOffsets, commit)[0].offsets == {A: 150, B: 150}
    assert [order.offsets for order in only(ev.CommitOffsets, group.feed(ev.OffsetCommitFailed(reason="x")))] == []


@pytest.mark.parametrize("starts", [False, True], ids=["the committed offset", "the start"])
def test_failed_lookup_is_repeated_after_a_growing_pause(group: GroupHarness, starts: bool) -> None:
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
        group.commit_succeeds(group.resolved({A: 3}))
    assert group.run.plannable() == {A: 3}
    group.assigned(B)
    group.feed(ev.LookupFailed(partitions=(B,), error=BrokerUnavailable("no broker")))
    assert group.run.next_deadline_ms() == group.clock() + 100


def test_lookup_from_before_a_reassignment_is_repeated(group: GroupHarness) -> None:
    assert only(ev.FetchCommittedOffsets, group.assigned(A)) == [ev.FetchCommittedOffsets(partitions=(A,))]
    group.revoking(A)  # it leaves, another member reads and commits, and it comes back
    assert only(ev.FetchCommittedOffsets, group.assigned(A)) == []
    assert group.committed({A: 100}) == [ev.FetchCommittedOffsets(partitions=(A,))]
    assert group.run.plannable() == {}
    group.adopt({A: by_no_stream(300)})
    assert group.run.plannable() == {A: 300}


def test_next_offset_stores_positions_that_may_not_be_committed(fresh: GroupHarness) -> None:
    fresh.durable({A: (100, 150), B: (40, 40), C: (5, 9)})
    assert fresh.run.partitions.uncommitted() == {A: 150, B: 40, C: 9}  # whether Kafka has them shows when they come
    fresh.assigned(A, B)
    commands = fresh.committed({A: 100, B: 40})
    assert fresh.run.partitions.uncommitted() == {A: 150, C: 9}
    fresh.commit_succeeds(commands)
    assert fresh.run.partitions.uncommitted() == {C: 9}


def test_recreated_topic_continues_at_its_first_record_and_is_committed_there(group: GroupHarness) -> None:
    group.settled(A, B)
    assert group.feed(ev.RecordsMissing(offsets={A: 0}, reason="topic orders was recreated")) == [
        ev.CommitOffsets(offsets={A: 0}, stream=STREAM, seq=-1)
    ]
    assert group.run.plannable() == {A: 0, B: 100}
    assert group.warned() == ["topic orders was recreated"]


def test_partition_in_flight_is_not_moved(group: GroupHarness) -> None:
    group.reads({A: (100, 150)}, B)
    group.feed(ev.RecordsMissing(offsets={A: 120, B: 120, C: 120}, reason="records are gone"))
    assert group.run.plannable() == {B: 120}
    group.durable()
    assert group.run.plannable() == {A: 150, B: 120}


def group_offset(known: dict[str, int]) -> StreamOffset:
    return StreamOffset(group="etl", stream=STREAM, seq=7, known=known, ranges={})


# --- incomplete answers ----------------------------------------------------------------------------------------------


def test_partition_missing_in_the_answer_is_looked_up_again_after_a_growing_pause(group: GroupHarness) -> None:
    """A fresh partition: the broker that answers does not know it yet."""
    group.assigned(A, B)
    found: dict[TopicPartition, ev.Committed | None] = {A: ev.Committed(offset=5, stream=STREAM)}
    assert group.feed(ev.CommittedOffsetsRead(offsets=found, requested=(A, B), reset_number=0)) == []
    known = group.run.partitions.all_known
    assert known({B}) and not known({A}), "a known partition does not stand for one whose position is unknown"
    assert group.run.plannable() == {A: 5}
    for pause_ms in (100, 200, 500, 1_000, 2_000, 5_000, 5_000):
        assert not group.run.partitions.all_known()
        assert group.tick(ms=pause_ms - 1) == []
        assert group.tick(ms=1) == [ev.FetchCommittedOffsets(partitions=(B,))]
        assert group.feed(ev.CommittedOffsetsRead(offsets={}, requested=(B,))) == []
    assert "could not read the offsets of 1 partitions (they are not in the answer)" in group.logged()[0]
    assert len(group.warned()) == 1
    group.tick(ms=5_000)
    group.committed({B: 7})
    assert group.run.plannable() == {A: 5, B: 7}


def test_start_missing_in_the_answer_is_looked_up_again(group: GroupHarness) -> None:
    group.assigned(A, B)
    group.committed({A: None, B: None})
    group.feed(ev.StartsResolved(offsets={A: 3}, requested=(A, B)))
    assert group.tick(ms=100) == [ev.FetchCommittedOffsets(partitions=(B,))]
    assert group.committed({B: None}) == [ev.ResolveStarts(starts={B: EARLIEST})]
    group.resolved({B: 4})
    for _ in range(2):
        group.commit_succeeds()
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


def test_starting_timestamp_after_the_last_record_is_an_error() -> None:
    (fail,) = only(ev.Fail, by_time("error").resolved({A: 3, B: None}))
    assert isinstance(fail.error, OptionError)
    assert "orders-1 have no record at or after the starting timestamp 1700000" in str(fail.error)


def test_starting_timestamp_after_the_last_record_is_the_end_with_strategy_latest() -> None:
    group = by_time("latest")
    assert ev.ResolveStarts(starts={B: LATEST}) in group.resolved({A: 3, B: None})
    group.resolved({B: 9})
    for _ in range(2):
        group.commit_succeeds()
    assert group.run.plannable() == {A: 3, B: 9}
    group.lost(B)
    assert only(ev.FetchCommittedOffsets, group.assigned(B)) == [ev.FetchCommittedOffsets(partitions=(B,))]


@pytest.mark.parametrize("fail", [True, False])
def test_added_partition_without_its_first_records_is_data_loss(fail: bool) -> None:
    group = GroupHarness(fail_on_data_loss=fail)
    group.start_stream()
    group.assigned(NEW)
    group.committed({NEW: None})
    commands = group.resolved({NEW: 3})
    errors = [command.error for command in only(ev.Fail, commands)]
    assert [type(error) for error in errors] == ([DataLoss] if fail else [])
    if errors:
        assert errors[0].fields == {"topic": "orders", "partition": 4, "expected": 0, "available": 3}
    else:
        group.commit_succeeds(commands)
        assert group.run.plannable() == {NEW: 3}


# --- partitions lost during a batch ----------------------------------------------------------------------------------


@pytest.mark.proves("G5", level="core")
@pytest.mark.parametrize("first", ["durable", "answer"])
@pytest.mark.parametrize("offset", [100, 120, 150])
def test_partition_lost_during_a_batch_continues_at_a_foreign_commit_inside_it(
    group: GroupHarness, first: str, offset: int
) -> None:
    """Whether the sink took the batch is not known. A table with a ledger leaves out what it has, as the commit is not
    marked as followed; what another sink has twice was counted when the partition was lost."""
    group.reads({A: (100, 150)})
    group.lost(A)
    group.assigned(A)
    if first == "durable":
        group.durable()
        group.adopt({A: by_no_stream(offset)})
    else:
        group.committed({A: by_no_stream(offset)})
        group.durable()
        group.commit_succeeds()
    assert group.run.plannable() == {A: offset}
    assert any("moved orders-0 from 150 to" in text for text in group.logged()) == (offset < 150)
    assert group.followed() == frozenset()
    assert group.run.statistics().possible_duplicates == 50
    assert group.run.all_committed


@pytest.mark.parametrize("first", ["durable", "answer"])
@pytest.mark.parametrize("offset", [20, 180])
def test_foreign_commit_outside_the_batch_is_followed(group: GroupHarness, first: str, offset: int) -> None:
    group.reads({A: (100, 150)})
    group.lost(A)
    group.assigned(A)
    if first == "durable":
        group.durable()
        group.adopt({A: by_no_stream(offset)})
    else:
        group.adopt({A: by_no_stream(offset)})
        group.durable()
    assert group.run.plannable() == {A: offset}
    assert group.followed() == {A}
    assert any(f"moved orders-0 from 100 to {offset}" in text for text in group.logged())


# --- foreign commits between the last commit of this stream and what is durable ---------------------------------------

HAS_KAFKA, HAS_SINK = 100, 150


@pytest.mark.parametrize(
    ("offset", "followed"), [(99, True), (HAS_KAFKA, False), (120, False), (HAS_SINK, True), (151, True)]
)
def test_foreign_commit_after_a_lost_session_counts_as_no_move_where_the_sink_has_the_records(
    group: GroupHarness, offset: int, followed: bool
) -> None:
    group.reads({A: (HAS_KAFKA, HAS_SINK)})
    group.durable()
    group.feed(ev.OffsetCommitFailed(reason="timed out"))
    group.lost(A)
    group.assigned(A)
    group.committed({A: by_no_stream(offset)})
    group.tick(ms=10_000)
    group.commit_succeeds()
    assert group.run.plannable() == {A: offset}
    assert group.followed() == ({A} if followed else frozenset())
    assert group.run.statistics().possible_duplicates == HAS_SINK - HAS_KAFKA, "counted when the partition was lost"


@pytest.mark.parametrize("committed", ["that batch", "another batch", "none"])
@pytest.mark.parametrize(
    ("offset", "followed", "duplicates"),
    [(99, True, 0), (HAS_KAFKA, False, 50), (120, False, 30), (HAS_SINK, True, 0), (151, True, 0)],
)
def test_foreign_commit_after_the_whole_host_died_counts_as_no_move_where_the_sink_has_the_records(
    fresh: GroupHarness, offset: int, followed: bool, duplicates: int, committed: str
) -> None:
    """Another consumer has read a part of the last batch again. Only a run that stopped normally shows that Kafka had
    the batch, so that the commit is an operator's rewind."""
    batch = fresh.offset({A: (HAS_KAFKA, HAS_SINK)}, 7)
    mark = {"that batch": batch, "another batch": fresh.offset({A: (HAS_KAFKA, 140)}, 7), "none": None}[committed]
    fresh.resume(batch, committed=mark)
    fresh.assigned(A)
    fresh.adopt({A: by_no_stream(offset)})
    assert fresh.run.plannable() == {A: offset}
    assert fresh.followed() == ({A} if followed or committed == "that batch" else frozenset())
    assert fresh.run.statistics().possible_duplicates == duplicates
    if offset != HAS_SINK:
        assert any(f"moved orders-0 from {HAS_SINK} to {offset}" in text for text in fresh.logged())


@pytest.mark.parametrize(("lost", "restart"), [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize(("offset", "followed"), [(99, True), (HAS_KAFKA, False), (120, False), (HAS_SINK, True)])
def test_foreign_commit_that_was_seen_before_the_partition_was_lost_again_counts_the_same(
    fresh: GroupHarness, offset: int, followed: bool, lost: bool, restart: bool
) -> None:
    """The first time it was not committed under this stream's name: the request failed, for example."""
    fresh.resume(fresh.offset({A: (HAS_KAFKA, HAS_SINK)}, 7))
    fresh.assigned(A, B)
    fresh.committed({A: by_no_stream(offset), B: 0})
    fresh.feed(ev.OffsetCommitFailed(reason="timed out"))
    if lost:
        fresh.lost(A)
    if restart:
        batch = plan_batch(fresh.run, {B: 10})
        assert batch is not None
        fresh = GroupHarness()
        fresh.resume(parse(batch.to_json()))
    fresh.assigned(A, generation=2)
    fresh.committed({A: by_no_stream(offset)})
    fresh.tick(ms=10_000)
    fresh.commit_succeeds()
    assert fresh.run.plannable()[A] == offset
    assert fresh.followed() & {A} == ({A} if followed else frozenset())


@pytest.mark.parametrize("adopted", [False, True])
def test_the_same_holds_inside_a_batch_that_became_durable_in_between(group: GroupHarness, adopted: bool) -> None:
    """Or Kafka has the commit under this stream's name, and only the answer was lost."""
    group.reads({A: (100, 150)})
    group.lost(A)
    group.assigned(A)
    group.committed({A: by_no_stream(120)})
    group.durable()
    group.feed(ev.OffsetCommitFailed(reason="timed out"))
    group.lost(A)
    group.assigned(A, generation=2)
    own = ev.Committed(offset=120, stream=STREAM, seq=group.run.seq)
    group.committed({A: own if adopted else by_no_stream(120)})
    group.tick(ms=10_000)
    group.commit_succeeds()
    assert group.run.plannable() == {A: 120}
    assert group.followed() == frozenset()


@pytest.mark.parametrize(("offset", "followed"), [(99, True), (HAS_KAFKA, False), (120, False), (160, False)])
@pytest.mark.parametrize("replay", [False, True])
def test_the_same_holds_for_commits_in_earlier_batches_that_kafka_did_not_have_at_the_plan(
    group: GroupHarness, offset: int, followed: bool, replay: bool
) -> None:
    group.reads({A: (HAS_KAFKA, HAS_SINK)})
    group.durable()
    group.feed(ev.OffsetCommitFailed(reason="timed out"))
    batch = plan_batch(group.run, {A: 180})
    assert batch is not None and batch.behind == {A: HAS_SINK - HAS_KAFKA}
    again = GroupHarness()
    again.replay(parse(batch.to_json())) if replay else again.resume(parse(batch.to_json()))
    again.assigned(A)
    again.committed({A: by_no_stream(offset)})
    assert again.followed() == ({A} if followed else frozenset())


def test_plan_without_a_lost_partition_has_what_kafka_lacks_of_it(group: GroupHarness) -> None:
    group.reads({A: (HAS_KAFKA, HAS_SINK)}, B)
    group.durable()
    group.feed(ev.OffsetCommitFailed(reason="timed out"))
    group.lost(A)
    batch = plan_batch(group.run, {B: 180})
    assert batch is not None and batch.uncommitted == {A: HAS_SINK}
    again = GroupHarness()
    again.resume(parse(batch.to_json()))
    again.assigned(A)
    again.committed({A: by_no_stream(120)})
    assert again.followed() == set()


def moved_back(group: GroupHarness) -> None:
    """The sink has A up to HAS_SINK. A foreign commit at 120 is the position, under this stream's name, too."""
    group.resume(group.offset({A: (HAS_KAFKA, HAS_SINK)}, 7))
    group.assigned(A, B)
    group.adopt({A: by_no_stream(120), B: ev.Committed(offset=0, stream=STREAM, seq=7)})


def next_run(group: GroupHarness, ends: dict[TopicPartition, int]) -> GroupHarness:
    """The driver is killed after it has planned a batch, which becomes durable."""
    batch = plan_batch(group.run, ends)
    assert batch is not None
    again = GroupHarness()
    again.resume(parse(batch.to_json()))
    return again


@pytest.mark.parametrize(("offset", "followed"), [(119, True), (120, False), (140, False), (HAS_SINK, True)])
@pytest.mark.parametrize("restarts", [0, 1, 2])
def test_a_further_foreign_commit_there_counts_as_no_move_either(
    fresh: GroupHarness, offset: int, followed: bool, restarts: int
) -> None:
    """The partition was lost to another consumer before a batch read it again."""
    moved_back(fresh)
    fresh.lost(A)
    for end in range(10, 10 + restarts):
        fresh = next_run(fresh, {B: end})
        fresh.assigned(B)
        fresh.committed({B: end})
    fresh.assigned(A, generation=2)
    fresh.adopt({A: by_no_stream(offset)})
    assert fresh.run.plannable()[A] == offset
    assert fresh.followed() == ({A} if followed else frozenset())
    assert not fresh.run.statistics().possible_duplicates or not restarts


@pytest.mark.parametrize(("offset", "followed"), [(119, True), (140, False), (HAS_SINK, True)])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_batch_that_reads_a_part_of_it_again_changes_nothing_above(
    fresh: GroupHarness, offset: int, followed: bool, restarts: bool
) -> None:
    moved_back(fresh)
    if restarts:
        fresh = next_run(fresh, {A: 130})
        fresh.assigned(A)
        fresh.committed({A: ev.Committed(offset=120, stream=STREAM, seq=7)})
    else:
        fresh.plan({A: (120, 130)})
        fresh.durable()
    fresh.commit_succeeds()
    fresh.lost(A)
    fresh.assigned(A, generation=2)
    fresh.adopt({A: by_no_stream(offset)})
    assert fresh.followed() == ({A} if followed else frozenset())


def test_a_batch_that_reads_all_of_it_ends_it(fresh: GroupHarness) -> None:
    moved_back(fresh)
    fresh.plan({A: (120, 155)})
    fresh.durable()
    fresh.commit_succeeds()
    batch = plan_batch(fresh.run, {A: 160})
    assert batch is not None and not batch.durable_to
    again = next_run(fresh, {A: 160})
    again.assigned(A)
    again.adopt({A: by_no_stream(140)})
    assert again.followed() == {A}, "an operator's move back"


def test_an_earlier_runs_adoption_shows_where_kafka_is_inside_the_last_batch(fresh: GroupHarness) -> None:
    """That run was killed before it planned a batch."""
    fresh.resume(fresh.offset({A: (HAS_KAFKA, HAS_SINK)}, 7))
    fresh.assigned(A)
    fresh.committed({A: ev.Committed(offset=120, stream=STREAM, seq=7)})
    assert fresh.run.plannable() == {A: 120}
    fresh.lost(A)
    fresh.assigned(A, generation=2)
    fresh.adopt({A: by_no_stream(140)})
    assert fresh.followed() == frozenset()


def test_a_batch_after_a_followed_commit_is_this_streams_like_others(group: GroupHarness) -> None:
    """It became durable while the partition was away."""
    group.assigned(A)
    group.adopt({A: by_no_stream(100)})
    group.plan({A: (100, 150)})
    group.lost(A)
    group.durable()
    for generation, offset in enumerate((120, 140), start=2):
        group.assigned(A, generation=generation)
        group.adopt({A: by_no_stream(offset)})
        assert group.followed() == frozenset(), offset
        group.lost(A)


@pytest.mark.parametrize(
    ("missing", "durable_to"),
    [
        (ev.RecordsMissing(offsets={A: 130}, reason="test"), {A: HAS_SINK}),
        (ev.RecordsMissing(offsets={A: HAS_SINK}, reason="test"), {}),
        (ev.RecordsMissing(offsets={A: 110}, reason="test", truncated={A: 4}), {}),
        (ev.RecordsMissing(offsets={A: 0}, reason="test", topics=("orders",)), {}),
    ],
    ids=["expired", "all expired", "truncated", "recreated"],
)
def test_missing_records_end_it_where_the_log_is_another_one(
    fresh: GroupHarness, missing: ev.RecordsMissing, durable_to: dict[TopicPartition, int]
) -> None:
    moved_back(fresh)
    fresh.feed(missing)
    assert fresh.run.partitions.durable_to() == durable_to


def test_commit_of_another_stream_after_a_truncation_ends_it(fresh: GroupHarness) -> None:
    moved_back(fresh)
    fresh.lost(A)
    fresh.assigned(A, generation=2)
    fresh.adopt({A: ev.Committed(offset=130, stream="another", truncated_after=4)})
    assert fresh.run.partitions.durable_to() == {}


@pytest.mark.parametrize("note", [{"followed": True}, {"truncated_after": 4}], ids=["followed", "truncated"])
def test_own_commit_there_that_followed_a_move_back_is_one(fresh: GroupHarness, note: dict[str, Any]) -> None:
    fresh.resume(fresh.offset({A: (HAS_KAFKA, HAS_SINK)}, 7))
    fresh.assigned(A)
    fresh.committed({A: ev.Committed(offset=120, stream=STREAM, seq=7, **note)})
    assert fresh.run.partitions.durable_to() == {}


def test_foreign_commit_below_a_truncation_is_a_move_back(group: GroupHarness) -> None:
    """Else the table would leave out the records that replaced the truncated ones."""
    group.reads({A: (HAS_KAFKA, HAS_SINK)})
    group.durable()
    group.feed(ev.OffsetCommitFailed(reason="timed out"))
    truncate(group, 110)
    group.lost(A)
    group.assigned(A, generation=2)
    group.committed({A: by_no_stream(105)})
    assert group.followed() == {A}


def test_what_another_consumer_read_is_not_durable(group: GroupHarness) -> None:
    """A late answer reports an earlier commit of this stream."""
    group.settled(A, at=HAS_KAFKA)
    group.lost(A)
    group.assigned(A, generation=2)
    group.committed({A: by_no_stream(HAS_SINK)})
    group.feed(ev.OffsetsCommitted(offsets={A: HAS_KAFKA}))
    group.lost(A)
    group.assigned(A, generation=3)
    group.committed({A: by_no_stream(120)})
    assert group.followed() == {A}


# --- truncated logs --------------------------------------------------------------------------------------------------


def truncate(group: GroupHarness, at: int) -> None:
    group.feed(ev.RecordsMissing(offsets={A: at}, reason="the log was truncated", truncated={A: 3}))


def test_G4_a_commit_that_was_on_its_way_before_a_truncation_was_found_is_repeated_with_it(group: GroupHarness) -> None:
    """It ends where the log does now, as one of a partition that was read up to there. Without the note, another query
    would continue there, and the table would leave out what is new, because it has more of the former log."""
    group.reads({A: (100, 160)})
    group.durable()
    ordered = only(ev.CommitOffsets, group.history)
    truncate(group, 160)
    again = only(ev.CommitOffsets, group.feed(ev.OffsetsCommitted(offsets={A: 160}, left_out={})))
    assert ordered[-1].truncated_after == {} and ordered[-1].offsets == {A: 160}
    assert [(commit.offsets, commit.truncated_after) for commit in again] == [({A: 160}, {A: 3})]
    assert group.run.partitions.due
    group.commit_succeeds()
    assert not group.run.partitions.due and group.truncated() == {A: 3}


def test_truncated_partition_keeps_the_former_leader_epoch_until_a_later_offset_is_committed(
    group: GroupHarness,
) -> None:
    group.settled(A)
    truncate(group, 60)
    assert group.run.plannable() == {A: 60} and group.truncated() == {A: 3}
    assert only(ev.CommitOffsets, group.history)[-1].truncated_after == {A: 3}
    group.commit_succeeds()
    assert group.truncated() == {A: 3}, "no batch from there is durable"
    group.plan({A: (60, 80)})
    group.commit_succeeds(group.durable())
    assert group.run.plannable() == {A: 80} and group.truncated() == {}


def test_earlier_own_commit_does_not_move_a_truncated_partition_forward(group: GroupHarness) -> None:
    """The commit of where it went back to was on its way, or was not made, when its member was lost."""
    group.settled(A)
    truncate(group, 60)
    group.plan({A: (60, 80)})
    group.durable()
    group.lost(A)
    group.assigned(A)
    group.committed({A: ev.Committed(offset=100, stream=STREAM, seq=-1)})
    assert group.run.plannable() == {A: 80}


def test_truncation_is_restored_from_the_checkpoint(fresh: GroupHarness) -> None:
    past = StreamOffset(group="etl", stream=STREAM, seq=7, ranges={A: (60, 80)}, truncated_after={A: 3})
    fresh.resume(past)
    fresh.join()
    fresh.assigned(A)
    fresh.committed({A: ev.Committed(offset=100, stream=STREAM, seq=6)})
    assert fresh.run.plannable() == {A: 80}


@pytest.mark.parametrize("cut", [3, None])
def test_own_commit_below_the_position_shows_a_truncation_by_its_note(fresh: GroupHarness, cut: int | None) -> None:
    """The run ended after that commit, before it planned from there. Or it went on where another stream had committed:
    then the table has those rows."""
    past = StreamOffset(group="etl", stream=STREAM, seq=7, ranges={A: (90, 100)})
    fresh.resume(past)
    fresh.join()
    fresh.assigned(A)
    fresh.committed({A: ev.Committed(offset=60, stream=STREAM, seq=7, truncated_after=cut)})
    assert fresh.run.plannable() == {A: 60}
    assert fresh.truncated() == ({} if cut is None else {A: cut})


def test_another_streams_commit_shows_a_truncation_by_its_note(group: GroupHarness) -> None:
    """That stream may have written no batch from there."""
    group.assigned(A)
    group.adopt({A: ev.Committed(offset=60, stream="another", truncated_after=3)})
    assert (group.run.plannable(), group.truncated()) == ({A: 60}, {A: 3})
    assert group.followed() == set()


def test_truncation_is_known_after_the_first_records_behind_it_expired(group: GroupHarness) -> None:
    group.settled(A)
    truncate(group, 60)
    group.feed(ev.RecordsMissing(offsets={A: 70}, reason="retention"))
    assert (group.run.plannable(), group.truncated()) == ({A: 70}, {A: 3})


def test_a_second_truncation_does_not_hide_a_later_one(group: GroupHarness) -> None:
    """Another stream went back after epoch 7; this one, which knows epoch 3 only, goes back further. A table that has
    rows of epoch 7 must take the new ones."""
    group.assigned(A)
    group.adopt({A: ev.Committed(offset=60, stream="another", truncated_after=7)})
    truncate(group, 50)
    assert (group.run.plannable(), group.truncated()) == ({A: 50}, {A: 7})


def test_commit_of_a_partition_that_was_lost_meanwhile_is_not_repeated_by_later_runs(group: GroupHarness) -> None:
    """A deleted topic: it is lost before its commit is reported. Its offset must not stay in every later plan."""
    group.reads({A: (100, 150)})
    commands = group.durable()
    group.lost(A)
    assert group.run.partitions.uncommitted() == {A: 150}
    group.commit_succeeds(commands)
    assert group.run.partitions.uncommitted() == {}


def test_topic_that_does_not_exist_any_more_has_nothing_to_commit(group: GroupHarness) -> None:
    group.reads({A: (100, 150)})
    group.lost(A)
    group.durable()
    assert group.run.partitions.uncommitted() == {A: 150}
    group.run.partitions.forget(["payments"])
    assert group.run.partitions.uncommitted() == {A: 150}
    group.run.partitions.forget(["orders"])
    assert group.run.partitions.uncommitted() == {}
