"""Fixtures of the sink's tests: a query without Kafka, a table, somebody who commits in between."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import sink_source
from pyspark import cloudpickle
from sink_source import SCHEMA, ScriptSource
from sink_words import Query

from spark_group_source.delta import by_options, deltalog
from spark_group_source.delta.sink import Tier

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def tier() -> Tier:
    """Of the queries' sinks."""
    return "auto"


@pytest.fixture
def new_query(spark: "SparkSession", tmp_path: Path, tier: Tier) -> Callable[[str], Query]:
    return lambda name: Query(spark, tmp_path / "checkpoints", name, tier)


@pytest.fixture
def query(new_query: Callable[[str], Query]) -> Query:
    return new_query("q")


@pytest.fixture
def new_table(tmp_path: Path) -> Path:
    """Where no table is yet."""
    return tmp_path / "table"


@pytest.fixture(scope="session")
def created(spark: "SparkSession", tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sink") / "table"
    deltalog.Table(spark, str(made)).create(spark.createDataFrame([], SCHEMA), [])
    return made


@pytest.fixture
def table(created: Path, new_table: Path) -> Path:
    """A table as the sink creates it. A copy, because a creation takes longer than most batches."""
    return Path(shutil.copytree(created, new_table))


@pytest.fixture
def intruder(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """``intruder(action)``: once, just before the next commit, someone else does ``action``."""

    def arm(action: Callable[[], object]) -> None:
        real, write = deltalog.Transaction.commit, by_options.Door.write
        waiting = [action]

        def commit(self: deltalog.Transaction, *args: Any, **kwargs: Any) -> int:
            if waiting:
                waiting.pop()()
            return real(self, *args, **kwargs)

        def by_writer(self: by_options.Door, *args: Any, **kwargs: Any) -> None:
            if waiting:
                waiting.pop()()
            write(self, *args, **kwargs)

        monkeypatch.setattr(deltalog.Transaction, "commit", commit)
        monkeypatch.setattr(by_options.Door, "write", by_writer)

    return arm


@pytest.fixture
def scripted(spark: "SparkSession") -> Iterator["SparkSession"]:
    # By value: the Python workers of Spark do not have the tests on their path.
    cloudpickle.register_pickle_by_value(sink_source)
    spark.dataSource.register(ScriptSource)
    yield spark
    cloudpickle.unregister_pickle_by_value(sink_source)
