"""G5: what a run that crashes between "the batch is durable" and "Kafka has its offsets" leaves to the next ones."""

import threading
from collections.abc import Mapping, Sequence

import pytest
from conftest import await_until
from scenes import Scene
from streams import Engine, Outsider, numbered, texts, values_of

from spark_group_source.errors import CommitFailed
from spark_group_source.group.offsets import parse
from spark_group_source.kafka import Identity, OffsetCommitter
from spark_group_source.model import TopicPartition

Shares = Sequence[tuple[Identity, Mapping[TopicPartition, int]]]


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is set, a run ends as if it had crashed: it has committed nothing, and waits for no commit."""
    real, silent = OffsetCommitter.commit, threading.Event()
    silent.set()

    def commit(self: OffsetCommitter, shares: Shares, notes: Mapping[TopicPartition, str]) -> None:
        if silent.is_set():
            raise CommitFailed("the run has crashed")
        real(self, shares, notes)

    monkeypatch.setattr(OffsetCommitter, "commit", commit)
    monkeypatch.setattr("spark_group_source.group.machine.STOP_ECHO_MS_MAX", 100)
    return silent


@pytest.mark.parametrize("starting", ["earliest", "latest"])
def test_G5_a_position_that_was_never_committed_is_kept_by_a_run_that_does_not_have_its_partition(
    starting: str, scene: Scene, silence: threading.Event
) -> None:
    """Batch 0 over both partitions, crash; a run with one of them, crash; a run with both. Kafka never heard of the
    other one's position: it is read neither again from the beginning, nor from the end of today."""
    name = scene.topic(2)
    given = scene.options(subscribe=name, startingOffsets=starting, leaveOnStop="always")
    scene.produce(name, numbered(0, 3, 2))
    with Engine(given) as first:
        assert first.step() is not None
    scene.produce(name, numbered(4, 7, 2))
    with Outsider(scene.servers, scene.group, [name]) as other:
        await_until(lambda: len(other.partitions) == 2, what="everything at the other member")
        with Engine(given, first.log) as second:
            await_until(second.step, what="a batch")
            ours = {r.tp for r in parse(second.log[-1]).batch()}
            theirs = {TopicPartition(name, p) for p in range(2)} - ours
            assert {TopicPartition(*tp) for tp in other.partitions} == theirs and len(ours) == 1
    assert scene.committed() == {}
    silence.clear()
    scene.produce(name, numbered(8, 9, 2))
    with Engine(given, second.log) as third:
        await_until(lambda: third.step() is None and scene.committed() == scene.end_offsets(name), what="the end")
    read = values_of([*first.rows, *second.rows, *third.rows])
    assert read == texts(0 if starting == "earliest" else 4, 9)
