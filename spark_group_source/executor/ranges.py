"""Reads offset ranges through a client: what belongs to a range, when it is read to its end, and what was lost.

Runs in: executor workers. Deliberately absent: how records are fetched (a ``Client`` does that), how clients are
made and kept (``fetch``), how often something must be told to be believed (``doubts``), planning.

The end of a range is known by a record at or above it, by a position that reached it (transaction markers and
compacted records move it without a record), or by the log's end; never by waiting for the offset before the end,
which may hold no record.

Before the first rows, and after the last ones unless they came at once, a broker has to say that their topic is the
planned one. Records are fetched and handed over while questions wait. Nothing is lost on a client's word: ``answers``.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from spark_group_source.answers import CODES, Meaning, Request, meaning
from spark_group_source.executor import verdicts
from spark_group_source.executor.client import ANSWER_S_MAX, Client, Lease
from spark_group_source.executor.doubts import Doubts
from spark_group_source.executor.failures import Failures
from spark_group_source.executor.histories import Histories
from spark_group_source.executor.inquiry import Inquiry, bounds_asked
from spark_group_source.executor.patience import Patience
from spark_group_source.executor.progress import Progress, RecordSize, tear
from spark_group_source.executor.questions import NO_ANSWER
from spark_group_source.executor.records import Bounds, Chunk, Cut, Event, Told, TopicTold, bounded
from spark_group_source.executor.tally import Tally
from spark_group_source.executor.topics import Topics
from spark_group_source.model import OffsetRange, TopicPartition

LINGER_S = 0.02
"""How long one poll gathers records before it hands over what came: small enough for a task of a few records."""
TRIAGE_AFTER_S = 1.0
"""A range without progress for this long is asked about, and then again after each further such time."""
PROOF_S = 0.1
"""What was told of a topic's id holds for rows that come so soon after the question: in less, nobody deletes a topic,
makes it anew and fills it to the planned offsets, and librdkafka has not found the new one. A second question would
wait behind a fetch at the log's end, and a small task would take twice as long for it."""
ASK_PAUSE_S = 0.2
"""Between two questions about topics that rows wait for."""

EOF = CODES["_PARTITION_EOF"]
"""Not an error: the end of what can be read of a partition."""
OUT_OF_RANGE = frozenset({CODES["_AUTO_OFFSET_RESET"], CODES["OFFSET_OUT_OF_RANGE"]})
"""librdkafka gave a partition up because the broker has no such offset. Whether that is so, its leader is asked."""
_pause = threading.Event()  # never set: waiting for it lets time pass


class RangeReader:
    """Reads one round: ranges of different partitions, all at once.

    Args:
        lease: the client.
        topic_ids: of the topics as they were planned; one that is missing is not compared.
        leader_epochs: of the leaders that told the ends of the ranges; the same.
        tally: what is read, and what is skipped where loss is no failure.
        deadline_s, silence_s: without any progress for so long, while brokers answer and while not: ReadTimeout.
    """

    def __init__(
        self,
        lease: Lease,
        ranges: Sequence[OffsetRange],
        servers: str,
        *,
        user: str,
        topic_ids: Mapping[str, str],
        leader_epochs: Mapping[TopicPartition, int],
        tally: Tally,
        fail_on_data_loss: bool,
        deadline_s: float,
        silence_s: float,
    ) -> None:
        self._lease, self._ranges = lease, ranges
        self._servers, self._tally = servers, tally
        self._fail_on_data_loss, self._deadline_s = fail_on_data_loss, deadline_s
        self._patience = Patience(deadline_s, silence_s)
        self._left: dict[TopicPartition, Progress] = {}
        self._finished: list[TopicPartition] = []
        self._record_size = RecordSize()
        self._doubts = Doubts()
        self._failures = Failures(servers, user, self._doubts)
        self._topics, self._histories = Topics(topic_ids), Histories(leader_epochs)
        self._read: set[str] = set()  # topics of which rows were handed over
        self._began_s = self._came_s = 0.0
        self._inquiry: Inquiry | None = None

    @property
    def _client(self) -> Client:
        return self._lease.client

    def batches(self, include_headers: bool) -> Iterator[pa.RecordBatch]:
        now = self._began_s = time.monotonic()
        self._patience.progress(now)
        self._left = {r.tp: Progress(r.start, r.end, now) for r in self._ranges}
        if names := self._topics.compared({tp.topic for tp in self._left}):
            self._topics.ask(self._client, names)  # the answer is here when the first rows are
        self._client.assign([(r.tp, r.start) for r in self._ranges])
        while self._left:
            left = sum(p.end - p.position for p in self._left.values())
            chunk = self._client.poll(self._record_size.rows_max(left), min(LINGER_S, self._deadline_s))
            try:
                tear(self._left, chunk.events)
                self._compare(chunk)
                cuts = self._accept(chunk)
                if not self._left and (names := self._unconfirmed()):
                    self._topics.ask(self._client, names)  # the answer is here after the hand-over
                if cuts and include_headers:
                    chunk.count_headers()
                self._record_size.see(chunk.sizes)
                for group in bounded(cuts, chunk.sizes):
                    yield chunk.batch(group, include_headers)
                events = list(chunk.events)
            finally:
                chunk.free()
            if cuts:
                self._patience.progress(time.monotonic())
            for event in events:
                self._on_event(event)
            if not cuts:
                self._look_around()
            if self._inquiry:
                self._inquire(self._inquiry)
            for tp in [tp for tp in self._histories.strangers if tp in self._left]:
                self._judge_stranger(tp, self._left[tp])
            self._drop_finished()
        self._confirm()

    def _accept(self, chunk: Chunk) -> list[Cut]:
        """Cut each run to its plan and note how far it came. A record at or above the end proves the range read."""
        cuts: list[Cut] = []
        now = time.monotonic()
        for run in chunk.runs:
            progress = self._left.get(run.tp)
            if progress is None or progress.torn or run.tp in self._histories.strangers:
                continue  # ahead of a range that is finished, behind what is fetched again, or not what was planned
            first, last = np.searchsorted(run.offsets, (progress.position, progress.end)).tolist()
            planned = self._histories.planned(chunk, run, first, last)
            if first < planned:
                cuts.append(Cut(run.tp, run.first + first, run.first + planned))
                self._read.add(run.tp.topic)
                self._tally.brokers[run.tp] += planned - first
            reached = run.offsets[-1] + 1 if planned == last else run.offsets[planned]
            self._advance(run.tp, progress, int(reached), now)
        return cuts

    def _advance(self, tp: TopicPartition, progress: Progress, position: int, now: float) -> None:
        if position > progress.position:
            progress.position, progress.looked_s = position, now
            progress.stopped = progress.at_eof = progress.held = False
            self._doubts.forget(("short", tp), (Request.FETCH, tp.topic), (Request.FETCH, None))
            self._failures.forget_refusals()
        if progress.position >= progress.end and self._left.pop(tp, None) is not None:
            self._finished.append(tp)
            self._patience.progress(now)

    def _drop_finished(self) -> None:
        """Stop fetching past the ends, unless all is read: the client is then cleared as a whole."""
        if self._finished and self._left:
            self._client.drop(self._finished)
        self._finished = []

    # --- are the topics the planned ones?

    def _await_answer(self, wait_s: float) -> Told | Event | None:
        """Take in what was told of topics, if it comes in time."""
        told = self._topics.take(wait_s)
        if isinstance(told, Event):
            self._failed(Request.TOPICS, told)
        elif told is not None:
            self._doubts.forget((Request.FETCH, None), (Request.TOPICS, None))
            for name, topic in told.items():
                self._judge(name, topic)
        return told

    def _judge(self, name: str, topic: TopicTold) -> None:
        """What metadata says of a topic, against the ranges that are left of it."""
        now = time.monotonic()
        verdict = meaning(Request.TOPICS, topic.code)
        if verdict is Meaning.GONE:
            if self._doubts.hear(("gone", name), now):
                self._gone([tp for tp in self._left if tp.topic == name])
            return
        if verdict is not Meaning.GOOD:
            self._failed(Request.TOPICS, Event(topic.code, topic.text, TopicPartition(name, 0), -1))
            return
        self._doubts.forget(("gone", name), (Request.TOPICS, name))
        if self._topics.is_other(name, topic):
            if self._doubts.hear(("other", name), now):
                self._made_anew(name)
            return
        self._doubts.forget(("other", name))
        missing = [tp for tp in self._left if tp.topic == name and tp.partition >= topic.partitions]
        self._gone([tp for tp in missing if self._doubts.hear(("gone", tp), now)])

    def _doubted(self, tp: TopicPartition) -> bool:
        """Whether it is open if this partition is there, or the planned one."""
        topic = tp.topic
        return any(self._doubts.since_s(what) is not None for what in (("gone", topic), ("other", topic), ("gone", tp)))

    def _compare(self, chunk: Chunk) -> None:
        """Before the first rows of a topic: wait until it is known to be the planned one, or given up."""
        names = self._topics.compared({run.tp.topic for run in chunk.runs if run.tp in self._left})
        pause = False
        while names := {name for name in names if not self._topics.is_planned(name, self._began_s)}:
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
        since_s = self._came_s - PROOF_S
        return {name for name in self._topics.compared(self._read) if not self._topics.was_planned(name, since_s)}

    def _ask_for(self, names: set[str], *, pause: bool) -> None:
        """Ask about topics, unless a question is on its way, and wait for an answer."""
        if not self._topics.is_asked:
            if pause:
                _pause.wait(ASK_PAUSE_S)
            self._topics.ask(self._client, names)
        if (told := self._await_answer(ASK_PAUSE_S)) is not None:
            now = time.monotonic()
            self._patience.asked(now, now, answered=not isinstance(told, Event))
        self._mind_the_deadline()

    # --- what is not a record

    def _on_event(self, event: Event) -> None:
        tp = event.tp
        progress = self._left.get(tp) if tp else None
        if event.code == EOF:
            if tp and progress and not progress.torn:
                self._on_eof(tp, progress, event.offset)
            return
        if progress and progress.torn:
            self._failures.last_text, progress.stopped = event.text, True
            return
        self._failed(Request.FETCH, event)
        if tp and progress:
            if event.code in OUT_OF_RANGE or meaning(Request.TOPICS, event.code) is Meaning.GONE or event.code < -1:
                progress.stopped = True
            known_short = self._doubts.since_s(("short", tp)) is not None
            if event.code in OUT_OF_RANGE and not known_short:
                self._triage(tp, progress)

    def _failed(self, request: Request, event: Event) -> None:
        self._failures.hear(request, event, time.monotonic())

    def _on_eof(self, tp: TopicPartition, progress: Progress, offset: int) -> None:
        """The log's end: transaction markers and compaction may have moved the position past the last record."""
        self._advance(tp, progress, offset, time.monotonic())
        if tp in self._left:
            progress.at_eof = True
            self._triage(tp, progress)

    def _look_around(self) -> None:
        """Nothing came: see whether positions moved without records, ask about the slowest range, mind the deadline."""
        now = time.monotonic()
        for tp, position in self._client.positions(list(self._left)).items():
            progress = self._left[tp]
            if position > progress.position and not progress.torn and tp not in self._histories.strangers:
                self._patience.progress(now)
                self._advance(tp, progress, position, now)
        if not self._left:
            return
        self._mind_the_deadline()
        if self._failures.needs_fresh_client(now):
            self._try_afresh()
        slowest = min(self._left.items(), key=lambda item: item[1].looked_s)
        if self._inquiry is None and now - slowest[1].looked_s >= min(TRIAGE_AFTER_S, self._deadline_s / 4):
            self._triage(*slowest)

    def _try_afresh(self) -> None:
        self._lease.renew()
        self._topics.forget_question()
        self._inquiry = None
        self._client.assign([(tp, progress.position) for tp, progress in self._left.items()])

    def _mind_the_deadline(self) -> None:
        now = time.monotonic()
        if self._patience.left_s(now) <= 0 and self._inquiry:
            self._inquiry.heard(answered=False)
        if self._patience.left_s(now) <= 0:
            left = [self._rest(tp) for tp in sorted(self._left)]
            held = [rest.tp for rest in left if self._left[rest.tp].held]
            raise verdicts.timed_out(self._servers, left, self._patience.waited_s(now), self._failures.last_text, held)

    # --- is the range still there?

    def _triage(self, tp: TopicPartition, progress: Progress) -> None:
        """Compare a range with what brokers say of it, as soon as no other one is."""
        if self._inquiry is None:
            self._inquiry = Inquiry(self._client, tp, self._topics, self._patience)
        else:
            progress.looked_s = 0.0

    def _inquire(self, inquiry: Inquiry) -> None:
        """Go on with it, if answers came."""
        tp = inquiry.tp
        if tp in self._left and not self._is_answered(inquiry):
            return
        inquiry.end()
        self._inquiry = None
        if progress := self._left.get(tp):
            progress.looked_s = time.monotonic()
        if progress and progress.stopped:
            progress.stopped = progress.torn = False
            self._client.move(tp, progress.position)

    def _is_answered(self, inquiry: Inquiry) -> bool:
        tp = inquiry.tp
        told = self._await_answer(0.0)
        if not inquiry.topic_is_told:
            if isinstance(told, Event):
                inquiry.heard(answered=False)
            return False
        if tp not in self._left or self._doubted(tp):
            inquiry.heard(answered=True)
            return True
        bounds = inquiry.bounds()
        if isinstance(bounds, Event):
            self._failed(Request.OFFSETS, bounds)
        elif bounds is not None:
            self._compare_bounds(tp, self._left[tp], bounds)
        return bounds is not None

    def _compare_bounds(self, tp: TopicPartition, progress: Progress, bounds: Bounds) -> None:
        self._doubts.forget((Request.OFFSETS, tp.topic))
        low, high, _ = bounds
        progress.held = progress.at_eof and high >= progress.end
        if low > progress.position:
            self._lost(tp, progress, low, high)
            progress.stopped = True
        elif high >= progress.end:
            self._doubts.forget(("short", tp))
        elif self._doubts.hear(("short", tp), time.monotonic()):
            self._lost(tp, progress, low, high)

    def _judge_stranger(self, tp: TopicPartition, progress: Progress) -> None:
        """A record of a later leader than the plan's: its leader must be that late as well, else they say nothing."""
        stranger = self._histories.strangers.pop(tp)
        asking = bounds_asked(self._client, tp)
        taken = asking.take(max(0.1, min(ANSWER_S_MAX, self._deadline_s)))
        asking.give_up()
        bounds = taken[0] if taken else Event(NO_ANSWER, "no answer in time", tp, -1)
        if isinstance(bounds, Event):
            self._failed(Request.OFFSETS, bounds)
            self._mind_the_deadline()
        elif bounds.leader_epoch < stranger.epoch:
            self._histories.distrust(tp)
        elif self._fail_on_data_loss:
            epochs = stranger.epoch, bounds.leader_epoch
            raise verdicts.cut_off(self._rest(tp), stranger.offset, epochs, bounds[:2])
        else:
            self._skip(tp, progress.end, f"the log was cut at {stranger.offset} or before it: later records follow")
            return
        self._client.move(tp, progress.position)

    def _rest(self, tp: TopicPartition) -> OffsetRange:
        return OffsetRange(tp, self._left[tp].position, self._left[tp].end)

    def _gone(self, tps: Sequence[TopicPartition]) -> None:
        """Brokers said it twice: these partitions do not exist."""
        if tps and self._fail_on_data_loss:
            raise verdicts.gone(self._rest(tps[0]), self._servers, sorted({tp.topic for tp in tps}))
        for tp in tps:
            self._skip(tp, self._left[tp].end, "the partition does not exist any more")

    def _made_anew(self, name: str) -> None:
        """Brokers said it twice: the topic of this name is another one than was planned."""
        if self._fail_on_data_loss or name in self._read:
            # Also when loss is no failure: what was handed over may be the new topic's. Another try begins afresh.
            planned = next(r for r in self._ranges if r.tp.topic == name)
            raise verdicts.made_anew(planned, was_read=name in self._read, fails=self._fail_on_data_loss)
        for tp in [tp for tp in self._left if tp.topic == name]:
            self._skip(tp, self._left[tp].end, "the topic was deleted and made anew")

    def _lost(self, tp: TopicPartition, progress: Progress, low: int, high: int) -> None:
        """Records in the range are gone. Never moves below the planned start: what is there is another log's."""
        if self._fail_on_data_loss:
            raise verdicts.records_lost(self._rest(tp), low, high)
        until = min(low, progress.end) if low > progress.position else progress.end
        self._skip(tp, until, f"the log holds [{low},{high})")

    def _skip(self, tp: TopicPartition, until: int, reason: str) -> None:
        progress = self._left[tp]
        self._tally.skip(tp, progress.position, until, reason)
        self._advance(tp, progress, until, time.monotonic())
