"""Fixtures for the sink without a JVM: real tables, created by ``deltalake``."""

import pytest
from kit import frames
from kit.frames import Session

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
