"""What tests share: a real Kafka, a Spark session with Delta, and short words for topics, records and offsets.

Everything that starts a process is made once per run and on demand, so a test that needs neither costs nothing.
"""

import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from kafka_words import (
    ADMIN_S,
    Offsets,
    Produce,
    Record,
    TopicFactory,
    await_until,
    committed_of,
    create_topic,
    end_offsets_of,
    produce_to,
)

from spark_group_source.local.broker import Broker
from spark_group_source.local.conf import local_spark_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "ADMIN_S",
    "Offsets",
    "Produce",
    "Record",
    "TopicFactory",
    "await_until",
    "committed_of",
    "create_topic",
    "end_offsets_of",
    "produce_to",
]

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # Spark's Python workers: else python3 of the PATH

_numbers = itertools.count(1)


def _unique(request: pytest.FixtureRequest, kind: str) -> str:
    test = "".join(c if c.isalnum() else "-" for c in request.node.name)[:60].strip("-")
    return f"{kind}-{test}-{os.getpid()}-{next(_numbers)}"


@pytest.fixture(scope="session")
def broker() -> Iterator[Broker]:
    """One Kafka node for the whole run. A test that kills or pauses a node makes its own."""
    with Broker() as started:
        yield started


@pytest.fixture(scope="session")
def admin(broker: Broker) -> AdminClient:
    """Kafka's admin client. It lives as long as the run: one that is collected drops the answers still under way."""
    return AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 3})


@pytest.fixture(scope="session")
def producer(broker: Broker) -> Producer:
    return Producer({"bootstrap.servers": broker.bootstrap_servers, "linger.ms": 2, "acks": "all", "log_level": 3})


@pytest.fixture
def topic(admin: AdminClient, request: pytest.FixtureRequest) -> TopicFactory:
    """``topic(partitions=1, config=None, name=None)`` creates a topic of its own and returns its name."""

    def create(partitions: int = 1, *, config: Mapping[str, str] | None = None, name: str | None = None) -> str:
        return create_topic(admin, name or _unique(request, "t"), partitions, config=config)

    return create


@pytest.fixture
def group_id(request: pytest.FixtureRequest) -> str:
    """A consumer group that no other test uses."""
    return _unique(request, "g")


@pytest.fixture(scope="session")
def produce(producer: Producer) -> Produce:
    """``produce(topic, records, partition=None)`` -> [(partition, offset)] once all are acknowledged.

    A record is a value (bytes or text) or a :class:`Record`.
    """

    def write(
        topic: str, records: Iterable[bytes | str | Record], *, partition: int | None = None
    ) -> list[tuple[int, int]]:
        return produce_to(producer, topic, records, partition=partition)

    return write


@pytest.fixture(scope="session")
def committed(admin: AdminClient) -> Callable[[str], Offsets]:
    """``committed(group)`` -> the next offset of each partition that the group has committed."""
    return lambda group: committed_of(admin, group)


@pytest.fixture(scope="session")
def end_offsets(admin: AdminClient) -> Callable[[str], Offsets]:
    """``end_offsets(topic)`` -> the next offset of each partition."""
    return lambda topic: end_offsets_of(admin, topic)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator["SparkSession"]:
    """One local session with Delta for the whole run. Its JVM ends with this process: it reads our end of a pipe."""
    from pyspark.sql import SparkSession

    scratch: Path = tmp_path_factory.mktemp("spark")
    builder = SparkSession.builder.master("local[2]").appName("tests")
    for key, value in local_spark_settings(scratch).items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("WARN")
    yield session
    for query in session.streams.active:
        query.stop()
    session.stop()
