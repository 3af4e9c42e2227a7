"""G3, G5: a group goes from an ordinary application to the source and back without a pause (jobs/hand_over.py)."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
from confluent_kafka.admin import AdminClient
from conftest import TopicFactory, await_until, committed_of
from typer.testing import CliRunner

from rebalance.accounts import (
    ANSWER_S,
    Flow,
    Record,
    Recorded,
    asking,
    assert_once,
    await_committed,
    measured,
    records_in,
    stays,
)
from rebalance.conftest import Members, Options
from rebalance.ordinary import KINDS, OrdinaryConsumer
from rebalance.runs import RunProcess
from spark_group_source import GroupError, drain
from spark_group_source.cli.app import app
from spark_group_source.local.broker import Broker

ROOT = Path(__file__).parents[2]
JOB = ROOT / "jobs" / "hand_over.py"
PARTITIONS = 4
SPARK_S = 120
"""Bound of a Spark job's start and end, on a machine that is busy."""
LOOK_S = 0.02


class Party(Recorded, Protocol):
    """A run or a job of ours, in a process of its own."""

    process: subprocess.Popen[Any]

    @property
    def output(self) -> str: ...


@dataclass(frozen=True)
class Scene:
    """A topic with records in flow and the members of one group that read it."""

    broker: Broker
    admin: AdminClient
    group: str
    topic: str
    ordinary: Callable[[], OrdinaryConsumer]

    def there_and_back(self, ours: AbstractContextManager[Party]) -> None:
        """An application begins, ours takes over, an application takes over again; each record has one reader."""
        flowing = Flow(self.broker.bootstrap_servers, self.topic, PARTITIONS)
        with self.ordinary() as before, flowing as flow, ours as run:
            await_until(before.processed, what="the ordinary application")
            with self.gaps() as there:
                self.hand_over("spark-group", before.process)
                at = len(run.records)
                await_until(lambda: len(run.records) > at + 100, SPARK_S, what="records at ours alone")
            with self.ordinary() as after, self.gaps() as back:
                self.hand_over("ordinary", run.process)
                at = len(after.processed())
                await_until(lambda: len(after.processed()) > at + 100, what="records in the application alone")
                flow.stop()
                measured(f"longest gap {max(there):.2f} s to ours, {max(back):.2f} s back")
                assert_once(self.admin, [self.topic], [run], [before, after])
                await_committed(self.admin, self.group, [self.topic])

    def hand_over(self, to: str, stop: "subprocess.Popen[Any]") -> None:
        command = [sys.executable, str(JOB), "--bootstrap-servers", self.broker.bootstrap_servers, "--to", to]
        command += ["--group", self.group, "--stop", str(stop.pid), "--wait-s", str(SPARK_S)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * SPARK_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"has all {PARTITIONS} partitions" in done.stdout
        assert stop.wait(SPARK_S) == 0, "it did not end in order"

    @contextmanager
    def gaps(self) -> Iterator[list[float]]:
        """The times between two looks at which the group had committed more."""
        found = [0.0]
        stop = threading.Event()

        def done() -> int:
            return sum(asking(lambda: committed_of(self.admin, self.group)).values())

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
            thread.join(ANSWER_S)


Scenes = Callable[[str], Scene]


@pytest.fixture
def scene(broker: Broker, admin: AdminClient, topic: TopicFactory, ordinary: Members, group_id: str) -> Scenes:
    """``scene(strategy)``, with a topic of its own."""

    def make(strategy: str) -> Scene:
        name = topic(PARTITIONS)
        return Scene(broker, admin, group_id, name, lambda: ordinary(name, strategy=strategy))

    return make


@pytest.mark.parametrize("strategy", KINDS)
def test_G3_G5_a_group_is_handed_to_the_source_and_back_without_a_record_lost_or_doubled(
    strategy: str, scene: Scenes, options: Options, tmp_path: Path
) -> None:
    played = scene(strategy)
    played.there_and_back(RunProcess(options(played.topic, strategy, leaveOnStop="always"), tmp_path / "run"))


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["range", "consumer"])
def test_G3_G5_a_group_is_handed_to_a_spark_job_and_back_without_a_record_lost_or_doubled(
    strategy: str, scene: Scenes, options: Options, tmp_path: Path
) -> None:
    """The job is asked to end in the middle of its batches: it drains, so that nothing of them is read again."""
    played = scene(strategy)
    played.there_and_back(SparkJob(options(played.topic, strategy, leaveOnStop="always"), tmp_path))


@pytest.mark.parametrize("strategy", ["range", "consumer"])
def test_a_drained_run_can_be_killed_and_nothing_of_it_is_read_again(
    strategy: str,
    broker: Broker,
    admin: AdminClient,
    topic: TopicFactory,
    options: Options,
    ordinary: Members,
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
        with ordinary(name, strategy=strategy) as after:
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

    @property
    def records(self) -> list[Record]:
        return records_in(self._table)
