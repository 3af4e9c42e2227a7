"""How long a reading task waits: for records that should come, and for brokers that do not answer.

Runs in: executor workers. Deliberately absent: asking (``ranges``), a clock.

An outage is no fault of the records. While questions are not answered the first clock stands still, and a longer bound
counts: that of the query's own questions.
"""


class Patience:
    """When one reader gives up.

    Args:
        deadline_s: without progress for so long, while brokers answer.
        silence_s: without an answer for so long.
    """

    def __init__(self, deadline_s: float, silence_s: float) -> None:
        self._deadline_s, self._silence_s = deadline_s, silence_s
        self._progress_s = 0.0
        self._silent_s: float | None = None

    def progress(self, now_s: float) -> None:
        """A record came, or a position moved."""
        self._progress_s, self._silent_s = now_s, None

    def asked(self, sent_s: float, now_s: float, *, answered: bool) -> None:
        """A question about a range was answered now, or given up."""
        if not answered:
            self._silent_s = sent_s if self._silent_s is None else self._silent_s
        elif self._silent_s is not None:
            self._progress_s += now_s - self._silent_s
            self._silent_s = None

    def left_s(self, now_s: float) -> float:
        """Until it ends."""
        if self._silent_s is None:
            return self._progress_s + self._deadline_s - now_s
        return self._silent_s + self._silence_s - now_s

    def waited_s(self, now_s: float) -> float:
        """Without progress, or without an answer."""
        return now_s - (self._progress_s if self._silent_s is None else self._silent_s)
