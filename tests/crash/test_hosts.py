"""A cluster of several hosts: ``spark-submit`` of the group-to-Delta job with an installed wheel, and with --py-files.

Each host has a network and folders of its own (``kit.host_network``). The hosts share the folder with the table and the
checkpoint, as with a distributed file system.
"""

import contextlib
import os
import socket
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyspark
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from delta_files import living_rows
from kafka_helpers import await_progress, committed_of, create_topic, end_offsets_of, produce_to, size_of
from kit import host_network
from kit.host_network import Host, HostNetwork

from crash.running import HANG_S
from crash.standalone import ELECTED, REGISTERED, daemon, python_without_package
from spark_group_source.host import run_files
from spark_group_source.local.broker import Broker, free_ports
from spark_group_source.local.conf import DELTA_SETTINGS
from spark_group_source.local.jars import delta_jars

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("spark_group_source", "pyspark_kafka_group")
TOPIC, GROUP, PARTITIONS = "orders", "etl", 4
SESSION_MS = 15_000
WORKER_S = 15
"""A worker that is silent for so long is lost."""
PIP_S, DRAIN_S, STOP_S = 900, 300, 300
"""Bounds of a hang."""
STOPPED = 128 + 15
"""The exit status of spark-submit after SIGTERM."""

pytestmark = [
    pytest.mark.crash,
    pytest.mark.spark,
    pytest.mark.broker,
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.timeout(HANG_S),
]


class Cluster:
    """A standalone cluster: the host ``front`` has the master and the driver, each other host a worker."""

    def __init__(self, network: HostNetwork, servers: str) -> None:
        self.network, self.servers, self.shared = network, servers, network.home / "shared"
        self.shared.mkdir()
        self.table, self.checkpoint = self.shared / "table", self.shared / "checkpoint"
        self.admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
        self.producer = Producer({"bootstrap.servers": servers, "log_level": 0})
        self.sent = 0
        self.job: subprocess.Popen[bytes] | None = None
        self.front = network.add("front")
        self._daemon(self.front, ELECTED, "master.Master", "--host", self.front.name, "--port", "7077")

    def add_worker(self, name: str) -> Host:
        host = self.network.add(name)
        own = ("--host", name, "--cores", "1", "--memory", "1g", "--work-dir", str(host.home / "work"))
        self._daemon(host, REGISTERED, "worker.Worker", *own, "spark://front:7077")
        return host

    def _daemon(self, host: Host, ready: str, main: str, *arguments: str) -> None:
        lost = f"-Dspark.worker.timeout={WORKER_S} -Djava.io.tmpdir={host.home / 'tmp'}"
        command, environment = daemon(host.home, main, *arguments, java=lost)
        log = host.home / "daemon.log"
        host.start(*command, log=log, environment=environment | self._folders(host))
        self.await_(lambda: ready in log.read_text(), f"the {main} of {host.name}")

    def _folders(self, host: Host) -> dict[str, str]:
        return {"SPARK_LOCAL_DIRS": str(host.home / "tmp"), "SPARK_LOCAL_IP": host.address}

    def submit(self, python: Path, *more: str) -> "subprocess.Popen[bytes]":
        """Submit the job, which runs until it is stopped."""
        settings = {
            **DELTA_SETTINGS,
            "spark.executor.memory": "512m",
            "spark.driver.host": self.front.name,
            "spark.driver.bindAddress": self.front.address,
            "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={self.front.home / 'tmp'}",
        }
        submit = [str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), "--master", "spark://front:7077"]
        submit += ["--jars", ",".join(map(str, delta_jars())), *more]
        submit += [word for key, value in settings.items() for word in ("--conf", f"{key}={value}")]
        job = {
            "bootstrap-servers": self.servers,
            "group": GROUP,
            "topics": TOPIC,
            "table": self.table,
            "checkpoint": self.checkpoint,
            "trigger": "500 milliseconds",
            "writer": "native",  # all hosts share the folder
        }
        arguments = [word for name, value in job.items() for word in (f"--{name}", str(value))]
        arguments += ["--option", f"kafka.session.timeout.ms={SESSION_MS}", "--option", f"minPartitions={PARTITIONS}"]
        environment = self._folders(self.front) | {"PYSPARK_PYTHON": str(python), "SPARK_CONF_DIR": str(ROOT / "conf")}
        log = self.front.home / "job.log"
        self.job = self.front.start(
            *submit, str(ROOT / "jobs" / "group_to_delta.py"), *arguments, log=log, environment=environment
        )
        return self.job

    def send(self, each: int = 50) -> None:
        """Produce ``each`` records to each partition."""
        for partition in range(PARTITIONS):
            produce_to(self.producer, TOPIC, map(str, range(each)), partition=partition)
        self.sent += each * PARTITIONS

    def await_members(self, *hosts: Host) -> None:
        """Wait, while records arrive, until each of these hosts and no other one has a member."""

        def there() -> bool:
            if len(self.rows()) == self.sent:
                self.send(1)
            return self.placed_on() == sorted(host.name for host in hosts)

        self.await_(there, f"members on {', '.join(host.name for host in hosts)}")

    def placed_on(self) -> list[str]:
        """The host of each member, according to the run's statistics; empty if some partition has no member.

        The broker's own list has the address at which a static member joined first.
        """
        run = next(iter(run_files.read(GROUP)), None)
        if run is None or sum(run["assigned"]) != PARTITIONS:
            return []
        return sorted(agent.rpartition("-")[0] for agent in run["agents"])

    def await_rows(self) -> None:
        self.await_(lambda: len(self.rows()) >= self.sent, "all rows")

    def rows(self) -> Counter[tuple[int, int]]:
        if not (self.table / "_delta_log").exists():
            return Counter()
        return Counter((row["partition"], row["offset"]) for row in living_rows(self.table, ["partition", "offset"]))

    def agents(self) -> list[int]:
        """The agents on all hosts."""
        found = []
        for pid in (pid for host in self.network.hosts for pid in host.pids()):
            with contextlib.suppress(psutil.Error):
                if "spark-group-agent" in psutil.Process(pid).cmdline():
                    found.append(pid)
        return found

    def await_(self, holds: Any, what: str) -> None:
        def look() -> object:
            assert self.job is None or self.job.poll() is None, self.logs()
            return holds()

        try:
            await_progress(look, self.progress, what=what)
        except BaseException as exc:
            exc.add_note(self.logs())
            raise

    def progress(self) -> object:
        folders = (self.table / "_delta_log", self.checkpoint / "offsets", self.checkpoint / "commits")
        logs = [*self.network.home.glob("*/*.log"), *self.network.home.glob("*/work/*/*/std*")]
        return size_of(*logs), [len(list(folder.glob("*"))) for folder in folders]

    def logs(self) -> str:
        files = [*self.network.home.glob("*/*.log"), *self.network.home.glob("*/work/*/*/stderr")]
        return "\n".join(f"--- {file}\n{file.read_text(errors='replace')[-6000:]}" for file in files)


@pytest.fixture
def cluster(jvm: None, tmp_path: Path) -> Iterator[Cluster]:
    """A cluster without workers, and a broker on this machine that all its hosts reach."""
    del jvm
    if reason := host_network.obstacle():
        pytest.skip(reason)
    home = tmp_path / "network"
    home.mkdir()
    with HostNetwork(home, hidden=[ROOT / name for name in PACKAGES]) as network:
        inside, outside, controller = free_ports(3)
        listeners = {"PLAINTEXT": f"127.0.0.1:{inside}", "HOSTS": f"{network.address}:{outside}"}
        clients = [f"{name}://{address}" for name, address in listeners.items()]
        settings = {
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "listeners": ",".join([*clients, f"CONTROLLER://127.0.0.1:{controller}"]),
            "advertised.listeners": ",".join(clients),
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,HOSTS:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "PLAINTEXT",
        }
        with Broker(port=inside, settings=settings):
            found = Cluster(network, listeners["HOSTS"])
            create_topic(found.admin, TOPIC, PARTITIONS)
            yield found


def installed(home: Path) -> tuple[Path, list[str], dict[str, str]]:
    """A Python that has the wheel and its dependencies, in a folder that all hosts have."""
    venv.create(home / "environment", symlinks=True)
    python = home / "environment" / "bin" / "python"
    (site,) = (home / "environment" / "lib").glob("python3*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    pip("--python", str(python), "install", "--no-deps", str(wheel(home)))
    return python, [], {}


def sent(home: Path) -> tuple[Path, list[str], dict[str, str]]:
    """A Python that has the dependencies only, and the package in a file of the driver's host."""
    folder, archive = home / "sent", home / "front" / "sent.zip"
    pip("install", "--no-deps", "--target", str(folder), str(wheel(home)))
    with zipfile.ZipFile(archive, "w") as content:
        for path in sorted(folder.rglob("*")):
            content.write(path, path.relative_to(folder))
    return python_without_package(home), ["--py-files", str(archive)], {"PYTHONPATH": str(archive)}


def wheel(home: Path) -> Path:
    pip("wheel", "--no-deps", "--wheel-dir", str(home / "dist"), str(ROOT))
    (found,) = (home / "dist").glob("*.whl")
    return found


def pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, timeout=PIP_S, check=True, env=environment)


@pytest.mark.parametrize("way", [installed, sent], ids=["wheel", "py-files"])
def test_a_lost_host_and_a_new_one_leave_each_record_in_the_table_once(
    way: Any, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    own = cluster.front.home / "tmp" / run_files.directory().name
    names = run_files.here().replace(socket.gethostname(), cluster.front.name)
    monkeypatch.setattr(run_files, "directory", lambda: own)
    monkeypatch.setattr(run_files, "here", lambda: names)
    python, submit, environment = way(cluster.network.home)
    first, second = cluster.add_worker("first"), cluster.add_worker("second")
    cluster.send()
    job = cluster.submit(python, *submit)
    cluster.await_members(first, second)
    cluster.send()

    second.kill()
    cluster.send()
    third = cluster.add_worker("third")

    cluster.await_members(first, third)
    cluster.send()
    cluster.await_rows()
    drain = [str(python), "-m", "spark_group_source", "drain", "--group", GROUP]
    cluster.front.run(*drain, bound_s=DRAIN_S, environment=environment)
    assert committed_of(cluster.admin, GROUP) == end_offsets_of(cluster.admin, TOPIC)
    job.terminate()
    assert job.wait(STOP_S) == STOPPED
    await_progress(lambda: not cluster.agents(), cluster.agents, what="the end of all agents")
    each = cluster.sent // PARTITIONS
    assert cluster.rows() == {(partition, offset): 1 for partition in range(PARTITIONS) for offset in range(each)}
