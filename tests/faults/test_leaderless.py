"""One partition has no leader, because its only broker is down: the others are read, and it follows later."""

import time
from collections.abc import Iterable, Sequence

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # missing in the stubs
from kafka_helpers import ADMIN_S, await_until, produce_to
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
        made.result(ADMIN_S)
        self.produce(range(3))
        cluster.kill(DOWN)

        def is_leaderless() -> bool:
            return admin.list_topics(self.name, timeout=ADMIN_S).topics[self.name].partitions[DOWN - 1].leader < 0

        await_until(is_leaderless, what="a partition without a leader")

    def produce(self, partitions: Iterable[int]) -> None:
        producer = Producer({"bootstrap.servers": self.cluster.direct_servers, "log_level": 0})
        for partition in partitions:
            produce_to(producer, self.name, [str(n) for n in range(EACH)], partition=partition)

    def started(self, log: Sequence[str] = (), *, available_now: bool = False) -> Run:
        options = make_options(self.cluster.bootstrap_servers, self.group, self.name, "range", session_ms=45_000)
        return Run(options, log, available_now=available_now)


def read(run: Run) -> list[int]:
    """The number of records that the run has read of each partition."""
    return [sum(at == partition for _, at, _ in run.records) for partition in range(3)]


def test_partition_without_a_leader_delays_no_other_and_follows_when_its_broker_is_back(
    faulty_three: FaultyCluster, group_id: str
) -> None:
    """An AvailableNow run leaves it to the next run."""
    topic = LeaderlessTopic(faulty_three, group_id)
    with topic.started(available_now=True) as bounded:
        bounded.await_(lambda: read(bounded) == [EACH, EACH, 0], "the records of the partitions with a leader")
        bounded.await_(lambda: bounded.statistics["state"] == "closed", "the end of the run")
    topic.produce(range(2))
    began_s = time.monotonic()
    with topic.started(bounded.engine.log) as run:
        run.await_(lambda: read(run) == [EACH, EACH, 0], "later records of the partitions with a leader")
        print(f"others read after {time.monotonic() - began_s:.1f} s")  # noqa: T201 - a figure, not a condition
        topic.cluster.heal()
        began_s = time.monotonic()
        run.await_(lambda: read(run) == [EACH] * 3, "the records of the partition whose leader is back")
        print(f"followed after {time.monotonic() - began_s:.1f} s")  # noqa: T201
