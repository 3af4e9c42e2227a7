"""The way into a table through Delta's classes: one transaction that reads, compares and commits.

Runs in: the user's driver, the command line, on classic Spark with the delta-spark jar. Deliberately absent: what is
decided about a batch.

Beside what every commit of ours has, it has a ``SetTransaction`` with the query's batch and the ledger as a metadata
domain, which does not age. Several groups have one commit. Files that were written for an attempt that lost are
committed by the next one.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from spark_group_source.delta import deltalog, names, notes, races
from spark_group_source.delta.draft import Draft
from spark_group_source.delta.history import Logged
from spark_group_source.delta.ledger import DOMAIN_PREFIX, Ledger
from spark_group_source.model import OffsetRange

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Door:
    def __init__(self, spark: "SparkSession", table: str, partition_by: tuple[str, ...], merge_schema: bool) -> None:
        self.spark, self.handle = spark, deltalog.Table(spark, table)
        self.partition_by, self.merge_schema = partition_by, merge_schema
        self.written: deltalog.Written | None = None
        self.without: tuple[OffsetRange, ...] = ()

    def prepare(self, rows: "Callable[[], DataFrame]") -> str:
        if not self.handle.exists():
            self.handle.create(rows(), self.partition_by)
        self.handle.ensure_domains()
        return str(self.handle.snapshot().java.metadata().id())

    def begin(self) -> "Entry":
        return Entry(self, self.handle.begin())


class Entry:
    def __init__(self, door: Door, txn: deltalog.Transaction) -> None:
        self._door, self._txn = door, txn
        self.past = Logged(door.spark, door.handle.table, txn.snapshot)

    def forgets(self) -> str | None:
        return self._txn.snapshot.properties().get(names.RETENTION)

    def ledger(self, group: str) -> Ledger | None:
        self._txn.recorded(DOMAIN_PREFIX + group)
        return self.past.ledger(group)

    def number(self, group: str, /) -> int:
        return max(0, self._txn.recorded(DOMAIN_PREFIX + group))

    def recorded(self, query_id: str, ledgers: Mapping[str, Ledger | None]) -> int:
        noted = [led.queries.get(query_id, -1) for led in ledgers.values() if led is not None]
        return max([self._txn.recorded(query_id), *noted])

    def write(self, draft: Draft) -> int | None:
        written = deltalog.NO_FILES if draft.rows is None else self._files(draft.rows, draft.without)
        if not (written.actions or draft.needed):
            return None
        return self._txn.commit(
            written,
            {DOMAIN_PREFIX + group: after.to_json() for group, after in draft.ledgers.items()},
            app_id=draft.planned.query_id,
            batch_id=draft.planned.batch_id,
            numbers={DOMAIN_PREFIX + group: after.number for group, after in draft.ledgers.items()},
            user_metadata=notes.text(draft.planned.offsets, draft.ledgers.values()),
        )

    def _files(self, rows: "Callable[[], DataFrame]", without: tuple[OffsetRange, ...]) -> deltalog.Written:
        door = self._door
        if door.written is None or door.without != without or not self._txn.adopt(door.written):
            door.written = self._txn.write(rows(), partition_by=door.partition_by, merge_schema=door.merge_schema)
            door.without = without
        return door.written

    def restate(self, ledger: Ledger, note: str) -> int:
        name = DOMAIN_PREFIX + ledger.group
        self._txn.recorded(name)
        # A table that only knows numbers and notes need not be given a feature.
        counted = self._txn.snapshot.recorded(name) >= 0 and not self._door.handle.has_domains()
        if not counted and self._door.handle.ensure_domains():
            raise races.CommitRace("the table has a new feature")
        domains = {} if counted else {name: ledger.to_json()}
        return self._txn.commit_domains(domains, numbers={name: ledger.number}, user_metadata=note)
