"""A task's read of a range while the node is unreachable for seconds: it waits, skips nothing and completes.

The ranges are large and the connection stops in their middle, where the fault is applied. A guess of the client library
about a topic without a connection is not a broker's answer: no record that is still in the log is lost.
"""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from kafka_helpers import ADMIN_S, await_progress, create_topic, end_offsets_of
from kit.faulty_cluster import Fault, FaultyCluster
from kit.proxy import Conditions, Direction
from reading import read as read_batches

from spark_group_source.model import OffsetRange, TopicPartition

pytestmark = [pytest.mark.broker, pytest.mark.slow]

RECORDS = 120_000
RECORD = b"r" * 240
PARTITIONS = 3
FAULT_S = 6.0
DEADLINE_S = 300.0
PASSED = 8_000_000
"""Bytes until the fault: the connection stops there, so the fault hits the middle of the read."""
TOPIC = "large"


@pytest.fixture(scope="module")
def large(one_node: FaultyCluster) -> list[OffsetRange]:
    """30 MB in small records."""
    admin = AdminClient({"bootstrap.servers": one_node.direct_servers, "log_level": 0})
    create_topic(admin, TOPIC, PARTITIONS)
    fill(one_node.direct_servers)
    ends = end_offsets_of(admin, TOPIC)
    assert sum(ends.values()) == RECORDS
    return [OffsetRange(tp, 0, end) for tp, end in ends.items()]


def fill(servers: str) -> None:
    producer = Producer(
        {"bootstrap.servers": servers, "linger.ms": 20, "log_level": 0, "queue.buffering.max.messages": 2 * RECORDS}
    )
    for number in range(RECORDS):
        producer.produce(TOPIC, RECORD, partition=number % PARTITIONS)
    assert producer.flush(ADMIN_S) == 0


class Trouble:
    """Applies a fault in the middle of the responses and heals it some seconds later, on its own thread."""

    def __init__(self, cluster: FaultyCluster, fault: Fault) -> None:
        self._cluster, self._fault = cluster, fault
        self._thread = threading.Thread(target=self._run, name="trouble")
        self._over = threading.Event()
        self.struck = False
        """Assert that the fault was applied and is healed."""
        self._stop_at = self._passed() + PASSED

    def _run(self) -> None:
        await_progress(
            lambda: self._over.is_set() or self._passed() >= self._stop_at, self._passed, what="the middle of the read"
        )
        if not self._over.is_set():
            with self._cluster.suffering(self._fault):
                self._over.wait(FAULT_S)
            self.struck = True

    def _passed(self) -> int:
        return self._cluster.proxies[self._fault.node].passed[Direction.TO_CLIENT]

    def __enter__(self) -> "Trouble":
        self._cluster.proxies[self._fault.node].set_conditions(
            Conditions(stop_at_bytes=self._stop_at), Direction.TO_CLIENT
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(DEADLINE_S)
        self._cluster.heal()


def offsets_of(batches: Iterator[object]) -> dict[TopicPartition, list[int]]:
    found: dict[TopicPartition, list[int]] = {}
    for batch in batches:
        columns = {name: batch.column(name).to_numpy(zero_copy_only=False) for name in ("partition", "offset")}  # type: ignore[attr-defined]
        for partition in np.unique(columns["partition"]).tolist():
            mine = columns["offset"][columns["partition"] == partition].tolist()
            found.setdefault(TopicPartition(TOPIC, partition), []).extend(mine)
    return found


STRUCK = [
    (Fault("refuse", 1), False),
    (Fault("drop", 1), False),
    (Fault("kill", 1), False),
    pytest.param(Fault("refuse", 1), True, marks=pytest.mark.full),
    pytest.param(Fault("reset-after", 1, (Direction.TO_CLIENT,), 1_500_000), False, marks=pytest.mark.full),
    pytest.param(Fault("pause", 1), False, marks=pytest.mark.soak),
    pytest.param(Fault("pause", 1), True, marks=pytest.mark.soak),
    pytest.param(Fault("half-open", 1, (Direction.TO_CLIENT,)), True, marks=pytest.mark.soak),
]


@pytest.mark.proves("G1", level="kafka")
@pytest.mark.parametrize(("fault", "fail_on_data_loss"), STRUCK)
def test_a_read_with_a_fault_in_the_middle_has_every_record_once(
    fault: Fault, fail_on_data_loss: bool, faulty: FaultyCluster, large: list[OffsetRange]
) -> None:
    batches = read_batches(
        {"bootstrap.servers": faulty.bootstrap_servers, "isolation.level": "read_committed"},
        large,
        fail_on_data_loss=fail_on_data_loss,
        progress_timeout_s=DEADLINE_S,
    )
    with Trouble(faulty, fault) as trouble:
        found = offsets_of(batches)
    counts = {tp: (len(found.get(tp, [])), end - start) for tp, start, end in large}
    assert all(found.get(tp) == list(range(start, end)) for tp, start, end in large), f"read, of all: {counts}"
    assert trouble.struck, "the read was over before the fault was"
