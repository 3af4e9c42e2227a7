"""The ledger: what it says, how a batch is compared with it, and how it is read and set in a real table."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from sink_source import SCHEMA, Ranges, offset

from spark_group_source.delta import access
from spark_group_source.delta.kept import ledgers, read_ledger, set_ledger
from spark_group_source.delta.ledger import (
    Ledger,
    Mixed,
    Recorded,
    Refusal,
    Refused,
    Retired,
    Unaware,
    Write,
    behind,
    conflict,
    decide,
    judge,
)
from spark_group_source.errors import LedgerConflict, OptionError
from spark_group_source.group.offsets import StreamOffset
from spark_group_source.model import OffsetRange, TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

P0, P1 = TopicPartition("orders", 0), TopicPartition("orders", 1)


def ledger(offsets: dict[TopicPartition, int], *, topic_id: str = "id-1", epoch: int = 0) -> Ledger:
    return Ledger(group="etl", offsets=offsets, topic_ids={"orders": topic_id}, stream="s1", seq=3, epoch=epoch)


def ranges(*pairs: tuple[int, int]) -> Ranges:
    return {("orders", p): pair for p, pair in enumerate(pairs)}


def test_a_batch_for_a_table_that_never_saw_the_group_is_new() -> None:
    verdict = judge(offset(0, ranges((100, 250), (40, 40))), None)
    assert (verdict.drop, verdict.refused, verdict.skipped) == ((), (), ())
    assert verdict.ledger.offsets == {P0: 250, P1: 40}
    assert verdict.ledger.topic_ids == {"orders": "id-1"}


def test_a_batch_that_starts_at_the_ledger_is_new() -> None:
    verdict = judge(offset(4, ranges((100, 250))), ledger({P0: 100}))
    assert (verdict.drop, verdict.refused, verdict.skipped) == ((), (), ())
    assert verdict.ledger.offsets == {P0: 250}
    assert (verdict.ledger.stream, verdict.ledger.seq) == ("s1", 4)


def test_what_another_member_had_in_between_is_skipped_and_said() -> None:
    verdict = judge(offset(4, ranges((120, 130))), ledger({P0: 100}))
    assert verdict.skipped == (OffsetRange(P0, 100, 120),)
    assert verdict.ledger.offsets == {P0: 130}


def test_G5_what_lies_between_is_refused_where_the_groups_offset_was_forgotten() -> None:
    """A member that had it would have committed. The query begins where ``startingOffsets`` says."""
    begins = replace(offset(0, ranges((120, 130), (40, 50))), began=frozenset({P0, P1}))
    verdict = judge(begins, ledger({P0: 100}))
    assert [(r.tp, r.start, r.recorded) for r in verdict.refused] == [(P0, 120, 100)], "of the other nothing is known"
    assert judge(replace(begins, ranges={P0: (120, 120)}), ledger({P0: 100})).refused, "before anything is read"
    assert not judge(begins, ledger({P0: 120})).refused
    assert judge(begins, ledger({P0: 125})).drop == (OffsetRange(P0, 120, 125),)
    error = str(conflict("/t", Refused(group="etl", positions=verdict.refused), 0))
    assert (
        "Kafka has no offsets of group 'etl' any more" in error and "orders-0: 120, the table holds up to 100" in error
    )
    assert "reset --group etl --to-ledger --table /t" in error


@pytest.mark.proves("G4", level="core")
def test_records_that_the_table_has_are_dropped_and_the_rest_is_new() -> None:
    verdict = judge(offset(4, ranges((90, 130), (5, 9))), ledger({P0: 100, P1: 5}))
    assert verdict.drop == (OffsetRange(P0, 90, 100),)
    assert verdict.ledger.offsets == {P0: 130, P1: 9}


def test_a_batch_wholly_below_the_ledger_is_dropped_and_moves_nothing() -> None:
    verdict = judge(offset(4, ranges((10, 30), (7, 7))), ledger({P0: 100, P1: 9}))
    assert verdict.drop == (OffsetRange(P0, 10, 30),)
    assert verdict.ledger.offsets == {P0: 100, P1: 9}


def test_a_position_that_someone_moved_below_the_ledger_is_refused() -> None:
    verdict = judge(offset(4, ranges((10, 30)), followed=[("orders", 0)]), ledger({P0: 100}))
    assert [(r.tp, r.start, r.recorded) for r in verdict.refused] == [(P0, 10, 100)]


def test_records_that_stand_where_a_log_was_cut_are_new_and_the_ledger_goes_back() -> None:
    back = {("orders", 0): 100}
    verdict = judge(offset(4, ranges((60, 80)), cut=back), ledger({P0: 100}))
    assert (verdict.drop, verdict.refused, verdict.skipped) == ((), (), ())
    assert verdict.ledger.offsets == {P0: 80}
    on = judge(offset(5, ranges((80, 120)), cut=back), verdict.ledger)
    assert (on.drop, on.ledger.offsets) == ((), {P0: 120})


def test_what_another_query_wrote_of_a_cut_log_is_not_written_again() -> None:
    """It found the cut first: the ledger does not stand any more where this batch's position was."""
    verdict = judge(offset(4, ranges((60, 90)), cut={("orders", 0): 100}), ledger({P0: 80}))
    assert verdict.drop == (OffsetRange(P0, 60, 80),)
    assert verdict.ledger.offsets == {P0: 90}


def test_a_position_that_someone_moved_is_refused_before_anything_is_read_from_it() -> None:
    assert judge(offset(4, ranges((10, 10)), followed=[("orders", 0)]), ledger({P0: 100})).refused


@pytest.mark.parametrize("start", [100, 150])
def test_a_position_that_someone_moved_forward_is_followed(start: int) -> None:
    verdict = judge(offset(4, ranges((start, 200)), followed=[("orders", 0)]), ledger({P0: 100}))
    assert verdict.refused == ()
    assert verdict.ledger.offsets == {P0: 200}


def test_a_topic_that_was_created_anew_starts_afresh_and_others_do_not() -> None:
    old = Ledger(
        group="etl",
        offsets={P0: 100, P1: 100, TopicPartition("other", 0): 7},
        topic_ids={"orders": "id-0", "other": "id-7"},
    )
    verdict = judge(offset(4, ranges((0, 30)), followed=[("orders", 0)]), old)
    assert verdict.recreated == ("orders",)
    assert verdict.refused == ()
    assert verdict.ledger.offsets == {P0: 30, TopicPartition("other", 0): 7}
    assert verdict.ledger.topic_ids == {"orders": "id-1", "other": "id-7"}


@pytest.mark.parametrize(("old", "new"), [("", "id-1"), ("id-1", "")])
def test_an_unknown_topic_id_is_not_another_topic(old: str, new: str) -> None:
    verdict = judge(offset(4, ranges((0, 30)), topic_id=new), ledger({P0: 100}, topic_id=old))
    assert verdict.recreated == ()
    assert verdict.ledger.offsets == {P0: 100}
    assert verdict.ledger.topic_ids == {"orders": "id-1"}


def test_what_the_table_has_of_a_topic_is_not_forgotten_when_a_batch_comes_of_its_former_id() -> None:
    """Two streams, and a topic that is made again: one of them has not heard of it yet. Ids have no order."""
    now = judge(offset(4, ranges((90, 100)), topic_id="id-1"), None).ledger
    now = judge(offset(5, ranges((0, 30)), topic_id="id-2"), now).ledger
    late = judge(offset(7, ranges((95, 120)), topic_id="id-1", stream="s2"), now)
    assert late.drop == (OffsetRange(P0, 95, 100),), "compared with what the table has of the former topic"
    assert late.recreated == ()
    assert (late.ledger.offsets, late.ledger.topic_ids) == ({P0: 30}, {"orders": "id-2"})
    assert late.ledger.former == {"orders": {"id-1": {0: 120}}}
    again = judge(offset(6, ranges((20, 40)), topic_id="id-2"), late.ledger)
    assert again.drop == (OffsetRange(P0, 20, 30),)
    assert judge(offset(8, ranges((95, 120)), topic_id="id-1", stream="s2"), again.ledger).drop == (
        OffsetRange(P0, 95, 120),
    )
    assert behind(offset(7, ranges((95, 120)), topic_id="id-1", stream="s2"), again.ledger) == []
    assert Ledger.from_json("etl", again.ledger.to_json()).former == again.ledger.former


def test_the_older_of_two_ids_that_comes_second_takes_nothing_from_the_newer_one() -> None:
    """The table saw the new topic first: to the ledger the other one looks like the newer."""
    now = judge(offset(4, ranges((0, 30)), topic_id="id-2"), None).ledger
    now = judge(offset(7, ranges((95, 120)), topic_id="id-1", stream="s2"), now).ledger
    again = judge(offset(5, ranges((20, 40)), topic_id="id-2"), now)
    assert again.drop == (OffsetRange(P0, 20, 30),)
    assert judge(offset(6, ranges((40, 50)), topic_id="id-2"), again.ledger).drop == ()


def test_an_id_of_a_topic_that_the_batch_does_not_read_says_nothing() -> None:
    """A stream keeps the ids of topics whose partitions have left it, also when they are made again."""
    old = Ledger(group="etl", offsets={P0: 30, TopicPartition("other", 0): 7}, topic_ids={"orders": "id-2"})
    batch = replace(offset(4, {("other", 0): (7, 9)}), topic_ids={"orders": "id-1", "other": "id-7"})
    verdict = judge(batch, old)
    assert verdict.recreated == ()
    assert verdict.ledger.offsets == {P0: 30, TopicPartition("other", 0): 9}
    assert verdict.ledger.topic_ids == {"orders": "id-2", "other": "id-7"}


def test_former_topics_are_forgotten_with_the_plans_of_before_a_reset_and_few_are_kept() -> None:
    now = None
    for n in range(8):
        now = judge(offset(n, ranges((0, n + 1)), topic_id=f"id-{n}"), now).ledger
    assert now is not None
    assert now.former == {"orders": {f"id-{n}": {0: n + 1} for n in range(3, 7)}}
    after = judge(offset(9, ranges((8, 9)), topic_id="id-7", epoch=1), now).ledger
    assert (after.former, after.offsets) == ({}, {P0: 9})


def test_of_a_deleted_topic_only_the_id_stays_and_a_batch_that_reads_it_is_refused() -> None:
    other = TopicPartition("other", 0)
    old = Ledger(group="etl", offsets={P0: 30, other: 7}, topic_ids={"orders": "id-1", "other": "id-7"}, epoch=1)
    now = old.retire(["orders", "never-seen"])
    assert (now.offsets, now.topic_ids, now.retired) == ({other: 7}, {"other": "id-7"}, ("id-1",))
    assert Ledger.from_json("etl", now.to_json()).retired == ("id-1",)
    assert deciding(offset(9, ranges((20, 40)), epoch=1), before=now) == Retired(group="etl", topics=("orders",))
    made_again = deciding(offset(9, ranges((0, 5)), topic_id="id-2", epoch=1), before=now)
    assert isinstance(made_again, Write) and made_again.ledgers["etl"].offsets == {P0: 5, other: 7}
    assert made_again.ledgers["etl"].retired == ("id-1",)
    void = deciding(offset(9, ranges((20, 40)), epoch=0), before=now)
    assert isinstance(void, Write) and not void.rows, "planned before the reset that found the topic deleted"
    text = str(conflict("/lake/orders", Retired(group="etl", topics=("orders",)), 9))
    assert "`spark-group reset --group etl --topic orders --table /lake/orders`" in text


def test_a_deleted_topic_without_an_id_stays_in_the_ledger_and_the_retired_are_not_endless() -> None:
    old = Ledger(group="etl", offsets={P0: 30})
    assert old.retire(["orders"]).offsets == {P0: 30}
    now = Ledger(group="etl")
    for n in range(1100):
        now = replace(now, offsets={P0: 1}, topic_ids={"orders": f"id-{n}"}).retire(["orders"])
    assert now.retired == tuple(f"id-{n}" for n in range(100, 1100))


def test_behind_says_what_of_a_batch_the_ledger_does_not_cover() -> None:
    batch = offset(4, ranges((90, 130), (0, 5), (8, 8)))
    assert behind(batch, ledger({P0: 130, P1: 5})) == []
    assert behind(batch, ledger({P0: 100})) == [OffsetRange(P0, 100, 130), OffsetRange(P1, 0, 5)]
    assert behind(batch, None) == [OffsetRange(P0, 90, 130), OffsetRange(P1, 0, 5)]
    assert behind(batch, ledger({P0: 1}, topic_id="id-2")) == []


# Resets


def test_a_batch_of_before_a_reset_is_void_and_the_ledger_stays() -> None:
    old = ledger({P0: 100, P1: 7}, epoch=2)
    verdict = judge(offset(9, ranges((90, 130), (0, 5)), followed=[("orders", 0)], epoch=1), old)
    assert verdict.void
    assert verdict.drop == (OffsetRange(P0, 90, 130), OffsetRange(P1, 0, 5))
    assert (verdict.refused, verdict.recreated, verdict.skipped) == ((), (), ())
    assert (verdict.ledger.offsets, verdict.ledger.topic_ids) == (old.offsets, old.topic_ids)
    assert (verdict.ledger.stream, verdict.ledger.seq, verdict.ledger.epoch) == ("s1", 3, 2)
    assert verdict.ledger.void == {"s1": 9}


def test_a_void_batch_writes_down_where_it_began_of_what_the_table_never_had() -> None:
    """Kafka may stand behind it by the time somebody settles that: going back to the ledger must lose nothing."""
    verdict = judge(offset(9, ranges((90, 130), (3, 5)), epoch=1), ledger({P0: 100}, epoch=2))
    assert verdict.void
    assert verdict.ledger.offsets == {P0: 100, P1: 3}


def test_of_a_topic_that_was_made_anew_a_void_batch_writes_down_where_it_began_too() -> None:
    verdict = judge(offset(9, ranges((3, 5)), topic_id="id-2", epoch=1), ledger({P0: 100}, epoch=2))
    assert verdict.void
    assert verdict.ledger.offsets == {P0: 3}
    assert verdict.ledger.under({"orders": "id-1"}) == {"orders": {0: 100}}, "what was known of the former one stays"


def test_the_first_batch_after_a_reset_brings_its_number_into_the_ledger() -> None:
    before = Ledger(group="etl", offsets={P0: 100}, epoch=1, void={"s0": 4})
    verdict = judge(offset(4, ranges((120, 130)), followed=[("orders", 0)], epoch=2), before)
    assert not verdict.void
    assert (verdict.ledger.epoch, verdict.ledger.void, verdict.ledger.offsets) == (2, {}, {P0: 130})
    assert judge(offset(0, ranges((0, 5)), epoch=3), None).ledger.epoch == 3


def test_a_reset_that_left_the_ledger_out_is_refused_where_it_goes_back() -> None:
    verdict = judge(offset(4, ranges((10, 30)), followed=[("orders", 0)], epoch=1), ledger({P0: 100}))
    assert verdict.refused == (Refusal(P0, 10, 100),)


def test_a_batch_of_before_a_reset_is_not_compared_with_the_ledger_of_after_it() -> None:
    assert behind(offset(4, ranges((90, 130))), ledger({P0: 0}, epoch=1)) == []


# What a sink does with a batch


def deciding(
    *offsets: StreamOffset, before: Ledger | None = None, recorded: bool = False, others: bool = False
) -> Recorded | Refused | Retired | Unaware | Mixed | Write:
    groups = {o.group for o in offsets}
    return decide(offsets, {g: before if g == "etl" else None for g in groups}, recorded=recorded, others=others)


def test_a_recorded_batch_is_not_written_and_what_the_ledger_does_not_cover_is_asked_for() -> None:
    batch = offset(4, ranges((90, 130)))
    assert deciding(batch, before=ledger({P0: 130}), recorded=True) == Recorded(uncovered={}, durable=(batch,))
    void = deciding(batch, before=ledger({P0: 0}, epoch=1), recorded=True)
    assert void == Recorded(uncovered={}, durable=()), "it was written, or left out: nobody needs to know"
    found = deciding(batch, before=ledger({P0: 100}), recorded=True)
    assert found == Recorded(uncovered={"etl": (OffsetRange(P0, 100, 130),)}, durable=(batch,))


def test_a_void_batch_is_recorded_and_none_of_its_rows_is_read() -> None:
    found = deciding(offset(4, ranges((90, 130))), before=ledger({P0: 100}, epoch=1))
    assert isinstance(found, Write)
    assert (found.rows, found.changed, found.durable) == (False, True, ())
    assert found.ledgers["etl"].offsets == {P0: 100}


def test_of_several_sources_only_the_rows_of_the_void_one_are_left_out() -> None:
    mine, other = offset(4, ranges((90, 130))), offset(7, {("other", 0): (3, 8)}, group="b", stream="s2")
    found = deciding(mine, other, before=ledger({P0: 100}, epoch=1))
    assert isinstance(found, Write)
    assert found.rows
    assert found.drop == (OffsetRange(P0, 90, 130),)
    assert found.ledgers["b"].offsets == {TopicPartition("other", 0): 8}
    assert found.durable == (other,)
    with_rate = deciding(mine, before=ledger({P0: 100}, epoch=1), others=True)
    assert isinstance(with_rate, Write)
    assert with_rate.rows


def test_rows_to_leave_out_that_another_source_may_have_read_too_are_refused() -> None:
    mine, other = offset(4, ranges((90, 130))), offset(7, ranges((3, 8)), group="b", stream="s2")
    assert deciding(mine, other, before=ledger({P0: 100}, epoch=1)) == Mixed(partitions=(P0,))


def test_a_batch_that_moves_nothing_needs_no_commit_unless_it_knows_a_newer_reset() -> None:
    idle = deciding(offset(4, ranges((100, 100))), before=ledger({P0: 100}))
    assert isinstance(idle, Write) and not idle.changed
    newer = deciding(offset(4, ranges((100, 100)), epoch=1), before=ledger({P0: 100}))
    assert isinstance(newer, Write) and newer.changed


def test_a_stream_that_still_has_not_heard_of_the_reset_after_a_void_batch_is_stopped() -> None:
    """The notes beside Kafka's offsets may be gone: leaving out every batch would lose records without a word."""
    first = deciding(offset(4, ranges((90, 130))), before=ledger({P0: 100}, epoch=2))
    assert isinstance(first, Write)
    after = first.ledgers["etl"]
    again = deciding(offset(4, ranges((90, 130))), before=after)
    assert isinstance(again, Write) and not again.changed, "the same batch, once more"
    second = deciding(offset(5, ranges((130, 140))), before=after)
    assert second == Unaware(group="etl", stream="s1", epoch=2)
    another = deciding(offset(5, ranges((90, 95)), stream="s2"), before=after)
    assert isinstance(another, Write), "each stream may have one"
    text = str(conflict("/lake/orders", second, 5))
    for part in ("batch 5", "reset 2", "`spark-group reset --group etl --to-ledger --table /lake/orders`"):
        assert part in text


def test_the_refusal_names_the_table_the_group_both_numbers_and_both_commands() -> None:
    refused = judge(offset(4, ranges((10, 30)), followed=[("orders", 0)]), ledger({P0: 100})).refused
    error = conflict("/lake/orders", Refused(group="etl", positions=refused), 4)
    for part in (
        "'etl'",
        "/lake/orders",
        "orders-0",
        "10",
        "100",
        "`spark-group reset --group etl --to-ledger --table /lake/orders`",
        "`spark-group reset --group etl --table /lake/orders`",
        "with the same checkpoint",
    ):
        assert part in str(error)
    assert error.fields["refused"] == [("orders", 0, 10, 100)]


def test_a_refusal_of_many_partitions_stays_readable() -> None:
    many = {("orders", p): (0, 1) for p in range(1000)}
    verdict = judge(offset(4, many, followed=list(many)), ledger({TopicPartition("orders", p): 9 for p in range(1000)}))
    error = conflict("t", Refused(group="etl", positions=verdict.refused), 4)
    assert "(and 995 more partitions)" in str(error)
    assert len(str(error)) < 1500


# Its text


tps = st.builds(TopicPartition, st.sampled_from(["a", "b", "c'\"\\ü"]), st.integers(0, 3))


@given(
    offsets=st.dictionaries(tps, st.integers(0, 2**63 - 1)),
    ids=st.dictionaries(st.sampled_from(["a", "b", "z"]), st.text(max_size=3)),
    stream=st.text(max_size=3),
    seq=st.integers(-1, 2**40),
    epoch=st.integers(0, 2**40),
    void=st.dictionaries(st.text(max_size=3), st.integers(0, 2**40), max_size=3),
)
def test_a_ledger_survives_its_text(
    offsets: dict[TopicPartition, int], ids: dict[str, str], stream: str, seq: int, epoch: int, void: dict[str, int]
) -> None:
    before = Ledger(group="g", offsets=offsets, topic_ids=ids, stream=stream, seq=seq, epoch=epoch, void=void)
    after = Ledger.from_json("g", before.to_json())
    assert after.offsets == before.offsets
    assert (after.stream, after.seq, after.epoch, after.void) == (stream, seq, epoch, void)
    assert {t: i for t, i in after.topic_ids.items() if i} == {t: i for t, i in ids.items() if i}
    assert after.to_json() == Ledger.from_json("g", after.to_json()).to_json()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "7",
        "{}",
        '{"v":1}',
        '{"seq":1,"stream":"s","topics":{"a":{"id":"x","offsets":{"0":-1}}},"v":1}',
        '{"seq":1,"stream":"s","topics":{"a":{"id":"x","offsets":{"0":"1"}}},"v":1}',
        '{"seq":1,"stream":"s","topics":{"a":{"id":"x","offsets":{"0":true}}},"v":1}',
        '{"seq":1,"stream":"s","topics":{"a":{"id":"x","offsets":{"zero":1}}},"v":1}',
        '{"seq":1,"stream":"s","topics":{"a":{"id":"x"}},"v":1}',
        '{"epoch":-1,"seq":1,"stream":"s","topics":{},"v":1}',
        '{"epoch":"1","seq":1,"stream":"s","topics":{},"v":1}',
        '{"seq":1,"stream":"s","topics":{},"v":1,"void":{"s":-1}}',
        '{"seq":1,"stream":"s","topics":{},"v":1,"void":[]}',
    ],
)
def test_a_damaged_ledger_is_refused(text: str) -> None:
    with pytest.raises(LedgerConflict, match="damaged"):
        Ledger.from_json("etl", text)


def test_a_ledger_of_a_newer_release_is_refused_by_name() -> None:
    with pytest.raises(LedgerConflict, match=r"version 2; this release reads version 1"):
        Ledger.from_json("etl", '{"v":2}')


class Writers(RuleBasedStateMachine):
    """Several queries of one group write one table, each from where it believes the group stands, and an operator
    moves the group: with the table or without it, also while plans of before are pending."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger: Ledger | None = None
        self.table: list[tuple[TopicPartition, int]] = []
        self.resets = 0
        self.seq = 0

    @rule(
        batch=st.dictionaries(
            st.tuples(st.just("orders"), st.integers(0, 2)),
            st.tuples(st.integers(0, 30), st.integers(0, 10)),
            max_size=3,
        ),
        followed=st.sets(st.tuples(st.just("orders"), st.integers(0, 2))),
        late=st.integers(0, 2),
        stream=st.sampled_from(["s1", "s2"]),
    )
    def write(
        self, batch: dict[tuple[str, int], tuple[int, int]], followed: set[tuple[str, int]], late: int, stream: str
    ) -> None:
        """``late``: so many resets came between the plan and now."""
        self.seq += 1
        spans = {tp: (start, start + size) for tp, (start, size) in batch.items()}
        epoch = max(0, self.resets - late)
        planned = offset(self.seq, spans, followed=sorted(followed & set(spans)), epoch=epoch, stream=stream)
        before = self.ledger or Ledger(group="etl")
        decision = decide([planned], {"etl": self.ledger}, recorded=False)
        if not isinstance(decision, Write):
            return
        after = decision.ledgers["etl"]
        if epoch < before.epoch:
            assert not decision.rows
            assert after.epoch == before.epoch
            assert before.offsets.items() <= after.offsets.items()
        if decision.rows:
            dropped = {(r.tp, n) for r in decision.drop for n in range(r.start, r.end)}
            for tp, (start, end) in spans.items():
                found = [(TopicPartition(*tp), n) for n in range(start, end)]
                self.table += [record for record in found if record not in dropped]
        for tp, n in before.offsets.items():
            assert after.offsets[tp] >= n, "the ledger moved backwards"
        assert after.epoch >= before.epoch
        self.ledger = after

    @rule(to=st.dictionaries(st.integers(0, 2), st.integers(0, 40)), with_table=st.booleans())
    def reset(self, to: dict[int, int], with_table: bool) -> None:
        self.resets += 1
        if not with_table:  # also: it died between Kafka and the table
            return
        offsets = {TopicPartition("orders", p): n for p, n in to.items()}
        before = self.ledger.offsets if self.ledger else {}
        self.ledger = Ledger(group="etl", offsets={**before, **offsets}, epoch=self.resets)
        # What the operator asks for once more is told apart from what is there.
        self.table = [(tp, n) for tp, n in self.table if n < offsets.get(tp, n + 1)]

    @invariant()
    def every_record_is_in_the_table_once(self) -> None:
        assert len(self.table) == len(set(self.table))

    @invariant()
    def the_ledger_is_past_every_record_in_the_table(self) -> None:
        assert all(self.ledger is not None and n < self.ledger.offsets[tp] for tp, n in self.table)


TestWriters = Writers.TestCase
TestWriters.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)


# In a real table


@pytest.fixture
def table(spark: "SparkSession", tmp_path: Path) -> str:
    path = tmp_path / "table"
    access.TableAccess(spark, str(path)).create(spark.createDataFrame([], SCHEMA))
    return str(path)


def last_commit(table: str) -> list[dict[str, dict[str, object]]]:
    newest = max((Path(table) / "_delta_log").glob("*.json"))
    return [json.loads(line) for line in newest.read_text().splitlines()]


def test_a_ledger_that_was_set_is_read_back(spark: "SparkSession", table: str) -> None:
    assert read_ledger(spark, table, "etl") is None
    set_ledger(spark, table, "etl", {P0: 5, P1: 7}, reason="move the job", topic_ids={"orders": "id-1"})
    found = read_ledger(spark, table, "etl")
    assert found is not None
    assert found.offsets == {P0: 5, P1: 7}
    assert found.topic_ids == {"orders": "id-1"}
    assert found.stream == "", "no stream wrote it: an operator did"
    assert found.table_version == 1


def test_setting_a_ledger_is_one_commit_without_rows_that_says_why(spark: "SparkSession", table: str) -> None:
    set_ledger(spark, table, "etl", {P0: 5}, reason="anna: replay after the outage")
    actions = last_commit(table)
    (txn,) = (action["txn"] for action in actions if "txn" in action)
    assert (txn["appId"], txn["version"]) == ("spark-group-source.etl", 1)
    assert sum(len(action) for action in actions) == 2
    assert "anna: replay after the outage" in str(actions[0]["commitInfo"]["userMetadata"])


def test_setting_a_ledger_moves_what_is_named_also_back_and_forgets_on_request(
    spark: "SparkSession", table: str
) -> None:
    set_ledger(spark, table, "etl", {P0: 5, P1: 7}, reason="r")
    set_ledger(spark, table, "etl", {P0: 2}, reason="r")
    found = read_ledger(spark, table, "etl")
    assert found is not None and found.offsets == {P0: 2, P1: 7}
    set_ledger(spark, table, "etl", {P0: None}, reason="r")
    found = read_ledger(spark, table, "etl")
    assert found is not None and found.offsets == {P1: 7}


def test_setting_a_ledger_for_a_reset_keeps_its_number_and_never_an_older_one(
    spark: "SparkSession", table: str
) -> None:
    set_ledger(spark, table, "etl", {P0: 5, P1: 7}, reason="r", epoch=2)
    set_ledger(spark, table, "etl", {P0: 6}, reason="r")
    found = read_ledger(spark, table, "etl")
    assert found is not None and (found.epoch, found.offsets) == (2, {P0: 6, P1: 7})
    with pytest.raises(OptionError, match="knows of reset 2 of group 'etl' already, so reset 1 comes too late"):
        set_ledger(spark, table, "etl", {P0: 0}, reason="r", epoch=1)
    found = read_ledger(spark, table, "etl")
    assert found is not None and found.offsets == {P0: 6, P1: 7}


def test_a_reset_takes_deleted_topics_out_of_the_ledger_and_a_later_one_brings_one_back(
    spark: "SparkSession", table: str
) -> None:
    other, ids = TopicPartition("other", 0), {"orders": "id-1", "other": "id-7"}
    set_ledger(spark, table, "etl", {P0: 5, P1: 7, other: 3}, reason="r", topic_ids=ids)
    set_ledger(spark, table, "etl", {}, reason="no reset", deleted=["orders"])
    found = read_ledger(spark, table, "etl")
    assert found is not None and found.offsets == {P0: 5, P1: 7, other: 3}, "plans of before are still valid"
    set_ledger(spark, table, "etl", {other: 4}, reason="r", epoch=1, deleted=["orders"])
    found = read_ledger(spark, table, "etl")
    assert found is not None and (found.offsets, found.retired) == ({other: 4}, ("id-1",))
    set_ledger(spark, table, "etl", {P0: 5}, reason="r", topic_ids={"orders": "id-1"}, epoch=2)
    found = read_ledger(spark, table, "etl")
    assert found is not None and (found.offsets, found.retired) == ({P0: 5, other: 4}, ())


def test_a_damaged_ledger_is_written_anew(spark: "SparkSession", table: str) -> None:
    set_ledger(spark, table, "etl", {P0: 5}, reason="r")
    there = access.TableAccess(spark, table)
    note = '[{"group":"etl","ledger":{"topics":7,"v":1},"v":1}]'
    there.commit(there.history(), None, {"spark-group-source.etl": 2}, note, needed=True)
    set_ledger(spark, table, "etl", {P1: 7}, reason="r", epoch=3)
    found = read_ledger(spark, table, "etl")
    assert found is not None and (found.epoch, found.offsets) == (3, {P1: 7})


def test_groups_have_ledgers_of_their_own(spark: "SparkSession", table: str) -> None:
    set_ledger(spark, table, "b", {P0: 1}, reason="r")
    set_ledger(spark, table, "a", {P0: 2}, reason="r")
    found = ledgers(access.existing(spark, table).history())
    assert {group: led and led.offsets for group, led in found.items()} == {"a": {P0: 2}, "b": {P0: 1}}


def test_ledgers_set_at_the_same_time_are_all_kept(spark: "SparkSession", table: str) -> None:
    set_ledger(spark, table, "etl", {P0: 0}, reason="r")

    def move(partition: int) -> None:
        for n in range(1, 4):
            set_ledger(spark, table, "etl", {TopicPartition("orders", partition): n}, reason="r")

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(move, p) for p in range(3)]:
            done.result(60)
    found = read_ledger(spark, table, "etl")
    assert found is not None and found.offsets == {TopicPartition("orders", p): 3 for p in range(3)}
