"""The stored results of the matrix, and their tables. No Spark, no broker."""

import re
import subprocess
from pathlib import Path

import pytest
from install_beside import SPARKS_OWN

from matrix import cells, environments, results
from matrix.__main__ import _kills_left
from matrix.results import Result, Results

GIT_S = 60
CELL = cells.SPARKS[0]
KILLS = next(one for one in cells.OF_SPARKS if one.each)
OTHER = next(one for one in cells.OF_SPARKS if not one.each)
JUNIT = """<testsuites><testsuite>
<testcase name="a"><properties><property name="kills" value="3"/></properties></testcase>
<testcase name="b"><skipped/></testcase>
<testcase name="c"><properties><property name="kills" value="2"/></properties>{}</testcase>
</testsuite></testsuites>"""


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Results:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "spark-group-source").mkdir()
    return Results(tmp_path / "results.json")


def junit(folder: Path, content: str = "") -> Result:
    (folder / "junit.xml").write_text(JUNIT.format(content))
    return results.read_junit(folder / "junit.xml", "2026-11-25", 1.0)


def test_a_result_has_the_tests_and_the_sums_of_their_figures(tmp_path: Path) -> None:
    assert junit(tmp_path) == Result("2026-11-25", passed=2, skipped=1, seconds=1, figures={"kills": 5})
    failed = junit(tmp_path, "<failure/>")
    assert (failed.passed, failed.failed, failed.holds) == (1, 1, False)


def test_a_run_without_a_report_or_without_a_test_does_not_hold(tmp_path: Path) -> None:
    assert not results.read_junit(tmp_path / "missing", "2026-11-25", 1.0).holds
    assert not Result("2026-11-25", skipped=3).holds


def test_kills_are_added_up_until_there_are_enough_and_a_failure_is_not_hidden(stored: Results) -> None:
    assert _kills_left(stored, CELL, KILLS, 20) == 20
    for day, left in (("2026-11-25", 15), ("2026-11-26", 10)):
        stored.add(CELL, KILLS, Result(day, passed=1, figures={"kills": 5, "records": 7}))
        assert _kills_left(stored, CELL, KILLS, 20) == left
    assert Results(stored._file).of(CELL, KILLS) == Result("2026-11-26", passed=1, figures={"kills": 10, "records": 14})
    stored.add(CELL, KILLS, Result("2026-11-27", failed=1, figures={"kills": 5}))
    assert _kills_left(stored, CELL, KILLS, 20) == 20
    assert results.violations(stored, [CELL]) == [f"{CELL.name}, {KILLS.name}: 1 failed, 0 passed"]


def test_a_checkout_that_differs_from_its_commit_is_marked(tmp_path: Path) -> None:
    assert environments.commit(tmp_path) == ""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t.test"]
    stored, tested = tmp_path / "tests" / "matrix" / "results.json", tmp_path / "tests" / "test_a.py"
    stored.parent.mkdir(parents=True)
    stored.touch()
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "a"]):
        subprocess.run([*git, *words], check=True, timeout=GIT_S)
    stored.write_text("{}")  # as an earlier run of the matrix leaves it
    assert re.fullmatch("[0-9a-f]{12}", commit := environments.commit(tmp_path))
    tested.touch()
    assert environments.commit(tmp_path) == f"{commit}+"


def test_a_scenario_that_passed_is_not_run_again(stored: Results) -> None:
    assert _kills_left(stored, CELL, OTHER, 20)
    stored.add(CELL, OTHER, Result("2026-11-25", passed=3))
    assert not _kills_left(stored, CELL, OTHER, 20)


def test_tables_show_what_was_run_and_what_was_not(stored: Results) -> None:
    stored.add(CELL, KILLS, Result("2026-11-25", passed=1, figures={"kills": 20}))
    stored.add(CELL, OTHER, Result("2026-11-25", passed=3, failed=2))
    table = columns(results.spark_table(stored))
    assert table[KILLS.shows][0] == "20 kills 2026-11-25" and table[OTHER.shows][0] == "**2 failed** 2026-11-25"
    assert [texts[0] for texts in table.values()].count(results.NOT_RUN) == len(table) - 6
    stored.add_versions(CELL, {"before": {}, "after": {"java": "17"}})
    assert columns(results.spark_table(stored))["Java"][:2] == ["17", results.NOT_RUN]
    without = cells.SPARKS.index(cells.BY_NAME["Spark 4.3.0"])
    assert (table["Delta Lake"][without], table["DeltaSink, both writers"][without]) == ("none", results.LEFT_OUT)
    assert columns(results.broker_table(stored))["members and rebalances, `consumer`"][0] == results.LEFT_OUT


def columns(table: str) -> dict[str, list[str]]:
    """The cells of a table's rows, by their first one."""
    rows = [[text.strip() for text in line.strip("|").split("|")] for line in table.splitlines()]
    return {first: texts for first, *texts in rows if not first.startswith("---")}


def test_a_changed_package_of_spark_is_shown(stored: Results) -> None:
    before = dict.fromkeys(SPARKS_OWN, "1")
    assert not environments.changed({"before": before, "after": before | {"rich": "1"}})
    changed = {"before": before, "after": before | {"numpy": "2"}}
    assert environments.changed(changed) == ["numpy 1 -> 2"]
    stored.add_versions(CELL, changed)
    assert columns(results.installed_table(stored))[CELL.spark][1] == "numpy 2"


def test_each_cell_and_scenario_is_there_once_and_its_tests_exist() -> None:
    assert len(cells.BY_NAME) == len(cells.CELLS)
    for scenario in (*cells.OF_SPARKS, *cells.OF_BROKERS):
        for argument in scenario.tests:
            file, _, test = argument.partition("::")
            if file.startswith("tests/"):
                text = (environments.ROOT / file).read_text() if file.endswith(".py") else ""
                assert (environments.ROOT / file).exists() and (not test or f"def {test}(" in text), argument
