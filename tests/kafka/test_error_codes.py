"""The meaning of Kafka's error codes, retries and confirmations."""

import itertools
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError
from manual_environment import A0, A1, ManualEnvironment, refusal

from spark_group_source.error_codes import CODES, EXCEPTIONS, MEANINGS, Meaning, Request, Suspicions, meaning
from spark_group_source.errors import AccessDenied, BrokerUnavailable, GroupError
from spark_group_source.kafka.admin import AFTER_RENEWAL_S, FIRST_TIMEOUT_S, REQUEST_TIMEOUT_S, SHORT_TIMEOUT_S, Admin
from spark_group_source.kafka.retry import CONFIRM_S, Retry
from spark_group_source.kafka.translation import ClientInfo

SETTINGS = {"bootstrap.servers": "b"}
NAMES = {
    name: value
    for name in dir(KafkaError)
    if name.strip("_").isupper() and isinstance(value := getattr(KafkaError, name), int)
}
UNHEARD_OF = 9_999
REFUSED = refusal(KafkaError.TOPIC_AUTHORIZATION_FAILED)


def bounds(environment: ManualEnvironment) -> list[float]:
    """The timeout of each request for offsets."""
    return [bound_s for client in environment.admins for bound_s in client.bounds_s]


def test_every_code_of_the_table_is_known_to_the_library_and_has_one_meaning() -> None:
    """A code that is in no table is retried."""
    assert CODES.items() <= NAMES.items()
    assert MEANINGS.keys() == set(CODES.values())
    assert all(code in MEANINGS and MEANINGS[code] is not means for (_, code), means in EXCEPTIONS.items())


@pytest.mark.proves("G10", level="core")
def test_G10_no_code_of_the_library_itself_means_gone() -> None:
    assert not [code for code in MEANINGS if code < 0 for request in Request if meaning(request, code) is Meaning.GONE]


@pytest.mark.parametrize("code", [UNHEARD_OF, KafkaError.LEADER_NOT_AVAILABLE, KafkaError._TRANSPORT])
def test_an_unlisted_code_is_retried(code: int) -> None:
    assert {meaning(request, code) for request in Request} == {Meaning.RETRY}


def test_a_suspicion_is_confirmed_by_a_second_report_after_the_grace_period() -> None:
    suspicions = Suspicions(grace=3.0)
    assert not suspicions.report("a", 0.0)
    assert not suspicions.report("a", 2.9)
    assert not suspicions.report("b", 100.0)
    assert suspicions.report("a", 3.0)
    assert "a" in suspicions
    suspicions.clear("a")
    assert "a" not in suspicions
    assert not suspicions.report("a", 100.0)


def test_a_suspicion_that_is_not_repeated_in_time_is_forgotten() -> None:
    suspicions = Suspicions(grace=3.0, expires=60.0)
    assert not suspicions.report("a", 0.0)
    assert not suspicions.report("a", 60.1)
    assert suspicions.report("a", 63.1)


@pytest.mark.parametrize("request_", Request, ids=lambda request: request.name)
def test_retry_follows_every_row_of_the_table(request_: Request) -> None:
    """Retried, confirmed by the second report, or final: for each code in the response to each kind of request."""
    for code in MEANINGS.keys() - {KafkaError.NO_ERROR}:
        environment = ManualEnvironment()
        tries = itertools.count(1)

        def call(tries: "itertools.count[int]" = tries, code: int = code) -> str:
            if next(tries) < 3:
                raise refusal(code)
            return "answer"

        def retried(environment: ManualEnvironment = environment) -> str:
            return Retry(ClientInfo("b:9092"), environment, retries=3)(request_, "reading", call)

        means = meaning(request_, code)
        if means is Meaning.RETRY:
            assert retried() == "answer"
            assert next(tries) == 4
            continue
        with pytest.raises(GroupError, match="reading") as failure:
            retried()
        assert isinstance(failure.value, AccessDenied) == (means is Meaning.REFUSED)
        assert next(tries) == (3 if means in (Meaning.REFUSED, Meaning.GONE) else 2)


def test_a_refusal_is_raised_only_when_it_is_repeated(environment: ManualEnvironment, scripted_admin: Admin) -> None:
    environment.will("list_offsets", {A0: REFUSED}, {A0: REFUSED})
    with pytest.raises(AccessDenied, match="Describe on the topic 'a'"):
        scripted_admin.latest([A0])
    assert environment.clock_ms >= CONFIRM_S * 1000
    environment.will("list_offsets", {A0: REFUSED}, {A0: _info(5)})
    assert scripted_admin.latest([A0]) == {A0: 5}


def test_a_refused_connection_is_raised_only_when_a_new_client_is_refused_too(
    environment: ManualEnvironment, scripted_admin: Admin
) -> None:
    """The library reports it once in 30 s; an old report is unrelated to a slow answer days later."""
    reported = KafkaError(KafkaError._AUTHENTICATION)
    scripted_admin._on_error(reported)
    environment.will("list_offsets", {A0: _info(5)})
    assert scripted_admin.latest([A0]) == {A0: 5}
    environment.will("list_offsets", {A0: _Slow(None, scripted_admin)})
    assert scripted_admin.latest([A0]) == {A0: 6}  # slow only
    environment.will("list_offsets", {A0: _Slow(reported, scripted_admin)}, {A0: _info(7)})
    assert scripted_admin.latest([A0]) == {A0: 7}  # refused, and not confirmed
    environment.will("list_offsets", {A0: _Slow(reported, scripted_admin)}, {A0: _Slow(reported, scripted_admin)})
    with pytest.raises(AccessDenied):
        scripted_admin.latest([A0])
    assert len(environment.admins) == 4


NO_TOKEN = "Failed to acquire SASL OAUTHBEARER token: "


@pytest.mark.parametrize(
    "text",
    [
        NO_TOKEN + "Failed to connect to idp port 443: Connection refused",
        NO_TOKEN + "Operation timed out after 20001 milliseconds with 0 bytes received",
        NO_TOKEN + "Server did not provide an error string",
        NO_TOKEN + "<html><h1>503 Service Unavailable</h1></html>",
        NO_TOKEN + '{"error":"temporarily_unavailable"}',
        NO_TOKEN + "OAuth callback raised exception",
        "OAUTHBEARER cannot log in because there is no token available; last error: (not available)",
    ],
)
def test_G10_a_missing_token_counts_as_unanswered_with_the_cause_in_the_error(
    environment: ManualEnvironment, text: str
) -> None:
    admin = Admin(SETTINGS, environment=environment, retries=1)
    silent = _Slow(KafkaError(KafkaError._AUTHENTICATION, text), admin, refusal(KafkaError._TIMED_OUT))
    environment.will("list_offsets", *[{A0: silent}] * 2)
    with pytest.raises(BrokerUnavailable, match="has no token") as failure:
        admin.latest([A0])
    assert text in str(failure.value) and "kafka.oauth_cb" in str(failure.value)
    environment.will("list_offsets", {A0: silent}, {A0: _info(5)})
    assert admin.latest([A0]) == {A0: 5}


@pytest.mark.parametrize("text", ['{"error": "invalid_client"}', '{"error_description":"x","error":"invalid_scope"}'])
def test_an_OAuth_error_of_the_token_endpoint_is_a_refusal(
    environment: ManualEnvironment, scripted_admin: Admin, text: str
) -> None:
    reported = KafkaError(KafkaError._AUTHENTICATION, NO_TOKEN + text)
    environment.will("list_offsets", {A0: _Slow(reported, scripted_admin)}, {A0: _Slow(reported, scripted_admin)})
    with pytest.raises(AccessDenied, match="invalid_"):
        scripted_admin.latest([A0])


def test_other_partitions_wait_only_the_short_timeout_for_an_unavailable_leader(
    environment: ManualEnvironment,
) -> None:
    """A request is answered as a whole: after a partly unanswered one the next has the short timeout."""
    admin = Admin(SETTINGS, environment=environment, retries=1)
    moves, there = {A0: _info(5), A1: refusal(KafkaError._TIMED_OUT)}, {A0: _info(5), A1: _info(6)}
    environment.will("list_offsets", moves, moves, there, there)
    for _ in range(3):
        admin.latest([A0, A1], require_all=False)
    environment.clock_ms += int(AFTER_RENEWAL_S * 1000)
    admin.latest([A0, A1], require_all=False)
    assert bounds(environment) == [FIRST_TIMEOUT_S, SHORT_TIMEOUT_S, SHORT_TIMEOUT_S, FIRST_TIMEOUT_S]


def test_a_topic_request_after_an_unanswered_one_has_the_short_timeout(
    environment: ManualEnvironment,
) -> None:
    """It goes to one broker, which the cluster names to each client: it may be the unavailable one."""
    admin = Admin(SETTINGS, environment=environment, retries=3)
    gone = refusal(KafkaError._TIMED_OUT)
    environment.will("describe_topics", {"a": gone}, {"a": gone}, {"a": gone})
    admin.describe_topics(["a"])
    bounds_s = [bound_s for client in environment.admins for bound_s in client.topic_bounds_s]
    assert bounds_s == [FIRST_TIMEOUT_S, SHORT_TIMEOUT_S, FIRST_TIMEOUT_S, SHORT_TIMEOUT_S]


def test_a_slow_leader_gets_the_full_timeout_in_the_retry(environment: ManualEnvironment) -> None:
    admin = Admin(SETTINGS, environment=environment, retries=1)
    unanswered = {A0: refusal(KafkaError._TIMED_OUT), A1: refusal(KafkaError._TIMED_OUT)}
    both = {A0: _info(5), A1: _info(6)}
    environment.will("list_offsets", {A0: _info(5), A1: refusal(KafkaError._TIMED_OUT)}, unanswered, both)
    admin.latest([A0, A1], require_all=False)
    assert admin.latest([A0, A1], require_all=False) == {A0: 5, A1: 6}
    assert bounds(environment) == [FIRST_TIMEOUT_S, SHORT_TIMEOUT_S, FIRST_TIMEOUT_S]


def test_a_slow_cluster_gets_the_full_timeout_until_an_answer_is_fast(environment: ManualEnvironment) -> None:
    admin = Admin(SETTINGS, environment=environment, retries=9)
    silent, answer = {A0: refusal(KafkaError._TIMED_OUT)}, {A0: _info(5)}
    environment.will("list_offsets", silent, silent, silent, silent, answer, answer)
    assert admin.latest([A0]) == {A0: 5}
    environment.clock_ms += int(AFTER_RENEWAL_S * 1000)
    admin.latest([A0])
    first, away = FIRST_TIMEOUT_S, SHORT_TIMEOUT_S
    assert bounds(environment) == [first, away, first, away, REQUEST_TIMEOUT_S, first]


def test_one_slow_leader_gets_the_full_timeout_although_others_are_fast(
    environment: ManualEnvironment,
) -> None:
    """A partial answer is an answer: without it the other partitions would wait, and with it the slow one may
    starve."""
    admin = Admin(SETTINGS, environment=environment, retries=9)
    late = {A0: _info(5), A1: _TakesTooLong(environment)}
    environment.will("list_offsets", late, late, {A0: _info(5), A1: _info(6)})
    for _ in range(2):
        assert admin.latest([A0, A1], require_all=False) == {A0: 5}
        environment.clock_ms += int(AFTER_RENEWAL_S * 1000)
    assert admin.latest([A0, A1], require_all=False) == {A0: 5, A1: 6}
    assert bounds(environment) == [FIRST_TIMEOUT_S, FIRST_TIMEOUT_S, REQUEST_TIMEOUT_S]


def test_one_partition_without_a_leader_fails_a_request_only_with_require_all(
    environment: ManualEnvironment, scripted_admin: Admin
) -> None:
    moves = {A0: _info(5), A1: refusal(KafkaError.NOT_LEADER_FOR_PARTITION)}
    environment.will("list_offsets", moves, moves)
    environment.will("list_offsets", *[moves] * 3)
    for _ in range(4):
        assert scripted_admin.latest([A0, A1], require_all=False) == {A0: 5}
    assert len(environment.admins) <= 2
    with pytest.raises(BrokerUnavailable, match="listing offsets was not answered"):
        scripted_admin.latest([A0, A1])


def test_G10_a_partition_unknown_to_the_library_is_retried(environment: ManualEnvironment) -> None:
    """The library reports it at once for each partition whose broker it cannot reach."""
    admin = Admin(SETTINGS, environment=environment, retries=1)
    environment.will("list_offsets", {A0: refusal(KafkaError._UNKNOWN_PARTITION)}, {A0: _info(5)})
    environment.will("describe_topics", {"a": SimpleNamespace(partitions=[SimpleNamespace(id=0, leader=1)])})
    assert admin.latest([A0]) == {A0: 5}


class _Slow:
    """A pending answer; meanwhile the library may report a refusal."""

    def __init__(self, error: KafkaError | None, admin: Admin, end: Exception | None = None) -> None:
        self._error, self._admin, self._end, self._looks = error, admin, end, 0

    def result(self, timeout: float) -> object:
        self._looks += 1
        if self._looks % 2:
            if self._error is not None:
                self._admin._on_error(self._error)
            raise TimeoutError
        if self._end is not None:
            raise self._end
        return _info(6)


class _TakesTooLong:
    """An answer that exceeds the timeout of first requests."""

    def __init__(self, environment: ManualEnvironment) -> None:
        self._environment = environment

    def result(self, timeout: float) -> object:
        self._environment.clock_ms += int(FIRST_TIMEOUT_S * 1000)
        raise refusal(KafkaError._TIMED_OUT)


def _info(offset: int) -> object:
    return type("Info", (), {"offset": offset})()


NOTHING = -1001
"""The library's offset when no broker answered in time, without an error."""


@pytest.mark.parametrize("method", ["latest", "earliest", "at_time"])
def test_G10_an_offset_not_returned_by_a_broker_is_no_answer(environment: ManualEnvironment, method: str) -> None:
    admin = Admin(SETTINGS, environment=environment, retries=1)
    question = {"latest": lambda: admin.latest([A0]), "earliest": lambda: admin.earliest([A0])}.get(
        method, lambda: admin.offsets_at_time({A0: 5})
    )
    environment.will("list_offsets", {A0: _info(NOTHING)}, {A0: _info(7)})
    assert question() == {A0: 7}
    environment.will("list_offsets", *[{A0: _info(NOTHING)}] * 2)
    with pytest.raises(BrokerUnavailable):
        question()


def test_no_record_at_or_after_a_timestamp_is_an_answer(environment: ManualEnvironment) -> None:
    environment.will("list_offsets", {A0: _info(-1)})
    assert Admin(SETTINGS, environment=environment, retries=0).offsets_at_time({A0: 5}) == {A0: None}


def test_a_failed_request_is_retried_by_a_new_client(environment: ManualEnvironment) -> None:
    """A client keeps sending to a leader that died or has lost the partition."""
    admin = Admin(SETTINGS, environment=environment, retries=2)
    fenced = {A0: refusal(KafkaError.FENCED_LEADER_EPOCH)}
    environment.will("list_offsets", fenced, fenced, {A0: _info(7)}, {A0: _info(8)})
    assert admin.latest([A0]) == {A0: 7}
    assert len(environment.admins) == 3
    assert admin.latest([A0]) == {A0: 8}
    assert len(environment.admins) == 3
