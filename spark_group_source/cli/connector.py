"""Where a query of Spark's own Kafka connector stands, by its checkpoint.

Runs in: a terminal. Deliberately absent: Kafka, and checkpoints of this package's queries (``delta.checkpoint``).

Spark writes ``offsets/<batch>`` before a batch and ``commits/<batch>`` when the sink has it. The connector's offset is
JSON, ``{"orders":{"0":23,"1":5}}``: where the batch ends, of every partition that the source knows (``JsonUtils`` and
``KafkaSourceOffset`` of Spark). A new batch begins where the last one ended, so the end of the last finished batch is
where whoever takes over begins.
"""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from spark_group_source.delta.checkpoint import is_ours, source_lines
from spark_group_source.errors import CheckpointMismatch, OptionError
from spark_group_source.model import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NO_OFFSET = "-"
"""Stands for a source that has none so far."""


class Files(NamedTuple):
    """How a checkpoint is read. ``batches``: the numbers in a log's folder; ``read``: a small file's text, or None."""

    batches: Callable[[str], list[int]]
    read: Callable[[str], str | None]


class Progress(NamedTuple):
    """Where a query stands."""

    batch: int
    """The last finished one."""
    offsets: dict[TopicPartition, int]
    source: dict[TopicPartition, str]
    """The source of the query that a partition is of."""
    others: int = 0
    """Sources of other kinds in the query."""
    stateful: bool = False
    """The checkpoint also holds what the query remembers: aggregations, deduplication, joins of streams."""


def on_this_machine() -> Files:
    """Files that Python can read."""

    def batches(folder: str) -> list[int]:
        place = Path(folder)
        return [int(path.name) for path in place.iterdir() if path.name.isdecimal()] if place.is_dir() else []

    def read(path: str) -> str | None:
        return Path(path).read_text(encoding="utf-8") if Path(path).is_file() else None

    return Files(batches, read)


def by_spark(spark: "SparkSession") -> Files:
    """Files in any file system that Spark's Hadoop knows."""
    from spark_group_source.delta import checkpoint

    return Files(lambda folder: checkpoint.batches(spark, folder), lambda path: checkpoint.read(spark, path))


def progress(files: Files, root: str, sources: Collection[str] = ()) -> Progress:
    """Where the query of a checkpoint stands.

    Args:
        sources: only these sources of the query, by their numbers (or names, where it has some).

    Raises:
        OptionError: this is no such checkpoint, or it has none of those sources.
        CheckpointMismatch: the last batch is not finished, or the offsets cannot be read, or they contradict each
            other.
    """
    planned, finished = files.batches(f"{root}/offsets"), files.batches(f"{root}/commits")
    if not planned:
        raise OptionError(
            f"{root} has no offsets/0: it is no query's checkpointLocation, or its query never planned a batch. Then "
            "there is nothing to take over",
            checkpoint=root,
        )
    last = max(finished, default=-1)
    if open_ones := [batch for batch in planned if batch > last]:
        raise CheckpointMismatch(
            f"{root}: batch {min(open_ones)} was planned and is not finished; whether the sink has its rows, the "
            "checkpoint does not tell. Start the old query once more as it was, with trigger(availableNow=True), which "
            "ends that batch; then do this again",
            checkpoint=root,
            batch_id=min(open_ones),
        )
    text = files.read(f"{root}/offsets/{last}")
    if text is None:
        raise CheckpointMismatch(
            f"{root} has commits/{last} and no offsets/{last}: it is damaged, or a copy that was not complete",
            checkpoint=root,
            batch_id=last,
        )
    lines = source_lines(text)
    if unknown := sorted(set(sources) - lines.keys()):
        raise OptionError(f"{root} has no source {unknown[0]!r}; it has {', '.join(sorted(lines))}", checkpoint=root)
    found = Progress(last, {}, {}, stateful=bool(files.batches(f"{root}/state")))  # a folder for each operator
    others = 0
    for source, line in sorted(lines.items()):
        if (sources and source not in sources) or line == NO_OFFSET:
            continue
        offsets = _offsets(line, root)
        if offsets is None:
            others += 1
            continue
        for tp, at in offsets.items():
            if found.offsets.setdefault(tp, at) != at:
                raise CheckpointMismatch(
                    f"{root}: sources {found.source[tp]} and {source} both read {tp}, up to {found.offsets[tp]} and up "
                    f"to {at}. A group has one offset of a partition: take over one at a time, each into a group of "
                    f"its own, with --source {found.source[tp]} and --source {source}",
                    checkpoint=root,
                )
            found.source.setdefault(tp, source)
    if not found.offsets:
        raise OptionError(
            f"{root} has no source of Spark's Kafka connector with a partition, but {others} of other kinds",
            checkpoint=root,
        )
    return found._replace(others=others)


def _offsets(line: str, root: str) -> dict[TopicPartition, int] | None:
    """The connector's offset; None for a source of another kind, or one that has none so far."""
    if is_ours(line):
        raise OptionError(
            f"{root} is the checkpoint of a kafka-group query, whose group has its offsets. To move the group to it: "
            "spark-group reset --to-checkpoint",
            checkpoint=root,
        )
    try:
        doc = json.loads(line)
        if not isinstance(doc, dict) or not all(isinstance(entry, dict) for entry in doc.values()):
            return None
        found = {TopicPartition(topic, int(p)): at for topic, entry in doc.items() for p, at in entry.items()}
    except ValueError:
        return None
    return found if all(type(at) is int and at >= 0 for at in found.values()) else None
