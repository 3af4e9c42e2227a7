"""Peak memory and disk of Spark for a batch that is many times as large as its memory, written to two tables.

``python -m tests.bench big_batch [--heap-mib N] [--times N]``

One broker, one local Spark with so much memory, and one batch of ``times`` as many random bytes, half of them for each
of two tables of ``DeltaSinks``. Printed are the seconds, the peak memory of the JVM and of Spark's Python processes
(resident, sampled), and the largest size of Spark's folder for blocks on disk (``spark.local.dir``).
"""

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from confluent_kafka import Producer
from deltalake import DeltaTable

from bench.report import OURS, QUERY_S, machine, run_to_end, session
from spark_group_source import DeltaSink, DeltaSinks
from spark_group_source.local.background import create_topics
from spark_group_source.local.broker import Broker

TOPICS = ("a", "b")
PARTITIONS = 4
RECORD_BYTES = 10_000
SAMPLE_S = 0.2


def fill(servers: str, records: int) -> None:
    """Write random records to each topic."""
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 20, "queue.buffering.max.kbytes": 200_000})
    for number in range(records):
        for topic in TOPICS:
            while True:
                try:
                    producer.produce(topic, os.urandom(RECORD_BYTES), partition=number % PARTITIONS)
                    break
                except BufferError:
                    producer.poll(1)
        producer.poll(0)
    if producer.flush(QUERY_S):
        raise TimeoutError(f"the records were not written within {QUERY_S} s")


class Peaks:
    """The largest values so far, in bytes."""

    jvm = python = disk = 0

    def sample(self, jvm: psutil.Process, local: Path) -> None:
        with suppress(psutil.Error):
            self.jvm = max(self.jvm, jvm.memory_info().rss)
            workers = sum(child.memory_info().rss for child in jvm.children(recursive=True))
            self.python = max(self.python, workers)
        size = 0
        for path in local.rglob("*"):
            with suppress(OSError):
                size += path.stat().st_size if path.is_file() else 0
        self.disk = max(self.disk, size)


def is_spark(process: psutil.Process) -> bool:
    with suppress(psutil.Error):  # it may just have ended
        return "SparkSubmit" in " ".join(process.cmdline())
    return False


@contextmanager
def sampled(local: Path) -> Iterator[Peaks]:
    """Sample the JVM that this process has started, until the block ends."""
    (jvm,) = [child for child in psutil.Process().children(recursive=True) if is_spark(child)]
    peaks, stop = Peaks(), threading.Event()

    def run() -> None:
        while not stop.wait(SAMPLE_S):
            peaks.sample(jvm, local)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield peaks
    finally:
        stop.set()
        thread.join()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench big_batch", description=__doc__)
    parser.add_argument("--heap-mib", type=int, default=512)
    parser.add_argument("--times", type=int, default=10)
    given = parser.parse_args(arguments)
    records = given.heap_mib * 2**20 * given.times // RECORD_BYTES // len(TOPICS)
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"--driver-memory {given.heap_mib}m pyspark-shell"
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch, Broker() as broker:
        create_topics(broker.bootstrap_servers, dict.fromkeys(TOPICS, PARTITIONS))
        fill(broker.bootstrap_servers, records)
        home = Path(scratch)
        local = home / "spark"
        local.mkdir()
        spark = session(local)
        try:
            stream = spark.readStream.format(OURS).option("kafka.bootstrap.servers", broker.bootstrap_servers)
            stream = stream.option("subscribe", ",".join(TOPICS)).option("kafka.group.id", "big")
            sinks = DeltaSinks(lambda topic: DeltaSink(home / topic))
            write = stream.option("startingOffsets", "earliest").load().writeStream.foreachBatch(sinks)
            begun = time.monotonic()
            with sampled(local) as peaks:
                run_to_end(write.option("checkpointLocation", str(home / "checkpoint")))
            took = time.monotonic() - begun
        finally:
            spark.stop()
        for topic in TOPICS:
            if (found := DeltaTable(home / topic).to_pyarrow_dataset().count_rows()) != records:
                raise AssertionError(f"table {topic} has {found} rows, not {records}")
    mib = len(TOPICS) * records * RECORD_BYTES >> 20
    print(f"{machine()}: one batch of {mib:,} MiB in {len(TOPICS) * records:,} records, heap {given.heap_mib} MiB")
    print(
        f"  {took:.0f} s; JVM {peaks.jvm >> 20:,} MiB, Python {peaks.python >> 20:,} MiB at most; "
        f"{peaks.disk >> 20:,} MiB of Spark's blocks on disk"
    )
    return 0
