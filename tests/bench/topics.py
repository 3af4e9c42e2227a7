"""A group with thousands of topics, of which a few are busy: duration of the batches, sizes of all messages, memory.

``python -m tests.bench topics [--topics N] [--each PARTITIONS] [--busy N] [--batches N]``

One broker, one Spark with two executors (``local-cluster``), members on agents, ``subscribePattern``, topic names of
200 characters, and a Delta table. Each partition has one record at the start. After the first batch the busy partitions
get a record every half second. At the end each record must be in the table once, and committed. Printed are the largest
message of each kind on the control channel and on the agents' sockets, which a hook in Spark's Python processes records
(``sitecustomize``), and what is persisted.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # the stub hides it
from delta_files import living_rows
from kafka_helpers import await_progress, committed_of
from rich.console import Console
from rich.table import Table

from bench import endurance
from spark_group_source import DeltaSink
from spark_group_source.host import run_files
from spark_group_source.local.broker import JAVA_OPTIONS, Broker

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

GROUP, NAME_CHARS = "topics", 200
CREATED_AT_ONCE = 100
ANSWER_S = 600
"""Ends a request that hangs."""
EVERY_S = 0.5
SAMPLE_S = 5.0
HEAP = ("-Xmx2g",)
BROKER_SETTINGS = {"log.index.size.max.bytes": "4096"}
"""Two small index files a partition: thousands of them are mapped into memory at once."""

HOOK = '''"""Record the size of the largest message of each kind."""
import os
from spark_group_source.agents.channel.wire import Codec

largest = {}

def recorded(name, size):
    if size > largest.get(name, 0):
        largest[name] = size
        with open(os.path.join(os.environ["BENCH_SIZES"], f"{os.getpid()}-{name}"), "w") as file:
            file.write(str(size))

def encode(self, message, _encode=Codec.encode):
    data = _encode(self, message)
    recorded(type(message).__name__, len(data))
    return data

def decode(self, data, _decode=Codec.decode):
    found = _decode(self, data)
    recorded(type(found).__name__, len(data))
    return found

Codec.encode, Codec.decode = encode, decode
'''


def create_topics(admin: AdminClient, topics: int, partitions: int) -> list[str]:
    names = [f"orders.{number}.".ljust(NAME_CHARS, "x") for number in range(topics)]
    for first in range(0, topics, CREATED_AT_ONCE):
        part = [NewTopic(name, partitions, 1) for name in names[first : first + CREATED_AT_ONCE]]
        for future in admin.create_topics(part, operation_timeout=ANSWER_S).values():
            future.result(ANSWER_S)
    await_progress(
        lambda: topics <= len(admin.list_topics(timeout=ANSWER_S).topics),
        lambda: len(admin.list_topics(timeout=ANSWER_S).topics),
        ANSWER_S,
        what="the list of topics",
    )
    return names


class Production:
    """One record for each partition, and then one every half second for the busy ones, until the block ends."""

    def __init__(self, servers: str, names: Sequence[str], each: int, busy: int) -> None:
        self._producer = Producer({"bootstrap.servers": servers, "linger.ms": 5, "log_level": 0})
        self._busy = [(name, 0) for name in names[:busy]]
        self.count = 0
        self._send([(name, p) for name in names for p in range(each)])
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="producer")

    def _send(self, partitions: Sequence[tuple[str, int]]) -> None:
        for name, partition in partitions:
            self._producer.produce(name, b"x" * 100, partition=partition)
            self._producer.poll(0)
        if self._producer.flush(ANSWER_S):
            raise AssertionError("the broker did not accept the records")
        self.count += len(partitions)

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            self._send(self._busy)

    def __enter__(self) -> "Production":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def show_phases(batches: Sequence[dict[str, int]]) -> None:
    """Where the time of the later batches went, by Spark's own measure."""
    table = Table("part of a batch", "median, s")
    for name in sorted({name for phases in batches for name in phases}):
        table.add_row(name, f"{statistics.median(phases.get(name, 0) for phases in batches) / 1000:.2f}")
    Console(width=100).print(table)


def show_messages(folder: Path, persisted: dict[str, int]) -> None:
    largest: Counter[str] = Counter()
    for file in folder.iterdir():
        name = file.name.partition("-")[2]
        largest[name] = max(largest[name], int(file.read_text() or 0))
    table = Table("message, or what is persisted", "largest, bytes")
    for name, size in [*largest.most_common(), *persisted.items()]:
        table.add_row(name, f"{size:,}")
    Console(width=100).print(table)


def show_memory(peaks: dict[str, endurance.Sample]) -> None:
    table = Table("processes", "number", "MiB (PSS) of all, highest sample")
    for kind, one in sorted(peaks.items()):
        table.add_row(kind, str(one.processes), f"{one.mib:,.0f}")
    Console(width=100).print(table)


def persisted_sizes(folder: Path) -> dict[str, int]:
    """The largest offset of a batch in the checkpoint, and the largest notes in the table's log."""
    offsets = [len(path.read_bytes()) for path in (folder / "checkpoint" / "offsets").glob("[0-9]*")]
    notes = []
    for path in sorted((folder / "table" / "_delta_log").glob("*.json")):
        actions = [json.loads(line) for line in path.read_text().splitlines()]
        notes.append(sum(len(json.dumps(action["commitInfo"])) for action in actions if "commitInfo" in action))
    return {
        "offset of a batch in the checkpoint": max(offsets),
        "commitInfo with the ledger, largest commit": max(notes),
        "commitInfo with the ledger, median": int(statistics.median(notes)),
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench topics", description=__doc__)
    parser.add_argument("--topics", type=int, default=2_000)
    parser.add_argument("--each", type=int, default=6, help="partitions of a topic")
    parser.add_argument("--busy", type=int, default=20, help="partitions with more than one record")
    parser.add_argument("--batches", type=int, default=20, help="measured after the first one")
    chosen = parser.parse_args(arguments)
    os.environ["BENCH"] = uuid.uuid4().hex  # marks the processes of this benchmark
    broker = Broker(settings=BROKER_SETTINGS, java_options=(*JAVA_OPTIONS, *HEAP))
    with tempfile.TemporaryDirectory(prefix="bench-") as name, broker:
        tempfile.tempdir = os.environ["TMPDIR"] = name
        folder, servers = Path(name), broker.bootstrap_servers
        (folder / "hook").mkdir()
        (folder / "sizes").mkdir()
        (folder / "hook" / "sitecustomize.py").write_text(HOOK)
        sys.path.insert(0, str(folder / "hook"))
        os.environ |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "BENCH_SIZES": str(folder / "sizes")}
        admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
        began_s = time.monotonic()
        names = create_topics(admin, chosen.topics, chosen.each)
        print(
            f"{len(names)} topics with {chosen.each} partitions each, in {time.monotonic() - began_s:.0f} s", flush=True
        )
        spark = endurance.session(folder)
        try:
            spark.range(1).write.format("noop").mode("append").save()  # the start of the JVM is not measured
            production = Production(servers, names, chosen.each, chosen.busy)
            stream = spark.readStream.format("kafka-group").options(
                **{"kafka.bootstrap.servers": servers, "kafka.group.id": GROUP, "subscribePattern": r"orders\..*"},
                memberHost="executor", startingOffsets="earliest", groupMembers="auto",
            )  # fmt: skip
            writer = stream.load().writeStream.foreachBatch(DeltaSink(f"{name}/table"))
            began_s = time.monotonic()
            query = writer.option("checkpointLocation", f"{name}/checkpoint").start()
            try:
                await_progress(
                    lambda: committed(query) >= 0, lambda: committed(query), ANSWER_S, what="the first batch"
                )
                first_s = time.monotonic() - began_s
                last, peaks = committed(query) + int(chosen.batches), Peaks()

                def measured() -> bool:
                    peaks.sample()
                    return committed(query) >= last

                with production:
                    await_progress(measured, lambda: committed(query), ANSWER_S, what="later batches")
                query.processAllAvailable()
                agents = [run["agents"] for run in run_files.read(GROUP)]
                took = [p["durationMs"] for p in query.recentProgress[1:] if p["numInputRows"]]
            finally:
                query.stop()
            found = Counter((row["topic"], row["partition"], row["offset"]) for row in living_rows(folder / "table"))
            lag = production.count - sum(committed_of(admin, GROUP).values())
            lost, doubled = production.count - len(found), found.total() - len(found)
        finally:
            spark.stop()
        whole_s = [phases["triggerExecution"] / 1000 for phases in took]
        print(
            f"{production.count:,} records: {lost} lost, {doubled} twice in the table, {lag} not committed; agents "
            f"{agents}. From start() until the first batch is committed {first_s:.1f} s; later batches: median "
            f"{statistics.median(whole_s):.2f} s, longest {max(whole_s):.2f} s"
        )
        show_phases(took)
        show_messages(folder / "sizes", persisted_sizes(folder))
        show_memory(peaks.highest)
    return int(bool(lost or doubled or lag))


def committed(query: "StreamingQuery") -> int:
    """The number of the last batch whose offsets are committed, by what the run publishes. Spark's own progress has
    2 MB of offsets, and reading it often would be measured, too."""
    if not query.isActive:
        raise AssertionError(f"the query ended: {query.exception()}")
    return max((run["seq"] for run in run_files.read(GROUP) if run["committed"]), default=-1)


class Peaks:
    """The highest samples of memory."""

    def __init__(self) -> None:
        self.highest: dict[str, endurance.Sample] = {}
        self._at_s = 0.0

    def sample(self) -> None:
        """Take a sample, unless the last one is young."""
        if time.monotonic() >= self._at_s:
            self._at_s = time.monotonic() + SAMPLE_S
            for kind, one in endurance.sample(0).items():
                self.highest[kind] = max(self.highest.get(kind, one), one, key=lambda s: s.mib)
