"""Deleting committed offsets of a group, also of one with members (KIP-496): librdkafka's call, by ctypes.

Runs in: a terminal, the user's driver. Deliberately absent: which partitions (``cli.offsets``), and what their answers
mean (``error_codes``). The Python client has no such call, librdkafka has: a client of its own is made for one
question, used by the thread that asks, and destroyed.
"""

import ctypes as c
import time
from collections.abc import Collection, Mapping

from confluent_kafka import KafkaError, KafkaException

from spark_group_source.error_codes import CODES, Request
from spark_group_source.kafka.environment import Environment
from spark_group_source.kafka.retry import RefusalWatch, Retry
from spark_group_source.kafka.translation import Asker
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

ANSWER_S_MAX = 10.0
"""How long one answer is waited for, including the search for the group's coordinator."""
REQUEST_TIMEOUT_S = 3_600.0
"""The library's own timeout, far beyond ours: see ``admin.COORDINATOR_TIMEOUT_S``. The client is destroyed before."""
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


def delete_offsets(
    settings: Mapping[str, str],
    group: str,
    tps: Collection[TopicPartition],
    *,
    environment: Environment | None = None,
) -> dict[TopicPartition, int]:
    """Ask the group's coordinator to delete committed offsets. It may be asked twice: what is gone stays gone.

    Args:
        settings: librdkafka settings of an admin client.
        group: the consumer group; it may have members.
        tps: at least one partition.

    Returns:
        The broker's code for each partition: 0 where the group has no offset of it now, ``GROUP_SUBSCRIBED_TO_TOPIC``
        where a member subscribes to the topic. Partitions that the answer leaves out were not answered.

    Raises:
        BrokerUnavailable: no answer within :data:`ANSWER_S_MAX`. The offsets may be deleted all the same: look.
        AccessDenied: the user needs Delete on the group, reported twice.
        GroupError: the broker refuses the whole request: there is no such group (reported twice), or members of another
            kind (as those of Kafka Connect) are in it.
        OptionError: the client refuses a setting.
    """
    retry = Retry(Asker.of(settings, group=group), environment or Environment())
    return retry(Request.DELETE, "deleting committed offsets", lambda: _ask_once(settings, group, tps))


def _ask_once(settings: Mapping[str, str], group: str, tps: Collection[TopicPartition]) -> dict[TopicPartition, int]:
    client = Client(Library(_CALLS), PRODUCER, settings)
    lib = client.lib
    queue = lib.queue_new(client.rk)
    partitions, options = client.partitions((tp, 0) for tp in tps), client.admin_options(REQUEST_TIMEOUT_S)
    request = c.c_void_p(lib.DeleteConsumerGroupOffsets_new(group.encode(), partitions))
    event, refusal = None, RefusalWatch()
    try:
        lib.DeleteConsumerGroupOffsets(client.rk, c.byref(request), 1, options, queue)  # it copies all three
        until_s = time.monotonic() + ANSWER_S_MAX
        while not event:
            client.serve()
            for code, words in client.errors:
                refusal(KafkaError(code, words))
            refusal.check()
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
        raise KafkaException(_said(code, text(lib.event_error_string(event))))
    result = lib.event_DeleteConsumerGroupOffsets_result(event)
    found: dict[TopicPartition, int] = {}
    for answer in lib.DeleteConsumerGroupOffsets_result_groups(result, c.byref(count))[: count.value]:
        if (error := lib.group_result_error(answer)) and (code := lib.error_code(error)):
            raise KafkaException(KafkaError(code, text(lib.error_string(error))))
        partitions = lib.group_result_partitions(answer).contents
        for at in partitions.elems[: partitions.cnt]:
            found[TopicPartition(at.topic.decode(), at.partition)] = at.err
    return {tp: code for tp, code in found.items() if code >= 0}  # below 0 no broker has answered


def _said(code: int, words: str) -> KafkaError:
    """What a broker says of the whole request comes under a code of the library's, and as text behind these words."""
    words_of_broker = words.partition(RESPONSE_ERROR)[2]
    told = [known for known in CODES.values() if known > 0 and KafkaError(known).str() == words_of_broker]
    return KafkaError(told[0]) if told else KafkaError(code, words)


def name_of(code: int) -> str:
    """The name of a broker's code, as in the protocol's list."""
    return KafkaError(code).name()
