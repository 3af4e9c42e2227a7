"""Kafka's answers, errors and partitions in our words.

Runs in: wherever ``kafka`` does. Deliberately absent: asking anything.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from confluent_kafka import KafkaError
from confluent_kafka import TopicPartition as KafkaPartition

from spark_group_source.error_codes import TLS_ALERT, Meaning, Request, is_token_missing, meaning
from spark_group_source.errors import AccessDenied, BrokerUnavailable, CommitFailed, Fenced, GroupError
from spark_group_source.model import TopicPartition
from spark_group_source.options.client import principal

AT_ONCE = 1_000
"""Partitions in one request. The library looks for each answer from the beginning of what was asked for (2.16), so that
10,000 at one time cost it a hundred times 1,000."""

_DESCRIBE, _READ = "Describe", "Read"
_READ_AND_FIND = "Read and Describe"  # the second to find the coordinator; the first includes it unless it is denied
_ON_TOPICS = {
    Request.TOPICS: _DESCRIBE,
    Request.OFFSETS: _DESCRIBE,
    Request.FETCH: _READ,
    Request.COMMITTED: _DESCRIBE,
    Request.ALTER: _READ,
    Request.DELETE: _READ,
    Request.JOIN: _DESCRIBE,
    Request.COMMIT: _READ,
    Request.TRANSACTION: _READ,
}
_ON_GROUP = {
    Request.GROUP: _DESCRIBE,
    Request.COMMITTED: _DESCRIBE,
    Request.ALTER: _READ_AND_FIND,
    Request.DELETE: "Delete and Describe",
    Request.JOIN: _READ_AND_FIND,
    Request.COMMIT: _READ_AND_FIND,
    Request.TRANSACTION: _READ_AND_FIND,
}
_ON = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "topic",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "group",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "transactional id",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "cluster",
}
"""Which operation of Kafka's access control lists a request needs."""


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks the brokers, as far as it is known: for what a refusal says."""

    servers: str
    user: str = "the user"
    group: str = ""
    transactional_id: str = ""
    by_token: bool = False

    @classmethod
    def of(cls, settings: Mapping[str, Any], *, group: str = "") -> "Asker":
        """From the settings of a client."""
        return cls(
            settings["bootstrap.servers"],
            principal(settings),
            group or settings.get("group.id", ""),
            settings.get("transactional.id", ""),
            settings.get("sasl.mechanism", "").strip().upper() == "OAUTHBEARER",
        )

    def may_be_late(self, error: KafkaError) -> bool:
        """Whether a refused login may be that of a token which ran out before another one came: a client goes on with
        the one that it has. What a new client is told, tells; :class:`Admin` makes one for each question that failed.
        """
        return self.by_token and error.code() in (KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED)

    def needs(self, request: Request, code: int, name: str = "") -> str:
        """The permission that was missing where the broker said that one was; else an empty text.

        Args:
            name: of the topic or group that the answer is about, if that is known.
        """
        match code:
            case KafkaError.TOPIC_AUTHORIZATION_FAILED:
                return f"{_ON_TOPICS.get(request, _DESCRIBE)} on the topic{f' {name!r}' if name else 's'}"
            case KafkaError.GROUP_AUTHORIZATION_FAILED:
                return f"{_ON_GROUP.get(request, _READ_AND_FIND)} on the group {(self.group or name)!r}"
            case KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
                return f"Write and Describe on the transactional id {self.transactional_id!r}"
            case KafkaError.CLUSTER_AUTHORIZATION_FAILED if request is Request.CONFIGS:
                return "DescribeConfigs on the cluster"
        return ""


class MemberStale(CommitFailed):
    """A member in whose name offsets were to be committed is in another generation, or out."""

    def __init__(self, message: str, *, thrown_out: bool = False, share: int = 0) -> None:
        super().__init__(message)
        self.thrown_out = thrown_out
        """The broker does not know it; it may not have heard so itself."""
        self.share = share
        """Which of the shares of the commit was its."""


def refusal_of_connection(error: KafkaError) -> KafkaError | None:
    """What a client tells of its connections, if it is a refusal."""
    if meaning(Request.TOPICS, error.code(), error.str()) is Meaning.REFUSED:
        return error
    return KafkaError(KafkaError._SSL, error.str()) if TLS_ALERT in error.str() else None


def stale(error: KafkaError, *, request: Request, share: int = 0) -> MemberStale | None:
    """What a refused commit says of the member, if it says something of it."""
    if meaning(request, error.code()) is not Meaning.STALE:
        return None
    thrown_out = error.code() == KafkaError.UNKNOWN_MEMBER_ID
    return MemberStale(f"a member is not what it was: {error.str()}", thrown_out=thrown_out, share=share)


def translate(
    error: KafkaError, *, request: Request, op: str, asker: Asker, name: str = "", waited_s: float = 0.0
) -> GroupError:
    """Our error for one of Kafka's; the text names the operation and the brokers, never a setting's value but the
    user's name."""
    text, servers = error.str(), asker.servers
    match meaning(request, error.code(), text):
        case Meaning.REFUSED if needed := asker.needs(request, error.code(), name):
            return AccessDenied(
                f"{op} was refused by {servers}: {text}. {asker.user} needs {needed}. Once that is granted, the query "
                "goes on from where it is when it is started again",
                op=op,
                on=_ON[error.code()],
            )
        case Meaning.REFUSED:
            return AccessDenied(
                f"{op} was refused by {servers}: {text}. Check the kafka.security.protocol, kafka.sasl.* and "
                f"kafka.ssl.* options: password or token, kafka.ssl.ca.location, and the client's certificate",
                op=op,
            )
        case Meaning.FENCED:
            return Fenced(f"{op} was refused: {text}. A newer process took this one's place", op=op)
        case Meaning.GONE if request is Request.DELETE:
            return GroupError(f"{op}: there is no group {asker.group or name!r} on {servers}", op=op)
        case Meaning.FATAL:
            return GroupError(f"{op} cannot be done by {servers}: {text}", op=op, code=error.code())
    if is_token_missing(error.code(), text):
        said = (
            f"{op} could not be asked of {servers} for {waited_s:.0f} s: {text}. Check that the endpoint or function "
            "for tokens can be reached, and what it says: kafka.sasl.oauthbearer.* or kafka.oauth_cb"
        )
    else:
        said = (
            f"{op} was not answered by {servers} within {waited_s:.0f} s: {text}. Check kafka.bootstrap.servers, that "
            "the brokers run and can be reached from the driver, and kafka.security.protocol"
        )
    return BrokerUnavailable(said, op=op, servers=servers, waited_ms=int(waited_s * 1000))


def to_kafka(tp: TopicPartition, *more: Any) -> Any:
    """The library's object for a partition; ``more``: offset, metadata."""
    return KafkaPartition(tp.topic, tp.partition, *more)


def to_ours(partitions: Iterable[Any]) -> tuple[TopicPartition, ...]:
    """Our values for the library's partitions."""
    return tuple(TopicPartition(p.topic, p.partition) for p in partitions)


def portions(tps: Iterable[TopicPartition]) -> Iterator[list[TopicPartition]]:
    """The partitions in order, at most :data:`AT_ONCE` in one request."""
    rest = iter(sorted(tps))
    while portion := list(islice(rest, AT_ONCE)):
        yield portion


# --- topics, groups and offsets as the cluster describes them ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the cluster describes it now; the id changes when it is deleted and made again (KIP-516)."""

    id: str
    partitions: int


@dataclass(frozen=True, slots=True)
class CommittedOffset:
    """A group's offset of one partition, with the text that its committer left beside it."""

    offset: int
    metadata: str


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One member as the cluster describes it."""

    member_id: str
    client_id: str
    instance_id: str
    host: str
    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group as the cluster describes it. ``state``: Kafka's word in lower case, such as stable, empty, dead.

    ``simple``: it never had members, somebody only keeps offsets there. ``coordinator_id``: the number of its broker.
    """

    state: str
    protocol: str
    assignor: str
    members: tuple[GroupMember, ...]
    coordinator: str = ""
    """``host:port (id)`` of the broker that keeps the group."""
    simple: bool = False
    coordinator_id: int = -1


@dataclass(frozen=True, slots=True, order=True)
class ListedGroup:
    """A group in the list of all groups. ``protocol``: classic, consumer, or another of Kafka's."""

    group: str
    state: str
    protocol: str
