"""The sink without a JVM: real tables, made by ``deltalake``."""

import pytest
from kit import frames
from kit.frames import Session

from spark_group_source.delta import sink


@pytest.fixture(scope="session")
def spark() -> Session:
    return Session()


@pytest.fixture(autouse=True)
def without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sink.without
    monkeypatch.setattr(
        sink,
        "without",
        lambda df, drop, table: frames.without(df, drop, table) if drop else real(df, drop, table),
    )
