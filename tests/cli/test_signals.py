"""Signals to ``spark-group``. By Ctrl-C, by ``timeout`` and at a container's end, its whole process group gets one:
Python, the JVM and the source's processes at the same time.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil
import pyarrow as pa
import pytest
from delta_files import living_rows
from deltalake import write_deltalake
from kafka_helpers import await_until
from quick_spark import submit
from scenes import Scene
from streams import numbered

from spark_group_source.cli.common import interrupts_deferred
from spark_group_source.cli.run import STOPPED

ROOT = Path(__file__).resolve().parents[2]
RUN = [sys.executable, "-m", "spark_group_source", "run"]
JOB = str(ROOT / "jobs" / "group_to_delta.py")
LAUNCHER = "org.apache.spark.launcher.Main"
"""The class with which ``spark-submit`` works out its command line, in a JVM of its own that ends at once."""
END_S = 600
"""The longest wait for the end of the processes."""


@contextlib.contextmanager
def processes(command: list[str], output: IO[str], env: dict[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    """A command in a process group of its own, which is killed at the end."""
    started = subprocess.Popen(command, stdout=output, stderr=output, env=env, start_new_session=True)
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait(END_S)


def is_spark(process: psutil.Process) -> bool:
    try:
        return process.name() == "java" and LAUNCHER not in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def test_ctrl_c_waits_until_a_jvm_has_started_and_a_second_one_does_not() -> None:
    former, reached = signal.getsignal(signal.SIGINT), []

    def start(interrupts: int) -> None:
        with interrupts_deferred():
            for _ in range(interrupts):
                signal.raise_signal(signal.SIGINT)
            reached.append(interrupts)

    for interrupts in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            start(interrupts)
    assert reached == [1]
    assert signal.getsignal(signal.SIGINT) is former
    try:
        with interrupts_deferred():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "as pyspark installs its own"
    finally:
        signal.signal(signal.SIGINT, former)


@pytest.mark.spark
@pytest.mark.parametrize("command", ["ledger verify", "run"])
def test_ctrl_c_while_spark_starts_leaves_no_jvm(command: str, tmp_path: Path, scene: Scene) -> None:
    table, output = str(tmp_path / "table"), tmp_path / "output"
    start = [*RUN[:-1], *command.split()]
    if command == "run":
        start += ["--bootstrap-servers", scene.servers, "--group", scene.group, "--topics", scene.topic(1)]
        start += ["--table", table, "--checkpoint", str(tmp_path / "checkpoint")]
    else:
        write_deltalake(table, pa.table({"value": ["a"]}))
        start += [table]
    env = os.environ | {"SPARK_LOCAL_DIRS": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with output.open("w") as file, processes(start, file, env) as job:
        jvms: list[psutil.Process] = []

        def has_jvm() -> bool:
            jvms[:] = [p for p in psutil.Process(job.pid).children(recursive=True) if is_spark(p)]
            return bool(jvms) or job.poll() is not None

        await_until(has_jvm, what="Spark's JVM")
        assert jvms, output.read_text()
        job.send_signal(signal.SIGINT)
        try:
            assert job.wait(END_S) == 130, output.read_text()
            await_until(lambda: not any(p.is_running() for p in jvms), what="the JVM's end")
        finally:
            for jvm in jvms:
                with contextlib.suppress(psutil.NoSuchProcess):
                    jvm.kill()


@pytest.mark.spark
@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "submitted"), [(signal.SIGTERM, False), (signal.SIGINT, False), (signal.SIGTERM, True)]
)
def test_signal_to_the_process_group_ends_the_job_without_an_error(
    number: signal.Signals, submitted: bool, scene: Scene, tmp_path: Path
) -> None:
    name, table = scene.topic(2), tmp_path / "table"
    scene.produce(name, numbered(0, 99, 2))
    start = submit("--master", "local[2]", JOB) if submitted else RUN
    command = [*start, "--bootstrap-servers", scene.servers]
    command += ["--group", scene.group, "--topics", name, "--table", str(table), "--trigger", "1 second"]
    command += ["--checkpoint", str(tmp_path / "checkpoint")]
    env = os.environ | {
        "SPARK_CONF_DIR": str(ROOT / "conf"), "SPARK_LOCAL_DIRS": str(tmp_path), "PYTHONPATH": str(ROOT)
    }  # fmt: skip
    output = tmp_path / "output"
    with output.open("w") as file, processes(command, file, env) as job:
        await_until(
            lambda: job.poll() is not None or ((table / "_delta_log").exists() and len(living_rows(table)) == 100),
            what="the rows",
        )
        assert job.poll() is None, output.read_text()
        before = len(output.read_text())
        os.killpg(job.pid, number)
        code = job.wait(END_S)
    printed = output.read_text()[before:]
    # A traceback that Spark logs of the stream reader has its files.
    lines = [line for line in printed.splitlines() if not line.lstrip().startswith("File ")]
    ours = [line for line in lines if "spark_group_source.cli.run" in line and "records in" not in line]
    first, *more = ours or [""]  # a JVM that ends may end the job before its line
    assert f"group {scene.group}: received a signal" in first or submitted, printed
    assert [line.partition("cli.run: ")[2] for line in more] == ([] if submitted else [STOPPED]), printed
    assert "Py4J" not in printed, printed
    if not submitted:  # else the signal ends the JVM, too, which has its own exit code and logs what is interrupted
        assert code == 0 and "Traceback" not in printed and "Exception" not in printed, printed
        assert list(scene.committed().values()) == [50, 50], "the last batch is finished and committed"
