"""Starting positions: the options, the group's offsets, and topics and partitions that are added later; without
Spark."""

import json
from typing import Any

import pytest
from kafka_helpers import Record, await_until
from scenes import Scene
from streams import numbered, texts, values_of

T0_MS = 1_700_000_000_000
STRATEGY = "kafka.partition.assignment.strategy"
KEPT = {"retention.ms": "-1"}  # otherwise retention deletes records this old
EVERYTHING = [f"{p}@{n}" for p in range(4) for n in range(3)]
BY_TIME = ["0@0", "0@1", "0@2", "1@1", "1@2", "2@2", "3@0", "3@1", "3@2"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, EVERYTHING),
        ({"startingOffsets": "latest"}, []),
        ({"startingOffsets": {"0": -2, "1": -1, "2": 0, "3": 2}}, ["0@0", "0@1", "0@2", "2@0", "2@1", "2@2", "3@2"]),
        # Partition 3 has no record at or after the timestamp.
        (
            {"startingTimestamp": T0_MS + 1, "startingOffsetsByTimestampStrategy": "latest"},
            [f"{p}@{n}" for p in range(3) for n in (1, 2)],
        ),
        ({"startingOffsetsByTimestamp": {"0": T0_MS, "1": T0_MS + 1, "2": T0_MS + 2, "3": T0_MS - 9}}, BY_TIME),
    ],
    ids=lambda value: next(iter(value), "nothing") if isinstance(value, dict) else "",
)
def test_a_group_without_offsets_starts_at_the_starting_options(
    options: dict[str, object], expected: list[str], scene: Scene
) -> None:
    """Record n of partitions 0 to 2 is n ms younger than their first one; those of partition 3 are older."""
    name = scene.topic(4, config=KEPT)
    for p in range(4):
        at_ms = [T0_MS - 9] * 3 if p == 3 else [T0_MS, T0_MS + 1, T0_MS + 2]
        records = [Record(f"{p}@{n}".encode(), timestamp_ms=at) for n, at in enumerate(at_ms)]
        scene.produce(name, records, partition=p)
    given: dict[str, Any] = {
        key: json.dumps({name: value}) if isinstance(value, dict) else value for key, value in options.items()
    }
    one = scene.played(subscribe=name, **given)
    assert one.run() == expected
    assert scene.committed() == scene.end_offsets(name)
    scene.produce(name, ["later"], partition=3)
    assert one.run() == ["later"]


def test_the_resolved_start_survives_a_driver_that_dies_before_batch_0(scene: Scene) -> None:
    name = scene.topic(2)
    scene.produce(name, numbered(0, 3, 2))
    one = scene.played(subscribe=name, startingOffsets="latest", leaveOnStop="always")
    with one.running() as dying:
        dying.plan()  # Spark does not write the offset
        await_until(lambda: len(scene.committed()) == 2, what="the resolved start in the group")
    scene.produce(name, numbered(4, 7, 2))
    with one.running() as second:
        second.step()
        assert values_of(second.rows) == texts(4, 7)


def test_partitions_added_while_a_query_is_stopped_are_read_from_their_start(scene: Scene) -> None:
    name = scene.topic(5)
    scene.produce(name, numbered(0, 9, 5))
    one = scene.played(subscribe=name, startingOffsets="latest")
    assert one.run() == []
    scene.grow(name, 10)
    scene.produce(name, numbered(10, 39, 10))
    assert one.run() == texts(10, 39)


@pytest.mark.parametrize(("by", "protocol"), [("subscribe", "consumer"), ("subscribePattern", "classic")])
def test_a_topic_that_does_not_exist_yet_is_reported_and_read_from_its_first_record(
    by: str, protocol: str, scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"{scene.group}-later"
    one = scene.played(protocol, startingOffsets="latest", **{by: name})
    warning = f"topic {name} does not exist" if by == "subscribe" else "no topic matches subscribePattern"
    assert one.run() == []
    assert caplog.text.count(warning) == 1
    with one.running() as engine:
        assert engine.step() is None
        scene.topic(2, name=name)
        scene.produce(name, numbered(0, 5, 2))
        await_until(lambda: engine.step() is not None, what="a batch with the new topic")
        engine.run()
    assert values_of(one.rows) == texts(0, 5)
    assert caplog.text.count(warning) == 2, "once for each run"
    assert scene.committed() == scene.end_offsets(name)


def test_topics_that_exist_are_read_while_another_named_one_is_missing(scene: Scene) -> None:
    name, later = scene.topic(2), f"{scene.group}-later"
    scene.produce(name, numbered(0, 3, 2))
    one = scene.played(subscribe=f"{later},{name}")
    assert one.run() == texts(0, 3)
    with one.running() as engine:
        scene.produce(name, numbered(4, 5, 2))
        engine.run()
        assert values_of(engine.rows) == texts(4, 5)
        assert f"topic {later} does not exist" in scene.of_group("describe").output
        scene.topic(name=later)
        scene.produce(later, numbered(6, 7))
        await_until(lambda: engine.step() is not None, what="a batch with the new topic")
        engine.run()
        scene.produce(name, numbered(8, 9, 2))
        await_until(lambda: engine.step() is not None, what="a batch with the other topic")
        engine.run()
    assert values_of(one.rows) == texts(0, 9)
    assert scene.committed() == {**scene.end_offsets(name), **scene.end_offsets(later)}


@pytest.mark.parametrize(("strategy", "leave_on_stop"), [("range", "auto"), ("cooperative-sticky", "never")])
def test_a_query_whose_topic_was_deleted_reads_the_topic_that_replaces_it_in_the_subscription(
    strategy: str, leave_on_stop: str, scene: Scene
) -> None:
    former, name = scene.topic(2), f"{scene.group}-later"
    scene.produce(former, numbered(0, 3, 2))
    one = scene.played(subscribe=former, leaveOnStop=leave_on_stop, **{STRATEGY: strategy})
    assert one.run() == texts(0, 3)
    scene.delete(former)
    scene.topic(2, name=name)
    scene.produce(name, numbered(4, 7, 2))
    assert one.run(subscribe=name) == texts(4, 7)
    assert scene.committed().items() >= scene.end_offsets(name).items()
