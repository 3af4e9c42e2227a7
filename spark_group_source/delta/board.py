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
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from spark_group_source.delta import checkpoint
from spark_group_source.errors import GroupError
from spark_group_source.host import runs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

FOLDER = "_spark_group"
RUN, REQUEST = "run", "drain"
LOOK_S = 2.0
"""How often a run looks for a request."""
SAY_EVERY_S = 10.0
"""How often a run renews what it says, if that changed; that it is drained it says at once."""
FAILED_LOOKS_MAX = 30
"""Looks in a row that may fail before a run says no more: the file system is away, or not writable."""


class Place(NamedTuple):
    """Where notices are: ``read`` gives None where there is no such file; ``write`` replaces one."""

    read: Callable[[str], str | None]
    write: Callable[[str, str], None]


def place_of(spark: "SparkSession", root: str) -> Place:
    """The notices in a checkpoint, through Spark's file systems."""
    folder = f"{root.rstrip('/')}/{FOLDER}"
    return Place(
        lambda name: checkpoint.read(spark, f"{folder}/{name}"),
        lambda name, text: checkpoint.write(spark, f"{folder}/{name}", text),
    )


def on_this_machine(root: Path) -> Place:
    """The notices in a checkpoint that Python can reach. Nobody reads half of what is written here."""
    folder = root / FOLDER

    def read(name: str) -> str | None:
        try:
            return (folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def write(name: str, text: str) -> None:
        part = folder / f".{name}.{os.getpid()}.part"
        part.write_text(text, encoding="utf-8")
        part.replace(folder / name)

    return Place(read, write)


_lock = threading.Lock()
_kept: set[tuple[str, str]] = set()
"""The runs and groups whose notices a thread keeps, or kept."""


def keep(run: str, group: str, stream: str, place: Callable[[], Place]) -> None:
    """Say what a run does, and hear who asks it to drain, until it ends. A second call for it does nothing.

    Args:
        run: its name.
        group, stream: whose statistics of this host are the run's.
    """
    if (run, group) in _kept:
        return
    doc = next((doc for doc in runs.read(group) if doc["stream"] == stream), None)
    if doc is None:  # nothing is published on this host
        return
    with _lock:
        if (run, group) in _kept:
            return
        _kept.add((run, group))
    watch = _Watch(run, group, int(doc["pid"]), place)
    threading.Thread(target=watch.until_it_ends, name=f"spark-group notices of {stream}", daemon=True).start()


class _Watch:
    def __init__(self, run: str, group: str, pid: int, place: Callable[[], Place]) -> None:
        self._run, self._group, self._pid, self._place = run, group, pid, place
        self._said, self._said_s = "", -math.inf
        self._pause = threading.Event()

    def until_it_ends(self) -> None:
        failed = 0
        while failed < FAILED_LOOKS_MAX and (doc := self._statistics()) is not None:
            try:
                self._look(doc)
                failed = 0
            except Exception as exc:  # noqa: BLE001 - Spark's, Hadoop's or py4j's: no reason to end a query
                failed += 1
                log.log(
                    logging.WARNING if failed == FAILED_LOOKS_MAX else logging.DEBUG,
                    "notices of group %s cannot be kept in the checkpoint: %s. Drain it on the driver's host",
                    self._group,
                    str(exc).partition("\n")[0],
                )
            self._pause.wait(LOOK_S)

    def _statistics(self) -> dict[str, Any] | None:
        """Of the run on this host, as long as it lives."""
        return next((doc for doc in runs.read(self._group) if doc["pid"] == self._pid), None)

    def _look(self, doc: dict[str, Any]) -> None:
        place = self._place()
        text = json.dumps(doc)
        if text != self._said and (doc["drained"] or time.monotonic() - self._said_s >= SAY_EVERY_S):
            more = {"run": self._run, "host": socket.gethostname(), "now_ms": time.monotonic_ns() // 1_000_000}
            place.write(name_of(self._group, RUN), json.dumps({**doc, **more, "written_ms": int(time.time() * 1000)}))
            self._said, self._said_s = text, time.monotonic()
        asked = _parsed(place.read(name_of(self._group, REQUEST)))
        if asked is not None and asked.get("run") == self._run and not doc["drained"]:
            runs.ask_to_drain(self._pid)


def name_of(group: str, what: str) -> str:
    """The name of a notice's file."""
    return f"{quote(group, safe='')}.{what}.json"


def run_name(run_id: str) -> str:
    """The name of a run of a query; ``run_id`` is Spark's, new with every start."""
    return f"{run_id}-{os.getpid()}"


def last(place: Place, where: str, group: str) -> dict[str, Any]:
    """What the last run of a query said.

    Raises:
        GroupError: none ever said anything here.
    """
    doc = _parsed(place.read(name_of(group, RUN)))
    if doc is None:
        raise GroupError(
            f"{where} has no notice of a run in group {group!r}. It must be the checkpointLocation of a query that "
            "writes with DeltaSink, not on Spark Connect, and has written a batch since it was started",
            group=group,
        )
    return doc


def drain(place: Place, where: str, *, group: str, timeout_s: float) -> dict[str, Any]:
    """Ask the run of a checkpoint to finish its batch and begin no other, and wait until it has.

    Raises:
        GroupError: there is no run, or it did not say in time that it is drained.
    """
    doc = last(place, where, group)
    run = doc["run"]
    place.write(name_of(group, REQUEST), json.dumps({"run": run}))
    deadline_s, pause = time.monotonic() + timeout_s, threading.Event()
    while not doc["drained"]:
        if time.monotonic() > deadline_s:
            age_s = time.time() - doc["written_ms"] / 1000
            raise GroupError(
                f"the query of group {group!r} on host {doc['host']}, process {doc['pid']}, did not say within "
                f"{timeout_s:.0f} s that it is drained; it last said anything {age_s:.0f} s ago. If it runs, it drains "
                "when its batch ends: ask again, with more time. If it does not run, there is nothing to drain",
                group=group,
            )
        pause.wait(LOOK_S / 4)
        found = _parsed(place.read(name_of(group, RUN)))
        if found is not None and found["run"] != run:
            raise GroupError(f"the query of group {group!r} was started again meanwhile: ask again", group=group)
        doc = found or doc
    return doc


def _parsed(text: str | None) -> dict[str, Any] | None:
    """A notice; None where there is none, or half of one."""
    try:
        doc = json.loads(text or "null")
    except ValueError:
        return None
    return doc if isinstance(doc, dict) else None
