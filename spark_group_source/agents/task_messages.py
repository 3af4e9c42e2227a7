"""Messages of tasks: claims to pieces of a plan, reads from an agent's buffer, and positions to prefetch from.

Runs in: the stream reader, agents, tasks. Deliberately absent: messages about members, and rules (``protocol.claims``
decides the response to a claim).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from spark_group_source.model import OffsetRange, TopicPartition


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A request: task number ``task`` of a plan starts on ``executor`` and claims its piece."""

    plan: str
    task: int
    executor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimGranted:
    """The response: the ranges of the piece, with topic ids and leader epochs when they were planned."""

    ranges: tuple[OffsetRange, ...]
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    leader_epochs: Mapping[TopicPartition, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRefused:
    """The response: the task gets no piece, and why."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEnded:
    """An attempt of a task with a claim ended on ``executor``, successfully or not.

    ``rows_from_memory``, ``rows_from_brokers``: rows by partition that it read from its agent's buffer, and from
    brokers. ``skipped``: offsets of its ranges whose records were gone; empty if the attempt did not finish.
    """

    plan: str
    task: int
    executor: str
    rows_from_memory: Mapping[TopicPartition, int] = field(default_factory=dict)
    rows_from_brokers: Mapping[TopicPartition, int] = field(default_factory=dict)
    skipped: tuple[OffsetRange, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefetchPositions:
    """The positions to prefetch from. They replace the former ones: other partitions are prefetched no more."""

    positions: Mapping[TopicPartition, int]
    """Start of the next plan. A position below the former one is a rewind: the partition's buffer is dropped."""
    keep: Mapping[TopicPartition, int] = field(default_factory=dict)
    """Start of the batch in flight, whose tasks may not have read yet; buffered records below it are dropped. The
    position applies to a partition that is missing: it has no batch in flight."""
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    """Topic ids when the batch was planned (KIP-516). If an id changes, the topic's buffers are dropped."""
    leader_epochs: Mapping[TopicPartition, int] = field(default_factory=dict)
    """Epochs of the leaders that reported the ends of the last plans (KIP-320). If an epoch changes, the partition's
    buffer is dropped: its log may have been truncated. A partition that is missing keeps the former epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRange:
    """What an agent serves of one range: all records below the offset ``until``, which are ``rows`` rows.

    ``index``: of the range in the request.
    """

    index: int
    until: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRanges:
    """An agent's response to a task's :class:`ClaimGranted`. ``rows`` rows in all follow as an Arrow stream."""

    ranges: tuple[ServedRange, ...]
    rows: int


TASK_MESSAGES = (Claim, ClaimGranted, ClaimRefused, TaskEnded, PrefetchPositions)
"""The messages of the control channel among these."""
