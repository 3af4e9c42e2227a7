"""A scrape as Prometheus reads it, and the evaluation of alert expressions.

Runs in: tests. Deliberately absent: most of PromQL. The rules of ``conf/alerts.yml`` need three kinds only: a metric
compared with a number, with a share of another metric, and a counter's increase compared with a number.
"""

import operator
import re
import urllib.request
from pathlib import Path
from typing import NamedTuple

import yaml
from prometheus_client.parser import text_string_to_metric_families

SCRAPE_S = 120
OPERATORS = {">": operator.gt, "<": operator.lt, "==": operator.eq}
RULE = re.compile(r"(?:increase\()?(\w+)(?:\[\w+\]\))? ([<>]|==) ([\d.]+)(?: \* (?:increase\()?(\w+)(?:\[\w+\]\))?)?")
NEW_SERIES = re.compile(r"(increase.*) or \((.*) unless last_over_time\((\w+)\[15m\] offset 15m\)\)")
"""What a series gained, or what it began with: the first scrape may be after the first records."""
ALERTS: dict[str, str] = {
    rule["alert"]: rule["expr"]
    for group in yaml.safe_load((Path(__file__).parents[2] / "conf" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
}
"""The expressions of ``conf/alerts.yml`` by the alert's name."""

Labels = frozenset[tuple[str, str]]


class Sample(NamedTuple):
    name: str
    labels: Labels


Scrape = dict[Sample, float]


def parsed(text: str) -> Scrape:
    """Every sample, read by prometheus-client's own parser; each exists once."""
    found: Scrape = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = Sample(sample.name, frozenset(sample.labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


def scrape(port: int) -> Scrape:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SCRAPE_S) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return parsed(answer.read().decode())


def values(of: Scrape, name: str, **labels: str) -> list[float]:
    """The samples of a metric with these labels."""
    return [value for sample, value in of.items() if sample.name == name and sample.labels >= labels.items()]


def value(of: Scrape, name: str, **labels: str) -> float:
    (one,) = values(of, name, **labels)
    return one


def fires(expression: str, now: Scrape, before: Scrape) -> bool:
    """Whether an alert's expression holds for any series; ``before``: the scrape at the start of its window."""
    if (new := NEW_SERIES.fullmatch(expression)) is not None:
        began = {sample: value for sample, value in now.items() if Sample(new[3], sample.labels) not in before}
        return fires(new[1], now, before) or fires(new[2], began, {})
    found = RULE.fullmatch(expression)
    assert found, f"{expression!r} is not of the simple kinds that are evaluated here"
    name, compare, bound, other = found[1], OPERATORS[found[2]], float(found[3]), found[4]
    gained = expression.startswith("increase(")

    def of(sample: Sample) -> float:
        return now[sample] - (before.get(sample, now[sample]) if gained else 0)

    return any(
        compare(of(sample), bound * (1 if other is None else of(Sample(other, sample.labels))))
        for sample in now
        if sample.name == name
    )


def firing(now: Scrape) -> set[str]:
    """The alerts whose expression holds at one scrape, whatever their ``for`` is."""
    return {name for name, expression in ALERTS.items() if "increase(" not in expression and fires(expression, now, {})}
