"""``spark-group ledger``: a correct table has no findings, and each injected fault is found."""

import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from delta_files import living_files
from deltalake import DeltaTable
from sink_source import offset
from sink_words import NewQuery, Query, actions, commits, one
from typer.testing import CliRunner

from spark_group_source.cli import common
from spark_group_source.cli.app import app
from spark_group_source.delta import ledger_store
from spark_group_source.delta.ledger_store import set_ledger
from spark_group_source.model import TopicPartition

P0 = TopicPartition("orders", 0)
pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("few_tasks")]


def kinds(query: Query, table: Path) -> list[str]:
    return [found.kind for found in ledger_store.verify(query.spark, str(table)).findings]


def inject(table: Path, *lines: dict[str, Any]) -> None:
    """Add a commit to the log by hand."""
    info = {"timestamp": 1, "operation": "WRITE", "operationParameters": {"mode": "Append"}, "operationMetrics": {}}
    text = "\n".join(json.dumps(line) for line in [{"commitInfo": info}, *lines])
    (table / "_delta_log" / f"{len(commits(table)):020}.json").write_text(text + "\n")


@pytest.fixture
def written(query: Query, table: Path) -> Path:
    for n in range(3):
        query.run(query.sink(table), n, offset(n, {("orders", 0): (n * 10, n * 10 + 10), ("orders", 1): (n, n + 1)}))
    return table


def test_a_doubled_file_and_a_missing_file_are_found(query: Query, written: Path) -> None:
    last = living_files(written)[-1]
    (add,) = (a for c in commits(written) for a in actions(c, "add") if a["path"] == str(last.relative_to(written)))
    copy = written / f"copy-{last.name}"
    copy.write_bytes(last.read_bytes())
    inject(written, {"add": {**add, "path": copy.name}})
    assert kinds(query, written) == ["doubled"] * 2, "in both partitions"
    gone = {"path": copy.name, "deletionTimestamp": 1, "dataChange": True}
    inject(written, {"remove": gone}, {"remove": {**gone, "path": add["path"]}})
    assert kinds(query, written) == ["missing"]


def test_the_command_shows_a_correct_table_rows_behind_the_ledger_and_a_restore(
    query: Query, new_query: NewQuery, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def session(wanted: bool) -> Any:
        assert wanted
        yield query.spark

    monkeypatch.setattr(common, "session", session)
    run, table = CliRunner(), str(written)
    (shown,) = json.loads(run.invoke(app, ["ledger", "show", table, "--json"]).output)
    assert shown["topics"] == {"orders": {"0": 30, "1": 3}}
    assert (shown["by"], shown["version"], shown["number"]) == ("batch 2 of stream s1", len(commits(written)) - 1, 3)
    assert "orders" in run.invoke(app, ["ledger", "show", table]).output
    anew = new_query("anew")  # after a deleted checkpoint, and a reset
    anew.run(anew.sink(written), 0, offset(0, one(25, 35), stream="s2"))
    set_ledger(query.spark, table, "etl", {P0: 35}, reason="r", reset_number=1)
    anew.run(anew.sink(written), 1, offset(1, one(35, 40), stream="s2", reset_number=1))
    clean = run.invoke(app, ["ledger", "verify", table])
    assert (clean.exit_code, clean.output.strip()) == (0, "1 groups, 7 commits, 43 rows: no differences")
    query.rows(offset(9, one(50, 51))).write.format("delta").mode("append").save(table)
    bad = run.invoke(app, ["ledger", "verify", table])
    assert bad.exit_code == 1
    assert "behind: orders-0 has rows up to offset 50, but the next offset in its ledger is 40" in bad.output
    DeltaTable(written).restore(1)
    found = ledger_store.verify(query.spark, table)
    assert [one.kind for one in found.findings] == ["restore"]
    assert found.notes == ["the number of rows is not compared: the log has RESTORE"]
