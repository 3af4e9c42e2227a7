"""The size of a ledger in a table's log: full ones, and the changes between them."""

import random
import statistics
from pathlib import Path

import pytest
from sink_helpers import Query, next_offsets, records
from sink_source import SCHEMA, Ranges, offset

from spark_group_source.delta.ledger_format import FULL_EVERY, FullLedger, Ledger
from spark_group_source.delta.ledger_store import read_ledger

PARTITIONS, BATCHES = 10_000, 45


def batch_sizes(query: Query, table: Path, moved: int, seed: int) -> list[int]:
    """Return the size of each commit of a query that reads some partitions in each batch."""
    dice = random.Random(seed)
    at = [dice.randrange(10**9, 10**10) for _ in range(PARTITIONS)]
    sink = query.sink(table)
    sizes = []
    for n in range(BATCHES):
        ranges: Ranges = {("orders", p): (at[p], at[p]) for p in range(PARTITIONS)}
        for p in dice.sample(range(PARTITIONS), moved):
            before, at[p] = at[p], at[p] + dice.randrange(1, 5_000)
            ranges["orders", p] = (before, at[p])
        planned = offset(n, ranges)
        query.plan(n, planned)
        sink(query.spark.createDataFrame(records(n, n + 1), SCHEMA), n)
        sizes.append(max((table / "_delta_log").glob("*.json")).stat().st_size)
    assert next_offsets(table) == {("orders", p): n for p, n in enumerate(at)}
    return sizes


@pytest.mark.parametrize(("moved", "changes_max", "full_max"), [(100, 20_000, 120_000), (PARTITIONS, 120_000, 120_000)])
def test_a_commit_with_10_000_partitions_is_small(
    query: Query, table: Path, moved: int, changes_max: int, full_max: int
) -> None:
    sizes = batch_sizes(query, table, moved, 7)
    full = sizes[::FULL_EVERY]
    assert max(full) < full_max
    assert max(size for n, size in enumerate(sizes) if n % FULL_EVERY) < changes_max
    assert statistics.mean(sizes) < changes_max
    found = read_ledger(query.spark, str(table), "etl")
    assert found is not None and {tuple(tp): n for tp, n in found.offsets.items()} == next_offsets(table)


def test_a_full_ledger_in_version_0_stays_the_one_that_changes_refer_to() -> None:
    written, later = (Ledger(group="etl", full=FullLedger(version, 1, 5)).at_version(3).full for version in (-1, 0))
    assert written is not None and later is not None
    assert (written.version, later.version) == (3, 0)
