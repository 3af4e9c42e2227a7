"""Count the files of a table after many small batches, without and with ``optimize_every``, and time a query of it.

``python -m tests.bench files [--batches N] [--every N]``

One broker, one Spark, RECORDS records of 100 bytes in each batch, read with AvailableNow by the native writer. Prints
for each way the seconds of the median batch and of the slowest one (of those that Spark remembers), the files of the
table and of its log, and the seconds of ``SELECT count(*), sum(length(value))``.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deltalake import DeltaTable

from bench.report import OURS, done, fill, machine, run_to_end, session
from spark_group_source import DeltaSink
from spark_group_source.local.broker import Broker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOPIC = "small-batches"
PARTITIONS = 2
RECORDS = 100
RECORD_BYTES = 100
QUERIES = 3


def line(spark: "SparkSession", servers: str, batches: int, every: int, home: Path) -> str:
    """Run the query. Returns what is printed of it."""
    table = home / "table"
    stream = spark.readStream.format(OURS).option("kafka.bootstrap.servers", servers).option("subscribe", TOPIC)
    stream = stream.option("kafka.group.id", f"bench-{every}").option("startingOffsets", "earliest")
    stream = stream.option("maxOffsetsPerTrigger", str(RECORDS))
    write = stream.load().writeStream.foreachBatch(DeltaSink(table, optimize_every=every))
    query = run_to_end(write.option("checkpointLocation", str(home / "checkpoint")))
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
    parser.add_argument("--every", type=int, default=100)
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch, Broker() as broker:
        records = chosen.batches * RECORDS
        fill(broker.bootstrap_servers, TOPIC, records=records, size=RECORD_BYTES, partitions=PARTITIONS)
        spark = session(Path(scratch))
        try:
            print(f"{machine()}: {chosen.batches:,} batches of {RECORDS} records")
            for every in (0, chosen.every):
                home = Path(scratch) / str(every)
                home.mkdir()
                print(line(spark, broker.bootstrap_servers, chosen.batches, every, home), flush=True)
        finally:
            spark.stop()
    return 0
