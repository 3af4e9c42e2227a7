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
    files: dict[tuple[str, str], None] = {}
    for commit in sorted((table / "_delta_log").glob("*.json")):
        actions = [json.loads(line) for line in commit.read_text().splitlines()]
        for kind in ("remove", "add"):  # the actions of a commit have no order
            for action in (action[kind] for action in actions if kind in action):
                file = action["path"], json.dumps(action.get("deletionVector"), sort_keys=True)
                if kind == "add":
                    files[file] = None
                else:
                    files.pop(file, None)
    if deleting := [path for path, vector in files if vector != "null"]:
        raise ValueError(f"{deleting[0]} has a deletion vector, which this reader does not apply")
    return [table / path for path, _ in files]
