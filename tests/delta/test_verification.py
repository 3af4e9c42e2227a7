"""``spark-group ledger``: a correct table has no findings, and each injected fault is found."""

import json
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from delta_files import living_files
from deltalake import DeltaTable
from pyspark.sql import functions as F
from sink_helpers import NewQuery, Query, actions, commits, one, records
from sink_source import SCHEMA, offset
from typer.testing import CliRunner

from spark_group_source import Merge
from spark_group_source.cli import common
from spark_group_source.cli.app import app
from spark_group_source.cli.ledger import compare_with_kafka
from spark_group_source.delta import verification
from spark_group_source.delta.ledger_format import Ledger
from spark_group_source.delta.ledger_store import set_ledger
from spark_group_source.delta.verification import verify
from spark_group_source.kafka.translation import Topic
from spark_group_source.model import TopicPartition

P0 = TopicPartition("orders", 0)
pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("few_tasks")]


def kinds(query: Query, table: Path, **more: int) -> list[str]:
    return [found.kind for found in verify(query.spark, str(table), **more).findings]


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
    newest = max((written / "_delta_log").glob("*.json"))
    newest.write_text(newest.read_text().rstrip() + "\n" + json.dumps({"add": {**add, "path": copy.name}}) + "\n")
    assert kinds(query, written) == ["doubled"] * 2, "in both partitions"
    assert kinds(query, written, rows_per_record=2) == kinds(query, written, rows_per_record=0) == []
    gone = {"path": copy.name, "deletionTimestamp": 1, "dataChange": True}
    inject(written, {"remove": gone}, {"remove": {**gone, "path": add["path"]}})
    assert kinds(query, written) == ["restore", "missing"], "a commit of no known command has removed the rows"


def test_rows_that_a_query_writes_meanwhile_are_not_corrupt(
    query: Query, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_log = verification._read_log

    def and_write(*args: Any) -> Any:
        query.run(query.sink(written), 3, offset(3, one(30, 40)))
        return read_log(*args)

    monkeypatch.setattr(verification, "_read_log", and_write)
    found = verify(query.spark, str(written))
    assert (found.findings, found.rows) == ([], 33)


def test_rows_that_a_merge_wrote_again_are_not_counted(query: Query, tmp_path: Path) -> None:
    def changes(df: Any) -> Any:
        return df.selectExpr("offset % 4 AS id", "topic", "partition", "offset")

    sink = query.sink(tmp_path / "merged", transform=changes, merge=Merge(["id"]))
    for n in range(2):
        query.run(sink, n, offset(n, one(8 * n, 8 * n + 8)))
    found = verify(query.spark, str(tmp_path / "merged"))
    assert (found.findings, found.rows) == ([], 4)
    assert any("the number of rows is not compared: the log has MERGE" in note for note in found.notes)


def test_files_without_statistics_are_not_counted(query: Query, written: Path) -> None:
    newest = max((written / "_delta_log").glob("*.json"))
    lines = [json.loads(line) for line in newest.read_text().splitlines()]
    for line in lines:
        line.get("add", {}).pop("stats", None)
    newest.write_text("\n".join(map(json.dumps, lines)))
    found = verify(query.spark, str(written))
    assert found.findings == [] and any("files without statistics" in note for note in found.notes)


def test_rows_of_several_groups_transforms_and_foreign_writers_are_not_corrupt(
    query: Query, new_query: NewQuery, written: Path
) -> None:
    other = new_query("other")
    set_ledger(query.spark, str(written), "second", {P0: 0}, reason="r", reset_number=1)
    other.run(other.sink(written), 0, offset(0, one(0, 30), group="second", stream="s2", reset_number=1))
    assert kinds(query, written) == []
    query.run(query.sink(written, transform=lambda df: df.unionByName(df)), 3, offset(3, one(30, 40)))
    assert kinds(query, written) == [], "two groups may have written them"
    third = query.sink(written, transform=lambda df: df.unionByName(df).unionByName(df))
    query.run(third, 4, offset(4, one(40, 50)))
    found = verify(query.spark, str(written))
    assert [one.kind for one in found.findings] == ["doubled"]
    assert "10 records of orders-0 have up to 3 rows, and may have 1 row for each group. If a" in found.findings[0].text
    assert kinds(query, written, rows_per_record=3) == []
    foreign = [*records(0, 5), *records(90, 95), *records(0, 5, topic="theirs")]
    query.spark.createDataFrame(foreign, SCHEMA).write.format("delta").mode("append").save(str(written))
    found = verify(query.spark, str(written), rows_per_record=3)
    assert (found.findings, len(found.notes)) == ([], 1)
    assert "15 rows in files with rows of other writers are not compared" in found.notes[0]
    DeltaTable(written).optimize.compact()
    found = verify(query.spark, str(written), rows_per_record=3)
    assert found.findings == [] and "OPTIMIZE of files of several writers" in found.notes[-1]


def test_rows_without_an_offset_are_not_compared(query: Query, table: Path) -> None:
    """Rows of other sources may have a topic and a partition."""
    query.run(query.sink(table, transform=without_offsets), 0, offset(0, one(0, 3)))
    found = verify(query.spark, str(table))
    assert (found.findings, found.rows) == ([], 6)
    assert found.notes == ["3 rows without an offset are not compared: they are of no Kafka record"]


def without_offsets(df: Any) -> Any:
    return df.unionByName(df.withColumn("offset", F.lit(None).cast("long")))


def test_records_that_a_reset_or_a_recreated_topic_wrote_again_are_not_corrupt(query: Query, written: Path) -> None:
    set_ledger(query.spark, str(written), "etl", {P0: 5}, reason="r", reset_number=1)
    query.run(query.sink(written), 3, offset(3, one(5, 30), reset_number=1))
    found = verify(query.spark, str(written))
    assert found.findings == []
    assert "25 records of orders-0 have up to 2 rows, and may have 1 row; a reset or a truncated log" in found.notes[0]


def test_records_of_a_recreated_topic_are_not_doubled(query: Query, written: Path) -> None:
    query.run(query.sink(written), 3, offset(3, one(0, 10), topic_id="id-2"))
    assert kinds(query, written) == []


def test_a_commit_that_does_not_follow_the_one_before_is_found_in_the_whole_history(
    query: Query, written: Path
) -> None:
    set_ledger(query.spark, str(written), "etl", {P0: 30}, reason="r", reset_number=1)
    second = written / "_delta_log" / f"{2:020}.json"
    second.write_text(second.read_text().replace(r"\"number\":2", r"\"number\":7"))
    assert kinds(query, written) == ["ledger"], "the newest ledger is in order"


def test_the_command_shows_a_correct_table_rows_behind_the_ledger_and_a_restore(
    query: Query, new_query: NewQuery, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def session() -> Any:
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
    assert (clean.exit_code, clean.output.strip()) == (0, "1 group, 7 commits, 43 rows: no differences")
    query.rows(offset(9, one(50, 51))).write.format("delta").mode("append").save(table)
    foreign = run.invoke(app, ["ledger", "verify", table])
    assert foreign.exit_code == 0 and "note: 1 rows in files with rows of other writers" in foreign.output
    DeltaTable(written).restore(1)
    bad = run.invoke(app, ["ledger", "verify", table, "--json"])
    assert (bad.exit_code, [one["kind"] for one in json.loads(bad.stdout)["findings"]]) == (1, ["restore"])
    assert json.loads(bad.stdout)["notes"] == ["the number of rows is not compared: the log has RESTORE"]
    for words in (["/no/table"], [table, "--bootstrap-servers", "b:1", "--command-config", str(written / "no")]):
        done = run.invoke(app, ["ledger", "verify", *words])
        assert done.exit_code == (3 if len(words) == 1 else 2), done.output


class Kafka:
    """Topics, with their ends."""

    def __init__(self, **topics: tuple[str, int]) -> None:
        self._topics = topics

    def existing_topics(self, names: Iterable[str]) -> dict[str, Topic]:
        return {name: Topic(self._topics[name][0], 1) for name in names if name in self._topics}

    def latest_of_existing(self, tps: Iterable[TopicPartition], *, committed: bool) -> dict[TopicPartition, int]:
        assert not committed
        return {tp: self._topics[tp.topic][1] for tp in tps if tp.topic in self._topics and tp.partition == 0}


def test_a_ledger_is_compared_with_the_topics_of_kafka() -> None:
    at = {TopicPartition(name, p): 50 for name in ("same", "cut", "recreated", "gone") for p in range(2)}
    ledger = Ledger(group="etl").with_offsets(at, dict.fromkeys(("same", "cut", "recreated", "gone"), "id-1"))
    kafka: Any = Kafka(same=("id-1", 50), cut=("id-1", 40), recreated=("id-2", 10))
    found, left_out = compare_with_kafka(kafka, {"etl": ledger})
    assert not left_out
    assert [one.text for one in found] == [
        (
            "group etl: topic recreated has id id-2 in Kafka and id id-1 in the ledger; it was deleted and recreated "
            "since the last batch"
        ),
        "group etl: the next offset of cut-0 is 50 in the ledger, and its log ends at 40",
    ]


def test_a_partition_whose_end_no_broker_reports_is_not_compared() -> None:
    ledger = Ledger(group="etl").with_offsets({TopicPartition("orders", 0): 50}, {"orders": "id-1"})
    kafka: Any = Kafka(orders=("id-1", 40))
    kafka.latest_of_existing = lambda tps, *, committed: {}
    assert compare_with_kafka(kafka, {"etl": ledger}) == ([], {TopicPartition("orders", 0)})
