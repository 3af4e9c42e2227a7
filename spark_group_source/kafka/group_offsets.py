"""A group's committed offsets, read while it is active.

Runs in: the stream reader's worker thread. Deliberately absent: committing (``committer``), and the admin client's own
request for this: it can end the whole process while a group's coordinator moves (librdkafka 2.16), which is when a
source needs it most. A consumer that never subscribes asks the same question safely.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaException

from spark_group_source.errors import CommitFailed
from spark_group_source.kafka.admin import CommittedOffset
from spark_group_source.kafka.translation import to_kafka, translate
from spark_group_source.model import TopicPartition

log = logging.getLogger(__name__)

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
    """

    def __init__(self, settings: Mapping[str, str], *, group: str) -> None:
        self._settings = {**settings, "group.id": group, "group.protocol": "classic", "enable.auto.commit": "false"}
        self._servers = settings["bootstrap.servers"]
        self._consumers: dict[bool, Any] = {}

    def read(self, tps: Iterable[TopicPartition], *, stable: bool = True) -> dict[TopicPartition, CommittedOffset]:
        """The next offset of each partition; those without one are left out.

        Args:
            stable: wait for offsets of transactions that are not finished (KIP-447); without it the old value shows.

        Raises:
            BrokerUnavailable: no answer within :data:`READ_TIMEOUT_S`; ask again later.
            AccessDenied: the user may not read the group.
        """
        asked_s = time.monotonic()
        try:
            found = self._consumer(stable).committed([to_kafka(tp) for tp in tps], timeout=READ_TIMEOUT_S)
            for answer in found:
                if answer.error is not None:
                    raise KafkaException(answer.error)
        except KafkaException as exc:
            waited_s = time.monotonic() - asked_s
            raise translate(
                exc.args[0], op="reading committed offsets", servers=self._servers, waited_s=waited_s
            ) from exc
        return {
            TopicPartition(p.topic, p.partition): CommittedOffset(p.offset, p.metadata or "")
            for p in found
            if p.offset >= 0
        }

    def wait_shown(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Wait until a plain read of the group shows these offsets: other clients start where *it* says.

        Raises:
            CommitFailed: they did not show in time, or someone else committed others after us.
        """
        deadline_s = time.monotonic() + READ_BACK_S_MAX
        pause_s, pause_s_max = READ_BACK_PAUSES_S
        pause = threading.Event()
        while True:
            seen = self.read(offsets, stable=False)
            late = {tp: offset for tp, offset in offsets.items() if tp not in seen or seen[tp].offset != offset}
            if not late:
                return
            if time.monotonic() > deadline_s:
                tp, offset = next(iter(late.items()))
                raise CommitFailed(
                    f"{tp} was committed at {offset}, but the group shows {seen.get(tp)}", late=len(late)
                )
            pause.wait(pause_s)
            pause_s = min(pause_s * 2, pause_s_max)

    def close(self) -> None:
        """Close the connections; a later read opens them again."""
        while self._consumers:
            with contextlib.suppress(KafkaException, RuntimeError):
                self._consumers.popitem()[1].close()

    def _consumer(self, stable: bool) -> Any:
        if stable not in self._consumers:
            level = "read_committed" if stable else "read_uncommitted"  # it decides whether the read must be stable
            self._consumers[stable] = Consumer({**self._settings, "isolation.level": level, "logger": log})
        return self._consumers[stable]
