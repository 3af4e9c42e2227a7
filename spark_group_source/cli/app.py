"""``spark-group``: the commands around the source.

Runs in: a terminal. Deliberately absent: anything a job needs; a job imports the package.

A command is a function that is registered with ``app.command()`` (or with a subcommand group such as ``broker_app``).
It raises ``SourceError`` for errors that the user can resolve: the message is printed on stderr, and the exit code
shows whether a retry can help (:data:`EXIT_CODES`). Heavy imports (Kafka, Spark) belong inside the functions, so
that ``--help`` answers at once.
"""

import json
import logging
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from spark_group_source import __version__, compatibility
from spark_group_source.cli import common
from spark_group_source.cli.common import (
    FINAL,
    RETRIABLE,
    USAGE,
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
from spark_group_source.cli.group import describe, list_groups, watch
from spark_group_source.cli.ledger import ledger_app, ledger_reader, letters_app
from spark_group_source.cli.migrate import migrate
from spark_group_source.cli.offsets import delete_group, delete_offsets
from spark_group_source.cli.reset import reset_command
from spark_group_source.cli.run import run
from spark_group_source.errors import OptionError, SourceError
from spark_group_source.host import run_files

SPARKS = ("pyspark.errors", "py4j")
"""Modules of Spark's own errors, such as a table or path that it cannot read."""
LEVELS = ("read_committed", "read_uncommitted")
WATCH_S = 1.0
"""Interval in which a broker in the foreground checks that its node still runs."""

EXIT_CODES = {
    0: "success",
    FINAL: "refused or failed; the same command fails again until something changes",
    USAGE: "wrong or contradictory options",
    3: "`broker status`: no broker is running; `ledger verify`: the table could not be compared",
    RETRIABLE: "timeout, or not possible now; the same command may succeed later",
}


class _Commands(TyperGroup):
    """Shows the message of an error instead of a traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        common.replace_unprintable()
        for word in args:
            try:
                word.encode()
            except UnicodeEncodeError:  # the client library crashes on such a name
                raise typer.BadParameter(f"argument {word!r} is not UTF-8", ctx) from None
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        """The commands in the order in which a new user needs them."""
        return sorted(super().list_commands(ctx), key=lambda name: name != "broker")

    def invoke(self, ctx: Any) -> Any:  # Any: as in the base class, whose context class typer does not export
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader of the output closed it
            raise
        except KeyboardInterrupt as exc:
            _print_notes(exc)
            raise
        except (SourceError, OSError) as exc:
            wrong_options = isinstance(exc, common.UsageError)
            name = OptionError.__name__ if wrong_options else type(exc).__name__
            typer.echo(f"error: {name}: {exc}", err=True)
            _print_notes(exc)
            retriable = RETRIABLE if getattr(exc, "retriable", False) else FINAL
            raise typer.Exit(USAGE if wrong_options else getattr(exc, "failure_code", retriable)) from exc
        except ModuleNotFoundError as exc:  # Spark is no dependency, and most commands do not need it
            if (trouble := compatibility.problem()) is None:
                raise
            typer.echo(f"error: SetupError: {trouble}", err=True)
            raise typer.Exit(getattr(exc, "failure_code", FINAL)) from exc
        except Exception as exc:
            if type(exc).__module__.startswith(SPARKS):
                typer.echo(f"error: Spark: {common.spark_error(exc)}", err=True)
            elif _is_of_deltalake(exc):
                typer.echo(f"error: deltalake: {next(iter(str(exc).splitlines()), type(exc).__name__)}", err=True)
            elif hasattr(exc, "failure_code"):  # of this package: the traceback is needed
                traceback.print_exception(exc)
            else:
                _print_notes(exc)
                raise
            _print_notes(exc)
            raise typer.Exit(getattr(exc, "failure_code", FINAL)) from exc


def _is_of_deltalake(exc: Exception) -> bool:
    """Whether it is an error of the package ``deltalake``, which most commands do not import."""
    errors = sys.modules.get("deltalake.exceptions")
    return errors is not None and isinstance(exc, errors.DeltaError)


def _print_notes(exc: BaseException) -> None:
    """Print what must be done after an interrupted change."""
    for note in getattr(exc, "__notes__", ()):
        typer.echo(note, err=True)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,  # older releases of typer show the values of variables, secrets among them
    epilog="Exit codes: " + "; ".join(f"{code}: {means}" for code, means in EXIT_CODES.items()) + ".",
)
broker_app = typer.Typer(no_args_is_help=True, help="A real local Kafka, for development.")
app.add_typer(broker_app, name="broker")
app.add_typer(ledger_app, name="ledger")
app.add_typer(letters_app, name="letters")
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
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Kafka consumer groups in PySpark."""


PortOption = Annotated[int, typer.Option(min=1, max=65_535, help="The port for clients.")]
DataOption = Annotated[
    Path | None,
    typer.Option(file_okay=False, help="Keep the data here; by default it is deleted when the broker stops."),
]
TopicOption = Annotated[
    list[str] | None, typer.Option("--topic", metavar="NAME[:PARTITIONS]", help="Create this topic; repeatable.")
]


@broker_app.command("start")
def broker_start(
    port: PortOption = 9092, data_dir: DataOption = None, topic: TopicOption = None, as_json: JsonOption = False
) -> None:
    """Start a broker in the background and print its bootstrap servers."""
    from spark_group_source.local import background as local_broker

    topics = local_broker.parse_topics(topic or [])
    with common.progress_console.status("starting Kafka ..."):
        state = local_broker.start(port=port, data_dir=data_dir)
        local_broker.create_topics(state.bootstrap_servers, topics)
    typer.echo(json.dumps(asdict(state), indent=2) if as_json else state.bootstrap_servers)


@broker_app.command("stop")
def broker_stop(as_json: JsonOption = False) -> None:
    """Stop the broker that ``broker start`` started, and no other process."""
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
    else:
        row = (state.bootstrap_servers, str(state.pid), str(state.node), state.log_dir)
        console.print(table_of("bootstrap servers", "pid", "Kafka's pid", "logs", rows=[row]))
    if state is None:
        raise typer.Exit(3)


@broker_app.command("run")
def broker_run(
    port: PortOption = 9092,
    data_dir: DataOption = None,
    topic: TopicOption = None,
    record: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Run a broker in the foreground until Ctrl-C."""
    from spark_group_source.local import background as local_broker
    from spark_group_source.local.broker import Broker, check_free

    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s [%(threadName)s] %(name)s: %(message)s"
    )
    topics = local_broker.parse_topics(topic or [])
    stop = stop_on_signals()
    check_free(port)
    with Broker(port=port, data_dir=data_dir) as broker:
        local_broker.create_topics(broker.bootstrap_servers, topics)
        recorded = local_broker.record(broker) if record else None  # locked until this function ends
        if recorded is None:
            typer.echo(broker.bootstrap_servers)
        while not stop.wait(WATCH_S) and broker.pids:
            pass
        if not stop.is_set():
            raise SourceError(f"the broker stopped unexpectedly; see its log in {broker.log_dir}")


# --- spark-group drain -----------------------------------------------------------------------------------------------


@app.command()
def drain(
    group: GroupOption,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=0, help="The longest wait.")] = run_files.DRAIN_S,
    checkpoint: CheckpointOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a group's queries finish their batch and start no other, so that they can be stopped.

    Without --checkpoint: the queries of this host. With --checkpoint: the query of that checkpoint on any host, if it
    uses DeltaSink and has written a batch.
    """
    waiting = common.progress_console.status("waiting for the batch in flight ...")
    if checkpoint is None:
        with waiting:
            count = run_files.drain(group, timeout_s=timeout_s)
            runs = run_files.read(group)
    else:
        from spark_group_source.delta import checkpoint_status

        # The checkpoint first: releases of rich before 14.1 show only one status at a time.
        with common.checkpoint_files(checkpoint) as (files, root), waiting:
            status = checkpoint_status.StatusFiles(files, root)
            count = checkpoint_status.drain(status, group, timeout_s=timeout_s)
            runs = [checkpoint_status.last_status(status, group)]
    drivers = sorted({doc["driver"] for doc in runs if doc["drained"]})
    if as_json:
        typer.echo(json.dumps({"group": group, "drained": count, "drivers": drivers}))
    else:
        where = f": the driver JVM is process {', '.join(map(str, drivers))}" if drivers else ""
        typer.echo(f"{count} {'query' if count == 1 else 'queries'} of group {group} drained; stop now{where}")


# --- spark-group exporter --------------------------------------------------------------------------------------------


@app.command()
def exporter(
    bootstrap_servers: ServersOption,
    port: Annotated[int, typer.Option("--port", min=0, max=65_535, help="Port to listen on; 0 selects a free one.")],
    group: Annotated[list[str] | None, typer.Option("--group", help="A consumer group; repeatable.")] = None,
    all_groups: Annotated[bool, typer.Option("--all-groups", help="Every group that the user may describe.")] = False,
    host: Annotated[str, typer.Option("--host", help="Listen on this address only; default: all.")] = "",
    interval: Annotated[float, typer.Option("--interval", min=1, help="Seconds between two sweeps.")] = 15.0,
    table: Annotated[
        list[str] | None,
        typer.Option("--table", help="A Delta table by local path; its ledgers are compared with Kafka. Repeatable."),
    ] = None,
    isolation_level: Annotated[
        str,
        typer.Option(
            "--isolation-level", help="Isolation level of the groups' consumers: read_committed or read_uncommitted."
        ),
    ] = LEVELS[0],
    command_config: ConfigOption = None,
) -> None:
    """Serve Prometheus metrics of groups: offsets, lag in records and seconds, members, rebalances. It joins no
    group."""
    from spark_group_source.kafka.environment import check_settings
    from spark_group_source.metrics.groups import Exporter, GroupSweeper

    if bool(group) == all_groups:
        raise common.UsageError("give either --group (repeatable) or --all-groups")
    if isolation_level not in LEVELS:
        raise common.UsageError(f"--isolation-level is {isolation_level!r}; it must be {' or '.join(LEVELS)}")
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    options = options_of(bootstrap_servers, "-", command_config)
    with common.settings_exit():
        check_settings(options)
    read_ledgers = ledger_reader(table or ())
    stop = stop_on_signals()
    names = None if all_groups else sorted(set(group or ()))
    sweeps = GroupSweeper(options.admin_settings(), names, isolation_level=isolation_level, bound_s=interval)
    serving = Exporter(sweeps, interval_s=interval, host=host, port=port, read_ledgers=read_ledgers)

    typer.echo(f"metrics of {'all groups' if names is None else ', '.join(names)} at port {serving.port}, /metrics")
    try:
        serving.run(stop)
    finally:
        serving.close()
