"""The metrics of a query run, from its statistics.

Runs in: the stream reader, with ``metricsPort``. Deliberately absent: counting (``protocol.statistics``), lag (the
exporter reads it from Kafka, also while no run is active), and state: every scrape reads the statistics published last.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from spark_group_source.metrics.endpoint import Metric, Sample, since_s
from spark_group_source.protocol.states import RunState, SlotState
from spark_group_source.protocol.statistics import Statistics

PREFIX = "kafka_group_source_"
RUN = ("group", "stream")

_Row = Metric[Statistics]


def _by(labels: tuple[str, ...], name: str, read: Callable[[Statistics, int], Iterable[Sample]], doc: str) -> _Row:
    """A metric with a sample for each value of the labels, to which those of the run are added."""
    return Metric(
        PREFIX + name,
        (*RUN, *labels),
        lambda of, now_ms: [((of.group, of.stream, *key), value) for key, value in read(of, now_ms)],
        doc,
    )


def _metric(name: str, read: Callable[[Statistics, int], float], doc: str) -> _Row:
    """A metric of the whole run."""
    return _by((), name, lambda of, now_ms: [((), read(of, now_ms))], doc)


def _count(name: str, field: str, doc: str) -> _Row:
    return _metric(name, lambda of, _: getattr(of, field), doc)


def _seconds(name: str, field: str, doc: str) -> _Row:
    return _metric(name, lambda of, _: getattr(of, field) / 1000, doc)


def _by_slot(name: str, field: str, doc: str) -> _Row:
    return _by(("slot",), name, lambda of, _: [((str(n),), value) for n, value in enumerate(getattr(of, field))], doc)


def _rows(of: Statistics, _now_ms: int) -> Iterator[Sample]:
    for source, by_slot in (("memory", of.rows_from_memory), ("brokers", of.rows_from_brokers)):
        for slot, rows in enumerate(by_slot):
            yield (str(slot), source), rows


def _by_table(name: str, kinds: Sequence[str], doc: str) -> _Row:
    def samples(of: Statistics, _now_ms: int) -> Iterator[Sample]:
        for table, rows in of.tables.items():
            yield (table,), sum(rows.get(kind, 0) for kind in kinds)

    return _by(("table",), name, samples, doc)


METRICS: tuple[_Row, ...] = (
    _by(("state",), "state", lambda of, _: [((state.value,), float(of.state == state.value)) for state in RunState],
        "1 for the run's current state, 0 for every other state ([states](states.md#run))."),
    _count("durable_batch", "seq", "Number of the last durable batch; -1 before the first."),
    _count("generation", "generation",
           "Group generation (classic) or member epoch (KIP-848) of the last assignment; -1 before."),
    _by(("state",), "slots", lambda of, _: [((state.value,), of.slots.count(state.value)) for state in SlotState],
        "Slots (memberships of the run) in each state."),
    _by_slot("assigned_partitions", "assigned", "Partitions assigned to each slot."),
    _metric("placed_slots", lambda of, _: sum(map(bool, of.agents)), "Slots whose member is placed on an agent."),
    _by_slot("buffered_bytes", "buffered_bytes", "Bytes of the slot's partitions that its agent has prefetched."),
    _by_slot("buffered_rows", "buffered_rows", "Rows of the slot's partitions that its agent has prefetched."),
    _by(("slot", "source"), "rows_read_total", _rows,
        "Rows of the slot's partitions that tasks read, from an agent's memory or from brokers, including failed "
        "attempts. With `memberHost=driver`, and with `auto` in local mode, only tasks that skipped records report, "
        "or all if `maxBytesPerTrigger` is set."),
    _count("moves_total", "moves", "Moves of a slot between agents or between an agent and the stream reader."),
    _by_slot("recalls_total", "slot_recalls",
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
