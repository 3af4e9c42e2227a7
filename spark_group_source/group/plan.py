"""The next offset: which ranges a batch reads, and everything else that the checkpoint has to remember.

Runs in: the stream reader, tests, benchmarks. Deliberately absent: where partitions stand and who has them
(``machine``), what the brokers say (``loss``), and when a batch is planned. This is the only place that makes
a :class:`StreamOffset`.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from spark_group_source.group import admission
from spark_group_source.group.offsets import StreamOffset
from spark_group_source.group.rules import Rules
from spark_group_source.model import TopicPartition

if TYPE_CHECKING:
    from spark_group_source.group.machine import Machine


class Planner:
    """Cuts the batches of one run.

    Args:
        rules: the limits.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._planned_at_ms: int | None = None
        self._target: Mapping[TopicPartition, int] | None = None

    def take_target(self, ends: Mapping[TopicPartition, int]) -> None:
        """Fix where an AvailableNow run ends; partitions that are not among them are left for the next one."""
        self._target = ends

    @property
    def bounded(self) -> bool:
        """Whether this run has a target."""
        return self._target is not None

    def cut(
        self,
        machine: "Machine",
        ends: Mapping[TopicPartition, int],
        topic_ids: Mapping[str, str],
        leader_epochs: Callable[[Mapping[TopicPartition, int]], dict[TopicPartition, int]],
        *,
        first: bool,
        unlimited: bool,
        now_ms: int,
    ) -> StreamOffset | None:
        """The next batch, or None when there is nothing to read (or not enough yet).

        The first batch of a stream is planned even when it reads nothing: it carries the stream's id and start
        positions into the checkpoint. A partition whose end was not told reads nothing, but its position is written
        down like all others.

        Args:
            machine: who has which partition, and where it stands.
            ends: up to where each may be read; who is missing was not answered.
            topic_ids: of the topics whose records were looked at.
            leader_epochs: those to write down, for positions.
            first: this is the first batch of the stream.
            unlimited: Trigger.Once, which takes all there is.
        """
        positions = machine.plannable()
        if self._target is not None:
            ends = {tp: min(end, self._target.get(tp, positions.get(tp, end))) for tp, end in ends.items()}
        backlogs = {tp: (at, max(at, ends.get(tp, at))) for tp, at in positions.items()}
        total = sum(end - at for at, end in backlogs.values())
        if not (total or first) or not self._enough(total, unlimited=unlimited, now_ms=now_ms):
            return None
        limit = None if unlimited else self._rules.max_offsets
        until = admission.cut(backlogs, limit, machine.seq + 1)
        self._planned_at_ms = now_ms
        known = machine.lookups.known
        read = {tp.topic for tp in until}
        followed = machine.positions.followed()
        owed = {tp: at for tp, at in machine.positions.owed().items() if tp not in until}
        return StreamOffset(
            group=self._rules.group,
            stream=machine.stream,
            seq=machine.seq + 1,
            topic_ids={topic: id_ for topic, id_ in topic_ids.items() if topic in known or topic in read},
            known=known,
            ranges={tp: (backlogs[tp][0], end) for tp, end in until.items()},
            epoch=machine.positions.epoch,
            followed=followed & until.keys() if followed else followed,
            began=frozenset(machine.lookups.began & until.keys()),
            leader_epochs=leader_epochs(positions),
            cut={tp: at for tp, at in machine.positions.cut().items() if tp in until},
            lost={tp: at for tp, at in machine.positions.lost().items() if tp in until},
            owed=owed,
            since=machine.positions.since(owed),
        )

    def _enough(self, total: int, *, unlimited: bool, now_ms: int) -> bool:
        floor = None if unlimited or self.bounded else self._rules.min_offsets
        first = self._planned_at_ms is None
        return admission.enough(total, floor, self._planned_at_ms or 0, now_ms, self._rules.max_delay_ms, first)
