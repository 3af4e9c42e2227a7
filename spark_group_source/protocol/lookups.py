"""The questions where partitions stand, and what their answers mean: one on its way for each partition, pauses after
failures.

Runs in: the stream reader (inside ``machine``), tests. Deliberately absent: asking, and the rules by which an answer
becomes a position (``positions``).
"""

from collections.abc import Iterable, Mapping, Sequence

from spark_group_source.errors import OptionError, SourceError
from spark_group_source.model import EARLIEST, LATEST, TopicPartition
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.data_loss import data_loss
from spark_group_source.protocol.outbox import Outbox
from spark_group_source.protocol.partition_states import Fetching, Resolving
from spark_group_source.protocol.partitions import Partitions
from spark_group_source.protocol.rules import Rules, pause_ms
from spark_group_source.protocol.statistics import Statistics

SILENCES_MAX = 6
"""How often in a row an answer may leave out notes that only tell of resets: some ten seconds, after which what they
would tell is not waited for."""

NAMED_MAX = 10
"""Partitions that an error names."""


class PositionLookups:
    """The lookups of one run.

    Args:
        rules: where partitions start.
        positions: what is asked for, and takes the answers.
        counts: what it counts.
        out: takes orders and log lines; it has the time.
    """

    def __init__(self, rules: Rules, positions: Partitions, counts: Statistics, out: Outbox) -> None:
        self._rules, self._positions, self._counts, self._out = rules, positions, counts, out
        self.known: Mapping[str, int] = {}
        """How many partitions each topic had when the stream first saw it."""
        self.began: set[TopicPartition] = set()
        """Those that nobody committed, and that begin behind their first record, until a batch with them is durable."""
        self._knows_resets = False  # of the time before it had the partitions that it has
        self._stay = 0  # how often it had none: an answer is about the stay in which it was asked
        self._asked_for_resets: int | None = None  # in which stay, while the question is on its way
        self._failures = self._silences = 0
        self._again_at_ms: int | None = None

    def order(self) -> None:
        """Ask for the partitions that came; the first question of a stay is answered before there is another."""
        if not self._positions.ours and (self._knows_resets or self._asked_for_resets == self._stay):
            self._knows_resets, self._stay = False, self._stay + 1
        waits = self._again_at_ms is not None or self._asked_for_resets is not None
        if not waits and (ask := self._positions.begin_lookups()):
            beside = self._beside(ask)
            self._asked_for_resets = self._stay if beside else None
            self._out.order(ev.FetchCommittedOffsets(partitions=ask, beside=beside))

    def deadlines_ms(self) -> list[int]:
        return [] if self._again_at_ms is None else [self._again_at_ms]

    def tick(self) -> None:
        if self._again_at_ms is not None and self._out.now_ms >= self._again_at_ms:
            self._again_at_ms = None

    def made_again(self, topics: Iterable[str]) -> None:
        """The stream began with other topics of these names: of the new ones all partitions came later."""
        self.known = {**self.known, **{topic: 0 for topic in topics if topic in self.known}}

    def committed_read(self, event: ev.CommittedOffsetsRead, stream: str) -> None:
        """The group's committed offsets; a newer reset among them makes everything that was known void."""
        if event.unanswered and self._silences < SILENCES_MAX:
            self._silences += 1
            self.ask_later(
                event.requested, f"the answer left out {len(event.unanswered)} others that may tell of a reset"
            )
            return
        self._silences = 0
        if event.reset_number is not None:
            self._knows_resets |= self._asked_for_resets == self._stay
            self._asked_for_resets = None
        reset_number = max(
            [at.reset_number for at in event.offsets.values() if at is not None] + [event.reset_number or 0]
        )
        if reset_number > self._positions.reset_number:
            self._out.log(
                f"the group was reset (for the {reset_number}. time): every partition goes on where the reset says"
            )
            self._positions.apply_reset(reset_number)
        unknown, restored = [], []
        for tp, committed in event.offsets.items():
            partition = self._positions.end_lookup(tp)
            if not isinstance(partition, Fetching):
                continue
            self.began.discard(tp)
            if committed is None and partition.memory is None:
                unknown.append(tp)
                continue
            if committed is None:
                restored.append(tp)
            if (
                ours := self._positions.apply_committed(tp, partition, committed, stream=stream)
            ) is not None and committed:
                self._out.log(f"{tp} was moved from {ours} to {committed.offset} by another member or an operator")
        self._restored(restored)
        for tp in unknown:
            self._positions.begin_resolving(tp)
        if unknown:
            starting = self._rules.starting  # but for new partitions: their first records would be skipped by "latest"
            words = {tp: EARLIEST if _is_new(tp, self.known) else starting.of(tp) for tp in unknown}
            self.began |= {tp for tp, word in words.items() if word != EARLIEST}
            self._out.order(ev.ResolveStarts(starts=words))
        self._left_out(event.requested, event.offsets, again=bool(unknown))

    def starts_resolved(self, event: ev.StartsResolved) -> SourceError | None:
        """Where partitions without a committed offset start. Returns what the run has to end with, if it has to."""
        late = []
        for tp, at in event.offsets.items():
            partition = self._positions.end_lookup(tp)
            if not isinstance(partition, Resolving):
                continue
            if at is None:
                late.append(tp)
                continue
            if _is_new(tp, self.known) and at > 0 and self._rules.fail_on_data_loss:
                return data_loss(tp, f"new partition {tp} begins at {at}, not at 0", expected=0, available=at)
            self._positions.apply_start(tp, partition, at)
        if late:
            if (refused := _too_young(late, self._rules)) is not None:
                return refused
            for tp in late:
                self._positions.repeat_resolving(tp)
            self._out.order(ev.ResolveStarts(starts=dict.fromkeys(late, LATEST)))
        self._left_out(event.requested, event.offsets, again=bool(late))
        return None

    def _restored(self, tps: list[TopicPartition]) -> None:
        """Of partitions that this stream has read Kafka has no offset. That it had one nobody can say."""
        self._counts.offsets_restored += len(tps)
        if tps:
            self._out.log(
                f"Kafka has no committed offset of {len(tps)} partitions that this stream has read, such as {tps[0]}: "
                "expired, deleted, or never there. They go on where the checkpoint says, not at startingOffsets"
            )

    def _beside(self, asked: tuple[TopicPartition, ...]) -> tuple[TopicPartition, ...]:
        """A group is reset while nobody is in it, and only what it ever committed tells of it. So who comes back asks
        for all that it knows of; who has had a partition all the time cannot have missed one."""
        if self._knows_resets:
            return ()
        mine = set(asked)
        known = (TopicPartition(topic, p) for topic, count in self.known.items() for p in range(count))
        return tuple(tp for tp in dict.fromkeys([*known, *self._positions.remembered()]) if tp not in mine)

    def _left_out(
        self, asked: tuple[TopicPartition, ...], offsets: Mapping[TopicPartition, object], *, again: bool
    ) -> None:
        """An answer that leaves something out is no answer for it. ``again``: it led to another question."""
        left = tuple(tp for tp in asked if tp not in offsets)
        if left:
            self.ask_later(left, "the answer did not name them", warn=self._failures > 0)
        elif not again:
            self._failures = 0

    def ask_later(self, partitions: tuple[TopicPartition, ...], reason: str, *, warn: bool = False) -> None:
        """Ask again after a pause. ``warn``: not the first time, when a topic that was just made answers so."""
        self._asked_for_resets = None
        self._positions.fail_lookups(partitions)
        self._again_at_ms = self._out.now_ms + pause_ms(self._failures)
        self._failures += 1
        self._out.log(f"offsets of {len(partitions)} partitions could not be read: {reason}; asking again", warn=warn)


def _is_new(tp: TopicPartition, known: Mapping[str, int]) -> bool:
    """Whether the partition was added after the stream began."""
    return tp.partition >= known.get(tp.topic, 0)


def _too_young(tps: Sequence[TopicPartition], rules: Rules) -> OptionError | None:
    """What ``startingOffsetsByTimestampStrategy`` says of partitions without a record that is young enough."""
    if rules.starting.no_match == "latest":
        return None
    return OptionError(
        f"no record of {', '.join(map(str, tps[:NAMED_MAX]))} is as young as the starting timestamp "
        f"{rules.starting.of(tps[0]).value} (milliseconds since the epoch). Give an earlier one, or set "
        "startingOffsetsByTimestampStrategy to latest to start these at their end",
        partitions=[str(tp) for tp in tps],
    )
