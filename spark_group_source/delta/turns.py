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
from spark_group_source.delta.names import sql_name
from spark_group_source.errors import OptionError
from spark_group_source.host import runs


@dataclass
class Turn:
    """A batch on its way into a table, or there; ``version`` is that of its commit, where there was one. ``done``: the
    table has it."""

    run_id: str
    batch_id: int
    version: int | None = None
    done: bool = False


_lock = threading.Lock()
_last: dict[tuple[str, str], Turn] = {}
"""The last batch of each query in each table."""


@contextmanager
def turn(table_id: str, table: str, planned: PlannedBatch) -> Iterator[Turn]:
    """Have a batch's only turn at a table; a write that fails may be tried again.

    Raises:
        OptionError: the batch had its turn in this run.
    """
    mine, key = Turn(planned.run_id or "", planned.batch_id), (planned.query_id, table_id)
    if planned.run_id is None:  # nobody can tell
        yield mine
        return
    with _lock:
        former = _last.get(key)
        if former is not None and (former.run_id, former.batch_id) == (mine.run_id, mine.batch_id):
            _take_back(planned)
            raise _second(table, planned, former)
        new = former is None or former.run_id != mine.run_id
        if new and any(other.batch_id == mine.batch_id for other in _of_run(planned)):
            _take_back(planned)
        _last[key] = mine
    try:
        yield mine
        mine.done = True
    except BaseException:
        with _lock:
            if _last.get(key) is mine:
                del _last[key]
        raise


def everywhere(planned: PlannedBatch) -> bool:
    """Whether every table that this run of the query writes has the batch. In the first batch of a run nobody knows of
    the tables that come later."""
    with _lock:
        return all(turn.done and turn.batch_id == planned.batch_id for turn in _of_run(planned))


def _of_run(planned: PlannedBatch) -> list[Turn]:
    if planned.run_id is None:
        return []
    return [
        turn for (query_id, _), turn in _last.items() if (query_id, turn.run_id) == (planned.query_id, planned.run_id)
    ]


def _take_back(planned: PlannedBatch) -> None:
    """Who came first may have said that all of the batch is safe."""
    for offset in planned.offsets:
        runs.mark_durable(offset.stream, offset.seq - 1)


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
