"""Unsupported versions are refused with one line, and executors report missing packages."""

import importlib
import importlib.util
import os
import pickle
import re
import shlex
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyspark
import pytest
from crash.standalone import python_without_package
from pyspark import TaskContext, cloudpickle
from pyspark.sql.types import StructType
from typer.testing import CliRunner

import spark_group_source
from spark_group_source import KafkaGroupDataSource, SetupError, compatibility, source
from spark_group_source.cli.app import app
from spark_group_source.delta.table_writer import has_delta
from spark_group_source.local import conf, jars
from spark_group_source.local.conf import local_spark_settings

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONS = {"kafka.bootstrap.servers": "localhost:1", "kafka.group.id": "g", "subscribe": "t"}


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """pyspark is not installed."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pyspark" else found(name))


def test_the_installed_versions_are_supported() -> None:
    assert compatibility.problem() is None


def test_a_missing_spark_is_refused_at_load_with_one_line(no_spark: None) -> None:
    del no_spark
    with pytest.raises(SetupError, match=r"pyspark is not installed: .*pip install 'pyspark\[sql\]==4\.2\.0'") as met:
        KafkaGroupDataSource(OPTIONS)
    assert "\n" not in str(met.value)


def test_a_name_that_needs_a_missing_spark_is_refused_at_its_import_with_one_line() -> None:
    program = """
import sys
sys.path[:] = [place for place in sys.path if "site-packages" not in place]
import spark_group_source
for name in ("DeadLetters", "DeltaSink", "DeltaSinks", "GroupListener", "KafkaGroupDataSource", "Merge"):
    try:
        getattr(spark_group_source, name)
    except spark_group_source.SetupError as exc:
        print(exc)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    lines = ended.stdout.splitlines()
    assert len(lines) == 6 and len(set(lines)) == 1
    assert lines[0].startswith("pyspark is not installed: ") and "pip install 'pyspark[sql]==4.2.0'" in lines[0]


CLASSES = compatibility.FEATURES | compatibility.ADMISSION_CONTROL


@pytest.mark.parametrize(
    ("module", "name"),
    [(module, None) for module in compatibility.FEATURES]
    + [(module, name) for module, names in CLASSES.items() for name in names],
)
def test_a_spark_without_a_required_class_is_refused_at_load_with_one_line(
    module: str, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pyspark, "__version__", "3.5.2")
    if name is None:
        monkeypatch.setitem(sys.modules, module, None)
    else:
        if importlib.util.find_spec(module) is None:
            pytest.skip("this Spark has no such module")
        monkeypatch.delattr(importlib.import_module(module), name)
    missing = module if name is None else f"{module}.{name}"
    message = f"Spark 3.5.2 has no {missing}: this release is for Spark 4.0 and newer, Python 3.11 to 3.14, Java"
    with pytest.raises(SetupError, match=re.escape(message)) as met:
        KafkaGroupDataSource(OPTIONS)
    assert "\n" not in str(met.value)


def test_a_spark_without_admission_control_gets_the_plain_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in compatibility.ADMISSION_CONTROL:
        monkeypatch.setitem(sys.modules, module, None)
    assert type(KafkaGroupDataSource(OPTIONS).streamReader(StructType())) is source.PlainReader


def test_the_required_classes_are_those_that_the_source_imports() -> None:
    code = Path(spark_group_source.__file__).with_name("source.py").read_text()
    imported = re.findall(r"^ *from (pyspark\.sql\.(?:streaming\.)?datasource) import (.+)$", code, re.MULTILINE)
    used = {module: set(names.split(", ")) - {"DataSourceReader"} for module, names in imported}  # of batch queries
    assert used == {module: set(names) for module, names in CLASSES.items()}


@pytest.mark.parametrize(
    ("version", "is_logged"),
    [("4.0.0", False), ("4.3.7", False), ("4.17.0", True), ("5.0.0.dev1", True), ("x-17", True)],
)
def test_an_untested_spark_with_these_classes_is_accepted_with_one_log_line(
    version: str, is_logged: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pyspark, "__version__", version)
    compatibility._log_untested.cache_clear()
    for _ in range(2):
        KafkaGroupDataSource(OPTIONS)
    assert [record.message.partition(" is not tested")[0] for record in caplog.records] == [
        f"Spark {version}"
    ] * is_logged


@pytest.mark.parametrize("version", [(3, 10), (3, 15)])
def test_an_unsupported_python_is_refused(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]) -> None:
    monkeypatch.setattr(
        compatibility, "sys", SimpleNamespace(version_info=version, executable="/bin/py", modules=sys.modules)
    )
    assert (compatibility.problem() or "").startswith(
        f"Python {version[0]}.{version[1]} (/bin/py) is not supported: this release"
    )


def session(java: str, delta: str | None) -> Any:
    """A session with these versions of Java and Delta Lake; None: no classes of that name."""
    package: Any = type("JavaClass", (), {"VERSION": lambda self: delta}) if delta else SimpleNamespace
    jvm = SimpleNamespace(io=SimpleNamespace(delta=SimpleNamespace(package=package())))
    jvm.java = SimpleNamespace(lang=SimpleNamespace(System=SimpleNamespace(getProperty=lambda name: java)))
    return SimpleNamespace(_jvm=jvm, _jsparkSession=object())


@pytest.mark.parametrize(
    ("java", "delta", "logged"),
    [
        ("17", "4.0.0", []),
        ("25", "4.4.2", []),
        ("17", "4.17.0", ["Delta Lake 4.17.0"]),
        ("26", None, ["Java 26"]),
    ],
)
def test_any_java_and_delta_are_accepted_and_logged_once_if_no_test_uses_them(
    java: str, delta: str | None, logged: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    compatibility._log_untested.cache_clear()
    for _ in range(2):
        compatibility.check_session(session(java, delta))
    compatibility.check_session(SimpleNamespace())  # type: ignore[arg-type]  # Spark Connect has neither
    assert [record.message.partition(" is not tested")[0] for record in caplog.records] == logged


@pytest.mark.parametrize("name", ["confluent_kafka", "numpy", "pyarrow"])
def test_a_missing_package_is_refused_at_load_and_breaks_no_other_source(name: str) -> None:
    """Spark imports the module of each source in one process."""
    program = f"""
import importlib.util
import sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda module, *rest: None if module == "{name}" else found(module, *rest)
class Missing:
    def find_spec(self, module, path=None, target=None):
        if module == "{name}":
            raise ModuleNotFoundError(module)
sys.meta_path.insert(0, Missing())
import pyspark_kafka_group
try:
    pyspark_kafka_group.DefaultSource({{}})
except Exception as exc:
    print(type(exc).__name__, exc)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert ended.stdout.startswith(f"SetupError {sys.executable} has no package {name}: "), ended.stderr
    assert f"`pip install {name.replace('_', '-')}`" in ended.stdout


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("import pyarrow; pyarrow.__version__ = '18.1.0'", "SetupError pyarrow 18.1.0 "),
        ("import sys; sys.modules['numpy'] = None", "ModuleNotFoundError import of numpy halted"),
    ],
    ids=["old", "broken"],
)
def test_a_package_that_cannot_be_used_is_reported_at_load_and_breaks_no_other_source(change: str, error: str) -> None:
    program = f"""
{change}
import pyspark_kafka_group
try:
    pyspark_kafka_group.DefaultSource({{}})
except Exception as exc:
    print(type(exc).__name__, exc)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert ended.stdout.startswith(error), ended.stderr


@pytest.mark.spark
def test_the_versions_of_a_real_session_are_supported(spark: Any) -> None:
    compatibility.check_session(spark)
    assert spark._jvm.io.delta.package.VERSION().startswith(f"{compatibility.DELTA}.")


def test_only_the_local_extra_installs_spark_in_the_tested_version() -> None:
    assert not [wanted for wanted in PROJECT["dependencies"] if re.match(r"(pyspark|delta-spark)", wanted)]
    local = PROJECT["optional-dependencies"]["local"]
    assert {wanted.partition("==")[2].rpartition(".")[0] for wanted in local if "==" in wanted} == {
        compatibility.SPARK,
        compatibility.DELTA,
    }
    assert PROJECT["requires-python"] == f">={'.'.join(map(str, compatibility.PYTHON_MIN))}"


@pytest.mark.parametrize(("version", "avro"), [("4.0.4", "4.0.0"), ("4.1.0", "4.1.1"), ("4.2.1", "4.2.0")])
def test_the_jars_of_delta_and_avro_are_those_of_the_installed_spark(
    version: str, avro: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Maven need not have each of Spark's patch releases."""
    monkeypatch.setattr(pyspark, "__version__", version)
    minor = version.rpartition(".")[0]
    assert compatibility.delta_coordinate() == f"io.delta:delta-spark_{minor}_2.13:{compatibility.DELTA}.0"
    assert compatibility.avro_coordinate() == f"org.apache.spark:spark-avro_2.13:{avro}"


def test_a_spark_without_a_delta_release_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspark, "__version__", "4.3.0")
    with pytest.raises(SetupError, match=r"Delta Lake 4\.4 has no release for Spark 4\.3\.0: .* 4\.0, 4\.1, 4\.2\."):
        compatibility.delta_coordinate()


def test_a_session_of_a_spark_without_a_delta_release_has_no_settings_of_delta(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(pyspark, "__version__", "4.3.0")
    monkeypatch.setattr(conf, "avro_jars", lambda: [Path("/avro.jar")])
    settings = local_spark_settings(tmp_path)
    assert not [key for key, value in settings.items() if "delta" in value or key == "spark.jars"]
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "Delta Lake has no release for the installed Spark"
    ]
    of_driver, of_executor = "spark.driver.extraJavaOptions", "spark.executor.extraJavaOptions"
    assert local_spark_settings(tmp_path, avro=True) == settings | {
        "spark.jars": "/avro.jar",
        of_driver: f"{settings[of_driver]} {conf.AVRO_LIMITS}",
        of_executor: conf.AVRO_LIMITS,
    }


def test_the_document_has_the_limits_of_avro() -> None:
    text = (Path(__file__).parents[1] / "docs" / "decode.md").read_text()
    for name in ("driver", "executor"):
        assert re.search(rf"^spark\.{name}\.extraJavaOptions +{re.escape(conf.AVRO_LIMITS)}$", text, re.MULTILINE)


def test_options_of_the_jvm_may_contain_spaces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Spark splits the setting as a shell does."""
    monkeypatch.setattr(conf, "delta_settings", dict)
    settings = local_spark_settings(tmp_path / "my files")
    names = [word.partition("=")[0] for word in shlex.split(settings["spark.driver.extraJavaOptions"])]
    assert names == ["-Dlog4j2.configurationFile", "-Djava.io.tmpdir"]


def test_delta_lake_and_avro_among_sparks_own_jars_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("delta-spark_2.13-4.0.0.jar", "spark-avro_2.13-4.0.0.jar"):
        (tmp_path / name).touch()
    monkeypatch.setattr(jars, "_spark_jars", lambda: tmp_path)
    settings = local_spark_settings(tmp_path, avro=True)
    assert "spark.jars" not in settings and settings.items() >= conf.DELTA_SETTINGS.items()


@pytest.mark.parametrize(
    ("version", "catalog", "has"),
    [
        ("4.2.0", "", True),
        ("4.3.0", "", False),
        ("4.3.0", conf.DELTA_SETTINGS["spark.sql.catalog.spark_catalog"], True),
    ],
)
def test_a_connect_session_has_delta_lake_if_its_spark_or_its_catalog_has(
    version: str, catalog: str, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pyspark, "__version__", version)
    session: Any = SimpleNamespace(conf=SimpleNamespace(get=lambda key, default: catalog or default))
    assert has_delta(session) == has


def test_on_an_older_spark_the_lookup_of_sources_works_and_this_one_is_refused_at_load() -> None:
    code = """
    import sys, pyspark.sql.datasource
    del pyspark.sql.datasource.DataSourceStreamReader
    import pyspark_kafka_group
    assert "spark_group_source.source" not in sys.modules
    assert pyspark_kafka_group.DefaultSource.name() == "kafka-group"
    pyspark_kafka_group.DefaultSource({})
    """
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(line.strip() for line in code.splitlines())],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    lacks = "pyspark.sql.datasource.DataSourceStreamReader"
    assert f"errors.SetupError: Spark {pyspark.__version__} has no {lacks}: this release" in ended.stderr


def test_describe_and_reset_are_imported_without_spark() -> None:
    code = "import sys; sys.modules['pyspark'] = None; from spark_group_source import describe, reset"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# --- pickling ----------------------------------------------------------------------------------------------------


@pytest.fixture
def pickled() -> bytes:
    """What Spark sends to an executor, in the order of its own pickler: the source, then its reader."""
    source = KafkaGroupDataSource(OPTIONS)
    return bytes(cloudpickle.dumps((source, source.streamReader(StructType()))))


def test_a_pickled_source_is_restored(pickled: bytes) -> None:
    source, reader = pickle.loads(pickled)
    assert type(source) is KafkaGroupDataSource and source.options == OPTIONS
    assert reader._options == source._parsed


@pytest.mark.parametrize("name", ["spark_group_source", "confluent_kafka"])
def test_an_executor_without_a_package_reports_which(
    pickled: bytes, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == name else found(module))
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(
        ImportError, match=f"has no package {name}. Install spark-group-source on every executor"
    ) as met:
        pickle.loads(pickled)
    assert f"{type(met.value).__module__}.{type(met.value).__name__}" == "spark_group_source.errors.SetupError"


def test_an_executor_with_another_version_reports_both(pickled: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_group_source, "__version__", "9.9")
    with pytest.raises(ImportError, match=r"has spark-group-source 9\.9, but the driver has \d+\.\d+\.\d+\."):
        pickle.loads(pickled)


def test_a_stream_reader_finds_the_package_where_the_planner_has_it(pickled: bytes, tmp_path: Path) -> None:
    """Spark passes the modules of --py-files to the planner and to tasks, but not to the stream reader."""
    assert unpickled_without_package(pickled, tmp_path).stdout.strip() == "KafkaGroupDataSource"


def test_a_task_does_not_look_for_the_package_in_folders_of_the_drivers_host(pickled: bytes, tmp_path: Path) -> None:
    task = "import pyspark; pyspark.TaskContext._setTaskContext(pyspark.TaskContext())"
    assert "has no package spark_group_source" in unpickled_without_package(pickled, tmp_path, task).stderr


@pytest.fixture
def delaying() -> Iterator[socket.socket]:
    """A TCP connection of this process whose kernel delays acknowledgements, as in an exchange of small messages."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
        yield connection


def is_delaying(connection: socket.socket) -> bool:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK) == 0


@pytest.mark.skipif(not hasattr(socket, "TCP_QUICKACK"), reason="a feature of Linux")
class TestAcknowledging:
    def test_a_task_acknowledges_its_reader_so_that_its_partition_is_not_held_back(
        self, pickled: bytes, delaying: socket.socket, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pickle.loads(pickled)
        assert is_delaying(delaying)  # this process is no worker
        monkeypatch.setattr(TaskContext, "_taskContext", TaskContext())
        pickle.loads(pickled)
        assert not is_delaying(delaying)
        delaying.sendall(b"still open")

    def test_connections_stay_blocking_if_the_program_has_set_a_timeout_for_new_sockets(
        self, delaying: socket.socket
    ) -> None:
        socket.setdefaulttimeout(1)
        try:
            compatibility.acknowledge_at_once()
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(delaying.fileno())
        assert is_delaying(delaying)


def unpickled_without_package(pickled: bytes, home: Path, before: str = "") -> "subprocess.CompletedProcess[str]":
    """Unpickle in a process whose Python has the package's dependencies only, and print the type of the source."""
    (home / "pickled").write_bytes(pickled)
    code = f"{before}\nimport pickle\nprint(type(pickle.load(open('pickled', 'rb'))[0]).__name__)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(python_without_package(home)), "-c", code],
        capture_output=True, text=True, cwd=home, env=environment, check=False,
    )  # fmt: skip


# --- the command line ------------------------------------------------------------------------------------------------


def test_the_command_prints_its_version() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"spark-group {spark_group_source.__version__}\n")


@pytest.mark.parametrize(
    "words",
    [["run", "--group", "g", "--topics", "t", "--checkpoint", "/c"], ["describe", "--group", "g"]],
    ids=["the command", "one option"],
)
def test_a_command_that_needs_a_missing_spark_reports_the_supported_versions(
    words: list[str], no_spark: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    del no_spark
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    shown = CliRunner().invoke(app, [*words, "--bootstrap-servers", "localhost:1", "--table", "/t"])
    assert shown.exit_code == 1
    assert shown.output.startswith("error: SetupError: pyspark is not installed: this release is for Spark 4.0")
