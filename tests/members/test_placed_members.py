"""A member that is placed on an agent, seen from both ends of a channel that a test closes."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from manual_environment import A0, A1, ManualEnvironment, metadata

from spark_group_source.agents.connected_agents import ConnectedAgents, RemoteMember
from spark_group_source.agents.hosted_members import HEARTBEATS_PER_LEASE, HostedMembers, PrefetchSize
from spark_group_source.agents.messages import PENDING_MAX, AgentOrders, AgentReport, Session
from spark_group_source.errors import AccessDenied
from spark_group_source.members import MemberCommit
from spark_group_source.model import Identity
from spark_group_source.protocol import events as ev

LEASE_MS = 6_000
SETTINGS = {"bootstrap.servers": "b", "group.id": "g", "session.timeout.ms": "10000"}
JOIN = ev.Join(slot=3, client=2, topics=("a",), client_id="c-3", instance_id="g.s.3", agent="h1")
WHO = Identity(5, "m", metadata(5))


class Wire:
    """One connection; the test delivers its messages."""

    def __init__(self, pair: "Pair") -> None:
        self.pair = pair
        self.to_agent: deque[AgentOrders] = deque()
        self.to_run: deque[AgentReport] = deque()
        self.dropped = False

    def send(self, message: AgentOrders) -> None:
        self.to_agent.append(message)

    def drop(self, reason: str) -> None:
        self.dropped = bool(reason)


class Pair:
    """The stream reader's side and one agent."""

    def __init__(self, prefetched: PrefetchSize = lambda _: (0, 0)) -> None:
        self.here, self.there = ManualEnvironment(), ManualEnvironment()
        self.events: list[ev.Event] = []
        self.ended: list[str] = []
        self.own_member_ids: deque[str] = deque()
        self.connected = ConnectedAgents(
            environment=self.here,
            lease_ms=LEASE_MS,
            incremental=True,
            own_member_ids=self.own_member_ids,
            handle=self._handle,
        )
        self.wire = Wire(self)
        self.agent = HostedMembers(
            agent="h1",
            executor="7",
            name="worker-1",
            settings=SETTINGS,
            environment=self.there,
            prefetched=prefetched,
            send=self._send,
            on_ended=self.ended.append,
            on_silent=lambda: None,
        )
        self.admits = True

    def _send(self, message: AgentReport) -> None:
        self.wire.to_run.append(message)

    def _handle(self, event: ev.Event) -> None:
        self.events.append(event)
        if isinstance(event, ev.AgentConnected):
            if self.admits:
                self.connected.admit(event.agent)
            else:
                self.connected.dismiss(event.agent, "no")

    def carry(self) -> None:
        """Deliver messages until none is left."""
        while self.wire.to_run or self.wire.to_agent:
            if self.wire.to_run:
                self.connected.receive(self.wire, self.wire.to_run.popleft())
            if self.wire.to_agent:
                self.agent.receive(self.wire.to_agent.popleft())

    def open(self) -> None:
        self.agent.connected()
        self.carry()

    def reconnect(self) -> None:
        """Replace the connection; messages on their way are lost."""
        before, self.wire = self.wire, Wire(self)
        self.connected.closed(before, "cut")
        self.open()

    def place(self) -> RemoteMember:
        member = self.connected.create_member(JOIN)
        member.start()
        self.carry()
        return member

    def report(self, event: ev.Event) -> None:
        self.agent._on_event(JOIN, event)
        self.carry()

    def reported(self) -> list[ev.Event]:
        return [event for event in self.events if not isinstance(event, ev.AgentConnected | ev.AgentHeartbeat)]


@pytest.fixture
def pair() -> Pair:
    pair = Pair()
    pair.open()
    return pair


def report_of(agent: str) -> AgentReport:
    return AgentReport(agent=agent, executor="8", name="", fresh=True, received=0)


def assigned(*tps: Any) -> ev.Assigned:
    return ev.Assigned(slot=3, client=2, partitions=tps, generation=5)


# --- sessions -------------------------------------------------------------------------------------------------------


def test_a_change_is_sent_once_per_connection_until_it_is_acknowledged() -> None:
    session, sent = Session[str](ManualEnvironment()), list[tuple[int, str]]()
    session.connect(lambda number, change: sent.append((number, change)))
    for change in "ab":
        session.add(change)
    session.acknowledge(0)
    session.add("c")
    assert sent == [(1, "a"), (2, "b"), (3, "c")]
    session.connect(None)
    session.acknowledge(2)
    session.connect(lambda number, change: sent.append((number, change)))
    assert sent[3:] == [(3, "c")]
    assert [session.receive(number) for number in (1, 2, 1, 2, 3)] == [True, True, False, False, True]
    assert session.received == 3


def test_pending_changes_are_bounded() -> None:
    session = Session[str](ManualEnvironment())
    for _ in range(PENDING_MAX + 1):
        session.add("x")
    assert session.overflowed


# --- agents -------------------------------------------------------------------------------------------------------


def test_an_agent_reports_its_identity_and_is_accepted(pair: Pair) -> None:
    assert pair.events == [ev.AgentConnected(agent="h1", executor="7", name="worker-1", fresh=True)]
    pair.reconnect()
    assert pair.events[1:] == [
        ev.AgentDisconnected(agent="h1"),
        ev.AgentConnected(agent="h1", executor="7", name="worker-1", fresh=False),
    ]


def test_a_dismissed_agent_closes_its_members_and_ends(pair: Pair) -> None:
    pair.place()
    pair.connected.dismiss("h1", "its lease is over")
    pair.carry()
    assert pair.agent._wait() == "its lease is over"
    pair.agent._end("its lease is over")
    assert pair.ended == ["its lease is over"]
    (member,) = pair.there.spawned
    assert member[0] == "slot-3.2"


def test_an_agent_ends_when_nothing_is_received_for_its_lease(pair: Pair) -> None:
    pair.there.clock_ms += LEASE_MS - 1
    assert pair.agent._wait() is None
    pair.there.clock_ms += LEASE_MS
    assert "nothing was received" in str(pair.agent._wait())


def test_an_agent_reconnects_once_when_nothing_is_received_for_a_third_of_its_lease(pair: Pair) -> None:
    third_ms = LEASE_MS // 3
    pair.there.clock_ms += third_ms - 1
    assert not pair.agent._detect_silence()
    pair.there.clock_ms += 1
    assert pair.agent._detect_silence()
    assert not pair.agent._detect_silence(), "another connection is being opened"
    pair.there.clock_ms += third_ms
    assert pair.agent._detect_silence(), "that one is silent too"
    pair.reconnect()
    assert not pair.agent._detect_silence()


def test_answered_heartbeats_keep_a_connection(pair: Pair) -> None:
    for _ in range(12):
        pair.there.clock_ms += LEASE_MS // HEARTBEATS_PER_LEASE
        assert not pair.agent._detect_silence()
        pair.agent._send_report()
        pair.carry()


def test_an_answer_triggers_no_heartbeat_unless_the_lease_changed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[None] = []
    monkeypatch.setattr(pair.agent._changed, "notify_all", lambda: woken.append(None))
    for lease_ms in (LEASE_MS, LEASE_MS, 2 * LEASE_MS):
        pair.agent.receive(AgentOrders(received=0, lease_ms=lease_ms))
    assert len(woken) == 1


def test_an_agent_that_the_run_does_not_use_is_dismissed(pair: Pair) -> None:
    pair.admits = False
    stranger = Wire(pair)
    for _ in range(2):
        pair.connected.receive(stranger, report_of("h2"))
    assert [orders.end_reason for orders in stranger.to_agent] == ["no", "this run does not use the agent"]


def test_a_heartbeat_reports_what_is_prefetched_for_each_slot() -> None:
    pair = Pair(lambda tps: (100 * len(list(tps)), 7))
    pair.open()
    pair.place()
    pair.agent._send_report(prefetched=pair.agent._prefetched_by_slot())
    pair.carry()
    assert ev.PrefetchReported(agent="h1", buffered=(ev.Buffered(slot=3, bytes=0, rows=7),)) in pair.events


def test_a_run_that_has_ended_dismisses_agents(pair: Pair) -> None:
    pair.connected.end("the run has ended")
    pair.carry()
    assert pair.agent._wait() == "the run has ended"
    late = Wire(pair)
    pair.connected.receive(late, report_of("h2"))
    assert [orders.end_reason for orders in late.to_agent] == ["the run has ended"]


def test_a_newer_connection_closes_the_older_one_without_an_event(pair: Pair) -> None:
    before, pair.wire = pair.wire, Wire(pair)
    pair.open()
    assert before.dropped
    pair.connected.closed(before, "cut")
    assert not [event for event in pair.events if isinstance(event, ev.AgentDisconnected)]


# --- members -------------------------------------------------------------------------------------------------------


def test_changes_arrive_in_order_over_several_connections(pair: Pair) -> None:
    member = pair.place()
    pair.report(assigned(A0))
    pair.agent._on_event(JOIN, ev.Revoking(slot=3, client=2, partitions=(A0,), eager=False))
    pair.wire.to_run.clear()
    pair.reconnect()
    assert [type(event) for event in pair.reported()] == [ev.Assigned, ev.AgentDisconnected, ev.Revoking]
    assert member.partitions == (A0,)


def test_held_partitions_shrink_when_the_release_is_sent(pair: Pair) -> None:
    member = pair.place()
    pair.report(assigned(A0, A1))
    pair.report(ev.Revoking(slot=3, client=2, partitions=(A0,), eager=False))
    part = MemberCommit(member, member.identity, {A0: 1})
    member.submit(ev.Release(slot=3, client=2))
    assert member.partitions == (A1,)
    assert part.stale_reason is not None


def test_the_identity_arrives_before_the_assignment(pair: Pair) -> None:
    member = pair.place()
    pair.agent._on_identity(JOIN, WHO)
    pair.report(assigned(A0))
    assert member.identity == WHO
    assert pair.own_member_ids == deque(["m"])
    pair.agent._on_identity(JOIN, None)
    pair.carry()
    assert member.identity is None


def test_changes_of_a_replaced_member_are_ignored(pair: Pair) -> None:
    pair.place()
    pair.agent._session.add(ev.Assigned(slot=3, client=1, partitions=(A0,), generation=1))
    pair.carry()
    assert pair.reported() == []


def test_an_internal_failure_on_an_agent_fails_the_member_only(pair: Pair) -> None:
    pair.place()
    pair.report(ev.InternalFailure(error=AccessDenied("no permission")))
    assert pair.reported() == [ev.MemberFailed(slot=3, client=2, reason="no permission")]


def test_a_member_ends_when_it_reports_its_end_or_its_agent_is_dismissed(pair: Pair) -> None:
    member = pair.place()
    assert not member.wait_ended(0)
    pair.report(ev.MemberEnded(slot=3, client=2))
    assert member.wait_ended(0)
    other = pair.connected.create_member(JOIN)
    pair.connected.dismiss("h1", "its lease is over")
    assert other.wait_ended(0) and other.identity is None


def test_a_member_whose_thread_cannot_be_started_on_its_agent_ends(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(name: str, run: object, *, died: Callable[[BaseException], None]) -> None:
        died(RuntimeError("can't start new thread"))

    monkeypatch.setattr(pair.there, "spawn", none_left)
    member = pair.place()
    assert [type(event) for event in pair.reported()] == [ev.MemberFailed, ev.MemberEnded]
    assert member.wait_ended(0)
    assert not pair.agent._members


def test_orders_arrive_once_over_several_connections(pair: Pair) -> None:
    member = pair.place()
    pair.report(assigned(A0))
    there = pair.agent._members[3]
    member.submit(ev.Subscribe(slot=3, topics=("a", "b")))
    pair.carry()
    member.submit(ev.Release(slot=3, client=2))
    pair.wire.to_agent.clear()
    pair.reconnect()
    orders = [there._commands.get_nowait() for _ in range(2)]
    assert [type(order) for order in orders] == [ev.Subscribe, ev.Release]
    assert there._commands.empty()


def test_an_order_for_a_replaced_member_is_ignored(pair: Pair) -> None:
    former = pair.place()
    pair.connected.create_member(replace(JOIN, client=3)).start()
    pair.carry()
    there = pair.agent._members[3]
    former.submit(ev.Leave(slot=3, leave=True))
    pair.carry()
    assert there.client == 3 and there._commands.empty()
