"""A job as a process: ``executors.py``, or another script."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from kafka_helpers import size_of

JOB = Path(__file__).with_name("executors.py")
HANG_S = 1_800
"""Bound of a hang of a whole test; single waits have no bound while there is progress."""


def progress_of(home: Path, process: "subprocess.Popen[bytes]") -> tuple[object, ...]:
    """Progress of a job for ``await_progress``: its log, its processes, its commits and its tasks' reports."""
    with suppress(psutil.NoSuchProcess):
        below = frozenset(child.pid for child in psutil.Process(process.pid).children(recursive=True))
        folders = (home / "table" / "_delta_log", home / "checkpoint" / "offsets", home / "reports")
        return size_of(home / "log"), below, *(len(list(folder.glob("*"))) for folder in folders)
    return ("ended",)


@contextmanager
def job(home: Path, **arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run the job until the block ends; its output is in ``home/log``."""
    with script(JOB, home, arguments) as process:
        yield process


@contextmanager
def script(
    path: Path, home: Path, arguments: Mapping[str, object], environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run another script in the same way."""
    for folder in ("scratch", "reports"):
        (home / folder).mkdir(exist_ok=True)  # the second job of a home
    with (home / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, str(path)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={"PYSPARK_PYTHON": sys.executable, **os.environ, **(environment or {})},
        )
        assert process.stdin is not None
        with process.stdin as stdin:  # command lines are visible to all users, and there may be a password
            stdin.write(json.dumps({**arguments, "home": str(home)}).encode())
        try:
            yield process
        finally:
            with suppress(psutil.NoSuchProcess):
                for each in (*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)):
                    with suppress(psutil.NoSuchProcess):
                        each.kill()
            process.wait(300)
