"""The agents of a run as the stream reader meets them: their channels, and the members of ours that live there.

Runs in: the stream reader. Deliberately absent: the channel itself (a :class:`Peer` is all that is seen of it), and
decisions: who is a host, and which slot is lent to it, says ``group``.

Messages come on the channel's thread, one after the other from each peer. Orders come under the coordinator's lock, so
nothing here waits, and no lock of this module is held while an event is handed in.
"""

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

from spark_group_source.agents import member_messages as ms
from spark_group_source.agents.channel.codec import WireError
from spark_group_source.agents.remote_member import RemoteMember
from spark_group_source.agents.session import Session
from spark_group_source.agents.task_messages import Ahead
from spark_group_source.kafka import Environment
from spark_group_source.model import TopicPartition
from spark_group_source.protocol import events as ev

log = logging.getLogger(__name__)

_Order = tuple[int, ms.Order]
"""Of which client, and what."""


class PlacedMembers(NamedTuple):
    """What members of ours have that live at an agent."""

    host: str
    executor: str
    partitions: tuple[TopicPartition, ...]


class Peer(Protocol):
    """The other end of one channel."""

    def send(self, message: Any) -> object:
        """Send; never waits. Raises WireError: this is no message of the channel."""

    def drop(self, reason: str) -> object:
        """Cut it; any thread."""


class ConnectedAgents:
    """All agents that have come.

    Args:
        environment: locks and answers.
        lease_ms: how long an agent may be silent.
        incremental: whether members keep what they have through a rebalance.
        known_as: takes each member id that the group gives a member of ours.
        handle: takes each event; never raises.
    """

    def __init__(
        self,
        *,
        environment: Environment,
        lease_ms: int,
        incremental: bool,
        known_as: deque[str],
        handle: Callable[[ev.Event], None],
    ) -> None:
        self._environment, self._lease_ms, self._incremental = environment, lease_ms, incremental
        self._known_as, self._handle = known_as, handle
        self._lock = environment.condition()
        self._peers: dict[str, Peer] = {}  # by host: its newest channel
        self._hosts: dict[Peer, str] = {}
        self._links: dict[str, Session[_Order]] = {}  # of hosts that were admitted
        self._members: dict[tuple[int, int], RemoteMember] = {}
        self._closed: str | None = None

    # --- from the channel -------------------------------------------------------------------------------------------

    def take(self, peer: Peer, message: ms.AgentReport) -> None:
        """A message of an agent's. One that is no host of this run is told so."""
        host = message.host
        if self._closed is not None:
            _send(peer, self._dismissal(self._closed))
            return
        with self._lock:
            new = peer not in self._hosts
            before = self._peers.get(host) if new else None
            if new:
                self._peers[host], self._hosts[peer] = peer, host
                if (link := self._links.get(host)) is not None:
                    link.other_took(message.taken)
        if before is not None:
            before.drop("the agent has a newer one")
        if new:
            self._handle(
                ev.AgentConnected(agent=host, executor=message.executor, name=message.name, fresh=message.fresh)
            )
        with self._lock:
            link = self._links.get(host)
        if link is None:
            if not new:
                _send(peer, self._dismissal("it is none of this run's agents"))
            return
        link.other_took(message.taken)
        if message.report is not None:
            if link.take(message.number):
                self._report(host, message.report)
        elif message.over:
            self._handle(ev.AgentEnded(agent=host, reason=message.over))
        elif not new:
            _send(peer, ms.AgentOrders(taken=link.taken, lease_ms=self._lease_ms))
            broken = ev.AgentEnded(agent=host, reason="it does not take what it is told")
            self._handle(broken if link.broken else ev.AgentHeartbeat(agent=host))
            if message.stock:
                self._handle(ev.PrefetchReported(agent=host, buffered=message.stock))

    def closed(self, peer: Peer, reason: str) -> None:
        """A channel is cut; nothing happens if it was not the newest one of an agent."""
        with self._lock:
            host = self._hosts.pop(peer, None)
            if host is None or self._peers.get(host) is not peer:
                return
            del self._peers[host]
            if (link := self._links.get(host)) is not None:
                link.connect(None)
        log.info("the channel to agent %s is cut: %s", host, reason)
        self._handle(ev.AgentDisconnected(agent=host))

    def _report(self, host: str, report: ms.Report) -> None:
        with self._lock:
            member = self._members.get((report.slot, report.client))
        if member is not None and member.agent == host:
            member.take(report)

    # --- orders, under the coordinator's lock -----------------------------------------------------------------------

    def admit(self, host: str) -> None:
        with self._lock:
            peer = self._peers.get(host)
            if peer is None:
                return  # cut meanwhile; it will come again
            link = self._links.setdefault(host, Session(self._environment))
            _send(peer, ms.AgentOrders(taken=link.taken, lease_ms=self._lease_ms))
            link.connect(partial(self._order, peer, link))

    def dismiss(self, host: str, reason: str) -> None:
        with self._lock:
            peer = self._peers.pop(host, None)
            self._links.pop(host, None)
            gone = [member for member in self._members.values() if member.agent == host]
            for member in gone:
                del self._members[member.slot, member.client]
        for member in gone:
            member.gone()
        if peer is not None:
            _send(peer, self._dismissal(reason))

    def read_ahead(self, host: str, ahead: Ahead) -> None:
        """Let an agent read on from there, if it is here."""
        with self._lock:
            peer = self._peers.get(host)
        if peer is not None:
            _send(peer, ahead)

    def make(self, join: ev.Join) -> RemoteMember:
        """The member that a slot is to have at one of the agents."""
        member = RemoteMember(
            join,
            environment=self._environment,
            incremental=self._incremental,
            tell=partial(self._tell, join.agent),
            known_as=self._known_as,
            report=self._handle,
        )
        with self._lock:
            former = [key for key, other in self._members.items() if key[0] == join.slot and other.wait_ended(0)]
            for key in former:
                del self._members[key]
            self._members[join.slot, join.client] = member
        return member

    def end(self, reason: str) -> None:
        """The run is over: so are the agents."""
        self._closed = reason  # whoever comes now is told so
        for host in list(self._peers):
            self.dismiss(host, reason)

    def _tell(self, host: str, client: int, order: ms.Order) -> None:
        with self._lock:
            link = self._links.get(host)
        if link is not None:
            link.tell((client, order))

    def _order(self, peer: Peer, link: Session[_Order], number: int, order: _Order) -> None:
        client, what = order
        _send(peer, ms.AgentOrders(taken=link.taken, lease_ms=self._lease_ms, number=number, client=client, order=what))

    def _dismissal(self, reason: str) -> ms.AgentOrders:
        return ms.AgentOrders(taken=0, lease_ms=self._lease_ms, over=reason)


def _send(peer: Peer, message: object) -> None:
    try:
        peer.send(message)
    except WireError:
        log.exception("a message that the channel does not take")
        peer.drop("what was to be said to it cannot be said")
