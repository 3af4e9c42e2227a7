"""From "these partitions stand here" to the next batch: end offsets, limits, lost data, and the offset JSON.

Runs in: the stream reader, on Spark's thread. Deliberately absent: who holds which partition (``group``) and waiting
for it (``coordinator``).
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from spark_group_source.errors import DataLoss, OptionError, TopicMissing
from spark_group_source.group import admission
from spark_group_source.group.offsets import StreamOffset
from spark_group_source.kafka import Admin
from spark_group_source.model import TopicPartition
from spark_group_source.options.table import Options

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Look:
    """What the brokers said at one moment about the partitions of a plan."""

    ends: Mapping[TopicPartition, int]
    """Where each may be read to; partitions whose topic is gone are not in it."""
    moved: Mapping[TopicPartition, int] = field(default_factory=dict)
    """Partitions that must go on elsewhere because their records are gone (only with failOnDataLoss=false)."""
    reason: str = ""


class Planner:
    """Cuts batches for one query run.

    Args:
        options: the query's options.
        admin: questions to the cluster.
    """

    def __init__(self, options: Options, admin: Admin) -> None:
        self._options = options
        self._admin = admin
        self._ids: dict[str, str] = {}
        self._known: Mapping[str, int] = {}
        self._turn: TopicPartition | None = None
        self._checked: set[TopicPartition] = set()
        self._gone_said: set[str] = set()
        self._target: dict[TopicPartition, int] | None = None
        self._planned_at_ms: int | None = None
        self.ends: dict[TopicPartition, int] = {}
        """The end offsets seen last, for progress reports."""

    def adopt(self, offset: StreamOffset) -> None:
        """Go on from a checkpoint: its topic ids and the turn of the fair cut."""
        self._ids = dict(offset.topic_ids)
        self._turn = offset.turn

    def take_target(self) -> None:
        """Fix where an AvailableNow run ends: every subscribed partition at its end of this moment."""
        tps = self.partitions()
        self._target = self._admin.latest(tps, committed=self._committed)

    def found(self) -> dict[str, int]:
        """The topics of a stream without a past, after its starting options were held against them.

        Raises:
            OptionError: the JSON names other partitions than there are.
        """
        topics = self.topics()
        self._options.starting.resolve(_all(topics))
        return topics

    def topics(self) -> dict[str, int]:
        """The subscribed topics and their partition counts.

        Raises:
            TopicMissing: ``subscribe`` names one that does not exist.
        """
        if self._options.topic_pattern is None:
            found = self._admin.require(self._options.topics)
        else:
            found = self._admin.topics(self._options.wants)
        return {name: topic.partitions for name, topic in sorted(found.items())}

    def partitions(self) -> list[TopicPartition]:
        return [TopicPartition(topic, p) for topic, count in self.topics().items() for p in range(count)]

    # --- where partitions start -------------------------------------------------------------------------------------

    def starts(self, initial: tuple[TopicPartition, ...], new: tuple[TopicPartition, ...]) -> dict[TopicPartition, int]:
        """Resolve the starting options for ``initial``, and the beginning for ``new`` ones.

        Raises:
            OptionError: no record is young enough.
            DataLoss: a new partition does not begin at 0: its first records were gone before anyone read them.
        """
        starting = self._options.starting
        wanted = {tp: starting.of(tp) for tp in initial}
        found = {tp: at.value for tp, at in wanted.items() if at.kind == "offset"}
        found |= self._admin.earliest(tp for tp, at in wanted.items() if at.kind == "earliest")
        found |= self._by_time({tp: at.value for tp, at in wanted.items() if at.kind == "time"}, starting.no_match)
        late = [tp for tp, at in wanted.items() if at.kind == "latest"]
        found |= self._admin.latest(late, committed=self._committed)
        begins = self._admin.earliest(new)
        for tp, first in begins.items():
            if first > 0:
                self._lost(tp, 0, f"new partition {tp} begins at {first}, not at 0", available=first)
        return found | begins

    def _by_time(self, times: dict[TopicPartition, int], no_match: str) -> dict[TopicPartition, int]:
        found = self._admin.at_time(times)
        none = [tp for tp, offset in found.items() if offset is None]
        if none and no_match == "error":
            raise OptionError(
                f"no record of {', '.join(map(str, none[:10]))} is as young as the starting timestamp {times[none[0]]} "
                "(milliseconds since the epoch). Give an earlier one, or set startingOffsetsByTimestampStrategy to "
                "latest to start these at their end",
                partitions=[str(tp) for tp in none],
            )
        ends = self._admin.latest(none, committed=self._committed)
        return {tp: offset for tp, offset in found.items() if offset is not None} | ends

    # --- one batch --------------------------------------------------------------------------------------------------

    def look(self, positions: Mapping[TopicPartition, int]) -> Look:
        """Ask how far the partitions can be read, and whether what is to be read is still there.

        Raises:
            DataLoss, TopicMissing: with failOnDataLoss.
        """
        self.ends = ends = self._admin.latest(positions, committed=self._committed)
        moved: dict[TopicPartition, int] = {}
        reason = ""
        if ends != positions or not self._checked.issuperset(positions):
            # Ids are read after the ends: if a topic still has its id, the ends are of that topic.
            moved, reason = self._recreated(positions, ends)
            if not moved:
                moved, reason = self._aged_out(positions, ends)
        if self._target is not None:
            ends = {tp: min(end, self._target.get(tp, positions[tp])) for tp, end in ends.items()}
        return Look(ends, moved, reason)

    def cut(
        self,
        look: Look,
        positions: Mapping[TopicPartition, int],
        start: StreamOffset,
        *,
        stream: str,
        foreign: frozenset[TopicPartition],
        known: Mapping[str, int],
        now_ms: int,
        unlimited: bool,
    ) -> StreamOffset | None:
        """The next batch, or None when there is nothing to read (or not enough yet).

        The first batch of a stream is planned even when it reads nothing: it carries the stream's id and start
        positions into the checkpoint.
        """
        options = self._options
        backlogs = {tp: (at, max(at, look.ends[tp])) for tp, at in positions.items() if tp in look.ends}
        total = sum(end - at for at, end in backlogs.values())
        if not total and not start.is_initial:
            return None
        first = self._planned_at_ms is None
        floor = None if unlimited or self._target is not None else options.min_offsets_per_trigger
        waited_from_ms = self._planned_at_ms or 0
        if not admission.enough(total, floor, waited_from_ms, now_ms, options.max_trigger_delay_ms, first):
            return None
        limit = None if unlimited else options.max_offsets_per_trigger
        until, self._turn = admission.cut(backlogs, limit, self._turn)
        self._planned_at_ms = now_ms
        return StreamOffset(
            group=options.group_id,
            stream=stream,
            seq=start.seq + 1,
            topic_ids={topic: id_ for topic, id_ in self._ids.items() if topic in known or _has(topic, until)},
            known=known,
            ranges={tp: (backlogs[tp][0], end) for tp, end in until.items()},
            followed=frozenset(tp for tp in foreign if tp in until),
            turn=self._turn,
        )

    @property
    def at_target(self) -> bool:
        """Whether this run ends when there is nothing left (AvailableNow)."""
        return self._target is not None

    @property
    def _committed(self) -> bool:
        return self._options.isolation_level == "read_committed"

    # --- lost data --------------------------------------------------------------------------------------------------

    def _recreated(
        self, positions: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
    ) -> tuple[dict[TopicPartition, int], str]:
        described = self._admin.describe(tp.topic for tp in positions)
        again = {name for name, topic in described.items() if self._ids.get(name, topic.id) != topic.id}
        for name in {tp.topic for tp in positions} - described.keys():
            self._gone(name)
        if again:
            name = min(again)
            tp = next(tp for tp in positions if tp.topic in again)
            reason = f"topic {name} was deleted and made again: its former records are gone"
            self._lost(tp, positions[tp], reason, available=ends.get(tp, 0))
            self._ids.update({topic: described[topic].id for topic in again})
            return self._admin.earliest(tp for tp in positions if tp.topic in again), f"{reason}; its new ones follow"
        self._ids.update({name: topic.id for name, topic in described.items()})
        return {}, ""

    def _aged_out(
        self, positions: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
    ) -> tuple[dict[TopicPartition, int], str]:
        """Look once at every partition that came: is its position still in the log? Later losses show while reading."""
        fresh = [tp for tp in positions if tp not in self._checked]
        self._checked = set(positions)
        moved = {}
        for tp, first in self._admin.earliest(fresh).items():
            if positions[tp] < first:
                reason = f"the records of {tp} from {positions[tp]} on are gone: it begins at {first} now"
                self._lost(tp, positions[tp], reason, available=first)
                moved[tp] = first
        beyond = [tp for tp in fresh if positions[tp] > ends.get(tp, positions[tp])]
        for tp, end in self._admin.latest(beyond, committed=False).items():
            if positions[tp] > end:
                reason = f"{tp} ends at {end}, before the position {positions[tp]}: its last records were lost"
                self._lost(tp, positions[tp], reason, available=end)
        return (moved, f"{len(moved)} partitions go on at their first record that is left" if moved else "")

    def _gone(self, topic: str) -> None:
        text = f"topic {topic} does not exist any more"
        if self._options.fail_on_data_loss:
            raise TopicMissing(
                f"{text}. Take it out of the subscription, or set failOnDataLoss to false to go on without it",
                topics=[topic],
            )
        if topic not in self._gone_said:
            self._gone_said.add(topic)
            log.warning("%s; the query goes on without it", text)

    def _lost(self, tp: TopicPartition, expected: int, text: str, *, available: int) -> None:
        if self._options.fail_on_data_loss:
            raise DataLoss(
                f"{text}. Set failOnDataLoss to false to go on with the records that are left",
                topic=tp.topic,
                partition=tp.partition,
                expected=expected,
                available=available,
            )
        log.warning("data loss: %s", text)


def _all(topics: Mapping[str, int]) -> list[TopicPartition]:
    return [TopicPartition(topic, p) for topic, count in topics.items() for p in range(count)]


def _has(topic: str, partitions: Mapping[TopicPartition, int]) -> bool:
    return any(tp.topic == topic for tp in partitions)
