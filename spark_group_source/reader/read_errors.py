"""Failed requests of a reading task, and the errors that end it.

Runs in: executor workers. Deliberately absent: the meaning of an error code (``error_codes``), and when records count
as lost (``range_reader``)."""

from collections.abc import Sequence

from spark_group_source import command_line
from spark_group_source.error_codes import CODES, TLS_ALERT, Meaning, Request, Suspicions, meaning
from spark_group_source.errors import AccessDenied, DataLoss, GroupError, ReadTimeout, TopicMissing
from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.reader.records import ClientEvent, NewerRecord, Watermarks

GRACE_S = 3.0
"""How long brokers must repeat a report before it is believed: a missing or recreated topic, a short log, or refused
access. A broker that just started and a new leader may report any of these for a moment."""
RANGES_IN_MESSAGE_MAX = 5

_FATAL = CODES["_FATAL"]


class RequestFailures:
    """Failed requests of one reader. Most errors are temporary. A refusal is believed after a grace period; a refused
    login only if a new client is refused as well, because the old client's token may have expired."""

    def __init__(self, servers: str, user: str, suspicions: Suspicions) -> None:
        self._servers, self._user, self._suspicions = servers, user, suspicions
        self._refused_s: float | None = None
        """When the first refusal came, since the last records; monotonic seconds."""
        self._renewed = False
        """Whether the client was replaced since then."""
        self.last_text = ""
        """The text of the last failure, for the error of a timeout."""

    def record(self, request: Request, event: ClientEvent, now_s: float) -> None:
        """Record that a request failed.

        Raises:
            AccessDenied: the request was refused, and again after the grace period.
            GroupError: a retry cannot help.
        """
        verdict = Meaning.REFUSED if TLS_ALERT in event.text else meaning(request, event.code, event.text)
        self.last_text = event.text
        topic = event.tp.topic if event.tp else None
        if verdict is Meaning.REFUSED:
            self._refused_s = self._refused_s or now_s
            is_believed = self._suspicions.report((request, topic), now_s)
            if is_believed and (topic is not None or self._renewed):
                raise access_denied(topic, self._servers, event.text, request.value, self._user)
        if verdict is Meaning.FATAL:
            what = "fatal error of the reading client" if event.code == _FATAL else f"request refused: {request.value}"
            raise GroupError(f"{what}, at {self._servers}: {event.text}", op=request.value)

    def clear_refusals(self) -> None:
        """Note that records came: access works."""
        self._refused_s, self._renewed = None, False

    def needs_new_client(self, now_s: float) -> bool:
        """Whether a new client must find out if a refusal persists, because librdkafka reports one only once. True
        once for each refusal."""
        if self._refused_s is None or self._renewed or now_s - self._refused_s < GRACE_S:
            return False
        self._renewed = True
        return True


# --- errors -----------------------------------------------------------------------------------------------------------


def access_denied(topic: str | None, servers: str, text: str, op: str, user: str) -> AccessDenied:
    what = f"topic {topic!r}" if topic else "from Kafka"
    return AccessDenied(
        f"reading {what} at {servers} was refused: {text}. "
        + (
            f"Grant {user} the permission Read on the topic {topic!r}"
            if topic
            else "Check the kafka.security.protocol, kafka.sasl.* and kafka.ssl.* options; certificate and key files "
            "must exist on every executor"
        ),
        op=op,
        on="topic" if topic else "",
    )


def read_timeout(
    servers: str,
    remaining: Sequence[OffsetRange],
    waited_s: float,
    last_error: str,
    in_transaction: Sequence[TopicPartition],
) -> ReadTimeout:
    """Build the error for ranges without progress.

    Args:
        in_transaction: partitions whose remaining records belong to an open transaction.
    """
    named = ", ".join(map(str, remaining[:RANGES_IN_MESSAGE_MAX])) or "nothing"
    more = len(remaining) - RANGES_IN_MESSAGE_MAX
    hint = " {} has an open transaction before the planned end: check its producer."
    return ReadTimeout(
        f"no records from {servers} for {waited_s:.1f} s; still to read: {named}"
        + f" and {more} more" * (more > 0)
        + f". Last error: {last_error or 'none'}."
        + "".join(hint.format(tp) for tp in in_transaction[:1]),
        ranges=[(r.tp.topic, r.tp.partition, r.start, r.end) for r in remaining],
        waited_ms=int(waited_s * 1000),
    )


def topic_missing(remaining: OffsetRange, servers: str, topics: Sequence[str]) -> TopicMissing:
    return TopicMissing(
        f"{remaining.tp} no longer exists at {servers}, but {remaining} was not read yet. Restore the topic, or remove "
        "it from the subscription",
        topics=topics,
    )


def topic_recreated(planned: OffsetRange, *, was_read: bool, can_skip: bool) -> DataLoss:
    """Build the error for a topic with another id than the planned one.

    Args:
        was_read: whether rows of the topic were handed over already.
        can_skip: whether failOnDataLoss=false would help.
    """
    topic = planned.tp.topic
    return DataLoss(
        f"{planned} was planned, but topic {topic!r} was deleted and recreated"
        + " while it was read" * was_read
        + ". Set failOnDataLoss=false to continue without its old records" * can_skip,
        topic=topic,
        partition=planned.tp.partition,
        expected=planned.start,
        available=(0, 0),
    )


def records_lost(remaining: OffsetRange, low: int, high: int) -> DataLoss:
    return DataLoss(
        f"{remaining} was planned, but the log has only [{low},{high}): retention deleted records, or the topic was "
        "recreated. Set failOnDataLoss=false to continue without them",
        topic=remaining.tp.topic,
        partition=remaining.tp.partition,
        expected=remaining.start,
        available=(low, high),
    )


def log_truncated(remaining: OffsetRange, newer: NewerRecord, log: Watermarks) -> DataLoss:
    """Build the error for a truncated log.

    Args:
        newer: the first record that replaced a planned one.
    """
    return DataLoss(
        f"{remaining} was planned, but its log was truncated at {newer.offset} or below: a leader without the planned "
        f"records was elected. The records there now have leader epoch {newer.epoch} and were written after the plan; "
        f"the log has [{log.low},{log.high}) in epoch {log.leader_epoch}. Set failOnDataLoss=false to continue with "
        "the remaining records",
        topic=remaining.tp.topic,
        partition=remaining.tp.partition,
        expected=remaining.start,
        available=(log.low, log.high),
    )


def unreadable_record(error: GroupError, connection: command_line.Connection, group_id: str) -> GroupError:
    """Add to the error of a record that Spark cannot store the command that moves the group past it."""
    topic, partition, offset = (str(error.fields[name]) for name in ("topic", "partition", "offset"))
    words = ("--topic", f"{topic}:{partition}", "--to-offset", str(int(offset) + 1), "--execute")
    command = command_line.spark_group("reset", connection, group_id, *words)
    return GroupError(
        f"{error}. To skip the record, stop the query, run this command (for a table of DeltaSink with --table) and "
        f"start the query again:{command_line.sequence([command])}",
        **error.fields,
    )
