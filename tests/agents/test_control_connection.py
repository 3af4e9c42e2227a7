"""The connection of an agent over a real channel: reconnects, and the end of the stream reader."""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from channel_helpers import SOON_S, RecordingServer
from kafka_helpers import await_until

from spark_group_source.agents import hosted_members
from spark_group_source.agents.channel.server import ChannelLimits, ChannelPeer
from spark_group_source.agents.hosted_members import ControlConnection
from spark_group_source.agents.messages import CODEC, AgentOrders, AgentReport, PrefetchPositions

LEASE_MS = 600_000
"""Longer than any test: no agent ends here because of its lease."""


class StreamReader(RecordingServer):
    """A stream reader that accepts every agent, and answers the first report of each connection only."""

    lease_ms = LEASE_MS

    def __init__(self) -> None:
        self.first: list[AgentReport] = []
        self.last: list[AgentReport] = []
        self.peers: list[ChannelPeer] = []
        super().__init__(codec=CODEC)

    def _on_message(self, peer: ChannelPeer, message: Any) -> None:
        assert isinstance(message, AgentReport)
        if message.end_reason:
            self.last.append(message)
        elif peer not in self.peers:
            self.peers.append(peer)
            self.first.append(message)
            peer.send(AgentOrders(received=0, lease_ms=self.lease_ms))


@pytest.fixture
def reader() -> Iterator[StreamReader]:
    with StreamReader() as started:
        yield started


@contextmanager
def agent(reader: StreamReader) -> Iterator[tuple[ControlConnection, list[PrefetchPositions]]]:
    requested: list[PrefetchPositions] = []
    given = {
        "addresses": [["127.0.0.1", reader.port]],
        "secret": reader.secret.to_hex(),
        "executor": "executor-1",
        "name": "one",
        "settings": {"bootstrap.servers": "127.0.0.1:1", "group.id": "g", "session.timeout.ms": str(LEASE_MS)},
    }
    connection = ControlConnection(given, requested.append, lambda _: (0, 0))
    connection.start()
    try:
        yield connection, requested
    finally:
        with suppress(Exception):
            connection.stop(3)


def test_an_agent_reconnects_with_its_identity_when_its_connection_is_lost(reader: StreamReader) -> None:
    with agent(reader) as (connection, requested):
        await_until(lambda: reader.first, what="the agent")
        positions = PrefetchPositions(positions={})
        reader.peers[0].send(positions)
        await_until(lambda: requested == [positions], what="the next positions")
        reader.peers[0].drop("closed by the test")
        await_until(lambda: len(reader.first) == 2, what="the agent on another connection")
        first, second = reader.first
        assert (first.agent, first.executor, first.fresh) == (second.agent, "executor-1", True)
        assert not second.fresh, "it was accepted before"
        assert connection.end_reason == ""


def test_an_agent_pauses_before_it_reconnects_to_a_stream_reader_that_closes_each_connection(
    reader: StreamReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that cannot read the agent's report."""
    pauses = queue.Queue[float]()

    class Ended(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout is not None and threading.current_thread().name == "control-connection":
                pauses.put(timeout)
            return super().wait(timeout)

    monkeypatch.setattr(hosted_members, "RETRY_S", SOON_S)
    monkeypatch.setattr(threading, "Event", Ended)
    reader.server._on_message = lambda peer, _: peer.drop("its report is not valid")
    with agent(reader):
        assert pauses.get(timeout=SOON_S) > 0


def test_an_agent_reconnects_when_its_connection_is_silent_for_a_third_of_its_lease(
    reader: StreamReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that drops messages looks like a silent one. The share is smaller here, of a lease that does not end
    however long the machine stalls."""
    assert pytest.approx(1 / 3) == hosted_members.RECONNECT_SHARE
    monkeypatch.setattr(hosted_members, "RECONNECT_SHARE", 1_000 / LEASE_MS)
    monkeypatch.setattr(hosted_members, "HEARTBEAT_S_MAX", 0.3)
    with agent(reader) as (connection, _):
        await_until(lambda: len(reader.first) == 3, what="the agent on a third connection")
        assert {report.agent for report in reader.first} == {reader.first[0].agent}
        assert connection.end_reason == ""


def test_an_agent_with_a_long_lease_reports_before_its_connection_is_idle(
    reader: StreamReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sixth of the lease would be longer than a connection may be silent, 60 s."""
    assert ChannelLimits().idle_s > 2 * hosted_members.HEARTBEAT_S_MAX
    monkeypatch.setattr(hosted_members, "HEARTBEAT_S_MAX", 0.01)
    reports: list[AgentReport] = []
    answer = reader._on_message

    def count(peer: ChannelPeer, message: Any) -> None:
        reports.append(message)
        answer(peer, message)

    reader.server._on_message = count
    with agent(reader):
        await_until(lambda: len(reports) > 3, what="reports within a sixth of the lease")


def test_an_agent_ends_soon_after_all_addresses_refuse_connections(
    reader: StreamReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before its lease ends: the stream reader listens as long as it runs."""
    monkeypatch.setattr(hosted_members, "REFUSED_S", 0.5)
    with agent(reader) as (connection, _):
        await_until(lambda: reader.first, what="the agent")
        reader.server.stop()
        await_until(lambda: connection.end_reason, what="the end of the agent")
        assert "the stream reader has ended" in connection.end_reason


def test_an_agent_ends_soon_after_its_port_belongs_to_the_stream_reader_of_another_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a fixed coordinatorPort the next run of a query listens where the last one did."""
    monkeypatch.setattr(hosted_members, "REFUSED_S", 0.5)
    with StreamReader() as reader, agent(reader) as (connection, _):
        await_until(lambda: reader.first, what="the agent")
        reader.server.stop()
        with RecordingServer(codec=CODEC, port=reader.port):
            await_until(lambda: connection.end_reason, what="the end of the agent")
        assert "belongs to another run" in connection.end_reason


def test_an_agent_reports_that_it_ends(reader: StreamReader) -> None:
    with agent(reader) as (connection, _):
        await_until(lambda: reader.first, what="the agent")
        connection.stop(10)
        await_until(lambda: reader.last, what="its last report")
        assert connection.end_reason == "the agent ends"
