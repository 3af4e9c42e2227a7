"""Checks of a reading task against brokers: topic ids, the bounds of logs, and how long brokers are waited for.

Runs in: executor workers. Deliberately absent: what follows from a check (``range_reader``), and resending of requests
(``requests``).

Kafka gives every topic a new id, even if a topic of the same name existed before (KIP-516). librdkafka follows the
name: if a topic is deleted and recreated, it continues with the new one at the same offsets and does not report it. Ids
are never reused. So one check after the last rows that finds the planned id proves that all rows are of the planned
topic; a check before the first rows avoids reading most of the others at all.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from spark_group_source.error_codes import Meaning, Request, meaning
from spark_group_source.model import TopicPartition
from spark_group_source.reader.native_client import NativeClient
from spark_group_source.reader.records import ClientEvent, TopicDescription, TopicDescriptions, Watermarks
from spark_group_source.reader.requests import PendingRequest


@dataclass(frozen=True, slots=True)
class TopicUnchecked:
    """Brokers have not reported the topic yet."""


@dataclass(frozen=True, slots=True)
class TopicCheckFailed:
    """Brokers reported an error: a temporary one, or a refusal."""

    code: int
    text: str


@dataclass(frozen=True, slots=True)
class TopicPlanned:
    """The topic has the planned id, or is not compared."""

    partitions: int
    """The number of its partitions."""


@dataclass(frozen=True, slots=True)
class TopicRecreated:
    """The topic has another id than the planned one: it was deleted and recreated."""


@dataclass(frozen=True, slots=True)
class TopicGone:
    """The topic does not exist."""


TopicCheck: TypeAlias = TopicUnchecked | TopicCheckFailed | TopicPlanned | TopicRecreated | TopicGone


class TopicChecks:
    """The checks of one reader's topics; one request at a time.

    Args:
        planned_ids: topic ids in the plan; a topic without one is not compared.
    """

    def __init__(self, planned_ids: Mapping[str, str]) -> None:
        self._planned_ids = {name: id_ for name, id_ in planned_ids.items() if id_}
        self._checks: dict[str, tuple[TopicCheck, float]] = {}
        """The last check of each topic, and when its request was sent; monotonic seconds."""
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

    def receive(self, wait_s: float) -> Mapping[str, TopicCheck] | ClientEvent | None:
        """Return the checks of the requested topics, within ``wait_s``.

        Returns:
            An error if a request failed; it is still pending then. None without a response or an open request.
        """
        received = self._request.receive(wait_s) if self._request is not None else None
        if received is None:
            return None
        topics, sent_s = received
        if isinstance(topics, ClientEvent):
            return topics
        self._request = None
        checks = {name: self._compared(name, topic) for name, topic in topics.items()}
        self._checks.update({name: (check, sent_s) for name, check in checks.items()})
        return checks

    def check(self, name: str, since_s: float) -> TopicCheck:
        """Return the last check of a topic, if it was requested at ``since_s`` or later."""
        check, sent_s = self._checks.get(name, (TopicUnchecked(), since_s))
        return check if sent_s >= since_s else TopicUnchecked()

    def _compared(self, name: str, topic: TopicDescription) -> TopicCheck:
        match meaning(Request.TOPICS, topic.code):
            case Meaning.SUCCESS:
                # Brokers before 2.8 have no ids: nothing is compared.
                is_other = topic.id and topic.id != self._planned_ids.get(name, topic.id)
                return TopicRecreated() if is_other else TopicPlanned(topic.partitions)
            case Meaning.GONE:
                return TopicGone()
        return TopicCheckFailed(topic.code, topic.text)


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
        """When the first request without a response was sent; None while brokers respond."""

    def note_progress(self, now_s: float) -> None:
        """Note that a record came or a position moved."""
        self._progress_s, self._outage_s = now_s, None

    def note_request(self, sent_s: float, now_s: float, *, is_answered: bool) -> None:
        """Note that a request has a response, or none although it was waited for."""
        if not is_answered:
            self._outage_s = sent_s if self._outage_s is None else self._outage_s
        elif self._outage_s is not None:
            self._progress_s += now_s - self._outage_s
            self._outage_s = None

    def remaining_s(self, now_s: float) -> float:
        """The time until the reader gives up; 0 or less: now."""
        if self._outage_s is None:
            return self._progress_s + self._progress_timeout_s - now_s
        return self._outage_s + self._outage_timeout_s - now_s

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
        if self._watermarks is not None:
            self._watermarks.cancel()
