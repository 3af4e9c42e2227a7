"""The plain client: confluent_kafka's message objects, for machines on which the fast one's self-check fails.

Runs in: executor workers. Deliberately absent: decisions about ranges (``ranges``), and speed.
"""

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from spark_group_source.errors import OptionError
from spark_group_source.executor.client import ANSWER_S_MAX, METADATA_TIMEOUT_S
from spark_group_source.executor.questions import NO_ANSWER, NO_ID
from spark_group_source.executor.records import (
    Bounds,
    Chunk,
    Cut,
    Event,
    Ints,
    Run,
    Told,
    TopicTold,
    assemble,
    header_bytes,
    header_column,
    packed,
)
from spark_group_source.model import TopicPartition
from spark_group_source.options.client import without_secrets

_Futures = Mapping[str, "Future[Any]"]


@dataclass(slots=True)
class PlainChunk:
    """Message objects of confluent_kafka, which belong to Python: nothing to free."""

    messages: list[Any]
    runs: Sequence[Run]
    events: Sequence[Event]
    sizes: Ints

    @classmethod
    def of(cls, messages: list[Any], events: list[Event]) -> "PlainChunk":
        rows = []
        for m in messages:
            error = m.error()
            if error is None:
                rows.append(m)
            else:
                tp = TopicPartition(m.topic(), m.partition()) if m.topic() and m.partition() >= 0 else None
                offset = m.offset()
                events.append(Event(error.code(), error.str(), tp, -1 if offset is None else offset))
        runs: list[Run] = []
        first = 0
        for (topic, partition), group in itertools.groupby(rows, lambda m: (m.topic(), m.partition())):
            offsets = np.array([m.offset() for m in group], dtype=np.int64)
            runs.append(Run(TopicPartition(topic, partition), first, offsets))
            first += len(offsets)
        sizes = np.array([len(m.key() or b"") + len(m.value() or b"") for m in rows], dtype=np.int64)
        return cls(rows, runs, events, sizes)

    def batch(self, cuts: Sequence[Cut], include_headers: bool) -> pa.RecordBatch:
        rows = [m for cut in cuts for m in self.messages[cut.first : cut.last]]
        stamps = np.array([m.timestamp() for m in rows], dtype=np.int64).reshape(-1, 2)
        return assemble(
            cuts,
            packed([m.key() for m in rows], pa.binary()),
            packed([m.value() for m in rows], pa.binary()),
            np.array([m.offset() for m in rows], dtype=np.int64),
            stamps[:, 1],
            stamps[:, 0].astype(np.int32),
            header_column([m.headers() or () for m in rows]) if include_headers else None,
        )

    def leader_epoch(self, row: int) -> int:
        epoch = self.messages[row].leader_epoch()
        return -1 if epoch is None else int(epoch)

    def count_headers(self) -> None:
        self.sizes = self.sizes + header_bytes([m.headers() or () for m in self.messages])

    def free(self) -> None:
        self.messages = []


class PlainClient:
    """Reads through confluent_kafka's public calls only. Slower, and right wherever that package works."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        import confluent_kafka

        from spark_group_source.kafka.runtime import made

        self._kafka: Any = confluent_kafka  # Any: the package's type stubs leave out half of what is used here
        self._errors: list[Event] = []
        self._topics: set[str] = set()
        self._settings = dict(settings)
        self._asking: Any = None
        self._number = 0
        self._asked: dict[int, tuple[_Futures, Callable[[_Futures], Told | Bounds | Event]]] = {}
        self.pid = os.getpid()
        try:
            self._consumer = made(confluent_kafka.Consumer, {**settings, "error_cb": self._on_error})
        except (self._kafka.KafkaException, ValueError, TypeError) as exc:
            raise refused_setting(settings, str(exc)) from None  # the cause may hold a secret

    def _on_error(self, error: Any) -> None:
        self._errors.append(Event(error.code(), error.str(), None, -1))

    def _tps(self, positions: Iterable[tuple[TopicPartition, int]]) -> list[Any]:
        return [self._kafka.TopicPartition(tp.topic, tp.partition, offset) for tp, offset in positions]

    def assign(self, positions: Sequence[tuple[TopicPartition, int]]) -> None:
        self._consumer.assign(self._tps(positions))
        self._look_for_leaders(positions)

    def add(self, positions: Sequence[tuple[TopicPartition, int]]) -> None:
        self._consumer.incremental_assign(self._tps(positions))
        self._look_for_leaders(positions)

    def _look_for_leaders(self, positions: Sequence[tuple[TopicPartition, int]]) -> None:
        new = {tp.topic for tp, _ in positions} - self._topics
        self._topics |= new
        for topic in sorted(new):
            with contextlib.suppress(self._kafka.KafkaException):
                self._consumer.list_topics(topic, METADATA_TIMEOUT_S / len(new))

    def drop(self, tps: Sequence[TopicPartition]) -> None:
        self._consumer.incremental_unassign(self._tps((tp, -1001) for tp in tps))

    def move(self, tp: TopicPartition, offset: int) -> None:
        self.drop([tp])
        self.add([(tp, offset)])

    def poll(self, rows_max: int, wait_s: float) -> Chunk:
        messages = self._consumer.consume(rows_max, wait_s)
        events, self._errors = self._errors, []
        return PlainChunk.of(messages, events)

    def positions(self, tps: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        found = self._consumer.position(self._tps((tp, -1001) for tp in tps))
        return {TopicPartition(p.topic, p.partition): p.offset for p in found}

    def ask_topics(self, names: Sequence[str]) -> int:
        wanted = self._kafka.TopicCollection(list(names))
        return self._awaited(self._admin().describe_topics(wanted, request_timeout=ANSWER_S_MAX), self._told_of_topics)

    def ask_bounds(self, tp: TopicPartition) -> int:
        from confluent_kafka import admin

        spec: Any = admin.OffsetSpec  # type: ignore[attr-defined]  # the stubs do not know its kinds
        partition = self._tps([(tp, -1001)])[0]
        asked = {
            bound: self._admin().list_offsets(
                {partition: wanted},
                isolation_level=self._kafka.IsolationLevel.READ_UNCOMMITTED,
                request_timeout=ANSWER_S_MAX,
            )[partition]
            for bound, wanted in (("low", spec.earliest()), ("high", spec.latest()))
        }
        return self._awaited(asked, partial(self._told_of_log, tp))

    def _awaited(self, futures: Mapping[str, Future[Any]], read: Callable[[_Futures], Told | Bounds | Event]) -> int:
        self._number += 1
        self._asked[self._number] = dict(futures), read
        return self._number

    def answer(self, numbers: Collection[int], wait_s: float) -> tuple[int, Told | Bounds | Event] | None:
        until_s = time.monotonic() + wait_s
        while True:
            open_ = [future for number in numbers for future in self._asked[number][0].values() if not future.done()]
            for number in numbers:
                futures, read = self._asked[number]
                if all(future.done() for future in futures.values()):
                    del self._asked[number]
                    return number, read(futures)
            if not wait(open_, max(0.0, until_s - time.monotonic()), FIRST_COMPLETED).done:
                return None

    def give_up(self, numbers: Collection[int]) -> None:
        for number in numbers:
            del self._asked[number]

    def _told_of_topics(self, futures: _Futures) -> Told | Event:
        told: Told = {}
        for name, future in futures.items():
            try:
                topic = future.result()
            except self._kafka.KafkaException as exc:
                error = exc.args[0]
                if error.code() < -1:
                    return Event(error.code(), error.str(), None, -1)
                told[name] = TopicTold(error.code(), error.str(), "", 0)
            else:
                id_ = str(topic.topic_id)
                told[name] = TopicTold(0, "", "" if id_ == NO_ID else id_, len(topic.partitions))
        return told

    def _told_of_log(self, tp: TopicPartition, futures: _Futures) -> Bounds | Event:
        try:
            low, high = (futures[bound].result() for bound in ("low", "high"))
        except self._kafka.KafkaException as exc:
            return Event(exc.args[0].code(), exc.args[0].str(), tp, -1)
        if min(low.offset, high.offset) < 0:
            return Event(NO_ANSWER, "an answer without an offset", tp, -1)
        return Bounds(int(low.offset), int(high.offset), -1 if high.leader_epoch is None else int(high.leader_epoch))

    def look_for_brokers(self) -> None:
        with contextlib.suppress(self._kafka.KafkaException):
            self._admin().list_topics(timeout=METADATA_TIMEOUT_S)

    def _admin(self) -> Any:  # Any: see above
        """An admin client of its own: the package makes none from a consumer. Only who has a question pays for it."""
        if self._asking is None:
            from confluent_kafka.admin import AdminClient

            from spark_group_source.kafka.runtime import made

            # As an admin client it knows settings that it does not use; it says so in its log.
            self._asking = made(AdminClient, self._settings)
        return self._asking

    def clear(self) -> None:
        self._asked = {}
        self._consumer.unassign()

    def close(self) -> None:
        self._asked, self._asking = {}, None
        self._consumer.close()


def refused_setting(settings: Mapping[str, str], text: str) -> OptionError:
    """What librdkafka said about the settings, with every value that could be a secret taken out."""
    text = without_secrets(text, settings)
    names = sorted(name for name in settings if f'"{name}"' in text)
    return OptionError(f"the Kafka client refuses its settings: {text}", names=names)
