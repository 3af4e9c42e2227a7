"""The server over loopback: authenticated peers are served, others are refused, and none delays the others."""

import errno
import itertools
import os
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from unittest.mock import Mock

import pytest
from channel_helpers import CODEC, SOON_S, Ping, Pong, Question, RecordingServer, await_refused, until_closed
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka_helpers import await_until

from spark_group_source.agents.channel import server
from spark_group_source.agents.channel.server import MESSAGES_PER_TURN, ChannelLimits, ChannelPeer, ChannelServer
from spark_group_source.agents.channel.wire import (
    FIELD_BYTES,
    FRAME_BYTES_MAX,
    REFUSED,
    Handshake,
    Secret,
    accept_greeting,
    frame,
    new_challenge,
    receive_exactly,
    verify_server,
)
from spark_group_source.errors import ChannelBroken

OUTBOX = 16 << 20
"""More than the system buffers for a connection."""


def proven(there: RecordingServer) -> tuple[socket.socket, Handshake]:
    """A connection after the handshake, on which a test sends frames by hand."""
    connected, challenge, until_s = there.raw(), new_challenge(), time.monotonic() + SOON_S
    greeting = receive_exactly(connected, 2 * FIELD_BYTES, until_s)
    hands = accept_greeting(there.secret, greeting, challenge)
    connected.sendall(challenge + hands.proof("client"))
    verify_server(hands, receive_exactly(connected, FIELD_BYTES, until_s))
    return connected, hands


def test_messages_are_sent_both_ways_and_requests_are_answered() -> None:
    with RecordingServer() as there, there.client() as client:
        assert client.send(Ping(number=1))
        peer, message = there.received.get(timeout=SOON_S)
        assert message == Ping(number=1)
        assert client.request(Question(number=2), SOON_S) == Pong(number=2)
        assert peer.send(Pong(number=3))
        assert client.next() == Pong(number=3)


def test_messages_of_several_threads_arrive_whole_and_in_each_threads_order() -> None:
    with RecordingServer() as there, there.client() as client:
        client.send(Ping())
        peer = there.peer()

        def send_all(thread_number: int) -> None:
            for n in range(200):
                assert peer.send(Ping(number=thread_number * 1000 + n, load="x" * 1000))

        threads = [threading.Thread(target=send_all, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        received = [client.next().number for _ in range(800)]
        for number in range(4):
            assert [n % 1000 for n in received if n // 1000 == number] == list(range(200))


def test_a_server_waits_until_its_fixed_port_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The previous run of a query may take some seconds to stop."""
    monkeypatch.setattr(server, "PORT_RETRY_S", 0.01)
    taken = socket.create_server(("127.0.0.1", 0))
    attempts = []
    listen_once = server._listen

    def listen(hosts: list[str], port: int) -> list[socket.socket]:
        attempts.append(port)
        if len(attempts) == 3:
            taken.close()
        return listen_once(hosts, port)

    monkeypatch.setattr(server, "_listen", listen)
    (found,) = server.listen(["127.0.0.1"], taken.getsockname()[1], wait_s=SOON_S)
    found.close()
    assert len(attempts) == 3


def test_both_ends_report_why_a_connection_ended() -> None:
    with RecordingServer() as there:
        with there.client() as client:
            client.send(Ping())
            peer = there.peer()
        assert "closed by this side" in client.await_end()
        assert there.closed.get(timeout=SOON_S) == (peer, "closed by the peer")
        assert not peer.send(Ping())
        assert not client.send(Ping())
        with there.client() as client:
            client.send(Ping())
            there.peer().drop("it was replaced")
            assert "closed by the peer" in client.await_end()
            assert there.closed.get(timeout=SOON_S)[1] == "it was replaced"


def test_a_request_fails_when_the_server_drops_the_connection() -> None:
    with RecordingServer() as there, there.client() as client:
        there.server._on_message = lambda peer, *_: peer.drop("no answer")
        with pytest.raises(ChannelBroken, match="closed by the peer"):
            client.request(Question(), SOON_S)


def test_a_message_to_a_connection_that_is_being_closed_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """Such as an order to an agent that has opened another connection: it is sent again over that one."""
    with RecordingServer() as there, there.client() as client:

        def replace(peer: ChannelPeer, _: object) -> None:
            peer.send(Ping(number=1))
            peer.drop("it was replaced")
            peer.send(Ping(number=2))

        there.server._on_message = replace
        client.send(Ping())
        assert client.next().number == 1
        assert "closed by the peer" in client.await_end()
        assert there.closed.get(timeout=SOON_S)[1] == "it was replaced"
    assert not [record for record in caplog.records if record.threadName == "channel"]


def test_messages_sent_before_the_server_stops_arrive() -> None:
    there = RecordingServer()
    with there.client() as client:
        client.send(Ping())
        peer = there.peer()

        def keep_sending() -> None:  # unread incoming messages must not discard outgoing ones
            while client.send(Ping()):
                pass

        talking = threading.Thread(target=keep_sending)
        talking.start()
        for n in range(500):
            peer.send(Ping(number=n, load="x" * 1000))
        came: list[int] = []
        reading = threading.Thread(target=lambda: came.extend(client.next().number for _ in range(500)))
        reading.start()
        assert there.server.stop(SOON_S)
        reading.join(SOON_S)
        assert came == list(range(500))
        assert client.await_end()
        talking.join(SOON_S)
        assert there.closed.get(timeout=SOON_S) == (peer, "the stream reader stops")
    assert there.died.empty()
    assert there.server.stop()
    with pytest.raises(ConnectionRefusedError):
        there.raw()


def test_the_server_stops_while_a_peer_disconnects(
    caplog: pytest.LogCaptureFixture,
) -> None:
    there = RecordingServer()
    connected, hands = proven(there)
    connected.sendall(hands.signer("client").sign(CODEC.encode(Ping())))
    there.peer()
    loop, blocked, gate = there.server._loop, threading.Event(), threading.Event()
    assert loop is not None

    def block() -> None:
        blocked.set()
        gate.wait(SOON_S)

    loop.call_soon_threadsafe(block)
    assert blocked.wait(SOON_S)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connected.close()  # a reset, which the blocked loop does not see
    stopped: list[bool] = []
    stopping = threading.Thread(target=lambda: stopped.append(there.server.stop(SOON_S)))
    stopping.start()
    threading.Event().wait(0.2)
    gate.set()
    stopping.join()
    assert stopped == [True] and there.closed.qsize() == 1
    assert "Exception" not in caplog.text


@pytest.mark.parametrize("knows_the_secret", [True, False])
def test_the_server_stops_in_the_middle_of_a_handshake(knows_the_secret: bool) -> None:
    """Nothing can be written behind the end of the stream."""
    there = RecordingServer()
    loop, blocked, gate = there.server._loop, threading.Event(), threading.Event()
    assert loop is not None

    def block() -> None:
        blocked.set()
        gate.wait(SOON_S)

    with there.raw() as connected:
        challenge = new_challenge()
        greeting = receive_exactly(connected, 2 * FIELD_BYTES, time.monotonic() + SOON_S)
        secret = there.secret if knows_the_secret else Secret.new()
        (serving,) = there.server._serving
        loop.call_soon_threadsafe(block)
        assert blocked.wait(SOON_S)
        loop.call_soon_threadsafe(there.server._shut_down, SOON_S)
        connected.sendall(challenge + accept_greeting(secret, greeting, challenge).proof("client"))
        gate.set()
        assert until_closed(connected) == b""
    assert there.server.stop(SOON_S)
    assert serving.exception() is None


def test_clients_without_the_secret_are_refused_and_counted_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with RecordingServer() as there:
        await_refused([("127.0.0.1", there.port)], "another run")
        assert there.received.empty() and there.closed.empty()
        assert there.server.refused
        assert caplog.messages.count("control channel: refused 1 connections") == 1, "the next line is due in a minute"
        there.assert_serves()


@given(st.binary(min_size=1, max_size=2_000))
@settings(max_examples=50)
def test_garbage_closes_only_its_own_connection(data: bytes) -> None:
    with RecordingServer() as there:
        with there.raw() as stranger, there.client() as client:
            stranger.sendall(data)
            assert client.request(Question(number=1), SOON_S) == Pong(number=1)
            stranger.shutdown(socket.SHUT_WR)
            until_closed(stranger)
        assert there.received.qsize() == 1


@given(st.binary(min_size=1, max_size=2_000), st.booleans())
@settings(max_examples=50)
def test_garbage_of_a_proven_peer_closes_only_its_own_connection(data: bytes, signed: bool) -> None:
    with RecordingServer() as there:
        connected, hands = proven(there)
        with connected, there.client() as client:
            connected.sendall(hands.signer("client").sign(data) if signed else frame(data))
            assert client.request(Question(number=1), SOON_S) == Pong(number=1)
            until_closed(connected)
        reason = there.closed.get(timeout=SOON_S)[1]
        assert "MAC" in reason or signed
        assert there.received.qsize() == 1


def test_a_proven_peers_frames_are_bounded() -> None:
    with RecordingServer() as there:
        connected, _ = proven(there)
        with connected:
            connected.sendall(struct.pack(">I", FRAME_BYTES_MAX + 100))
            assert "a frame of" in there.closed.get(timeout=SOON_S)[1]
            until_closed(connected)


def test_half_open_and_slow_connections_time_out_and_others_are_served() -> None:
    with RecordingServer(limits=ChannelLimits(handshake_s=1.0)) as there:
        mute = [there.raw() for _ in range(50)]
        slow = there.raw()
        for byte in b"slow":
            with suppress(ConnectionError):  # on a busy machine its time is over already
                slow.sendall(bytes([byte]))
            there.assert_serves()
        for each in mute:
            assert until_closed(each).endswith(REFUSED)
        until_closed(slow)
        for each in (*mute, slow):
            each.close()
        await_until(lambda: not there.server._peers, what="no connection")
        assert there.server.refused >= 51, "those, and clients that a busy machine delays"


def test_unproven_connections_do_not_keep_out_clients_with_the_secret() -> None:
    with RecordingServer(limits=ChannelLimits(unproven=8)) as there:
        strangers = [there.raw() for _ in range(30)]
        for _ in range(3):
            there.assert_serves()
        assert len(there.server._unproven) <= 8
        until_closed(strangers[0])  # the oldest is closed first
        for each in strangers:
            each.close()


def test_clients_that_connect_together_complete_their_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than may be without a proof: those that are turned away are counted, and try again."""
    monkeypatch.setattr(server, "UNPROVEN_S", 2 * SOON_S)  # no busy machine delays a handshake for so long
    clients, together = 150, threading.Barrier(150)
    with RecordingServer(limits=ChannelLimits(unproven=8)) as there:

        def connect(number: int) -> int:
            together.wait(SOON_S)
            with there.client() as client:
                return int(client.request(Question(number=number), SOON_S).number)

        strangers = [there.raw() for _ in range(8)]
        await_until(lambda: len(there.server._unproven) == 8, what="connections without a proof")
        with ThreadPoolExecutor(clients) as pool:
            connected = pool.map(connect, range(clients))
            await_until(lambda: there.server.refused > 0, what="a client that is turned away")
            for each in strangers:
                each.close()
            assert list(connected) == list(range(clients))


@pytest.mark.parametrize("failures", [3, None], ids=["for a while", "until the server stops"])
def test_the_server_pauses_when_it_cannot_accept_a_connection(
    failures: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts, failed, accept = [0], threading.Event(), socket.socket.accept

    def no_files(listening: socket.socket) -> tuple[socket.socket, Any]:
        attempts[0] += 1
        if failures is not None and attempts[0] > failures:
            return accept(listening)
        failed.set()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", no_files)
    monkeypatch.setattr(server, "ACCEPT_PAUSE_S", SOON_S if failures is None else 0.0)
    with RecordingServer() as there:
        if failures is not None:
            there.assert_serves()
        assert failed.wait(SOON_S)
    assert caplog.text.count("cannot accept a connection: [Errno 24] Too many open files") == (failures or 1)
    assert failures is not None or attempts == [1]


def test_connections_are_bounded() -> None:
    with RecordingServer(limits=ChannelLimits(connections=2, unproven=2)) as there:
        with there.client() as first, there.client():
            with pytest.raises(ChannelBroken):
                there.client(within_s=0.5)
            assert first.request(Question(number=1), SOON_S) == Pong(number=1)
        await_until(lambda: not there.server._peers, what="no connection")
        there.assert_serves()


def test_a_silent_peer_is_closed() -> None:
    with RecordingServer(limits=ChannelLimits(idle_s=0.5)) as there:
        connected, _ = proven(there)
        with connected:
            assert "sent nothing" in there.closed.get(timeout=SOON_S)[1]


def test_a_peer_that_does_not_read_is_closed_at_its_bound_and_others_are_served() -> None:
    with RecordingServer(limits=ChannelLimits(outbox_bytes=OUTBOX)) as there:
        connected, hands = proven(there)
        connected.sendall(hands.signer("client").sign(CODEC.encode(Ping())))
        peer = there.peer()
        with connected, there.client() as client:
            load, sent = "x" * 100_000, 0
            while peer.send(Ping(load=load)):
                sent += 1
                assert sent < 1_000, "the outbox has no bound"
                assert client.request(Question(number=1), SOON_S) == Pong(number=1)
            assert "did not read" in there.closed.get(timeout=SOON_S)[1]
            assert sent * len(load) > OUTBOX, "the peer was closed before its bound"


def test_a_burst_beyond_the_bound_closes_the_peer_before_it_is_buffered() -> None:
    with RecordingServer(limits=ChannelLimits(outbox_bytes=1000)) as there, there.client() as client:
        client.send(Ping())
        peer = there.peer()
        assert not peer.send(Ping(load="x" * 2000))
        assert "did not read" in there.closed.get(timeout=SOON_S)[1]


def test_one_turn_of_a_peer_is_bounded() -> None:
    """Between two turns of one peer the loop serves the others."""
    with RecordingServer() as there:
        connected, hands = proven(there)
        rounds, all_heard = [0], threading.Event()
        loop = there.server._loop
        assert loop is not None

        def look() -> None:
            rounds.append(there.received.qsize())
            if rounds[-1] < 100:
                loop.call_soon(look)
            else:
                all_heard.set()

        signer = hands.signer("client")
        with connected:
            loop.call_soon_threadsafe(look)
            connected.sendall(b"".join(signer.sign(CODEC.encode(Ping())) for _ in range(100)))
            assert all_heard.wait(SOON_S)
        assert max(after - before for before, after in itertools.pairwise(rounds)) <= MESSAGES_PER_TURN


def test_an_exception_in_a_callback_ends_the_server_and_is_reported() -> None:
    there = RecordingServer()

    def broken(*_: object) -> None:
        raise KeyError("a bug")

    there.server._on_message = broken
    with there.client() as client:
        client.send(Ping())
        assert isinstance(there.died.get(timeout=SOON_S), KeyError)
        assert client.await_end()
    assert there.server.stop()


def test_a_port_that_stays_taken_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PORT_WAIT_S", 0.2)
    monkeypatch.setattr(server, "PORT_RETRY_S", 0.01)
    with RecordingServer() as there:
        monkeypatch.setattr(server, "_listen", attempts := Mock(wraps=server._listen))
        second = ChannelServer(
            CODEC,
            Secret.new(),
            on_message=lambda *_: None,
            on_closed=lambda *_: None,
            died=lambda _: None,
            hosts=["127.0.0.1"],
            port=there.port,
        )
        with pytest.raises(ChannelBroken, match=r"Address already in use.*coordinatorPort"):
            second.start()
        assert second.stop()
    assert attempts.call_count > 1


def test_the_server_listens_at_all_addresses_with_one_port() -> None:
    with RecordingServer(hosts=()) as there:
        for host in ["127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() else [])]:
            socket.create_connection((host, there.port), timeout=SOON_S).close()


def test_connections_take_at_most_half_of_the_file_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of the process is raised as far as it may."""
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr("resource.setrlimit", lambda _, limits: raised.append(limits))
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 4096))
    assert ChannelLimits.of_this_process().connections == 2048
    assert raised == [(4096, 4096)]
    monkeypatch.setattr("resource.getrlimit", lambda _: (20_000_000, 20_000_000))
    assert ChannelLimits.of_this_process().connections == 10_000
    assert len(raised) == 1

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("resource.setrlimit", refuse)
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 4096))
    assert ChannelLimits.of_this_process().connections == 512


def test_no_secret_is_sent_or_logged(caplog: pytest.LogCaptureFixture) -> None:
    value = os.urandom(32)
    caplog.set_level("DEBUG")
    with RecordingServer(secret=Secret(value)) as there:
        with pytest.raises(ChannelBroken) as refused:
            there.client(secret=Secret(b"other" * 7), within_s=0.3)
        with there.raw() as stranger:
            stranger.sendall(b"x" * 64)
            sent = until_closed(stranger)
        there.assert_serves()
    for shown in (sent, caplog.text.encode(), str(refused.value).encode(), repr(there.server).encode()):
        assert value not in shown and value.hex().encode() not in shown and b"other" * 2 not in shown
