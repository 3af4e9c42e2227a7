"""One partition of a run: what is known of it in each state, and nothing else.

Runs in: the stream reader, tests. Deliberately absent: which change follows from which event (the table in ``states``)
and the rules that choose a position (``partitions``).

The *position* of a partition is the next offset after all durable batches of the stream. It is a :class:`Position`
while it is known (adopting, ready, in flight). Before it is known, and after the partition is revoked, the run only
has a :class:`Memory` of it.
"""

from dataclasses import dataclass
from typing import ClassVar

from spark_group_source.protocol import events as ev


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
    lost_from: int | None = None
    """The position before records were found missing, until a batch moves the partition on; None: none are missing."""
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
class Unresolved:
    """Assigned; the position is not known, and no lookup is in flight for it."""

    slot: int
    memory: AnyMemory


@dataclass(slots=True)
class Fetching:
    """The committed offset of the group is being read."""

    slot: int
    memory: AnyMemory


@dataclass(slots=True)
class Resolving:
    """The group has no committed offset and the run has no memory: the starting options are being resolved."""

    memory: ClassVar[AnyMemory] = None
    slot: int


@dataclass(slots=True)
class Known:
    """Assigned, with a known position: adopting, ready or in flight.

    Changed in place, because a batch can have 100,000 partitions.
    """

    slot: int
    position: Position
    is_foreign: bool = False
    """Whether the position is a foreign commit, which has to be committed under this stream's name before the next
    batch reads the partition. Inside the batch in flight it is adopted when that is durable: a commit of this stream
    from before the batch would mean that the batch comes after it."""
    until: int | None = None
    """The end of what the batch in flight reads; None if it does not read the partition."""
    durable: Memory | None = None
    """What was remembered when the position became a foreign commit inside what is durable. It holds again if the
    partition is lost before the position is committed under this stream's name."""

    @property
    def is_ready(self) -> bool:
        """Whether the next batch may read the partition."""
        return self.until is None and not self.is_foreign

    @property
    def is_due(self) -> bool:
        """Whether the position has to be committed now."""
        return self.until is None if self.is_foreign else self.position.is_due


AssignedPartition = Unresolved | Fetching | Resolving | Known
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


def after_batch(at: int, batch: tuple[int, int]) -> int:
    """The position after a batch, if it was ``at`` before: only a batch that covers ``at`` moves it."""
    start, end = batch
    return end if start <= at < end else at
