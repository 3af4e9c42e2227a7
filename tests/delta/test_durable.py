"""The offsets of a run's last batch are committed too, although Spark does not report it to the source as durable."""

from typing import TYPE_CHECKING

import pytest
from conftest import await_until
from delta_files import living_rows
from kafka_words import set_committed
from scenes import Scene
from streams import OtherMember, numbered, planned

from spark_group_source import DeltaSink
from spark_group_source.host import run_files
from spark_group_source.model import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = pytest.mark.spark

HANG_S = 600


def test_the_offsets_of_a_trigger_once_batch_are_committed_when_the_run_has_stopped(scene: Scene) -> None:
    name, table = scene.topic(2), scene.folder / "table"
    scene.produce(name, numbered(0, 9, 2))
    one = scene.job(subscribe=name)
    one.run_into(DeltaSink(table), once=True)
    assert len(living_rows(table, ["offset"])) == 10
    ends = {TopicPartition(name, 0): 5, TopicPartition(name, 1): 5}
    await_until(lambda: scene.committed() == ends, what="the last offsets in Kafka")
    stream = planned(one.checkpoint)[0].stream
    await_until(lambda: run_files.durable_mark(stream).seq == -1, what="the removal of the durable mark")


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


@pytest.mark.parametrize("wrapped", [False, True], ids=["the sink", "a function with two sinks"])
def test_between_two_triggers_offsets_are_committed_partitions_released_and_a_drain_served(
    scene: Scene, wrapped: bool
) -> None:
    """The next trigger is an hour away, so only the durable mark shows that the batch is in the table."""
    name = scene.topic(2)
    scene.produce(name, numbered(0, 9, 2))
    first, second = (DeltaSink(scene.folder / table) for table in ("a", "b"))
    marks: list[int] = []

    def both(df: "DataFrame", batch_id: int) -> None:
        for sink in (first, second):
            sink(df, batch_id)
            marks.extend(run_files.durable_mark(run["stream"]).seq for run in run_files.read(scene.group))

    query = scene.job(subscribe=name).start_into(both if wrapped else first, processingTime="1 hour")
    ends = {TopicPartition(name, 0): 5, TopicPartition(name, 1): 5}
    try:
        await_until(lambda: scene.committed() == ends, HANG_S, what="the offsets of the first batch in Kafka")
        assert marks == ([-1, -1] if wrapped else []), "durable before the function has returned"
        with OtherMember(scene.servers, scene.group, [name]) as other:
            await_until(lambda: len(other.partitions) == 1, HANG_S, what="the release of a partition")
        run_files.drain(scene.group, timeout_s=HANG_S)
    finally:
        query.stop()


def test_a_query_whose_host_died_before_its_commit_goes_on_after_a_consumer_that_read_a_part_again(
    scene: Scene,
) -> None:
    """Kafka gets the consumer's commit in place of the query's, as if driver and stream reader had died together."""
    name, table = scene.topic(1), scene.folder / "table"
    scene.produce(name, numbered(0, 9, 1))
    scene.job(subscribe=name).run_into(DeltaSink(table), availableNow=True)
    await_until(lambda: scene.committed() == {TopicPartition(name, 0): 10}, HANG_S, what="the offsets in Kafka")
    set_committed(scene.admin, scene.group, name, {0: 4})
    run_files.mark_durable(planned(scene.folder / "c")[0])
    scene.produce(name, numbered(10, 14, 1))
    scene.job(subscribe=name).run_into(DeltaSink(table), availableNow=True)
    assert sorted(row["offset"] for row in living_rows(table, ["offset"])) == list(range(15))
    await_until(lambda: scene.committed() == {TopicPartition(name, 0): 15}, HANG_S, what="the offsets in Kafka")
