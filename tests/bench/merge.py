"""Time a query that merges changes by key into a Delta table: DeltaSink with Merge, and a MERGE in foreachBatch on
Spark's own connector, as users write it.

``python -m tests.bench merge [--records N] [--keys N] [--rounds N]``

One broker, one Spark, ``records`` changes of ``keys`` keys in one topic, each seventh a deletion, read with
AvailableNow in BATCHES batches. The two ways take turns. Only DeltaSink is exactly once after a lost checkpoint. Prints
the seconds of a batch without the first one, and the ratio.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from confluent_kafka import Producer
from deltalake import DeltaTable
from pyspark.sql import functions as F

from bench.report import OURS, QUERY_S, done, machine, run_to_end, session
from spark_group_source import DeltaSink, Merge
from spark_group_source.local.background import create_topics
from spark_group_source.local.broker import Broker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TOPIC = "changes"
BATCHES = 4
PARTITIONS = 4
BY_HAND, SINK = "MERGE by hand", "DeltaSink"
WAYS = (BY_HAND, SINK)


def fill(servers: str, records: int, keys: int) -> None:
    """Write the changes. Those of one key are in one partition, as ``keys`` is a multiple of the partitions."""
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 50, "queue.buffering.max.messages": 200_000})
    for number in range(records):
        producer.produce(TOPIC, b"%d" % number, partition=number % keys % PARTITIONS)
        producer.poll(0)
    if producer.flush(QUERY_S):
        raise TimeoutError(f"the records were not written within {QUERY_S} s")


def changes(df: "DataFrame", keys: int) -> "DataFrame":
    number = F.col("value").cast("string").cast("long")
    rows = df.select("topic", "partition", "offset", number.alias("n"))
    return rows.select(
        *("topic", "partition", "offset", "n"),
        (F.col("n") % keys).alias("id"),
        F.repeat(F.lit("x"), F.lit(80)).alias("text"),
        (F.col("n") % 7 == 3).alias("is_deleted"),
    )


def by_hand(df: "DataFrame", table: Path, keys: int) -> None:
    spark = df.sparkSession
    row = F.struct("id", "n", "text", "is_deleted")
    newest = changes(df, keys).groupBy("id").agg(F.max_by(row, "offset").alias("c")).select("c.*")
    newest.createOrReplaceTempView("newest")
    spark.sql(f"CREATE TABLE IF NOT EXISTS delta.`{table}` (n LONG, id LONG, text STRING) USING delta")
    spark.sql(
        f"MERGE INTO delta.`{table}` t USING newest s ON t.id = s.id WHEN MATCHED AND s.is_deleted THEN DELETE "
        "WHEN MATCHED THEN UPDATE SET t.n = s.n, t.text = s.text "
        "WHEN NOT MATCHED AND NOT s.is_deleted THEN INSERT (id, n, text) VALUES (s.id, s.n, s.text)"
    ).collect()


def batch_s(spark: "SparkSession", servers: str, way: str, records: int, keys: int, home: Path) -> float:
    """Run the query. Returns the median seconds of a batch without the first one."""
    stream = spark.readStream.format("kafka" if way == BY_HAND else OURS).option("kafka.bootstrap.servers", servers)
    stream = stream.option("subscribe", TOPIC).option("startingOffsets", "earliest")
    stream = stream.option("maxOffsetsPerTrigger", str(records // BATCHES))
    table = home / "table"
    if way == BY_HAND:
        write = stream.load().writeStream.foreachBatch(lambda df, _: by_hand(df, table, keys))
    else:
        stream = stream.option("kafka.group.id", f"bench-{home.name}")
        merge = Merge(["id"], delete_when="is_deleted", without=["is_deleted", "topic", "partition", "offset"])
        write = stream.load().writeStream.foreachBatch(
            DeltaSink(table, transform=lambda df: changes(df, keys), merge=merge)
        )
    query = run_to_end(write.option("checkpointLocation", str(home / "checkpoint")))
    rows = DeltaTable(table).to_pyarrow_table(columns=["id", "n"])
    found = dict(zip(rows["id"].to_pylist(), rows["n"].to_pylist(), strict=True))
    last = {number % keys: number for number in range(records)}
    if len(rows) != len(found) or found != {key: number for key, number in last.items() if number % 7 != 3}:
        raise AssertionError(f"{way}: the table has not the last change of each key")
    return float(statistics.median(progress["durationMs"]["addBatch"] for progress in done(query)[1:]) / 1000)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench merge", description=__doc__)
    parser.add_argument("--records", type=int, default=400_000)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args(arguments)
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch, Broker() as broker:
        create_topics(broker.bootstrap_servers, {TOPIC: PARTITIONS})
        fill(broker.bootstrap_servers, chosen.records, chosen.keys)
        spark = session(Path(scratch))
        try:
            for number in range(chosen.rounds):
                for way in sorted(WAYS, reverse=bool(number % 2)):
                    home = Path(scratch) / f"{number}-{WAYS.index(way)}"
                    home.mkdir()
                    took[way].append(batch_s(spark, broker.bootstrap_servers, way, chosen.records, chosen.keys, home))
        finally:
            spark.stop()
    medians = {way: statistics.median(values) for way, values in took.items()}
    print(f"{machine()}: {chosen.records:,} changes of {chosen.keys:,} keys, {BATCHES} batches")
    for way, median in medians.items():
        each = ", ".join(f"{value:.2f}" for value in took[way])
        print(f"  {way:14} {median:6.2f} s a batch ({each})  {medians[BY_HAND] / median:.2f} times as fast")
    return 0
