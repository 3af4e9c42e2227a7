"""The package on a cluster that gets it by ``--archives``, and in an environment with its own Spark."""

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from delta_files import living_rows
from quick_spark import submit

from crash.standalone import package_as_zip, python_without_package, standalone
from spark_group_source import compatibility
from spark_group_source.local.broker import Broker

ROOT = Path(__file__).resolve().parent.parent.parent
JOB_S = 300
PIP_S = 900
RECORDS = 20

pytestmark = [pytest.mark.crash, pytest.mark.spark, pytest.mark.full]


@pytest.fixture
def arguments(broker: Broker, topic: Any, group_id: str, produce: Any, tmp_path: Path) -> list[str]:
    """The arguments of the job, for a topic with records."""
    name = topic(2)
    produce(name, [str(n) for n in range(RECORDS)])
    given = ["--bootstrap-servers", broker.bootstrap_servers, "--group", group_id, "--topics", name]
    return [*given, "--table", str(tmp_path / "table"), "--checkpoint", str(tmp_path / "checkpoint")]


def run(command: list[str], home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    java = f'--conf "spark.driver.extraJavaOptions=-Djava.io.tmpdir={home}" pyspark-shell'
    own = {"SPARK_LOCAL_DIRS": str(home), "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_SUBMIT_ARGS": java}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=JOB_S, cwd=home, env=os.environ | own | env, check=False
    )


def python_with_package_on_the_driver(home: Path) -> Path:
    """A Python with the package on the driver's host only."""
    bare = python_without_package(home)
    script = home / "python-of-the-hosts"
    script.write_text(f'#!/bin/sh\n[ "$SPARK_EXECUTOR_DIRS" ] || PYTHONPATH="$PYTHONPATH:{ROOT}"\n. {bare}\n')
    script.chmod(0o755)
    return script


@pytest.mark.soak
@pytest.mark.timeout(4 * JOB_S)
def test_a_cluster_runs_the_job_with_archives_and_without_them_the_error_names_the_missing_package(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    words = submit("--conf", "spark.executor.memory=512m", "--conf", "spark.driver.host=127.0.0.1")
    here = {"PYSPARK_PYTHON": str(python_with_package_on_the_driver(tmp_path)), "SPARK_CONF_DIR": str(ROOT / "conf")}
    archive = package_as_zip(tmp_path)
    with standalone(tmp_path / "cluster", workers=1) as cluster:
        words += ["--master", cluster.url]
        job = [str(ROOT / "jobs" / "group_to_delta.py"), *arguments]

        without = run([*words, *job], tmp_path, **here)

        assert without.returncode == 1, without.stderr
        errors = [line for line in without.stdout.splitlines() if " ERROR spark_group_source.cli.run: " in line]
        assert len(errors) == 1, without.stdout  # spark-submit copies the job's stderr to its stdout
        assert "has no package spark_group_source. Install spark-group-source on every executor" in errors[0]
        assert living_rows(tmp_path / "table") == []

        sent = ["--archives", f"{archive}#ours", "--conf", "spark.executorEnv.PYTHONPATH=ours"]
        ended = run([*words, *sent, *job], tmp_path, **here)

    assert ended.returncode == 0, ended.stderr
    assert len(living_rows(tmp_path / "table")) == RECORDS


@pytest.mark.soak
def test_installing_the_package_changes_no_file_of_spark(arguments: list[str], tmp_path: Path) -> None:
    def pip(*arguments: str) -> str:
        command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=PIP_S, check=True).stdout

    def spark() -> dict[str, str]:
        """The hash of every file of Spark, without Python's caches."""
        places = [path for path in site.iterdir() if re.fullmatch(r"(pyspark|py4j)(-.*)?", path.name)]
        files = [path for place in places for path in place.rglob("*") if path.is_file() and path.suffix != ".pyc"]
        return {str(path.relative_to(site)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], timeout=PIP_S, check=True)
    python = tmp_path / "env" / "bin" / "python"
    (site,) = (tmp_path / "env" / "lib").glob("python3*/site-packages")
    pip("install", f"pyspark=={compatibility.SPARK}.0")
    before = spark()
    assert len(before) > 1000

    pip("wheel", "--no-deps", "-w", str(tmp_path / "dist"), str(ROOT))
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert "spark_group_source/conf/log4j2.properties" in zipfile.ZipFile(wheel).namelist()
    pip("install", str(wheel))
    assert spark() == before

    command = [str(python.with_name("spark-group")), "run", *arguments]
    environment = {"SPARK_CONF_DIR": str(ROOT / "conf"), "PYSPARK_PYTHON": str(python), "PYTHONPATH": ""}
    environment["SPARK_HOME"] = str(site / "pyspark")
    ended = run(command, tmp_path, **environment)
    assert ended.returncode == 0, ended.stderr
    assert len(living_rows(tmp_path / "table")) == RECORDS
    assert spark() == before

    pip("uninstall", "--yes", "spark-group-source")
    assert spark() == before
    assert not list(site.glob("spark_group*")) and not list(site.glob("pyspark_kafka_group*"))
