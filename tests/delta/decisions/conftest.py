"""Fixtures for the sink without a JVM: real tables, created by ``deltalake``."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kit import frames
from kit.frames import Session
from offset_model import SERVERS, OffsetModel
from sink_words import Query

from spark_group_source.cli import common
from spark_group_source.delta import sink


@pytest.fixture(scope="session")
def spark() -> Session:
    return Session()


@pytest.fixture(autouse=True)
def without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sink.without_ranges
    monkeypatch.setattr(
        sink,
        "without_ranges",
        lambda df, drop, table: frames.without_ranges(df, drop, table) if drop else real(df, drop, table),
    )


@pytest.fixture
def admin(query: Query, monkeypatch: pytest.MonkeyPatch) -> OffsetModel:
    kafka = OffsetModel()

    @contextmanager
    def session(wanted: bool) -> Iterator[Session | None]:
        yield query.spark if wanted else None  # type: ignore[misc]

    def admin_of(servers: str, group: str, config: Path | None = None) -> OffsetModel:
        assert (servers, group) == (SERVERS, kafka.group)
        kafka.settings = common.options_of(servers, group, config).admin_settings()
        return kafka

    monkeypatch.setattr(common, "session", session)
    monkeypatch.setattr(common, "admin_of", admin_of)
    return kafka
