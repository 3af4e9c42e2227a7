"""``spark-group drain``: bringing the queries of a group to rest.

Runs in: a terminal, on the host of the queries' driver or, with their checkpoint, on any other. Deliberately absent:
how (``host.runs``, ``delta.board``).
"""

import json
from typing import Annotated

import typer

from spark_group_source.cli import report, shared
from spark_group_source.cli.shared import CheckpointOption, ConfigOption, GroupOption, JsonOption, console
from spark_group_source.errors import GroupError
from spark_group_source.host import runs


def drain(
    group: GroupOption,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=0, help="The longest wait.")] = runs.DRAIN_S,
    checkpoint: CheckpointOption = None,
    bootstrap_servers: Annotated[
        str | None,
        typer.Option(
            "--bootstrap-servers", "--bootstrap-server", help="host:port, …: to say where the group is, if not here."
        ),
    ] = None,
    command_config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a group's queries finish their batch and begin no other: then they can be stopped.

    Those of this host; or with --checkpoint the one of that checkpoint, wherever its driver runs, if it writes with
    DeltaSink and has written a batch.
    """
    if checkpoint is None and bootstrap_servers is not None and not runs.read(group):
        found = report.describe(shared.admin_of(bootstrap_servers, group, command_config), group, offsets=False)
        where = ", ".join(sorted({m.host.lstrip("/") for m in found.members}))
        raise GroupError(
            f"no query of group {group!r} runs on this host; its members are at {where}. Drain it on the host of its "
            "driver, or with --checkpoint"
            if where
            else f"group {group!r} has no members: there is nothing to drain",
            group=group,
        )
    with console.status("waiting for the batch in hand ..."):
        if checkpoint is None:
            count = runs.drain(group, timeout_s=timeout_s)
        else:
            from spark_group_source.delta import board

            with shared.checkpoint_files(checkpoint) as (files, root):
                count = board.drain(board.Notices(files, root), group, timeout_s=timeout_s)
    if as_json:
        typer.echo(json.dumps({"group": group, "drained": count}))
    else:
        typer.echo(f"{count} {'query' if count == 1 else 'queries'} of group {group} drained; stop now")
