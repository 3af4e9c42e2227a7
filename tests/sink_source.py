"""A streaming source for the sink's tests: it returns scripted offsets instead of reading a Kafka group.

Runs in: tests (the driver, Spark's stream reader, executor workers). Deliberately absent: Kafka, members.

The script is a JSON file with the list of offsets, one per batch; the rows of a range are derived from the offsets, so
that a test can compute which rows a table must have.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from spark_group_source import compatibility
from spark_group_source.model import OffsetRange, TopicPartition
from spark_group_source.protocol.offsets import StreamOffset, parse

if TYPE_CHECKING or compatibility.has_admission_control():
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow
else:  # on Spark 4.0 and 4.1 the tests of whole queries are skipped

    class SupportsTriggerAvailableNow:
        pass


# For Spark's Python workers, also those of child processes: without it they run the python3 of the PATH.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

SCHEMA = "topic string, partition int, offset long, value string"
Ranges = dict[tuple[str, int], tuple[int, int]]


def offset(
    seq: int,
    ranges: Ranges,
    *,
    group: str = "etl",
    stream: str = "s1",
    followed: Sequence[tuple[str, int]] = (),
    started: Sequence[tuple[str, int]] = (),
    truncated_after: Mapping[tuple[str, int], int] = MappingProxyType({}),
    topic_id: str = "id-1",
    reset_number: int = 0,
) -> StreamOffset:
    """An offset as the Kafka source would make it; ``ranges`` maps (topic, partition) to (from, until)."""
    return StreamOffset(
        group=group,
        stream=stream,
        seq=seq,
        topic_ids={topic: topic_id for topic, _ in ranges},
        known={topic: 1 for topic, _ in ranges},
        ranges={TopicPartition(*tp): pair for tp, pair in ranges.items()},
        reset_number=reset_number,
        followed=frozenset(TopicPartition(*tp) for tp in followed),
        started=frozenset(TopicPartition(*tp) for tp in started),
        truncated_after={TopicPartition(*tp): at for tp, at in truncated_after.items()},
    )


def rows_of(ranges: Sequence[OffsetRange]) -> list[tuple[str, int, int, str]]:
    """Return the rows of the ranges."""
    return [(r.tp.topic, r.tp.partition, n, f"{r.tp}@{n}") for r in ranges for n in range(r.start, r.end)]


def write_script(path: Path, offsets: Sequence[StreamOffset]) -> str:
    path.write_text(json.dumps([o.to_json_dict() for o in offsets]))
    return str(path)


class _Piece(InputPartition):
    def __init__(self, rng: OffsetRange) -> None:
        super().__init__(0)
        self.rng = rng


class ScriptReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Returns one scripted batch per trigger."""

    def __init__(self, path: str) -> None:
        self.path = path

    def prepareForTriggerAvailableNow(self) -> None:
        pass

    def getDefaultReadLimit(self) -> "ReadLimit":
        return ReadAllAvailable()

    def _script(self) -> list[dict[str, Any]]:
        docs: list[dict[str, Any]] = json.loads(Path(self.path).read_text())
        return docs

    def initialOffset(self) -> dict[str, Any]:
        return StreamOffset.initial(self._script()[0]["group"]).to_json_dict()

    def latestOffset(self, start: dict[str, Any], limit: "ReadLimit") -> dict[str, Any]:
        return next((doc for doc in self._script() if doc["seq"] > start["seq"]), start)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return [_Piece(r) for r in parse(end).batch()]

    def read(self, partition: InputPartition) -> Iterator[tuple[str, int, int, str]]:
        assert isinstance(partition, _Piece)
        return iter(rows_of([partition.rng]))


class ScriptSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "scripted-group"

    def schema(self) -> str:
        return SCHEMA

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return ScriptReader(self.options["script"])
