"""Reads offset ranges from Kafka into Arrow batches: when a range is finished, what was lost, which client is used.

Runs in: executor workers, inside ``read(partition)``. Deliberately absent: membership (the consumers here have assigned
partitions; they never subscribe or commit), fetching records (``native_client``), selecting the planned ones
(``records``), what brokers report (``broker_checks``), planning, the report to the stream reader (``agents.task``), and
anything of pyspark.

A worker process keeps one idle client for each set of settings, because connecting and fetching metadata take far
longer than a small range. A reader takes the client, assigns all its ranges at once, and returns it with nothing
assigned. After an error the client is closed instead, so that the task's retry starts with a new one.

A range is finished when a record at or above its end was fetched, when the position reached the end (transaction
markers and compaction move it without a record), or at the end of the log. The reader never waits for a record at the
offset before the end, which may not exist.

A broker must confirm that the topic is the planned one (``broker_checks``). Records are fetched and handed over while
requests are pending. Nothing counts as lost because of the client's own view alone: see ``error_codes``.
"""

import atexit
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

import pyarrow as pa

from spark_group_source import command_line
from spark_group_source.error_codes import CODES, Meaning, Request, Suspicions, meaning
from spark_group_source.errors import GroupError
from spark_group_source.model import OffsetRange, Piece, TaskCounts, TopicPartition
from spark_group_source.options.client import principal
from spark_group_source.options.table import COLUMNS
from spark_group_source.reader import broker_checks
from spark_group_source.reader.broker_checks import RangeCheck, ReadDeadline, RequestFailures, TopicCheck, TopicChecks
from spark_group_source.reader.native_client import NativeChunk, NativeClient
from spark_group_source.reader.records import (
    DAMAGED,
    EOF,
    ClientEvent,
    NewerRecord,
    RecordSize,
    RowSlice,
    TopicDescription,
    TopicDescriptions,
    Watermarks,
    group_by_batch,
    select_rows,
)

log = logging.getLogger(__name__)

LINGER_S = 0.02
"""How long one poll gathers records before it returns them; short enough for a task of a few records."""
CHECK_AFTER_S = 1.0
"""A range without progress for this long is checked, and again after each further such time."""
TOPIC_CHECK_VALID_S = 0.1
"""How long after its request a topic check still covers rows that arrive, also those of the worker's next task. This is
too short for a topic to be deleted, recreated and filled to the planned offsets, and for librdkafka to find the new
one. A second request would wait behind a fetch at the log's end, and a small task would take twice as long."""
TOPIC_REQUEST_PAUSE_S = 0.2
"""The pause between two requests about topics while rows wait for the response."""

OUT_OF_RANGE = frozenset({CODES["_AUTO_OFFSET_RESET"], CODES["OFFSET_OUT_OF_RANGE"]})
"""librdkafka stopped fetching a partition because the broker has no such offset. A range check verifies it."""
RANGES_IN_WARNING_MAX = 100
_pause = threading.Event()  # never set: waiting for it sleeps

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


@dataclass(frozen=True, repr=False)
class ReadOptions:
    """How a task reads. Has secrets, so it has no repr.

    Args:
        settings: librdkafka's, with ``bootstrap.servers``, credentials and ``isolation.level``. Settings of membership,
            commits and offset reset are overridden.
        columns: the columns of the batches.
        fail_on_data_loss: False logs lost records as a warning and continues with the remaining ones.
        progress_timeout_s: seconds without progress (a record, a position that moves) after which ReadTimeout is
            raised, while brokers respond. Time that the consumer of the batches takes does not count.
        outage_timeout_s: seconds without a response of the brokers, or without a token, after which ReadTimeout is
            raised; never less than ``progress_timeout_s``.
    """

    settings: Mapping[str, str]
    columns: Sequence[str] = COLUMNS[:-1]
    fail_on_data_loss: bool = True
    progress_timeout_s: float = 120.0
    outage_timeout_s: float = 0.0

    @property
    def servers(self) -> str:
        return self.settings.get("bootstrap.servers", "")

    @property
    def group_id(self) -> str:
        """The query's group, for log lines; the client does not join it. Empty if it is not set."""
        return self.settings.get("group.id", "")


class SkippedRange(NamedTuple):
    """Planned offsets that were skipped, and the reason."""

    range: OffsetRange
    reason: str


class ReadCounts:
    """Counts what one task attempt reads and skips, for :class:`TaskCounts`."""

    def __init__(self) -> None:
        self.rows_from_memory: Counter[TopicPartition] = Counter()
        self.rows_from_brokers: Counter[TopicPartition] = Counter()
        self.bytes: Counter[str] = Counter()
        self._skipped: list[SkippedRange] = []
        self._is_complete = False

    def skip(self, tp: TopicPartition, start: int, end: int, reason: str) -> None:
        """Count [start, end) as lost. An offset is at most one record; compaction and transaction markers leave
        offsets without one."""
        if start < end:
            self._skipped.append(SkippedRange(OffsetRange(tp, start, end), reason))

    def complete(self, group_id: str) -> None:
        """Note that every planned offset was read or skipped, and log one warning with the skipped ranges."""
        self._is_complete = True
        if not (merged := self.merged()):
            return
        named = [f"{one.range} ({one.range.size}): {one.reason}" for one in merged[:RANGES_IN_WARNING_MAX]]
        more = len(merged) - len(named)
        log.warning(
            "group %s: data loss: skipped %d planned offsets because failOnDataLoss is false: %s%s",
            group_id,
            sum(one.range.size for one in merged),
            "; ".join(named),
            f"; and {more} more ranges" if more else "",
        )

    @property
    def reported(self) -> TaskCounts:
        """What the task reports."""
        skipped = tuple(one.range for one in self.merged()) if self._is_complete else ()
        return TaskCounts(
            rows_from_memory=self.rows_from_memory,
            rows_from_brokers=self.rows_from_brokers,
            skipped=skipped,
            bytes=self.bytes,
        )

    def merged(self) -> list[SkippedRange]:
        """The skipped ranges in order; adjacent ones with the same reason are merged."""
        found: list[SkippedRange] = []
        for one in sorted(self._skipped):
            last = found[-1].range if found else None
            if last and (last.tp, last.end) == (one.range.tp, one.range.start) and found[-1].reason == one.reason:
                found[-1] = SkippedRange(OffsetRange(last.tp, last.start, one.range.end), one.reason)
            else:
                found.append(one)
        return found


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
    lease = ClientLease(_ClientSettings(_settings(options.settings)))
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


def _non_empty(ranges: tuple[OffsetRange, ...]) -> tuple[OffsetRange, ...]:
    """The ranges that are not empty. Raises ValueError if one is invalid, or two are of one partition."""
    found = tuple(sorted(r for r in ranges if r.size))
    for r in found:
        if not 0 <= r.start <= r.end:
            raise ValueError(f"invalid range: {r}")
    if len({r.tp for r in found}) < len(found):  # a client can be assigned a partition only once
        raise ValueError(f"two ranges of one partition: {', '.join(map(str, found))}")
    return found


# --- clients ----------------------------------------------------------------------------------------------------------


def open_client(settings: Mapping[str, str]) -> NativeClient:
    """Open a reading client for the caller alone; it is not shared with tasks.

    Args:
        settings: as for :func:`read_ranges`.

    Raises:
        OptionError: librdkafka refuses a setting.
        SetupError: librdkafka cannot be used here.
    """
    return NativeClient(_settings(settings))


def _settings(given: Mapping[str, str]) -> dict[str, str]:
    return {**_DEFAULT_SETTINGS, **given, **_FORCED_SETTINGS}


class _ClientSettings(dict[str, str]):
    """Settings as a key: readers with equal ones share a client. Has secrets, so its repr is empty."""

    def __hash__(self) -> int:  # type: ignore[override]  # it is never changed
        return hash(frozenset(self.items()))

    def __repr__(self) -> str:
        return "<settings>"


IDLE_CLIENTS_MAX = 4
"""Clients that a worker keeps for later tasks. Each has four threads or more, and up to 20 MiB after large records; a
worker that is reused runs tasks of many queries, each with its own settings."""

IDLE_S_MAX = 60.0
"""How long they are kept without a use: during an outage the library reports lost connections again and again, and
keeps each report until the client is used. Checked when a reader begins; Spark ends a worker without tasks after a
minute."""

idle_clients: dict[_ClientSettings, NativeClient] = {}
"""Clients that no reader uses, at most one for each set of settings; the one that was used last is the last."""


def close_idle_clients() -> None:
    """Close the clients that no reader uses. A later reader opens a new one."""
    while idle_clients:
        idle_clients.popitem()[1].close()


atexit.register(close_idle_clients)
os.register_at_fork(after_in_child=idle_clients.clear)  # a forked child has none of their threads


class ClientLease:
    """A client that one reader uses exclusively: an idle one, or a new one if there is none."""

    def __init__(self, settings: _ClientSettings) -> None:
        self._settings = settings
        self.client = idle_clients.pop(settings) if settings in idle_clients else NativeClient(settings)
        for unused in [of for of, client in idle_clients.items() if time.monotonic() >= client.used_s + IDLE_S_MAX]:
            idle_clients.pop(unused).close()

    def renew(self) -> None:
        """Close the client and open a new one, with nothing assigned."""
        self.client.close()
        self.client = NativeClient(self._settings)

    def release(self, *, is_reusable: bool) -> None:
        """Keep the client as idle if it is reusable, in place of the one that was not used longest; close it
        otherwise."""
        try:
            self.client.clear()
        except RuntimeError:
            log.warning("cannot clear the assignment of the reading client; closing it", exc_info=True)
            is_reusable = False
        self.client.used_s = time.monotonic()
        if is_reusable and self.client.rk is not None and self._settings not in idle_clients:
            idle_clients[self._settings] = self.client
            while len(idle_clients) > IDLE_CLIENTS_MAX:
                idle_clients.pop(next(iter(idle_clients))).close()
        else:
            self.client.close()


# --- one reader -------------------------------------------------------------------------------------------------------


class RangeState(Enum):
    """Whether fetched rows may be handed over."""

    READING = "planned rows of the range are handed over"
    STOPPED = "the client stopped fetching, or fetches at a wrong offset; the partition is assigned again after a check"
    DAMAGED = "a record batch had a wrong checksum; rows after it are dropped, and fetched again after a check"
    NEWER_LEADER = "the next row has a newer leader than the plan; rows are dropped until a check finds no truncation"


@dataclass(slots=True)
class RangeProgress:
    """One range that is not finished."""

    position: int
    """The next offset to read."""
    end: int
    """The planned end, exclusive."""
    epoch: int | None
    """The epoch of the leader that reported the end; None: unknown, or the leader counts in another way."""
    checked_s: float
    """When the position last moved, or the range was last checked; monotonic seconds."""
    state: RangeState = RangeState.READING
    newer: NewerRecord | None = None
    """In NEWER_LEADER: the next record."""
    at_end: bool = False
    """Whether the position is at the end of what can be read."""
    in_transaction: bool = False
    """Whether the leader has records up to the planned end though the position is at that end: a transaction is
    open."""

    @property
    def drops_rows(self) -> bool:
        """Whether fetched rows are not the next ones."""
        return self.state in (RangeState.DAMAGED, RangeState.NEWER_LEADER)


class RangeReader:
    """Reads the ranges of one piece concurrently.

    Args:
        lease: the client.
        piece: ranges of different partitions.
        options: how to read.
        counts: counts what is read, and what is skipped if data loss does not fail the task.
    """

    def __init__(self, lease: ClientLease, piece: Piece, options: ReadOptions, counts: ReadCounts) -> None:
        self._lease, self._piece, self._options, self._counts = lease, piece, options, counts
        self._deadline = ReadDeadline(options.progress_timeout_s, options.outage_timeout_s)
        self._record_size = RecordSize()
        self._suspicions = Suspicions(broker_checks.GRACE_S)
        self._failures = RequestFailures(options.servers, principal(options.settings), self._suspicions)
        self._topics = TopicChecks(piece.topic_ids, lease.client.described)
        self._ranges: dict[TopicPartition, RangeProgress] = {}
        """The ranges that are not finished."""
        self._finished: list[TopicPartition] = []
        """Finished ranges that the client still fetches."""
        self._check: RangeCheck | None = None
        """The check under way."""
        self._checks_due: dict[TopicPartition, None] = {}
        """Ranges to check next, in order."""
        self._read_topics: set[str] = set()
        """Topics of which rows were handed over."""
        self._gone_topics: set[str] = set()
        """Topics of which it is confirmed that they are missing."""
        self._started_s = 0.0
        """When the reader started; monotonic seconds."""
        self._last_rows_s = 0.0
        """When rows last arrived; monotonic seconds."""

    @property
    def _client(self) -> NativeClient:
        return self._lease.client

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows of all ranges. Raises the errors of :func:`read_ranges`."""
        self._start()
        while self._ranges:
            remaining = sum(progress.end - progress.position for progress in self._ranges.values())
            rows_max = self._record_size.rows_max(remaining)
            chunk = self._client.poll(rows_max, min(LINGER_S, self._options.progress_timeout_s))
            try:
                slices = self._planned_slices(chunk)
                for group in group_by_batch(slices, chunk.sizes):
                    yield self._batch(chunk, group)
                events = chunk.events
            finally:
                chunk.free()
            self._after_poll(events, has_rows=bool(slices))
        self._await_topic_checks(self._unconfirmed_topics)

    def _start(self) -> None:
        now = self._started_s = time.monotonic()
        self._deadline.note_progress(now)
        epochs = self._piece.leader_epochs
        self._ranges = {r.tp: RangeProgress(r.start, r.end, epochs.get(r.tp), now) for r in self._piece.ranges}
        if names := self._unchecked_topics({tp.topic for tp in self._ranges}):
            self._topics.send(self._client, names)  # the response arrives with the first rows
        self._client.assign([(r.tp, r.start) for r in self._piece.ranges])

    # --- records

    def _planned_slices(self, chunk: NativeChunk) -> list[RowSlice]:
        """The rows of a chunk that are handed over."""
        for event in chunk.events:
            progress = self._ranges.get(event.tp) if event.tp is not None else None
            if event.code in DAMAGED and progress is not None and not progress.drops_rows:
                progress.state = RangeState.DAMAGED
        self._await_planned_topics({fetched.tp.topic for fetched in chunk.partition_rows if fetched.tp in self._ranges})
        slices = self._select(chunk)
        if not self._ranges and (names := self._unconfirmed_topics()):
            self._topics.send(self._client, names)  # the response arrives while the rows are handed over
        if slices and "headers" in self._options.columns:
            chunk.count_headers()
        self._record_size.update(chunk.sizes)
        for piece in slices:
            self._counts.bytes[piece.tp.topic] += int(chunk.sizes[piece.first : piece.last].sum())
        return slices

    def _select(self, chunk: NativeChunk) -> list[RowSlice]:
        """Select the planned rows of each partition and move its position. A record at or above the end finishes the
        range."""
        slices: list[RowSlice] = []
        now = time.monotonic()
        for fetched in chunk.partition_rows:
            tp = fetched.tp
            progress = self._ranges.get(tp)
            if progress is None or progress.drops_rows:
                continue  # after the end of a finished range, or before the range is fetched again
            rows = select_rows(chunk, fetched, progress.position, progress.end, progress.epoch)
            if rows.first < rows.last:
                slices.append(RowSlice(tp, fetched.first + rows.first, fetched.first + rows.last))
                self._read_topics.add(tp.topic)
                self._counts.rows_from_brokers[tp] += rows.last - rows.first
            self._advance(tp, progress, rows.position, now)
            if rows.newer is not None:
                progress.state, progress.newer = RangeState.NEWER_LEADER, rows.newer
                if self._check is not None and self._check.tp == tp:
                    self._check.cancel()  # its response may be older than the new leader
                    self._check = None
                self._schedule_check(tp)
        return slices

    def _batch(self, chunk: NativeChunk, group: list[RowSlice]) -> pa.RecordBatch:
        try:
            return chunk.batch(group, self._options.columns)
        except GroupError as exc:
            there = command_line.connection(self._options.settings)
            raise broker_checks.unreadable_record(exc, there, self._options.group_id) from None

    def _advance(self, tp: TopicPartition, progress: RangeProgress, position: int, now: float) -> None:
        if position > progress.position:
            progress.position, progress.checked_s = position, now
            progress.at_end = progress.in_transaction = False
            if progress.state is RangeState.STOPPED:
                progress.state = RangeState.READING
            self._suspicions.clear(("short", tp), (Request.FETCH, tp.topic), (Request.FETCH, None))
            self._failures.clear_refusals(tp)
        if progress.position >= progress.end and self._ranges.pop(tp, None) is not None:
            self._finished.append(tp)
            self._deadline.note_progress(now)

    # --- events and progress

    def _after_poll(self, events: Sequence[ClientEvent], *, has_rows: bool) -> None:
        """Handle the events of a poll, and continue with the checks."""
        if has_rows:
            self._deadline.note_progress(time.monotonic())
        for event in events:
            self._on_event(event)
        if not has_rows:
            self._check_progress()
        self._continue_checks()
        if self._finished and self._ranges:  # after the last range the client is cleared as a whole
            self._client.incremental_unassign(self._finished)
        self._finished = []

    def _on_event(self, event: ClientEvent) -> None:
        tp = event.tp
        progress = self._ranges.get(tp) if tp else None
        if tp and progress is None:
            return  # behind the end of a finished range: the batch that has these offsets reports it
        if progress and progress.drops_rows:
            if event.code != EOF:
                self._failures.last_text = event.text
            return
        if event.code == EOF:
            if tp and progress:
                # Transaction markers and compaction may have moved the log's end past the last record.
                self._advance(tp, progress, event.offset, time.monotonic())
                if tp in self._ranges:
                    progress.at_end = True
                    self._schedule_check(tp)
            return
        self._request_failed(Request.FETCH, event)
        if tp and progress:
            if event.code in OUT_OF_RANGE or meaning(Request.TOPICS, event.code) is Meaning.GONE or event.code < -1:
                progress.state = RangeState.STOPPED
            if event.code in OUT_OF_RANGE and ("short", tp) not in self._suspicions:
                self._schedule_check(tp)

    def _request_failed(self, request: Request, event: ClientEvent) -> None:
        self._failures.record(request, event, time.monotonic())

    def _check_progress(self) -> None:
        """After a poll without rows: read positions that moved without records, check the slowest range, and enforce
        the deadline."""
        now = time.monotonic()
        for tp, position in self._client.positions(list(self._ranges)).items():
            progress = self._ranges[tp]
            if position > progress.position and not progress.drops_rows:
                self._deadline.note_progress(now)
                self._advance(tp, progress, position, now)
        if not self._ranges:
            return
        self._enforce_deadline()
        if self._failures.needs_new_client(now):
            self._renew_client()
        tp, slowest = min(self._ranges.items(), key=lambda item: item[1].checked_s)
        if self._check is None and now - slowest.checked_s >= min(CHECK_AFTER_S, self._options.progress_timeout_s / 4):
            self._schedule_check(tp)

    def _renew_client(self) -> None:
        self._lease.renew()
        self._finished = []  # the new client never had these
        self._topics.forget_request()
        self._check = None
        for progress in self._ranges.values():
            progress.state = RangeState.READING
        self._client.assign([(tp, progress.position) for tp, progress in self._ranges.items()])

    def _enforce_deadline(self) -> None:
        now = time.monotonic()
        if self._deadline.remaining_s(now) <= 0 and self._check:
            self._check.note_request(is_answered=False)
        if self._deadline.remaining_s(now) <= 0:
            remaining = [self._remaining(tp) for tp in sorted(self._ranges)]
            in_transaction = [r.tp for r in remaining if self._ranges[r.tp].in_transaction]
            skips_aborted = self._options.settings.get("isolation.level") != "read_uncommitted"
            raise broker_checks.read_timeout(
                self._options.servers,
                remaining,
                self._deadline.waited_s(now),
                self._failures.last_text,
                in_transaction,
                may_be_aborted=skips_aborted and not in_transaction and not self._deadline.is_outage,
            )

    # --- topic checks

    def _receive_topics(self, wait_s: float) -> TopicDescriptions | ClientEvent | None:
        """Receive descriptions of topics, within ``wait_s``, and compare them with the plan."""
        topics = self._topics.receive(wait_s)
        if isinstance(topics, ClientEvent):
            self._request_failed(Request.TOPICS, topics)
        elif topics is not None:
            self._suspicions.clear((Request.FETCH, None), (Request.TOPICS, None))
            for name, topic in topics.items():
                self._compare_topic(name, topic)
        return topics

    def _compare_topic(self, name: str, topic: TopicDescription) -> None:
        now = time.monotonic()
        match self._topics.compare(name, topic):
            case TopicCheck.GONE:
                if self._suspicions.report(("gone", name), now):
                    self._gone_topics.add(name)
                    self._partitions_missing([tp for tp in self._ranges if tp.topic == name])
            case TopicCheck.RECREATED:
                self._suspicions.clear(("gone", name), (Request.TOPICS, name))
                if self._suspicions.report(("recreated", name), now):
                    self._topic_recreated(name)
            case TopicCheck.PLANNED:
                self._suspicions.clear(("gone", name), ("recreated", name), (Request.TOPICS, name))
                missing = [tp for tp in self._ranges if tp.topic == name and tp.partition >= topic.partitions]
                self._partitions_missing([tp for tp in missing if self._suspicions.report(("gone", tp), now)])
            case TopicCheck.FAILED:
                event = ClientEvent(topic.code, topic.text, TopicPartition(name, 0), -1)
                self._request_failed(Request.TOPICS, event)

    def _is_suspect(self, tp: TopicPartition) -> bool:
        """Whether the partition may be missing, or the topic recreated, and this is not confirmed yet."""
        return any(what in self._suspicions for what in (("gone", tp.topic), ("recreated", tp.topic), ("gone", tp)))

    def _await_planned_topics(self, topics: set[str]) -> None:
        """Before the first rows of topics: wait until brokers confirm their ids, or their ranges are skipped."""
        self._await_topic_checks(lambda: self._unchecked_topics(topics & {tp.topic for tp in self._ranges}))
        self._last_rows_s = time.monotonic()

    def _unchecked_topics(self, topics: set[str]) -> set[str]:
        """Those of these topics whose ids were not confirmed: neither since the reader started, nor for the task before
        that had the client, shortly before that."""
        names, since_s = self._topics.with_planned_id(topics), self._started_s - TOPIC_CHECK_VALID_S
        return {name for name in names if self._topics.check(name, since_s) is not TopicCheck.PLANNED}

    def _unconfirmed_topics(self) -> set[str]:
        """Topics of which rows were handed over, without a check after the last rows. A topic that is missing by then
        was not recreated, if that is confirmed: a broker may know of the deletion, and not yet of the new topic."""
        names = self._topics.with_planned_id(self._read_topics) - self._gone_topics
        since_s = self._last_rows_s - TOPIC_CHECK_VALID_S
        return {name for name in names if self._topics.check(name, since_s) is not TopicCheck.PLANNED}

    def _await_topic_checks(self, unchecked: Callable[[], set[str]]) -> None:
        """Request those topics that ``unchecked`` returns, unless a request is pending, and wait for the response,
        until it returns none."""
        pause = False
        while names := unchecked():
            if not self._topics.is_request_open:
                if pause:
                    _pause.wait(TOPIC_REQUEST_PAUSE_S)
                self._topics.send(self._client, names)
            pause = True
            if (topics := self._receive_topics(TOPIC_REQUEST_PAUSE_S)) is not None:
                now = time.monotonic()
                self._deadline.note_request(now, now, is_answered=not isinstance(topics, ClientEvent))
            self._enforce_deadline()

    # --- range checks

    def _schedule_check(self, tp: TopicPartition) -> None:
        """Check a range against brokers, as soon as no other check is under way."""
        self._checks_due[tp] = None

    def _continue_checks(self) -> None:
        """Start the next check if none is under way, and finish it if its responses are there."""
        while self._checks_due and self._check is None:
            tp = next(iter(self._checks_due))
            del self._checks_due[tp]
            if tp in self._ranges:
                self._check = RangeCheck(self._client, tp, self._topics, self._deadline)
        check = self._check
        if check is None or (check.tp in self._ranges and not self._is_done(check)):
            return
        check.cancel()
        self._check = None
        if progress := self._ranges.get(check.tp):
            progress.checked_s = time.monotonic()
            if progress.state is not RangeState.READING:
                progress.state = RangeState.READING
                self._client.reassign(check.tp, progress.position)

    def _is_done(self, check: RangeCheck) -> bool:
        """Receive the responses of a check and apply them. Returns whether all are there."""
        tp = check.tp
        topics = self._receive_topics(0.0)
        if check.topic is TopicCheck.UNCHECKED:
            if isinstance(topics, ClientEvent):
                check.note_request(is_answered=False)
            return False
        if tp not in self._ranges or self._is_suspect(tp):
            check.note_request(is_answered=True)
            return True
        watermarks = check.watermarks()
        if isinstance(watermarks, ClientEvent):
            self._request_failed(Request.OFFSETS, watermarks)
        elif watermarks is not None:
            self._suspicions.clear((Request.OFFSETS, tp.topic))
            progress = self._ranges[tp]
            if progress.state is RangeState.NEWER_LEADER:
                assert progress.newer is not None
                self._apply_leader_epoch(tp, progress, progress.newer, watermarks)
            else:
                self._apply_watermarks(tp, progress, watermarks)
        return watermarks is not None

    def _apply_watermarks(self, tp: TopicPartition, progress: RangeProgress, watermarks: Watermarks) -> None:
        low, high, _ = watermarks
        if progress.at_end:
            progress.in_transaction = high >= progress.end
        if low > progress.position:
            self._records_lost(tp, progress, low, high)
            progress.state = RangeState.STOPPED
        elif high >= progress.end:
            self._suspicions.clear(("short", tp))
        elif self._suspicions.report(("short", tp), time.monotonic()):
            self._records_lost(tp, progress, low, high)

    def _apply_leader_epoch(
        self, tp: TopicPartition, progress: RangeProgress, record: NewerRecord, watermarks: Watermarks
    ) -> None:
        """The log was truncated if the leader's epoch is at least the record's; otherwise these brokers count epochs in
        another way."""
        if watermarks.leader_epoch < record.epoch:
            progress.epoch = None
        elif self._options.fail_on_data_loss:
            raise broker_checks.log_truncated(self._remaining(tp), record, watermarks)
        else:
            self._skip(tp, progress.end, f"the log was truncated at {record.offset} or below, and written again")

    def _remaining(self, tp: TopicPartition) -> OffsetRange:
        return OffsetRange(tp, self._ranges[tp].position, self._ranges[tp].end)

    # --- data loss

    def _partitions_missing(self, tps: Sequence[TopicPartition]) -> None:
        """Brokers reported twice that these partitions do not exist."""
        if tps and self._options.fail_on_data_loss:
            topics = sorted({tp.topic for tp in tps})
            raise broker_checks.topic_missing(self._remaining(tps[0]), self._options.servers, topics)
        for tp in tps:
            self._skip(tp, self._ranges[tp].end, "the partition no longer exists")

    def _topic_recreated(self, name: str) -> None:
        """Brokers reported twice that the topic has another id."""
        fails = self._options.fail_on_data_loss
        if fails or name in self._read_topics:
            # Rows that were handed over may be of the new topic: the task must start again, even if loss is allowed.
            planned = next(r for r in self._piece.ranges if r.tp.topic == name)
            raise broker_checks.topic_recreated(planned, was_read=name in self._read_topics, can_skip=fails)
        for tp in [tp for tp in self._ranges if tp.topic == name]:
            self._skip(tp, self._ranges[tp].end, "the topic was deleted and recreated")

    def _records_lost(self, tp: TopicPartition, progress: RangeProgress, low: int, high: int) -> None:
        """Records of the range are not in the log. Never moves below the planned start: records there are another
        log's."""
        if self._options.fail_on_data_loss:
            raise broker_checks.records_lost(self._remaining(tp), low, high)
        until = min(low, progress.end) if low > progress.position else progress.end
        self._skip(tp, until, f"the log has only [{low},{high})")

    def _skip(self, tp: TopicPartition, until: int, reason: str) -> None:
        progress = self._ranges[tp]
        self._counts.skip(tp, progress.position, until, reason)
        self._advance(tp, progress, until, time.monotonic())
