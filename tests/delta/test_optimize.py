"""``DeltaSink(optimize_every=N)`` on a real Spark with Delta, and in a session without: small files are combined, and
the rows and the ledger stay. Deliberately absent: what ``OPTIMIZE`` chooses."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from delta_files import living_files
from deltalake import DeltaTable
from deltalake import Schema as DeltaSchema
from sink_helpers import Query, next_offsets, records, rows
from sink_source import offset

from spark_group_source import DeltaSink, DeltaSinks, Merge, OptionError
from spark_group_source.delta import Writer
from spark_group_source.delta.table_writer import TableWriter

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("few_tasks")]


def write(query: Query, sink: DeltaSink | DeltaSinks, numbers: range, *topics: str) -> None:
    for n in numbers:
        ranges = {(topic, 0): (4 * n, 4 * n + 4) for topic in topics or ("orders",)}
        query.run(sink, n, offset(n, ranges))


@pytest.mark.parametrize("writer", ["native", pytest.param("options", marks=pytest.mark.full)])
def test_small_files_are_combined_after_every_third_commit_also_of_several_runs(
    query: Query, tmp_path: Path, writer: Writer
) -> None:
    table = tmp_path / "table"
    write(query, query.sink(table, writer=writer, optimize_every=3), range(2))
    before = len(living_files(table))
    write(query, query.sink(table, writer=writer, optimize_every=3), range(2, 3))
    assert before >= 2 and len(living_files(table)) == 1
    write(query, query.sink(table, writer=writer, optimize_every=3), range(3, 5))
    assert rows(table) == records(0, 20) and next_offsets(table) == {("orders", 0): 20}
    assert len(living_files(table)) > 1


def test_each_table_of_several_is_combined_by_its_own_commits(query: Query, tmp_path: Path) -> None:
    sinks = DeltaSinks(lambda t: query.sink(tmp_path / t, optimize_every=2), checkpoint=str(query.root))
    write(query, sinks, range(1), "clicks")
    write(query, sinks, range(1, 2), "clicks", "orders")
    assert len(living_files(tmp_path / "clicks")) == 1
    assert rows(tmp_path / "clicks") == records(0, 8, topic="clicks")
    assert rows(tmp_path / "orders") == records(4, 8)


def test_a_merged_table_is_combined_without_the_number_of_the_merge(query: Query, tmp_path: Path) -> None:
    def changes(df: Any) -> Any:
        return df.selectExpr("offset AS id", "offset")

    sink = query.sink(tmp_path / "table", transform=changes, merge=Merge(["id"]), optimize_every=2)
    write(query, sink, range(3))
    assert [row[0] for row in rows(tmp_path / "table")] == list(range(12))
    assert next_offsets(tmp_path / "table") == {("orders", 0): 12}


def test_a_failure_is_logged_and_the_batch_stays(
    query: Query, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: TableWriter) -> None:
        raise OSError("No space left on device\nmore")

    monkeypatch.setattr(TableWriter, "compact", full)
    write(query, query.sink(tmp_path / "table", optimize_every=1), range(2))
    failures = [message for message in caplog.messages if "small files are not combined" in message]
    assert [message.endswith(": No space left on device") for message in failures] == [True, True]
    assert rows(tmp_path / "table") == records(0, 8)


def test_without_delta_lake_deltalake_combines_files(
    query: Query, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "table"
    write(query, query.sink(table, writer="native"), range(2))
    writer = TableWriter(query.spark, str(table))
    assert writer.exists()
    monkeypatch.setattr("spark_group_source.delta.table_writer.has_delta", lambda _: False)
    writer.compact()
    assert len(living_files(table)) == 1 and rows(table) == records(0, 8)


def test_deltalake_combines_no_files_whose_names_a_vacuum_does_not_recognise(
    query: Query, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    table = tmp_path / "table"
    DeltaTable.create(
        table, DeltaSchema.from_arrow(pa.schema({"offset": pa.int64(), "größe": pa.string()})), partition_by=["größe"]
    )
    monkeypatch.setattr("spark_group_source.delta.table_writer.has_delta", lambda _: False)

    def sized(df: Any) -> Any:
        return df.selectExpr("offset", "'M' AS `größe`")

    write(query, query.sink(table, writer="native", transform=sized, optimize_every=1), range(2))
    assert "not combined" in caplog.text and "partition column größe" in caplog.text
    assert len(living_files(table)) >= 2


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(OptionError, match="optimize_every is -1; it must be 0 or more"):
        DeltaSink("/x/t", optimize_every=-1)
