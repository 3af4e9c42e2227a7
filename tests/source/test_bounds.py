"""G8, G2: runs that end by themselves have bounds and say what is missing; two streams of one query are refused."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import Offsets, Produce, TopicFactory, await_until
from delta_files import living_rows
from rebalance.foreign import Foreign
from streams import PROTOCOLS, Engine, JobFactory, job_factory, numbered, options_of, texts, values_of

from spark_group_source import DeltaSink
from spark_group_source.driver import coordinator
from spark_group_source.errors import RebalanceTimeout
from spark_group_source.host import runs
from spark_group_source.local.broker import Broker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Committed = Callable[[str], Offsets]
BUDGET_MS = 4000
SELF_JOIN_S_MAX = 45
"""From the start of the query: what Spark needs to start two readers on a machine that is busy, and two looks."""


@pytest.fixture
def job(spark: "SparkSession", broker: Broker, group_id: str, tmp_path: Path) -> JobFactory:
    return job_factory(spark, broker.bootstrap_servers, group_id, tmp_path)


def test_G8_an_available_now_run_whose_group_does_not_come_to_rest_ends_within_its_budget(
    broker: Broker,
    topic: TopicFactory,
    produce: Produce,
    group_id: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another member is asked for a partition and does not give it back (KIP-848): more may be on its way to us."""
    name = topic(4)
    produce(name, numbered(0, 3, 4))
    rules_of = coordinator.rules_of
    monkeypatch.setattr(coordinator, "rules_of", lambda given: replace(rules_of(given), joining_budget_ms=BUDGET_MS))
    monkeypatch.setattr("spark_group_source.group.steps.SETTLE_MS_MAX", 500)  # the first batch goes without its share
    given = options_of(broker.bootstrap_servers, group_id, protocol="consumer", subscribe=name)
    with Foreign(broker.bootstrap_servers, group_id, [name], tmp_path / "other", strategy="consumer") as other:
        other.await_partitions(4)
        await_until(lambda: len(other.processed()) == 4, what="all records at the other member")
        with Engine(given) as engine:
            engine.coordinator.prepare_available_now()
            other.do("stall")
            with pytest.raises(RebalanceTimeout, match="come to rest") as found:
                await_until(lambda: engine.step() is None, what="an end")
        assert group_id in str(found.value) and "spark-group describe" in str(found.value)
        waited_ms: Any = found.value.fields["waited_ms"]
        assert BUDGET_MS <= waited_ms < BUDGET_MS + 10_000


@pytest.mark.spark
def test_G2_once_with_a_sink_that_says_what_is_durable_leaves_nothing_uncommitted(
    job: JobFactory,
    topic: TopicFactory,
    produce: Produce,
    committed: Committed,
    end_offsets: Committed,
    group_id: str,
    tmp_path: Path,
) -> None:
    name = topic(2)
    one, table = job(subscribe=name), tmp_path / "table"
    for n in range(2):
        produce(name, numbered(10 * n, 10 * n + 9, 2))
        writer = one.load().writeStream.foreachBatch(DeltaSink(table)).trigger(once=True)
        query = writer.option("checkpointLocation", str(one.checkpoint)).start()
        try:
            assert query.awaitTermination(60)
        finally:
            query.stop()
        await_until(lambda: not runs.read(group_id), what="the end of the run")
        assert committed(group_id) == end_offsets(name)
    assert sorted(row["value"].decode() for row in living_rows(table, ["value"])) == texts(0, 19)


def test_G2_once_with_another_sink_says_that_kafka_does_not_have_its_last_offsets(
    broker: Broker,
    topic: TopicFactory,
    produce: Produce,
    committed: Committed,
    end_offsets: Committed,
    group_id: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = topic()
    produce(name, numbered(0, 4))
    given = options_of(broker.bootstrap_servers, group_id, subscribe=name)
    with Engine(given) as once:
        end = once.coordinator.latest(once.start, unlimited=True)
        once.rows += once.read(end)
        once.log.append(end.to_json())
    assert "Kafka learns of its offsets at the next start" in caplog.text
    assert values_of(once.rows) == texts(0, 4)
    with Engine(given, once.log) as again:  # and so it is
        assert again.step() is None
        await_until(lambda: committed(group_id) == end_offsets(name), what="the offsets of the run before")


@pytest.mark.spark
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_G8_two_loads_of_one_group_in_one_query_are_refused_with_the_way_out(
    protocol: str, job: JobFactory, topic: TopicFactory, produce: Produce, group_id: str
) -> None:
    """Spark makes two streams of them: each holds its partitions for a batch that waits for the other's."""
    name = topic(2)
    produce(name, numbered(0, 3, 2))
    one = job(protocol, subscribe=name)
    joined = one.load().alias("l").join(one.load().alias("r"), on="value")
    began_s = time.monotonic()
    query = one.start_frame(joined.selectExpr("l.topic", "l.partition", "l.offset", "value"))
    try:
        failure = await_until(query.exception, SELF_JOIN_S_MAX, what="the refusal")
    finally:
        query.stop()
    print(f"{protocol}: refused after {time.monotonic() - began_s:.1f} s")  # noqa: T201 - pytest -s
    assert "OptionError" in str(failure)
    assert f"this query reads group '{group_id}' by two loads" in str(failure)
    assert "Give each side a load() with a group of its own" in str(failure)
