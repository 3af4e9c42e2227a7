"""B39, G4, G10: a log that lost its last records and grew again. Its leader's epoch tells; its end does not."""

import json
import logging
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from conftest import await_until, committed_of, create_topic, end_offsets_of, produce_to
from kit.broker_cluster import BrokerCluster
from streams import Engine, Seen, options_of, texts

from spark_group_source.errors import DataLoss
from spark_group_source.kafka import Environment, EpochEnds
from spark_group_source.model import TopicPartition

Write = Callable[[str, int, int], None]
BACK_S = 120
"""Until a member whose session ended while its broker was away is back: two of the library's requests, of a minute
each."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kafka")


@pytest.fixture(scope="module")
def alone(jvm: None, data: Path) -> Iterator[BrokerCluster]:
    """A broker of its own, whose disk is at hand."""
    with BrokerCluster(data_dir=data) as started:
        yield started


@pytest.fixture
def name(alone: BrokerCluster, request: pytest.FixtureRequest) -> str:
    return create_topic(AdminClient({"bootstrap.servers": alone.bootstrap_servers}), request.node.name, 1)


@pytest.fixture
def write(alone: BrokerCluster) -> Write:
    """``write(topic, first, last)``: that many texts, each a batch of its own."""
    producer = Producer({"bootstrap.servers": alone.bootstrap_servers, "linger.ms": 0})

    def one_by_one(topic: str, first: int, last: int) -> None:
        for text in texts(first, last):
            produce_to(producer, topic, [text], partition=0)

    return one_by_one


def rows_of(name: str, offsets: range, first: int) -> list[Seen]:
    return [Seen(name, 0, offset, str(first + offset - offsets.start)) for offset in offsets]


def cut_log(broker: BrokerCluster, data: Path, tp: TopicPartition, end: int) -> None:
    """Stop the node, take the batches of a partition from ``end`` on out of its file, and start it again."""
    broker.stop_node(1)
    (log,) = data.rglob(f"{tp}/*.log")
    log.write_bytes(_below(log.read_bytes(), end))
    for mark in data.rglob(".kafka_cleanshutdown"):  # with it the node would believe its indexes
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
    """Triggers until a batch was read: a log that was cut is believed when it was told again."""
    await_until(lambda: engine.step() is not None, BACK_S, what="a batch")


def test_a_log_that_shrank_and_grew_again_between_two_batches(
    alone: BrokerCluster, data: Path, name: str, write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    options = options_of(alone.bootstrap_servers, f"g-{name}", subscribe=name)
    tp = TopicPartition(name, 0)
    write(name, 0, 9)
    with Engine(options) as engine:
        engine.run()
        assert engine.rows == rows_of(name, range(10), 0)
    log = engine.log
    assert json.loads(log[-1])["topics"][name]["leaders"] == [0]
    cut_log(alone, data, tp, 6)
    write(name, 100, 111)  # up to 18: an end alone tells of nothing

    with (
        Engine(options, log) as engine,
        pytest.raises(DataLoss, match=f"{name}-0 was cut at 6, below the position 10") as caught,
    ):
        await_batch(engine)
    assert caught.value.fields == {"topic": name, "partition": 0, "expected": 10, "available": 6}

    with Engine({**options, "failOnDataLoss": "false"}, log) as engine, caplog.at_level(logging.WARNING):
        await_batch(engine)
        assert engine.rows == rows_of(name, range(6, 18), 100), "what was never read, from where the log was cut"
        assert json.loads(engine.log[-1])["truncated_from"] == {name: {"0": 10}}
        engine.plan()
        admin = AdminClient({"bootstrap.servers": alone.bootstrap_servers})
        await_until(lambda: committed_of(admin, f"g-{name}") == end_offsets_of(admin, name), what="the commit")
    assert caplog.text.count("data loss") == 1

    former = json.loads(log[-1])
    del former["topics"][name]["leaders"]
    with Engine(options, [json.dumps(former)]) as engine:  # as a release without epochs left it: nothing can be told
        engine.run()


def test_the_librarys_words_are_those_that_the_answer_is_read_from(
    alone: BrokerCluster, name: str, write: Write
) -> None:
    """A release of librdkafka with other words would make every answer "cannot say"."""
    write(name, 0, 4)
    admin = AdminClient({"bootstrap.servers": alone.bootstrap_servers})
    assert end_offsets_of(admin, name) == {TopicPartition(name, 0): 5}
    ends = EpochEnds({"bootstrap.servers": alone.bootstrap_servers}, environment=Environment())
    tp = TopicPartition(name, 0)
    assert ends.read({tp: 0}) == {tp: 5}
    assert ends.read({tp: 7}) == {tp: None}, "an epoch that never was"
    assert ends.read({}) == {}
