"""``spark-group delete-offsets`` and ``delete-group``: what a group has committed is forgotten.

Runs in: a terminal. Deliberately absent: what is deleted and what became of it (``deletion``); here it is asked for and
shown.
"""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from spark_group_source.cli.move import scope_of
from spark_group_source.cli.shared import ConfigOption, GroupOption, JsonOption, ServersOption, admin_of, console
from spark_group_source.errors import BrokerUnavailable, GroupError

if TYPE_CHECKING:
    from spark_group_source.cli.deletion import Fates

ExecuteOption = Annotated[bool, typer.Option("--execute", help="Do it; without this it is only shown.")]
TopicsOption = Annotated[
    list[str], typer.Option("--topic", metavar="NAME[:0,1,2]", help="This topic, or partitions of it; repeatable.")
]

DRY = "nothing was changed; add --execute to do it"
STAYS = "A query of this package goes on where its checkpoint says all the same, not at startingOffsets."


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
    from spark_group_source.cli import deletion
    from spark_group_source.cli.report import DEAD, not_there

    scope = scope_of(topic)
    admin = admin_of(bootstrap_servers, group, command_config)
    described, committed = admin.group(group), admin.committed(group)
    if described.state == DEAD and not committed:
        raise not_there(group)
    offsets = deletion.chosen(scope, committed)
    fates = deletion.delete(admin, group, offsets) if execute else deletion.foretell(offsets, described)
    _show(group, fates, executed=execute, as_json=as_json)
    if left := deletion.left(fates):
        why = "; ".join(sorted({fates[tp].reason for tp in left}))
        silent = all(fates[tp].outcome is deletion.Outcome.NOT_ANSWERED for tp in left)
        kind = BrokerUnavailable if silent else GroupError
        raise kind(f"{len(left)} of {len(fates)} offsets of group {group!r} were not deleted: {why}", group=group)


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
    from spark_group_source.cli.report import DEAD, not_there

    admin = admin_of(bootstrap_servers, group, command_config)
    found = admin.group(group)
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


def _show(group: str, fates: "Fates", *, executed: bool, as_json: bool) -> None:
    if as_json:
        rows: list[dict[str, Any]] = [
            {
                "topic": tp.topic,
                "partition": tp.partition,
                "committed": fate.offset,
                "outcome": fate.outcome.value,
                "reason": fate.reason,
            }
            for tp, fate in fates.items()
        ]
        typer.echo(json.dumps({"group": group, "executed": executed, "partitions": rows}, indent=2))
        return
    table = Table("topic", "partition", "committed", "outcome", "why")
    for tp, fate in fates.items():
        offset = "-" if fate.offset is None else str(fate.offset)
        table.add_row(tp.topic, str(tp.partition), offset, fate.outcome.value, fate.reason)
    console.print(table)
    console.print(STAYS if executed else DRY)
