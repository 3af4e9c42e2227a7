"""``spark-group ledger``: clean tables are clean, and each injected fault is found."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from delta_files import living_files
from sink_source import offset
from sink_words import Query, actions, commits, one
from typer.testing import CliRunner

from spark_group_source.cli import shared
from spark_group_source.cli.app import app
from spark_group_source.delta import verified
from spark_group_source.delta.kept import set_ledger
from spark_group_source.model import TopicPartition

P0 = TopicPartition("orders", 0)
pytestmark = pytest.mark.spark


def kinds(query: Query, table: Path) -> list[str]:
    return [found.kind for found in verified.verify(query.spark, str(table)).findings]


def inject(table: Path, *lines: dict[str, Any]) -> None:
    """A commit that nobody made."""
    info = {"timestamp": 1, "operation": "WRITE", "operationParameters": {"mode": "Append"}, "operationMetrics": {}}
    text = "\n".join(json.dumps(line) for line in [{"commitInfo": info}, *lines])
    (table / "_delta_log" / f"{len(commits(table)):020}.json").write_text(text + "\n")


@pytest.fixture
def written(query: Query, table: Path) -> Path:
    for n in range(3):
        query.run(query.sink(table), n, offset(n, {("orders", 0): (n * 10, n * 10 + 10), ("orders", 1): (n, n + 1)}))
    return table


def test_a_table_that_was_written_in_order_is_clean_also_after_a_reset_and_a_lost_checkpoint(
    query: Query, new_query: Callable[[str], Query], written: Path
) -> None:
    anew = new_query("anew")
    anew.run(anew.sink(written), 0, offset(0, one(25, 35), stream="s2"))
    set_ledger(query.spark, str(written), "etl", {P0: 35}, reason="r", epoch=1)
    anew.run(anew.sink(written), 1, offset(1, one(35, 40), stream="s2", epoch=1))
    found = verified.verify(query.spark, str(written))
    assert (found.findings, found.groups, found.rows, found.notes) == ([], ["etl"], 43, [])


def test_a_doubled_file_and_a_file_that_is_gone_are_found(query: Query, written: Path) -> None:
    last = living_files(written)[-1]
    (add,) = (a for c in commits(written) for a in actions(c, "add") if a["path"] == str(last.relative_to(written)))
    copy = written / f"copy-{last.name}"
    copy.write_bytes(last.read_bytes())
    inject(written, {"add": {**add, "path": copy.name}})
    assert kinds(query, written) == ["doubled"] * 2, "in both partitions"
    gone = {"path": copy.name, "deletionTimestamp": 1, "dataChange": True}
    inject(written, {"remove": gone}, {"remove": {**gone, "path": add["path"]}})
    assert kinds(query, written) == ["missing"]


def test_a_restore_and_rows_behind_the_ledger_are_found(query: Query, written: Path) -> None:
    query.rows(offset(9, one(50, 51))).write.format("delta").mode("append").save(str(written))
    assert kinds(query, written) == ["behind"]
    query.spark.sql(f"RESTORE TABLE delta.`{written}` TO VERSION AS OF 1")
    found = verified.verify(query.spark, str(written))
    assert [one.kind for one in found.findings] == ["restore"]
    assert found.notes == ["whether rows are missing is not compared: the log has RESTORE"]


def test_the_command_shows_and_judges(query: Query, written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import contextmanager

    @contextmanager
    def session(wanted: bool) -> Any:
        assert wanted
        yield query.spark

    monkeypatch.setattr(shared, "session", session)
    run = CliRunner()
    (shown,) = json.loads(run.invoke(app, ["ledger", "show", str(written), "--json"]).output)
    assert shown["topics"] == {"orders": {"0": 30, "1": 3}}
    assert (shown["by"], shown["version"], shown["number"]) == ("batch 2 of stream s1", len(commits(written)) - 1, 3)
    assert "orders" in run.invoke(app, ["ledger", "show", str(written)]).output
    clean = run.invoke(app, ["ledger", "verify", str(written)])
    assert (clean.exit_code, clean.output.strip()) == (0, "1 groups, 4 commits, 33 rows: all of it fits")
    query.rows(offset(9, one(50, 51))).write.format("delta").mode("append").save(str(written))
    bad = run.invoke(app, ["ledger", "verify", str(written)])
    assert bad.exit_code == 1
    assert "behind: orders-0 has rows up to offset 50, but its ledger says 30 is the next one" in bad.output
