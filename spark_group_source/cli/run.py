"""``spark-group run``: a consumer group into a Delta table, exactly once.

Runs in: the user's driver. Deliberately absent: a master, memory and other settings of ``spark-submit``. The arguments
are checked before Spark is imported.

``jobs/group_to_delta.py`` is the same job as a script for ``spark-submit``, which sets master, memory and jars.
Without ``spark-submit`` the command downloads Delta's jars and runs on this machine::

    spark-submit --packages io.delta:delta-spark_4.2_2.13:4.4.0 \\
        --conf spark.sql.extensions=io.delta.sql.DeltaSparkSessionExtension \\
        --conf spark.sql.catalog.spark_catalog=org.apache.spark.sql.delta.catalog.DeltaCatalog \\
        jobs/group_to_delta.py --bootstrap-servers kafka:9092 --group etl --topics orders \\
        --table /lake/orders --checkpoint /lake/_chk/orders --schema "order_id BIGINT, amount DOUBLE"

The rows have the fields of ``--schema``, then ``malformed`` (the value of a record that is not such a JSON object, else
null), then Kafka's columns. Without ``--schema`` the rows have the source's columns. Only offsets of rows in the
table are committed, so the job may be stopped or killed at any time. On a signal the Python process finishes the batch
in flight first, so that another member of the group does not read it again.
"""

import contextlib
import functools
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from spark_group_source import compatibility, errors
from spark_group_source.cli import preview
from spark_group_source.cli.common import FINAL, RETRIABLE, console, interrupts_deferred, settings_in, spark_conf_folder
from spark_group_source.cli.preview import ROWS_MAX
from spark_group_source.delta import Writer, table_names
from spark_group_source.errors import GroupError
from spark_group_source.host import run_files
from spark_group_source.local.conf import DELTA_SETTINGS, conf_path, delta_settings, linked_spark_home
from spark_group_source.local.jars import cache_dir
from spark_group_source.options.client import is_secret
from spark_group_source.options.table import Options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter
    from pyspark.sql.types import StructType

    from spark_group_source.delta.sink import DeltaSink

log = logging.getLogger(__name__)

INTERVAL: Final = re.compile(r"\d+ (millisecond|second|minute|hour)s?")
SHOWN: Final = re.compile(r"\.(location|file|keytab|type|id|algorithm|deserializer)$", re.IGNORECASE)
"""Ends of names that are masked to be on the safe side, and have paths and kinds as values. Other masked options are
refused on the command line, which every user of the machine can read."""

ARGUMENTS: Final = {
    "kafka.bootstrap.servers": "--bootstrap-servers",
    "kafka.group.id": "--group",
    "subscribe": "--topics",
    "subscribePattern": "--pattern",
}
"""The options of the source that have an argument of their own."""

MALFORMED: Final = "malformed"
KAFKA_COLUMNS: Final = ("key", "topic", "partition", "offset", "timestamp", "headers")
"""Columns of the source that are kept beside the parsed fields; headers only with ``includeHeaders``."""

LOOK_S: Final = 1
"""Interval in which the query is checked: the longest reaction time to a signal."""
ASKED_TO_STOP: Final = threading.Event()
STOPPED: Final = "the query has stopped; all records that it read are in the table"
TWICE: Final = (
    "org.apache.spark.sql.execution.streaming.runtime.MicroBatchExecution",
    "org.apache.spark.sql.execution.streaming.MicroBatchExecution",  # Spark 4.0
)
"""Loggers of Spark that print the error with which the query ends. The job prints it, too."""
LOG_SETTINGS: Final = "log4j2.properties"
OFF: Final = logging.CRITICAL + 1

_MESSAGE: Final = re.compile(
    r"(?:spark_group_source\.errors|pyspark\.errors\.exceptions\.\w+)\.(\w+): (.+(?:\n(?: {2}| {4})\S.*)*)"
)
"""The class and the message of an error in a stack trace, with the indented lines of its commands."""


def run(
    bootstrap_servers: Annotated[
        str, typer.Option("--bootstrap-servers", "--bootstrap-server", help="Brokers to connect to first: host:port,…")
    ],
    group: Annotated[str, typer.Option(help="Consumer group to join; the job starts at its committed offsets.")],
    table: Annotated[str, typer.Option(help="Delta table: a path (it has a slash in it) or a table name.")],
    checkpoint: Annotated[str, typer.Option(help="Directory of the query's checkpoint; one for each query.")],
    topics: Annotated[str | None, typer.Option(help="Topics to read: name,…")] = None,
    pattern: Annotated[str | None, typer.Option(help="Topics to read: a regular expression.")] = None,
    trigger: Annotated[
        str,
        typer.Option(
            help='available-now or once: read all records and stop. "5 seconds": run continuously in this interval.'
        ),
    ] = "available-now",
    schema: Annotated[
        str | None, typer.Option(help='Fields of the JSON values, as Spark DDL: "id BIGINT, amount DOUBLE".')
    ] = None,
    kafka_prefix: Annotated[str, typer.Option(help="With --schema: prefix of the names of Kafka's columns.")] = "",
    partition_by: Annotated[list[str] | None, typer.Option(help="Partition column of a new table; repeatable.")] = None,
    merge_schema: Annotated[bool, typer.Option("--merge-schema", help="Add new columns to the table.")] = False,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="An option of the source, such as groupMembers=2; repeatable."),
    ] = None,
    option_file: Annotated[
        list[Path] | None,
        typer.Option(
            dir_okay=False,
            help="File of key=value lines with options of the source, such as secrets; ${NAME} is read from "
            "the environment. Repeatable.",
        ),
    ] = None,
    writer: Annotated[
        Writer, typer.Option(help="Who commits to the table; native: deltalake, options: Delta Lake.")
    ] = "auto",
    storage_options: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="File of key=value lines with deltalake's options for the table's storage, such as AWS_REGION; "
            "${NAME} is read from the environment. With it commits on S3 are native.",
        ),
    ] = None,
    optimize_every: Annotated[
        int, typer.Option(metavar="N", min=0, help="Combine the table's small files after every N commits; 0: never.")
    ] = 0,
    check: Annotated[
        bool, typer.Option("--check", help="Print what a run would read and write, or why it would fail.")
    ] = False,
    dry_run: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=ROWS_MAX, help="Print the first N rows, without joining the group or writing."
        ),
    ] = None,
    log_level: Annotated[
        str, typer.Option(envvar="SPARK_GROUP_LOG_LEVEL", help="Log level of this job and of the source.")
    ] = "INFO",
) -> None:
    """Read Kafka topics as a member of a consumer group into a Delta table, exactly once."""
    given = {
        "kafka.bootstrap.servers": bootstrap_servers,
        "kafka.group.id": group,
        "subscribe": topics,
        "subscribePattern": pattern,
    }
    if (topics is None) == (pattern is None):
        raise typer.BadParameter("give either --topics or --pattern")
    if kafka_prefix and schema is None:
        raise typer.BadParameter("--kafka-prefix renames the columns beside parsed fields: give --schema too")
    table_names.require_separate_folders(table_names.canonical(table), checkpoint)
    source = dict(given)
    for path in option_file or []:
        source |= _without_arguments(settings_in(path), given, f"--option-file {path}")
    source |= _without_arguments(_from_command_line(option or []), given, "--option")
    storage = None if storage_options is None else settings_in(storage_options)
    timing = _timing(trigger)
    _log_to_stderr(log_level)
    compatibility.check()
    from spark_group_source.delta.sink import DeltaSink

    code = 0
    spark = _session(f"{group} -> {table}")
    try:
        if writer != "native":  # which needs no Delta Lake
            _check_delta(spark)
        compatibility.check_session(spark)
        _print_errors_once(spark)
        _refuse_lost_name(spark, table_names.canonical(table))
        transform = None if schema is None else parsed(_ddl(spark, schema), prefix=kafka_prefix)
        columns = tuple(partition_by or ())
        sink = DeltaSink(
            table,
            transform=transform,
            partition_by=columns,
            merge_schema=merge_schema,
            writer=writer,
            storage_options=storage,
            optimize_every=optimize_every,
        )
        options = {name: value for name, value in source.items() if value is not None}
        if "trigger" not in map(str.lower, options) and "once" not in timing:  # Spark 4.0 and 4.1 do not pass it
            (options["trigger"],) = timing
        rows = _load(spark, options)
        if check or dry_run:
            code = _preview(rows, sink, options, checkpoint, check=check, rows_max=dry_run or 0)
        else:
            query = rows.writeStream.foreachBatch(sink).option("checkpointLocation", checkpoint)
            _stop_on_signals()
            _follow(query.queryName(group).trigger(**timing))
    except typer.BadParameter:  # wrong options, with the exit code for them
        raise
    except Exception as exc:
        if ASKED_TO_STOP.is_set():  # the JVM received the signal, too, and ends at once
            _log_signal(group)
            raise typer.Exit(0) from None
        log.debug("full traceback", exc_info=exc)
        log.error("%s%s", reason(exc), _stack_trace(exc))
        raise typer.Exit(exit_code_of(exc)) from None
    finally:
        _end(spark)
    if code:
        raise typer.Exit(code)


# --- the arguments ---------------------------------------------------------------------------------------------------


def _timing(trigger: str) -> dict[str, Any]:
    if trigger == "available-now":
        return {"availableNow": True}
    if trigger == "once":
        return {"once": True}
    if INTERVAL.fullmatch(trigger):
        return {"processingTime": trigger}
    raise typer.BadParameter(f"--trigger {trigger!r} must be available-now, once, or an interval such as '5 seconds'")


def _from_command_line(pairs: Iterable[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, has_value, value = pair.partition("=")
        if not has_value or not name:
            raise typer.BadParameter(f"--option {name!r} must be KEY=VALUE")
        if is_secret(name) and not SHOWN.search(name):
            raise typer.BadParameter(
                f"--option {name}: other users of this machine can read secrets on a command line; put it into a file "
                "and pass that with --option-file"
            )
        found[name] = value
    return found


def _without_arguments(more: Mapping[str, str], given: Mapping[str, str | None], where: str) -> dict[str, str]:
    """Return the options of ``where`` without those that repeat an argument. Refuse another value than the argument's:
    the job would read other topics, or commit for another group, than its command line says."""
    own = {name.lower(): (argument, given[name]) for name, argument in ARGUMENTS.items()}
    for name, value in more.items():
        argument, wanted = own.get(name.lower(), ("", value))
        if wanted != value:
            is_ = "not given" if wanted is None else repr(wanted)
            raise typer.BadParameter(f"{where}: {name} is {value!r}, but {argument} is {is_}; remove the option")
    return {name: value for name, value in more.items() if name.lower() not in own}


def _log_to_stderr(level: str) -> None:
    os.environ["SPARK_GROUP_LOG_LEVEL"] = level.upper()  # the source's own processes inherit it
    try:
        logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    except ValueError:
        raise typer.BadParameter(f"--log-level {level!r} must be DEBUG, INFO, WARNING or ERROR") from None
    logging.getLogger("py4j").setLevel(logging.WARNING)
    if not logging.getLogger().isEnabledFor(logging.DEBUG):
        logging.getLogger("py4j.clientserver").setLevel(OFF)  # an error of the sink, with which the query ends


# --- what the query is -----------------------------------------------------------------------------------------------


def parsed(fields: "StructType", *, prefix: str = "") -> "Callable[[DataFrame], DataFrame]":
    """A transform that parses JSON objects into columns; a value that is no JSON object is kept in ``malformed``.

    Raises:
        typer.BadParameter: a field has the same name as another column of the table.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.types import StringType, StructField, StructType

    kept = [prefix + name for name in KAFKA_COLUMNS] + [MALFORMED]
    taken = {name.lower() for name in kept}
    if clash := [field.name for field in fields if field.name.lower() in taken]:
        raise typer.BadParameter(
            f"--schema has the field {clash[0]!r}, which is also one of the table's other columns ({', '.join(kept)}). "
            "Rename Kafka's columns, for example with --kafka-prefix kafka_"
            if clash[0].lower() != MALFORMED
            else f"--schema has the field {clash[0]!r}; that column holds the values that could not be parsed"
        )
    corrupt = "__corrupt"
    wanted = StructType([*fields.fields, StructField(corrupt, StringType())])

    def transform(df: "DataFrame") -> "DataFrame":
        text = F.col("value").cast("string")
        json = F.from_json(text, wanted, {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": corrupt})
        # from_json alone parses the first of several values and drops the rest.
        values = F.coalesce(F.json_array_length(F.concat(F.lit("["), text, F.lit("]"))), F.lit(0))
        one = (values == 1) & ~F.ltrim(text).startswith("[")
        good = one & F.col("json").isNotNull() & F.col(f"json.{corrupt}").isNull()
        malformed = F.when(F.col("value").isNotNull() & ~good, F.col("value"))
        return df.withColumn("json", json).select(
            *(F.when(malformed.isNull(), F.col(f"json.`{field.name}`")).alias(field.name) for field in fields),
            malformed.alias(MALFORMED),
            *(F.col(name).alias(prefix + name) for name in KAFKA_COLUMNS if name in df.columns),
        )

    return transform


def _ddl(spark: "SparkSession", schema: str) -> "StructType":
    from pyspark.errors import PySparkException

    try:
        fields = spark.createDataFrame([], schema).schema
    except PySparkException as exc:
        raise typer.BadParameter(f"--schema {schema!r} is not Spark DDL: {reason(exc)}") from None
    if not fields:
        raise typer.BadParameter("--schema has no field; leave it out to keep the value unparsed")
    return fields


def _preview(
    source: "DataFrame", sink: "DeltaSink", given: Mapping[str, str], checkpoint: str, *, check: bool, rows_max: int
) -> int:
    """Print what a run would do and why it would fail, and return the exit code."""
    from spark_group_source.delta.checkpoint import spark_files

    spark = source.sparkSession
    plan = preview.plan(Options.parse(given), spark_files(spark), checkpoint.rstrip("/"))
    problems = plan.problems
    transform = sink.transform or (lambda df: df)
    if check:
        rows = transform(spark.createDataFrame([], source.schema))
        text, problems = preview.check(plan, sink, rows)
        console.print(text)
    if rows_max:
        preview.show_rows(spark, plan, transform, rows_max)
    for problem in problems[: preview.SHOWN_MAX]:
        log.error("%s", problem)
    return plan.exit_code(problems)


# --- running ---------------------------------------------------------------------------------------------------------


def _follow(writer: "DataStreamWriter") -> None:
    """Start the query and wait until it stops or a signal arrives."""
    query = writer.start()
    last = -1
    while not query.awaitTermination(LOOK_S):
        last = _tell(query, last)
        if ASKED_TO_STOP.is_set():
            _log_signal(str(query.name))
            is_drained = _drain(query)
            query.stop()
            if is_drained:
                log.info(STOPPED)
            return
    _tell(query, last)
    log.info(STOPPED)


@functools.cache  # one line, wherever the signal is noticed first
def _log_signal(group: str) -> None:
    log.info(
        "group %s: received a signal; finishing the batch in flight and committing its offsets, unless the signal ends "
        "the JVM, too; the next start continues at the table's position",
        group,
    )


def _drain(query: "StreamingQuery") -> bool:
    """Finish the batch in flight, and return whether it is finished. Otherwise the next owner of a partition could read
    its rows again."""
    from pyspark.sql import SparkSession

    jvm: Any = SparkSession.active()._jvm
    driver = jvm.java.lang.ProcessHandle.current().pid()
    if not any(doc["driver"] == driver for doc in run_files.read(str(query.name))):
        return False  # a signal to the process group has ended the stream reader, too
    try:
        run_files.drain(str(query.name), driver=driver)
    except GroupError as exc:
        log.warning("%s; the next start reads the records that are not in the table again", exc)
        return False
    return True


def _tell(query: "StreamingQuery", last: int) -> int:
    """Log the batches that finished after batch ``last``; returns the newest."""
    for progress in query.recentProgress:
        if progress.batchId > last and progress.numInputRows:
            last = progress.batchId
            log.info("batch %d: %d records in %.1f s", last, progress.numInputRows, progress.batchDuration / 1000)
    return last


def _session(name: str) -> "SparkSession":
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(name)
    if "PYSPARK_GATEWAY_PORT" not in os.environ and not compatibility.on_databricks():  # this process starts the JVM
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        settings = {
            "spark.ui.showConsoleProgress": "false",  # its bars are written between the lines of the log
            "spark.serializer.objectStreamReset": "1",  # less memory for rows that Spark keeps (docs/sink.md)
        } | delta_settings()
        _start_jvm(settings)
        builder = builder.config(map={**settings})
    return builder.getOrCreate()


def _print_errors_once(spark: "SparkSession") -> None:
    """Switch off the loggers of Spark that print the query's error, which the job prints."""
    jvm: Any = getattr(spark, "_jvm", None) if hasattr(spark, "_jsparkSession") else None
    if jvm is None or compatibility.on_databricks() or log.isEnabledFor(logging.DEBUG):
        return
    log4j = jvm.org.apache.logging.log4j
    for name in TWICE:
        log4j.core.config.Configurator.setLevel(name, log4j.Level.OFF)


def _load(spark: "SparkSession", options: Mapping[str, str]) -> "DataFrame":
    """Load the source, and register it first where Spark does not find it by itself, as with ``--py-files``."""
    reader = spark.readStream.format("kafka-group").options(**options)
    try:
        return reader.load()
    except Exception as exc:
        if "DATA_SOURCE_NOT_FOUND" not in str(exc):
            raise
        from spark_group_source.source import KafkaGroupDataSource

        spark.dataSource.register(KafkaGroupDataSource)
        return reader.load()


def _start_jvm(settings: Mapping[str, str]) -> None:
    """Start the JVM in a process group of its own. A signal to this process's group, as by ``timeout``, would end the
    JVM and the stream reader at once, before the batch in flight is finished. Its log has warnings only, unless it has
    settings of its own."""
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    if not os.environ.get("SPARK_HOME"):
        with contextlib.suppress(OSError):  # Python processes start slower then
            os.environ["SPARK_HOME"] = str(linked_spark_home(cache_dir()))
    conf = SparkConf().setAll(list(settings.items()))
    given = os.environ.get("SPARK_SUBMIT_OPTS")
    try:
        if not _has_log_settings():
            os.environ["SPARK_SUBMIT_OPTS"] = f'{given or ""} "-Dlog4j2.configurationFile={conf_path(LOG_SETTINGS)}"'
        with interrupts_deferred():
            gateway = launch_gateway(conf, {"process_group": 0})
    finally:
        if given is None:
            os.environ.pop("SPARK_SUBMIT_OPTS", None)
        else:
            os.environ["SPARK_SUBMIT_OPTS"] = given
    SparkContext._ensure_initialized(gateway=gateway, conf=conf)


def _has_log_settings() -> bool:
    """Whether the user has set how the JVM logs, as in the folder of Spark's settings."""
    options = (os.environ.get(name, "") for name in ("SPARK_SUBMIT_OPTS", "JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS"))
    folder = spark_conf_folder()
    return any("log4j" in each for each in options) or (folder is not None and any(folder.glob("log4j2.*")))


def _check_delta(spark: "SparkSession") -> None:
    if compatibility.on_databricks() or not compatibility.has_delta_release():
        return  # without a release, DeltaSink writes natively
    if "DeltaSparkSessionExtension" not in (spark.conf.get("spark.sql.extensions", "") or ""):
        raise typer.BadParameter(
            "this Spark session cannot write Delta tables. Give spark-submit --packages "
            f"{compatibility.delta_coordinate()} "
            + " ".join(f"--conf {key}={value}" for key, value in DELTA_SETTINGS.items())
        )


def _refuse_lost_name(spark: "SparkSession", table: str) -> None:
    """Refuse a table name that the next run would not find: Spark's own catalog in memory ends with the session."""
    if table_names.is_path(table) or spark.conf.get("spark.sql.catalogImplementation", "") != "in-memory":
        return
    first, has_catalog, _ = table.partition(".")
    catalog = first if has_catalog and spark.conf.get(f"spark.sql.catalog.{first}", "") else "spark_catalog"
    known = spark.conf.get(f"spark.sql.catalog.{catalog}", "")
    if catalog == "spark_catalog" and known in ("", DELTA_SETTINGS["spark.sql.catalog.spark_catalog"]):
        raise typer.BadParameter(
            f"--table {table} is a name, and this Spark session keeps its catalog in memory: the next run would not "
            "find the table. Give a path (it contains a slash), or a catalog that lasts "
            "(spark.sql.catalogImplementation=hive)"
        )


def _stop_on_signals() -> None:
    """Install handlers after the session exists: pyspark installs its own handler for SIGINT."""

    def stop(*_: object) -> None:
        ASKED_TO_STOP.set()
        # A signal to the process group ends the JVM, too: each call to it then logs a stack trace.
        logging.getLogger("py4j").setLevel(logging.CRITICAL)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)


def _end(spark: "SparkSession") -> None:
    if compatibility.on_databricks():
        return
    try:
        spark.stop()
    except Exception as exc:  # noqa: BLE001  # the JVM may be gone already
        log.debug("cannot stop the session: %r", exc)


def _stack_trace(exc: BaseException) -> str:
    """What else is printed of an error: the whole text of one with which the query ended, and which is not of this
    package, because the messages of Spark and of a user's transform do not show where it happened."""
    from pyspark.errors import StreamingQueryException

    if not isinstance(exc, StreamingQueryException) or f"{errors.__name__}." in str(exc):
        return ""
    return f"\n{exc}\n{getattr(exc, '_stackTrace', None) or ''}".rstrip()


def exit_code_of(exc: BaseException) -> int:
    """The exit code of the command, by the class of the error; Spark wraps it, so its text has the name."""
    found = _MESSAGE.findall(str(exc))
    kind = getattr(errors, found[-1][0], None) if found else type(exc)
    return RETRIABLE if getattr(kind, "retriable", False) else FINAL


def reason(exc: BaseException) -> str:
    """The message of an error with its commands; Spark wraps it in stack traces of several processes."""
    text = str(exc)
    if found := _MESSAGE.findall(text):
        return ": ".join(found[-1])
    if isinstance(exc, errors.SourceError):
        return f"{type(exc).__name__}: {text}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("An error occurred while calling"):  # py4j; Java's error follows
        return lines[1].lstrip(": ")
    return lines[0] if lines else repr(exc)
