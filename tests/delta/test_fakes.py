"""Fakes of Spark and Delta leave the commits and rows that Spark and Delta leave: changes by users, an expired log, a
session, and the simulation's model of Delta's log."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from delta_files import living_rows
from kit import frames
from kit.frames import DeltaSession, Session
from kit.sinks import TableLog
from sink_helpers import Query, actions, commits, expire_log, one
from sink_source import SCHEMA, offset
from table_changes import RETENTION_CHECK, ByFiles, ByStatements, Changes

from spark_group_source.delta import Writer, table_writer
from spark_group_source.delta import sink as sink_module
from spark_group_source.delta.ledger_format import APP_PREFIX, Ledger
from spark_group_source.delta.replaced_rows import find_replacement
from spark_group_source.delta.table_history import (
    ChangedRows,
    CommitRace,
    CommitSource,
    LedgerExpired,
    TableHistory,
    note_of,
)
from spark_group_source.delta.table_writer import TableWriter, open_log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("few_tasks")]

BATCHES = 3
ROWS_3_TO_7 = "orders", (0, 3, 7)
DAY_S = 86_400


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table with three batches of the group."""
    home = tmp_path_factory.mktemp("written")
    table, session = home / "table", Session()
    TableWriter(session, str(table)).create(session.createDataFrame([], SCHEMA))  # type: ignore[arg-type]
    query = Query(session, home, "q")  # type: ignore[arg-type]
    for n in range(BATCHES):
        query.run(query.sink(table), n, offset(n, one(n * 10, n * 10 + 10)))
    for n, path in enumerate(sorted((table / "_delta_log").glob("*.json"))):
        os.utime(path, (path.stat().st_mtime - 60 + n,) * 2)  # Delta finds a version by the time of its file
    return table


def read(table: Path) -> dict[str, Any]:
    """Return what the product reads of a table's commits, and the rows by an independent reader."""
    log = open_log(str(table), str(table), None)
    assert log is not None
    history = TableHistory(log)
    found = list(history.commits())
    ledger: Any
    replacement: Any
    try:
        ledger = history.ledger("etl")
        replacement = find_replacement(history, "etl")
    except LedgerExpired:
        ledger = replacement = "expired"
    clones = [
        {**commit.parameters, "source": commit.parameters["source"].replace(str(table.parent), "")}
        for commit in found
        if commit.operation == "CLONE"
    ]
    # Without the counts of rows, which nothing decides by: they are of Delta Lake itself.
    left_out: dict[str, Any] = {"parameters": {}, "written_ms": None, "changed": ChangedRows()}
    return {
        "commits": [commit._replace(**left_out) for commit in found],
        "clones": clones,
        "restored to": [log.restored_to(commit) for commit in found if commit.operation == "RESTORE"],
        "number": log.number(APP_PREFIX + "etl"),
        "ledger": ledger,
        "replacement": replacement,
        "rows": sorted(map(str, living_rows(table))),
    }


def after_optimize(change: Callable[[Changes, Path], object]) -> Callable[[Changes, Path], None]:
    def changes(by: Changes, table: Path) -> None:
        ByFiles().optimize(table)
        change(by, table)

    return changes


def cloned(by: Changes, table: Path) -> Path:
    by.clone(table, 2, table.with_name("clone"))
    return table.with_name("clone")


CHANGES: dict[str, Callable[[Changes, Path], Path | None]] = {
    "delete": lambda by, table: by.delete(table, *ROWS_3_TO_7),
    "update": lambda by, table: by.update(table, *ROWS_3_TO_7),
    "merge": lambda by, table: by.merge(table, *ROWS_3_TO_7),
    "optimize": lambda by, table: by.optimize(table),
    "vacuum": after_optimize(lambda by, table: by.vacuum(table)),
    "restore": after_optimize(lambda by, table: by.restore(table, 1)),
    "restore to a time": lambda by, table: by.restore_to_time(table, 2),
    "overwrite": lambda by, table: by.overwrite(table, 1),
    "overwrite with no rows": lambda by, table: by.overwrite(table, 0),
    "replace": lambda by, table: by.replace(table, 1),
    "clone": cloned,
}


@pytest.fixture
def statements(spark: "SparkSession") -> Iterator[ByStatements]:
    yield ByStatements(spark)
    spark.conf.unset(RETENTION_CHECK)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_by_files_leaves_the_commits_and_rows_that_the_statement_leaves(
    statements: ByStatements, written: Path, tmp_path: Path, name: str
) -> None:
    found = []
    for by in (ByFiles(), statements):
        table = Path(shutil.copytree(written, tmp_path / type(by).__name__ / "table"))
        found.append(read(CHANGES[name](by, table) or table))
    assert found[0] == found[1]


def cleaned_up_by_delta(spark: "SparkSession", table: Path) -> None:
    """Let Delta delete old files of the log, which it does by whole days, behind a checkpoint."""
    for path in (table / "_delta_log").iterdir():
        os.utime(path, (path.stat().st_mtime - 3 * DAY_S,) * 2)
    days = [f"'delta.{name}' = 'interval 0 days'" for name in ("deletedFileRetentionDuration", "logRetentionDuration")]
    properties = ", ".join([*days, "'delta.checkpointInterval' = '1'"])
    spark.sql(f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ({properties})")


@pytest.mark.slow
def test_a_log_that_is_made_to_expire_looks_like_one_that_delta_cleaned_up(
    spark: "SparkSession", written: Path, tmp_path: Path
) -> None:
    clean_ups: list[Callable[[Path], None]] = [expire_log, lambda table: cleaned_up_by_delta(spark, table)]
    found = []
    for number, clean_up in enumerate(clean_ups):
        table = Path(shutil.copytree(written, tmp_path / str(number)))
        clean_up(table)
        found.append(read(table))
    assert found[0] == found[1]


@pytest.mark.parametrize("writer", ["native", "options"])
def test_the_fake_of_spark_leaves_the_commits_and_rows_that_spark_leaves(
    spark: "SparkSession", written: Path, tmp_path: Path, writer: Writer
) -> None:
    """Two batches and one without rows; then a used number, which Delta's own writer skips."""
    found: list[Any] = []
    for session in (Session() if writer == "native" else DeltaSession(), spark):
        place = tmp_path / str(len(found))
        table = Path(shutil.copytree(written, place / "table"))
        query = Query(session, place, "again", writer)  # type: ignore[arg-type]
        sink = query.sink(table)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(table_writer, "now_ms", lambda: 1000)
            if session is not spark:
                patch.setattr(sink_module, "without_ranges", frames.without_ranges)
            for n, (start, end) in enumerate([(30, 40), (35, 50), (50, 50)]):
                query.run(sink, n, offset(n, {("orders", 0): (start, end), ("orders", 1): (n, n)}, stream="s2"))
        used = query.spark.createDataFrame([("orders", 0, 99, "used")], SCHEMA)
        again = table_writer.OptionsWriter(table_writer.TableWriter(query.spark, str(table)))
        if writer == "options":
            again.commit(used, {APP_PREFIX + "etl": 5}, "[]", needed=True)
        made = commits(table)[BATCHES + 1 :]
        kinds = [{kind for action in commit for kind in action} for commit in made]
        numbers = [[(txn["appId"], txn["version"]) for txn in actions(commit, "txn")] for commit in made]
        found.append(read(table) | {"kinds": kinds, "numbers": numbers})
    fake, real = found
    assert fake == real
    assert len(fake["kinds"]) == 3


# The simulation's model of Delta's log

ETL, OPS = APP_PREFIX + "etl", APP_PREFIX + "ops"


class Driver(NamedTuple):
    """One driver that reads a table's log and commits to it."""

    source: CommitSource
    commit: Callable[[int, dict[str, int], str], int | None]
    """Commits numbers and a note, decided by a version; returns the version that it made."""


@pytest.fixture(params=["LogFiles", "LogFiles, model", "DescribedHistory", "DescribedHistory, model"])
def new_driver(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Driver]:
    """``new_driver()``: another driver of one table, which has its creation only."""
    is_described = request.param.startswith("DescribedHistory")
    if request.param.endswith("model"):
        log = TableLog("/table", is_described=is_described)
        return lambda: Driver(log, log.commit)
    table = str(tmp_path / "table")
    TableWriter(Session(), table).create(Session().createDataFrame([], SCHEMA))  # type: ignore[arg-type]
    session: Any = request.getfixturevalue("spark") if is_described else Session()
    if is_described:
        monkeypatch.setattr(table_writer, "open_log", lambda *args: None)

    def new() -> Driver:
        writer = TableWriter(session, table)
        source = writer.history().source
        assert type(source).__name__ == request.param
        return Driver(
            source,
            lambda read, numbers, note: writer.commit(TableHistory(source, read), None, numbers, note, needed=True),
        )

    return new


def note(group: str, number: int, read: int) -> str:
    return note_of({group: Ledger(group=group, number=number).to_json_dict()}, read=read)


def listed(source: CommitSource, newest: int, after: int) -> list[tuple[Any, ...]]:
    names = ("version", "read", "operation", "note", "unsettles_ledger")
    return [tuple(getattr(commit, name) for name in names) for commit in source.commits(newest, after)]


def test_the_log_of_a_simulated_table_lists_commits_as_a_log_does(new_driver: Callable[[], Driver]) -> None:
    source, commit = new_driver()
    absent = None if source.number(ETL) is None else -1
    assert (source.newest(), source.number(ETL)) == (0, absent)
    created = (0, -1, "CREATE TABLE", None, False)
    assert listed(source, 0, -1) == [created]
    first, second = note("etl", 1, 0), note("ops", 1, 0)
    assert commit(0, {ETL: 1}, first) == 1
    assert commit(0, {OPS: 1}, second) == 2, "decided before the first one"
    assert source.newest() == 2
    made = [(2, 0, "WRITE", second, False), (1, 0, "WRITE", first, False)]
    assert listed(source, 2, -1) == [*made, created]
    assert listed(source, 1, 0) == made[1:]
    assert listed(source, 2, 2) == []
    assert [source.number(app_id) for app_id in (ETL, OPS, "theirs")] in ([1, 1, -1], [None] * 3)


def test_of_two_simulated_commits_with_one_number_one_is_made_as_in_a_log(new_driver: Callable[[], Driver]) -> None:
    winner, loser = new_driver(), new_driver()
    assert winner.commit(0, {ETL: 1}, note("etl", 1, 0)) == 1
    with pytest.raises(CommitRace):
        loser.commit(0, {ETL: 1}, note("etl", 1, 0) + " ")
    assert (winner.source.newest(), loser.source.newest()) == (1, 1)
    assert loser.commit(1, {ETL: 2}, note("etl", 2, 1)) == 2
    with pytest.raises(CommitRace):
        winner.commit(1, {ETL: 2}, note("etl", 2, 1) + " ")
    assert listed(winner.source, winner.source.newest(), 1) == listed(loser.source, 2, 1)


def test_used_numbers_are_refused_and_deltalake_refuses_those_of_a_group_that_committed_since_the_decision(
    new_driver: Callable[[], Driver],
) -> None:
    first, late = new_driver(), new_driver()
    is_described = first.source.number(ETL) is None
    assert first.commit(0, {ETL: 5}, note("etl", 5, 0)) == 1
    with nullcontext() if is_described else pytest.raises(CommitRace):
        late.commit(0, {ETL: 6}, note("etl", 6, 0))
    newest = late.source.newest()
    assert newest == 1 + is_described
    with pytest.raises(CommitRace):
        late.commit(newest, {ETL: 5}, note("etl", 5, newest))
    assert late.source.newest() == newest
