"""Partitions and topics that are added and removed, and runs that restart (G5, G7)."""

import pytest
from kafka_helpers import await_until

from rebalance.accounts import Flow, stays
from rebalance.conftest import GroupScene
from rebalance.runs import Run, RunProcess
from spark_group_source.model import TopicPartition

PROTOCOLS = ("range", "consumer")


@pytest.mark.parametrize("strategy", PROTOCOLS)
def test_partitions_added_while_running_are_read_from_their_start(strategy: str, scene: GroupScene) -> None:
    """Also under startingOffsets=latest: no record between their creation and their detection is lost."""
    name = scene.topic(4)
    with (
        Run(scene.run_options(name, strategy, startingOffsets="latest")) as run,
        scene.ordinary(name, strategy=strategy) as other,
    ):
        other.await_partitions(2)
        run.await_partitions(2)
        run.await_idle()  # its starting offsets are fixed: later records are after "latest"
        with Flow(scene.servers, name, 4) as flow:
            run.hold()
            scene.grow(name, 12)
            for p in range(4, 12):
                scene.produce(name, [f"{p}-{n}" for n in range(5)], partition=p)
            run.let_go()
            run.await_partitions(6)
            other.await_partitions(6)
            flow.stop()
        scene.assert_once([name], [run], [other])
        scene.await_committed(name)


@pytest.mark.parametrize("strategy", PROTOCOLS)
def test_topics_matching_the_pattern_are_added_and_removed(
    strategy: str, scene: GroupScene, caplog: pytest.LogCaptureFixture
) -> None:
    first = scene.topic(2)
    second, third, other = f"{first}.b", f"{first}.c", f"x{first}"
    scene.topic(2, name=second)
    scene.topic(1, name=other)  # does not match the whole name
    pattern = scene.run_options(
        None, strategy, subscribePattern=first.replace(".", "[.]") + "([.].)?", failOnDataLoss=False
    )
    with Run(pattern) as run:
        run.await_partitions(4)
        for name in (first, second, other):
            scene.produce(name, ["1", "2"], partition=0)
        run.await_(lambda: len(run.records) == 4, "the records of both topics")
        scene.await_committed(first, second)
        generation, plans = run.statistics["generation"], len(run.planned)
        stays(lambda: run.statistics["generation"] == generation, 1.5, "a group whose topics did not change")
        assert len(run.planned) == plans, "a batch without records"

        scene.topic(3, name=third)
        scene.produce(third, ["a", "b", "c"], partition=2)
        run.await_partitions(7)
        run.await_(lambda: (third, 2, 2) in run.records, "the records of the new topic")

        scene.delete(second)
        run.await_(lambda: run.partitions == _of(first, 2) | _of(third, 3), "the deleted topic to leave")
        for name in (first, third):
            scene.produce(name, ["3"], partition=0)
        scene.assert_once([first, third], [_Without(run, second)])
        scene.await_committed(first, third)
        assert [r for r in run.records if r[0] == second] == [(second, 0, 0), (second, 0, 1)]
        assert "the subscription matches 3 topics now" in caplog.text
        await_until(lambda: "the subscription matches 2 topics now" in caplog.text, what="the word of it")


@pytest.mark.parametrize("strategy", PROTOCOLS)
def test_a_member_stays_while_no_topic_matches_the_pattern_any_more(
    strategy: str, scene: GroupScene, caplog: pytest.LogCaptureFixture
) -> None:
    first = scene.topic(2)
    pattern = scene.run_options(None, strategy, subscribePattern=first.replace(".", "[.]") + ".*", failOnDataLoss=False)
    with Run(pattern) as run:
        run.await_partitions(2)
        scene.delete(first)
        run.await_partitions(0)
        await_until(lambda: "the subscription matches 0 topics now" in caplog.text, what="the word of it")
        second = scene.topic(3, name=f"{first}.b")
        scene.produce(second, ["1"], partition=2)
        run.await_(lambda: (second, 2, 0) in run.records, "the record of the new topic")
    assert "it joins again" not in caplog.text


def _of(topic: str, partitions: int) -> set[TopicPartition]:
    return {TopicPartition(topic, p) for p in range(partitions)}


class _Without:
    """The records of a run without those of a deleted topic."""

    def __init__(self, run: Run, topic: str) -> None:
        self.run, self.topic = run, topic

    @property
    def records(self) -> list[tuple[str, int, int]]:
        self.run.check()
        return [r for r in self.run.records if r[0] != self.topic]


def test_G7_classic_a_killed_run_regains_its_memberships_and_latest_is_not_resolved_again(scene: GroupScene) -> None:
    name = scene.topic(4)
    scene.fill(name, 1)
    file = scene.folder / "run"
    given = scene.run_options(name, startingOffsets="latest")
    with RunProcess(given, file) as run:
        run.await_partitions(4)
        starts = {TopicPartition(name, p): 1 for p in range(4)}
        await_until(lambda: scene.committed() == starts, what="the start positions in the group")
        await_until(lambda: len(run.offsets()) == 1, what="the first offset")
        before = scene.describe()
        generation = run.statistics["generation"]
        run.kill()
    scene.fill(name, 1)  # while no member is in the group
    with RunProcess(given, file) as again:
        await_until(lambda: len(again.records) == 4, what="the records of the meantime")
        assert {offset for _, _, offset in again.records} == {1}
        scene.await_committed(name)
        after = scene.describe()
        assert after.members == before.members
        assert again.statistics["generation"] == generation, "a rebalance"
