"""The results of the matrix: stored in ``results.json``, rendered as tables of ``docs/compatibility.md``.

Runs in: ``tests.matrix``, ``tests.render``. Deliberately absent: running anything.
"""

import contextlib
import json
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from matrix import cells
from matrix.cells import Cell, Scenario
from spark_group_source import compatibility
from spark_group_source.local import jars
from spark_group_source.local.jars import locked

FILE = Path(__file__).with_name("results.json")
LOCK_S = 60
NOT_RUN = "not run"
LEFT_OUT = "-"
KILLS = "kills"
ADDED = (KILLS, "records")
"""Figures that are added up when a scenario is repeated; ``kills of X`` is added up, too."""


@dataclass
class Result:
    """The result of one scenario in one cell.

    Args:
        date: of the last run, as ``2026-11-25``.
        passed, failed, skipped: the number of tests.
        figures: what the tests recorded, such as the number of kills.
        commit: of the last run, with a plus sign if the checkout differed from it; empty where it is not known.
    """

    date: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: int = 0
    figures: dict[str, int] = field(default_factory=dict)
    commit: str = ""

    @property
    def holds(self) -> bool:
        """Whether tests ran, and none failed."""
        return self.passed > 0 and self.failed == 0

    def after(self, earlier: "Result | None") -> "Result":
        """This result with the figures of an earlier one added, if both hold."""
        if earlier is None or not (earlier.holds and self.holds):
            return self
        sums = {
            name: count + (earlier.figures.get(name, 0) if name.split(" of ")[0] in ADDED else 0)
            for name, count in self.figures.items()
        }
        return replace(self, seconds=self.seconds + earlier.seconds, figures=earlier.figures | sums)


class Results:
    """All results, by cell and scenario, and the versions of each cell's packages."""

    def __init__(self, file: Path = FILE) -> None:
        self._file = file
        self._read()

    def _read(self) -> None:
        empty: dict[str, Any] = {"versions": {}, "results": {}}
        stored = json.loads(self._file.read_text()) if self._file.is_file() else empty
        self.versions: dict[str, dict[str, dict[str, str]]] = stored["versions"]
        self._found = {
            cell: {name: Result(**one) for name, one in found.items()} for cell, found in stored["results"].items()
        }

    def of(self, cell: Cell, scenario: Scenario) -> Result | None:
        """The result of a scenario in a cell; None if it has not run there."""
        return self._found.get(cell.name, {}).get(scenario.name)

    def add(self, cell: Cell, scenario: Scenario, result: Result) -> None:
        """Store a result. Several runs of the matrix may do so at the same time."""
        with self._changing():
            earlier = self.of(cell, scenario) if scenario.each else None
            self._found.setdefault(cell.name, {})[scenario.name] = result.after(earlier)

    def add_versions(self, cell: Cell, versions: dict[str, dict[str, str]]) -> None:
        """Store the versions of a cell's packages before and after the installation of the wheel."""
        with self._changing():
            self.versions[cell.name] = versions

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with locked(jars.cache_dir() / "matrix-results.lock", LOCK_S):
            self._read()
            yield
            order = {cell.name: number for number, cell in enumerate(cells.CELLS)}
            found = {
                cell: {name: asdict(one) for name, one in sorted(self._found[cell].items())}
                for cell in sorted(self._found, key=order.__getitem__)
            }
            versions = {cell: self.versions[cell] for cell in sorted(self.versions, key=order.__getitem__)}
            unfinished = self._file.with_suffix(".part")
            unfinished.write_text(json.dumps({"versions": versions, "results": found}, indent=1) + "\n")
            unfinished.replace(self._file)


def read_junit(file: Path, date: str, seconds: float) -> Result:
    """The result of a run of pytest, from its JUnit file; one failure if there is none."""
    if not file.is_file():
        return Result(date, failed=1, seconds=round(seconds))
    result = Result(date, seconds=round(seconds))
    for case in ET.parse(file).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        result.failed += bool(kinds & {"failure", "error"})
        result.skipped += "skipped" in kinds
        result.passed += not kinds & {"failure", "error", "skipped"}
        for one in case.iter("property"):
            name, value = one.attrib["name"], int(one.attrib["value"])
            result.figures[name] = result.figures.get(name, 0) + value
    return result


# --- tables ----------------------------------------------------------------------------------------------------------


def spark_table(results: Results) -> str:
    """One column for each Spark: its versions, and the results of the scenarios."""
    libraries = ("confluent-kafka", "deltalake", "pyarrow", "numpy")
    after = [results.versions.get(cell.name, {}).get("after", {}) for cell in cells.SPARKS]
    release = f"{compatibility.DELTA}.0"
    versions = {
        "Python": [cell.python for cell in cells.SPARKS],
        "Java": [found.get("java", NOT_RUN) for found in after],
        "Delta Lake": [cell.delta or (release if cell.has_delta else "none") for cell in cells.SPARKS],
        "Spark's Kafka connector": [cell.connector or cell.spark for cell in cells.SPARKS],
        **{name: [found.get(name, NOT_RUN) for found in after] for name in libraries},
    }
    columns = {cell.name.removeprefix("Spark "): cell for cell in cells.SPARKS}
    return _table(results, "Spark", columns, cells.OF_SPARKS, versions)


def broker_table(results: Results) -> str:
    """One column for each version of Kafka."""
    return _table(results, "Kafka", {cell.kafka: cell for cell in cells.BROKERS}, cells.OF_BROKERS, {})


def installed_table(results: Results) -> str:
    """One row for each Spark: its own packages, whose versions are the same before and after the installation."""
    lines = ["| Spark | before | after |", "|---|---|---|"]
    for cell in (one for one in cells.SPARKS if not one.java):
        versions = results.versions.get(cell.name)
        if versions is None:
            lines.append(f"| {cell.spark} | {NOT_RUN} | {NOT_RUN} |")
            continue
        before, after = versions["before"], versions["after"]
        changes = [f"{name} {after.get(name, 'missing')}" for name in before if after.get(name) != before[name]]
        own = ", ".join(f"{name} {version}" for name, version in before.items())
        lines.append(f"| {cell.spark} | {own} | {', '.join(changes) or 'the same'} |")
    return "\n".join(lines) + "\n"


def _table(
    results: Results,
    kind: str,
    columns: Mapping[str, Cell],
    scenarios: Sequence[Scenario],
    versions: Mapping[str, Sequence[str]],
) -> str:
    rows = {
        one.shows: [
            _text(results.of(cell, one)) if one in cells.scenarios(cell) else LEFT_OUT for cell in columns.values()
        ]
        for one in scenarios
    }
    lines = [f"| {kind} | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    lines += [f"| {name} | {' | '.join(texts)} |" for name, texts in (*versions.items(), *rows.items())]
    return "\n".join(lines) + "\n"


def _text(result: Result | None) -> str:
    if result is None:
        return NOT_RUN
    if not result.holds:
        return f"**{result.failed} failed** {result.date}"
    count, what = (result.figures[KILLS], "kill") if KILLS in result.figures else (result.passed, "test")
    return f"{count} {what}{'s' * (count != 1)} {result.date}"


def violations(results: Results, of: Iterable[Cell]) -> list[str]:
    """What failed, or changed a version, in these cells."""
    wrong = []
    for cell in of:
        for scenario in cells.scenarios(cell):
            result = results.of(cell, scenario)
            if result is not None and not result.holds:
                wrong.append(f"{cell.name}, {scenario.name}: {result.failed} failed, {result.passed} passed")
    return wrong
