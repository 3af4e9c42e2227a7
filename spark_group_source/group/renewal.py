"""Offsets of idle partitions are committed again before Kafka could forget them.

Runs in: the stream reader (inside ``machine``), tests. Deliberately absent: when Kafka forgets (``expiry``), and asking
how long it keeps an offset.

Nothing of a query's topics expires while it runs, however long a partition has been idle. But in a group of KIP-848
each offset's time counts from its last commit: when the query stops, what was idle for that long is gone within
minutes. The checkpoint brings it back; a query with a new checkpoint would have to begin at ``startingOffsets``. So
after half of the retention an offset is committed again where it stands.
"""

from spark_group_source.group.expiry import NEAR
from spark_group_source.group.outbox import Outbox
from spark_group_source.group.partition import UNKNOWN
from spark_group_source.group.positions import Positions
from spark_group_source.group.statistics import Counters
from spark_group_source.model import TopicPartition

RENEW = 0.5
"""An offset is committed again when so much of the retention is over."""
LOOKS = 16
"""How often in one retention it is looked at how old the offsets are."""
NAMES_MAX = 5
"""Partitions that a warning names."""


class Renewal:
    """Which offsets of ours have become old. Until it is told how long they are kept it does nothing.

    Args:
        positions: takes what is to be committed again.
        counters: what it counts.
        out: takes log lines; it has the time.
    """

    def __init__(self, positions: Positions, counters: Counters, out: Outbox) -> None:
        self._positions, self._counters, self._out = positions, counters, out
        self._retention_ms = 0
        self._look_at_ms: int | None = None
        self._warned: frozenset[TopicPartition] = frozenset()

    def told(self, retention_ms: int) -> None:
        """How long the group's coordinator keeps an offset."""
        if retention_ms != self._retention_ms:
            self._retention_ms, self._look_at_ms = retention_ms, self._out.now_ms
            self.tick()

    def deadlines_ms(self) -> list[int]:
        return [] if self._look_at_ms is None else [self._look_at_ms]

    def tick(self) -> None:
        """Look at every partition of ours, if it is time."""
        now_ms = self._out.now_ms
        if self._look_at_ms is None or now_ms < self._look_at_ms:
            return
        self._look_at_ms = now_ms + max(1, self._retention_ms // LOOKS)
        near_ms, old_ms = now_ms - self._retention_ms * NEAR, now_ms - self._retention_ms * RENEW
        near: list[TopicPartition] = []
        for tp, partition in self._positions.ours.items():
            if partition.committed is None or partition.state in UNKNOWN:
                continue
            at_ms = partition.committed_ms
            if at_ms is not None and at_ms <= near_ms:
                near.append(tp)
            if not partition.owed and (at_ms is None or at_ms <= old_ms):
                partition.renew = True
                self._positions.account(tp, partition)
                self._counters.offsets_renewed += 1
        self._counters.offsets_expiring = len(near)
        self._warn(near)

    def _warn(self, near: list[TopicPartition]) -> None:
        new = sorted(frozenset(near) - self._warned)
        self._warned = frozenset(near)
        if new:
            names = ", ".join(map(str, new[:NAMES_MAX])) + (", …" if len(new) > NAMES_MAX else "")
            self._out.say(
                f"the offsets of {len(new)} idle partitions ({names}) were committed last so long ago that Kafka may "
                f"forget them soon after this query stops: it keeps them for {self._retention_ms / 3_600_000:.1f} h. "
                "They are committed again",
                warn=True,
            )
