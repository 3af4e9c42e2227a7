"""What an agent does with callers that are slow, silent, many, or talk nonsense. It needs no Kafka for that."""

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import agent_words
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spark_group_source.agents.agent_folder import Home
from spark_group_source.agents.channel.codec import WireError
from spark_group_source.agents.channel.frames import framed
from spark_group_source.agents.prefetch import near, server
from spark_group_source.agents.task_messages import Part
from spark_group_source.model import OffsetRange, Piece, TopicPartition

ENDED_S = 20.0


@contextlib.contextmanager
def connected(home: Home) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, home.address() as address:
        connection.connect(address)
        connection.settimeout(ENDED_S)
        yield connection


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.fixture
def home(agent: Callable[..., Home]) -> Home:
    return agent()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.binary(max_size=200),
        st.binary(max_size=200).map(framed),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=9),
            lambda inner: st.lists(inner, max_size=4),
            max_leaves=12,
        ).map(lambda told: framed(json.dumps([1, 0, "Given", told]).encode())),
    )
)
def test_nonsense_ends_its_own_connection_only(home: Home, sent: bytes) -> None:
    with connected(home) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            while connection.recv(4096):
                pass
    assert agent_words.state(home)


def test_a_message_that_is_too_long_is_not_read(home: Home) -> None:
    with connected(home) as connection:
        connection.sendall(struct.pack(">I", near.CODEC.bytes_max + 1))
        assert is_closed(connection)
    assert agent_words.state(home)


def test_silent_callers_are_bounded_in_number_and_time(home: Home) -> None:
    """The first ones hold all places; whoever comes then is refused at once, and again served when they are over."""
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connected(home)) for _ in range(server.CONNECTIONS_MAX + 3)]
        for connection in silent[-3:]:
            assert is_closed(connection)
        wanted = [OffsetRange(TopicPartition("t", 0), 0, 5)]
        assert near.ask(home, Piece(tuple(wanted)), include_headers=False) == ([], wanted)
        for connection in silent:
            assert is_closed(connection)
    agent_words.await_ready(home)


def test_a_caller_that_sends_byte_by_byte_has_no_more_time_than_others(home: Home) -> None:
    with connected(home) as connection:
        connection.sendall(struct.pack(">I", 1 << 20))
        pause = threading.Event()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(round(ENDED_S / 0.05)):
                connection.sendall(b" ")
                pause.wait(0.05)
            pytest.fail("it is still listened to")


def test_an_answer_that_cannot_be_is_not_believed() -> None:
    r = OffsetRange(TopicPartition("t", 0), 5, 9)
    assert near._left([r], [Part(place=0, until=7, rows=1)]) == [OffsetRange(r.tp, 7, 9)]
    assert near._left([r], [Part(place=0, until=9, rows=4)]) == []
    for place, until in ((0, 4), (0, 10), (1, 7), (-1, 7)):
        with pytest.raises(WireError):
            near._left([r], [Part(place=place, until=until, rows=1)])
