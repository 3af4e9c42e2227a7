"""The meaning of Kafka's error codes, for every request of this package.

Runs in: every process that sends requests to brokers. Deliberately absent: sending requests, timeouts, and imports:
reading tasks work without the package of the client library, which takes long to load.

A code of 0 or above is a broker's response. A negative code is librdkafka's own view, which may be wrong: it reports
"unknown partition" for a partition whose broker it cannot reach. So no negative code means :attr:`Meaning.GONE`. A
broker's response may be temporary too (a topic that was just created, a leader that just moved), so
:attr:`~Meaning.GONE` and :attr:`~Meaning.REFUSED` are believed only after a second report: :class:`Suspicions`.

For OAUTHBEARER tokens the library uses one code in two cases, and only the text differs: no token came, which is
retried, or the token endpoint refused one, which is a refusal. See :func:`is_token_missing`.

The codes are those of https://kafka.apache.org/protocol#protocol_error_codes and of librdkafka's ``rdkafka.h``. A code
that is in no table is retried until the request times out.
"""

import math
from collections.abc import Container, Hashable, Iterator, Mapping
from enum import Enum
from typing import Final


class Request(Enum):
    """A kind of request to brokers. An error of a lost connection belongs to the request that it interrupted."""

    TOPICS = "list or describe topics"
    OFFSETS = "list offsets"
    FETCH = "fetch records"
    GROUP = "describe a group"
    CONFIGS = "describe a broker's settings"
    COMMITTED = "read committed offsets"
    ALTER = "alter committed offsets"
    DELETE = "delete a group or its offsets"
    JOIN = "join and stay in the group"
    COMMIT = "commit as a member"
    TRANSACTION = "commit in a transaction"


class Meaning(Enum):
    """How a response is handled."""

    SUCCESS = "success"
    RETRY = "retry"  # a temporary error: an outage, a moving leader or coordinator
    GONE = "gone"  # a broker reports that the topic, partition or group does not exist
    REFUSED = "refused"  # credentials or permissions
    FENCED = "fenced"  # another process uses the transactional id or the instance id
    STALE = "stale"  # the member is in another generation
    FATAL = "fatal"  # a retry would get the same response


_CODES: Final[Mapping[Meaning, str]] = {
    Meaning.SUCCESS: """
        NO_ERROR=0
    """,
    Meaning.RETRY: """
        OFFSET_OUT_OF_RANGE=1 NON_EMPTY_GROUP=68 GROUP_SUBSCRIBED_TO_TOPIC=86
        _AUTO_OFFSET_RESET=-140 _PARTITION_EOF=-191 _BAD_MSG=-199
    """,  # and every code that is not in this table; these are listed because the code refers to them
    Meaning.GONE: """
        UNKNOWN_TOPIC_OR_PART=3 GROUP_ID_NOT_FOUND=69 UNKNOWN_TOPIC_ID=100
    """,
    Meaning.REFUSED: """
        TOPIC_AUTHORIZATION_FAILED=29 GROUP_AUTHORIZATION_FAILED=30 CLUSTER_AUTHORIZATION_FAILED=31
        UNSUPPORTED_SASL_MECHANISM=33 ILLEGAL_SASL_STATE=34 TRANSACTIONAL_ID_AUTHORIZATION_FAILED=53
        SECURITY_DISABLED=54 SASL_AUTHENTICATION_FAILED=58 DELEGATION_TOKEN_AUTH_DISABLED=61
        DELEGATION_TOKEN_NOT_FOUND=62 DELEGATION_TOKEN_OWNER_MISMATCH=63 DELEGATION_TOKEN_REQUEST_NOT_ALLOWED=64
        DELEGATION_TOKEN_AUTHORIZATION_FAILED=65 DELEGATION_TOKEN_EXPIRED=66 UNACCEPTABLE_CREDENTIAL=93
        PRINCIPAL_DESERIALIZATION_FAILURE=97 _AUTHENTICATION=-169 _SSL=-181
    """,
    Meaning.FENCED: """
        INVALID_PRODUCER_EPOCH=47 FENCED_INSTANCE_ID=82 PRODUCER_FENCED=90 _FENCED=-144
    """,
    Meaning.STALE: """
        ILLEGAL_GENERATION=22 UNKNOWN_MEMBER_ID=25 FENCED_MEMBER_EPOCH=110 STALE_MEMBER_EPOCH=113
    """,
    Meaning.FATAL: """
        INVALID_MSG_SIZE=4 MSG_SIZE_TOO_LARGE=10 OFFSET_METADATA_TOO_LARGE=12 TOPIC_EXCEPTION=17
        RECORD_LIST_TOO_LARGE=18 INVALID_REQUIRED_ACKS=21 INCONSISTENT_GROUP_PROTOCOL=23 INVALID_GROUP_ID=24
        INVALID_SESSION_TIMEOUT=26 INVALID_COMMIT_OFFSET_SIZE=28 INVALID_TIMESTAMP=32 UNSUPPORTED_VERSION=35
        TOPIC_ALREADY_EXISTS=36 INVALID_PARTITIONS=37 INVALID_REPLICATION_FACTOR=38 INVALID_REPLICA_ASSIGNMENT=39
        INVALID_CONFIG=40 INVALID_REQUEST=42 UNSUPPORTED_FOR_MESSAGE_FORMAT=43 POLICY_VIOLATION=44
        INVALID_TRANSACTION_TIMEOUT=50 INVALID_PRINCIPAL_TYPE=67 TOPIC_DELETION_DISABLED=73
        UNSUPPORTED_COMPRESSION_TYPE=76 GROUP_MAX_SIZE_REACHED=81 INVALID_RECORD=87 DUPLICATE_RESOURCE=92
        FEATURE_UPDATE_FAILED=96 UNSUPPORTED_ASSIGNOR=112 MISMATCHED_ENDPOINT_TYPE=114 UNSUPPORTED_ENDPOINT_TYPE=115
        TELEMETRY_TOO_LARGE=118 INVALID_REGISTRATION=119 INVALID_RECORD_STATE=121 INVALID_VOTER_KEY=125
        DUPLICATE_VOTER=126 VOTER_NOT_FOUND=127 INVALID_REGULAR_EXPRESSION=128 STREAMS_INVALID_TOPOLOGY=130
        STREAMS_INVALID_TOPOLOGY_EPOCH=131 STREAMS_TOPOLOGY_FENCED=132 _INVALID_DIFFERENT_RECORD=-138
        _APPLICATION=-143 _NOT_CONFIGURED=-145 _GAPLESS_GUARANTEE=-148 _INCONSISTENT=-149 _FATAL=-150
        _INVALID_TYPE=-154 _READ_ONLY=-157 _VALUE_DESERIALIZATION=-159 _KEY_DESERIALIZATION=-160
        _VALUE_SERIALIZATION=-161 _KEY_SERIALIZATION=-162 _UNSUPPORTED_FEATURE=-165 _NOT_IMPLEMENTED=-170
        _UNKNOWN_PROTOCOL=-171 _EXISTING_SUBSCRIPTION=-176 _INVALID_ARG=-186 _FS=-189 _CRIT_SYS_RESOURCE=-194
        _BAD_COMPRESSION=-198
    """,
}

CODES: Final[Mapping[str, int]] = {
    name: int(code) for words in _CODES.values() for name, _, code in (word.partition("=") for word in words.split())
}
"""The codes of the table by their names in confluent_kafka's ``KafkaError``."""

MEANINGS: Final[Mapping[int, Meaning]] = {
    int(word.partition("=")[2]): meaning for meaning, words in _CODES.items() for word in words.split()
}
"""The meaning of each code in the table, for requests without an exception."""

TLS_ALERT: Final = "SSL alert number"
"""Part of the text of a TLS alert. With TLS 1.3 a broker refuses a certificate after the client considers the
connection open. librdkafka reports that as a lost connection; only the text has the alert."""

_NOT_THERE: Final = ("UNKNOWN_TOPIC_OR_PART", "UNKNOWN_TOPIC_ID")
_STALE: Final = ("ILLEGAL_GENERATION", "UNKNOWN_MEMBER_ID", "STALE_MEMBER_EPOCH", "FENCED_MEMBER_EPOCH")

EXCEPTIONS: Final[Mapping[tuple[Request, int], Meaning]] = {
    # A broker responds the same after a partition moved to another one. Only metadata shows if a topic is gone.
    **{
        (request, CODES[name]): Meaning.RETRY
        for request in (Request.FETCH, Request.COMMITTED, Request.COMMIT, Request.TRANSACTION, Request.JOIN)
        for name in _NOT_THERE
    },
    # librdkafka rejoins by itself.
    **{(Request.JOIN, CODES[name]): Meaning.RETRY for name in _STALE},
    # The group has members; the caller decides whether to wait for them to leave.
    (Request.DELETE, CODES["NON_EMPTY_GROUP"]): Meaning.FATAL,
    (Request.DELETE, CODES["GROUP_SUBSCRIBED_TO_TOPIC"]): Meaning.FATAL,
    # The member's share of the commit is left out; the rest of the commit is retried.
    (Request.COMMIT, CODES["FENCED_INSTANCE_ID"]): Meaning.STALE,
    (Request.TRANSACTION, CODES["FENCED_INSTANCE_ID"]): Meaning.STALE,
}
"""Codes with another meaning for one kind of request."""

_NO_TOKEN: Final = ("Failed to acquire SASL OAUTHBEARER token", "there is no token available")
_REFUSED_TOKEN: Final = (
    '"invalid_request"',
    '"invalid_client"',
    '"invalid_grant"',
    '"unauthorized_client"',
    '"unsupported_grant_type"',
    '"invalid_scope"',
)
"""The errors of a token endpoint (RFC 6749, 5.2), as they appear in the JSON of its response."""


def is_token_missing(code: int, text: str) -> bool:
    """Whether a client has no token to authenticate with, and no endpoint refused one.

    librdkafka reports the text of the endpoint's response, but not its status. A refusal without an OAuth error cannot
    be distinguished from a failing endpoint or proxy, nor from a function that raises. All of these are retried.
    """
    none = code == CODES["_AUTHENTICATION"] and any(words in text for words in _NO_TOKEN)
    return none and not any(word in text for word in _REFUSED_TOKEN)


def meaning(request: Request, code: int, text: str = "") -> Meaning:
    """Return the meaning of an error code in the response to a request; an unknown code is retried.

    Args:
        text: librdkafka's error text, for a failed authentication.
    """
    if is_token_missing(code, text):
        return Meaning.RETRY
    return EXCEPTIONS.get((request, code)) or MEANINGS.get(code, Meaning.RETRY)


class Suspicions:
    """Reports that may be wrong, such as a missing topic. A report is believed when it is repeated after the grace
    period, without a contradiction in between.

    Args:
        grace: the minimum time between the first report and the one that is believed, in the unit of the caller's
            clock.
        expires: the time after which a report that was not repeated is forgotten.
    """

    def __init__(self, grace: float = 0, *, expires: float = math.inf) -> None:
        self._grace, self._expires = grace, expires
        self._since: dict[Hashable, float] = {}

    def report(self, what: Hashable, now: float = 0) -> bool:
        """Record a report. Returns whether it is believed now."""
        if now - self._since.get(what, now) > self._expires:
            self.clear(what)
        again = what in self._since
        return now - self._since.setdefault(what, now) >= self._grace and again

    def clear(self, *what: Hashable) -> None:
        """Forget reports that were contradicted."""
        for one in what:
            self._since.pop(one, None)

    def keep(self, wanted: Container[Hashable]) -> None:
        """Forget all reports but these."""
        self.clear(*(what for what in self if what not in wanted))

    def is_open(self, now: float) -> bool:
        """Whether a report is within its grace period."""
        return any(now - since < self._grace for since in self._since.values())

    def __contains__(self, what: Hashable) -> bool:
        """Whether it was reported, believed or not."""
        return what in self._since

    def __iter__(self) -> Iterator[Hashable]:
        return iter(list(self._since))

    def __len__(self) -> int:
        return len(self._since)
