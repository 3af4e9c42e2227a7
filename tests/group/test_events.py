"""Events and commands are values; the machine tells its story."""

import dataclasses
import pickle
import typing

import pytest
from kit.harness import GroupHarness, tps

from spark_group_source.errors import BrokerUnavailable, Fenced, InvariantBroken
from spark_group_source.group import events as ev
from spark_group_source.group.offsets import StreamOffset
from spark_group_source.group.outbox import STORY_LINES_MAX
from spark_group_source.group.statistics import Statistics
from spark_group_source.model import EARLIEST, OffsetRange, TopicPartition

A, B = tps("orders", 0, 1)
OFFSET = StreamOffset(group="etl", stream="9f2c", seq=3, known={"orders": 2}, ranges={A: (1, 2)})

EXAMPLES: list[ev.Event | ev.Command | ev.Step] = [
    ev.Assigned(slot=0, client=1, partitions=(A,), generation=3),
    ev.Revoking(slot=0, client=1, partitions=(A,), eager=True),
    ev.Lost(slot=0, client=1, partitions=(A,)),
    ev.MemberFailed(slot=0, client=1, reason="x"),
    ev.MemberFenced(slot=0, client=1, reason="x"),
    ev.MemberEnded(slot=0, client=1),
    ev.HostCame(host="h1", executor="7", name="worker-1", fresh=False),
    ev.HostHeard(host="h1"),
    ev.HostStocked(host="h1", stock=(ev.Buffered(slot=0, bytes=100, rows=2),)),
    ev.TaskRead(seq=3, memory={A: 1}, brokers={B: 2}, lost=(OffsetRange(B, 3, 5),)),
    ev.HostCut(host="h1"),
    ev.HostGone(host="h1", reason="x"),
    ev.TransactionsSeen(allowed=True),
    ev.Boundary(),
    ev.Durable(offset=OFFSET),
    ev.Planned(offset=OFFSET),
    ev.Closing(leave=True),
    ev.Asked(start=OFFSET, name="9f2c"),
    ev.Reading(offset=OFFSET),
    ev.TargetAsked(),
    ev.TargetTaken(ends={A: 1}),
    ev.Stopping(durable=3),
    ev.Broken(error=Fenced("x", group="etl")),
    ev.CommittedRead(offsets={A: ev.Committed(offset=1, stream="9f2c"), B: None}),
    ev.StartsResolved(offsets={A: 1}),
    ev.LookupFailed(partitions=(A,), error=BrokerUnavailable("x")),
    ev.EchoDone(offsets={A: 1}),
    ev.EchoFailed(reason="x"),
    ev.TopicsSeen(topics=("orders",)),
    ev.NotReplaced(slot=0),
    ev.ReplacedUnknown(slot=0, reason="x", final=True),
    ev.Replaced(reason="x"),
    ev.TopicsListed(topics={"orders": 2}),
    ev.GroupSeen(state="stable", given={"c": frozenset({A})}),
    ev.Looked(ends={A: 1}, took_ms=2),
    ev.NotAnswered(error=BrokerUnavailable("x", op="y")),
    ev.RecordsGone(offsets={A: 1}, reason="x"),
    ev.Tick(),
    ev.Join(slot=0, client=1, topics=("orders",)),
    ev.Subscribe(slot=0, topics=("orders",)),
    ev.Release(slot=0, client=1),
    ev.ReleaseAll(slot=0, client=1),
    ev.Leave(slot=0, leave=True),
    ev.Admit(host="h1"),
    ev.Dismiss(host="h1", reason="x"),
    ev.FetchCommitted(partitions=(A,)),
    ev.ResolveStarts(starts={A: EARLIEST}),
    ev.Echo(offsets={A: 1}, stream="9f2c", seq=3),
    ev.AskReplaced(slot=0),
    ev.Say(text="x", warn=True),
    ev.Fail(error=Fenced("x", group="etl")),
    ev.ListTopics(),
    ev.TakeTarget(),
    ev.Wait(until_ms=5),
    ev.Describe(),
    ev.Look(ends=(A,), topics=("orders",)),
    ev.End(leave=True),
    ev.Answer(offset=OFFSET),
    ev.Raise(error=Fenced("x", group="etl")),
]


def test_the_examples_are_all_of_them() -> None:
    kinds = {kind for union in (ev.Event, ev.Command, ev.Step) for kind in typing.get_args(union)}
    assert {type(example) for example in EXAMPLES} == {*kinds, ev.ReleaseAll}


@pytest.mark.parametrize("value", EXAMPLES, ids=lambda value: type(value).__name__)
def test_events_commands_and_steps_are_frozen_slotted_and_travel(value: ev.Event | ev.Command | ev.Step) -> None:
    assert not hasattr(value, "__dict__")
    name = next((field.name for field in dataclasses.fields(value)), "anything")
    with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
        setattr(value, name, 1)
    again = pickle.loads(pickle.dumps(value))
    if isinstance(value, ev.Fail | ev.Broken | ev.Raise | ev.LookupFailed | ev.NotAnswered):  # errors have no equality
        assert str(again.error) == str(value.error) and again.error.fields == value.error.fields
    else:
        assert again == value
    assert all(field.kw_only for field in dataclasses.fields(value))


def test_the_story_tells_events_and_orders_with_their_time(group: GroupHarness) -> None:
    group.clock.advance(ms=5)
    group.assigned(A)
    assert group.machine._out.story().splitlines() == [
        "0 TopicsListed(topics=1{orders: 4})",
        (
            "0   -> Join(slot=0, client=1, topics=1[orders], client_id=spark-group-9f2c-0, instance_id=etl.9f2c.0, "
            "host=, takes=False)"
        ),
        "5 Assigned(slot=0, client=1, partitions=1[orders-0], generation=1)",
        "5   -> FetchCommitted(partitions=1[orders-0], beside=3[orders-1, orders-2, orders-3])",
    ]
    group.committed({A: 7})
    group.plan({A: (7, 9)})
    assert "5 Planned(offset=batch 0 of 9f2c 1{orders-0: [7,9)})" in group.machine._out.story()


def test_the_story_is_bounded_in_lines_and_width(group: GroupHarness) -> None:
    many = tuple(TopicPartition("orders", p) for p in range(5_000))
    for _ in range(STORY_LINES_MAX):
        group.feed(ev.LookupFailed(partitions=many, error=BrokerUnavailable("x")))
    lines = group.machine._out.story().splitlines()
    assert len(lines) == STORY_LINES_MAX
    assert max(map(len, lines)) < 250


def test_a_broken_rule_carries_the_story(group: GroupHarness) -> None:
    group.settled(A)
    with pytest.raises(InvariantBroken) as broken:
        group.plan({A: (90, 150)})
    assert "orders-0[90,150) is planned, but the partition is at 100" in str(broken.value)
    assert "CommittedRead" in str(broken.value)


def test_statistics_are_a_copy(group: GroupHarness) -> None:
    before = group.machine.statistics()
    group.settled(A, B)
    assert before.assigned == (0,) and before.state == "gathering"
    after = group.machine.statistics()
    assert (after.assigned, after.slots, after.generation, after.uncommitted) == ((2,), ("assigned",), 1, 0)
    assert isinstance(after, Statistics) and after.as_dict()["assigned"] == (2,)
    after.rebalances += 1
    assert group.machine.statistics().rebalances == 1
