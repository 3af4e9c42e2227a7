"""One slot of the group: the thread that owns a consumer and does everything on it.

Runs in: the stream reader, agents. Deliberately absent: decisions; the thread reports what Kafka says, holds
a revocation until it is told to let go, and carries out orders. Nothing else ever touches the consumer: a commit on
one thread while another polls never returns.
"""

import logging
import sys
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from spark_group_source.errors import AccessDenied, Fenced, GroupError, InvariantBroken, OptionError, SourceError
from spark_group_source.kafka import (
    Empty,
    Environment,
    Identity,
    MemberConsumer,
    MemberStale,
    Queue,
    Thread,
    take_place,
)
from spark_group_source.members.slot_member import Share, SlotMember
from spark_group_source.model import TopicPartition
from spark_group_source.options.client import SESSION_TIMEOUT_MS, setting_ms
from spark_group_source.protocol import events as ev

log = logging.getLogger(__name__)

POLL_S = 0.1
"""How long a poll may take before orders are looked at: the longest wait of a subscription change or a close."""
HOLD_CHECK_S = 0.25
"""While a revocation is held: how often the thread looks whether the member is still in the group."""
ORDERS_MAX = 100
"""Orders waiting for the thread. The machine gives a slot one order at a time; more than this is a bug."""
STOOD_STILL_SHARE = 0.5
"""Of the session timeout: a thread that did nothing for longer has stood still, and its place may be another's."""


class _PlaceInDoubt(Fenced):
    """The member's place in the group may be another process's by now; the broker did not say that it is."""


@dataclass(frozen=True, slots=True)
class _Commit:
    share: Share
    notes: Mapping[TopicPartition, str]
    done: "Future[None]"


_Order = ev.Release | ev.Subscribe | ev.Leave | _Commit


class Member(SlotMember):
    """The member of one slot, from :meth:`start` until its thread ends.

    Args:
        join: which slot, the number of its consumer, its names in the group, and the first subscription.
        settings: librdkafka settings with group.id; the names of ``join`` are added here.
        environment: threads, clock and clients.
        known_as: takes each member id that the group gives it.
        report: takes each event; never raises. A thread that cannot be started is reported inside :meth:`start`.
        before: waits for whatever must be so before it joins. On its thread.
        renamed: told who it is in the group now, whenever that changes. On its thread.
    """

    def __init__(
        self,
        join: ev.Join,
        settings: Mapping[str, str],
        *,
        environment: Environment,
        known_as: deque[str],
        report: Callable[[ev.Event], None],
        before: Callable[[], None] = lambda: None,
        renamed: Callable[[Identity | None], None] = lambda _: None,
    ) -> None:
        super().__init__(join)
        self._settings = dict(settings) | ({"client.id": join.client_id} if join.client_id else {})
        if join.instance_id is not None:
            self._settings["group.instance.id"] = join.instance_id
        self._environment = environment
        self._known_as = known_as
        self._report = report
        self._before, self._renamed = before, renamed
        self._orders: Queue[_Order] = environment.queue(ORDERS_MAX)
        self._leaving: ev.Leave | None = None
        self._consumer: MemberConsumer | None = None
        self._topics = join.topics
        self._assigned = False
        self._still_ms_max = STOOD_STILL_SHARE * setting_ms(self._settings, "session.timeout.ms", SESSION_TIMEOUT_MS)
        self._ran_ms = 0
        self._thread: Thread | None = None

    def start(self) -> None:
        name = f"slot-{self.slot}.{self.client}"
        self._thread = self._environment.spawn(name, self._run, died=self._died)

    def order(self, order: ev.Release | ev.Subscribe | ev.Leave) -> None:
        """Give the thread something to do; it is done within :data:`POLL_S` or at once inside a hold."""
        self._orders.put_nowait(order)

    @property
    def identity(self) -> Identity | None:
        """Who it is in the group, as of its last poll; None while it is no member."""
        return None if self._consumer is None else self._consumer.identity

    def commit(self, share: Share, notes: Mapping[TopicPartition, str]) -> "Future[None]":
        """Commit offsets as this member: the way where transactions are not allowed.

        Returns:
            Ends with MemberStale when the member is not what it was when that was ordered, or with CommitFailed.
        """
        done: Future[None] = self._environment.future()
        self._orders.put_nowait(_Commit(share, notes, done))
        return done

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait for the thread to end; False when it did not in time."""
        if self._thread is None:
            return True
        if timeout_s > 0:  # its own thread asks, too, while it reports its end
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._before()
            self._serve_or_take()
        except _PlaceInDoubt as exc:
            self._report(ev.MemberFenced(**self._me(), reason=str(exc), confirmed=False))
        except Fenced as exc:
            self._report(ev.MemberFenced(**self._me(), reason=str(exc)))
        except (OptionError, AccessDenied) as exc:  # joining again cannot help; a refusal was told twice
            self._report(ev.InternalFailure(error=exc))
        except SourceError as exc:
            self._report(ev.MemberFailed(**self._me(), reason=str(exc)))
        except:  # noqa: E722 - an error of the library that a callback let through is not even a BaseException
            log.exception("slot %d failed", self.slot)
            self._report(ev.MemberFailed(**self._me(), reason=repr(sys.exc_info()[1])))
        finally:
            try:
                self._end()
            finally:
                self._report(ev.MemberEnded(**self._me()))

    def _serve_or_take(self) -> None:
        try:
            self._serve()
        except GroupError as exc:
            if not (self._join.takes and exc.fields.get("unreleased")):
                raise
            assert self._consumer is not None
            self._consumer.close(leave=False)
            take_place(
                self._settings,
                self._topics,
                environment=self._environment,
                known_as=self._known_as,
                over=self._is_told_to_leave,
            )
            self._serve()

    def _is_told_to_leave(self) -> bool:
        self._obey_all()
        return self._leaving is not None

    def _died(self, exc: BaseException) -> None:
        self._report(ev.InternalFailure(error=InvariantBroken(f"the thread of slot {self.slot} does not run: {exc!r}")))

    def _serve(self) -> None:
        self._consumer = consumer = MemberConsumer(
            self._settings,
            environment=self._environment,
            known_as=self._known_as,
            on_assigned=self._on_assigned,
            on_revoked=self._on_revoked,
            on_lost=self._on_lost,
            renamed=self._renamed,
        )
        subscribed: tuple[str, ...] = ()
        self._ran_ms = self._environment.now_ms()
        while self._leaving is None:
            if (why := self._stood_still()) is not None:
                raise why
            if subscribed != self._topics:  # here and not where the order is met: that may be inside a callback
                consumer.subscribe(self._topics)
                subscribed = self._topics
            consumer.poll(POLL_S)
            self._obey_all()
            if not self._assigned and consumer.incremental and consumer.generation > 0:
                self._on_assigned((), consumer.generation)  # KIP-848 tells nothing of an empty assignment

    def _obey_all(self) -> None:
        while True:
            try:
                self._obey(self._orders.get_nowait())
            except Empty:
                return

    def _obey(self, order: _Order) -> None:
        match order:
            case ev.Leave():
                self._leaving = self._leaving or order
            case ev.Subscribe():
                self._topics = order.topics
            case _Commit():
                self._commit(order)
            case ev.Release():
                pass  # the hold it belongs to is over

    def _commit(self, order: _Commit) -> None:
        assert self._consumer is not None
        try:
            self._consumer.identify()
            if (why := order.share.outdated) is not None:
                raise MemberStale(f"slot {self.slot}: {why}")
            self._consumer.commit(order.share.offsets, order.notes)
        except GroupError as exc:
            order.done.set_exception(exc)
        else:
            order.done.set_result(None)

    def _end(self) -> None:
        leave = self._leaving is not None and self._leaving.leave
        self._leaving = self._leaving or ev.Leave(slot=self.slot, leave=False)
        try:
            if self._consumer is not None:
                self._consumer.close(leave=leave)
        finally:
            while not self._orders.empty():
                order = self._orders.get_nowait()
                if isinstance(order, _Commit):
                    order.done.set_exception(GroupError("the member has ended"))

    # --- callbacks, on the thread, inside poll ----------------------------------------------------------------------

    def _on_assigned(self, partitions: tuple[TopicPartition, ...], generation: int) -> None:
        self._assigned = True
        if self._consumer is not None and not self._consumer.incremental:
            # Rebalances that the library went through while this thread was busy are told as assignments alone: what it
            # had before may have been another member's since, and may not be its own any more.
            if self.held:
                self._report(ev.Lost(**self._me(), partitions=self.held))
            self.held = ()
        self.held += partitions
        self._report(ev.Assigned(**self._me(), partitions=partitions, generation=generation))

    def _on_revoked(self, partitions: tuple[TopicPartition, ...]) -> GroupError | None:
        """Hold the revocation: it takes effect when this returns. Heartbeats go on in the library's own thread."""
        if self._leaving is not None:
            return None
        eager = self._consumer is not None and not self._consumer.incremental
        self._assigned = not eager
        self._report(ev.Revoking(**self._me(), partitions=partitions, eager=eager))
        why = self._hold()
        self._gave_back(partitions)
        return why

    def _hold(self) -> GroupError | None:
        """Wait for the release, which the machine bounds. Returns why the member must not go on, if so."""
        while self._leaving is None:
            if (why := self._stood_still()) is not None:
                return why
            try:
                order = self._orders.get(timeout=HOLD_CHECK_S)
            except Empty:
                order = None
            if isinstance(order, ev.Release):
                return self._stood_still()
            if order is not None:
                self._obey(order)
            elif self._is_out():
                # Nobody commits in its name any more, so there is nothing to hold for. The library does not say so.
                return self._stood_still() or GroupError("thrown out of the group while it held a revocation")
        return None

    def _is_out(self) -> bool:
        """Whether the holder of a revocation is no member any more (classic): its session ended."""
        if self._consumer is None:
            return True
        self._consumer.identify()
        return self._consumer.identity is None

    def _on_lost(self, partitions: tuple[TopicPartition, ...]) -> GroupError | None:
        self._assigned = False
        eager = self._consumer is None or not self._consumer.incremental
        self._gave_back(self.held if eager else partitions)  # of a cooperative one's, maybe a deleted topic's alone
        self._report(ev.Lost(**self._me(), partitions=partitions))
        return None if self.held else self._why_not_again("lost its membership")

    # --- whose place it is ------------------------------------------------------------------------------------------

    def _stood_still(self) -> Fenced | None:
        """Say that the thread runs. After a standstill: why it must not go on as a member, if so.

        A member that has no partitions, or holds a revocation, is not told that its session ended meanwhile: the
        library joins again by itself, under the name that may be another process's by now.
        """
        since_ms, self._ran_ms = self._ran_ms, self._environment.now_ms()
        still_ms = self._ran_ms - since_ms
        return self._why_not_again(f"did not run for {still_ms} ms") if still_ms > self._still_ms_max else None

    def _why_not_again(self, what: str) -> Fenced | None:
        """Why this member must not join again by itself: a process that was frozen past its session would take the
        place back from the driver that was started instead (classic static members, KIP-345). It ends, and the next
        member of its slot joins when the broker says that no newer driver runs this stream."""
        if self._join.instance_id is None or self._leaving is not None:
            return None
        return _PlaceInDoubt(f"the member {what}")

    def _me(self) -> dict[str, Any]:
        return {"slot": self.slot, "client": self.client}
