"""Reads the ledgers of tables for ``spark-group exporter --table``.

Runs in: the exporter. Deliberately absent: Spark; a table must have a local path and a log that ``deltalake`` can open.
"""

import logging
from collections.abc import Iterable

from spark_group_source.delta import restored_table, table_names, table_writer
from spark_group_source.delta.ledger_format import Ledger
from spark_group_source.delta.table_history import LedgerExpired, LogFiles, TableHistory
from spark_group_source.errors import LedgerConflict, OptionError
from spark_group_source.metrics.groups import LedgerSnapshot

log = logging.getLogger(__name__)


class LedgerReader:
    """Reads the ledgers of some tables, again only what the tables' logs have in addition.

    Raises:
        OptionError: a table's log cannot be opened.
    """

    def __init__(self, tables: Iterable[str]) -> None:
        self._tables = [_Table(table) for table in tables]

    def __call__(self) -> tuple[LedgerSnapshot, ...]:
        """Return the ledgers that can be read; another one has no value."""
        return tuple(found for table in self._tables for found in table.read_if_possible())


class _Table:
    def __init__(self, table: str) -> None:
        self._table = table_names.canonical(table)
        opened = table_writer.open_log(self._table, self._table, None) if table_names.is_path(self._table) else None
        if opened is None:
            raise OptionError(f"--table {table}: there is no Delta table at a local path whose log can be opened")
        self._log: LogFiles = opened
        self._version = -1
        """Up to which version of the table the log was read."""
        self._written_ms: dict[str, int] = {}
        """When each group committed last."""
        self._ledgers: dict[str, Ledger] = {}
        self._is_failing = False

    def read_if_possible(self) -> list[LedgerSnapshot]:
        """Read the ledgers; none if the log cannot be read now, of which the begin and the end are logged."""
        from deltalake.exceptions import DeltaError

        try:
            found = self.read()
        except (DeltaError, OSError, ValueError) as exc:  # ValueError: another writer is writing a commit
            if not self._is_failing:
                reason = str(exc).partition("\n")[0]
                log.warning("the log of table %s cannot be read; no metrics of its ledgers: %s", self._table, reason)
            self._is_failing = True
            return []
        if self._is_failing:
            log.warning("the log of table %s is read again", self._table)
        self._is_failing = False
        return found

    def read(self) -> list[LedgerSnapshot]:
        history = TableHistory(self._log)
        for commit in history.commits(after=self._version):
            for entry in commit.entries:
                if "ledger" in entry:
                    at = max(self._written_ms.get(entry["group"], 0), commit.written_ms or 0)
                    self._written_ms[entry["group"]] = at
        self._version = history.version
        properties = self._log.opened.metadata().configuration
        retention = properties.get(table_names.LOG_RETENTION, table_names.LOG_RETENTION_DEFAULT)
        found = []
        for group, written_ms in sorted(self._written_ms.items()):
            try:
                ledger = history.ledger(group, self._ledgers.get(group))
                is_unsettled = restored_table.find_replacement(history, group) is not None
            except (LedgerExpired, LedgerConflict) as exc:
                log.warning("group %s: its ledger in table %s cannot be read: %s", group, self._table, exc)
                continue
            if ledger is not None:
                self._ledgers[group] = ledger.at_version(history.version)
                expires_ms = written_ms + table_names.interval_ms(retention)
                found.append(
                    LedgerSnapshot(
                        group=group,
                        table=self._table,
                        offsets=ledger.offsets,
                        expires_ms=expires_ms,
                        is_unsettled=is_unsettled,
                    )
                )
        return found
