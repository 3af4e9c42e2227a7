"""``spark-group exporter``: groups for Prometheus, from outside.

Runs in: a process of its own, until Ctrl-C or SIGTERM. Deliberately absent: the sweeps (``metrics``).
"""

import logging
import sys
from typing import Annotated

import typer

from spark_group_source.cli.shared import ConfigOption, ServersOption, options_of, stop_on_signals
from spark_group_source.errors import OptionError

INTERVAL_S = 15.0
LEVELS = ("read_committed", "read_uncommitted")


def exporter(
    bootstrap_servers: ServersOption,
    port: Annotated[int, typer.Option("--port", min=0, max=65_535, help="Where Prometheus asks; 0: any free one.")],
    group: Annotated[list[str] | None, typer.Option("--group", help="A consumer group; repeatable.")] = None,
    all_groups: Annotated[bool, typer.Option("--all-groups", help="Every group that may be described.")] = False,
    host: Annotated[str, typer.Option("--host", help="Listen at this address alone; else at all.")] = "",
    interval: Annotated[float, typer.Option("--interval", min=1, help="Seconds from sweep to sweep.")] = INTERVAL_S,
    isolation_level: Annotated[
        str, typer.Option("--isolation-level", help="Of the groups' consumers: read_committed or read_uncommitted.")
    ] = LEVELS[0],
    command_config: ConfigOption = None,
) -> None:
    """Tell Prometheus of groups: offsets, lag in records and in seconds, members, rebalances. It joins none of them."""
    from spark_group_source.kafka import check_settings
    from spark_group_source.metrics.groups import Exporter
    from spark_group_source.metrics.sweep import Sweeps

    if bool(group) == all_groups:
        raise OptionError("say which groups: --group, once for each, or --all-groups")
    if isolation_level not in LEVELS:
        raise OptionError(f"--isolation-level is {isolation_level!r}; write one of {', '.join(LEVELS)}")
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    options = options_of(bootstrap_servers, "-", command_config)
    check_settings(options)
    stop = stop_on_signals()
    names = None if all_groups else sorted(set(group or ()))
    sweeps = Sweeps(options.admin_settings(), names, isolation_level=isolation_level, bound_s=interval)
    serving = Exporter(sweeps, interval_s=interval, host=host, port=port)

    typer.echo(f"metrics of {'all groups' if names is None else ', '.join(names)} at port {serving.port}, /metrics")
    try:
        serving.run(stop)
    finally:
        serving.close()
