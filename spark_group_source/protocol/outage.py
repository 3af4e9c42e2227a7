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

ASK_AGAIN_MS_MAX = 2_000
"""The longest pause between two requests of Spark's call: this soon after an outage the query reads again."""
JITTER_SHARE = 0.25
"""The jitter of a pause, as a share of it in both directions."""


class Asker(Enum):
    """The sender of requests."""

    CALL = "call"  # a step of Spark's call
    LOOKUP = "lookup"  # the lookup of a position


@dataclass(slots=True)
class _Silence:
    """The unanswered requests of one sender."""

    since_ms: int
    """When the first of them was sent."""
    error: BrokerUnavailable
    """How the last of them failed."""
    tries: int = 0
    again_at_ms: int = 0
    """The earliest time of the next request."""


class Outage:
    """The outages of one run, one at a time."""

    def __init__(self) -> None:
        self._silences: dict[Asker, _Silence] = {}
        self.ended_ms = 0
        """When the last outage ended, on the run's clock; 0 before the first."""

    @property
    def since_ms(self) -> int | None:
        """When the oldest unanswered request was sent; None if all were answered."""
        return min((silence.since_ms for silence in self._silences.values()), default=None)

    def not_answered(self, asker: Asker, error: BrokerUnavailable, *, name: str, now_ms: int) -> bool:
        """A request timed out.

        Args:
            asker: its sender.
            error: how it failed; its ``waited_ms`` says how long the request took.
            name: the stream or group; it makes the jitter of this run different from that of others.
            now_ms: the time.

        Returns:
            Whether an outage starts with it.
        """
        begins = not self._silences
        waited_ms = error.fields.get("waited_ms", 0)
        silence = self._silences.get(asker)
        if silence is None:
            began_ms = now_ms - (waited_ms if isinstance(waited_ms, int) else 0)
            silence = self._silences[asker] = _Silence(began_ms, error)
        pause = min(pause_ms(silence.tries), ASK_AGAIN_MS_MAX)
        draw = crc32(f"{name} {silence.tries}".encode()) / 2**32
        silence.error, silence.again_at_ms = error, now_ms + int(pause * (1 + JITTER_SHARE * (2 * draw - 1)))
        silence.tries += 1
        return begins

    def answered(self, asker: Asker, *, now_ms: int) -> int | None:
        """A request was answered. Returns the duration of the outage if it ends with it, else None."""
        since_ms = self.since_ms
        if self._silences.pop(asker, None) is None or self._silences or since_ms is None:
            return None
        self.ended_ms = now_ms
        return now_ms - since_ms

    def again_at_ms(self, asker: Asker) -> int:
        """The earliest time of the next request."""
        silence = self._silences.get(asker)
        return 0 if silence is None else silence.again_at_ms

    def over(self, asker: Asker, bound_ms: int, *, now_ms: int) -> BrokerUnavailable | None:
        """The error that ends the run if the outage has lasted for ``bound_ms`` or longer; 0 means no bound."""
        silence = self._silences.get(asker)
        if silence is None or not bound_ms or (waited_ms := now_ms - silence.since_ms) < bound_ms:
            return None
        return BrokerUnavailable(
            f"the brokers have not answered for {waited_ms / 1000:.0f} s, in {silence.tries} attempts, so the query "
            f"cannot continue. The last attempt: {silence.error}",
            **{**silence.error.fields, "waited_ms": waited_ms},
        )
