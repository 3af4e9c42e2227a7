"""The echo: one fenced commit of a group's offsets from outside the group.

Runs in: the stream reader's worker thread. Deliberately absent: which offsets and when (``group``).
"""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from spark_group_source.errors import CommitFailed, GroupError
from spark_group_source.kafka.consumer import Identity
from spark_group_source.kafka.runtime import Runtime
from spark_group_source.kafka.translation import AUTH_CODES, FENCED_CODES, stale, to_kafka, translate
from spark_group_source.model import TopicPartition

log = logging.getLogger(__name__)

TRANSACTION_TIMEOUT_S = 30.0
"""One step of the transactional commit; normally milliseconds."""
SEND_TIMEOUT_S = 5.0
"""A step that names offsets. The library repeats it for this long when a topic is unknown, and a deleted one
stays so; revocations wait for the commit meanwhile."""


class OffsetCommitter:
    """Commits a group's offsets without being a member, fenced by its transactional id (KIP-98, KIP-447).

    One thread uses it. The transaction holds nothing but the offsets, each share in the name of the member that has its
    partitions: all or none, accepted while the group rebalances, refused when one of the members is none any more. A
    newer process with the same id shuts this one out for good.

    Args:
        settings: librdkafka settings of a producer.
        group: the consumer group.
        transactional_id: the same for every run of one stream.
        runtime: clients.
    """

    def __init__(self, settings: Mapping[str, str], *, group: str, transactional_id: str, runtime: Runtime) -> None:
        self._runtime = runtime
        self._settings = {**settings, "transactional.id": transactional_id, "logger": log}
        self._servers = settings["bootstrap.servers"]
        self._group = group
        self._producer: Any = None

    def prepare(self) -> None:
        """Take the transactional id over now: from here on no older process can commit with it.

        Raises:
            AccessDenied: transactions are not allowed here.
            CommitFailed: not done; the first commit tries again.
        """
        try:
            self._ready()
        except KafkaException as exc:
            raise self._failure(exc.args[0]) from exc

    def probe(self, tp: TopicPartition) -> bool:
        """Ask the broker whether the id is still this process's: a transaction that names an offset and takes it back.

        Returns:
            True: it is. False: nothing was asked, because this process does not have the id (yet, or any more after a
            failure); taking it over is no question.

        Raises:
            Fenced: a newer process has the id. Final.
            AccessDenied: transactions are not allowed here.
            CommitFailed: no answer.
        """
        if self._producer is None:
            return False
        nobody = memberless(self._settings, self._group, runtime=self._runtime)
        try:
            self._producer.begin_transaction()
            self._producer.send_offsets_to_transaction([to_kafka(tp, 0)], nobody.metadata, SEND_TIMEOUT_S)
            self._producer.abort_transaction(TRANSACTION_TIMEOUT_S)
        except KafkaException as exc:
            raise self._failure(exc.args[0]) from exc
        return True

    def commit(
        self,
        shares: Sequence[tuple[Identity, Mapping[TopicPartition, int]]],
        notes: Mapping[TopicPartition, str],
    ) -> None:
        """Commit the *next* offset of each partition, with its note as its metadata.

        Args:
            shares: offsets, and the member that holds their partitions.
            notes: one for each partition.

        Raises:
            Fenced: a newer process has the id. Final.
            AccessDenied: transactions are not allowed here; a member can commit instead.
            MemberStale: a member is not what it was; nothing was committed.
            CommitFailed: nothing was committed; try again later.
        """
        at = 0
        try:
            producer = self._ready()
            producer.begin_transaction()
            for at, (identity, offsets) in enumerate(shares):  # noqa: B007 - for the error
                entries = [to_kafka(tp, offset, notes[tp]) for tp, offset in offsets.items()]
                producer.send_offsets_to_transaction(entries, identity.metadata, SEND_TIMEOUT_S)
            producer.commit_transaction(TRANSACTION_TIMEOUT_S)
        except KafkaException as exc:
            raise self._failure(exc.args[0], share=at) from exc

    def close(self) -> None:
        self._producer = None

    def _ready(self) -> Any:
        if self._producer is None:
            producer = self._runtime.producer(self._settings)
            producer.init_transactions(TRANSACTION_TIMEOUT_S)
            self._producer = producer
        return self._producer

    def _failure(self, error: KafkaError, *, share: int = 0) -> GroupError:
        code = error.code()
        if (failure := stale(error, share=share)) is not None:
            self._abort(error)
            return failure
        if code in FENCED_CODES or code in AUTH_CODES:
            self._producer = None
            return translate(error, op="committing offsets", servers=self._servers)
        self._abort(error)
        return CommitFailed(f"committing offsets failed: {error.str()}", code=code)

    def _abort(self, error: KafkaError) -> None:
        if error.txn_requires_abort() and self._producer is not None:
            with contextlib.suppress(KafkaException):
                self._producer.abort_transaction(TRANSACTION_TIMEOUT_S)
        else:
            # Its transaction may be open, and the next commit begins one; an id that expired while idle is new again.
            self._producer = None


def memberless(settings: Mapping[str, Any], group: str, *, runtime: Runtime) -> Identity:
    """What a consumer that never subscribed says of its group: generation -1, no member, which the broker accepts
    for transactional commits in every state of the group. For the question alone: nothing is committed with it."""
    own = {name: value for name, value in settings.items() if name != "transactional.id"}
    consumer = runtime.consumer({**own, "group.id": group, "group.protocol": "classic"})
    try:
        return Identity(-1, "", consumer.consumer_group_metadata())
    finally:
        consumer.close()
