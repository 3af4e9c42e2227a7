"""What the exporter may see: with the permissions that its page names, and without each."""

import logging

import pytest
from kafka_words import set_committed
from streams import numbered

from security.guarded import Guarded, Permission, query
from spark_group_source.metrics.sweep import GroupSnapshot, GroupSweeper
from spark_group_source.model import TopicPartition
from spark_group_source.options.table import Options

pytestmark = pytest.mark.broker

WATCHER, WORD = "watcher", "of-the-watcher-77ab"


def test_the_exporter_needs_what_its_page_says_and_shows_nothing_that_it_may_not_see(
    guarded: Guarded, group_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    topic, other = guarded.topic("watched", 1), f"{group_id}-other"
    describe_group = Permission(WATCHER, "DESCRIBE", "GROUP", group_id)
    read_topic = Permission(WATCHER, "READ", "TOPIC", topic)
    guarded.add_user(WATCHER, WORD)
    guarded.allow(describe_group, read_topic, Permission(WATCHER, "DESCRIBE", "TOPIC", topic))
    guarded.produce(topic, numbered(0, 9))
    for group in (group_id, other):
        set_committed(guarded.admin, group, topic, {0: 4})
    settings = Options.parse(query(guarded.scram(WATCHER, WORD), group_id, topic)).admin_settings()

    def seen() -> GroupSnapshot:
        """Of a new exporter, which remembers no time of a record."""
        sweeps = GroupSweeper(settings, None, isolation_level="read_committed", bound_s=30)
        named = GroupSweeper(settings, (group_id,), isolation_level="read_committed", bound_s=30)
        try:
            assert {group.group for group in sweeps.sweep().groups} <= {group_id}, "and not the other one"
            (found,) = named.sweep().groups
            return found
        finally:
            sweeps.close()
            named.close()

    tp = TopicPartition(topic, 0)
    whole = seen().partitions[tp]
    assert (whole.committed, whole.lag) == (4, 6) and whole.age_s is not None
    guarded.take_away(read_topic)
    ageless = seen().partitions[tp]
    assert (ageless.lag, ageless.age_s) == (6, None)
    guarded.give_back(read_topic)
    guarded.take_away(describe_group)
    with caplog.at_level(logging.WARNING):
        hidden = seen()
    assert hidden.unreachable_since_ms is not None and not hidden.partitions
    assert f"Describe on the group '{group_id}'" in caplog.text and WORD not in caplog.text
