"""Statistics of a data file, from its Parquet footer to Delta's log."""

from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from spark_group_source.delta.native_writer import statistics


def test_a_timestamp_beyond_pythons_range_has_no_bounds_and_does_not_fail_the_batch(tmp_path: Path) -> None:
    moments = pa.array([datetime(9999, 12, 31, 23, 59, 59, 999999, UTC)], pa.timestamp("us", "UTC"))
    pq.write_table(pa.table({"at": moments, "text": ["x" * 40]}), tmp_path / "f.parquet")
    found = statistics(pq.ParquetFile(tmp_path / "f.parquet").metadata, ["at", "text"])
    assert (found["numRecords"], found["nullCount"]) == (1, {"at": 0, "text": 0})
    assert found["minValues"] == {"text": "x" * 32}
    assert found["maxValues"] == {"text": "x" * 32 + "\U0010ffff"}
