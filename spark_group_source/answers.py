"""What an answer of Kafka's means: the one place that judges error codes.

Runs in: every process that asks brokers something. Deliberately absent: asking, how long anything is waited for, and
imports: reading tasks do without the client library's package, which takes long to load.

A code of 0 and above stands in a response: it is a broker's word. A code below 0 is librdkafka's own view of the world,
and no fact about it: the library says "unknown partition" of a partition whose broker it cannot reach. So no negative
code means :attr:`Meaning.GONE`. What a broker says may be a passing state as well (a topic that was just made, a leader
that just moved), so :attr:`~Meaning.GONE` and :attr:`~Meaning.REFUSED` are believed when they were said twice:
:class:`Suspicions`.

Of the tokens that a client logs in with (OAUTHBEARER) the library tells by one code, and in texts alone, that none
came, which is silence, or that their endpoint said "no", which is a refusal. See :func:`lacks_token`.

The codes are those of https://kafka.apache.org/protocol#protocol_error_codes and of librdkafka's ``rdkafka.h``. A code
that is in no table is asked again, within the bound of every question.
"""

from collections.abc import Container, Hashable, Iterator, Mapping
from enum import Enum
from typing import Final


class Request(Enum):
    """What was asked of the brokers. A code that comes with a lost connection is of the request that it ended."""

    TOPICS = "list or describe topics"
    OFFSETS = "list offsets"
    FETCH = "fetch records"
    GROUP = "describe a group"
    CONFIGS = "describe a broker's settings"
    COMMITTED = "read committed offsets"
    ALTER = "move committed offsets"
    DELETE = "delete a group, or offsets of it"
    JOIN = "be a member"
    COMMIT = "commit as a member"
    TRANSACTION = "commit in a transaction"


class Meaning(Enum):
    """What is done about an answer."""

    GOOD = "the answer"
    AGAIN = "asked again"  # it passes: an outage, a leader or coordinator that moves, an answer in between
    GONE = "gone"  # a broker says that the topic, partition or group is not there
    REFUSED = "refused"  # credentials or permissions
    FENCED = "fenced"  # another process has the transactional id, or a member's place
    STALE = "stale"  # the member is not what it was
    ENDS = "ours to end with"  # asked again it would be answered the same


_WORDS: Final[Mapping[Meaning, str]] = {
    Meaning.GOOD: """
        NO_ERROR=0
    """,
    Meaning.AGAIN: """
        OFFSET_OUT_OF_RANGE=1 NON_EMPTY_GROUP=68 GROUP_SUBSCRIBED_TO_TOPIC=86
        _AUTO_OFFSET_RESET=-140 _PARTITION_EOF=-191 _BAD_MSG=-199
    """,  # and whatever is not in this table; these are named because the code speaks of them
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
    Meaning.ENDS: """
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
    name: int(code) for words in _WORDS.values() for name, _, code in (word.partition("=") for word in words.split())
}
"""The codes of the table by their names in confluent_kafka's ``KafkaError``."""

ANSWERS: Final[Mapping[int, Meaning]] = {
    int(word.partition("=")[2]): meaning for meaning, words in _WORDS.items() for word in words.split()
}
"""The codes of the table, whatever was asked."""

TLS_ALERT: Final = "SSL alert number"
"""With TLS 1.3 a broker refuses a certificate when the client thinks the connection made. librdkafka calls that a lost
connection; the broker's word, an alert, stands in the text alone."""

_NOT_THERE: Final = ("UNKNOWN_TOPIC_OR_PART", "UNKNOWN_TOPIC_ID")
_STALE: Final = ("ILLEGAL_GENERATION", "UNKNOWN_MEMBER_ID", "STALE_MEMBER_EPOCH", "FENCED_MEMBER_EPOCH")

EXCEPTIONS: Final[Mapping[tuple[Request, int], Meaning]] = {
    # A broker that lost a partition to another one says the same of it; whether a topic is gone, metadata tells.
    **{
        (request, CODES[name]): Meaning.AGAIN
        for request in (Request.FETCH, Request.COMMITTED, Request.COMMIT, Request.TRANSACTION, Request.JOIN)
        for name in _NOT_THERE
    },
    # The library joins again by itself.
    **{(Request.JOIN, CODES[name]): Meaning.AGAIN for name in _STALE},
    # It has members: who waits for them to leave asks by himself.
    (Request.DELETE, CODES["NON_EMPTY_GROUP"]): Meaning.ENDS,
    (Request.DELETE, CODES["GROUP_SUBSCRIBED_TO_TOPIC"]): Meaning.ENDS,
    # Whose share of a commit was refused, and that the commit is worth another try without it.
    (Request.COMMIT, CODES["FENCED_INSTANCE_ID"]): Meaning.STALE,
    (Request.TRANSACTION, CODES["FENCED_INSTANCE_ID"]): Meaning.STALE,
}
"""Where a code means something else in the answer to one kind of request."""

_NO_TOKEN: Final = ("Failed to acquire SASL OAUTHBEARER token", "there is no token available")
_REFUSED_TOKEN: Final = (
    '"invalid_request"',
    '"invalid_client"',
    '"invalid_grant"',
    '"unauthorized_client"',
    '"unsupported_grant_type"',
    '"invalid_scope"',
)
"""What an endpoint says "no" with (RFC 6749, 5.2), as it stands in the JSON of its answer."""


def lacks_token(code: int, text: str) -> bool:
    """Whether a client has no (new) token to log in with, and no endpoint said "no".

    Of an endpoint's answer the library passes on the text, and not the status: a refusal that is not told in the words
    of OAuth cannot be told from an endpoint, or what stands before it, that is out of order. Nor can a function that
    raises. Both are asked again.
    """
    none = code == CODES["_AUTHENTICATION"] and any(words in text for words in _NO_TOKEN)
    return none and not any(word in text for word in _REFUSED_TOKEN)


def meaning(request: Request, code: int, text: str = "") -> Meaning:
    """What the answer with this code to that request means; a code that nobody knows is asked again.

    Args:
        text: the library's, for a failed login.
    """
    if lacks_token(code, text):
        return Meaning.AGAIN
    return EXCEPTIONS.get((request, code)) or ANSWERS.get(code, Meaning.AGAIN)


class Suspicions:
    """What was reported and may be wrong, such as that a topic is gone. Each is believed when it was reported
    twice without a contradiction, over the grace at least.

    Args:
        grace: between the first report and the one that is believed, in the unit of the caller's clock.
    """

    def __init__(self, grace: float = 0) -> None:
        self._grace = grace
        self._since: dict[Hashable, float] = {}

    def report(self, what: Hashable, now: float = 0) -> bool:
        """Note a report. Returns whether it is believed now."""
        again = what in self._since
        return now - self._since.setdefault(what, now) >= self._grace and again

    def clear(self, *what: Hashable) -> None:
        """Something else was reported, or happened."""
        for one in what:
            self._since.pop(one, None)

    def keep(self, wanted: Container[Hashable]) -> None:
        """Clear all that is not among these."""
        self.clear(*(what for what in self if what not in wanted))

    def is_open(self, now: float) -> bool:
        """Whether anything is suspected for too short a time to be believed."""
        return any(now - since < self._grace for since in self._since.values())

    def __contains__(self, what: Hashable) -> bool:
        """Whether it is suspected, believed or not."""
        return what in self._since

    def __iter__(self) -> Iterator[Hashable]:
        return iter(list(self._since))

    def __len__(self) -> int:
        return len(self._since)
