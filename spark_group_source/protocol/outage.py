"""Brokers that do not answer: since when, who waits for them, and when they are asked again.

Runs in: the stream reader (inside ``machine``), tests. Deliberately absent: asking, and what an answer means
(``kafka``).

An outage is waited for (``brokerTimeoutMs``). It is said once when it begins and once when it ends; in between everyone
asks again after growing pauses, a little different for each stream, so that a cluster that comes back is not asked by
all of them at once.
"""

from dataclasses import dataclass
from enum import Enum
from zlib import crc32

from spark_group_source.errors import BrokerUnavailable
from spark_group_source.protocol.rules import pause_ms

ASK_AGAIN_MS_MAX = 2_000
"""The longest pause between two questions of Spark's call: rows flow again this soon after an outage."""
JITTER_SHARE = 0.25
"""By how much of it a pause is longer or shorter."""


class Asker(Enum):
    """Who asks."""

    CALL = "call"  # the thread of Spark's call
    LOOKUP = "lookup"  # where partitions stand


@dataclass(slots=True)
class _Silence:
    since_ms: int
    error: BrokerUnavailable
    tries: int = 0
    again_at_ms: int = 0


class Outage:
    """The outages of one run, one at a time. ``ended_ms``: when the last one ended; 0 before."""

    def __init__(self) -> None:
        self._silences: dict[Asker, _Silence] = {}
        self.ended_ms = 0

    @property
    def since_ms(self) -> int | None:
        """When the first question was asked that has no answer yet; None: all were answered."""
        return min((silence.since_ms for silence in self._silences.values()), default=None)

    def not_answered(self, asker: Asker, error: BrokerUnavailable, *, name: str, now_ms: int) -> bool:
        """A question was given up. ``name``: whose pauses these are. Returns whether an outage begins with it."""
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
        """A question was answered. Returns how long the outage was, if it ends with it."""
        since_ms = self.since_ms
        if self._silences.pop(asker, None) is None or self._silences or since_ms is None:
            return None
        self.ended_ms = now_ms
        return now_ms - since_ms

    def again_at_ms(self, asker: Asker) -> int:
        """When the next question may be asked."""
        silence = self._silences.get(asker)
        return 0 if silence is None else silence.again_at_ms

    def over(self, asker: Asker, bound_ms: int, *, now_ms: int) -> BrokerUnavailable | None:
        """What the run ends with, where the brokers were silent for longer than the bound; 0 is none."""
        silence = self._silences.get(asker)
        if silence is None or not bound_ms or (waited_ms := now_ms - silence.since_ms) < bound_ms:
            return None
        return BrokerUnavailable(
            f"the brokers have not answered for {waited_ms / 1000:.0f} s, in {silence.tries} tries. The last one: "
            f"{silence.error}",
            **{**silence.error.fields, "waited_ms": waited_ms},
        )
