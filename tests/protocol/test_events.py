"""Events and commands are values; a run keeps a history of them."""

import dataclasses
import typing

from kit.harness import GroupHarness, tps

from spark_group_source.errors import BrokerUnavailable
from spark_group_source.model import TopicPartition
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.outbox import HISTORY_LINES_MAX
from spark_group_source.protocol.statistics import Statistics

A, B = tps("orders", 0, 1)


def test_events_commands_and_steps_are_frozen_slotted_and_keyword_only() -> None:
    for kind in [kind for union in (ev.Event, ev.Command, ev.Step) for kind in typing.get_args(union)]:
        assert kind.__dataclass_params__.frozen and "__slots__" in vars(kind), kind
        assert all(field.kw_only for field in dataclasses.fields(kind)), kind


def test_history_contains_events_and_commands_with_their_time(group: GroupHarness) -> None:
    group.clock.advance(ms=5)
    group.assigned(A)
    assert group.run._out.history().splitlines() == [
        "0 TopicsListed(topics=1{orders: 4})",
        (
            "0   -> Join(slot=0, client=1, topics=1[orders], client_id=spark-group-9f2c-0, instance_id=etl.9f2c.0, "
            "agent=, takes_over=False)"
        ),
        "5 Assigned(slot=0, client=1, partitions=1[orders-0], generation=1)",
        (
            "5   -> FetchCommittedOffsets(partitions=1[orders-0], notes_only=3[orders-1, orders-2, orders-3], "
            "topics=1[orders])"
        ),
    ]
    group.committed({A: 7})
    group.plan({A: (7, 9)})
    assert "5 Planned(offset=batch 0 of 9f2c 1{orders-0: [7,9)})" in group.run._out.history()


def test_history_is_bounded_in_lines_and_width(group: GroupHarness) -> None:
    many = tuple(TopicPartition("orders", p) for p in range(5_000))
    for _ in range(HISTORY_LINES_MAX):
        group.feed(ev.LookupFailed(partitions=many, error=BrokerUnavailable("x")))
    lines = group.run._out.history().splitlines()
    assert len(lines) == HISTORY_LINES_MAX
    assert max(map(len, lines)) < 250


def test_statistics_are_a_copy(group: GroupHarness) -> None:
    before = group.run.statistics()
    group.settled(A, B)
    assert before.assigned == (0,) and before.state == "gathering"
    after = group.run.statistics()
    assert (after.assigned, after.slots, after.generation, after.uncommitted_partitions) == ((2,), ("assigned",), 1, 0)
    assert isinstance(after, Statistics) and after.as_dict()["assigned"] == (2,)
    after.rebalances += 1
    assert group.run.statistics().rebalances == 1
