"""DeltaSinks without a JVM, on real tables of ``deltalake``. The content of a table is read from its log files.
Deliberately absent: Spark, Kafka (``tests/delta/test_topics.py``, ``tests/crash/test_topics.py``)."""

import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import printed_commands
import pytest
from deltalake import DeltaTable
from kit.frames import Frame
from offset_model import SERVERS, OffsetModel
from pyspark import cloudpickle
from pyspark.errors import PySparkException
from sink_helpers import Query, clone_of, commits, expire_log, next_offsets, offsets_in, one, records, rows
from sink_source import offset
from typer.testing import CliRunner

from spark_group_source import DeadLetters, DeltaSink, DeltaSinks, Merge
from spark_group_source.cli.app import app
from spark_group_source.command_line import UNKNOWN_SERVERS
from spark_group_source.delta import topic_sinks
from spark_group_source.delta.checkpoint import read_planned
from spark_group_source.delta.topic_sinks import settings_of
from spark_group_source.errors import LedgerConflict, OptionError
from spark_group_source.host import run_files
from spark_group_source.kafka.translation import CommittedOffset, Topic
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.identifiers import Note, note_text, parse_note
from spark_group_source.protocol.offsets import BatchKey

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

TOPICS = ("clicks", "orders", "payments")


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "runs").mkdir(mode=0o700)  # where a run publishes
    monkeypatch.setattr(run_files, "directory", lambda: tmp_path / "runs")
    return tmp_path / "lake"


@pytest.fixture
def sinks(query: Query, lake: Path) -> DeltaSinks:
    return by_topic(query, lake)


def by_topic(query: Query, lake: Path, **arguments: Any) -> DeltaSinks:
    return DeltaSinks(lambda topic: query.sink(lake / topic), checkpoint=str(query.root), **arguments)


def of(*topics: str, start: int, end: int) -> Any:
    return {(topic, 0): (start, end) for topic in topics}


def tables(lake: Path) -> list[str]:
    return sorted(path.name for path in lake.iterdir()) if lake.is_dir() else []


def test_G4_each_topic_has_a_table_with_its_rows_and_the_ledger_of_its_offsets(
    query: Query, lake: Path, sinks: DeltaSinks
) -> None:
    query.run(sinks, 0, offset(0, of(*TOPICS, start=0, end=5)))
    query.run(sinks, 1, offset(1, of("orders", start=5, end=7) | of("clicks", start=5, end=5)))
    assert tables(lake) == [*TOPICS]
    for topic, end in zip(TOPICS, (5, 7, 5), strict=True):
        assert rows(lake / topic) == records(0, end, topic=topic)
        assert next_offsets(lake / topic) == {(topic, 0): end}
    assert [len(commits(lake / topic)) for topic in TOPICS] == [2, 3, 2], "none without records"


def test_topics_may_share_a_table(query: Query, lake: Path) -> None:
    both = DeltaSinks(lambda topic: query.sink(lake / topic.partition(".")[0]), checkpoint=str(query.root))
    query.run(both, 0, offset(0, of("orders.eu", "orders.us", "clicks", start=0, end=3)))
    assert tables(lake) == ["clicks", "orders"]
    assert rows(lake / "orders") == sorted(records(0, 3, topic="orders.eu") + records(0, 3, topic="orders.us"))
    assert len(commits(lake / "orders")) == 2


def test_a_platform_that_keeps_no_rows_refuses_a_batch_for_several_tables(
    query: Query, lake: Path, sinks: DeltaSinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    condition = "NOT_SUPPORTED_WITH_SERVERLESS"

    def persist(self: Frame, level: object) -> Frame:
        raise PySparkException(f"[{condition}] PERSIST TABLE is not supported on serverless compute.", condition, {})

    monkeypatch.setattr(Frame, "persist", persist)
    with pytest.raises(OptionError, match="serverless compute refuses to keep the rows of a batch, which DeltaSinks"):
        query.run(sinks, 0, offset(0, of(*TOPICS, start=0, end=5)))
    assert tables(lake) == []
    condition = "ANOTHER"
    with pytest.raises(PySparkException, match="ANOTHER"):
        query.run(sinks, 0, offset(0, of(*TOPICS, start=0, end=5)))


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """``fails(table)``: the next write to a table ends like a full disk."""

    def arm(table: Path) -> None:
        real = DeltaSink.write

        def write(self: DeltaSink, *batch: Any) -> Any:
            if self.table == str(table):
                monkeypatch.setattr(DeltaSink, "write", real)
                raise OSError("No space left on device")
            return real(self, *batch)

        monkeypatch.setattr(DeltaSink, "write", write)

    return arm


@pytest.mark.parametrize("failing", TOPICS)
def test_G4_batch_that_one_table_lacks_is_not_durable_and_its_replay_writes_that_table_only(
    query: Query, lake: Path, sinks: DeltaSinks, fails: Callable[[Path], None], failing: str
) -> None:
    batch = offset(0, of(*TOPICS, start=0, end=5))
    fails(lake / failing)
    with pytest.raises(OSError, match="No space"):
        query.run(sinks, 0, batch)
    assert run_files.durable_mark("s1").seq == -1
    assert tables(lake) == [topic for topic in TOPICS if topic != failing], "the others have it"
    query.run(by_topic(query, lake), 0, batch)
    assert {topic: rows(lake / topic) for topic in TOPICS} == {t: records(0, 5, topic=t) for t in TOPICS}
    assert [len(commits(lake / topic)) for topic in TOPICS] == [2, 2, 2]
    assert run_files.durable_mark("s1") == BatchKey.of(batch)


def test_G5_query_without_its_checkpoint_leaves_out_in_each_table_what_it_has(
    query: Query, new_query: Any, lake: Path, sinks: DeltaSinks, fails: Callable[[Path], None]
) -> None:
    query.run(sinks, 0, offset(0, of(*TOPICS, start=0, end=5)))
    fails(lake / "orders")
    with pytest.raises(OSError, match="No space"):
        query.run(sinks, 1, offset(1, of(*TOPICS, start=5, end=9)))
    later = new_query("later")  # Kafka has the offsets of batch 0
    later.run(by_topic(later, lake), 0, offset(0, of(*TOPICS, start=5, end=12), stream="s2"))
    assert {topic: rows(lake / topic) for topic in TOPICS} == {t: records(0, 12, topic=t) for t in TOPICS}


def test_batch_that_is_void_in_one_table_is_not_durable(query: Query, lake: Path, sinks: DeltaSinks) -> None:
    query.run(sinks, 0, offset(0, of(*TOPICS, start=0, end=5), reset_number=1))
    query.run(sinks, 1, offset(1, of("clicks", start=5, end=6), reset_number=2))
    query.run(sinks, 2, offset(2, of("clicks", "orders", start=5, end=8), reset_number=1))
    assert rows(lake / "clicks") == records(0, 6, topic="clicks")
    assert run_files.void_by("s1", 2) == 2
    assert run_files.durable_mark("s1").seq == 1


def test_G4_reset_to_the_ledger_of_one_table_moves_its_topic_only(
    query: Query, lake: Path, sinks: DeltaSinks, admin: OffsetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the error prints it after a RESTORE of that table."""
    both = ("clicks", "orders")
    for n in range(2):
        query.run(sinks, n, offset(n, of(*both, start=5 * n, end=5 * n + 5)))
    tps = {topic: TopicPartition(topic, 0) for topic in both}
    admin.offsets = {tp: CommittedOffset(10, note_text(Note("s1", 1))) for tp in tps.values()}
    monkeypatch.setattr(admin, "existing_topics", lambda names: {name: Topic("id-1", 1) for name in names})
    DeltaTable(lake / "orders").restore(1)
    refused = offset(2, of(*both, start=10, end=12))
    with pytest.raises(LedgerConflict) as error:
        query.run(sinks, 2, refused)
    command, to_further = (text.replace(UNKNOWN_SERVERS, SERVERS) for text in printed_commands.commands(error.value))
    assert "--to-further --topic orders" in to_further
    assert CliRunner().invoke(app, shlex.split(command)[1:]).exit_code == 0
    assert {tp.topic: at.offset for tp, at in admin.offsets.items()} == {"clicks": 10, "orders": 5}
    query.run(sinks, 2, refused)
    assert rows(lake / "orders") == records(0, 5, topic="orders"), "it was planned before the reset"
    later = of("clicks", start=10, end=15) | of("orders", start=5, end=15)
    query.run(sinks, 3, offset(3, later, followed=[("orders", 0)], reset_number=1))
    assert {topic: rows(lake / topic) for topic in both} == {topic: records(0, 15, topic=topic) for topic in both}
    assert next_offsets(lake / "orders") == {("orders", 0): 15}, "no batch of this table would move the other topic"

    admin.offsets = {tp: CommittedOffset(15, note_text(Note("s1", 3, 1))) for tp in tps.values()}
    DeltaTable(lake / "orders").restore(1)
    with pytest.raises(LedgerConflict) as error:
        query.run(sinks, 4, offset(4, of(*both, start=15, end=20), reset_number=1))
    command = printed_commands.commands(error.value)[0].replace(UNKNOWN_SERVERS, SERVERS)
    assert CliRunner().invoke(app, shlex.split(command)[1:]).exit_code == 0
    assert {tp.topic: at.offset for tp, at in admin.offsets.items()} == {"clicks": 15, "orders": 5}


def test_G4_commands_for_a_clone_of_one_table_move_its_topic_only(
    query: Query, lake: Path, sinks: DeltaSinks, admin: OffsetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other table has the batch, which the clone refuses, and Kafka is at its start."""
    both = ("clicks", "orders")
    query.run(sinks, 0, offset(0, of(*both, start=0, end=5)))
    tps = {topic: TopicPartition(topic, 0) for topic in both}
    admin.offsets = {tp: CommittedOffset(5, note_text(Note("s1", 0))) for tp in tps.values()}
    monkeypatch.setattr(admin, "existing_topics", lambda names: {name: Topic("id-1", 1) for name in names})
    (lake / "orders").rename(lake / "former")
    clone_of(lake / "former", len(commits(lake / "former")) - 1, lake / "orders")
    refused, anew = offset(1, of(*both, start=5, end=10)), by_topic(query, lake)
    with pytest.raises(LedgerConflict, match="is a clone of") as error:
        query.run(anew, 1, refused)
    *_, again, further = [text.replace(UNKNOWN_SERVERS, SERVERS) for text in printed_commands.commands(error.value)]
    for command in (again, further):
        result = CliRunner().invoke(app, shlex.split(command)[1:])
        assert result.exit_code == 0, result.output
    moved = [(tp.topic, tp.partition) for tp, at in admin.offsets.items() if parse_note(at.metadata).stream is None]
    query.run(anew, 2, offset(2, of(*both, start=5, end=15), followed=moved, reset_number=admin.resets))
    assert {topic: offsets_in(lake / topic) for topic in both} == {topic: list(range(15)) for topic in both}


def test_G4_reset_of_one_table_to_the_start_of_a_batch_moves_its_topic_only(
    query: Query, lake: Path, sinks: DeltaSinks, admin: OffsetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the error prints it where that table's ledger is unknown. The other table has the batch."""
    both = ("clicks", "orders")
    query.run(sinks, 0, offset(0, of(*both, start=0, end=5)))
    expire_log(lake / "orders")
    tps = {topic: TopicPartition(topic, 0) for topic in both}
    admin.offsets = {tp: CommittedOffset(5, note_text(Note("s1", 0))) for tp in tps.values()}
    monkeypatch.setattr(admin, "existing_topics", lambda names: {name: Topic("id-1", 1) for name in names})
    refused = offset(1, of(*both, start=5, end=10), followed=[("orders", 0)])
    anew = by_topic(query, lake)
    with pytest.raises(LedgerConflict, match="older than the table's log") as error:
        query.run(anew, 1, refused)
    (command,) = printed_commands.commands(error.value)
    result = CliRunner().invoke(app, shlex.split(command.replace(UNKNOWN_SERVERS, SERVERS))[1:])
    assert result.exit_code == 0, result.output
    query.run(anew, 1, refused)
    moved = [(tp.topic, tp.partition) for tp, at in admin.offsets.items() if parse_note(at.metadata).stream is None]
    query.run(anew, 2, offset(2, of(*both, start=5, end=15), followed=moved, reset_number=1))
    assert {topic: offsets_in(lake / topic) for topic in both} == {topic: list(range(15)) for topic in both}


def test_commands_of_a_refused_move_back_name_the_topics_of_the_table(
    query: Query, lake: Path, sinks: DeltaSinks
) -> None:
    query.run(sinks, 0, offset(0, of("clicks", "orders", start=0, end=5)))
    back = of("clicks", start=5, end=6) | of("orders", start=3, end=6)
    with pytest.raises(LedgerConflict, match="--to-current --topic orders --table"):
        query.run(sinks, 1, offset(1, back, followed=[("orders", 0)]))


def test_table_of_a_new_topic_is_created_with_its_first_record(query: Query, lake: Path, sinks: DeltaSinks) -> None:
    query.run(sinks, 0, offset(0, of("orders", start=0, end=5) | of("clicks", start=90, end=90)))
    assert tables(lake) == ["orders"]
    query.run(sinks, 1, offset(1, of("clicks", start=90, end=95)))
    assert rows(lake / "clicks") == records(90, 95, topic="clicks")


def test_batch_without_records_is_durable(query: Query, lake: Path, sinks: DeltaSinks) -> None:
    batch = offset(0, of("orders", start=5, end=5))
    query.run(sinks, 0, batch)
    assert tables(lake) == []
    assert run_files.durable_mark("s1") == BatchKey.of(batch)


# --- refusals -------------------------------------------------------------------------------------------------------


def test_topic_without_a_sink_is_refused_before_anything_is_written(query: Query, lake: Path) -> None:
    some = DeltaSinks({"orders": query.sink(lake / "orders")}, checkpoint=str(query.root))
    with pytest.raises(OptionError, match="topic payments has no table"):
        query.run(some, 0, offset(0, of("orders", "payments", start=0, end=5)))
    assert tables(lake) == []


def test_more_tables_than_allowed_are_refused_before_anything_is_written(query: Query, lake: Path) -> None:
    with pytest.raises(OptionError, match=r"payments.* tables_max=2 tables are in use"):
        query.run(by_topic(query, lake, tables_max=2), 0, offset(0, of(*TOPICS, start=0, end=5)))
    assert tables(lake) == []


def test_rows_of_another_topic_are_refused_before_anything_is_written(query: Query, lake: Path) -> None:
    batch = offset(0, of("orders", "clicks", start=0, end=5))
    query.plan(0, batch)
    frame = query.rows(batch, offset(0, of("renamed", start=0, end=1)))
    with pytest.raises(OptionError, match="rows with topic renamed"):
        by_topic(query, lake)(frame, 0)
    assert tables(lake) == []


def test_rows_without_their_topic_are_refused(query: Query, sinks: DeltaSinks) -> None:
    batch = offset(0, one(0, 5))
    query.plan(0, batch)
    with pytest.raises(OptionError, match="transform="):
        sinks(query.rows(batch).select("value"), 0)


def test_sources_of_other_kinds_are_refused(query: Query, sinks: DeltaSinks) -> None:
    query.plan(0, offset(0, one(0, 5)), '{"rate": 1}')
    with pytest.raises(OptionError, match="sources of other kinds"):
        sinks(query.rows(offset(0, one(0, 5))), 0)


@pytest.mark.parametrize("given", [{}, {"orders": "/lake/orders"}, "/lake/orders", None])
def test_what_is_not_a_sink_for_each_topic_is_refused_at_the_start(given: Any) -> None:
    with pytest.raises(OptionError, match="DeltaSinks needs"):
        DeltaSinks(given)


@pytest.mark.parametrize("key", [0, True, None])
def test_keys_that_are_not_text_are_refused_at_the_start(key: Any) -> None:
    with pytest.raises(OptionError, match=f"a sink for {key}; its keys must be text"):
        DeltaSinks({key: DeltaSink("/lake/a"), "b": DeltaSink("/lake/b")}, by="partition")


def test_too_many_tables_are_refused_at_the_start() -> None:
    given = {topic: DeltaSink(f"/lake/{topic}") for topic in TOPICS}
    assert DeltaSinks(given, tables_max=3).tables_max == 3
    with pytest.raises(OptionError, match="tables_max=2"):
        DeltaSinks(given, tables_max=2)


def clean(df: "DataFrame") -> "DataFrame":
    return df


def keeping(kind: str) -> Any:
    def only(df: "DataFrame", *, kind: str = kind) -> "DataFrame":
        return df

    return only


def test_transforms_with_other_defaults_are_not_the_same() -> None:
    sinks = {kind: DeltaSink("/lake/all", transform=keeping(kind)) for kind in ("click", "view")}
    with pytest.raises(OptionError, match="with different transform"):
        DeltaSinks(sinks, by="kind")


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"transform": clean}, "transform"),
        ({"dead_letters": DeadLetters("/lake/bad")}, "dead_letters"),
        ({"merge": Merge(["id"]), "persist": True}, "persist and merge"),
    ],
)
def test_sinks_of_one_table_with_different_settings_are_refused(other: dict[str, Any], named: str) -> None:
    sinks = {"orders": DeltaSink("/lake/all"), "clicks": DeltaSink("/lake/all", **other)}
    with pytest.raises(OptionError, match=f"write table /lake/all, with different {named}"):
        DeltaSinks(sinks)
    with pytest.raises(OptionError, match=named):
        DeltaSinks({"orders": sinks["orders"]}, others=sinks["clicks"])
    DeltaSinks({"orders": sinks["clicks"], "clicks": DeltaSink("/lake/all", **other)})


@pytest.mark.parametrize(("one", "other"), [("/x/t", "/x/t/"), ("s3://x/t", "s3://x/t/"), ("db.Orders", "db.orders")])
def test_two_spellings_of_a_table_are_one_table(one: str, other: str) -> None:
    sinks = DeltaSinks({"a": DeltaSink(one), "b": DeltaSink(other)}, by="kind", tables_max=1)
    assert sinks.tables_max == 1
    with pytest.raises(OptionError, match="with different merge"):
        DeltaSinks({"a": DeltaSink(one), "b": DeltaSink(other, merge=Merge(["id"]))}, by="kind")


def test_a_function_may_make_the_same_transform_for_each_topic(query: Query, lake: Path) -> None:
    def sink(topic: str) -> DeltaSink:
        steps = {"clicks": partial(clean), "orders": partial(clean)}
        return query.sink(lake / "all", transform=steps.get(topic, lambda df: df.limit(9)))

    sinks = DeltaSinks(sink, checkpoint=str(query.root))
    query.run(sinks, 0, offset(0, of("clicks", "orders", start=0, end=3)))
    assert rows(lake / "all") == sorted(records(0, 3, topic="clicks") + records(0, 3, topic="orders"))
    assert settings_of(sink("a")) == settings_of(sink("b")) != settings_of(sink("clicks"))

    def made_of(value: int) -> DeltaSink:
        return DeltaSink("/lake/all", transform=lambda df: df.limit(value))

    assert settings_of(made_of(1)) == settings_of(made_of(1)) != settings_of(made_of(2))


class Column:
    """Like Spark's: a comparison returns no truth value."""

    def __eq__(self, other: object) -> Any:
        return Column()

    def __bool__(self) -> bool:
        raise ValueError("cannot convert column into bool")

    __hash__ = object.__hash__


def test_values_of_a_transform_that_cannot_be_compared_are_the_same_as_themselves() -> None:
    def made_of(value: Any) -> DeltaSink:
        return DeltaSink("/lake/all", transform=lambda df: df.withColumn("more", value))

    column = Column()
    sinks = DeltaSinks({"orders": made_of(column), "clicks": made_of(column)})
    assert len(sinks._by_table) == 1
    with pytest.raises(OptionError, match="with different transform"):
        DeltaSinks({"orders": made_of(column), "clicks": made_of(Column())})


def test_a_function_that_names_one_table_in_two_ways_is_refused(query: Query, lake: Path) -> None:
    sinks = DeltaSinks(lambda topic: query.sink(lake / "all", persist=topic == "orders"), checkpoint=str(query.root))
    with pytest.raises(OptionError, match="with different persist"):
        query.run(sinks, 0, offset(0, of("orders", "clicks", start=0, end=3)))
    assert tables(lake) == []


def test_a_bounded_number_of_sinks_is_remembered(query: Query, lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_sinks, "NAMES_MAX", 2)
    asked = []

    def sink_of(topic: str) -> DeltaSink:
        asked.append(topic)
        return query.sink(lake / "all")

    sinks = DeltaSinks(sink_of, checkpoint=str(query.root), tables_max=1)
    for number, topic in enumerate(["a", "b", "a", "c", "a"]):
        query.run(sinks, number, offset(number, of(topic, start=number, end=number + 1)))
    assert asked == ["a", "b", "c", "a"]
    assert [row[0] for row in rows(lake / "all")] == ["a", "a", "a", "b", "c"]


def test_sinks_can_be_sent_to_another_process(
    query: Query, lake: Path, sinks: DeltaSinks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark Connect does so, to one that may have another working directory."""
    query.run(sinks, 0, offset(0, of("orders", start=0, end=5)))
    sent = cloudpickle.dumps(DeltaSinks({"orders": DeltaSink("./orders")}, by="kind", checkpoint="c/"))
    monkeypatch.chdir(tmp_path)
    there = cloudpickle.loads(sent)
    query.plan(1, offset(1, of("orders", start=5, end=6)))
    planned = read_planned(query.spark, 1, str(query.root))
    assert (there.checkpoint, [part.keys for part in there._parts(query.spark, planned, ["orders"])]) == (
        "c",
        [("orders",)],
    )


def test_one_table_gets_the_rows_as_they_are(query: Query, lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept for it."""
    seen: list[Any] = []

    def write(self: DeltaSink, df: Any, planned: Any, common: Any) -> Any:
        seen.append(df)
        return planned.offsets

    monkeypatch.setattr(DeltaSink, "write", write)
    batch = offset(0, of("orders", start=0, end=5))
    query.plan(0, batch)
    frame = query.rows(batch)
    by_topic(query, lake)(frame, 0)
    assert seen == [frame]
