"""Alerts of ``conf/alerts.yml`` fire when a consumer is killed and when brokers are cut off, and clear afterwards."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from kafka_helpers import Record, await_until, create_topic, produce_to
from kit.faulty_cluster import Fault, FaultyCluster
from metrics.scrapes import Scrape, fires, firing, scrape, value, values
from rebalance.ordinary import OrdinaryConsumer

from spark_group_source.kafka.environment import Environment
from spark_group_source.metrics.groups import Exporter, GroupSweeper

pytestmark = [pytest.mark.broker, pytest.mark.slow]

ALERT_S = 600
GROUP = "watched"


class Ahead(Environment):
    """A clock that can be advanced."""

    ahead_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms


@pytest.fixture
def environment() -> Ahead:
    return Ahead()


@pytest.fixture
def exporter(faulty: FaultyCluster, environment: Ahead) -> Iterator[Exporter]:
    settings = {"bootstrap.servers": faulty.bootstrap_servers}
    sweeps = GroupSweeper(settings, (GROUP,), isolation_level="read_committed", bound_s=10, environment=environment)
    serving = Exporter(sweeps, interval_s=0.5, host="127.0.0.1", port=0, environment=environment)
    stop = threading.Event()
    thread = threading.Thread(target=serving.run, args=(stop,), name="sweeps")
    thread.start()
    yield serving
    stop.set()
    thread.join(300)
    serving.close()


def test_alerts_fire_and_clear(
    faulty: FaultyCluster, judge: AdminClient, exporter: Exporter, environment: Ahead, tmp_path: Path
) -> None:
    topic = create_topic(judge, GROUP, 1, config={"retention.ms": "-1"})
    producer = Producer({"bootstrap.servers": faulty.direct_servers, "log_level": 0})

    def produce() -> float:
        """Write a record with a timestamp of seven minutes ago; returns the timestamp in seconds."""
        at_s = round(time.time() - 420)
        produce_to(producer, topic, [Record(b"x", timestamp_ms=at_s * 1000)])
        return at_s

    def become(*alerts: str) -> Scrape:
        def scraped() -> Scrape:
            found = scrape(exporter.port)
            return found if exporter.last is not None and firing(found) == set(alerts) else {}

        return await_until(scraped, ALERT_S, what=f"alerts {alerts}")

    produce()
    with OrdinaryConsumer(faulty.direct_servers, GROUP, [topic], tmp_path / "one", session_ms=2000) as one:
        await_until(lambda: values(scrape(exporter.port), "kafka_group_lag_seconds") == [0], what="its commit")
        assert value(become(), "kafka_group_members") == 1
        one.kill()
        at_s = produce()
        at = become("KafkaGroupHasNoMembers", "KafkaGroupFallsBehind")
        assert 419 <= value(at, "kafka_group_lag_seconds") <= time.time() - at_s
    with OrdinaryConsumer(faulty.direct_servers, GROUP, [topic], tmp_path / "two", session_ms=2000):
        become()
        assert fires("increase(kafka_group_rebalances_seen_total[15m]) > 0", scrape(exporter.port), at)
        with faulty.suffering(Fault("refuse", 1)):
            await_until(lambda: exporter.last and exporter.last.unreachable_since_ms, ALERT_S, what="an outage")
            environment.ahead_ms += 61_000
            at = become("KafkaGroupUnreachable", "KafkaUnreachable")
            assert value(at, "kafka_group_up") == 0
            assert not [sample for sample in at if sample.name in ("kafka_group_lag_seconds", "kafka_group_end_offset")]
        become()
