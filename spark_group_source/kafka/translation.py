"""Translation of the client library's errors, partitions and answers into this package's types.

Runs in: wherever ``kafka`` does. Deliberately absent: sending requests.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, NamedTuple

from confluent_kafka import KafkaError
from confluent_kafka import TopicPartition as KafkaPartition

from spark_group_source.error_codes import TLS_ALERT, Meaning, Request, is_token_missing, meaning
from spark_group_source.errors import AccessDenied, BrokerUnavailable, CommitFailed, Fenced, GroupError
from spark_group_source.model import TopicPartition
from spark_group_source.options.client import principal

PARTITIONS_PER_REQUEST = 1_000
"""Partitions in one request. The library matches answers to requested partitions by linear search (2.16), so one
request for 10,000 partitions takes a hundred times as long as one for 1,000."""

_DESCRIBE, _READ = "Describe", "Read"
_READ_AND_FIND = "Read and Describe"  # Describe to find the coordinator; Read implies it unless a rule denies it
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
"""The resource type that each authorization error is about."""


@dataclass(frozen=True, slots=True)
class ClientInfo:
    """A client's servers, user and names, for error messages."""

    servers: str
    user: str = "the user"
    group: str = ""
    """Empty: the client has no group."""
    transactional_id: str = ""
    """Empty: the client uses no transactions."""
    by_token: bool = False
    """Whether it logs in with tokens (OAUTHBEARER)."""

    @classmethod
    def of(cls, settings: Mapping[str, Any], *, group: str = "") -> "ClientInfo":
        """Derive it from the settings of a client."""
        return cls(
            settings["bootstrap.servers"],
            principal(settings),
            group or settings.get("group.id", ""),
            settings.get("transactional.id", ""),
            settings.get("sasl.mechanism", "").strip().upper() == "OAUTHBEARER",
        )

    def token_may_have_expired(self, error: KafkaError) -> bool:
        """Whether a refused login may be due to an expired token: a client keeps using its token until it gets another.
        Only the login of a new client is conclusive; :class:`Admin` makes a new client after each failed request.
        """
        return self.by_token and error.code() in (KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED)

    def missing_permission(self, request: Request, code: int, name: str = "") -> str:
        """Return the permission that the user lacks according to the error code; empty for other errors.

        Args:
            name: the topic or group that the answer is about, if known.
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
    """A commit as a member was refused because the member has rejoined or left."""

    def __init__(self, message: str, *, expelled: bool = False, part: int = 0) -> None:
        super().__init__(message)
        self.expelled = expelled
        """Whether the broker does not know the member any more; the member itself may not have noticed."""
        self.part = part
        """The index of its part in the commit."""


def refusal_of_connection(error: KafkaError) -> KafkaError | None:
    """Return the refusal in an error of a client's connection; None if it is not a refusal."""
    if meaning(Request.TOPICS, error.code(), error.str()) is Meaning.REFUSED:
        return error
    return KafkaError(KafkaError._SSL, error.str()) if TLS_ALERT in error.str() else None


def stale_member(error: KafkaError, *, request: Request, part: int = 0) -> MemberStale | None:
    """Return MemberStale if a commit was refused because of the member; else None."""
    if meaning(request, error.code()) is not Meaning.STALE:
        return None
    expelled = error.code() == KafkaError.UNKNOWN_MEMBER_ID
    return MemberStale(f"the member has changed: {error.str()}", expelled=expelled, part=part)


def translate(
    error: KafkaError, *, request: Request, op: str, client_info: ClientInfo, name: str = "", waited_s: float = 0.0
) -> GroupError:
    """Return the exception for a Kafka error. Its text contains the operation, the brokers and the user name, but no
    other value of a setting."""
    text, servers = error.str(), client_info.servers
    match meaning(request, error.code(), text):
        case Meaning.REFUSED if needed := client_info.missing_permission(request, error.code(), name):
            return AccessDenied(
                f"{op} was refused by {servers}: {text}. {client_info.user} needs {needed}. Grant it, then restart the "
                "query: it continues at its last position",
                op=op,
                on=_ON[error.code()],
            )
        case Meaning.REFUSED:
            return AccessDenied(
                f"{op} was refused by {servers}: {text}. Check the options kafka.security.protocol, "
                "kafka.sasl.* and kafka.ssl.*: password or token, kafka.ssl.ca.location, client certificate",
                op=op,
            )
        case Meaning.FENCED:
            return Fenced(f"{op} was refused: {text}. A newer process has taken over from this one")
        case Meaning.GONE if request is Request.DELETE:
            return GroupError(f"{op} failed: group {client_info.group or name!r} does not exist on {servers}")
        case Meaning.FATAL:
            return GroupError(f"{op} failed on {servers}: {text}")
    if is_token_missing(error.code(), text):
        message = (
            f"{op} failed on {servers} for {waited_s:.0f} s because the client has no token: {text}. Check the token "
            "endpoint or function (kafka.sasl.oauthbearer.* or kafka.oauth_cb)"
        )
    else:
        message = (
            f"{op} was not answered by {servers} within {waited_s:.0f} s: {text}. Check kafka.bootstrap.servers and "
            "kafka.security.protocol, and that the brokers run and can be reached from the driver"
        )
    return BrokerUnavailable(message, op=op, servers=servers, waited_ms=int(waited_s * 1000))


def to_kafka(tp: TopicPartition, *more: Any) -> Any:
    """Return the library's object for a partition; ``more``: offset, metadata, leader epoch."""
    return KafkaPartition(tp.topic, tp.partition, *more)


def from_kafka(partitions: Iterable[Any]) -> tuple[TopicPartition, ...]:
    """Return this package's values for the library's partitions, sorted: a message with them names each topic once."""
    return tuple(sorted(TopicPartition(p.topic, p.partition) for p in partitions))


def request_batches(tps: Iterable[TopicPartition]) -> Iterator[list[TopicPartition]]:
    """Split the partitions, in order, into lists of at most :data:`PARTITIONS_PER_REQUEST`."""
    rest = iter(sorted(tps))
    while batch := list(islice(rest, PARTITIONS_PER_REQUEST)):
        yield batch


COMMIT_BYTES_MAX = 200_000
"""The largest offset commit that is tried first: a fifth of the brokers' default of ``max.message.bytes``, and some
1,500 partitions."""
OFFSET_BYTES = 64
"""The size of an offset in the coordinator's log, besides its names and its metadata."""
COMMITS_UNTIL_LARGER = 1_000
"""After so many commits in a row that the coordinator accepted, larger ones are tried again."""
TOO_LARGE = frozenset(
    {
        KafkaError.UNKNOWN,
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_COMMIT_OFFSET_SIZE,
    }
)
"""The answers to a commit that is too large for the coordinator's log; brokers up to 4.2 report an unknown error."""


class OffsetNote(NamedTuple):
    """What is committed beside an offset."""

    text: str
    """Its metadata."""
    leader_epoch: int = -1
    """The epoch of a leader that had every record below the offset, for the consumer that continues there (KIP-320);
    -1: not known."""


Notes = Mapping[TopicPartition, OffsetNote]
"""Of each offset in a commit."""


class CommitSizes:
    """Splits a commit of many offsets into requests that the group's coordinator accepts. One thread uses it.

    The coordinator writes the offsets of a request as one batch, which may have at most the ``max.message.bytes`` of
    its log. That limit is not known in advance: it is learned from the answers.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self._bytes_max = COMMIT_BYTES_MAX
        self._accepted = 0  # commits since the limit was changed

    def split(self, offsets: Mapping[TopicPartition, int], notes: Notes) -> Iterator[list[KafkaPartition]]:
        """Return the offsets with their notes, in requests of at most the limit, but at least one offset each."""
        batch: list[KafkaPartition] = []
        left = self._bytes_max
        for tp, offset in offsets.items():
            note = notes[tp]
            size = self._size(tp.topic, note.text)
            if batch and size > left:
                yield batch
                batch, left = [], self._bytes_max
            batch.append(to_kafka(tp, offset, note.text, note.leader_epoch))
            left -= size
        if batch:
            yield batch

    def shrink(self, code: int, refused: list[KafkaPartition]) -> bool:
        """Learn from a request that was refused. Returns whether smaller ones are worth another attempt."""
        if code not in TOO_LARGE:
            return False
        if len(refused) < 2:  # a single offset is not too large: the answer had another reason
            self._bytes_max = COMMIT_BYTES_MAX
            return False
        self._bytes_max = sum(self._size(p.topic, p.metadata or "") for p in refused) // 2
        self._accepted = 0
        return True

    def accepted(self) -> None:
        """All requests of a commit were accepted."""
        self._accepted += 1
        if self._accepted >= COMMITS_UNTIL_LARGER:
            self._accepted, self._bytes_max = 0, min(2 * self._bytes_max, COMMIT_BYTES_MAX)

    def _size(self, topic: str, note: str) -> int:
        return OFFSET_BYTES + len(self._group.encode()) + len(topic) + len(note.encode())


# --- topics, groups and offsets as the cluster describes them ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the cluster describes it now."""

    id: str
    """Changes when the topic is deleted and recreated (KIP-516); empty if its brokers have no ids."""
    partitions: int
    """The partition count."""


@dataclass(frozen=True, slots=True)
class CommittedOffset:
    """A group's committed offset of one partition."""

    offset: int
    metadata: str
    """The text that its committer stored with it; may be empty."""
    leader_epoch: int | None = None
    """The leader epoch of the records below it, if its committer stored one (KIP-320)."""


GROUP_STATES: Final = (
    "stable",
    "preparing_rebalancing",
    "completing_rebalancing",
    "assigning",
    "reconciling",
    "empty",
    "dead",
    "unknown",
)
"""The states of a group: the client library's names in lower case, where Kafka's own tool prints PreparingRebalance. A
KIP-848 group that is assigning or reconciling is unknown to confluent-kafka 2.16; these are Kafka's names."""


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A member as the cluster describes it."""

    member_id: str
    client_id: str
    instance_id: str
    """Empty for a dynamic member."""
    host: str
    """The client's address as the group coordinator sees it, such as ``/10.0.0.7``."""
    partitions: tuple[TopicPartition, ...]
    """Its assigned partitions. Kafka does not report what it subscribes to."""

    @property
    def name(self) -> str:
        """The instance id of a static member, which survives a restart; else the member id."""
        return self.instance_id or self.member_id


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group as the cluster describes it."""

    state: str
    """One of :data:`GROUP_STATES`."""
    protocol: str
    """classic, consumer, or another group protocol of Kafka."""
    assignor: str
    """Empty if Kafka reports none."""
    members: tuple[GroupMember, ...]
    coordinator: str = ""
    """``host:port (id)`` of the coordinator's broker."""
    simple: bool = False
    """Whether the group never had members: clients only commit offsets under its name."""
    coordinator_id: int = -1
    """The id of the coordinator's broker; -1: unknown."""


@dataclass(frozen=True, slots=True, order=True)
class ListedGroup:
    """A group in the list of all groups."""

    group: str
    state: str
    """As in :class:`GroupDescription`."""
    protocol: str
    """As in :class:`GroupDescription`."""
