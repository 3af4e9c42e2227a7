"""The background broker of ``spark-group broker start``.

Runs in: the command line. Deliberately absent: the broker itself (``broker.py``), which runs in the background process.

The background process keeps a file in the user's state folder locked. So a reused pid is never mistaken for it, and
only a broker that was started here is stopped.
"""

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from spark_group_source.errors import BrokerUnavailable, OptionError
from spark_group_source.host.run_files import here
from spark_group_source.local.broker import KILL_S, LOG_TAIL_LINES, START_S, STOP_S, Broker, check_folder, check_free
from spark_group_source.local.jars import java_path, kafka_jars, locked, user_folder

POLL_S = 0.05
"""Polling interval for a process that is not a child of this one."""

LOCK_S = 10
"""Bound of the wait for another start or stop, which holds the lock."""

ADMIN_S = 30
"""Bound of creating topics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerState:
    """Content of the state file.

    ``pid``: the process that started the broker and stops it on SIGTERM. ``node``: the pid of Kafka's JVM. ``log_dir``:
    the directory of the broker's own logs, not of its records. ``place``: the host and the namespace of these pids.
    """

    pid: int
    bootstrap_servers: str
    node: int
    log_dir: str
    place: str


def state_dir() -> Path:
    """The project's folder for state: in ``$XDG_STATE_HOME`` or ``~/.local/state``; not created here."""
    return user_folder("XDG_STATE_HOME", ".local/state")


def running() -> BrokerState | None:
    """The running background broker, or None."""
    with contextlib.suppress(FileNotFoundError), open(_state_file(), encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # locked by the process that wrote it
            return BrokerState(**json.load(file))
    return None


def start(*, port: int = 9092, data_dir: Path | None = None) -> BrokerState:
    """Start a broker that keeps running when this process ends.

    Raises:
        SetupError: no usable Java, or Kafka's jars cannot be downloaded.
        OptionError: the port is in use, the path of the data directory has a comma, or a background broker is running.
        BrokerUnavailable: it did not start; the message ends with the log.
    """
    java_path()  # errors are raised here instead of in the background process's log
    kafka_jars()
    if data_dir is not None:
        check_folder(data_dir)
    home = state_dir()
    home.mkdir(parents=True, exist_ok=True)
    with locked(home / "broker.lock", LOCK_S):
        already = running()
        if already is not None:
            raise OptionError(
                f"a broker is already running at {already.bootstrap_servers}; stop it with `spark-group broker stop`"
                + ("" if already.place == here() else f" at {already.place}: this is {here()}, with the same home")
            )
        check_free(port)
        _state_file().unlink(missing_ok=True)
        log = home / "broker.log"
        command = [sys.executable, "-m", "spark_group_source", "broker", "run", "--record"]
        command += ["--port", str(port)]
        if data_dir is not None:
            command += ["--data-dir", str(data_dir.resolve())]
        with open(log, "wb") as out:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd=home
            )
        try:
            if not _await(lambda: process.poll() is not None or running() is not None, START_S + KILL_S):
                process.kill()
                process.wait(KILL_S)
        except BaseException:  # such as Ctrl-C: nothing would know of this broker
            _end(process)
            raise
        state = running()
        if state is None:
            tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
            raise BrokerUnavailable(f"the broker did not start; the end of {log}:\n" + "\n".join(tail))
        return state


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(STOP_S + KILL_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(KILL_S)


def stop() -> BrokerState | None:
    """Stop the background broker and wait until it has ended; None if none is running.

    Raises:
        OptionError: another host or container with the same home folder runs it: its pid is that of another process
            here.
    """
    home = state_dir()
    if not home.is_dir():
        return None
    with locked(home / "broker.lock", LOCK_S):
        state = running()
        if state is not None and state.place != here():
            raise OptionError(
                f"the broker at {state.bootstrap_servers} runs at {state.place}, and this is {here()}, with the same "
                "home: stop it there, with the same command"
            )
        if state is not None:
            for number, bound_s in ((signal.SIGTERM, STOP_S + KILL_S), (signal.SIGKILL, KILL_S)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(state.pid, number)
                if _await(lambda: running() is None, bound_s):
                    break
        _state_file().unlink(missing_ok=True)
        return state


def record(broker: Broker) -> TextIO:
    """Record ``broker`` in the state file, which stays locked until this process ends.

    Returns:
        The locked file; keep it open.
    """
    state = BrokerState(
        pid=os.getpid(),
        bootstrap_servers=broker.bootstrap_servers,
        node=broker.pids[1],
        log_dir=str(broker.log_dir),
        place=here(),
    )
    unfinished = _state_file().with_suffix(".new")
    file = open(unfinished, "w", encoding="utf-8")  # noqa: SIM115 - the lock ends when it is closed
    fcntl.flock(file, fcntl.LOCK_EX)
    json.dump(asdict(state), file)
    file.flush()
    unfinished.replace(_state_file())
    return file


TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")
"""What Kafka allows, except for ``.`` and ``..`` (``Topic`` of Kafka)."""
PARTITIONS_MAX = 10_000
"""What a controller creates in one request (``MAX_PARTITIONS_PER_BATCH`` of Kafka)."""


def parse_topics(texts: Sequence[str]) -> dict[str, int]:
    """Parse ``["orders:6", "audit"]`` as ``{"orders": 6, "audit": 1}``.

    Raises:
        OptionError: Kafka does not allow the name, the part after the colon is no number above 0, or the topics have
            more than PARTITIONS_MAX partitions in all.
    """
    topics: dict[str, int] = {}
    for text in texts:
        name, _, count = text.partition(":")
        if not name or (count and not (count.isdecimal() and int(count) > 0)) or text.endswith(":"):
            raise OptionError(f"--topic {text!r} must be NAME or NAME:PARTITIONS, for example orders:6")
        if not TOPIC_NAME.fullmatch(name) or name in (".", ".."):
            raise OptionError(
                f"--topic {text!r}: Kafka does not allow the name {name!r}. A name has up to 249 ASCII letters, "
                "digits, dots, underscores and hyphens"
            )
        topics[name] = int(count or 1)
        if sum(topics.values()) > PARTITIONS_MAX:
            raise OptionError(
                f"--topic {text!r}: Kafka creates at most {PARTITIONS_MAX:,} partitions at once, and these topics have "
                f"{sum(topics.values()):,}"
            )
    return topics


def create_topics(bootstrap_servers: str, topics: Mapping[str, int]) -> None:
    """Create the topics that do not exist.

    Raises:
        BrokerUnavailable: Kafka refused one, or did not answer in time.
    """
    if not topics:
        return
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # re-exported without saying

    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    new = [NewTopic(name, num_partitions=count) for name, count in topics.items()]
    for name, future in admin.create_topics(new).items():
        try:
            future.result(ADMIN_S)
        except (KafkaException, TimeoutError) as exc:
            error = exc.args[0] if exc.args else None
            if isinstance(error, KafkaError) and error.code() == KafkaError.TOPIC_ALREADY_EXISTS:
                continue
            raise BrokerUnavailable(f"cannot create topic {name}: {exc}") from exc


def _state_file() -> Path:
    return state_dir() / "broker.json"


def _await(done: Callable[[], bool], wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    pause = threading.Event()
    while not done():
        if time.monotonic() >= deadline:
            return False
        pause.wait(POLL_S)
    return True
