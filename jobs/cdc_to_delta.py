"""A topic of Debezium's changes into a Delta table that has the latest row of each key.

Runs in: the user's driver. Deliberately absent: security settings of the brokers (docs/security.md)::

    spark-submit --packages io.delta:delta-spark_4.2_2.13:4.4.0 \\
        --conf spark.sql.extensions=io.delta.sql.DeltaSparkSessionExtension \\
        --conf spark.sql.catalog.spark_catalog=org.apache.spark.sql.delta.catalog.DeltaCatalog \\
        jobs/cdc_to_delta.py --bootstrap-servers kafka:9092 --group etl --topic shop.public.customers --key id \\
        --schema "id BIGINT, name STRING" --sequence "try_cast(source.lsn AS BIGINT)" \\
        --table /lake/customers --checkpoint /lake/_chk/customers

Keys of deleted rows are kept in the table TABLE_deleted, so that a change that comes late does not bring them back, and
changes that cannot be merged are in TABLE_bad. For changes in Avro give ``--registry`` instead of ``--schema``, and add
the jar of ``spark-avro`` and the Java options of docs/decode.md; a user and a password of the registry are read from
``REGISTRY_USER`` (``NAME:PASSWORD``). Without ``--interval`` the job reads what is there and ends.
"""

import argparse
import os

from pyspark.sql import DataFrame, SparkSession

from spark_group_source import DeadLetters, DeltaSink, Merge, decode


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("bootstrap-servers", "group", "topic", "sequence", "table", "checkpoint"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--key", required=True, action="append", help="a column of the key; may be repeated")
    values = parser.add_mutually_exclusive_group(required=True)
    values.add_argument("--schema", help="the columns of a row in JSON, as in CREATE TABLE")
    values.add_argument("--registry", help="the URL of the schema registry for changes in Avro")
    parser.add_argument("--max-bad", type=float, default=0.1, help="the largest share of bad records")
    parser.add_argument("--interval", help='run continuously with this trigger, such as "5 seconds"')
    return parser.parse_args()


def main() -> None:
    given = arguments()
    table, user = given.table.rstrip("/"), os.environ.get("REGISTRY_USER")
    conf = {"url": given.registry} | ({"basic.auth.user.info": user} if user else {})
    registry = decode.Registry(conf) if given.registry else None

    def parse(df: DataFrame) -> DataFrame:
        if registry is not None:
            df = decode.avro(df, "value", registry, subject=f"{given.topic}-value")
        changes = decode.debezium(df, "value", given.schema, sequence=given.sequence)
        return changes.select("value.*", "op", "sequence", "topic", "partition", "offset", "error")

    merge = Merge(
        given.key,
        delete_when="op = 'd'",
        sequence_by="sequence",
        deleted=f"{table}_deleted",
        without=["op", "topic", "partition", "offset"],
    )
    letters = DeadLetters(f"{table}_bad", error="error", max_fraction=given.max_bad)
    sink = DeltaSink(table, transform=parse, merge=merge, merge_schema=True, dead_letters=letters)
    spark = SparkSession.builder.appName(f"{given.group} -> {table}").getOrCreate()
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
