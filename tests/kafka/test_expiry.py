"""Expiry of committed offsets (KIP-211, KIP-496), on a broker with a retention of one minute.

One minute with several groups is played once; each test checks one rule. Deletion is in ``tests/cli/test_offsets.py``.
The same broker accepts one member in each group, for the test of a full one.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import AdminClient
from kafka_helpers import await_until, committed_of, create_topic, produce_to, set_committed
from kafka_tool import kafka_consumer_groups
from manual_environment import member_consumer
from streams import Engine, numbered, options_of, texts, values_of

from spark_group_source.cli import report
from spark_group_source.kafka.consumer import GroupFull
from spark_group_source.kafka.environment import Environment
from spark_group_source.kafka.group_admin import GroupAdmin
from spark_group_source.local.broker import Broker
from spark_group_source.model import TopicPartition
from spark_group_source.protocol import partitions, run
from spark_group_source.protocol.statistics import Statistics

pytestmark = [pytest.mark.broker, pytest.mark.slow]

RETENTION_S = 60


class Member:
    """An ordinary consumer that joins, and commits on command. Within ``max.poll.interval.ms`` it need not poll."""

    def __init__(self, servers: str, group: str, topic: str, protocol: str = "classic") -> None:
        settings = {"bootstrap.servers": servers, "group.id": group, "group.protocol": protocol, "log_level": 3}
        self._consumer = Consumer({**settings, "enable.auto.commit": False, "auto.offset.reset": "latest"})
        self._consumer.subscribe([topic])
        await_until(self._joined, what=f"the partition of {group}")

    def poll(self) -> None:
        self._consumer.poll(0.1)

    def _joined(self) -> bool:
        self.poll()
        return bool(self._consumer.assignment())

    def close(self) -> None:
        self._consumer.close()

    def commit(self, *tps: TopicPartition) -> None:
        offsets = [KafkaPartition(tp.topic, tp.partition, 0) for tp in tps]
        self._consumer.commit(offsets=offsets, asynchronous=False)


@dataclass
class Minute:
    """The observations of the groups. ``kept``: the offsets of each after a minute, before members left."""

    kept: dict[str, set[str]] = field(default_factory=dict)
    just_left: dict[str, set[str]] = field(default_factory=dict)
    at_s: dict[str, float] = field(default_factory=dict)
    """When something was done or read: offsets count as kept only within a retention from it."""
    described: dict[str, Any] = field(default_factory=dict)
    statistics: dict[str, Statistics] = field(default_factory=dict)
    rows: list[str] = field(default_factory=list)
    theirs: str = ""


@pytest.fixture(scope="module")
def strict_broker(jvm: None) -> Iterator[str]:
    sizes = {"group.max.size": "1", "group.consumer.max.size": "1"}
    with Broker(settings={"offsets.retention.minutes": "1", **sizes}) as broker:
        yield broker.bootstrap_servers


@pytest.fixture(scope="module")
def minute(strict_broker: str) -> Iterator[Minute]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partitions, "RENEW_MS", RETENTION_S * 1000 // 2)
        patch.setattr(run, "RENEW_CHECK_MS", 2_000)
        yield played(strict_broker)


def played(servers: str) -> Minute:
    seen = Minute()
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 3})
    read, former = create_topic(admin, "read", 1), create_topic(admin, "former", 1)
    produce_to(Producer({"bootstrap.servers": servers}), read, numbered(0, 4))
    READ, FORMER = TopicPartition(read, 0), TopicPartition(former, 0)

    def has(group: str) -> set[str]:
        return {tp.topic for tp in committed_of(admin, group)}

    def until(after_s: float, what: str) -> None:
        await_until(lambda: time.monotonic() >= t0 + after_s, what=what)

    def await_gone(group: str, *topics: str) -> None:
        what = f"the end of the offsets of {group}"
        await_until(lambda: not has(group) & {*topics}, what=what)

    members = {p: Member(servers, p, read, p) for p in ("classic", "consumer")}
    running = Engine(options_of(servers, "running", protocol="consumer", subscribe=read))
    running.run()
    brief = Engine(options_of(servers, "brief", subscribe=read, leaveOnStop="always"))
    with brief:  # a source that stops at once
        brief.run()
    t0 = time.monotonic()
    set_committed(admin, "simple", read, {0: 0})
    for member in members.values():
        member.commit(READ, FORMER)
    # With the full retention left: on a busy machine the tool's JVM needs a good part of a minute.
    seen.theirs = kafka_consumer_groups(servers, "--describe", "--group", "classic")
    until(RETENTION_S * 0.8, "most of the retention")
    describing = GroupAdmin({"bootstrap.servers": servers}, retries=0)
    for group in ("brief", "classic", "running"):
        described = report.read_group(describing, group)
        assert described is not None
        seen.described[group] = described
    for group in ("simple", "classic", "consumer"):
        await_gone(group, former, *([read] if group == "simple" else []))
        seen.kept[group] = has(group)
    running.run()
    seen.statistics["running"] = running.coordinator._run.statistics()
    running.close()
    seen.at_s["closed"] = time.monotonic() - t0
    for member in members.values():
        member.close()
    await_gone("consumer", read)
    seen.just_left = {group: has(group) for group in ("classic", "running")}
    seen.at_s["just left"] = time.monotonic() - t0
    await_gone("brief", read)
    with Engine(options_of(servers, "brief", subscribe=read, startingOffsets="latest"), brief.log) as again:
        produce_to(Producer({"bootstrap.servers": servers}), read, numbered(5, 9))
        again.run()
        seen.statistics["brief"] = again.coordinator._run.statistics()
        seen.rows = values_of(brief.rows + again.rows)
    return seen


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_member_that_finds_the_group_full_names_the_setting_of_the_brokers(strict_broker: str, protocol: str) -> None:
    limit = {"classic": "group.max.size", "consumer": "group.consumer.max.size"}[protocol]
    create_topic(AdminClient({"bootstrap.servers": strict_broker, "log_level": 3}), topic := f"full-{protocol}", 1)
    first = Member(strict_broker, topic, topic, protocol)
    settings = {"bootstrap.servers": strict_broker, "group.id": topic, "group.protocol": protocol}
    second = member_consumer({**settings, "enable.auto.commit": "false"}, Environment())
    second.subscribe([topic])

    def refused() -> bool:
        first.poll()
        try:
            second.poll(0.1)
        except GroupFull as exc:
            return f"the brokers' {limit} allows" in str(exc)
        return False

    await_until(refused, what="the refusal of the second member")
    second.close(leave=True)
    first.close()


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_static_member_that_returns_to_a_full_group_is_refused(strict_broker: str, protocol: str) -> None:
    """Its former membership counts until its session ends, although the next member has its instance id."""
    create_topic(AdminClient({"bootstrap.servers": strict_broker, "log_level": 3}), topic := f"back-{protocol}", 1)
    settings = {"bootstrap.servers": strict_broker, "group.id": topic, "group.protocol": protocol}
    settings |= {"enable.auto.commit": "false", "group.instance.id": "i"}

    def is_in_group() -> bool:
        former.poll(0.1)
        return former.identity is not None

    def is_refused() -> bool:
        try:
            back.poll(0.1)
        except GroupFull:
            return True
        return False

    former = member_consumer(settings, Environment())
    former.subscribe([topic])
    await_until(is_in_group, what="the first member")
    former.close(leave=False)
    back = member_consumer(settings, Environment())
    back.subscribe([topic])
    await_until(is_refused, what="the refusal of the member that returns")
    back.close(leave=True)


def test_offsets_of_subscribed_topics_do_not_expire(minute: Minute) -> None:
    assert minute.kept["classic"] == minute.kept["consumer"] == {"read"}


def test_offsets_of_unsubscribed_topics_expire_while_the_group_is_active(minute: Minute) -> None:
    assert "former" not in minute.kept["classic"] | minute.kept["consumer"]


def test_offsets_of_a_group_that_never_had_members_expire_after_their_commit(minute: Minute) -> None:
    assert minute.kept["simple"] == set()


def test_idle_offsets_of_an_empty_group_expire_at_once_with_KIP_848_and_else_a_retention_after_it_was_left(
    minute: Minute,
) -> None:
    """Both groups were left at the same moment, when their commits were older than the retention."""
    assert "read" in minute.kept["consumer"], "it was there until then"
    too_late = minute.at_s["just left"] >= minute.at_s["closed"] + RETENTION_S
    assert minute.just_left["classic"] == {"read"} or too_late


def test_G2_a_query_renews_the_offsets_of_idle_partitions(minute: Minute) -> None:
    statistics = minute.statistics["running"]
    assert statistics.offsets_renewed >= 1
    assert minute.just_left["running"] == {"read"}, "that of the ordinary member was gone"


def test_G5_a_query_continues_at_its_checkpoint_when_its_offsets_expired(minute: Minute) -> None:
    """Not at ``startingOffsets``, which is latest here."""
    assert minute.statistics["brief"].offsets_restored == 1
    assert minute.rows == texts(0, 9)


def test_describe_reports_offsets_that_may_expire(minute: Minute) -> None:
    brief, classic = minute.described["brief"], minute.described["classic"]
    assert brief.offsets_retention_ms == RETENTION_S * 1000
    assert brief.offsets_expiring == ("read-0",)
    assert any("about to expire: read-0" in line for line in report.expiry_text(brief))
    by_topic = {row.topic: row for row in classic.partitions}
    assert (by_topic["read"].expires, by_topic["former"].expires) == ("kept", "its last commit")
    (line,) = report.expiry_text(classic)
    assert line == "1 offset is kept for 0.0166667 h, counted from its last commit, start not known"
    assert "former" in minute.theirs, "Kafka's own tool shows it, and its lag, until it is gone"
    assert report.expiry_text(minute.described["running"]) == []
