"""Pieces and claims: each offset of a plan has exactly one task, in whatever order tasks claim."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.protocol.claims import (
    PLANS_MAX,
    SMALL_PIECES_MAX,
    WIDTH_PLANS,
    Claims,
    PlannedPiece,
    TaskPlan,
    split_by_executor,
)
from spark_group_source.protocol.offsets import StreamOffset
from spark_group_source.protocol.planner import TASK_RANGES_TARGET, TASK_RECORDS_TARGET, pack

EXECUTORS = ["1", "2", "3"]


def tp(partition: int) -> TopicPartition:
    return TopicPartition("orders", partition)


def batch(seq: int, *sizes: int) -> StreamOffset:
    """Batch number ``seq``, with one partition for each size."""
    ranges = {tp(p): (100 * seq, 100 * seq + size) for p, size in enumerate(sizes)}
    return StreamOffset(group="etl", stream="9f2c", seq=seq, ranges=ranges)


def claim_all(claims: Claims, plan: TaskPlan, executor: str = "1") -> list[PlannedPiece]:
    """Run all tasks of a plan concurrently until they end."""
    found = [claims.claim(plan.name, task, executor) for task in range(len(plan.pieces))]
    for task in range(len(plan.pieces)):
        claims.ended(plan.name, task, executor)
    assert all(isinstance(piece, PlannedPiece) for piece in found)
    return [piece for piece in found if isinstance(piece, PlannedPiece)]


def late(claims: Claims) -> Claims:
    """Let all tasks of a batch claim, so that the next plan is late."""
    claim_all(claims, claims.plan_tasks(batch(0, 10), {}))
    return claims


# --- the binding ----------------------------------------------------------------------------------------------------


def test_the_first_plan_is_fixed_and_packed_as_without_agents() -> None:
    plan = Claims("r").plan_tasks(batch(0, 10, 200_000, 20), {tp(0): "1"})
    assert plan.binding == "fixed"
    as_ever = pack(plan.offset.batch(), min_partitions=None, max_records=None)
    assert [list(piece.ranges) for piece in plan.pieces] == as_ever


def test_a_plan_is_late_if_every_task_of_the_previous_batch_claimed() -> None:
    claims = Claims("r")
    first = claims.plan_tasks(batch(0, 100_000, 90_000), {})
    claims.claim(first.name, 0, "1")
    second = claims.plan_tasks(batch(1, 100_000), {})
    assert second.binding == "fixed"  # one of two
    claims.claim(first.name, 1, "2")
    third = claims.plan_tasks(batch(2, 10), {})
    assert third.binding == "fixed"  # not the previous batch
    claim_all(claims, third)
    assert claims.plan_tasks(batch(3, 10), {}).binding == "late"
    assert claims.plan_tasks(batch(4, 10), {}).binding == "fixed"  # no task of the last one claimed


# --- claims ---------------------------------------------------------------------------------------------------------


def test_a_task_first_gets_what_its_executor_has_buffered() -> None:
    claims = late(Claims("r"))
    placed = {tp(0): "1", tp(1): "2", tp(2): "3"}
    plan = claims.plan_tasks(batch(1, 50_000, 49_000, 48_000, 47_000), placed)
    whose = {task: claims.claim(plan.name, task, executor) for task, executor in enumerate(["3", "2", "1", "1"])}
    assert [piece.ranges[0].tp for piece in whose.values() if isinstance(piece, PlannedPiece)] == [
        tp(2),
        tp(1),
        tp(0),
        tp(3),
    ]


def test_a_task_without_own_pieces_gets_unplaced_ones_then_those_of_the_busiest_executor() -> None:
    claims = late(Claims("r"))
    plan = claims.plan_tasks(batch(1, 50_000, 40_000, 45_000, 48_000), {tp(0): "1", tp(1): "1", tp(2): "2"})
    given_to = [claims.claim(plan.name, task, "3") for task in range(4)]
    assert [piece.executor for piece in given_to if isinstance(piece, PlannedPiece)] == [
        "",
        "1",
        "2",
        "1",
    ]


@pytest.mark.proves("G1", level="core")
def test_a_claim_is_permanent() -> None:
    claims = late(Claims("r"))
    plan = claims.plan_tasks(batch(1, *[60_000] * 6), {tp(0): "1", tp(5): "2"})
    first = {task: claims.claim(plan.name, task, "1") for task in range(6)}
    claims.plan_tasks(batch(2, 10), {})
    for executor in ("1", "2", "none"):  # a retry, a twin, a stage run again after the next batch was planned
        assert {task: claims.claim(plan.name, task, executor) for task in reversed(range(6))} == first


def test_unknown_claims_are_refused_with_the_reason() -> None:
    claims = Claims("run-2")
    first = claims.plan_tasks(batch(0, 10), {})
    assert "another run's" in str(claims.claim("run-1.1", 0, "1"))
    for task in (-1, 1):
        refused = claims.claim(first.name, task, "1")
        assert isinstance(refused, str) and "has 1 tasks" in refused
    claims.plan_tasks(batch(1, 10), {})
    assert isinstance(claims.claim(first.name, 0, "1"), PlannedPiece)
    claims.plan_tasks(batch(2, 10), {})
    refused = claims.claim(first.name, 0, "1")
    assert isinstance(refused, str) and "of an earlier batch" in refused
    assert claims.plan(first.name) is None


@pytest.mark.parametrize("references", [8, PLANS_MAX])
def test_each_reference_to_a_stream_has_a_plan_for_the_whole_batch(references: int) -> None:
    """``df.filter(a).union(df.filter(b))...``: Spark plans all parts before the first task claims."""
    claims = Claims("r")
    for seq in range(3):
        plans = [claims.plan_tasks(batch(seq, 10), {}) for _ in range(references)]
        assert {plan.binding for plan in plans} == {"late" if seq else "fixed"}
        for plan in plans:
            assert claim_all(claims, plan)
    assert len(claims._plans) <= 2 * references


def test_the_oldest_plans_beyond_the_limit_are_forgotten() -> None:
    claims = Claims("r")
    plans = [claims.plan_tasks(batch(0, 10), {}) for _ in range(PLANS_MAX + 1)]
    assert [isinstance(claims.claim(plan.name, 0, "1"), PlannedPiece) for plan in plans] == [False] + [True] * PLANS_MAX


# --- cutting --------------------------------------------------------------------------------------------------------


def test_one_huge_partition_is_split_over_all_concurrent_tasks() -> None:
    """Their number is found by planning twice as many pieces as ever ran together."""
    cores, claims = 4, late(Claims("r"))
    counts = []
    for seq in range(1, 8):
        plan = claims.plan_tasks(batch(seq, 10_000_000), {tp(0): "1"})
        counts.append(len(plan.pieces))
        for first in range(0, len(plan.pieces), cores):
            wave = range(first, min(first + cores, len(plan.pieces)))
            for task in wave:
                claims.claim(plan.name, task, "1")
            for task in wave:
                claims.ended(plan.name, task, "1")
    assert counts == [2, 4, 8, 8, 8, 8, 8]
    assert claims.width == cores


def test_the_width_forgets_old_plans() -> None:
    claims = late(Claims("r"))
    plan = claims.plan_tasks(batch(1, *[60_000] * 8), {})
    claim_all(claims, plan)
    for seq in range(2, 2 + WIDTH_PLANS):
        assert claims.width == 8
        claim_all(claims, claims.plan_tasks(batch(seq, 10), {}))
    assert claims.width == 1


def test_tasks_without_a_reported_end_count_for_their_batch_only() -> None:
    claims = Claims("r")
    for seq in range(5):
        plan = claims.plan_tasks(batch(seq, 10), {})
        claims.claim(plan.name, 0, "1")
    assert claims.width == 1


def test_a_range_is_not_split_into_pieces_too_small_for_a_task() -> None:
    (piece,) = split_by_executor([OffsetRange(tp(0), 0, TASK_RECORDS_TARGET)], {}, width=100)
    assert piece.size == TASK_RECORDS_TARGET


def test_a_thousand_tiny_partitions_share_few_tasks() -> None:
    ranges = [OffsetRange(tp(p), 0, 1) for p in range(1_000)]
    assert len(split_by_executor(ranges, {}, width=8)) == 1_000 // TASK_RANGES_TARGET
    by_three = split_by_executor(ranges, {tp(p): EXECUTORS[p % 3] for p in range(1_000)}, width=8)
    assert Counter(piece.executor for piece in by_three) == {"1": 2, "2": 2, "3": 2}
    by_all = split_by_executor(ranges, {tp(p): str(p) for p in range(1_000)}, width=8)
    assert len(by_all) == SMALL_PIECES_MAX


def test_small_pieces_of_few_executors_stay_separate() -> None:
    ranges = [OffsetRange(tp(p), 0, 10) for p in range(6)]
    pieces = split_by_executor(ranges, {r.tp: EXECUTORS[r.tp.partition % 3] for r in ranges}, width=1)
    assert {piece.executor: {r.tp for r in piece.ranges} for piece in pieces} == {
        "1": {tp(0), tp(3)},
        "2": {tp(1), tp(4)},
        "3": {tp(2), tp(5)},
    }


parts = st.lists(st.one_of(st.integers(0, 100), st.integers(0, 2_000_000)), max_size=30).map(
    lambda sizes: [OffsetRange(tp(p), p, p + size) for p, size in enumerate(sizes)]
)
hosts = st.dictionaries(st.integers(0, 29).map(tp), st.sampled_from([*EXECUTORS, ""]))


def offsets_of(pieces: list[PlannedPiece]) -> list[OffsetRange]:
    """The union of the pieces' ranges."""
    merged: list[OffsetRange] = []
    for r in sorted(r for piece in pieces for r in piece.ranges):
        assert r.size > 0
        if merged and merged[-1].tp == r.tp:
            assert merged[-1].end == r.start, "twice, or left out"
            merged[-1] = OffsetRange(r.tp, merged[-1].start, r.end)
        else:
            merged.append(r)
    return merged


@settings(derandomize=True, max_examples=200)
@given(
    parts,
    hosts,
    st.integers(1, 100),
    st.none() | st.integers(1, 60),
    st.none() | st.integers(10_000, 500_000),
)
def test_every_offset_is_in_one_piece_within_the_configured_bounds(
    ranges: list[OffsetRange], placed: dict[TopicPartition, str], width: int, least: int | None, most: int | None
) -> None:
    pieces = split_by_executor(ranges, placed, width=width, min_partitions=least, max_records=most)
    assert offsets_of(pieces) == [r for r in ranges if r.size]
    assert all(piece.ranges == tuple(sorted(piece.ranges)) for piece in pieces)
    assert all(len({r.tp for r in piece.ranges}) == len(piece.ranges) for piece in pieces), (
        "a client is assigned each once"
    )
    if least is not None:
        assert len(pieces) >= min(least, sum(r.size for r in ranges))
    if most is not None:
        assert all(piece.size <= most for piece in pieces)
    assert pieces == split_by_executor(ranges[::-1], placed, width=width, min_partitions=least, max_records=most)


@pytest.mark.parametrize(
    ("size", "most", "width"),
    [(100_002, 50_000, 1), (80_002, 40_000, 4), (120_002, 40_000, 4), (60_002, 30_000, 8)],
)
def test_two_pieces_of_one_partition_are_not_packed_into_one_task(size: int, most: int, width: int) -> None:
    """The task's client would refuse them, and each retry gets the same piece."""
    ranges = [OffsetRange(tp(0), 0, size)]
    pieces = split_by_executor(ranges, {}, width=width, max_records=most)
    assert [len(piece.ranges) for piece in pieces] == [1] * len(pieces)
    assert offsets_of(pieces) == ranges


def test_two_pieces_of_one_partition_are_not_merged() -> None:
    """A task's client is assigned each partition once."""
    ranges = [OffsetRange(tp(0), 0, 104), OffsetRange(tp(1), 0, 100)]
    pieces = split_by_executor(ranges, {tp(0): "a", tp(1): "b"}, width=1, min_partitions=3)
    assert all(len({r.tp for r in piece.ranges}) == len(piece.ranges) for piece in pieces)
    assert offsets_of(pieces) == ranges


# --- everything together --------------------------------------------------------------------------------------------


class AnyOrder(RuleBasedStateMachine):
    """Batches are planned, and tasks claim in any order, repeatedly, from any executor, also for earlier plans.

    The model: what each (plan, task) was given first.
    """

    plans = Bundle("plans")

    def __init__(self) -> None:
        super().__init__()
        self.claims = Claims("r")
        self.made: list[TaskPlan] = []
        self.given: dict[tuple[str, int], PlannedPiece] = {}

    @rule(
        target=plans,
        sizes=st.lists(st.sampled_from([0, 1, 100, 60_000, 1_000_000]), max_size=8),
        placed=hosts,
        again=st.booleans(),
    )
    def plan(self, sizes: list[int], placed: dict[TopicPartition, str], again: bool) -> TaskPlan:
        offset = self.made[-1].offset if again and self.made else batch(len(self.made), *sizes)
        late = self.expects_late(offset)
        made = self.claims.plan_tasks(offset, placed)
        assert made.name not in {plan.name for plan in self.made}
        assert not made.pieces or (made.binding == "late") == late
        assert offsets_of(list(made.pieces)) == offset.batch()
        self.made.append(made)
        return made

    def kept(self) -> list[TaskPlan]:
        made = [plan for plan in self.made if plan.pieces]
        batches = list(dict.fromkeys(plan.offset.seq for plan in made))[-2:]
        return [plan for plan in made if plan.offset.seq in batches]

    def expects_late(self, offset: StreamOffset) -> bool:
        before = [plan for plan in self.kept() if plan.offset.seq != offset.seq]
        last = [plan for plan in before if plan.offset.seq == before[-1].offset.seq]
        claimed = [[(plan.name, n) in self.given for n in range(len(plan.pieces))] for plan in last]
        return any(any(plan) for plan in claimed) and all(all(plan) or not any(plan) for plan in claimed)

    @rule(plan=plans, task=st.integers(-1, 12), executor=st.sampled_from(EXECUTORS))
    def claim_one(self, plan: TaskPlan, task: int, executor: str) -> None:
        found = self.claims.claim(plan.name, task, executor)
        if plan not in self.kept() or not 0 <= task < len(plan.pieces):
            assert isinstance(found, str)
            return
        assert isinstance(found, PlannedPiece)
        assert self.given.setdefault((plan.name, task), found) == found
        if plan.binding == "fixed":
            assert found == plan.pieces[task]

    @precondition(lambda self: self.kept())
    @rule(order=st.randoms(use_true_random=False), executor=st.sampled_from(EXECUTORS))
    def claim_all(self, order: object, executor: str) -> None:
        plan = self.kept()[-1]
        tasks = list(range(len(plan.pieces)))
        order.shuffle(tasks)  # type: ignore[attr-defined]
        for task in tasks:
            self.claim_one(plan, task, executor)
        pieces = [self.given[plan.name, task] for task in tasks]
        assert offsets_of(pieces) == plan.offset.batch()

    @rule(plan=plans, task=st.integers(0, 12), executor=st.sampled_from(EXECUTORS))
    def end(self, plan: TaskPlan, task: int, executor: str) -> None:
        self.claims.ended(plan.name, task, executor)

    @invariant()
    def nothing_is_given_twice(self) -> None:
        for plan in self.kept():
            offsets = [r for (name, _), piece in self.given.items() if name == plan.name for r in piece.ranges]
            assert len(offsets) == len(set(offsets))

    @invariant()
    def memory_is_bounded(self) -> None:
        assert len(self.claims._plans) == len(self.kept())
        assert self.claims.width >= 1


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(derandomize=True, max_examples=40, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("plans", [1, 3])
def test_plan_names_start_with_their_run(plans: int) -> None:
    claims = Claims("run-7")
    assert [claims.plan_tasks(batch(0, 1), {}).name for _ in range(plans)] == [f"run-7.{n + 1}" for n in range(plans)]
