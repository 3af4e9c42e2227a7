"""Foreign changes of a table while a query writes to it: each batch is in it once, or is refused."""

import json
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

import pytest
from deltalake import DeltaTable
from printed_commands import commands
from sink_helpers import BeforeNextCommit, Query, actions, commits, next_offsets, one, parquet_files, records, rows
from sink_source import offset

from spark_group_source.delta.ledger_store import read_ledger, transfer_ledger
from spark_group_source.delta.replaced_rows import ledger_of_rows
from spark_group_source.delta.table_history import DescribedHistory, TableHistory
from spark_group_source.errors import LedgerConflict, OptionError
from spark_group_source.model import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("few_tasks")]

P0, P1 = TopicPartition("orders", 0), TopicPartition("orders", 1)


def content(spark: "SparkSession", table: Path) -> list[tuple[object, ...]]:
    """Return the rows by a plain read, for tables whose data files alone do not show them."""
    return sorted(
        tuple(r)
        for r in spark.read.format("delta").load(str(table)).select("topic", "partition", "offset", "value").collect()
    )


def moment(table: Path, version: int, zone: str) -> str:
    """Return the time of a version, for Spark's SQL in a session with that time zone."""
    ms = (table / "_delta_log" / f"{version:020}.json").stat().st_mtime_ns // 1_000_000
    at = datetime.fromtimestamp(ms / 1000, ZoneInfo(zone))
    return at.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


# RESTORE


@pytest.mark.slow
def test_a_restore_by_timestamp_does_not_depend_on_the_time_zones_of_session_and_reader(
    query: Query, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``decisions/test_replaced_rows.py`` shows how the query continues."""
    sink, spark, zones = query.sink(table), query.spark, ("America/New_York", "Asia/Kolkata")
    for n in range(4):
        query.run(sink, n, offset(n, one(n * 10, n * 10 + 10)))
    spark.sql(f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')")
    spark.sql(f"DELETE FROM delta.`{table}` WHERE offset IN (3, 13, 33)")
    # A driver in that zone: Delta formats the time in the zone of the JVM and parses it in the zone of the session.
    key, jvm_zones = "spark.sql.session.timeZone", spark._jvm.java.util.TimeZone  # type: ignore[union-attr]
    before, jvm_zone = str(spark.conf.get(key)), jvm_zones.getDefault()
    spark.conf.set(key, zones[0])
    jvm_zones.setDefault(jvm_zones.getTimeZone(zones[0]))
    monkeypatch.setenv("TZ", zones[1])
    time.tzset()
    try:
        spark.sql(f"RESTORE TABLE delta.`{table}` TO TIMESTAMP AS OF '{moment(table, 2, zones[0])}'")
        with pytest.raises(LedgerConflict, match=r"(?s)restored to version 2 .* orders-0\[20,40\).*--to-ledger"):
            query.run(sink, 4, offset(4, one(40, 50)))
        there = read_ledger(spark, str(table), "etl")
        with pytest.raises(LedgerConflict, match=r"version 7 .* \(RESTORE\) removed rows .* is unknown"):
            ledger_of_rows(TableHistory(DescribedHistory(spark, str(table))), "etl")
    finally:
        spark.conf.set(key, before)
        jvm_zones.setDefault(jvm_zone)
        monkeypatch.undo()
        time.tzset()
    assert there is not None and there.offsets == {P0: 20}
    assert rows(table) == content(spark, table) == records(0, 20)


@pytest.mark.slow
def test_a_restore_during_a_batch_by_options_refuses_the_next_batch(
    query: Query, table: Path, before_next_commit: BeforeNextCommit
) -> None:
    """Delta commits the batch behind the RESTORE: its rows are in the table, and the rows before them are missing.
    ``deltalake`` refuses the commit (``decisions/test_replaced_rows.py``)."""
    spark = query.spark
    for n in range(2):
        query.run(query.sink(table), n, offset(n, one(n * 10, n * 10 + 10)))
    sink = query.sink(table, writer="options")
    before_next_commit(lambda: spark.sql(f"RESTORE TABLE delta.`{table}` TO VERSION AS OF 1"))
    query.run(sink, 2, offset(2, one(20, 30)))
    assert rows(table) == records(0, 10) + records(20, 30)
    for again in (sink, query.sink(table)):
        with pytest.raises(LedgerConflict, match=r"(?s)being written: the batch is version 4.*TO VERSION AS OF 3\n"):
            query.run(again, 3, offset(3, one(30, 40)))


@pytest.mark.slow
def test_the_statements_of_messages_run_on_spark(query: Query, table: Path) -> None:
    """Except the ``RESTORE`` of a known version, which ``deltalake`` runs in ``decisions/test_replaced_rows.py``."""
    spark, retention = query.spark, "'delta.setTransactionRetentionDuration' = 'interval 1 days'"
    for n in range(2):
        query.run(query.sink(table), n, offset(n, one(n * 10, n * 10 + 10)))
    spark.sql(f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ({retention})")
    with pytest.raises(OptionError) as refused:
        query.run(query.sink(table), 2, offset(2, one(20, 30)))
    (unset,) = commands(refused.value)
    spark.sql(unset)
    query.run(query.sink(table), 2, offset(2, one(20, 30)))
    assert rows(table) == records(0, 30)


# Overwrites


@pytest.mark.slow
def test_a_table_whose_partitions_were_overwritten_refuses_the_query_until_it_is_taken_back(
    query: Query, new_table: Path
) -> None:
    """``decisions/test_replaced_rows.py`` runs the commands, also after other changes. Without the log's files the
    operation decides."""
    sink, spark = query.sink(new_table, partition_by="topic"), query.spark
    for n in range(2):
        query.run(sink, n, offset(n, one(n * 10, n * 10 + 10)))
    old = spark.read.format("delta").option("versionAsOf", 1).load(str(new_table))
    old.write.format("delta").mode("overwrite").option("partitionOverwriteMode", "dynamic").save(str(new_table))
    for refused in (sink, query.sink(new_table), query.sink(new_table, writer="options")):
        with pytest.raises(
            LedgerConflict, match=r"(?s)version 3 of .* removed rows after .* VERSION AS OF 2\n"
        ) as error:
            query.run(refused, 2, offset(2, one(20, 30)))
    (by_operation,) = DescribedHistory(spark, str(new_table)).commits(3, 2)
    assert by_operation.unsettles_ledger
    assert content(spark, new_table) == records(0, 10)
    spark.sql(commands(error.value)[0])
    query.run(query.sink(new_table), 2, offset(2, one(20, 30)))
    assert content(spark, new_table) == records(0, 30)


# CLONE


@pytest.mark.slow
def test_a_clone_has_no_ledger_until_it_is_copied(query: Query, table: Path, tmp_path: Path) -> None:
    """``decisions/test_commands.py`` runs the commands. By writer options, too: the numbers are not cloned either."""
    spark, clone = query.spark, tmp_path / "clone"
    for n in range(3):
        query.run(query.sink(table), n, offset(n, one(n * 10, n * 10 + 10)))
    spark.sql(f"CREATE TABLE delta.`{clone}` SHALLOW CLONE delta.`{table}` VERSION AS OF 2")
    for writer in ("native", "options"):
        with pytest.raises(
            LedgerConflict, match=r"is a clone of version 2 of table .* which has a ledger of group 'etl'"
        ):
            query.run(query.sink(clone, writer=writer), 3, offset(3, one(30, 40)))
    (described,) = DescribedHistory(spark, str(clone)).commits(0, -1)
    assert described.operation == "CLONE" and described.parameters["sourceVersion"] == "2"
    spark.sql(f"CREATE TABLE moved USING delta LOCATION '{table}'")
    try:
        found = transfer_ledger(spark, "moved", "etl", str(clone), "etl", version=2, execute=True)
    finally:
        spark.sql("DROP TABLE moved")
    there = read_ledger(spark, str(clone), "etl")
    assert there is not None and there.offsets == found.offsets == {P0: 20}
    query.run(query.sink(clone, writer="options"), 3, offset(3, one(20, 40), reset_number=1))
    assert content(spark, clone) == records(0, 40)


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("CREATE TABLE delta.`{new}` DEEP CLONE delta.`{table}`", "PARSE_SYNTAX_ERROR"),
        (
            "CREATE TABLE delta.`{new}` (n int) USING delta TBLPROPERTIES ('delta.feature.catalogManaged'='supported')",
            "DELTA_UNSUPPORTED_",
        ),
    ],
    ids=["deep clone", "catalog-managed"],
)
def test_open_source_delta_has_no_deep_clone_and_no_catalog_managed_tables(
    spark: "SparkSession", table: Path, statement: str, error: str
) -> None:
    """``docs/recovery.md`` and ``docs/sink.md`` say so."""
    with pytest.raises(Exception, match=error):
        spark.sql(statement.format(new=table.with_name("new"), table=table))


# Maintenance


@pytest.mark.slow
def test_rows_that_a_deletion_vector_removed_stay_removed(query: Query, table: Path) -> None:
    spark = query.spark
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    spark.sql(f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')")
    spark.sql(f"DELETE FROM delta.`{table}` WHERE offset = 3")
    assert any(add.get("deletionVector") for commit in commits(table) for add in actions(commit, "add"))
    query.run(query.sink(table, writer="native"), 1, offset(1, one(10, 20)))
    query.run(query.sink(table, writer="options"), 2, offset(2, one(20, 30)))
    query.run(query.sink(table), 3, offset(3, one(0, 40), stream="of a new checkpoint"))
    assert content(spark, table) == records(0, 3) + records(4, 40)


@pytest.mark.slow
def test_optimize_and_vacuum_keep_every_record_once(
    query: Query, table: Path, before_next_commit: BeforeNextCommit
) -> None:
    """VACUUM runs between batches only: without Delta's retention check it deletes files that a batch is writing."""
    sink, spark = query.sink(table), query.spark
    spark.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
    try:
        for n in range(2):
            query.run(sink, n, offset(n, one(n * 10, n * 10 + 10)))
        before = parquet_files(table)
        before_next_commit(lambda: spark.sql(f"OPTIMIZE delta.`{table}`"))
        query.run(sink, 2, offset(2, one(20, 30)))
        spark.sql(f"VACUUM delta.`{table}` RETAIN 0 HOURS")
    finally:
        spark.conf.unset("spark.databricks.delta.retentionDurationCheck.enabled")
    assert not before & parquet_files(table), "the files of the first batches are gone"
    query.run(query.sink(table), 2, offset(2, one(20, 30)))
    query.run(sink, 3, offset(3, one(30, 40)))
    assert rows(table) == content(spark, table) == records(0, 40)
    assert next_offsets(table) == {("orders", 0): 40}


def test_G4_vacuum_keeps_the_files_of_partitions_whose_value_and_column_are_not_ascii(
    query: Query, new_table: Path
) -> None:
    """Delta takes a file for one that the table does not have if its path is encoded otherwise in the log."""
    spark, column, ranges = query.spark, "größe", {("größe", 0): (0, 3), ("☃ a%C3%BC", 0): (0, 2), ("plain", 0): (0, 4)}
    sink = query.sink(
        new_table, transform=lambda df: df.withColumnRenamed("topic", column), partition_by=[column], writer="native"
    )
    query.run(sink, 0, offset(0, ranges))
    kept = sorted((topic, n) for (topic, _), (start, end) in ranges.items() for n in range(start, end))
    spark.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
    try:
        spark.sql(f"VACUUM delta.`{new_table}` RETAIN 0 HOURS")
    finally:
        spark.conf.unset("spark.databricks.delta.retentionDurationCheck.enabled")
    read = spark.read.format("delta").load(str(new_table)).select(column, "offset").collect()
    assert sorted(map(tuple, read)) == kept
    found = DeltaTable(str(new_table)).to_pyarrow_table(columns=[column, "offset"]).to_pylist()
    assert sorted((row[column], row["offset"]) for row in found) == kept


def test_native_commits_leave_no_checksum_that_does_not_fit(query: Query, table: Path) -> None:
    """Delta would log the failure with whole stack traces each time that it opens the table."""
    spark, sink, log = query.spark, query.sink(table), table / "_delta_log"
    spark.sql(f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ('delta.checkpointInterval' = '2')")
    spark.sql(f"INSERT INTO delta.`{table}` (topic, partition, offset) VALUES ('others', 0, 0)")
    assert (log / "._last_checkpoint.crc").exists(), "of the checkpoint that Delta wrote"
    for number in range(2):
        query.run(sink, number, offset(number, one(number, number + 1)))
    assert json.loads((log / "_last_checkpoint").read_text())["version"] > 2, "of deltalake"
    assert not (log / "._last_checkpoint.crc").exists()


# Altered tables


def test_column_mapping_added_during_a_batch_is_followed_and_a_renamed_column_fails_the_batch(
    query: Query, table: Path, before_next_commit: BeforeNextCommit
) -> None:

    sink, spark = query.sink(table), query.spark

    def alter() -> None:
        mode = "'delta.columnMapping.mode' = 'name', 'delta.minReaderVersion' = '2', 'delta.minWriterVersion' = '7'"
        spark.sql(f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ({mode})")
        spark.sql(f"ALTER TABLE delta.`{table}` ADD COLUMNS (more string)")

    query.run(sink, 0, offset(0, one(0, 10)))
    before_next_commit(alter)
    query.run(sink, 1, offset(1, one(10, 20)))
    query.run(query.sink(table), 2, offset(2, one(20, 30)))
    assert content(spark, table) == records(0, 30)
    spark.sql(f"ALTER TABLE delta.`{table}` RENAME COLUMN value TO payload")
    before = len(commits(table))
    with pytest.raises(OptionError, match="lacks the columns value of the batch"):
        query.run(sink, 3, offset(3, one(30, 40)))
    assert len(commits(table)) == before and next_offsets(table) == {("orders", 0): 30}
    corrected = query.sink(table, transform=lambda df: df.withColumnRenamed("value", "payload"))
    query.run(corrected, 3, offset(3, one(30, 40)))
    df = spark.read.format("delta").load(str(table))
    assert df.columns[-1] == "more"
    assert sorted(tuple(r)[:4] for r in df.collect()) == records(0, 40)


def test_a_constraint_added_during_a_batch_applies_to_that_batch(
    query: Query, table: Path, before_next_commit: BeforeNextCommit
) -> None:
    """The files of the batch exist already, unchecked: they must not be committed."""
    sink, spark = query.sink(table), query.spark
    query.run(sink, 0, offset(0, one(0, 10)))
    before_next_commit(lambda: spark.sql(f"ALTER TABLE delta.`{table}` ADD CONSTRAINT few CHECK (offset < 15)"))
    with pytest.raises(Exception, match="DELTA_VIOLATE_CONSTRAINT_WITH_VALUES"):
        query.run(sink, 1, offset(1, one(10, 20)))
    assert rows(table) == records(0, 10)
    assert next_offsets(table) == {("orders", 0): 10}
