"""DeltaSink, on a real Spark with Delta. What a table holds is read back from its log files and by a plain read."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark import cloudpickle
from pyspark.sql import functions as F
from sink_source import SCHEMA, offset
from sink_words import (
    QUERY_S,
    Query,
    actions,
    commits,
    next_offsets,
    notes,
    one,
    parquet_files,
    records,
    rows,
    run,
    stream,
)

from spark_group_source.delta import deltalog, names, races
from spark_group_source.delta.checkpoint import ONLY_RUN, planned, read_planned
from spark_group_source.delta.kept import read_ledger, set_ledger
from spark_group_source.delta.ledger import Ledger
from spark_group_source.delta.sink import DeltaSink, Tier
from spark_group_source.errors import CheckpointMismatch, LedgerConflict, OptionError
from spark_group_source.group.offsets import StreamOffset
from spark_group_source.host import runs
from spark_group_source.model import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

BOTH = pytest.mark.parametrize("tier", ["transaction", "writer-options"])
"""What holds whichever way a commit takes."""

CHILD_S = 180
"""Bound of a driver of its own, from its start until it is killed: 15 s, and much more on a busy machine."""


# One commit


def test_one_commit_holds_the_rows_the_batch_number_the_ledger_and_the_offsets(query: Query, new_table: Path) -> None:
    batch = offset(0, {("orders", 0): (0, 5), ("orders", 1): (7, 7)})
    query.run(query.sink(new_table), 0, batch)
    commit = commits(new_table)[-1]
    assert {kind for action in commit for kind in action} == {"commitInfo", "add", "txn", "domainMetadata"}
    txns = {txn["appId"]: txn for txn in actions(commit, "txn")}
    assert {name: txn["version"] for name, txn in txns.items()} == {query.id: 0, "spark-group-source.etl": 1}
    assert all(txn["lastUpdated"] > 0 for txn in txns.values())
    (domain,) = actions(commit, "domainMetadata")
    assert domain["domain"] == "spark-group-source.etl"
    ledger = {
        "number": 1,
        "queries": {query.id: 0},
        "seq": 0,
        "stream": "s1",
        "topics": {"orders": {"id": "id-1", "offsets": {"0": 5, "1": 7}}},
        "v": 1,
    }
    assert json.loads(domain["configuration"]) == ledger
    note = json.loads(actions(commit, "commitInfo")[0]["userMetadata"])
    assert note == [json.loads(batch.to_json()), {"group": "etl", "ledger": ledger, "v": 1}]
    assert rows(new_table) == records(0, 5)


@BOTH
def test_each_batch_is_one_commit_and_the_ledger_goes_on(query: Query, table: Path) -> None:
    sink = query.sink(table)
    for n in range(3):
        query.run(sink, n, offset(n, one(n * 5, n * 5 + 5)))
    assert len(commits(table)) == 1 + 3, "the table's creation and three batches"
    assert next_offsets(table) == {("orders", 0): 15}
    assert rows(table) == records(0, 15)


def test_several_groups_in_one_query_have_a_ledger_each(query: Query, table: Path) -> None:
    a, b = offset(0, one(0, 5), group="a"), offset(0, one(3, 4, topic="other"), group="b", stream="s2")
    query.run(query.sink(table), 0, a, b)
    assert next_offsets(table, "a") == {("orders", 0): 5}
    assert next_offsets(table, "b") == {("other", 0): 4}
    note = json.loads(actions(commits(table)[-1], "commitInfo")[0]["userMetadata"])
    assert note[:2] == [json.loads(a.to_json()), json.loads(b.to_json())]
    assert [doc["group"] for doc in note[2:]] == ["a", "b"]


@BOTH
def test_two_sources_of_one_group_share_its_ledger(query: Query, table: Path) -> None:
    lines = offset(0, one(0, 5)), offset(0, one(7, 9, partition=1), stream="s2")
    query.run(query.sink(table), 0, *lines)
    assert next_offsets(table) == {("orders", 0): 5, ("orders", 1): 9}


# Replay and zombies


@BOTH
def test_a_replayed_batch_is_skipped(query: Query, table: Path) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 5)))
    query.run(query.sink(table), 0, offset(0, one(0, 5)))
    assert len(commits(table)) == 2
    assert rows(table) == records(0, 5)


@BOTH
def test_B51_a_zombie_that_comes_back_late_writes_nothing_and_moves_nothing_back(query: Query, table: Path) -> None:
    zombie, sink = query.sink(table), query.sink(table)
    for n in range(3):
        query.run(sink, n, offset(n, one(n * 5, n * 5 + 5)))
    query.run(zombie, 1, offset(1, one(5, 10)))
    assert len(commits(table)) == 4
    assert next_offsets(table) == {("orders", 0): 15}


@BOTH
def test_B46_another_batch_under_a_recorded_number_is_refused(query: Query, table: Path) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 5)))
    with pytest.raises(LedgerConflict, match=r"does not cover orders-0\[5,9\)"):
        query.run(query.sink(table), 0, offset(0, one(0, 9)))
    assert rows(table) == records(0, 5)


def test_a_replay_after_the_ledger_was_set_back_by_hand_is_skipped(query: Query, table: Path) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 5)))
    set_ledger(query.spark, str(table), "etl", {TopicPartition("orders", 0): 2}, reason="replay")
    query.run(query.sink(table), 0, offset(0, one(0, 5)))
    assert rows(table) == records(0, 5)
    query.run(query.sink(table), 1, offset(1, one(2, 4), followed=[("orders", 0)]))
    assert Counter(rows(table)) == Counter(records(0, 5) + records(2, 4)), "what the operator asked for"


# Against the ledger


@BOTH
def test_B53_two_queries_of_one_group_write_every_record_once(
    new_query: Callable[[str], Query], table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = new_query("a"), new_query("b")
    a.run(a.sink(table), 0, offset(0, one(0, 10)))
    b.run(b.sink(table), 0, offset(0, {("orders", 0): (5, 15), ("orders", 1): (0, 3)}, stream="s2"))
    a.run(a.sink(table), 1, offset(1, one(10, 20)))
    assert rows(table) == sorted(records(0, 20) + records(0, 3, partition=1))
    assert next_offsets(table) == {("orders", 0): 20, ("orders", 1): 3}
    assert "5 offsets are in the table already" in caplog.text


@BOTH
def test_a_batch_that_the_table_has_already_adds_no_rows_and_is_recorded(
    new_query: Callable[[str], Query], table: Path
) -> None:
    a, b = new_query("a"), new_query("b")
    a.run(a.sink(table), 0, offset(0, one(0, 10)))
    b.run(b.sink(table), 0, offset(0, one(2, 8), stream="s2"))
    commit = commits(table)[-1]
    assert actions(commit, "add") == []
    assert notes(commit)[0]["ledger"]["queries"] == {a.id: 0, b.id: 0}
    assert next_offsets(table) == {("orders", 0): 10}


def test_rows_are_left_out_before_the_transform(new_query: Callable[[str], Query], new_table: Path) -> None:
    a, b = new_query("a"), new_query("b")
    a.run(a.sink(new_table, transform=lambda df: df.select("value")), 0, offset(0, one(0, 10)))
    b.run(b.sink(new_table, transform=lambda df: df.select("value")), 0, offset(0, one(5, 15), stream="s2"))
    assert rows(new_table) == sorted((r[3],) for r in records(0, 15))


def test_rows_without_the_kafka_columns_cannot_be_left_out_and_are_refused(
    new_query: Callable[[str], Query], new_table: Path
) -> None:
    a, b = new_query("a"), new_query("b")
    a.run(a.sink(new_table, transform=lambda df: df.select("value")), 0, offset(0, one(0, 10)))
    b.plan(0, offset(0, one(5, 15), stream="s2"))
    for wrong in (("value",), ("topic", "partition", "cast(offset as string) offset", "value")):
        with pytest.raises(LedgerConflict, match="transform="):
            b.sink(new_table)(b.rows(offset(0, one(5, 15))).selectExpr(*wrong), 0)
    assert len(commits(new_table)) == 2


def test_a_batch_without_the_kafka_columns_is_written_where_nothing_has_to_be_left_out(
    query: Query, new_table: Path
) -> None:
    batch = offset(0, one(0, 3))
    query.plan(0, batch)
    query.sink(new_table)(query.rows(batch).select("value"), 0)
    assert [r[0] for r in rows(new_table)] == [r[3] for r in records(0, 3)]


@BOTH
def test_rows_of_other_sources_are_never_left_out(new_query: Callable[[str], Query], table: Path) -> None:
    a, b = new_query("a"), new_query("b")
    a.run(a.sink(table), 0, offset(0, one(0, 10)))
    batch = offset(0, one(5, 15), stream="s2")
    b.plan(0, batch, "42")
    foreign: list[Any] = [(None, None, None, "x"), (None, 0, 7, "y"), ("orders", 9, 7, "z"), ("orders", 0, None, "w")]
    b.sink(table)(b.rows(batch).union(b.spark.createDataFrame(foreign, SCHEMA)), 0)
    assert sorted(r[3] for r in rows(table)) == sorted([r[3] for r in records(0, 15)] + ["w", "x", "y", "z"])


def test_rows_that_two_sources_may_have_read_cannot_be_told_apart(
    new_query: Callable[[str], Query], table: Path
) -> None:
    a, b = new_query("a"), new_query("b")
    a.run(a.sink(table), 0, offset(0, one(0, 10)))
    with pytest.raises(LedgerConflict, match="cannot be told apart"):
        b.run(b.sink(table), 0, offset(0, one(5, 15), stream="s2"), offset(0, one(0, 6), group="other", stream="s3"))
    assert len(commits(table)) == 2


@BOTH
@pytest.mark.parametrize("end", [3, 30])
def test_a_rewind_by_someone_else_is_refused_and_the_table_stays(query: Query, table: Path, end: int) -> None:
    sink = query.sink(table)
    query.run(sink, 0, offset(0, one(0, 10)))
    with pytest.raises(LedgerConflict, match=r"orders-0: Kafka says 3, the table holds up to 10.*--to-ledger"):
        query.run(sink, 1, offset(1, one(3, end), followed=[("orders", 0)]))
    assert len(commits(table)) == 2
    assert rows(table) == records(0, 10)


@BOTH
def test_after_the_ledger_was_reset_a_rewind_is_written_again(query: Query, table: Path) -> None:
    sink = query.sink(table)
    query.run(sink, 0, offset(0, one(0, 10)))
    set_ledger(query.spark, str(table), "etl", {TopicPartition("orders", 0): 3}, reason="on purpose")
    query.run(sink, 1, offset(1, one(3, 5), followed=[("orders", 0)]))
    assert Counter(rows(table)) == Counter(records(0, 10) + records(3, 5))
    assert next_offsets(table) == {("orders", 0): 5}


def test_what_another_member_had_in_between_is_no_error(query: Query, table: Path) -> None:
    sink = query.sink(table)
    query.run(sink, 0, offset(0, one(0, 10)))
    query.run(sink, 1, offset(1, one(50, 60), followed=[("orders", 0)]))
    assert next_offsets(table) == {("orders", 0): 60}


@BOTH
def test_a_topic_that_was_created_anew_is_written_from_its_start(
    query: Query, table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = query.sink(table)
    query.run(sink, 0, offset(0, one(0, 10)))
    query.run(sink, 1, offset(1, one(0, 4), topic_id="id-2"))
    assert Counter(rows(table)) == Counter(records(0, 10) + records(0, 4))
    assert next_offsets(table) == {("orders", 0): 4}
    assert "deleted and created again" in caplog.text


def test_a_damaged_ledger_stops_the_query(query: Query, table: Path) -> None:
    sink = query.sink(table)
    query.run(sink, 0, offset(0, one(0, 10)))
    txn = deltalog.Table(query.spark, str(table)).begin()
    txn.commit_domains({"spark-group-source.etl": '{"v":1,"topics":'}, numbers={}, user_metadata="")
    with pytest.raises(LedgerConflict, match="damaged"):
        query.run(sink, 1, offset(1, one(10, 20)))


# After a reset


def no_rows(df: "DataFrame") -> "DataFrame":
    raise AssertionError("the rows of a void batch are read")


@BOTH
def test_a_batch_of_before_a_reset_writes_nothing_and_counts_as_done(
    query: Query, table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint stays the same: its pending batch is void, and the next one goes on where the reset says."""
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    set_ledger(query.spark, str(table), "etl", {TopicPartition("orders", 0): 3}, reason="reset", epoch=1)
    for _ in range(2):
        query.run(query.sink(table, transform=no_rows), 1, offset(1, one(10, 20)))
    commit = commits(table)[-1]
    assert {kind for action in commit for kind in action} - {"domainMetadata"} == {"commitInfo", "txn"}
    assert len(commits(table)) == 4, "the replay is recognised"
    assert notes(commit)[0]["ledger"]["queries"] == {query.id: 1}
    assert next_offsets(table) == {("orders", 0): 3}
    assert "batch 1, group etl" in caplog.text and "planned before reset 1 of the group" in caplog.text
    query.run(query.sink(table), 2, offset(2, one(3, 12), followed=[("orders", 0)], epoch=1))
    assert Counter(rows(table)) == Counter(records(0, 10) + records(3, 12))
    assert next_offsets(table) == {("orders", 0): 12}


def test_a_refused_batch_is_void_after_the_reset_that_the_refusal_names(query: Query, table: Path) -> None:
    sink, refused = query.sink(table), offset(1, one(3, 7), followed=[("orders", 0)])
    query.run(sink, 0, offset(0, one(0, 10)))
    with pytest.raises(LedgerConflict, match="with the same checkpoint"):
        query.run(sink, 1, refused)
    set_ledger(query.spark, str(table), "etl", {TopicPartition("orders", 0): 10}, reason="--to-ledger", epoch=1)
    query.run(query.sink(table), 1, refused)
    query.run(query.sink(table), 2, offset(2, one(10, 12), followed=[("orders", 0)], epoch=1))
    assert rows(table) == records(0, 12)


def test_another_batch_under_a_recorded_number_is_void_after_a_reset_too(query: Query, table: Path) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 5)))
    with pytest.raises(LedgerConflict, match="does not cover"):
        query.run(query.sink(table), 0, offset(0, one(0, 9)))
    set_ledger(query.spark, str(table), "etl", {}, reason="--to-ledger", epoch=1)
    query.run(query.sink(table), 0, offset(0, one(0, 9)))
    query.run(query.sink(table), 1, offset(1, one(5, 9), epoch=1))
    assert rows(table) == records(0, 9)


def test_rows_of_other_sources_are_written_when_one_is_void(query: Query, table: Path) -> None:
    sink = query.sink(table)
    query.run(sink, 0, offset(0, one(0, 5)), offset(0, one(0, 2, topic="other"), group="b", stream="s2"))
    set_ledger(query.spark, str(table), "etl", {}, reason="r", epoch=1)
    query.run(sink, 1, offset(1, one(5, 9)), offset(1, one(2, 4, topic="other"), group="b", stream="s2"))
    assert rows(table) == sorted(records(0, 5) + records(0, 4, topic="other"))
    assert (next_offsets(table), next_offsets(table, "b")) == ({("orders", 0): 5}, {("other", 0): 4})


def test_a_stream_that_does_not_hear_of_a_reset_is_stopped_at_its_second_batch(query: Query, table: Path) -> None:
    sink = query.sink(table)
    query.run(sink, 0, offset(0, one(0, 5)))
    set_ledger(query.spark, str(table), "etl", {}, reason="r", epoch=1)
    query.run(sink, 1, offset(1, one(5, 9)))
    with pytest.raises(LedgerConflict, match="does not know of reset 1 of the group"):
        query.run(sink, 2, offset(2, one(9, 12)))
    set_ledger(query.spark, str(table), "etl", {}, reason="--to-ledger", epoch=2)
    query.run(sink, 2, offset(2, one(9, 12)))
    query.run(sink, 3, offset(3, one(5, 14), followed=[("orders", 0)], epoch=2))
    assert rows(table) == records(0, 14)


def test_a_reset_between_the_decision_and_the_commit_makes_the_batch_void(
    query: Query, table: Path, intruder: Callable[[Callable[[], object]], None]
) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 5)))
    intruder(lambda: set_ledger(query.spark, str(table), "etl", {}, reason="r", epoch=1))
    query.run(query.sink(table), 1, offset(1, one(5, 9)))
    assert rows(table) == records(0, 5)
    assert next_offsets(table) == {("orders", 0): 5}


@BOTH
def test_the_sink_says_which_batch_it_has_and_never_one_that_it_left_out(
    query: Query, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "directory", lambda: tmp_path / "runs")
    (tmp_path / "runs").mkdir(mode=0o700)
    sink = query.sink(table)
    query.run(sink, 0, offset(0, one(0, 5)), offset(4, one(0, 2, topic="other"), stream="s2"))
    assert (runs.durable_seq("s1"), runs.durable_seq("s2")) == (0, 4)
    query.run(sink, 1, offset(1, one(5, 6)))
    query.run(sink, 0, offset(0, one(0, 5)), offset(4, one(0, 2, topic="other"), stream="s2"))
    assert runs.durable_seq("s1") == 0, "a replay: that batch is there already"
    with pytest.raises(LedgerConflict):
        query.run(sink, 2, offset(2, one(3, 9), followed=[("orders", 0)]))
    set_ledger(query.spark, str(table), "etl", {}, reason="r", epoch=1)
    query.run(sink, 2, offset(2, one(3, 9), followed=[("orders", 0)]))
    query.run(sink, 2, offset(2, one(3, 9), followed=[("orders", 0)]))
    assert runs.durable_seq("s1") == 0


# Idle


@BOTH
def test_a_batch_without_rows_that_moves_nothing_is_not_committed(query: Query, table: Path) -> None:
    sink = query.sink(table)
    query.run(sink, 0, offset(0, one(0, 5)))
    for n in range(1, 4):
        query.run(sink, n, offset(n, one(5, 5)))
    assert len(commits(table)) == 2


@BOTH
def test_a_batch_without_rows_that_moves_a_position_is_committed_without_files(query: Query, table: Path) -> None:
    sink = query.sink(table)
    query.run(sink, 0, offset(0, one(0, 5)))
    query.run(sink, 1, offset(1, {("orders", 0): (5, 5), ("orders", 1): (9, 9)}))
    commit = commits(table)[-1]
    assert actions(commit, "add") == []
    assert next_offsets(table) == {("orders", 0): 5, ("orders", 1): 9}


def test_a_range_that_held_only_markers_moves_the_ledger(query: Query, table: Path) -> None:
    sink = query.sink(table)
    query.run(sink, 0, offset(0, one(0, 5)))
    query.plan(1, offset(1, one(5, 8)))
    sink(query.rows(), 1)
    assert next_offsets(table) == {("orders", 0): 8}


def test_a_source_without_news_does_not_stop_the_rows_of_another(
    query: Query, table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink, batch = query.sink(table), offset(0, one(0, 5))
    query.plan(0, batch, "1")
    sink(query.rows(batch), 0)
    query.plan(1, batch, "2")
    sink(query.spark.createDataFrame([("rate", 0, 7, "r")], SCHEMA), 1)
    assert rows(table) == sorted([*records(0, 5), ("rate", 0, 7, "r")])
    assert actions(commits(table)[-1], "txn")[0]["version"] == 1
    assert caplog.text == ""


# Writers at the same time


@BOTH
def test_concurrent_queries_of_one_group_create_the_table_and_write_every_record_once(
    new_query: Callable[[str], Query], new_table: Path
) -> None:
    queries = [new_query(f"q{n}") for n in range(3)]

    def work(n: int) -> None:
        sink = queries[n].sink(new_table)
        for b in range(1, 5):
            # Each has a partition of its own, and all of them write one that they share, again and again.
            spans = {("orders", n): (b, b + 1), ("shared", 0): (0, b * 2)}
            queries[n].run(sink, b, offset(b, spans, stream=f"s{n}"))

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(work, n) for n in range(3)]:
            done.result(QUERY_S)
    expected = [
        *records(1, 5),
        *records(1, 5, partition=1),
        *records(1, 5, partition=2),
        *records(0, 8, topic="shared"),
    ]
    assert rows(new_table) == sorted(expected)


@pytest.mark.parametrize("merge_schema", [False, True])
def test_a_lost_race_commits_the_files_that_are_written_already(
    new_query: Callable[[str], Query], table: Path, intruder: Callable[[Callable[[], object]], None], merge_schema: bool
) -> None:
    a, b = new_query("a"), new_query("b")
    a.run(a.sink(table), 0, offset(0, one(0, 2)))
    intruder(lambda: b.run(b.sink(table), 0, offset(0, one(0, 3, partition=1), stream="s2")))
    read = []

    def transform(df: "DataFrame") -> "DataFrame":
        read.append(1)
        return df.withColumn("more", F.lit(1)) if merge_schema else df

    a.run(a.sink(table, transform=transform, merge_schema=merge_schema), 1, offset(1, one(2, 4)))
    assert len(read) == 1, "the batch was read once"
    committed = {action["path"] for commit in commits(table) for action in actions(commit, "add")}
    assert parquet_files(table) == committed, "no file was written twice"
    found = rows(table)
    assert [r[:4] for r in found] == sorted(records(0, 4) + records(0, 3, partition=1))
    assert sum(r[4:] == (1,) for r in found) == (2 if merge_schema else 0)
    assert next_offsets(table) == {("orders", 0): 4, ("orders", 1): 3}


@BOTH
def test_a_lost_race_to_the_same_records_leaves_them_out(
    new_query: Callable[[str], Query], table: Path, intruder: Callable[[Callable[[], object]], None]
) -> None:
    a, b = new_query("a"), new_query("b")
    a.run(a.sink(table), 0, offset(0, one(0, 2)))
    intruder(lambda: b.run(b.sink(table), 0, offset(0, one(2, 5), stream="s2")))
    a.run(a.sink(table), 1, offset(1, one(2, 9)))
    assert rows(table) == records(0, 9)


@BOTH
def test_a_lost_race_against_the_same_query_ends_in_a_skip(
    query: Query, table: Path, intruder: Callable[[Callable[[], object]], None], tier: str
) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 2)))
    intruder(lambda: query.run(query.sink(table, tier=tier), 1, offset(1, one(2, 5))))
    query.run(query.sink(table), 1, offset(1, one(2, 5)))
    assert rows(table) == records(0, 5)
    assert len(commits(table)) == 3


@pytest.mark.parametrize(
    "change",
    ["ADD COLUMNS (more string)", "ADD CONSTRAINT more CHECK (offset < 1000)", "SET TBLPROPERTIES ('more' = 'b')"],
)
@BOTH
def test_a_table_that_is_altered_meanwhile_gets_the_batch_once_and_stays_altered(
    query: Query, table: Path, intruder: Callable[[Callable[[], object]], None], change: str
) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 2)))
    intruder(lambda: query.spark.sql(f"ALTER TABLE delta.`{table}` {change}"))
    query.run(query.sink(table), 1, offset(1, one(2, 5)))
    assert [r[:4] for r in rows(table)] == records(0, 5)
    assert "more" in str([m for commit in commits(table) for m in actions(commit, "metaData")][-1])


def test_a_writer_that_loses_every_race_gives_up_and_has_written_nothing(
    query: Query, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 2)))

    def lose(self: deltalog.Transaction, *args: Any, **kwargs: Any) -> int:
        raise races.CommitRace("lost")

    monkeypatch.setattr(deltalog.Transaction, "commit", lose)
    monkeypatch.setattr(races, "RACE_WAIT_MAX_S", 0.0)
    monkeypatch.setattr(races, "COMMIT_ATTEMPTS_MAX", 3)
    with pytest.raises(LedgerConflict, match="lost to concurrent writers 3 times"):
        query.run(query.sink(table), 1, offset(1, one(2, 5)))
    assert len(commits(table)) == 2


# Tables


def test_a_table_that_another_writer_is_creating_is_waited_for(query: Query, new_table: Path, created: Path) -> None:
    (new_table / "_delta_log").mkdir(parents=True)
    finish = threading.Timer(1.5, shutil.copytree, (created, new_table), {"dirs_exist_ok": True})
    finish.start()
    query.run(query.sink(new_table), 0, offset(0, one(0, 2)))
    finish.join()
    assert rows(new_table) == records(0, 2)
    assert len(commits(new_table)) == 2, "this writer did not create it"


def test_a_directory_of_something_else_is_never_made_a_table(
    query: Query, new_table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.errors import AnalysisException

    new_table.mkdir()
    (new_table / "part-0.parquet").write_bytes(b"of another job")
    monkeypatch.setattr(deltalog, "CREATE_WAIT_MAX_S", 0.0)
    with pytest.raises(AnalysisException, match="not a Delta table"):
        query.run(query.sink(new_table), 0, offset(0, one(0, 2)))
    assert [f.name for f in new_table.iterdir()] == ["part-0.parquet"]


def test_a_table_by_name_is_created_in_the_catalog(query: Query) -> None:
    spark = query.spark
    spark.sql("CREATE DATABASE IF NOT EXISTS sink_test")
    try:
        sink = query.sink("sink_test.orders", partition_by="topic")
        for n in range(2):
            query.run(sink, n, offset(n, one(n, n + 1)))
        assert spark.catalog.getTable("sink_test.orders").tableType == "MANAGED"
        assert sorted(tuple(r) for r in spark.table("sink_test.orders").collect()) == records(0, 2)
        found = read_ledger(spark, "sink_test.orders", "etl")
        assert found is not None and found.offsets == {TopicPartition("orders", 0): 2}
        spark.sql("USE sink_test")
        query.run(query.sink("orders"), 2, offset(2, one(2, 3)))
        assert spark.table("sink_test.orders").count() == 3
    finally:
        spark.sql("USE default")
        spark.sql("DROP DATABASE sink_test CASCADE")


def test_partition_columns_are_created_and_compared(query: Query, new_table: Path) -> None:
    from pyspark.errors import AnalysisException

    query.run(query.sink(new_table, partition_by=["topic", "partition"]), 0, offset(0, one(0, 5)))
    for add in actions(commits(new_table)[-1], "add"):
        assert add["partitionValues"] == {"topic": "orders", "partition": "0"}
    query.run(query.sink(new_table), 1, offset(1, one(5, 6)))
    with pytest.raises(AnalysisException, match=r"[Pp]artition columns do not match"):
        query.run(query.sink(new_table, partition_by="value"), 2, offset(2, one(6, 7)))
    assert len(commits(new_table)) == 3


def test_new_columns_are_an_error_unless_they_are_merged(query: Query, table: Path) -> None:
    from pyspark.errors import AnalysisException

    query.run(query.sink(table), 0, offset(0, one(0, 1)))
    wider: Callable[[DataFrame], DataFrame] = lambda df: df.withColumn("more", F.lit("m"))  # noqa: E731
    with pytest.raises(AnalysisException, match="schema mismatch"):
        query.run(query.sink(table, transform=wider), 1, offset(1, one(1, 2)))
    assert len(commits(table)) == 2
    assert next_offsets(table) == {("orders", 0): 1}
    query.run(query.sink(table, transform=wider, merge_schema=True), 1, offset(1, one(1, 2)))
    assert rows(table) == [(*records(0, 1)[0], None), (*records(1, 2)[0], "m")]


def test_a_wrong_type_is_delta_s_own_error_and_the_table_stays(query: Query, table: Path) -> None:
    from pyspark.errors import AnalysisException

    query.run(query.sink(table), 0, offset(0, one(0, 1)))
    wrong: Callable[[DataFrame], DataFrame] = lambda df: df.withColumn("offset", F.array(F.lit("x")))  # noqa: E731
    with pytest.raises(AnalysisException, match="Failed to merge fields"):
        query.run(query.sink(table, transform=wrong, merge_schema=True), 1, offset(1, one(1, 2)))
    assert len(commits(table)) == 2


def test_constraints_and_generated_columns_of_an_existing_table_hold(query: Query, new_table: Path) -> None:
    spark = query.spark
    spark.sql(
        f"CREATE TABLE delta.`{new_table}` (topic string, partition int, offset long, value string, "
        "tens long GENERATED ALWAYS AS (offset DIV 10), nr bigint GENERATED ALWAYS AS IDENTITY) USING delta"
    )
    spark.sql(f"ALTER TABLE delta.`{new_table}` ADD CONSTRAINT small CHECK (offset < 100)")
    sink = query.sink(new_table)
    query.run(sink, 0, offset(0, one(19, 21)))
    query.run(sink, 1, offset(1, one(21, 22)))
    found = spark.read.format("delta").load(str(new_table)).orderBy("offset").collect()
    assert [(r["offset"], r["tens"]) for r in found] == [(19, 1), (20, 2), (21, 2)]
    assert len({r["nr"] for r in found}) == 3
    before = len(commits(new_table))
    with pytest.raises(Exception, match="DELTA_VIOLATE_CONSTRAINT_WITH_VALUES"):
        query.run(sink, 2, offset(2, one(99, 101)))
    assert len(commits(new_table)) == before
    assert next_offsets(new_table) == {("orders", 0): 22}


def test_identity_values_stay_unique_after_a_lost_race(
    query: Query, new_table: Path, intruder: Callable[[Callable[[], object]], None]
) -> None:
    query.spark.sql(
        f"CREATE TABLE delta.`{new_table}` (topic string, partition int, offset long, value string, "
        "nr bigint GENERATED ALWAYS AS IDENTITY) USING delta"
    )
    sink, other = query.sink(new_table), TopicPartition("other", 0)
    query.run(sink, 0, offset(0, one(0, 2)))
    intruder(lambda: set_ledger(query.spark, str(new_table), "etl", {other: 1}, reason="a commit without rows"))
    for n in (1, 2):
        query.run(sink, n, offset(n, one(n * 2, n * 2 + 2)))
    assert len({r[4] for r in rows(new_table)}) == len(rows(new_table)) == 6


def test_an_existing_table_gets_the_feature_that_the_ledger_needs(
    query: Query, new_table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    query.spark.createDataFrame([], SCHEMA).write.format("delta").save(str(new_table))
    query.run(query.sink(new_table), 0, offset(0, one(0, 2)))
    assert "domainMetadata" in actions(commits(new_table)[1], "protocol")[0]["writerFeatures"]
    assert "domainMetadata" in caplog.text
    assert rows(new_table) == records(0, 2)


@BOTH
def test_a_table_that_is_deleted_while_the_query_runs_is_not_written_by_halves(query: Query, table: Path) -> None:
    sink = query.sink(table)
    query.run(sink, 0, offset(0, one(0, 2)))
    shutil.rmtree(table)
    with pytest.raises(LedgerConflict, match="was deleted while the query runs"):
        query.run(sink, 1, offset(1, one(2, 4)))
    query.run(query.sink(table), 1, offset(1, one(2, 4)))
    assert rows(table) == records(2, 4)


def test_a_table_that_forgets_batch_numbers_is_warned_about(
    query: Query, table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = query.sink(table)
    query.run(sink, 0, offset(0, one(0, 2)))
    query.spark.sql(f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ('{names.RETENTION}' = 'interval 1 days')")
    for n in (1, 2):
        query.run(sink, n, offset(n, one(n + 1, n + 2)))
    assert caplog.text.count(names.RETENTION) == 1
    assert rows(table) == records(0, 4)


# What the checkpoint says


def test_a_query_without_a_kafka_group_source_is_refused(query: Query, new_table: Path) -> None:
    query.plan(0, "42", '{"topic":{"0":12}}', "-")
    with pytest.raises(CheckpointMismatch, match="no offset of a kafka-group source"):
        query.sink(new_table)(query.rows(), 0)
    assert not new_table.exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"group": "etl", "seq": 0, "str', "not JSON"),
        ('{"group": "etl", "seq": 0, "stream": "s", "topics": {"a": {"ranges": {"0": [5, 1]}}}, "v": 1}', "damaged"),
        ('{"group": "etl", "v": 2}', "version 2"),
    ],
)
def test_a_damaged_offset_stops_the_batch(query: Query, new_table: Path, line: str, said: str) -> None:
    query.plan(0, line)
    with pytest.raises(CheckpointMismatch, match=said):
        query.sink(new_table)(query.rows(), 0)
    assert not new_table.exists()


def test_both_formats_of_spark_s_offset_log_are_read() -> None:
    a, b = offset(3, one(0, 5)), offset(0, one(0, 5), group="b")
    ja, jb = json.dumps(a.to_json_dict()), json.dumps(b.to_json_dict())
    for text in (f"v1\n{{}}\n{ja}\n-\n{jb}\n17", f"v2\n{{}}\n0:{ja}\n2:{jb}\nrate_1:17\n3:-"):
        found = planned("q", 3, text, None)
        assert found.offsets == (a, b)
        assert found.other_sources == 2
    with pytest.raises(CheckpointMismatch, match="format 'v3'"):
        planned("q", 3, f"v3\n{{}}\n{ja}", None)


def test_a_source_whose_offset_is_that_of_the_batch_before_has_nothing_to_record() -> None:
    ja = json.dumps(offset(3, one(0, 5)).to_json_dict())
    jb = json.dumps(StreamOffset.initial("b").to_json_dict())
    assert planned("q", 1, f"v1\n{{}}\n{ja}\n{jb}", f"v1\n{{}}\n{ja}\n-").offsets == ()


def test_a_checkpoint_of_another_query_is_named_in_the_error(query: Query, table: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="Is `checkpoint=` the checkpointLocation of this very query"):
        query.sink(table)(query.rows(), 7)
    with pytest.raises(OptionError, match="metadata"):
        DeltaSink(table, checkpoint=str(tmp_path / "nowhere"))(query.rows(), 0)
    with pytest.raises(OptionError, match="called by foreachBatch"):
        DeltaSink(table)(query.rows(), 0)


def test_a_table_in_the_folder_of_the_checkpoint_is_refused_and_nothing_is_written(query: Query) -> None:
    with pytest.raises(OptionError, match="one folder"):
        query.run(query.sink(f"file://{query.root}/"), 0, offset(0, one(0, 5)))
    assert not (query.root / "_delta_log").exists()


# The writer-options tier


def test_writer_options_put_rows_number_offsets_and_ledger_in_one_commit_without_a_feature(
    query: Query, new_table: Path
) -> None:
    sink, batch = query.sink(new_table, tier="writer-options", partition_by="partition"), offset(0, one(0, 5))
    query.run(sink, 0, batch)
    commit = commits(new_table)[-1]
    assert {kind for action in commit for kind in action} == {"commitInfo", "add", "txn"}
    (txn,) = actions(commit, "txn")
    assert (txn["appId"], txn["version"]) == ("spark-group-source.etl", 1)
    note = json.loads(actions(commit, "commitInfo")[0]["userMetadata"])
    assert note[0] == json.loads(batch.to_json())
    assert note[1]["ledger"]["topics"] == {"orders": {"id": "id-1", "offsets": {"0": 5}}}
    query.run(sink, 1, offset(1, one(5, 7)))
    assert sorted(rows(new_table)) == sorted(records(0, 7))
    (protocol,) = (action for commit in commits(new_table) for action in actions(commit, "protocol"))
    assert "domainMetadata" not in protocol.get("writerFeatures", [])


def test_writer_options_skip_a_replay_also_when_others_committed_since(query: Query, table: Path) -> None:
    query.run(query.sink(table, tier="writer-options"), 0, offset(0, one(0, 5)))
    for _ in range(3):
        query.spark.createDataFrame(records(0, 1, topic="x"), SCHEMA).write.format("delta").mode("append").save(
            str(table)
        )
    query.run(query.sink(table, tier="writer-options"), 0, offset(0, one(0, 5)))
    assert sum(r[0] == "orders" for r in rows(table)) == 5


def test_writer_options_write_the_sources_of_one_group(query: Query, table: Path) -> None:
    a, b = offset(0, one(0, 5), group="a"), offset(0, one(3, 4, topic="other"), group="b", stream="s2")
    with pytest.raises(OptionError, match=r"of the groups a, b.*Give each group a query of its own"):
        query.run(query.sink(table, tier="writer-options"), 0, a, b)
    assert rows(table) == []


def test_writer_options_refuse_a_table_that_forgets_batch_numbers(query: Query, new_table: Path) -> None:
    query.spark.sql(
        f"CREATE TABLE delta.`{new_table}` ({SCHEMA}) USING delta "
        f"TBLPROPERTIES ('{names.RETENTION}' = 'interval 1 days')"
    )
    with pytest.raises(OptionError, match="UNSET TBLPROPERTIES"):
        query.run(query.sink(new_table, tier="writer-options"), 0, offset(0, one(0, 5)))


def test_writer_options_write_a_table_by_name(query: Query) -> None:
    try:
        for n in range(2):
            query.run(query.sink("by_options", tier="writer-options"), n, offset(n, one(n, n + 1)))
            query.run(query.sink("by_options", tier="writer-options"), n, offset(n, one(n, n + 1)))
        assert sorted(tuple(r) for r in query.spark.table("by_options").collect()) == records(0, 2)
    finally:
        query.spark.sql("DROP TABLE IF EXISTS by_options")


def test_auto_falls_back_to_writer_options_and_says_so_once(
    query: Query, new_table: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(deltalog, "available", lambda spark: False)
    sink = query.sink(new_table)
    for n in range(2):
        query.run(sink, n, offset(n, one(n, n + 1)))
    assert rows(new_table) == records(0, 2)
    assert next_offsets(new_table) == {("orders", 0): 2}
    assert caplog.text.count("writer options") == 1
    with pytest.raises(OptionError, match="tier='transaction' needs"):
        query.run(query.sink(new_table, tier="transaction"), 2, offset(2, one(2, 3)))


def test_either_tier_takes_over_where_the_other_one_stopped(query: Query, table: Path) -> None:
    for n in range(4):
        mine, other = ("transaction", "writer-options")[:: 1 if n % 2 else -1]
        query.run(query.sink(table, tier=mine), n, offset(n, one(n * 2, n * 2 + 2)))
        query.run(query.sink(table, tier=other), n, offset(n, one(n * 2, n * 2 + 2)))
    assert rows(table) == records(0, 8)
    assert next_offsets(table) == {("orders", 0): 8}
    with pytest.raises(LedgerConflict, match="was moved back by someone else"):
        query.run(query.sink(table, tier="transaction"), 4, offset(4, one(5, 9), followed=[("orders", 0)]))


@pytest.mark.parametrize("mine", ["transaction", "writer-options"])
def test_of_two_tiers_that_race_one_is_judged_anew(
    query: Query,
    new_query: Callable[[str], Query],
    table: Path,
    intruder: Callable[[Callable[[], object]], None],
    mine: Tier,
) -> None:
    theirs: Tier = "writer-options" if mine == "transaction" else "transaction"
    other = new_query("other")
    intruder(lambda: other.run(other.sink(table, tier=theirs), 0, offset(0, one(0, 5), stream="s2")))
    query.run(query.sink(table, tier=mine), 0, offset(0, one(0, 9)))
    assert rows(table) == records(0, 9)
    assert next_offsets(table) == {("orders", 0): 9}


def test_the_checkpoint_is_readable_without_java(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    query.plan(0, offset(0, one(0, 5)))
    direct = read_planned(query.spark, 0, str(query.root))
    monkeypatch.setattr("spark_group_source.delta.checkpoint._is_classic", lambda spark: False)
    assert read_planned(query.spark, 0, str(query.root)) == replace(direct, run_id=ONLY_RUN), "a worker has one run"
    with pytest.raises(OptionError, match="which Spark writes before it runs batch 1"):
        read_planned(query.spark, 1, str(query.root))
    with pytest.raises(OptionError, match="on Spark Connect pass it the query's checkpointLocation"):
        read_planned(query.spark, 0, None)


# The object itself


def test_a_sink_travels_by_pickle(query: Query, table: Path) -> None:
    sink = query.sink(table, transform=lambda df: df.select("value"), partition_by=["value"], merge_schema=True)
    copy = pickle.loads(cloudpickle.dumps(sink))
    assert {k: v for k, v in vars(copy).items() if k != "transform"} == {
        k: v for k, v in vars(sink).items() if k != "transform"
    }


@pytest.mark.parametrize("arguments", [{"tier": "best"}, {"table": ""}])
def test_arguments_that_cannot_work_are_refused_at_once(arguments: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        DeltaSink(**{"table": "t", **arguments})


def test_a_path_and_a_name_are_told_apart(tmp_path: Path) -> None:
    assert DeltaSink(tmp_path).table == str(tmp_path)
    assert DeltaSink("delta.`/lake/orders`").table == "/lake/orders"
    assert DeltaSink(Path("orders")).table == "./orders"
    assert [names.is_path(t) for t in ("/lake/o", "s3a://b/o", "./o", "o", "db.o")] == [True] * 3 + [False] * 2


def test_a_relative_path_is_completed_because_sql_takes_absolute_ones_only(spark: "SparkSession") -> None:
    whole = names.qualified(spark, "lake/orders")
    assert whole.startswith("file:/") and whole.endswith("/lake/orders")
    for table in ("/lake/orders", "s3a://bucket/orders", "file:/lake/orders", "db.orders", whole):
        assert names.qualified(spark, table) == table


# Real streaming queries


def test_a_query_reads_each_batch_once_and_writes_it(scripted: "SparkSession", tmp_path: Path, new_table: Path) -> None:
    script = [offset(n, {("orders", 0): (n * 10, n * 10 + 10), ("orders", 1): (n, n)}) for n in range(3)]
    read = run(stream(scripted, tmp_path, script), DeltaSink(new_table), tmp_path / "c")
    assert [n for n in read if n] == [10, 10, 10]
    assert rows(new_table) == records(0, 30)
    assert next_offsets(new_table) == {("orders", 0): 30, ("orders", 1): 2}


def test_B45_replay_after_missing_commit_file_is_skipped(scripted: "SparkSession", tmp_path: Path, table: Path) -> None:
    df, checkpoint = stream(scripted, tmp_path, [offset(n, one(n * 10, n * 10 + 10)) for n in range(3)]), tmp_path / "c"
    run(df, DeltaSink(table), checkpoint)
    for file in ("2", ".2.crc"):
        (checkpoint / "commits" / file).unlink()
    run(df, DeltaSink(table), checkpoint)
    assert (checkpoint / "commits" / "2").exists(), "the batch ran again"
    assert len(commits(table)) == 4
    assert rows(table) == records(0, 30)


def test_B44_a_batch_that_failed_before_the_commit_comes_again_with_the_same_rows(
    scripted: "SparkSession", tmp_path: Path, table: Path
) -> None:
    df, fail = stream(scripted, tmp_path, [offset(n, one(n * 10, n * 10 + 10)) for n in range(3)]), [True]

    def transform(batch: "DataFrame") -> "DataFrame":
        if fail and len(commits(table)) == 2:
            fail.pop()
            raise RuntimeError("scripted failure")
        return batch

    with pytest.raises(Exception, match="scripted failure"):
        run(df, DeltaSink(table, transform=transform), tmp_path / "c")
    run(df, DeltaSink(table, transform=transform), tmp_path / "c")
    assert rows(table) == records(0, 30)
    assert len(commits(table)) == 4


def test_B54_after_a_deleted_checkpoint_the_table_goes_on_where_it_stands(
    scripted: "SparkSession", tmp_path: Path, table: Path
) -> None:
    run(stream(scripted, tmp_path, [offset(0, one(0, 10)), offset(1, one(10, 25))]), DeltaSink(table), tmp_path / "c1")
    # Kafka's committed offset was behind: it is where the lost checkpoint's first batch ended.
    again = [offset(0, one(10, 20), stream="s2"), offset(1, one(20, 40), stream="s2")]
    run(stream(scripted, tmp_path, again, "again"), DeltaSink(table), tmp_path / "c2")
    assert rows(table) == records(0, 40)
    assert next_offsets(table) == {("orders", 0): 40}


@pytest.mark.parametrize("log_format", ["1", "2"])
def test_one_stream_used_twice_is_recorded_once(
    scripted: "SparkSession", tmp_path: Path, table: Path, log_format: str
) -> None:
    key = "spark.sql.streaming.offsetLog.formatVersion"
    scripted.conf.set(key, log_format)
    try:
        df = stream(scripted, tmp_path, [offset(n, one(n * 2, n * 2 + 2)) for n in range(2)])
        run(df.union(df), DeltaSink(table), tmp_path / "c")
    finally:
        scripted.conf.unset(key)
    assert (tmp_path / "c" / "offsets" / "0").read_text().startswith(f"v{log_format}\n")
    assert Counter(rows(table)) == Counter(records(0, 4) * 2)
    assert next_offsets(table) == {("orders", 0): 4}


CHILD = """
import sys, threading
sys.path[:0] = [{tests!r}, {root!r}]
from pyspark import cloudpickle
from pyspark.sql import SparkSession
import sink_source
from spark_group_source.delta import deltalog
from spark_group_source.local.conf import local_spark_settings
from spark_group_source.delta.sink import DeltaSink, Tier

table, script, checkpoint, scratch = sys.argv[1:]
real = deltalog.Transaction.commit

def commit(self, *args, **kwargs):
    if kwargs["batch_id"] == 1:
        print("FILES WRITTEN", flush=True)
        threading.Event().wait()
    return real(self, *args, **kwargs)

deltalog.Transaction.commit = commit
builder = SparkSession.builder.master("local[2]")
for key, value in local_spark_settings(scratch).items():
    builder = builder.config(key, value)
spark = builder.getOrCreate()
cloudpickle.register_pickle_by_value(sink_source)
spark.dataSource.register(sink_source.ScriptSource)
df = spark.readStream.format("scripted-group").option("script", script).load()
df.writeStream.foreachBatch(DeltaSink(table)).option("checkpointLocation", checkpoint).trigger(
    availableNow=True).start().awaitTermination()
"""


@pytest.mark.crash
@pytest.mark.slow
def test_a_driver_killed_between_writing_and_committing_loses_and_doubles_nothing(
    scripted: "SparkSession", tmp_path: Path, table: Path
) -> None:
    here = Path(__file__).resolve().parent.parent
    df = stream(scripted, tmp_path, [offset(n, one(n * 10, n * 10 + 10)) for n in range(3)])
    checkpoint, scratch = tmp_path / "c", tmp_path / "scratch"
    scratch.mkdir()
    code = CHILD.format(tests=str(here), root=str(here.parent))
    argv = [sys.executable, "-c", code, str(table), str(tmp_path / "script.json"), str(checkpoint), str(scratch)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True) as child:
        watchdog = threading.Timer(CHILD_S, os.killpg, (child.pid, signal.SIGKILL))
        watchdog.start()
        try:
            assert child.stdout is not None
            assert any(line.strip() == "FILES WRITTEN" for line in child.stdout), "the child never came to the point"
        finally:
            watchdog.cancel()
            os.killpg(child.pid, signal.SIGKILL)
    # It stopped half way: the batch is planned and its files are there, but nobody can see them.
    assert (checkpoint / "offsets" / "1").exists()
    assert not (checkpoint / "commits" / "1").exists()
    assert rows(table) == records(0, 10)
    assert scripted.read.format("delta").load(str(table)).count() == 10
    committed = {action["path"] for commit in commits(table) for action in actions(commit, "add")}
    assert parquet_files(table) > committed
    run(df, DeltaSink(table), checkpoint)
    assert rows(table) == records(0, 30)
    assert next_offsets(table) == {("orders", 0): 30}
    numbers = [actions(commit, "txn")[0]["version"] for commit in commits(table)[1:]]
    assert numbers == [0, 1, 2]


def test_the_ledger_s_text_in_the_table_is_what_the_reader_gives(query: Query, table: Path) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 5)))
    text = actions(commits(table)[-1], "domainMetadata")[0]["configuration"]
    assert read_ledger(query.spark, str(table), "etl") == Ledger.from_json("etl", text, table_version=1)
