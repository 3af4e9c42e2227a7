"""Whether the log below a position is still the one that was read, told by leader epochs (KIP-320).

Runs in: the stream reader (inside ``loss``), tests. Deliberately absent: asking, and what follows for the run.

Every leader of a partition has a number, the *leader epoch*, and every record that of the leader that wrote it. A
leader that was elected without having all records (an unclean election), or that lost some with its disk, goes on at
the end of what it has: the log is *cut* there. When it has grown again its end tells nothing of that. Its epochs do:
whatever lies below an end that was told under epoch E was written under E or before, and a leader can say where such
records end now. Where that is below a position, the position's log was cut there, and what stands from there on is
other records than those that were read. Only who was elected anew can have cut a log, so it is asked only where the
leader epoch is another one than that of the position.

The epoch of a position is not that of its last record, as a consumer has it: planning sees no records. It is that of
the leader that told how far could be read. This one had every record below, and may have written none of them.
"""

from collections.abc import Mapping
from typing import NamedTuple

from spark_group_source.group.offsets import StreamOffset
from spark_group_source.model import TopicPartition

Numbers = Mapping[TopicPartition, int]


class _Known(NamedTuple):
    until: int
    epoch: int


class Heights:
    """Up to where each log is known to be that of a leader epoch."""

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
