"""What a run did, where others can see it: one log line a change, and a small file on the driver's host.

Runs in: the stream reader (writes), the user's driver and the CLI (read). Deliberately absent: counting (``group``).
The file is named after the run's process and holds nothing but the numbers of
:class:`~spark_group_source.group.statistics.Statistics`; it is removed when the run ends in order. A second file beside
it, which others make, asks the run to drain.
"""

import contextlib
import json
import logging
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from spark_group_source.errors import GroupError
from spark_group_source.group.statistics import Statistics

log = logging.getLogger(__name__)

DIRECTORY = "spark-group-source"
DRAIN = ".drain"
READ_FILES_MAX = 1_000
"""Runs of one host that :func:`read` looks at."""
DRAIN_S = 60.0
"""How long :func:`drain` waits unless told otherwise: a batch and its commit."""
LOOK_S = 0.1


def directory() -> Path:
    """Where the runs of this host and user publish."""
    return Path(tempfile.gettempdir()) / f"{DIRECTORY}-{os.getuid()}"


class Publisher:
    """Writes a run's statistics whenever they change. Failing to write is no reason to stop: it is said once."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._last: Statistics | None = None
        self._path = directory() / f"{os.getpid()}.json"
        self._asked = self._path.with_suffix(DRAIN)
        self._drained = self._broken = False
        self.close()  # what a process of the same number left

    @property
    def drain_asked(self) -> bool:
        """Whether somebody wants this run to plan no other batch."""
        return self._asked.exists()

    def publish(self, statistics: Statistics, *, drained: bool = False) -> None:
        if (statistics, drained) == (self._last, self._drained) or self._broken:
            return
        if self._last is None or statistics.rebalances != self._last.rebalances:
            log.info(
                "group %s: %s; generation %d, partitions by slot %s, %d rebalances, longest hold %d ms, %d lost",
                self._group,
                statistics.reason or "joining",
                statistics.generation,
                list(statistics.assigned),
                statistics.rebalances,
                statistics.hold_max_ms,
                statistics.lost,
            )
        self._last, self._drained = statistics, drained
        doc = {"pid": os.getpid(), "driver": os.getppid(), "drained": drained, **statistics.as_dict()}
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps(doc))
            part.replace(self._path)
        except OSError as exc:
            self._broken = True
            log.warning("statistics cannot be written to %s: %s", self._path, exc)

    def close(self) -> None:
        for path in (self._path, self._asked):
            with contextlib.suppress(OSError):
                path.unlink()


def read(group: str) -> list[dict[str, Any]]:
    """The statistics of this host's living runs of one group."""
    found = []
    paths = sorted(directory().glob("*.json"))[:READ_FILES_MAX] if directory().is_dir() else []
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            doc = json.loads(path.read_text())
            if doc.get("group") == group and _alive(int(doc["pid"])):
                found.append(doc)
    return found


def snapshot(group: str, stream: str) -> Statistics | None:
    """The statistics of one stream, if it runs on this host; of several runs of it, the one that got furthest."""
    found = [Statistics.from_dict(doc) for doc in read(group) if doc["stream"] == stream]
    return max(found, key=lambda statistics: statistics.seq, default=None)


def drain(group: str, *, driver: int | None = None, timeout_s: float = DRAIN_S) -> int:
    """Let this host's queries of a group finish the batch in hand and begin no other, and wait until they have.

    What they have read is then in the sink and its offsets are at Kafka, so whoever reads on begins exactly there: stop
    the queries now. A query that is stopped without this may have a batch in the sink that Kafka learns of only at its
    next start. A drained query is still in the group and reads nothing until it is stopped and started again.

    Args:
        group: the consumer group.
        driver: only the queries of the driver JVM with this process id.
        timeout_s: the longest wait.

    Returns:
        How many queries were drained.

    Raises:
        GroupError: this host has no such query, or one did not end its batch in time; it drains when it does.
    """
    runs = [doc["pid"] for doc in read(group) if driver in (None, doc["driver"])]
    if not runs:
        raise GroupError(
            f"no query of group {group!r} runs on this host; drain it on the host of its driver", group=group
        )
    for pid in runs:
        (directory() / f"{pid}{DRAIN}").touch()
    deadline_s = time.monotonic() + timeout_s
    pause = threading.Event()
    while late := [doc["pid"] for doc in read(group) if doc["pid"] in runs and not doc["drained"]]:
        if time.monotonic() > deadline_s:
            raise GroupError(
                f"the query of group {group!r} in process {late[0]} did not end its batch within {timeout_s:.0f} s; it "
                "drains when it does. Ask again, with more time",
                group=group,
            )
        pause.wait(LOOK_S)
    return len(runs)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
