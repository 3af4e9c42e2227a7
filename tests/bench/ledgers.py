"""A table's ledger under kills, with two applications, and in races for one commit number.

``python -m tests.bench ledgers --kills N [--minutes M] [--way W] [--seed S]``: kills a query N times, or as often as
there is time for, and deletes a tenth of its checkpoints
``python -m tests.bench ledgers --both [--minutes M] ...``: the same for two applications of one group and one table
``python -m tests.bench ledgers --races N [--minutes M]``: two sinks race for the next number N times, with each writer
and with both

All ways of writing are used in turn, unless one is named. The same seed gives the same kills, at other moments of the
query. Written rows are read back from the files of the table's log.
"""

import argparse
import logging
import math
import os
import secrets
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import quick_spark
from confluent_kafka.admin import AdminClient
from crash.killed import WAYS, Hammer, Way
from kafka_words import create_topic
from sink_source import offset
from sink_words import Query, actions, commits, one, rows

from bench.report import session
from spark_group_source.delta import table_writer
from spark_group_source.delta.table_writer import Writer
from spark_group_source.local.broker import Broker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SEEDS = 2**32
PARTITIONS = 4
KILLS = 10
"""Kills of each way if neither a number nor a time is given, as in ``make bench``."""
PYTHONS = 45
"""Percentage of kills that hit one of Spark's Python processes; the others hit the JVM."""
MEET_S = 120
"""Bound of the wait for the other query."""
PAIRS: dict[str, tuple[Writer, Writer]] = {
    "native": ("native", "native"),
    "options": ("options", "options"),
    "mixed": ("native", "options"),
}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench ledgers")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(SEEDS))
    parser.add_argument("--way", choices=WAYS, nargs="+", default=WAYS)
    parser.add_argument("--kills", type=int)
    parser.add_argument("--both", action="store_true", help="two applications of one group")
    parser.add_argument("--minutes", type=float, default=math.inf, help="the longest time")
    parser.add_argument("--races", type=int, default=0, help="instead of kills")
    parser.add_argument("--pairs", choices=PAIRS, nargs="+", default=list(PAIRS), help="the writers of a race")
    given = parser.parse_args(arguments)
    if given.kills is None and given.minutes == math.inf:
        given.kills = KILLS
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    with tempfile.TemporaryDirectory(prefix="spark-group-ledgers-") as scratch, quick_spark.prepared():
        if given.races:
            spark = session(Path(scratch))
            logging.getLogger("spark_group_source").setLevel(logging.ERROR)
            try:
                return int(_raced(spark, Path(scratch), given))
            finally:
                spark.stop()
        with Broker() as broker:
            return int(sum(_killed(broker, Path(scratch), way, given) for way in given.way) > 0)


def _killed(broker: Broker, folder: Path, way: Way, given: argparse.Namespace) -> bool:
    """Whether there was a violation."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0})
    group = f"ledgers-{way}"
    hammer = Hammer(
        broker,
        folder / way,
        way=way,
        group=group,
        topic=create_topic(admin, group, PARTITIONS),
        seed=given.seed,
        applications=2 if given.both else 1,
        pythons=PYTHONS,
        say=_say,
    )
    lost = None if given.kills is None else given.kills // 10
    return bool(hammer.run(kills=given.kills, for_s=60 * given.minutes, lost_checkpoints=lost).wrong)


def _raced(spark: "SparkSession", folder: Path, given: argparse.Namespace) -> bool:
    failed = False
    for name in given.pairs:
        race = Race(spark, folder / name, PAIRS[name])
        _say(f"{name}: {race.run(given.races, 60 * given.minutes)}")
        wrong = race.wrong()
        _say("  " + ("; ".join(wrong) or "each record once, each number once"))
        failed |= bool(wrong)
    return failed


def _say(text: str) -> None:
    print(text, flush=True)


class Race:
    """Two queries of one group and one table: their sinks are called as ``foreachBatch`` calls them, with the same
    records, and neither commits before both have decided."""

    def __init__(self, spark: "SparkSession", root: Path, pair: tuple[Writer, Writer]) -> None:
        self.table = root / "table"
        self._queries = [Query(spark, root, name, writer) for name, writer in zip("ab", pair, strict=True)]
        self._line = threading.Barrier(2)
        self._sinks = [q.sink(self.table, transform=self._met(n)) for n, q in enumerate(self._queries)]
        self._waits = [False, False]
        self._rounds = 0

    def run(self, rounds: int, for_s: float) -> str:
        """Run ``rounds`` rounds, or as many as there is time for. In each both get the same records: one commits under
        the next number, the other skips the records."""
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
            f"{self._rounds} races, {retries} commits retried, {len(commits(self.table))} commits, median "
            f"of a race {statistics.median(took_ms):.0f} ms, {(time.monotonic() - began_s) / 60:.0f} minutes"
        )

    def wrong(self) -> list[str]:
        """The violations: each record and each number must occur once."""
        rounds = self._rounds
        found = Counter(row[2] for row in rows(self.table))
        wrong = [] if set(found) == set(range(rounds + 1)) else ["records are lost"]
        wrong += ["records are duplicated"] * (max(found.values()) > 1)
        its = [txn for commit in commits(self.table) for txn in actions(commit, "txn")]
        numbers = [txn["version"] for txn in its if txn["appId"] == "spark-group-source.etl"]
        # The first batch, and two commits of each round: the winner's, and the other's, which notes what it skipped.
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
    """The number of commits that lost a race, in the first element."""
    count = [0]

    class Counting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            count[0] += "the table has changed meanwhile" in record.getMessage()

    handler, level = Counting(), table_writer.log.level
    table_writer.log.addHandler(handler)
    table_writer.log.setLevel(logging.INFO)
    try:
        yield count
    finally:
        table_writer.log.removeHandler(handler)
        table_writer.log.setLevel(level)
