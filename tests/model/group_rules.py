"""What the design promises of positions and commits, as a model: in as few words as possible, written from the rules.

Runs in: tests. Deliberately absent: slots' consumers, lookups on their way, pauses (``test_group_model`` plays them).
"""

from dataclasses import dataclass, field

from kit.harness import STREAM

from spark_group_source.model import TopicPartition
from spark_group_source.protocol import events as ev

ALL = [TopicPartition("orders", p) for p in range(4)]
KNOWN = {"orders": 3}  # partition 3 was added later
START = {ALL[0]: 5, ALL[1]: 0, ALL[2]: 9, ALL[3]: 0}  # what the starting options stand for

Offsets = dict[TopicPartition, int]
Ranges = dict[TopicPartition, tuple[int, int]]


def after(at: int, batch: tuple[int, int]) -> int:
    """A batch moves what stands within it to its end."""
    start, end = batch
    return end if start <= at < end else at


@dataclass
class Model:
    """What is true, in as few words as possible."""

    kafka: dict[TopicPartition, ev.Committed] = field(default_factory=dict)
    reset_number: int = 0  # the newest reset that this run knows of
    seq: int = -1  # the last durable batch
    flight: Ranges = field(default_factory=dict)
    held: dict[TopicPartition, int] = field(default_factory=dict)  # -> slot
    position: Offsets = field(default_factory=dict)  # of what is held and was looked up
    memory: dict[TopicPartition, tuple[int, int]] = field(default_factory=dict)  # of the rest: position, and as of when
    start: Offsets = field(default_factory=dict)  # where the batch began that is the last one of the checkpoint
    before: Offsets = field(default_factory=dict)  # where it stood before a reset, without the last batch
    pending: Ranges = field(default_factory=dict)  # became durable before the position was known
    adopted: set[TopicPartition] = field(default_factory=set)  # in a former run's batch, and not lost since
    twice: int = 0  # what is read twice because others committed it although a former run's batch read it
    known: Offsets = field(default_factory=dict)  # what we know that Kafka has
    began: Offsets = field(default_factory=dict)  # position at the first answer
    theirs: set[TopicPartition] = field(default_factory=set)  # committed by others, not yet under our name
    followed: set[TopicPartition] = field(default_factory=set)  # stands where no stream of ours committed
    leaving: dict[int, set[TopicPartition]] = field(default_factory=dict)

    # --- where a partition stands ----------------------------------------------------------------------------------

    def resolve(self, tp: TopicPartition) -> None:
        """An answer counts: what is committed, our memory, or the starting options; then what is pending, but not if
        others committed: whether the sink took the batch is not known, as their commit may hide a reset that made it
        void."""
        found = self.kafka.get(tp)
        ours, as_of = self.memory.pop(tp, (None, -1))
        pending = self.pending.pop(tp, None)
        if found is None:
            self.known.pop(tp, None)
            at = ours if ours is not None else pending[0] if pending else self.before.get(tp, START[tp])
        else:
            self.before.pop(tp, None)
            self.known[tp] = at = found.offset
            if found.stream != STREAM:
                self.theirs.add(tp)
                start, end = batch = pending or self.flight.get(tp, (0, 0))
                inside = at != after(at, batch) or at == end > start
                self.twice += end - start if tp in self.adopted else 0
            elif ours is not None and found.seq < as_of and not self.followed_back(found, tp, as_of):
                at = max(at, ours)  # else the commit is as new as our memory, and may have followed somebody back
            own = found.stream == STREAM
            self.mark(tp, (found.followed and at == found.offset) if own else found.stream is None and not inside)
        self.began[tp] = at
        if pending and tp not in self.theirs and after(at, pending) != at:
            self.mark(tp, False)
            at = after(at, pending)
        self.position[tp] = at

    def followed_back(self, found: ev.Committed, tp: TopicPartition, as_of: int) -> bool:
        """A batch was in flight when somebody moved its partition back to before where it began."""
        start = self.start.get(tp)
        return found.followed and found.seq == as_of - 1 and start is not None and found.offset < start

    def mark(self, tp: TopicPartition, followed: bool) -> None:
        (self.followed.add if followed else self.followed.discard)(tp)

    def drop(self, tp: TopicPartition) -> None:
        slot = self.held.pop(tp)
        self.leaving.get(slot, set()).discard(tp)
        self.theirs.discard(tp)
        if tp in self.position:
            self.adopted.discard(tp)
            self.memory[tp] = self.position.pop(tp), self.seq
            self.start.pop(tp, None)

    def finish(self) -> None:
        """The batch in flight is durable."""
        for tp, (start, end) in self.flight.items():
            if self.busy(tp) and tp in self.theirs:
                pass  # it goes on where they committed
            elif self.busy(tp):
                self.position[tp] = end
                self.mark(tp, False)
            elif tp not in self.position:
                self.pending[tp] = start, end
        self.flight = {}

    def reset(self, reset_number: int) -> None:
        """A reset of the group shows: nothing that was known of before counts any more, but where nothing else says
        where to go on."""
        self.reset_number = reset_number
        begins = {tp: start for tp, (start, _) in self.pending.items()}
        stood = {tp: at for tp, (at, _) in self.memory.items()} | self.position | self.start
        self.before, self.start = self.before | begins | stood, {}
        self.followed, self.theirs = set(), set()
        self.flight, self.position, self.memory, self.pending, self.known = {}, {}, {}, {}, {}

    # --- what follows from it --------------------------------------------------------------------------------------

    def busy(self, tp: TopicPartition) -> bool:
        """Whether the batch in flight reads on from where the partition stands."""
        at = self.position.get(tp)
        return at is not None and tp in self.flight and after(at, self.flight[tp]) != at

    def reached(self, tp: TopicPartition) -> int | None:
        """The end of what is durable of a partition without a position."""
        ours, _ = self.memory.get(tp, (None, -1))
        pending = self.pending.get(tp)
        if ours is None or pending is None:
            return ours if pending is None else pending[1]
        return after(ours, pending)

    def dirty(self) -> Offsets:
        """What is to be committed. Where others committed inside the batch in flight, that waits for the batch: a note
        from before it would look as if the batch came after it."""
        known, theirs = self.known, self.theirs
        late = {tp for tp in theirs if self.busy(tp)}
        return {tp: at for tp, at in self.position.items() if (known.get(tp) != at or tp in theirs) and tp not in late}

    def owed(self) -> Offsets:
        """What Kafka may not have, ours or not."""
        others = {tp: at for tp in ALL if tp not in self.position and (at := self.reached(tp)) is not None}
        return self.dirty() | {tp: at for tp, at in others.items() if self.known.get(tp) != at}

    def plannable(self) -> Offsets:
        away = {tp for tps in self.leaving.values() for tp in tps} | self.theirs
        return {tp: at for tp, at in self.position.items() if tp not in away and not self.busy(tp)}

    def must_stay(self, tp: TopicPartition, on_its_way: set[TopicPartition]) -> bool:
        if tp not in self.position:
            return tp in self.flight or tp in self.owed()
        unknown = tp in self.dirty() and (self.known.get(tp) != self.position[tp] or tp in on_its_way)
        return self.busy(tp) or unknown

    def uncommitted(self, gone: tuple[TopicPartition, ...]) -> int:
        """Offsets that the next reader of these reads again."""
        total = 0
        for tp in gone:
            start, end = self.pending.get(tp) or self.flight.get(tp, (0, 0))
            if (at := self.position.get(tp)) is None:
                total += self.memory[tp][0] - self.start[tp] if tp in self.start else end - start
            else:
                reads_on = self.busy(tp) and tp not in self.theirs
                total += (end if reads_on else at) - min(at, self.known.get(tp, self.began[tp]))
        return total
