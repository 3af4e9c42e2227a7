"""Reads where a group is, with consumers that never join: its committed offsets, and the timestamps of the records.

Runs in: the stream reader's request thread, the exporter, the CLI. Deliberately absent: committing (``committer``), the
contents of records, and the admin client's request for committed offsets, which can abort the whole process while the
group's coordinator moves (librdkafka 2.16). A consumer that never subscribes sends the same request safely.

:class:`RecordTimes` sends one small fetch per partition. The library skips whatever lies between an offset and the next
record, as for any consumer: compacted offsets, records beyond retention, control records, aborted transactions.
"""

import contextlib
import logging
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException

from spark_group_source.error_codes import Meaning, Request, meaning
from spark_group_source.errors import CommitFailed
from spark_group_source.kafka.environment import NEVER_JOINS, Environment, coordinator_idle
from spark_group_source.kafka.retry import RefusalWatch, Retry
from spark_group_source.kafka.translation import ClientInfo, CommittedOffset, request_batches, to_kafka
from spark_group_source.model import TopicPartition

log = logging.getLogger(__name__)

READ_TIMEOUT_S = 10.0
"""The timeout of one read, including the search for the coordinator and the wait for open transactions."""
READ_BACK_S_MAX = 10.0
"""The longest wait until a committed offset is visible; the transaction marker takes milliseconds."""
READ_BACK_PAUSES_S = (0.005, 0.05)
"""The first and the longest pause between two reads of :meth:`GroupOffsets.wait_until_visible`."""


class GroupOffsets:
    """Reads one group's committed offsets. One thread uses it."""

    def __init__(self, settings: Mapping[str, str], *, group: str, environment: Environment) -> None:
        self._environment = environment
        self._refusal = RefusalWatch()
        own = {**coordinator_idle(settings), **NEVER_JOINS, "group.id": group, "error_cb": self._refusal}
        self._settings = {**settings, **own}
        self._retry = Retry(ClientInfo.of(settings, group=group), environment)
        self._consumers: dict[bool, Any] = {}  # by whether its reads are stable

    def read(
        self, tps: Iterable[TopicPartition], *, stable: bool = True, optional: Container[TopicPartition] = ()
    ) -> dict[TopicPartition, CommittedOffset | None]:
        """Read the committed offset of each partition; None where there is none. Unanswered partitions are left out.

        Args:
            stable: wait for the offsets of open transactions (KIP-447); else the old offset is returned.
            optional: partitions that are not needed: None where the user may not read their offsets.

        Raises:
            BrokerUnavailable: no answer within :data:`READ_TIMEOUT_S`; try again later.
            AccessDenied: the user may not read the group's offsets, refused twice.
        """
        batches = [[to_kafka(tp) for tp in batch] for batch in request_batches(tps)]
        return self._retry(
            Request.COMMITTED, "reading committed offsets", lambda: self._read(batches, stable, optional)
        )

    def _read(
        self, batches: list[list[Any]], stable: bool, optional: Container[TopicPartition]
    ) -> dict[TopicPartition, CommittedOffset | None]:
        """Read once. A transient error of one partition does not affect the others: a broker may not know a new
        partition yet, or its offset is part of an open transaction. After any other error new consumers are opened:
        they read the files of certificates again, which may have been replaced."""
        self._refusal.clear()
        try:
            return self._read_once(batches, stable, optional)
        except KafkaException as exc:
            self.serve()  # a refused login appears as a timeout
            self.close()
            if meaning(Request.COMMITTED, exc.args[0].code()) is Meaning.RETRY:
                self._refusal.check()
            raise

    def _read_once(
        self, batches: list[list[Any]], stable: bool, optional: Container[TopicPartition]
    ) -> dict[TopicPartition, CommittedOffset | None]:
        answered: dict[TopicPartition, CommittedOffset | None] = {}
        for answer in self._answers(batches, stable):
            tp = TopicPartition(answer.topic, answer.partition)
            what = Meaning.SUCCESS if answer.error is None else meaning(Request.COMMITTED, answer.error.code())
            if what is Meaning.SUCCESS:
                at = CommittedOffset(answer.offset, answer.metadata or "", answer.leader_epoch)
                answered[tp] = at if answer.offset >= 0 else None
            elif what is Meaning.REFUSED and tp in optional:
                answered[tp] = None
            elif what is not Meaning.RETRY:
                raise KafkaException(answer.error, answer.topic)
        return answered

    def _answers(self, batches: list[list[Any]], stable: bool) -> Iterator[Any]:
        deadline_ms = self._environment.now_ms() + READ_TIMEOUT_S * 1000
        for batch in batches:
            left_s = max(0, deadline_ms - self._environment.now_ms()) / 1000
            yield from self._consumer(stable).committed(batch, timeout=left_s)

    def wait_until_visible(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Wait until a read that is not stable returns these offsets; other consumers start at what such reads return.

        Raises:
            CommitFailed: they did not become visible in time, or another client committed other offsets since.
        """
        deadline_ms = self._environment.now_ms() + READ_BACK_S_MAX * 1000
        pause_s, pause_s_max = READ_BACK_PAUSES_S
        while True:
            seen = self.read(offsets, stable=False)
            late = [tp for tp, offset in offsets.items() if (at := seen.get(tp)) is None or at.offset != offset]
            if not late:
                return
            if self._environment.now_ms() > deadline_ms:
                tp = late[0]
                raise CommitFailed(f"{tp}: committed offset {offsets[tp]}, but a read returns {seen.get(tp)}")
            self._environment.pause(pause_s)
            pause_s = min(pause_s * 2, pause_s_max)

    def serve(self) -> None:
        """Handle what the library reports between reads; otherwise that takes more and more memory during an outage."""
        for consumer in self._consumers.values():
            with contextlib.suppress(KafkaException, RuntimeError):
                consumer.poll(0)

    def close(self) -> None:
        """Close the connections; a later read reopens them."""
        while self._consumers:
            with contextlib.suppress(KafkaException, RuntimeError):
                self._consumers.popitem()[1].close()

    def _consumer(self, stable: bool) -> Any:
        if stable not in self._consumers:
            level = "read_committed" if stable else "read_uncommitted"  # decides whether the read is stable
            settings = {**self._settings, "isolation.level": level}
            self._consumers[stable] = self._environment.consumer(settings)
        return self._consumers[stable]


# --- the timestamps of the next records -------------------------------------------------------------------------------

ASSIGNED_MAX = 50
"""Partitions assigned at one time. A response contains at least one batch, however large, and batches of other
partitions only if they fit: with large batches one partition is read per request, and each request names all of
them."""
FETCH_BYTES = 64 * 1024
"""The fetch size per partition, and so about what a sweep reads of it (or one larger batch). With 16 KiB, partitions
with batches of 50 KB took 3 to 10 times as long, and partitions with small batches took no less."""
ANSWER_BYTES = ASSIGNED_MAX * FETCH_BYTES
"""The fetch size for all partitions of one request."""
SILENT_MS = 3_000
"""After this long without an answer the read ends: a partition without a leader must not extend every sweep to its
bound."""
POLL_S = 0.05
"""The longest poll while records arrive."""
MESSAGES_MAX = 10_000
"""Messages taken from the library in one call."""
NO_TIME = -1

_RECORD_SETTINGS = {
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
        self._settings = {**settings, **_RECORD_SETTINGS, "isolation.level": isolation_level}
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
            self._add(islice(waiting, ASSIGNED_MAX), pending)
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
