"""What the exporter tells of groups: the metrics of a sweep.

Runs in: the exporter. Deliberately absent: asking Kafka (``sweep``). Ages and offsets are those of the sweep, so that
they belong together; what did not answer then has no value at all, rather than an old one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from spark_group_source.metrics.sweep import GroupSeen, PartitionSeen, Seen
from spark_group_source.metrics.table import Metric, Moments, Sample, kind_of

PREFIX = "kafka_group_"
STATES = ("stable", "preparing_rebalancing", "completing_rebalancing", "empty", "dead", "unknown")
"""The library's words in lower case. It has none yet for what a KIP-848 group is between two stable states: unknown."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A sweep, and what the exporter's clock says at the scrape."""

    seen: Seen
    now_ms: int

    def since_s(self, then_ms: int | None) -> float:
        return 0.0 if then_ms is None else max(0, self.now_ms - then_ms) / 1000


def collector(last: Callable[[], Seen | None], *, now_ms: Callable[[], int]) -> Moments[Moment]:
    """For an :class:`~spark_group_source.metrics.endpoint.Endpoint`.

    Args:
        last: the last sweep; None before the first.
        now_ms: the exporter's clock.
    """

    def moments() -> Iterator[Moment]:
        if (seen := last()) is not None:
            yield Moment(seen, now_ms())

    return Moments(METRICS, moments)


def _metric(name: str, read: Callable[[Moment], float], doc: str) -> Metric[Moment]:
    def samples(at: Moment) -> Iterator[Sample]:
        yield (), read(at)

    return Metric(PREFIX + name, kind_of(name), (), samples, doc)


def _by_group(
    name: str, read: Callable[[Moment, GroupSeen], float], doc: str, *, always: bool = False
) -> Metric[Moment]:
    """``always``: also of groups that did not answer."""

    def samples(at: Moment) -> Iterator[Sample]:
        for group in at.seen.groups:
            if always or group.unreachable_since_ms is None:
                yield (group.group,), read(at, group)

    return Metric(PREFIX + name, kind_of(name), ("group",), samples, doc)


def _by_partition(name: str, read: Callable[[PartitionSeen], float | None], doc: str) -> Metric[Moment]:
    def samples(at: Moment) -> Iterator[Sample]:
        for group in at.seen.groups:
            for tp, seen in group.partitions.items():
                if (value := read(seen)) is not None:
                    yield (group.group, tp.topic, str(tp.partition)), value

    return Metric(PREFIX + name, kind_of(name), ("group", "topic", "partition"), samples, doc)


def _states(at: Moment) -> Iterator[Sample]:
    for group in at.seen.groups:
        if group.unreachable_since_ms is None:
            for state in dict.fromkeys((*STATES, group.state)):
                yield (group.group, state), float(state == group.state)


def _members(at: Moment) -> Iterator[Sample]:
    for group in at.seen.groups:
        for m in group.members:
            yield (group.group, m.instance_id or m.member_id, m.client_id, m.host), len(m.partitions)


METRICS: tuple[Metric[Moment], ...] = (
    _by_group("up", lambda _, group: float(group.unreachable_since_ms is None),
              "1: the group answered in the last sweep. 0: it did not, and has no other numbers but the two below.",
              always=True),
    _by_group("unreachable_seconds", lambda at, group: at.since_s(group.unreachable_since_ms),
              "How long the group has not answered; 0: it does.", always=True),
    _by_group("rebalances_seen_total", lambda _, group: group.rebalances,
              "Sweeps that found members or their partitions other than in the sweep before, with the group at rest. "
              "What moved and came back between two sweeps is not seen.", always=True),
    Metric(PREFIX + "state", "gauge", ("group", "state"), _states,
           "1 for the group's state as Kafka says it, 0 for every other one."),
    _by_group("members", lambda _, group: len(group.members), "Members of the group."),
    Metric(PREFIX + "member_partitions", "gauge", ("group", "member", "client", "host"), _members,
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
    _by_group("lag_unknown_partitions", lambda _, group: sum(p.age_s is None for p in group.partitions.values()),
              "Partitions that have none in the last sweep."),
    _metric("exporter_unreachable_seconds", lambda at: at.since_s(at.seen.unreachable_since_ms),
            "How long no broker has answered the exporter; 0: they do."),
    _metric("exporter_sweep_seconds", lambda at: at.seen.took_s, "How long the last sweep took."),
    _metric("exporter_sweep_timestamp_seconds", lambda at: at.seen.ended_s, "When it ended, since the epoch."),
    _metric("exporter_records_read_total", lambda at: at.seen.records_read,
            "Partitions of which the next record was looked for. Where nothing changed that is not done again."),
)  # fmt: skip
"""All of them, in the order of ``docs/metrics.md``."""
