"""What an operator does to a group's offsets: all of them at a glance, and others in their place.

Runs in: the user's driver (CLI). Deliberately absent: what is to be committed (``cli.reset``). A query reads the
offsets of the partitions that it knows (``group_offsets``) and commits as the group's member (``committer``).
"""

from collections.abc import Mapping

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException

from spark_group_source.answers import Request
from spark_group_source.errors import BrokerUnavailable, CommitFailed
from spark_group_source.kafka.admin import COORDINATOR_BOUND, Admin, Missing
from spark_group_source.kafka.described import CommittedOffset
from spark_group_source.kafka.group_offsets import GroupOffsets
from spark_group_source.kafka.translation import to_kafka
from spark_group_source.model import TopicPartition


class GroupAdmin(Admin):
    """An :class:`Admin` that also reads and moves the committed offsets of whole groups."""

    def committed(self, group: str) -> dict[TopicPartition, CommittedOffset]:
        """Every offset that the group committed, in the topics that this user may describe.

        Each partition is asked about: the library's question for all that a group has ends the whole process where the
        coordinator answers that it cannot say (librdkafka 2.16 has nowhere to look for another one).

        Raises:
            BrokerUnavailable: of some there was no answer.
        """
        listed = self.listed()
        if blank := sorted(name for name, topic in listed.items() if not topic.partitions):
            raise BrokerUnavailable(
                f"group {group!r}: brokers do not say now which partitions topic {blank[0]} has, so the group's "
                "offsets cannot all be read. Ask again in a moment",
                group=group,
            )
        tps = [TopicPartition(name, p) for name, topic in listed.items() for p in topic.partitions]
        offsets = GroupOffsets(self._settings, group=group, runtime=self._runtime)
        try:
            found = offsets.read(tps)
        finally:
            offsets.close()
        if silent := [tp for tp in tps if tp not in found]:
            raise BrokerUnavailable(
                f"group {group!r}: no answer for {len(silent)} partitions, the first {silent[0]}: a transaction with "
                "its offset is not finished, or brokers do not know the partition yet. Ask again in a moment",
                group=group,
            )
        return {tp: at for tp, at in found.items() if at is not None}

    def move_committed(
        self, group: str, offsets: Mapping[TopicPartition, int], *, notes: Mapping[TopicPartition, str] | None = None
    ) -> None:
        """Commit for a group without members, as an operator, in one request.

        Args:
            notes: the text beside each offset; a partition that is not in it gets none.

        Raises:
            CommitFailed: Kafka refused one of them, for example because the group has members; or it was not answered,
                and then it may still happen.
        """
        entries = [to_kafka(tp, offset, (notes or {}).get(tp, "")) for tp, offset in offsets.items()]
        request = [ConsumerGroupTopicPartitions(group, entries)]
        try:
            future = self._client.alter_consumer_group_offsets(request, **COORDINATOR_BOUND)[group]
            answer = self._answer(Request.ALTER, future)
        except KafkaException as exc:
            error = exc.args[0]
            if error.code() < 0:  # librdkafka's own word: no broker has said anything
                raise CommitFailed(
                    f"Kafka did not answer whether group {group!r} was moved ({error.str()}). It may be yet: look with "
                    "spark-group describe, then do this again"
                ) from exc
            missing = self._asker.needs(Request.ALTER, error.code(), group)
            needs = f". {self._asker.user} needs {missing}" if missing else ""
            raise CommitFailed(f"Kafka refused to move group {group!r}: {error.str()}{needs}") from exc
        if isinstance(answer, Missing):
            raise CommitFailed(f"Kafka refused to move group {group!r}: a topic does not exist")
        refused = [f"{p.topic}-{p.partition}: {p.error}" for p in answer.topic_partitions if p.error is not None]
        if refused:
            raise CommitFailed(f"Kafka refused to move group {group!r}: {', '.join(refused[:10])}")
