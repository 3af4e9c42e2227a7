"""The exporter: sweeps over groups at an interval, and serves the results as metrics.

Runs in: the process of ``spark-group exporter``, on its main thread. Deliberately absent: requests to Kafka
(``sweep``). Kafka is read at the exporter's own interval, independent of scrapes. All values of a scrape are from one
sweep, so that they are consistent; an unanswered value is left out instead of an old one being kept.
"""

import threading
from collections.abc import Callable, Iterator

from spark_group_source.kafka import Environment
from spark_group_source.metrics.endpoint import Endpoint, Metric, MetricsCollector, Sample, since_s
from spark_group_source.metrics.sweep import GroupSnapshot, GroupSweeper, PartitionSnapshot, SweepResult

PREFIX = "kafka_group_"
STATES = ("stable", "preparing_rebalancing", "completing_rebalancing", "empty", "dead", "unknown")
"""The library's states in lower case. A KIP-848 group that is not stable is unknown to it."""

_Row = Metric[SweepResult]


class Exporter:
    """Sweeps at an interval, until it is stopped, and serves the last result.

    Args:
        sweeps: sweeps over the groups.
        interval_s: between the starts of two sweeps; a sweep that takes longer is followed at once.
        host, port: as of :class:`Endpoint`.

    Raises:
        OptionError: it cannot listen on this address.
    """

    def __init__(
        self, sweeps: GroupSweeper, *, interval_s: float, host: str, port: int, environment: Environment | None = None
    ) -> None:
        self._sweeps, self._interval_s = sweeps, interval_s
        self._environment = environment or Environment()
        self.last: SweepResult | None = None
        collector = MetricsCollector(METRICS, lambda: self.last, now_ms=self._environment.now_ms)
        self._endpoint = Endpoint(collector, host=host, port=port, option="--port", environment=self._environment)
        self.port = self._endpoint.port

    def sweep(self) -> SweepResult:
        """Sweep once, and serve the result from now on."""
        self.last = seen = self._sweeps.sweep()
        return seen

    def run(self, stop: threading.Event) -> None:
        """Sweep every interval until ``stop`` is set."""
        while not stop.is_set():
            started_ms = self._environment.now_ms()
            self.sweep()
            stop.wait(max(0.0, self._interval_s - (self._environment.now_ms() - started_ms) / 1000))

    def close(self) -> None:
        """Free the port, and close every connection."""
        self._endpoint.stop()
        self._sweeps.close()


# --- the table -------------------------------------------------------------------------------------------------------


def _metric(name: str, read: Callable[[SweepResult, int], float], doc: str) -> _Row:
    def samples(seen: SweepResult, now_ms: int) -> Iterator[Sample]:
        yield (), read(seen, now_ms)

    return Metric(PREFIX + name, (), samples, doc)


def _by_group(name: str, read: Callable[[GroupSnapshot, int], float], doc: str, *, always: bool = False) -> _Row:
    """``always``: also for groups that did not answer."""

    def samples(seen: SweepResult, now_ms: int) -> Iterator[Sample]:
        for group in seen.groups:
            if always or group.unreachable_since_ms is None:
                yield (group.group,), read(group, now_ms)

    return Metric(PREFIX + name, ("group",), samples, doc)


def _by_partition(name: str, read: Callable[[PartitionSnapshot], float | None], doc: str) -> _Row:
    def samples(seen: SweepResult, _now_ms: int) -> Iterator[Sample]:
        for group in seen.groups:
            for tp, at in group.partitions.items():
                if (value := read(at)) is not None:
                    yield (group.group, tp.topic, str(tp.partition)), value

    return Metric(PREFIX + name, ("group", "topic", "partition"), samples, doc)


def _states(seen: SweepResult, _now_ms: int) -> Iterator[Sample]:
    for group in seen.groups:
        if group.unreachable_since_ms is None:
            for state in dict.fromkeys((*STATES, group.state)):
                yield (group.group, state), float(state == group.state)


def _members(seen: SweepResult, _now_ms: int) -> Iterator[Sample]:
    for group in seen.groups:
        for m in group.members:
            yield (group.group, m.instance_id or m.member_id, m.client_id, m.host), len(m.partitions)


METRICS: tuple[_Row, ...] = (
    _by_group("up", lambda group, _: float(group.unreachable_since_ms is None),
              "1 if the group answered in the last sweep, else 0: then only the next two have values.",
              always=True),
    _by_group("unreachable_seconds", lambda group, now_ms: since_s(group.unreachable_since_ms, now_ms),
              "How long the group has not answered; 0 if it answers.", always=True),
    _by_group("rebalances_seen_total", lambda group, _: group.rebalances,
              "Sweeps in which the settled group had another assignment than in the sweep before. A partition "
              "that moved and returned between two sweeps is not counted.", always=True),
    Metric(PREFIX + "state", ("group", "state"), _states,
           "1 for the group's state in Kafka, 0 for every other state."),
    _by_group("members", lambda group, _: len(group.members), "Members of the group."),
    Metric(PREFIX + "member_partitions", ("group", "member", "client", "host"), _members,
           "Partitions assigned to a member. `member`: its instance id, or else its member id."),
    _by_partition("committed_offset", lambda p: p.committed,
                  "The committed offset: the next one that the group reads."),
    _by_partition("end_offset", lambda p: p.end,
                  "The end offset for the group's consumers; with `read_committed` the last stable offset: where "
                  "the first open transaction starts."),
    _by_partition("lag_records", lambda p: p.lag,
                  "`end_offset` - `committed_offset`. Includes control records and records removed by compaction."),
    _by_partition("lag_seconds", lambda p: p.age_s,
                  "Age of the next record of the group, by its timestamp; 0 if there is none. No value if the record "
                  "was not read in time or has no timestamp."),
    _by_group("lag_unknown_partitions", lambda group, _: sum(p.age_s is None for p in group.partitions.values()),
              "Partitions without `lag_seconds` in the last sweep."),
    _metric("exporter_unreachable_seconds", lambda seen, now_ms: since_s(seen.unreachable_since_ms, now_ms),
            "How long no broker has answered the exporter; 0 if brokers answer."),
    _metric("exporter_sweep_seconds", lambda seen, _: seen.took_s, "Duration of the last sweep."),
    _metric("exporter_sweep_timestamp_seconds", lambda seen, _: seen.ended_s,
            "When the last sweep ended, since the epoch."),
    _metric("exporter_records_read_total", lambda seen, _: seen.records_read,
            "Reads of a next record. A record that is still known is not read again."),
)  # fmt: skip
"""All metrics of the exporter, in the order of ``docs/metrics.md``."""
