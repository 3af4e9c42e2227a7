"""The slot table of ``describe``, without a query."""

import io
from typing import Any

from kit.run_harness import RunHarness
from rich.console import Console

from spark_group_source.cli.group import _slots
from spark_group_source.protocol.statistics import Statistics

NOW_S = 100.0


def shown(**numbers: Any) -> list[list[str]]:
    """The cells of each slot's line."""
    run = RunHarness(slots=2).run.statistics().as_dict() | numbers
    paper = io.StringIO()
    Console(width=200, file=paper).print(_slots(Statistics.from_dict(run), NOW_S))
    lines = [line for line in paper.getvalue().splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_slot_table_shows_placement_age_and_rows() -> None:
    found = shown(
        slots=("assigned", "moving"),
        assigned=(3, 0),
        agents=("worker-1-77", ""),
        placed_since_ms=(40_000, 0),
        buffered_bytes=(2048, 0),
        buffered_rows=(17, 0),
        rows_from_memory=(900, 1),
        rows_from_brokers=(100, 20),
        slot_recalls=(0, 2),
    )
    assert found == [
        ["0", "assigned", "3", "worker-1-77", "60 s", "17 rows, 2 KiB", "900", "100", "0"],
        ["1", "moving", "0", "the stream reader", "-", "-", "1", "20", "2"],
    ]


def test_slot_table_has_no_row_counts_without_agents() -> None:
    """With memberHost=driver."""
    assert shown()[0] == ["0", "closed", "0", "the stream reader", "-", "-", "-", "-", "0"]
