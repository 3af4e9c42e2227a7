"""Tables on S3, and tables that several writers create at the same time, without a JVM."""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from kit.frames import Session
from kit.object_store import ObjectStore, object_store

from spark_group_source.delta import table_names, table_writer
from spark_group_source.delta.table_writer import OptionsWriter, TableWriter
from spark_group_source.errors import OptionError

SCHEMA = "topic string, offset bigint"
WRITERS, ROUNDS = 6, 4
"""Without protection, most rounds of six writers end with two creations."""


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as started:
        yield started


@pytest.fixture(params=["local", "S3"])
def tables(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], tuple[str, dict[str, str] | None]]:
    """``tables(n)`` returns the n-th new table, with its storage options."""
    if request.param == "local":
        return lambda number: (str(tmp_path / str(number)), None)
    store: ObjectStore = request.getfixturevalue("store")
    monkeypatch.setattr(table_names, "location", lambda spark, table: table)
    return lambda number: (store.uri(f"{tmp_path.name}/{number}"), store.storage_options)


def test_writers_that_create_a_table_at_the_same_time_create_one(
    spark: Session, tables: Callable[[int], tuple[str, dict[str, str] | None]]
) -> None:
    for number in range(ROUNDS):
        table, options = tables(number)

        def create(_: int, table: str = table, options: dict[str, str] | None = options) -> str:
            writer = TableWriter(spark, table, storage_options=options)  # type: ignore[arg-type]
            writer.create(spark.createDataFrame([], SCHEMA))  # type: ignore[arg-type]
            return writer.identity()

        with ThreadPoolExecutor(WRITERS) as pool:
            ids = set(pool.map(create, range(WRITERS)))
        found = DeltaTable(table, storage_options=options)
        assert found.version() == 0 and {str(found.metadata().id)} == ids


def test_a_native_table_on_s3_without_delta_lake_needs_storage_options(
    spark: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_names, "location", lambda spark, table: table)
    writer = TableWriter(spark, "s3a://lake/orders")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"no Delta Lake\. Pass storage_options"):
        writer.create(spark.createDataFrame([], SCHEMA))  # type: ignore[arg-type]


@pytest.mark.parametrize("by_deltalake", [True, False])
def test_files_on_s3_are_combined_by_the_library_that_commits_there(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_deltalake: bool
) -> None:
    """On S3, commits of Delta and of deltalake do not exclude each other."""
    statements: list[str] = []
    session = Session()
    session.sql = lambda text: SimpleNamespace(collect=lambda: statements.append(text))  # type: ignore[attr-defined]
    monkeypatch.setattr(table_names, "location", lambda spark, table: table)
    monkeypatch.setattr(table_writer, "has_delta", lambda spark: True)
    table = store.uri(f"{tmp_path.name}/combined")
    for n in range(3):
        write_deltalake(table, pa.table({"n": [n]}), mode="append", storage_options=store.storage_options)
    writer = TableWriter(
        session,  # type: ignore[arg-type]
        table,
        storage_options=store.storage_options,
        writer="native" if by_deltalake else "options",
    )
    assert writer.exists()
    writer.compact()
    found = DeltaTable(table, storage_options=store.storage_options)
    assert (len(found.file_uris()) == 1, not statements) == (by_deltalake, by_deltalake)
    assert sorted(found.to_pyarrow_table()["n"].to_pylist()) == [0, 1, 2]


# --- Delta's writer on S3 --------------------------------------------------------------------------------------------

STORE_SETTING = "spark.delta.logStore.s3a.impl"


@pytest.mark.parametrize(
    ("location", "setting", "features", "lines"),
    [
        ("s3a://lake/orders", None, [], 1),
        ("s3a://lake/orders", "io.delta.storage.S3DynamoDBLogStore", [], 0),
        ("s3a://lake/orders", None, ["catalogManaged"], 0),
        ("abfss://lake@account/orders", None, [], 0),
    ],
    ids=["S3", "another LogStore", "a catalog commits", "Azure"],
)
def test_commits_of_deltas_writer_on_s3_are_warned_of_once(
    location: str,
    setting: str | None,
    features: list[str],
    lines: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    detail: dict[str, Any] = {"id": "1", "location": location, "properties": {}, "tableFeatures": features}
    detail["format"] = "delta"
    session = SimpleNamespace(
        sql=lambda text: SimpleNamespace(first=lambda: detail),
        conf=SimpleNamespace(get={STORE_SETTING: setting}.get),
    )
    monkeypatch.setattr(table_names, "location", lambda spark, table: table)
    monkeypatch.setattr(table_writer, "has_delta", lambda spark: True)
    monkeypatch.setattr(OptionsWriter, "commit", lambda *args, **more: False)
    table_writer._warn_once.cache_clear()
    writer = TableWriter(session, location)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            writer.commit(SimpleNamespace(version=0), None, {"app": 1}, "note", needed=True)  # type: ignore[arg-type]
    logged = [record.getMessage() for record in caplog.records if record.name == table_writer.__name__]
    assert len(logged) == lines, caplog.text
    assert all(STORE_SETTING in line and "only one driver" in line for line in logged)
