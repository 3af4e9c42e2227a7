"""What a batch holds, read from Spark's own checkpoint.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``). Deliberately absent: the
rows. The smallest and largest offset among the rows of a batch are not its range: compaction, transaction markers and
filters leave gaps at both ends.

Spark writes ``offsets/<batch id>`` before it runs a batch, and never changes it. The first line is the format's
version, the second is Spark's own, then follows one line per source: its offset (v1) or ``<source>:<offset>`` (v2). A
source without an offset so far has ``-``. One DataFrame used twice in a query has one line per use in v1.
"""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.errors import AnalysisException

from spark_group_source.errors import CheckpointMismatch, OptionError
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.offsets import StreamOffset, parse

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

QUERY_ID = "sql.streaming.queryId"
"""The local property that Spark sets on the thread that runs a batch."""

RUN_ID = "spark.jobGroup.id"
"""Another one: of a streaming query the id of its run."""

ONLY_RUN = "-"
"""Names the run where there is no such property: on Spark Connect a worker for ``foreachBatch`` has only one."""

_BEFORE_GROUP = r'("(began|cut|epoch|followed)"\s*:\s*(\d+|\{.*?\})\s*,\s*)*'
_OURS = re.compile(r"\{\s*" + _BEFORE_GROUP + r'"group"\s*:\s*(?!\{)')
"""How an offset of this source begins: its keys are sorted. Tells a damaged one from another source's; Kafka's own has
topics for keys, whatever their names, and objects behind them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch:
    """A batch as it was planned.

    ``offsets`` are those of the kafka-group sources that have something in this batch; a source whose offset is the
    same as in the batch before gave no rows. ``other_sources`` counts the sources of other kinds in the query.
    ``run_id`` is None where no query runs on this thread.
    """

    query_id: str
    batch_id: int
    offsets: tuple[StreamOffset, ...]
    other_sources: int = 0
    run_id: str | None = None
    root: str = ""
    """The query's checkpoint."""


def planned(query_id: str, batch_id: int, text: str, before: str | None) -> PlannedBatch:
    """Read the text of ``offsets/<batch id>``; ``before`` is that of the batch before it, if there is one.

    Raises:
        CheckpointMismatch: no line is of this source, or one that is cannot be read.
    """
    lines = list(source_lines(text).values())
    ours = [line for line in dict.fromkeys(lines) if is_ours(line)]
    if not ours:
        raise CheckpointMismatch(
            f"batch {batch_id} of query {query_id} has no offset of a kafka-group source, so its rows cannot be "
            "recorded in the table. DeltaSink writes only queries that read format('kafka-group'); for others use "
            "writeStream.format('delta')",
            query_id=query_id,
            batch_id=batch_id,
        )
    old = set(source_lines(before).values()) if before is not None else set()
    offsets = [parse(line) for line in ours if line not in old]
    return PlannedBatch(
        query_id=query_id,
        batch_id=batch_id,
        offsets=tuple(offset for offset in offsets if not offset.is_initial),
        other_sources=sum(not is_ours(line) for line in lines),
    )


def source_lines(text: str) -> dict[str, str]:
    """The offset of each source in the text of ``offsets/<batch id>``, by its number or name.

    Raises:
        CheckpointMismatch: it is of a format that is not known.
    """
    version, _, rest = text.partition("\n")
    lines = rest.splitlines()[1:]
    if version == "v1":
        return {str(number): line for number, line in enumerate(lines)}
    if version == "v2":
        return {source: line for source, _, line in (line.partition(":") for line in lines)}
    raise CheckpointMismatch(
        f"the checkpoint's offset log has format {version[:20]!r}; this release reads v1 and v2 of Spark 4.2. "
        "A newer Spark needs a newer release of spark-group-source"
    )


def is_ours(line: str) -> bool:
    """Whether a source's offset is one of kafka-group."""
    return _OURS.match(line) is not None


def read_planned(spark: "SparkSession", batch_id: int, checkpoint: str | None) -> PlannedBatch:
    """Find the query that runs on this thread, and read what its batch holds.

    Args:
        checkpoint: the query's ``checkpointLocation``, needed on Spark Connect; None asks the running query.

    Raises:
        OptionError: the query or its checkpoint cannot be found.
        CheckpointMismatch: as in :func:`planned`.
    """
    local = _local_query_id(spark)
    root = checkpoint or _running_checkpoint(spark, local)
    query_id = _recorded_query_id(spark, root) if local is None or checkpoint else local
    if local not in (None, query_id):
        raise OptionError(
            f"query {local} gives a batch to a DeltaSink whose checkpoint {root} is that of query {query_id}. A sink "
            "with `checkpoint=` belongs to one query: give each query a DeltaSink of its own. Nothing was written",
            checkpoint=root,
            query_id=local,
        )
    text = read(spark, f"{root}/offsets/{batch_id}")
    if text is None:
        raise OptionError(
            f"there is no {root}/offsets/{batch_id}, which Spark writes before it runs batch {batch_id}. "
            "Is `checkpoint=` the checkpointLocation of this very query?",
            checkpoint=root,
            batch_id=batch_id,
        )
    before = read(spark, f"{root}/offsets/{batch_id - 1}") if batch_id > 0 else None
    return replace(planned(query_id, batch_id, text, before), run_id=_local_run_id(spark, local), root=root)


class Files(NamedTuple):
    """How the small files of a checkpoint are reached."""

    read: Callable[[str], str | None]
    """The text of a file; None: there is no such file."""
    write: Callable[[str, str], None]
    """Replace a file, in a folder that is there."""
    names: Callable[[str], list[str]]
    """What a folder holds; nothing where there is no such folder."""


def by_spark(spark: "SparkSession") -> Files:
    """Files in any file system that Spark's Hadoop knows."""

    def names(folder: str) -> list[str]:
        fs, path = _located(spark, folder)
        return [str(status.getPath().getName()) for status in fs.listStatus(path)] if fs.exists(path) else []

    return Files(lambda path: read(spark, path), lambda path, text: write(spark, path, text), names)


def on_this_machine() -> Files:
    """Files that Python can reach. A reader never finds a part of one that is replaced."""

    def read_text(path: str) -> str | None:
        return Path(path).read_text(encoding="utf-8") if Path(path).is_file() else None

    def write_text(path: str, text: str) -> None:
        part = Path(f"{path}.{os.getpid()}.part")
        part.write_text(text, encoding="utf-8")
        part.replace(path)

    def names(folder: str) -> list[str]:
        return [path.name for path in Path(folder).iterdir()] if Path(folder).is_dir() else []

    return Files(read_text, write_text, names)


def batches(files: Files, folder: str) -> list[int]:
    """The numbers of the batches that one of a checkpoint's logs has."""
    return [int(name) for name in files.names(folder) if name.isdecimal()]


def batch_lines(
    files: Files, root: str, batch: int | None = None, *, all_finished: bool = False
) -> tuple[int, dict[str, str]]:
    """A batch's number, and the offset of each source in it, by the source's number or name.

    Args:
        root: the query's ``checkpointLocation``.
        batch: its number, as long as Spark keeps that batch; None: the last finished one.
        all_finished: refuse a checkpoint with a batch that was planned and is not finished.

    Raises:
        OptionError: there is no such batch.
        CheckpointMismatch: a batch is not finished, or the checkpoint is damaged.
    """
    planned, finished = batches(files, f"{root}/offsets"), batches(files, f"{root}/commits")
    if not planned:
        raise OptionError(
            f"{root} has no planned batch: it is no query's checkpointLocation, or its query never planned one",
            checkpoint=root,
        )
    last = max(finished, default=-1)
    open_ones = [number for number in planned if number > last]
    if open_ones and (all_finished or (batch is None and not finished)):
        raise CheckpointMismatch(
            f"{root}: batch {min(open_ones)} was planned and is not finished; whether the sink has its rows, the "
            "checkpoint does not tell. Start the old query once more as it was, with trigger(availableNow=True), which "
            "ends that batch; then do this again",
            checkpoint=root,
            batch_id=min(open_ones),
        )
    number = last if batch is None else batch
    text = files.read(f"{root}/offsets/{number}")
    if text is not None:
        return number, source_lines(text)
    if batch is None:
        raise CheckpointMismatch(
            f"{root} has commits/{number} and no offsets/{number}: it is damaged, or a copy that was not complete",
            checkpoint=root,
            batch_id=number,
        )
    raise OptionError(
        f"{root} does not have batch {number}; it has {min(planned)} to {max(planned)}. Spark keeps the last "
        "spark.sql.streaming.minBatchesToRetain of them",
        checkpoint=root,
        batch_id=number,
    )


def positions(files: Files, root: str, group: str, batch: int | None = None) -> dict[TopicPartition, int]:
    """Where the group stood in a query's checkpoint: after its last finished batch, or before ``batch``.

    Raises:
        OptionError: there is no such batch, or nothing of this group in it.
        CheckpointMismatch: the offset of the batch cannot be read.
    """
    number, lines = batch_lines(files, root, batch)
    side = 1 if batch is None else 0
    found: dict[TopicPartition, int] = {}
    for offset in (parse(line) for line in lines.values() if is_ours(line)):
        if offset.group == group:
            found |= offset.owed
            found |= {tp: bounds[side] for tp, bounds in offset.ranges.items()}
    if not found:
        raise OptionError(f"batch {number} in {root} has no partition of group {group!r}", checkpoint=root)
    return found


def _is_classic(spark: "SparkSession") -> bool:
    return hasattr(spark, "_jsparkSession")


def _local_query_id(spark: "SparkSession") -> str | None:
    # None on Spark Connect, which runs the batch on a thread of the server.
    return spark.sparkContext.getLocalProperty(QUERY_ID) if _is_classic(spark) else None


def _local_run_id(spark: "SparkSession", query_id: str | None) -> str | None:
    if not _is_classic(spark):
        return ONLY_RUN
    return None if query_id is None else spark.sparkContext.getLocalProperty(RUN_ID)


def _running_checkpoint(spark: "SparkSession", query_id: str | None) -> str:
    if query_id is None:
        raise OptionError(
            "the streaming query cannot be found from here. DeltaSink is called by foreachBatch, on Spark's thread; "
            "on Spark Connect pass it the query's checkpointLocation: DeltaSink(table, checkpoint=...)"
        )
    # py4j objects are Any: py4j has no types.
    jspark: Any = spark._jsparkSession
    jvm: Any = spark._jvm
    execution = jspark.sharedState().activeStreamingQueries().get(jvm.java.util.UUID.fromString(query_id))
    if execution is None:
        raise OptionError(
            f"query {query_id} is not active any more, so its checkpoint cannot be found. If DeltaSink is called by "
            "other means than foreachBatch, pass DeltaSink(table, checkpoint=...)",
            query_id=query_id,
        )
    return str(execution.resolvedCheckpointRoot())


def _recorded_query_id(spark: "SparkSession", root: str) -> str:
    text = read(spark, f"{root}/metadata")
    try:
        return str(json.loads(text or "")["id"])
    except (ValueError, KeyError, TypeError) as exc:
        raise OptionError(
            f"{root}/metadata, in which Spark keeps the query's id, is missing or damaged. Is `checkpoint=` the "
            "checkpointLocation of this very query?",
            checkpoint=root,
        ) from exc


def read(spark: "SparkSession", path: str) -> str | None:
    """The text of a small file, or None if there is none."""
    if not _is_classic(spark):
        return _read_by_spark(spark, path)
    fs, hadoop_path = _located(spark, path)
    if not fs.exists(hadoop_path):
        return None
    stream = fs.open(hadoop_path)
    try:
        return bytes(stream.readAllBytes()).decode()
    finally:
        stream.close()


def write(spark: "SparkSession", path: str, text: str) -> None:
    """Replace a small file of classic Spark's. Who reads it meanwhile may find a part of it."""
    fs, hadoop_path = _located(spark, path)
    stream = fs.create(hadoop_path, True)
    try:
        stream.write(bytearray(text, "utf-8"))
    finally:
        stream.close()


def _located(spark: "SparkSession", path: str) -> tuple[Any, Any]:
    """The Hadoop file system of a path, and the path."""
    jspark: Any = spark._jsparkSession
    jvm: Any = spark._jvm
    located = jvm.org.apache.hadoop.fs.Path(path)
    return located.getFileSystem(jspark.sessionState().newHadoopConf()), located


def _read_by_spark(spark: "SparkSession", path: str) -> str | None:
    try:
        row = spark.read.text(path, wholetext=True).first()
    except AnalysisException as exc:
        if exc.getCondition() == "PATH_NOT_FOUND":
            return None
        raise
    return None if row is None else str(row[0])
