"""The next offset: what a batch reads, and everything else that the checkpoint has to remember."""

from collections.abc import Mapping

from kit.harness import GROUP, STREAM, GroupHarness, rules_with, tps

from spark_group_source.group import events as ev
from spark_group_source.group.offsets import StreamOffset, parse
from spark_group_source.group.plan import Planner
from spark_group_source.model import TopicPartition

A, B, C, D = tps("orders", 0, 1, 2, 3)
OTHER = tps("payments", 0)[0]
IDS = {"orders": "id-orders", "payments": "id-payments", "strange": "id-strange"}

Ends = Mapping[TopicPartition, int]


def cut(
    group: GroupHarness,
    ends: Ends,
    planner: Planner | None = None,
    *,
    first: bool = False,
    unlimited: bool = False,
    now_ms: int = 0,
) -> StreamOffset | None:
    planner = planner or Planner(rules_with())
    return planner.cut(group.machine, ends, IDS, lambda _: {}, first=first, unlimited=unlimited, now_ms=now_ms)


def planned(group: GroupHarness, ends: Ends, planner: Planner | None = None) -> StreamOffset:
    """Cut the next batch, which there must be; it is in flight now."""
    offset = cut(group, ends, planner)
    assert offset is not None
    group.planned(offset)
    return offset


# --- what it reads ---------------------------------------------------------------------------------------------------


def test_a_batch_reads_from_the_position_to_the_end_of_every_partition_that_may_be_planned(group: GroupHarness) -> None:
    group.settled(A, B)
    group.assigned(C)  # where it stands is not known yet
    offset = planned(group, {A: 150, B: 100, C: 50, D: 70})
    assert offset.ranges == {A: (100, 150), B: (100, 100)}
    assert (offset.group, offset.stream, offset.seq) == (GROUP, STREAM, 0)


def test_nothing_to_read_is_no_batch_unless_it_is_the_first(group: GroupHarness) -> None:
    group.settled(A)
    assert cut(group, {A: 100}) is None
    first = cut(group, {A: 100}, first=True)
    assert first is not None and first.ranges == {A: (100, 100)}


def test_a_partition_whose_end_was_not_told_reads_nothing_and_is_written_down(group: GroupHarness) -> None:
    group.settled(A, B)
    assert planned(group, {A: 150}).ranges == {A: (100, 150), B: (100, 100)}


def test_a_partition_whose_log_ends_before_its_position_reads_nothing(group: GroupHarness) -> None:
    group.settled(A, B)
    assert planned(group, {A: 150, B: 30}).ranges == {A: (100, 150), B: (100, 100)}


def test_a_target_ends_every_partition_and_leaves_out_those_that_came_later(group: GroupHarness) -> None:
    group.settled(A, B, C)
    planner = Planner(rules_with(min_offsets=1_000_000))  # a bounded run waits for nothing
    planner.take_target({A: 120, B: 90})
    assert planner.bounded
    assert planned(group, {A: 150, B: 150, C: 150}, planner).ranges == {A: (100, 120), B: (100, 100), C: (100, 100)}
    group.durable()
    assert cut(group, {A: 150, B: 150, C: 150}, planner) is None


def test_a_limit_is_shared_fairly_and_the_batch_number_says_whose_turn_it_is(group: GroupHarness) -> None:
    group.settled(A, B, C)
    planner = Planner(rules_with(max_offsets=4))
    ends = dict.fromkeys((A, B, C), 200)
    offset = planned(group, ends, planner)
    assert offset.ranges == {A: (100, 102), B: (100, 101), C: (100, 101)}
    group.durable()
    planner = Planner(rules_with(max_offsets=4))  # another run goes on with the turn
    following = planned(group, ends, planner)
    assert following.ranges == {A: (102, 103), B: (101, 103), C: (101, 102)}


def test_trigger_once_has_no_limits(group: GroupHarness) -> None:
    group.settled(A)
    planner = Planner(rules_with(max_offsets=4, min_offsets=1_000))
    offset = cut(group, {A: 200}, planner, unlimited=True)
    assert offset is not None and offset.ranges == {A: (100, 200)}


def test_too_few_records_wait_until_the_delay_since_the_last_batch_is_over(group: GroupHarness) -> None:
    group.settled(A)
    planner = Planner(rules_with(min_offsets=10, max_delay_ms=1_000))
    assert cut(group, {A: 101}, planner, now_ms=5_000) is not None  # the first of a run waits for nothing
    assert cut(group, {A: 109}, planner, now_ms=5_999) is None
    assert cut(group, {A: 110}, planner, now_ms=5_999) is not None
    assert cut(group, {A: 101}, planner, now_ms=6_998) is None
    assert cut(group, {A: 101}, planner, now_ms=6_999) is not None


# --- what else it carries --------------------------------------------------------------------------------------------


def test_it_carries_the_positions_that_kafka_may_not_have_and_that_it_does_not_read(fresh: GroupHarness) -> None:
    fresh.durable({A: (100, 150), B: (40, 40), C: (5, 9)})
    fresh.assigned(A)
    fresh.committed({A: 150})
    # B and C have not come yet: whether Kafka has their offsets nobody knows.
    assert planned(fresh, {A: 160}).owed == {B: 40, C: 9}
    fresh.durable()
    fresh.assigned(B)
    fresh.committed({B: 40})
    assert planned(fresh, {A: 170}).owed == {C: 9}


def test_it_carries_the_end_of_a_batch_that_was_durable_after_its_partition_was_lost(group: GroupHarness) -> None:
    group.settled(A, B)
    planned(group, {A: 150, B: 110})
    group.lost(A)
    group.durable()
    group.echoed()
    assert planned(group, {B: 120}).owed == {A: 150}


def test_it_carries_a_partition_that_is_leaving_and_not_committed(group: GroupHarness) -> None:
    group.settled(A, B)
    planned(group, {A: 150})
    group.durable()
    group.revoking(A)
    assert planned(group, {A: 160, B: 110}).owed == {A: 150}


def test_what_it_owes_survives_its_json(fresh: GroupHarness) -> None:
    fresh.durable({A: (100, 150), B: (40, 40), OTHER: (5, 9)})
    fresh.assigned(A)
    fresh.committed({A: 150})
    offset = planned(fresh, {A: 160})
    assert offset.owed == parse(offset.to_json()).owed == {B: 40, OTHER: 9}


def test_what_is_at_kafka_is_not_owed(group: GroupHarness) -> None:
    group.settled(A, B)
    group.revoking(B)  # goes at once: Kafka has its position
    assert planned(group, {A: 150}).owed == {}


def test_it_marks_what_it_reads_and_no_stream_committed(group: GroupHarness) -> None:
    group.assigned(A, B, C)
    group.taken({A: ev.Committed(offset=70), B: ev.Committed(offset=80, stream="another"), C: ev.Committed(offset=90)})
    assert planned(group, {A: 75}).followed == {A, C}
    group.durable()
    assert planned(group, {A: 76}).followed == {C}  # until a batch has moved it on


def test_it_says_which_reset_it_knows(group: GroupHarness) -> None:
    group.assigned(A)
    assert "epoch" not in StreamOffset.initial(GROUP).to_json_dict()
    group.committed({A: ev.Committed(offset=70, epoch=3)})
    group.taken({A: ev.Committed(offset=70, epoch=3)})
    offset = planned(group, {A: 75})
    assert offset.epoch == 3 and parse(offset.to_json()).epoch == 3


def test_it_keeps_what_was_known_when_the_stream_began_and_the_ids_of_what_it_reads() -> None:
    group = GroupHarness()
    group.born({"orders": 3})
    group.settled(A, OTHER)
    offset = planned(group, {A: 150})
    assert offset.known == {"orders": 3}
    assert offset.topic_ids == {"orders": "id-orders", "payments": "id-payments"}


def test_a_plan_follows_the_one_before_it(group: GroupHarness) -> None:
    group.settled(A, B)
    ends = {A: 150, B: 120}
    before = planned(group, ends)
    for _ in range(3):
        group.durable()
        ends = {tp: end + 10 for tp, end in ends.items()}
        following = planned(group, ends)
        assert following.seq == before.seq + 1
        assert {tp: start for tp, (start, _) in following.ranges.items()} == before.positions()
        before = following
