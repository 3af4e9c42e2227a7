"""Kafka's errors and partitions in our words.

Runs in: wherever ``kafka`` does. Deliberately absent: asking anything.
"""

from collections.abc import Iterable
from typing import Any

from confluent_kafka import KafkaError
from confluent_kafka import TopicPartition as KafkaPartition

from spark_group_source.errors import AccessDenied, BrokerUnavailable, CommitFailed, Fenced, GroupError
from spark_group_source.model import TopicPartition

AUTH_CODES = frozenset(
    {
        KafkaError._AUTHENTICATION,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        KafkaError.UNSUPPORTED_SASL_MECHANISM,
        KafkaError._SSL,
    }
)
FENCED_CODES = frozenset(
    {KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.FENCED_INSTANCE_ID}
)
MISSING_CODES = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError.GROUP_ID_NOT_FOUND,
    }
)
STALE_CODES = frozenset(
    {
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.STALE_MEMBER_EPOCH,
        KafkaError.FENCED_MEMBER_EPOCH,
        KafkaError.FENCED_INSTANCE_ID,
    }
)
"""Who the member was when the commit was ordered, it is no more. What that means it hears itself."""


class MemberStale(CommitFailed):
    """A member in whose name offsets were to be committed is in another generation, or out."""

    def __init__(self, message: str, *, thrown_out: bool = False, share: int = 0) -> None:
        super().__init__(message)
        self.thrown_out = thrown_out
        """The broker does not know it; it may not have heard so itself."""
        self.share = share
        """Which of the shares of the commit was its."""


def stale(error: KafkaError, *, share: int = 0) -> MemberStale | None:
    """What a refused commit says of the member, if it says something of it."""
    code = error.code()
    if code not in STALE_CODES:
        return None
    thrown_out = code == KafkaError.UNKNOWN_MEMBER_ID
    return MemberStale(f"a member is not what it was: {error.str()}", thrown_out=thrown_out, share=share)


def translate(error: KafkaError, *, op: str, servers: str, waited_s: float = 0.0) -> GroupError:
    """Our error for one of Kafka's; the text names the operation and the brokers, never a setting's value."""
    code, text = error.code(), error.str()
    if code in AUTH_CODES:
        return AccessDenied(
            f"{op} was refused by {servers}: {text}. Check the kafka.security.protocol, kafka.sasl.* and kafka.ssl.* "
            "options, and what the user may do",
            op=op,
        )
    if code in FENCED_CODES:
        return Fenced(f"{op} was refused: {text}. A newer process took this one's place", op=op)
    return BrokerUnavailable(
        f"{op} was not answered by {servers} within {waited_s:.0f} s: {text}. Check kafka.bootstrap.servers and that "
        "the brokers run and can be reached from the driver",
        op=op,
        servers=servers,
        waited_ms=int(waited_s * 1000),
    )


def to_kafka(tp: TopicPartition, *more: Any) -> Any:
    """The library's object for a partition; ``more``: offset, metadata."""
    return KafkaPartition(tp.topic, tp.partition, *more)


def to_ours(partitions: Iterable[Any]) -> tuple[TopicPartition, ...]:
    """Our values for the library's partitions."""
    return tuple(TopicPartition(p.topic, p.partition) for p in partitions)
