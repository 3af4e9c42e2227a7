"""The history of a table: notes, expired logs, other writers, and how the next batch is decided."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from sink_helpers import (
    FAR,
    BeforeNextCommit,
    ListedCommits,
    NewQuery,
    Query,
    actions,
    commits,
    cut_log,
    expire_log,
    foreign_commits,
    next_offsets,
    offsets_in,
    one,
    records,
    rewrite,
    rows,
)
from sink_source import SCHEMA, offset

from spark_group_source.delta import table_names, table_writer, verification
from spark_group_source.delta.ledger_format import Ledger
from spark_group_source.delta.ledger_store import read_ledger, set_ledger
from spark_group_source.delta.table_history import (
    Commit,
    CommitRace,
    LogFiles,
    TableHistory,
    note_of,
)
from spark_group_source.delta.table_writer import TableWriter
from spark_group_source.errors import LedgerConflict
from spark_group_source.model import TopicPartition

P0, P1 = TopicPartition("orders", 0), TopicPartition("orders", 1)


# The history


def test_a_note_is_read_as_it_was_written() -> None:
    ledger = Ledger(group='e"tl', number=3, reset_number=1).with_offsets({P0: 5})
    text = note_of({'e"tl': ledger.to_json_dict()}, read=8)
    found = Commit.of(12, {"readVersion": 11, "operation": "WRITE", "userMetadata": text})
    assert found.read == 8 and found.ledger_entry("etl") is None
    history = TableHistory(ListedCommits(found, Commit(13, 12)))
    assert history.ledger('e"tl') == ledger.at_version(12)
    assert Commit.of(1, {"userMetadata": "a foreign note"}).entries == ()


def test_a_note_of_an_optimize_is_that_of_the_merge_before_it() -> None:
    text = note_of({"etl": Ledger(group="etl", number=3).to_json_dict()}, read=8)
    found = Commit.of(13, {"readVersion": 12, "operation": "OPTIMIZE", "userMetadata": text})
    assert (found.note, found.entries) == (None, ())


def test_a_ledger_whose_commit_is_no_longer_in_the_log_is_refused(query: Query, table: Path) -> None:
    for n in range(4):
        query.run(query.sink(table), n, offset(n, one(n * 10, n * 10 + 10)))
    sink = query.sink(table)
    query.run(sink, 4, offset(4, one(40, 50)))
    expire_log(table)
    with pytest.raises(LedgerConflict, match="so its ledger cannot be read"):
        read_ledger(query.spark, str(table), "etl")
    with pytest.raises(LedgerConflict, match=r"older than the table's log"):
        query.run(query.sink(table), 5, offset(5, one(45, 60), followed=[("orders", 0)]))
    query.run(sink, 5, offset(5, one(45, 60)))
    set_ledger(query.spark, str(table), "etl", {P0: 60}, reason="reset", reset_number=1)
    query.run(query.sink(table), 6, offset(6, one(60, 70), reset_number=1))
    assert (next_offsets(table), offsets_in(table)) == ({("orders", 0): 70}, list(range(70)))


def test_the_newest_commit_of_a_group_is_enough_to_read_its_ledger(query: Query, table: Path) -> None:
    for n in range(4):
        query.run(query.sink(table), n, offset(n, one(n * 10, n * 10 + 10)))
    cut_log(table, 4)
    ledger = read_ledger(query.spark, str(table), "etl")
    assert ledger is not None and (ledger.number, ledger.offsets) == (4, {P0: 40})
    query.run(query.sink(table), 4, offset(4, one(40, 50)))
    assert (next_offsets(table), offsets_in(table)) == ({("orders", 0): 50}, list(range(50)))


def test_the_start_of_a_query_logs_its_ledger_and_the_groups_that_share_the_table(
    query: Query, new_query: NewQuery, table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lines() -> list[str]:
        found = [record.message for record in caplog.records if "other groups" in record.message]
        caplog.clear()
        return found

    caplog.set_level("INFO")
    sink = query.sink(table)
    query.run(sink, 0, offset(0, one(0, 10)))
    first = f"group etl: table {table} (version 0) has no ledger of the group, which starts at its positions"
    assert lines() == [f"{first}; other groups in its last 20 commits: none"]
    audit = new_query("audit")
    audit.run(audit.sink(table), 0, offset(0, one(0, 3, topic="another"), group="audit", stream="s2"))
    query.run(sink, 1, offset(1, one(10, 20)))
    caplog.clear()
    query.run(sink, 2, offset(2, one(20, 30)))
    assert lines() == [], "once"
    query.run(query.sink(table), 3, offset(3, one(30, 40)))
    found = f"group etl: table {table} (version 4) continues at its ledger #3 of version 4"
    assert lines() == [f"{found}; other groups in its last 20 commits: audit"]


# Expired logs


def test_with_an_expired_log_the_query_continues_at_its_checkpoint(
    query: Query, table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for n in range(3):
        query.run(query.sink(table), n, offset(n, one(n * 10, n * 10 + 10)))
    expire_log(table)
    sink = query.sink(table)
    query.run(sink, 3, offset(3, one(30, 40)))
    query.run(sink, 4, offset(4, one(35, 45)))
    assert "a new ledger starts at the query's positions" in caplog.text
    assert offsets_in(table) == list(range(45))
    assert next_offsets(table) == {("orders", 0): 45}
    numbers = [txn["version"] for commit in commits(table) for txn in actions(commit, "txn")]
    assert numbers == [4, 5], "the numbers continue, so that an older writer loses"


@pytest.mark.parametrize("new", [one(0, 5, partition=1), one(5, 9, partition=1), one(0, 5, topic="clicks")])
def test_with_a_log_that_was_cut_a_new_partition_is_written_where_the_table_has_no_rows_behind_its_start(
    query: Query, table: Path, new: Any
) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    expire_log(table)
    query.run(query.sink(table), 1, offset(1, one(10, 20)))
    query.run(query.sink(table), 2, offset(2, one(20, 22) | new))
    ((start, end),) = new.values()
    assert offsets_in(table) == sorted([*range(22), *range(start, end)])


def test_with_a_log_that_was_cut_rows_of_a_former_topic_do_not_refuse_the_one_that_has_its_name(
    query: Query, table: Path
) -> None:
    both = one(0, 10) | one(0, 10, partition=1)
    query.run(query.sink(table), 0, offset(0, both))
    expire_log(table)
    query.run(query.sink(table), 1, offset(1, one(10, 12)))
    query.run(query.sink(table), 2, offset(2, one(0, 2), topic_id="id-2"))
    query.run(query.sink(table), 3, offset(3, one(2, 4) | one(0, 4, partition=1), topic_id="id-2"))
    assert offsets_in(table) == sorted([*range(10), *range(12), *range(4), *range(4)])


def ends_of_rows(query: Query, table: Path, starts: Any = None) -> Any:
    return TableWriter(query.spark, str(table)).row_ends(starts)


def test_row_ends_without_delta_lake_are_those_of_the_wanted_partitions(query: Query, table: Path) -> None:
    assert ends_of_rows(query, table) == {}
    query.run(query.sink(table), 0, offset(0, one(0, 10) | one(3, 7, partition=1) | one(0, 5, topic="other._-1")))
    other = TopicPartition("other._-1", 0)
    assert ends_of_rows(query, table) == {P0: 10, P1: 7, other: 5}
    assert ends_of_rows(query, table, {}) == {}
    assert ends_of_rows(query, table, {P0: 10, P1: 8}) == {P0: 10}
    assert ends_of_rows(query, table, {other: 0}) == {other: 5}


def test_row_ends_without_delta_lake_are_read_from_a_table_with_deletion_vectors(query: Query, table: Path) -> None:
    features = {
        "readerFeatures": ["deletionVectors"],
        "writerFeatures": ["deletionVectors", "appendOnly", "invariants"],
    }
    rewrite(table, 0, "protocol", lambda found: found.update(minReaderVersion=3, minWriterVersion=7, **features))
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    assert ends_of_rows(query, table) == {P0: 10}


def test_rows_whose_offsets_have_another_type_than_the_source_s_have_no_ends(query: Query, new_table: Path) -> None:
    write_deltalake(new_table, pa.table({"topic": ["orders"], "partition": pa.array([0], pa.int32()), "offset": ["7"]}))
    assert ends_of_rows(query, new_table) is None


@pytest.fixture
def cut(query: Query, table: Path, before_next_commit: BeforeNextCommit, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table whose log has the group's newest ledger, number 3, and not the version by which it was decided."""
    sink = query.sink(table)
    for n in range(2):
        query.run(sink, n, offset(n, one(n * 10, n * 10 + 10)))
    before_next_commit(lambda: foreign_commits(table, 4))
    query.run(sink, 2, offset(2, one(20, 30)))
    cut_log(table, 5)
    return table


def test_with_a_log_cut_before_the_newest_ledger_the_query_continues_and_its_numbers_too(
    query: Query, cut: Path
) -> None:
    query.run(query.sink(cut), 3, offset(3, one(30, 40)))
    assert offsets_in(cut) == list(range(40))
    numbers = [txn["version"] for commit in commits(cut) for txn in actions(commit, "txn")]
    assert numbers == [3, 4], "a number that is used would not stop another writer"


@pytest.mark.parametrize(
    ("seq", "batch", "reason"),
    [(2, one(20, 30), "its rows of orders-0 end at offset 30"), (3, one(50, 60), "it has no row 49 of orders-0")],
    ids=["replay", "gap"],
)
def test_with_a_log_cut_before_the_newest_ledger_a_batch_is_refused_where_the_rows_do_not_end(
    query: Query, cut: Path, seq: int, batch: Any, reason: str
) -> None:
    with pytest.raises(LedgerConflict, match=reason):
        query.run(query.sink(cut), seq, offset(seq, batch))
    assert offsets_in(cut) == list(range(30))


def test_with_an_expired_log_a_restore_that_left_the_log_is_not_forgotten(query: Query, table: Path) -> None:
    for n in range(3):
        query.run(query.sink(table), n, offset(n, one(n * 10, n * 10 + 10)))
    DeltaTable(table).restore(1)
    expire_log(table)
    with pytest.raises(LedgerConflict, match=r"starts orders-0 at 30, .*: it has no row 29 of orders-0"):
        query.run(query.sink(table), 3, offset(3, one(30, 40)))
    assert offsets_in(table) == list(range(10))


def test_with_an_expired_log_the_rows_of_another_group_move_no_position(query: Query, table: Path) -> None:
    """Both ledgers expired: which rows are whose is unknown, so an operator decides."""
    query.run(query.sink(table), 1, offset(0, one(0, 0), group="another", stream="s2"))
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    query.run(query.sink(table), 1, offset(1, one(0, 20), group="another", stream="s2"))
    expire_log(table)
    with pytest.raises(LedgerConflict, match=r"starts orders-0 at 10, .*end at offset 20(?s:.*)--to-checkpoint"):
        query.run(query.sink(table), 1, offset(1, one(10, 20)))
    query.run(query.sink(table), 1, offset(2, one(20, 30), group="another", stream="s2"))
    assert offsets_in(table) == sorted([*range(10), *range(30)])


def test_with_an_expired_log_a_table_without_the_columns_of_a_record_is_refused(query: Query, table: Path) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    expire_log(table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(table_names.RECORD_COLUMNS, "another", "string")
        with pytest.raises(LedgerConflict, match="lacks the columns topic, partition and offset"):
            query.run(query.sink(table), 1, offset(1, one(10, 20)))


def test_a_group_that_is_new_to_a_table_with_an_expired_log_does_not_write_rows_again(
    query: Query, table: Path
) -> None:
    """Whether another group wrote them, or the group itself before the table was cloned, is not known."""
    query.run(query.sink(table), 0, offset(0, one(0, 10), group="another", stream="s0"))
    expire_log(table)
    with pytest.raises(LedgerConflict, match=r"(?s)it may be a clone of a table that has the ledger.*reset "):
        query.run(query.sink(table), 1, offset(0, one(5, 8), followed=[("orders", 0)]))
    assert offsets_in(table) == list(range(10))


@pytest.mark.parametrize("found", ["rows only", "a ledger of another group", "an empty ledger"])
def test_a_new_group_is_checked_before_its_first_commit_where_delta_reports_an_expired_log(
    query: Query, table: Path, described: Any, found: str
) -> None:
    """The group's number is not reported, so only a commit shows whether the group wrote to the table."""
    sink = query.sink(table)
    query.run(sink, 0, offset(0, one(0, 10), group="another", stream="s0"))
    expire_log(table)
    reason = "it may be a clone of a table that has the ledger"
    if found == "a ledger of another group":
        query.run(query.sink(table), 1, offset(1, one(10, 12), group="another", stream="s0"))
        reason = "has one of group another with the same topics"
    if found == "an empty ledger":
        writer = TableWriter(query.spark, str(table))
        assert writer.commit_ledger(writer.history(), Ledger(group="etl")).number == 1
    before, new = offsets_in(table), Query(described, query.root.parent, "new")
    for _ in range(2):
        with pytest.raises(LedgerConflict, match=reason):
            new.run(new.sink(table), 0, offset(0, one(5, 8)))
    assert offsets_in(table) == before
    assert next_offsets(table) == {}


def test_a_new_group_behind_the_rows_is_written_where_delta_reports_an_expired_log(
    query: Query, table: Path, described: Any
) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 10), group="another", stream="s0"))
    expire_log(table)
    new = Query(described, query.root.parent, "new")
    for n in range(2):
        new.run(new.sink(table), n, offset(n, one(10 + n, 11 + n)))
    assert offsets_in(table) == list(range(12))
    assert next_offsets(table) == {("orders", 0): 12}


@pytest.mark.parametrize("has_rows", [True, False], ids=["first batch", "first commit"])
def test_two_queries_of_a_new_group_start_at_once_where_delta_reports_an_expired_log(
    query: Query, table: Path, described: Any, before_next_commit: BeforeNextCommit, has_rows: bool
) -> None:
    """The number of the slower one is used, and not by a ledger that left the log: both read the same records."""
    query.run(query.sink(table), 0, offset(0, one(0, 5, topic="clicks"), group="another", stream="s0"))
    expire_log(table)
    a, b = (Query(described, query.root.parent, name) for name in "ab")
    batch = offset(0, one(0, 5), stream="sa")

    def first() -> None:
        if has_rows:
            a.run(a.sink(table), 0, batch)
            return
        writer = TableWriter(described, str(table))
        writer.commit_ledger(writer.history(), Ledger(group="etl"), reason="the group's first commit")
        before_next_commit(lambda: a.run(a.sink(table), 0, batch))

    before_next_commit(first)
    b.run(b.sink(table), 0, offset(0, one(0, 7) | one(700, 705, partition=1), stream="sb"))
    assert next_offsets(table) == {("orders", 0): 7, ("orders", 1): 705}
    assert rows(table) == sorted(records(0, 5, topic="clicks") + records(0, 7) + records(700, 705, partition=1))


def test_two_queries_whose_ledger_expired_start_at_once_where_delta_reports_the_history(
    query: Query, table: Path, described: Any, before_next_commit: BeforeNextCommit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slower one looks for the group before the batch of the faster one, and commits behind it: its batch must not
    have a higher number."""
    query.run(query.sink(table), 0, offset(0, one(0, 5)))
    expire_log(table)
    a, b = (Query(described, query.root.parent, name) for name in "ab")
    now = [time.time() // 3600 * 3600 + 1800]
    monkeypatch.setattr(table_writer, "time", SimpleNamespace(time=lambda: now[0]))

    def first() -> None:
        now[0] -= 1
        a.run(a.sink(table), 0, offset(0, one(5, 8), stream="sa"))
        now[0] += 1

    before_next_commit(lambda: before_next_commit(first))
    b.run(b.sink(table), 0, offset(0, one(5, 9), stream="sb"))
    assert offsets_in(table) == list(range(9))
    assert next_offsets(table) == {("orders", 0): 9}


def test_the_newest_version_is_looked_up_once_for_a_history(
    query: Query, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a request for the log's folder and one for its newest file."""
    there, looks, real = TableWriter(query.spark, str(table)), list[int](), LogFiles.newest
    there.exists()

    def newest(log: LogFiles) -> int:
        looks.append(real(log))
        return looks[-1]

    monkeypatch.setattr(LogFiles, "newest", newest)
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    looks.clear()
    assert there.history().version == 1
    assert looks == [1]


def test_a_thousand_foreign_commits_between_two_of_the_group_do_not_hide_the_ledger(query: Query, table: Path) -> None:
    stale = query.sink(table)
    query.run(stale, 0, offset(0, one(0, 10)))
    query.run(query.sink(table), 1, offset(1, one(10, 11)))
    foreign_commits(table, FAR)
    for sink in (stale, query.sink(table)):
        query.run(sink, 1, offset(1, one(10, 11)))
    query.run(stale, 2, offset(2, one(5, 12)))
    assert rows(table) == records(0, 12)


# Other writers


def test_foreign_appends_before_between_and_during_batches_do_not_affect_the_query(
    query: Query, table: Path, before_next_commit: BeforeNextCommit
) -> None:
    def foreign(start: int, end: int) -> None:
        frame = query.spark.createDataFrame(records(start, end, topic="foreign"), SCHEMA)
        there = table_writer.TableWriter(query.spark, str(table))
        there.commit(there.history(), frame, {"theirs": start}, "not ours", needed=True)

    sink = query.sink(table)
    foreign(0, 2)
    query.run(sink, 0, offset(0, one(0, 10)))
    before_next_commit(lambda: foreign(2, 4))
    query.run(sink, 1, offset(1, one(10, 20)))
    query.run(query.sink(table), 1, offset(1, one(10, 20)))
    assert rows(table) == sorted(records(0, 20) + records(0, 4, topic="foreign"))
    assert next_offsets(table) == {("orders", 0): 20}


@pytest.mark.parametrize("number", [1, 2])
def test_a_native_commit_with_a_number_that_the_table_has_already_is_a_lost_race(
    query: Query, table: Path, number: int
) -> None:
    """``deltalake`` compares it only with the numbers of commits that came in between."""
    for n in range(2):
        query.run(query.sink(table), n, offset(n, one(n * 10, n * 10 + 10)))
    there = TableWriter(query.spark, str(table))
    with pytest.raises(CommitRace, match=f"has the number 2 already, and the commit has {number}"):
        there.commit(there.history(), None, {"spark-group-source.etl": number}, "note", needed=True)
    assert DeltaTable(table).version() == 2


def test_two_writers_that_race_for_every_number_write_each_record_once(
    query: Query, new_query: NewQuery, table: Path
) -> None:
    """Both have the same records: one of the two wins each number, and the other leaves the records out."""
    query.run(query.sink(table), 0, offset(0, one(0, 1)))

    def write(name: str) -> None:
        mine = new_query(name)
        sink = mine.sink(table)
        for n in range(20):
            mine.run(sink, n, offset(n, one(n * 5, n * 5 + 6), stream=name))

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(write, name) for name in ("a", "b")]:
            done.result()
    assert rows(table) == records(0, 101)
    assert next_offsets(table) == {("orders", 0): 101}
    numbers = [txn["version"] for commit in commits(table) for txn in actions(commit, "txn")]
    assert numbers == list(range(1, len(numbers) + 1)), "each number once, without gaps"


def test_a_table_that_is_deleted_while_the_query_runs_is_not_silently_recreated(query: Query, table: Path) -> None:
    sink = query.sink(table)
    for n in range(3):
        query.run(sink, n, offset(n, one(n * 10, n * 10 + 10)))
    rmtree(table)
    with pytest.raises(LedgerConflict, match="was deleted or replaced while the query runs"):
        query.run(sink, 3, offset(3, one(30, 40)))
    assert not list(table.glob("_delta_log/*.json"))
    query.run(query.sink(table), 3, offset(3, one(30, 40)))
    with pytest.raises(LedgerConflict, match="was deleted or replaced while the query runs"):
        query.run(sink, 4, offset(4, one(40, 50)))
    assert rows(table) == records(30, 40)


def read_again(query: Query, table: Path) -> set[TopicPartition]:
    """Return the partitions whose records may be in the table twice, of a history without findings."""
    again: set[TopicPartition] = set()
    history = sorted(TableWriter(query.spark, str(table)).history().commits(), key=lambda commit: commit.version)
    assert not [*verification._check_history(str(table), "etl", history, again)]
    return again


@pytest.mark.parametrize("end", [8, 10, 15])
def test_records_of_a_truncated_log_may_be_in_the_table_twice(query: Query, table: Path, end: int) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    query.run(query.sink(table), 1, offset(1, one(6, end), truncated_after={("orders", 0): 3}))
    assert rows(table) == sorted(records(0, 10) + records(6, end))
    assert read_again(query, table) == {P0}


def test_partitions_that_are_first_read_later_were_not_truncated(query: Query, table: Path) -> None:
    """Their records in the table twice are a finding of ``ledger verify``, not a note."""
    for n, ranges in enumerate([one(0, 10), {("orders", 1): (0, 5), ("clicks", 0): (0, 5)}]):
        epochs = {TopicPartition(*tp): 5 for tp in ranges}
        query.run(query.sink(table), n, replace(offset(n, ranges), leader_epochs=epochs))
    assert read_again(query, table) == set()


@pytest.mark.parametrize("more", [0, 3])
def test_a_table_that_is_recreated_with_as_many_commits_or_more_while_the_query_runs_is_another_one(
    query: Query, new_query: NewQuery, table: Path, more: int
) -> None:
    sink = query.sink(table)
    for n in range(3):
        query.run(sink, n, offset(n, one(n * 10, n * 10 + 10)))
    rmtree(table)
    other = new_query("other")
    for n in range(3 + more):
        spans = one(n * 10, n * 10 + 10, topic="clicks")
        other.run(other.sink(table), n, offset(n, spans, group="ops", stream="s2"))
    assert DeltaTable(table).version() == 3 + more
    with pytest.raises(LedgerConflict, match="was deleted or replaced while the query runs"):
        query.run(sink, 3, offset(3, one(30, 40)))
    assert DeltaTable(table).version() == 3 + more
