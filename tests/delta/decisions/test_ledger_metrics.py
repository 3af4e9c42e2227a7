"""Metrics of the ledgers of tables: ahead of Kafka, about to expire, a RESTORE that is not settled."""

import time
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from types import SimpleNamespace

import pytest
from deltalake import DeltaTable
from metrics.scrapes import ALERTS, Scrape, firing, parsed, value, values
from prometheus_client import CollectorRegistry, generate_latest
from sink_helpers import NewQuery, Query, cut_log, one
from sink_source import offset

from spark_group_source.cli.ledger import ledger_reader
from spark_group_source.delta.ledger_format import Ledger
from spark_group_source.delta.ledger_store import set_ledger
from spark_group_source.delta.table_history import LogFiles
from spark_group_source.delta.table_writer import open_existing
from spark_group_source.errors import OptionError
from spark_group_source.metrics import groups
from spark_group_source.metrics.endpoint import MetricsCollector
from spark_group_source.metrics.groups import METRICS, GroupSnapshot, LedgerSnapshot, PartitionSnapshot, SweepResult
from spark_group_source.model import TopicPartition

LedgerRead = Callable[[], tuple[LedgerSnapshot, ...]]

P0 = TopicPartition("orders", 0)
DAY_S = 86_400


def scrape_of(read: LedgerRead, committed: int | None) -> Scrape:
    group = GroupSnapshot(
        group="etl",
        unreachable_since_ms=5 if committed is None else None,
        rebalances=0,
        state="stable",
        members=(),
        partitions={P0: PartitionSnapshot(committed=committed or 0, end=50, age_s=0.0)},
    )
    seen = SweepResult(groups=(group,), unreachable_since_ms=None, took_s=0, ended_s=0, records_read=0, ledgers=read())
    registry = CollectorRegistry()
    registry.register(MetricsCollector(METRICS, lambda: seen, now_ms=lambda: 0))
    return parsed(generate_latest(registry).decode())


def alerts_of(read: LedgerRead, committed: int) -> set[str]:
    """The alerts of ledgers that fire."""
    return {name for name in firing(scrape_of(read, committed)) if "kafka_group_ledger" in ALERTS[name]}


def test_ledgers_of_tables_are_compared_with_kafka(query: Query, table: Path) -> None:
    """Their alerts fire until a commit or a reset clears them."""
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    read = ledger_reader([str(table)])
    found = scrape_of(read, 7)
    labels = {"group": "etl", "table": str(table)}
    assert value(found, "kafka_group_ledger_ahead_offsets", **labels) == 3
    assert 29 * DAY_S < value(found, "kafka_group_ledger_expires_seconds", **labels) <= 30 * DAY_S
    assert value(found, "kafka_group_ledger_unsettled", **labels) == 0
    assert alerts_of(read, 7) == {"KafkaGroupLedgerAhead"}
    query.run(query.sink(table), 1, offset(1, one(10, 20)))
    assert value(scrape_of(read, 20), "kafka_group_ledger_ahead_offsets") == 0
    assert alerts_of(read, 20) == set()
    assert values(scrape_of(read, None), "kafka_group_ledger_ahead_offsets") == [], "the group did not answer"

    DeltaTable(table).restore(1)
    assert value(scrape_of(read, 20), "kafka_group_ledger_unsettled") == 1
    assert alerts_of(read, 20) == {"KafkaGroupRestoreUnsettled"}
    set_ledger(query.spark, str(table), "etl", {P0: 10}, reason="reset", reset_number=1)
    found = scrape_of(read, 10)
    assert (value(found, "kafka_group_ledger_unsettled"), value(found, "kafka_group_ledger_ahead_offsets")) == (0, 0)
    assert alerts_of(read, 10) == set()
    DeltaTable(table).alter.set_table_properties({"delta.logRetentionDuration": "interval 2 hours"})
    assert value(scrape_of(read, 10), "kafka_group_ledger_expires_seconds") <= 7200


@pytest.mark.parametrize(("retention", "hours"), [("interval 30 days", 720), ("interval 2 hours", 2)])
def test_the_alert_of_an_expiring_ledger_fires_in_the_last_tenth_of_the_logs_retention(
    query: Query, table: Path, retention: str, hours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = {"delta.logRetentionDuration": retention}
    DeltaTable(table).alter.set_table_properties(properties, raise_if_not_exists=False)
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    read = ledger_reader([str(table)])

    def alerts_after(share: float) -> set[str]:
        now_s = time.time() + share * hours * 3600
        monkeypatch.setattr(groups, "time", SimpleNamespace(time=lambda: now_s))
        return alerts_of(read, 10)

    assert (alerts_after(0), alerts_after(0.85)) == (set(), set())
    assert alerts_after(0.95) == {"KafkaGroupLedgerExpires"}


def test_a_log_that_cannot_be_read_for_a_while_has_no_values(
    query: Query, table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The exporter continues: its other metrics are needed most while a file system has trouble."""
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    read = ledger_reader([str(table)])
    assert len(read()) == 1
    part = table / "_delta_log" / f"{DeltaTable(table).version() + 1:020}.json"
    part.write_text('{"commitInfo":{"opera')
    for _ in range(2):
        assert read() == ()
    part.unlink()
    assert len(read()) == 1
    log = table / "_delta_log"
    log.rename(table / "away")
    log.write_text("")
    assert read() == ()
    begins, ends = (sum(text in line for line in caplog.messages) for text in ("cannot be read; no metrics", "again"))
    assert (begins, ends) == (2, 1)


@pytest.mark.parametrize("is_seen", [True, False])
@pytest.mark.parametrize("batches", [1, 4], ids=["with fewer commits", "with more commits"])
def test_a_table_that_was_deleted_and_created_again_has_metrics_again(
    query: Query, table: Path, new_query: NewQuery, batches: int, is_seen: bool
) -> None:
    for n in range(3):
        query.run(query.sink(table), n, offset(n, one(10 * n, 10 * n + 10)))
    read = ledger_reader([str(table)])
    assert [found.offsets for found in read()] == [{P0: 30}]
    rmtree(table)
    assert not is_seen or read() == ()
    other = new_query("other")
    for n in range(batches):
        other.run(other.sink(table), n, offset(n, one(100 + n, 101 + n), stream="s2"))
    for _ in range(2):  # if it was deleted and created again between two reads, the first one notices
        found = read()
    assert [ledger.offsets for ledger in found] == [{P0: 100 + batches}]


def test_a_sweep_reads_new_commits_only(query: Query, table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a group whose next batch is refused. Replays of dead letters are no groups."""
    for n in range(3):
        query.run(query.sink(table), n, offset(n, one(n * 10, n * 10 + 10)))
    replayed(query, table)
    read, versions = ledger_reader([str(table)]), list[int]()
    assert [ledger.group for ledger in read()] == ["etl"]
    actions = LogFiles.actions

    def noted(self: LogFiles, version: int) -> bytes | None:
        versions.append(version)
        return actions(self, version)

    monkeypatch.setattr(LogFiles, "actions", noted)
    newest = DeltaTable(table).version()
    assert [ledger.is_unsettled for ledger in read()] == [False]
    query.run(query.sink(table), 3, offset(3, one(30, 40)))
    versions.clear()
    assert [ledger.is_unsettled for ledger in read()] == [False]
    assert {*versions} <= {newest, newest + 1}
    DeltaTable(table).restore(1)
    assert [ledger.is_unsettled for ledger in read()] == [True]
    versions.clear()
    assert [ledger.is_unsettled for ledger in read()] == [True]
    assert {*versions} == {newest + 2}


def test_ledgers_are_read_where_the_log_no_longer_has_a_replay_or_the_commits_before_them(
    query: Query, new_query: NewQuery, table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stopped = new_query("stopped")
    query.run(query.sink(table), 0, offset(0, one(0, 10)))
    replayed(query, table)
    stopped.run(stopped.sink(table), 0, offset(0, {("clicks", 0): (0, 5)}, group="old", stream="s2"))
    read = ledger_reader([str(table)])
    assert len(read()) == 2
    for n in range(1, 4):
        query.run(query.sink(table), n, offset(n, one(n * 10, n * 10 + 10)))
    assert len(read()) == 2
    cut_log(table, DeltaTable(table).version())
    query.run(query.sink(table), 4, offset(4, one(40, 50)))
    caplog.set_level("WARNING")
    caplog.clear()
    for _ in range(2):
        assert [ledger.group for ledger in read()] == ["etl", "old"]
    assert not [record for record in caplog.records if record.name.startswith("spark_group_source.delta")]


def replayed(query: Query, table: Path) -> None:
    """Commit to the table as a replay of dead letters does."""
    there = open_existing(query.spark, str(table))
    there.commit_ledger(there.history(), Ledger(group="replay.0a1b2c3d-0a1b-2c3d-4e5f-0a1b2c3d4e5f"))


def test_a_table_that_cannot_be_read_without_spark_is_refused(tmp_path: Path) -> None:
    for table in ("orders", str(tmp_path)):
        with pytest.raises(OptionError, match=f"--table {table}: there is no Delta table at a local path"):
            ledger_reader([table])
