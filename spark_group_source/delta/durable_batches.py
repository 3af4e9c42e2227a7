"""Reports the batches that are durable to the run on this host, which commits their offsets in Kafka.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``). Deliberately absent: writing
a batch (:mod:`sink`), the files of a run (:mod:`spark_group_source.host.run_files`).
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from spark_group_source.delta import checkpoint_status
from spark_group_source.delta.checkpoint import ONLY_RUN, PlannedBatch, is_finished, spark_files
from spark_group_source.host import run_files
from spark_group_source.protocol.offsets import StreamOffset

if TYPE_CHECKING:
    from types import FrameType

    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

POLL_S = 0.25
"""The interval at which the checkpoint is checked for a batch: each check is a request to its file system."""
FINISH_S = 600.0
"""How long it is checked. After that, the run learns from Spark's next call that the batch is durable."""


def report(spark: "SparkSession", planned: PlannedBatch, durable: Sequence[StreamOffset], caller: "FrameType") -> None:
    """Mark a batch as durable for the run on this host, and keep the run's statistics in its checkpoint.

    Args:
        durable: the offsets whose rows all tables have.
        caller: what called the sink. After a call by a user's function the batch may not be complete.
    """
    has_checkpoint_files = planned.run_id not in (None, ONLY_RUN)
    if is_called_by_spark(caller):
        for offset in durable:
            run_files.mark_durable_and_wait(offset)
    elif has_checkpoint_files:
        _finished.watch(planned.query_id, durable, lambda: is_finished(spark, planned.root, planned.batch_id))
    if has_checkpoint_files:
        status = checkpoint_status.StatusFiles(spark_files(spark), planned.root)
        run = f"{planned.run_id}-{os.getpid()}"  # a user's function may set the id, which is that of a job group
        for offset in durable:
            checkpoint_status.start_reporting(run, offset.group, offset.stream, status)


def is_called_by_spark(caller: "FrameType") -> bool:
    """Return whether Spark itself calls the sink, so that the batch is complete when the call returns.

    A user's function may write the batch to other tables after the call.
    """
    spec = caller.f_globals.get("__spec__")  # Spark Connect runs its module as __main__
    name = caller.f_globals.get("__name__") if spec is None else spec.name
    return str(name).startswith("pyspark.")


# --- batches of a user's function ------------------------------------------------------------------------------------


class WrittenBatch(NamedTuple):
    """A batch that a sink has written, and Spark may not have finished."""

    offsets: Sequence[StreamOffset]
    """Those whose rows the table has."""
    is_finished: Callable[[], bool]
    """Whether Spark's commit log has the batch."""
    deadline_s: float
    """When checking ends; monotonic seconds."""


class FinishedBatches:
    """Watches the newest batch of each query of this process, and marks it as durable when Spark has noted it in
    ``commits/<batch id>`` of the checkpoint, right after the user's function has returned.

    One thread serves all queries: a thread that used the JVM keeps its connection open. Spark Connect has none, because
    its workers cannot use Spark's file systems.
    """

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


_finished = FinishedBatches()
