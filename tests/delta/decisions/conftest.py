"""Fixtures for the sink without a JVM: real tables, created by ``deltalake``."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deltalake import DeltaTable
from kit import frames
from kit.frames import Session
from offset_model import SERVERS, OffsetModel
from sink_helpers import Query, created_table

from spark_group_source.cli import common
from spark_group_source.delta import sink, topic_sinks
from spark_group_source.delta.table_history import NOTE_START, Commit
from spark_group_source.delta.table_writer import TableWriter, open_log
from spark_group_source.host import run_files
from spark_group_source.options.table import Options
from spark_group_source.protocol.statistics import Statistics


@pytest.fixture(scope="session")
def spark() -> Session:
    return Session()


@pytest.fixture(scope="session")
def created(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not the one of tests/delta, which Delta Lake creates if tests on Spark run first in this process."""
    return created_table(spark, tmp_path_factory.mktemp("decisions"))


@pytest.fixture(autouse=True)
def without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sink.without_ranges
    monkeypatch.setattr(
        sink,
        "without_ranges",
        lambda df, drop, table: frames.without_ranges(df, drop, table) if drop else real(df, drop, table),
    )
    monkeypatch.setattr(topic_sinks, "other_topics", frames.other_topics)
    monkeypatch.setattr(topic_sinks, "rows_of", frames.rows_of)
    monkeypatch.setattr("pyspark.util.inheritable_thread_target", lambda session: lambda call: call)


class ReportedLog:
    """The commits of a table as ``DESCRIBE HISTORY`` reports them: without numbers, and with notes of sinks only."""

    def __init__(self, table: str) -> None:
        found = open_log(table, table, None)
        assert found is not None
        self.table, self._log = table, found

    def newest(self) -> int:
        return self._log.newest()

    def commits(self, newest: int, after: int) -> Iterator[Commit]:
        for commit in self._log.commits(newest, after):
            yield commit if (commit.note or "").startswith(NOTE_START) else commit._replace(note=None)

    def number(self, app_id: str) -> int | None:
        return None

    def restored_to(self, restore: Commit) -> int | None:
        return self._log.restored_to(restore)


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A session with Delta, which reports the history of tables: ``deltalake`` cannot open their logs."""
    session: Any = frames.DeltaSession()

    def describe(text: str) -> SimpleNamespace:
        opened = DeltaTable(text.removeprefix("DESCRIBE DETAIL delta.").strip("`"))
        detail = {"id": opened.metadata().id, "location": opened.table_uri, "properties": {}, "tableFeatures": []}
        detail["format"] = "delta"
        return SimpleNamespace(first=lambda: detail)

    monkeypatch.setattr(session, "sql", describe, raising=False)
    real, real_row_ends = TableWriter._find_source, TableWriter.row_ends

    def find_source(self: TableWriter) -> Any:
        if self.spark is session:
            self._source = self._source or (ReportedLog(self.table) if self._is_described() else None)
        return real(self)

    def row_ends(self: TableWriter, starts: Any = None) -> Any:
        by_files: Any = TableWriter(Session(), self.table)  # type: ignore[arg-type]
        return real_row_ends(by_files if self.spark is session and by_files.exists() else self, starts)

    monkeypatch.setattr(TableWriter, "_find_source", find_source)
    monkeypatch.setattr(TableWriter, "row_ends", row_ends)
    return session


@pytest.fixture
def admin(query: Query, monkeypatch: pytest.MonkeyPatch) -> OffsetModel:
    kafka = OffsetModel()

    @contextmanager
    def session() -> Iterator[Session]:
        yield query.spark  # type: ignore[misc]

    @contextmanager
    def admin_of(servers: str, group: str, config: Path | None = None) -> Iterator[OffsetModel]:
        assert (servers, group) == (SERVERS, kafka.group)
        kafka.settings = common.options_of(servers, group, config).admin_settings()
        yield kafka

    monkeypatch.setattr(common, "session", session)
    monkeypatch.setattr(common, "admin_of", admin_of)
    return kafka


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """The run of the group publishes how to connect to its brokers on this host."""
    monkeypatch.setattr(run_files, "directory", lambda: tmp_path / "runs")
    settings = {"kafka.bootstrap.servers": SERVERS, "kafka.group.id": "etl", "subscribe": "orders"}
    run = run_files.Publisher("etl", Options.parse(settings | getattr(request, "param", {})).connection)
    statistics = Statistics(
        group="etl", stream="s1", seq=0, state="reading", generation=1, assigned=(1,), slots=("assigned",)
    )
    run.publish(statistics)
    yield
    run.close()
