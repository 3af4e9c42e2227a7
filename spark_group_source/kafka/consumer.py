"""The consumer behind a member: membership without reading.

Runs in: the thread of a slot (``members.member``). Deliberately absent: fetching, deciding what a rebalance means, and
knowing that a member vanished.
"""

import contextlib
import logging
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException

from spark_group_source.error_codes import Meaning, Request, Suspicions, meaning
from spark_group_source.errors import CommitFailed, Fenced, GroupError, OptionError
from spark_group_source.kafka.environment import Environment
from spark_group_source.kafka.translation import Asker, stale, to_kafka, to_ours, translate
from spark_group_source.model import TopicPartition
from spark_group_source.options.client import SESSION_TIMEOUT_MS

log = logging.getLogger(__name__)

LEAVE_S_MAX = 3.0
"""How long leaving the group may take; after it the place ends with the session."""
LEAVE_POLL_S = 0.05
TAKE_MS_MAX = 10_000
"""How long :func:`take_place` may take; then the place is free when its session ends."""
TAKE_POLL_S = 0.1
_CONSUMER_PROTOCOL_ONLY = ("group.remote.assignor",)
"""Settings that a classic consumer refuses."""
REFUSED_CODES = frozenset(
    {
        KafkaError.INCONSISTENT_GROUP_PROTOCOL,
        KafkaError.GROUP_MAX_SIZE_REACHED,
        KafkaError.INVALID_GROUP_ID,
    }
)
"""Answers to a join that only someone else's doing changes."""


class Identity(NamedTuple):
    """Who a consumer is in its group: what the broker checks before it takes a commit of its partitions."""

    generation: int
    member: str
    metadata: Any
    """The library's form, for a transaction."""


class MemberConsumer:
    """The consumer behind one slot: membership only, its partitions stay paused and nothing is fetched.

    One thread calls everything here, the callbacks run inside :meth:`poll` on that thread.

    Args:
        settings: librdkafka settings with group.id and group.instance.id.
        environment: clock and clients.
        known_as: takes each member id that the group gives it.
        on_assigned: partitions that came, in addition; generation.
        on_revoked: partitions to give back; returns when they may go, with what the member must end with, if anything.
        on_lost: partitions that are gone, maybe none.
        renamed: it is another member, or in another generation, or in none.

    ``on_revoked`` and ``on_lost`` return why the consumer must not join again, or None: another process may have its
    place.
    """

    def __init__(
        self,
        settings: Mapping[str, str],
        *,
        environment: Environment,
        known_as: deque[str],
        on_assigned: Callable[[tuple[TopicPartition, ...], int], None],
        on_revoked: Callable[[tuple[TopicPartition, ...]], GroupError | None],
        on_lost: Callable[[tuple[TopicPartition, ...]], GroupError | None],
        renamed: Callable[[Identity | None], None] = lambda _: None,
    ) -> None:
        self._environment = environment
        self._asker = Asker.of(settings)
        self.incremental = is_incremental(settings)
        self._consumer_protocol = settings.get("group.protocol") == "consumer"
        self._on_assigned, self._on_revoked, self._on_lost = on_assigned, on_revoked, on_lost
        self._renamed = renamed
        self._failure: GroupError | None = None
        # Brokers that start refuse for a moment, and a member that is given up loses its partitions.
        self._suspicions = Suspicions()
        self.identity: Identity | None = None
        self._known_as = known_as
        self._holder = ""  # as which member it was given its partitions
        self._session_timeout_ms = settings.get("session.timeout.ms", str(SESSION_TIMEOUT_MS))
        self._consumer: Any = environment.consumer(settings)

    def subscribe(self, topics: Sequence[str]) -> None:
        self._consumer.subscribe(list(topics), on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)

    def poll(self, timeout_s: float) -> None:
        """Serve the group protocol.

        Raises:
            Fenced: another client took the instance id, or still has it (KIP-848); or ``on_lost`` said so.
            OptionError: the brokers allow no such session timeout.
            GroupError: the consumer is dead; make a new one.
        """
        try:
            message = self._consumer.poll(timeout_s)
        except KafkaException as exc:  # of a callback: the library refused to take partitions or give them up
            raise self._failure or self._fatal(exc.args[0]) from exc
        self.identify()
        if self._failure is not None:
            raise self._failure
        if message is None or (error := message.error()) is None:
            return
        if error.code() == KafkaError._FATAL or error.fatal():
            raise self._fatal(error)
        refused = meaning(Request.JOIN, error.code(), error.str()) is Meaning.REFUSED
        if refused and not self._asker.may_be_late(error) and self._suspicions.report(Meaning.REFUSED):
            name = message.topic() or ""
            raise translate(error, request=Request.JOIN, op="joining the group", asker=self._asker, name=name)
        if error.code() == KafkaError.INVALID_SESSION_TIMEOUT:
            raise OptionError(
                f"kafka.session.timeout.ms is {self._session_timeout_ms}, which the brokers refuse: it must lie "
                "between their group.min.session.timeout.ms and group.max.session.timeout.ms (6000 and 1800000 "
                "unless set). `kafka-configs.sh --describe --all --entity-type brokers` shows them"
            )
        if error.code() in REFUSED_CODES:  # the library would go on asking, and nobody would know why
            raise GroupError(f"the broker refuses the member: {error.str()}")
        log.info("member: %s", error.str())

    def identify(self) -> None:
        """Ask the library who it is in the group now, for :attr:`identity`.

        A consumer that holds a revocation is not told when its session ends: it can be back as another member, and keep
        as its own what somebody else had meanwhile. Then it fails, and a new one takes its slot.
        """
        now = _identity(self._consumer.consumer_group_metadata())
        if now is not None and self._holder not in ("", now.member) and self._consumer.assignment():
            self._failure = GroupError("thrown out of the group in a rebalance, and back as another member")
            now = None
        if now is not None and now.member not in self._known_as:
            self._known_as.append(now.member)
        if now != self.identity:
            self.identity = now
            self._renamed(now)

    def commit(self, offsets: Mapping[TopicPartition, int], notes: Mapping[TopicPartition, str]) -> None:
        """Commit as this member, any partition of the group, with a note beside each offset.

        Raises:
            MemberStale: it is not in the group as it was; nothing was committed.
            AccessDenied: the user may not commit.
            CommitFailed: nothing or not everything was committed.
        """
        entries = [to_kafka(tp, offset, notes[tp]) for tp, offset in offsets.items()]
        try:
            for done in self._consumer.commit(offsets=entries, asynchronous=False):
                if done.error is not None:
                    raise KafkaException(done.error)
        except KafkaException as exc:
            error = exc.args[0]
            refused = meaning(Request.COMMIT, error.code(), error.str()) is Meaning.REFUSED
            if refused and not self._asker.may_be_late(error):
                op = "committing offsets as a member"
                raise translate(error, request=Request.COMMIT, op=op, asker=self._asker) from exc
            failure = CommitFailed(f"committing offsets as a member failed: {error.str()}", code=error.code())
            raise stale(error, request=Request.COMMIT) or failure from exc

    def close(self, *, leave: bool) -> None:
        """Close the consumer. ``leave``: out of the group for good; else a static member keeps its place until its
        session ends (classic: nothing is sent; KIP-848: epoch -2)."""
        with contextlib.suppress(KafkaException, RuntimeError):
            self.identify()  # the library may have joined again: that member is known to be this run's
        # SystemError is the binding's own, when a callback's refusal was still to be told: it is closed all the same.
        with contextlib.suppress(KafkaException, RuntimeError, SystemError):
            if leave:
                # A close() right behind it would suppress a static member's leave: let the revocation be served first.
                self._consumer.unsubscribe()
                deadline_ms = self._environment.now_ms() + LEAVE_S_MAX * 1000
                self._consumer.poll(LEAVE_POLL_S)
                while self._is_member() and self._environment.now_ms() < deadline_ms:
                    self._consumer.poll(LEAVE_POLL_S)
            self._consumer.close()

    def _is_member(self) -> bool:
        # KIP-848 member ids are made by the client and never go away; what it was assigned does.
        return bool(self._consumer.assignment() or (not self._consumer_protocol and self._consumer.memberid()))

    @property
    def generation(self) -> int:
        """The group generation, or the member epoch of KIP-848; -1 while not a member."""
        return -1 if self.identity is None else self.identity.generation

    def _fatal(self, error: KafkaError) -> GroupError:
        text = error.str()
        # The code is only "fatal"; which one it was stands in the text alone.
        if "still used by another member" in text:
            return GroupError(f"the place is still taken: {text}", unreleased=True)
        if self._consumer_protocol and "group id does not exist" in text:
            return GroupError(
                "the broker cannot turn this classic group into one of kafka.group.protocol=consumer while it has "
                "members whose assignor keeps data of its own, such as cooperative-sticky. Let them leave, or change "
                f"them to range or roundrobin, or use kafka.group.protocol=classic here ({text})"
            )
        if "fenced" in text.lower():
            return Fenced(f"the member was fenced: {text}")
        return GroupError(f"the member failed: {text}")

    def _assigned(self, consumer: Any, partitions: list[Any]) -> None:
        self.identify()
        if self.identity is None and self._holder and consumer.assignment():
            # Thrown out while it gave something back: it would join again with the rest, which may be another's by now.
            self._failure = GroupError("thrown out of the group in a rebalance, with partitions in hand")
        if self._failure is not None:
            return
        self._suspicions.clear(Meaning.REFUSED)
        if self.identity is not None:  # without one it was thrown out in a hold: who it was is what tells that later
            self._holder = self.identity.member
        # An explicit offset spares a lookup of the committed one; it is never used, since nothing is fetched.
        paused = [to_kafka(tp, 0) for tp in to_ours(partitions)]
        (consumer.incremental_assign if self.incremental else consumer.assign)(paused)
        if paused:
            consumer.pause(paused)
        self._on_assigned(to_ours(partitions), self.generation)

    def _revoked(self, consumer: Any, partitions: list[Any]) -> None:
        self.identify()
        if self._failure is None:
            self._stay_out(consumer, self._on_revoked(to_ours(partitions)))
        if self.incremental:
            consumer.incremental_unassign(partitions)
        else:
            consumer.unassign()

    def _lost(self, consumer: Any, partitions: list[Any]) -> None:
        self._holder = ""
        self._stay_out(consumer, self._on_lost(to_ours(partitions)))

    def _stay_out(self, consumer: Any, why: GroupError | None) -> None:
        """Before the library gives up the partitions, which is when it joins again."""
        if why is not None:
            self._failure = why
            with contextlib.suppress(KafkaException):  # the library may have heard itself that it is fenced
                consumer.unsubscribe()


def take_place(
    settings: Mapping[str, str],
    topics: Sequence[str],
    *,
    environment: Environment,
    known_as: deque[str],
    over: Callable[[], bool],
) -> None:
    """Take a place of the group from a KIP-848 member that vanished, for the next member of that protocol.

    The broker keeps the place of a static KIP-848 member until its session ends; then it divides the partitions anew,
    and again when the next member comes. But to a static member of the classic protocol it gives the place at once,
    with all that the place has, and from such a one it is given to any. So a classic consumer joins in between, for a
    moment. Nothing of the group changes by that. A member that had the place and lives is fenced, and refused when it
    joins again. Whether the place was taken shows when the next KIP-848 member is given it.

    Args:
        settings: of the member that is to have the place, with group.instance.id.
        topics: its subscription; it has to be that of the place, or the group divides anew.
        over: whether nobody wants the place any more.

    Raises:
        GroupError: it did not get the place.
    """
    given: list[int] = []
    classic = {name: text for name, text in settings.items() if name not in _CONSUMER_PROTOCOL_ONLY}
    consumer = MemberConsumer(
        classic | {"group.protocol": "classic"},
        environment=environment,
        known_as=known_as,
        on_assigned=lambda _, generation: given.append(generation),
        on_revoked=lambda _: None,
        on_lost=lambda _: None,
    )
    try:
        consumer.subscribe(topics)
        until_ms = environment.now_ms() + TAKE_MS_MAX
        while not given and not over() and environment.now_ms() < until_ms:
            consumer.poll(TAKE_POLL_S)
    finally:
        consumer.close(leave=False)
    if not given:
        raise GroupError(f"the place was not taken from the member that vanished within {TAKE_MS_MAX} ms")
    log.info("took the place %s from a member that vanished", settings.get("group.instance.id"))


def is_incremental(settings: Mapping[str, str]) -> bool:
    """Whether this member keeps what it has through a rebalance (cooperative-sticky, KIP-848) or gives all back."""
    return settings.get("group.protocol") == "consumer" or "cooperative" in settings.get(
        "partition.assignment.strategy", ""
    )


def _identity(metadata: Any) -> Identity | None:
    """librdkafka's serialised group metadata: ``CGMDv2:``, a native int32 generation, then three texts that end with 0:
    group, member id, instance id. None while not a member."""
    raw = bytes(metadata or b"")
    if not raw.startswith(b"CGMDv2:"):
        return None
    generation = int(struct.unpack_from("=i", raw, 7)[0])
    member = raw[11:].split(b"\0")[1].decode()
    return Identity(generation, member, metadata) if generation > 0 and member else None
