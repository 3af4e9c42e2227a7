"""The oldest and the newest Spark, in environments that pip makes from the registries: two scenarios of the matrix."""

from pathlib import Path

import pytest

from matrix import __main__ as matrix
from matrix import cells

SMOKE_S = 3_600
"""Bound of downloads and environments, which the user's cache folder keeps, and of the tests."""


@pytest.mark.full
@pytest.mark.spark
@pytest.mark.timeout(SMOKE_S)
@pytest.mark.parametrize("cell", [cells.SPARKS[0], cells.SPARKS[-1]], ids=lambda cell: cell.spark)
def test_the_oldest_and_the_newest_spark_read_all_columns_and_hand_partitions_over(
    cell: cells.Cell, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--cell", cell.name, "--scenario", "columns", "rebalance", "--results", str(tmp_path / "results.json")]
    assert matrix.main(asked) == 0, capsys.readouterr().out
