"""What reading ahead costs, and how fast rows come out of memory that is warm.

``python -m tests.bench ahead [--records N] [--bytes N] [--partitions N] [--runs N] [--memory MIB]``

One executor: this process is its task, the agent a process of its own. A run reads the topic with confluent_kafka's
``consume()`` into the same Arrow columns, then directly as tasks do, and then through the agent in batches that fit its
memory: it reads ahead, and the task asks for all that it holds. CPU time is that of task and agent together (user and
system), for a million records; the brokers' is not counted. The time from the request
to the last row is that of a batch in warm buffers, for as many rows as the batch had. Every row is counted; one that
the task had to read from the brokers itself fails the run.
"""

import argparse
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import agents
import pyarrow as pa
from confluent_kafka import Consumer, Message, TopicCollection
from confluent_kafka import TopicPartition as ConfluentPartition
from confluent_kafka.admin import AdminClient
from reading import read as read_batches

from bench.throughput import BROKER_JAVA, fill
from spark_group_source.channel.messages import Ahead
from spark_group_source.executor.agent import near, start
from spark_group_source.executor.agent.home import Home
from spark_group_source.executor.agent.processes import Process
from spark_group_source.executor.records import arrow_schema
from spark_group_source.local.broker import Broker
from spark_group_source.model import OffsetRange, Piece, TopicPartition

CONSUMED = 10_000
"""Messages of one call; fewer are slower, more are not faster."""
READ_S = 60
"""Bound of one batch of the agent's."""


class Cost(NamedTuple):
    rows: int
    cpu_s: float
    wall_s: float

    def per_million(self) -> float:
        return self.cpu_s / self.rows * 1e6


def own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def cpu_of_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int, kind: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(f"{kind}:")) // 1024


def count(batches: Iterator[pa.RecordBatch]) -> int:
    return sum(batch.num_rows for batch in batches)


class Topic(NamedTuple):
    settings: dict[str, str]
    ends: dict[TopicPartition, int]
    ids: dict[str, str]

    def consume(self) -> Cost:
        """With messages of confluent_kafka."""
        began_s, cpu_s = time.perf_counter(), own_cpu_s()
        consumer = Consumer({**self.settings, "group.id": "consume", "enable.auto.commit": False})
        consumer.assign([ConfluentPartition(*tp, 0) for tp in self.ends])
        rows = 0
        while rows < sum(self.ends.values()):
            messages = consumer.consume(CONSUMED, READ_S)
            rows += _columns([m for m in messages if not m.error()]).num_rows
        consumer.close()
        return Cost(rows, own_cpu_s() - cpu_s, time.perf_counter() - began_s)

    def read_directly(self) -> Cost:
        began_s, cpu_s = time.perf_counter(), own_cpu_s()
        ranges = [OffsetRange(tp, 0, end) for tp, end in self.ends.items()]
        rows = count(read_batches(self.settings, ranges, topic_ids=self.ids))
        return Cost(rows, own_cpu_s() - cpu_s, time.perf_counter() - began_s)

    def read_ahead(self, home: Home, plan: int, step: int) -> tuple[Cost, Cost, list[float]]:
        """The whole topic in batches of ``step`` records of each partition: the cost of both, that of the task alone,
        and what each batch took to be handed over."""
        began_s, agent_s, task_s = time.perf_counter(), cpu_of_s(home.pid), 0.0
        at, rows, handed_s = dict.fromkeys(self.ends, 0), 0, []
        agents.tell(home, Ahead(at, topic_ids=self.ids))
        while at != self.ends:
            until = {tp: min(self.ends[tp], position + step) for tp, position in at.items()}
            agents.await_read(home, until)
            asked_s, cpu_s = time.perf_counter(), own_cpu_s()
            ranges = [OffsetRange(tp, at[tp], until[tp]) for tp in at]
            batches, rest = near.ask(home, Piece(tuple(ranges), self.ids, {}), include_headers=False)
            if rest:
                raise AssertionError(f"{rest} was not in memory")
            rows += count(iter(batches))
            handed_s.append(time.perf_counter() - asked_s)
            task_s += own_cpu_s() - cpu_s
            at = until
            agents.tell(home, Ahead(at, topic_ids=self.ids))
        agent_s = cpu_of_s(home.pid) - agent_s
        wall_s = time.perf_counter() - began_s
        return Cost(rows, agent_s + task_s, wall_s), Cost(rows, task_s, sum(handed_s)), handed_s


def _columns(messages: Sequence[Message]) -> pa.RecordBatch:
    stamps = [m.timestamp() for m in messages]
    columns = [
        [m.key() for m in messages],
        [m.value() for m in messages],
        [m.topic() for m in messages],
        [m.partition() for m in messages],
        [m.offset() for m in messages],
        [at_ms * 1000 for _, at_ms in stamps],
        [kind - 1 for kind, _ in stamps],
    ]
    schema = arrow_schema(include_headers=False)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def measure(topic: Topic, home: Home, runs: int, step: int) -> None:
    costs: dict[str, list[Cost]] = {}
    handed_s: list[float] = []
    print(f"{'':16} {'run':>4} {'CPU s per million':>18} {'wall s':>8}")
    for run in range(-1, runs):  # -1 is the warm-up
        found = {"consume()": topic.consume(), "direct": topic.read_directly()}
        # A plan from the beginning on is a rewind: nothing is held of the run before.
        found["ahead"], task, taken = topic.read_ahead(home, run + 2, step)
        found["ahead, task only"] = task
        for name, cost in found.items():
            if cost.rows != sum(topic.ends.values()):
                raise AssertionError(f"{name}: {cost.rows} rows of {sum(topic.ends.values())}")
            print(f"{name:16} {run + 1 if run >= 0 else 'warm':>4} {cost.per_million():18.3f} {cost.wall_s:8.2f}")
            if run >= 0:
                costs.setdefault(name, []).append(cost)
        handed_s += taken if run >= 0 else []
    medians = {name: statistics.median(cost.per_million() for cost in each) for name, each in costs.items()}
    for name, median in medians.items():
        print(f"{name:16} median CPU of a million records: {median:.3f} s")
    print(f"agent and task: {medians['ahead'] / medians['consume()']:.2f} of what consume() takes")
    batch = min(step * len(topic.ends), sum(topic.ends.values()))
    median_ms, longest_ms = statistics.median(handed_s) * 1000, max(handed_s) * 1000
    print(f"from request to last row, {batch:,} rows: median {median_ms:.0f} ms, longest {longest_ms:.0f} ms")
    print(f"memory of the agent: {memory_mib(home.pid, 'VmHWM')} MiB at most, {memory_mib(home.pid, 'VmRSS')} MiB now")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench ahead", description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--bytes", type=int, default=100)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--memory", type=int, default=64, help="MiB")
    told = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, Broker(java_options=BROKER_JAVA) as broker:
        tempfile.tempdir = folder
        print(f"{told.records:,} records of {told.bytes} bytes in {told.partitions} partitions, {told.memory} MiB")
        fill(broker.bootstrap_servers, "bench", records=told.records, size=told.bytes, partitions=told.partitions)
        compare(broker.bootstrap_servers, "bench", told)
    return 0


def compare(servers: str, name: str, told: argparse.Namespace) -> None:
    """Read a topic in all ways.

    Args:
        told: ``records``, ``bytes`` and ``partitions`` that it has, ``runs``, ``memory``.
    """
    memory = told.memory << 20
    # Half of it for each batch, so that there is always something to read ahead.
    step = max(1, memory // 2 // (told.bytes + 80) // told.partitions)
    admin = AdminClient({"bootstrap.servers": servers})
    described = admin.describe_topics(TopicCollection([name]))[name].result(30)
    settings = {"bootstrap.servers": servers, "isolation.level": "read_committed"}
    ends = {TopicPartition(name, p): len(range(p, told.records, told.partitions)) for p in range(told.partitions)}
    start._BEGIN = agents.BEGIN
    home = start.start(start.Order("bench", settings, memory_bytes=memory), Process.of(os.getpid()))
    if home is None:
        raise OSError("no agent can be started here")
    agents.await_ready(home)
    print(f"memory of the agent before it reads: {memory_mib(home.pid, 'VmRSS')} MiB")
    try:
        measure(Topic(settings, ends, {name: str(described.topic_id)}), home, told.runs, step)
    finally:
        agents.bye(home)
        agents.await_ended(home.pid)
