"""What an operator does to a group's offsets: all of them at a glance, and others in their place.

Runs in: the user's driver (CLI). Deliberately absent: what is to be committed (``cli.reset``). A query reads the
offsets of the partitions that it knows (``group_offsets``) and commits as the group's member (``committer``).
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException

from spark_group_source.error_codes import Request
from spark_group_source.errors import AccessDenied, BrokerUnavailable, CommitFailed
from spark_group_source.kafka.admin import COORDINATOR_BOUND, Admin, Bound, Missing
from spark_group_source.kafka.group_offsets import GroupOffsets
from spark_group_source.kafka.offset_deletion import delete_offsets
from spark_group_source.kafka.translation import CommittedOffset, ListedGroup, to_kafka
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
        found = self.read_offsets(group, tps)
        if silent := [tp for tp in tps if tp not in found]:
            raise BrokerUnavailable(
                f"group {group!r}: no answer for {len(silent)} partitions, the first {silent[0]}: a transaction with "
                "its offset is not finished, or brokers do not know the partition yet. Ask again in a moment",
                group=group,
            )
        return {tp: at for tp, at in found.items() if at is not None}

    def groups(self) -> list[ListedGroup]:
        """Every group that this user may describe, by name.

        Raises:
            BrokerUnavailable: a broker did not say which groups it has, so that some would be missing.
        """
        found = self._asked(Request.GROUP, "listing groups", self._listed)
        return sorted(ListedGroup(one.group_id, one.state.name.lower(), one.type.name.lower()) for one in found)

    def _listed(self, bound: Bound) -> list[Any]:
        answer = self._answer(Request.GROUP, self._client.list_consumer_groups(**bound))
        for failed in answer.errors:  # of one broker: its groups would be missing
            raise KafkaException(failed)  # the library's documentation calls them exceptions; they are KafkaErrors
        valid: list[Any] = answer.valid
        return valid

    def delete_offsets(self, group: str, tps: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Delete committed offsets, also of a group with members: :func:`offset_deletion.delete_offsets`."""
        return delete_offsets(self._settings, group, tps, environment=self._environment)

    def read_offsets(self, group: str, tps: Iterable[TopicPartition]) -> dict[TopicPartition, CommittedOffset | None]:
        """What the group has committed of these now; those that were not answered are left out.

        Raises:
            BrokerUnavailable: no answer.
        """
        offsets = GroupOffsets(self._settings, group=group, environment=self._environment)
        try:
            return offsets.read(tps)
        finally:
            offsets.close()

    def delete_group(self, group: str) -> None:
        """Delete a group without members, with all of its offsets.

        Raises:
            GroupError: it has members, or there is no such group, reported twice.
            AccessDenied: the user needs Delete on the group, reported twice.
        """

        def ask(_: Bound) -> None:
            future = self._client.delete_consumer_groups([group], **COORDINATOR_BOUND)[group]
            if isinstance(self._answer(Request.DELETE, future, group), Missing):
                raise KafkaException(KafkaError(KafkaError.GROUP_ID_NOT_FOUND), group)

        self._asked(Request.DELETE, f"deleting group {group!r}", ask)

    def move_committed(
        self, group: str, offsets: Mapping[TopicPartition, int], *, notes: Mapping[TopicPartition, str] | None = None
    ) -> None:
        """Commit for a group without members, as an operator, in one request.

        Args:
            notes: the text beside each offset; a partition that is not in it gets none.

        Raises:
            AccessDenied: this user may not move the group.
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
            refused = f"Kafka refused to move group {group!r}: {error.str()}"
            if missing := self._asker.needs(Request.ALTER, error.code(), group):
                raise AccessDenied(f"{refused}. {self._asker.user} needs {missing}", op="moving the group") from exc
            raise CommitFailed(refused) from exc
        if isinstance(answer, Missing):
            raise CommitFailed(f"Kafka refused to move group {group!r}: a topic does not exist")
        failed = [f"{p.topic}-{p.partition}: {p.error}" for p in answer.topic_partitions if p.error is not None]
        if failed:
            raise CommitFailed(f"Kafka refused to move group {group!r}: {', '.join(failed[:10])}")
