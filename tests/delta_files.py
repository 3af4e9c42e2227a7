"""The rows of a Delta table, read from its files with pyarrow and the plain log, without Spark or Delta.

Runs in: tests, as an independent reader of what the product wrote. Deliberately absent: deletion vectors. They need a
decoder of Roaring bitmaps, and that of ``deltalake`` or Delta is not independent. A test with such a table reads its
rows by Spark: ``tests/delta/test_foreign_changes.py``.
"""

import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote


def living_rows(table: Path, columns: list[str] | None = None) -> list[dict[str, Any]]:
    """Return the rows of the files that the log lists and has not removed; none if there is no table."""
    import pyarrow.parquet as pq

    return [row for path in living_files(table) for row in pq.read_table(path, columns=columns).to_pylist()]


def living_files(table: Path) -> list[Path]:
    """Return the files that the newest checkpoint and the log since then list."""
    import pyarrow.parquet as pq

    files: dict[tuple[str, str], None] = {}
    log = table / "_delta_log"
    newest = max(log.glob("*.checkpoint.parquet"), default=None)
    if newest is not None:
        for add in pq.read_table(newest, columns=["add"])["add"].to_pylist():
            if add is not None:
                files[unquote(add["path"]), json.dumps(add.get("deletionVector"), sort_keys=True)] = None
    since = "" if newest is None else newest.name.split(".")[0]
    for commit in sorted(path for path in log.glob("*.json") if path.name.split(".")[0] > since):
        actions = [json.loads(line) for line in commit.read_text().splitlines()]
        for kind in ("remove", "add"):  # the actions of a commit have no order
            for action in (action[kind] for action in actions if kind in action):
                file = unquote(action["path"]), json.dumps(action.get("deletionVector"), sort_keys=True)
                if kind == "add":
                    files[file] = None
                else:
                    files.pop(file, None)
    if deleting := [path for path, vector in files if vector != "null"]:
        raise ValueError(f"{deleting[0]} has a deletion vector, which this reader does not apply")
    return [table / path.removeprefix("file:") for path, _ in files]  # a shallow clone names files of its source
