"""How a run begins: a new stream, a stream that continues, a batch that is replayed."""

from kit.harness import STREAM, Commands, GroupHarness, only, tps

from spark_group_source.group import events as ev
from spark_group_source.group.offsets import StreamOffset
from spark_group_source.group.states import RunState

A, B, C, D = tps("orders", 0, 1, 2, 3)


def test_a_new_stream_joins_with_every_slot() -> None:
    group = GroupHarness(slots=3)
    commands = group.born()
    assert commands == [group.join(slot) for slot in range(3)]
    assert group.machine.stream == STREAM and group.machine.seq == -1


def test_nothing_joins_before_a_stream_is_named(fresh: GroupHarness) -> None:
    assert fresh.assigned(A) == []
    assert fresh.feed(ev.Tick(), ev.TopicsSeen(topics=("other",))) == []
    assert fresh.machine.next_deadline_ms() is None


def test_the_first_assignment_founds_the_run_once_every_partition_has_a_position(pair: GroupHarness) -> None:
    assert only(ev.FetchCommitted, pair.assigned(A, B, slot=0)) == [ev.FetchCommitted(partitions=(A, B))]
    pair.assigned(C, slot=1)
    assert not pair.gathered() and not pair.machine.positions.resolved
    pair.committed({A: 5, B: 6})
    assert not pair.gathered()
    pair.committed({C: 7})
    assert pair.gathered()
    assert pair.machine.plannable() == {A: 5, B: 6, C: 7}


def test_more_members_than_partitions_are_idle_and_block_nothing() -> None:
    group = GroupHarness(slots=3)
    group.born({"orders": 1})
    group.settled(A, slot=0)
    group.assigned(slot=1)
    assert not group.gathered()  # slot 2 has not heard from Kafka yet
    group.assigned(slot=2)
    assert group.gathered()
    assert group.plan({A: (100, 110)}) == []
    assert only(ev.Echo, group.durable()) == [ev.Echo(offsets={A: 110}, stream=STREAM, seq=0)]
    assert group.machine.statistics().assigned == (1, 0, 0)


def test_a_restart_after_a_durable_batch_goes_on_from_its_end(fresh: GroupHarness) -> None:
    commands = fresh.durable({A: (100, 150), B: (40, 40)})
    assert commands == [fresh.join()]
    fresh.assigned(A, B)
    commands = fresh.committed({A: 100, B: 40})
    # The crash came between the sink's commit and the echo: Kafka is behind, and is brought forward.
    assert fresh.machine.plannable() == {A: 150, B: 40}
    assert commands == [ev.Echo(offsets={A: 150}, stream=STREAM, seq=7)]
    assert fresh.machine.seq == 7


def test_a_restart_in_the_middle_of_a_batch_holds_its_partitions_until_it_is_durable(fresh: GroupHarness) -> None:
    replayed = StreamOffset(group="etl", stream=STREAM, seq=3, known={"orders": 2}, ranges={A: (100, 150), B: (40, 40)})
    assert fresh.replay(replayed) == [fresh.join()]
    assert fresh.machine.plan is not None
    assert fresh.machine.seq == 2
    fresh.assigned(A, B)
    fresh.committed({A: 100, B: 40})
    assert releases(fresh.revoking(A, B)) == 0
    fresh.feed(ev.Durable(offset=replayed))
    assert releases(fresh.echoed()) == 1
    assert fresh.machine.seq == 3


def test_a_replay_that_is_durable_before_its_partitions_come_moves_them_on(fresh: GroupHarness) -> None:
    replayed = StreamOffset(group="etl", stream=STREAM, seq=3, known={"orders": 2}, ranges={A: (100, 150)})
    fresh.replay(replayed)
    fresh.assigned(A)
    fresh.feed(ev.Durable(offset=replayed))
    commands = fresh.committed({A: 100})
    assert fresh.machine.plannable() == {A: 150}
    assert commands == [ev.Echo(offsets={A: 150}, stream=STREAM, seq=3)]


def test_a_replay_that_is_durable_before_anyone_knows_what_kafka_has_counts_when_its_partitions_are_lost(
    fresh: GroupHarness,
) -> None:
    replayed = StreamOffset(group="etl", stream=STREAM, seq=3, known={"orders": 2}, ranges={A: (100, 150), B: (40, 40)})
    fresh.replay(replayed)
    fresh.assigned(A, B)
    fresh.feed(ev.Durable(offset=replayed))
    fresh.lost(A, B)
    assert fresh.machine.statistics().maybe_twice == 50


def test_the_plan_of_this_run_may_be_read_again(group: GroupHarness) -> None:
    group.settled(A)
    offset = group.offset({A: (100, 150)}, 0)
    group.plan({A: (100, 150)})
    assert group.feed(ev.Reading(offset=offset)) == []


def test_an_empty_first_batch_names_the_stream_and_is_durable(group: GroupHarness) -> None:
    group.settled(A)
    group.plan({})
    assert group.machine.plan is not None
    assert group.durable() == []
    assert group.machine.seq == 0


def test_closing_leaves_with_every_member_and_then_ignores_everything(pair: GroupHarness) -> None:
    pair.settled(A)
    assert pair.close(leave=True) == [ev.Leave(slot=0, leave=True), ev.Leave(slot=1, leave=True)]
    assert pair.machine.closed
    after: Commands = []
    for event in (
        ev.Tick(),
        ev.TopicsSeen(topics=("other",)),
        ev.Durable(offset=pair.offset({A: (100, 150)}, 9)),
        ev.EchoDone(offsets={A: 1}),
    ):
        after += pair.feed(event)
    after += pair.assigned(B) + pair.revoking(A) + pair.failed() + pair.fenced()
    assert after == []
    assert pair.machine.next_deadline_ms() is None


def test_a_run_that_never_began_closes_without_a_word(fresh: GroupHarness) -> None:
    assert fresh.feed(ev.Stopping()) == []
    assert fresh.machine.state is RunState.CLOSED


def releases(commands: Commands) -> int:
    return len(only(ev.Release, commands))
