"""The agents of a run as the stream reader meets them: their channels, and the members of ours that live there.

Runs in: the stream reader. Deliberately absent: the channel itself (a :class:`Peer` is all that is seen of it), and
decisions: who is a host, and which slot is lent to it, says ``group``.

Messages come on the channel's thread, one after the other from each peer. Orders come under the coordinator's lock, so
nothing here waits, and no lock of this module is held while an event is handed in.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

from spark_group_source.group import events as ev
from spark_group_source.kafka import Runtime
from spark_group_source.members import messages as ms
from spark_group_source.members.link import Link
from spark_group_source.members.remote import RemoteMember
from spark_group_source.model import TopicPartition


class Lent(NamedTuple):
    """What members of ours have that live at an agent."""

    host: str
    executor: str
    partitions: tuple[TopicPartition, ...]


class Peer(Protocol):
    """The other end of one channel."""

    def send(self, message: Any) -> object:
        """Send; never raises, never waits. What is lost with a channel that is cut is sent again on the next."""

    def drop(self, reason: str) -> object:
        """Cut it; any thread."""


class Hosts:
    """All agents that have said hello.

    Args:
        runtime: locks and answers.
        lease_ms: how long an agent may be silent.
        incremental: whether members keep what they have through a rebalance.
        known_as: takes each member id that the group gives a member of ours.
        handle: takes each event; never raises.
    """

    def __init__(
        self,
        *,
        runtime: Runtime,
        lease_ms: int,
        incremental: bool,
        known_as: deque[str],
        handle: Callable[[ev.Event], None],
    ) -> None:
        self._runtime, self._lease_ms, self._incremental = runtime, lease_ms, incremental
        self._known_as, self._handle = known_as, handle
        self._lock = runtime.condition()
        self._peers: dict[str, Peer] = {}  # by host: its newest channel
        self._hosts: dict[Peer, str] = {}
        self._heard: dict[str, int] = {}  # by host: what it said it has, with its last hello
        self._links: dict[str, Link] = {}  # of hosts that were admitted
        self._members: dict[tuple[int, int], RemoteMember] = {}
        self._closed: str | None = None

    # --- from the channel -------------------------------------------------------------------------------------------

    def take(self, peer: Peer, message: ms.FromAgent) -> None:
        """A message of an agent's. Who did not say hello on this channel, or is dismissed, is told so."""
        if isinstance(message, ms.Hello):
            self._hello(peer, message)
            return
        with self._lock:
            host = self._hosts.get(peer)
            link = None if host is None else self._links.get(host)
        if host is None or link is None:
            if not isinstance(message, ms.Bye):
                peer.send(ms.Dismissed(reason="it is none of this run's agents"))
            return
        match message:
            case ms.Ping():
                link.other_heard(message.heard)
                peer.send(ms.Pong(heard=link.heard))
                broken = ev.HostGone(host=host, reason="it does not take what it is told")
                self._handle(broken if link.broken else ev.HostHeard(host=host))
                if message.stock:
                    self._handle(ev.HostStocked(host=host, stock=message.stock))
            case ms.Told():
                report = link.take(message)
                if report is not None:
                    self._report(host, report)
            case ms.Bye():
                self._handle(ev.HostGone(host=host, reason=message.reason))

    def closed(self, peer: Peer) -> None:
        """A channel is cut."""
        with self._lock:
            host = self._hosts.pop(peer, None)
            if host is None or self._peers.get(host) is not peer:
                return
            del self._peers[host]
            if (link := self._links.get(host)) is not None:
                link.connect(None)
        self._handle(ev.HostCut(host=host))

    def _hello(self, peer: Peer, hello: ms.Hello) -> None:
        with self._lock:
            if self._closed is not None:
                peer.send(ms.Dismissed(reason=self._closed))
                return
            before = self._peers.get(hello.host)
            self._peers[hello.host], self._hosts[peer] = peer, hello.host
            self._heard[hello.host] = hello.heard
        if before is not None and before is not peer:
            before.drop("the agent has a newer one")
        self._handle(ev.HostCame(host=hello.host, executor=hello.executor, name=hello.name, fresh=hello.fresh))

    def _report(self, host: str, report: ms.Report | ms.Order) -> None:
        match report:
            case ms.Reported(event=event):
                if (member := self._of(host, event.slot, event.client)) is not None:
                    member.take(report)
            case ms.Known() | ms.Committed():
                if (member := self._of(host, report.slot, report.client)) is not None:
                    member.take(report)

    def _of(self, host: str, slot: int, client: int) -> RemoteMember | None:
        with self._lock:
            member = self._members.get((slot, client))
        return member if member is not None and member.host == host else None

    # --- orders, under the coordinator's lock -----------------------------------------------------------------------

    def admit(self, host: str) -> None:
        with self._lock:
            peer = self._peers.get(host)
            if peer is None:
                return  # cut meanwhile; it will say hello again
            link = self._links.setdefault(host, Link(self._runtime))
            peer.send(ms.Welcome(lease_ms=self._lease_ms, heard=link.heard))
            link.connect(peer.send, heard=self._heard.get(host, 0))

    def dismiss(self, host: str, reason: str) -> None:
        with self._lock:
            peer = self._peers.pop(host, None)
            self._heard.pop(host, None)
            self._links.pop(host, None)
            gone = [member for member in self._members.values() if member.host == host]
            for member in gone:
                del self._members[member.slot, member.client]
        for member in gone:
            member.gone()
        if peer is not None:
            peer.send(ms.Dismissed(reason=reason))

    def make(self, join: ev.Join) -> RemoteMember:
        """The member that a slot is to have at one of the agents."""
        member = RemoteMember(
            join,
            runtime=self._runtime,
            incremental=self._incremental,
            tell=partial(self._tell, join.host),
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

    def _tell(self, host: str, order: ms.Order) -> None:
        with self._lock:
            link = self._links.get(host)
        if link is not None:
            link.tell(order)
