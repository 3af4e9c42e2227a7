"""Drivers that freeze or die at a critical moment, and their successors with the same checkpoint (G6)."""

import shutil

import pytest
from confluent_kafka.admin import AdminClient
from kafka_helpers import await_progress, await_until, noted_of, set_committed

from rebalance.accounts import stays
from rebalance.conftest import GroupScene
from rebalance.runs import RunProcess
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.identifiers import parse_note


@pytest.mark.proves("G6", level="kafka")
@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky", "consumer"])
def test_G6_a_frozen_driver_with_an_idle_slot_stops_and_its_successor_continues(
    strategy: str, scene: GroupScene
) -> None:
    """Two slots and one partition: the library does not report the idle slot's lost session, or reports an empty list,
    and rejoins by itself under an instance id that belongs to the successor by now."""
    name = scene.topic()
    given = scene.run_options(name, strategy, session_ms=6000, groupMembers=2)

    def whole(run: RunProcess) -> bool:
        found = run.statistics
        return found.get("slots") == ["assigned"] * 2 and sum(found["assigned"]) == 1

    with RunProcess(given, scene.folder / "old") as old:
        await_progress(lambda: whole(old), old.progress, what="both slots' assignments")
        scene.produce(name, [f"{n}" for n in range(10)])
        scene.await_committed(name)
        old.send("hold")
        scene.produce(name, [f"{n}" for n in range(10, 20)])
        old.await_in_flight()
        old.freeze()
        await_until(lambda: not scene.describe().members, what="the end of its session")
        shutil.copy(old.file, scene.folder / "new")
        with RunProcess(given, scene.folder / "new") as new:
            await_progress(lambda: whole(new), new.progress, what="the successor's assignments")
            scene.produce(name, [f"{n}" for n in range(20, 25)])
            await_progress(lambda: len(new.records) == 25, new.progress, what="the successor's records")
            scene.await_committed(name)

            old.thaw()
            old.send("let_go")  # its rows become durable after all; they must not be committed
            fenced = "another driver runs this stream"
            await_progress(lambda: fenced in old.output, old.progress, what="the end of the old driver")
            # While the successor checks whether it was replaced itself, a transaction hides the offset for a moment.
            tp = TopicPartition(name, 0)
            stays(lambda: scene.committed().get(tp, 25) == 25, 1.0, "the successor's offset")
            await_progress(lambda: whole(new), new.progress, what="the successor in both places")
            old.close()
            assert old.process.returncode != 0 and "Fenced" in old.output

            scene.produce(name, [f"{n}" for n in range(25, 30)])
            await_progress(lambda: len(new.records) == 30, new.progress, what="more of the successor's records")
            scene.await_committed(name)
            assert new.records == [(name, 0, n) for n in range(30)]
            new.close()
            assert new.process.returncode == 0, new.output


def test_an_applied_rewind_survives_the_death_of_the_run_before_its_next_batch(scene: GroupScene) -> None:
    """By then the offset was committed by the run itself; only its note shows that it is newer than the checkpoint."""
    name = scene.topic(2)
    scene.fill(name, 10)
    given = scene.run_options(name, leaveOnStop="always")
    file = scene.folder / "run"
    back = {TopicPartition(name, 0): 3, TopicPartition(name, 1): 5}
    with RunProcess(given, file) as first:
        await_progress(lambda: len(first.records) == 20, first.progress, what="all records")
        scene.await_committed(name)
        first.close()
    await_until(lambda: not scene.describe().members, what="an empty group")
    set_committed(scene.admin, scene.group, name, {tp.partition: at for tp, at in back.items()})
    with RunProcess(given, file, held=True) as second:
        second.await_in_flight()
        assert _committed_by_a_stream(scene.admin, scene.group) == back
        second.kill()  # that batch was never committed
    with RunProcess(given, file) as third:
        enough = 20 + 12
        await_progress(lambda: len(third.records) >= enough, third.progress, what="what the operator's offsets give")
        scene.await_committed(name)
        third.close()
        assert third.process.returncode == 0, third.output
        again = [(name, tp.partition, offset) for tp, at in back.items() for offset in range(at, 10)]
        assert sorted(third.records[20:]) == again


def _committed_by_a_stream(admin: AdminClient, group: str) -> dict[TopicPartition, int]:
    """The offsets that a stream committed, according to their notes."""
    return {tp: at for tp, (at, note) in noted_of(admin, group).items() if parse_note(note).stream is not None}
