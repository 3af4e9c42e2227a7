"""The next offset: which ranges a batch reads, and everything else that the checkpoint has to remember; and into how
many tasks the ranges go.

Runs in: the stream reader, tests, benchmarks. Deliberately absent: where partitions stand and who has them
(``machine``), what the brokers say (``loss``), and when a batch is planned. This is the only place that makes
a :class:`StreamOffset`.
"""

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from spark_group_source.errors import InvariantBroken, OptionError
from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.protocol.offsets import StreamOffset
from spark_group_source.protocol.rules import Rules

if TYPE_CHECKING:
    from spark_group_source.protocol.run import Run

TASK_RECORDS_TARGET: Final = 50_000
"""Small ranges share a task up to about this many offsets: a task costs some 10 ms before it reads its first record,
which is little beside reading this many."""
TASK_RANGES_TARGET: Final = 250
"""Small ranges share a task up to about this many: opening a range costs time even when it holds one record."""

TASKS_MAX: Final = 1_000_000
"""More tasks than this in one batch is a wrong setting, and would exhaust the driver before it started."""


class Planner:
    """Cuts the batches of one run.

    Args:
        rules: the limits.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._planned_at_ms: int | None = None
        self._target: Mapping[TopicPartition, int] | None = None

    def take_target(self, ends: Mapping[TopicPartition, int]) -> None:
        """Fix where an AvailableNow run ends; partitions that are not among them are left for the next one."""
        self._target = ends

    @property
    def bounded(self) -> bool:
        """Whether this run has a target."""
        return self._target is not None

    def cut(
        self,
        machine: "Run",
        ends: Mapping[TopicPartition, int],
        topic_ids: Mapping[str, str],
        leader_epochs: Callable[[Mapping[TopicPartition, int]], dict[TopicPartition, int]],
        *,
        first: bool,
        unlimited: bool,
        now_ms: int,
    ) -> StreamOffset | None:
        """The next batch, or None when there is nothing to read (or not enough yet).

        The first batch of a stream is planned even when it reads nothing: it carries the stream's id and start
        positions into the checkpoint. A partition whose end was not told reads nothing, but its position is written
        down like all others.

        Args:
            machine: who has which partition, and where it stands.
            ends: up to where each may be read; who is missing was not answered.
            topic_ids: of the topics whose records were looked at.
            leader_epochs: those to write down, for positions.
            first: this is the first batch of the stream.
            unlimited: Trigger.Once, which takes all there is.
        """
        positions = machine.plannable()
        if self._target is not None:
            ends = {tp: min(end, self._target.get(tp, positions.get(tp, end))) for tp, end in ends.items()}
        backlogs = {tp: (at, max(at, ends.get(tp, at))) for tp, at in positions.items()}
        total = sum(end - at for at, end in backlogs.values())
        if not (total or first) or not self._enough(total, unlimited=unlimited, now_ms=now_ms):
            return None
        limit = None if unlimited else self._rules.max_offsets
        until = cut(backlogs, limit, machine.seq + 1)
        self._planned_at_ms = now_ms
        known = machine.lookups.known
        read = {tp.topic for tp in until}
        followed = machine.positions.followed()
        owed = {tp: at for tp, at in machine.positions.owed().items() if tp not in until}
        return StreamOffset(
            group=self._rules.group,
            stream=machine.stream,
            seq=machine.seq + 1,
            topic_ids={topic: id_ for topic, id_ in topic_ids.items() if topic in known or topic in read},
            known=known,
            ranges={tp: (backlogs[tp][0], end) for tp, end in until.items()},
            epoch=machine.positions.epoch,
            followed=followed & until.keys() if followed else followed,
            began=frozenset(machine.lookups.began & until.keys()),
            leader_epochs=leader_epochs(positions),
            cut={tp: at for tp, at in machine.positions.cut().items() if tp in until},
            lost={tp: at for tp, at in machine.positions.lost().items() if tp in until},
            owed=owed,
            since=machine.positions.since(owed),
        )

    def _enough(self, total: int, *, unlimited: bool, now_ms: int) -> bool:
        floor = None if unlimited or self.bounded else self._rules.min_offsets
        first = self._planned_at_ms is None
        return enough(total, floor, self._planned_at_ms or 0, now_ms, self._rules.max_delay_ms, first)


# --- how much of the backlog, and into how many tasks ----------------------------------------------------------------


def cut(
    backlogs: Mapping[TopicPartition, tuple[int, int]], max_offsets: int | None, seq: int
) -> dict[TopicPartition, int]:
    """Share ``max_offsets`` fairly among the partitions that have a backlog.

    Every partition with a backlog gets an equal share; what one cannot use goes to the others. What is left over when
    the shares are equal, fewer offsets than partitions, goes one each in sorted order, beginning at another partition
    in each batch: the batch number says at which. So no partition starves behind a big one, nor behind its name: of n
    held partitions one with a backlog gets at least one offset within n batches.

    Args:
        backlogs: position and latest offset of every held partition. Where latest is not above position (also where
            the log shrank) nothing is taken; judging that is not done here.
        max_offsets: at least 1, or None for no limit.
        seq: the number of the batch.

    Returns:
        For every partition of ``backlogs`` the offset up to which to read, position <= until <= latest. The sum of what
        is taken is ``max_offsets``, or the whole backlog when that is smaller.
    """
    if max_offsets is not None and max_offsets < 1:
        raise InvariantBroken(f"a batch of at most {max_offsets} offsets was asked for", max_offsets=max_offsets)
    sizes = {tp: latest - position for tp, (position, latest) in backlogs.items() if latest > position}
    until = {tp: max(position, latest) for tp, (position, latest) in backlogs.items()}
    if max_offsets is None or sum(sizes.values()) <= max_offsets:
        return until
    share, spare = _water_level(sizes.values(), max_offsets)
    unsatisfied = sorted(tp for tp, size in sizes.items() if size > share)
    first = bisect_left(unsatisfied, _turn(backlogs, seq * max_offsets)) if spare else 0
    for i, tp in enumerate(unsatisfied[first:] + unsatisfied[:first]):
        until[tp] = backlogs[tp][0] + share + (i < spare)
    return until


def _turn(backlogs: Iterable[TopicPartition], at: int) -> TopicPartition:
    """The one at this place, where the sorted partitions stand in a circle."""
    everyone = sorted(backlogs)
    return everyone[at % len(everyone)]


def _water_level(sizes: Iterable[int], amount: int) -> tuple[int, int]:
    """The share of those that want more than it, and what is left over (less than their number).

    ``amount`` is below the sum of ``sizes``, so somebody always wants more.
    """
    ascending = sorted(sizes)
    for served, size in enumerate(ascending):
        share, spare = divmod(amount, len(ascending) - served)
        if size > share:
            return share, spare
        amount -= size
    raise InvariantBroken("a limit above the backlog reached the fair cut", left=amount)


def enough(
    total_backlog: int, min_offsets: int | None, last_batch_ms: int, now_ms: int, max_delay_ms: int, first: bool
) -> bool:
    """Whether a batch should be planned now, or wait for ``min_offsets``.

    The first batch of a run never waits, and no batch waits longer than ``max_delay_ms`` after the last one. A trigger
    that takes all that is available passes ``min_offsets=None``.

    Args:
        total_backlog: offsets that could be read now, over all held partitions.
        min_offsets: None means no waiting.
        last_batch_ms: when the last batch was planned, on the clock of ``now_ms``; not used when ``first``.
        max_delay_ms: the longest wait.
        first: no batch was planned yet in this run.
    """
    if first or min_offsets is None or total_backlog >= min_offsets:
        return True
    return now_ms - last_batch_ms >= max_delay_ms


def pack(
    ranges: Sequence[OffsetRange], *, min_partitions: int | None, max_records: int | None
) -> list[list[OffsetRange]]:
    """Put the ranges of a batch into tasks: every offset into exactly one, empty ranges into none.

    A big range has a task of its own; small ones share tasks of about :data:`TASK_RECORDS_TARGET` offsets and
    :data:`TASK_RANGES_TARGET` ranges, the longest first into the emptiest task. A range is split only when one of the
    options asks for it, into equal pieces with the remainder in the last ones.

    Args:
        ranges: in any order; the order does not change the result.
        min_partitions: at least this many tasks, if there are that many offsets; the largest ranges are split.
        max_records: no task gets more offsets than this; at least 1.

    Returns:
        One list per task, big tasks first, each sorted by partition. No task has a partition twice: two pieces of one
        exceed ``max_records`` together, and pieces that ``min_partitions`` makes get tasks of their own.

    Raises:
        OptionError: ``max_records`` would need more than :data:`TASKS_MAX` tasks.
    """
    pieces = sorted(r for r in ranges if r.size > 0)
    if max_records is not None:
        pieces = split_at_most(pieces, max_records)
    if min_partitions is not None and len(pieces) < min_partitions:
        pieces = _split_largest(pieces, min_partitions)
    pieces.sort(key=lambda r: -r.size)  # stable: equal sizes stay in the order of partitions
    # Above half of the target, two would not fit into one task.
    small_at = next((i for i, r in enumerate(pieces) if r.size * 2 <= TASK_RECORDS_TARGET), len(pieces))
    big, small = pieces[:small_at], pieces[small_at:]
    shared = max(
        -(-sum(r.size for r in small) // TASK_RECORDS_TARGET),
        -(-len(small) // TASK_RANGES_TARGET),
        (min_partitions or 0) - len(big),
    )
    return [[r] for r in big] + _balance(small, min(shared, len(small)), max_records)


def split_at_most(ranges: Sequence[OffsetRange], max_records: int) -> list[OffsetRange]:
    """Ranges of more than ``max_records`` offsets as equal pieces of at most that.

    Raises:
        OptionError: that would be more than :data:`TASKS_MAX`.
    """
    wanted = [-(-r.size // max_records) for r in ranges]
    if sum(wanted) > TASKS_MAX:
        raise OptionError(
            f"option 'maxRecordsPerPartition' is {max_records}; the batch of {sum(r.size for r in ranges)} offsets "
            f"would be {sum(wanted)} tasks, and {TASKS_MAX} are the most. Raise it, or set maxOffsetsPerTrigger",
            option="maxRecordsPerPartition",
        )
    return [piece for r, parts in zip(ranges, wanted, strict=True) for piece in _split(r, parts)]


def _split(r: OffsetRange, parts: int) -> list[OffsetRange]:
    """Equal pieces, whose sizes differ by at most 1, the larger ones last."""
    if parts == 1:
        return [r]
    pieces = []
    start = r.start
    for left in range(parts, 0, -1):
        end = start + (r.end - start) // left
        pieces.append(OffsetRange(r.tp, start, end))
        start = end
    return pieces


def _split_largest(ranges: list[OffsetRange], wanted: int) -> list[OffsetRange]:
    """Always give one more piece to the range whose pieces are largest, until there are ``wanted`` pieces."""
    if sum(r.size for r in ranges) <= wanted:
        return [piece for r in ranges for piece in _split(r, r.size)]
    parts = [1] * len(ranges)
    # Negative sizes make a heap of largest first; dividing them rounds the size of the largest piece up.
    heap = [(-r.size, i) for i, r in enumerate(ranges)]
    heapq.heapify(heap)
    for _ in range(wanted - len(ranges)):
        _, i = heap[0]
        parts[i] += 1
        heapq.heapreplace(heap, (-ranges[i].size // parts[i], i))
    return [piece for r, n in zip(ranges, parts, strict=True) for piece in _split(r, n)]


def _balance(descending: list[OffsetRange], tasks: int, max_records: int | None) -> list[list[OffsetRange]]:
    """Each range into the emptiest task; a further task is opened where even that one would get too much."""
    bins: list[list[OffsetRange]] = [[] for _ in range(tasks)]
    heap = [(0, i) for i in range(tasks)]
    for r in descending:
        load, i = heap[0]
        if max_records is not None and load + r.size > max_records:
            bins.append([r])
            heapq.heappush(heap, (r.size, len(bins) - 1))
        else:
            bins[i].append(r)
            heapq.heapreplace(heap, (load + r.size, i))
    return [sorted(task) for task in bins]
