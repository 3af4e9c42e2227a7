"""What is counted and refused of bad records, without rows (with them: ``tests/delta/test_dead_letters.py``)."""

from pathlib import Path

import pytest
from sink_helpers import Query, one
from sink_source import SCHEMA, offset

from spark_group_source.delta.checkpoint import PlannedBatch
from spark_group_source.delta.dead_letters import DeadLetters, LetterBox, TableLetters
from spark_group_source.delta.table_writer import open_existing
from spark_group_source.errors import OptionError


def planned(query: str, run: str | None) -> PlannedBatch:
    return PlannedBatch(query_id=query, batch_id=0, offsets=(), run_id=run)


def test_rows_are_counted_for_each_run_of_each_query(query: Query, table: Path) -> None:
    """One sink may be used by several queries, one after the other or at the same time."""
    letters, there = DeadLetters("/lake/bad"), open_existing(query.spark, str(table))
    first = letters._known(there, planned("q", "run 1"))
    first.counted, first.bad = 60, 40
    other = letters._known(there, planned("other", "run 2"))
    assert (other.counted, other.bad) == (0, 0)
    assert letters._known(there, planned("q", "run 1")) is first
    again = letters._known(there, planned("q", "run 3"))
    assert (again.counted, again.bad) == (0, 0)


def test_a_partition_that_several_sources_read_is_refused(query: Query, table: Path) -> None:
    offsets = offset(0, one(0, 10), group="a"), offset(0, one(0, 5), group="b", stream="s2")
    batch = PlannedBatch(query_id="q", batch_id=0, offsets=offsets)
    there = open_existing(query.spark, str(table))
    box = LetterBox(DeadLetters("/lake/bad"), there, there, batch, TableLetters())
    rows = query.spark.createDataFrame([], SCHEMA)
    with pytest.raises(OptionError, match=r"several kafka-group sources of this query read orders-0, so the source of"):
        box.good_rows(rows, rows, {}, {})
