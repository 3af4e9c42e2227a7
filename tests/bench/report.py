"""Compare this source and Spark's own Kafka connector, case by case, in one run.

``python -m tests.bench report [--rounds N] [--quick] [--only CASE ...] [--master M] [--json FILE] [--png FILE]``

One broker and one Spark: ``local[2]``, or a ``--master`` such as ``local-cluster[4,1,1024]`` for four executors.
In each case the sources take turns; every measurement is a new query with a new checkpoint (and a new group). Most
cases are warmed up once. The figure is the median of the rounds, shown with the lowest and the highest. The last column
is a ratio: how many times as fast as Spark's connector, or as cheap. Cases:

- ``noop``, ``delta``, ``columns``: a full topic with the AvailableNow trigger, into no table, into a Delta table, and
  with only ``value`` and ``timestamp``. ``delta`` also has a program without Spark: a consumer and ``deltalake``. In
  one batch, which also creates the table.
- ``delta, later batches``: the same in four batches, the tasks without those of the first one; and with ``options``, by
  Delta's writer options.
- ``1 KiB`` to ``1 MB``, ``lz4``, ``zstd``, ``headers``: the same with other records.
- ``latency``: the time from a record's timestamp to the end of its batch, at a constant rate, with a batch after the
  other or one every second.
- ``first``: from ``start()`` to the end of the first batch, and CPU time until the query has stopped; also of
  ``floor``, a Python source that does nothing: what Spark itself takes to start one.
- ``restart``: from the start of a program whose predecessor was killed to its first rows.
- ``10 partitions`` to ``10,000 partitions``: one new record in each, every half second. ``idle``: no records at all.

Only if they are named: the latency at other rates than 1,000 records a second, or with a trigger, and more than 10
partitions.

CPU time is that of all processes but the broker. Broker, JVM and Python share the machine's cores, so the figures serve
to compare the sources, not to plan capacity.
"""

import argparse
import contextlib
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic  # type: ignore[attr-defined]  # the stub hides it
from kit.spark_kafka import spark_kafka_jars

from spark_group_source.delta import Writer
from spark_group_source.delta.sink import DeltaSink
from spark_group_source.local.broker import Broker
from spark_group_source.local.conf import local_spark_settings
from spark_group_source.protocol.offsets import parse
from spark_group_source.source import KafkaGroupDataSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import DataStreamWriter, StreamingQuery

BROKER_JAVA = ("-Xms512m", "-Xmx1g", "-XX:+UseSerialGC")
"""With both compilers: the broker must not be the bottleneck."""
QUERY_S = 900
"""Bound of one run; most take seconds."""
OURS, SPARKS, BY_HAND, FLOOR = "kafka-group", "kafka", "by hand", "floor"
RECORD_MAX = 1_200_000
"""Bytes that the broker accepts, for records of 1 MB."""
LARGE = 100_000_000
"""Bytes of the topics with large records."""
LATENCY_S, SETTLE_S = 15, 10
"""Duration of a latency measurement, and of the production before it."""
LAST = 20
"""Batches of which the median duration is taken."""
EVERY_S, BATCHES = 0.5, 8
"""Of the cases with many partitions: the interval of the records, and how many batches are measured."""
MANY, FEW_BATCHES = 1_000, 2
"""From so many partitions on, only so many batches: with Spark's connector, each takes minutes."""
AT_ONCE = 5_000
"""Partitions in one request: the controller refuses 10,000 and more."""
IDLE_S = 20
CHILD = "--child"
SAMPLE_S = 0.1
SIGNS = {
    "agent": "spark-group-agent",
    "stream reader": "python_streaming_source_runner",
    "worker": "pyspark.daemon",
    "JVM": "org.apache.spark.deploy.SparkSubmit",
    "executor": "CoarseGrainedExecutorBackend",  # with --master local-cluster
}
"""Kinds of processes, by what their command contains."""
JVMS = ("JVM", "executor")

Figures = dict[str, float]
Write = Callable[["DataStreamWriter", str, Path], "DataStreamWriter"]
"""Adds the sink: from a writer, the source's name and a scratch folder."""


class Lab(NamedTuple):
    spark: "SparkSession"
    servers: str
    scratch: Path
    topics: set[str]
    """Those that are filled."""

    def folder(self) -> Path:
        return self.scratch / uuid.uuid4().hex


class Case(NamedTuple):
    measure: Callable[[Lab, str], Figures]
    """One measurement of a source: its figures, in units that their names give."""
    topic: Mapping[str, Any] = {}
    """What to fill before, as :func:`fill` takes it."""
    kinds: tuple[str, ...] = (OURS, SPARKS)
    rounds_max: int = 99
    is_quick: bool = False
    is_extra: bool = False  # measured only if it is named
    settles: bool = False  # takes long enough to need no warm-up


class Stream(NamedTuple):
    """Records that are produced at a constant rate, and the time that the sink takes for each batch."""

    per_s: float = 1_000
    record_bytes: int = 100
    sink_s: float = 0.0


# --- records, session, query -----------------------------------------------------------------------------------------


def fill(
    servers: str, topic: str, *, records: int, size: int, partitions: int, codec: str = "none", headers: int = 0
) -> None:
    """Create the topic with ``records`` records of ``size`` bytes, evenly over the partitions. Half of each is random,
    so that it does not compress well."""
    config = {"max.message.bytes": str(RECORD_MAX)}
    if partitions >= MANY:
        config["segment.index.bytes"] = "4096"  # thousands of index files are mapped into memory at once
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic(topic, min(partitions, AT_ONCE), 1, config=config)])[topic].result(120)
    for count in range(2 * AT_ONCE, partitions + AT_ONCE, AT_ONCE):
        admin.create_partitions([NewPartitions(topic, min(count, partitions))])[topic].result(120)
    append(servers, topic, records=records, size=size, partitions=partitions, codec=codec, headers=headers)


def append(
    servers: str, topic: str, *, records: int, size: int, partitions: int, codec: str = "none", headers: int = 0
) -> None:
    """Write such records to a topic that exists."""
    producer = Producer(
        {
            "bootstrap.servers": servers,
            "linger.ms": 50,
            "batch.size": 1_000_000,
            "message.max.bytes": RECORD_MAX,
            "compression.type": codec,
            "queue.buffering.max.messages": 200_000,
        }
    )
    extra: Any = [(f"header-{number}", b"x" * 20) for number in range(headers)] or None
    for number in range(records):
        value = (b"%012d" % number + os.urandom(size // 2)).ljust(size, b".")[:size]
        while True:
            try:
                producer.produce(topic, value, partition=number % partitions, headers=extra)
                break
            except BufferError:
                producer.poll(0.1)
    if producer.flush(QUERY_S):
        raise TimeoutError(f"the records were not written within {QUERY_S} s")


def session(scratch: Path, master: str = "local[2]") -> "SparkSession":
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the workers' Python; the setting alone has no effect
    settings = local_spark_settings(scratch, avro=True)
    jars = ",".join([settings["spark.jars"], *map(str, spark_kafka_jars())])
    builder = SparkSession.builder.master(master).appName("bench")
    made = builder.config(map={**settings, "spark.jars": jars}).getOrCreate()
    made.sparkContext.setLogLevel("OFF")
    made.dataSource.register(KafkaGroupDataSource)
    return made


def noop(writer: "DataStreamWriter", _: str, __: Path) -> "DataStreamWriter":
    return writer.format("noop")


def delta(writer: "DataStreamWriter", kind: str, folder: Path, way: Writer = "native") -> "DataStreamWriter":
    if kind == OURS:
        return writer.foreachBatch(DeltaSink(folder / "table", writer=way))
    return writer.format("delta").option("path", str(folder / "table"))


def delta_options(writer: "DataStreamWriter", kind: str, folder: Path) -> "DataStreamWriter":
    return delta(writer, kind, folder, "options")


def writer_of(
    lab: Lab,
    kind: str,
    topic: str,
    write: Write = noop,
    *,
    select: Sequence[str] = (),
    folder: Path | None = None,
    options: Mapping[str, str] = {},
) -> "DataStreamWriter":
    """A query on a topic that is not started. Without a folder its checkpoint and its group are new."""
    folder = folder or lab.folder()
    reader = lab.spark.readStream.format(kind).option("kafka.bootstrap.servers", lab.servers)
    reader = reader.option("subscribe", topic).option("startingOffsets", "earliest").options(**options)
    if kind == OURS:
        reader = reader.option("kafka.group.id", f"bench-{folder.name}")
        reader = reader.option("columns", ",".join(select)) if select else reader
    rows = reader.load()
    writer = write((rows.select(*select) if select else rows).writeStream, kind, folder)
    return writer.option("checkpointLocation", str(folder / "checkpoint"))


@contextlib.contextmanager
def running(writer: "DataStreamWriter") -> Iterator["StreamingQuery"]:
    query = writer.start()
    try:
        yield query
    finally:
        query.stop()


def run_to_end(writer: "DataStreamWriter") -> "StreamingQuery":
    """Run a query with AvailableNow."""
    query, batch = writer.trigger(availableNow=True).start(), None
    while not query.awaitTermination(QUERY_S):
        last = query.lastProgress
        if last is None or last["batchId"] == batch:
            query.stop()
            raise TimeoutError(f"the query ended no batch within {QUERY_S} s")
        batch = last["batchId"]
    return query


def done(query: "StreamingQuery") -> list[Any]:
    """The progress of each batch with rows."""
    return [progress for progress in query.recentProgress if progress["numInputRows"]]


def await_(holds: Callable[[], bool], what: str, query: "StreamingQuery | None" = None) -> None:
    pause, until_s = threading.Event(), time.monotonic() + QUERY_S
    while not holds():
        if query is not None and not query.isActive:
            raise AssertionError(f"the query ended: {query.exception()}")
        if time.monotonic() > until_s:
            raise TimeoutError(f"{what} took more than {QUERY_S} s")
        pause.wait(0.1)


def ended_s(progress: Any) -> float:
    """When a batch ended, on the clock of ``time.time()``."""
    began_s = datetime.fromisoformat(progress["timestamp"]).timestamp()
    return float(began_s + progress["durationMs"]["triggerExecution"] / 1000)


def phase_ms(batches: Sequence[Any], *phases: str) -> float:
    """How long these phases of a batch took together, median of the last ones. Spark runs the tasks in addBatch."""
    return float(statistics.median(sum(each["durationMs"][phase] for phase in phases) for each in batches[-LAST:]))


def ends(source: Any) -> dict[int, int]:
    """The end of a batch in each partition of its only topic."""
    end = source["endOffset"]
    doc = json.loads(end) if isinstance(end, str) else end
    if "topics" in doc:
        return {tp.partition: until for tp, until in parse(doc).positions().items()}
    (only,) = doc.values()  # Spark's own
    return {int(partition): until for partition, until in only.items()}


class Usage:
    """Measures the CPU time of Spark's processes, and the peak memory of each kind. What a process uses after its last
    sample is missing."""

    def __init__(self) -> None:
        self.cpu_s: dict[str, float] = {}
        """By kind of process."""
        self.peak_mib: dict[str, int] = {}
        self._before, self._ticks, self._kinds = dict[int, int](), dict[int, int](), dict[int, str]()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="usage", daemon=True)

    def __enter__(self) -> "Usage":
        self._sample(resets=True)
        self._before = dict(self._ticks)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()
        for pid, ticks in self._ticks.items():
            used_s = (ticks - self._before.get(pid, 0)) / os.sysconf("SC_CLK_TCK")
            self.cpu_s[self._kinds[pid]] = self.cpu_s.get(self._kinds[pid], 0.0) + used_s

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self._sample()

    def _sample(self, *, resets: bool = False) -> None:
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, StopIteration):
                command = (process / "cmdline").read_bytes().decode(errors="replace")
                kind = next(kind for kind, sign in SIGNS.items() if sign in command)
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                self._ticks[int(process.name)] = int(fields[11]) + int(fields[12])
                self._kinds[int(process.name)] = kind
                if resets:
                    (process / "clear_refs").write_text("5")  # the peak starts again: Spark's workers are reused
                    continue
                peak = next(x for x in (process / "status").read_text().splitlines() if x.startswith("VmHWM:"))
                self.peak_mib[kind] = max(self.peak_mib.get(kind, 0), int(peak.split()[1]) // 1024)


# --- cases -----------------------------------------------------------------------------------------------------------


def backlog(
    topic: str,
    records: int,
    write: Write = noop,
    *,
    select: Sequence[str] = (),
    options: Mapping[str, str] = {},
    batches: int = 1,
) -> Any:
    """A case: read a full topic. Of several batches, the tasks of the first one are not measured."""
    if batches > 1:
        options = {**options, "maxOffsetsPerTrigger": str(records // batches)}

    def measure(lab: Lab, kind: str) -> Figures:
        began_s = time.monotonic()
        if kind == BY_HAND:
            per_s = by_hand(lab, topic, records) / (time.monotonic() - began_s)
            return {"records/s of the tasks": per_s, "records/s of the query": per_s}
        writer = writer_of(lab, kind, topic, write, select=select, options=options)
        began_s = time.monotonic()
        with Usage() as usage:
            query = run_to_end(writer)
        query_s = time.monotonic() - began_s
        rows = sum(progress["numInputRows"] for progress in done(query))
        if rows != records:
            raise AssertionError(f"{kind} read {rows} rows of {records}")
        if len(done(query)) != batches:
            raise AssertionError(f"{kind} read {len(done(query))} batches instead of {batches}")
        measured = done(query)[batches > 1 :]
        tasks_s = sum(progress["durationMs"]["addBatch"] for progress in measured) / 1000
        return {
            "records/s of the tasks": sum(progress["numInputRows"] for progress in measured) / tasks_s,
            "records/s of the query": rows / query_s,
            **cpu(usage),
            **{f"peak MiB, {kind}": mib for kind, mib in usage.peak_mib.items() if kind not in JVMS},
        }

    return measure


def by_hand(lab: Lab, topic: str, records: int) -> int:
    """What one writes without Spark: it is neither exactly once nor parallel."""
    import pyarrow as pa
    from deltalake import write_deltalake

    settings = {"bootstrap.servers": lab.servers, "group.id": uuid.uuid4().hex, "auto.offset.reset": "earliest"}
    consumer = Consumer(settings | {"enable.auto.commit": "false"})
    consumer.subscribe([topic])
    found: list[Any] = []
    while len(found) < records:
        found += consumer.consume(10_000, 1.0)
    columns = {
        "key": pa.array([record.key() for record in found], pa.binary()),
        "value": pa.array([record.value() for record in found], pa.binary()),
        "topic": pa.array([record.topic() for record in found]),
        "partition": pa.array([record.partition() for record in found], pa.int32()),
        "offset": pa.array([record.offset() for record in found], pa.int64()),
        "timestamp": pa.array([record.timestamp()[1] * 1000 for record in found], pa.timestamp("us", tz="UTC")),
        "timestampType": pa.array([0] * len(found), pa.int32()),
    }
    write_deltalake(lab.folder() / "table", pa.table(columns))
    consumer.commit(asynchronous=False)
    consumer.close()
    return len(found)


class Flow:
    """Produces records to a new topic at a constant rate, and knows when each was produced."""

    def __init__(self, servers: str, stream: Stream, partitions: int = 4) -> None:
        self.topic = f"flow-{uuid.uuid4().hex[:8]}"
        fill(servers, self.topic, records=partitions, size=100, partitions=partitions)
        self.written_s = [[time.time()] for _ in range(partitions)]
        self._stream, self._stop = stream, threading.Event()
        self._producer = Producer({"bootstrap.servers": servers, "linger.ms": 1})
        self._thread = threading.Thread(target=self._produce, name="flow", daemon=True)

    def __enter__(self) -> "Flow":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)
        self._producer.flush(10)

    def _produce(self) -> None:
        began_s, count, value = time.time(), 0, os.urandom(self._stream.record_bytes)
        while not self._stop.wait(0.01):
            while count < (time.time() - began_s) * self._stream.per_s:
                partition, at_s = count % len(self.written_s), time.time()
                try:
                    self._producer.produce(self.topic, value, partition=partition)
                except BufferError:
                    self._producer.poll(0.1)
                    continue
                self.written_s[partition].append(at_s)
                count += 1
            self._producer.poll(0)

    def latency(self, query: "StreamingQuery") -> Figures:
        """From each record's timestamp to the end of its batch, of the last :data:`LATENCY_S`."""
        found, took_ms = done(query), []
        if len(found) < 2:
            raise AssertionError(f"{len(found)} batches: {query.exception()}")
        since_s = ended_s(found[-1]) - LATENCY_S
        for before, batch in itertools.pairwise(found):
            if (end_s := ended_s(batch)) >= since_s:
                starts = ends(before["sources"][0])
                for p, end in ends(batch["sources"][0]).items():
                    took_ms += [(end_s - at_s) * 1000 for at_s in self.written_s[p][starts.get(p, 0) : end]]
        took_ms.sort()
        p50_ms, p99_ms = statistics.median(took_ms), took_ms[len(took_ms) * 99 // 100]
        return {
            "p50 ms": p50_ms,
            "p99 ms": p99_ms,
            "ms of the tasks": phase_ms(found, "addBatch"),
            "ms of the next offset": phase_ms(found, "latestOffset"),
            "ms of Spark's checkpoint": phase_ms(found, "walCommit", "commitOffsets"),
        }


def register_floor(lab: Lab) -> None:
    """Register a Python source that does nothing, with few rows in each batch."""
    from bench.executors import floor  # which uses this module

    lab.spark.dataSource.register(floor(4, 100, 2))


def latency(per_s: float, trigger_s: int = 0) -> Any:
    """A case: batch after batch of a steady stream."""

    def measure(lab: Lab, kind: str) -> Figures:
        if kind == FLOOR:
            register_floor(lab)
            with running(writer_of(lab, kind, "none")) as query:
                threading.Event().wait(SETTLE_S)
                return {"ms of the tasks": phase_ms(done(query), "addBatch")}
        with Flow(lab.servers, Stream(per_s)) as flow:
            writer = writer_of(lab, kind, flow.topic).trigger(processingTime=f"{trigger_s} seconds")
            with running(writer) as query:
                threading.Event().wait(SETTLE_S + LATENCY_S)
                return flow.latency(query)

    return measure


def first(topic: str) -> Any:
    """A case: the first batch of a new query."""

    def measure(lab: Lab, kind: str) -> Figures:
        if kind == FLOOR:
            register_floor(lab)
        writer, began_s = writer_of(lab, kind, topic), time.time()
        with Usage() as usage, running(writer) as query:
            await_(lambda: bool(done(query)), "the first batch", query)
            took_s = ended_s(done(query)[0]) - began_s
        return {"s": took_s, **cpu(usage)}

    return measure


def idle(topic: str) -> Any:
    """A case: a query without records."""

    def measure(lab: Lab, kind: str) -> Figures:
        with running(writer_of(lab, kind, topic)) as query:
            await_(lambda: bool(done(query)), "the first batch", query)
            with Usage() as usage:
                threading.Event().wait(IDLE_S)
            return {"% of a core": sum(usage.cpu_s.values()) / IDLE_S * 100}

    return measure


def trickle(partitions: int) -> Any:
    """A case: one record in each of many partitions, again and again."""
    batches = BATCHES if partitions < MANY else FEW_BATCHES

    def measure(lab: Lab, kind: str) -> Figures:
        topic = f"many-{uuid.uuid4().hex[:8]}"
        fill(lab.servers, topic, records=partitions, size=100, partitions=partitions)
        writer, began_s, stop = writer_of(lab, kind, topic), time.time(), threading.Event()
        producer = Producer({"bootstrap.servers": lab.servers})

        def produce() -> None:
            while not stop.wait(EVERY_S):
                for partition in range(partitions):
                    producer.produce(topic, b"x" * 100, partition=partition)
                producer.flush(60)

        thread = threading.Thread(target=produce, name="producer", daemon=True)
        with running(writer) as query:
            try:
                await_(lambda: bool(done(query)), "the first batch", query)
                first_s = ended_s(done(query)[0]) - began_s
                thread.start()
                await_(lambda: len(done(query)) > batches, "later batches", query)
            finally:
                stop.set()
            later_ms = [progress["durationMs"]["triggerExecution"] for progress in done(query)[1 : batches + 1]]
        thread.join(60)
        return {"first batch, s": first_s, "later ones, s": statistics.median(later_ms) / 1000}

    return measure


def restart(topic: str) -> Any:
    """A case: a program is killed with its Spark, and started again."""

    def measure(lab: Lab, kind: str) -> Figures:
        command = [sys.executable, "-m", "tests.bench", "report", CHILD, kind, lab.servers, topic, str(lab.folder())]
        command.append(lab.spark.conf.get("spark.master") or "")
        producer, took_s = Producer({"bootstrap.servers": lab.servers}), 0.0
        for _ in range(2):
            producer.produce(topic, b"x" * 100, partition=0)
            producer.flush(10)
            began_s = time.monotonic()
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
            try:
                assert child.stdout is not None
                if b"rows\n" not in iter(child.stdout.readline, b""):
                    raise AssertionError(f"{kind}: the program ended without rows")
                took_s = time.monotonic() - began_s
            finally:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        return {"s": took_s}

    return measure


def child(arguments: Sequence[str]) -> int:
    """The program of the case ``restart``."""
    kind, servers, topic, folder, master = arguments
    Path(folder).mkdir(exist_ok=True)
    lab = Lab(session(Path(folder), master), servers, Path(folder), set())
    query = writer_of(lab, kind, topic, folder=Path(folder)).start()
    await_(lambda: bool(done(query)), "the first rows", query)
    print("rows", flush=True)
    query.awaitTermination()
    return 0


def cases(million: int) -> dict[str, Case]:
    """All cases, by name."""
    full, small = {"topic": "full", "records": million, "size": 100}, {"topic": "small", "records": 4, "size": 100}
    sizes = {"1 KiB": 1_024, "100 KiB": 102_400, "1 MB": 1_000_000}
    formats: dict[str, dict[str, Any]] = {"lz4": {"codec": "lz4"}, "zstd": {"codec": "zstd"}, "headers": {"headers": 3}}
    found = {
        "noop": Case(backlog("full", million), full, is_quick=True),
        "columns": Case(backlog("full", million, select=("value", "timestamp")), full),
        "delta": Case(backlog("full", million, delta), full, (OURS, SPARKS, BY_HAND), is_quick=True),
        "delta, later batches": Case(backlog("full", million, delta, batches=4), full),
        "delta, options, later batches": Case(backlog("full", million, delta_options, batches=4), full),
    }
    for name, size in sizes.items():
        topic, records = f"of-{size}", max(4, min(million, LARGE // size))
        found[name] = Case(backlog(topic, records), {"topic": topic, "records": records, "size": size})
    for name, form in formats.items():
        options = {"includeHeaders": "true"} if "headers" in form else {}
        content = {"topic": name, "records": million // 2, "size": 100, **form}
        found[name] = Case(backlog(name, million // 2, options=options), content)
    return found | {
        "latency, 1 record/s": Case(latency(1), is_extra=True, settles=True),
        "latency, 1,000 records/s": Case(latency(1_000), kinds=(OURS, SPARKS, FLOOR), is_quick=True, settles=True),
        "latency, 20,000 records/s": Case(latency(20_000), is_extra=True, settles=True),
        "latency, 1 record/s, trigger 1 s": Case(latency(1, 1), is_extra=True, settles=True),
        "latency, 1,000 records/s, trigger 1 s": Case(latency(1_000, 1), is_extra=True, settles=True),
        "latency, 20,000 records/s, trigger 1 s": Case(latency(20_000, 1), is_extra=True, settles=True),
        "first": Case(first("small"), small, (OURS, SPARKS, FLOOR), is_quick=True),
        "restart": Case(restart("again"), small | {"topic": "again"}, rounds_max=3),
        "10 partitions": Case(trickle(10), rounds_max=3),
        "1,000 partitions": Case(trickle(1_000), rounds_max=1, is_extra=True),
        # Spark's connector would need an hour.
        "10,000 partitions": Case(trickle(10_000), kinds=(OURS,), rounds_max=1, is_extra=True),
        "idle": Case(idle("small"), small, is_quick=True, settles=True),
    }


# --- report ----------------------------------------------------------------------------------------------------------


def cpu(usage: Usage) -> Figures:
    """The CPU time of all processes, and of each kind."""
    return {"CPU s": sum(usage.cpu_s.values())} | {f"CPU s, {kind}": each for kind, each in usage.cpu_s.items()}


def ratio(figure: str, medians: Mapping[str, float]) -> float | None:
    """How many times as fast, or as cheap, as Spark's connector; None if only one of them has such a figure, or for one
    kind of process."""
    if "peak" in figure or "CPU s," in figure or not {OURS, SPARKS} <= medians.keys():
        return None
    ours, sparks = medians[OURS], medians[SPARKS]
    return ours / sparks if "records/s" in figure else sparks / ours


def play(lab: Lab, chosen: Mapping[str, Case], rounds: int) -> Iterator[dict[str, Any]]:
    """Measure the cases. Prints each figure, and yields all so far."""
    report: dict[str, Any] = {}
    for name, case in chosen.items():
        if case.topic and case.topic["topic"] not in lab.topics:
            fill(lab.servers, partitions=4, **case.topic)
            lab.topics.add(case.topic["topic"])
        if case.rounds_max > 1 and not case.settles:  # a warm-up
            for kind in case.kinds:
                case.measure(lab, kind)
        found: dict[str, dict[str, list[float]]] = {}
        for number in range(min(rounds, case.rounds_max)):
            for kind in case.kinds if number % 2 else reversed(case.kinds):
                for figure, value in case.measure(lab, kind).items():
                    found.setdefault(figure, {}).setdefault(kind, []).append(value)
        for figure, values in found.items():
            times = ratio(figure, {kind: statistics.median(each) for kind, each in values.items()})
            report[f"{name}: {figure}"] = {**values, "ratio": times}
            shown = "  ".join(f"{kind} {shorter(values[kind])}" for kind in case.kinds if kind in values)
            print(f"{name + ': ' + figure:50} {shown}" + (f"  {times:5.2f} x" if times else ""), flush=True)
        yield report


def shorter(values: Sequence[float]) -> str:
    """The median, with the lowest and highest."""
    digits = 0 if statistics.median(values) >= 100 else 2
    low, middle, high = (f"{value:,.{digits}f}" for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} to {high})"


def draw(report: Mapping[str, Any], machine: str, path: Path) -> None:
    """Draw the ratios as bars."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    compared = {name: figure["ratio"] for name, figure in report.items() if figure["ratio"]}
    names, ratios = list(compared), list(compared.values())
    figure, axes = plt.subplots(figsize=(9, 0.3 * len(names) + 1.5))
    axes.barh(names, ratios, color=["#2a7" if each >= 1 else "#c63" for each in ratios])
    axes.axvline(1, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(min(0.25, *ratios) * 0.9, max(5, *ratios) * 1.5)
    axes.set_xticks([0.25, 0.5, 1, 2, 4, 8], ["0.25", "0.5", "1", "2", "4", "8"])
    axes.minorticks_off()
    axes.margins(y=0.01)
    for at, each in enumerate(ratios):
        axes.text(each, at, f" {each:.2f}", va="center", fontsize=8)
    axes.set_xlabel("times as fast, or as cheap, as Spark's connector")
    axes.set_title(machine, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def machine() -> str:
    with open("/proc/meminfo") as file:
        gib = int(file.readline().split()[1]) / 2**20
    return f"{os.cpu_count()} cores, {gib:.0f} GiB, {platform.system()}, Python {platform.python_version()}"


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == [CHILD]:
        return child(arguments[1:])
    every = cases(1_000_000)
    parser = argparse.ArgumentParser(prog="python -m tests.bench report", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of the most important cases")
    parser.add_argument("--only", action="append", choices=list(every), metavar="CASE", help="once or more")
    parser.add_argument("--master", default="local[2]", help="Spark's; the default is %(default)s")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    parser.add_argument("--png", type=Path, help="where to draw the ratios")
    chosen = parser.parse_args(arguments)
    named = chosen.only or [name for name, case in every.items() if not case.is_extra]
    wanted = {name: every[name] for name in every if name in named and (every[name].is_quick or not chosen.quick)}
    settings = {"message.max.bytes": str(RECORD_MAX)}
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        Broker(java_options=BROKER_JAVA, settings=settings) as broker,
    ):
        spark = session(Path(folder), chosen.master)
        try:
            lab = Lab(spark, broker.bootstrap_servers, Path(folder), set())
            print(
                f"{machine()}, Spark {spark.version}, {chosen.master}: median (lowest to highest), and the ratio",
                flush=True,
            )
            for report in play(lab, wanted, 1 if chosen.quick else chosen.rounds):
                if chosen.json:
                    chosen.json.write_text(
                        json.dumps({"machine": f"{machine()}, {chosen.master}", "figures": report}, indent=1)
                    )
                if chosen.png:
                    draw(report, machine(), chosen.png)
        finally:
            spark.stop()
    return 0
