"""Refuses what no ledger can see: a second write of a batch in one run, and batches behind one that failed.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``). Deliberately absent: writing
a batch (:mod:`sink`), and what a ledger says about it (:mod:`ledger_decision`).

A table identifies a batch by its stream and its number, so a second write of one batch in one run cannot be told from a
replay of the first: it would be skipped, and its rows lost. A user's function that catches the error of a sink lets
Spark go on with the next batch, whose commit would hide that records are missing.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from spark_group_source import command_line
from spark_group_source.delta import table_names
from spark_group_source.delta.checkpoint import PlannedBatch, read_planned, running_query
from spark_group_source.errors import LedgerConflict, OptionError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_group_source.delta.sink import DeltaSink
    from spark_group_source.delta.topic_sinks import DeltaSinks

QUERIES_MAX = 1_000
"""Of how many queries the newest run is kept; the one whose run started first is forgotten first. It is then known
again from its next batch on."""

_T = TypeVar("_T")


@dataclass
class TableWrite:
    """The newest batch that a run writes, or wrote, to one table."""

    table: str
    """As the sink names it."""
    batch_id: int
    find_version: Callable[[], int | None] = field(default=lambda: None, repr=False)
    """As in :class:`sink.BatchCommit`."""


@dataclass
class SinkCall:
    """The newest call of a sink in a run."""

    sink: "DeltaSink | DeltaSinks"
    batch_id: int
    planned: PlannedBatch | None = None
    """None until it is read."""
    error: str | None = None
    """The first line of the error that it raised; None: the batch was written."""


@dataclass
class QueryRun:
    """What sinks did in the newest run of a query."""

    run_id: str
    writes: dict[str, TableWrite] = field(default_factory=dict)
    """The newest write to each table, by table id."""
    calls: "dict[DeltaSink | DeltaSinks, SinkCall]" = field(default_factory=dict)
    """The calls in its newest batch, or its failed one, by sink: the first one of those that a function creates for
    each call."""


_lock = threading.Lock()
_runs: dict[str, QueryRun] = {}
"""By query id."""


def store_newest(runs: dict[str, _T], query_id: str, run: _T) -> None:
    """Store the newest run of a query, of QUERIES_MAX queries at most."""
    runs.pop(query_id, None)
    runs[query_id] = run
    for oldest in list(runs)[:-QUERIES_MAX]:
        runs.pop(oldest, None)


def _run_of(query_id: str, run_id: str) -> QueryRun:
    """Return what is kept of a run."""
    run = _runs.get(query_id)
    if run is None or run.run_id != run_id:
        run = QueryRun(run_id)
        store_newest(_runs, query_id, run)
    return run


# --- a second write of a batch ----------------------------------------------------------------------------------------


@contextmanager
def guarded_write(table_id: str, table: str, planned: PlannedBatch) -> Iterator[TableWrite]:
    """Guard one write of a batch to a table. After a failed write the batch may be written again.

    Raises:
        OptionError: this run has written the batch to the table already, or is writing it.
    """
    write = TableWrite(table, planned.batch_id)
    with _lock:
        writes = {} if planned.run_id is None else _run_of(planned.query_id, planned.run_id).writes
        former = writes.get(table_id)
        if former is None or former.batch_id != write.batch_id:
            former, writes[table_id] = None, write
    if former is not None:
        raise _second_write(table, planned, former)
    try:
        yield write
    except BaseException:
        with _lock:
            del writes[table_id]
        raise


def release_write(table_id: str, planned: PlannedBatch) -> None:
    """Let a run write a batch to a table again, because another table of it failed; what has the batch is left out."""
    with _lock:
        run = _runs.get(planned.query_id)
        if run is not None and run.run_id == planned.run_id:
            run.writes.pop(table_id, None)


def _second_write(table: str, planned: PlannedBatch, former: TableWrite) -> OptionError:
    version = None
    with suppress(Exception):  # of the storage: the error is another one
        version = former.find_version() if former.table == table else None
    if former.table != table:
        remedy = (
            f"The first write was to table {former.table}, which has the same id. If one of them was copied with its "
            "log, they are one table for Delta: write the copy by another query, or make it anew as a clone"
        )
    elif version is None:
        remedy = "The table has no rows of the second write in any version"
    else:
        groups = sorted({offset.group for offset in planned.offsets})
        remedy = (
            f"Version {version} of the table has the batch without the second write. To write the whole batch: "
            "stop the query, run these commands, and start the corrected query with the same checkpoint:"
        ) + command_line.sequence(
            (
                table_names.restore_command(table, version - 1),
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
        version=version,
    )


# --- errors that a function catches ---------------------------------------------------------------------------------


@contextmanager
def refused_after_failure(spark: "SparkSession", batch_id: int, sink: "DeltaSink | DeltaSinks") -> Iterator[SinkCall]:
    """Refuse a batch of a run in which a sink failed to write an earlier one. If the user's function caught the error,
    Spark takes that batch for written, and the next commit would move a ledger, or Kafka's offsets, beyond its records.
    A sink may write the same batch again.

    Returns:
        The call, which gets the plan of the batch when it is read.

    Raises:
        LedgerConflict: an earlier batch is missing; the message has the command that settles it.
    """
    running, call = running_query(spark), SinkCall(sink, batch_id)
    with _lock:
        calls = {} if running is None else _run_of(*running).calls
        failed = next((old for old in calls.values() if old.error is not None and old.batch_id != batch_id), None)
        if failed is None:
            for other in [other for other, old in calls.items() if old.batch_id != batch_id]:
                del calls[other]
    if failed is not None:
        raise _batch_missing(spark, failed, batch_id)
    try:
        yield call
    except BaseException as exc:
        call.error = str(exc).partition("\n")[0] or type(exc).__name__
        _keep_call(calls, call)
        raise
    _keep_call(calls, call)


def _keep_call(calls: "dict[DeltaSink | DeltaSinks, SinkCall]", call: SinkCall) -> None:
    sink, identity = call.sink, call.sink.identity()
    with _lock:
        same = (other for other in calls if type(other) is type(sink) and other.identity() == identity)
        key = next(same, sink)
        former = calls.get(key)
        if former is not None and former.batch_id == call.batch_id and call.planned is None:
            call.planned = former.planned
        if former is None or former.error is not None or call.error is None:
            calls[key] = call  # else the error is that of a second write


def _batch_missing(spark: "SparkSession", failed: SinkCall, batch_id: int) -> LedgerConflict:
    missing = _plan_of(spark, failed)
    if missing is None:
        return LedgerConflict(
            f"batch {failed.batch_id} could not be written to all of its tables: {failed.error}. The function of "
            f"foreachBatch caught that error, so Spark goes on. Batch {batch_id} was not written either, because the "
            f"records of batch {failed.batch_id} would be missing without a sign. Its plan could not be read, and "
            "cannot be read now (Spark keeps those of the newest batches), so it is not known where these records "
            "start. Let errors of the sink end the query. To write these records: stop the query, and reset the group "
            "to the ledger of each table (--to-ledger)",
            batch_id=failed.batch_id,
        )
    groups = sorted({offset.group for offset in missing.offsets})
    commands, is_new = [], False
    for sink, part in failed.sink.tables_of(missing):
        table, known = None, set[str]()
        if sink is not None:
            table, known = sink.table, set(groups)
            with suppress(Exception):  # of the storage: the error is another one
                known = set(sink.read_ledgers(spark, groups))
                table = table if sink.new_writer(spark).exists() else None
        for group in groups:
            position = ("--to-ledger",) if group in known else part.to_start(group)
            if group in known or part is missing or part.starts(group):
                commands.append(table_names.reset_command(group, table, *position))
                is_new = is_new or table is None
    only_table = getattr(failed.sink, "table", None)  # DeltaSinks has several
    where = "all of its tables" if only_table is None else f"table {only_table}"
    run = "this" if len(commands) == 1 else "these commands"
    return LedgerConflict(
        f"batch {missing.batch_id} could not be written to {where}: {failed.error}. The function of foreachBatch "
        f"caught that error, so Spark goes on. Batch {batch_id} was not written either, because the records of batch "
        f"{missing.batch_id} would be missing without a sign. Let errors of the sink end the query. To write these "
        f"records: stop the query, run {run}, and start the corrected query with "
        f"{'a new checkpointLocation' if is_new else 'the same checkpoint'}:{command_line.sequence(commands)}",
        table=only_table,
        query_id=missing.query_id,
        batch_id=missing.batch_id,
    )


def _plan_of(spark: "SparkSession", failed: SinkCall) -> PlannedBatch | None:
    """Return the plan of a failed batch: without its checkpoint if that has no such batch any more, because Spark
    keeps the newest ones (``spark.sql.streaming.minBatchesToRetain``); None if it was never read."""
    try:
        planned = read_planned(spark, failed.batch_id, failed.sink.checkpoint)
    except Exception:  # noqa: BLE001 - of the storage, too: the error is another one
        return None if failed.planned is None else replace(failed.planned, root="")
    return failed.planned or planned
