"""When the record was made that a consumer would get next: one small fetch a partition.

Runs in: the exporter. Deliberately absent: membership and commits (the consumer here is only ever assigned), and what
a record holds. Whatever lies between an offset and the next record that a consumer gets is passed over by the library
as for any consumer: compacted offsets, records that retention took, control records and aborted transactions.
"""

import logging
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException

from spark_group_source.kafka.environment import Environment
from spark_group_source.kafka.settings import NEVER_JOINS
from spark_group_source.kafka.translation import to_kafka
from spark_group_source.model import TopicPartition

log = logging.getLogger(__name__)

AT_ONCE = 50
"""Partitions that are assigned at one time. A broker answers with one batch at least, however large, and with batches
of other partitions only if they fit: of larger ones one comes with each answer, and each names all of them."""
FETCH_BYTES = 64 * 1024
"""What is asked for of each partition, and so about what a sweep takes of it, or one larger batch. With 16 KiB
partitions with batches of 50 KB took 3 to 10 times as long, and those with small ones no less."""
ANSWER_BYTES = AT_ONCE * FETCH_BYTES
"""The same of all partitions at one time."""
SILENT_MS = 3_000
"""When nothing came for so long the rest is not waited for: a partition whose leader is away must not make every sweep
as long as it may be."""
POLL_S = 0.05
MESSAGES_MAX = 10_000
"""Taken from the library at one time."""
NO_TIME = -1

_SETTINGS = {
    **NEVER_JOINS,
    "enable.auto.offset.store": "false",
    "enable.partition.eof": "true",  # the only sign that a consumer gets nothing
    "auto.offset.reset": "earliest",  # of offsets that are gone: the first record still there is the next one
    "fetch.message.max.bytes": str(FETCH_BYTES),
    "fetch.max.bytes": str(ANSWER_BYTES),
    "message.max.bytes": "1000000",  # the library refuses a larger one than fetch.max.bytes
    "queued.min.messages": "30",  # less and every answer waits until the one before was looked at
    "fetch.wait.max.ms": "10",
    "fetch.error.backoff.ms": "50",
    "fetch.queue.backoff.ms": "1",
    "max.poll.interval.ms": "86400000",  # polled in sweeps only
}


class RecordTime(NamedTuple):
    """The next record that a consumer gets."""

    offset: int
    timestamp_ms: int
    """Since the epoch, as its producer or its broker said; :data:`NO_TIME`: the record has none."""


class RecordTimes:
    """Reads them with a consumer of its own. One thread uses it.

    Args:
        settings: librdkafka settings of an admin client.
        isolation_level: of the consumers that are meant.
        environment: clock and clients.
    """

    def __init__(self, settings: Mapping[str, str], *, isolation_level: str, environment: Environment) -> None:
        self._settings = {**settings, **_SETTINGS, "isolation.level": isolation_level}
        self._environment = environment
        self._consumer: Any = None

    def read(self, offsets: Mapping[TopicPartition, int], *, until_ms: int) -> dict[TopicPartition, RecordTime | None]:
        """The first record at or after each offset; None where a consumer gets none now. Partitions without an answer,
        and those of a log that ends before the offset, are left out.

        Args:
            until_ms: no answer is waited for beyond this moment of the environment's clock.
        """
        found: dict[TopicPartition, RecordTime | None] = {}
        waiting = iter(offsets.items())
        asked: set[TopicPartition] = set()
        silent_ms = self._environment.now_ms() + SILENT_MS
        try:
            self._add(islice(waiting, AT_ONCE), asked)
            while asked and self._environment.now_ms() < min(until_ms, silent_ms):
                if done := self._take(offsets, asked, found):
                    silent_ms = self._environment.now_ms() + SILENT_MS
                    self._consumer.incremental_unassign([to_kafka(tp) for tp in done])
                    self._add(islice(waiting, len(done)), asked)
            if asked:
                self._consumer.incremental_unassign([to_kafka(tp) for tp in asked])
        except (KafkaException, RuntimeError) as exc:
            log.warning("times of records could not be read: %s", exc)
            self.close()
        return found

    def close(self) -> None:
        """Close the connections; a later read opens them again."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()

    def _add(self, more: Iterable[tuple[TopicPartition, int]], asked: set[TopicPartition]) -> None:
        entries = dict(more)
        if not entries:
            return
        if self._consumer is None:
            self._consumer = self._environment.consumer(self._settings)
        self._consumer.incremental_assign([to_kafka(tp, offset) for tp, offset in entries.items()])
        asked.update(entries)

    def _take(
        self,
        offsets: Mapping[TopicPartition, int],
        asked: set[TopicPartition],
        found: dict[TopicPartition, RecordTime | None],
    ) -> list[TopicPartition]:
        """Look at what came; returns the partitions that need no more looking, answered or not."""
        first = self._consumer.poll(POLL_S)
        if first is None:
            return []
        done = []
        for message in (first, *self._consumer.consume(MESSAGES_MAX, 0)):
            tp = TopicPartition(message.topic() or "", message.partition())
            if tp not in asked:
                continue
            error = message.error()
            if error is None:
                if message.offset() >= offsets[tp]:
                    found[tp] = RecordTime(message.offset(), message.timestamp()[1])
            elif error.code() == KafkaError._PARTITION_EOF:
                found[tp] = None
            else:
                log.info("%s: no record was read at %d: %s", tp, offsets[tp], error.str())
            asked.discard(tp)
            done.append(tp)
        return done
