"""The write guard: what a second sink, or a second query, may write to a table."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree, rmtree
from types import SimpleNamespace
from typing import Any

import pyarrow.compute as pc
import pytest
from kafka_helpers import await_until
from kit.frames import RUN_ID, Frame, Session
from sink_helpers import NewQuery, Query, commits, created_table, next_offsets, one, records, rows
from sink_source import offset

from spark_group_source.delta import checkpoint, table_names, table_writer
from spark_group_source.delta.checkpoint import QUERY_ID, PlannedBatch
from spark_group_source.delta.durable_batches import _finished
from spark_group_source.delta.ledger_store import set_ledger
from spark_group_source.delta.sink import DeltaSink
from spark_group_source.delta.table_history import TableHistory
from spark_group_source.delta.table_writer import TableWriter
from spark_group_source.delta.topic_sinks import DeltaSinks, TablePart
from spark_group_source.errors import CheckpointMismatch, LedgerConflict, OptionError
from spark_group_source.host import run_files
from spark_group_source.protocol.offsets import BatchKey, StreamOffset

Enter = Callable[[Query, str], None]
"""``enter(query, run)``: this thread runs the batches of a run from now on."""


@pytest.fixture
def enter(spark: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Enter:
    (tmp_path / "runs").mkdir(mode=0o700)
    monkeypatch.setattr(run_files, "directory", lambda: tmp_path / "runs")

    def begin(query: Query, run: str) -> None:
        monkeypatch.setitem(spark.properties, QUERY_ID, query.id)
        monkeypatch.setitem(spark.properties, RUN_ID, f"{tmp_path}-{run}")

    return begin


def raising(fails: list[RuntimeError]) -> Callable[[Frame], Frame]:
    """A ``transform`` that raises these errors, one in each call, and changes nothing later."""

    def transform(df: Frame) -> Frame:
        if fails:
            raise fails.pop(0)
        return df

    return transform


@pytest.mark.parametrize("twice", ["two sinks", "one sink"])
def test_a_second_write_of_a_batch_into_the_same_table_is_refused_and_never_skipped(
    query: Query, table: Path, enter: Enter, twice: str
) -> None:
    first = query.sink(table, transform=lambda df: Frame(df.sparkSession, df.rows.slice(0, 5)))
    second = first if twice == "one sink" else query.sink(f"delta.`{table}`")
    batch = offset(0, one(0, 10))
    for run in ("the first time", "a replay"):
        enter(query, run)
        query.run_function([first], 0, batch)
        with pytest.raises(OptionError, match=r"written to table .* a second time in one run"):
            query.run_function([second], 0, batch)
        assert rows(table) == records(0, 5), run
        assert run_files.durable_mark("s1").seq == -1, "the batch must not be reported as durable"


@pytest.mark.parametrize("spelled", ["{}/", "{}/.", "file:{}", "delta.`{}`"])
def test_a_second_write_is_refused_however_the_table_is_spelled(
    query: Query, table: Path, enter: Enter, spelled: str
) -> None:
    batch = offset(0, one(0, 10))
    enter(query, "only")
    query.run(query.sink(table), 0, batch)
    with pytest.raises(OptionError, match="a second time in one run"):
        query.run(query.sink(spelled.format(table)), 0, batch)


def test_a_copy_of_a_table_with_its_log_is_refused_without_a_command_for_the_other_table(
    query: Query, table: Path, tmp_path: Path, enter: Enter
) -> None:
    """The version is that of the first one."""
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    copytree(table, copy := tmp_path / "copy")
    enter(query, "only")
    query.run(query.sink(table), 1, offset(1, one(10, 20)))
    with pytest.raises(OptionError, match=f"was to table {table}, which has the same id.*as a clone$"):
        query.run(query.sink(copy), 1, offset(1, one(10, 20)))


@pytest.mark.parametrize("first", ["/lake/orders", "s3a://lake/orders"])
def test_a_table_whose_log_cannot_be_read_is_identified_by_its_id(
    first: str, spark: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By path, with a slash at its end, with another scheme, or by name."""
    ids = dict.fromkeys(("delta.`/lake/orders`", "delta.`/lake/orders/`", "sales.orders"), "1") | {"other": "2"}
    ids |= dict.fromkeys(("delta.`s3a://lake/orders`", "delta.`s3://lake/orders`"), "1")

    def sql(text: str) -> SimpleNamespace:
        detail = {"format": "delta", "location": "s3a://lake/orders", "properties": {}}
        return SimpleNamespace(first=lambda: {**detail, "id": ids[text.removeprefix("DESCRIBE DETAIL ")]})

    monkeypatch.setattr(spark, "sql", sql, raising=False)
    monkeypatch.setattr(table_names, "qualified", lambda spark, table: table)
    monkeypatch.setattr(table_names, "location", lambda spark, table: None)
    monkeypatch.setattr(table_writer, "has_delta", lambda spark: True)
    monkeypatch.setattr(table_writer, "open_log", lambda *args: None)

    def identity(table: str) -> str:
        return TableWriter(spark, table).identity()  # type: ignore[arg-type]

    assert {identity(table) for table in (first, "/lake/orders/", "s3://lake/orders", "sales.orders")} == {"1"}
    assert identity("other") == "2"


def test_a_failed_write_may_be_repeated_in_the_same_batch(query: Query, table: Path, enter: Enter) -> None:
    fails = [RuntimeError("once")]

    sink = query.sink(table, transform=raising(fails))
    enter(query, "only")
    with pytest.raises(RuntimeError, match="once"):
        query.run(sink, 0, offset(0, one(0, 10)))
    query.run(sink, 0, offset(0, one(0, 10)))
    assert rows(table) == records(0, 10)


@pytest.mark.parametrize("given", ["dict", "function"])
def test_sinks_that_a_function_creates_for_each_call_may_repeat_a_batch(
    query: Query, tmp_path: Path, enter: Enter, given: str
) -> None:
    """Those of other tables do not make up for the failure."""
    fails = [RuntimeError("once"), RuntimeError("twice")]

    def call(n: int, table: Path) -> None:
        def of_topic(topic: str) -> DeltaSink:
            return query.sink(table, transform=raising(fails))

        sinks = {"orders": of_topic("orders")} if given == "dict" else of_topic
        query.run(DeltaSinks(sinks, checkpoint=str(query.root)), n, offset(n, one(5 * n, 5 * n + 5)))

    enter(query, "only")
    for error in ("once", "twice"):
        with pytest.raises(RuntimeError, match=error):
            call(0, tmp_path / "a")
    call(0, tmp_path / "other")
    with pytest.raises(LedgerConflict, match=r"batch 0 could not be written .*: twice"):
        call(1, tmp_path / "a")
    call(0, tmp_path / "a")
    call(1, tmp_path / "a")
    assert rows(tmp_path / "a") == records(0, 10)


@pytest.mark.proves("G4", level="core")
def test_batches_after_a_failed_one_are_refused_when_the_users_function_caught_its_error(
    query: Query, table: Path, enter: Enter
) -> None:
    """They would move the ledger and Kafka beyond records that the table lacks. Another run has the batch again."""
    fails: list[Exception] = []

    def transform(df: Frame) -> Frame:
        if fails:
            raise fails[0]
        return df

    sink = query.sink(table, transform=transform)
    enter(query, "first")
    query.run(sink, 0, offset(0, one(0, 10)))
    fails.append(RuntimeError("storage down\nmore"))
    with pytest.raises(RuntimeError, match="storage down"):
        query.run(sink, 1, offset(1, one(10, 20)))
    fails.clear()
    for number in (2, 3):
        with pytest.raises(
            LedgerConflict, match=r"batch 1 could not be written .*: storage down. The function"
        ) as error:
            query.run(sink, number, offset(number, one(10 * number, 10 * number + 10)))
        assert "more" not in str(error.value)
    with pytest.raises(LedgerConflict, match="batch 1 could not be written"):
        query.run(query.sink(table.parent / "other"), 2, offset(2, one(20, 30)))
    assert rows(table) == records(0, 10)
    enter(query, "second")
    query.run(sink, 1, offset(1, one(10, 20)))
    assert rows(table) == records(0, 20)


@pytest.mark.proves("G4", level="core")
def test_a_batch_that_fails_before_its_plan_is_read_refuses_the_later_ones(
    query: Query, table: Path, enter: Enter, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, real = query.sink(table), checkpoint.read
    enter(query, "only")
    query.run(sink, 0, offset(0, one(0, 5)))

    def read(spark: Session, path: str) -> str | None:
        raise OSError("the storage answers 503")

    monkeypatch.setattr(checkpoint, "read", read)
    with pytest.raises(OSError, match="503"):
        query.run(sink, 1, offset(1, one(5, 10)))
    monkeypatch.setattr(checkpoint, "read", real)
    with pytest.raises(LedgerConflict, match=r"batch 1 could not be written .*: the storage answers 503"):
        query.run(sink, 2, offset(2, one(10, 15)))
    query.run(sink, 1, offset(1, one(5, 10)))
    query.run(sink, 2, offset(2, one(10, 15)))
    assert rows(table) == records(0, 15)


@pytest.mark.parametrize("is_read", [True, False])
def test_a_failed_batch_that_spark_has_purged_refuses_the_later_ones(
    query: Query, tmp_path: Path, enter: Enter, is_read: bool
) -> None:
    """A command that names its checkpoint would not find it there."""

    def fails(df: Frame) -> Frame:
        raise RuntimeError("once")

    enter(query, "only")
    batch_1 = query.root / "offsets" / "1"
    query.plan(1, offset(1, one(5, 10)))
    if not is_read:
        batch_1.write_text("v9\n")
    sink = query.sink(created_table(query.spark, tmp_path), transform=fails)
    with pytest.raises((RuntimeError, CheckpointMismatch), match="once" if is_read else "format 'v9'"):
        sink(query.rows(offset(1, one(5, 10))), 1)
    batch_1.unlink()
    error = "batch 1 could not be written .*: " + ("once" if is_read else "the checkpoint's offset log has format")
    with pytest.raises(LedgerConflict, match=error) as refusal:
        query.run(sink, 130, offset(130, one(10, 15)))
    assert "--to-checkpoint" not in str(refusal.value)
    assert ('--to-offsets \'{"orders": {"0": 5}}\'' in str(refusal.value)) == is_read


@pytest.mark.proves("G4", level="core")
def test_a_batch_that_sinks_refuse_before_any_table_refuses_the_later_ones(
    query: Query, tmp_path: Path, enter: Enter
) -> None:
    orders = created_table(query.spark, tmp_path)
    sinks = DeltaSinks({"orders": query.sink(orders)}, checkpoint=str(query.root))
    enter(query, "only")
    query.run(sinks, 0, offset(0, one(0, 5)))
    with pytest.raises(OptionError, match="topic new has no table"):
        query.run(sinks, 1, offset(1, one(5, 10) | one(0, 1, topic="new")))
    for n in (2, 3):
        with pytest.raises(LedgerConflict, match=r"batch 1 could not be written .*: topic new has no table"):
            query.run(sinks, n, offset(n, one(5 * n, 5 * n + 5)))
    assert rows(orders) == records(0, 5)


@pytest.mark.proves("G4", level="core")
def test_a_batch_whose_named_table_failed_is_not_passed_over_by_others(
    query: Query, tmp_path: Path, enter: Enter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next batch has no rows for that table, so only ``others`` would be written."""
    fails = [RuntimeError("once")]

    a, others = query.sink(tmp_path / "a", transform=raising(fails)), query.sink(created_table(query.spark, tmp_path))
    sinks = DeltaSinks({"a": a}.get, by="kind", others=others, checkpoint=str(query.root))

    @contextmanager
    def divided(self: DeltaSinks, df: Frame, planned: PlannedBatch) -> Iterator[Any]:
        named = [TablePart(a, ("a",), planned)] if fails else []
        yield [*named, TablePart(others, (None,), planned)], [df] * (len(named) + 1)

    monkeypatch.setattr(DeltaSinks, "_divided", divided)
    enter(query, "only")
    with pytest.raises(RuntimeError, match="once"):
        query.run(sinks, 0, offset(0, one(0, 5)))
    with pytest.raises(LedgerConflict, match=r"batch 0 could not be written .*: once"):
        query.run(sinks, 1, offset(1, one(5, 10)))
    assert rows(tmp_path / "table") == []


def test_a_second_write_whose_error_is_caught_is_no_missing_batch(query: Query, table: Path, enter: Enter) -> None:
    sink = query.sink(table)
    enter(query, "only")
    query.run(sink, 0, offset(0, one(0, 10)))
    with pytest.raises(OptionError, match="a second time in one run"):
        query.run(sink, 0, offset(0, one(0, 10)))
    query.run(sink, 1, offset(1, one(10, 20)))
    assert rows(table) == records(0, 20)


@pytest.mark.parametrize("by", [None, "kind"])
def test_a_batch_that_failed_for_one_of_several_tables_may_be_repeated(
    query: Query, tmp_path: Path, enter: Enter, monkeypatch: pytest.MonkeyPatch, by: str | None
) -> None:
    """The tables that have it leave it out. A batch that all tables have is refused a second time."""
    fails = [RuntimeError("once")]

    a, b = query.sink(tmp_path / "a"), query.sink(created_table(query.spark, tmp_path), transform=raising(fails))
    if by is None:
        sinks = DeltaSinks({"a": a, "b": b}, checkpoint=str(query.root))
    else:
        sinks = DeltaSinks({"a": a}.get, by=by, others=b, checkpoint=str(query.root))

        @contextmanager
        def divided(self: DeltaSinks, df: Frame, planned: PlannedBatch) -> Iterator[Any]:
            by_topic = [Frame(df.sparkSession, df.rows.filter(pc.equal(df.rows["topic"], topic))) for topic in "ab"]
            yield [TablePart(a, ("a",), planned), TablePart(b, (None,), planned)], by_topic

        monkeypatch.setattr(DeltaSinks, "_divided", divided)
    enter(query, "only")
    batch = offset(0, {("a", 0): (0, 5), ("b", 0): (0, 5)})
    with pytest.raises(RuntimeError, match="once"):
        query.run(sinks, 0, batch)
    query.run(sinks, 0, batch)
    assert rows(tmp_path / "a") == records(0, 5, topic="a")
    assert rows(tmp_path / "table") == records(0, 5, topic="b")
    with pytest.raises(OptionError, match="a second time in one run"):
        query.run(sinks, 0, batch)


def test_a_batch_that_a_function_writes_is_durable_when_spark_has_finished_it(
    query: Query, table: Path, tmp_path: Path, enter: Enter
) -> None:
    """Whether the function writes to further tables is unknown before, in any batch."""
    a, b = query.sink(table), query.sink(tmp_path / "other")
    enter(query, "only")
    for n, sinks in enumerate(([a, b], [a], [a, b])):
        batch = offset(n, one(n * 5, n * 5 + 5))
        for sink in sinks:
            query.run_function([sink], n, batch)
            assert not (query.root / "commits" / str(n)).exists()
            _finished._mark_finished()
            assert run_files.durable_mark("s1").seq == n - 1
        query.finish(n)
        await_until(lambda: run_files.durable_mark("s1") == BatchKey.of(batch), what="the mark")  # noqa: B023


def test_a_batch_that_a_function_does_not_finish_is_never_marked(query: Query, table: Path, enter: Enter) -> None:
    sink = query.sink(table)
    enter(query, "fails in batch 0")
    query.run_function([sink], 0, offset(0, one(0, 5)))
    enter(query, "next")
    query.run_function([sink], 0, offset(0, one(0, 5)))
    query.finish(0)
    await_until(lambda: run_files.durable_mark("s1").seq == 0, what="the mark")
    query.run_function([sink], 1, offset(1, one(5, 9)))
    query.run_function([sink], 2, offset(2, one(9, 12)))
    query.finish(2)
    await_until(lambda: run_files.durable_mark("s1").seq == 2, what="the mark of the newest batch")


def test_a_batch_that_a_reset_made_void_in_one_of_two_tables_is_not_durable(
    query: Query, table: Path, tmp_path: Path, enter: Enter
) -> None:
    a, b = query.sink(table), query.sink(tmp_path / "other")
    enter(query, "only")
    for n in range(2):
        if n == 1:
            set_ledger(query.spark, str(table), "etl", {}, reason="r", reset_number=1)
        query.run_function([a, b], n, offset(n, one(n * 5, n * 5 + 5)))
        query.finish(n)
        await_until(lambda: not _finished._batches, what="the check of the commit log")
    assert (rows(table), rows(tmp_path / "other")) == (records(0, 5), records(0, 10))
    assert (run_files.durable_mark("s1").seq, run_files.void_by("s1", 1)) == (0, 1)


@pytest.fixture
def three(new_query: NewQuery, monkeypatch: pytest.MonkeyPatch) -> list[Query]:
    """Queries whose checkpoints the sink finds by itself."""
    queries = {query.id: query for query in map(new_query, "abc")}
    monkeypatch.setattr(checkpoint, "_running_checkpoint", lambda spark, query_id: str(queries[query_id].root))
    return list(queries.values())


def test_one_sink_may_serve_several_queries(three: list[Query], table: Path, enter: Enter) -> None:
    """The queries have batches of the same numbers; two of them have one group."""
    sink, (a, b, c) = DeltaSink(table), three
    for n in range(2):
        for query, batch in (
            (a, offset(n, one(n * 5, n * 5 + 5))),
            (b, offset(n, one(n * 5, n * 5 + 5, partition=1), stream="s2")),
            (c, offset(n, one(n, n + 1, topic="other"), group="g2", stream="s3")),
        ):
            enter(query, "only")
            query.run(sink, n, batch)
    expected = records(0, 10) + records(0, 10, partition=1) + records(0, 2, topic="other")
    assert Counter(rows(table)) == Counter(expected)
    assert next_offsets(table) == {("orders", 0): 10, ("orders", 1): 10}


def test_a_commit_between_read_and_decision_of_another_query_of_the_same_sink_is_found(
    three: list[Query], table: Path, enter: Enter, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, sink, (a, b, _) = TableWriter.history, DeltaSink(table), three

    def run(query: Query, n: int, batch: StreamOffset) -> None:
        enter(query, "only")
        query.run(sink, n, batch)

    run(a, 0, offset(0, one(0, 5)))
    waiting = [lambda: run(b, 0, offset(0, one(5, 9), stream="s2"))]

    def history(self: TableWriter) -> TableHistory:
        found = real(self)
        while waiting:
            waiting.pop()()
        return found

    monkeypatch.setattr(TableWriter, "history", history)
    run(a, 1, offset(1, one(5, 12)))
    assert rows(table) == records(0, 12)
    assert len(commits(table)) == 4


def test_a_sink_with_the_checkpoint_of_another_query_is_refused_before_it_writes(
    new_query: NewQuery, table: Path, enter: Enter
) -> None:
    a, b = new_query("a"), new_query("b")
    enter(b, "only")
    with pytest.raises(OptionError, match="serves one query: create a DeltaSink for each query"):
        a.run(a.sink(table), 0, offset(0, one(5, 9)))
    assert len(commits(table)) == 1


def test_a_new_run_continues_with_the_same_sink_after_the_table_was_deleted(
    three: list[Query], table: Path, enter: Enter
) -> None:
    sink, (query, other, _) = DeltaSink(table), three
    enter(query, "1")
    query.run(sink, 0, offset(0, one(0, 5)))
    enter(other, "1 of the other")
    other.run(sink, 0, offset(0, one(0, 5, topic="other"), group="other", stream="s2"))
    rmtree(table)
    enter(query, "1")
    with pytest.raises(LedgerConflict, match="was deleted or replaced while the query runs"):
        query.run(sink, 1, offset(1, one(5, 8)))
    assert not table.exists()
    enter(query, "2")
    query.run(sink, 1, offset(1, one(5, 8)))
    assert rows(table) == records(5, 8)
    enter(other, "1 of the other")
    with pytest.raises(LedgerConflict, match="was deleted or replaced while the query runs"):
        other.run(sink, 1, offset(1, one(5, 8, topic="other"), group="other", stream="s2"))
    enter(other, "2 of the other")
    other.run(sink, 1, offset(1, one(5, 8, topic="other"), group="other", stream="s2"))
    enter(query, "2")
    query.run(sink, 2, offset(2, one(8, 9)))
    assert rows(table) == sorted(records(5, 8, topic="other") + records(5, 9))
    assert (next_offsets(table), next_offsets(table, "other")) == ({("orders", 0): 9}, {("other", 0): 8})


def test_a_new_run_continues_with_the_same_sink_after_an_older_copy_took_the_table_s_place(
    query: Query, table: Path, enter: Enter, tmp_path: Path
) -> None:
    """The copy has the same id and fewer commits."""
    sink = query.sink(table)
    enter(query, "1")
    query.run(sink, 0, offset(0, one(0, 5)))
    copytree(table, tmp_path / "copy")
    query.run(sink, 1, offset(1, one(5, 8)))
    rmtree(table)
    copytree(tmp_path / "copy", table)
    with pytest.raises(LedgerConflict, match="was deleted or replaced while the query runs"):
        query.run(sink, 2, offset(2, one(8, 9)))
    enter(query, "2")
    query.run(sink, 2, offset(2, one(5, 9)))
    assert rows(table) == records(0, 9)
