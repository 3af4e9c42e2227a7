"""Arguments and output of commands without a broker: durations, topics, states, CSV files, exit codes."""

import io
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import typer
from deltalake.exceptions import DeltaError
from pyspark.sql import SparkSession
from rich.console import Console
from typer.testing import CliRunner, Result

from spark_group_source.cli import common, functions, group_reset, ledger, offsets
from spark_group_source.cli import run as running
from spark_group_source.cli.app import EXIT_CODES, app
from spark_group_source.cli.common import FINAL, RETRIABLE, USAGE
from spark_group_source.cli.group_reset import Offsets, Shift, resolve_targets
from spark_group_source.cli.reset import duration_ms, parse_destination, plan_text, read_plan, scope_of
from spark_group_source.cli.run import exit_code_of
from spark_group_source.delta import checkpoint_status, verification
from spark_group_source.delta.verification import Finding
from spark_group_source.errors import AccessDenied, BrokerUnavailable, GroupError, OptionError, SourceError
from spark_group_source.kafka.translation import CommittedOffset, GroupDescription, GroupMember, ListedGroup, Topic
from spark_group_source.local import conf
from spark_group_source.model import EARLIEST, LATEST, StartAt, TopicPartition

CLI_S = 600
NO_BROKER = "127.0.0.1:1"
"""An address without a broker."""


@pytest.mark.parametrize(
    ("text", "then_ms"),
    [
        ("PT1H30M", 5_400_000),
        ("P7D", 604_800_000),
        ("P1DT2H3M4.5S", 93_784_500),
        ("pt0.001s", 1),
    ],
)
def test_duration_is_parsed_like_kafkas_tool(text: str, then_ms: int) -> None:
    assert duration_ms(text) == then_ms


@pytest.mark.parametrize("text", ["P", "PT", "P1DT", "1h", "P1M", "P1Y", "PT1H30", "-PT1H", "", f"P{'9' * 400}D"])
def test_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="must be PnDTnHnMnS"):
        duration_ms(text)


def test_topic_option_may_name_partitions() -> None:
    assert scope_of(["a", "b:0,2", "b:1"]) == {"a": frozenset(), "b": frozenset({0, 1, 2})}
    for wrong in (["b:"], ["b:x"], [":1"], ["b:0-3"]):
        with pytest.raises(OptionError, match="must be NAME, or NAME:0,1"):
            scope_of(wrong)
    with pytest.raises(OptionError, match="twice, once with all"):
        scope_of(["a", "a:1"])


NOWHERE = dict.fromkeys(
    ("--to-earliest", "--to-latest", "--to-current", "--to-offset", "--to-offsets", "--shift-by", "--to-ledger")
)


@pytest.mark.parametrize(
    ("name", "value", "to"),
    [
        ("--to-earliest", True, EARLIEST),
        ("--to-current", True, "current"),
        ("--to-offset", 0, StartAt("offset", 0)),
        ("--to-offsets", '{"orders":{"0":-1}}', Offsets({TopicPartition("orders", 0): -1})),
        ("--to-datetime", "1970-01-01T00:00:01+00:00", StartAt("time", 1000)),
        ("--shift-by", 0, Shift(0)),
        ("--to-ledger", True, "ledger"),
    ],
)
def test_reset_target_is_the_one_given_option(name: str, value: object, to: object) -> None:
    assert parse_destination(NOWHERE | {"--to-latest": False, name: value}, "etl") == to
    with pytest.raises(OptionError, match="exactly one of --to-earliest, --to-latest"):
        parse_destination(NOWHERE | {name: value, "--to-checkpoint": "/c"}, "etl")


# --- files of settings ----------------------------------------------------------------------------------------------


def test_settings_file_expands_environment_without_showing_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKA_SECRET", "a=b c")
    path = tmp_path / "client.properties"
    path.write_text("# comment\n\nsasl.username=me\nsasl.password = ${KAFKA_SECRET}\n")
    settings = dict(common.options_of("b:1", "etl", path).settings)
    assert (settings["sasl.username"], settings["sasl.password"]) == ("me", "a=b c")
    for text, why in (
        ("a=1\na=hunter2", "line 2: 'a' appears twice"),
        ("# one\nhunter2", "line 2: must be key=value"),
        ("a=hunter2${NOT_SET_ANYWHERE}", "a uses the variable NOT_SET_ANYWHERE"),
    ):
        path.write_text(text)
        with pytest.raises(OptionError, match=why) as caught:
            common.settings_in(path)
        assert "hunter2" not in str(caught.value) and str(path) in str(caught.value)


def test_settings_may_continue_in_the_next_line(tmp_path: Path) -> None:
    """As in the files of Kafka's tools, whose login modules have several lines."""
    path = tmp_path / "client.properties"
    login = "org.apache.kafka.common.security.plain.PlainLoginModule required \\\n  username=me \\\n  password=b;"
    path.write_text(f"# a comment \\\nsasl.mechanism=PLAIN\nsasl.jaas.config={login}\nsecurity.protocol=SASL_SSL\n")
    settings = dict(common.options_of("b:1", "etl", path).settings)
    assert (settings["sasl.username"], settings["sasl.password"]) == ("me", "b")
    assert settings["security.protocol"] == "SASL_SSL"
    path.write_text("a=1\nb=x\\\\\nc=3\\")
    assert common.settings_in(path) == {"a": "1", "b": "x\\\\", "c": "3"}
    path.write_text("a=1\\\n2\nhunter2")
    with pytest.raises(OptionError, match="line 3: must be key=value"):
        common.settings_in(path)


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("security.protocol=SASL_SSL\nsasl.mechanism=NO-SUCH\nsasl.username=a", "Unsupported SASL mechanism: NO-SUCH"),
        ("security.protocol=SSL\nssl.ca.location=/no/such.pem", "ssl.ca.location failed"),
        ("socket.timeout.ms=soon", "'kafka.socket.timeout.ms' is 'soon'; it must be a decimal integer"),
    ],
)
def test_wrong_value_in_a_settings_file_is_one_line(tmp_path: Path, setting: str, why: str) -> None:
    path = tmp_path / "client.properties"
    path.write_text(f"{setting}\nsasl.password=hunter2\n")
    words = ["list", "--bootstrap-servers", NO_BROKER, "--command-config", str(path)]
    shown = CliRunner().invoke(app, words)
    (line,) = shown.output.splitlines()
    assert line.startswith("error: OptionError: ") and why in line and "hunter2" not in line
    assert shown.exit_code == USAGE


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "with a byte order mark"])
def test_settings_with_the_prefix_of_a_query_are_used_and_no_setting_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    """Else the client would connect without encryption."""
    monkeypatch.setenv("PASSWORD", "from a file\n")
    path = tmp_path / "client.properties"
    path.write_text(f"{mark}kafka.security.protocol=SASL_SSL\nkafka.sasl.mechanism=PLAIN\nkafka.sasl.username=a\n")
    with path.open("a") as file:
        file.write("sasl.password=${PASSWORD}\n")
    with common.admin_of(NO_BROKER, "-", path) as admin:
        settings = admin._settings
    assert settings["security.protocol"] == "SASL_SSL" and settings["sasl.password"] == "from a file"
    path.write_text("kafka.security.protocol=SASL_SSL\nsecurity.protocol=PLAINTEXT\n")
    with pytest.raises(common.UsageError, match=r"both security\.protocol and kafka\.security\.protocol"):
        common.options_of(NO_BROKER, "-", path)
    path.write_text("secuirty.protocol=SASL_SSL\n")
    shown = CliRunner().invoke(app, ["list", "--bootstrap-servers", NO_BROKER, "--command-config", str(path)])
    assert shown.exit_code == USAGE and 'No such configuration property: "secuirty.protocol"' in shown.output


def test_files_that_are_not_text_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"orders,0,\xff\n")
    (tmp_path / "offsets").mkdir()
    (tmp_path / "offsets" / "0").write_bytes(b"v1\n\xff")
    (tmp_path / "commits").mkdir()
    (tmp_path / "commits" / "0").write_bytes(b"v1")
    to = ["reset", "--bootstrap-servers", NO_BROKER, "--group", "g"]
    for words in (["--from-file", str(path)], ["--command-config", str(path), "--to-latest"]):
        (line,) = CliRunner().invoke(app, [*to, *words]).output.splitlines()
        assert f"{path} cannot be read: 'utf-8' codec can't decode byte 0xff" in line
    (line,) = CliRunner().invoke(app, [*to, "--to-checkpoint", str(tmp_path)]).output.splitlines()
    assert f"{tmp_path}/offsets/0 is not UTF-8 text" in line


# --- CSV ------------------------------------------------------------------------------------------------------------

P0, P1 = TopicPartition("orders", 0), TopicPartition("orders", 1)


def test_exported_plan_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "plan.csv"
    path.write_text(plan_text({P1: 7, P0: 5}))
    assert path.read_text() == "orders,0,5\norders,1,7\n"
    assert read_plan(path, "etl") == {P0: 5, P1: 7}


def test_plan_file_with_several_groups_is_filtered(tmp_path: Path) -> None:
    path = tmp_path / "plan.csv"
    path.write_text('"etl","orders",0,5\nother,orders,0,9\n\netl,orders,1,7\n"tab\t",orders,0,3\n')
    assert read_plan(path, "etl") == {P0: 5, P1: 7}
    assert read_plan(path, "tab\t") == {P0: 3}
    with pytest.raises(OptionError, match="has no line of group 'third'"):
        read_plan(path, "third")


@pytest.mark.parametrize(
    "line", ["topic,partition,offset", "orders,0", "orders,0,-1", "orders,0,5,6,7", "orders 0 5", "orders,2147483648,5"]
)
def test_invalid_plan_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.csv"
    path.write_text(f"orders,0,5\n{line}\n")
    with pytest.raises(OptionError, match=f"line 2: '{line}' is not topic,partition,offset"):
        read_plan(path, "etl")
    path.write_text("orders,0,5\norders,0,6\n")
    with pytest.raises(OptionError, match="line 2: orders-0 appears twice"):
        read_plan(path, "etl")


class OpenTransaction:
    """A partition whose high watermark is 1000, with a transaction that is open since 400; no record has a time."""

    committed_at = 1_000

    def committed(self, group: str) -> dict[TopicPartition, CommittedOffset]:
        return {P0: CommittedOffset(self.committed_at, "")}

    def latest(self, tps: list[TopicPartition], *, committed: bool = True) -> dict[TopicPartition, int]:
        return dict.fromkeys(tps, 400 if committed else 1_000)

    def earliest(self, tps: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(tps, 0)

    def offsets_at_time(self, times: dict[TopicPartition, int]) -> dict[TopicPartition, None]:
        return dict.fromkeys(times)


@pytest.mark.parametrize("to", [LATEST, StartAt("time", 7), Offsets({P0: -1})])
@pytest.mark.parametrize(("committed", "then"), [(1_000, 1_000), (100, 400), (2_000, 1_000)])
def test_the_end_of_a_log_is_not_before_what_a_group_has_read(to: Any, committed: int, then: int) -> None:
    """A group that reads uncommitted records may be behind the last stable offset."""
    admin: Any = OpenTransaction()
    admin.committed_at = committed
    assert resolve_targets(admin, "etl", to, {}).offsets == {P0: then}


def test_the_plan_of_a_reset_in_a_notebook_reads_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """It warns of records that would be written again."""
    given: list[Any] = []
    monkeypatch.setattr(common, "admin_of", lambda *_, **__: nullcontext(OpenTransaction()))
    monkeypatch.setattr(group_reset, "reset", lambda *_, spark, since, **__: given.append((spark, since)))
    spark: Any = object()
    functions.reset("etl", "b:1", to="latest", table="/lake/orders", spark=spark)
    assert given == [(spark, None)]


# --- exit codes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OptionError("wrong"), FINAL),
        (GroupError("refused"), FINAL),
        (BrokerUnavailable("silent"), RETRIABLE),
        (OSError("no such file"), FINAL),
    ],
)
def test_exit_code_shows_whether_a_retry_can_help(error: Exception, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(common, "admin_of", fail)
    shown = CliRunner().invoke(app, ["list", "--bootstrap-server", NO_BROKER])
    assert (shown.exit_code, shown.output) == (code, f"error: {type(error).__name__}: {error}\n")
    assert issubclass(type(error), SourceError | OSError)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BrokerUnavailable("silent"), RETRIABLE),
        (RuntimeError("… spark_group_source.errors.RebalanceTimeout: no assignment\n  at …"), RETRIABLE),
        (RuntimeError("… spark_group_source.errors.DataLoss: gone"), FINAL),
        (RuntimeError("… pyspark.errors.exceptions.captured.AnalysisException: no such column"), FINAL),
        (ValueError("other"), FINAL),
    ],
)
def test_exit_code_of_a_run_is_that_of_the_error_which_spark_wraps(error: Exception, code: int) -> None:
    assert exit_code_of(error) == code


def test_options_that_only_the_session_shows_to_be_wrong_exit_2(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise typer.BadParameter("this Spark session cannot write Delta tables")

    monkeypatch.setattr(running, "_session", lambda _: MagicMock())
    monkeypatch.setattr(running, "_check_delta", refuse)
    monkeypatch.setattr(running, "_log_to_stderr", lambda _: None)
    words = f"run --bootstrap-servers {NO_BROKER} --group g --topics t --table /no/table --checkpoint /no/checkpoint"
    shown = CliRunner().invoke(app, words.split())
    assert shown.exit_code == USAGE and "cannot write Delta tables" in shown.stderr, shown.output
    monkeypatch.setattr(running, "_load", MagicMock(side_effect=BrokerUnavailable("enough")))
    native = CliRunner().invoke(app, [*words.split(), "--writer", "native"])
    assert native.exit_code == RETRIABLE, "the native writer needs no Delta Lake"


class JavaError(Exception):
    """An exception of the JVM as py4j raises it."""

    def __init__(self, *causes: str) -> None:
        super().__init__(f"An error occurred while calling o7.load.\n: {causes[0]}\n\tat a.B.c(B.java:7)")
        self.java_exception = None
        for text in reversed(causes):
            self.java_exception = SimpleNamespace(toString=lambda t=text: t, getCause=lambda c=self.java_exception: c)


def test_error_of_the_jvm_shows_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    JavaError.__module__ = "py4j.protocol"
    error: Exception = JavaError(
        "o.a.s.SparkException: job aborted", "java.nio.AccessDeniedException: /lake/orders\nat"
    )
    monkeypatch.setattr(common, "admin_of", lambda *_: (_ for _ in ()).throw(error))
    shown = CliRunner().invoke(app, ["list", "--bootstrap-server", NO_BROKER])
    assert (shown.exit_code, shown.output) == (
        FINAL,
        "error: Spark: java.nio.AccessDeniedException: /lake/orders\n",
    )
    gone = JavaError("a.A: x")
    gone.java_exception = SimpleNamespace()  # the JVM has ended
    assert common.spark_error(gone) == "a.A: x"


class Comparison:
    """``ledger verify`` without Spark: what the comparison of the rows, and that with Kafka, ends with."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        *,
        rows: Exception | None = None,
        kafka: Exception | set[TopicPartition] = frozenset(),  # type: ignore[assignment]
        is_right: bool = False,
        groups: tuple[str, ...] = ("etl",),
    ):
        self.is_done, self._groups = False, list(groups)
        self._rows, self._kafka, self._is_right = rows, kafka, is_right
        patch.setattr(common, "session", lambda: nullcontext(self))
        patch.setattr(verification, "verify", self._verify)
        patch.setattr(ledger, "compare_with_kafka", self._compare_with_kafka)

    def _verify(self, *_: object, **__: object) -> verification.Verification:
        self.is_done = True
        if self._rows is not None:
            raise self._rows
        missing = Finding("rows", "orders-0: 2 records are missing")
        return verification.Verification([] if self._is_right else [missing], self._groups, 3, 5, [], {})

    def _compare_with_kafka(self, *_: object) -> tuple[list[Finding], set[TopicPartition]]:
        if isinstance(self._kafka, Exception):
            raise self._kafka
        return [], self._kafka

    def run(self, *words: str) -> Result:
        return CliRunner().invoke(app, ["ledger", "verify", "/lake/orders", *words])


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (DeltaError("Generic error: no such file\nat …"), "error: deltalake: Generic error: no such file\n"),
        (KeyError("of this package"), "Traceback"),
    ],
)
def test_a_table_that_cannot_be_compared_does_not_count_as_different(
    error: Exception, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Comparison(monkeypatch, rows=error).run()
    assert shown.exit_code == 3 and shown.stderr.startswith(text), shown.output


def test_a_table_without_a_ledger_does_not_count_as_right(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Comparison(monkeypatch, is_right=True, groups=()).run()
    assert shown.exit_code == 3 and "no group has a ledger in this table" in shown.stdout, shown.output


def test_findings_in_a_table_are_shown_although_kafka_refuses_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Comparison(monkeypatch, kafka=AccessDenied("the user needs Describe")).run("--bootstrap-servers", NO_BROKER)
    assert shown.exit_code == 1 and "orders-0: 2 records are missing" in shown.stdout
    assert "note: topics are not compared with Kafka: the user needs Describe" in shown.stdout


@pytest.mark.parametrize("kafka", [AccessDenied("the user needs Describe"), {TopicPartition("orders", 0)}])
def test_a_table_that_is_not_compared_with_kafka_as_asked_does_not_count_as_right(
    monkeypatch: pytest.MonkeyPatch, kafka: Exception | set[TopicPartition]
) -> None:
    shown = Comparison(monkeypatch, kafka=kafka, is_right=True).run("--bootstrap-servers", NO_BROKER)
    assert shown.exit_code == 3 and "not compared with Kafka: " in shown.stdout, shown.output


@pytest.mark.parametrize("words", [("exporter", "--port", "0", "--all-groups"), ("list",)])
@pytest.mark.parametrize("text", ["secuirty.protocol=SASL_SSL\n", "no value\n", "sasl.password=${NO_SUCH_VARIABLE}\n"])
def test_a_wrong_settings_file_exits_as_wrong_options_do(words: tuple[str, ...], text: str, tmp_path: Path) -> None:
    path = tmp_path / "client.properties"
    path.write_text(text)
    shown = CliRunner().invoke(app, [*words, "--bootstrap-servers", NO_BROKER, "--command-config", str(path)])
    assert shown.exit_code == USAGE, shown.output


def test_a_wrong_setting_is_found_before_a_table_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "client.properties"
    path.write_text("secuirty.protocol=SASL_SSL\n")
    comparison = Comparison(monkeypatch)
    shown = comparison.run("--bootstrap-servers", NO_BROKER, "--command-config", str(path))
    assert shown.exit_code == USAGE and not comparison.is_done, shown.output


def test_help_lists_the_broker_first_which_a_new_user_starts() -> None:
    lines = CliRunner().invoke(app, ["--help"]).output.partition("Commands")[2].splitlines()
    assert [line.split()[1] for line in lines if re.match(r"│ \w", line)][:2] == ["broker", "run"]


def test_help_lists_exit_codes() -> None:
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", CliRunner().invoke(app, ["--help"]).output).split())
    for code, means in EXIT_CODES.items():
        assert f"{code}: {means}" in text


def test_unreachable_brokers_give_one_line_and_a_retriable_exit_code() -> None:
    command = [sys.executable, "-m", "spark_group_source", "list", "--bootstrap-servers", NO_BROKER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CLI_S, check=False)
    assert done.returncode == RETRIABLE
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: BrokerUnavailable: listing groups was not answered by {NO_BROKER} within")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["describe"], "give either --group (repeatable) or --all-groups"),
        (["describe", "--group", "a", "--all-groups"], "give either --group"),
        (["list", "stable"], "'stable' needs --state before it"),
        (["list", "--state", "calm"], "unknown state 'calm'; the states are stable,"),
        *[
            (["exporter", "--port", "0", *arguments], message)
            for arguments, message in (
                ([], "give either --group (repeatable) or --all-groups"),
                (["--group", "g", "--all-groups"], "give either --group"),
                (["--group", "g", "--isolation-level", "all"], "it must be read_committed or read_uncommitted"),
            )
        ],
        *[
            (["reset", "--group", "a", *arguments], message)
            for arguments, message in (
                ([], "give exactly one of"),
                (["--to-earliest", "--to-offset", "3"], "give exactly one of"),
                (["--to-ledger"], "--to-ledger needs --table"),
                (["--to-latest", "--batch", "3"], "--batch needs --to-checkpoint"),
                (["--to-datetime", "yesterday"], "must look like 2026-01-31T12:00:00"),
                (["--to-datetime", "2026-01-31T12:00:00"], "has no time zone"),
                (["--to-datetime", "1969-12-31T23:59:59.999+00:00"], "1969-12-31T23:59:59.999+00:00 is before 1970"),
                (["--to-offsets", "latest"], "must be JSON"),
                (["--to-offsets", "{"], "--to-offsets: "),
                (["--to-latest", "--execute", "--dry-run"], "--execute and --dry-run contradict"),
                (["--to-latest", "--export", "--json"], "--export and --json contradict"),
                (["--to-latest", "--topic", "t", "--all-topics"], "--topic and --all-topics"),
            )
        ],
    ],
)
def test_contradictory_options_exit_2_before_any_request(arguments: list[str], message: str) -> None:
    shown = CliRunner().invoke(app, [*arguments, "--bootstrap-server", NO_BROKER])
    assert shown.exit_code == USAGE
    assert message in shown.output
    assert len(shown.output.splitlines()) == 1


def test_an_argument_that_is_not_utf_8_is_refused() -> None:
    """With such a group the client library ended the process with a segmentation fault."""
    command = [sys.executable, "-m", "spark_group_source", "describe", "--bootstrap-servers", NO_BROKER, "--group"]
    done = subprocess.run([*map(str.encode, command), b"etl\xff"], capture_output=True, timeout=CLI_S, check=False)
    assert done.returncode == USAGE
    assert b"argument 'etl\\udcff' is not UTF-8" in done.stderr


def test_names_are_printed_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets are no markup, and ``:fire:`` is no picture."""
    admin = SimpleNamespace(
        describe_group=lambda _: GroupDescription("empty", "classic", "", ()),
        committed=lambda _: {P0: CommittedOffset(5, "")},
        delete_group=lambda _: None,
    )
    monkeypatch.setattr(offsets, "admin_of", lambda *_: nullcontext(admin))
    for group in ("etl[a]", "etl[/x]", "shop:fire:1"):
        shown = CliRunner().invoke(
            app, ["delete-group", "--bootstrap-servers", NO_BROKER, "--group", group, "--execute"]
        )
        assert shown.exit_code == 0 and f"deleted group {group} with 1 committed offset\n" in shown.output, shown


class ThreeGroups:
    """The offset of orders-1 of each group is in an open transaction; one group does not answer at all."""

    error: GroupError = BrokerUnavailable("the coordinator of group 'silent' did not answer")

    def groups(self) -> list[ListedGroup]:
        return [ListedGroup(name, "empty", "classic") for name in ("one", "silent", "two")]

    def describe_group(self, group: str) -> GroupDescription:
        if group == "silent":
            raise self.error
        return GroupDescription("empty", "classic", "", ())

    def committed(self, group: str, *, stable: bool = True) -> dict[TopicPartition, CommittedOffset]:
        if stable:
            raise BrokerUnavailable("no answer for 1 partitions, such as orders-1")
        return {P0: CommittedOffset(5, ""), P1: CommittedOffset(7, "")}

    def latest(self, tps: list[TopicPartition], *, require_all: bool) -> dict[TopicPartition, int]:
        return dict.fromkeys(tps, 9)

    def retention_ms(self, _: object) -> None:
        return None


def test_brokers_that_answer_for_no_group_are_not_asked_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group takes seconds."""
    asked: list[str] = []

    def describe_group(_: object, group: str) -> GroupDescription:
        asked.append(group)
        raise BrokerUnavailable(f"the coordinator of group {group} did not answer")

    listed = [ListedGroup(f"g{number}", "empty", "classic") for number in range(20)]
    monkeypatch.setattr(ThreeGroups, "groups", lambda _: listed)
    monkeypatch.setattr(ThreeGroups, "describe_group", describe_group)
    monkeypatch.setattr(common, "admin_of", lambda *_: nullcontext(ThreeGroups()))
    shown = CliRunner().invoke(app, ["describe", "--bootstrap-servers", NO_BROKER, "--all-groups"])
    assert (shown.exit_code, asked) == (RETRIABLE, ["g0", "g1", "g2"])
    assert shown.stderr.endswith("3 groups in a row were not answered; those after g2 are left out\n")


@pytest.mark.parametrize(
    ("error", "code"), [(ThreeGroups.error, RETRIABLE), (AccessDenied("the user needs Describe"), FINAL)]
)
def test_groups_are_described_during_a_transaction_and_without_one_that_does_not_answer(
    error: GroupError, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ThreeGroups, "error", error)
    monkeypatch.setattr(common, "admin_of", lambda *_: nullcontext(ThreeGroups()))
    shown = CliRunner().invoke(app, ["describe", "--bootstrap-servers", NO_BROKER, "--all-groups", "--json"])
    found = json.loads(shown.stdout)
    assert [(one["group"], [row["committed"] for row in one["partitions"]]) for one in found] == [
        ("one", [5, 7]),
        ("two", [5, 7]),
    ]
    assert (shown.exit_code, shown.stderr) == (code, f"error: {type(error).__name__}: {error}\n")
    named = CliRunner().invoke(app, ["describe", "--bootstrap-servers", NO_BROKER, "--group", "silent"])
    assert (named.exit_code, named.stdout) == (code, "")


@pytest.mark.parametrize("state", ["assigning", "reconciling"])
def test_kafkas_states_of_a_kip_848_group_are_listed_and_keep_it_from_a_reset(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """confluent-kafka 2.16 reports them as unknown."""
    listed = [ListedGroup(name, name, "consumer") for name in (state, "stable")]
    described = GroupDescription(state, "consumer", "uniform", ())
    admin: Any = SimpleNamespace(groups=lambda: listed, describe_group=lambda _: described)
    monkeypatch.setattr(common, "admin_of", lambda *_: nullcontext(admin))
    shown = CliRunner().invoke(app, ["list", "--bootstrap-server", NO_BROKER, "--state", state.title()])
    assert shown.exit_code == 0 and state in shown.output and "stable" not in shown.output
    with pytest.raises(GroupError, match=f"is {state} with 0 members"):
        group_reset.require_inactive(admin, "g")


def output_of(words: list[str], **env: str) -> "subprocess.CompletedProcess[bytes]":
    """Run Python with its output in a pipe, where nothing says how wide it is."""
    given = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")} | env
    return subprocess.run([sys.executable, *words], capture_output=True, timeout=CLI_S, check=False, env=given)


def test_output_in_a_pipe_folds_no_id() -> None:
    code = "from spark_group_source.cli.common import *; console.print(table_of('id', rows=[('x' * 300,)]))"
    assert b"x" * 300 in output_of(["-c", code]).stdout
    assert b"x" * 300 not in output_of(["-c", code], COLUMNS="90").stdout


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_width_of_output_is_decided_when_it_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    with redirect_stdout(Terminal()):
        console = common._Output()
    with redirect_stdout(io.StringIO()) as printed:
        console.print("x" * 300)
    assert printed.getvalue() == "x" * 300 + "\n"
    with redirect_stdout(Terminal()):
        assert console.width < 300
    assert common._Output(force_jupyter=True).width == Console(force_jupyter=True).width


def test_output_with_characters_that_its_encoding_lacks_is_printed() -> None:
    done = output_of(["-m", "spark_group_source", "describe", "--help"], PYTHONIOENCODING="latin-1")
    assert done.returncode == 0 and b"host:port, ?" in done.stdout, done.stderr


def test_settings_in_the_folder_of_the_user_come_before_those_of_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {
        "spark.jars": "delta.jar",
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": "-Dours=1",
        "spark.sql.extensions": "Delta",
        "spark.sql.session.timeZone": "UTC",
        "spark.pyspark.python": "/venv/python",
        "spark.ui.enabled": "false",
    }
    monkeypatch.setattr(conf, "local_spark_settings", lambda *_, **__: dict(ours))
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    (tmp_path / "spark-defaults.conf").write_text(
        "# theirs\n\nspark.driver.memory  8g\nspark.jars=s3.jar,\\\n  b.jar\nspark.hadoop.x y z\n"
        "spark.pyspark.python python3\nspark.driver.extraJavaOptions -Dtheirs=a b\nspark.sql.extensions: Other\n"
    )
    assert common.session_settings("/scratch") == {
        "spark.jars": "delta.jar,s3.jar,b.jar",
        "spark.driver.extraJavaOptions": "-Dours=1 -Dtheirs=a b",
        "spark.sql.extensions": "Delta,Other",
        "spark.pyspark.python": "/venv/python",
        "spark.ui.enabled": "false",
    }
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path / "none"))
    assert common.session_settings("/scratch").items() == ours.items() - {("spark.sql.session.timeZone", "UTC")}


def test_json_of_a_drain_is_alone_on_stdout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although a terminal's spinner is forced, as in many CI systems; and one spinner at a time."""
    monkeypatch.setattr(common, "progress_console", Console(stderr=True, force_terminal=True))
    monkeypatch.setattr(common, "console", Console(force_terminal=True))
    monkeypatch.setattr(conf, "local_spark_settings", lambda *_, **__: {})
    monkeypatch.setattr(SparkSession, "builder", MagicMock())
    depth: list[int] = []

    def drain(*_: object, **__: object) -> int:
        # Older releases of rich have no such list, and refuse a second spinner themselves.
        depth.append(len(getattr(common.progress_console, "_live_stack", [1])))
        return 1

    monkeypatch.setattr(checkpoint_status, "drain", drain)
    monkeypatch.setattr(checkpoint_status, "last_status", lambda *_: {"driver": 7, "drained": True})
    shown = CliRunner().invoke(app, ["drain", "--group", "etl", "--checkpoint", "s3a://bucket/chk", "--json"])
    assert (json.loads(shown.stdout), depth) == ({"group": "etl", "drained": 1, "drivers": [7]}, [1]), shown.output


@pytest.mark.parametrize("command", [["migrate", "--to-checkpoint"], ["reset", "--to-latest", "--execute"]])
def test_a_command_that_needs_a_group_without_members_can_be_retried_until_their_session_timeout(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    member = GroupMember("etl.abc.0", "etl.abc.0", "spark", "10.0.0.1", (P0,))
    admin = SimpleNamespace(
        connection=("--bootstrap-servers", NO_BROKER),
        describe_group=lambda _: GroupDescription("stable", "classic", "range", (member,)),
        committed=lambda *_, **__: {P0: CommittedOffset(5, "")},
        latest=lambda tps, **_: dict.fromkeys(tps, 9),
        earliest=lambda _: {},
        offsets_at_time=lambda _: {},
    )
    monkeypatch.setattr(common, "admin_of", lambda *_: nullcontext(admin))
    shown = CliRunner().invoke(app, [*command, "--bootstrap-servers", NO_BROKER, "--group", "etl"])
    assert shown.exit_code == RETRIABLE, (shown.output, shown.exception)
    assert " 1 member" in shown.stderr and "run this command again: the memberships" in shown.stderr


@pytest.mark.parametrize("execute", [False, True])
def test_a_reset_shows_offsets_before_and_after_it_and_says_once_whether_it_was_executed(
    execute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = SimpleNamespace(
        connection=("--bootstrap-servers", NO_BROKER),
        describe_group=lambda _: GroupDescription("empty", "classic", "", ()),
        committed=lambda *_, **__: {P0: CommittedOffset(5, "")},
        existing_topics=lambda _: {P0.topic: Topic("id", 1)},
        latest=lambda tps, **_: dict.fromkeys(tps, 9),
        earliest=lambda _: {},
        offsets_at_time=lambda _: {},
        move_committed=lambda *_, **__: None,
    )
    monkeypatch.setattr(common, "admin_of", lambda *_: nullcontext(admin))
    words = ["reset", "--to-latest", "--bootstrap-servers", NO_BROKER, "--group", "etl"]
    shown = CliRunner().invoke(app, [*words, *(["--execute"] if execute else [])]).output
    (columns,) = [line for line in shown.splitlines() if "partition " in line and "topic" in line]
    assert "before" in columns and "after" in columns and "now" not in columns
    assert shown.count("nothing was changed") == (not execute)
    assert ("moved 1 partition of group etl" in shown) == execute


@pytest.mark.parametrize("views", [["--members"], ["--offsets"], []])
def test_the_lag_of_a_group_is_that_of_its_offsets_in_every_view(
    views: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "admin_of", lambda *_: nullcontext(ThreeGroups()))
    shown = CliRunner().invoke(app, ["describe", "--bootstrap-servers", NO_BROKER, "--group", "one", *views])
    assert "0 members, lag 6" in shown.stdout, shown


def test_broker_commands_print_json(monkeypatch: pytest.MonkeyPatch) -> None:
    from spark_group_source.local import background

    monkeypatch.setattr(background, "running", lambda: None)
    shown = CliRunner().invoke(app, ["broker", "status", "--json"])
    assert (shown.exit_code, json.loads(shown.output)) == (3, None)
