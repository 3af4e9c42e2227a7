"""``python -m tests.matrix``: run the project's tests on each supported version of Spark and of Kafka brokers.

Makes one environment for each cell, installs the wheel there, runs the scenarios of the cell that have not passed yet,
and stores each result at once in ``tests/matrix/results.json``. An interrupted run continues where it was.

``python -m tests.matrix``                      everything
``... --cell "Spark 4.0.0" --scenario kills``   only these
``... --kills 20``                              repeats kills until there are so many in each cell
``... --again``                                 also what has passed
``... --list``                                  what there is
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the modules of the tests are found as pytest finds them

from matrix import cells, environments
from matrix.cells import Cell, Scenario
from matrix.results import FILE, Result, Results, read_junit, violations
from spark_group_source.local.jars import cache_dir

SCENARIO_S = 7_200
KILLS_EACH = 5
"""Kills of one run of a scenario: an interrupted run loses no more."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix")
    parser.add_argument("--cell", choices=cells.BY_NAME, nargs="+", default=list(cells.BY_NAME), metavar="CELL")
    parser.add_argument("--scenario", nargs="+", metavar="SCENARIO")
    parser.add_argument("--kills", type=int, default=KILLS_EACH, help=f"in each cell; default: {KILLS_EACH}")
    parser.add_argument("--again", action="store_true", help="also what has passed")
    parser.add_argument("--results", type=Path, default=FILE, help=f"default: {FILE}")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args(arguments)
    wanted = [cells.BY_NAME[name] for name in given.cell]
    if given.list:
        for cell in wanted:
            _report(f"{cell.name}: {', '.join(one.name for one in cells.scenarios(cell))}")
        return 0
    commit = environments.commit()
    with environments.wheel() as package:
        incomplete = [cell for cell in wanted if not _run_cell(cell, package, given, commit)]
    wrong = violations(Results(given.results), wanted)
    _report("\n".join(wrong) or "nothing failed")
    return int(bool(wrong or incomplete))


def _run_cell(cell: Cell, package: Path, given: argparse.Namespace, commit: str) -> bool:
    """Run the scenarios of a cell that are due, and store their results. Returns whether there is such an environment,
    and the wheel changed nothing in it."""
    results = Results(given.results)
    due = [
        one
        for one in cells.scenarios(cell)
        if (given.scenario is None or one.name in given.scenario)
        and (given.again or _kills_left(results, cell, one, given.kills))
    ]
    if not due:
        return True
    with contextlib.ExitStack() as stack:
        try:
            python, versions = stack.enter_context(environments.made(cell.environment, package, _report))
        except RuntimeError as exc:
            _report(f"{cell.name}: {exc}")
            return False
        if not cell.kafka:
            results.add_versions(cell, versions)
        for scenario in due:
            left = given.kills if given.again else _kills_left(results, cell, scenario, given.kills)
            while left > 0:
                count = min(left, KILLS_EACH)
                result = replace(run_tests(python, cell, scenario, count), commit=commit)
                results.add(cell, scenario, result)
                _report(f"{cell.name}, {scenario.name}: {result}")
                left = left - count if scenario.each and result.holds else 0
    if changes := environments.changed(versions):
        _report(f"{cell.name}: the wheel changed {', '.join(changes)}")
    return not changes


def _kills_left(results: Results, cell: Cell, scenario: Scenario, kills: int) -> int:
    """How many kills are missing in a cell; of a scenario without a number of kills, whether it is missing."""
    result = results.of(cell, scenario)
    if result is None or not result.holds:
        return kills
    return max(0, kills - result.figures.get("kills", 0)) if scenario.each else 0


def log_of(cell: Cell, scenario: Scenario) -> Path:
    """What pytest printed in the last run."""
    return cache_dir() / "matrix" / "logs" / f"{cell.name} {scenario.name}.log".replace(" ", "-")


def run_tests(python: Path, cell: Cell, scenario: Scenario, kills: int = KILLS_EACH) -> Result:
    """Run the tests of a scenario in an environment."""
    log = log_of(cell, scenario)
    log.parent.mkdir(exist_ok=True)
    # Other versions warn of other things, so no warning is an error. An empty -m selects all tests.
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", "-q", "-o", "filterwarnings=default", "-m", ""]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SPARK_HOME")}
    environment |= {"MATRIX_KILLS": str(kills), "MATRIX_KAFKA": cell.kafka, "MATRIX_CONNECTOR": cell.connector}
    environment |= {"PYSPARK_PYTHON": str(python)}
    if cell.java:
        environment["JAVA_HOME"] = str(environments.java_home(python))
    began_s, date = time.monotonic(), datetime.now(UTC).strftime("%Y-%m-%d")
    with tempfile.TemporaryDirectory(prefix="spark-group-matrix-") as scratch, log.open("wb") as output:
        junit = Path(scratch) / "junit.xml"
        given = [f"--junitxml={junit}", f"--basetemp={scratch}/tests", *scenario.tests]
        try:
            subprocess.run(
                [*command, *given],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=environments.ROOT,
                env=environment,
                timeout=SCENARIO_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            _report(f"{cell.name}, {scenario.name}: took longer than {SCENARIO_S} s; see {log}")
        return read_junit(junit, date, time.monotonic() - began_s)


def _report(text: str) -> None:
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
