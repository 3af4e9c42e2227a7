"""Answers the run's queries about topics, log ends and the group, one request after the other.

Runs in: the stream reader, on Spark's thread; the request thread lists topics through it as well. Deliberately absent:
when a query is sent and what follows from its answer (``protocol``), and retries (``kafka``).
"""

import logging
from collections.abc import Callable

from spark_group_source.kafka import Admin, EpochEnds
from spark_group_source.model import TopicPartition
from spark_group_source.options.table import Options
from spark_group_source.protocol import events as ev

log = logging.getLogger(__name__)


class BrokerQueries:
    """Answers the broker queries of one run.

    Args:
        options: the subscription and the isolation level.
        admin: requests about topics, offsets and groups.
        epoch_ends: requests about leader epochs.
        now_ms: a monotonic clock.
    """

    def __init__(self, options: Options, admin: Admin, epoch_ends: EpochEnds, now_ms: Callable[[], int]) -> None:
        self._options = options
        self._admin = admin
        self._epoch_ends = epoch_ends
        self._now_ms = now_ms
        self._committed = options.isolation_level == "read_committed"

    def topics(self) -> dict[str, int]:
        """Return the subscribed topics and their partition counts.

        Raises:
            TopicMissing: ``subscribe`` names a topic that does not exist.
        """
        if self._options.topic_pattern is None:
            found = self._admin.require_topics(self._options.topics)
        else:
            found = self._admin.matching_topics(self._options.is_subscribed)
        return {name: topic.partitions for name, topic in sorted(found.items())}

    def read_target(self) -> ev.TargetRead:
        """Read the end offset of every subscribed partition.

        Waits for a new partition that some brokers do not know yet. A partition whose end is still unknown is left to
        the next run, with a warning.
        """
        tps = [TopicPartition(topic, p) for topic, count in self.topics().items() for p in range(count)]
        ends = self._admin.latest_of_existing(tps, committed=self._committed)
        if unanswered := [tp for tp in tps if tp not in ends]:
            log.warning(
                "group %s: no broker returned the end offsets of %d partitions, such as %s; the next run reads them",
                self._options.group_id,
                len(unanswered),
                unanswered[0],
            )
        return ev.TargetRead(ends=ends)

    def read_log_ends(self, query: ev.ReadLogEnds) -> ev.LogEndsRead:
        """Send the requests of ``query`` in the order of its fields: end offsets always come first."""
        started_ms = self._now_ms()
        ends, leader_epochs = self._admin.latest_with_epochs(query.ends, committed=self._committed)
        epoch_ends = self._epoch_ends.read(query.epoch_ends)
        topics = self._admin.describe_topics(query.topics)
        firsts = self._admin.earliest(query.firsts, require_all=False)
        log_ends = self._admin.latest(query.log_ends, committed=False, require_all=False)
        return ev.LogEndsRead(
            ends=ends,
            leader_epochs=leader_epochs,
            epoch_ends=epoch_ends,
            firsts=firsts,
            log_ends=log_ends,
            topic_ids={name: topic.id for name, topic in topics.items()},
            took_ms=self._now_ms() - started_ms,
        )

    def describe_group(self) -> ev.GroupDescribed:
        """Describe the group: its state, and the partitions of each client id."""
        found = self._admin.describe_group(self._options.group_id)
        assigned: dict[str, frozenset[TopicPartition]] = {}
        for member in found.members:
            assigned[member.client_id] = assigned.get(member.client_id, frozenset()) | frozenset(member.partitions)
        return ev.GroupDescribed(state=found.state, assigned=assigned)
