"""Members that are killed or frozen, and a run that is frozen past its session (G3)."""

import pytest
from kafka_helpers import await_until

from rebalance.accounts import Flow, stays
from rebalance.conftest import GroupScene
from rebalance.runs import Run, RunProcess
from spark_group_source.model import TopicPartition

PARTITIONS = 4
PROTOCOLS = ("range", "consumer")


@pytest.mark.parametrize("strategy", PROTOCOLS)
def test_a_killed_members_partitions_are_assigned_when_its_session_expires(strategy: str, scene: GroupScene) -> None:
    name = scene.topic(PARTITIONS)
    with Run(scene.run_options(name, strategy)) as run:
        run.await_partitions(PARTITIONS)  # so that the other one reads only its final partitions
        with (
            scene.ordinary(name, strategy=strategy, session_ms=2000) as other,
            Flow(scene.servers, name, PARTITIONS) as flow,
        ):
            gained = other.await_partitions(2)
            run.await_partitions(2)
            await_until(lambda: other.firsts().keys() == gained, what="a record of every partition there")
            plan = run.hold()  # and it dies in the middle of a batch of the run
            other.kill()
            committed = scene.committed()
            run.await_(lambda: not scene.describe().of("ordinary"), "the end of its session")
            assert run.planned[-1] == plan
            run.let_go()
            run.await_partitions(PARTITIONS)
            flow.stop()
            scene.assert_once([name], [run], [other], twice=other.unconfirmed())
            first = next(p for p in run.planned if p.seq > plan.seq and p.ranges.keys() >= gained)
            assert {tp: first.ranges[tp][0] for tp in gained} == {tp: committed.get(tp, 0) for tp in gained}
            scene.await_committed(name)
            assert run.statistics["possible_duplicates"] == 0


@pytest.mark.parametrize("strategy", PROTOCOLS)
def test_partitions_lost_while_the_run_was_frozen_are_never_committed(strategy: str, scene: GroupScene) -> None:
    name = scene.topic(PARTITIONS)
    file = scene.folder / "run.txt"
    with (
        RunProcess(scene.run_options(name, strategy, session_ms=6000), file) as run,
        scene.ordinary(name, strategy=strategy) as other,
    ):
        other.await_partitions(2)
        run.await_partitions(2)
        scene.fill(name, 10)
        scene.await_committed(name)
        run.rest()
        scene.fill(name, 10)
        run.send("hold")
        run.await_in_flight()
        ours = {TopicPartition(name, p) for p in range(PARTITIONS)} - other.partitions
        before = run.statistics  # on a busy machine it may have lost partitions before
        run.freeze()
        other.await_partitions(PARTITIONS)  # the run's session expired
        scene.await_committed(name)  # it read the records of the batch in flight
        scene.fill(name, 5)
        scene.await_committed(name)
        run.thaw()
        await_until(lambda: run.statistics["partitions_lost"] >= before["partitions_lost"] + 2, what="the known loss")
        assert run.statistics["possible_duplicates"] == before["possible_duplicates"] + 20
        run.send("let_go")  # its rows become durable after all; they must not be committed
        await_until(lambda: len(run.records) >= 40, what="the batch")
        stays(lambda: min(scene.committed().values()) == 25, 1.0, "the newer offsets")
        run.await_partitions(2)
        scene.fill(name, 5)
        in_flight = {(tp.topic, tp.partition, offset) for tp in ours for offset in range(10, 20)}
        scene.assert_once([name], [run], [other], twice=in_flight)
        scene.await_committed(name)
        run.close()
        assert run.process.returncode == 0, run.output
