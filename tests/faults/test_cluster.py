"""A cluster behind proxies: every client connects through them, and restarted nodes have their data."""

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient
from kafka_helpers import create_topic, end_offsets_of, produce_to
from kit.faulty_cluster import Fault, FaultyCluster
from kit.proxy import Direction

from spark_group_source.model import TopicPartition

pytestmark = pytest.mark.broker

ANSWER_S = 120


def admin_client(servers: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": servers, "log_level": 0})


def test_clients_connect_to_proxies_and_judges_to_nodes(faulty: FaultyCluster, judge: AdminClient) -> None:
    listed = {
        node.port for node in admin_client(faulty.bootstrap_servers).list_topics(timeout=ANSWER_S).brokers.values()
    }
    assert listed == {proxy.port for proxy in faulty.proxies.values()}
    direct = {node.port for node in judge.list_topics(timeout=ANSWER_S).brokers.values()}
    assert direct.isdisjoint(listed | set(faulty.broker.ports.values()))


def test_a_refusing_proxy_blocks_clients_but_not_judges(faulty: FaultyCluster, judge: AdminClient) -> None:
    client = admin_client(faulty.bootstrap_servers)
    client.list_topics(timeout=ANSWER_S)
    with faulty.suffering(Fault("refuse", 1)):
        with pytest.raises(KafkaException):
            client.list_topics(timeout=1)
        judge.list_topics(timeout=ANSWER_S)
    client.list_topics(timeout=ANSWER_S)


def test_records_pass_the_proxy_and_survive_a_killed_node(faulty: FaultyCluster, judge: AdminClient) -> None:
    create_topic(judge, "kept", 1)
    produce_to(Producer({"bootstrap.servers": faulty.bootstrap_servers, "log_level": 0}), "kept", ["a", "b", "c"])
    assert faulty.proxies[1].passed[Direction.TO_SERVER] > 0
    before = faulty.broker.pids
    with faulty.suffering(Fault("kill", 1)):
        assert faulty.broker.pids == {}
        assert faulty.proxies[1].refusing
    assert faulty.broker.pids.keys() == before.keys() and faulty.broker.pids != before
    assert end_offsets_of(admin_client(faulty.bootstrap_servers), "kept") == {TopicPartition("kept", 0): 3}
