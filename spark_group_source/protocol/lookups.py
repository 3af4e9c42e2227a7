"""The lookups of partition positions: one in flight for each partition, with pauses after failures.

Runs in: the stream reader (inside ``run``), tests. Deliberately absent: the requests, and the rules that choose a
position (``partitions``).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from spark_group_source.errors import OptionError, SourceError
from spark_group_source.model import EARLIEST, LATEST, TopicPartition
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.data_loss import DataLossDetector, data_loss
from spark_group_source.protocol.offsets import StreamOffset
from spark_group_source.protocol.outbox import Outbox
from spark_group_source.protocol.partitions import Partitions, VoidedMemory
from spark_group_source.protocol.request_schedule import pause_ms
from spark_group_source.protocol.rules import Rules
from spark_group_source.protocol.states import PartitionState
from spark_group_source.protocol.statistics import Statistics

POSITION_MS_MAX = 5_000
"""How long a batch waits for the position of a partition that answers leave out, because it has no leader; then the
batch reads the others."""

UNANSWERED_MAX = 6
"""How often in a row an answer may lack partitions that are read for the notes of resets alone: about ten seconds. Then
the lookup continues without them."""

NAMED_MAX = 10
"""Partitions that an error names."""


class Silence(NamedTuple):
    """Answers have left a partition out in this time; both on the run's clock."""

    since_ms: int
    until_ms: int


class PositionLookups:
    """The lookups of one run."""

    def __init__(self, rules: Rules, partitions: Partitions, counts: Statistics, out: Outbox) -> None:
        self._rules, self._partitions, self._counts, self._out = rules, partitions, counts, out
        self.known: Mapping[str, int] = {}
        """The number of partitions of each topic when the stream first saw it."""
        self.started: set[TopicPartition] = set()
        """Partitions without a committed offset that start behind their first record, or continue after a reset where
        this stream was before it; until a batch with them is durable or a foreign commit decides instead. A stream's
        commit of its start, which its note marks, does not count as one, nor does this stream's if it knows nothing of
        the reset."""
        # A group can be reset only while it is empty, so a run can have missed a reset only while it had no partition.
        # A period is a time in which it has some without interruption; its first lookup also reads the notes of resets.
        self._period = 0
        self._knows_resets = False  # those from before this period
        self._reads_resets_of: int | None = None  # the period whose first lookup is in flight
        self._first_lookup: tuple[TopicPartition, ...] = ()  # the partitions that it looks up
        self._failures = self._unanswered = 0
        self._retry_at_ms: int | None = None
        self._paused: frozenset[TopicPartition] = frozenset()  # those whose lookup is repeated then
        self._silent: dict[TopicPartition, Silence] = {}  # partitions that answers left out
        self._has_warned_of_silence = False

    def restore(self, offset: StreamOffset, *, replay: bool) -> None:
        """Take over what the offset of a checkpoint's last batch knows of starts. If that batch runs again
        (``replay``), none is read yet."""
        self.known = offset.known
        self.started |= offset.started - (set() if replay else {read.tp for read in offset.batch()})

    def order(self, data_loss: DataLossDetector) -> None:
        """Order the lookup of partitions without a position; a period's first lookup is answered before the next.

        Args:
            data_loss: it names the topics whose present ids are read, too.
        """
        if not self._partitions.ours and (self._knows_resets or self._reads_resets_of == self._period):
            self._knows_resets, self._period = False, self._period + 1
        if self._reads_resets_of is None and (tps := self._partitions.begin_lookups(self._paused)):
            notes_only = self._partitions_with_notes(tps)
            if notes_only:
                self._reads_resets_of, self._first_lookup = self._period, tps
            topics = data_loss.wanted_ids(tp.topic for tp in tps)
            self._out.order(ev.FetchCommittedOffsets(partitions=tps, notes_only=notes_only, topics=topics))

    def deadlines_ms(self) -> list[int]:
        """When :meth:`tick` has something to do."""
        due = [] if self._retry_at_ms is None else [self._retry_at_ms]
        for tp, each in self._silent.items():
            if tp not in self._partitions.ours:
                due.append(each.until_ms + POSITION_MS_MAX)
            elif not self._has_warned_of_silence:
                due.append(each.since_ms + POSITION_MS_MAX)
        return due

    def tick(self) -> None:
        """End the pause after a failed lookup when it is over, and log partitions without an answer."""
        if self._retry_at_ms is not None and self._out.now_ms >= self._retry_at_ms:
            self._retry_at_ms, self._paused = None, frozenset()
        self._warn_of_silence()

    def late(self, wait_ms: int) -> set[TopicPartition]:
        """The assigned partitions that answers have left out for so long; most of them have no leader."""
        until_ms, ours = self._out.now_ms - wait_ms, self._partitions.ours
        return {tp for tp, each in self._silent.items() if each.since_ms <= until_ms and tp in ours}

    def _warn_of_silence(self) -> None:
        """Log when partitions without a position start to wait, and when that is over. A rebalance says nothing about
        leaders: a partition that was lost for a moment has been silent for as long as before; one that was lost for
        longer is waited for anew."""
        for tp in self._silent.keys() - self._partitions.ours:
            if self._out.now_ms - self._silent[tp].until_ms >= POSITION_MS_MAX:
                del self._silent[tp]
        if not self._has_warned_of_silence and (late := self.late(POSITION_MS_MAX)):
            self._has_warned_of_silence = True
            self._out.log(
                f"no broker reports the position of {len(late)} partitions, such as {min(late)}; they wait for a "
                "leader, the others are read",
                warn=True,
            )
        elif self._has_warned_of_silence and not self._silent:
            self._has_warned_of_silence = False
            self._out.log("the position of every partition is known again", warn=True)

    def records_missing(self, missing: ev.RecordsMissing) -> None:
        """Where the first records have expired, no reader can have the records before the start any more."""
        self.see_recreated(missing.topics)
        expired = missing.offsets.keys() - missing.truncated.keys()
        self.started -= {tp for tp in self.started if tp.topic in missing.topics or tp in expired}

    def see_recreated(self, topics: Iterable[str]) -> None:
        """All partitions of recreated topics are new: the stream first saw the old topics."""
        self.known = {**self.known, **{topic: 0 for topic in topics if topic in self.known}}

    def committed_read(self, event: ev.CommittedOffsetsRead, stream: str) -> None:
        """Apply the group's committed offsets. A newer reset among them voids all positions first."""
        if event.unanswered and self._unanswered < UNANSWERED_MAX:
            self._unanswered += 1
            self.retry(event.requested, f"{len(event.unanswered)} others, whose notes may show a reset, have no answer")
            return
        self._unanswered = 0
        self._apply_newer_reset(event)
        new, restored = [], []
        for tp, committed in event.offsets.items():
            partition = self._partitions.end_lookup(tp)
            if partition is None or partition.state is not PartitionState.FETCHING:
                continue
            if committed is None and partition.memory is None:
                new.append(tp)
                continue
            if committed is None:
                restored.append(tp)
            elif committed.stream != stream or committed.followed:
                self.started.discard(tp)  # no longer chosen by the starting options
            was_reset = isinstance(partition.memory, VoidedMemory)  # which may have moved it; its offset was lost
            self._silent.pop(tp, None)
            moved_from = self._partitions.apply_committed(tp, partition, committed, stream=stream)
            if (was_reset and self._is_before_reset(committed, stream)) or self._is_start(tp, committed):
                self.started.add(tp)
            if moved_from is not None and committed is not None:
                self._out.log(f"another consumer or an operator moved {tp} from {moved_from} to {committed.offset}")
        self._count_restored(restored)
        for tp in new:
            self._partitions.begin_resolving(tp)
        if new:
            self._order_starts(new)
        self._retry_unanswered(event.requested, event.offsets, continues=bool(new))

    def without_offset(self, offsets: Mapping[TopicPartition, ev.Committed | None]) -> set[TopicPartition]:
        """The partitions of an answer that was applied for which a reset has set no offset: Kafka has none, or one that
        only says where a stream starts. Some may be lost by now."""
        return {tp for tp, at in offsets.items() if at is None or tp in self.started}

    def _is_start(self, tp: TopicPartition, committed: ev.Committed | None) -> bool:
        """Whether a stream committed where it starts, and this one continues there."""
        return committed is not None and committed.started and self._partitions.position(tp) == committed.offset

    def _is_before_reset(self, committed: ev.Committed | None, stream: str) -> bool:
        """Whether the group's last reset did not set this offset: there is none, or this stream committed it without
        knowing of the reset."""
        if committed is None:
            return True
        return committed.stream == stream and committed.reset_number < self._partitions.reset_number

    def _apply_newer_reset(self, event: ev.CommittedOffsetsRead) -> None:
        """Apply the newest reset that the notes of the committed offsets show, if this run does not know it yet."""
        if event.reset_number is not None:
            self._knows_resets |= self._reads_resets_of == self._period
            self._reads_resets_of = None
        reset_number = max(
            [at.reset_number for at in event.offsets.values() if at is not None] + [event.reset_number or 0]
        )
        if reset_number > self._partitions.reset_number:
            self._out.log(f"the group was reset (reset #{reset_number}); all partitions continue at its offsets")
            self._partitions.apply_reset(reset_number)

    def _order_starts(self, new: list[TopicPartition]) -> None:
        """Order the second lookup of partitions that the group never committed: where they start."""
        starting = self._rules.starting  # not for partitions added later: "latest" would skip their first records
        starts = {tp: EARLIEST if _is_added(tp, self.known) else starting.of(tp) for tp in new}
        self.started.difference_update(new)
        self.started |= {tp for tp, start in starts.items() if start != EARLIEST}
        self._out.order(ev.ResolveStarts(starts=starts))

    def starts_resolved(self, event: ev.StartsResolved) -> SourceError | None:
        """Apply the starts of partitions without a committed offset. Returns the error that the run fails with."""
        too_late = []
        for tp, at in event.offsets.items():
            partition = self._partitions.end_lookup(tp)
            if partition is None or partition.state is not PartitionState.RESOLVING:
                continue
            if at is None:
                too_late.append(tp)
                continue
            if _is_added(tp, self.known) and at > 0 and self._rules.fail_on_data_loss:
                return data_loss(tp, f"new partition {tp} starts at {at}, not at 0", expected=0, available=at)
            self._silent.pop(tp, None)
            self._partitions.apply_start(tp, partition, at)
        if too_late:
            if (refused := _no_record(too_late, self._rules)) is not None:
                return refused
            for tp in too_late:
                self._partitions.repeat_resolving(tp)
            self._out.order(ev.ResolveStarts(starts=dict.fromkeys(too_late, LATEST)))
        self._retry_unanswered(event.requested, event.offsets, continues=bool(too_late))
        return None

    def _count_restored(self, tps: list[TopicPartition]) -> None:
        """This stream has read these, or resolved their start, but the group has no offset for them. Whether it had one
        is not known."""
        self._counts.offsets_restored += len(tps)
        if tps:
            self._out.log(
                f"the group has no committed offset for {len(tps)} partitions where this stream has a position, such "
                f"as {tps[0]} (expired, deleted or never committed); they continue at the checkpoint's position, not "
                "at startingOffsets"
            )

    def _partitions_with_notes(self, requested: tuple[TopicPartition, ...]) -> tuple[TopicPartition, ...]:
        """Further partitions to read in the first lookup of a period, because only the notes of a group's committed
        offsets show that it was reset."""
        if self._knows_resets:
            return ()
        mine = set(requested)
        known = (TopicPartition(topic, p) for topic, count in self.known.items() for p in range(count))
        return tuple(tp for tp in dict.fromkeys([*known, *self._partitions.remembered()]) if tp not in mine)

    def _retry_unanswered(
        self, requested: tuple[TopicPartition, ...], offsets: Mapping[TopicPartition, object], *, continues: bool
    ) -> None:
        """Repeat the lookup of partitions that are not in the answer.

        Args:
            continues: whether the answer led to a second lookup.
        """
        unanswered = tuple(tp for tp in requested if tp not in offsets)
        if unanswered:
            for tp in unanswered:
                since_ms = self._silent[tp].since_ms if tp in self._silent else self._out.now_ms
                self._silent[tp] = Silence(since_ms, self._out.now_ms)
            self.retry(unanswered, "they are not in the answer")
        elif not continues:
            self._failures = 0
        self._warn_of_silence()

    def failed(self, partitions: tuple[TopicPartition, ...], reason: str) -> None:
        """A lookup was not answered at all: that is an outage, and shows nothing about single partitions."""
        now_ms = self._out.now_ms
        self._silent = dict.fromkeys(self.late(POSITION_MS_MAX), Silence(now_ms - POSITION_MS_MAX, now_ms))
        self.retry(partitions, reason)

    def retry(self, partitions: tuple[TopicPartition, ...], reason: str) -> None:
        """Repeat a lookup after a pause.

        Args:
            reason: why it failed.
        """
        if partitions == self._first_lookup:
            self._reads_resets_of = None
        self._paused |= frozenset(partitions)
        self._partitions.fail_lookups(partitions)
        self._retry_at_ms = self._out.now_ms + pause_ms(self._failures)
        self._failures += 1
        if not self._has_warned_of_silence:
            self._out.log(f"could not read the offsets of {len(partitions)} partitions ({reason}); retrying")


def _is_added(tp: TopicPartition, known: Mapping[str, int]) -> bool:
    """Whether the partition was added after the stream first saw its topic."""
    return tp.partition >= known.get(tp.topic, 0)


def _no_record(tps: Sequence[TopicPartition], rules: Rules) -> OptionError | None:
    """The error for partitions without a record after the starting timestamp, unless they start at their end."""
    if rules.starting.no_match == "latest":
        return None
    return OptionError(
        f"{', '.join(map(str, tps[:NAMED_MAX]))} have no record at or after the starting timestamp "
        f"{rules.starting.of(tps[0]).value} (milliseconds since the epoch), so they cannot start there. Set an earlier "
        "timestamp, or set startingOffsetsByTimestampStrategy=latest to start them at their end",
        partitions=[str(tp) for tp in tps],
    )
