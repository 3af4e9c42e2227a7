"""What tasks and the stream reader say about the pieces of a plan.

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
class Given:
    """The answer: these ranges, of topics with these ids, and with these leaders when the batch was planned."""

    ranges: tuple[OffsetRange, ...]
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    leader_epochs: Mapping[TopicPartition, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotGiven:
    """The answer: nothing, and why."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEnded:
    """A task that had claimed ended on ``executor``, in any way."""

    plan: str
    task: int
    executor: str


CLAIM_MESSAGES = (Claim, Given, NotGiven, TaskEnded)
"""For a codec."""
