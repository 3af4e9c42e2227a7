"""How an executor finds the stream reader among the addresses that it was told."""

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from channel_words import SOON_S, Connected, Listening, Ping, Pong

from spark_group_source.agents.channel.handshake import FIELD_BYTES, GREETING, Secret
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
    with Listening() as there, somebody_else(b"SSH-2.0-x".ljust(99)) as other, swallowing() as hole:
        addresses = [("no.such.host.invalid", 1), closed_port(), other, hole, ("127.0.0.1", there.port)]
        with Connected(addresses, there.secret) as client:
            assert client.address == ("127.0.0.1", there.port)
            assert client.request(Ping(number=3), SOON_S) == Pong(number=3)


def test_of_each_address_it_is_said_what_happened() -> None:
    with somebody_else(b"SSH-2.0-x".ljust(99)) as other, somebody_else() as mute, swallowing() as hole:
        closed = closed_port()
        with pytest.raises(ChannelBroken) as failed:
            Connected([closed, other, hole, mute], Secret.new(), 1.5)
    told = str(failed.value)
    assert f"127.0.0.1:{closed[1]}: Connection refused" in told
    assert f"127.0.0.1:{other[1]}: what listens there is not a stream reader" in told
    assert f"127.0.0.1:{mute[1]}: no answer in time" in told
    assert f"127.0.0.1:{hole[1]}: no answer in time" in told
    assert failed.value.retriable and not failed.value.fields["refused"]


def test_where_nobody_listens_that_is_said() -> None:
    with pytest.raises(ChannelBroken) as failed:
        Connected([closed_port(), closed_port()], Secret.new(), 0.3)
    assert failed.value.fields["refused"]


def test_a_server_that_does_not_know_the_secret_is_not_believed() -> None:
    lie = GREETING + b"c" * FIELD_BYTES + b"p" * FIELD_BYTES
    with somebody_else(lie) as liar, pytest.raises(ChannelBroken, match="does not know this run's secret"):
        Connected([liar], Secret.new(), 0.5)


def test_a_server_that_comes_later_is_found() -> None:
    host, port = closed_port()
    secret, found = Secret.new(), queue.Queue[Connected]()
    thread = threading.Thread(target=lambda: found.put(Connected([(host, port)], secret)))
    thread.start()
    threading.Event().wait(0.2)  # it has been there once
    with Listening(secret=secret, port=port):
        found.get(timeout=SOON_S).close()
        thread.join(SOON_S)


def test_closing_ends_the_waiting_for_messages() -> None:
    with Listening() as there, there.client() as client:
        failed: list[str] = []
        thread = threading.Thread(target=lambda: failed.append(client.gone()))
        thread.start()
        client.close()
        thread.join(SOON_S)
        assert "closed by this side" in failed[0]


def test_a_socket_is_not_closed_under_a_thread_that_is_about_to_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number would be the next file's, and the thread would wait for that."""
    with Listening() as there, there.client() as client:
        about, go, real = threading.Event(), threading.Event(), client._poll

        class Late:
            def poll(self, wait_ms: int) -> object:
                about.set()
                go.wait(SOON_S)
                return real.poll(wait_ms)

        monkeypatch.setattr(client, "_poll", Late())
        failed: list[str] = []
        waiting = threading.Thread(target=lambda: failed.append(client.gone()))
        closing = threading.Thread(target=client.close)
        waiting.start()
        assert about.wait(SOON_S)
        closing.start()
        closing.join(0.3)
        assert client._socket.fileno() >= 0
        go.set()
        for thread in (closing, waiting):
            thread.join(SOON_S)
        assert "closed by this side" in failed[0] and client._socket.fileno() < 0


def test_a_question_that_is_not_answered_ends_at_its_deadline() -> None:
    with Listening() as there, there.client() as client:
        there.server._on_message = lambda *_: None
        with pytest.raises(ChannelBroken, match="no answer within") as failed:
            client.request(Ping(), 0.2)
        assert failed.value.fields == {"waited_ms": 200}


def test_no_message_in_time_is_no_end() -> None:
    with Listening() as there, there.client() as client:
        assert client.receive(0.05) is None
        assert client.request(Ping(number=1), SOON_S) == Pong(number=1)
