"""Commits that lose to somebody else's, and are tried again.

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
"""How often a commit that lost to another writer is tried again; each loss means that someone made progress."""

RACE_WAIT_MAX_S = 0.5
"""Longest wait between two attempts. Waits are random, so that writers of one table do not keep step."""

_RACES = ("DELTA_CONCURRENT_", "DELTA_METADATA_CHANGED", "DELTA_PROTOCOL_CHANGED")
"""How the conditions of Delta's errors about concurrent commits begin."""

_T = TypeVar("_T")


class CommitRace(Exception):
    """Another writer committed something that this transaction read or writes too. Begin again."""


def retry_races(attempt: Callable[[], _T], *, what: str) -> _T:
    """Run an attempt again while it loses races, at most COMMIT_ATTEMPTS_MAX times.

    Raises:
        LedgerConflict: every attempt lost. ``what`` opens the message.
    """
    lost: CommitRace | None = None
    for n in range(1, COMMIT_ATTEMPTS_MAX + 1):
        try:
            return attempt()
        except CommitRace as exc:
            lost = exc
            log.info("%s: another writer was first (attempt %d of %d)", what, n, COMMIT_ATTEMPTS_MAX)
            # An event that nobody sets: a wait with a bound.
            threading.Event().wait(random.uniform(0, RACE_WAIT_MAX_S * n / COMMIT_ATTEMPTS_MAX))
    raise LedgerConflict(
        f"{what} lost to concurrent writers {COMMIT_ATTEMPTS_MAX} times in a row; nothing was written. Restarting the "
        "query is safe. If it comes back, too many queries write this table: give each more time per batch"
    ) from lost


def is_race(exc: Exception) -> bool:
    """Whether Delta says that a concurrent commit got in the way; all such errors extend one class of the JDK. On Spark
    Connect their conditions tell."""
    if isinstance(exc, PySparkException) and str(exc.getCondition() or "").startswith(_RACES):
        return True
    # The exception is py4j's own, or PySpark's translation of it if the delta package is imported.
    java: Any = getattr(exc, "java_exception", None) or getattr(exc, "_origin", None)
    while java is not None:
        kind = java.getClass()
        while kind is not None:
            if kind.getName() == "java.util.ConcurrentModificationException":
                return True
            kind = kind.getSuperclass()
        java = java.getCause()
    return False
