"""Reads explicit offset ranges from Kafka into Arrow batches.

Runs in: executor workers, inside ``read(partition)``. Deliberately absent: membership (the consumers here are only
ever assigned, they never subscribe or commit), planning, and anything of pyspark.

One client is kept per worker process and settings, because a connection and its metadata cost far more than a small
range. A reader takes the client, assigns all its ranges at once, and gives it back with nothing assigned; a client
that met an error is closed instead, so that a task's retry starts with a fresh one. Two clients exist: ``rdkafka``
hands whole arrays from librdkafka to Arrow; ``plain`` goes through confluent_kafka's message objects, for
machines on which the first one's self-check fails.
"""

import atexit
import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from spark_group_source.errors import BrokerUnavailable
from spark_group_source.executor import native, rdkafka
from spark_group_source.executor.client import Client
from spark_group_source.executor.plain import PlainClient, refused_setting
from spark_group_source.executor.ranges import RangeReader
from spark_group_source.executor.records import arrow_schema, spark_ddl
from spark_group_source.executor.tally import Tally
from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.options.callables import needs_python
from spark_group_source.options.client import principal

__all__ = ["arrow_schema", "read_ranges", "spark_ddl"]

log = logging.getLogger(__name__)

MAKE_PAUSE_S = 1.0
"""Between two tries to make a client that got no token. The library has waited ten seconds for that in each."""

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
    # As Java's consumer does. A byte that changed on its way must not become a row; costs some 4% of the client's time.
    "check.crcs": "true",
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
    topic_ids: Mapping[str, str] | None = None,
    leader_epochs: Mapping[TopicPartition, int] | None = None,
    include_headers: bool = False,
    fail_on_data_loss: bool = True,
    deadline_s: float = 120.0,
    silence_s: float = 0.0,
    path: str = "auto",
    tally: Tally | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield every record of ``ranges`` that the log still holds, each once, in offset order per partition.

    Runs in: an executor worker. Nothing happens before the first ``next``; a generator that is dropped half way gives
    its client back clean.

    Args:
        settings: librdkafka's, with ``bootstrap.servers``, credentials and ``isolation.level``. What concerns
            membership, commits and offset reset is overruled.
        ranges: [start, end) each, in any order; several of one partition are read one after the other.
        topic_ids: which topics of these names were planned (KIP-516). A topic that was made anew since is not read: all
            that is left of its ranges is lost.
        leader_epochs: of the leaders that told the ends of the ranges (KIP-320). Records of later leaders below these
            ends are not the planned ones, and not read: the log was cut before them.
        fail_on_data_loss: False turns lost records into a warning and goes on with those that are left.
        deadline_s: seconds without any progress (a record, a position that moves) after which ReadTimeout is raised.
            Time that the consumer of the batches takes does not count.
        silence_s: seconds without an answer of the brokers, or without a token, that are waited for; never less than
            ``deadline_s``.
        tally: counts what is read and skipped.
        path: ``auto``, or ``fast`` or ``plain`` to insist on one client.

    Raises:
        DataLoss: planned offsets are gone, or were never written to the log that is there now.
        TopicMissing: the topic or partition does not exist any more.
        AccessDenied: credentials or permissions were refused; fix them, a retry alone cannot help.
        ReadTimeout: see ``deadline_s`` and ``silence_s``; the message names the ranges left, and the last error of the
            connection.
        BrokerUnavailable: the function for tokens gave none, for as long.
        OptionError: librdkafka refuses a setting; the message has its name, never its value.
    """
    tally = tally or Tally()
    rounds = _rounds(ranges)
    if not rounds:
        tally.end()
        return
    silence_s = max(deadline_s, silence_s)
    lease = _Lease(_ClientKey({**_DEFAULTS, **settings, **_FORCED}, path), silence_s)
    clean = False
    try:
        for part in rounds:
            reader = RangeReader(
                lease,
                part,
                settings.get("bootstrap.servers", ""),
                user=principal(settings),
                topic_ids=topic_ids or {},
                leader_epochs=leader_epochs or {},
                tally=tally,
                fail_on_data_loss=fail_on_data_loss,
                deadline_s=deadline_s,
                silence_s=silence_s,
            )
            try:
                yield from reader.batches(include_headers)
            except GeneratorExit:
                clean = True
                raise
        clean = True
        tally.end()
    finally:
        lease.give_back(clean=clean)


def open_client(settings: Mapping[str, str], **others: str) -> Client:
    """A reading client that belongs to the caller; not one of those that tasks share.

    Args:
        settings: as for :func:`read_ranges`.
        others: what this client has in another way than tasks' do, with ``_`` for each dot.

    Raises:
        OptionError: librdkafka refuses a setting.
        BrokerUnavailable: the function for tokens gave none.
    """
    own = {name.replace("_", "."): value for name, value in others.items()}
    return _open(_ClientKey({**_DEFAULTS, **own, **settings, **_FORCED}, "auto"))


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


class _Lease:
    """The client of one reader, from the pool and back to it. ``silence_s``: of tries to make one, which a function
    for tokens can make fail."""

    def __init__(self, key: _ClientKey, silence_s: float) -> None:
        self._key, self._silence_s = key, silence_s
        self.client = self._made(lambda: _pool.take(key))

    def renew(self) -> None:
        self.client.close()
        self.client = self._made(lambda: _open(self._key))

    def _made(self, make: Callable[[], Client]) -> Client:
        until = time.monotonic() + self._silence_s
        while True:
            try:
                return make()
            except BrokerUnavailable as exc:
                if time.monotonic() >= until:
                    raise
                log.info("%s; trying again", exc)
                threading.Event().wait(MAKE_PAUSE_S)

    def give_back(self, *, clean: bool) -> None:
        _pool.give_back(self._key, self.client, clean=clean)


def _leak(client: Client) -> None:
    """Keep it from ever being collected, which would close it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


_pool = _Pool()
atexit.register(_pool.close)


def _open(key: _ClientKey) -> Client:
    if key.path != "plain" and not needs_python(key.settings):
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
    return PlainClient(key.settings)
