"""What a run counts, and the frozen snapshot of it.

Runs in: the stream reader, tests. Deliberately absent: where a snapshot goes (``host.runs``).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """One moment of a run. Counts are since its start, durations in milliseconds."""

    group: str
    stream: str
    seq: int
    """Number of the last durable batch; -1 before the first."""
    state: str
    """What the run does for Spark, such as looking, planned or reading (the table "run" of the documentation)."""
    generation: int
    """Group generation (classic) or member epoch (KIP-848) of the newest assignment; -1 before it."""
    slots: tuple[str, ...]
    assigned: tuple[int, ...]
    """Partitions that each slot has."""
    hosts: tuple[str, ...] = ()
    """Where each slot's member lives: the name of an agent, empty for the stream reader itself."""
    lent_since_ms: tuple[int, ...] = ()
    """Since when it has lived there, on the run's clock; 0 for the stream reader itself."""
    buffered_bytes: tuple[int, ...] = ()
    buffered_rows: tuple[int, ...] = ()
    """What its agent has read ahead of its partitions, as it said with its last sign of life."""
    rows_from_memory: tuple[int, ...] = ()
    rows_from_brokers: tuple[int, ...] = ()
    """Rows of each slot's partitions that tasks took from their agent, and from brokers, tries that failed included.
    With memberHost=driver tasks have no way to tell: all are 0."""
    recalled: tuple[int, ...] = ()
    """How often each slot was called back from an agent."""
    moves: int = 0
    """Slots that moved from one host to another, between two batches."""
    recalls: int = 0
    """Slots that were called back from agents that were gone, or could not join the group."""
    unreachable_since_ms: int
    """Since when the brokers have not answered, on the run's clock; 0: they do."""
    uncommitted: int
    """Partitions whose durable position Kafka does not have yet."""
    uncommitted_offsets: int = 0
    """Offsets of ours that the sink has and Kafka's committed offsets do not."""
    metrics_port: int = 0
    """Where the run serves Prometheus; 0: it does not."""
    rebalances: int
    """Assignments and revocations that changed something."""
    rebalanced_at_ms: int
    """When the last of them came, on the run's clock; 0 before."""
    reason: str
    """What it was, such as ``slot 0 was given 3 partitions``; empty before. Kafka does not tell who caused it."""
    holds: int
    """Revocations that were held for the batch in flight or its commit."""
    hold_last_ms: int
    hold_max_ms: int
    overruns: int
    """Holds that used up their budget: their partitions went without a commit."""
    lost: int
    """Partitions taken away without asking."""
    maybe_twice: int
    """Offsets of lost partitions that were read but not committed: their next reader may read them again."""
    records_lost: int
    """Offsets that were still to be read and are gone: those that planning met, and those that tasks skipped and could
    tell of (``coordinatorPort``)."""
    commits: int
    commits_failed: int
    echo_last_ms: int
    """From "batch is durable" to "Kafka has all its offsets"."""
    echo_max_ms: int
    offsets_expiring: int = 0
    """Partitions of ours whose offset was committed last before three quarters of the brokers' retention: it may be
    forgotten soon after the query stops (KIP-848), unless it is committed again before. 0 until the retention is
    known, a minute after the start."""
    offsets_renewed: int = 0
    """Offsets of idle partitions that were committed again where they stood, after half of the retention."""
    offsets_restored: int = 0
    """Partitions that went on where the checkpoint says because Kafka had no offset of them: expired, deleted, or never
    committed before a crash."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, doc: Mapping[str, Any]) -> "Statistics":
        """The inverse of :meth:`as_dict`, also through JSON; names that are not of this class are left out."""
        values: dict[str, Any] = {field.name: doc[field.name] for field in fields(cls)}
        return cls(**values | {name: tuple(value) for name, value in values.items() if isinstance(value, list)})


@dataclass(slots=True)
class Counters:
    """The numbers behind :class:`Statistics`; only the machine changes them."""

    rebalances: int = 0
    rebalanced_at_ms: int = 0
    reason: str = ""
    holds: int = 0
    hold_last_ms: int = 0
    hold_max_ms: int = 0
    overruns: int = 0
    lost_partitions: int = 0
    maybe_twice: int = 0
    commits: int = 0
    commits_failed: int = 0
    echo_last_ms: int = 0
    echo_max_ms: int = 0
    offsets_expiring: int = 0
    offsets_renewed: int = 0
    offsets_restored: int = 0

    def rebalanced(self, reason: str, *, now_ms: int) -> None:
        self.rebalances += 1
        self.rebalanced_at_ms = now_ms
        self.reason = reason

    def released(self, held_ms: int, *, overrun: bool) -> None:
        self.holds += held_ms > 0  # those that go at once were not held
        self.overruns += overrun
        self.hold_last_ms = held_ms
        self.hold_max_ms = max(self.hold_max_ms, held_ms)

    def lost(self, partitions: int, maybe_twice: int) -> None:
        self.lost_partitions += partitions
        self.maybe_twice += maybe_twice

    def committed(self, echo_ms: int | None) -> None:
        self.commits += 1
        if echo_ms is not None:
            self.echo_last_ms = echo_ms
            self.echo_max_ms = max(self.echo_max_ms, echo_ms)

    def commit_failed(self) -> None:
        self.commits_failed += 1

    def snapshot(
        self,
        *,
        group: str,
        stream: str,
        seq: int,
        state: str,
        generation: int,
        assigned: tuple[int, ...],
        slots: tuple[str, ...],
        uncommitted: int,
    ) -> Statistics:
        return Statistics(
            group=group,
            stream=stream,
            seq=seq,
            state=state,
            generation=generation,
            slots=slots,
            assigned=assigned,
            uncommitted=uncommitted,
            unreachable_since_ms=0,
            records_lost=0,
            rebalances=self.rebalances,
            rebalanced_at_ms=self.rebalanced_at_ms,
            reason=self.reason,
            holds=self.holds,
            hold_last_ms=self.hold_last_ms,
            hold_max_ms=self.hold_max_ms,
            overruns=self.overruns,
            lost=self.lost_partitions,
            maybe_twice=self.maybe_twice,
            commits=self.commits,
            commits_failed=self.commits_failed,
            echo_last_ms=self.echo_last_ms,
            echo_max_ms=self.echo_max_ms,
            offsets_expiring=self.offsets_expiring,
            offsets_renewed=self.offsets_renewed,
            offsets_restored=self.offsets_restored,
        )
