"""The pages about platforms and managed brokers: each statement is marked, and their settings are today's."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from spark_group_source import compatibility
from spark_group_source.cli.app import app
from spark_group_source.cli.common import VARIABLE
from spark_group_source.kafka.environment import check_settings
from spark_group_source.options.table import OPTIONS, Options

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = ("databricks", "kubernetes", "clusters", "brokers")
SECTIONS = (("install", "On a cluster"), ("agents", "Where agents run"))
"""Of other pages; the first paragraph says what the marks mean."""
MARK = re.compile(r"\b(?:run here|not run)\b")
CODE = re.compile(r"^( *)```.*?^\1```\n", re.MULTILINE | re.DOTALL)
OTHERS_OWN = {"availableNow", "emptyDir", "entryPointArguments", "hostNetwork", "memoryOverhead"}
"""Words of Spark, Kubernetes and Amazon that look like options."""
REQUIRED = {"kafka.bootstrap.servers": "kafka:9093", "kafka.group.id": "etl", "subscribe": "orders"}


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text()


def statements(text: str) -> Iterator[str]:
    """Every paragraph, item of a list and row of a table, without headings, code and the introduction."""
    before = ""
    for block in re.split(r"\n\s*\n", CODE.sub("", text[text.index("\n## ") :])):
        lines = block.strip().splitlines()
        if not lines or lines[0].startswith("#"):
            continue
        if lines[0].startswith("|"):
            if not before.lstrip("- ").startswith("**"):  # a mark before a table is for its rows
                yield from lines[2:]
        else:
            yield from re.split(r"\n(?=(?:- |\d+\. ))", block.strip())
        before = block


def section(name: str, heading: str) -> str:
    """A section of a page as a page of its own, whose introduction is the section's first paragraph."""
    (text,) = re.findall(rf"^## {heading}\n\n(.*?)(?=^## |\Z)", page(name), re.MULTILINE | re.DOTALL)
    introduction, _, rest = text.partition("\n\n")
    return f"{introduction}\n\n## {heading}\n\n{rest}"


@pytest.mark.parametrize(("name", "heading"), [*((name, "") for name in PAGES), *SECTIONS])
def test_every_statement_is_marked_as_run_or_not_run(name: str, heading: str) -> None:
    found = list(statements(section(name, heading) if heading else page(name)))
    assert len(found) > (3 if heading else 10)
    pointers = "["  # a sentence that only names another page
    assert [text for text in found if not MARK.search(text) and not text.lstrip().startswith(pointers)] == []


def test_a_statement_without_a_mark_is_found() -> None:
    text = "# A\n\nB.\n\n## C\n\n1. **run here**: Build it.\n2. Submit it.\n\n| a | b |\n|---|---|\n| c | d |\n"
    assert [one for one in statements(text) if not MARK.search(one)] == ["2. Submit it.", "| c | d |"]


def brokers() -> dict[str, dict[str, str]]:
    """The settings of each kind of brokers, from the page's table."""
    rows = [line for line in page("brokers").splitlines() if line.startswith(("| setting |", "| `kafka."))]
    cells = [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in rows]
    assert len(cells) > 5
    return {
        kind: {row[0]: row[column] for row in cells[1:] if row[column]}
        for column, kind in enumerate(cells[0])
        if column > 0
    }


@pytest.mark.parametrize("kind", sorted(brokers()))
def test_clients_accept_the_settings_of_managed_brokers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "msk_token.py").write_text("def token(_):\n    return 'token', 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    settings = {name: VARIABLE.sub("secret", value) for name, value in brokers()[kind].items()}
    options = Options.parse(REQUIRED | settings)
    check_settings(options)
    assert dict(options.settings)["security.protocol"] == "SASL_SSL"


def submitted() -> Iterator[Any]:
    """The arguments of each job that a document submits, and the options of ``spark-submit`` before them."""
    for path in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]:
        text = path.read_text().replace("\\\n", " ")
        for line in re.findall(r"^ *spark-submit (.*jobs/group_to_delta\.py.*)$", text, re.MULTILINE):
            spark, _, job = line.partition("jobs/group_to_delta.py")
            yield pytest.param(shlex.split(spark), shlex.split(job, comments=True), id=f"{path.stem}: {spark[:30]}")


@pytest.mark.parametrize(("spark", "job"), [*submitted()])
def test_a_submitted_job_gets_valid_arguments(spark: list[str], job: list[str], tmp_path: Path) -> None:
    coordinates = [spark[n + 1] for n, word in enumerate(spark) if word == "--packages"]
    assert all(one == compatibility.delta_coordinate() for one in coordinates)
    if job == ["--help"]:
        return
    (tmp_path / "kafka.properties").touch()
    job = [str(tmp_path / word) if word == "kafka.properties" else word for word in job]
    commands: Any = typer.main.get_command(app)
    given = commands.commands["run"].make_context("run", job).params
    Options.parse(REQUIRED | dict(pair.split("=", 1) for pair in given["option"] or ()))


@pytest.mark.parametrize("name", PAGES)
def test_options_and_jars_of_a_page_exist(name: str) -> None:
    text = page(name)
    words = set(re.findall(r"`([a-z]+[A-Z]\w*)(?:=\w+)?`", CODE.sub("", text)))
    assert words - {option.name for option in OPTIONS} <= OTHERS_OWN
    for spark, version in re.findall(r"delta-spark_([\d.]+)_2\.13:([\d.]+)", text):
        assert spark in compatibility.DELTA_SPARK and version == f"{compatibility.DELTA}.0"


@pytest.mark.parametrize("path", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda path: path.stem)
def test_options_in_the_code_of_a_document_exist(path: Path) -> None:
    code = "\n".join(found[0] for found in CODE.finditer(path.read_text()))
    names = set(re.findall(r"""(?:option\(|--option[= ])["']?([\w.]+)""", code)) - {"checkpointLocation"}
    known = {option.name for option in OPTIONS}
    assert {name for name in names if name not in known and not name.startswith("kafka.")} == set()
