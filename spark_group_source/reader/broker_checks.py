"""What brokers report to a reading task: topic ids, the bounds of logs, failed requests, and the errors of the task.

Runs in: executor workers. Deliberately absent: what follows from a check, and when records count as lost
(``range_reader``), resending of requests (``native_client``), and the meaning of an error code (``error_codes``).

Kafka gives every topic a new id, even if a topic of the same name existed before (KIP-516). librdkafka follows the
name: if a topic is deleted and recreated, it continues with the new one at the same offsets and does not report it. Ids
are never reused. So one check after the last rows that finds the planned id proves that all rows are of the planned
topic; a check before the first rows avoids reading most of the others at all. A check of the worker's task before is
used again while it covers rows that arrive (``range_reader.TOPIC_CHECK_VALID_S``).
"""

import time
from collections.abc import Collection, Mapping, Sequence
from enum import Enum

from spark_group_source import command_line
from spark_group_source.error_codes import CODES, TLS_ALERT, Meaning, Request, Suspicions, meaning
from spark_group_source.errors import AccessDenied, DataLoss, GroupError, ReadTimeout, TopicMissing
from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.reader.native_client import NativeClient, PendingRequest
from spark_group_source.reader.records import ClientEvent, NewerRecord, TopicDescription, TopicDescriptions, Watermarks

GRACE_S = 3.0
"""How long brokers must repeat a report before it is believed: a missing or recreated topic, a short log, or refused
access. A broker that just started and a new leader may report any of these for a moment."""
RANGES_IN_MESSAGE_MAX = 5

_FATAL = CODES["_FATAL"]


class TopicCheck(Enum):
    """A topic, compared with the plan."""

    UNCHECKED = "brokers have not reported the topic yet"
    FAILED = "brokers reported an error: a temporary one, or a refusal"
    PLANNED = "the topic has the planned id, or is not compared"
    RECREATED = "the topic has another id than the planned one: it was deleted and recreated"
    GONE = "the topic does not exist"


class TopicChecks:
    """The checks of one reader's topics; one request at a time.

    Args:
        planned_ids: topic ids in the plan; a topic without one is not compared.
        described: see :attr:`NativeClient.described`. Readers use a client one after another and share it.
    """

    def __init__(self, planned_ids: Mapping[str, str], described: dict[str, tuple[TopicDescription, float]]) -> None:
        self._planned_ids = {name: id_ for name, id_ in planned_ids.items() if id_}
        self._described = described
        self._request: PendingRequest[TopicDescriptions] | None = None

    def with_planned_id(self, names: Collection[str]) -> set[str]:
        """Those topics that are compared with a planned id."""
        return self._planned_ids.keys() & names

    @property
    def is_request_open(self) -> bool:
        return self._request is not None

    def send(self, client: NativeClient, names: Collection[str]) -> None:
        """Request the descriptions of topics; cancels an open request."""
        if self._request is not None:
            self._request.cancel()
        self._request = client.describe_topics(sorted(names))

    def forget_request(self) -> None:
        """Drop the open request after its client was closed."""
        self._request = None

    def receive(self, wait_s: float) -> TopicDescriptions | ClientEvent | None:
        """Return the descriptions of the requested topics, within ``wait_s``.

        Returns:
            An error if a request failed; it is still pending then. None without a response or an open request.
        """
        received = self._request.receive(wait_s) if self._request is not None else None
        if received is None:
            return None
        topics, sent_s = received
        if not isinstance(topics, ClientEvent):
            self._request = None
            self._described.update({name: (topic, sent_s) for name, topic in topics.items()})
        return topics

    def check(self, name: str, since_s: float) -> TopicCheck:
        """Return the last check of a topic, if it was requested at ``since_s`` or later."""
        topic, sent_s = self._described.get(name, (None, since_s))
        return self.compare(name, topic) if topic and sent_s >= since_s else TopicCheck.UNCHECKED

    def compare(self, name: str, topic: TopicDescription) -> TopicCheck:
        """Compare a topic with the plan."""
        match meaning(Request.TOPICS, topic.code):
            case Meaning.SUCCESS:
                # Brokers before 2.8 have no ids: nothing is compared.
                is_other = topic.id and topic.id != self._planned_ids.get(name, topic.id)
                return TopicCheck.RECREATED if is_other else TopicCheck.PLANNED
            case Meaning.GONE:
                return TopicCheck.GONE
        return TopicCheck.FAILED


class RequestFailures:
    """Failed requests of one reader. Most errors are temporary. A refusal is believed after a grace period; a refused
    login only if a new client is refused as well, because the old client's token may have expired."""

    def __init__(self, servers: str, user: str, suspicions: Suspicions) -> None:
        self._servers, self._user, self._suspicions = servers, user, suspicions
        self._refused_s: dict[TopicPartition | None, float] = {}
        """By partition, when the first refusal came since its last records; monotonic seconds. None: of the connection
        or login, since the last records of any partition."""
        self._renewed: set[TopicPartition | None] = set()
        """Those of them for which the client was replaced."""
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
            self._refused_s.setdefault(event.tp, now_s)
            is_believed = self._suspicions.report((request, topic), now_s)
            if is_believed and (topic is not None or None in self._renewed):
                raise access_denied(topic, self._servers, event.text, request.value, self._user)
        if verdict is Meaning.FATAL:
            what = "fatal error of the reading client" if event.code == _FATAL else f"request refused: {request.value}"
            raise GroupError(f"{what}, at {self._servers}: {event.text}")

    def clear_refusals(self, tp: TopicPartition) -> None:
        """Note that records of this partition came: access to it works."""
        for one in (tp, None):
            self._refused_s.pop(one, None)
            self._renewed.discard(one)

    def needs_new_client(self, now_s: float) -> bool:
        """Whether a new client must find out if a refusal persists, because librdkafka reports one only once. True
        once for each refusal."""
        due = {tp for tp, since_s in self._refused_s.items() if now_s - since_s >= GRACE_S} - self._renewed
        self._renewed |= due
        return bool(due)


class ReadDeadline:
    """When a reader gives up. It has two bounds: without progress while brokers respond, and without a response. In an
    outage the first one is suspended.

    Args:
        progress_timeout_s: the maximum time without progress while brokers respond.
        outage_timeout_s: the maximum time without a response.
    """

    def __init__(self, progress_timeout_s: float, outage_timeout_s: float) -> None:
        self._progress_timeout_s, self._outage_timeout_s = progress_timeout_s, outage_timeout_s
        self._progress_s = 0.0
        """When the last progress was made, moved forward by the length of later outages."""
        self._outage_s: float | None = None
        """When the first request without a response was sent, or the last progress, if that is later; None while
        brokers respond."""

    def note_progress(self, now_s: float) -> None:
        """Note that a record came or a position moved."""
        self._progress_s, self._outage_s = now_s, None

    def note_request(self, sent_s: float, now_s: float, *, is_answered: bool) -> None:
        """Note that a request has a response, or none although it was waited for."""
        if not is_answered:  # it may be older than the last record, which the consumer of the batches took long for
            self._outage_s = max(sent_s, self._progress_s) if self._outage_s is None else self._outage_s
        elif self._outage_s is not None:
            self._progress_s += now_s - self._outage_s
            self._outage_s = None

    def remaining_s(self, now_s: float) -> float:
        """The time until the reader gives up; 0 or less: now."""
        if self._outage_s is None:
            return self._progress_s + self._progress_timeout_s - now_s
        return self._outage_s + self._outage_timeout_s - now_s

    @property
    def is_outage(self) -> bool:
        """Whether brokers do not respond."""
        return self._outage_s is not None

    def waited_s(self, now_s: float) -> float:
        """The time without progress, or without a response."""
        return now_s - (self._progress_s if self._outage_s is None else self._outage_s)


class RangeCheck:
    """A check of one range against brokers: first of its topic, whose result is in ``topics``, then of its log. Nothing
    here waits: records of all ranges are read in the meantime, also of this one."""

    def __init__(self, client: NativeClient, tp: TopicPartition, topics: TopicChecks, deadline: ReadDeadline) -> None:
        self.tp = tp
        self._client, self._topics, self._deadline = client, topics, deadline
        self._started_s = time.monotonic()
        self._watermarks: PendingRequest[Watermarks] | None = None
        """None until the topic was checked."""
        topics.send(client, {tp.topic})

    @property
    def topic(self) -> TopicCheck:
        """The topic's check since this one started."""
        return self._topics.check(self.tp.topic, self._started_s)

    def watermarks(self) -> Watermarks | ClientEvent | None:
        """Return the watermarks that the leader reports; an error if a request failed; None without a response yet."""
        if self._watermarks is None:
            self._watermarks = self._client.request_watermarks(self.tp)
        received = self._watermarks.receive(0.0)
        if received is None:
            return None
        self.note_request(is_answered=not isinstance(received[0], ClientEvent))
        return received[0]

    def note_request(self, *, is_answered: bool) -> None:
        """Note for the deadline that brokers responded, or did not."""
        self._deadline.note_request(self._started_s, time.monotonic(), is_answered=is_answered)

    def cancel(self) -> None:
        """Drop the request for watermarks, if there is one. The topic's request stays open."""
        if self._watermarks is not None:
            self._watermarks.cancel()


# --- errors -----------------------------------------------------------------------------------------------------------


def access_denied(topic: str | None, servers: str, text: str, op: str, user: str) -> AccessDenied:
    """Build the error for a topic that may not be read; None: for a refused connection or login."""
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
    *,
    may_be_aborted: bool,
) -> ReadTimeout:
    """Build the error for ranges without progress.

    Args:
        in_transaction: partitions whose remaining records belong to an open transaction.
        may_be_aborted: whether the client may be fetching records of an aborted transaction. librdkafka drops them, and
            its position stays before them until it returns the next record.
    """
    named = ", ".join(map(str, remaining[:RANGES_IN_MESSAGE_MAX])) or "nothing"
    more = len(remaining) - RANGES_IN_MESSAGE_MAX
    hint = " {} has an open transaction before the planned end: check its producer."
    return ReadTimeout(
        f"no records from {servers} for {waited_s:.1f} s; still to read: {named}"
        + f" and {more} more" * (more > 0)
        + f". Last error: {last_error or 'none'}."
        + "".join(hint.format(tp) for tp in in_transaction[:1])
        + " A large aborted transaction before the planned end is another cause: fetching it is no progress. Raise "
        "kafkaConsumer.pollTimeoutMs if there is one." * may_be_aborted,
        ranges=[(r.tp.topic, r.tp.partition, r.start, r.end) for r in remaining],
        waited_ms=int(waited_s * 1000),
    )


def topic_missing(remaining: OffsetRange, servers: str, topics: Sequence[str]) -> TopicMissing:
    """Build the error for a partition that no longer exists, with all ``topics`` that lack partitions."""
    return TopicMissing(
        f"{remaining} was planned, but {remaining.tp} no longer exists at {servers}. Set failOnDataLoss=false to "
        "continue without its records: a planned batch has them also without the topic in the subscription",
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
    """Build the error for planned records that the log, now [low, high), does not have."""
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
    """Add to the error of a record that Spark cannot store how to read it, and the command that moves past it.

    The batch fails, so the records before this one are not written either, and the command skips them, too. After it,
    ``DeltaSink`` writes nothing of the batch that was planned before; for other sinks Spark runs that batch again.
    """
    topic, partition, offset = (str(error.fields[name]) for name in ("topic", "partition", "offset"))
    words = ("--topic", f"{topic}:{partition}", "--to-offset", str(int(offset) + 1), "--execute")
    command = command_line.spark_group("reset", connection, group_id, *words)
    return GroupError(
        f"{error}. To read it without its timestamp, leave timestamp out of the option columns. To skip it, with those "
        f"of {topic}-{partition} before it that are not written yet, stop the query, run this command (for a table of "
        "DeltaSink with --table) and start the query again; with another sink, start it with a new checkpoint:"
        f"{command_line.sequence([command])}",
        **error.fields,
    )
