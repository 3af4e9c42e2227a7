"""A member of ours that lives at an agent, as the stream reader sees it: the same face as :class:`Member`.

Runs in: the stream reader. Deliberately absent: the consumer, which is at the agent (``hosted``), and decisions.

What it knows of the member is what that has told, so a commit in its name is ordered with who it was then, and refused
by the broker if it is another by now. What it holds shrinks when the release is *sent*: from then on the partitions may
be somebody else's.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from spark_group_source.agents.member_messages import Known, Order, Report
from spark_group_source.kafka import Environment, Identity
from spark_group_source.members.slot_member import SlotMember
from spark_group_source.model import TopicPartition
from spark_group_source.protocol import events as ev


class RemoteMember(SlotMember):
    """The member of one slot, from :meth:`start` until it is heard, or sure, that it has ended.

    Args:
        join: which slot, the number of its consumer, its names in the group, and its host.
        environment: locks and answers.
        incremental: whether it keeps what it has through a rebalance.
        tell: orders something of the client with that number; never raises, and the agent hears it while it lives.
        known_as: takes each member id that the group gives it.
        report: takes each event; never raises.
    """

    def __init__(
        self,
        join: ev.Join,
        *,
        environment: Environment,
        incremental: bool,
        tell: Callable[[int, Order], None],
        known_as: deque[str],
        report: Callable[[ev.Event], None],
    ) -> None:
        super().__init__(join)
        self._environment, self._incremental = environment, incremental
        self._tell, self._known_as, self._report = tell, known_as, report
        self._lock = environment.condition()
        self._ended: Future[None] = environment.future()
        self._revoking: tuple[TopicPartition, ...] = ()
        self._identity: Identity | None = None

    @property
    def identity(self) -> Identity | None:
        """Who it is in the group, as far as it has told."""
        return self._identity

    def start(self) -> None:
        self._tell(self.client, self._join)

    def order(self, order: ev.Release | ev.Subscribe | ev.Leave) -> None:
        if isinstance(order, ev.Release):
            with self._lock:
                self._gave_back(self._revoking)
        self._tell(self.client, order)

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait for the member to end, or its host; False when neither did in time."""
        if timeout_s <= 0:
            return self._ended.done()
        try:
            self._ended.result(timeout=timeout_s)
        except TimeoutError:
            return False
        return True

    # --- what its host says -----------------------------------------------------------------------------------------

    def take(self, report: Report) -> None:
        """One report of the member; in order, each once."""
        if isinstance(report, Known):
            self._known(report)
        else:
            self._note(report)
            self._report(report)

    def gone(self) -> None:
        """Its host is lost, or has been told to end it."""
        self._end()

    def _known(self, who: Known) -> None:
        if not who.member:
            self._identity = None
            return
        if who.member not in self._known_as:
            self._known_as.append(who.member)
        self._identity = Identity(who.generation, who.member, bytes.fromhex(who.metadata))

    def _note(self, event: ev.MemberReport | ev.MemberEnded) -> None:
        with self._lock:
            match event:
                case ev.Assigned():
                    self.held += event.partitions
                case ev.Revoking():
                    self._revoking = event.partitions
                case ev.Lost():
                    self._gave_back(event.partitions if self._incremental else self.held)
                case ev.MemberFailed() | ev.MemberFenced():
                    self._identity, self.held = None, ()
        if isinstance(event, ev.MemberEnded):
            self._end()

    def _end(self) -> None:
        with self._lock:
            if self._ended.done():
                return
            self._identity, self.held = None, ()
            self._ended.set_result(None)
