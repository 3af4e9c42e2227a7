"""The sink's side: ``DeltaSink``, the ledger, Delta's log and Spark's checkpoint. It shares values with the source.

Runs in: the user's driver, the command line. Deliberately absent: Kafka, members, the stream reader's code.
"""

import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from spark_group_source.errors import OptionError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Writer = Literal["auto", "native", "options"]
"""Who commits to a table: ``deltalake``, Delta Lake, or the one that :class:`table_writer.TableWriter` chooses."""

_SERVERLESS = "NOT_SUPPORTED_WITH_SERVERLESS"
"""The error condition of what Databricks' serverless compute cannot do."""

_lock = threading.Lock()
_settings: dict[tuple[int, str], tuple[int, str | None]] = {}
"""By session and setting: how many writes need it now, and the value before the first of them."""


@contextmanager
def session_setting(
    spark: "SparkSession", key: str, value: str, *, only_if_unset: bool = False, must: bool = False
) -> Iterator[None]:
    """Change a setting of the session until the last of the writes that need it has ended, as several tables may be
    written at the same time. ``foreachBatch`` has its own session, so other queries keep their value.

    Args:
        only_if_unset: keep a value that the user has set.
        must: whether the block must not run where the platform forbids the setting.

    Raises:
        PySparkException: the platform forbids it, and ``must`` is set.
    """
    from pyspark.errors import PySparkException

    name = (id(spark), key)
    with _lock:
        is_changed = False
        try:
            users, before = _settings.get(name) or (0, spark.conf.get(key, None))
            if users or not only_if_unset or before is None:
                spark.conf.set(key, value)
                _settings[name] = users + 1, before
                is_changed = True
        except PySparkException:
            if must:
                raise
    try:
        yield
    finally:
        if is_changed:
            with _lock:
                users, before = _settings.pop(name)
                if users > 1:
                    _settings[name] = users - 1, before
                elif before is None:
                    spark.conf.unset(key)
                else:
                    spark.conf.set(key, before)


def kept(rows: "DataFrame") -> "DataFrame":
    """Let Spark keep rows on the executors' disks, until ``unpersist()``.

    Not in memory: while Spark caches a batch that is larger than its memory there, executors end with OutOfMemoryError
    (1 GiB of heap and two tasks with 1 GiB each; ``python -m tests.bench big_batch``). A task that reads them from disk
    has ``spark.serializer.objectStreamReset`` blocks of up to 4 MiB in memory.

    Raises:
        OptionError: Databricks' serverless compute keeps no rows.
    """
    from pyspark import StorageLevel
    from pyspark.errors import PySparkException

    try:
        return rows.persist(StorageLevel.DISK_ONLY)
    except PySparkException as exc:
        if exc.getCondition() != _SERVERLESS:
            raise
        raise OptionError(
            "serverless compute refuses to keep the rows of a batch, which DeltaSinks needs for several tables or with "
            "by, and DeltaSink with merge, dead_letters or persist=True. Nothing of the batch was written. Use classic "
            "compute; or, for several tables, a query with one DeltaSink for each"
        ) from exc


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
