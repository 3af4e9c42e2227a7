"""SIGKILL of agents, executors and Python workers in turn, drawn from a seed, and what each of them cost.

Runs in: ``tests.bench agents`` and ``test_churn``. A kill is over when the group has committed all that was produced
before it, and when every member lives beside an executor again; these are the two times. Deliberately absent: faults of
the channel (``channel_faults``).
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
"""Records that a worker is killed over, and how many the log keeps together."""
SLOW_READ = {"kafka__max__partition__fetch__bytes": 1_000}
"""Each answer of a broker has little: reading takes time, and is killed in the middle."""
SAMPLE_S = 0.05
FLUSH_S = 30.0


@dataclass
class Struck:
    """One kill. Seconds until the rows were there, until the members were, of the longest standstill of a partition
    meanwhile, and of the longest time in which one had no member."""

    kind: Kind
    rows_s: float
    members_s: float
    still_s: float
    bare_s: float
    rebalances: int


@dataclass
class Account:
    """What came of all of them."""

    protocol: str
    seed: int
    struck: list[Struck] = field(default_factory=list)
    produced: int = 0
    lost: list[Record] = field(default_factory=list)
    doubled: list[Record] = field(default_factory=list)
    failed_tasks: int = 0
    """Attempts of tasks that failed, by Spark's log."""

    def rebalances(self, kind: Kind) -> int:
        return sum(one.rebalances for one in self.struck if one.kind == kind)

    def __str__(self) -> str:
        text = (
            f"{self.protocol}, seed {self.seed}: {len(self.struck)} kills, {self.produced} records: "
            f"{len(self.lost)} lost, {len(self.doubled)} doubled; {self.failed_tasks} attempts of tasks failed"
        )
        for kind in KINDS:
            of_it = [one for one in self.struck if one.kind == kind]
            if of_it:
                text += (
                    f"\n  {len(of_it):3} times {kind}: {self.rebalances(kind)} rebalances; rows after "
                    f"{figures([one.rows_s for one in of_it])}, members after "
                    f"{figures([one.members_s for one in of_it])}, longest standstill of a partition "
                    f"{figures([one.still_s for one in of_it])}, without a member "
                    f"{figures([one.bare_s for one in of_it])}"
                )
        return text


class Kills:
    """So many of each kind, in an order of the seed's.

    Args:
        application: new; with :data:`SLOW_READ`.
        say: where each line of the report goes.
    """

    def __init__(self, application: Application, *, each: int, seed: int, say: Callable[[str], None]) -> None:
        self._app, self._say, self._random = application, say, random.Random(seed)
        self._kinds = [kind for kind in KINDS for _ in range(each)]
        self._random.shuffle(self._kinds)
        self.account = Account(application.protocol, seed)

    def run(self) -> Account:
        with self._app.running():
            self._settle()
            for number, kind in enumerate(self._kinds, 1):
                self._app.stays_alive(self._random.uniform(*BETWEEN_S))
                struck = self._strike(kind)
                self.account.struck.append(struck)
                self._say(
                    f"{number:4} {kind}: rows after {struck.rows_s:.1f} s, members after {struck.members_s:.1f} s, "
                    f"longest standstill {struck.still_s:.1f} s, without a member {struck.bare_s:.1f} s, "
                    f"{struck.rebalances} rebalances"
                )
        account = self.account
        account.produced, account.lost, account.doubled = self._app.account()
        account.failed_tasks = self._app.log().count("Lost task ")
        self._say(str(account))
        return account

    def _settle(self) -> None:
        """Members that came one after the other have had their rebalances."""
        ends = self._app.ends()
        self._app.await_(lambda: self._app.committed(ends), "the first rows")
        self._app.await_(self._app.whole, "members beside every executor")

    def _strike(self, kind: Kind) -> Struck:
        app = self._app
        app.standing.anew()
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
        standing, rebalances = app.standing, app.rebalances() - before
        return Struck(kind, rows_s, members_s, standing.worst_s(), standing.bare_s(), rebalances)

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
        """A worker in the middle of its read: the one that works the most while there is much to read."""
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
