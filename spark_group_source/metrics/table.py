"""A metric as a row of a table: from it come the exposition and the documentation.

Runs in: the stream reader, the exporter, tests. Deliberately absent: which metrics there are (``run``, ``groups``).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

Of = TypeVar("Of")
Kind = Literal["gauge", "counter"]
Family = GaugeMetricFamily | CounterMetricFamily
Sample = tuple[tuple[str, ...], float]
"""The values of the labels, and that of the metric."""


@dataclass(frozen=True, slots=True)
class Metric(Generic[Of]):
    """One row. ``samples`` reads it off a moment; a value that is not known is left out, never 0."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    samples: Callable[[Of], Iterable[Sample]]
    doc: str


def kind_of(name: str) -> Kind:
    """By Prometheus' conventions what only grows ends in ``_total``."""
    return "counter" if name.endswith("_total") else "gauge"


class Moments(Collector, Generic[Of]):
    """Hands a table's metrics of some moments to ``prometheus_client`` when they are scraped; has no state.

    Args:
        metrics: the table.
        moments: what there is to tell now, maybe nothing.
    """

    def __init__(self, metrics: Sequence[Metric[Of]], moments: Callable[[], Iterable[Of]]) -> None:
        self._metrics, self._moments = metrics, moments

    def collect(self) -> Iterator[Family]:
        moments = list(self._moments())
        for metric in self._metrics:
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.doc, labels=metric.labels)
            for moment in moments:
                for labels, value in metric.samples(moment):
                    family.add_metric(labels, value)
            yield family


def render_markdown(metrics: Sequence[Metric[Of]]) -> str:
    """The table as the documents show it, ending in a newline."""
    lines = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{m.name}` | {m.kind} | {', '.join(f'`{label}`' for label in m.labels) or '-'} | {m.doc} |" for m in metrics
    ]
    return "\n".join(lines) + "\n"
