"""Kill agents, executors and Python workers in a random order, and measure the recovery from each kill.

Runs in: ``tests.bench agents`` and ``test_churn``. Two times are measured: until the group has committed what was
produced before the kill, and until every member is placed on an executor again. Deliberately absent: faults of the
channel (``channel_faults``).
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import psutil
from confluent_kafka import Producer
from rebalance.accounts import Record

from crash.churn import PARTITIONS, Application, figures

Kind = Literal["agent", "executor", "worker"]
KINDS: tuple[Kind, ...] = get_args(Kind)
BETWEEN_S = (0.2, 2.0)
BURST, BURST_EACH = 12_000, 10
"""Records that a worker reads when it is killed, and records of a batch in the log."""
SLOW_READ = {"kafka__max__partition__fetch__bytes": 1_000}
"""Small fetch responses: reads take long enough to be killed in the middle."""
SAMPLE_S = 0.05
FLUSH_S = 300.0


@dataclass
class KillResult:
    """The recovery from one kill. Seconds until the rows were committed, until the members were placed, of the longest
    pause of a partition's commits meanwhile, and of the longest time in which a partition had no member."""

    kind: Kind
    rows_s: float
    members_s: float
    pause_s: float
    unassigned_s: float
    rebalances: int


@dataclass
class Account:
    """The results of all kills, and the account of the records."""

    protocol: str
    seed: int
    results: list[KillResult] = field(default_factory=list)
    produced: int = 0
    lost: list[Record] = field(default_factory=list)
    doubled: list[Record] = field(default_factory=list)
    failed_tasks: int = 0
    """Failed task attempts, by Spark's log."""

    def rebalances(self, kind: Kind) -> int:
        return sum(one.rebalances for one in self.results if one.kind == kind)

    def __str__(self) -> str:
        text = (
            f"{self.protocol}, seed {self.seed}: {len(self.results)} kills, {self.produced} records: "
            f"{len(self.lost)} lost, {len(self.doubled)} duplicated; {self.failed_tasks} task attempts failed"
        )
        for kind in KINDS:
            of_it = [one for one in self.results if one.kind == kind]
            if of_it:
                text += (
                    f"\n  {len(of_it):3} times {kind}: {self.rebalances(kind)} rebalances; rows after "
                    f"{figures([one.rows_s for one in of_it])}, members after "
                    f"{figures([one.members_s for one in of_it])}, longest pause of a partition "
                    f"{figures([one.pause_s for one in of_it])}, without a member "
                    f"{figures([one.unassigned_s for one in of_it])}"
                )
        return text


class Kills:
    """Kills of each kind, in a random order.

    Args:
        application: new; with :data:`SLOW_READ`.
        report: takes each line of the report.
    """

    def __init__(self, application: Application, *, each: int, seed: int, report: Callable[[str], None]) -> None:
        self._app, self._report, self._random = application, report, random.Random(seed)
        self._kinds = [kind for kind in KINDS for _ in range(each)]
        self._random.shuffle(self._kinds)
        self.account = Account(application.protocol, seed)

    def run(self) -> Account:
        with self._app.running():
            self._settle()
            for number, kind in enumerate(self._kinds, 1):
                self._app.stays_alive(self._random.uniform(*BETWEEN_S))
                result = self._strike(kind)
                self.account.results.append(result)
                self._report(
                    f"{number:4} {kind}: rows after {result.rows_s:.1f} s, members after {result.members_s:.1f} s, "
                    f"longest pause {result.pause_s:.1f} s, without a member {result.unassigned_s:.1f} s, "
                    f"{result.rebalances} rebalances"
                )
        account = self.account
        account.produced, account.lost, account.doubled = self._app.account()
        account.failed_tasks = self._app.log().count("Lost task ")
        self._report(str(account))
        return account

    def _settle(self) -> None:
        """Wait until the rebalances of the start are over."""
        ends = self._app.ends()
        self._app.await_(lambda: self._app.committed(ends), "the first rows")
        self._app.await_(self._app.whole, "members on every executor")

    def _strike(self, kind: Kind) -> KillResult:
        app = self._app
        app.pauses.reset()
        before = app.rebalances()
        os.kill(self._victim(kind), signal.SIGKILL)
        began_s = time.monotonic()
        ends = app.ends()
        app.await_(lambda: app.committed(ends), f"the rows after the kill of {kind}")
        rows_s = time.monotonic() - began_s
        app.await_(app.whole, f"members after the kill of {kind}")
        members_s = time.monotonic() - began_s
        now = app.ends()
        app.await_(lambda: app.committed(now), f"more rows after the kill of {kind}")
        pauses, rebalances = app.pauses, app.rebalances() - before
        return KillResult(kind, rows_s, members_s, pauses.worst_s(), pauses.unassigned_s(), rebalances)

    def _victim(self, kind: Kind) -> int:
        app = self._app
        match kind:
            case "agent":
                return self._random.choice(app.agents())
            case "executor":
                return self._random.choice(app.executors())
            case "worker":
                return self._reading()

    def _reading(self) -> int:
        """A worker that is reading: the one that uses the most CPU while there is much to read."""
        app = self._app
        producer = Producer({"bootstrap.servers": app.servers, "batch.num.messages": BURST_EACH, "log_level": 2})
        for number in range(BURST):
            producer.produce(app.topic, b"burst", partition=number % PARTITIONS)
            producer.poll(0)
        producer.flush(FLUSH_S)
        found: list[int] = []

        def busy() -> bool:
            before = {pid: _ticks(pid) for pid in app.workers()}
            app.stays_alive(SAMPLE_S)
            worked = {pid: _ticks(pid) - ticks for pid, ticks in before.items()}
            found[:] = sorted(worked, key=worked.__getitem__)[-1:]
            return bool(found) and worked[found[0]] > 0

        app.await_(busy, "a worker that reads")
        return found[0]


def _ticks(pid: int) -> int:
    with contextlib.suppress(OSError, psutil.Error):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    return 0
