"""``spark-group watch``: a group as it lives, in a terminal.

Runs in: a terminal. Deliberately absent: what is asked, and how a look is drawn (``report``). One thread: it asks,
draws, and waits for the next look; each question has the bounds of ``kafka.admin``.
"""

import time
from collections import deque
from contextlib import nullcontext
from datetime import datetime
from typing import Annotated

import typer
from rich.live import Live

from spark_group_source.cli.report import NOBODY, GroupReport, describe, name_of, picture, spans
from spark_group_source.cli.shared import ConfigOption, GroupOption, ServersOption, admin_of, console, stop_on_signals
from spark_group_source.errors import BrokerUnavailable

INTERVAL_MIN_S = 0.2
EVENTS_MAX = 8
"""Lines of what happened that are kept."""
ROWS_BESIDE = 18
"""Lines of a screen that are not partitions: the head, the frames, the events; members come on top."""
ROWS_MIN = 5


def watch(
    group: GroupOption,
    bootstrap_servers: ServersOption,
    interval_s: Annotated[
        float, typer.Option("--interval-s", min=INTERVAL_MIN_S, help="From one look to the next.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One look, printed plainly.")] = False,
    command_config: ConfigOption = None,
) -> None:
    """Show a group as it lives: members, partitions, lag, and rebalances as they happen. Ctrl-C ends it.

    Without a terminal it prints one look, and then a line for everything that happens.
    """
    admin = admin_of(bootstrap_servers, group, command_config)
    before = describe(admin, group)
    if once or not console.is_terminal:
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
                shown = picture(after, events=events, per_s=per_s, silent=silent, rows_max=room, bars=True)
                live.update(shown, refresh=True)
            if stop.wait(interval_s):
                return
            try:
                after, silent = describe(admin, group), ""
            except BrokerUnavailable as exc:
                if live is None and not silent:
                    typer.echo(f"not answered: {exc}")
                silent = str(exc)
                continue
            now_s = time.monotonic()
            per_s = rate(before, after, now_s - looked_s)
            for change in changes(before, after):
                line = f"{datetime.now():%H:%M:%S}  {change}"  # noqa: DTZ005 - the clock of who looks at it
                events.append(line)
                if live is None:
                    typer.echo(line)
            before, looked_s = after, now_s


def changes(before: GroupReport, after: GroupReport) -> list[str]:
    """What happened between two looks, a line each: of the state, members, partitions, queries."""
    said = []
    if before.state != after.state:
        said.append(f"the group is {after.state or 'unknown'}, it was {before.state or 'unknown'}")
    was, now = ({name_of(member) for member in report.members} for report in (before, after))
    said += [f"{name} joined" for name in sorted(now - was)]
    said += [f"{name} left" for name in sorted(was - now)]
    owners = {(row.topic, row.partition): row.member for row in before.partitions}
    moves: dict[tuple[str, str, str], list[int]] = {}
    for row in after.partitions:
        former = owners.get((row.topic, row.partition), "")
        if former != row.member:
            moves.setdefault((row.topic, former or NOBODY, row.member or NOBODY), []).append(row.partition)
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
    """Records a second that were committed between two looks; a reset backwards counts as none."""
    at = {(row.topic, row.partition): row.committed for row in before.partitions}
    moved = 0
    for row in after.partitions:
        former = at.get((row.topic, row.partition))
        if former is not None and row.committed is not None:
            moved += max(0, row.committed - former)
    return moved / elapsed_s if elapsed_s > 0 else 0.0


def _rebalances(report: GroupReport) -> dict[int, tuple[int, str]]:
    return {run["pid"]: (run["rebalances"], str(run["reason"])) for run in report.runs}
