"""``spark-group ledger renew``: the ledger of an idle group outlives the table's log."""

import json
import os
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sink_source import offset
from sink_words import Query, commits, one
from typer.testing import CliRunner

from spark_group_source.cli import shared
from spark_group_source.cli.app import app
from spark_group_source.delta.renewed import DAY_S, keeps_s, renew
from spark_group_source.errors import LedgerConflict

BOTH = pytest.mark.parametrize("tier", ["writer-options", pytest.param("transaction", marks=pytest.mark.soak)])
"""By options the ledger is nowhere but in what Delta cleans; the other way is one for long runs."""


def aged(table: Path, days: float, *, upto: int = 1_000) -> None:
    """What is in the log by now, up to a version, was written so long ago."""
    for file in (table / "_delta_log").glob("[0-9]*"):
        if int(file.name.split(".")[0]) <= upto:
            os.utime(file, (time.time() - days * DAY_S,) * 2)


def alter(query: Query, table: Path, key: str, value: str) -> None:
    query.spark.sql(f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ('{key}' = '{value}')")


def told(query: Query, table: Path) -> list[tuple[str, str, int]]:
    return [(one.group, one.what, round(one.age_days or 0)) for one in renew(query.spark, str(table))]


@BOTH
@pytest.mark.spark
def test_a_ledger_that_was_renewed_is_there_when_delta_has_cleaned_the_log(
    query: Query, new_query: Callable[[str], Query], table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It deletes what is older than a checkpoint that is too old itself."""
    alter(query, table, "delta.checkpointInterval", "1")
    running, young = query.sink(table), new_query("young")
    query.run(running, 0, offset(0, one(0, 10)))
    aged(table, 20)
    young.run(young.sink(table), 0, offset(0, one(0, 3, topic="theirs"), group="young"))
    assert told(query, table) == [("etl", "renewed", 20), ("young", "young", 0)]
    assert told(query, table) == [("etl", "young", 0), ("young", "young", 0)]
    aged(table, 40, upto=3)
    alter(query, table, "somebody", "else")
    left = sorted(int(file.stem) for file in (table / "_delta_log").glob("*.json"))
    assert left[0] > 2, "Delta has not deleted the batch's commit"
    anew = new_query("anew")
    anew.run(anew.sink(table), 0, offset(0, one(5, 15), stream="s2"))
    query.run(running, 1, offset(1, one(15, 20)))
    found = query.spark.read.format("delta").load(str(table)).where("topic = 'orders'")
    assert sorted(row["offset"] for row in found.collect()) == list(range(20))
    assert "made anew" not in caplog.text


@pytest.mark.spark
def test_a_restore_that_nobody_settled_is_not_settled_by_a_renewal(query: Query, table: Path) -> None:
    sink = query.sink(table)
    for n in range(2):
        query.run(sink, n, offset(n, one(n * 10, n * 10 + 10)))
    query.spark.sql(f"RESTORE TABLE delta.`{table}` TO VERSION AS OF 1")
    aged(table, 20)
    before = len(commits(table))
    (found,) = renew(query.spark, str(table))
    assert (found.what, len(commits(table))) == ("refused", before)
    assert "restored to version 1" in found.why
    with pytest.raises(LedgerConflict, match="restored to version 1"):
        query.run(sink, 2, offset(2, one(20, 30)))


@pytest.mark.spark
def test_the_command_says_what_it_did_and_what_it_could_not(
    query: Query, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def session(wanted: bool) -> Any:
        assert wanted
        yield query.spark

    monkeypatch.setattr(shared, "session", session)
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    alter(query, table, "delta.logRetentionDuration", "interval 10 days")
    assert keeps_s(query.spark, str(table)) == 10 * DAY_S
    aged(table, 6)
    shown = CliRunner().invoke(app, ["ledger", "renew", str(table)])
    assert (shown.exit_code, shown.output.strip()) == (0, "etl: renewed, 6.0 days old")
    writer = query.rows(offset(9, one(50, 51))).write.format("delta").mode("append")
    writer.option("txnAppId", "spark-group-source.lost").option("txnVersion", 7).save(str(table))
    shown = CliRunner().invoke(app, ["ledger", "renew", str(table)])
    assert shown.exit_code == 1
    assert "lost: gone: the log of table" in shown.output
    (etl, lost) = json.loads(CliRunner().invoke(app, ["ledger", "show", str(table), "--json"]).output)
    assert (etl["number"], lost["number"], lost["by"]) == (2, None, "the table's log does not go back to it")
