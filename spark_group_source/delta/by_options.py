"""The way into a table through what every Delta documents: idempotent writes, ``userMetadata``, the history.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``). Deliberately absent: Delta's
classes, table features, what is decided about a batch.

``txnAppId`` names the group and ``txnVersion`` is the number of its commit: of two writers that count the same number
one gets a ConcurrentTransactionException, or is skipped by Delta without a word if it comes late. So every commit is
looked for afterwards. One commit has one such number, so the sources of a query must be of one group here, and files
that were written for an attempt that lost are written again.
"""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException

from spark_group_source.delta import names, notes, races
from spark_group_source.delta.draft import Draft
from spark_group_source.delta.history import Aged
from spark_group_source.delta.ledger import DOMAIN_PREFIX, Ledger
from spark_group_source.delta.told import Told
from spark_group_source.errors import OptionError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_NO_TABLE = {
    "TABLE_OR_VIEW_NOT_FOUND",
    "DELTA_MISSING_DELTA_TABLE",
    "DELTA_TABLE_NOT_FOUND",
    "DELTA_PATH_DOES_NOT_EXIST",
}
"""The conditions under which ``DESCRIBE DETAIL`` says that there is no table."""

_NOT_THERE = {*_NO_TABLE, "DELTA_TABLE_ONLY_OPERATION"}
"""The same for ``DESCRIBE HISTORY``."""


def properties(spark: "SparkSession", table: str) -> dict[str, str] | None:
    """The properties of a table; None, if there is no table."""
    try:
        detail: Any = spark.sql(f"DESCRIBE DETAIL {names.sql_name(table)}").first()
    except PySparkException as exc:
        if exc.getCondition() in _NO_TABLE:
            return None
        raise
    return dict(detail["properties"])


class Door:
    def __init__(
        self,
        spark: "SparkSession",
        table: str,
        known: dict[str, Ledger],
        partition_by: tuple[str, ...],
        merge_schema: bool,
    ) -> None:
        self.spark, self.table, self.known = spark, table, known
        self.partition_by, self.merge_schema = partition_by, merge_schema

    def prepare(self, rows: "Callable[[], DataFrame]") -> str:
        """Raises OptionError if the table forgets the numbers of commits."""
        found = properties(self.spark, self.table)
        if found is None:
            # A table of its own commit: CREATE AS SELECT would not compare the number.
            empty = self.spark.createDataFrame([], rows().schema).write.format("delta").mode("ignore")
            races.retry_races(lambda: self._save(empty), what=f"creating table {self.table}")
        retention = (found or {}).get(names.RETENTION)
        if retention is not None:
            raise OptionError(
                f"table {self.table} sets {names.RETENTION} = {retention!r}. Delta would forget which batches it "
                "has, and here nothing else prevents a replay from being written twice. Unset it: ALTER TABLE "
                f"{names.sql_name(self.table)} UNSET TBLPROPERTIES ('{names.RETENTION}')",
                table=self.table,
            )
        return self.table

    def begin(self) -> "Entry":
        told = Told(self.spark, self.table)
        try:
            return Entry(self, told, told.version)
        except PySparkException as exc:
            if exc.getCondition() in _NOT_THERE:
                return Entry(self, told.at(-1), -1)
            raise

    def write(self, rows: "DataFrame", app_id: str, number: int, note: str) -> None:
        """Raises CommitRace. Delta may have skipped it all the same."""
        writer = (
            rows.write.format("delta")
            .mode("append")
            .option("txnAppId", app_id)
            .option("txnVersion", number)
            .option("userMetadata", note)
            .option("mergeSchema", self.merge_schema)
        )
        self._save(writer)

    def _save(self, writer: Any) -> None:
        if self.partition_by:
            writer = writer.partitionBy(*self.partition_by)
        try:
            if names.is_path(self.table):
                writer.save(self.table)
            else:
                writer.saveAsTable(self.table)
        except Exception as exc:  # py4j's own, where PySpark does not know the class
            if races.is_race(exc):
                raise races.CommitRace(str(exc)) from exc
            raise


class Entry:
    def __init__(self, door: Door, told: Told, version: int) -> None:
        self._door, self.past = door, told
        if version < max((led.table_version for led in door.known.values()), default=-1):
            self.past = told.at(-1)  # another table of that name

    def forgets(self) -> str | None:
        return None  # refused before

    def ledger(self, group: str) -> Ledger | None:
        try:
            return self.past.ledger(group, self._door.known.get(group))
        except Aged:
            # Whether the group ever wrote here Delta knows: it skips what comes too late.
            try:
                began = Ledger(group=group)
                self.restate(began, notes.text((), [began], read=self.past.version))
            except races.CommitRace:
                if Told(self._door.spark, self._door.table).noted(group) is not None:
                    raise  # somebody else began at the same moment
                raise Aged(group, self.number(group)) from None
            return began

    def number(self, _group: str, /) -> int:
        return int(time.time() * 1000)  # no group commits a thousand times a second

    def recorded(self, query_id: str, ledgers: Mapping[str, Ledger | None]) -> int:
        return max((led.queries.get(query_id, -1) for led in ledgers.values() if led is not None), default=-1)

    def write(self, draft: Draft) -> int | None:
        planned, ledgers = draft.planned, draft.ledgers
        if len(ledgers) > 1:
            raise OptionError(
                f"the sources of query {planned.query_id} are of the groups {', '.join(sorted(ledgers))}. One commit "
                "of Delta's writer has one number, so without Delta's Java classes DeltaSink writes one group a query. "
                "Nothing was written. Give each group a query of its own, or read all topics as one group",
                groups=sorted(ledgers),
            )
        if not (draft.needed or planned.other_sources):
            return None  # whatever has records moves a position
        frame = self._empty() if draft.rows is None else draft.rows()
        if not ledgers:
            self._door.write(frame, planned.query_id, planned.batch_id, notes.text((), ()))
            return None
        (after,) = ledgers.values()
        return self._commit(frame, after, notes.text(planned.offsets, [after], read=self.past.version))

    def restate(self, ledger: Ledger, note: str) -> int:
        return self._commit(self._empty(), ledger, note)

    def _commit(self, rows: "DataFrame", ledger: Ledger, note: str) -> int:
        self._door.write(rows, DOMAIN_PREFIX + ledger.group, ledger.number, note)
        version = self.past.landed(note)
        if version is None:
            raise races.CommitRace(f"another commit of group {ledger.group} has number {ledger.number}")
        return version

    def _empty(self) -> "DataFrame":
        spark = self._door.spark
        return spark.createDataFrame([], names.read(spark, self._door.table).schema)
