"""Commands in errors, log lines and remedies run as printed; ``printed_commands.TESTED`` lists all of them.

Each test provokes the real message. Those of the sink are in ``delta/decisions/test_commands.py``.
"""

import ast
import importlib
import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from confluent_kafka import KafkaError, TopicCollection
from kafka_helpers import ADMIN_S, Record, await_until, set_committed
from kit.run_harness import RunHarness
from manual_environment import ManualEnvironment, refusal
from printed_commands import commands, commands_of
from reading import read
from scenes import Scene
from security.certificates import Authority
from sink_helpers import Query, one
from sink_source import offset
from streams import OtherMember
from typer.testing import CliRunner

from spark_group_source import command_line, compatibility, decode, librdkafka, source
from spark_group_source.cli import offsets as deletion
from spark_group_source.cli import run as job
from spark_group_source.cli.app import app
from spark_group_source.errors import CheckpointMismatch, SourceError
from spark_group_source.host import run_files
from spark_group_source.kafka.group_admin import GroupAdmin
from spark_group_source.local import jars
from spark_group_source.local.conf import local_spark_settings
from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.options.java import translate
from spark_group_source.options.table import Options
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.data_loss import GRACE_MS
from spark_group_source.protocol.offsets import parse
from spark_group_source.protocol.statistics import Statistics
from spark_group_source.reader import records

COMMAND_S = 300
"""Ends a command that hangs."""


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ('def f():\n    "Run spark-group list."\n    log.info("group %s: see spark-group list", g)', 1),
        ('def f():\n    return "spark-group " + "list"', 0),
        ('def f():\n    return ("first `spark-group "\n        f"list --group {g}`, then `spark-group watch`")', 2),
        ('def f():\n    return command_line.spark_group("list", to)', 1),
        ('def f():\n    return f"convert it with {shlex.join(words)}"', 1),
        ('NAME = "spark-group status of"', 0),
    ],
)
def test_a_command_in_a_text_or_a_call_is_found(code: str, count: int) -> None:
    assert len(list(commands_of(ast.parse(code)))) == count


# --- groups and brokers -----------------------------------------------------------------------------------------------


def connection(scene: Scene) -> command_line.Connection:
    return command_line.connection({"bootstrap.servers": scene.servers})


def output(scene: Scene, *words: str) -> str:
    """The message of a command that is refused."""
    shown = scene.typed(*words)
    assert shown.code, shown.output
    return shown.output


def error(run: Callable[[], object]) -> str:
    with pytest.raises(SourceError) as found:
        run()
    return str(found.value)


def rebalance_timeout(scene: Scene, _: str) -> str:
    run = RunHarness(group=scene.group, connection=connection(scene))
    run.silent = {ev.Join}
    return error(run.latest)


def unconfirmed_commit(scene: Scene, topic: str) -> str:
    environment = ManualEnvironment()
    environment.will("alter_consumer_group_offsets", {scene.group: refusal(KafkaError._TIMED_OUT)})
    admin = GroupAdmin({"bootstrap.servers": scene.servers}, environment=environment)
    return error(lambda: admin.move_committed(scene.group, {TopicPartition(topic, 0): 1}))


def missing_group(scene: Scene, _: str) -> str:
    return output(scene, "describe", "--bootstrap-servers", scene.servers, "--group", f"{scene.group} of nobody")


def deletion_not_read_back(scene: Scene, topic: str) -> str:
    tp = TopicPartition(topic, 0)
    admin: Any = SimpleNamespace(
        connection=connection(scene), delete_offsets=lambda *_: {tp: 0}, read_offsets=lambda *_: {}
    )
    return deletion.delete(admin, scene.group, {tp: 1})[tp].reason


def no_query_on_this_host(scene: Scene, _: str) -> str:
    return output(scene, "drain", "--group", scene.group)


def export_of_an_active_group(scene: Scene, topic: str) -> str:
    words = ("--group", scene.group, "--bootstrap-servers", scene.servers, "--to-checkpoint")
    with OtherMember(scene.servers, scene.group, [topic]) as member:
        await_until(lambda: member.partitions, what="its partitions")
        return output(scene, "migrate", *words)


def migration_of_a_kafka_group_checkpoint(scene: Scene, topic: str) -> str:
    query = Query(None, scene.folder, "my checkpoint")  # type: ignore[arg-type]  # nothing is read with Spark
    topic_id = scene.admin.describe_topics(TopicCollection([topic]))[topic].result(ADMIN_S).topic_id
    query.plan(0, offset(0, one(1, 3, topic=topic), group=scene.group, topic_id=str(topic_id)))
    (query.root / "commits").mkdir()
    (query.root / "commits" / "0").write_text("v1\n{}")
    words = ("--bootstrap-servers", scene.servers, "--group", "another", "--from-checkpoint", str(query.root))
    return output(scene, "migrate", *words)


def unreadable_record(scene: Scene, _: str) -> str:
    topic = scene.topic(config={"message.timestamp.after.max.ms": str(2**63 - 1)})
    scene.produce(topic, [Record(b"x", timestamp_ms=2**62)])
    settings = Options.parse(scene.options(subscribe=topic)).consumer_settings()
    return error(lambda: list(read(settings, [OffsetRange(TopicPartition(topic, 0), 0, 1)])))


def log_shorter_than_the_position(scene: Scene, topic: str) -> str:
    tp = TopicPartition(topic, 0)
    run = RunHarness(topics={topic: 1}, group=scene.group, connection=connection(scene))
    run.committed, run.ends = {tp: ev.Committed(offset=5)}, {tp: 2}

    def read() -> None:
        for _ in range(3):
            run.batch()
            run.pass_time(GRACE_MS)

    return error(read)


MESSAGES: dict[str, tuple[Callable[[Scene, str], str], list[str]]] = {
    "rebalance timeout": (rebalance_timeout, ["describe"]),
    "commit not confirmed": (unconfirmed_commit, ["describe"]),
    "missing group": (missing_group, ["list"]),
    "deletion not read back": (deletion_not_read_back, ["describe"]),
    "no query on this host": (no_query_on_this_host, ["drain", "describe"]),
    "export of an active group": (export_of_an_active_group, ["drain"]),
    "checkpoint of a kafka-group query": (migration_of_a_kafka_group_checkpoint, ["reset"]),
    "unreadable record": (unreadable_record, ["reset"]),
    "log shorter than the position": (log_shorter_than_the_position, ["reset"]),
}
"""The messages with commands for a group or its brokers: how to provoke one, and the names of its commands."""


@pytest.mark.broker
@pytest.mark.parametrize("message", MESSAGES)
def test_a_command_runs_as_printed(message: str, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "directory", lambda: scene.folder / "runs")
    provoke, names = MESSAGES[message]
    topic = scene.topic()
    scene.produce(topic, ["a", "b", "c"])
    set_committed(scene.admin, scene.group, topic, {0: 1})
    text = provoke(scene, topic)
    printed = commands(text)
    assert [shlex.split(command)[1] for command in printed] == names, text
    run = run_files.Publisher(scene.group)  # of a drained query, on the host where `drain` is to be run
    run.publish(Statistics(group=scene.group, stream="s1", seq=0, state="reading", generation=1), drained=True)
    try:
        for command in printed:
            if command_line.UNKNOWN_SERVERS in command:
                assert message == "no query on this host", "a process that does not know the brokers"
                assert f"({command_line.UNKNOWN_SERVERS} are the bootstrap servers" in text
            shown = scene.typed(*shlex.split(command.replace(command_line.UNKNOWN_SERVERS, scene.servers))[1:])
            assert shown.code == 0, f"{command}\n{shown.output}"
            if shlex.split(command)[1] != "list":
                assert scene.group in shown.output
    finally:
        run.close()
    if message == "checkpoint of a kafka-group query":
        assert scene.committed() == {TopicPartition(topic, 0): 3}
    if message == "log shorter than the position":
        assert scene.committed() == {TopicPartition(topic, 0): 2}
    if message == "unreadable record":
        (skipped,) = scene.committed().keys() - {TopicPartition(topic, 0)}
        assert scene.committed()[skipped] == 1


@pytest.mark.broker
def test_kafkas_tool_shows_the_settings_of_brokers(scene: Scene) -> None:
    long = {"kafka.session.timeout.ms": "1900000", "kafka.max.poll.interval.ms": "2000000"}
    text = error(lambda: scene.played(subscribe=scene.topic(), **long).run())
    (command,) = commands(text)
    program, *words = shlex.split(command)
    assert program == "kafka-configs.sh"
    class_path = os.pathsep.join(map(str, jars.kafka_jars()))
    tool = [str(jars.java_path()), "-cp", class_path, "kafka.admin.ConfigCommand"]  # what the script of Kafka starts
    done = subprocess.run([*tool, *words], capture_output=True, text=True, timeout=COMMAND_S, check=True)
    assert "group.max.session.timeout.ms=1800000 " in done.stdout


def test_the_checkpoint_of_another_source_names_a_command_with_help() -> None:
    with pytest.raises(CheckpointMismatch) as found:
        parse('{"orders":{"0":5}}')
    (command,) = commands(found.value)
    shown = CliRunner().invoke(app, shlex.split(command)[1:])
    assert shown.exit_code == 0 and "--from-checkpoint" in shown.output


# --- installations and conversions ------------------------------------------------------------------------------------


def without(package: str, patch: pytest.MonkeyPatch) -> None:
    """The package is not installed."""
    found = importlib.util.find_spec
    patch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))


def no_spark(patch: pytest.MonkeyPatch) -> str:
    without("pyspark", patch)
    return compatibility.problem() or ""


def old_spark(patch: pytest.MonkeyPatch) -> str:
    patch.setitem(sys.modules, next(iter(compatibility.FEATURES)), None)
    return compatibility.problem() or ""


def no_numpy(patch: pytest.MonkeyPatch) -> str:
    patch.delitem(sys.modules, "numpy")
    without("numpy", patch)
    return compatibility.problem() or ""


def no_jars(patch: pytest.MonkeyPatch) -> str:
    without("pyspark", patch)
    return error(jars._spark_jars)


def no_client(patch: pytest.MonkeyPatch) -> str:
    without("confluent_kafka", patch)
    return error(librdkafka.extension)


def other_client(_: pytest.MonkeyPatch) -> str:
    return error(lambda: librdkafka.Library({"of_another_release": (None,)}))


def old_client(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(librdkafka, "OLDEST", 0x7FFF_FFFF)
    return error(librdkafka._loaded.__wrapped__)


def old_pyarrow(patch: pytest.MonkeyPatch) -> str:
    patch.setattr("pyarrow.__version__", "18.1.0")
    return error(records._check_pyarrow)


def no_aws(patch: pytest.MonkeyPatch) -> str:
    patch.setitem(sys.modules, "boto3", None)
    patch.delitem(sys.modules, "confluent_kafka._oauthbearer.aws.aws_autowire", raising=False)
    return error(lambda: librdkafka.token_source({librdkafka._AWS_MARKER: "aws_iam"}))


def no_registry_client(patch: pytest.MonkeyPatch) -> str:
    patch.setitem(sys.modules, "confluent_kafka.schema_registry", None)
    return error(lambda: decode.Registry("http://127.0.0.1:1"))


def no_prometheus(patch: pytest.MonkeyPatch) -> str:
    patch.setitem(sys.modules, "spark_group_source.metrics.endpoint", None)
    patch.delattr("spark_group_source.metrics.endpoint", raising=False)
    options = Options.parse({"kafka.bootstrap.servers": "b:1", "kafka.group.id": "g", "subscribe": "t"})
    return error(lambda: source._start_metrics(options, run_files.Publisher("g")))


@pytest.mark.parametrize(
    "provoke",
    [
        no_spark,
        old_spark,
        no_numpy,
        no_jars,
        no_client,
        other_client,
        old_client,
        old_pyarrow,
        no_aws,
        no_registry_client,
        no_prometheus,
    ],
    ids=lambda f: f.__name__,
)
def test_an_installation_is_satisfied_as_printed(
    provoke: Callable[[pytest.MonkeyPatch], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip runs it in this environment, which has the packages: without an index, it accepts only what is installed."""
    with monkeypatch.context() as patch:
        (command,) = commands(provoke(patch))
    offline = ["--no-index", "--no-deps", "--dry-run", "--disable-pip-version-check"]
    program = [sys.executable, "-m", *shlex.split(command), *offline]
    done = subprocess.run(program, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "already satisfied" in done.stdout and "does not provide the extra" not in done.stderr


def test_the_options_of_spark_submit_are_those_of_a_session_with_delta_lake(tmp_path: Path) -> None:
    session: Any = SimpleNamespace(conf=SimpleNamespace(get=lambda _, default: default))
    with pytest.raises(typer.BadParameter) as found:
        job._check_delta(session)
    _, printed = str(found.value).split("Give ")
    program, packages, coordinates, *words = shlex.split(printed)
    assert (program, packages, coordinates) == ("spark-submit", "--packages", compatibility.delta_coordinate())
    assert set(words[::2]) == {"--conf"}
    given = dict(word.split("=", 1) for word in words[1::2])
    assert given and given.items() <= local_spark_settings(str(tmp_path)).items()


@pytest.mark.slow
def test_stores_are_converted_as_printed(jvm: None, tmp_path: Path) -> None:
    """A truststore of Java becomes a PEM file with its certificate."""
    del jvm
    folder, word = tmp_path / "my tls", "changeit"
    folder.mkdir()
    store, authority = folder / "trust.jks", Authority(tmp_path, "ours")
    words = ["-noprompt", "-file", str(authority.ca), "-storetype", "JKS", "-storepass", word, "-keystore", str(store)]
    subprocess.run(["keytool", "-importcert", *words], check=True, capture_output=True, timeout=COMMAND_S)
    (command,) = commands(error(lambda: translate({"ssl.truststore.location": str(store)})))
    parts = command.split(" && ")
    assert [part.split()[0] for part in parts] == ["keytool", "openssl"]
    answers = f"{word}\n" * 3  # the passwords are read from the terminal or, in a session without one, from the input
    for part in parts:
        words = shlex.split(part)
        subprocess.run(words, input=answers, text=True, check=True, timeout=COMMAND_S, start_new_session=True)
    pem = folder / "trust.pem"
    assert "BEGIN CERTIFICATE" in pem.read_text()
    accepted = translate({"ssl.truststore.location": str(pem), "ssl.truststore.type": "PEM"})
    assert accepted == {"ssl.ca.location": str(pem)}
