"""The consumer of a member, with a scripted library: its identity and expulsions."""

import contextlib
from collections import deque

import pytest
from confluent_kafka import KafkaError, KafkaException
from kafka_helpers import await_until
from manual_environment import A0, A1, ManualConsumer, ManualEnvironment, member_consumer, metadata, refusal
from scenes import Scene

from spark_group_source.command_line import in_sentence
from spark_group_source.errors import AccessDenied, CommitFailed, Fenced, GroupError
from spark_group_source.kafka.consumer import MemberConsumer, take_over_membership
from spark_group_source.kafka.environment import Environment
from spark_group_source.kafka.translation import OffsetNote

POLL_S_MAX = 60.0
"""A poll returns at once when there is a report; this ends a hang."""
COOPERATIVE = {"bootstrap.servers": "b", "group.id": "g", "partition.assignment.strategy": "cooperative-sticky"}


def joined(environment: ManualEnvironment, **more: str) -> tuple[MemberConsumer, ManualConsumer]:
    consumer = member_consumer({**COOPERATIVE, **more}, environment)
    consumer.subscribe(["a"])
    return consumer, environment.consumers[-1]


def test_a_member_that_was_expelled_and_rejoined_silently_is_detected(
    environment: ManualEnvironment,
) -> None:
    """An expelled incremental member that holds a revocation gets an empty assignment while it is not a member; it
    keeps its partitions, and rejoins under another id with partitions that others have read meanwhile."""
    consumer, library = joined(environment)
    library.assign_callback(A0, A1, member="before")
    library.assign_callback(generation=-1, member="")
    library.metadata = metadata(7, "after")
    consumer.identify()
    assert consumer.identity is None
    environment.script.append(lambda: None)
    with pytest.raises(GroupError, match="rejoined under another member id"):
        consumer.poll(0)


def test_a_membership_still_in_use_is_recognised_by_the_error_text(environment: ManualEnvironment) -> None:
    consumer, _ = joined(environment)
    text = "Fatal error: Broker: The instance ID is still used by another member in the consumer group"
    failure = consumer._fatal(KafkaError(KafkaError._FATAL, text))
    assert failure.fields == {"unreleased": True}


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_member_that_leaves_polls_until_it_has_left(environment: ManualEnvironment, protocol: str) -> None:
    """A KIP-848 client keeps its member id."""
    consumer, library = joined(environment, **{"group.protocol": protocol})
    library.assign_callback(A0)
    library.member_id = "m"
    environment.script.extend([lambda: None, lambda: library.revoke_callback(A0)])
    if protocol == "classic":
        environment.script.append(lambda: setattr(library, "member_id", ""))
    consumer.close(leave=True)
    assert not environment.script and environment.called()[-1] == "close"


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_consumer_that_cannot_leave_is_closed(environment: ManualEnvironment, protocol: str) -> None:
    """One that has failed for good refuses to unsubscribe."""
    consumer, library = joined(environment, **{"group.protocol": protocol})
    library.assign_callback(A0)
    environment.will("unsubscribe", refusal(KafkaError._FATAL))
    consumer.close(leave=True)
    assert environment.called()[-1] == "close"


class _ErrorMessage:
    """An error of a connection that the library reports."""

    def __init__(self, code: int = KafkaError._AUTHENTICATION, text: str = "") -> None:
        self._code, self._text = code, text or "SaslAuthenticateRequest failed: invalid_token"

    def error(self) -> KafkaError:
        return KafkaError(self._code, self._text)

    def topic(self) -> None:
        return None


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-512", "OAUTHBEARER"])
def test_a_repeatedly_refused_login_fails_a_member_unless_its_token_may_have_expired(
    environment: ManualEnvironment, mechanism: str
) -> None:
    """A client keeps its token when it gets no other one. Requests use new clients, whose login is conclusive."""
    consumer, _ = joined(environment, **{"sasl.mechanism": mechanism})
    environment.will("poll", *[_ErrorMessage()] * 4)
    environment.script.extend([lambda: None] * 4)
    environment.will("commit", KafkaException(_ErrorMessage().error()))
    if mechanism == "OAUTHBEARER":
        for _ in range(4):
            consumer.poll(0)
        with pytest.raises(CommitFailed):
            consumer.commit({A0: 5}, {A0: OffsetNote("note")})
        return
    consumer.poll(0)
    environment.clock_ms += 30_000  # the library's interval between two reports of the same error
    with pytest.raises(AccessDenied):
        consumer.poll(0)
    with pytest.raises(AccessDenied):
        consumer.commit({A0: 5}, {A0: OffsetNote("note")})


def test_a_repeatedly_lost_connection_does_not_fail_a_member(environment: ManualEnvironment) -> None:
    consumer, _ = joined(environment)
    environment.will("poll", *[_ErrorMessage(KafkaError._ALL_BROKERS_DOWN)] * 3)
    environment.script.extend([lambda: None] * 3)
    for _ in range(3):
        consumer.poll(0)


def test_a_membership_can_be_taken_over_with_a_short_poll_interval() -> None:
    """The next member has no session timeout, which the broker sets; a classic consumer has one."""
    settings = {"bootstrap.servers": "127.0.0.1:1", "group.id": "g", "group.instance.id": "i",
                "group.protocol": "consumer", "max.poll.interval.ms": "30000"}  # fmt: skip
    environment = Environment()
    environment.consumer(settings).close()
    with pytest.raises(GroupError, match="was not taken over"):
        take_over_membership(
            settings, ("t",), environment=environment, own_member_ids=deque(), is_cancelled=lambda: True
        )


def test_the_command_of_kafkas_own_tool_names_a_file_with_javas_settings(environment: ManualEnvironment) -> None:
    """The file for ``spark-group`` may have librdkafka's names, which that tool does not know."""
    consumer = member_consumer(
        {"bootstrap.servers": "b", "group.id": "g", "security.protocol": "SASL_SSL"}, environment
    )
    assert consumer._brokers_settings() == (
        "kafka-configs.sh --bootstrap-server b --command-config admin.properties --describe --all --entity-type brokers"
    )
    assert "a Java client" in in_sentence(consumer._brokers_settings())


@pytest.mark.parametrize("topics", [["a", "b"], []], ids=["another topic", "no topic"])
def test_a_fenced_member_whose_topics_change_is_reported_as_fenced(
    environment: ManualEnvironment, topics: list[str]
) -> None:
    """The refusal of the subscription does not contain the reason. As an unexpected error it would let the slot rejoin,
    which fences the process that has replaced this one."""
    consumer, _ = joined(environment)
    environment.will("subscribe", refusal(KafkaError._FATAL))
    environment.will("unsubscribe", refusal(KafkaError._FATAL))
    consumer.subscribe(topics)
    text = "Fatal error: Broker: Static consumer fenced by other consumer with same group.instance.id"
    environment.will("poll", _ErrorMessage(KafkaError._FATAL, text))
    environment.script.append(lambda: None)
    with pytest.raises(Fenced, match="fenced by other consumer"):
        consumer.poll(0.1)


def test_a_fenced_consumer_refuses_a_subscription_and_reports_its_fencing_in_the_next_poll(scene: Scene) -> None:
    """As the scripted consumer above does."""
    name = scene.topic()
    settings = {"bootstrap.servers": scene.servers, "group.id": scene.group, "group.instance.id": "i"}
    settings |= {"enable.auto.commit": "false", "log_level": "0"}
    first = member_consumer(settings, Environment())
    first.subscribe([name])

    def joined() -> bool:
        first.poll(0.1)
        return first.identity is not None

    await_until(joined, what="the first member")
    second = member_consumer(settings, Environment())
    second.subscribe([name])

    def is_refused() -> bool:
        with contextlib.suppress(Fenced):
            second.poll(0.1)
        try:
            first._consumer.subscribe([name])
        except KafkaException as exc:
            return bool(exc.args[0].code() == KafkaError._FATAL)
        return False

    await_until(is_refused, what="the refusal of a subscription")
    first.subscribe([name, "another"])
    with pytest.raises(Fenced):
        first.poll(POLL_S_MAX)
    for consumer in (first, second):
        consumer.close(leave=True)
