"""Topics, groups and offsets as the cluster describes them.

Runs in: the stream reader, the user's driver (CLI). Deliberately absent: asking for them (``admin``).
"""

from dataclasses import dataclass

from spark_group_source.model import TopicPartition


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the cluster describes it now; the id changes when it is deleted and made again (KIP-516)."""

    id: str
    partitions: int


@dataclass(frozen=True, slots=True)
class CommittedOffset:
    """A group's offset of one partition, with the text that its committer left beside it."""

    offset: int
    metadata: str


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One member as the cluster describes it."""

    member_id: str
    client_id: str
    instance_id: str
    host: str
    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group as the cluster describes it. ``state``: Kafka's word in lower case, such as stable, empty, dead.

    ``simple``: it never had members, somebody only keeps offsets there. ``coordinator_id``: the number of its broker.
    """

    state: str
    protocol: str
    assignor: str
    members: tuple[GroupMember, ...]
    coordinator: str = ""
    """``host:port (id)`` of the broker that keeps the group."""
    simple: bool = False
    coordinator_id: int = -1


@dataclass(frozen=True, slots=True, order=True)
class ListedGroup:
    """A group in the list of all groups. ``protocol``: classic, consumer, or another of Kafka's."""

    group: str
    state: str
    protocol: str
