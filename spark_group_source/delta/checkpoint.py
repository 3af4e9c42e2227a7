"""Reads from Spark's checkpoint which offsets a batch holds.

Runs in: the user's driver (on Spark Connect: in the server's worker for ``foreachBatch``), the command line.
Deliberately absent: the rows. The smallest and largest offset among the rows of a batch are not its range: compaction,
transaction markers and filters leave gaps at both ends.

Spark writes ``offsets/<batch id>`` before it runs a batch, and never changes it. The first line is the format's
version, the second is Spark's own, then follows one line per source: its offset (v1) or ``<source>:<offset>`` (v2). A
source without an offset so far has ``-``. A DataFrame that a query uses twice has one line per use in v1.
"""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.errors import AnalysisException

from spark_group_source.delta import table_names
from spark_group_source.delta.ledger_format import Ledger
from spark_group_source.errors import CheckpointMismatch, OptionError
from spark_group_source.host import run_files
from spark_group_source.model import TopicPartition
from spark_group_source.protocol.offsets import StreamOffset, parse

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

QUERY_ID = "sql.streaming.queryId"
"""The local property that Spark sets on the thread that runs a batch."""

ONLY_RUN = "-"
"""The run id where there is no such property: on Spark Connect a worker for ``foreachBatch`` serves one run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch:
    """A batch as Spark planned it."""

    query_id: str
    """Spark's id of the query. The checkpoint stores it, so all runs of the query have it."""
    batch_id: int
    offsets: tuple[StreamOffset, ...]
    """One for each kafka-group source that has a part in this batch: its offset differs from the previous batch."""
    other_sources: int = 0
    """The number of sources of other kinds in the query."""
    run_id: str | None = None
    """The id of the query's run; None where no query runs on this thread."""
    root: str = ""
    """The query's checkpoint."""
    topics: tuple[str, ...] = ()
    """The topics of this part of the batch; empty if it is the whole batch."""

    @property
    def scope(self) -> tuple[str, ...]:
        """The options of ``spark-group reset`` by which it does not move topics of other tables: these may have the
        batch already, and would refuse the next one."""
        return tuple(word for topic in self.topics for word in ("--topic", topic))

    def starts(self, group: str) -> dict[TopicPartition, int]:
        """Return where the ranges of a group start."""
        offsets = (offset for offset in self.offsets if offset.group == group)
        return {tp: start for offset in offsets for tp, (start, _) in offset.ranges.items()}

    def to_start(self, group: str) -> tuple[str, ...]:
        """Return the position of ``spark-group reset`` where the batch starts. The checkpoint names it in few words."""
        if not self.root:
            return table_names.to_offsets(self.starts(group))
        return "--to-checkpoint", self.root, "--batch", str(self.batch_id), *self.scope

    def of_topics(self, topics: Collection[str]) -> "PlannedBatch":
        """Return the part of the batch that has these topics."""
        parts = (offset.of_topics(topics) for offset in self.offsets)
        return replace(self, offsets=tuple(part for part in parts if part.ranges), topics=tuple(topics))


def parse_planned(query_id: str, batch_id: int, text: str, previous: str | None) -> PlannedBatch:
    """Parse the text of ``offsets/<batch id>``, with that of the batch before.

    Raises:
        CheckpointMismatch: the query has no kafka-group source, or its offset cannot be read.
    """
    lines = list(source_lines(text).values())
    ours = [line for line in dict.fromkeys(lines) if is_kafka_group(line)]
    if not ours:
        raise CheckpointMismatch(
            f"batch {batch_id} of query {query_id} has no offset of a kafka-group source, so DeltaSink cannot record "
            "it in the table. DeltaSink writes only queries that read format('kafka-group'); use "
            "writeStream.format('delta') for other queries",
            query_id=query_id,
            batch_id=batch_id,
        )
    old = set(source_lines(previous).values()) if previous is not None else set()
    offsets = [parse(line) for line in ours if line not in old]
    return PlannedBatch(
        query_id=query_id,
        batch_id=batch_id,
        offsets=tuple(offset for offset in offsets if not offset.is_initial),
        other_sources=sum(not is_kafka_group(line) for line in lines),
    )


def source_lines(text: str) -> dict[str, str]:
    """Return the offset of each source in the text of ``offsets/<batch id>``, by the source's number or name. Raises
    CheckpointMismatch for an unknown format."""
    version, _, rest = text.partition("\n")
    lines = rest.splitlines()[1:]
    if version == "v1":
        return {str(number): line for number, line in enumerate(lines)}
    if version == "v2":
        return {source: line for source, _, line in (line.partition(":") for line in lines)}
    raise CheckpointMismatch(
        f"the checkpoint's offset log has format {version[:20]!r}, and this release reads v1 and v2. Upgrade "
        "spark-group-source to a release that supports this version of Spark"
    )


def is_kafka_group(line: str) -> bool:
    """Return whether a source's offset is one of ``kafka-group``."""
    try:
        doc = json.loads(line)
    except ValueError:
        return '"group"' in line  # parse() reports that it is damaged
    # An offset of Spark's own connector has topics as keys, with objects as values.
    return isinstance(doc, dict) and {"group", "seq", "stream"} <= doc.keys() and not isinstance(doc["group"], dict)


def read_planned(spark: "SparkSession", batch_id: int, checkpoint: str | None) -> PlannedBatch:
    """Find the query that runs on this thread, and read the offsets of its batch.

    Args:
        checkpoint: the query's ``checkpointLocation``, needed on Spark Connect; None: that of the running query.

    Raises:
        OptionError: the query or its checkpoint cannot be found.
        CheckpointMismatch: as in :func:`parse_planned`.
    """
    local = _local_query_id(spark)
    root = checkpoint or _running_checkpoint(spark, local)
    query_id = _recorded_query_id(spark, root) if local is None or checkpoint else local
    if local not in (None, query_id):
        raise OptionError(
            f"query {local} uses a DeltaSink whose checkpoint {root} belongs to query {query_id}. A sink with "
            "`checkpoint=` serves one query: create a DeltaSink for each query. Nothing was written",
            checkpoint=root,
            query_id=local,
        )
    text = read(spark, f"{root}/offsets/{batch_id}")
    if text is None:
        raise OptionError(
            f"there is no {root}/offsets/{batch_id}, which Spark writes before it runs batch {batch_id}. Set "
            "`checkpoint=` to the checkpointLocation of this query",
            checkpoint=root,
            batch_id=batch_id,
        )
    previous = read(spark, f"{root}/offsets/{batch_id - 1}") if batch_id > 0 else None
    batch = parse_planned(query_id, batch_id, text, previous)
    return replace(batch, run_id=_local_run_id(spark, local), root=root)


def running_query(spark: "SparkSession") -> tuple[str, str] | None:
    """Return the ids of the query and of its run that runs on this thread; None if none does. It reads no file."""
    query_id = _local_query_id(spark)
    run_id = _local_run_id(spark, query_id)
    return None if run_id is None else (query_id or "", run_id)


def is_finished(spark: "SparkSession", root: str, batch_id: int) -> bool:
    """Return whether Spark's commit log has a batch: its ``foreachBatch`` has returned. Not on Spark Connect."""
    fs, path = table_names.hadoop_path(spark, f"{root}/commits/{batch_id}")
    return bool(fs.exists(path))


def keep_state(df: "DataFrame", root: str) -> None:
    """Let a stateful query keep the state of a batch whose rows are not written: Spark stores it when they are read.

    Spark 4.2 and newer fail a batch without it (``spark.sql.streaming.stateStore.commitValidation.enabled``).
    """
    if has_state(df.sparkSession, root):
        df.write.format("noop").mode("overwrite").save()


def has_state(spark: "SparkSession", root: str) -> bool:
    """Return whether a query is stateful: its checkpoint has state."""
    if _is_classic(spark):
        fs, path = table_names.hadoop_path(spark, f"{root}/state")
        return bool(fs.exists(path))
    files = spark.read.format("binaryFile").option("recursiveFileLookup", True)
    try:
        return not files.load(f"{root}/state").select("path").isEmpty()
    except AnalysisException as exc:
        if exc.getCondition() == "PATH_NOT_FOUND":
            return False
        raise


class CheckpointFiles(NamedTuple):
    """Access to the small files of a checkpoint."""

    read: Callable[[str], str | None]
    """Returns the text of a file; None if it does not exist."""
    write: Callable[[str, str], None]
    """Replaces a file; its folder must exist."""
    names: Callable[[str], list[str]]
    """Returns the names in a folder; none if it does not exist."""


def spark_files(spark: "SparkSession") -> CheckpointFiles:
    """Access files in any file system that Spark's Hadoop supports."""

    def names(folder: str) -> list[str]:
        fs, path = table_names.hadoop_path(spark, folder)
        return [str(status.getPath().getName()) for status in fs.listStatus(path)] if fs.exists(path) else []

    return CheckpointFiles(lambda path: read(spark, path), lambda path, text: write(spark, path, text), names)


def local_files() -> CheckpointFiles:
    """Access files on this machine. A file is replaced atomically."""

    def read_text(path: str) -> str | None:
        return _decoded(Path(path).read_bytes(), path) if Path(path).is_file() else None

    def names(folder: str) -> list[str]:
        return [path.name for path in Path(folder).iterdir()] if Path(folder).is_dir() else []

    return CheckpointFiles(read_text, lambda path, text: run_files.write_atomically(Path(path), text), names)


def batch_numbers(files: CheckpointFiles, folder: str) -> list[int]:
    """Return the numbers of the batches in one log of a checkpoint."""
    return [int(name) for name in files.names(folder) if name.isdecimal()]


def batch_lines(
    files: CheckpointFiles, root: str, batch: int | None = None, *, all_finished: bool = False
) -> tuple[int, dict[str, str]]:
    """Return the number of a batch, and the offset of each source in it, by the source's number or name.

    Args:
        root: the query's ``checkpointLocation``.
        batch: the number; Spark keeps the newest batches only. None: the last finished batch.
        all_finished: refuse a checkpoint that has a planned batch which is not finished.

    Raises:
        OptionError: there is no such batch.
        CheckpointMismatch: a batch is not finished, or the checkpoint is damaged.
    """
    planned, finished = batch_numbers(files, f"{root}/offsets"), batch_numbers(files, f"{root}/commits")
    if not planned:
        raise OptionError(
            f"{root} has no planned batch: it is not the checkpointLocation of a query, or the query never planned "
            "one. A path without a scheme is one of this host: write hdfs:///... for another file system",
            checkpoint=root,
        )
    last = max(finished, default=-1)
    unfinished = [number for number in planned if number > last]
    if unfinished and (all_finished or (batch is None and not finished)):
        raise CheckpointMismatch(
            f"{root}: batch {min(unfinished)} was planned and is not finished, so whether the sink has its rows is "
            "unknown. Start the query once more, unchanged, with trigger(availableNow=True), which finishes that "
            "batch; then run this command again",
            checkpoint=root,
            batch_id=min(unfinished),
        )
    number = last if batch is None else batch
    text = files.read(f"{root}/offsets/{number}")
    if text is not None:
        return number, source_lines(text)
    if batch is None:
        raise CheckpointMismatch(
            f"{root} has commits/{number} and no offsets/{number}: it is damaged, or an incomplete copy",
            checkpoint=root,
            batch_id=number,
        )
    raise OptionError(
        f"{root} does not have batch {number}; it has {min(planned)} to {max(planned)}. Spark keeps the newest "
        "spark.sql.streaming.minBatchesToRetain batches",
        checkpoint=root,
        batch_id=number,
    )


def positions(files: CheckpointFiles, root: str, group: str, batch: int | None = None) -> Ledger:
    """Return the group's positions in a query's checkpoint, as a ledger: after its last finished batch, or before
    ``batch``.

    Raises:
        OptionError: there is no such batch, or nothing of this group in it.
        CheckpointMismatch: the offset of the batch cannot be read.
    """
    number, lines = batch_lines(files, root, batch)
    side = 1 if batch is None else 0
    found: dict[TopicPartition, int] = {}
    ids: dict[str, str] = {}
    for offset in (parse(line) for line in lines.values() if is_kafka_group(line)):
        if offset.group == group:
            ids |= offset.topic_ids
            found |= offset.uncommitted
            found |= {tp: bounds[side] for tp, bounds in offset.ranges.items()}
    if not found:
        raise OptionError(f"batch {number} in {root} has no partition of group {group!r}", checkpoint=root)
    return Ledger(group=group).with_offsets(found, {name: ids.get(name, "") for name in {tp.topic for tp in found}})


def _is_classic(spark: "SparkSession") -> bool:
    return hasattr(spark, "_jsparkSession")


def _local_query_id(spark: "SparkSession") -> str | None:
    # None on Spark Connect, which runs the batch on a thread of the server.
    return spark.sparkContext.getLocalProperty(QUERY_ID) if _is_classic(spark) else None


def _local_run_id(spark: "SparkSession", query_id: str | None) -> str | None:
    # Not the job group of this thread, to which Spark sets it first: the user's function may set another one.
    if not _is_classic(spark):
        return ONLY_RUN
    execution = None if query_id is None else _execution(spark, query_id)
    return None if execution is None else str(execution.runId())


def _execution(spark: "SparkSession", query_id: str) -> Any:
    """Spark's object of a running query; None if it is not active. py4j objects are Any: py4j has no types."""
    jspark: Any = spark._jsparkSession
    jvm: Any = spark._jvm
    return jspark.sharedState().activeStreamingQueries().get(jvm.java.util.UUID.fromString(query_id))


def _running_checkpoint(spark: "SparkSession", query_id: str | None) -> str:
    if query_id is None:
        raise OptionError(
            "no streaming query runs on this thread. Use DeltaSink in foreachBatch; on Spark Connect, pass the query's "
            "checkpointLocation: DeltaSink(table, checkpoint=...)"
        )
    execution = _execution(spark, query_id)
    if execution is None:
        raise OptionError(
            f"query {query_id} is not active any more, so its checkpoint cannot be found. Use DeltaSink in "
            "foreachBatch, or pass the query's checkpointLocation: DeltaSink(table, checkpoint=...)",
            query_id=query_id,
        )
    return str(execution.resolvedCheckpointRoot())


def _recorded_query_id(spark: "SparkSession", root: str) -> str:
    text = read(spark, f"{root}/metadata")
    try:
        return str(json.loads(text or "")["id"])
    except (ValueError, KeyError, TypeError) as exc:
        raise OptionError(
            f"{root}/metadata, in which Spark keeps the query's id, is missing or damaged. Set `checkpoint=` to the "
            "checkpointLocation of this query",
            checkpoint=root,
        ) from exc


def read(spark: "SparkSession", path: str) -> str | None:
    """Return the text of a small file; None if it does not exist."""
    if not _is_classic(spark):
        return _read_by_spark(spark, path)
    fs, hadoop_path = table_names.hadoop_path(spark, path)
    if not fs.exists(hadoop_path):
        return None
    stream = fs.open(hadoop_path)
    try:
        return _decoded(bytes(stream.readAllBytes()), path)
    finally:
        stream.close()


def _decoded(content: bytes, path: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as exc:
        raise CheckpointMismatch(
            f"{path} is not UTF-8 text, so it is damaged or not a file of a checkpoint: {exc}"
        ) from None


def write(spark: "SparkSession", path: str, text: str) -> None:
    """Replace a small file, on classic Spark. The replacement is not atomic: a reader may see a part of the text."""
    fs, hadoop_path = table_names.hadoop_path(spark, path)
    stream = fs.create(hadoop_path, True)
    try:
        stream.write(bytearray(text, "utf-8"))
    finally:
        stream.close()


def _read_by_spark(spark: "SparkSession", path: str) -> str | None:
    try:
        row = spark.read.text(path, wholetext=True).first()
    except AnalysisException as exc:
        if exc.getCondition() == "PATH_NOT_FOUND":
            return None
        raise
    return None if row is None else str(row[0])
