"""Kafka's errors and partitions in our words.

Runs in: wherever ``kafka`` does. Deliberately absent: asking anything.
"""

from collections.abc import Iterable
from typing import Any

from confluent_kafka import KafkaError
from confluent_kafka import TopicPartition as KafkaPartition

from spark_group_source.answers import Meaning, Request, meaning
from spark_group_source.errors import AccessDenied, BrokerUnavailable, CommitFailed, Fenced, GroupError
from spark_group_source.model import TopicPartition

_NEEDS = {
    Request.TOPICS: "Describe on the topics",
    Request.OFFSETS: "Describe on the topics",
    Request.FETCH: "Read on the topics",
    Request.GROUP: "Describe on the group",
    Request.COMMITTED: "Describe on the group and the topics",
    Request.ALTER: "Read on the group and the topics",
    Request.JOIN: "Read on the group, and Describe on the topics",
    Request.COMMIT: "Read on the group and the topics",
    Request.TRANSACTION: "Write on the transactional id, and Read on the group and the topics",
}
"""Operations of Kafka's access control lists."""


class MemberStale(CommitFailed):
    """A member in whose name offsets were to be committed is in another generation, or out."""

    def __init__(self, message: str, *, thrown_out: bool = False, share: int = 0) -> None:
        super().__init__(message)
        self.thrown_out = thrown_out
        """The broker does not know it; it may not have heard so itself."""
        self.share = share
        """Which of the shares of the commit was its."""


def stale(error: KafkaError, *, request: Request, share: int = 0) -> MemberStale | None:
    """What a refused commit says of the member, if it says something of it."""
    if meaning(request, error.code()) is not Meaning.STALE:
        return None
    thrown_out = error.code() == KafkaError.UNKNOWN_MEMBER_ID
    return MemberStale(f"a member is not what it was: {error.str()}", thrown_out=thrown_out, share=share)


def translate(error: KafkaError, *, request: Request, op: str, servers: str, waited_s: float = 0.0) -> GroupError:
    """Our error for one of Kafka's; the text names the operation and the brokers, never a setting's value."""
    text = error.str()
    match meaning(request, error.code()):
        case Meaning.REFUSED:
            return AccessDenied(
                f"{op} was refused by {servers}: {text}. Check the kafka.security.protocol, kafka.sasl.* and "
                f"kafka.ssl.* options, and what the user may do: this needs {_NEEDS[request]}",
                op=op,
            )
        case Meaning.FENCED:
            return Fenced(f"{op} was refused: {text}. A newer process took this one's place", op=op)
        case Meaning.ENDS:
            return GroupError(f"{op} cannot be done by {servers}: {text}", op=op, code=error.code())
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
