"""``spark-group``: the commands around the source.

Runs in: a terminal. Deliberately absent: anything a job needs; a job imports the package.

A command is a function with ``@app.command()`` (or of a group such as ``broker_app``). It raises ``SourceError`` for
what the person at the terminal can settle: that becomes one line on stderr and an exit code that says whether the same
command can help later (:data:`EXIT_CODES`). Heavy imports (Kafka, Spark) belong inside the functions, so that
``--help`` answers at once.
"""

import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from spark_group_source import __version__, compatibility
from spark_group_source.cli import shared
from spark_group_source.cli.group import describe, list_groups, watch
from spark_group_source.cli.ledger import ledger_app
from spark_group_source.cli.migrate import migrate
from spark_group_source.cli.offsets import delete_group, delete_offsets
from spark_group_source.cli.reset import reset_command
from spark_group_source.cli.run import run
from spark_group_source.cli.shared import (
    CheckpointOption,
    ConfigOption,
    GroupOption,
    JsonOption,
    ServersOption,
    console,
    options_of,
    stop_on_signals,
    table_of,
)
from spark_group_source.errors import OptionError, SourceError
from spark_group_source.host import run_files

SPARKS = ("pyspark.errors", "py4j")
"""Where Spark's own errors come from: a table or path that it cannot read."""
LEVELS = ("read_committed", "read_uncommitted")
WATCH_S = 1.0
"""How often a broker in the foreground looks whether a node still runs."""


FINAL, RETRIABLE = 1, 75
"""Exit codes of what was refused or is wrong, and of what may work later (EX_TEMPFAIL of sysexits.h)."""
EXIT_CODES = {
    0: "done",
    FINAL: "refused or wrong: the same command fails again until somebody changes something",
    2: "the command line itself is wrong",
    3: "`broker status`: there is no broker",
    RETRIABLE: "no answer, or not now: the same command may work later",
}


class _Commands(TyperGroup):
    """Shows errors as one line instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:  # Any: as in the base class, whose context class typer does not export
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # whoever reads the output has enough of it
            raise
        except (SourceError, OSError) as exc:
            typer.echo(f"error: {type(exc).__name__}: {exc}", err=True)
            raise typer.Exit(RETRIABLE if getattr(exc, "retriable", False) else FINAL) from exc
        except ModuleNotFoundError as exc:  # Spark is no dependency, and most commands do without
            if (trouble := compatibility.problem()) is None:
                raise
            typer.echo(f"error: SetupError: {trouble}", err=True)
            raise typer.Exit(FINAL) from exc
        except Exception as exc:
            if not type(exc).__module__.startswith(SPARKS):  # ours: a traceback tells more
                raise
            typer.echo(f"error: Spark: {next(iter(str(exc).strip().splitlines()), type(exc).__name__)}", err=True)
            raise typer.Exit(FINAL) from exc


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,  # older releases of typer show the values of variables, secrets among them
    epilog="Exit codes: " + "; ".join(f"{code}: {means}" for code, means in EXIT_CODES.items()) + ".",
)
broker_app = typer.Typer(no_args_is_help=True, help="A real local Kafka, for development.")
app.add_typer(broker_app, name="broker")
app.add_typer(ledger_app, name="ledger")
app.command()(run)
app.command("list")(list_groups)
app.command()(describe)
app.command()(watch)
app.command("reset")(reset_command)
app.command()(migrate)
app.command()(delete_offsets)
app.command()(delete_group)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"spark-group {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it and end.")
    ] = False,
) -> None:
    """Kafka consumer groups in PySpark."""


PortOption = Annotated[int, typer.Option(min=1, max=65_535, help="The port for clients.")]
DataOption = Annotated[
    Path | None, typer.Option(file_okay=False, help="Keep the data here; by default it goes when the broker stops.")
]
TopicOption = Annotated[
    list[str] | None, typer.Option("--topic", metavar="NAME[:PARTITIONS]", help="Create this topic; repeatable.")
]


@broker_app.command("start")
def broker_start(
    port: PortOption = 9092,
    data_dir: DataOption = None,
    topic: TopicOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start a broker in the background and print its bootstrap servers."""
    from spark_group_source.local import background as local_broker

    topics = local_broker.parse_topics(topic or [])
    with console.status("starting Kafka ..."):
        state = local_broker.start(port=port, data_dir=data_dir)
        local_broker.create_topics(state.bootstrap_servers, topics)
    typer.echo(json.dumps(asdict(state), indent=2) if as_json else state.bootstrap_servers)


@broker_app.command("stop")
def broker_stop(as_json: JsonOption = False) -> None:
    """Stop the broker that ``broker start`` started; nothing else is touched."""
    from spark_group_source.local import background as local_broker

    state = local_broker.stop()
    if as_json:
        typer.echo(json.dumps(None if state is None else asdict(state), indent=2))
        return
    typer.echo("no broker is running" if state is None else f"stopped {state.bootstrap_servers}")


@broker_app.command("status")
def broker_status(as_json: JsonOption = False) -> None:
    """Show the broker that ``broker start`` started. Exit code 3 means there is none."""
    from spark_group_source.local import background as local_broker

    state = local_broker.running()
    if as_json:
        typer.echo(json.dumps(None if state is None else asdict(state), indent=2))
    elif state is None:
        typer.echo("no broker is running")
    if state is None:
        raise typer.Exit(3)
    if as_json:
        return
    row = (state.bootstrap_servers, str(state.pid), str(state.node), state.log_dir)
    console.print(table_of("bootstrap servers", "pid", "Kafka's pid", "logs", rows=[row]))


@broker_app.command("run")
def broker_run(
    port: PortOption = 9092,
    data_dir: DataOption = None,
    topic: TopicOption = None,
    record: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Run a broker in the foreground until Ctrl-C."""
    from spark_group_source.local import background as local_broker
    from spark_group_source.local.broker import Broker

    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s [%(threadName)s] %(name)s: %(message)s"
    )
    topics = local_broker.parse_topics(topic or [])
    stop = stop_on_signals()
    local_broker.check_free(port)
    with Broker(port=port, data_dir=data_dir) as broker:
        local_broker.create_topics(broker.bootstrap_servers, topics)
        recorded = local_broker.record(broker) if record else None  # locked until this function ends
        if recorded is None:
            typer.echo(broker.bootstrap_servers)
        while not stop.wait(WATCH_S) and broker.pids:
            pass
        if not stop.is_set():
            raise SourceError(f"the broker ended by itself; see {broker.log_dir}")


@app.command(hidden=True)
def jars() -> None:
    """Download the jars that the demo and most tests need, print where they are, and make later starts quick."""
    from spark_group_source.local.broker import prepare
    from spark_group_source.local.jars import delta_jars, kafka_jars

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    for name, found in (("Kafka", kafka_jars()), ("Delta Lake", delta_jars())):
        typer.echo(f"{name}: {len(found)} jars in {found[0].parent}")
    prepare()


# --- spark-group drain -----------------------------------------------------------------------------------------------


@app.command()
def drain(
    group: GroupOption,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=0, help="The longest wait.")] = run_files.DRAIN_S,
    checkpoint: CheckpointOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a group's queries finish their batch and begin no other: then they can be stopped.

    Those of this host; or with --checkpoint the one of that checkpoint, wherever its driver runs, if it writes with
    DeltaSink and has written a batch.
    """
    with console.status("waiting for the batch in hand ..."):
        if checkpoint is None:
            count = run_files.drain(group, timeout_s=timeout_s)
        else:
            from spark_group_source.delta import checkpoint_status

            with shared.checkpoint_files(checkpoint) as (files, root):
                count = checkpoint_status.drain(checkpoint_status.StatusFiles(files, root), group, timeout_s=timeout_s)
    if as_json:
        typer.echo(json.dumps({"group": group, "drained": count}))
    else:
        typer.echo(f"{count} {'query' if count == 1 else 'queries'} of group {group} drained; stop now")


# --- spark-group exporter --------------------------------------------------------------------------------------------


@app.command()
def exporter(
    bootstrap_servers: ServersOption,
    port: Annotated[int, typer.Option("--port", min=0, max=65_535, help="Where Prometheus asks; 0: any free one.")],
    group: Annotated[list[str] | None, typer.Option("--group", help="A consumer group; repeatable.")] = None,
    all_groups: Annotated[bool, typer.Option("--all-groups", help="Every group that may be described.")] = False,
    host: Annotated[str, typer.Option("--host", help="Listen at this address alone; else at all.")] = "",
    interval: Annotated[float, typer.Option("--interval", min=1, help="Seconds from sweep to sweep.")] = 15.0,
    isolation_level: Annotated[
        str, typer.Option("--isolation-level", help="Of the groups' consumers: read_committed or read_uncommitted.")
    ] = LEVELS[0],
    command_config: ConfigOption = None,
) -> None:
    """Tell Prometheus of groups: offsets, lag in records and in seconds, members, rebalances. It joins none of them."""
    from spark_group_source.kafka import check_settings
    from spark_group_source.metrics.groups import Exporter
    from spark_group_source.metrics.sweep import GroupSweeper

    if bool(group) == all_groups:
        raise OptionError("say which groups: --group, once for each, or --all-groups")
    if isolation_level not in LEVELS:
        raise OptionError(f"--isolation-level is {isolation_level!r}; write one of {', '.join(LEVELS)}")
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    options = options_of(bootstrap_servers, "-", command_config)
    check_settings(options)
    stop = stop_on_signals()
    names = None if all_groups else sorted(set(group or ()))
    sweeps = GroupSweeper(options.admin_settings(), names, isolation_level=isolation_level, bound_s=interval)
    serving = Exporter(sweeps, interval_s=interval, host=host, port=port)

    typer.echo(f"metrics of {'all groups' if names is None else ', '.join(names)} at port {serving.port}, /metrics")
    try:
        serving.run(stop)
    finally:
        serving.close()
