"""The query of ``spark-group run``: a session, the columns of JSON values, and a query that is followed to its end.

Runs in: the user's driver. Deliberately absent: arguments and what may be wrong with them before Spark is there
(``run``); a master, memory and everything else that ``spark-submit`` is told.
"""

import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import typer
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from spark_group_source import fits
from spark_group_source.delta.sink import DeltaSink
from spark_group_source.errors import GroupError
from spark_group_source.host.runs import drain
from spark_group_source.local.jars import DELTA_COORDINATES, delta_jars

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

log = logging.getLogger(__name__)

MALFORMED: Final = "malformed"
KAFKA_COLUMNS: Final = ("key", "topic", "partition", "offset", "timestamp", "headers")
"""Those of the source that stay beside the parsed fields; headers only where they are asked for."""

LOOK_S: Final = 1
"""Pause between two looks at the query: the longest time until a signal is followed."""
ASKED_TO_STOP: Final = threading.Event()

DELTA_SETTINGS: Final = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the command line asks for. ``source``: the options of the source; ``timing``: Spark's arguments of a
    trigger."""

    group: str
    source: Mapping[str, str]
    table: str
    checkpoint: str
    timing: Mapping[str, Any]
    schema: str | None
    kafka_prefix: str
    partition_by: tuple[str, ...]
    merge_schema: bool


def run(wanted: Wanted) -> None:
    """Start the query and follow it to its end.

    Raises:
        typer.Exit: with 1 after an error, which is then in the log, in one line; with 0 if a signal asked for the end.
    """
    spark = _session(f"{wanted.group} -> {wanted.table}")
    try:
        _check_delta(spark)
        fits.check_session(spark)
        transform = None
        if wanted.schema is not None:
            transform = parsed(_ddl(spark, wanted.schema), prefix=wanted.kafka_prefix)
        sink = DeltaSink(
            wanted.table, transform=transform, partition_by=wanted.partition_by, merge_schema=wanted.merge_schema
        )
        rows = spark.readStream.format("kafka-group").options(**wanted.source).load()
        writer = rows.writeStream.foreachBatch(sink).option("checkpointLocation", wanted.checkpoint)
        _stop_on_signals()
        _follow(writer.queryName(wanted.group).trigger(**wanted.timing))
    except Exception as exc:
        if ASKED_TO_STOP.is_set():  # under spark-submit the JVM hears the signal too, and may be gone first
            log.info("stopped by a signal; the next start goes on where the table stands")
            raise typer.Exit(0) from None
        log.debug("the whole story", exc_info=exc)
        log.error("%s", reason(exc))
        raise typer.Exit(1) from None
    finally:
        _end(spark)


# --- what the query is -----------------------------------------------------------------------------------------------


def parsed(fields: StructType, *, prefix: str = "") -> Callable[[DataFrame], DataFrame]:
    """A transform that makes columns of JSON objects; a value that is none is kept as it is, in ``malformed``.

    Raises:
        typer.BadParameter: a field has the name of another column of the table.
    """
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

    def transform(df: DataFrame) -> DataFrame:
        text = F.col("value").cast("string")
        json = F.from_json(text, wanted, {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": corrupt})
        # from_json alone takes the first of several values and forgets the rest.
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


def _ddl(spark: SparkSession, schema: str) -> StructType:
    try:
        fields = spark.createDataFrame([], schema).schema
    except PySparkException as exc:
        raise typer.BadParameter(f"--schema {schema!r} is not Spark DDL: {reason(exc)}") from None
    if not fields:
        raise typer.BadParameter("--schema names no field; leave it out to keep the value as it is")
    return fields


# --- running ---------------------------------------------------------------------------------------------------------


def _follow(writer: "DataStreamWriter") -> None:
    """Start the query and follow it until it ends or a signal asks for its end."""
    query = writer.start()
    last = -1
    while not query.awaitTermination(LOOK_S):
        last = _tell(query, last)
        if ASKED_TO_STOP.is_set():
            log.info("a signal asks for the end: the batch in hand is finished, and its offsets go to Kafka")
            _drain(query)
            query.stop()
            return
    _tell(query, last)
    log.info("the query has ended: all that was there is in the table")


def _drain(query: "StreamingQuery") -> None:
    """Let the batch in hand end. Without it the next owner of a partition could read its rows again."""
    jvm: Any = SparkSession.active()._jvm
    try:
        drain(str(query.name), driver=jvm.java.lang.ProcessHandle.current().pid())
    except GroupError as exc:
        log.warning("%s; what of it is not in the table is read again by the next start", exc)


def _tell(query: "StreamingQuery", last: int) -> int:
    """Log the batches that ended since ``last``; returns the newest."""
    for progress in query.recentProgress:
        if progress.batchId > last and progress.numInputRows:
            last = progress.batchId
            log.info("batch %d: %d records in %.1f s", last, progress.numInputRows, progress.batchDuration / 1000)
    return last


def _session(name: str) -> SparkSession:
    builder = SparkSession.builder.appName(name)
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # not under spark-submit: this process starts the JVM
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        builder = builder.config("spark.jars", ",".join(map(str, delta_jars())))
        for key, value in DELTA_SETTINGS.items():
            builder = builder.config(key, value)
    return builder.getOrCreate()


def _check_delta(spark: SparkSession) -> None:
    if "DATABRICKS_RUNTIME_VERSION" in os.environ:
        return
    if "DeltaSparkSessionExtension" not in (spark.conf.get("spark.sql.extensions", "") or ""):
        raise typer.BadParameter(
            f"this Spark session cannot write Delta tables. Give spark-submit --packages {DELTA_COORDINATES[0]} "
            + " ".join(f"--conf {key}={value}" for key, value in DELTA_SETTINGS.items())
        )


def _stop_on_signals() -> None:
    """After the session is there: pyspark sets a handler of its own for SIGINT."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: ASKED_TO_STOP.set())


def _end(spark: SparkSession) -> None:
    try:
        spark.stop()
    except Exception as exc:  # noqa: BLE001  # the JVM may be gone; nothing is left to end then
        log.debug("the session could not be stopped: %r", exc)


def reason(exc: BaseException) -> str:
    """The one line of an error that says what to do; Spark wraps it into stack traces of several processes."""
    text = str(exc)
    found = re.findall(r"(?:spark_group_source\.errors|pyspark\.errors\.exceptions\.\w+)\.(\w+): (.+)", text)
    if found:
        return ": ".join(found[-1])
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else repr(exc)
