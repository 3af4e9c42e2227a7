"""Reads explicit offset ranges from Kafka into Arrow batches.

Runs in: executor workers, inside ``read(partition)``. Deliberately absent: membership (the consumers here are only
ever assigned, they never subscribe or commit), planning, and anything of pyspark.

One client is kept per worker process and settings, because a connection and its metadata cost far more than a small
range. A reader takes the client, assigns all its ranges at once, and gives it back with nothing assigned; a client
that met an error is closed instead, so that a task's retry starts with a fresh one.
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
from spark_group_source.reader.read_counts import Tally

log = logging.getLogger(__name__)

_FORCED = {
    "group.protocol": "classic",
    "enable.auto.commit": "false",
    "enable.auto.offset.store": "false",
    "enable.partition.eof": "true",  # the only sign that a range's last offsets hold no record
    "auto.offset.reset": "error",  # a lost offset must surface, never move the position by itself
    # Nothing is polled for a group here; a member's short interval would contradict this client's session timeout.
    "max.poll.interval.ms": "86400000",
    "statistics.interval.ms": "0",
}
_DEFAULTS = {
    "group.id": "spark-group-source-reader",  # demanded by librdkafka; nothing is ever joined or committed
    "fetch.queue.backoff.ms": "5",  # the default of 1 s stalls a reader that has just emptied a full queue
    "fetch.wait.max.ms": "10",  # a fetch left waiting at a log's end delays the next task's ranges by this
    "fetch.error.backoff.ms": "50",
    # As Java's consumer does. A byte that changed on its way must not become a row; costs some 4% of the client's time.
    "check.crcs": "true",
    # What a worker holds besides its batches: this queue, and one response (fetch.max.bytes) above it. More of either
    # was not faster.
    "queued.min.messages": "30000",
    "queued.max.messages.kbytes": "32768",
    "topic.metadata.propagation.max.ms": "5000",
}


def read_ranges(piece: Piece, options: ReadOptions, tally: Tally | None = None) -> Iterator[pa.RecordBatch]:
    """Yield every record of ``piece`` that the log still holds, each once, in offset order per partition.

    Runs in: an executor worker. Nothing happens before the first ``next``; a generator that is dropped half way gives
    its client back clean.

    Args:
        piece: [start, end) of different partitions, in any order.
        options: how.
        tally: counts what is read and skipped.

    Raises:
        DataLoss: planned offsets are gone, or were never written to the log that is there now.
        TopicMissing: the topic or partition does not exist any more.
        AccessDenied: credentials or permissions were refused; fix them, a retry alone cannot help.
        ReadTimeout: see ``deadline_s`` and ``silence_s``; the message names the ranges left, and the last error of the
            connection.
        OptionError: librdkafka refuses a setting; the message has its name, never its value.
        SetupError: librdkafka cannot be used here.
    """
    tally = tally or Tally()
    ranges = _checked(piece.ranges)
    if not ranges:
        tally.end()
        return
    lease = _Lease(_Settings(_settings(options.settings)))
    options = replace(options, silence_s=max(options.deadline_s, options.silence_s))
    clean = False
    try:
        yield from RangeReader(lease, piece._replace(ranges=ranges), options, tally).batches()
        clean = True
        tally.end()
    except GeneratorExit:
        clean = True
        raise
    finally:
        lease.give_back(clean=clean)


def open_client(settings: Mapping[str, str], **others: str) -> NativeClient:
    """A reading client that belongs to the caller; not one of those that tasks share.

    Args:
        settings: as for :func:`read_ranges`.
        others: what this client has in another way than tasks' do, with ``_`` for each dot.

    Raises:
        OptionError: librdkafka refuses a setting.
        SetupError: librdkafka cannot be used here.
    """
    return NativeClient(_settings(settings, {name.replace("_", "."): value for name, value in others.items()}))


def _settings(given: Mapping[str, str], own: Mapping[str, str] | None = None) -> dict[str, str]:
    return {**_DEFAULTS, **(own or {}), **given, **_FORCED}


def _checked(ranges: tuple[OffsetRange, ...]) -> tuple[OffsetRange, ...]:
    """Those that are not empty."""
    wanted = tuple(sorted(r for r in ranges if r.size))
    for r in wanted:
        if not 0 <= r.start <= r.end:
            raise ValueError(f"not a range: {r}")
    if len({r.tp for r in wanted}) < len(wanted):  # a client can be assigned a partition only once
        raise ValueError(f"two ranges of one partition: {', '.join(map(str, wanted))}")
    return wanted


class _Settings(dict[str, str]):
    """What makes two readers share a client. Holds secrets, so its repr is empty."""

    def __hash__(self) -> int:  # type: ignore[override]  # nothing changes it
        return hash(frozenset(self.items()))

    def __repr__(self) -> str:
        return "<settings>"


idle: dict[_Settings, NativeClient] = {}
"""The clients that no reader uses: at most one for each settings."""


def close_idle() -> None:
    """Close the clients that are kept."""
    while idle:
        idle.popitem()[1].close()


atexit.register(close_idle)
os.register_at_fork(after_in_child=idle.clear)  # they have no threads in a child


class _Lease:
    """The client of one reader, from those that are kept and back to them. A second reader at the same time gets a
    client of its own."""

    def __init__(self, settings: _Settings) -> None:
        self._settings = settings
        self.client = idle.pop(settings) if settings in idle else NativeClient(settings)

    def renew(self) -> None:
        self.client.close()
        self.client = NativeClient(self._settings)

    def give_back(self, *, clean: bool) -> None:
        """Keep a client that is clean, and close it otherwise."""
        try:
            self.client.clear()
        except RuntimeError:
            log.warning("the reading client could not be reset; it is closed", exc_info=True)
            clean = False
        if clean and self.client.rk is not None and self._settings not in idle:
            idle[self._settings] = self.client
        else:
            self.client.close()
