"""A group is handed from an ordinary application to the source and back (jobs/hand_over.py; G3, G5)."""

import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import pytest
import typer
from confluent_kafka import KafkaError, KafkaException
from kafka_helpers import await_progress, await_until
from typer.testing import CliRunner

from rebalance.accounts import (
    Flow,
    Record,
    Recorded,
    records_in,
    stays,
)
from rebalance.conftest import GroupScene
from rebalance.runs import RunProcess
from spark_group_source import GroupError, drain
from spark_group_source.cli.app import app

ROOT = Path(__file__).parents[2]
JOB = ROOT / "jobs" / "hand_over.py"
PARTITIONS = 4
SPARK_S = 600
"""The timeout of a Spark job's start and end on a busy machine."""


class Party(Recorded, Protocol):
    """A run or a job, in its own process."""

    process: subprocess.Popen[Any]

    @property
    def output(self) -> str: ...


class HandOver(GroupScene):
    """A group that is handed between applications while records are produced."""

    shown: Callable[[], str]
    """Returns the output of the source's application, for errors."""

    def there_and_back(self, topic: str, strategy: str, ours: AbstractContextManager[Party]) -> None:
        """An application starts, the source takes over, an application takes over again; each record has one reader."""
        flowing = Flow(self.servers, topic, PARTITIONS)
        with self.ordinary(topic, strategy=strategy) as before, flowing as flow, ours as run:
            self.shown = lambda: run.output
            await_progress(before.processed, before.progress, what="the ordinary application")
            self.hand_over("spark-group", before.process, run.process)
            at = len(run.records)
            await_progress(
                lambda: len(run.records) > at + 100,
                lambda: (len(run.output), len(run.records)),
                what="records at ours alone",
            )
            with self.ordinary(topic, strategy=strategy) as after:
                self.hand_over("ordinary", run.process, after.process)
                at = len(after.processed())
                await_progress(
                    lambda: len(after.processed()) > at + 100, after.progress, what="records in the application alone"
                )
                flow.stop()
                self.assert_once([topic], [run], [before, after])
                self.await_committed(topic)

    def hand_over(self, to: str, stop: "subprocess.Popen[Any]", newcomer: "subprocess.Popen[Any]") -> None:
        command = [sys.executable, str(JOB), "--bootstrap-servers", self.servers, "--to", to]
        command += ["--group", self.group, "--stop", str(stop.pid), "--wait-s", str(SPARK_S)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
            try:
                ended = [job, newcomer]
                await_until(lambda: any(each.poll() is not None for each in ended), 2 * SPARK_S, what="the hand-over")
                assert newcomer.poll() is None, f"the new application ended\n{self.shown()}"
            finally:
                job.kill()
            assert job.stdout is not None
            output = job.stdout.read()
        assert job.returncode == 0, f"{output}\n{self.shown()}"
        assert f"has all {PARTITIONS} partitions" in output
        assert stop.wait(SPARK_S) == 0, "it did not end in order"


@pytest.fixture
def scene(jvm: None, request: pytest.FixtureRequest, group_id: str) -> HandOver:
    return HandOver(request, group_id)


def test_G3_G5_a_group_is_handed_to_the_source_and_back_without_loss_or_duplicates(scene: HandOver) -> None:
    """With the consumer protocol the Spark job below."""
    name = scene.topic(PARTITIONS)
    options = scene.run_options(name, leaveOnStop="always")
    scene.there_and_back(name, "range", RunProcess(options, scene.folder / "run"))


@pytest.mark.proves("G5", level="spark")
@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("strategy", [pytest.param("range", marks=pytest.mark.soak), "consumer"])
def test_G3_G5_a_group_is_handed_to_a_spark_job_and_back_without_loss_or_duplicates(
    strategy: str, scene: HandOver
) -> None:
    """The job is stopped in the middle of its batches: it drains, so that none of them is read again."""
    name = scene.topic(PARTITIONS)
    options = scene.run_options(name, strategy, session_ms=6000, leaveOnStop="always")
    scene.there_and_back(name, strategy, SparkJob(options, scene.folder))


def test_a_drained_run_can_be_killed_without_duplicates(scene: HandOver) -> None:
    name = scene.topic(PARTITIONS)
    with (
        RunProcess(scene.run_options(name, session_ms=6000), scene.folder / "run") as run,
        Flow(scene.servers, name, PARTITIONS) as flow,
    ):
        with pytest.raises(GroupError, match="no query of group 'nobody' runs on this host"):
            drain("nobody")
        await_progress(lambda: len(run.records) > 100, run.progress, what="records in the run")
        run.send("hold")
        run.await_in_flight()
        with pytest.raises(GroupError, match=f"in process {run.process.pid} did not finish its batch within 1 s"):
            drain(scene.group, timeout_s=1)
        with pytest.raises(GroupError, match="no query"):
            drain(scene.group, driver=os.getpid() + 1)
        run.send("let_go")
        shown = CliRunner().invoke(app, ["drain", "--group", scene.group, "--timeout-s", str(SPARK_S)])
        stop = f"1 query of group {scene.group} drained; stop now: the driver JVM is process {os.getpid()}"
        assert (shown.exit_code, shown.output.strip()) == (0, stop), shown.output
        assert "a drain was requested; the run plans no more batches" in run.output
        read = len(run.records)
        assert sum(scene.committed().values()) == read
        stays(lambda: len(run.records) == read, 1.0, "the drained run")
        run.kill()
        with scene.ordinary(name) as after:
            await_progress(after.processed, after.progress, what="records in the application")
            flow.stop()
            scene.assert_once([name], [run], [after])
            scene.await_committed(name)


class SparkJob:
    """``jobs/group_to_delta.py`` as a child process, as users run it; a source of records for the account."""

    def __init__(self, options: Mapping[str, str], home: Path) -> None:
        self._table, self._log = home / "table", home / "job.log"
        own = {"kafka.bootstrap.servers": "--bootstrap-servers", "kafka.group.id": "--group", "subscribe": "--topics"}
        command = [sys.executable, str(ROOT / "jobs" / "group_to_delta.py"), "--trigger", "500 milliseconds"]
        command += ["--table", str(self._table), "--checkpoint", str(home / "checkpoint"), "--option", "groupMembers=2"]
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


@pytest.mark.parametrize(
    ("config", "stop", "message"),
    [
        ("security.protocol=none", os.getpid(), "security.protocol"),
        ("session.timeout.ms=400000", os.getpid(), "max.poll.interval.ms"),
        ("", 2**22 + 1, "--stop 4194305: No such process"),
        ("", -1, "--stop"),
    ],
    ids=["a setting", "settings of a consumer", "a process", "all processes of the user"],
)
def test_a_hand_over_that_cannot_work_is_refused_before_it_waits(
    config: str, stop: int, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "client"
    file.write_text(f"# settings of the client\n{config}\n")
    command = [sys.executable, str(JOB), "--bootstrap-servers", "localhost:1", "--group", "etl", "--to", "spark-group"]
    command += ["--command-config", str(file), "--stop", str(stop)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "200"})
    assert ended.returncode == 2 and message in ended.stderr


@pytest.fixture
def job() -> dict[str, Any]:
    """The names of the program's module."""
    return runpy.run_path(str(JOB), run_name="hand_over")


def test_tracebacks_of_a_hand_over_show_no_values(job: dict[str, Any]) -> None:
    """The settings have passwords, and releases of typer before 0.24 show variables by default."""
    assert job["app"].pretty_exceptions_show_locals is False


def test_a_new_application_that_has_lost_its_partitions_has_not_taken_over(job: dict[str, Any]) -> None:
    """It ended before its first commit. Otherwise the only reader would be stopped."""
    assert not job["Offsets"]({"bootstrap.servers": "127.0.0.1:1"}, "etl").moved(())


def test_a_process_that_ended_during_the_waits_is_not_stopped(job: dict[str, Any]) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        old = job["Process"](other.pid)
        assert other.stdin is not None
        other.stdin.close()
        other.wait(SPARK_S)
    assert not old.terminate()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert job["Process"](other.pid).terminate()
        assert other.wait(SPARK_S) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KafkaException(KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED)), "the last request failed: .*authoriz"),
        (TimeoutError(), "the last request was not answered within 10 s"),
    ],
)
def test_a_hand_over_that_waits_in_vain_prints_the_last_error(
    error: Exception, text: str, job: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    answer = Future[Any]()
    answer.set_exception(error)
    admin = SimpleNamespace(describe_consumer_groups=lambda groups, **_: dict.fromkeys(groups, answer))
    with pytest.raises(typer.Exit):
        job["_wait"](admin, "etl", "spark-group", bool, -1.0, "partitions")
    assert re.search(f"the group: unknown; {text}", capsys.readouterr().err)
