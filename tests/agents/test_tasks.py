"""How a task asks what it is to read, of a stream reader whose channel is real and whose answers are the test's."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from channel_words import Listening

from spark_group_source.agents import start, task
from spark_group_source.agents.channel.server import Peer
from spark_group_source.agents.member_messages import CODEC
from spark_group_source.agents.start import Order
from spark_group_source.agents.task import Call
from spark_group_source.agents.task_messages import Claim, ClaimGranted, ClaimRefused
from spark_group_source.errors import ChannelBroken
from spark_group_source.model import OffsetRange, Piece, TopicPartition
from spark_group_source.options.table import Options
from spark_group_source.reader.range_reader import ReadOptions
from spark_group_source.source import GroupStreamReader, RangesPartition

CLAIM = Claim(plan="r.1", task=0, executor="here")
GIVEN = ClaimGranted(ranges=(OffsetRange(TopicPartition("orders", 0), 5, 9),), topic_ids={"orders": "id"})

Answers = Callable[[Peer, Any, int], None]


@contextmanager
def listening(answers: Answers) -> Iterator[Call]:
    """A stream reader that answers like this."""
    with Listening(codec=CODEC) as there:
        there.server._on_message = answers
        yield Call((("127.0.0.1", there.port),), there.secret, "run", CLAIM.plan, CLAIM.task, late=True)


def test_a_connection_that_swallows_a_claim_is_given_up_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that is cut without a word looks like this."""
    monkeypatch.setattr(task, "TRY_S", 0.3)
    peers: list[Peer] = []

    def answers(peer: Peer, _: Any, asks: int) -> None:
        if peer not in peers:
            peers.append(peer)
        if peer is not peers[0]:
            peer.send(GIVEN, answers=asks)

    with listening(answers) as call:
        line = task._Line(call)
        found = line.await_piece(CLAIM)
        line.close()
    assert found == Piece(tuple(GIVEN.ranges), GIVEN.topic_ids, GIVEN.leader_epochs)
    assert len(peers) == 2


def test_a_task_that_is_told_nothing_ends_with_what_settles_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "TRY_S", 0.1)
    monkeypatch.setattr(task, "CLAIM_S", 0.5)
    with (
        listening(lambda *_: None) as call,
        pytest.raises(ChannelBroken, match=r"coordinatorHost and coordinatorPort.*memberHost"),
    ):
        task._Line(call).await_piece(CLAIM)


def test_a_claim_that_is_refused_is_not_tried_again() -> None:
    asked = []

    def answers(peer: Peer, message: Any, asks: int) -> None:
        asked.append(message)
        peer.send(ClaimRefused(reason="no plan 'r.1'"), answers=asks)

    with listening(answers) as call, pytest.raises(ChannelBroken, match=r"no plan 'r.1'"):
        task._Line(call).await_piece(CLAIM)
    assert asked == [CLAIM]


def test_a_stream_reader_that_is_not_reached_costs_the_tasks_of_a_worker_one_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(task, "REACH_S", 0.3)
    asked = []
    with listening(lambda _, message, __: asked.append(message)) as call:
        line = task._Line(call)
        for _ in range(3):
            line.confirm(CLAIM)
    assert asked == [CLAIM], "the connection was there, and nobody answered on it"
    assert caplog.text.count("the stream reader does not know") == 1
    assert line._again_s > time.monotonic()


@pytest.mark.parametrize(("zone", "rack"), [("b", "b"), ("", "everywhere"), (None, "everywhere")])
def test_all_clients_of_an_executor_that_names_its_rack_have_it(
    monkeypatch: pytest.MonkeyPatch, zone: str | None, rack: str
) -> None:
    """Those of its tasks, and of its agent: reader and members."""
    given = {"kafka.bootstrap.servers": "b:1", "kafka.group.id": "g", "subscribe": "orders", "memberHost": "executor"}
    more = {"kafka.client.rack": "everywhere", "clientRackEnv": "ZONE"}
    monkeypatch.delenv("ZONE", raising=False)
    if zone is not None:
        monkeypatch.setenv("ZONE", zone)
    orders: list[Order] = []
    read: list[Mapping[str, str]] = []
    monkeypatch.setattr(task, "_lines", {})

    def read_ranges(_: object, given: ReadOptions, __: object) -> list[object]:
        read.append(given.settings)
        return []

    def answers(peer: Peer, _: object, asks: int) -> None:
        peer.send(GIVEN, answers=asks)

    monkeypatch.setattr(start, "start", lambda order, _: orders.append(order))
    monkeypatch.setattr(task, "read_ranges", read_ranges)
    with listening(answers) as call:
        reader = GroupStreamReader(Options.parse(given | more))
        assert list(reader.read(RangesPartition(Piece(), call))) == []
    (order,) = orders
    assert [s["client.rack"] for s in (*read, order.settings, order.given["settings"])] == [rack] * 3
    assert dict(reader._options.settings)["client.rack"] == "everywhere", "other executors have their own"
