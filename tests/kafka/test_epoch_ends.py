"""Ends of leader epochs, read from brokers that know the request and from some that do not."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer
from kafka_helpers import ADMIN_S, await_until, epoch_ends_of
from kit.mock_cluster import Api, MockCluster

from spark_group_source.kafka.admin import EpochEnds
from spark_group_source.kafka.environment import Environment
from spark_group_source.model import TopicPartition

PARTITIONS = 20


class ConsumerThatWaits(Consumer):
    """Calls ``assigned`` between its assignment and whatever follows."""

    def __init__(self, settings: Mapping[str, Any], assigned: Callable[[], object]) -> None:
        super().__init__(dict(settings))
        self._assigned = assigned

    def assign(self, partitions: list[Any]) -> None:
        super().assign(partitions)
        self._assigned()


class SlowEnvironment(Environment):
    """Its consumers do nothing more until they have fetched."""

    def __init__(self, cluster: MockCluster) -> None:
        super().__init__()
        self._cluster = cluster

    def consumer(self, settings: Mapping[str, Any]) -> Any:
        return ConsumerThatWaits(
            settings, lambda: await_until(lambda: self._cluster.request_count(Api.FETCH) > 0, what="a fetch")
        )


@pytest.fixture
def cluster() -> Iterator[MockCluster]:
    """Three records of epoch 0 in each partition; then two of another leader's epoch."""
    with MockCluster(2) as made:
        made.create_topic("orders", PARTITIONS)
        for epoch, count in enumerate((3, 2)):
            for partition in range(PARTITIONS):
                made.set_leader(TopicPartition("orders", partition), epoch + 1)
            producer = Producer({"bootstrap.servers": made.bootstrap_servers, "log_level": 3})
            for partition in range(PARTITIONS):
                for _ in range(count):
                    producer.produce("orders", b"x", partition=partition)
            assert producer.flush(ADMIN_S) == 0
        yield made


def read(cluster: MockCluster, environment: Environment) -> set[int | None]:
    """Read the end of each partition's first epoch."""
    ends = EpochEnds({"bootstrap.servers": cluster.bootstrap_servers, "log_level": "3"}, environment=environment)
    epochs = {TopicPartition("orders", partition): 1 for partition in range(PARTITIONS)}
    return set(epoch_ends_of(ends, epochs).values())


@pytest.mark.parametrize("is_slow", [False, True], ids=["at once", "after a fetch"])
def test_the_end_of_an_epoch_is_read_however_late_the_question(cluster: MockCluster, is_slow: bool) -> None:
    """An answer of the fetch in between, "out of range", must not count as an epoch that the leader does not know."""
    assert read(cluster, SlowEnvironment(cluster) if is_slow else Environment()) == {3}


def test_a_broker_without_the_request_answers_that_nothing_is_known(cluster: MockCluster) -> None:
    cluster.disable(Api.OFFSET_FOR_LEADER_EPOCH)
    assert read(cluster, Environment()) == {None}
