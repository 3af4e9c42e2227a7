"""Measure the cost of the ledger: a batch by each writer, and the same rows written by Delta alone.

``python -m tests.bench ledger [--batches N] [--partitions N ...] [--rows N] [--snapshot-partitions N]``

Without Kafka: the sink is called as ``foreachBatch`` calls it. The kinds take turns, batch by batch, each with its own
table; the first fifth of the batches is not measured. ``plain`` is an append; ``idempotent`` sets the batch's number,
as Delta's documentation recommends (``txnAppId`` and ``txnVersion``). Delta computes a table's state in
``spark.databricks.delta.snapshotPartitions`` tasks, 50 by default. Prints medians in ms, and ratios to both."""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.report import session
from spark_group_source.delta.sink import DeltaSink
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.offsets import StreamOffset

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

UNCOUNTED = 5
"""One of so many batches is a warm-up."""


def batch(number: int, partitions: int) -> StreamOffset:
    """One record of each partition."""
    ranges = {TopicPartition("bench", p): (number, number + 1) for p in range(partitions)}
    known = {"bench": partitions}
    return StreamOffset(group="bench", stream="s", seq=number, ranges=ranges, topic_ids={"bench": "id"}, known=known)


def kinds(root: Path) -> dict[str, Callable[["DataFrame", int], None]]:
    checkpoint = str(root / "checkpoint")

    def idempotent(df: "DataFrame", number: int) -> None:
        writer = df.write.format("delta").mode("append").option("txnAppId", "q").option("txnVersion", number)
        writer.save(str(root / "idempotent"))

    def plain(df: "DataFrame", number: int) -> None:
        df.write.format("delta").mode("append").save(str(root / "plain"))

    return {
        "plain": plain,
        "idempotent": idempotent,
        "native": DeltaSink(root / "native", checkpoint=checkpoint, writer="native"),
        "options": DeltaSink(root / "options", checkpoint=checkpoint, writer="options"),
    }


def compare(spark: "SparkSession", root: Path, *, batches: int, partitions: int, rows: int) -> None:
    (root / "checkpoint" / "offsets").mkdir(parents=True)
    (root / "checkpoint" / "metadata").write_text(json.dumps({"id": "q"}))
    sinks = kinds(root)
    took_ms: dict[str, list[float]] = {kind: [] for kind in sinks}
    for number in range(batches):
        text = "\n".join(["v1", '{"batchTimestampMs":0}', batch(number, partitions).to_json()])
        (root / "checkpoint" / "offsets" / str(number)).write_text(text)
        order = list(sinks)[number % len(sinks) :] + list(sinks)[: number % len(sinks)]
        for kind in order:
            df = spark.range(rows).selectExpr(
                "'bench' topic",
                "int(id) partition",
                f"{number}L offset",
                "uuid() value",
            )
            began_s = time.perf_counter()
            sinks[kind](df, number)
            took_ms[kind].append((time.perf_counter() - began_s) * 1000)
    median = {kind: statistics.median(times[batches // UNCOUNTED :]) for kind, times in took_ms.items()}
    sizes = {kind: _last_commit(root / kind) for kind in sinks}
    print(f"{partitions:,} partitions, {rows:,} rows a batch, {batches} batches")
    for kind, ms in median.items():
        ratios = f"{ms / median['plain']:5.2f} x plain  {ms / median['idempotent']:5.2f} x idempotent"
        print(f"  {kind:12} {ms:6.0f} ms  {ratios}  last commit {sizes[kind]:,} bytes")


def _last_commit(table: Path) -> int:
    return max((table / "_delta_log").glob("*.json")).stat().st_size


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench ledger", description=__doc__)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--partitions", type=int, nargs="+", default=[10, 10_000])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--snapshot-partitions", type=int, default=50)
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        spark = session(Path(folder))
        spark.conf.set("spark.databricks.delta.snapshotPartitions", str(chosen.snapshot_partitions))
        try:
            for partitions in chosen.partitions:
                root = Path(folder) / str(partitions)
                compare(spark, root, batches=chosen.batches, partitions=partitions, rows=chosen.rows)
        finally:
            spark.stop()
    return 0
