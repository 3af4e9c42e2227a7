"""What each code that answers a question of a reading task means.

Runs in: executor workers, tests. Deliberately absent: asking, counting how often something was told (``doubts``), and
imports: this is data.

Negative codes are librdkafka's own view of the world. A partition of a broker that it cannot reach is "unknown" to it,
so none of them says anything about Kafka. Codes from 0 on are a broker's word, and even that may be wrong for a moment:
only metadata can say that something is gone, because a broker that lost a partition to another one says the same of it
in every other answer.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Final


class Request(Enum):
    """What was asked. The codes that come with a lost connection or a refused login are of the request they ended."""

    FETCH = "fetch"
    LIST_OFFSETS = "list offsets"
    METADATA = "metadata"


class Meaning(Enum):
    """What follows from an answer."""

    GOOD = "good"
    ASK_AGAIN = "ask again"
    """It says nothing, or nothing that lasts: until the deadline."""
    GONE = "gone"
    """The topic is not there. Believed when it was told again after a grace."""
    REFUSED = "refused"
    """Credentials or permissions. Believed when it was told again after a grace."""
    OURS = "ours"
    """This client cannot go on, or asks for what cannot be: asking again would not help."""


EOF: Final = -191
"""Not an error: the end of what can be read of a partition."""
OUT_OF_RANGE: Final = frozenset({-140, 1})
"""librdkafka gave a partition up because the broker has no such offset. Whether that is so, its leader is asked."""

LOCAL: Final[Mapping[int, Meaning]] = {
    -150: Meaning.OURS,  # a fatal error: the client is of no more use
    -169: Meaning.REFUSED,  # authentication failed: a broker said so, or the client could not begin
}
"""The negative codes that do not just mean that it has to be asked again."""

_AUTHENTICATION: Final[Mapping[int, Meaning]] = {
    33: Meaning.REFUSED,  # unsupported SASL mechanism
    34: Meaning.REFUSED,  # illegal SASL state
    58: Meaning.REFUSED,  # SASL authentication failed
}
_PERMISSIONS: Final[Mapping[int, Meaning]] = {
    29: Meaning.REFUSED,  # topic authorization failed
    30: Meaning.REFUSED,  # group authorization failed
    31: Meaning.REFUSED,  # cluster authorization failed
}
_PASSING: Final = (
    -1,  # unknown server error
    3,  # unknown topic or partition
    5,  # leader not available
    6,  # not leader or follower
    7,  # request timed out
    8,  # broker not available
    9,  # replica not available
    13,  # network exception
    14,  # coordinator load in progress
    41,  # not controller
    56,  # storage error
    74,  # fenced leader epoch
    75,  # unknown leader epoch
    78,  # offset not available: the high watermark of a new leader lags
    89,  # throttling quota exceeded
    100,  # unknown topic id
    103,  # inconsistent topic id
)
_WRONG: Final[Mapping[int, Meaning]] = {
    17: Meaning.OURS,  # invalid topic name
    35: Meaning.OURS,  # unsupported version
    42: Meaning.OURS,  # invalid request
}

ANSWERS: Final[Mapping[Request, Mapping[int, Meaning]]] = {
    Request.FETCH: {
        **dict.fromkeys(_PASSING, Meaning.ASK_AGAIN),
        **_AUTHENTICATION,
        **_PERMISSIONS,
        **_WRONG,
        1: Meaning.ASK_AGAIN,  # offset out of range: the leader is asked for the log's bounds
        2: Meaning.ASK_AGAIN,  # corrupt message
        70: Meaning.ASK_AGAIN,  # fetch session id not found
        71: Meaning.ASK_AGAIN,  # invalid fetch session epoch
        106: Meaning.ASK_AGAIN,  # fetch session topic id error
        109: Meaning.ASK_AGAIN,  # offset moved to tiered storage
    },
    Request.LIST_OFFSETS: {**dict.fromkeys(_PASSING, Meaning.ASK_AGAIN), **_AUTHENTICATION, **_PERMISSIONS, **_WRONG},
    Request.METADATA: {
        **dict.fromkeys(_PASSING, Meaning.ASK_AGAIN),
        **_AUTHENTICATION,
        **_PERMISSIONS,
        **_WRONG,
        3: Meaning.GONE,
        100: Meaning.GONE,
    },
}


def meaning(request: Request, code: int) -> Meaning:
    """What an answer to ``request`` means; a code that nobody has thought of says nothing."""
    if code == 0:
        return Meaning.GOOD
    if code < -1:
        return LOCAL.get(code, Meaning.ASK_AGAIN)
    return ANSWERS[request].get(code, Meaning.ASK_AGAIN)
