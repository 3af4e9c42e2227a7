"""What the commands share: their options, the admin client, a small Spark session.

Runs in: a terminal. Deliberately absent: any one command.
"""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import unquote, urlsplit

import typer
from rich.console import Console

from spark_group_source.errors import OptionError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_group_source.delta.board import Place
    from spark_group_source.kafka import GroupAdmin
    from spark_group_source.options.table import Options

console = Console()

GroupOption = Annotated[str, typer.Option("--group", help="The consumer group.")]
ServersOption = Annotated[str, typer.Option("--bootstrap-servers", "--bootstrap-server", help="host:port, …")]
TableOption = Annotated[str | None, typer.Option("--table", help="A Delta table, by path or name: its ledger too.")]
CheckpointOption = Annotated[
    str | None,
    typer.Option("--checkpoint", metavar="DIR", help="The query's checkpointLocation, where it runs elsewhere."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="For programs.")]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--command-config", exists=True, dir_okay=False, help="Client settings (security), one name=value a line."
    ),
]


def admin_of(servers: str, group: str, config: Path | None) -> "GroupAdmin":
    """An admin client with the settings of ``--command-config``.

    Args:
        group: whose offsets are asked for; "-" where none is meant.
    """
    from spark_group_source.kafka import GroupAdmin

    return GroupAdmin(options_of(servers, group, config).admin_settings(), retries=0)


def options_of(servers: str, group: str, config: Path | None) -> "Options":
    """The client settings of ``--command-config``, checked and translated as those of a query are."""
    from spark_group_source.options.table import Options

    lines = [] if config is None else config.read_text(encoding="utf-8").splitlines()
    pairs = [line.split("=", 1) for line in map(str.strip, lines) if line and not line.startswith("#")]
    wrong = [pair[0] for pair in pairs if len(pair) != 2]
    if wrong:
        raise OptionError(f"{config}: {wrong[0]!r} has no value; write name=value")
    given = {f"kafka.{name.strip()}": value.strip() for name, value in pairs}
    return Options.parse({**given, "kafka.bootstrap.servers": servers, "kafka.group.id": group, "subscribe": "-"})


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


def local_path(place: str) -> Path | None:
    """The path of a checkpoint on this machine; None: it is in another file system, which Spark can read."""
    parts = urlsplit(place)
    if parts.scheme in ("", "file") and not parts.netloc:
        return Path(unquote(parts.path) if parts.scheme else place)
    return None


@contextmanager
def notices(root: str) -> "Iterator[Place]":
    """Where the runs of a checkpoint say what they do."""
    from spark_group_source.delta import board

    path = local_path(root)
    with session(path is None) as spark:
        yield board.place_of(spark, root) if spark is not None else board.on_this_machine(Path(path or root))
