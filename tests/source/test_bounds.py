"""G8, G2: runs that end by themselves have bounds and say what is missing; two streams of one query are refused."""

from dataclasses import replace
from typing import Any

import pytest
from conftest import await_until
from delta_files import living_rows
from kafka_words import await_progress
from rebalance.ordinary import OrdinaryConsumer
from scenes import Scene
from streams import Engine, numbered, texts, values_of

from spark_group_source import DeltaSink
from spark_group_source.driver import coordinator
from spark_group_source.driver.coordinator import rules_of
from spark_group_source.errors import RebalanceTimeout
from spark_group_source.host import runs

BUDGET_MS = 4000


@pytest.mark.proves("G8", level="kafka")
def test_G8_an_available_now_run_whose_group_does_not_come_to_rest_ends_within_its_budget(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another member is asked for a partition and does not give it back (KIP-848): more may be on its way to us."""
    name = scene.topic(4)
    scene.produce(name, numbered(0, 3, 4))
    monkeypatch.setattr(coordinator, "rules_of", lambda given: replace(rules_of(given), joining_budget_ms=BUDGET_MS))
    monkeypatch.setattr("spark_group_source.group.machine.SETTLE_MS_MAX", 500)  # the first batch goes without its share
    given = scene.options("consumer", subscribe=name)
    with OrdinaryConsumer(scene.servers, scene.group, [name], scene.folder / "other", strategy="consumer") as other:
        other.await_partitions(4)
        await_until(lambda: len(other.processed()) == 4, what="all records at the other member")
        with Engine(given) as engine:
            engine.coordinator.prepare_available_now()
            other.do("stall")
            with pytest.raises(RebalanceTimeout, match="come to rest") as found:
                await_until(lambda: engine.step() is None, what="an end")
        assert scene.group in str(found.value) and "spark-group describe" in str(found.value)
        waited_ms: Any = found.value.fields["waited_ms"]
        assert waited_ms >= BUDGET_MS


@pytest.mark.proves("G2", level="spark")
@pytest.mark.spark
def test_G2_once_with_a_sink_that_says_what_is_durable_leaves_nothing_uncommitted(scene: Scene) -> None:
    name = scene.topic(2)
    one, table = scene.job(subscribe=name), scene.folder / "table"
    for n in range(2):
        scene.produce(name, numbered(10 * n, 10 * n + 9, 2))
        one.run_into(DeltaSink(table), once=True)
        await_until(lambda: not runs.read(scene.group), what="the end of the run")
        assert scene.committed() == scene.end_offsets(name)
    assert sorted(row["value"].decode() for row in living_rows(table, ["value"])) == texts(0, 19)


@pytest.mark.proves("G2", level="kafka")
def test_G2_once_with_another_sink_says_that_kafka_does_not_have_its_last_offsets(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    name = scene.topic()
    scene.produce(name, numbered(0, 4))
    given = scene.options(subscribe=name)
    with Engine(given) as once:
        end = once.coordinator.latest(once.start, unlimited=True)
        once.rows += once.read(end)
        once.log.append(end.to_json())
    assert "Kafka learns of its offsets at the next start" in caplog.text
    assert values_of(once.rows) == texts(0, 4)
    with Engine(given, once.log) as again:  # and so it is
        assert again.step() is None
        await_until(lambda: scene.committed() == scene.end_offsets(name), what="the offsets of the run before")


@pytest.mark.proves("G8", level="spark")
@pytest.mark.spark
def test_G8_two_streams_of_one_load_are_refused_with_the_way_out(scene: Scene) -> None:
    """Spark makes two streams of it: each would hold its partitions for a batch that waits for the other's."""
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
    assert "Each stream needs its own load()" in str(failure)


@pytest.mark.spark
def test_a_frame_is_read_again_when_its_query_has_ended(scene: Scene) -> None:
    """The same load() has the same name: its former stream is waited for, if it still ends."""
    name = scene.topic()
    one = scene.job("classic", subscribe=name)
    frame = one.load()
    for first in (0, 4):
        scene.produce(name, numbered(first, first + 3))
        query = one.start_frame(frame)
        await_until(lambda query=query: query.lastProgress or query.exception(), what="a batch")  # type: ignore[misc]
        assert query.exception() is None
        query.stop()
