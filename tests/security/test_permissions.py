"""Every permission is removed while a query runs: the error names it, and no record is lost or read twice."""

import logging

import pytest
from kafka_helpers import await_until, committed_of
from streams import Engine, numbered, texts, values_of

from security.secured import Permission, SecuredBroker, query
from spark_group_source.errors import SourceError
from spark_group_source.model import TopicPartition

pytestmark = pytest.mark.broker

CLERK, WORD = "clerk", "of-the-clerk-51c0"
ENDS_S = 600
"""Time limit of a query that lacks a permission."""

ENDING = {
    "describe the topic": (Permission(CLERK, "DESCRIBE", "TOPIC"), "Describe on the topic '{topic}'"),
    "read the topic": (Permission(CLERK, "READ", "TOPIC"), "Read on the topic '{topic}'"),
    "describe the group": (Permission(CLERK, "DESCRIBE", "GROUP"), "Describe on the group '{group}'"),
    "read the group": (Permission(CLERK, "READ", "GROUP"), "Read and Describe on the group '{group}'"),
}
ONLY_FENCING = {
    "write transactions": Permission(CLERK, "WRITE", "TRANSACTIONAL_ID"),
    "describe transactions": Permission(CLERK, "DESCRIBE", "TRANSACTIONAL_ID"),
}


@pytest.fixture(scope="module", autouse=True)
def clerk(secured: SecuredBroker) -> None:
    secured.add_user(CLERK, WORD)
    secured.allow_all(CLERK)


@pytest.mark.parametrize("what", ENDING)
def test_a_missing_permission_is_named_and_the_query_continues_after_it_is_granted(
    what: str, secured: SecuredBroker, group_id: str
) -> None:
    permission, message = ENDING[what]
    topic = secured.topic(f"taken-{what.replace(' ', '-')}")
    secured.produce(topic, numbered(0, 9, 2))
    given = query(secured.scram(CLERK, WORD), group_id, topic)
    with Engine(given) as first:
        first.run()
        secured.deny(permission)
        try:
            secured.produce(topic, numbered(10, 19, 2))
            with pytest.raises(SourceError) as failure:
                await_until(lambda: first.step() is None and False, ENDS_S, what="the refusal")
        finally:
            secured.remove_denial(permission)
    text = str(failure.value)
    assert message.format(topic=topic, group=group_id) in text
    assert "User:clerk" in text
    assert WORD not in text
    with Engine(given, first.log) as second:
        second.run()
    assert values_of(first.rows + second.rows) == texts(0, 19)
    assert sum(committed_of(secured.admin, group_id).values()) == 20


@pytest.mark.parametrize("what", ONLY_FENCING)
def test_without_permission_for_transactions_the_members_commit_and_it_is_logged_once(
    what: str, secured: SecuredBroker, group_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    permission = ONLY_FENCING[what]
    topic = secured.topic(f"members-{what.replace(' ', '-')}", 1)
    secured.deny(permission)
    try:
        with caplog.at_level(logging.WARNING), Engine(query(secured.scram(CLERK, WORD), group_id, topic)) as engine:
            for at in range(3):
                secured.produce(topic, numbered(10 * at, 10 * at + 9))
                engine.run()
            done = {TopicPartition(topic, 0): 30}
            await_until(
                lambda: engine.step() is None and committed_of(secured.admin, group_id) == done, what="the commit"
            )
    finally:
        secured.remove_denial(permission)
    assert values_of(engine.rows) == texts(0, 29)
    warnings = [line for line in caplog.messages if "transactions are denied" in line]
    assert len(warnings) == 1
    assert f"Write and Describe on the transactional id '{group_id}" in warnings[0]
    assert "User:clerk" in warnings[0]
