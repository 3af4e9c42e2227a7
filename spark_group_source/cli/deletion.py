"""Deleting committed offsets on purpose: which ones, what will come of it as far as one can say, and what came of it.

Runs in: a terminal. Deliberately absent: printing (``offsets``), and the request itself (``kafka.offset_deletion``).

The broker deletes what may expire: offsets of a group without members, and of topics that no member subscribes to
(KIP-496). Kafka tells who has which partition, and not who subscribes to what; so before the request only a refusal is
sure, and that only where a member has a partition of the topic.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from spark_group_source.answers import CODES
from spark_group_source.errors import OptionError
from spark_group_source.kafka import CommittedOffset, GroupAdmin, GroupDescription
from spark_group_source.kafka.offset_deletion import name_of
from spark_group_source.model import TopicPartition

SUBSCRIBED = "a member subscribes to the topic; end its subscription, or stop it"
REASONS: Mapping[int, str] = {
    CODES["GROUP_SUBSCRIBED_TO_TOPIC"]: SUBSCRIBED,
    CODES["UNKNOWN_TOPIC_OR_PART"]: "there is no such partition",
    CODES["TOPIC_AUTHORIZATION_FAILED"]: "the user needs Read on the topic",
}
"""Why a broker keeps an offset, by its code."""


class Outcome(Enum):
    """What became, or would become, of one committed offset."""

    WOULD_GO = "would be deleted"
    WOULD_STAY = "would be refused"
    NOTHING = "nothing committed"
    DELETED = "deleted"
    REFUSED = "refused"
    NOT_ANSWERED = "not answered"
    AGAIN = "committed again"


LEFT = frozenset({Outcome.REFUSED, Outcome.NOT_ANSWERED, Outcome.AGAIN})
"""Outcomes of a deletion that did not do what was asked."""


@dataclass(frozen=True, slots=True)
class Fate:
    """One partition of a deletion. ``offset``: what was committed before; None: nothing."""

    offset: int | None
    outcome: Outcome
    reason: str = ""


Fates = dict[TopicPartition, Fate]


def chosen(
    scope: Mapping[str, Collection[int]], committed: Mapping[TopicPartition, CommittedOffset]
) -> dict[TopicPartition, int | None]:
    """The partitions that are meant, each with what is committed: of a topic without a list those with an offset.

    Args:
        scope: topics, and for each the partitions that were named, if any were.

    Raises:
        OptionError: nothing is committed of a topic.
    """
    if not committed:
        raise OptionError("the group has committed nothing that could be deleted")
    found: dict[TopicPartition, int | None] = {}
    for name, partitions in scope.items():
        have = {tp: at.offset for tp, at in committed.items() if tp.topic == name}
        if not have:
            theirs = ", ".join(sorted({tp.topic for tp in committed}))
            raise OptionError(f"the group has committed nothing of topic {name!r}; it has offsets of: {theirs}")
        named = [TopicPartition(name, p) for p in partitions] if partitions else list(have)
        found |= {tp: have.get(tp) for tp in named}
    return found


def foretell(offsets: Mapping[TopicPartition, int | None], group: GroupDescription) -> Fates:
    """What the broker would say now, as far as the description of the group tells."""
    subscribed = {tp.topic for member in group.members for tp in member.partitions}

    def fate(tp: TopicPartition, offset: int | None) -> Fate:
        if offset is None:
            return Fate(offset, Outcome.NOTHING)
        if tp.topic in subscribed:
            return Fate(offset, Outcome.WOULD_STAY, SUBSCRIBED)
        unless = "unless a member subscribes to the topic: no member has a partition of it" if group.members else ""
        return Fate(offset, Outcome.WOULD_GO, unless)

    return {tp: fate(tp, offset) for tp, offset in sorted(offsets.items())}


def delete(admin: GroupAdmin, group: str, offsets: Mapping[TopicPartition, int | None]) -> Fates:
    """Delete what is committed of these, and read back what is there then.

    Raises:
        GroupError: the request was refused as a whole, or not answered.
    """
    asked = [tp for tp, offset in offsets.items() if offset is not None]
    codes = admin.delete_offsets(group, asked) if asked else {}
    after = admin.read_offsets(group, asked) if asked else {}
    return {tp: _became(tp, offset, codes, after) for tp, offset in sorted(offsets.items())}


def _became(
    tp: TopicPartition,
    offset: int | None,
    codes: Mapping[TopicPartition, int],
    after: Mapping[TopicPartition, CommittedOffset | None],
) -> Fate:
    if offset is None:
        return Fate(offset, Outcome.NOTHING)
    code = codes.get(tp)
    if code is None:
        return Fate(offset, Outcome.NOT_ANSWERED, "do it again")
    if code:
        return Fate(offset, Outcome.REFUSED, f"{name_of(code)}: {REASONS.get(code, 'see docs/answers.md')}")
    if tp not in after:
        return Fate(offset, Outcome.NOT_ANSWERED, "it was deleted, but what is there now was not told: look again")
    now = after[tp]
    return Fate(offset, Outcome.DELETED) if now is None else Fate(offset, Outcome.AGAIN, f"now at {now.offset}")


def left(fates: Mapping[TopicPartition, Fate]) -> Collection[TopicPartition]:
    """Those that were to go and did not."""
    return [tp for tp, fate in fates.items() if fate.outcome in LEFT]
