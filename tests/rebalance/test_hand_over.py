"""G3, G5: a group goes from an ordinary application to the source and back without a pause (jobs/hand_over.py)."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from confluent_kafka.admin import AdminClient
from conftest import TopicFactory, await_until, committed_of
from typer.testing import CliRunner

from rebalance.accounts import Flow, Record, asking, assert_once, await_committed, measured, stays
from rebalance.conftest import Members, Options
from rebalance.foreign import KINDS
from rebalance.runs import RunProcess
from spark_group_source import GroupError, drain
from spark_group_source.broker import Broker
from spark_group_source.cli import app

ROOT = Path(__file__).parents[2]
JOB = ROOT / "jobs" / "hand_over.py"
PARTITIONS = 4
SPARK_S = 120
"""Bound of a Spark job's start and end, on a machine that is busy."""
GAP_S_MAX = 10.0
"""The longest time in which nobody processed anything; about a second on a machine that is not busy."""
LOOK_S = 0.02


@pytest.mark.parametrize("strategy", KINDS)
def test_G3_G5_a_group_is_handed_to_the_source_and_back_without_a_record_lost_or_doubled(
    strategy: str,
    broker: Broker,
    admin: AdminClient,
    topic: TopicFactory,
    options: Options,
    foreign: Members,
    group_id: str,
    tmp_path: Path,
) -> None:
    name = topic(PARTITIONS)
    run = RunProcess(options(name, strategy, leaveOnStop="always"), tmp_path / "run")
    with (
        foreign(name, strategy=strategy) as before,
        Flow(broker.bootstrap_servers, name, PARTITIONS) as flow,
        run,
    ):
        await_until(before.processed, what="the ordinary application")
        with gaps(lambda: sizes(before.file, run.file)) as longest:
            text = hand_over(broker, group_id, "spark-group", before.process.pid)
            assert f"has all {PARTITIONS} partitions" in text
            assert before.process.wait(30) == 0, "it left in order"
            at = len(run.records)
            await_until(lambda: len(run.records) > at + 100, what="records in the source alone")
        to_spark_s = max(longest)

        with foreign(name, strategy=strategy) as after, gaps(lambda: sizes(run.file, after.file)) as longest_back:
            text = hand_over(broker, group_id, "foreign", run.process.pid)
            assert f"has all {PARTITIONS} partitions" in text
            assert run.process.wait(60) == 0, run.output
            at = len(after.processed())
            await_until(lambda: len(after.processed()) > at + 100, what="records in the application alone")
            measured(f"{strategy}: longest gap {to_spark_s:.2f} s to the source, {max(longest_back):.2f} s back")
            assert max(to_spark_s, *longest_back) < GAP_S_MAX
            flow.stop()
            assert_once(admin, [name], [run], [before, after])
            await_committed(admin, group_id, [name])


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["range", "consumer"])
def test_G3_G5_a_group_is_handed_to_a_spark_job_and_back_without_a_record_lost_or_doubled(
    strategy: str,
    broker: Broker,
    admin: AdminClient,
    topic: TopicFactory,
    options: Options,
    foreign: Members,
    group_id: str,
    tmp_path: Path,
) -> None:
    """The job is asked to end in the middle of its batches: it drains, so that nothing of them is read again."""
    name = topic(PARTITIONS)

    def done() -> int:
        return sum(asking(lambda: committed_of(admin, group_id)).values())

    with (
        foreign(name, strategy=strategy) as before,
        Flow(broker.bootstrap_servers, name, PARTITIONS) as flow,
        SparkJob(options(name, strategy, leaveOnStop="always"), tmp_path) as job,
    ):
        await_until(before.processed, what="the ordinary application")
        with gaps(done) as longest:
            hand_over(broker, group_id, "spark-group", before.process.pid)
            assert before.process.wait(30) == 0, "it left in order"
            at = len(job.records)
            await_until(lambda: len(job.records) > at + 500, SPARK_S, what="records in the table")
        to_spark_s = max(longest)
        with foreign(name, strategy=strategy) as after, gaps(done) as longest_back:
            hand_over(broker, group_id, "foreign", job.process.pid)
            assert job.process.wait(SPARK_S) == 0, job.output
            at = len(after.processed())
            await_until(lambda: len(after.processed()) > at + 100, what="records in the application alone")
            measured(f"{strategy}: longest gap {to_spark_s:.2f} s to the job, {max(longest_back):.2f} s back")
            flow.stop()
            assert_once(admin, [name], [job], [before, after])
            await_committed(admin, group_id, [name])


@pytest.mark.parametrize("strategy", ["range", "consumer"])
def test_a_drained_run_can_be_killed_and_nothing_of_it_is_read_again(
    strategy: str,
    broker: Broker,
    admin: AdminClient,
    topic: TopicFactory,
    options: Options,
    foreign: Members,
    group_id: str,
    tmp_path: Path,
) -> None:
    name = topic(PARTITIONS)
    with (
        RunProcess(options(name, strategy, session_ms=2000), tmp_path / "run") as run,
        Flow(broker.bootstrap_servers, name, PARTITIONS) as flow,
    ):
        with pytest.raises(GroupError, match="no query of group 'nobody' runs on this host"):
            drain("nobody")
        await_until(lambda: len(run.records) > 100, what="records in the run")
        run.tell("hold")
        await_until(lambda: "batch in flight" in run.output, what="a batch in flight")
        with pytest.raises(GroupError, match=f"in process {run.process.pid} did not end its batch within 1 s"):
            drain(group_id, timeout_s=1)
        with pytest.raises(GroupError, match="no query"):
            drain(group_id, driver=os.getpid() + 1)
        run.tell("let_go")
        shown = CliRunner().invoke(app, ["drain", "--group", group_id])
        assert shown.exit_code == 0 and f"1 query of group {group_id} drained" in shown.output, shown.output
        read = len(run.records)
        assert sum(committed_of(admin, group_id).values()) == read
        stays(lambda: len(run.records) == read, 1.0, "the drained run")
        run.kill()
        with foreign(name, strategy=strategy) as after:
            await_until(after.processed, what="records in the application")
            flow.stop()
            assert_once(admin, [name], [run], [after])
            await_committed(admin, group_id, [name])


class SparkJob:
    """``jobs/group_to_delta.py`` as a child process, as users run it; a source of records for the account."""

    def __init__(self, options: Mapping[str, str], home: Path) -> None:
        self._table, self._log = home / "table", home / "job.log"
        own = {"kafka.bootstrap.servers": "--bootstrap-servers", "kafka.group.id": "--group", "subscribe": "--topics"}
        command = [sys.executable, str(ROOT / "jobs" / "group_to_delta.py"), "--trigger", "500 milliseconds"]
        command += ["--table", str(self._table), "--checkpoint", str(home / "checkpoint"), "--members", "2"]
        for key, value in options.items():
            command += [own[key], value] if key in own else ["--option", f"{key}={value}"]
        own_env = {"SPARK_CONF_DIR": str(ROOT / "conf"), "SPARK_LOCAL_DIRS": str(home), "PYTHONPATH": str(ROOT)}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, cwd=home, env=os.environ | own_env
            )

    def __enter__(self) -> "SparkJob":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(SPARK_S)

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]

    def check(self) -> None:
        assert self.process.poll() in (None, 0), self.output

    @property
    def records(self) -> list[Record]:
        """From the table's own files, which were only ever appended to."""
        commits = sorted((self._table / "_delta_log").glob("*.json"))
        actions = [json.loads(line) for commit in commits for line in commit.read_text().splitlines()]
        paths = [self._table / action["add"]["path"] for action in actions if "add" in action]
        columns = ["topic", "partition", "offset"]
        rows = [row for path in paths for row in pq.read_table(path, columns=columns).to_pylist()]
        return [(row["topic"], row["partition"], row["offset"]) for row in rows]


def hand_over(broker: Broker, group: str, to: str, stop: int) -> str:
    command = [sys.executable, str(JOB), "--bootstrap-servers", broker.bootstrap_servers, "--group", group]
    command += ["--to", to, "--stop", str(stop), "--wait-s", str(SPARK_S)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * SPARK_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def sizes(*files: Path) -> int:
    return sum(file.stat().st_size for file in files if file.exists())


@contextmanager
def gaps(done: Callable[[], int]) -> Iterator[list[float]]:
    """The times between two looks at which more was done."""
    found = [0.0]
    stop = threading.Event()

    def watch() -> None:
        last_s, last = time.monotonic(), done()
        while not stop.wait(LOOK_S):
            now = done()
            if now != last:
                found.append(time.monotonic() - last_s)
                last_s, last = time.monotonic(), now

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join(10)
