"""Many topics of one group, each into a Delta table of its own; a batch is read from Kafka once.

Runs in: the user's driver. Deliberately absent: security settings of the brokers (docs/security.md)::

    spark-submit --packages io.delta:delta-spark_4.2_2.13:4.4.0 \\
        --conf spark.sql.extensions=io.delta.sql.DeltaSparkSessionExtension \\
        --conf spark.sql.catalog.spark_catalog=org.apache.spark.sql.delta.catalog.DeltaCatalog \\
        jobs/topics_to_tables.py --bootstrap-servers kafka:9092 --group etl --pattern 'shop\\..*' \\
        --lake /lake/shop --checkpoint /lake/_chk/shop

A topic's table is the folder of its name below ``--lake``, created with its first record. A topic that appears later is
read when the client has refreshed its list of topics (``metadata.max.age.ms``). Without ``--interval`` the job reads
what is there and ends.
"""

import argparse

from pyspark.sql import SparkSession

from spark_group_source import DeltaSink, DeltaSinks


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("bootstrap-servers", "group", "pattern", "lake", "checkpoint"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument(
        "--tables-max", type=int, default=100, help="the most tables of one run; a batch with a further one is refused"
    )
    parser.add_argument("--interval", help='run continuously with this trigger, such as "5 seconds"')
    return parser.parse_args()


def main() -> None:
    given = arguments()

    def sink_of(topic: str) -> DeltaSink:
        return DeltaSink(f"{given.lake}/{topic}")

    sinks = DeltaSinks(sink_of, tables_max=given.tables_max)
    spark = SparkSession.builder.appName(f"{given.group} -> {given.lake}").getOrCreate()
    stream = (
        spark.readStream.format("kafka-group")
        .option("kafka.bootstrap.servers", given.bootstrap_servers)
        .option("kafka.group.id", given.group)
        .option("subscribePattern", given.pattern)
        .load()
    )
    write = stream.writeStream.foreachBatch(sinks).option("checkpointLocation", given.checkpoint)
    write = write.trigger(processingTime=given.interval) if given.interval else write.trigger(availableNow=True)
    write.start().awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
