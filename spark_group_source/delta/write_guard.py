"""Within one run of a query a batch goes into a table once: who comes second is refused.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``). Deliberately absent: what
the table has; a batch that a former run wrote is recognised there.

A batch that goes into several tables is safe when all of them have it: the slowest decides what Kafka is told.

A table knows a batch by its query and its number, and that is all that a replay can go by. So two writes of one batch
into one table cannot be told from a write and its replay: the second one would be skipped, and its rows lost.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from spark_group_source.delta.checkpoint import PlannedBatch
from spark_group_source.delta.table_names import sql_name
from spark_group_source.errors import OptionError
from spark_group_source.host import run_files


@dataclass
class Turn:
    """A batch on its way into a table, or there; ``version`` is that of its commit, where there was one. ``done``: the
    table has it."""

    batch_id: int
    version: int | None = None
    done: bool = False


_lock = threading.Lock()
_last: dict[str, tuple[str, dict[str, Turn]]] = {}
"""The last run of each query, and the last batch that it had for each table."""


@contextmanager
def turn(table_id: str, table: str, planned: PlannedBatch) -> Iterator[Turn]:
    """Have a batch's only turn at a table; a write that fails may be tried again.

    Raises:
        OptionError: the batch had its turn in this run.
    """
    mine = Turn(planned.batch_id)
    with _lock:
        tables = _of_run(planned)
        former = tables.get(table_id)
        again = former is not None and former.batch_id == mine.batch_id
        if again or (former is None and any(other.batch_id == mine.batch_id for other in tables.values())):
            _take_back(planned)
        if former is not None and again:
            raise _second(table, planned, former)
        tables[table_id] = mine
    try:
        yield mine
        mine.done = True
    except BaseException:
        with _lock:
            del tables[table_id]
        raise


def everywhere(planned: PlannedBatch) -> bool:
    """Whether every table that this run of the query writes has the batch. In the first batch of a run nobody knows of
    the tables that come later."""
    with _lock:
        return all(turn.done and turn.batch_id == planned.batch_id for turn in _of_run(planned).values())


def _of_run(planned: PlannedBatch) -> dict[str, Turn]:
    """The last batch for each table; nobody can tell where no query runs on this thread."""
    if planned.run_id is None:
        return {}
    run_id, tables = _last.get(planned.query_id, ("", {}))
    if run_id != planned.run_id:
        tables = {}
        _last[planned.query_id] = planned.run_id, tables
    return tables


def _take_back(planned: PlannedBatch) -> None:
    """Who came first may have said that all of the batch is safe."""
    for offset in planned.offsets:
        run_files.mark_durable(offset.stream, offset.seq - 1)


def _second(table: str, planned: PlannedBatch, former: Turn) -> OptionError:
    names = sorted({offset.group for offset in planned.offsets})
    resets = "; ".join(f"`spark-group reset --group {name} --to-ledger --table {table}`" for name in names)
    again = (
        f"Version {former.version} of the table has this batch without what came second. To write all of it anew: "
        f"stop the query; `RESTORE TABLE {sql_name(table)} TO VERSION AS OF {former.version - 1}`; {resets}; start the "
        "mended query with the same checkpoint"
        if former.version is not None
        else "What came second is in no version of the table"
    )
    return OptionError(
        f"batch {planned.batch_id} was handed to table {table} for the second time in one run of its query: by two "
        "DeltaSinks in one foreachBatch, or by two calls of one. A batch is one commit of a table, because a replay "
        "could not tell two of them apart, so nothing of the second was written. Use one DeltaSink, whose transform "
        f"returns all rows: lambda df: a(df).unionByName(b(df)). {again}",
        table=table,
        query_id=planned.query_id,
        batch_id=planned.batch_id,
        version=former.version,
    )
