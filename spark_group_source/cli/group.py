"""``spark-group list``, ``describe`` and ``watch``: show groups.

Runs in: a terminal. Deliberately absent: reading a group and drawing it (``report``). ``watch`` has one thread, which
reads, draws and waits; each request has the bounds of ``kafka.admin``.
"""

import json
import time
from collections import deque
from collections.abc import Iterable
from contextlib import nullcontext
from datetime import datetime
from itertools import zip_longest
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.live import Live

from spark_group_source.cli import common, report
from spark_group_source.cli.common import (
    FINAL,
    RETRIABLE,
    CheckpointOption,
    ConfigOption,
    GroupOption,
    JsonOption,
    ServersOption,
    TableOption,
    admin_of,
    cells,
    console,
    stop_on_signals,
    table_of,
)
from spark_group_source.cli.report import UNASSIGNED, GroupReport, counted, group_view, spans
from spark_group_source.errors import BrokerUnavailable, GroupError
from spark_group_source.kafka.group_admin import GroupAdmin
from spark_group_source.kafka.translation import GROUP_STATES
from spark_group_source.protocol.slots import shown
from spark_group_source.protocol.statistics import Statistics

INTERVAL_MIN_S = 0.2
"""The shortest interval of ``watch``: each round is several requests to the brokers."""
SILENT_GROUPS_MAX = 3
"""Groups in a row that are not answered, each of which takes seconds; then the others are not asked."""
EVENTS_MAX = 8
"""Events that are kept."""
ROWS_BESIDE = 18
"""Lines of the screen besides partitions and members: heading, frames, events."""
ROWS_MIN = 5


def list_groups(
    bootstrap_servers: ServersOption,
    state: Annotated[bool, typer.Option("--state", help="Show state and protocol.")] = False,
    states: Annotated[
        str, typer.Argument(help="With --state: only groups in these states, such as stable,empty.")
    ] = "",
    command_config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the consumer groups of a cluster, one a line."""
    if states and not state:
        raise common.UsageError(f"{states!r} needs --state before it: --state {states}")
    wanted = _states(states)
    with common.admin_of(bootstrap_servers, "-", command_config) as admin:
        groups = admin.groups()
    found = [one for one in groups if not wanted or one.state in wanted]
    if as_json:
        fields = ({"group": one.group, "state": one.state, "protocol": one.protocol} for one in found)
        typer.echo(json.dumps(list(fields), indent=2))
    elif state:
        console.print(table_of("group", "state", "protocol", rows=[(g.group, g.state, g.protocol) for g in found]))
    else:
        for one in found:
            typer.echo(one.group)


def describe(
    bootstrap_servers: ServersOption,
    group: Annotated[list[str] | None, typer.Option("--group", help="A consumer group; repeatable.")] = None,
    all_groups: Annotated[bool, typer.Option("--all-groups", help="Every group of the cluster.")] = False,
    offsets: Annotated[bool, typer.Option("--offsets", help="Only offsets and lag.")] = False,
    members: Annotated[bool, typer.Option("--members", help="Only the members.")] = False,
    state: Annotated[bool, typer.Option("--state", help="Only state, coordinator and assignor.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Also the partitions of each member.")] = False,
    table: TableOption = None,
    checkpoint: CheckpointOption = None,
    command_config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a group's members, offsets and lag, and the statistics of its queries on this host.

    JSON always contains everything: one object for one --group, a list otherwise.

    With --all-groups a group that cannot be read is reported on stderr, and sets the exit code at the end.
    """
    if all_groups == bool(group):
        raise common.UsageError("give either --group (repeatable) or --all-groups")
    if checkpoint is not None and len(group or []) != 1:
        raise common.UsageError("--checkpoint belongs to one query: give exactly one --group with it")
    with_offsets = not state or offsets or members or as_json  # the line above any other table has the lag
    with common.admin_of(bootstrap_servers, group[0] if group else "-", command_config) as admin:
        names = list(dict.fromkeys(group or [one.group for one in admin.groups()]))
        ledgers = {}
        if table is not None:
            with common.table_history(table) as history:
                ledgers = report.ledgers_in(history, names, lambda text: typer.echo(text, err=True))
        elsewhere = []
        if checkpoint is not None:
            from spark_group_source.delta import checkpoint_status

            with common.checkpoint_files(checkpoint) as (files, root):
                elsewhere = [checkpoint_status.last_status(checkpoint_status.StatusFiles(files, root), names[0])]
        found, failed, silent = [], list[GroupError](), 0
        for name in names:
            reported = elsewhere if name == names[0] else []
            try:
                one = report.read_group(admin, name, ledgers.get(name), offsets=with_offsets, elsewhere=reported)
            except GroupError as exc:
                if not all_groups:
                    raise
                failed.append(exc)
                typer.echo(f"error: {type(exc).__name__}: {exc}", err=True)
                silent = silent + 1 if isinstance(exc, BrokerUnavailable) else 0
                if silent == SILENT_GROUPS_MAX and name != names[-1]:
                    typer.echo(f"{silent} groups in a row were not answered; those after {name} are left out", err=True)
                    break
                continue
            silent = 0
            if one is not None:
                found.append(one)
            elif group:
                raise report.missing_group(admin, name)  # a group may be deleted after --all-groups listed it
    if as_json:
        shown = [one.as_dict() for one in found]
        typer.echo(json.dumps(shown[0] if group and len(shown) == 1 else shown, indent=2))
    else:
        _show(found, offsets=offsets, members=members, state=state, verbose=verbose)
    if failed:
        raise typer.Exit(RETRIABLE if all(exc.retriable for exc in failed) else FINAL)


def _show(found: list[GroupReport], *, offsets: bool, members: bool, state: bool, verbose: bool) -> None:
    everything = not (offsets or members or state)
    if state or (everything and verbose):
        rows = [(g.group, g.coordinator, g.protocol, g.assignor, g.state, len(g.members)) for g in found]
        console.print(table_of("group", "coordinator", "protocol", "assignor", "state", "members", rows=rows))
    for one in found:
        if not state:
            console.print(report.heading(one), highlight=False)
        if members or (everything and verbose):
            console.print(report.members_table(one, assignment=verbose))
        if offsets or everything:
            console.print(report.partitions_table(one))
            for line in report.expiry_text(one):
                console.print(line)
        if everything:
            _show_runs(one)


def _states(text: str) -> set[str]:
    """Parse group states in the client library's or Kafka's spelling."""

    def plain(word: str) -> str:
        return word.strip().lower().replace("_", "").replace("rebalancing", "rebalance")

    known = {plain(one): one for one in GROUP_STATES}
    wanted = [plain(word) for word in text.split(",") if word.strip()]
    if wrong := [word for word in wanted if word not in known]:
        raise common.UsageError(f"unknown state {wrong[0]!r}; the states are {', '.join(GROUP_STATES)}")
    return {known[word] for word in wanted}


def _show_runs(described: GroupReport) -> None:
    """Print members without partitions, and statistics of the queries of this host or of a checkpoint."""
    idle = [m.name for m in described.members if not m.partitions]
    if idle:
        console.print(f"members without partitions: {', '.join(idle)}")
    for run in described.runs:
        counts = Statistics.from_dict(run)
        at = f"process {run['pid']}" + (f" on {run['host']}" if "host" in run else "")
        now_s = run["now_ms"] / 1000 if "now_ms" in run else time.monotonic()
        if "written_ms" in run:
            at += f", reported {time.time() - run['written_ms'] / 1000:.0f} s ago"
        console.print(
            f"query in {at}: generation {counts.generation}, {counted(counts.rebalances, 'rebalance')}"
            f"{', the last: ' + counts.reason if counts.reason else ''}, "
            f"longest hold {counts.hold_max_ms} ms, {counted(counts.commits, 'commit')}, "
            f"{counts.commits_failed} failed, {counted(counts.partitions_lost, 'partition')} lost, "
            f"{counted(counts.records_lost, 'record')} lost"
        )
        console.print(_slots(counts, now_s))
        for line in report.written_lines(run):
            console.print(line)
        if counts.missing_topics:
            console.print(f"query in {at}: topic {shown(counts.missing_topics)} does not exist")
        if since_ms := counts.unreachable_since_ms:
            console.print(f"query in {at}: no broker has answered it for {now_s - since_ms / 1000:.0f} s")


def _slots(run: Statistics, now_s: float) -> RenderableType:
    """Where each slot of a query is placed, and what is read there. Tasks report only where agents can run. Values that
    another version of the package did not write are shown as missing."""
    found = []
    where = ("slot", "state", "partitions", "placed on", "for", "prefetched")
    columns = (*where, "rows from memory", "rows from brokers", "recalls")
    placed = (run.agents, run.placed_since_ms, run.buffered_rows, run.buffered_bytes)
    reads = (run.rows_from_memory, run.rows_from_brokers)
    by_slot: Iterable[tuple[Any, ...]] = zip_longest(run.slots, run.assigned, run.slot_recalls, *placed, *reads)
    for slot, (state, partitions, recalls, agent, since_ms, rows, size, *read) in enumerate(by_slot):
        age = None if since_ms is None else f"{now_s - since_ms / 1000:.0f} s"
        held = None if rows is None or size is None else f"{rows:,} rows, {size / 1024:,.0f} KiB"
        at = (agent, age, held) if agent else ("the stream reader", None, None)
        found.append((slot, state, partitions, *at, *(read if any(read) else (None, None)), recalls))
    return report.ByWidth(report.lines_of(columns, map(cells, found)), table_of(*columns, rows=found))


# --- spark-group watch -----------------------------------------------------------------------------------------------


def watch(
    group: GroupOption,
    bootstrap_servers: ServersOption,
    interval_s: Annotated[
        float, typer.Option("--interval-s", min=INTERVAL_MIN_S, help="Seconds between two snapshots.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot and exit.")] = False,
    command_config: ConfigOption = None,
) -> None:
    """Show a group continuously: members, partitions, lag and rebalances. Ctrl-C stops it.

    Without a terminal it prints one snapshot, then one line for each event. It waits for a group that does not exist.
    """
    with admin_of(bootstrap_servers, group, command_config) as admin:
        _watch(admin, group, interval_s, once=once)


def _watch(admin: GroupAdmin, group: str, interval_s: float, *, once: bool) -> None:
    def read() -> GroupReport | None:
        return report.read_group(admin, group, expiry=False)

    before = read()
    if before is None:
        if once:
            raise report.missing_group(admin, group)
        before = report.no_group(group)
    if before.state == report.DEAD and not console.is_terminal:
        typer.echo(f"group {group} does not exist; waiting for it")
    elif once or not console.is_terminal:
        console.print(before)
    if once:
        return
    stop = stop_on_signals()
    events: deque[str] = deque(maxlen=EVENTS_MAX)
    looked_s = time.monotonic()
    with Live(console=console, auto_refresh=False, screen=True) if console.is_terminal else nullcontext() as live:
        after, per_s, silent = before, None, ""
        while True:
            if live is not None:
                room = max(ROWS_MIN, console.height - ROWS_BESIDE - len(after.members))
                shown = group_view(after, events=events, per_s=per_s, silent=silent, rows_max=room, bars=True)
                live.update(shown, refresh=True)
            if stop.wait(interval_s):
                return
            try:
                after, silent = read() or report.no_group(group), ""
            except BrokerUnavailable as exc:
                if live is None and not silent:
                    typer.echo(f"no answer: {exc}")
                silent = str(exc)
                continue
            now_s = time.monotonic()
            per_s = rate(before, after, now_s - looked_s)
            for change in changes(before, after):
                line = f"{datetime.now():%H:%M:%S}  {change}"  # noqa: DTZ005 - the local time of the user
                events.append(line)
                if live is None:
                    typer.echo(line)
            before, looked_s = after, now_s


def changes(before: GroupReport, after: GroupReport) -> list[str]:
    """The events between two snapshots: state, members, partitions, queries."""
    said = []
    if before.state != after.state:
        said.append(f"the group is {after.state or 'unknown'}, it was {before.state or 'unknown'}")
    was, now = ({member.name for member in one.members} for one in (before, after))
    said += [f"{name} joined" for name in sorted(now - was)]
    said += [f"{name} left" for name in sorted(was - now)]
    owners = {(row.topic, row.partition): row.member for row in before.partitions}
    moves: dict[tuple[str, str, str], list[int]] = {}
    for row in after.partitions:
        former = owners.get((row.topic, row.partition), "")
        if former != row.member:
            moves.setdefault((row.topic, former or UNASSIGNED, row.member or UNASSIGNED), []).append(row.partition)
    said += [
        f"{topic} {spans(partitions)}: {former} → {new}" for (topic, former, new), partitions in sorted(moves.items())
    ]
    rebalances = _rebalances(before), _rebalances(after)
    for pid in rebalances[1].keys() & rebalances[0].keys():
        (count, _), (new_count, reason) = rebalances[0][pid], rebalances[1][pid]
        if new_count > count:
            said.append(f"rebalance {new_count} of the query in process {pid}{': ' + reason if reason else ''}")
    return said


def rate(before: GroupReport, after: GroupReport, elapsed_s: float) -> float:
    """Committed records per second between two snapshots; a backward reset counts as none."""
    at = {(row.topic, row.partition): row.committed for row in before.partitions}
    moved = 0
    for row in after.partitions:
        former = at.get((row.topic, row.partition))
        if former is not None and row.committed is not None:
            moved += max(0, row.committed - former)
    return moved / elapsed_s if elapsed_s > 0 else 0.0


def _rebalances(of: GroupReport) -> dict[int, tuple[int, str]]:
    return {run["pid"]: (run.get("rebalances", 0), run.get("reason", "")) for run in of.runs}
