"""Where tasks reach the stream reader: what they tell when they end comes to the run, with the batch that it is about.

The channel and both of its ends are real; the task's reading and the run are the test's.
"""

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kafka_words import await_until

from spark_group_source.agents import task
from spark_group_source.agents.control_server import ControlServer
from spark_group_source.agents.member_messages import CODEC
from spark_group_source.agents.task import Call
from spark_group_source.model import OffsetRange, Piece, TopicPartition
from spark_group_source.options.table import Options
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.claims import Plan
from spark_group_source.protocol.offsets import StreamOffset
from spark_group_source.reader.read_counts import ReadCounts

A, B = TopicPartition("orders", 0), TopicPartition("orders", 1)
GIVEN = {"kafka.bootstrap.servers": "b:1", "kafka.group.id": "g", "subscribe": "orders"}
SOON_S = 20
HERE = "executor-1"
NOBODY: Any = SimpleNamespace(closed=lambda *_: None)
"""In place of agents."""


class Listening:
    """A reception with one plan of one task."""

    def __init__(self) -> None:
        self.told: list[ev.TaskReported] = []
        self.reception = ControlServer(
            Options.parse({**GIVEN, "memberHost": "executor", "coordinatorHost": "127.0.0.1"}),
            hosts=NOBODY,
            died=lambda exc: None,
            read=self.told.append,
        )
        self.reception.start()
        offset = StreamOffset(group="g", stream="s", seq=4, known={"orders": 2}, ranges={A: (0, 9), B: (5, 7)})
        self.plan: Plan = self.reception.cut(offset, ())

    def task(self, counts: ReadCounts, error: Exception | None = None) -> None:
        """One try of the task."""
        here = self.reception
        call = Call(here.addresses, here.secret, here.run, self.plan.name, 0, late=False)
        with task._claimed(call, Piece(self.plan.pieces[0].ranges), HERE, counts):
            if error is not None:
                raise error


@pytest.fixture
def listening() -> Iterator[Listening]:
    made = Listening()
    yield made
    for line in task._lines.values():
        line.close()
    task._lines.clear()
    made.reception.stop()


def read(*, skipped: tuple[int, int], ends: bool) -> ReadCounts:
    counts = ReadCounts()
    counts.rows_from_agent[A], counts.rows_from_brokers[A], counts.rows_from_brokers[B] = 3, 4, 2
    counts.skip(A, *skipped, "gone")
    if ends:
        counts.complete()
    return counts


def test_a_task_tells_what_it_read_from_where_and_what_was_gone(listening: Listening) -> None:
    listening.task(read(skipped=(7, 9), ends=True))
    await_until(lambda: listening.told, SOON_S, what="word of the task")
    assert listening.told == [
        ev.TaskReported(seq=4, rows_from_memory={A: 3}, rows_from_brokers={A: 4, B: 2}, skipped=(OffsetRange(A, 7, 9),))
    ]


def test_a_task_that_fails_tells_what_it_read_and_nothing_of_losses(listening: Listening) -> None:
    """The next try finds them, or what is gone by then."""
    with pytest.raises(ValueError, match="the sink"):
        listening.task(read(skipped=(7, 9), ends=False), ValueError("the sink"))
    await_until(lambda: listening.told, SOON_S, what="word of the task")
    assert [(told.rows_from_brokers, told.skipped) for told in listening.told] == [({A: 4, B: 2}, ())]


def test_a_task_with_too_much_to_tell_ends_all_the_same(
    listening: Listening, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counts = read(skipped=(7, 9), ends=True)
    counts.rows_from_brokers.update({TopicPartition("orders", p): 2**60 for p in range(2_000)})
    monkeypatch.setattr(CODEC, "bytes_max", 10_000)
    with caplog.at_level(logging.WARNING):
        listening.task(counts)
    assert "gets no counts of what this task read" in caplog.text
    await_until(lambda: not listening.reception._claims._running, SOON_S, what="word that the task ended")
    assert listening.told == []
