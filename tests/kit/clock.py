"""A clock that moves only when a test says so.

Runs in: tests. Deliberately absent: timers; who waits asks the machine for its next deadline.
"""


class ManualClock:
    """Milliseconds since some moment. Call it to read it, as the product's clocks are called."""

    def __init__(self, now_ms: int = 0) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms

    def advance(self, *, ms: int) -> int:
        """Move on; a clock never goes back."""
        if ms < 0:
            raise ValueError(f"a clock cannot go back by {-ms} ms")
        self.now_ms += ms
        return self.now_ms
