"""The slot table of ``describe``, without a query."""

import io
from dataclasses import replace
from typing import Any

import pytest
from kit.run_harness import RunHarness
from rich.console import Console

from spark_group_source.cli import group, report
from spark_group_source.cli.group import _slots
from spark_group_source.protocol.statistics import Statistics

NOW_S = 100.0
OLD = {"group": "etl", "stream": "s", "pid": 7, "slots": ["assigned", "joining"]}
"""Statistics of a version that wrote few of the fields."""


def shown(**numbers: Any) -> list[list[str]]:
    """The cells of each slot's line."""
    return cells(RunHarness(slots=2).run.statistics().as_dict() | numbers)


def cells(run: dict[str, Any]) -> list[list[str]]:
    paper = io.StringIO()
    Console(width=200, file=paper).print(_slots(Statistics.from_dict(run), NOW_S))
    return rows(paper.getvalue())


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("│")]
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


def test_describe_shows_the_statistics_of_an_older_version(monkeypatch: pytest.MonkeyPatch) -> None:
    paper = io.StringIO()
    monkeypatch.setattr(group, "console", Console(width=200, file=paper))
    group._show_runs(replace(report.no_group("etl"), runs=(OLD,)))
    text = paper.getvalue()
    assert "query in process 7: generation -1, 0 rebalances, longest hold 0 ms, 0 commits, 0 failed" in text
    assert rows(text) == [
        ["0", "assigned", "-", "the stream reader", "-", "-", "-", "-", "-"],
        ["1", "joining", "-", "the stream reader", "-", "-", "-", "-", "-"],
    ]


def test_slot_whose_age_and_rows_are_unknown_is_shown_on_its_agent() -> None:
    first, _ = cells(OLD | {"agents": ["worker-1-77", ""]})
    assert first == ["0", "assigned", "-", "worker-1-77", "-", "-", "-", "-", "-"]


def test_watch_compares_the_statistics_of_an_older_version() -> None:
    before = replace(report.no_group("etl"), runs=(OLD,))
    assert group.changes(before, before) == []
    after = replace(before, runs=(OLD | {"rebalances": 1, "reason": "slot 0 was assigned 3 partitions"},))
    assert group.changes(before, after) == ["rebalance 1 of the query in process 7: slot 0 was assigned 3 partitions"]
