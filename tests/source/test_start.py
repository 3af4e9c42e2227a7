"""Where a query starts: the starting options, the group's offsets, the checkpoint, and partitions that come later."""

import json
import shutil

import pytest
from conftest import Record, await_until
from kafka_words import set_committed
from scenes import Scene
from streams import PROTOCOLS, Engine, numbered, planned, texts, values_of

from spark_group_source.model import TopicPartition

pytestmark = pytest.mark.spark


# --- latest and earliest --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_B1_B2_latest_gives_what_comes_later_and_a_restart_what_came_meanwhile_nothing_twice(
    protocol: str, scene: Scene
) -> None:
    name = scene.topic(5)
    scene.produce(name, numbered(0, 9, 5))
    one = scene.job(protocol, subscribe=name, startingOffsets="latest")
    with one.running() as query:
        query.processAllAvailable()
        scene.produce(name, numbered(10, 19, 5))
        query.processAllAvailable()
    scene.produce(name, numbered(20, 29, 5))
    with one.running() as query:
        query.processAllAvailable()
        scene.produce(name, numbered(30, 34, 5))
        query.processAllAvailable()
    assert one.values == texts(10, 34)


def test_B3_latest_is_resolved_once_whether_the_checkpoint_stays_or_goes(scene: Scene) -> None:
    name = scene.topic(2)
    scene.produce(name, numbered(0, 3, 2))
    first = scene.job(subscribe=name, startingOffsets="latest")
    assert first.run() == []
    assert planned(first.checkpoint)[0].positions() == {TopicPartition(name, 0): 2, TopicPartition(name, 1): 2}
    assert scene.committed() == {TopicPartition(name, 0): 2, TopicPartition(name, 1): 2}
    scene.produce(name, numbered(4, 7, 2))
    shutil.copytree(first.checkpoint, first.checkpoint.with_name("kept"))
    assert values_of(scene.job(checkpoint="kept", subscribe=name, startingOffsets="latest").run()) == texts(4, 7)
    scene.produce(name, numbered(8, 9, 2))
    assert values_of(scene.job(checkpoint="new", subscribe=name, startingOffsets="latest").run()) == texts(8, 9)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_B3_a_driver_that_dies_before_batch_0_has_fixed_the_start_for_the_next_one(protocol: str, scene: Scene) -> None:
    name = scene.topic(2)
    scene.produce(name, numbered(0, 3, 2))
    options = scene.options(
        protocol,
        subscribe=name,
        startingOffsets="latest",
        leaveOnStop="always",
    )
    with Engine(options) as dying:
        dying.plan()  # Spark never wrote it down
        await_until(lambda: len(scene.committed()) == 2, what="the resolved start in the group")
    scene.produce(name, numbered(4, 7, 2))
    with Engine(options) as second:
        second.step()
        assert values_of(second.rows) == texts(4, 7)


def test_without_a_word_a_group_without_offsets_starts_at_the_beginning(scene: Scene) -> None:
    name = scene.topic(2)
    scene.produce(name, numbered(0, 5, 2))
    one = scene.job(subscribe=name)
    one.run()
    assert one.values == texts(0, 5)


# --- a start for each partition -------------------------------------------------------------------------------------


def test_B4_each_partition_begins_where_the_json_says(scene: Scene) -> None:
    name = scene.topic(5)
    for p in range(5):
        scene.produce(name, [f"{p}@{n}" for n in range(3)], partition=p)
    starts = {name: {"0": -2, "1": -1, "2": 0, "3": 1, "4": 2}}
    one = scene.job(subscribe=name, startingOffsets=json.dumps(starts))
    one.run()
    assert one.values == ["0@0", "0@1", "0@2", "2@0", "2@1", "2@2", "3@1", "3@2", "4@2"]
    assert scene.committed() == scene.end_offsets(name)


@pytest.mark.parametrize("numbers", [[0, 1], [0, 1, 2, 3]], ids=["too few", "too many"])
def test_B5_json_that_names_other_partitions_is_refused_with_both_lists(numbers: list[int], scene: Scene) -> None:
    name = scene.topic(3)
    one = scene.job(subscribe=name, startingOffsets=json.dumps({name: {str(n): -2 for n in numbers}}))
    with pytest.raises(Exception, match="OptionError") as failure:
        one.run()
    specified, assigned = (", ".join(f"{name}-{n}" for n in found) for found in (numbers, range(3)))
    assert f"specified [{specified}]; assigned [{assigned}]" in str(failure.value)
    assert scene.committed() == {}


# --- timestamps -----------------------------------------------------------------------------------------------------

T0_MS = 1_700_000_000_000
KEPT = {"retention.ms": "-1"}  # else records this old are deleted at once


def stamped(scene: Scene, name: str, partition: int, *at_ms: int) -> None:
    scene.produce(
        name, [Record(f"{partition}@{at - T0_MS}".encode(), timestamp_ms=at) for at in at_ms], partition=partition
    )


def test_B6_B7_a_timestamp_starts_at_the_first_record_not_older_and_latest_waits_where_none_is(scene: Scene) -> None:
    name = scene.topic(3, config=KEPT)
    stamped(scene, name, 0, T0_MS, T0_MS + 10, T0_MS + 20)
    stamped(scene, name, 1, T0_MS, T0_MS + 11)
    stamped(scene, name, 2, T0_MS)  # nothing young enough yet
    one = scene.job(subscribe=name, startingTimestamp=T0_MS + 10, startingOffsetsByTimestampStrategy="latest")
    one.run()
    assert one.values == ["0@10", "0@20", "1@11"]
    stamped(scene, name, 2, T0_MS + 30)
    assert values_of(one.run()) == ["2@30"]


def test_B6_B49_no_record_is_young_enough_and_the_strategy_is_error(scene: Scene) -> None:
    name = scene.topic(2, config=KEPT)
    stamped(scene, name, 0, T0_MS + 10)
    stamped(scene, name, 1, T0_MS)
    with pytest.raises(Exception, match=rf"no record of {name}-1 is as young .*{T0_MS + 10}"):
        scene.job(subscribe=name, startingTimestamp=T0_MS + 10).run()
    assert scene.committed() == {}  # also not for the partition that could be resolved


def test_B6_timestamps_for_each_partition(scene: Scene) -> None:
    name = scene.topic(2, config=KEPT)
    for p in range(2):
        stamped(scene, name, p, T0_MS, T0_MS + 10, T0_MS + 20)
    one = scene.job(subscribe=name, startingOffsetsByTimestamp=json.dumps({name: {"0": T0_MS + 5, "1": T0_MS + 15}}))
    one.run()
    assert one.values == ["0@10", "0@20", "1@20"]


def test_B8_the_timestamp_for_all_wins(scene: Scene) -> None:
    name = scene.topic(1, config=KEPT)
    stamped(scene, name, 0, T0_MS, T0_MS + 10, T0_MS + 20)
    one = scene.job(
        subscribe=name,
        startingTimestamp=T0_MS + 20,
        startingOffsetsByTimestamp=json.dumps({name: {"0": T0_MS + 10}}),
        startingOffsets="earliest",
    )
    one.run()
    assert one.values == ["0@20"]


# --- subscriptions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_B12_a_pattern_matches_whole_names_and_topics_that_come_later_but_never_the_brokers_own(
    protocol: str, scene: Scene
) -> None:
    base = scene.group.replace("[", "").replace("]", "")
    for name in (base, f"__audit-{base}", f"{base}-eu"):
        scene.produce(scene.topic(name=name), [f"in {name}"])
    pattern = rf"(__consumer_offsets|__audit-{base}|{base}|{base}-later-\d)"
    one = scene.job(protocol, subscribePattern=pattern, startingOffsets="earliest")
    with one.running() as query:
        query.processAllAvailable()
        assert {row.topic for row in one.rows} == {base, f"__audit-{base}"}
        later = scene.topic(name=f"{base}-later-1")
        scene.topic(name=f"{base}-later-x")
        scene.produce(later, ["in a later one"])
        await_until(lambda: "in a later one" in one.values, what="the topic that came later")
    assert {row.topic for row in one.rows} == {base, f"__audit-{base}", later}


def test_B13_a_topic_named_twice_is_read_once(scene: Scene) -> None:
    name = scene.topic(2)
    scene.produce(name, numbered(0, 5, 2))
    one = scene.job(subscribe=f"{name},{name}")
    one.run()
    assert one.values == texts(0, 5)


def test_two_topics_with_different_numbers_of_partitions(scene: Scene) -> None:
    one, other = scene.topic(1), scene.topic(3)
    scene.produce(one, numbered(0, 2, 1))
    scene.produce(other, numbered(3, 8, 3))
    both = scene.job(subscribe=f"{one},{other}", groupMembers=2)
    both.run()
    assert both.values == texts(0, 8)
    assert {row.topic for row in both.rows} == {one, other}


# --- partitions that come later -------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_B14_partitions_that_come_while_it_runs_are_read_from_their_beginning(protocol: str, scene: Scene) -> None:
    name = scene.topic(5)
    scene.produce(name, numbered(0, 9, 5))
    one = scene.job(protocol, subscribe=name, startingOffsets="latest")
    with one.running() as query:
        query.processAllAvailable()
        scene.grow(name, 10)
        scene.produce(name, numbered(10, 39, 10))
        await_until(lambda: len(one.rows) >= 30, what="the rows of old and new partitions")
    assert one.values == texts(10, 39)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_B14_partitions_that_came_while_it_was_stopped_are_read_from_their_beginning(
    protocol: str, scene: Scene
) -> None:
    name = scene.topic(5)
    scene.produce(name, numbered(0, 9, 5))
    one = scene.job(protocol, subscribe=name, startingOffsets="latest")
    one.run()
    scene.grow(name, 10)
    scene.produce(name, numbered(10, 39, 10))
    one.run()
    assert one.values == texts(10, 39)


# --- checkpoint and group -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_B54_a_deleted_checkpoint_goes_on_where_the_group_stands(protocol: str, scene: Scene) -> None:
    name = scene.topic(3)
    scene.produce(name, numbered(0, 8, 3))
    first = scene.job(protocol, subscribe=name)
    first.run()
    shutil.rmtree(first.checkpoint)
    scene.produce(name, numbered(9, 11, 3))
    assert values_of(scene.job(protocol, subscribe=name).run()) == texts(9, 11)


def test_a_group_that_an_ordinary_consumer_had_is_taken_over_where_it_stands(scene: Scene) -> None:
    name = scene.topic(2)
    scene.produce(name, numbered(0, 9, 2))
    set_committed(scene.admin, scene.group, name, {0: 2, 1: 4})
    one = scene.job(subscribe=name)  # startingOffsets is earliest, and has no say where the group has an offset
    one.run()
    assert one.values == sorted(["4", "6", "8", "9"])


def test_B55_an_operators_reset_while_it_was_stopped_is_followed(scene: Scene) -> None:
    name = scene.topic(2)
    scene.produce(name, numbered(0, 9, 2))
    one = scene.job(subscribe=name)
    one.run()
    set_committed(scene.admin, scene.group, name, {0: 3})
    assert values_of(one.run()) == ["6", "8"]
    last = max(planned(one.checkpoint).items())[1]
    assert last.followed == {TopicPartition(name, 0)}  # the sink is told that this start is not its own
    assert scene.committed() == {TopicPartition(name, 0): 5, TopicPartition(name, 1): 5}


def test_B55_the_reset_is_said_in_the_log(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    name = scene.topic(1)
    scene.produce(name, numbered(0, 4, 1))
    options = scene.options(subscribe=name, leaveOnStop="always")
    with Engine(options) as first:
        first.step()
        first.step()
    set_committed(scene.admin, scene.group, name, {0: 1})
    with Engine(options, first.log) as second:
        second.step()
    assert values_of(second.rows) == texts(1, 4)
    assert f"{name}-0 was moved from 5 to 1 by another member or an operator" in caplog.text
