"""Questions of the fast client about topics and logs, through librdkafka's admin calls on the consumer's own handle.

Runs in: executor workers. Deliberately absent: what an answer means (``answers``), and the older calls for the same:
``query_watermark_offsets`` sends two requests, and when one of them fails it may tell the other's offset for both.
"""

import ctypes as c
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from spark_group_source.executor import rdkafka
from spark_group_source.executor.client import ANSWER_S_MAX
from spark_group_source.executor.records import Bounds, Event, Told, TopicTold
from spark_group_source.model import TopicPartition

_ANY_OPERATION = 0
_READ_UNCOMMITTED = 0
_EARLIEST, _LATEST = -2, -1
NO_ANSWER = -185
"""librdkafka's "timed out"."""
NO_ID = "A" * 22
"""The topic id of brokers before 2.8: zeros."""


@dataclass
class _Asked:
    """One question: the requests that it takes, what came of each, and how the answers are read."""

    events: dict[int, int | None]
    read: Callable[[list[int]], Told | Bounds | Event]


class Questions:
    """The questions of one client, each with a number. One thread."""

    def __init__(self, lib: rdkafka.Library, rk: int) -> None:
        self._lib, self._rk = lib, rk
        self._queue = lib.queue_new(rk)
        self._number = 0
        self._asked: dict[int, _Asked] = {}
        self._part_of: dict[int, int] = {}
        """Request -> question."""

    def forget(self) -> None:
        """Give up all."""
        self.give_up(list(self._asked))

    def close(self) -> None:
        self.forget()
        self._lib.queue_destroy(self._queue)

    def answer(self, numbers: Collection[int], wait_s: float) -> tuple[int, Told | Bounds | Event] | None:
        """The first of these questions that is answered; an event where it failed; None if that takes longer."""
        until_s = time.monotonic() + wait_s
        while True:
            for number in numbers:
                if None not in self._asked[number].events.values():
                    return number, self._read(number)
            left_ms = round((until_s - time.monotonic()) * 1000)
            event = self._lib.queue_poll(self._queue, max(0, left_ms))
            if not event:
                return None
            part = self._lib.event_opaque(event)
            if part in self._part_of:
                self._asked[self._part_of[part]].events[part] = event
            else:  # nobody wants it any more
                self._lib.event_destroy(event)

    def give_up(self, numbers: Collection[int]) -> None:
        for number in numbers:
            for part, event in self._asked.pop(number).events.items():
                del self._part_of[part]
                if event:
                    self._lib.event_destroy(event)

    def _read(self, number: int) -> Told | Bounds | Event:
        asked = self._asked[number]
        events = [event for event in asked.events.values() if event]
        try:
            failed = [failure for event in events if (failure := self._failure(event))]
            return failed[0] if failed else asked.read(events)
        finally:
            self.give_up([number])

    def _awaited(self, parts: Sequence[int], read: Callable[[list[int]], Told | Bounds | Event]) -> int:
        number = parts[0]
        self._asked[number] = _Asked(dict.fromkeys(parts), read)
        self._part_of.update(dict.fromkeys(parts, number))
        return number

    # --- topics

    def ask_topics(self, names: Sequence[str]) -> int:
        lib = self._lib
        texts = (c.c_char_p * len(names))(*(name.encode() for name in names))
        topics = lib.TopicCollection_of_topic_names(texts, len(names))
        options, part = self._options()
        lib.DescribeTopics(self._rk, topics, options, self._queue)
        lib.AdminOptions_destroy(options)
        lib.TopicCollection_destroy(topics)
        return self._awaited([part], self._topics)

    def _topics(self, events: list[int]) -> Told:
        lib, count, partitions = self._lib, c.c_size_t(), c.c_size_t()
        told: Told = {}
        found = lib.DescribeTopics_result_topics(lib.event_DescribeTopics_result(events[0]), c.byref(count))
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

    def ask_bounds(self, tp: TopicPartition) -> int:
        """Two requests, because one has room for one offset of a partition."""
        parts = [self._ask_offset(tp, spec) for spec in (_EARLIEST, _LATEST)]
        return self._awaited(parts, partial(self._bounds, tp))

    def _ask_offset(self, tp: TopicPartition, spec: int) -> int:
        lib = self._lib
        partitions = lib.topic_partition_list_new(1)
        lib.topic_partition_list_add(partitions, tp.topic.encode(), tp.partition).contents.offset = spec
        options, part = self._options()
        error = lib.AdminOptions_set_isolation_level(options, _READ_UNCOMMITTED)
        if error:
            lib.error_destroy(error)
        lib.ListOffsets(self._rk, partitions, options, self._queue)
        lib.AdminOptions_destroy(options)
        lib.topic_partition_list_destroy(partitions)
        return part

    def _bounds(self, tp: TopicPartition, events: list[int]) -> Bounds | Event:
        low, high = (self._offset(event, tp) for event in events)
        if isinstance(low, Event):
            return low
        return high if isinstance(high, Event) else Bounds(low[0], *high)

    def _offset(self, event: int, tp: TopicPartition) -> tuple[int, int] | Event:
        """(offset, leader epoch)"""
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

    def _options(self) -> tuple[Any, int]:  # Any: a C pointer
        """The options of the next request, and its number."""
        lib, why = self._lib, c.create_string_buffer(128)
        options = lib.AdminOptions_new(self._rk, _ANY_OPERATION)
        lib.AdminOptions_set_request_timeout(options, round(ANSWER_S_MAX * 1000), why, len(why))
        self._number += 1
        lib.AdminOptions_set_opaque(options, self._number)
        return options, self._number

    def _failure(self, event: int) -> Event | None:
        code = self._lib.event_error(event)
        if not code:
            return None
        return Event(code, (self._lib.event_error_string(event) or b"").decode(errors="replace"), None, -1)
