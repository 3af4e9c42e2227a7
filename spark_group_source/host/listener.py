"""GroupListener: what a query's members did, next to Spark's own progress of the query.

Runs in: the user's driver, on Spark's listener thread. Deliberately absent: counting (``group``), publishing
(``runs``), Kafka.
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
    """Hands a query's group statistics to a function after each of its batches.

    ``spark.streams.addListener(GroupListener(lambda batch, group: print(batch.batchId, group.assigned, group.holds)))``

    Spark has no place for the metrics of a Python source. The statistics come from the file that every run keeps on its
    driver's host, so the listener must run there: on Spark Connect, in the server. What a moment's snapshot says may be
    newer than the batch of the progress, or older by one.

    Args:
        receive: called with Spark's progress and the :class:`Statistics` of each kafka-group stream of the query; for
            queries without one, and for runs on another host, not at all. It is called on Spark's listener thread,
            which every query shares, so it must be quick; what it raises ends up in Spark's log.
    """

    def __init__(self, receive: "Callable[[StreamingQueryProgress, Statistics], None]") -> None:
        self._receive = receive

    def onQueryStarted(self, event: "QueryStartedEvent") -> None:
        """Nothing: no member has joined yet."""

    def onQueryProgress(self, event: "QueryProgressEvent") -> None:
        """A batch is done."""
        for source in event.progress.sources:
            name = _stream_of(source.endOffset)
            found = run_files.snapshot(*name) if name else None
            if found is not None:
                self._receive(event.progress, found)

    def onQueryTerminated(self, event: "QueryTerminatedEvent") -> None:
        """Nothing: the statistics ended with the run."""


def _stream_of(offset: str | None) -> tuple[str, str] | None:
    """Group and stream id of an offset of ours; None for anyone else's."""
    try:
        doc = json.loads(offset or "null")
    except ValueError:
        return None
    match doc:
        case {"group": str(group), "stream": str(stream)}:
            return group, stream
    return None
