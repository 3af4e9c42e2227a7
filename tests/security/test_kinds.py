"""Each way to say who one is, for every kind of client: members, questions, commits, and the tasks' own."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kafka_words import await_until, committed_of
from reading import read as read_batches
from streams import Engine, numbered, texts, values_of

from security import token_function
from security.guarded import CLIENT_SECRET, PASSWORD, Guarded, query
from spark_group_source.error_codes import CODES
from spark_group_source.errors import AccessDenied, BrokerUnavailable, ReadTimeout
from spark_group_source.kafka import Admin
from spark_group_source.kafka.offset_deletion import delete_offsets
from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.options.table import Options
from spark_group_source.reader import fetch

pytestmark = pytest.mark.broker

SHORT_S = 10.0
"""The life of a token that a test sees expire."""

KINDS: dict[str, Callable[[Guarded], dict[str, str]]] = {
    "TLS": lambda guarded: guarded.tls(),
    "client certificate": lambda guarded: guarded.mutual(guarded.authority.issue("job")),
    "SCRAM": lambda guarded: guarded.scram(),
    "tokens of an endpoint": lambda guarded: guarded.oidc(),
    "tokens of a function": lambda guarded: guarded.function("security.token_function:token"),
}


@pytest.mark.parametrize(("kind", "protocol"), [*((kind, "classic") for kind in KINDS), ("SCRAM", "consumer")], ids=str)
def test_members_questions_commits_deletions_and_tasks_work(
    kind: str, protocol: str, guarded: Guarded, group_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    topic = guarded.topic(f"works-{kind.replace(' ', '-')}-{protocol}")
    guarded.produce(topic, numbered(0, 9, 2))
    given = query(KINDS[kind](guarded), group_id, topic, protocol=protocol)
    with Engine(given) as engine:
        engine.run()
        assert values_of(engine.rows) == texts(0, 9)
        expected = {TopicPartition(topic, 0): 5, TopicPartition(topic, 1): 5}
        await_until(lambda: engine.step() is None and committed_of(guarded.admin, group_id) == expected, what="commits")
        assert Admin(engine.options.admin_settings()).describe_group(group_id).members[0].partitions
        if kind == "TLS":  # anyone may do anything there
            subscribed = dict.fromkeys(expected, CODES["GROUP_SUBSCRIBED_TO_TOPIC"])
            assert delete_offsets(engine.options.admin_settings(), group_id, list(expected)) == subscribed
        else:  # the login was taken
            with pytest.raises(AccessDenied, match="needs Delete and Describe on the group"):
                delete_offsets(engine.options.admin_settings(), group_id, list(expected))
    assert "transactions are not allowed" not in caplog.text
    assert PASSWORD not in caplog.text + repr(engine.options)
    assert CLIENT_SECRET not in caplog.text + repr(engine.options)
    assert PASSWORD not in repr(fetch.idle_clients)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param("tokens of an endpoint", marks=pytest.mark.soak), "tokens of a function"]
)
def test_a_run_outlives_its_tokens(
    kind: str, guarded: Guarded, group_id: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also the tasks' client, which nobody polls between two tasks. The broker ends a connection with its token."""
    monkeypatch.setattr(guarded.tokens, "life_s", SHORT_S)
    monkeypatch.setenv(token_function.LIFE_ENV, str(SHORT_S))
    topic = guarded.topic(f"outlives-{kind.replace(' ', '-')}", 1)
    options = Options.parse(query(KINDS[kind](guarded), group_id, topic))
    guarded.produce(topic, numbered(0, 4))

    def read(end: int) -> int:
        wanted = [OffsetRange(TopicPartition(topic, 0), 0, end)]
        return sum(batch.num_rows for batch in read_batches(options.consumer_settings(), wanted, deadline_s=20))

    assert read(5) == 5
    with Engine(query(KINDS[kind](guarded), group_id, topic)) as engine:
        engine.run()
        member = {m.member_id for m in Admin(engine.options.admin_settings()).describe_group(group_id).members}
        until = time.monotonic() + 2 * SHORT_S
        await_until(
            lambda: engine.step() is None and time.monotonic() > until, 3 * SHORT_S, what="two lives of a token"
        )
        guarded.produce(topic, numbered(5, 9))
        engine.run()
        assert values_of(engine.rows) == texts(0, 9)
        assert {m.member_id for m in Admin(engine.options.admin_settings()).describe_group(group_id).members} == member
    assert read(10) == 10
    assert committed_of(guarded.admin, group_id) == {TopicPartition(topic, 0): 10}


AWAY_S = 2.5 * SHORT_S
"""How long nobody gives tokens: connections end with the token that they have, and sessions with them."""


def short_lived(guarded: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tokens of both kinds live for :data:`SHORT_S`. As long as the returned file exists, the function has none."""
    away = tmp_path / "away"
    monkeypatch.setattr(guarded.tokens, "life_s", SHORT_S)
    monkeypatch.setenv(token_function.LIFE_ENV, str(SHORT_S))
    monkeypatch.setenv(token_function.AWAY_ENV, str(away))
    return away


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("kind", ["tokens of an endpoint", "tokens of a function"])
def test_tokens_that_do_not_come_for_longer_than_one_lives_are_waited_for(
    kind: str,
    guarded: Guarded,
    group_id: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is an outage and no refusal: the query goes on with every record once, also a task that waited in it."""
    away = short_lived(guarded, tmp_path, monkeypatch)
    topic = guarded.topic(f"away-{kind.replace(' ', '-')}", 1)
    guarded.produce(topic, numbered(0, 4))
    given = query(KINDS[kind](guarded), group_id, topic)

    def tokens_are_back() -> None:
        guarded.produce(topic, numbered(5, 9))
        away.unlink()
        guarded.tokens.start_again()

    with Engine(given) as engine:
        engine.run()
        assert values_of(engine.rows) == texts(0, 4)
        guarded.tokens.close()
        away.touch()
        back = threading.Timer(AWAY_S, tokens_are_back)
        back.start()
        try:
            await_until(lambda: engine.step() is not None, 6 * SHORT_S, what="records after the outage")
        finally:
            back.join()
        engine.run()
        assert values_of(engine.rows) == texts(0, 9)
        expected = {TopicPartition(topic, 0): 10}
        await_until(lambda: engine.step() is None and committed_of(guarded.admin, group_id) == expected, what="commits")
    assert "brokers do not answer" in caplog.text, "the outage was long enough to be said"


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("kind", ["tokens of an endpoint", "tokens of a function"])
def test_a_task_without_a_token_says_so_and_is_not_refused(
    kind: str, guarded: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = short_lived(guarded, tmp_path, monkeypatch)
    topic = guarded.topic(f"task-{kind.replace(' ', '-')}", 1)
    guarded.produce(topic, numbered(0, 4))
    options = Options.parse(query(KINDS[kind](guarded), "any", topic))

    def read() -> int:
        wanted = [OffsetRange(TopicPartition(topic, 0), 0, 5)]
        return sum(batch.num_rows for batch in read_batches(options.consumer_settings(), wanted, deadline_s=12))

    assert read() == 5
    guarded.tokens.close()
    away.touch()
    try:
        until = time.monotonic() + 1.2 * SHORT_S
        await_until(lambda: time.monotonic() > until, 2 * SHORT_S, what="the end of the token")
        with pytest.raises((ReadTimeout, BrokerUnavailable), match=r"(?i)token"):
            read()
    finally:
        away.unlink()
        guarded.tokens.start_again()
    assert read() == 5
