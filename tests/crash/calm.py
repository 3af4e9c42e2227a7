"""A long calm: tasks fail, others run twice, each batch is read three times; the group must not notice.

Runs in: ``tests.bench agents`` and ``test_churn``. Deliberately absent: processes that die (``kills``).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rebalance.accounts import Record

from crash.churn import Application

FAIL_EVERY_S = 10.0
SLOW_EVERY_S = 23.0
ACTIONS = 3
JOB = {"actions": str(ACTIONS)}
"""Arguments of the application's job."""


@dataclass
class Account:
    """What came of it."""

    protocol: str
    lasted_s: float = 0.0
    rebalances: int = 0
    produced: int = 0
    lost: list[Record] = field(default_factory=list)
    doubled: list[Record] = field(default_factory=list)
    failed: int = 0
    slow: int = 0
    again: int = 0
    """Attempts that were not a task's first: those after a failure, and copies of slow ones."""
    batches: int = 0

    def __str__(self) -> str:
        return (
            f"{self.protocol}: {self.lasted_s / 60:.1f} minutes, {self.batches} batches of {ACTIONS} actions, "
            f"{self.failed} tasks failed, {self.slow} were slow, {self.again} ran again: {self.rebalances} rebalances, "
            f"{self.produced} records: {len(self.lost)} lost, {len(self.doubled)} doubled"
        )


def calm(application: Application, *, for_s: float, say: Callable[[str], None]) -> Account:
    """Let it run for so long, with :data:`JOB`."""
    app, account = application, Account(application.protocol)
    with app.running():
        app.await_(app.whole, "members beside every executor")
        before, began_s = app.rebalances(), time.monotonic()
        fail_s = slow_s = 0.0
        while (now_s := time.monotonic()) - began_s < for_s:
            if now_s >= fail_s:
                app.tell("fail")
                fail_s = now_s + FAIL_EVERY_S
            if now_s >= slow_s:
                app.tell("slow")
                slow_s = now_s + SLOW_EVERY_S
            app.stays_alive(1.0)
        account.lasted_s, account.rebalances = time.monotonic() - began_s, app.rebalances() - before
    account.produced, account.lost, account.doubled = app.account()
    told = [path.name for path in (app.folder / "told").iterdir()]
    account.failed, account.slow, account.again = (
        sum(name.startswith(order) for name in told) for order in ("fail", "slow", "again")
    )
    account.batches = len(list((app.folder / "checkpoint" / "commits").glob("[0-9]*")))
    say(str(account))
    return account
