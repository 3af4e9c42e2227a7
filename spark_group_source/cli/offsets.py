"""``spark-group delete-offsets`` and ``delete-group``: what a group has committed is forgotten.

Runs in: a terminal. Deliberately absent: the request itself (``kafka.offset_deletion``).

The broker deletes what may expire: offsets of a group without members, and of topics that no member subscribes to
(KIP-496). Kafka tells who has which partition, and not who subscribes to what; so before the request only a refusal is
sure, and that only where a member has a partition of the topic.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Annotated

import typer

from spark_group_source.cli.report import DEAD, not_there
from spark_group_source.cli.reset import scope_of
from spark_group_source.cli.shared import (
    ConfigOption,
    GroupOption,
    JsonOption,
    ServersOption,
    admin_of,
    console,
    table_of,
)
from spark_group_source.error_codes import CODES
from spark_group_source.errors import BrokerUnavailable, GroupError, OptionError
from spark_group_source.kafka import CommittedOffset, GroupAdmin, GroupDescription
from spark_group_source.kafka.offset_deletion import name_of
from spark_group_source.model import TopicPartition

ExecuteOption = Annotated[bool, typer.Option("--execute", help="Do it; without this it is only shown.")]
TopicsOption = Annotated[
    list[str], typer.Option("--topic", metavar="NAME[:0,1,2]", help="This topic, or partitions of it; repeatable.")
]

DRY = "nothing was changed; add --execute to do it"
STAYS = "A query of this package goes on where its checkpoint says all the same, not at startingOffsets."


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
    """One partition of a deletion. ``committed``: the offset before; None: nothing."""

    committed: int | None
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


# --- the commands ----------------------------------------------------------------------------------------------------


def delete_offsets(
    group: GroupOption,
    bootstrap_servers: ServersOption,
    topic: TopicsOption,
    execute: ExecuteOption = False,
    command_config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete committed offsets of topics that no member subscribes to; the group may have members.

    Exit code 1: an offset is still there.
    """
    scope = scope_of(topic)
    admin = admin_of(bootstrap_servers, group, command_config)
    described, committed = admin.describe_group(group), admin.committed(group)
    if described.state == DEAD and not committed:
        raise not_there(group)
    offsets = chosen(scope, committed)
    fates = delete(admin, group, offsets) if execute else foretell(offsets, described)
    _show(group, fates, executed=execute, as_json=as_json)
    if stay := left(fates):
        why = "; ".join(sorted({fates[tp].reason for tp in stay}))
        silent = all(fates[tp].outcome is Outcome.NOT_ANSWERED for tp in stay)
        kind = BrokerUnavailable if silent else GroupError
        raise kind(f"{len(stay)} of {len(fates)} offsets of group {group!r} were not deleted: {why}", group=group)


def delete_group(
    group: GroupOption,
    bootstrap_servers: ServersOption,
    execute: ExecuteOption = False,
    command_config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete a group without members, with all that it has committed.

    Exit code 1: it is still there.
    """
    admin = admin_of(bootstrap_servers, group, command_config)
    found = admin.describe_group(group)
    offsets = admin.committed(group)
    if found.state == DEAD and not offsets:
        raise not_there(group)
    if found.members:
        raise GroupError(
            f"group {group!r} has {len(found.members)} members, and Kafka deletes only a group without. Stop its "
            "queries and consumers, and wait for their session timeout",
            group=group,
        )
    if execute:
        admin.delete_group(group)
    if as_json:
        shown = {"group": group, "state": found.state, "offsets": len(offsets), "executed": execute}
        typer.echo(json.dumps(shown, indent=2))
        return
    if not execute:
        console.print(f"group {group} is {found.state}, without members, and has {len(offsets)} committed offsets")
        console.print(DRY)
        return
    console.print(f"deleted group {group} with {len(offsets)} committed offsets\n{STAYS}")


def _show(group: str, fates: Fates, *, executed: bool, as_json: bool) -> None:
    if as_json:
        rows = [{**tp._asdict(), **asdict(fate), "outcome": fate.outcome.value} for tp, fate in fates.items()]
        typer.echo(json.dumps({"group": group, "executed": executed, "partitions": rows}, indent=2))
        return
    shown = [
        (tp.topic, str(tp.partition), fate.committed, fate.outcome.value, fate.reason) for tp, fate in fates.items()
    ]
    console.print(table_of("topic", "partition", "committed", "outcome", "why", rows=shown))
    console.print(STAYS if executed else DRY)
