"""``spark-group list``, ``describe`` and ``reset`` on a real group, without a query."""

import json
from datetime import UTC, datetime

import pytest
from kafka_helpers import await_until, set_committed
from scenes import Scene, refused
from streams import OtherMember, numbered

from spark_group_source.cli.common import RETRIABLE
from spark_group_source.kafka.group_admin import GroupAdmin
from spark_group_source.kafka.translation import ListedGroup
from spark_group_source.model import TopicPartition


def test_describe_of_a_missing_group_is_refused(scene: Scene) -> None:
    for command in (("describe",), ("reset", "--to-latest"), ("migrate", "--to-checkpoint")):
        assert f"group {scene.group!r} does not exist" in refused(scene.of_group(*command)), command


def test_reset_creates_a_group(scene: Scene) -> None:
    name = scene.topic()
    scene.produce(name, numbered(0, 4))
    shown = scene.of_group("reset", "--topic", name, "--to-latest", "--execute")
    assert f"group {scene.group} does not exist yet; the reset creates it" in shown.output
    assert "--table" not in shown.output, "no table has a ledger of it"
    assert scene.committed() == {TopicPartition(name, 0): 5}


def test_group_deleted_after_listing_is_skipped(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    name, here, gone = scene.topic(), f"{scene.group}-here", f"{scene.group}-gone"
    set_committed(scene.admin, here, name, {0: 0})
    listed = [ListedGroup(group, "empty", "classic") for group in (gone, here)]
    monkeypatch.setattr(GroupAdmin, "groups", lambda _: listed)
    every = scene.typed("describe", "--all-groups", "--json", "--bootstrap-server", scene.servers)
    assert [one["group"] for one in json.loads(every.output)] == [here]
    named = scene.typed("describe", "--group", here, "--group", gone, "--bootstrap-server", scene.servers)
    assert f"group {gone!r} does not exist" in refused(named)


def test_list_and_describe_show_all_groups_with_state(scene: Scene) -> None:
    name, idle = scene.topic(3), f"{scene.group}-idle"
    set_committed(scene.admin, idle, name, {0: 0})

    def shown(*words: str) -> str:
        result = scene.typed(*words, "--bootstrap-server", scene.servers)
        assert result.code == 0, result.output
        return result.output

    with OtherMember(scene.servers, scene.group, [name]) as other:
        await_until(lambda: len(other.partitions) == 3, what="its partitions")
        assert {scene.group, idle} <= set(shown("list").splitlines())
        listed = {one["group"]: one["state"] for one in json.loads(shown("list", "--json"))}
        assert (listed[scene.group], listed[idle]) == ("stable", "empty")
        states = {one["group"] for one in json.loads(shown("list", "--state", "Empty,Dead", "--json"))}
        assert idle in states and scene.group not in states
        every = {one["group"]: one for one in json.loads(shown("describe", "--all-groups", "--json"))}
        assert [row["committed"] for row in every[idle]["partitions"]] == [0]
        assert len(every[scene.group]["members"]) == 1
        both = shown("describe", "--group", scene.group, "--group", idle, "--state")
        assert f"127.0.0.1:{scene.servers.rpartition(':')[2]} (" in both
        assert "lag" not in both
        verbose = shown("describe", "--group", scene.group, "--members", "--verbose")
        assert f"{name} 0-2" in verbose


PLACES = {
    ("--to-earliest",): (0, 0),
    ("--to-latest",): (6, 5),
    ("--to-offset", "3"): (3, 3),
    ("--to-offset", "99"): (6, 5),
    ("--to-offsets", '{"%s":{"0":-1,"1":1}}'): (6, 1),
    ("--to-offsets", '{"%s":{"0":-2}}'): (0, 5),
    ("--to-datetime", datetime.fromtimestamp(2_000, UTC).isoformat()): (5, 5),
    ("--by-duration", "PT0S"): (6, 5),
    ("--by-duration", "P36500D"): (0, 0),
    ("--shift-by", "-2"): (3, 3),
    ("--shift-by", "99"): (6, 5),
    ("--shift-by", "-1", "--topic", "%s:1"): (5, 4),
    ("--to-current",): (5, 5),
}
"""Destinations of a group that is at 5 in both partitions."""


def test_reset_moves_offsets_only_with_execute(scene: Scene) -> None:
    name = scene.topic(2, config={"retention.ms": "-1"})  # else the broker removes records that are as old as these
    scene.produce(name, numbered(0, 9, 2, at_ms=1_000_000))
    scene.produce(name, numbered(10, 10, 2, at_ms=3_000_000))
    here = {TopicPartition(name, 0): 5, TopicPartition(name, 1): 5}
    for to, then in PLACES.items():
        set_committed(scene.admin, scene.group, name, {0: 5, 1: 5})
        arguments = [argument % name if "%s" in argument else argument for argument in to]
        assert "nothing was changed" in scene.of_group("reset", *arguments).output, to
        assert scene.committed() == here, to
        scene.of_group("reset", *arguments, "--execute")
        assert scene.committed() == dict(zip(here, then, strict=True)), to


def test_reset_is_refused_while_the_group_has_members(scene: Scene) -> None:
    name = scene.topic()
    with OtherMember(scene.servers, scene.group, [name]) as other:
        await_until(lambda: other.partitions, what="its partitions")
        shown = scene.of_group("reset", "--to-latest", "--topic", name, "--execute")
        assert shown.code == RETRIABLE, shown.output
        assert f"group '{scene.group}' is stable with 1 member: Kafka moves offsets only" in shown.output
        assert scene.committed() == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--to-latest", "--topic", "no-such-topic"), "topic no-such-topic does not exist"),
        (
            ("--to-latest", "--execute"),
            "of a share group or a streams group; to create it, name the topics with --topic",
        ),
        (("--to-current", "--topic", "no-such-topic:0"), "topic no-such-topic does not exist"),
        (("--to-offsets", '{"no-such-topic":{"0":1}}'), "partition no-such-topic-0 does not exist"),
    ],
)
def test_reset_refuses_invalid_arguments(arguments: tuple[str, ...], message: str, scene: Scene) -> None:
    assert message in refused(scene.of_group("reset", *arguments))
