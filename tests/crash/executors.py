"""The job of the tests that kill executors: a group into a Delta table, on two executors of one core each.

Its tasks say which partition they read, where, and wait as long as there is a file ``hold``. Arguments, as one JSON
object: servers, group, topic, home (a directory: table, checkpoint, scratch and what the tasks say), options.
"""

import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame, SparkSession

from spark_group_source import DeltaSink, KafkaGroupDataSource
from spark_group_source.local.conf import local_spark_settings

if TYPE_CHECKING:
    import pyarrow as pa

LOOK_S = 2
HOLD_S_MAX = 120
HOLD_LOOK_S = 0.05


def main(
    servers: str,
    group: str,
    topic: str,
    home: str,
    master: str = "",
    py_files: str = "",
    python: str = "",
    **options: str,
) -> None:
    """``master``: of a cluster whose executors know of the package by ``py_files`` alone, and run ``python``."""
    builder = SparkSession.builder.master(master or "local-cluster[2,1,1024]").appName("executors")
    paths = os.pathsep.join(path for path in sys.path if path)
    own = {"spark.executor.memory": "512m", "spark.task.maxFailures": "4"}
    if master:
        own |= {"spark.submit.pyFiles": py_files, "spark.pyspark.python": python, "spark.driver.host": "127.0.0.1"}
    else:
        own["spark.executorEnv.PYTHONPATH"] = paths
    for key, value in {**local_spark_settings(f"{home}/scratch"), **own}.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.dataSource.register(KafkaGroupDataSource)
    stream = spark.readStream.format("kafka-group").option("kafka.bootstrap.servers", servers)
    stream = stream.option("kafka.group.id", group).option("subscribe", topic).options(**options)
    query = (
        stream.load()
        .writeStream.foreachBatch(DeltaSink(f"{home}/table", transform=_slow(home)))
        .option("checkpointLocation", f"{home}/checkpoint")
        .start()
    )
    tests = os.getppid()
    while not query.awaitTermination(LOOK_S) and os.getppid() == tests:
        pass  # a killed test run takes its jobs with it


def _slow(home: str) -> Callable[[DataFrame], DataFrame]:
    def tell_and_wait(batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        for batch in batches:
            executor = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
            for partition in set(batch.column("partition").to_pylist()):
                said = Path(home) / "said" / uuid.uuid4().hex
                said.with_suffix(".part").write_text(json.dumps({"partition": partition, "executor": executor}))
                said.with_suffix(".part").rename(said)
            end_s = time.monotonic() + HOLD_S_MAX
            while (Path(home) / "hold").exists() and time.monotonic() < end_s:
                threading.Event().wait(HOLD_LOOK_S)
            yield batch

    return lambda df: df.select("partition", "offset").mapInArrow(tell_and_wait, "partition int, offset bigint")


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
