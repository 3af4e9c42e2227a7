"""A group's committed offsets, read while it is active.

Runs in: the stream reader's worker thread. Deliberately absent: committing (``committer``), and the admin client's own
request for this: it can end the whole process while a group's coordinator moves (librdkafka 2.16), which is when a
source needs it most. A consumer that never subscribes asks the same question safely.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from confluent_kafka import KafkaException

from spark_group_source.error_codes import Meaning, Request, meaning
from spark_group_source.errors import CommitFailed
from spark_group_source.kafka.environment import Environment
from spark_group_source.kafka.retry import Retry
from spark_group_source.kafka.settings import COORDINATOR_IDLE, NEVER_JOINS
from spark_group_source.kafka.translation import Asker, CommittedOffset, portions, to_kafka
from spark_group_source.model import TopicPartition

READ_TIMEOUT_S = 10.0
"""One question, including the search for the coordinator and the wait for unfinished transactions."""
READ_BACK_S_MAX = 10.0
"""How long a committed offset may stay invisible: its transaction marker takes milliseconds."""
READ_BACK_PAUSES_S = (0.005, 0.05)
"""First and longest pause between two looks."""


class GroupOffsets:
    """Reads one group's offsets. One thread uses it.

    Args:
        settings: librdkafka settings of an admin client.
        group: the consumer group.
        environment: clock and clients.
    """

    def __init__(self, settings: Mapping[str, str], *, group: str, environment: Environment) -> None:
        self._environment = environment
        self._settings = {**COORDINATOR_IDLE, **settings, **NEVER_JOINS, "group.id": group}
        self._retry = Retry(Asker.of(settings, group=group), environment)
        self._consumers: dict[bool, Any] = {}

    def read(
        self, tps: Iterable[TopicPartition], *, stable: bool = True
    ) -> dict[TopicPartition, CommittedOffset | None]:
        """The next offset of each partition, None where there is none. Partitions without an answer are left out.

        Args:
            stable: wait for offsets of transactions that are not finished (KIP-447); without it the old value shows.

        Raises:
            BrokerUnavailable: no answer within :data:`READ_TIMEOUT_S`; ask again later.
            AccessDenied: the user may not read the group, told twice.
        """
        asked = [[to_kafka(tp) for tp in portion] for portion in portions(tps)]
        return self._retry(Request.COMMITTED, "reading committed offsets", lambda: self._read(asked, stable))

    def _read(self, asked: list[list[Any]], stable: bool) -> dict[TopicPartition, CommittedOffset | None]:
        """One try. What is asked again of one partition says nothing of the others: a broker may not have heard of a
        new one, or its offset is part of a transaction that is not finished."""
        answered: dict[TopicPartition, CommittedOffset | None] = {}
        for answer in self._answers(asked, stable):
            if answer.error is None:
                at = CommittedOffset(answer.offset, answer.metadata or "") if answer.offset >= 0 else None
                answered[TopicPartition(answer.topic, answer.partition)] = at
            elif meaning(Request.COMMITTED, answer.error.code()) is not Meaning.RETRY:
                raise KafkaException(answer.error, answer.topic)
        return answered

    def _answers(self, asked: list[list[Any]], stable: bool) -> Iterator[Any]:
        deadline_ms = self._environment.now_ms() + READ_TIMEOUT_S * 1000
        for portion in asked:
            left_s = max(0, deadline_ms - self._environment.now_ms()) / 1000
            yield from self._consumer(stable).committed(portion, timeout=left_s)

    def wait_shown(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Wait until a plain read of the group shows these offsets: other clients start where *it* says.

        Raises:
            CommitFailed: they did not show in time, or someone else committed others after us.
        """
        deadline_ms = self._environment.now_ms() + READ_BACK_S_MAX * 1000
        pause_s, pause_s_max = READ_BACK_PAUSES_S
        while True:
            seen = self.read(offsets, stable=False)
            late = [tp for tp, offset in offsets.items() if (at := seen.get(tp)) is None or at.offset != offset]
            if not late:
                return
            if self._environment.now_ms() > deadline_ms:
                tp = late[0]
                raise CommitFailed(
                    f"{tp} was committed at {offsets[tp]}, but the group shows {seen.get(tp)}", late=len(late)
                )
            self._environment.pause(pause_s)
            pause_s = min(pause_s * 2, pause_s_max)

    def close(self) -> None:
        """Close the connections; a later read opens them again."""
        while self._consumers:
            with contextlib.suppress(KafkaException, RuntimeError):
                self._consumers.popitem()[1].close()

    def _consumer(self, stable: bool) -> Any:
        if stable not in self._consumers:
            level = "read_committed" if stable else "read_uncommitted"  # it decides whether the read must be stable
            settings = {**self._settings, "isolation.level": level}
            self._consumers[stable] = self._environment.consumer(settings)
        return self._consumers[stable]
