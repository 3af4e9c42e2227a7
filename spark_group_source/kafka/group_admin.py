"""Operations on a whole group: read, commit and delete its offsets, delete the group.

Runs in: the user's driver (CLI), the exporter. Deliberately absent: the offsets to commit (``cli.group_reset``), the
partitions whose offsets to delete (``cli.offsets``), and the meaning of error codes (``error_codes``). A query reads
the offsets of its own partitions (``group_offsets``) and commits as a member of the group (``committer``).
"""

import ctypes as c
import functools
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from typing import Any, NamedTuple

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException

from spark_group_source import command_line
from spark_group_source.error_codes import CODES, Meaning, Request, meaning
from spark_group_source.errors import AccessDenied, BrokerUnavailable, CommitFailed
from spark_group_source.kafka.admin import COORDINATOR_BOUND, COORDINATOR_TIMEOUT_S, Admin, Bound, Missing
from spark_group_source.kafka.group_offsets import GroupOffsets
from spark_group_source.kafka.retry import RefusalWatch, Retry
from spark_group_source.kafka.translation import (
    ClientInfo,
    CommitSizes,
    CommittedOffset,
    ListedGroup,
    OffsetNote,
    from_kafka,
)
from spark_group_source.librdkafka import (
    CLIENT,
    PARTITIONS,
    POINTER,
    POINTERS,
    POLL_MS,
    PRODUCER,
    SIZE,
    TEXT,
    Client,
    Library,
    Signatures,
    text,
)
from spark_group_source.model import TopicPartition


class GroupAdmin(Admin):
    """An :class:`Admin` that also reads and changes the committed offsets of whole groups."""

    def committed(self, group: str, *, stable: bool = True) -> dict[TopicPartition, CommittedOffset]:
        """Return every committed offset of the group, in the topics that the user may describe.

        Requests every partition explicitly: the library's request for all offsets of a group aborts the whole process
        if the coordinator answers that it is not available (librdkafka 2.16).

        Args:
            stable: an offset in an open transaction, which may move it, is not answered. False: the offset before the
                transaction is returned, to show it.

        Raises:
            BrokerUnavailable: some partitions were not answered.
        """
        listed = self.list_topics()
        if blank := sorted(name for name, topic in listed.items() if not topic.partitions):
            raise BrokerUnavailable(
                f"group {group!r}: brokers returned no partitions of topic {blank[0]}, so not all of the group's "
                "offsets can be read. Try again in a moment"
            )
        tps = [TopicPartition(name, p) for name, topic in listed.items() for p in topic.partitions]
        found = self.read_offsets(group, tps, stable=stable)
        if unanswered := [tp for tp in tps if tp not in found]:
            raise BrokerUnavailable(
                f"group {group!r}: no answer for {len(unanswered)} partitions, such as {unanswered[0]}: "
                f"{'a transaction with its offset is open, or ' if stable else ''}brokers do not know the partition "
                "yet. Try again in a moment"
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
        """Delete committed offsets, also while the group has members (KIP-496). A request may be sent twice, as
        deleting is idempotent. It is as small as a commit, because the coordinator writes a deletion in the same way.

        The Python client lacks this call, librdkafka has it: each request creates a client of its own, uses it on the
        calling thread, and destroys it.

        Args:
            group: the consumer group; it may have members.
            tps: at least one partition.

        Returns:
            The broker's error code for each partition: 0: the group has no offset of it now;
            ``GROUP_SUBSCRIBED_TO_TOPIC``: a member subscribes to the topic. Unanswered partitions are left out.

        Raises:
            BrokerUnavailable: no answer within :data:`DELETE_S_MAX`. The offsets may be deleted nevertheless: check
                them.
            AccessDenied: the user needs Delete on the group, refused twice.
            GroupError: the broker refuses the whole request: the group does not exist (reported twice), or its members
                are not consumers (as those of Kafka Connect).
        """
        retry = Retry(ClientInfo.of(self._settings, group=group), self._environment)
        codes: dict[TopicPartition, int] = {}
        for sent in CommitSizes(group).split(dict.fromkeys(tps, 0), dict.fromkeys(tps, OffsetNote(""))):
            named = from_kafka(sent)
            codes |= retry(
                Request.DELETE,
                "deleting committed offsets",
                functools.partial(_delete_once, self._settings, group, named),
            )
        return codes

    def read_offsets(
        self, group: str, tps: Iterable[TopicPartition], *, stable: bool = True
    ) -> dict[TopicPartition, CommittedOffset | None]:
        """Read committed offsets of the group; None: there is none. Unanswered partitions are left out. ``stable``: as
        of :meth:`committed`.

        Raises:
            BrokerUnavailable: no answer.
        """
        with closing(GroupOffsets(self._settings, group=group, environment=self._environment)) as offsets:
            return offsets.read(tps, stable=stable)

    def delete_group(self, group: str) -> None:
        """Delete a group that has no members, with all of its offsets.

        Raises:
            GroupError: it has members, or does not exist (reported twice), unless an earlier request of this call was
                not answered: that one has deleted it.
            AccessDenied: the user needs Delete on the group, refused twice.
        """
        is_unanswered = False

        def send(_: Bound) -> None:
            nonlocal is_unanswered
            future = self._client.delete_consumer_groups([group], **COORDINATOR_BOUND)[group]
            try:
                answer = self._answer(Request.DELETE, future, group)
            except KafkaException as exc:
                error = exc.args[0]
                is_unanswered |= meaning(Request.DELETE, error.code(), error.str()) is Meaning.RETRY
                raise
            if isinstance(answer, Missing) and not is_unanswered:
                raise KafkaException(KafkaError(KafkaError.GROUP_ID_NOT_FOUND), group)

        self._request(Request.DELETE, f"deleting group {group!r}", send)

    def move_committed(
        self, group: str, offsets: Mapping[TopicPartition, int], *, notes: Mapping[TopicPartition, str] | None = None
    ) -> None:
        """Commit offsets of a group that has no members, in as few requests as the coordinator accepts.

        Args:
            notes: the metadata of each partition's offset; empty for partitions that are not in it.

        Raises:
            AccessDenied: the user may not commit for the group, or offsets of a topic.
            CommitFailed: Kafka refused an offset, for example because the group has members; or a request was not
                answered, and may still take effect.
                The field ``moved`` of both is the number of offsets that were moved nevertheless, which the message
                contains too; None: not known.
        """
        sizes, left = CommitSizes(group), dict(offsets)
        texts = {tp: OffsetNote((notes or {}).get(tp, "")) for tp in offsets}
        while left:
            sent = next(sizes.split(left, texts))
            failed = self._move(group, sent, _Moved(len(offsets) - len(left), len(offsets)))
            refused = {TopicPartition(p.topic, p.partition) for p in failed}
            for tp in from_kafka(sent):
                if tp not in refused:  # the broker decides about each partition
                    del left[tp]
            if failed and not sizes.shrink(failed[0].error.code(), sent):
                raise self._refused(group, failed, _Moved(len(offsets) - len(left), len(offsets)))

    def _move(self, group: str, entries: list[Any], moved: "_Moved") -> list[Any]:
        """Send one request, after those that moved ``moved``; return the partitions whose offsets were refused, each
        with its error."""
        request = [ConsumerGroupTopicPartitions(group, entries)]
        try:
            future = self._client.alter_consumer_group_offsets(request, **COORDINATOR_BOUND)[group]
            answer = self._answer(Request.ALTER, future)
        except KafkaException as exc:
            error = exc.args[0]
            if error.code() < 0:  # librdkafka's own code: no broker has answered
                describe = command_line.spark_group("describe", self.connection, group)
                raise CommitFailed(
                    f"Kafka did not confirm the new offsets of group {group!r}{moved} ({error.str()}). They may still "
                    f"be committed: check with {command_line.in_sentence(describe)}",
                    moved=None,
                ) from exc
            raise self._refusal_of(group, error, error.str(), group, moved) from exc
        if isinstance(answer, Missing):
            raise CommitFailed(
                f"Kafka refused new offsets of group {group!r}{moved}: a topic does not exist", moved=moved.done
            )
        return [p for p in answer.topic_partitions if p.error is not None]

    def _refused(self, group: str, failed: list[Any], moved: "_Moved") -> CommitFailed | AccessDenied:
        if any(p.error.code() == KafkaError.UNKNOWN_MEMBER_ID for p in failed):
            return CommitFailed(
                f"Kafka refused new offsets of group {group!r}{moved}, because a member has joined. Stop the group's "
                f"queries and consumers{'' if moved.done else ', then repeat the command'}",
                moved=moved.done,
            )
        reasons = ", ".join(f"{p.topic}-{p.partition}: {p.error.str()}" for p in failed[:10])
        return self._refusal_of(group, failed[0].error, reasons, failed[0].topic, moved)

    def _refusal_of(
        self, group: str, error: KafkaError, reasons: str, name: str, moved: "_Moved"
    ) -> CommitFailed | AccessDenied:
        """Return the exception for a broker's error; ``name``: the topic or group that it is about."""
        refused = f"Kafka refused new offsets of group {group!r}{moved}: {reasons}"
        if missing := self._client_info.missing_permission(Request.ALTER, error.code(), name):
            return AccessDenied(
                f"{refused}. {self._client_info.user} needs {missing}",
                op="committing offsets of the group",
                moved=moved.done,
            )
        if error.code() == KafkaError.GROUP_ID_NOT_FOUND:
            refused += ". The name may be that of a share group or a streams group, whose offsets no reset can move"
        return CommitFailed(refused, moved=moved.done)


class _Moved(NamedTuple):
    """The number of offsets that a move has committed, of all that it should; in messages empty if there is none."""

    done: int
    total: int

    def __str__(self) -> str:
        return f" ({self.done} of {self.total} are moved)" if self.done else ""


# --- deletion of committed offsets, by a ctypes call of librdkafka -------------------------------------------------

DELETE_S_MAX = 10.0
"""The timeout of one deletion, including the search for the group's coordinator."""
RESPONSE_ERROR = "OffsetDelete response error: "

_CALLS: Signatures = {
    **CLIENT,
    "DeleteConsumerGroupOffsets_new": (POINTER, TEXT, PARTITIONS),
    "DeleteConsumerGroupOffsets_destroy": (None, POINTER),
    "DeleteConsumerGroupOffsets": (None, POINTER, POINTERS, SIZE, POINTER, POINTER),
    "event_DeleteConsumerGroupOffsets_result": (POINTER, POINTER),
    "DeleteConsumerGroupOffsets_result_groups": (POINTERS, POINTER, c.POINTER(SIZE)),
    "group_result_error": (POINTER, POINTER),
    "group_result_partitions": (PARTITIONS, POINTER),
}


def _delete_once(settings: Mapping[str, str], group: str, tps: Collection[TopicPartition]) -> dict[TopicPartition, int]:
    client = Client(Library(_CALLS), PRODUCER, settings)
    lib = client.lib
    queue = lib.queue_new(client.rk)
    partitions, options = client.partitions((tp, 0) for tp in tps), client.admin_options(COORDINATOR_TIMEOUT_S)
    request = c.c_void_p(lib.DeleteConsumerGroupOffsets_new(group.encode(), partitions))
    event, refusal_watch = None, RefusalWatch()
    try:
        lib.DeleteConsumerGroupOffsets(client.rk, c.byref(request), 1, options, queue)  # it copies all three
        until_s = time.monotonic() + DELETE_S_MAX
        while not event:
            client.serve()
            for code, text_ in client.errors:
                refusal_watch(KafkaError(code, text_))
            refusal_watch.check()
            if time.monotonic() >= until_s:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer"))
            event = lib.queue_poll(queue, POLL_MS)
        return _codes(lib, event)
    finally:
        if event:
            lib.event_destroy(event)
        lib.DeleteConsumerGroupOffsets_destroy(request)
        lib.AdminOptions_destroy(options)
        lib.topic_partition_list_destroy(partitions)
        lib.queue_destroy(queue)
        client.close()


def _codes(lib: Library, event: int) -> dict[TopicPartition, int]:
    count = c.c_size_t()
    if code := lib.event_error(event):
        raise KafkaException(_broker_error(code, text(lib.event_error_string(event))))
    result = lib.event_DeleteConsumerGroupOffsets_result(event)
    found: dict[TopicPartition, int] = {}
    for answer in lib.DeleteConsumerGroupOffsets_result_groups(result, c.byref(count))[: count.value]:
        if (error := lib.group_result_error(answer)) and (code := lib.error_code(error)):
            raise KafkaException(KafkaError(code, text(lib.error_string(error))))
        partitions = lib.group_result_partitions(answer).contents
        for at in partitions.elems[: partitions.cnt]:
            found[TopicPartition(at.topic.decode(), at.partition)] = at.err
    return {tp: code for tp, code in found.items() if code >= 0}  # a code below 0 is not a broker's


def _broker_error(code: int, message: str) -> KafkaError:
    """Return a broker's error for the whole request: the library reports it under its own code, with the broker's error
    as text after :data:`RESPONSE_ERROR`."""
    broker_text = message.partition(RESPONSE_ERROR)[2]
    found = [known for known in CODES.values() if known > 0 and KafkaError(known).str() == broker_text]
    return KafkaError(found[0]) if found else KafkaError(code, message)


def name_of(code: int) -> str:
    """Return the name of a broker's error code in the Kafka protocol."""
    return KafkaError(code).name()
