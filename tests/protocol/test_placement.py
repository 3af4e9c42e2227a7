"""Where slots are placed: on ready agents, moved only between batches, recalled from lost agents."""

from collections.abc import Callable

import pytest
from kit.harness import JOINING_BUDGET_MS, PING_MS, STREAM, GroupHarness, only, tps
from kit.run_harness import RunHarness

from spark_group_source.errors import InvariantBroken, RebalanceTimeout
from spark_group_source.model import TopicPartition
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.data_loss import GRACE_MS
from spark_group_source.protocol.identifiers import slot_of
from spark_group_source.protocol.placement import (
    AVOID_PAUSES_MS,
    GATHER_MS_MAX,
    MOVE_INTERVAL_MS,
    MOVE_RETRY_MS,
    MOVE_START_MS_MAX,
    PLACEMENT_INTERVAL_MS,
    READY_AFTER_MS,
    RETURN_MS_MAX,
)
from spark_group_source.protocol.request_schedule import RETRY_PAUSES_MS
from spark_group_source.protocol.run import COMMIT_MS_MAX
from spark_group_source.protocol.slots import CLOSE_MS_MAX, FULL_PAUSE_MS, LEAVE_MS_MAX
from spark_group_source.protocol.states import SlotState

A, B, C = tps("orders", 0, 1, 2)
LEASE_MS = 45_000
SHRINK_MS = 120_000


def hosts_of(g: GroupHarness | RunHarness) -> list[str]:
    return [slot.agent for slot in g.run.slots.all]


def begun(g: GroupHarness) -> list[int]:
    """The slots whose members are closed at a boundary."""
    return [leave.slot for leave in only(ev.Leave, g.start_moves())]


def settled(*slots: tuple[TopicPartition, ...], **rules: object) -> GroupHarness:
    """A group whose slots have these partitions, all committed."""
    g = GroupHarness(len(slots), **rules)
    g.start_stream()
    for slot, partitions in enumerate(slots):
        g.settled(*partitions, slot=slot)
    return g


def ready(*slots: tuple[TopicPartition, ...], **rules: object) -> GroupHarness:
    """The same, with a ready agent."""
    g = settled(*slots, **rules)
    g.agent_connects("h1")
    g.tick(ms=READY_AFTER_MS)
    return g


def back(g: GroupHarness, *partitions: TopicPartition) -> None:
    """The old member of each slot has closed, and the next one has its partition again."""
    for slot, tp in enumerate(partitions):
        g.member_ended(slot)
        g.settled(tp, slot=slot)


def lent(**rules: object) -> GroupHarness:
    """One slot that is placed on agent h1 and has A."""
    g = ready((A,), **rules)
    begun(g)
    back(g, A)
    return g


def test_partitions_of_a_placed_member_that_has_ended_are_not_read_until_the_lease_of_its_agent_ends() -> None:
    """The last report of the agent, with the reason, may be lost; other consumers get the partitions meanwhile."""
    g = lent()
    g.reads({A: (100, 150)})
    g.durable()
    g.member_ended()
    assert g.run.plannable() == {}
    assert (g.run.statistics().partitions_lost, g.run.statistics().possible_duplicates) == (1, 50)
    assert [join.client for join in only(ev.Join, g.tick(ms=60_000))][:1] == [3], "its slot joins again"


# --- transactions ----------------------------------------------------------------------------------------------------


def test_slots_are_placed_only_after_a_transaction_was_allowed() -> None:
    g = settled((A,))
    g.feed(ev.TransactionsChecked(allowed=False))
    g.agent_connects("h1")
    g.tick(ms=READY_AFTER_MS)
    assert begun(g) == []
    g.feed(ev.TransactionsChecked(allowed=True))
    assert begun(g) == [0]


@pytest.mark.parametrize("holds", [False, True])
def test_slots_are_recalled_when_transactions_are_refused(holds: bool) -> None:
    """Without transactions members commit themselves, on threads of the stream reader."""
    g = lent()
    g.feed(ev.TransactionsChecked(allowed=False))
    if holds:
        g.revoking(A)
    commands = g.start_moves()
    (leave,), (join,) = only(ev.Leave, commands), only(ev.Join, commands)
    assert (leave.slot, leave.leave) == (0, False)
    assert (join.agent, join.client) == ("", 3)
    g.assigned(A)
    assert begun(g) == [] and hosts_of(g) == [""]
    assert g.run.statistics().slot_recalls == (1,)


# --- moves -----------------------------------------------------------------------------------------------------------


def test_slot_moves_by_closing_and_joining_under_the_same_instance_id() -> None:
    g = settled((A, B))
    g.agent_connects("h1", executor="7")
    assert not any("instance ids" in text for text in g.logged()), "its members have some"
    g.tick(ms=READY_AFTER_MS - 1)
    assert begun(g) == [], "an agent must have stayed"
    g.send_heartbeats(1_000)
    assert g.start_moves() == [ev.Leave(slot=0, leave=False)]
    assert g.revoking(A) == g.assigned(C) == g.failed() == g.lost(A) == [], "events of a moving member are ignored"
    assert g.feed(ev.MemberEnded(slot=0, client=0)) == [], "and so is the end of an earlier one"
    (join,) = g.member_ended()
    assert isinstance(join, ev.Join)
    assert (join.agent, join.client, join.instance_id) == ("h1", 2, g.join().instance_id)
    assert slot_of(STREAM, join.client_id) == 0 and "7" in join.client_id
    assert g.feed(ev.MemberEnded(slot=0, client=1)) == []
    g.settled(A, B)
    assert g.run.plannable() == {A: 100, B: 100}
    assert (g.run.statistics().partitions_lost, g.run.statistics().possible_duplicates) == (0, 0)


def test_ready_agent_gets_slots_soon_however_short_the_batches_are() -> None:
    g = settled((A,))
    g.agent_connects("h1")
    moves = []
    for _ in range((READY_AFTER_MS + PLACEMENT_INTERVAL_MS) // 100):
        g.tick(ms=100)
        moves += begun(g)
    assert moves == [0]


def test_agents_that_connect_together_share_the_slots_at_once() -> None:
    """A slot that has moved stays for a while, so the second agent would not get it soon."""
    g = settled((A,), (B,))
    g.agent_connects("h1")
    g.send_heartbeats(2_000)
    g.agent_connects("h2")
    g.send_heartbeats(READY_AFTER_MS - 2_000)
    assert begun(g) == []
    g.send_heartbeats(2_000)
    assert begun(g) == [0, 1]
    assert sorted(hosts_of(g)) == ["h1", "h2"]


def others_come_and_go(g: GroupHarness, nothing: type) -> None:
    """An agent connects again and again until the bound is reached; no member joins or closes meanwhile."""
    for number in range(GATHER_MS_MAX // 1_000):
        g.agent_connects(f"x{number}")
        assert only(nothing, g.start_moves()) == []
        g.feed(ev.AgentEnded(agent=f"x{number - 1}", reason="it left"))
        g.send_heartbeats(1_000)


def test_slots_are_placed_after_a_bound_while_agents_keep_connecting() -> None:
    g = settled((A,), (B,))
    g.agent_connects("h1")
    others_come_and_go(g, ev.Leave)
    assert begun(g) == [0, 1]
    assert hosts_of(g) == ["h1", "h1"]


def test_slot_moves_only_after_its_batch_is_durable_and_committed() -> None:
    g = ready((A,))
    g.plan({A: (100, 150)})
    with pytest.raises(InvariantBroken, match="slots move while a batch is in flight"):
        g.start_moves()
    g.durable()
    assert begun(g) == []
    assert g.run.placement.waits_until_ms() == g.clock() + MOVE_START_MS_MAX
    g.feed(ev.OffsetCommitFailed(reason="broker down"))
    assert begun(g) == []
    g.commit_succeeds(g.tick(ms=100))
    assert begun(g) == [0]


def test_move_that_cannot_start_is_postponed_and_the_plan_continues() -> None:
    g = ready((A,))
    g.plan({A: (100, 150)})
    g.durable()
    begun(g)
    g.tick(ms=MOVE_START_MS_MAX)
    begun(g)
    assert g.run.placement.waits_until_ms() is None
    g.commit_succeeds()
    assert begun(g) == []
    g.send_heartbeats(MOVE_RETRY_MS)
    assert begun(g) == [0]


def test_slot_moves_to_a_new_agent_only_from_one_with_two_more_and_not_soon_again() -> None:
    g = ready((A,), (B,), (C,))
    begun(g)
    back(g, A, B, C)
    g.agent_connects("h2")
    g.send_heartbeats(READY_AFTER_MS)
    assert begun(g) == []
    g.send_heartbeats(MOVE_INTERVAL_MS)
    assert len(begun(g)) == 1
    assert sorted(hosts_of(g)) == ["h1", "h1", "h2"]
    g.member_ended(2)
    g.settled(C, slot=2)
    g.agent_connects("h3")
    g.send_heartbeats(READY_AFTER_MS)
    assert begun(g) == [1]
    assert sorted(hosts_of(g)) == ["h1", "h2", "h3"]


def test_new_agent_gets_half_of_the_slots_of_the_only_other_one() -> None:
    partitions = (A, B, C, TopicPartition("orders", 3))
    g = ready(*((tp,) for tp in partitions))
    begun(g)
    back(g, *partitions)
    g.agent_connects("h2")
    g.send_heartbeats(MOVE_INTERVAL_MS)
    assert len(begun(g)) == 2


def test_instance_id_is_taken_only_from_a_member_that_does_not_close_in_time() -> None:
    g = ready((A,), (B,), classic=False)
    assert begun(g) == [0, 1]
    assert [join.takes_over for join in only(ev.Join, g.member_ended(0))] == [False]
    assert [(join.agent, join.takes_over) for join in only(ev.Join, g.tick(ms=CLOSE_MS_MAX))] == [("h1", True)]


def test_kip_848_slot_that_moved_while_topics_changed_may_move_again() -> None:
    """The broker tells a member nothing if its partitions stay the same."""
    g = lent(classic=False)
    g.agent_connects("h2")
    g.tick(ms=MOVE_INTERVAL_MS)
    g.run.slots.move(g.run.slots.all[0], "h1")
    g.feed(ev.TopicsChanged(topics=("orders", "new")))
    g.member_ended(0)
    g.settled(A)
    assert g.run.slots.all_assigned and g.run.slots.may_move(g.run.slots.all[0])


def test_cooperative_slot_that_moved_while_a_topic_was_deleted_may_move_again() -> None:
    """It joins with the former topics, and its new subscription causes no rebalance."""
    g = lent(cooperative=True)
    g.feed(ev.TopicsChanged(topics=("orders", "old")))
    g.assigned(A, generation=2)
    g.agent_connects("h2")
    g.tick(ms=MOVE_INTERVAL_MS)
    g.feed(ev.TopicsChanged(topics=("orders",)))
    g.run.slots.move(g.run.slots.all[0], "h1")
    g.tick(ms=GRACE_MS)
    g.feed(ev.TopicsChanged(topics=("orders",)))
    (join,) = only(ev.Join, g.member_ended(0))
    assert join.topics == ("old", "orders")
    assert ev.Subscribe(slot=0, topics=("orders",)) in g.assigned(A, generation=2)
    assert g.run.slots.all_assigned


def test_moving_slot_keeps_its_topics_until_it_is_assigned() -> None:
    """A classic broker ignores a new subscription of a member that returns under its instance id."""
    g = ready((A,))
    begun(g)
    assert g.feed(ev.TopicsChanged(topics=("new", "orders"))) == []
    (join,) = only(ev.Join, g.member_ended())
    assert join.topics == ("orders",)
    assert ev.Subscribe(slot=0, topics=("new", "orders")) in g.assigned(A)


@pytest.mark.parametrize("rules", [{"member_host": "driver"}, {"classic": False}])
def test_slots_stay_in_the_stream_reader_where_a_move_would_be_a_rebalance(rules: dict[str, object]) -> None:
    g = GroupHarness(1, **rules)
    if "classic" in rules:
        g.feed(ev.TargetRequested(), ev.TargetRead(ends={}))  # a bounded run
    g.start_stream()
    g.settled(A)
    g.agent_connects("h1")
    g.agent_connects("h2")
    g.tick(ms=READY_AFTER_MS)
    assert begun(g) == []
    assert len([text for text in g.logged() if "have no instance ids" in text]) == (1 if "classic" in rules else 0)


# --- lost agents -----------------------------------------------------------------------------------------------------


def test_slots_of_a_lost_agent_lose_their_partitions_and_join_at_once() -> None:
    g = lent()
    g.plan({A: (100, 150)})
    dismiss, join = g.feed(ev.AgentEnded(agent="h1", reason="its executor is gone"))
    assert isinstance(dismiss, ev.DismissAgent) and isinstance(join, ev.Join)
    assert (join.agent, join.client) == ("", 3)
    assert any("ended: its executor is gone" in text for text in g.logged())
    assert (g.run.statistics().partitions_lost, g.run.statistics().possible_duplicates) == (1, 50)
    # Late reports of the old member are ignored.
    assert g.feed(ev.MemberFenced(slot=0, client=2, reason="FENCED_INSTANCE_ID")) == []
    assert g.feed(ev.Assigned(slot=0, client=2, partitions=(A,))) == []


def test_slots_of_a_lost_agent_join_from_another_agent() -> None:
    g = lent()
    g.agent_connects("h2")
    g.send_heartbeats(READY_AFTER_MS)
    assert [j.agent for j in only(ev.Join, g.feed(ev.AgentEnded(agent="h1", reason="x")))] == ["h2"]


def test_lease_expires_without_heartbeats() -> None:
    g = lent()
    g.send_heartbeats(2 * LEASE_MS)
    assert hosts_of(g) == ["h1"]
    assert only(ev.Join, g.tick(ms=LEASE_MS - 1)) == []
    assert [join.agent for join in only(ev.Join, g.tick(ms=1))] == [""]


def test_disconnected_agent_keeps_its_slots_and_gets_no_new_ones() -> None:
    g = lent()
    g.feed(ev.AgentHeartbeat(agent="h1"), ev.AgentDisconnected(agent="h1"))
    g.tick(ms=LEASE_MS - 1)
    assert g.agent_connects("h1", fresh=False) == [ev.AcceptAgent(agent="h1")]
    assert hosts_of(g) == ["h1"]
    g = ready((A,))
    g.feed(ev.AgentDisconnected(agent="h1"))
    assert begun(g) == []
    g.agent_connects("h1", fresh=False)
    assert begun(g) == []  # it must stay again
    g.send_heartbeats(READY_AFTER_MS)
    assert begun(g) == [0]


def test_newer_agent_of_an_executor_supersedes_the_older_one() -> None:
    g = lent()
    commands = g.agent_connects("h2", executor="of h1")
    assert {command.agent for command in only(ev.DismissAgent, commands)} == {"h1"}
    assert ev.AcceptAgent(agent="h2") in commands
    assert [join.agent for join in only(ev.Join, commands)] == [""]


def test_agent_of_an_earlier_run_or_with_an_expired_lease_is_dismissed() -> None:
    for fresh in (True, False):
        g = lent()
        g.tick(ms=LEASE_MS)
        assert [type(command) for command in g.agent_connects("h1", fresh=fresh)] == [ev.DismissAgent]
        assert [type(command) for command in g.feed(ev.AgentHeartbeat(agent="h1"))] == [ev.DismissAgent]
    assert [type(command) for command in settled((A,)).agent_connects("h9", fresh=False)] == [ev.DismissAgent]


@pytest.mark.parametrize("classic", [True, False])
def test_instance_id_of_a_vanished_member_is_taken_in_kip_848_groups(classic: bool) -> None:
    g = lent(classic=classic)
    (join,) = only(ev.Join, g.feed(ev.AgentEnded(agent="h1", reason="killed")))
    assert join.takes_over is not classic
    (again,) = only(ev.Join, [*g.failed(), *g.tick(ms=1_000)])
    assert again.takes_over is not classic, "its last member may still run"
    g.settled(A)
    (later,) = only(ev.Join, [*g.failed(), *g.tick(ms=1_000)])
    assert not later.takes_over, "this run's own member had the instance id, and reported its end"


def test_move_does_not_wait_for_a_member_on_a_lost_agent() -> None:
    g = lent()
    g.agent_connects("h2")
    g.send_heartbeats(MOVE_INTERVAL_MS)
    g.run.placement.agents.refused("h1", has_others=True)
    g.run.slots.move(g.run.slots.all[0], "h2")
    assert [join.agent for join in only(ev.Join, g.feed(ev.AgentEnded(agent="h1", reason="x")))] == ["h2"]


def test_slot_that_cannot_join_from_an_agent_is_recalled_and_the_agent_avoided() -> None:
    g = ready((A,))
    begun(g)
    g.member_ended()
    g.send_heartbeats(g.run.rules.joining_budget_ms // 2 + 1_000)
    assert [join.agent for join in only(ev.Join, g.member_ended())] == [""]
    assert any("slot 0 has no assignment on" in text for text in g.warned())
    assert g.run.statistics().slot_recalls == (1,)
    g.settled(A)
    assert begun(g) == []
    g.send_heartbeats(AVOID_PAUSES_MS[0])
    assert begun(g) == [0]


def test_slot_whose_member_fails_on_an_agent_is_recalled_to_the_stream_reader() -> None:
    g = lent()
    g.agent_connects("h2")
    for _ in range(9):
        g.failed("GROUP_AUTHORIZATION_FAILED")
        g.send_heartbeats(5_000)
    assert hosts_of(g) == [""], "another agent may keep it from its partitions for as long"
    (warning,) = (text for text in g.warned() if "slot 0 has no assignment on" in text)
    assert "GROUP_AUTHORIZATION_FAILED" in warning and "memberHost=driver" in warning


def played(g: GroupHarness, seconds: int, refusing: Callable[[str], bool]) -> int:
    """Time passes, and slots join but for those on agents that are ``refusing``; returns for how many seconds slot 0
    had its partition."""
    read_s = 0
    for _ in range(seconds):
        if only(ev.CommitOffsets, commands := g.send_heartbeats(1_000)):
            g.commit_succeeds(commands)
        for slot in list(g.run.slots.all):
            if slot.state.kind is SlotState.MOVING:
                g.member_ended(slot.number)
            if slot.state.kind is SlotState.JOINING and slot.agent and refusing(slot.agent):
                g.failed("the broker refuses the join", slot=slot.number)
            elif slot.state.kind is SlotState.JOINING:
                g.settled((A, B, C)[slot.number], slot=slot.number) if slot.number < 3 else g.assigned(slot=slot.number)
        if g.run.closed:
            raise only(ev.Fail, g.history)[0].error
        g.start_moves()
        read_s += A in g.run.slots.all[0].partitions
    return read_s


@pytest.mark.parametrize("rules", [{}, {"auto_slots": True, "shrink_ms": 300_000}], ids=["fixed", "auto"])
@pytest.mark.parametrize("agents", [1, 2, 3, 5])
def test_run_whose_members_cannot_join_from_any_executor_reads_from_the_stream_reader(
    agents: int, rules: dict[str, object]
) -> None:
    """For example the executors' network has no way to the coordinator, or their role may not join the group."""
    g = settled((A,), joining_budget_ms=345_000, lease_ms=27_000, **rules)
    for number in range(agents):
        g.agent_connects(f"h{number}")
    assert played(g, 900, lambda agent: True) >= 0.8 * 900


def test_members_return_to_executors_that_can_join_again() -> None:
    g = settled((A,), joining_budget_ms=345_000, lease_ms=27_000)
    g.agent_connects("h0")
    played(g, 900, lambda agent: True)
    assert played(g, 3_600, lambda agent: True) >= 0.95 * 3_600, "it is tried more and more seldom"
    g.agent_connects("new")
    played(g, 60, lambda agent: True)
    assert hosts_of(g)[0] == "", "a new agent is not tried at once"
    played(g, AVOID_PAUSES_MS[-1] // 1_000, lambda agent: False)
    assert hosts_of(g)[0] != "", "members return when executors can join"


def test_one_executor_that_cannot_join_keeps_no_slot_from_the_others() -> None:
    g = settled((A,), joining_budget_ms=345_000, lease_ms=27_000)
    for number in range(3):
        g.agent_connects(f"h{number}")
    played(g, 300, lambda agent: agent == "h0")
    assert hosts_of(g) == ["h1"]
    g = settled((A,), (B,), (C,), joining_budget_ms=345_000, lease_ms=27_000)
    for number in range(3):
        g.agent_connects(f"h{number}")
    played(g, 60, lambda agent: False)
    assert sorted(hosts_of(g)) == ["h0", "h1", "h2"]
    for slot in g.run.slots.all:
        if slot.agent == "h0":
            g.failed("the broker refuses the join", slot=slot.number)
    played(g, 200, lambda agent: agent == "h0")
    g.agent_connects("h3")
    played(g, 60, lambda agent: agent == "h0")
    assert sorted(hosts_of(g)) == ["h1", "h2", "h3"], "a new executor gets a slot, because the others work"


# --- one slot for each agent -----------------------------------------------------------------------------------------


def growing(*hosts: str, slots: int = 1) -> GroupHarness:
    """A group with one slot for each agent, when the agents are ready."""
    g = GroupHarness(slots, auto_slots=True, shrink_ms=SHRINK_MS)
    g.start_stream()
    for slot, tp in zip(range(slots), (A, B, C), strict=False):
        g.settled(tp, slot=slot)
    for host in hosts:
        g.agent_connects(host)
    g.send_heartbeats(READY_AFTER_MS)
    return g


def joins(g: GroupHarness) -> list[tuple[int, str]]:
    return [(join.slot, join.agent) for join in only(ev.Join, g.start_moves())]


def test_slots_of_agents_that_connect_together_are_added_together() -> None:
    g = growing("h1", "h2", "h3")
    assert [slot for slot, _ in joins(g)] == [1, 2]
    assert sorted(hosts_of(g)) == ["h1", "h2", "h3"]
    assert joins(g) == []


def test_adding_slots_waits_for_new_agents_within_a_bound() -> None:
    g = growing("h1", "h2")
    others_come_and_go(g, ev.Join)
    assert [slot for slot, _ in joins(g)] == [1]


@pytest.mark.parametrize("apart_ms", [0, 1_000, 4_000, 6_000, 14_000, 20_000, 40_000])
def test_each_agent_has_a_member_within_a_bound_however_far_apart_they_connect(apart_ms: int) -> None:
    """On a busy machine executors start their agents minutes apart. No agent waits for another one beyond the bound."""
    g = growing()
    connected_ms: dict[str, int] = {}
    placed_ms: dict[str, int] = {}
    hosts, step_ms = ["h1", "h2", "h3"], 1_000
    for now_ms in range(0, 2 * apart_ms + READY_AFTER_MS + GATHER_MS_MAX + 2 * step_ms, step_ms):
        if len(connected_ms) < len(hosts) and now_ms >= apart_ms * len(connected_ms):
            host = hosts[len(connected_ms)]
            g.agent_connects(host)
            connected_ms[host] = now_ms
        g.start_moves()
        for slot in g.run.slots.all:
            if slot.state.kind is SlotState.MOVING:
                g.member_ended(slot.number)
            if slot.state.kind is SlotState.JOINING:
                g.settled((A, B, C)[slot.number], slot=slot.number)
            placed_ms.setdefault(slot.agent, now_ms)
        g.send_heartbeats(step_ms)
    late_ms = {host: placed_ms[host] - connected_ms[host] for host in hosts}
    assert max(late_ms.values()) <= READY_AFTER_MS + GATHER_MS_MAX + step_ms, late_ms
    assert sorted(hosts_of(g)) == hosts


def test_surplus_slot_leaves_when_its_agent_is_gone_for_long() -> None:
    g = growing("h1", "h2", slots=2)
    begun(g)
    back(g, A, B)
    g.feed(ev.AgentEnded(agent="h2", reason="its executor is gone"))
    g.settled(B, slot=1)
    begun(g)
    g.send_heartbeats(SHRINK_MS - 1_000)
    assert begun(g) == []
    g.send_heartbeats(1_000)
    assert g.start_moves() == [ev.Leave(slot=1, leave=True)]
    assert g.run.plannable() == {A: 100}
    assert g.run.is_gathered
    assert g.feed(ev.MemberFailed(slot=1, client=3, reason="late")) == []


def test_surplus_slot_leaves_between_two_batches_of_a_busy_query() -> None:
    """At the end of a batch its offsets are not committed yet: the next plan waits for that, within a bound."""
    g = growing("h1", slots=2)
    begun(g)
    back(g, A, B)
    g.send_heartbeats(SHRINK_MS)
    g.plan({B: (100, 150)})
    g.durable()
    assert begun(g) == [], "all offsets of the other slot are committed, but not those of the one that has to leave"
    assert g.run.placement.waits_until_ms() == g.clock() + MOVE_START_MS_MAX
    g.commit_succeeds()
    assert g.start_moves() == [ev.Leave(slot=1, leave=True)]
    assert "1 members were too many for the agents and topics; they leave the group" in g.logged()
    assert g.run.placement.waits_until_ms() is None


@pytest.mark.parametrize(("classic", "members"), [(True, 2), (False, 3)])
def test_no_more_slots_are_added_than_kafka_can_store(classic: bool, members: int) -> None:
    """The record of a classic group has the topic names of each member."""
    g = GroupHarness(1, auto_slots=True, classic=classic)
    g.start_stream({f"orders.{number}.".ljust(200, "x"): 6 for number in range(1_000)})
    g.assigned()
    for host in ("h1", "h2", "h3"):
        g.agent_connects(host)
    g.send_heartbeats(READY_AFTER_MS)
    for _ in range(2):
        g.start_moves()
    assert len(g.run.slots.all) == members
    assert sum("3 agents are ready, but only 2 members join" in text for text in g.logged()) == (members < 3)


def full(*refused: int, slots: int = 3) -> GroupHarness:
    """A group of as many agents and slots, in which the brokers' ``group.max.size`` has no place for these slots."""
    g = growing(*(f"h{number}" for number in range(slots)))
    joins(g)  # slot 0 moves as well
    g.member_ended()
    for slot in {*range(slots)} - {*refused}:
        g.settled((A, B, C)[slot], slot=slot)
    for slot in refused:
        g.failed("broker down", slot=slot)
    g.tick(ms=RETRY_PAUSES_MS[0])
    for slot in refused:
        g.failed("the group is full", slot=slot, group_full=True)
    return g


@pytest.mark.parametrize("refused", [(2,), (1, 2), (2, 1), (1,)], ids=str)
def test_a_query_gets_on_with_the_members_that_the_brokers_accept(refused: tuple[int, ...]) -> None:
    g = full(*refused)
    assert g.gathered(), "no batch waits for a member that was refused"
    assert g.start_moves() == [], "a member that has a place keeps it"
    assert sum(f"only {3 - len(refused)} members of this query have a place" in text for text in g.warned()) == 1
    assert only(ev.Join, g.send_heartbeats(FULL_PAUSE_MS - PING_MS)) == []
    tried = only(ev.Join, g.send_heartbeats(PING_MS))
    assert sorted(join.slot for join in tried) == sorted(refused)
    assert all(join.agent for join in tried) and g.run.counts.recalls == 0, "their agents are not to blame"
    warnings = len(g.warned())
    for slot in refused:
        g.failed("the group is full", slot=slot, group_full=True)
    assert len(g.warned()) == warnings, "that is reported once"
    g.send_heartbeats(FULL_PAUSE_MS)
    g.failed("broker down", slot=refused[0])
    assert not g.gathered() and not g.run.closed, "it is one of many members that fail, since now"
    g.tick(ms=RETRY_PAUSES_MS[0])
    for slot in refused:
        g.assigned(slot=slot)
    assert g.gathered() and [slot.state.kind for slot in g.run.slots.all] == [SlotState.ASSIGNED] * 3


def test_members_keep_their_places_in_a_full_group_while_agents_are_away_for_a_moment() -> None:
    g = full(1)
    g.feed(ev.AgentDisconnected(agent="h0"), ev.AgentDisconnected(agent="h1"))
    assert g.start_moves() == []


def test_refused_slot_joins_in_the_place_of_one_that_leaves() -> None:
    g = full(1)
    g.feed(ev.AgentEnded(agent=hosts_of(g)[1], reason="its executor is gone"))
    begun(g)
    g.send_heartbeats(SHRINK_MS)
    assert g.start_moves() == [ev.Leave(slot=2, leave=True)]
    assert not g.gathered(), "no member has the partitions of the one that leaves"
    assert [join.slot for join in only(ev.Join, g.send_heartbeats(LEAVE_MS_MAX))] == [1]


def test_refused_slot_leaves_first_when_its_agent_is_gone_for_long() -> None:
    g = full(2)
    g.feed(ev.AgentEnded(agent=hosts_of(g)[2], reason="its executor is gone"))
    begun(g)
    g.send_heartbeats(SHRINK_MS)
    assert g.start_moves() == []
    assert len(g.run.slots.all) == 2
    assert only(ev.Join, g.send_heartbeats(FULL_PAUSE_MS)) == []


def test_members_that_are_refused_while_their_former_ones_are_in_the_group_all_return() -> None:
    """Brokers count a static member that returns in addition to its former membership, until the session of that one
    ends."""
    g = full(slots=2)
    g.feed(*(ev.AgentEnded(agent=f"h{slot}", reason="its executor is gone") for slot in range(2)))
    for slot in range(2):
        g.failed("the group is full", slot=slot, group_full=True)
    assert [join.slot for join in only(ev.Join, g.tick(ms=RETRY_PAUSES_MS[0]))] == [1], "one joins soon, for all"
    g.assigned(A, B, slot=1)
    assert [join.slot for join in only(ev.Join, g.tick(ms=FULL_PAUSE_MS))] == [0]


def test_a_full_group_without_place_for_any_member_is_an_error() -> None:
    g = full(1, slots=2)
    while not g.run.closed:
        g.failed("the group is full", group_full=True)
        g.send_heartbeats(RETRY_PAUSES_MS[-1])
    (fail,) = only(ev.Fail, g.history)
    assert isinstance(fail.error, RebalanceTimeout) and "the group is full" in str(fail.error)


def test_last_slot_never_leaves() -> None:
    g = growing("h1")
    g.feed(ev.AgentEnded(agent="h1", reason="its executor is gone"))
    begun(g)
    g.send_heartbeats(2 * SHRINK_MS)
    assert begun(g) == []
    assert len(g.run.slots.all) == 1


def test_slot_that_is_added_again_continues_its_client_numbers() -> None:
    g = growing("h1", slots=2)
    begun(g)
    back(g, A, B)
    g.send_heartbeats(SHRINK_MS)
    assert begun(g) == [1]
    g.agent_connects("h2")
    g.send_heartbeats(READY_AFTER_MS)
    ((slot, _),) = joins(g)
    assert (slot, g.clients[1]) == (1, 3)


# --- the next plan ---------------------------------------------------------------------------------------------------


def running(target: int | None = None) -> RunHarness:
    """A run that has read a batch, with a ready agent; with a target an AvailableNow run."""
    run = RunHarness()
    if target is not None:
        run.set_target(dict.fromkeys(run.ends, target))
    run.batch()
    run.feed(ev.AgentConnected(agent="h1", executor="1"))
    run.pass_time(READY_AFTER_MS)
    return run


def test_plan_waits_for_a_moving_slot_and_includes_its_partitions() -> None:
    run = running()
    run.ends = dict.fromkeys(run.ends, 7)
    run.start = run.latest()
    assert set(run.start.ranges) == set(run.ends)
    assert [join.agent for join in only(ev.Join, run.history)] == ["", "h1"]


def test_plan_continues_without_a_slot_that_does_not_return() -> None:
    run = running()
    run.silent = {ev.Join}
    since_ms = run.clock()
    run.latest()
    assert RETURN_MS_MAX <= run.clock() - since_ms <= RETURN_MS_MAX + 1_000


def test_a_bounded_run_that_waits_recalls_slots_whose_offsets_cannot_be_committed() -> None:
    """Without transactions a commit needs members in the stream reader, and the wait may be for that commit."""
    run = running(target=7)
    run.ends = dict.fromkeys(run.ends, 3)
    run.start = run.latest()
    assert hosts_of(run) == ["h1"]
    run.group_state = "rebalancing"
    run.later(ev.TransactionsChecked(allowed=False), ms=2_000)
    with pytest.raises(RebalanceTimeout, match="stable assignment"):
        run.latest()
    assert len([text for text in run.logged() if "slot 0 moves to the stream reader" in text]) == 1


@pytest.mark.parametrize("drain", [True, False])
def test_slots_are_recalled_while_a_run_ends_if_transactions_are_refused_then(drain: bool) -> None:
    """An ACL was revoked during the last batch."""
    run = running(target=None if drain else 7)
    run.ends = dict.fromkeys(run.ends, 7)
    run.batch()
    assert hosts_of(run) == ["h1"]
    run.silent = {ev.CommitOffsets}
    run.later(ev.TransactionsChecked(allowed=False), ms=500)
    run.later(ev.OffsetCommitFailed(reason="transactions are denied"), ms=500)
    for ms in range(0, COMMIT_MS_MAX, PING_MS):
        run.later(ev.AgentHeartbeat(agent="h1"), ms=ms)
    run.latest(drain=drain)
    assert hosts_of(run) == [""]


def test_group_settles_by_slots_whatever_client_ids_the_broker_reports() -> None:
    """A classic broker still reports the client id of the member that had the instance id before."""
    assert slot_of("s", "spark-group-s-3") == slot_of("s", "spark-group-s-at-exec-1-3") == 3
    assert slot_of("s", "spark-group-t-3") is slot_of("s", "spark-group-s-x") is slot_of("s", "other") is None


def test_slot_has_recovered_from_failures_if_its_member_was_steady_when_its_agent_ended() -> None:
    g = ready((A,))
    begun(g)
    back(g, A)
    g.failed()
    g.tick(ms=100)
    g.settled(A)
    g.send_heartbeats(2 * JOINING_BUDGET_MS)
    assert only(ev.Join, g.feed(ev.AgentEnded(agent="h1", reason="killed")))
    assert only(ev.Fail, g.failed()) == []
