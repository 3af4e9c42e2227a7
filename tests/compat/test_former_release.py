"""What earlier releases left behind goes on: a checkpoint, a table and the group's offsets at Kafka.

``v0_1`` was made by release 0.1.0 (commit 8e273c8) on a real broker: 40 records in two partitions, an AvailableNow run
with ``maxOffsetsPerTrigger=8`` and ``DeltaSink(table, transform=...)``, stopped by an error before the sink's fourth
batch. So batches 0 to 2 are finished, batch 3 is planned and not in the table. ``group.json`` has what
``list_consumer_group_offsets`` then said of the group, with the text beside each offset. To make it again, check that
commit out and do the same; then remove Hadoop's hidden checksum files (``.*.crc``).

The files are as that release wrote them. Only the topic's id is changed, and only in the test's copy: the cluster is
another one, so its topic of the same name has another id, and the source would rightly take it for a topic that was
deleted and made again.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, TopicCollection
from confluent_kafka import TopicPartition as KafkaTopicPartition
from confluent_kafka.admin import AdminClient
from conftest import ADMIN_S, Offsets, Produce, TopicFactory, await_until
from delta_files import living_rows
from streams import numbered, options_of, planned, texts

from spark_group_source import DeltaSink
from spark_group_source.delta.kept import read_ledger
from spark_group_source.local.broker import Broker
from spark_group_source.model import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

V0_1 = Path(__file__).parent / "v0_1"
MORE = 10
"""Records that come after the restart."""


def take_over(folder: Path, before: str, after: str) -> Path:
    """A copy of the release's files in ``folder``, with another topic id in every text."""
    shutil.copytree(V0_1, folder)
    for path in (*folder.glob("checkpoint/offsets/*"), *folder.glob("table/_delta_log/*.*")):
        path.write_text(path.read_text().replace(before, after))
    return folder


def commit_as_then(admin: AdminClient, left: dict[str, Any]) -> None:
    """Give the group the offsets that it had, with the text beside each."""
    entries = [
        KafkaTopicPartition(left["topic"], int(p), entry["offset"], entry["metadata"])
        for p, entry in left["committed"].items()
    ]
    request = [ConsumerGroupTopicPartitions(left["group"], entries)]
    admin.alter_consumer_group_offsets(request)[left["group"]].result(ADMIN_S)


def values(table: Path) -> list[str]:
    return sorted(row["value"] for row in living_rows(table, ["value"]))


def readable(df: "DataFrame") -> "DataFrame":
    """The transform that the release's query had."""
    return df.selectExpr("topic", "partition", "offset", "string(value) value")


def test_a_checkpoint_and_a_table_of_release_0_1_go_on_and_every_record_is_in_the_table_once(
    spark: "SparkSession",
    broker: Broker,
    admin: AdminClient,
    topic: TopicFactory,
    produce: Produce,
    committed: Callable[[str], Offsets],
    tmp_path: Path,
) -> None:
    left = json.loads((V0_1 / "group.json").read_text())
    name, group, count = left["topic"], left["group"], left["records"]
    topic(left["partitions"], name=name)
    produce(name, numbered(0, count - 1, left["partitions"]))
    topic_id = str(admin.describe_topics(TopicCollection([name]))[name].result(ADMIN_S).topic_id)
    commit_as_then(admin, left)
    copy = take_over(tmp_path / "copy", left["topic_id"], topic_id)
    checkpoint, table = copy / "checkpoint", copy / "table"
    before = planned(checkpoint)
    assert (list(before), len(values(table))) == ([0, 1, 2, 3], 24)

    options = options_of(broker.bootstrap_servers, group, subscribe=name, maxOffsetsPerTrigger=8)
    stream = spark.readStream.format("kafka-group").options(**options).load()
    writer = stream.writeStream.foreachBatch(DeltaSink(table, transform=readable))
    query = writer.option("checkpointLocation", str(checkpoint)).start()
    try:
        await_until(lambda: query.exception() or len(values(table)) >= count, 90, what="the rest of the records")
        produce(name, numbered(count, count + MORE - 1, left["partitions"]))
        await_until(lambda: query.exception() or len(values(table)) >= count + MORE, what="the new records")
        assert query.exception() is None
        ends = {TopicPartition(name, p): (count + MORE) // left["partitions"] for p in range(left["partitions"])}
        await_until(lambda: committed(group) == ends, what="the group's offsets at the end")
    finally:
        query.stop()

    assert Counter(values(table)) == Counter(texts(0, count + MORE - 1))
    after = planned(checkpoint)
    assert {number: after[number] for number in before} == before
    assert {offset.stream for offset in after.values()} == {before[0].stream}
    assert [offset.seq for offset in after.values()] == list(after)
    ledger = read_ledger(spark, str(table), group)
    assert ledger is not None and ledger.offsets == ends
    assert ledger.topic_ids == {name: topic_id}
