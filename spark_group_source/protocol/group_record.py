"""How many members a classic group may have before Kafka cannot store its assignment.

Runs in: the stream reader (inside ``run``), tests. Deliberately absent: the members of other applications, whose
subscriptions are not known.

Kafka stores a classic group as one record in the topic ``__consumer_offsets``: for each member the names of its topics
in its subscription and again in its assignment (``GroupMetadataValue``; with cooperative-sticky a third time, as the
partitions that it owns). A record above the topic's ``max.message.bytes`` cannot be stored. Then the broker answers
each SyncGroup with UNKNOWN_SERVER_ERROR, librdkafka joins again without a word, and no member of the group gets an
assignment, for ever. A KIP-848 group has records for each member, with topic ids in assignments.
"""

from collections.abc import Iterable

RECORD_BYTES_MAX = 1_048_588
"""Kafka's default of ``max.message.bytes``."""
NAMES_SHARE = 0.9
"""The share of it that topic names may take; the rest is for partition numbers and the ids and hosts of members."""
LENGTH_BYTES = 2
"""Before each name in the record."""
PARTITIONS_BYTES = 4
"""The count of a topic's partitions, after its name in an assignment."""


def member_bytes(topics: Iterable[str], *, cooperative: bool) -> int:
    """Return how much of the group's record the topic names of one member take, if it has a partition of each topic."""
    times = 3 if cooperative else 2
    return sum(times * (len(name) + LENGTH_BYTES) + (times - 1) * PARTITIONS_BYTES for name in topics)


def members_max(topics: Iterable[str], *, cooperative: bool) -> int | None:
    """Return how many members with this subscription fit into the group's record; None: as many as one likes."""
    bytes_ = member_bytes(topics, cooperative=cooperative)
    return int(RECORD_BYTES_MAX * NAMES_SHARE) // bytes_ if bytes_ else None
