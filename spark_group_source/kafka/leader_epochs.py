"""The end offsets of leader epochs: Kafka's OffsetForLeaderEpoch request (KIP-320).

Runs in: the stream reader. Deliberately absent: conclusions from the answers (``protocol.data_loss``), and groups: the
consumer here joins none.

librdkafka sends this request in one case only: before a consumer reads from a position that was set with a leader
epoch. So the consumer here seeks to a position beyond every log, with the epoch in question. The leader returns the end
offset of that epoch; the library finds the position beyond it and reports an error, whose text contains the end offset.
A partition without such a text is unanswered.
"""

import contextlib
import re
from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from spark_group_source.error_codes import Request
from spark_group_source.kafka.environment import NEVER_JOINS, Environment
from spark_group_source.kafka.retry import RefusalWatch, Retry
from spark_group_source.kafka.translation import ClientInfo, to_kafka
from spark_group_source.model import TopicPartition

ANSWER_S_MAX = 6.0
"""The timeout of one read of any number of partitions, including the search for their leaders."""
POLL_S = 0.1
BEYOND = 2**60
"""A position beyond every log."""
_END = re.compile(r"broker end offset is (-?\d+) \(offset leader epoch (-?\d+)\)")


class EpochEnds:
    """Reads the end offsets of leader epochs. One thread uses it; it keeps no connection open between reads.

    Args:
        settings: librdkafka settings of an admin client.
        environment: clock and Kafka clients.
    """

    def __init__(self, settings: Mapping[str, str], *, environment: Environment) -> None:
        self._environment = environment
        self._retry = Retry(ClientInfo.of(settings), environment)
        self._refusal = RefusalWatch()
        # "error" makes the library report the end offset that it found.
        self._settings = {**settings, **NEVER_JOINS, "auto.offset.reset": "error", "error_cb": self._refusal}

    def read(self, epochs: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        """Read where the records of each leader epoch and of earlier ones end. Unanswered partitions are left out.

        Returns:
            The end offset; None: the leader does not know the epoch.

        Raises:
            BrokerUnavailable: no partition was answered in time.
            AccessDenied: refused twice.
        """
        if not epochs:
            return {}
        return self._retry(Request.OFFSETS, "reading the ends of leader epochs", lambda: self._read(epochs))

    def _read(self, epochs: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        self._refusal.clear()
        consumer = self._environment.consumer(self._settings)
        try:
            consumer.assign([to_kafka(tp, BEYOND) for tp in epochs])
            for tp, epoch in epochs.items():
                consumer.seek(KafkaPartition(tp.topic, tp.partition, BEYOND, leader_epoch=epoch))
            return self._answers(consumer, epochs)
        finally:
            with contextlib.suppress(KafkaException, RuntimeError):
                consumer.close()

    def _answers(self, consumer: Any, epochs: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        found: dict[TopicPartition, int | None] = {}
        deadline_ms = self._environment.now_ms() + ANSWER_S_MAX * 1000
        while len(found) < len(epochs) and self._environment.now_ms() < deadline_ms:
            message = consumer.poll(POLL_S)
            self._refusal.check()
            error = None if message is None else message.error()
            if error is not None and error.code() == KafkaError._AUTO_OFFSET_RESET:
                found[TopicPartition(message.topic(), message.partition())] = parse_epoch_end(error.str())
        if not found:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer"))
        return found


def parse_epoch_end(text: str) -> int | None:
    """Return the end offset in the library's error text; None: the leader knows no such epoch, or not the request."""
    found = _END.search(text)
    return int(found[1]) if found and int(found[1]) >= 0 and int(found[2]) >= 0 else None
