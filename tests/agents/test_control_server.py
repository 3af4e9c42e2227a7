"""Reports of tasks reach the run, with the number of their batch.

The channel and both of its ends are real; the reading and the run are replaced.
"""

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kafka_words import await_until

from spark_group_source.agents import task
from spark_group_source.agents.control_server import ControlServer
from spark_group_source.agents.messages import CODEC
from spark_group_source.agents.task import PlannedTask
from spark_group_source.model import OffsetRange, Piece, TopicPartition
from spark_group_source.options.table import Options
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.claims import TaskPlan
from spark_group_source.protocol.offsets import StreamOffset
from spark_group_source.reader.range_reader import ReadCounts

A, B = TopicPartition("orders", 0), TopicPartition("orders", 1)
GIVEN = {"kafka.bootstrap.servers": "b:1", "kafka.group.id": "g", "subscribe": "orders"}
SOON_S = 20
HERE = "executor-1"
NO_AGENTS: Any = SimpleNamespace(closed=lambda *_: None)
"""In place of the connected agents."""


class OneTask:
    """A control server with one plan of one task."""

    def __init__(self) -> None:
        self.reports: list[ev.TaskReported] = []
        self.server = ControlServer(
            Options.parse({**GIVEN, "memberHost": "executor", "coordinatorHost": "127.0.0.1"}),
            agents=NO_AGENTS,
            died=lambda exc: None,
            on_task_report=self.reports.append,
        )
        self.server.start()
        offset = StreamOffset(group="g", stream="s", seq=4, known={"orders": 2}, ranges={A: (0, 9), B: (5, 7)})
        self.plan: TaskPlan = self.server.plan_tasks(offset, ())

    def task(self, counts: ReadCounts, error: Exception | None = None) -> None:
        """Run one attempt of the task."""
        server = self.server
        planned = PlannedTask(server.addresses, server.secret, server.run, self.plan.name, 0, late=False)
        connection = task._connection_of(planned, None)
        with task._claimed(connection, planned, Piece(self.plan.pieces[0].ranges), HERE, counts):
            if error is not None:
                raise error


@pytest.fixture
def one_task() -> Iterator[OneTask]:
    started = OneTask()
    yield started
    for connection in task._connections.values():
        connection.close()
    task._connections.clear()
    started.server.stop()


def counts_of(*, skipped: tuple[int, int], finished: bool) -> ReadCounts:
    counts = ReadCounts()
    counts.rows_from_agent[A], counts.rows_from_brokers[A], counts.rows_from_brokers[B] = 3, 4, 2
    counts.skip(A, *skipped, "gone")
    if finished:
        counts.complete("etl")
    return counts


def test_a_task_reports_the_rows_by_source_and_the_skipped_ranges(one_task: OneTask) -> None:
    one_task.task(counts_of(skipped=(7, 9), finished=True))
    await_until(lambda: one_task.reports, SOON_S, what="the report of the task")
    assert one_task.reports == [
        ev.TaskReported(seq=4, rows_from_memory={A: 3}, rows_from_brokers={A: 4, B: 2}, skipped=(OffsetRange(A, 7, 9),))
    ]


def test_a_failed_task_reports_its_rows_and_no_skipped_ranges(one_task: OneTask) -> None:
    """The next attempt finds them again."""
    with pytest.raises(ValueError, match="the sink"):
        one_task.task(counts_of(skipped=(7, 9), finished=False), ValueError("the sink"))
    await_until(lambda: one_task.reports, SOON_S, what="the report of the task")
    assert [(report.rows_from_brokers, report.skipped) for report in one_task.reports] == [({A: 4, B: 2}, ())]


def test_a_report_that_is_too_long_is_sent_without_counts(
    one_task: OneTask, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counts = counts_of(skipped=(7, 9), finished=True)
    counts.rows_from_brokers.update({TopicPartition("orders", p): 2**60 for p in range(2_000)})
    monkeypatch.setattr(CODEC, "bytes_max", 10_000)
    with caplog.at_level(logging.WARNING):
        one_task.task(counts)
    assert "the task's report cannot be sent" in caplog.text
    await_until(lambda: not one_task.server._claims._running, SOON_S, what="the end of the task")
    assert one_task.reports == []
