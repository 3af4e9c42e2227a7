"""Operations on a whole group: read, commit and delete its offsets, delete the group.

Runs in: the user's driver (CLI), the exporter. Deliberately absent: the offsets to commit (``cli.reset``). A query
reads the offsets of its own partitions (``group_offsets``) and commits as a member of the group (``committer``).
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException

from spark_group_source import command_line
from spark_group_source.error_codes import Request
from spark_group_source.errors import AccessDenied, BrokerUnavailable, CommitFailed
from spark_group_source.kafka.admin import COORDINATOR_BOUND, Admin, Bound, Missing
from spark_group_source.kafka.group_offsets import GroupOffsets
from spark_group_source.kafka.offset_deletion import delete_offsets
from spark_group_source.kafka.translation import CommittedOffset, ListedGroup, to_kafka
from spark_group_source.model import TopicPartition


class GroupAdmin(Admin):
    """An :class:`Admin` that also reads and changes the committed offsets of whole groups."""

    def committed(self, group: str) -> dict[TopicPartition, CommittedOffset]:
        """Return every committed offset of the group, in the topics that the user may describe.

        Requests every partition explicitly: the library's request for all offsets of a group aborts the whole process
        if the coordinator answers that it is not available (librdkafka 2.16).

        Raises:
            BrokerUnavailable: some partitions were not answered.
        """
        listed = self.list_topics()
        if blank := sorted(name for name, topic in listed.items() if not topic.partitions):
            raise BrokerUnavailable(
                f"group {group!r}: brokers returned no partitions of topic {blank[0]}, so not all of the group's "
                "offsets can be read. Try again in a moment",
                group=group,
            )
        tps = [TopicPartition(name, p) for name, topic in listed.items() for p in topic.partitions]
        found = self.read_offsets(group, tps)
        if unanswered := [tp for tp in tps if tp not in found]:
            raise BrokerUnavailable(
                f"group {group!r}: no answer for {len(unanswered)} partitions, such as {unanswered[0]}: a transaction "
                "with its offset is open, or brokers do not know the partition yet. Try again in a moment",
                group=group,
            )
        return {tp: at for tp, at in found.items() if at is not None}

    def groups(self) -> list[ListedGroup]:
        """Return every group that the user may describe, sorted by name.

        Raises:
            BrokerUnavailable: a broker did not answer, so that its groups would be missing.
        """
        found = self._request(Request.GROUP, "listing groups", self._list_groups)
        return sorted(ListedGroup(one.group_id, one.state.name.lower(), one.type.name.lower()) for one in found)

    def _list_groups(self, bound: Bound) -> list[Any]:
        answer = self._answer(Request.GROUP, self._client.list_consumer_groups(**bound))
        for error in answer.errors:  # of one broker, whose groups would be missing
            raise KafkaException(error)  # a KafkaError, although the library's documentation says exception
        valid: list[Any] = answer.valid
        return valid

    def delete_offsets(self, group: str, tps: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Delete committed offsets, also while the group has members: see :func:`offset_deletion.delete_offsets`."""
        return delete_offsets(self._settings, group, tps, environment=self._environment)

    def read_offsets(self, group: str, tps: Iterable[TopicPartition]) -> dict[TopicPartition, CommittedOffset | None]:
        """Read committed offsets of the group; None: there is none. Unanswered partitions are left out.

        Raises:
            BrokerUnavailable: no answer.
        """
        offsets = GroupOffsets(self._settings, group=group, environment=self._environment)
        try:
            return offsets.read(tps)
        finally:
            offsets.close()

    def delete_group(self, group: str) -> None:
        """Delete a group that has no members, with all of its offsets.

        Raises:
            GroupError: it has members, or does not exist (reported twice).
            AccessDenied: the user needs Delete on the group, refused twice.
        """

        def send(_: Bound) -> None:
            future = self._client.delete_consumer_groups([group], **COORDINATOR_BOUND)[group]
            if isinstance(self._answer(Request.DELETE, future, group), Missing):
                raise KafkaException(KafkaError(KafkaError.GROUP_ID_NOT_FOUND), group)

        self._request(Request.DELETE, f"deleting group {group!r}", send)

    def move_committed(
        self, group: str, offsets: Mapping[TopicPartition, int], *, notes: Mapping[TopicPartition, str] | None = None
    ) -> None:
        """Commit offsets of a group that has no members, in one request.

        Args:
            notes: the metadata of each partition's offset; empty for partitions that are not in it.

        Raises:
            AccessDenied: the user may not commit for the group.
            CommitFailed: Kafka refused an offset, for example because the group has members; or the request was not
                answered, and may still take effect.
        """
        entries = [to_kafka(tp, offset, (notes or {}).get(tp, "")) for tp, offset in offsets.items()]
        request = [ConsumerGroupTopicPartitions(group, entries)]
        try:
            future = self._client.alter_consumer_group_offsets(request, **COORDINATOR_BOUND)[group]
            answer = self._answer(Request.ALTER, future)
        except KafkaException as exc:
            error = exc.args[0]
            if error.code() < 0:  # librdkafka's own code: no broker has answered
                describe = command_line.spark_group("describe", self.connection, group)
                raise CommitFailed(
                    f"Kafka did not confirm the new offsets of group {group!r} ({error.str()}). They may still be "
                    f"committed. Check with {command_line.in_sentence(describe)}, then try again"
                ) from exc
            refused = f"Kafka refused new offsets of group {group!r}: {error.str()}"
            if missing := self._client_info.missing_permission(Request.ALTER, error.code(), group):
                raise AccessDenied(
                    f"{refused}. {self._client_info.user} needs {missing}", op="committing offsets of the group"
                ) from exc
            raise CommitFailed(refused) from exc
        if isinstance(answer, Missing):
            raise CommitFailed(f"Kafka refused new offsets of group {group!r}: a topic does not exist")
        failed = [f"{p.topic}-{p.partition}: {p.error}" for p in answer.topic_partitions if p.error is not None]
        if failed:
            raise CommitFailed(f"Kafka refused new offsets of group {group!r}: {', '.join(failed[:10])}")
