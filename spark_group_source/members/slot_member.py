"""What a member is wherever it lives, its share of a commit, and whether that may still be committed.

Runs in: the stream reader and agents, any of their threads. Deliberately absent: committing (``driver``, ``member``).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from spark_group_source.kafka import Identity
from spark_group_source.model import TopicPartition
from spark_group_source.protocol import events as ev


class SlotMember(ABC):
    """The member of a slot, wherever it lives.

    Args:
        join: which slot, the number of its consumer, its names in the group, and where it lives.
    """

    def __init__(self, join: ev.Join) -> None:
        self._join = join
        self.slot, self.client = join.slot, join.client
        self.agent = join.agent
        """The agent where it lives; empty for the stream reader itself."""
        self.static = join.instance_id is not None
        """Whether it has a place of its name in the group, which only one process can have (KIP-345)."""
        self.held: tuple[TopicPartition, ...] = ()
        """Its partitions: from when it was given them to when it gave them back, or was told to."""

    @property
    @abstractmethod
    def identity(self) -> Identity | None:
        """Who it is in the group now; None while it is no member."""

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def order(self, order: ev.Release | ev.Subscribe | ev.Leave) -> None:
        """Give it something to do; never waits."""

    @abstractmethod
    def wait_ended(self, timeout_s: float) -> bool:
        """Wait for it to end; False when it did not in time."""

    def _gave_back(self, partitions: tuple[TopicPartition, ...]) -> None:
        gone = set(partitions)
        self.held = tuple(tp for tp in self.held if tp not in gone)


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
