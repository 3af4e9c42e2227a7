"""The write guard: within one run of a query, a batch is written to a table once, and a second write is refused.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``). Deliberately absent: which
batches the table has; a batch that an earlier run wrote is recognised by the ledger.

A table identifies a batch by its stream and its number. So a second write of one batch to one table looks like a
replay of the first: it would be skipped, and its rows lost.

A batch that is written to several tables is durable when all of them have it: the slowest table decides when the
offsets are committed.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from spark_group_source import command_line
from spark_group_source.delta import table_names
from spark_group_source.delta.checkpoint import PlannedBatch
from spark_group_source.errors import OptionError
from spark_group_source.host import run_files


@dataclass
class TableWrite:
    """The newest batch that a run writes, or wrote, to one table."""

    batch_id: int
    version: int | None = None
    """The version of the table that its commit made; None before that, and if nothing had to be committed."""
    is_done: bool = False
    """Whether the table has the batch."""


_lock = threading.Lock()
_runs: dict[str, tuple[str, dict[str, TableWrite]]] = {}
"""By query id: the id of the newest run, and its newest write to each table, by table id."""


@contextmanager
def guarded_write(table_id: str, table: str, planned: PlannedBatch) -> Iterator[TableWrite]:
    """Guard one write of a batch to a table. After a failed write the batch may be written again.

    Raises:
        OptionError: this run has written the batch to the table already, or is writing it.
    """
    write = TableWrite(planned.batch_id)
    with _lock:
        writes = _writes_of_run(planned)
        former = writes.get(table_id)
        is_second = former is not None and former.batch_id == write.batch_id
        is_new_table = former is None and any(other.batch_id == write.batch_id for other in writes.values())
        if is_second or is_new_table:
            _withdraw_durable_marks(planned)
        if former is not None and is_second:
            raise _second_write(table, planned, former)
        writes[table_id] = write
    try:
        yield write
        write.is_done = True
    except BaseException:
        with _lock:
            del writes[table_id]
        raise


def all_tables_written(planned: PlannedBatch) -> bool:
    """Return whether every table that this run of the query writes has the batch.

    In the first batch of a run, tables that are written later are not known yet.
    """
    with _lock:
        return all(write.is_done and write.batch_id == planned.batch_id for write in _writes_of_run(planned).values())


def _writes_of_run(planned: PlannedBatch) -> dict[str, TableWrite]:
    """Return the run's newest write to each table; a new dict where no query runs on this thread."""
    if planned.run_id is None:
        return {}
    run_id, writes = _runs.get(planned.query_id, ("", {}))
    if run_id != planned.run_id:
        writes = {}
        _runs[planned.query_id] = planned.run_id, writes
    return writes


def _withdraw_durable_marks(planned: PlannedBatch) -> None:
    """Withdraw the mark that the first write may have left, because the batch is not in all tables yet."""
    for offset in planned.offsets:
        run_files.mark_durable(offset.stream, offset.seq - 1)


def _second_write(table: str, planned: PlannedBatch, former: TableWrite) -> OptionError:
    if former.version is None:
        remedy = "The table has no rows of the second write in any version"
    else:
        groups = sorted({offset.group for offset in planned.offsets})
        remedy = (
            f"Version {former.version} of the table has the batch without the second write. To write the whole batch: "
            "stop the query, run these commands, and start the corrected query with the same checkpoint:"
        ) + command_line.sequence(
            (
                table_names.restore_command(table, former.version - 1),
                *(table_names.reset_command(group, table, "--to-ledger") for group in groups),
            )
        )
    return OptionError(
        f"batch {planned.batch_id} was written to table {table} a second time in one run of its query, by two "
        "DeltaSinks in one foreachBatch or by two calls of one. A batch is one commit of a table, because a "
        "second write looks like a replay; nothing of the second write was committed. Use one DeltaSink whose "
        f"transform returns all rows: lambda df: a(df).unionByName(b(df)). {remedy}",
        table=table,
        query_id=planned.query_id,
        batch_id=planned.batch_id,
        version=former.version,
    )
