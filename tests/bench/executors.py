"""Compare members beside executors, members in the stream reader, and Spark's own Kafka connector in one run.

``python -m tests.bench executors [--records N] [--bytes N] [--partitions N] [--rounds N] [--only P]``

One broker, one Spark (``local[2]``: one executor, two tasks at a time), one topic that is filled once. Every run is a
new query with a new group, and the kinds take turns. Members are placed on agents after some seconds, so only the last
``--records`` of a run are measured, a fifth of the topic; runs of all kinds are measured alike. The parts:

- ``trigger``: a batch every few seconds, of the records that arrived meanwhile.
- ``bound``: the same from a Python source that does no work: the rate at which Spark takes rows from any Python source.
- ``network``: time from a record's timestamp to the end of its batch, at 20 MB/s with a sink that takes a second a
  batch, over a network with delay and limited rate.

Broker, JVM and Python share the machine's cores, so the figures serve to compare the kinds, not to plan capacity.
"""

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kit.broker_cluster import BrokerCluster
from kit.slow_network import SlowNetwork

from bench.report import (
    BROKER_JAVA,
    FLOOR,
    LATENCY_S,
    OURS,
    SETTLE_S,
    SIGNS,
    SPARKS,
    Flow,
    Stream,
    await_,
    done,
    ended_s,
    fill,
    session,
)
from spark_group_source.agents.agent_folder import AgentFolder, agents_directory
from spark_group_source.host.run_files import directory
from spark_group_source.local.broker import Broker, free_ports

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

KINDS: Mapping[str, Mapping[str, str]] = {
    SPARKS: {},
    "driver": {"memberHost": "driver"},
    "executor": {"memberHost": "executor", "groupMembers": "auto"},
}
FIFTHS = 5
"""Parts of the topic; the last one is measured."""
BOUND_WARM = 5
"""Batches of the idle source before the measured ones."""
EVERY_S = 6


LARGE_STREAM = Stream(per_s=20_000, record_bytes=1_000, sink_s=1.0)
ROUND_TRIP_MS, CONNECTION_MB_PER_S = 5.0, (25, 100)
"""The networks of the part ``network``: one round trip, and the rates of a connection."""


def floor(rows: int, size: int, partitions: int) -> Any:
    """A data source that does no work: its cost is that of Spark, the Arrow stream between worker and JVM, and the
    conversion to rows. Each task creates one Arrow batch, and returns it again and again.

    Args:
        rows: rows of a batch, each with a value of ``size`` bytes.
        partitions: tasks of a batch.

    Returns:
        The source's class, which is pickled by value.
    """
    from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

    from spark_group_source.options.table import COLUMNS
    from spark_group_source.reader.records import BATCH_ROWS_MAX, spark_ddl

    class Reader(DataSourceStreamReader):
        at = 0

        def initialOffset(self) -> dict[str, int]:
            return {"batch": 0}

        def latestOffset(self) -> dict[str, int]:  # type: ignore[override]
            self.at += 1
            return {"batch": self.at}

        def partitions(self, start: Any, end: Any) -> list[InputPartition]:
            return [InputPartition(number) for number in range(partitions)]

        def read(self, partition: InputPartition) -> Any:
            from datetime import UTC

            import pyarrow as pa

            from spark_group_source.reader.records import arrow_schema

            def batch(count: int) -> pa.RecordBatch:
                columns = [
                    pa.nulls(count, pa.binary()),
                    pa.array([os.urandom(size)] * count, pa.binary()),
                    pa.array(["bench"] * count),
                    pa.array([partition.value] * count, pa.int32()),
                    pa.array(range(count), pa.int64()),
                    pa.array([datetime.now(UTC)] * count, pa.timestamp("us", tz="UTC")),
                    pa.array([0] * count, pa.int32()),
                ]
                return pa.RecordBatch.from_arrays(columns, schema=arrow_schema(COLUMNS[:-1]))

            left = rows // partitions
            whole = batch(min(left, BATCH_ROWS_MAX))
            while left:
                part = whole.slice(0, min(left, whole.num_rows))
                left -= part.num_rows
                yield part

    class Floor(DataSource):
        @classmethod
        def name(cls) -> str:
            return FLOOR

        def schema(self) -> str:
            return spark_ddl(COLUMNS[:-1])

        def streamReader(self, schema: Any) -> DataSourceStreamReader:
            return Reader()

    return Floor


class Batch(NamedTuple):
    """A batch with rows."""

    rows: int
    began_s: float
    ended_s: float
    tasks_s: float


class Run(NamedTuple):
    tasks: float
    """Rows per second of the tasks."""
    whole: float
    """Rows per second of the whole batches."""
    cpu_s: dict[str, float]
    """By kind of process, per million records of the whole run."""
    from_memory: int
    rows: int
    """Both of the whole run: an agent serves rows before Spark reports their batch."""


def cpu_s() -> dict[str, float]:
    """The CPU time of all processes of this benchmark, by kind."""
    found = dict.fromkeys(SIGNS, 0.0)
    for pid, kind in processes(SIGNS):
        with contextlib.suppress(OSError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found[kind] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def processes(signs: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """The processes of this benchmark, each with the first kind whose sign is in its command."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environ = (process / "environ").read_bytes().split(b"\0")
            kind = next((kind for kind, sign in signs.items() if sign in command), None)
            if kind and f"BENCH={os.environ['BENCH']}".encode() in environ:
                yield int(process.name), kind


def agent_folders() -> list[AgentFolder]:
    folder = agents_directory()
    return [AgentFolder(path) for path in folder.iterdir()] if folder.is_dir() else []


def rows_from_memory() -> int:
    """Rows that tasks of the running queries read from agents."""
    found = [json.loads(path.read_text()) for path in directory().glob("*.json")]
    return sum(sum(run["rows_from_memory"]) for run in found)


def batches_of(query: "StreamingQuery") -> list[Batch]:
    found = []
    for p in done(query):
        end_s, took = ended_s(p), p["durationMs"]
        began_s = end_s - took["triggerExecution"] / 1000
        found.append(Batch(p["numInputRows"], began_s, end_s, took["addBatch"] / 1000))
    return found


class Bench:
    """The session, the broker, and a scratch directory."""

    def __init__(self, spark: "SparkSession", servers: str, scratch: Path) -> None:
        self._spark, self._servers, self._scratch = spark, servers, scratch

    @contextlib.contextmanager
    def query(
        self, kind: str, topic: str, *, every_s: int = 0, sink_s: float = 0.0, **more: Any
    ) -> "Iterator[StreamingQuery]":
        reader = self._spark.readStream.format(SPARKS if kind == SPARKS else OURS)
        reader = reader.option("kafka.bootstrap.servers", self._servers).option("subscribe", topic)
        reader = reader.option("startingOffsets", "earliest").options(**more)
        if kind != SPARKS:
            reader = reader.option("kafka.group.id", f"bench-{uuid.uuid4().hex}").options(**KINDS[kind])
        writer = reader.load().writeStream.trigger(processingTime=f"{every_s} seconds")
        writer = writer.foreachBatch(_slow_sink(sink_s)) if sink_s else writer.format("noop")
        query = writer.option("checkpointLocation", str(self._scratch / uuid.uuid4().hex)).start()
        try:
            yield query
        finally:
            query.stop()
            await_(lambda: not agent_folders(), "the end of the agents")

    def read(self, kind: str, records: int, *, every_s: int) -> Run:
        """Read the whole topic in batches of ``records``; the last one is measured."""
        before = cpu_s()
        with self.query(kind, "bench", every_s=every_s, maxOffsetsPerTrigger=records) as query:
            whole = FIFTHS * records
            await_(lambda: sum(b.rows for b in batches_of(query)) >= whole, "the end of the topic", query)
            from_memory, after = rows_from_memory(), cpu_s()
            found = batches_of(query)
        last = [batch for batch in found if batch.rows > records // 2][-1]
        total = sum(batch.rows for batch in found)
        if total != whole or abs(last.rows - records) > records // 100:  # Spark's batches are not quite even
            raise AssertionError(f"{kind}: {total} rows of {whole}, {last.rows} in the last full batch")
        used = {name: (after[name] - before[name]) / FIFTHS / records * 1e6 for name in before}
        whole_s = last.ended_s - last.began_s
        return Run(last.rows / last.tasks_s, last.rows / whole_s, used, from_memory, total)

    def compare(self, records: int, rounds: int) -> None:
        print(f"\nbatches of {records:,}, every {EVERY_S} s")
        runs: dict[str, list[Run]] = {kind: [] for kind in KINDS}
        for number in range(rounds):
            kinds = list(KINDS)
            for kind in kinds[number % len(kinds) :] + kinds[: number % len(kinds)]:
                run = self.read(kind, records, every_s=EVERY_S)
                runs[kind].append(run)
                used = ", ".join(f"{name} {s:.2f}" for name, s in run.cpu_s.items() if s > 0.005)
                print(
                    f"  round {number + 1} {kind:9} {run.tasks:10,.0f} rows/s of the tasks {run.whole:10,.0f} of the "
                    f"batches; {run.from_memory:9,} of all {run.rows:,} rows from memory; CPU s a million: {used}",
                    flush=True,
                )
        for what, of in (("tasks", lambda run: run.tasks), ("batches", lambda run: run.whole)):
            median = {kind: statistics.median(map(of, found)) for kind, found in runs.items()}
            shown = ", ".join(f"{kind} {rate:,.0f}" for kind, rate in median.items())
            most = median.pop("executor")
            ratios = ", ".join(f"{most / rate:.2f} x {kind}" for kind, rate in median.items())
            print(f"  rows/s of the {what}, medians: {shown}: executor is {ratios}", flush=True)

    def bound(self, rounds: int, *, records: int, size: int, partitions: int) -> None:
        """Measure the idle source."""
        self._spark.dataSource.register(floor(records, size, partitions))
        reader = self._spark.readStream.format(FLOOR)
        writer = reader.load().writeStream.format("noop").trigger(processingTime=f"{EVERY_S} seconds")
        query = writer.option("checkpointLocation", str(self._scratch / uuid.uuid4().hex)).start()
        before = cpu_s()
        try:
            await_(lambda: len(done(query)) > BOUND_WARM + rounds, "batches of the idle source", query)
            used, found = cpu_s(), done(query)
        finally:
            query.stop()
        rates = [records / p["durationMs"]["addBatch"] * 1000 for p in found[BOUND_WARM:]]
        used_by = ", ".join(
            f"{name} {(used[name] - before[name]) / records / len(found) * 1e6:.2f}" for name in ("worker", "JVM")
        )
        print(f"  rows/s of the tasks, median: {statistics.median(rates):,.0f}; CPU s a million: {used_by}", flush=True)

    def latency(self, kind: str, stream: Stream) -> None:
        """Measure the time from each record's timestamp to the end of its batch."""
        with Flow(self._servers, stream) as flow, self.query(kind, flow.topic, sink_s=stream.sink_s) as query:
            threading.Event().wait(SETTLE_S + LATENCY_S)
            found = flow.latency(query)
            from_memory = rows_from_memory()
        print(
            f"  {kind:9} p50 {found['p50 ms']:5.0f} ms, p99 {found['p99 ms']:5.0f} ms; "
            f"{from_memory:,} rows from memory in all",
            flush=True,
        )


def _slow_sink(sink_s: float) -> "Callable[[DataFrame, int], None]":
    def write(batch: "DataFrame", _: int) -> None:
        batch.write.format("noop").mode("append").save()
        threading.Event().wait(sink_s)

    return write


def network(spark: "SparkSession", scratch: Path, rounds: int) -> None:
    """Measure the latency of a large stream over a network with delay."""
    (port,) = free_ports(1)
    with BrokerCluster(1, advertised=[port], java_options=BROKER_JAVA) as cluster:
        print("\nwarm-up, without the proxy", flush=True)
        for kind in ("driver", "executor"):
            Bench(spark, cluster.direct_servers, scratch).latency(kind, Stream())
        bench = Bench(spark, f"127.0.0.1:{port}", scratch)
        for mb_per_s in CONNECTION_MB_PER_S:
            print(
                f"\n{LARGE_STREAM.per_s:,} records a second of {LARGE_STREAM.record_bytes:,} bytes, a sink of "
                f"{LARGE_STREAM.sink_s:.0f} s a batch, round trip {ROUND_TRIP_MS:.0f} ms, {mb_per_s} MB/s a connection",
                flush=True,
            )
            target = cluster.ports[1]
            with SlowNetwork(port, target, round_trip_ms=ROUND_TRIP_MS, bytes_per_s=mb_per_s * 1e6) as proxy:
                for kind in ("driver", "executor") * rounds:
                    before_s, cpu_before_s = time.monotonic(), proxy.cpu_s
                    bench.latency(kind, LARGE_STREAM)
                    cores = (proxy.cpu_s - cpu_before_s) / (time.monotonic() - before_s)
                    print(f"            the proxy used {cores:.2f} cores", flush=True)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench executors", description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--bytes", type=int, default=100)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parts = ["trigger", "bound", "network"]
    parser.add_argument("--only", action="append", choices=parts)
    chosen = parser.parse_args(arguments)
    wanted = chosen.only or parts
    os.environ["BENCH"] = uuid.uuid4().hex  # marks the processes of this benchmark
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, Broker(java_options=BROKER_JAVA) as broker:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        servers, records = broker.bootstrap_servers, chosen.records
        print(f"{records:,} records of {chosen.bytes} bytes measured of {FIFTHS * records:,}, in {chosen.partitions} "
              f"partitions, {os.cpu_count()} cores", flush=True)  # fmt: skip
        if "trigger" in wanted:
            fill(servers, "bench", records=FIFTHS * records, size=chosen.bytes, partitions=chosen.partitions)
        spark = session(Path(folder))
        try:
            bench = Bench(spark, servers, Path(folder))
            if "trigger" in wanted:
                for kind in KINDS:  # warm-up of the JVM
                    bench.read(kind, records, every_s=0)
                bench.compare(records, chosen.rounds)
            if "bound" in wanted:
                print(f"\nbatches of {records:,}, every {EVERY_S} s, from an idle source")
                bench.bound(max(chosen.rounds, 3), records=records, size=chosen.bytes, partitions=chosen.partitions)
            if "network" in wanted:
                network(spark, Path(folder), max(1, chosen.rounds // 2))
        finally:
            spark.stop()
    return 0
