"""``spark-group run --check`` and ``--dry-run`` against a real broker and Delta tables: what they print is what a run
does, and they change nothing."""

import json
import shlex
from collections.abc import Callable, Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import MagicMock

import pytest
from confluent_kafka import Producer
from delta_files import living_rows
from deltalake import DeltaTable
from kafka_helpers import ADMIN_S
from printed_commands import commands
from scenes import Scene, Shown
from typer.testing import CliRunner

from spark_group_source import DeltaSink, compatibility
from spark_group_source.cli import preview
from spark_group_source.cli import run as job
from spark_group_source.cli.app import app
from spark_group_source.cli.common import FINAL, RETRIABLE
from spark_group_source.cli.preview import CheckpointBatch
from spark_group_source.kafka.translation import CommittedOffset, GroupDescription, Topic
from spark_group_source.model import StartAt, TopicPartition
from spark_group_source.options.table import Options
from spark_group_source.protocol import identifiers
from spark_group_source.protocol.offsets import StreamOffset

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def same_session(spark: "SparkSession", monkeypatch: pytest.MonkeyPatch) -> None:
    """The command uses the session of the tests, and leaves it running."""
    monkeypatch.setattr(job, "_session", lambda _: spark)
    monkeypatch.setattr(job, "_end", lambda _: None)


@pytest.mark.spark
@pytest.mark.usefixtures("same_session")
class TestRun:
    @pytest.fixture(autouse=True)
    def use_log(self, caplog: pytest.LogCaptureFixture) -> None:
        """Errors are log lines of the job."""
        self.caplog = caplog

    def typed(self, scene: Scene, topic: str, *more: str) -> Shown:
        words = ["run", "--bootstrap-servers", scene.servers, "--group", scene.group, "--topics", topic]
        words += ["--table", str(scene.folder / "table"), "--checkpoint", str(scene.folder / "checkpoint")]
        result = CliRunner().invoke(app, [*words, *more], env={"COLUMNS": "2000"})
        return Shown(result.exit_code, result.output + self.caplog.text, result.stdout)

    def facts(self, shown: Shown) -> dict[str, str]:
        """The lines of a check, by their names."""
        names = ("group", "topics", "checkpoint", "starts", "to read", "table", "columns", "written", "new columns")
        lines = [line.strip() for line in shown.stdout.splitlines()]
        return {n: line.removeprefix(n).strip() for n in names for line in lines if line.startswith(f"{n} ")}

    def test_a_check_says_where_a_run_starts_and_what_it_writes_and_changes_nothing(self, scene: Scene) -> None:
        topic = scene.topic(2)
        scene.produce(topic, [f"v{n}" for n in range(5)], partition=0)
        scene.produce(topic, ["w"], partition=1)
        checkpoint, table = scene.folder / "checkpoint", scene.folder / "table"
        first = self.typed(scene, topic, "--check", "--schema", "id BIGINT", "--partition-by", "topic")
        assert first.code == 0, first.output
        assert self.facts(first) == {
            "group": f"{scene.group} at {scene.servers}: no members",
            "topics": f"{topic} (2)",
            "checkpoint": f"{checkpoint} is new",
            "starts": "2 by starting options",
            "to read": "6 offsets",
            "table": f"{table} is created by the first batch, partitioned by topic",
            "columns": "id bigint, malformed binary, key binary, topic string, partition int, offset bigint, "
            "timestamp timestamp",
        }
        assert not checkpoint.exists() and not table.exists() and scene.committed() == {}

        scene.job(subscribe=topic).run_into(DeltaSink(table), availableNow=True)
        assert len(living_rows(table)) == 6
        scene.produce(topic, ["x", "y"], partition=1)
        again = self.typed(scene, topic, "--check")
        assert again.code == 0, again.output
        found = self.facts(again)
        assert (found["starts"], found["to read"]) == ("2 by committed offset", "2 offsets")
        assert found["table"].endswith(f"with a ledger of group {scene.group}") and found["written"] == "natively"
        rows = [line.split() for line in again.stdout.splitlines() if line.strip().startswith(topic)]
        assert rows == [[topic, "1", "1", "3", "committed", "offset"], [topic, "0", "5", "5", "committed", "offset"]]

    def test_a_check_continues_where_the_checkpoint_does(self, scene: Scene) -> None:
        topic = scene.topic(1)
        scene.produce(topic, ["a", "b", "c"])
        query = scene.job(checkpoint="checkpoint", subscribe=topic)
        query.run_into(DeltaSink(scene.folder / "table"), availableNow=True)
        finished = self.facts(self.typed(scene, topic, "--check"))
        assert finished["checkpoint"].endswith("checkpoint: continues after batch 0")
        assert (finished["starts"], finished["to read"]) == ("1 by checkpoint", "0 offsets")
        (query.checkpoint / "commits" / "0").unlink()
        unfinished = self.facts(self.typed(scene, topic, "--check"))
        assert unfinished["checkpoint"].endswith("batch 0 was planned and is not finished, so it runs again")
        assert (unfinished["starts"], unfinished["to read"]) == ("1 by checkpoint", "3 offsets")

    def test_a_check_names_why_a_run_would_fail(self, scene: Scene) -> None:
        topic = scene.topic(1)
        scene.produce(topic, ["a", "b", "c"])
        scene.job(subscribe=topic).run_into(DeltaSink(scene.folder / "table"), availableNow=True)
        scene.produce(topic, ["d", "e"])
        scene.delete_before(topic, 0, 4)
        shown = self.typed(scene, topic, "--check", "--schema", "id BIGINT, name STRING")
        assert shown.code == 1
        assert f"{topic}-0 starts at offset 3 (by committed offset), and its log has 4 to 5" in shown.output
        assert "lacks the columns id, name, malformed: give --merge-schema to add them" in shown.output
        more = ["--option", "failOnDataLoss=false", "--schema", "id BIGINT", "--merge-schema", "--check"]
        allowed = self.typed(scene, topic, *more)
        assert allowed.code == 0, allowed.output
        assert self.facts(allowed)["new columns"] == "id, malformed"

    def test_a_check_names_partition_columns_that_a_run_cannot_write(self, scene: Scene) -> None:
        topic = scene.topic(1)
        new = self.typed(scene, topic, "--check", "--partition-by", "nope", "--partition-by", "Topic")
        assert new.code == 1 and "--partition-by nope: a run writes no such column" in new.output
        assert "--partition-by topic" not in new.output, "Spark does not distinguish upper and lower case"
        scene.produce(topic, ["a"])
        scene.job(subscribe=topic).run_into(DeltaSink(scene.folder / "table", partition_by="topic"), availableNow=True)
        other = self.typed(scene, topic, "--check", "--partition-by", "partition")
        assert other.code == 1 and "is partitioned by topic: leave out --partition-by" in other.output
        assert self.typed(scene, topic, "--check", "--partition-by", "TOPIC").code == 0

    def test_a_check_names_why_the_table_would_refuse_the_batch_until_that_is_settled(self, scene: Scene) -> None:
        topic, table = scene.topic(1), scene.folder / "table"
        query = scene.job(checkpoint="checkpoint", subscribe=topic)
        for n in range(2):
            scene.produce(topic, [f"{n}{m}" for m in range(5)])
            query.run_into(DeltaSink(table), availableNow=True)
        assert self.typed(scene, topic, "--check").code == 0
        moved = scene.of_group("reset", "--to-offset", "7", "--execute")
        assert moved.code == 0 and "add --table, or its next batch is refused" in moved.output
        version = DeltaTable(table).version()

        self.caplog.clear()
        refused = self.typed(scene, topic, "--check")
        assert refused.code == 1
        assert f"{topic}-0: committed offset 7, the table holds up to 10" in refused.output
        self.settle(scene, refused.output)
        assert DeltaTable(table).version() == version + 1, "only the reset wrote"
        self.caplog.clear()
        settled = self.typed(scene, topic, "--check")
        assert settled.code == 0, settled.output

        DeltaTable(table).restore(version - 1)
        restored = self.typed(scene, topic, "--check")
        assert restored.code == 1 and f"was restored to version {version - 1}" in restored.output
        self.settle(scene, restored.output)
        self.caplog.clear()
        assert self.typed(scene, topic, "--check").code == 0
        query.run_into(DeltaSink(table), availableNow=True)
        assert sorted(row["offset"] for row in living_rows(table, ["offset"])) == list(range(10))

    def settle(self, scene: Scene, refusal: str) -> None:
        """Run the first command of a refusal."""
        first = commands(refusal)[0].replace("HOST:PORT", scene.servers)
        shown = scene.typed(*shlex.split(first)[1:])
        assert shown.code == 0, shown.output

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            (["--topics", "missing"], ""),
            (["--topics", "missing,TOPIC", "--option", "startingOffsets=latest"], ""),
            (["--option", "startingTimestamp=99999999999999"], "have no record at or after the starting timestamp"),
            (["--option", 'startingOffsets={"TOPIC":{"0":7}}'], "starts at offset 7 (by starting options)"),
            (["--option", 'startingOffsets={"TOPIC":{"0":0,"1":0}}'], "do not name exactly the partitions"),
        ],
    )
    def test_wrong_topics_and_starting_options_are_named(self, scene: Scene, options: list[str], reason: str) -> None:
        topic = scene.topic(1)
        shown = self.typed(scene, topic, "--check", *(word.replace("TOPIC", topic) for word in options))
        assert shown.code == bool(reason) and reason in " ".join(shown.output.split())
        assert reason or "missing: read when they are created" in shown.output

    def test_a_dry_run_shows_the_first_rows_as_the_table_would_have_them(self, scene: Scene) -> None:
        topic = scene.topic(2)
        scene.produce(topic, [json.dumps({"id": n}) for n in range(50)], partition=0)
        scene.produce(topic, ["no json"], partition=1)
        shown = self.typed(scene, topic, "--schema", "id BIGINT", "--dry-run", "3")
        assert shown.code == 0, shown.output
        assert shown.stdout.count("-RECORD") == 3 and shown.stdout.count("malformed") == 3
        assert not (scene.folder / "table").exists() and scene.committed() == {}
        assert scene.admin.describe_consumer_groups([scene.group])[scene.group].result().state.name == "DEAD"

    def test_a_dry_run_finds_records_behind_offsets_without_any(self, scene: Scene) -> None:
        """Those of an aborted transaction; so are those of a compacted log."""
        topic = scene.topic(1)
        producer = Producer({"bootstrap.servers": scene.servers, "transactional.id": topic, "log_level": 3})
        producer.init_transactions(ADMIN_S)
        producer.begin_transaction()
        for _ in range(10):
            producer.produce(topic, "undone", partition=0)
        producer.flush(ADMIN_S)
        producer.abort_transaction(ADMIN_S)
        scene.produce(topic, [json.dumps({"id": n}) for n in range(2)], partition=0)
        shown = self.typed(scene, topic, "--schema", "id BIGINT", "--dry-run", "3")
        assert shown.code == 0 and shown.stdout.count("-RECORD") == 2, shown.output

    def test_a_dry_run_without_records_says_so(self, scene: Scene) -> None:
        shown = self.typed(scene, scene.topic(1), "--dry-run", "3")
        assert (shown.code, shown.stdout) == (0, "there are no records to read\n")

    def test_a_pattern_that_matches_nothing_is_named(self, scene: Scene) -> None:
        """It is no problem: the run starts, and reads such topics when they are created."""
        words = ["run", "--bootstrap-servers", scene.servers, "--group", scene.group, "--pattern", "nothing.*"]
        words += ["--table", str(scene.folder / "t"), "--checkpoint", str(scene.folder / "c"), "--check"]
        result = CliRunner().invoke(app, words, env={"COLUMNS": "2000"})
        assert result.exit_code == 0, result.output
        assert "no topic matches nothing.*: read when they are created" in result.output


class PartialAdmin:
    """Answers for some partitions only, as when others have no leader or an open transaction.

    Args:
        committed: by partition of topic t. Without a committed offset: None.
        silent: the partitions whose starts no broker tells.
    """

    def __init__(self, committed: dict[int, CommittedOffset | None], silent: Collection[int] = ()) -> None:
        self.committed, self.silent = committed, silent

    def read_offsets(self, group: str, tps: list[TopicPartition]) -> dict[TopicPartition, CommittedOffset | None]:
        return {tp: self.committed[tp.partition] for tp in tps if tp.partition in self.committed}

    def starting_offsets(self, starts: dict[TopicPartition, StartAt], *, committed: bool) -> Any:
        at = {"earliest": 0, "latest": 9, "time": None}
        return {tp: at[start.kind] for tp, start in starts.items() if tp.partition not in self.silent}, {}

    def latest(self, tps: list[TopicPartition], **_: bool) -> dict[TopicPartition, int]:
        return dict.fromkeys(tps, 9)

    def earliest(self, tps: list[TopicPartition], **_: bool) -> dict[TopicPartition, int]:
        return dict.fromkeys(tps, 0)


def starts_of(
    admin: PartialAdmin, count: int, last: CheckpointBatch | None = None, **more: str
) -> tuple[Options, list[Any]]:
    given = {"kafka.bootstrap.servers": "b:1", "kafka.group.id": "g", "subscribe": "t", **more}
    options = Options.parse(given)
    return options, preview.find_starts(cast("Any", admin), options, {"t": Topic("id", count)}, last)[0]


def test_a_start_that_no_broker_told_is_not_taken_for_one_by_the_options() -> None:
    admin = PartialAdmin({0: CommittedOffset(5, ""), 1: None, 2: None}, silent={2})
    options, starts = starts_of(admin, 4, None, startingTimestamp="1", startingOffsetsByTimestampStrategy="latest")
    assert [start.at for start in starts] == [5, 9, None, None]
    assert [start.problem(options) for start in starts] == [
        *(None, None),
        *(f"no broker has answered where t-{n} starts; run the command again" for n in (2, 3)),
    ]


LAST = CheckpointBatch(
    3,
    StreamOffset(
        group="g", stream="abc", seq=3, known={"t": 1}, topic_ids={"t": "id"}, ranges={TopicPartition("t", 0): (2, 4)}
    ),
    runs_again=False,
)
OWN = identifiers.note_text(identifiers.Note("abc", 3))


@pytest.mark.parametrize(
    ("committed", "runs_again", "at", "by"),
    [
        (None, False, 4, "checkpoint"),
        (CommittedOffset(4, OWN), False, 4, "checkpoint"),
        (CommittedOffset(2, identifiers.note_text(identifiers.Note("abc", 2))), True, 2, "checkpoint"),
        (CommittedOffset(7, identifiers.note_text(identifiers.Note("other", 9))), False, 7, "committed offset"),
        (CommittedOffset(7, ""), False, 7, "committed offset"),
        (CommittedOffset(1, ""), False, 1, "committed offset"),
        (CommittedOffset(0, identifiers.reset_text(1)), False, 0, "committed offset"),
        (CommittedOffset(4, identifiers.reset_text(1)), True, 4, "committed offset"),
    ],
)
def test_a_start_is_where_a_run_with_this_checkpoint_and_these_offsets_continues(
    committed: CommittedOffset | None, runs_again: bool, at: int, by: str
) -> None:
    """By the code of a run: a reset, a foreign commit and that of another stream win over the checkpoint."""
    options, (start, added) = starts_of(
        PartialAdmin({0: committed, 1: None}), 2, LAST._replace(runs_again=runs_again), startingOffsets="latest"
    )
    assert (start.at, start.origin, start.problem(options)) == (at, by, None)
    assert (added.at, added.origin) == (0, "starting options"), "a partition that was added later"


def test_a_check_knows_which_starts_no_batch_has_read() -> None:
    """A table refuses them above its ledger, as those of a run."""
    added = TopicPartition("t", 1)
    offset = replace(LAST.offset, known={"t": 2}, uncommitted={added: 5}, started=frozenset({added}))
    admin: Any = PartialAdmin({0: CommittedOffset(4, OWN), 1: None})
    options = Options.parse({"kafka.bootstrap.servers": "b:1", "kafka.group.id": "g", "subscribe": "t"})
    _, batch = preview.find_starts(admin, options, {"t": Topic("id", 2)}, LAST._replace(offset=offset))
    assert (batch.ranges[added], batch.started) == ((5, 9), frozenset({added}))


class TopicsAdmin(PartialAdmin):
    """A cluster with these topics, and the first partition's committed offset of topic t."""

    def __init__(self, topics: dict[str, Topic], committed: CommittedOffset | None) -> None:
        super().__init__({0: committed})
        self.topics = topics

    def existing_topics(self, names: Collection[str]) -> dict[str, Topic]:
        return {name: topic for name, topic in self.topics.items() if name in names}

    def matching_topics(self, is_wanted: Callable[[str], bool]) -> dict[str, Topic]:
        return {name: topic for name, topic in self.topics.items() if is_wanted(name)}

    def describe_group(self, group: str) -> GroupDescription:
        return GroupDescription("empty", "classic", "", ())

    def close(self) -> None:
        """There is nothing to close."""


def plan_of(
    admin: TopicsAdmin, last: CheckpointBatch | None, monkeypatch: pytest.MonkeyPatch, **more: str
) -> preview.Plan:
    monkeypatch.setattr(preview, "GroupAdmin", lambda *_, **__: admin)
    monkeypatch.setattr(preview, "read_last_batch", lambda *_: last)
    options = Options.parse({"kafka.bootstrap.servers": "b:1", "kafka.group.id": "g", **more})
    return preview.plan(options, cast("Any", None), "/checkpoint")


@pytest.mark.parametrize("subscription", [{"subscribe": "t,u"}, {"subscribePattern": ".*"}])
def test_a_check_names_deleted_topics_of_which_the_checkpoint_has_positions(
    subscription: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run ends with the same error, also of topics that a pattern matched. A topic that it knows without a position
    is read when it is created again."""
    admin = TopicsAdmin({"t": Topic("id", 1)}, CommittedOffset(4, OWN))
    read, known = {**LAST.offset.ranges, TopicPartition("u", 0): (0, 7)}, {"t": 1, "u": 1}
    has_read = LAST._replace(offset=replace(LAST.offset, ranges=read, known=known))
    found = plan_of(admin, has_read, monkeypatch, **subscription)
    assert found.problems == ["topic u was read and does not exist: the run ends with TopicMissing"]
    assert plan_of(admin, has_read, monkeypatch, failOnDataLoss="false", **subscription).problems == []
    has_seen = LAST._replace(offset=replace(LAST.offset, known=known))
    assert plan_of(admin, has_seen, monkeypatch, **subscription).problems == []


def test_a_check_believes_no_single_list_of_topics_that_a_read_topic_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a run: a broker that has just started knows none."""
    admin = TopicsAdmin({"t": Topic("id", 1)}, CommittedOffset(4, OWN))
    monkeypatch.setattr(admin, "matching_topics", lambda _: {})
    found = plan_of(admin, LAST, monkeypatch, subscribePattern=".*")
    assert found.problems == [] and [start.at for start in found.starts] == [4]


@pytest.mark.parametrize("last", [LAST, LAST._replace(runs_again=True), None])
def test_a_check_reports_that_a_topic_was_recreated(
    last: CheckpointBatch | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by the note of a committed offset, without a checkpoint."""
    note = identifiers.note_text(identifiers.Note("abc", 3, topic_id="id"))
    admin = TopicsAdmin({"t": Topic("id-2", 1)}, CommittedOffset(4, note))
    found = plan_of(admin, last, monkeypatch, subscribe="t")
    assert found.problems == [
        "topic t was deleted and recreated: the run ends with DataLoss, unless failOnDataLoss is false"
    ]


def test_a_check_starts_at_the_first_record_of_a_recreated_topic_without_fail_on_data_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    note = identifiers.note_text(identifiers.Note("abc", 3, topic_id="id"))
    admin = TopicsAdmin({"t": Topic("id-2", 1)}, CommittedOffset(4, note))
    found = plan_of(admin, LAST, monkeypatch, subscribe="t", failOnDataLoss="false")
    assert found.problems == []
    assert [(start.at, start.end, start.origin) for start in found.starts] == [(0, 9, preview.RECREATED)]
    assert found.batch.ranges == {TopicPartition("t", 0): (0, 9)} and found.batch.topic_ids == {"t": "id-2"}


@pytest.mark.parametrize("committed", [CommittedOffset(4, OWN), CommittedOffset(1, ""), CommittedOffset(7, "")])
def test_a_check_starts_at_the_first_record_that_is_left_without_fail_on_data_loss(
    committed: CommittedOffset, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = TopicsAdmin({"t": Topic("id", 1)}, committed)
    monkeypatch.setattr(admin, "earliest", lambda tps, **_: dict.fromkeys(tps, 6))
    found = plan_of(admin, LAST, monkeypatch, subscribe="t", failOnDataLoss="false")
    at, by = (7, "committed offset") if committed.offset == 7 else (6, preview.LOG_START)
    assert found.problems == []
    assert [(start.at, start.origin) for start in found.starts] == [(at, by)]
    assert found.batch.ranges == {TopicPartition("t", 0): (at, 9)}


@pytest.mark.parametrize("more", [{}, {"orders": Topic("id-9", 1)}])
@pytest.mark.parametrize("ranges", [LAST.offset.ranges, {}])
def test_a_batch_that_runs_again_is_checked_as_it_was_planned(
    more: dict[str, Topic], ranges: dict[TopicPartition, tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever topics were created since."""
    last = LAST._replace(runs_again=True, offset=replace(LAST.offset, ranges=ranges))
    found = plan_of(TopicsAdmin({"t": Topic("id", 1), **more}, None), last, monkeypatch, subscribePattern=".*")
    batch = found.next_batch()
    assert found.runs_again and (batch.batch_id, batch.root, batch.offsets) == (3, "/checkpoint", (last.offset,))


@pytest.mark.parametrize(
    ("committed", "ends", "more", "code", "problem"),
    [
        ({0: None}, [0, 1], [], RETRIABLE, "no broker has answered where t-1 starts; run the command again"),
        ({0: None, 1: None}, [0], [], RETRIABLE, "t-1 has no leader that answers"),
        ({0: None}, [0, 1], ["table t lacks a column"], FINAL, "no broker has answered where t-1 starts"),
        ({0: CommittedOffset(20, ""), 1: None}, [0], [], FINAL, "t-1 has no leader that answers"),
        ({0: None, 1: None}, [0, 1], [], 0, ""),
    ],
)
def test_a_check_can_be_run_again_if_only_answers_are_missing(
    committed: dict[int, CommittedOffset | None],
    ends: list[int],
    more: list[str],
    code: int,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    admin = TopicsAdmin({"t": Topic("id", 2)}, None)
    admin.committed = committed
    monkeypatch.setattr(admin, "latest", lambda tps, **_: {tp: 9 for tp in tps if tp.partition in ends})
    found = plan_of(admin, None, monkeypatch, subscribe="t")
    monkeypatch.setattr(preview, "plan", lambda *_: found)
    monkeypatch.setattr(preview, "check", lambda *_: ("", found.problems + more))
    for name in ("_check_delta", "_print_errors_once", "_refuse_lost_name", "_log_to_stderr"):
        monkeypatch.setattr(job, name, lambda *_: None)
    monkeypatch.setattr(job, "_session", MagicMock())
    monkeypatch.setattr(compatibility, "check_session", lambda _: None)
    words = "run --bootstrap-servers b:1 --group g --topics t --table /no/t --checkpoint /no/c --check"
    shown = CliRunner().invoke(app, words.split())
    assert shown.exit_code == code and problem in caplog.text, shown.output


def test_a_check_names_the_table_as_the_user_does() -> None:
    table: Any = SimpleNamespace(exists=lambda: False, partition_by=(), table="file:/home/me/lake/orders")
    rows: Any = SimpleNamespace(schema=SimpleNamespace(fields=[]))
    facts, _ = preview.table_plan(table, rows, "g", "lake/orders")
    assert facts["table"] == "lake/orders is created by the first batch"


def test_a_start_beyond_every_record_is_named() -> None:
    options, (start,) = starts_of(PartialAdmin({0: None}), 1, startingTimestamp="1")
    assert "t-0 have no record at or after the starting timestamp 1" in str(start.problem(options))
