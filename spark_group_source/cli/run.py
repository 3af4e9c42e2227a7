"""``spark-group run``: a consumer group into a Delta table, exactly once.

Runs in: the user's driver. Deliberately absent: Spark; what the arguments say is checked here, before it starts, and
``job`` does it.

``jobs/group_to_delta.py`` is the same as a script for ``spark-submit``, which gives it a master, memory and jars.
Without ``spark-submit`` the command brings Delta's jars itself and runs on this machine::

    spark-submit --packages io.delta:delta-spark_4.2_2.13:4.4.0 \\
        --conf spark.sql.extensions=io.delta.sql.DeltaSparkSessionExtension \\
        --conf spark.sql.catalog.spark_catalog=org.apache.spark.sql.delta.catalog.DeltaCatalog \\
        jobs/group_to_delta.py --bootstrap-servers kafka:9092 --group etl --topics orders \\
        --table /lake/orders --checkpoint /lake/_chk/orders --schema "order_id BIGINT, amount DOUBLE"

The rows have the fields of ``--schema``, then ``malformed`` (the value of a record that is not such a JSON object, else
null), then Kafka's columns. Without ``--schema`` they are the source's columns as they come. Only rows that the table
holds are committed to the group, so the job may be stopped or killed at any time and started again. A signal to the
Python process lets the batch in hand end first, so that another member of the group can go on without reading it again.
"""

import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from spark_group_source import fits
from spark_group_source.delta import names

INTERVAL: Final = re.compile(r"\d+ (millisecond|second|minute|hour)s?")
SECRET: Final = re.compile(r"password|passphrase|secret|jaas|token|\.pem$|\.key$", re.IGNORECASE)
"""Names of options whose values do not belong on a command line, where every user of the machine can read them."""


def run(
    bootstrap_servers: Annotated[
        str, typer.Option("--bootstrap-servers", "--bootstrap-server", help="Brokers to ask first: host:port,…")
    ],
    group: Annotated[str, typer.Option(help="Consumer group to join; its committed offsets are where the job starts.")],
    table: Annotated[str, typer.Option(help="Delta table: a path (it has a slash in it) or a table name.")],
    checkpoint: Annotated[str, typer.Option(help="Directory of the query's checkpoint; one for each query.")],
    topics: Annotated[str | None, typer.Option(help="Topics to read: name,…")] = None,
    pattern: Annotated[str | None, typer.Option(help="Topics to read: a regular expression.")] = None,
    trigger: Annotated[
        str, typer.Option(help='available-now or once: read what is there and end. "5 seconds": go on, this often.')
    ] = "available-now",
    schema: Annotated[
        str | None, typer.Option(help='Fields of the JSON values, as Spark DDL: "id BIGINT, amount DOUBLE".')
    ] = None,
    kafka_prefix: Annotated[str, typer.Option(help="With --schema: put before the names of Kafka's columns.")] = "",
    partition_by: Annotated[
        list[str] | None, typer.Option(help="Column to partition a new table by; may be repeated.")
    ] = None,
    merge_schema: Annotated[bool, typer.Option("--merge-schema", help="Add new columns to the table.")] = False,
    max_offsets_per_trigger: Annotated[
        int | None, typer.Option(min=1, help="At most this many records a batch.")
    ] = None,
    starting_offsets: Annotated[
        str | None, typer.Option(help="Where the group has no committed offset: earliest, latest or JSON.")
    ] = None,
    members: Annotated[int | None, typer.Option(min=1, help="How many members of the group the job is.")] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Any option of the source; may be repeated.")
    ] = None,
    option_file: Annotated[
        list[Path] | None,
        typer.Option(
            dir_okay=False,
            help="File of key=value lines with options of the source; ${NAME} is taken from the "
            "environment. The place for secrets. May be repeated.",
        ),
    ] = None,
    log_level: Annotated[
        str, typer.Option(envvar="SPARK_GROUP_LOG_LEVEL", help="Of this job and of the source.")
    ] = "INFO",
) -> None:
    """Read Kafka topics as a member of a consumer group into a Delta table, exactly once."""
    given: dict[str, object] = {
        "kafka.bootstrap.servers": bootstrap_servers,
        "kafka.group.id": group,
        "subscribe": topics,
        "subscribePattern": pattern,
        "maxOffsetsPerTrigger": max_offsets_per_trigger,
        "startingOffsets": starting_offsets,
        "groupMembers": members,
    }
    if (topics is None) == (pattern is None):
        raise typer.BadParameter("give one of --topics and --pattern")
    if kafka_prefix and schema is None:
        raise typer.BadParameter("--kafka-prefix is for the columns beside parsed fields: give --schema too")
    names.require_apart(names.canonical(table), checkpoint)
    source = given | _from_files(option_file or []) | _from_command_line(option or [])
    timing = _timing(trigger)
    _log_to_stderr(log_level)
    fits.check()
    from spark_group_source.cli import job

    job.run(
        job.Wanted(
            group=group,
            source={name: str(value) for name, value in source.items() if value is not None},
            table=table,
            checkpoint=checkpoint,
            timing=timing,
            schema=schema,
            kafka_prefix=kafka_prefix,
            partition_by=tuple(partition_by or ()),
            merge_schema=merge_schema,
        )
    )


def _timing(trigger: str) -> dict[str, Any]:
    if trigger == "available-now":
        return {"availableNow": True}
    if trigger == "once":
        return {"once": True}
    if INTERVAL.fullmatch(trigger):
        return {"processingTime": trigger}
    raise typer.BadParameter(f"--trigger {trigger!r}: give available-now, once, or an interval such as '5 seconds'")


# --- options that are passed on --------------------------------------------------------------------------------------


def _from_command_line(pairs: Iterable[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, has_value, value = pair.partition("=")
        if not has_value or not name:
            raise typer.BadParameter(f"--option {name!r}: write KEY=VALUE")
        if SECRET.search(name):
            raise typer.BadParameter(
                f"--option {name}: secrets on a command line can be read by others on this machine; put it into a file "
                "and name that with --option-file"
            )
        found[name] = value
    return found


def _from_files(paths: Iterable[Path]) -> dict[str, str]:
    """The ``key=value`` lines of all files; ``#`` starts a comment line. Values are never shown."""
    found: dict[str, str] = {}
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeError) as exc:
            raise typer.BadParameter(f"--option-file {path} cannot be read: {exc}") from None
        for number, line in enumerate(lines, start=1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            name, has_value, value = text.partition("=")
            if not has_value or not name.strip():
                raise typer.BadParameter(f"--option-file {path}, line {number}: write key=value")
            found[name.strip()] = _with_environment(value.strip(), f"--option-file {path}, line {number}")
    return found


def _with_environment(value: str, where: str) -> str:
    def look(match: re.Match[str]) -> str:
        name = match[1]
        if name not in os.environ:
            raise typer.BadParameter(f"{where}: the environment has no variable {name}")
        return os.environ[name]

    return re.sub(r"\$\{(\w+)\}", look, value)


def _log_to_stderr(level: str) -> None:
    os.environ["SPARK_GROUP_LOG_LEVEL"] = level.upper()  # the source's own processes inherit it
    try:
        logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    except ValueError:
        raise typer.BadParameter(f"--log-level {level!r}: give DEBUG, INFO, WARNING or ERROR") from None
    logging.getLogger("py4j").setLevel(logging.WARNING)
