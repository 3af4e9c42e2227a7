"""Reads explicit offset ranges from Kafka into Arrow batches.

Runs in: executor workers, inside ``read(partition)``. Deliberately absent: membership (the consumers here have assigned
partitions; they never subscribe or commit), planning, and anything of pyspark.

A worker process keeps one idle client for each set of settings, because connecting and fetching metadata take far
longer than a small range. A reader takes the client, assigns all its ranges at once, and returns it with nothing
assigned. After an error the client is closed instead, so that the task's retry starts with a new one.
"""

import atexit
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pyarrow as pa

from spark_group_source.model import OffsetRange, Piece
from spark_group_source.reader.native_client import NativeClient
from spark_group_source.reader.range_reader import RangeReader, ReadOptions
from spark_group_source.reader.read_counts import ReadCounts

log = logging.getLogger(__name__)

_FORCED_SETTINGS = {
    "group.protocol": "classic",
    "enable.auto.commit": "false",
    "enable.auto.offset.store": "false",
    "enable.partition.eof": "true",  # the only sign that no record follows in the last offsets of a range
    "auto.offset.reset": "error",  # an offset out of range must fail, and must not move the position
    # No group is polled here; a member's short interval could be below this client's session timeout.
    "max.poll.interval.ms": "86400000",
    "statistics.interval.ms": "0",
}
_DEFAULT_SETTINGS = {
    "group.id": "spark-group-source-reader",  # required by librdkafka; nothing is joined or committed
    "fetch.queue.backoff.ms": "5",  # the default of 1 s stalls a reader that has just emptied a full queue
    "fetch.wait.max.ms": "10",  # a fetch that waits at a log's end delays the next task's ranges by this
    "fetch.error.backoff.ms": "50",
    # As in Java's consumer: a corrupt byte must not become a row. Takes some 4% of the client's time.
    "check.crcs": "true",
    # The memory of a worker besides its batches: this queue, and one response (fetch.max.bytes) above it. Higher values
    # were not faster.
    "queued.min.messages": "30000",
    "queued.max.messages.kbytes": "32768",
    "topic.metadata.propagation.max.ms": "5000",
}


def read_ranges(piece: Piece, options: ReadOptions, counts: ReadCounts | None = None) -> Iterator[pa.RecordBatch]:
    """Yield every record of ``piece`` that is still in the log, once, in offset order per partition.

    Runs in: an executor worker. Nothing happens before the first ``next``. A generator that is closed early releases
    its client for reuse.

    Args:
        piece: [start, end) of different partitions, in any order.
        options: how to read.
        counts: counts what is read and skipped.

    Raises:
        DataLoss: planned offsets are no longer in the log, or were never written to the current log.
        TopicMissing: the topic or partition no longer exists.
        AccessDenied: credentials or permissions were refused; a retry alone cannot help.
        ReadTimeout: ``progress_timeout_s`` or ``outage_timeout_s`` passed; the message has the remaining ranges and the
            last error of the connection.
        GroupError: brokers refused a request for good, or Spark cannot store a record's timestamp.
        OptionError: librdkafka refuses a setting; the message has its name, never its value.
        SetupError: librdkafka cannot be used here.
    """
    counts = counts or ReadCounts()
    ranges = _non_empty(piece.ranges)
    if not ranges:
        counts.complete(options.group_id)
        return
    lease = _ClientLease(_ClientSettings(_settings(options.settings)))
    options = replace(options, outage_timeout_s=max(options.progress_timeout_s, options.outage_timeout_s))
    is_reusable = False
    try:
        yield from RangeReader(lease, piece._replace(ranges=ranges), options, counts).batches()
        is_reusable = True
        counts.complete(options.group_id)
    except GeneratorExit:
        is_reusable = True
        raise
    finally:
        lease.release(is_reusable=is_reusable)


def open_client(settings: Mapping[str, str], **defaults: str) -> NativeClient:
    """Open a reading client for the caller alone; it is not shared with tasks.

    Args:
        settings: as for :func:`read_ranges`.
        defaults: defaults that differ from those of tasks' clients, with ``_`` for each dot.

    Raises:
        OptionError: librdkafka refuses a setting.
        SetupError: librdkafka cannot be used here.
    """
    return NativeClient(_settings(settings, {name.replace("_", "."): value for name, value in defaults.items()}))


def _settings(given: Mapping[str, str], defaults: Mapping[str, str] | None = None) -> dict[str, str]:
    return {**_DEFAULT_SETTINGS, **(defaults or {}), **given, **_FORCED_SETTINGS}


def _non_empty(ranges: tuple[OffsetRange, ...]) -> tuple[OffsetRange, ...]:
    """The ranges that are not empty.

    Raises:
        ValueError: a range is invalid, or two are of one partition.
    """
    found = tuple(sorted(r for r in ranges if r.size))
    for r in found:
        if not 0 <= r.start <= r.end:
            raise ValueError(f"invalid range: {r}")
    if len({r.tp for r in found}) < len(found):  # a client can be assigned a partition only once
        raise ValueError(f"two ranges of one partition: {', '.join(map(str, found))}")
    return found


class _ClientSettings(dict[str, str]):
    """Settings as a key: readers with equal ones share a client. Has secrets, so its repr is empty."""

    def __hash__(self) -> int:  # type: ignore[override]  # it is never changed
        return hash(frozenset(self.items()))

    def __repr__(self) -> str:
        return "<settings>"


idle_clients: dict[_ClientSettings, NativeClient] = {}
"""Clients that no reader uses; at most one for each set of settings."""


def close_idle_clients() -> None:
    while idle_clients:
        idle_clients.popitem()[1].close()


atexit.register(close_idle_clients)
os.register_at_fork(after_in_child=idle_clients.clear)  # a forked child has none of their threads


class _ClientLease:
    """The client of one reader: an idle one, or a new one if there is none."""

    def __init__(self, settings: _ClientSettings) -> None:
        self._settings = settings
        self.client = idle_clients.pop(settings) if settings in idle_clients else NativeClient(settings)

    def renew(self) -> None:
        self.client.close()
        self.client = NativeClient(self._settings)

    def release(self, *, is_reusable: bool) -> None:
        """Keep the client as idle if it is reusable; close it otherwise."""
        try:
            self.client.clear()
        except RuntimeError:
            log.warning("cannot clear the assignment of the reading client; closing it", exc_info=True)
            is_reusable = False
        if is_reusable and self.client.rk is not None and self._settings not in idle_clients:
            idle_clients[self._settings] = self.client
        else:
            self.client.close()
