"""Reads offset ranges through a client: what belongs to a range, when it is read to its end, and what was lost.

Runs in: executor workers. Deliberately absent: fetching records (``native``), which of them are the next planned ones
(``intake``), making and keeping clients (``fetch``), planning.

The end of a range is known by a record at or above it, by a position that reached it (transaction markers and
compacted records move it without a record), or by the log's end; never by waiting for the offset before the end,
which may hold no record.

Before the first rows, and after the last ones unless they came at once, a broker has to say that their topic is the
planned one. Records are fetched and handed over while questions are open. Nothing is lost on a client's word:
``answers``.
"""

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import pyarrow as pa

from spark_group_source.answers import CODES, Meaning, Request, Suspicions, meaning
from spark_group_source.model import OffsetRange, Piece, TopicPartition
from spark_group_source.options.client import principal
from spark_group_source.reader import read_errors
from spark_group_source.reader.broker_checks import Inquiry, Patience, TopicCheck, Topics
from spark_group_source.reader.intake import DAMAGED, EOF, LaterLeader, RecordSize, next_rows
from spark_group_source.reader.native_client import NativeChunk, NativeClient
from spark_group_source.reader.read_counts import Tally
from spark_group_source.reader.read_errors import Failures
from spark_group_source.reader.records import Bounds, Cut, Event, Told, TopicTold, bounded

LINGER_S = 0.02
"""How long one poll gathers records before it hands over what came: small enough for a task of a few records."""
TRIAGE_AFTER_S = 1.0
"""A range without progress for this long is asked about, and then again after each further such time."""
PROOF_S = 0.1
"""What was answered about a topic's id holds for rows that come so soon after the question: in less, nobody deletes a
topic, makes it anew and fills it to the planned offsets, and librdkafka has not found the new one. A second question
would wait behind a fetch at the log's end, and a small task would take twice as long for it."""
ASK_PAUSE_S = 0.2
"""Between two questions about topics that rows wait for."""

OUT_OF_RANGE = frozenset({CODES["_AUTO_OFFSET_RESET"], CODES["OFFSET_OUT_OF_RANGE"]})
"""librdkafka gave a partition up because the broker has no such offset. Whether that is so, its leader is asked."""
_pause = threading.Event()  # never set: waiting for it lets time pass


class Lease(Protocol):
    """A client that a reader has for itself."""

    client: NativeClient

    def renew(self) -> None:
        """Close it and get a fresh one, with nothing assigned."""


@dataclass(frozen=True, repr=False)
class ReadOptions:
    """How a task reads. Holds secrets, so it has no repr.

    Args:
        settings: librdkafka's, with ``bootstrap.servers``, credentials and ``isolation.level``. What concerns
            membership, commits and offset reset is overruled.
        include_headers: whether batches have the column ``headers``.
        fail_on_data_loss: False turns lost records into a warning and goes on with those that are left.
        deadline_s: seconds without any progress (a record, a position that moves) after which ReadTimeout is raised.
            Time that the consumer of the batches takes does not count.
        silence_s: seconds without an answer of the brokers, or without a token, that are waited for; never less than
            ``deadline_s``.
    """

    settings: Mapping[str, str]
    include_headers: bool = False
    fail_on_data_loss: bool = True
    deadline_s: float = 120.0
    silence_s: float = 0.0

    @property
    def servers(self) -> str:
        return self.settings.get("bootstrap.servers", "")


class State(Enum):
    """What is done with the records that come of a range."""

    READING = "those that are next are taken"
    STOPPED = "the client gave it up; it is assigned again after an inquiry"
    TORN = "none is taken: a batch came damaged, and what comes behind it is not next. It is fetched again"
    LATER_LEADER = "none is taken before the leader answered: the next one is a later leader's than the plan's"


@dataclass(slots=True)
class Progress:
    """One range."""

    position: int
    end: int
    epoch: int | None
    """Of the leader that reported the end; None: nothing is compared."""
    looked_s: float
    """When it last moved, or was asked about."""
    state: State = State.READING
    later: LaterLeader | None = None
    """The record that :attr:`State.LATER_LEADER` is about."""
    at_eof: bool = False
    """What can be read of the log ends here."""
    held: bool = False
    """And the log itself covers the plan: a transaction is open."""


class RangeReader:
    """Reads one piece, all of its ranges at once.

    Args:
        lease: the client.
        piece: ranges of different partitions.
        options: how.
        tally: what is read, and what is skipped where loss is no failure.
    """

    def __init__(self, lease: Lease, piece: Piece, options: ReadOptions, tally: Tally) -> None:
        self._lease, self._piece, self._options, self._tally = lease, piece, options, tally
        self._patience = Patience(options.deadline_s, options.silence_s)
        self._record_size = RecordSize()
        self._suspicions = Suspicions(read_errors.GRACE_S)
        self._failures = Failures(options.servers, principal(options.settings), self._suspicions)
        self._topics = Topics(piece.topic_ids)
        self._left: dict[TopicPartition, Progress] = {}
        self._finished: list[TopicPartition] = []
        self._inquiry: Inquiry | None = None
        self._doubtful: dict[TopicPartition, None] = {}  # compared with what brokers say as soon as no other one is
        self._read: set[str] = set()  # topics of which rows were handed over
        self._began_s = self._came_s = 0.0

    @property
    def _client(self) -> NativeClient:
        return self._lease.client

    def batches(self) -> Iterator[pa.RecordBatch]:
        self._begin()
        while self._left:
            left = sum(progress.end - progress.position for progress in self._left.values())
            chunk = self._client.poll(self._record_size.rows_max(left), min(LINGER_S, self._options.deadline_s))
            try:
                cuts = self._take(chunk)
                for group in bounded(cuts, chunk.sizes):
                    yield chunk.batch(group, self._options.include_headers)
                events = chunk.events
            finally:
                chunk.free()
            self._react(events, came=bool(cuts))
        self._confirm()

    def _begin(self) -> None:
        now = self._began_s = time.monotonic()
        self._patience.progress(now)
        epochs = self._piece.leader_epochs
        self._left = {r.tp: Progress(r.start, r.end, epochs.get(r.tp), now) for r in self._piece.ranges}
        if names := self._topics.compared({tp.topic for tp in self._left}):
            self._topics.ask(self._client, names)  # the answer is here when the first rows are
        self._client.assign([(r.tp, r.start) for r in self._piece.ranges])

    # --- records

    def _take(self, chunk: NativeChunk) -> list[Cut]:
        """The rows of a chunk that are handed over."""
        for event in chunk.events:
            if event.code in DAMAGED and event.tp is not None and event.tp in self._left:
                self._left[event.tp].state = State.TORN
        self._compare({run.tp.topic for run in chunk.runs if run.tp in self._left})
        cuts = self._accept(chunk)
        if not self._left and (names := self._unconfirmed()):
            self._topics.ask(self._client, names)  # the answer is here after the hand-over
        if cuts and self._options.include_headers:
            chunk.count_headers()
        self._record_size.see(chunk.sizes)
        return cuts

    def _accept(self, chunk: NativeChunk) -> list[Cut]:
        """Cut each run to its plan and note how far it came. A record at or above the end proves the range read."""
        cuts: list[Cut] = []
        now = time.monotonic()
        for run in chunk.runs:
            progress = self._left.get(run.tp)
            if progress is None or progress.state in (State.TORN, State.LATER_LEADER):
                continue  # ahead of a range that is finished, or behind what is fetched again
            rows = next_rows(chunk, run, progress.position, progress.end, progress.epoch)
            if rows.first < rows.last:
                cuts.append(Cut(run.tp, run.first + rows.first, run.first + rows.last))
                self._read.add(run.tp.topic)
                self._tally.brokers[run.tp] += rows.last - rows.first
            self._advance(run.tp, progress, rows.reached, now)
            if rows.later is not None:
                progress.state, progress.later = State.LATER_LEADER, rows.later
                if self._inquiry is not None and self._inquiry.tp == run.tp:
                    self._inquiry.end()  # its answer may be of before the later leader
                    self._inquiry = None
                self._doubt(run.tp)
        return cuts

    def _advance(self, tp: TopicPartition, progress: Progress, position: int, now: float) -> None:
        if position > progress.position:
            progress.position, progress.looked_s = position, now
            progress.at_eof = progress.held = False
            if progress.state is State.STOPPED:
                progress.state = State.READING
            self._suspicions.clear(("short", tp), (Request.FETCH, tp.topic), (Request.FETCH, None))
            self._failures.forget_refusals()
        if progress.position >= progress.end and self._left.pop(tp, None) is not None:
            self._finished.append(tp)
            self._patience.progress(now)

    # --- what is not a record

    def _react(self, events: Sequence[Event], *, came: bool) -> None:
        """Go on with what a poll brought besides rows, and with what was asked."""
        if came:
            self._patience.progress(time.monotonic())
        for event in events:
            self._on_event(event)
        if not came:
            self._look_around()
        self._inquire()
        if self._finished and self._left:  # if all is read the client is cleared as a whole
            self._client.drop(self._finished)
        self._finished = []

    def _on_event(self, event: Event) -> None:
        tp = event.tp
        progress = self._left.get(tp) if tp else None
        if progress and progress.state in (State.TORN, State.LATER_LEADER):
            if event.code != EOF:
                self._failures.last_text = event.text
            return
        if event.code == EOF:
            if tp and progress:
                # The log's end: transaction markers and compaction may have moved it past the last record.
                self._advance(tp, progress, event.offset, time.monotonic())
                if tp in self._left:
                    progress.at_eof = True
                    self._doubt(tp)
            return
        self._failed(Request.FETCH, event)
        if tp and progress:
            if event.code in OUT_OF_RANGE or meaning(Request.TOPICS, event.code) is Meaning.GONE or event.code < -1:
                progress.state = State.STOPPED
            if event.code in OUT_OF_RANGE and ("short", tp) not in self._suspicions:
                self._doubt(tp)

    def _failed(self, request: Request, event: Event) -> None:
        self._failures.note(request, event, time.monotonic())

    def _look_around(self) -> None:
        """Nothing came: see whether positions moved without records, ask about the slowest range, mind the deadline."""
        now = time.monotonic()
        for tp, position in self._client.positions(list(self._left)).items():
            progress = self._left[tp]
            if position > progress.position and progress.state not in (State.TORN, State.LATER_LEADER):
                self._patience.progress(now)
                self._advance(tp, progress, position, now)
        if not self._left:
            return
        self._mind_the_deadline()
        if self._failures.needs_fresh_client(now):
            self._try_afresh()
        tp, slowest = min(self._left.items(), key=lambda item: item[1].looked_s)
        if self._inquiry is None and now - slowest.looked_s >= min(TRIAGE_AFTER_S, self._options.deadline_s / 4):
            self._doubt(tp)

    def _try_afresh(self) -> None:
        self._lease.renew()
        self._topics.forget_question()
        self._inquiry = None
        for progress in self._left.values():
            progress.state = State.READING
        self._client.assign([(tp, progress.position) for tp, progress in self._left.items()])

    def _mind_the_deadline(self) -> None:
        now = time.monotonic()
        if self._patience.left_s(now) <= 0 and self._inquiry:
            self._inquiry.note(answered=False)
        if self._patience.left_s(now) <= 0:
            left = [self._rest(tp) for tp in sorted(self._left)]
            held = [rest.tp for rest in left if self._left[rest.tp].held]
            waited_s, last = self._patience.waited_s(now), self._failures.last_text
            raise read_errors.timed_out(self._options.servers, left, waited_s, last, held)

    # --- are the topics the planned ones?

    def _take_answer(self, wait_s: float) -> Told | Event | None:
        """Take in what was answered about topics, if it comes in time."""
        told = self._topics.take(wait_s)
        if isinstance(told, Event):
            self._failed(Request.TOPICS, told)
        elif told is not None:
            self._suspicions.clear((Request.FETCH, None), (Request.TOPICS, None))
            for name, topic in told.items():
                self._judge(name, topic)
        return told

    def _judge(self, name: str, topic: TopicTold) -> None:
        """What metadata says of a topic, against the ranges that are left of it."""
        now = time.monotonic()
        match self._topics.check(name, -math.inf):
            case TopicCheck.GONE:
                if self._suspicions.report(("gone", name), now):
                    self._gone([tp for tp in self._left if tp.topic == name])
            case TopicCheck.OTHER:
                self._suspicions.clear(("gone", name), (Request.TOPICS, name))
                if self._suspicions.report(("other", name), now):
                    self._made_anew(name)
            case TopicCheck.PLANNED:
                self._suspicions.clear(("gone", name), ("other", name), (Request.TOPICS, name))
                missing = [tp for tp in self._left if tp.topic == name and tp.partition >= topic.partitions]
                self._gone([tp for tp in missing if self._suspicions.report(("gone", tp), now)])
            case _:
                self._failed(Request.TOPICS, Event(topic.code, topic.text, TopicPartition(name, 0), -1))

    def _is_suspect(self, tp: TopicPartition) -> bool:
        """Whether it is open if this partition is there, or the planned one."""
        return any(what in self._suspicions for what in (("gone", tp.topic), ("other", tp.topic), ("gone", tp)))

    def _compare(self, topics: set[str]) -> None:
        """Before the first rows of topics: wait until they are known to be the planned ones, or given up."""
        names = self._topics.compared(topics)
        pause = False
        while names := {n for n in names if self._topics.check(n, self._began_s) is not TopicCheck.PLANNED}:
            self._ask_for(names, pause=pause)
            pause = True
            names = {name for name in names if any(tp.topic == name for tp in self._left)}
        self._came_s = time.monotonic()

    def _confirm(self) -> None:
        """After the last rows: were they all of the planned topics? One that is gone by now is no other."""
        pause = False
        while names := self._unconfirmed():
            self._ask_for(names, pause=pause)
            pause = True

    def _unconfirmed(self) -> set[str]:
        confirmed = TopicCheck.PLANNED, TopicCheck.GONE
        names = self._topics.compared(self._read)
        return {name for name in names if self._topics.check(name, self._came_s - PROOF_S) not in confirmed}

    def _ask_for(self, names: set[str], *, pause: bool) -> None:
        """Ask about topics, unless a question is open, and wait for an answer."""
        if not self._topics.is_asked:
            if pause:
                _pause.wait(ASK_PAUSE_S)
            self._topics.ask(self._client, names)
        if (told := self._take_answer(ASK_PAUSE_S)) is not None:
            now = time.monotonic()
            self._patience.asked(now, now, answered=not isinstance(told, Event))
        self._mind_the_deadline()

    # --- is the range still there?

    def _doubt(self, tp: TopicPartition) -> None:
        """Compare a range with what brokers say of it, as soon as no other one is."""
        self._doubtful[tp] = None

    def _inquire(self) -> None:
        """Begin the next inquiry if none is open, and go on with it if answers came."""
        while self._doubtful and self._inquiry is None:
            tp = next(iter(self._doubtful))
            del self._doubtful[tp]
            if tp in self._left:
                self._inquiry = Inquiry(self._client, tp, self._topics, self._patience)
        inquiry = self._inquiry
        if inquiry is None or (inquiry.tp in self._left and not self._is_answered(inquiry)):
            return
        inquiry.end()
        self._inquiry = None
        if progress := self._left.get(inquiry.tp):
            progress.looked_s = time.monotonic()
            if progress.state is not State.READING:
                progress.state, progress.later = State.READING, None
                self._client.move(inquiry.tp, progress.position)

    def _is_answered(self, inquiry: Inquiry) -> bool:
        tp = inquiry.tp
        told = self._take_answer(0.0)
        if inquiry.topic is TopicCheck.UNCHECKED:
            if isinstance(told, Event):
                inquiry.note(answered=False)
            return False
        if tp not in self._left or self._is_suspect(tp):
            inquiry.note(answered=True)
            return True
        bounds = inquiry.bounds()
        if isinstance(bounds, Event):
            self._failed(Request.OFFSETS, bounds)
        elif bounds is not None:
            self._suspicions.clear((Request.OFFSETS, tp.topic))
            progress = self._left[tp]
            if progress.later is not None:
                self._judge_later_leader(tp, progress, progress.later, bounds)
            else:
                self._judge_bounds(tp, progress, bounds)
        return bounds is not None

    def _judge_bounds(self, tp: TopicPartition, progress: Progress, bounds: Bounds) -> None:
        low, high, _ = bounds
        progress.held = progress.at_eof and high >= progress.end
        if low > progress.position:
            self._lost(tp, progress, low, high)
            progress.state = State.STOPPED
        elif high >= progress.end:
            self._suspicions.clear(("short", tp))
        elif self._suspicions.report(("short", tp), time.monotonic()):
            self._lost(tp, progress, low, high)

    def _judge_later_leader(self, tp: TopicPartition, progress: Progress, later: LaterLeader, bounds: Bounds) -> None:
        """Its leader must be as late as the record, else these brokers count in another way."""
        if bounds.leader_epoch < later.epoch:
            progress.epoch = None
        elif self._options.fail_on_data_loss:
            raise read_errors.cut_off(self._rest(tp), later, bounds)
        else:
            self._skip(tp, progress.end, f"the log was cut at {later.offset} or before it: later records follow")

    def _rest(self, tp: TopicPartition) -> OffsetRange:
        return OffsetRange(tp, self._left[tp].position, self._left[tp].end)

    def _gone(self, tps: Sequence[TopicPartition]) -> None:
        """Brokers said it twice: these partitions do not exist."""
        if tps and self._options.fail_on_data_loss:
            raise read_errors.gone(self._rest(tps[0]), self._options.servers, sorted({tp.topic for tp in tps}))
        for tp in tps:
            self._skip(tp, self._left[tp].end, "the partition does not exist any more")

    def _made_anew(self, name: str) -> None:
        """Brokers said it twice: the topic of this name is another one than was planned."""
        fails = self._options.fail_on_data_loss
        if fails or name in self._read:
            # Also when loss is no failure: what was handed over may be the new topic's. Another try begins afresh.
            planned = next(r for r in self._piece.ranges if r.tp.topic == name)
            raise read_errors.made_anew(planned, was_read=name in self._read, fails=fails)
        for tp in [tp for tp in self._left if tp.topic == name]:
            self._skip(tp, self._left[tp].end, "the topic was deleted and made anew")

    def _lost(self, tp: TopicPartition, progress: Progress, low: int, high: int) -> None:
        """Records in the range are gone. Never moves below the planned start: what is there is another log's."""
        if self._options.fail_on_data_loss:
            raise read_errors.records_lost(self._rest(tp), low, high)
        until = min(low, progress.end) if low > progress.position else progress.end
        self._skip(tp, until, f"the log holds [{low},{high})")

    def _skip(self, tp: TopicPartition, until: int, reason: str) -> None:
        progress = self._left[tp]
        self._tally.skip(tp, progress.position, until, reason)
        self._advance(tp, progress, until, time.monotonic())
