"""Faults of the control channel between executors and the stream reader, and the recovery from each.

Runs in: ``tests.bench agents`` and ``test_churn``. The channel goes through a proxy; brokers are reached without it. A
short fault ends within the lease of agents and must only take time: the same agents, no rebalance. A long one may end
agents, but must not lose a row. Deliberately absent: connections that are refused for long, which mean that the stream
reader has ended.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kit.broker_cluster import BrokerCluster
from kit.proxy import CLEAR, Conditions, Direction, Proxy
from rebalance.accounts import Record

from crash.churn import Application, figures
from spark_group_source.local.broker import free_ports

SESSION_MS = 15_000
LEASE_S = 9.0
"""60% of the session timeout."""
DELAY_S = 0.7
BACK_S = 1.0
"""Pause between the recovery from one fault and the next."""


@dataclass(frozen=True)
class Fault:
    """One fault of all connections. ``short``: it is shorter than the lease."""

    name: str
    lasts_s: float
    short: bool
    begin: Callable[[Proxy], object]


def _with_conditions(conditions: Conditions, *directions: Direction) -> Callable[[Proxy], object]:
    return lambda proxy: proxy.set_conditions(conditions, *directions)


FAULTS = (
    Fault("closed", 0.0, True, Proxy.reset),
    Fault("closed, and refused for 2 s", 2.0, True, Proxy.refuse),
    Fault("half-open to the agents", 0.0, True, lambda p: p.half_open(Direction.TO_CLIENT)),
    Fault("half-open to the stream reader", 0.0, True, lambda p: p.half_open(Direction.TO_SERVER)),
    Fault("messages dropped for 4 s", 4.0, True, _with_conditions(Conditions(drop=True))),
    Fault(
        "messages dropped to the stream reader for 4 s",
        4.0,
        True,
        _with_conditions(Conditions(drop=True), Direction.TO_SERVER),
    ),
    Fault(
        "messages dropped to the agents for 4 s",
        4.0,
        True,
        _with_conditions(Conditions(drop=True), Direction.TO_CLIENT),
    ),
    Fault(f"delayed by {DELAY_S} s each way for 10 s", 10.0, True, _with_conditions(Conditions(delay_s=DELAY_S))),
    Fault("messages dropped for 12 s, longer than the lease", 12.0, False, _with_conditions(Conditions(drop=True))),
)


@dataclass
class FaultResult:
    """The recovery from one fault: seconds after its end until the rows were committed and all members were placed."""

    fault: Fault
    rows_s: float
    members_s: float
    rebalances: int
    agents_lost: int


@dataclass
class Account:
    """The results of all faults, and the account of the records."""

    protocol: str
    results: list[FaultResult] = field(default_factory=list)
    produced: int = 0
    lost: list[Record] = field(default_factory=list)
    doubled: list[Record] = field(default_factory=list)

    @property
    def short(self) -> list[FaultResult]:
        return [one for one in self.results if one.fault.short]

    def __str__(self) -> str:
        rows, members = figures([one.rows_s for one in self.results]), figures([one.members_s for one in self.results])
        return (
            f"{self.protocol}: {len(self.results)} faults of the channel, {self.produced} records: {len(self.lost)} "
            f"lost, {len(self.doubled)} duplicated; {len(self.short)} shorter than the lease: "
            f"{sum(one.rebalances for one in self.short)} rebalances, "
            f"{sum(one.agents_lost for one in self.short)} agents lost; rows after {rows}, "
            f"members after {members}"
        )


class ChannelFaults:
    """Inject each fault ``rounds`` times.

    Args:
        folder: a new directory.
        report: takes each line of the report.
    """

    def __init__(
        self,
        broker: BrokerCluster,
        folder: Path,
        *,
        protocol: str,
        report: Callable[[str], None],
        rounds: int = 1,
        faults: tuple[Fault, ...] = FAULTS,
    ) -> None:
        (self._port,) = free_ports(1)
        self._proxy = Proxy(target=("127.0.0.1", self._port))
        self._broker, self._folder, self._protocol, self._report = broker, folder, protocol, report
        self._faults = [fault for _ in range(rounds) for fault in faults]
        self.account = Account(protocol)

    def run(self) -> Account:
        with self._proxy, self._application() as app:
            for number, fault in enumerate(self._faults, 1):
                app.stays_alive(BACK_S)
                result = self._strike(app, fault)
                self.account.results.append(result)
                self._report(
                    f"{number:4} {fault.name}: rows after {result.rows_s:.1f} s, members after "
                    f"{result.members_s:.1f} s, {result.agents_lost} agents lost, {result.rebalances} rebalances"
                )
        account = self.account
        account.produced, account.lost, account.doubled = app.account()
        self._report(str(account))
        return account

    @contextmanager
    def _application(self) -> Iterator[Application]:
        app = Application(
            self._broker,
            self._folder,
            protocol=self._protocol,
            session_ms=SESSION_MS,
            channel=self._proxy.port,
            coordinatorPort=self._port,
            coordinatorHost="127.0.0.1",
        )
        with app.running():
            app.await_(app.whole, "members on every executor")
            yield app

    def _strike(self, app: Application, fault: Fault) -> FaultResult:
        before, agents = app.rebalances(), set(app.agents())
        fault.begin(self._proxy)
        app.stays_alive(fault.lasts_s)
        if fault.lasts_s:
            self._proxy.set_conditions(CLEAR)
            self._proxy.heal()
        ended_s = time.monotonic()
        ends = app.ends()
        app.await_(lambda: app.committed(ends), f"the rows after {fault.name}")
        rows_s = time.monotonic() - ended_s
        if not fault.lasts_s:
            app.stays_alive(LEASE_S)  # a half-open connection is detected, or the agent ends
            self._proxy.heal()
        app.await_(app.whole, f"members after {fault.name}")
        members_s = time.monotonic() - ended_s
        return FaultResult(fault, rows_s, members_s, app.rebalances() - before, len(agents - set(app.agents())))
