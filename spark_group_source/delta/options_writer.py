"""Writes a batch by Delta's documented options for idempotent writes: ``txnAppId``, ``txnVersion``, ``userMetadata``.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``). Deliberately absent: Delta's
classes, table features, what is decided about a batch.

``txnAppId`` names the group and ``txnVersion`` is the number of its commit: of two writers with one number one gets a
ConcurrentTransactionException, or Delta skips it without an error if it comes later. So :mod:`writers` looks for every
commit afterwards. One such commit has one number, so the sources of a query are of one group here, and the files of an
attempt that lost are written again.
"""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException

from spark_group_source.delta import commit_race, table_names
from spark_group_source.errors import OptionError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SNAPSHOT_PARTITIONS = "spark.databricks.delta.snapshotPartitions"
"""Into how many tasks Delta splits the table's state. It computes that state in each write with ``txnVersion``; with
the default of 50 tasks this takes several seconds on a machine with two cores."""

CREATE_ATTEMPTS_MAX = 10
"""How often the creation of a table that another writer creates too is tried; mostly the second attempt finds it."""

CREATE_WAIT_MAX_S = 1.0
"""Longest wait between two such attempts; the other writer needs less from making the directory to its first commit."""

_NOT_EMPTY = {
    "TABLE_OR_VIEW_ALREADY_EXISTS",
    "DELTA_TABLE_ALREADY_EXISTS",
    "DELTA_CREATE_TABLE_WITH_NON_EMPTY_LOCATION",
    "DELTA_TABLE_NOT_FOUND",
    "DELTA_MISSING_DELTA_TABLE",
}
"""The folder is there: with a table, or with that of another writer that is just creating it, or with other files."""


class OptionsWriter:
    """Appends to one table through Delta's DataFrame writer."""

    def __init__(
        self, spark: "SparkSession", table: str, partition_by: tuple[str, ...] = (), merge_schema: bool = False
    ) -> None:
        self._spark, self._table = spark, table
        self._partition_by, self._merge_schema = partition_by, merge_schema

    def create(self, rows: "DataFrame", exists: Callable[[], bool]) -> None:
        """Create the table with the columns of these rows, unless it is there; safe against others who do the same.

        Args:
            exists: whether it is there: Spark takes any folder with files for a table that exists.

        Raises:
            OptionError: the folder has other files.
        """
        writer = self._spark.createDataFrame([], rows.schema).writeTo(table_names.sql_name(self._table)).using("delta")
        if self._partition_by:
            from pyspark.sql import functions as F

            writer = writer.partitionedBy(*map(F.col, self._partition_by))
        for attempt in range(1, CREATE_ATTEMPTS_MAX + 1):
            try:
                writer.create()
                return
            except Exception as exc:  # py4j's own, where PySpark does not know the class
                condition = exc.getCondition() if isinstance(exc, PySparkException) else None
                if condition in _NOT_EMPTY and exists():
                    return
                if condition in _NOT_EMPTY and attempt == CREATE_ATTEMPTS_MAX:
                    raise OptionError(
                        f"table {self._table} cannot be created: its folder is not empty and has no Delta table. Name "
                        "another folder, or remove what is there",
                        table=self._table,
                    ) from exc
                if attempt == CREATE_ATTEMPTS_MAX or not (commit_race.is_race(exc) or condition in _NOT_EMPTY):
                    raise
                threading.Event().wait(random.uniform(0, CREATE_WAIT_MAX_S))

    def commit(
        self,
        rows: "DataFrame | None",
        numbers: Mapping[str, int],
        note: str,
        *,
        needed: bool,
        columns: Sequence[str] | None = None,
    ) -> bool:
        """As :meth:`NativeWriter.commit`, but Delta may have skipped a commit whose number is taken.

        Args:
            columns: those that a writer may give values for; None: all of the table.

        Raises:
            OptionError: the batch has several groups.
            CommitRace: another writer was first.
        """
        if not needed:
            return False  # whatever has records moves a position
        if len(numbers) > 1:
            groups = sorted(name.rpartition(".")[2] for name in numbers)
            raise OptionError(
                f"the sources of this query are of the groups {', '.join(groups)}, and one commit of Delta's writer "
                f"has one number, so table {self._table} takes one group a query. Nothing was written. Give each group "
                "a query of its own, or read all topics as one group",
                groups=groups,
            )
        ((app_id, number),) = numbers.items()
        frame = self._empty(columns) if rows is None else rows
        writer = frame.write.format("delta").mode("append")
        writer = writer.option("txnAppId", app_id).option("txnVersion", number).option("userMetadata", note)
        with _few_snapshot_tasks(self._spark):
            self._save(writer.option("mergeSchema", self._merge_schema))
        return True

    def _save(self, writer: Any) -> None:
        if self._partition_by:
            writer = writer.partitionBy(*self._partition_by)
        try:
            if table_names.is_path(self._table):
                writer.save(self._table)
            else:
                writer.saveAsTable(self._table)
        except Exception as exc:  # py4j's own, where PySpark does not know the class
            if commit_race.is_race(exc):
                raise commit_race.CommitRace(str(exc)) from exc
            raise

    def _empty(self, columns: Sequence[str] | None) -> "DataFrame":
        table = table_names.read(self._spark, self._table)
        schema = (table if columns is None else table.select(*map(table_names.quoted, columns))).schema
        return self._spark.createDataFrame([], schema)


@contextlib.contextmanager
def _few_snapshot_tasks(spark: "SparkSession") -> Iterator[None]:
    """Set SNAPSHOT_PARTITIONS for one write, unless the user has, or the platform does not allow it."""
    try:
        mine = spark.conf.get(SNAPSHOT_PARTITIONS, None) is None
        if mine:
            spark.conf.set(SNAPSHOT_PARTITIONS, "2")
    except PySparkException:
        mine = False
    try:
        yield
    finally:
        if mine:
            spark.conf.unset(SNAPSHOT_PARTITIONS)
