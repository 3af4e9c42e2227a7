"""Clients of an executor with a rack read from the replica in that rack, measured by the bytes of each node."""

import os
from collections.abc import Callable

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from kafka_helpers import await_until, create_topic, end_offsets_of
from kit.faulty_cluster import FaultyCluster
from kit.proxy import Direction
from reading import read as read_batches

from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.options.table import Options

pytestmark = [pytest.mark.broker, pytest.mark.soak]

RECORDS, RECORD_BYTES = 5_000, 1_000
IN_SYNC_S = 600
SMALL = 0.1
"""Bytes that are not records: requests, and responses of the leader before it names the replica."""

Passed = Callable[[], dict[int, int]]


@pytest.fixture
def tp(faulty_three: FaultyCluster, request: pytest.FixtureRequest) -> TopicPartition:
    """One partition with replicas on all nodes, with records that do not compress."""
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
    """Bytes that each node has sent to clients since the test started."""
    before = {node: proxy.passed[Direction.TO_CLIENT] for node, proxy in faulty_three.proxies.items()}
    return lambda: {n: p.passed[Direction.TO_CLIENT] - before[n] for n, p in faulty_three.proxies.items()}


def settings(cluster: FaultyCluster, environ: dict[str, str], **more: str) -> dict[str, str]:
    """The client settings of an executor with this environment."""
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


@pytest.mark.parametrize("steps", [0, 1, 2, None], ids=["leader", "second", "third", "nowhere"])
def test_a_task_reads_from_the_replica_in_its_executors_rack(
    faulty_three: FaultyCluster, tp: TopicPartition, passed: Passed, steps: int | None
) -> None:
    near_node = 1 + (leader_of(faulty_three, tp) - 1 + (steps or 0)) % 3
    given = settings(faulty_three, {"ZONE": "elsewhere" if steps is None else f"rack-{near_node}"})
    rows = sum(batch.num_rows for batch in read_batches(given, [OffsetRange(tp, 0, RECORDS)]))
    assert rows == RECORDS
    assert read_from(passed) == near_node
