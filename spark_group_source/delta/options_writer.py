"""Writes a batch with Delta's documented options for idempotent writes: ``txnAppId``, ``txnVersion``, ``userMetadata``.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``). Deliberately absent: Delta's
classes, table features, what is decided about a batch.

``txnAppId`` names the group and ``txnVersion`` is the group's next ``SetTransaction`` number. Of two writers with one
number, the second gets a ConcurrentTransactionException, or Delta skips its commit without an error. So
:mod:`table_writer` looks for each commit in the table's history afterwards. A commit has one number here, so all
sources of a query share one group, and the files of an attempt that lost a race are written again.
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
"""The number of tasks by which Delta computes the table's state, which each write with ``txnVersion`` does; the default
of 50 takes several seconds on a machine with two cores."""

CREATE_ATTEMPTS_MAX = 10
"""How often the creation of a table is attempted while another writer creates it; usually two suffice."""

CREATE_WAIT_MAX_S = 1.0
"""Longest wait between two attempts, in seconds; creating a directory and the first commit in it takes less."""

_FOLDER_EXISTS = {
    "TABLE_OR_VIEW_ALREADY_EXISTS",
    "DELTA_TABLE_ALREADY_EXISTS",
    "DELTA_CREATE_TABLE_WITH_NON_EMPTY_LOCATION",
    "DELTA_TABLE_NOT_FOUND",
    "DELTA_MISSING_DELTA_TABLE",
}
"""Error conditions for a folder that has a table, a table that another writer is creating, or other files."""


class OptionsWriter:
    """Appends to one table through Delta's DataFrame writer."""

    def __init__(
        self, spark: "SparkSession", table: str, partition_by: tuple[str, ...] = (), merge_schema: bool = False
    ) -> None:
        self._spark, self._table = spark, table
        self._partition_by, self._merge_schema = partition_by, merge_schema

    def create(self, rows: "DataFrame", exists: Callable[[], bool]) -> None:
        """Create the table with the columns of these rows, unless it exists. Other writers may do so at the same time.

        Args:
            exists: returns whether the table exists: Spark reports any folder with files as an existing table.

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
            except Exception as exc:  # raised by py4j where PySpark does not translate the class
                condition = exc.getCondition() if isinstance(exc, PySparkException) else None
                if condition in _FOLDER_EXISTS and exists():
                    return
                if condition in _FOLDER_EXISTS and attempt == CREATE_ATTEMPTS_MAX:
                    raise OptionError(
                        f"table {self._table} cannot be created: its folder is not empty and has no Delta table. Use "
                        "another folder, or remove the files from it",
                        table=self._table,
                    ) from exc
                if attempt == CREATE_ATTEMPTS_MAX or not (commit_race.is_race(exc) or condition in _FOLDER_EXISTS):
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
        """Commit like :meth:`NativeWriter.commit`; but Delta skips a commit whose number is used, without an error.

        Args:
            columns: the columns whose values a writer supplies; None: all columns of the table.

        Raises:
            OptionError: the batch has several groups.
            CommitRace: another writer committed first.
        """
        if not needed:
            return False  # a batch with records always moves a position
        if len(numbers) > 1:
            groups = sorted(name.rpartition(".")[2] for name in numbers)
            raise OptionError(
                f"the sources of this query have the groups {', '.join(groups)}, and a commit of Delta's writer has "
                f"one SetTransaction number, so a query can write only one group to table {self._table}. Nothing was "
                "written. Use one query for each group, or read all topics with one group",
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
        except Exception as exc:  # raised by py4j where PySpark does not translate the class
            if commit_race.is_race(exc):
                raise commit_race.CommitRace(str(exc)) from exc
            raise

    def _empty(self, columns: Sequence[str] | None) -> "DataFrame":
        table = table_names.read(self._spark, self._table)
        schema = (table if columns is None else table.select(*map(table_names.quoted, columns))).schema
        return self._spark.createDataFrame([], schema)


@contextlib.contextmanager
def _few_snapshot_tasks(spark: "SparkSession") -> Iterator[None]:
    """Set SNAPSHOT_PARTITIONS for one write, unless the user has set it or the platform forbids it."""
    try:
        is_unset = spark.conf.get(SNAPSHOT_PARTITIONS, None) is None
        if is_unset:
            spark.conf.set(SNAPSHOT_PARTITIONS, "2")
    except PySparkException:
        is_unset = False
    try:
        yield
    finally:
        if is_unset:
            spark.conf.unset(SNAPSHOT_PARTITIONS)
