"""Up to where a leader has the records of former leaders: Kafka's OffsetForLeaderEpoch (KIP-320).

Runs in: the stream reader. Deliberately absent: what an answer means for a query (``group.loss``), and groups: the
consumer here is in none.

The library sends this request in one place only: before a consumer reads on from a position that it was told with a
leader epoch. So a position is told that no log has, and never read. The leader answers where the records of that epoch
end; the library finds its position beyond it, gives up, and says so. Its texts are the only place where the answer
stands. What they do not say is no answer.
"""

import contextlib
import re
from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from spark_group_source.error_codes import Request
from spark_group_source.kafka.environment import Environment
from spark_group_source.kafka.retry import RefusalWatch, Retry
from spark_group_source.kafka.settings import NEVER_JOINS
from spark_group_source.kafka.translation import Asker, to_kafka
from spark_group_source.model import TopicPartition

ANSWER_S_MAX = 6.0
"""One question about any number of partitions, with the search for their leaders."""
POLL_S = 0.1
BEYOND = 2**60
"""A position that no log has."""
_END = re.compile(r"broker end offset is (-?\d+) \(offset leader epoch (-?\d+)\)")


class EpochEnds:
    """Asks leaders for the ends of epochs. One thread uses it; it keeps no connection between two questions.

    Args:
        settings: librdkafka settings of an admin client.
        environment: clock and clients.
    """

    def __init__(self, settings: Mapping[str, str], *, environment: Environment) -> None:
        self._environment = environment
        self._retry = Retry(Asker.of(settings), environment)
        self._refusal = RefusalWatch()
        # Only with "error" the library reports what it found.
        self._settings = {**settings, **NEVER_JOINS, "auto.offset.reset": "error", "error_cb": self._refusal}

    def ask(self, epochs: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        """Where the records end that leaders of these epochs, or earlier ones, wrote. None: the leader cannot say.
        Partitions without an answer are left out.

        Raises:
            BrokerUnavailable: none was answered in time.
            AccessDenied: refused, told twice.
        """
        if not epochs:
            return {}
        return self._retry(Request.OFFSETS, "asking for the ends of leader epochs", lambda: self._ask(epochs))

    def _ask(self, epochs: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
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
                found[TopicPartition(message.topic(), message.partition())] = end_in(error.str())
        if not found:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer"))
        return found


def end_in(text: str) -> int | None:
    """The leader's answer in the library's words; None where it has no such epoch, or does not know the request."""
    told = _END.search(text)
    return int(told[1]) if told and int(told[1]) >= 0 and int(told[2]) >= 0 else None
