"""Which slot lives where: lent to agents that stay, moved at boundaries alone, called home from those that are gone."""

import pytest
from kit.harness import STREAM, GroupHarness, only, tps
from kit.run_harness import RunHarness

from spark_group_source.model import TopicPartition
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.identifiers import slot_of
from spark_group_source.protocol.placement import (
    BACK_MS_MAX,
    BEGIN_MS_MAX,
    CLOSE_MS_MAX,
    HOST_PUT_OFF_MS,
    LOOK_EVERY_MS,
    MOVE_PUT_OFF_MS,
    STAY_MS,
    STAYS_MS,
    TOGETHER_MS_MAX,
)

A, B, C = tps("orders", 0, 1, 2)
LEASE_MS = 45_000
SHRINK_MS = 120_000


def hosts_of(g: GroupHarness) -> list[str]:
    return [slot.host for slot in g.run.slots.all]


def begun(g: GroupHarness) -> list[int]:
    """The slots whose members are asked to close at a boundary."""
    return [leave.slot for leave in only(ev.Leave, g.feed(ev.BatchBoundary()))]


def settled(*slots: tuple[TopicPartition, ...], **rules: object) -> GroupHarness:
    """A group whose slots have these partitions, all committed."""
    g = GroupHarness(len(slots), **rules)
    g.start_stream()
    for slot, partitions in enumerate(slots):
        g.settled(*partitions, slot=slot)
    return g


def ready(*slots: tuple[TopicPartition, ...], **rules: object) -> GroupHarness:
    """The same, with an agent that has stayed."""
    g = settled(*slots, **rules)
    g.agent_connects("h1")
    g.tick(ms=STAY_MS)
    return g


def back(g: GroupHarness, *partitions: TopicPartition) -> None:
    """The former member of each slot has closed, and the next one is back with its partition."""
    for slot, tp in enumerate(partitions):
        g.member_ended(slot)
        g.settled(tp, slot=slot)


def lent(**rules: object) -> GroupHarness:
    """One slot that lives at agent h1, and is back with A."""
    g = ready((A,), **rules)
    begun(g)
    back(g, A)
    return g


# --- transactions ---------------------------------------------------------------------------------------------------


def test_nothing_is_lent_before_the_brokers_took_a_transaction() -> None:
    g = settled((A,))
    g.feed(ev.TransactionsChecked(allowed=False))
    g.agent_connects("h1")
    g.tick(ms=STAY_MS)
    assert begun(g) == []
    g.feed(ev.TransactionsChecked(allowed=True))
    assert begun(g) == [0]


@pytest.mark.parametrize("holds", [False, True])
def test_slots_come_home_when_transactions_are_refused(holds: bool) -> None:
    """Where members commit, they do so on threads of the stream reader; what they have is on its way to nobody."""
    g = lent()
    g.feed(ev.TransactionsChecked(allowed=False))
    if holds:
        g.revoking(A)
    commands = g.feed(ev.BatchBoundary())
    (leave,), (join,) = only(ev.Leave, commands), only(ev.Join, commands)
    assert (leave.slot, leave.leave) == (0, False)
    assert (join.agent, join.client) == ("", 3)
    g.assigned(A)
    assert begun(g) == [] and hosts_of(g) == [""]


# --- lending --------------------------------------------------------------------------------------------------------


def test_a_slot_moves_by_a_close_here_and_a_join_there_under_the_same_name() -> None:
    g = settled((A, B))
    g.agent_connects("h1", executor="7")
    g.tick(ms=STAY_MS - 1)
    assert begun(g) == [], "an agent must have stayed"
    g.send_heartbeats(1_000)
    assert g.feed(ev.BatchBoundary()) == [ev.Leave(slot=0, leave=False)]
    assert g.revoking(A) == g.assigned(C) == g.failed() == g.lost(A) == [], "what a moving member says is ignored"
    (join,) = g.member_ended()
    assert isinstance(join, ev.Join)
    assert (join.agent, join.client, join.instance_id) == ("h1", 2, g.join().instance_id)
    assert slot_of(STREAM, join.client_id) == 0 and "7" in join.client_id
    assert g.feed(ev.MemberEnded(slot=0, client=1)) == []
    g.settled(A, B)
    assert g.run.plannable() == {A: 100, B: 100}
    assert (g.run.statistics().partitions_lost, g.run.statistics().possible_duplicates) == (0, 0)


def test_an_agent_that_stays_has_slots_soon_however_often_a_batch_ends() -> None:
    g = settled((A,))
    g.agent_connects("h1")
    moves = []
    for _ in range((STAY_MS + LOOK_EVERY_MS) // 100):
        g.tick(ms=100)
        moves += begun(g)
    assert moves == [0]


def test_agents_that_come_soon_after_one_another_have_each_a_part_of_the_slots_at_once() -> None:
    """Whoever has moved stays for a while: what the first one is lent the second one does not have soon."""
    g = settled((A,), (B,))
    g.agent_connects("h1")
    g.send_heartbeats(2_000)
    g.agent_connects("h2")
    g.send_heartbeats(STAY_MS - 2_000)
    assert begun(g) == []
    g.send_heartbeats(2_000)
    assert begun(g) == [0, 1]
    assert sorted(hosts_of(g)) == ["h1", "h2"]


def others_come_and_go(g: GroupHarness, nothing: type) -> None:
    """There is always an agent that has just come, until it was waited enough: nothing of that kind is ordered."""
    for number in range(TOGETHER_MS_MAX // 1_000):
        g.agent_connects(f"x{number}")
        assert only(nothing, g.feed(ev.BatchBoundary())) == []
        g.feed(ev.AgentEnded(agent=f"x{number - 1}", reason="it left"))
        g.send_heartbeats(1_000)


def test_an_agent_waits_for_its_slots_only_so_long_while_others_come() -> None:
    g = settled((A,), (B,))
    g.agent_connects("h1")
    others_come_and_go(g, ev.Leave)
    assert begun(g) == [0, 1]
    assert hosts_of(g) == ["h1", "h1"]


def test_nothing_moves_before_the_batch_is_done_and_kafka_has_its_offsets() -> None:
    g = ready((A,))
    g.plan({A: (100, 150)})
    assert begun(g) == []
    g.durable()
    assert begun(g) == []
    assert g.run.placement.waits_until_ms() == g.clock() + BEGIN_MS_MAX
    g.commit_succeeds()
    assert begun(g) == [0]


def test_a_move_that_cannot_begin_is_put_off_and_the_plan_goes_on() -> None:
    g = ready((A,))
    g.plan({A: (100, 150)})
    g.durable()
    begun(g)
    g.tick(ms=BEGIN_MS_MAX)
    begun(g)
    assert g.run.placement.waits_until_ms() is None
    g.commit_succeeds()
    assert begun(g) == []
    g.send_heartbeats(MOVE_PUT_OFF_MS)
    assert begun(g) == [0]


def test_slots_are_spread_evenly() -> None:
    g = settled((A,), (B,), (C,))
    g.agent_connects("h1")
    g.agent_connects("h2")
    g.tick(ms=STAY_MS)
    assert begun(g) == [0, 1, 2]
    assert sorted(hosts_of(g)) == ["h1", "h1", "h2"]


def test_a_slot_goes_to_a_newcomer_only_from_an_agent_that_has_two_more_and_not_at_once_again() -> None:
    g = ready((A,), (B,), (C,))
    begun(g)
    back(g, A, B, C)
    g.agent_connects("h2")
    g.send_heartbeats(STAY_MS)
    assert begun(g) == []
    g.send_heartbeats(STAYS_MS)
    assert len(begun(g)) == 1
    assert sorted(hosts_of(g)) == ["h1", "h1", "h2"]
    g.member_ended(2)
    g.settled(C, slot=2)
    g.agent_connects("h3")
    g.send_heartbeats(STAY_MS)
    assert begun(g) == [1]
    assert sorted(hosts_of(g)) == ["h1", "h2", "h3"]


def test_a_place_is_taken_from_a_member_that_does_not_close_in_time_and_from_no_other() -> None:
    g = ready((A,), (B,), classic=False)
    assert begun(g) == [0, 1]
    assert [join.takes_over for join in only(ev.Join, g.member_ended(0))] == [False]
    assert [(join.agent, join.takes_over) for join in only(ev.Join, g.tick(ms=CLOSE_MS_MAX))] == [("h1", True)]


def test_a_slot_that_moves_keeps_its_topics_until_it_is_back() -> None:
    """Of another subscription of who comes back a classic broker takes no notice."""
    g = ready((A,))
    begun(g)
    assert g.feed(ev.TopicsChanged(topics=("orders", "new"))) == []
    (join,) = only(ev.Join, g.member_ended())
    assert join.topics == ("orders",)
    assert ev.Subscribe(slot=0, topics=("orders", "new")) in g.assigned(A)


@pytest.mark.parametrize("rules", [{"member_host": "driver"}, {"classic": False}])
def test_slots_stay_at_home_where_they_are_to_or_each_move_would_be_a_rebalance(rules: dict[str, object]) -> None:
    g = GroupHarness(1, **rules)
    if "classic" in rules:
        g.feed(ev.TargetRequested(), ev.TargetRead(ends={}))  # a bounded run
    g.start_stream()
    g.settled(A)
    g.agent_connects("h1")
    g.agent_connects("h2")
    g.tick(ms=STAY_MS)
    assert begun(g) == []
    assert len([text for text in g.logged() if "no places of their own" in text]) == (1 if "classic" in rules else 0)


# --- agents that are gone -------------------------------------------------------------------------------------------


def test_slots_of_a_lost_host_count_as_lost_and_join_at_home_at_once() -> None:
    g = lent()
    g.plan({A: (100, 150)})
    dismiss, join = g.feed(ev.AgentEnded(agent="h1", reason="its executor is gone"))
    assert isinstance(dismiss, ev.DismissAgent) and isinstance(join, ev.Join)
    assert (join.agent, join.client) == ("", 3)
    assert (g.run.statistics().partitions_lost, g.run.statistics().possible_duplicates) == (1, 50)
    # Late reports of the old member are ignored.
    assert g.feed(ev.MemberFenced(slot=0, client=2, reason="FENCED_INSTANCE_ID")) == []
    assert g.feed(ev.Assigned(slot=0, client=2, partitions=(A,))) == []


def test_they_join_at_another_agent_if_there_is_one() -> None:
    g = lent()
    g.agent_connects("h2")
    g.send_heartbeats(STAY_MS)
    assert [j.agent for j in only(ev.Join, g.feed(ev.AgentEnded(agent="h1", reason="x")))] == ["h2"]


def test_a_lease_ends_without_a_sign_of_life_and_not_with_one() -> None:
    g = lent()
    g.send_heartbeats(2 * LEASE_MS)
    assert hosts_of(g) == ["h1"]
    assert only(ev.Join, g.tick(ms=LEASE_MS - 1)) == []
    assert [join.agent for join in only(ev.Join, g.tick(ms=1))] == [""]


def test_a_channel_that_is_cut_is_no_lost_host_but_nothing_is_lent_to_it() -> None:
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
    g.send_heartbeats(STAY_MS)
    assert begun(g) == [0]


def test_a_newer_agent_of_the_same_executor_takes_its_twins_place() -> None:
    g = lent()
    commands = g.agent_connects("h2", executor="of h1")
    assert {command.agent for command in only(ev.DismissAgent, commands)} == {"h1"}
    assert ev.AcceptAgent(agent="h2") in commands
    assert [join.agent for join in only(ev.Join, commands)] == [""]


def test_an_agent_of_a_former_run_or_whose_lease_is_over_is_dismissed() -> None:
    for fresh in (True, False):
        g = lent()
        g.tick(ms=LEASE_MS)
        assert [type(command) for command in g.agent_connects("h1", fresh=fresh)] == [ev.DismissAgent]
        assert [type(command) for command in g.feed(ev.AgentHeartbeat(agent="h1"))] == [ev.DismissAgent]
    assert [type(command) for command in settled((A,)).agent_connects("h9", fresh=False)] == [ev.DismissAgent]


@pytest.mark.parametrize("classic", [True, False])
def test_the_place_of_a_member_that_vanished_is_taken_where_a_broker_does_not_give_it_away(classic: bool) -> None:
    g = lent(classic=classic)
    (join,) = only(ev.Join, g.feed(ev.AgentEnded(agent="h1", reason="killed")))
    assert join.takes_over is not classic
    (again,) = only(ev.Join, [*g.failed(), *g.tick(ms=1_000)])
    assert again.takes_over is not classic, "it was not heard to close since"
    g.settled(A)
    (later,) = only(ev.Join, [*g.failed(), *g.tick(ms=1_000)])
    assert not later.takes_over, "this run's own member had the place, and its end was heard"


def test_a_host_that_is_lost_while_its_member_closes_is_not_waited_for() -> None:
    g = lent()
    g.agent_connects("h2")
    g.send_heartbeats(STAYS_MS)
    g.run.placement.hosts.put_off("h1")
    g.run.slots.move(g.run.slots.all[0], "h2")
    assert [join.agent for join in only(ev.Join, g.feed(ev.AgentEnded(agent="h1", reason="x")))] == ["h2"]


def test_a_slot_that_cannot_join_from_an_agent_is_called_home_and_the_agent_is_put_off() -> None:
    g = ready((A,))
    begun(g)
    g.member_ended()
    g.send_heartbeats(g.run.rules.joining_budget_ms // 2 + 1_000)
    assert [join.agent for join in only(ev.Join, g.member_ended())] == [""]
    g.settled(A)
    assert begun(g) == []
    g.send_heartbeats(HOST_PUT_OFF_MS)
    assert begun(g) == [0]


def test_a_slot_whose_member_fails_at_an_agent_is_called_home_too() -> None:
    g = lent()
    for _ in range(9):
        g.failed()
        g.send_heartbeats(5_000)
    assert hosts_of(g) == [""]


# --- as many slots as agents ----------------------------------------------------------------------------------------


def growing(*hosts: str, slots: int = 1) -> GroupHarness:
    """A group of as many slots as agents, when these have stayed."""
    g = GroupHarness(slots, auto_slots=True, shrink_ms=SHRINK_MS)
    g.start_stream()
    for slot, tp in zip(range(slots), (A, B, C), strict=False):
        g.settled(tp, slot=slot)
    for host in hosts:
        g.agent_connects(host)
    g.send_heartbeats(STAY_MS)
    return g


def joins(g: GroupHarness) -> list[tuple[int, str]]:
    return [(join.slot, join.agent) for join in only(ev.Join, g.feed(ev.BatchBoundary()))]


def test_agents_that_came_together_bring_their_slots_together() -> None:
    g = growing("h1", "h2", "h3")
    assert [slot for slot, _ in joins(g)] == [1, 2]
    assert sorted(hosts_of(g)) == ["h1", "h2", "h3"]
    assert joins(g) == []


def test_slots_wait_for_those_that_are_coming_but_not_for_long() -> None:
    g = growing("h1", "h2")
    others_come_and_go(g, ev.Join)
    assert [slot for slot, _ in joins(g)] == [1]


def test_a_slot_too_many_leaves_when_its_agent_stayed_away_for_long() -> None:
    g = growing("h1", "h2", slots=2)
    begun(g)
    back(g, A, B)
    g.feed(ev.AgentEnded(agent="h2", reason="its executor is gone"))
    g.settled(B, slot=1)
    begun(g)
    g.send_heartbeats(SHRINK_MS - 1_000)
    assert begun(g) == []
    g.send_heartbeats(1_000)
    assert g.feed(ev.BatchBoundary()) == [ev.Leave(slot=1, leave=True)]
    assert g.run.plannable() == {A: 100}
    assert g.run.is_gathered
    assert g.feed(ev.MemberFailed(slot=1, client=3, reason="late")) == []


def test_the_last_slot_never_leaves() -> None:
    g = growing("h1")
    g.feed(ev.AgentEnded(agent="h1", reason="its executor is gone"))
    begun(g)
    g.send_heartbeats(2 * SHRINK_MS)
    assert begun(g) == []
    assert len(g.run.slots.all) == 1


def test_a_slot_that_comes_again_is_told_from_its_former_self() -> None:
    g = growing("h1", slots=2)
    begun(g)
    back(g, A, B)
    g.send_heartbeats(SHRINK_MS)
    assert begun(g) == [1]
    g.agent_connects("h2")
    g.send_heartbeats(STAY_MS)
    ((slot, _),) = joins(g)
    assert (slot, g.clients[1]) == (1, 3)


# --- the next plan --------------------------------------------------------------------------------------------------


def running() -> RunHarness:
    """A run that has read a batch, with an agent that has stayed."""
    run = RunHarness()
    run.batch()
    run.feed(ev.AgentConnected(agent="h1", executor="1"))
    run.pass_time(STAY_MS)
    return run


def test_the_plan_waits_for_a_slot_that_moves_and_misses_none_of_its_partitions() -> None:
    run = running()
    run.ends = dict.fromkeys(run.ends, 7)
    run.start = run.latest()
    assert set(run.start.ranges) == set(run.ends)
    assert [join.agent for join in only(ev.Join, run.history)] == ["", "h1"]


def test_the_plan_goes_on_without_a_slot_that_does_not_come_back() -> None:
    run = running()
    run.silent = {ev.Join}
    since_ms = run.clock()
    run.latest()
    assert BACK_MS_MAX <= run.clock() - since_ms <= BACK_MS_MAX + 1_000


def test_members_are_settled_by_their_slots_whatever_the_broker_calls_them() -> None:
    """A classic broker goes on to show the client id of who had the place before."""
    assert slot_of("s", "spark-group-s-3") == slot_of("s", "spark-group-s-at-exec-1-3") == 3
    assert slot_of("s", "spark-group-t-3") is slot_of("s", "spark-group-s-x") is slot_of("s", "other") is None
