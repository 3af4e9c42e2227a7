"""The sink's side: ``DeltaSink``, the ledger, Delta's log and Spark's checkpoint. It shares values with the source.

Runs in: the user's driver, the command line. Deliberately absent: Kafka, members, the stream reader's code.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Writer = Literal["auto", "native", "options"]
"""Who commits to a table: ``deltalake``, Delta Lake, or the one that :class:`table_writer.TableWriter` chooses."""


def kept(rows: "DataFrame") -> "DataFrame":
    """Let Spark keep rows on the executors' disks, until ``unpersist()``.

    Not in memory: while Spark caches a batch that is larger than its memory there, executors end with OutOfMemoryError
    (1 GiB of heap and two tasks with 1 GiB each; ``python -m tests.bench big_batch``).
    """
    from pyspark import StorageLevel

    return rows.persist(StorageLevel.DISK_ONLY)


@contextmanager
def persisted(rows: "DataFrame") -> "Iterator[DataFrame]":
    """Let Spark keep rows until the block ends."""
    found = kept(rows)
    try:
        yield found
    finally:
        found.unpersist()


def constant_rows(spark: "SparkSession", rows: Iterable[Mapping[str, object]], columns: str) -> "DataFrame":
    """Return these rows as a constant, so that no Python worker has to create them.

    Args:
        columns: their names and types, as in ``STRUCT<...>``.
    """
    from pyspark.sql import functions as F

    each = F.explode(F.from_json(F.lit(json.dumps(list(rows))), f"array<struct<{columns}>>"))
    return spark.range(1).select(each.alias("r")).select("r.*")
