"""The partitions of a run: which are assigned, their positions, and which positions have to be committed.

Runs in: the stream reader, tests. Deliberately absent: why a slot has a partition (``slots``), requests to Kafka
(answers are passed in as values), and which change follows from which event (the table in ``states``).

The *position* of a partition is the next offset after all durable batches of the stream. It is a :class:`Position`
while it is known (adopting, ready, in flight). Before it is known, and after the partition is revoked, the run only
has a :class:`Memory` of it.

A batch that becomes durable while the position of one of its partitions is not known (the partition was revoked, or
just came back) is *pending*: it is applied to the committed offset, unless a foreign commit changed that. After a
foreign commit inside a batch of this stream, the partition continues at the foreign commit
(:meth:`Partitions.apply_committed`).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

from spark_group_source.errors import InvariantBroken
from spark_group_source.model import TopicPartition
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.offsets import RECREATED, StreamOffset
from spark_group_source.protocol.states import PARTITIONS, AnyCause, Cause, PartitionState, next_state, require_change
from spark_group_source.protocol.statistics import Statistics

RENEW_MS = 6 * 3_600_000
"""Age at which a committed offset is committed again, unchanged. While a query runs, the offsets of its topics do not
expire, however long a partition is idle. But in a KIP-848 group each offset expires by the time of its own last commit:
when the query stops, an offset that is older than the retention is deleted within minutes. The checkpoint restores it;
a query with a new checkpoint would start at ``startingOffsets``. This age is enough for every
``offsets.retention.minutes`` of at least 7 hours; the brokers' default is 7 days."""
RENEW_CHECK_MS = 600_000
"""Time between two checks of the age of the committed offsets."""

UNKNOWN_STATES = frozenset({PartitionState.UNRESOLVED, PartitionState.FETCHING, PartitionState.RESOLVING})
"""The states of :class:`Unknown`."""

Ranges = Mapping[TopicPartition, tuple[int, int]]

# --- one partition ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Position:
    """Where a partition is, or was when its position was last known."""

    offset: int
    """The next offset to read."""
    first: int
    """The first position in this assignment, or before a last batch that Kafka may not have. Without a committed
    offset, the next reader may start there."""
    followed: bool = False
    """Whether it comes from a commit that no stream made: by an operator or an ordinary consumer. Not while
    ``truncated_after`` is set."""
    truncated_after: int | None = None
    """If the log was truncated below the position before this one, or recreated with its topic: the last leader epoch
    that was known before that, or RECREATED, until an offset behind ``first`` is committed. Otherwise None."""
    noted_after: int | None = None
    """``truncated_after`` as it was in the last commit that was ordered."""
    lost_from: int | None = None
    """The position before records were found missing, until a batch moves the partition on; None: none are missing."""
    durable_to: int | None = None
    """If a foreign commit moved the partition back inside batches of this stream: the end of these batches, until
    another batch reads up to it. Another foreign commit below it is inside them, too. Otherwise None."""
    committed: int | None = None
    """The committed offset, under any name, as far as this run knows."""
    committed_ms: int | None = None
    """When ``committed`` was committed, on the run's clock; None if that is not known."""
    renews: bool = False
    """Whether ``committed`` is so old that it has to be committed again."""
    checkpoint_start: int | None = None
    """Where the last batch of the checkpoint started to read the partition, from the answer that made the position
    known until the partition is revoked: a reset may have voided that batch."""

    @property
    def is_due(self) -> bool:
        """Whether the position has to be committed, as far as the committed offset shows."""
        return self.committed != self.offset or self.renews

    @property
    def without_last_batch(self) -> int:
        """The position before the last batch of the checkpoint, which a reset may have voided."""
        return self.offset if self.checkpoint_start is None else self.checkpoint_start

    @property
    def uncommitted(self) -> int:
        """The number of offsets that are durable but not committed."""
        return max(0, self.offset - self._base)

    def unconfirmed(self, end: int) -> int:
        """The number of offsets that the next reader reads again, when this run has read up to ``end``."""
        return end - min(self.offset, self._base)

    @property
    def _base(self) -> int:
        return self.first if self.committed is None else self.committed


@dataclass(frozen=True, slots=True)
class LastBatch:
    """The last durable batch that a remembered position accounts for."""

    seq: int
    """The number of the batch; -1 before the first."""
    start: int | None = None
    """Where the batch started to read the partition; known from a checkpoint only."""
    replays_next: bool = False
    """Whether the batch after this one starts at the position and runs again."""


@dataclass(slots=True)
class Memory:
    """The last known position of a partition whose present position is not known."""

    position: Position
    last_batch: LastBatch
    pending: tuple[int, int] | None = None
    """The range of a batch that became durable while the position was not known."""

    @property
    def reached(self) -> int:
        """The end of what is durable, as far as this run knows."""
        offset = self.position.offset
        return offset if self.pending is None else after_batch(offset, self.pending)

    @property
    def without_last_batch(self) -> int:
        """The position before the last batch, as far as this run knows: a reset may have voided that batch."""
        return self.position.offset if self.last_batch.start is None else self.last_batch.start

    @property
    def durable_to(self) -> int | None:
        """:attr:`Position.durable_to`, with the pending batch."""
        return _still_ahead(self.position.durable_to, self.reached)

    def durable_beyond(self, committed: int) -> int | None:
        """The end of what is durable, if this committed offset is inside it: in the pending batch, or not below the
        last one that is known, as after an operator's move back. Otherwise None."""
        at = self.position
        start, end = self.pending or (0, 0)
        is_own = not at.followed and at.truncated_after is None
        is_inside = start <= committed < end or (is_own and at.offset - at.uncommitted <= committed)
        return _still_ahead(max(self.reached, at.durable_to or 0), committed) if is_inside else None


@dataclass(frozen=True, slots=True)
class VoidedMemory:
    """A reset of the group voided what was remembered. If the group never committed the partition, the reset could not
    move it, and it starts here."""

    without_last_batch: int


AnyMemory = Memory | VoidedMemory | None
"""None: this run and its checkpoint never had the partition, or its topic was recreated."""


def uncommitted_offset(memory: AnyMemory) -> int | None:
    """The end of what is durable, if Kafka may not have it as the committed offset of this stream."""
    if not isinstance(memory, Memory) or memory.position.committed == memory.reached:
        return None
    return memory.reached


# --- states ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Unassigned:
    """No slot of this run has the partition."""

    memory: AnyMemory = None


@dataclass(slots=True)
class Unknown:
    """Assigned, without a known position."""

    slot: int
    memory: AnyMemory
    state: PartitionState
    """UNRESOLVED: no lookup is in flight. FETCHING: the committed offset of the group is being read. RESOLVING: the
    group has none and the run has no memory, so the starting options are being resolved."""


@dataclass(slots=True)
class Known:
    """Assigned, with a known position: adopting, ready or in flight.

    Changed in place, because a batch can have 100,000 partitions.
    """

    slot: int
    position: Position
    is_new: bool = False
    """Whether Kafka does not have the position under this stream's name: it is a foreign commit, or Kafka has none. It
    is committed before the next batch reads the partition, so that whoever gets the partition starts there. Inside the
    batch in flight a foreign commit is adopted when that is durable: a commit of this stream from before the batch
    would mean that the batch comes after it."""
    until: int | None = None
    """The end of what the batch in flight reads; None if it does not read the partition."""

    @property
    def is_ready(self) -> bool:
        """Whether the next batch may read the partition."""
        return self.until is None and not self.is_new

    @property
    def is_due(self) -> bool:
        """Whether the position has to be committed now."""
        return self.until is None if self.is_new else self.position.is_due


AssignedPartition = Unknown | Known
"""A partition that a slot of this run has: every state but :class:`Unassigned`."""


# --- comparing positions ---------------------------------------------------------------------------------------------


def is_older(committed: ev.Committed, memory: Memory) -> bool:
    """Whether a commit of this stream was made before the remembered position was reached."""
    at, position, last = committed.offset, memory.position, memory.last_batch
    if committed.seq > last.seq or (committed.seq == last.seq and not last.replays_next):
        return False
    if committed.seq == last.seq:
        # The batch after it is to be run again. Between the two the position can have moved on, when records that were
        # to be read were missing. Any other commit below the position was made since.
        return at >= position.offset or at == position.lost_from
    # A run with a batch in flight continues where another stream or an operator moved the group meanwhile. Under this
    # stream's name that looks like an earlier commit; but it is below the start of that batch, and no batch of this
    # stream ended there.
    put_back = committed.seq == last.seq - 1 and last.start is not None and at < last.start
    return not put_back


def is_after_pending(committed: ev.Committed | None, memory: Memory) -> bool:
    """Whether a commit of this stream was made when the pending batch was durable, which is the one after the last: the
    commit accounts for it."""
    return committed is not None and committed.seq > memory.last_batch.seq


def _still_ahead(end: int | None, at: int) -> int | None:
    """An end that is behind this position; None if the position has reached it."""
    return None if end is None or end <= at else end


def after_batch(at: int, batch: tuple[int, int]) -> int:
    """The position after a batch, if it was ``at`` before: only a batch that covers ``at`` moves it."""
    start, end = batch
    return end if start <= at < end else at


# --- all partitions ---------------------------------------------------------------------------------------------------


class Partitions:
    """All partitions of one run."""

    def __init__(self, counts: Statistics) -> None:
        self._counts = counts
        self.seq = -1
        """Number of the last durable batch; -1 before the first."""
        self.reset_number = 0
        """The last reset of the group that this run knows of; 0: none."""
        self.ours: dict[TopicPartition, AssignedPartition] = {}
        """The partitions that slots of this run have."""
        self._unassigned: dict[TopicPartition, Unassigned] = {}  # those that the run or its checkpoint had before
        self._in_flight: Ranges = {}
        self._due: dict[TopicPartition, Position] = {}
        self.due: Mapping[TopicPartition, Position] = self._due
        """Positions of assigned partitions that have to be committed, in order. Only this class changes them."""
        self._unresolved: dict[TopicPartition, None] = {}
        self._lookups: Counter[TopicPartition] = Counter()  # in flight, maybe since an earlier assignment
        self._unknown_count = 0  # assigned partitions without a known position
        self._adopting_count = 0

    # --- assignment -------------------------------------------------------------------------------------------------

    def restore(self, offset: StreamOffset, *, replay: bool, uncommitted: bool) -> None:
        """Take over what a checkpoint knows.

        Args:
            offset: of the last batch.
            replay: that batch runs again, so positions are those before it.
            uncommitted: Kafka may not have the positions: no run is known to have committed all of them.
        """
        self.reset_number = offset.reset_number
        for tp, at in offset.uncommitted.items():  # the batch itself did not read these
            seq, start = offset.last_batches.get(tp, (offset.seq - 1, None))
            first = at - offset.behind.get(tp, 0) if uncommitted else at
            truncated_after, durable_to = offset.truncated_after.get(tp), offset.durable_to.get(tp)
            position = Position(at, first, truncated_after=truncated_after, durable_to=durable_to)
            self._unassigned[tp] = Unassigned(Memory(position, LastBatch(seq, start)))
        self.seq = offset.seq - 1 if replay else offset.seq
        if replay:
            self._in_flight = offset.spans  # partitions join the batch as they are assigned
        for tp, (start, until) in offset.ranges.items():
            lost = offset.lost_from.get(tp)
            first = start - offset.behind.get(tp, 0)
            if replay:
                memory = Memory(Position(start, first, lost_from=lost), LastBatch(self.seq, replays_next=True))
            else:
                first = first if uncommitted else until
                memory = Memory(Position(until, first), LastBatch(self.seq, start if lost is None else lost))
            memory.position.truncated_after = offset.truncated_after.get(tp)
            memory.position.durable_to = _still_ahead(offset.durable_to.get(tp), memory.position.offset)
            self._unassigned[tp] = Unassigned(memory)

    def assign(self, tp: TopicPartition, slot: int) -> None:
        """Kafka assigned the partition to a slot. Its position is looked up before a batch reads it."""
        before = self.ours.get(tp) or self._unassigned.pop(tp, Unassigned())
        next_state(PARTITIONS, state_of(before), ev.Assigned, tp)
        assert isinstance(before, Unassigned)
        self.ours[tp] = Unknown(slot, before.memory, PartitionState.UNRESOLVED)
        self._unresolved[tp] = None
        self._unknown_count += 1

    def drop(self, tp: TopicPartition, cause: AnyCause) -> None:
        """The partition is not assigned any more. Its position is remembered, with a pending batch."""
        partition = self.ours[tp]
        next_state(PARTITIONS, state_of(partition), cause, tp)
        if isinstance(partition, Known):
            memory: AnyMemory = Memory(partition.position, LastBatch(self.seq))
        else:
            memory = partition.memory
        self._recount(tp, state_of(partition), PartitionState.UNASSIGNED)
        del self.ours[tp]
        self._unassigned[tp] = Unassigned(memory)
        self._due.pop(tp, None)

    # --- batches ----------------------------------------------------------------------------------------------------

    def begin_batch(self, ranges: Ranges, spans: Ranges) -> None:
        """A batch that was planned from :meth:`plannable` is in flight.

        Args:
            ranges: what the batch reads.
            spans: the same, each range with the missing records before it.

        Raises:
            InvariantBroken: a range does not start at its partition's position.
        """
        ours = self.ours
        next_state(PARTITIONS, PartitionState.READY, ev.Planned, "a partition")  # once for all
        for tp, (start, end) in ranges.items():
            partition = ours.get(tp)
            if (
                type(partition) is not Known
                or partition.until is not None
                or partition.is_new
                or partition.position.offset != start
            ):
                at = partition.position.offset if isinstance(partition, Known) else "an unknown position"
                raise InvariantBroken(f"{tp}[{start},{end}) is planned, but the partition is at {at}")
            if start < end:
                partition.until = end
        self._in_flight = spans

    def complete_batch(self, seq: int) -> Set[TopicPartition]:
        """The batch in flight is durable, whichever member has its partitions now: this stream does not read its
        records again. Returns the partitions of which it read records; none if a reset has voided the batch."""
        self.seq = seq
        ranges, self._in_flight = self._in_flight, {}
        ours, due = self.ours, self._due
        next_state(PARTITIONS, PartitionState.IN_FLIGHT, ev.Durable, "a partition")  # once for all
        for tp, (start, end) in ranges.items():
            partition = ours.get(tp)
            if type(partition) is Known and partition.until is not None:
                at = due[tp] = partition.position
                if partition.is_new:  # continues at the foreign commit
                    self._update_known(tp, partition, Cause.FOREIGN_COMMIT, is_new=True)
                    at.durable_to = max(end, at.durable_to or 0)
                    continue
                at.offset, at.lost_from, partition.until = partition.until, None, None
                at.durable_to = _still_ahead(at.durable_to, at.offset)
                at.followed = False
                if at.committed == at.offset:
                    at.committed = None  # by a late answer about a commit that was overtaken
            elif start < end and not isinstance(partition, Known):
                memory = self._memory(tp)
                if isinstance(memory, Memory):
                    memory.pending = (start, end)
        return {tp for tp, (start, end) in ranges.items() if start < end}

    def skip_missing(self, missing: ev.RecordsMissing) -> None:
        """Move partitions whose next records are missing to positions that are not committed."""
        topics, moved = missing.topics, set()
        for tp, offset in missing.offsets.items():
            partition = self.ours.get(tp)
            if not isinstance(partition, Known) or not partition.is_ready:
                continue  # it was lost since the check
            next_state(PARTITIONS, state_of(partition), ev.RecordsMissing, tp)
            _jump(partition.position, offset, recreated=tp.topic in topics, truncated_after=missing.truncated.get(tp))
            self._update_due(tp, partition)
            moved.add(tp)
        for tp, each in self._without_position() if topics else ():
            if tp.topic in topics:
                each.memory = None
        # Positions that were not moved are of the deleted topic, or chosen by startingOffsets in the new one, which is
        # read from its first record. They are looked up again and not committed, even if they are revoked.
        for tp, mine in list(self.ours.items()) if topics else ():
            is_idle = state_of(mine) in (PartitionState.RESOLVING, PartitionState.ADOPTING, PartitionState.READY)
            if tp.topic in topics and tp not in moved and is_idle:
                self._replace(tp, Cause.RECREATED_UNCHECKED, Unknown(mine.slot, None, PartitionState.UNRESOLVED))
                self._due.pop(tp, None)

    def forget(self, topics: Collection[str]) -> None:
        """These topics do not exist any more: nothing of their partitions has to be committed."""
        for tp in [tp for tp in self._unassigned if tp.topic in topics] if topics else ():
            del self._unassigned[tp]

    # --- lookups ----------------------------------------------------------------------------------------------------

    def begin_lookups(self, paused: Set[TopicPartition] = frozenset()) -> tuple[TopicPartition, ...]:
        """The partitions whose committed offset has to be read now, without the ``paused`` ones.

        They are in the order of ``ours``, so that a batch finds their positions in neighbouring memory: that saves a
        third of the planning of 10,000 partitions. A partition that was revoked and assigned again during a lookup
        waits for that answer, which is about the past.
        """
        free = [tp for tp in self._unresolved if not self._lookups[tp] and tp not in paused]
        for tp in free:
            partition = self.ours[tp]
            assert isinstance(partition, Unknown)
            self._lookups[tp] += 1
            fetching = Unknown(partition.slot, partition.memory, PartitionState.FETCHING)
            self._replace(tp, ev.FetchCommittedOffsets, fetching)
        return tuple(free)

    def end_lookup(self, tp: TopicPartition) -> Unknown | None:
        """An answer about a partition arrived. Returns the partition, if it is assigned and its position unknown."""
        self._lookups[tp] = max(0, self._lookups[tp] - 1)
        partition = self.ours.get(tp)
        return partition if isinstance(partition, Unknown) else None

    def fail_lookups(self, tps: Iterable[TopicPartition]) -> None:
        """These lookups have to be repeated."""
        for tp in tps:
            partition = self.end_lookup(tp)
            if partition is not None and partition.state is not PartitionState.UNRESOLVED:
                unresolved = Unknown(partition.slot, partition.memory, PartitionState.UNRESOLVED)
                self._replace(tp, ev.LookupFailed, unresolved)

    def begin_resolving(self, tp: TopicPartition) -> None:
        """The group has no committed offset and the run has no memory: the start is resolved by a second lookup."""
        self._lookups[tp] += 1
        self._replace(tp, ev.ResolveStarts, Unknown(self.ours[tp].slot, None, PartitionState.RESOLVING))

    def repeat_resolving(self, tp: TopicPartition) -> None:
        """The start is resolved by one more lookup."""
        self._lookups[tp] += 1

    def apply_committed(
        self, tp: TopicPartition, partition: Unknown, committed: ev.Committed | None, *, stream: str
    ) -> int | None:
        """Choose the position by the committed offset and the memory; at least one of them exists.

        Returns:
            If a foreign commit moved the partition: the position that it would have had, or will have after the batch
            that reads it.
        """
        if committed is None or committed.stream == stream:
            at = _own_position(partition.memory, committed, self.reset_number)
            is_new = committed is None and self._in_flight_to(tp, at.offset) is None
            cause = Cause.NOT_COMMITTED if is_new else ev.CommittedOffsetsRead
            self._set_known(tp, Known(partition.slot, at, is_new), cause)
            return None
        at, moved_from = self._foreign_position(tp, partition.memory, committed)
        self._set_known(tp, Known(partition.slot, at, is_new=True), Cause.FOREIGN_COMMIT)
        return moved_from

    def apply_start(self, tp: TopicPartition, partition: Unknown, offset: int) -> None:
        """The start of a partition without a committed offset is resolved."""
        self._set_known(tp, Known(partition.slot, Position(offset, offset), is_new=True), ev.StartsResolved)

    def _foreign_position(
        self, tp: TopicPartition, memory: AnyMemory, committed: ev.Committed
    ) -> tuple[Position, int | None]:
        """The commit of another stream, an operator or an ordinary consumer wins, also inside a batch of this stream.

        The commit may have replaced the last note of a reset, and then the sink skipped the batch. Between this
        stream's last commit and the end of what is durable, another consumer has read records that the sink has. A
        table with a ledger skips rows that it has, so a commit there does not count as a move back; another sink gets
        the rest twice.
        """
        offset, expected, durable_to = committed.offset, None, None
        start, end = self._in_flight.get(tp, (0, 0))
        if isinstance(memory, Memory):
            start, end = memory.pending or (start, end)
            at, last = memory.position, memory.last_batch
            expected = at.offset
            durable_to = memory.durable_beyond(offset)
            if last.replays_next:  # a former run's batch: not counted when the partition was lost
                self._counts.possible_duplicates += end - start
            elif last.start is not None and min(last.start, at.offset - at.uncommitted) <= offset < at.offset:
                self._counts.possible_duplicates += at.offset - offset
        is_inside = durable_to is not None
        if start < end and start <= offset <= end:
            expected, is_inside = end, True
        # A commit of another stream shows whether that stream followed one; if that was a move back, it still is.
        is_followed = (committed.stream is None or committed.followed) and not is_inside
        at = Position(
            offset,
            first=offset,
            followed=is_followed and committed.truncated_after is None,
            truncated_after=committed.truncated_after,  # no batch from there may be durable yet
            committed=offset,
            committed_ms=committed.at_ms,
            durable_to=durable_to if committed.truncated_after is None else None,
            checkpoint_start=_checkpoint_start(memory),
        )
        return at, expected if offset != expected else None

    def _set_known(self, tp: TopicPartition, partition: Known, cause: AnyCause) -> None:
        """Store a position that is known now. If the batch in flight reads the partition, it joins the batch."""
        self._replace(tp, cause, partition)
        end = self._in_flight_to(tp, partition.position.offset)
        if end is not None:  # it is not released before the batch is durable
            self._update_known(tp, partition, Cause.REPLAY, until=end, is_new=partition.is_new)
        self._update_due(tp, partition)

    def apply_reset(self, number: int) -> None:
        """An operator moved the whole group: positions, memories and the batch in flight are void. But a reset cannot
        move partitions that the group never committed."""
        self.reset_number, self._in_flight = number, {}
        for unassigned in self._unassigned.values():
            unassigned.memory = _voided(unassigned.memory)
        for tp, partition in self.ours.items():
            if isinstance(partition, Known):
                memory: AnyMemory = VoidedMemory(partition.position.without_last_batch)
            else:
                memory = _voided(partition.memory)
            self._replace(tp, Cause.RESET_DETECTED, Unknown(partition.slot, memory, PartitionState.UNRESOLVED))
            self._due.pop(tp, None)

    # --- offset commits ---------------------------------------------------------------------------------------------

    def due_commit(self, stream: str, excluded_slots: Set[int]) -> ev.CommitOffsets:
        """The commit of all positions that have to be committed, without those of ``excluded_slots``. The run adds what
        it knows of topics and leader epochs."""
        ours = self.ours
        offsets, slots = dict[TopicPartition, int](), dict[TopicPartition, int]()
        followed, truncated_after = list[TopicPartition](), dict[TopicPartition, int]()
        for tp, at in self.due.items():
            if (slot := ours[tp].slot) in excluded_slots:
                continue
            offsets[tp], slots[tp] = at.offset, slot
            if at.followed:
                followed.append(tp)
            at.noted_after = at.truncated_after
            if at.truncated_after is not None:
                truncated_after[tp] = at.truncated_after
        return ev.CommitOffsets(
            offsets=offsets,
            slots=slots,
            stream=stream,
            seq=self.seq,
            reset_number=self.reset_number,
            followed=frozenset(followed),
            truncated_after=truncated_after,
        )

    def apply_commits(self, offsets: Mapping[TopicPartition, int], *, now_ms: int) -> None:
        """These offsets are committed under this stream's name."""
        ours, due = self.ours, self._due
        for tp, offset in offsets.items():
            partition = ours.get(tp)
            if not isinstance(partition, Known):
                if isinstance(memory := self._memory(tp), Memory):  # it was lost meanwhile, with its topic maybe
                    memory.position.committed = offset
                continue
            at = partition.position
            at.committed, at.committed_ms = offset, now_ms
            if at.truncated_after != at.noted_after:
                at.committed = None  # it was ordered before the truncation was found, of which its note says nothing
            if at.offset != at.committed:
                self._update_due(tp, partition)
                continue
            at.renews = False
            if offset > at.first:  # a batch from there on is durable
                at.truncated_after = None
            due.pop(tp, None)
            if partition.is_new and partition.until is None:
                self._update_known(tp, partition, ev.OffsetsCommitted, is_new=False)
            partition.is_new = False

    def renew_commits(self, now_ms: int) -> int:
        """Make the offsets due that were committed long ago, or at an unknown time. Returns how many."""
        count = 0
        for tp, partition in self.ours.items():
            if not isinstance(partition, Known) or partition.is_new or partition.position.is_due:
                continue
            at = partition.position
            if at.committed_ms is None or at.committed_ms <= now_ms - RENEW_MS:
                at.renews = True
                self._update_due(tp, partition)
                count += 1
        return count

    # --- queries ----------------------------------------------------------------------------------------------------

    def all_known(self, but: Set[TopicPartition] = frozenset()) -> bool:
        """Whether the position of every assigned partition is known, apart from these."""
        return self._unknown_count <= sum(tp in self.ours and not isinstance(self.ours[tp], Known) for tp in but)

    @property
    def any_adopting(self) -> bool:
        """Whether a partition has to be committed under this stream's name before a batch reads it."""
        return self._adopting_count > 0

    def remembered(self) -> Iterator[TopicPartition]:
        """All partitions that the run or its checkpoint has or had."""
        yield from self.ours
        yield from self._unassigned

    def position(self, tp: TopicPartition) -> int | None:
        """The position of an assigned partition; None if it is not known."""
        partition = self.ours.get(tp)
        return partition.position.offset if isinstance(partition, Known) else None

    def are_at(self, positions: Mapping[TopicPartition, int]) -> bool:
        """Whether none of these partitions is known to have another position: this run may have followed a foreign
        commit since."""
        return all(self.reached(tp) in (None, at) for tp, at in positions.items())

    def reached(self, tp: TopicPartition) -> int | None:
        """The position of a partition that is, or was, assigned; None if it is not known."""
        memory = self._memory(tp)
        return memory.reached if isinstance(memory, Memory) else self.position(tp)

    def plannable(self) -> dict[TopicPartition, int]:
        """The position of every partition that is ready."""
        return {
            tp: each.position.offset
            for tp, each in self.ours.items()
            if type(each) is Known and each.until is None and not each.is_new
        }

    def uncommitted(self) -> dict[TopicPartition, int]:
        """Positions that may not be committed, of partitions that are assigned or were."""
        due = {tp: at.offset for tp, at in self.due.items()}
        return due | {tp: memory.reached for tp, memory in self._uncommitted_memories()}

    def durable_to(self) -> dict[TopicPartition, int]:
        """:attr:`Position.durable_to` of the partitions that are assigned or were, where it is set."""
        found = {
            tp: end
            for tp, each in self.ours.items()
            if type(each) is Known and (end := each.position.durable_to) is not None
        }
        return found | {
            tp: end
            for tp, each in self._without_position()
            if isinstance(memory := each.memory, Memory) and (end := memory.durable_to) is not None
        }

    def behind(self) -> dict[TopicPartition, int]:
        """Of uncommitted positions: how many offsets before them batches of this stream read that Kafka may lack."""
        found = {tp: at.uncommitted for tp, at in self.due.items()}
        found |= {
            tp: memory.reached - memory.position.offset + memory.position.uncommitted
            for tp, memory in self._uncommitted_memories()
        }
        return {tp: count for tp, count in found.items() if count}

    def _uncommitted_memories(self) -> Iterator[tuple[TopicPartition, Memory]]:
        """What is remembered of partitions whose positions are not known, and that may not be committed."""
        for tp, each in self._without_position():
            if isinstance(memory := each.memory, Memory) and uncommitted_offset(memory) is not None:
                yield tp, memory

    def last_batches(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, tuple[int, int]]:
        """Of those whose positions are not known: the last durable batch that read them, and where it started, if the
        run knows it. An earlier commit of this stream below that start was made since (:func:`is_older`)."""
        found = {}
        for tp in tps:
            if not isinstance(memory := self._memory(tp), Memory):
                continue
            if memory.pending is not None:
                found[tp] = (memory.last_batch.seq + 1, memory.pending[0])
            elif memory.last_batch.start is not None:
                found[tp] = (memory.last_batch.seq, memory.last_batch.start)
        return found

    def truncated(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Of these, assigned or not: those that go back because their log was truncated. Each has the last leader epoch
        that was known before."""
        found = {}
        for tp in tps:
            each = self.ours.get(tp) or self._unassigned[tp]
            at = each if isinstance(each, Known) else each.memory
            if isinstance(at, Known | Memory) and (before := at.position.truncated_after) is not None:
                found[tp] = before
        return found

    def jumps(self) -> dict[TopicPartition, Position]:
        """Positions of assigned partitions that are not where a stream, or the starting options, left them."""
        positions = ((tp, each.position) for tp, each in self.ours.items() if isinstance(each, Known))
        return {
            tp: at for tp, at in positions if at.followed or at.truncated_after is not None or at.lost_from is not None
        }

    def is_in_flight(self, tp: TopicPartition) -> bool:
        """Whether the batch in flight reads offsets of the partition."""
        start, end = self._in_flight.get(tp, (0, 0))
        return start < end

    def unconfirmed(self, tp: TopicPartition) -> int:
        """The number of offsets that the partition's next reader reads again: from the committed offset to the end of
        what was read; and those of a batch of this stream that another consumer had read before it."""
        partition = self.ours[tp]
        if isinstance(partition, Known):
            reads_to = None if partition.is_new else partition.until
            return partition.position.unconfirmed(partition.position.offset if reads_to is None else reads_to)
        memory = partition.memory
        start, end = self._in_flight.get(tp, (0, 0))
        if isinstance(memory, Memory):
            start, end = memory.pending or (start, end)
            if memory.last_batch.start is not None:
                start, end = memory.last_batch.start, memory.position.offset
        return end - start

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _in_flight_to(self, tp: TopicPartition, offset: int) -> int | None:
        """The end of what the batch in flight reads of the partition, if it reads this offset."""
        start, end = self._in_flight.get(tp, (0, 0))
        return end if start <= offset < end else None

    def _memory(self, tp: TopicPartition) -> AnyMemory:
        """What is remembered of a partition whose position is not known."""
        partition = self.ours.get(tp) or self._unassigned.get(tp)
        return None if partition is None or isinstance(partition, Known) else partition.memory

    def _without_position(self) -> Iterator[tuple[TopicPartition, Unassigned | Unknown]]:
        """The partitions whose position is not known, assigned or not."""
        yield from self._unassigned.items()
        if self._unknown_count:
            for tp, partition in self.ours.items():
                if not isinstance(partition, Known):
                    yield tp, partition

    def _update_due(self, tp: TopicPartition, partition: Known) -> None:
        if partition.is_due:
            self._due[tp] = partition.position
        else:
            self._due.pop(tp, None)

    def _replace(self, tp: TopicPartition, cause: AnyCause, after: AssignedPartition) -> None:
        """Replace the record of a partition by that of its state after a cause."""
        before, self.ours[tp] = self.ours[tp], after
        require_change(PARTITIONS, state_of(before), cause, state_of(after), tp)
        self._recount(tp, state_of(before), state_of(after))

    def _update_known(
        self, tp: TopicPartition, partition: Known, cause: AnyCause, *, until: int | None = None, is_new: bool
    ) -> None:
        """Set ``until`` and ``is_new`` of a partition whose position stays known. Without ``until`` it becomes
        None."""
        before = state_of(partition)
        partition.until, partition.is_new = until, is_new
        require_change(PARTITIONS, before, cause, state_of(partition), tp)
        self._recount(tp, before, state_of(partition))

    def _recount(self, tp: TopicPartition, before: PartitionState, after: PartitionState) -> None:
        self._unknown_count += (after in UNKNOWN_STATES) - (before in UNKNOWN_STATES)
        self._adopting_count += (after is PartitionState.ADOPTING) - (before is PartitionState.ADOPTING)
        if after is PartitionState.UNRESOLVED:
            self._unresolved[tp] = None
        else:
            self._unresolved.pop(tp, None)


def state_of(partition: Unassigned | AssignedPartition) -> PartitionState:
    """The state that a record stands for."""
    if isinstance(partition, Unassigned):
        return PartitionState.UNASSIGNED
    if isinstance(partition, Unknown):
        return partition.state
    if partition.until is not None:
        return PartitionState.IN_FLIGHT
    return PartitionState.ADOPTING if partition.is_new else PartitionState.READY


def _own_position(memory: AnyMemory, committed: ev.Committed | None, reset_number: int) -> Position:
    """The position where no foreign commit is in the way.

    Without a committed offset (it expired or was deleted) the stream continues where it was. A commit of this stream
    wins over the memory if it is later: the stream may have followed a foreign commit back since. It has if the commit
    knows nothing of the group's last reset: only a foreign commit after the reset can have replaced the reset's note.
    """
    remembered = memory.position if isinstance(memory, Memory) else None
    truncated_after = remembered.truncated_after if remembered else None
    if committed is None:
        assert memory is not None
        offset = remembered.offset if remembered else memory.without_last_batch
        is_followed = remembered is not None and remembered.followed
    else:
        offset = committed.offset
        if isinstance(memory, Memory) and is_older(committed, memory):
            known = memory.position.offset
            offset = max(offset, known) if truncated_after is None else known
        else:
            truncated_after = committed.truncated_after
        is_followed = committed.followed or committed.reset_number < reset_number
        is_followed = is_followed and offset == committed.offset
    first = offset
    durable_to = None
    if isinstance(memory, Memory) and not is_followed and truncated_after is None:
        durable_to = memory.durable_beyond(offset)
    if isinstance(memory, Memory) and memory.pending is not None and not is_after_pending(committed, memory):
        offset = after_batch(first, memory.pending)
        is_followed = is_followed and offset == first
    return Position(
        offset,
        first=first,
        followed=is_followed and truncated_after is None,
        truncated_after=truncated_after,
        committed=None if committed is None else committed.offset,
        committed_ms=None if committed is None else committed.at_ms,
        durable_to=_still_ahead(durable_to, offset),
        checkpoint_start=_checkpoint_start(memory),
    )


def _checkpoint_start(memory: AnyMemory) -> int | None:
    return memory.last_batch.start if isinstance(memory, Memory) else None


def _jump(at: Position, offset: int, *, recreated: bool, truncated_after: int | None) -> None:
    """Records are missing: the partition continues at ``offset``, which is not committed.

    Args:
        truncated_after: the last leader epoch that was known before, if the log was truncated.
    """
    if recreated and offset < at.offset:
        truncated_after = RECREATED
    elif truncated_after is not None and at.truncated_after is not None:
        truncated_after = max(truncated_after, at.truncated_after)  # a table may have rows of both former logs
    if recreated or truncated_after is not None:
        at.followed, at.truncated_after, at.lost_from, at.durable_to = False, truncated_after, None, None
    elif at.lost_from is None:
        at.lost_from = at.offset
    # What this run read between an earlier committed offset and a truncation is in the log, and may be read again.
    goes_back = truncated_after not in (None, RECREATED) and offset <= at.offset
    if not goes_back or at.committed is None or at.committed >= offset:
        at.committed = None
    at.offset = at.first = offset
    at.durable_to = _still_ahead(at.durable_to, offset)


def _voided(memory: AnyMemory) -> AnyMemory:
    return None if memory is None else VoidedMemory(memory.without_last_batch)
