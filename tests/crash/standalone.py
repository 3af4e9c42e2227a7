"""A real Spark cluster on loopback: a master and workers from pyspark's scripts, with a Python without the package.
Executors get the package by ``--py-files``.
"""

import contextlib
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyspark
from kafka_helpers import await_progress, size_of

import spark_group_source
from spark_group_source.local.broker import free_ports

ELECTED, REGISTERED = "I have been elected leader", "Successfully registered with master"
"""What a master and a worker log when they are ready."""


class Standalone:
    """One master, and workers with one core each."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (self._port,) = free_ports(1)
        self.workers: list[subprocess.Popen[bytes]] = []
        self._master = self._spawn("master", "master.Master", "--host", "127.0.0.1", "--port", str(self._port))

    @property
    def url(self) -> str:
        return f"spark://127.0.0.1:{self._port}"

    def add_worker(self) -> None:
        number = len(self.workers)
        known = ("--host", "127.0.0.1", "--cores", "1", "--memory", "1g", "--work-dir", str(self.home / f"w{number}"))
        self.workers.append(self._spawn(f"worker{number}", "worker.Worker", *known, self.url))
        log = self.home / f"worker{number}.log"
        await_progress(lambda: REGISTERED in log.read_text(), self.progress, what="a worker")

    def progress(self) -> object:
        """Progress for ``await_progress``: the logs of master and workers."""
        return size_of(*self.home.glob("*.log"))

    def close(self) -> None:
        for process in (*self.workers, self._master):
            with contextlib.suppress(psutil.Error):
                for each in (*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
            process.wait(300)

    def _spawn(self, name: str, main: str, *arguments: str) -> subprocess.Popen[bytes]:
        command, environment = daemon(self.home, main, *arguments)
        with (self.home / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment, "SPARK_LOCAL_IP": "127.0.0.1"},
            )


def daemon(home: Path, main: str, *arguments: str, java: str = "") -> tuple[list[str], dict[str, str]]:
    """The command line and the environment of a master or worker that logs each step to its output.

    Args:
        home: a folder for its settings of the log.
        main: its class, in ``org.apache.spark.deploy``.
        java: more options of its JVM.
    """
    log4j = home / "log4j2.properties"
    log4j.write_text(
        "rootLogger.level=info\nrootLogger.appenderRef.out.ref=out\nappender.out.type=Console\n"
        "appender.out.name=out\nappender.out.layout.type=PatternLayout\nappender.out.layout.pattern=%p %m%n%ex\n"
    )
    script = Path(pyspark.__file__).parent / "bin" / "spark-class"
    options = f"{os.environ.get('SPARK_SUBMIT_OPTS', '')} -Dlog4j2.configurationFile={log4j} {java}"
    command = [str(script), f"org.apache.spark.deploy.{main}", "--webui-port", "0", *arguments]
    return command, {"SPARK_DAEMON_JAVA_OPTS": options}


@contextlib.contextmanager
def standalone(home: Path, workers: int) -> Iterator[Standalone]:
    home.mkdir()
    cluster = Standalone(home)
    try:
        log = home / "master.log"
        await_progress(lambda: ELECTED in log.read_text(), cluster.progress, what="the master")
        for _ in range(workers):
            cluster.add_worker()
        yield cluster
    finally:
        cluster.close()


def python_without_package(home: Path) -> Path:
    """A Python with the package's dependencies and without the package: it ignores ``.pth`` files."""
    script = home / "python"
    places = sysconfig.get_paths()["purelib"]
    base = Path(sys.executable).resolve()
    script.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{places}" exec {base} -S "$@"\n')
    script.chmod(0o755)
    return script


def package_as_zip(home: Path) -> Path:
    found = home / "package.zip"
    root = Path(spark_group_source.__file__).parent.parent
    with zipfile.ZipFile(found, "w") as archive:
        for package in ("spark_group_source", "pyspark_kafka_group"):
            for path in sorted((root / package).rglob("*.py")):
                archive.write(path, path.relative_to(root))
        for path in sorted((root / "conf").iterdir()):
            archive.write(path, Path("spark_group_source") / "conf" / path.name)
    return found
