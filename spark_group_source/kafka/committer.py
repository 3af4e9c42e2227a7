"""The echo: one fenced commit of a group's offsets from outside the group.

Runs in: the stream reader's worker thread. Deliberately absent: which offsets and when (``group``).
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from spark_group_source.error_codes import Meaning, Request, meaning
from spark_group_source.errors import CommitFailed, GroupError
from spark_group_source.kafka.consumer import Identity
from spark_group_source.kafka.environment import Environment
from spark_group_source.kafka.settings import COORDINATOR_IDLE, NEVER_JOINS
from spark_group_source.kafka.translation import Asker, stale, to_kafka, translate
from spark_group_source.model import TopicPartition

TRANSACTION_TIMEOUT_S = 10.0
"""One step of the transactional commit; normally milliseconds. What was not answered is asked for again, and lookups
wait behind it: a revocation may be held meanwhile."""
EXPIRES_S = 60.0
"""After this long the brokers end a transaction themselves, and what they say to its producer then is what they say to
one that was replaced. ``kafka.transaction.timeout.ms`` overrides it."""
SEND_TIMEOUT_S = 5.0
"""A step that names offsets. The library repeats it for this long when a topic is unknown, and a deleted one
stays so; revocations wait for the commit meanwhile."""
REQUEST_TIMEOUT_MS = 10_000
"""One request to a broker that took the connection and does not answer, as one that stands still; the library's own
minute would keep lookups waiting behind a commit. ``kafka.socket.timeout.ms`` overrides it."""


class Transaction(Enum):
    """Where the producer's transaction is."""

    NONE = "none is open"
    OPEN = "it was begun, and its end was not requested"
    COMMITTING = "its commit was requested, and not answered"
    ABORTING = "its abort was requested, and not answered"


class OffsetCommitter:
    """Commits a group's offsets without being a member, fenced by its transactional id (KIP-98, KIP-447).

    One thread uses it. The transaction holds nothing but the offsets, each share in the name of the member that has its
    partitions: all or none, accepted while the group rebalances, refused when one of the members is none any more. A
    newer process with the same id shuts this one out for good.

    The id is taken over once. A transaction that was not answered is ended with the same producer before the next one
    begins: a new producer would take the id back from a process that was started instead of this one meanwhile. Where
    the producer broke for good, or the brokers ended its transaction after a long outage, the id is :attr:`lost` until
    :meth:`anew`: the caller proves first that this process still has its place.

    Args:
        settings: librdkafka settings of a producer.
        group: the consumer group.
        transactional_id: the same for every run of one stream.
        environment: clients.
    """

    def __init__(
        self, settings: Mapping[str, str], *, group: str, transactional_id: str, environment: Environment
    ) -> None:
        self._environment = environment
        own = {"transactional.id": transactional_id}
        usual = {"socket.timeout.ms": str(REQUEST_TIMEOUT_MS), "transaction.timeout.ms": str(int(EXPIRES_S * 1000))}
        self._settings = {**COORDINATOR_IDLE, **usual, **settings, **own}
        self._asker = Asker.of(self._settings, group=group)
        self._group = group
        self._producer: Any = None
        self._transaction = Transaction.NONE
        self._begun_ms = 0
        self._fenced: KafkaError | None = None
        self.lost = False
        """Whether this process had the id, and cannot say any more whether it has: nothing is committed before
        :meth:`anew`."""

    def anew(self) -> None:
        """Take the id over again: a broker took a commit from a member of this process just now, which it would have
        refused if another process had the place. That is good for this moment only: a process may stand still in the
        next one, and shut its successor out when it goes on.

        Raises:
            As :meth:`prepare`.
        """
        try:
            self._take_over()
        except KafkaException as exc:
            raise self._failure(exc.args[0]) from exc

    def prepare(self) -> None:
        """Take the transactional id over now: from here on no older process can commit with it.

        Raises:
            Fenced: a newer process has it.
            AccessDenied: transactions are not allowed here.
            CommitFailed: not done; the first commit tries again.
        """
        try:
            self._own()
        except KafkaException as exc:
            raise self._failure(exc.args[0]) from exc

    def probe(self, tp: TopicPartition) -> bool:
        """Ask the broker whether the id is still this process's: a transaction that names an offset and takes it back.

        Args:
            tp: any partition of the group; nothing is committed for it.

        Returns:
            True: it is. False: nothing was asked, because this process does not have the id (yet, or any more after a
            failure); taking it over is no question.

        Raises:
            Fenced: a newer process has the id. Final.
            AccessDenied: transactions are not allowed here.
            CommitFailed: no answer.
        """
        if self._producer is None and self._fenced is None:
            return False
        try:
            producer = self._begun()
            nobody = memberless(self._settings, self._group, environment=self._environment)
            producer.send_offsets_to_transaction([to_kafka(tp, 0)], nobody.metadata, SEND_TIMEOUT_S)
            self._end()
        except KafkaException as exc:
            error = exc.args[0]
            failure = self._failure(error)
            # Offsets are the second step: the first, which names the id, was taken.
            if error.code() != KafkaError.UNKNOWN_TOPIC_OR_PART or self._fenced is not None:
                raise failure from exc
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
            CommitFailed: no answer, or refused; try again later.
        """
        at = 0
        try:
            producer = self._begun()
            for at, (identity, offsets) in enumerate(shares):  # noqa: B007 - for the error
                entries = [to_kafka(tp, offset, notes[tp]) for tp, offset in offsets.items()]
                producer.send_offsets_to_transaction(entries, identity.metadata, SEND_TIMEOUT_S)
            self._transaction = Transaction.COMMITTING
            self._end()
        except KafkaException as exc:
            raise self._failure(exc.args[0], share=at, offsets=notes) from exc

    def settle(self) -> None:
        """End what an unanswered commit left open: until then a stable read of the group's offsets waits for it.

        Raises:
            As :meth:`commit`.
        """
        try:
            if self._producer is not None:
                self._end()
        except KafkaException as exc:
            raise self._failure(exc.args[0]) from exc

    def _own(self) -> Any:
        if self._fenced is not None:
            raise KafkaException(self._fenced)
        if self.lost:
            raise CommitFailed("the transactional id may be another process's by now")
        if self._producer is None:
            self._take_over()
        return self._producer

    def _take_over(self) -> None:
        producer = self._environment.producer(self._settings)
        producer.init_transactions(TRANSACTION_TIMEOUT_S)
        self._producer, self._transaction, self.lost = producer, Transaction.NONE, False

    def _begun(self) -> Any:
        """The producer, with a transaction that was just begun."""
        producer = self._own()
        self._end()
        producer.begin_transaction()
        self._transaction, self._begun_ms = Transaction.OPEN, self._environment.now_ms()
        return producer

    def _end(self) -> None:
        """Request the end of the transaction: that which was requested before, else its abort."""
        if self._transaction is Transaction.NONE:
            return
        if self._transaction is Transaction.COMMITTING:
            self._producer.commit_transaction(TRANSACTION_TIMEOUT_S)
        else:
            self._transaction = Transaction.ABORTING
            self._producer.abort_transaction(TRANSACTION_TIMEOUT_S)
        self._transaction = Transaction.NONE

    def _failure(self, error: KafkaError, *, share: int = 0, offsets: Iterable[TopicPartition] = ()) -> GroupError:
        of_member = stale(error, request=Request.TRANSACTION, share=share)
        self._note_fenced(error)
        self._clean_up(error)
        refused = meaning(Request.TRANSACTION, error.code(), error.str()) is Meaning.REFUSED
        if self._fenced is not None or (refused and not self._asker.may_be_late(error)):
            op = "committing offsets"
            topic = next((tp.topic for tp in offsets if f"{tp.topic}(" in error.str()), "")  # the library names them
            return translate(self._fenced or error, request=Request.TRANSACTION, op=op, asker=self._asker, name=topic)
        return of_member or CommitFailed(f"committing offsets failed: {error.str()}", code=error.code())

    def _clean_up(self, error: KafkaError) -> None:
        """Take back what was begun. An end that was not answered is asked for again next time."""
        if self._transaction in (Transaction.COMMITTING, Transaction.ABORTING) and error.retriable():
            return
        if self._usable(error) and self._transaction is not Transaction.NONE:
            self._transaction = Transaction.ABORTING
            try:
                self._end()
            except KafkaException as exc:
                self._note_fenced(exc.args[0])
                self._usable(exc.args[0])

    def _note_fenced(self, error: KafkaError) -> None:
        if meaning(Request.TRANSACTION, error.code()) is not Meaning.FENCED:
            return
        expires_ms = int(str(self._settings["transaction.timeout.ms"]))
        if self._transaction is not Transaction.NONE and self._environment.now_ms() - self._begun_ms >= expires_ms:
            self._producer, self._transaction, self.lost = None, Transaction.NONE, True
        else:
            self._fenced = error

    def _usable(self, error: KafkaError) -> bool:
        """Whether the producer can go on after this."""
        if self._producer is not None and not (error.retriable() or error.txn_requires_abort()):
            self.lost = self._fenced is None
            self._producer = None
        return self._producer is not None


def memberless(settings: Mapping[str, Any], group: str, *, environment: Environment) -> Identity:
    """What a consumer that never subscribed says of its group: generation -1, no member, which the broker accepts
    for transactional commits in every state of the group. For the question alone: nothing is committed with it."""
    own = {name: value for name, value in settings.items() if name != "transactional.id"}
    consumer = environment.consumer({**own, **NEVER_JOINS, "group.id": group})
    try:
        return Identity(-1, "", consumer.consumer_group_metadata())
    finally:
        consumer.close()
