"""Marks a batch as durable when Spark has finished it, for sinks that a user's function calls.

Runs in: the user's driver, on one thread for all queries (a thread that used the JVM keeps its connection open).
Deliberately absent: sinks that Spark itself calls, whose batch is complete when they return; and Spark Connect, whose
workers cannot use Spark's file systems.

A function of ``foreachBatch`` may write to further tables after a sink has returned, in any batch. So the batch is
durable when Spark has noted it in ``commits/<batch id>`` of the checkpoint, right after the function has returned.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from spark_group_source.host import run_files
from spark_group_source.protocol.offsets import StreamOffset

log = logging.getLogger(__name__)

POLL_S = 0.25
"""The interval at which the checkpoint is checked for a batch: each check is a request to its file system."""
FINISH_S = 600.0
"""How long it is checked. After that, the run learns from Spark's next call that the batch is durable."""


class WrittenBatch(NamedTuple):
    """A batch that a sink has written, and Spark may not have finished."""

    offsets: Sequence[StreamOffset]
    """Those whose rows the table has."""
    is_finished: Callable[[], bool]
    """Whether Spark's commit log has the batch."""
    deadline_s: float


class FinishedBatches:
    """Watches the newest batch of each query of this process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._batches: dict[str, WrittenBatch] = {}
        self._has_thread = False

    def watch(self, query_id: str, offsets: Sequence[StreamOffset], is_finished: Callable[[], bool]) -> None:
        """Mark the batch as durable when it is finished. A later batch of the query takes its place."""
        with self._changed:
            self._batches[query_id] = WrittenBatch(offsets, is_finished, time.monotonic() + FINISH_S)
            self._changed.notify()
            if not self._has_thread:
                threading.Thread(target=self._run, name="spark-group finished batches", daemon=True).start()
                self._has_thread = True

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            with self._changed:
                if not self._batches:
                    self._changed.wait(FINISH_S)
            self._mark_finished()
            pause.wait(POLL_S)

    def _mark_finished(self) -> None:
        """Check every batch once."""
        with self._changed:
            batches = list(self._batches.items())
        for query_id, batch in batches:
            if _mark_if_finished(batch):
                with self._changed:
                    if self._batches.get(query_id) is batch:
                        del self._batches[query_id]


def _mark_if_finished(batch: WrittenBatch) -> bool:
    """Mark a finished batch. Returns whether it need not be checked again."""
    try:
        if not batch.is_finished():
            return time.monotonic() > batch.deadline_s
    except Exception as exc:  # noqa: BLE001 - of Spark, Hadoop or py4j: the session may be stopped
        log.debug("a finished batch is not marked as durable: %s", str(exc).partition("\n")[0])
        return True
    for offset in batch.offsets:
        if not run_files.void_by(offset.stream, offset.seq):  # void in another table of the query
            run_files.mark_durable(offset)
    return True
