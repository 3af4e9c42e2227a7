"""A real Kafka on this machine, with one node or three, for the demo, the tests and development.

Runs in: the process that wants a broker; every node is a JVM of its own below a small supervisor (``supervise.py``), so
no node outlives this process, also when it is killed. Deliberately absent: anything for production (no encryption, no
replicas on other machines), and topics or records: use Kafka's clients.

::

    with Broker() as broker:
        spark.readStream.format("kafka-group").option("kafka.bootstrap.servers", broker.bootstrap_servers)
"""

import contextlib
import hashlib
import json
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from spark_group_source.errors import BrokerUnavailable, OptionError
from spark_group_source.local import supervise
from spark_group_source.local.conf import conf_path, read_conf
from spark_group_source.local.jars import cache_dir, java_path, kafka_jars

START_S = 120
"""Bound of a start, until every node answers. One needs 4 s on an idle machine with two cores, three need 9 s; a
machine that is busy with Spark takes several times that."""

STOP_S = 30
"""Bound of an orderly stop of one node; after it the node is killed."""

KILL_S = 10
"""Bound between a kill signal and the end of the process; only a stuck disk could use it up."""

PORT_TRIES = 3
"""Starts with fresh ports, should another process take one between our choice and the node's bind."""

COORDINATOR_S = 5
"""Bound of one question whether groups are served; it is asked again until the start's bound."""

POLL_S = 0.05
"""Pause between two looks at something that cannot be waited on: a port, a cluster that is forming."""

LOG_TAIL_LINES = 30
"""Lines of a node's log shown in an error."""

JAVA_OPTIONS = ("-Xms128m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
"""Quick to start and small. A benchmark passes its own: without the second compiler a broker serves less."""

_PORTS = range(15_000, 30_000)
"""Below the ports that systems give to outgoing connections, so none of those takes the port of a stopped node."""


class Broker:
    """One Kafka cluster in KRaft mode on 127.0.0.1; every node is broker and controller.

    ``start()`` and ``stop()``, or a ``with`` block. Safe to use from several threads except for start and stop.

    Args:
        nodes: 1 or 3; numbered from 1.
        settings: Kafka settings that win over ``conf/broker.properties``.
        ports: the client port of each node, instead of free ones.
        advertised: the port of 127.0.0.1 that each node tells its clients instead of its own: where something stands
            between them. Nodes talk to each other past it, through a listener of their own.
        data_dir: where the data stays after a stop, to start again from it; by default a temporary directory that is
            removed by ``stop()``. It is formatted if it is empty.
        log_dir: where each node's log is kept; by default inside the data's directory.
        sasl: user -> password: opens a second listener, ``sasl_bootstrap_servers``, that demands SASL/PLAIN.
        listeners: name -> security protocol of more listeners, for :meth:`servers`; ``settings`` has what they need.
        java_options: heap and collector of each node.
    """

    def __init__(
        self,
        nodes: int = 1,
        *,
        settings: Mapping[str, str] | None = None,
        ports: Sequence[int] | None = None,
        advertised: Sequence[int] | None = None,
        data_dir: str | Path | None = None,
        log_dir: str | Path | None = None,
        sasl: Mapping[str, str] | None = None,
        listeners: Mapping[str, str] | None = None,
        java_options: Sequence[str] = JAVA_OPTIONS,
    ) -> None:
        if nodes not in (1, 3):
            raise OptionError(f"nodes={nodes}: a local cluster has 1 or 3 nodes", nodes=nodes)
        for given in (ports, advertised):
            if given is not None and len(given) != nodes:
                raise OptionError(f"{len(given)} ports for {nodes} nodes: give one for each", ports=list(given))
        self.nodes = range(1, nodes + 1)
        self._settings = dict(settings or {})
        self._fixed_ports = list(ports) if ports is not None else None
        self._advertised = dict(zip(self.nodes, advertised, strict=True)) if advertised is not None else {}
        self._data_dir = Path(data_dir) if data_dir is not None else None
        self._log_dir = Path(log_dir) if log_dir is not None else None
        self._sasl = dict(sasl or {})
        self._listeners = ({"SASL": "SASL_PLAINTEXT"} if self._sasl else {}) | dict(listeners or {})
        self._java_options = tuple(java_options)
        self._base: Path | None = None
        self._ports: dict[str, dict[int, int]] = {}
        self._processes: dict[int, _Node] = {}

    @property
    def bootstrap_servers(self) -> str:
        """``host:port`` of every node's plain listener as clients are told it, also of those that are down."""
        direct = self._servers("PLAINTEXT")
        return ",".join(f"127.0.0.1:{port}" for port in self._advertised.values()) or direct

    @property
    def direct_servers(self) -> str:
        """The same past whatever stands before the nodes: clients that begin here are told of nothing else."""
        return self._servers(self._between)

    @property
    def ports(self) -> dict[int, int]:
        """The port on which each node waits for clients."""
        _ = self._home
        return dict(self._ports["PLAINTEXT"])

    @property
    def sasl_bootstrap_servers(self) -> str:
        """``host:port`` of every node's SASL/PLAIN listener.

        Raises:
            OptionError: the broker was made without ``sasl``.
        """
        if not self._sasl:
            raise OptionError("this broker has no SASL listener; make it with sasl={user: password}")
        return self._servers("SASL")

    def servers(self, listener: str) -> str:
        """``host:port`` of every node at one of the ``listeners`` that the broker was made with."""
        return self._servers(listener)

    @property
    def pids(self) -> dict[int, int]:
        """Process id of every node that runs (a paused one does)."""
        return {node: process.pid for node, process in self._processes.items() if process.running}

    @property
    def controller(self) -> int:
        """The node that leads the controllers, by what the nodes wrote down of the last election; 0: none does."""
        found = []
        for node in self.nodes:
            with contextlib.suppress(OSError, ValueError):  # written anew at this moment
                state = self._home / f"node-{node}" / "data" / "__cluster_metadata-0" / "quorum-state"
                told = json.loads(state.read_text())
                found.append((int(told["leaderEpoch"]), int(told["leaderId"])))
        return max([0, *(leader for epoch, leader in found if epoch == max(found)[0])])

    @property
    def log_dir(self) -> Path:
        """The directory with ``node-<n>.log``."""
        return self._log_dir or self._home / "logs"

    def start(self) -> Self:
        """Start every node and return when all of them answer and groups can be asked for.

        Raises:
            SetupError: no usable Java, or Kafka's jars cannot be downloaded.
            BrokerUnavailable: a node ended, or did not answer in time; the message ends with its log.
        """
        if self._base is not None:
            raise BrokerUnavailable("this broker is already started", op="start")
        java, jars = java_path(), kafka_jars()
        if self._data_dir is None:
            self._base = Path(tempfile.mkdtemp(prefix="spark-group-broker-"))
        else:
            self._base = self._data_dir.resolve()
            self._base.mkdir(parents=True, exist_ok=True)
        try:
            self._java = java
            self._class_path = os.pathsep.join(map(str, jars))
            self.log_dir.mkdir(parents=True, exist_ok=True)
            for attempt in range(1, PORT_TRIES + 1):
                try:
                    self._boot()
                    return self
                except BrokerUnavailable as exc:
                    if self._fixed_ports or attempt == PORT_TRIES or "Address already in use" not in str(exc):
                        raise
                    self._kill_all()
            raise AssertionError("unreachable: the last attempt raises")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop every node and remove the temporary data. A broker with a ``data_dir`` is stopped in order."""
        if self._base is None:
            return
        if self._data_dir is not None:
            for process in self._processes.values():
                process.signal(signal.SIGCONT)
                process.signal(signal.SIGTERM)
            deadline = time.monotonic() + STOP_S
            for process in self._processes.values():
                process.wait(max(0.0, deadline - time.monotonic()))
        self._kill_all()  # nothing to hand over: the data is about to go
        if self._data_dir is None:
            shutil.rmtree(self._base, ignore_errors=True)
        self._base = None

    def kill(self, node: int) -> None:
        """End a node without warning (SIGKILL), and return when it is gone."""
        self._processes[node].kill()

    def stop_node(self, *nodes: int) -> None:
        """Stop nodes in order, all at the same time: each hands its partitions over first, if somebody is left.

        Raises:
            BrokerUnavailable: one did not end within :data:`STOP_S`.
        """
        for node in nodes:
            self._processes[node].signal(signal.SIGTERM)
        for node in nodes:
            if not self._processes[node].wait(STOP_S):
                raise BrokerUnavailable(
                    f"node {node} did not stop within {STOP_S} s", op="stop", waited_ms=STOP_S * 1000
                )

    def start_node(self, *nodes: int) -> None:
        """Start nodes that were killed or stopped, with their old ports and data; return when all of them answer.

        Raises:
            BrokerUnavailable: one ended, or did not answer within :data:`START_S`; the message ends with its log.
        """
        if running := [node for node in nodes if self._processes[node].running]:
            raise BrokerUnavailable(f"node {running[0]} already runs", op="start")
        for node in nodes:
            self._processes[node].close()
            self._processes[node] = self._launch(node)
        self._await_up(nodes)

    def pause(self, node: int) -> None:
        """Freeze a node (SIGSTOP): its connections stay open and nobody answers."""
        self._processes[node].signal(signal.SIGSTOP)

    def resume(self, node: int) -> None:
        """Let a paused node go on (SIGCONT)."""
        self._processes[node].signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"Broker(nodes={len(self.nodes)}, pids={self.pids})"

    @property
    def _home(self) -> Path:
        if self._base is None:
            raise BrokerUnavailable("this broker is not started; call start() or use it in a with block", op="use")
        return self._base

    @property
    def _between(self) -> str:
        """The listener through which nodes talk to each other."""
        return "INTERNAL" if self._advertised else "PLAINTEXT"

    def _servers(self, listener: str) -> str:
        _ = self._home  # says so when it is not started
        return ",".join(f"127.0.0.1:{port}" for port in self._ports[listener].values())

    def _boot(self) -> None:
        listeners = ["PLAINTEXT", "CONTROLLER", *self._listeners]
        listeners += [self._between] if self._advertised else []
        free = iter(free_ports(len(listeners) * len(self.nodes)))
        self._ports = {listener: {node: next(free) for node in self.nodes} for listener in listeners}
        if self._fixed_ports:
            self._ports["PLAINTEXT"] = dict(zip(self.nodes, self._fixed_ports, strict=True))
        for node in self.nodes:
            home = self._home / f"node-{node}"
            home.mkdir(mode=0o700, exist_ok=True)
            lines = [f"{key}={value}" for key, value in self._node_settings(node).items()]
            (home / "server.properties").write_text("\n".join(lines) + "\n", encoding="utf-8")
        self._format()
        self._processes = {node: self._launch(node) for node in self.nodes}
        self._await_up(list(self.nodes))

    def _node_settings(self, node: int) -> dict[str, str]:
        nodes = len(self.nodes)
        at = {listener: f"{listener}://127.0.0.1:{ports[node]}" for listener, ports in self._ports.items()}
        told = at | {"PLAINTEXT": f"PLAINTEXT://127.0.0.1:{self._advertised.get(node, self._ports['PLAINTEXT'][node])}"}
        clients = [text for listener, text in told.items() if listener != "CONTROLLER"]
        voters = ",".join(f"{n}@127.0.0.1:{port}" for n, port in self._ports["CONTROLLER"].items())
        in_sync = str(2 if nodes == 3 else 1)  # one node may be down
        settings = read_conf("broker.properties") | {
            "node.id": str(node),
            "process.roles": "broker,controller",
            "controller.quorum.voters": voters,
            "controller.listener.names": "CONTROLLER",
            "listeners": ",".join(at.values()),
            "advertised.listeners": ",".join(clients),
            "listener.security.protocol.map": ",".join(
                f"{listener}:{self._listeners.get(listener, 'PLAINTEXT')}" for listener in self._ports
            ),
            "inter.broker.listener.name": self._between,
            "log.dirs": str(self._home / f"node-{node}" / "data"),
            "default.replication.factor": str(nodes),
            "min.insync.replicas": in_sync,
            "offsets.topic.replication.factor": str(nodes),
            "transaction.state.log.replication.factor": str(nodes),
            "transaction.state.log.min.isr": in_sync,
            "share.coordinator.state.topic.replication.factor": str(nodes),
            "share.coordinator.state.topic.min.isr": in_sync,
        }
        if nodes == 3:  # each is a rack, and serves those who say that they are in it
            settings["broker.rack"] = f"rack-{node}"
            settings["replica.selector.class"] = "org.apache.kafka.common.replica.RackAwareReplicaSelector"
        if self._sasl:
            users = " ".join(f'user_{user}="{password}"' for user, password in self._sasl.items())
            login = "org.apache.kafka.common.security.plain.PlainLoginModule"
            settings["sasl.enabled.mechanisms"] = "PLAIN"
            settings["listener.name.sasl.plain.sasl.jaas.config"] = f"{login} required {users};"
        return settings | self._settings

    def _format(self) -> None:
        """Give every node the same cluster id and the features of this Kafka release.

        Kafka's own tool does it once, for the first node; what it writes for another node differs only in
        ``meta.properties``, and each run of the tool costs a JVM.
        """
        datas = {node: self._home / f"node-{node}" / "data" for node in self.nodes}
        if all((data / "meta.properties").is_file() for data in datas.values()):
            return
        first = self.nodes[0]
        cluster_id = _kafka_uuid()
        config = self._home / f"node-{first}" / "server.properties"
        command = [*self._jvm(first, self._java_options), "kafka.tools.StorageTool"]
        command += ["format", "--cluster-id", cluster_id, "--config", str(config)]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
        except subprocess.TimeoutExpired as exc:
            raise BrokerUnavailable(
                f"formatting the storage took longer than {START_S} s", op="format", waited_ms=START_S * 1000
            ) from exc
        if run.returncode != 0:
            raise BrokerUnavailable(f"cannot format {datas[first]}:\n{run.stdout}{run.stderr}", op="format")
        for node, data in datas.items():
            if node == first:
                continue
            shutil.copytree(datas[first], data)
            meta = {"version": "1", "cluster.id": cluster_id, "node.id": node, "directory.id": _kafka_uuid()}
            (data / "meta.properties").write_text("".join(f"{k}={v}\n" for k, v in meta.items()), encoding="utf-8")

    def _jvm(self, node: int, java_options: Sequence[str]) -> list[str]:
        archive = _archive(self._java, self._class_path)
        return [
            str(self._java),
            *([f"-XX:SharedArchiveFile={archive}"] if archive.is_file() else []),
            *java_options,
            "-Djava.net.preferIPv4Stack=true",
            f"-Dlog4j2.configurationFile={conf_path('broker-log4j2.properties')}",
            f"-XX:ErrorFile={self.log_dir}/node-{node}-crash.log",
            "-cp",
            self._class_path,
        ]

    def _launch(self, node: int) -> "_Node":
        config = self._home / f"node-{node}" / "server.properties"
        command = [*self._jvm(node, self._java_options), "kafka.Kafka", str(config)]
        return _Node(command, self._log(node), remove=None if self._data_dir else self._home)

    def _log(self, node: int) -> Path:
        return self.log_dir / f"node-{node}.log"

    def _await_up(self, nodes: Sequence[int]) -> None:
        """Return when each of ``nodes`` is a live member of the cluster, as Kafka's admin API tells it."""
        started = time.monotonic()
        pause = threading.Event()
        waiting = {node: self._ports[self._between][node] for node in nodes}
        while waiting:
            for node, port in list(waiting.items()):
                if not self._processes[node].running:
                    code = self._processes[node].code
                    raise BrokerUnavailable(f"node {node} ended with code {code}{self._tail([node])}", op="start")
                if self._answers(node, port):
                    del waiting[node]
            waited_s = time.monotonic() - started
            if waiting and waited_s > START_S:
                raise BrokerUnavailable(
                    f"node {', '.join(map(str, waiting))} did not answer within {START_S} s{self._tail(list(waiting))}",
                    op="start",
                    waited_ms=int(waited_s * 1000),
                )
            pause.wait(POLL_S)
        while not self._coordinates():
            if time.monotonic() - started > START_S:
                raise BrokerUnavailable(
                    f"no group coordinator was ready within {START_S} s{self._tail(nodes)}",
                    op="start",
                    waited_ms=START_S * 1000,
                )
            pause.wait(POLL_S)

    def _coordinates(self) -> bool:
        """Whether every partition of the offsets topic has a coordinator that has read it; the first call creates it.

        Without this the first question about a group meets a coordinator that is still loading. Clients should ask
        again; librdkafka's ListConsumerGroupOffsets instead ends the whole process with a segmentation fault.
        """
        from confluent_kafka import KafkaError, KafkaException
        from confluent_kafka.admin import AdminClient

        again = {
            KafkaError.NOT_COORDINATOR,
            KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
            KafkaError.COORDINATOR_NOT_AVAILABLE,
            KafkaError._TIMED_OUT,
            KafkaError._TRANSPORT,
        }
        partitions = int(self._node_settings(self.nodes[0])["offsets.topic.num.partitions"])
        # A group belongs to partition hash(name) mod partitions, and Java's hash of one character is its code.
        groups = [chr(ord("0") + number) for number in range(partitions)]
        admin = AdminClient({"bootstrap.servers": self.direct_servers, "log_level": 0})
        ready = True
        for future in admin.describe_consumer_groups(groups, request_timeout=COORDINATOR_S).values():
            try:
                future.result(COORDINATOR_S + 1)
            except KafkaException as exc:  # another refusal, such as of an authorizer, is an answer too
                ready = ready and exc.args[0].code() not in again
            except TimeoutError:
                ready = False
        return ready

    def _answers(self, node: int, port: int) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            # Imported here: everything else in this module works, and is imported, without a Kafka client.
            from confluent_kafka import KafkaException
            from confluent_kafka.admin import AdminClient

            # A fresh client each time: one that met a closed port waits before it tries again.
            admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{port}", "log_level": 0})
            with contextlib.suppress(KafkaException):
                return node in admin.list_topics(timeout=2).brokers
        return False

    def _tail(self, nodes: Sequence[int]) -> str:
        text = ""
        for node in nodes:
            log = self._log(node)
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
            text += f"\n--- the end of {log}:\n" + "\n".join(lines[-LOG_TAIL_LINES:])
        return text

    def _kill_all(self) -> None:
        for process in self._processes.values():
            process.signal(signal.SIGKILL)
        for process in self._processes.values():
            process.kill()
            process.close()
        self._processes = {}


def prepare() -> None:
    """Start and stop a broker once, so that later ones start in about half the time.

    What takes time is loading several thousand classes; this keeps them in a form that the JVM maps into memory (class
    data sharing), in the cache folder. Does nothing if that is there; without it everything works as well.

    Raises:
        SetupError, BrokerUnavailable: as :meth:`Broker.start`.
    """
    archive = _archive(java_path(), os.pathsep.join(map(str, kafka_jars())))
    if archive.is_file():
        return
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix=".prepare-") as scratch:
        unfinished = Path(scratch) / "classes.jsa"
        with Broker(java_options=(*JAVA_OPTIONS, f"-XX:ArchiveClassesAtExit={unfinished}")) as broker:
            broker.stop_node(1)  # in order: the JVM writes the archive on its way out
        if unfinished.is_file():  # the storage tool's run wrote one too, and the node's replaced it
            unfinished.replace(archive)


def _archive(java: Path, class_path: str) -> Path:
    """Where the classes for this Java and these jars are kept. The JVM itself ignores an archive that does not fit."""
    digest = hashlib.sha256(f"{java.resolve()} {class_path}".encode()).hexdigest()[:8]
    return cache_dir() / f"kafka-classes-{digest}.jsa"


class _Node:
    """One node's JVM, below a supervisor that ends it together with this process."""

    def __init__(self, command: Sequence[str], log: Path, *, remove: Path | None) -> None:
        watch = [sys.executable, "-I", "-S", supervise.__file__, "--parent", str(os.getpid()), "--log", str(log)]
        if remove is not None:
            watch += ["--remove", str(remove)]
        self._supervisor = subprocess.Popen(
            [*watch, "--", *command],
            stdin=subprocess.PIPE,  # its other end closes with this process, however that ends
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._supervisor.stdout is not None
        line = self._supervisor.stdout.readline()
        if not line:
            code = self._supervisor.wait(KILL_S)
            raise BrokerUnavailable(f"cannot run {command[0]}: its supervisor ended with code {code}", op="start")
        self.pid = int(line)

    @property
    def running(self) -> bool:
        return self._supervisor.poll() is None

    @property
    def code(self) -> int | None:
        return self._supervisor.poll()

    def signal(self, number: int) -> None:
        if self.running:  # until the supervisor has ended nobody else can have this pid
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, wait_s: float) -> bool:
        try:
            self._supervisor.wait(wait_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        if not self.wait(KILL_S):
            self._supervisor.kill()  # takes the node with it
            self._supervisor.wait(KILL_S)

    def close(self) -> None:
        for pipe in (self._supervisor.stdin, self._supervisor.stdout):
            if pipe is not None:
                pipe.close()


def _kafka_uuid() -> str:
    """A random id in Kafka's form; a leading dash would read as an option on a command line."""
    while True:
        text = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        if not text.startswith("-"):
            return text


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody has now, and that no outgoing connection will take."""
    with contextlib.ExitStack() as held:  # all stay bound until the last is found, so none is found twice
        ports: list[int] = []
        for port in random.SystemRandom().sample(_PORTS, k=len(_PORTS)):
            if len(ports) == count:
                break
            probe = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                ports.append(port)
        if len(ports) < count:
            raise BrokerUnavailable(f"no {count} free ports in {_PORTS.start}..{_PORTS.stop - 1}", op="start")
        return ports
