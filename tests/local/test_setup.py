"""Setup of a checkout: the Makefile and .ci/setup report missing requirements in one line before they start."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
RUN_S = 600
"""Bound of one run; making an empty venv is the longest part."""

UTILITIES = ("bash", "make", "dirname", "mkdir", "rm", "mktemp", "timeout", "grep", "tail", "sed", "touch", "find")
"""System programs that the scripts use. Nothing else is in PATH, so neither Python nor Java."""


class Run:
    """A checkout of the build files, and a PATH that contains only programs of the test."""

    def __init__(self, home: Path) -> None:
        self.checkout, self.bin, self.tmp = home / "checkout", home / "bin", home / "tmp"
        for directory in (self.checkout, self.bin, self.tmp):
            directory.mkdir()
        for name in ("Makefile", "pyproject.toml", ".ci"):
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, self.checkout / name)
        for name in UTILITIES:
            found = shutil.which(name)
            if found:
                (self.bin / name).symlink_to(found)
        self.env = {"PATH": str(self.bin), "HOME": str(home), "TMPDIR": str(self.tmp)}

    def has(self, name: str, *, prints: str, code: int = 0) -> Path:
        """Create a program that prints one line and exits."""
        program = self.bin / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\necho '{prints}' >&{2 if name.endswith('java') else 1}\nexit {code}\n")
        program.chmod(0o755)
        return program

    def has_python(self, version: str = "3.11", name: str = "python3") -> None:
        self.has(name, prints=version)

    def has_java(self, version: str = "17.0.15") -> None:
        self.has("java", prints=f'openjdk version "{version}"')

    def run(self, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.checkout,
            env=self.env | env,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )

    def refuses(self, *command: str, **env: str) -> str:
        """Run a command that must fail; returns its error line without the prefix."""
        run = self.run(*command, **env)
        assert run.returncode != 0, run.stdout
        # make adds a line of its own that names the target
        lines = [line for line in run.stderr.splitlines() if not line.startswith("make")]
        assert len(lines) == 1 and lines[0].startswith("error: "), run.stdout + run.stderr
        return lines[0].removeprefix("error: ")


@pytest.fixture
def machine(tmp_path: Path) -> Run:
    return Run(tmp_path)


NO_JAVA = "Java 17 or newer is needed, and there is none in PATH; install a JDK, or set JAVA_HOME"


@pytest.mark.parametrize("target", ["demo", "test"])
def test_every_target_checks_java_first(machine: Run, target: str) -> None:
    machine.has_python()
    assert machine.refuses("make", target) == NO_JAVA
    assert not (machine.checkout / ".venv").exists()
    (machine.checkout / ".stamps").mkdir()
    (machine.checkout / ".stamps" / "venv").touch()  # newer than pyproject.toml: nothing to set up
    assert machine.refuses("make", target) == NO_JAVA


@pytest.mark.parametrize(("version", "number"), [("1.8.0_412", 8), ("16-ea", 16)])
def test_old_java_is_reported_with_version(machine: Run, version: str, number: int) -> None:
    machine.has_python()
    machine.has_java(version)
    error = machine.refuses("make", "test")
    assert error == f"Java 17 or newer is needed; found Java {number} ({machine.bin / 'java'})"
    assert f"found Java {number}" in machine.refuses(".ci/run")
    assert list(machine.tmp.iterdir()) == []


def test_java_home_wins_and_broken_java_is_refused(machine: Run) -> None:
    machine.has_python()
    machine.has_java("17")
    assert "JAVA_HOME (/nowhere) has no bin/java" in machine.refuses("make", "test", JAVA_HOME="/nowhere")
    machine.has("jdk/bin/java", prints='openjdk version "11"')
    assert "found Java 11" in machine.refuses("make", "test", JAVA_HOME=str(machine.bin / "jdk"))
    machine.has("java", prints="The operation couldn’t be completed. Unable to locate a Java Environment.", code=1)
    assert "does not run; install a JDK" in machine.refuses("make", "test")


def test_missing_and_old_python_have_separate_errors(machine: Run) -> None:
    machine.has_java()
    error = machine.refuses("make", "test")
    assert error == "Python 3.11 or newer is needed; install it, or name one: make PYTHON=/path/to/python3"
    machine.has_python("3.9")
    assert f"needed; found only Python 3.9 ({machine.bin / 'python3'})" in machine.refuses("make", "test")
    machine.has_python("3.12", name="python3.12")
    assert machine.run("make", "tools").returncode == 0
    machine.has_python("3.10", name="mine")
    assert "found only Python 3.10" in machine.refuses("make", "tools", "PYTHON=mine")


@pytest.mark.parametrize("version", ["3.11", "3.14"])
def test_supported_versions_pass(machine: Run, version: str) -> None:
    machine.has_java("21.0.1")
    machine.has_python(version)
    run = machine.run("make", "tools")
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


@pytest.mark.slow
@pytest.mark.full
def test_unreachable_package_registry_is_reported_in_one_line(machine: Run) -> None:
    machine.has_java()
    (machine.bin / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (machine.bin / "python3").chmod(0o755)
    # nothing listens on the discard port; no local package registry may be used either
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1"}
    nowhere["PIP_RETRIES"] = "1"  # of the pip that pip starts, which would retry for a quarter of a minute
    error = machine.refuses("make", "test", **nowhere)
    assert error.startswith("no Python package registry can be reached; check the network or pip's index-url")
    assert not (machine.checkout / ".stamps" / "venv").exists(), "the next run must try again"


def test_all_files_require_the_same_versions() -> None:
    from spark_group_source import compatibility
    from spark_group_source.local import jars

    setup = (ROOT / ".ci" / "setup").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    assert f"JAVA_MIN={jars.JAVA_MIN} " in setup
    assert 'requires-python = ">=3.11"' in project and "PYTHON_MIN=11 " in setup
    # a jar of another release than the Python side of it fails only at run time, and not clearly
    assert f'"delta-spark=={compatibility.DELTA}.0"' in project
    assert f'"pyspark[sql]=={compatibility.SPARK}.0"' in project
