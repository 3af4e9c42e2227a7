"""``spark-group list`` and ``describe``: looking at groups.

Runs in: a terminal. Deliberately absent: what is found out (``report``); here it is asked for and shown.
"""

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.table import Table

from spark_group_source.cli import shared
from spark_group_source.cli.shared import (
    CheckpointOption,
    ConfigOption,
    JsonOption,
    ServersOption,
    TableOption,
    console,
)
from spark_group_source.errors import OptionError
from spark_group_source.group.statistics import Statistics

if TYPE_CHECKING:
    from spark_group_source.cli.report import GroupReport

T = TypeVar("T")

STATES = (
    "stable",
    "preparing_rebalancing",
    "completing_rebalancing",
    "empty",
    "dead",
    "assigning",
    "reconciling",
    "unknown",
)
"""A group's states as the client library spells them; Kafka's own tool writes PreparingRebalance."""


def list_groups(
    bootstrap_servers: ServersOption,
    state: Annotated[bool, typer.Option("--state", help="With state and protocol.")] = False,
    states: Annotated[str, typer.Argument(help="After --state: only groups in these, such as stable,empty.")] = "",
    command_config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the consumer groups of a cluster, one a line."""
    if states and not state:
        raise OptionError(f"{states!r} stands alone; for groups in these states write --state {states}")
    wanted = _states(states)
    groups = shared.admin_of(bootstrap_servers, "-", command_config).groups()
    found = [one for one in groups if not wanted or one.state in wanted]
    if as_json:
        fields = ({"group": one.group, "state": one.state, "protocol": one.protocol} for one in found)
        typer.echo(json.dumps(list(fields), indent=2))
    elif state:
        table = _unshortened(Table("group", "state", "protocol"))
        for one in found:
            table.add_row(one.group, one.state, one.protocol)
        console.print(table)
    else:
        for one in found:
            typer.echo(one.group)


def describe(
    bootstrap_servers: ServersOption,
    group: Annotated[list[str] | None, typer.Option("--group", help="A consumer group; repeatable.")] = None,
    all_groups: Annotated[bool, typer.Option("--all-groups", help="Every group of the cluster.")] = False,
    offsets: Annotated[bool, typer.Option("--offsets", help="Only offsets and lag.")] = False,
    members: Annotated[bool, typer.Option("--members", help="Only who is in the group.")] = False,
    state: Annotated[bool, typer.Option("--state", help="Only state, coordinator and assignor.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Also which partitions each member has.")] = False,
    table: TableOption = None,
    checkpoint: CheckpointOption = None,
    command_config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show who is in a group, where it stands, and what its queries on this host did.

    JSON has all of it, for one --group as one object, else as a list.
    """
    from spark_group_source.cli import report

    if all_groups == bool(group):
        raise OptionError("say which groups: --group, once or several times, or --all-groups")
    if checkpoint is not None and len(group or []) != 1:
        raise OptionError("--checkpoint is of one query: give its --group with it, and no other")
    admin = shared.admin_of(bootstrap_servers, group[0] if group else "-", command_config)
    names = list(dict.fromkeys(group or [one.group for one in admin.groups()]))
    ledgers = {}
    with shared.session(table is not None) as spark:
        if spark is not None and table is not None:
            from spark_group_source.delta.kept import read_ledger

            ledgers = {name: kept.offsets for name in names if (kept := read_ledger(spark, table, name)) is not None}
    elsewhere = []
    if checkpoint is not None:
        from spark_group_source.delta import board

        with shared.notices(checkpoint) as place:
            elsewhere = [board.last(place, checkpoint, names[0])]
    everything = not (offsets or members or state)
    asked = offsets or everything or as_json
    found = []
    for name in names:
        told = elsewhere if name == names[0] else []
        one = report.look(admin, name, ledgers.get(name), offsets=asked, elsewhere=told)
        if one is not None:
            found.append(one)
        elif group:
            raise report.not_there(name)  # of all groups, one may go after they were listed
    if as_json:
        shown = [one.as_dict() for one in found]
        typer.echo(json.dumps(shown[0] if group and len(shown) == 1 else shown, indent=2))
        return
    if state or (everything and verbose):
        _show_states(found)
    if members or (everything and verbose):
        _show_members(found, verbose=verbose)
    if offsets or everything:
        for one in found:
            _show(one, with_ledger=table is not None, with_runs=everything)


def _states(text: str) -> set[str]:
    """The states that were named, in the library's words; Kafka's are understood."""

    def plain(word: str) -> str:
        return word.strip().lower().replace("_", "").replace("rebalancing", "rebalance")

    known = {plain(one): one for one in STATES}
    wanted = [plain(word) for word in text.split(",") if word.strip()]
    if wrong := [word for word in wanted if word not in known]:
        raise OptionError(f"there is no state {wrong[0]!r}; the states are {', '.join(STATES)}")
    return {known[word] for word in wanted}


def _show_states(found: "Sequence[GroupReport]") -> None:
    table = _unshortened(Table("group", "coordinator", "protocol", "assignor", "state", "members"))
    for one in found:
        words = (one.coordinator, one.protocol, one.assignor, one.state)
        table.add_row(one.group, *(word or "-" for word in words), str(len(one.members)))
    console.print(table)


def _show_members(found: "Sequence[GroupReport]", *, verbose: bool) -> None:
    table = _unshortened(Table("group", "member", "host", "client", "partitions", *(["assignment"] if verbose else [])))
    for one in found:
        for m in sorted(one.members, key=lambda m: (m.instance_id, m.member_id)):
            assigned = ", ".join(str(tp) for tp in sorted(m.partitions)) or "-"
            words = (one.group, m.instance_id or m.member_id, m.host, m.client_id, str(len(m.partitions)))
            table.add_row(*words, *([assigned] if verbose else []))
    console.print(table)


def _show(described: "GroupReport", *, with_ledger: bool, with_runs: bool) -> None:
    from spark_group_source.cli.report import expiry_text

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
    table = _unshortened(Table(*columns))
    for row in described.partitions:
        numbers = [row.committed, row.end, row.lag, *([row.ledger] if with_ledger else [])]
        shown = ["-" if number is None else str(number) for number in numbers]
        table.add_row(row.topic, str(row.partition), *shown, row.member or "-", row.stream or "-")
    console.print(table)
    for line in expiry_text(described):
        console.print(line)
    if not with_runs:
        return
    idle = [m.instance_id or m.member_id for m in described.members if not m.partitions]
    if idle:
        console.print(f"members without partitions: {', '.join(idle)}")
    for run in described.runs:
        at = f"process {run['pid']}" + (f" on {run['host']}" if "host" in run else "")
        now_s = run["now_ms"] / 1000 if "now_ms" in run else time.monotonic()
        if "written_ms" in run:
            at += f", as it said {time.time() - run['written_ms'] / 1000:.0f} s ago"
        console.print(
            f"query in {at}: generation {run['generation']}, {run['rebalances']} rebalances"
            f"{', the last: ' + run['reason'] if run['reason'] else ''}, "
            f"longest hold {run['hold_max_ms']} ms, {run['commits']} commits, "
            f"{run['commits_failed']} failed, {run['lost']} partitions lost, {run['records_lost']} records lost"
        )
        console.print(_slots(Statistics.from_dict(run), now_s))
        if since_ms := run.get("unreachable_since_ms"):
            console.print(f"query in {at}: no broker has answered it for {now_s - since_ms / 1000:.0f} s")


def _slots(run: Statistics, now_s: float) -> Table:
    """Where each slot of a query lives, and what is read there. Tasks tell only where agents may be."""
    columns = ("slot", "state", "partitions", "lives at", "for", "read ahead", "rows from memory", "rows from brokers")
    table = _unshortened(Table(*columns, "called back"))
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


def _unshortened(table: Table) -> Table:
    """A name that is cut short names nothing."""
    for column in table.columns:
        column.overflow = "fold"
    return table
