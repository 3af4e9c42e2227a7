"""A query on a Spark Connect server of its own, until it is killed.

Runs in: a process of its own, ``python connected.py SERVERS GROUP TOPIC TABLE CHECKPOINT SCRATCH``.
"""

import sys

from pyspark.sql import SparkSession
from streams import options_of

from spark_group_source.delta.sink import DeltaSink
from spark_group_source.local.conf import local_spark_settings
from spark_group_source.source import KafkaGroupDataSource


def main(servers: str, group: str, topic: str, table: str, checkpoint: str, scratch: str) -> None:
    builder = SparkSession.builder.remote("local[2]")
    for key, value in local_spark_settings(scratch).items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.dataSource.register(KafkaGroupDataSource)
    options = options_of(servers, group, subscribe=topic, maxOffsetsPerTrigger=500)
    stream = spark.readStream.format("kafka-group").options(**options).load()
    sink = DeltaSink(table, checkpoint=checkpoint, transform=lambda df: df.drop("key", "headers"))
    query = stream.writeStream.foreachBatch(sink).option("checkpointLocation", checkpoint).start()
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
