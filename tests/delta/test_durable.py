"""The offsets of a run's last batch are committed too, although Spark does not report it to the source as durable."""

import pytest
from conftest import await_until
from delta_files import living_rows
from scenes import Scene
from streams import numbered, planned

from spark_group_source import DeltaSink
from spark_group_source.host import run_files
from spark_group_source.model import TopicPartition

pytestmark = pytest.mark.spark


def test_the_offsets_of_a_trigger_once_batch_are_committed_when_the_run_has_stopped(scene: Scene) -> None:
    name, table = scene.topic(2), scene.folder / "table"
    scene.produce(name, numbered(0, 9, 2))
    one = scene.job(subscribe=name)
    one.run_into(DeltaSink(table), once=True)
    assert len(living_rows(table, ["offset"])) == 10
    ends = {TopicPartition(name, 0): 5, TopicPartition(name, 1): 5}
    await_until(lambda: scene.committed() == ends, what="the last offsets in Kafka")
    stream = planned(one.checkpoint)[0].stream
    await_until(lambda: run_files.durable_seq(stream) == -1, what="the removal of the durable mark")


def test_a_stopped_query_commits_the_offsets_of_its_last_batch(scene: Scene) -> None:
    """No batch follows the one in which it is stopped, so Spark does not report that one as durable."""
    name, table = scene.topic(2), scene.folder / "table"
    scene.produce(name, numbered(0, 9, 2))
    one = scene.job(subscribe=name)
    query = one.start_into(DeltaSink(table), processingTime="1 hour")
    try:
        await_until(lambda: query.lastProgress is not None, 60, what="the end of the batch")
    finally:
        query.stop()
    assert len(living_rows(table, ["offset"])) == 10
    ends = {TopicPartition(name, 0): 5, TopicPartition(name, 1): 5}
    await_until(lambda: scene.committed() == ends, what="the last offsets in Kafka")
