"""Count the files of a table after many small batches, without and with ``optimize_every``, and time a query of it.

``python -m tests.bench files [--batches N] [--stages N] [--every N]``

One broker, one Spark, RECORDS records of 100 bytes in each batch, read with AvailableNow by the native writer. The two
queries run side by side, and go on from their checkpoints in each stage of ``batches / stages`` batches. Prints for
each stage and way the seconds of the median batch and of the slowest one (of those that Spark remembers), the files of
the table and of its log, and the seconds of ``SELECT count(*), sum(length(value))``.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from deltalake import DeltaTable

from bench.report import OURS, append, done, machine, run_to_end, session
from spark_group_source import DeltaSink, KafkaGroupDataSource
from spark_group_source.local.background import create_topics
from spark_group_source.local.broker import Broker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import DataStreamWriter, StreamingQuery

TOPIC = "small-batches"
PARTITIONS = 2
RECORDS = 100
RECORD_BYTES = 100
QUERIES = 3


def writer(spark: "SparkSession", servers: str, every: int, home: Path) -> "DataStreamWriter":
    """A query with a registration of its own: two that share one must not start at the same moment (limits.md)."""
    spark.dataSource.register(KafkaGroupDataSource)
    stream = spark.readStream.format(OURS).option("kafka.bootstrap.servers", servers).option("subscribe", TOPIC)
    stream = stream.option("kafka.group.id", f"bench-{every}").option("startingOffsets", "earliest")
    stream = stream.option("maxOffsetsPerTrigger", str(RECORDS))
    write = stream.load().writeStream.foreachBatch(DeltaSink(home / "table", optimize_every=every))
    return write.option("checkpointLocation", str(home / "checkpoint"))


def line(spark: "SparkSession", query: "StreamingQuery", batches: int, every: int, table: Path) -> str:
    """What is printed of a query that has ended."""
    batch_s = [progress["durationMs"]["addBatch"] / 1000 for progress in done(query)[1:]]
    took = []
    for _ in range(QUERIES):
        begun = time.monotonic()
        ((count, _bytes),) = (
            spark.read.format("delta").load(str(table)).selectExpr("count(*)", "sum(length(value))").collect()
        )
        took.append(time.monotonic() - begun)
        if count != batches * RECORDS:
            raise AssertionError(f"the table has {count} rows, not {batches * RECORDS}")
    files = len(DeltaTable(table).file_uris())
    log = len(list((table / "_delta_log").iterdir()))
    return (
        f"  optimize_every {every:5}: batch {statistics.median(batch_s):.2f} s, slowest {max(batch_s):.2f} s; "
        f"{files:6,} files, {log:6,} in the log; query {statistics.median(took):.2f} s"
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench files", description=__doc__)
    parser.add_argument("--batches", type=int, default=1_000)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--every", type=int, default=100)
    chosen = parser.parse_args(arguments)
    batches = chosen.batches // chosen.stages
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch, Broker() as broker:
        servers = broker.bootstrap_servers
        create_topics(servers, {TOPIC: PARTITIONS})
        spark = session(Path(scratch))
        try:
            print(f"{machine()}: batches of {RECORDS} records")
            homes = {every: Path(scratch) / str(every) for every in (0, chosen.every)}
            for stage in range(1, chosen.stages + 1):
                append(servers, TOPIC, records=batches * RECORDS, size=RECORD_BYTES, partitions=PARTITIONS)
                writers = {every: writer(spark, servers, every, home) for every, home in homes.items()}
                with ThreadPoolExecutor(len(homes)) as pool:
                    running = {every: pool.submit(run_to_end, query) for every, query in writers.items()}
                print(f"{time.strftime('%H:%M:%S')} after {stage * batches:,} batches")
                for every, query in running.items():
                    print(line(spark, query.result(), stage * batches, every, homes[every] / "table"), flush=True)
        finally:
            spark.stop()
    return 0
