"""G2, G4: whatever moment the driver is killed at, each record is in the table once, and Kafka is never ahead of it."""

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from conftest import Offsets, TopicFactory, await_until, committed_of, end_offsets_of
from delta_files import living_rows

from spark_group_source.local.broker import Broker
from spark_group_source.model import TopicPartition

JOB = Path(__file__).with_name("job.py")
LIFE_S = (0.5, 10.0)
"""A run is killed this long after its start, while Spark begins, or this long after it joined the group: in its first
batch, or in the middle of later ones."""
JOINING = 0.7
"""Share of the runs that are let into the group first."""
JOIN_S = 120
JOINED_MIN = 0.3
"""Share of the runs that must have come as far as the group, or the kills prove little."""
RATE_PER_S = 200
PAUSE_S = 0.1
DRAIN_S = 180
CALM = {"kafka.session.timeout.ms": "6000", "kafka.heartbeat.interval.ms": "500"}


def ledger_of(table: Path, group: str) -> Offsets:
    """The newest ledger in the table's log, read as plain JSON."""
    for commit in sorted((table / "_delta_log").glob("*.json"), reverse=True):
        for line in commit.read_text().splitlines():
            domain = json.loads(line).get("domainMetadata")
            if domain and domain["domain"] == f"spark-group-source.{group}":
                topics = json.loads(domain["configuration"])["topics"]
                return {
                    TopicPartition(topic, int(p)): offset
                    for topic, entry in topics.items()
                    for p, offset in entry["offsets"].items()
                }
    return {}


class Job:
    """The driver as a child process with all that Spark starts below it."""

    def __init__(self, arguments: dict[str, Any], log: Path) -> None:
        self._log = log.open("ab")
        self.process = subprocess.Popen(
            [sys.executable, str(JOB), json.dumps(arguments)],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "SPARK_GROUP_LOG_LEVEL": "INFO", "PYSPARK_PYTHON": sys.executable},
        )

    def tree(self) -> list[psutil.Process]:
        with_children: list[psutil.Process] = []
        try:
            top = psutil.Process(self.process.pid)
            with_children = [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            pass
        return with_children

    def kill(self) -> list[psutil.Process]:
        """SIGKILL the driver's Python and its JVM; Spark's own Python processes must find out by themselves."""
        tree = self.tree()
        for process in tree:
            try:
                if process.pid == self.process.pid or "java" in process.name():
                    process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait(30)
        self._log.close()
        return tree


@contextmanager
def producing(servers: str, topic: str, partitions: int) -> Iterator[Callable[[], int]]:
    """Produce numbered records until the block ends; the value is how many were acknowledged."""
    producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True, "log_level": 3})
    stop = threading.Event()
    sent = 0

    def run() -> None:
        nonlocal sent
        while not stop.wait(PAUSE_S):
            for _ in range(int(RATE_PER_S * PAUSE_S)):
                producer.produce(topic, str(sent).encode(), partition=sent % partitions)
                sent += 1
            producer.flush(30)

    thread = threading.Thread(target=run, name="producer")
    thread.start()
    try:
        yield lambda: sent
    finally:
        stop.set()
        thread.join(60)


@contextmanager
def watching(admin: AdminClient, group: str, table: Path) -> Iterator[list[str]]:
    """Sample Kafka's offsets and then the ledger, all the time; the value collects what must not be."""
    wrong: list[str] = []
    stop = threading.Event()

    def run() -> None:
        last: Offsets = {}
        while not stop.wait(PAUSE_S):
            committed = committed_of(admin, group)
            ledger = ledger_of(table, group) if table.exists() else {}
            for tp, offset in committed.items():
                if offset > ledger.get(tp, 0):
                    wrong.append(f"{tp}: committed {offset}, ledger {ledger.get(tp, 0)}")
                if offset < last.get(tp, 0):
                    wrong.append(f"{tp}: committed went back from {last[tp]} to {offset}")
            last = committed

    thread = threading.Thread(target=run, name="watcher")
    thread.start()
    try:
        yield wrong
    finally:
        stop.set()
        thread.join(60)


def kill_and_prove(
    kills: int,
    seed: int,
    *,
    broker: Broker,
    admin: AdminClient,
    topic: str,
    group: str,
    home: Path,
    options: dict[str, str],
) -> None:
    chance = random.Random(seed)
    table, log = home / "table", home / "job.log"
    end_all: list[psutil.Process] = []
    with producing(broker.bootstrap_servers, topic, 4) as sent, watching(admin, group, table) as wrong:
        for kill in range(kills):
            job = start(broker, group, topic, home, log, options)
            try:
                if chance.random() < JOINING:
                    await_joined(job, log, times=joins(log) + 1)
                job.process.wait(chance.uniform(*LIFE_S))
                pytest.fail(f"seed {seed}, run {kill}: the job ended by itself:\n{tail(log)}")
            except subprocess.TimeoutExpired:
                end_all += job.kill()
    assert not wrong, f"seed {seed}: {wrong[:5]}"
    joined = joins(log)
    print(f"{joined} of {kills} runs were in the group when they were killed")  # noqa: T201 - pytest -s
    assert joined >= kills * JOINED_MIN, f"seed {seed}: only {joined} of {kills} runs came as far as the group"
    job = start(broker, group, topic, home, log, options)
    try:
        ends = end_offsets_of(admin, topic)
        await_until(
            lambda: committed_of(admin, group) == ends or job.process.poll() is not None, DRAIN_S, what="the end"
        )
        assert job.process.poll() is None, tail(log)
    finally:
        end_all += job.kill()
    assert ledger_of(table, group) == committed_of(admin, group) == ends
    counts = Counter(row["id"] for row in living_rows(table, ["id"]))
    assert len(counts) == sent(), f"seed {seed}: {sent()} produced, {len(counts)} in the table"
    assert set(counts.values()) == {1}, f"seed {seed}: {[i for i, n in counts.items() if n > 1][:5]} stand there twice"
    await_until(
        lambda: not [p for p in end_all if p.is_running() and p.status() != psutil.STATUS_ZOMBIE], 30, what="ends"
    )


def start(broker: Broker, group: str, topic: str, home: Path, log: Path, options: dict[str, str]) -> Job:
    scratch = home / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    return Job(
        {
            "servers": broker.bootstrap_servers,
            "group": group,
            "topic": topic,
            "table": str(home / "table"),
            "checkpoint": str(home / "checkpoint"),
            "scratch": str(scratch),
            **options,
        },
        log,
    )


def joins(log: Path) -> int:
    """How many runs came as far as the group."""
    return log.read_text(errors="replace").count("joining with")


def await_joined(job: Job, log: Path, *, times: int) -> None:
    await_until(lambda: joins(log) >= times or job.process.poll() is not None, JOIN_S, what="a run in the group")


def tail(log: Path, lines: int = 40) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.timeout(900)  # five starts of Spark, a minute each on a machine that is busy
@pytest.mark.parametrize(("kills", "seed"), [(3, 1)])
def test_G4_rows_are_in_the_table_once_through_kills_of_the_driver(
    broker: Broker, admin: AdminClient, topic: TopicFactory, group_id: str, tmp_path: Path, kills: int, seed: int
) -> None:
    kill_and_prove(kills, seed, broker=broker, admin=admin, topic=topic(4), group=group_id, home=tmp_path, options=CALM)


@pytest.mark.soak
@pytest.mark.crash
def test_G4_rows_are_in_the_table_once_through_a_hundred_kills(
    broker: Broker, admin: AdminClient, topic: TopicFactory, group_id: str, tmp_path: Path
) -> None:
    seed = int(os.environ.get("SOAK_SEED", str(int(time.time()))))
    kill_and_prove(100, seed, broker=broker, admin=admin, topic=topic(4), group=group_id, home=tmp_path, options=CALM)
