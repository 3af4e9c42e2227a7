"""Queries in real Spark: what Spark alone decides of starts, triggers, replays, scans, progress and errors.

What a run does with Kafka is in the other files, without Spark.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from delta_files import living_rows
from deltalake import DeltaTable
from deltalake.schema import PrimitiveType
from kafka_helpers import SASL_PASSWORD, await_progress, await_until, sasl
from scenes import Scene
from streams import (
    END_S,
    PROTOCOLS,
    Job,
    OtherMember,
    numbered,
    options_of,
    planned,
    readers_below,
    remove_entry,
    texts,
    values_of,
)

from spark_group_source import DeadLetters, DeltaSink, GroupListener, Statistics, compatibility
from spark_group_source.host import run_files
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.offsets import parse

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = pytest.mark.spark
ADMISSION = pytest.mark.skipif(
    not compatibility.has_admission_control(), reason="Spark 4.0 and 4.1 run one batch, and end without a further call"
)
PLAIN = pytest.mark.skipif(compatibility.has_admission_control(), reason="Spark 4.0 and 4.1; runs in `make matrix`")


# --- starts ---------------------------------------------------------------------------------------------------------


@ADMISSION
def test_latest_is_resolved_once_with_the_old_or_a_new_checkpoint(scene: Scene) -> None:
    name = scene.topic(2)
    scene.produce(name, numbered(0, 3, 2))
    first = scene.job(subscribe=name, startingOffsets="latest")
    assert first.run() == []
    assert planned(first.checkpoint)[0].positions() == {TopicPartition(name, 0): 2, TopicPartition(name, 1): 2}
    assert scene.committed() == {TopicPartition(name, 0): 2, TopicPartition(name, 1): 2}
    scene.produce(name, numbered(4, 7, 2))
    shutil.copytree(first.checkpoint, first.checkpoint.with_name("kept"))
    assert values_of(scene.job(checkpoint="kept", subscribe=name, startingOffsets="latest").run()) == texts(4, 7)
    scene.produce(name, numbered(8, 9, 2))
    assert values_of(scene.job(checkpoint="new", subscribe=name, startingOffsets="latest").run()) == texts(8, 9)


def test_rows_have_the_named_columns_only(scene: Scene) -> None:
    name, table = scene.topic(2), scene.folder / "table"
    scene.produce(name, numbered(0, 9, 2))
    scene.job(subscribe=name, columns="timestamp, VALUE").run_into(DeltaSink(table), availableNow=True)
    rows = list(living_rows(table, ["value", "timestamp"]))
    assert sorted(row["value"].decode() for row in rows) == texts(0, 9)
    assert [field.name for field in DeltaTable(str(table)).schema().fields] == ["value", "timestamp"]


def test_timestamps_have_a_time_zone_also_where_the_session_prefers_those_without(scene: Scene) -> None:
    """In the rows, in the tables that the sink creates, and in those of bad records."""
    name, table, bad = scene.topic(), scene.folder / "table", scene.folder / "bad"
    sink = DeltaSink(table, writer="options", dead_letters=DeadLetters(bad, valid="offset <> 3", min_rows=100))
    scene.produce(name, numbered(0, 9))
    scene.spark.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    try:
        scene.job(subscribe=name).run_into(sink, availableNow=True)
    finally:
        scene.spark.conf.unset("spark.sql.timestampType")
    assert sorted(row["value"].decode() for row in living_rows(table, ["value"])) == [*texts(0, 2), *texts(4, 9)]
    for path, columns in [(table, ["timestamp"]), (bad, ["timestamp", "written_at"])]:
        types = {field.name: field.type for field in DeltaTable(str(path)).schema().fields}
        assert [types[column] for column in columns] == [PrimitiveType("timestamp")] * len(columns), path


def test_available_now_ends_without_a_topic_and_a_query_waits_for_it(scene: Scene) -> None:
    name = f"{scene.group}-later"
    one = scene.job(startingOffsets="latest", subscribe=name)
    assert one.run() == []
    with one.running() as query:
        query.processAllAvailable()
        scene.topic(2, name=name)
        scene.produce(name, numbered(0, 5, 2))
        await_until(lambda: one.values == texts(0, 5), what="the records of the new topic")
    assert planned(one.checkpoint)[0].ranges == {}


# --- triggers -------------------------------------------------------------------------------------------------------


@ADMISSION
def test_available_now_reads_up_to_the_current_end_in_limited_batches_and_stops(scene: Scene) -> None:
    name = scene.topic(3)
    scene.produce(name, numbered(0, 14, 3))
    enough: dict[str, Any] = {"minOffsetsPerTrigger": 5, "maxTriggerDelay": "1h"}  # it does not wait for this many
    one = scene.job(subscribe=name, maxOffsetsPerTrigger=5, groupMembers=2, **enough)

    def send_more(number: int) -> None:
        if number == 0:
            scene.produce(name, numbered(100, 102, 3))

    one.on_batch = send_more
    one.run()
    assert [len(rows) for _, rows in one.batches] == [5, 5, 5]
    assert one.values == texts(0, 14)
    one.on_batch = lambda number: None
    assert values_of(one.run()) == texts(100, 102)
    assert scene.committed() == scene.end_offsets(name)


@ADMISSION
def test_batches_stay_within_a_byte_limit_after_sizes_were_reported(scene: Scene) -> None:
    """The first batch counts 1 MiB for each record, 2 of each topic; later ones use the sizes that tasks reported."""
    large, small, limit = scene.topic(), scene.topic(), 4 << 20
    values = [f"{n:x<100000}" for n in range(150)], [str(n) for n in range(2_000)]
    for name, written in zip((large, small), values, strict=True):
        scene.produce(name, written, partition=0)
    one = scene.job(subscribe=f"{large},{small}", maxBytesPerTrigger="4m")
    assert values_of(one.run()) == sorted([*values[0], *values[1]])
    sizes = [sum(len(row.value or "") for row in rows) for _, rows in one.batches]
    assert len(one.batches[0][1]) == 4
    assert max(sizes) <= limit
    assert max(sizes) >= limit - 100_100, "a batch has all records that fit"


@pytest.mark.proves("G2", level="spark")
def test_G2_once_reads_everything_and_commits_all_offsets_with_a_delta_sink(
    scene: Scene,
) -> None:
    name = scene.topic(2)
    one, table = scene.job(subscribe=name, maxOffsetsPerTrigger=2), scene.folder / "table"
    if not compatibility.has_admission_control():  # such a Spark does not pass the trigger
        one.options["trigger"] = "availableNow"
    for n in range(2):
        scene.produce(name, numbered(10 * n, 10 * n + 9, 2))
        one.run_into(DeltaSink(table), once=True)
        await_until(lambda: not run_files.read(scene.group), what="the end of the run")
        assert scene.committed() == scene.end_offsets(name)
    assert sorted(row["value"].decode() for row in living_rows(table, ["value"])) == texts(0, 19)


@ADMISSION
def test_lag_is_0_when_a_query_is_idle_stopped_or_finished(scene: Scene) -> None:
    name = scene.topic(4)
    scene.produce(name, numbered(0, 9, 3))  # the last partition is empty
    one = scene.job(subscribe=name, groupMembers=2)
    with one.running() as query:
        query.processAllAvailable()
        await_until(lambda: scene.committed() == scene.end_offsets(name), what="lag 0 while idle")
        scene.produce(name, numbered(10, 15, 3))
        query.processAllAvailable()
    await_until(lambda: scene.committed() == scene.end_offsets(name), what="lag 0 after stop()")
    scene.produce(name, numbered(16, 20, 3))
    one.run()
    assert scene.committed() == scene.end_offsets(name)
    assert one.values == texts(0, 20)


@PLAIN
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "given", [{"trigger": "availableNow", "maxOffsetsPerTrigger": 5}, {}], ids=["availableNow", "default"]
)
def test_available_now_without_admission_control_reads_and_commits_everything_in_one_batch(
    given: dict[str, Any], protocol: str, scene: Scene
) -> None:
    name, table = scene.topic(3), scene.folder / "table"
    one = scene.job(protocol, subscribe=name, groupMembers=2, **given)
    for n in range(2):
        scene.produce(name, numbered(15 * n, 15 * n + 14, 3))
        one.run_into(DeltaSink(table), availableNow=True)
        assert scene.committed() == scene.end_offsets(name), "when the query has ended"
        assert len(planned(one.checkpoint)) == n + 1
    assert sorted(row["value"].decode() for row in living_rows(table, ["value"])) == texts(0, 29)


@PLAIN
@pytest.mark.parametrize("trigger", ["availableNow", "auto"])
def test_another_sink_without_admission_control_has_its_last_offsets_committed_at_the_next_start(
    trigger: str, scene: Scene
) -> None:
    """Spark stops the reader in the same way after a batch that the sink has and after one that failed."""
    name = scene.topic(2)
    scene.produce(name, numbered(0, 9, 2))
    one = scene.job(subscribe=name, trigger=trigger)
    for read in (texts(0, 9), []):
        assert values_of(one.run()) == read
        await_until(lambda: not readers_below(), what="the end of the stream reader")
        assert (scene.committed() == scene.end_offsets(name)) is not bool(read)


@PLAIN
def test_available_now_without_admission_control_reads_the_rest_in_the_next_runs(scene: Scene) -> None:
    """Each run logs what it leaves: ``test_run``."""
    name, table = scene.topic(3), scene.folder / "table"
    scene.produce(name, numbered(0, 14, 3))
    one = scene.job(subscribe=name, maxOffsetsPerTrigger=6)
    for left in (9, 3, 0):
        one.run_into(DeltaSink(table), availableNow=True)
        assert len(living_rows(table)) == 15 - left
    assert sorted(row["value"].decode() for row in living_rows(table, ["value"])) == texts(0, 14)


@PLAIN
def test_a_replay_without_admission_control_ends_an_available_now_run_and_the_next_one_reads_the_rest(
    scene: Scene,
) -> None:
    name = scene.topic(2)
    scene.produce(name, numbered(0, 3, 2))
    one = scene.job(subscribe=name)
    one.run()
    remove_entry(one.checkpoint, "commits", 0)
    scene.produce(name, numbered(4, 5, 2))
    for _ in range(2):
        one.run()
    assert [(number, values_of(rows)) for number, rows in one.batches] == [
        (0, texts(0, 3)),
        (0, texts(0, 3)),
        (1, texts(4, 5)),
    ]


# --- replays and scans ----------------------------------------------------------------------------------------------


@ADMISSION
@pytest.mark.proves("G1", level="spark")
def test_G1_batch_0_is_replayed_as_planned_after_latest_has_moved(scene: Scene) -> None:
    name = scene.topic(2)
    scene.produce(name, numbered(0, 3, 2))
    one = scene.job(subscribe=name)
    one.run()
    remove_entry(one.checkpoint, "commits", 0)
    scene.produce(name, numbered(4, 5, 2))
    one.options["startingOffsets"] = "latest"
    one.run()
    assert [(number, values_of(rows)) for number, rows in one.batches] == [
        (0, texts(0, 3)),
        (0, texts(0, 3)),
        (1, texts(4, 5)),
    ]


def test_G1_a_query_that_scans_its_source_twice_has_one_reader_and_all_rows_in_each_scan(scene: Scene) -> None:
    name = scene.topic(2)
    scene.produce(name, numbered(0, 9, 2))
    one = scene.job(subscribe=name)
    frame = one.load()
    former = set(readers_below())  # of queries of other tests, which may still be ending
    query = one.start_frame(frame.union(frame))
    try:
        query.processAllAvailable()
        scene.produce(name, numbered(10, 13, 2))
        query.processAllAvailable()
        assert len(set(readers_below()) - former) == 1
    finally:
        query.stop()
    assert one.values == sorted(texts(0, 13) * 2)
    assert len(set(_lines(one.checkpoint))) == 1  # one line per scan, all equal


def test_a_union_of_two_groups_continues_with_one_side_when_the_other_has_no_records(scene: Scene) -> None:
    left, right = scene.topic(2), scene.topic(1)
    one = scene.job(subscribe=left)
    other = one.load(kafka__group__id=f"{scene.group}-right", subscribe=right)
    scene.produce(left, numbered(0, 3, 2))
    scene.produce(right, numbered(4, 5))
    query = one.start_frame(one.load().union(other))
    try:
        query.processAllAvailable()
        drained = _lines(one.checkpoint)
        scene.produce(right, numbered(6, 7))
        query.processAllAvailable()
        later = _lines(one.checkpoint)
        await_until(
            lambda: scene.committed(f"{scene.group}-right") == scene.end_offsets(right),
            what="the right group's offsets",
        )
    finally:
        query.stop()
    assert one.values == texts(0, 7)
    assert later[0] == drained[0]
    assert later[1] != drained[1]
    assert scene.committed() == scene.end_offsets(left)


def _lines(checkpoint: Path) -> list[str]:
    """The lines of the sources in the newest file of ``offsets``."""
    last = max((checkpoint / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    return last.read_text().splitlines()[2:]


@pytest.mark.proves("G8", level="spark")
def test_G8_two_streams_of_one_load_are_refused_with_a_remedy(scene: Scene) -> None:
    """Spark starts two streams: each would hold its partitions for a batch that waits for the other stream."""
    name = scene.topic(2)
    scene.produce(name, numbered(0, 3, 2))
    one = scene.job("classic", subscribe=name)
    frame = one.load()
    frame.createOrReplaceTempView("both_sides")
    sql = "SELECT l.topic, l.partition, l.offset, l.value FROM both_sides l JOIN both_sides r ON l.value = r.value"
    query = one.start_frame(frame.sparkSession.sql(sql))
    try:
        failure = await_progress(query.exception, lambda: query.status, what="the refusal")
    finally:
        query.stop()
    assert "OptionError" in str(failure)
    assert "another stream of the same load() runs in process" in str(failure)
    assert "Call load() for each stream" in str(failure)


def test_a_dataframe_can_be_read_again_after_its_query_ended(scene: Scene) -> None:
    """Both queries have the id of one load(): the second waits until the first has ended."""
    name = scene.topic()
    one = scene.job("classic", subscribe=name)
    frame = one.load()
    for first in (0, 4):
        scene.produce(name, numbered(first, first + 3))
        query = one.start_frame(frame)
        await_until(lambda query=query: query.lastProgress or query.exception(), what="a batch")  # type: ignore[misc]
        assert query.exception() is None
        query.stop()


# --- progress -------------------------------------------------------------------------------------------------------


def test_progress_has_the_positions_of_every_batch_and_the_ends_of_the_logs(scene: Scene) -> None:
    name = scene.topic(2)
    scene.produce(name, numbered(0, 9, 2))
    query = scene.job(subscribe=name, maxOffsetsPerTrigger=4).start(availableNow=True)
    assert query.awaitTermination(END_S)
    found = [p for p in (json.loads(p.json) for p in query.recentProgress) if p["numInputRows"]]
    assert found[0]["numInputRows"] == 4
    end = parse(found[0]["sources"][0]["endOffset"])
    assert end.positions() == {TopicPartition(name, 0): 2, TopicPartition(name, 1): 2}
    if compatibility.has_admission_control():
        assert [p["numInputRows"] for p in found] == [4, 4, 2]
        assert _object(found[0]["sources"][0]["latestOffset"]) == {name: {"0": 5, "1": 5}}


def _object(value: object) -> object:
    return json.loads(value) if isinstance(value, str) else value


def test_a_listener_receives_statistics_after_every_batch(scene: Scene) -> None:
    name = scene.topic(4)
    received: list[tuple[str, Statistics]] = []

    def receive(progress: Any, statistics: Statistics) -> None:
        if statistics.group == scene.group:  # Spark may deliver the last events of another test's query late
            received.append((str(progress.id), statistics))

    listener = GroupListener(receive)

    def a_batch_shows(assigned: tuple[int, ...]) -> bool:
        scene.produce(name, numbered(0, 3, 4))
        return bool(received) and received[-1][1].assigned == assigned

    scene.spark.streams.addListener(listener)
    try:
        with scene.job(subscribe=name, groupMembers=2).running(processingTime="100 milliseconds") as query:
            await_until(lambda: a_batch_shows((2, 2)), what="both members' partitions")
            alone = received[-1][1]
            with OtherMember(scene.servers, scene.group, [name]) as other:
                await_until(lambda: other.partitions and a_batch_shows((2, 1)), what="what is left to ours")
            first, last = received[0], received[-1][1]
            assert (first[0], last.group, last.slots) == (str(query.id), scene.group, ("assigned",) * 2)
            assert alone.reason.endswith("was assigned 2 partitions")
            assert last.rebalances > alone.rebalances and last.generation > alone.generation
            assert last.seq > alone.seq and last.commits > alone.commits
    finally:
        scene.spark.streams.removeListener(listener)


@pytest.mark.parametrize("offset", [None, "null", "17", "not JSON", '{"group":{"0":5}}', '{"group":"nobody"}'])
def test_a_listener_ignores_other_sources(offset: str | None) -> None:
    received: list[object] = []
    event = SimpleNamespace(progress=SimpleNamespace(sources=[SimpleNamespace(endOffset=offset)]))
    GroupListener(lambda *what: received.append(what)).onQueryProgress(event)  # type: ignore[arg-type]  # the part that it uses
    assert received == []


# --- errors ---------------------------------------------------------------------------------------------------------


def message_of(action: Callable[[], object]) -> str:
    """The text of the error when ``action`` fails."""
    with pytest.raises(Exception, match=r"\S") as failure:
        action()
    return str(failure.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"startingOffset": "latest"}, "unknown option 'startingoffset'; did you mean 'startingOffsets'"),
        ({"kafka.fetch.min.bytes": "many"}, 'Invalid value for configuration property "fetch.min.bytes"'),
    ],
)
def test_a_wrong_option_is_refused_by_load(change: dict[str, str], message: str, scene: Scene) -> None:
    one = scene.job(subscribe="t")
    one.options |= change
    text = message_of(one.load)
    assert "OptionError" in text
    assert message in text


def test_a_batch_read_is_refused_with_a_remedy(scene: Scene) -> None:
    options = scene.job(subscribe=scene.topic()).options
    text = message_of(lambda: scene.spark.read.format("kafka-group").options(**options).load().collect())
    assert "use spark.readStream. To read up to the current end, use trigger(availableNow=True)" in text


@pytest.mark.proves("G9", level="spark")
def test_G9_credentials_are_not_in_the_plan_the_progress_or_the_checkpoint(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    name = scene.topic()
    scene.produce(name, ["in"])
    options = options_of(scene.broker.sasl_bootstrap_servers, scene.group, subscribe=name) | sasl(SASL_PASSWORD)
    one = Job(scene.spark, options, scene.folder / "c")
    frame = one.load()
    frame.explain(extended=True)
    query = one.start_frame(frame, availableNow=True)
    assert query.awaitTermination(END_S)
    assert one.values == ["in"]
    query.explain(extended=True)
    plans = capsys.readouterr().out
    assert "kafka-group" in plans
    shown = [plans, *(p.json for p in query.recentProgress)]
    shown += [path.read_text(errors="replace") for path in one.checkpoint.rglob("*") if path.is_file()]
    assert not [text for text in shown if SASL_PASSWORD in text]


def test_records_that_tasks_skip_are_counted_once(scene: Scene) -> None:
    name = scene.topic()
    scene.produce(name, numbered(0, 9))
    found: list[list[str]] = []

    def lose_and_read(frame: "DataFrame", number: int) -> None:
        """Delete records after the plan, then read the batch twice."""
        scene.delete_before(name, 0, 4)
        found.extend([row.value.decode() for row in frame.select("value").collect()] for _ in range(2))
        assert await_until(lost, what="the report of the tasks") == 4

    def lost() -> int:
        (run,) = run_files.read(scene.group)
        return int(run["records_lost"])

    scene.job(subscribe=name, failOnDataLoss=False).run_into(lose_and_read, availableNow=True)
    assert found == [texts(4, 9)] * 2
