"""The size of a ledger in a table's log."""

import random
from pathlib import Path

import pytest
from sink_helpers import Query, next_offsets, records
from sink_source import SCHEMA, Ranges, offset

from spark_group_source.delta.ledger_store import read_ledger

PARTITIONS, BATCHES = 10_000, 5


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


@pytest.mark.parametrize("moved", [100, PARTITIONS])
def test_a_commit_with_10_000_partitions_is_small(query: Query, table: Path, moved: int) -> None:
    assert max(batch_sizes(query, table, moved, 7)) < 120_000
    found = read_ledger(query.spark, str(table), "etl")
    assert found is not None and {tuple(tp): n for tp, n in found.offsets.items()} == next_offsets(table)
