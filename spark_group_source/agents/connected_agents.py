"""The agents of a run as the stream reader sees them: their connections, and the members that are placed on them.

Runs in: the stream reader. Deliberately absent: the channel itself (an :class:`AgentConnection` is its interface), the
consumers of members, which run in the agents (``hosted_members``), and decisions: ``protocol.placement`` decides which
agents get which slots.

Messages arrive on the channel's thread, in order from each connection. Orders are given under the coordinator's lock:
nothing here waits, and no lock of this module is held while an event is handled.
"""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, Protocol

from spark_group_source.agents.channel.wire import WireError
from spark_group_source.agents.messages import (
    AgentOrders,
    AgentReport,
    MemberChange,
    MemberIdentity,
    MemberOrder,
    PrefetchPositions,
    Session,
)
from spark_group_source.kafka.environment import Environment
from spark_group_source.members import SlotMember
from spark_group_source.model import Identity, TopicPartition
from spark_group_source.protocol import events as ev

log = logging.getLogger(__name__)

_ClientOrder = tuple[int, MemberOrder]
"""The number of the consumer (``client``) that an order is for, and the order. The session numbers orders, too."""


class PlacedMembers(NamedTuple):
    """The partitions of one member that is placed on an agent.

    ``agent``: its unique id. ``executor``: the name of its executor in claims (:func:`task.executor_name`).
    """

    agent: str
    executor: str
    partitions: tuple[TopicPartition, ...]


class AgentConnection(Protocol):
    """One connection to an agent."""

    def send(self, message: Any) -> object:
        """Send a message; never waits. Raises WireError if it is not one of the channel's."""

    def drop(self, reason: str) -> object:
        """Close the connection; any thread."""


class ConnectedAgents:
    """All agents that have connected to this run.

    Args:
        environment: locks and futures.
        lease_ms: how long an agent may be silent.
        incremental: whether members keep partitions through a rebalance.
        own_member_ids: receives each member id that the group assigns to a placed member.
        handle: receives each event; never raises.
    """

    def __init__(
        self,
        *,
        environment: Environment,
        lease_ms: int,
        incremental: bool,
        own_member_ids: deque[str],
        handle: Callable[[ev.Event], None],
    ) -> None:
        self._environment, self._lease_ms, self._incremental = environment, lease_ms, incremental
        self._own_member_ids, self._handle = own_member_ids, handle
        self._lock = environment.condition()
        self._connections: dict[str, AgentConnection] = {}
        """By agent, its newest connection."""
        self._agents: dict[AgentConnection, str] = {}
        """By connection, its agent."""
        self._sessions: dict[str, Session[_ClientOrder]] = {}
        """By agent, for the agents that the run accepted."""
        self._members: dict[tuple[int, int], RemoteMember] = {}
        """By slot and number of the consumer."""
        self._end_reason: str | None = None
        """Why the run has ended; None while it runs."""

    # --- from the channel -------------------------------------------------------------------------------------------

    def receive(self, connection: AgentConnection, message: AgentReport) -> None:
        """Handle a message of an agent. An agent that the run did not accept, or dismissed, is ordered to end."""
        agent = message.agent
        if self._end_reason is not None:
            _send(connection, self._dismissal(self._end_reason))
            return
        with self._lock:
            is_new = connection not in self._agents
            former = self._connections.get(agent) if is_new else None
            if is_new:
                self._connections[agent], self._agents[connection] = connection, agent
                if (session := self._sessions.get(agent)) is not None:
                    session.acknowledge(message.received)
        if former is not None:
            former.drop("the agent has a newer connection")
        if is_new:
            self._handle(
                ev.AgentConnected(agent=agent, executor=message.executor, name=message.name, fresh=message.fresh)
            )
        with self._lock:
            session = self._sessions.get(agent)
        if session is None:
            if not is_new:
                _send(connection, self._dismissal("this run does not use the agent"))
            return
        session.acknowledge(message.received)
        if message.change is not None:
            if session.receive(message.number):
                self._apply(agent, message.change)
        elif message.end_reason:
            self._handle(ev.AgentEnded(agent=agent, reason=message.end_reason))
        elif not is_new:
            self._on_heartbeat(connection, session, message)

    def _on_heartbeat(self, connection: AgentConnection, session: Session[_ClientOrder], message: AgentReport) -> None:
        _send(connection, AgentOrders(received=session.received, lease_ms=self._lease_ms))
        if session.overflowed:
            self._handle(ev.AgentEnded(agent=message.agent, reason="it does not acknowledge its orders"))
        else:
            self._handle(ev.AgentHeartbeat(agent=message.agent))
        if message.prefetched:
            self._handle(ev.PrefetchReported(agent=message.agent, buffered=message.prefetched))

    def closed(self, connection: AgentConnection, reason: str) -> None:
        """A connection has ended. Without effect if the agent has a newer one."""
        with self._lock:
            agent = self._agents.pop(connection, None)
            if agent is None or self._connections.get(agent) is not connection:
                return
            del self._connections[agent]
            if (session := self._sessions.get(agent)) is not None:
                session.connect(None)
        log.info("the connection to agent %s is closed: %s", agent, reason)
        self._handle(ev.AgentDisconnected(agent=agent))

    def _apply(self, agent: str, change: MemberChange) -> None:
        with self._lock:
            member = self._members.get((change.slot, change.client))
        if member is not None and member.agent == agent:
            member.apply(change)

    # --- orders, under the coordinator's lock -----------------------------------------------------------------------

    def admit(self, agent: str) -> None:
        """Accept an agent: members may be placed on it."""
        with self._lock:
            connection = self._connections.get(agent)
            if connection is None:
                return  # closed meanwhile; the agent reconnects
            session = self._sessions.setdefault(agent, Session(self._environment))
            _send(connection, AgentOrders(received=session.received, lease_ms=self._lease_ms))
            session.connect(partial(self._send_order, connection, session))

    def dismiss(self, agent: str, reason: str) -> None:
        """Order an agent to close its members and end; the members count as ended."""
        with self._lock:
            connection = self._connections.pop(agent, None)
            self._sessions.pop(agent, None)
            members = [member for member in self._members.values() if member.agent == agent]
            for member in members:
                del self._members[member.slot, member.client]
        for member in members:
            member.end()
        if connection is not None:
            _send(connection, self._dismissal(reason))

    def prefetch(self, agent: str, positions: PrefetchPositions) -> None:
        """Let an agent prefetch from these positions, if it is connected."""
        with self._lock:
            connection = self._connections.get(agent)
        if connection is not None:
            _send(connection, positions)

    def create_member(self, join: ev.Join) -> "RemoteMember":
        """Create the member of a slot that is placed on an agent."""
        member = RemoteMember(
            join,
            environment=self._environment,
            incremental=self._incremental,
            send_order=partial(self._add_order, join.agent),
            own_member_ids=self._own_member_ids,
            report=self._handle,
        )
        with self._lock:
            ended = [key for key, other in self._members.items() if key[0] == join.slot and other.wait_ended(0)]
            for key in ended:
                del self._members[key]
            self._members[join.slot, join.client] = member
        return member

    def end(self, reason: str) -> None:
        """Dismiss all agents, also those that connect later: the run has ended."""
        self._end_reason = reason
        for agent in list(self._connections):
            self.dismiss(agent, reason)

    def _add_order(self, agent: str, client: int, order: MemberOrder) -> None:
        with self._lock:
            session = self._sessions.get(agent)
        if session is not None:
            session.add((client, order))

    def _send_order(
        self, connection: AgentConnection, session: Session[_ClientOrder], number: int, order: _ClientOrder
    ) -> None:
        client, what = order
        _send(
            connection,
            AgentOrders(received=session.received, lease_ms=self._lease_ms, number=number, client=client, order=what),
        )

    def _dismissal(self, reason: str) -> AgentOrders:
        return AgentOrders(received=0, lease_ms=self._lease_ms, end_reason=reason)


def _send(connection: AgentConnection, message: object) -> None:
    try:
        connection.send(message)
    except WireError:
        log.exception("a message to an agent cannot be encoded; closing the connection")
        connection.drop("a message to it could not be encoded")


class RemoteMember(SlotMember):
    """A member that is placed on an agent, from :meth:`start` until it has reported its end or its agent is gone.

    Its state here is what it last reported. A commit is ordered under the identity known here, and the broker refuses
    it if the identity has changed since. ``partitions`` shrinks when the release is *sent*: from then on another
    consumer may read them.

    Args:
        join: as in :class:`~spark_group_source.members.Member`, with its agent.
        environment, incremental, own_member_ids: as in :class:`ConnectedAgents`.
        send_order: sends an order to the consumer with that number, if its agent is connected or may reconnect; never
            raises.
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

    def submit(self, command: ev.Release | ev.Subscribe | ev.Leave) -> None:
        if isinstance(command, ev.Release):
            with self._lock:
                self._remove_partitions(self._revoking)
        self._send_order(self.client, command)

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
            self._set_identity(change.identity)
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

    def _set_identity(self, identity: Identity | None) -> None:
        if identity is not None and identity.member not in self._own_member_ids:
            self._own_member_ids.append(identity.member)
        self._identity = identity

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
