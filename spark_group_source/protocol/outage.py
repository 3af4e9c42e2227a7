"""Outages of the brokers: when they started, and when requests are retried.

Runs in: the stream reader (inside ``run``), tests. Deliberately absent: the requests, and the meaning of responses
(``kafka``).

The run waits for an outage to end (``brokerTimeoutMs``). The outage is logged once when it starts and once when it
ends. In between, requests are retried after growing pauses with jitter, so that the streams of a cluster that recovers
do not all retry at once.
"""

from dataclasses import dataclass
from enum import Enum
from zlib import crc32

from spark_group_source.errors import BrokerUnavailable
from spark_group_source.protocol.rules import pause_ms

RETRY_PAUSE_MS_MAX = 2_000
"""The longest pause between two requests of Spark's call: this soon after an outage the query reads again."""
JITTER_SHARE = 0.25
"""The jitter of a pause, as a share of it in both directions."""


class Requester(Enum):
    """The sender of requests."""

    CALL = "call"  # a step of Spark's call
    LOOKUP = "lookup"  # the lookup of a position


@dataclass(slots=True)
class _Unanswered:
    """The unanswered requests of one sender."""

    since_ms: int
    """When the first of them was sent."""
    error: BrokerUnavailable
    """How the last of them failed."""
    tries: int = 0
    retry_at_ms: int = 0
    """The earliest time of the next request."""


class Outage:
    """The outages of one run, one at a time."""

    def __init__(self) -> None:
        self._unanswered: dict[Requester, _Unanswered] = {}
        self.ended_ms = 0
        """When the last outage ended, on the run's clock; 0 before the first."""

    @property
    def since_ms(self) -> int | None:
        """When the oldest unanswered request was sent; None if all were answered."""
        return min((pending.since_ms for pending in self._unanswered.values()), default=None)

    def request_failed(self, requester: Requester, error: BrokerUnavailable, *, name: str, now_ms: int) -> bool:
        """A request timed out.

        Args:
            requester: its sender.
            error: how it failed; its ``waited_ms`` says how long the request took.
            name: the stream or group; it makes the jitter of this run different from that of others.
            now_ms: the time.

        Returns:
            Whether an outage starts with it.
        """
        starts = not self._unanswered
        waited_ms = error.fields.get("waited_ms", 0)
        pending = self._unanswered.get(requester)
        if pending is None:
            began_ms = now_ms - (waited_ms if isinstance(waited_ms, int) else 0)
            pending = self._unanswered[requester] = _Unanswered(began_ms, error)
        pause = min(pause_ms(pending.tries), RETRY_PAUSE_MS_MAX)
        draw = crc32(f"{name} {pending.tries}".encode()) / 2**32
        pending.error, pending.retry_at_ms = error, now_ms + int(pause * (1 + JITTER_SHARE * (2 * draw - 1)))
        pending.tries += 1
        return starts

    def request_answered(self, requester: Requester, *, now_ms: int) -> int | None:
        """A request was answered. Returns the duration of the outage if it ends with it, else None."""
        since_ms = self.since_ms
        if self._unanswered.pop(requester, None) is None or self._unanswered or since_ms is None:
            return None
        self.ended_ms = now_ms
        return now_ms - since_ms

    def retry_at_ms(self, requester: Requester) -> int:
        """The earliest time of the next request."""
        pending = self._unanswered.get(requester)
        return 0 if pending is None else pending.retry_at_ms

    def error_after(self, requester: Requester, bound_ms: int, *, now_ms: int) -> BrokerUnavailable | None:
        """The error that ends the run if the outage has lasted for ``bound_ms`` or longer; 0 means no bound."""
        pending = self._unanswered.get(requester)
        if pending is None or not bound_ms or (waited_ms := now_ms - pending.since_ms) < bound_ms:
            return None
        return BrokerUnavailable(
            f"the brokers have not answered for {waited_ms / 1000:.0f} s, in {pending.tries} attempts, so the query "
            f"cannot continue. The last attempt: {pending.error}",
            **{**pending.error.fields, "waited_ms": waited_ms},
        )
