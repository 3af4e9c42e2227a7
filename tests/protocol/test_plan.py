"""The plan of a batch: its ranges, what else the checkpoint must contain, and its packing into tasks."""

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.harness import GROUP, STREAM, GroupHarness, plan_batch, rules_with, tps
from kit.run_harness import RunHarness

from spark_group_source.errors import InvariantBroken, OptionError
from spark_group_source.model import OffsetRange, TaskCounts, TopicPartition
from spark_group_source.protocol.events import TaskReported
from spark_group_source.protocol.offsets import StreamOffset
from spark_group_source.protocol.planner import (
    ASSUMED_RECORD_BYTES,
    TASK_RANGES_MAX,
    TASK_RANGES_TARGET,
    TASK_RECORDS_TARGET,
    TASKS_MAX,
    Planner,
    fair_share,
    offsets_within,
    pack,
)

A, B, C, D = tps("orders", 0, 1, 2, 3)
OTHER = tps("payments", 0)[0]
IDS = {"orders": "id-orders", "payments": "id-payments", "strange": "id-strange"}

Ends = Mapping[TopicPartition, int]


def plan(
    group: GroupHarness,
    ends: Ends,
    planner: Planner | None = None,
    *,
    first: bool = False,
    unlimited: bool = False,
    now_ms: int = 0,
) -> StreamOffset | None:
    return plan_batch(group.run, ends, planner, topic_ids=IDS, first=first, unlimited=unlimited, now_ms=now_ms)


def planned(group: GroupHarness, ends: Ends, planner: Planner | None = None) -> StreamOffset:
    """Plan the next batch, which must not be empty; it is in flight now."""
    offset = plan(group, ends, planner)
    assert offset is not None
    group.planned(offset)
    return offset


# --- what it reads ---------------------------------------------------------------------------------------------------


def test_batch_reads_every_plannable_partition_from_its_position_to_its_end(group: GroupHarness) -> None:
    group.settled(A, B)
    group.assigned(C)  # its position is not known yet
    offset = planned(group, {A: 150, B: 100, C: 50, D: 70})
    assert offset.ranges == {A: (100, 150), B: (100, 100)}
    assert (offset.group, offset.stream, offset.seq) == (GROUP, STREAM, 0)


@pytest.mark.parametrize("ends", [{A: 150}, {A: 150, B: 30}], ids=["unknown", "before the position"])
def test_partition_without_records_to_read_is_in_the_plan(group: GroupHarness, ends: Ends) -> None:
    group.settled(A, B)
    assert planned(group, ends).ranges == {A: (100, 150), B: (100, 100)}


def test_empty_batch_is_planned_only_as_the_first(group: GroupHarness) -> None:
    group.settled(A)
    assert plan(group, {A: 100}) is None
    first = plan(group, {A: 100}, first=True)
    assert first is not None and first.ranges == {A: (100, 100)}


def test_target_limits_every_partition_and_excludes_later_ones(group: GroupHarness) -> None:
    group.settled(A, B, C)
    planner = Planner(rules_with(min_offsets=1_000_000, max_offsets=15))
    planner.target = {A: 120, B: 90}
    ends = {A: 150, B: 150, C: 150}
    assert planned(group, ends, planner).ranges == {A: (100, 115), B: (100, 100), C: (100, 100)}
    group.durable()
    assert planned(group, ends, planner).ranges[A] == (115, 120), "a bounded run does not wait"
    group.durable()
    assert plan(group, ends, planner) is None


def test_limit_is_shared_fairly_and_rotates_with_the_batch_number(group: GroupHarness) -> None:
    group.settled(A, B, C)
    planner = Planner(rules_with(max_offsets=4))
    ends = dict.fromkeys((A, B, C), 200)
    offset = planned(group, ends, planner)
    assert offset.ranges == {A: (100, 102), B: (100, 101), C: (100, 101)}
    group.durable()
    planner = Planner(rules_with(max_offsets=4))  # another run continues the rotation
    following = planned(group, ends, planner)
    assert following.ranges == {A: (102, 103), B: (101, 103), C: (101, 102)}


def report(seq: int, rows: dict[TopicPartition, int], **size: int) -> TaskReported:
    return TaskReported(seq=seq, counts=TaskCounts(rows_from_brokers=rows, bytes=size))


def read_sizes(group: GroupHarness, ends: Ends, planner: Planner) -> dict[TopicPartition, int]:
    offset = planned(group, ends, planner)
    group.durable()
    return {tp: end - start for tp, (start, end) in offset.ranges.items()}


def test_byte_limit_counts_1_mib_for_each_record_until_tasks_report_sizes(group: GroupHarness) -> None:
    group.settled(A, B)
    planner = Planner(rules_with(max_bytes=6 * ASSUMED_RECORD_BYTES))
    ends = dict.fromkeys((A, B), 10**9)
    assert read_sizes(group, ends, planner) == {A: 3, B: 3}
    planner.record_sizes.add(report(0, {A: 2, B: 1}, orders=3 * 1024))
    assert read_sizes(group, ends, planner) == {A: 3 * 1024, B: 3 * 1024}
    planner.record_sizes.add(report(1, {A: 1}, orders=ASSUMED_RECORD_BYTES))
    planner.record_sizes.add(report(1, {B: 1}, orders=3 * ASSUMED_RECORD_BYTES))
    planner.record_sizes.add(report(0, {B: 1}, orders=7))  # late: a newer batch has reported
    assert planner.record_sizes.of("orders") == 2 * ASSUMED_RECORD_BYTES, "the mean of the newest batch"
    assert read_sizes(group, ends, planner) == {A: 1, B: 1}, "3 records: a second one of each is too much"
    assert planner.left == 2 * 10**9 - sum(at for at in (100, 100)) - 2 * (3 + 3 * 1024 + 1)
    again = Planner(rules_with(max_bytes=6 * ASSUMED_RECORD_BYTES))
    assert read_sizes(group, ends, again) == {A: 3, B: 3}, "another run has seen no record"


def test_byte_limit_reads_at_least_one_record_and_every_partition_in_turn(group: GroupHarness) -> None:
    group.settled(A, B)
    planner = Planner(rules_with(max_bytes=1))
    ends = dict.fromkeys((A, B), 102)
    assert [sum(read_sizes(group, ends, planner).values()) for _ in range(4)] == [1] * 4
    assert plan(group, ends, planner) is None, "everything was read"


@pytest.mark.parametrize(("most", "read"), [(4, 4), (5, 5), (7, 6)])
def test_the_smaller_of_both_limits_applies(group: GroupHarness, most: int, read: int) -> None:
    group.settled(A, B)
    planner = Planner(rules_with(max_bytes=6 * ASSUMED_RECORD_BYTES, max_offsets=most))
    assert sum(read_sizes(group, dict.fromkeys((A, B), 1_000), planner).values()) == read


def test_once_ignores_both_limits(group: GroupHarness) -> None:
    group.settled(A)
    offset = plan(group, {A: 1_100}, Planner(rules_with(max_bytes=1, max_offsets=1)), unlimited=True)
    assert offset is not None and offset.ranges == {A: (100, 1_100)}


def test_batch_below_min_offsets_waits_for_the_maximum_delay(group: GroupHarness) -> None:
    group.settled(A)
    planner = Planner(rules_with(min_offsets=10, max_delay_ms=1_000))
    assert plan(group, {A: 101}, planner, now_ms=5_000) is not None  # the first batch of a run does not wait
    assert plan(group, {A: 109}, planner, now_ms=5_999) is None
    assert plan(group, {A: 110}, planner, now_ms=5_999) is not None
    assert plan(group, {A: 101}, planner, now_ms=6_998) is None
    assert plan(group, {A: 101}, planner, now_ms=6_999) is not None


# --- what else it carries --------------------------------------------------------------------------------------------


def test_plan_contains_uncommitted_positions_that_it_does_not_read(fresh: GroupHarness) -> None:
    fresh.durable({A: (100, 150), B: (40, 40), C: (5, 9)})
    fresh.assigned(A)
    fresh.committed({A: 150})
    # B and C are not assigned yet: whether their offsets are committed is unknown.
    assert planned(fresh, {A: 160}).uncommitted == {B: 40, C: 9}
    fresh.durable()
    fresh.assigned(B)
    fresh.committed({B: 40})
    assert planned(fresh, {A: 170}).uncommitted == {C: 9}


def test_plan_keeps_the_first_partition_counts_and_the_topic_ids() -> None:
    group = GroupHarness()
    group.start_stream({"orders": 3})
    group.settled(A, OTHER)
    offset = planned(group, {A: 150})
    assert offset.known == {"orders": 3}
    assert offset.topic_ids == {"orders": "id-orders", "payments": "id-payments"}


LONG_MAX = 2**63 - 1

partitions = st.builds(TopicPartition, st.sampled_from(["a", "b", "orders"]), st.integers(0, 20))
offsets = st.integers(0, 10**6)
backlogs = st.dictionaries(
    partitions, st.tuples(offsets, st.integers(0, 300)).map(lambda pair: (pair[0], sum(pair))), max_size=30
)
ranges = st.lists(
    st.builds(
        lambda tp, start, size: OffsetRange(tp, start, start + size), partitions, offsets, st.integers(0, 200_000)
    ),
    max_size=30,
    unique_by=lambda r: r.tp,
)


def taken(before: dict[TopicPartition, tuple[int, int]], until: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
    return {tp: until[tp] - position for tp, (position, _) in before.items()}


class Backlog:
    """Partitions that are read batch by batch."""

    def __init__(self, **sizes: int) -> None:
        self.left = {TopicPartition(name, 0): (0, size) for name, size in sizes.items()}
        self.seq = 0

    def batch(self, max_offsets: int | None) -> list[int]:
        until = fair_share(self.left, max_offsets, self.seq * (max_offsets or 0))
        self.seq += 1
        sizes = list(taken(self.left, until).values())
        self.left = {tp: (until[tp], latest) for tp, (_, latest) in self.left.items()}
        return sizes


# --- a limit is shared fairly ----------------------------------------------------------------------------------------


def test_limit_is_shared_equally_and_unused_shares_go_to_other_partitions() -> None:
    backlog = Backlog(a=101, b=11, c=1)
    assert [backlog.batch(10) for _ in range(4)] == [[5, 4, 1], [5, 5, 0], [8, 2, 0], [10, 0, 0]]


RECORD_BYTES = {"a": 1, "b": 70, "orders": 5_000}


@given(backlogs, st.integers(1, 10**7), st.integers(0, 100))
def test_byte_limit_is_kept_and_used(before: dict[TopicPartition, tuple[int, int]], limit: int, seq: int) -> None:
    """Unless one record exceeds it. If every partition got a record, one more of each that has more would exceed it."""
    read = taken(before, fair_share(before, offsets_within(before, lambda topic: RECORD_BYTES[topic], limit), seq))
    size = sum(RECORD_BYTES[tp.topic] * count for tp, count in read.items())
    more = sum(RECORD_BYTES[tp.topic] for tp, count in read.items() if count < before[tp][1] - before[tp][0])
    assert size <= limit or sum(read.values()) == 1
    if all(count or start >= end for count, (start, end) in zip(read.values(), before.values(), strict=True)):
        assert not more or size + more > limit


def test_remainder_rotates_and_continues_where_it_stopped() -> None:
    backlog = Backlog(a=100, b=100, c=100)
    assert [backlog.batch(2) for _ in range(3)] == [[1, 1, 0], [1, 0, 1], [0, 1, 1]]
    assert [backlog.batch(4) for _ in range(3)] == [[2, 1, 1], [1, 2, 1], [1, 1, 2]]


NEAR_THE_END = {A: (LONG_MAX - 5, LONG_MAX), B: (1, LONG_MAX)}


@pytest.mark.parametrize(
    ("held", "limit", "seq", "until"),
    [
        pytest.param({A: (0, 9), B: (9, 9), C: (0, 9)}, 1, 1, {A: 0, B: 9, C: 1}, id="whose turn it is has no backlog"),
        pytest.param(NEAR_THE_END, LONG_MAX, 0, {A: LONG_MAX, B: LONG_MAX - 4}, id="B18 the largest limit"),
        pytest.param({A: (3, 1_000_000), B: (7, 7)}, None, 5, {A: 1_000_000, B: 7}, id="B20 no limit"),
        pytest.param({A: (50, 20), B: (0, 1)}, None, 0, {A: 50, B: 1}, id="a log that shrank, without a limit"),
        pytest.param({A: (50, 20), B: (0, 1)}, 1, 0, {A: 50, B: 1}, id="a log that shrank, with a limit"),
    ],
)
def test_end_of_a_limited_batch(
    held: Mapping[TopicPartition, tuple[int, int]], limit: int | None, seq: int, until: Ends
) -> None:
    assert fair_share(held, limit, seq) == until


def test_limit_below_one_breaks_an_invariant() -> None:
    with pytest.raises(InvariantBroken, match="limited to 0 offsets"):
        fair_share({A: (0, 1)}, 0, 0)


@given(backlogs, st.integers(1, 5_000), st.integers(0, 10**9))
def test_fair_share_uses_the_whole_limit_and_is_fair(
    before: dict[TopicPartition, tuple[int, int]], limit: int, seq: int
) -> None:
    until = fair_share(before, limit, seq)
    took = taken(before, until)
    wanted = {tp: latest - position for tp, (position, latest) in before.items()}
    assert until.keys() == before.keys()
    assert all(0 <= took[tp] <= wanted[tp] for tp in before)
    assert sum(took.values()) == min(limit, sum(wanted.values()))
    # Max-min fair: who got less than it wanted got at least what anybody else got, but for the one spare offset.
    short = [took[tp] for tp in before if took[tp] < wanted[tp]]
    assert not short or min(short) >= max(took.values()) - 1
    assert fair_share(dict(reversed(before.items())), limit, seq) == until


@given(st.integers(1, 12), st.integers(1, 40), st.integers(0, 10**9))
def test_rotation_starves_no_partition(limit: int, count: int, first: int) -> None:
    left = {TopicPartition("t", p): (0, 10**6) for p in range(count)}
    got: Counter[TopicPartition] = Counter()
    for seq in range(first, first - (-count // limit)):
        until = fair_share(left, limit, seq * limit)
        got.update(taken(left, until))
        left = {tp: (until[tp], latest) for tp, (_, latest) in left.items()}
    assert min(got.values()) >= 1


def test_byte_limit_starves_no_partition_although_the_sizes_of_records_differ() -> None:
    """So the number of offsets that fit differs from batch to batch."""
    run = RunHarness(topics={"orders": 4}, max_bytes=1_000_000)
    size = {tp: 900_000 if tp == A else 400_000 for tp in tps("orders", 0, 1, 2, 3)}
    run.ends = dict.fromkeys(size, 1_000)
    served: Counter[TopicPartition] = Counter()
    limits = set()
    for _ in range(40):
        batch = run.batch()
        rows = {tp: end - start for tp, (start, end) in batch.ranges.items() if end > start}
        bytes_ = {"orders": sum(size[tp] * count for tp, count in rows.items())}
        run.feed(TaskReported(seq=batch.seq, counts=TaskCounts(rows_from_brokers=rows, bytes=bytes_)))
        served.update(rows)
        limits.add(sum(rows.values()))
    assert limits == {1, 2}
    assert min(served[tp] for tp in size) >= 10, served


@given(st.integers(1, 6), st.lists(st.lists(st.integers(0, 3), min_size=8, max_size=8), min_size=8, max_size=8))
def test_waiting_partition_is_served_while_others_come_and_go(limit: int, arrivals: list[list[int]]) -> None:
    waiting = TopicPartition("t", 3)
    left = {TopicPartition("t", p): (0, 1 if p == 3 else 0) for p in range(8)}
    for seq, batch in enumerate(arrivals):
        left = {tp: (a, b + (0 if tp == waiting else batch[tp.partition])) for tp, (a, b) in left.items()}
        until = fair_share(left, limit, seq * limit)
        left = {tp: (until[tp], latest) for tp, (_, latest) in left.items()}
    assert left[waiting] == (1, 1)


# --- the packing into tasks ------------------------------------------------------------------------------------------


@given(ranges, st.none() | st.integers(1, 100), st.none() | st.integers(1_000, 300_000))
def test_every_offset_is_in_exactly_one_task(
    given_ranges: list[OffsetRange], min_partitions: int | None, max_records: int | None
) -> None:
    tasks = pack(given_ranges, min_partitions=min_partitions, max_records=max_records)
    pieces = sorted(piece for task in tasks for piece in task)
    assert all(task and task == sorted(task) for task in tasks)
    assert all(len({piece.tp for piece in task}) == len(task) for task in tasks), "a client is assigned each once"
    assert all(piece.size > 0 for piece in pieces)
    joined: list[OffsetRange] = []
    for piece in pieces:
        if joined and joined[-1].tp == piece.tp and joined[-1].end == piece.start:
            joined[-1] = OffsetRange(piece.tp, joined[-1].start, piece.end)
        else:
            joined.append(piece)
    assert joined == sorted(r for r in given_ranges if r.size)
    if min_partitions is not None:
        assert len(tasks) >= min(min_partitions, sum(r.size for r in given_ranges))
    if max_records is not None:
        assert all(sum(r.size for r in task) <= max_records for task in tasks)
    again = pack(given_ranges[::-1], min_partitions=min_partitions, max_records=max_records)
    assert again == tasks


def of(partition: int, start: int, end: int) -> OffsetRange:
    return OffsetRange(TopicPartition("t", partition), start, end)


@pytest.mark.parametrize(
    ("given_ranges", "min_partitions", "max_records", "tasks"),
    [
        pytest.param(
            [of(p, 0, TASK_RECORDS_TARGET * 4 // 5) for p in range(8)],
            *(None, None),
            [[of(p, 0, TASK_RECORDS_TARGET * 4 // 5)] for p in range(8)],
            id="more than half a task is a task",
        ),
        pytest.param(
            [of(p, 0, TASK_RECORDS_TARGET // 2) for p in range(2)],
            *(None, None),
            [[of(p, 0, TASK_RECORDS_TARGET // 2) for p in range(2)]],
            id="two halves share a task",
        ),
        pytest.param(
            [of(0, 0, 10), of(1, 0, 10 * TASK_RECORDS_TARGET)],
            *(None, None),
            [[of(1, 0, 10 * TASK_RECORDS_TARGET)], [of(0, 0, 10)]],
            id="a small one is not put on top of a big one",
        ),
        pytest.param(
            [of(0, 100, 700), of(1, 0, 3)],
            *(2, None),
            [[of(0, 100, 700)], [of(1, 0, 3)]],
            id="B25 there are enough tasks",
        ),
        pytest.param(
            [of(0, 100, 700), of(1, 0, 3)],
            *(4, None),
            [[of(0, 100, 300)], [of(0, 300, 500)], [of(0, 500, 700)], [of(1, 0, 3)]],
            id="B25 the largest is split",
        ),
        pytest.param(
            [of(0, 0, 600), of(1, 0, 500)],
            *(4, None),
            [[of(0, 0, 300)], [of(0, 300, 600)], [of(1, 0, 250)], [of(1, 250, 500)]],
            id="the pieces that a range has already count",
        ),
        pytest.param(
            [of(0, 0, 11)], *(3, None), [[of(0, 3, 7)], [of(0, 7, 11)], [of(0, 0, 3)]], id="the remainder goes last"
        ),
        pytest.param(
            [of(0, 5, 7), of(1, 0, 1)],
            *(50, None),
            [[of(0, 5, 6)], [of(0, 6, 7)], [of(1, 0, 1)]],
            id="more tasks than offsets",
        ),
        pytest.param([of(0, 4, 4), of(1, 0, 0)], *(8, 5), [], id="empty ranges are no tasks"),
    ],
)
def test_packing_of_ranges_into_tasks(
    given_ranges: list[OffsetRange], min_partitions: int | None, max_records: int | None, tasks: list[list[OffsetRange]]
) -> None:
    assert pack(given_ranges, min_partitions=min_partitions, max_records=max_records) == tasks


def test_a_task_has_a_bounded_number_of_ranges() -> None:
    """24 of 25 tasks have a range of many offsets: all tiny ranges would share the 25th."""
    sizes = [25_000] * 24 + [1] * 6_000
    ranges = [of(i, 0, size) for i, size in enumerate(sizes)]
    tasks = pack(ranges, min_partitions=None, max_records=None)
    assert max(map(len, tasks)) <= TASK_RANGES_MAX
    assert sorted(r for task in tasks for r in task) == sorted(ranges)
    (one,) = pack(ranges[24 : 24 + TASK_RANGES_TARGET], min_partitions=None, max_records=None)
    assert len(one) == TASK_RANGES_TARGET


def test_small_ranges_share_a_few_balanced_tasks() -> None:
    small = [of(p, 7, 8) for p in range(1_000)]
    assert [len(task) for task in pack(small, min_partitions=None, max_records=None)] == [TASK_RANGES_TARGET] * 4
    sizes = [17_000, 18_000, 19_000, 20_000, 21_000, 22_000, 23_000, 24_000]
    tasks = pack([of(i, 0, n) for i, n in enumerate(sizes)], min_partitions=None, max_records=None)
    assert [sum(r.size for r in task) for task in tasks] == [41_000] * 4


def test_max_records_that_needs_too_many_tasks_is_refused() -> None:
    ranges = [of(0, 0, 7 * TASKS_MAX + 1), of(1, 0, 5), of(2, 3, 10)]
    with pytest.raises(OptionError, match=rf"'maxRecordsPerPartition' is 1, .* the limit is {TASKS_MAX}") as caught:
        pack(ranges, min_partitions=None, max_records=1)
    least = int(str(caught.value).split("set the option to ")[1].split()[0])
    assert least == 8 and len(pack(ranges, min_partitions=None, max_records=least)) <= TASKS_MAX
