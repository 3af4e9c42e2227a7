"""What the library ends the whole process for: clients that end on their own thread, and answers it has no reader for.

Each is asked of a real broker, the second in a process of its own.
"""

import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import AdminClient
from conftest import ADMIN_S, Produce, TopicFactory, await_until, create_topic
from kit.broker_cluster import BrokerCluster
from streams import Engine, options_of

from spark_group_source.errors import TopicMissing
from spark_group_source.kafka import Runtime

CLI_S = 60


class Watching(Runtime):
    """Remembers the admin clients that it made, and holds none."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Callable[[], Any]] = []

    def admin(self, settings: Any) -> Any:
        client = super().admin(settings)
        self.made.append(weakref.ref(client))
        return client

    def ended(self) -> bool:
        return bool(self.made) and not [client for made in self.made if (client := made()) is not None]


def test_the_admin_clients_of_a_run_end_with_it_and_not_wherever_garbage_is_collected(
    broker: BrokerCluster, topic: TopicFactory, produce: Produce, group_id: str
) -> None:
    """No test collects garbage before it ends. A late answer lets the client's own thread do so, and then abort."""
    name, runtime = topic(1), Watching()
    produce(name, ["a"])
    with Engine(options_of(broker.bootstrap_servers, group_id, subscribe=name), runtime=runtime) as engine:
        engine.run()
        assert not runtime.ended()
    await_until(runtime.ended, what="the end of the run's clients")


def test_so_do_those_of_a_run_that_ends_before_it_has_joined(broker: BrokerCluster, group_id: str) -> None:
    runtime = Watching()
    options = options_of(broker.bootstrap_servers, group_id, subscribe="no-such-topic")
    with Engine(options, runtime=runtime) as engine, pytest.raises(TopicMissing):
        engine.run()
    await_until(runtime.ended, what="the end of the run's clients")


@pytest.mark.crash
@pytest.mark.slow
def test_B66_a_group_whose_coordinator_cannot_write_is_described_or_the_reason_said(
    cluster: BrokerCluster, group_id: str
) -> None:
    """It answers NOT_COORDINATOR after 5 s. To the library's own question for all offsets that was a segmentation
    fault."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    name = create_topic(admin, f"t-{group_id}", 1, replicas=3)
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap_servers, "group.id": group_id, "log_level": 0})
    consumer.commit(offsets=[KafkaPartition(name, 0, 5)], asynchronous=False)
    coordinator = admin.describe_consumer_groups([group_id])[group_id].result(ADMIN_S).coordinator.id
    frozen = [node for node in cluster.pids if node != coordinator]
    command = [sys.executable, "-m", "spark_group_source", "describe", "--group", group_id, "--json"]
    command += ["--bootstrap-servers", f"127.0.0.1:{cluster.ports[coordinator]}"]
    try:
        for node in frozen:
            cluster.pause(node)
        consumer.commit(offsets=[KafkaPartition(name, 0, 6)], asynchronous=True)  # has to be copied before it is read
        done = subprocess.run(command, capture_output=True, text=True, timeout=CLI_S, check=False)
    finally:
        for node in frozen:
            cluster.resume(node)
    assert done.returncode in (0, 75), done.stderr  # 75: later it may be answered
    if done.returncode == 0:
        (row,) = json.loads(done.stdout)["partitions"]
        assert (row["topic"], row["committed"]) in ((name, 5), (name, 6))
    else:
        assert "was not answered" in done.stderr + done.stdout

    def told() -> bool:
        try:
            (at,) = consumer.committed([KafkaPartition(name, 0)], timeout=ADMIN_S)
        except KafkaException:
            return False
        return bool(at.offset == 6)

    await_until(told, ADMIN_S, what="a cluster that writes again")
    consumer.close()
