"""The documents: the site builds strictly, and their commands and code work."""

import argparse
import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from delta_files import living_rows

from spark_group_source.cli.app import app
from spark_group_source.local.broker import Broker

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
SITE_S = 600
FIRST_S = 400
PRODUCED = 100
"""Records that the example of the README produces."""
ELLIPSES = ("…", "...", "<")
"""Placeholders that the reader replaces."""


class Block(NamedTuple):
    """A fenced block of a document."""

    document: str
    language: str
    text: str


def blocks() -> Iterator[Block]:
    for path in DOCUMENTS:
        for indent, language, text in BLOCK.findall(path.read_text()):
            yield Block(path.name, language, re.sub(f"^{indent}", "", text, flags=re.MULTILINE))


def commands() -> Iterator[tuple[str, str]]:
    """Every command of blocks and sentences, with the name of its document."""
    for block in blocks():
        if block.language in ("", "bash"):
            for line in block.text.replace("\\\n", " ").splitlines():
                yield block.document, line.strip()
    for path in DOCUMENTS:
        for text in re.findall(r"`([^`]+)`", BLOCK.sub("", path.read_text())):
            yield path.name, " ".join(text.split())


def typed(program: str) -> list[Any]:
    """The arguments of each command of a program, without comments and the brackets of optional parts."""
    found = {
        (document, re.sub(r"\s+[#>] .*$", "", line).replace("[", "").replace("]", ""))
        for document, line in commands()
        if line.startswith(program + " ") and not any(mark in line for mark in ELLIPSES)
    }
    return [
        pytest.param(shlex.split(line)[len(program.split()) :], id=f"{name}: {line}") for name, line in sorted(found)
    ]


def test_documents_contain_commands_to_check() -> None:
    assert len(typed("spark-group")) > 20 and len(typed("make")) > 5


@pytest.mark.parametrize("arguments", typed("spark-group"))
def test_spark_group_command_of_a_document_is_valid(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for option, name in pairwise(arguments):
        if option == "--from-file":  # another command has written it
            (tmp_path / name).touch()
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands") and arguments and not arguments[0].startswith("-"):
        name, *arguments = arguments
        assert name in command.commands, f"there is no command {name}"
        command = command.commands[name]
    # A name alone in a sentence means the command; with arguments, all required ones must be given.
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    given = [argument for argument in arguments if argument.startswith("--")]
    assert set(given) <= options, set(given) - options
    if "--group" in given and "--bootstrap-servers" in given:
        command.make_context(command.name, list(arguments))


PAPERS = [*DOCUMENTS, ROOT / "CHANGELOG.md", *sorted((ROOT / ".github").rglob("*.md"))]


@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.name)
def test_files_and_make_targets_that_a_document_names_exist(path: Path) -> None:
    text = path.read_text()
    named = set(re.findall(r"`((?:docs|conf|jobs|notebooks|tests|spark_group_source|\.github)/[\w./-]*\w)`", text))
    if path.name != "renames.md":
        assert {name for name in named if not (ROOT / name).exists()} == set()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    typed_here = re.findall(r"^make ([a-z-]+)", "\n".join(found[2] for found in BLOCK.findall(text)), re.MULTILINE)
    assert {*typed_here, *re.findall(r"`make ([a-z-]+)", text)} <= targets


class Understood(Exception):
    """A benchmark accepted its arguments."""


@pytest.mark.parametrize("arguments", [*typed("python -m tests.bench")])
def test_benchmark_accepts_arguments_of_a_document(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parsed(parser: argparse.ArgumentParser, words: list[str]) -> None:
        parse(parser, words)
        raise Understood

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    name, *rest = (re.sub(r"^N$", "7", re.sub("^BYTES$", "9", word)) for word in arguments)
    with pytest.raises(Understood):
        importlib.import_module(f"bench.{name}").main(rest)


@pytest.mark.parametrize("arguments", [*typed("python"), *typed("spark-submit")])
def test_program_of_a_document_exists(arguments: list[str]) -> None:
    for argument in arguments:
        if argument.startswith(("jobs/", "tests/")):
            assert (ROOT / argument).exists()


@pytest.mark.parametrize("block", [b for b in blocks() if b.language == "python"], ids=lambda block: block.document)
def test_python_block_of_a_document_parses_and_imports(block: Block) -> None:
    text = re.sub(r"^\.option", "x = x.option", block.text, flags=re.MULTILINE)  # the middle of a chain
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("spark_group_source"):
            module = __import__(node.module or "", fromlist=[alias.name for alias in node.names])
            assert all(hasattr(module, alias.name) for alias in node.names)


@pytest.mark.slow
def test_site_builds_without_warnings_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    (command,) = re.findall(r"-m sphinx .*(?= build/site)", (ROOT / "Makefile").read_text())
    words = command.replace("build/doctrees", str(tmp_path / "doctrees")).split()
    site = tmp_path / "site"
    built = subprocess.run(
        [sys.executable, *words, str(site)],
        cwd=ROOT, env=os.environ | OFFLINE, capture_output=True, text=True, timeout=SITE_S, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} <= {path.stem for path in site.glob("*.html")}
    texts = {path: path.read_text() for path in site.rglob("*") if path.suffix in (".html", ".css", ".js")}
    assert len(texts) > len(DOCUMENTS)
    assert {path.name: found for path, text in texts.items() if (found := LOADED.findall(text))} == {}
    # A page that is opened as a file cannot fetch, but it can load scripts: the search has its index as one.
    assert '<script src="searchindex.js"' in (site / "search.html").read_text()
    for name in ("DeltaSink", "describe", "reset", "drain", "GroupListener"):
        assert f'id="spark_group_source.{name}"' in (site / "api.html").read_text()


OFFLINE = {"https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
LOADED = re.compile(
    r"""<(?:link|script|img|iframe)\b[^>]+(?:href|src)="?(?:https?:)?//[^"> ]+"""
    r"""|(?:url|importScripts|import|fetch)\s*\(\s*["']?(?:https?:)?//[^"') ]+|@import\s+["']?(?:https?:)?//\S+"""
)
"""What a page, a style or a script loads from another host."""


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://unpkg.com/a.js">',
        '<link rel="stylesheet" href="//fonts.example/css">',
        "@font-face { src: url(https://fonts.example/a.woff2) }",
        '@import "https://fonts.example/css";',
        'importScripts("https://cdn.example/lunr.js")',
    ],
)
def test_the_check_of_the_site_finds_what_other_hosts_serve(text: str) -> None:
    assert LOADED.search(text)


@pytest.mark.spark
@pytest.mark.full
@pytest.mark.timeout(2 * FIRST_S)
def test_readme_example_runs_as_printed(broker: Broker, topic: Any, tmp_path: Path) -> None:
    orders = topic(3)
    produce, query = (
        next(b.text for b in blocks() if b.document == "README.md" and b.language == language)
        for language in ("bash", "python")
    )
    script = f"{produce}\npython - <<'END'\n{query}END\n"
    ended = run_script(script.replace("/tmp", str(tmp_path)), tmp_path, broker, orders)
    assert ended.returncode == 0, ended.stderr
    assert len(living_rows(tmp_path / "orders")) == PRODUCED


@pytest.mark.spark
@pytest.mark.soak  # two minutes of starting Sparks; the migration guide runs in every run
@pytest.mark.timeout(2 * FIRST_S)
def test_first_ten_minutes_run_as_printed(broker: Broker, topic: Any, tmp_path: Path) -> None:
    orders = topic(3)
    script = "\n".join(b.text for b in blocks() if b.document == "first.md" and b.language == "bash")
    ended = run_script(script, tmp_path, broker, orders)
    assert ended.returncode == 0, ended.stderr
    rows = living_rows(tmp_path / "lake" / "orders")
    assert sorted(row["order_id"] for row in rows) == list(range(1, 351))
    assert f"group etl-{orders}: empty" in ended.stdout and "lag 0" in ended.stdout


def run_script(script: str, folder: Path, broker: Broker, topic: str) -> "subprocess.CompletedProcess[str]":
    """Run the commands of a document in one shell, with the tests' broker, another topic and another group."""
    script = re.sub(r"^(pip|spark-group broker) .*\n", "", script, flags=re.MULTILINE)
    script = script.replace("localhost:9092", broker.bootstrap_servers).replace('"orders"', f'"{topic}"')
    script = script.replace("--topics orders", f"--topics {topic}").replace("--group etl", f"--group etl-{topic}")
    script = script.replace('"etl"', f'"etl-{topic}"')
    programs = folder / "bin"
    programs.mkdir()
    for name, runs in (("python", ""), ("spark-group", "-m spark_group_source")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {runs} "$@"\n')
        (programs / name).chmod(0o755)
    own = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SPARK_CONF_DIR": str(ROOT / "conf"),
        "SPARK_LOCAL_DIRS": str(folder),
        "PYSPARK_SUBMIT_ARGS": f'--conf "spark.driver.extraJavaOptions=-Djava.io.tmpdir={folder}" pyspark-shell',
    }
    return subprocess.run(
        ["bash", "-eu"],
        input=script, cwd=folder, env=os.environ | own, capture_output=True, text=True, timeout=FIRST_S, check=False,
    )  # fmt: skip
