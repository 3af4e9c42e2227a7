"""Delta's log, through the classes of the Delta jar.

Runs in: the user's driver, the command line. Deliberately absent: groups, offsets, Kafka; any Scala of our own; Spark
Connect, where no Java object can be reached (:func:`available` says so).

Rows enter the table on Delta's own write path, so its schema, constraints, generated and identity columns,
partitioning and statistics are Delta's business. What is added here is that the actions of a write are committed
together with a ``SetTransaction`` and with metadata domains. Everything from py4j is ``Any``: py4j has no types.
"""

import logging
import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException

from spark_group_source.delta import names, races
from spark_group_source.errors import OptionError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)

CREATE_ATTEMPTS_MAX = 10
"""How often the creation of a table that another writer creates too is tried; mostly the second attempt finds it."""

CREATE_WAIT_MAX_S = 1.0
"""Longest wait between two such attempts; the other writer needs less from making the directory to its first commit."""

FEATURE = "domainMetadata"

# With other files in the directory, with an empty log, and with neither.
_HALF_CREATED = {"DELTA_CREATE_TABLE_WITH_NON_EMPTY_LOCATION", "DELTA_TABLE_NOT_FOUND", "DELTA_MISSING_DELTA_TABLE"}


def available(spark: "SparkSession") -> bool:
    """Whether this session reaches the classes of Delta's open-source jar. False on Spark Connect and on platforms
    that ship Delta under other names."""
    jvm: Any = getattr(spark, "_jvm", None) if hasattr(spark, "_jsparkSession") else None
    if jvm is None:
        return False
    # py4j gives a JavaPackage for a name that is not a class.
    names = (
        jvm.org.apache.spark.sql.delta.commands.WriteIntoDelta,
        jvm.org.apache.spark.sql.delta.actions.DomainMetadata,
    )
    return all(type(name).__name__ == "JavaClass" for name in names)


def open_table(spark: "SparkSession", table: str) -> "Table":
    """A handle on an existing Delta table.

    Raises:
        OptionError: there is no such Delta table.
    """
    handle = Table(spark, names.qualified(spark, names.canonical(table)))
    if not handle.exists():
        raise OptionError(names.no_table(spark, table), table=table)
    return handle


class Table:
    """One Delta table, by path or by name. Nothing is opened until it is used."""

    def __init__(self, spark: "SparkSession", table: str) -> None:
        self.table = table
        self._spark = spark
        self._jvm: Any = spark._jvm
        self._jspark: Any = spark._jsparkSession

    def exists(self) -> bool:
        """Whether there is a Delta table. A name that belongs to another format is an error of Delta's own."""
        if names.is_path(self.table):
            # DeltaTable.isDeltaTable says yes to an empty log, which a writer leaves that is just creating the table.
            return self.snapshot().version >= 0
        return self._spark.catalog.tableExists(self.table)

    def create(self, df: "DataFrame", partition_by: Sequence[str]) -> None:
        """Create the table with the columns of ``df`` unless it exists; safe against others who do the same."""
        for n in range(1, CREATE_ATTEMPTS_MAX + 1):
            builder = self._jvm.io.delta.tables.DeltaTable.createIfNotExists(self._jspark)
            builder = builder.location(self.table) if names.is_path(self.table) else builder.tableName(self.table)
            # A DataFrame writer makes every column nullable when it creates a table; so does this.
            builder = builder.addColumns(df._jdf.schema().asNullable())
            builder = builder.property(f"delta.feature.{FEATURE}", "supported")
            columns = self._spark.sparkContext._gateway.new_array(self._jvm.java.lang.String, len(partition_by))  # type: ignore[union-attr]
            for i, name in enumerate(partition_by):
                columns[i] = name
            try:
                builder.partitionedBy(columns).execute()
                return
            except Exception as exc:
                if n == CREATE_ATTEMPTS_MAX or not (races.is_race(exc) or _is_half_created(exc) or self.exists()):
                    raise
                threading.Event().wait(random.uniform(0, CREATE_WAIT_MAX_S))

    def has_domains(self) -> bool:
        """Whether the table can keep domains."""
        utils = self._jvm.org.apache.spark.sql.delta.DomainMetadataUtils
        return bool(utils.domainMetadataSupported(self._snapshot().protocol()))

    def ensure_domains(self) -> bool:
        """Give the table the feature that ledgers need; True if it had to be added, as a commit of its own."""
        if self.has_domains():
            return False
        tables = self._jvm.io.delta.tables.DeltaTable
        by = tables.forPath if names.is_path(self.table) else tables.forName

        def attempt() -> bool:
            try:
                by(self._jspark, self.table).addFeatureSupport(FEATURE)
            except Exception as exc:
                if races.is_race(exc):
                    raise races.CommitRace(str(exc)) from exc
                raise
            return True

        added = races.retry_races(attempt, what=f"adding the table feature {FEATURE} to {self.table}")
        log.warning(
            "table %s now has the Delta table feature %r, which the ledger needs: writers older than Delta 3.0 can no "
            "longer write it",
            self.table,
            FEATURE,
        )
        return added

    def snapshot(self) -> "Snapshot":
        return Snapshot(self._snapshot())

    def begin(self) -> "Transaction":
        """A transaction on the newest version."""
        delta_log, catalog_table = self._log()
        return Transaction(self, delta_log, catalog_table, delta_log.startTransaction(catalog_table, self._none()))

    def _snapshot(self) -> Any:
        delta_log, catalog_table = self._log()
        return delta_log.update(False, self._none(), catalog_table)

    def _log(self) -> tuple[Any, Any]:
        """The DeltaLog, and the catalog's entry as an Option: without it a managed table's entry would go stale."""
        delta = self._jvm.org.apache.spark.sql.delta
        if names.is_path(self.table):
            return delta.DeltaLog.forTable(self._jspark, self.table), self._none()
        state = self._jspark.sessionState()
        parts = _items(state.sqlParser().parseMultipartIdentifier(self.table))
        if len(parts) < 3:
            catalogs = state.catalogManager()
            spaces = list(catalogs.currentNamespace()) if len(parts) == 1 else []
            parts = [catalogs.currentCatalog().name(), *spaces, *parts]
        resolver = self._jvm.org.apache.spark.sql.delta.catalog.CatalogResolver
        pair = resolver.getCatalogPluginAndIdentifier(self._jspark, parts[0], self._seq(parts[1:]))
        found = resolver.getDeltaTableFromCatalog(self._jspark, pair._1(), pair._2())
        return found.deltaLog(), found.catalogTable()

    def _none(self) -> Any:
        return self._jvm.scala.Option.empty()

    def _some(self, value: object) -> Any:
        return self._jvm.scala.Option.apply(value)

    def _seq(self, values: Sequence[object]) -> Any:
        return self._jvm.PythonUtils.toSeq(list(values))


class Snapshot:
    """One version of a table's log."""

    def __init__(self, java: Any) -> None:
        self.java = java
        self._applications: dict[str, int] | None = None

    @property
    def version(self) -> int:
        return int(self.java.version())

    def domains(self) -> dict[str, str]:
        """The metadata domains and their configuration, without removed ones."""
        checksum = self.java.checksumOpt()
        known = checksum.get().domainMetadata() if checksum.isDefined() else checksum
        # The checksum file answers without a Spark job, but lists domains only up to a limit of Delta's.
        found = known.get() if known.isDefined() else self.java.domainMetadata()
        return {d.domain(): d.configuration() for d in _items(found) if not d.removed()}

    def applications(self) -> dict[str, int]:
        """The version that each application's ``SetTransaction`` recorded last."""
        if self._applications is None:
            checksum = self.java.checksumOpt()
            known = checksum.get().setTransactions() if checksum.isDefined() else checksum
            found = known.get() if known.isDefined() else self.java.setTransactions()
            self._applications = {str(t.appId()): int(t.version()) for t in _items(found)}
        return self._applications

    def recorded(self, app_id: str) -> int:
        """The one of an application, or -1."""
        return self.applications().get(app_id, -1)

    def properties(self) -> dict[str, str]:
        """The table's properties."""
        pairs = [(pair._1(), pair._2()) for pair in _items(self.java.metadata().configuration())]
        return dict(pairs)


@dataclass(frozen=True, slots=True)
class Written:
    """Files that were written for a transaction, and the metadata they were written under."""

    actions: tuple[Any, ...]
    before: Any
    after: Any
    protocol: Any


NO_FILES = Written((), None, None, None)
"""Of a commit without rows."""


class Transaction:
    """One optimistic transaction: write at most once, then commit once."""

    def __init__(self, table: Table, delta_log: Any, catalog_table: Any, java: Any) -> None:
        self._table = table
        self._log = delta_log
        self._catalog_table = catalog_table
        self._java = java
        self.snapshot = Snapshot(java.snapshot())

    def recorded(self, app_id: str) -> int:
        """As :meth:`Snapshot.recorded`; a concurrent commit of the same application then fails this transaction."""
        self._java.readTxn().addOne(app_id)
        return self.snapshot.recorded(app_id)

    def write(self, df: "DataFrame", *, partition_by: Sequence[str], merge_schema: bool) -> Written:
        """Write the rows as files on Delta's write path; they are invisible until the commit.

        Errors of the rows (schema, constraints) are Delta's own, raised unchanged.
        """
        t, jvm = self._table, self._table._jvm
        delta = jvm.org.apache.spark.sql.delta
        jsession = df.sparkSession._jsparkSession
        options = jvm.PythonUtils.toScalaMap({"mergeSchema": str(merge_schema).lower()})
        before = self._java.metadata()
        write = delta.commands.WriteIntoDelta(
            self._log,
            jvm.org.apache.spark.sql.SaveMode.Append,
            delta.DeltaOptions(options, jsession.sessionState().conf()),
            t._seq(partition_by),
            jvm.PythonUtils.toScalaMap({}),
            df._jdf,
            self._catalog_table,
            t._none(),
            False,
        )
        actions = _items(write.write(self._java, jsession, t._none(), False))
        return Written(tuple(actions), before, self._java.metadata(), self._java.protocol())

    def adopt(self, written: Written) -> bool:
        """Take over files written for an earlier transaction; False if the table changed so that they might not fit."""
        if not self._java.protocol().equals(written.protocol):
            return False
        if "delta.identity." in str(written.after.schemaString()):
            return False  # the generated values are only known to the transaction that made them
        now = self._java.metadata()
        if now.equals(written.after):
            return True
        if now.equals(written.before):
            self._java.updateMetadata(written.after, False)
            return True
        return False

    def commit(
        self,
        written: Written,
        domains: Mapping[str, str],
        *,
        app_id: str,
        batch_id: int,
        numbers: Mapping[str, int],
        user_metadata: str,
    ) -> int:
        """Commit files, the application's batch, the domains and the numbers of other applications together; returns
        the new version of the table.

        Raises:
            races.CommitRace: another writer changed one of the domains, the application's batch or the metadata.
        """
        jvm = self._table._jvm
        self._count({app_id: batch_id, **numbers})
        mode = jvm.org.apache.spark.sql.streaming.OutputMode.Append()
        operation = jvm.org.apache.spark.sql.delta.DeltaOperations
        update = operation.StreamingUpdate(mode, app_id, batch_id, self._table._some(user_metadata))
        return self._commit([*written.actions, *self._domains(domains)], update)

    def commit_domains(self, domains: Mapping[str, str], *, numbers: Mapping[str, int], user_metadata: str) -> int:
        """Commit nothing but domains and numbers. Raises as :meth:`commit`."""
        self._count(numbers)
        jvm, none = self._table._jvm, self._table._none()
        write = jvm.org.apache.spark.sql.delta.DeltaOperations.Write
        append = jvm.org.apache.spark.sql.SaveMode.Append
        some = self._table._some(user_metadata)
        return self._commit(self._domains(domains), write(append, none, none, some, none, none, none, none, none))

    def _count(self, numbers: Mapping[str, int]) -> None:
        now_ms = self._table._some(int(self._table._jvm.java.lang.System.currentTimeMillis()))
        for app_id, number in numbers.items():
            self._java.updateSetTransaction(app_id, number, now_ms)

    def _domains(self, domains: Mapping[str, str]) -> list[Any]:
        make = self._table._jvm.org.apache.spark.sql.delta.actions.DomainMetadata
        return [make(name, text, False) for name, text in sorted(domains.items())]

    def _commit(self, actions: Sequence[Any], operation: Any) -> int:
        try:
            return int(self._java.commit(self._table._seq(actions), operation))
        except Exception as exc:
            if races.is_race(exc):
                raise races.CommitRace(str(exc)) from exc
            raise


def _items(collection: Any) -> list[Any]:
    found, it = [], collection.iterator()
    while it.hasNext():
        found.append(it.next())
    return found


def _is_half_created(exc: Exception) -> bool:
    """Whether the table's directory is there without a table: that of another writer that is creating it, perhaps."""
    return isinstance(exc, PySparkException) and exc.getCondition() in _HALF_CREATED
