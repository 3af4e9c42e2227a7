"""A member at an agent and its face in the stream reader, joined by a channel that a test cuts."""

from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from manual_environment import A0, A1, ManualEnvironment, metadata

from spark_group_source.agents import member_messages as ms
from spark_group_source.agents.connected_agents import ConnectedAgents
from spark_group_source.agents.hosted_member import PINGS_A_LEASE, Hosted
from spark_group_source.agents.remote_member import RemoteMember
from spark_group_source.agents.session import KEPT_MAX, Session
from spark_group_source.errors import AccessDenied
from spark_group_source.kafka import Identity
from spark_group_source.members.slot_member import Share
from spark_group_source.protocol import events as ev

LEASE_MS = 6_000
SETTINGS = {"bootstrap.servers": "b", "group.id": "g", "session.timeout.ms": "10000"}
JOIN = ev.Join(slot=3, client=2, topics=("a",), client_id="c-3", instance_id="g.s.3", agent="h1")
WHO = Identity(5, "m", metadata(5))


class Wire:
    """One channel: what one end sends the other takes, when the test says so."""

    def __init__(self, pair: "Pair") -> None:
        self.pair = pair
        self.to_agent: deque[ms.AgentOrders] = deque()
        self.to_run: deque[ms.AgentReport] = deque()
        self.cut = False

    def send(self, message: ms.AgentOrders) -> None:
        self.to_agent.append(message)

    def drop(self, reason: str) -> None:
        self.cut = bool(reason)


class Pair:
    """The stream reader's side and one agent."""

    def __init__(self) -> None:
        self.here, self.there = ManualEnvironment(), ManualEnvironment()
        self.events: list[ev.Event] = []
        self.ended: list[str] = []
        self.known_as: deque[str] = deque()
        self.hosts = ConnectedAgents(
            environment=self.here,
            lease_ms=LEASE_MS,
            incremental=True,
            known_as=self.known_as,
            handle=self._handle,
        )
        self.wire = Wire(self)
        self.agent = Hosted(
            host="h1",
            executor="7",
            name="worker-1",
            settings=SETTINGS,
            environment=self.there,
            send=self._send,
            ended=self.ended.append,
            deaf=lambda: None,
        )
        self.admits = True

    def _send(self, message: ms.AgentReport) -> None:
        self.wire.to_run.append(message)

    def _handle(self, event: ev.Event) -> None:
        self.events.append(event)
        if isinstance(event, ev.AgentConnected):
            if self.admits:
                self.hosts.admit(event.agent)
            else:
                self.hosts.dismiss(event.agent, "no")

    def carry(self) -> None:
        """Until both ends are silent."""
        while self.wire.to_run or self.wire.to_agent:
            if self.wire.to_run:
                self.hosts.take(self.wire, self.wire.to_run.popleft())
            if self.wire.to_agent:
                self.agent.take(self.wire.to_agent.popleft())

    def open(self) -> None:
        self.agent.opened()
        self.carry()

    def reconnect(self) -> None:
        """What is under way is lost."""
        before, self.wire = self.wire, Wire(self)
        self.hosts.closed(before, "cut")
        self.open()

    def lend(self) -> RemoteMember:
        member = self.hosts.make(JOIN)
        member.start()
        self.carry()
        return member

    def says(self, event: ev.Event) -> None:
        self.agent._report(JOIN, event)
        self.carry()

    def told(self) -> list[ev.Event]:
        return [event for event in self.events if not isinstance(event, ev.AgentConnected | ev.AgentHeartbeat)]


@pytest.fixture
def pair() -> Pair:
    pair = Pair()
    pair.open()
    return pair


def report_of(host: str) -> ms.AgentReport:
    return ms.AgentReport(host=host, executor="8", name="", fresh=True, taken=0)


def assigned(*tps: Any) -> ev.Assigned:
    return ev.Assigned(slot=3, client=2, partitions=tps, generation=5)


# --- changes that arrive once and in order --------------------------------------------------------------------------


def test_a_change_is_sent_once_over_one_connection_and_again_over_the_next_if_it_was_not_taken() -> None:
    link, sent = Session[str](ManualEnvironment()), list[tuple[int, str]]()
    link.connect(lambda number, change: sent.append((number, change)))
    for change in "ab":
        link.tell(change)
    link.other_took(0)
    link.tell("c")
    assert sent == [(1, "a"), (2, "b"), (3, "c")]
    link.connect(None)
    link.other_took(2)
    link.connect(lambda number, change: sent.append((number, change)))
    assert sent[3:] == [(3, "c")]
    assert [link.take(number) for number in (1, 2, 1, 2, 3)] == [True, True, False, False, True]
    assert link.taken == 3


def test_what_is_kept_for_an_end_that_takes_nothing_is_bounded() -> None:
    link = Session[str](ManualEnvironment())
    for _ in range(KEPT_MAX + 1):
        link.tell("x")
    assert link.broken


# --- an agent comes and goes ---------------------------------------------------------------------------------------


def test_an_agent_says_who_it_is_and_is_welcomed(pair: Pair) -> None:
    assert pair.events == [ev.AgentConnected(agent="h1", executor="7", name="worker-1", fresh=True)]
    pair.reconnect()
    assert pair.events[1:] == [
        ev.AgentDisconnected(agent="h1"),
        ev.AgentConnected(agent="h1", executor="7", name="worker-1", fresh=False),
    ]


def test_a_dismissed_agent_closes_its_members_and_ends(pair: Pair) -> None:
    pair.lend()
    pair.hosts.dismiss("h1", "its lease is over")
    pair.carry()
    assert pair.agent._wait() == "its lease is over"
    pair.agent._end("its lease is over")
    assert pair.ended == ["its lease is over"]
    (member,) = pair.there.spawned
    assert member[0] == "slot-3.2"


def test_an_agent_that_hears_nothing_for_a_lease_ends(pair: Pair) -> None:
    pair.there.clock_ms += LEASE_MS - 1
    assert pair.agent._wait() is None
    pair.there.clock_ms += LEASE_MS
    assert "was not heard" in str(pair.agent._wait())


def test_an_agent_that_hears_nothing_for_a_third_of_a_lease_asks_for_another_channel_once(pair: Pair) -> None:
    third_ms = LEASE_MS // 3
    pair.there.clock_ms += third_ms - 1
    assert not pair.agent._is_deaf()
    pair.there.clock_ms += 1
    assert pair.agent._is_deaf()
    assert not pair.agent._is_deaf(), "another one is on its way"
    pair.there.clock_ms += third_ms
    assert pair.agent._is_deaf(), "that one swallows too"
    pair.reconnect()
    assert not pair.agent._is_deaf()


def test_reports_are_answered_so_often_that_a_good_channel_is_kept(pair: Pair) -> None:
    for _ in range(12):
        pair.there.clock_ms += LEASE_MS // PINGS_A_LEASE
        assert not pair.agent._is_deaf()
        pair.agent._say()
        pair.carry()


def test_an_answer_is_no_reason_for_the_next_report(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[None] = []
    monkeypatch.setattr(pair.agent._changed, "notify_all", lambda: woken.append(None))
    for lease_ms in (LEASE_MS, LEASE_MS, 2 * LEASE_MS):
        pair.agent.take(ms.AgentOrders(taken=0, lease_ms=lease_ms))
    assert len(woken) == 1


def test_who_is_none_of_the_runs_agents_is_sent_away(pair: Pair) -> None:
    pair.admits = False
    stranger = Wire(pair)
    for _ in range(2):
        pair.hosts.take(stranger, report_of("h2"))
    assert [orders.over for orders in stranger.to_agent] == ["no", "it is none of this run's agents"]


def test_a_sign_of_life_says_what_is_held_of_each_members_partitions(pair: Pair) -> None:
    pair.lend()
    pair.agent.begin(lambda tps: (100 * len(list(tps)), 7))
    pair.agent._say(stock=pair.agent._stock())
    pair.carry()
    assert ev.PrefetchReported(agent="h1", buffered=(ev.Buffered(slot=3, bytes=0, rows=7),)) in pair.events


def test_a_run_that_has_ended_sends_agents_away(pair: Pair) -> None:
    pair.hosts.end("the run has ended")
    pair.carry()
    assert pair.agent._wait() == "the run has ended"
    late = Wire(pair)
    pair.hosts.take(late, report_of("h2"))
    assert [orders.over for orders in late.to_agent] == ["the run has ended"]


def test_a_newer_channel_of_an_agent_closes_the_older_one_whose_end_says_nothing(pair: Pair) -> None:
    before, pair.wire = pair.wire, Wire(pair)
    pair.open()
    assert before.cut
    pair.hosts.closed(before, "cut")
    assert not [event for event in pair.events if isinstance(event, ev.AgentDisconnected)]


# --- a member there, and its face here -----------------------------------------------------------------------------


def test_reports_come_in_order_also_over_a_channel_that_was_cut(pair: Pair) -> None:
    member = pair.lend()
    pair.says(assigned(A0))
    pair.agent._report(JOIN, ev.Revoking(slot=3, client=2, partitions=(A0,), eager=False))
    pair.wire.to_run.clear()
    pair.reconnect()
    assert [type(event) for event in pair.told()] == [ev.Assigned, ev.AgentDisconnected, ev.Revoking]
    assert member.held == (A0,)


def test_what_it_holds_shrinks_when_the_release_is_sent(pair: Pair) -> None:
    member = pair.lend()
    pair.says(assigned(A0, A1))
    pair.says(ev.Revoking(slot=3, client=2, partitions=(A0,), eager=False))
    share = Share(member, member.identity, {A0: 1})
    member.order(ev.Release(slot=3, client=2))
    assert member.held == (A1,)
    assert share.outdated is not None


def test_who_it_is_is_known_before_what_it_was_given(pair: Pair) -> None:
    member = pair.lend()
    pair.agent._renamed(JOIN, WHO)
    pair.says(assigned(A0))
    assert member.identity == WHO
    assert pair.known_as == deque(["m"])
    pair.agent._renamed(JOIN, None)
    pair.carry()
    assert member.identity is None


def test_reports_of_a_member_that_was_replaced_or_of_another_host_are_ignored(pair: Pair) -> None:
    pair.lend()
    pair.agent._link.tell(ev.Assigned(slot=3, client=1, partitions=(A0,), generation=1))
    pair.carry()
    assert pair.told() == []


def test_what_cannot_work_at_an_agent_may_work_elsewhere(pair: Pair) -> None:
    pair.lend()
    pair.says(ev.InternalFailure(error=AccessDenied("no permission")))
    assert pair.told() == [ev.MemberFailed(slot=3, client=2, reason="no permission")]


def test_its_end_is_waited_for_and_a_lost_host_ends_it_too(pair: Pair) -> None:
    member = pair.lend()
    assert not member.wait_ended(0)
    pair.says(ev.MemberEnded(slot=3, client=2))
    assert member.wait_ended(0)
    other = pair.hosts.make(JOIN)
    pair.hosts.dismiss("h1", "its lease is over")
    assert other.wait_ended(0) and other.identity is None


def test_orders_come_once_also_over_a_channel_that_was_cut(pair: Pair) -> None:
    member = pair.lend()
    pair.says(assigned(A0))
    there = pair.agent._members[3]
    member.order(ev.Subscribe(slot=3, topics=("a", "b")))
    pair.carry()
    member.order(ev.Release(slot=3, client=2))
    pair.wire.to_agent.clear()
    pair.reconnect()
    orders = [there._orders.get_nowait() for _ in range(2)]
    assert [type(order) for order in orders] == [ev.Subscribe, ev.Release]
    assert there._orders.empty()


def test_an_order_for_a_member_that_was_replaced_is_not_obeyed(pair: Pair) -> None:
    former = pair.lend()
    pair.hosts.make(replace(JOIN, client=3)).start()
    pair.carry()
    there = pair.agent._members[3]
    former.order(ev.Leave(slot=3, leave=True))
    pair.carry()
    assert there.client == 3 and there._orders.empty()
