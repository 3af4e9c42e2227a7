"""What tasks say to the stream reader and to their agent about the pieces of a plan; where an agent reads on.

Runs in: the stream reader, executor processes, tasks. Deliberately absent: what members say, and rules (what a claim is
answered is decided in ``group.claims``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from spark_group_source.model import OffsetRange, TopicPartition


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A question: task number ``task`` of a plan starts on ``executor``; what does it read?"""

    plan: str
    task: int
    executor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimGranted:
    """The answer: these ranges, of topics with these ids, and with these leaders when the batch was planned."""

    ranges: tuple[OffsetRange, ...]
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    leader_epochs: Mapping[TopicPartition, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRefused:
    """The answer: nothing, and why."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEnded:
    """A task that had claimed ended on ``executor``, in any way.

    ``memory``, ``brokers``: rows by partition that it took from its agent, and from brokers. ``lost``: what of its
    ranges was gone and skipped; of a task that did not come to its end it is not told.
    """

    plan: str
    task: int
    executor: str
    memory: Mapping[TopicPartition, int] = field(default_factory=dict)
    brokers: Mapping[TopicPartition, int] = field(default_factory=dict)
    lost: tuple[OffsetRange, ...] = ()


@dataclass(frozen=True, slots=True)
class Ahead:
    """From where to read ahead. It replaces what was told before: partitions that are not named are read no more."""

    positions: Mapping[TopicPartition, int]
    """Where the next plan will begin. Lower than before is a rewind: all that is held of the partition is dropped."""
    keep: Mapping[TopicPartition, int] = field(default_factory=dict)
    """Where the batch in flight begins, for tasks that have still to ask; what lies below it is dropped. A partition
    that is missing has no batch in flight: its position counts."""
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    """The topics as they were planned (KIP-516). With another id all that is held of a topic is dropped."""
    leader_epochs: Mapping[TopicPartition, int] = field(default_factory=dict)
    """Of the leaders that told the ends of the last plans (KIP-320). With another epoch all that is held of the
    partition is dropped: its log may have been cut. A partition that is missing keeps the former one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What an agent serves of one range: all of it below ``until``, which are so many rows."""

    place: int
    until: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """An agent's answer to a task's :class:`ClaimGranted`. ``rows`` in all follow as Arrow's stream."""

    parts: tuple[Part, ...]
    rows: int


CLAIM_MESSAGES = (Claim, ClaimGranted, ClaimRefused, TaskEnded, Ahead)
"""For a codec."""
