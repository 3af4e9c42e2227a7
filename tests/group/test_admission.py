"""The fair cut, the wait for enough offsets, and the packing into tasks."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_group_source.errors import InvariantBroken, OptionError
from spark_group_source.group.plan import TASK_RANGES_TARGET, TASK_RECORDS_TARGET, TASKS_MAX, cut, enough, pack
from spark_group_source.model import OffsetRange, TopicPartition

LONG_MAX = 2**63 - 1
A, B, C = (TopicPartition("orders", p) for p in range(3))

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
        until = cut(self.left, max_offsets, self.seq)
        self.seq += 1
        sizes = list(taken(self.left, until).values())
        self.left = {tp: (until[tp], latest) for tp, (_, latest) in self.left.items()}
        return sizes


# ---- the cut


def test_B17_a_limit_is_shared_equally_and_what_one_cannot_use_goes_to_the_others() -> None:
    backlog = Backlog(a=101, b=11, c=1)
    assert [backlog.batch(10) for _ in range(4)] == [[5, 4, 1], [5, 5, 0], [8, 2, 0], [10, 0, 0]]


def test_B17_a_restart_between_two_batches_changes_nothing() -> None:
    steady, restarted = Backlog(a=101, b=11, c=7), Backlog(a=101, b=11, c=7)
    for _ in range(5):
        expected = steady.batch(4)
        again = Backlog()
        again.left, again.seq = dict(reversed(restarted.left.items())), restarted.seq
        assert sorted(again.batch(4)) == sorted(expected)
        restarted.left, restarted.seq = dict(sorted(again.left.items())), again.seq
        assert restarted.left == steady.left


def test_the_remainder_rotates_and_continues_where_it_stopped() -> None:
    backlog = Backlog(a=100, b=100, c=100)
    assert [backlog.batch(2) for _ in range(3)] == [[1, 1, 0], [1, 0, 1], [0, 1, 1]]
    assert [backlog.batch(4) for _ in range(3)] == [[2, 1, 1], [1, 2, 1], [1, 1, 2]]


def test_the_turn_of_a_partition_without_a_backlog_is_the_next_ones() -> None:
    held = {A: (0, 9), B: (9, 9), C: (0, 9)}
    assert cut(held, 1, seq=1) == {A: 0, B: 9, C: 1}


def test_where_nothing_is_left_over_the_batch_number_says_nothing() -> None:
    for seq in range(3):
        assert cut({A: (0, 9), B: (0, 9)}, 4, seq) == {A: 2, B: 2}
        assert cut({A: (0, 9), B: (0, 9)}, 18, seq) == {A: 9, B: 9}


def test_B18_the_largest_limit_and_offsets_do_not_overflow() -> None:
    near_end = {A: (LONG_MAX - 5, LONG_MAX), B: (1, LONG_MAX)}
    assert cut(near_end, LONG_MAX, 0) == {A: LONG_MAX, B: LONG_MAX - 4}
    assert cut({A: (1, 10)}, LONG_MAX, 0) == {A: 10}
    assert sum(taken(near_end, cut(near_end, LONG_MAX, 0)).values()) == LONG_MAX


def test_B20_without_a_limit_everything_is_taken() -> None:
    assert cut({A: (3, 1_000_000), B: (7, 7)}, None, 5) == {A: 1_000_000, B: 7}
    assert enough(1, None, last_batch_ms=0, now_ms=1, max_delay_ms=900_000, first=False)


def test_a_log_that_shrank_never_moves_the_position_back() -> None:
    for limit in (None, 1, 100):
        assert cut({A: (50, 20), B: (0, 1)}, limit, 0) == {A: 50, B: 1}


def test_no_partitions_give_an_empty_plan() -> None:
    assert cut({}, 10, 3) == {}


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_a_bug_of_the_caller(limit: int) -> None:
    with pytest.raises(InvariantBroken, match=f"at most {limit} offsets"):
        cut({A: (0, 1)}, limit, 0)


@given(backlogs, st.integers(1, 5_000), st.integers(0, 10**9))
def test_the_cut_is_full_within_bounds_and_fair(
    before: dict[TopicPartition, tuple[int, int]], limit: int, seq: int
) -> None:
    until = cut(before, limit, seq)
    took = taken(before, until)
    wanted = {tp: latest - position for tp, (position, latest) in before.items()}
    assert until.keys() == before.keys()
    assert all(0 <= took[tp] <= wanted[tp] for tp in before)
    assert sum(took.values()) == min(limit, sum(wanted.values()))
    # Max-min fair: who got less than it wanted got at least what anybody else got, but for the one spare offset.
    short = [took[tp] for tp in before if took[tp] < wanted[tp]]
    assert not short or min(short) >= max(took.values()) - 1
    assert cut(dict(reversed(before.items())), limit, seq) == until


@given(st.integers(1, 12), st.integers(1, 40), st.integers(0, 10**9))
def test_the_rotation_starves_nobody(limit: int, count: int, first: int) -> None:
    left = {TopicPartition("t", p): (0, 10**6) for p in range(count)}
    got: Counter[TopicPartition] = Counter()
    for seq in range(first, first - (-count // limit)):
        until = cut(left, limit, seq)
        got.update(taken(left, until))
        left = {tp: (until[tp], latest) for tp, (_, latest) in left.items()}
    assert min(got.values()) >= 1


@given(st.integers(1, 6), st.lists(st.lists(st.integers(0, 3), min_size=8, max_size=8), min_size=8, max_size=8))
def test_a_waiting_partition_is_served_although_others_come_and_go(limit: int, arrivals: list[list[int]]) -> None:
    waiting = TopicPartition("t", 3)
    left = {TopicPartition("t", p): (0, 1 if p == 3 else 0) for p in range(8)}
    for seq, batch in enumerate(arrivals):
        left = {tp: (a, b + (0 if tp == waiting else batch[tp.partition])) for tp, (a, b) in left.items()}
        until = cut(left, limit, seq)
        left = {tp: (until[tp], latest) for tp, (_, latest) in left.items()}
    assert left[waiting] == (1, 1)


# ---- the wait


def test_B19_the_first_batch_runs_although_there_is_too_little() -> None:
    assert enough(1, 15, last_batch_ms=0, now_ms=0, max_delay_ms=5_000, first=True)


def test_B19_small_additions_wait_and_the_delay_releases_them() -> None:
    def now(backlog: int, now_ms: int) -> bool:
        return enough(backlog, 15, last_batch_ms=1_000, now_ms=now_ms, max_delay_ms=5_000, first=False)

    assert not now(14, 5_999)
    assert now(15, 1_001)
    assert now(14, 6_000)


# ---- the packing


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


def test_many_small_ranges_share_a_few_tasks() -> None:
    small = [OffsetRange(TopicPartition("t", p), 7, 8) for p in range(1_000)]
    tasks = pack(small, min_partitions=None, max_records=None)
    assert [len(task) for task in tasks] == [TASK_RANGES_TARGET] * 4


def test_big_ranges_have_tasks_of_their_own() -> None:
    big = [OffsetRange(TopicPartition("t", p), 0, 250_000) for p in range(4)]
    assert pack(big, min_partitions=None, max_records=None) == [[r] for r in big]


def test_ranges_of_more_than_half_a_task_are_not_put_together() -> None:
    middling = [OffsetRange(TopicPartition("t", p), 0, TASK_RECORDS_TARGET * 4 // 5) for p in range(8)]
    assert pack(middling, min_partitions=None, max_records=None) == [[r] for r in middling]


def test_a_small_range_is_not_put_on_top_of_a_big_one() -> None:
    small, big = OffsetRange(A, 0, 10), OffsetRange(B, 0, 10 * TASK_RECORDS_TARGET)
    assert pack([small, big], min_partitions=None, max_records=None) == [[big], [small]]


def test_shared_tasks_are_balanced_longest_first() -> None:
    sizes = [17_000, 18_000, 19_000, 20_000, 21_000, 22_000, 23_000, 24_000]
    tasks = pack(
        [OffsetRange(TopicPartition("t", i), 0, n) for i, n in enumerate(sizes)], min_partitions=None, max_records=None
    )
    assert [sum(r.size for r in task) for task in tasks] == [41_000] * 4


def test_B25_min_partitions_splits_only_when_there_are_too_few_and_the_largest_first() -> None:
    big, small = OffsetRange(A, 100, 700), OffsetRange(B, 0, 3)
    assert pack([big, small], min_partitions=2, max_records=None) == [[big], [small]]
    assert pack([big, small], min_partitions=4, max_records=None) == [
        [OffsetRange(A, 100, 300)],
        [OffsetRange(A, 300, 500)],
        [OffsetRange(A, 500, 700)],
        [small],
    ]


def test_min_partitions_counts_the_pieces_that_a_range_already_has() -> None:
    tasks = pack([OffsetRange(A, 0, 600), OffsetRange(B, 0, 500)], min_partitions=4, max_records=None)
    assert sorted(r.size for task in tasks for r in task) == [250, 250, 300, 300]


def test_the_last_piece_takes_the_remainder() -> None:
    pieces = [task[0] for task in pack([OffsetRange(A, 0, 11)], min_partitions=3, max_records=None)]
    assert sorted((r.start, r.end) for r in pieces) == [(0, 3), (3, 7), (7, 11)]


def test_min_partitions_beyond_the_offsets_gives_one_task_each() -> None:
    assert len(pack([OffsetRange(A, 5, 8), OffsetRange(B, 0, 1)], min_partitions=50, max_records=None)) == 4


def test_max_records_bounds_a_task_also_when_it_is_shared() -> None:
    tasks = pack(
        [OffsetRange(TopicPartition("t", p), 0, 6) for p in range(5)] + [OffsetRange(A, 0, 25)],
        min_partitions=None,
        max_records=10,
    )
    assert all(sum(r.size for r in task) <= 10 for task in tasks)
    assert sum(r.size for task in tasks for r in task) == 55


def test_max_records_that_would_need_too_many_tasks_is_refused() -> None:
    with pytest.raises(OptionError, match=rf"'maxRecordsPerPartition' is 1; .* {TASKS_MAX} are the most"):
        pack([OffsetRange(A, 0, TASKS_MAX + 1)], min_partitions=None, max_records=1)


def test_empty_ranges_are_no_tasks() -> None:
    assert pack([OffsetRange(A, 4, 4), OffsetRange(B, 0, 0)], min_partitions=8, max_records=5) == []
