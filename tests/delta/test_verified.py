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
from spark_group_source.delta import notes, verified
from spark_group_source.delta.kept import set_ledger
from spark_group_source.delta.ledger import Ledger, judge
from spark_group_source.delta.notes import Commit
from spark_group_source.group.offsets import StreamOffset
from spark_group_source.model import TopicPartition

P0 = TopicPartition("orders", 0)
BOTH = pytest.mark.parametrize("tier", ["transaction", "writer-options"])


def history(*batches: StreamOffset, first: int = 0) -> list[Commit]:
    """As a sink would have written them."""
    found: list[Commit] = [] if first else [Commit(0, -1)]
    before: Ledger | None = None
    for version, batch in enumerate(batches, start=first or 1):
        before = judge(batch, before).ledger.written("q", batch.seq)
        found.append(Commit.of(version, version - 1, "WRITE", notes.text([batch], [before]), None))
    return found


# What a history says


def test_batches_that_follow_one_another_fit() -> None:
    assert verified.chained(history(*(offset(n, one(n * 5, n * 5 + 5)) for n in range(4))), "etl") == []
    assert verified.chained(history(*(offset(n, one(n * 5, n * 5 + 5)) for n in range(2, 4)), first=7), "etl") == []
    assert verified.chained(history(offset(0, one(0, 5))), "another") == []


def test_a_gap_between_two_batches_is_found_unless_others_were_followed_there() -> None:
    (found,) = verified.chained(history(offset(0, one(0, 5)), offset(1, one(7, 9))), "etl")
    assert (found.kind, found.version) == ("gap", 2)
    assert "orders-0[5,7)" in found.text
    followed = offset(1, one(7, 9), followed=[("orders", 0)])
    assert verified.chained(history(offset(0, one(0, 5)), followed), "etl") == []


def test_a_ledger_that_is_not_what_its_batch_makes_of_the_one_before_is_found() -> None:
    told = history(offset(0, one(0, 5)), offset(1, one(5, 9)))
    wrong = notes.text([offset(1, one(5, 9))], [Ledger(group="etl", offsets={P0: 8}, topic_ids={"orders": "id-1"})])
    (found,) = verified.chained([*told[:2], Commit.of(2, 1, "WRITE", wrong, None)], "etl")
    assert (found.kind, found.version) == ("ledger", 2)


def test_what_an_operator_set_is_taken_as_it_is() -> None:
    told = history(offset(0, one(0, 5)))
    ledger = Ledger(group="etl", offsets={P0: 2}, topic_ids={"orders": "id-1"}, epoch=1)
    reset = Commit.of(2, 1, "WRITE", notes.text((), [ledger], reason="spark-group reset 1"), None)
    again = offset(1, one(2, 4), epoch=1)
    after = judge(again, ledger).ledger
    told += [reset, Commit.of(3, 2, "WRITE", notes.text([again], [after]), None)]
    assert verified.chained(told, "etl") == []


# On a real table


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


@BOTH
@pytest.mark.spark
def test_a_table_that_was_written_in_order_is_clean_also_after_a_reset_and_a_lost_checkpoint(
    query: Query, new_query: Callable[[str], Query], written: Path
) -> None:
    anew = new_query("anew")
    anew.run(anew.sink(written), 0, offset(0, one(25, 35), stream="s2"))
    set_ledger(query.spark, str(written), "etl", {P0: 35}, reason="r", epoch=1)
    anew.run(anew.sink(written), 1, offset(1, one(35, 40), stream="s2", epoch=1))
    found = verified.verify(query.spark, str(written))
    assert (found.findings, found.groups, found.rows, found.notes) == ([], ["etl"], 43, [])


@BOTH
@pytest.mark.spark
def test_a_doubled_file_and_a_file_that_is_gone_are_found(query: Query, written: Path) -> None:
    last = living_files(written)[-1]
    (add,) = (a for c in commits(written) for a in actions(c, "add") if a["path"] == last.name)
    copy = last.with_name("copy-" + last.name)
    copy.write_bytes(last.read_bytes())
    inject(written, {"add": {**add, "path": copy.name}})
    assert kinds(query, written) == ["doubled"] * 3, "in both partitions, and in all"
    gone = {"path": copy.name, "deletionTimestamp": 1, "dataChange": True}
    inject(written, {"remove": gone}, {"remove": {**gone, "path": last.name}})
    assert kinds(query, written) == ["missing"]


@pytest.mark.spark
def test_a_restore_and_rows_behind_the_ledger_are_found(query: Query, written: Path) -> None:
    query.rows(offset(9, one(50, 51))).write.format("delta").mode("append").save(str(written))
    assert kinds(query, written) == ["behind"]
    query.spark.sql(f"RESTORE TABLE delta.`{written}` TO VERSION AS OF 1")
    found = verified.verify(query.spark, str(written))
    assert [one.kind for one in found.findings] == ["restore"]
    assert found.notes == ["whether rows are missing is not compared: the history has RESTORE"]


@pytest.mark.spark
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
