"""The timestamp of the next record of a consumer: one small fetch per partition.

Runs in: the exporter. Deliberately absent: membership and commits (the consumer here is only assigned partitions), and
the contents of records. The library skips whatever lies between an offset and the next record, as for any consumer:
compacted offsets, records beyond retention, control records, aborted transactions.
"""

import logging
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException

from spark_group_source.kafka.environment import NEVER_JOINS, Environment
from spark_group_source.kafka.translation import to_kafka
from spark_group_source.model import TopicPartition

log = logging.getLogger(__name__)

PARTITIONS_MAX = 50
"""Partitions assigned at one time. A response contains at least one batch, however large, and batches of other
partitions only if they fit: with large batches one partition is read per request, and each request names all of
them."""
FETCH_BYTES = 64 * 1024
"""The fetch size per partition, and so about what a sweep reads of it (or one larger batch). With 16 KiB, partitions
with batches of 50 KB took 3 to 10 times as long, and partitions with small batches took no less."""
ANSWER_BYTES = PARTITIONS_MAX * FETCH_BYTES
"""The fetch size for all partitions of one request."""
SILENT_MS = 3_000
"""After this long without an answer the read ends: a partition without a leader must not extend every sweep to its
bound."""
POLL_S = 0.05
"""The longest poll while records arrive."""
MESSAGES_MAX = 10_000
"""Messages taken from the library in one call."""
NO_TIME = -1

_SETTINGS = {
    **NEVER_JOINS,
    "enable.auto.offset.store": "false",
    "enable.partition.eof": "true",  # the only sign that there is no record
    "auto.offset.reset": "earliest",  # for deleted offsets, the next record is the first one of the log
    "fetch.message.max.bytes": str(FETCH_BYTES),
    "fetch.max.bytes": str(ANSWER_BYTES),
    "message.max.bytes": "1000000",  # must not be larger than fetch.max.bytes
    "queued.min.messages": "30",  # with less, each fetch waits until the last one was consumed
    "fetch.wait.max.ms": "10",
    "fetch.error.backoff.ms": "50",
    "fetch.queue.backoff.ms": "1",
    "max.poll.interval.ms": "86400000",  # it is polled in sweeps only
}


class RecordTime(NamedTuple):
    """The next record of a consumer."""

    offset: int
    """At or after the requested offset."""
    timestamp_ms: int
    """Since the epoch, set by the producer or the broker; :data:`NO_TIME`: the record has none."""


class RecordTimes:
    """Reads the timestamps of next records, with a consumer of its own. One thread uses it.

    Args:
        settings: librdkafka settings of an admin client.
    """

    def __init__(self, settings: Mapping[str, str], *, isolation_level: str, environment: Environment) -> None:
        self._settings = {**settings, **_SETTINGS, "isolation.level": isolation_level}
        self._environment = environment
        self._consumer: Any = None

    def read(self, offsets: Mapping[TopicPartition, int], *, until_ms: int) -> dict[TopicPartition, RecordTime | None]:
        """Read the first record at or after each offset; None: there is none now. Unanswered partitions, and those
        whose log ends before the offset, are left out.

        Args:
            until_ms: when to stop waiting, on the environment's clock.
        """
        found: dict[TopicPartition, RecordTime | None] = {}
        waiting = iter(offsets.items())
        pending: set[TopicPartition] = set()
        silent_ms = self._environment.now_ms() + SILENT_MS
        try:
            self._add(islice(waiting, PARTITIONS_MAX), pending)
            while pending and self._environment.now_ms() < min(until_ms, silent_ms):
                if done := self._process(offsets, pending, found):
                    silent_ms = self._environment.now_ms() + SILENT_MS
                    self._consumer.incremental_unassign([to_kafka(tp) for tp in done])
                    self._add(islice(waiting, len(done)), pending)
            if pending:
                self._consumer.incremental_unassign([to_kafka(tp) for tp in pending])
        except (KafkaException, RuntimeError) as exc:
            log.warning("cannot read the timestamps of records; they have no age in this sweep: %s", exc)
            self.close()
        return found

    def close(self) -> None:
        """Close the connections; a later read reopens them."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()

    def _add(self, more: Iterable[tuple[TopicPartition, int]], pending: set[TopicPartition]) -> None:
        entries = dict(more)
        if not entries:
            return
        if self._consumer is None:
            self._consumer = self._environment.consumer(self._settings)
        self._consumer.incremental_assign([to_kafka(tp, offset) for tp, offset in entries.items()])
        pending.update(entries)

    def _process(
        self,
        offsets: Mapping[TopicPartition, int],
        pending: set[TopicPartition],
        found: dict[TopicPartition, RecordTime | None],
    ) -> list[TopicPartition]:
        """Process received messages. Returns the partitions that are done, answered or not."""
        first = self._consumer.poll(POLL_S)
        if first is None:
            return []
        done = []
        for message in (first, *self._consumer.consume(MESSAGES_MAX, 0)):
            tp = TopicPartition(message.topic() or "", message.partition())
            if tp not in pending:
                continue
            error = message.error()
            if error is None:
                if message.offset() >= offsets[tp]:
                    found[tp] = RecordTime(message.offset(), message.timestamp()[1])
            elif error.code() == KafkaError._PARTITION_EOF:
                found[tp] = None
            else:
                log.info("%s: cannot read the record at offset %d: %s", tp, offsets[tp], error.str())
            pending.discard(tp)
            done.append(tp)
        return done
