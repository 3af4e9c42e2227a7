"""The oldest and the newest Spark run two scenarios of the matrix. pip makes their environments from the registries,
once for each user."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from matrix import __main__ as matrix
from matrix import cells, environments
from matrix.cells import Cell, Scenario

SMOKE_S = 2_400
"""Bound of downloads, environment and tests of one Spark."""
SMOKE = Scenario("smoke", "", tuple(t for o in cells.OF_SPARKS if o.name in ("columns", "rebalance") for t in o.tests))


@pytest.fixture(scope="module")
def package() -> Iterator[Path]:
    with environments.wheel() as built:
        yield built


def on_this_machine(cell: Cell) -> Cell:
    """The cell; where its Python is missing, with this one and packages that have wheels for it."""
    try:
        environments.python_of(cell.python)
    except RuntimeError:
        this = f"{sys.version_info.major}.{sys.version_info.minor}"
        return dataclasses.replace(cell, python=this, platform=cells.NEWEST, libraries={})
    return cell


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(SMOKE_S)
@pytest.mark.parametrize("cell", [cells.SPARKS[0], cells.SPARKS[-1]], ids=lambda cell: cell.spark)
def test_the_oldest_and_the_newest_spark_read_all_columns_and_hand_partitions_over(cell: Cell, package: Path) -> None:
    with environments.made(on_this_machine(cell), package, print) as (python, versions):
        result = matrix.run_tests(python, cell, SMOKE)
    assert environments.changed(versions) == []
    assert result.holds and not result.skipped, matrix.log_of(cell, SMOKE).read_text(errors="replace")[-4000:]
