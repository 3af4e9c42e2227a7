"""``spark-group`` and Kafka's own ``kafka-consumer-groups`` on the same group: output, plans and files."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from kafka_helpers import await_until, set_committed
from kafka_tool import kafka_consumer_groups, kafka_tools_jars, parse_group_table
from scenes import Scene
from streams import OtherMember, numbered

from spark_group_source.model import TopicPartition

Tool = Callable[..., str]


@pytest.fixture
def kafkas(scene: Scene, jvm: None) -> Tool:
    """``kafkas("--describe")``: Kafka's tool on the test's group; returns what it prints."""

    def run(*arguments: str) -> str:
        printed = kafka_consumer_groups(scene.servers, "--group", scene.group, *arguments)
        assert "Error" not in printed, printed
        return printed

    return run


@pytest.fixture
def ours(scene: Scene) -> Tool:
    """The same with ``spark-group``; the options have the same names."""

    def run(command: str, *arguments: str) -> str:
        done = scene.of_group(command, *arguments)
        assert done.code == 0, done.output
        return done.stdout

    return run


def plan_of(text: str) -> dict[TopicPartition, int]:
    """A CSV plan, parsed without code of this package."""
    rows = (row for row in csv.reader(text.splitlines()) if row)
    return {TopicPartition(topic, int(p)): int(at) for topic, p, at in rows}


def test_jars_of_kafkas_tools_do_not_include_kafka_connect(jvm: None) -> None:
    names = [jar.name for jar in kafka_tools_jars()]
    assert any("kafka-tools" in name for name in names)
    assert [name for name in names if "connect" in name] == []


def test_describe_matches_kafka_consumer_groups(scene: Scene, kafkas: Tool, ours: Tool) -> None:
    name = scene.topic(3)
    scene.produce(name, numbered(0, 29, 3))
    set_committed(scene.admin, scene.group, name, {0: 4, 1: 7, 2: 10})
    with OtherMember(scene.servers, scene.group, [name]) as other:
        await_until(lambda: len(other.partitions) == 3, what="its partitions")
        rows = parse_group_table(kafkas("--describe"))
        found = json.loads(ours("describe", "--json"))
        member = found["members"][0]
        assert [
            (r["PARTITION"], r["CURRENT-OFFSET"], r["LOG-END-OFFSET"], r["LAG"], r["CONSUMER-ID"]) for r in rows
        ] == [
            (*(str(r[key]) for key in ("partition", "committed", "end", "lag")), member["member_id"])
            for r in found["partitions"]
        ]
        (state,) = parse_group_table(kafkas("--describe", "--state"))
        assert state["STATE"].lower() == found["state"]
        assert state["ASSIGNMENT-STRATEGY"] == found["assignor"] or found["assignor"] in state.values()
        assert found["coordinator"].split()[0] in kafkas("--describe", "--state")


def test_exported_plans_are_exchangeable_with_kafka_consumer_groups(
    scene: Scene, kafkas: Tool, ours: Tool, tmp_path: Path
) -> None:
    name, path = scene.topic(2), tmp_path / "plan.csv"
    scene.produce(name, numbered(0, 19, 2))
    here = {0: 4, 1: 7}
    set_committed(scene.admin, scene.group, name, here)

    path.write_text(ours("reset", "--shift-by", "-2", "--export"))
    assert plan_of(path.read_text()) == {TopicPartition(name, 0): 2, TopicPartition(name, 1): 5}
    kafkas("--reset-offsets", "--from-file", str(path), "--execute")
    assert scene.committed() == plan_of(path.read_text())

    path.write_text(kafkas("--reset-offsets", "--all-topics", "--shift-by", "3", "--export", "--dry-run"))
    assert plan_of(path.read_text()) == {TopicPartition(name, 0): 5, TopicPartition(name, 1): 8}
    assert ours("reset", "--shift-by", "3", "--export") == ours("reset", "--from-file", str(path), "--export")
    ours("reset", "--from-file", str(path), "--execute")
    assert scene.committed() == plan_of(path.read_text())

    words = ("--topic", f"{name}:1", "--by-duration", "P1DT1H", "--export", "--dry-run")
    assert plan_of(kafkas("--reset-offsets", *words)) == plan_of(ours("reset", *words))
