"""DeltaSink and DeltaSinks on stateful queries: Spark runs batches without records, which write what a watermark
released. The source is scripted, the query real."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import functions as F
from sink_helpers import rows, run, stream
from sink_source import offset

from spark_group_source.delta import Writer
from spark_group_source.delta.sink import DeltaSink
from spark_group_source.delta.topic_sinks import DeltaSinks
from spark_group_source.protocol.offsets import StreamOffset

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("few_tasks")]

RECORDS = [offset(0, {("orders", 0): (0, 15), ("bills", 0): (0, 15)}), offset(1, {("orders", 0): (15, 40)})]
ORDERS = [("orders", 0, 10), ("orders", 10, 10), ("orders", 20, 10)]
BILLS = [("bills", 0, 10), ("bills", 10, 5)]
"""Windows of ten seconds that the watermark released: topic, begin and number of records."""


def windows(scripted: "SparkSession", tmp_path: Path, script: Sequence[StreamOffset] = RECORDS) -> "DataFrame":
    """Count records by topic in windows of ten seconds; the offset of a record is its time in seconds."""
    df = stream(scripted, tmp_path, script).withColumn("at", F.timestamp_seconds("offset"))
    counts = df.withWatermark("at", "5 seconds").groupBy("topic", F.window("at", "10 seconds")).count()
    return counts.selectExpr("topic", "unix_seconds(window.start) AS begin", "count")


@pytest.mark.parametrize("writer", ["native", pytest.param("options", marks=pytest.mark.full)])
def test_what_the_watermark_released_is_in_the_table_once_also_after_a_replay(
    scripted: "SparkSession", tmp_path: Path, new_table: Path, writer: Writer
) -> None:
    sink, checkpoint = DeltaSink(new_table, writer=writer), tmp_path / "c"
    run(windows(scripted, tmp_path), sink, checkpoint)
    planned = sorted((checkpoint / "offsets").glob("[0-9]"))
    assert planned[-1].read_text().splitlines()[2:] == planned[-2].read_text().splitlines()[2:], "it has no records"
    assert rows(new_table) == sorted(ORDERS + BILLS)
    for finished in (checkpoint / "commits").glob(f"*{planned[-1].name}*"):  # and its checksum
        finished.unlink()
    run(windows(scripted, tmp_path), DeltaSink(new_table, writer=writer), checkpoint)
    assert rows(new_table) == sorted(ORDERS + BILLS)


def test_tables_by_topic_refuse_what_the_watermark_released_and_tables_by_column_have_it(
    scripted: "SparkSession", tmp_path: Path
) -> None:
    """Also of another topic than that of the batch's only records."""
    one_topic = [*RECORDS, offset(2, {("orders", 0): (40, 41)})]
    by_topic = DeltaSinks(lambda topic: DeltaSink(tmp_path / topic))
    for script, records in ((RECORDS, "no topic"), (one_topic, "orders")):
        with pytest.raises(Exception, match=rf'records of {records}, and rows with topic bills.*by="topic"'):
            run(windows(scripted, tmp_path, script), by_topic, tmp_path / f"c-{records}")
    orders, bills = tmp_path / "table-of-orders", tmp_path / "table-of-bills"
    by_column = DeltaSinks({"orders": DeltaSink(orders), "bills": DeltaSink(bills)}, by="topic")
    run(windows(scripted, tmp_path), by_column, tmp_path / "by-column")
    assert (rows(orders), rows(bills)) == (ORDERS, BILLS)
