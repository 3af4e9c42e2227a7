"""``spark-group watch``: a group as it lives, in a terminal.

Runs in: a terminal. Deliberately absent: what is shown (``watched``) and what is asked (``report``). One thread: it
asks, draws, and waits for the next look; each question has the bounds of ``kafka.admin``.
"""

import signal
import threading
import time
from collections import deque
from contextlib import nullcontext
from datetime import datetime
from typing import Annotated

import typer
from rich.live import Live

from spark_group_source.cli.shared import ConfigOption, GroupOption, ServersOption, admin_of, console
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
    from spark_group_source.cli import report, watched

    admin = admin_of(bootstrap_servers, group, command_config)
    before = report.describe(admin, group)
    if once or not console.is_terminal:
        console.print(watched.picture(before, events=(), per_s=None))
    if once:
        return
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    events: deque[str] = deque(maxlen=EVENTS_MAX)
    looked_s = time.monotonic()
    with Live(console=console, auto_refresh=False, screen=True) if console.is_terminal else nullcontext() as live:
        after, per_s, silent = before, None, ""
        while True:
            if live is not None:
                room = max(ROWS_MIN, console.height - ROWS_BESIDE - len(after.members))
                shown = watched.picture(after, events=events, per_s=per_s, silent=silent, rows_max=room)
                live.update(shown, refresh=True)
            if stop.wait(interval_s):
                return
            try:
                after, silent = report.describe(admin, group), ""
            except BrokerUnavailable as exc:
                if live is None and not silent:
                    typer.echo(f"not answered: {exc}")
                silent = str(exc)
                continue
            now_s = time.monotonic()
            per_s = watched.rate(before, after, now_s - looked_s)
            for change in watched.changes(before, after):
                line = f"{datetime.now():%H:%M:%S}  {change}"  # noqa: DTZ005 - the clock of who looks at it
                events.append(line)
                if live is None:
                    typer.echo(line)
            before, looked_s = after, now_s
