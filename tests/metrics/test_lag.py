"""Lag in seconds on a real Kafka: records have timestamps of the test's choice."""

import time
from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka import TopicPartition as KafkaPartition
from kafka_helpers import ADMIN_S, Record, await_markers, await_until, set_committed
from scenes import Scene

from spark_group_source.errors import BrokerUnavailable
from spark_group_source.kafka.environment import Environment
from spark_group_source.kafka.group_admin import GroupAdmin
from spark_group_source.metrics.groups import GroupSweeper, SweepResult
from spark_group_source.model import TopicPartition

WITHIN_S = 0.002
"""Timestamps are in whole milliseconds. The sweeps use the test's clock, so there is no other difference."""
HANG_S = 600
KEEP = {"retention.ms": "-1"}
COMPACT = {
    "cleanup.policy": "compact",
    "segment.ms": "100",
    "min.cleanable.dirty.ratio": "0.001",
    "max.compaction.lag.ms": "100",
}
NOW_S = time.time()


class Frozen(Environment):
    """An environment whose wall clock stands still."""

    def wall_ms(self) -> int:
        return round(NOW_S * 1000)


MakeSweeps = Callable[..., GroupSweeper]


@pytest.fixture
def sweeps(scene: Scene) -> Iterator[MakeSweeps]:
    made: list[GroupSweeper] = []

    def make(isolation_level: str = "read_committed", groups: tuple[str, ...] | None = (scene.group,)) -> GroupSweeper:
        settings = {"bootstrap.servers": scene.servers}
        made.append(
            GroupSweeper(settings, groups, isolation_level=isolation_level, bound_s=HANG_S, environment=Frozen())
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


def aged(*ages_s: float, size: int = 10) -> list[Record]:
    """Records of this age in seconds."""
    return [Record(b"x" * size, timestamp_ms=round((NOW_S - age_s) * 1000), partition=0) for age_s in ages_s]


def age_of(seen: SweepResult, topic: str) -> float | None:
    return seen.groups[0].partitions[TopicPartition(topic, 0)].age_s


def transactions(scene: Scene, topic: str, *parts: tuple[str, float]) -> Producer:
    """Three records of an age in each of several transactions: c(ommitted), a(borted) or o(pen)."""
    settings = {"bootstrap.servers": scene.servers, "transactional.id": topic, "log_level": 3}
    producer = Producer(settings | {"transaction.timeout.ms": HANG_S * 1000})  # the open one stays open
    producer.init_transactions(ADMIN_S)
    for end, age_s in parts:
        producer.begin_transaction()
        for record in aged(age_s, age_s, age_s):
            producer.produce(topic, record.value, partition=0, timestamp=record.timestamp_ms or 0)
        producer.flush(ADMIN_S)
        if end == "c":
            producer.commit_transaction(ADMIN_S)
        elif end == "a":
            producer.abort_transaction(ADMIN_S)
        if end in "ca":
            await_markers(scene.admin, topic)
    return producer


def compact(scene: Scene, topic: str) -> None:
    """Fifty records of one key, of which compaction keeps the last."""
    old = [record._replace(key=b"same") for record in aged(*[600.0] * 49, 120)]
    scene.produce(topic, old)
    consumer = Consumer({"bootstrap.servers": scene.servers, "group.id": topic, "log_level": 3})

    def is_compacted() -> bool:
        scene.produce(topic, [aged(60)[0]._replace(key=b"other")])  # rolls the segment, so that it can be compacted
        consumer.assign([KafkaPartition(topic, 0, 0)])
        message = consumer.poll(5)
        return message is not None and message.offset() == 49

    await_until(is_compacted, HANG_S, what="compaction")
    consumer.close()


@pytest.mark.slow
@pytest.mark.broker
def test_lag_in_seconds_is_the_age_of_the_next_record(scene: Scene, sweeps: MakeSweeps) -> None:
    names = ("compacted", "plain", "idle", "deleted", "aborted", "nothing", "open", "large", "future")
    topics = {name: scene.topic(config=COMPACT if name == "compacted" else KEEP) for name in names}
    compact(scene, topics["compacted"])
    for name in ("plain", "idle", "deleted"):
        scene.produce(topics[name], aged(900, 800, 700, 600, 500))
    scene.admin.delete_records([KafkaPartition(topics["deleted"], 0, 3)])[KafkaPartition(topics["deleted"], 0)].result(
        ADMIN_S
    )
    transactions(scene, topics["aborted"], ("c", 900), ("a", 800), ("c", 300), ("a", 200))
    transactions(scene, topics["nothing"], ("c", 900), ("a", 800))
    unfinished = transactions(scene, topics["open"], ("c", 900), ("o", 800))
    scene.produce(topics["large"], aged(400, 390, size=900_000))
    scene.produce(topics["future"], aged(-3000))
    at = dict(compacted=10, plain=2, idle=5, deleted=1, aborted=4, nothing=4, open=4, large=1, future=0)  # noqa: C408
    for name, offset in at.items():
        set_committed(scene.admin, scene.group, topics[name], {0: offset})

    one = sweeps()
    seen = one.sweep()
    ages = {name: age_of(seen, topics[name]) for name in names}
    assert ages == pytest.approx(
        dict(compacted=120, plain=700, idle=0, deleted=600, aborted=300, nothing=0, open=0, large=390, future=0),  # noqa: C408
        abs=WITHIN_S,
    )
    group = seen.groups[0]
    assert (group.state, group.members, group.unreachable_since_ms) == ("empty", (), None)
    lags = {name: group.partitions[TopicPartition(topics[name], 0)].lag for name in names}
    assert lags["plain"] == 3 and lags["idle"] == lags["open"] == 0 and lags["nothing"] == 4

    # Unchanged records are not fetched again; changed ones are.
    assert seen.records_read == 7
    assert one.sweep().records_read == 7
    scene.admin.delete_records([KafkaPartition(topics["plain"], 0, 4)])[KafkaPartition(topics["plain"], 0)].result(
        ADMIN_S
    )
    scene.produce(topics["nothing"], aged(50))
    set_committed(scene.admin, scene.group, topics["large"], {0: 0})
    again = one.sweep()
    assert age_of(again, topics["plain"]) == pytest.approx(500, abs=WITHIN_S)
    assert age_of(again, topics["nothing"]) == pytest.approx(50, abs=WITHIN_S)
    assert age_of(again, topics["large"]) == pytest.approx(400, abs=WITHIN_S)
    assert again.records_read == 10

    # For a consumer that reads uncommitted records the open and the aborted ones are next.
    everything = sweeps("read_uncommitted").sweep()
    assert age_of(everything, topics["open"]) == pytest.approx(800, abs=WITHIN_S)
    assert age_of(everything, topics["aborted"]) == pytest.approx(800, abs=WITHIN_S)
    unfinished.abort_transaction(ADMIN_S)


@pytest.mark.broker
def test_all_groups_are_listed_with_their_own_lag(scene: Scene, sweeps: MakeSweeps) -> None:
    topic = scene.topic(config=KEEP)
    scene.produce(topic, aged(900, 800))
    other = f"{scene.group}-other"
    one = sweeps(groups=None)
    assert not {scene.group, other} & {group.group for group in one.sweep().groups}
    set_committed(scene.admin, scene.group, topic, {0: 0})
    set_committed(scene.admin, other, topic, {0: 1})
    ages = {group.group: group.partitions for group in one.sweep().groups}
    assert ages[scene.group][TopicPartition(topic, 0)].age_s == pytest.approx(900, abs=WITHIN_S)
    assert ages[other][TopicPartition(topic, 0)].age_s == pytest.approx(800, abs=WITHIN_S)


@pytest.mark.broker
def test_a_group_is_exported_also_when_no_leader_returns_end_offsets(
    scene: Scene, sweeps: MakeSweeps, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = scene.topic(config=KEEP)
    set_committed(scene.admin, scene.group, topic, {0: 0})
    one = sweeps()

    def silent(*_: object, **__: object) -> None:
        raise BrokerUnavailable("no leader of these partitions answers")

    monkeypatch.setattr(GroupAdmin, "latest", silent)
    seen = one.sweep()
    (group,) = seen.groups
    assert (group.state, group.unreachable_since_ms, seen.unreachable_since_ms) == ("empty", None, None)
    partition = group.partitions[TopicPartition(topic, 0)]
    assert (partition.committed, partition.end, partition.lag, partition.age_s) == (0, None, None, None)
