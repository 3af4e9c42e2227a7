"""What a run says of itself: the metrics of its statistics.

Runs in: the stream reader, with ``metricsPort``. Deliberately absent: counting (``group.statistics``), lag (an exporter
tells it from Kafka, also when no run lives), and any state: every scrape reads what the run published last.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from spark_group_source.metrics.endpoint import Metric, Sample, since_s
from spark_group_source.protocol.states import RunState, SlotState
from spark_group_source.protocol.statistics import Statistics

PREFIX = "kafka_group_source_"
RUN = ("group", "stream")

_Row = Metric[Statistics]


def _metric(name: str, read: Callable[[Statistics, int], float], doc: str) -> _Row:
    """A value of the whole run."""

    def samples(of: Statistics, now_ms: int) -> Iterator[Sample]:
        yield (of.group, of.stream), read(of, now_ms)

    return Metric(PREFIX + name, RUN, samples, doc)


def _count(name: str, field: str, doc: str) -> _Row:
    return _metric(name, lambda of, _: getattr(of, field), doc)


def _seconds(name: str, field: str, doc: str) -> _Row:
    return _metric(name, lambda of, _: getattr(of, field) / 1000, doc)


def _by_slot(name: str, read: Callable[[Statistics], Sequence[float]], doc: str) -> _Row:
    def samples(of: Statistics, _now_ms: int) -> Iterator[Sample]:
        for slot, value in enumerate(read(of)):
            yield (of.group, of.stream, str(slot)), value

    return Metric(PREFIX + name, (*RUN, "slot"), samples, doc)


def _states(of: Statistics, _now_ms: int) -> Iterator[Sample]:
    for state in RunState:
        yield (of.group, of.stream, state.value), float(of.state == state.value)


def _slots(of: Statistics, _now_ms: int) -> Iterator[Sample]:
    counted = Counter(of.slots)
    for state in SlotState:
        yield (of.group, of.stream, state.value), counted[state.value]


def _rows(of: Statistics, _now_ms: int) -> Iterator[Sample]:
    for source, by_slot in (("memory", of.rows_from_memory), ("brokers", of.rows_from_brokers)):
        for slot, rows in enumerate(by_slot):
            yield (of.group, of.stream, str(slot), source), rows


METRICS: tuple[_Row, ...] = (
    Metric(PREFIX + "state", (*RUN, "state"), _states,
           "1 for what the run does for Spark now, 0 for every other state ([states](states.md#run))."),
    _count("durable_batch", "seq", "Number of the last batch that the sink has; -1 before the first."),
    _count("generation", "generation",
           "Group generation (classic) or member epoch (KIP-848) of the newest assignment; -1 before it."),
    Metric(PREFIX + "slots", (*RUN, "state"), _slots, "Slots, that is places in the group, in each state."),
    _by_slot("assigned_partitions", lambda of: of.assigned, "Partitions that each slot has."),
    _metric("lent_slots", lambda of, _: sum(map(bool, of.hosts)), "Slots whose member lives beside an executor."),
    _by_slot("buffered_bytes", lambda of: of.buffered_bytes, "What the slot's agent has read ahead."),
    _by_slot("buffered_rows", lambda of: of.buffered_rows, "The same in rows."),
    Metric(PREFIX + "rows_read_total", (*RUN, "slot", "source"), _rows,
           "Rows of the slot's partitions that tasks read, from an agent's memory or from brokers, tries that failed "
           "included. With `memberHost=driver` tasks cannot tell: 0."),
    _count("moves_total", "moves", "Slots that moved from one host to another."),
    _by_slot("recalls_total", lambda of: of.recalled,
             "How often the slot was called back from an agent that was gone, or could not join."),
    _metric("unreachable_seconds", lambda of, now_ms: since_s(of.unreachable_since_ms, now_ms),
            "How long the brokers have not answered; 0: they do."),
    _count("rebalances_total", "rebalances", "Assignments and revocations that changed something."),
    _metric("last_rebalance_timestamp_seconds",
            lambda of, now_ms: time.time() - since_s(of.rebalanced_at_ms, now_ms) if of.rebalanced_at_ms else 0.0,
            "When the last of them came, since the epoch; 0 before."),
    _count("holds_total", "holds", "Revocations that were held for the batch in flight or its commit."),
    _seconds("hold_last_seconds", "hold_last_ms", "How long the last revocation was held."),
    _seconds("hold_max_seconds", "hold_max_ms", "The longest of this run."),
    _count("hold_overruns_total", "overruns",
           "Holds that used up their budget: their partitions went without a commit."),
    _count("partitions_lost_total", "lost", "Partitions taken away without asking."),
    _count("maybe_twice_total", "maybe_twice",
           "Offsets of lost partitions that were read and not committed: their next reader may read them again."),
    _count("records_lost_total", "records_lost", "Offsets that were still to be read and are gone."),
    _count("commits_total", "commits", "Commits of the group's offsets to Kafka."),
    _count("commits_failed_total", "commits_failed", "Those that failed; the next one covers them."),
    _seconds("echo_last_seconds", "echo_last_ms", "From \"the batch is durable\" to \"Kafka has all its offsets\"."),
    _seconds("echo_max_seconds", "echo_max_ms", "The longest of this run."),
    _count("uncommitted_partitions", "uncommitted", "Partitions whose durable position Kafka does not have yet."),
    _count("ledger_gap_offsets", "uncommitted_offsets",
           "Offsets that the sink has and Kafka's committed offsets do not: with `DeltaSink`, how far the table's "
           "ledger is ahead of the group."),
    _count("offsets_renewed_total", "offsets_renewed",
           "Offsets of idle partitions that were committed again where they stood, before they were forgotten."),
    _count("offsets_restored_total", "offsets_restored",
           "Partitions that went on where the checkpoint says because Kafka had no offset of them."),
)  # fmt: skip
"""All of them, in the order of ``docs/metrics.md``."""
