"""The ledger in Delta's public terms: found in the table's history, made anew where that does not go back to it."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import rmtree

import pytest
from sink_source import SCHEMA, offset
from sink_words import Query, actions, commits, next_offsets, one, records, rows

from spark_group_source.delta import notes
from spark_group_source.delta.deltalog import Table
from spark_group_source.delta.kept import Restored, read_ledger, restored, set_ledger
from spark_group_source.delta.ledger import Ledger
from spark_group_source.delta.notes import Commit
from spark_group_source.delta.sink import Tier
from spark_group_source.delta.told import Told
from spark_group_source.errors import LedgerConflict
from spark_group_source.model import TopicPartition

P0 = TopicPartition("orders", 0)


@pytest.fixture
def tier() -> Tier:
    return "writer-options"


class Written:
    """Commits that are written down."""

    def __init__(self, *commits: Commit) -> None:
        self._commits = commits

    def commits(self, *, after: int = -1) -> Iterator[Commit]:
        return (commit for commit in reversed(self._commits) if commit.version > after)


def batch(version: int, *, read: int | None = None) -> Commit:
    note = notes.text([offset(version, one(version, version + 1))], [Ledger(group="etl")], read=read)
    return Commit.of(version, version - 1, "WRITE", note, None)


def restore(version: int, to: int) -> Commit:
    return Commit(version, version - 1, restored_to=to, operation="RESTORE")


# What a history says


def test_a_note_is_read_as_it_was_written() -> None:
    batches = [offset(3, one(0, 5)), offset(0, one(7, 9, partition=1), stream="s2")]
    ledger = Ledger(group='e"tl', offsets={P0: 5}, number=3, queries={"q": 3})
    text = notes.text(batches, [ledger], read=8)
    found = Commit.of(12, 11, "WRITE", text, None)
    assert (found.batch("etl"), found.read) == (batches, 8), "Delta's own number says when the writing began"
    written = found.ledger('e"tl')
    assert written is not None and written == Ledger.from_json('e"tl', ledger.to_json(), table_version=12)
    assert notes.mark('e"tl') in text and notes.mark("etl") not in text
    assert text.startswith(notes.beginning(batches))
    assert Commit.of(1, 0, "WRITE", "somebody's note", None) == Commit(1, 0, operation="WRITE")


def test_a_restore_that_came_after_the_look_is_seen_though_delta_began_to_write_behind_it() -> None:
    assert restored(Written(batch(1), restore(2, 0), batch(3)), "etl") is None
    assert restored(Written(batch(1), restore(2, 0), batch(3, read=1)), "etl") == Restored(2, 0, 3)
    assert restored(Written(batch(1), restore(2, 0)), "etl") == Restored(2, 0)


# On a real table


@pytest.mark.spark
def test_after_a_restore_the_query_stops_until_the_operator_said_where_it_goes_on(query: Query, table: Path) -> None:
    sink = query.sink(table)
    for n in range(3):
        query.run(sink, n, offset(n, one(n * 10, n * 10 + 10)))
    query.spark.sql(f"RESTORE TABLE delta.`{table}` TO VERSION AS OF 1")
    before = len(commits(table))
    for again in (sink, query.sink(table)):
        with pytest.raises(LedgerConflict, match=r"restored to version 1 .*version 4.*orders-0\[10,30\).*--to-ledger"):
            query.run(again, 3, offset(3, one(30, 40)))
    assert len(commits(table)) == before and rows(table) == records(0, 10)
    there = read_ledger(query.spark, str(table), "etl")
    assert there is not None and there.offsets == {P0: 10}
    set_ledger(query.spark, str(table), "etl", there.offsets, reason="--to-ledger", epoch=1)
    query.run(sink, 3, offset(3, one(30, 40)))
    query.run(sink, 4, offset(4, one(10, 45), epoch=1))
    assert rows(table) == records(0, 45)


@pytest.mark.spark
def test_a_deleted_checkpoint_and_a_rewind_are_noticed_as_with_delta_s_classes(
    query: Query, new_query: Callable[[str], Query], table: Path
) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    anew = new_query("anew")  # Kafka's offset was behind
    anew.run(anew.sink(table), 0, offset(0, one(5, 15), stream="s2"))
    assert rows(table) == records(0, 15)
    with pytest.raises(LedgerConflict, match="was moved back by someone else"):
        anew.run(anew.sink(table), 1, offset(1, one(3, 20), stream="s2", followed=[("orders", 0)]))


@pytest.mark.spark
def test_a_thousand_foreign_commits_between_two_of_the_group_do_not_hide_the_ledger(query: Query, table: Path) -> None:
    stale = query.sink(table)
    query.run(stale, 0, offset(0, one(0, 10)))
    query.run(query.sink(table), 1, offset(1, one(10, 11)))
    log = table / "_delta_log"
    last = len(commits(table))
    info = json.dumps({"commitInfo": {"timestamp": 1, "operation": "OPTIMIZE", "operationParameters": {}}})
    for version in range(last, last + 1_005):
        (log / f"{version:020}.json").write_text(info + "\n")
    for sink in (stale, query.sink(table), query.sink(table, tier="transaction")):
        query.run(sink, 1, offset(1, one(10, 11)))
    query.run(stale, 2, offset(2, one(5, 12)))
    assert rows(table) == records(0, 12)


def forget_history(query: Query, table: Path) -> None:
    """As Delta does with what is older than ``delta.logRetentionDuration``, once there is a checkpoint."""
    name = f"delta.`{table}`"
    query.spark.sql(f"ALTER TABLE {name} SET TBLPROPERTIES ('delta.checkpointInterval' = '1')")
    newest = max((table / "_delta_log").glob("*.checkpoint*.parquet")).name.split(".")[0]
    for file in (table / "_delta_log").glob("*"):
        if file.name.split(".")[0].isdecimal() and file.name.split(".")[0] < newest:
            file.unlink()
    # What is left is a table property and nothing of ours.
    assert not any(
        "stream" in info.get("userMetadata", "") for c in commits(table) for info in actions(c, "commitInfo")
    )


@pytest.mark.spark
@pytest.mark.parametrize("by", ["writer-options", "transaction"])
def test_where_the_history_was_cleaned_the_ledger_is_made_anew_from_the_rows(
    query: Query, table: Path, caplog: pytest.LogCaptureFixture, by: Tier
) -> None:
    for n in range(3):
        query.run(query.sink(table), n, offset(n, one(n * 10, n * 10 + 10)))
    forget_history(query, table)
    sink = query.sink(table, tier=by)
    query.run(sink, 3, offset(3, one(25, 40)))
    query.run(sink, 4, offset(4, one(40, 45)))
    assert "made anew from the rows: orders-0 30" in caplog.text
    found = query.spark.read.format("delta").load(str(table))  # the files of the log do not tell any more
    assert sorted(row["offset"] for row in found.collect()) == list(range(45))
    ledger = read_ledger(query.spark, str(table), "etl")
    assert ledger is not None and ledger.offsets == {P0: 45}


@pytest.mark.spark
def test_a_group_that_is_new_to_an_old_table_begins_where_kafka_says(query: Query, table: Path) -> None:
    """Though rows of that topic are there: whoever wrote them, this group did not."""
    query.spark.createDataFrame(records(0, 10), SCHEMA).write.format("delta").mode("append").save(str(table))
    forget_history(query, table)
    query.run(query.sink(table), 0, offset(0, one(5, 8)))
    query.run(query.sink(table), 1, offset(1, one(8, 9)))
    found = query.spark.read.format("delta").load(str(table))
    assert sorted(row["offset"] for row in found.collect()) == sorted([*range(10), *range(5, 9)])


@pytest.mark.spark
def test_a_table_whose_rows_do_not_tell_goes_on_where_the_group_stands_and_says_so(
    query: Query, new_table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = query.sink(new_table, transform=lambda df: df.select("value"))
    for n in range(2):
        query.run(sink, n, offset(n, one(n, n + 1)))
    forget_history(query, new_table)
    query.run(query.sink(new_table, transform=lambda df: df.select("value")), 2, offset(2, one(2, 4)))
    assert "goes on where it stands in Kafka" in caplog.text
    assert query.spark.read.format("delta").load(str(new_table)).count() == 4


@pytest.mark.spark
@pytest.mark.parametrize("first", ["writer-options", "transaction"])
def test_a_number_that_delta_forgot_does_not_bring_an_older_ledger_back(
    query: Query, new_query: Callable[[str], Query], table: Path, first: Tier
) -> None:
    query.run(query.sink(table, tier=first), 0, offset(0, one(0, 10)))
    query.run(query.sink(table), 1, offset(1, one(10, 20)))
    forgets = "'delta.setTransactionRetentionDuration' = 'interval 1 millisecond'"
    query.spark.sql(f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ({forgets})")
    assert not Table(query.spark, str(table)).snapshot().applications()
    anew = new_query("anew")
    anew.run(anew.sink(table, tier="transaction"), 0, offset(0, one(5, 25), stream="s2"))
    assert rows(table) == records(0, 25)


@pytest.mark.spark
def test_two_writers_that_race_for_every_number_write_each_record_once(
    query: Query, new_query: Callable[[str], Query], table: Path
) -> None:
    """Both are given the same records: one of the two wins each number, and the other leaves them out."""
    query.run(query.sink(table), 0, offset(0, one(0, 1)))

    def write(name: str) -> None:
        mine = new_query(name)
        sink = mine.sink(table)
        for n in range(5):
            mine.run(sink, n, offset(n, one(n * 5, n * 5 + 6), stream=name))

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(write, name) for name in ("a", "b")]:
            done.result()
    assert rows(table) == records(0, 26)
    assert next_offsets(table) == {("orders", 0): 26}
    numbers = [txn["version"] for commit in commits(table) for txn in actions(commit, "txn")]
    assert numbers == list(range(1, len(numbers) + 1)), "no number twice, and none left out"


@pytest.mark.spark
def test_a_table_of_a_former_release_goes_on(query: Query, table: Path) -> None:
    """Its notes have offsets and no ledger."""
    for n in range(3):
        frame = query.rows(offset(n, one(n * 10, n * 10 + 10)))
        writer = frame.write.format("delta").mode("append").option("txnAppId", query.id).option("txnVersion", n)
        writer.option("userMetadata", offset(n, one(n * 10, n * 10 + 10)).to_json()).save(str(table))
    told = Told(query.spark, str(table)).ledger("etl")
    assert told is not None and told.offsets == {P0: 30}
    sink = query.sink(table)
    query.run(sink, 2, offset(2, one(20, 30)))
    query.run(sink, 3, offset(3, one(30, 40)))
    assert rows(table) == records(0, 40)


@pytest.mark.spark
def test_a_table_that_is_deleted_while_the_query_runs_is_not_made_anew_without_a_word(
    query: Query, table: Path
) -> None:
    sink = query.sink(table)
    for n in range(3):
        query.run(sink, n, offset(n, one(n * 10, n * 10 + 10)))
    rmtree(table)
    with pytest.raises(LedgerConflict, match="was deleted while the query runs"):
        query.run(sink, 3, offset(3, one(30, 40)))
    assert not list(table.glob("_delta_log/*.json"))
    query.run(query.sink(table), 3, offset(3, one(30, 40)))
    with pytest.raises(LedgerConflict, match="was deleted while the query runs"):
        query.run(sink, 4, offset(4, one(40, 50)))
    assert rows(table) == records(30, 40)
