"""The metrics of a query run, from its statistics.

Runs in: the stream reader, with ``metricsPort``. Deliberately absent: counting (``protocol.statistics``), lag (the
exporter reads it from Kafka, also while no run is active), and state: every scrape reads the statistics published last.
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
    """A metric of the whole run."""

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


def _by_table(name: str, kinds: Sequence[str], doc: str) -> _Row:
    def samples(of: Statistics, _now_ms: int) -> Iterator[Sample]:
        for table, rows in of.tables.items():
            yield (of.group, of.stream, table), sum(rows.get(kind, 0) for kind in kinds)

    return Metric(PREFIX + name, (*RUN, "table"), samples, doc)


METRICS: tuple[_Row, ...] = (
    Metric(PREFIX + "state", (*RUN, "state"), _states,
           "1 for the run's current state, 0 for every other state ([states](states.md#run))."),
    _count("durable_batch", "seq", "Number of the last durable batch; -1 before the first."),
    _count("generation", "generation",
           "Group generation (classic) or member epoch (KIP-848) of the last assignment; -1 before."),
    Metric(PREFIX + "slots", (*RUN, "state"), _slots, "Slots (memberships of the run) in each state."),
    _by_slot("assigned_partitions", lambda of: of.assigned, "Partitions assigned to each slot."),
    _metric("placed_slots", lambda of, _: sum(map(bool, of.agents)), "Slots whose member is placed on an agent."),
    _by_slot("buffered_bytes", lambda of: of.buffered_bytes,
             "Bytes of the slot's partitions that its agent has prefetched."),
    _by_slot("buffered_rows", lambda of: of.buffered_rows,
             "Rows of the slot's partitions that its agent has prefetched."),
    Metric(PREFIX + "rows_read_total", (*RUN, "slot", "source"), _rows,
           "Rows of the slot's partitions that tasks read, from an agent's memory or from brokers, including failed "
           "attempts. With `memberHost=driver`, and with `auto` in local mode, only tasks that skipped records report, "
           "or all if `maxBytesPerTrigger` is set."),
    _count("moves_total", "moves", "Moves of a slot between agents or between an agent and the stream reader."),
    _by_slot("recalls_total", lambda of: of.slot_recalls,
             "How often the slot was recalled from an agent: it had ended or could not join, or transactions are "
             "refused."),
    _metric("missing_topics", lambda of, _: len(of.missing_topics),
            "Topics that `subscribe` names and that do not exist."),
    _metric("unreachable_seconds", lambda of, now_ms: since_s(of.unreachable_since_ms, now_ms),
            "How long brokers have not answered; 0 if they answer."),
    _count("rebalances_total", "rebalances", "Assignments, revocations and losses that changed the run's "
           "partitions."),
    _metric("last_rebalance_timestamp_seconds",
            lambda of, now_ms: time.time() - since_s(of.rebalanced_at_ms, now_ms) if of.rebalanced_at_ms else 0.0,
            "When the last rebalance was, since the epoch; 0 before the first."),
    _count("holds_total", "holds", "Revocations that were held for the batch in flight or its offset commit."),
    _seconds("hold_last_seconds", "hold_last_ms", "How long the last revocation was held."),
    _seconds("hold_max_seconds", "hold_max_ms", "The longest hold of a revocation in this run."),
    _count("hold_overruns_total", "hold_overruns",
           "Holds that exceeded their budget: their partitions were released without a commit."),
    _count("partitions_lost_total", "partitions_lost", "Partitions that were lost without a revocation, or released "
           "without a commit."),
    _count("possible_duplicates_total", "possible_duplicates",
           "Offsets of lost partitions that were read but not committed, so that the next owner may read them again, "
           "and those of a durable batch inside which another consumer committed."),
    _count("records_lost_total", "records_lost", "Offsets that were deleted before they were read."),
    _count("commits_total", "commits", "Offset commits."),
    _count("commits_failed_total", "commits_failed",
           "Offset commits that failed; the next one includes their offsets."),
    _seconds("commit_delay_last_seconds", "commit_delay_last_ms",
             "Time from the last batch being durable until all its offsets are committed."),
    _seconds("commit_delay_max_seconds", "commit_delay_max_ms", "The longest `commit_delay` of this run."),
    _count("uncommitted_partitions", "uncommitted_partitions",
           "Partitions whose durable position is not committed yet."),
    _count("ledger_gap_offsets", "uncommitted_offsets",
           "Durable offsets that are not committed yet: with `DeltaSink`, how far the table's ledger is ahead of the "
           "group's committed offsets."),
    _count("offsets_renewed_total", "offsets_renewed",
           "Offsets of idle partitions that were committed again, unchanged, before they could expire."),
    _count("offsets_restored_total", "offsets_restored",
           "Partitions that continued at the checkpoint's position because the group had no committed offset."),
    _by_table("table_rows_total", ("inserted", "updated", "deleted"),
              "Rows of a `DeltaSink`'s table that batches inserted, updated or deleted."),
    _by_table("table_updated_rows_total", ("updated",), "Those that merges updated."),
    _by_table("table_deleted_rows_total", ("deleted",), "Those that merges deleted."),
    _by_table("table_bad_records_total", ("bad",), "Bad records, which are in the table's dead letters instead."),
)  # fmt: skip
"""All metrics of a run, in the order of ``docs/metrics.md``."""
