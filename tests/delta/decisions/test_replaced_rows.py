"""Commits of others that removed rows: which are refused, and how the query continues after the printed commands."""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable, write_deltalake
from offset_model import P0, SERVERS, OffsetModel
from printed_commands import commands
from run_printed import FOLLOWED, commit_late, continue_query, refused, run_command
from sink_helpers import (
    FAR,
    BeforeNextCommit,
    ListedCommits,
    NewQuery,
    Query,
    expire_log,
    foreign_commits,
    next_offsets,
    offsets_in,
    one,
    records,
    rewrite,
    rows,
)
from sink_source import offset
from table_changes import ByFiles
from typer.testing import CliRunner

from spark_group_source.cli.app import app
from spark_group_source.delta.ledger_format import Ledger
from spark_group_source.delta.ledger_store import read_ledger, set_ledger, transfer_ledger
from spark_group_source.delta.replaced_rows import Replacement, find_replacement, ledger_of_rows
from spark_group_source.delta.table_history import (
    Commit,
    DescribedHistory,
    LedgerExpired,
    LogFiles,
    TableHistory,
    note_of,
)
from spark_group_source.errors import LedgerConflict
from spark_group_source.kafka.translation import CommittedOffset
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.identifiers import Note, note_text

P1 = TopicPartition("orders", 1)


# RESTORE


def test_a_restore_to_before_the_groups_first_commit_is_refused_also_after_a_reset(query: Query, table: Path) -> None:
    """A reset has no rows, so it does not show where those of a partition start."""
    query.run(query.sink(table), 0, offset(0, one(5, 20)))
    set_ledger(query.spark, str(table), "etl", {P0: 20}, reason="reset", reset_number=1)
    DeltaTable(table).restore(0)
    with pytest.raises(LedgerConflict, match=r"removed rows of group 'etl': orders-0\[5,20\)"):
        query.run(query.sink(table), 1, offset(1, one(20, 30), reset_number=1))
    found = read_ledger(query.spark, str(table), "etl")
    assert found is not None and found.offsets == {P0: 5}


def test_a_restore_to_before_the_groups_first_commit_needs_no_older_log(query: Query, table: Path) -> None:
    expire_log(table)
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    DeltaTable(table).restore(min(int(path.stem) for path in (table / "_delta_log").glob("*.json")))
    found = read_ledger(query.spark, str(table), "etl")
    assert found is not None and found.offsets == {P0: 0}


def test_content_that_is_set_after_a_restore_may_have_brought_back_its_rows(query: Query, table: Path) -> None:
    """The table is empty, so the overwrite removes no row."""
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    old = DeltaTable(table).to_pyarrow_table()
    DeltaTable(table).restore(0)
    write_deltalake(table, old, mode="overwrite")
    with pytest.raises(LedgerConflict, match=r"version 3 of .* \(WRITE\) removed rows after .* is unknown"):
        query.run(query.sink(table), 1, offset(1, one(10, 20)))


def test_a_running_query_whose_table_was_replaced_after_its_ledger_expired_is_refused(
    query: Query, table: Path
) -> None:
    sink = query.sink(table)
    query.run(sink, 0, offset(0, one(0, 10)))
    expire_log(table)
    ByFiles().replace(table, DeltaTable(table).version())
    with pytest.raises(LedgerConflict, match="was deleted or replaced while the query runs"):
        query.run(sink, 1, offset(1, one(10, 20)))
    with pytest.raises(LedgerConflict, match="rows of the table were replaced since then"):
        query.run(query.sink(table), 1, offset(1, one(10, 20)))


def test_a_restore_is_refused_and_after_a_reset_to_the_ledger_every_record_is_in_the_table_once(
    query: Query, table: Path
) -> None:
    sink = query.sink(table)
    for n in range(3):
        query.run(sink, n, offset(n, {("orders", 0): (n * 10, n * 10 + 10), ("orders", 1): (7, 7 + n)}))
    DeltaTable(table).restore(1)
    for again in (sink, query.sink(table)):
        with pytest.raises(
            LedgerConflict, match=r"(?s)restored to version 1 .* orders-0\[10,30\), orders-1\[7,9\).*--to-led"
        ):
            query.run(again, 3, offset(3, one(30, 40)))
    assert rows(table) == records(0, 10)
    there = read_ledger(query.spark, str(table), "etl")
    assert there is not None and there.offsets == {P0: 10, P1: 7}, "the position of `reset --to-ledger`"
    set_ledger(query.spark, str(table), "etl", there.offsets, reason="--to-ledger", reset_number=1)
    query.run(query.sink(table), 3, offset(3, one(30, 40)))
    followed = [("orders", 0), ("orders", 1)]
    last = offset(4, {("orders", 0): (10, 50), ("orders", 1): (7, 9)}, followed=followed, reset_number=1)
    query.run(sink, 4, last)
    assert rows(table) == sorted(records(0, 50) + records(7, 9, partition=1))


def test_a_restore_during_a_batch_refuses_that_batch(
    query: Query, table: Path, before_next_commit: BeforeNextCommit
) -> None:
    sink = query.sink(table)
    for n in range(2):
        query.run(sink, n, offset(n, one(n * 10, n * 10 + 10)))
    before_next_commit(lambda: DeltaTable(table).restore(1))
    with pytest.raises(LedgerConflict, match=r"restored to version 1 .*orders-0\[10,20\)"):
        query.run(sink, 2, offset(2, one(20, 30)))
    assert rows(table) == records(0, 10)


def test_a_restore_that_removes_no_rows_of_the_group_is_ignored(query: Query, table: Path) -> None:
    sink = query.sink(table)
    query.run(sink, 0, offset(0, one(0, 10)))
    DeltaTable(table).delete("offset < 5")
    DeltaTable(table).restore(1)
    for n in (1, 2):
        query.run(sink, n, offset(n, one(n * 10, n * 10 + 10)))
    query.run(query.sink(table), 3, offset(3, one(30, 40)))
    assert rows(table) == records(0, 40)


def test_a_second_restore_to_an_older_version_is_followed(query: Query, table: Path) -> None:
    spark, sink = query.spark, query.sink(table)
    for n in range(2):
        query.run(sink, n, offset(n, one(100 + n * 10, 110 + n * 10)))
    for version, position in ((1, 110), (0, 100)):
        DeltaTable(table).restore(version)
        there = read_ledger(spark, str(table), "etl")
        assert there is not None and there.offsets == {P0: position}, "without rows: where the first batch started"
    DeltaTable(table).restore(2)
    query.run(sink, 2, offset(2, one(120, 130)))
    assert rows(table) == records(100, 130)


def by_timestamp(info: dict[str, Any]) -> None:
    """Delta records the local time of the session that ran a RESTORE, without the time zone."""
    info["operationParameters"] = {"version": None, "timestamp": "1999-12-31 23:59:59.000"}


@pytest.mark.parametrize("compacted", [False, True])
def test_the_version_of_a_restore_by_timestamp_is_found_by_the_actions_of_the_log(
    query: Query, table: Path, compacted: bool
) -> None:
    for n in range(3):
        query.run(query.sink(table), n, offset(n, one(n * 10, n * 10 + 10)))
    if compacted:
        DeltaTable(table).optimize.compact()
        DeltaTable(table).delete("offset < 5")
    DeltaTable(table).restore(2)
    newest = DeltaTable(table).version()
    rewrite(table, newest, "commitInfo", by_timestamp)
    there = read_ledger(query.spark, str(table), "etl")
    assert there is not None and there.offsets == {P0: 20}
    with pytest.raises(LedgerConflict, match=r"restored to version 2 .*orders-0\[20,30\)"):
        query.run(query.sink(table), 3, offset(3, one(30, 40)))


def test_a_restore_by_timestamp_is_refused_if_two_versions_with_other_rows_in_between_have_its_files(
    query: Query, table: Path
) -> None:
    """Before a batch, and after its rows were deleted on purpose: the first is behind the batch, the second is not."""
    for n in range(2):
        query.run(query.sink(table), n, offset(n, one(n * 10, n * 10 + 10)))
    DeltaTable(table).delete("offset >= 10")
    query.run(query.sink(table), 2, offset(2, one(20, 30)))
    DeltaTable(table).restore(1)
    rewrite(table, 5, "commitInfo", by_timestamp)
    with pytest.raises(LedgerConflict, match=r"version 5 .*\(RESTORE\) removed rows .* is unknown"):
        query.run(query.sink(table), 3, offset(3, one(30, 40)))


def test_a_restore_by_timestamp_to_a_version_that_left_the_log_is_refused_and_not_guessed(
    query: Query, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = query.sink(table)
    for n in range(3):
        query.run(sink, n, offset(n, one(n * 10, n * 10 + 10)))
    DeltaTable(table).restore(1)
    rewrite(table, 4, "commitInfo", by_timestamp)
    for version in (0, 1, 2):
        (table / "_delta_log" / f"{version:020}.json").unlink()
    for each in (sink, query.sink(table)):
        with pytest.raises(LedgerConflict, match=r"version 4 .*\(RESTORE\) removed rows .* is unknown"):
            query.run(each, 3, offset(3, one(30, 40)))
    with pytest.raises(LedgerConflict, match="is unknown"):
        read_ledger(query.spark, str(table), "etl")


# Bounds of a search: nothing is concluded from a log that ends


def test_a_restore_is_found_behind_and_across_a_thousand_foreign_commits(query: Query, table: Path) -> None:
    stale = query.sink(table)
    query.run(stale, 0, offset(0, one(0, 10)))
    foreign_commits(table, FAR)
    query.run(stale, 1, offset(1, one(10, 20)))
    DeltaTable(table).restore(1)
    foreign_commits(table, FAR)
    for sink in (stale, query.sink(table)):
        with pytest.raises(LedgerConflict, match=r"restored to version 1 .*orders-0\[10,20\)"):
            query.run(sink, 2, offset(2, one(20, 30)))
    for source in (LogFiles(str(table), str(table), DeltaTable(table)), Described(table)):
        found = ledger_of_rows(TableHistory(source), "etl")
        assert found is not None and found.offsets == {P0: 10}


class Described(DescribedHistory):
    """The history as ``DESCRIBE HISTORY`` returns it, with its LIMIT."""

    def __init__(self, table: Path) -> None:
        self.table, self._log, self._loaded = str(table), LogFiles(str(table), str(table), DeltaTable(table)), []

    def _load(self, limit: int | None) -> list[Commit]:
        newest = self._log.newest()
        return list(self._log.commits(newest, -1 if limit is None else newest - limit))


def test_a_restore_to_a_version_whose_ledger_left_the_log_is_refused_until_a_reset(
    query: Query, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(3):
        query.run(query.sink(table), n, offset(n, one(n * 10, n * 10 + 10)))
        if n == 1:
            DeltaTable(table).create_checkpoint()
    DeltaTable(table).restore(2)
    for version in (0, 1, 2):
        (table / "_delta_log" / f"{version:020}.json").unlink()
    with pytest.raises(LedgerConflict, match=r"\(RESTORE\) removed rows .* is unknown"):
        query.run(query.sink(table), 3, offset(3, one(30, 40)))
    set_ledger(query.spark, str(table), "etl", {P0: 20}, reason="reset", reset_number=1)
    query.run(query.sink(table), 4, offset(4, one(20, 40), followed=[("orders", 0)], reset_number=1))
    assert offsets_in(table) == list(range(40))


def test_a_partition_of_a_recreated_topic_is_not_taken_back_to_where_the_former_topic_began(
    query: Query, table: Path
) -> None:
    query.run(query.sink(table), 0, offset(0, one(100, 110)))
    query.run(query.sink(table), 1, offset(1, one(3, 10), topic_id="id-2"))
    DeltaTable(table).restore(0)
    there = read_ledger(query.spark, str(table), "etl")
    assert there is not None and there.offsets == {P0: 3}


def test_a_restore_to_before_a_reset_that_found_a_topic_deleted_is_refused_with_commands(
    query: Query, table: Path
) -> None:
    both: dict[str, Any] = {"topic_ids": {"orders": "id-1", "gone": "id-2"}}
    query.run(query.sink(table), 0, replace(offset(0, one(0, 5) | one(0, 5, topic="gone")), **both))
    query.run(query.sink(table), 1, replace(offset(1, one(5, 9) | one(5, 7, topic="gone")), **both))
    set_ledger(query.spark, str(table), "etl", {P0: 9}, reason="", reset_number=1, topic_ids={}, deleted=["gone"])
    later: dict[str, Any] = {"topic_ids": {"orders": "id-1"}, "reset_number": 1}
    query.run(query.sink(table), 2, replace(offset(2, one(9, 12)), **later))
    DeltaTable(table).restore(1)
    with pytest.raises(LedgerConflict, match=r"(?s)removed rows of group 'etl': orders-0\[5,12\)\..*--to-ledger"):
        query.run(query.sink(table), 3, replace(offset(3, one(12, 14)), **later))
    there = read_ledger(query.spark, str(table), "etl")
    assert there is not None and there.offsets == {P0: 5}


UNKNOWN = r"\(RESTORE\) removed rows after .* is unknown"


@pytest.mark.proves("G4", level="core")
@pytest.mark.parametrize("end", [60, 100, 120])
def test_a_restore_to_before_a_reset_that_read_deleted_rows_again_is_refused(
    query: Query, table: Path, end: int
) -> None:
    """The ledger of the restored version counts the deleted rows."""
    query.run(query.sink(table), 0, offset(0, one(0, 100)))
    DeltaTable(table).delete("offset >= 60")
    deleted = DeltaTable(table).version()
    set_ledger(query.spark, str(table), "etl", {P0: 60}, reason="reset", reset_number=1)
    query.run(query.sink(table), 1, offset(1, one(60, end), followed=[("orders", 0)], reset_number=1))
    DeltaTable(table).restore(deleted)
    with pytest.raises(LedgerConflict, match=UNKNOWN):
        query.run(query.sink(table), 2, offset(2, one(end, 130), reset_number=1))
    DeltaTable(table).restore(deleted - 1)
    there = read_ledger(query.spark, str(table), "etl")
    assert there is not None and there.offsets == {P0: 100}, "this version has the rows"


@pytest.mark.proves("G4", level="core")
@pytest.mark.usefixtures("published")
@pytest.mark.parametrize("times", [1, 2])
def test_the_command_after_a_restore_that_undoes_reading_deleted_rows_again(
    query: Query, table: Path, admin: OffsetModel, times: int
) -> None:
    """The rows were deleted behind the restored version, and before a former time that they were read again."""
    query.run(query.sink(table), 0, offset(0, one(0, 100)))
    end = 100
    for n in range(1, times + 1):
        good = DeltaTable(table).version()
        DeltaTable(table).delete()
        set_ledger(query.spark, str(table), "etl", {P0: 0}, reason="reset", reset_number=n)
        end = 50 if n == times else 100
        query.run(query.sink(table), n, offset(n, one(0, end), followed=FOLLOWED, reset_number=n))
    admin.offsets[P0] = CommittedOffset(end, note_text(Note("s1", times, times)))
    DeltaTable(table).restore(good)
    refused_batch = offset(9, one(50, 60), reset_number=times)
    message = refused(lambda: query.run(query.sink(table), 9, refused_batch))
    assert "brought back rows of group 'etl': orders-0[50,100)." in str(message)
    (command,) = commands(message)
    run_command(command)
    query.run(query.sink(table), 9, refused_batch)
    continue_query(query, table, admin, 10, 130)
    assert rows(table) == records(0, 130)


def test_a_restore_to_before_a_reset_that_read_left_out_records_is_refused(query: Query, table: Path) -> None:
    """A reset before it had left them out."""
    query.run(query.sink(table), 0, offset(0, one(0, 50)))
    set_ledger(query.spark, str(table), "etl", {P0: 100}, reason="reset", reset_number=1)
    left_out = DeltaTable(table).version()
    set_ledger(query.spark, str(table), "etl", {P0: 50}, reason="reset", reset_number=2)
    query.run(query.sink(table), 1, offset(1, one(50, 80), followed=FOLLOWED, reset_number=2))
    DeltaTable(table).restore(left_out)
    with pytest.raises(LedgerConflict, match=UNKNOWN):
        query.run(query.sink(table), 2, offset(2, one(80, 90), reset_number=2))


@pytest.mark.proves("G4", level="core")
def test_a_restore_to_before_a_reset_over_rows_that_a_former_group_deleted_is_refused(
    query: Query, new_query: NewQuery, table: Path
) -> None:
    """Nothing but the first ledger of the group shows which of these rows there were."""
    query.run(query.sink(table), 0, offset(0, one(0, 100), group="old"))
    DeltaTable(table).delete("offset >= 60")
    transfer_ledger(query.spark, str(table), "old", str(table), "new", execute=True)
    renamed = DeltaTable(table).version()
    set_ledger(query.spark, str(table), "new", {P0: 60}, reason="reset", reset_number=2)
    other = new_query("other")
    more: dict[str, Any] = {"group": "new", "stream": "s2", "reset_number": 2}
    other.run(other.sink(table), 0, offset(0, one(60, 80), followed=FOLLOWED, **more))
    DeltaTable(table).restore(renamed)
    with pytest.raises(LedgerConflict, match=UNKNOWN):
        other.run(other.sink(table), 1, offset(1, one(80, 90), **more))


def test_a_restore_to_below_where_a_reset_moved_the_ledger_has_a_known_ledger(query: Query, table: Path) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 50)))
    query.run(query.sink(table), 1, offset(1, one(50, 100)))
    set_ledger(query.spark, str(table), "etl", {P0: 80}, reason="reset", reset_number=1)
    DeltaTable(table).restore(1)
    there = read_ledger(query.spark, str(table), "etl")
    assert there is not None and there.offsets == {P0: 50}


@pytest.mark.proves("G4", level="core")
@pytest.mark.parametrize("end", [80, 100, 120])
def test_a_restore_to_before_a_truncation_is_refused(query: Query, table: Path, end: int) -> None:
    """Other records have the offsets of the restored rows."""
    query.run(query.sink(table), 0, replace(offset(0, one(0, 100)), leader_epochs={P0: 3}))
    after = offset(1, one(60, end), truncated_after={("orders", 0): 3})
    query.run(query.sink(table), 1, replace(after, leader_epochs={P0: 5}))
    DeltaTable(table).restore(1)
    with pytest.raises(LedgerConflict, match=UNKNOWN):
        query.run(query.sink(table), 2, replace(offset(2, one(end, 130)), leader_epochs={P0: 5}))


@pytest.mark.proves("G4", level="core")
@pytest.mark.usefixtures("published")
def test_rows_behind_a_restored_ledger_are_not_written_again(query: Query, table: Path, admin: OffsetModel) -> None:
    """Another stream had read them after a truncation, below which the ledger was in the restored version."""
    query.run(query.sink(table), 0, replace(offset(0, one(0, 60)), leader_epochs={P0: 3}))
    query.run(query.sink(table), 1, replace(offset(0, one(60, 80), stream="s2"), leader_epochs={P0: 5}))
    after = offset(1, one(55, 57), truncated_after={("orders", 0): 3})
    query.run(query.sink(table), 2, replace(after, leader_epochs={P0: 5}))
    restored, there = DeltaTable(table).version(), rows(table)
    query.run(query.sink(table), 3, replace(offset(2, one(57, 90)), leader_epochs={P0: 5}))
    admin.commit(90)
    DeltaTable(table).restore(restored)
    refused_batch = offset(3, one(90, 95))
    run_command(commands(refused(lambda: query.run(query.sink(table), 4, refused_batch)))[0])
    continue_query(query, table, admin, 5, 90)
    assert rows(table) == sorted(there + records(57, 60) + records(80, 90))


@pytest.mark.proves("G4", level="core")
@pytest.mark.parametrize("batches", [0, 1])
def test_a_restore_to_before_a_rename_of_the_group_is_refused(
    query: Query, new_query: NewQuery, table: Path, batches: int
) -> None:
    """The rows that the new group's first ledger counts are of the former group."""
    query.run(query.sink(table), 0, offset(0, one(0, 6), group="old"))
    query.run(query.sink(table), 1, offset(1, one(6, 10), group="old"))
    transfer_ledger(query.spark, str(table), "old", str(table), "new", execute=True)
    other = new_query("other")
    more: dict[str, Any] = {"group": "new", "stream": "s2", "reset_number": 1}
    for n in range(batches):
        other.run(other.sink(table), n, offset(n, one(10, 20), **more))
    DeltaTable(table).restore(1)
    start = 10 + 10 * batches
    with pytest.raises(LedgerConflict, match=UNKNOWN):
        other.run(other.sink(table), batches, offset(batches, one(start, start + 10), **more))
    assert rows(table) == records(0, 6)


@pytest.mark.usefixtures("published")
def test_the_command_after_a_restore_to_before_a_first_ledger_at_the_first_record(
    query: Query, table: Path, admin: OffsetModel
) -> None:
    """The ledger that the reset set counts no rows of other writers."""
    DeltaTable(table).alter.set_table_properties({"their.own": "1"}, raise_if_not_exists=False)
    set_ledger(query.spark, str(table), "etl", {P0: 0}, reason="reset", reset_number=1)
    query.run(query.sink(table), 0, offset(0, one(0, 50), followed=FOLLOWED, reset_number=1))
    admin.offsets[P0] = CommittedOffset(50, note_text(Note("s1", 0, 1)))
    DeltaTable(table).restore(0)
    refused_batch = offset(1, one(50, 60), reset_number=1)
    message = refused(lambda: query.run(query.sink(table), 1, refused_batch))
    assert "removed rows of group 'etl': orders-0[0,50)." in str(message)
    run_command(commands(message)[0])
    query.run(query.sink(table), 1, refused_batch)
    continue_query(query, table, admin, 2, 60)
    assert rows(table) == records(0, 60)


# DELETE is the user's; overwrites are refused. ``test_verdicts.py`` has the other commands.


def test_rows_removed_by_delete_stay_missing(query: Query, table: Path) -> None:
    """The ledger knows what was written: the query continues."""
    sink = query.sink(table)
    query.run(sink, 0, offset(0, one(0, 10)))
    DeltaTable(table).delete("offset < 5")
    assert rows(table) == records(5, 10)
    query.run(sink, 1, offset(1, one(10, 20)))
    query.run(query.sink(table), 2, offset(2, one(20, 30)))
    assert rows(table) == records(5, 30)
    assert next_offsets(table) == {("orders", 0): 30}


def overwrite(table: Path) -> None:
    write_deltalake(table, DeltaTable(table).to_pyarrow_table().slice(5), mode="overwrite")


def test_the_batch_after_an_overwrite_is_refused(query: Query, table: Path) -> None:
    """``test_commands_after_rows_were_replaced`` runs the commands of the message."""
    sink = query.sink(table)
    for n in range(2):
        query.run(sink, n, offset(n, one(n * 10, n * 10 + 10)))
    overwrite(table)
    there = rows(table)
    for each in (sink, query.sink(table)):
        with pytest.raises(LedgerConflict, match=r"version 3 of .* removed rows after the last commit of group 'etl'"):
            query.run(each, 2, offset(2, one(20, 30)))
    assert rows(table) == there
    with pytest.raises(LedgerConflict, match="removed rows"):
        read_ledger(query.spark, str(table), "etl")


def test_an_overwrite_during_a_batch_refuses_that_batch(
    query: Query, table: Path, before_next_commit: BeforeNextCommit
) -> None:
    sink = query.sink(table)
    query.run(sink, 0, offset(0, one(0, 10)))
    before_next_commit(lambda: overwrite(table))
    with pytest.raises(LedgerConflict, match="removed rows"):
        query.run(sink, 1, offset(1, one(10, 20)))
    with pytest.raises(LedgerConflict, match="removed rows"):
        query.run(query.sink(table), 2, offset(2, one(20, 30)))


def test_an_overwrite_before_the_groups_last_commit_is_settled(query: Query, table: Path) -> None:
    other = offset(0, one(0, 10, topic="others"), group="another", stream="s2")
    query.run(query.sink(table), 9, other)
    overwrite(table)
    for n in range(2):
        query.run(query.sink(table), n, offset(n, one(n * 10, n * 10 + 10)))
    assert rows(table) == records(0, 20) + records(5, 10, topic="others")


# The commands that the refusals print


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize(("number", "missing"), [(0, False), (1, True)], ids=["written again", "left out"])
def test_commands_after_a_restore(query: Query, table: Path, admin: OffsetModel, number: int, missing: bool) -> None:
    for n in range(3):
        query.run(query.sink(table), n, offset(n, one(n * 10, n * 10 + 10)))
    admin.commit(30)
    DeltaTable(table).restore(1)
    refused_batch = offset(3, one(30, 40))
    printed = commands(refused(lambda: query.run(query.sink(table), 3, refused_batch)))
    assert "--to-further" in printed[1]
    run_command(printed[number])
    query.run(query.sink(table), 3, refused_batch)
    continue_query(query, table, admin, 4, 50)
    assert rows(table) == (records(0, 10) + records(30, 50) if missing else records(0, 50))


@pytest.mark.usefixtures("published")
def test_the_command_after_a_restore_that_brought_rows_back(query: Query, table: Path, admin: OffsetModel) -> None:
    for n in range(3):
        query.run(query.sink(table), n, offset(n, one(n * 10, n * 10 + 10)))
    admin.commit(30)
    DeltaTable(table).restore(1)
    run_command(commands(refused(lambda: query.run(query.sink(table), 3, offset(3, one(30, 40)))))[0])
    DeltaTable(table).restore(2)
    refused_batch = offset(3, one(10, 30), reset_number=1)
    message = refused(lambda: query.run(query.sink(table), 3, refused_batch))
    assert "which brought back rows of group 'etl': orders-0[10,20). The next batch could write records" in str(message)
    (command,) = commands(message)
    run_command(command)
    query.run(query.sink(table), 3, refused_batch)
    continue_query(query, table, admin, 4, 50)
    assert rows(table) == records(0, 50)


@pytest.mark.usefixtures("published")
def test_a_reset_during_a_restore_leaves_the_ledger_and_works_when_it_is_repeated(
    query: Query, table: Path, admin: OffsetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(2):
        query.run(query.sink(table), n, offset(n, one(n * 10, n * 10 + 10)))
    admin.commit(20)
    move = admin.move_committed

    def restore_meanwhile(
        group: str, offsets: Mapping[TopicPartition, int], *, notes: Mapping[TopicPartition, str]
    ) -> None:
        move(group, offsets, notes=notes)
        DeltaTable(table).restore(1)

    reset = shlex.join(["spark-group", "reset", "--bootstrap-servers", SERVERS, "--group", "etl", "--to-ledger"])
    reset += f" --table {table} --execute"
    with monkeypatch.context() as patched:
        patched.setattr(admin, "move_committed", restore_meanwhile)
        shown = CliRunner().invoke(app, shlex.split(reset)[1:])
    assert shown.exit_code == 1 and "was changed by RESTORE (its version 3) while the reset was running" in shown.output
    assert commands(shown.output) == [reset], "the ledger is read again: other offsets than before fit the rows"
    refused(lambda: query.run(query.sink(table), 2, offset(2, one(20, 30), followed=FOLLOWED, reset_number=1)))
    run_command(reset)
    query.run(query.sink(table), 2, offset(2, one(20, 30), followed=FOLLOWED, reset_number=1))
    continue_query(query, table, admin, 3, 30)
    assert rows(table) == records(0, 30)


@pytest.mark.usefixtures("published")
def test_commands_for_a_batch_behind_a_restore(query: Query, table: Path, admin: OffsetModel) -> None:
    for n in range(2):
        query.run(query.sink(table), n, offset(n, one(n * 10, n * 10 + 10)))
    DeltaTable(table).restore(1)
    ledger = read_ledger(query.spark, str(table), "etl")
    assert ledger is not None
    # Decided at version 2 and committed after the RESTORE, as Delta allows with writer options.
    commit_late(query, table, ledger, offset(2, one(20, 30)))
    admin.commit(30)
    printed = commands(refused(lambda: query.run(query.sink(table), 3, offset(3, one(30, 40)))))
    assert [command.split()[0] for command in printed] == ["RESTORE", "spark-group"]
    for command in printed:
        run_command(command)
    query.run(query.sink(table), 3, offset(3, one(30, 40)))
    continue_query(query, table, admin, 4, 40)
    assert offsets_in(table) == list(range(40))


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize("behind", [False, True], ids=["before", "during a batch"])
@pytest.mark.parametrize("kept", [False, True], ids=["taken back", "kept"])
def test_commands_after_rows_were_replaced(
    query: Query, table: Path, admin: OffsetModel, kept: bool, behind: bool
) -> None:
    for n in range(2):
        query.run(query.sink(table), n, offset(n, one(n * 10, n * 10 + 10)))
    ledger = read_ledger(query.spark, str(table), "etl")
    write_deltalake(table, DeltaTable(table).to_pyarrow_table().slice(5), mode="overwrite")
    left = offsets_in(table)
    if behind:  # decided at version 2 and committed after the overwrite, as Delta allows with writer options
        assert ledger is not None
        commit_late(query, table, ledger, offset(2, one(20, 30)))
    start = 30 if behind else 20
    admin.commit(start)
    refused_batch = offset(3, one(start, 40))
    back, to_ledger, keep = commands(refused(lambda: query.run(query.sink(table), 3, refused_batch)))
    assert back.startswith("RESTORE") and "--to-further" in keep
    for command in [keep] if kept else [back, to_ledger]:
        run_command(command)
    query.run(query.sink(table), 3, refused_batch)
    continue_query(query, table, admin, 4, 50)
    assert offsets_in(table) == (sorted([*left, *range(20, 50)]) if kept else list(range(50)))


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize("times", [1, 2])
def test_an_overwritten_table_is_taken_back_to_the_version_before_the_overwrites(
    query: Query, table: Path, admin: OffsetModel, times: int
) -> None:
    for n in range(2):
        query.run(query.sink(table), n, offset(n, one(n * 10, n * 10 + 10)))
    admin.commit(20)
    for version in range(times):
        write_deltalake(table, DeltaTable(table, version=version).to_pyarrow_table(), mode="overwrite")
    restore, to_ledger, _ = commands(refused(lambda: query.run(query.sink(table), 2, offset(2, one(20, 30)))))
    assert restore == f"RESTORE TABLE delta.`{table}` TO VERSION AS OF 2"
    for command in (restore, to_ledger):
        run_command(command)
    query.run(query.sink(table), 2, offset(2, one(20, 30)))
    continue_query(query, table, admin, 3, 40)
    assert rows(table) == records(0, 40)


# The search


def batch(version: int, *, read: int | None = None) -> Commit:
    known = version - 1 if read is None else read
    note = note_of({"etl": Ledger(group="etl").to_json_dict()}, read=known)
    return Commit.of(version, {"readVersion": version - 1, "operation": "WRITE", "userMetadata": note})


def restore(version: int, to: int) -> Commit:
    return Commit.of(version, {"operation": "RESTORE", "operationParameters": {"version": to}})


def test_a_restore_between_decision_and_commit_is_found_behind_the_batch() -> None:
    def found(*commits: Commit) -> Replacement | None:
        return find_replacement(TableHistory(ListedCommits(Commit.of(0, {}), *commits)), "etl")

    assert found(batch(1), restore(2, 0), batch(3)) is None
    assert found(batch(1), restore(2, 0), batch(3, read=1)) == Replacement(2, "RESTORE", 0, 3)
    assert found(batch(1), restore(2, 0)) == Replacement(2, "RESTORE", 0)


@pytest.mark.parametrize(
    ("operation", "parameters", "unsettles"),
    [
        ("WRITE", {"mode": "Append"}, False),
        ("WRITE", {"mode": "Overwrite"}, True),
        ("STREAMING UPDATE", {"outputMode": "Complete"}, True),
        ("CREATE OR REPLACE TABLE AS SELECT", {}, True),
        ("CLONE", {}, True),
        ("RESTORE", {"version": 1}, True),
        ("DELETE", {}, False),
        ("OPTIMIZE", {}, False),
    ],
)
def test_without_the_logs_files_the_operation_shows_whether_rows_were_replaced(
    operation: str, parameters: dict[str, object], unsettles: bool
) -> None:
    info = {"operation": operation, "operationParameters": parameters}
    assert Commit.of(2, info).unsettles_ledger is unsettles
    assert not Commit.of(0, {"operation": "CLONE"}).unsettles_ledger, "the table's first commit removes nothing"


@pytest.mark.parametrize(
    ("operation", "unsettles"), [("DELETE", False), ("MERGE", False), ("TRUNCATE", False), ("REPLACE X", True)]
)
def test_a_removal_of_rows_by_an_unknown_operation_unsettles_the_ledger(operation: str, unsettles: bool) -> None:
    assert Commit.of(2, {"operation": operation}, removes_rows=True).unsettles_ledger is unsettles
    assert not Commit.of(2, {"operation": operation}, removes_rows=False).unsettles_ledger


def test_a_log_that_ends_before_the_decision_of_the_newest_batch_shows_nothing() -> None:
    with pytest.raises(LedgerExpired):
        find_replacement(TableHistory(ListedCommits(batch(8, read=5))), "etl")
    assert find_replacement(TableHistory(ListedCommits(batch(8))), "etl") is None
