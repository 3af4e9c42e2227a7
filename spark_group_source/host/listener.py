"""GroupListener: passes a query's group statistics to a function, together with Spark's progress of the query.

Runs in: the user's driver, on Spark's listener thread. Deliberately absent: counting
(:mod:`spark_group_source.protocol.statistics`), publishing (:mod:`run_files`), Kafka.
"""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from pyspark.sql.streaming import StreamingQueryListener

from spark_group_source.host import run_files
from spark_group_source.protocol.statistics import Statistics

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import (
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
        StreamingQueryProgress,
    )


class GroupListener(StreamingQueryListener):
    """Passes a query's group statistics to a function after each of its batches.

    ``spark.streams.addListener(GroupListener(lambda batch, group: print(batch.batchId, group.assigned, group.holds)))``

    Spark's progress has no metrics of Python sources. The statistics come from the file that each run writes on its
    driver's host, so the listener must run there: on Spark Connect, in the server. They may be newer than the batch of
    the progress, or one batch older.

    Args:
        receive: called with Spark's progress and the :class:`Statistics` of each kafka-group stream of the query; not
            called for other queries, and for runs on another host. All queries share Spark's listener thread, on which
            it is called, so it must be fast; Spark logs what it raises.
    """

    def __init__(self, receive: "Callable[[StreamingQueryProgress, Statistics], None]") -> None:
        self._receive = receive

    def onQueryStarted(self, event: "QueryStartedEvent") -> None:
        """Do nothing: no member has joined yet."""

    def onQueryProgress(self, event: "QueryProgressEvent") -> None:
        """Call ``receive`` for each kafka-group stream of the query."""
        for source in event.progress.sources:
            name = _stream_of(source.endOffset)
            found = run_files.snapshot(*name) if name else None
            if found is not None:
                self._receive(event.progress, found)

    def onQueryTerminated(self, event: "QueryTerminatedEvent") -> None:
        """Do nothing: the run's statistics are removed with the run."""


def _stream_of(offset: str | None) -> tuple[str, str] | None:
    """Return group and stream id in an offset of ``kafka-group``; None for other offsets."""
    try:
        doc = json.loads(offset or "null")
    except ValueError:
        return None
    match doc:
        case {"group": str(group), "stream": str(stream)}:
            return group, stream
    return None
