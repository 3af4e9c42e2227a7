"""Reads offset ranges through a client: what belongs to a range, when it is read to its end, and what was lost.

Runs in: executor workers. Deliberately absent: how records are fetched (a :class:`Client` does that), how clients are
made and kept (``fetch``), planning.

The end of a range is known by a record at or above it, by a position that reached it (transaction markers and
compacted records move it without a record), or by the log's end; never by waiting for the offset before the end,
which may hold no record.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa

from spark_group_source.errors import AccessDenied, DataLoss, GroupError, ReadTimeout, TopicMissing
from spark_group_source.executor.records import BATCH_BYTES_MAX, BATCH_ROWS_MAX, Chunk, Cut, Event, bounded
from spark_group_source.model import OffsetRange, TopicPartition

log = logging.getLogger(__name__)

LINGER_S = 0.02
"""How long one poll gathers records before it hands over what came: small enough for a task of a few records."""
TRIAGE_AFTER_S = 1.0
"""A range without progress for this long is checked against the log's watermarks."""
WATERMARK_TIMEOUT_S = 5.0
"""One question for a partition's watermarks; the range's own deadline still applies around it."""
METADATA_TIMEOUT_S = 1.0
"""How long an assignment waits for the leaders of topics that are new to its client. Without the question librdkafka
finds them by itself, but up to a second later; without an answer it does the same."""
SHRUNK_GRACE_S = 3.0
"""How long a log must look shorter than planned before it counts as loss: a new leader may lag for a moment."""
ASSUMED_RECORD_BYTES = 16 * 1024
"""Size taken for a record until the first ones were seen; it bounds the first poll to 1,024 records."""
RANGES_IN_MESSAGE_MAX = 5

# librdkafka's numbers; the plain and the fast client report the same ones.
_EOF = -191
_OUT_OF_RANGE = frozenset({-140, 1})
_UNKNOWN = frozenset({-190, -188, 3, 100})
_DENIED = frozenset({-169, 29, 30, 31, 33, 34, 58})
_FATAL = -150


class Client(Protocol):
    """An assigned-only consumer. One thread and one reader at a time."""

    pid: int
    """The process that made it, the only one in which its threads run."""

    def assign(self, positions: Sequence[tuple[TopicPartition, int]]) -> None:
        """Replace whatever is assigned; every position is the next offset to read."""

    def drop(self, tps: Sequence[TopicPartition]) -> None:
        """Stop fetching these; the others go on undisturbed."""

    def move(self, tp: TopicPartition, offset: int) -> None:
        """Go on with one assigned partition at another offset."""

    def poll(self, rows_max: int, wait_s: float) -> Chunk: ...
    def positions(self, tps: Sequence[TopicPartition]) -> dict[TopicPartition, int]: ...
    def watermarks(self, tp: TopicPartition, timeout_s: float) -> tuple[int, int] | Event:
        """Ask the partition's leader for (first offset, next offset to be written), or tell why it cannot be had."""

    def known_end(self, tp: TopicPartition) -> int:
        """The high watermark of the last fetch, -1 if none. Unlike ``watermarks`` it also counts open transactions."""

    def clear(self) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class _Progress:
    position: int
    end: int
    moved_s: float
    short_since_s: float | None = None
    """Since when the log has looked shorter than the plan."""
    held: bool = False
    """The readable part of the log ended here, while the log itself covers the plan: a transaction is open."""


class RangeReader:
    """Reads one round: ranges of different partitions, all at once."""

    def __init__(
        self, client: Client, ranges: Sequence[OffsetRange], servers: str, fail_on_data_loss: bool, deadline_s: float
    ) -> None:
        self._client = client
        self._servers = servers
        self._fail_on_data_loss = fail_on_data_loss
        self._deadline_s = deadline_s
        self._ranges = ranges
        self._left: dict[TopicPartition, _Progress] = {}
        self._finished: list[TopicPartition] = []
        self._record_bytes = float(ASSUMED_RECORD_BYTES)
        self._last_error = ""
        self._progress_s = 0.0

    def batches(self, include_headers: bool) -> Iterator[pa.RecordBatch]:
        now = time.monotonic()
        self._progress_s = now
        self._left = {r.tp: _Progress(r.start, r.end, now) for r in self._ranges}
        self._client.assign([(r.tp, r.start) for r in self._ranges])
        while self._left:
            chunk = self._client.poll(self._rows_max(), min(LINGER_S, self._deadline_s))
            try:
                cuts = self._accept(chunk)
                for group in bounded(cuts, chunk.sizes):
                    yield chunk.batch(group, include_headers)
                events = list(chunk.events)
            finally:
                chunk.free()
            if cuts:
                self._progress_s = time.monotonic()
            for event in events:
                self._on_event(event)
            if not cuts:
                self._look_around()
            self._drop_finished()

    def _rows_max(self) -> int:
        left = sum(p.end - p.position for p in self._left.values())
        return max(1, min(left, BATCH_ROWS_MAX, int(BATCH_BYTES_MAX / self._record_bytes)))

    def _accept(self, chunk: Chunk) -> list[Cut]:
        """Cut each run to its plan and note how far it came. A record at or above the end proves the range read."""
        cuts: list[Cut] = []
        now = time.monotonic()
        for run in chunk.runs:
            progress = self._left.get(run.tp)
            if progress is None:
                continue  # fetched ahead of a range that is finished
            first, last = np.searchsorted(run.offsets, (progress.position, progress.end)).tolist()
            if first < last:
                cuts.append(Cut(run.tp, run.first + first, run.first + last))
            self._advance(run.tp, progress, int(run.offsets[-1]) + 1, now)
        if len(chunk.sizes):
            self._record_bytes = max(1.0, float(chunk.sizes.mean()))
        return cuts

    def _advance(self, tp: TopicPartition, progress: _Progress, position: int, now: float) -> None:
        if position > progress.position:
            progress.position, progress.moved_s, progress.short_since_s, progress.held = position, now, None, False
        if progress.position >= progress.end and self._left.pop(tp, None) is not None:
            self._finished.append(tp)
            self._progress_s = now

    def _drop_finished(self) -> None:
        """Stop fetching past the ends, unless all is read: the client is then cleared as a whole."""
        if self._finished and self._left:
            self._client.drop(self._finished)
        self._finished = []

    # --- what is not a record

    def _on_event(self, event: Event) -> None:
        tp = event.tp
        progress = self._left.get(tp) if tp else None
        if event.code == _EOF:
            if tp and progress:
                self._on_eof(tp, progress, event.offset)
            return
        if event.code in _DENIED:
            raise AccessDenied(
                f"reading {tp or 'from Kafka'} at {self._servers} was refused: {event.text}. Check the credentials "
                "and that they may read the topic and describe the group",
                op="fetch",
            )
        if event.code == _FATAL:
            raise GroupError(f"the reading client failed for good: {event.text}", op="fetch")
        self._last_error = event.text
        if tp and progress and (event.code in _OUT_OF_RANGE or event.code in _UNKNOWN):
            self._triage(tp, progress, event.code)

    def _on_eof(self, tp: TopicPartition, progress: _Progress, offset: int) -> None:
        """The log's end: transaction markers and compaction may have moved the position past the last record."""
        now = time.monotonic()
        self._advance(tp, progress, offset, now)
        if tp in self._left:
            progress.held = self._client.known_end(tp) >= progress.end
            if not progress.held:
                self._triage(tp, progress)

    def _look_around(self) -> None:
        """Nothing came: see whether positions moved without records, ask about the slowest range, mind the deadline."""
        now = time.monotonic()
        for tp, position in self._client.positions(list(self._left)).items():
            progress = self._left[tp]
            if position > progress.position:
                self._progress_s = now
                self._advance(tp, progress, position, now)
        waited_s = time.monotonic() - self._progress_s
        if self._left and waited_s >= self._deadline_s:
            raise self._timeout(waited_s)
        slowest = min(self._left.items(), key=lambda item: item[1].moved_s, default=None)
        if slowest and now - slowest[1].moved_s >= min(TRIAGE_AFTER_S, self._deadline_s / 4):
            slowest[1].moved_s = now  # so that the next look is at another range
            self._triage(*slowest)

    def _timeout(self, waited_s: float) -> ReadTimeout:
        named = [
            f"{OffsetRange(tp, p.position, p.end)}" for tp, p in sorted(self._left.items())[:RANGES_IN_MESSAGE_MAX]
        ]
        more = len(self._left) - len(named)
        held = [str(tp) for tp, p in sorted(self._left.items()) if p.held]
        hint = ""
        if held:
            hint = (
                f" {held[0]} has records up to its planned end that an open transaction holds back: see its producer."
            )
        return ReadTimeout(
            f"nothing came from {self._servers} for {waited_s:.1f} s; still to read: {', '.join(named)}"
            + f" and {more} more" * (more > 0)
            + f". Last error: {self._last_error or 'none'}.{hint}",
            ranges=[(tp.topic, tp.partition, p.position, p.end) for tp, p in sorted(self._left.items())],
            waited_ms=int(waited_s * 1000),
        )

    # --- is the range still there?

    def _triage(self, tp: TopicPartition, progress: _Progress, code: int = 0) -> None:
        """Compare a range with what its leader says: wait, go on elsewhere, or count records as lost.

        Args:
            code: the error with which librdkafka gave this partition up, so that waiting needs a new start.
        """
        left_s = self._deadline_s - (time.monotonic() - self._progress_s)
        answer = self._client.watermarks(tp, max(0.1, min(WATERMARK_TIMEOUT_S, left_s)))
        if isinstance(answer, Event):
            self._no_watermarks(tp, progress, answer, stopped=code != 0)
            return
        low, high = answer
        known = True
        if code not in _OUT_OF_RANGE:
            # Leaders tell the end of what is readable: below the log's end while a transaction is open. The last fetch
            # knows the log's own end; without one there is no verdict yet.
            end = self._client.known_end(tp)
            high, known = max(high, end), end >= 0
        if low > progress.position:
            self._lost(tp, progress, low, high)
            if tp in self._left:
                self._client.move(tp, progress.position)
            return
        if high < progress.end and known:
            self._short(tp, progress, low, high)
        if code and tp in self._left:
            self._client.move(tp, progress.position)

    def _no_watermarks(self, tp: TopicPartition, progress: _Progress, answer: Event, *, stopped: bool) -> None:
        self._last_error = answer.text
        if answer.code in _DENIED:
            self._on_event(answer)
        if answer.code not in _UNKNOWN:
            if stopped:
                self._client.move(tp, progress.position)
            return
        text = (
            f"{tp} does not exist any more at {self._servers}, while {OffsetRange(tp, progress.position, progress.end)}"
        )
        if self._fail_on_data_loss:
            raise TopicMissing(f"{text} was still to be read. Restore the topic or unsubscribe it", topics=[tp.topic])
        log.warning("%s was still to be read: skipped", text)
        self._advance(tp, progress, progress.end, time.monotonic())

    def _short(self, tp: TopicPartition, progress: _Progress, low: int, high: int) -> None:
        """The log ends before the range does: a lagging new leader for a moment, otherwise a loss."""
        now = time.monotonic()
        if progress.short_since_s is None:
            progress.short_since_s = now
        if now - progress.short_since_s >= min(SHRUNK_GRACE_S, self._deadline_s / 2):
            self._lost(tp, progress, low, high)

    def _lost(self, tp: TopicPartition, progress: _Progress, low: int, high: int) -> None:
        """Records in the range are gone. Never moves below the planned start: what is there is another log's."""
        rest = OffsetRange(tp, progress.position, progress.end)
        text = f"{rest} was planned but the log holds [{low},{high})"
        if self._fail_on_data_loss:
            raise DataLoss(
                f"{text}: records aged out, or the topic was made anew. Set failOnDataLoss=false to go on without them",
                topic=tp.topic,
                partition=tp.partition,
                expected=progress.position,
                available=(low, high),
            )
        log.warning("%s: going on with what is left", text)
        to = min(low, progress.end) if low > progress.position else progress.end
        self._advance(tp, progress, to, time.monotonic())
