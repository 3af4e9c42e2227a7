"""The metrics of a query and of an exporter, and the dashboard and alerts in ``conf/`` that use them."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from kafka_helpers import ADMIN_S, await_until
from metrics.scrapes import Scrape, scrape, value, values
from scenes import Scene
from streams import numbered

from spark_group_source import DeltaSink, source
from spark_group_source.errors import OptionError
from spark_group_source.host import run_files
from spark_group_source.metrics import groups, run
from spark_group_source.metrics.endpoint import Endpoint, MetricsCollector
from spark_group_source.metrics.groups import Exporter, GroupSweeper, LedgerSnapshot
from spark_group_source.model import TopicPartition
from spark_group_source.options.table import Options

CONF = Path(__file__).resolve().parents[2] / "conf"
METRIC = re.compile(r"\b(kafka_group_\w+)(?:\{([^}]*)\})?")
BY = re.compile(r"\bby \(([^)]*)\)")
GROUPED_BY = re.compile(r"label_values\((\w+), (\w+)\)")


def strings(of: Any) -> Iterator[str]:
    """Every expression of a dashboard."""
    if isinstance(of, Mapping):
        yield from (value for key, value in of.items() if key in ("expr", "query") and isinstance(value, str))
        for inner in of.values():
            yield from strings(inner)
    elif isinstance(of, list):
        for inner in of:
            yield from strings(inner)


def expressions() -> list[str]:
    rules = yaml.safe_load((CONF / "alerts.yml").read_text())
    dashboard = json.loads((CONF / "grafana-dashboard.json").read_text())
    of_rules = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    return [*of_rules, *(text for text in strings(dashboard) if "kafka_group" in text)]


def unresolved(expression: str, labels: Mapping[str, set[str]]) -> set[str]:
    """Metrics and labels of an expression that no sample has."""
    found = METRIC.findall(expression)
    assert found, expression
    missing = {name for name, _ in found} - labels.keys()
    for name, selector in found:
        used = set(re.findall(r"(\w+)\s*=", selector))
        used |= {label.strip() for by in BY.findall(expression) for label in by.split(",")}
        used |= {label for metric, label in GROUPED_BY.findall(expression) if metric == name}
        missing |= used - labels.get(name, set())
    return missing


@pytest.mark.spark
def test_a_query_and_an_exporter_serve_every_metric_of_the_dashboard_and_the_alerts(scene: Scene) -> None:
    topic = scene.topic(3)
    scene.produce(topic, numbered(0, 9, 3))
    one = scene.job(subscribe=topic, metricsPort=0, metricsHost="127.0.0.1")
    sweeps = GroupSweeper(
        {"bootstrap.servers": scene.servers}, (scene.group,), isolation_level="read_committed", bound_s=ADMIN_S
    )
    at = {TopicPartition(topic, 0): 10**6}
    ledger = LedgerSnapshot(group=scene.group, table="t", offsets=at, expires_ms=0, retention_ms=0, is_unsettled=False)
    exporter = Exporter(sweeps, interval_s=15, host="127.0.0.1", port=0, read_ledgers=lambda: (ledger,))
    with ExitStack() as stack:
        query = one.start_into(DeltaSink(scene.folder / "table"))
        stack.callback(query.stop)
        query.processAllAvailable()
        await_until(lambda: scene.committed() == scene.end_offsets(topic), what="the offset commit")
        (port,) = [doc["metrics_port"] for doc in run_files.read(scene.group)]

        def at_rest() -> Scrape:
            of = scrape(port)
            durable = value(of, "kafka_group_source_durable_batch", group=scene.group) >= 0
            return of if durable and value(of, "kafka_group_source_uncommitted_partitions") == 0 else {}

        inside = await_until(at_rest, what="a scrape of a run that committed")
        exporter.sweep()
        outside = scrape(exporter.port)
    exporter.close()

    labels: dict[str, set[str]] = {}
    for sample in (*inside, *outside):
        labels.setdefault(sample.name, set()).update(name for name, _ in sample.labels)
    served = {name for name in labels if name.startswith("kafka_")}
    assert served == {m.name for m in run.METRICS} | {m.name for m in groups.METRICS}
    assert {text: unresolved(text, labels) for text in expressions() if unresolved(text, labels)} == {}

    assert value(inside, "kafka_group_source_durable_batch", group=scene.group) >= 0
    assert value(inside, "kafka_group_source_commits_total") >= 1
    assert value(inside, "kafka_group_source_table_rows_total", table=str(scene.folder / "table")) == 10
    assert value(inside, "kafka_group_source_ledger_gap_offsets") == 0
    assert value(outside, "kafka_group_members", group=scene.group) == 1
    assert values(outside, "kafka_group_lag_seconds", topic=topic) == [0, 0, 0]
    committed = {p: value(outside, "kafka_group_committed_offset", topic=topic, partition=str(p)) for p in range(3)}
    assert committed == {tp.partition: offset for tp, offset in scene.committed().items()}
    await_until(
        lambda: not run_files.read(scene.group), what="the end of the run's process"
    )  # stop() returns before it
    for closed in (port, exporter.port):
        with pytest.raises(OSError):
            scrape(closed)


def test_an_unknown_metric_or_label_of_the_dashboard_is_detected() -> None:
    there = {"kafka_group_lag_seconds": {"group", "topic"}}
    assert unresolved('max by (group, host) (kafka_group_lag_seconds{job="a"})', there) == {"host", "job"}
    assert unresolved("kafka_group_lag_minutes > 3", there) == {"kafka_group_lag_minutes"}
    assert unresolved("label_values(kafka_group_lag_seconds, cluster)", there) == {"cluster"}


def test_a_query_whose_metrics_port_is_in_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "METRICS_WAIT_S", 0.1)
    taken = Endpoint(MetricsCollector((), tuple, now_ms=int), host="127.0.0.1", port=0, option="--port")
    given = {"kafka.bootstrap.servers": "b:1", "kafka.group.id": "g", "subscribe": "t"}
    options = Options.parse({**given, "metricsPort": str(taken.port), "metricsHost": "127.0.0.1"})
    with pytest.raises(OptionError, match=f"metricsPort is {taken.port}.*another process uses it"):
        source._start_metrics(options, run_files.Publisher("g"))
    taken.stop()
