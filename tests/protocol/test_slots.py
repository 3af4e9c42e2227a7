"""Members that join, fail, rejoin or are replaced; changed subscriptions; and the close of a run."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from kit.contradictions import require_consistent
from kit.harness import GROUP, JOINING_BUDGET_MS, STREAM, Commands, GroupHarness, only, tps

from spark_group_source.errors import Fenced, InvariantBroken, RebalanceTimeout
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.data_loss import GRACE_MS
from spark_group_source.protocol.offsets import StreamOffset
from spark_group_source.protocol.rules import SLOTS_MAX, Rules, StartingPosition
from spark_group_source.protocol.slots import (
    CLOSE_MS_MAX,
    LEAVE_MS_MAX,
    STEADY_MS,
    ClosedState,
    Membership,
    RevokingState,
    Slot,
    Slots,
)

A, B, C, D = tps("orders", 0, 1, 2, 3)
(PAYMENTS,) = tps("payments", 0)


# --- start and close of a run ----------------------------------------------------------------------------------------


def test_every_slot_of_a_new_stream_joins() -> None:
    group = GroupHarness(slots=3)
    commands = group.start_stream()
    assert commands == [group.join(slot) for slot in range(3)]
    assert group.run.stream == STREAM and group.run.seq == -1


def test_no_slot_joins_before_the_stream_has_an_id(fresh: GroupHarness) -> None:
    assert fresh.assigned(A) == []
    assert fresh.feed(ev.Tick(), ev.TopicsChanged(topics=("other",))) == []
    assert fresh.run.next_deadline_ms() is None


def test_group_is_gathered_when_every_assigned_partition_has_a_position(pair: GroupHarness) -> None:
    assert only(ev.FetchCommittedOffsets, pair.assigned(A, B, slot=0)) == [ev.FetchCommittedOffsets(partitions=(A, B))]
    pair.assigned(C, slot=1)
    assert not pair.gathered() and not pair.run.partitions.all_known()
    pair.committed({A: 5, B: 6})
    assert not pair.gathered()
    pair.committed({C: 7})
    assert pair.gathered()
    assert pair.run.plannable() == {A: 5, B: 6, C: 7}


def test_members_without_partitions_block_nothing() -> None:
    group = GroupHarness(slots=3)
    group.start_stream({"orders": 1})
    group.settled(A, slot=0)
    group.assigned(slot=1)
    assert not group.gathered()  # slot 2 has no assignment yet
    group.assigned(slot=2)
    assert group.gathered()
    assert group.plan({A: (100, 110)}) == []
    assert only(ev.CommitOffsets, group.durable()) == [ev.CommitOffsets(offsets={A: 110}, stream=STREAM, seq=0)]
    assert group.run.statistics().assigned == (1, 0, 0)


def test_restart_continues_at_the_end_of_the_last_durable_batch(fresh: GroupHarness) -> None:
    commands = fresh.durable({A: (100, 150), B: (40, 40)})
    assert commands == [fresh.join()]
    fresh.assigned(A, B)
    commands = fresh.committed({A: 100, B: 40})
    # The crash came between the sink's commit and the echo: Kafka is behind, and is brought forward.
    assert fresh.run.plannable() == {A: 150, B: 40}
    assert commands == [ev.CommitOffsets(offsets={A: 150}, stream=STREAM, seq=7)]
    assert fresh.run.seq == 7


def test_replay_that_is_durable_before_its_partitions_are_assigned_counts(fresh: GroupHarness) -> None:
    replayed = fresh.replays({A: (100, 150)})
    fresh.assigned(A)
    fresh.feed(ev.Durable(offset=replayed))
    commands = fresh.committed({A: 100})
    assert fresh.run.plannable() == {A: 150}
    assert commands == [ev.CommitOffsets(offsets={A: 150}, stream=STREAM, seq=3)]


def test_closing_closes_every_member_and_ignores_later_events(pair: GroupHarness) -> None:
    pair.settled(A)
    assert pair.close(leave=True) == [ev.Leave(slot=0, leave=True), ev.Leave(slot=1, leave=True)]
    assert pair.run.closed
    after: Commands = []
    for event in (
        ev.Tick(),
        ev.TopicsChanged(topics=("other",)),
        ev.Durable(offset=pair.offset({A: (100, 150)}, 9)),
        ev.OffsetsCommitted(offsets={A: 1}),
    ):
        after += pair.feed(event)
    after += pair.assigned(B) + pair.revoking(A) + pair.failed() + pair.fenced()
    assert after == []
    assert pair.run.next_deadline_ms() is None


# --- failed and fenced members ---------------------------------------------------------------------------------------


def test_failed_member_joins_again_after_a_growing_pause(group: GroupHarness) -> None:
    for client, pause_ms in enumerate((100, 200, 500, 1_000, 2_000, 5_000, 5_000), start=2):
        assert group.failed() == []
        assert group.run.statistics().slots == ("closed",)
        assert group.run.next_deadline_ms() == group.clock() + pause_ms
        assert group.tick(ms=pause_ms - 1) == []
        assert group.tick(ms=1) == [group.join(client=client)]
        assert group.tick(ms=0) == []
    assert len(group.warned()) == 6  # the first failure is logged at level INFO


def test_run_fails_with_the_last_reason_when_a_slot_cannot_join(group: GroupHarness) -> None:
    group.failed("first")
    group.tick(ms=100)
    group.clock.advance(ms=JOINING_BUDGET_MS - 101)
    group.failed("still refused")
    assert group.run.statistics().state != "failed"
    group.tick(ms=500)
    assert group.clock() > JOINING_BUDGET_MS
    (fail,) = only(ev.Fail, group.failed("the place is still taken"))
    assert isinstance(fail.error, RebalanceTimeout)
    assert "could not join group 'etl'" in str(fail.error) and "the place is still taken" in str(fail.error)
    assert "3 attempts" in str(fail.error)
    assert fail.error.retriable
    assert group.run.closed
    assert group.tick(ms=60_000) == []


def test_joining_budget_is_used_up_to_its_end(group: GroupHarness) -> None:
    group.failed()
    group.tick(ms=JOINING_BUDGET_MS - 1)
    assert only(ev.Fail, group.failed()) == []
    group.tick(ms=200)
    group.clock.now_ms = JOINING_BUDGET_MS
    assert len(only(ev.Fail, group.failed())) == 1


def fenced_by_an_older_process(group: GroupHarness) -> Commands:
    return group.fenced() + group.feed(ev.NotReplaced(slot=0))


@pytest.mark.parametrize("fail", [GroupHarness.failed, fenced_by_an_older_process])
def test_slot_whose_member_fails_after_each_assignment_fails_the_run_after_the_joining_budget(
    group: GroupHarness, fail: Callable[[GroupHarness], Commands]
) -> None:
    fails: list[ev.Fail] = []
    while not fails and group.clock() < 2 * JOINING_BUDGET_MS:
        group.assigned(A)
        group.tick(ms=STEADY_MS - 1)
        fails = only(ev.Fail, fail(group))
        group.tick(ms=5_000)
    assert JOINING_BUDGET_MS <= group.clock() <= JOINING_BUDGET_MS + 2 * (STEADY_MS + 5_000)
    assert "could not join group 'etl' and stay in it" in str(fails[0].error)


@pytest.mark.parametrize("fail", [GroupHarness.failed, fenced_by_an_older_process])
def test_steady_member_restarts_the_joining_budget(
    group: GroupHarness, fail: Callable[[GroupHarness], Commands]
) -> None:
    fail(group)
    group.tick(ms=JOINING_BUDGET_MS - 2)
    group.settled(A)
    group.tick(ms=1)
    group.assigned(B, generation=2)  # the member is the same
    group.tick(ms=STEADY_MS - 1)
    assert only(ev.Fail, fail(group)) == []
    assert group.tick(ms=100) == [group.join(client=3)]


def test_slot_that_may_be_fenced_checks_for_a_newer_driver_and_joins_again(group: GroupHarness) -> None:
    group.settled(A)
    doubt = ev.MemberFenced(slot=0, client=1, reason="did not run for 30000 ms", confirmed=False)
    assert group.feed(doubt) == [ev.CheckReplaced(slot=0, confirmed=False)]
    group.feed(ev.ReplacedUnclear(slot=0, reason="brokers are away"))
    assert group.tick(ms=100) == [ev.CheckReplaced(slot=0, confirmed=False)], "still only possible"
    assert group.feed(ev.NotReplaced(slot=0)) == []
    assert group.tick(ms=200) == [group.join(client=2)]


def test_fenced_slot_checks_for_a_newer_driver_before_it_joins(pair: GroupHarness) -> None:
    pair.settled(A, slot=0)
    pair.settled(B, slot=1)
    pair.plan({A: (100, 150), B: (100, 110)})
    assert pair.fenced() == [ev.CheckReplaced(slot=0)]
    assert pair.run.statistics().slots == ("checking", "assigned")
    assert (pair.run.statistics().partitions_lost, pair.run.statistics().possible_duplicates) == (1, 50)
    checking = "checking whether a newer driver runs this stream"
    assert f"another client has the instance id of slot 0 (FENCED_INSTANCE_ID); {checking}" in pair.warned()
    assert only(ev.CommitOffsets, pair.durable())[0].offsets == {B: 110}
    assert pair.tick(ms=60_000) == []  # it does not join before it knows


def test_newer_driver_stops_the_run(pair: GroupHarness) -> None:
    pair.reads({A: (100, 150)})
    pair.fenced()
    (fail,) = only(ev.Fail, pair.feed(ev.Replaced(reason="INVALID_PRODUCER_EPOCH")))
    assert isinstance(fail.error, Fenced) and not fail.error.retriable
    assert "INVALID_PRODUCER_EPOCH" in str(fail.error)
    assert fail.error.fields == {"group": "etl"}
    assert pair.run.closed
    assert pair.durable() == []
    assert pair.tick(ms=60_000) == []
    assert pair.run.statistics().slots == ("closed", "closed")


@pytest.mark.parametrize(("leave_on_stop", "leave"), [("auto", False), ("always", True)])
def test_failed_run_closes_its_members_although_they_hold_revocations(leave_on_stop: str, leave: bool) -> None:
    """The write of its batch may take long, and the group would wait for its revocations meanwhile."""
    pair = GroupHarness(slots=2, leave_on_stop=leave_on_stop)
    pair.start_stream()
    pair.settled(A, slot=0)
    pair.settled(B, slot=1)
    pair.plan({A: (100, 150), B: (100, 110)})
    assert pair.revoking(B, slot=1) == []
    assert only(ev.Leave, pair.feed(ev.InternalFailure(error=Fenced("x")))) == [
        ev.Leave(slot=slot, leave=leave) for slot in (0, 1)
    ]


def test_instance_id_is_taken_back_from_an_older_process(group: GroupHarness) -> None:
    """For example from one that was frozen. It lost the transactional id, so it can commit nothing."""
    group.reads({A: (100, 150)})
    group.fenced()
    assert group.feed(ev.NotReplaced(slot=0)) == []
    assert group.run.statistics().slots == ("closed",)
    assert group.tick(ms=100) == [group.join(client=2)]
    group.assigned(A, generation=2)
    group.committed({A: 100})
    assert group.revoking(A) == []  # the batch in flight still reads it
    group.durable()
    assert group.commit_succeeds() == [ev.Release(slot=0, client=2)]


def test_the_time_of_a_check_is_not_part_of_the_joining_budget(group: GroupHarness) -> None:
    """No broker answered it, and it has a bound of its own: the slot has not tried to join yet."""
    group.settled(A)
    group.fenced()
    while group.clock() < 2 * JOINING_BUDGET_MS:
        assert only(ev.Fail, group.feed(ev.ReplacedUnclear(slot=0, reason="no broker"))) == []
        group.tick(ms=5_000)
    assert group.feed(ev.NotReplaced(slot=0)) == []
    assert group.run.slots.unassigned_since_ms == group.clock()


def test_unclear_replacement_is_checked_again_after_a_growing_pause_within_a_bound(group: GroupHarness) -> None:
    group.fenced()
    fails: list[ev.Fail] = []
    for pause_ms in (100, 200, 500, 1_000, 2_000, 5_000):
        assert group.feed(ev.ReplacedUnclear(slot=0, reason="no broker")) == []
        assert group.tick(ms=pause_ms - 1) == []
        assert group.tick(ms=1) == [ev.CheckReplaced(slot=0)]
    bound_ms = Rules(group="etl", starting=StartingPosition()).broker_timeout_ms
    while not fails and group.clock() < 2 * bound_ms:
        fails = only(ev.Fail, group.feed(ev.ReplacedUnclear(slot=0, reason="no broker")))
        group.tick(ms=5_000)
    assert bound_ms <= group.clock() <= bound_ms + 10_000
    assert isinstance(fails[0].error, RebalanceTimeout)
    assert "could not be checked whether it is a newer driver of this stream. The last answer: no broker" in str(
        fails[0].error
    )


def test_replacement_that_can_never_be_checked_fails_the_run_at_once(group: GroupHarness) -> None:
    group.fenced()
    reason = "another client has the instance id of slot 0, and transactions are not allowed here"
    (fail,) = only(ev.Fail, group.feed(ev.Replaced(reason=reason)))
    assert isinstance(fail.error, Fenced)
    assert f"another driver runs this stream of group 'etl' now ({reason})" in str(fail.error)
    assert group.run.statistics().slots == ("closed",)


def test_late_result_of_a_replacement_check_is_ignored(group: GroupHarness) -> None:
    group.settled(A)
    assert group.feed(ev.NotReplaced(slot=0), ev.ReplacedUnclear(slot=0, reason="x")) == []
    assert group.run.statistics().slots == ("assigned",)


def test_every_member_gets_a_changed_subscription(pair: GroupHarness) -> None:
    commands = pair.feed(ev.TopicsChanged(topics=("orders", "payments")))
    assert commands == [ev.Subscribe(slot=slot, topics=("orders", "payments")) for slot in (0, 1)]
    assert any("matches 2 topics now: orders, payments" in text for text in pair.logged())
    assert pair.feed(ev.TopicsChanged(topics=("orders", "payments"))) == [], "an unchanged subscription is not sent"


def test_topic_that_lists_lack_is_unsubscribed_after_a_grace_period(group: GroupHarness) -> None:
    """One broker may not know it for a moment: without it, the group would revoke its partitions."""
    group.feed(ev.TopicsChanged(topics=("orders", "payments")))
    assert group.feed(ev.TopicsChanged(topics=("payments",))) == []
    group.tick(ms=GRACE_MS - 1)
    assert group.feed(ev.TopicsChanged(topics=())) == []
    group.tick(ms=1)
    assert group.feed(ev.TopicsChanged(topics=("new", "payments"))) == [
        ev.Subscribe(slot=0, topics=("new", "payments"))
    ]


def test_grace_period_of_an_unlisted_topic_starts_again_after_a_list_has_it(group: GroupHarness) -> None:
    for topics in ((), ("orders",), ()):
        assert group.feed(ev.TopicsChanged(topics=topics)) == []
        group.tick(ms=GRACE_MS)
    assert group.feed(ev.TopicsChanged(topics=())) == [ev.Subscribe(slot=0, topics=())]


def test_member_rejoins_with_the_newest_subscription(group: GroupHarness) -> None:
    group.failed()
    assert group.feed(ev.TopicsChanged(topics=("orders", "payments"))) == []
    assert group.tick(ms=100) == [group.join(client=2, topics=("orders", "payments"))]


def came_back(*topics: str, known: Mapping[str, int], slots: int = 1) -> tuple[GroupHarness, Commands]:
    """A run that continues a stream whose earlier run knew these topics."""
    group = GroupHarness(slots=slots)
    offset = StreamOffset(group=GROUP, stream=STREAM, seq=7, known=known, ranges={A: (0, 5)})
    return group, group.resume(offset, topics)


def test_slot_rejoins_with_the_former_subscription_and_changes_it_then() -> None:
    """A classic broker gives it its old assignment and ignores the new topics; only a member that changes its
    subscription makes the group rebalance."""
    both = ("orders", "payments")
    group, commands = came_back(*both, known={"orders": 4}, slots=2)
    assert commands[:2] == [group.join(slot, topics=("orders",)) for slot in (0, 1)]
    assert group.assigned(A)[0] == ev.Subscribe(slot=0, topics=both)
    assert group.assigned(slot=1) == [ev.Subscribe(slot=1, topics=both)]
    group.committed({A: 0})
    assert not group.gathered(), "the group has not answered to the new subscription as yet"
    assert not only(ev.Subscribe, group.assigned(generation=2) + group.assigned(slot=1, generation=2)), "once"
    assert group.gathered()
    group.failed()
    assert group.tick(ms=100) == [group.join(client=2, topics=both)]


def test_slot_that_was_without_topics_subscribes_to_new_ones() -> None:
    """Its member left the group, which reports an empty assignment without a generation."""
    g, _ = came_back("orders", "payments", known={"orders": 1})
    g.assigned(A, generation=5)
    for _ in range(2):
        g.feed(ev.TopicsChanged(topics=()))
        g.tick(ms=GRACE_MS)
    g.lost(A)
    g.assigned(generation=-1)
    assert only(ev.Subscribe, g.feed(ev.TopicsChanged(topics=("other",)))) == [ev.Subscribe(slot=0, topics=("other",))]


def test_slot_that_rejoins_with_the_same_subscription_causes_no_rebalance() -> None:
    group, commands = came_back("orders", known={"orders": 4, "a former topic": 1})
    assert commands[:1] == [group.join(topics=("orders",))]
    assert not only(ev.Subscribe, group.assigned(A))


def test_member_that_failed_before_it_rejoined_still_starts_with_the_former_subscription() -> None:
    group, _ = came_back("payments", known={"orders": 4})
    group.failed()
    assert group.feed(ev.TopicsChanged(topics=("payments", "refunds"))) == []
    assert group.tick(ms=100) == [group.join(client=2, topics=("orders", "payments"))]
    assert group.assigned()[0] == ev.Subscribe(slot=0, topics=("payments", "refunds"))


def test_slot_none_of_whose_former_topics_is_subscribed_leaves_the_group_and_joins_again() -> None:
    """A member with deleted topics alone does not join; with the present ones too it may get its old assignment, and a
    cooperative one would not rejoin for a subscription that lacks only topics that do not exist."""
    group, commands = came_back("payments", known={"orders": 4})
    assert commands[:1] == [group.join(topics=("orders", "payments"))]
    assert group.assigned(A) == [ev.Leave(slot=0, leave=True)]
    assert not group.run.partitions.ours and not group.gathered()
    assert group.feed(ev.MemberEnded(slot=0, client=1)) == [group.join(client=2, topics=("payments",))]
    assert not only(ev.Leave, group.assigned(PAYMENTS, generation=2)), "once"
    assert list(group.run.partitions.ours) == [PAYMENTS]


def test_slot_joins_again_although_its_member_does_not_close() -> None:
    """Also without agents, whose losses have a bound of their own."""
    group, _ = came_back("payments", known={"orders": 4})
    group.assigned(A)
    assert group.tick(ms=CLOSE_MS_MAX) == [], "a consumer that leaves has as long"
    assert group.tick(ms=LEAVE_MS_MAX) == [group.join(client=2, topics=("payments",))]


def test_late_assignment_does_not_take_a_partition_from_its_new_slot(
    pair: GroupHarness,
) -> None:
    pair.assigned(A, B, slot=1, generation=3)
    pair.lost(A, slot=1)
    pair.assigned(A, slot=0, generation=5)
    pair.assigned(A, B, slot=1, generation=4)
    pair.lost(A, slot=1)
    assert pair.run.partitions.ours[A].slot == 0


def test_partition_of_a_group_that_was_created_again_stays_with_its_new_member(pair: GroupHarness) -> None:
    """Its generations start again: an assignment in a lower one is not older."""
    pair.assigned(A, slot=0, generation=10)
    pair.assigned(B, slot=1, generation=10)
    pair.lost(B, slot=1)
    pair.assigned(A, B, slot=1, generation=1)  # slot 0 has not noticed yet
    pair.lost(A, slot=0)
    assert pair.run.partitions.ours.keys() == {B}
    pair.assigned(slot=0, generation=2)
    assert {tp: each.slot for tp, each in pair.run.partitions.ours.items()} == {A: 1, B: 1}


def test_outdated_assignment_does_not_come_back_when_it_was_revoked(pair: GroupHarness) -> None:
    pair.assigned(A, slot=0, generation=10)
    pair.assigned(A, slot=1, generation=7)
    pair.lost(A, slot=1)
    pair.lost(A, slot=0)
    pair.assigned(slot=0, generation=2)
    assert not pair.run.partitions.ours


def test_outdated_assignment_does_not_come_back_after_its_member_failed(pair: GroupHarness) -> None:
    pair.assigned(A, slot=0, generation=10)
    pair.assigned(A, slot=1, generation=7)
    pair.failed(slot=1)
    pair.lost(A, slot=0)
    pair.assigned(slot=0, generation=2)
    assert not pair.run.partitions.ours


HELD = RevokingState(Membership(), since_ms=0, is_eager=False, partitions=set())


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda slots, slot: setattr(slot, "state", HELD), "holds another revocation, and is revoking"),
        (lambda slots, slot: slots._held.update({slot.number: HELD}), "holds another revocation, and is assigned"),
        (lambda slots, slot: slot.partitions.clear(), "a partition has two slots or none"),
        (
            lambda slots, slot: slots.all[1].partitions.add(slot.partitions.pop()),
            "names another slot than the one that has it",
        ),
        (lambda slots, slot: setattr(slot, "state", ClosedState()), "a partition has two slots or none"),
        (lambda slots, slot: setattr(slots, "_assigned_count", 1), "the assigned slots are miscounted"),
    ],
)
def test_each_contradiction_between_slots_and_partitions_is_reported(
    spoil: Callable[[Slots, Slot], object], why: str
) -> None:
    pair = GroupHarness(slots=2)
    pair.start_stream()
    pair.settled(A, slot=0)
    pair.settled(B, slot=1)
    require_consistent(pair.run)
    spoil(pair.run.slots, pair.run.slots.all[0])
    with pytest.raises(InvariantBroken, match=why):
        require_consistent(pair.run)


LONG = tuple(f"orders.{number}.".ljust(200, "x") for number in range(2_000))


@pytest.mark.parametrize(
    ("rules", "fits"),
    [({}, False), ({"cooperative": True}, False), ({"classic": False}, True), ({"classic": False, "slots": 9}, True)],
)
def test_group_that_kafka_may_be_unable_to_store_is_warned_of(rules: dict[str, Any], fits: bool) -> None:
    """Kafka stores a classic group as one record with the topic names of each member, and a KIP-848 group as several
    ones. The error of a run without an assignment repeats the warning."""
    g = GroupHarness(**({"slots": 2} | rules))
    g.start_stream(dict.fromkeys(LONG, 6))
    assert any("__consumer_offsets" in text for text in g.warned()) != fits
    assert bool(g.run.slots.too_large()) != fits


@pytest.mark.parametrize(("cooperative", "fit"), [(False, 1), (True, 0)])
def test_topic_names_count_once_more_for_cooperative_members(cooperative: bool, fit: int) -> None:
    g = GroupHarness(cooperative=cooperative)
    g.start_stream(dict.fromkeys(LONG, 6))
    slots = g.run.slots
    assert (slots._fitting(), slots.members_max) == (fit, 1)
    slots.change_topics(LONG[:500])
    g.clock.advance(ms=GRACE_MS)
    g.feed(ev.Tick())
    slots.change_topics(LONG[:500])
    assert slots._fitting() == slots.members_max == [4, 3][cooperative]


def test_group_without_topics_may_have_any_number_of_members() -> None:
    assert GroupHarness().run.slots.members_max == SLOTS_MAX


def test_topics_that_are_added_may_make_the_group_too_large() -> None:
    g = GroupHarness(2)
    g.start_stream({"orders": 1})
    g.feed(ev.TopicsChanged(topics=LONG))
    assert sum("__consumer_offsets" in text for text in g.warned()) == 1
