"""What a run counts, and what its tasks skipped.

Runs in: the stream reader, tests. Deliberately absent: where a snapshot goes (``host.runs``).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.protocol import events as ev

BATCHES_KEPT = 2
"""Batches whose tasks may still tell what they skipped: a word may come late."""


@dataclass(slots=True, kw_only=True)
class Statistics:
    """What a run counts, and how it stands. Counts are since its start, durations in milliseconds.

    The machine counts in one; what is published are copies that also say how things stood at that moment
    (:meth:`Run.statistics`).
    """

    group: str
    stream: str = ""
    seq: int = -1
    """Number of the last durable batch; -1 before the first."""
    state: str = ""
    """What the run does for Spark, such as looking, planned or reading (the table "run" of the documentation)."""
    generation: int = -1
    """Group generation (classic) or member epoch (KIP-848) of the newest assignment; -1 before it."""
    slots: tuple[str, ...] = ()
    assigned: tuple[int, ...] = ()
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
    unreachable_since_ms: int = 0
    """Since when the brokers have not answered, on the run's clock; 0: they do."""
    uncommitted: int = 0
    """Partitions whose durable position Kafka does not have yet."""
    uncommitted_offsets: int = 0
    """Offsets of ours that the sink has and Kafka's committed offsets do not."""
    metrics_port: int = 0
    """Where the run serves Prometheus; 0: it does not."""
    rebalances: int = 0
    """Assignments and revocations that changed something."""
    rebalanced_at_ms: int = 0
    """When the last of them came, on the run's clock; 0 before."""
    reason: str = ""
    """What it was, such as ``slot 0 was given 3 partitions``; empty before. Kafka does not tell who caused it."""
    holds: int = 0
    """Revocations that were held for the batch in flight or its commit."""
    hold_last_ms: int = 0
    hold_max_ms: int = 0
    overruns: int = 0
    """Holds that used up their budget: their partitions went without a commit."""
    lost: int = 0
    """Partitions taken away without asking."""
    maybe_twice: int = 0
    """Offsets of lost partitions that were read but not committed, which their next reader may read again; and those of
    a former run's batch whose partition another member has committed since."""
    records_lost: int = 0
    """Offsets that were still to be read and are gone: those that planning met, and those that tasks skipped and could
    tell of (``coordinatorPort``)."""
    commits: int = 0
    commits_failed: int = 0
    echo_last_ms: int = 0
    """From "batch is durable" to "Kafka has all its offsets"."""
    echo_max_ms: int = 0
    offsets_renewed: int = 0
    """Offsets of idle partitions that were committed again where they stood, after six hours."""
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

    # --- counting ---------------------------------------------------------------------------------------------------

    def rebalanced(self, reason: str, *, now_ms: int) -> None:
        self.rebalances += 1
        self.rebalanced_at_ms = now_ms
        self.reason = reason

    def released(self, held_ms: int, *, overrun: bool) -> None:
        self.holds += held_ms > 0  # those that go at once were not held
        self.overruns += overrun
        self.hold_last_ms = held_ms
        self.hold_max_ms = max(self.hold_max_ms, held_ms)

    def committed(self, echo_ms: int | None) -> None:
        self.commits += 1
        if echo_ms is not None:
            self.echo_last_ms = echo_ms
            self.echo_max_ms = max(self.echo_max_ms, echo_ms)


class Skips:
    """What tasks skipped of the last batches, because it was gone. A task may not be able to tell, so nothing is
    decided by it."""

    def __init__(self) -> None:
        self.records_lost = 0
        """Planned offsets that tasks skipped, each once however many tries told of it."""
        self._told: dict[int, dict[TopicPartition, list[tuple[int, int]]]] = {}

    def add(self, event: ev.TaskReported) -> None:
        """A task tells what it skipped."""
        if not event.skipped or event.seq <= max(self._told, default=-1) - BATCHES_KEPT:
            return
        told = self._told.setdefault(event.seq, {})
        for r in event.skipped:
            self.records_lost += _added(told.setdefault(r.tp, []), r)
        while len(self._told) > BATCHES_KEPT:
            del self._told[min(self._told)]


def _added(known: list[tuple[int, int]], r: OffsetRange) -> int:
    """How many offsets of a range are none of those that are known; after this they are."""
    before = sum(end - start for start, end in known)
    joined: list[tuple[int, int]] = []
    for start, end in sorted([*known, (r.start, r.end)]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    known[:] = joined
    return sum(end - start for start, end in joined) - before
