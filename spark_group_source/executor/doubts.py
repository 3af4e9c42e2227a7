"""What was told that may be wrong, and what of it is believed.

Runs in: executor workers. Deliberately absent: asking (``ranges``), what codes mean (``answers``), a clock.
"""

from collections.abc import Hashable

GRACE_S = 3.0
"""How long brokers must have told the same before it is believed that a topic is gone or another one, that a log is
short, or that we are refused: a broker that just started, and a new leader, can say each of these for a moment."""
TOLD_MIN = 2
"""How often, at least."""


class Doubts:
    """Suspicions by what they are about: each since when, and how often it was told."""

    def __init__(self) -> None:
        self._told: dict[Hashable, tuple[float, int]] = {}

    def hear(self, what: Hashable, now_s: float) -> bool:
        """It was told (again). Returns whether it is believed now."""
        since_s, told = self._told.get(what, (now_s, 0))
        self._told[what] = since_s, told + 1
        return told + 1 >= TOLD_MIN and now_s - since_s >= GRACE_S

    def forget(self, *what: Hashable) -> None:
        """Something else was told, or happened."""
        for one in what:
            self._told.pop(one, None)

    def since_s(self, what: Hashable) -> float | None:
        return self._told[what][0] if what in self._told else None
