"""What a reading task ends with: errors of its brokers that last, and the texts of all its errors.

Runs in: executor workers. Deliberately absent: what a code means (``answers``), when records are lost (``ranges``).
"""

from collections.abc import Sequence

from spark_group_source.answers import CODES, TLS_ALERT, Meaning, Request, Suspicions, meaning
from spark_group_source.errors import AccessDenied, DataLoss, GroupError, ReadTimeout, TopicMissing
from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.reader.intake import LaterLeader
from spark_group_source.reader.records import Bounds, Event

GRACE_S = 3.0
"""How long brokers must report the same before it is believed that a topic is gone or another one, that a log is short,
or that access is refused: a broker that just started, and a new leader, can say each of these for a moment."""
RANGES_IN_MESSAGE_MAX = 5

_FATAL = CODES["_FATAL"]


class Failures:
    """Of one reader. Most pass by themselves; a refusal is believed after a grace, and a login that was refused only
    when a fresh client is refused as well: the token of the former one may have run out before another one came."""

    def __init__(self, servers: str, user: str, suspicions: Suspicions) -> None:
        self._servers, self._user, self._suspicions = servers, user, suspicions
        self._refused_s: float | None = None
        self._renewed = False
        self.last_text = ""

    def note(self, request: Request, event: Event, now_s: float) -> None:
        """Note that a request failed.

        Raises:
            AccessDenied: we were refused, and were again after a grace.
            GroupError: asking again would not help.
        """
        verdict = Meaning.REFUSED if TLS_ALERT in event.text else meaning(request, event.code, event.text)
        self.last_text = event.text
        topic = event.tp.topic if event.tp else None
        if verdict is Meaning.REFUSED:
            self._refused_s = self._refused_s or now_s
            known = self._suspicions.report((request, topic), now_s)
            if known and (topic is not None or self._renewed):
                raise refused(topic, self._servers, event.text, request.value, self._user)
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


# --- errors -----------------------------------------------------------------------------------------------------------


def refused(topic: str | None, servers: str, text: str, op: str, user: str) -> AccessDenied:
    what = repr(topic) if topic else "from Kafka"
    return AccessDenied(
        f"reading {what} at {servers} was refused: {text}. "
        + (
            f"{user} needs Read on the topic {topic!r}"
            if topic
            else "Check the kafka.security.protocol, kafka.sasl.* and kafka.ssl.* options, as the executors see them"
        ),
        op=op,
        on="topic" if topic else "",
    )


def timed_out(
    servers: str, left: Sequence[OffsetRange], waited_s: float, last_error: str, held: Sequence[TopicPartition]
) -> ReadTimeout:
    """``held``: partitions whose records a transaction holds back."""
    named = ", ".join(map(str, left[:RANGES_IN_MESSAGE_MAX])) or "nothing"
    more = len(left) - RANGES_IN_MESSAGE_MAX
    hint = " {} has records up to its planned end that an open transaction holds back: see its producer."
    return ReadTimeout(
        f"nothing came from {servers} for {waited_s:.1f} s; still to read: {named}"
        + f" and {more} more" * (more > 0)
        + f". Last error: {last_error or 'none'}."
        + "".join(hint.format(tp) for tp in held[:1]),
        ranges=[(r.tp.topic, r.tp.partition, r.start, r.end) for r in left],
        waited_ms=int(waited_s * 1000),
    )


def gone(rest: OffsetRange, servers: str, topics: Sequence[str]) -> TopicMissing:
    return TopicMissing(
        f"{rest.tp} does not exist any more at {servers}, while {rest} was still to be read. Restore the topic or "
        "unsubscribe it",
        topics=topics,
    )


def made_anew(planned: OffsetRange, *, was_read: bool, fails: bool) -> DataLoss:
    topic = planned.tp.topic
    return DataLoss(
        f"{planned} was planned, but topic {topic} was deleted and made anew"
        + " while it was read" * was_read
        + ". Set failOnDataLoss=false to go on without its former records" * fails,
        topic=topic,
        partition=planned.tp.partition,
        expected=planned.start,
        available=(0, 0),
    )


def records_lost(rest: OffsetRange, low: int, high: int) -> DataLoss:
    return DataLoss(
        f"{rest} was planned but the log holds [{low},{high}): records aged out, or the topic was made anew. Set "
        "failOnDataLoss=false to go on without them",
        topic=rest.tp.topic,
        partition=rest.tp.partition,
        expected=rest.start,
        available=(low, high),
    )


def cut_off(rest: OffsetRange, later: LaterLeader, log: Bounds) -> DataLoss:
    """``later``: the record that is there."""
    return DataLoss(
        f"{rest} was planned, but its log was cut at {later.offset} or before it: a leader was elected that lacked "
        f"the planned records. What stands there now was written after the plan, in leader epoch {later.epoch}: it "
        f"has [{log.low},{log.high}) in epoch {log.leader_epoch}. Set failOnDataLoss=false to go on with what it holds",
        topic=rest.tp.topic,
        partition=rest.tp.partition,
        expected=rest.start,
        available=(log.low, log.high),
    )
