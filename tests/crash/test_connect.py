"""Source and sink on a real Spark Connect server: without py4j, the sink runs in a worker of the server."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import restricted
from delta_files import living_rows
from kafka_helpers import Offsets, Produce, TopicFactory, await_progress, size_of
from rebalance.accounts import stays
from streams import options_of

from crash.killed import JOB
from crash.running import HANG_S
from spark_group_source.host import run_files
from spark_group_source.local.broker import Broker
from spark_group_source.model import TopicPartition

DRAIN_S = 300
"""Bound of a hang in a query that is drained."""
DRAINED_S = 3.0
"""Time without a further read that proves a drain: that of several batches."""
PARTITIONS = 2

pytestmark = [
    pytest.mark.crash,
    pytest.mark.spark,
    pytest.mark.broker,
    pytest.mark.full,
    pytest.mark.timeout(HANG_S),
]


class ConnectQueries:
    """The queries of one group, each on its own server."""

    def __init__(self, broker: Broker, group: str, topic: str, tmp_path: Path) -> None:
        self.broker, self.group, self.topic, self.root = broker, group, topic, tmp_path
        self.table = tmp_path / "table"

    @contextmanager
    def running(
        self,
        name: str,
        *,
        master: str = "local[2]",
        environment: Mapping[str, str] = os.environ,
        spark: Mapping[str, str] | None = None,
        **more: Any,
    ) -> Iterator["subprocess.Popen[str]"]:
        """Run a query with the checkpoint of this name; it and its child processes are killed at the end.

        Args:
            master: of the Connect server.
            environment: of the server.
            spark: more Spark settings.
            more: options of the source.
        """
        scratch = self.root / f"scratch-{name}"
        scratch.mkdir(exist_ok=True)
        given = options_of(self.broker.bootstrap_servers, self.group, maxOffsetsPerTrigger=500, **more)
        given |= {"servers": self.broker.bootstrap_servers, "group": self.group, "topic": self.topic}
        given |= {"table": str(self.table), "checkpoint": str(self.root / name), "scratch": str(scratch)}
        with (
            (self.root / f"{name}.log").open("a") as log,
            subprocess.Popen(
                [sys.executable, str(JOB), json.dumps({**given, "connect": master, "spark": spark or {}})],
                env=environment,
                stdout=log,
                stderr=log,
                text=True,
                start_new_session=True,
            ) as process,
        ):
            try:
                yield process
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def await_rows(self, count: int, *processes: "subprocess.Popen[str]") -> None:
        def there() -> bool:
            assert all(process.poll() is None for process in processes), self.logs()
            return len(living_rows(self.table, ["offset"])) >= count

        await_progress(there, self.progress, what=f"{count} rows")

    def progress(self) -> object:
        """Progress for ``await_progress``: the queries' logs, checkpoints and commits."""
        written = [self.table / "_delta_log", *self.root.glob("*/offsets"), *self.root.glob("*/commits")]
        return size_of(*self.root.glob("*.log")), [len(list(folder.glob("*"))) for folder in written]

    def logs(self) -> str:
        return "\n".join(file.read_text()[-3000:] for file in self.root.glob("*.log"))

    def rows(self) -> Counter[tuple[int, int]]:
        found = living_rows(self.table, ["partition", "offset"])
        return Counter((row["partition"], row["offset"]) for row in found)


@pytest.fixture
def connected(broker: Broker, topic: TopicFactory, group_id: str, tmp_path: Path) -> ConnectQueries:
    return ConnectQueries(broker, group_id, topic(PARTITIONS), tmp_path)


def test_spark_connect_writes_each_record_once_through_kills_a_lost_checkpoint_and_a_second_query(
    connected: ConnectQueries, produce: Produce, committed: Callable[[str], Offsets]
) -> None:
    sent = 0

    def send(count: int) -> int:
        nonlocal sent
        for partition in range(PARTITIONS):
            produce(connected.topic, [str(n) for n in range(count)], partition=partition)
        sent += PARTITIONS * count
        return sent

    with connected.running("first") as query:
        connected.await_rows(send(500), query)
        connected.await_rows(send(1_500) - 2_000, query)  # and kill it in the middle
    with connected.running("first") as query:
        connected.await_rows(sent, query)
        assert "Streaming ForeachBatch worker Completed" in (connected.root / "first.log").read_text()
    with connected.running("new") as query, connected.running("beside") as other:
        connected.await_rows(send(500), query, other)
        ends = {TopicPartition(connected.topic, p): sent // PARTITIONS for p in range(PARTITIONS)}
        await_progress(
            lambda: committed(connected.group) == ends, connected.progress, what="the group's offsets at the end"
        )
        assert run_files.drain(connected.group, timeout_s=DRAIN_S) == 2
        for partition in range(PARTITIONS):
            produce(connected.topic, ["late"], partition=partition)
        stays(lambda: committed(connected.group) == ends, DRAINED_S, "a drained group")
    assert connected.rows() == Counter({(p, n): 1 for p in range(PARTITIONS) for n in range(sent // PARTITIONS)})


ALL = (restricted.NO_PROC, restricted.READ_ONLY, restricted.OTHER_USER, restricted.PIDS_LIMIT, restricted.NO_EXEC)
PYTHON = """#!/bin/sh
if [ "$RESTRICTED" ]; then exec {restricted} "$@"; fi
exec {python} "$@"
"""
"""The Python of executors and of the driver: only executors have the variable."""


def test_spark_connect_with_all_restrictions_of_executors_at_once(connected: ConnectQueries, produce: Produce) -> None:
    """Executors without /proc, with a read-only root but for one folder, another user, a limit of processes, no right
    to start programs, and no way to the driver."""
    for restriction in ALL:
        if reason := restricted.obstacle(restriction):
            pytest.skip(reason)
    scratch, python = connected.root / "of-executors", connected.root / "python"
    scratch.mkdir()
    scratch.chmod(0o777)
    limited = shlex.join(restricted.command(ALL, writable=[scratch]))
    python.write_text(PYTHON.format(restricted=limited, python=sys.executable))
    python.chmod(0o755)
    variables = {"RESTRICTED": "yes", "TMPDIR": str(scratch)}
    environment = os.environ | {"PYSPARK_PYTHON": str(python)}
    given = {f"spark.executorEnv.{name}": text for name, text in variables.items()}
    given["spark.python.worker.faulthandler.enabled"] = "false"  # its files are where only the JVM can write
    unreachable = {"coordinatorHost": "no.such.host.invalid", "memberHost": "executor"}
    with connected.running(
        "first", master="local-cluster[2,1,1024]", environment=environment, spark=given, **unreachable
    ) as query:
        for batch in range(3):
            for partition in range(PARTITIONS):
                produce(connected.topic, [str(n) for n in range(100)], partition=partition)
            connected.await_rows((batch + 1) * PARTITIONS * 100, query)
    logs = [file.read_text() for file in scratch.parent.glob("scratch-first/worker-*/*/*/stderr")]
    counts = [log.count("this executor does not reach the stream reader") for log in logs]
    assert sum(counts) >= 1 and max(counts) == 1, "each executor with tasks logs the reason once"
    assert connected.rows() == Counter({(p, n): 1 for p in range(PARTITIONS) for n in range(300)})


NOT_UTF_8 = """
from pyspark.sql import SparkSession, functions as F
from spark_group_source.delta.dead_letters import _RULE, _TRANSFORM, Rule, bad_records

spark = SparkSession.builder.remote("local[1]").getOrCreate()
record = F.lit("orders").alias("topic"), F.lit(0).alias("partition"), F.col("id").alias("offset")
error = F.expr("concat('not a number: ', cast(X'ff41c3' as string))").alias("error")
rows = spark.range(1).select(*record, F.lit(0).alias(_RULE), error)
((place, rule),) = bad_records(rows, [Rule(_TRANSFORM, "error", "")], 1, "orders").items()
print(ascii((place, rule.expression)))
spark.stop()
"""


def test_the_reason_of_a_bad_record_may_have_bytes_that_are_not_utf_8() -> None:
    """It often quotes the record. Spark Connect cannot collect such text."""
    command = [sys.executable, "-c", NOT_UTF_8]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=HANG_S)
    expected = ascii((("orders", 0, 0), "not a number: \ufffdA\ufffd"))
    assert ran.stdout.splitlines()[-1:] == [expected], ran.stderr[-3000:]
