"""Where every partition stands: its position, what Kafka has of it, and what of it is in flight.

Runs in: the stream reader, tests. Deliberately absent: which slot has a partition and why (``machine``), and asking
Kafka; answers come in as values.

The *position* of a partition is the next offset after all durable batches of ours. Kafka is *owed* a position that it
may not have as committed: the echo brings it there while the partition is ours, and the next plan writes it down
when it is not. A batch that became durable while a partition's position was not known (it was away, or just came back)
is *pending*: it is applied to whatever the answer says, as if the answer had come first.
"""

from collections.abc import Collection, Iterable, KeysView, Mapping
from types import MappingProxyType

from spark_group_source.group import events as ev
from spark_group_source.group.offsets import StreamOffset
from spark_group_source.group.partition import UNKNOWN, Partition, after_batch, is_older
from spark_group_source.group.states import PARTITIONS, PartitionState
from spark_group_source.model import TopicPartition

COUNTED = UNKNOWN | {PartitionState.TAKING}
"""How many of ours are in one of these says whether a batch can be planned."""

Ranges = Mapping[TopicPartition, tuple[int, int]]


class Positions:
    """All partitions of one run."""

    def __init__(self) -> None:
        self.epoch = 0
        self.all: dict[TopicPartition, Partition] = {}
        self.ours: dict[TopicPartition, Partition] = {}
        self._in_flight: Ranges = {}
        self._due: dict[TopicPartition, None] = {}  # ours, with a known position that Kafka is owed; in order
        self._came: set[TopicPartition] = set()  # in CAME
        self._unknown = 0  # how many of ours are in a state of UNKNOWN
        self._taking = 0  # and in TAKING

    # --- coming and going -------------------------------------------------------------------------------------------

    def remember(
        self,
        positions: Mapping[TopicPartition, int],
        *,
        as_of: int,
        ranges: Ranges,
        since: Mapping[TopicPartition, tuple[int, int]] = MappingProxyType({}),
        planned: bool = False,
        cut: Mapping[TopicPartition, int] = MappingProxyType({}),
        lost: Mapping[TopicPartition, int] = MappingProxyType({}),
    ) -> None:
        """What a checkpoint says. Whether Kafka has it shows when the partitions come.

        Args:
            as_of, ranges: the number of the last durable batch, and what it read, if known; ``since``: of another one.
            planned: the batch after it begins there, and is to be run again.
            cut, lost: where partitions stood before whose log was cut below that, or whose next records were gone.
        """
        for tp, at in positions.items():
            seq, start = since.get(tp, (as_of, lost.get(tp, ranges[tp][0]) if tp in ranges else None))
            before = lost.get(tp) if planned else None
            self.all[tp] = Partition(position=at, as_of=seq, start=start, planned=planned, cut=cut.get(tp), lost=before)

    def assign(self, tp: TopicPartition, slot: int) -> None:
        partition = self.all.setdefault(tp, Partition())
        partition.slot = slot
        self.ours[tp] = partition
        self._move(tp, partition, ev.Assigned)

    def drop(self, tp: TopicPartition, cause: type, *, as_of: int) -> None:
        """It is not ours any more. Its position is remembered, with what is pending."""
        partition = self.all[tp]
        if partition.state not in UNKNOWN:
            partition.as_of, partition.start, partition.planned = as_of, None, False
        self._move(tp, partition, cause)
        self._due.pop(tp, None)
        del self.ours[tp]
        partition.slot, partition.until, partition.uncounted, partition.theirs, partition.renew = -1, 0, 0, False, False

    # --- batches ----------------------------------------------------------------------------------------------------

    def planned(self, ranges: Ranges, takes: Ranges) -> str | None:
        """A batch that was cut from :meth:`plannable` is in flight. Returns what is wrong with it, if anything is."""
        ready, ours = PartitionState.READY, self.ours
        planned = _to(ready, ev.Planned)  # looked up once: a batch can have 100,000 partitions
        for tp, (start, end) in ranges.items():
            partition = ours.get(tp)
            if partition is None or partition.state is not ready or partition.position != start:
                at = "another member" if partition is None else partition.position
                return f"{tp}[{start},{end}) is planned, but the partition is at {at}"
            if start < end:
                partition.until, partition.state = end, planned
        self._in_flight = takes
        return None

    def replayed(self, takes: Ranges) -> None:
        """A former run's batch is in flight; what it reads joins it as the partitions come."""
        self._in_flight = takes

    def durable(self) -> None:
        """The rows of the batch in flight are safe, whoever has its partitions now: nobody of ours reads them again."""
        ranges, self._in_flight = self._in_flight, {}
        planned, everything, due = PartitionState.PLANNED, self.all, self._due
        ready = _to(planned, ev.Durable)
        for tp, (start, end) in ranges.items():
            partition = everything[tp]
            if partition.state is planned:
                partition.position, partition.followed, partition.lost = partition.until, False, None
                if partition.committed == partition.position:
                    partition.committed = None  # a late answer said so, of a commit that was overtaken
                if partition.theirs:
                    self._move(tp, partition, ev.TheirCommit)
                else:
                    partition.state = ready
                due[tp] = None  # it moved on, and Kafka cannot know yet
            elif start < end and (partition.state is PartitionState.AWAY or partition.state in UNKNOWN):
                partition.pending = (start, end)

    def gone(
        self,
        offsets: Mapping[TopicPartition, int],
        topics: Collection[str] = (),
        cut: Collection[TopicPartition] = (),
    ) -> None:
        """Their records are gone: they go on there, which nobody committed.

        Args:
            topics: those that were made again.
            cut: those of the partitions that go back to where their log was cut.
        """
        for tp, at in offsets.items():
            partition = self.ours.get(tp)
            if partition is not None and partition.state is PartitionState.READY:
                self._move(tp, partition, ev.RecordsGone)
                self._go_on(tp, partition, at, made_again=tp.topic in topics, cut=tp in cut)
        for tp, partition in self.all.items() if topics else ():
            away = partition.state is PartitionState.AWAY or partition.state in UNKNOWN
            if tp.topic in topics and tp not in offsets and away:
                partition.position, partition.as_of, partition.start, partition.pending = None, -1, None, None
                partition.before = None

    # --- lookups ----------------------------------------------------------------------------------------------------

    def ask(self) -> tuple[TopicPartition, ...]:
        """The partitions whose committed offset has to be read; they count as asked now.

        One that left and came back while a question was on its way waits for that answer, which is about the past.
        """
        free = sorted(tp for tp in self._came if not self.all[tp].questions)
        for tp in free:
            self.all[tp].questions += 1
            self._move(tp, self.all[tp], ev.FetchCommitted)
        return tuple(free)

    def answered(self, tp: TopicPartition, state: PartitionState) -> Partition | None:
        """An answer came. The partition, if it is about the partition as we have it now."""
        partition = self.all.get(tp)
        if partition is None:
            return None
        partition.questions = max(0, partition.questions - 1)
        return partition if partition.state is state else None

    def not_answered(self, tps: Iterable[TopicPartition]) -> None:
        """These have to be asked again."""
        for tp in tps:
            partition = self.all.get(tp)
            if partition is not None:
                partition.questions = max(0, partition.questions - 1)
                if partition.state in (PartitionState.ASKED, PartitionState.STARTING):
                    self._move(tp, partition, ev.LookupFailed)

    def start(self, tp: TopicPartition) -> None:
        """Nobody committed it, and it was never ours: its start is being resolved, by a question of its own."""
        partition = self.all[tp]
        partition.questions += 1
        self._move(tp, partition, ev.ResolveStarts)

    def take_answer(self, tp: TopicPartition, committed: ev.Committed | None, *, stream: str) -> int | None:
        """The start-position rules, but for ``startingOffsets``: our own position, or the group's committed offset.

        Returns:
            Our own position, where somebody else's commit moved the partition away from it.
        """
        partition = self.ours[tp]
        ours = partition.position
        moved_from = None
        if committed is None:
            known = ours if ours is not None else partition.without_last
            assert known is not None
            at = known
            partition.committed = None  # what Kafka had before has expired, or was deleted
            self._move(tp, partition, ev.CommittedRead)
        elif committed.stream == stream:
            at = committed.offset
            # One that was made later than what we remember knows better: it may have followed somebody back.
            if ours is not None and is_older(committed, partition):
                at = max(at, ours) if partition.cut is None else ours
            else:
                partition.cut = committed.cut
            partition.committed, partition.followed = committed.offset, committed.followed and at == committed.offset
            self._move(tp, partition, ev.CommittedRead)
        else:
            at = committed.offset
            partition.committed, partition.theirs, partition.cut = at, True, None
            # Another stream that followed somebody says so: where that was back, it still is.
            partition.followed = committed.stream is None or committed.followed
            start, end = partition.pending or self._in_flight.get(tp, (0, 0))
            inside = start < end and start <= at <= end  # it goes on at the end of the batch all the same
            partition.uncounted = (at if inside else end) - start  # others read these, too
            if ours is not None and at != ours and not inside:
                moved_from = ours
            self._move(tp, partition, ev.TheirCommit)
        if committed is not None:
            partition.before, partition.committed_ms = None, committed.at_ms
        partition.lost = None
        self._resolved(tp, partition, at)
        return moved_from

    def started(self, tp: TopicPartition, at: int) -> None:
        """Where a partition without a committed offset starts."""
        partition = self.ours[tp]
        partition.committed = None
        self._move(tp, partition, ev.StartsResolved)
        self._resolved(tp, partition, at)

    def _resolved(self, tp: TopicPartition, partition: Partition, at: int) -> None:
        partition.began = at
        if partition.pending is not None:
            after = after_batch(at, partition.pending)
            partition.followed &= after == at
            at, partition.pending = after, None
        start, end = self._in_flight.get(tp, (0, 0))
        if start <= at < end:  # a batch that reads it is in flight: it leaves only when that is durable
            partition.until = end
            self._move(tp, partition, ev.Replay)
        self._stand(tp, partition, at)

    def reset_seen(self, epoch: int) -> None:
        """An operator moved the whole group: what we remember and what is in flight belongs to the past, but for
        partitions that the group never committed: those a reset cannot move."""
        self.epoch, self._in_flight = epoch, {}
        for tp in [tp for tp, partition in self.all.items() if partition.state is PartitionState.AWAY]:
            gone = self.all[tp]
            self.all[tp] = Partition(questions=gone.questions, before=gone.without_last)
        for tp, partition in self.ours.items():
            self._move(tp, partition, ev.ResetSeen)
            self._due.pop(tp, None)
            partition.before, partition.start = partition.without_last, None
            partition.position, partition.as_of, partition.pending, partition.uncounted = None, -1, None, 0
            partition.committed, partition.theirs, partition.followed, partition.until = None, False, False, 0
            partition.cut = partition.lost = None

    # --- the echo ---------------------------------------------------------------------------------------------------

    def due(self) -> KeysView[TopicPartition]:
        """Ours, whose position Kafka is owed."""
        return self._due.keys()

    def echoed(self, offsets: Mapping[TopicPartition, int], *, now_ms: int) -> None:
        """Kafka shows these offsets under our name."""
        taking, due = PartitionState.TAKING, self._due
        for tp, at in offsets.items():
            partition = self.ours.get(tp)
            if partition is None or partition.state in UNKNOWN:
                continue
            partition.committed, partition.committed_ms = at, now_ms
            if partition.position == at:
                partition.theirs = partition.renew = False
                if at > partition.began:  # a batch from there on is durable
                    partition.cut = None
                due.pop(tp, None)
                if partition.state is taking:
                    self._move(tp, partition, ev.EchoDone)
            else:
                self.account(tp, partition)

    # --- what may be asked ------------------------------------------------------------------------------------------

    @property
    def resolved(self) -> bool:
        """No partition of ours waits for its position."""
        return not self._unknown

    @property
    def ready(self) -> bool:
        """Every partition of ours may be planned, or is."""
        return not self._unknown and not self._taking

    def plannable(self) -> dict[TopicPartition, int]:
        ready = PartitionState.READY
        return {tp: p.position for tp, p in self.ours.items() if p.state is ready and p.position is not None}

    def owed(self) -> dict[TopicPartition, int]:
        """Positions that Kafka may not have, ours or not."""
        known = {tp: at for tp in self._due if (at := self.ours[tp].position) is not None}
        if not self._unknown and len(self.all) == len(self.ours):
            return known
        return known | {tp: at for tp, p in self.all.items() if p.owed_unseen and (at := p.reached) is not None}

    def since(self, owed: Iterable[TopicPartition]) -> dict[TopicPartition, tuple[int, int]]:
        """Of those that this run never had: the last batch that read them, and where it began (:func:`is_older`)."""
        return {tp: (p.as_of, p.start) for tp in owed if (p := self.all[tp]).start is not None and p.owed_unseen}

    def followed(self) -> frozenset[TopicPartition]:
        """Ours, whose position came from a commit that no stream made, until a batch moved them on."""
        return frozenset(tp for tp, partition in self.ours.items() if partition.followed)

    def cut(self) -> dict[TopicPartition, int]:
        """Ours that go back to where their log was cut: where they stood before."""
        return {tp: partition.cut for tp, partition in self.ours.items() if partition.cut is not None}

    def lost(self) -> dict[TopicPartition, int]:
        """Ours whose next records were gone: where they stood before that, until a batch moved them on."""
        return {tp: partition.lost for tp, partition in self.ours.items() if partition.lost is not None}

    def in_flight(self, tp: TopicPartition) -> int:
        """Offsets of the partition that the batch in flight reads."""
        start, end = self._in_flight.get(tp, (0, 0))
        return end - start

    def unconfirmed(self, tp: TopicPartition) -> int:
        """Offsets that the partition's next reader reads again: from what Kafka has to the end of what was read; and
        those of a batch of ours that somebody else had read before it."""
        return self.ours[tp].unconfirmed(self._in_flight.get(tp, (0, 0)))

    def check(self) -> str | None:
        """What contradicts itself, or None."""
        for tp, partition in self.ours.items():
            if partition.state is PartitionState.AWAY or partition.slot < 0:
                return f"{tp} is ours and away"
            if (partition.state is PartitionState.CAME) != (tp in self._came):
                return f"{tp} waits for a position nobody looks up"
            if partition.state in UNKNOWN:
                continue
            if partition.position is None or partition.pending is not None:
                return f"{tp} has no position in {partition.state.value}"
            if partition.owed != (tp in self._due):
                return f"Kafka is owed {tp} and nobody brings it"
            if partition.state is PartitionState.PLANNED and not partition.position < partition.until:
                return f"the range of {tp} does not start at its position"
            if partition.state is PartitionState.TAKING and not partition.theirs:
                return f"{tp} is taken from nobody"
        states = [partition.state for partition in self.ours.values()]
        if self._unknown != sum(state in UNKNOWN for state in states):
            return "the partitions without a position are miscounted"
        if self._taking != states.count(PartitionState.TAKING):
            return "the partitions under other names are miscounted"
        return None

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _go_on(self, tp: TopicPartition, partition: Partition, at: int, *, made_again: bool, cut: bool) -> None:
        before = partition.position
        partition.committed, partition.began = None, at
        partition.cut = before if cut else None
        if made_again or cut:
            partition.followed, partition.lost = False, None
        elif partition.lost is None:  # on from where it stood, whoever brought it there
            partition.lost = before
        self._stand(tp, partition, at)

    def _stand(self, tp: TopicPartition, partition: Partition, at: int) -> None:
        partition.position = at
        self.account(tp, partition)

    def account(self, tp: TopicPartition, partition: Partition) -> None:
        if partition.owed:
            self._due[tp] = None
        else:
            self._due.pop(tp, None)

    def _move(self, tp: TopicPartition, partition: Partition, cause: type) -> None:
        before = partition.state
        after = partition.state = _to(before, cause, tp)
        if before not in COUNTED and after not in COUNTED:
            return
        self._unknown += (after in UNKNOWN) - (before in UNKNOWN)
        self._taking += (after is PartitionState.TAKING) - (before is PartitionState.TAKING)
        if after is PartitionState.CAME:
            self._came.add(tp)
        else:
            self._came.discard(tp)


def _to(state: PartitionState, cause: type, tp: TopicPartition | None = None) -> PartitionState:
    """Where a cause leads."""
    after = PARTITIONS.get((state, cause))
    if after is None:
        raise NotInTable(f"{tp or 'a partition'}: {cause.__name__} in state {state.value}")
    return after


class NotInTable(Exception):
    """A change of a partition that its table does not have; the machine adds the story."""


def adopted(offset: StreamOffset, *, replay: bool) -> dict[TopicPartition, int]:
    """The positions that a checkpoint's batch leads to: after it, or before it if that is to be run again."""
    return {tp: start for tp, (start, _) in offset.ranges.items()} if replay else offset.positions()
