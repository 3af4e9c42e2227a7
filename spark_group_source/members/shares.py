"""A member's share of a commit, and whether it may still be committed.

Runs in: the stream reader, any of its threads. Deliberately absent: committing (``driver``, ``member``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spark_group_source.kafka import Identity
from spark_group_source.model import TopicPartition

if TYPE_CHECKING:
    from spark_group_source.members.member import Member


@dataclass(frozen=True, slots=True)
class Share:
    """What is to be committed of one member's partitions, and who it was when that was ordered."""

    member: "Member"
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
