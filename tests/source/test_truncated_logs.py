"""A log that was truncated and has grown again: the leader epoch shows it, the end of the log does not."""

import json
import logging
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, Producer
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import AdminClient
from kafka_helpers import await_until, committed_of, create_topic, end_offsets_of, epoch_ends_of, produce_to
from kit.broker_cluster import BrokerCluster
from streams import Engine, SourceRow, options_of, texts

from spark_group_source.errors import DataLoss
from spark_group_source.kafka.admin import EpochEnds
from spark_group_source.kafka.environment import Environment
from spark_group_source.model import TopicPartition

Write = Callable[[str, int, int], None]
BACK_S = 600
"""Until a member rejoins whose session ended while the broker was stopped: two requests of librdkafka of a minute
each."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kafka")


@pytest.fixture(scope="module")
def alone(jvm: None, data: Path) -> Iterator[BrokerCluster]:
    """A separate broker whose data folder the test can change."""
    with BrokerCluster(data_dir=data) as started:
        yield started


@pytest.fixture
def name(alone: BrokerCluster, request: pytest.FixtureRequest) -> str:
    return create_topic(AdminClient({"bootstrap.servers": alone.bootstrap_servers}), request.node.name, 1)


@pytest.fixture
def write(alone: BrokerCluster) -> Write:
    """``write(topic, first, last)``: writes numbered texts, each as a record batch of its own."""
    producer = Producer({"bootstrap.servers": alone.bootstrap_servers, "linger.ms": 0})

    def one_by_one(topic: str, first: int, last: int) -> None:
        for text in texts(first, last):
            produce_to(producer, topic, [text], partition=0)

    return one_by_one


def rows_of(name: str, offsets: range, first: int) -> list[SourceRow]:
    return [SourceRow(name, 0, offset, str(first + offset - offsets.start)) for offset in offsets]


def truncate_log(broker: BrokerCluster, data: Path, tp: TopicPartition, end: int) -> None:
    """Stop the node, remove the record batches of a partition from ``end`` on, and start it again."""
    broker.stop_node(1)
    (log,) = data.rglob(f"{tp}/*.log")
    log.write_bytes(_below(log.read_bytes(), end))
    for mark in data.rglob(".kafka_cleanshutdown"):  # with it the node would not check its indexes
        mark.unlink()
    broker.start_node(1)


def _below(batches: bytes, end: int) -> bytes:
    at = 0
    while at < len(batches):
        first, length = struct.unpack(">qi", batches[at : at + 12])
        if first >= end:
            break
        at += 12 + length
    return batches[:at]


def await_batch(engine: Engine) -> None:
    """Trigger until a batch has records: a truncation is believed after a second report."""
    await_until(lambda: engine.step() is not None and bool(engine.rows), BACK_S, what="a batch")


def test_G10_a_truncation_between_two_batches_is_detected_even_if_the_log_has_grown_again(
    alone: BrokerCluster, data: Path, name: str, write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    options = options_of(alone.bootstrap_servers, f"g-{name}", subscribe=name)
    tp = TopicPartition(name, 0)
    write(name, 0, 9)
    with Engine(options) as engine:
        engine.run()
        assert engine.rows == rows_of(name, range(10), 0)
    log = engine.log
    assert json.loads(log[-1])["topics"][name]["leaders"] == 0
    truncate_log(alone, data, tp, 6)
    write(name, 100, 111)  # up to 18: the end of the log alone shows no truncation
    ends = EpochEnds({"bootstrap.servers": alone.bootstrap_servers}, environment=Environment())
    assert epoch_ends_of(ends, {tp: 0}) == {tp: 6}, "the end of the former leader epoch"

    with (
        Engine(options, log) as engine,
        pytest.raises(DataLoss, match=f"{name}-0 was truncated at 6, below the position 10") as caught,
    ):
        await_batch(engine)
    assert caught.value.fields == {"topic": name, "partition": 0, "expected": 10, "available": 6}

    with Engine({**options, "failOnDataLoss": "false"}, log) as engine, caplog.at_level(logging.WARNING):
        await_batch(engine)
        assert engine.rows == rows_of(name, range(6, 18), 100), "the records from the truncation on"
        assert json.loads(engine.log[-1])["truncated_after"] == {name: {"0": 0}}
        engine.plan()
        admin = AdminClient({"bootstrap.servers": alone.bootstrap_servers})
        await_until(lambda: committed_of(admin, f"g-{name}") == end_offsets_of(admin, name), what="the commit")
    assert caplog.text.count("data loss") == 1

    former = json.loads(log[-1])
    del former["topics"][name]["leaders"]
    with Engine(options, [json.dumps(former)]) as engine:  # without epochs a truncation cannot be detected
        engine.run()


def test_epoch_ends_are_parsed_from_librdkafkas_log(alone: BrokerCluster, name: str, write: Write) -> None:
    """With another log format of librdkafka, every epoch end would be unknown."""
    write(name, 0, 4)
    admin = AdminClient({"bootstrap.servers": alone.bootstrap_servers})
    assert end_offsets_of(admin, name) == {TopicPartition(name, 0): 5}
    ends = EpochEnds({"bootstrap.servers": alone.bootstrap_servers}, environment=Environment())
    tp = TopicPartition(name, 0)
    assert epoch_ends_of(ends, {tp: 0}) == {tp: 5}
    assert epoch_ends_of(ends, {tp: 7}) == {tp: None}, "an unknown epoch"
    assert ends.read({}) == {}


def test_G10_a_truncation_before_the_first_batch_of_a_checkpoint_is_detected(
    alone: BrokerCluster, data: Path, name: str, write: Write
) -> None:
    """The committed offset has a leader epoch (KIP-320)."""
    group, tp = f"g-{name}", TopicPartition(name, 0)
    options = options_of(alone.bootstrap_servers, group, subscribe=name)
    write(name, 0, 9)
    with Engine(options) as engine:
        engine.run()
        engine.plan()
    admin = AdminClient({"bootstrap.servers": alone.bootstrap_servers})
    await_until(lambda: committed_of(admin, group) == {tp: 10}, what="the commit")
    answer = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])[group].result()
    assert [at.leader_epoch for at in answer.topic_partitions] == [0]

    truncate_log(alone, data, tp, 6)
    write(name, 100, 111)  # up to 18: the end of the log alone shows no truncation
    with (
        Engine(options) as engine,
        pytest.raises(DataLoss, match=f"{name}-0 was truncated at 6, below the position 10"),
    ):
        await_batch(engine)
    with Engine({**options, "failOnDataLoss": "false"}) as engine:
        await_batch(engine)
        assert engine.rows == rows_of(name, range(6, 18), 100)


def test_a_wrong_leader_epoch_in_another_consumers_commit_is_no_truncation(
    alone: BrokerCluster, data: Path, name: str, write: Write
) -> None:
    """IBM/sarama commits epoch 0 with every offset."""
    group, tp = f"g-{name}", TopicPartition(name, 0)
    write(name, 0, 9)
    truncate_log(alone, data, tp, 10)  # an election only
    write(name, 10, 19)
    settings = {"bootstrap.servers": alone.bootstrap_servers}
    ends = EpochEnds(settings, environment=Environment())
    assert epoch_ends_of(ends, {tp: 0}) == {tp: 10}, "with epoch 0, the log seems to be truncated below 15"
    consumer = Consumer({**settings, "group.id": group})
    consumer.commit(offsets=[KafkaPartition(name, 0, 15, leader_epoch=0)], asynchronous=False)
    consumer.close()
    with Engine(options_of(alone.bootstrap_servers, group, subscribe=name)) as engine:
        await_batch(engine)
        assert engine.rows == rows_of(name, range(15, 20), 15)
