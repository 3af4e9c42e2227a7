"""One partition has no leader, because its only broker is down: the others are read, and it follows later."""

import time

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # missing in the stubs
from kafka_helpers import await_until, produce_to
from kit.faulty_cluster import FaultyCluster
from rebalance.conftest import make_options
from rebalance.runs import Run

pytestmark = [pytest.mark.broker, pytest.mark.slow]

EACH = 500
DOWN = 3


class LeaderlessTopic:
    """A topic with one partition on each node; the last node is down."""

    def __init__(self, cluster: FaultyCluster, group: str) -> None:
        self.cluster, self.group, self.name = cluster, group, f"t-{group}"
        admin = AdminClient({"bootstrap.servers": cluster.direct_servers, "log_level": 0})
        (made,) = admin.create_topics([NewTopic(self.name, 3, replica_assignment=[[1], [2], [3]])]).values()
        made.result()
        producer = Producer({"bootstrap.servers": cluster.direct_servers, "log_level": 0})
        for partition in range(3):
            produce_to(producer, self.name, [str(n) for n in range(EACH)], partition=partition)
        cluster.kill(DOWN)

        def is_leaderless() -> bool:
            return admin.list_topics(self.name, timeout=10).topics[self.name].partitions[DOWN - 1].leader < 0

        await_until(is_leaderless, what="a partition without a leader")

    def started(self, *, available_now: bool = False) -> Run:
        options = make_options(self.cluster.bootstrap_servers, self.group, self.name, "range", session_ms=45_000)
        return Run(options, available_now=available_now)


@pytest.fixture
def topic(faulty_three: FaultyCluster, group_id: str) -> LeaderlessTopic:
    return LeaderlessTopic(faulty_three, group_id)


def read(run: Run) -> list[int]:
    """The number of records that the run has read of each partition."""
    return [sum(at == partition for _, at, _ in run.records) for partition in range(3)]


def test_partition_without_a_leader_delays_no_other_and_follows_when_its_broker_is_back(topic: LeaderlessTopic) -> None:
    began_s = time.monotonic()
    with topic.started() as run:
        run.await_(lambda: read(run) == [EACH, EACH, 0], "the records of the partitions with a leader")
        print(f"others read after {time.monotonic() - began_s:.1f} s")  # noqa: T201 - a figure, not a condition
        topic.cluster.heal()
        began_s = time.monotonic()
        run.await_(lambda: read(run) == [EACH] * 3, "the records of the partition whose leader is back")
        print(f"followed after {time.monotonic() - began_s:.1f} s")  # noqa: T201


def test_available_now_leaves_a_partition_without_a_leader_to_the_next_run(topic: LeaderlessTopic) -> None:
    with topic.started(available_now=True) as run:
        run.await_(lambda: read(run) == [EACH, EACH, 0], "the records of the partitions with a leader")
        run.await_(lambda: run.statistics["state"] == "closed", "the end of the run")
    topic.cluster.heal()
    with topic.started(available_now=True) as later:
        later.await_(lambda: read(later)[DOWN - 1] == EACH, "the records of the partition whose leader is back")
