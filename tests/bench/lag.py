"""Measure an exporter's sweep: every partition lags, and the group's commits move between two sweeps.

``python -m tests.bench lag [--partitions N] [--sweeps N] [--value BYTES]``

This is the worst case: cached timestamps are useless, and each sweep reads one record of every partition. Then the same
group at rest, where all timestamps are cached.
"""

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Sequence

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # the stub hides it
from kafka_helpers import set_committed
from rich.console import Console
from rich.table import Table

from spark_group_source.local.broker import Broker
from spark_group_source.metrics.groups import GroupSweeper, SweepResult

RECORDS = 20
BATCH = 5
SWEEP_S_MAX, CORE_MAX = 2.0, 0.2
"""Targets for 1,000 partitions on 2 cores at the default interval."""
INTERVAL_S = 15.0
TOPIC_PARTITIONS = 1_000
"""Partitions of one topic; a controller cannot create 10,000 in one request."""
CREATE_S = 60


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="lag")
    parser.add_argument("--partitions", type=int, default=1_000, help="a multiple of 1,000")
    parser.add_argument("--sweeps", type=int, default=5)
    parser.add_argument("--value", type=int, default=100, help="bytes of each record, five to a batch")
    chosen = parser.parse_args(arguments)
    with Broker() as broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        topics = [f"behind-{number}" for number in range(chosen.partitions // TOPIC_PARTITIONS)]
        for topic in topics:
            admin.create_topics([NewTopic(topic, TOPIC_PARTITIONS, 1)])[topic].result(CREATE_S)
        _fill(broker.bootstrap_servers, topics, chosen.value)
        settings = {"bootstrap.servers": broker.bootstrap_servers}
        sweeps = GroupSweeper(settings, ("bench",), isolation_level="read_committed", bound_s=INTERVAL_S)
        moving = []
        for number in range(chosen.sweeps + 1):  # the first one opens the connections
            for topic in topics:
                set_committed(admin, "bench", topic, dict.fromkeys(range(TOPIC_PARTITIONS), number))
            moving.append(_timed(sweeps, chosen.partitions))
        resting = [_timed(sweeps, chosen.partitions) for _ in range(chosen.sweeps)]
        sweeps.close()
    table = Table(
        "partitions", "group", "first sweep", "median of later ones", "longest", f"of a core, every {INTERVAL_S:.0f} s"
    )
    kept = True
    for name, first, later in (("moving", moving[0], moving[1:]), ("at rest", None, resting)):
        took, cpu = [t for t, _ in later], [c for _, c in later]
        load = statistics.median(cpu) / INTERVAL_S
        kept = kept and max(took) < SWEEP_S_MAX and load < CORE_MAX
        table.add_row(
            str(chosen.partitions),
            name,
            f"{first[0]:.2f} s" if first else "-",
            f"{statistics.median(took):.2f} s",
            f"{max(took):.2f} s",
            f"{load:.1%}",
        )
    Console().print(table)
    if chosen.partitions > TOPIC_PARTITIONS or chosen.value > 100:
        return 0  # there is no target
    print(f"target: under {SWEEP_S_MAX:.0f} s and {CORE_MAX:.0%}: {'met' if kept else 'MISSED'}")
    return 0 if kept else 1


def _timed(sweeps: GroupSweeper, partitions: int) -> tuple[float, float]:
    """The duration of a sweep and its CPU time, in seconds."""
    before = _cpu_s()
    seen = sweeps.sweep()
    _check(seen, partitions)
    return seen.took_s, _cpu_s() - before


def _check(seen: SweepResult, partitions: int) -> None:
    found = seen.groups[0].partitions.values()
    known = sum(p.age_s is not None and p.age_s > 0 for p in found)
    if known != partitions:
        print(f"only {known} of {partitions} ages were read", file=sys.stderr)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _fill(servers: str, topics: Sequence[str], size: int) -> None:
    """Produce records in small batches, as with many partitions; they are a minute old."""
    producer = Producer({"bootstrap.servers": servers, "queue.buffering.max.messages": 1_000_000, "log_level": 0})
    made_ms = round((time.time() - 60) * 1000)
    for topic in topics:
        for _ in range(RECORDS // BATCH):
            for partition in range(TOPIC_PARTITIONS):
                for _ in range(BATCH):
                    producer.produce(topic, b"x" * size, partition=partition, timestamp=made_ms)
            producer.flush(120)
