"""The exporter: the metrics of a sweep over groups, and the loop that sweeps at an interval and serves them.

Runs in: the process of ``spark-group exporter``, on its main thread. Deliberately absent: asking Kafka (``sweep``).
Kafka is asked at the exporter's own interval, however often and by how many Prometheus scrapes it. Ages and offsets are
those of one sweep, so that they belong together; what did not answer then has no value at all, rather than an old one.
"""

import threading
from collections.abc import Callable, Iterator

from spark_group_source.kafka import Environment
from spark_group_source.metrics.endpoint import Endpoint, Metric, Published, Sample, since_s
from spark_group_source.metrics.sweep import GroupSeen, PartitionSeen, Seen, Sweeps

PREFIX = "kafka_group_"
STATES = ("stable", "preparing_rebalancing", "completing_rebalancing", "empty", "dead", "unknown")
"""The library's words in lower case. It has none yet for what a KIP-848 group is between two stable states: unknown."""

_Row = Metric[Seen]


class Exporter:
    """Sweeps until it is stopped.

    Args:
        sweeps: what looks at the groups.
        interval_s: from the beginning of one sweep to that of the next; a longer one is followed at once.
        host, port: as of :class:`Endpoint`.

    Raises:
        OptionError: it cannot listen there.
    """

    def __init__(
        self, sweeps: Sweeps, *, interval_s: float, host: str, port: int, environment: Environment | None = None
    ) -> None:
        self._sweeps, self._interval_s = sweeps, interval_s
        self._environment = environment or Environment()
        self.last: Seen | None = None
        collector = Published(METRICS, lambda: self.last, now_ms=self._environment.now_ms)
        self._endpoint = Endpoint(collector, host=host, port=port, option="--port", environment=self._environment)
        self.port = self._endpoint.port

    def sweep(self) -> Seen:
        """Look once, and serve that from now on."""
        self.last = seen = self._sweeps.sweep()
        return seen

    def run(self, stop: threading.Event) -> None:
        """Sweep every interval until ``stop`` is set."""
        while not stop.is_set():
            began_ms = self._environment.now_ms()
            self.sweep()
            stop.wait(max(0.0, self._interval_s - (self._environment.now_ms() - began_ms) / 1000))

    def close(self) -> None:
        """Free the port, and close every connection."""
        self._endpoint.stop()
        self._sweeps.close()


# --- the table -------------------------------------------------------------------------------------------------------


def _metric(name: str, read: Callable[[Seen, int], float], doc: str) -> _Row:
    def samples(seen: Seen, now_ms: int) -> Iterator[Sample]:
        yield (), read(seen, now_ms)

    return Metric(PREFIX + name, (), samples, doc)


def _by_group(name: str, read: Callable[[GroupSeen, int], float], doc: str, *, always: bool = False) -> _Row:
    """``always``: also of groups that did not answer."""

    def samples(seen: Seen, now_ms: int) -> Iterator[Sample]:
        for group in seen.groups:
            if always or group.unreachable_since_ms is None:
                yield (group.group,), read(group, now_ms)

    return Metric(PREFIX + name, ("group",), samples, doc)


def _by_partition(name: str, read: Callable[[PartitionSeen], float | None], doc: str) -> _Row:
    def samples(seen: Seen, _now_ms: int) -> Iterator[Sample]:
        for group in seen.groups:
            for tp, at in group.partitions.items():
                if (value := read(at)) is not None:
                    yield (group.group, tp.topic, str(tp.partition)), value

    return Metric(PREFIX + name, ("group", "topic", "partition"), samples, doc)


def _states(seen: Seen, _now_ms: int) -> Iterator[Sample]:
    for group in seen.groups:
        if group.unreachable_since_ms is None:
            for state in dict.fromkeys((*STATES, group.state)):
                yield (group.group, state), float(state == group.state)


def _members(seen: Seen, _now_ms: int) -> Iterator[Sample]:
    for group in seen.groups:
        for m in group.members:
            yield (group.group, m.instance_id or m.member_id, m.client_id, m.host), len(m.partitions)


METRICS: tuple[_Row, ...] = (
    _by_group("up", lambda group, _: float(group.unreachable_since_ms is None),
              "1: the group answered in the last sweep. 0: it did not, and has no other numbers but the two below.",
              always=True),
    _by_group("unreachable_seconds", lambda group, now_ms: since_s(group.unreachable_since_ms, now_ms),
              "How long the group has not answered; 0: it does.", always=True),
    _by_group("rebalances_seen_total", lambda group, _: group.rebalances,
              "Sweeps that found members or their partitions other than in the sweep before, with the group at rest. "
              "What moved and came back between two sweeps is not seen.", always=True),
    Metric(PREFIX + "state", ("group", "state"), _states,
           "1 for the group's state as Kafka says it, 0 for every other one."),
    _by_group("members", lambda group, _: len(group.members), "Members of the group."),
    Metric(PREFIX + "member_partitions", ("group", "member", "client", "host"), _members,
           "Partitions that a member has. `member`: its instance id, or the member id of one that has none."),
    _by_partition("committed_offset", lambda p: p.committed, "The next offset that the group reads."),
    _by_partition("end_offset", lambda p: p.end,
                  "Where the partition ends for the group's consumers: with `read_committed` at the first record of a "
                  "transaction that is not finished."),
    _by_partition("lag_records", lambda p: p.lag,
                  "Offsets from one to the other. Control records, and what compaction took, count too."),
    _by_partition("lag_seconds", lambda p: p.age_s,
                  "Age of the record that a consumer gets next, by its timestamp; 0: there is none to get. A partition "
                  "whose next record could not be read in time, or has no timestamp, has no value."),
    _by_group("lag_unknown_partitions", lambda group, _: sum(p.age_s is None for p in group.partitions.values()),
              "Partitions that have none in the last sweep."),
    _metric("exporter_unreachable_seconds", lambda seen, now_ms: since_s(seen.unreachable_since_ms, now_ms),
            "How long no broker has answered the exporter; 0: they do."),
    _metric("exporter_sweep_seconds", lambda seen, _: seen.took_s, "How long the last sweep took."),
    _metric("exporter_sweep_timestamp_seconds", lambda seen, _: seen.ended_s, "When it ended, since the epoch."),
    _metric("exporter_records_read_total", lambda seen, _: seen.records_read,
            "Partitions of which the next record was looked for. Where nothing changed that is not done again."),
)  # fmt: skip
"""All of them, in the order of ``docs/metrics.md``."""
