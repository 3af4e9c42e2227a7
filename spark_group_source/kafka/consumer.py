"""The Kafka consumer of a member: it keeps a membership and reads nothing.

Runs in: the thread of a slot (``members``). Deliberately absent: fetching records, and decisions about
rebalances.
"""

import contextlib
import logging
import shlex
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from spark_group_source import command_line
from spark_group_source.error_codes import Meaning, Request, Suspicions, meaning
from spark_group_source.errors import CommitFailed, Fenced, GroupError, OptionError
from spark_group_source.kafka.environment import Environment
from spark_group_source.kafka.retry import CONFIRM_S
from spark_group_source.kafka.translation import (
    ClientInfo,
    CommitSizes,
    Notes,
    from_kafka,
    stale_member,
    translate,
)
from spark_group_source.model import Identity, TopicPartition
from spark_group_source.options.client import SESSION_TIMEOUT_MS, is_incremental

log = logging.getLogger(__name__)

LEAVE_S_MAX = 3.0
"""The longest wait for leaving the group; after it the membership ends with its session."""
LEAVE_POLL_S = 0.05
"""The longest poll of a consumer that leaves."""
TAKE_OVER_MS_MAX = 10_000
"""The longest :func:`take_over_membership`; after it the membership is free when its session expires."""
TAKE_OVER_POLL_S = 0.1
"""The longest poll of a consumer that takes over a membership."""
REFUSAL_MS_MAX = 60_000
"""A refusal of the group or the login counts when it is repeated within this time: the library reports the same error
of a connection once in 30 s."""
TOPIC_S_MAX = 2.0
"""The timeout of the request that confirms the refusal of a topic. The member polls again after it."""
_CONSUMER_PROTOCOL_ONLY = ("group.remote.assignor", "max.poll.interval.ms")
"""Settings of a KIP-848 member that a consumer of the classic protocol may refuse: its poll interval must not be below
the session timeout, which the other one leaves to the broker."""
_REFUSALS = {
    "Group authorization failed": KafkaError.GROUP_AUTHORIZATION_FAILED,
    "Topic authorization failed": KafkaError.TOPIC_AUTHORIZATION_FAILED,
}
"""The codes in the text of a fatal error, whose own code is only "fatal"."""
REFUSED_CODES = frozenset(
    {
        KafkaError.INCONSISTENT_GROUP_PROTOCOL,
        KafkaError.INVALID_GROUP_ID,
    }
)
"""Errors of a join that persist until an operator or another member of the group changes something."""


class GroupFull(GroupError):
    """The group has as many members as the brokers allow."""


class RefusedOnce(GroupError):
    """The broker refused a member of the new protocol, which ends its consumer. A starting broker, or one with a new
    permission, refuses for a moment: it counts when the next consumer is refused as well.

    Args:
        denied: the error if it is.
    """

    def __init__(self, denied: GroupError) -> None:
        super().__init__(str(denied))
        self.denied = denied


class MemberConsumer:
    """The consumer of one slot: membership only. Nothing is fetched, so the library is never given the partitions:
    it would keep a queue and timers for each, and pausing them takes a time that grows with the square of their number
    (12,000 partitions: 28 s, in which the session can expire).

    All calls are made on one thread; the callbacks run on it, inside :meth:`poll`.

    Args:
        settings: librdkafka settings with group.id and, for a static member, group.instance.id.
        own_member_ids: receives each member id that the group assigns to it.
        on_assigned: called with the added partitions and the generation.
        on_revoked: called with the revoked partitions. The revocation takes effect when it returns.
        on_lost: called with the lost partitions, possibly none.
        on_identity: called with the identity whenever it changes.

    ``on_revoked`` and ``on_lost`` return an error if the consumer must not rejoin because another process may have its
    membership, else None.
    """

    def __init__(
        self,
        settings: Mapping[str, str],
        *,
        environment: Environment,
        own_member_ids: deque[str],
        on_assigned: Callable[[tuple[TopicPartition, ...], int], None],
        on_revoked: Callable[[tuple[TopicPartition, ...]], GroupError | None],
        on_lost: Callable[[tuple[TopicPartition, ...]], GroupError | None],
        on_identity: Callable[[Identity | None], None] = lambda _: None,
    ) -> None:
        self._environment = environment
        self._client_info = ClientInfo.of(settings)
        self._connection = command_line.connection(settings)
        self.incremental = is_incremental(settings)
        self.is_kip_848 = settings.get("group.protocol") == "consumer"
        self._on_assigned, self._on_revoked, self._on_lost = on_assigned, on_revoked, on_lost
        self._on_identity = on_identity
        self._failure: GroupError | None = None
        # A starting broker refuses requests for a moment, and closing a member for that would move its partitions.
        self._suspicions = Suspicions(CONFIRM_S * 1000, expires=REFUSAL_MS_MAX)  # by error code: the group is refused
        self._refused_topics: dict[str, int] = {}  # when each is confirmed
        self.identity: Identity | None = None
        self._own_member_ids = own_member_ids
        self._sizes = CommitSizes(settings.get("group.id", ""))
        self._partitions: frozenset[TopicPartition] = frozenset()  # those that the group has assigned
        self._owner_id = ""  # the member id that they were assigned to
        self._session_timeout_ms = settings.get("session.timeout.ms", str(SESSION_TIMEOUT_MS))
        self._remote_assignor = settings.get("group.remote.assignor", "")
        self._consumer: Any = environment.consumer(settings)

    def subscribe(self, topics: Sequence[str]) -> None:
        """Subscribe to these topics only; without topics leave the group, since librdkafka refuses an empty list.

        A consumer that has failed for good refuses any subscription; the next :meth:`poll` raises the reason, such as
        that it was fenced.
        """
        self._refused_topics = {topic: at_ms for topic, at_ms in self._refused_topics.items() if topic in topics}
        try:
            if topics:
                rebalances = {"on_assign": self._assigned, "on_revoke": self._revoked, "on_lost": self._lost}
                self._consumer.subscribe(list(topics), **rebalances)
            else:
                self._consumer.unsubscribe()
        except KafkaException as exc:
            if exc.args[0].code() != KafkaError._FATAL:
                raise

    def poll(self, timeout_s: float) -> None:
        """Serve the group protocol.

        Raises:
            Fenced: another client took the instance id, or still has it (KIP-848); or a callback returned
                Fenced.
            OptionError: the session timeout is outside the brokers' bounds.
            GroupError: the consumer has failed; it must be replaced.
        """
        try:
            message = self._consumer.poll(timeout_s)
        except KafkaException as exc:  # raised in a callback: assign or unassign failed
            raise self._failure or self._fatal(exc.args[0]) from exc
        self.identify()
        if self._failure is not None:
            raise self._failure
        self._confirm_refused_topics()
        if message is None or (error := message.error()) is None:
            return
        if error.code() == KafkaError._FATAL or error.fatal():
            raise self._fatal(error)
        if meaning(Request.JOIN, error.code(), error.str()) is Meaning.REFUSED:
            self._refused(error, message.topic() or "")
        if error.code() == KafkaError.INVALID_SESSION_TIMEOUT:
            raise OptionError(
                f"kafka.session.timeout.ms is {self._session_timeout_ms}, which the brokers refuse: it must lie "
                "between their group.min.session.timeout.ms and group.max.session.timeout.ms (6000 and 1800000 "
                f"unless set). To see them: {command_line.in_sentence(self._brokers_settings())}"
            )
        if error.code() in REFUSED_CODES:  # the library would retry forever without reporting it
            raise GroupError(f"the broker refuses the join: {error.str()}")
        if error.code() == KafkaError.GROUP_MAX_SIZE_REACHED:
            raise self._full(error)
        log.info("group %s: member error, the library retries: %s", self._client_info.group, error.str())

    def _refused(self, error: KafkaError, topic: str) -> None:
        """Record a refusal. Raises AccessDenied if that of the group is repeated."""
        now_ms = self._environment.now_ms()
        if topic:  # the library reports a lasting one once, and those of all topics from one response
            self._refused_topics.setdefault(topic, now_ms + int(CONFIRM_S * 1000))
        elif not self._client_info.token_may_have_expired(error) and self._suspicions.report(error.code(), now_ms):
            raise self._denied(error)

    def _confirm_refused_topics(self) -> None:
        """Request the metadata of a topic that was refused a moment ago. Raises AccessDenied if it is refused again."""
        now_ms = self._environment.now_ms()
        topic = next((topic for topic, at_ms in self._refused_topics.items() if now_ms >= at_ms), None)
        if topic is None:
            return
        try:
            error = self._consumer.list_topics(topic, timeout=TOPIC_S_MAX).topics[topic].error
        except KafkaException as exc:
            log.info("group %s: topic %r was refused; confirming it: %s", self._client_info.group, topic, exc)
            self._refused_topics[topic] = now_ms + int((TOPIC_S_MAX + CONFIRM_S) * 1000)
            return
        del self._refused_topics[topic]
        if error is not None and meaning(Request.JOIN, error.code(), error.str()) is Meaning.REFUSED:
            raise self._denied(error, topic)

    def _denied(self, error: KafkaError, topic: str = "") -> GroupError:
        op = "joining the group"
        return translate(error, request=Request.JOIN, op=op, client_info=self._client_info, name=topic)

    def _full(self, error: KafkaError) -> GroupFull:
        limit = "group.consumer.max.size" if self.is_kip_848 else "group.max.size"
        return GroupFull(
            f"the group has as many members as the brokers' {limit} allows: raise it, or set a smaller groupMembers "
            f"({error.str()})"
        )

    def _brokers_settings(self) -> str:
        """The command of Kafka that shows the settings of the brokers."""
        _, servers, *config = self._connection
        config = ["--command-config", command_line.KAFKA_CONFIG_FILE] if config else []
        words = ("--bootstrap-server", servers, *config, "--describe", "--all", "--entity-type", "brokers")
        return shlex.join(("kafka-configs.sh", *words))

    def identify(self) -> None:
        """Update :attr:`identity` from the library.

        A consumer that holds a revocation gets no callback when its session expires. It can rejoin as another member
        and keep partitions that another consumer had meanwhile: then this consumer fails, and a new one joins for the
        slot.
        """
        now = _identity(self._consumer.consumer_group_metadata())
        if now is not None and self._owner_id not in ("", now.member) and self._partitions:
            self._failure = GroupError("the member was expelled in a rebalance and rejoined under another member id")
            now = None
        if now is not None and now.member not in self._own_member_ids:
            self._own_member_ids.append(now.member)
        if now != self.identity:
            self.identity = now
            self._on_identity(now)

    def commit(self, offsets: Mapping[TopicPartition, int], notes: Notes) -> None:
        """Commit offsets of any partitions of the group as this member.

        Args:
            offsets: the next offset of each partition.
            notes: what is committed beside each offset.

        Raises:
            MemberStale: the membership has changed; nothing was committed.
            AccessDenied: the user may not commit.
            CommitFailed: nothing, or not everything, was committed.
        """
        sent = list[Any]()
        try:
            for sent in self._sizes.split(offsets, notes):
                for done in self._consumer.commit(offsets=sent, asynchronous=False):
                    if done.error is not None:
                        raise KafkaException(done.error)
            self._sizes.accepted()
        except KafkaException as exc:
            error = exc.args[0]
            if self._sizes.shrink(error.code(), sent):
                self.commit(offsets, notes)
                return
            refused = meaning(Request.COMMIT, error.code(), error.str()) is Meaning.REFUSED
            if refused and not self._client_info.token_may_have_expired(error):
                op = "committing offsets as a member"
                raise translate(error, request=Request.COMMIT, op=op, client_info=self._client_info) from exc
            failure = CommitFailed(f"committing offsets as a member failed: {error.str()}", code=error.code())
            raise stale_member(error, request=Request.COMMIT) or failure from exc

    def close(self, *, leave: bool) -> None:
        """Close the consumer.

        Args:
            leave: leave the group for good. Else a static member keeps its membership until its session expires
                (classic: nothing is sent; KIP-848: the member leaves with epoch -2).
        """
        with contextlib.suppress(KafkaException, RuntimeError):
            self.identify()  # the library may have rejoined: record its member id as this run's
        # The binding raises SystemError when a callback's error was still pending; the consumer is closed all the same.
        with contextlib.suppress(KafkaException, RuntimeError, SystemError):
            if leave:
                # A close() right after it would suppress a static member's leave: serve the revocation first.
                self._consumer.unsubscribe()
                deadline_ms = self._environment.now_ms() + LEAVE_S_MAX * 1000
                self._consumer.poll(LEAVE_POLL_S)
                while self._is_member() and self._environment.now_ms() < deadline_ms:
                    self._consumer.poll(LEAVE_POLL_S)
        with contextlib.suppress(KafkaException, RuntimeError, SystemError):
            self._consumer.close()  # also after a leave that failed: its threads and connections would stay

    def _is_member(self) -> bool:
        # A KIP-848 member id is generated by the client and never cleared; the assignment is.
        return bool(self._partitions or (not self.is_kip_848 and self._consumer.memberid()))

    @property
    def generation(self) -> int:
        """The group generation (classic) or member epoch (KIP-848); -1 while not a member."""
        return -1 if self.identity is None else self.identity.generation

    def _fatal(self, error: KafkaError) -> GroupError | OptionError:
        text = error.str()
        # The error code is only "fatal"; the cause is in the text alone.
        if "still used by another member" in text:
            return GroupError(f"another member still has the instance id: {text}", unreleased=True)
        if self.is_kip_848 and "group id does not exist" in text:
            return GroupError(
                "the broker cannot convert this classic group to kafka.group.protocol=consumer while it has members "
                "whose assignor keeps data of its own, such as cooperative-sticky. Stop these members, change them to "
                f"range or roundrobin, or set kafka.group.protocol=classic here ({text})"
            )
        if "fenced" in text.lower():
            return Fenced(f"the member was fenced: {text}")
        if "reached maximum size" in text:
            return self._full(error)
        if "assignor or its version range is not supported" in text:
            return OptionError(
                f"kafka.group.remote.assignor is {self._remote_assignor!r}, which the brokers do not have: choose one "
                f"of their group.consumer.assignors (uniform and range unless set), or leave the option out ({text})"
            )
        refused = next((code for words, code in _REFUSALS.items() if words in text), None)
        if refused is not None:
            return RefusedOnce(self._denied(KafkaError(refused, text)))
        return GroupError(f"the consumer failed: {text}")

    def _assigned(self, consumer: Any, partitions: list[Any]) -> None:
        self.identify()
        (consumer.incremental_assign if self.incremental else consumer.assign)([])
        if self.identity is None and self._owner_id and self._partitions:
            # Expelled during a revocation: it would rejoin with the remaining partitions, which may be reassigned by
            # now.
            self._failure = GroupError("the member was expelled in a rebalance while it had partitions")
        if self._failure is not None:
            return
        self._suspicions.keep(())
        if self.identity is not None:  # None: expelled in a hold; identify() detects that by the former id
            self._owner_id = self.identity.member
        added = from_kafka(partitions)
        self._partitions = (self._partitions if self.incremental else frozenset()).union(added)
        self._on_assigned(added, self.generation)

    def _revoked(self, consumer: Any, partitions: list[Any]) -> None:
        self.identify()
        revoked = from_kafka(partitions)
        if self._failure is None:
            self._prevent_rejoin(consumer, self._on_revoked(revoked))
        self._unassign(consumer, revoked)

    def _lost(self, consumer: Any, partitions: list[Any]) -> None:
        self._owner_id = ""
        lost = from_kafka(partitions)
        self._prevent_rejoin(consumer, self._on_lost(lost))
        self._unassign(consumer, lost)

    def _unassign(self, consumer: Any, partitions: Sequence[TopicPartition]) -> None:
        """Let the library go on with the rebalance."""
        self._partitions = self._partitions.difference(partitions) if self.incremental else frozenset()
        if self.incremental:
            consumer.incremental_unassign([])
        else:
            consumer.unassign()

    def _prevent_rejoin(self, consumer: Any, error: GroupError | None) -> None:
        """Unsubscribe if there is an error, before the library gives up the partitions and rejoins."""
        if error is not None:
            self._failure = error
            with contextlib.suppress(KafkaException):  # the library may know already that it is fenced
                consumer.unsubscribe()


def take_over_membership(
    settings: Mapping[str, str],
    topics: Sequence[str],
    *,
    environment: Environment,
    own_member_ids: deque[str],
    is_cancelled: Callable[[], bool],
) -> None:
    """Take over the membership of a KIP-848 member that vanished, so that the next KIP-848 member can join with it.

    The broker keeps the membership of a static KIP-848 member until its session expires; then it reassigns the
    partitions, and again when the next member joins. A static member of the classic protocol, however, takes over the
    membership at once, with its partitions, and any member takes it over from that one. So a classic consumer joins for
    a moment in between. The assignment does not change. If the former member is still alive, it is fenced, and refused
    when it rejoins. Whether the take-over succeeded shows when the next KIP-848 member joins.

    Args:
        settings: those of the next member, with group.instance.id.
        topics: the subscription. It must equal that of the membership, or the group rebalances.
        is_cancelled: whether the membership is not wanted any more.

    Raises:
        GroupError: the membership was not taken over.
    """
    generations: list[int] = []
    classic = {name: text for name, text in settings.items() if name not in _CONSUMER_PROTOCOL_ONLY}
    consumer = MemberConsumer(
        classic | {"group.protocol": "classic"},
        environment=environment,
        own_member_ids=own_member_ids,
        on_assigned=lambda _, generation: generations.append(generation),
        on_revoked=lambda _: None,
        on_lost=lambda _: None,
    )
    try:
        consumer.subscribe(topics)
        until_ms = environment.now_ms() + TAKE_OVER_MS_MAX
        while not generations and not is_cancelled() and environment.now_ms() < until_ms:
            consumer.poll(TAKE_OVER_POLL_S)
    finally:
        consumer.close(leave=False)
    if not generations:
        raise GroupError(f"the membership of a vanished member was not taken over within {TAKE_OVER_MS_MAX} ms")
    log.info(
        "group %s: took over the membership %s of a vanished member",
        settings.get("group.id"),
        settings.get("group.instance.id"),
    )


def _identity(metadata: Any) -> Identity | None:
    """Parse librdkafka's serialised group metadata; None while not a member.

    Its format: ``CGMDv2:``, a native int32 generation, then group, member id and instance id, each ending with a 0
    byte.
    """
    raw = bytes(metadata or b"")
    if not raw.startswith(b"CGMDv2:"):
        return None
    generation = int(struct.unpack_from("=i", raw, 7)[0])
    member = raw[11:].split(b"\0")[1].decode()
    return Identity(generation, member, raw) if generation > 0 and member else None
