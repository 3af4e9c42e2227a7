"""Reading ranges as a task does, from a test's arguments."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from spark_group_source.agents.agent_folder import Home
from spark_group_source.agents.prefetch import near
from spark_group_source.model import OffsetRange, Piece, TopicPartition
from spark_group_source.reader import fetch
from spark_group_source.reader.range_reader import ReadOptions
from spark_group_source.reader.read_counts import Tally


def read(settings: Mapping[str, str], ranges: Iterable[OffsetRange], **options: Any) -> Iterator[pa.RecordBatch]:
    """The batches, straight from the brokers; ``options`` as for :func:`read_near`."""
    return fetch.read_ranges(*_arguments(settings, ranges, **options))


def read_near(
    home: Home, settings: Mapping[str, str], ranges: Iterable[OffsetRange], **options: Any
) -> Iterator[pa.RecordBatch]:
    """The same, from the agent what that has in memory.

    Args:
        options: those of :class:`ReadOptions`; ``topic_ids``, ``leader_epochs``, ``tally``.
    """
    return near.read_near(home, *_arguments(settings, ranges, **options))


def _arguments(
    settings: Mapping[str, str],
    ranges: Iterable[OffsetRange],
    *,
    topic_ids: Mapping[str, str] | None = None,
    leader_epochs: Mapping[TopicPartition, int] | None = None,
    tally: Tally | None = None,
    **options: Any,
) -> tuple[Piece, ReadOptions, Tally]:
    piece = Piece(tuple(ranges), topic_ids or {}, leader_epochs or {})
    return piece, ReadOptions(settings, **options), tally or Tally()
