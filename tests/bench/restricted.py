"""Measure what agents cost where they cannot run: CPU time of an executor's tasks, with all restrictions at once.

``python -m tests.bench restricted [--rounds N] [--tasks N]``

Rounds with ``memberHost=auto``, in which tasks do not reach the stream reader, alternate with rounds with
``memberHost=driver``. Each round is a new executor with two workers, whose tasks read from librdkafka's mock cluster.
Needs root.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import restricted
from agents.test_restricted import PROGRAM
from confluent_kafka import Producer
from kit.mock_cluster import MockCluster
from restricted import NO_EXEC, NO_PROC, OTHER_USER, PIDS_LIMIT, READ_ONLY
from rich.console import Console
from rich.table import Table

from spark_group_source.agents.channel.wire import Secret

RESTRICTIONS = (NO_PROC, READ_ONLY, OTHER_USER, PIDS_LIMIT, NO_EXEC)
TESTS = Path(restricted.__file__).parent
WORKERS = 2
ROUND_S = 600
REFUSED = ("127.0.0.1", 1)
RECORDS = 1_000
FLUSH_S = 60


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="restricted")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tasks", type=int, default=200, help="of each worker")
    chosen = parser.parse_args(arguments)
    if obstacles := [found for found in map(restricted.obstacle, RESTRICTIONS) if found]:
        print(*obstacles, sep="\n", file=sys.stderr)
        return 1
    unreached = {"addresses": [REFUSED], "secret": Secret.new().to_hex(), "run": "run", "plan": "r.1", "number": 0}
    planned: dict[str, Any] = {"auto": {**unreached, "late": False}, "driver": None}
    used: dict[str, list[float]] = {host: [] for host in planned}
    with MockCluster() as cluster:
        cluster.create_topic("orders")
        producer = Producer({"bootstrap.servers": cluster.bootstrap_servers})
        for _ in range(RECORDS):
            producer.produce("orders", bytes(100), partition=0)
        assert producer.flush(FLUSH_S) == 0
        for _ in range(chosen.rounds):
            for host, task in planned.items():
                used[host].append(_cpu_s(task, cluster.bootstrap_servers, chosen.tasks))
    table = Table("memberHost", "median CPU time", "least", "most", "of an executor's Python processes")
    for host, seconds in used.items():
        figures = (statistics.median(seconds), min(seconds), max(seconds))
        work = f"{WORKERS} workers x {chosen.tasks} tasks x {RECORDS:,} records"
        table.add_row(host, *(f"{each:.2f} s" for each in figures), work)
    Console().print(table)
    return 0


def _cpu_s(task: dict[str, Any] | None, servers: str, tasks: int) -> float:
    """The CPU time of one executor's Python processes."""
    options = {"kafka.bootstrap.servers": servers, "kafka.group.id": "g", "subscribe": "orders"}
    given = {"task": task, "options": options, "workers": WORKERS, "tasks": tasks, "wait": False, "threads": None}
    given["records"] = RECORDS
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        command = restricted.command(RESTRICTIONS, str(PROGRAM), json.dumps(given), writable=[Path(folder)])
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = {**os.environ, "TMPDIR": folder, "PYTHONPATH": str(TESTS)}
        subprocess.run(command, env=environment, cwd="/", capture_output=True, timeout=ROUND_S, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
