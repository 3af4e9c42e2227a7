"""Clients of an executor that says in which rack it is read from the replica there: seen by what passes each node."""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import agents
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from kafka_words import await_until, create_topic, end_offsets_of
from kit.faulty_cluster import FaultyCluster
from kit.proxy import Direction
from reading import read as read_batches

from spark_group_source.channel.messages import Ahead
from spark_group_source.executor.agent import start
from spark_group_source.executor.agent.processes import Process
from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.options.table import Options

pytestmark = [pytest.mark.broker, pytest.mark.soak]

RECORDS, RECORD_BYTES = 5_000, 1_000
IN_SYNC_S = 30
SMALL = 0.1
"""Of what is read: questions, and what a leader is asked before it names the replica."""

Passed = Callable[[], dict[int, int]]


@pytest.fixture
def tp(faulty_three: FaultyCluster, request: pytest.FixtureRequest) -> TopicPartition:
    """One partition on all nodes, with records that do not compress."""
    admin = AdminClient({"bootstrap.servers": faulty_three.direct_servers, "log_level": 0})
    found = TopicPartition(f"racks-{request.node.name.replace('[', '-').replace(']', '')}", 0)
    create_topic(admin, found.topic, 1)
    producer = Producer({"bootstrap.servers": faulty_three.direct_servers, "acks": "all", "log_level": 0})
    for _ in range(RECORDS):
        producer.produce(found.topic, os.urandom(RECORD_BYTES), partition=0)
    assert producer.flush(IN_SYNC_S) == 0
    assert end_offsets_of(admin, found.topic) == {found: RECORDS}
    await_until(lambda: len(partition_of(admin, found).isrs) == 3, IN_SYNC_S, what="all replicas in sync")
    return found


def partition_of(admin: AdminClient, tp: TopicPartition):  # type: ignore[no-untyped-def]  # confluent_kafka has no name for it
    return admin.list_topics(tp.topic, timeout=IN_SYNC_S).topics[tp.topic].partitions[0]


@pytest.fixture
def passed(faulty_three: FaultyCluster) -> Passed:
    """Bytes that each node has sent to clients since the test began."""
    before = {node: proxy.passed[Direction.TO_CLIENT] for node, proxy in faulty_three.proxies.items()}
    return lambda: {n: p.passed[Direction.TO_CLIENT] - before[n] for n, p in faulty_three.proxies.items()}


def settings(cluster: FaultyCluster, environ: dict[str, str], **more: str) -> dict[str, str]:
    """As an executor with this environment has them."""
    given = {"kafka.bootstrap.servers": cluster.bootstrap_servers, "kafka.group.id": "g", "subscribe": "t", **more}
    return Options.parse(given | {"clientRackEnv": "ZONE"}).on_executor(environ).consumer_settings()


def read_from(passed: Passed) -> int:
    """The node that sent all of the records."""
    found = passed()
    most = max(found, key=lambda node: found[node])
    assert found[most] > RECORDS * RECORD_BYTES
    assert sum(found.values()) - found[most] < SMALL * RECORDS * RECORD_BYTES
    return most


def leader_of(cluster: FaultyCluster, tp: TopicPartition) -> int:
    admin = AdminClient({"bootstrap.servers": cluster.direct_servers, "log_level": 0})
    return int(partition_of(admin, tp).leader)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_task_reads_from_the_replica_in_its_executors_rack(
    faulty_three: FaultyCluster, tp: TopicPartition, passed: Passed, steps: int
) -> None:
    near_node = 1 + (leader_of(faulty_three, tp) - 1 + steps) % 3
    given = settings(faulty_three, {"ZONE": f"rack-{near_node}"})
    rows = sum(batch.num_rows for batch in read_batches(given, [OffsetRange(tp, 0, RECORDS)]))
    assert rows == RECORDS
    assert read_from(passed) == near_node


def test_an_executor_without_a_rack_or_in_none_of_theirs_reads_from_the_leader(
    faulty_three: FaultyCluster, tp: TopicPartition, passed: Passed
) -> None:
    given = settings(faulty_three, {"ZONE": "elsewhere"})
    assert sum(batch.num_rows for batch in read_batches(given, [OffsetRange(tp, 0, RECORDS)])) == RECORDS
    assert read_from(passed) == leader_of(faulty_three, tp)


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(start, "_BEGIN", agents.BEGIN)
    yield
    for pid in agents.living():
        os.kill(pid, signal.SIGKILL)
        agents.await_ended(pid)


@pytest.mark.usefixtures("own_folder")
def test_an_agent_reads_ahead_from_the_replica_in_its_executors_rack(
    faulty_three: FaultyCluster, tp: TopicPartition, passed: Passed
) -> None:
    near_node = 1 + leader_of(faulty_three, tp) % 3
    order = start.Order("racks", settings(faulty_three, {"ZONE": f"rack-{near_node}"}))
    home = start.start(order, Process.of(os.getpid()))
    assert home is not None
    agents.await_ready(home)
    agents.tell(home, Ahead({tp: 0}))
    agents.await_read(home, {tp: RECORDS})
    assert read_from(passed) == near_node
