"""What a run finds after a crash, an operator's rewind or a reset: the checkpoint as text, and Kafka as it was left."""

from dataclasses import replace
from typing import Any

import pytest
from kit.harness import GROUP, STREAM, GroupHarness, only, tps
from kit.run_harness import ANSWER_MS, RunHarness

from spark_group_source.errors import DataLoss
from spark_group_source.model import LATEST, TopicPartition
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.data_loss import GRACE_MS
from spark_group_source.protocol.offsets import BatchKey, StreamOffset, parse
from spark_group_source.protocol.rules import StartingPosition
from spark_group_source.protocol.states import RunState

A, B = tps("orders", 0, 1)
PAST = StreamOffset(
    group=GROUP,
    stream=STREAM,
    seq=7,
    topic_ids={"orders": "id-orders"},
    known={"orders": 2},
    ranges={A: (100, 150), B: (40, 40)},
)


def after_a_crash(
    before: RunHarness, offset: StreamOffset, *, durable: bool, given: tuple[TopicPartition, ...] = (A, B), **rules: Any
) -> RunHarness:
    """The next run finds the checkpoint, as text, and Kafka as it was left; ``offset`` is the newest of the offset log.

    ``durable``: the commit log has it, too; else Spark runs the batch again first. ``given``: what it has now.
    """
    run = RunHarness(**rules)
    run.committed, run.ends, run.assignments = before.committed, before.ends, {0: given}
    run.start = parse(offset.to_json())
    if not durable:
        run.call(ev.BatchStarted(offset=run.start))
    return run


@pytest.mark.parametrize("durable", [True, False])
def test_uncommitted_positions_are_planned_and_survive_two_crashes(durable: bool) -> None:
    """Else it is read again by any sink."""
    starting = StartingPosition(everywhere=LATEST)
    first = RunHarness(starting=starting)
    first.batch()
    first.silent = {ev.CommitOffsets}  # no further commit reaches Kafka
    first.ends = {A: 10, B: 20}
    first.batch()
    first.ends = {A: 10, B: 30}
    first.batch()
    first.latest()  # batch 1 is durable

    second = after_a_crash(first, first.start, durable=True, given=(A,), starting=starting)  # another member has B
    second.ends = {A: 15, B: 50}
    planned = second.batch()
    assert planned.ranges == {A: (10, 15)}
    assert planned.uncommitted == {B: 30}

    third = after_a_crash(second, planned, durable=durable, starting=starting)
    assert third.batch().ranges == {A: (15, 15), B: (30, 50)}


def stopped_with_a_partition_that_the_last_batch_did_not_have(returns_at: int) -> tuple[RunHarness, StreamOffset]:
    """B was lost before the offset 20 of its last batch was committed, and came back when the next one was planned."""
    run = RunHarness()
    run.ends = {A: 10, B: 20}
    run.batch()
    run.lost(B)
    run.ends[A] = 15
    last = run.batch()
    assert (last.ranges, last.uncommitted, last.behind[B]) == ({A: (10, 15)}, {B: 20}, 20)
    run.committed[B] = replace(run.committed[B], offset=returns_at, stream=STREAM if returns_at == 0 else None)
    run.assigned(B)
    run.pass_time(100)
    run.stop(durable=last.seq)
    assert {tp: at.offset for tp, at in run.committed.items()} == {A: 15, B: returns_at or 20}
    return run, last


@pytest.mark.parametrize("is_marked", [True, False])
def test_move_back_of_a_partition_that_the_last_batch_did_not_have(is_marked: bool) -> None:
    """The mark of a normal stop shows that Kafka had the end; without it another consumer may have started before."""
    first, last = stopped_with_a_partition_that_the_last_batch_did_not_have(returns_at=0)
    assert first.run.committed_offset == last
    second = after_a_crash(first, last, durable=True)
    second.committed[B] = ev.Committed(offset=12)
    mark = BatchKey.of(last) if is_marked else None
    planned = second.call(ev.NextBatchRequested(start=second.start, new_stream="", committed=mark))
    assert planned.ranges[B] == (12, 20)
    assert (planned.followed, planned.durable_to) == ((frozenset({B}), {}) if is_marked else (frozenset(), {B: 20}))


def test_stop_after_another_position_than_the_checkpoints_leaves_no_mark() -> None:
    run, _ = stopped_with_a_partition_that_the_last_batch_did_not_have(returns_at=17)
    assert run.run.committed_offset is None


def test_adopted_rewind_survives_a_crash_before_the_next_plan() -> None:
    run = RunHarness.resumed(PAST)
    run.committed[A] = ev.Committed(offset=20)  # kafka-consumer-groups --reset-offsets
    run.latest(drain=True)  # joins, but plans nothing
    assert run.committed[A] == ev.Committed(offset=20, stream=STREAM, seq=7, followed=True)
    again = after_a_crash(run, run.start, durable=True)
    planned = again.batch()
    assert planned.ranges == {A: (20, 150), B: (40, 40)}
    assert planned.followed == {A}


def test_adopted_rewind_survives_a_crash_after_the_next_plan() -> None:
    run = RunHarness.resumed(PAST)
    run.committed[A] = ev.Committed(offset=20)
    planned = run.latest()
    again = after_a_crash(run, planned, durable=False)
    again.start = planned
    assert again.latest() is planned  # the batch moved it on: nothing is left to read
    assert again.latest().ranges == planned.ranges
    again.pass_time(ANSWER_MS)
    assert again.committed[A] == ev.Committed(offset=150, stream=STREAM, seq=8)


@pytest.mark.proves("G5", level="core")
@pytest.mark.parametrize("durable", [True, False])
def test_adopted_rewind_before_a_replayed_batch_survives_a_crash_while_the_partition_is_away(durable: bool) -> None:
    """The batch began behind the rewind, so what lies in between was not read."""
    past = RunHarness.resumed(PAST)
    past.committed[A] = ev.Committed(offset=20, stream=STREAM, seq=6, followed=True)  # adopted while batch 7 ran
    second = after_a_crash(past, PAST, durable=False, given=(B,))  # another member has A
    second.ends = {A: 150, B: 60}
    planned = second.batch()
    assert (planned.ranges, planned.uncommitted) == ({B: (40, 60)}, {A: 150})
    third = after_a_crash(second, planned, durable=durable)
    assert third.batch().ranges[A] == (20, 150)


def test_plan_without_a_partition_that_was_moved_back_has_what_the_next_run_needs() -> None:
    """How far its records are in the table, and under which leader epoch they were read."""
    run = RunHarness.resumed(replace(PAST, leader_epochs={A: 3, B: 3}))
    run.leader_epochs = {A: 3, B: 3}
    run.committed[A], run.ends = ev.Committed(offset=120), {A: 120, B: 60}
    planned = run.batch()
    assert planned.ranges == {A: (120, 120), B: (40, 60)}
    assert (planned.durable_to, planned.read_to, planned.uncommitted) == ({A: 150}, {A: 150}, {})
    run.feed(ev.Lost(slot=0, client=run.clients[0], partitions=(A,)))
    run.ends[B] = 70
    planned = run.batch()
    assert planned.ranges == {B: (60, 70)}
    assert (planned.durable_to, planned.read_to, planned.uncommitted) == ({A: 150}, {A: 150}, {A: 120})
    assert planned.leader_epochs == {A: 3, B: 3}


def test_reset_with_a_pending_batch_works_with_the_same_checkpoint() -> None:
    past = RunHarness.resumed(PAST)
    past.committed = {tp: ev.Committed(offset=at, reset_number=1) for tp, at in {A: 20, B: 30}.items()}
    run = after_a_crash(past, PAST, durable=False)
    run.pass_time(1_000)  # while Spark reads the batch: its sink writes nothing of it
    planned = run.batch()
    assert (planned.reset_number, planned.ranges) == (1, {A: (20, 150), B: (30, 40)})
    run.latest()
    run.pass_time(ANSWER_MS)
    assert run.committed[A] == ev.Committed(offset=150, stream=STREAM, seq=8, reset_number=1)


def test_batch_after_lost_records_is_not_read_again_after_a_restart() -> None:
    """Kafka has the end of the batch before: where the next one began is known to the checkpoint alone."""
    run = RunHarness.resumed(PAST, fail_on_data_loss=False)
    run.silent = {ev.CommitOffsets}
    run.firsts, run.ends = {A: 170, B: 0}, {A: 180, B: 40}
    planned = run.batch()
    assert planned.ranges == {A: (170, 180), B: (40, 40)}

    again = after_a_crash(run, planned, durable=False, fail_on_data_loss=False)
    again.ends = {A: 190, B: 40}
    assert again.batch().ranges[A] == (180, 190)


@pytest.mark.parametrize("durable", [True, False])
def test_followed_commit_before_lost_records_is_no_rewind(durable: bool) -> None:
    """The followed offset is committed under the previous batch's number, before the batch's first record."""
    run = RunHarness.resumed(PAST, fail_on_data_loss=False)
    run.committed[A] = ev.Committed(offset=20)
    run.latest(drain=True)
    followed = ev.Committed(offset=20, stream=STREAM, seq=7, followed=True)
    assert run.committed[A] == followed

    planning = after_a_crash(run, run.start, durable=True, fail_on_data_loss=False)
    planning.silent = {ev.CommitOffsets}
    planning.firsts, planning.ends = {A: 30, B: 0}, {A: 80, B: 40}
    planned = planning.batch()
    assert planned.ranges[A] == (30, 80)
    assert planned.lost_from == {A: 20}
    assert planned.followed == {A}

    again = after_a_crash(planning, planned, durable=durable, fail_on_data_loss=False)
    assert again.committed[A] == followed
    again.firsts, again.ends = {A: 30, B: 0}, {A: 90, B: 40}
    assert again.batch().ranges[A] == (80, 90)


@pytest.mark.parametrize("durable", [True, False])
def test_rewind_during_a_batch_after_lost_records_is_followed(durable: bool) -> None:
    run = RunHarness.resumed(PAST, fail_on_data_loss=False)
    run.silent = {ev.CommitOffsets}
    run.firsts, run.ends = {A: 170, B: 0}, {A: 180, B: 40}
    planned = run.batch()
    assert planned.lost_from == {A: 150}
    again = after_a_crash(run, planned, durable=durable, fail_on_data_loss=False)
    again.committed[A] = ev.Committed(offset=20, stream=STREAM, seq=7, followed=True)
    again.firsts, again.ends = {A: 0, B: 0}, {A: 190, B: 40}
    assert again.batch().ranges[A] == (20, 190)


@pytest.mark.parametrize("returns", ["in the batch", "behind it"])
def test_batch_after_lost_records_is_not_read_again_after_a_lost_membership(returns: str) -> None:
    """It is committed where the lost records start, and the batch starts after them."""
    run = RunHarness.resumed(PAST, fail_on_data_loss=False)
    run.firsts, run.ends = {A: 170, B: 0}, {A: 180, B: 40}
    planned = run.batch()
    assert (planned.ranges[A], planned.lost_from) == ((170, 180), {A: 150})
    run.lost(A, B)
    run.committed[A] = ev.Committed(offset=150, stream=STREAM, seq=7)
    if returns == "behind it":
        run.latest()  # the batch is durable, and there is nothing to plan
    run.assigned(A, B)
    run.pass_time(ANSWER_MS)
    run.ends = {A: 190, B: 40}
    assert run.batch().ranges[A] == (180, 190)


def test_reset_applies_to_the_recreated_topic() -> None:
    """Recreated while the query was stopped. Kafka deletes a topic's committed offsets with the topic."""
    past = RunHarness.resumed(PAST)
    past.committed = {tp: ev.Committed(offset=at, reset_number=1) for tp, at in {A: 20, B: 30}.items()}
    run = after_a_crash(past, PAST, durable=True)
    run.ids = {"orders": "id-new"}
    run.ends = {A: 25, B: 30}
    planned = run.batch()
    assert planned.ranges == {A: (20, 25), B: (30, 30)}
    assert planned.topic_ids == {"orders": "id-new"}


def test_G4_G5_reset_without_an_offset_does_not_apply_to_the_recreated_topic() -> None:
    """Only the sink knows of the reset. The topic was recreated, with the offsets that the reset had set, so where the
    stream continues is a position of the old topic: the new one is read from its first record."""
    run = after_a_crash(RunHarness.resumed(PAST), PAST, durable=True, fail_on_data_loss=False)
    run.committed, run.ids, run.ends = {}, {"orders": "id-new"}, {A: 25, B: 30}
    run.feed(ev.NextBatchRequested(start=PAST, new_stream=STREAM, void_by=3))
    assert run.continue_call() is PAST
    run.pass_time(GRACE_MS)
    assert run.latest() is run.start, "the check that finds it may have ends of the deleted topic"
    planned = run.batch()
    assert planned.ranges == {A: (0, 25), B: (0, 30)}
    assert (planned.topic_ids, planned.started) == ({"orders": "id-new"}, frozenset())


def test_G4_reset_does_not_apply_to_a_recreated_topic_whose_partition_is_revoked_meanwhile() -> None:
    """Kafka has no offset of it, which a reset could have set. The next run starts it by ``startingOffsets``, and must
    know the id by which it finds that the topic was recreated."""
    (other,) = tps("payments", 0)
    group = GroupHarness()
    past = replace(PAST, ranges={**PAST.ranges, other: (0, 14)}, topic_ids={"orders": "id", "payments": "id-old"})
    group.resume(past, ("orders", "payments"))
    group.assigned(A, other)
    group.lost(other)
    read = {A: ev.Committed(offset=12, reset_number=1), other: None}
    group.feed(ev.CommittedOffsetsRead(offsets=read, requested=tuple(read), reset_number=1))
    assert group.run.data_loss.topic_ids == {"payments": "id-old"}


@pytest.mark.parametrize("durable", [True, False])
def test_new_records_of_a_recreated_topic_are_read_after_a_crash_before_the_commit(durable: bool) -> None:
    """Kafka still has the offset that the group committed in the old topic, and the new topic has a record there."""
    run = RunHarness.resumed(PAST, fail_on_data_loss=False)
    run.latest()
    assert run.committed[A].offset == 150
    run.silent = {ev.CommitOffsets}
    run.ids, run.ends = {"orders": "id-new"}, {A: 8, B: 40}
    assert run.batch() is run.start
    run.pass_time(GRACE_MS)
    assert run.batch() is run.start, "the check that finds it may have ends of the deleted topic"
    planned = run.batch()
    assert planned.ranges[A] == (0, 8)
    again = after_a_crash(run, planned, durable=durable, fail_on_data_loss=False)
    again.ids, again.ends = {"orders": "id-new"}, {A: 160, B: 40}
    assert again.committed[A].offset == 150
    assert again.batch().ranges[A] == (8, 160)


@pytest.mark.parametrize("returns", ["later", "during the check", "and is being committed"])
def test_G4_partition_that_is_lost_during_the_check_that_finds_a_recreated_topic_starts_at_its_first_record(
    returns: str,
) -> None:
    """Kafka deleted its committed offset with the topic; the run remembers a position in the old topic."""
    run = RunHarness.resumed(PAST, fail_on_data_loss=False)
    run.latest()
    run.committed, run.ids, run.ends = {}, {"orders": "id-new"}, {A: 300, B: 300}
    assert run.latest() is run.start
    run.pass_time(GRACE_MS)
    run.begin(ev.NextBatchRequested(start=PAST, new_stream=STREAM), RunState.FETCHING_ENDS)
    while not (isinstance(step := run.step(), ev.ReadLogEnds) and step.firsts):
        run.feed(run.answer(step))
    run.lost(A)
    if returns != "later":
        run.assigned(A)
    if returns == "and is being committed":
        run.silent = {ev.CommitOffsets}
        run.pass_time(2 * ANSWER_MS)
        run.silent = set()
    run.call(run.answer(step))
    plans = [run.batch()]
    if returns == "later":
        run.assigned(A)
    if returns == "and is being committed":
        run.feed(ev.OffsetCommitFailed(reason="REBALANCE_IN_PROGRESS"))
    run.pass_time(1_000)
    plans.append(run.batch())
    assert next(plan.ranges[A] for plan in plans if A in plan.ranges) == (0, 300)


@pytest.mark.parametrize("reset_number", [0, 2])
def test_G4_commit_for_an_old_topic_of_that_name_is_no_position_of_the_new_one(reset_number: int) -> None:
    """A stream was restarted after the topic had been recreated, and committed where it was. Its checkpoint was
    deleted."""
    run = RunHarness(fail_on_data_loss=False)
    at = ev.Committed(offset=20, stream="another", seq=7, reset_number=reset_number, topic_id="id-old")
    run.committed, run.ends = {A: at, B: at}, {A: 25, B: 30}
    assert run.batch() is not None
    run.pass_time(GRACE_MS)
    run.batch()
    run.batch()
    assert (run.start.ranges, run.start.topic_ids) == ({A: (0, 25), B: (0, 30)}, {"orders": "id-orders"})


@pytest.mark.parametrize("durable", [True, False])
def test_G4_checkpoint_has_the_id_of_a_topic_that_was_added_later_and_whose_position_is_not_committed(
    durable: bool,
) -> None:
    """Its only partition was lost during the batch that read it. Else the next run takes the id of a topic that was
    recreated meanwhile for the known one, and continues at the old topic's position."""
    run = RunHarness(slots=2, topics={"orders": 1}, fail_on_data_loss=False)
    (late,) = tps("late", 0)
    run.assignments = {0: (A,), 1: ()}
    run.ids["late"], run.ends, run.firsts[late] = "id-late", {A: 5, late: 0}, 0
    run.batch()
    run.topics["late"] = 1
    run.assigned(late, slot=1)
    run.pass_time(1_000)
    run.ends |= {A: 10, late: 100}
    run.batch()
    run.lost(late, slot=1)
    run.ends[A] = 12
    planned = run.batch()
    assert planned.uncommitted == {late: 100}

    again = after_a_crash(run, planned, durable=durable, given=(A, late), topics=run.topics, fail_on_data_loss=False)
    again.committed.pop(late, None)  # Kafka deletes the offsets of a deleted topic
    again.ids, again.ends = {"orders": "id-orders", "late": "id-new"}, {A: 12, late: 300}
    while again.batch() is planned or late not in again.start.ranges:
        again.pass_time(GRACE_MS)
    assert again.start.ranges[late] == (0, 300)


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("further", [False, True])
def test_G4_late_commit_for_the_old_topic_is_no_position_of_the_recreated_one(further: bool, restarted: bool) -> None:
    """Kafka had the offset of a batch of the old topic after it had been recreated, and the partition came to a run
    that knew of that already, or whose checkpoint has the new topic's id. If the topic was recreated once more, this
    run may not know it yet, and the first answer may be an older one."""
    past = replace(PAST, topic_ids={"orders": "id-new"}) if restarted else PAST
    run = RunHarness.resumed(past, fail_on_data_loss=False)
    run.assignments = {0: (A,)}
    if restarted:
        run.ids = {"orders": "id-new"}
    run.latest()
    run.ids, run.ends = {"orders": "id-new"}, {A: 25, B: 300}
    run.latest()
    run.pass_time(GRACE_MS)
    run.latest()
    run.committed[B] = ev.Committed(offset=150, stream="x", seq=8, topic_id="id-newest" if further else "id-orders")
    run.ids["orders"] = "id-new" if further else "id-orders"
    run.assigned(B)
    run.pass_time(GRACE_MS // 2)
    assert run.run.plannable().get(B) == (None if further or restarted else 0), "this run found the first recreation"
    run.ids["orders"] = "id-newest" if further else "id-new"
    run.pass_time(GRACE_MS * 2)
    assert run.run.plannable()[B] == (150 if further else PAST.positions()[B] if restarted else 0)
    warnings = [text for text in run.warned() if "1 committed offsets, such as that of orders-1, are of a" in text]
    assert len(warnings) == (not further)


@pytest.mark.parametrize("end", [ev.DrainRequested(), ev.StopRequested()])
def test_G2_G4_a_position_of_the_old_topic_is_not_committed_under_the_id_of_the_new_one(end: ev.Event) -> None:
    """The query is drained or stopped while it asks where the recreated topic starts, and a former commit is repeated.
    The next stream would continue there in the new topic."""
    run = RunHarness.resumed(PAST, fail_on_data_loss=False)
    run.ends = {A: 160, B: 40}
    run.start = run.batch()
    run.silent = {ev.CommitOffsets}
    run.ids, run.ends = {"orders": "id-new"}, {A: 300, B: 300}
    assert run.latest() is run.start
    run.pass_time(GRACE_MS)
    run.begin(ev.NextBatchRequested(start=run.start, new_stream=STREAM), RunState.FETCHING_ENDS)
    while not (isinstance(step := run.step(), ev.ReadLogEnds) and step.firsts):
        run.feed(run.answer(step))
    run.feed(end, run.answer(step))
    run.step()
    run.feed(ev.OffsetCommitFailed(reason="timed out"))
    run.pass_time(10_000)
    commits = only(ev.CommitOffsets, run.history)[-2:]
    assert [(order.offsets[A], order.topic_ids) for order in commits] == [(160, {"orders": "id-orders"})] * 2


@pytest.mark.parametrize("slots", [1, 2])
def test_G5_topic_that_was_recreated_after_a_reset_is_found_in_any_answer(slots: int) -> None:
    """Kafka has no offset of it, which the reset could have set. With two members its partition is in a later answer
    than the reset."""
    (other,) = tps("payments", 0)
    ids = {"orders": "id-orders", "payments": "id-payments"}
    past = replace(PAST, topic_ids=ids, known={"orders": 1, "payments": 1}, ranges={A: (10, 20), other: (100, 150)})
    run = after_a_crash(RunHarness(), past, durable=True, slots=slots, topics=past.known)
    run.assignments = {0: (A,), 1: (other,)} if slots == 2 else {0: (A, other)}
    run.committed = {A: ev.Committed(offset=12, reset_number=1)}
    run.ids, run.ends = {"orders": "id-orders", "payments": "id-new"}, {A: 25, other: 400}
    run.batch()
    run.pass_time(GRACE_MS)
    with pytest.raises(DataLoss, match="topic payments was deleted and recreated"):
        run.latest()


def test_G5_reset_applies_to_a_recreated_topic_of_which_another_member_has_an_unanswered_start() -> None:
    """The checkpoint has a start by ``startingOffsets`` that was not committed. The reset has an offset for it, in the
    second answer."""
    past = replace(PAST, ranges={B: (10, 15)}, uncommitted={A: 500}, started=frozenset({A}))
    run = after_a_crash(RunHarness(), past, durable=True, slots=2)
    run.assignments, run.ids, run.ends = {0: (B,)}, {"orders": "id-new"}, {A: 7, B: 7}
    run.committed = {tp: ev.Committed(offset=0, reset_number=1) for tp in (A, B)}
    run.later(ev.Assigned(slot=1, client=1, partitions=(A,)), ms=1_000)
    while run.batch() == past:
        run.pass_time(1_000)
    assert run.start.ranges == {A: (0, 7), B: (0, 7)}


def test_a_reset_that_becomes_known_during_the_check_of_a_recreated_topic_ends_it() -> None:
    run = RunHarness.resumed(PAST, fail_on_data_loss=False)
    run.latest()
    run.ids, run.ends = {"orders": "id-new"}, {A: 5, B: 5}
    run.latest()
    run.pass_time(GRACE_MS)
    run.begin(ev.NextBatchRequested(start=PAST, new_stream=STREAM), RunState.FETCHING_ENDS)
    while not (isinstance(step := run.step(), ev.ReadLogEnds) and step.firsts):
        run.feed(run.answer(step))
    run.lost(A, B)
    run.committed = {tp: ev.Committed(offset=0, reset_number=1) for tp in (A, B)}
    run.assigned(A, B)
    run.pass_time(5 * ANSWER_MS)
    run.call(run.answer(step))
    run.pass_time(1_000)
    assert run.batch().ranges == {A: (0, 5), B: (0, 5)}


def test_G5_start_that_was_not_committed_is_reported_to_the_sink_after_a_crash() -> None:
    """The partition was lost before the commit, and the next batch reads others. A sink refuses a start by
    ``startingOffsets`` above its ledger; it would skip the records up to any other position."""
    starting = StartingPosition(everywhere=LATEST)
    run = RunHarness(starting=starting)
    run.assignments = {0: (B,)}
    run.ends, run.committed = {A: 500, B: 10}, {B: ev.Committed(offset=10, stream="another")}
    run.batch()
    run.pass_time(100)
    run.silent = {ev.CommitOffsets}
    run.assigned(A)
    run.pass_time(500)
    run.lost(A)
    run.feed(ev.OffsetCommitFailed(reason="NOT_COORDINATOR"))
    run.ends[B] = 15
    planned = run.batch()
    assert (planned.uncommitted, planned.started) == ({A: 500}, frozenset({A}))

    again = after_a_crash(run, planned, durable=True, starting=starting)
    again.ends = {A: 520, B: 16}
    read = again.batch()
    assert (read.ranges[A], read.started) == ((500, 520), frozenset({A}))
    assert only(ev.CommitOffsets, again.history)[0].started == {A}


@pytest.mark.parametrize("end", [500, 520])
@pytest.mark.parametrize("durable", [True, False])
def test_G5_start_of_which_kafka_has_no_offset_any_more_is_reported_until_a_batch_has_read_a_record(
    durable: bool, end: int
) -> None:
    """An operator deleted the group's offsets, or they expired."""
    starting = StartingPosition(everywhere=LATEST)
    run = RunHarness(topics={"orders": 1}, starting=starting)
    run.ends = {A: 500}
    planned = run.batch()
    if end > 500:
        planned = replace(planned, ranges={A: (500, end)})
    run.committed, run.ends = {}, {A: 530}
    again = after_a_crash(run, planned, durable=durable, given=(A,), topics={"orders": 1}, starting=starting)
    assert again.batch().ranges == {A: (end, 530)}
    assert again.start.started == (frozenset({A}) if end == 500 else frozenset())


def test_start_whose_first_records_expired_before_they_were_read_is_not_reported() -> None:
    """The table has the start in its ledger, and the records up to the present one are gone: they cannot be read."""
    starting = StartingPosition(everywhere=LATEST)
    run = RunHarness(topics={"orders": 1}, starting=starting)
    run.ends = {A: 500}
    planned = run.batch()
    run.latest()
    assert (planned.started, run.committed[A].started) == (frozenset({A}), True)
    again = after_a_crash(
        run, planned, durable=True, given=(A,), topics={"orders": 1}, starting=starting, fail_on_data_loss=False
    )
    again.firsts, again.ends = {A: 510}, {A: 530}
    read = again.batch()
    assert (read.ranges, read.started) == ({A: (510, 530)}, frozenset())


def test_commit_names_the_topic_that_was_read() -> None:
    run = after_a_crash(RunHarness.resumed(PAST), PAST, durable=True, fail_on_data_loss=False)
    run.committed, run.ids = {}, {"orders": "id-new"}
    run.latest()
    assert [dict(order.topic_ids) for order in only(ev.CommitOffsets, run.history)] == [{"orders": "id-orders"}]


# --- as many members as there were ----------------------------------------------------------------------------------


def coming_back(left: set[int], *, durable: bool = True, **rules: Any) -> RunHarness:
    """A run with one slot per agent, of a stream with these static members in the group."""
    run = RunHarness.resumed(PAST, slots=1, auto_slots=True, **rules)
    run.former_slots, run.assignments = left, {slot: ((A, B)[slot],) if slot < 2 else () for slot in left or {0}}
    if not durable:
        run.call(ev.BatchStarted(offset=PAST))
    return run


def members(run: RunHarness) -> list[int]:
    return [join.slot for join in only(ev.Join, run.history)]


@pytest.mark.parametrize("durable", [True, False])
def test_run_with_auto_slots_starts_as_many_as_the_group_still_has(durable: bool) -> None:
    run = coming_back({0, 1, 2}, durable=durable)
    run.ends = {A: 160, B: 50}
    assert run.batch().ranges == {A: (150, 160), B: (40, 50)}
    assert members(run) == [0, 1, 2]
    assert not only(ev.Leave, run.history)
    assert run.logged()[:1] == ["the group still has 3 members of this stream; starting as many"]


def test_missing_member_between_others_gets_a_slot() -> None:
    run = coming_back({0, 2})
    run.assignments[1] = ()
    run.batch()
    assert members(run) == [0, 1, 2]


def test_slots_without_agents_leave_after_a_while() -> None:
    run = coming_back({0, 1}, shrink_ms=60_000)
    run.batch()
    run.feed(ev.AgentConnected(agent="h1", executor="1"))
    for _ in range(120):
        run.pass_time(1_000)
        run.feed(ev.AgentHeartbeat(agent="h1"))
        run.batch()
    assert [leave.slot for leave in only(ev.Leave, run.history) if leave.leave] == [1]


@pytest.mark.parametrize("left", [set(), {0}])
def test_run_with_auto_slots_starts_one_without_former_members(left: set[int]) -> None:
    run = coming_back(left)
    run.assignments = {0: (A, B)}
    run.batch()
    assert members(run) == [0]


def test_members_of_other_streams_and_a_late_description_change_nothing() -> None:
    run = coming_back({0, 1})
    run.down_until_ms = run.clock() + 10_000
    answer = run.answer

    def with_others(step: ev.Step) -> ev.Event:
        response = answer(step)
        if isinstance(response, ev.GroupDescribed):
            others = {"spark-group-other-7": frozenset({A}), "app-9": frozenset[TopicPartition]()}
            return ev.GroupDescribed(state=response.state, assigned={**response.assigned, **others})
        return response

    run.answer = with_others  # type: ignore[method-assign]
    run.batch()
    assert members(run) == [0, 1]


def test_fixed_number_of_members_needs_no_description() -> None:
    run = RunHarness.resumed(PAST, slots=1)
    run.former_slots = {0, 1, 2}
    run.batch()
    assert members(run) == [0]
    assert not run.steps_of(ev.DescribeGroup)


@pytest.mark.parametrize("lives", [True, False])
def test_reset_to_the_end_of_a_restored_cluster_voids_the_leader_epochs(lives: bool) -> None:
    """Its leaders have earlier epochs: they are no former leaders, and nothing is lost behind the reset."""
    run = RunHarness.resumed(replace(PAST, leader_epochs={A: 7, B: 7}))
    run.leader_epochs = {A: 7, B: 7}
    if lives:
        run.latest()
    run.restore({A: 90, B: 30}, epoch=2, reset_number=1)
    if lives:  # its sessions have ended
        run.lost(A, B)
        run.pass_time(5_000)
        run.assigned(A, B)
        run.pass_time(1_000)
    run.ends = {A: 95, B: 30}
    began_ms = run.clock()
    planned = run.latest()
    assert planned.batch() == [(A, 90, 95)] and run.clock() < began_ms + GRACE_MS
    assert planned.leader_epochs == {A: 2, B: 2} and planned.reset_number == 1
