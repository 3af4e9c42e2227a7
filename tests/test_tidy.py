"""The architecture as tests: import limits, documents that match the code, public names, "Runs in:" lines."""

import ast
import importlib
import pickle
import re
import subprocess
import sys
from pathlib import Path

import printed_commands
import proofs
import pytest
import render
import structure

import spark_group_source
from spark_group_source import errors

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "spark_group_source"
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]

IMPORT_LEVELS_MAX = 7
"""Of modules of one package."""
README_LINES_MAX = 120
ARCHITECTURE_LINES_MAX = 300
ARCHITECTURE = ROOT / "docs/architecture.md"
INSIDE = [ARCHITECTURE, ROOT / "docs/states.md", ROOT / "docs/decisions.md"]
"""Pages for engineers who change the code."""
ROADS = {
    "A batch": 12,
    "The commit of a batch": 12,
    "A revocation": 9,
    "An agent joins": 12,
    "An agent dies": 9,
    "A DeltaSink commit": 12,
    "A reset": 9,
    "A RESTORE or overwrite is refused": 6,
}
"""Sections of the architecture page that follow one thing through the code, and the most files that each may name."""
ARCHITECTURE_NAMES_MIN = 100
"""If fewer names are found, the pattern does not match any more."""

PURE = {"time", "random", "threading", "socket", "logging", "os", "queue", "asyncio", "subprocess"}
VALUES = {"model", "error_codes", "errors", "command_line", "compatibility", "__version__"}
"""Modules that every package may import."""
WALLS: dict[str, set[str]] = {
    "protocol": VALUES,
    "options": VALUES | {"protocol"},
    "kafka": VALUES | {"options", "librdkafka"},
    "reader": VALUES | {"options", "protocol", "kafka", "librdkafka"},
    "members": VALUES | {"options", "protocol", "kafka"},
    "agents": VALUES | {"options", "protocol", "kafka", "members", "reader", "host"},
    "runtime": VALUES | {"options", "protocol", "kafka", "host", "members", "agents"},
    "host": VALUES | {"protocol"},
    "delta": VALUES | {"protocol", "host"},  # the sink reports durable batches to the run on the same host
    "local": VALUES | {"host"},
    "metrics": VALUES | {"options", "protocol", "kafka"},
    "cli": VALUES | {"options", "protocol", "kafka", "host", "delta", "local", "metrics", "source"},
}
"""What each package may import besides itself. These limits keep the protocol pure, and source and sink apart."""


MODULES = structure.modules()


def package(name: str) -> str:
    """The subpackage of a module; the module itself if it is in none."""
    return name.split(".", maxsplit=1)[0]


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
    """The subpackages of this project, and the modules beside them, that a file imports."""
    parts = {
        name.removeprefix("spark_group_source.") for name in imports(path) if name.startswith("spark_group_source.")
    }
    return {part.split(".")[0] for part in parts}


def foreign(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


@pytest.mark.parametrize("name", WALLS)
def test_package_imports_only_allowed_packages(name: str) -> None:
    for module, path in MODULES.items():
        if package(module) == name:
            assert ours(path) - {name} <= WALLS[name], module


def test_every_package_has_import_limits() -> None:
    packages = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert packages <= set(WALLS) <= set(map(package, MODULES))


def test_modules_import_each_other_in_one_direction_and_few_levels() -> None:
    graph = structure.imports()
    assert structure.cycles(graph) == []
    assert max(structure.levels(graph).values()) <= IMPORT_LEVELS_MAX


def test_a_public_class_name_is_defined_once() -> None:
    assert structure.duplicate_classes() == {}


def test_the_group_protocol_is_pure() -> None:
    for name, path in MODULES.items():
        if package(name) == "protocol":
            assert not foreign(path) & (PURE | {"confluent_kafka", "pyspark", "pyarrow", "delta"}), name


def test_only_the_coordinator_and_the_source_import_agents() -> None:
    importers = {name for name, path in MODULES.items() if package(name) != "agents" and "agents" in ours(path)}
    assert importers <= {"runtime.coordinator", "source"}


def test_only_kafka_reader_local_and_decode_import_the_client_library() -> None:
    """``decode`` has that of a schema registry."""
    importers = {package(name) for name, path in MODULES.items() if "confluent_kafka" in foreign(path)}
    assert importers <= {"kafka", "reader", "local", "decode"}, importers


def test_only_source_imports_sparks_data_source_classes() -> None:
    importers = [n for n, path in MODULES.items() if any(i.startswith("pyspark.sql.datasource") for i in imports(path))]
    assert importers == ["source"]


def test_stream_reader_does_not_import_spark() -> None:
    for name, path in MODULES.items():
        if package(name) in ("runtime", "members", "kafka", "protocol"):
            assert "pyspark" not in foreign(path), name


def test_product_does_not_import_test_code() -> None:
    assert not [name for name, path in MODULES.items() if foreign(path) & {"kit", "tests"}]


def test_every_module_states_where_it_runs_and_what_is_absent() -> None:
    for name, path in MODULES.items():
        doc = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
        if name.endswith("__main__"):
            continue
        assert "Runs in:" in doc, name
        assert "eliberately absent" in doc, name


def test_importing_the_package_opens_nothing_and_needs_no_spark() -> None:
    code = "import sys, spark_group_source; sys.exit('pyspark' in sys.modules or 'confluent_kafka' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_task_with_an_agent_imports_no_confluent_kafka() -> None:
    """Loading it would delay the first task of each worker."""
    code = "import sys, spark_group_source.agents.task; sys.exit('confluent_kafka' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_every_public_name_exists() -> None:
    assert sorted(spark_group_source.__all__) == list(spark_group_source.__all__)
    for name in spark_group_source.__all__:
        assert getattr(spark_group_source, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Missing'"):
        _ = spark_group_source.Missing


def test_jobs_and_notebooks_use_public_names_only() -> None:
    public = {"local", "cli"}
    for path in (ROOT / "jobs").glob("*.py"):
        assert ours(path) - public <= set(spark_group_source.__all__), path.name


# --- the documents --------------------------------------------------------------------------------------------------


def test_each_guarantee_is_proven_at_each_level_or_a_reason_is_given() -> None:
    wanted = {(guarantee, level) for guarantee in proofs.GUARANTEES for level in proofs.LEVELS}
    assert proofs.NOT_AT.keys() <= wanted
    assert {(proof.guarantee, proof.level) for proof in proofs.proofs()} == wanted - proofs.NOT_AT.keys()


def test_rendered_parts_of_documents_are_up_to_date() -> None:
    for path, parts in render.blocks().items():
        text = path.read_text()
        for name, content in parts.items():
            assert render.filled(text, name, content) == text, f"{path.name}, {name}: run python -m tests.render"


def test_readme_and_architecture_page_are_short() -> None:
    assert len(README.read_text().splitlines()) <= README_LINES_MAX
    assert len(ARCHITECTURE.read_text().splitlines()) <= ARCHITECTURE_LINES_MAX


def test_every_link_and_anchor_of_the_documents_exists() -> None:
    for path in DOCUMENTS:
        text = path.read_text()
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            name, _, heading = target.partition("#")
            if name.startswith(("http:", "https:")):
                continue
            there = (path.parent / name).resolve() if name else path
            assert there.exists(), f"{path.name}: {target}"
            assert not heading or heading in headings(there.read_text()), f"{path.name}: {target}"


def headings(text: str) -> set[str]:
    """The anchors that GitHub creates for headings."""
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", INSIDE, ids=lambda page: page.name)
def test_pages_about_the_code_name_existing_files_and_symbols(page: Path) -> None:
    for file, name in named_symbols(page.read_text()):
        path = ROOT / file if file.startswith(("tests/", "spark_group_source/")) else PACKAGE / file
        assert path.exists(), file
        assert not name or name in defined(path), f"{file}: {name}"


def test_architecture_page_names_many_symbols() -> None:
    assert len(named_symbols(ARCHITECTURE.read_text())) > ARCHITECTURE_NAMES_MIN


@pytest.mark.parametrize(("heading", "most"), ROADS.items())
def test_a_road_names_few_files(heading: str, most: int) -> None:
    sections = re.split(r"^## ", ARCHITECTURE.read_text(), flags=re.MULTILINE)
    (text,) = [section for section in sections if section.startswith(f"{heading}\n")]
    assert 0 < len({file for file, _ in named_symbols(text)}) <= most


def test_the_architecture_page_names_no_method_without_its_file() -> None:
    """Such a name would be neither counted nor checked."""
    assert re.findall(r"`[A-Z]\w+\.\w+`|`[\w/]+\.py:\n", ARCHITECTURE.read_text()) == []


def named_symbols(text: str) -> list[tuple[str, str]]:
    """Every `file.py` and `file.py: symbol` of a page."""
    found: list[tuple[str, str]] = re.findall(r"`([\w/]+\.py)(?:: ([\w.]+))?`", text)
    return found


def defined(path: Path) -> set[str]:
    """The classes, functions and constants of a file; those of a class with the class name before them."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        inner = node.body if isinstance(node, ast.ClassDef) else []
        for part in [node, *inner]:
            before = f"{node.name}." if part is not node and isinstance(node, ast.ClassDef) else ""
            if isinstance(part, ast.ClassDef | ast.FunctionDef):
                found.add(before + part.name)
            elif isinstance(part, ast.AnnAssign | ast.Assign):
                targets = [part.target] if isinstance(part, ast.AnnAssign) else part.targets
                found |= {before + target.id for target in targets if isinstance(target, ast.Name)}
    return found


def test_every_command_in_a_message_has_a_test_that_runs_it() -> None:
    """A new command needs an entry in ``printed_commands.TESTED``, and a test that provokes its message."""
    expected = {place: count for place, (count, _) in printed_commands.TESTED.items()}
    assert printed_commands.commands_of_the_product() == expected
    for path, _, name in (test.partition("::") for _, test in printed_commands.TESTED.values() if test):
        assert f"\ndef {name}(" in (ROOT / path).read_text(), f"{path}::{name} does not exist"


ERRORS = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.SourceError)]


@pytest.mark.parametrize("cls", ERRORS)
def test_every_error_survives_pickling_with_its_fields(cls: type[errors.SourceError]) -> None:
    error = cls("what was wrong", topic="orders", partition=3)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.fields) == (cls, "what was wrong", {"topic": "orders", "partition": 3})


def test_every_module_can_be_imported() -> None:
    for name in MODULES:
        if not name.endswith("__main__"):
            importlib.import_module(f"spark_group_source.{name}".removesuffix(".__init__"))
