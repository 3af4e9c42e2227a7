"""The package as it is published: the wheel, the sdist, their metadata, and what they need to be installed."""

import ast
import email
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import spark_group_source
from spark_group_source import librdkafka
from spark_group_source.reader import records

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILD_S = 300
PACKAGES = ("spark_group_source", "pyspark_kafka_group")
PLATFORMS_OWN = {"numpy", "pyarrow"}
"""Dependencies that Spark's platforms bring; a newer version than any tested one stays."""


def run(*words: str, cwd: Path = ROOT, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=BUILD_S, check=False,
    )  # fmt: skip


def sources() -> list[Path]:
    return [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]


def imported() -> set[str]:
    """Top-level modules of other packages that the package imports, with those in functions."""
    found: set[str] = set()
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - set(PACKAGES)


def test_exactly_what_is_imported_is_declared() -> None:
    declared = {Requirement(line).name.replace("-", "_") for line in PROJECT["dependencies"]}
    assert imported() - {"pyspark"} == declared


def test_dependencies_of_spark_platforms_have_no_upper_limit() -> None:
    wanted = [one for one in map(Requirement, PROJECT["dependencies"]) if one.name in PLATFORMS_OWN]
    assert len(wanted) == len(PLATFORMS_OWN)
    assert all(one.specifier.contains("9999") for one in wanted)


def test_messages_name_the_declared_versions() -> None:
    assert librdkafka.PACKAGE in PROJECT["dependencies"]
    assert records.PYARROW in PROJECT["dependencies"]


def test_the_changelog_has_the_version_and_a_date_for_each_release() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    newest, *released = headings
    assert newest.startswith(f"{spark_group_source.__version__} (")
    assert re.fullmatch(r"[\d.]+ \((?:unreleased|\d{4}-\d{2}-\d{2})\)", newest)
    assert all(re.fullmatch(r"[\d.]+ \(\d{4}-\d{2}-\d{2}\)", heading) for heading in released)


# --- built once, without downloads -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    ended = run("-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def sdist(built: Path) -> Path:
    return next(built.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


@pytest.mark.slow
def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    own = {name for name in names if ".dist-info/" not in name and not name.startswith("spark_group_source/conf/")}
    assert own == {str(path.relative_to(ROOT)) for path in sources()} | {"spark_group_source/py.typed"}
    files = {path.name for path in (ROOT / "conf").iterdir() if path.is_file()}
    assert {Path(name).name for name in names if name.startswith("spark_group_source/conf/")} == files
    assert [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]


@pytest.mark.slow
def test_the_sdist_has_what_building_and_testing_need(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", ".ci/setup"} <= names
    assert {"tests/test_package.py", "docs/index.md", "conf/site/conf.py", "jobs/demo.py"} <= names
    assert {str(path.relative_to(ROOT)) for path in sources()} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", ".stamps", "build"))]


@pytest.mark.slow
def test_twine_accepts_the_wheel_and_the_sdist(wheel: Path, sdist: Path) -> None:
    checked = run("-m", "twine", "check", "--strict", str(wheel), str(sdist))
    assert checked.returncode == 0, checked.stdout


@pytest.mark.slow
def test_the_metadata_has_no_address_that_does_not_exist(metadata: Message) -> None:
    assert metadata["Name"] == "spark-group-source" and metadata["Version"] == spark_group_source.__version__
    assert metadata["Author"] and metadata["License-Expression"] == "Apache-2.0"
    assert [line for line in metadata.get_all("Classifier", []) if line.startswith("Development Status :: ")]
    assert (metadata["Project-URL"], metadata["Home-page"]) == (None, None)


@pytest.mark.slow
def test_the_readme_of_an_index_has_no_relative_links_and_no_pictures(metadata: Message) -> None:
    text = str(metadata.get_payload())
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "spark-group-source" in text and "A batch and a rebalance: a revocation is held" in text
    assert [target for target in re.findall(r"\]\(([^)]*)\)", text) if not target.startswith("https://")] == []
    assert "![" not in text and "<img" not in text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_an_installed_package_imports_and_has_its_command(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    place = tmp_path / "site"
    how = ("--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
    installed = run("-m", "pip", "install", *how, "--target", str(place), str(request.getfixturevalue(kind)))
    assert installed.returncode == 0, installed.stderr
    code = (
        "import spark_group_source, spark_group_source.local.conf as conf, pyspark_kafka_group; "
        "print(spark_group_source.__file__, pyspark_kafka_group.DefaultSource.name(), "
        "conf.conf_path('alerts.yml').parent)"
    )
    shown = run("-c", code, cwd=tmp_path, PYTHONPATH=str(place))
    package = place / "spark_group_source"
    assert shown.stdout.split() == [str(package / "__init__.py"), "kafka-group", str(package / "conf")], shown.stderr
    version = subprocess.run(
        [place / "bin" / "spark-group", "--version"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(place)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert version.stdout == f"spark-group {spark_group_source.__version__}\n", version.stderr
