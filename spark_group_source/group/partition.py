"""What a run knows of one partition, and how its memory stands to what Kafka has.

Runs in: the stream reader (inside ``positions``), tests. Deliberately absent: what changes it (``positions``).
"""

from dataclasses import dataclass

from spark_group_source.group import events as ev
from spark_group_source.group.states import PartitionState

UNKNOWN = frozenset({PartitionState.CAME, PartitionState.ASKED, PartitionState.STARTING})
"""Ours, but where it stands is not known yet."""


@dataclass(slots=True)
class Partition:
    """One partition that this run ever heard of."""

    state: PartitionState = PartitionState.AWAY
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
    uncounted: int = 0  # offsets of that range, or of the batch in flight, that others read, too, as their commit shows
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
    def owed_unseen(self) -> bool:
        """The same of one whose committed offset this run does not know now."""
        return self.owed and (self.state is PartitionState.AWAY or self.state in UNKNOWN)

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
        end = self.until if self.state is PartitionState.PLANNED else self.position
        base = self.began if self.committed is None else self.committed
        return end - min(self.position, base) + self.uncounted


def is_older(committed: ev.Committed, partition: Partition) -> bool:
    """Whether a commit of ours was made before what we remember. Between the last batch and the plan of the next one a
    position can move on: records that were to be read are gone.

    A run whose batch is in flight goes on where another stream or an operator put the group since. Under its own name
    that looks like a commit of before; but it is before where that batch began, and no batch of ours ended there.
    """
    if partition.planned and committed.seq == partition.as_of:
        return not _before(committed.offset, partition.position) or committed.offset == partition.lost
    put_back = committed.seq == partition.as_of - 1 and _before(committed.offset, partition.start)
    return committed.seq < partition.as_of and not put_back


def _before(offset: int, at: int | None) -> bool:
    return at is not None and offset < at


def after_batch(at: int, batch: tuple[int, int]) -> int:
    """Where a partition stands after a batch, if it stood at ``at`` before: only one that begins there moves it."""
    start, end = batch
    return end if start <= at < end else at
