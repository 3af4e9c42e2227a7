"""Fixtures of the sink's tests: a query without Kafka, a table, a concurrent writer."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import sink_source
from pyspark import cloudpickle
from sink_helpers import BeforeNextCommit, NewQuery, Query, created_table
from sink_source import ScriptSource

from spark_group_source import compatibility
from spark_group_source.delta import Writer
from spark_group_source.delta.native_writer import NativeWriter
from spark_group_source.delta.table_writer import OptionsWriter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def writer() -> Writer:
    """The writer of the queries' sinks."""
    return "auto"


@pytest.fixture
def new_query(spark: "SparkSession", tmp_path: Path, writer: Writer) -> NewQuery:
    return lambda name: Query(spark, tmp_path / "checkpoints", name, writer)


@pytest.fixture
def query(new_query: NewQuery) -> Query:
    return new_query("q")


@pytest.fixture
def new_table(tmp_path: Path) -> Path:
    """The path of a table that does not exist yet."""
    return tmp_path / "table"


@pytest.fixture(scope="session")
def created(spark: "SparkSession", tmp_path_factory: pytest.TempPathFactory) -> Path:
    return created_table(spark, tmp_path_factory.mktemp("sink"))


@pytest.fixture
def table(created: Path, new_table: Path) -> Path:
    """A table as the sink creates it: a copy, because a creation takes longer than most batches."""
    return Path(shutil.copytree(created, new_table))


@pytest.fixture
def few_tasks(spark: "SparkSession") -> Iterator[None]:
    """Run Delta's commands with one task, because the tables have few rows."""
    names = ("shuffle.partitions", "sources.parallelPartitionDiscovery.parallelism")
    settings = dict.fromkeys((*(f"spark.sql.{n}" for n in names), "spark.databricks.delta.snapshotPartitions"), "1")
    former = {key: spark.conf.get(key, None) for key in settings}
    for key, few in settings.items():
        spark.conf.set(key, few)
    yield
    for key, value in former.items():
        spark.conf.unset(key) if value is None else spark.conf.set(key, value)


@pytest.fixture
def before_next_commit(monkeypatch: pytest.MonkeyPatch) -> BeforeNextCommit:
    def arm(action: Callable[[], object]) -> None:
        waiting = [action]
        for kind in (NativeWriter, OptionsWriter):
            real = kind.commit

            def commit(self: Any, rows: Any, *args: Any, real: Any = real, **kwargs: Any) -> bool:
                if waiting:
                    waiting.pop()()
                return bool(real(self, rows, *args, **kwargs))

            monkeypatch.setattr(kind, "commit", commit)

    return arm


@pytest.fixture
def scripted(spark: "SparkSession") -> Iterator["SparkSession"]:
    if not compatibility.has_admission_control():
        pytest.skip("Spark 4.0 and 4.1 run one batch with AvailableNow")
    # By value: Spark's Python workers cannot import the tests.
    cloudpickle.register_pickle_by_value(sink_source)
    spark.dataSource.register(ScriptSource)
    yield spark
    cloudpickle.unregister_pickle_by_value(sink_source)
