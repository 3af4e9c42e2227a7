"""Run files: small files on the driver's host by which runs, sinks and the command line exchange state.

Runs in: the stream reader and the user's driver (both write), the command line (reads). Deliberately absent: counting
(:mod:`spark_group_source.protocol.statistics`), Kafka. The files are in one directory of the user, which only a run
creates:

- ``<host>-<namespace>-<pid>.json``: the run in that process: its
  :class:`~spark_group_source.protocol.statistics.Statistics`, its bootstrap servers, and whether it is drained.
  Hosts and containers may share the directory, and process ids are not unique then;
- ``<host>-<namespace>-<pid>.drain``: a request that this run drains;
- ``<load>.load``: locked by the stream of that ``load()``;
- ``<stream>.durable``: the durable mark: the number of the newest batch that the sink has, and a digest of its offset.
  Spark reports a batch as durable only when it requests the next one, a trigger later or never;
- ``<stream>.tables``: how many rows sinks wrote to each table;
- ``<stream>.committed``: the committed mark: the same of the last batch of a run that stopped when Kafka had all
  positions. A foreign commit below them is then a move back;
- ``<stream>.void``: the void mark: the numbers of the newest batch of which the sink wrote nothing, and of the reset
  that made it void. Kafka may show nothing of that reset.

A run removes its files when it stops normally, except for the last two, which the stream's next run may need; of a
killed run, the user's next one on this host removes the first two. The temporary folder is writable for every user, so
another user may have created a directory or a link of that name: then no file in it is written, removed or trusted, and
a warning is logged.
"""

import contextlib
import fcntl
import functools
import json
import logging
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from spark_group_source import command_line
from spark_group_source.errors import DrainTimeout, GroupError, OptionError
from spark_group_source.protocol.offsets import BatchKey, StreamOffset
from spark_group_source.protocol.states import RunState
from spark_group_source.protocol.statistics import Statistics

log = logging.getLogger(__name__)

DRAIN = ".drain"
DURABLE = ".durable"
COMMITTED = ".committed"
VOID = ".void"
TABLES = ".tables"
TABLES_MAX = 1_000
"""Of how many tables of a stream rows are counted."""
NO_MARK = BatchKey(-1, "")
DRAIN_S = 60.0
"""How long :func:`drain` waits by default: enough for a batch and its commit."""
COMMIT_S = 30.0
"""How long a sink waits until the offsets of a run's last batch are committed."""
POLL_S = 0.1
"""The interval at which a lock and the state of a drain are checked."""
_CONSEQUENCE = (
    "No statistics are written or read there, queries cannot be drained, and the last batch of a query that is stopped "
    "is committed at its next start only; a second stream of one load() is not detected. Set TMPDIR for the driver and "
    "for spark-group to a folder that this user can write to and other users cannot, or remove what is in the way"
)
ENDED_STATES = ("Z", "X")
"""States in proc(5) of a process that has ended and that its parent has not waited for yet."""
PID_DIGITS_MAX = 20
"""How much is read of the process id in a lock file."""


_write_lock = threading.Lock()
"""Held while a file is changed that several sinks of this process write to, on threads of their own."""


def mark_durable(offset: StreamOffset) -> None:
    """Write the durable mark of a stream: the sink has the batch that ends at ``offset``, in all of its tables.

    Does nothing where no run of this user publishes, and never raises: the batch is in the table either way. The mark
    of a later batch stays: a driver that was replaced replays an earlier one.
    """
    if not is_later(durable_mark(offset.stream), offset.seq):
        _mark(DURABLE, offset)


def is_later(mark: BatchKey, seq: int) -> bool:
    """Return whether a durable mark is of a later batch than ``seq``, and so of the run that has replaced this one: it
    is neither written over nor removed."""
    return mark.seq > seq


def mark_void(stream: str, seq: int, reset_number: int) -> None:
    """Write the void mark of a stream: the sink wrote nothing of its batch ``seq``, because of this reset.

    Tables of one query may have been reset one after the other: the mark has the last reset of those that made the
    batch void. Does nothing where no run of this user publishes, and never raises: the sink refuses the stream's next
    void batch.
    """
    with _write_lock, contextlib.suppress(OSError):
        write_atomically(_stream_file(stream, VOID), f"{seq} {max(reset_number, void_by(stream, seq))}")


def void_by(stream: str, seq: int) -> int:
    """Return the number of the reset that made batch ``seq`` void; 0 if no sink of this host reported one."""
    with contextlib.suppress(OSError, ValueError):
        marked, reset_number = map(int, _stream_file(stream, VOID).read_text().split())
        return reset_number if marked == seq else 0
    return 0


_table_rows: dict[str, dict[str, dict[str, int]]] = {}
"""What the sinks of this process wrote, by stream and table."""


def count_rows(stream: str, table: str, rows: Mapping[str, int]) -> None:
    """Add to the rows that sinks of this process wrote to a table, for the statistics of the stream's run.

    Does nothing where no run of this user publishes, and never raises.
    """
    with _write_lock, contextlib.suppress(OSError):
        path, tables = _stream_file(stream, TABLES), _table_rows.setdefault(stream, {})
        if table in tables or len(tables) < TABLES_MAX:
            known = tables.setdefault(table, {})
            known |= {name: known.get(name, 0) + count for name, count in rows.items()}
            write_atomically(path, json.dumps(tables))


def table_rows(stream: str) -> dict[str, dict[str, int]]:
    """Return the rows that sinks of this host wrote for a stream, by table."""
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, dict[str, int]] = json.loads(_stream_file(stream, TABLES).read_text())
        return found
    return {}


def durable_mark(stream: str) -> BatchKey:
    """Return the batch in a stream's durable mark, which an earlier run may have left; NO_MARK if there is none."""
    return _marked(stream, DURABLE)


def _mark(kind: str, offset: StreamOffset) -> None:
    with contextlib.suppress(OSError):
        seq, digest = BatchKey.of(offset)
        write_atomically(_stream_file(offset.stream, kind), f"{seq} {digest}")


def _marked(stream: str, kind: str) -> BatchKey:
    with contextlib.suppress(OSError, ValueError):
        seq, digest = _stream_file(stream, kind).read_text().split()
        return BatchKey(int(seq), digest)
    return NO_MARK


def _stream_file(stream: str, kind: str) -> Path:
    """The file of this kind of a stream. Raises FileNotFoundError where no run of this user publishes, and for a stream
    whose id is no name of a file."""
    if not (stream.isalnum() and _is_usable()):
        raise FileNotFoundError(f"stream {stream!r} has no run files")
    return directory() / f"{stream}{kind}"


class LoadLock:
    """Locks one ``load()`` for one stream. Two streams at a time would each read a part of the group's partitions only.

    A lock on a small file, which the operating system releases when the process ends.

    Args:
        load: the name of the ``load()``.
    """

    def __init__(self, load: str) -> None:
        self._path = directory() / f"{load}.load"
        self._file: IO[bytes] | None = None
        """The locked file; None: not locked by this object."""

    def acquire(self, *, wait_s: float) -> None:
        """Wait until no other process holds the lock, then acquire it. Locks nothing if run files cannot be used here.

        Raises:
            OptionError: another stream of the same ``load()`` still runs after ``wait_s`` seconds.
        """
        deadline_s, pause = time.monotonic() + wait_s, threading.Event()
        while (other := self._try_lock()) is not None:
            if time.monotonic() > deadline_s:
                raise OptionError(
                    f"another stream of the same load() runs in process {other}, as in a self-join or in two queries "
                    "of one DataFrame: each would read only a part of the group's records. Call load() for each "
                    "stream, with different kafka.group.id values if each is to read all records"
                )
            pause.wait(POLL_S)

    def release(self) -> None:
        """Release the lock."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None

    def _try_lock(self) -> str | None:
        """Try to acquire the lock. Returns the process that holds it, or "unknown"; None if this process holds it
        now, or if run files cannot be used."""
        if not _is_created():
            return None
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as exc:
            log.warning("cannot check whether another stream of the same load() runs: %s", exc)
            return None
        file = os.fdopen(fd, "r+b", buffering=0)  # on a full disk, closing a buffered one fails again
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_ino == self._path.stat().st_ino:
                file.truncate(0)  # a killed process leaves its id
                file.write(b"%d" % os.getpid())
                self._file = file
                return None
            other = "unknown"  # the other process has just removed the file
        except FileNotFoundError:
            other = "unknown"
        except BlockingIOError:
            other = file.read(PID_DIGITS_MAX).decode(errors="replace") or "unknown"
        except OSError as exc:  # the file system has no locks, or is full
            log.warning("cannot check whether another stream of the same load() runs: %s", exc)
            other = None
        file.close()
        return other


class Publisher:
    """Writes a run's statistics whenever they change. A run continues if they cannot be written.

    Args:
        to_brokers: the arguments with which commands connect, for those that errors print.
    """

    def __init__(self, group: str, to_brokers: command_line.Connection = ()) -> None:
        self._group, self._to_brokers = group, to_brokers
        self.last: Statistics | None = None
        """The newest statistics, written or not."""
        self.metrics_port = 0
        """The port on which the run serves Prometheus metrics; 0: none."""
        self._path = _run_file(os.getpid())
        self._process = {"pid": os.getpid(), "started": _started(os.getpid())}
        self._drain_request = self._path.with_suffix(DRAIN)
        self._written: tuple[Statistics, bool, int, bool] | None = None
        """What was written last."""
        self._is_closed = self._is_failing = self._is_drained = False
        self._remove()  # the files of an earlier process with the same pid
        _remove_killed()

    @property
    def is_drain_requested(self) -> bool:
        """Whether a command has requested that this run plans no further batch. A run continues if it cannot be read:
        the command reports that the run does not drain."""
        try:
            return _is_usable() and self._drain_request.exists()
        except OSError as exc:
            _warn_once(f"{self._drain_request} cannot be checked: {exc.strerror}. {_CONSEQUENCE}")
            return False

    def publish(
        self, statistics: Statistics, *, drained: bool = False, last_batch: int = -1, committed: bool = False
    ) -> None:
        """Write the run's state if it changed, and log a rebalance.

        Args:
            last_batch: the number of the batch in flight, if it may be the run's last one; -1 otherwise.
            committed: whether Kafka has the positions of all partitions.
        """
        tables = table_rows(statistics.stream)
        statistics = replace(statistics, metrics_port=self.metrics_port, tables=tables)
        state = (statistics, drained, last_batch, committed)
        if self._is_closed or state == self._written:
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
                statistics.partitions_lost,
            )
        if drained and not self._is_drained:
            log.info("group %s: drained: all offsets are committed, and no batch follows; stop the query", self._group)
        self.last, self._is_drained = statistics, drained
        run = {**self._process, "driver": os.getppid(), "connection": self._to_brokers}
        run |= {"drained": drained, "last_batch": last_batch, "committed": committed}
        try:
            if _is_created():
                write_atomically(self._path, json.dumps({**run, **statistics.as_dict()}))
        except OSError as exc:
            if not self._is_failing:
                log.warning(
                    "group %s: statistics cannot be written to %s: %s; trying again", self._group, self._path, exc
                )
            self._is_failing = True
            return
        if self._is_failing:
            log.warning("group %s: statistics are written to %s again", self._group, self._path)
        self._is_failing, self._written = False, state

    def durable_mark(self, stream: str) -> BatchKey:
        """Return the batch in a stream's durable mark; NO_MARK if there is none."""
        return durable_mark(stream)

    def committed_mark(self, stream: str) -> BatchKey:
        """Return the batch after which a run of the stream stopped with all offsets committed; NO_MARK if none did, or
        if it ran on another host."""
        return _marked(stream, COMMITTED)

    def void_by(self, stream: str, seq: int) -> int:
        """Return the number of the reset that made batch ``seq`` void for the sink; 0 if it reported none."""
        return void_by(stream, seq)

    def close(self, committed: StreamOffset | None = None, *, seq: int = -1) -> None:
        """Remove the files of this run; later statistics are not written.

        Args:
            committed: the offset of the last durable batch, if Kafka has the positions of all partitions.
            seq: the number of this run's last durable batch. The durable mark of a later one stays.
        """
        self._is_closed = True
        if committed is not None:
            _mark(COMMITTED, committed)
        self._remove()  # after that mark, by which a drain sees that nothing is left
        stream = self.last.stream if self.last is not None else ""
        for kind in (TABLES,) if is_later(durable_mark(stream), seq) else (TABLES, DURABLE):
            with contextlib.suppress(OSError):
                _stream_file(stream, kind).unlink()

    def _remove(self) -> None:
        if not _is_usable():
            return
        for path in (self._path, self._drain_request):
            with contextlib.suppress(OSError):
                path.unlink()


def read(group: str) -> list[dict[str, Any]]:
    """Return what the live runs of one group on this host publish: statistics, ``pid``, ``started``, ``driver``,
    ``connection``, ``drained``, ``last_batch``, ``committed``."""
    return [doc for doc in _published(group) if _is_alive(int(doc["pid"]), int(doc["started"]))]


def _published(group: str) -> list[dict[str, Any]]:
    """The same, with runs that were killed: a run that stops normally removes its file."""
    found = []
    for path in _run_file_paths():
        with contextlib.suppress(OSError, ValueError):
            doc = json.loads(path.read_text())
            if doc.get("group") == group and int(doc["pid"]) and "started" in doc:
                found.append(doc)
    return found


def _run_file(pid: int) -> Path:
    return directory() / f"{here()}-{pid}.json"


def _run_file_paths() -> list[Path]:
    """The files of the runs in this container; the processes of other ones are not seen from here."""
    return sorted(directory().glob(f"{here()}-*.json")) if _is_usable() else []


def _remove_killed() -> None:
    """Remove the files of the runs of this container that were killed."""
    for path in _run_file_paths():
        with contextlib.suppress(OSError, ValueError, KeyError):
            doc = json.loads(path.read_text())
            if not _is_alive(int(doc["pid"]), int(doc["started"])):
                path.unlink()
                path.with_suffix(DRAIN).unlink(missing_ok=True)


def connection(group: str) -> command_line.Connection:
    """Return the arguments with which commands connect to the brokers of a live run of the group on this host; with a
    placeholder if there is no such run."""
    found = (tuple(doc["connection"]) for doc in read(group) if doc.get("connection"))
    return next(found, command_line.UNKNOWN)


def snapshot(group: str, stream: str) -> Statistics | None:
    """Return the statistics of one stream, if it runs on this host; of several runs, those with the newest batch."""
    found = [Statistics.from_dict(doc) for doc in read(group) if doc["stream"] == stream]
    return max(found, key=lambda statistics: statistics.seq, default=None)


def request_drain(pid: int) -> None:
    """Request that the run in a process of this host finishes its batch and starts no other."""
    _run_file(pid).with_suffix(DRAIN).touch()


def mark_durable_and_wait(offset: StreamOffset) -> None:
    """Write the durable mark. If no batch may follow in this run, wait until the run has committed its offsets.

    Without this Spark 4.0 and 4.1 would end an AvailableNow query before the offsets of its only batch are committed.
    Returns at once if the run is not on this host; after :data:`COMMIT_S` the run commits the offsets when it stops.
    """
    group, seq = offset.group, offset.seq

    def state() -> dict[str, Any]:
        return next((doc for doc in read(group) if doc.get("stream") == offset.stream), {})

    is_last = state().get("last_batch", -1) == seq
    mark_durable(offset)
    if not is_last:
        return
    deadline_s, pause = time.monotonic() + COMMIT_S, threading.Event()
    while (run := state()) and not (run["seq"] >= seq and run["committed"]):
        if time.monotonic() > deadline_s:
            log.warning("group %s: offsets of batch %d are not committed after %.0f s", group, seq, COMMIT_S)
            return
        pause.wait(POLL_S)


def drain_runs(
    group: str,
    runs: Callable[[], dict[str, dict[str, Any]]],
    request: Callable[[str], None],
    *,
    poll_s: float,
    timeout_s: float,
) -> int:
    """Request that runs finish their batch and start no other, and wait until they have.

    Args:
        runs: returns what the runs published last, by the run's name: those of this host, or that of one checkpoint.
        request: requests a drain of the run of that name.
        poll_s: the time between two calls of ``runs``.
        timeout_s: the longest wait.

    Returns:
        The number of runs that were drained.

    Raises:
        DrainTimeout: a run did not drain in time.
        GroupError: another run was started meanwhile.
    """
    requested = runs()
    for name in requested:
        request(name)
    deadline_s, pause = time.monotonic() + timeout_s, threading.Event()
    while True:
        found = runs()
        if found.keys() - requested.keys():
            raise GroupError(
                f"a query of group {group!r} was started during the drain, so it is not drained. Run the command again"
            )
        late = [doc for doc in found.values() if not doc["drained"]]
        if not late:
            return len(requested)
        if time.monotonic() > deadline_s:
            at = f"in process {late[0]['pid']}"
            if "written_ms" in late[0]:  # else it is a live process of this host
                age_s = time.time() - late[0]["written_ms"] / 1000
                at += f" on host {late[0]['host']}, whose last status is {age_s:.0f} s old,"
            raise DrainTimeout(
                f"the query of group {group!r} {at} did not finish its batch within {timeout_s:.0f} s. If it is "
                "running, it drains when the batch ends: run the command again with a larger --timeout-s",
                group=group,
            )
        pause.wait(poll_s)


def drain(group: str, *, driver: int | None = None, timeout_s: float = DRAIN_S) -> int:
    """Request that this host's queries of a group finish their batch and start no other, and wait until they have.

    Their rows are then in the sink and their offsets committed, so the next consumer starts exactly there: stop the
    queries now. Without a drain, a stopped query may have a batch in the sink whose offsets are committed only at its
    next start. A drained query stays in the group and reads nothing until it is stopped and started again.

    Args:
        group: the consumer group.
        driver: only the queries of the driver JVM with this process id; None: all queries.
        timeout_s: the longest wait, in seconds.

    Returns:
        The number of queries that were drained.

    Raises:
        DrainTimeout: one did not finish its batch in time; it drains when it does.
        GroupError: this host has no such query, or one ended or was killed before it was drained, or another user owns
            the directory of the run files.
    """
    if reason := unusable_reason(directory()):
        raise GroupError(f"{reason}. {_CONSEQUENCE}")

    seen: dict[int, dict[str, Any]] = {}

    def runs() -> dict[str, dict[str, Any]]:
        live = {int(doc["pid"]): doc for doc in read(group) if driver in (None, doc["driver"])}
        killed = {int(doc["pid"]): doc for doc in _published(group)} if seen.keys() - live.keys() else {}
        for pid in seen.keys() - live.keys():
            doc = killed.get(pid, seen[pid])  # a run that stops removes its file
            is_open = doc["state"] == RunState.OPEN.value  # else a batch is in flight, whose mark has a later number
            at_end = _marked(doc["stream"], COMMITTED).seq
            is_done = (is_open and (doc["committed"] or at_end >= doc["seq"])) or at_end > doc["seq"]
            if not (doc["drained"] or (is_done and pid not in killed)):
                raise GroupError(
                    f"the query of group {group!r} in process {pid} {'was killed' if pid in killed else 'ended'} "
                    "during the drain: its last batch may be in the sink without a commit of its offsets. Start it "
                    "again, then run the command again"
                )
        seen.update(live)
        return {str(pid): doc for pid, doc in live.items()}

    if not runs():
        again = command_line.spark_group("drain", (), group)
        describe = command_line.spark_group("describe", command_line.UNKNOWN, group, "--members")
        raise GroupError(
            f"no query of group {group!r} runs on this host. Run `{again}` on the host of its driver, or here with "
            "--checkpoint and the query's checkpointLocation. To see the hosts of its members: "
            f"{command_line.in_sentence(describe)}"
        )
    return drain_runs(group, runs, lambda pid: request_drain(int(pid)), poll_s=POLL_S, timeout_s=timeout_s)


def _is_created() -> bool:
    """Create the directory. Returns whether it can be written and belongs to this user only; each reason against it is
    logged once."""
    try:
        directory().mkdir(mode=0o700, exist_ok=True)
    except OSError as exc:
        _warn_once(f"{directory()} cannot be created: {exc.strerror}. {_CONSEQUENCE}")
        return False
    if not _is_usable():
        return False
    if not os.access(directory(), os.W_OK):
        _warn_once(f"{directory()} cannot be written. {_CONSEQUENCE}")
        return False
    return True


def _is_usable() -> bool:
    """Return whether the directory exists and belongs to this user only; each reason against it is logged once."""
    if reason := unusable_reason(directory()):
        _warn_once(f"{reason}. {_CONSEQUENCE}")
        return False
    return directory().exists()


@functools.cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


def _is_alive(pid: int, started: int) -> bool:
    """Whether this process runs. A later process, or a thread, may have its number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    stat = process_stat(pid)
    return stat is None or (stat[0] not in ENDED_STATES and int(stat[19]) == started)


def _started(pid: int) -> int:
    """Return when a process started, in the kernel's clock ticks since boot; 0 where there is no /proc."""
    stat = process_stat(pid)
    return 0 if stat is None else int(stat[19])


def process_stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/<pid>/stat from the third on (proc(5)); None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def here() -> str:
    """The host and the namespace in which the id of this process is unique. Hosts without containers have the same
    namespace; containers may have the same host's name. The namespace is 0 without /proc."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return f"{socket.gethostname()}-{namespace}"


# --- the directory ---------------------------------------------------------------------------------------------------


def directory() -> Path:
    """Return the directory of this user's run files on this host."""
    try:
        parent = tempfile.gettempdir()
    except FileNotFoundError:  # no folder for temporary files can be written: Spark has one of its own
        parent = os.environ.get("SPARK_LOCAL_DIRS", "/tmp").split(",")[0]  # where a write fails with a reason
    return Path(parent) / f"spark-group-source-{os.getuid()}"


def unusable_reason(folder: Path) -> str:
    """Return why a directory must not be used; empty if it may, or does not exist. Every user can write to /tmp."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return ""
    except OSError as exc:
        return f"{folder} cannot be checked ({exc})"
    if not stat.S_ISDIR(status.st_mode):
        reason = "it is a link" if stat.S_ISLNK(status.st_mode) else "it is not a directory"
    elif status.st_uid != os.getuid():
        reason = f"it belongs to user {status.st_uid}"
    elif status.st_mode & 0o022:
        reason = f"other users can write to it (mode {stat.S_IMODE(status.st_mode):o})"
    else:
        return ""
    return f"{folder} does not belong to this user only: {reason}"


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file; readers see the old text or the new one."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
