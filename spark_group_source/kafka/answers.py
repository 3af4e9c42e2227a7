"""What an answer of Kafka's means: the one place that judges error codes.

Runs in: wherever ``kafka`` does. Deliberately absent: asking (``asking``), and how long anything is waited for.

A code of 0 and above stands in a response: it is a broker's word. A code below 0 is librdkafka's own view of the world,
and no fact about it: the library says "unknown partition" of a partition whose broker it cannot reach. So no negative
code means :attr:`Meaning.GONE`. What a broker says may be a passing state as well (a topic that was just made, a leader
that just moved), so :attr:`~Meaning.GONE` and :attr:`~Meaning.REFUSED` are believed when they were said twice.

The codes are those of https://kafka.apache.org/protocol#protocol_error_codes and of librdkafka's ``rdkafka.h``. One
that is in no table came with a release after this one: it is asked again, within the bound of every question.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Final

from confluent_kafka import KafkaError as K


class Request(Enum):
    """What was asked of the brokers."""

    TOPICS = "list or describe topics"
    OFFSETS = "list offsets"
    GROUP = "describe a group"
    COMMITTED = "read committed offsets"
    ALTER = "move committed offsets"
    JOIN = "be a member"
    COMMIT = "commit as a member"
    TRANSACTION = "commit in a transaction"


class Meaning(Enum):
    """What is done about an answer."""

    AGAIN = "asked again"  # it passes: an outage, a leader or coordinator that moves, an answer in between
    GONE = "gone"  # a broker says that the topic, partition or group is not there
    REFUSED = "refused"  # credentials or permissions
    FENCED = "fenced"  # another process has the transactional id, or a member's place
    STALE = "stale"  # the member is not what it was
    ENDS = "ours to end with"  # asked again it would be answered the same


_AGAIN = (
    # librdkafka's own view: the network, its caches, its own state
    K._BAD_MSG, K._DESTROY, K._FAIL, K._TRANSPORT, K._RESOLVE, K._MSG_TIMED_OUT, K._PARTITION_EOF,
    K._UNKNOWN_PARTITION, K._UNKNOWN_TOPIC, K._ALL_BROKERS_DOWN, K._TIMED_OUT, K._QUEUE_FULL, K._ISR_INSUFF,
    K._NODE_UPDATE, K._WAIT_COORD, K._UNKNOWN_GROUP, K._IN_PROGRESS, K._PREV_IN_PROGRESS, K._ASSIGN_PARTITIONS,
    K._REVOKE_PARTITIONS, K._NO_OFFSET, K._OUTDATED, K._TIMED_OUT_QUEUE, K._WAIT_CACHE, K._INTR, K._PARTIAL, K._NOENT,
    K._UNDERFLOW, K._RETRY, K._PURGE_QUEUE, K._PURGE_INFLIGHT, K._MAX_POLL_EXCEEDED, K._UNKNOWN_BROKER,
    K._ASSIGNMENT_LOST, K._NOOP, K._AUTO_OFFSET_RESET, K._LOG_TRUNCATION, K._DESTROY_BROKER, K._CONFLICT, K._STATE,
    # a broker's word, of a state that passes
    K.UNKNOWN, K.NO_ERROR, K.OFFSET_OUT_OF_RANGE, K.INVALID_MSG, K.LEADER_NOT_AVAILABLE, K.NOT_LEADER_FOR_PARTITION,
    K.REQUEST_TIMED_OUT, K.BROKER_NOT_AVAILABLE, K.REPLICA_NOT_AVAILABLE, K.STALE_CTRL_EPOCH, K.NETWORK_EXCEPTION,
    K.COORDINATOR_LOAD_IN_PROGRESS, K.COORDINATOR_NOT_AVAILABLE, K.NOT_COORDINATOR, K.NOT_ENOUGH_REPLICAS,
    K.NOT_ENOUGH_REPLICAS_AFTER_APPEND, K.REBALANCE_IN_PROGRESS, K.NOT_CONTROLLER, K.OUT_OF_ORDER_SEQUENCE_NUMBER,
    K.DUPLICATE_SEQUENCE_NUMBER, K.INVALID_TXN_STATE, K.INVALID_PRODUCER_ID_MAPPING, K.CONCURRENT_TRANSACTIONS,
    K.TRANSACTION_COORDINATOR_FENCED, K.OPERATION_NOT_ATTEMPTED, K.KAFKA_STORAGE_ERROR, K.LOG_DIR_NOT_FOUND,
    K.UNKNOWN_PRODUCER_ID, K.REASSIGNMENT_IN_PROGRESS, K.NON_EMPTY_GROUP, K.FETCH_SESSION_ID_NOT_FOUND,
    K.INVALID_FETCH_SESSION_EPOCH, K.LISTENER_NOT_FOUND, K.FENCED_LEADER_EPOCH, K.UNKNOWN_LEADER_EPOCH,
    K.STALE_BROKER_EPOCH, K.OFFSET_NOT_AVAILABLE, K.MEMBER_ID_REQUIRED, K.PREFERRED_LEADER_NOT_AVAILABLE,
    K.ELIGIBLE_LEADERS_NOT_AVAILABLE, K.ELECTION_NOT_NEEDED, K.NO_REASSIGNMENT_IN_PROGRESS, K.UNSTABLE_OFFSET_COMMIT,
    K.THROTTLING_QUOTA_EXCEEDED, K.RESOURCE_NOT_FOUND, K.INCONSISTENT_VOTER_SET, K.INVALID_UPDATE_VERSION,
    K.INCONSISTENT_TOPIC_ID, K.UNKNOWN_CONTROLLER_ID, K.UNKNOWN_SUBSCRIPTION_ID, K.TRANSACTION_ABORTABLE,
    K.SHARE_SESSION_NOT_FOUND, K.INVALID_SHARE_SESSION_EPOCH, K.FENCED_STATE_EPOCH, K.REBOOTSTRAP_REQUIRED,
    K.SHARE_SESSION_LIMIT_REACHED, K.UNRELEASED_INSTANCE_ID, K.GROUP_SUBSCRIBED_TO_TOPIC,
)  # fmt: skip
_GONE = (K.UNKNOWN_TOPIC_OR_PART, K.UNKNOWN_TOPIC_ID, K.GROUP_ID_NOT_FOUND)
_REFUSED = (
    K._AUTHENTICATION, K._SSL, K.TOPIC_AUTHORIZATION_FAILED, K.GROUP_AUTHORIZATION_FAILED,
    K.CLUSTER_AUTHORIZATION_FAILED, K.UNSUPPORTED_SASL_MECHANISM, K.ILLEGAL_SASL_STATE,
    K.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, K.SECURITY_DISABLED, K.SASL_AUTHENTICATION_FAILED,
    K.DELEGATION_TOKEN_AUTH_DISABLED, K.DELEGATION_TOKEN_NOT_FOUND, K.DELEGATION_TOKEN_OWNER_MISMATCH,
    K.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED, K.DELEGATION_TOKEN_AUTHORIZATION_FAILED, K.DELEGATION_TOKEN_EXPIRED,
    K.PRINCIPAL_DESERIALIZATION_FAILURE, K.UNACCEPTABLE_CREDENTIAL,
)  # fmt: skip
_FENCED = (K._FENCED, K.PRODUCER_FENCED, K.INVALID_PRODUCER_EPOCH, K.FENCED_INSTANCE_ID)
_STALE = (K.ILLEGAL_GENERATION, K.UNKNOWN_MEMBER_ID, K.STALE_MEMBER_EPOCH, K.FENCED_MEMBER_EPOCH)
_ENDS = (
    K._BAD_COMPRESSION, K._CRIT_SYS_RESOURCE, K._FS, K._INVALID_ARG, K._EXISTING_SUBSCRIPTION, K._UNKNOWN_PROTOCOL,
    K._NOT_IMPLEMENTED, K._UNSUPPORTED_FEATURE, K._KEY_SERIALIZATION, K._VALUE_SERIALIZATION, K._KEY_DESERIALIZATION,
    K._VALUE_DESERIALIZATION, K._READ_ONLY, K._INVALID_TYPE, K._FATAL, K._INCONSISTENT, K._GAPLESS_GUARANTEE,
    K._NOT_CONFIGURED, K._APPLICATION, K._INVALID_DIFFERENT_RECORD,
    K.INVALID_MSG_SIZE, K.MSG_SIZE_TOO_LARGE, K.OFFSET_METADATA_TOO_LARGE, K.TOPIC_EXCEPTION, K.RECORD_LIST_TOO_LARGE,
    K.INVALID_REQUIRED_ACKS, K.INCONSISTENT_GROUP_PROTOCOL, K.INVALID_GROUP_ID, K.INVALID_SESSION_TIMEOUT,
    K.INVALID_COMMIT_OFFSET_SIZE, K.INVALID_TIMESTAMP, K.UNSUPPORTED_VERSION, K.TOPIC_ALREADY_EXISTS,
    K.INVALID_PARTITIONS, K.INVALID_REPLICATION_FACTOR, K.INVALID_REPLICA_ASSIGNMENT, K.INVALID_CONFIG,
    K.INVALID_REQUEST, K.UNSUPPORTED_FOR_MESSAGE_FORMAT, K.POLICY_VIOLATION, K.INVALID_TRANSACTION_TIMEOUT,
    K.INVALID_PRINCIPAL_TYPE, K.TOPIC_DELETION_DISABLED, K.UNSUPPORTED_COMPRESSION_TYPE, K.GROUP_MAX_SIZE_REACHED,
    K.INVALID_RECORD, K.DUPLICATE_RESOURCE, K.FEATURE_UPDATE_FAILED, K.UNSUPPORTED_ASSIGNOR,
    K.MISMATCHED_ENDPOINT_TYPE, K.UNSUPPORTED_ENDPOINT_TYPE, K.TELEMETRY_TOO_LARGE, K.INVALID_REGISTRATION,
    K.INVALID_RECORD_STATE, K.INVALID_VOTER_KEY, K.DUPLICATE_VOTER, K.VOTER_NOT_FOUND, K.INVALID_REGULAR_EXPRESSION,
    K.STREAMS_INVALID_TOPOLOGY, K.STREAMS_INVALID_TOPOLOGY_EPOCH, K.STREAMS_TOPOLOGY_FENCED,
)  # fmt: skip

ANSWERS: Final[Mapping[int, Meaning]] = {
    code: meaning
    for meaning, codes in (
        (Meaning.AGAIN, _AGAIN),
        (Meaning.GONE, _GONE),
        (Meaning.REFUSED, _REFUSED),
        (Meaning.FENCED, _FENCED),
        (Meaning.STALE, _STALE),
        (Meaning.ENDS, _ENDS),
    )
    for code in codes
}
"""Every code, whatever was asked."""

_TO_COMMIT = (Request.COMMIT, Request.TRANSACTION)

EXCEPTIONS: Final[Mapping[tuple[Request, int], Meaning]] = {
    # A broker may not have heard of a new topic; one that is gone is told by a question about topics.
    (Request.COMMITTED, K.UNKNOWN_TOPIC_OR_PART): Meaning.AGAIN,
    (Request.COMMITTED, K.UNKNOWN_TOPIC_ID): Meaning.AGAIN,
    (Request.JOIN, K.UNKNOWN_TOPIC_OR_PART): Meaning.AGAIN,
    **{(request, K.UNKNOWN_TOPIC_OR_PART): Meaning.AGAIN for request in _TO_COMMIT},
    **{(request, K.UNKNOWN_TOPIC_ID): Meaning.AGAIN for request in _TO_COMMIT},
    # The library joins again by itself.
    **{(Request.JOIN, code): Meaning.AGAIN for code in _STALE},
    # Whose share of a commit was refused, and that the commit is worth another try without it.
    **{(request, K.FENCED_INSTANCE_ID): Meaning.STALE for request in _TO_COMMIT},
}
"""Where a code means something else in the answer to one kind of request."""


def meaning(request: Request, code: int) -> Meaning:
    """What the answer with this code to that request means; a code that nobody knows is asked again."""
    return EXCEPTIONS.get((request, code)) or ANSWERS.get(code, Meaning.AGAIN)


def render_markdown() -> str:
    """The table as the documents show it, ending in a newline."""
    names = {
        value: name
        for name in sorted(dir(K), reverse=True)
        if name.strip("_").isupper() and isinstance(value := getattr(K, name), int)
    }
    lines = ["| meaning | codes |", "|---|---|"]
    for what in Meaning:
        codes = sorted(
            (code for code, means in ANSWERS.items() if means is what), key=lambda code: (code < 0, abs(code))
        )
        lines.append(f"| {what.value} | {', '.join(f'`{names[code]}`' for code in codes)} |")
    lines += ["", "| request | code | means here |", "|---|---|---|"]
    lines += [f"| {request.value} | `{names[code]}` | {what.value} |" for (request, code), what in EXCEPTIONS.items()]
    return "\n".join(lines) + "\n"
