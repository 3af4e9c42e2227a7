"""Static memberships and their take-over, operators, and rebalances seen from outside (G6, G7)."""

import pytest
from confluent_kafka import Consumer
from confluent_kafka import TopicPartition as KafkaPartition
from kafka_helpers import ADMIN_S, await_progress, await_until, end_offsets_of

from rebalance.accounts import Flow, stays
from rebalance.conftest import GroupScene
from rebalance.runs import Run
from spark_group_source.errors import CommitFailed, Fenced
from spark_group_source.kafka.group_admin import GroupAdmin
from spark_group_source.local.broker import Broker
from spark_group_source.model import TopicPartition

PARTITIONS = 4
CALM_S = 6
SOAK_S = 1200
PROTOCOLS = ("range", "consumer")


@pytest.mark.proves("G7", level="kafka")
@pytest.mark.parametrize("strategy", PROTOCOLS)
@pytest.mark.parametrize("for_s", [CALM_S, pytest.param(SOAK_S, marks=pytest.mark.soak)])
def test_G7_an_unchanged_group_does_not_rebalance(strategy: str, for_s: int, scene: GroupScene) -> None:
    """Idle and busy; under a pattern, whose topics are listed twice a second."""
    name = scene.topic(PARTITIONS)
    with Run(scene.run_options(None, strategy, subscribePattern=name)) as run:
        run.await_partitions(PARTITIONS)
        run.await_idle()
        members, before = scene.describe(), run.statistics

        def same() -> bool:
            run.check()
            now = run.statistics
            return all(now[key] == before[key] for key in ("generation", "rebalances", "partitions_lost", "assigned"))

        stays(same, for_s / 2, "the idle group")
        with Flow(scene.servers, name, PARTITIONS) as flow:
            stays(same, for_s / 2, "the busy group")
            flow.stop()
        scene.assert_once([name], [run])
        scene.await_committed(name)
        assert scene.describe() == members


@pytest.mark.proves("G6", level="kafka")
def test_G6_classic_a_second_run_takes_over_the_memberships_and_the_first_stops(scene: GroupScene) -> None:
    name = scene.topic(PARTITIONS)
    scene.produce(name, ["a", "b", "c", "d"])
    with Run(scene.run_options(name)) as old:
        old.await_partitions(PARTITIONS)
        old.await_(lambda: len(old.records) == 4, "the first records")
        scene.await_committed(name)
        generation = old.statistics["generation"]
        old.rest()
        with Run(scene.run_options(name), log=old.engine.log) as new:  # same checkpoint, same stream, same instance ids
            new.await_partitions(PARTITIONS)
            assert new.statistics["generation"] == generation, "a take-over is no rebalance"
            scene.produce(name, ["e", "f"])
            new.await_(lambda: len(new.records) == 2, "the next records in the new run")
            scene.await_committed(name)
            old._trigger.set()
            await_until(lambda: old.error is not None, what="the old run's end")
            assert isinstance(old.error, Fenced), old.error
            assert "newer" in str(old.error) and scene.group in str(old.error)
            assert not old.error.retriable
            old.close()
            old.error = None  # expected
            scene.produce(name, ["g"])
            # Rows that it wrote before it was fenced: a plain sink is not fenced, unlike a DeltaSink.
            scene.assert_once([name], [old, new], twice=old.records[4:])
            scene.await_committed(name)
            assert new.statistics["generation"] == generation


def test_consumer_protocol_a_second_run_waits_until_the_first_has_ended(scene: GroupScene) -> None:
    name = scene.topic(PARTITIONS)
    scene.produce(name, ["a", "b", "c", "d"])
    old = Run(scene.run_options(name, "consumer"))
    with old:
        old.await_partitions(PARTITIONS)
        old.await_(lambda: len(old.records) == 4, "the first records")
        scene.await_committed(name)
        new = Run(scene.run_options(name, "consumer"), log=old.engine.log)
        try:
            new.await_(lambda: "joining" in new.statistics["slots"], "its first try")
            stays(lambda: not new.partitions and new.error is None, 2.0, "the newcomer's wait")
            assert len(old.partitions) == PARTITIONS
            old.close()
            new.await_partitions(PARTITIONS)
            scene.produce(name, ["e", "f"])
            scene.assert_once([name], [old, new])
            scene.await_committed(name)
        finally:
            new.close()


@pytest.mark.parametrize("strategy", PROTOCOLS)
def test_offsets_of_a_group_can_be_reset_only_while_it_has_no_members(strategy: str, scene: GroupScene) -> None:
    name = scene.topic(2)
    scene.fill(name, 10)
    back = {TopicPartition(name, 0): 3, TopicPartition(name, 1): 5}
    operator = GroupAdmin({"bootstrap.servers": scene.servers, "log_level": "3"})
    with Run(scene.run_options(name, strategy, session_ms=6000, leaveOnStop="always")) as run:
        run.await_(lambda: len(run.records) == 20, "all records")
        scene.await_committed(name)
        with pytest.raises(CommitFailed, match=r"refused new offsets of group.* because a member has joined"):
            operator.move_committed(scene.group, back)
        assert scene.committed() == end_offsets_of(scene.admin, name)
    await_until(lambda: scene.describe().state == "empty", what="an empty group")
    operator.move_committed(scene.group, back)
    with Run(scene.run_options(name, strategy), log=run.engine.log) as again:
        again.await_(lambda: len(again.records) == 12, "the records behind the operator's offsets")
        again.await_idle()
        scene.await_committed(name)
        assert sorted(again.records) == sorted(
            [(name, 0, o) for o in range(3, 10)] + [(name, 1, o) for o in range(5, 10)]
        )
        assert again.planned[0].followed == frozenset(back), "the batch records that its start was moved"


@pytest.mark.proves("G10", level="kafka")
@pytest.mark.parametrize("strategy", PROTOCOLS)
def test_no_conclusions_are_drawn_from_a_rebalancing_group(strategy: str, scene: GroupScene) -> None:
    """An AvailableNow run starts while another member keeps the group rebalancing."""
    name = scene.topic(PARTITIONS)
    scene.fill(name, 10)
    with scene.ordinary(name, strategy=strategy, keep=True, session_ms=2000) as other:
        other.await_partitions(PARTITIONS)
        await_progress(lambda: len(other.processed()) == 40, other.progress, what="the other's records")
        other.do("stall")  # it has all partitions, commits nothing, and does not release them
        with Run(scene.run_options(name, strategy), available_now=True) as run:
            await_until(lambda: len(scene.describe().clients) == 2, what="both in the group")
            stays(lambda: run._idle == 0, 1.5, "not believing that there is nothing to read")
            other.kill()
            scene.assert_once([name], [run])
            scene.await_committed(name)


@pytest.mark.proves("G5", level="kafka")
@pytest.mark.parametrize(
    ("strategy", "at", "count"),
    [("range", 0, 3), ("consumer", 3, 3), ("range", 3, 0)],
    ids=["zero", "behind-the-last", "not-there-yet"],
)
def test_G5_a_partition_continues_exactly_at_its_committed_offset(
    strategy: str, at: int, count: int, scene: GroupScene
) -> None:
    """Offset 0, the end of the log, and the end of a log whose records were deleted."""
    name = scene.topic(1)
    tp = TopicPartition(name, 0)
    scene.produce(name, ["a", "b", "c"])
    if count == 0:  # all records are deleted; the committed offset is both start and end
        scene.admin.delete_records([KafkaPartition(name, 0, 3)])
        await_until(lambda: _begin(scene.broker, tp) == 3, what="the deleted records")
    GroupAdmin({"bootstrap.servers": scene.servers, "log_level": "3"}).move_committed(scene.group, {tp: at})
    with Run(scene.run_options(name, strategy, startingOffsets="latest" if at == 0 else "earliest")) as run:
        run.await_partitions(1)
        run.await_idle()
        assert [o for _, _, o in run.records] == list(range(at, 3))
        scene.produce(name, ["d"])
        run.await_(lambda: (name, 0, 3) in run.records, "the next record")
        run.await_idle()
        assert [o for _, _, o in run.records] == list(range(at, 4))
        scene.await_committed(name)


def _begin(broker: Broker, tp: TopicPartition) -> int:
    consumer = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": "nobody", "log_level": 3})
    try:
        return int(consumer.get_watermark_offsets(KafkaPartition(*tp), timeout=ADMIN_S)[0])
    finally:
        consumer.close()
