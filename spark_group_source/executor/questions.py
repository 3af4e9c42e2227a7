"""Questions of the fast client about topics and logs, through librdkafka's admin calls on the consumer's own handle.

Runs in: executor workers. Deliberately absent: what an answer means (``answers``), and the older calls for the same:
``query_watermark_offsets`` sends two requests, and when one of them fails it may tell the other's offset for both.
"""

import ctypes as c
import time
from collections.abc import Sequence
from typing import Any

from spark_group_source.executor import rdkafka
from spark_group_source.executor.records import Bounds, Event, Told, TopicTold
from spark_group_source.model import TopicPartition

ANSWER_S_MAX = 5.0
"""One question, with the search for who can answer it. Who still wants to know asks again."""
_ANY_OPERATION = 0
_READ_UNCOMMITTED = 0
_EARLIEST, _LATEST = -2, -1
NO_ANSWER = -185
"""librdkafka's "timed out"."""
NO_ID = "A" * 22
"""The topic id of brokers before 2.8: zeros."""


class Questions:
    """The questions of one client. One thread."""

    def __init__(self, lib: rdkafka.Library, rk: int) -> None:
        self._lib, self._rk = lib, rk
        self._queue = lib.queue_new(rk)
        self._number = 0
        self._awaited: set[int] = set()
        self._arrived: dict[int, int] = {}
        self._about_topics = 0
        """The question about topics that is on its way; 0 for none."""

    def close(self) -> None:
        for event in self._arrived.values():
            self._lib.event_destroy(event)
        self._lib.queue_destroy(self._queue)

    # --- topics

    def ask_topics(self, names: Sequence[str]) -> None:
        """Send a question; a former one is given up. :meth:`topics_told` has the answer."""
        lib = self._lib
        self._give_up(self._about_topics)
        texts = (c.c_char_p * len(names))(*(name.encode() for name in names))
        topics = lib.TopicCollection_of_topic_names(texts, len(names))
        options, self._about_topics = self._options(ANSWER_S_MAX)
        lib.DescribeTopics(self._rk, topics, options, self._queue)
        lib.AdminOptions_destroy(options)
        lib.TopicCollection_destroy(topics)

    def topics_told(self, wait_s: float) -> Told | Event | None:
        """The answer; an event if there is none; None if it is not here yet, or nothing was asked."""
        found = self._answer(self._about_topics, time.monotonic() + wait_s)
        if found is None:
            return None
        self._about_topics = 0
        try:
            return self._failure(found) or self._topics(found)
        finally:
            self._lib.event_destroy(found)

    def _topics(self, event: int) -> Told:
        lib, count, partitions = self._lib, c.c_size_t(), c.c_size_t()
        told: Told = {}
        found = lib.DescribeTopics_result_topics(lib.event_DescribeTopics_result(event), c.byref(count))
        for topic in found[: count.value]:
            name = lib.TopicDescription_name(topic).decode()
            error = lib.TopicDescription_error(topic)
            code = lib.error_code(error) if error else 0
            text = (lib.error_string(error) or b"").decode(errors="replace") if error else ""
            lib.TopicDescription_partitions(topic, c.byref(partitions))
            id_ = lib.Uuid_base64str(lib.TopicDescription_topic_id(topic)).decode()
            told[name] = TopicTold(code, text, "" if code or id_ == NO_ID else id_, 0 if code else partitions.value)
        return told

    # --- logs

    def log_bounds(self, tp: TopicPartition, timeout_s: float) -> Bounds | Event:
        """What the partition's leader has."""
        until_s = time.monotonic() + timeout_s
        numbers = [self._ask_offset(tp, spec, timeout_s) for spec in (_EARLIEST, _LATEST)]
        low, high = (self._offset(number, tp, until_s) for number in numbers)
        self._give_up(*numbers)
        if isinstance(low, Event):
            return low
        return high if isinstance(high, Event) else Bounds(low[0], *high)

    def _ask_offset(self, tp: TopicPartition, spec: int, timeout_s: float) -> int:
        lib = self._lib
        partitions = lib.topic_partition_list_new(1)
        lib.topic_partition_list_add(partitions, tp.topic.encode(), tp.partition).contents.offset = spec
        options, number = self._options(timeout_s)
        error = lib.AdminOptions_set_isolation_level(options, _READ_UNCOMMITTED)
        if error:
            lib.error_destroy(error)
        lib.ListOffsets(self._rk, partitions, options, self._queue)
        lib.AdminOptions_destroy(options)
        lib.topic_partition_list_destroy(partitions)
        return number

    def _offset(self, number: int, tp: TopicPartition, until_s: float) -> tuple[int, int] | Event:
        """(offset, leader epoch)"""
        found = self._answer(number, until_s)
        if found is None:
            return Event(NO_ANSWER, "no answer in time", tp, -1)
        try:
            failure = self._failure(found)
            return failure._replace(tp=tp) if failure else self._first_offset(found, tp)
        finally:
            self._lib.event_destroy(found)

    def _first_offset(self, event: int, tp: TopicPartition) -> tuple[int, int] | Event:
        lib, count = self._lib, c.c_size_t()
        found = lib.ListOffsets_result_infos(lib.event_ListOffsets_result(event), c.byref(count))
        if count.value != 1:
            return Event(NO_ANSWER, "an answer without the partition", tp, -1)
        told = lib.ListOffsetsResultInfo_topic_partition(found[0])
        partition = told.contents
        if partition.err:
            return Event(partition.err, lib.err2str(partition.err).decode(), tp, -1)
        if partition.offset < 0:  # what librdkafka puts there before it asks
            return Event(NO_ANSWER, "an answer without an offset", tp, -1)
        return int(partition.offset), int(lib.topic_partition_get_leader_epoch(told))

    # --- both

    def _options(self, timeout_s: float) -> tuple[Any, int]:  # Any: a C pointer
        """The options of the next question, and its number."""
        lib, why = self._lib, c.create_string_buffer(128)
        options = lib.AdminOptions_new(self._rk, _ANY_OPERATION)
        lib.AdminOptions_set_request_timeout(options, max(1, round(timeout_s * 1000)), why, len(why))
        self._number += 1
        self._awaited.add(self._number)
        lib.AdminOptions_set_opaque(options, self._number)
        return options, self._number

    def _answer(self, number: int, until_s: float) -> int | None:
        """The answer with this number. Others that are waited for are kept, late ones dropped."""
        lib = self._lib
        while number and number not in self._arrived:
            found = lib.queue_poll(self._queue, max(0, round((until_s - time.monotonic()) * 1000)))
            if not found:
                return None
            told = lib.event_opaque(found)
            if told in self._awaited:
                self._arrived[told] = found
            else:
                lib.event_destroy(found)
        self._awaited.discard(number)
        return self._arrived.pop(number, None)

    def _give_up(self, *numbers: int) -> None:
        self._awaited.difference_update(numbers)
        for number in numbers:
            if number in self._arrived:
                self._lib.event_destroy(self._arrived.pop(number))

    def _failure(self, event: int) -> Event | None:
        code = self._lib.event_error(event)
        if not code:
            return None
        return Event(code, (self._lib.event_error_string(event) or b"").decode(errors="replace"), None, -1)
