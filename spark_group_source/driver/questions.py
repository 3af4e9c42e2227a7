"""The questions that a run asks the brokers on Spark's thread, in the words of the protocol.

Runs in: the stream reader. Deliberately absent: what an answer means (``group``), waiting, and the group's committed
offsets (``worker``).
"""

import logging
from collections.abc import Callable

from spark_group_source.group import events as ev
from spark_group_source.kafka import Admin, EpochEnds
from spark_group_source.model import TopicPartition
from spark_group_source.options.table import Options

log = logging.getLogger(__name__)


class Questions:
    """Asks for one query.

    Args:
        options: which topics, and how far a partition may be read.
        admin, epoch_ends: the questions to the cluster.
        now_ms: a clock for durations.
    """

    def __init__(self, options: Options, admin: Admin, epoch_ends: EpochEnds, now_ms: Callable[[], int]) -> None:
        self._options = options
        self._admin = admin
        self._epoch_ends = epoch_ends
        self._now_ms = now_ms
        self._committed = options.isolation_level == "read_committed"

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

    def target(self) -> ev.TargetTaken:
        """Where every partition of the subscription ends now. A new one that not every broker knows yet is waited for:
        without its end the run leaves it to the next one, and says so."""
        tps = [TopicPartition(topic, p) for topic, count in self.topics().items() for p in range(count)]
        ends = self._admin.latest_of_all(tps, committed=self._committed)
        if left := [tp for tp in tps if tp not in ends]:
            text = "partitions left to the next run, because no broker told their end yet: %d, such as %s"
            log.warning(text, len(left), left[0])
        return ev.TargetTaken(ends=ends)

    def look(self, question: ev.Look) -> ev.Looked:
        """Ask what is asked, in the order of its fields."""
        began_ms = self._now_ms()
        ends, leader_epochs = self._admin.ends(question.ends, committed=self._committed)
        epoch_ends = self._epoch_ends.ask(question.epoch_ends)
        topics = self._admin.describe(question.topics)
        firsts = self._admin.earliest(question.firsts, whole=False)
        log_ends = self._admin.latest(question.log_ends, committed=False, whole=False)
        return ev.Looked(
            ends=ends,
            leader_epochs=leader_epochs,
            epoch_ends=epoch_ends,
            firsts=firsts,
            log_ends=log_ends,
            topic_ids={name: topic.id for name, topic in topics.items()},
            took_ms=self._now_ms() - began_ms,
        )

    def group(self) -> ev.GroupSeen:
        """Who is in the group."""
        found = self._admin.group(self._options.group_id)
        given: dict[str, frozenset[TopicPartition]] = {}
        for member in found.members:
            given[member.client_id] = given.get(member.client_id, frozenset()) | frozenset(member.partitions)
        return ev.GroupSeen(state=found.state, given=given)
