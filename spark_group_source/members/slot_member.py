"""The interface of a group member, wherever its consumer runs, and one member's part of an offset commit.

Runs in: the stream reader and agents, any thread. Deliberately absent: committing (``runtime.offset_commits``,
``members.member``).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from spark_group_source.kafka import Identity
from spark_group_source.model import TopicPartition
from spark_group_source.protocol import events as ev


class SlotMember(ABC):
    """The member of one slot, in the stream reader or on an agent.

    Args:
        join: the slot, the number of its consumer, its names in the group, and the agent it is placed on.
    """

    def __init__(self, join: ev.Join) -> None:
        self._join = join
        self.slot, self.client = join.slot, join.client
        self.agent = join.agent
        """The agent that runs the consumer; empty: the stream reader itself."""
        self.static = join.instance_id is not None
        """Whether it has an instance id: a static membership belongs to one process at a time (KIP-345)."""
        self.partitions: tuple[TopicPartition, ...] = ()
        """Its assigned partitions, until their revocation is released or they are lost."""

    @property
    @abstractmethod
    def identity(self) -> Identity | None:
        """Its identity in the group now; None while it is not a member."""

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def submit(self, command: ev.Release | ev.Subscribe | ev.Leave) -> None:
        """Queue a command; never blocks."""

    @abstractmethod
    def wait_ended(self, timeout_s: float) -> bool:
        """Wait until the member has ended; return False after the timeout."""

    def _remove_partitions(self, partitions: tuple[TopicPartition, ...]) -> None:
        removed = set(partitions)
        self.partitions = tuple(tp for tp in self.partitions if tp not in removed)


@dataclass(frozen=True, slots=True)
class MemberCommit:
    """The offsets to commit as one member."""

    member: SlotMember
    identity: Identity | None
    """The member's identity when the commit was ordered; None: it was not in the group."""
    offsets: Mapping[TopicPartition, int]
    """The next offset of each partition."""

    @property
    def stale_reason(self) -> str | None:
        """Why these offsets may not be committed any more; None: they may. Any thread.

        A partition that was released without a commit may belong to another member by now, and brokers do not check who
        owns a committed partition: a KIP-848 member that must revoke more partitions at once keeps its epoch.
        """
        if self.identity is None:
            return "the member is not in the group at the moment"
        if self.identity != self.member.identity:
            return "the member has rejoined since"
        if not self.offsets.keys() <= set(self.member.partitions):
            return "the member has released partitions since"
        return None
