"""Reports of tasks reach the run, with the number of their batch.

The channel and both of its ends are real; the reading and the run are replaced.
"""

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
from confluent_kafka import TopicPartition as LibraryPartition
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kafka_helpers import await_until

from spark_group_source.agents import messages, task
from spark_group_source.agents.channel.client import ChannelClient
from spark_group_source.agents.channel.server import ChannelLimits
from spark_group_source.agents.channel.wire import FRAME_BYTES_MAX, WireError
from spark_group_source.agents.connected_agents import ConnectedAgents, PlacedMembers
from spark_group_source.agents.control_server import PREFETCHED_MAX, UNREACHED_BATCHES, ControlServer
from spark_group_source.agents.messages import (
    CODEC,
    AgentOrders,
    AgentReport,
    Claim,
    ClaimGranted,
    ClaimRefused,
    MemberChange,
    MemberIdentity,
    MemberOrder,
    PrefetchPositions,
)
from spark_group_source.agents.task import PlannedTask
from spark_group_source.kafka.environment import Environment
from spark_group_source.kafka.translation import from_kafka
from spark_group_source.model import Identity, OffsetRange, Piece, TaskCounts, TopicPartition
from spark_group_source.options.table import Options
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.claims import TaskPlan
from spark_group_source.protocol.events import Join
from spark_group_source.protocol.offsets import StreamOffset
from spark_group_source.protocol.planner import TASK_RANGES_MAX
from spark_group_source.reader.range_reader import ReadCounts

A, B = TopicPartition("orders", 0), TopicPartition("orders", 1)
GIVEN = {"kafka.bootstrap.servers": "b:1", "kafka.group.id": "g", "subscribe": "orders"}
SOON_S = 600
KAFKA_TOPIC_CHARS_MAX = 249
HERE = "executor-1"
NO_AGENTS: Any = SimpleNamespace(closed=lambda *_: None)
"""In place of the connected agents."""


class OneTask:
    """A control server with one plan of one task."""

    def __init__(self) -> None:
        self.reports: list[ev.TaskReported] = []
        self.server = ControlServer(
            Options.parse({**GIVEN, "coordinatorHost": "127.0.0.1"}),
            local_mode=False,
            uses_agents=True,
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
        reading = Mock(side_effect=error, return_value=())
        with patch.multiple(task, open_folder=lambda *_: None, ReadCounts=lambda: counts, read_ranges=reading):
            assert list(task.read_piece(Mock(), Piece(self.plan.pieces[0].ranges), planned, Mock())) == []


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks connect, however busy the machine is."""
    monkeypatch.setattr(task, "CONNECT_S", SOON_S)


@pytest.fixture
def one_task() -> Iterator[OneTask]:
    started = OneTask()
    yield started
    for worker in task._workers.values():
        worker.close()
    task._workers.clear()
    started.server.stop()


def counts_of(*, skipped: tuple[int, int], finished: bool) -> ReadCounts:
    counts = ReadCounts()
    counts.rows_from_memory[A], counts.rows_from_brokers[A], counts.rows_from_brokers[B] = 3, 4, 2
    counts.bytes["orders"] = 900
    counts.skip(A, *skipped, "gone")
    if finished:
        counts.complete("etl")
    return counts


def test_a_task_reports_the_rows_by_source_their_bytes_and_the_skipped_ranges(one_task: OneTask) -> None:
    one_task.task(counts_of(skipped=(7, 9), finished=True))
    await_until(lambda: one_task.reports, SOON_S, what="the report of the task")
    assert one_task.reports == [
        ev.TaskReported(seq=4, counts=TaskCounts({A: 3}, {A: 4, B: 2}, (OffsetRange(A, 7, 9),), {"orders": 900}))
    ]


def test_a_failed_task_reports_its_rows_and_no_skipped_ranges(one_task: OneTask) -> None:
    """The next attempt finds them again."""
    with pytest.raises(ValueError, match="the sink"):
        one_task.task(counts_of(skipped=(7, 9), finished=False), ValueError("the sink"))
    await_until(lambda: one_task.reports, SOON_S, what="the report of the task")
    assert [report.counts for report in one_task.reports] == [TaskCounts({A: 3}, {A: 4, B: 2}, (), {"orders": 900})]


@pytest.mark.parametrize(
    ("uses_agents", "connects", "is_reported"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_executors_that_do_not_reach_the_driver_are_reported_once_on_the_driver(
    uses_agents: bool, connects: bool, is_reported: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server = ControlServer(
        Options.parse({**GIVEN, "coordinatorHost": "127.0.0.1"}), local_mode=False, uses_agents=uses_agents,
        agents=NO_AGENTS, died=lambda exc: None, on_task_report=lambda _: None,
    )  # fmt: skip

    def plan(seq: int, end: int = 1) -> TaskPlan:
        return server.plan_tasks(StreamOffset(group="g", stream="s", seq=seq, ranges={A: (0, end)}), ())

    server.start()
    try:
        for seq in range(UNREACHED_BATCHES):
            plan(seq)
            plan(seq)  # another action of the same batch
        plan(9, end=0)  # nothing to read
        assert "has connected" not in caplog.text
        if connects:
            planned = PlannedTask(server.addresses, server.secret, server.run, "an earlier plan", 0, late=False)
            task._Worker(planned).claim_known_piece(Claim(plan=planned.plan, task=0, executor=HERE))
        for seq in range(10, 13):
            plan(seq)
        text = f"group g: no task of {UNREACHED_BATCHES} batches has connected to the stream reader at 127.0.0.1:"
        assert caplog.text.count(text) == is_reported
    finally:
        server.stop()


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


def test_a_response_that_cannot_be_sent_fails_the_task_and_not_the_run(
    one_task: OneTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CODEC, "bytes_max", 200)  # less than the response has
    server = one_task.server
    plan = server.plan_tasks(replace(one_task.plan.offset, topic_ids={"orders": "i" * 200}), ())
    with closing(ChannelClient(server.addresses, CODEC, server.secret, SOON_S)) as client:
        for _ in range(2):
            refused = client.request(Claim(plan=plan.name, task=0, executor=HERE), SOON_S)
            assert isinstance(refused, ClaimRefused) and "the limit is 200" in refused.reason


def test_the_largest_piece_of_a_task_and_the_positions_of_an_agent_fit_into_one_message() -> None:
    names = [f"{n:0>{KAFKA_TOPIC_CHARS_MAX}}" for n in range(10_000)]
    first, last = names[:TASK_RANGES_MAX], 2**63 - 1
    piece = Piece(
        ranges=tuple(OffsetRange(TopicPartition(name, 99_999), last - 1, last) for name in first),
        topic_ids=dict.fromkeys(first, "i" * 22),
        leader_epochs={TopicPartition(name, 99_999): 2**31 - 1 for name in first},
    )
    assert len(CODEC.encode(ClaimGranted(piece))) < 1 << 20
    everywhere = {TopicPartition(name, 0): last for name in names}
    CODEC.encode(
        PrefetchPositions(
            positions=everywhere,
            keep=everywhere,
            topic_ids=dict.fromkeys(names, "i" * 22),
            leader_epochs=dict.fromkeys(everywhere, 2**31 - 1),
        )
    )


@pytest.mark.parametrize(("topics", "partitions", "members"), [(2_000, 12_000, 60), (10_000, 100_000, 12)])
def test_the_largest_order_and_report_of_a_member_fit_into_one_message(
    topics: int, partitions: int, members: int
) -> None:
    """All topics of the group, with the longest names, and all of its partitions. The library may list them in any
    order, here each topic's first partition, then each topic's second one, and so on."""
    names = tuple(f"{n:0>{KAFKA_TOPIC_CHARS_MAX}}" for n in range(topics))
    listed = (LibraryPartition(name, p) for p in range(partitions // topics) for name in names)
    all_, last, name = from_kafka(listed), 2**63 - 1, "n" * KAFKA_TOPIC_CHARS_MAX
    assert len(all_) == partitions
    orders: list[MemberOrder] = [
        ev.Join(slot=999, client=last, topics=names, client_id=name, instance_id=name, agent=name),
        ev.Subscribe(slot=999, topics=names),
    ]
    changes: list[MemberChange] = [
        ev.Assigned(slot=999, client=last, partitions=all_, generation=last),
        ev.Revoking(slot=999, client=last, partitions=all_, eager=False),
        ev.Lost(slot=999, client=last, partitions=all_),
    ]
    sent = [AgentOrders(received=last, lease_ms=last, number=last, client=last, order=order) for order in orders]
    reports = [
        AgentReport(agent=name, executor=name, name=name, fresh=False, received=last, number=last, change=change)
        for change in changes
    ]
    assert max(len(CODEC.encode(message)) for message in (*sent, *reports)) < FRAME_BYTES_MAX / 4
    # After a reconnect an agent receives the orders of all its members at once.
    assert members * len(CODEC.encode(sent[0])) < ChannelLimits().outbox_bytes


def test_an_agent_prefetches_a_bounded_number_of_partitions_the_busy_ones_first(one_task: OneTask) -> None:
    """Each partition is of another topic with a long name."""
    tps = [TopicPartition(f"{number:05}" + "x" * 244, 0) for number in range(PREFETCHED_MAX + 20)]
    ranges = {tp: (10**12, 10**12 + (at >= PREFETCHED_MAX)) for at, tp in enumerate(tps)}
    offset = StreamOffset(
        group="g",
        stream="s",
        seq=5,
        ranges=ranges,
        topic_ids={tp.topic: "i" * 22 for tp in tps},
        leader_epochs=dict.fromkeys(tps, 2**31 - 1),
    )
    sent: list[PrefetchPositions] = []
    agents: Any = SimpleNamespace(prefetch=lambda _, positions: sent.append(positions))
    one_task.server._agents = agents
    one_task.server.prefetch_after(offset, [PlacedMembers("a", HERE, tuple(tps))])
    (positions,) = sent
    assert set(tps[-20:]) < positions.positions.keys()
    assert len(positions.positions) == PREFETCHED_MAX
    assert CODEC.decode(CODEC.encode(positions)) == positions


def test_an_agent_without_members_reads_nothing_ahead(one_task: OneTask) -> None:
    """Its last member has moved away. Otherwise it would fill its memory, and hold it until the run ends."""
    tp = TopicPartition("orders", 0)
    offset = StreamOffset(group="g", stream="s", seq=5, ranges={tp: (0, 10)}, topic_ids={"orders": "i"})
    sent: list[tuple[str, set[TopicPartition]]] = []
    agents: Any = SimpleNamespace(prefetch=lambda agent, given: sent.append((agent, set(given.positions))))
    one_task.server._agents = agents
    one_task.server.prefetch_after(offset, [PlacedMembers("a", HERE, (tp,))])
    one_task.server.prefetch_after(offset, [])
    one_task.server.prefetch_after(offset, [])
    assert sent == [("a", {tp}), ("a", set())]


ANY_MESSAGE = st.one_of(*(st.from_type(getattr(messages, name)) for name in CODEC._messages))


def accepts(message: Any) -> bool:
    try:
        CODEC.decode(CODEC.encode(message))
    except ValueError:
        return False
    return True


IDENTITY = MemberIdentity(slot=0, client=0, identity=Identity(1, "m", b"\xc0\xff\xee"))


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(sent=st.lists(ANY_MESSAGE, max_size=5))
def test_no_message_of_a_peer_with_the_secret_raises_an_error(sent: list[Any]) -> None:
    """An error on the channel's thread would end the server, and with it the run."""
    agents = ConnectedAgents(
        environment=Environment(),
        lease_ms=1_000,
        incremental=True,
        own_member_ids=deque(),
        handle=lambda _: None,
    )
    server = ControlServer(
        Options.parse(GIVEN), local_mode=True, uses_agents=True,
        agents=agents, died=lambda exc: pytest.fail(repr(exc)), on_task_report=lambda _: None,
    )  # fmt: skip
    peer: Any = Mock()
    agents.receive(peer, AgentReport(agent="a", executor=HERE, name="", fresh=True, received=0))
    agents.admit("a")
    agents.create_member(Join(slot=0, client=0, topics=(), agent="a"))
    for number, message in enumerate(filter(accepts, sent), 1):
        if isinstance(message, AgentReport):
            change = message.change and replace(message.change, slot=0, client=0)
            server._on_message(peer, replace(message, agent="a", number=number, change=change))
        else:
            server._on_message(peer, message)


def test_an_identity_that_is_not_hexadecimal_closes_its_own_connection() -> None:
    data = CODEC.encode(
        AgentReport(agent="a", executor=HERE, name="", fresh=True, received=0, number=1, change=IDENTITY)
    )
    assert CODEC.decode(data).change == IDENTITY
    with pytest.raises(WireError, match="hexadecimal"):
        CODEC.decode(data.replace(b"c0ffee", b"coffee"))
