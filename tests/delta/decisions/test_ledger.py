"""The ledger: its format, how a batch is compared with it, and how it is read and set in a real table."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from sink_helpers import actions, commits
from sink_source import SCHEMA, Ranges, offset

from spark_group_source.delta import ledger_format, table_writer
from spark_group_source.delta.ledger_decision import (
    AlreadyWritten,
    Comparison,
    RefusedPartition,
    WriteBatch,
    compare,
    decide,
    missing_from_ledger,
)
from spark_group_source.delta.ledger_format import LATER_MAX, LaterRows, Ledger, LedgerPartition, LedgerTopic
from spark_group_source.delta.ledger_store import read_ledger, read_ledgers, set_ledger
from spark_group_source.errors import LedgerConflict, OptionError
from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.protocol.offsets import RECREATED, BatchKey, StreamOffset

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

P0, P1, OTHER = TopicPartition("orders", 0), TopicPartition("orders", 1), TopicPartition("other", 0)
FOLLOWED = [("orders", 0)]


def ledger(
    offsets: dict[TopicPartition, int], *, topic_id: str = "id-1", reset_number: int = 0, seq: int | None = None
) -> Ledger:
    found = Ledger(group="etl", reset_number=reset_number).with_offsets(offsets, {"orders": topic_id})
    return found if seq is None else found.with_batch(offset(seq, {}), void=False)


def ranges(*pairs: tuple[int, int]) -> Ranges:
    return {("orders", p): pair for p, pair in enumerate(pairs)}


@dataclass(frozen=True)
class Case:
    """A batch, the ledger before it, and the expected comparison."""

    batch: StreamOffset
    before: dict[TopicPartition, int]
    after: dict[TopicPartition, int]
    drop: list[tuple[TopicPartition, int, int]] = field(default_factory=list)
    skipped: list[tuple[TopicPartition, int, int]] = field(default_factory=list)


@pytest.mark.proves("G4", level="core")
@pytest.mark.parametrize(
    "case",
    {
        "a partition that the ledger does not have is new": Case(
            offset(4, ranges((100, 250), (40, 40))), {}, {P0: 250, P1: 40}
        ),
        "a batch that starts at the ledger is new": Case(offset(4, ranges((100, 250))), {P0: 100}, {P0: 250}),
        "what another consumer read in between is skipped": Case(
            offset(4, ranges((120, 130))), {P0: 100}, {P0: 130}, skipped=[(P0, 100, 120)]
        ),
        "records that the table has are dropped": Case(
            offset(4, ranges((90, 130), (5, 9))), {P0: 100, P1: 5}, {P0: 130, P1: 9}, drop=[(P0, 90, 100)]
        ),
        "a batch wholly below the ledger does not move it": Case(
            offset(4, ranges((10, 30), (7, 7))), {P0: 100, P1: 9}, {P0: 100, P1: 9}, drop=[(P0, 10, 30)]
        ),
        "a foreign commit above the ledger is followed": Case(
            offset(4, ranges((150, 200)), followed=FOLLOWED), {P0: 100}, {P0: 200}, skipped=[(P0, 100, 150)]
        ),
        "a foreign commit at the ledger is followed": Case(
            offset(4, ranges((100, 200)), followed=FOLLOWED), {P0: 100}, {P0: 200}
        ),
    }.items(),
    ids=lambda case: case[0].replace(" ", "-"),
)
def test_a_batch_is_compared_with_the_ledger(case: tuple[str, Case]) -> None:
    _, of = case
    comparison = compare(of.batch, ledger(of.before) if of.before else None)
    assert comparison.drop == tuple(OffsetRange(*r) for r in of.drop)
    assert comparison.skipped == tuple(OffsetRange(*r) for r in of.skipped)
    assert (comparison.refused, comparison.recreated, comparison.void) == ((), (), False)
    assert comparison.ledger.offsets == of.after
    assert comparison.ledger.streams == {"s1": BatchKey.of(of.batch)}


def truncated(start: int, end: int, before: int, now: int) -> StreamOffset:
    """A batch whose position went back to ``start``: its log was truncated after the leader epoch ``before``."""
    cut = offset(4, ranges((start, end)), truncated_after={("orders", 0): before})
    return replace(cut, leader_epochs={P0: now})


@pytest.mark.parametrize(
    "case",
    {
        "records after the truncation are new": (100, [(truncated(60, 80, 3, 5), (), 80)]),
        "the next batch may name the truncation too": (
            100,
            [(truncated(60, 80, 3, 5), (), 80), (truncated(80, 120, 3, 6), (), 120)],
        ),
        "the ledger has no epoch": (100, [(truncated(60, 80, 0, 5), (), 80)]),
        "another query went on": (100, [(truncated(60, 80, 3, 5), (), 80), (truncated(60, 90, 3, 5), (60, 80), 90)]),
        "another query wrote as far as before": (
            100,
            [(truncated(60, 100, 3, 6), (), 100), (truncated(60, 80, 3, 5), (60, 80), 100)],
        ),
        "another query wrote where the ledger had nothing": (
            60,
            [(truncated(60, 100, 3, 5), (), 100), (truncated(60, 80, 3, 5), (60, 80), 100)],
        ),
        "nothing is read at first": (100, [(truncated(60, 60, 3, 5), (), 60), (truncated(60, 80, 3, 5), (), 80)]),
        "two truncations without a batch in between": (100, [(truncated(40, 70, 5, 7), (), 70)]),
        "two truncations with an empty batch in between": (
            100,
            [(truncated(60, 60, 3, 5), (), 60), (truncated(40, 70, 5, 7), (), 70)],
        ),
        "a second truncation at the same offset": (
            100,
            [(truncated(60, 100, 3, 5), (), 100), (truncated(60, 80, 5, 6), (), 80)],
        ),
        "the position was above the ledger": (90, [(truncated(60, 80, 3, 5), (), 80)]),
        "the position was below the ledger": (120, [(truncated(60, 80, 3, 5), (), 80)]),
        "a recreated topic that another query read": (100, [(truncated(0, 50, RECREATED, 0), (0, 50), 100)]),
    }.items(),
    ids=lambda case: case[0].replace(" ", "-"),
)  # fmt: skip
def test_records_of_a_truncated_log_are_written_once(case: Any) -> None:
    recorded, batches = case[1]
    now = ledger({P0: recorded})
    for batch, drop, end in batches:
        comparison = compare(batch, now)
        assert [(r.start, r.end) for r in comparison.drop] == ([drop] if drop else [])
        now = Ledger.from_json("etl", comparison.ledger.to_json_dict())
        assert now.offsets == {P0: end}
        assert compare(batch, now).drop == tuple(batch.batch()), "the table has it"


@pytest.mark.proves("G4", level="core")
def test_what_was_read_after_a_truncation_is_known_to_a_stream_that_finds_it_later() -> None:
    """Another stream had read the former log, and goes back to the truncation, which this table's stream never met."""
    first = replace(offset(0, ranges((55, 80))), leader_epochs={P0: 5})
    known = Ledger.from_json("etl", compare(first, None).ledger.to_json_dict())
    comparison = compare(truncated(60, 90, 3, 5), known)
    assert comparison.drop == (OffsetRange(P0, 60, 80),)
    assert comparison.ledger.offsets == {P0: 90}
    assert compare(truncated(60, 70, 5, 6), comparison.ledger).drop == (), "the next truncation removed rows of it"


@pytest.mark.proves("G4", level="core")
@pytest.mark.parametrize(
    ("recorded", "claim", "drop"),
    [
        (60, truncated(65, 90, 3, 5), (65, 80)),
        (60, truncated(60, 70, 3, 5), (60, 70)),
        (60, truncated(55, 90, 3, 5), (60, 80)),  # up to 60 the table has rows of the former log
        (60, truncated(55, 70, 3, 5), (60, 70)),
        (60, truncated(55, 60, 3, 5), ()),  # they follow it
        (50, truncated(55, 90, 3, 5), (60, 80)),  # an ordinary consumer had those in between
        (70, truncated(65, 90, 3, 5), (70, 80)),  # so it has up to 70, where the other stream's new rows begin
        (60, truncated(65, 90, 5, 6), ()),  # the truncation came after them
    ],
)
def test_records_that_another_stream_read_after_a_truncation_are_not_written_again(
    recorded: int, claim: StreamOffset, drop: tuple[int, ...]
) -> None:
    """A stream plans records, another one reads those that replaced them, and the first one goes back."""
    first = replace(offset(0, ranges((0, recorded))), leader_epochs={P0: 3})
    other = replace(offset(0, ranges((60, 80)), stream="s2"), leader_epochs={P0: 5})
    if recorded < 60:
        other = replace(other, followed=frozenset({P0}))
    known = compare(other, compare(first, None).ledger).ledger
    comparison = compare(claim, Ledger.from_json("etl", known.to_json_dict()))
    assert [(r.start, r.end) for r in comparison.drop] == ([drop] if drop else [])
    assert comparison.ledger.offsets == {P0: max(80, claim.ranges[P0][1])}
    if claim.ranges[P0][0] < max(recorded, 60) or not drop:
        assert not comparison.ledger.topics["orders"].partitions[0].later, "the truncation is known now"
        assert compare(claim, comparison.ledger).drop == tuple(claim.batch())
    known = known.after_reset(1, {P0: 50})
    assert not known.topics["orders"].partitions[0].later, "a restored cluster may have earlier epochs"


def under(batch: StreamOffset, epoch: int) -> StreamOffset:
    return replace(batch, leader_epochs={P0: epoch})


def played(*batches: StreamOffset) -> Ledger:
    """The ledger after these batches, as the table has it."""
    now: Ledger | None = None
    for batch in batches:
        now = Ledger.from_json("etl", compare(batch, now).ledger.to_json_dict())
    assert now is not None
    return now


@pytest.mark.proves("G4", level="core")
@pytest.mark.parametrize("end", [55, 57, 60, 61, 80, 85])
@pytest.mark.parametrize("again", [False, True])
def test_rows_behind_a_batch_that_follows_a_truncation_are_not_written_again(end: int, again: bool) -> None:
    """The log has other records from 55 on, and another stream read those from 60 on. The batch that goes back to the
    truncation ends before them, and the next one may follow the truncation, too."""
    known = played(under(offset(0, ranges((0, 60))), 3), under(offset(0, ranges((60, 80)), stream="s2"), 5))
    first, second = truncated(55, end, 3, 5), truncated(end, 90, 3, 5)
    second = second if again else replace(second, truncated_after={})
    comparison = compare(first, known)
    assert comparison.drop == ((OffsetRange(P0, 60, min(end, 80)),) if end > 60 else ())
    assert comparison.ledger.offsets == {P0: end if end < 60 else max(end, 80)}
    known = Ledger.from_json("etl", comparison.ledger.to_json_dict())
    assert compare(first, known).ledger.offsets == known.offsets, "a replay"
    comparison = compare(second, known)
    assert comparison.drop == ((OffsetRange(P0, max(60, end), 80),) if end < 80 else ())
    assert comparison.ledger.offsets == {P0: 90}
    assert comparison.ledger.topics["orders"].partitions[0].ahead is None


@pytest.mark.proves("G4", level="core")
@pytest.mark.parametrize(
    ("to", "drop"),
    [
        ({}, (OffsetRange(P0, 60, 80),)),
        ({OTHER: 4}, (OffsetRange(P0, 60, 80),)),
        ({P0: 57, P1: 3}, (OffsetRange(P0, 60, 80),)),
        ({P0: 56}, ()),
    ],
    ids=["a rename", "another topic", "the ledger", "back"],
)
def test_a_reset_forgets_rows_behind_the_ledger_only_if_it_moves_their_partition(
    to: dict[TopicPartition, int], drop: tuple[OffsetRange, ...]
) -> None:
    known = played(
        under(offset(0, ranges((0, 60))), 3),
        under(offset(0, ranges((60, 80)), stream="s2"), 5),
        truncated(55, 57, 3, 5),
    ).after_reset(1, to, {"orders": "id-1"})
    batch = offset(2, ranges((known.offsets[P0], 90)), followed=FOLLOWED, reset_number=1)
    comparison = compare(under(batch, 5), Ledger.from_json("etl", known.to_json_dict()))
    assert (comparison.drop, comparison.refused, comparison.ledger.offsets[P0]) == (drop, (), 90)


@pytest.mark.proves("G4", level="core")
def test_rows_behind_the_ledger_are_written_again_after_a_next_truncation() -> None:
    known = played(
        under(offset(0, ranges((0, 60))), 3),
        under(offset(0, ranges((60, 80)), stream="s2"), 5),
        truncated(55, 57, 3, 5),
    )
    comparison = compare(truncated(56, 90, 5, 6), known)
    assert (comparison.drop, comparison.ledger.offsets) == ((), {P0: 90})


@pytest.mark.proves("G4", level="core")
def test_rows_under_several_later_epochs_are_not_written_again() -> None:
    """The leader changed without a truncation while the other stream read on."""
    known = played(
        under(offset(0, ranges((0, 60))), 3),
        under(offset(0, ranges((60, 80)), stream="s2"), 5),
        under(offset(1, ranges((80, 100)), stream="s2"), 7),
    )
    assert compare(truncated(60, 110, 3, 7), known).drop == (OffsetRange(P0, 60, 100),)
    comparison = compare(truncated(55, 110, 3, 7), known)
    assert comparison.drop == (OffsetRange(P0, 60, 100),)
    assert compare(truncated(70, 110, 5, 8), comparison.ledger).drop == (), "it removed the rows of epoch 5, too"


@pytest.mark.proves("G4", level="core")
@pytest.mark.parametrize(
    "late",
    [
        under(offset(1, ranges((80, 100)), stream="s3"), 3),
        offset(1, ranges((80, 100)), stream="s3"),
    ],
    ids=["earlier", "unknown"],
)
def test_rows_that_were_planned_under_an_earlier_epoch_are_not_taken_for_later_ones(late: StreamOffset) -> None:
    known = played(under(offset(0, ranges((0, 60))), 3), under(offset(0, ranges((60, 80)), stream="s2"), 5), late)
    comparison = compare(truncated(55, 100, 3, 5), known)
    assert (comparison.drop, comparison.ledger.offsets) == ((), {P0: 100})


@pytest.mark.proves("G4", level="core")
def test_rows_under_an_epoch_before_that_of_the_batch_may_be_gone() -> None:
    """A second truncation, which only the stream that read them would find."""
    known = played(under(offset(0, ranges((0, 60))), 3), under(offset(0, ranges((60, 80)), stream="s2"), 5))
    assert compare(truncated(55, 90, 3, 7), known).drop == ()


def test_only_the_newest_epochs_of_a_partition_are_kept() -> None:
    known = played(*(under(offset(n, ranges((n * 10, n * 10 + 10)), stream="s2"), n) for n in range(1, 9)))
    newest = tuple(LaterRows(n, n * 10) for n in range(9 - LATER_MAX, 9))
    assert known.topics["orders"].partitions[0].later == newest


@pytest.mark.parametrize(
    "unclear", [{"followed": frozenset({P0})}, {"started": frozenset({P0})}, {"leader_epochs": {}}]
)
def test_a_table_that_starts_at_an_unproven_position_says_nothing_of_truncations(unclear: dict[str, Any]) -> None:
    first = replace(offset(0, ranges((65, 80))), **{"leader_epochs": {P0: 5}, **unclear})
    assert compare(truncated(60, 90, 3, 5), compare(first, None).ledger).drop == ()


@pytest.mark.proves("G4", level="core")
@pytest.mark.parametrize(("end", "start"), [(60, 60), (60, 70), (75, 70), (75, 50)])
def test_a_batch_of_a_log_that_was_truncated_since_does_not_move_the_ledger(end: int, start: int) -> None:
    """A batch that was planned before the truncation and is written after it. Without this the sink would take the
    records that have its offsets now for rows that the table has."""
    now = compare(truncated(60, end, 3, 5), ledger({P0: 100})).ledger
    late = replace(offset(7, ranges((start, 90)), stream="s2"), leader_epochs={P0: 3})
    for known in (now, Ledger.from_json("etl", now.to_json_dict())):
        comparison = compare(late, known)
        assert (comparison.drop, comparison.removed) == ((), (OffsetRange(P0, start, 90),))
        assert comparison.skipped == ()
        assert comparison.ledger.offsets == {P0: end}
    assert compare(late, comparison.ledger).removed == comparison.removed, "also when it is replayed"
    assert compare(truncated(60, 80, 3, 5), comparison.ledger).drop == ((OffsetRange(P0, 60, end),) * (end > 60))
    decision = deciding(late, before=now)
    assert isinstance(decision, WriteBatch)
    assert decision.drop == comparison.removed


@pytest.mark.parametrize("end", [60, 80])
def test_a_batch_under_an_epoch_after_the_truncation_is_compared_like_any_other(end: int) -> None:
    """Also one that was planned under an earlier leader than the batch that met the truncation."""
    now = compare(truncated(60, end, 3, 7), ledger({P0: 100})).ledger
    late = replace(offset(7, ranges((end, 90)), stream="s2"), leader_epochs={P0: 5})
    comparison = compare(late, now)
    assert (comparison.drop, comparison.removed, comparison.ledger.offsets) == ((), (), {P0: 90})
    first = replace(offset(0, ranges((0, 60))), leader_epochs={P0: 7})
    comparison = compare(replace(late, ranges={P0: (60, 90)}), compare(first, None).ledger)
    assert (comparison.removed, comparison.ledger.offsets) == ((), {P0: 90})


def test_a_reset_forgets_which_epochs_are_gone() -> None:
    """Of a cluster that was restored, for example, whose epochs are earlier ones."""
    now = compare(truncated(60, 75, 3, 5), ledger({P0: 100})).ledger.after_reset(1, {P0: 70}, {"orders": "id-1"})
    late = replace(offset(7, ranges((70, 90)), reset_number=1), leader_epochs={P0: 2})
    assert compare(late, now).ledger.offsets == {P0: 90}


def test_rows_after_a_reset_may_have_earlier_epochs() -> None:
    """In a restored cluster: a truncation after one of them is newer than the rows."""
    known = played(under(offset(0, ranges((0, 100))), 5)).after_reset(1, {P0: 50}, {"orders": "id-1"})
    first = replace(offset(1, ranges((50, 90)), followed=FOLLOWED, reset_number=1), leader_epochs={P0: 2})
    found = replace(truncated(60, 95, 2, 3), reset_number=1)
    comparison = compare(found, compare(first, known).ledger)
    assert (comparison.drop, comparison.ledger.offsets) == ((), {P0: 95})


def test_an_earlier_epoch_means_nothing_where_brokers_do_not_report_topic_ids() -> None:
    """The topic may have been recreated, so that its epochs start again."""
    now = compare(replace(truncated(60, 60, 3, 5), topic_ids={}), ledger({P0: 100}, topic_id="")).ledger
    late = replace(offset(7, ranges((60, 90)), topic_id="", stream="s2"), leader_epochs={P0: 0})
    assert (compare(late, now).drop, compare(late, now).removed) == ((), ())
    first = replace(offset(0, ranges((55, 80)), topic_id=""), leader_epochs={P0: 5})
    again = replace(truncated(60, 90, 3, 5), topic_ids={})
    assert compare(again, compare(first, None).ledger).drop == ()


def test_a_start_above_the_ledger_is_refused_also_under_an_earlier_epoch() -> None:
    now = compare(truncated(60, 60, 3, 5), ledger({P0: 100})).ledger
    late = replace(offset(7, ranges((70, 90)), stream="s2"), leader_epochs={P0: 3}, started=frozenset({P0}))
    assert compare(late, now).refused == (RefusedPartition(P0, 70, 60),)


@pytest.mark.parametrize("end", [30, 10])
def test_a_foreign_commit_below_the_ledger_is_refused_also_for_an_empty_range(end: int) -> None:
    comparison = compare(offset(4, ranges((10, end)), followed=FOLLOWED), ledger({P0: 100}))
    assert [(r.tp, r.start, r.recorded) for r in comparison.refused] == [(P0, 10, 100)]


def test_G5_a_batch_above_the_ledger_is_refused_after_the_committed_offset_was_lost() -> None:
    """A consumer that read the records in between would have committed. ``startingOffsets`` decides where it starts."""
    begins = replace(offset(0, ranges((120, 130), (40, 50))), started=frozenset({P0, P1}))
    comparison = compare(begins, ledger({P0: 100}))
    assert [(r.tp, r.start, r.recorded) for r in comparison.refused] == [(P0, 120, 100)], (
        "the other partition is not in the ledger"
    )
    assert compare(replace(begins, ranges={P0: (120, 120)}), ledger({P0: 100})).refused, "before anything is read"
    assert not compare(begins, ledger({P0: 120})).refused
    assert compare(begins, ledger({P0: 125})).drop == (OffsetRange(P0, 120, 125),)
    with pytest.raises(LedgerConflict) as error:
        deciding(begins, before=ledger({P0: 100}))
    for part in (
        "Kafka had no committed offsets of group 'etl' for these partitions",
        "orders-0: starts at 120, the table holds up to 100",
        "--group etl --to-ledger --table /t --execute",
        "--group etl --to-further --table /t --execute",
    ):
        assert part in str(error.value)


# Recreated topics


def test_a_recreated_topic_starts_again_and_other_topics_do_not() -> None:
    old = Ledger(group="etl").with_offsets({P0: 100, P1: 100, OTHER: 7}, {"orders": "id-0", "other": "id-7"})
    comparison = compare(offset(4, ranges((0, 30)), followed=FOLLOWED), old)
    assert (comparison.recreated, comparison.refused) == (("orders",), ())
    assert comparison.ledger.offsets == {P0: 30, OTHER: 7}
    assert {name: topic.id for name, topic in comparison.ledger.topics.items()} == {"orders": "id-1", "other": "id-7"}


@pytest.mark.parametrize(("old", "new"), [("", "id-1"), ("id-1", "")])
def test_an_unknown_topic_id_is_not_another_topic(old: str, new: str) -> None:
    comparison = compare(offset(4, ranges((0, 30)), topic_id=new), ledger({P0: 100}, topic_id=old))
    assert comparison.recreated == ()
    assert comparison.ledger.topics == {"orders": LedgerTopic("orders", "id-1", {0: LedgerPartition(offset=100)})}


def test_offsets_of_a_topic_are_kept_when_a_batch_with_its_former_id_follows() -> None:
    """Two streams and a recreated topic: one stream does not know the new id yet. Ids have no order."""
    now = compare(offset(4, ranges((90, 100)), topic_id="id-1"), None).ledger
    now = compare(offset(5, ranges((0, 30)), topic_id="id-2"), now).ledger
    late = compare(offset(7, ranges((95, 120)), topic_id="id-1", stream="s2"), now)
    assert late.drop == (OffsetRange(P0, 95, 100),), "compared with the offsets of the former topic"
    assert late.recreated == ()
    assert late.ledger.topics == {"orders": LedgerTopic("orders", "id-2", {0: LedgerPartition(offset=30)})}
    assert late.ledger.former == {"id-1": LedgerTopic("orders", "id-1", {0: LedgerPartition(offset=120)})}
    again = compare(offset(6, ranges((20, 40)), topic_id="id-2"), late.ledger)
    assert again.drop == (OffsetRange(P0, 20, 30),)
    assert compare(offset(8, ranges((95, 120)), topic_id="id-1", stream="s2"), again.ledger).drop == (
        OffsetRange(P0, 95, 120),
    )


def test_a_former_id_that_the_table_reads_second_does_not_change_the_newer_topic() -> None:
    """The table had the new topic first, so the ledger does not show which topic is newer."""
    now = compare(offset(4, ranges((0, 30)), topic_id="id-2"), None).ledger
    now = compare(offset(7, ranges((95, 120)), topic_id="id-1", stream="s2"), now).ledger
    again = compare(offset(5, ranges((20, 40)), topic_id="id-2"), now)
    assert again.drop == (OffsetRange(P0, 20, 30),)
    assert compare(offset(6, ranges((40, 50)), topic_id="id-2"), again.ledger).drop == ()


def test_an_id_of_a_topic_that_the_batch_does_not_read_is_ignored() -> None:
    """A stream keeps the ids of topics whose partitions were revoked, also after the topics are recreated."""
    old = Ledger(group="etl").with_offsets({P0: 30, OTHER: 7}, {"orders": "id-2"})
    batch = replace(offset(4, {("other", 0): (7, 9)}), topic_ids={"orders": "id-1", "other": "id-7"})
    comparison = compare(batch, old)
    assert comparison.recreated == ()
    assert comparison.ledger.offsets == {P0: 30, OTHER: 9}
    assert {name: topic.id for name, topic in comparison.ledger.topics.items()} == {"orders": "id-2", "other": "id-7"}


def test_former_topics_are_kept_through_resets_up_to_a_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_format, "FORMER_MAX", 4)
    now = None
    for n in range(8):
        now = compare(offset(n, ranges((0, n + 1)), topic_id=f"id-{n}", reset_number=n), now).ledger
    assert now is not None
    assert now.former == {
        f"id-{n}": LedgerTopic("orders", f"id-{n}", {0: LedgerPartition(offset=n + 1)}) for n in range(3, 7)
    }


def test_records_of_a_topic_that_a_reset_found_deleted_are_not_written_again() -> None:
    old = Ledger(group="etl").with_offsets({P0: 30, OTHER: 7}, {"orders": "id-1", "other": "id-7"})
    now = old.after_reset(1, {}, deleted=["orders", "never-seen"])
    assert (now.offsets, list(now.former)) == ({OTHER: 7}, ["id-1"])
    recreated = compare(offset(9, ranges((0, 5)), topic_id="id-2", reset_number=1), now).ledger
    assert (recreated.offsets, list(recreated.former)) == ({P0: 5, OTHER: 7}, ["id-1"])
    there = compare(offset(9, ranges((20, 40)), reset_number=1), now)
    assert there.drop == (OffsetRange(P0, 20, 30),)
    assert (there.ledger.offsets, there.ledger.former) == ({P0: 40, OTHER: 7}, {})
    void = compare(offset(9, ranges((20, 40)), reset_number=0), now)
    assert (void.ledger.offsets, void.ledger.former) == (now.offsets, now.former), "planned before the reset"
    without_id = Ledger(group="etl").with_offsets({P0: 30}).after_reset(1, {}, deleted=["orders"])
    assert without_id.offsets == {P0: 30}, "without an id it cannot be distinguished from a new topic"


# Resets


def test_a_batch_planned_before_a_reset_is_void_and_does_not_move_the_ledger() -> None:
    old = ledger({P0: 100, P1: 7}, reset_number=2)
    batch = offset(9, ranges((90, 130), (0, 5)), followed=FOLLOWED, reset_number=1)
    comparison = compare(batch, old)
    assert comparison == Comparison(ledger=old.with_batch(batch, void=True), drop=tuple(batch.batch()), void=True)
    assert (comparison.ledger.reset_number, comparison.ledger.void) == (2, frozenset({"s1"}))


@pytest.mark.parametrize(("topic_id", "offsets"), [("id-1", {P0: 100, P1: 3}), ("id-2", {P0: 90, P1: 3})])
def test_a_void_batch_records_its_start_for_partitions_that_the_ledger_does_not_have(
    topic_id: str, offsets: dict[TopicPartition, int]
) -> None:
    """Kafka's offset may be above it by the time of the next reset: a reset to the ledger must lose nothing."""
    batch = offset(9, ranges((90, 130), (3, 5)), topic_id=topic_id, reset_number=1)
    comparison = compare(batch, ledger({P0: 100}, reset_number=2))
    assert comparison.void
    assert comparison.ledger.offsets == offsets
    assert comparison.ledger.offsets_of("orders", "id-1")[0] == 100, "the offset of the former topic stays"


def test_the_first_batch_after_a_reset_stores_the_reset_number_in_the_ledger() -> None:
    before = replace(ledger({P0: 100}, reset_number=1), void=frozenset({"s0"}))
    comparison = compare(offset(4, ranges((120, 130)), followed=FOLLOWED, reset_number=2), before)
    assert not comparison.void
    assert (comparison.ledger.reset_number, comparison.ledger.void, comparison.ledger.offsets) == (
        2,
        frozenset(),
        {P0: 130},
    )
    assert compare(offset(0, ranges((0, 5)), reset_number=3), None).ledger.reset_number == 3
    assert compare(offset(4, ranges((10, 30)), followed=FOLLOWED, reset_number=1), ledger({P0: 100})).refused, (
        "a reset without the table"
    )


# The decision about a batch


def deciding(
    *offsets: StreamOffset, before: Ledger | None = None, other_sources: bool = False
) -> AlreadyWritten | WriteBatch:
    groups = {o.group for o in offsets}
    given = {g: before if g == "etl" else None for g in groups}
    return decide(offsets, given, table="/t", batch_id=5, other_sources=other_sources)


def test_a_recorded_batch_is_not_written_if_it_is_the_same_batch_or_the_ledger_covers_it() -> None:
    batch = offset(4, ranges((90, 130)))
    written = compare(batch, ledger({P0: 90})).ledger
    assert deciding(batch, before=written) == AlreadyWritten(durable=(batch,))
    back = written.with_offsets({P0: 95})
    assert deciding(batch, before=back) == AlreadyWritten(durable=(batch,)), "wherever the ledger was moved to since"
    late = offset(3, ranges((80, 90)))
    assert deciding(late, before=written) == AlreadyWritten(durable=(late,)), "of a fenced driver"
    assert deciding(batch, before=written.after_reset(1, {})) == AlreadyWritten(durable=()), (
        "void: not reported as durable"
    )
    for another, missing in ((offset(4, ranges((90, 140))), (130, 140)), (offset(3, ranges((131, 135))), (131, 135))):
        with pytest.raises(LedgerConflict, match="is the checkpoint used twice") as refused:
            deciding(another, before=written)
        assert refused.value.fields["missing"] == [("orders", 0, *missing)]


def test_ranges_that_the_ledger_does_not_cover_are_found() -> None:
    batch = offset(4, ranges((90, 130), (0, 5), (8, 8)))
    assert missing_from_ledger(batch, ledger({P0: 130, P1: 5})) == []
    for known in (
        ledger({P0: 100}),
        ledger({P0: 100}).with_offsets({}, {"orders": "id-2"}).with_offsets({}, {"orders": "id-1"}),
    ):
        assert missing_from_ledger(batch, known) == [OffsetRange(P0, 100, 130), OffsetRange(P1, 0, 5)]
    assert missing_from_ledger(batch, ledger({P0: 500}, topic_id="id-2")) == [
        OffsetRange(P0, 90, 130),
        OffsetRange(P1, 0, 5),
    ]
    assert missing_from_ledger(batch, ledger({P0: 0}, reset_number=1)) == [], "not comparable"


def test_streams_are_kept_up_to_a_maximum_and_a_void_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_format, "STREAMS_MAX", 3)
    now = ledger({P0: 100}, reset_number=1)
    for n in range(6):
        now = compare(offset(9, ranges((90, 130)), stream=f"s{n}", reset_number=min(n, 1)), now).ledger
    assert list(now.streams) == ["s0", "s3", "s4", "s5"]
    with pytest.raises(LedgerConflict, match="knows reset #1 of group 'etl', and stream s0 does not"):
        deciding(offset(10, ranges((130, 140)), stream="s0"), before=now)


def test_a_void_batch_is_recorded_and_none_of_its_rows_is_read() -> None:
    found = deciding(offset(4, ranges((90, 130))), before=ledger({P0: 100}, reset_number=1))
    assert isinstance(found, WriteBatch)
    assert (found.reads_rows, found.changes_ledger, found.durable) == (False, True, ())
    assert found.ledgers["etl"].offsets == {P0: 100}


def test_only_the_rows_of_the_void_source_are_left_out() -> None:
    mine, other = offset(4, ranges((90, 130))), offset(7, {("other", 0): (3, 8)}, group="b", stream="s2")
    found = deciding(mine, other, before=ledger({P0: 100}, reset_number=1))
    assert isinstance(found, WriteBatch)
    assert found.reads_rows
    assert found.drop == (OffsetRange(P0, 90, 130),)
    assert found.ledgers["b"].offsets == {OTHER: 8}
    assert found.durable == (other,)
    with_rate = deciding(mine, before=ledger({P0: 100}, reset_number=1), other_sources=True)
    assert isinstance(with_rate, WriteBatch)
    assert with_rate.reads_rows


def test_rows_to_leave_out_that_two_sources_may_have_read_are_refused() -> None:
    mine, other = offset(4, ranges((90, 130))), offset(7, ranges((3, 8)), group="b", stream="s2")
    with pytest.raises(LedgerConflict, match="cannot be distinguished") as error:
        deciding(mine, other, before=ledger({P0: 100}, reset_number=1))
    assert error.value.fields["partitions"] == [("orders", 0)]


def test_a_batch_that_moves_no_position_needs_no_commit_unless_it_knows_a_newer_reset() -> None:
    idle = deciding(offset(4, ranges((100, 100))), before=ledger({P0: 100}))
    assert isinstance(idle, WriteBatch) and not idle.changes_ledger
    newer = deciding(offset(4, ranges((100, 100)), reset_number=1), before=ledger({P0: 100}))
    assert isinstance(newer, WriteBatch) and newer.changes_ledger


def test_a_stream_that_does_not_know_the_reset_after_a_void_batch_is_refused() -> None:
    """The notes beside Kafka's offsets may be lost: leaving out each batch would lose records silently."""
    first = deciding(offset(4, ranges((90, 130))), before=ledger({P0: 100}, reset_number=2))
    assert isinstance(first, WriteBatch)
    after = first.ledgers["etl"]
    assert deciding(offset(4, ranges((90, 130))), before=after) == AlreadyWritten(durable=()), (
        "the same batch, replayed"
    )
    with pytest.raises(LedgerConflict) as error:
        deciding(offset(5, ranges((130, 140))), before=after)
    for part in ("batch 5", "reset #2", "--group etl --to-ledger --table /t --execute"):
        assert part in str(error.value)
    another = deciding(offset(5, ranges((90, 95)), stream="s2"), before=after)
    assert isinstance(another, WriteBatch), "each stream may have one void batch"


def test_a_refusal_names_table_group_both_offsets_and_both_commands_and_stays_short() -> None:
    many = {("orders", p): (10, 30) for p in range(1000)}
    before = ledger({TopicPartition("orders", p): 100 for p in range(1000)})
    with pytest.raises(LedgerConflict) as error:
        deciding(offset(4, many, followed=list(many)), before=before)
    for part in (
        "'etl'",
        "/t",
        "orders-0: committed offset 10, the table holds up to 100",
        "(and 995 more partitions)",
        "--group etl --to-ledger --table /t --execute",
        "--group etl --to-current --table /t --execute",
        "with the same checkpoint",
    ):
        assert part in str(error.value)
    assert len(str(error.value)) < 1500
    assert error.value.fields["refused"] == [("orders", p, 10, 100) for p in range(1000)]


# Its JSON


names = st.sampled_from(["a", "b", "c'\"\\ü"])
ids, numbers = st.text(max_size=3), st.integers(0, 2**63 - 1)
later = st.lists(st.builds(LaterRows, numbers, numbers), max_size=LATER_MAX).map(tuple)
maybe = st.none() | numbers
partition = st.builds(LedgerPartition, offset=maybe, epoch=numbers, gone=maybe, ahead=maybe, later=later).filter(
    lambda found: found != LedgerPartition()
)
topics = st.builds(LedgerTopic, names, ids, st.dictionaries(st.integers(0, 3), partition))


@given(
    st.builds(
        Ledger,
        group=st.just("g"),
        topics=st.lists(topics).map(lambda found: {topic.name: topic for topic in found}),
        former=st.lists(topics).map(lambda found: {topic.id: topic for topic in found}),
        streams=st.dictionaries(ids, st.builds(BatchKey, numbers, ids)),
        void=st.frozensets(ids),
        reset_number=numbers,
        number=numbers,
        table_version=st.just(-1),
    )
)
def test_a_ledger_is_read_as_it_was_written(before: Ledger) -> None:
    after = Ledger.from_json("g", json.loads(json.dumps(before.to_json_dict())))
    assert after == before
    assert (list(after.former), list(after.streams)) == (list(before.former), list(before.streams)), "the oldest first"


TOPICS = '{"a":{"id":"x","offsets":"0,1"}}'
TEXT = f'{{"former":{{}},"number":1,"reset":0,"streams":{{"s":[1,"d"]}},"topics":{TOPICS},"v":1,"void":[],"written":5}}'


@pytest.mark.parametrize(
    ("part", "damaged"),
    [
        (TEXT, "[]"),
        (TEXT, "7"),
        (TEXT, '{"v":1}'),
        ('"0,1"', '"0,-1"'),
        ('"0,1"', "1"),
        ('"0,1"', '"0"'),
        ('"0,1"', '"0,1;"'),
        ('"0,1"', '"zero,1"'),
        (TOPICS, '"zlib:eJw="'),
        (TOPICS, '"zlib:!"'),
        (TOPICS, '"a"'),
        (',"offsets":"0,1"', ""),
        (',"written":5', ""),
        ('"reset":0', '"reset":-1'),
        ('"reset":0', '"reset":"1"'),
        ('[1,"d"]', '[-1,"d"]'),
        ('[1,"d"]', "1"),
        ('"void":[]', '"void":7'),
        ('"v":1', '"v":1,"new":7'),
        ('"v":1', '"v":1,"new":{"b":"0,1"}'),
        ('"v":1', '"v":1,"new":{"a":"3,1"}'),
    ],
)
def test_a_damaged_ledger_is_refused(part: str, damaged: str) -> None:
    assert Ledger.from_json("etl", json.loads(TEXT)).offsets == {TopicPartition("a", 0): 1}
    with pytest.raises(LedgerConflict, match="damaged"):
        Ledger.from_json("etl", json.loads(TEXT.replace(part, damaged)))


@pytest.mark.parametrize("runs", [{}, {3: 7}, {0: 1, 1: -2, 5: 10**12, 7: 0, 8: 1}, {p * 3: p - 9 for p in range(900)}])
def test_numbers_of_partitions_are_read_as_they_were_written(runs: dict[int, int]) -> None:
    text = ledger_format._runs(runs)
    assert ledger_format._parse_runs(text) == runs


@pytest.mark.parametrize("partitions", [2, 2000])
def test_the_topics_of_a_large_ledger_are_compressed(partitions: int) -> None:
    offsets = {TopicPartition("a", p): p for p in range(partitions)}
    after = Ledger(group="g").with_offsets(offsets, {"a": "x"})
    doc = json.loads(json.dumps(after.to_json_dict(Ledger(group="g"), dict.fromkeys(offsets, 0))))
    assert [isinstance(doc[of], str) for of in ("topics", "new")] == [partitions == 2000] * 2
    assert Ledger.from_json("g", doc) == after and ledger_format.topic_names(doc) == {"a"}
    assert ledger_format.first_offsets(doc) == dict.fromkeys(offsets, 0)


def test_a_commit_has_the_start_of_each_partition_that_is_new_to_the_ledger() -> None:
    before = Ledger.from_json("etl", json.loads(TEXT))
    after = before.with_offsets({TopicPartition("a", 0): 3, TopicPartition("a", 7): 9})
    doc = after.to_json_dict(before, {TopicPartition("a", 7): 2})
    assert (doc["topics"]["a"]["offsets"], doc["new"]) == ("0,3;7,9", {"a": "7,7"})
    assert ledger_format.first_offsets(doc) == {TopicPartition("a", 7): 2}


def test_a_ledger_of_a_newer_release_is_refused() -> None:
    with pytest.raises(LedgerConflict, match=r"version 2, and this release reads version 1"):
        Ledger.from_json("etl", {"v": 2})


class Writers(RuleBasedStateMachine):
    """Several queries of one group write one table, each from a position of its own, and an operator resets the group:
    with the table or without it, also while earlier plans are pending."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger: Ledger | None = None
        self.table: list[tuple[TopicPartition, int]] = []
        self.last: dict[str, StreamOffset] = {}
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
        """``late``: the number of resets between the plan and its write."""
        self.seq += 1
        spans = {tp: (start, start + size) for tp, (start, size) in batch.items()}
        reset_number = max(0, self.resets - late)
        planned = offset(
            self.seq, spans, followed=sorted(followed & set(spans)), reset_number=reset_number, stream=stream
        )
        before = self.ledger or Ledger(group="etl")
        try:
            decision = decide([planned], {"etl": self.ledger}, table="/t", batch_id=self.seq)
        except LedgerConflict:
            return
        assert isinstance(decision, WriteBatch)
        after = decision.ledgers["etl"]
        if reset_number < before.reset_number:
            assert not decision.reads_rows
            assert after.reset_number == before.reset_number
            assert before.offsets.items() <= after.offsets.items()
        if decision.reads_rows:
            dropped = {(r.tp, n) for r in decision.drop for n in range(r.start, r.end)}
            for tp, (start, end) in spans.items():
                found = [(TopicPartition(*tp), n) for n in range(start, end)]
                self.table += [record for record in found if record not in dropped]
        for tp, n in before.offsets.items():
            assert after.offsets[tp] >= n, "the ledger moved backwards"
        assert after.reset_number >= before.reset_number
        self.ledger = after
        self.last[stream] = planned

    @rule(stream=st.sampled_from(["s1", "s2"]))
    def replay(self, stream: str) -> None:
        """Whatever was written and reset since."""
        if stream in self.last:
            decision = decide([self.last[stream]], {"etl": self.ledger}, table="/t", batch_id=self.seq)
            assert isinstance(decision, AlreadyWritten)

    @rule(to=st.dictionaries(st.integers(0, 2), st.integers(0, 40)), with_table=st.booleans())
    def reset(self, to: dict[int, int], with_table: bool) -> None:
        self.resets += 1
        if not with_table:  # also: it died between Kafka and the table
            return
        offsets = {TopicPartition("orders", p): n for p, n in to.items()}
        self.ledger = (self.ledger or Ledger(group="etl")).after_reset(self.resets, offsets)
        # Records that the operator writes again are counted apart from those in the table.
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
    table_writer.TableWriter(spark, str(path)).create(spark.createDataFrame([], SCHEMA))
    return str(path)


def test_setting_a_ledger_is_one_commit_without_rows_that_moves_the_given_partitions_and_never_to_an_older_reset(
    spark: "SparkSession", table: str
) -> None:
    def offsets() -> tuple[int, dict[TopicPartition, int]]:
        found = read_ledger(spark, table, "etl")
        assert found is not None and not found.streams, "an operator wrote it, not a stream"
        return found.reset_number, found.offsets

    assert read_ledger(spark, table, "etl") is None
    ids = {"orders": "id-1"}
    set_ledger(spark, table, "etl", {P0: 5, P1: 7}, reason="anna: replay", reset_number=1, topic_ids=ids)
    commit = commits(Path(table))[-1]
    (txn,) = actions(commit, "txn")
    assert (txn["appId"], txn["version"], len(commit)) == ("spark-group-source.etl", 1, 2)
    assert "anna: replay" in str(actions(commit, "commitInfo")[0]["userMetadata"])
    assert offsets() == (1, {P0: 5, P1: 7})
    set_ledger(spark, table, "etl", {P0: 2}, reason="back", reset_number=2)
    set_ledger(spark, table, "b", {P0: 1}, reason="another group", reset_number=1)
    with pytest.raises(OptionError, match="already knows reset #2 of group 'etl', so reset #1 is too old"):
        set_ledger(spark, table, "etl", {P0: 0}, reason="r", reset_number=1)
    assert offsets() == (2, {P0: 2, P1: 7})
    found = read_ledgers(table_writer.open_existing(spark, table).history())
    assert {group: one and one.offsets for group, one in found.items()} == {"b": {P0: 1}, "etl": {P0: 2, P1: 7}}


def test_a_reset_removes_deleted_topics_from_the_ledger_and_a_later_one_restores_them(
    spark: "SparkSession", table: str
) -> None:
    ids = {"orders": "id-1", "other": "id-7"}

    def after(reset_number: int, offsets: dict[TopicPartition, int], **given: Any) -> Ledger:
        set_ledger(spark, table, "etl", offsets, reason="r", reset_number=reset_number, **given)
        found = read_ledger(spark, table, "etl")
        assert found is not None
        return found

    assert after(1, {P0: 5, P1: 7, OTHER: 3}, topic_ids=ids).former == {}
    found = after(2, {OTHER: 4}, deleted=["orders"])
    assert (found.offsets, list(found.former)) == ({OTHER: 4}, ["id-1"])
    found = after(3, {P0: 5}, topic_ids={"orders": "id-1"})
    assert (found.offsets, found.former) == ({P0: 5, P1: 7, OTHER: 4}, {})


def test_a_damaged_ledger_is_replaced(spark: "SparkSession", table: str) -> None:
    set_ledger(spark, table, "etl", {P0: 5}, reason="r", reset_number=1)
    there = table_writer.TableWriter(spark, table)
    note = '[{"group":"etl","ledger":{"topics":7,"v":1},"v":1}]'
    there.commit(there.history(), None, {"spark-group-source.etl": 2}, note, needed=True)
    with pytest.raises(LedgerConflict, match="damaged"):
        read_ledger(spark, table, "etl")
    set_ledger(spark, table, "etl", {P1: 7}, reason="r", reset_number=3)
    found = read_ledger(spark, table, "etl")
    assert found is not None and (found.reset_number, found.offsets) == (3, {P1: 7})


def test_ledgers_set_at_the_same_time_are_all_kept(spark: "SparkSession", table: str) -> None:
    set_ledger(spark, table, "etl", {P0: 0}, reason="r", reset_number=1)

    def move(partition: int) -> None:
        for n in range(1, 4):
            set_ledger(spark, table, "etl", {TopicPartition("orders", partition): n}, reason="r", reset_number=1)

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(move, p) for p in range(3)]:
            done.result(300)
    found = read_ledger(spark, table, "etl")
    assert found is not None and found.offsets == {TopicPartition("orders", p): 3 for p in range(3)}
