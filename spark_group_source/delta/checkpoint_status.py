"""Status files in a query's checkpoint: a run's statistics, and drain requests from commands on other hosts.

Runs in: the user's driver, on one thread for each run and group that has written a batch (:func:`start_reporting`); the
command line (:func:`drain`, :func:`last_status`). Deliberately absent: what a drain is
(:mod:`spark_group_source.host.run_files`; on the driver's host its files are faster), and Spark Connect, whose workers
cannot use Spark's file systems.

A stream reader is a Python process without Spark's file systems, and Spark does not report the checkpoint to a source.
The sink has both, so the status files exist from a run's first batch on. ``<checkpoint>/_spark_group`` has two files
for each group of the query:

- ``<group>.run.json``: the statistics of the run, with its name, which no other run has; renewed when they change;
- ``<group>.drain.json``: a request that the run of that name drains. A request for another run is stale. A drained run
  reports the id of the request, because the status of a run that has ended remains.
"""

import contextlib
import json
import logging
import socket
import threading
import time
import uuid
from typing import Any, NamedTuple
from urllib.parse import quote

from spark_group_source.delta.checkpoint import CheckpointFiles
from spark_group_source.errors import GroupError
from spark_group_source.host import run_files

log = logging.getLogger(__name__)

FOLDER = "_spark_group"
POLL_S = 15.0
"""How often a run renews its status and checks for a request: each is a request to an object store."""
DRAINING_POLL_S = 0.5
"""How often a run that drains checks the files of its own host, to report the end of the drain at once."""
WAITING_POLL_S = 1.0
"""How often a command that waits reads the status."""
FAILED_POLLS_MAX = 5
"""After so many failures in a row a run stops reporting: the file system is unreachable, or not writable."""
READS_MAX = 20
"""How often a file is read until it is complete: most file systems replace it in two steps."""
READ_AGAIN_S = 0.25
"""The pause between two of these reads."""
WRITERS = {
    "run": f"the query writes it within {POLL_S:.0f} s, so run the command again, and delete the file if that does not "
    "help",
    "drain": "a drain command writes it, and was interrupted, so drain the query again",
}
"""What writes a file of each kind, and what to do if it stays incomplete."""


class StatusFiles(NamedTuple):
    """The status files in one checkpoint."""

    files: CheckpointFiles
    root: str
    """The query's ``checkpointLocation``."""

    def read(self, group: str, kind: str) -> dict[str, Any] | None:
        """Return the file of kind "run" or "drain"; None if it does not exist.

        Raises:
            GroupError: it stayed incomplete for READS_MAX reads.
        """
        path, reads = self.path(group, kind), 0
        while (text := self.files.read(path)) is not None:
            with contextlib.suppress(ValueError):  # another process is writing the file
                doc: dict[str, Any] = json.loads(text)
                return doc
            reads += 1
            if reads == READS_MAX:
                raise GroupError(
                    f"{path} stays incomplete ({len(text)} characters); {WRITERS[kind]}",
                    group=group,
                )
            threading.Event().wait(READ_AGAIN_S)
        return None

    def write(self, group: str, kind: str, doc: dict[str, Any]) -> None:
        """Replace the file of kind "run" or "drain". In most file systems readers may see a part of it."""
        self.files.write(self.path(group, kind), json.dumps(doc))

    def path(self, group: str, kind: str) -> str:
        return f"{self.root.rstrip('/')}/{FOLDER}/{quote(group, safe='')}.{kind}.json"


# --- the run ---------------------------------------------------------------------------------------------------------

_lock = threading.Lock()
_reported: set[tuple[str, str]] = set()
"""The runs and groups for which a reporter was started."""


def start_reporting(run: str, group: str, stream: str, status: StatusFiles) -> None:
    """Report a run's statistics, and forward drain requests to it, until the run ends. A second call with the name of a
    run, which is new with every start, does nothing. Group and stream identify its statistics on this host."""
    if (run, group) in _reported:
        return
    doc = next((doc for doc in run_files.read(group) if doc["stream"] == stream), None)
    if doc is None:  # no run publishes its statistics on this host
        return
    with _lock:
        if (run, group) in _reported:
            return
        _reported.add((run, group))
    reporter = _StatusReporter(run, group, int(doc["pid"]), status)
    threading.Thread(target=reporter.report_until_end, name=f"spark-group status of {stream}", daemon=True).start()


class _StatusReporter:
    """Copies the statistics of one run to its checkpoint, and drain requests from there to the run."""

    def __init__(self, run: str, group: str, pid: int, status: StatusFiles) -> None:
        self._run, self._group, self._pid, self._status = run, group, pid, status
        self._reported: dict[str, Any] = {}
        """The statistics that were written last."""
        self._is_drain_requested = False

    def report_until_end(self) -> None:
        """Poll until the run ends, or FAILED_POLLS_MAX polls in a row failed."""
        failures, pause = 0, threading.Event()
        while failures < FAILED_POLLS_MAX and (doc := self._statistics()) is not None:
            try:
                self.poll(doc)
                failures = 0
            except Exception as exc:  # noqa: BLE001 - of Spark, Hadoop or py4j: no reason to stop a query
                failures += 1
                log.log(
                    logging.WARNING if failures == FAILED_POLLS_MAX else logging.DEBUG,
                    "group %s: the run's status cannot be written to the checkpoint: %s; drain it on its driver's host",
                    self._group,
                    str(exc).partition("\n")[0],
                )
            pause.wait(DRAINING_POLL_S if self._is_drain_requested and not doc["drained"] else POLL_S)

    def _statistics(self) -> dict[str, Any] | None:
        """Return what the run publishes on this host; None if it ended."""
        return next((doc for doc in run_files.read(self._group) if doc["pid"] == self._pid), None)

    def poll(self, doc: dict[str, Any]) -> None:
        """Write the statistics if they changed, and forward or answer a drain request."""
        if self._is_drain_requested and not doc["drained"]:  # waits for the end of the drain
            return
        request = self._request()
        is_requested = request.get("run") == self._run
        doc = {**doc, "answered": request.get("id") if is_requested and doc["drained"] else None}
        if doc != self._reported:
            more = {"run": self._run, "host": socket.gethostname(), "now_ms": time.monotonic_ns() // 1_000_000}
            self._status.write(self._group, "run", {**doc, **more, "written_ms": int(time.time() * 1000)})
            self._reported = doc
        if is_requested and not doc["drained"]:
            run_files.request_drain(self._pid)
            self._is_drain_requested = True

    def _request(self) -> dict[str, Any]:
        """Return the drain request; empty if there is none, or only a part: its command was killed."""
        try:
            return self._status.read(self._group, "drain") or {}
        except GroupError as exc:
            log.debug("group %s: no drain request: %s", self._group, exc)
            return {}


# --- commands --------------------------------------------------------------------------------------------------------


def last_status(status: StatusFiles, group: str) -> dict[str, Any]:
    """Return what the newest run of a query reported. Raises GroupError if none reported to this checkpoint."""
    doc = status.read(group, "run")
    if doc is None:
        raise GroupError(
            f"{status.root} has no status of a run in group {group!r}. It must be the checkpointLocation of a query "
            "that writes with DeltaSink, not on Spark Connect, and that has written a batch since it was started",
            group=group,
        )
    return doc


def drain(status: StatusFiles, group: str, *, timeout_s: float) -> int:
    """Request that the run of a checkpoint drains, and wait until it has.

    Raises:
        GroupError: there is no run, or it did not drain in time: it may have ended, drained by an earlier request.
    """

    doc, id_ = last_status(status, group), uuid.uuid4().hex

    def runs() -> dict[str, dict[str, Any]]:
        nonlocal doc
        doc = status.read(group, "run") or doc  # None: some file systems replace a file by deleting it first
        return {doc["run"]: {**doc, "drained": doc["drained"] and doc.get("answered") == id_}}

    def request(run: str) -> None:
        status.write(group, "drain", {"run": run, "id": id_})

    return run_files.drain_runs(group, runs, request, poll_s=WAITING_POLL_S, timeout_s=timeout_s)
