"""What really happened to each partition, apart from what any process believes: the values behind ``invariants``.

Runs in: tests. Deliberately absent: the rules.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kit.kafka_group import Entry


class Cause(Enum):
    """Why records may be processed twice."""

    TOLD = "lost, and told so"  # the process must have counted these
    OVERRUN = "held beyond the budget"  # and these
    UNTOLD = "lost while holding a revocation"  # the library does not say
    DEAD = "killed or replaced"
    REPLAY = "a batch that was written was run again"  # and the sink does not know its batches
    OPERATOR = "moved back on purpose"
    NEW_LOG = "the log is not what it was"  # it lost its end, or its topic was made again


@dataclass(slots=True, eq=False)
class Reader:
    """One run of a process. ``party`` is what survives it: a stream, or the run itself for an ordinary consumer."""

    name: str
    party: str
    number: int = 0  # later runs of a party have higher ones
    counted: Callable[[], int] | None = None  # offsets that it says may be read twice; None for ordinary consumers
    alive: bool = True
    closing: bool = False  # its members are being closed
    known: Mapping[str, int] = field(default_factory=dict)  # partitions of each topic when its stream began
    began_ms: int = 0
    ended_ms: int = 0
    blame: list[list["Loss"]] = field(default_factory=list)  # for each offset that was, its losses that explain it


@dataclass(slots=True)
class Holding:
    """A consumer that has a partition, or believes so."""

    reader: Reader
    since_ms: int
    begin: int  # where it goes on reading, at the earliest
    until: int | None = None  # end of what it processed since, without a gap
    loss: "Loss | None" = None  # somebody else has it meanwhile


@dataclass(slots=True)
class Loss:
    """Offsets from ``base`` on, up to what its reader read, may be processed by somebody else too."""

    reader: Reader
    base: int
    cause: Cause
    end: int | None = None  # None: its reader goes on, not knowing
    unheard: bool = False  # an agent was told, and its run does not know yet


class Range(NamedTuple):
    """What one batch read of a partition. ``seq`` is the number of the batch."""

    seq: int
    start: int
    end: int


@dataclass
class Book:
    """Everything about one partition, as long as its topic is not deleted."""

    start: int
    end: int
    longest: int = 0  # the furthest end that it lost
    stale: int = -1  # up to here a former topic of this name was read: its plans and commits may still come
    times: list[int] = field(default_factory=list)  # by offset, from ``start``
    first: list[Reader] = field(default_factory=list)
    whole: int = 0  # everything below was processed, or is nobody's
    nobodys: int = 0  # everything below may be left out: it came before the start, was skipped on purpose, or is gone
    holders: dict[str, Holding] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)
    reached: dict[str, int] = field(default_factory=dict)  # by party: end of what it planned or processed
    chain: dict[str, int] = field(default_factory=dict)  # by party: where its next range starts
    durable: dict[str, Range] = field(default_factory=dict)  # by party: its last batch that the sink has
    away: set[str] = field(default_factory=set)  # parties that somebody else followed, or committed after
    commits: list[tuple[int, Entry]] = field(default_factory=list)
    flight: dict[Reader, tuple[int, int]] = field(default_factory=dict)
    again: bool = False  # its topic was deleted and made again
    begun: set[Reader] = field(default_factory=set)  # runs that began at its beginning because of that
    back: set[Reader] = field(default_factory=set)  # those of them that did not commit so yet
    firsts: set[int] = field(default_factory=set)  # where its log ever began
    rewound: int = 0  # below this records were nobody's, until an operator went back behind that by Kafka's own tool
    took: set[str] = field(default_factory=set)  # the tables, "" for others, that read from there
    undone: set[int] = field(default_factory=set)  # where batches began that a reset made void, and nobody committed
    moved: bool = False  # an operator moved it by Kafka's own tool
    halfway: bool = False  # an operator moved it by a reset that did not reach the table
    rows: dict[str, set[int]] = field(default_factory=dict)  # by table with a ledger: the offsets that are in it
