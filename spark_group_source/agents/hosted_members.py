"""The members that are placed on an agent, and the agent's connection to the stream reader.

Runs in: agents. Deliberately absent: reading, and decisions.

The members are the same as in the stream reader. Their events are sent to the stream reader, and its orders come back,
in order and each once (``messages.Session``). A closed connection is opened again while the stream reader's lease
lasts. An agent that receives nothing for a lease closes its members, which stay in the group as static members, and
ends: by then they are placed elsewhere. If nothing listens at any address of the stream reader, the run has ended.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from spark_group_source.agents.channel.client import ChannelClient
from spark_group_source.agents.channel.wire import Secret, WireError
from spark_group_source.agents.messages import (
    CODEC,
    AgentOrders,
    AgentReport,
    MemberChange,
    MemberIdentity,
    MemberOrder,
    PrefetchPositions,
    Session,
)
from spark_group_source.errors import ChannelBroken
from spark_group_source.kafka.environment import Environment
from spark_group_source.members import Member
from spark_group_source.model import Identity, TopicPartition
from spark_group_source.options.client import SESSION_TIMEOUT_MS, setting_ms
from spark_group_source.protocol import events as ev

log = logging.getLogger(__name__)

CONNECT_S = 3.0
"""Limit for one attempt to reach the stream reader at all of its addresses."""
RETRY_S = 0.5
"""Shortest time between the starts of two attempts, also if the stream reader closes each connection at once."""
RECEIVE_S = 1.0
"""While connected: how often the thread checks whether the agent ends."""
REFUSED_S = 5.0
"""When all addresses refuse connections for this long, the run has ended: the stream reader listens until then. With a
fixed ``coordinatorPort`` the stream reader of the next run refuses the agent's proof."""
HEARTBEATS_PER_LEASE = 6
"""Heartbeats that the agent sends in a lease; each is answered."""
HEARTBEAT_S_MAX = 20.0
"""Longest time between two heartbeats: the stream reader closes a connection that is silent for 60 s."""
RECONNECT_SHARE = 1 / 3
"""Share of a lease, two heartbeats: an agent that receives nothing for so long assumes that its connection drops what
is sent, and opens another one while the lease lasts."""
CLOSE_S_MAX = 8.0
"""Limit for closing the members when the agent ends; a member that is not closed then leaves with its session."""
OWN_MEMBER_IDS_MAX = 2_000
"""The latest member ids that a member keeps. Only the stream reader uses them; here they bound the memory."""
PrefetchSize = Callable[[Iterable[TopicPartition]], tuple[int, int]]
"""Returns how many bytes and rows of these partitions are prefetched in this agent."""


class ControlConnection:
    """The connection of one agent to the stream reader, with the members of the agent.

    Args:
        given: JSON: ``addresses``, ``secret`` (hexadecimal), ``executor``, ``name``, and ``settings`` of members.
        prefetch: receives the positions after each new plan.
        prefetched: returns the size of what is prefetched, for each heartbeat.
    """

    def __init__(
        self, given: Mapping[str, Any], prefetch: Callable[[PrefetchPositions], None], prefetched: PrefetchSize
    ) -> None:
        environment = Environment()
        self._addresses = [(str(host), int(port)) for host, port in given["addresses"]]
        self._secret = Secret.from_hex(given["secret"])
        self._client: ChannelClient | None = None
        self._ended = threading.Event()
        self._end_reason = ""
        self._prefetch = prefetch
        self._members = HostedMembers(
            agent=environment.new_id(),
            executor=given["executor"],
            name=given["name"],
            settings=given["settings"],
            environment=environment,
            prefetched=prefetched,
            send=self._send,
            on_ended=self._on_ended,
            on_silent=self._on_silent,
        )

    def start(self) -> None:
        """Start the threads that connect, receive and send heartbeats."""
        self._members.start()
        threading.Thread(target=self._stay_connected, name="control-connection", daemon=True).start()

    @property
    def end_reason(self) -> str:
        """Why the agent has to end: its run is over, or the stream reader is gone. Empty while neither is the case."""
        return self._end_reason

    def stop(self, timeout_s: float) -> None:
        """Close the members, which stay in the group as static members, and the connection."""
        self._members.close("the agent ends")
        self._ended.wait(timeout_s)
        if (client := self._client) is not None:
            client.close()

    # --- the connection's thread ------------------------------------------------------------------------------------

    def _stay_connected(self) -> None:
        refused_since_s: float | None = None
        while not self._ended.is_set():
            began_s = time.monotonic()
            try:
                client = ChannelClient(self._addresses, CODEC, self._secret, CONNECT_S)
            except ChannelBroken as exc:
                now_s = time.monotonic()
                refused_since_s = (refused_since_s or now_s) if exc.fields.get("refused") else None
                if refused_since_s is not None and now_s - refused_since_s >= REFUSED_S:
                    self._members.close(f"the stream reader has ended: {exc}")
                    return
            else:
                refused_since_s = None
                log.info("connected to the stream reader at %s, port %d", *client.address)
                self._client = client
                self._members.connected()
                self._receive_until_closed(client)
                self._client = None
            self._ended.wait(max(0.0, began_s + RETRY_S - time.monotonic()))

    def _receive_until_closed(self, client: ChannelClient) -> None:
        while not self._ended.is_set():
            try:
                found = client.receive(RECEIVE_S)
            except ChannelBroken as exc:
                log.info("the connection to the stream reader is lost: %s; reconnecting", exc)
                return
            match found:
                case None:
                    pass
                case PrefetchPositions():
                    self._prefetch(found)
                case _:
                    self._members.receive(found)

    def _send(self, message: AgentReport) -> None:
        client = self._client
        if client is not None:
            try:
                client.send(message)
            except WireError:
                log.exception("a message to the stream reader cannot be encoded; closing the connection")
                client.close()

    def _on_silent(self) -> None:
        client = self._client
        if client is not None:
            log.warning("nothing is received from the stream reader on this connection; opening another one")
            client.close()

    def _on_ended(self, reason: str) -> None:
        self._end_reason = reason
        self._ended.set()


class HostedMembers:
    """The members that are placed on one agent.

    Args:
        agent: the agent's unique id.
        executor: its executor's name, as in the claims of the executor's tasks.
        name: its executor's host and process id, for logs and client ids.
        settings, environment: as in :class:`Member`.
        prefetched: returns the size of what is prefetched, for each heartbeat.
        send: sends a message over the current connection, if there is one; never raises.
        on_ended: receives the reason why the agent has to end, once. All members are closed by then.
        on_silent: is called when nothing was received on the connection for too long; never raises or waits.
            :meth:`connected` is called when there is another connection.
    """

    def __init__(
        self,
        *,
        agent: str,
        executor: str,
        name: str,
        settings: Mapping[str, str],
        environment: Environment,
        prefetched: PrefetchSize,
        send: Callable[[AgentReport], object],
        on_ended: Callable[[str], None],
        on_silent: Callable[[], object],
    ) -> None:
        self._agent, self._executor, self._name = agent, executor, name
        self._settings, self._environment = dict(settings), environment
        self._prefetched, self._send = prefetched, send
        self._on_ended, self._on_silent = on_ended, on_silent
        self._session: Session[MemberChange] = Session(environment)
        self._changed = environment.condition()
        self._members: dict[int, Member] = {}
        """The current member of each slot."""
        self._replaced: list[Member] = []
        """Members that have a successor and have not ended yet."""
        self._lease_ms = setting_ms(self._settings, "session.timeout.ms", SESSION_TIMEOUT_MS)
        self._received_ms = self._connected_ms = environment.now_ms()
        self._fresh = True
        """Whether no stream reader has accepted this agent yet."""
        self._end_reason: str | None = None

    def start(self) -> None:
        """Start the thread that sends heartbeats."""
        self._environment.spawn(
            "hosted", self._run, died=lambda exc: self._on_ended(f"the thread of the agent died: {exc!r}")
        )

    def connected(self) -> None:
        """There is a new connection to the stream reader."""
        with self._changed:
            self._connected_ms = self._environment.now_ms()
        self._send_report()
        self._session.connect(lambda number, change: self._send_report(number=number, change=change))

    def receive(self, message: AgentOrders) -> None:
        """Handle a message of the stream reader. On the connection's thread, in order; never waits."""
        with self._changed:
            self._received_ms = self._environment.now_ms()
            if not message.end_reason:
                if message.lease_ms != self._lease_ms:
                    self._changed.notify_all()  # the next heartbeat was scheduled by the former lease
                self._fresh, self._lease_ms = False, message.lease_ms
        if message.end_reason:
            self.close(message.end_reason)
            return
        self._session.acknowledge(message.received)
        if message.order is not None and self._session.receive(message.number):
            self._execute(message.client, message.order)

    def close(self, reason: str) -> None:
        """Close the members, which stay in the group as static members, and end. Any thread; does not wait."""
        with self._changed:
            self._end_reason = self._end_reason or reason
            self._changed.notify_all()

    # --- the heartbeat thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (reason := self._wait()) is None:
            if self._detect_silence():
                self._on_silent()
            else:
                self._send_report(prefetched=self._prefetched_by_slot())
        self._end(reason)

    def _wait(self) -> str | None:
        """Wait until the next heartbeat is due. Returns why the agent ends, or None."""
        with self._changed:
            if self._end_reason is None:
                self._changed.wait(min(self._lease_ms / HEARTBEATS_PER_LEASE / 1000, HEARTBEAT_S_MAX))
            silent_ms = self._environment.now_ms() - self._received_ms
            if self._end_reason is None and silent_ms >= self._lease_ms:
                self._end_reason = f"nothing was received from the stream reader for {silent_ms} ms"
            if self._end_reason is None and self._session.overflowed:
                self._end_reason = "the stream reader does not acknowledge changes of members"
            return self._end_reason

    def _detect_silence(self) -> bool:
        """Whether nothing was received on the connection for too long. If so, the time starts again for the next."""
        with self._changed:
            now_ms = self._environment.now_ms()
            silent = now_ms - max(self._received_ms, self._connected_ms) >= self._lease_ms * RECONNECT_SHARE
            if silent:
                self._connected_ms = now_ms
            return silent

    def _end(self, reason: str) -> None:
        log.info("the members of agent %s close: %s", self._name, reason)
        with self._changed:
            members = [*self._members.values(), *self._replaced]
            self._members.clear()
        deadline_ms = self._environment.now_ms() + int(CLOSE_S_MAX * 1000)
        for member in members:
            member.submit(ev.Leave(slot=member.slot, leave=False))
        for member in members:
            if not member.wait_ended(max(0, deadline_ms - self._environment.now_ms()) / 1000):
                log.warning("the member of slot %d did not close in time; it leaves with its session", member.slot)
        self._send_report(end_reason=reason)
        self._on_ended(reason)

    # --- orders -----------------------------------------------------------------------------------------------------

    def _execute(self, client: int, order: MemberOrder) -> None:
        if isinstance(order, ev.Join):
            self._start_member(order)
            return
        with self._changed:
            member = self._members.get(order.slot)
        if member is not None and member.client == client:
            member.submit(order)

    def _start_member(self, join: ev.Join) -> None:
        member = Member(
            join,
            self._settings,
            environment=self._environment,
            own_member_ids=deque(maxlen=OWN_MEMBER_IDS_MAX),
            report=partial(self._on_event, join),
            on_identity=partial(self._on_identity, join),
        )
        with self._changed:
            if self._end_reason is not None:
                return
            former = self._members.get(join.slot)
            self._members[join.slot] = member
            if former is not None:
                self._replaced.append(former)
        if former is not None:
            former.submit(ev.Leave(slot=join.slot, leave=False))
        member.start()

    # --- events of members, on their threads ------------------------------------------------------------------------

    def _on_event(self, join: ev.Join, event: ev.Event) -> None:
        match event:
            case ev.Assigned() | ev.Revoking() | ev.Lost() | ev.MemberFailed() | ev.MemberFenced():
                self._session.add(event)
            case ev.MemberEnded():
                with self._changed:
                    if (member := self._members.get(join.slot)) is not None and member.client == join.client:
                        del self._members[join.slot]
                    ended = (join.slot, join.client)
                    self._replaced = [member for member in self._replaced if (member.slot, member.client) != ended]
                self._session.add(event)
            case ev.InternalFailure():  # the slot may work on another agent, or in the stream reader
                self._session.add(ev.MemberFailed(slot=join.slot, client=join.client, reason=str(event.error)))
            case _:
                log.warning("slot %d reported an unexpected event %s; ignoring it", join.slot, type(event).__name__)

    def _on_identity(self, join: ev.Join, identity: Identity | None) -> None:
        self._session.add(MemberIdentity(slot=join.slot, client=join.client, identity=identity))

    # --- reports ----------------------------------------------------------------------------------------------------

    def _prefetched_by_slot(self) -> tuple[ev.Buffered, ...]:
        with self._changed:
            members = list(self._members.values())
        sizes = [(member.slot, *self._prefetched(member.partitions)) for member in members]
        return tuple(ev.Buffered(slot=slot, bytes=bytes_, rows=rows) for slot, bytes_, rows in sizes)

    def _send_report(
        self,
        *,
        number: int = 0,
        change: MemberChange | None = None,
        prefetched: tuple[ev.Buffered, ...] = (),
        end_reason: str = "",
    ) -> None:
        self._send(
            AgentReport(
                agent=self._agent,
                executor=self._executor,
                name=self._name,
                fresh=self._fresh,
                received=self._session.received,
                number=number,
                change=change,
                prefetched=prefetched,
                end_reason=end_reason,
            )
        )
