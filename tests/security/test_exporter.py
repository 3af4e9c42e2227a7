"""The exporter with the permissions that its page lists, and without each of them."""

import logging

import pytest
from kafka_helpers import ADMIN_S, await_until, set_committed
from streams import OtherMember, numbered

from security.secured import Permission, SecuredBroker, query
from spark_group_source.cli import report
from spark_group_source.kafka.group_admin import GroupAdmin
from spark_group_source.metrics.groups import GroupSnapshot, GroupSweeper
from spark_group_source.model import TopicPartition
from spark_group_source.options.table import Options

pytestmark = pytest.mark.broker

WATCHER, WORD = "watcher", "of-the-watcher-77ab"


def test_the_exporter_needs_the_documented_permissions_and_shows_only_what_it_may_describe(
    secured: SecuredBroker, group_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    topic, other = secured.topic("watched", 1), f"{group_id}-other"
    describe_group = Permission(WATCHER, "DESCRIBE", "GROUP", group_id)
    read_topic = Permission(WATCHER, "READ", "TOPIC", topic)
    secured.add_user(WATCHER, WORD)
    secured.allow(describe_group, read_topic, Permission(WATCHER, "DESCRIBE", "TOPIC", topic))
    secured.produce(topic, numbered(0, 9))
    for group in (group_id, other):
        set_committed(secured.admin, group, topic, {0: 4})
    settings = Options.parse(query(secured.scram(WATCHER, WORD), group_id, topic)).admin_settings()

    def seen() -> GroupSnapshot:
        """Sweep with a new exporter, which has no cached record time."""
        sweeps = GroupSweeper(settings, None, isolation_level="read_committed", bound_s=ADMIN_S)
        named = GroupSweeper(settings, (group_id,), isolation_level="read_committed", bound_s=ADMIN_S)
        try:
            assert {group.group for group in sweeps.sweep().groups} <= {group_id}, "only the permitted group"
            (found,) = named.sweep().groups
            return found
        finally:
            sweeps.close()
            named.close()

    tp = TopicPartition(topic, 0)
    whole = seen().partitions[tp]
    assert (whole.committed, whole.lag) == (4, 6) and whole.age_s is not None
    secured.deny(read_topic)
    ageless = seen().partitions[tp]
    assert (ageless.lag, ageless.age_s) == (6, None)
    secured.remove_denial(read_topic)
    secured.deny(describe_group)
    with caplog.at_level(logging.WARNING):
        hidden = seen()
    assert hidden.unreachable_since_ms is not None and not hidden.partitions
    assert f"Describe on the group '{group_id}'" in caplog.text and WORD not in caplog.text


def test_a_topic_that_may_not_be_described_hides_no_other_of_its_group(secured: SecuredBroker, group_id: str) -> None:
    seen, hidden = secured.topic("seen", 1), secured.topic("hidden", 1)
    secured.add_user(WATCHER, WORD)
    secured.allow(Permission(WATCHER, "DESCRIBE", "GROUP", group_id), Permission(WATCHER, "DESCRIBE", "TOPIC", seen))
    secured.produce(seen, numbered(0, 9))
    settings = Options.parse(query(secured.scram(WATCHER, WORD), group_id, seen)).admin_settings()
    for topic in (seen, hidden):
        set_committed(secured.admin, group_id, topic, {0: 4})
    sweeps = GroupSweeper(settings, (group_id,), isolation_level="read_committed", bound_s=ADMIN_S)
    with OtherMember(secured.broker.bootstrap_servers, group_id, [seen, hidden]) as member:
        await_until(lambda: len(member.partitions) == 2, what="its partitions")
        (found,) = sweeps.sweep().groups
        described = report.read_group(GroupAdmin(settings), group_id)
        assert described is not None
    sweeps.close()
    assert {tp.topic: at.lag for tp, at in found.partitions.items()} == {seen: 6}
    assert {row.topic: row.lag for row in described.partitions} == {seen: 6, hidden: None}
