"""One slot of the group: the thread that owns a consumer and does everything on it.

Runs in: the stream reader (members at home). Deliberately absent: decisions; the thread reports what Kafka says, holds
a revocation until it is told to let go, and carries out orders. Nothing else ever touches the consumer: a commit on
one thread while another polls never returns.
"""

import logging
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from spark_group_source.errors import Fenced, GroupError, OptionError, SourceError
from spark_group_source.group import events as ev
from spark_group_source.kafka import Identity, MemberConsumer, MemberStale
from spark_group_source.model import TopicPartition

log = logging.getLogger(__name__)

POLL_S = 0.1
"""How long a poll may take before orders are looked at: the longest wait of a subscription change or a close."""
HOLD_CHECK_S = 0.25
"""While a revocation is held: how often the machine is asked whether its budget has run out."""
ORDERS_MAX = 100
"""Orders waiting for the thread. The machine gives a slot one order at a time; more than this is a bug."""


@dataclass(frozen=True, slots=True)
class Share:
    """What is to be committed of one member's partitions, and who it was when that was ordered."""

    member: "Member"
    identity: Identity | None
    offsets: Mapping[TopicPartition, int]


@dataclass(frozen=True, slots=True)
class _Commit:
    share: Share
    note: str
    done: "Future[None]"


_Order = ev.Release | ev.Subscribe | ev.Leave | _Commit


class Member:
    """The member of one slot, from :meth:`start` until its thread ends.

    Args:
        join: which slot, the number of its consumer, and the first subscription.
        settings: librdkafka settings with group.id and group.instance.id.
        report: takes each event; never raises.
        fail: ends the run with this error.
        replaced: whether a newer driver has this run's place; given any partition of the group.
    """

    def __init__(
        self,
        join: ev.Join,
        settings: Mapping[str, str],
        report: Callable[[ev.Event], None],
        fail: Callable[[SourceError], None],
        replaced: Callable[[TopicPartition], bool],
    ) -> None:
        self._join = join
        self._settings = settings
        self._report = report
        self._fail = fail
        self._replaced = replaced
        self._orders: queue.Queue[_Order] = queue.Queue(ORDERS_MAX)
        self._leaving: ev.Leave | None = None
        self._consumer: MemberConsumer | None = None
        self._topics = join.topics
        self._assigned = False
        self._thread = threading.Thread(target=self._run, name=f"slot-{join.slot}.{join.client}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def order(self, order: ev.Release | ev.Subscribe | ev.Leave) -> None:
        """Give the thread something to do; it is done within :data:`POLL_S` or at once inside a hold."""
        self._orders.put_nowait(order)

    @property
    def identity(self) -> Identity | None:
        """Who it is in the group, as of its last poll; None while it is no member."""
        return None if self._consumer is None else self._consumer.identity

    @property
    def slot(self) -> int:
        return self._join.slot

    @property
    def client(self) -> int:
        return self._join.client

    def commit(self, share: Share, note: str) -> "Future[None]":
        """Commit offsets as this member: the way where transactions are not allowed."""
        done: Future[None] = Future()
        self._orders.put_nowait(_Commit(share, note, done))
        return done

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait for the thread to end; False when it did not in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Fenced as exc:
            self._report(ev.MemberFenced(**self._me(), reason=str(exc)))
        except OptionError as exc:  # joining again cannot help
            self._fail(exc)
        except SourceError as exc:
            self._report(ev.MemberFailed(**self._me(), reason=str(exc)))
        except:  # noqa: E722 - an error of the library that a callback let through is not even a BaseException
            log.exception("slot %d failed", self._join.slot)
            self._report(ev.MemberFailed(**self._me(), reason=repr(sys.exc_info()[1])))
        finally:
            self._end()

    def _serve(self) -> None:
        self._consumer = consumer = MemberConsumer(
            self._settings, on_assigned=self._on_assigned, on_revoked=self._on_revoked, on_lost=self._on_lost
        )
        subscribed: tuple[str, ...] = ()
        while self._leaving is None:
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
            except queue.Empty:
                return

    def _obey(self, order: _Order) -> None:
        assert self._consumer is not None
        match order:
            case ev.Leave():
                self._leaving = order
            case ev.Subscribe():
                self._topics = order.topics
            case _Commit():
                try:
                    self._consumer.identify()
                    if self._consumer.identity != order.share.identity:
                        raise MemberStale(f"slot {self.slot} has joined again since")
                    self._consumer.commit(order.share.offsets, order.note)
                    order.done.set_result(None)
                except GroupError as exc:
                    order.done.set_exception(exc)
            case ev.Release():
                pass  # the hold it belongs to is over

    def _end(self) -> None:
        leave = self._leaving is not None and self._leaving.leave
        self._leaving = self._leaving or ev.Leave(slot=self._join.slot, leave=False)
        if self._consumer is not None:
            self._consumer.close(leave=leave)
        while not self._orders.empty():
            order = self._orders.get_nowait()
            if isinstance(order, _Commit):
                order.done.set_exception(GroupError("the member has ended"))

    # --- callbacks, on the thread, inside poll ----------------------------------------------------------------------

    def _on_assigned(self, partitions: tuple[TopicPartition, ...], generation: int) -> None:
        self._assigned = True
        self._report(ev.Assigned(**self._me(), partitions=partitions, generation=generation))

    def _on_revoked(self, partitions: tuple[TopicPartition, ...]) -> None:
        """Hold the revocation: it takes effect when this returns. Heartbeats go on in the library's own thread."""
        if self._leaving is not None:
            return
        eager = self._consumer is not None and not self._consumer.incremental
        self._assigned = not eager
        self._report(ev.Revoking(**self._me(), partitions=partitions, eager=eager))
        while self._leaving is None:
            try:
                order = self._orders.get(timeout=HOLD_CHECK_S)
            except queue.Empty:
                if self._consumer is not None:
                    self._consumer.identify()
                self._report(ev.Tick())  # the machine bounds the hold: it releases when the budget is used up
                continue
            if isinstance(order, ev.Release):
                return
            self._obey(order)

    def _on_lost(self, partitions: tuple[TopicPartition, ...]) -> bool:
        """Say what is lost, and whether to rejoin: a process that was frozen past its session would take the place
        back from the driver that was started instead (classic static members, KIP-345)."""
        self._assigned = False
        self._report(ev.Lost(**self._me(), partitions=partitions))
        return self._leaving is not None or not self._replaced(partitions[0])

    def _me(self) -> dict[str, int]:
        return {"slot": self._join.slot, "client": self._join.client}
