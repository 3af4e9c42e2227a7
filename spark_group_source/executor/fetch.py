"""Reads explicit offset ranges from Kafka into Arrow batches.

Runs in: executor workers, inside ``read(partition)``. Deliberately absent: membership (the consumers here are only
ever assigned, they never subscribe or commit), planning, and anything of pyspark.

One client is kept per worker process and settings, because a connection and its metadata cost far more than a small
range. A reader takes the client, assigns all its ranges at once, and gives it back with nothing assigned; a client
that met an error is closed instead, so that a task's retry starts with a fresh one. Two clients exist: ``rdkafka``
hands whole arrays from librdkafka to Arrow; ``_PlainClient`` goes through confluent_kafka's message objects, for
machines on which the first one's self-check fails.
"""

import atexit
import contextlib
import ctypes
import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from spark_group_source.errors import OptionError
from spark_group_source.executor import native, rdkafka
from spark_group_source.executor.ranges import METADATA_TIMEOUT_S, Client, RangeReader
from spark_group_source.executor.records import (
    Chunk,
    Cut,
    Event,
    Ints,
    Run,
    arrow_schema,
    assemble,
    header_column,
    packed,
    spark_ddl,
)
from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.options.client import is_secret

__all__ = ["arrow_schema", "read_ranges", "spark_ddl"]

log = logging.getLogger(__name__)

_FORCED = {
    "enable.auto.commit": "false",
    "enable.auto.offset.store": "false",
    "enable.partition.eof": "true",  # the only sign that a range's last offsets hold no record
    "auto.offset.reset": "error",  # a lost offset must surface, never move the position by itself
    "group.protocol": "classic",
    # Nothing is polled for a group here; a member's short interval would contradict this client's session timeout.
    "max.poll.interval.ms": "86400000",
    "statistics.interval.ms": "0",
}
_DEFAULTS = {
    "group.id": "spark-group-source-reader",  # asked for by librdkafka; nothing is ever joined or committed
    "fetch.queue.backoff.ms": "5",  # the default of 1 s stalls a reader that has just emptied a full queue
    "fetch.wait.max.ms": "10",  # a fetch left waiting at a log's end delays the next task's ranges by this
    "fetch.error.backoff.ms": "50",
    # What a worker holds besides its batches: this queue, and one response (fetch.max.bytes) above it. More of either
    # was not faster.
    "queued.min.messages": "30000",
    "queued.max.messages.kbytes": "32768",
    "topic.metadata.propagation.max.ms": "5000",
}


def read_ranges(
    settings: Mapping[str, str],
    ranges: Sequence[OffsetRange],
    *,
    include_headers: bool = False,
    fail_on_data_loss: bool = True,
    deadline_s: float = 120.0,
    path: str = "auto",
) -> Iterator[pa.RecordBatch]:
    """Yield every record of ``ranges`` that the log still holds, each once, in offset order per partition.

    Runs in: an executor worker. Nothing happens before the first ``next``; a generator that is dropped half way gives
    its client back clean.

    Args:
        settings: librdkafka's, with ``bootstrap.servers``, credentials and ``isolation.level``. What concerns
            membership, commits and offset reset is overruled.
        ranges: [start, end) each, in any order; several of one partition are read one after the other.
        fail_on_data_loss: False turns lost records into a warning and goes on with those that are left.
        deadline_s: seconds without any progress (a record, a position that moves) after which ReadTimeout is raised.
            Time that the consumer of the batches takes does not count.
        path: ``auto``, or ``fast`` or ``plain`` to insist on one client.

    Raises:
        DataLoss: planned offsets are gone, or were never written to the log that is there now.
        TopicMissing: the topic or partition does not exist any more.
        AccessDenied: credentials or permissions were refused; fix them, a retry alone cannot help.
        ReadTimeout: see ``deadline_s``; the message names the ranges left, and the last error of the connection.
        OptionError: librdkafka refuses a setting; the message has its name, never its value.
    """
    rounds = _rounds(ranges)
    if not rounds:
        return
    key = _ClientKey({**_DEFAULTS, **settings, **_FORCED}, path)
    client = _pool.take(key)
    clean = False
    try:
        for part in rounds:
            reader = RangeReader(client, part, settings.get("bootstrap.servers", ""), fail_on_data_loss, deadline_s)
            try:
                yield from reader.batches(include_headers)
            except GeneratorExit:
                clean = True
                raise
        clean = True
    finally:
        _pool.give_back(key, client, clean=clean)


def _rounds(ranges: Sequence[OffsetRange]) -> list[list[OffsetRange]]:
    """Spread ranges so that no round has a partition twice, because a client can be assigned it only once."""
    rounds: list[dict[TopicPartition, OffsetRange]] = []
    for r in sorted(ranges):
        if not 0 <= r.start <= r.end:
            raise ValueError(f"not a range: {r}")
        if r.size:
            free = next((one for one in rounds if r.tp not in one), None)
            if free is None:
                rounds.append(free := {})
            free[r.tp] = r
    return [list(one.values()) for one in rounds]


@dataclass(frozen=True, repr=False)
class _ClientKey:
    """What makes two readers share a client. Holds secrets, so it has no repr."""

    settings: dict[str, str]
    path: str

    def __hash__(self) -> int:
        return hash((frozenset(self.settings.items()), self.path))


class _Pool:
    """The clients that no reader uses: at most one for each settings, all made by this very process."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.idle: dict[_ClientKey, Client] = {}

    def take(self, key: _ClientKey) -> Client:
        """The kept client, or a new one: a second reader at the same time gets a client of its own."""
        self._forget_if_forked()
        return self.idle.pop(key, None) or _open(key)

    def give_back(self, key: _ClientKey, client: Client, *, clean: bool) -> None:
        """Keep a client that is clean, and close it otherwise."""
        self._forget_if_forked()
        if client.pid != self._pid:
            _leak(client)
            return
        try:
            client.clear()
        except Exception:
            log.warning("the reading client could not be reset; it is closed", exc_info=True)
            clean = False
        if clean and key not in self.idle:
            self.idle[key] = client
        else:
            client.close()

    def close(self) -> None:
        self._forget_if_forked()
        while self.idle:
            self.idle.popitem()[1].close()

    def _forget_if_forked(self) -> None:
        """The parent's clients have no threads in a forked child: closing one would wait for ever."""
        if self._pid != os.getpid():
            for client in self.idle.values():
                _leak(client)
            self.idle.clear()
            self._pid = os.getpid()


def _leak(client: Client) -> None:
    """Keep it from ever being collected, which would close it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


_pool = _Pool()
atexit.register(_pool.close)


def _open(key: _ClientKey) -> Client:
    if key.path != "plain":
        try:
            rdkafka.library()
        except (ImportError, OSError) as exc:
            if key.path == "fast":
                raise
            log.warning("reading without the fast client: %s", exc)
        else:
            try:
                return native.NativeClient(key.settings)
            except ValueError as exc:
                raise refused_setting(key.settings, str(exc)) from None  # the cause may hold a secret
    return _PlainClient(key.settings)


@dataclass(slots=True)
class _PlainChunk:
    """Message objects of confluent_kafka, which belong to Python: nothing to free."""

    messages: list[Any]
    runs: Sequence[Run]
    events: Sequence[Event]
    sizes: Ints

    @classmethod
    def of(cls, messages: list[Any], events: list[Event]) -> "_PlainChunk":
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

    def free(self) -> None:
        self.messages = []


class _Lines:
    """librdkafka's log. Nothing in it is above INFO here: what ends a read is told by the error that ends it."""

    def log(self, level: int, text: str, *parts: object) -> None:
        log.log(logging.INFO if level >= logging.WARNING else logging.DEBUG, text, *parts)


class _PlainClient:
    """Reads through confluent_kafka's public calls only. Slower, and right wherever that package works."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        import confluent_kafka

        self._kafka: Any = confluent_kafka  # Any: the package's type stubs leave out half of what is used here
        self._errors: list[Event] = []
        self._topics: set[str] = set()
        self.pid = os.getpid()
        try:
            self._consumer = confluent_kafka.Consumer({**settings, "error_cb": self._on_error, "logger": _Lines()})
        except (self._kafka.KafkaException, ValueError, TypeError) as exc:
            raise refused_setting(settings, str(exc)) from None  # the cause may hold a secret

    def _on_error(self, error: Any) -> None:
        self._errors.append(Event(error.code(), error.str(), None, -1))

    def _tps(self, positions: Iterable[tuple[TopicPartition, int]]) -> list[Any]:
        return [self._kafka.TopicPartition(tp.topic, tp.partition, offset) for tp, offset in positions]

    def assign(self, positions: Sequence[tuple[TopicPartition, int]]) -> None:
        self._consumer.assign(self._tps(positions))
        new = {tp.topic for tp, _ in positions} - self._topics
        self._topics |= new
        for topic in sorted(new):
            with contextlib.suppress(self._kafka.KafkaException):
                self._consumer.list_topics(topic, METADATA_TIMEOUT_S / len(new))

    def drop(self, tps: Sequence[TopicPartition]) -> None:
        self._consumer.incremental_unassign(self._tps((tp, -1001) for tp in tps))

    def move(self, tp: TopicPartition, offset: int) -> None:
        self.drop([tp])
        self._consumer.incremental_assign(self._tps([(tp, offset)]))

    def poll(self, rows_max: int, wait_s: float) -> Chunk:
        messages = self._consumer.consume(rows_max, wait_s)
        events, self._errors = self._errors, []
        return _PlainChunk.of(messages, events)

    def positions(self, tps: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        found = self._consumer.position(self._tps((tp, -1001) for tp in tps))
        return {TopicPartition(p.topic, p.partition): p.offset for p in found}

    def watermarks(self, tp: TopicPartition, timeout_s: float) -> tuple[int, int] | Event:
        try:
            found = self._consumer.get_watermark_offsets(self._tps([(tp, -1001)])[0], timeout=timeout_s)
        except self._kafka.KafkaException as exc:
            return Event(exc.args[0].code(), exc.args[0].str(), tp, -1)
        return found if found is not None else Event(-185, "no answer in time", tp, -1)

    def known_end(self, tp: TopicPartition) -> int:
        found = self._consumer.get_watermark_offsets(self._tps([(tp, -1001)])[0], cached=True)
        return max(-1, found[1]) if found else -1

    def clear(self) -> None:
        self._consumer.unassign()

    def close(self) -> None:
        self._consumer.close()


def refused_setting(settings: Mapping[str, str], text: str) -> OptionError:
    """What librdkafka said about the settings, with every value that could be a secret taken out."""
    for name, value in settings.items():
        if value and is_secret(name):
            text = text.replace(value, "***")
    names = sorted(name for name in settings if f'"{name}"' in text)
    return OptionError(f"the Kafka client refuses its settings: {text}", names=names)
