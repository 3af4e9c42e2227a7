"""``spark-group reset``: the command that moves a group's committed offsets and, with a table, its ledger.

Runs in: a terminal. Deliberately absent: how the offsets are found and set (:mod:`group_reset`).

The options are those of Kafka's own tool. A plan can be exported to a file and read with ``--from-file``, in the format
of ``kafka-consumer-groups``: lines of ``topic,partition,offset`` without a header. With several groups Kafka's tool
adds the group as first column (KIP-222, and ``CsvUtils`` of Kafka's tools).
"""

import contextlib
import csv
import io
import json
import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from spark_group_source.cli import common
from spark_group_source.cli.common import ConfigOption, GroupOption, JsonOption, ServersOption, TableOption, console
from spark_group_source.cli.group_reset import Checkpoint, Destination, Offsets, Shift, move
from spark_group_source.cli.report import counted
from spark_group_source.errors import OptionError
from spark_group_source.model import EARLIEST, LATEST, StartAt, TopicPartition
from spark_group_source.options.table import PARTITION_MAX, parse_offsets

TopicsOption = Annotated[
    list[str] | None,
    typer.Option("--topic", metavar="NAME[:0,1]", help="Only this topic, or some of its partitions; repeatable."),
]
DURATION = re.compile(
    r"P(?:(\d{1,9})D)?(?:T(?=\d)(?:(\d{1,9})H)?(?:(\d{1,9})M)?(?:(\d{1,12}(?:\.\d{1,9})?)S)?)?", re.ASCII
)


def reset_command(
    group: GroupOption,
    bootstrap_servers: ServersOption,
    topic: TopicsOption = None,
    all_topics: Annotated[bool, typer.Option("--all-topics", help="All topics of the group (the default).")] = False,
    to_earliest: Annotated[bool, typer.Option("--to-earliest", help="To the first existing record.")] = False,
    to_latest: Annotated[
        bool, typer.Option("--to-latest", help="To the end of the log: skip all existing records.")
    ] = False,
    to_current: Annotated[
        bool, typer.Option("--to-current", help="To the committed offsets, for --table or --export.")
    ] = False,
    to_offset: Annotated[int | None, typer.Option("--to-offset", min=0, help="To this offset.")] = None,
    to_offsets: Annotated[str | None, typer.Option("--to-offsets", help='JSON: {"orders":{"0":23,"1":-1}}')] = None,
    to_datetime: Annotated[
        str | None, typer.Option("--to-datetime", help="To this time: ISO 8601 with a time zone.")
    ] = None,
    by_duration: Annotated[
        str | None, typer.Option("--by-duration", metavar="PnDTnHnMnS", help="To this long ago, such as PT1H30M.")
    ] = None,
    shift_by: Annotated[int | None, typer.Option("--shift-by", help="By this many offsets; negative: back.")] = None,
    from_file: Annotated[
        Path | None,
        typer.Option(
            "--from-file",
            exists=True,
            dir_okay=False,
            help="To the offsets of a CSV file from --export of this or Kafka's tool.",
        ),
    ] = None,
    to_ledger: Annotated[bool, typer.Option("--to-ledger", help="To the ledger of --table.")] = False,
    to_further: Annotated[
        bool,
        typer.Option(
            "--to-further",
            help="To the committed offsets, but not below the ledger of --table, though rows were removed.",
        ),
    ] = False,
    to_checkpoint: Annotated[
        str | None, typer.Option("--to-checkpoint", help="To the end of the last finished batch of a checkpoint.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=0, help="With --to-checkpoint: to the start of this batch.")
    ] = None,
    table: TableOption = None,
    execute: common.ExecuteOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan (the default).")] = False,
    export: Annotated[bool, typer.Option("--export", help="Print only the plan, as CSV.")] = False,
    command_config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move a stopped group's offsets and, with --table, the table's ledger, so that the next batch is not refused.

    The queries continue with their checkpoints.
    """
    to = parse_destination(
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
            "--to-further": to_further,
            "--to-checkpoint": to_checkpoint,
        },
        group,
        batch,
    )
    if (to_ledger or to_further) and table is None:
        raise common.UsageError(f"--to-{to} needs --table, the Delta table with the ledger")
    if batch is not None and to_checkpoint is None:
        raise common.UsageError("--batch needs --to-checkpoint, the checkpoint with the batch")
    _refuse_both({"--execute": execute, "--dry-run": dry_run})
    _refuse_both({"--export": export, "--json": as_json})
    _refuse_both({"--topic": bool(topic), "--all-topics": all_topics})
    scope = scope_of(topic or [])
    with (
        common.admin_of(bootstrap_servers, group, command_config) as admin,
        contextlib.nullcontext() if table is None else common.session() as spark,
    ):
        done = move(admin, group, to, scope, spark=spark, table=table, execute=execute)
    if export:
        typer.echo(plan_text({TopicPartition(one.topic, one.partition): one.then for one in done.moves}), nl=False)
        for line in done.warnings():
            typer.echo(line, err=True)
    elif as_json:
        typer.echo(json.dumps(done.as_dict(), indent=2))
        return
    else:
        console.print(done)
    if done.is_new:
        typer.echo(f"group {group} does not exist yet; the reset creates it", err=export)
    elif table is None and any(one.now is None or one.then < one.now for one in done.moves):
        text = "if a DeltaSink writes this group's records to a table, add --table, or its next batch is refused"
        typer.echo(text, err=export)
    if execute:
        count = counted(len(done.moves), "partition")
        typer.echo(f"moved {count} of group {group}; this is its reset #{done.number}", err=export)
    else:  # the line above the table says that nothing was changed
        typer.echo(f"{'nothing was changed; ' if export else ''}add --execute to do it", err=export)


def _refuse_both(given: Mapping[str, bool]) -> None:
    if all(given.values()):
        raise common.UsageError(f"{' and '.join(given)} contradict each other; give one of them")


def parse_destination(given: Mapping[str, Any], group: str, batch: int | None = None) -> Destination:
    """The destination, from the one option that was given.

    Args:
        given: all options that name a destination, with their values.
        group: the group whose lines of a file are used.
        batch: of a checkpoint.

    Raises:
        UsageError: no or several options are given, or the value is invalid.
        OptionError: the file of ``--from-file`` is invalid.
    """
    chosen = {name: value for name, value in given.items() if value is not None and value is not False}
    if len(chosen) != 1:
        raise common.UsageError(f"give exactly one of {', '.join(given)}")
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
        case "--to-further":
            return "further"
        case "--to-checkpoint":
            return Checkpoint(value, batch)
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
    """Parse ``NAME`` or ``NAME:0,1``, like Kafka's own tool."""
    found: dict[str, frozenset[int]] = {}
    for text in texts:
        name, colon, numbers = text.partition(":")
        each = [number.strip() for number in numbers.split(",")] if colon else []
        if not name or not all(number.isdecimal() for number in each):
            raise common.UsageError(f"--topic is {text!r}; it must be NAME, or NAME:0,1 for some of its partitions")
        if name in found and not (each and found[name]):
            raise common.UsageError(f"--topic names {name} twice, once with all partitions")
        found[name] = found.get(name, frozenset()) | {int(number) for number in each}
    return found


def _named(text: str) -> dict[TopicPartition, int]:
    try:
        named = parse_offsets(text)
    except ValueError as exc:
        raise common.UsageError(f"--to-offsets: {exc}") from None
    if isinstance(named, StartAt):
        raise common.UsageError("--to-offsets must be JSON; for one position use --to-earliest or --to-latest")
    return dict(named)


def _moment_ms(text: str) -> int:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise common.UsageError(f"--to-datetime is {text!r}; it must look like 2026-01-31T12:00:00+00:00") from None
    if moment.tzinfo is None:
        raise common.UsageError(f"--to-datetime {text!r} has no time zone; add one, such as +00:00")
    return ms_of(moment, f"--to-datetime {text}")


def ms_of(moment: datetime, given: str) -> int:
    """A time in milliseconds since 1970. Raises UsageError for an earlier one: to Kafka some negative numbers are
    positions, such as -1 for the end."""
    if (found := int(moment.timestamp() * 1000)) < 0:
        raise common.UsageError(f"{given} is before 1970; Kafka has no records of that time. For the first: earliest")
    return found


def duration_ms(text: str) -> int:
    """Parse a duration like Kafka's own tool (``java.time.Duration``): ISO 8601 without years and months."""
    found = DURATION.fullmatch(text.strip().upper())
    if found is None or not any(found.groups()):
        raise common.UsageError(f"--by-duration is {text!r}; it must be PnDTnHnMnS, such as PT1H30M or P7D")
    days, hours, minutes, seconds = (float(part or 0) for part in found.groups())
    return round(((days * 24 + hours) * 60 + minutes) * 60_000 + seconds * 1000)


# --- a plan in a file ------------------------------------------------------------------------------------------------


def plan_text(offsets: Mapping[TopicPartition, int]) -> str:
    """The CSV lines of one group's plan."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    for tp, offset in sorted(offsets.items()):
        lines.writerow((tp.topic, tp.partition, offset))
    return text.getvalue()


def read_plan(path: Path, group: str) -> dict[TopicPartition, int]:
    """Read a plan from a file; of a file with several groups, the lines of this group.

    Raises:
        OptionError: a line is invalid or appears twice, or no line is of this group.
    """
    found: dict[TopicPartition, int] = {}
    for number, row in enumerate(csv.reader(common.text_of(path).splitlines()), 1):
        if not row:
            continue
        whose, *rest = row if len(row) == 4 else (group, *row)
        numbers = [cell.strip() for cell in rest[1:]]
        are_numbers = all(cell.isdecimal() for cell in numbers)
        if len(rest) != 3 or not are_numbers or int(numbers[0]) > PARTITION_MAX:
            raise OptionError(
                f"{path}, line {number}: {','.join(row)!r} is not topic,partition,offset, as "
                "kafka-consumer-groups --export writes it"
            )
        tp = TopicPartition(rest[0].strip(), int(numbers[0]))
        if whose != group and whose.strip() != group:
            continue
        if tp in found:
            raise OptionError(f"{path}, line {number}: {tp} appears twice")
        found[tp] = int(numbers[1])
    if not found:
        raise OptionError(f"{path} has no line of group {group!r}")
    return found
