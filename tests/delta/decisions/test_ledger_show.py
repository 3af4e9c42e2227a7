"""``spark-group ledger show`` and ``describe --table`` of a table by path: without Spark, in 80 columns."""

import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.errors import ParseException
from sink_helpers import Query, expire_log
from sink_source import offset
from typer.testing import CliRunner

from spark_group_source import describe
from spark_group_source.cli import common, report
from spark_group_source.cli.app import app
from spark_group_source.cli.ledger import ledger_reader
from spark_group_source.delta import ledger_store, table_writer
from spark_group_source.delta.ledger_format import Ledger
from spark_group_source.delta.ledger_store import set_ledger
from spark_group_source.delta.table_history import LedgerExpired, TableHistory
from spark_group_source.delta.table_writer import open_existing
from spark_group_source.errors import LedgerConflict, OptionError
from spark_group_source.model import TopicPartition


@pytest.fixture(autouse=True)
def without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    def session() -> None:
        raise AssertionError("it starts Spark")

    monkeypatch.setattr(common, "session", session)


def test_ledgers_of_a_table_by_path_are_shown_without_spark(
    query: Query, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, topic = "9f2c41d8aa0b47d29f2c41d8aa0b47d2", "shop.orders.created.by.customers"
    for n in range(3):
        ranges = {(topic, 0): (10**10 + n, 10**10 + n + 1), (topic, 1): (n, n + 1)}
        query.run(query.sink(table), n, offset(n, ranges, stream=stream))
    set_ledger(query.spark, str(table), "second", {TopicPartition("other", 7): 9}, reason="r", reset_number=1)
    monkeypatch.setattr(common.console, "width", 80)
    shown = CliRunner().invoke(app, ["ledger", "show", str(table)])
    assert shown.exit_code == 0, shown.output
    assert max(map(len, shown.output.splitlines())) <= 80, shown.output
    text = " ".join(re.sub(r"[│┃]", " ", shown.output).split())
    assert re.search(
        rf"group etl, commit #3, reset #0: written 20\d\d-[-\d]+ [:\d]+[+-]\d+ by batch 2 of stream {stream}", text
    )
    assert f"{topic} 0 10,000,000,003 {topic} 1 3" in text
    assert "group second, commit #1, reset #1" in text and "by an operator" in text and "other 7 9" in text
    first, second = json.loads(CliRunner().invoke(app, ["ledger", "show", str(table), "--json"]).output)
    assert (first["by"], first["version"], first["number"]) == (f"batch 2 of stream {stream}", 3, 3)
    assert first["topics"] == {topic: {"0": 10**10 + 3, "1": 3}} and second["reset"] == 1


def test_a_table_without_a_ledger_is_reported(table: Path) -> None:
    assert "has no ledger: no group wrote to it" in CliRunner().invoke(app, ["ledger", "show", str(table)]).output


def test_an_expired_ledger_is_not_shown(
    query: Query, table: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    query.run(query.sink(table), 0, offset(0, {("orders", 0): (0, 5)}))
    expire_log(table)
    assert "or only before the log begins" in CliRunner().invoke(app, ["ledger", "show", str(table)]).output
    ledgers = list[Any]()

    def read_group(_: object, name: str, ledger: Any, **__: object) -> report.GroupReport:
        ledgers.append(ledger)
        return report.no_group(name)

    monkeypatch.setattr(report, "read_group", read_group)
    monkeypatch.setattr(common, "admin_of", lambda *_, **__: nullcontext(SimpleNamespace()))
    words = ["describe", "--bootstrap-servers", "b:1", "--table", str(table), "--group", "etl", "--group", "other"]
    shown = CliRunner().invoke(app, words)
    text = f"the ledger of group etl is older than the log of table {table}"
    assert (shown.exit_code, shown.stderr) == (0, f"{text}\n")
    assert describe("etl", "b:1", table=str(table), spark=query.spark).partitions == ()
    assert caplog.messages[-1] == text and not any(ledgers)


def test_the_function_shows_the_newest_ledger_though_rows_that_it_counts_were_removed(
    query: Query, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the command does. It is used to look at what went wrong."""
    query.run(query.sink(table), 0, offset(0, {("orders", 0): (0, 5)}))
    write_deltalake(table, DeltaTable(table).to_pyarrow_table().slice(0, 1), mode="overwrite")
    with pytest.raises(LedgerConflict, match="removed rows"):
        ledger_store.read_ledger(query.spark, str(table), "etl")
    monkeypatch.setattr(report, "read_group", lambda _, name, ledger: ledger)
    monkeypatch.setattr(common, "admin_of", lambda *_, **__: nullcontext(SimpleNamespace()))
    shown: Any = describe("etl", "b:1", table=str(table), spark=query.spark)
    assert shown == {TopicPartition("orders", 0): 5}


def test_describe_reads_the_ledger_of_a_table_by_path_without_spark(
    query: Query, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query.run(query.sink(table), 0, offset(0, {("orders", 0): (0, 5)}))
    for other in ("damaged", "old"):
        set_ledger(query.spark, str(table), other, {TopicPartition("orders", 0): 1}, reason="r", reset_number=1)

    read = ledger_store.ledger_to_reset

    def ledger_to_reset(history: TableHistory, name: str) -> Ledger | None:
        if name == "damaged":
            raise LedgerConflict("it is damaged")
        if name == "old":
            raise LedgerExpired(name)
        return read(history, name)

    monkeypatch.setattr(f"{ledger_store.__name__}.ledger_to_reset", ledger_to_reset)
    found: dict[str, Any] = {}

    def read_group(_: object, name: str, ledger: Any, **__: object) -> report.GroupReport:
        found[name] = ledger
        return report.no_group(name)

    monkeypatch.setattr(report, "read_group", read_group)
    monkeypatch.setattr(common, "admin_of", lambda *_: nullcontext(SimpleNamespace()))
    words = ["describe", "--bootstrap-servers", "b:1", "--table", str(table), "--json"]
    shown = CliRunner().invoke(app, [*words, "--group", "etl", "--group", "old", "--group", "other"])
    assert shown.exit_code == 0, shown.output
    assert found == {"etl": {TopicPartition("orders", 0): 5}, "old": None, "other": None}
    assert shown.stderr == f"the ledger of group old is older than the log of table {table}\n"
    assert len(json.loads(shown.stdout)) == 3


def test_a_restore_that_removed_rows_is_shown_beside_the_ledger_that_fits_the_rest(query: Query, table: Path) -> None:
    for n in range(2):
        query.run(query.sink(table), n, offset(n, {("orders", 0): (5 * n, 5 * n + 5)}))
    before = CliRunner().invoke(app, ["ledger", "show", str(table)])
    assert "refused" not in before.output
    DeltaTable(table).restore(1)
    shown = CliRunner().invoke(app, ["ledger", "show", str(table)])
    text = " ".join(shown.output.split())
    assert "version 3 of the table (RESTORE to version 1) replaced rows of the group: its next batch is refused" in text
    (one,) = json.loads(CliRunner().invoke(app, ["ledger", "show", str(table), "--json"]).output)
    assert one["replaced"] == {"version": 3, "operation": "RESTORE", "restored_to": 1}
    assert one["topics"] == {"orders": {"0": 5}}
    set_ledger(query.spark, str(table), "etl", {TopicPartition("orders", 0): 5}, reason="r", reset_number=1)
    assert "refused" not in CliRunner().invoke(app, ["ledger", "show", str(table)]).output


def test_a_restore_that_leaves_the_rows_of_the_group_settles_itself(query: Query, table: Path) -> None:
    query.run(query.sink(table), 0, offset(0, {("orders", 0): (0, 5)}))
    DeltaTable(table).delete("offset < 3")
    DeltaTable(table).restore(1)
    read = ledger_reader([str(table)])
    assert "refused" not in CliRunner().invoke(app, ["ledger", "show", str(table)]).output
    assert [one.is_unsettled for one in read()] == [False]
    DeltaTable(table).restore(0)
    assert [one.is_unsettled for one in read()] == [True]


def test_a_replay_that_was_committed_behind_a_restore_is_shown(query: Query, table: Path) -> None:
    """It counts no rows, so nothing has to settle it."""
    query.run(query.sink(table), 0, offset(0, {("orders", 0): (0, 5)}))
    written = DeltaTable(table).version()
    DeltaTable(table).alter.set_table_properties({"their.own": "1"}, raise_if_not_exists=False)
    DeltaTable(table).restore(written)
    there = open_existing(query.spark, str(table))
    replay = Ledger(group="replay.0a1b2c3d-0a1b-2c3d-4e5f-0a1b2c3d4e5f")
    there.commit_ledger(there.history(), replay, decided_at=written)
    shown = json.loads(CliRunner().invoke(app, ["ledger", "show", str(table), "--json"]).output)
    assert [(one["kind"], one["number"], one["replaced"]) for one in shown] == [("group", 1, None), ("replay", 1, None)]


def test_ledgers_of_dead_letters_are_not_shown_as_groups(query: Query, table: Path) -> None:
    query.run(query.sink(table), 0, offset(0, {("orders", 0): (0, 5)}))
    id_ = "0a1b2c3d-0a1b-2c3d-4e5f-0a1b2c3d4e5f"
    for key in (f"replay.{id_}", f"letters.{id_}", "letters.of-a-team"):
        set_ledger(query.spark, str(table), key, {}, reason="r", reset_number=0)
    lines = [
        line.partition(", commit")[0]
        for line in CliRunner().invoke(app, ["ledger", "show", str(table)], env={"COLUMNS": "200"}).output.splitlines()
        if ", commit" in line
    ]
    assert lines == [
        "group etl",
        f"dead letters of the table with id {id_}",
        "group letters.of-a-team",
        f"replay of bad records from the table with id {id_}",
    ]
    kinds = json.loads(CliRunner().invoke(app, ["ledger", "show", str(table), "--json"]).output)
    assert [one["kind"] for one in kinds] == ["group", "letters", "group", "replay"]


@pytest.mark.parametrize("name", ["orders-v2", ".", "my orders"])
def test_a_folder_without_a_slash_that_is_no_name_is_refused_with_its_path(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_writer, "has_delta", lambda _: True)
    spark = MagicMock()
    spark.sql.side_effect = ParseException("[PARSE_SYNTAX_ERROR] …")
    with pytest.raises(OptionError, match=re.escape(f"A path contains a slash: ./{name}")):
        table_writer.open_existing(spark, name)
