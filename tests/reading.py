"""Read ranges as a task does, with arguments that suit tests."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from spark_group_source.agents.agent_folder import AgentFolder
from spark_group_source.agents.prefetch import client
from spark_group_source.model import OffsetRange, Piece, TopicPartition
from spark_group_source.reader import range_reader
from spark_group_source.reader.range_reader import ReadCounts, ReadOptions


def read(settings: Mapping[str, str], ranges: Iterable[OffsetRange], **options: Any) -> Iterator[pa.RecordBatch]:
    """The batches, from the brokers; ``options`` as for :func:`read_with_agent`."""
    return range_reader.read_ranges(*_arguments(settings, ranges, **options))


def read_with_agent(
    folder: AgentFolder, settings: Mapping[str, str], ranges: Iterable[OffsetRange], **options: Any
) -> Iterator[pa.RecordBatch]:
    """The same; prefetched records come from the agent.

    Args:
        options: those of :class:`ReadOptions`; ``topic_ids``, ``leader_epochs``, ``counts``.
    """
    return client.read_with_agent(folder, *_arguments(settings, ranges, **options))


def _arguments(
    settings: Mapping[str, str],
    ranges: Iterable[OffsetRange],
    *,
    topic_ids: Mapping[str, str] | None = None,
    leader_epochs: Mapping[TopicPartition, int] | None = None,
    counts: ReadCounts | None = None,
    **options: Any,
) -> tuple[Piece, ReadOptions, ReadCounts]:
    piece = Piece(tuple(ranges), topic_ids or {}, leader_epochs or {})
    return piece, ReadOptions(settings, **options), counts or ReadCounts()
