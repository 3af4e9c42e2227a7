"""Admin requests of a reading task about topics and logs, each resent until a broker responds.

Runs in: executor workers and agents. Deliberately absent: the meaning of error codes (``error_codes``), and
``query_watermark_offsets``, which sends two requests and may report one offset for both if one of them fails.

librdkafka sends a request to the broker that it knows as the controller or the leader, and may not notice for minutes
that this broker is dead. So an overdue request is resent, after a metadata request to any broker. The earlier request
stays open, because its broker may only be slow; the first response counts.
"""

import ctypes as c
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from spark_group_source.librdkafka import POLL_MS, Client, text
from spark_group_source.model import TopicPartition
from spark_group_source.reader.records import ClientEvent, TopicDescription, TopicDescriptions

REQUEST_TIMEOUT_S = 5.0
"""The timeout of one request, with the search for the broker that can serve it."""
RESEND_AFTER_S = 1.0
"""A request without a response is resent after this time. Each one times out after :data:`REQUEST_TIMEOUT_S`, so at
most six are open at a time."""
METADATA_TIMEOUT_S = 1.0
"""The timeout of a metadata request: for topics that are new to the client, and before a request is resent."""

_READ_UNCOMMITTED = 0
EARLIEST, LATEST = -2, -1
"""Offset specifications of ListOffsets."""
TIMED_OUT = -185
"""librdkafka's ``_TIMED_OUT``."""
NO_ID = "A" * 22
"""The topic id of brokers before 2.8: zeros."""

T = TypeVar("T")


class AdminRequests:
    """The open admin requests of one client, by number, with the responses received so far."""

    def __init__(self, client: Client) -> None:
        self._client, self._lib = client, client.lib
        self._queue = client.lib.queue_new(client.rk)
        self._number = 0
        self._open: dict[int, int | None] = {}
        """The response to each request, an event of librdkafka; None until it arrives."""

    def describe_topics(self, names: Sequence[str]) -> int:
        lib = self._lib
        texts = (c.c_char_p * len(names))(*(name.encode() for name in names))
        topics = lib.TopicCollection_of_topic_names(texts, len(names))
        number = self._send(lib.DescribeTopics, topics)
        lib.TopicCollection_destroy(topics)
        return number

    def list_offset(self, tp: TopicPartition, spec: int) -> int:
        partitions = self._client.partitions([(tp, spec)])
        number = self._send(self._lib.ListOffsets, partitions, isolation=_READ_UNCOMMITTED)
        self._lib.topic_partition_list_destroy(partitions)
        return number

    def _send(self, call: Callable[..., None], what: object, *, isolation: int | None = None) -> int:
        lib, options = self._lib, self._client.admin_options(REQUEST_TIMEOUT_S)
        if isolation is not None and (error := lib.AdminOptions_set_isolation_level(options, isolation)):
            lib.error_destroy(error)
        self._number += 1
        lib.AdminOptions_set_opaque(options, self._number)
        call(self._client.rk, what, options, self._queue)
        lib.AdminOptions_destroy(options)
        self._open[self._number] = None
        return self._number

    def receive(self, wait_s: float) -> None:
        """Receive responses. Waits for the first one up to ``wait_s``, and serves the client in the meantime."""
        until_s = time.monotonic() + wait_s
        event = None
        while not event:
            self._client.serve()
            left_ms = max(0, round((until_s - time.monotonic()) * 1000))
            event = self._lib.queue_poll(self._queue, min(left_ms, POLL_MS))
            if left_ms <= POLL_MS:
                break
        while event:
            number = self._lib.event_opaque(event)
            if number in self._open:
                self._open[number] = event
            else:  # the request was cancelled
                self._lib.event_destroy(event)
            event = self._lib.queue_poll(self._queue, 0)

    def responses(self, numbers: Sequence[int]) -> list[int] | None:
        """The responses to these requests; None while one is missing. This class destroys them."""
        found = [event for number in numbers if (event := self._open[number])]
        return found if len(found) == len(numbers) else None

    def cancel(self, numbers: Sequence[int]) -> None:
        """Drop these requests and their responses."""
        for number in numbers:
            if event := self._open.pop(number, None):
                self._lib.event_destroy(event)

    def cancel_all(self) -> None:
        self.cancel(list(self._open))

    def close(self) -> None:
        self.cancel_all()
        self._lib.queue_destroy(self._queue)

    # --- parsing of responses

    def error_of(self, event: int) -> ClientEvent | None:
        """The error of a whole response, or None."""
        code = self._lib.event_error(event)
        return ClientEvent(code, text(self._lib.event_error_string(event)), None, -1) if code else None

    def topics_of(self, event: int) -> TopicDescriptions:
        lib, count, partitions = self._lib, c.c_size_t(), c.c_size_t()
        topics: TopicDescriptions = {}
        found = lib.DescribeTopics_result_topics(lib.event_DescribeTopics_result(event), c.byref(count))
        for topic in found[: count.value]:
            error = lib.TopicDescription_error(topic)
            code, words = (lib.error_code(error), text(lib.error_string(error))) if error else (0, "")
            lib.TopicDescription_partitions(topic, c.byref(partitions))
            id_ = text(lib.Uuid_base64str(lib.TopicDescription_topic_id(topic)))
            name = text(lib.TopicDescription_name(topic))
            id_ = "" if code or id_ == NO_ID else id_
            topics[name] = TopicDescription(code, words, id_, 0 if code else partitions.value)
        return topics

    def offset_of(self, event: int, tp: TopicPartition) -> tuple[int, int] | ClientEvent:
        """Return (offset, leader epoch), or the error."""
        lib, count = self._lib, c.c_size_t()
        found = lib.ListOffsets_result_infos(lib.event_ListOffsets_result(event), c.byref(count))
        if count.value != 1:
            return ClientEvent(TIMED_OUT, "the response lacks the partition", tp, -1)
        info = lib.ListOffsetsResultInfo_topic_partition(found[0])
        partition = info.contents
        if partition.err:
            return ClientEvent(partition.err, text(lib.err2str(partition.err)), tp, -1)
        if partition.offset < 0:  # librdkafka's initial value
            return ClientEvent(TIMED_OUT, "the response lacks the offset", tp, -1)
        return int(partition.offset), int(lib.topic_partition_get_leader_epoch(info))


class PendingRequest(Generic[T]):
    """A request that is resent until it has a response; sent when it is created. One thread.

    Args:
        requests: the client's admin requests.
        send: sends the admin requests that make up this one, and returns their numbers.
        parse: returns the result in their responses, or the error of one of them.
        refresh_metadata: requests metadata from any broker, before the request is resent.
    """

    def __init__(
        self,
        requests: AdminRequests,
        send: Callable[[], tuple[int, ...]],
        parse: Callable[[list[int]], "T | ClientEvent"],
        refresh_metadata: Callable[[], None],
    ) -> None:
        self._requests, self._send, self._parse = requests, send, parse
        self._refresh_metadata = refresh_metadata
        self._sent: dict[tuple[int, ...], float] = {}
        """When each group of request numbers was sent; monotonic seconds."""
        self._resend_s = 0.0
        self._send_again()

    def receive(self, wait_s: float) -> tuple[T | ClientEvent, float] | None:
        """Return a result and when its request was sent, within ``wait_s``.

        Returns:
            An error in place of the result if a request failed; this one is still pending then. None if there is no
            response yet.
        """
        until_s = time.monotonic() + wait_s
        pause_s = 0.0
        while True:
            self._requests.receive(pause_s)
            for numbers, sent_s in self._sent.items():
                if events := self._requests.responses(numbers):
                    return self._result(numbers, events), sent_s
            if time.monotonic() >= self._resend_s:
                self._refresh_metadata()
                self._send_again()
            elif time.monotonic() >= until_s:
                return None
            pause_s = max(0.0, min(until_s, self._resend_s) - time.monotonic())

    def _result(self, numbers: tuple[int, ...], events: list[int]) -> T | ClientEvent:
        errors = [error for event in events if (error := self._requests.error_of(event))]
        result = errors[0] if errors else self._parse(events)
        if isinstance(result, ClientEvent):
            del self._sent[numbers]
            self._requests.cancel(numbers)
        else:
            self.cancel()
        return result

    def _send_again(self) -> None:
        self._resend_s = time.monotonic() + RESEND_AFTER_S
        self._sent[self._send()] = self._resend_s - RESEND_AFTER_S

    def cancel(self) -> None:
        """Drop the request."""
        for numbers in self._sent:
            self._requests.cancel(numbers)
        self._sent = {}
