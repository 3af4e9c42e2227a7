"""How an executor finds the stream reader among its addresses."""

import queue
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from channel_helpers import SOON_S, Pong, Question, RecordingServer, ScopedClient, await_refused

from spark_group_source.agents.channel.wire import FIELD_BYTES, GREETING, Secret, WireError
from spark_group_source.errors import ChannelBroken


@contextmanager
def another_server(sends: bytes = b"") -> Iterator[tuple[str, int]]:
    """What listens at an address that other hosts have too: it sends something, or nothing, and keeps the line."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        taken: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    connected, _ = listening.accept()
                except OSError:
                    return
                taken.append(connected)
                connected.sendall(sends)

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


def test_the_client_connects_to_the_first_address_that_knows_the_secret() -> None:
    with RecordingServer() as there, another_server(b"SSH-2.0-x".ljust(99)) as other, swallowing() as hole:
        addresses = [("no.such.host.invalid", 1), closed_port(), other, hole, ("127.0.0.1", there.port)]
        with ScopedClient(addresses, there.secret) as client:
            assert client.address == ("127.0.0.1", there.port)
            assert client.request(Question(number=3), SOON_S) == Pong(number=3)


def test_the_error_names_each_address_and_its_error() -> None:
    with another_server(b"SSH-2.0-x".ljust(99)) as other, another_server() as mute, swallowing() as hole:
        closed = closed_port()
        error = await_refused(
            [closed, other, hole, mute],
            f"127.0.0.1:{closed[1]}: Connection refused",
            f"127.0.0.1:{other[1]}: the server at this address is not a stream reader",
            f"127.0.0.1:{mute[1]}: no answer in time",
            f"127.0.0.1:{hole[1]}: no answer in time",
            within_s=1.5,
        )
    assert error.retriable and not error.fields["refused"]


def test_an_address_that_did_not_answer_is_tried_last_from_then_on() -> None:
    """Its silence takes all of the time."""
    with RecordingServer() as there, socket.create_server(("127.0.0.1", 0)) as mute:
        addresses = [mute.getsockname(), ("127.0.0.1", there.port)]
        with pytest.raises(ChannelBroken, match="no answer in time"):
            ScopedClient(addresses, there.secret, 0.3)
        mute.accept()[0].close()
        ScopedClient(addresses, there.secret).close()
        mute.setblocking(False)
        with pytest.raises(BlockingIOError):
            mute.accept()


def test_a_name_that_cannot_be_resolved_does_not_hide_that_nothing_listens() -> None:
    unknown = ("no.such.host.invalid", 1)
    with pytest.raises(ChannelBroken) as failed:
        ScopedClient([closed_port(), unknown], Secret.new(), 0.3)
    assert failed.value.fields["refused"]
    with pytest.raises(ChannelBroken) as failed:
        ScopedClient([unknown], Secret.new(), 0.3)
    assert not failed.value.fields["refused"], "the stream reader may listen there"


@pytest.mark.parametrize("impossible", ["driver..svc", "a" * 64])
def test_an_impossible_name_of_a_host_is_an_error_of_its_address(impossible: str) -> None:
    with (
        RecordingServer() as there,
        ScopedClient([(impossible, 1), ("127.0.0.1", there.port)], there.secret) as client,
    ):
        assert client.request(Question(number=3), SOON_S) == Pong(number=3)
    with pytest.raises(ChannelBroken, match=rf"{re.escape(impossible)}:1: .*idna"):
        ScopedClient([(impossible, 1)], Secret.new(), 0.3)


def test_a_server_that_does_not_know_the_secret_is_refused() -> None:
    forged = GREETING + b"c" * FIELD_BYTES + b"p" * FIELD_BYTES
    with another_server(forged) as impostor:
        await_refused([impostor], "does not know this run's secret", within_s=0.5)


def test_the_client_retries_until_the_server_starts() -> None:
    host, port = closed_port()
    secret, found = Secret.new(), queue.Queue[ScopedClient]()
    thread = threading.Thread(target=lambda: found.put(ScopedClient([(host, port)], secret)))
    thread.start()
    threading.Event().wait(0.2)  # it has tried once
    with RecordingServer(secret=secret, port=port):
        found.get(timeout=SOON_S).close()
        thread.join(SOON_S)


def test_closing_wakes_the_receiving_thread() -> None:
    with RecordingServer() as there, there.client() as client:
        failed: list[str] = []
        thread = threading.Thread(target=lambda: failed.append(client.await_end()))
        thread.start()
        client.close()
        thread.join(SOON_S)
        assert "closed by this side" in failed[0]


def test_the_socket_is_not_closed_under_a_thread_that_is_about_to_poll_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor could be reused by another file, and the thread would poll that."""
    with RecordingServer() as there, there.client() as client:
        about, go, real = threading.Event(), threading.Event(), client._poll

        class SlowPoll:
            def poll(self, wait_ms: int) -> object:
                about.set()
                go.wait(SOON_S)
                return real.poll(wait_ms)

        monkeypatch.setattr(client, "_poll", SlowPoll())
        failed: list[str] = []
        waiting = threading.Thread(target=lambda: failed.append(client.await_end()))
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


def test_a_request_that_cannot_be_encoded_keeps_the_connection() -> None:
    with RecordingServer() as there, ScopedClient([("127.0.0.1", there.port)], there.secret) as client:
        with pytest.raises(WireError):
            client.request(object(), SOON_S)
        assert client.request(Question(number=1), SOON_S) == Pong(number=1)


def test_a_request_without_a_response_times_out_and_closes_the_connection() -> None:
    """A late response would be taken for the response to the next request."""
    with RecordingServer() as there, there.client() as client:
        there.server._on_message = lambda *_: None
        with pytest.raises(ChannelBroken, match="no answer within") as failed:
            client.request(Question(), 0.2)
        assert failed.value.fields == {"waited_ms": 200}
        assert client.end_reason == "no answer in time"


def test_a_receive_timeout_does_not_close_the_connection() -> None:
    with RecordingServer() as there, there.client() as client:
        assert client.receive(0.05) is None
        assert client.request(Question(number=1), SOON_S) == Pong(number=1)
