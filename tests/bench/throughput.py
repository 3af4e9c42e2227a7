"""Compare the throughput of this source and Spark's own Kafka connector, from a full topic to the noop sink.

``python -m tests.bench throughput [--records N] [--bytes N] [--partitions N] [--runs N] [--option name=value ...]``

Both read the same topic of a local broker in one session, with the AvailableNow trigger, in turns, after a warm-up of
each; a run is a new query with a new checkpoint (and a new group). Two times are measured: that of the batch's tasks
(Spark's ``addBatch``), which is the cost of reading records, and the whole query from ``start()`` to its end, which
includes the start of a process and joining the group. The ratio is that of the first time's medians.

Broker, JVM and Python share the machine's cores, so the figures serve to compare the two sources, not to plan capacity.
"""

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # the stub hides it

from spark_group_source.local.broker import Broker
from spark_group_source.local.conf import local_spark_settings
from spark_group_source.local.jars import spark_kafka_jars
from spark_group_source.source import KafkaGroupDataSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BROKER_JAVA = ("-Xms512m", "-Xmx1g", "-XX:+UseSerialGC")
"""With both compilers: the broker must not be the bottleneck."""
QUERY_S = 300
"""Bound of one run; a run takes seconds."""
SAMPLE_S = 0.2
"""Interval of the memory samples. The kernel keeps each process's peak, so none is missed unless a process ends between
two samples."""
OURS, SPARKS = "kafka-group", "kafka"


class Run(NamedTuple):
    rows: int
    tasks_s: float
    query_s: float


class Memory:
    """Measures the peak resident memory of Spark's Python processes, by kind."""

    def __init__(self) -> None:
        self.peak_mib: dict[str, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(SAMPLE_S * 10)

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    status = (process / "status").read_text()
                except OSError:
                    continue  # it has ended
                kind = _kind(command)
                if kind:
                    peak_kib = next((int(x.split()[1]) for x in status.splitlines() if x.startswith("VmHWM:")), 0)
                    self.peak_mib[kind] = max(self.peak_mib.get(kind, 0), peak_kib // 1024)


def _kind(command: str) -> str | None:
    for kind, sign in {"stream reader": "python_streaming_source_runner", "worker": "pyspark.daemon"}.items():
        if sign in command:
            return kind
    return None


def fill(servers: str, topic: str, *, records: int, size: int, partitions: int) -> None:
    """Create the topic with ``records`` records of ``size`` bytes, evenly over the partitions. Half of each is random,
    so that it does not compress well."""
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(30)
    producer = Producer(
        {
            "bootstrap.servers": servers,
            "linger.ms": 50,
            "batch.size": 1_000_000,
            "queue.buffering.max.messages": 200_000,
        }
    )
    for number in range(records):
        value = (b"%012d" % number + os.urandom(size // 2)).ljust(size, b".")[:size]
        while True:
            try:
                producer.produce(topic, value, partition=number % partitions)
                break
            except BufferError:
                producer.poll(0.1)
    if producer.flush(QUERY_S):
        raise TimeoutError(f"the records were not written within {QUERY_S} s")


def session(scratch: Path) -> "SparkSession":
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the workers' Python; the setting alone has no effect
    settings = local_spark_settings(scratch)
    jars = ",".join([settings["spark.jars"], *map(str, spark_kafka_jars())])
    builder = SparkSession.builder.master("local[2]").appName("throughput")
    for key, value in {**settings, "spark.jars": jars}.items():
        builder = builder.config(key, value)
    made = builder.getOrCreate()
    made.sparkContext.setLogLevel("ERROR")
    made.dataSource.register(KafkaGroupDataSource)
    return made


def read_once(
    spark: "SparkSession", source: str, servers: str, topic: str, scratch: Path, options: dict[str, str]
) -> Run:
    reader = spark.readStream.format(source).option("kafka.bootstrap.servers", servers).option("subscribe", topic)
    reader = reader.option("startingOffsets", "earliest")
    if source == OURS:
        options = {"memberHost": "driver", **options}  # the run ends before a member is placed on an agent
        reader = reader.option("kafka.group.id", f"bench-{uuid.uuid4().hex}").options(**options)
    writer = reader.load().writeStream.format("noop").trigger(availableNow=True)
    started = time.monotonic()
    query = writer.option("checkpointLocation", str(scratch / uuid.uuid4().hex)).start()
    if not query.awaitTermination(QUERY_S):
        query.stop()
        raise TimeoutError(f"the query did not end within {QUERY_S} s")
    query_s = time.monotonic() - started
    batches: list[dict[str, Any]] = [p for p in query.recentProgress if p["numInputRows"]]
    tasks_s = sum(p["durationMs"]["addBatch"] for p in batches) / 1000
    return Run(sum(p["numInputRows"] for p in batches), tasks_s, query_s)


def compare(read: Callable[[str], Run], runs: int, records: int) -> float:
    """Warm up, read in turns, print every run, and return the ratio of the medians of the tasks' rates."""
    rates: dict[str, list[float]] = {OURS: [], SPARKS: []}
    whole: dict[str, list[float]] = {OURS: [], SPARKS: []}
    print(f"{'source':12} {'run':>4} {'rows/s of the tasks':>20} {'rows/s of the query':>20}")
    for number in range(-1, runs):  # -1 is the warm-up
        for source in (OURS, SPARKS) if number % 2 else (SPARKS, OURS):
            run = read(source)
            if run.rows != records:
                raise AssertionError(f"{source} read {run.rows} rows of {records}")
            shown = "warm" if number < 0 else str(number + 1)
            print(f"{source:12} {shown:>4} {run.rows / run.tasks_s:20,.0f} {run.rows / run.query_s:20,.0f}", flush=True)
            if number >= 0:
                rates[source].append(run.rows / run.tasks_s)
                whole[source].append(run.rows / run.query_s)
    ratio = statistics.median(rates[OURS]) / statistics.median(rates[SPARKS])
    for source in (OURS, SPARKS):
        tasks, query = statistics.median(rates[source]), statistics.median(whole[source])
        print(f"{source:12} {'median':>4} {tasks:18,.0f} {query:20,.0f}")
    print(f"ratio of the tasks' medians: {ratio:.2f} times Spark's own connector")
    print(f"ratio of the queries' medians: {statistics.median(whole[OURS]) / statistics.median(whole[SPARKS]):.2f}")
    return ratio


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench throughput", description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--bytes", type=int, default=100)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--option", action="append", default=[], help="name=value, for this source")
    parser.add_argument("--at-least", type=float, default=0.7, help="the ratio below which the exit code is 1")
    chosen = parser.parse_args(arguments)
    options = dict(option.split("=", 1) for option in chosen.option)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, Broker(java_options=BROKER_JAVA) as broker:
        scratch, servers = Path(folder), broker.bootstrap_servers
        print(
            f"{chosen.records:,} records of {chosen.bytes} bytes in {chosen.partitions} partitions, "
            f"{os.cpu_count()} cores"
        )
        fill(servers, "bench", records=chosen.records, size=chosen.bytes, partitions=chosen.partitions)
        spark = session(scratch)
        try:
            with Memory() as memory:
                ratio = compare(
                    lambda source: read_once(spark, source, servers, "bench", scratch, options),
                    chosen.runs,
                    chosen.records,
                )
        finally:
            spark.stop()
    for kind, peak_mib in sorted(memory.peak_mib.items()):
        print(f"peak memory of a Python {kind}: {peak_mib} MiB")
    return 0 if ratio >= chosen.at_least else 1
