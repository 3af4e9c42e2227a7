"""What is refused because it does not fit, in one line; and what an executor says that lacks something."""

import importlib.metadata
import importlib.util
import pickle
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql.types import StructType
from typer.testing import CliRunner

import spark_group_source
from spark_group_source import KafkaGroupDataSource, SetupError, fits
from spark_group_source.cli.app import app
from spark_group_source.local.jars import DELTA_COORDINATES

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONS = {"kafka.bootstrap.servers": "localhost:1", "kafka.group.id": "g", "subscribe": "t"}


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """The versions that are here, to be changed; None: not there."""
    here: dict[str, str | None] = {name: importlib.metadata.version(name) for name in ("pyspark", *fits.LIBRARIES)}
    monkeypatch.setattr(fits, "version_of", lambda name, module: here[name])
    return here


def test_what_is_installed_here_fits() -> None:
    assert fits.problem() is None


@pytest.mark.parametrize(
    ("name", "version", "said"),
    [
        ("pyspark", "4.1.2", "Spark 4.1.2 does not fit: this release is for Spark 4.2, Python 3.11 to 3.13, Java"),
        ("pyspark", "4.20.0", "Spark 4.20.0 does not fit"),
        ("pyspark", None, "there is no pyspark: .*'spark-group-source\\[local\\]'"),
        ("confluent-kafka", "2.15.9", "confluent-kafka 2.15.9 does not fit: pip install 'confluent-kafka>=2.16,<3'"),
        ("confluent-kafka", "3.0.0", "confluent-kafka 3.0.0 does not fit"),
        ("pyarrow", None, "there is no pyarrow in .*: pip install 'pyarrow>=18,<27'"),
        ("pandas", "3.0.0", "pandas 3.0.0 does not fit: pip install 'pandas>=2.2,<3'"),
    ],
)
def test_what_does_not_fit_is_refused_at_load_in_one_line(
    versions: dict[str, str | None], name: str, version: str | None, said: str
) -> None:
    versions[name] = version
    with pytest.raises(SetupError, match=said) as met:
        KafkaGroupDataSource(OPTIONS)
    assert "\n" not in str(met.value)


@pytest.mark.parametrize(("name", "version"), [("pyspark", "4.2.1"), ("pyspark", ""), ("pyarrow", "18.0.0")])
def test_what_fits_or_does_not_say_is_taken(versions: dict[str, str | None], name: str, version: str) -> None:
    versions[name] = version
    KafkaGroupDataSource(OPTIONS)


@pytest.mark.parametrize("version", [(3, 10), (3, 14)])
def test_another_python_is_refused(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]) -> None:
    monkeypatch.setattr(fits, "sys", SimpleNamespace(version_info=version, executable="/bin/py", modules=sys.modules))
    assert (fits.problem() or "").startswith(f"Python {version[0]}.{version[1]} (/bin/py) does not fit: this release")


def session(java: str, delta: str | None) -> Any:
    """What a session shows of its Java and its Delta Lake; None: no classes of that name."""
    package: Any = type("JavaClass", (), {"VERSION": lambda self: delta}) if delta else SimpleNamespace
    jvm = SimpleNamespace(io=SimpleNamespace(delta=SimpleNamespace(package=package())))
    jvm.java = SimpleNamespace(lang=SimpleNamespace(System=SimpleNamespace(getProperty=lambda name: java)))
    return SimpleNamespace(_jvm=jvm, _jsparkSession=object())


@pytest.mark.parametrize(
    ("java", "delta", "said"),
    [("25", "4.4.0", "Java 25 does not fit: .*JAVA_HOME"), ("21", "4.3.1", "Delta Lake 4.3.1 does not fit: .*4.4.0$")],
)
def test_a_java_or_a_delta_that_does_not_fit_is_refused(java: str, delta: str, said: str) -> None:
    with pytest.raises(SetupError, match=said):
        fits.check_session(session(java, delta))


@pytest.mark.parametrize(("java", "delta"), [("17", "4.4.0"), ("21", "4.4.2"), ("17", None)])
def test_a_java_and_a_delta_that_fit_are_taken(java: str, delta: str | None) -> None:
    fits.check_session(session(java, delta))
    fits.check_session(SimpleNamespace())  # type: ignore[arg-type]  # Spark Connect shows neither


@pytest.mark.spark
def test_the_versions_of_a_real_session_fit(spark: Any) -> None:
    fits.check_session(spark)
    assert spark._jvm.io.delta.package.VERSION().startswith(f"{fits.DELTA}.")


def test_the_package_installs_no_spark_and_its_libraries_are_those_that_are_checked() -> None:
    assert not [wanted for wanted in PROJECT["dependencies"] if re.match(r"(pyspark|delta)", wanted)]
    local = PROJECT["optional-dependencies"]["local"]
    assert {wanted.partition("==")[2].rpartition(".")[0] for wanted in local} == {fits.SPARK, fits.DELTA}
    assert DELTA_COORDINATES[0].startswith(f"io.delta:delta-spark_{fits.SPARK}_2.13:{fits.DELTA}.")
    for name, (_, first, beyond) in fits.LIBRARIES.items():
        assert f"{name}>={'.'.join(map(str, first))},<{'.'.join(map(str, beyond))}" in PROJECT["dependencies"]
    assert PROJECT["requires-python"] == f">={'.'.join(map(str, fits.PYTHON_MIN))}"


def test_on_another_spark_the_look_up_of_sources_goes_on_and_ours_is_refused_at_load() -> None:
    code = """
    import importlib.metadata, pyspark
    pyspark.__version__ = "4.1.0"
    import pyspark_kafka_group, sys
    assert "spark_group_source.source" not in sys.modules
    assert pyspark_kafka_group.DefaultSource.name() == "kafka-group"
    pyspark_kafka_group.DefaultSource({})
    """
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(line.strip() for line in code.splitlines())],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert "spark_group_source.errors.SetupError: Spark 4.1.0 does not fit" in ended.stderr


# --- what travels ----------------------------------------------------------------------------------------------------


@pytest.fixture
def parcel() -> bytes:
    """What Spark sends to an executor, in the order of its own pickler: the source, then its reader."""
    source = KafkaGroupDataSource(OPTIONS)
    return bytes(cloudpickle.dumps((source, source.streamReader(StructType()))))


def test_what_is_packed_arrives_as_it_was(parcel: bytes) -> None:
    source, reader = pickle.loads(parcel)
    assert type(source) is KafkaGroupDataSource and source.options == OPTIONS
    assert reader._options == source._parsed


@pytest.mark.parametrize("name", ["spark_group_source", "confluent_kafka"])
def test_an_executor_without_a_package_says_which(parcel: bytes, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked: None if asked == name else found(asked))
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(
        ImportError, match=f"has no package {name}. Install spark-group-source on every executor"
    ) as met:
        pickle.loads(parcel)
    assert f"{type(met.value).__module__}.{type(met.value).__name__}" == "spark_group_source.errors.SetupError"


def test_an_executor_with_another_release_says_both(parcel: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_group_source, "__version__", "9.9")
    with pytest.raises(ImportError, match=r"has spark-group-source 9\.9, and the driver \d+\.\d+\.\d+\."):
        pickle.loads(parcel)


# --- the command line ------------------------------------------------------------------------------------------------


def test_the_command_says_which_release_it_is() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"spark-group {spark_group_source.__version__}\n")


def test_a_command_that_needs_a_spark_which_is_not_there_says_what_fits(versions: dict[str, str | None]) -> None:
    versions["pyspark"] = None
    needed = ["--bootstrap-servers", "localhost:1", "--group", "g", "--topics", "t", "--table", "/t"]
    shown = CliRunner().invoke(app, ["run", *needed, "--checkpoint", "/c"])
    assert shown.exit_code == 1
    assert shown.output.startswith("error: SetupError: there is no pyspark: this release is for Spark 4.2")


def test_a_command_that_needs_spark_for_one_option_says_what_fits_too(
    versions: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    versions["pyspark"] = None
    shown = CliRunner().invoke(app, ["describe", "--group", "g", "--bootstrap-servers", "localhost:1", "--table", "/t"])
    assert shown.exit_code == 1
    assert shown.output.startswith("error: SetupError: there is no pyspark: this release is for Spark 4.2")
