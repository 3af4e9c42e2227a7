"""A member's share of a commit, and whether it may still be committed.

Runs in: the stream reader and agents, any of their threads. Deliberately absent: committing (``driver``, ``member``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from spark_group_source.group import events as ev
from spark_group_source.kafka import Identity
from spark_group_source.model import TopicPartition


class SlotMember(Protocol):
    """The member of a slot, wherever it lives."""

    @property
    def identity(self) -> Identity | None:
        """Who it is in the group now; None while it is no member."""

    @property
    def held(self) -> tuple[TopicPartition, ...]:
        """Its partitions: from when it was given them to when it gave them back."""

    @property
    def static(self) -> bool:
        """Whether it has a place of its name in the group, which only one process can have (KIP-345)."""

    @property
    def host(self) -> str:
        """The agent where it lives; empty for the stream reader itself."""

    @property
    def slot(self) -> int: ...
    @property
    def client(self) -> int: ...

    def start(self) -> None: ...

    def order(self, order: ev.Release | ev.Subscribe | ev.Leave) -> None:
        """Give it something to do; never waits."""

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait for it to end; False when it did not in time."""


class OfSlot:
    """What a member is by the order to join, wherever it lives."""

    def __init__(self, join: ev.Join) -> None:
        self._join = join

    @property
    def static(self) -> bool:
        return self._join.instance_id is not None

    @property
    def host(self) -> str:
        return self._join.host

    @property
    def slot(self) -> int:
        return self._join.slot

    @property
    def client(self) -> int:
        return self._join.client


@dataclass(frozen=True, slots=True)
class Share:
    """What is to be committed of one member's partitions, and who it was when that was ordered."""

    member: SlotMember
    identity: Identity | None
    offsets: Mapping[TopicPartition, int]

    @property
    def outdated(self) -> str | None:
        """Why it may not be committed any more. Any thread.

        What was given back without a commit may be another member's by now, and brokers do not ask whose partitions
        are committed: a KIP-848 member that has to give back more at once keeps its epoch.
        """
        if self.identity is None:
            return "the member is not in the group at the moment"
        if self.identity != self.member.identity:
            return "the member has joined again since"
        if not self.offsets.keys() <= set(self.member.held):
            return "the member has given partitions back since"
        return None
