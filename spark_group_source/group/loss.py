"""What the brokers say about the partitions of the next batch, and what of it means that records are gone.

Runs in: the stream reader, tests. Deliberately absent: asking (the shell answers :class:`Look`), and the loss of
records while a task reads them (``executor``).

A look has up to three rounds: how far the partitions can be read; then, where something changed or came, the topics'
ids, the first records of those that came, the ends of the logs behind positions that lie beyond them, and what new
leaders have of what was read (:mod:`cuts`); then where a topic begins that was made again. What is missing from an
answer, and an end that went back, is a *suspicion*: a broker that just started, or a new leader, says the same for a
moment. It counts when it was heard again after :data:`GRACE_MS`. A topic is asked for that long also when its
partitions have left us: the members of a group give up those of a deleted topic.
"""

from collections.abc import Mapping
from typing import TypeVar

from spark_group_source.errors import DataLoss, GroupError, TopicMissing
from spark_group_source.group import events as ev
from spark_group_source.group.cuts import Heights
from spark_group_source.model import TopicPartition

GRACE_MS = 2_000
"""How long a topic must be missing, or a log be shorter than what was read of it, before that is believed."""

SILENT_MS_MAX = 10_000
"""How long the end of a partition may not be told, while others are, before that is said."""

K = TypeVar("K")


class Lookout:
    """Looks, one after the other, of one run."""

    def __init__(self, *, fail_on_data_loss: bool) -> None:
        self._fail = fail_on_data_loss
        self.topic_ids: dict[str, str] = {}
        self.epoch = 0
        self.ends: Mapping[TopicPartition, int] = {}
        """The ends seen last, of all partitions that were asked for; who is missing was not answered."""
        self.records_lost = 0
        """Offsets that were still to be read and are gone, as far as planning met them."""
        self.warnings: list[str] = []
        """What to say of the last look."""
        self.heights = Heights()
        self._positions: Mapping[TopicPartition, int] = {}
        self._former_ends: Mapping[TopicPartition, int] = {}  # of the look before
        self._checked: set[TopicPartition] = set()
        self._missing_ms: dict[str, int] = {}  # topics that are missing, and since when
        self._short_ms: dict[TopicPartition, int] = {}  # partitions whose log is short, and since when
        self._cut_ms: dict[TopicPartition, int] = {}  # partitions whose log was cut below what was read, and since when
        self._silent_ms: dict[TopicPartition, int] = {}  # partitions whose end is not told, and since when
        self._silence_said = False
        self._said: set[str] = set()
        self._round = 0
        self._now_ms = self._took_ms = 0
        self._left: set[str] = set()  # topics whose partitions have all left us since the last question about topics
        self._again: dict[str, str] = {}  # topics that were made again, and their new ids
        self._renewed: set[str] = set()  # those whose beginnings were told
        self._error: GroupError | None = None
        self._gone: dict[TopicPartition, int] = {}
        self._cut: set[TopicPartition] = set()  # those of them whose log was cut
        self._reason = ""
        self._told: Mapping[TopicPartition, int] = {}  # the leader epochs of this look
        self._doubtful: dict[TopicPartition, int] = {}
        self._seen: Mapping[TopicPartition, int] = {}  # the last ends that leaders of known epochs told

    def begin(self, positions: Mapping[TopicPartition, int], now_ms: int, epoch: int = 0) -> ev.Look:
        """Start a look at these partitions. Returns the first question.

        Args:
            epoch: the last reset of the group, if it was ever reset. Its positions are of the topics that are there
                now, whichever these are: Kafka deletes what was committed of a topic with it.
        """
        if epoch != self.epoch:
            self.heights.forget(set(self.topic_ids))
            self.epoch, self.topic_ids, self._checked = epoch, {}, set()
        self._left = (self._left | {tp.topic for tp in self._positions}) - {tp.topic for tp in positions}
        self._positions, self._now_ms, self._took_ms, self._round = positions, now_ms, 0, 1
        self._error, self._gone, self._reason, self._again, self.warnings = None, {}, "", {}, []
        self._renewed, self._cut = set(), set()
        self._checked.intersection_update(positions)  # what comes back is looked at like what comes
        self._short_ms = {tp: since_ms for tp, since_ms in self._short_ms.items() if tp in positions}
        self._cut_ms = {tp: since_ms for tp, since_ms in self._cut_ms.items() if tp in positions}
        return ev.Look(ends=tuple(positions))

    def take(self, answer: ev.Looked) -> ev.Look | None:
        """The answer to the question before. Returns the next question, or None when the look is complete."""
        self._took_ms += answer.took_ms
        self._round += 1
        if self._round == 2:
            self._former_ends, self.ends, self._told = self.ends, answer.ends, answer.leader_epochs
            self._doubtful = self.heights.doubtful(self._positions, self._told)
            kept = {tp: self._seen[tp] for tp in self._doubtful if tp in self._seen}
            self._seen = {**self.ends, **kept} if kept else self.ends
            self._note_silence()
            return self._second_question()
        if self._round == 3:
            return self._judge(answer)
        self._made_again(answer.firsts)
        return None

    @property
    def took_ms(self) -> int:
        return self._took_ms

    @property
    def suspects(self) -> bool:
        """Whether something may be gone, and it is too early to say."""
        since = (*self._missing_ms.values(), *self._short_ms.values(), *self._cut_ms.values())
        return any(self._now_ms - since_ms < GRACE_MS for since_ms in since)

    @property
    def complete(self) -> bool:
        """Whether the end of every partition was told, but for topics that do not exist any more."""
        return all(tp in self.ends or tp.topic in self._missing_ms for tp in self._positions)

    @property
    def error(self) -> GroupError | None:
        """What the run ends with, under failOnDataLoss."""
        return self._error

    @property
    def gone(self) -> ev.RecordsGone | None:
        """Where partitions go on whose records are gone."""
        if not self._gone:
            return None
        return ev.RecordsGone(
            offsets=self._gone, reason=self._reason, topics=tuple(sorted(self._renewed)), cut=frozenset(self._cut)
        )

    def leader_epochs(self, positions: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Those to be written down with a plan from these positions."""
        return self.heights.at_ends(positions, self.ends, self._told)

    # --- the rounds -------------------------------------------------------------------------------------------------

    def _note_silence(self) -> None:
        """A partition without a leader waits, and the others are read. The log says so when it begins and ends."""
        silent = [tp for tp in self._positions if tp not in self.ends and tp.topic not in self._missing_ms]
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

    def _second_question(self) -> ev.Look | None:
        fresh = tuple(tp for tp in self._positions if tp not in self._checked)
        suspects = self._missing_ms or self._short_ms or self._left
        if not fresh and self.ends == self._positions and not suspects and not self._doubtful:
            return None
        beyond = tuple(tp for tp, at in self._positions.items() if at > self.ends.get(tp, at))
        topics = tuple(sorted({tp.topic for tp in self._positions} | self._missing_ms.keys() | self._left))
        firsts = tuple(dict.fromkeys((*fresh, *self._doubtful)))
        return ev.Look(epoch_ends=self._doubtful, topics=topics, firsts=firsts, log_ends=beyond) if topics else None

    def _judge(self, answer: ev.Looked) -> ev.Look | None:
        ours = {tp.topic for tp in self._positions}
        for name in sorted((ours | self._missing_ms.keys() | self._left) - answer.topic_ids.keys()):
            self._suspect_topic(name)
            if name not in ours and self._believed(self._missing_ms, name):
                del self._missing_ms[name]
        self._left = set()
        # Whether these ends are of the topic that it knows was not told, so nothing of it is read in this batch.
        self.ends = {tp: end for tp, end in self.ends.items() if tp.topic in answer.topic_ids}
        self._missing_ms = {name: ms for name, ms in self._missing_ms.items() if name not in answer.topic_ids}
        # brokers before 2.8 have no ids
        ids = {name: id_ for name, id_ in answer.topic_ids.items() if id_ and name in ours}
        again = {name: id_ for name, id_ in ids.items() if self.topic_ids.get(name, id_) != id_}
        self._prove([tp for tp in self._doubtful if tp.topic in answer.topic_ids and tp.topic not in again], answer)
        if again:
            return self._topics_made_again(again)
        self.topic_ids.update(ids)
        self._aged_out(answer.firsts)
        self._shrunk(answer)
        return None

    def _topics_made_again(self, again: dict[str, str]) -> ev.Look | None:
        name = min(again)
        self._again = again
        unread = (tp for tp in self._positions if tp.topic in again)
        self.records_lost += sum(max(0, self._former_ends.get(tp, 0) - self._positions[tp]) for tp in unread)
        self._reason = f"topic {name} was deleted and made again: its former records are gone"
        tp = next(tp for tp in self._positions if tp.topic in again)
        self._lost(tp, self._reason, available=self.ends.get(tp, 0))
        if self._error is not None:
            return None
        return ev.Look(firsts=tuple(tp for tp in self._positions if tp.topic in again))

    def _made_again(self, firsts: Mapping[TopicPartition, int]) -> None:
        # One whose beginnings were not all told keeps its former id, and is not read: the next look asks again.
        silent = {tp.topic for tp in self._positions if tp.topic in self._again and tp not in firsts}
        self.ends = {tp: end for tp, end in self.ends.items() if tp.topic not in silent}
        self._renewed = {name for name in self._again if name not in silent}
        self.topic_ids.update({name: self._again[name] for name in self._renewed})
        self.heights.forget(self._renewed)
        self._gone = {tp: at for tp, at in firsts.items() if tp.topic in self._again and tp.topic not in silent}
        self._reason = f"{self._reason}; its new ones follow"

    def _aged_out(self, firsts: Mapping[TopicPartition, int]) -> None:
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

    def _prove(self, tps: list[TopicPartition], answer: ev.Looked) -> None:
        """Positions whose leader is another one than when they were planned: does it have what was read?"""
        unproven = set()
        for tp in tps:
            at, end = self._positions[tp], answer.epoch_ends.get(tp)
            if tp not in answer.epoch_ends or tp not in answer.firsts:
                unproven.add(tp)
            elif end is None or end >= at:
                self._cut_ms.pop(tp, None)
                self.heights.proven(tp, at, self._told[tp])
            elif not self._believed(self._cut_ms, tp):
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
        if self._error is None:
            self.records_lost += max(0, self._seen.get(tp, at) - at)
            self._gone[tp] = end
            self._cut.add(tp)
            self._cut_ms.pop(tp, None)
            self.heights.proven(tp, end, self._told[tp])

    def _shrunk(self, answer: ev.Looked) -> None:
        for tp, at in self._positions.items():
            end = max(self.ends.get(tp, -1), answer.log_ends.get(tp, -1))
            if end >= at or tp in self._gone or tp in self._cut_ms:
                self._short_ms.pop(tp, None)
            elif tp in answer.log_ends and self._believed(self._short_ms, tp):
                text = f"{tp} ends at {end}, before the position {at}: its last records were lost"
                if text not in self._said:
                    self._said.add(text)
                    self._lost(tp, text, available=end)

    # --- believing it -----------------------------------------------------------------------------------------------

    def _suspect_topic(self, name: str) -> None:
        if not self._believed(self._missing_ms, name):
            return
        text = f"topic {name} does not exist any more"
        if self._fail:
            self._error = TopicMissing(
                f"{text}. Take it out of the subscription, or set failOnDataLoss to false to go on without it",
                topics=[name],
            )
        elif text not in self._said:
            self._said.add(text)
            self.warnings.append(f"{text}; the query goes on without it")

    def _believed(self, since_ms: dict[K, int], what: K) -> bool:
        """Whether a suspicion was there long enough."""
        return self._now_ms - since_ms.setdefault(what, self._now_ms) >= GRACE_MS

    def _lost(self, tp: TopicPartition, text: str, *, available: int) -> None:
        if not self._fail:
            self.warnings.append(f"data loss: {text}")
            return
        self._error = self._error or DataLoss(
            f"{text}. Set failOnDataLoss to false to go on with the records that are left",
            topic=tp.topic,
            partition=tp.partition,
            expected=self._positions[tp],
            available=available,
        )
