"""What went wrong for a reading task, as far as it is no fact about records.

Runs in: executor workers. Deliberately absent: what an error means (``answers``), lost records (``ranges``).
"""

from spark_group_source.answers import CODES, TLS_ALERT, Meaning, Request, meaning
from spark_group_source.errors import GroupError
from spark_group_source.executor import verdicts
from spark_group_source.executor.doubts import GRACE_S, Doubts
from spark_group_source.executor.records import Event

_FATAL = CODES["_FATAL"]


class Failures:
    """Of one reader. Most pass by themselves; a refusal is believed after a grace, and a login that was refused only
    when a fresh client is refused as well: the token of the former one may have run out before another one came."""

    def __init__(self, servers: str, user: str, doubts: Doubts) -> None:
        self._servers, self._user, self._doubts = servers, user, doubts
        self._refused_s: float | None = None
        self._renewed = False
        self.last_text = ""

    def hear(self, request: Request, event: Event, now_s: float) -> None:
        """Something went wrong.

        Raises:
            AccessDenied: we were refused, and were again after a grace.
            GroupError: asking again would not help.
        """
        verdict = Meaning.REFUSED if TLS_ALERT in event.text else meaning(request, event.code, event.text)
        self.last_text = event.text
        topic = event.tp.topic if event.tp else None
        if verdict is Meaning.REFUSED:
            self._refused_s = self._refused_s or now_s
            known = self._doubts.hear((request, topic), now_s)
            if known and (topic is not None or self._renewed):
                raise verdicts.refused(topic, self._servers, event.text, request.value, self._user)
        if verdict is Meaning.ENDS:
            what = "the reading client failed for good" if event.code == _FATAL else f"{request.value} was refused"
            raise GroupError(f"{what}, at {self._servers}: {event.text}", op=request.value)

    def forget_refusals(self) -> None:
        """Records came."""
        self._refused_s, self._renewed = None, False

    def needs_fresh_client(self, now_s: float) -> bool:
        """librdkafka tells a refusal once. Whether it still holds, a fresh client finds out; true once."""
        if self._refused_s is None or self._renewed or now_s - self._refused_s < GRACE_S:
            return False
        self._renewed = True
        return True
