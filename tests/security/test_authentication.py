"""Every kind of authentication, for every kind of client: members, admin requests, offset commits and tasks."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kafka_helpers import await_until, committed_of
from reading import read as read_batches
from streams import Engine, numbered, texts, values_of

from security import token_function
from security.certificates import Authority
from security.secured import CLIENT_SECRET, PASSWORD, SecuredBroker, query
from spark_group_source.error_codes import CODES
from spark_group_source.errors import AccessDenied, BrokerUnavailable, ReadTimeout
from spark_group_source.kafka.admin import Admin
from spark_group_source.kafka.environment import COORDINATOR_IDLE_MS
from spark_group_source.kafka.group_admin import GroupAdmin
from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.options.table import Options
from spark_group_source.reader import range_reader

pytestmark = pytest.mark.broker

SHORT_S = 10.0
"""The lifetime of a token that expires during a test."""

KINDS: dict[str, Callable[[SecuredBroker], dict[str, str]]] = {
    "TLS": lambda secured: secured.tls(),
    "client certificate": lambda secured: secured.mutual(secured.authority.issue("job")),
    "SCRAM": lambda secured: secured.scram(),
    "tokens of an endpoint": lambda secured: secured.oidc(),
    "tokens of a function": lambda secured: secured.function("security.token_function:token"),
}


@pytest.mark.parametrize(("kind", "protocol"), [*((kind, "classic") for kind in KINDS), ("SCRAM", "consumer")], ids=str)
def test_every_kind_of_authentication_works_for_every_client(
    kind: str, protocol: str, secured: SecuredBroker, group_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    topic = secured.topic(f"works-{kind.replace(' ', '-')}-{protocol}")
    secured.produce(topic, numbered(0, 9, 2))
    given = query(KINDS[kind](secured), group_id, topic, protocol=protocol)
    with Engine(given) as engine:
        engine.run()
        assert values_of(engine.rows) == texts(0, 9)
        expected = {TopicPartition(topic, 0): 5, TopicPartition(topic, 1): 5}
        await_until(lambda: engine.step() is None and committed_of(secured.admin, group_id) == expected, what="commits")
        admin = GroupAdmin(engine.options.admin_settings())
        assert admin.describe_group(group_id).members[0].partitions
        if kind == "TLS":  # everyone is a super user there
            subscribed = dict.fromkeys(expected, CODES["GROUP_SUBSCRIBED_TO_TOPIC"])
            assert admin.delete_offsets(group_id, list(expected)) == subscribed
        else:  # the login succeeded
            with pytest.raises(AccessDenied, match="needs Delete and Describe on the group"):
                admin.delete_offsets(group_id, list(expected))
    assert "transactions are denied" not in caplog.text
    assert PASSWORD not in caplog.text + repr(engine.options)
    assert CLIENT_SECRET not in caplog.text + repr(engine.options)
    assert PASSWORD not in repr(range_reader.idle_clients)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param("tokens of an endpoint", marks=pytest.mark.soak), "tokens of a function"]
)
def test_a_run_continues_after_its_tokens_expire(
    kind: str, secured: SecuredBroker, group_id: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Including the client of tasks, which is not polled between two tasks. The broker closes a connection when its
    token expires."""
    monkeypatch.setattr(secured.tokens, "life_s", SHORT_S)
    monkeypatch.setenv(token_function.LIFE_ENV, str(SHORT_S))
    topic = secured.topic(f"outlives-{kind.replace(' ', '-')}", 1)
    options = Options.parse(query(KINDS[kind](secured), group_id, topic))
    secured.produce(topic, numbered(0, 4))

    def read(end: int) -> int:
        wanted = [OffsetRange(TopicPartition(topic, 0), 0, end)]
        return sum(
            batch.num_rows for batch in read_batches(options.consumer_settings(), wanted, progress_timeout_s=300)
        )

    assert read(5) == 5
    with Engine(query(KINDS[kind](secured), group_id, topic)) as engine:
        engine.run()
        member = {m.member_id for m in Admin(engine.options.admin_settings()).describe_group(group_id).members}
        until = time.monotonic() + 2 * SHORT_S
        await_until(lambda: engine.step() is None and time.monotonic() > until, what="two lifetimes of a token")
        secured.produce(topic, numbered(5, 9))
        engine.run()
        assert values_of(engine.rows) == texts(0, 9)
        assert {m.member_id for m in Admin(engine.options.admin_settings()).describe_group(group_id).members} == member
    assert read(10) == 10
    assert committed_of(secured.admin, group_id) == {TopicPartition(topic, 0): 10}


@pytest.mark.slow
def test_G2_a_run_uses_a_certificate_that_was_replaced_on_disk(
    secured: SecuredBroker, group_id: str, tmp_path: Path
) -> None:
    """A client reads its files once, and coordinators are connected again after a pause. The broker does not accept the
    former certificate any more."""
    topic, mine = secured.topic("replaced-certificate", 1), tmp_path / "mine.pem"
    other = Authority(tmp_path, "other")
    mine.write_bytes(secured.authority.issue("job").read_bytes())
    secured.produce(topic, numbered(0, 4))
    with Engine(query(secured.mutual(mine), group_id, topic)) as engine:
        engine.run()
        read = {TopicPartition(topic, 0): 5}
        await_until(lambda: engine.step() is None and committed_of(secured.admin, group_id) == read, what="commits")
        with secured.trusting(other.ca):
            mine.write_bytes(other.issue("job").read_bytes())
            idle = time.monotonic() + 2 * COORDINATOR_IDLE_MS / 1000
            await_until(lambda: engine.step() is None and time.monotonic() > idle, what="the end of idle connections")
            secured.produce(topic, numbered(5, 9))
            engine.run()
            read = {TopicPartition(topic, 0): 10}
            await_until(lambda: engine.step() is None and committed_of(secured.admin, group_id) == read, what="commits")
        assert values_of(engine.rows) == texts(0, 9)


AWAY_S = 2.5 * SHORT_S
"""How long no tokens are issued: connections end when their token expires, and so do sessions."""


def short_lived(secured: SecuredBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make tokens of both kinds expire after :data:`SHORT_S`. While the returned file exists, the function raises."""
    away = tmp_path / "away"
    monkeypatch.setattr(secured.tokens, "life_s", SHORT_S)
    monkeypatch.setenv(token_function.LIFE_ENV, str(SHORT_S))
    monkeypatch.setenv(token_function.AWAY_ENV, str(away))
    return away


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("kind", ["tokens of an endpoint", "tokens of a function"])
def test_an_outage_of_the_token_source_longer_than_a_token_is_waited_out(
    kind: str,
    secured: SecuredBroker,
    group_id: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is an outage and not a refusal: the query continues and reads every record once, including a task that
    waited."""
    away = short_lived(secured, tmp_path, monkeypatch)
    topic = secured.topic(f"away-{kind.replace(' ', '-')}", 1)
    secured.produce(topic, numbered(0, 4))
    given = query(KINDS[kind](secured), group_id, topic)

    def tokens_are_back() -> None:
        secured.produce(topic, numbered(5, 9))
        away.unlink()
        secured.tokens.restart()

    with Engine(given) as engine:
        engine.run()
        assert values_of(engine.rows) == texts(0, 4)
        secured.tokens.close()
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
        await_until(lambda: engine.step() is None and committed_of(secured.admin, group_id) == expected, what="commits")
    assert "brokers do not answer" in caplog.text, "the outage was long enough to be logged"


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("kind", ["tokens of an endpoint", "tokens of a function"])
def test_a_task_without_a_token_times_out_with_the_reason(
    kind: str, secured: SecuredBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = short_lived(secured, tmp_path, monkeypatch)
    topic = secured.topic(f"task-{kind.replace(' ', '-')}", 1)
    secured.produce(topic, numbered(0, 4))
    options = Options.parse(query(KINDS[kind](secured), "any", topic))

    def read() -> int:
        wanted = [OffsetRange(TopicPartition(topic, 0), 0, 5)]
        return sum(batch.num_rows for batch in read_batches(options.consumer_settings(), wanted, progress_timeout_s=12))

    assert read() == 5
    secured.tokens.close()
    away.touch()
    try:
        until = time.monotonic() + 1.2 * SHORT_S
        await_until(lambda: time.monotonic() > until, 2 * SHORT_S, what="the end of the token")
        with pytest.raises((ReadTimeout, BrokerUnavailable), match=r"(?i)token"):
            read()
    finally:
        away.unlink()
        secured.tokens.restart()
    assert read() == 5
