"""The rows of a Delta table, read from its files with pyarrow and the plain log, without Spark or Delta.

Runs in: tests, as an independent reader of what the product wrote.
"""

import json
from pathlib import Path
from typing import Any


def living_rows(table: Path, columns: list[str] | None = None) -> list[dict[str, Any]]:
    """Return the rows of the files that the log lists and has not removed; none if there is no table."""
    import pyarrow.parquet as pq

    return [row for path in living_files(table) for row in pq.read_table(path, columns=columns).to_pylist()]


def living_files(table: Path) -> list[Path]:
    """Return the files that the log lists and has not removed."""
    files: dict[str, None] = {}
    for commit in sorted((table / "_delta_log").glob("*.json")):
        for line in commit.read_text().splitlines():
            action = json.loads(line)
            if "add" in action:
                files[action["add"]["path"]] = None
            elif "remove" in action:
                files.pop(action["remove"]["path"], None)
    return [table / name for name in files]
