"""Real Spark queries whose broker cannot be reached for six seconds, in each phase of a batch; and one node of three
that is killed. The query stays alive, and its table has every row once."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from conftest import create_topic
from kafka_words import await_until, produce_to
from kit.faulty_cluster import Fault, FaultyCluster
from rebalance.accounts import Flow, assert_once, await_committed, describe
from rebalance.conftest import make_options
from rebalance.ordinary import OrdinaryConsumer

from faults.queries import RECOVERED_S, SPARK_S, Query

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.slow]

FAULT_S = 6.0
LONG_S = 25.0
RESETS, RESET_PAUSE_S = 20, 0.4
NODE_DOWN_S = 12.0
PARTITIONS = 4
SESSION_MS = 45_000
"""Kafka's default: members outlive the faults here."""
REFUSED = Fault("refuse", 1)
PROTOCOLS = ("range", "consumer")
"""Of the classic protocol the assignor that gives all back, and KIP-848."""


@pytest.fixture(params=PROTOCOLS)
def strategy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def name(judge: AdminClient, group_id: str) -> str:
    return create_topic(judge, f"t-{group_id}", PARTITIONS)


@pytest.fixture
def query(
    spark: "SparkSession", faulty: FaultyCluster, name: str, strategy: str, group_id: str, tmp_path: Path
) -> Iterator[Query]:
    """Not started; stopped after everything is healed."""
    made = Query(spark, options(faulty, group_id, name, strategy), tmp_path)
    yield made
    faulty.heal()
    made.stop()


def options(cluster: FaultyCluster, group: str, topic: str, strategy: str) -> dict[str, str]:
    return make_options(
        cluster.bootstrap_servers, group, topic, strategy, session_ms=SESSION_MS, fetchOffset__retryIntervalMs=1000
    )


def produce(servers: str, topic: str, first: int, count: int) -> None:
    producer = Producer({"bootstrap.servers": servers, "log_level": 0})
    for partition in range(PARTITIONS):
        values = [str(n) for n in range(first, first + count) if n % PARTITIONS == partition]
        produce_to(producer, topic, values, partition=partition)


@pytest.mark.proves("G10", level="spark")
def test_refused_while_idle(query: Query, faulty: FaultyCluster, judge: AdminClient, name: str, group_id: str) -> None:
    """The plan asks how far the logs reach, again and again."""
    produce(faulty.direct_servers, name, 0, 200)
    query.start()
    query.await_(lambda: len(query.records) == 200, "the first rows")
    with faulty.suffering(REFUSED):
        produce(faulty.direct_servers, name, 200, 200)
        query.stays_alive(FAULT_S)
    query.assert_every_row_once(judge, name)
    await_committed(judge, group_id, [name])


def test_refused_from_the_sink_to_the_echo(
    query: Query, faulty: FaultyCluster, judge: AdminClient, name: str, group_id: str
) -> None:
    """The batch is durable, and its offsets cannot be brought to Kafka."""
    struck = threading.Event()

    def strike() -> None:
        if not struck.is_set():
            faulty.begin(REFUSED)
            struck.set()

    with Flow(faulty.direct_servers, name, PARTITIONS) as flow:
        query.start()
        query.await_(lambda: query.records, "the first rows")
        query.after_write = strike
        query.await_(struck.is_set, "a durable batch")
        query.stays_alive(FAULT_S)
        faulty.heal()
        flow.stop()
        query.assert_every_row_once(judge, name)
    await_committed(judge, group_id, [name])


def test_refused_while_a_revocation_is_held(
    query: Query,
    faulty: FaultyCluster,
    judge: AdminClient,
    name: str,
    strategy: str,
    group_id: str,
    tmp_path: Path,
) -> None:
    """Partitions are asked for while a batch is in flight; when it is durable nobody can be told."""
    gate, inside = threading.Event(), threading.Event()
    gate.set()

    def wait() -> None:
        if not gate.is_set():
            inside.set()
            gate.wait(SPARK_S)

    query.before_write = wait
    servers, file = faulty.direct_servers, tmp_path / "other"
    with Flow(servers, name, PARTITIONS) as flow:
        query.start()
        query.await_(lambda: query.records, "the first rows")
        gate.clear()
        query.await_(inside.is_set, "a batch in flight")
        with OrdinaryConsumer(servers, group_id, [name], file, strategy=strategy, session_ms=SESSION_MS) as other:
            await_until(lambda: "ordinary" in describe(judge, group_id).members, SPARK_S, what="the other in the group")
            with faulty.suffering(REFUSED):
                gate.set()
                query.stays_alive(FAULT_S)
            other.await_partitions(PARTITIONS // 2, RECOVERED_S)
            other.close()
            flow.stop()
            assert_once(judge, [name], [query], [other])
    await_committed(judge, group_id, [name])
    query.check()


def test_refused_at_the_start(
    query: Query, faulty: FaultyCluster, judge: AdminClient, name: str, group_id: str
) -> None:
    produce(faulty.direct_servers, name, 0, 200)
    with faulty.suffering(REFUSED):
        query.start()
        query.stays_alive(FAULT_S)
    query.assert_every_row_once(judge, name)
    await_committed(judge, group_id, [name])


@pytest.mark.soak
def test_a_query_that_starts_in_an_outage_ends_with_the_brokers_named(query: Query, faulty: FaultyCluster) -> None:
    """At the start alone: a wrong address must be told."""
    with faulty.suffering(REFUSED):
        query.start()
        await_until(query.ended_with, SPARK_S, what="the end of the query")
    told = query.ended_with()
    assert faulty.bootstrap_servers in told and "BrokerUnavailable" in told


@pytest.mark.soak
@pytest.mark.parametrize("node", [1, 2, 3])
def test_a_query_starts_while_one_node_of_three_cannot_be_reached(
    node: int, strategy: str, spark: "SparkSession", faulty_three: FaultyCluster, group_id: str, tmp_path: Path
) -> None:
    judge = AdminClient({"bootstrap.servers": faulty_three.direct_servers, "log_level": 0})
    topic = create_topic(judge, f"t-{group_id}", PARTITIONS)
    produce(faulty_three.direct_servers, topic, 0, 200)
    query = Query(spark, options(faulty_three, group_id, topic, strategy), tmp_path)
    with faulty_three.suffering(Fault("refuse", node)), query.running():
        query.stays_alive(LONG_S)
        faulty_three.heal()
        query.assert_every_row_once(judge, topic)


@pytest.mark.soak
def test_a_node_of_three_is_killed_and_comes_back(
    strategy: str, spark: "SparkSession", faulty_three: FaultyCluster, group_id: str, tmp_path: Path
) -> None:
    """The group's coordinator, which also leads partitions of the topic."""
    judge = AdminClient({"bootstrap.servers": faulty_three.direct_servers, "log_level": 0})
    topic = create_topic(judge, f"t-{group_id}", PARTITIONS)
    query = Query(spark, options(faulty_three, group_id, topic, strategy), tmp_path)
    with query.running(), Flow(faulty_three.direct_servers, topic, PARTITIONS) as flow:
        query.await_(lambda: query.records, "the first rows")
        with faulty_three.suffering(Fault("kill", describe(judge, group_id).coordinator)):
            seen = len(query.records)
            query.stays_alive(NODE_DOWN_S)
            query.await_(lambda: len(query.records) > seen + 200, "rows while the node is down", RECOVERED_S)
        flow.stop()
        query.assert_every_row_once(judge, topic)
        fresh = AdminClient({"bootstrap.servers": faulty_three.direct_servers, "log_level": 0})
        await_committed(fresh, group_id, [topic])  # what was asked of the killed coordinator may never be answered


@pytest.mark.parametrize("strategy", ["range", pytest.param("consumer", marks=pytest.mark.soak)], indirect=True)
def test_connections_are_reset_again_and_again(
    query: Query, faulty: FaultyCluster, judge: AdminClient, name: str, group_id: str
) -> None:
    """A question to the coordinator that meets a reset may never be answered, though the broker is there at once."""
    pause = threading.Event()
    with Flow(faulty.direct_servers, name, PARTITIONS) as flow:
        query.start()
        query.await_(lambda: query.records, "the first rows")
        for _ in range(RESETS):
            faulty.proxies[1].cut()
            pause.wait(RESET_PAUSE_S)
            query.check()
        flow.stop()
        query.assert_every_row_once(judge, name)
    await_committed(judge, group_id, [name])
