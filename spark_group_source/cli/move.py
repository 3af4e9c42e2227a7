"""``spark-group reset``: moving a group.

Runs in: a terminal. Deliberately absent: what is committed (``reset``); here it is asked for and shown.
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from spark_group_source.cli import csv_plan, shared
from spark_group_source.cli.shared import ConfigOption, GroupOption, JsonOption, ServersOption, TableOption, console
from spark_group_source.errors import OptionError
from spark_group_source.model import EARLIEST, LATEST, StartAt
from spark_group_source.options.starting import parse_offsets

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_group_source.cli.reset import Scope
    from spark_group_source.kafka import CommittedOffset, GroupAdmin
    from spark_group_source.model import TopicPartition

TopicsOption = Annotated[
    list[str] | None,
    typer.Option("--topic", metavar="NAME[:0,1]", help="Only this topic, or these partitions of it; repeatable."),
]
DURATION = re.compile(r"P(?:(\d+)D)?(?:T(?=\d)(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d{1,9})?)S)?)?")


def reset(
    group: GroupOption,
    bootstrap_servers: ServersOption,
    topic: TopicsOption = None,
    all_topics: Annotated[
        bool, typer.Option("--all-topics", help="All that the group has; so it is without --topic, too.")
    ] = False,
    to_earliest: Annotated[bool, typer.Option("--to-earliest", help="To the first record still there.")] = False,
    to_latest: Annotated[bool, typer.Option("--to-latest", help="To the end: skip what is there.")] = False,
    to_current: Annotated[bool, typer.Option("--to-current", help="To where the group is, for --export.")] = False,
    to_offset: Annotated[int | None, typer.Option("--to-offset", min=0, help="To this offset.")] = None,
    to_offsets: Annotated[str | None, typer.Option("--to-offsets", help='JSON: {"orders":{"0":23,"1":-1}}')] = None,
    to_datetime: Annotated[str | None, typer.Option("--to-datetime", help="ISO 8601 with its zone.")] = None,
    by_duration: Annotated[
        str | None, typer.Option("--by-duration", metavar="PnDTnHnMnS", help="To so long ago, such as PT1H30M.")
    ] = None,
    shift_by: Annotated[
        int | None, typer.Option("--shift-by", help="So many offsets further; a negative number goes back.")
    ] = None,
    from_file: Annotated[
        Path | None,
        typer.Option("--from-file", exists=True, dir_okay=False, help="To what a CSV of --export says; Kafka's too."),
    ] = None,
    to_ledger: Annotated[bool, typer.Option("--to-ledger", help="To what the table of --table holds.")] = False,
    to_checkpoint: Annotated[
        str | None, typer.Option("--to-checkpoint", help="To the last finished batch of a query's checkpointLocation.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option("--batch", min=0, help="With --to-checkpoint: to where this batch began."),
    ] = None,
    table: TableOption = None,
    execute: Annotated[bool, typer.Option("--execute", help="Do it; without this it is only shown.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show it; so it is without --execute, too.")] = False,
    export: Annotated[bool, typer.Option("--export", help="Print the plan as CSV and nothing else.")] = False,
    command_config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move a stopped group's offsets; with --table the table's ledger moves along, so that nothing is refused later.

    The queries go on with the checkpoints they have.
    """
    from spark_group_source.cli import reset as resetting
    from spark_group_source.cli.report import DEAD

    named = (to_offset, to_offsets, to_datetime, by_duration, shift_by, from_file, to_checkpoint)
    if to_earliest + to_latest + to_current + to_ledger + sum(one is not None for one in named) != 1:
        raise OptionError(
            "say where to: exactly one of --to-earliest, --to-latest, --to-current, --to-offset, --to-offsets, "
            "--to-datetime, --by-duration, --shift-by, --from-file, --to-ledger and --to-checkpoint"
        )
    if to_ledger and table is None:
        raise OptionError("--to-ledger needs --table: the Delta table whose ledger is meant")
    if batch is not None and to_checkpoint is None:
        raise OptionError("--batch needs --to-checkpoint: the checkpoint that has the batch")
    for one, other in (((execute, "--execute"), (dry_run, "--dry-run")), ((export, "--export"), (as_json, "--json"))):
        if one[0] and other[0]:
            raise OptionError(f"{one[1]} and {other[1]} contradict each other; give one of them")
    if topic and all_topics:
        raise OptionError("--topic and --all-topics contradict each other; give one of them")
    scope = scope_of(topic or [])
    given = _named(to_offsets) if to_offsets is not None else csv_plan.read(from_file, group) if from_file else None
    to = EARLIEST if to_earliest else LATEST if to_latest else _place(to_offset, to_datetime, by_duration)
    admin = shared.admin_of(bootstrap_servers, group, command_config)
    with shared.session(table is not None or to_checkpoint is not None) as spark:
        if given is not None:
            targets = resetting.as_written(admin, given, scope)
        elif spark is not None and (to_ledger or to_checkpoint is not None):
            kept = _kept(spark, group, table, to_checkpoint, batch)
            targets = resetting.named_targets(
                admin, {tp: at for tp, at in kept.items() if resetting.in_scope(tp, scope)}
            )
        else:
            targets = _by_rule(admin, group, scope, to, shift_by)
        now = admin.committed(group)
        new = not now and admin.group(group).state == DEAD
        number = None
        if execute:
            number = resetting.move(admin, group, targets, spark=spark if table is not None else None, table=table)
    if export:
        typer.echo(csv_plan.written(targets), nl=False)
    elif as_json:
        typer.echo(json.dumps(move_as_dict(group, now, targets, number), indent=2))
    else:
        show_move(now, targets)
    done = f"moved {len(targets)} partitions of group {group}; this was its reset {number}"
    if new and not as_json:
        typer.echo(f"there is no group {group} yet; this begins it", err=export)
    if not as_json:
        typer.echo(done if execute else "nothing was changed; add --execute to do it", err=export)


def _by_rule(
    admin: "GroupAdmin", group: str, scope: "Scope", to: StartAt | None, shift_by: int | None
) -> "dict[TopicPartition, int]":
    """One rule for all partitions; without any it is where the group is now."""
    from spark_group_source.cli import reset as resetting
    from spark_group_source.cli.report import DEAD, not_there

    tps = resetting.partitions_of(admin, group, scope)
    if not tps and admin.group(group).state == DEAD:
        raise not_there(group, "to begin it somewhere, name the topics with --topic")
    if shift_by is not None:
        return resetting.shifted(admin, group, tps, shift_by)
    return resetting.current(admin, group, tps) if to is None else resetting.targets(admin, tps, to)


def show_move(now: "Mapping[TopicPartition, CommittedOffset]", targets: "Mapping[TopicPartition, int]") -> None:
    """Where a group is, and where it is to be."""
    table = Table("topic", "partition", "now", "then")
    for tp, offset in sorted(targets.items()):
        table.add_row(tp.topic, str(tp.partition), str(now[tp].offset) if tp in now else "-", str(offset))
    console.print(table)


def move_as_dict(
    group: str,
    now: "Mapping[TopicPartition, CommittedOffset]",
    targets: "Mapping[TopicPartition, int]",
    number: int | None,
) -> dict[str, Any]:
    """The same for programs; ``number``: of the reset, None where nothing was changed."""
    rows = [
        {"topic": tp.topic, "partition": tp.partition, "now": now[tp].offset if tp in now else None, "then": offset}
        for tp, offset in sorted(targets.items())
    ]
    return {"group": group, "executed": number is not None, "reset": number, "partitions": rows}


def scope_of(texts: Sequence[str]) -> dict[str, frozenset[int]]:
    """``NAME`` or ``NAME:0,1``, as Kafka's own tool takes them."""
    found: dict[str, frozenset[int]] = {}
    for text in texts:
        name, colon, numbers = text.partition(":")
        each = [number.strip() for number in numbers.split(",")] if colon else []
        if not name or not all(number.isascii() and number.isdigit() for number in each):
            raise OptionError(f"--topic is {text!r}; write NAME, or NAME:0,1 for some of its partitions")
        if name in found and not (each and found[name]):
            raise OptionError(f"--topic names {name} twice, once with all of its partitions")
        found[name] = found.get(name, frozenset()) | {int(number) for number in each}
    return found


def _kept(
    spark: "SparkSession", group: str, table: str | None, checkpoint: str | None, batch: int | None
) -> "Mapping[TopicPartition, int]":
    """What a checkpoint, else the ledger of a table, says of the group."""
    from spark_group_source.delta.checkpoint import positions
    from spark_group_source.delta.kept import required_ledger

    if checkpoint is not None:
        return positions(spark, checkpoint, group, batch)
    return required_ledger(spark, str(table), group).offsets


def _named(text: str) -> "dict[TopicPartition, int]":
    try:
        named = parse_offsets(text)
    except ValueError as exc:
        raise OptionError(f"--to-offsets: {exc}") from None
    if isinstance(named, StartAt):
        raise OptionError("--to-offsets takes JSON; for a word use --to-earliest or --to-latest")
    return dict(named)


def _place(offset: int | None, text: str | None, duration: str | None) -> StartAt | None:
    if duration is not None:
        return StartAt("time", max(0, int(time.time() * 1000) - duration_ms(duration)))
    if text is None:
        return None if offset is None else StartAt("offset", offset)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise OptionError(f"--to-datetime is {text!r}; write it as 2026-01-31T12:00:00+00:00") from None
    if moment.tzinfo is None:
        raise OptionError(f"--to-datetime {text!r} has no zone; add one, such as +00:00")
    return StartAt("time", int(moment.timestamp() * 1000))


def duration_ms(text: str) -> int:
    """Milliseconds of a duration as Kafka's own tool reads it (``java.time.Duration``): ISO 8601 without years and
    months, whose lengths differ."""
    found = DURATION.fullmatch(text.strip().upper())
    if found is None or not any(found.groups()):
        raise OptionError(f"--by-duration is {text!r}; write it as PnDTnHnMnS, such as PT1H30M or P7D")
    days, hours, minutes, seconds = (float(part or 0) for part in found.groups())
    return round(((days * 24 + hours) * 60 + minutes) * 60_000 + seconds * 1000)
