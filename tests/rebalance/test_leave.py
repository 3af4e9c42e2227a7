"""B57, B58, B59, G3: members that are killed, frozen, or of a second run; and our own run frozen past its session."""

import pytest
from conftest import await_until
from kafka_words import await_progress

from rebalance.accounts import Flow, await_all_processed, measured, stays
from rebalance.conftest import GroupScene
from rebalance.ordinary import KINDS
from rebalance.runs import Run, RunProcess
from spark_group_source.model import TopicPartition

PARTITIONS = 4


@pytest.mark.crash
@pytest.mark.parametrize("strategy", KINDS)
def test_B57_a_killed_members_partitions_come_when_its_session_ends(strategy: str, scene: GroupScene) -> None:
    name = scene.topic(PARTITIONS)
    with Run(scene.run_options(name, strategy)) as run:
        run.await_partitions(PARTITIONS)  # so that the other reads only what it keeps
        with (
            scene.ordinary(name, strategy=strategy, session_ms=2000) as other,
            Flow(scene.servers, name, PARTITIONS) as flow,
        ):
            gained = other.await_partitions(2)
            run.await_partitions(2)
            await_until(lambda: other.firsts().keys() == gained, what="a record of every partition there")
            plan = run.hold()  # and it dies in the middle of a batch of ours
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
            assert run.statistics["maybe_twice"] == 0


@pytest.mark.crash
@pytest.mark.parametrize("strategy", KINDS)
def test_B59_a_frozen_member_that_comes_back_cannot_commit_what_others_read(strategy: str, scene: GroupScene) -> None:
    name = scene.topic(PARTITIONS)
    with (
        Run(scene.run_options(name, strategy)) as run,
        scene.ordinary(name, strategy=strategy, session_ms=2000, keep=True) as other,
    ):
        gained = other.await_partitions(2)
        run.await_partitions(2)
        scene.fill(name, 10)
        await_progress(lambda: len(other.processed()) == 20, other.progress, what="the other's records")
        other.do("stall")  # so that the order to commit is the first thing it meets when it comes back
        other.freeze()
        kept = other.unconfirmed()
        assert len(kept) == 20  # processed, not committed
        run.await_partitions(PARTITIONS)
        run.await_(lambda: len(run.records) == 40, "the records that it had not committed")
        scene.await_committed(name)
        scene.fill(name, 5)
        run.await_(lambda: len(run.records) == 60, "more records")
        scene.await_committed(name)
        for order in ("commit", "give", "go"):
            other.tell(order)
        other.thaw()
        refused = other.await_said("commit_failed")
        assert refused["code"] in ("UNKNOWN_MEMBER_ID", "ILLEGAL_GENERATION", "STALE_MEMBER_EPOCH"), refused
        assert scene.committed() == {TopicPartition(name, p): 15 for p in range(PARTITIONS)}
        other.await_partitions(2)  # it is a member again, and starts where we are
        scene.fill(name, 5)
        await_all_processed(scene.admin, [name], [run], [other])
        zombie = {
            record for record in other.unconfirmed() if record[2] < 15
        }  # also what it had fetched and not yet lost
        scene.assert_once([name], [run], [other], twice=zombie)
        assert kept <= zombie and len(gained) == 2


@pytest.mark.crash
@pytest.mark.parametrize("strategy", KINDS)
def test_B59_partitions_lost_while_our_run_was_frozen_are_never_committed(strategy: str, scene: GroupScene) -> None:
    name = scene.topic(PARTITIONS)
    file = scene.folder / "run.txt"
    with (
        RunProcess(scene.run_options(name, strategy, session_ms=2000), file) as run,
        scene.ordinary(name, strategy=strategy) as other,
    ):
        other.await_partitions(2)
        run.await_partitions(2)
        scene.fill(name, 10)
        scene.await_committed(name)
        run.rest()
        scene.fill(name, 10)
        run.tell("hold")
        run.await_in_flight()
        ours = {TopicPartition(name, p) for p in range(PARTITIONS)} - other.partitions
        run.freeze()
        other.await_partitions(PARTITIONS)  # our session ended
        scene.await_committed(name)  # it read what we have in flight
        scene.fill(name, 5)
        scene.await_committed(name)
        run.thaw()
        await_until(lambda: run.statistics["lost"] >= 2, what="the loss to be known")
        assert run.statistics["maybe_twice"] == 20
        run.tell("let_go")  # its rows become durable after all; Kafka must not hear of them
        await_until(lambda: len(run.records) >= 40, what="the batch")
        stays(lambda: min(scene.committed().values()) == 25, 1.0, "the newer offsets")
        run.await_partitions(2)
        scene.fill(name, 5)
        in_flight = {(tp.topic, tp.partition, offset) for tp in ours for offset in range(10, 20)}
        scene.assert_once([name], [run], [other], twice=in_flight)
        scene.await_committed(name)
        run.close()
        assert run.process.returncode == 0, run.output


@pytest.mark.crash
@pytest.mark.parametrize("strategy", KINDS)
def test_B59_what_a_run_held_back_when_it_was_frozen_is_never_committed(strategy: str, scene: GroupScene) -> None:
    """A holder is not told that it was thrown out, or only when its hold is over (KIP-848): until it finds out it may
    read on, and every offset of that is counted."""
    name = scene.topic(PARTITIONS)
    with RunProcess(scene.run_options(name, strategy, session_ms=2000), scene.folder / "run.txt") as run:
        run.await_partitions(PARTITIONS)
        scene.fill(name, 10)
        scene.await_committed(name)
        run.rest()
        scene.fill(name, 10)
        run.tell("hold")
        run.await_in_flight()
        with scene.ordinary(name, strategy=strategy) as other:
            await_until(lambda: "revoking" in run.statistics["slots"], what="a held revocation")
            run.freeze()
            other.await_partitions(PARTITIONS)  # our session ended
            scene.await_committed(name)  # it read what we have in flight
            scene.fill(name, 5)
            scene.await_committed(name)
            run.thaw()
            run.tell("let_go")  # its rows become durable after all; Kafka must not hear of them
            await_until(lambda: len(run.records) > PARTITIONS * 10, what="the batch")
            stays(lambda: min(scene.committed().values()) == 25, 1.0, "the newer offsets")
            run.await_partitions(2)
            scene.fill(name, 5)
            scene.await_committed(name)
            counted = run.statistics["maybe_twice"]
            measured(f"{strategy}: {counted} offsets may have been read twice")
            scene.assert_once([name], [run], [other], counted=counted)
            run.close()
            assert run.process.returncode == 0, run.output


@pytest.mark.parametrize("strategy", KINDS)
def test_B53_a_second_stream_of_the_group_joins_and_leaves_between_batches(strategy: str, scene: GroupScene) -> None:
    name = scene.topic(PARTITIONS)
    with Run(scene.run_options(name, strategy)) as first, Flow(scene.servers, name, PARTITIONS) as flow:
        first.await_partitions(PARTITIONS)
        plan = first.hold()
        with Run(scene.run_options(name, strategy, leaveOnStop="always")) as second:
            first.await_(lambda: "revoking" in first.statistics["slots"], "Kafka to ask for partitions")
            assert not second.partitions
            first.let_go()
            second.await_partitions(2)
            first.await_partitions(2)
            second.await_(lambda: any(len(p.ranges) == 2 for p in second.planned), "a batch over both partitions")
            begun = next(p for p in second.planned if len(p.ranges) == 2)
            assert {tp: start for tp, (start, _) in begun.ranges.items()} == {
                tp: plan.ranges[tp][1] for tp in begun.ranges
            }
            second.await_(lambda: len(second.planned) >= 5, "some batches of the second")
            second._ending.set()
            second._thread.join(60)
        first.await_partitions(PARTITIONS)
        measured(f"{strategy}: the second stream read {len(second.records)} records")
        flow.stop()
        scene.assert_once([name], [first, second], twice=_last_batch(second))
        scene.await_committed(name)


def _last_batch(run: Run) -> set[tuple[str, int, int]]:
    """What became durable in the very moment of the end: nobody told the source, so the next owner reads it again."""
    ranges = run.planned[-1].ranges.items()
    return {(tp.topic, tp.partition, offset) for tp, (start, end) in ranges for offset in range(start, end)}
