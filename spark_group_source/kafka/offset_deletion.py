"""Deletion of a group's committed offsets, also while the group has members (KIP-496), by a ctypes call of librdkafka.

Runs in: a terminal, the user's driver. Deliberately absent: the choice of partitions (``cli.offsets``), and the meaning
of error codes (``error_codes``). The Python client lacks this call, librdkafka has it: each request creates a client of
its own, uses it on the calling thread, and destroys it.
"""

import ctypes as c
import time
from collections.abc import Collection, Mapping

from confluent_kafka import KafkaError, KafkaException

from spark_group_source.error_codes import CODES, Request
from spark_group_source.kafka.environment import Environment
from spark_group_source.kafka.retry import RefusalWatch, Retry
from spark_group_source.kafka.translation import ClientInfo
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
"""The timeout of one request, including the search for the group's coordinator."""
REQUEST_TIMEOUT_S = 3_600.0
"""The library's timeout, far beyond ours: see ``admin.COORDINATOR_TIMEOUT_S``. The client is destroyed before it."""
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
    """Delete committed offsets. The request may be sent twice; deleting is idempotent.

    Args:
        settings: librdkafka settings of an admin client.
        group: the consumer group; it may have members.
        tps: at least one partition.

    Returns:
        The broker's error code for each partition: 0: the group has no offset of it now; ``GROUP_SUBSCRIBED_TO_TOPIC``:
        a member subscribes to the topic. Unanswered partitions are left out.

    Raises:
        BrokerUnavailable: no answer within :data:`ANSWER_S_MAX`. The offsets may be deleted nevertheless: check them.
        AccessDenied: the user needs Delete on the group, refused twice.
        GroupError: the broker refuses the whole request: the group does not exist (reported twice), or its members are
            not consumers (as those of Kafka Connect).
        OptionError: the client refuses a setting.
    """
    retry = Retry(ClientInfo.of(settings, group=group), environment or Environment())
    return retry(Request.DELETE, "deleting committed offsets", lambda: _delete_once(settings, group, tps))


def _delete_once(settings: Mapping[str, str], group: str, tps: Collection[TopicPartition]) -> dict[TopicPartition, int]:
    client = Client(Library(_CALLS), PRODUCER, settings)
    lib = client.lib
    queue = lib.queue_new(client.rk)
    partitions, options = client.partitions((tp, 0) for tp in tps), client.admin_options(REQUEST_TIMEOUT_S)
    request = c.c_void_p(lib.DeleteConsumerGroupOffsets_new(group.encode(), partitions))
    event, refusal_watch = None, RefusalWatch()
    try:
        lib.DeleteConsumerGroupOffsets(client.rk, c.byref(request), 1, options, queue)  # it copies all three
        until_s = time.monotonic() + ANSWER_S_MAX
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
