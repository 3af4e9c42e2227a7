"""Questions of a reading task about topics and logs, each repeated until a broker answers it.

Runs in: executor workers and agents. Deliberately absent: what an answer means (``answers``), and
``query_watermark_offsets``, which sends two requests and may report one offset for both when one of them fails.

librdkafka sends a question to the broker that it knows as the controller, or as the leader, and may not find out for
minutes that this broker is dead. So an overdue question is sent again, after a metadata request to any broker; the
former request stays open, because its broker may only be slow. The first answer to any of them counts.
"""

import ctypes as c
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from spark_group_source.librdkafka import POLL_MS, Client, text
from spark_group_source.model import TopicPartition
from spark_group_source.reader.records import Event, Told, TopicTold

ANSWER_S_MAX = 5.0
"""One request, with the search for the broker that can answer it."""
OVERDUE_S = 1.0
"""A question without an answer is sent again after so long. Each request ends after :data:`ANSWER_S_MAX`, so at most
six are open at a time."""
METADATA_TIMEOUT_S = 1.0
"""How long a metadata request is waited for: when topics are new to the client, and before a question is repeated."""

_READ_UNCOMMITTED = 0
EARLIEST, LATEST = -2, -1
"""Offsets of a log to ask for."""
NO_ANSWER = -185
"""librdkafka's "timed out"."""
NO_ID = "A" * 22
"""The topic id of brokers before 2.8: zeros."""

T = TypeVar("T")


class Requests:
    """The open admin requests of one client, by number, and the answers that came."""

    def __init__(self, client: Client) -> None:
        self._client, self._lib = client, client.lib
        self._queue = client.lib.queue_new(client.rk)
        self._number = 0
        self._open: dict[int, int | None] = {}  # each with its answer, an event of librdkafka's

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
        lib, options = self._lib, self._client.admin_options(ANSWER_S_MAX)
        if isolation is not None and (error := lib.AdminOptions_set_isolation_level(options, isolation)):
            lib.error_destroy(error)
        self._number += 1
        lib.AdminOptions_set_opaque(options, self._number)
        call(self._client.rk, what, options, self._queue)
        lib.AdminOptions_destroy(options)
        self._open[self._number] = None
        return self._number

    def receive(self, wait_s: float) -> None:
        """Take in the answers that came; the first of them is waited for, and the client is served meanwhile."""
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
            else:  # its question was given up
                self._lib.event_destroy(event)
            event = self._lib.queue_poll(self._queue, 0)

    def answers(self, numbers: Sequence[int]) -> list[int] | None:
        """The answers to these requests; None while one is missing. They belong to this class."""
        found = [event for number in numbers if (event := self._open[number])]
        return found if len(found) == len(numbers) else None

    def give_up(self, numbers: Sequence[int]) -> None:
        """Drop these requests, with their answers."""
        for number in numbers:
            if event := self._open.pop(number, None):
                self._lib.event_destroy(event)

    def forget(self) -> None:
        """Drop all requests."""
        self.give_up(list(self._open))

    def close(self) -> None:
        self.forget()
        self._lib.queue_destroy(self._queue)

    # --- what answers hold

    def failure(self, event: int) -> Event | None:
        """The error of a whole answer."""
        code = self._lib.event_error(event)
        return Event(code, text(self._lib.event_error_string(event)), None, -1) if code else None

    def topics_in(self, event: int) -> Told:
        lib, count, partitions = self._lib, c.c_size_t(), c.c_size_t()
        told: Told = {}
        found = lib.DescribeTopics_result_topics(lib.event_DescribeTopics_result(event), c.byref(count))
        for topic in found[: count.value]:
            error = lib.TopicDescription_error(topic)
            code, words = (lib.error_code(error), text(lib.error_string(error))) if error else (0, "")
            lib.TopicDescription_partitions(topic, c.byref(partitions))
            id_ = text(lib.Uuid_base64str(lib.TopicDescription_topic_id(topic)))
            name = text(lib.TopicDescription_name(topic))
            told[name] = TopicTold(code, words, "" if code or id_ == NO_ID else id_, 0 if code else partitions.value)
        return told

    def offset_in(self, event: int, tp: TopicPartition) -> tuple[int, int] | Event:
        """(offset, leader epoch)"""
        lib, count = self._lib, c.c_size_t()
        found = lib.ListOffsets_result_infos(lib.event_ListOffsets_result(event), c.byref(count))
        if count.value != 1:
            return Event(NO_ANSWER, "an answer without the partition", tp, -1)
        info = lib.ListOffsetsResultInfo_topic_partition(found[0])
        partition = info.contents
        if partition.err:
            return Event(partition.err, text(lib.err2str(partition.err)), tp, -1)
        if partition.offset < 0:  # what librdkafka puts there before it asks
            return Event(NO_ANSWER, "an answer without an offset", tp, -1)
        return int(partition.offset), int(lib.topic_partition_get_leader_epoch(info))


class PendingRequest(Generic[T]):
    """One question from now on. One thread.

    Args:
        requests: of the client.
        send: sends its requests, and returns their numbers.
        read: the answer that their events hold; an event where one of them failed.
        look_for_brokers: requests metadata from any broker, before the question is sent again.
    """

    def __init__(
        self,
        requests: Requests,
        send: Callable[[], tuple[int, ...]],
        read: Callable[[list[int]], "T | Event"],
        look_for_brokers: Callable[[], None],
    ) -> None:
        self._requests, self._send, self._read = requests, send, read
        self._look_for_brokers = look_for_brokers
        self._sent: dict[tuple[int, ...], float] = {}  # request numbers -> when they were sent
        self._due_s = 0.0
        self._again()

    def take(self, wait_s: float) -> tuple[T | Event, float] | None:
        """An answer and when its request was sent; an event where a request failed, and the question goes on; None if
        none came within ``wait_s``."""
        until_s = time.monotonic() + wait_s
        pause_s = 0.0
        while True:
            self._requests.receive(pause_s)
            for numbers, sent_s in self._sent.items():
                if events := self._requests.answers(numbers):
                    return self._answer(numbers, events), sent_s
            if time.monotonic() >= self._due_s:
                self._look_for_brokers()
                self._again()
            elif time.monotonic() >= until_s:
                return None
            pause_s = max(0.0, min(until_s, self._due_s) - time.monotonic())

    def _answer(self, numbers: tuple[int, ...], events: list[int]) -> T | Event:
        failed = [failure for event in events if (failure := self._requests.failure(event))]
        answer = failed[0] if failed else self._read(events)
        if isinstance(answer, Event):
            del self._sent[numbers]
            self._requests.give_up(numbers)
        else:
            self.give_up()
        return answer

    def _again(self) -> None:
        self._due_s = time.monotonic() + OVERDUE_S
        self._sent[self._send()] = self._due_s - OVERDUE_S

    def give_up(self) -> None:
        """No answer is wanted any more."""
        for numbers in self._sent:
            self._requests.give_up(numbers)
        self._sent = {}
