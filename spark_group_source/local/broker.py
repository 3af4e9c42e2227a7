"""Kafka on this machine: a broker with one node for the demo, notebooks and development.

Runs in: the process that starts it. The node is a JVM below a small supervisor (``supervise.py``), so it ends with this
process, also if that is killed. Deliberately absent: production features (encryption, replicas), clusters and faults
(in the test kit), topics and records (use Kafka's clients), and Kafka's own commands.

::

    with Broker() as broker:
        spark.readStream.format("kafka-group").option("kafka.bootstrap.servers", broker.bootstrap_servers)
"""

import contextlib
import hashlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from spark_group_source.errors import BrokerUnavailable, OptionError, SetupError
from spark_group_source.local import supervise
from spark_group_source.local.conf import conf_path, read_conf
from spark_group_source.local.jars import cache_dir, java_path, kafka_jars, locked

START_S = 120
"""Bound of a start until the node answers: 4 s on an idle machine with two cores, several times that beside a busy
Spark."""

STOP_S = 30
"""Bound of an orderly stop; after it the node is killed."""

KILL_S = 10
"""Bound between a kill signal and the end of the process; only a stuck disk takes that long."""

PORT_TRIES = 3
"""Attempts with new ports, in case another process binds one before the node does."""

COORDINATOR_S = 5
"""Bound of one request that checks whether groups are served; it is repeated until the bound of the start."""

POLL_S = 0.05
"""Polling interval for what cannot be waited for: a port, a starting node."""

LOG_TAIL_LINES = 30
"""Lines of a node's log shown in an error."""

JAVA_OPTIONS = ("-Xms128m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
"""Fast start and a small heap. Benchmarks pass their own: without the second compiler the throughput is lower."""

_PORTS = range(15_000, 30_000)
"""Below the ephemeral ports, so that no outgoing connection takes the port of a stopped node."""


class Broker:
    """One Kafka node in KRaft mode on 127.0.0.1.

    ``start()`` and ``stop()``, or a ``with`` block. Safe to use from several threads except for start and stop.

    Args:
        settings: Kafka settings that override ``conf/broker.properties``.
        port: the port for clients; default: a free one.
        data_dir: directory whose data survives a stop, formatted if it is empty; default: a temporary directory that
            ``stop()`` removes.
    """

    def __init__(
        self,
        *,
        settings: Mapping[str, str] | None = None,
        port: int | None = None,
        data_dir: str | Path | None = None,
        java_options: Sequence[str] = JAVA_OPTIONS,
    ) -> None:
        self._settings = dict(settings or {})
        self._ports = [] if port is None else [port]
        self._data_dir = Path(data_dir) if data_dir is not None else None
        self._java_options = tuple(java_options)
        self._java: list[str] = []
        self._base: Path | None = None
        self._servers = ""
        self._lock = contextlib.ExitStack()  # held while the broker uses the data directory
        self._nodes: dict[int, Node] = {}

    @property
    def bootstrap_servers(self) -> str:
        """``host:port`` for clients."""
        _ = self._home  # raises if the broker is not started
        return self._servers

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the running nodes by number; a single node has number 1."""
        return {number: node.pid for number, node in self._nodes.items() if node.running}

    @property
    def log_dir(self) -> Path:
        """The directory with ``node-1.log``, inside the data directory."""
        return self._home / "logs"

    def start(self) -> Self:
        """Start the node and return when it answers and serves groups.

        Raises:
            SetupError: no usable Java, or Kafka's jars cannot be downloaded.
            OptionError: the given port is in use, or the data directory by another broker, or its path has a comma.
            BrokerUnavailable: the node ended or did not answer in time; the message ends with its log.
        """
        if self._base is not None:
            raise BrokerUnavailable("this broker is already started")
        self._java = _java_command(self._java_options)
        if self._data_dir is None:
            self._base = Path(tempfile.mkdtemp(prefix="spark-group-broker-"))
        else:
            check_folder(self._data_dir)
            self._base = self._data_dir.resolve()
            self._base.mkdir(parents=True, exist_ok=True)
        try:
            if self._data_dir is not None:
                self._lock_folder(self._base)
            self.log_dir.mkdir(parents=True, exist_ok=True)
            for attempt in range(1, PORT_TRIES + 1):
                try:
                    self._boot()
                    return self
                except BrokerUnavailable as exc:
                    if self._ports or attempt == PORT_TRIES or "Address already in use" not in str(exc):
                        raise
                    self._end(0)
            raise AssertionError("unreachable: the last attempt raises")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the node, cleanly if its data is kept, and remove temporary data."""
        if self._base is None:
            return
        self._end(0 if self._data_dir is None else STOP_S)
        if self._data_dir is None:
            shutil.rmtree(self._base, ignore_errors=True)
        self._base = None
        self._lock.close()

    def _lock_folder(self, folder: Path) -> None:
        """Lock the data directory until :meth:`stop`. Kafka has a lock of its own, but a second node starts to write
        the metadata of the first one before it looks."""
        try:
            self._lock.enter_context(locked(folder / "broker.lock", wait_s=0))
        except SetupError as exc:
            raise OptionError(
                f"another broker uses the data directory {folder}: stop that one, or choose another directory"
            ) from exc

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(pids={self.pids})"

    @property
    def _home(self) -> Path:
        if self._base is None:
            raise BrokerUnavailable("this broker is not started; call start(), or use it in a with block")
        return self._base

    def _boot(self) -> None:
        port, controller = list(dict.fromkeys([*self._ports, *free_ports(2)]))[:2]  # which may have the given one
        if self._ports:
            check_free(port)
        self._servers = f"127.0.0.1:{port}"
        settings = read_conf("broker.properties") | {
            "node.id": "1",
            "process.roles": "broker,controller",
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "controller.listener.names": "CONTROLLER",
            "listeners": f"PLAINTEXT://{self._servers},CONTROLLER://127.0.0.1:{controller}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        }
        home = self._configure(1, settings | self._settings)
        if not (home / "data" / "meta.properties").is_file():
            self._format(home, kafka_uuid())
        self._launch(1)
        self._await([1], lambda: connects(port) and serves_groups(self._servers, settings | self._settings))

    def _configure(self, number: int, settings: Mapping[str, str]) -> Path:
        """Write a node's settings; returns its directory, with its data in ``data``."""
        home = self._home / f"node-{number}"
        home.mkdir(mode=0o700, exist_ok=True)
        lines = [f"{key}={_escaped(str(value))}" for key, value in {"log.dirs": home / "data", **settings}.items()]
        (home / "server.properties").write_text("\n".join(lines) + "\n", encoding="ascii")
        return home

    def _format(self, home: Path, cluster_id: str) -> None:
        """Format an empty directory with Kafka's own tool."""
        command = [*self._java, "kafka.tools.StorageTool", "format", "--cluster-id", cluster_id]
        command += ["--config", str(home / "server.properties")]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
        except subprocess.TimeoutExpired as exc:
            raise BrokerUnavailable(f"formatting the storage took longer than {START_S} s") from exc
        if run.returncode != 0:
            raise BrokerUnavailable(f"cannot format {home}:\n{run.stdout}{run.stderr}")

    def _launch(self, number: int) -> None:
        crash = f"-XX:ErrorFile={self.log_dir}/node-{number}-crash.log"
        command = [*self._java, crash, "kafka.Kafka", str(self._home / f"node-{number}" / "server.properties")]
        log, remove = self.log_dir / f"node-{number}.log", None if self._data_dir else self._home
        self._nodes[number] = Node(command, log, remove=remove)

    def _await(self, numbers: Sequence[int], ready: Callable[[], bool]) -> None:
        """Wait until nodes are ready. Raises BrokerUnavailable with the end of their logs."""
        started = time.monotonic()
        pause = threading.Event()
        nodes = {number: self._nodes[number] for number in numbers}
        while True:
            is_ready = ready()
            for number, node in nodes.items():  # also if another process answers at the port
                if not node.running:
                    raise BrokerUnavailable(f"node {number} ended with code {node.code}{node.tail()}")
            if is_ready:
                return
            if time.monotonic() - started > START_S:
                tails = "".join(node.tail() for node in nodes.values())
                raise BrokerUnavailable(f"no answer within {START_S} s{tails}")
            pause.wait(POLL_S)

    def _end(self, wait_s: float) -> None:
        """Stop the nodes: cleanly within ``wait_s``, then by SIGKILL."""
        if wait_s:
            for node in self._nodes.values():
                node.signal(signal.SIGTERM)
        deadline = time.monotonic() + wait_s
        for node in self._nodes.values():
            node.wait(max(0.0, deadline - time.monotonic()))
            node.kill()
        self._nodes = {}


def _escaped(value: str) -> str:
    """A value for a properties file of Java, which reads one byte as one character."""
    units = value.replace("\\", "\\\\").encode("utf-16-be")
    codes = [int.from_bytes(units[at : at + 2]) for at in range(0, len(units), 2)]
    return "".join(chr(code) if code < 128 else f"\\u{code:04x}" for code in codes)


class Node:
    """A node's JVM, below a supervisor that stops it when this process ends.

    Args:
        log: the file for its output.
        remove: a directory that the supervisor removes when this process has ended.
    """

    def __init__(self, command: Sequence[str], log: Path, *, remove: Path | None) -> None:
        self._log = log
        watch = [sys.executable, "-I", "-S", supervise.__file__, "--parent", str(os.getpid()), "--log", str(log)]
        if remove is not None:
            watch += ["--remove", str(remove)]
        self._supervisor = subprocess.Popen(
            [*watch, "--", *command],
            stdin=subprocess.PIPE,  # the other end closes when this process ends, for any reason
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._supervisor.stdout is not None
        line = self._supervisor.stdout.readline()
        if not line:
            code = self._supervisor.wait(KILL_S)
            raise BrokerUnavailable(f"cannot run {command[0]}: its supervisor ended with code {code}")
        self.pid = int(line)

    @property
    def running(self) -> bool:
        return self.code is None

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._supervisor.poll()

    def signal(self, number: int) -> None:
        """Send a signal to the node's JVM; does nothing when it has ended."""
        if self.running:  # the pid cannot be reused before the supervisor has ended
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, wait_s: float) -> bool:
        """Whether the node ended within that time."""
        try:
            self._supervisor.wait(wait_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Send SIGKILL and wait until the node has ended."""
        self.signal(signal.SIGKILL)
        if not self.wait(KILL_S):
            self._supervisor.kill()  # this also kills the node
            self._supervisor.wait(KILL_S)
        for pipe in (self._supervisor.stdin, self._supervisor.stdout):
            if pipe is not None:
                pipe.close()

    def tail(self) -> str:
        """The last lines of its log."""
        text = self._log.read_text(encoding="utf-8", errors="replace") if self._log.is_file() else ""
        return f"\n--- the end of {self._log}:\n" + "\n".join(text.splitlines()[-LOG_TAIL_LINES:])


def connects(port: int) -> bool:
    """Whether a process listens on the port: after a closed port a Kafka client waits before its next attempt."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def serves_groups(servers: str, settings: Mapping[str, str]) -> bool:
    """Whether every partition of the offsets topic has a loaded coordinator; the first call creates the topic.

    Otherwise the first request for a group may reach a coordinator that is still loading. Clients should retry, but
    librdkafka's ListConsumerGroupOffsets crashes the process with a segmentation fault.
    """
    # Imported here: the rest of this module needs no Kafka client.
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import AdminClient

    again = {
        KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError._TIMED_OUT,
        KafkaError._TRANSPORT,
    }
    # A group is in partition hash(name) mod partitions; Java's hash of one character is its code.
    groups = [chr(ord("0") + number) for number in range(int(settings["offsets.topic.num.partitions"]))]
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    ready = True
    for future in admin.describe_consumer_groups(groups, request_timeout=COORDINATOR_S).values():
        try:
            future.result(COORDINATOR_S + 1)
        except KafkaException as exc:  # any other error, such as of an authorizer, is an answer too
            ready = ready and exc.args[0].code() not in again
        except TimeoutError:
            ready = False
    return ready


def _java_command(options: Sequence[str]) -> list[str]:
    """A JVM with Kafka's classes."""
    java, class_path = java_path(), os.pathsep.join(map(str, kafka_jars()))
    archive = class_archive(java, class_path)
    return [
        str(java),
        *([f"-XX:SharedArchiveFile={archive}"] if archive.is_file() else []),
        *options,
        "-Djava.net.preferIPv4Stack=true",
        f"-Dlog4j2.configurationFile={conf_path('broker-log4j2.properties')}",
        "-cp",
        class_path,
    ]


def class_archive(java: Path, class_path: str) -> Path:
    """The archive of Kafka's classes for this Java and these jars, with which a node starts in about half the time.

    It is optional: ``.ci/jars.py`` writes it. The JVM ignores an archive that does not match.
    """
    digest = hashlib.sha256(f"{java.resolve()} {class_path}".encode()).hexdigest()[:8]
    return cache_dir() / f"kafka-classes-{digest}.jsa"


def kafka_uuid() -> str:
    """A random id in Kafka's format, without a leading dash, which would look like an option."""
    while True:
        text = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        if not text.startswith("-"):
            return text


def check_free(port: int) -> None:
    """Check that a port is free.

    Raises:
        OptionError: the port is in use.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a former broker may linger
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as exc:
            raise OptionError(f"port {port} of 127.0.0.1 is in use; choose another one with --port") from exc


def check_folder(folder: Path) -> None:
    """Check that Kafka can use a data directory.

    Raises:
        OptionError: its path has a comma, with which Kafka's ``log.dirs`` would name two directories.
    """
    if "," in str(folder.resolve()):
        raise OptionError(
            f"the data directory {folder.resolve()} has a comma in its path, and Kafka would take it for two; choose "
            "another one with --data-dir"
        )


def free_ports(count: int) -> list[int]:
    """Free ports of 127.0.0.1 below the ephemeral ports."""
    with contextlib.ExitStack() as held:  # all stay bound until the last one is found, so that they differ
        ports: list[int] = []
        for port in random.SystemRandom().sample(_PORTS, k=len(_PORTS)):
            if len(ports) == count:
                break
            probe = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                ports.append(port)
        if len(ports) < count:
            raise BrokerUnavailable(f"no {count} free ports in {_PORTS.start}..{_PORTS.stop - 1}")
        return ports
