"""How an executor finds the stream reader among the addresses that it was told."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from channel.words import CODEC, SOON_S, Connected, Listening, Ping, Pong
from spark_group_source.channel.frames import framed
from spark_group_source.channel.peer import Limits
from spark_group_source.channel.proof import Secret, ServerSide, challenge
from spark_group_source.errors import ChannelBroken


@contextmanager
def somebody_else(says: bytes = b"") -> Iterator[tuple[str, int]]:
    """What listens at an address that other hosts have too: it says something, or nothing, and keeps the line."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        taken: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    connected, _ = listening.accept()
                except OSError:
                    return
                taken.append(connected)
                connected.sendall(says)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listening.getsockname()
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(SOON_S)
        for each in taken:
            each.close()


def closed_port() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        found: tuple[str, int] = listening.getsockname()
        return found


@contextmanager
def swallowing() -> Iterator[tuple[str, int]]:
    """An address that answers no more: its queue of connections is full, and the system drops what comes."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening:
        fillers = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(listening.getsockname())
            fillers.append(filler)
        yield listening.getsockname()
        for filler in fillers:
            filler.close()


def test_the_first_address_that_knows_the_secret_is_taken() -> None:
    with Listening() as there, somebody_else(b"SSH-2.0-x\r\n") as other, swallowing() as hole:
        addresses = [("no.such.host.invalid", 1), closed_port(), other, hole, ("127.0.0.1", there.port)]
        client = Connected(addresses, there.secret)
        assert client.open(SOON_S) == ("127.0.0.1", there.port)
        assert client.request(Ping(number=3), SOON_S) == Pong(number=3)
        client.close()


def test_of_each_address_it_is_said_what_happened() -> None:
    with somebody_else(b"SSH-2.0-x\r\n") as other, somebody_else() as mute, swallowing() as hole:
        closed = closed_port()
        client = Connected([closed, other, mute, hole], Secret.new())
        with pytest.raises(ChannelBroken) as failed:
            client.open(1.0)
    told = str(failed.value)
    assert f"127.0.0.1:{closed[1]}: Connection refused" in told
    assert f"127.0.0.1:{other[1]}: a frame of" in told  # "SSH-" as a length
    assert f"127.0.0.1:{mute[1]}: no answer in time" in told
    assert f"127.0.0.1:{hole[1]}: no answer in time" in told
    assert failed.value.retriable
    assert client.gone.empty()


def test_a_server_that_does_not_know_the_secret_is_not_believed() -> None:
    secret = Secret.new()
    greeting = ServerSide(secret, CODEC, challenge()).greeting()
    lie = framed(b'{"proof":"' + b"00" * 32 + b'"}')
    with somebody_else(greeting + lie) as liar, pytest.raises(ChannelBroken, match="does not know this run's secret"):
        Connected([liar], secret).open(0.5)


def test_a_server_that_comes_later_is_found() -> None:
    there = Listening()
    address = ("127.0.0.1", there.port)
    secret = there.secret
    assert there.server.stop()
    client = Connected([address], secret)
    later: list[Listening] = []

    def start() -> None:
        deadline_s = time.monotonic() + SOON_S
        while not client_waits.is_set() and time.monotonic() < deadline_s:
            client_waits.wait(0.1)
        again = Listening.__new__(Listening)
        again.__dict__.update(there.__dict__)
        again.server = type(there.server)(
            CODEC,
            secret,
            on_open=there.opened.put,
            on_message=lambda *_: None,
            on_closed=lambda *_: None,
            died=there.died.put,
            hosts=["127.0.0.1"],
            port=there.port,
        )
        again.server.start()
        later.append(again)

    client_waits = threading.Event()
    thread = threading.Thread(target=start)
    thread.start()
    client_waits.set()
    assert client.open(SOON_S) == address
    client.close()
    thread.join(SOON_S)
    assert later[0].server.stop()


def test_closing_ends_the_search_and_the_waiting_for_answers() -> None:
    with somebody_else() as mute:
        client = Connected([mute], Secret.new())
        failed: list[str] = []

        def search() -> None:
            try:
                client.open(SOON_S)
            except ChannelBroken as exc:
                failed.append(str(exc))

        thread = threading.Thread(target=search)
        thread.start()
        client.close()
        thread.join(SOON_S)
        assert "closed by this side" in failed[0]


def test_a_question_that_is_not_answered_ends_at_its_deadline() -> None:
    with Listening() as there, there.client() as client:
        there.server._on_message = lambda *_: None
        with pytest.raises(ChannelBroken, match="no answer within") as failed:
            client.request(Ping(), 0.2)
        assert failed.value.fields == {"waited_ms": 200}


def test_the_death_of_its_thread_is_told() -> None:
    with Listening() as there, there.client() as client:

        def broken(*_: object) -> None:
            raise KeyError("our bug")

        client._on_message = broken
        there.opened.get(timeout=SOON_S).send(Ping())
        assert "KeyError" in client.gone.get(timeout=SOON_S)
        with pytest.raises(ChannelBroken):
            client.request(Ping(), SOON_S)


def test_a_connection_on_which_nothing_is_said_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_group_source.channel.client.KEEP_ALIVE_S", 0.2)
    with Listening(limits=Limits(idle_s=1.0)) as there, there.client() as client:
        threading.Event().wait(3.0)
        assert client.request(Ping(number=1), SOON_S) == Pong(number=1)
        assert there.heard.qsize() == 1 and there.closed.empty()
