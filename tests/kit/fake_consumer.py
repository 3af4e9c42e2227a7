"""``confluent_kafka.Consumer`` over the simulated Kafka: membership and committed offsets.

Runs in: tests. Callbacks run inside :meth:`FakeConsumer.poll` on the calling thread, and may block there;
``kafka_client`` models librdkafka's own thread. Deliberately absent: fetching, positions, asynchronous commits,
max.poll.interval.ms as a limit for the application (only the group enforces it).
"""

import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from kit.fake_library import Answered, Library, from_kafka, refusal, to_kafka
from kit.kafka_client import Client, Kind, Op, client_class
from kit.kafka_group import Code, Entry
from kit.misfortune import RequestKind
from kit.wire import Partly, PendingRequest, Reply
from kit.world import Process, Thread, the_thread, to_ms
from spark_group_source.model import TopicPartition

if TYPE_CHECKING:
    from kit.cluster import Cluster

IDLE_STEP_MS_MIN = 100
"""Polls of at least this long belong to a loop that checks other things in between."""
IDLE_MS_MAX = 1_000
"""How long such a loop may sleep while there is nothing to poll."""
COMMIT_MS_MAX = 45_000
"""A commit waits for the coordinator for a session timeout, which is this by default."""
CLOSE_MS_MAX = 50

Callback = Callable[["FakeConsumer", list[KafkaPartition]], Any]


class FakeMessage:
    """The result of ``poll``: always an error, never a record."""

    def __init__(self, error: KafkaError, tp: TopicPartition | None = None) -> None:
        self._error, self._tp = error, tp

    def topic(self) -> str | None:
        return None if self._tp is None else self._tp.topic

    def partition(self) -> int | None:
        return None if self._tp is None else self._tp.partition

    def error(self) -> KafkaError:
        return self._error


class FakeConsumer:
    """One consumer. One thread uses it; an error that aborts the real library ends the history."""

    def __init__(self, process: Process, cluster: "Cluster", settings: Mapping[str, Any]) -> None:
        self._library = Library(process, cluster, settings, "consumer")
        self._world = process.world
        self._draws = process.draws(self._library.thread)
        self._instance: str | None = settings.get("group.instance.id")
        self._new_protocol = settings.get("group.protocol") == "consumer"
        self._incremental = self._new_protocol or "coop" in settings.get("partition.assignment.strategy", "")
        self._name = f"{process.name}/{settings.get('client.id', 'rdkafka')}#{self._library.number}"
        self._client: Client | None = None
        self._callbacks: dict[Kind, Callback | None] = {}
        self._waiting: deque[Op | FakeMessage] = deque()
        self._poller: Thread | None = None
        self._polling = False
        self._in: Op | None = None  # the running callback
        self._fatal: KafkaError | None = None
        self._closed = False

    # --- membership -------------------------------------------------------------------------------------------------

    def subscribe(
        self,
        topics: Sequence[str],
        on_assign: Callback | None = None,
        on_revoke: Callback | None = None,
        on_lost: Callback | None = None,
    ) -> None:
        self._enter()
        if self._fatal is not None:
            raise KafkaException(self._fatal)
        self._callbacks = {Kind.ASSIGN: on_assign, Kind.REVOKE: on_revoke, Kind.LOST: on_lost or on_revoke}
        if not topics:
            raise KafkaException(KafkaError(KafkaError._INVALID_ARG, "Failed to set subscription"))
        if self._client is None:
            group = self._library.cluster.group(self._library.settings["group.id"])
            takes = self._instance is not None and group.protocol == "consumer" and not self._new_protocol
            fits = (group.incremental, group.protocol == "consumer") == (self._incremental, self._new_protocol)
            assert fits or takes, "members of another protocol are not simulated"
            self._client = client_class(group, takes=takes)(
                self._library.process,
                self._library.thread,
                self._name,
                group,
                self,
                self._library.cluster.books,
                instance=self._instance,
                client_id=self._library.settings.get("client.id", "rdkafka"),
            )
            answered = self._library.process.name in self._library.cluster.transactions.answered
            self._library.cluster.books.joins(self._client, answered=answered)
        self._client.subscribe(frozenset(topics))

    def unsubscribe(self) -> None:
        self._enter()
        if self._fatal is not None:
            raise KafkaException(self._fatal)
        if self._client is not None:
            self._client.unsubscribe()

    def poll(self, timeout: float = -1.0) -> FakeMessage | None:
        me = self._enter()
        until_ms = self._world.now_ms + to_ms(timeout) if timeout >= 0 else None
        step_ms = to_ms(timeout)
        idle = step_ms >= IDLE_STEP_MS_MIN
        self._polling = True
        try:
            while True:
                while self._waiting:
                    idle, next_ = False, self._waiting.popleft()
                    if isinstance(next_, FakeMessage):
                        return next_
                    self._call(next_)
                left_ms = None if until_ms is None else until_ms - self._world.now_ms
                if left_ms is not None and left_ms <= 0:
                    return None
                self._poller = me
                if idle:
                    me.block_idle(step_ms, IDLE_MS_MAX)
                else:
                    me.block(left_ms)
                self._poller = None
                if idle and not self._waiting:
                    return self._nothing()
        finally:
            self._poller, self._polling = None, False

    def _nothing(self) -> FakeMessage | None:
        """Now and then the library reports a connection error."""
        if self._library.process.cut_off() and self._draws.chance(0.2):
            return FakeMessage(refusal(KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down"))
        return None

    def memberid(self) -> str | None:
        self._enter()
        return self._who()[0] or None

    def consumer_group_metadata(self) -> bytes:
        self._enter()
        member, generation = self._who()
        instance = b"\1" if self._instance is None else b"\0" + self._instance.encode() + b"\0"
        group = str(self._library.settings["group.id"]).encode()
        return b"CGMDv2:" + struct.pack("=i", generation) + group + b"\0" + member.encode() + b"\0" + instance

    def close(self) -> None:
        if self._closed:
            return
        me = self._enter()
        client = self._client
        if client is not None and not client.closed:
            client.give_all_back()
            while self._waiting:
                next_ = self._waiting.popleft()
                if isinstance(next_, Op):
                    self._call(next_)
                client.give_all_back()
            client.close(leave=False)
            me.block(self._draws.between(1, CLOSE_MS_MAX))
        self._closed = True

    # --- inside callbacks -------------------------------------------------------------------------------------------

    def seek(self, partition: KafkaPartition) -> None:
        """Validate a position beyond the log, set with a leader epoch: the library reports where that epoch ends. It
        retries what is not answered."""
        self._enter()
        tp, epoch = from_kafka(partition), partition.leader_epoch

        def serve(reply: Reply) -> None:
            log = self._library.cluster.log(tp)
            if log is not None and max(log.leader_from_ms, log.serves_from_ms) <= self._world.now_ms:
                reply(log.epoch_end(epoch))

        def settle(answer: Any) -> None:
            if not isinstance(answer, KafkaError | Partly) and not self._closed:
                end, at = (-1, -1) if answer is None else (answer, epoch)
                text = f"broker end offset is {end} (offset leader epoch {at})"
                self._report(KafkaError(KafkaError._AUTO_OFFSET_RESET, text), tp)

        PendingRequest(
            self._library,
            RequestKind.EPOCHS,
            serve,
            settle,
            timeout_ms=COMMIT_MS_MAX,
            timed_out=lambda: refusal(KafkaError._TIMED_OUT),
        )

    def assign(self, partitions: Iterable[KafkaPartition]) -> None:
        if self._client is None:  # it reads no records: only :meth:`seek` follows
            self._enter()
            return
        self._take(Kind.ASSIGN, partitions, incremental=False)

    def incremental_assign(self, partitions: Iterable[KafkaPartition]) -> None:
        self._take(Kind.ASSIGN, partitions, incremental=True)

    def unassign(self) -> None:
        self._take(Kind.REVOKE, None, incremental=False)

    def incremental_unassign(self, partitions: Iterable[KafkaPartition]) -> None:
        self._take(Kind.REVOKE, partitions, incremental=True)

    def _take(self, kind: Kind, partitions: Iterable[KafkaPartition] | None, *, incremental: bool) -> None:
        self._enter()
        if self._in is None:
            raise NotImplementedError("assignments outside of a callback are not simulated")
        if incremental != self._incremental or (kind is Kind.ASSIGN) != (self._in.kind is Kind.ASSIGN):
            raise KafkaException(KafkaError(KafkaError._STATE, "the call does not fit the rebalance"))
        if partitions:
            raise NotImplementedError("a member that fetches is not simulated")
        self._in.done()

    def _call(self, op: Op) -> None:
        """Run a callback. If it neither assigns nor unassigns, the binding would give the partitions to the library, or
        take them from it, which fails."""
        op.begin()
        callback, self._in = self._callbacks.get(op.kind), op
        try:
            if callback is not None:
                callback(self, to_kafka(op.tps))
                if op.is_open:
                    raise NotImplementedError("a member that fetches is not simulated")
        finally:
            self._in = None
            op.done()

    # --- committed offsets ------------------------------------------------------------------------------------------

    def commit(
        self,
        message: None = None,
        offsets: Sequence[KafkaPartition] | None = None,
        asynchronous: bool = True,
    ) -> list[Answered]:
        del message
        me = self._enter()
        if self._polling and self._in is None and self._poller is not me:
            self._world.fail(AssertionError("a commit while another thread polls the same consumer never returns"))
        if offsets is None or asynchronous:
            raise NotImplementedError("only commits of given offsets that are waited for are simulated")
        if self._fatal is not None:
            raise KafkaException(self._fatal)
        entries = self._library.entries(offsets)
        group = self._library.cluster.group(self._library.settings["group.id"])
        member, generation = self._who()
        instance = self._instance if self._client is not None else None

        def serve(reply: Reply) -> None:
            if self._library.cluster.is_too_large(len(entries)):
                reply(refusal(KafkaError.UNKNOWN, "Commit failed"))
                return
            if self._library.cluster.is_denied(tp.topic for tp in entries):
                reply(refusal(KafkaError.TOPIC_AUTHORIZATION_FAILED, "Commit failed"))
                return
            there = {tp: entry for tp, entry in entries.items() if self._library.cluster.log(tp) is not None}
            code = group.commit(member, generation, there, instance=instance) if there else Code.OK
            reply((code, {tp: KafkaError(Code.UNKNOWN_TOPIC.value) for tp in entries if tp not in there}))

        answer = self._library.answer(
            RequestKind.COMMIT,
            serve,
            timeout_ms=int(self._library.settings.get("session.timeout.ms", COMMIT_MS_MAX)),
            timed_out=lambda: refusal(KafkaError._WAIT_COORD, "Commit failed"),
        )
        code, errors = answer.answer if isinstance(answer, Partly) else answer
        if isinstance(answer, Partly):
            errors |= {
                tp: error for tp in entries if (error := self._library.partial_error(RequestKind.COMMIT)) is not None
            }
        if code is not Code.OK:
            if self._client is not None:
                self._client.refused(code)
            raise KafkaException(refusal(code, "Commit failed"))
        if len(errors) == len(entries) and errors:
            raise KafkaException(refusal(next(iter(errors.values())).code(), "Commit failed"))
        return [Answered(p.topic, p.partition, p.offset, p.metadata, errors.get(from_kafka(p))) for p in offsets]

    def committed(self, partitions: Sequence[KafkaPartition], timeout: float = -1.0) -> list[Answered]:
        self._enter()
        requested = [from_kafka(p) for p in partitions]
        group = self._library.cluster.group(self._library.settings["group.id"])
        stable = self._library.settings.get("isolation.level", "read_committed") == "read_committed"
        answer = self._library.answer(
            RequestKind.COMMITTED,
            lambda reply: group.read(requested, stable, reply),
            timeout_ms=to_ms(timeout),
            timed_out=lambda: refusal(KafkaError._TIMED_OUT, "Failed to get committed offsets"),
        )
        partly = isinstance(answer, Partly)
        found: dict[TopicPartition, Entry | None] = answer.answer if isinstance(answer, Partly) else answer
        answers = []
        for tp in requested:
            error = self._library.partial_error(RequestKind.COMMITTED) if partly else None
            entry = None if error is not None else found[tp]
            if entry is None:
                answers.append(Answered(tp.topic, tp.partition, error=error))
            else:
                answers.append(Answered(tp.topic, tp.partition, entry.offset, entry.note or None, entry.leader_epoch))
        return answers

    @property
    def place(self) -> str | None:
        """The instance id that it has, or joins with, while it is open."""
        client = self._client
        return None if client is None or client.closed or self._closed or self._fatal is not None else self._instance

    def breaks(self) -> bool:
        """Inject a fatal error of the library, which ends a member; False: it is not a member."""
        client = self._client
        if client is None or client.closed or client.leaving or self._fatal is not None:
            return False
        client.breaks()
        return True

    def is_expelled(self) -> bool:
        """End its session at the coordinator, as after a pause; False: the group does not list it."""
        client = self._client
        member = None if client is None or client.closed or client.leaving else client.listed
        if client is None or member is None:
            return False
        client.expel(member)
        return True

    # --- from the library's thread ----------------------------------------------------------------------------------

    def rebalance(self, op: Op) -> None:
        self._waiting.append(op)
        self._wake()

    def renamed(self) -> None:
        if self._poller is not None:
            self._poller.stir()

    def full(self) -> None:
        self._report(refusal(Code.GROUP_FULL, "JoinGroup failed"))

    def dead(self, code: Code) -> None:
        """Only later calls report it; no callback revokes its partitions."""
        self._waiting.clear()
        words = KafkaError(code.value).str()
        what = "ConsumerGroupHeartbeat fatal error" if self._new_protocol else "Fatal consumer error"
        self._fatal = KafkaError(KafkaError._FATAL, f"Fatal error: {words}: {what}: {words}")
        self._report(self._fatal)

    def _report(self, error: KafkaError, tp: TopicPartition | None = None) -> None:
        self._waiting.append(FakeMessage(error, tp))
        self._wake()

    def _wake(self) -> None:
        if self._poller is not None:
            self._poller.wake()

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _who(self) -> tuple[str, int]:
        if self._client is None:
            return (self._name if self._new_protocol else ""), -1
        return self._client.member, self._client.generation

    def _enter(self) -> Thread:
        me = the_thread(self._world)
        if self._closed:
            raise RuntimeError("Consumer closed")
        return me
