"""What the brokers say about the partitions of the next batch, and what of it means that records are gone.

Runs in: the stream reader, tests. Deliberately absent: asking (the shell answers :class:`ReadLogEnds`), and the loss of
records while a task reads them (``executor``).

A look has up to three rounds: how far the partitions can be read; then, where something changed or came, the topics'
ids, the first records of those that came, the ends of the logs behind positions that lie beyond them, and what new
leaders have of what was read (:class:`LeaderEpochs`); then where a topic begins that was made again. What is missing
from an answer, and an end that went back, is a *suspicion*: a broker that just started, or a new leader, says the same
for a moment. It counts when it was heard again after :data:`GRACE_MS`. A topic is asked for that long also when its
partitions have left us: the members of a group give up those of a deleted topic.
"""

from collections.abc import Generator, Mapping
from typing import NamedTuple

from spark_group_source.error_codes import Suspicions
from spark_group_source.errors import DataLoss, GroupError, TopicMissing
from spark_group_source.model import TopicPartition
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.offsets import StreamOffset

GRACE_MS = 2_000
"""How long a topic must be missing, or a log be shorter than what was read of it, before that is believed."""

SILENT_MS_MAX = 10_000
"""How long the end of a partition may not be told, while others are, before that is said."""

Numbers = Mapping[TopicPartition, int]
Look = Generator[ev.ReadLogEnds, ev.LogEndsRead, None]


class DataLossDetector:
    """Looks, one after the other, of one run."""

    def __init__(self, *, fail_on_data_loss: bool) -> None:
        self._fail = fail_on_data_loss
        self.topic_ids: dict[str, str] = {}
        self.reset_number = 0
        self.ends: Numbers = {}
        """The ends seen last, of all partitions that were asked for; who is missing was not answered."""
        self.records_lost = 0
        """Offsets that were still to be read and are gone, as far as planning met them."""
        self.heights = LeaderEpochs()
        # --- of the last look
        self.took_ms = 0
        """How long its questions took together."""
        self.warnings: list[str] = []
        self.error: GroupError | None = None
        """What the run ends with, under failOnDataLoss."""
        self._look: Look | None = None
        self._positions: Numbers = {}
        self._now_ms = 0
        self._told: Numbers = {}  # the leader epochs that came with the ends
        self._gone: dict[TopicPartition, int] = {}
        self._cut: set[TopicPartition] = set()  # those of them whose log was cut
        self._renewed: set[str] = set()  # topics that were made again, and whose beginnings were told
        self._reason = ""
        # --- kept from look to look
        self._seen: Numbers = {}  # the last ends that leaders of known epochs told
        self._left: set[str] = set()  # topics whose partitions have all left us since the last question about topics
        self._checked: set[TopicPartition] = set()
        self._missing = Suspicions(GRACE_MS)  # topics
        self._short = Suspicions(GRACE_MS)  # partitions whose log ends below what was read
        self._cut_below = Suspicions(GRACE_MS)  # partitions whose log was cut below what was read
        self._silent_ms: dict[TopicPartition, int] = {}  # partitions whose end is not told, and since when
        self._silence_said = False
        self._said: set[str] = set()

    def adopt(self, offset: StreamOffset) -> None:
        """Go on from a checkpoint."""
        self.heights.remember(offset)
        self.topic_ids = {topic: id_ for topic, id_ in offset.topic_ids.items() if id_}
        self.reset_number = offset.reset_number

    def begin(self, positions: Numbers, now_ms: int, reset_number: int = 0) -> ev.ReadLogEnds:
        """Start a look at these partitions. Returns the first question.

        Args:
            reset_number: the number of the group's last reset. After a further one all positions belong to the
                present topics: Kafka deletes a topic's committed offsets with the topic.
        """
        if reset_number != self.reset_number:
            self.heights.forget(set(self.topic_ids))
            self.reset_number, self.topic_ids, self._checked = reset_number, {}, set()
        self._left = (self._left | {tp.topic for tp in self._positions}) - {tp.topic for tp in positions}
        self._positions, self._now_ms, self.took_ms = positions, now_ms, 0
        self.error, self.warnings = None, []
        self._gone, self._cut, self._renewed, self._reason = {}, set(), set(), ""
        self._checked.intersection_update(positions)  # what comes back is looked at like what comes
        self._short.keep(positions)
        self._cut_below.keep(positions)
        self._look = self._rounds()
        return next(self._look)

    def take(self, answer: ev.LogEndsRead) -> ev.ReadLogEnds | None:
        """The answer to the question before. Returns the next question, or None when the look is complete."""
        assert self._look is not None
        self.took_ms += answer.took_ms
        try:
            return self._look.send(answer)
        except StopIteration:
            return None

    @property
    def suspects(self) -> bool:
        """Whether something may be gone, and it is too early to say."""
        return any(of.is_open(self._now_ms) for of in (self._missing, self._short, self._cut_below))

    @property
    def complete(self) -> bool:
        """Whether the end of every partition was told, but for topics that do not exist any more."""
        return all(tp in self.ends or tp.topic in self._missing for tp in self._positions)

    @property
    def gone(self) -> ev.RecordsMissing | None:
        """Where partitions go on whose records are gone."""
        if not self._gone:
            return None
        return ev.RecordsMissing(
            offsets=self._gone, reason=self._reason, topics=tuple(sorted(self._renewed)), truncated=frozenset(self._cut)
        )

    def leader_epochs(self, positions: Numbers) -> dict[TopicPartition, int]:
        """Those to be written down with a plan from these positions."""
        return self.heights.at_ends(positions, self.ends, self._told)

    # --- one look ---------------------------------------------------------------------------------------------------

    def _rounds(self) -> Look:
        former_ends = self.ends
        answer = yield ev.ReadLogEnds(ends=tuple(self._positions))
        self.ends, self._told = answer.ends, answer.leader_epochs
        doubtful = self.heights.doubtful(self._positions, self._told)
        kept = {tp: self._seen[tp] for tp in doubtful if tp in self._seen}
        self._seen = {**self.ends, **kept} if kept else self.ends
        self._note_silence()

        fresh = tuple(tp for tp in self._positions if tp not in self._checked)
        suspects = self._missing or self._short or self._left
        if not fresh and self.ends == self._positions and not suspects and not doubtful:
            return
        topics = tuple(sorted({tp.topic for tp in self._positions} | {*map(str, self._missing)} | self._left))
        if not topics:
            return
        beyond = tuple(tp for tp, at in self._positions.items() if at > self.ends.get(tp, at))
        firsts = tuple(dict.fromkeys((*fresh, *doubtful)))
        answer = yield ev.ReadLogEnds(epoch_ends=doubtful, topics=topics, firsts=firsts, log_ends=beyond)
        self._judge_topics(answer.topic_ids)
        # brokers before 2.8 have no ids
        ours = {tp.topic for tp in self._positions}
        ids = {name: id_ for name, id_ in answer.topic_ids.items() if id_ and name in ours}
        again = {name: id_ for name, id_ in ids.items() if self.topic_ids.get(name, id_) != id_}
        self._prove([tp for tp in doubtful if tp.topic in answer.topic_ids and tp.topic not in again], answer)
        if not again:
            self.topic_ids.update(ids)
            self._aged_out(answer.firsts)
            self._shrunk(answer)
            return

        unread = [tp for tp in self._positions if tp.topic in again]
        self.records_lost += sum(max(0, former_ends.get(tp, 0) - self._positions[tp]) for tp in unread)
        self._reason = f"topic {min(again)} was deleted and made again: its former records are gone"
        self._lost(unread[0], self._reason, available=self.ends.get(unread[0], 0))
        if self.error is None:
            answer = yield ev.ReadLogEnds(firsts=tuple(unread))
            self._made_again(again, answer.firsts)

    def _note_silence(self) -> None:
        """A partition without a leader waits, and the others are read. The log says so when it begins and ends."""
        silent = [tp for tp in self._positions if tp not in self.ends and tp.topic not in self._missing]
        self._silent_ms = {tp: self._silent_ms.get(tp, self._now_ms) for tp in silent}
        late = [tp for tp, since_ms in self._silent_ms.items() if self._now_ms - since_ms >= SILENT_MS_MAX]
        if late and not self._silence_said:
            self._silence_said = True
            self.warnings.append(
                f"no broker tells where {len(late)} partitions end, such as {min(late)}: they wait for their leader, "
                "the others are read"
            )
        elif self._silence_said and not silent:
            self._silence_said = False
            self.warnings.append("the end of every partition is told again")

    def _judge_topics(self, there: Mapping[str, str]) -> None:
        """Which topics are missing. Nothing is read of those in this batch: their ends may be of others."""
        ours = {tp.topic for tp in self._positions}
        for name in sorted((ours | {*map(str, self._missing)} | self._left) - there.keys()):
            if self._missing.report(name, self._now_ms):
                self._topic_is_gone(name)
                if name not in ours:
                    self._missing.clear(name)
        self._left = set()
        self.ends = {tp: end for tp, end in self.ends.items() if tp.topic in there}
        self._missing.clear(*there)

    def _made_again(self, again: Mapping[str, str], firsts: Numbers) -> None:
        # One whose beginnings were not all told keeps its former id, and is not read: the next look asks again.
        silent = {tp.topic for tp in self._positions if tp.topic in again and tp not in firsts}
        self.ends = {tp: end for tp, end in self.ends.items() if tp.topic not in silent}
        self._renewed = again.keys() - silent
        self.topic_ids.update({name: again[name] for name in self._renewed})
        self.heights.forget(self._renewed)
        self._gone = {tp: at for tp, at in firsts.items() if tp.topic in self._renewed}
        self._reason = f"{self._reason}; its new ones follow"

    def _aged_out(self, firsts: Numbers) -> None:
        """Is the position of a partition that came still in the log? Later losses show while reading."""
        for tp, first in firsts.items():
            at = self._positions[tp]
            if at < first and tp not in self._gone:
                self._lost(tp, f"the records of {tp} from {at} on are gone: it begins at {first} now", available=first)
                self._gone[tp] = first
                self.records_lost += first - at
        self._checked = {tp for tp in self._positions if tp in self._checked or tp in firsts}
        where = "where their logs were cut, or " if self._cut else ""
        self._reason = f"{len(self._gone)} partitions go on {where}at their first record that is left"

    def _prove(self, tps: list[TopicPartition], answer: ev.LogEndsRead) -> None:
        """Positions whose leader is another one than when they were planned: does it have what was read?"""
        unproven = set()
        for tp in tps:
            at, end = self._positions[tp], answer.epoch_ends.get(tp)
            if tp not in answer.epoch_ends or tp not in answer.firsts:
                unproven.add(tp)
            elif end is None or end >= at:
                self._cut_below.clear(tp)
                self.heights.proven(tp, at, self._told[tp])
            elif not self._cut_below.report(tp, self._now_ms):
                unproven.add(tp)
            else:
                self._was_cut(tp, at, max(end, answer.firsts[tp]), answer.log_ends.get(tp, self.ends[tp]))
        self.ends = {tp: end for tp, end in self.ends.items() if tp not in unproven} if unproven else self.ends

    def _was_cut(self, tp: TopicPartition, at: int, end: int, log_end: int) -> None:
        text = (
            f"the log of {tp} was cut at {end}, below the position {at}: a leader was elected that did not have the "
            f"records from there on. It ends at {log_end} now, with other records, none of which was read"
        )
        self._lost(tp, text, available=end)
        if self.error is None:
            self.records_lost += max(0, self._seen.get(tp, at) - at)
            self._gone[tp] = end
            self._cut.add(tp)
            self._cut_below.clear(tp)
            self.heights.proven(tp, end, self._told[tp])

    def _shrunk(self, answer: ev.LogEndsRead) -> None:
        for tp, at in self._positions.items():
            end = max(self.ends.get(tp, -1), answer.log_ends.get(tp, -1))
            if end >= at or tp in self._gone or tp in self._cut_below:
                self._short.clear(tp)
            elif tp in answer.log_ends and self._short.report(tp, self._now_ms):
                text = f"{tp} ends at {end}, before the position {at}: its last records were lost"
                if text not in self._said:
                    self._said.add(text)
                    self._lost(tp, text, available=end)

    # --- what is believed -------------------------------------------------------------------------------------------

    def _topic_is_gone(self, name: str) -> None:
        text = f"topic {name} does not exist any more"
        if self._fail:
            self.error = TopicMissing(
                f"{text}. Take it out of the subscription, or set failOnDataLoss to false to go on without it",
                topics=[name],
            )
        elif text not in self._said:
            self._said.add(text)
            self.warnings.append(f"{text}; the query goes on without it")

    def _lost(self, tp: TopicPartition, text: str, *, available: int) -> None:
        if not self._fail:
            self.warnings.append(f"data loss: {text}")
            return
        self.error = self.error or data_loss(tp, text, expected=self._positions[tp], available=available)


def data_loss(tp: TopicPartition, text: str, *, expected: int, available: int) -> DataLoss:
    """What a run ends with under failOnDataLoss, whether a lookup or a look at the brokers shows it."""
    return DataLoss(
        f"{text}. Set failOnDataLoss to false to go on with the records that are left",
        topic=tp.topic,
        partition=tp.partition,
        expected=expected,
        available=available,
    )


class _Known(NamedTuple):
    until: int
    epoch: int


class LeaderEpochs:
    """Whether the log below a position is still the one that was read: up to where each is known to be that of a leader
    epoch (KIP-320).

    Every leader of a partition has a number, the *leader epoch*, and every record that of the leader that wrote it. A
    leader that was elected without having all records (an unclean election), or that lost some with its disk, goes on
    at the end of what it has: the log is *cut* there. When it has grown again its end tells nothing of that. Its epochs
    do: whatever lies below an end that was told under epoch E was written under E or before, and a leader can say where
    such records end now. Where that is below a position, the position's log was cut there, and what stands from there
    on is other records than those that were read. Only who was elected anew can have cut a log, so it is asked only
    where the leader epoch is another one than that of the position.

    The epoch of a position is not that of its last record, as a consumer has it: planning sees no records. It is that
    of the leader that told how far could be read. This one had every record below, and may have written none of them.
    """

    def __init__(self) -> None:
        self._known: dict[TopicPartition, _Known] = {}

    def remember(self, offset: StreamOffset) -> None:
        """A plan, also a former run's: its ends were told under its leader epochs."""
        epochs = offset.leader_epochs
        for tp, (_, until) in offset.ranges.items():
            if (epoch := epochs.get(tp)) is None:
                self._known.pop(tp, None)
            else:
                self._known[tp] = _Known(until, epoch)

    def proven(self, tp: TopicPartition, at: int, epoch: int) -> None:
        """A leader of this epoch has everything below ``at`` that was read."""
        self._known[tp] = _Known(at, epoch)

    def forget(self, topics: frozenset[str] | set[str]) -> None:
        """Topics that were made again: their epochs begin anew."""
        self._known = {tp: known for tp, known in self._known.items() if tp.topic not in topics}

    def epoch(self, tp: TopicPartition, at: int) -> int | None:
        """The leader epoch under which, or before which, everything below ``at`` was written; None if nobody told."""
        known = self._known.get(tp)
        return known.epoch if known is not None and at <= known.until else None

    def doubtful(self, positions: Numbers, leader_epochs: Numbers) -> dict[TopicPartition, int]:
        """The positions below which the log may be another one: their epochs, to ask their leaders for."""
        found = {}
        for tp, leader in leader_epochs.items():
            known = self._known.get(tp)
            if known is not None and known.epoch != leader and tp in positions and positions[tp] <= known.until:
                found[tp] = known.epoch
        return found

    def at_ends(self, positions: Numbers, ends: Numbers, leader_epochs: Numbers) -> dict[TopicPartition, int]:
        """The epochs to write down with a plan from these positions, up to these ends."""
        found = {}
        for tp, at in positions.items():
            epoch = leader_epochs.get(tp) if ends.get(tp, -1) >= at else self.epoch(tp, at)
            if epoch is not None:
                found[tp] = epoch
        return found
