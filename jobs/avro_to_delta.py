"""A topic in Avro into a Delta table with the columns of its schemas; records that are not good go to another table.

Runs in: the user's driver. Deliberately absent: security settings of the brokers (docs/security.md)::

    spark-submit --packages io.delta:delta-spark_4.2_2.13:4.4.0,org.apache.spark:spark-avro_2.13:4.2.0 \\
        --conf spark.sql.extensions=io.delta.sql.DeltaSparkSessionExtension \\
        --conf spark.sql.catalog.spark_catalog=org.apache.spark.sql.delta.catalog.DeltaCatalog \\
        jobs/avro_to_delta.py --bootstrap-servers kafka:9092 --group etl --topic orders \\
        --registry https://registry:8081 --table /lake/orders --bad /lake/orders_bad --checkpoint /lake/_chk/orders

A user and a password of the registry are read from ``REGISTRY_USER`` (``NAME:PASSWORD``). New fields of the subject's
latest schema become columns. docs/decode.md has Java options that bound what a broken record allocates.
Without ``--interval`` the job reads what is there and ends. With ``--replay`` it writes the bad records that are good
now, and ends.
"""

import argparse
import os

from pyspark.sql import DataFrame, SparkSession

from spark_group_source import DeadLetters, DeltaSink, decode


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("bootstrap-servers", "group", "topic", "registry", "table", "bad", "checkpoint"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--subject", help="default: TOPIC-value")
    parser.add_argument("--rule", default="true", help="what a good row fulfils, in SQL")
    parser.add_argument("--max-bad", type=float, default=0.1, help="the largest share of bad records")
    parser.add_argument("--replay", action="store_true", help="write the bad records that are good now")
    parser.add_argument("--interval", help='run continuously with this trigger, such as "5 seconds"')
    return parser.parse_args()


def main() -> None:
    given = arguments()
    user = os.environ.get("REGISTRY_USER")
    registry = decode.Registry({"url": given.registry} | ({"basic.auth.user.info": user} if user else {}))
    subject = given.subject or f"{given.topic}-value"

    def parse(df: DataFrame) -> DataFrame:
        rows = decode.avro(df, "value", registry, subject=subject)
        return rows.select("value.*", "topic", "partition", "offset", "timestamp", "error")

    letters = DeadLetters(given.bad, valid=given.rule, error="error", max_fraction=given.max_bad)
    sink = DeltaSink(given.table, transform=parse, merge_schema=True, dead_letters=letters)
    spark = SparkSession.builder.appName(f"{given.group} -> {given.table}").getOrCreate()
    if given.replay:
        print(f"{sink.replay(spark)} records were written")
        spark.stop()
        return
    stream = (
        spark.readStream.format("kafka-group")
        .option("kafka.bootstrap.servers", given.bootstrap_servers)
        .option("kafka.group.id", given.group)
        .option("subscribe", given.topic)
        .load()
    )
    write = stream.writeStream.foreachBatch(sink).option("checkpointLocation", given.checkpoint)
    write = write.trigger(processingTime=given.interval) if given.interval else write.trigger(availableNow=True)
    write.start().awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
