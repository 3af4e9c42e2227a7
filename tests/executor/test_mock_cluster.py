"""librdkafka's mock cluster does what its wrapper says, seen by ordinary clients."""

from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicCollection
from confluent_kafka import TopicPartition as KafkaTopicPartition
from confluent_kafka.admin import AdminClient
from kit.mock_cluster import Api, MockCluster

from spark_group_source.model import TopicPartition

TP = TopicPartition("orders", 0)


@pytest.fixture
def cluster() -> Iterator[MockCluster]:
    with MockCluster(2) as made:
        made.create_topic("orders", 2)
        made.set_leader(TP, 1)
        yield made


@pytest.fixture
def consumer(cluster: MockCluster) -> Iterator[Consumer]:
    made = Consumer(
        {"bootstrap.servers": cluster.bootstrap_servers, "group.id": "g", "auto.offset.reset": "error", "log_level": 0}
    )
    yield made
    made.close()


def produce(cluster: MockCluster, *values: str) -> None:
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    for value in values:
        producer.produce("orders", value.encode(), partition=0)
    assert producer.flush(10) == 0


def watermarks(consumer: Consumer, timeout_s: float = 5) -> tuple[int, int] | int:
    try:
        low, high = consumer.get_watermark_offsets(KafkaTopicPartition("orders", 0), timeout=timeout_s)
        return low, high
    except KafkaException as exc:
        return int(exc.args[0].code())


def test_records_are_kept_and_deleted(cluster: MockCluster, consumer: Consumer) -> None:
    produce(cluster, "0", "1", "2")
    assert watermarks(consumer) == (0, 3)
    cluster.delete_records(TP, 2)
    assert watermarks(consumer) == (2, 3)


def test_pushed_errors_are_answered_one_by_one(cluster: MockCluster, consumer: Consumer) -> None:
    produce(cluster, "0")
    assert watermarks(consumer) == (0, 1)
    denied = KafkaError.TOPIC_AUTHORIZATION_FAILED
    cluster.push_request_errors(Api.LIST_OFFSETS, [denied] * 2)  # the first record and the end
    assert watermarks(consumer) == denied
    assert watermarks(consumer) == (0, 1)
    cluster.push_request_errors(Api.LIST_OFFSETS, [denied] * 5)
    cluster.clear_request_errors(Api.LIST_OFFSETS)
    assert watermarks(consumer) == (0, 1)


def test_a_broker_goes_down_and_comes_back(cluster: MockCluster, consumer: Consumer) -> None:
    produce(cluster, "0")
    assert watermarks(consumer) == (0, 1)
    cluster.set_broker_down(1)
    assert isinstance(answer := watermarks(consumer, 1), int)
    assert answer < 0
    cluster.set_broker_up(1)
    assert watermarks(consumer, 20) == (0, 1)


def test_a_topic_is_described_deleted_and_made_anew_with_another_id(cluster: MockCluster) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})

    def topic_id() -> str | int:
        try:
            return str(admin.describe_topics(TopicCollection(["orders"]))["orders"].result(10).topic_id)
        except KafkaException as exc:
            return int(exc.args[0].code())

    first = topic_id()
    assert isinstance(first, str)
    cluster.set_topic_error("orders", KafkaError.UNKNOWN_TOPIC_OR_PART)
    assert topic_id() == KafkaError.UNKNOWN_TOPIC_OR_PART
    cluster.set_topic_error("orders", 0)
    assert topic_id() == first
    cluster.delete_topic("orders")
    assert topic_id() == KafkaError.UNKNOWN_TOPIC_OR_PART
    cluster.create_topic("orders", 2)
    assert topic_id() not in (first, KafkaError.UNKNOWN_TOPIC_OR_PART)


def test_requests_are_counted_and_an_answer_can_be_late(cluster: MockCluster, consumer: Consumer) -> None:
    produce(cluster, "0")
    cluster.forget_requests()
    assert cluster.requests() == []
    cluster.push_answers(1, Api.LIST_OFFSETS, [(0, 700)])
    assert watermarks(consumer) == (0, 1)
    asked = cluster.requests(Api.LIST_OFFSETS)
    assert {one.broker for one in asked} == {1}
    assert len(asked) == 2
    assert cluster.requests(Api.METADATA)
