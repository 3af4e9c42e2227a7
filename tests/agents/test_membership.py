"""The channel between an agent and its coordinator, a real one: what the agent does when it is cut, and when nobody is
there any more."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from channel_words import Listening
from kafka_words import await_until

from spark_group_source.agents import member_messages as ms
from spark_group_source.agents import membership
from spark_group_source.agents.channel.server import Peer
from spark_group_source.agents.membership import Membership
from spark_group_source.agents.task_messages import Ahead

LEASE_MS = 600_000
"""No test lives so long: what ends an agent here is no lease."""


class Reader(Listening):
    """A stream reader that takes every agent, and answers its first report alone."""

    lease_ms = LEASE_MS

    def __init__(self) -> None:
        self.first: list[ms.AgentReport] = []
        self.last: list[ms.AgentReport] = []
        self.peers: list[Peer] = []
        super().__init__(codec=ms.CODEC)

    def _hear(self, peer: Peer, message: Any, asks: int) -> None:
        assert isinstance(message, ms.AgentReport)
        if message.over:
            self.last.append(message)
        elif peer not in self.peers:
            self.peers.append(peer)
            self.first.append(message)
            peer.send(ms.AgentOrders(taken=0, lease_ms=self.lease_ms))


@pytest.fixture
def reader() -> Iterator[Reader]:
    with Reader() as started:
        yield started


@contextmanager
def agent(reader: Reader) -> Iterator[tuple[Membership, list[Ahead]]]:
    told: list[Ahead] = []
    given = {
        "addresses": [["127.0.0.1", reader.port]],
        "secret": reader.secret.reveal(),
        "executor": "executor-1",
        "name": "one",
        "settings": {"bootstrap.servers": "127.0.0.1:1", "group.id": "g", "session.timeout.ms": str(LEASE_MS)},
    }
    made = Membership(given)
    made.start(told.append, lambda _: (0, 0))
    try:
        yield made, told
    finally:
        with suppress(Exception):
            made.stop(3)


def test_an_agent_whose_channel_is_cut_comes_back_as_the_one_that_it_was(reader: Reader) -> None:
    with agent(reader) as (made, told):
        await_until(lambda: reader.first, 20, what="the agent")
        ahead = Ahead(positions={})
        reader.peers[0].send(ahead)
        await_until(lambda: told == [ahead], 20, what="word of the next plan")
        reader.peers[0].drop("the test cuts it")
        await_until(lambda: len(reader.first) == 2, 20, what="the agent on another channel")
        first, second = reader.first
        assert (first.host, first.executor, first.fresh) == (second.host, "executor-1", True)
        assert not second.fresh, "it was welcomed before"
        assert made.ended() == ""


def test_an_agent_that_is_not_answered_on_its_channel_comes_back_on_another_long_before_its_lease_is_over(
    reader: Reader,
) -> None:
    """A channel that swallows what is sent looks like one on which nothing happens."""
    reader.lease_ms = 3_000
    with agent(reader) as (made, _):
        await_until(lambda: len(reader.first) == 3, 20, what="the agent on a third channel")
        assert {report.host for report in reader.first} == {reader.first[0].host}
        assert made.ended() == ""


def test_an_agent_ends_soon_after_nobody_listens_any_more(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before its lease is over: the stream reader listens as long as it lives."""
    monkeypatch.setattr(membership, "NOBODY_S", 0.5)
    with agent(reader) as (made, _):
        await_until(lambda: reader.first, 20, what="the agent")
        reader.server.stop()
        await_until(made.ended, 20, what="the end of the agent")
        assert "the stream reader has ended" in made.ended()


def test_an_agent_that_is_told_to_end_says_so_before(reader: Reader) -> None:
    with agent(reader) as (made, _):
        await_until(lambda: reader.first, 20, what="the agent")
        made.stop(10)
        await_until(lambda: reader.last, 20, what="its last word")
        assert made.ended() == "the agent ends"
