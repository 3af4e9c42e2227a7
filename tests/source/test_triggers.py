"""What a batch takes: limits, the kinds of trigger, several scans of one source, transactions, and Spark's progress."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer
from conftest import ADMIN_S, await_until
from kafka_words import await_markers
from scenes import Scene
from streams import (
    PROTOCOLS,
    Engine,
    Outsider,
    numbered,
    planned,
    readers_below,
    texts,
    values_of,
)

from spark_group_source import GroupListener, Statistics
from spark_group_source.group.offsets import parse
from spark_group_source.kafka import Runtime
from spark_group_source.model import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

pytestmark = pytest.mark.spark


# --- limits ---------------------------------------------------------------------------------------------------------


def test_B17_the_turn_of_the_offset_that_is_left_over_goes_on_after_a_restart(scene: Scene) -> None:
    name = scene.topic(2)
    scene.produce(name, numbered(0, 17, 2))
    options = scene.options(subscribe=name, maxOffsetsPerTrigger=3)
    log: list[str] = []
    for _ in range(3):
        with Engine(options, log) as engine:
            engine.step()
            log = engine.log
    assert [[r.size for r in parse(line).batch()] for line in log] == [[2, 1], [1, 2], [2, 1]]


def test_B17_the_limit_is_shared_fairly_and_goes_on_after_a_restart(scene: Scene) -> None:
    name = scene.topic(3)
    for p, count in enumerate((101, 11, 1)):
        scene.produce(name, [f"{p}@{n}" for n in range(count)], partition=p)
    options = scene.options(subscribe=name, maxOffsetsPerTrigger=10)
    with Engine(options) as first:
        first.step()
        first.step()
    with Engine(options, first.log) as second:
        second.run()
    sizes = [{r.tp.partition: r.size for r in parse(line).batch()} for line in second.log]
    # Partition 2 has only one: 9 for the others, 5 and 4. Later partition 1 has only two left.
    assert sizes[:3] == [{0: 5, 1: 4, 2: 1}, {0: 5, 1: 5}, {0: 8, 1: 2}]
    assert [sum(size.values()) for size in sizes] == [10] * 11 + [3]
    assert len(first.rows) + len(second.rows) == 113
    assert len({(row.partition, row.offset) for row in first.rows + second.rows}) == 113


class LaterRuntime(Runtime):
    """The real one, at a later hour when the test says so."""

    later_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.later_ms


def test_B19_small_additions_wait_for_the_minimum_or_the_delay_but_not_the_first_batch(scene: Scene) -> None:
    name = scene.topic()
    runtime = LaterRuntime()
    options = scene.options(subscribe=name, minOffsetsPerTrigger=15, maxTriggerDelay="1h")
    scene.produce(name, numbered(0, 2))
    with Engine(options, runtime=runtime) as engine:
        engine.step()
        assert values_of(engine.rows) == texts(0, 2)
        scene.produce(name, numbered(3, 7))
        assert engine.step() is None
        scene.produce(name, numbered(8, 17))  # 15 in all
        engine.step()
        assert values_of(engine.rows) == texts(0, 17)
        scene.produce(name, numbered(18, 18))
        assert engine.step() is None
        runtime.later_ms = 3_600_000
        engine.step()
        assert values_of(engine.rows) == texts(0, 18)


def test_B19_an_available_now_run_does_not_wait_for_the_minimum(scene: Scene) -> None:
    name = scene.topic()
    one = scene.job(subscribe=name, minOffsetsPerTrigger=15, maxTriggerDelay="1h")
    scene.produce(name, numbered(0, 15))
    one.run()
    scene.produce(name, numbered(16, 17))
    assert values_of(one.run()) == texts(16, 17)


def test_B20_once_takes_all_there_is_whatever_the_limit(scene: Scene) -> None:
    name = scene.topic(2)
    scene.produce(name, numbered(0, 9, 2))
    one = scene.job(subscribe=name, maxOffsetsPerTrigger=2, minOffsetsPerTrigger=2)
    with one.running(once=True) as query:
        assert query.awaitTermination(60)
    assert [(number, values_of(rows)) for number, rows in one.batches] == [(0, texts(0, 9))]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_B21_available_now_reads_what_was_there_in_bounded_batches_and_stops(protocol: str, scene: Scene) -> None:
    name = scene.topic(3)
    scene.produce(name, numbered(0, 14, 3))
    one = scene.job(protocol, subscribe=name, maxOffsetsPerTrigger=5, groupMembers=2)

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


def test_B22_a_partition_added_between_the_batches_of_an_available_now_run_is_the_next_runs(scene: Scene) -> None:
    name = scene.topic(2)
    scene.produce(name, numbered(0, 9, 2))
    one = scene.job(subscribe=name, maxOffsetsPerTrigger=4)

    def grow(number: int) -> None:
        if number == 0:
            scene.grow(name, 3)
            scene.produce(name, ["new"], partition=2)

    one.on_batch = grow
    one.run()
    assert one.values == texts(0, 9)
    one.on_batch = lambda number: None
    assert values_of(one.run()) == ["new"]


@pytest.mark.parametrize(
    "option", [{"minPartitions": 4}, {"maxRecordsPerPartition": 2}], ids=lambda option: next(iter(option))
)
def test_B25_one_partition_is_read_by_several_tasks_when_asked_for(option: dict[str, Any], scene: Scene) -> None:
    name = scene.topic()
    scene.produce(name, numbered(0, 7))
    one = scene.job(subscribe=name, **option)
    tasks: list[int] = []

    def keep(frame: "DataFrame", number: int) -> None:
        found = frame.selectExpr("spark_partition_id() task", "offset").collect()
        tasks.extend(row.task for row in sorted(found, key=lambda row: row.offset))

    one.run_into(keep, availableNow=True)
    assert len(tasks) == 8
    assert len(set(tasks)) == 4
    assert all(tasks[n] == tasks[n + 1] for n in (0, 2, 4, 6))


# --- one source several times, several sources ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["join", "union"])
def test_B24_G1_a_query_that_scans_its_source_twice_has_one_reader_and_each_scan_sees_every_row(
    kind: str, scene: Scene
) -> None:
    name = scene.topic(2)
    scene.produce(name, numbered(0, 9, 2))
    one = scene.job(subscribe=name)
    # Aliases, because Spark makes a second source of a frame that is joined with itself as it was loaded.
    frame = one.load().selectExpr("topic t", "partition p", "offset o", "value v")
    twice = frame.union(frame) if kind == "union" else frame.alias("l").join(frame.alias("r"), on="v")
    side = "" if kind == "union" else "l."
    columns = [f"{side}{short} {column}" for short, column in (("t", "topic"), ("p", "partition"), ("o", "offset"))]
    query = one.start_frame(twice.selectExpr(*columns, "v value"))
    try:
        query.processAllAvailable()
        scene.produce(name, numbered(10, 13, 2))
        query.processAllAvailable()
        assert len(readers_below()) == 1
    finally:
        query.stop()
    assert one.values == sorted(texts(0, 13) * (2 if kind == "union" else 1))
    assert len(set(_lines(one.checkpoint))) == 1  # a line for each scan, all the same


def test_B23_a_union_of_two_groups_goes_on_with_one_side_when_the_other_is_drained(scene: Scene) -> None:
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
    """The sources' lines of the newest entry of ``offsets``."""
    last = max((checkpoint / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    return last.read_text().splitlines()[2:]


# --- transactions ---------------------------------------------------------------------------------------------------


def in_transactions(scene: Scene, name: str, ends: str) -> None:
    """Five records in each of several transactions; ``ends`` says how each ends: c(ommit), a(bort)."""
    producer = Producer({"bootstrap.servers": scene.servers, "transactional.id": name, "log_level": 3})
    producer.init_transactions(ADMIN_S)
    for number, end in enumerate(ends):
        producer.begin_transaction()
        for n in range(5):
            producer.produce(name, f"{end}{number}-{n}".encode(), partition=0)
        if end == "c":
            producer.commit_transaction(ADMIN_S)
        else:
            producer.flush(ADMIN_S)
            producer.abort_transaction(ADMIN_S)
    await_markers(scene.admin, name)


@pytest.mark.parametrize("limit", [None, 3])
def test_B26_B27_B52_only_committed_records_come_by_default_and_the_group_stands_behind_the_markers(
    limit: int | None, scene: Scene
) -> None:
    name = scene.topic()
    in_transactions(scene, name, "cac")
    limits: dict[str, Any] = {} if limit is None else {"maxOffsetsPerTrigger": limit}
    one = scene.job(subscribe=name, **limits)
    one.run()
    assert one.values == [f"c{t}-{n}" for t in (0, 2) for n in range(5)]
    assert scene.committed() == scene.end_offsets(name) == {TopicPartition(name, 0): 18}
    if limit:  # batches that hold nothing but an aborted part or a marker end too
        assert [sum(r.size for r in o.batch()) for o in planned(one.checkpoint).values()] == [3] * 6
        assert [] in [rows for _, rows in one.batches]


def test_B27_uncommitted_records_come_only_when_asked_for(scene: Scene) -> None:
    name = scene.topic()
    in_transactions(scene, name, "ca")
    one = scene.job(subscribe=name, kafka__isolation__level="read_uncommitted")
    one.run()
    assert one.values == [f"{end}-{n}" for end in ("a1", "c0") for n in range(5)]


def test_B26_an_open_transaction_holds_the_end_of_the_batch_back(scene: Scene) -> None:
    name = scene.topic()
    scene.produce(name, ["before"])
    producer = Producer({"bootstrap.servers": scene.servers, "transactional.id": name, "log_level": 3})
    producer.init_transactions(ADMIN_S)
    producer.begin_transaction()
    producer.produce(name, b"open", partition=0)
    producer.flush(ADMIN_S)
    scene.produce(name, ["behind"])
    one = scene.job(subscribe=name)
    assert values_of(one.run()) == ["before"]
    producer.commit_transaction(ADMIN_S)
    await_markers(scene.admin, name)
    assert values_of(one.run()) == ["behind", "open"]


# --- what Spark shows -----------------------------------------------------------------------------------------------


def test_progress_shows_positions_and_how_far_the_topic_is_ahead(scene: Scene) -> None:
    name = scene.topic(2)
    scene.produce(name, numbered(0, 9, 2))
    one = scene.job(subscribe=name, maxOffsetsPerTrigger=4)
    query = one.start(availableNow=True)
    assert query.awaitTermination(60)
    with_rows = [p for p in (json.loads(p.json) for p in query.recentProgress) if p["numInputRows"]]
    assert [p["numInputRows"] for p in with_rows] == [4, 4, 2]
    source = with_rows[0]["sources"][0]
    assert parse(source["endOffset"]).positions() == {TopicPartition(name, 0): 2, TopicPartition(name, 1): 2}
    assert _object(source["latestOffset"]) == {name: {"0": 5, "1": 5}}


def _object(value: object) -> object:
    return json.loads(value) if isinstance(value, str) else value


def test_a_listener_gets_what_the_members_did_after_every_batch(scene: Scene) -> None:
    name = scene.topic(4)
    received: list[tuple[str, Statistics]] = []
    listener = GroupListener(lambda progress, statistics: received.append((str(progress.id), statistics)))

    def a_batch_shows(assigned: tuple[int, ...]) -> bool:
        scene.produce(name, numbered(0, 3, 4))
        return bool(received) and received[-1][1].assigned == assigned

    scene.spark.streams.addListener(listener)
    try:
        with scene.job(subscribe=name, groupMembers=2).running(processingTime="100 milliseconds") as query:
            await_until(lambda: a_batch_shows((2, 2)), what="both members' partitions")
            alone = received[-1][1]
            with Outsider(scene.servers, scene.group, [name]) as other:
                await_until(lambda: other.partitions and a_batch_shows((2, 1)), what="what is left to ours")
            first, last = received[0], received[-1][1]
            assert (first[0], last.group, last.slots) == (str(query.id), scene.group, ("assigned",) * 2)
            assert alone.reason.endswith("was given 2 partitions")
            assert last.rebalances > alone.rebalances and last.generation > alone.generation
            assert last.seq > alone.seq and last.commits > alone.commits
    finally:
        scene.spark.streams.removeListener(listener)


@pytest.mark.parametrize("offset", [None, "null", "17", "not JSON", '{"group":{"0":5}}', '{"group":"nobody"}'])
def test_a_listener_is_silent_about_other_sources(offset: str | None) -> None:
    received: list[object] = []
    event = SimpleNamespace(progress=SimpleNamespace(sources=[SimpleNamespace(endOffset=offset)]))
    GroupListener(lambda *what: received.append(what)).onQueryProgress(event)  # type: ignore[arg-type]  # as much as it uses
    assert received == []
