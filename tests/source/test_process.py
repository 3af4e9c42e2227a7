"""How the processes of a stopped query end."""

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from kafka_helpers import await_until
from scenes import Scene
from streams import numbered, readers_below, texts, values_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = pytest.mark.spark


@pytest.fixture
def no_reader_left(spark: "SparkSession") -> Iterator[None]:
    """Every stream reader that the test started ends soon after the test."""
    before = set(readers_below())
    yield
    await_until(lambda: set(readers_below()) <= before, what="the end of the stream readers")


def is_planning(query: "StreamingQuery") -> bool:
    """Whether the stream reader plans a batch. Spark itself does not end one that is stopped before that."""
    return "Getting offsets" in query.status["message"]


def test_stop_ends_a_query_with_busy_tasks(scene: Scene, no_reader_left: None) -> None:
    name = scene.topic()
    scene.produce(name, numbered(0, 2))
    busy = scene.folder / "busy"

    def stuck(batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        for batch in batches:
            busy.touch()
            threading.Event().wait(300)
            yield batch

    one = scene.job(subscribe=name)
    frame = one.load().select("value").mapInArrow(stuck, "value binary")
    query = frame.writeStream.format("noop").option("checkpointLocation", str(one.checkpoint)).start()
    await_until(busy.exists, what="a task in the middle of its batch")
    query.stop()
    assert query.exception() is None
    assert values_of(one.run()) == texts(0, 2)


def test_stop_ends_a_query_without_a_broker(scene: Scene, no_reader_left: None) -> None:
    one = scene.job(subscribe="t", kafka__bootstrap__servers="127.0.0.1:1", fetchOffset__numRetries=1000)
    query = one.start()
    await_until(lambda: is_planning(query), what="the first offset request")
    query.stop()
    assert query.exception() is None
