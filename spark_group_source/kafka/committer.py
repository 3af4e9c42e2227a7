"""The transactional offset commit: commits a group's offsets from outside the group, fenced by a transactional id.

Runs in: the stream reader's request thread. Deliberately absent: which offsets are committed and when (``protocol``).
"""

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from spark_group_source.error_codes import Meaning, Request, meaning
from spark_group_source.errors import CommitFailed, OptionError, SourceError
from spark_group_source.kafka.environment import NEVER_JOINS, Environment, coordinator_idle
from spark_group_source.kafka.retry import RefusalWatch
from spark_group_source.kafka.translation import ClientInfo, CommitSizes, Notes, stale_member, to_kafka, translate
from spark_group_source.model import Identity, TopicPartition

TRANSACTION_TIMEOUT_S = 10.0
"""The timeout of init, commit and abort; normally they take milliseconds. An unanswered step is repeated. Lookups wait
behind it, while a revocation may be held."""
EXPIRES_S = 60.0
"""After this time the brokers abort an open transaction, and then fence its producer as if it had been replaced.
``kafka.transaction.timeout.ms`` overrides it."""
SEND_TIMEOUT_S = 5.0
"""The timeout of adding offsets to the transaction. The library retries for this long when a topic is unknown, which a
deleted one stays, while revocations wait for the commit."""
REQUEST_TIMEOUT_MS = 10_000
"""The timeout of a request to a broker that is connected but does not respond, such as a frozen one. With the library's
default of a minute, lookups would wait that long behind a commit. ``kafka.socket.timeout.ms`` overrides it, up to the
transaction's timeout: librdkafka refuses a longer one."""

FORGOTTEN = frozenset({KafkaError.INVALID_PRODUCER_ID_MAPPING, KafkaError.UNKNOWN_PRODUCER_ID})
"""Answers of a coordinator that does not know this producer any more: it was idle for longer than
``transactional.id.expiration.ms``, or the coordinator's log was lost. The library keeps such a producer, and would get
the same answer for ever."""


class Transaction(Enum):
    """The state of the producer's transaction."""

    NONE = "no transaction is open"
    OPEN = "begun; neither commit nor abort was requested"
    COMMITTING = "commit requested, not confirmed"
    ABORTING = "abort requested, not confirmed"


@dataclass(frozen=True, slots=True)
class _Unclaimed:
    """This process has not taken over the transactional id yet."""


@dataclass(slots=True)
class _Owned:
    """This process has the transactional id, unless a newer process has taken it over since."""

    producer: Any
    transaction: Transaction = Transaction.NONE
    begun_ms: int = 0
    """When the last transaction was begun, on the environment's clock."""


@dataclass(frozen=True, slots=True)
class _Uncertain:
    """This process had the transactional id; whether it still has it is unknown."""


@dataclass(frozen=True, slots=True)
class _Fenced:
    """A newer process has the transactional id. Final."""

    error: KafkaError


class TransactionalCommitter:
    """Commits a group's offsets without being a member, fenced by its transactional id (KIP-98, KIP-447).

    One thread uses it. The transaction contains only offsets, each committed as the member that owns its partition. It
    is atomic, accepted while the group rebalances, and refused when one of the members has changed. A newer process
    with the same transactional id fences this one for good.

    The id is taken over once. An unanswered transaction is finished with the same producer before the next one begins:
    a new producer would take the id back from a process that has replaced this one meanwhile. When the producer fails
    for good, or the brokers aborted its transaction after a long outage, :attr:`id_uncertain` is set until
    :meth:`regain_id`; the caller must first prove that this process still has its memberships.

    Args:
        settings: librdkafka settings of a producer.
        transactional_id: the same for every run of a stream.
    """

    def __init__(
        self, settings: Mapping[str, str], *, group: str, transactional_id: str, environment: Environment
    ) -> None:
        self._environment = environment
        expires_ms = settings.get("transaction.timeout.ms", str(int(EXPIRES_S * 1000)))
        request_ms = min(int(settings.get("socket.timeout.ms", REQUEST_TIMEOUT_MS)), int(expires_ms))
        own = {
            "transactional.id": transactional_id,
            "transaction.timeout.ms": expires_ms,
            "socket.timeout.ms": str(request_ms),
        }
        self._refusal = RefusalWatch()
        self._settings = {**settings, **coordinator_idle(settings), **own}
        self._client_info = ClientInfo.of(self._settings, group=group)
        self._group = group
        self._sizes = CommitSizes(group)
        self._state: _Unclaimed | _Owned | _Uncertain | _Fenced = _Unclaimed()

    @property
    def id_uncertain(self) -> bool:
        """Whether this process had the transactional id and may have lost it. Nothing is committed before
        :meth:`regain_id`."""
        return isinstance(self._state, _Uncertain)

    def serve(self) -> None:
        """Handle what the library reports between commits; otherwise that takes more and more memory during an
        outage."""
        if isinstance(self._state, _Owned):
            _serve(self._state.producer)

    def regain_id(self) -> None:
        """Take over the transactional id again, after a proof that this process still has its memberships.

        The proof is that a broker has just accepted a commit of its members or, if some are on agents, that the group
        contains all of them. It must be fresh: a process that freezes after an older proof would fence its successor
        when it continues.

        Raises:
            As :meth:`prepare`.
        """
        try:
            self._take_over()
        except KafkaException as exc:
            raise self._failure(exc.args[0]) from exc

    def prepare(self) -> None:
        """Take over the transactional id now, which fences all older processes.

        Raises:
            Fenced: a newer process has the id.
            AccessDenied: transactions are denied.
            CommitFailed: the id was not taken over; the first commit tries again.
        """
        try:
            self._own()
        except KafkaException as exc:
            raise self._failure(exc.args[0]) from exc

    def probe(self, tp: TopicPartition) -> bool:
        """Check with the broker that the id is still this process's, by a transaction with one offset that is aborted.

        Args:
            tp: any partition of the group; no offset is committed for it.

        Returns:
            True: it is. False: nothing was checked, because this process does not have the id (not yet, or not any more
            after a failure); the check never takes the id over.

        Raises:
            Fenced: a newer process has the id. Final.
            AccessDenied: transactions are denied.
            CommitFailed: no answer.
        """
        if isinstance(self._state, _Unclaimed | _Uncertain):
            return False
        try:
            owned = self._begin()
            outsider = memberless(self._settings, self._group, environment=self._environment)
            owned.producer.send_offsets_to_transaction([to_kafka(tp, 0)], outsider.metadata, SEND_TIMEOUT_S)
            self._end(owned)
        except KafkaException as exc:
            error = exc.args[0]
            failure = self._failure(error)
            # Adding the offset is the second step. The first one, which names the id, was accepted.
            if error.code() != KafkaError.UNKNOWN_TOPIC_OR_PART or isinstance(self._state, _Fenced):
                raise failure from exc
        return True

    def commit(self, parts: Sequence[tuple[Identity, Mapping[TopicPartition, int]]], notes: Notes) -> None:
        """Commit the *next* offset of each partition in one transaction, with as many requests as their size needs.

        Args:
            parts: for each member, its identity and the offsets of its partitions.
            notes: what is committed beside each offset.

        Raises:
            Fenced: a newer process has the id. Final.
            AccessDenied: transactions are denied; a member can commit instead.
            MemberStale: a member has changed; nothing was committed.
            CommitFailed: unanswered or refused; try again later.
        """
        index, sent = 0, list[Any]()
        while True:
            try:
                sent = []
                owned = self._begin()
                for index, (identity, offsets) in enumerate(parts):  # noqa: B007 - for the error
                    for sent in self._sizes.split(offsets, notes):
                        owned.producer.send_offsets_to_transaction(sent, identity.metadata, SEND_TIMEOUT_S)
                sent = []
                owned.transaction = Transaction.COMMITTING
                self._end(owned)
                self._refusal.clear()
                self._sizes.accepted()
                return
            except KafkaException as exc:
                failure = self._failure(exc.args[0], part=index, offsets=notes)
                if not (isinstance(self._state, _Owned) and self._sizes.shrink(exc.args[0].code(), sent)):
                    raise failure from exc

    def finish_transaction(self) -> None:
        """Finish the transaction of an unanswered commit: while it is open, a stable read of the group's offsets waits.

        Raises:
            As :meth:`commit`.
        """
        try:
            if isinstance(self._state, _Owned):
                self._end(self._state)
        except KafkaException as exc:
            raise self._failure(exc.args[0]) from exc

    def _own(self) -> _Owned:
        match self._state:
            case _Owned():
                return self._state
            case _Fenced():
                raise KafkaException(self._state.error)
            case _Uncertain():
                raise CommitFailed("the transactional id may belong to another process")
            case _Unclaimed():
                return self._take_over()

    def _take_over(self) -> _Owned:
        self._refusal.clear()
        producer = self._environment.producer({**self._settings, "error_cb": self._refusal})
        try:
            producer.init_transactions(TRANSACTION_TIMEOUT_S)
        except KafkaException:
            _serve(producer)
            raise
        self._state = owned = _Owned(producer)
        return owned

    def _begin(self) -> _Owned:
        """Begin a transaction, after finishing the last one."""
        owned = self._own()
        self._end(owned)
        owned.producer.begin_transaction()
        owned.transaction, owned.begun_ms = Transaction.OPEN, self._environment.boot_ms()
        return owned

    def _end(self, owned: _Owned) -> None:
        """End the transaction: commit it if its commit was requested before, else abort it."""
        if owned.transaction is Transaction.NONE:
            return
        if owned.transaction is Transaction.COMMITTING:
            owned.producer.commit_transaction(TRANSACTION_TIMEOUT_S)
        else:
            owned.transaction = Transaction.ABORTING
            owned.producer.abort_transaction(TRANSACTION_TIMEOUT_S)
        owned.transaction = Transaction.NONE

    def _failure(self, error: KafkaError, *, part: int = 0, offsets: Iterable[TopicPartition] = ()) -> SourceError:
        """Update the state after a failed call, and return the exception to raise."""
        stale = stale_member(error, request=Request.TRANSACTION, part=part)
        self._clean_up(error)
        fenced = self._state.error if isinstance(self._state, _Fenced) else None
        refused = meaning(Request.TRANSACTION, error.code(), error.str()) is Meaning.REFUSED
        if fenced is not None or (refused and not self._client_info.token_may_have_expired(error)):
            op = "committing offsets"
            named = r"(?<![\w.-]){}\("  # in the text only, before "(id)[partition]"
            topic = next((tp.topic for tp in offsets if re.search(named.format(re.escape(tp.topic)), error.str())), "")
            return translate(
                fenced or error, request=Request.TRANSACTION, op=op, client_info=self._client_info, name=topic
            )
        if error.code() == KafkaError.INVALID_TRANSACTION_TIMEOUT:
            return OptionError(
                f"kafka.transaction.timeout.ms is {self._settings['transaction.timeout.ms']}. The brokers refuse that, "
                "so no offset can be committed: set a value that is not above their transaction.max.timeout.ms "
                "(900000 unless set)"
            )
        why = "" if self._refusal.error is None else f"; the brokers refuse the login: {self._refusal.error.str()}"
        return stale or CommitFailed(f"committing offsets failed: {error.str()}{why}")

    def _clean_up(self, error: KafkaError) -> None:
        """Abort what was begun. A commit or abort that was not confirmed is repeated by the next call instead."""
        self._update_ownership(error)
        if not isinstance(owned := self._state, _Owned) or owned.transaction is Transaction.NONE:
            return
        if owned.transaction is not Transaction.OPEN and error.retriable():
            return
        owned.transaction = Transaction.ABORTING
        try:
            self._end(owned)
        except KafkaException as exc:
            self._update_ownership(exc.args[0])

    def _update_ownership(self, error: KafkaError) -> None:
        """Update the state by what an error says about the ownership of the id. A producer whose login is refused is
        given up: a new one reads the files of certificates again, which may have been replaced."""
        self.serve()
        fenced = meaning(Request.TRANSACTION, error.code()) is Meaning.FENCED
        match self._state:
            case _Owned() as owned if fenced:
                expires_ms = int(self._settings["transaction.timeout.ms"])
                open_ms = self._environment.boot_ms() - owned.begun_ms  # also while the machine was suspended
                expired = owned.transaction is not Transaction.NONE and open_ms >= expires_ms
                self._state = _Uncertain() if expired else _Fenced(error)
            case _Owned() if error.code() < 0 and self._refusal.error is not None:  # no answer
                self._state = _Uncertain()
            case _Owned() if error.code() in FORGOTTEN or not (error.retriable() or error.txn_requires_abort()):
                self._state = _Uncertain()
            case _ if fenced:
                self._state = _Fenced(error)


def _serve(producer: Any) -> None:
    with contextlib.suppress(KafkaException):  # a fatal error is raised here once, and again by the next request
        producer.poll(0)


def memberless(settings: Mapping[str, Any], group: str, *, environment: Environment) -> Identity:
    """Return the identity of a consumer that never subscribed: generation -1 and no member id. Brokers accept it for
    transactional commits in every state of the group. Only :meth:`TransactionalCommitter.probe` uses it, no commit."""
    own = {name: value for name, value in settings.items() if name != "transactional.id"}
    consumer = environment.consumer({**own, **NEVER_JOINS, "group.id": group})
    try:
        return Identity(-1, "", consumer.consumer_group_metadata())
    finally:
        consumer.close()
