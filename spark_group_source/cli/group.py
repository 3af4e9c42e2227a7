"""``spark-group describe``, ``reset`` and ``drain``: looking at a group, moving it, bringing its queries to rest.

Runs in: a terminal. Deliberately absent: what is done (``report``, ``reset``, ``host.runs``); here it is asked for and
shown.
"""

import json
import logging
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from spark_group_source.errors import OptionError
from spark_group_source.group.statistics import Statistics
from spark_group_source.host import runs
from spark_group_source.model import EARLIEST, LATEST, StartAt
from spark_group_source.options.starting import parse_offsets

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_group_source.cli.report import GroupReport
    from spark_group_source.kafka import GroupAdmin
    from spark_group_source.model import TopicPartition

console = Console()
T = TypeVar("T")

GroupOption = Annotated[str, typer.Option("--group", help="The consumer group.")]
ServersOption = Annotated[str, typer.Option("--bootstrap-servers", help="host:port, …")]
TableOption = Annotated[str | None, typer.Option("--table", help="A Delta table, by path or name: its ledger too.")]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--command-config", exists=True, dir_okay=False, help="Client settings (security), one name=value a line."
    ),
]


def describe(
    group: GroupOption,
    bootstrap_servers: ServersOption,
    table: TableOption = None,
    command_config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show who is in a group, where it stands, and what its queries on this host did."""
    from spark_group_source.cli import report

    ledger = None
    with session(table is not None) as spark:
        if spark is not None and table is not None:
            from spark_group_source.delta.kept import read_ledger

            found = read_ledger(spark, table, group)
            ledger = {} if found is None else found.offsets
    described = report.describe(_admin(bootstrap_servers, group, command_config), group, ledger)
    if as_json:
        typer.echo(json.dumps(described.as_dict(), indent=2))
    else:
        _show(described, with_ledger=table is not None)


def reset(
    group: GroupOption,
    bootstrap_servers: ServersOption,
    topic: Annotated[list[str] | None, typer.Option("--topic", help="Only this topic; repeatable.")] = None,
    to_earliest: Annotated[bool, typer.Option("--to-earliest", help="To the first record still there.")] = False,
    to_latest: Annotated[bool, typer.Option("--to-latest", help="To the end: skip what is there.")] = False,
    to_offset: Annotated[int | None, typer.Option("--to-offset", min=0, help="To this offset.")] = None,
    to_offsets: Annotated[str | None, typer.Option("--to-offsets", help='JSON: {"orders":{"0":23,"1":-1}}')] = None,
    to_datetime: Annotated[str | None, typer.Option("--to-datetime", help="ISO 8601 with its zone.")] = None,
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
    command_config: ConfigOption = None,
) -> None:
    """Move a stopped group's offsets; with --table the table's ledger moves along, so that nothing is refused later.

    The queries go on with the checkpoints they have.
    """
    from spark_group_source.cli import reset as resetting

    given = [value for value in (to_offset, to_offsets, to_datetime, to_checkpoint) if value is not None]
    if to_earliest + to_latest + to_ledger + len(given) != 1:
        raise OptionError(
            "say where to: exactly one of --to-earliest, --to-latest, --to-offset, --to-offsets, --to-datetime, "
            "--to-ledger and --to-checkpoint"
        )
    if to_ledger and table is None:
        raise OptionError("--to-ledger needs --table: the Delta table whose ledger is meant")
    if batch is not None and to_checkpoint is None:
        raise OptionError("--batch needs --to-checkpoint: the checkpoint that has the batch")
    admin = _admin(bootstrap_servers, group, command_config)
    with session(table is not None or to_checkpoint is not None) as spark:
        named: Mapping[TopicPartition, int] | None = None
        if to_offsets is not None:
            named = _named(to_offsets)
        elif spark is not None and (to_ledger or to_checkpoint is not None):
            named = _kept(spark, group, table, to_checkpoint, batch)
        if named is not None:
            chosen = {tp: at for tp, at in named.items() if not topic or tp.topic in topic}
            targets = resetting.named_targets(admin, chosen)
        else:
            to = EARLIEST if to_earliest else LATEST if to_latest else _place(to_offset, to_datetime)
            targets = resetting.targets(admin, resetting.partitions_of(admin, group, topic or []), to)
        _show_move(admin, group, targets)
        if not execute:
            console.print("nothing was changed; add --execute to do it")
            return
        number = resetting.move(admin, group, targets, spark=spark if table is not None else None, table=table)
    typer.echo(f"moved {len(targets)} partitions of group {group}; this was its reset {number}")


def drain(
    group: GroupOption,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=0, help="The longest wait.")] = runs.DRAIN_S,
) -> None:
    """Let this host's queries of a group finish their batch and begin no other: then they can be stopped."""
    with console.status("waiting for the batch in hand ..."):
        count = runs.drain(group, timeout_s=timeout_s)
    typer.echo(f"{count} {'query' if count == 1 else 'queries'} of group {group} drained; stop now")


def _kept(
    spark: "SparkSession", group: str, table: str | None, checkpoint: str | None, batch: int | None
) -> "Mapping[TopicPartition, int]":
    """What a checkpoint, else the ledger of a table, says of the group."""
    from spark_group_source.delta.checkpoint import positions
    from spark_group_source.delta.kept import read_ledger

    if checkpoint is not None:
        return positions(spark, checkpoint, group, batch)
    found = read_ledger(spark, str(table), group)
    if found is None:
        raise OptionError(f"group {group!r} never wrote to {table}; the table has no ledger of it")
    return found.offsets


def _named(text: str) -> "dict[TopicPartition, int]":
    try:
        named = parse_offsets(text)
    except ValueError as exc:
        raise OptionError(f"--to-offsets: {exc}") from None
    if isinstance(named, StartAt):
        raise OptionError("--to-offsets takes JSON; for a word use --to-earliest or --to-latest")
    return dict(named)


def _place(offset: int | None, text: str | None) -> StartAt:
    if text is None:
        return StartAt("offset", offset or 0)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise OptionError(f"--to-datetime is {text!r}; write it as 2026-01-31T12:00:00+00:00") from None
    if moment.tzinfo is None:
        raise OptionError(f"--to-datetime {text!r} has no zone; add one, such as +00:00")
    return StartAt("time", int(moment.timestamp() * 1000))


def _admin(servers: str, group: str, config: Path | None) -> "GroupAdmin":
    from spark_group_source.kafka import GroupAdmin
    from spark_group_source.options.table import Options

    lines = [] if config is None else config.read_text(encoding="utf-8").splitlines()
    pairs = [line.split("=", 1) for line in map(str.strip, lines) if line and not line.startswith("#")]
    wrong = [pair[0] for pair in pairs if len(pair) != 2]
    if wrong:
        raise OptionError(f"{config}: {wrong[0]!r} has no value; write name=value")
    given = {f"kafka.{name.strip()}": value.strip() for name, value in pairs}
    options = Options.parse({**given, "kafka.bootstrap.servers": servers, "kafka.group.id": group, "subscribe": "-"})
    return GroupAdmin(options.admin_settings(), retries=0)


@contextmanager
def session(wanted: bool) -> "Iterator[SparkSession | None]":
    """A small local session that can read checkpoints and Delta tables, and write these, if one is wanted."""
    if not wanted:
        yield None
        return
    from pyspark.sql import SparkSession

    from spark_group_source.local.conf import local_spark_settings

    logging.getLogger("py4j").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="spark-group-") as scratch, console.status("starting Spark ..."):
        builder = SparkSession.builder.master("local[1]").appName("spark-group")
        for key, value in local_spark_settings(scratch).items():
            builder = builder.config(key, value)
        spark = builder.getOrCreate()
        try:
            yield spark
        finally:
            spark.stop()


def _show(described: "GroupReport", *, with_ledger: bool) -> None:
    console.print(
        f"group [bold]{described.group}[/bold]: {described.state or 'unknown'}, {described.protocol or 'no'} protocol"
        f"{', ' + described.assignor if described.assignor else ''}, {len(described.members)} members, "
        f"lag {described.lag}"
    )
    columns = [
        "topic",
        "partition",
        "committed",
        "end",
        "lag",
        *(["ledger"] if with_ledger else []),
        "member",
        "stream",
    ]
    table = Table(*columns)
    for row in described.partitions:
        numbers = [row.committed, row.end, row.lag, *([row.ledger] if with_ledger else [])]
        shown = ["-" if number is None else str(number) for number in numbers]
        table.add_row(row.topic, str(row.partition), *shown, row.member or "-", row.stream or "-")
    console.print(table)
    idle = [m.instance_id or m.member_id for m in described.members if not m.partitions]
    if idle:
        console.print(f"members without partitions: {', '.join(idle)}")
    for run in described.runs:
        console.print(
            f"query in process {run['pid']}: generation {run['generation']}, {run['rebalances']} rebalances"
            f"{', the last: ' + run['reason'] if run['reason'] else ''}, "
            f"longest hold {run['hold_max_ms']} ms, {run['commits']} commits, "
            f"{run['commits_failed']} failed, {run['lost']} partitions lost, {run['records_lost']} records lost"
        )
        console.print(_slots(Statistics.from_dict(run), time.monotonic()))
        if since_ms := run.get("unreachable_since_ms"):
            silent_s = time.monotonic() - since_ms / 1000
            console.print(f"query in process {run['pid']}: no broker has answered it for {silent_s:.0f} s")


def _slots(run: Statistics, now_s: float) -> Table:
    """Where each slot of a query lives, and what is read there. Tasks tell only where agents may be."""
    columns = ("slot", "state", "partitions", "lives at", "for", "read ahead", "rows from memory", "rows from brokers")
    table = Table(*columns, "called back")
    for column in table.columns:
        column.overflow = "fold"  # a name that is cut short names nothing
    for slot, (state, partitions) in enumerate(zip(run.slots, run.assigned, strict=True)):
        host, since_ms = _at(run.hosts, slot, ""), _at(run.lent_since_ms, slot, 0)
        rows = _at(run.rows_from_memory, slot, 0), _at(run.rows_from_brokers, slot, 0)
        held = f"{_at(run.buffered_rows, slot, 0)} rows, {_at(run.buffered_bytes, slot, 0) / 1024:.0f} KiB"
        table.add_row(
            *(str(slot), state, str(partitions), host or "the stream reader"),
            *((f"{now_s - since_ms / 1000:.0f} s", held) if host else ("-", "-")),
            *(map(str, rows) if any(rows) else ("-", "-")),
            str(_at(run.recalled, slot, 0)),
        )
    return table


def _at(values: Sequence[T], slot: int, otherwise: T) -> T:
    """A run of an earlier release says less."""
    return values[slot] if slot < len(values) else otherwise


def _show_move(admin: "GroupAdmin", group: str, targets: "dict[TopicPartition, int]") -> None:
    now = admin.committed(group)
    table = Table("topic", "partition", "now", "then")
    for tp, offset in sorted(targets.items()):
        table.add_row(tp.topic, str(tp.partition), str(now[tp].offset) if tp in now else "-", str(offset))
    console.print(table)
