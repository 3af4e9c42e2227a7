"""A small model of positions and commits, written from the rules of the design.

Runs in: tests. Deliberately absent: the slots' consumers, lookups on their way, pauses (``test_group_model`` plays
them).
"""

from dataclasses import dataclass, field

from kit.harness import STREAM

from spark_group_source.model import TopicPartition
from spark_group_source.protocol import events as ev

ALL = [TopicPartition("orders", p) for p in range(4)]
KNOWN = {"orders": 3}  # partition 3 was added later
START = {ALL[0]: 5, ALL[1]: 0, ALL[2]: 9, ALL[3]: 0}  # the starting options

Offsets = dict[TopicPartition, int]
Ranges = dict[TopicPartition, tuple[int, int]]


def after(at: int, batch: tuple[int, int]) -> int:
    """The position after a batch: only a position within its range moves, to its end."""
    start, end = batch
    return end if start <= at < end else at


@dataclass
class Model:
    """The state of one stream."""

    group_offsets: dict[TopicPartition, ev.Committed] = field(default_factory=dict)
    """The group's committed offsets at Kafka."""
    reset_number: int = 0
    """The number of the newest reset that this run knows."""
    seq: int = -1
    """The number of the last durable batch."""
    in_flight: Ranges = field(default_factory=dict)
    """The ranges of the batch in flight."""
    held: dict[TopicPartition, int] = field(default_factory=dict)
    """The slot of each assigned partition."""
    position: Offsets = field(default_factory=dict)
    """Of the assigned partitions whose committed offset was fetched."""
    memory: dict[TopicPartition, tuple[int, int]] = field(default_factory=dict)
    """Of the others: the last position, and the batch after which it was right."""
    start: Offsets = field(default_factory=dict)
    """The start of the last batch of the checkpoint."""
    unsure: Offsets = field(default_factory=dict)
    """From where on Kafka may lack batches of this stream, where no run is known to have committed them."""
    before: Offsets = field(default_factory=dict)
    """The position before a reset, without the last batch."""
    pending: Ranges = field(default_factory=dict)
    """Ranges that became durable before the position was known."""
    replayed: set[TopicPartition] = field(default_factory=set)
    """Partitions of an earlier run's batch that were not lost since."""
    duplicates: int = 0
    """Offsets read twice because of a foreign commit inside an earlier run's batch."""
    committed: Offsets = field(default_factory=dict)
    """The committed offsets that the run knows."""
    began: Offsets = field(default_factory=dict)
    """The position at the first response."""
    foreign: set[TopicPartition] = field(default_factory=set)
    """Partitions whose position Kafka lacks under this stream's name: a foreign commit, or none. Adopted first."""
    followed: set[TopicPartition] = field(default_factory=set)
    """Partitions whose position came from a commit that no stream made."""
    durable_to: Offsets = field(default_factory=dict)
    """Of partitions that a foreign commit moved back inside what is durable: the end of that."""
    leaving: dict[int, set[TopicPartition]] = field(default_factory=dict)
    """Partitions whose revocation is held, by slot."""

    # --- positions ----------------------------------------------------------------------------------

    def resolve(self, tp: TopicPartition) -> None:
        """A response counts: the committed offset, the run's memory, or the starting options; then the pending batch,
        unless the commit is foreign: it may hide a reset that made the batch void, so it is unknown whether the sink
        has it."""
        found = self.group_offsets.get(tp)
        known = self.committed.get(tp, self.began.get(tp))
        was_followed, durable_to = tp in self.followed, self.durable_to.pop(tp, 0)
        durable_to = max(durable_to, self.reached(tp) or 0)
        ours, as_of = self.memory.pop(tp, (None, -1))
        pending = self.pending.pop(tp, None)
        since = self.unsure.get(tp, ours or 0) if known is None else known
        if found is None:
            self.committed.pop(tp, None)
            at = ours if ours is not None else pending[0] if pending else self.before.get(tp, START[tp])
        else:
            self.before.pop(tp, None)
            self.committed[tp] = at = found.offset
            if found.stream != STREAM:
                self.foreign.add(tp)
                start, end = batch = pending or self.in_flight.get(tp, (0, 0))
                inside = at != after(at, batch) or at == end > start
                self.duplicates += end - start if tp in self.replayed else 0
                if ours is not None and not was_followed:
                    inside |= since <= at < durable_to
                first = min(self.start.get(tp, ours or 0), since)
                if ours is not None and tp not in self.replayed and tp in self.start and first <= at < ours:
                    self.duplicates += ours - at
            elif ours is not None and found.seq < as_of and not self.followed_back(found, tp, as_of):
                at = max(at, ours)  # else the commit is as new as the memory, and may have followed a rewind
            own = found.stream == STREAM
            # A commit that does not know the group's reset was made where a foreign commit had replaced its note.
            followed = found.followed or found.reset_number < self.reset_number
            self.mark(tp, (followed and at == found.offset) if own else found.stream is None and not inside)
        self.began[tp] = at
        is_durable = ours is not None and not was_followed and since <= at
        is_durable |= pending is not None and after(at, pending) != at
        is_durable &= tp not in self.followed
        knows_pending = found is not None and found.seq > as_of
        if pending and tp not in self.foreign and after(at, pending) != at and not knows_pending:
            self.mark(tp, False)
            at = after(at, pending)
        self.position[tp] = at
        self.durable_to |= {tp: durable_to} if is_durable and at < durable_to else {}
        if found is None and not self.is_reading(tp):
            self.foreign.add(tp)

    def followed_back(self, found: ev.Committed, tp: TopicPartition, as_of: int) -> bool:
        """Whether a partition was moved back to before the start of the batch in flight."""
        start = self.start.get(tp)
        return found.followed and found.seq == as_of - 1 and start is not None and found.offset < start

    def mark(self, tp: TopicPartition, followed: bool) -> None:
        (self.followed.add if followed else self.followed.discard)(tp)

    def drop(self, tp: TopicPartition) -> None:
        slot = self.held.pop(tp)
        self.leaving.get(slot, set()).discard(tp)
        self.foreign.discard(tp)
        if tp in self.position:
            self.replayed.discard(tp)
            self.memory[tp] = self.position.pop(tp), self.seq
            self.start.pop(tp, None)

    def batch_durable(self) -> None:
        """The batch in flight is durable."""
        for tp, (start, end) in self.in_flight.items():
            if self.is_reading(tp) and tp in self.foreign:  # it continues at the foreign commit
                self.durable_to[tp] = max(end, self.durable_to.get(tp, 0))
            elif self.is_reading(tp):
                self.position[tp] = end
                self.mark(tp, False)
                if self.durable_to.get(tp, end) <= end:
                    self.durable_to.pop(tp, None)
            elif tp not in self.position:
                self.pending[tp] = start, end
        self.in_flight = {}

    def reset(self, reset_number: int) -> None:
        """A reset of the group is detected: all positions known before are void, except where nothing else shows how to
        continue."""
        self.reset_number = reset_number
        begins = {tp: start for tp, (start, _) in self.pending.items()}
        stood = {tp: at for tp, (at, _) in self.memory.items()} | self.position | self.start
        self.before, self.start = self.before | begins | stood, {}
        self.unsure = {}
        self.followed, self.foreign, self.durable_to = set(), set(), {}
        self.in_flight, self.position, self.memory, self.pending, self.committed = {}, {}, {}, {}, {}

    # --- derived values --------------------------------------------------------------------------------------

    def is_reading(self, tp: TopicPartition) -> bool:
        """Whether the batch in flight continues at the partition's position."""
        at = self.position.get(tp)
        return at is not None and tp in self.in_flight and after(at, self.in_flight[tp]) != at

    def reached(self, tp: TopicPartition) -> int | None:
        """The durable end of a partition without a position."""
        ours, _ = self.memory.get(tp, (None, -1))
        pending = self.pending.get(tp)
        if ours is None or pending is None:
            return ours if pending is None else pending[1]
        return after(ours, pending)

    def due(self) -> Offsets:
        """What must be committed. A foreign commit inside the batch in flight waits for the batch: a note from before
        it would look as if the batch came after it."""
        committed, foreign = self.committed, self.foreign
        late = {tp for tp in foreign if self.is_reading(tp)}
        return {
            tp: at for tp, at in self.position.items() if (committed.get(tp) != at or tp in foreign) and tp not in late
        }

    def uncommitted(self) -> Offsets:
        """Positions that may not be committed, of assigned and other partitions."""
        others = {tp: at for tp in ALL if tp not in self.position and (at := self.reached(tp)) is not None}
        return self.due() | {tp: at for tp, at in others.items() if self.committed.get(tp) != at}

    def moved_back(self) -> dict[TopicPartition, tuple[int, int]]:
        """Of partitions that a foreign commit moved back inside what is durable: the position, and the end of that."""
        found = {tp: (self.position.get(tp, self.reached(tp)), end) for tp, end in self.durable_to.items()}
        return {tp: (at, end) for tp, (at, end) in found.items() if at is not None and at < end}

    def plannable(self) -> Offsets:
        away = {tp for tps in self.leaving.values() for tp in tps} | self.foreign
        return {tp: at for tp, at in self.position.items() if tp not in away and not self.is_reading(tp)}

    def base(self, tp: TopicPartition) -> int:
        """From where on Kafka may lack batches of this stream."""
        remembered, _ = self.memory.get(tp, (None, -1))
        return self.committed.get(tp, self.began.get(tp, self.unsure.get(tp, remembered or 0)))

    def must_hold(self, tp: TopicPartition, on_its_way: set[TopicPartition]) -> bool:
        if tp not in self.position:
            reached = self.reached(tp)
            return tp in self.in_flight or reached not in (None, self.committed.get(tp))
        unknown = tp in self.due() and (self.committed.get(tp) != self.position[tp] or tp in on_its_way)
        return self.is_reading(tp) or unknown

    def duplicates_of(self, gone: tuple[TopicPartition, ...]) -> int:
        """Offsets of these lost partitions that their next consumer reads again."""
        total = 0
        for tp in gone:
            start, end = self.pending.get(tp) or self.in_flight.get(tp, (0, 0))
            if (at := self.position.get(tp)) is None:
                total += self.memory[tp][0] - self.start[tp] if tp in self.start else end - start
            else:
                reads_on = self.is_reading(tp) and tp not in self.foreign
                total += (end if reads_on else at) - min(at, self.committed.get(tp, self.began[tp]))
        return total
