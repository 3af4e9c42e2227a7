"""B14, B41, B42, B61, G5, G7: partitions and topics that come and go, members that do, and runs that come back."""

import random
import time
from collections import Counter

import pytest
from conftest import ADMIN_S, await_until

from rebalance.accounts import Flow, stays
from rebalance.conftest import GroupScene
from rebalance.ordinary import KINDS
from rebalance.runs import Run, RunProcess
from spark_group_source.model import TopicPartition

CHURN_S = 20
STEPS_MAX = 60
"""Of a busy machine, on which no kind of step is taken twice in that time."""
"""How long topics come and go."""


@pytest.mark.parametrize("strategy", KINDS)
def test_B14_partitions_that_are_added_while_running_are_read_from_their_beginning(
    strategy: str, scene: GroupScene
) -> None:
    """Also under startingOffsets=latest: nothing between their creation and our noticing is lost."""
    name = scene.topic(4)
    with (
        Run(scene.run_options(name, strategy, startingOffsets="latest")) as run,
        scene.ordinary(name, strategy=strategy) as other,
    ):
        other.await_partitions(2)
        run.await_partitions(2)
        run.await_idle()  # its starts are fixed: what comes from now on is later than "latest"
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


@pytest.mark.parametrize("strategy", KINDS)
def test_B61_kept_partitions_make_progress_while_others_come_and_go(strategy: str, scene: GroupScene) -> None:
    name = scene.topic(6)
    with Run(scene.run_options(name, strategy)) as run, Flow(scene.servers, name, 6) as flow:
        run.await_partitions(6)
        members = []
        for round_ in range(3):
            with scene.ordinary(name, strategy=strategy) as other:
                members.append(other)
                other.await_partitions(3)
                run.await_partitions(3)
                seen = len(run.planned)
                run.await_(lambda at=seen: len(run.planned) > at + 2, "batches between two rounds")
                other.close()
            run.await_partitions(6)
            assert run.statistics["lost"] == 0, f"round {round_}"
        flow.stop()
        scene.assert_once([name], [run], members)
        scene.await_committed(name)
        at: dict[TopicPartition, int] = {}
        elsewhere = {(t, p, o) for member in members for t, p, o in member.processed()}
        for plan in run.planned:  # ranges chain: what lies between two of ours was read by another member
            for tp, (start, end) in plan.ranges.items():
                between = {(tp.topic, tp.partition, o) for o in range(at.get(tp, 0), start)}
                assert start >= at.get(tp, 0) and between <= elsewhere, f"{tp}: {at.get(tp)} -> {start}"
                at[tp] = end


@pytest.mark.parametrize("strategy", KINDS)
def test_a_topic_that_matches_the_pattern_comes_and_one_goes(
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
        assert "the subscription now stands for 3 topics" in caplog.text
        await_until(lambda: "the subscription now stands for 2 topics" in caplog.text, what="the word of it")


class Churn:
    """Topics that are made, deleted, made again and grown, one step after the other, with records in all of them.

    ``living``: topic -> the values that it holds, of those that are there now.
    """

    def __init__(self, scene: GroupScene, kept: str) -> None:
        self.scene, self.kept = scene, kept
        self.names = [f"{kept}.{n}" for n in range(3)]
        self.living: dict[str, list[str]] = {kept: []}
        self.partitions: dict[str, int] = {kept: 2}
        self.steps: dict[str, int] = {}
        self._count = 0

    @property
    def rarest(self) -> int:
        return min(self.steps.get(what, 0) for what in ("make", "delete", "grow"))

    def step(self, chance: random.Random) -> None:
        name = chance.choice(self.names)
        what = chance.choice(("delete", "grow")) if name in self.living else "make"
        self.steps[what] = self.steps.get(what, 0) + 1
        match what:
            case "make":
                self.partitions[name] = chance.randint(1, 3)
                self.scene.topic(self.partitions[name], name=name)
                self.living[name] = []
            case "grow":
                self.partitions[name] += 1
                self.scene.grow(name, self.partitions[name])
            case "delete":
                self.scene.delete(name)
                del self.living[name]
        for each in {self.kept, name} & self.living.keys():
            self.send(each)

    def send(self, name: str) -> None:
        """Two records to every partition, as soon as the producer knows them all."""
        known = self.scene.producer.list_topics
        await_until(
            lambda: len(known(name, timeout=ADMIN_S).topics[name].partitions) == self.partitions[name],
            what=f"the producer's word of {name}",
        )
        for p in range(self.partitions[name]):
            values = [f"{self._count + n}" for n in range(2)]
            self._count += 2
            self.scene.produce(name, values, partition=p)
            self.living[name] += values


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["range", "consumer"])
def test_B42_a_query_lives_through_topics_that_come_and_go_and_come_again_and_grow(
    strategy: str, scene: GroupScene
) -> None:
    """The topic that stays is read once and in full. Of those that are made again it is asked for no more than that the
    query reads on: a range, or an offset, of a topic may reach Kafka when the name is another topic's already."""
    kept = scene.topic(2)
    churn, chance = Churn(scene, kept), random.Random(42)
    patient = {"failOnDataLoss": False, "fetchOffset__numRetries": 20}  # a busy broker may have no leaders for a moment
    with Run(scene.run_options(None, strategy, subscribePattern=f"{kept}([.].)?", **patient)) as run:
        run.await_partitions(2)

        def seen() -> set[str]:
            return {str(row.value) for row in list(run.engine.rows)}

        end_s = time.monotonic() + CHURN_S
        while (time.monotonic() < end_s or churn.rarest < 2) and sum(churn.steps.values()) < STEPS_MAX:
            churn.step(chance)
            last = set(churn.living[kept][-2:])
            run.await_(lambda last=last: last <= seen(), "the query to read on")
        later: dict[str, int] = {name: len(values) for name, values in churn.living.items()}

        def read_on() -> bool:
            for name in churn.living:
                churn.send(name)
            return all(seen() & set(churn.living[name][at:]) for name, at in later.items())

        run.await_(read_on, f"records of every topic that is there, after {churn.steps}")
        run.await_(lambda: seen() >= set(churn.living[kept]), "every record of the topic that stayed")
        read = Counter(row for row in run.engine.rows if row.topic == kept)
        assert not [row for row, count in read.items() if count > 1]
        assert churn.rarest >= 2, churn.steps


def _of(topic: str, partitions: int) -> set[TopicPartition]:
    return {TopicPartition(topic, p) for p in range(partitions)}


class _Without:
    """The records of a run without those of a topic that is gone."""

    def __init__(self, run: Run, topic: str) -> None:
        self.run, self.topic = run, topic

    @property
    def records(self) -> list[tuple[str, int, int]]:
        self.run.check()
        return [r for r in self.run.records if r[0] != self.topic]


@pytest.mark.crash
@pytest.mark.parametrize("strategy", ["range", "consumer"])
def test_G7_a_killed_run_is_back_in_its_places_and_latest_is_not_resolved_again(
    strategy: str, scene: GroupScene
) -> None:
    name = scene.topic(4)
    scene.fill(name, 1)
    file = scene.folder / "run"
    patient = scene.run_options(name, strategy, session_ms=20_000, startingOffsets="latest")
    with RunProcess(patient, file) as run:
        run.await_partitions(4)
        starts = {TopicPartition(name, p): 1 for p in range(4)}
        await_until(lambda: scene.committed() == starts, what="the start positions in the group")
        await_until(lambda: len(run.offsets()) == 1, what="the first offset")
        before = scene.describe()
        generation = run.statistics["generation"]
        run.kill()
    scene.fill(name, 1)  # while nobody is there
    with RunProcess(patient, file) as again:
        await_until(lambda: len(again.records) == 4, what="the records of the meantime")
        assert {offset for _, _, offset in again.records} == {1}
        scene.await_committed(name)
        after = scene.describe()
        assert after.members == before.members
        if strategy == "range":  # under KIP-848 a killed member's place is free when its session ends: the same place
            assert again.statistics["generation"] == generation, "a rebalance"
