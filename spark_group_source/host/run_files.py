"""What a run did, where others can see it: one log line a change, and small files on the driver's host.

Runs in: the stream reader and the user's driver (both write), the CLI (reads). Deliberately absent: counting
(``group``). All files are in one directory of the user's, which only a run makes. In its place may be a directory or a
link of somebody else's, because everybody can write to the temporary folder: then nothing is written, removed or
believed there, and the log says so. The files:

- ``<pid>.json``: the numbers of :class:`spark_group_source.protocol.statistics.Statistics` of the run in that process;
- ``<pid>.drain``: somebody asks that run to drain;
- ``<load>.load``: locked by the stream of that ``load()``;
- ``<stream>.durable``: the last batch of a stream that a sink says it has. Spark tells a source of a batch only when it
  asks for the next one, so of the last batch of a run nobody else tells it.

A run removes all of its files when it ends in order.
"""

import contextlib
import fcntl
import functools
import json
import logging
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NamedTuple

from spark_group_source.errors import GroupError, OptionError
from spark_group_source.protocol.statistics import Statistics

log = logging.getLogger(__name__)

DRAIN = ".drain"
DURABLE = ".durable"
READ_FILES_MAX = 1_000
"""Runs of one host that :func:`read` looks at."""
DRAIN_S = 60.0
"""How long :func:`drain` waits unless told otherwise: a batch and its commit."""
LOOK_S = 0.1
_WITHOUT = (
    "No statistics are written or read there, queries cannot be drained, and one that is stopped cannot tell what its "
    "sink has. Remove it, or set TMPDIR to a folder of this user's for the driver and for spark-group"
)
PID_DIGITS_MAX = 20


def mark_durable(stream: str, seq: int) -> None:
    """Say that a sink has a stream's batch, for the run to read when it ends. Nothing is said where no run of this user
    publishes; never raises, because the batch is safe either way."""
    if not stream.isalnum():  # it becomes a file's name
        return
    with contextlib.suppress(OSError):
        if _usable():
            write(directory() / f"{stream}{DURABLE}", str(seq))


def durable_seq(stream: str) -> int:
    """Number of the last batch of a stream that a sink says it has; -1: nothing was said.

    It may be what a run before this one was told: compare it with the batch that is in flight.
    """
    with contextlib.suppress(OSError, ValueError):
        if stream.isalnum() and _usable():
            return int((directory() / f"{stream}{DURABLE}").read_text())
    return -1


class Load:
    """The stream of one ``load()``: two that run at the same time would share the group's partitions without a word.

    Held by a lock on a small file, which the system lets go when the process ends, however that happens.

    Args:
        load: the name of the ``load()``.
    """

    def __init__(self, load: str) -> None:
        self._path = directory() / f"{load}.load"
        self._file: IO[str] | None = None

    def hold(self, *, wait_s: float) -> None:
        """Wait until no other process holds it. Where this host's files cannot be used, nothing is held.

        Raises:
            OptionError: another stream of the same ``load()`` still runs after ``wait_s``.
        """
        deadline_s, pause = time.monotonic() + wait_s, threading.Event()
        while (other := self._holder()) is not None:
            if time.monotonic() > deadline_s:
                raise OptionError(
                    f"another stream of the same load() runs in process {other}, as in a self-join or in two queries "
                    "of one DataFrame: each would have a part of the group's records. Each stream needs its own "
                    "load(), and a kafka.group.id of its own if it is to read all records"
                )
            pause.wait(LOOK_S)

    def release(self) -> None:
        """Let another stream have it."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None

    def _holder(self) -> str | None:
        """The process that holds it; None: this one does, or nobody can."""
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            if not _usable():
                return None
            file = os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+")
        except OSError as exc:
            log.warning("whether another stream of the same load() runs cannot be seen: %s", exc)
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_ino == self._path.stat().st_ino:
                file.write(str(os.getpid()))
                file.flush()
                self._file = file
                return None
            other = "unknown"  # its holder has just removed the file
        except FileNotFoundError:
            other = "unknown"
        except OSError:
            other = file.read(PID_DIGITS_MAX) or "unknown"
        file.close()
        return other


class Publisher:
    """Writes a run's statistics whenever they change. Failing to write is no reason to stop: it is said when it begins
    and when it ends."""

    def __init__(self, group: str) -> None:
        self._group = group
        self.last: Statistics | None = None
        """What was published last."""
        self.metrics_port = 0
        """Where the run serves Prometheus; 0: it does not."""
        self._path = directory() / f"{os.getpid()}.json"
        self._asked = self._path.with_suffix(DRAIN)
        self._written: tuple[Statistics, bool] | None = None
        self._closed = self._failing = False
        self._remove()  # what a process of the same number left

    @property
    def drain_asked(self) -> bool:
        """Whether somebody wants this run to plan no other batch."""
        return _usable() and self._asked.exists()

    def publish(self, statistics: Statistics, *, drained: bool = False) -> None:
        statistics = replace(statistics, metrics_port=self.metrics_port)
        if self._closed or (statistics, drained) == self._written:
            return
        if self.last is None or statistics.rebalances != self.last.rebalances:
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
        self.last = statistics
        doc = {"pid": os.getpid(), "driver": os.getppid(), "drained": drained, **statistics.as_dict()}
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            if _usable():
                write(self._path, json.dumps(doc))
        except OSError as exc:
            if not self._failing:
                log.warning("statistics cannot be written to %s, and are tried again: %s", self._path, exc)
            self._failing = True
            return
        if self._failing:
            log.warning("statistics are written to %s again", self._path)
        self._failing, self._written = False, (statistics, drained)

    def durable_seq(self, stream: str) -> int:
        """What :func:`durable_seq` says."""
        return durable_seq(stream)

    def close(self) -> None:
        """Remove what this run left; nothing is written after that."""
        self._closed = True
        self._remove()

    def _remove(self) -> None:
        if not _usable():
            return
        stream = self.last.stream if self.last is not None else ""
        for path in (self._path, self._asked, *([directory() / f"{stream}{DURABLE}"] if stream.isalnum() else [])):
            with contextlib.suppress(OSError):
                path.unlink()


def read(group: str) -> list[dict[str, Any]]:
    """The statistics of this host's living runs of one group."""
    found = []
    paths = sorted(directory().glob("*.json"))[:READ_FILES_MAX] if _usable() else []
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


def ask_to_drain(pid: int) -> None:
    """Ask the run in that process of this host to finish its batch and begin no other."""
    (directory() / f"{pid}{DRAIN}").touch()


class Place(NamedTuple):
    """Where runs of a group publish, and are asked to drain."""

    runs: Callable[[], dict[str, dict[str, Any]]]
    """What the runs published last, by the run's name."""
    ask: Callable[[str], None]
    """Ask the run of that name to finish its batch and begin no other."""
    look_s: float
    """From one look to the next."""


def drain_at(place: Place, group: str, *, timeout_s: float) -> int:
    """Ask the runs of a place to finish their batch and begin no other, and wait until they have.

    Returns:
        How many runs were drained.

    Raises:
        GroupError: a run did not say in time that it is drained, or another one was started meanwhile.
    """
    asked = place.runs()
    for name in asked:
        place.ask(name)
    deadline_s, pause = time.monotonic() + timeout_s, threading.Event()
    while True:
        found = place.runs()
        if found.keys() - asked.keys():
            raise GroupError(f"a query of group {group!r} was started again meanwhile: ask again", group=group)
        late = [doc for doc in found.values() if not doc["drained"]]
        if not late:
            return len(asked)
        if time.monotonic() > deadline_s:
            at = f"in process {late[0]['pid']}"
            if "written_ms" in late[0]:  # else it is a process of this host, which lives
                age_s = time.time() - late[0]["written_ms"] / 1000
                at += f" on host {late[0]['host']}, whose last notice is {age_s:.0f} s old,"
            raise GroupError(
                f"the query of group {group!r} {at} did not end its batch within {timeout_s:.0f} s. If it runs, it "
                "drains when the batch ends: ask again, with more time",
                group=group,
            )
        pause.wait(place.look_s)


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
        GroupError: this host has no such query, or one did not end its batch in time; it drains when it does. Or
            queries cannot be asked here, because somebody else has the place of the files.
    """
    if found := trouble(directory()):
        raise GroupError(f"{found}. {_WITHOUT}", group=group)

    def here() -> dict[str, dict[str, Any]]:
        return {str(doc["pid"]): doc for doc in read(group) if driver in (None, doc["driver"])}

    if not here():
        raise GroupError(
            f"no query of group {group!r} runs on this host. Drain it on the host of its driver, or with --checkpoint; "
            "spark-group describe says where its members are",
            group=group,
        )
    return drain_at(Place(here, lambda pid: ask_to_drain(int(pid)), LOOK_S), group, timeout_s=timeout_s)


def _usable() -> bool:
    """Whether the directory is there and this user's alone; once for each reason the log says why it is not."""
    if found := trouble(directory()):
        _say_once(f"{found}. {_WITHOUT}")
        return False
    return directory().exists()


@functools.cache
def _say_once(text: str) -> None:
    log.warning("%s", text)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


# --- the directory ---------------------------------------------------------------------------------------------------


def directory() -> Path:
    """Where the processes of this host and user publish."""
    return Path(tempfile.gettempdir()) / f"spark-group-source-{os.getuid()}"


def trouble(folder: Path) -> str:
    """Why this directory must not be used: /tmp is everybody's. Empty if nothing speaks against it, or nothing is
    there."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return ""
    except OSError as exc:
        return f"{folder} cannot be looked at ({exc})"
    if not stat.S_ISDIR(status.st_mode):
        found = "it is a link" if stat.S_ISLNK(status.st_mode) else "it is not a directory"
    elif status.st_uid != os.getuid():
        found = f"it belongs to user {status.st_uid}"
    elif status.st_mode & 0o022:
        found = f"others can write to it (mode {stat.S_IMODE(status.st_mode):o})"
    else:
        return ""
    return f"{folder} is not this user's alone: {found}"


def write(path: Path, text: str) -> None:
    """Write a small file so that nobody reads half of it."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
