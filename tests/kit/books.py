"""The true state of each partition, apart from the beliefs of the processes; the values that ``invariants`` checks.

Runs in: tests. Deliberately absent: the rules.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kit.kafka_group import Entry
from spark_group_source.model import TopicPartition


class Cause(Enum):
    """Reason why records may be processed twice."""

    REPORTED = "lost and reported"  # the process must have counted these
    OVERRUN = "hold budget exceeded"  # these too
    UNREPORTED = "lost while holding a revocation"  # librdkafka does not report it
    DEAD = "killed or replaced"
    REPLAY = "replay of a written batch"  # and the sink does not deduplicate batches
    OPERATOR = "moved back on purpose"
    NEW_LOG = "the log changed"  # it was truncated, or its topic was recreated


@dataclass(slots=True, eq=False)
class Reader:
    """One run of a process. ``party`` identifies its state across runs: a stream, or the run itself for a plain
    consumer."""

    name: str
    party: str
    number: int = 0  # later runs of a party have higher ones
    counted: Callable[[], int] | None = None  # its possible-duplicates count; None for ordinary consumers
    alive: bool = True
    closing: bool = False  # its members are being closed
    has_died: bool = False  # its stream reader, which counts
    reset_number: int = 0  # that of its last batch
    fails_on_loss: bool = False  # failOnDataLoss
    known: Mapping[str, int] = field(default_factory=dict)  # partitions of each topic when its stream began
    told: dict[TopicPartition, int | None] = field(default_factory=dict)  # the committed offsets that it has read last
    replays: int = -1  # the number of the batch of a former run that it began with
    began_ms: int = 0
    ended_ms: int = 0
    blame: list[list["Loss"]] = field(default_factory=list)  # for each duplicate offset, its losses that explain it


@dataclass(slots=True)
class Holding:
    """A consumer that owns a partition, or believes so."""

    reader: Reader
    since_ms: int
    begin: int  # lowest offset where it may continue reading
    until: int | None = None  # end of its contiguous processed offsets since
    loss: "Loss | None" = None  # set while the partition has another owner


@dataclass(slots=True)
class Loss:
    """Offsets from ``base`` on, up to the reader's progress, may be processed by another consumer too."""

    reader: Reader
    base: int
    cause: Cause
    end: int | None = None  # None: the reader continues, not knowing of the loss
    report_pending: bool = False  # reported to an agent, not yet to its run
    known: bool = False  # its run was notified while it counted


class Range(NamedTuple):
    """The range of a partition that one batch read. ``seq`` is the number of the batch."""

    seq: int
    start: int
    end: int


@dataclass
class Book:
    """The true state of one partition, until its topic is deleted."""

    start: int
    end: int
    longest: int = 0  # the furthest end before a truncation
    truncated: list[int] = field(default_factory=list)  # where it was truncated, in order
    replaced: dict[int, set[str]] = field(default_factory=dict)
    """Truncated offsets that no reader has processed again, each with the parties that had planned the record."""
    stale: int = -1  # a former topic's progress: its plans and commits below may still arrive
    times: list[int] = field(default_factory=list)  # by offset, from ``start``
    first: list[Reader] = field(default_factory=list)
    whole: int = 0  # everything below was processed or need not be
    skippable: int = 0  # everything below may be skipped: before the start, skipped on purpose, or deleted
    holders: dict[str, Holding] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)
    reached: dict[str, int] = field(default_factory=dict)  # by party: end of what it planned or processed
    chain: dict[str, int] = field(default_factory=dict)  # by party: where its next range starts
    durable: dict[str, Range] = field(default_factory=dict)  # by party: its last durable batch
    away: set[str] = field(default_factory=set)  # parties with a later owner or a later foreign commit
    commits: list[tuple[int, Entry]] = field(default_factory=list)
    flight: dict[Reader, tuple[int, int]] = field(default_factory=dict)
    again: bool = False  # its topic was recreated
    unclear: bool = False  # its first records may be skipped: a position in the former topic was not known as one
    begun: set[Reader] = field(default_factory=set)  # runs that restarted at the beginning because of that
    back: set[Reader] = field(default_factory=set)  # those of them without a commit since
    firsts: set[int] = field(default_factory=set)  # all first offsets that its log ever had
    rewound: int = 0  # records below this were skipped until an operator rewound behind it by Kafka's own tool
    took: set[str] = field(default_factory=set)  # the tables, "" for others, that read from there
    undone: set[int] = field(default_factory=set)  # starts of batches that a reset made void and that have no commit
    moved: bool = False  # an operator moved it by Kafka's own tool
    halfway: bool = False  # an operator moved it by a reset that did not reach the table
    rows: dict[str, set[int]] = field(default_factory=dict)  # by table with a ledger: the offsets that are in it

    def durable_seq(self, party: str) -> int:
        """Return the number of a party's last durable batch; -1 before the first."""
        return self.durable[party].seq if party in self.durable else -1
