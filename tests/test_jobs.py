"""``spark-group run`` and the jobs in ``jobs``: real runs, and their arguments. The result is read
from the table's files."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pytest
import typer
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from crash.killed import NEW_SCHEMA_AT, avro_values
from delta_files import living_rows
from deltalake import DeltaTable
from kit.object_store import object_store, s3a_jars
from kit.schema_registry import SchemaRegistry
from quick_spark import submit
from scenes import Scene
from typer.testing import CliRunner

from spark_group_source import KafkaGroupDataSource, command_line, compatibility
from spark_group_source.cli import run as job
from spark_group_source.cli.app import app
from spark_group_source.cli.common import RETRIABLE
from spark_group_source.cli.preview import ROWS_MAX
from spark_group_source.errors import BrokerUnavailable
from spark_group_source.local import conf
from spark_group_source.local.jars import avro_jars

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parent.parent
JOB, AVRO_JOB, CDC_JOB, TABLES_JOB = (
    ROOT / "jobs" / f"{name}.py" for name in ("group_to_delta", "avro_to_delta", "cdc_to_delta", "topics_to_tables")
)
COMMAND = [sys.executable, "-m", "spark_group_source", "run"]
RUN_S = 600
NEEDED = ["--bootstrap-servers", "localhost:1", "--group", "g", "--table", "/tmp/none/t", "--checkpoint", "/tmp/none/c"]
GOOD = b'{"id": 1, "name": "a"}'
BAD = [b'{"id": 2', b"[1]", b'{"id": "x"}', b'{"id": 3}{"id": 4}', b"", b"null", b"\xff\xfe"]


@pytest.fixture
def arguments() -> Any:
    """``arguments(*more)`` -> (exit status, what was printed), of a call that must fail before Spark starts."""

    def call(*given: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["run", *given], env={"COLUMNS": "2000", "NO_COLOR": "1", "TERM": "dumb"})
        return result.exit_code, " ".join(result.output.split())

    return call


def run(command: list[str], scratch: Path, **env: str) -> subprocess.CompletedProcess[str]:
    java = f"-Djava.io.tmpdir={scratch}"
    own = {
        "SPARK_CONF_DIR": str(ROOT / "conf"),
        "SPARK_LOCAL_DIRS": str(scratch),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_SUBMIT_ARGS": f'--conf "spark.driver.extraJavaOptions={java}" pyspark-shell',
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        command, capture_output=True, text=True, timeout=RUN_S, cwd=scratch, env=os.environ | own | env, check=False
    )


# --- as users run it -------------------------------------------------------------------------------------------------


@pytest.mark.spark
@pytest.mark.full
@pytest.mark.timeout(3 * RUN_S)
def test_submitted_job_parses_records_and_continues_after_restart(scene: Scene, tmp_path: Path) -> None:
    name = scene.topic(2)
    scene.produce(name, [json.dumps({"id": n, "name": f"n{n}"}) for n in range(100)], partition=0)
    scene.produce(name, [GOOD, *BAD], partition=1)
    options = tmp_path / "options"
    options.write_text("# passed on\nkafka.client.rack=${RACK}\n")
    table = tmp_path / "table"
    arguments = ["--bootstrap-servers", scene.servers, "--group", scene.group, "--topics", name]
    arguments += ["--table", str(table), "--checkpoint", str(tmp_path / "checkpoint"), "--option-file", str(options)]
    arguments += ["--schema", "id BIGINT, name STRING", "--partition-by", "partition", "--option", "groupMembers=2"]

    first = run(submit("--master", "local[2]", str(JOB), *arguments), tmp_path, RACK="r1")

    assert first.returncode == 0, first.stderr
    found = living_rows(table)
    assert len(found) == 100 + 1 + len(BAD)
    assert sorted(r["id"] for r in found if r["malformed"] is None) == sorted([*range(100), 1])
    assert {r["malformed"] for r in found} == {None, *BAD}
    assert all(r["id"] is None and r["name"] is None for r in found if r["malformed"] is not None)
    assert {r["topic"] for r in found} == {name} and all(r["timestamp"] is not None for r in found)
    assert DeltaTable(table).metadata().partition_columns == ["partition"]
    assert sorted(scene.committed().values()) == [1 + len(BAD), 100]

    scene.produce(name, [json.dumps({"id": n, "name": "later"}) for n in range(100, 130)], partition=0)
    second = run([*COMMAND, *arguments, "--trigger", "once"], tmp_path, RACK="r1", SPARK_HOME="")

    assert second.returncode == 0, second.stderr
    again = living_rows(table)
    assert len(again) == len(found) + 30
    assert sorted(r["id"] for r in again if r["name"] == "later") == list(range(100, 130))


@pytest.mark.spark
@pytest.mark.full
@pytest.mark.timeout(2 * RUN_S)
def test_submitted_job_writes_a_table_on_s3_natively(scene: Scene, tmp_path: Path) -> None:
    name, options = scene.topic(1), tmp_path / "storage"
    scene.produce(name, [f"v{n}" for n in range(30)])
    with object_store() as store:
        options.write_text("".join(f"{key}={value}\n" for key, value in store.storage_options.items()))
        table = store.uri("orders")
        arguments = ["--bootstrap-servers", scene.servers, "--group", scene.group, "--topics", name, "--table", table]
        arguments += ["--checkpoint", store.uri("checkpoint"), "--writer", "native", "--storage-options", str(options)]
        settings = {key: value for key, value in store.spark_settings.items() if key != "spark.jars"}
        words = [word for key, value in settings.items() for word in ("--conf", f"{key}={value}")]

        ended = run(submit("--master", "local[2]", *words, str(JOB), *arguments, jars=s3a_jars()), tmp_path)

        assert ended.returncode == 0, ended.stderr
        copy = tmp_path / "copy"
        store.download("orders", copy)
    assert sorted(row["offset"] for row in living_rows(copy)) == list(range(30))
    assert DeltaTable(copy).history(1)[0]["clientVersion"].startswith("delta-rs")
    assert sorted(scene.committed().values()) == [30]


@pytest.mark.spark
@pytest.mark.full
@pytest.mark.timeout(3 * RUN_S)
def test_job_for_avro_writes_the_columns_of_a_new_schema_and_bad_records_to_their_table(
    scene: Scene, tmp_path: Path
) -> None:
    name, table, bad = scene.topic(2), tmp_path / "orders", tmp_path / "bad"
    with SchemaRegistry(user="etl:secret") as registry:
        value = avro_values(registry, name, auth="etl:secret")
        words = ["--bootstrap-servers", scene.servers, "--group", scene.group, "--topic", name, "--rule", "id <> '1'"]
        words += ["--registry", registry.url, "--table", str(table), "--bad", str(bad), "--max-bad", "1"]
        words += ["--checkpoint", str(tmp_path / "checkpoint")]
        command = submit("--master", "local[2]", str(AVRO_JOB), *words, jars=avro_jars())
        for numbers in (range(3), range(NEW_SCHEMA_AT, NEW_SCHEMA_AT + 3)):
            for number in numbers:
                scene.produce(name, [value(number)], partition=number % 2)
            ended = run(command, tmp_path, REGISTRY_USER="etl:secret")
            assert ended.returncode == 0, ended.stderr
            assert "secret" not in ended.stdout + ended.stderr
        replayed = run([*command, "--rule", "true", "--replay"], tmp_path, REGISTRY_USER="etl:secret")
        assert "1 records were written" in replayed.stdout, replayed.stderr
    found = {row["id"]: row.get("note") for row in living_rows(table)}
    assert found == {"0": None, "1": None, "500": "new", "501": "new"}
    classes = {row["value"]: row["error_class"] for row in living_rows(bad)}
    assert classes == {value(1): "RULE", b"2": "TRANSFORM", b"502": "TRANSFORM"}
    assert sum(scene.committed().values()) == 6


@pytest.mark.spark
@pytest.mark.full
@pytest.mark.timeout(3 * RUN_S)
@pytest.mark.parametrize("form", ["json", "avro"])
def test_job_for_changes_of_a_database_keeps_the_latest_row_of_each_key(
    scene: Scene, tmp_path: Path, form: str
) -> None:
    name, table = scene.topic(2), tmp_path / "customers"
    words = ["--bootstrap-servers", scene.servers, "--group", scene.group, "--topic", name, "--key", "id"]
    words += ["--table", f"{table}/", "--checkpoint", str(tmp_path / "checkpoint"), "--max-bad", "1"]
    words += ["--sequence", "try_cast(source.lsn AS BIGINT)"]
    batches: list[list[tuple[str, int | None, str | None, int]]] = [
        [("c", 1, "one", 10), ("c", 2, "two", 11), ("t", None, None, 12), ("c", 3, "three", 13)],
        [("d", 1, None, 20), ("u", 2, "late", 5), ("c", 1, "late", 19), ("u", 3, "new", 21)],
    ]
    with SchemaRegistry(user="etl:secret") as registry:
        words += ["--registry", registry.url] if form == "avro" else ["--schema", "id BIGINT, name STRING"]
        encode = debezium_avro(registry, name) if form == "avro" else json.dumps
        command = submit("--master", "local[2]", str(CDC_JOB), *words, jars=avro_jars() if form == "avro" else ())
        for changes in batches:
            for op, number, text, lsn in changes:
                row = None if number is None else {"id": number, "name": text}
                value = {"before": row if op == "d" else None, "after": None if op == "d" else row, "op": op}
                scene.produce(name, [encode({**value, "source": {"lsn": lsn}})], partition=lsn % 2)
            ended = run(command, tmp_path, REGISTRY_USER="etl:secret")
            assert ended.returncode == 0, ended.stderr
    assert [(found["id"], found["name"]) for found in living_rows(table)] == [(2, "two"), (3, "new")]
    assert [found["id"] for found in living_rows(Path(f"{table}_deleted"))] == [1]
    assert [found["error"] for found in living_rows(Path(f"{table}_bad"))] == [
        "error: operation t is not a change of a row"
    ]
    assert sum(scene.committed().values()) == 8


def debezium_avro(registry: SchemaRegistry, topic: str) -> Any:
    """Encode changes with the schema that Debezium registers, which names the type of a row once."""
    row = {
        "type": "record",
        "name": "Value",
        "fields": [{"name": "id", "type": "long"}, {"name": "name", "type": ["null", "string"], "default": None}],
    }
    source = {"type": "record", "name": "Source", "fields": [{"name": "lsn", "type": ["null", "long"]}]}
    fields = [
        {"name": "before", "type": ["null", row], "default": None},
        {"name": "after", "type": ["null", "Value"], "default": None},
        {"name": "source", "type": source},
        {"name": "op", "type": "string"},
    ]
    schema = {"type": "record", "name": "Envelope", "namespace": "shop.public.customers", "fields": fields}
    client = SchemaRegistryClient({"url": registry.url, "basic.auth.user.info": "etl:secret"})
    serializer = AvroSerializer(client, json.dumps(schema), conf={"auto.register.schemas": True})
    return lambda value: serializer(value, SerializationContext(topic, MessageField.VALUE))


@pytest.mark.spark
@pytest.mark.full
@pytest.mark.timeout(2 * RUN_S)
def test_job_for_many_topics_writes_a_table_for_each(scene: Scene, tmp_path: Path) -> None:
    names = [scene.topic(1) for _ in range(3)]
    for number, name in enumerate(names):
        scene.produce(name, [f"v{n}" for n in range(number)])
    words = ["--bootstrap-servers", scene.servers, "--group", scene.group, "--pattern", "|".join(names)]
    words += ["--lake", str(tmp_path / "lake"), "--checkpoint", str(tmp_path / "checkpoint")]
    ended = run(submit("--master", "local[2]", str(TABLES_JOB), *words), tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert [path.name for path in sorted((tmp_path / "lake").iterdir())] == sorted(names[1:])
    assert [len(living_rows(tmp_path / "lake" / name)) for name in names[1:]] == [1, 2]


@pytest.mark.parametrize("path", [AVRO_JOB, CDC_JOB, TABLES_JOB], ids=lambda path: path.stem)
def test_a_job_to_copy_is_short_and_names_its_arguments(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 80
    ended = subprocess.run([sys.executable, path, "--help"], capture_output=True, text=True, timeout=60, check=True)
    printed = re.search(r"jobs/(?:.*\\\n)*.*", path.read_text())
    assert printed is not None
    assert set(re.findall(r" (--[a-z-]+) ", printed[0])) <= set(re.findall(r"--[a-z-]+", ended.stdout))


def test_submitted_script_reports_errors_in_one_line_without_secrets(tmp_path: Path) -> None:
    options = tmp_path / "options"
    options.write_text("kafka.sasl.password=hunter2\nhunter2\n")
    ended = run([sys.executable, str(JOB), *NEEDED, "--topics", "t", "--option-file", str(options)], tmp_path)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"error: OptionError: {options}, line 2: must be key=value\n"


def test_python_processes_of_a_local_run_find_no_zip_file_to_compile(tmp_path: Path) -> None:
    home = conf.linked_spark_home(tmp_path)
    assert conf.linked_spark_home(tmp_path) == home, "the second run has the same"
    assert (home / "bin" / "spark-submit").is_file() and list((home / "jars").glob("spark-core_*.jar"))
    assert not (home / "python").exists(), "it has lib/pyspark.zip"


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["--table", "--group", "--checkpoint", "--bootstrap-servers"])
def test_missing_required_option_is_named(arguments: Any, missing: str) -> None:
    given = [*NEEDED, "--topics", "t"]
    at = given.index(missing)
    status, shown = arguments(*given[:at], *given[at + 2 :])
    assert status == 2 and f"Missing option '{missing}'" in shown


TOPICS = ["--topics", "t"]
TIMING = "must be available-now, once, or an interval such as '5 seconds'"


@pytest.mark.parametrize(
    ("more", "status", "message"),
    [
        ([], 2, "give either --topics or --pattern"),
        ([*TOPICS, "--pattern", "t.*"], 2, "give either --topics or --pattern"),
        *[([*TOPICS, "--trigger", t], 2, TIMING) for t in ("sometimes", "5", "5 parsecs", "", "availableNow")],
        *[
            ([*TOPICS, "--option", f"{name}=hunter2"], 2, "--option-file")
            for name in (
                "kafka.sasl.password",
                "kafka.ssl.key.pem",
                "kafka.sasl.jaas.config",
                "Kafka.SASL.OAuthBearer.Config",
                "kafka.sasl.kerberos.kinit.cmd",
                "kafka.ssl.keystore.key",
                "kafka.sasl.oauthbearer.client.credentials.client.secret",
            )
        ],
        ([*TOPICS, "--option", "failOnDataLoss"], 2, "must be KEY=VALUE"),
        ([*TOPICS, "--dry-run", f"{ROWS_MAX + 1}"], 2, "Invalid value for '--dry-run'"),
        ([*TOPICS, "--writer", "delta"], 2, "'delta' is not one of 'auto', 'native', 'options'"),
        *[([*TOPICS, "--table", t], 1, "one folder") for t in ("/tmp/none/c", "delta.`file:///tmp/none/c/`")],
    ],
)
def test_invalid_arguments_are_refused_before_spark_starts(
    arguments: Any, more: list[str], status: int, message: str
) -> None:
    code, shown = arguments(*NEEDED, *more)
    assert code == status and message in shown and "hunter2" not in shown


@pytest.mark.parametrize(
    "name",
    [
        "kafka.ssl.key.location",
        "kafka.ssl.keystore.location",
        "kafka.ssl.keystore.type",
        "kafka.sasl.kerberos.keytab",
        "kafka.sasl.oauthbearer.assertion.private.key.file",
        "kafka.sasl.oauthbearer.client.credentials.client.id",
    ],
)
def test_paths_to_secrets_are_accepted_on_the_command_line(name: str) -> None:
    assert job._from_command_line([f"{name}=/etc/kafka/client"]) == {name: "/etc/kafka/client"}


CONTRADICTIONS = [
    ("kafka.bootstrap.servers=old:9092", "--bootstrap-servers is 'localhost:1'"),
    ("Kafka.Group.ID=test", "--group is 'g'"),
    ("subscribe=debug", "--topics is 't'"),
    ("subscribePattern=t.*", "--pattern is not given"),
]


@pytest.mark.parametrize(("pair", "argument"), CONTRADICTIONS)
@pytest.mark.parametrize("from_file", [False, True])
def test_an_option_does_not_replace_an_argument(
    arguments: Any, pair: str, argument: str, from_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared file of settings may name another group or cluster."""
    monkeypatch.setattr(job, "_session", lambda _: pytest.fail("Spark is started"))
    options = tmp_path / "options"
    options.write_text(pair)
    given = ["--option-file", str(options)] if from_file else ["--option", pair]
    name, _, value = pair.partition("=")
    status, shown = arguments(*NEEDED, *TOPICS, *given)
    where = " ".join(given) if from_file else "--option"
    assert status == 2 and f"{where}: {name} is {value!r}, but {argument}; remove the option" in shown


Loaded = Callable[..., dict[str, str]]


@pytest.fixture
def loaded(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    """``loaded(*more)``: the options that a run with these arguments passes to the source."""
    found: list[dict[str, str]] = []

    def load(_: object, options: dict[str, str]) -> Any:
        found.append(options)
        raise BrokerUnavailable("enough")

    monkeypatch.setattr(job, "_session", MagicMock())
    monkeypatch.setattr(job, "_load", load)
    for name in ("_check_delta", "_print_errors_once", "_refuse_lost_name", "_log_to_stderr"):
        monkeypatch.setattr(job, name, lambda *_: None)
    monkeypatch.setattr(compatibility, "check_session", lambda _: None)

    def run(*more: str) -> dict[str, str]:
        assert arguments(*NEEDED, *TOPICS, *more)[0] == RETRIABLE
        return found.pop()

    return run


def test_an_option_may_repeat_an_argument(loaded: Loaded, tmp_path: Path) -> None:
    (tmp_path / "options").write_text("kafka.bootstrap.servers=localhost:1\nKafka.Group.ID=g\nincludeHeaders=true\n")
    options = loaded("--option-file", str(tmp_path / "options"), "--option", "subscribe=t")
    own = {"kafka.bootstrap.servers": "localhost:1", "kafka.group.id": "g", "subscribe": "t"}
    assert options == own | {"includeHeaders": "true", "trigger": "availableNow"}


def test_the_source_gets_the_trigger_which_spark_4_0_and_4_1_do_not_pass(loaded: Loaded) -> None:
    assert loaded("--trigger", "5 seconds")["trigger"] == "processingTime"
    assert "trigger" not in loaded("--trigger", "once")
    assert "trigger" not in loaded("--option", "Trigger=auto"), "Spark gets it as the user spells it"


def test_the_session_of_databricks_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither are jars downloaded, nor is the session stopped."""
    stopped: list[str] = []
    session: Any = SimpleNamespace(stop=lambda: stopped.append("stopped"))
    monkeypatch.setattr("pyspark.sql.SparkSession.Builder.getOrCreate", lambda _: session)
    monkeypatch.setattr(job, "delta_settings", lambda: pytest.fail("downloads jars"))
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "17.3")
    assert job._session("etl") is session
    job._end(session)
    assert stopped == []
    monkeypatch.delenv("DATABRICKS_RUNTIME_VERSION")
    job._end(session)
    assert stopped == ["stopped"]


@pytest.mark.parametrize(
    ("trigger", "timing"),
    [
        ("available-now", {"availableNow": True}),
        ("once", {"once": True}),
        ("5 seconds", {"processingTime": "5 seconds"}),
        ("100 milliseconds", {"processingTime": "100 milliseconds"}),
    ],
)
def test_triggers(trigger: str, timing: dict[str, Any]) -> None:
    assert job._timing(trigger) == timing


# --- schema ----------------------------------------------------------------------------------------------------------


@pytest.mark.spark
def test_invalid_schema_is_refused_in_one_line(spark: "SparkSession") -> None:
    for schema in ("id BIGINTEGER", "id", "id BIGINT,, name STRING"):
        with pytest.raises(typer.BadParameter, match="is not Spark DDL") as met:
            job._ddl(spark, schema)
        assert "\n" not in str(met.value)
    with pytest.raises(typer.BadParameter, match="has no field"):
        job._ddl(spark, "")
    fields = job._ddl(spark, "id BIGINT, Timestamp TIMESTAMP")
    with pytest.raises(typer.BadParameter, match=r"'Timestamp'.*--kafka-prefix"):
        job.parsed(fields)
    assert callable(job.parsed(fields, prefix="kafka_"))


@pytest.mark.spark
def test_columns_are_ordered_fields_malformed_kafka(spark: "SparkSession") -> None:
    made = spark.createDataFrame(
        [(b"k", bytearray(b'{"a.b": 5, "timestamp": "x"}'), "t", 0, 7, 0)],
        "key BINARY, value BINARY, topic STRING, partition INT, offset BIGINT, timestampType INT",
    ).selectExpr("*", "TIMESTAMP'2024-01-01' AS timestamp")
    fields = job._ddl(spark, "`a.b` INT, timestamp STRING")
    out = job.parsed(fields, prefix="kafka_")(made)
    assert out.columns == [
        "a.b", "timestamp", "malformed", "kafka_key", "kafka_topic", "kafka_partition", "kafka_offset",
        "kafka_timestamp",
    ]  # fmt: skip
    row = out.collect()[0]
    assert (row[0], row[1], row[2], row["kafka_offset"]) == (5, "x", None, 7)


class Conf(dict[str, str]):
    """The settings of a session."""


@pytest.mark.parametrize(
    ("table", "settings", "refused"),
    [
        ("orders", {"spark.sql.catalogImplementation": "in-memory"}, True),
        ("db.orders", {"spark.sql.catalogImplementation": "in-memory", **conf.DELTA_SETTINGS}, True),
        ("/lake/orders", {"spark.sql.catalogImplementation": "in-memory"}, False),
        ("orders", {"spark.sql.catalogImplementation": "hive"}, False),
        ("orders", {}, False),
        ("unity.db.orders", {"spark.sql.catalogImplementation": "in-memory", "spark.sql.catalog.unity": "x"}, False),
        ("orders", {"spark.sql.catalogImplementation": "in-memory", "spark.sql.catalog.spark_catalog": "x"}, False),
    ],
)
def test_a_name_that_the_next_run_would_not_find_is_refused(
    table: str, settings: dict[str, str], refused: bool
) -> None:
    spark: Any = SimpleNamespace(conf=Conf(settings))
    with pytest.raises(typer.BadParameter, match="keeps its catalog in memory") if refused else nullcontext():
        job._refuse_lost_name(spark, table)


@pytest.mark.parametrize("error", ["", "[DATA_SOURCE_NOT_FOUND] Failed to find", "[OTHER] Failed"])
def test_the_job_registers_the_source_if_spark_has_not_found_it(error: str) -> None:
    """Spark does not find it if the package came with --py-files."""
    registered: list[object] = []

    class Reader:
        def load(self) -> str:
            if error and not registered:
                raise RuntimeError(error)
            return "rows"

    found = SimpleNamespace(options=lambda **_: Reader())
    session: Any = SimpleNamespace(
        readStream=SimpleNamespace(format=lambda _: found), dataSource=SimpleNamespace(register=registered.append)
    )
    with pytest.raises(RuntimeError, match="OTHER") if "OTHER" in error else nullcontext():
        rows: Any = job._load(session, {})
        assert rows == "rows"
    assert registered == ([KafkaGroupDataSource] if "NOT_FOUND" in error else [])


def test_source_error_is_one_line_without_stack_trace(
    arguments: Any, spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setenv("SPARK_GROUP_LOG_LEVEL", "INFO")
    monkeypatch.setattr(job, "_session", lambda name: spark)
    monkeypatch.setattr(job, "_end", lambda _: None)
    status, _ = arguments(*NEEDED, *TOPICS, "--table", str(tmp_path / "t"), "--option", "groupMember=2")
    assert status == 1
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.getMessage() == "OptionError: unknown option 'groupmember'; did you mean 'groupMembers'?"
    assert record.exc_info is None and not (tmp_path / "t").exists()


def test_only_an_error_of_another_package_is_printed_with_its_stack_trace() -> None:
    """The loggers that print it too are off in a run."""
    from pyspark.errors import StreamingQueryException

    for name, is_whole in (("spark_group_source.errors.LedgerConflict", False), ("ZeroDivisionError", True)):
        ended = StreamingQueryException(f"[STREAM_FAILED] Query terminated\nTraceback\n  File job.py\n{name}: no\n")
        assert ("File job.py" in job._stack_trace(ended)) == is_whole
    assert job._stack_trace(ValueError("before the query\nstarts")) == ""


@pytest.mark.parametrize(
    ("variable", "value", "has_settings"),
    [
        ("SPARK_SUBMIT_OPTS", "-Dlog4j2.level=OFF", True),
        ("SPARK_CONF_DIR", "conf", True),
        ("SPARK_CONF_DIR", "docs", False),
        ("SPARK_HOME", ".", True),
        ("SPARK_HOME", "docs", False),
    ],
)
def test_a_run_keeps_the_log_settings_of_the_user(
    variable: str, value: str, has_settings: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SPARK_SUBMIT_OPTS", "SPARK_CONF_DIR", "SPARK_HOME", "JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS"):
        monkeypatch.delenv(name, raising=False)
    assert not job._has_log_settings()
    monkeypatch.setenv(variable, value if value.startswith("-") else str(ROOT / value))
    assert job._has_log_settings() == has_settings


def test_reason_is_the_message_with_its_commands() -> None:
    wrapped = (
        "[PYTHON_DATA_SOURCE_ERROR] Failed\nTraceback (most recent call last):\n  File x\n"
        "spark_group_source.errors.TopicMissing: topic 'a' does not exist\n\nSQLSTATE: 38000"
    )
    assert job.reason(RuntimeError(wrapped)) == "TopicMissing: topic 'a' does not exist"
    inside = wrapped.replace("spark_group_source.errors.TopicMissing", "pyspark.errors.exceptions.captured.SparkError")
    assert job.reason(RuntimeError(inside)) == "SparkError: topic 'a' does not exist"
    commands = command_line.alternatives({"leave them out": "spark-group reset", "write them again": "RESTORE"})
    with_commands = wrapped.replace("does not exist", f"does not exist:{commands}")
    assert job.reason(RuntimeError(with_commands)) == f"TopicMissing: topic 'a' does not exist:{commands}"
    assert job.reason(RuntimeError("first\nsecond")) == "first"
    of_java = "An error occurred while calling o39.load.\n: org.apache.spark.NotFound: [NOT_FOUND] Failed\n\tat org."
    assert job.reason(RuntimeError(of_java)) == "org.apache.spark.NotFound: [NOT_FOUND] Failed"
    assert job.reason(KeyError()) == "KeyError()"
