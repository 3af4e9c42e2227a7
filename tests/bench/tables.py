"""Time one query that writes many topics to a table each: by DeltaSinks, and by a function that calls a sink for each.

``python -m tests.bench tables [--topics N] [--records N] [--rounds N]``

One broker, one Spark, ``records`` records of 100 bytes in each topic, read with AvailableNow in BATCHES batches. The
two ways take turns. ``sinks one by one`` is what a user writes without DeltaSinks: each sink filters the batch by its
topic, so the batch is read from Kafka as often as there are tables. Prints the seconds of a batch, without the first
one, and the ratio.
"""

import argparse
import statistics
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deltalake import DeltaTable
from pyspark.sql import functions as F

from bench.report import fill, machine, run_to_end, session
from spark_group_source import DeltaSink, DeltaSinks
from spark_group_source.local.broker import Broker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BATCHES = 4
PARTITIONS = 2
RECORD_BYTES = 100

Write = Callable[["DataFrame", int], None]


def one_by_one(topics: Sequence[str], folder: Path) -> Write:
    def only(topic: str) -> Callable[["DataFrame"], "DataFrame"]:
        return lambda df: df.where(F.col("topic") == topic)

    sinks = [DeltaSink(folder / topic, transform=only(topic)) for topic in topics]

    def write(df: "DataFrame", batch_id: int) -> None:
        for sink in sinks:
            sink(df, batch_id)

    return write


def together(topics: Sequence[str], folder: Path) -> Write:
    return DeltaSinks(lambda topic: DeltaSink(folder / topic))


WAYS = {"sinks one by one": one_by_one, "DeltaSinks": together}


def batch_s(spark: "SparkSession", servers: str, topics: Sequence[str], records: int, way: str, folder: Path) -> float:
    """Run the query. Returns the median seconds of a batch without the first one."""
    stream = spark.readStream.format("kafka-group").option("kafka.bootstrap.servers", servers)
    stream = stream.option("kafka.group.id", f"bench-{uuid.uuid4().hex[:8]}").option("subscribe", ",".join(topics))
    stream = stream.option("startingOffsets", "earliest")
    stream = stream.option("maxOffsetsPerTrigger", str(len(topics) * records // BATCHES))
    write = stream.load().writeStream.foreachBatch(WAYS[way](topics, folder))
    query = run_to_end(write.option("checkpointLocation", str(folder / "checkpoint")))
    for topic in topics:
        found = DeltaTable(folder / topic).to_pyarrow_dataset().count_rows()
        if found != records:
            raise AssertionError(f"{way}: table {topic} has {found} rows, not {records}")
    took = [progress["durationMs"]["addBatch"] / 1000 for progress in query.recentProgress if progress["numInputRows"]]
    return float(statistics.median(took[1:]))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench tables", description=__doc__)
    parser.add_argument("--topics", type=int, default=20)
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args(arguments)
    topics = [f"bench-{number}" for number in range(chosen.topics)]
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch, Broker() as broker:
        for topic in topics:
            fill(broker.bootstrap_servers, topic, records=chosen.records, size=RECORD_BYTES, partitions=PARTITIONS)
        spark = session(Path(scratch))
        try:
            for number in range(chosen.rounds):
                for way in sorted(WAYS, reverse=bool(number % 2)):
                    folder = Path(scratch) / f"{number}-{way.replace(' ', '-')}"
                    took[way].append(batch_s(spark, broker.bootstrap_servers, topics, chosen.records, way, folder))
        finally:
            spark.stop()
    medians = {way: statistics.median(values) for way, values in took.items()}
    print(f"{machine()}: {chosen.topics} topics, {chosen.records:,} records each, {BATCHES} batches")
    for way, median in medians.items():
        each = ", ".join(f"{value:.1f}" for value in took[way])
        print(f"  {way:18} {median:6.1f} s a batch ({each})  {medians['sinks one by one'] / median:.1f} times as fast")
    return 0
