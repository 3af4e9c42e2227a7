"""Record times of partitions that answer and of some that do not, and the bound of the wait."""

from collections.abc import Iterator

import pytest
from confluent_kafka import Producer
from kafka_helpers import ADMIN_S
from kit.mock_cluster import Api, MockCluster

from spark_group_source.kafka.environment import Environment
from spark_group_source.kafka.group_offsets import ASSIGNED_MAX, RecordTime, RecordTimes
from spark_group_source.model import TopicPartition

PARTITIONS = ASSIGNED_MAX + 50
MADE_MS = 1_700_000_000_000
MS_MAX = 600_000
NOT_LEADER, READ_REFUSED = 6, 29


@pytest.fixture
def cluster() -> Iterator[MockCluster]:
    """Three records in each partition, a second apart."""
    with MockCluster() as made:
        made.create_topic("orders", PARTITIONS)
        producer = Producer({"bootstrap.servers": made.bootstrap_servers, "log_level": 3})
        for partition in range(PARTITIONS):
            for n in range(3):
                producer.produce("orders", b"x", partition=partition, timestamp=MADE_MS + n * 1000 + partition)
        assert producer.flush(ADMIN_S) == 0
        yield made


@pytest.fixture
def times(cluster: MockCluster) -> Iterator[RecordTimes]:
    settings = {"bootstrap.servers": cluster.bootstrap_servers}
    made = RecordTimes(settings, isolation_level="read_committed", environment=Environment())
    yield made
    made.close()


def read(times: RecordTimes, offsets: dict[int, int], *, ms: int = MS_MAX) -> dict[int, RecordTime | None]:
    requested = {TopicPartition("orders", partition): offset for partition, offset in offsets.items()}
    return {tp.partition: found for tp, found in times.read(requested, until_ms=Environment().now_ms() + ms).items()}


def test_record_times_are_read_at_each_offset_in_every_sweep(times: RecordTimes) -> None:
    for offset in (1, 2, 0):
        found = read(times, dict.fromkeys(range(PARTITIONS), offset))
        assert found == {p: RecordTime(offset, MADE_MS + offset * 1000 + p) for p in range(PARTITIONS)}


def test_there_is_no_record_at_the_end_and_no_answer_beyond_it(times: RecordTimes) -> None:
    assert read(times, {0: 3, 1: 2, 2: 9}) == {0: None, 1: RecordTime(2, MADE_MS + 2001)}


def test_for_deleted_records_the_first_remaining_one_is_read(times: RecordTimes, cluster: MockCluster) -> None:
    cluster.delete_records(TopicPartition("orders", 0), 2)
    assert read(times, {0: 0}) == {0: RecordTime(2, MADE_MS + 2000)}


def test_a_moving_leader_is_retried_and_a_refused_partition_is_left_out(
    times: RecordTimes, cluster: MockCluster
) -> None:
    cluster.push_partition_errors(TopicPartition("orders", 0), Api.FETCH, [NOT_LEADER])
    cluster.push_partition_errors(TopicPartition("orders", 1), Api.FETCH, [READ_REFUSED])
    assert read(times, {0: 1, 1: 1, 2: 1}) == {p: RecordTime(1, MADE_MS + 1000 + p) for p in (0, 2)}
    assert read(times, {1: 1}) == {1: RecordTime(1, MADE_MS + 1001)}


def test_a_silent_partition_does_not_exceed_the_bound_or_affect_the_others(
    times: RecordTimes, cluster: MockCluster
) -> None:
    cluster.set_leader(TopicPartition("orders", 0), -1)
    assert read(times, {0: 1, 1: 1}, ms=1_000) == {1: RecordTime(1, MADE_MS + 1001)}
    cluster.set_leader(TopicPartition("orders", 0), 1)
    assert read(times, {0: 1}) == {0: RecordTime(1, MADE_MS + 1000)}
