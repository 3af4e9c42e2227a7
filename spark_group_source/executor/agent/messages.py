"""What an agent is told, and what it is given.

Runs in: agents, and whoever speaks to them. Deliberately absent: how it travels (``wire`` between processes of one
host).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from spark_group_source.channel.messages import Ahead
from spark_group_source.model import TopicPartition

__all__ = ["Ahead", "Buffered", "Hosted", "Nobody"]

Buffered = Callable[[Iterable[TopicPartition]], tuple[int, int]]
"""Bytes and rows that are held of partitions."""


class Hosted(Protocol):
    """What lives in an agent besides its reader: the executor's side of a coordinator, and members that it lends."""

    def start(self, read_ahead: Callable[[Ahead], None], buffered: Buffered) -> None:
        """Begin, on threads of its own. ``read_ahead`` and ``buffered`` may be called from any of them, and never
        wait."""

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

    def start(self, read_ahead: Callable[[Ahead], None], buffered: Buffered) -> None:
        """Nothing to begin."""

    def ended(self) -> str:
        return ""

    def has_coordinator(self) -> bool:
        return False

    def stop(self, timeout_s: float) -> None:
        """Nothing to end."""
