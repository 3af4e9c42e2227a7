"""What a sink counts for metrics: the rows that each writer, a merge and dead letters changed, on a real Spark with
Delta. Deliberately absent: how the counts are published (``tests/host/test_run_files.py``)."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.sql import functions as F
from sink_helpers import Query, one, rows
from sink_source import offset

from spark_group_source import DeadLetters, Merge
from spark_group_source.delta import Writer
from spark_group_source.delta.table_history import DescribedHistory, TableHistory
from spark_group_source.host import run_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("few_tasks")]

STREAM = "counted"


@pytest.fixture(autouse=True)
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run has created the directory of run files."""
    (tmp_path / "runs").mkdir(mode=0o700)
    monkeypatch.setattr(run_files, "directory", lambda: tmp_path / "runs")
    monkeypatch.setattr(run_files, "_table_rows", {})


def counted(table: Path) -> dict[str, int]:
    (found,) = run_files.table_rows(STREAM).items()
    assert found[0] == str(table)
    return {kind: count for kind, count in found[1].items() if count}


@pytest.mark.parametrize("writer", ["native", "options"])
def test_appended_rows_are_counted_once_by_each_writer(query: Query, tmp_path: Path, writer: Writer) -> None:
    table = tmp_path / "table"
    sink = query.sink(table, writer=writer)
    query.run(sink, 0, offset(0, one(0, 7), stream=STREAM))
    query.run(sink, 1, offset(1, one(7, 10), stream=STREAM))
    assert counted(table) == {"inserted": 10} and len(rows(table)) == 10
    query.run(query.sink(table, writer=writer), 1, offset(1, one(7, 10), stream=STREAM))
    assert counted(table) == {"inserted": 10}, "a replay writes nothing"


def test_changes_of_a_merge_and_bad_records_are_counted(query: Query, tmp_path: Path) -> None:
    table = tmp_path / "table"

    def changes(df: "DataFrame") -> "DataFrame":
        key = (F.col("offset") % 4).alias("id")
        return df.select(key, (F.col("offset") >= 8).alias("gone"), "topic", "partition", "offset")

    letters = DeadLetters(tmp_path / "bad", valid="id < 3", max_fraction=1)
    merge = Merge(["id"], delete_when="gone", without=["gone", "topic", "partition"])
    sink = query.sink(table, transform=changes, merge=merge, dead_letters=letters)
    query.run(sink, 0, offset(0, one(0, 4), stream=STREAM))
    assert counted(table) == {"inserted": 3, "bad": 1}
    query.run(sink, 1, offset(1, one(4, 8), stream=STREAM))
    assert counted(table) == {"inserted": 3, "updated": 3, "bad": 2}
    query.run(sink, 2, offset(2, one(8, 10), stream=STREAM))
    assert counted(table) == {"inserted": 3, "updated": 3, "deleted": 2, "bad": 2}
    history = TableHistory(DescribedHistory(query.spark, str(table)))
    assert [tuple(commit.changed) for commit in history.commits(after=0)] == [(0, 0, 2), (0, 3, 0), (3, 0, 0)]
