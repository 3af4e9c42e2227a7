"""What an agent is told, and what it is given.

Runs in: agents, and whoever speaks to them. Deliberately absent: how it travels (``wire`` between processes of one
host).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from spark_group_source.model import TopicPartition


@dataclass(frozen=True, slots=True)
class Ahead:
    """From where to read ahead. It replaces what was told before: partitions that are not named are read no more."""

    plan: int
    """Of plans that were told out of order the one with the highest number counts."""
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


class Hosted(Protocol):
    """What lives in an agent besides its reader: the executor's side of a coordinator, and members that it lends."""

    def start(self, read_ahead: Callable[[Ahead], None]) -> None:
        """Begin, on threads of its own. ``read_ahead`` may be called from any of them, and never waits."""

    def ended(self) -> str:
        """Why the agent has to end: its run is over, or its coordinator is gone. Empty as long as neither is."""

    def has_coordinator(self) -> bool:
        """Whether it speaks to one now. An agent without one, that no task asks, ends after a while."""

    def stop(self, timeout_s: float) -> None:
        """End everything; members close without leaving the group."""


class Nobody:
    """Nothing is hosted: the agent only reads ahead, as tasks tell it."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        """``given``: what the run gave its hosted object; nothing."""

    def start(self, read_ahead: Callable[[Ahead], None]) -> None:
        """Nothing to begin."""

    def ended(self) -> str:
        return ""

    def has_coordinator(self) -> bool:
        return False

    def stop(self, timeout_s: float) -> None:
        """Nothing to end."""
