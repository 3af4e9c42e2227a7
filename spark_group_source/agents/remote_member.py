"""A member that is placed on an agent, as the stream reader sees it: with the interface of :class:`Member`.

Runs in: the stream reader. Deliberately absent: the consumer, which runs in the agent (``hosted_members``), and
decisions.

The state of the member here is what it last reported. A commit is ordered under the identity known here, and the broker
refuses it if the identity has changed since. ``partitions`` shrinks when the release is *sent*: from then on another
consumer may read them.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from spark_group_source.agents.messages import MemberChange, MemberIdentity, MemberOrder
from spark_group_source.kafka import Environment, Identity
from spark_group_source.members.slot_member import SlotMember
from spark_group_source.model import TopicPartition
from spark_group_source.protocol import events as ev


class RemoteMember(SlotMember):
    """The member of one slot, from :meth:`start` until it has reported its end or its agent is gone.

    Args:
        join: the slot, the number of its consumer, its names in the group, and its agent.
        environment: locks and futures.
        incremental: whether the member keeps partitions through a rebalance.
        send_order: sends an order to the consumer with that number, if its agent is connected or may reconnect; never
            raises.
        own_member_ids: receives each member id that the group assigns to the member.
        report: receives each event; never raises.
    """

    def __init__(
        self,
        join: ev.Join,
        *,
        environment: Environment,
        incremental: bool,
        send_order: Callable[[int, MemberOrder], None],
        own_member_ids: deque[str],
        report: Callable[[ev.Event], None],
    ) -> None:
        super().__init__(join)
        self._environment, self._incremental = environment, incremental
        self._send_order, self._own_member_ids, self._report = send_order, own_member_ids, report
        self._lock = environment.condition()
        self._ended: Future[None] = environment.future()
        self._revoking: tuple[TopicPartition, ...] = ()
        self._identity: Identity | None = None

    @property
    def identity(self) -> Identity | None:
        """The identity in the group that the member last reported; None while it is no member."""
        return self._identity

    def start(self) -> None:
        self._send_order(self.client, self._join)

    def submit(self, order: ev.Release | ev.Subscribe | ev.Leave) -> None:
        if isinstance(order, ev.Release):
            with self._lock:
                self._remove_partitions(self._revoking)
        self._send_order(self.client, order)

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait until the member or its agent has ended. Returns False on timeout."""
        if timeout_s <= 0:
            return self._ended.done()
        try:
            self._ended.result(timeout=timeout_s)
        except TimeoutError:
            return False
        return True

    # --- changes reported by the agent ------------------------------------------------------------------------------

    def apply(self, change: MemberChange) -> None:
        """Apply one reported change. Changes arrive in order, each once."""
        if isinstance(change, MemberIdentity):
            self._set_identity(change)
        else:
            self._update(change)
            self._report(change)

    def end(self) -> None:
        """The agent is gone, or has been ordered to close the member."""
        with self._lock:
            if self._ended.done():
                return
            self._identity, self.partitions = None, ()
            self._ended.set_result(None)

    def _set_identity(self, change: MemberIdentity) -> None:
        if not change.member:
            self._identity = None
            return
        if change.member not in self._own_member_ids:
            self._own_member_ids.append(change.member)
        self._identity = Identity(change.generation, change.member, bytes.fromhex(change.metadata))

    def _update(self, event: ev.MemberReport | ev.MemberEnded) -> None:
        with self._lock:
            match event:
                case ev.Assigned():
                    self.partitions += event.partitions
                case ev.Revoking():
                    self._revoking = event.partitions
                case ev.Lost():
                    self._remove_partitions(event.partitions if self._incremental else self.partitions)
                case ev.MemberFailed() | ev.MemberFenced():
                    self._identity, self.partitions = None, ()
        if isinstance(event, ev.MemberEnded):
            self.end()
