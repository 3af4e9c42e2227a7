"""Every command in an error of the sink is complete: it is taken from the real message and run as printed.

Those after a ``RESTORE`` or an overwrite are in ``test_replaced_rows``.
"""

import json
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable, write_deltalake
from kit.frames import RUN_ID
from offset_model import P0, SERVERS, OffsetModel
from printed_commands import commands
from run_printed import FOLLOWED, continue_query, refused, run_command
from sink_helpers import NewQuery, Query, clone_of, created_table, expire_log, offsets_in, one, records, rows
from sink_helpers import commits as commits_of
from sink_source import Ranges, offset
from typer.testing import CliRunner

from spark_group_source.cli.app import app
from spark_group_source.delta import checkpoint, ledger_store
from spark_group_source.delta.checkpoint import QUERY_ID, PlannedBatch
from spark_group_source.delta.ledger_store import read_ledger, set_ledger
from spark_group_source.delta.table_writer import open_existing
from spark_group_source.delta.topic_sinks import DeltaSinks
from spark_group_source.errors import CommitFailed, LedgerConflict
from spark_group_source.kafka.translation import CommittedOffset, Topic
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.identifiers import Note, note_text, parse_note
from spark_group_source.protocol.offsets import RECREATED

pytestmark = pytest.mark.usefixtures("published")


@pytest.mark.parametrize(("number", "twice"), [(0, False), (1, True)], ids=["table", "kafka"])
def test_commands_after_a_foreign_commit_below_the_ledger(
    query: Query, table: Path, admin: OffsetModel, number: int, twice: bool
) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    admin.commit(4, foreign=True)
    refused_batch = offset(1, one(4, 20), followed=FOLLOWED)
    printed = commands(refused(lambda: query.run(query.sink(table), 1, refused_batch)))
    assert len(printed) == 2
    run_command(printed[number])
    query.run(query.sink(table), 1, refused_batch)
    continue_query(query, table, admin, 2, 20)
    assert rows(table) == sorted(records(0, 20) + (records(4, 10) if twice else []))


def test_a_batch_below_the_ledger_after_a_reset_without_the_table_names_the_reset(query: Query, table: Path) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    after_reset = offset(1, one(4, 20), followed=FOLLOWED, reset_number=3)
    message = str(refused(lambda: query.run(query.sink(table), 1, after_reset)))
    assert message.startswith(f"reset #3, which was run without --table {table}, or a foreign commit after it, put")


def test_command_that_writes_left_out_rows_again(
    query: Query, table: Path, admin: OffsetModel, caplog: pytest.LogCaptureFixture
) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    query.run(query.sink(table), 1, offset(1, one(4, 20)))
    admin.commit(20)
    assert rows(table) == records(0, 20)
    (printed,) = commands(caplog.text)
    run_command(printed)
    assert admin.position == 4
    continue_query(query, table, admin, 2, 20)
    assert rows(table) == sorted(records(0, 20) + records(4, 20))


@pytest.mark.parametrize(("number", "skipped"), [(0, False), (1, True)], ids=["table", "kafka"])
def test_commands_after_the_committed_offset_was_lost(
    query: Query, table: Path, admin: OffsetModel, number: int, skipped: bool
) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    admin.commit(15)  # as startingOffsets sets it
    refused_batch = offset(1, one(15, 20), started=[("orders", 0)])
    printed = commands(refused(lambda: query.run(query.sink(table), 1, refused_batch)))
    assert len(printed) == 2
    run_command(printed[number])
    query.run(query.sink(table), 1, refused_batch)
    continue_query(query, table, admin, 2, 20)
    assert rows(table) == records(0, 10) + records(15 if skipped else 10, 20)


def test_the_command_that_leaves_records_out_after_lost_offsets_writes_none_of_another_partition_again(
    query: Query, table: Path, admin: OffsetModel
) -> None:
    """``startingOffsets`` are above the ledger in one partition, and below it in the other one."""
    p1 = TopicPartition("orders", 1)
    admin.partitions.append(p1)
    query.run(query.sink(table), 0, offset(0, {P0: (0, 10), p1: (0, 10)}))
    admin.commit(15)
    admin.offsets[p1] = replace(admin.offsets[P0], offset=4)
    started = offset(1, {P0: (15, 20), p1: (4, 10)}, started=[P0, p1])
    _, leave_out = commands(refused(lambda: query.run(query.sink(table), 1, started)))
    run_command(leave_out)
    ledger = read_ledger(query.spark, str(table), "etl")
    assert ledger is not None and ledger.offsets == {P0: 15, p1: 10}


@pytest.mark.parametrize("failed", ["Kafka", "the table"])
def test_command_that_completes_a_relative_reset_does_not_move_the_group_twice(
    query: Query, table: Path, admin: OffsetModel, monkeypatch: pytest.MonkeyPatch, failed: str
) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    admin.commit(10)
    move = admin.move_committed

    def unanswered(group: str, offsets: Mapping[TopicPartition, int], *, notes: Mapping[TopicPartition, str]) -> None:
        move(group, offsets, notes=notes)
        raise CommitFailed("Kafka did not confirm the new offsets", moved=None)

    def lose_the_race(*_: object, **__: object) -> None:
        raise LedgerConflict("other writers won every attempt")

    command = f"spark-group reset --bootstrap-servers {SERVERS} --group etl --shift-by -4 --table {table} --execute"
    with monkeypatch.context() as patched:
        if failed == "Kafka":
            patched.setattr(admin, "move_committed", unanswered)
        else:
            patched.setattr(ledger_store, "set_ledger", lose_the_race)
        shown = CliRunner().invoke(app, shlex.split(command)[1:])
    assert shown.exit_code and admin.position == 6
    (completion,) = commands(shown.output)
    assert "moved in Kafka already. To complete this reset:" in shown.output
    run_command(completion)
    ledger = read_ledger(query.spark, str(table), "etl")
    assert ledger is not None and ledger.offsets == {P0: 6} and admin.position == 6
    continue_query(query, table, admin, 1, 20)
    assert rows(table) == sorted(records(0, 20) + records(6, 10))


def test_a_reset_that_kafka_refused_as_a_whole_names_no_command(
    query: Query, table: Path, admin: OffsetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    admin.commit(10)

    def refuse(*_: object, **__: object) -> None:
        raise CommitFailed("Kafka refused new offsets", moved=0)

    monkeypatch.setattr(admin, "move_committed", refuse)
    words = f"reset --bootstrap-servers {SERVERS} --group etl --shift-by -4 --table {table} --execute"
    assert CliRunner().invoke(app, words.split()).output == "error: CommitFailed: Kafka refused new offsets\n"


@pytest.mark.parametrize("position", ["ledger", "checkpoint", "checkpoint and table"])
def test_a_reset_to_offsets_of_a_topic_that_was_recreated_is_refused_and_its_command_loses_nothing(
    query: Query, table: Path, admin: OffsetModel, position: str
) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 50)))
    (query.root / "commits").mkdir()
    (query.root / "commits" / "0").write_text("v1")
    admin.recreate("id-2", 40)
    to = f"--to-ledger --table {table}" if position == "ledger" else f"--to-checkpoint {query.root}"
    to += f" --table {table}" if position == "checkpoint and table" else ""
    again = f"reset --bootstrap-servers {SERVERS} --group etl {to}"
    for execute in ([], ["--execute"]):
        shown = CliRunner().invoke(app, [*again.split(), *execute])
        assert shown.exit_code == 1
        for part in ("topic orders was deleted and recreated", "with id id-1", "has id id-2"):
            assert part in shown.output
    assert admin.offsets == {}
    (printed,) = commands(shown.output)
    assert "--to-earliest --topic orders" in printed and (f"--table {table}" in printed) == (position != "checkpoint")
    run_command(printed)
    assert admin.position == 0
    if position == "checkpoint":
        return
    recreated = offset(1, one(0, 40), stream="s2", topic_id="id-2", followed=FOLLOWED, reset_number=1)
    query.run(query.sink(table), 1, recreated)
    assert rows(table) == sorted(records(0, 50) + records(0, 40))
    (query.root / "commits" / "1").write_text("v1")
    admin.recreate("id-3", 10)  # the checkpoint is older than what the table has of this topic
    run_command(f"spark-group reset --bootstrap-servers {SERVERS} --group etl --to-earliest --topic orders "
                f"--table {table} --execute")  # fmt: skip
    query.run(query.sink(table), 2, offset(2, one(0, 7), stream="s3", topic_id="id-3", reset_number=2))
    (query.root / "commits" / "2").write_text("v1")
    to_former = f"reset --bootstrap-servers {SERVERS} --group etl --to-checkpoint {query.root} --batch 0".split()
    (printed,) = commands(CliRunner().invoke(app, [*to_former, "--table", str(table)]).output)
    assert "--to-ledger --topic orders" in printed
    run_command(printed)
    assert admin.position == 7, "the records before are in the table"


@pytest.mark.parametrize("position", ["--topic orders:1 --to-earliest", "--to-current", "--to-further"])
def test_a_reset_that_keeps_an_offset_of_a_former_topic_is_refused_and_its_command_loses_nothing(
    query: Query, table: Path, admin: OffsetModel, position: str
) -> None:
    """A query that is started after the topic was recreated commits its position, and stops when it sees the new id."""
    query.run(query.sink(table), 0, offset(0, one(0, 50)))
    admin.recreate("id-2", 40)
    admin.partitions.append(TopicPartition("orders", 1))
    admin.offsets[P0] = CommittedOffset(50, note_text(Note("s1", 0, topic_id="id-1")))
    again = f"reset --bootstrap-servers {SERVERS} --group etl {position} --table {table}"
    for execute in ([], ["--execute"]):
        shown = CliRunner().invoke(app, [*again.split(), *execute])
        assert shown.exit_code == 1
        assert (
            "topic orders has another id (id-2) than when group 'etl' committed offset 50 of orders-0" in shown.output
        )
    assert admin.position == 50 and admin.resets == 0
    first, keep = commands(shown.output)
    assert "--to-current --topic orders" in keep
    run_command(first)
    assert admin.position == 0
    recreated = offset(1, one(0, 40), stream="s2", topic_id="id-2", followed=FOLLOWED, reset_number=1)
    query.run(query.sink(table), 1, recreated)
    assert rows(table) == sorted(records(0, 50) + records(0, 40))
    run_command(f"spark-group {again} --execute")


def test_a_reset_reports_which_offsets_were_clamped(
    query: Query, table: Path, admin: OffsetModel, tmp_path: Path
) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 50)))
    admin.end = 40
    words = ["reset", "--bootstrap-servers", SERVERS, "--group", "etl", "--to-ledger", "--table", str(table)]
    warning = "orders-0: offset 50 is after the end of the log; clamped to 40"
    assert warning in CliRunner().invoke(app, words).output
    assert json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["partitions"][0]["clamped_from"] == 50
    exported = CliRunner().invoke(app, [*words, "--export"])
    assert (exported.stdout, warning in exported.stderr) == ("orders,0,40\n", True)
    within = CliRunner().invoke(app, [*words[:-3], "--to-offset", "7", "--topic", "orders"]).output
    assert "clamped" not in within


def test_a_reset_reports_that_the_table_gets_records_again(query: Query, table: Path, admin: OffsetModel) -> None:
    """Kafka lacks the last commit of the run, so its offset does not show it."""
    query.run(query.sink(table), 0, offset(0, one(0, 50)))
    admin.commit(40)
    words = ["reset", "--bootstrap-servers", SERVERS, "--group", "etl", "--table", str(table)]
    shown = CliRunner().invoke(app, [*words, "--to-current"]).output
    assert "the table's ledger is 10 offsets ahead of the new ones: their records are written again" in shown
    assert re.search(r"│ orders +│ 0 +│ 40 +│ 50 +│ 40 +│", shown), shown
    (move,) = json.loads(CliRunner().invoke(app, [*words, "--to-current", "--json"]).stdout)["partitions"]
    assert (move["now"], move["ledger"], move["then"]) == (40, 50, 40)
    assert "written again" not in CliRunner().invoke(app, [*words, "--to-ledger"]).output
    without = CliRunner().invoke(app, [*words[:-2], "--to-current"]).output
    assert "written again" not in without and "ledger" not in without


def test_command_for_a_stream_that_does_not_know_a_reset(query: Query, table: Path, admin: OffsetModel) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    set_ledger(query.spark, str(table), "etl", {P0: 10}, reason="of another cluster", reset_number=1)
    query.run(query.sink(table), 1, offset(1, one(10, 20)))  # void
    admin.commit(20)
    (printed,) = commands(refused(lambda: query.run(query.sink(table), 2, offset(2, one(20, 30)))))
    run_command(printed)
    query.run(query.sink(table), 2, offset(2, one(20, 30)))
    continue_query(query, table, admin, 3, 30)
    assert rows(table) == records(0, 30)


@pytest.mark.parametrize("restored", [False, True])
def test_command_for_an_expired_ledger(query: Query, table: Path, admin: OffsetModel, restored: bool) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    expire_log(table)
    if restored:
        DeltaTable(table).alter.set_table_properties({"their.own": "2"}, raise_if_not_exists=False)
        DeltaTable(table).restore(DeltaTable(table).version() - 1)
    admin.commit(10, foreign=True)
    refused_batch = offset(1, one(10, 20), followed=[] if restored else FOLLOWED)
    (printed,) = commands(refused(lambda: query.run(query.sink(table), 1, refused_batch)))
    run_command(printed)
    query.run(query.sink(table), 1, refused_batch)
    continue_query(query, table, admin, 2, 30)
    assert offsets_in(table) == list(range(30))


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("replaced", [False, True])
def test_commands_for_an_expired_ledger_whose_rows_end_behind_the_batch(
    query: Query, table: Path, admin: OffsetModel, foreign: bool, replaced: bool
) -> None:
    for n in range(2):
        query.run(query.sink(table), n, offset(n, one(n * 10, n * 10 + 10)))
    expire_log(table)
    if replaced:
        write_deltalake(table, DeltaTable(table).to_pyarrow_table(), mode="overwrite")
    admin.commit(10, foreign=foreign)
    refused_batch = offset(1, one(10, 20), followed=FOLLOWED if foreign else [])
    message = refused(lambda: query.run(query.sink(table), 1, refused_batch))
    behind, here = commands(message)
    assert f"to write them again, and continue where batch 1 starts:\n    {here}" in str(message)
    assert f"--to-checkpoint {query.root} --batch 1" in here
    run_command(behind)
    query.run(query.sink(table), 1, refused_batch)
    continue_query(query, table, admin, 2, 30)
    assert offsets_in(table) == list(range(30))


@pytest.mark.parametrize("again", [False, True])
def test_a_check_of_a_batch_that_is_not_planned_names_commands_that_run(
    query: Query, table: Path, admin: OffsetModel, again: bool
) -> None:
    """As by ``spark-group run --check``: the checkpoint does not have the batch."""
    for n in range(2):
        query.run(query.sink(table), n, offset(n, one(n * 10, n * 10 + 10)))
    expire_log(table)
    admin.commit(10)
    batch = PlannedBatch(query_id="", batch_id=2, offsets=(offset(2, one(10, 30)),), root="")
    before = len(commits_of(table))
    refusal = query.sink(table).refusal_of(query.spark.createDataFrame([], "a int"), batch)
    behind, here = commands(str(refusal))
    assert len(commits_of(table)) == before
    run_command(here if again else behind)
    assert admin.position == (10 if again else 20)


@pytest.mark.parametrize("p1", [5, 10], ids=["before the batch", "at the batch"])
def test_the_command_for_an_expired_ledger_names_the_end_of_the_rows_of_each_partition(
    query: Query, table: Path, p1: int
) -> None:
    """The reset voids the batch, and the query reads the committed offsets of partitions that are not named."""
    for n in range(2):
        ranges = {("orders", 0): (10 * n, 10 * n + 10), ("orders", 1): (p1 * n // 2, p1 * (n + 1) // 2)}
        query.run(query.sink(table), n, offset(n, ranges))
    expire_log(table)
    again = offset(1, {("orders", 0): (10, 20), ("orders", 1): (10, 12)})
    behind, _ = commands(refused(lambda: query.run(query.sink(table), 1, again)))
    named = shlex.split(behind)
    assert json.loads(named[named.index("--to-offsets") + 1]) == {"orders": {"0": 20, "1": p1}}


def test_a_reset_to_an_expired_ledger_names_the_end_of_the_rows(query: Query, table: Path, admin: OffsetModel) -> None:
    """A running query knows its ledger, and the command that it prints does not: it could only name Kafka's offsets."""
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    query.run(query.sink(table), 1, offset(1, one(10, 20)))
    sink = query.sink(table)
    query.run(sink, 2, offset(2, one(20, 25)))
    expire_log(table)
    admin.commit(5, foreign=True)
    refused_batch = offset(3, one(5, 30), followed=FOLLOWED)
    to_ledger = commands(refused(lambda: query.run(sink, 3, refused_batch)))[0]
    shown = CliRunner().invoke(app, shlex.split(to_ledger)[1:])
    assert shown.exit_code == 1
    behind, to_current = commands(shown.output)
    assert "--to-current" in to_current
    run_command(behind)
    query.run(query.sink(table), 3, refused_batch)
    continue_query(query, table, admin, 4, 30)
    assert offsets_in(table) == list(range(30))


def test_no_offsets_are_offered_for_an_expired_ledger_where_kafka_has_none(
    query: Query, table: Path, admin: OffsetModel
) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    expire_log(table)
    words = [
        "reset",
        "--bootstrap-servers",
        "broker-1:9092,broker-2:9092",
        "--group",
        "etl",
        "--table",
        str(table),
        "--execute",
    ]
    shown = CliRunner().invoke(app, [*words, "--to-ledger"])
    assert shown.exit_code == 1 and commands(shown.output) == []
    assert (
        "Kafka has no offsets of the group: to set both now, name its positions with reset --to-offsets" in shown.output
    )
    assert CliRunner().invoke(app, [*words, "--to-offsets", '{"orders":{"0":10}}']).exit_code == 0
    assert admin.position == 10


@pytest.mark.parametrize("damaged", [False, True], ids=["expired", "damaged"])
def test_command_for_a_ledger_that_cannot_be_read(query: Query, table: Path, admin: OffsetModel, damaged: bool) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    if damaged:
        there, note = open_existing(query.spark, str(table)), '[{"group":"etl","ledger":{"topics":7,"v":1},"v":1}]'
        there.commit(there.history(), None, {"spark-group-source.etl": 2}, note, needed=True)
    else:
        expire_log(table)
    admin.commit(10)
    (printed,) = commands(refused(lambda: read_ledger(query.spark, str(table), "etl")))
    run_command(printed)
    found = read_ledger(query.spark, str(table), "etl")
    assert found is not None and (found.offsets, found.reset_number) == ({P0: 10}, 1)


@pytest.mark.parametrize("runs", [1, 2], ids=["the first time", "in a replay"])
def test_commands_for_a_second_write_of_a_batch(
    query: Query, table: Path, admin: OffsetModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runs: int
) -> None:
    monkeypatch.setitem(query.spark.properties, QUERY_ID, query.id)  # type: ignore[attr-defined]
    monkeypatch.setitem(query.spark.properties, RUN_ID, str(tmp_path))  # type: ignore[attr-defined]
    monkeypatch.setattr(checkpoint, "_running_checkpoint", lambda spark, query_id: str(query.root))
    batch = offset(0, one(5, 10))
    for run in range(runs):
        monkeypatch.setitem(query.spark.properties, RUN_ID, f"{tmp_path}-{run}")  # type: ignore[attr-defined]
        query.run(query.sink(table), 0, batch)
        printed = commands(refused(lambda: query.run(query.sink(table), 0, batch)))
        assert printed
    admin.commit(10)
    for command in printed:
        run_command(command)
    continue_query(query, table, admin, 1, 12)
    assert offsets_in(table) == list(range(5, 12))


@pytest.mark.parametrize(("where", "failed"), [("new", 0), ("table", 0), ("table", 1)])
def test_command_for_a_batch_whose_error_the_users_function_caught(
    query: Query, admin: OffsetModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str, failed: int
) -> None:
    """There is no table yet, and the next batch would start it: the query begins anew; a table without a ledger of the
    group; or with one."""
    table = tmp_path / "new" if where == "new" else created_table(query.spark, tmp_path)
    monkeypatch.setitem(query.spark.properties, QUERY_ID, query.id)  # type: ignore[attr-defined]
    monkeypatch.setitem(query.spark.properties, RUN_ID, str(tmp_path))  # type: ignore[attr-defined]
    monkeypatch.setattr(checkpoint, "_running_checkpoint", lambda spark, query_id: str(query.root))
    for number in range(failed):
        query.run(query.sink(table), number, offset(number, one(10 * number, 10 * number + 10)))

    def fails(df: object) -> object:
        raise RuntimeError("once")

    lost = offset(failed, one(10 * failed, 10 * failed + 10))
    with pytest.raises(RuntimeError):
        query.run(query.sink(table, transform=fails), failed, lost)
    follows = offset(failed + 1, one(10 * failed + 10, 10 * failed + 20))
    message = refused(lambda: query.run(query.sink(table), failed + 1, follows))
    (command,) = commands(message)
    assert ("with a new checkpointLocation" in str(message)) == (where == "new")
    admin.commit(10 * failed + 10)
    assert ("--table" in command) == (where != "new")
    run_command(command)
    assert admin.position == 10 * failed
    monkeypatch.setitem(query.spark.properties, RUN_ID, f"{tmp_path}-again")  # type: ignore[attr-defined]
    if where == "table":
        query.run(query.sink(table), failed + 1, follows)
    continue_query(query, table, admin, failed + 2, 30)
    assert offsets_in(table) == list(range(30))


@pytest.mark.parametrize("tables", ["with a ledger", "without a ledger", "new"])
def test_commands_for_a_batch_of_several_tables_whose_error_the_users_function_caught(
    query: Query, new_query: NewQuery, tmp_path: Path, admin: OffsetModel, monkeypatch: pytest.MonkeyPatch, tables: str
) -> None:
    """Table a has the batch, b lacks it, and the table of c gets a part of the next one, which must be void there, too,
    if Spark runs it again."""
    monkeypatch.setitem(query.spark.properties, QUERY_ID, query.id)  # type: ignore[attr-defined]
    monkeypatch.setitem(query.spark.properties, RUN_ID, str(tmp_path))  # type: ignore[attr-defined]
    topics = {name: Topic("id-1", 1) for name in "abc"}
    monkeypatch.setattr(admin, "existing_topics", lambda names: {name: topics[name] for name in names})
    monkeypatch.setattr(admin, "require_topics", admin.existing_topics)
    fails: list[Exception] = []

    def transform(df: Any) -> Any:
        if fails:
            raise fails.pop()
        return df

    def sinks_of(query: Query) -> DeltaSinks:
        b = query.sink(there["b"], transform=transform)
        return DeltaSinks(
            {"a": query.sink(there["a"]), "b": b, "c": query.sink(there["c"])}, checkpoint=str(query.root)
        )

    there = {name: tmp_path / name for name in "abc"}
    if tables == "without a ledger":
        there["b"] = created_table(query.spark, tmp_path)
    first = "abc" if tables == "with a ledger" else "ac"
    sinks = sinks_of(query)
    query.run(sinks, 0, offset(0, {(topic, 0): (0, 5) for topic in first}))
    start = 5 if "b" in first else 0
    fails.append(RuntimeError("once"))
    with pytest.raises(RuntimeError):
        query.run(sinks, 1, offset(1, {("a", 0): (5, 10), ("b", 0): (start, 10)}))
    follows = offset(2, {("a", 0): (10, 15), ("b", 0): (10, 15), ("c", 0): (5, 8)})
    message = refused(lambda: query.run(sinks, 2, follows))
    assert ("with a new checkpointLocation" in str(message)) == (tables == "new")
    for topic, at in {"a": 10, "b": 10, "c": 5}.items():  # Kafka may have the offsets of another sink's batch
        admin.offsets[TopicPartition(topic, 0)] = CommittedOffset(at, note_text(Note("s1", 0)))
    for command in commands(message):
        run_command(command)
    positions = {tp.topic: at.offset for tp, at in admin.offsets.items()}
    assert positions == {"a": 10, "b": start, "c": 5}
    monkeypatch.setitem(query.spark.properties, RUN_ID, f"{tmp_path}-again")  # type: ignore[attr-defined]
    number = 0
    if tables == "new":
        query = new_query("new")
        monkeypatch.setitem(query.spark.properties, QUERY_ID, query.id)  # type: ignore[attr-defined]
    else:
        query.run(sinks_of(query), 2, follows)
        assert rows(there["c"]) == records(0, 5, topic="c")
        number = 3
    ranges = {(topic, 0): (at, 20) for topic, at in positions.items()}
    resets = max(parse_note(at.metadata).reset_number for at in admin.offsets.values())
    batch = offset(number, ranges, stream="s1" if number else "s2", followed=[*ranges], reset_number=resets)
    query.run(sinks_of(query), number, batch)
    for topic, table in there.items():
        assert rows(table) == records(0, 20, topic=topic)


def test_command_for_a_batch_of_tables_by_key_whose_error_the_users_function_caught(
    query: Query, table: Path, admin: OffsetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(query.spark.properties, QUERY_ID, query.id)  # type: ignore[attr-defined]
    monkeypatch.setitem(query.spark.properties, RUN_ID, str(table))  # type: ignore[attr-defined]

    def fails(df: object) -> object:
        raise RuntimeError("once")

    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    sinks = DeltaSinks({"orders": query.sink(table)}, by=fails, checkpoint=str(query.root))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        query.run(sinks, 1, offset(1, one(10, 20)))
    message = refused(lambda: query.run(sinks, 2, offset(2, one(20, 30))))
    assert "with a new checkpointLocation" in str(message)
    (command,) = commands(message)
    admin.commit(20)
    run_command(command)
    assert admin.position == 10


@pytest.mark.parametrize("kept", [False, True], ids=["copied", "kept"])
def test_commands_for_a_clone_of_a_table_with_a_ledger(
    query: Query, table: Path, admin: OffsetModel, kept: bool
) -> None:
    for n in range(3):
        query.run(query.sink(table), n, offset(n, one(n * 10, n * 10 + 10)))
    clone = clone_of(table, 2, table.parent / "clone")
    assert offsets_in(clone) == list(range(20))
    admin.commit(30)
    refused_batch = offset(3, one(30, 40))
    message = refused(lambda: query.run(query.sink(clone), 3, refused_batch))
    assert f"is a clone of version 2 of table file:{table}" in str(message)
    copy, to_ledger, again, further = commands(message)
    for command in [again, further] if kept else [copy, to_ledger]:
        run_command(command)
    query.run(query.sink(clone), 3, refused_batch)
    continue_query(query, clone, admin, 4, 40)
    assert offsets_in(clone) == [*range(20), *range(30 if kept else 20, 40)]


@pytest.mark.parametrize("start", [5, 10])
def test_commands_for_a_clone_whose_source_cannot_be_read(
    query: Query, table: Path, admin: OffsetModel, start: int
) -> None:
    """Where the table has rows behind the start of the batch, the first command does not write them again."""
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    clone = clone_of(table, 1, table.parent / "clone")
    shutil.rmtree(table)
    admin.commit(start)
    refused_batch = offset(1, one(start, 20))
    message = refused(lambda: query.run(query.sink(clone), 1, refused_batch))
    assert f"is a clone of version 1 of table file:{table}, whose ledgers cannot be read" in str(message)
    run_command(commands(message)[0])
    query.run(query.sink(clone), 1, refused_batch)
    continue_query(query, clone, admin, 2, 30)
    assert rows(clone) == records(0, 30)


def test_commands_for_a_clone_of_a_clone_of_a_table_with_a_ledger(
    query: Query, table: Path, admin: OffsetModel
) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    between = clone_of(table, 1, table.parent / "between")
    clone = clone_of(between, 0, table.parent / "clone")
    admin.commit(5)
    refused_batch = offset(1, one(5, 20))
    run_command(commands(refused(lambda: query.run(query.sink(clone), 1, refused_batch)))[0])
    query.run(query.sink(clone), 1, refused_batch)
    continue_query(query, clone, admin, 2, 20)
    assert rows(clone) == records(0, 20)


def test_rows_that_an_overwrite_brings_back_into_an_empty_table_are_not_written_again(
    query: Query, table: Path, admin: OffsetModel
) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    admin.commit(10)
    written = DeltaTable(table).to_pyarrow_table()
    DeltaTable(table).restore(0)
    run_command(f"spark-group reset --bootstrap-servers {SERVERS} --group etl --to-ledger --table {table} --execute")
    assert admin.position == 0
    write_deltalake(table, written, mode="overwrite")
    again = offset(1, one(0, 20), followed=FOLLOWED, reset_number=admin.resets)
    assert "removed rows after the last commit" in str(refused(lambda: query.run(query.sink(table), 1, again)))
    assert rows(table) == records(0, 10)


@pytest.mark.parametrize("again", [False, True])
def test_commands_for_a_clone_whose_log_no_longer_has_the_clone(
    query: Query, table: Path, admin: OffsetModel, again: bool
) -> None:
    for n in range(2):
        query.run(query.sink(table), n, offset(n, one(n * 10, n * 10 + 10)))
    clone = clone_of(table, 2, table.parent / "clone")
    expire_log(clone)
    admin.commit(15)
    refused_batch = offset(2, one(15, 30))
    printed = commands(refused(lambda: query.run(query.sink(clone), 2, refused_batch)))
    run_command(printed[again])
    query.run(query.sink(clone), 2, refused_batch)
    continue_query(query, clone, admin, 3, 30)
    assert offsets_in(clone) == sorted([*range(30), *(range(15, 20) if again else ())])


@pytest.mark.parametrize("again", [False, True], ids=["left out", "written again"])
def test_commands_for_a_partition_that_a_ledger_does_not_know_which_began_anew(
    new_query: NewQuery, table: Path, admin: OffsetModel, again: bool
) -> None:
    """Two queries of one group: the ledger expires, the first one begins a new one, and the second one, which was
    killed before Spark's checkpoint had its last batch, writes that batch again."""
    p1 = TopicPartition("orders", 1)
    queries = [new_query(name) for name in ("s1", "s2")]
    for n in range(2):
        for p, query in enumerate(queries):
            ranges = one(n * 10, n * 10 + 10, partition=p)
            query.run(query.sink(table), n, offset(n, ranges, stream=query.root.name))
    expire_log(table)
    first, second = queries
    first.run(first.sink(table), 2, offset(2, one(20, 30)))
    admin.partitions.append(p1)
    admin.commit(30)
    admin.offsets[p1] = replace(admin.offsets[P0], offset=10)
    last = offset(1, one(10, 20, partition=1), stream="s2")
    before = offsets_in(table)
    for _ in range(2):
        message = refused(lambda: second.run(second.sink(table), 1, last))
        assert "rows of orders-1 up to offset 19, and batch 1 starts at 10; it has a ledger without" in str(message)
    assert offsets_in(table) == before
    run_command(commands(message)[again])
    second.run(second.sink(table), 1, last)
    at = admin.offsets[p1].offset
    second.run(second.sink(table), 2, offset(2, one(at, 30, partition=1), stream="s2", reset_number=admin.resets))
    first.run(first.sink(table), 3, offset(3, one(30, 40), reset_number=admin.resets))
    assert offsets_in(table) == sorted([*range(40), *range(30), *(range(10, 20) if again else ())])


def test_a_group_starts_at_the_end_of_the_rows_of_a_table_whose_log_was_cleaned_up(query: Query, table: Path) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    clone = clone_of(table, 1, table.parent / "clone")
    expire_log(clone)
    query.run(query.sink(clone), 1, offset(1, one(10, 20)))
    assert rows(clone) == records(0, 20)


def test_a_clone_whose_log_has_a_gap_is_not_taken_for_a_new_table(query: Query, table: Path) -> None:
    """A clean-up was interrupted: the log has version 0, and not the CLONE that names the table with the ledger."""
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    clone = clone_of(table, 1, table.parent / "clone")
    DeltaTable(clone).alter.set_table_properties({"their.other": "1"}, raise_if_not_exists=False)
    expire_log(clone)
    (clone / "_delta_log" / f"{0:020}.json").write_text('{"commitInfo":{"timestamp":1,"operation":"CREATE TABLE"}}\n')
    refused(lambda: query.run(query.sink(clone), 1, offset(1, one(5, 20))))
    assert rows(clone) == records(0, 10)


@pytest.mark.parametrize("first", ["restored", "replaced"])
def test_the_commands_that_leave_records_out_write_no_record_again(
    query: Query, table: Path, admin: OffsetModel, first: str
) -> None:
    """The refused batch starts before the end of the rows: it was written, and the driver was killed."""
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    query.run(query.sink(table), 1, offset(1, one(10, 20)))
    admin.commit(10)
    if first == "restored":
        query.run(query.sink(table), 2, offset(0, one(20, 30), stream="s2"))  # with another checkpoint
        DeltaTable(table).restore(2)
    else:
        write_deltalake(table, DeltaTable(table).to_pyarrow_table(), mode="overwrite")
    keep = commands(refused(lambda: query.run(query.sink(table), 1, offset(1, one(10, 20)))))[-1]
    run_command(keep)
    query.run(query.sink(table), 1, offset(1, one(10, 20)))
    continue_query(query, table, admin, 2, 40)
    assert rows(table) == records(0, 20) + records(30 if first == "restored" else 20, 40)


def test_rows_that_a_replace_brings_back_above_the_ledger_are_not_written_again(
    query: Query, table: Path, admin: OffsetModel
) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 20)))
    admin.commit(20)
    DeltaTable(table).delete("offset >= 10")
    back = f"spark-group reset --group etl --bootstrap-servers {SERVERS} --table {table} --to-offset 10 --topic orders"
    run_command(f"{back} --execute")
    write_deltalake(table, DeltaTable(table, version=1).to_pyarrow_table(), mode="overwrite")
    refused_batch = offset(1, one(10, 30), followed=FOLLOWED, reset_number=1)
    run_command(commands(refused(lambda: query.run(query.sink(table), 1, refused_batch)))[-1])
    query.run(query.sink(table), 1, refused_batch)
    continue_query(query, table, admin, 2, 30)
    assert rows(table) == records(0, 30)


def test_a_topic_that_was_recreated_starts_at_its_first_record_where_removed_rows_are_left_out(
    query: Query, table: Path, admin: OffsetModel
) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    DeltaTable(table).restore(0)
    admin.recreate("id-2", 40)
    recreated = offset(1, one(0, 20), topic_id="id-2", truncated_after={("orders", 0): RECREATED})
    run_command(commands(refused(lambda: query.run(query.sink(table), 1, recreated)))[-1])
    assert admin.position == 0
    query.run(query.sink(table), 1, recreated)
    query.run(query.sink(table), 2, offset(2, one(0, 20), topic_id="id-2", followed=FOLLOWED, reset_number=1))
    assert rows(table) == records(0, 20)


def test_a_copied_ledger_alone_leaves_no_gap(query: Query, table: Path, admin: OffsetModel) -> None:
    """Until the group is moved to it, batches of the query are void, then refused."""
    for n in range(3):
        query.run(query.sink(table), n, offset(n, one(n * 10, n * 10 + 10)))
    clone = clone_of(table, 2, table.parent / "clone")
    admin.commit(30)
    for _ in range(2):  # as after a connection that broke
        run_command(f"spark-group ledger copy {table} {clone} --group etl --execute")
    assert DeltaTable(clone).version() == 1, "the second command does nothing"
    query.run(query.sink(clone), 3, offset(3, one(30, 40)))
    (to_ledger,) = commands(refused(lambda: query.run(query.sink(clone), 4, offset(4, one(40, 50)))))
    run_command(to_ledger)
    continue_query(query, clone, admin, 5, 50)
    assert offsets_in(clone) == list(range(50))


@pytest.mark.parametrize("number", [0, 1], ids=["renamed", "behind the rows"])
@pytest.mark.parametrize("start", [4, 15], ids=["below", "above"])
def test_commands_for_a_renamed_group(
    query: Query, new_query: NewQuery, table: Path, admin: OffsetModel, start: int, number: int
) -> None:
    """Without them the records [4, 10) would be written twice, or the records [10, 15) would be missing."""
    query.run(query.sink(table), 0, offset(0, one(0, 10), group="former", stream="s0"))
    admin.commit(start)
    renamed = new_query("renamed")
    refused_batch = offset(0, one(start, 20), stream="s1", started=[("orders", 0)])
    message = refused(lambda: renamed.run(renamed.sink(table), 0, refused_batch))
    assert "has no ledger of group 'etl', and has one of group former with the same topics" in str(message)
    rename, to_ledger, *others = commands(message)
    assert rename == f"spark-group ledger rename {table} --group former --to etl --execute"
    if number == 0 or start == 15:  # above the rows only the rename finds where they end
        before = len(commits_of(table))
        shown = CliRunner().invoke(app, shlex.split(rename)[1:-1])
        assert shown.exit_code == 0 and "10" in shown.output and len(commits_of(table)) == before, "only shown"
        for command in (rename, to_ledger):
            run_command(command)
        again = CliRunner().invoke(app, shlex.split(rename)[1:])
        assert again.exit_code == 1 and "has a ledger of group 'etl' already" in again.output
    else:
        run_command(others[0])
    renamed.run(renamed.sink(table), 0, refused_batch)
    continue_query(renamed, table, admin, 1, 30)
    assert rows(table) == records(0, 30)


def test_command_for_a_second_group_on_the_same_topic(
    query: Query, new_query: NewQuery, table: Path, admin: OffsetModel
) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 10), group="another", stream="s0"))
    admin.commit(0)
    second = new_query("second")
    message = refused(lambda: second.run(second.sink(table), 0, offset(0, one(0, 10))))
    assert "to write them again, and continue where batch 0 starts:" in str(message)
    run_command(commands(message)[-1])
    second.run(second.sink(table), 0, offset(0, one(0, 10)))
    continue_query(second, table, admin, 1, 10)
    assert rows(table) == sorted(records(0, 10) * 2)


@pytest.mark.parametrize("batch", [one(10, 20), one(0, 20, topic="another")], ids=["where it ends", "another topic"])
def test_a_group_that_starts_where_another_groups_ledger_ends_is_written(
    query: Query, table: Path, batch: Ranges
) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 10), group="former", stream="s0"))
    query.run(query.sink(table), 1, offset(0, batch, stream="s1"))
    (((topic, _), (start, end)),) = batch.items()
    assert rows(table) == sorted(records(0, 10) + records(start, end, topic=topic))


def test_commands_for_a_renamed_group_in_a_clone(
    query: Query, new_query: NewQuery, table: Path, admin: OffsetModel
) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 10), group="former", stream="s0"))
    clone = clone_of(table, 1, table.parent / "clone")
    admin.commit(0)
    renamed = new_query("renamed")
    refused_batch = offset(0, one(0, 20), stream="s1")
    printed = commands(refused(lambda: renamed.run(renamed.sink(clone), 0, refused_batch)))
    for command in printed[:3]:
        run_command(command)
    renamed.run(renamed.sink(clone), 0, refused_batch)
    continue_query(renamed, clone, admin, 1, 20)
    assert rows(clone) == records(0, 20)


SECURITY = {
    "kafka.security.protocol": "SASL_SSL",
    "kafka.sasl.mechanism": "SCRAM-SHA-512",
    "kafka.sasl.username": "etl",
    "kafka.sasl.password": "open-sesame",
}


@pytest.mark.parametrize("published", [SECURITY], indirect=True, ids=["SASL_SSL"])
def test_commands_for_secured_brokers_name_a_file_that_holds_the_querys_kafka_options(
    query: Query, table: Path, admin: OffsetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    admin.commit(4, foreign=True)
    message = refused(lambda: query.run(query.sink(table), 1, offset(1, one(4, 20), followed=FOLLOWED)))
    assert "open-sesame" not in str(message)
    hint = "client.properties contains the query's kafka.* options without this prefix, one name=value a line"
    assert str(message).count(hint) == 1
    monkeypatch.chdir(tmp_path)
    lines = [f"{name.removeprefix('kafka.')}={value}\n" for name, value in SECURITY.items()]
    (tmp_path / "client.properties").write_text("".join(lines))
    run_command(commands(message)[0])
    assert admin.settings["sasl.password"] == "open-sesame" and admin.position == 10


def test_a_table_and_a_group_with_spaces_are_quoted_and_unknown_servers_are_a_placeholder(
    query: Query, tmp_path: Path
) -> None:
    table = tmp_path / "my lake" / "orders"
    query.run(query.sink(table), 0, offset(0, one(0, 10), group="my etl"))
    below = offset(1, one(4, 20), group="my etl", followed=FOLLOWED)
    message = refused(lambda: query.run(query.sink(table), 1, below))
    assert "(HOST:PORT are the bootstrap servers; if they need credentials, add --command-config)" in str(message)
    printed = commands(message)
    words = "spark-group", "reset", "--bootstrap-servers", "HOST:PORT", "--group", "my etl"
    position = "--to-ledger", "--table", str(table), "--execute"
    assert tuple(shlex.split(printed[0])) == words + position
