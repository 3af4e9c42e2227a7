"""The counters of a run, and what its tasks skipped.

Runs in: the stream reader, tests. Deliberately absent: where a snapshot is published (``host.run_files``).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.protocol import events as ev

BATCHES_KEPT = 2
"""Batches whose tasks may still report what they skipped: a report may be late."""


@dataclass(slots=True, kw_only=True)
class Statistics:
    """The counters and the state of a run. Counters start with the run; durations are in milliseconds.

    The run counts in one instance, and publishes copies that also contain its state at that moment
    (:meth:`Run.statistics`). Tuples have one entry per slot.
    """

    group: str
    stream: str = ""
    """The stream id; empty until the run has started."""
    seq: int = -1
    """Number of the last durable batch; -1 before the first."""
    state: str = ""
    """The state of the run, such as ``gathering``, ``planned`` or ``reading``: a value of ``RunState``."""
    generation: int = -1
    """Group generation (classic) or member epoch (KIP-848) of the newest assignment; -1 before it."""
    slots: tuple[str, ...] = ()
    """The state of each slot: a value of ``SlotState``."""
    assigned: tuple[int, ...] = ()
    """Assigned partitions of each slot."""
    agents: tuple[str, ...] = ()
    """The name of the agent on which each slot's member is placed; empty for the stream reader itself."""
    placed_since_ms: tuple[int, ...] = ()
    """Since when it is placed there, on the run's clock; 0 for the stream reader itself."""
    buffered_bytes: tuple[int, ...] = ()
    """Bytes that each slot's agent has prefetched, as of its last report."""
    buffered_rows: tuple[int, ...] = ()
    """The same in rows."""
    rows_from_memory: tuple[int, ...] = ()
    """Rows of each slot's partitions that tasks read from their agent, including those of failed attempts."""
    rows_from_brokers: tuple[int, ...] = ()
    """The same, read from brokers."""
    slot_recalls: tuple[int, ...] = ()
    """How often each slot was recalled from an agent."""
    moves: int = 0
    """Slots that moved to another agent, or to the stream reader, between two batches."""
    recalls: int = 0
    """Slots that were recalled from agents that were gone, or from which they could not join the group."""
    missing_topics: tuple[str, ...] = ()
    """Topics that ``subscribe`` names and that do not exist."""
    unreachable_since_ms: int = 0
    """Since when the brokers have not answered, on the run's clock; 0 if they do."""
    uncommitted_partitions: int = 0
    """Partitions whose durable position is not committed yet."""
    uncommitted_offsets: int = 0
    """Offsets that the sink has and that are not committed yet."""
    metrics_port: int = 0
    """The port of the Prometheus endpoint; 0 if there is none."""
    rebalances: int = 0
    """Assignments and revocations that changed something."""
    rebalanced_at_ms: int = 0
    """When the last of them happened, on the run's clock; 0 before the first."""
    reason: str = ""
    """What it changed, such as ``slot 0 was assigned 3 partitions``; empty before the first. Kafka does not report
    its cause."""
    holds: int = 0
    """Revocations that were held until the batch in flight was durable and committed."""
    hold_last_ms: int = 0
    """How long the last revocation was held."""
    hold_max_ms: int = 0
    """How long the longest one was held."""
    hold_overruns: int = 0
    """Holds that exceeded their budget: their partitions were released without a commit."""
    partitions_lost: int = 0
    """Partitions that were lost without a revocation, or released without a commit."""
    possible_duplicates: int = 0
    """Offsets that may be read twice: those of lost partitions that were read but not committed, and those of an
    earlier run's batch whose partition another consumer has committed since."""
    records_lost: int = 0
    """Offsets that were still to be read and are gone: those that planning found, and those that tasks skipped and
    could report (``coordinatorPort``)."""
    commits: int = 0
    """Successful offset commits."""
    commits_failed: int = 0
    """Failed offset commits; the next one includes their offsets."""
    commit_delay_last_ms: int = 0
    """From the moment when a batch was durable until all its offsets were committed."""
    commit_delay_max_ms: int = 0
    """The longest of these latencies."""
    offsets_renewed: int = 0
    """Offsets of idle partitions that were committed again unchanged, six hours after their last commit."""
    offsets_restored: int = 0
    """Partitions that continued at the checkpoint's position because the group had no offset for them: expired,
    deleted, or never committed before a crash."""
    tables: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """What the sinks of the driver's Python process wrote since it started, by table: rows ``inserted``, ``updated``
    and ``deleted``, and ``bad`` records. Only ``DeltaSink`` reports it."""

    def as_dict(self) -> dict[str, Any]:
        """All fields by name, ready for ``json.dumps``."""
        return asdict(self)

    @classmethod
    def from_dict(cls, doc: Mapping[str, Any]) -> "Statistics":
        """The inverse of :meth:`as_dict`, also through JSON. Another version of the package may have written it:
        unknown names are ignored, and missing ones get their defaults."""
        values: dict[str, Any] = {each.name: doc[each.name] for each in fields(cls) if each.name in doc}
        return cls(**values | {name: tuple(value) for name, value in values.items() if isinstance(value, list)})

    def count_rebalance(self, reason: str, *, now_ms: int) -> None:
        """Count an assignment or a revocation."""
        self.rebalances += 1
        self.rebalanced_at_ms = now_ms
        self.reason = reason

    def count_release(self, held_ms: int, *, overrun: bool) -> None:
        """Count a released revocation."""
        self.holds += held_ms > 0  # a revocation that is released at once was not held
        self.hold_overruns += overrun
        self.hold_last_ms = held_ms
        self.hold_max_ms = max(self.hold_max_ms, held_ms)

    def count_commit(self, latency_ms: int | None) -> None:
        """Count a successful commit. ``latency_ms``: None if offsets of the last batch are still not committed."""
        self.commits += 1
        if latency_ms is not None:
            self.commit_delay_last_ms = latency_ms
            self.commit_delay_max_ms = max(self.commit_delay_max_ms, latency_ms)


class Skips:
    """Offsets that tasks of the last batches skipped, because their records were gone. Only for counting: a task may be
    unable to report."""

    def __init__(self) -> None:
        self.records_lost = 0
        """Planned offsets that tasks skipped; each counts once, however many attempts report it."""
        self._reported: dict[int, dict[TopicPartition, list[tuple[int, int]]]] = {}

    def add(self, event: ev.TaskReported) -> None:
        """Count what a task reports as skipped."""
        if not event.counts.skipped or event.seq <= max(self._reported, default=-1) - BATCHES_KEPT:
            return
        reported = self._reported.setdefault(event.seq, {})
        for r in event.counts.skipped:
            self.records_lost += _added(reported.setdefault(r.tp, []), r)
        while len(self._reported) > BATCHES_KEPT:
            del self._reported[min(self._reported)]


def _added(known: list[tuple[int, int]], r: OffsetRange) -> int:
    """Add a range to the known ones; returns how many of its offsets are new."""
    before = sum(end - start for start, end in known)
    joined: list[tuple[int, int]] = []
    for start, end in sorted([*known, (r.start, r.end)]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    known[:] = joined
    return sum(end - start for start, end in joined) - before
