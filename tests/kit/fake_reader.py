"""Stands for the client of reading code: chunks of records, questions, and a client that brings what a test says.

Runs in: tests. Deliberately absent: librdkafka.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa

from spark_group_source.model import TopicPartition
from spark_group_source.reader.records import Cut, Event, Run, assemble, header_bytes, header_column, packed


@dataclass(frozen=True)
class Message:
    """One record."""

    tp: TopicPartition
    offset: int
    value: bytes = b"v"
    epoch: int = -1
    headers: Sequence[tuple[str, bytes | None]] = ()


class FakeChunk:
    """As ``native.NativeChunk``."""

    def __init__(self, messages: Sequence[Message] = (), events: Sequence[Event] = ()) -> None:
        self.messages, self.events = list(messages), list(events)
        self.runs: list[Run] = []
        for tp, group in groupby(self.messages, lambda message: message.tp):
            offsets = np.array([message.offset for message in group], dtype=np.int64)
            self.runs.append(Run(tp, sum(len(run.offsets) for run in self.runs), offsets))
        self.sizes = np.array([len(message.value) for message in self.messages], dtype=np.int64)

    def leader_epoch(self, row: int) -> int:
        return self.messages[row].epoch

    def count_headers(self) -> None:
        self.sizes = self.sizes + header_bytes([message.headers for message in self.messages])

    def batch(self, cuts: Sequence[Cut], include_headers: bool) -> pa.RecordBatch:
        rows = [message for cut in cuts for message in self.messages[cut.first : cut.last]]
        return assemble(
            cuts,
            pa.nulls(len(rows), pa.binary()),
            packed([message.value for message in rows], pa.binary()),
            np.array([message.offset for message in rows], dtype=np.int64),
            np.ones(len(rows), dtype=np.int64),
            np.ones(len(rows), dtype=np.int32),
            header_column([message.headers for message in rows]) if include_headers else None,
        )

    def free(self) -> None: ...


@dataclass
class FakeQuestion:
    """As ``questions.Question``; ``answers`` are taken one after the other, and None is none yet."""

    answers: list[Any]
    given_up: bool = False

    def take(self, wait_s: float) -> tuple[Any, float] | None:
        answer = self.answers.pop(0) if self.answers else None
        return None if answer is None else (answer, float("inf"))

    def give_up(self) -> None:
        self.given_up = True


@dataclass
class FakeClient:
    """As ``native.NativeClient``; a test overrides what it asks for."""

    assigned: dict[TopicPartition, int] = field(default_factory=dict)
    moves: list[tuple[TopicPartition, int]] = field(default_factory=list)
    rk: int = 1

    def assign(self, positions: Sequence[tuple[TopicPartition, int]]) -> None:
        self.assigned = dict(positions)

    def add(self, positions: Sequence[tuple[TopicPartition, int]]) -> None:
        assert not self.assigned.keys() & dict(positions).keys(), "it is read already"
        self.assigned.update(positions)

    def drop(self, tps: Sequence[TopicPartition]) -> None:
        for tp in tps:
            del self.assigned[tp]

    def move(self, tp: TopicPartition, offset: int) -> None:
        self.moves.append((tp, offset))

    def poll(self, rows_max: int, wait_s: float) -> FakeChunk:
        return FakeChunk()

    def positions(self, tps: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(tps, -1001)

    def ask_topics(self, names: Sequence[str]) -> FakeQuestion:
        return FakeQuestion([])

    def ask_bounds(self, tp: TopicPartition) -> FakeQuestion:
        return FakeQuestion([])

    def clear(self) -> None: ...
    def close(self) -> None: ...
