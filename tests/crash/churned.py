"""The job that ``churn`` disturbs: a group into a Delta table, on executors of one core each; tasks do as told.

Arguments, as one JSON object: servers, group, topic, home (a directory: table, checkpoint, scratch and what tasks are
told), executors, channel, actions, options. ``channel``: a port where tasks and agents reach the stream reader through
something between, instead of its own. ``actions`` of each batch, the first one is the sink. A file ``fail`` makes the
next task raise, and one ``slow`` makes it wait; each is for one first attempt of one task. Files in ``told`` say so,
and that a task runs again.
"""

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession

from spark_group_source import DeltaSink, KafkaGroupDataSource
from spark_group_source.local.conf import local_spark_settings

if TYPE_CHECKING:
    import pyarrow as pa

LOOK_S = 2
SLOW_S = 4.0
"""So much longer than a task needs that Spark starts another attempt of it."""
COLUMNS = "partition int, offset bigint"


def main(
    servers: str,
    group: str,
    topic: str,
    home: str,
    executors: str,
    channel: str = "",
    actions: str = "1",
    **options: str,
) -> None:
    own = {
        "spark.executor.memory": "512m",
        "spark.executorEnv.PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "spark.task.maxFailures": "8",
        "spark.stage.maxConsecutiveAttempts": "20",
        "spark.deploy.maxExecutorRetries": "-1",  # the executors are killed on purpose
        "spark.speculation": "true",
        "spark.speculation.quantile": "0.5",
    }
    builder = SparkSession.builder.master(f"local-cluster[{executors},1,1024]").appName("churned")
    for key, value in {**local_spark_settings(f"{home}/scratch"), **own}.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    source = _behind(int(channel)) if channel else KafkaGroupDataSource
    spark.dataSource.register(source)
    stream = spark.readStream.format(source.name()).option("kafka.bootstrap.servers", servers)
    stream = stream.option("kafka.group.id", group).option("subscribe", topic).options(**options)
    query = (
        stream.load()
        .writeStream.foreachBatch(_batch(home, int(actions)))
        .option("checkpointLocation", f"{home}/checkpoint")
        .start()
    )
    tests = os.getppid()
    while not query.awaitTermination(LOOK_S) and os.getppid() == tests:
        pass  # a killed test run takes its jobs with it


def _batch(home: str, actions: int) -> Callable[[DataFrame, int], None]:
    if actions == 1:
        return DeltaSink(f"{home}/table", transform=lambda df: df.select("partition", "offset"))
    told = _told(home)
    sink = DeltaSink(f"{home}/table", transform=told)

    def run(frame: DataFrame, number: int) -> None:
        sink(frame, number)
        for _ in range(actions - 1):
            told(frame).count()

    return run


def _told(home: str) -> Callable[[DataFrame], DataFrame]:
    def obey(batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        context = TaskContext.get()
        first = context is not None and context.attemptNumber() == 0
        if not first:
            (Path(home) / "told" / f"again-{os.urandom(8).hex()}").touch()
        for batch in batches:
            yield batch
            if first:
                if _mine(home, "slow"):
                    threading.Event().wait(SLOW_S)
                if _mine(home, "fail"):
                    raise RuntimeError("told to fail")

    return lambda df: df.select("partition", "offset").mapInArrow(obey, COLUMNS)


def _mine(home: str, order: str) -> bool:
    """Whether this task is the one that takes the order."""
    with contextlib.suppress(OSError):
        (Path(home) / order).rename(Path(home) / "told" / f"{order}-{os.urandom(8).hex()}")
        return True
    return False


def _behind(port: int) -> type[KafkaGroupDataSource]:
    class Behind(KafkaGroupDataSource):
        """The stream reader tells executors another port than its own."""

        def streamReader(self, schema: Any) -> Any:
            from spark_group_source.driver.reception import Reception

            start = Reception.start

            def started(reception: Reception) -> None:
                start(reception)
                reception.addresses = (("127.0.0.1", port),)

            Reception.start = started  # type: ignore[assignment,method-assign]
            return super().streamReader(schema)

    return Behind


if __name__ == "__main__":
    main(**json.load(sys.stdin))
