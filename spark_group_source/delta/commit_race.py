"""Retries a commit that lost a race against another writer of the table.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``), the command line.
Deliberately absent: what a commit holds.
"""

import logging
import random
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from pyspark.errors import PySparkException

from spark_group_source.errors import LedgerConflict

log = logging.getLogger(__name__)

COMMIT_ATTEMPTS_MAX = 30
"""How often a commit is attempted; each lost race means that another writer made progress."""

RACE_WAIT_MAX_S = 0.5
"""Longest wait between two attempts, in seconds. They are random, so that writers of one table do not collide again."""

_RACE_CONDITIONS = ("DELTA_CONCURRENT_", "DELTA_METADATA_CHANGED", "DELTA_PROTOCOL_CHANGED")
"""Prefixes of the error conditions by which Delta reports a concurrent commit."""

_T = TypeVar("_T")


class CommitRace(Exception):
    """Another writer committed what this commit read or writes; decide again from the table's new version."""


def retry_races(attempt: Callable[[], _T], *, what: str) -> _T:
    """Run ``attempt`` again while it raises :class:`CommitRace`, at most COMMIT_ATTEMPTS_MAX times in all.

    Args:
        what: what is committed; it starts log lines and the error.

    Raises:
        LedgerConflict: every attempt lost its race.
    """
    last_race: CommitRace | None = None
    for n in range(1, COMMIT_ATTEMPTS_MAX + 1):
        try:
            return attempt()
        except CommitRace as exc:
            last_race = exc
            log.info("%s: another writer committed first (attempt %d of %d)", what, n, COMMIT_ATTEMPTS_MAX)
            threading.Event().wait(random.uniform(0, RACE_WAIT_MAX_S * n / COMMIT_ATTEMPTS_MAX))
    raise LedgerConflict(
        f"{what} lost to concurrent writers {COMMIT_ATTEMPTS_MAX} times in a row; nothing was written. It is safe to "
        "start the query again. If the error returns, too many queries write this table: use longer trigger intervals"
    ) from last_race


def is_race(exc: Exception) -> bool:
    """Return whether Delta reports a concurrent commit.

    On classic Spark all such errors extend one class of the JDK, on Spark Connect they have a known error condition.
    """
    if isinstance(exc, PySparkException) and str(exc.getCondition() or "").startswith(_RACE_CONDITIONS):
        return True
    # Raised by py4j, or translated by PySpark if the delta package is imported.
    java: Any = getattr(exc, "java_exception", None) or getattr(exc, "_origin", None)
    while java is not None:
        kind = java.getClass()
        while kind is not None:
            if kind.getName() == "java.util.ConcurrentModificationException":
                return True
            kind = kind.getSuperclass()
        java = java.getCause()
    return False
