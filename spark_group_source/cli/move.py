"""``spark-group reset``: moving a group, in the words of Kafka's own tool.

Runs in: a terminal. Deliberately absent: what is committed (``reset``); here it is asked for and shown.

A plan may be written down as ``kafka-consumer-groups --export`` writes it and ``--from-file`` reads it: a line is
``topic,partition,offset``, without a header; Kafka's tool puts the group before it where it is told of several groups
(KIP-222, and ``CsvUtils`` of Kafka's tools).
"""

import csv
import io
import json
import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from spark_group_source.cli import reset as resetting
from spark_group_source.cli import shared
from spark_group_source.cli.report import DEAD
from spark_group_source.cli.reset import GroupReset, Offsets, Shift, To
from spark_group_source.cli.shared import ConfigOption, GroupOption, JsonOption, ServersOption, TableOption, console
from spark_group_source.errors import OptionError
from spark_group_source.model import EARLIEST, LATEST, StartAt, TopicPartition
from spark_group_source.options.starting import parse_offsets

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
    to = parse_to(
        {
            "--to-earliest": to_earliest,
            "--to-latest": to_latest,
            "--to-current": to_current,
            "--to-offset": to_offset,
            "--to-offsets": to_offsets,
            "--to-datetime": to_datetime,
            "--by-duration": by_duration,
            "--shift-by": shift_by,
            "--from-file": from_file,
            "--to-ledger": to_ledger,
            "--to-checkpoint": to_checkpoint,
        },
        group,
    )
    if to_ledger and table is None:
        raise OptionError("--to-ledger needs --table: the Delta table whose ledger is meant")
    if batch is not None and to_checkpoint is None:
        raise OptionError("--batch needs --to-checkpoint: the checkpoint that has the batch")
    _contradict({"--execute": execute, "--dry-run": dry_run})
    _contradict({"--export": export, "--json": as_json})
    _contradict({"--topic": bool(topic), "--all-topics": all_topics})
    scope = scope_of(topic or [])
    admin = shared.admin_of(bootstrap_servers, group, command_config)
    with shared.session(table is not None) as spark:
        if to == "checkpoint":
            from spark_group_source.delta.checkpoint import positions

            with shared.checkpoint_files(str(to_checkpoint)) as (files, root):
                to = Offsets(positions(files, root, group, batch), written=False)
        elif to == "ledger":
            from spark_group_source.delta.kept import required_ledger

            assert spark is not None
            to = Offsets(required_ledger(spark, str(table), group).offsets, written=False)
        targets = resetting.find(admin, group, to, scope)
        new = not admin.committed(group) and admin.group(group).state == DEAD
        done = resetting.reset(admin, group, targets, spark=spark, table=table, execute=execute)
    if export:
        typer.echo(plan_text(targets), nl=False)
    elif as_json:
        typer.echo(json.dumps(done.as_dict(), indent=2))
        return
    else:
        console.print(done)
    if new:
        typer.echo(f"there is no group {group} yet; this begins it", err=export)
    typer.echo(moved(done) if execute else "nothing was changed; add --execute to do it", err=export)


def moved(done: GroupReset) -> str:
    """What is said at the end of a reset."""
    return f"moved {len(done.moves)} partitions of group {done.group}; this was its reset {done.number}"


def _contradict(given: Mapping[str, bool]) -> None:
    if all(given.values()):
        raise OptionError(f"{' and '.join(given)} contradict each other; give one of them")


def parse_to(given: Mapping[str, Any], group: str) -> To | Literal["ledger", "checkpoint"]:
    """Where the group is to go, by the one option that was given.

    Args:
        given: all options that name a place, each with its value.
        group: whose lines of a file are meant.

    Raises:
        OptionError: none or several are given, or the value of the one cannot be read.
    """
    chosen = {name: value for name, value in given.items() if value is not None and value is not False}
    if len(chosen) != 1:
        raise OptionError(f"say where to: exactly one of {', '.join(given)}")
    ((name, value),) = chosen.items()
    match name:
        case "--to-earliest":
            return EARLIEST
        case "--to-latest":
            return LATEST
        case "--to-current":
            return "current"
        case "--to-ledger":
            return "ledger"
        case "--to-checkpoint":
            return "checkpoint"
        case "--to-offset":
            return StartAt("offset", value)
        case "--to-offsets":
            return Offsets(_named(value))
        case "--to-datetime":
            return StartAt("time", _moment_ms(value))
        case "--by-duration":
            return StartAt("time", max(0, int(time.time() * 1000) - duration_ms(value)))
        case "--shift-by":
            return Shift(value)
        case _:
            return Offsets(read_plan(value, group))


def scope_of(texts: Sequence[str]) -> dict[str, frozenset[int]]:
    """``NAME`` or ``NAME:0,1``, as Kafka's own tool takes them."""
    found: dict[str, frozenset[int]] = {}
    for text in texts:
        name, colon, numbers = text.partition(":")
        each = [number.strip() for number in numbers.split(",")] if colon else []
        if not name or not all(number.isdecimal() for number in each):
            raise OptionError(f"--topic is {text!r}; write NAME, or NAME:0,1 for some of its partitions")
        if name in found and not (each and found[name]):
            raise OptionError(f"--topic names {name} twice, once with all of its partitions")
        found[name] = found.get(name, frozenset()) | {int(number) for number in each}
    return found


def _named(text: str) -> dict[TopicPartition, int]:
    try:
        named = parse_offsets(text)
    except ValueError as exc:
        raise OptionError(f"--to-offsets: {exc}") from None
    if isinstance(named, StartAt):
        raise OptionError("--to-offsets takes JSON; for a word use --to-earliest or --to-latest")
    return dict(named)


def _moment_ms(text: str) -> int:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise OptionError(f"--to-datetime is {text!r}; write it as 2026-01-31T12:00:00+00:00") from None
    if moment.tzinfo is None:
        raise OptionError(f"--to-datetime {text!r} has no zone; add one, such as +00:00")
    return int(moment.timestamp() * 1000)


def duration_ms(text: str) -> int:
    """Milliseconds of a duration as Kafka's own tool reads it (``java.time.Duration``): ISO 8601 without years and
    months, whose lengths differ."""
    found = DURATION.fullmatch(text.strip().upper())
    if found is None or not any(found.groups()):
        raise OptionError(f"--by-duration is {text!r}; write it as PnDTnHnMnS, such as PT1H30M or P7D")
    days, hours, minutes, seconds = (float(part or 0) for part in found.groups())
    return round(((days * 24 + hours) * 60 + minutes) * 60_000 + seconds * 1000)


# --- a plan in a file ------------------------------------------------------------------------------------------------


def plan_text(offsets: Mapping[TopicPartition, int]) -> str:
    """The lines of a plan, for one group."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    for tp, offset in sorted(offsets.items()):
        lines.writerow((tp.topic, tp.partition, offset))
    return text.getvalue()


def read_plan(path: Path, group: str) -> dict[TopicPartition, int]:
    """The plan in a file; of a file with several groups, the lines of this one.

    Raises:
        OptionError: a line cannot be read, stands there twice, or none is of this group.
    """
    found: dict[TopicPartition, int] = {}
    for number, row in enumerate(csv.reader(path.read_text(encoding="utf-8").splitlines()), 1):
        if not row:
            continue
        whose, *rest = row if len(row) == 4 else (group, *row)
        numbers = [cell.strip() for cell in rest[1:]]
        if len(rest) != 3 or not all(cell.isdecimal() for cell in numbers):
            raise OptionError(
                f"{path}, line {number}: {','.join(row)!r} is not topic,partition,offset, as "
                "kafka-consumer-groups --export writes it"
            )
        tp = TopicPartition(rest[0].strip(), int(numbers[0]))
        if whose.strip() != group:
            continue
        if tp in found:
            raise OptionError(f"{path}, line {number}: {tp} stands there twice")
        found[tp] = int(numbers[1])
    if not found:
        raise OptionError(f"{path} has no line of group {group!r}")
    return found
