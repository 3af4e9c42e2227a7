"""Queries of one group that write one table and are killed at random moments, and the account of their records.

Runs in: ``tests.bench ledgers`` and ``test_kill``. A producer writes all the time, and Kafka's offsets and the table's
ledger are compared all the time. Written rows are read back from the files of the table's log. Deliberately absent:
kills on executors (``kills``)."""

import itertools
import json
import math
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import psutil
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from delta_files import living_rows
from kafka_helpers import Offsets, Record, await_progress, committed_of, end_offsets_of, produce_to, size_of
from kit.object_store import ObjectStore
from kit.schema_registry import SchemaRegistry
from rebalance.accounts import Flow, stays
from sink_helpers import next_offsets

from crash.job import KEYS, Point
from spark_group_source import compatibility
from spark_group_source.local.broker import Broker
from spark_group_source.model import TopicPartition

JOB = Path(__file__).with_name("job.py")
Way = Literal["native", "options", "connect"]
WAYS: tuple[Way, ...] = get_args(Way)
ARGUMENTS: dict[Way, dict[str, str]] = {
    "native": {"writer": "native"},
    "options": {"writer": "options"},
    "connect": {"connect": "local[2]"},
}
needs_delta = pytest.mark.skipif(
    not compatibility.has_delta_release(), reason="Delta Lake has no release for the installed Spark"
)
"""Of tests that write with options."""
Kind = Literal["driver", "python"]
"""``driver``: its Python and its JVM (on Spark Connect the client and the server). ``python``: one of Spark's Python
processes: the stream reader, a task's worker, or on Spark Connect the worker of ``foreachBatch``."""
LIFE_S = (0.1, 5.0)
"""A run is killed this long after it reached its milestone."""
MILESTONES = {"start": 2, "group": 3, "commit": 5}
"""Milestones of runs with their weights: its start, so that Spark is killed while it starts; joining the group, so that
it is killed in its first batch; a commit, so that it is killed in a later one."""
POINT_ROWS = 300
RATE_PER_S = 100
BATCH_MAX, DRAIN_MAX = 400, 100_000
"""Records of a batch, during the kills and afterwards."""
NEW_SCHEMA_AT = 500
"""From this record on, the values have one more field."""
PAUSE_S = 0.1
END_S = 300
OUTLIVES = "foreach_batch_worker"
"""Spark Connect's process for ``foreachBatch`` keeps trying to reach a killed server. It is killed at the next
start."""
LOST_SHARE = 0.1
"""Share of a driver's kills after which its checkpoint is deleted, if their number is not given."""
CALM = {"kafka.session.timeout.ms": "6000", "kafka.heartbeat.interval.ms": "500"}


@dataclass
class Account:
    """The result. ``wrong`` lists all violations."""

    way: str
    seed: int
    struck: Counter[Kind] = field(default_factory=Counter)
    joined: int = 0
    lost_checkpoints: int = 0
    produced: int = 0
    commits: int = 0
    took_s: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} of {kind}" for kind, count in sorted(self.struck.items()))
        return (
            f"{self.way}, seed {self.seed}: {self.struck.total()} kills ({kinds}), {self.joined} runs in the group, "
            f"{self.lost_checkpoints} checkpoints deleted, {self.produced:,} records, {self.commits:,} commits, "
            f"{self.took_s / 60:.0f} minutes: {'; '.join(self.wrong[:5]) or 'each record once'}"
        )


class Job:
    """The driver as a child process with all that Spark starts below it."""

    def __init__(self, arguments: dict[str, Any], log: Path) -> None:
        self._log = log.open("ab")
        self.process = subprocess.Popen(
            [sys.executable, str(JOB), json.dumps(arguments)],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={"PYSPARK_PYTHON": sys.executable, **os.environ, "SPARK_GROUP_LOG_LEVEL": "INFO"},
        )

    def tree(self) -> list[psutil.Process]:
        with_children: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.process.pid)
            with_children = [top, *top.children(recursive=True)]
        return with_children

    def kill(self) -> list[psutil.Process]:
        """SIGKILL the driver's Python and its JVM; Spark's Python processes have to detect that themselves."""
        tree = self.tree()
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                if process.pid == self.process.pid or "java" in process.name():
                    process.kill()
        self.process.wait(300)
        self._log.close()
        return tree

    def pythons(self) -> list[psutil.Process]:
        """Spark's Python processes."""
        found = []
        for process in self.tree()[1:]:
            with suppress(psutil.NoSuchProcess):
                if "java" not in process.name() and "python" in " ".join(process.cmdline()):
                    found.append(process)
        return found


class Application:
    """A query with its own checkpoint, restarted after each kill.

    Args:
        checkpoint: its location; default: in ``home``.
        read_table: returns the folder with a copy of the table's newest files; default: the table itself.
    """

    def __init__(
        self,
        home: Path,
        arguments: dict[str, Any],
        checkpoint: str | None = None,
        read_table: Callable[[], Path] | None = None,
    ) -> None:
        self.home, self.log = home, home / "job.log"
        self.arguments = {**arguments, "checkpoint": checkpoint or str(home / "checkpoint")}
        self.job: Job | None = None
        self._joins, self._commits = 0, 0
        self._read_table = read_table or (lambda: Path(arguments["table"]))
        self.left: list[psutil.Process] = []

    def start(self) -> Job:
        self.end()
        scratch = self.home / "scratch"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True, exist_ok=True)  # a process that is about to end may have written into it
        self._joins, self._commits = self.joins(), self.commits()
        self.job = Job(self.arguments | {"scratch": str(scratch)}, self.log)
        return self.job

    def running(self) -> Job:
        """The running job, started if necessary. Raises AssertionError if it ended by itself."""
        if self.job is None:
            return self.start()
        assert self.job.process.poll() is None, f"{self.log} ended by itself:\n{self.tail()}"
        return self.job

    def kill(self) -> None:
        if self.job is not None:
            self.left += self.job.kill()
            self.job = None

    def end(self) -> None:
        """Kill the query and the processes that outlive it."""
        self.kill()
        for process in self.left:
            if OUTLIVES in _command(process):
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    def joins(self) -> int:
        """How many of its runs joined the group."""
        return self.log.read_text(errors="replace").count(": joining; stream=") if self.log.exists() else 0

    def joined(self) -> bool:
        """Whether the current run did."""
        return self.running() is not None and self.joins() > self._joins

    def commits(self) -> int:
        """The number of commits of the table, of any writer."""
        return len(list((self._read_table() / "_delta_log").glob("*.json")))

    def has_written(self) -> bool:
        """Whether it has joined the group and the table has a commit since its start."""
        return self.joined() and self.commits() > self._commits

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class Hammer:
    """Kills applications of one group.

    Args:
        home: a new directory for table, checkpoints and logs.
        way: how the sink writes the table.
        pythons: percentage of kills that hit one of Spark's Python processes only.
        store: has the table and the checkpoints; None: they are in ``home``.
        has_bad_records: whether the values are in Avro with a schema registry, with a new schema on the way, and some
            are not, which go to a table of their own.
        is_merged: whether records are changes of a few keys, of which the table has the latest ones.
        report: takes each line of the report.
    """

    def __init__(
        self,
        broker: Broker,
        home: Path,
        *,
        way: Way,
        group: str,
        topic: str,
        seed: int,
        applications: int = 1,
        pythons: int = 0,
        store: ObjectStore | None = None,
        has_bad_records: bool = False,
        is_merged: bool = False,
        report: Callable[[str], None] = print,
    ) -> None:
        self._table, self._store, self.group, self.topic = home / "table", store, group, topic
        self.servers = broker.bootstrap_servers
        self.admin = AdminClient({"bootstrap.servers": self.servers, "log_level": 0})
        place = str(home) if store is None else store.uri(group)
        given: dict[str, Any] = {"servers": self.servers, "group": group, "topic": topic, "table": f"{place}/table"}
        given |= {**ARGUMENTS[way], **CALM, "maxOffsetsPerTrigger": str(BATCH_MAX), "again": "1" if pythons else ""}
        self._bad = home / "bad" if has_bad_records else None
        self._is_merged = is_merged
        if is_merged:
            given["merged"] = "1"
        self._registry = SchemaRegistry() if has_bad_records else None
        if self._registry is not None:
            given |= {"bad": str(self._bad), "registry": self._registry.url}
        if store is not None:
            given |= {"spark": store.spark_settings, "storage_options": store.storage_options}
        names = [f"application-{n}" for n in range(applications)]
        self.applications = [
            Application(home / name, given, f"{place}/{name}/checkpoint", self.read_table) for name in names
        ]
        self.account = Account(way, seed)
        self._random, self._pythons, self._report = random.Random(seed), pythons, report

    def read_table(self) -> Path:
        """Return the table's folder, with all files that it has now."""
        if self._store is not None:
            self._store.download(f"{self.group}/table", self._table)
        return self._table

    def run(self, *, kills: int | None = None, for_s: float = math.inf, lost_checkpoints: int | None = None) -> Account:
        """Kill applications ``kills`` times, or as often as there is time for.

        Args:
            lost_checkpoints: how many kills are followed by the deletion of the checkpoint; None: a tenth of the
                drivers' kills.
        """
        account, began_s = self.account, time.monotonic()
        lost = None if lost_checkpoints is None else set(self._random.sample(range(kills or 0), lost_checkpoints))
        partitions = len(end_offsets_of(self.admin, self.topic))
        with self._registry or nullcontext(), self._judging():
            value = {} if self._registry is None else {"value": avro_values(self._registry, self.topic)}
            with Flow(self.servers, self.topic, partitions, per_s=RATE_PER_S, **value) as flow:
                for number in itertools.count() if kills is None else range(kills):
                    if time.monotonic() - began_s > for_s:
                        break
                    losing = self._random.random() < LOST_SHARE if lost is None else number in lost
                    self._strike(number, losing)
            account.produced = flow.sent
        return account

    def run_points(self, rounds: int) -> Account:
        """Kill the application at each point of a batch in turn: the first batch of a new query, and later ones."""
        account, (one,) = self.account, self.applications
        checkpoint = Path(one.arguments["checkpoint"])
        partitions = len(end_offsets_of(self.admin, self.topic))
        producer = Producer({"bootstrap.servers": self.servers, "acks": "all", "log_level": 2})
        with self._judging():
            for batch in range(rounds):
                ids = range(account.produced, account.produced + POINT_ROWS)
                produce_to(producer, self.topic, [Record(b"%d" % n, partition=n % partitions) for n in ids])
                for point in get_args(Point):
                    self._kill_at(point, batch, checkpoint)
                    rows = account.produced + POINT_ROWS * (point != "offset")
                    if (found := len(living_rows(self.read_table(), ["id"]))) != rows:
                        account.wrong.append(f"batch {batch}, {point}: {found} rows, not {rows}")
                account.produced += POINT_ROWS
        return account

    @contextmanager
    def _judging(self) -> Iterator[None]:
        """Compare Kafka's offsets with the ledger until the block ends. Then read all records and judge."""
        account, began_s = self.account, time.monotonic()
        try:
            with watching(self.admin, self.group, self.read_table) as wrong:
                yield
            self._drain()
            account.wrong += wrong
        except BaseException as exc:
            for application in self.applications:
                exc.add_note(f"{application.log}:\n{application.tail() if application.log.exists() else ''}")
            raise
        finally:
            for application in self.applications:
                application.end()
        account.joined = sum(application.joins() for application in self.applications)
        account.took_s = time.monotonic() - began_s
        self._judge()
        self._report(str(account))

    def _kill_at(self, point: Point, batch: int, checkpoint: Path) -> None:
        (one,) = self.applications
        one.arguments |= {"pause": None if point == "commit" else point}
        files = [checkpoint / folder / str(batch) for folder in ("offsets", "commits")]
        paused = files[1] if point == "commit" else one.home / "scratch" / "paused"

        def reached() -> bool:
            one.running()
            return paused.exists()

        await_progress(reached, self.progress, what=f"batch {batch} at {point}")
        one.kill()
        there = [file.exists() for file in files]
        assert there == [True, point == "commit"], f"batch {batch} was killed elsewhere than at {point}: {there}"
        self.account.struck["driver"] += 1

    def _strike(self, number: int, losing: bool) -> None:
        for each in self.applications:
            each.running()
        one = self._random.choice(self.applications)
        kind: Kind = "python" if not losing and self._random.randrange(100) < self._pythons else "driver"
        (to,) = self._random.choices(list(MILESTONES), list(MILESTONES.values()))
        if to == "commit":
            await_progress(one.has_written, self.progress, what="a commit of the table")
        elif to == "group" or kind == "python":
            await_progress(one.joined, self.progress, what="a run in the group")
        stays(lambda: bool(one.running()), self._random.uniform(*LIFE_S), "the query")
        if kind == "python":
            found = await_progress(lambda: one.running().pythons(), self.progress, what="a Python process of Spark")
            with suppress(psutil.NoSuchProcess):
                self._random.choice(found).kill()
        else:
            one.kill()
        if losing:
            assert self._store is None
            shutil.rmtree(one.arguments["checkpoint"], ignore_errors=True)
            self.account.lost_checkpoints += 1
        self.account.struck[kind] += 1
        self._report(f"{number + 1:4} {one.home.name} {kind}{', its checkpoint deleted' if losing else ''}")

    def progress(self) -> object:
        """Progress for ``await_progress``: the queries' logs, and the table's commits."""
        log = self.read_table() / "_delta_log"
        return size_of(*(each.log for each in self.applications)), len(list(log.glob("*.json")))

    def _drain(self) -> None:
        """Wait until everything that was produced is in the table and committed by the group."""
        for each in self.applications:
            each.kill()
            each.arguments |= {"maxOffsetsPerTrigger": str(DRAIN_MAX)}
        ends = end_offsets_of(self.admin, self.topic)

        def at_the_end() -> bool:
            for each in self.applications:
                each.running()
            return committed_of(self.admin, self.group) == ends

        await_progress(at_the_end, self.progress, what="the end of what was produced")
        if ledger_of(self.read_table(), self.group) != ends:
            self.account.wrong.append("the ledger is not at the end")

    def _judge(self) -> None:
        table = self.read_table()
        account, log = self.account, sorted((table / "_delta_log").glob("*.json"))
        account.commits = len(log)
        if self._is_merged:
            account.wrong += merge_faults(table, account.produced)
            counts = Counter(f"{number}" for number in range(account.produced))
        else:
            counts = Counter(row["id"] for row in living_rows(table, ["id"]))
        if self._bad is not None:
            bad = [row["value"].decode() for row in living_rows(self._bad, ["value"])]
            account.wrong += ["no record is bad"] * (not bad)
            counts.update(bad)
        doubled = [text for text, count in counts.items() if count > 1]
        account.wrong += [f"{account.produced - len(counts)} records are lost"] * (len(counts) != account.produced)
        account.wrong += [f"{len(doubled)} records are duplicated: {doubled[:5]}"] * bool(doubled)
        numbers, protocols = [], 0
        for file in log:
            for action in map(json.loads, file.read_text().splitlines()):
                protocols += "protocol" in action
                if action.get("txn", {}).get("appId") == f"spark-group-source.{self.group}":
                    numbers.append(action["txn"]["version"])
        if numbers != list(range(1, len(numbers) + 1)):
            account.wrong.append("the numbers of the group's commits are not consecutive")
        if protocols != 1:
            account.wrong.append("the table has another protocol")
        for each in self.applications:
            count = each.log.read_text(errors="replace").count("LedgerConflict: ")
            account.wrong += [f"{each.home.name}: LedgerConflict {count} times"] * bool(count)
        left = [process for each in self.applications for process in each.left]
        # A pid that was reused by another process or thread is not one of them.
        left = [process for process in left if process.is_running() and OUTLIVES not in _command(process)]
        _, still = psutil.wait_procs(left, END_S)
        account.wrong += [f"{len(still)} processes did not end: {[_command(one) for one in still[:2]]}"] * bool(still)


def merge_faults(table: Path, produced: int) -> list[str]:
    """Compare a merged table with the last change of each key."""
    last = {number % KEYS: number for number in range(produced)}
    expected = Counter((key, number) for key, number in last.items() if number % 7 != 3)
    found = Counter((row["id"], row["n"]) for row in living_rows(table, ["id", "n"]))
    wrong = sorted(((expected - found) + (found - expected)).elements())
    return [f"keys with another last change: {wrong[:5]}"] * bool(wrong)


def avro_values(registry: SchemaRegistry, topic: str, *, auth: str | None = None) -> Callable[[int], bytes]:
    """Return the function that makes the values of records: Avro by the official serializer, but some are text."""
    fields: list[dict[str, object]] = [{"name": "id", "type": "string"}]
    client = SchemaRegistryClient({"url": registry.url} | ({"basic.auth.user.info": auth} if auth else {}))
    context = SerializationContext(topic, MessageField.VALUE)

    def serializer() -> AvroSerializer:
        text = json.dumps({"type": "record", "name": "Order", "fields": fields})
        made: AvroSerializer = AvroSerializer(client, text)
        return made

    first = serializer()
    fields.append({"name": "note", "type": ["null", "string"], "default": None})
    second = serializer()

    def value(number: int) -> bytes:
        if number % 5 == 2:
            return b"%d" % number
        old = {"id": f"{number}"}
        is_old = number < NEW_SCHEMA_AT
        return (first(old, context) if is_old else second({**old, "note": "new"}, context)) or b""

    return value


def _command(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())[:200]
    return "ended"


def ledger_of(table: Path, group: str) -> Offsets:
    """The ledger in the table's log, read as plain JSON."""
    return {TopicPartition(*tp): offset for tp, offset in next_offsets(table, group).items()}


@contextmanager
def watching(admin: AdminClient, group: str, read_table: Callable[[], Path]) -> Iterator[list[str]]:
    """Compare Kafka's offsets with the ledger until the block ends. The value collects violations."""
    wrong: list[str] = []
    stop = threading.Event()

    def run() -> None:
        last: Offsets = {}
        while not stop.wait(PAUSE_S):
            committed = committed_of(admin, group)
            table = read_table()
            ledger = ledger_of(table, group) if table.exists() else {}
            for tp, offset in committed.items():
                if offset > ledger.get(tp, 0):
                    wrong.append(f"{tp}: committed {offset}, ledger {ledger.get(tp, 0)}")
                if offset < last.get(tp, 0):
                    wrong.append(f"{tp}: committed offset moved back from {last[tp]} to {offset}")
            last = committed

    thread = threading.Thread(target=run, name="watcher")
    thread.start()
    try:
        yield wrong
    finally:
        stop.set()
        thread.join(300)
