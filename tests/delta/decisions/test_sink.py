"""DeltaSink without a JVM, on real tables of ``deltalake``. The content of a table is read from its log files.
Deliberately absent: Spark and Delta (``test_contract.py``)."""

import importlib.machinery
import json
import pickle
import re
import sys
from collections import Counter
from pathlib import Path
from shutil import rmtree
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Field, Schema, write_deltalake
from deltalake.exceptions import DeltaError
from kit.frames import DeltaSession, Frame, Session
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem
from pyspark import cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql.types import StructType
from sink_helpers import (
    BeforeNextCommit,
    NewQuery,
    Query,
    actions,
    commits,
    next_offsets,
    notes,
    one,
    parquet_files,
    records,
    rewrite,
    rows,
)
from sink_source import SCHEMA, offset

from spark_group_source.delta import Writer, session_setting, table_names, table_writer, write_guard
from spark_group_source.delta import sink as sink_module
from spark_group_source.delta.checkpoint import parse_planned
from spark_group_source.delta.durable_batches import is_called_by_spark
from spark_group_source.delta.ledger_store import set_ledger
from spark_group_source.delta.native_writer import (
    FOLDER,
    NativeWriter,
    add_actions,
    new_columns,
    reason_not_native,
)
from spark_group_source.delta.sink import DeltaSink
from spark_group_source.delta.table_history import CommitRace, LogFiles, OpenedLogs
from spark_group_source.delta.table_writer import OptionsWriter, TableWriter
from spark_group_source.errors import CheckpointMismatch, LedgerConflict, OptionError
from spark_group_source.host import run_files
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.offsets import BatchKey, StreamOffset
from spark_group_source.reader.records import HEADERS_TYPE

LONG = '"type":"long","nullable":true,"metadata":{}'
EMPTY = f'{{"type":"struct","fields":[{{"name":"n",{LONG}}},{{"name":"metadata",{LONG}}}]}}'


def no_rows(df: Any) -> Any:
    raise AssertionError("the rows are not read")


@pytest.mark.parametrize(
    ("module", "run_as", "by_spark"),
    [
        ("pyspark.sql.utils", "", True),
        ("__main__", "pyspark.sql.connect.streaming.worker.foreach_batch_worker", True),  # python -m
        ("__main__", "", False),  # a script, in any folder
        ("jobs.pyspark", "jobs.pyspark", False),
    ],
)
def test_only_a_sink_that_spark_itself_calls_has_the_whole_batch_when_it_returns(
    module: str, run_as: str, by_spark: bool
) -> None:
    spec = importlib.machinery.ModuleSpec(run_as, None) if run_as else None
    found: dict[str, Any] = {"sys": sys, "__name__": module, "__spec__": spec}
    exec(compile("frame = sys._getframe()", "/home/me/pyspark/job.py", "exec"), found)
    assert is_called_by_spark(found["frame"]) == by_spark


# One commit


def test_one_commit_holds_the_rows_the_batch_number_and_the_ledger(
    query: Query, new_table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_writer, "now_ms", lambda: 1000)
    batch = offset(0, {("orders", 0): (0, 5), ("orders", 1): (7, 7)})
    query.run(query.sink(new_table), 0, batch)
    commit = commits(new_table)[-1]
    assert {kind for action in commit for kind in action} == {"commitInfo", "add", "txn"}
    (txn,) = actions(commit, "txn")
    assert (txn["appId"], txn["version"]) == ("spark-group-source.etl", 1)
    ledger = {
        "former": {},
        "new": {"orders": "0,5,0"},
        "number": 1,
        "reset": 0,
        "streams": {"s1": list(BatchKey.of(batch))},
        "topics": {"orders": {"id": "id-1", "offsets": "0,5,7"}},
        "v": 1,
        "void": [],
        "written": 1000,
    }
    note = json.loads(actions(commit, "commitInfo")[0]["userMetadata"])
    assert note == [{"group": "etl", "ledger": ledger, "read": 0, "v": 1}]
    assert rows(new_table) == records(0, 5)


def test_several_groups_in_one_query_have_a_ledger_each(query: Query, table: Path) -> None:
    a, b = offset(0, one(0, 5), group="a"), offset(0, one(3, 4, topic="other"), group="b", stream="s2")
    query.run(query.sink(table), 0, a, b)
    assert next_offsets(table, "a") == {("orders", 0): 5}
    assert next_offsets(table, "b") == {("other", 0): 4}
    note = json.loads(actions(commits(table)[-1], "commitInfo")[0]["userMetadata"])
    assert [doc["group"] for doc in note] == ["a", "b"]


def test_two_sources_of_one_group_share_its_ledger(query: Query, table: Path) -> None:
    lines = offset(0, one(0, 5)), offset(0, one(7, 9, partition=1), stream="s2")
    query.run(query.sink(table), 0, *lines)
    assert next_offsets(table) == {("orders", 0): 5, ("orders", 1): 9}


# Replays and fenced drivers


def test_a_fenced_driver_that_writes_late_changes_neither_rows_nor_ledger(query: Query, table: Path) -> None:
    fenced, sink = query.sink(table), query.sink(table)
    for n in range(3):
        query.run(sink, n, offset(n, one(n * 5, n * 5 + 5)))
    query.run(fenced, 1, offset(1, one(5, 10)))
    assert len(commits(table)) == 4
    assert next_offsets(table) == {("orders", 0): 15}


# Against the ledger


def test_two_queries_of_one_group_write_every_record_once(
    new_query: NewQuery, table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = new_query("a"), new_query("b")
    a.run(a.sink(table), 0, offset(0, one(0, 10)))
    b.run(b.sink(table), 0, offset(0, {("orders", 0): (5, 15), ("orders", 1): (0, 3)}, stream="s2"))
    a.run(a.sink(table), 1, offset(1, one(10, 20)))
    assert rows(table) == sorted(records(0, 20) + records(0, 3, partition=1))
    assert next_offsets(table) == {("orders", 0): 20, ("orders", 1): 3}
    assert "5 offsets are already in the table and are left out: orders-0[10,15); if the group" in caplog.text
    command = f"""--to-offsets '{{"orders": {{"0": 10}}}}' --table {table} --execute` ("""
    assert command in caplog.text


def test_a_batch_whose_records_are_in_the_table_adds_no_rows_and_is_recorded(new_query: NewQuery, table: Path) -> None:
    a, b = new_query("a"), new_query("b")
    a.run(a.sink(table), 0, offset(0, one(0, 10)))
    b.run(b.sink(table), 0, offset(0, one(2, 8), stream="s2"))
    commit = commits(table)[-1]
    assert actions(commit, "add") == []
    assert notes(commit)[0]["ledger"]["streams"].keys() == {"s1", "s2"}
    assert next_offsets(table) == {("orders", 0): 10}


# After a reset


def test_a_batch_planned_before_a_reset_writes_no_rows_and_counts_as_done(
    query: Query, table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint stays the same: its pending batch is void, and the next one starts at the reset position."""
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    set_ledger(query.spark, str(table), "etl", {TopicPartition("orders", 0): 3}, reason="reset", reset_number=1)
    for _ in range(2):
        query.run(query.sink(table, transform=no_rows), 1, offset(1, one(10, 20)))
    commit = commits(table)[-1]
    assert {kind for action in commit for kind in action} - {"domainMetadata"} == {"commitInfo", "txn"}
    assert len(commits(table)) == 4, "the replay is recognised"
    assert notes(commit)[0]["ledger"]["streams"]["s1"][0] == 1
    assert next_offsets(table) == {("orders", 0): 3}
    assert f"group etl: batch 1, table {table}: planned before reset #1" in caplog.text
    query.run(query.sink(table), 2, offset(2, one(3, 12), followed=[("orders", 0)], reset_number=1))
    assert Counter(rows(table)) == Counter(records(0, 10) + records(3, 12))
    assert next_offsets(table) == {("orders", 0): 12}


def test_a_refused_batch_is_void_after_the_reset_that_the_refusal_names(query: Query, table: Path) -> None:
    sink, refused = query.sink(table), offset(1, one(3, 7), followed=[("orders", 0)])
    query.run(sink, 0, offset(0, one(0, 10)))
    with pytest.raises(LedgerConflict, match="with the same checkpoint"):
        query.run(sink, 1, refused)
    set_ledger(query.spark, str(table), "etl", {TopicPartition("orders", 0): 10}, reason="--to-ledger", reset_number=1)
    query.run(query.sink(table), 1, refused)
    query.run(query.sink(table), 2, offset(2, one(10, 12), followed=[("orders", 0)], reset_number=1))
    assert rows(table) == records(0, 12)


def test_a_reset_between_the_decision_and_the_commit_makes_the_batch_void(
    query: Query, table: Path, before_next_commit: BeforeNextCommit
) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 5)))
    before_next_commit(lambda: set_ledger(query.spark, str(table), "etl", {}, reason="r", reset_number=1))
    query.run(query.sink(table), 1, offset(1, one(5, 9)))
    assert rows(table) == records(0, 5)
    assert next_offsets(table) == {("orders", 0): 5}


def test_the_durable_mark_is_the_newest_written_batch_and_never_a_void_one(
    query: Query, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files, "directory", lambda: tmp_path / "runs")
    (tmp_path / "runs").mkdir(mode=0o700)
    sink = query.sink(table)
    query.run(sink, 0, offset(0, one(0, 5)), offset(4, one(0, 2, topic="other"), stream="s2"))
    assert (run_files.durable_mark("s1").seq, run_files.durable_mark("s2").seq) == (0, 4)
    query.run(sink, 1, offset(1, one(5, 6)))
    query.run(sink, 0, offset(0, one(0, 5)), offset(4, one(0, 2, topic="other"), stream="s2"))
    assert run_files.durable_mark("s1").seq == 1, "a replay does not replace the mark of a later batch"
    with pytest.raises(LedgerConflict):
        query.run(sink, 2, offset(2, one(3, 9), followed=[("orders", 0)]))
    set_ledger(query.spark, str(table), "etl", {}, reason="r", reset_number=1)
    for _ in range(2):  # the second one is recognised as a replay
        query.run(sink, 2, offset(2, one(3, 9), followed=[("orders", 0)]))
        assert run_files.durable_mark("s1").seq == 1
        assert run_files.void_by("s1", 2) == 1
        (tmp_path / "runs" / "s1.void").unlink()


# Idle groups


def test_a_batch_without_rows_that_moves_no_position_is_not_committed(query: Query, table: Path) -> None:
    sink = query.sink(table)
    query.run(sink, 0, offset(0, one(0, 5)))
    for n in range(1, 4):
        query.run(sink, n, offset(n, one(5, 5)))
    assert len(commits(table)) == 2


def test_a_range_with_transaction_markers_only_moves_the_ledger(query: Query, table: Path) -> None:
    sink = query.sink(table)
    query.run(sink, 0, offset(0, one(0, 5)))
    query.plan(1, offset(1, one(5, 8)))
    sink(query.rows(), 1)
    assert next_offsets(table) == {("orders", 0): 8}


def test_rows_of_another_source_are_written_while_kafka_group_is_idle(
    query: Query, table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink, batch = query.sink(table), offset(0, one(0, 5))
    query.plan(0, batch, "1")
    sink(query.rows(batch), 0)
    query.plan(1, batch, "2")
    sink(query.spark.createDataFrame([("rate", 0, 7, "r")], SCHEMA), 1)
    assert rows(table) == sorted([*records(0, 5), ("rate", 0, 7, "r")])
    assert actions(commits(table)[-1], "txn")[0]["version"] == 1
    assert "WARNING" not in caplog.text


def test_deltas_writer_writes_rows_of_another_source_if_no_position_moves(query: Query, table: Path) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 5)))
    anew = Query(DeltaSession(), query.root.parent, "anew", "options")  # type: ignore[arg-type]
    anew.plan(0, offset(0, one(5, 5), stream="s2"), "1")
    anew.sink(table)(anew.spark.createDataFrame([("rate", 0, 7, "r")], SCHEMA), 0)
    assert rows(table) == sorted([*records(0, 5), ("rate", 0, 7, "r")])


def test_a_replayed_batch_of_other_sources_alone_is_skipped_also_the_first_one(query: Query, table: Path) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 5)))
    anew = Query(query.spark, query.root.parent, "anew")
    foreign = query.spark.createDataFrame([("rate", 0, 7, "r")], SCHEMA)
    for number in (0, 0, 1, 1):
        anew.plan(number, '{"group": "etl", "seq": -1, "stream": "", "topics": {}, "v": 1}', str(number))
        anew.sink(table)(foreign, number)
    assert [row[0] for row in rows(table)].count("rate") == 2


def test_a_batch_of_other_sources_alone_is_written_where_delta_reports_the_history(
    query: Query, table: Path, described: Any
) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 5)))
    anew = Query(described, query.root.parent, "anew")
    for number in (0, 0, 1, 1):
        anew.plan(number, '{"group": "etl", "seq": -1, "stream": "", "topics": {}, "v": 1}', str(number))
        anew.sink(table)(described.createDataFrame([("rate", 0, number, "r")], SCHEMA), number)
    assert rows(table) == sorted([*records(0, 5), ("rate", 0, 0, "r"), ("rate", 0, 1, "r")])


@pytest.mark.parametrize("reports_numbers", [True, False])
def test_a_replay_that_deltas_writer_skips_is_read_for_the_state_of_the_query(
    query: Query, table: Path, described: Any, reports_numbers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch without records has what the watermark released. Delta skips its number, and does not read its rows."""
    read: list[int] = []
    monkeypatch.setattr(sink_module, "keep_state", lambda df, root: read.append(len(df.rows)))
    session: Any = DeltaSession() if reports_numbers else described
    anew, batch = Query(session, query.root.parent, "anew", "options"), offset(0, one(0, 5))
    anew.run(anew.sink(table), 0, batch)
    anew.plan(1, batch)
    for replays in ([], [2]):
        anew.sink(table)(session.createDataFrame([("window", 0, 1, "w"), ("window", 0, 2, "w")], SCHEMA), 1)
        assert read == replays
    assert len(rows(table)) == 7


# Concurrent writers


def test_a_lost_race_commits_the_files_that_were_written_before(
    new_query: NewQuery, table: Path, before_next_commit: BeforeNextCommit
) -> None:
    a, b = new_query("a"), new_query("b")
    a.run(a.sink(table), 0, offset(0, one(0, 2)))
    before_next_commit(lambda: b.run(b.sink(table), 0, offset(0, one(0, 3, partition=1), stream="s2")))
    read = []

    def transform(df: Any) -> Any:
        read.append(1)
        return df

    a.run(a.sink(table, transform=transform), 1, offset(1, one(2, 4)))
    assert len(read) == 1, "the batch was read once"
    committed = {action["path"] for commit in commits(table) for action in actions(commit, "add")}
    assert parquet_files(table) == committed, "no file was written twice"
    assert rows(table) == sorted(records(0, 4) + records(0, 3, partition=1))
    assert next_offsets(table) == {("orders", 0): 4, ("orders", 1): 3}


def test_a_lost_race_against_the_same_query_ends_in_a_skip(
    query: Query, table: Path, before_next_commit: BeforeNextCommit
) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 2)))
    before_next_commit(lambda: query.run(query.sink(table), 1, offset(1, one(2, 5))))
    query.run(query.sink(table), 1, offset(1, one(2, 5)))
    assert rows(table) == records(0, 5)
    assert len(commits(table)) == 3


def test_a_writer_that_loses_every_race_fails_and_has_written_nothing(
    query: Query, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 2)))

    def lose(self: NativeWriter, *args: Any, **kwargs: Any) -> int:
        raise CommitRace("lost")

    monkeypatch.setattr(NativeWriter, "commit", lose)
    monkeypatch.setattr(table_writer, "RACE_WAIT_MAX_S", 0.0)
    monkeypatch.setattr(table_writer, "COMMIT_ATTEMPTS_MAX", 3)
    with pytest.raises(LedgerConflict, match="lost to concurrent writers 3 times"):
        query.run(query.sink(table), 1, offset(1, one(2, 5)))
    assert len(commits(table)) == 2


# Tables


def test_a_table_with_a_transaction_retention_is_refused_whenever_it_is_set(query: Query, table: Path) -> None:
    sink = query.sink(table)
    query.run(sink, 0, offset(0, one(0, 2)))
    DeltaTable(table).alter.set_table_properties({table_names.RETENTION: "interval 1 days"}, raise_if_not_exists=False)
    statement = f"ALTER TABLE delta.`{table}` UNSET TBLPROPERTIES ('delta.setTransactionRetentionDuration')"
    for again in (sink, query.sink(table)):
        with pytest.raises(OptionError, match=re.escape(statement)):
            query.run(again, 1, offset(1, one(2, 3)))
    assert rows(table) == records(0, 2)


# The checkpoint


def test_a_query_without_a_kafka_group_source_is_refused(query: Query, new_table: Path) -> None:
    query.plan(0, "42", '{"topic":{"0":12}}', "-")
    with pytest.raises(CheckpointMismatch, match="no offset of a kafka-group source"):
        query.sink(new_table)(query.rows(), 0)
    assert not new_table.exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"group": "etl", "seq": 0, "str', "not JSON"),
        (
            '{"group": "etl", "seq": 0, "stream": "s", "topics": {"a": {"from": [5], "read": [-4]}}, "v": 1}',
            "damaged",
        ),
        ('{"group": "etl", "seq": 0, "stream": "s", "v": 2}', "version 2"),
    ],
)
def test_a_damaged_offset_stops_the_batch(query: Query, new_table: Path, line: str, message: str) -> None:
    query.plan(0, line)
    with pytest.raises(CheckpointMismatch, match=message):
        query.sink(new_table)(query.rows(), 0)
    assert not new_table.exists()


def test_both_formats_of_spark_s_offset_log_are_read() -> None:
    a, b = offset(3, one(0, 5)), offset(0, one(0, 5), group="b")
    ja, jb = json.dumps(a.to_json_dict()), json.dumps(b.to_json_dict())
    for text in (f"v1\n{{}}\n{ja}\n-\n{jb}\n{ja}\n17", f"v2\n{{}}\n0:{ja}\n2:{jb}\nrate_1:17\n3:-"):
        found = parse_planned("q", 3, text, None)
        assert found.offsets == (a, b)
        assert found.other_sources == 2
    with pytest.raises(CheckpointMismatch, match="format 'v3'"):
        parse_planned("q", 3, f"v3\n{{}}\n{ja}", None)


def test_a_source_whose_offset_did_not_change_is_not_recorded() -> None:
    ja = json.dumps(offset(3, one(0, 5)).to_json_dict())
    jb = json.dumps(StreamOffset.initial("b").to_json_dict())
    assert parse_planned("q", 1, f"v1\n{{}}\n{ja}\n{jb}", f"v1\n{{}}\n{ja}\n-").offsets == ()


def test_a_checkpoint_of_another_query_is_named_in_the_error(query: Query, table: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="Set `checkpoint=` to the checkpointLocation of this query"):
        query.sink(table)(query.rows(), 7)
    with pytest.raises(OptionError, match="metadata"):
        DeltaSink(table, checkpoint=str(tmp_path / "nowhere"))(query.rows(), 0)
    with pytest.raises(OptionError, match="Use DeltaSink in foreachBatch"):
        DeltaSink(table)(query.rows(), 0)


def test_a_table_in_the_folder_of_the_checkpoint_is_refused_and_nothing_is_written(query: Query) -> None:
    with pytest.raises(OptionError, match="one folder"):
        query.run(query.sink(f"file://{query.root}/"), 0, offset(0, one(0, 5)))
    assert not (query.root / "_delta_log").exists()


@pytest.mark.parametrize("folder", ["checkpoint", "a/_checkpoint", "_checkpoints/orders", ".checkpoint"])
def test_a_checkpoint_is_in_the_tables_folder_only_where_vacuum_leaves_it(folder: str, query: Query) -> None:
    table = query.root / "table"
    inside = Query(query.spark, table, folder)
    sink = DeltaSink(table, checkpoint=str(inside.root))
    if folder.startswith(("_", ".")):
        inside.run(sink, 0, offset(0, one(0, 5)))
        assert DeltaTable(table).vacuum(0, enforce_retention_duration=False, full=True) == []
        return
    with pytest.raises(OptionError, match=f"Move the checkpoint, for example to {table}/_checkpoints/{folder}, and"):
        inside.run(sink, 0, offset(0, one(0, 5)))
    write_deltalake(table, pa.table({"value": ["a"]}))
    unused = DeltaTable(table).vacuum(0, enforce_retention_duration=False, full=True)
    assert {f"{folder}/offsets/0", f"{folder}/metadata"} <= {*unused}


@pytest.mark.parametrize("prefix", ["", "file:", "file://", "file://localhost"])
@pytest.mark.parametrize("name", ["a#b", "a?b", "a b", "50%", "é", "a[b]|^"])
def test_a_local_path_is_read_as_text_and_not_as_a_url(query: Query, tmp_path: Path, prefix: str, name: str) -> None:
    DeltaTable.create(tmp_path / "a", Schema.from_json(EMPTY))
    location = f"{prefix}{tmp_path}/{name}"
    assert table_writer.open_log("t", location, None) is None
    query.run(query.sink(tmp_path / name), 0, offset(0, one(0, 5)))
    log = table_writer.open_log("t", location, None)
    assert log is not None and log.newest() == 1
    assert rows(tmp_path / name) == records(0, 5)
    assert len(commits(tmp_path / "a")) == 1


@pytest.mark.parametrize("part", ["%20", "\\", "\t"])
def test_a_local_path_that_deltalake_reads_otherwise_is_refused(query: Query, tmp_path: Path, part: str) -> None:
    DeltaTable.create(tmp_path / "a" / "b", Schema.from_json(EMPTY))
    with pytest.raises(OptionError) as error:
        query.run(query.sink(tmp_path / f"a{part}b"), 0, offset(0, one(0, 5)))
    assert f"has {part!r} in its path" in str(error.value)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("a")] == ["a"]
    assert len(commits(tmp_path / "a" / "b")) == 1


@pytest.mark.parametrize("part", ["[", "]", "|", "^", "~", " ", "é", "#", "?", "%"])
def test_a_remote_path_that_deltalake_encodes_is_refused(part: str) -> None:
    with pytest.raises(OptionError, match="leave out storage_options") as error:
        table_writer.open_log("t", f"s3a://lake/a{part}b", {"AWS_REGION": "eu-central-1"})
    assert f"has {part!r} in its path" in str(error.value)
    assert table_writer.open_log("t", f"s3a://lake/a{part}b", None) is None


# Tables that Delta itself must write


def field(name: str, kind: Any, *, nullable: bool = True, **metadata: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, "nullable": nullable, "metadata": metadata}


def struct(*fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "struct", "fields": list(fields)}


def array(kind: Any, *, nullable: bool = True) -> dict[str, Any]:
    return {"type": "array", "elementType": kind, "containsNull": nullable}


def map_to(kind: Any, *, nullable: bool = True) -> dict[str, Any]:
    return {"type": "map", "keyType": "string", "valueType": kind, "valueContainsNull": nullable}


INVARIANT = {**field("b", "long"), "metadata": {"delta.invariants": "{}"}}


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (field("a", "long", nullable=False), "its column a is NOT NULL"),
        (field("a", struct(field("b", "long", nullable=False))), "its column a.b is NOT NULL"),
        (field("a", array("long", nullable=False)), "its column a has NOT NULL values"),
        (field("a", map_to("long", nullable=False)), "its column a has NOT NULL values"),
        (field("a", map_to(array(struct(field("b", "long", nullable=False))))), "its column a.b is NOT NULL"),
        (field("a", array(struct(INVARIANT))), "its column a.b has delta.invariants"),
        (field("a", "string", __CHAR_VARCHAR_TYPE_STRING="char(5)"), "its column a has __CHAR_VARCHAR_TYPE_STRING"),
        (field("a", "void"), "its column a has values of type void"),
        (field("a", array(struct(field("b", "void")))), "its column a.b has values of type void"),
        (field("a", map_to(array(struct(field("b", "long"))))), None),
    ],
)
def test_a_table_whose_values_delta_checks_or_pads_is_not_written_natively(
    tmp_path: Path, column: dict[str, Any], reason: str | None
) -> None:
    created = DeltaTable.create(tmp_path / "t", Schema.from_json(json.dumps(struct(column))))
    assert reason_not_native(created) == reason


@pytest.mark.parametrize("feature", ["catalogManaged", "notSupported"])
def test_a_table_with_a_feature_that_deltalake_does_not_support_is_left_to_delta(table: Path, feature: str) -> None:
    features = {"readerFeatures": [feature], "writerFeatures": [feature, "inCommitTimestamp"]}
    rewrite(table, 0, "protocol", lambda found: found.update(minReaderVersion=3, minWriterVersion=7, **features))
    assert table_writer.open_log("t", str(table), None) is None


@pytest.mark.parametrize(
    ("master", "writer", "is_native"),
    [("spark://host:7077", "auto", False), ("yarn", "native", True), ("local-cluster[2,1,1024]", "auto", True)],
)
def test_a_local_folder_is_written_natively_by_executors_of_other_hosts_only_if_the_user_says_that_they_share_it(
    query: Query, table: Path, master: str, writer: Writer, is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark does not report a folder that the driver does not see: it finds no files there, and no error."""
    monkeypatch.setitem(query.spark.conf._values, "spark.master", master)  # type: ignore[attr-defined]  # of the fake
    opened = TableWriter(query.spark, str(table), writer=writer)
    assert opened.reason_not_native(None) is None, "a ledger alone is written by the driver"
    assert ("may have another folder" in opened.described_writer()) != is_native
    sink = query.sink(table, writer=writer)
    if is_native:
        query.run(sink, 0, offset(0, one(0, 2)))
        assert rows(table) == records(0, 2)
    else:
        with pytest.raises(OptionError, match="writer='native' says that all hosts share it"):
            query.run(sink, 0, offset(0, one(0, 2)))


@pytest.mark.parametrize("writer", ["auto", "native"])
def test_a_table_is_not_written_natively_on_databricks(
    query: Query, table: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Spark leaves files of failed tasks in the folder, which would be rows twice."""
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "17.3")
    other = Query(DeltaSession(), query.root, "platform", "options")  # type: ignore[arg-type]
    sink = other.sink(table, writer=writer)
    if writer == "native":
        with pytest.raises(OptionError, match=r"cannot be written natively: Databricks' Spark .* writer='auto'"):
            other.run(sink, 0, offset(0, one(0, 2)))
        return
    other.run(sink, 0, offset(0, one(0, 2)))
    assert rows(table) == records(0, 2) and not (table / FOLDER).exists()


def test_files_of_tasks_that_spark_gave_up_are_not_added(tmp_path: Path) -> None:
    for folder in ("data", "data/_temporary/0/task_1"):
        (tmp_path / folder).mkdir(parents=True)
        pq.write_table(pa.table({"n": [1]}), tmp_path / folder / "part-0.parquet")
    files = SubTreeFileSystem(str(tmp_path), LocalFileSystem())
    assert [action.path for action in add_actions(files, "data", ["n"], [])] == ["data/part-0.parquet"]


def test_log_has_no_path_that_delta_and_deltalake_encode_differently(query: Query, tmp_path: Path) -> None:
    """Delta's VACUUM would delete the file as one that the table does not have."""
    parted, topics = tmp_path / "parted", ("größe", "☃ %C3", "a b")
    query.run(query.sink(parted, partition_by="topic"), 0, offset(0, {(topic, 0): (0, 1) for topic in topics}))
    added = [action for commit in commits(parted) for action in actions(commit, "add")]
    assert {action["partitionValues"]["topic"] for action in added} == set(topics)
    for action in added:
        assert action["path"].isascii() and (parted / unquote(action["path"])).is_file()
        assert "%C3%" not in action["path"], "a character of the value"
    assert sorted(DeltaTable(str(parted)).to_pyarrow_table()["topic"].to_pylist()) == sorted(topics)


def test_a_table_whose_log_is_damaged_is_not_left_to_delta(table: Path) -> None:
    (table / "_delta_log" / f"{0:020}.json").write_text("{")
    with pytest.raises(DeltaError):
        table_writer.open_log("t", str(table), None)


class FrameWithHeaders(Frame):
    """Rows whose headers a transform made, so that none is null."""

    @property
    def schema(self) -> Any:
        headers = array(struct(field("key", "string", nullable=False), field("value", "binary")), nullable=False)
        fields = [*json.loads(Frame(self.sparkSession, self.rows.drop_columns("headers")).schema.json())["fields"]]
        return StructType.fromJson(struct(*fields, field("headers", headers, nullable=False)))


def test_a_table_with_headers_that_the_sink_creates_is_written_natively(query: Query, new_table: Path) -> None:
    def transform(df: Any) -> Any:
        headers = pa.array([[{"key": "k", "value": b"v"}]] * len(df.rows), HEADERS_TYPE)
        return FrameWithHeaders(df.sparkSession, df.rows.append_column("headers", headers))

    query.run(query.sink(new_table, writer="native", transform=transform), 0, offset(0, one(0, 5)))
    assert [row[-1] for row in rows(new_table)] == [[{"key": "k", "value": b"v"}]] * 5


@pytest.mark.parametrize("kind", ["void", array("void"), struct(field("b", map_to("void")))])
def test_a_table_with_values_of_type_void_is_not_created_natively(query: Query, new_table: Path, kind: Any) -> None:
    schema = json.dumps(struct(field("topic", "string", comment="void"), field("nothing", kind)))
    frame: Any = SimpleNamespace(schema=SimpleNamespace(json=lambda: schema))
    with pytest.raises(OptionError, match=r"column nothing of the batch has values of type void.*cast\('string'\)"):
        TableWriter(query.spark, str(new_table)).create(frame)
    assert not new_table.exists()


def test_native_commits_write_delta_s_checkpoints_at_the_table_s_interval(query: Query, table: Path) -> None:
    DeltaTable(table).alter.set_table_properties({"delta.checkpointInterval": "3"}, raise_if_not_exists=False)
    sink, log = query.sink(table, writer="native"), table / "_delta_log"
    for n in range(6):
        query.run(sink, n, offset(n, one(n, n + 1)))
    found = sorted(int(path.name.split(".")[0]) for path in log.glob("*.checkpoint.parquet"))
    newest = json.loads((log / "_last_checkpoint").read_text())["version"]
    assert len(found) == 2 and found[1] - found[0] == 3 and newest == found[1]
    content = pq.read_table(log / f"{newest:020}.checkpoint.parquet", columns=["add", "txn"]).to_pylist()
    assert sum(row["add"] is not None for row in content) == newest - 1, "all batches up to that version"
    assert [row["txn"]["version"] for row in content if row["txn"] is not None] == [newest - 1]


def test_a_failure_of_delta_s_checkpoint_after_a_native_commit_does_not_end_the_query(
    query: Query, table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    DeltaTable(table).alter.set_table_properties({"delta.checkpointInterval": "2"}, raise_if_not_exists=False)
    sink = query.sink(table, writer="native")
    blocked = [table / "_delta_log" / f"{version:020}.checkpoint.parquet" for version in range(2, 6)]
    for checkpoint in blocked:
        (checkpoint / "a folder, which no file replaces").mkdir(parents=True)
    for n in range(3):
        query.run(sink, n, offset(n, one(n * 5, n * 5 + 5)))
    for checkpoint in blocked:
        rmtree(checkpoint)
    assert rows(table) == records(0, 15)
    assert f"table {table}: version 3 is committed, and a checkpoint of the log" in caplog.text


def test_a_failure_of_delta_s_checkpoint_after_new_columns_does_not_end_the_query(
    query: Query, table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    query.run(query.sink(table, writer="native"), 0, offset(0, one(0, 5)))
    DeltaTable(table).alter.set_table_properties({"delta.checkpointInterval": "1"}, raise_if_not_exists=False)
    blocked = table / "_delta_log" / f"{DeltaTable(table).version() + 1:020}.checkpoint.parquet"
    (blocked / "a folder, which no file replaces").mkdir(parents=True)
    sink = query.sink(table, writer="native", merge_schema=True, transform=with_more)
    query.run(sink, 1, offset(1, one(5, 10)))
    rmtree(blocked)
    assert next_offsets(table) == {("orders", 0): 10}
    assert "what follows a commit has failed" in caplog.text


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_failure_of_a_native_commit_is_raised_unchanged_where_the_commit_is_not_found(
    query: Query, table: Path, monkeypatch: pytest.MonkeyPatch, is_readable: bool
) -> None:
    real = LogFiles.newest

    def newest(self: LogFiles) -> int:
        raise OSError("no route to the storage")

    def commit(self: NativeWriter, *args: Any, **kwargs: Any) -> bool:
        monkeypatch.setattr(LogFiles, "newest", real if is_readable else newest)
        raise DeltaError("the storage is full")

    monkeypatch.setattr(NativeWriter, "commit", commit)
    with pytest.raises(DeltaError, match="the storage is full"):
        query.run(query.sink(table), 0, offset(0, one(0, 5)))
    assert DeltaTable(table).version() == 0


# New columns


def with_more(df: Any) -> Any:
    return Frame(df.sparkSession, df.rows.append_column("more", pa.array(["m"] * len(df.rows))))


def more(start: int, end: int) -> list[Any]:
    """The rows of ``with_more``."""
    return [(*row, "m") for row in records(start, end)]


def fewer(start: int, end: int) -> list[Any]:
    """The rows without that column, in a table that has it."""
    return [(*row, None) for row in records(start, end)]


def definitions(table: Path) -> int:
    """Return the number of commits that set the table's columns."""
    return sum(bool(actions(commit, "metaData")) for commit in commits(table))


def test_new_columns_are_added_in_a_commit_of_their_own_and_rows_without_them_are_still_written(
    query: Query, table: Path
) -> None:
    wider = query.sink(table, writer="native", transform=with_more, merge_schema=True)
    query.run(query.sink(table), 0, offset(0, one(0, 2)))
    query.run(wider, 1, offset(1, one(2, 4)))
    assert [sorted({kind for action in commit for kind in action}) for commit in commits(table)[2:]] == [
        ["commitInfo", "metaData"],
        ["add", "commitInfo", "txn"],
    ]
    query.run(query.sink(table, writer="native"), 2, offset(2, one(4, 6)))
    query.run(wider, 3, offset(3, one(6, 8)))
    assert rows(table) == fewer(0, 2) + more(2, 4) + fewer(4, 6) + more(6, 8)
    assert next_offsets(table) == {("orders", 0): 8}
    assert definitions(table) == 2, "the table's creation and the new column"


def test_a_batch_killed_after_its_columns_were_added_is_written_once(
    query: Query, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: dict[str, Any] = {"writer": "native", "transform": with_more, "merge_schema": True}

    def killed(self: NativeWriter, rows: Any) -> list[Any]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(NativeWriter, "_files", killed)
        with pytest.raises(KeyboardInterrupt):
            query.run(query.sink(table, **arguments), 0, offset(0, one(0, 2)))
    assert (rows(table), definitions(table)) == ([], 2)
    query.run(query.sink(table, **arguments), 0, offset(0, one(0, 2)))
    assert rows(table) == more(0, 2)
    assert definitions(table) == 2


@pytest.mark.parametrize("is_wider", [False, True])
def test_of_two_queries_whose_batches_overlap_one_decides_again_after_columns_were_added(
    new_query: NewQuery, table: Path, before_next_commit: BeforeNextCommit, is_wider: bool
) -> None:
    """``deltalake`` puts the columns behind the other query's rows; these must not be written again."""
    a, b = new_query("a"), new_query("b")
    arguments: dict[str, Any] = {"writer": "native", "transform": with_more, "merge_schema": True}
    a.run(a.sink(table), 0, offset(0, one(0, 2)))
    other = b.sink(table, **(arguments if is_wider else {}))
    before_next_commit(lambda: b.run(other, 0, offset(0, one(2, 5), stream="s2")))
    a.run(a.sink(table, **arguments), 1, offset(1, one(2, 9)))
    assert rows(table) == fewer(0, 2) + (more if is_wider else fewer)(2, 5) + more(5, 9)
    assert next_offsets(table) == {("orders", 0): 9}
    assert definitions(table) == 2


def test_new_columns_are_refused_without_merge_schema_and_a_missing_partition_column_always(
    query: Query, table: Path, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match="lacks the columns more of the batch, and merge_schema is False"):
        query.run(query.sink(table, writer="native", transform=with_more), 0, offset(0, one(0, 2)))
    assert len(commits(table)) == 1
    parted = tmp_path / "parted"
    query.run(query.sink(parted, partition_by="topic"), 0, offset(0, one(0, 2)))
    without: Any = {"transform": lambda df: df.select("partition", "offset", "value"), "merge_schema": True}
    with pytest.raises(OptionError, match="natively: the batch has other columns or types"):
        query.run(query.sink(parted, writer="native", **without), 1, offset(1, one(2, 4)))
    assert len(commits(parted)) == 2


@pytest.mark.parametrize(
    ("column", "is_added"),
    [
        (field("more", "decimal(10,2)", nullable=False), True),
        (field("more", map_to(array(struct(field("b", "timestamp", nullable=False))))), True),
        (field("more", "timestamp_ntz"), False),  # needs a table feature
        (field("more", array(struct(field("b", "variant")))), False),
        (field("more", "void"), False),
        (field("more", "string", __CHAR_VARCHAR_TYPE_STRING="char(5)"), False),
        (field("more", struct(field("b c", "long"))), False),  # a name for column mapping
        (field("N", "long"), False),  # Delta takes it for n
        (field("n", "double"), False),  # another type, which Delta casts or widens
        (field("metadata", "string"), False),
    ],
)
def test_columns_are_added_natively_if_every_table_can_have_them(
    tmp_path: Path, column: dict[str, Any], is_added: bool
) -> None:
    created = DeltaTable.create(tmp_path / "t", Schema.from_json(EMPTY))
    batch: Any = SimpleNamespace(schema=StructType.fromJson(struct(column)))
    found = new_columns(created, batch)
    assert (found is not None) == is_added
    if found is not None:
        created.alter.add_columns([Field.from_json(json.dumps(new)) for new in found])
        assert reason_not_native(created) is None


def test_writer_options_refuse_the_sources_of_several_groups(query: Query) -> None:
    numbers = {"spark-group-source.team.orders": 1, "spark-group-source.team.clicks": 1}
    with pytest.raises(OptionError, match=r"have the groups team\.clicks, team\.orders, .*one query for each group"):
        OptionsWriter(TableWriter(query.spark, "/t")).commit(query.rows(), numbers, "note", needed=True)


# The object itself


def test_a_sink_can_be_pickled(query: Query, table: Path) -> None:
    sink = query.sink(table, transform=lambda df: df.select("value"), partition_by=["value"], merge_schema=True)
    copy = pickle.loads(cloudpickle.dumps(sink))
    assert {k: v for k, v in vars(copy).items() if k != "transform"} == {
        k: v for k, v in vars(sink).items() if k != "transform"
    }


class TakenLogs(OpenedLogs):
    """Opened logs of which another thread takes the last one after they were counted."""

    def __len__(self) -> int:
        self.clear()
        return 1


def test_another_thread_may_take_the_last_opened_log(query: Query, table: Path) -> None:
    sink = query.sink(table)
    query.run(sink, 0, offset(0, one(0, 5)))
    sink._idle_logs = TakenLogs(sink._idle_logs)
    query.run(sink, 1, offset(1, one(5, 9)))
    assert rows(table) == records(0, 9)


def test_a_sink_keeps_one_opened_log_and_few_runs(
    new_query: NewQuery, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_guard, "QUERIES_MAX", 2)
    sink = DeltaSink(table)
    monkeypatch.setattr(write_guard, "_runs", {})
    for n in range(4):
        query = new_query(f"q{n}")
        sink.checkpoint = str(query.root)
        query.run(sink, 0, offset(0, one(n * 5, n * 5 + 5), stream=f"s{n}"))
    assert (len(sink._idle_logs), list(sink._runs)) == (1, ["query-q2", "query-q3"])
    assert list(write_guard._runs) in ([], ["query-q2", "query-q3"])
    assert rows(table) == records(0, 20)


@pytest.mark.parametrize("arguments", [{"writer": "best"}, {"table": ""}])
def test_invalid_arguments_are_refused_at_construction(arguments: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        DeltaSink(**{"table": "t", **arguments})


def test_a_path_and_a_name_are_distinguished(tmp_path: Path) -> None:
    assert DeltaSink(tmp_path).table == str(tmp_path)
    assert DeltaSink("delta.`/lake/orders`").table == "/lake/orders"
    assert DeltaSink(Path("orders")).table == "./orders"
    assert [table_names.is_path(t) for t in ("/lake/o", "s3a://b/o", "./o", "o", "db.o")] == [True] * 3 + [False] * 2


# Settings of the session


@pytest.mark.parametrize("before", ["INT96", None])
def test_setting_of_writes_at_the_same_time_ends_with_the_last_of_them(before: str | None) -> None:
    session: Any = Session()
    if before is not None:
        session.conf.set("k", before)
    first, second = (session_setting(session, "k", "MICROS") for _ in range(2))
    with first:
        second.__enter__()
    assert session.conf.get("k", None) == "MICROS", "the second write goes on"
    second.__exit__(None, None, None)
    assert session.conf.get("k", None) == before


def test_setting_that_the_platform_forbids_is_left_as_it_is(
    query: Query, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark's timestamps have no statistics then."""

    def forbidden(key: str, value: str) -> None:
        raise PySparkException(f"Cannot modify the value of {key}", "CANNOT_MODIFY_CONFIG", {})

    monkeypatch.setattr(query.spark.conf, "set", forbidden)
    query.run(query.sink(table), 0, offset(0, one(0, 5)))
    assert rows(table) == records(0, 5)
    with pytest.raises(PySparkException), session_setting(query.spark, "k", "MICROS", must=True):
        pass


def test_setting_of_the_user_is_kept() -> None:
    session: Any = Session()
    session.conf.set("k", "7")
    with session_setting(session, "k", "2", only_if_unset=True):
        assert session.conf.get("k", None) == "7"
    assert session.conf.get("k", None) == "7"


@pytest.mark.parametrize("table", ["/lake/${env:HOME}", "delta.`/lake/${spark.app.name}`", "sales.${env:HOME}"])
def test_a_table_with_a_variable_of_sql_in_its_name_is_refused(table: str) -> None:
    with pytest.raises(OptionError, match=r"Spark replaces \$\{\.\.\.\} in SQL"):
        DeltaSink(table)
