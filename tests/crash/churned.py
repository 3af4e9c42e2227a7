"""The job that ``churn`` disturbs: a group into a Delta table, on executors of one core each.

Arguments, as one JSON object: servers, group, topic, home (a directory for table, checkpoint and scratch), executors,
channel, options. ``channel``: the port of a proxy through which tasks and agents reach the stream reader.
"""

import json
import os
import sys
from typing import Any

from pyspark.sql import SparkSession

from spark_group_source import DeltaSink, KafkaGroupDataSource
from spark_group_source.local.conf import local_spark_settings

LOOK_S = 2


def main(servers: str, group: str, topic: str, home: str, executors: str, channel: str = "", **options: str) -> None:
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
    spark = builder.config(map={**local_spark_settings(f"{home}/scratch"), **own}).getOrCreate()
    if channel:  # without it Spark finds the installed source, and Spark 4.0 refuses to register it again
        spark.dataSource.register(_through_proxy(int(channel)))
    stream = spark.readStream.format("kafka-group").option("kafka.bootstrap.servers", servers)
    stream = stream.option("kafka.group.id", group).option("subscribe", topic).options(**options)
    sink = DeltaSink(f"{home}/table", transform=lambda df: df.select("partition", "offset"))
    started = stream.load().writeStream.foreachBatch(sink).option("checkpointLocation", f"{home}/checkpoint")
    query, tests = started.start(), os.getppid()
    while not query.awaitTermination(LOOK_S) and os.getppid() == tests:
        pass  # the job ends with the test run


def _through_proxy(port: int) -> type[KafkaGroupDataSource]:
    class ProxiedSource(KafkaGroupDataSource):
        """The stream reader advertises the proxy's port."""

        def streamReader(self, schema: Any) -> Any:
            from spark_group_source.agents.control_server import ControlServer

            start = ControlServer.start

            def started(server: ControlServer) -> None:
                start(server)
                server.addresses = (("127.0.0.1", port),)

            ControlServer.start = started  # type: ignore[assignment,method-assign]
            return super().streamReader(schema)

    return ProxiedSource


if __name__ == "__main__":
    main(**json.load(sys.stdin))
