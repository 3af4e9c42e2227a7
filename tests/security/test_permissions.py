"""Each permission taken away alone while a query runs: what it says, and that nothing is lost or doubled."""

import logging

import pytest
from kafka_words import await_until, committed_of
from streams import Engine, numbered, texts, values_of

from security.guarded import Guarded, Permission, query
from spark_group_source.errors import SourceError
from spark_group_source.model import TopicPartition

pytestmark = pytest.mark.broker

CLERK, WORD = "clerk", "of-the-clerk-51c0"
ENDS_S = 90
"""Bound of a query that misses a permission."""

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
def clerk(guarded: Guarded) -> None:
    guarded.add_user(CLERK, WORD)
    guarded.allow_all(CLERK)


@pytest.mark.parametrize("what", ENDING)
def test_a_query_without_a_permission_says_which_and_goes_on_where_it_was(
    what: str, guarded: Guarded, group_id: str
) -> None:
    permission, says = ENDING[what]
    topic = guarded.topic(f"taken-{what.replace(' ', '-')}")
    guarded.produce(topic, numbered(0, 9, 2))
    given = query(guarded.scram(CLERK, WORD), group_id, topic)
    with Engine(given) as first:
        first.run()
        guarded.take_away(permission)
        try:
            guarded.produce(topic, numbered(10, 19, 2))
            with pytest.raises(SourceError) as failure:
                await_until(lambda: first.step() is None and False, ENDS_S, what="the refusal")
        finally:
            guarded.give_back(permission)
    text = str(failure.value)
    assert says.format(topic=topic, group=group_id) in text
    assert "User:clerk" in text
    assert WORD not in text
    with Engine(given, first.log) as second:
        second.run()
    assert values_of(first.rows + second.rows) == texts(0, 19)
    assert sum(committed_of(guarded.admin, group_id).values()) == 20


@pytest.mark.parametrize("what", ONLY_FENCING)
def test_without_transactions_the_members_commit_which_is_said_once(
    what: str, guarded: Guarded, group_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    permission = ONLY_FENCING[what]
    topic = guarded.topic(f"members-{what.replace(' ', '-')}", 1)
    guarded.take_away(permission)
    try:
        with caplog.at_level(logging.WARNING), Engine(query(guarded.scram(CLERK, WORD), group_id, topic)) as engine:
            for at in range(3):
                guarded.produce(topic, numbered(10 * at, 10 * at + 9))
                engine.run()
            done = {TopicPartition(topic, 0): 30}
            await_until(
                lambda: engine.step() is None and committed_of(guarded.admin, group_id) == done, what="the commit"
            )
    finally:
        guarded.give_back(permission)
    assert values_of(engine.rows) == texts(0, 29)
    said = [line for line in caplog.messages if "transactions are not allowed here" in line]
    assert len(said) == 1
    assert f"Write and Describe on the transactional id '{group_id}" in said[0]
    assert "User:clerk" in said[0]
