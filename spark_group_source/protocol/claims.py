"""Which task reads what: the pieces of a plan, and who claimed them.

Runs in: the stream reader, tests, benchmarks. Deliberately absent: the channel on which tasks ask, and what they read.

A plan's binding is **fixed** or **late**. Fixed: task i reads piece i, and asks only so that we know that it could.
Late: a task reads what it is given when it asks; it is asked for when it starts, so that executors that are free take
more, and each takes first what its own agent has in memory. A plan is late when every task of the batch before asked:
only then may a task be sent out that cannot read a row without an answer.

A piece belongs to (plan, task index) for ever: a retry, a speculative twin, a second action and a stage that is run
again have the same answer. So each offset of a plan is read by exactly one task index, whatever was asked in whatever
order.
"""

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.protocol.offsets import StreamOffset
from spark_group_source.protocol.planner import TASK_RANGES_TARGET, TASK_RECORDS_TARGET, pack, split_at_most

PLANS_KEPT: Final = 4
"""Former plans whose tasks may still ask. A batch has one plan for each time that its query names the stream; those of
the batch before are asked for only by tasks that nobody waits for."""
PIECES_A_TASK: Final = 2
"""A large range is cut into this many pieces for each task that can run at once: whoever is done first takes another.
It is also how the number of such tasks is found: twice as many as ever ran together show whether more can."""
WIDTH_PLANS: Final = 10
"""Plans for which it is remembered how many tasks ran together: executors may go."""
SMALL_PIECES_MAX: Final = 32
"""Small pieces that are kept apart so that each is read on the executor that has it in memory. Beyond that the smallest
are read together: to start a task costs more than to read few records from a broker."""

Binding = Literal["fixed", "late"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one task reads, sorted. ``executor``: the one that has most of it in memory, or "" for none."""

    ranges: tuple[OffsetRange, ...]
    executor: str = ""

    @property
    def size(self) -> int:
        return sum(r.size for r in self.ranges)


@dataclass(frozen=True, slots=True)
class Plan:
    """A batch as it is handed to Spark: one task for each piece."""

    name: str
    binding: Binding
    offset: StreamOffset
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Unknown:
    """A claim that cannot be answered, and why."""

    reason: str


class Claims:
    """The plans of one run, and the claims to their pieces.

    Args:
        run: a name that no other run has; those of the plans begin with it.
        min_partitions, max_records: the options of these meanings, as in :func:`plan.pack`.
    """

    def __init__(self, run: str, *, min_partitions: int | None = None, max_records: int | None = None) -> None:
        self._run, self._min_partitions, self._max_records = run, min_partitions, max_records
        self._made = 0
        self._books: dict[str, _Book] = {}
        self._running: set[tuple[str, int, str]] = set()
        self._together: deque[int] = deque([0], maxlen=WIDTH_PLANS)

    @property
    def width(self) -> int:
        """How many tasks ran together, the most in the last plans."""
        return max(1, *self._together)

    def cut(self, offset: StreamOffset, lent: Mapping[TopicPartition, str]) -> Plan:
        """Make the plan of the batch that ends at ``offset``; asked again, a further plan of the same batch.

        Args:
            offset: the batch.
            lent: the executor at which a partition is held, where one is.
        """
        ranges = offset.batch()
        late = self._all_asked(offset)
        pieces = (
            cut_for(ranges, lent, width=self.width, min_partitions=self._min_partitions, max_records=self._max_records)
            if late
            else [
                Piece(tuple(task))
                for task in pack(ranges, min_partitions=self._min_partitions, max_records=self._max_records)
            ]
        )
        self._made += 1
        plan = Plan(f"{self._run}.{self._made}", "late" if late else "fixed", offset, tuple(pieces))
        if pieces:
            self._books[plan.name] = _Book(plan)
            self._together.append(0)
            self._forget(offset.seq)
        return plan

    def claim(self, plan: str, task: int, executor: str) -> Piece | Unknown:
        """What task number ``task`` of a plan reads, which now runs on ``executor``."""
        book = self._books.get(plan)
        if book is None:
            return Unknown(
                f"no plan {plan!r}: it is another run's, or older than the last {PLANS_KEPT} plans of run {self._run!r}"
            )
        if not 0 <= task < len(book.plan.pieces):
            return Unknown(f"plan {plan!r} has {len(book.plan.pieces)} tasks, and none with number {task}")
        self._running.add((plan, task, executor))
        self._together[-1] = max(self._together[-1], len(self._running))
        return book.claim(task, executor)

    def ended(self, plan: str, task: int, executor: str) -> None:
        """A task that had claimed ended there, in any way."""
        self._running.discard((plan, task, executor))

    def plan(self, name: str) -> Plan | None:
        """One that is still kept."""
        book = self._books.get(name)
        return book.plan if book else None

    def _all_asked(self, offset: StreamOffset) -> bool:
        """Whether every task of the last batch that had any asked. A plan of which no task did was not run."""
        others = [book for book in self._books.values() if book.plan.offset.seq != offset.seq]
        if not others:
            return False
        last = others[-1].plan.offset.seq
        asked = [book for book in others if book.plan.offset.seq == last and book.given]
        return bool(asked) and all(len(book.given) == len(book.plan.pieces) for book in asked)

    def _forget(self, seq: int) -> None:
        """The oldest plans, and tasks of former batches that nobody saw end."""
        while len(self._books) > PLANS_KEPT:
            del self._books[next(iter(self._books))]
        now = {name for name, book in self._books.items() if book.plan.offset.seq == seq}
        self._running = {task for task in self._running if task[0] in now}


class _Book:
    """The claims of one plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.given: dict[int, int] = {}
        """Task to piece."""
        self._free: dict[str, deque[int]] = {}
        self._left: dict[str, int] = {}
        for number, piece in enumerate(plan.pieces):
            self._free.setdefault(piece.executor, deque()).append(number)
            self._left[piece.executor] = self._left.get(piece.executor, 0) + piece.size
        self._most = [(-left, who) for who, left in self._left.items()]
        heapq.heapify(self._most)

    def claim(self, task: int, executor: str) -> Piece:
        if task not in self.given:
            self.given[task] = task if self.plan.binding == "fixed" else self._next_for(executor)
        return self.plan.pieces[self.given[task]]

    def _next_for(self, executor: str) -> int:
        """Its own; else what nobody has in memory; else of who has most left to read. There are as many pieces as
        tasks, so that there is one."""
        whose = next((who for who in (executor, "") if who in self._free), None)
        if whose is None:
            whose = self._who_has_most()
        number = self._free[whose].popleft()
        self._left[whose] -= self.plan.pieces[number].size
        if self._free[whose]:
            heapq.heappush(self._most, (-self._left[whose], whose))
        else:
            del self._free[whose], self._left[whose]
        return number

    def _who_has_most(self) -> str:
        while True:
            left, who = self._most[0]
            if self._left.get(who) == -left:
                return who
            heapq.heappop(self._most)  # it was more then


# --- cutting --------------------------------------------------------------------------------------------------------


def cut_for(
    ranges: Sequence[OffsetRange],
    lent: Mapping[TopicPartition, str],
    *,
    width: int,
    min_partitions: int | None = None,
    max_records: int | None = None,
) -> list[Piece]:
    """The pieces of a late plan, the largest first: every offset in exactly one.

    What one executor has is packed by itself, as :func:`plan.pack` packs. Large ranges are split, so that they
    keep ``width`` tasks busy, but not below what a task is worth.

    Args:
        ranges: in any order.
        lent: the executor at which a partition is held, where one is.
        width: how many tasks can run at the same time, as far as is known.
        min_partitions: at least this many pieces, if there are that many offsets.
        max_records: no piece has more offsets than this.
    """
    whose: dict[str, list[OffsetRange]] = {}
    for r in ranges:
        if r.size > 0:
            whose.setdefault(lent.get(r.tp, ""), []).append(r)
    total = sum(r.size for ours in whose.values() for r in ours)
    width = max(width, len(whose.keys() - {""}))
    share = max(TASK_RECORDS_TARGET, -(-total // (PIECES_A_TASK * width)))
    pieces = []
    for executor, ours in sorted(whose.items()):
        wanted = min_partitions and -(-min_partitions * sum(r.size for r in ours) // total)
        tasks = pack(split_at_most(ours, share), min_partitions=wanted, max_records=max_records)
        pieces += [Piece(tuple(task), executor) for task in tasks]
    few = max(min(width, SMALL_PIECES_MAX), min_partitions or 0)
    pieces = _put_together(pieces, few, max_records)
    pieces.sort(key=lambda piece: -piece.size)  # stable
    return pieces


def _put_together(pieces: list[Piece], few: int, max_records: int | None) -> list[Piece]:
    """Two small pieces become one, the smallest first, while there are more than ``few``.

    What comes out counts as the executor's that has more of it.
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
            kept.append(least)  # with any other it would be even more; and no piece has a partition twice
            heapq.heappush(heap, (more, number, next_one))
        else:
            both = Piece(tuple(sorted((*least.ranges, *next_one.ranges))), next_one.executor)
            if _is_small(both):
                heapq.heappush(heap, (both.size, number, both))
            else:
                kept.append(both)
        number += 1
    return kept + [piece for _, _, piece in heap]


def _is_small(piece: Piece) -> bool:
    return piece.size * 2 <= TASK_RECORDS_TARGET and len(piece.ranges) * 2 <= TASK_RANGES_TARGET
