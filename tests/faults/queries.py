"""A Spark query under faults: it writes to a Delta table and must stay alive; what came is read from the table's files.

Runs in: tests and the soak. Deliberately absent: faults (``FaultyCluster``) and asserts about a group.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from confluent_kafka.admin import AdminClient
from kafka_words import await_until
from rebalance.accounts import Record, produced, records_in, stays

from spark_group_source import DeltaSink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

SPARK_S = 90
"""Bound of what a query does in seconds, on a machine that is busy."""
RECOVERED_S = 120
"""Bound from the end of a fault to its last effect."""


class Query:
    """One query of ``format("kafka-group")`` into one table.

    Args:
        options: as a user writes them.
        folder: for the table and the checkpoint.
    """

    def __init__(self, spark: "SparkSession", options: Mapping[str, str], folder: Path) -> None:
        self.table = folder / "table"
        self.before_write: Callable[[], None] = lambda: None
        self.after_write: Callable[[], None] = lambda: None
        """Called in every batch, on a thread of Spark's."""
        self._spark, self._options, self._checkpoint = spark, dict(options), folder / "checkpoint"
        self._sink = DeltaSink(str(self.table))
        self._query: StreamingQuery | None = None

    def start(self) -> None:
        frame = self._spark.readStream.format("kafka-group").options(**self._options).load()
        writer = frame.writeStream.foreachBatch(self._write)
        self._query = writer.option("checkpointLocation", str(self._checkpoint)).start()

    def _write(self, frame: "DataFrame", number: int) -> None:
        self.before_write()
        self._sink(frame, number)
        self.after_write()

    @contextlib.contextmanager
    def running(self) -> Iterator["Query"]:
        self.start()
        try:
            yield self
        finally:
            self.stop()

    def stop(self) -> None:
        if self._query is not None:
            self._query.stop()

    def check(self) -> None:
        """Raise what the query ended with."""
        assert self._query is not None, "never started"
        if (error := self._query.exception()) is not None:
            raise AssertionError(f"the query ended: {error}") from error
        assert self._query.isActive

    def ended_with(self) -> str:
        """The error that the query ended with; empty as long as it runs."""
        assert self._query is not None, "never started"
        return str(self._query.exception() or "")

    @property
    def records(self) -> list[Record]:
        """Every row of the table, by the files that its log names."""
        return records_in(self.table)

    def await_(self, holds: Callable[[], object], what: str, deadline_s: float = SPARK_S) -> None:
        def look() -> bool:
            self.check()
            return bool(holds())

        await_until(look, deadline_s, what=what)

    def stays_alive(self, for_s: float) -> None:
        """The fault lasts so long."""

        def alive() -> bool:
            self.check()
            return True

        stays(alive, for_s, "the query")

    def assert_every_row_once(self, judge: AdminClient, topic: str) -> None:
        """The table has what was produced, and nothing twice; the query is alive."""
        self.await_(lambda: set(self.records) >= produced(judge, [topic]), "every record in the table", RECOVERED_S)
        counts = Counter(self.records)
        assert counts.keys() == produced(judge, [topic])
        assert not (doubled := [record for record, count in counts.items() if count > 1]), doubled[:5]
        self.check()
