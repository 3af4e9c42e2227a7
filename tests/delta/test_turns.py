"""One batch, one table, one turn: what a second sink, or a second query, may do with a table."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sink_source import offset
from sink_words import QUERY_S, commits, next_offsets, one, records, rows, run, stream

from spark_group_source.delta.access import Writer
from spark_group_source.delta.checkpoint import RUN_ID
from spark_group_source.delta.kept import read_ledger, set_ledger
from spark_group_source.delta.sink import DeltaSink
from spark_group_source.host import runs
from spark_group_source.model import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


def odd(df: "DataFrame") -> "DataFrame":
    return df.where("offset % 2 = 1")


def even(df: "DataFrame") -> "DataFrame":
    return df.where("offset % 2 = 0")


@pytest.mark.parametrize("twice", ["two sinks", "one sink", "two sinks, writer options"])
def test_a_second_write_of_a_batch_into_the_same_table_is_refused_and_never_skipped(
    scripted: "SparkSession", tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch, twice: str
) -> None:
    (tmp_path / "runs").mkdir(mode=0o700)
    monkeypatch.setattr(runs, "directory", lambda: tmp_path / "runs")
    writer: Writer = "options" if twice.endswith("writer options") else "native"
    first, second = (
        DeltaSink(table, transform=odd, writer=writer),
        DeltaSink(f"delta.`{table}`", transform=even, writer=writer),
    )

    def write(df: "DataFrame", batch_id: int) -> None:
        first(df, batch_id)
        (first if twice == "one sink" else second)(df, batch_id)

    df = stream(scripted, tmp_path, [offset(n, one(n * 10, n * 10 + 10)) for n in range(2)])
    for attempt in ("the first time", "a replay"):
        with pytest.raises(Exception, match=r"handed to table .* for the second time in one run"):
            run(df, write, tmp_path / "c")
        assert [r[2] for r in rows(table)] == [1, 3, 5, 7, 9], attempt
        assert runs.durable_seq("s1") == -1, "Kafka must not be told that the batch is durable"


def test_a_refused_batch_is_written_whole_by_what_the_message_says(
    scripted: "SparkSession", tmp_path: Path, table: Path
) -> None:
    """RESTORE, then a reset to the ledger, and the mended query with the same checkpoint."""

    def write(df: "DataFrame", batch_id: int) -> None:
        DeltaSink(table, transform=odd)(df, batch_id)
        DeltaSink(table, transform=even)(df, batch_id)

    script = [offset(0, one(100, 110))]
    with pytest.raises(Exception, match=r"Version 1 of .* TO VERSION AS OF 0`; `spark-group reset --group etl"):
        run(stream(scripted, tmp_path, script), write, tmp_path / "c")
    scripted.sql(f"RESTORE TABLE delta.`{table}` TO VERSION AS OF 0")
    there = read_ledger(scripted, str(table), "etl")
    assert there is not None and there.offsets == {TopicPartition("orders", 0): 100}, "where the batch began"
    set_ledger(scripted, str(table), "etl", there.offsets, reason="--to-ledger", epoch=1)
    mended = DeltaSink(table, transform=lambda df: odd(df).unionByName(even(df)))
    script.append(offset(1, one(100, 120), followed=[("orders", 0)], epoch=1))
    run(stream(scripted, tmp_path, script), mended, tmp_path / "c")
    assert rows(table) == records(100, 120)


def test_a_write_that_failed_may_be_tried_again_in_the_same_batch(
    scripted: "SparkSession", tmp_path: Path, table: Path
) -> None:
    fails = [True]

    def transform(df: "DataFrame") -> "DataFrame":
        if fails:
            fails.pop()
            raise RuntimeError("once")
        return df

    sink = DeltaSink(table, transform=transform)

    def write(df: "DataFrame", batch_id: int) -> None:
        try:
            sink(df, batch_id)
        except RuntimeError:
            sink(df, batch_id)

    run(stream(scripted, tmp_path, [offset(0, one(0, 10))]), write, tmp_path / "c")
    assert rows(table) == records(0, 10)


@pytest.mark.parametrize("writer", ["native", "options"])
def test_a_batch_for_two_tables_is_durable_when_the_slower_one_has_it(
    scripted: "SparkSession", tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch, writer: Writer
) -> None:
    (tmp_path / "runs").mkdir(mode=0o700)
    monkeypatch.setattr(runs, "directory", lambda: tmp_path / "runs")
    a, b = (DeltaSink(path, writer=writer) for path in (table, tmp_path / "other"))
    between, after = [], []
    fails = [2]

    def write(df: "DataFrame", batch_id: int) -> None:
        a(df, batch_id)
        between.append(runs.durable_seq("s1"))
        if batch_id in fails:
            raise RuntimeError("between the two")
        b(df, batch_id)
        after.append(runs.durable_seq("s1"))

    df = stream(scripted, tmp_path, [offset(n, one(n * 5, n * 5 + 5)) for n in range(3)])
    with pytest.raises(Exception, match="between the two"):
        run(df, write, tmp_path / "c")
    assert (between[1:], after) == ([0, 1], [0, 1]), "what comes second is not known before the end of the first batch"
    fails.clear()
    run(df, write, tmp_path / "c")
    assert after[-1] == 2
    assert rows(table) == rows(tmp_path / "other") == records(0, 15)


def test_one_sink_may_serve_two_queries(scripted: "SparkSession", tmp_path: Path, table: Path) -> None:
    """They have batches of the same numbers, and they are the same group, or they are not."""
    sink = DeltaSink(table)
    run(stream(scripted, tmp_path, [offset(n, one(n * 5, n * 5 + 5)) for n in range(2)], "a"), sink, tmp_path / "a")
    same = [offset(n, one(n * 5, n * 5 + 5, partition=1), stream="s2") for n in range(2)]
    run(stream(scripted, tmp_path, same, "b"), sink, tmp_path / "b")
    other = [offset(n, one(n, n + 1, topic="other"), group="g2", stream="s3") for n in range(2)]
    run(stream(scripted, tmp_path, other, "c"), sink, tmp_path / "c")
    expected = records(0, 10) + records(0, 10, partition=1) + records(0, 2, topic="other")
    assert Counter(rows(table)) == Counter(expected)
    assert next_offsets(table) == {("orders", 0): 10, ("orders", 1): 10}


def test_a_sink_with_the_checkpoint_of_another_query_is_refused_before_it_writes(
    scripted: "SparkSession", tmp_path: Path, table: Path
) -> None:
    sink = DeltaSink(table, checkpoint=str(tmp_path / "a"))
    run(stream(scripted, tmp_path, [offset(0, one(0, 5))], "a"), sink, tmp_path / "a")
    with pytest.raises(Exception, match="belongs to one query: give each query a DeltaSink of its own"):
        run(stream(scripted, tmp_path, [offset(0, one(5, 9), stream="s2")], "b"), sink, tmp_path / "b")
    assert rows(table) == records(0, 5)
    assert len(commits(table)) == 2


def test_the_property_that_names_a_run_is_the_run_s_id(scripted: "SparkSession", tmp_path: Path) -> None:
    """Not one of Spark's documented names: without it a second write could not be told from a replay."""
    found: list[str | None] = []

    def write(df: "DataFrame", batch_id: int) -> None:
        found.append(df.sparkSession.sparkContext.getLocalProperty(RUN_ID))

    df = stream(scripted, tmp_path, [offset(n, one(n, n + 1)) for n in range(2)])
    writer = df.writeStream.foreachBatch(write).option("checkpointLocation", str(tmp_path / "c"))
    query = writer.trigger(availableNow=True).start()
    assert query.awaitTermination(QUERY_S)
    assert found == [str(query.runId)] * 2
