"""Two sinks that race for every number of one group, and the account of it.

Runs in: ``tests.bench ledgers``. No Kafka: the sinks are called as ``foreachBatch`` calls them, with the same records,
and neither goes on to its commit before both have decided. What was written is read back from the files of the table's
log. Deliberately absent: kills (``killed``).
"""

import logging
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sink_source import offset
from sink_words import Query, actions, commits, one, rows

from spark_group_source.delta import races
from spark_group_source.delta.access import Writer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MEET_S = 120
"""Bound of the wait for the other one."""
PAIRS: dict[str, tuple[Writer, Writer]] = {
    "native": ("native", "native"),
    "options": ("options", "options"),
    "mixed": ("native", "options"),
}


class Race:
    """Two queries of one group and one table."""

    def __init__(self, spark: "SparkSession", root: Path, pair: tuple[Writer, Writer]) -> None:
        self.table = root / "table"
        self._queries = [Query(spark, root, name, writer) for name, writer in zip("ab", pair, strict=True)]
        self._line = threading.Barrier(2)
        self._sinks = [q.sink(self.table, transform=self._met(n)) for n, q in enumerate(self._queries)]
        self._waits = [False, False]
        self._rounds = 0

    def run(self, rounds: int, for_s: float) -> str:
        """So many rounds, or as many as there is time for. Both are given the same records in each: one wins the
        number, the other leaves the records out."""
        began_s, took_ms = time.monotonic(), list[float]()
        with ThreadPoolExecutor(2) as pool, counted() as lost:
            first = self._queries[0]
            first.run(self._sinks[0], 0, offset(0, one(0, 1), stream="a"))
            for n in range(1, rounds + 1):
                if time.monotonic() - began_s > for_s:
                    break
                self._waits = [True, True]
                round_s = time.monotonic()
                for done in [pool.submit(self._write, each, n) for each in (0, 1)]:
                    done.result()
                took_ms.append((time.monotonic() - round_s) * 1000)
            retries = lost[0]
        self._rounds = len(took_ms)
        return (
            f"{self._rounds} races, {retries} commits tried again, {len(commits(self.table))} commits, median "
            f"of a race {statistics.median(took_ms):.0f} ms, {(time.monotonic() - began_s) / 60:.0f} minutes"
        )

    def wrong(self) -> list[str]:
        """Each record once, each number once."""
        rounds = self._rounds
        found = Counter(row[2] for row in rows(self.table))
        wrong = [] if set(found) == set(range(rounds + 1)) else ["records are lost"]
        wrong += ["records are there twice"] * (max(found.values()) > 1)
        its = [txn for commit in commits(self.table) for txn in actions(commit, "txn")]
        numbers = [txn["version"] for txn in its if txn["appId"] == "spark-group-source.etl"]
        # The first batch, and both of each round: the winner's, and that of the other one, who says what it left out.
        if numbers != list(range(1, 2 * rounds + 2)):
            wrong.append(f"{len(numbers)} numbers, from {min(numbers)} to {max(numbers)}")
        return wrong

    def _write(self, each: int, n: int) -> None:
        self._queries[each].run(self._sinks[each], n, offset(n, one(n, n + 1), stream="ab"[each]))

    def _met(self, each: int):  # type: ignore[no-untyped-def]
        def transform(df: "DataFrame") -> "DataFrame":
            if self._waits[each]:
                self._waits[each] = False
                self._line.wait(MEET_S)
            return df

        return transform


@contextmanager
def counted() -> Iterator[list[int]]:
    """How many commits lost to another one, in the first element."""
    count = [0]

    class Counting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            count[0] += "another writer was first" in record.getMessage()

    handler, level = Counting(), races.log.level
    races.log.addHandler(handler)
    races.log.setLevel(logging.INFO)
    try:
        yield count
    finally:
        races.log.removeHandler(handler)
        races.log.setLevel(level)
