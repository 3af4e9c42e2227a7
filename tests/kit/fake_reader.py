"""Fakes of the reading client: chunks of records, requests, and a client that returns what a test specifies.

Runs in: tests. Deliberately absent: librdkafka.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa

from spark_group_source.model import TopicPartition
from spark_group_source.reader.records import (
    ClientEvent,
    PartitionRows,
    RowSlice,
    build_batch,
    header_bytes,
    header_column,
    variable_width,
)


@dataclass(frozen=True)
class Message:
    """One record."""

    tp: TopicPartition
    offset: int
    value: bytes = b"v"
    epoch: int = -1
    headers: Sequence[tuple[str, bytes | None]] = ()


class FakeChunk:
    """Stands for ``native_client.NativeChunk``."""

    def __init__(self, messages: Sequence[Message] = (), events: Sequence[ClientEvent] = ()) -> None:
        self.messages, self.events = list(messages), list(events)
        self.partition_rows: list[PartitionRows] = []
        for tp, group in groupby(self.messages, lambda message: message.tp):
            offsets = np.array([message.offset for message in group], dtype=np.int64)
            self.partition_rows.append(PartitionRows(tp, sum(len(run.offsets) for run in self.partition_rows), offsets))
        self.sizes = np.array([len(message.value) for message in self.messages], dtype=np.int64)

    def leader_epoch(self, row: int) -> int:
        return self.messages[row].epoch

    def count_headers(self) -> None:
        self.sizes = self.sizes + header_bytes([message.headers for message in self.messages])

    def batch(self, cuts: Sequence[RowSlice], columns: Sequence[str]) -> pa.RecordBatch:
        rows = [message for cut in cuts for message in self.messages[cut.first : cut.last]]
        return build_batch(
            columns,
            cuts,
            key=pa.nulls(len(rows), pa.binary()),
            value=variable_width([message.value for message in rows], pa.binary()),
            offset=np.array([message.offset for message in rows], dtype=np.int64),
            timestamp_ms=np.ones(len(rows), dtype=np.int64),
            timestamp_type=np.ones(len(rows), dtype=np.int32),
            headers=header_column([message.headers for message in rows]) if "headers" in columns else None,
        )

    def free(self) -> None: ...


@dataclass
class FakeRequest:
    """Stands for ``requests.PendingRequest``: returns ``answers`` one after the other; None: no response yet."""

    answers: list[Any]
    cancelled: bool = False

    def receive(self, wait_s: float) -> tuple[Any, float] | None:
        answer = self.answers.pop(0) if self.answers else None
        return None if answer is None else (answer, float("inf"))

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class FakeClient:
    """Stands for ``native_client.NativeClient``; a test overrides what it needs."""

    assigned: dict[TopicPartition, int] = field(default_factory=dict)
    reassigned: list[tuple[TopicPartition, int]] = field(default_factory=list)
    described: dict[str, Any] = field(default_factory=dict)
    rk: int = 1

    def assign(self, positions: Sequence[tuple[TopicPartition, int]]) -> None:
        self.assigned = dict(positions)

    def incremental_assign(self, positions: Sequence[tuple[TopicPartition, int]]) -> None:
        assert not self.assigned.keys() & dict(positions).keys(), "already assigned"
        self.assigned.update(positions)

    def incremental_unassign(self, tps: Sequence[TopicPartition]) -> None:
        for tp in tps:
            del self.assigned[tp]

    def reassign(self, tp: TopicPartition, offset: int) -> None:
        self.reassigned.append((tp, offset))

    def poll(self, rows_max: int, wait_s: float) -> FakeChunk:
        return FakeChunk()

    def positions(self, tps: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(tps, -1001)

    def describe_topics(self, names: Sequence[str]) -> FakeRequest:
        return FakeRequest([])

    def request_watermarks(self, tp: TopicPartition) -> FakeRequest:
        return FakeRequest([])

    def clear(self) -> None: ...
    def close(self) -> None: ...
