"""Peak memory of a task that reads large records.

``python -m tests.bench memory [--records N] [--bytes N] [--partitions N]``

A task's piece is all of a topic with records of 1 MiB, far below a limit in offsets such as 1,000,000, which does not
limit memory here. It is read once from the brokers, and once through an agent that has prefetched all of it. Each time
it is read in a new process, as by an executor worker: the batches go to an Arrow stream. Printed is what the process
has after its imports, and its peak.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import agent_helpers
import pyarrow as pa
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # the stub hides it
from reading import read, read_with_agent

from spark_group_source.agents import agent_folder
from spark_group_source.agents.agent_folder import AgentFolder, ProcessId
from spark_group_source.agents.messages import PrefetchPositions
from spark_group_source.local.broker import Broker
from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.options.table import COLUMNS
from spark_group_source.reader.records import arrow_schema

TOPIC = "large"
END_S = 600
"""Bound of the topic's creation and of each record's production."""
AGENT_OVERHEAD_BYTES = 8_192
"""Upper bound of what an agent counts for a record beside its bytes."""


def fill(servers: str, *, records: int, size: int, partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": servers})
    limit = str(size + 1024)
    admin.create_topics([NewTopic(TOPIC, partitions, 1, config={"max.message.bytes": limit})])[TOPIC].result(END_S)
    producer = Producer({"bootstrap.servers": servers, "message.max.bytes": int(limit) * 2, "linger.ms": 0})
    for number in range(records):
        producer.produce(TOPIC, os.urandom(size), partition=number % partitions)
        producer.flush(END_S)


def peak_mib() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) // 1024


def read_piece(settings: dict[str, str], ranges: list[OffsetRange], agent: str | None) -> tuple[int, int, int]:
    """Return the rows, and this process's peak memory before and after reading."""
    columns, rows = COLUMNS[:-1], 0
    before = peak_mib()
    batches = read(settings, ranges) if agent is None else read_with_agent(AgentFolder(Path(agent)), settings, ranges)
    with pa.OSFile(os.devnull, "wb") as file, pa.ipc.new_stream(file, arrow_schema(columns)) as stream:
        for batch in batches:
            stream.write_batch(batch)
            rows += batch.num_rows
    return rows, before, peak_mib()


def filled_agent(settings: dict[str, str], ranges: list[OffsetRange], memory: int) -> AgentFolder:
    """Start an agent, and wait until it has prefetched all ranges."""
    folder = agent_helpers.start_agent(ProcessId.of(os.getpid()), reader_settings=settings, buffer_bytes=memory)
    assert folder is not None
    agent_helpers.await_ready(folder)
    agent_helpers.prefetch(folder, PrefetchPositions({r.tp: 0 for r in ranges}))
    used = agent_helpers.await_prefetched(folder, {r.tp: r.end for r in ranges}).used_bytes
    print(f"the agent has {used >> 20} MiB of records", flush=True)
    return folder


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench memory", description=__doc__)
    parser.add_argument("--records", type=int, default=400)
    parser.add_argument("--bytes", type=int, default=1 << 20)
    parser.add_argument("--partitions", type=int, default=4)
    given = parser.parse_args(arguments)
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="memory-") as home, Broker() as broker:
        os.environ["TMPDIR"] = tempfile.tempdir = home
        os.environ["PYTHONPATH"] = str(Path(agent_helpers.__file__).parent)
        agent_folder._MAIN = agent_helpers.MAIN
        settings = {"bootstrap.servers": broker.bootstrap_servers, "isolation.level": "read_committed"}
        fill(broker.bootstrap_servers, records=given.records, size=given.bytes, partitions=given.partitions)
        counts = [len(range(p, given.records, given.partitions)) for p in range(given.partitions)]
        ranges = [OffsetRange(TopicPartition(TOPIC, p), 0, n) for p, n in enumerate(counts)]
        print(f"{given.records:,} records of {given.bytes:,} bytes in {given.partitions} partitions, one task")
        folder = filled_agent(settings, ranges, 2 * given.records * (given.bytes + AGENT_OVERHEAD_BYTES))
        try:
            for name, agent in (("from brokers", None), ("through an agent", str(folder.path))):
                with processes.Pool(1) as pool:
                    rows, before, peak = pool.apply(read_piece, (settings, ranges, agent))
                assert rows == given.records, rows
                print(f"{name:17} {before} MiB before, peak {peak} MiB, {peak - before} MiB for reading", flush=True)
        finally:
            agent_pid = agent_helpers.pid_of(folder)
            agent_helpers.end(folder)
            agent_helpers.await_ended(agent_pid)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
