"""The local Kafka broker: start, stop, failures and clean-up."""

import fcntl
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from kafka_helpers import await_until, create_topic, end_offsets_of, produce_to
from kafka_tool import kafka_tools_jars
from kit.spark_kafka import spark_kafka_jars
from printed_commands import commands
from streams import alive

from spark_group_source.errors import BrokerUnavailable, OptionError, SetupError
from spark_group_source.local import background as local_broker
from spark_group_source.local import broker as broker_module
from spark_group_source.local import jars
from spark_group_source.local.broker import Broker, Node, free_ports
from spark_group_source.local.conf import read_conf

pytestmark = pytest.mark.broker

CLI = [sys.executable, "-m", "spark_group_source"]
CLI_S = 600
"""Bound of one command line; ``broker start`` is the longest."""


# --- one node ---------------------------------------------------------------------------------------------------------


def test_node_serves_groups_at_once_and_leaves_only_its_data(tmp_path: Path) -> None:
    folder = tmp_path / "données \\ 1"
    for begins in (True, False):
        with Broker(data_dir=folder) as broker:
            settings: dict[str, str | int | float | bool] = {
                "bootstrap.servers": broker.bootstrap_servers,
                "log_level": 0,
            }
            admin, pids = AdminClient(settings), dict(broker.pids)
            assert len(admin.list_topics(timeout=300).topics["__consumer_offsets"].partitions) == 3
            # these three belong to the three partitions of the offsets topic; an error would be raised here
            for group in admin.describe_consumer_groups(["a", "b", "c"]).values():
                assert group.result(300).state is not None
            if begins:
                create_topic(admin, "kept")
                produce_to(Producer(settings), "kept", ["1", "2", "3"])
            assert list(end_offsets_of(admin, "kept").values()) == [3]
            before = (folder / "node-1" / "server.properties").read_bytes()
            with pytest.raises(OptionError, match="another broker uses the data directory"):
                Broker(data_dir=folder).start()
            assert (folder / "node-1" / "server.properties").read_bytes() == before
        assert list(pids) == [1] and not alive(pids[1]) and broker.pids == {}
    assert (folder / "logs" / "node-1.log").stat().st_size > 0
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"num.io.threads": "none"}, r"cannot format .*num\.io\.threads"),
        ({"authorizer.class.name": "no.such.Class"}, r"node 1 ended with code 1.*node-1\.log.*no\.such\.Class"),
    ],
    ids=["cannot be read", "cannot work"],
)
def test_node_that_cannot_start_reports_its_log_and_leaves_nothing(
    setting: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(BrokerUnavailable, match=f"(?s){message}"):
        Broker(settings=setting).start()
    assert list(tmp_path.iterdir()) == []


# --- the end of the parent, of any command ----------------------------------------------------------------------------

PARENT = """
import os, signal, sys
from pathlib import Path
from spark_group_source.local.broker import Node
home = Path(sys.argv[1])
node = Node(["sleep", "600"], home / "log", remove=home)
os.kill(node.pid, signal.SIGSTOP)
print(node.pid, node._supervisor.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    "killed",
    ["parent", pytest.param("supervisor", marks=pytest.mark.skipif(sys.platform != "linux", reason="death signals"))],
)
def test_node_ends_with_a_killed_parent_or_supervisor(killed: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    command = [sys.executable, "-c", PARENT, str(home)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        node, supervisor = map(int, parent.stdout.readline().split())
        assert alive(node) and home.exists()
        os.kill(parent.pid if killed == "parent" else supervisor, signal.SIGKILL)
        await_until(lambda: not alive(node), what="the end of the node")
        if killed == "parent":
            await_until(lambda: not home.exists(), what="the removal of its data")
        parent.kill()


def test_node_stops_in_order_below_a_process_that_ignores_signals(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        process = Node(["sleep", "600"], tmp_path / "log", remove=None)
    finally:
        signal.signal(signal.SIGTERM, before)
    try:
        process.signal(signal.SIGTERM)
        assert process.wait(300)
    finally:
        process.kill()


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment with its own state folder; its broker is stopped at the end."""
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state")}
    yield environment
    spark_group("broker", "stop", env=environment)


def spark_group(*args: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *args], env=env, capture_output=True, text=True, timeout=CLI_S, check=False)


@pytest.mark.slow
def test_background_broker_is_started_shown_and_stopped(home: dict[str, str]) -> None:
    port, other = free_ports(2)
    started = spark_group("broker", "start", "--port", str(port), "--topic", "orders:4", env=home)
    assert started.stdout.splitlines()[-1:] == [f"127.0.0.1:{port}"], started.stderr
    admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{port}", "log_level": 0})
    assert len(admin.list_topics(timeout=300).topics["orders"].partitions) == 4

    document = json.loads((Path(home["XDG_STATE_HOME"]) / "spark-group-source" / "broker.json").read_text())
    shown = spark_group("broker", "status", env=home)
    assert shown.returncode == 0 and str(port) in shown.stdout

    again = spark_group("broker", "start", "--port", str(other), env=home)
    assert again.returncode == 1 and again.stderr.startswith(
        f"error: OptionError: a broker is already running at 127.0.0.1:{port}"
    )

    (stop,) = commands(again.stderr)
    assert spark_group(*shlex.split(stop)[1:], env=home).stdout.strip() == f"stopped 127.0.0.1:{port}"
    assert not alive(document["node"])
    await_until(lambda: not alive(document["pid"]), what="the end of the process that let its lock go")
    assert spark_group("broker", "status", env=home).returncode == 3


def test_a_relative_folder_of_xdg_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker's process has another working folder than the command that starts it."""
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert local_broker.state_dir() == Path.home() / ".local" / "state" / "spark-group-source"
    assert jars.cache_dir() == Path.home() / ".cache" / "spark-group-source"


def test_foreign_process_is_never_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        state = {"pid": other.pid, "bootstrap_servers": "x:1", "node": other.pid, "log_dir": "/", "place": "b-1"}
        local_broker.state_dir().mkdir()
        file = local_broker.state_dir() / "broker.json"
        file.write_text(json.dumps(state))
        assert local_broker.running() is None and local_broker.stop() is None
        assert alive(other.pid)
        file.write_text(json.dumps(state))
        with file.open() as locked:  # by a broker in a container with the same home
            fcntl.flock(locked, fcntl.LOCK_EX)
            with pytest.raises(OptionError, match=r"the broker at x:1 runs at b-1, and this is .* stop it there"):
                local_broker.stop()
            with pytest.raises(OptionError, match=r"already running at x:1; stop it .* at b-1"):
                local_broker.start()
        assert alive(other.pid) and file.exists()
        other.kill()


def test_port_in_use_is_named() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(
            OptionError, match=rf"port {(port := taken.getsockname()[1])} of 127\.0\.0\.1 is in use.* --port"
        ),
    ):
        Broker(port=port).start()


def test_a_node_that_has_ended_is_not_ready_although_another_process_answers_at_its_port() -> None:
    broker = Broker()
    broker._nodes = {1: SimpleNamespace(running=False, code=1, tail=lambda: "")}  # type: ignore[dict-item]  # only what is used
    with pytest.raises(BrokerUnavailable, match="node 1 ended with code 1"):
        broker._await([1], lambda: True)


def test_a_background_broker_whose_start_is_interrupted_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def sleeping(_: object, **more: Any) -> "subprocess.Popen[bytes]":
        started.append(popen(["sleep", "600"], **more))
        return started[-1]

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(local_broker, "state_dir", lambda: tmp_path)
    monkeypatch.setattr(local_broker, "java_path", lambda: None)
    monkeypatch.setattr(local_broker, "kafka_jars", lambda: None)
    monkeypatch.setattr(subprocess, "Popen", sleeping)
    monkeypatch.setattr(local_broker, "_await", interrupted)
    with pytest.raises(KeyboardInterrupt):
        local_broker.start(port=free_ports(1)[0])
    assert started[0].poll() is not None


def test_invalid_topic_option_of_broker_is_refused() -> None:
    assert local_broker.parse_topics(["a", "b:3"]) == {"a": 1, "b": 3}
    for text in ("orders:", "orders:0", "orders:x", ":3"):
        with pytest.raises(OptionError, match="NAME:PARTITIONS"):
            local_broker.parse_topics([text])
    for name in ("or ders", "..", "x" * 250, "bestellungen-ü"):  # before a broker is started
        with pytest.raises(OptionError, match="Kafka does not allow the name"):
            local_broker.parse_topics([f"{name}:3"])


def test_a_topic_with_more_partitions_than_kafka_creates_is_refused_before_the_start() -> None:
    assert local_broker.parse_topics(["a:10000"]) == {"a": 10_000}
    with pytest.raises(OptionError, match="--topic 'b:6000': Kafka creates at most 10,000 partitions at once"):
        local_broker.parse_topics(["a:6000", "b:6000"])
    for count in ("10001", "100000000000"):
        with pytest.raises(OptionError, match=f"--topic 'a:{count}': Kafka creates at most 10,000 partitions"):
            local_broker.parse_topics([f"a:{count}"])


def test_the_controller_of_a_broker_has_another_port_than_the_given_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, other = free_ports(2)
    broker = Broker(port=port)
    broker._base = tmp_path
    monkeypatch.setattr(broker_module, "free_ports", lambda _: [port, other])
    for name in ("_format", "_launch", "_await"):
        monkeypatch.setattr(broker, name, lambda *_: None)
    broker._boot()
    settings = (tmp_path / "node-1" / "server.properties").read_text().splitlines()
    assert f"listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{other}" in settings


def test_a_data_directory_with_a_comma_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka would write to two directories."""
    (tmp_path / "a,b").mkdir()
    monkeypatch.chdir(tmp_path / "a,b")
    monkeypatch.setattr(local_broker, "state_dir", lambda: tmp_path)
    monkeypatch.setattr(local_broker, "java_path", lambda: None)
    monkeypatch.setattr(local_broker, "kafka_jars", lambda: None)
    monkeypatch.setattr(broker_module, "_java_command", lambda _: [])
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process is started"))
    for folder in (tmp_path / "x,y", Path("data")):
        with pytest.raises(OptionError, match="has a comma in its path"):
            local_broker.start(data_dir=folder)
        with pytest.raises(OptionError, match="has a comma in its path"):
            Broker(data_dir=folder).start()
        assert not folder.exists()


# --- Java and the jars ------------------------------------------------------------------------------------------------


def fake_java(directory: Path, version: str, code: int = 0) -> Path:
    java = directory / "bin" / "java"
    java.parent.mkdir(parents=True, exist_ok=True)
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2020-01-01' >&2\nexit {code}\n")
    java.chmod(0o755)
    return java


def test_missing_java_is_reported_in_one_line(home: dict[str, str], tmp_path: Path) -> None:
    env = {key: value for key, value in home.items() if key != "JAVA_HOME"} | {"PATH": str(tmp_path)}
    run = spark_group("broker", "start", env=env)
    assert run.returncode == 1
    assert run.stderr.splitlines() == ["error: SetupError: Java 17 or newer is needed, and there is no java in PATH"]


@pytest.mark.parametrize(
    ("version", "refused"),
    [("1.8.0_412", 8), ("16-ea", 16), ("17", 0), ("25.0.1", 0)],
)
def test_java_home_wins_and_old_java_is_refused_with_version(
    version: str, refused: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = fake_java(tmp_path, version)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    if refused:
        with pytest.raises(SetupError, match=rf"^Java 17 or newer is needed, and {java} is Java {refused}$"):
            jars.java_path()
    else:
        assert jars.java_path() == java
    fake_java(tmp_path, version, code=1)
    with pytest.raises(SetupError, match="does not run"):
        jars.java_path()


def test_failed_download_is_reported_in_one_line_with_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = tmp_path / "settings.xml"
    nowhere.write_text(
        '<ivysettings><settings defaultResolver="m"/><resolvers>'
        '<ibiblio name="m" m2compatible="true" root="http://127.0.0.1:9/"/></resolvers></ivysettings>'
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SPARK_GROUP_IVY_SETTINGS", str(nowhere))
    with pytest.raises(SetupError, match=r"cannot download .*kafka_2\.13.*SPARK_GROUP_IVY_SETTINGS") as caught:
        jars.kafka_jars()
    assert "\n" not in str(caught.value) and "Connect" in str(caught.value)
    left = {path.name for path in jars.cache_dir().iterdir()}
    assert left <= {"resolve.lock", "ivy"}, "a failed download must not look like a finished one"
    announced = capsys.readouterr().err.splitlines()[0]  # on a slow machine lines with the progress follow
    assert announced.startswith("downloading org.apache.kafka:kafka_2.13:")
    assert f" MB, from the repositories of {nowhere} to {jars.cache_dir() / 'kafka_2.13-'}" in announced


def test_a_download_reports_its_descriptors_and_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "before.jar").write_bytes(bytes(4_000_000))
    reported: list[str] = []

    def report(line: str) -> None:
        reported.append(line)
        if line.startswith("  resolving dependencies: 1 descriptors after "):
            (tmp_path / "resolved").touch()
        if line.startswith("  3 of 45 MB after "):
            (tmp_path / "seen").touch()

    monkeypatch.setattr(jars, "_report", report)
    monkeypatch.setattr(jars, "PROGRESS_S", 0.05)
    loads = (
        "import pathlib, time; pathlib.Path('ivy-4.2.1.xml.original').touch()\n"
        "while not pathlib.Path('resolved').exists(): time.sleep(0.01)\n"
        "pathlib.Path('new.jar.part').write_bytes(bytes(3_000_000))\n"
        "while not pathlib.Path('seen').exists(): time.sleep(0.01)\n"
        "print('loaded')"
    )
    command = ["env", "-C", str(tmp_path), sys.executable, "-c", loads]
    assert jars._run_ivy(command, "Kafka", tmp_path, 45) == (0, "loaded\n")
    assert reported


def test_cached_jars_need_neither_network_nor_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = jars.kafka_jars()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert jars.kafka_jars() == found
    names = " ".join(jar.name for jar in found)
    # the broker itself, its log backend, and a jar of the type that is easily left out
    assert all(part in names for part in ("kafka_2.13-", "log4j-slf4j-impl", "snappy-java"))


def test_jars_that_spark_brings_are_left_out() -> None:
    assert any("delta-spark" in jar.name for jar in jars.delta_jars())
    assert not [jar.name for jar in jars.delta_jars() if "jackson-core" in jar.name or "scala-library" in jar.name]


def test_reported_sizes_are_those_of_the_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also: what Spark brings is not downloaded, so the downloads are small."""
    resolve, sizes = jars.resolve, []

    def measured(coordinates: Sequence[str], exclude: Sequence[str] = (), *, mb: int) -> list[Path]:
        found = resolve(coordinates, exclude, mb=mb)
        sizes.append((mb, sum(jar.stat().st_size for jar in found) / 1e6))
        return found

    monkeypatch.setattr(jars, "resolve", measured)
    for used in (jars.kafka_jars, jars.delta_jars, kafka_tools_jars, spark_kafka_jars):
        used()
    assert len(sizes) == 4 and all(abs(reported - real) < 2 for reported, real in sizes), sizes


def test_settings_file_errors_name_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_conf("broker.properties")["group.initial.rebalance.delay.ms"] == "0"
    assert read_conf("spark-defaults.conf")["spark.ui.enabled"] == "false"
    monkeypatch.setattr("spark_group_source.local.conf._PACKAGE", tmp_path / "package")
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "x.properties").write_text("# why\na=1\n\na=2\n")
    with pytest.raises(ValueError, match=r"x\.properties, line 4: 'a' appears twice"):
        read_conf("x.properties")
    (tmp_path / "conf" / "x.properties").write_text("a\n")
    with pytest.raises(ValueError, match=r"x\.properties, line 1: must be key=value"):
        read_conf("x.properties")
