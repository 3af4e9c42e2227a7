"""Decides from the brokers' answers how far the next batch can read, and whether records are lost.

Runs in: the stream reader, tests. Deliberately absent: the requests (the caller answers :class:`ReadLogEnds`), and
records that are lost while a task reads them (``reader``).

A check before a batch has up to three requests. The first reads the ends of the partitions. The second is sent when
something changed or a partition is new: topic ids, the first records of new partitions, the log ends of partitions
whose position is behind their end, and what new leaders have of what was read (:class:`LeaderEpochs`). The third reads
the first records of recreated topics. A missing topic, another id of a topic and an end that went back are *suspicions*
at first, because a broker that just started or lags behind and a new leader report the same for a moment. A suspicion
counts when it is repeated after :data:`GRACE_MS`. A topic is requested for that long also when none of its partitions
is assigned any more: a group revokes the partitions of a deleted topic.
"""

import json
from collections.abc import Callable, Collection, Container, Generator, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from spark_group_source import command_line
from spark_group_source.error_codes import Suspicions
from spark_group_source.errors import DataLoss, GroupError, TopicMissing
from spark_group_source.model import TopicPartition
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.offsets import StreamOffset
from spark_group_source.protocol.rules import Rules

GRACE_MS = 2_000
"""Time for which a topic must be missing or have another id, or a log be shorter than what was read of it, before it
counts."""

EARLIER_MS = 30_000
"""Time after which a leader with an earlier epoch than the known one is believed. A broker that is cut off from the
controller is fenced after 9 s by default (``broker.session.timeout.ms``), and clients learn of the new leader then."""

TOPICS_MS = 30_000
"""Time after which the topics are requested again although there is nothing to read: one that was deleted, recreated
and filled with as many records as were read has the same ends."""

SILENT_MS_MAX = 10_000
"""Time after which the log warns about a partition whose end is not in the answers."""

Offsets = Mapping[TopicPartition, int]
Requests = Generator[ev.ReadLogEnds, ev.LogEndsRead, None]


class DataLossDetector:
    """The checks of one run, one before each batch."""

    def __init__(self, rules: Rules, known_epochs: "LeaderEpochs") -> None:
        self._rules, self._known_epochs = rules, known_epochs
        self.topic_ids: dict[str, str] = {}
        """The id of each topic, as last confirmed; without topics whose brokers have no ids (before 2.8)."""
        self._ids_before_reset: dict[str, str] = {}  # before the group's last reset
        self.reset_number = 0
        """The last reset of the group; 0: none."""
        self.ends: Offsets = {}
        """Where the partitions of the last check can be read to; without those that may not be read now."""
        self.records_lost = 0
        """Offsets that this run had not read when they were lost, as far as the checks know."""
        # --- of the last check
        self.took_ms = 0
        """Duration of all its requests."""
        self.warnings: list[str] = []
        """Lines for the log."""
        self.missing_topics: list[str] = []
        """Topics that do not exist any more."""
        self.error: GroupError | None = None
        """The error that the run fails with; None: there is none, or ``failOnDataLoss`` is false."""
        self._requests: Requests | None = None
        self._positions: Offsets = {}
        self._now_ms = 0
        self._leader_epochs: Offsets = {}  # of the leaders that answered with the ends
        self._moved: dict[TopicPartition, int] = {}  # new positions of partitions whose records are lost
        self._truncated: dict[TopicPartition, int] = {}  # of truncated ones: the epoch that was known before
        self._capped: dict[TopicPartition, int] = {}  # partitions that are read up to where their log was truncated
        self._recreated: Mapping[str, str] = {}  # recreated topics whose first records are known: their ids
        self._reason = ""
        # --- across checks
        self._topics_at_ms = 0  # when topics were requested last
        self._proven_ends: Offsets = {}  # the last ends that leaders of known epochs reported
        self._left: set[str] = set()  # topics without an assigned partition since the last request about topics
        self._checked: set[TopicPartition] = set()  # partitions whose first record was compared with the position
        self._missing = Suspicions(GRACE_MS)  # topics
        self._other_ids = Suspicions(GRACE_MS)  # topics with an id that is not the known one
        self._former_ids: set[str] = set()  # those of topics that were deleted and recreated during this run
        self._present: dict[tuple[str, str], tuple[str, int]] = {}
        """By topic and its id in a note: the topic's present id in all answers since this time."""
        self._disputed: set[str] = set()  # topics of which a note has another id than the known one
        self._unread: dict[str, int] = {}  # of topics with another id: offsets that were not read before
        self._short = Suspicions(GRACE_MS)  # partitions whose log ends below what was read
        self._maybe_truncated = Suspicions(GRACE_MS)  # partitions whose log was truncated below what was read
        self._earlier = Suspicions(EARLIER_MS)  # partitions whose leader has an earlier epoch than the known one
        self._silent_since_ms: dict[TopicPartition, int] = {}  # partitions without an end in the answers
        self._has_warned_of_silence = False
        self._warned: set[str | TopicPartition] = set()  # texts, and partitions whose log is short

    def restore(self, offset: StreamOffset) -> None:
        """Continue from a checkpoint."""
        self._known_epochs.remember(offset)
        self.topic_ids = {topic: id_ for topic, id_ in offset.topic_ids.items() if id_}
        self.reset_number = offset.reset_number

    def learn_ids(
        self,
        event: ev.CommittedOffsetsRead,
        reset_number: int,
        without_offset: Collection[TopicPartition],
    ) -> None:
        """Take over the topic ids in the notes of committed offsets, where none is known: an offset that was committed
        when its topic had been recreated already is a position of the old one. Without a note it is the present id.

        Args:
            reset_number: the number of the group's last reset. After a further one the positions belong to the present
                topics: Kafka deletes a topic's committed offsets with the topic.
            without_offset: partitions of which Kafka had no offset after that reset. Their positions are older.
        """
        if reset_number != self.reset_number:
            older = {tp.topic for tp in without_offset}
            self._known_epochs.keep(older)
            self._ids_before_reset, self.topic_ids = self.topic_ids, {}
            self.reset_number, self._checked = reset_number, set()
        for tp in without_offset:
            if (id_ := self._ids_before_reset.get(tp.topic)) is not None:
                self.topic_ids.setdefault(tp.topic, id_)
        for tp, at in _with_present_ids_first(event):
            if at is not None and at.topic_id and at.reset_number == reset_number:
                self.topic_ids.setdefault(tp.topic, at.topic_id)
        for name, id_ in event.topic_ids.items():
            if id_:
                self.topic_ids.setdefault(name, id_)

    def wanted_ids(self, topics: Iterable[str]) -> tuple[str, ...]:
        """Those of these topics whose present ids are read with committed offsets: none is known yet, or notes differ.
        Without its id, a topic that is recreated before the next check would be taken for the former one."""
        return tuple(sorted({name for name in topics if name in self._disputed or name not in self.topic_ids}))

    def compare_ids(
        self, event: ev.CommittedOffsetsRead, now_ms: int
    ) -> tuple[set[TopicPartition], set[TopicPartition]]:
        """Compare the topic ids in the notes of committed offsets with the known ones. A batch of a deleted topic may
        be committed when its successor exists, and Kafka keeps that offset: in the new topic it would skip records. But
        an id that is not the known one may also be that of an even newer topic, so the present id decides, which the
        next lookups read (:meth:`wanted_ids`); one answer may be that of a broker that does not know it yet.

        Returns:
            The partitions whose offset is a position in a deleted topic, and those of which that is not known yet.
        """
        former: set[TopicPartition] = set()
        unclear: set[TopicPartition] = set()
        known, newer = dict(self.topic_ids), dict[str, str]()
        for tp, at in _with_present_ids_first(event):
            if at is None or not at.topic_id:
                continue
            present = event.topic_ids.get(tp.topic)
            ids = newer if at.reset_number > self.reset_number else known
            if ids.setdefault(tp.topic, at.topic_id) == at.topic_id or present == "":
                continue  # brokers before 2.8 have no ids
            if at.topic_id in self._former_ids:
                former.add(tp)
            elif present is None or not self._is_confirmed((tp.topic, at.topic_id), present, now_ms):
                unclear.add(tp)
            elif present == ids[tp.topic]:
                former.add(tp)  # else the next check finds that the known topic was recreated
        self._disputed = self._disputed - event.topic_ids.keys() | {tp.topic for tp in unclear}
        return former, unclear

    def _is_confirmed(self, note: tuple[str, str], present: str, now_ms: int) -> bool:
        """Whether the topic of a note has had this id in all answers for two seconds."""
        former, since_ms = self._present.get(note, ("", now_ms))
        self._present[note] = present, since_ms if former == present else now_ms
        return now_ms - self._present[note][1] >= GRACE_MS

    def begin(self, positions: Offsets, now_ms: int) -> ev.ReadLogEnds:
        """Start a check of these positions. Returns the first request."""
        self._left = (self._left | {tp.topic for tp in self._positions}) - {tp.topic for tp in positions}
        self._positions, self._now_ms, self.took_ms = positions, now_ms, 0
        if self._requests is None:  # else the check before has failed, and what it found was not logged
            self.warnings, self.missing_topics = [], []
        self.error = None
        self._moved, self._truncated, self._recreated, self._reason = {}, {}, {}, ""
        self._capped = {}
        self._checked.intersection_update(positions)  # a partition that is assigned again is checked like a new one
        self._short.keep(positions)
        self._maybe_truncated.keep(positions)
        self._earlier.keep(positions)
        self._requests = self._check()
        return next(self._requests)

    def take(self, answer: ev.LogEndsRead) -> ev.ReadLogEnds | None:
        """Continue with an answer. Returns the next request, or None when the check is complete."""
        assert self._requests is not None
        self.took_ms += answer.took_ms
        try:
            return self._requests.send(answer)
        except StopIteration:
            self._requests = None
            return None

    @property
    def has_suspicions(self) -> bool:
        """Whether a suspicion is neither confirmed nor contradicted yet."""
        reports = (self._missing, self._other_ids, self._short, self._maybe_truncated)
        return any(of.is_open(self._now_ms) for of in reports)

    def is_complete(self, wait_ms: int) -> bool:
        """Whether the end of every partition is known, apart from missing topics and from partitions whose end was in
        no answer for so long."""
        until_ms, silent = self._now_ms - wait_ms, self._silent_since_ms
        return all(
            tp in self.ends or tp.topic in self._missing or silent.get(tp, self._now_ms) <= until_ms
            for tp in self._positions
        )

    @property
    def records_missing(self) -> ev.RecordsMissing | None:
        """The new positions of partitions whose next records are lost, if there are any."""
        if not self._moved:
            return None
        return ev.RecordsMissing(
            offsets=self._moved,
            reason=self._reason,
            topics=tuple(sorted(self._recreated)),
            truncated=self._truncated,
        )

    def settle(self, ready: Offsets) -> None:
        """Keep what the complete check found of partitions that are still where they were checked. The others were lost
        meanwhile, or have followed another commit: the next check begins with what was known of them before. In a
        recreated topic any position may belong to the deleted one, and is moved; its id is the known one from here on,
        because an offset that is committed before is a position in the deleted topic.

        Args:
            ready: the position of every partition that the next batch may read.
        """
        self._former_ids |= {self.topic_ids[name] for name in self._recreated if name in self.topic_ids}
        self.topic_ids.update(self._recreated)
        self._known_epochs.forget(self._recreated.keys())
        elsewhere = {tp for tp, at in self._positions.items() if ready.get(tp) != at}
        self._checked -= elsewhere
        if elsewhere:
            self.ends = {tp: end for tp, end in self.ends.items() if tp not in elsewhere}
        for found in (self._moved, self._truncated, self._capped):
            for tp in elsewhere & found.keys():
                if tp.topic not in self._recreated:
                    del found[tp]
        expired = (tp for tp in self._moved.keys() - self._truncated.keys() if tp.topic not in self._recreated)
        self.records_lost += sum(self._moved[tp] - self._positions[tp] for tp in expired)
        for tp in self._truncated:
            at = self._positions[tp]
            self.records_lost += max(0, self._proven_ends.get(tp, at) - at)
            self._known_epochs.confirm(tp, self._moved[tp], self._leader_epochs[tp])

    def leader_epochs(self, positions: Offsets) -> dict[TopicPartition, int]:
        """The leader epochs that a plan stores with these positions."""
        found = self._known_epochs.at_ends(positions, self.ends, self._leader_epochs)
        found.update(self._known_epochs.of({tp: positions[tp] for tp in self._capped.keys() & positions.keys()}))
        return found

    # --- one check --------------------------------------------------------------------------------------------------

    def _check(self) -> Requests:
        former_ends = self.ends
        answer = yield ev.ReadLogEnds(ends=tuple(self._positions))
        self.ends, self._leader_epochs = answer.ends, answer.leader_epochs
        unproven = self._known_epochs.unproven(self._positions, self._leader_epochs)
        if self._earlier:
            self._earlier.clear(*filter(self._has_current_leader, self._positions))
        if self._maybe_truncated:  # it came back at a position that this leader has
            self._maybe_truncated.clear(*(self._leader_epochs.keys() - unproven.keys()))
        kept = {tp: self._proven_ends[tp] for tp in unproven if tp in self._proven_ends}
        self._proven_ends = {**self.ends, **kept} if kept else self.ends
        self._warn_of_silence()

        # A request about partitions without an end only would fail, and with it the check of the others.
        new = tuple(tp for tp in self._positions if tp not in self._checked and tp in self.ends)
        suspicions = self._missing or self._other_ids or self._short or self._left
        is_idle = not new and self.ends == self._positions and not suspicions and not unproven
        if is_idle and self._now_ms - self._topics_at_ms < TOPICS_MS:
            return
        self._topics_at_ms = self._now_ms
        topics = tuple(sorted({tp.topic for tp in self._positions} | {*map(str, self._missing)} | self._left))
        if not topics:
            return
        beyond = tuple(tp for tp, at in self._positions.items() if at > self.ends.get(tp, at))
        firsts = tuple(dict.fromkeys((*new, *unproven)))
        answer = yield ev.ReadLogEnds(epoch_ends=unproven, topics=topics, firsts=firsts, log_ends=beyond)
        self._check_topics(answer.topic_ids)
        ends, other = self.ends, self._find_other_ids(answer.topic_ids, former_ends)
        if other:  # nothing of such a topic is read or compared: the answers may be about either one
            self.ends = _without(other, ends)
            answer = replace(answer, firsts=_without(other, answer.firsts), log_ends=_without(other, answer.log_ends))
        self._check_leaders([tp for tp in unproven if tp.topic in answer.topic_ids and tp.topic not in other], answer)
        recreated = {name: id_ for name, id_ in other.items() if self._other_ids.report((name, id_), self._now_ms)}
        if not recreated:
            self._check_firsts(answer.firsts)
            self._check_lengths(answer)
            return

        lost = {tp: at for tp, at in self._positions.items() if tp.topic in recreated}
        self.records_lost += sum(self._unread.pop(name) for name in recreated)
        text = f"topic {min(recreated)} was deleted and recreated, its old records are lost"
        self._reason = f"{text}; the query continues with its new records"
        self._lost(min(lost), text, available=ends.get(min(lost), 0))
        if self.error is None:
            answer = yield ev.ReadLogEnds(firsts=tuple(lost))
            self._move_to_recreated(recreated, lost, answer.firsts)

    def _warn_of_silence(self) -> None:
        """A partition without a leader waits while the others are read. Log when that starts and when it is over."""
        silent = [tp for tp in self._positions if tp not in self.ends and tp.topic not in self._missing]
        self._silent_since_ms = {tp: self._silent_since_ms.get(tp, self._now_ms) for tp in silent}
        late = [tp for tp, since_ms in self._silent_since_ms.items() if self._now_ms - since_ms >= SILENT_MS_MAX]
        if late and not self._has_warned_of_silence:
            self._has_warned_of_silence = True
            self.warnings.append(
                f"no broker reports the end of {len(late)} partitions, such as {min(late)}; they wait for a leader, "
                "the others are read"
            )
        elif self._has_warned_of_silence and not silent:
            self._has_warned_of_silence = False
            self.warnings.append("the brokers report the end of every partition again")

    def _check_topics(self, existing: Mapping[str, str]) -> None:
        """Find missing topics. This batch reads nothing of them: their ends may be those of recreated topics."""
        ours = {tp.topic for tp in self._positions}
        for name in sorted((ours | {*map(str, self._missing)} | self._left) - existing.keys()):
            if self._missing.report(name, self._now_ms):
                self._topic_missing(name)
                if name not in ours:
                    self._missing.clear(name)
        self._left = set()
        self.ends = {tp: end for tp, end in self.ends.items() if tp.topic in existing}
        self._missing.clear(*existing)

    def _find_other_ids(self, ids: Mapping[str, str], former_ends: Offsets) -> dict[str, str]:
        """Topics with an id that is not the known one. An id that was not known before is taken over; brokers before
        2.8 have none."""
        other: dict[str, str] = {}
        for name in {tp.topic for tp in self._positions}:
            id_ = ids.get(name)
            if id_ and self.topic_ids.setdefault(name, id_) != id_:
                other[name] = id_
        for name in other.keys() - self._unread.keys():
            mine = ((tp, at) for tp, at in self._positions.items() if tp.topic == name)
            self._unread[name] = sum(max(0, former_ends.get(tp, 0) - at) for tp, at in mine)
        self._unread = {name: count for name, count in self._unread.items() if name in other}
        self._other_ids.keep(set(other.items()))
        return other

    def _move_to_recreated(self, recreated: Mapping[str, str], lost: Offsets, firsts: Offsets) -> None:
        """Move partitions of recreated topics to their first records. Where no broker reports one, that is offset 0, as
        in every new log, and the next check compares it."""
        self._moved.update({tp: firsts.get(tp, 0) for tp in lost})
        self._checked -= lost.keys() - firsts.keys()
        self._recreated = recreated

    def _check_firsts(self, firsts: Offsets) -> None:
        """Whether the position of a new partition is still in the log. Later losses are found while reading."""
        for tp, first in firsts.items():
            at = self._positions[tp]
            if at < first and tp not in self._moved:
                self._lost(tp, f"the records of {tp} from {at} on are lost: it starts at {first} now", available=first)
                self._moved[tp] = first
        self._checked = {tp for tp in self._positions if tp in self._checked or tp in firsts}
        where = "where their logs were truncated, or " if self._truncated else ""
        self._reason = f"{len(self._moved)} partitions continue {where}at their first record"

    def _check_leaders(self, tps: list[TopicPartition], answer: ev.LogEndsRead) -> None:
        """Whether new leaders have what earlier ones reported before it was planned.

        A leader with an earlier epoch is one that does not know yet that it was replaced, so nothing follows from what
        it has. After :data:`EARLIER_MS` it is the present one, and the known epoch was that of a deleted topic: a
        commit names a topic without its id.
        """
        open_ = set()
        doubted = [tp for tp in tps if not self._has_current_leader(tp) and tp not in self._earlier]
        if doubted:
            self.warnings.append(
                f"a former leader answered for {len(doubted)} partitions, such as {min(doubted)}; they wait for the "
                f"present leader, at most {EARLIER_MS // 1_000} s, the others are read"
            )
        for tp in tps:
            at, end = self._positions[tp], answer.epoch_ends.get(tp)
            read_to = self._known_epochs.until(tp)  # beyond the position if another consumer's commit moved it back
            is_doubted = not self._has_current_leader(tp) and not self._earlier.report(tp, self._now_ms)
            if read_to is None or is_doubted or tp not in answer.epoch_ends or tp not in answer.firsts:
                open_.add(tp)  # a reset since the request made the known epoch void, or the answer is missing
            elif end is None or end >= read_to:
                self._maybe_truncated.clear(tp)
                self._known_epochs.confirm(tp, read_to, self._leader_epochs[tp])
            elif not self._maybe_truncated.report(tp, self._now_ms):
                open_.add(tp)
            elif end > at:
                self._capped[tp] = min(end, self.ends.get(tp, end))
            else:
                self._truncated_at(tp, read_to, max(end, answer.firsts[tp]), answer.log_ends.get(tp, self.ends[tp]))
        if open_ or self._capped:
            self.ends = {tp: self._capped.get(tp, end) for tp, end in self.ends.items() if tp not in open_}

    def _has_current_leader(self, tp: TopicPartition) -> bool:
        """Whether a leader answered whose epoch is not earlier than the known one."""
        return self._leader_epochs.get(tp, -1) >= self._known_epochs.latest(tp)

    def _truncated_at(self, tp: TopicPartition, read_to: int, end: int, log_end: int) -> None:
        text = (
            f"the log of {tp} was truncated at {end}, below the position {read_to}: the new leader did not have the "
            f"records from there on. The log ends at {log_end} now, with other records, none of which was read"
        )
        self._lost(tp, text, available=end)
        if self.error is None:
            self._moved[tp] = end
            self._truncated[tp] = self._known_epochs.latest(tp)
            self._maybe_truncated.clear(tp)

    def _check_lengths(self, answer: ev.LogEndsRead) -> None:
        """Whether logs end before what was read of them."""
        for tp, at in self._positions.items():
            end = max(self.ends.get(tp, -1), answer.log_ends.get(tp, -1))
            if end >= at or tp in self._moved or tp in self._maybe_truncated or tp in self._earlier:
                self._short.clear(tp)
                self._warned.discard(tp)
            elif tp in answer.log_ends and self._short.report(tp, self._now_ms) and tp not in self._warned:
                self._warned.add(tp)  # once: its end changes with every record
                self._log_is_short(tp, at, end)

    def _log_is_short(self, tp: TopicPartition, at: int, end: int) -> None:
        text = (
            f"{tp} ends at {end}, before the position {at}: its last records are lost, and new records below {at} are "
            "skipped"
        )
        offsets = json.dumps({tp.topic: {str(tp.partition): end}})
        words = ("--to-offsets", offsets, "--execute")
        command = command_line.spark_group("reset", self._rules.connection, self._rules.group, *words)
        remedy = (
            f"To read from {end} on and skip no new record, stop the query, run {command_line.in_sentence(command)}, "
            "with --table TABLE if DeltaSink writes the table, and start the query with the same checkpoint. "
            f"failOnDataLoss=false continues at {at} when the log has grown to it"
        )
        self._lost(tp, text, available=end, remedy=remedy)

    # --- results ----------------------------------------------------------------------------------------------------

    def _topic_missing(self, name: str) -> None:
        self.missing_topics.append(name)
        text = f"topic {name} does not exist any more"
        if self._rules.fail_on_data_loss:
            self.error = TopicMissing(
                f"{text}. Remove it from the subscription, or set failOnDataLoss=false to continue without it",
                topics=[name],
            )
        elif text not in self._warned:
            self._warned.add(text)
            self.warnings.append(f"{text}; the query continues without it")

    def _lost(self, tp: TopicPartition, text: str, *, available: int, remedy: str = "") -> None:
        if not self._rules.fail_on_data_loss:
            warning = f"data loss: {text}"
            if warning not in self.warnings:  # the check before may have failed, and found the same
                self.warnings.append(warning)
            return
        error = data_loss(tp, text, expected=self._positions[tp], available=available, remedy=remedy)
        self.error = self.error or error


def _with_present_ids_first(
    event: ev.CommittedOffsetsRead,
) -> list[tuple[TopicPartition, ev.Committed | None]]:
    """The offsets of an answer. The first id of a topic without a known one is taken over: of several in the notes the
    present one, not that of a deleted topic."""
    ids = event.topic_ids
    return sorted(event.offsets.items(), key=lambda each: each[1] is None or each[1].topic_id != ids.get(each[0].topic))


def _without(topics: Container[str], offsets: Offsets) -> Offsets:
    return {tp: at for tp, at in offsets.items() if tp.topic not in topics}


def data_loss(tp: TopicPartition, text: str, *, expected: int, available: int, remedy: str = "") -> DataLoss:
    """The error of a run with ``failOnDataLoss``, whether a lookup or a check before a batch finds the loss."""
    return DataLoss(
        f"{text}. {remedy or 'Set failOnDataLoss=false to continue with the records that are left'}",
        topic=tp.topic,
        partition=tp.partition,
        expected=expected,
        available=available,
    )


class _Known(NamedTuple):
    until: int  # everything below this offset was written ...
    epoch: int  # ... under this leader epoch or an earlier one


class LeaderEpochs:
    """Finds truncated logs by their leader epochs (KIP-320).

    Every leader of a partition has a number, the *leader epoch*, and every record has the epoch of the leader that
    wrote it. A leader that was elected without all records (an unclean election), or that lost records with its disk,
    continues at the end of what it has: the log is *truncated* there. When the log has grown again, its end does not
    show that; its epochs do. Everything below an end that was reported under epoch E was written under E or an earlier
    epoch, and a leader can report where the records of such epochs end now. If that is below a position, the log was
    truncated below the position, and the records from there on are not those that were read. Only a new leader can have
    truncated a log, so the request is sent only if the leader epoch is not the one of the position.

    The epoch of a position is not the epoch of its last record, as in a Kafka consumer, because planning sees no
    records. It is the epoch of the leader that reported how far the batch can read. That leader had every record below,
    and may have written none of them.
    """

    def __init__(self) -> None:
        self._known: dict[TopicPartition, _Known] = {}

    def remember(self, offset: StreamOffset) -> None:
        """Store the epochs of a plan, also of an earlier run: its ends were reported under them."""
        epochs = offset.leader_epochs
        for tp, until in {**offset.uncommitted, **offset.positions(), **offset.read_to}.items():
            known = self._known.get(tp)
            if (epoch := epochs.get(tp)) is None:
                self._known.pop(tp, None)
            elif known is None or known.epoch != epoch or known.until < until:
                self._known[tp] = _Known(until, epoch)

    def learn(
        self,
        committed: Mapping[TopicPartition, ev.Committed | None],
        position: Callable[[TopicPartition], int | None],
        stream: str,
    ) -> None:
        """Take over the epochs of committed offsets that are positions now. The stream that committed one, with a later
        epoch than the known one, has compared the log with that leader's since; but another stream only up to where it
        was itself, and this ``stream`` may have read further.

        Epochs of foreign commits are not believed. Some clients commit a wrong one: IBM/sarama commits epoch 0, or that
        of an earlier leader (its issues 2694 and 3418). With it every later election would look like a truncation.
        """
        for tp, at in committed.items():
            if at is None or at.stream is None or at.leader_epoch is None or position(tp) != at.offset:
                continue
            known = self._known.get(tp)
            is_own = at.stream == stream
            is_compared = known is not None and (is_own or at.offset == known.until)
            if known is None or at.offset > known.until or (is_compared and at.leader_epoch > known.epoch):
                self._known[tp] = _Known(at.offset, at.leader_epoch)

    def learn_starts(self, starts: ev.StartsResolved, position: Callable[[TopicPartition], int | None]) -> None:
        """Take over the epochs of ends of logs that are positions now: a log may be truncated before a batch reads
        it."""
        for tp, epoch in starts.leader_epochs.items():
            if (at := starts.offsets[tp]) is not None and position(tp) == at:
                self._known[tp] = _Known(at, epoch)

    def of(self, positions: Offsets) -> dict[TopicPartition, int]:
        """The epochs to commit with these positions, so that whoever continues there finds a truncation."""
        return {tp: epoch for tp, at in positions.items() if (epoch := self.epoch(tp, at)) is not None}

    def confirm(self, tp: TopicPartition, at: int, epoch: int) -> None:
        """A leader of this epoch has everything below ``at`` that was read."""
        self._known[tp] = _Known(at, epoch)

    def forget(self, topics: Collection[str]) -> None:
        """Forget topics that were recreated: their epochs start again."""
        self._known = {tp: known for tp, known in self._known.items() if tp.topic not in topics}

    def keep(self, topics: Collection[str]) -> None:
        """Forget all topics but these."""
        self._known = {tp: known for tp, known in self._known.items() if tp.topic in topics}

    def until(self, tp: TopicPartition) -> int | None:
        """How far the partition is known to be read or planned under the known epoch; None without one."""
        return self._known[tp].until if tp in self._known else None

    def latest(self, tp: TopicPartition) -> int:
        """The latest leader epoch that is known of the partition; 0 if none is."""
        return self._known[tp].epoch if tp in self._known else 0

    def read_to(self, positions: Offsets) -> dict[TopicPartition, int]:
        """Partitions that were read further than these positions, because a foreign commit moved them back: how far. A
        later run needs it to find that the log was truncated in between."""
        known = self._known
        return {tp: of.until for tp, at in positions.items() if (of := known.get(tp)) is not None and of.until > at}

    def epoch(self, tp: TopicPartition, at: int) -> int | None:
        """The leader epoch under which, or before which, everything below ``at`` was written; None if not known."""
        known = self._known.get(tp)
        return known.epoch if known is not None and at <= known.until else None

    def unproven(self, positions: Offsets, leader_epochs: Offsets) -> dict[TopicPartition, int]:
        """Positions whose leader is a new one, with the epochs to request from it."""
        found = {}
        for tp, leader in leader_epochs.items():
            known = self._known.get(tp)
            if known is not None and known.epoch != leader and tp in positions and positions[tp] <= known.until:
                found[tp] = known.epoch
        return found

    def at_ends(self, positions: Offsets, ends: Offsets, leader_epochs: Offsets) -> dict[TopicPartition, int]:
        """The epochs that a plan up to these ends stores with positions, also with those of partitions that it does not
        read."""
        found = {}
        for tp, at in positions.items():
            epoch = leader_epochs.get(tp) if ends.get(tp, -1) >= at else self.epoch(tp, at)
            if epoch is not None:
                found[tp] = epoch
        return found
