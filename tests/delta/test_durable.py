"""What the sink has reaches Kafka also for the last batch of a run, of which Spark tells the source nothing."""

import pytest
from conftest import await_until
from delta_files import living_rows
from scenes import Scene
from streams import numbered, planned

from spark_group_source import DeltaSink
from spark_group_source.host import run_files
from spark_group_source.model import TopicPartition

pytestmark = pytest.mark.spark


def test_the_only_batch_of_trigger_once_is_at_kafka_when_the_run_has_ended(scene: Scene) -> None:
    name, table = scene.topic(2), scene.folder / "table"
    scene.produce(name, numbered(0, 9, 2))
    one = scene.job(subscribe=name)
    one.run_into(DeltaSink(table), once=True)
    assert len(living_rows(table, ["offset"])) == 10
    ends = {TopicPartition(name, 0): 5, TopicPartition(name, 1): 5}
    await_until(lambda: scene.committed() == ends, what="the last offsets at Kafka")
    stream = planned(one.checkpoint)[0].stream
    await_until(lambda: run_files.durable_seq(stream) == -1, what="the run that takes its mark with it")


def test_a_query_that_is_stopped_leaves_with_what_its_sink_has(scene: Scene) -> None:
    """It has no batch after the one that it is stopped in, so Spark never says that this one is durable."""
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
    await_until(lambda: scene.committed() == ends, what="the last offsets at Kafka")
