"""``spark-group migrate``: a job changes over from Spark's own Kafka connector, or back to it.

Runs in: a terminal. Deliberately absent: reading the connector's checkpoint (``connector``), and what a commit for a
group consists of (``reset``).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spark_group_source.cli import shared
from spark_group_source.cli.move import TopicsOption, move_as_dict, scope_of, show_move
from spark_group_source.cli.shared import ConfigOption, GroupOption, JsonOption, ServersOption, TableOption
from spark_group_source.errors import GroupError, OptionError
from spark_group_source.model import TopicPartition
from spark_group_source.options.starting import EARLIEST_OFFSET

if TYPE_CHECKING:
    from spark_group_source.cli.connector import Progress
    from spark_group_source.cli.reset import Scope
    from spark_group_source.kafka import GroupAdmin


def migrate(
    group: GroupOption,
    bootstrap_servers: ServersOption,
    from_checkpoint: Annotated[
        str | None,
        typer.Option("--from-checkpoint", metavar="DIR", help="The checkpointLocation of a query of format('kafka')."),
    ] = None,
    to_checkpoint: Annotated[
        bool, typer.Option("--to-checkpoint", help="Print startingOffsets for a query of format('kafka').")
    ] = False,
    source: Annotated[
        list[str] | None,
        typer.Option("--source", help="With --from-checkpoint: only this source of the query, such as 0; repeatable."),
    ] = None,
    topic: TopicsOption = None,
    table: TableOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", dir_okay=False, help="With --to-checkpoint: write it to this file.")
    ] = None,
    execute: Annotated[bool, typer.Option("--execute", help="Do it; without this it is only shown.")] = False,
    command_config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take over where a stopped query of Spark's own Kafka connector was, or show that connector where to go on.

    With --from-checkpoint the group's offsets become those of the query's last finished batch. With --to-checkpoint
    they are printed as the connector's option startingOffsets; with --table the table's ledger counts too, where a
    query was stopped before Kafka knew of its last batch.
    """
    if (from_checkpoint is None) != to_checkpoint:
        raise OptionError("say which way: exactly one of --from-checkpoint and --to-checkpoint")
    there = {"--source": bool(source), "--execute": execute}
    back = {"--table": table is not None, "--out": out is not None}
    if wrong := [name for name, given in (there if to_checkpoint else back).items() if given]:
        raise OptionError(f"{wrong[0]} does not go with --{'to' if to_checkpoint else 'from'}-checkpoint")
    scope = scope_of(topic or [])
    admin = shared.admin_of(bootstrap_servers, group, command_config)
    if from_checkpoint is None:
        text = json.dumps(_back(admin, group, table, scope))
        if out is None:
            typer.echo(text)
        else:
            _write(out, f"{text}\n")
        return
    progress = _progress(from_checkpoint.rstrip("/"), source or [])
    targets = targets_of(admin, progress, scope)
    now, number = admin.committed(group), None
    if execute:
        from spark_group_source.cli import reset

        number = reset.move(admin, group, targets, spark=None, table=None)
    if as_json:
        typer.echo(json.dumps(move_as_dict(group, now, targets, number) | {"batch": progress.batch}, indent=2))
        return
    show_move(now, targets)
    typer.echo(f"the query's last finished batch is {progress.batch}")
    if progress.stateful:
        typer.echo(
            "the query keeps state in its checkpoint, which does not move along: the new query begins without it"
        )
    if progress.others:
        typer.echo(f"{progress.others} sources of other kinds are in the query too; they stay where they are")
    typer.echo(
        f"moved {len(targets)} partitions of group {group}; start the new query with this kafka.group.id and a new "
        "checkpointLocation"
        if execute
        else "nothing was changed; stop the old query for good, and add --execute to do it"
    )


def _write(out: Path, text: str) -> None:
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise OptionError(f"--out {out} cannot be written: {exc.strerror}. Nothing was changed") from None


def _progress(root: str, sources: list[str]) -> "Progress":
    from spark_group_source.cli import connector

    path = shared.local_path(root)
    if path is not None:
        return connector.progress(connector.on_this_machine(), str(path), sources)
    with shared.session(True) as spark:
        assert spark is not None
        return connector.progress(connector.by_spark(spark), root, sources)


def targets_of(admin: "GroupAdmin", progress: "Progress", scope: "Scope") -> dict[TopicPartition, int]:
    """What the group is to commit: where the query was, and the first record of partitions that it had not seen yet.

    An offset before the first record that is still there stays as it is: `failOnDataLoss` decides what then.

    Raises:
        OptionError: a partition is not there, or ends before that offset.
    """
    from spark_group_source.cli.reset import in_scope

    offsets = {tp: at for tp, at in progress.offsets.items() if in_scope(tp, scope)}
    topics = admin.require({tp.topic for tp in offsets})
    every = {TopicPartition(name, p) for name, found in topics.items() for p in range(found.partitions)}
    first, end = admin.earliest(every), admin.latest(every)
    for tp, at in sorted(offsets.items()):
        if tp not in end or at > end[tp]:
            is_now = f"ends at {end[tp]}" if tp in end else "does not exist"
            raise OptionError(
                f"the checkpoint says {at} of {tp}, which {is_now}: the topic was made again since, or this is another "
                "cluster. To leave it out, name the other topics with --topic"
            )
    unseen = {tp: at for tp, at in first.items() if tp not in offsets and in_scope(tp, scope)}
    return offsets | unseen


def _back(admin: "GroupAdmin", group: str, table: str | None, scope: "Scope") -> dict[str, dict[str, int]]:
    """``startingOffsets`` of every partition of the group's topics."""
    from spark_group_source.cli import reset
    from spark_group_source.cli.report import DEAD, not_there

    described = admin.group(group)
    if described.members:
        raise GroupError(
            f"group {group!r} has {len(described.members)} members, so its offsets still move. Drain its queries "
            "(spark-group drain), stop them, and do this again",
            group=group,
        )
    committed = admin.committed(group)
    ledger = None
    with shared.session(table is not None) as spark:
        if spark is not None and table is not None:
            from spark_group_source.delta.kept import required_ledger

            ledger = required_ledger(spark, table, group)
    if described.state == DEAD and not committed and ledger is None:
        raise not_there(group)
    known = {tp.topic for tp in (*committed, *(ledger.offsets if ledger else ()))}
    topics = admin.existing(known)
    offsets: Mapping[TopicPartition, int] = reset.plan({}, committed, ledger, topics).offsets
    found: dict[str, dict[str, int]] = {}
    for name, there in sorted(topics.items()):
        for tp in (TopicPartition(name, p) for p in range(there.partitions)):
            if reset.in_scope(tp, scope):
                found.setdefault(name, {})[str(tp.partition)] = offsets.get(tp, EARLIEST_OFFSET)
    return found
