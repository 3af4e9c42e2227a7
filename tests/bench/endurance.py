"""Run a query for a long time with everything switched on, and measure what each of its processes holds.

``python -m tests.bench endurance [--minutes N] [--per-s N] [--png FILE]``

One broker, one Spark with two executors (``local-cluster``), members on agents, metrics that are read, a batch every
second into a Delta table, and an ordinary consumer that joins the group for half a minute in each minute. Every ten
seconds the memory, threads and open files of each kind of process are read from ``/proc``. At the end each produced
record must be in the table once, or was processed by the ordinary consumer; and the last quarter of the samples is
compared with the second: a growth of more than a tenth is reported, with the names of the threads that came, and its
exit code is 1.
"""

import argparse
import contextlib
import itertools
import os
import re
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil
from confluent_kafka.admin import AdminClient
from kafka_helpers import create_topic
from rebalance.accounts import Flow, await_committed, produced, records_in, with_retries
from rebalance.ordinary import OrdinaryConsumer
from rich.console import Console
from rich.table import Table

from bench import executors
from bench.report import SIGNS as SPARKS_SIGNS
from spark_group_source import DeltaSink, KafkaGroupDataSource
from spark_group_source.host import run_files
from spark_group_source.local.broker import Broker, free_ports
from spark_group_source.local.conf import local_spark_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

TOPIC, GROUP, PARTITIONS = "endurance", "endurance", 6
SAMPLE_S, CONSUMER_S = 10.0, 30.0
REPORT_SAMPLES = 6
OPTIMIZE_EVERY = 300  # commits; deltalake keeps the metadata of all files of the table
EXECUTOR_HEAP_MIB = 512
GROWTH_MAX, SMALL = 0.1, {"MiB": 16.0, "threads": 4.0, "files": 8.0}
"""A growth counts if it is more than this share and more than this amount."""
SIGNS = {**SPARKS_SIGNS, "broker": "kafka.Kafka"}
DRIVER = "driver's Python"


class Sample(NamedTuple):
    """The sum over all processes of one kind."""

    at_s: float
    processes: int
    mib: float
    """Memory that the processes do not share with others, plus their share of what they do (PSS)."""
    threads: int
    files: int
    names: Counter[str]
    """How many threads have each name, without numbers in it."""


def thread_names(pid: int) -> Counter[str]:
    """The names that the threads of a process have for the kernel; those of Python in this process have their own."""
    own = {thread.native_id: thread.name for thread in threading.enumerate()} if pid == os.getpid() else {}
    found = Counter[str]()
    for path in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            name = own.get(int(path.name)) or (path / "comm").read_text().strip()
            found[re.sub(r"\d+", "N", name)] += 1
    return found


def sample(at_s: float) -> dict[str, Sample]:
    """What each kind of process of this benchmark holds."""
    found: dict[str, list[Sample]] = defaultdict(list)
    for pid, kind in [(os.getpid(), DRIVER), *executors.processes(SIGNS)]:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            mib = process.memory_full_info().pss / 2**20
            names = thread_names(pid)
            found[kind].append(Sample(at_s, 1, mib, names.total(), process.num_fds(), names))
    return {kind: _sum(at_s, one) for kind, one in found.items()}


def _sum(at_s: float, samples: Sequence[Sample]) -> Sample:
    processes, mib, threads, files, names = zip(*(one[1:] for one in samples), strict=True)
    return Sample(at_s, sum(processes), sum(mib), sum(threads), sum(files), sum(names, Counter()))


def growth(samples: Sequence[Sample], field: str) -> tuple[float, float]:
    """What a process has on average in the second and in the last quarter of the samples: the value that nine of ten
    samples do not exceed. Pools of threads shrink when they rest, and a fork counts twice for a moment."""
    quarter = max(2, len(samples) // 4)
    found = []
    for part in (samples[quarter : 2 * quarter], samples[-quarter:]):
        values = [getattr(s, field) / s.processes for s in part]
        found.append(statistics.quantiles(values, n=10)[-1] if len(values) > 1 else max(values, default=0.0))
    return found[0], found[1]


def session(scratch: Path) -> "SparkSession":
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = {
        **local_spark_settings(scratch),
        "spark.executor.memory": f"{EXECUTOR_HEAP_MIB}m",
        # The whole heap from the start: otherwise G1 commits more of it in steps, which looks like growth.
        "spark.executor.extraJavaOptions": f"-Xms{EXECUTOR_HEAP_MIB}m -XX:+AlwaysPreTouch",
        "spark.executorEnv.PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    builder = SparkSession.builder.master("local-cluster[2,1,1024]").appName("endurance")
    made = builder.config(map={**settings}).getOrCreate()
    made.sparkContext.setLogLevel("ERROR")
    made.dataSource.register(KafkaGroupDataSource)
    return made


@contextlib.contextmanager
def consumers(servers: str, folder: Path) -> Iterator[list[OrdinaryConsumer]]:
    """An ordinary consumer joins and leaves, one after the other, until the block ends; yields all of them."""
    stop, seen = threading.Event(), list[OrdinaryConsumer]()

    def come_and_go() -> None:
        for number in itertools.count():
            if stop.wait(CONSUMER_S):
                return
            with OrdinaryConsumer(servers, GROUP, [TOPIC], folder / f"ordinary-{number}", session_ms=45_000) as other:
                seen.append(other)
                stop.wait(CONSUMER_S)
                other.close()

    thread = threading.Thread(target=come_and_go, name="consumers")
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def watch(query: "StreamingQuery", metrics_port: int, minutes: float) -> dict[str, list[Sample]]:
    """Sample all processes and read the metrics until the time is over."""
    taken: dict[str, list[Sample]] = defaultdict(list)
    pause, began_s = threading.Event(), time.monotonic()
    for number in itertools.count(1):
        pause.wait(max(0.0, began_s + number * SAMPLE_S - time.monotonic()))
        if not query.isActive:
            raise AssertionError(f"the query ended: {query.exception()}")
        at_s = time.monotonic() - began_s
        for kind, one in sample(at_s).items():
            taken[kind].append(one)
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics") as page:
            page.read()
        if number % REPORT_SAMPLES == 0:
            run = run_files.read(GROUP)
            rebalances, agents = sum(int(one["rebalances"]) for one in run), [one["agents"] for one in run]
            progress = query.lastProgress and query.lastProgress["batchId"]
            print(f"  {at_s / 60:5.0f} min: batch {progress}, {rebalances} rebalances, agents {agents}", flush=True)
        if at_s >= minutes * 60:
            return taken
    raise AssertionError("unreachable")


def report(taken: dict[str, list[Sample]]) -> int:
    """Print the second and the last quarter for a process of each kind; returns how many figures grew."""
    grew = 0
    table = Table("one process", "processes", *(f"{unit}: second quarter, last" for unit in SMALL))
    for kind, samples in sorted(taken.items()):
        shown = []
        for unit, field in zip(SMALL, ("mib", "threads", "files"), strict=True):
            before, after = growth(samples, field)
            has_grown = after > before * (1 + GROWTH_MAX) and after - before > SMALL[unit]
            grew += has_grown
            shown.append(f"{before:,.0f}, {after:,.0f}{' GREW' if has_grown else ''}")
        counts = [one.processes for one in samples[len(samples) // 4 :]]
        table.add_row(kind, f"{min(counts)} to {max(counts)}", *shown)
    Console(width=120).print(table)
    for kind, samples in sorted(taken.items()):
        quarter = max(2, len(samples) // 4)
        came = samples[-1].names - samples[quarter].names
        if came:
            print(f"  {kind}: threads at the end that were not there after a quarter: {dict(came.most_common(8))}")
    return grew


def plot(taken: dict[str, list[Sample]], path: Path) -> None:
    """Draw memory, threads and open files of each kind of process over the time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, rows = plt.subplots(3, 1, figsize=(9, 9), sharex=True)
    for axes, field, title in zip(rows, ("mib", "threads", "files"), ("MiB (PSS)", "threads", "files"), strict=True):
        for kind, samples in sorted(taken.items()):
            axes.plot([s.at_s / 60 for s in samples], [getattr(s, field) for s in samples], label=kind, linewidth=1)
        axes.set_ylabel(title)
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
    rows[0].legend(loc="upper left", fontsize=8, ncol=3)
    rows[-1].set_xlabel("minutes")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench endurance", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--per-s", type=int, default=100, help="records a second")
    parser.add_argument("--png", type=Path, help="where to draw the plot")
    chosen = parser.parse_args(arguments)
    os.environ["BENCH"] = uuid.uuid4().hex  # marks the processes of this benchmark
    with tempfile.TemporaryDirectory(prefix="bench-") as name, Broker() as broker:
        tempfile.tempdir = os.environ["TMPDIR"] = name
        folder, servers = Path(name), broker.bootstrap_servers
        admin = AdminClient({"bootstrap.servers": servers})
        create_topic(admin, TOPIC, PARTITIONS)
        (metrics_port,) = free_ports(1)
        spark = session(folder)
        try:
            stream = spark.readStream.format("kafka-group").options(
                **{"kafka.bootstrap.servers": servers, "kafka.group.id": GROUP, "subscribe": TOPIC},
                memberHost="executor", groupMembers="2", startingOffsets="earliest", metricsPort=str(metrics_port),
            )  # fmt: skip
            sink = DeltaSink(f"{name}/table", optimize_every=OPTIMIZE_EVERY)
            writer = stream.load().writeStream.foreachBatch(sink)
            writer = writer.trigger(processingTime="1 second").option("checkpointLocation", f"{name}/checkpoint")
            with Flow(servers, TOPIC, PARTITIONS, per_s=chosen.per_s) as flow:
                query = writer.start()
                try:
                    with consumers(servers, folder) as others:
                        taken = watch(query, metrics_port, chosen.minutes)
                    flow.stop()
                    await_committed(admin, GROUP, [TOPIC])
                    counted = sum(int(run.get("possible_duplicates", 0)) for run in run_files.read(GROUP))
                finally:
                    query.stop()
            counts = Counter(records_in(folder / "table"))
            doubled = sum(count > 1 for count in counts.values())
            counts.update(record for other in others for record in other.processed())
            every = with_retries(lambda: produced(admin, [TOPIC]))
            by_right = sum(count > 1 for count in counts.values()) - doubled
            print(
                f"{len(every):,} records: {len(every - counts.keys())} lost, {doubled} twice in the table, {by_right} "
                f"in the table and at an ordinary consumer ({counted} possible duplicates in the statistics); "
                f"{len(others)} consumers joined and left",
                flush=True,
            )
            grew = report(taken)
            if chosen.png:
                plot(taken, chosen.png)
        finally:
            spark.stop()
    return int(bool(grew or doubled or every - counts.keys()))
