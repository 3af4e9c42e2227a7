"""Members on agents under kills and faults of the control channel.

``python -m tests.bench agents [--kills N] [--seed S] [--protocol classic|consumer]``: kills agents, executors and
Python workers that are reading, N times each
``python -m tests.bench agents --channel N``: closes, blocks and delays the control channel, N times each

A real broker, a real Spark with three executors, a Delta table, a producer that never stops. Prints for each event the
time until everything that was produced before it is committed, and until every member is placed on an executor again;
and the account: nothing may be lost or duplicated, and a classic group must not rebalance. The same seed gives the same
kills, at other moments of the application.
"""

import argparse
import os
import secrets
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import quick_spark
from crash import channel_faults, churn, kills
from kit.broker_cluster import BrokerCluster

SEEDS = 2**32
SESSION_MS = 45_000
"""Kafka's default in both protocols."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench agents")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(SEEDS))
    parser.add_argument("--protocol", choices=("classic", "consumer"), default="classic")
    parser.add_argument("--kills", type=int, default=5, help="of each kind")
    parser.add_argument("--channel", type=int, default=0, help="instead: faults of the channel, each N times")
    given = parser.parse_args(arguments)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    session_ms = channel_faults.SESSION_MS if given.channel else SESSION_MS
    with (
        tempfile.TemporaryDirectory(prefix="spark-group-agents-") as scratch,
        quick_spark.prepared(),
        BrokerCluster(settings=churn.broker_settings(session_ms)) as broker,
    ):
        return int(_wrong(broker, Path(scratch) / "home", given))


def _wrong(broker: BrokerCluster, folder: Path, given: argparse.Namespace) -> bool:
    """Whether a record was lost or duplicated, or a classic group rebalanced."""
    if given.channel:
        faults = channel_faults.ChannelFaults(
            broker, folder, protocol=given.protocol, report=_report, rounds=given.channel
        )
        account = faults.run()
        return bool(account.lost or account.doubled or sum(one.rebalances for one in account.short))
    app = churn.Application(broker, folder, protocol=given.protocol, session_ms=SESSION_MS, **kills.SLOW_READ)
    killed = kills.Kills(app, each=given.kills, seed=given.seed, report=_report).run()
    rebalances = sum(killed.rebalances(kind) for kind in kills.KINDS)
    return bool(killed.lost or killed.doubled or (given.protocol == "classic" and rebalances))


def _report(text: str) -> None:
    print(text, flush=True)
