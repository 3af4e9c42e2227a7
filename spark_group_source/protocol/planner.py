"""The plan of a batch: which ranges it reads, what else the checkpoint must contain, and how the ranges are packed into
tasks.

Runs in: the stream reader, tests, benchmarks. Deliberately absent: positions and members (``run``), and log ends
(``data_loss``). Only this module creates a :class:`StreamOffset` of a batch; the run
adds up to where its log was read.
"""

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from spark_group_source.errors import InvariantBroken, OptionError
from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.protocol.offsets import StreamOffset
from spark_group_source.protocol.rules import Rules

if TYPE_CHECKING:
    from spark_group_source.protocol.events import TaskReported
    from spark_group_source.protocol.lookups import PositionLookups
    from spark_group_source.protocol.partitions import Partitions

TASK_RECORDS_TARGET: Final = 50_000
"""Small ranges share a task up to about this many offsets. A task costs some 10 ms before it reads its first record,
which is little compared to reading this many."""
TASK_RANGES_TARGET: Final = 250
"""Small ranges share a task up to about this many ranges: opening a range costs time even for one record."""

TASK_RANGES_MAX: Final = 1_000
"""No task gets more ranges than this. The response to its claim then fits into one message of the control channel, even
if each range is of another topic with the longest name that Kafka permits: 875 bytes a range."""

ASSUMED_RECORD_BYTES: Final = 1 << 20
"""The size of a record of a topic that no task of this run has read, for ``maxBytesPerTrigger``. Kafka's default limit
of a record batch: a first batch exceeds the limit only where larger batches were allowed, or they are compressed."""

TASKS_MAX: Final = 1_000_000
"""The most tasks of one batch. More indicates a wrong setting, and would exhaust the driver before the batch starts."""


class RecordSizes:
    """The mean size of each topic's records, from the reports of the newest batch that read the topic. Kept in memory
    only: a run starts with :data:`ASSUMED_RECORD_BYTES`."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[int, int, int]] = {}
        """By topic: the batch, and the bytes and rows that its tasks reported so far."""

    def add(self, event: "TaskReported") -> None:
        """Add what a task read. Attempts that read the same records do not change a mean."""
        rows = Counter[str]()
        for counts in (event.counts.rows_from_memory, event.counts.rows_from_brokers):
            for tp, count in counts.items():
                rows[tp.topic] += count
        for topic, size in event.counts.bytes.items():
            seq, known_size, known_rows = self._read.get(topic, (event.seq, 0, 0))
            if event.seq > seq:
                known_size, known_rows = 0, 0
            if event.seq >= seq and rows[topic]:
                self._read[topic] = event.seq, known_size + size, known_rows + rows[topic]

    def of(self, topic: str) -> int:
        """The mean size of a record in bytes, at least 1."""
        if topic not in self._read:
            return ASSUMED_RECORD_BYTES
        _, size, rows = self._read[topic]
        return max(1, -(-size // rows))


class Planner:
    """Plans the batches of one run."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._planned_at_ms: int | None = None
        """When the last batch was planned; None before the run's first."""
        self.target: Mapping[TopicPartition, int] | None = None
        """Up to where an AvailableNow run reads; partitions that are not in it are left to the next run. None for other
        triggers."""
        self.left = 0
        """The offsets up to the log ends or the target that the last batch left because of the limits of a batch."""
        self._turn: int | None = None
        """The index of the partition whose turn comes next; None before the run's first limited batch."""
        self.record_sizes = RecordSizes()

    def plan(
        self,
        positions: dict[TopicPartition, int],
        ends: Mapping[TopicPartition, int],
        topic_ids: Mapping[str, str],
        leader_epochs: Callable[[Mapping[TopicPartition, int]], dict[TopicPartition, int]],
        *,
        stream: str,
        partitions: "Partitions",
        lookups: "PositionLookups",
        first: bool,
        unlimited: bool,
        now_ms: int,
    ) -> StreamOffset | None:
        """Plan the next batch. Returns None if there is nothing to read, or not enough yet.

        The first batch of a stream is planned even if it reads nothing: it brings the stream id and the start positions
        into the checkpoint. A partition whose end is unknown reads nothing, but its position is in the plan like all
        others. ``minOffsetsPerTrigger`` and :attr:`left` count all offsets up to the ends, whatever the limits are.

        Args:
            positions: the position of every partition that the batch may read.
            ends: up to where each partition may be read; missing if no broker answered.
            topic_ids: the ids of the topics whose log ends were read.
            leader_epochs: returns the leader epochs to store with these positions.
            stream, partitions, lookups: of the run that has the positions.
            unlimited: whether the trigger is Once, which reads everything available.
        """
        # how much to read
        if self.target is not None:
            ends = {tp: min(end, self.target.get(tp, positions.get(tp, end))) for tp, end in ends.items()}
        backlogs = {tp: (at, max(at, ends.get(tp, at))) for tp, at in positions.items()}
        total = sum(end - at for at, end in backlogs.values())
        if not (total or first) or not self._is_worthwhile(total, unlimited=unlimited, now_ms=now_ms):
            return None
        limit = None if unlimited else self._limit(backlogs)
        until = fair_share(backlogs, limit, self._next_turn(limit, partitions.seq + 1))
        self._planned_at_ms = now_ms
        self.left = total - sum(end - backlogs[tp][0] for tp, end in until.items())
        # what the checkpoint stores besides
        known = lookups.known
        jumps = {tp: at for tp, at in partitions.jumps().items() if tp in until}
        durable_to = partitions.durable_to()
        elsewhere = partitions.uncommitted() | {
            tp: at for tp in durable_to if (at := partitions.reached(tp)) is not None
        }
        uncommitted = {tp: at for tp, at in elsewhere.items() if tp not in until}
        named = known.keys() | {tp.topic for tp in (*until, *uncommitted)}
        return StreamOffset(
            group=self._rules.group,
            stream=stream,
            seq=partitions.seq + 1,
            topic_ids={topic: id_ for topic, id_ in topic_ids.items() if topic in named},
            known=known,
            ranges={tp: (backlogs[tp][0], end) for tp, end in until.items()},
            reset_number=partitions.reset_number,
            followed=frozenset(tp for tp, at in jumps.items() if at.followed),
            started=frozenset(lookups.started & (until.keys() | uncommitted.keys())),
            behind=partitions.behind(),
            leader_epochs=leader_epochs(positions | uncommitted),
            truncated_after=partitions.truncated([*jumps, *uncommitted]),
            lost_from={tp: at.lost_from for tp, at in jumps.items() if at.lost_from is not None},
            durable_to=durable_to,
            uncommitted=uncommitted,
            last_batches=partitions.last_batches(uncommitted),
        )

    def _limit(self, backlogs: Mapping[TopicPartition, tuple[int, int]]) -> int | None:
        """The most offsets of the batch by both limits; None: no limit."""
        rules = self._rules
        limits = [] if rules.max_offsets is None else [rules.max_offsets]
        if rules.max_bytes is not None:
            limits.append(offsets_within(backlogs, self.record_sizes.of, rules.max_bytes))
        return min(limits, default=None)

    def _next_turn(self, limit: int | None, seq: int) -> int:
        """The partition at which the remainder starts: behind those that the last batch served. A run's first batch
        takes it from the number of the batch, so that runs of one batch serve others, too."""
        turn = seq * (limit or 0) if self._turn is None else self._turn
        if limit is not None:
            self._turn = turn + limit
        return turn

    def _is_worthwhile(self, total: int, *, unlimited: bool, now_ms: int) -> bool:
        """Whether to plan a batch now instead of waiting for ``minOffsetsPerTrigger``. Triggers that read everything
        available do not wait, nor does the first batch of a run, and no batch waits longer than ``max_delay_ms`` after
        the one before."""
        min_offsets = self._rules.min_offsets
        if unlimited or self.target is not None or self._planned_at_ms is None or min_offsets is None:
            return True
        return total >= min_offsets or now_ms - self._planned_at_ms >= self._rules.max_delay_ms


# --- how much of the backlog, and into how many tasks ----------------------------------------------------------------


def fair_share(
    backlogs: Mapping[TopicPartition, tuple[int, int]], max_offsets: int | None, turn: int
) -> dict[TopicPartition, int]:
    """Share ``max_offsets`` fairly among the partitions that have a backlog.

    Each partition with a backlog gets an equal share; what a smaller backlog does not use is shared among the others.
    What remains, fewer offsets than partitions, is given one each in sorted order, starting at ``turn``. So neither a
    large backlog nor the sort order starves a partition: of n assigned partitions, one with a backlog gets at least one
    offset within n batches, if ``turn`` grows by the ``max_offsets`` of each of them.

    Args:
        backlogs: position and end offset of each assigned partition. A partition whose end is not above its position
            gets nothing (its log may have been truncated; that is not checked here).
        max_offsets: at least 1, or None for no limit.
        turn: the index of the partition at which the remainder starts, among the sorted ones, modulo their number.

    Returns:
        For each partition of ``backlogs`` the offset up to which to read, position <= until <= end. The sizes add up to
        ``max_offsets``, or to the whole backlog if that is smaller.
    """
    if max_offsets is not None and max_offsets < 1:
        raise InvariantBroken(f"a batch cannot be limited to {max_offsets} offsets", max_offsets=max_offsets)
    sizes = {tp: latest - position for tp, (position, latest) in backlogs.items() if latest > position}
    until = {tp: max(position, latest) for tp, (position, latest) in backlogs.items()}
    if max_offsets is None or sum(sizes.values()) <= max_offsets:
        return until
    share, spare = _equal_share(sizes.values(), max_offsets)
    unsatisfied = [tp for tp, size in sizes.items() if size > share]
    for tp in unsatisfied:
        until[tp] = backlogs[tp][0] + share
    if spare:
        unsatisfied.sort()
        first = bisect_left(unsatisfied, sorted(backlogs)[turn % len(backlogs)])
        for tp in (unsatisfied[first:] + unsatisfied[:first])[:spare]:
            until[tp] += 1
    return until


def offsets_within(
    backlogs: Mapping[TopicPartition, tuple[int, int]], record_bytes: Callable[[str], int], max_bytes: int
) -> int:
    """The most offsets that :func:`fair_share` may share so that their records have ``max_bytes`` at most.

    Compacted offsets and transaction markers count like records: a batch with many of them is smaller.

    Args:
        backlogs: position and end offset of each assigned partition.
        record_bytes: returns the size of a topic's record, at least 1.
        max_bytes: at least 1.

    Returns:
        At least 1, also if one record is larger than ``max_bytes``.
    """
    sizes = sorted((end - at, record_bytes(tp.topic)) for tp, (at, end) in backlogs.items() if end > at)
    bytes_left, each = max_bytes, sum(size for _, size in sizes)
    for backlog, size in sizes:  # a partition with a small backlog does not use its share
        if backlog * each > bytes_left:
            break
        bytes_left -= backlog * size
        each -= size
    else:
        return max(1, sum(backlog for backlog, _ in sizes))
    share = bytes_left // each
    if share:
        return sum(min(backlog, share) for backlog, _ in sizes)
    return max(1, max_bytes // max(size for _, size in sizes))  # less than a record for each partition


def _equal_share(sizes: Iterable[int], amount: int) -> tuple[int, int]:
    """The share of each partition whose backlog exceeds it, and the remainder (less than the number of such
    partitions).

    ``amount`` is below the sum of ``sizes``, so at least one backlog exceeds the share.
    """
    ascending = sorted(sizes)
    for served, size in enumerate(ascending):
        share, spare = divmod(amount, len(ascending) - served)
        if size > share:
            return share, spare
        amount -= size
    raise InvariantBroken("the limit of the batch is above its backlog", left=amount)


def pack(
    ranges: Sequence[OffsetRange], *, min_partitions: int | None, max_records: int | None
) -> list[list[OffsetRange]]:
    """Pack the ranges of a batch into tasks: every offset into exactly one, empty ranges into none.

    A large range gets its own task; small ones share tasks of about :data:`TASK_RECORDS_TARGET` offsets and
    :data:`TASK_RANGES_TARGET` ranges, the longest first into the emptiest task. A range is split only if one of the
    options requires it, into equal pieces with the remainder in the last ones.

    Args:
        ranges: in any order; the order does not change the result.
        min_partitions: at least this many tasks, if there are that many offsets; the largest ranges are split.
        max_records: no task gets more offsets than this; at least 1.

    Returns:
        One list per task, large tasks first, each sorted by partition. No task has a partition twice: two pieces of one
        partition exceed ``max_records`` together, and pieces for ``min_partitions`` get their own tasks.

    Raises:
        OptionError: ``max_records`` would need more than :data:`TASKS_MAX` tasks.
    """
    pieces = sorted(r for r in ranges if r.size > 0)
    if max_records is not None:
        pieces = split_at_most(pieces, max_records)
    if min_partitions is not None and len(pieces) < min_partitions:
        pieces = _split_largest(pieces, min_partitions)
    pieces.sort(key=lambda r: -r.size)  # stable: equal sizes stay in the order of partitions
    # Two ranges above half of the target do not fit into one task.
    small_at = next((i for i, r in enumerate(pieces) if r.size * 2 <= TASK_RECORDS_TARGET), len(pieces))
    big, small = pieces[:small_at], pieces[small_at:]
    shared = max(
        -(-sum(r.size for r in small) // TASK_RECORDS_TARGET),
        -(-len(small) // TASK_RANGES_TARGET),
        (min_partitions or 0) - len(big),
    )
    return [[r] for r in big] + _balance(small, min(shared, len(small)), max_records)


def split_at_most(ranges: Sequence[OffsetRange], max_records: int) -> list[OffsetRange]:
    """Split ranges of more than ``max_records`` offsets into equal pieces of at most that size.

    Raises:
        OptionError: that would be more than :data:`TASKS_MAX` pieces.
    """
    wanted, total = [-(-r.size // max_records) for r in ranges], sum(r.size for r in ranges)
    if sum(wanted) > TASKS_MAX:
        least = -(-total // max(1, TASKS_MAX - len(ranges)))
        raise OptionError(
            f"option 'maxRecordsPerPartition' is {max_records}, which splits the batch of "
            f"{total} offsets into {sum(wanted)} tasks; the limit is {TASKS_MAX}. The batch is planned and stays as it "
            f"is: set the option to {least} or more. maxOffsetsPerTrigger bounds later batches",
            option="maxRecordsPerPartition",
        )
    return [piece for r, parts in zip(ranges, wanted, strict=True) for piece in _split(r, parts)]


def _split(r: OffsetRange, parts: int) -> list[OffsetRange]:
    """Split a range into equal pieces: sizes differ by at most 1, the larger ones come last."""
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
    """Split the range with the largest pieces into one piece more, until there are ``wanted`` pieces."""
    if sum(r.size for r in ranges) <= wanted:
        return [piece for r in ranges for piece in _split(r, r.size)]
    parts = [1] * len(ranges)
    # Negative sizes order the heap by the largest; dividing them rounds the size of the largest piece up.
    heap = [(-r.size, i) for i, r in enumerate(ranges)]
    heapq.heapify(heap)
    for _ in range(wanted - len(ranges)):
        _, i = heap[0]
        parts[i] += 1
        heapq.heapreplace(heap, (-ranges[i].size // parts[i], i))
    return [piece for r, n in zip(ranges, parts, strict=True) for piece in _split(r, n)]


def _balance(descending: list[OffsetRange], tasks: int, max_records: int | None) -> list[list[OffsetRange]]:
    """Put each range into the emptiest task; open a further task if that one would exceed ``max_records`` or
    :data:`TASK_RANGES_MAX`."""
    bins: list[list[OffsetRange]] = [[] for _ in range(tasks)]
    heap = [(0, i) for i in range(tasks)]
    for r in descending:
        while heap and len(bins[heap[0][1]]) == TASK_RANGES_MAX:
            heapq.heappop(heap)
        if not heap or (max_records is not None and heap[0][0] + r.size > max_records):
            bins.append([r])
            heapq.heappush(heap, (r.size, len(bins) - 1))
        else:
            load, i = heap[0]
            bins[i].append(r)
            heapq.heapreplace(heap, (load + r.size, i))
    return [sorted(task) for task in bins]
