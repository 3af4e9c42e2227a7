"""The member of a slot: its interface, wherever its consumer runs, and the thread that owns a consumer.

Runs in: the stream reader, agents. Deliberately absent: decisions. The thread of a :class:`Member` makes every call to
its consumer. It reports rebalances, holds a revocation until it receives the release, and executes commands. No other
thread touches the consumer: a synchronous commit on one thread never returns while another thread polls.
"""

import logging
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, Queue
from typing import Any

from spark_group_source.errors import AccessDenied, Fenced, GroupError, InvariantBroken, OptionError, SourceError
from spark_group_source.kafka.consumer import GroupFull, MemberConsumer, RefusedOnce, take_over_membership
from spark_group_source.kafka.environment import Environment, Thread
from spark_group_source.kafka.retry import CONFIRM_S
from spark_group_source.kafka.translation import MemberStale, Notes
from spark_group_source.model import Identity, TopicPartition
from spark_group_source.options.client import SESSION_TIMEOUT_MS, setting_ms
from spark_group_source.protocol import events as ev

log = logging.getLogger(__name__)

POLL_S = 0.1
"""The longest poll, and so the longest delay of a command."""
HOLD_CHECK_S = 0.25
"""While a revocation is held: the interval at which the thread checks that the member is still in the group."""
COMMANDS_MAX = 100
"""Queued commands. The protocol sends a slot one command at a time; more than this is a bug."""
EMPTY_AFTER_MS = 2_000
"""Time after which a KIP-848 member without a callback has no partition. Its epoch comes with the same response as its
partitions; their names, which the response does not have, take another request."""
STALL_SHARE = 0.5
"""A thread that did not run for longer than this fraction of the session timeout was stalled: its membership may belong
to another process."""


class SlotMember(ABC):
    """The member of one slot, in the stream reader or on an agent.

    Args:
        join: the slot, the number of its consumer, its names in the group, and the agent it is placed on.
    """

    def __init__(self, join: ev.Join) -> None:
        self._join = join
        self.slot, self.client = join.slot, join.client
        self.agent = join.agent
        """The agent that runs the consumer; empty: the stream reader itself."""
        self.static = join.instance_id is not None
        """Whether it has an instance id: a static membership belongs to one process at a time (KIP-345)."""
        self.partitions: tuple[TopicPartition, ...] = ()
        """Its assigned partitions, until their revocation is released or they are lost."""

    @property
    @abstractmethod
    def identity(self) -> Identity | None:
        """Its identity in the group now; None while it is not a member."""

    @abstractmethod
    def start(self) -> None:
        """Start the consumer, once. Does not wait until it is in the group."""

    @abstractmethod
    def submit(self, command: ev.Release | ev.Subscribe | ev.Leave) -> None:
        """Queue a command; never blocks."""

    @abstractmethod
    def wait_ended(self, timeout_s: float) -> bool:
        """Wait until the member has ended; return False after the timeout."""

    def _remove_partitions(self, partitions: tuple[TopicPartition, ...]) -> None:
        removed = set(partitions)
        self.partitions = tuple(tp for tp in self.partitions if tp not in removed)


@dataclass(slots=True)
class MemberCommit:
    """The offsets to commit as one member."""

    member: SlotMember
    identity: Identity | None
    """The member's identity when the commit was ordered; None: it was not in the group."""
    offsets: Mapping[TopicPartition, int]
    """The next offset of each partition."""
    is_withdrawn: bool = False
    """Whether the caller does not wait any more. Executed later, it could replace a newer commit."""

    @property
    def stale_reason(self) -> str | None:
        """Why these offsets may not be committed any more; None: they may. Any thread.

        A partition that was released without a commit may belong to another member by now, and brokers do not check who
        owns a committed partition: a KIP-848 member that must revoke more partitions at once keeps its epoch.
        """
        if self.is_withdrawn:
            return "the commit was withdrawn"
        if self.identity is None:
            return "the member is not in the group at the moment"
        if self.identity != self.member.identity:
            return "the member has rejoined since"
        if not self.offsets.keys() <= set(self.member.partitions):
            return "the member has released partitions since"
        return None


# --- the thread -----------------------------------------------------------------------------------------------------


class _MembershipUncertain(Fenced):
    """The membership may belong to another process by now; the broker did not report that it does."""


@dataclass(frozen=True, slots=True)
class _Commit:
    part: MemberCommit
    notes: Notes
    """What is committed beside each offset."""
    done: "Future[None]"


_Command = ev.Release | ev.Subscribe | ev.Leave | _Commit


class Member(SlotMember):
    """The member of one slot, from :meth:`start` until its thread ends.

    Args:
        join: the slot, the number of its consumer, its names in the group, and the first subscription.
        settings: librdkafka settings with group.id; the names from ``join`` are added here.
        environment: threads, clock and Kafka clients.
        own_member_ids: receives each member id that the group assigns to it.
        report: receives each event; never raises. If the thread cannot be started, the failure and the end are reported
            inside :meth:`start`.
        before_join: blocks until the member may join. Called on the member's thread.
        on_identity: receives the member's identity whenever it changes. Called on the member's thread.
    """

    def __init__(
        self,
        join: ev.Join,
        settings: Mapping[str, str],
        *,
        environment: Environment,
        own_member_ids: deque[str],
        report: Callable[[ev.Event], None],
        before_join: Callable[[], None] = lambda: None,
        on_identity: Callable[[Identity | None], None] = lambda _: None,
    ) -> None:
        super().__init__(join)
        self._settings = dict(settings) | ({"client.id": join.client_id} if join.client_id else {})
        if join.instance_id is not None:
            self._settings["group.instance.id"] = join.instance_id
        self._environment = environment
        self._own_member_ids = own_member_ids
        self._report = report
        self._before_join, self._on_identity = before_join, on_identity
        self._commands: Queue[_Command] = environment.queue(COMMANDS_MAX)
        self._leaving: ev.Leave | None = None  # the first Leave command; the thread ends soon after
        self._consumer: MemberConsumer | None = None
        self._topics = join.topics
        self._assigned = False  # whether an assignment was reported since the last time all partitions were revoked
        self._stall_ms_max = STALL_SHARE * setting_ms(self._settings, "session.timeout.ms", SESSION_TIMEOUT_MS)
        self._last_ran_ms = 0  # when the thread last ran, by the clock that counts while the machine is suspended
        self._was_assigned = False  # whether an assignment was ever reported
        self._last_identity: Identity | None = None
        self._identified_ms = 0  # since when the identity is this one
        self._has_run = False
        self._thread: Thread | None = None

    def start(self) -> None:
        name = f"slot-{self.slot}.{self.client}"
        self._thread = self._environment.spawn(name, self._run, died=self._died)

    def submit(self, command: ev.Release | ev.Subscribe | ev.Leave) -> None:
        """Queue a command. It is executed within :data:`POLL_S`, or at once while a revocation is held."""
        self._commands.put_nowait(command)

    @property
    def identity(self) -> Identity | None:
        """Its identity in the group, as of its last poll; None while it is not a member."""
        return None if self._consumer is None else self._consumer.identity

    def commit(self, part: MemberCommit, notes: Notes) -> "Future[None]":
        """Commit offsets as this member, where transactions are denied.

        Returns:
            A future that fails with MemberStale when the member has changed since the commit was ordered, or with
            CommitFailed.
        """
        done: Future[None] = self._environment.future()
        self._commands.put_nowait(_Commit(part, notes, done))
        return done

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait until the thread has ended; return False after the timeout."""
        if self._thread is None:
            return True
        # With 0 it may be the thread itself, which reports its end. A thread that could not be started raises in join.
        if timeout_s > 0 and self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._has_run = True
        try:
            self._before_join()
            self._serve_or_take_over()
        except _MembershipUncertain as exc:
            self._report(ev.MemberFenced(**self._ids(), reason=str(exc), confirmed=False))
        except Fenced as exc:
            self._report(ev.MemberFenced(**self._ids(), reason=str(exc)))
        except (OptionError, AccessDenied) as exc:  # rejoining cannot help; a refusal was confirmed
            self._report(ev.InternalFailure(error=exc))
        except SourceError as exc:
            self._report(ev.MemberFailed(**self._ids(), reason=str(exc), group_full=isinstance(exc, GroupFull)))
        except:  # noqa: E722 - a callback error that the library passes on may not be a BaseException
            group = self._settings["group.id"]
            log.exception("group %s: unexpected error in the thread of slot %d; the slot rejoins", group, self.slot)
            self._report(ev.MemberFailed(**self._ids(), reason=repr(sys.exc_info()[1])))
        finally:
            try:
                self._close()
            finally:
                self._report(ev.MemberEnded(**self._ids()))

    def _serve_or_take_over(self) -> None:
        try:
            self._serve_confirmed()
        except GroupError as exc:
            if not (self._join.takes_over and exc.fields.get("unreleased")):
                raise
            assert self._consumer is not None
            self._consumer.close(leave=False)
            take_over_membership(
                self._settings,
                self._topics,
                environment=self._environment,
                own_member_ids=self._own_member_ids,
                is_cancelled=self._is_leaving,
            )
            self._serve_confirmed()

    def _serve_confirmed(self) -> None:
        """Serve the membership; a refusal that ends the consumer counts when the next consumer is refused as well."""
        try:
            self._serve()
        except RefusedOnce:
            if self._was_assigned or self._leaving is not None:
                raise  # the next member of the slot joins, and reports it if it is refused
            assert self._consumer is not None
            self._consumer.close(leave=False)
            self._environment.pause(CONFIRM_S)
            if self._is_leaving():
                raise
            try:
                self._serve()
            except RefusedOnce as exc:
                if self._was_assigned or self._leaving is not None:
                    raise
                raise exc.denied from None

    def _is_leaving(self) -> bool:
        self._execute_all()
        return self._leaving is not None

    def _died(self, exc: BaseException) -> None:
        self._report(ev.InternalFailure(error=InvariantBroken(f"the thread of slot {self.slot} died: {exc!r}")))
        if not self._has_run:  # otherwise the thread has reported its end
            self._report(ev.MemberEnded(**self._ids()))

    def _serve(self) -> None:
        self._consumer = consumer = MemberConsumer(
            self._settings,
            environment=self._environment,
            own_member_ids=self._own_member_ids,
            on_assigned=self._on_assigned,
            on_revoked=self._on_revoked,
            on_lost=self._on_lost,
            on_identity=self._on_identity,
        )
        subscribed: tuple[str, ...] = ()
        self._last_ran_ms = self._environment.boot_ms()
        while self._leaving is None:
            if (error := self._check_stall()) is not None:
                raise error
            if subscribed != self._topics:  # not where the command is executed, which may be inside a callback
                consumer.subscribe(self._topics)
                subscribed = self._topics
            consumer.poll(POLL_S)
            self._execute_all()
            # No callback: for an empty assignment (KIP-848), or because no topic matches the subscription yet.
            if not self._assigned and (not self._topics or self._has_empty_assignment(consumer)):
                self._on_assigned((), consumer.generation)

    def _has_empty_assignment(self, consumer: MemberConsumer) -> bool:
        """Whether the broker has assigned no partition to a KIP-848 member: nothing was reported for a while since its
        epoch changed."""
        if consumer.identity != self._last_identity:
            self._last_identity, self._identified_ms = consumer.identity, self._environment.now_ms()
        waited_ms = self._environment.now_ms() - self._identified_ms
        return consumer.is_kip_848 and consumer.identity is not None and waited_ms >= EMPTY_AFTER_MS

    def _execute_all(self) -> None:
        while True:
            try:
                self._execute(self._commands.get_nowait())
            except Empty:
                return

    def _execute(self, command: _Command) -> None:
        match command:
            case ev.Leave():
                self._leaving = self._leaving or command
            case ev.Subscribe():
                self._topics = command.topics
            case _Commit():
                self._commit(command)
            case ev.Release():
                pass  # its hold has already ended

    def _commit(self, command: _Commit) -> None:
        assert self._consumer is not None
        try:
            self._consumer.identify()
            if (reason := command.part.stale_reason) is not None:
                raise MemberStale(f"slot {self.slot}: {reason}")
            self._consumer.commit(command.part.offsets, command.notes)
        except GroupError as exc:
            command.done.set_exception(exc)
        else:
            # The broker has accepted this member, however late it answered.
            self._last_ran_ms = self._environment.boot_ms()
            command.done.set_result(None)

    def _close(self) -> None:
        leave = self._leaving is not None and self._leaving.leave
        self._leaving = self._leaving or ev.Leave(slot=self.slot, leave=False)
        try:
            if self._consumer is not None:
                self._consumer.close(leave=leave)
        finally:
            while not self._commands.empty():
                command = self._commands.get_nowait()
                if isinstance(command, _Commit):
                    command.done.set_exception(GroupError("the member has ended"))

    # --- rebalance callbacks, on the thread, inside poll ------------------------------------------------------------

    def _on_assigned(self, partitions: tuple[TopicPartition, ...], generation: int) -> None:
        self._assigned = self._was_assigned = True
        if self._consumer is not None and not self._consumer.incremental:
            # After rebalances that the library completed while this thread was busy, only the last assignment is
            # reported. The former partitions may have belonged to another member since, or belong to one now.
            if self.partitions:
                self._report(ev.Lost(**self._ids(), partitions=self.partitions))
            self.partitions = ()
        self.partitions += partitions
        self._report(ev.Assigned(**self._ids(), partitions=partitions, generation=generation))

    def _on_revoked(self, partitions: tuple[TopicPartition, ...]) -> GroupError | None:
        """Hold the revocation: it takes effect when this returns. Heartbeats continue in a thread of the library."""
        if self._leaving is not None:
            return None
        eager = self._consumer is not None and not self._consumer.incremental
        self._assigned = not eager
        self._report(ev.Revoking(**self._ids(), partitions=partitions, eager=eager))
        error = self._hold_revocation()
        self._remove_partitions(partitions)
        return error

    def _hold_revocation(self) -> GroupError | None:
        """Wait for the release, which the protocol bounds. Returns an error if the member must not continue."""
        while self._leaving is None:
            if (error := self._check_stall()) is not None:
                return error
            try:
                command = self._commands.get(timeout=HOLD_CHECK_S)
            except Empty:
                command = None
            if isinstance(command, ev.Release):
                return self._check_stall()
            if command is not None:
                self._execute(command)
            elif self._is_expelled():
                # No offsets can be committed as this member any more. The library does not report it.
                return self._check_stall() or GroupError("the member was expelled while it held a revocation")
        return None

    def _is_expelled(self) -> bool:
        """Whether the session has expired while a revocation is held (classic protocol)."""
        if self._consumer is None:
            return True
        self._consumer.identify()
        return self._consumer.identity is None

    def _on_lost(self, partitions: tuple[TopicPartition, ...]) -> GroupError | None:
        self._assigned = False
        eager = self._consumer is None or not self._consumer.incremental
        # An incremental member may lose only the partitions of a deleted topic.
        self._remove_partitions(self.partitions if eager else partitions)
        self._report(ev.Lost(**self._ids(), partitions=partitions))
        return None if self.partitions else self._uncertain("lost its membership")

    # --- whether the membership is still this process's -------------------------------------------------------------

    def _check_stall(self) -> Fenced | None:
        """Record that the thread runs. After a stall, return an error if the member must not continue.

        A member without partitions, or one that holds a revocation, gets no callback when its session expires: the
        library rejoins by itself, with an instance id that may belong to another process by now.
        """
        since_ms, self._last_ran_ms = self._last_ran_ms, self._environment.boot_ms()
        stall_ms = self._last_ran_ms - since_ms
        return self._uncertain(f"did not run for {stall_ms} ms") if stall_ms > self._stall_ms_max else None

    def _uncertain(self, event: str) -> Fenced | None:
        """Return the error of a static member that must not rejoin by itself.

        A process that was frozen for longer than its session would take the membership back from the driver that was
        started in its place (KIP-345). The member ends instead, and the next member of its slot joins once the broker
        confirms that no newer driver runs this stream.
        """
        if self._join.instance_id is None or self._leaving is not None:
            return None
        return _MembershipUncertain(f"the member {event}")

    def _ids(self) -> dict[str, Any]:
        return {"slot": self.slot, "client": self.client}
