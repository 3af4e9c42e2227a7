"""Three stateful queries of one application that is killed: windows with a watermark, ``dropDuplicates``, and a join
of two groups.

Arguments, as one JSON object on its standard input: servers, group, topic, other (the topic that is joined), home,
options. Each batch is a folder of Parquet files, written again if the batch runs again. While there is a file ``hold``,
a query creates ``held-NAME`` after its write and waits, so that it can be killed before Spark writes ``commits/N``.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark_group_source.local.conf import local_spark_settings

LATE = "10 seconds"
LOOK_S = 1
HOLD_S_MAX = 300
HOLD_LOOK_S = 0.05


def main(servers: str, group: str, topic: str, other: str, home: str, **options: str) -> None:
    builder = SparkSession.builder.master("local[2]").appName("stateful")
    spark = builder.config(map={**local_spark_settings(f"{home}/scratch")}).getOrCreate()

    def events(name: str, group_id: str) -> DataFrame:
        stream = spark.readStream.format("kafka-group").option("kafka.bootstrap.servers", servers)
        stream = stream.option("kafka.group.id", group_id).option("subscribe", name).options(**options)
        return stream.load().selectExpr("CAST(value AS STRING) AS id", "timestamp").withWatermark("timestamp", LATE)

    windows = events(topic, f"{group}-windows").groupBy(F.window("timestamp", LATE)).count()
    left = events(topic, f"{group}-left").select("id", F.col("timestamp").alias("at"))
    right = events(other, f"{group}-right").select(F.col("id").alias("of"), F.col("timestamp").alias("of_at"))
    near = F.expr(f"id = of AND of_at >= at - INTERVAL {LATE} AND of_at <= at + INTERVAL {LATE}")
    frames = {
        "windows": windows.selectExpr("CAST(unix_seconds(window.start) AS STRING) AS id", "count"),
        "distinct": events(topic, f"{group}-distinct").dropDuplicates(["id"]).selectExpr("id", "1L AS count"),
        "joined": left.join(right, near).selectExpr("id", "1L AS count"),
    }
    queries = [
        frame.writeStream.outputMode("append")
        .foreachBatch(_sink(Path(home), name))
        .option("checkpointLocation", f"{home}/checkpoint-{name}")
        .start()
        for name, frame in frames.items()
    ]
    tests = os.getppid()
    while all(query.isActive for query in queries) and os.getppid() == tests:  # the job ends with the test run
        queries[0].awaitTermination(LOOK_S)
    for query in queries:
        if query.exception():
            print(query.exception(), flush=True)  # noqa: T201


def _sink(home: Path, name: str) -> Callable[[DataFrame, int], None]:
    def write(frame: DataFrame, number: int) -> None:
        frame.write.mode("overwrite").parquet(f"{home}/{name}/{number}")
        with (home / f"{name}.written").open("a") as log:
            log.write(f"{number}\n")
        end_s = time.monotonic() + HOLD_S_MAX
        while (home / "hold").exists() and time.monotonic() < end_s:
            (home / f"held-{name}").touch()
            threading.Event().wait(HOLD_LOOK_S)

    return write


if __name__ == "__main__":
    main(**json.load(sys.stdin))
