"""The job that the crash tests kill: a group into a Delta table, until it is stopped.

Arguments, as one JSON object: servers, group, topic, table, checkpoint, scratch, options.
"""

import json
import os
import sys

from pyspark.sql import DataFrame, SparkSession

from spark_group_source import DeltaSink, KafkaGroupDataSource
from spark_group_source.local.conf import local_spark_settings

LOOK_S = 2


def main(servers: str, group: str, topic: str, table: str, checkpoint: str, scratch: str, **options: str) -> None:
    builder = SparkSession.builder.master("local[2]").appName("crash")
    for key, value in local_spark_settings(scratch).items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.dataSource.register(KafkaGroupDataSource)
    stream = spark.readStream.format("kafka-group").option("kafka.bootstrap.servers", servers)
    stream = stream.option("kafka.group.id", group).option("subscribe", topic).options(**options)
    query = (
        stream.load()
        .writeStream.foreachBatch(DeltaSink(table, transform=_rows))
        .option("checkpointLocation", checkpoint)
        .start()
    )
    tests = os.getppid()
    while not query.awaitTermination(LOOK_S) and os.getppid() == tests:
        pass  # a killed test run takes its jobs with it


def _rows(df: DataFrame) -> DataFrame:
    return df.selectExpr("CAST(value AS STRING) AS id", "topic", "partition", "offset")


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
