"""The job that the crash tests kill: a group into a Delta table, until it is stopped.

Arguments, as one JSON object: servers, group, topic, table, checkpoint, scratch, options. ``connect``: the master of a
Spark Connect server that the job starts. ``writer``, ``storage_options``: of the sink. ``again``: whether a failed
query is started again. ``spark``: more settings of the session, and jars besides Delta's. ``pause``: where the first
batch of the run stays until the job is killed; then there is a file ``paused`` in ``scratch``. A ``table`` with
``{topic}`` in it is one for each topic, or with ``by`` one for each of ROUTES: the batch stays before the last of them,
if there is a file ``hold`` in ``scratch``. ``registry``: the URL of the schema
registry of the records' values. ``bad``: the table of records that cannot be decoded. ``merged``: whether records are
changes of KEYS keys.
"""

import json
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from spark_group_source import DeadLetters, DeltaSink, DeltaSinks, Merge, decode
from spark_group_source.delta import Writer
from spark_group_source.local.conf import local_spark_settings

LOOK_S = 2
PAUSE_S_MAX = 600
KEYS = 40
"""Record ``n`` changes the key ``n % KEYS``, a multiple of the number of partitions."""
ROUTES = ("0", "1", "2")
BY = f"CAST(CAST(value AS STRING) AS LONG) % {len(ROUTES)}"
"""The route of a record."""
DELETES = "n % 7 = 3"
"""Which changes delete."""
Point = Literal["offset", "rows", "commit"]
"""Points of a batch: after Spark wrote ``offsets/N``, after the sink wrote rows, after Spark wrote ``commits/N``."""


def main(
    servers: str,
    group: str,
    topic: str,
    table: str,
    checkpoint: str,
    scratch: str,
    connect: str = "",
    writer: Writer = "auto",
    again: str = "",
    pause: Point | None = None,
    spark: Mapping[str, str] | None = None,
    storage_options: Mapping[str, str] | None = None,
    registry: str = "",
    bad: str = "",
    merged: str = "",
    by: str = "",
    on_demand: str = "",
    **options: str,
) -> None:
    if connect:
        os.environ["SPARK_TESTING"] = "1"  # a free port instead of the default one
        builder = SparkSession.builder.remote(connect)
    else:
        builder = SparkSession.builder.master("local[2]").appName("crash")
    patient = {"spark.python.authenticate.socketTimeout": "120s"}  # Spark's limit for the start of its processes
    settings, given = local_spark_settings(scratch, avro=bool(registry)) | patient, dict(spark or {})
    if "spark.jars" in given:
        given["spark.jars"] = ",".join(filter(None, (settings.get("spark.jars"), given["spark.jars"])))
    session = builder.config(map={**settings, **given}).getOrCreate()
    stream = session.readStream.format("kafka-group").option("kafka.bootstrap.servers", servers)
    stream = stream.option("kafka.group.id", group).option("subscribe", topic).options(**options)
    where = checkpoint if connect else None
    sink: DeltaSink | DeltaSinks
    paused, hold = Path(scratch) / "paused", Path(scratch) / "hold"
    transform = _decoder(registry, topic) if registry else _changes if merged else _rows

    def rows_of_last_topic(df: DataFrame) -> DataFrame:
        if hold.exists():
            _wait_to_be_killed(paused)
        return transform(df)

    def sink_of(name: str) -> DeltaSink:
        is_last = "{topic}" in table and (ROUTES[-1] == name if by else topic.endswith(name))
        return DeltaSink(
            table.format(topic=name),
            transform=rows_of_last_topic if is_last else transform,
            merge_schema=bool(registry),
            writer=writer,
            checkpoint=where,
            storage_options=storage_options,
            merge=Merge(["id"], delete_when=DELETES, without=["topic", "partition", "offset"]) if merged else None,
            dead_letters=DeadLetters(bad, error="error", max_fraction=1.0) if bad else None,
        )

    if by and on_demand:
        others = sink_of(ROUTES[-1])  # the table that is written last
        sink = DeltaSinks(
            lambda key: None if key == ROUTES[-1] else sink_of(key), by=by, others=others, checkpoint=where
        )
    elif by:
        sink = DeltaSinks({route: sink_of(route) for route in ROUTES}, by=by, checkpoint=where)
    else:
        sink = DeltaSinks(sink_of, checkpoint=where) if "{topic}" in table else sink_of(topic)
    write = sink if pause is None else _paused(sink, pause, paused)
    started = stream.load().writeStream.foreachBatch(write).option("checkpointLocation", checkpoint)
    tests, running = os.getppid(), True
    while running:
        try:
            query = started.start()
            while not query.awaitTermination(LOOK_S) and os.getppid() == tests:
                pass  # the job ends with the test run
            running = False
        except PySparkException as exc:  # Spark Connect raises others than StreamingQueryException, too
            is_unwritten = "STATE_STORE_CHECKPOINT_LOCATION_NOT_EMPTY" in str(exc)  # killed in its first offset
            is_slow = "Python worker failed to connect back" in str(exc)  # docs/errors.md
            if not (again or is_unwritten or is_slow):
                raise
            traceback.print_exc()
            if is_unwritten:  # docs/recovery.md
                shutil.rmtree(checkpoint)
            running = os.getppid() == tests


def _paused(sink: Callable[[DataFrame, int], None], point: str, file: Path) -> Callable[[DataFrame, int], None]:
    def write(df: DataFrame, batch_id: int) -> None:
        if point == "rows":
            sink(df, batch_id)
        _wait_to_be_killed(file)

    return write


def _wait_to_be_killed(file: Path) -> None:
    file.touch()
    threading.Event().wait(PAUSE_S_MAX)


def _rows(df: DataFrame) -> DataFrame:
    return df.selectExpr("CAST(value AS STRING) AS id", "topic", "partition", "offset")


def _changes(df: DataFrame) -> DataFrame:
    numbers = df.selectExpr("CAST(CAST(value AS STRING) AS LONG) AS n", "topic", "partition", "offset")
    return numbers.selectExpr(f"n % {KEYS} AS id", "*")


def _decoder(url: str, topic: str) -> Callable[[DataFrame], DataFrame]:
    registry = decode.Registry(url)

    def rows(df: DataFrame) -> DataFrame:
        found = decode.avro(df, "value", registry, subject=f"{topic}-value")
        return found.select("value.*", "topic", "partition", "offset", "error")

    return rows


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
