"""A table's ledger under kills, with two applications, and in races for one commit number or with Delta's commands.

``python -m tests.bench ledgers --kills N [--minutes M] [--way W] [--seed S]``: kills a query N times, or as often as
there is time for, and deletes a tenth of its checkpoints
``... --content bad|merged``: values in Avro of which some are not good, which go to the dead letters; or changes of a
few keys, of which the table has the latest ones
``python -m tests.bench ledgers --both [--minutes M] ...``: the same for two applications of one group and one table
``python -m tests.bench ledgers --races N [--minutes M]``: two sinks race for the next number N times, with each writer
and with both
``python -m tests.bench ledgers --race OPERATION... [--minutes M]``: a query writes with the native writer while another
session runs one of Delta's commands on the table without a pause, M minutes (default: 10) for each of ``optimize``,
``delete``, ``merge``, ``restore``, ``vacuum``

All ways of writing are used in turn, unless one is named. The same seed gives the same kills, at other moments of the
query. Written rows are read back from the files of the table's log, and after ``--race`` by Spark, too.
"""

import argparse
import logging
import math
import os
import random
import secrets
import shlex
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args
from unittest.mock import patch

import quick_spark
from confluent_kafka.admin import AdminClient
from crash.killed import WAYS, Hammer, Way
from delta_files import living_rows
from deltalake import DeltaTable
from kafka_helpers import create_topic
from offset_model import OffsetModel
from printed_commands import commands as commands_of
from sink_helpers import Query, actions, commits, one, rows
from sink_source import offset
from typer.testing import CliRunner

from bench.report import session
from spark_group_source.cli import common
from spark_group_source.cli.app import app
from spark_group_source.delta import Writer, native_writer, table_writer
from spark_group_source.errors import LedgerConflict
from spark_group_source.kafka.translation import CommittedOffset
from spark_group_source.local.broker import Broker
from spark_group_source.protocol.identifiers import Note, note_text, parse_note

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

Operation = Literal["optimize", "delete", "merge", "restore", "vacuum"]
RACE_MINUTES, BATCHES_MAX = 10, 50_000
"""Bounds of a race with one operation."""
BATCH_ROWS, BATCHES_IN_A_ROW = 50, 25
"""Rows of a batch, and batches of one partition in a row: ``DELETE`` and ``MERGE`` of another partition do not conflict
with them."""
BACK_MAX = 5
"""How many versions a ``RESTORE`` takes the table back."""
REFUSALS_MAX = 50
"""How often one batch is refused, by as many ``RESTORE``, before the race is given up."""
OLD_S = 8 * 86_400
"""An age at which ``VACUUM`` deletes a file that is not in the table."""
DELETED, UPDATED = 0, 1
"""The last digits of the offsets whose rows ``DELETE`` and ``MERGE`` remove, and that ``MERGE`` changes."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench ledgers")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(SEEDS))
    parser.add_argument("--way", choices=WAYS, nargs="+", default=WAYS)
    parser.add_argument("--content", choices=("plain", "bad", "merged"), default="plain")
    parser.add_argument("--kills", type=int)
    parser.add_argument("--both", action="store_true", help="two applications of one group")
    parser.add_argument("--minutes", type=float, default=math.inf, help="the longest time")
    parser.add_argument("--races", type=int, default=0, help="instead of kills")
    parser.add_argument("--pairs", choices=PAIRS, nargs="+", default=list(PAIRS), help="the writers of a race")
    parser.add_argument("--race", choices=get_args(Operation), nargs="+", default=[], help="Delta's commands")
    given = parser.parse_args(arguments)
    if given.content == "merged" and "native" in given.way:
        parser.error("a merge is a commit of Delta Lake: give --way options connect")
    if given.kills is None and given.minutes == math.inf:
        given.kills = KILLS
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    with tempfile.TemporaryDirectory(prefix="spark-group-ledgers-") as scratch, quick_spark.prepared():
        if given.races or given.race:
            spark = session(Path(scratch))
            logging.getLogger("spark_group_source").setLevel(logging.ERROR)
            try:
                return int(_raced(spark, Path(scratch), given) if given.races else _interfered(spark, scratch, given))
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
        has_bad_records=given.content == "bad",
        is_merged=given.content == "merged",
        report=_report,
    )
    lost = None if given.kills is None else given.kills // 10
    return bool(hammer.run(kills=given.kills, for_s=60 * given.minutes, lost_checkpoints=lost).wrong)


def _raced(spark: "SparkSession", folder: Path, given: argparse.Namespace) -> bool:
    failed = False
    for name in given.pairs:
        race = Race(spark, folder / name, PAIRS[name])
        _report(f"{name}: {race.run(given.races, 60 * given.minutes)}")
        wrong = race.wrong()
        _report("  " + ("; ".join(wrong) or "each record once, each number once"))
        failed |= bool(wrong)
    return failed


def _interfered(spark: "SparkSession", scratch: str, given: argparse.Namespace) -> bool:
    failed = False
    for operation in given.race:
        race = OperationRace(spark, Path(scratch) / operation, operation)
        _report(f"{operation}: {race.run(60 * min(given.minutes, RACE_MINUTES))}")
        wrong = race.wrong()
        _report("  " + ("; ".join(wrong) or "each record once, each number once"))
        failed |= bool(wrong)
    return failed


def _report(text: str) -> None:
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


class OperationRace:
    """A query writes batches with the native writer, while another session changes the table with one operation.

    A batch that is refused after a ``RESTORE`` is void after the commands in the message, which run as printed with a
    model of Kafka's offsets; the query continues where they set it.
    """

    def __init__(self, spark: "SparkSession", root: Path, operation: Operation) -> None:
        self.table, self._operation = root / "table", operation
        self._query = Query(spark, root, "a", "native")
        self._sink = self._query.sink(self.table, partition_by="partition")
        self._session = spark.newSession()
        for name in ("shuffle.partitions", "sources.parallelPartitionDiscovery.parallelism"):  # VACUUM: 10,000 tasks
            self._session.conf.set(f"spark.sql.{name}", "2")
        self._session.conf.set(table_writer.SNAPSHOT_PARTITIONS, "2")
        self._kafka = OffsetModel(partitions=PARTITIONS)
        self._kafka.end = sys.maxsize
        self._kafka.offsets = {tp: CommittedOffset(0, note_text(Note("a", 0))) for tp in self._kafka.partitions}
        self._stop = threading.Event()
        self._counts = Counter[str]()
        self._orphans: list[Path] = []

    def run(self, for_s: float) -> str:
        began_s = time.monotonic()
        with counted() as lost, ThreadPoolExecutor(1) as pool:
            self._write(0, 0)
            changing = pool.submit(self._change)
            try:
                for n in range(1, BATCHES_MAX):
                    if time.monotonic() - began_s > for_s or changing.done():
                        break
                    self._write(n, n // BATCHES_IN_A_ROW % PARTITIONS)
            finally:
                self._stop.set()
            changing.result()
            # A RESTORE without a batch behind it, then batches without an operation behind them. Just one: a second
            # RESTORE could bring back what the first one removed.
            for partition in range(1 if self._operation == "restore" else PARTITIONS):
                self._operate(partition)
            for partition in range(PARTITIONS):
                self._write(n + 1 + partition, partition)
            if self._operation != "restore":
                for partition in range(PARTITIONS):
                    self._operate(partition)
            found = self._counts
            return (
                f"{found['batches']} batches, {len(commits(self.table))} commits, {found['operations']} operations, "
                f"{found['conflicts']} of them in a conflict, {lost[0]} commits retried, {found['refused']} batches "
                f"refused, {(time.monotonic() - began_s) / 60:.1f} minutes"
            )

    def wrong(self) -> list[str]:
        """The violations: each record and each number must occur once, but those that an operation removed."""
        ends = {tp: at.offset for tp, at in self._kafka.offsets.items()}
        expected = {f"{tp}@{n}{self._mark(n)}" for tp, end in ends.items() for n in range(end) if self._stays(n)}
        read = self._query.spark.read.format("delta").load(str(self.table)).select("value").collect()
        wrong = []
        for reader, values in (
            ("Spark", [row["value"] for row in read]),
            ("the log's files", [row["value"] for row in living_rows(self.table, ["value"])]),
        ):
            found = Counter(values)
            for what, records in (
                ("lost", expected - found.keys()),
                ("unexpected", found.keys() - expected),
                ("duplicated", {value for value, count in found.items() if count > 1}),
            ):
                wrong += [f"{len(records)} records are {what} by {reader}: {sorted(records)[:5]}"] * bool(records)
        numbers = [txn["version"] for commit in commits(self.table) for txn in actions(commit, "txn")]
        wrong += ["the numbers of the commits are not consecutive"] * (numbers != list(range(1, len(numbers) + 1)))
        left = sum(path.exists() for path in self._orphans)
        return wrong + [f"VACUUM left {left} of {len(self._orphans)} orphaned files"] * bool(left)

    def _stays(self, n: int) -> bool:
        return self._operation not in ("delete", "merge") or n % 10 != DELETED

    def _mark(self, n: int) -> str:
        return "!" if self._operation == "merge" and n % 10 == UPDATED else ""

    # the query

    def _write(self, n: int, partition: int) -> None:
        tp = self._kafka.partitions[partition]
        at, resets = self._kafka.offsets[tp], self._kafka.resets
        end = at.offset + BATCH_ROWS
        moved = [] if parse_note(at.metadata).stream else [(tp.topic, tp.partition)]
        batch = offset(n, one(at.offset, end, partition=tp.partition), stream="a", followed=moved, reset_number=resets)
        for _ in range(REFUSALS_MAX):
            try:
                self._query.run(self._sink, n, batch)
                break
            except LedgerConflict as refused:
                self._counts["refused"] += 1
                self._obey(refused)
        else:
            raise RuntimeError(f"batch {n} was refused {REFUSALS_MAX} times")
        self._counts["batches"] += 1
        if self._kafka.resets == resets:  # otherwise it is void
            self._kafka.offsets[tp] = CommittedOffset(end, note_text(Note("a", n, resets)))

    def _obey(self, refused: LedgerConflict) -> None:
        """Run the commands of a message that write the missing records again."""
        printed = commands_of(refused)
        last = next((n for n, command in enumerate(printed) if "--to-ledger" in command), None)
        if last is None:
            raise refused
        for command in printed[: last + 1]:
            if not command.startswith("spark-group"):
                self._query.spark.sql(command)
                continue
            with (
                patch.object(common, "session", self._spark_of_commands),
                patch.object(common, "admin_of", lambda *_: nullcontext(self._kafka)),
            ):
                shown = CliRunner().invoke(app, shlex.split(command)[1:])
            if shown.exit_code != 0 and "while the reset was running" not in " ".join(shown.output.split()):
                raise RuntimeError(f"{command}: {shown.output}") from shown.exception

    @contextmanager
    def _spark_of_commands(self) -> Iterator[Any]:
        yield self._query.spark

    # the operation

    def _change(self) -> None:
        for turn in range(BATCHES_MAX):
            if self._stop.is_set():
                return
            self._operate(turn % PARTITIONS)

    def _operate(self, partition: int) -> None:
        try:
            self._session.sql(self._statement(partition))
        except Exception as exc:  # raised by py4j where PySpark does not translate the class
            if not table_writer.is_race(exc):
                raise
            self._counts["conflicts"] += 1
        self._counts["operations"] += 1

    def _statement(self, partition: int) -> str:
        name = f"delta.`{self.table}`"
        if self._operation == "optimize":
            return f"OPTIMIZE {name}"
        if self._operation == "delete":
            return f"DELETE FROM {name} WHERE partition = {partition} AND offset % 10 = {DELETED}"
        if self._operation == "merge":
            return (
                f"MERGE INTO {name} AS t USING (SELECT value FROM {name} WHERE partition = {partition} AND offset % 10 "
                f"IN ({DELETED}, {UPDATED}) AND NOT value LIKE '%!') AS s ON t.partition = {partition} AND s.value = "
                f"t.value WHEN MATCHED AND t.offset % 10 = {DELETED} THEN DELETE "
                "WHEN MATCHED THEN UPDATE SET value = t.value || '!'"
            )
        if self._operation == "restore":
            newest = DeltaTable(self.table).version()
            return f"RESTORE TABLE {name} TO VERSION AS OF {max(1, newest - random.randint(1, BACK_MAX))}"
        self._leave_behind()
        return f"VACUUM {name}"

    def _leave_behind(self) -> None:
        """Let the table's files be old, and add one that a killed attempt left."""
        orphan = self.table / native_writer.FOLDER / f"killed-{len(self._orphans)}" / "part-00000.parquet"
        orphan.parent.mkdir(parents=True)
        orphan.write_bytes(b"")
        self._orphans.append(orphan)
        files = [Path(uri.removeprefix("file://")) for uri in DeltaTable(self.table).file_uris()]
        for path in (*files, orphan, orphan.parent):
            os.utime(path, (time.time() - OLD_S,) * 2)


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
