"""The metrics of a run and of groups: names, units, and omitted values."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from metrics.scrapes import ALERTS, Scrape, fires, firing, parsed, value, values
from spark_group_source.kafka.translation import GroupMember
from spark_group_source.metrics import groups, run
from spark_group_source.metrics.endpoint import Metric, MetricsCollector
from spark_group_source.metrics.groups import Exporter, GroupSnapshot, LedgerSnapshot, PartitionSnapshot, SweepResult
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.states import RunState
from spark_group_source.protocol.statistics import Statistics

NOW_MS = 1_000_000
RUN = Statistics(
    group="etl",
    stream="s1",
    seq=7,
    state="reading",
    generation=3,
    slots=("assigned", "revoking"),
    assigned=(2, 1),
    agents=("agent-1", ""),
    buffered_bytes=(2048, 0),
    buffered_rows=(20, 0),
    rows_from_memory=(11, 0),
    rows_from_brokers=(5, 6),
    slot_recalls=(1, 0),
    missing_topics=("payments",),
    unreachable_since_ms=NOW_MS - 90_000,
    uncommitted_partitions=2,
    uncommitted_offsets=120,
    rebalances=4,
    rebalanced_at_ms=NOW_MS - 30_000,
    reason="",
    holds=3,
    hold_last_ms=250,
    hold_max_ms=1500,
    hold_overruns=1,
    partitions_lost=2,
    possible_duplicates=40,
    records_lost=9,
    commits=8,
    commits_failed=1,
    commit_delay_last_ms=12,
    commit_delay_max_ms=130,
    offsets_renewed=5,
    offsets_restored=6,
    tables={"/lake/a": {"inserted": 90, "updated": 8, "deleted": 2, "bad": 4}, "/lake/b": {"inserted": 10, "bad": 1}},
)
TP = TopicPartition("orders", 0)


def scrape_of(collector: Collector) -> Scrape:
    registry = CollectorRegistry()
    registry.register(collector)
    return parsed(generate_latest(registry).decode())


def of_run(statistics: Statistics | None) -> Scrape:
    return scrape_of(MetricsCollector(run.METRICS, lambda: statistics, now_ms=lambda: NOW_MS))


def of_groups(*seen: GroupSnapshot, silent_ms: int | None = None) -> Scrape:
    whole = SweepResult(groups=seen, unreachable_since_ms=silent_ms, took_s=0.5, ended_s=1.0, records_read=3)
    return scrape_of(MetricsCollector(groups.METRICS, lambda: whole, now_ms=lambda: NOW_MS))


def test_names_and_units_follow_the_conventions_of_prometheus() -> None:
    every: list[Metric[Any]] = [*run.METRICS, *groups.METRICS]
    for metric in every:
        assert re.fullmatch(r"kafka_group_[a-z_]+", metric.name)
        assert not re.search(r"_(ms|millis|kb|mb|minutes)(_|$)", metric.name), "base units: seconds and bytes"
        assert metric.doc.endswith("."), metric.name


def test_metric_names_are_unique_and_prefixed() -> None:
    ofs = [m.name for m in run.METRICS] + [m.name for m in groups.METRICS]
    assert len(set(ofs)) == len(ofs)
    assert all(metric.name.startswith(run.PREFIX) for metric in run.METRICS)
    assert not any(metric.name.startswith(run.PREFIX) for metric in groups.METRICS)


def test_a_run_exports_its_statistics_in_base_units() -> None:
    at = of_run(RUN)
    of = {
        name.removeprefix(run.PREFIX): value(at, name) for name in (m.name for m in run.METRICS if m.labels == run.RUN)
    }
    assert of | {"last_rebalance_timestamp_seconds": 0} == {
        "durable_batch": 7,
        "generation": 3,
        "placed_slots": 1,
        "moves_total": 0,
        "missing_topics": 1,
        "unreachable_seconds": 90,
        "rebalances_total": 4,
        "last_rebalance_timestamp_seconds": 0,
        "holds_total": 3,
        "hold_last_seconds": 0.25,
        "hold_max_seconds": 1.5,
        "hold_overruns_total": 1,
        "partitions_lost_total": 2,
        "possible_duplicates_total": 40,
        "records_lost_total": 9,
        "commits_total": 8,
        "commits_failed_total": 1,
        "commit_delay_last_seconds": 0.012,
        "commit_delay_max_seconds": 0.13,
        "uncommitted_partitions": 2,
        "ledger_gap_offsets": 120,
        "offsets_renewed_total": 5,
        "offsets_restored_total": 6,
    }
    assert values(at, "kafka_group_source_rows_read_total", slot="0", source="memory") == [11]
    assert values(at, "kafka_group_source_rows_read_total", slot="1", source="brokers") == [6]
    assert [values(at, "kafka_group_source_assigned_partitions", slot=slot) for slot in "01"] == [[2], [1]]
    states = {state.value: value(at, "kafka_group_source_state", state=state.value) for state in RunState}
    assert {state for state, is_it in states.items() if is_it} == {"reading"}
    assert value(at, "kafka_group_source_slots", state="revoking") == 1
    kinds = ("table_rows", "table_updated_rows", "table_deleted_rows", "table_bad_records")
    of_tables = [[value(at, f"kafka_group_source_{kind}_total", table=f"/lake/{t}") for kind in kinds] for t in "ab"]
    assert of_tables == [[100, 8, 2, 4], [10, 0, 0, 1]]


def test_the_alert_on_bad_records_compares_their_share_of_each_table() -> None:
    before, alert = of_run(RUN), ALERTS["KafkaGroupSourceBadRecords"]

    def after(inserted: int, bad: int) -> Scrape:
        return of_run(replace(RUN, tables={**RUN.tables, "/lake/b": {"inserted": 10 + inserted, "bad": 1 + bad}}))

    assert not fires(alert, after(1000, 50), before)
    assert fires(alert, after(1000, 51), before)
    assert fires(alert, after(0, 9), {}), "the first scrape is after the first batch"
    assert not fires(alert, after(1000, 9), {})


def test_the_alert_on_lost_records_fires_if_the_first_scrape_is_after_the_loss() -> None:
    alert = ALERTS["KafkaGroupSourceLostRecords"]
    lost, none = of_run(replace(RUN, records_lost=5)), of_run(replace(RUN, records_lost=0))
    assert fires(alert, lost, {}) and fires(alert, lost, none)
    assert not (fires(alert, none, {}) or fires(alert, lost, lost))


def test_a_reachable_run_exports_zero_unreachable_seconds_and_an_unpublished_run_nothing() -> None:
    assert value(of_run(replace(RUN, unreachable_since_ms=0)), "kafka_group_source_unreachable_seconds") == 0
    assert of_run(None) == {}


def test_a_partition_of_unknown_age_exports_no_age() -> None:
    ages = {0: 12.5, 1: None, 2: 0.0}
    partitions = {
        TopicPartition("orders", p): PartitionSnapshot(committed=3, end=8 if p < 2 else 3, age_s=age)
        for p, age in ages.items()
    }
    member = GroupMember("m-1", "app", "", "/10.0.0.1", (TP,))
    at = of_groups(GroupSnapshot(group="etl", state="stable", members=(member,), partitions=partitions, rebalances=2))
    found = {p: values(at, "kafka_group_lag_seconds", group="etl", topic="orders", partition=str(p)) for p in ages}
    assert found == {0: [12.5], 1: [], 2: [0.0]}
    assert value(at, "kafka_group_lag_unknown_partitions") == 1
    assert value(at, "kafka_group_lag_records", partition="1") == 5
    assert value(at, "kafka_group_member_partitions", member="m-1", client="app", host="/10.0.0.1") == 1
    assert value(at, "kafka_group_state", state="stable") == 1
    assert value(at, "kafka_group_up") == 1


def test_a_group_that_did_not_answer_exports_only_that() -> None:
    at = of_groups(GroupSnapshot(group="etl", unreachable_since_ms=NOW_MS - 61_000, rebalances=2), silent_ms=NOW_MS)
    mine = {sample.name: found for sample, found in at.items() if ("group", "etl") in sample.labels}
    assert mine == {
        "kafka_group_up": 0,
        "kafka_group_unreachable_seconds": 61,
        "kafka_group_rebalances_seen_total": 2,
    }


def test_an_alert_fires_before_any_group_has_been_listed() -> None:
    """`--all-groups`, started while no broker answers."""
    assert firing(of_groups(silent_ms=NOW_MS - 61_000)) == {"KafkaUnreachable"}


def test_ledgers_are_read_before_the_offsets_of_kafka() -> None:
    """A batch that is committed in between would look as if Kafka were behind."""
    order: list[str] = []
    empty = SweepResult(groups=(), unreachable_since_ms=None, took_s=0, ended_s=0, records_read=0)

    def sweep() -> SweepResult:
        order.append("Kafka")
        return empty

    def read_ledgers() -> tuple[LedgerSnapshot, ...]:
        order.append("ledgers")
        return ()

    sweeps: Any = SimpleNamespace(sweep=sweep, close=lambda: None)
    exporter = Exporter(sweeps, interval_s=15, host="127.0.0.1", port=0, read_ledgers=read_ledgers)
    try:
        exporter.sweep()
    finally:
        exporter.close()
    assert order == ["ledgers", "Kafka"]
