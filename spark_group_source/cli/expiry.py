"""When Kafka forgets a committed offset, as far as anybody outside its coordinator can say.

Runs in: the command line, tests. Deliberately absent: asking Kafka, clocks (times are passed in),
and guesses: who subscribes to what and when somebody left are not told by Kafka's APIs.

The coordinator looks every ``offsets.retention.check.interval.ms`` for offsets whose time is over, which is
``offsets.retention.minutes`` long, 7 days unless set (KIP-211, KIP-496; ``ClassicGroup`` and ``ConsumerGroup``
``.offsetExpirationCondition`` of Kafka 4.2):

- a topic that a member subscribes to: never. So nothing of a query's topics expires while it runs;
- a topic that no member subscribes to any more, in a group with members: counted from the offset's last commit. A
  classic group must be stable for that;
- a group without members: a classic one from the moment when the last of them left, for all offsets alike. A group of
  the protocol of KIP-848 from each offset's last commit: what was idle for that long goes as soon as nobody is left;
- a group that never had members, whose offsets somebody just keeps there: from each offset's last commit.

An offset that is committed again begins anew, also when it stands where it stood. The offsets of a topic go with it
when it is deleted.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from spark_group_source.model import TopicPartition

NEAR = 0.75
"""An offset nears its end when so much of the retention is over."""


class Clock(Enum):
    """What the retention of an offset is counted from."""

    NONE = "kept"  # a member has a partition of the topic, so it is subscribed
    COMMIT = "its last commit"
    EMPTY = "the last member's leaving"
    NOT_STABLE = "nothing, while the group rebalances"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """A group as Kafka describes it. ``state``, ``protocol``: Kafka's words in lower case. ``simple``: it never had a
    member. ``topics``: of which members have partitions."""

    state: str
    protocol: str
    members: int
    simple: bool
    topics: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expiry:
    """What is known of one offset's end. Times are milliseconds since the epoch.

    ``earliest_ms``: it does not go before; None where the time of its last commit is not known, or nothing counts.
    ``surely``: no member can have kept it, so that it goes then, within one check of the coordinator.
    """

    clock: Clock
    earliest_ms: int | None = None
    surely: bool = False

    def near(self, now_ms: int, retention_ms: int) -> bool:
        """Whether it may go within the last quarter of its retention. Of an offset whose time is not known: False,
        which says nothing."""
        return self.earliest_ms is not None and now_ms >= self.earliest_ms - (1 - NEAR) * retention_ms


def expiries(
    group: GroupState,
    committed_ms: Mapping[TopicPartition, int | None],
    *,
    retention_ms: int | None,
) -> dict[TopicPartition, Expiry]:
    """What is known of the end of each offset of a group.

    Args:
        committed_ms: when each was committed, as its note says (``names.committed_ms``); None: nobody wrote that down,
            as Kafka does not tell it.
        retention_ms: of the group's coordinator; None where it may not be asked for.
    """
    newest = max((at for at in committed_ms.values() if at is not None), default=None)
    found = {}
    for tp, at in committed_ms.items():
        clock = clock_of(tp.topic, group)
        # A member committed the newest one, so the last of them left after it.
        since = at if clock is Clock.COMMIT else newest if clock is Clock.EMPTY else None
        earliest_ms = None if since is None or retention_ms is None else since + retention_ms
        found[tp] = Expiry(clock=clock, earliest_ms=earliest_ms, surely=clock is Clock.COMMIT and not group.members)
    return found


def clock_of(topic: str, group: GroupState) -> Clock:
    """What counts for the offsets of a topic."""
    if topic in group.topics:
        return Clock.NONE
    if group.simple or group.protocol == "consumer":
        return Clock.COMMIT
    if not group.members:
        return Clock.EMPTY
    return Clock.COMMIT if group.state == "stable" else Clock.NOT_STABLE


def near(
    expiries: Mapping[TopicPartition, Expiry], *, now_ms: int, retention_ms: int | None
) -> Collection[TopicPartition]:
    """The offsets that may go soon."""
    if retention_ms is None:
        return []
    return sorted(tp for tp, expiry in expiries.items() if expiry.near(now_ms, retention_ms))
