"""What the sink has reaches Kafka also for the last batch of a run, of which Spark tells the source nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import Offsets, Produce, TopicFactory, await_until
from delta_files import living_rows
from streams import END_S, Job, numbered, planned

from spark_group_source import DeltaSink
from spark_group_source.host import runs
from spark_group_source.model import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = pytest.mark.spark


def start(job: Job, table: Path, **trigger: Any) -> "StreamingQuery":
    writer = job.load().writeStream.foreachBatch(DeltaSink(table)).option("checkpointLocation", str(job.checkpoint))
    return writer.trigger(**trigger).start()


def test_the_only_batch_of_trigger_once_is_at_kafka_when_the_run_has_ended(
    job: Callable[..., Job],
    topic: TopicFactory,
    produce: Produce,
    committed: Callable[[str], Offsets],
    group_id: str,
    tmp_path: Path,
) -> None:
    name, table = topic(2), tmp_path / "table"
    produce(name, numbered(0, 9, 2))
    one = job(subscribe=name)
    query = start(one, table, once=True)
    try:
        assert query.awaitTermination(END_S)
    finally:
        query.stop()
    assert len(living_rows(table, ["offset"])) == 10
    ends = {TopicPartition(name, 0): 5, TopicPartition(name, 1): 5}
    await_until(lambda: committed(group_id) == ends, what="the last offsets at Kafka")
    stream = planned(one.checkpoint)[0].stream
    await_until(lambda: runs.durable_seq(stream) == -1, what="the run that takes its mark with it")


def test_a_query_that_is_stopped_leaves_with_what_its_sink_has(
    job: Callable[..., Job],
    topic: TopicFactory,
    produce: Produce,
    committed: Callable[[str], Offsets],
    group_id: str,
    tmp_path: Path,
) -> None:
    """It has no batch after the one that it is stopped in, so Spark never says that this one is durable."""
    name, table = topic(2), tmp_path / "table"
    produce(name, numbered(0, 9, 2))
    one = job(subscribe=name)
    query = start(one, table, processingTime="1 hour")
    try:
        await_until(lambda: len(living_rows(table, ["offset"])) == 10, 60, what="the batch in the table")
    finally:
        query.stop()
    ends = {TopicPartition(name, 0): 5, TopicPartition(name, 1): 5}
    await_until(lambda: committed(group_id) == ends, what="the last offsets at Kafka")
