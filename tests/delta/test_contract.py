"""DeltaSink on a real Spark with Delta, with either writer. The content of a table is read from its log files and by a
plain read. Deliberately absent: the decisions about a batch (``decisions/test_sink.py``, without a JVM)."""

import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F
from sink_helpers import (
    QUERY_S,
    BeforeNextCommit,
    NewQuery,
    Query,
    actions,
    commits,
    next_offsets,
    one,
    records,
    rows,
    run,
    stream,
)
from sink_source import SCHEMA, offset

from spark_group_source.delta import Writer, table_names, table_writer
from spark_group_source.delta.checkpoint import ONLY_RUN, read_planned, running_query
from spark_group_source.delta.ledger_store import read_ledger, set_ledger
from spark_group_source.delta.sink import DeltaSink
from spark_group_source.errors import LedgerConflict, OptionError
from spark_group_source.model import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("few_tasks")]


def test_with_writer_options_a_commit_has_rows_number_offsets_and_ledger_and_needs_no_feature(
    query: Query, new_table: Path
) -> None:
    sink, batch = query.sink(new_table, writer="options"), offset(0, one(0, 5))
    query.spark.conf.unset(table_writer.SNAPSHOT_PARTITIONS)
    query.run(sink, 0, batch)
    assert query.spark.conf.get(table_writer.SNAPSHOT_PARTITIONS, None) is None, "it is set during the write only"
    commit = commits(new_table)[-1]
    assert {kind for action in commit for kind in action} == {"commitInfo", "add", "txn"}
    (txn,) = actions(commit, "txn")
    assert (txn["appId"], txn["version"]) == ("spark-group-source.etl", 1)
    note = json.loads(actions(commit, "commitInfo")[0]["userMetadata"])
    assert note[0]["ledger"]["topics"] == {"orders": {"id": "id-1", "offsets": "0,5"}}
    query.run(sink, 1, offset(1, one(5, 7)))
    note = json.loads(actions(commits(new_table)[-1], "commitInfo")[0]["userMetadata"])
    assert note[0]["ledger"]["topics"] == {"orders": {"id": "id-1", "offsets": "0,7"}}
    assert rows(new_table) == records(0, 7)
    assert len(commits(new_table)) == 1 + 2, "the table's creation and two batches"
    (protocol,) = (action for commit in commits(new_table) for action in actions(commit, "protocol"))
    assert "domainMetadata" not in protocol.get("writerFeatures", [])


def test_rows_are_left_out_before_the_transform_which_needs_the_kafka_columns(
    new_query: NewQuery, new_table: Path
) -> None:
    a, b = new_query("a"), new_query("b")
    narrow: Callable[[DataFrame], DataFrame] = lambda df: df.select("value")  # noqa: E731
    a.plan(0, offset(0, one(0, 10)))
    a.sink(new_table)(narrow(a.rows(offset(0, one(0, 10)))), 0)
    b.plan(0, offset(0, one(5, 15), stream="s2"))
    for wrong in (("value",), ("topic", "partition", "cast(offset as string) offset", "value")):
        with pytest.raises(LedgerConflict, match="transform="):
            b.sink(new_table)(b.rows(offset(0, one(5, 15))).selectExpr(*wrong), 0)
    assert len(commits(new_table)) == 2
    b.run(b.sink(new_table, transform=narrow), 0, offset(0, one(5, 15), stream="s2"))
    assert rows(new_table) == sorted((r[3],) for r in records(0, 15))


def test_rows_of_other_sources_are_never_left_out(new_query: NewQuery, table: Path) -> None:
    a, b = new_query("a"), new_query("b")
    a.run(a.sink(table), 0, offset(0, one(0, 10)))
    batch = offset(0, one(5, 15), stream="s2")
    b.plan(0, batch, "42")
    foreign: list[Any] = [(None, None, None, "x"), (None, 0, 7, "y"), ("orders", 9, 7, "z"), ("orders", 0, None, "w")]
    b.sink(table)(b.rows(batch).union(b.spark.createDataFrame(foreign, SCHEMA)), 0)
    assert sorted(r[3] for r in rows(table)) == sorted([r[3] for r in records(0, 15)] + ["w", "x", "y", "z"])


def test_concurrent_queries_of_one_group_create_the_table_and_write_every_record_once(
    new_query: NewQuery, new_table: Path
) -> None:
    writers: list[Writer] = ["native", "options", "options"]
    queries = [new_query(f"q{n}") for n in range(3)]

    def work(n: int) -> None:
        sink = queries[n].sink(new_table, writer=writers[n])
        for b in range(1, 3):
            # Each query has its own partition, and all of them write one shared partition.
            spans = {("orders", n): (b, b + 1), ("shared", 0): (0, b * 2)}
            queries[n].run(sink, b, offset(b, spans, stream=f"s{n}"))

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(work, n) for n in range(3)]:
            done.result(QUERY_S)
    expected = [r for n in range(3) for r in records(1, 3, partition=n)] + records(0, 4, topic="shared")
    assert rows(new_table) == sorted(expected)


def test_of_two_queries_that_race_one_decides_again(
    query: Query,
    new_query: NewQuery,
    table: Path,
    before_next_commit: BeforeNextCommit,
) -> None:
    other = new_query("other")
    query.run(query.sink(table), 0, offset(0, one(0, 2)))
    before_next_commit(lambda: other.run(other.sink(table, writer="native"), 0, offset(0, one(2, 5), stream="s2")))
    query.run(query.sink(table, writer="options"), 1, offset(1, one(2, 9)))
    assert rows(table) == records(0, 9)
    assert next_offsets(table) == {("orders", 0): 9}


@pytest.mark.parametrize("writer", ["auto", "options"])
def test_a_table_altered_during_a_batch_gets_each_batch_once_and_stays_altered(
    query: Query, table: Path, before_next_commit: BeforeNextCommit
) -> None:
    changes = (
        "SET TBLPROPERTIES ('more1' = 'b')",
        "ADD COLUMNS (more2 string)",
        "ADD CONSTRAINT more3 CHECK (offset < 99)",
    )
    for n, change in enumerate(changes):
        before_next_commit(partial(query.spark.sql, f"ALTER TABLE delta.`{table}` {change}"))
        query.run(query.sink(table), n, offset(n, one(n * 5, n * 5 + 5)))
    assert [r[:4] for r in rows(table)] == records(0, 15)
    last = str([m for commit in commits(table) for m in actions(commit, "metaData")][-1])
    assert all(f"more{n}" in last for n in (1, 2, 3))


def test_the_sink_waits_for_a_table_that_another_writer_is_creating(
    query: Query, new_table: Path, created: Path
) -> None:
    (new_table / "_delta_log").mkdir(parents=True)
    finish = threading.Timer(1.5, shutil.copytree, (created, new_table), {"dirs_exist_ok": True})
    finish.start()
    query.run(query.sink(new_table), 0, offset(0, one(0, 2)))
    finish.join()
    assert rows(new_table) == records(0, 2)
    assert len(commits(new_table)) == 2, "this writer did not create it"


def test_a_table_whose_creation_was_killed_is_created(
    query: Query, new_table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delta makes the folders of its log before the first commit, and then refuses to create a table there."""
    (new_table / "_delta_log" / "_staged_commits").mkdir(parents=True)
    (new_table / "_delta_log" / ".00000000000000000000.json.0a1b.tmp").write_bytes(b"{}")
    monkeypatch.setattr(table_writer, "CREATE_WAIT_MAX_S", 0.0)
    query.run(query.sink(new_table, partition_by=["topic"]), 0, offset(0, one(0, 2)))
    assert [row[1:] for row in rows(new_table)] == [row[1:] for row in records(0, 2)]  # the topic is in the path
    (metadata,) = [action for commit in commits(new_table) for action in actions(commit, "metaData")]
    assert metadata["partitionColumns"] == ["topic"]


def test_a_table_is_created_without_files_of_data(query: Query, new_table: Path) -> None:
    """A kill between such a file and the first commit would leave a folder that Delta takes for another job's."""
    written: Callable[[DataFrame], DataFrame] = lambda df: df.select(  # noqa: E731
        "*",
        F.struct(
            F.col("offset").alias("a-b"), F.array(F.map_from_arrays(F.array("topic"), F.array("offset"))).alias("`")
        ).alias("n"),
        F.lit(True).alias("odd", metadata={"comment": r"it's \' odd"}),
    )
    table_writer.TableWriter(query.spark, str(new_table)).create(written(query.rows(offset(0, one(0, 1)))))
    assert [f.name for f in new_table.rglob("*") if f.suffix == ".parquet"] == []
    query.run(query.sink(new_table, transform=written), 0, offset(0, one(0, 2)))
    created = query.spark.read.format("delta").load(str(new_table))
    assert [row[:4] for row in rows(new_table)] == records(0, 2)
    assert created.schema.simpleString() == written(query.rows(offset(0, one(0, 1)))).schema.simpleString()
    assert created.schema["odd"].metadata == {"comment": r"it's \' odd"}
    assert all(field.nullable for field in created.schema)


@pytest.mark.parametrize("has_log", [False, True])
def test_a_directory_with_other_files_is_not_made_a_table(
    has_log: bool, query: Query, new_table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (new_table / "_delta_log" if has_log else new_table).mkdir(parents=True)
    (new_table / "part-0.parquet").write_bytes(b"of another job")
    monkeypatch.setattr(table_writer, "CREATE_WAIT_MAX_S", 0.0)
    with pytest.raises(OptionError, match="its folder is not empty and has no Delta table"):
        query.run(query.sink(new_table), 0, offset(0, one(0, 2)))
    assert [f for f in new_table.rglob("*") if f.is_file()] == [new_table / "part-0.parquet"]


def test_a_table_by_name_is_created_in_the_catalog_and_written_by_both_writers(query: Query) -> None:
    spark = query.spark
    spark.sql("CREATE DATABASE IF NOT EXISTS sink_test")
    try:
        sink = query.sink("sink_test.orders", partition_by="topic")
        query.run(sink, 0, offset(0, one(0, 1)))
        assert spark.catalog.getTable("sink_test.orders").tableType == "MANAGED"
        spark.sql("USE sink_test")
        for _ in range(2):
            query.run(query.sink("orders", writer="options"), 1, offset(1, one(1, 2)))
        query.run(sink, 2, offset(2, one(2, 3)))
        assert sorted(tuple(r) for r in spark.table("sink_test.orders").collect()) == records(0, 3)
        for name in ("sink_test.orders", "spark_catalog.sink_test.orders"):
            found = read_ledger(spark, name, "etl")
            assert found is not None and found.offsets == {TopicPartition("orders", 0): 3}
    finally:
        spark.sql("USE default")
        spark.sql("DROP DATABASE sink_test CASCADE")


def test_a_table_of_another_format_is_refused_by_its_name(query: Query) -> None:
    query.spark.sql("DROP TABLE IF EXISTS of_parquet")
    query.spark.sql("CREATE TABLE of_parquet (topic string, partition int, offset long, value string) USING parquet")
    with pytest.raises(OptionError, match="table of_parquet is not a Delta table, but parquet"):
        query.run(query.sink("of_parquet"), 0, offset(0, one(0, 2)))
    query.spark.sql("DROP TABLE of_parquet")


def test_partition_columns_are_created_and_compared(query: Query, new_table: Path) -> None:
    from pyspark.errors import AnalysisException

    query.run(query.sink(new_table, partition_by=["topic", "partition"]), 0, offset(0, one(0, 5)))
    for add in actions(commits(new_table)[-1], "add"):
        assert add["partitionValues"] == {"topic": "orders", "partition": "0"}
    query.run(query.sink(new_table), 1, offset(1, one(5, 6)))
    with pytest.raises(AnalysisException, match=r"[Pp]artition columns do not match"):
        query.run(query.sink(new_table, partition_by="value"), 2, offset(2, one(6, 7)))
    assert len(commits(new_table)) == 3


@pytest.mark.parametrize("writer", ["options"])
def test_new_columns_are_refused_unless_merged_and_wrong_types_always(query: Query, table: Path) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 1)))
    wider: Callable[[DataFrame], DataFrame] = lambda df: df.withColumn("more", F.lit("m"))  # noqa: E731
    with pytest.raises(OptionError, match="lacks the columns more of the batch, and merge_schema is False"):
        query.run(query.sink(table, transform=wider), 1, offset(1, one(1, 2)))
    assert len(commits(table)) == 2
    assert next_offsets(table) == {("orders", 0): 1}
    query.run(query.sink(table, transform=wider, merge_schema=True), 1, offset(1, one(1, 2)))
    query.run(query.sink(table), 2, offset(2, one(2, 3)))
    expected = [(*records(0, 1)[0], None), (*records(1, 2)[0], "m"), (*records(2, 3)[0], None)]
    assert rows(table) == expected
    assert list(map(tuple, query.spark.read.format("delta").load(str(table)).orderBy("offset").collect())) == expected
    before = len(commits(table))
    for merges in (False, True):
        for kind in ("array<string>", "struct<a: int>"):
            wrong = lambda df, kind=kind: df.withColumn("partition", F.lit(None).cast(kind))  # noqa: E731
            with pytest.raises(OptionError, match=r"partition: .* in the batch, int in the table.* Cast these"):
                query.run(query.sink(table, transform=wrong, merge_schema=merges), 3, offset(3, one(3, 4)))
    assert len(commits(table)) == before


def create_with_computed_columns(spark: "SparkSession", table: Path, *, generated: bool) -> None:
    """The columns of ``records``, an identity column and, with ``generated``, a generated one. Spark 4.0's SQL cannot
    declare them for Delta Lake 4.0.0."""
    delta = spark._jvm.io.delta.tables.DeltaTable  # type: ignore[union-attr]
    jspark = spark._jsparkSession
    builder = delta.create(jspark).location(str(table))
    for name, kind in (("topic", "string"), ("partition", "int"), ("offset", "long"), ("value", "string")):
        builder = builder.addColumn(name, kind)
    if generated:
        tens = delta.columnBuilder(jspark, "tens").dataType("long")
        builder = builder.addColumn(tens.generatedAlwaysAs("offset DIV 10").build())
    numbered = delta.columnBuilder(jspark, "nr").dataType("bigint").generatedAlwaysAsIdentity()
    builder.addColumn(numbered.build()).execute()


def test_constraints_generated_and_default_columns_hold_until_the_constraint_is_dropped(
    query: Query, new_table: Path
) -> None:
    spark = query.spark
    create_with_computed_columns(spark, new_table, generated=True)
    spark.sql(f"ALTER TABLE delta.`{new_table}` ADD CONSTRAINT small CHECK (offset < 100)")
    defaults = "SET TBLPROPERTIES ('delta.feature.allowColumnDefaults' = 'supported')"
    for change in (defaults, "ADD COLUMN note STRING", "ALTER COLUMN note SET DEFAULT 'none'"):
        spark.sql(f"ALTER TABLE delta.`{new_table}` {change}")
    sink = query.sink(new_table)
    query.run(sink, 0, offset(0, one(19, 21)))
    query.run(sink, 1, offset(1, one(21, 22)))
    found = spark.read.format("delta").load(str(new_table)).orderBy("offset").collect()
    assert [(r["offset"], r["tens"], r["note"]) for r in found] == [(19, 1, "none"), (20, 2, "none"), (21, 2, "none")]
    assert len({r["nr"] for r in found}) == 3
    before = len(commits(new_table))
    with pytest.raises(Exception, match="DELTA_VIOLATE_CONSTRAINT_WITH_VALUES"):
        query.run(sink, 2, offset(2, one(99, 101)))
    assert len(commits(new_table)) == before
    assert next_offsets(new_table) == {("orders", 0): 22}
    spark.sql(f"ALTER TABLE delta.`{new_table}` DROP CONSTRAINT small")
    query.run(sink, 2, offset(2, one(99, 101)))
    assert next_offsets(new_table) == {("orders", 0): 101}


def test_identity_values_stay_unique_after_a_lost_race(
    query: Query, new_table: Path, before_next_commit: BeforeNextCommit
) -> None:
    create_with_computed_columns(query.spark, new_table, generated=False)
    sink, other = query.sink(new_table), TopicPartition("other", 0)
    query.run(sink, 0, offset(0, one(0, 2)))
    before_next_commit(
        lambda: set_ledger(query.spark, str(new_table), "etl", {other: 1}, reason="no rows", reset_number=0)
    )
    for n in (1, 2):
        query.run(sink, n, offset(n, one(n * 2, n * 2 + 2)))
    assert len({r[4] for r in rows(new_table)}) == len(rows(new_table)) == 6


def test_a_ledger_without_rows_is_committed_to_a_table_with_computed_columns_that_deltalake_cannot_open(
    query: Query, new_table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_writer, "open_log", lambda *args: None)
    create_with_computed_columns(query.spark, new_table, generated=True)
    query.run(query.sink(new_table), 0, offset(0, one(0, 2)))
    query.run(query.sink(new_table), 1, offset(1, one(0, 2), stream="s2"))
    set_ledger(query.spark, str(new_table), "etl", {TopicPartition("orders", 0): 5}, reason="r", reset_number=0)
    assert [row[:3] for row in rows(new_table)] == [row[:3] for row in records(0, 2)]
    assert next_offsets(new_table) == {("orders", 0): 5}


def test_auto_falls_back_to_writer_options_and_logs_the_reason_once(
    query: Query, new_table: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    query.run(query.sink(new_table), 9, offset(0, one(0, 0), stream="s0"))
    by_log = table_writer.TableWriter(query.spark, str(new_table)).identity()
    monkeypatch.setattr(table_writer, "open_log", lambda *args: None)
    assert table_writer.TableWriter(query.spark, f"{new_table}/").identity() == by_log
    sink = query.sink(new_table)
    for n in range(2):
        query.run(sink, n, offset(n, one(n, n + 1)))
    assert rows(new_table) == records(0, 2)
    assert next_offsets(new_table) == {("orders", 0): 2}
    assert caplog.text.count("by Delta's writer options, because its log cannot be opened") == 1
    with pytest.raises(OptionError, match="cannot be written natively: its log cannot be opened"):
        query.run(query.sink(new_table, writer="native"), 2, offset(2, one(2, 3)))


def test_each_writer_continues_where_the_other_one_stopped(query: Query, table: Path) -> None:
    for n in range(2):
        mine, other = ("native", "options")[:: 1 if n % 2 else -1]
        query.run(query.sink(table, writer=mine), n, offset(n, one(n * 2, n * 2 + 2)))
        query.run(query.sink(table, writer=other), n, offset(n, one(n * 2, n * 2 + 2)))
    assert rows(table) == records(0, 4)
    assert next_offsets(table) == {("orders", 0): 4}


def test_the_checkpoint_is_readable_without_java(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    query.plan(0, offset(0, one(0, 5)))
    direct = read_planned(query.spark, 0, str(query.root))
    monkeypatch.setattr("spark_group_source.delta.checkpoint._is_classic", lambda spark: False)
    assert read_planned(query.spark, 0, str(query.root)) == replace(direct, run_id=ONLY_RUN), (
        "on Spark Connect a worker serves one run"
    )
    with pytest.raises(OptionError, match="which Spark writes before it runs batch 1"):
        read_planned(query.spark, 1, str(query.root))
    with pytest.raises(OptionError, match="on Spark Connect, pass the query's checkpointLocation"):
        read_planned(query.spark, 0, None)


def test_a_relative_path_is_made_absolute_for_sql(spark: "SparkSession") -> None:
    whole = table_names.qualified(spark, "lake/orders")
    assert whole.startswith("file:/") and whole.endswith("/lake/orders")
    for table in ("/lake/orders", "s3a://bucket/orders", "file:/lake/orders", "db.orders", whole):
        assert table_names.qualified(spark, table) == table


def test_a_query_reads_each_batch_once_and_writes_it(scripted: "SparkSession", tmp_path: Path, new_table: Path) -> None:
    script = [offset(n, {("orders", 0): (n * 10, n * 10 + 10), ("orders", 1): (n, n)}) for n in range(3)]
    read = run(stream(scripted, tmp_path, script), DeltaSink(new_table), tmp_path / "c")
    assert [n for n in read if n] == [10, 10, 10]
    assert rows(new_table) == records(0, 30)
    assert next_offsets(new_table) == {("orders", 0): 30, ("orders", 1): 2}


def test_a_stream_used_twice_is_recorded_once_also_in_the_second_format_of_offsets(
    scripted: "SparkSession", tmp_path: Path, table: Path
) -> None:
    key = "spark.sql.streaming.offsetLog.formatVersion"
    scripted.conf.set(key, "2")
    try:
        df = stream(scripted, tmp_path, [offset(n, one(n * 2, n * 2 + 2)) for n in range(2)])
        run(df.union(df), DeltaSink(table), tmp_path / "c")
    finally:
        scripted.conf.unset(key)
    assert (tmp_path / "c" / "offsets" / "0").read_text().startswith("v2\n")
    assert Counter(rows(table)) == Counter(records(0, 4) * 2)
    assert next_offsets(table) == {("orders", 0): 4}


def test_a_batch_refused_because_two_sinks_wrote_it_is_written_whole_after_the_printed_commands(
    scripted: "SparkSession", tmp_path: Path, table: Path
) -> None:
    """RESTORE, a reset to the ledger, then the corrected query with the same checkpoint."""
    odd, even = "offset % 2 = 1", "offset % 2 = 0"

    def write(df: "DataFrame", batch_id: int) -> None:
        DeltaSink(table, transform=lambda df: df.where(odd))(df, batch_id)
        DeltaSink(table, transform=lambda df: df.where(even))(df, batch_id)

    script = [offset(0, one(100, 110))]
    with pytest.raises(
        Exception, match=r"(?s)Version 1 of .* TO VERSION AS OF 0\n +spark-group reset .*--group etl --to-ledger"
    ):
        run(stream(scripted, tmp_path, script), write, tmp_path / "c")
    assert [r[2] for r in rows(table)] == [101, 103, 105, 107, 109]
    scripted.sql(f"RESTORE TABLE delta.`{table}` TO VERSION AS OF 0")
    there = read_ledger(scripted, str(table), "etl")
    assert there is not None and there.offsets == {TopicPartition("orders", 0): 100}, "where the batch started"
    set_ledger(scripted, str(table), "etl", there.offsets, reason="--to-ledger", reset_number=1)
    corrected = DeltaSink(table, transform=lambda df: df.where(odd).unionByName(df.where(even)))
    script.append(offset(1, one(100, 120), followed=[("orders", 0)], reset_number=1))
    run(stream(scripted, tmp_path, script), corrected, tmp_path / "c")
    assert rows(table) == records(100, 120)


def test_the_run_of_a_batch_is_found_although_the_function_sets_a_job_group(
    scripted: "SparkSession", tmp_path: Path
) -> None:
    """Without it a second write could not be distinguished from a replay."""
    found: list[tuple[str, str] | None] = []

    def write(df: "DataFrame", batch_id: int) -> None:
        df.sparkSession.sparkContext.setJobGroup("theirs", "of the function")
        found.append(running_query(df.sparkSession))

    df = stream(scripted, tmp_path, [offset(n, one(n, n + 1)) for n in range(2)])
    writer = df.writeStream.foreachBatch(write).option("checkpointLocation", str(tmp_path / "c"))
    query = writer.trigger(availableNow=True).start()
    assert query.awaitTermination(QUERY_S)
    assert found == [(str(query.id), str(query.runId))] * 2


def test_a_missing_table_is_named_in_the_error(spark: "SparkSession", tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no Delta table"):
        read_ledger(spark, str(tmp_path / "nowhere"), "etl")
    with pytest.raises(OptionError, match="no Delta table 'nowhere'"):
        set_ledger(spark, "nowhere", "etl", {}, reason="r", reset_number=1)
