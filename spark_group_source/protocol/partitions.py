"""Where every partition stands: its position, what Kafka has of it, and what of it is in flight.

Runs in: the stream reader, tests. Deliberately absent: which slot has a partition and why (``machine``), and asking
Kafka; answers come in as values.

The *position* of a partition is the next offset after all durable batches of ours. Kafka is *owed* a position that it
may not have as committed: the echo brings it there while the partition is ours, and the next plan writes it down
when it is not. A batch that became durable while a partition's position was not known (it was away, or just came back)
is *pending*: it is applied to an answer that nobody else's commit changed, as if the answer had come first. Where
somebody else committed inside a batch of ours, the partition goes on there (``Partitions.take_answer``).
"""

from collections.abc import Collection, Iterable, KeysView, Mapping
from dataclasses import dataclass

from spark_group_source.errors import InvariantBroken
from spark_group_source.model import TopicPartition
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.offsets import StreamOffset
from spark_group_source.protocol.states import PARTITIONS, PartitionState, moved
from spark_group_source.protocol.statistics import Statistics

UNKNOWN = frozenset({PartitionState.UNRESOLVED, PartitionState.FETCHING, PartitionState.RESOLVING})
"""Ours, but where it stands is not known yet."""
COUNTED = UNKNOWN | {PartitionState.CLAIMING}
"""How many of ours are in one of these says whether a batch can be planned."""

RENEW_MS = 6 * 3_600_000
"""An offset that was committed so long ago is committed again where it stands. Nothing of a query's topics expires
while it runs, however long a partition has been idle. But in a group of KIP-848 each offset's time counts from its last
commit: when the query stops, an offset that is older than the retention is gone within minutes. The checkpoint brings
it back; a query with a new checkpoint would have to begin at ``startingOffsets``. This serves every
``offsets.retention.minutes`` of 7 hours and more; the brokers' default is 7 days."""
RENEW_LOOK_MS = 600_000
"""How often it is looked how old the offsets are."""

Ranges = Mapping[TopicPartition, tuple[int, int]]


@dataclass(slots=True)
class Partition:
    """One partition that this run ever heard of."""

    state: PartitionState = PartitionState.UNASSIGNED
    slot: int = -1
    position: int | None = None  # in a state without a known one: the last that was ours
    as_of: int = -1  # number of the durable batch up to which that position takes everything into account
    start: int | None = None  # where that batch began to read it, if a checkpoint says so
    planned: bool = False  # the position is where the batch after that one begins, which is to be run again
    committed: int | None = None  # what Kafka is known to have
    committed_ms: int | None = None  # ... since when, on the run's clock, if that is known
    theirs: bool = False  # ... under somebody else's name
    renew: bool = False  # ... for so long that it is to be committed again
    followed: bool = False  # the position came from a commit that no stream made
    cut: int | None = None  # it went back to where its log was cut: where it stood before, until Kafka has more
    lost: int | None = None  # its next records were gone: where it stood before that, until a batch moves it on
    until: int = 0  # end of what the batch in flight reads of it, in PLANNED
    pending: tuple[int, int] | None = None  # range that became durable before the position was known
    began: int = 0  # its first position here: without a commit, the next reader may begin there
    before: int | None = None  # where it began before a reset: nothing else says so if the group never committed it
    questions: int = 0  # lookups on their way, maybe from before it left and came back

    @property
    def reached(self) -> int | None:
        """The end of what is durable of it, as far as this run can say."""
        if self.position is None or self.pending is None:
            return self.position if self.pending is None else self.pending[1]
        return after_batch(self.position, self.pending)

    @property
    def without_last(self) -> int | None:
        """Where it stood before its last batch, as far as this run can say: a reset may have made that void."""
        if self.start is not None:
            return self.start
        if self.position is not None:
            return self.position
        return self.before if self.pending is None else self.pending[0]

    @property
    def owed(self) -> bool:
        """Whether Kafka may not have its position under our name."""
        at = self.reached
        return at is not None and (self.theirs or self.renew or self.committed != at)

    @property
    def due(self) -> bool:
        """The same of one that is ours. What others committed inside the batch in flight waits until that is durable:
        a commit of ours from before the batch would say that the batch comes after it."""
        return self.owed and not (self.theirs and self.state is PartitionState.IN_FLIGHT)

    @property
    def owed_unseen(self) -> bool:
        """The same of one whose committed offset this run does not know now."""
        return self.owed and (self.state is PartitionState.UNASSIGNED or self.state in UNKNOWN)

    @property
    def uncommitted(self) -> int:
        """Offsets of it that are durable and that Kafka does not have."""
        base = self.began if self.committed is None else self.committed
        return 0 if self.position is None else max(0, self.position - base)

    def unconfirmed(self, in_flight: tuple[int, int]) -> int:
        """Offsets that its next reader reads again; ``in_flight`` is what the batch in flight reads of it."""
        if self.state in UNKNOWN or self.position is None:
            start, end = self.pending or in_flight
            if self.start is not None and self.position is not None:
                start, end = self.start, self.position  # the last batch of the checkpoint
            return end - start
        reads_on = self.state is PartitionState.IN_FLIGHT and not self.theirs
        base = self.began if self.committed is None else self.committed
        return (self.until if reads_on else self.position) - min(self.position, base)


def is_older(committed: ev.Committed, partition: Partition) -> bool:
    """Whether a commit of ours was made before what we remember."""
    at, start = committed.offset, partition.start
    if committed.seq > partition.as_of or (committed.seq == partition.as_of and not partition.planned):
        return False
    if committed.seq == partition.as_of:
        # The batch after it is to be run again. Between the two the position can have moved on: records that were to
        # be read are gone. Anything else that is before the position was put there since.
        before_it = partition.position is not None and at < partition.position
        return not before_it or at == partition.lost
    # A run whose batch is in flight goes on where another stream or an operator put the group since. Under its own name
    # that looks like a commit of before; but it is before where that batch began, and no batch of ours ended there.
    put_back = committed.seq == partition.as_of - 1 and start is not None and at < start
    return not put_back


def after_batch(at: int, batch: tuple[int, int]) -> int:
    """Where a partition stands after a batch, if it stood at ``at`` before: only one that begins there moves it."""
    start, end = batch
    return end if start <= at < end else at


class Partitions:
    """All partitions of one run. ``counts``: what it counts."""

    def __init__(self, counts: Statistics) -> None:
        self._counts = counts
        self.seq = -1
        """Number of the last durable batch; -1 before the first."""
        self.reset_number = 0
        """The last reset of the group that this run knows of; 0: none."""
        self.all: dict[TopicPartition, Partition] = {}
        self.ours: dict[TopicPartition, Partition] = {}
        self._in_flight: Ranges = {}
        self._due: dict[TopicPartition, None] = {}  # ours, with a known position that Kafka is owed; in order
        self._came: set[TopicPartition] = set()  # in CAME
        self._unknown = 0  # how many of ours are in a state of UNKNOWN
        self._taking = 0  # and in TAKING

    # --- coming and going -------------------------------------------------------------------------------------------

    def adopt(self, offset: StreamOffset, *, replay: bool) -> None:
        """What a checkpoint says after its last batch; ``replay``: before it, because that is to be run again."""
        self.reset_number = offset.reset_number
        for tp, at in offset.uncommitted.items():  # the batch itself did not read these
            as_of, start = offset.last_batches.get(tp, (offset.seq - 1, None))
            self.all[tp] = Partition(position=at, as_of=as_of, start=start)
        if replay:
            self.seq, self._in_flight = offset.seq - 1, offset.spans  # what it reads joins it as the partitions come
        else:
            self.seq = offset.seq
        for tp, (start, until) in offset.ranges.items():
            cut, lost = offset.truncated_from.get(tp), offset.lost_from.get(tp)
            self.all[tp] = (
                Partition(position=start, as_of=self.seq, planned=True, cut=cut, lost=lost)
                if replay
                else Partition(position=until, as_of=self.seq, start=start if lost is None else lost, cut=cut)
            )

    def assign(self, tp: TopicPartition, slot: int) -> None:
        partition = self.all.setdefault(tp, Partition())
        partition.slot = slot
        self.ours[tp] = partition
        self._move(tp, partition, ev.Assigned)

    def drop(self, tp: TopicPartition, cause: type) -> None:
        """It is not ours any more. Its position is remembered, with what is pending."""
        partition = self.all[tp]
        if partition.state not in UNKNOWN:
            partition.as_of, partition.start, partition.planned = self.seq, None, False
        self._move(tp, partition, cause)
        self._due.pop(tp, None)
        del self.ours[tp]
        partition.slot, partition.until, partition.theirs, partition.renew = -1, 0, False, False

    # --- batches ----------------------------------------------------------------------------------------------------

    def planned(self, ranges: Ranges, takes: Ranges) -> None:
        """A batch that was cut from :meth:`plannable` is in flight.

        Raises:
            InvariantBroken: it does not read on where the partitions stand.
        """
        ready, ours = PartitionState.READY, self.ours
        planned = moved(
            PARTITIONS, ready, ev.Planned, "a partition"
        )  # looked up once: a batch can have 100,000 partitions
        for tp, (start, end) in ranges.items():
            partition = ours.get(tp)
            if partition is None or partition.state is not ready or partition.position != start:
                at = "another member" if partition is None else partition.position
                raise InvariantBroken(f"{tp}[{start},{end}) is planned, but the partition is at {at}")
            if start < end:
                partition.until, partition.state = end, planned
        self._in_flight = takes

    def durable(self, seq: int) -> None:
        """The rows of the batch in flight are safe, whoever has its partitions now: nobody of ours reads them again."""
        self.seq = seq
        ranges, self._in_flight = self._in_flight, {}
        planned, everything, due = PartitionState.IN_FLIGHT, self.all, self._due
        ready = moved(PARTITIONS, planned, ev.Durable, "a partition")
        for tp, (start, end) in ranges.items():
            partition = everything[tp]
            if partition.state is planned and partition.theirs:  # it goes on where they committed
                self._move(tp, partition, ev.ForeignCommit)
                due[tp] = None
            elif partition.state is planned:
                partition.position, partition.followed, partition.lost = partition.until, False, None
                if partition.committed == partition.position:
                    partition.committed = None  # a late answer said so, of a commit that was overtaken
                partition.state = ready
                due[tp] = None  # it moved on, and Kafka cannot know yet
            elif start < end and (partition.state is PartitionState.UNASSIGNED or partition.state in UNKNOWN):
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
                self._move(tp, partition, ev.RecordsMissing)
                self._go_on(tp, partition, at, made_again=tp.topic in topics, cut=tp in cut)
        for tp, partition in self.all.items() if topics else ():
            away = partition.state is PartitionState.UNASSIGNED or partition.state in UNKNOWN
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
            self._move(tp, self.all[tp], ev.FetchCommittedOffsets)
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
                if partition.state in (PartitionState.FETCHING, PartitionState.RESOLVING):
                    self._move(tp, partition, ev.LookupFailed)

    def start(self, tp: TopicPartition) -> None:
        """Nobody committed it, and it was never ours: its start is being resolved, by a question of its own."""
        partition = self.all[tp]
        partition.questions += 1
        self._move(tp, partition, ev.ResolveStarts)

    def take_answer(self, tp: TopicPartition, committed: ev.Committed | None, *, stream: str) -> int | None:
        """The start-position rules, but for ``startingOffsets``: our own position, or the group's committed offset.

        Returns:
            Where the partition stood, or would stand after the batch that reads it, if somebody else's commit moved it
            away from there.
        """
        partition, moved_from = self.ours[tp], None
        if committed is None:
            at = self._nobody_committed(partition)
        elif committed.stream == stream:
            at = _we_committed(partition, committed)
        else:
            at, moved_from = self._others_committed(tp, partition, committed)
        self._move(tp, partition, ev.ForeignCommit if partition.theirs else ev.CommittedOffsetsRead)
        if committed is not None:
            partition.before, partition.committed_ms = None, committed.at_ms
        partition.lost = None
        self._resolved(tp, partition, at)
        return moved_from

    def _nobody_committed(self, partition: Partition) -> int:
        """What Kafka had before has expired, or was deleted: it goes on where this stream stood."""
        known = partition.position if partition.position is not None else partition.without_last
        assert known is not None
        partition.committed = None
        return known

    def _others_committed(
        self, tp: TopicPartition, partition: Partition, committed: ev.Committed
    ) -> tuple[int, int | None]:
        """Another stream, an operator or an ordinary consumer: it goes on where they say, also inside a batch of ours.

        Their commit may have covered the last note of a reset, and then the sink left the batch out. A table with a
        ledger leaves out what it has, so a commit inside the batch is not one that moved it back; with another sink the
        rest of the batch is read twice.
        """
        ours, at = partition.position, committed.offset
        partition.committed, partition.theirs, partition.cut = at, True, None
        start, end = partition.pending or self._in_flight.get(tp, (0, 0))
        inside = start < end and start <= at <= end
        # Another stream that followed somebody says so: where that was back, it still is.
        partition.followed = (committed.stream is None or committed.followed) and not inside
        if partition.planned:  # a former run's: who read it meanwhile, or will, was not counted when it was lost
            self._counts.possible_duplicates += end - start
        stood = end if inside else ours
        partition.pending = None
        return at, stood if stood is not None and at != stood else None

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

    def reset_seen(self, reset_number: int) -> None:
        """An operator moved the whole group: what we remember and what is in flight belongs to the past, but for
        partitions that the group never committed: those a reset cannot move."""
        self.reset_number, self._in_flight = reset_number, {}
        for tp in [tp for tp, partition in self.all.items() if partition.state is PartitionState.UNASSIGNED]:
            gone = self.all[tp]
            self.all[tp] = Partition(questions=gone.questions, before=gone.without_last)
        for tp, partition in self.ours.items():
            self._move(tp, partition, ev.ResetDetected)
            self._due.pop(tp, None)
            partition.before, partition.start = partition.without_last, None
            partition.position, partition.as_of, partition.pending = None, -1, None
            partition.committed, partition.theirs, partition.followed, partition.until = None, False, False, 0
            partition.cut = partition.lost = None

    # --- the echo ---------------------------------------------------------------------------------------------------

    def due(self) -> KeysView[TopicPartition]:
        """Ours, whose position Kafka is owed."""
        return self._due.keys()

    def echoed(self, offsets: Mapping[TopicPartition, int], *, now_ms: int) -> None:
        """Kafka shows these offsets under our name."""
        taking, due = PartitionState.CLAIMING, self._due
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
                    self._move(tp, partition, ev.OffsetsCommitted)
            else:
                self.account(tp, partition)

    def renew(self, now_ms: int) -> int:
        """Owe Kafka the offsets of ours that were committed long ago, or nobody knows when. Returns how many."""
        count = 0
        for tp, partition in self.ours.items():
            if partition.committed is None or partition.state in UNKNOWN or partition.owed:
                continue
            if partition.committed_ms is None or partition.committed_ms <= now_ms - RENEW_MS:
                partition.renew = True
                self.account(tp, partition)
                count += 1
        return count

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
            if partition.state is PartitionState.UNASSIGNED or partition.slot < 0:
                return f"{tp} is ours and away"
            if (partition.state is PartitionState.UNRESOLVED) != (tp in self._came):
                return f"{tp} waits for a position nobody looks up"
            if partition.state in UNKNOWN:
                continue
            if partition.position is None or partition.pending is not None:
                return f"{tp} has no position in {partition.state.value}"
            if partition.due != (tp in self._due):
                return f"Kafka is owed {tp} and nobody brings it"
            if partition.state is PartitionState.IN_FLIGHT and not partition.position < partition.until:
                return f"the range of {tp} does not start at its position"
            if partition.state is PartitionState.CLAIMING and not partition.theirs:
                return f"{tp} is taken from nobody"
        states = [partition.state for partition in self.ours.values()]
        if self._unknown != sum(state in UNKNOWN for state in states):
            return "the partitions without a position are miscounted"
        if self._taking != states.count(PartitionState.CLAIMING):
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
        if partition.due:
            self._due[tp] = None
        else:
            self._due.pop(tp, None)

    def _move(self, tp: TopicPartition, partition: Partition, cause: type) -> None:
        before = partition.state
        after = partition.state = moved(PARTITIONS, before, cause, tp)
        if before not in COUNTED and after not in COUNTED:
            return
        self._unknown += (after in UNKNOWN) - (before in UNKNOWN)
        self._taking += (after is PartitionState.CLAIMING) - (before is PartitionState.CLAIMING)
        if after is PartitionState.UNRESOLVED:
            self._came.add(tp)
        else:
            self._came.discard(tp)


def _we_committed(partition: Partition, committed: ev.Committed) -> int:
    """This stream: its own position, unless the commit was made later than what we remember. Then it knows better, as
    it may have followed somebody back."""
    ours, at = partition.position, committed.offset
    if ours is not None and is_older(committed, partition):
        at = max(at, ours) if partition.cut is None else ours
    else:
        partition.cut = committed.truncated_from
    partition.committed, partition.followed = committed.offset, committed.followed and at == committed.offset
    return at
