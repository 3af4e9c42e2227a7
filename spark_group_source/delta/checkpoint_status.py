"""A query's notices in its checkpoint: what it does, for whoever cannot look at its driver's host, and who asks it to
drain.

Runs in: the user's driver, on a thread of its own for each run that has written a batch (:func:`keep`); the command
line (:func:`drain`, :func:`last`). Deliberately absent: what a drain is (``host.runs``; the files of the driver's host
stay the quick way), and Spark Connect, whose workers reach no file system of Spark's.

Spark does not tell a source where its checkpoint is, and a stream reader is a Python process without Spark's file
systems. The sink knows both, so the notices begin with a run's first batch. Two files in ``<checkpoint>/_spark_group``
for each group that the query is in:

- ``<group>.run.json``: the statistics of the run, and its name, which no other run has; renewed when they change;
- ``<group>.drain.json``: somebody asks the run of that name to drain. A request to any other run is stale.
"""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from spark_group_source.delta.checkpoint import Files, by_spark
from spark_group_source.errors import GroupError
from spark_group_source.host import run_files

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

FOLDER = "_spark_group"
LOOK_S = 15.0
"""How often a run looks for a request and renews its notice: each is a request to an object store."""
DRAINING_LOOK_S = 0.5
"""How often it looks at its own host's files once it was asked: that it is drained it says at once."""
ASKING_LOOK_S = 1.0
"""How often a command that waits looks at the notice."""
FAILED_LOOKS_MAX = 5
"""Looks in a row that may fail before a run says no more: the file system is away, or not writable."""


class Notices(NamedTuple):
    """The notices in a checkpoint."""

    files: Files
    root: str
    """The query's ``checkpointLocation``."""

    def read(self, group: str, what: str) -> dict[str, Any] | None:
        """The notice "run" or "drain"; None where there is none, or half of one."""
        try:
            doc = json.loads(self.files.read(self.path(group, what)) or "null")
        except ValueError:
            return None
        return doc if isinstance(doc, dict) else None

    def write(self, group: str, what: str, doc: dict[str, Any]) -> None:
        self.files.write(self.path(group, what), json.dumps(doc))

    def path(self, group: str, what: str) -> str:
        return f"{self.root.rstrip('/')}/{FOLDER}/{quote(group, safe='')}.{what}.json"


def place_of(spark: "SparkSession", root: str) -> Notices:
    """The notices in a checkpoint, through Spark's file systems."""
    return Notices(by_spark(spark), root)


# --- the run ---------------------------------------------------------------------------------------------------------

_lock = threading.Lock()
_kept: set[tuple[str, str]] = set()
"""The runs and groups whose notices a thread keeps, or kept."""


def run_name(run_id: str) -> str:
    """The name of a run of a query; ``run_id`` is Spark's, new with every start."""
    return f"{run_id}-{os.getpid()}"


def keep(run: str, group: str, stream: str, place: Callable[[], Notices]) -> None:
    """Say what a run does, and hear who asks it to drain, until it ends. A second call for it does nothing.

    Args:
        run: its name.
        group, stream: whose statistics of this host are the run's.
    """
    if (run, group) in _kept:
        return
    doc = next((doc for doc in run_files.read(group) if doc["stream"] == stream), None)
    if doc is None:  # nothing is published on this host
        return
    with _lock:
        if (run, group) in _kept:
            return
        _kept.add((run, group))
    watch = _Watch(run, group, int(doc["pid"]), place)
    threading.Thread(target=watch.until_it_ends, name=f"spark-group notices of {stream}", daemon=True).start()


class _Watch:
    def __init__(self, run: str, group: str, pid: int, place: Callable[[], Notices]) -> None:
        self._run, self._group, self._pid, self._place = run, group, pid, place
        self._said: dict[str, Any] = {}
        self._asked = False

    def until_it_ends(self) -> None:
        failed, pause = 0, threading.Event()
        while failed < FAILED_LOOKS_MAX and (doc := self._statistics()) is not None:
            try:
                self.look(doc)
                failed = 0
            except Exception as exc:  # noqa: BLE001 - Spark's, Hadoop's or py4j's: no reason to end a query
                failed += 1
                log.log(
                    logging.WARNING if failed == FAILED_LOOKS_MAX else logging.DEBUG,
                    "group %s: notices cannot be kept in the checkpoint: %s. Drain it on the driver's host",
                    self._group,
                    str(exc).partition("\n")[0],
                )
            pause.wait(DRAINING_LOOK_S if self._asked and not doc["drained"] else LOOK_S)

    def _statistics(self) -> dict[str, Any] | None:
        """Of the run on this host, as long as it lives."""
        return next((doc for doc in run_files.read(self._group) if doc["pid"] == self._pid), None)

    def look(self, doc: dict[str, Any]) -> None:
        """Renew the notice with these statistics, and pass a request on."""
        if self._asked and not doc["drained"]:  # between two of its usual looks
            return
        place = self._place()
        if doc != self._said:
            more = {"run": self._run, "host": socket.gethostname(), "now_ms": time.monotonic_ns() // 1_000_000}
            place.write(self._group, "run", {**doc, **more, "written_ms": int(time.time() * 1000)})
            self._said = doc
        asked = place.read(self._group, "drain")
        if asked is not None and asked.get("run") == self._run and not doc["drained"]:
            run_files.ask_to_drain(self._pid)
            self._asked = True


# --- whoever asks ----------------------------------------------------------------------------------------------------


def last(place: Notices, group: str) -> dict[str, Any]:
    """What the last run of a query said.

    Raises:
        GroupError: none ever said anything here.
    """
    doc = place.read(group, "run")
    if doc is None:
        raise GroupError(
            f"{place.root} has no notice of a run in group {group!r}. It must be the checkpointLocation of a query "
            "that writes with DeltaSink, not on Spark Connect, and has written a batch since it was started",
            group=group,
        )
    return doc


def drain(place: Notices, group: str, *, timeout_s: float) -> int:
    """Ask the run of a checkpoint to finish its batch and begin no other, and wait until it has.

    Raises:
        GroupError: there is no run, or it did not say in time that it is drained.
    """

    doc = last(place, group)

    def found() -> dict[str, dict[str, Any]]:
        nonlocal doc
        doc = place.read(group, "run") or doc  # None: it is just written
        return {doc["run"]: doc}

    def ask(run: str) -> None:
        place.write(group, "drain", {"run": run})

    return run_files.drain_at(run_files.Place(found, ask, ASKING_LOOK_S), group, timeout_s=timeout_s)
