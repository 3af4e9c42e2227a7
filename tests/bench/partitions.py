"""Measure a thousand partitions with one new record each, every half second, and the CPU time of an idle query.

``python -m tests.bench partitions [--partitions N] [--batches N] [--idle SECONDS]``

Spark's connector has a consumer for each partition, and its first batch of a thousand takes minutes.
"""

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # the stub hides it
from rich.console import Console
from rich.table import Table

from bench.report import session
from spark_group_source.local.broker import Broker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

EVERY_S = 0.5
FIRST_S_MAX, LATER_S_MAX = 10.0, 3.0
"""Targets on 2 cores."""
START_S = 120
TICKS_PER_S = 100


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="partitions")
    parser.add_argument("--partitions", type=int, default=1_000)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--idle", type=int, default=20, help="seconds; 0: not measured")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch, Broker() as broker:
        topic = f"many-{chosen.partitions}"
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        admin.create_topics([NewTopic(topic, chosen.partitions, 1)])[topic].result(60)
        spark = session(Path(scratch))
        _warm_up(spark)
        producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
        _one_each(producer, topic, chosen.partitions)
        stream = spark.readStream.format("kafka-group").option("kafka.bootstrap.servers", broker.bootstrap_servers)
        stream = stream.option("kafka.group.id", "bench").option("subscribe", topic)
        stream = stream.option("memberHost", "driver")
        started_s = time.monotonic()
        writer = stream.load().writeStream.format("noop").option("checkpointLocation", f"{scratch}/checkpoint")
        query = writer.start()
        query.processAllAvailable()
        first_s = time.monotonic() - started_s
        later_s = _batches(query, producer, topic, chosen.partitions, chosen.batches)
        load = _idle_load(chosen.idle) if chosen.idle else 0.0
        query.stop()
        spark.stop()
    table = Table("partitions", "first batch, from start()", "median of later ones", "longest", "idle, of a core")
    table.add_row(
        str(chosen.partitions),
        f"{first_s:.1f} s",
        f"{statistics.median(later_s):.1f} s",
        f"{max(later_s):.1f} s",
        f"{load:.1%}" if chosen.idle else "-",
    )
    Console().print(table)
    kept = first_s < FIRST_S_MAX and max(later_s) < LATER_S_MAX
    print(f"target: first under {FIRST_S_MAX:.0f} s, later under {LATER_S_MAX:.0f} s: {'met' if kept else 'MISSED'}")
    return 0 if kept else 1


def _warm_up(spark: "SparkSession") -> None:
    """Run a first job, so that the start of the JVM is not measured."""
    spark.range(1).write.format("noop").mode("append").save()


def _one_each(producer: Producer, topic: str, partitions: int) -> None:
    for partition in range(partitions):
        producer.produce(topic, b"x" * 100, partition=partition)
    producer.flush(60)


def _batches(query: "StreamingQuery", producer: Producer, topic: str, partitions: int, count: int) -> list[float]:
    """Produce one record to each partition every half second; returns the durations of the batches in seconds."""
    seen = query.lastProgress["batchId"] if query.lastProgress else -1
    stop = threading.Event()

    def produce() -> None:
        while not stop.wait(EVERY_S):
            _one_each(producer, topic, partitions)

    thread = threading.Thread(target=produce, name="producer")
    thread.start()
    took: dict[int, float] = {}
    deadline_s = time.monotonic() + START_S
    pause = threading.Event()
    while len(took) < count and time.monotonic() < deadline_s:
        pause.wait(0.1)
        for progress in query.recentProgress:
            if progress["batchId"] > seen and progress["numInputRows"]:
                took[progress["batchId"]] = progress["durationMs"]["triggerExecution"] / 1000
    stop.set()
    thread.join(60)
    query.processAllAvailable()
    return list(took.values())


def _idle_load(seconds: int) -> float:
    """The share of a core that the stream reader uses while nothing is produced."""
    before = _reader_ticks()
    threading.Event().wait(seconds)
    return (_reader_ticks() - before) / TICKS_PER_S / seconds


def _reader_ticks() -> int:
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if b"python_streaming_source_runner" in (process / "cmdline").read_bytes():
                fields = (process / "stat").read_text().rsplit(")", 1)[1].split()
                total += int(fields[11]) + int(fields[12])
        except OSError:
            continue
    return total
