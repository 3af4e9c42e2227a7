"""The pieces of a batch, and the tasks that claim them. "Plan" is a :class:`TaskPlan` here.

Runs in: the stream reader, tests, benchmarks. Deliberately absent: the channel on which tasks claim, and reading.

The binding of pieces to tasks is **fixed** or **late**. Fixed: task i reads piece i; its claim only shows that its
executor reaches the stream reader. Late: a task reads the piece that the response to its claim names. It claims when it
starts, so free executors read more, and each executor first reads what its own agent has buffered. A plan is late only
if every task of the previous batch claimed, because a task of a late plan cannot read anything without a response.

A claim is permanent: a retry, a speculative copy, a second action and a stage that runs again get the same piece for
the same plan and task index. So each offset of a plan is read by exactly one task index, in whatever order tasks claim.
"""

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.protocol.offsets import StreamOffset
from spark_group_source.protocol.planner import TASK_RANGES_TARGET, TASK_RECORDS_TARGET, pack, split_at_most

PLANS_MAX: Final = 1_000
"""Plans that are kept at most. A batch has one plan for each reference to the stream in its query, such as the parts of
a union; further actions of ``foreachBatch`` run the tasks of the same plan again. The maximum bounds the memory if
Spark plans a batch again and again. The plans of the current batch are kept, and those of the batch before it, which
show whether its tasks claimed."""
PIECES_PER_TASK: Final = 2
"""A large range is split into this many pieces for each task that can run at the same time, so that tasks that end
early read another piece. Twice as many tasks as ever ran together also show whether more can."""
WIDTH_PLANS: Final = 10
"""Plans over which the number of tasks that ran together is remembered: executors may be removed."""
SMALL_PIECES_MAX: Final = 32
"""Small pieces that stay separate so that each is read on the executor that has it buffered. Beyond that the smallest
are merged: starting a task costs more than reading a few records from a broker."""

Binding = Literal["fixed", "late"]


@dataclass(frozen=True, slots=True)
class PlannedPiece:
    """The sorted ranges that one task reads. ``executor``: the one that has most of them buffered; empty for none."""

    ranges: tuple[OffsetRange, ...]
    executor: str = ""

    @property
    def size(self) -> int:
        """The number of offsets, an upper bound of its records."""
        return sum(r.size for r in self.ranges)


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """A batch as it is passed to Spark: one task for each piece."""

    name: str
    """Unique: the name of the run and the number of the plan."""
    binding: Binding
    """fixed: Spark passes each task its piece. late: the task claims one when it starts, and gets one that its executor
    has buffered if there is one."""
    offset: StreamOffset
    """The end of the batch."""
    pieces: tuple[PlannedPiece, ...]
    """With a fixed binding, by the number of the task."""


class Claims:
    """The plans of one run, and the claims on their pieces.

    Args:
        run: the run's unique name, with which the names of its plans begin.
        min_partitions, max_records: as in :func:`planner.pack`.
    """

    def __init__(self, run: str, *, min_partitions: int | None = None, max_records: int | None = None) -> None:
        self._run, self._min_partitions, self._max_records = run, min_partitions, max_records
        self._plans_made = 0
        self._plans: dict[str, _PlanClaims] = {}
        """By name, the oldest first."""
        self._running: set[tuple[str, int, str]] = set()
        """Plan, task and executor of the tasks that have claimed and not ended."""
        self._concurrent: deque[int] = deque([0], maxlen=WIDTH_PLANS)
        """The most tasks that ran together, for each of the last plans."""

    @property
    def width(self) -> int:
        """The most tasks that ran together, over the last plans; at least 1."""
        return max(1, *self._concurrent)

    def plan_tasks(self, offset: StreamOffset, placed: Mapping[TopicPartition, str]) -> TaskPlan:
        """Split the batch that ends at ``offset`` into tasks. Each call makes another plan, also for the same batch.

        Args:
            offset: the end of the batch.
            placed: by partition, the executor on whose agent its member is placed, if it is.
        """
        ranges = offset.batch()
        late = self._all_tasks_claimed(offset)
        pieces = (
            split_by_executor(
                ranges, placed, width=self.width, min_partitions=self._min_partitions, max_records=self._max_records
            )
            if late
            else [
                PlannedPiece(tuple(task))
                for task in pack(ranges, min_partitions=self._min_partitions, max_records=self._max_records)
            ]
        )
        self._plans_made += 1
        plan = TaskPlan(f"{self._run}.{self._plans_made}", "late" if late else "fixed", offset, tuple(pieces))
        if pieces:
            self._plans[plan.name] = _PlanClaims(plan)
            self._concurrent.append(0)
            self._forget(offset.seq)
        return plan

    def claim(self, plan: str, task: int, executor: str) -> PlannedPiece | str:
        """The piece of task number ``task`` of a plan, which now runs on ``executor``; or the reason why there is none:
        the task is in no plan."""
        claims = self._plans.get(plan)
        if claims is None:
            return (
                f"plan {plan!r} is another run's, of an earlier batch, or older than the last {PLANS_MAX} plans of run "
                f"{self._run!r}"
            )
        if not 0 <= task < len(claims.plan.pieces):
            return f"plan {plan!r} has {len(claims.plan.pieces)} tasks, and none with number {task}"
        self._running.add((plan, task, executor))
        self._concurrent[-1] = max(self._concurrent[-1], len(self._running))
        return claims.claim(task, executor)

    def ended(self, plan: str, task: int, executor: str) -> None:
        """A task that had claimed ended on this executor, successfully or not."""
        self._running.discard((plan, task, executor))

    def plan(self, name: str) -> TaskPlan | None:
        """The plan with this name, if it is still kept."""
        claims = self._plans.get(name)
        return claims.plan if claims else None

    def _all_tasks_claimed(self, offset: StreamOffset) -> bool:
        """Whether every task of the last batch that had tasks claimed. A plan without any claim was not executed."""
        others = [claims for claims in self._plans.values() if claims.plan.offset.seq != offset.seq]
        if not others:
            return False
        last = others[-1].plan.offset.seq
        executed = [claims for claims in others if claims.plan.offset.seq == last and claims.piece_of]
        return bool(executed) and all(len(claims.piece_of) == len(claims.plan.pieces) for claims in executed)

    def _forget(self, seq: int) -> None:
        """Forget the oldest plans, and tasks of earlier batches whose end was not reported."""
        batches = [claims.plan.offset.seq for claims in self._plans.values()]
        kept = {seq, *[other for other in batches if other != seq][-1:]}
        outdated = [name for name, batch in zip(self._plans, batches, strict=True) if batch not in kept]
        for name in outdated or list(self._plans)[:-PLANS_MAX]:
            del self._plans[name]
        current = {name for name, claims in self._plans.items() if claims.plan.offset.seq == seq}
        self._running = {task for task in self._running if task[0] in current}


class _PlanClaims:
    """The claims of one plan."""

    def __init__(self, plan: TaskPlan) -> None:
        self.plan = plan
        self.piece_of: dict[int, int] = {}
        """By task, the index of the piece that it claimed."""
        self._free: dict[str, deque[int]] = {}
        """By executor, the pieces that no task claimed, the largest first."""
        self._free_records: dict[str, int] = {}
        """By executor, the size of those pieces, in offsets."""
        for number, piece in enumerate(plan.pieces):
            self._free.setdefault(piece.executor, deque()).append(number)
            self._free_records[piece.executor] = self._free_records.get(piece.executor, 0) + piece.size

    def claim(self, task: int, executor: str) -> PlannedPiece:
        if task not in self.piece_of:
            self.piece_of[task] = task if self.plan.binding == "fixed" else self._next_for(executor)
        return self.plan.pieces[self.piece_of[task]]

    def _next_for(self, executor: str) -> int:
        """The executor's own piece; else one that no executor has buffered; else one of the executor with the most free
        records. There are as many pieces as tasks, so there is one."""
        source = next((name for name in (executor, "") if name in self._free), None)
        if source is None:
            source = max(self._free_records, key=self._free_records.__getitem__)
        number = self._free[source].popleft()
        self._free_records[source] -= self.plan.pieces[number].size
        if not self._free[source]:
            del self._free[source], self._free_records[source]
        return number


# --- splitting ------------------------------------------------------------------------------------------------------


def split_by_executor(
    ranges: Sequence[OffsetRange],
    placed: Mapping[TopicPartition, str],
    *,
    width: int,
    min_partitions: int | None = None,
    max_records: int | None = None,
) -> list[PlannedPiece]:
    """Split a batch into the pieces of a late plan, the largest first. Every offset is in exactly one piece.

    The partitions of each executor are packed separately, as by :func:`planner.pack`. Large ranges are split so that
    they keep ``width`` tasks busy, but not into pieces that are too small for a task.

    Args:
        ranges: in any order.
        placed: by partition, the executor on whose agent its member is placed, if it is.
        width: how many tasks can run at the same time, as far as known.
        min_partitions: the least number of pieces, if there are that many offsets.
        max_records: the largest size of a piece, in offsets.
    """
    by_executor: dict[str, list[OffsetRange]] = {}
    for r in ranges:
        if r.size > 0:
            by_executor.setdefault(placed.get(r.tp, ""), []).append(r)
    total = sum(r.size for own in by_executor.values() for r in own)
    width = max(width, len(by_executor.keys() - {""}))
    share = max(TASK_RECORDS_TARGET, -(-total // (PIECES_PER_TASK * width)))
    pieces = []
    for executor, own in sorted(by_executor.items()):
        wanted = min_partitions and -(-min_partitions * sum(r.size for r in own) // total)
        # Split once: pieces of pieces may be so small that two of one partition fit into one task.
        parts = split_at_most(own, min(share, max_records or share))
        tasks = pack(parts, min_partitions=wanted, max_records=max_records)
        pieces += [PlannedPiece(tuple(task), executor) for task in tasks]
    few = max(min(width, SMALL_PIECES_MAX), min_partitions or 0)
    pieces = _merge_small(pieces, few, max_records)
    pieces.sort(key=lambda piece: -piece.size)  # stable
    return pieces


def _merge_small(pieces: list[PlannedPiece], few: int, max_records: int | None) -> list[PlannedPiece]:
    """Merge pairs of small pieces, the smallest first, while there are more than ``few`` pieces.

    A merged piece counts as buffered by the executor of its larger part.
    """
    heap = [(piece.size, number, piece) for number, piece in enumerate(pieces) if _is_small(piece)]
    heapq.heapify(heap)
    kept = [piece for piece in pieces if not _is_small(piece)]
    number = len(pieces)
    while len(heap) > 1 and len(kept) + len(heap) > few:
        size, _, least = heapq.heappop(heap)
        more, _, next_one = heapq.heappop(heap)
        fits = max_records is None or size + more <= max_records
        if not fits or {r.tp for r in least.ranges} & {r.tp for r in next_one.ranges}:
            kept.append(least)  # merging it with any other exceeds the limit too, or a partition would occur twice
            heapq.heappush(heap, (more, number, next_one))
        else:
            both = PlannedPiece(tuple(sorted((*least.ranges, *next_one.ranges))), next_one.executor)
            if _is_small(both):
                heapq.heappush(heap, (both.size, number, both))
            else:
                kept.append(both)
        number += 1
    return kept + [piece for _, _, piece in heap]


def _is_small(piece: PlannedPiece) -> bool:
    return piece.size * 2 <= TASK_RECORDS_TARGET and len(piece.ranges) * 2 <= TASK_RANGES_TARGET
