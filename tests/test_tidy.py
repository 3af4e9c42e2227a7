"""The architecture as tests: import walls, the README's tables, public names, "Runs in:" lines."""

import ast
import importlib
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import spark_group_source
from spark_group_source import errors, options
from spark_group_source.group import states

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "spark_group_source"
README = ROOT / "README.md"

PURE = {"time", "random", "threading", "socket", "logging", "os", "queue", "asyncio", "subprocess"}
KAFKA_CLIENTS = {"kafka", "native", "rdkafka", "ranges", "fetch", "broker", "local_broker"}
"""Who may import confluent_kafka: Kafka's side, the readers of ranges, and the local broker's readiness check."""


def modules() -> list[tuple[str, Path]]:
    return [(".".join(path.relative_to(PACKAGE).with_suffix("").parts), path) for path in sorted(PACKAGE.rglob("*.py"))]


def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def ours(path: Path) -> set[str]:
    """The top-level parts of this package that a file imports."""
    parts = {
        name.removeprefix("spark_group_source.") for name in imports(path) if name.startswith("spark_group_source.")
    }
    return {part.split(".")[0] for part in parts}


def foreign(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


def in_package(name: str) -> bool:
    return name.split(".", maxsplit=1)[0] != "testing"


def test_the_group_protocol_is_pure() -> None:
    for name, path in modules():
        if name.startswith("group"):
            assert not foreign(path) & (PURE | {"confluent_kafka", "pyspark", "pyarrow", "delta"}), name
            assert ours(path) <= {"group", "model", "errors", "offsets"}, name


def test_source_and_sink_meet_only_in_values() -> None:
    for name, path in modules():
        if name in ("sink", "ledger", "deltalog", "checkpoint"):
            assert not ours(path) & {"source", "coordinator", "member", "worker", "planning", "kafka", "fetch"}, name
        if name in ("source", "coordinator", "member", "worker", "planning") or name.startswith(("kafka", "group")):
            assert not ours(path) & {"sink", "ledger", "deltalog", "checkpoint"}, name


def test_only_kafkas_side_imports_the_client_library() -> None:
    importers = {name.split(".")[0] for name, path in modules() if "confluent_kafka" in foreign(path)}
    assert importers - {"testing"} <= KAFKA_CLIENTS, importers


def test_only_source_imports_sparks_data_source_classes() -> None:
    importers = [n for n, path in modules() if any(i.startswith("pyspark.sql.datasource") for i in imports(path))]
    assert importers == ["source"]


def test_the_coordinator_knows_nothing_of_spark() -> None:
    for name in ("coordinator", "member", "worker", "planning", "progress"):
        assert "pyspark" not in foreign(PACKAGE / f"{name}.py"), name


def test_nothing_imports_the_test_tools() -> None:
    assert not [name for name, path in modules() if in_package(name) and "testing" in ours(path)]


def test_every_module_says_where_it_runs_and_what_is_absent() -> None:
    for name, path in modules():
        doc = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
        if name.endswith("__main__"):
            continue
        assert "Runs in:" in doc, name
        assert "eliberately absent" in doc, name


def test_importing_the_package_opens_nothing_and_needs_no_spark() -> None:
    code = "import sys, spark_group_source; sys.exit('pyspark' in sys.modules or 'confluent_kafka' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_every_public_name_is_there() -> None:
    assert sorted(spark_group_source.__all__) == list(spark_group_source.__all__)
    for name in spark_group_source.__all__:
        assert getattr(spark_group_source, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Missing'"):
        _ = spark_group_source.Missing


def test_jobs_and_notebooks_use_public_names_only() -> None:
    public = {"broker", "jars", "conf"}
    for path in (ROOT / "jobs").glob("*.py"):
        assert ours(path) - public <= set(spark_group_source.__all__), path.name


def test_the_readme_has_the_option_table_of_the_code() -> None:
    assert options.render_markdown() in README.read_text(), "run: python -m tests.render"


def test_the_readme_has_the_state_tables_of_the_code() -> None:
    assert states.render_markdown() in README.read_text(), "run: python -m tests.render"


def test_the_readme_names_no_command_that_is_not_there() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z]+)`", README.read_text())) <= targets


ERRORS = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.SourceError)]


@pytest.mark.parametrize("cls", ERRORS)
def test_every_error_survives_pickling_with_its_facts(cls: type[errors.SourceError]) -> None:
    error = cls("what was wrong", topic="orders", partition=3)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.fields) == (cls, "what was wrong", {"topic": "orders", "partition": 3})
    assert cls.__name__ in (errors.__doc__ or "")


def test_every_module_can_be_imported() -> None:
    for name, _ in modules():
        if not name.endswith("__main__"):
            importlib.import_module(f"spark_group_source.{name}".removesuffix(".__init__"))
