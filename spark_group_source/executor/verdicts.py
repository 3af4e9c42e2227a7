"""What a reading task ends with, in words: each error with what was planned, what is there, and what settles it.

Runs in: executor workers. Deliberately absent: when one of them is due (``ranges``).
"""

from collections.abc import Sequence

from spark_group_source.errors import AccessDenied, DataLoss, ReadTimeout, TopicMissing
from spark_group_source.model import OffsetRange, TopicPartition

RANGES_IN_MESSAGE_MAX = 5


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


def cut_off(rest: OffsetRange, offset: int, epochs: tuple[int, int], log: tuple[int, int]) -> DataLoss:
    """``epochs``: of the record that is there, and of its log's leader."""
    return DataLoss(
        f"{rest} was planned, but its log was cut at {offset} or before it: a leader was elected that did not have the "
        f"planned records. What stands there now was written after the plan, in leader epoch {epochs[0]}: the log has "
        f"[{log[0]},{log[1]}) in epoch {epochs[1]}. Set failOnDataLoss=false to go on with what it holds",
        topic=rest.tp.topic,
        partition=rest.tp.partition,
        expected=rest.start,
        available=log,
    )
