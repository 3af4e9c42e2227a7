"""Statistics of a data file, from its Parquet footer to Delta's log."""

import math
from datetime import UTC, date, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_group_source.delta.native_writer import statistics


def of_file(path: Path, rows: pa.Table) -> dict[str, Any]:
    pq.write_table(rows, path / "f.parquet")
    return statistics(pq.ParquetFile(path / "f.parquet").metadata, rows.column_names)


def test_a_timestamp_beyond_pythons_range_has_no_bounds_and_does_not_fail_the_batch(tmp_path: Path) -> None:
    moments = pa.array([datetime(9999, 12, 31, 23, 59, 59, 999999, UTC)], pa.timestamp("us", "UTC"))
    pq.write_table(pa.table({"at": moments, "text": ["x" * 40]}), tmp_path / "f.parquet")
    found = statistics(pq.ParquetFile(tmp_path / "f.parquet").metadata, ["at", "text"])
    assert (found["numRecords"], found["nullCount"]) == (1, {"at": 0, "text": 0})
    assert found["minValues"] == {"text": "x" * 32}
    assert found["maxValues"] == {"text": "x" * 32 + "\U0010ffff"}


@pytest.mark.parametrize("groups", [[(0.0, 1.0), (math.nan, math.nan)], [(0.0, 1.0), (0.0, math.inf)]])
def test_a_float_column_has_no_bounds_if_those_of_a_row_group_are_not_finite(groups: list[tuple[float, float]]) -> None:
    # Spark's writer notes NaN as a minimum and maximum, Arrow's does not.
    found = [
        SimpleNamespace(min=low, max=high, null_count=0, num_values=2, has_null_count=True, has_min_max=True)
        for low, high in groups
    ]
    footer = SimpleNamespace(
        metadata=None,
        num_rows=4,
        num_columns=1,
        num_row_groups=len(found),
        schema=SimpleNamespace(column=lambda index: SimpleNamespace(name="d", path="d")),
        row_group=lambda number: SimpleNamespace(column=lambda index: SimpleNamespace(statistics=found[number])),
    )
    assert statistics(footer, ["d"]) == {"numRecords": 4, "minValues": {}, "maxValues": {}, "nullCount": {"d": 0}}


def test_days_of_the_julian_calendar_are_no_bounds(tmp_path: Path) -> None:
    table = pa.table({"n": [1], "day": [date(1500, 1, 10)], "at": [datetime(1500, 1, 10, tzinfo=UTC)]})
    assert set(of_file(tmp_path, table)["minValues"]) == {"n", "day", "at"}
    legacy = of_file(tmp_path, table.replace_schema_metadata({"org.apache.spark.legacyDateTime": ""}))
    assert (legacy["minValues"], legacy["maxValues"]) == ({"n": 1}, {"n": 1})
    assert legacy["nullCount"] == {"n": 0, "day": 0, "at": 0}


@pytest.mark.parametrize("nullable", [True, False])
def test_a_field_of_a_struct_is_not_taken_for_a_column_with_a_dot_in_its_name(tmp_path: Path, nullable: bool) -> None:
    struct = pa.struct([pa.field("b", pa.int64(), nullable)])
    schema = pa.schema([pa.field("a.b", pa.int64()), pa.field("a", struct, nullable)])
    found = of_file(tmp_path, pa.Table.from_pylist([{"a.b": 1, "a": {"b": 100}}], schema))
    assert (found["minValues"], found["maxValues"]) == ({"a.b": 1}, {"a.b": 1})


@pytest.mark.parametrize(("zone", "end"), [("UTC", "Z"), (None, "")])
def test_the_year_of_a_timestamp_has_four_digits(tmp_path: Path, zone: str | None, end: str) -> None:
    # Readers compare texts, so a year "1" is above a year "2024".
    year_2024_us = 1_714_953_600_000_000
    moments = pa.array([-62_135_596_800_000_000 + 1500, year_2024_us], pa.timestamp("us", zone))
    found = of_file(tmp_path, pa.table({"at": moments}))
    assert (found["minValues"], found["maxValues"]) == (
        {"at": f"0001-01-01T00:00:00.001{end}"},
        {"at": f"2024-05-06T00:00:00.000{end}"},
    )


def test_a_text_above_its_shortened_bound_has_no_bounds(tmp_path: Path) -> None:
    found = of_file(tmp_path, pa.table({"text": ["x" * 32 + "\U0010ffff" + "y"]}))
    assert (found["minValues"], found["maxValues"]) == ({}, {})
