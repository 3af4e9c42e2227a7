"""Commits of more offsets than the coordinator accepts in one request: 600 partitions, message.max.bytes=20000."""

from collections.abc import Iterator

import pytest
from confluent_kafka.admin import AdminClient
from kafka_helpers import create_topic
from kit.broker_cluster import BrokerCluster

from rebalance.conftest import make_options
from rebalance.runs import Run
from spark_group_source.kafka.environment import Environment
from spark_group_source.kafka.group_admin import GroupAdmin
from spark_group_source.kafka.group_offsets import GroupOffsets
from spark_group_source.model import TopicPartition

pytestmark = [pytest.mark.broker, pytest.mark.slow]

PARTITIONS = 600
SETTINGS = {"message.max.bytes": "20000"}


@pytest.fixture(scope="module")
def small(jvm: None) -> Iterator[BrokerCluster]:
    with BrokerCluster(settings=SETTINGS) as started:
        yield started


def make_topic(cluster: BrokerCluster, group: str) -> str:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    return create_topic(admin, f"t-{group}", PARTITIONS)


def committed(cluster: BrokerCluster, group: str, topic: str) -> set[int]:
    """The committed offsets of all partitions; -1 for none."""
    settings = {"bootstrap.servers": cluster.bootstrap_servers}
    reads = GroupOffsets(settings, group=group, environment=Environment())
    try:
        found = reads.read([TopicPartition(topic, p) for p in range(PARTITIONS)])
    finally:
        reads.close()
    return {-1 if at is None else at.offset for at in found.values()}


def test_run_commits_all_offsets_in_one_transaction(small: BrokerCluster, group_id: str) -> None:
    topic = make_topic(small, group_id)
    with Run(make_options(small.bootstrap_servers, group_id, topic, "range", session_ms=45_000)) as run:
        run.await_partitions(PARTITIONS)
        run.await_(lambda: committed(small, group_id, topic) == {0}, "the committed start of every partition")


def test_reset_moves_all_offsets(small: BrokerCluster, group_id: str) -> None:
    topic = make_topic(small, group_id)
    offsets = {TopicPartition(topic, p): 7 for p in range(PARTITIONS)}
    admin = GroupAdmin({"bootstrap.servers": small.bootstrap_servers})
    admin.move_committed(group_id, offsets, notes=dict.fromkeys(offsets, "x" * 60))
    assert committed(small, group_id, topic) == {7}
