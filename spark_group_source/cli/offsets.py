"""``spark-group delete-offsets`` and ``delete-group``: delete a group's committed offsets.

Runs in: a terminal. Deliberately absent: the request itself (``kafka.group_admin``).

The broker deletes offsets of a group without members, and of topics that no member subscribes to (KIP-496). Kafka
reports the owners of partitions, but not subscriptions. So before the request only a refusal can be predicted, and only
if a member owns a partition of the topic.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Annotated

import typer

from spark_group_source import command_line
from spark_group_source.cli.common import (
    NOT_EXECUTED,
    ConfigOption,
    ExecuteOption,
    GroupOption,
    JsonOption,
    ServersOption,
    admin_of,
    console,
    table_of,
)
from spark_group_source.cli.report import DEAD, counted, group_with_members, missing_group
from spark_group_source.cli.reset import scope_of
from spark_group_source.error_codes import CODES
from spark_group_source.errors import BrokerUnavailable, GroupError, OptionError
from spark_group_source.kafka.group_admin import GroupAdmin, name_of
from spark_group_source.kafka.translation import CommittedOffset, GroupDescription
from spark_group_source.model import TopicPartition

TopicsOption = Annotated[
    list[str], typer.Option("--topic", metavar="NAME[:0,1,2]", help="A topic, or some of its partitions; repeatable.")
]

CHECKPOINT_WINS = "A query of this package continues at its checkpoint, not at startingOffsets."


SUBSCRIBED = "a member subscribes to the topic; stop it or change its subscription"
REASONS: Mapping[int, str] = {
    CODES["GROUP_SUBSCRIBED_TO_TOPIC"]: SUBSCRIBED,
    CODES["UNKNOWN_TOPIC_OR_PART"]: "the partition does not exist",
    CODES["TOPIC_AUTHORIZATION_FAILED"]: "the user needs Read on the topic",
}
"""Why a broker keeps an offset, by error code."""


class Outcome(Enum):
    """Result of the deletion of one committed offset, or the prediction of it."""

    WOULD_GO = "would be deleted"
    WOULD_STAY = "would be refused"
    NOTHING = "nothing committed"
    DELETED = "deleted"
    REFUSED = "refused"
    NOT_ANSWERED = "not answered"
    AGAIN = "committed again"


NOT_DELETED = frozenset({Outcome.REFUSED, Outcome.NOT_ANSWERED, Outcome.AGAIN})
"""Outcomes after which the offset was not deleted, or may not have been."""


@dataclass(frozen=True, slots=True)
class DeletionResult:
    """Deletion of one partition's offset.

    ``committed``: the offset before the deletion; None if there was none. ``reason``: why the offset was not deleted,
    or may not have been, or the condition of the prediction; may be empty.
    """

    committed: int | None
    outcome: Outcome
    reason: str = ""


DeletionResults = dict[TopicPartition, DeletionResult]


def select_offsets(
    scope: Mapping[str, Collection[int]], committed: Mapping[TopicPartition, CommittedOffset]
) -> dict[TopicPartition, int | None]:
    """The selected partitions with their committed offsets; of a topic without named partitions those with an offset.

    Args:
        scope: topics, each with its named partitions; empty: all.

    Raises:
        OptionError: a topic has no committed offset.
    """
    if not committed:
        raise OptionError("the group has no committed offsets to delete")
    found: dict[TopicPartition, int | None] = {}
    for name, partitions in scope.items():
        have = {tp: at.offset for tp, at in committed.items() if tp.topic == name}
        if not have:
            theirs = ", ".join(sorted({tp.topic for tp in committed}))
            raise OptionError(f"the group has no committed offsets of topic {name!r}; it has offsets of: {theirs}")
        named = [TopicPartition(name, p) for p in partitions] if partitions else list(have)
        found |= {tp: have.get(tp) for tp in named}
    return found


def predict_deletion(offsets: Mapping[TopicPartition, int | None], group: GroupDescription) -> DeletionResults:
    """Predict the broker's response from the description of the group."""
    subscribed = {tp.topic for member in group.members for tp in member.partitions}

    def result(tp: TopicPartition, offset: int | None) -> DeletionResult:
        if offset is None:
            return DeletionResult(offset, Outcome.NOTHING)
        if tp.topic in subscribed:
            return DeletionResult(offset, Outcome.WOULD_STAY, SUBSCRIBED)
        unless = "unless a member subscribes to the topic without owning a partition of it" if group.members else ""
        return DeletionResult(offset, Outcome.WOULD_GO, unless)

    return {tp: result(tp, offset) for tp, offset in sorted(offsets.items())}


def delete(admin: GroupAdmin, group: str, offsets: Mapping[TopicPartition, int | None]) -> DeletionResults:
    """Delete committed offsets and read the result back.

    Raises:
        GroupError: the whole request was refused or timed out.
    """
    asked = [tp for tp, offset in offsets.items() if offset is not None]
    codes = admin.delete_offsets(group, asked) if asked else {}
    after = admin.read_offsets(group, asked) if asked else {}
    check = command_line.in_sentence(command_line.spark_group("describe", admin.connection, group))
    return {tp: _result_of(tp, offset, codes, after, check) for tp, offset in sorted(offsets.items())}


def _result_of(
    tp: TopicPartition,
    offset: int | None,
    codes: Mapping[TopicPartition, int],
    after: Mapping[TopicPartition, CommittedOffset | None],
    check: str,
) -> DeletionResult:
    if offset is None:
        return DeletionResult(offset, Outcome.NOTHING)
    code = codes.get(tp)
    if code is None:
        return DeletionResult(offset, Outcome.NOT_ANSWERED, "run the command again")
    if code:
        return DeletionResult(offset, Outcome.REFUSED, f"{name_of(code)}: {REASONS.get(code, 'see docs/answers.md')}")
    if tp not in after:
        return DeletionResult(
            offset, Outcome.NOT_ANSWERED, f"it was deleted, but reading it back timed out; check with {check}"
        )
    now = after[tp]
    return (
        DeletionResult(offset, Outcome.DELETED)
        if now is None
        else DeletionResult(offset, Outcome.AGAIN, f"now at {now.offset}")
    )


def not_deleted(results: Mapping[TopicPartition, DeletionResult]) -> Collection[TopicPartition]:
    """The partitions whose offsets were not deleted."""
    return [tp for tp, result in results.items() if result.outcome in NOT_DELETED]


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

    Exit code 1: an offset still exists.
    """
    scope = scope_of(topic)
    with admin_of(bootstrap_servers, group, command_config) as admin:
        described, committed = admin.describe_group(group), admin.committed(group)
        if described.state == DEAD and not committed:
            raise missing_group(admin, group)
        offsets = select_offsets(scope, committed)
        results = delete(admin, group, offsets) if execute else predict_deletion(offsets, described)
    _show(group, results, executed=execute, as_json=as_json)
    if stay := not_deleted(results):
        why = "; ".join(sorted({results[tp].reason for tp in stay}))
        silent = all(results[tp].outcome is Outcome.NOT_ANSWERED for tp in stay)
        kind = BrokerUnavailable if silent else GroupError
        raise kind(f"{len(stay)} of {len(results)} offsets of group {group!r} were not deleted: {why}")


def delete_group(
    group: GroupOption,
    bootstrap_servers: ServersOption,
    execute: ExecuteOption = False,
    command_config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete a group without members, and all its committed offsets."""
    with admin_of(bootstrap_servers, group, command_config) as admin:
        found = admin.describe_group(group)
        offsets = admin.committed(group)
        if found.state == DEAD and not offsets:
            raise missing_group(admin, group)
        if found.members:
            members = counted(len(found.members), "member")
            raise group_with_members(
                group, f"has {members}, and Kafka deletes only groups without members", "Stop its queries and consumers"
            )
        if execute:
            admin.delete_group(group)
    held = counted(len(offsets), "committed offset")
    if as_json:
        shown = {"group": group, "state": found.state, "offsets": len(offsets), "executed": execute}
        typer.echo(json.dumps(shown, indent=2))
        return
    if not execute:
        console.print(f"group {group} is {found.state}, without members, and has {held}")
        console.print(NOT_EXECUTED)
        return
    console.print(f"deleted group {group} with {held}\n{CHECKPOINT_WINS}")


def _show(group: str, results: DeletionResults, *, executed: bool, as_json: bool) -> None:
    if as_json:
        rows = [{**tp._asdict(), **asdict(result), "outcome": result.outcome.value} for tp, result in results.items()]
        typer.echo(json.dumps({"group": group, "executed": executed, "partitions": rows}, indent=2))
        return
    shown = [
        (tp.topic, str(tp.partition), result.committed, result.outcome.value, result.reason)
        for tp, result in results.items()
    ]
    console.print(table_of("topic", "partition", "committed", "outcome", "why", rows=shown))
    console.print(CHECKPOINT_WINS if executed else NOT_EXECUTED)
