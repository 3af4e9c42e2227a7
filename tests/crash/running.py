"""A job as a process, from its start to its end, whatever a test did to it: that of ``executors.py``, or another."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from kafka_words import size_of

JOB = Path(__file__).with_name("executors.py")
HANG_S = 1_800
"""Bound of a hang in a whole test; what a test waits for has no bound of its own while something changes."""


def progress_of(home: Path, process: "subprocess.Popen[bytes]") -> tuple[object, ...]:
    """How far a job is, for ``await_progress``: its log, its processes, its commits and what its tasks said."""
    with suppress(psutil.NoSuchProcess):
        below = frozenset(child.pid for child in psutil.Process(process.pid).children(recursive=True))
        folders = (home / "table" / "_delta_log", home / "checkpoint" / "offsets", home / "said")
        return size_of(home / "log"), below, *(len(list(folder.glob("*"))) for folder in folders)
    return ("ended",)


@contextmanager
def job(home: Path, **arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    """The job, until the block ends; its output is in ``home/log``."""
    with script(JOB, home, arguments) as process:
        yield process


@contextmanager
def script(
    path: Path, home: Path, arguments: Mapping[str, object], environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Any other one."""
    for folder in ("scratch", "said"):
        (home / folder).mkdir(exist_ok=True)  # the second of a home
    with (home / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, str(path)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={"PYSPARK_PYTHON": sys.executable, **os.environ, **(environment or {})},
        )
        assert process.stdin is not None
        with process.stdin as told:  # arguments are shown to everybody, and there may be a password
            told.write(json.dumps({**arguments, "home": str(home)}).encode())
        try:
            yield process
        finally:
            with suppress(psutil.NoSuchProcess):
                for each in (*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)):
                    with suppress(psutil.NoSuchProcess):
                        each.kill()
            process.wait(30)
