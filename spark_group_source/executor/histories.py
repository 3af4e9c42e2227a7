"""Whether the records of a log are those that were planned, told by leader epochs (KIP-320).

Runs in: executor workers. Deliberately absent: what follows from it (``ranges``), and asking.

Every record carries the epoch of the leader that wrote it, and a plan the epoch of the leader that told its ends: what
lay below them then was written by this leader or a former one. A record of a later leader below a planned end is not
one that was planned. The log was cut there meanwhile, and has grown again with others.
"""

from collections.abc import Mapping
from typing import NamedTuple

from spark_group_source.executor.records import Chunk, Run
from spark_group_source.model import TopicPartition


class Stranger(NamedTuple):
    """The first record of a later leader."""

    offset: int
    epoch: int


class Histories:
    """The planned records of one reader's partitions.

    Args:
        leader_epochs: under which the ranges were planned; of partitions that are missing nothing is known.
    """

    def __init__(self, leader_epochs: Mapping[TopicPartition, int]) -> None:
        self._epochs = dict(leader_epochs)
        self.strangers: dict[TopicPartition, Stranger] = {}
        """Where partitions wait for a word of their leader."""

    def planned(self, chunk: Chunk, run: Run, first: int, last: int) -> int:
        """Which of a run's rows [first, last) were planned: up to the one that is returned. Epochs never go back."""
        epoch = self._epochs.get(run.tp)
        if epoch is None or first >= last or chunk.leader_epoch(run.first + last - 1) <= epoch:
            return last
        strange = last - 1
        while first < strange:
            middle = (first + strange) // 2
            if chunk.leader_epoch(run.first + middle) <= epoch:
                first = middle + 1
            else:
                strange = middle
        self.strangers[run.tp] = Stranger(int(run.offsets[strange]), chunk.leader_epoch(run.first + strange))
        return strange

    def distrust(self, tp: TopicPartition) -> None:
        """These brokers count in another way."""
        self._epochs.pop(tp, None)
