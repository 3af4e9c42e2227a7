"""``confluent_kafka.Producer`` over the simulated Kafka: a transactional producer that sends only offsets.

Runs in: tests. The errors and their flags were observed with librdkafka 2.16. Deliberately absent: records.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from kit.fake_library import Library, refusal
from kit.kafka_group import Code
from kit.misfortune import RequestKind
from kit.transactions import TRANSACTION_MS
from kit.wire import Partly, Reply
from kit.world import Process, to_ms

if TYPE_CHECKING:
    from kit.cluster import Cluster

RETRY_MS = 20
"""The interval at which the library retries what the coordinator cannot do yet."""
RESUME = "Timed out waiting for operation to finish, retry call to resume"

UNANSWERED = (KafkaError._TIMED_OUT, KafkaError._TRANSPORT)
"""The library counts such a request as received, unless it was never sent (``rd_kafka_txn_handle_AddOffsetsToTxn``)."""

DENIED = KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED


class FakeProducer:
    """One producer; one thread uses it. Its states are the library's: Init, Ready, InTransaction, and the last
    unanswered call, which must be repeated."""

    def __init__(self, process: Process, cluster: "Cluster", settings: Mapping[str, Any]) -> None:
        self._library = Library(process, cluster, settings, "producer")
        self._id: str = settings["transactional.id"]
        self._transaction_ms = int(settings.get("transaction.timeout.ms", TRANSACTION_MS))
        self._epoch = 0
        self._state = "Init"
        self._unanswered = ""  # the call to repeat
        self._registered = False  # whether the coordinator knows the transaction, or may know it: an abort is sent
        self._abortable: KafkaError | None = None
        self._fatal: KafkaError | None = None
        self._has_raised_fatal = False

    def init_transactions(self, timeout: float = -1.0) -> None:
        self._expect("Init")

        def serve(reply: Reply) -> None:
            if not self._library.cluster.transactions_allowed:
                reply(refusal(DENIED, "Failed to acquire transactional PID from broker TxnCoordinator/1", fatal=True))
                return
            code, epoch = self._library.cluster.transactions.init(self._id, by=self._library.process.name)
            if code is Code.CONCURRENT:
                self._library.world.at(RETRY_MS, lambda: serve(reply))
            else:
                reply(epoch)

        name = self._library.process.name
        self._library.cluster.transactions.asking.add(name)
        try:
            self._epoch = self._request(RequestKind.INIT, serve, timeout, self._unanswered_error)
        finally:
            self._library.cluster.transactions.asking.discard(name)
            self._library.cluster.transactions.answered.add(name)
        self._state = "Ready"

    def poll(self, timeout: float) -> int:
        """There are no events but a fatal error, which is raised once: no login is refused here."""
        if self._fatal is not None and not self._has_raised_fatal:
            self._has_raised_fatal = True
            raise KafkaException(self._fatal)
        return 0

    def begin_transaction(self) -> None:
        self._expect("Ready")
        self._state, self._registered, self._abortable = "InTransaction", False, None

    def send_offsets_to_transaction(
        self, positions: Sequence[KafkaPartition], group_metadata: bytes, timeout: float = -1.0
    ) -> None:
        self._expect("InTransaction")
        cluster, transactions = self._library.cluster, self._library.cluster.transactions
        name, who = _parse(group_metadata)
        group, entries = cluster.group(name), self._library.entries(positions)
        epoch = self._epoch

        def add(reply: Reply) -> None:
            if not cluster.transactions_allowed:
                reply(refusal(DENIED, "Failed to add offsets to transaction", fatal=True))
                return
            code = transactions.add(self._id, epoch, group, timeout_ms=self._transaction_ms)
            if code is Code.CONCURRENT:
                self._library.world.at(RETRY_MS, lambda: add(reply))
            else:
                reply(self._coordinator_error(code, "Failed to add offsets to transaction") or code)

        def send(reply: Reply) -> None:
            if cluster.is_too_large(len(entries)):
                reply(refusal(KafkaError.UNKNOWN, "Failed to commit offsets", txn_requires_abort=True))
                return
            if cluster.is_denied(tp.topic for tp in entries):
                denied = KafkaError.TOPIC_AUTHORIZATION_FAILED
                reply(refusal(denied, "Failed to commit offsets to transaction", txn_requires_abort=True))
                return
            if any(cluster.log(tp) is None for tp in entries):
                # The library retries until its timeout, then returns the broker's own answer.
                self._library.process.later(
                    self._library.thread, to_ms(timeout), lambda: reply(_abortable(Code.UNKNOWN_TOPIC))
                )
                return
            code = transactions.send(self._id, epoch, group, who, entries)
            failed = "Failed to commit offsets to transaction"
            error = self._coordinator_error(code, failed)
            reply(error or (code if code is Code.OK else _abortable(code)))

        self._request(RequestKind.ADD, add, timeout, self._timed_out, registers=True)
        self._request(RequestKind.SEND, send, 2 * timeout, self._timed_out)  # its own timeout is the later one

    def commit_transaction(self, timeout: float = -1.0) -> None:
        self._end("commit_transaction", timeout)

    def abort_transaction(self, timeout: float = -1.0) -> None:
        self._end("abort_transaction", timeout)

    def _end(self, call: str, timeout: float) -> None:
        commit = call == "commit_transaction"
        if self._unanswered and self._unanswered != call and self._fatal is None:
            text = f"Conflicting {self._unanswered} API call is already in progress"
            raise KafkaException(KafkaError(KafkaError._CONFLICT, text, retriable=True))
        self._expect("InTransaction")
        if commit and self._abortable is not None:
            raise KafkaException(self._abortable)
        if self._registered:
            transactions, epoch = self._library.cluster.transactions, self._epoch

            def serve(reply: Reply) -> None:
                def done(code: Code) -> None:
                    if code is Code.CONCURRENT:
                        self._library.world.at(RETRY_MS, lambda: serve(reply))
                    else:
                        reply(self._coordinator_error(code, "Failed to end transaction") or code)

                transactions.end(self._id, epoch, commit=commit, done=done)

            self._unanswered = call
            self._request(RequestKind.END, serve, timeout, self._unanswered_error)
        self._unanswered, self._state = "", "Ready"

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _request(
        self,
        kind: RequestKind,
        serve: Callable[[Reply], None],
        timeout: float,
        timed_out: Callable[[], KafkaError],
        *,
        registers: bool = False,
    ) -> Any:
        try:
            answer = self._library.answer(kind, serve, timeout_ms=to_ms(timeout), timed_out=timed_out)
        except KafkaException as exc:
            error = self._flagged(exc.args[0], kind)
            if registers and error.code() in UNANSWERED:
                if self._library.was_sent:
                    self._registered = True
                else:
                    error = refusal(KafkaError._TIMED_OUT_QUEUE, "Failed to add offsets to transaction", retriable=True)
            if error.fatal():
                self._fatal = error
            elif error.txn_requires_abort():
                self._abortable, self._unanswered = error, ""
            raise KafkaException(error) from None
        self._registered |= registers
        return answer.answer if isinstance(answer, Partly) else answer

    def _flagged(self, error: KafkaError, kind: RequestKind) -> KafkaError:
        """An injected error, with the flags that the library sets for this call."""
        if error.fatal() or error.retriable() or error.txn_requires_abort():
            return error
        passing = (KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError.CONCURRENT_TRANSACTIONS)
        if kind is RequestKind.ADD and error.code() in passing:
            return refusal(error.code(), "Failed to add offsets to transaction", retriable=True)
        return refusal(error.code(), f"Failed to {kind.value}", txn_requires_abort=True)

    def _coordinator_error(self, code: Code, text: str) -> KafkaError | None:
        if code is Code.FENCED_PRODUCER:
            return refusal(KafkaError._FENCED, text, fatal=True)
        if code is Code.UNKNOWN_PRODUCER:
            return refusal(code, text, txn_requires_abort=True)
        if code is Code.INVALID_TXN_STATE:
            return refusal(code, text, fatal=True)
        return None

    def _expect(self, state: str) -> None:
        if self._fatal is not None:
            raise KafkaException(self._fatal)
        if self._state != state:
            raise KafkaException(KafkaError(KafkaError._STATE, f"Operation not valid in state {self._state}"))

    def _unanswered_error(self) -> KafkaError:
        return KafkaError(KafkaError._TIMED_OUT, RESUME, retriable=True)

    def _timed_out(self) -> KafkaError:
        return refusal(KafkaError._TIMED_OUT, "Failed to add offsets to transaction", retriable=True)


def _abortable(code: Code) -> KafkaError:
    return refusal(code, "Failed to commit offsets to transaction", txn_requires_abort=True)


def _parse(metadata: bytes) -> tuple[str, tuple[str, int, str | None]]:
    """Return the group, and the member to commit as: id, generation, instance id."""
    generation = int(struct.unpack_from("=i", metadata, 7)[0])
    group, member, rest = metadata[11:].split(b"\0", 2)
    instance = None if rest == b"\1" else rest.strip(b"\0").decode()
    return group.decode(), (member.decode(), generation, instance)
