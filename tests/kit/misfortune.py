"""Faults of single requests to the brokers, drawn by the seed.

Runs in: tests. Requests of members (join, sync, heartbeat) have ``World.loss`` instead: the library retries them, and
the application does not see that. Deliberately absent: brokers that cannot be reached (``World.down_until_ms``,
``Process.cut_off_until_ms``).
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from confluent_kafka import KafkaError

from kit.world import Draws


class RequestKind(Enum):
    """The kinds of requests."""

    TOPICS = "list topics"
    DESCRIBE = "describe topics"
    OFFSETS = "list offsets"
    EPOCHS = "read the end of a leader epoch"
    GROUP = "describe the group"
    COMMITTED = "read committed offsets"
    COMMIT = "commit offsets"
    ALTER = "alter offsets"
    INIT = "init transactions"
    ADD = "add a group to a transaction"
    SEND = "send offsets to a transaction"
    END = "end a transaction"


class Luck(Enum):
    """What happens to one request."""

    LATE = "answered late"
    TWICE = "done twice"
    NEVER = "not answered"
    REFUSED = "refused"
    FALSE_ERROR = "done, and answered with an error"
    PARTLY = "answered in part"


_COORDINATOR = (KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.NOT_COORDINATOR)
_TRANSACTION = (KafkaError.TRANSACTION_ABORTABLE, KafkaError.UNKNOWN)

REFUSALS: Final[Mapping[RequestKind, Sequence[int]]] = {
    RequestKind.TOPICS: (KafkaError._TRANSPORT, KafkaError._TIMED_OUT),
    RequestKind.DESCRIBE: (KafkaError._TIMED_OUT, KafkaError.REQUEST_TIMED_OUT, KafkaError.UNKNOWN),
    RequestKind.OFFSETS: (KafkaError._NOENT, KafkaError._TIMED_OUT, KafkaError._TRANSPORT),
    RequestKind.EPOCHS: (KafkaError._TIMED_OUT,),
    RequestKind.GROUP: (*_COORDINATOR, KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError._TRANSPORT),
    RequestKind.COMMITTED: (*_COORDINATOR, KafkaError._TIMED_OUT, KafkaError.UNKNOWN),
    RequestKind.COMMIT: (
        KafkaError._WAIT_COORD,
        KafkaError._TRANSPORT,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.UNKNOWN,
    ),
    RequestKind.ALTER: (*_COORDINATOR, KafkaError.REQUEST_TIMED_OUT),
    RequestKind.INIT: (KafkaError._TIMED_OUT,),
    RequestKind.ADD: (KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError.CONCURRENT_TRANSACTIONS, *_TRANSACTION),
    RequestKind.SEND: (KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError.REQUEST_TIMED_OUT, *_TRANSACTION),
    RequestKind.END: (KafkaError._TIMED_OUT, *_TRANSACTION),
}
"""Temporary errors of each request that the application sees. The library itself retries after all others."""

FALSE_ERRORS: Final[Mapping[RequestKind, Sequence[int]]] = {
    RequestKind.COMMIT: (
        KafkaError._WAIT_COORD,
        KafkaError._TRANSPORT,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.UNKNOWN,
    ),
    RequestKind.ALTER: (KafkaError.REQUEST_TIMED_OUT, KafkaError.UNKNOWN),
    RequestKind.ADD: (KafkaError._TIMED_OUT,),
    RequestKind.SEND: (KafkaError._TIMED_OUT, KafkaError.REQUEST_TIMED_OUT, KafkaError.UNKNOWN),
    RequestKind.END: (KafkaError._TIMED_OUT, KafkaError._TIMED_OUT, KafkaError._TIMED_OUT, KafkaError.UNKNOWN),
}
"""Errors of requests that were executed all the same; all other requests change nothing."""

PARTIAL: Final[Mapping[RequestKind, Sequence[int]]] = {
    RequestKind.DESCRIBE: (KafkaError.LEADER_NOT_AVAILABLE, KafkaError.UNKNOWN_TOPIC_OR_PART),
    RequestKind.OFFSETS: (
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._TIMED_OUT,
    ),
    RequestKind.COMMITTED: (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.UNSTABLE_OFFSET_COMMIT),
    RequestKind.COMMIT: (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.REQUEST_TIMED_OUT),
    RequestKind.ALTER: (KafkaError.UNKNOWN_TOPIC_OR_PART,),
}
"""Errors of one topic or partition in an answer without other errors."""


_ONLY: Final[Mapping[Luck, Container[RequestKind]]] = {
    Luck.PARTLY: PARTIAL,
    Luck.FALSE_ERROR: FALSE_ERRORS,
}


@dataclass
class Misfortune:
    """The share of requests that each fault affects; without faults by default."""

    late: float = 0.0
    twice: float = 0.0
    never: float = 0.0
    refused: float = 0.0
    false_errors: float = 0.0
    partly: float = 0.0
    late_ms_max: int = 4_000

    def draw(self, draws: Draws, kind: RequestKind) -> Luck | None:
        """The fault of this request, if any."""
        shares = (self.late, self.twice, self.never, self.refused, self.false_errors, self.partly)
        if not any(shares):
            return None
        at = draws.random()
        for luck, share in zip(Luck, shares, strict=True):
            if at < share:
                return None if kind not in _ONLY.get(luck, RequestKind) else luck
            at -= share
        return None

    def refusal(self, draws: Draws, kind: RequestKind) -> int:
        return draws.choice(REFUSALS[kind])

    def false_error(self, draws: Draws, kind: RequestKind) -> int:
        return draws.choice(FALSE_ERRORS[kind])

    def partial(self, draws: Draws, kind: RequestKind) -> int:
        """The error of one part of an answer; 0 for none."""
        return draws.choice(PARTIAL[kind]) if draws.chance(0.5) else 0
