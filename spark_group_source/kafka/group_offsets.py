"""Reads a group's committed offsets while the group is active.

Runs in: the stream reader's request thread, the exporter, the CLI. Deliberately absent: committing (``committer``), and
the admin client's request for committed offsets, which can abort the whole process while the group's coordinator moves
(librdkafka 2.16). A consumer that never subscribes sends the same request safely.
"""

import contextlib
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from confluent_kafka import KafkaException

from spark_group_source.error_codes import Meaning, Request, meaning
from spark_group_source.errors import CommitFailed
from spark_group_source.kafka.environment import NEVER_JOINS, Environment, coordinator_idle
from spark_group_source.kafka.retry import Retry
from spark_group_source.kafka.translation import ClientInfo, CommittedOffset, request_batches, to_kafka
from spark_group_source.model import TopicPartition

READ_TIMEOUT_S = 10.0
"""The timeout of one read, including the search for the coordinator and the wait for open transactions."""
READ_BACK_S_MAX = 10.0
"""The longest wait until a committed offset is visible; the transaction marker takes milliseconds."""
READ_BACK_PAUSES_S = (0.005, 0.05)
"""The first and the longest pause between two reads of :meth:`GroupOffsets.wait_until_visible`."""


class GroupOffsets:
    """Reads one group's committed offsets. One thread uses it."""

    def __init__(self, settings: Mapping[str, str], *, group: str, environment: Environment) -> None:
        self._environment = environment
        self._settings = {**settings, **coordinator_idle(settings), **NEVER_JOINS, "group.id": group}
        self._retry = Retry(ClientInfo.of(settings, group=group), environment)
        self._consumers: dict[bool, Any] = {}  # by whether its reads are stable

    def read(
        self, tps: Iterable[TopicPartition], *, stable: bool = True, optional: Container[TopicPartition] = ()
    ) -> dict[TopicPartition, CommittedOffset | None]:
        """Read the committed offset of each partition; None where there is none. Unanswered partitions are left out.

        Args:
            stable: wait for the offsets of open transactions (KIP-447); else the old offset is returned.
            optional: partitions that are not needed: None where the user may not read their offsets.

        Raises:
            BrokerUnavailable: no answer within :data:`READ_TIMEOUT_S`; try again later.
            AccessDenied: the user may not read the group's offsets, refused twice.
        """
        batches = [[to_kafka(tp) for tp in batch] for batch in request_batches(tps)]
        return self._retry(
            Request.COMMITTED, "reading committed offsets", lambda: self._read(batches, stable, optional)
        )

    def _read(
        self, batches: list[list[Any]], stable: bool, optional: Container[TopicPartition]
    ) -> dict[TopicPartition, CommittedOffset | None]:
        """Read once. A transient error of one partition does not affect the others: a broker may not know a new
        partition yet, or its offset is part of an open transaction."""
        answered: dict[TopicPartition, CommittedOffset | None] = {}
        for answer in self._answers(batches, stable):
            tp = TopicPartition(answer.topic, answer.partition)
            what = Meaning.SUCCESS if answer.error is None else meaning(Request.COMMITTED, answer.error.code())
            if what is Meaning.SUCCESS:
                at = CommittedOffset(answer.offset, answer.metadata or "", answer.leader_epoch)
                answered[tp] = at if answer.offset >= 0 else None
            elif what is Meaning.REFUSED and tp in optional:
                answered[tp] = None
            elif what is not Meaning.RETRY:
                raise KafkaException(answer.error, answer.topic)
        return answered

    def _answers(self, batches: list[list[Any]], stable: bool) -> Iterator[Any]:
        deadline_ms = self._environment.now_ms() + READ_TIMEOUT_S * 1000
        for batch in batches:
            left_s = max(0, deadline_ms - self._environment.now_ms()) / 1000
            yield from self._consumer(stable).committed(batch, timeout=left_s)

    def wait_until_visible(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Wait until a read that is not stable returns these offsets; other consumers start at what such reads return.

        Raises:
            CommitFailed: they did not become visible in time, or another client committed other offsets since.
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
                    f"{tp}: committed offset {offsets[tp]}, but a read returns {seen.get(tp)}", late=len(late)
                )
            self._environment.pause(pause_s)
            pause_s = min(pause_s * 2, pause_s_max)

    def close(self) -> None:
        """Close the connections; a later read reopens them."""
        while self._consumers:
            with contextlib.suppress(KafkaException, RuntimeError):
                self._consumers.popitem()[1].close()

    def _consumer(self, stable: bool) -> Any:
        if stable not in self._consumers:
            level = "read_committed" if stable else "read_uncommitted"  # decides whether the read is stable
            settings = {**self._settings, "isolation.level": level}
            self._consumers[stable] = self._environment.consumer(settings)
        return self._consumers[stable]
