"""Which replays of dead letters have no rows, as they were interrupted or a ``RESTORE`` undid them, by the commits of a
table. Deliberately absent: the replay itself (``tests/delta/test_dead_letters.py``)."""

from collections.abc import Mapping
from typing import Any

import pytest

from spark_group_source.delta.dead_letters import _numbers_without_rows
from spark_group_source.delta.ledger_format import Ledger
from spark_group_source.delta.table_history import Commit, TableHistory, note_of

KEY = "replay.bad"


class Scripted:
    """The commits of a table, by version: the number of a replay (negative: it ended without rows), the version of a
    RESTORE, or an operation."""

    table = "/lake/t"

    def __init__(self, commits: Mapping[int, int | tuple[str, int] | str], first: int = 0) -> None:
        self._commits, self._first = commits, first

    def commits(self, newest: int, after: int) -> Any:
        for version in range(newest, max(after, self._first - 1), -1):
            what = self._commits.get(version, "WRITE")
            info: dict[str, Any] = {"operation": what, "readVersion": version - 1}
            if isinstance(what, int):
                doc, reason = Ledger(group=KEY, number=abs(what)).to_json_dict(), "ended" if what < 0 else None
                info |= {"operation": "WRITE", "userMetadata": note_of({KEY: doc}, read=version - 1, reason=reason)}
            elif isinstance(what, tuple):
                info |= {"operation": "RESTORE", "operationParameters": {"version": what[1]}}
            yield Commit.of(version, info, removes_rows=not isinstance(what, int) and what != "WRITE")

    def restored_to(self, commit: Commit) -> int | None:
        version = commit.parameters["version"]
        return None if version < 0 else int(version)


def restore(version: int) -> tuple[str, int]:
    return "RESTORE", version


@pytest.mark.parametrize(
    ("commits", "first", "removed"),
    [
        ({5: 1, 8: restore(4)}, 0, {1}),
        ({5: 1, 6: 2, 8: restore(5)}, 0, {2}),
        ({10: 1, 11: restore(8)}, 5, {1}),  # the log does not reach back to the first commit
        ({10: 1, 11: restore(8), 14: restore(12)}, 0, {1}),  # 12 has the rows of 8
        ({10: 1, 11: restore(8), 13: 2, 14: restore(12)}, 0, {1, 2}),
        ({10: restore(5), 11: 1}, 0, set()),  # behind the RESTORE, also if it was decided before
        ({5: 1, 8: restore(4), 9: 2, 11: restore(6)}, 0, {2}),  # the first RESTORE is undone
        ({5: 1, 7: "CREATE OR REPLACE TABLE", 9: 2, 10: restore(8)}, 0, {2}),
        ({5: 1, 8: restore(-1)}, 0, set()),  # by time, to a version that is not known
        ({5: 1, 6: 2}, 0, set()),
        ({5: 1, 6: -2, 7: 3}, 0, {2}),
        ({5: -1, 6: 2, 8: restore(5)}, 0, {1, 2}),
    ],
)
def test_the_replays_without_rows_are_known_by_the_commits(
    commits: Mapping[int, Any], first: int, removed: set[int]
) -> None:
    history = TableHistory(Scripted(commits, first), max(commits) + 1)  # type: ignore[arg-type]  # only what is used
    assert _numbers_without_rows(history, KEY) == removed
