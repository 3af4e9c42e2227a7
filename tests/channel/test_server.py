"""The real server over loopback: who is served, who is refused, and that nobody can stop it from serving the others."""

import os
import socket
import struct
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from channel.words import CODEC, SOON_S, Listening, Ping, Pong, until_closed
from spark_group_source.channel.frames import Frames, framed
from spark_group_source.channel.peer import FRAMES_A_TURN, Limits
from spark_group_source.channel.proof import HANDSHAKE_BYTES_MAX, ClientSide, Secret, challenge
from spark_group_source.channel.server import Server
from spark_group_source.channel.wire import FRAME_BYTES_MAX, Codec, Envelope
from spark_group_source.errors import ChannelBroken

OUTBOX = 16 << 20
"""More than the system keeps for a connection."""


def proven(there: Listening) -> tuple[socket.socket, ClientSide]:
    """A connection whose owner knows the secret, and writes frames by hand."""
    connected, frames = there.raw(), Frames(HANDSHAKE_BYTES_MAX)
    side = ClientSide(there.secret, CODEC, challenge())

    def one() -> bytes:
        while (body := frames.next()) is None:
            frames.feed(connected.recv(1 << 16))
        return body

    connected.sendall(side.answer(one()))
    side.check(one())
    return connected, side


def await_counts(there: Listening, *, connections: int) -> None:
    deadline_s = time.monotonic() + SOON_S
    while there.server.counts().connections != connections:
        assert time.monotonic() < deadline_s, there.server.counts()
        threading.Event().wait(0.01)


def test_messages_go_both_ways_and_questions_are_answered_both_ways() -> None:
    with Listening() as there, there.client() as client:
        peer = there.opened.get(timeout=SOON_S)
        assert client.send(Ping(number=1))
        assert there.heard.get(timeout=SOON_S) == (peer, Ping(number=1))
        assert client.request(Ping(number=2), SOON_S) == Pong(number=2)
        assert peer.send(Pong(number=3))
        assert client.told.get(timeout=SOON_S) == (Pong(number=3), 0)

        def answer() -> None:
            question, asks = client.told.get(timeout=SOON_S)
            client.answer(asks, Pong(number=question.number))

        thread = threading.Thread(target=answer)
        thread.start()
        assert peer.request(Ping(number=4), SOON_S) == Pong(number=4)
        thread.join()


def test_what_threads_say_at_once_arrives_whole_and_in_the_order_of_each() -> None:
    with Listening() as there, there.client() as client:
        peer = there.opened.get(timeout=SOON_S)

        def say(who: int) -> None:
            for n in range(200):
                assert peer.send(Ping(number=who * 1000 + n, load="x" * 1000))

        threads = [threading.Thread(target=say, args=(who,)) for who in range(4)]
        for thread in threads:
            thread.start()
        heard = [client.told.get(timeout=SOON_S)[0].number for _ in range(800)]
        for who in range(4):
            assert [n % 1000 for n in heard if n // 1000 == who] == list(range(200))


def test_both_sides_learn_of_the_end_and_why() -> None:
    with Listening() as there:
        with there.client() as client:
            peer = there.opened.get(timeout=SOON_S)
        assert client.gone.get(timeout=SOON_S) == "closed by this side"
        assert there.closed.get(timeout=SOON_S) == (peer, "closed by the peer")
        assert not peer.send(Ping())
        with pytest.raises(ChannelBroken):
            peer.request(Ping(), SOON_S)
        assert not client.send(Ping())
        with there.client() as client:
            there.opened.get(timeout=SOON_S).drop("it was replaced")
            assert client.gone.get(timeout=SOON_S) == "closed by the stream reader"
            assert there.closed.get(timeout=SOON_S)[1] == "it was replaced"


def test_a_question_to_an_end_that_goes_away_is_answered_by_an_error() -> None:
    with Listening() as there, there.client() as client:
        peer = there.opened.get(timeout=SOON_S)
        failed: list[ChannelBroken] = []

        def ask() -> None:
            try:
                peer.request(Ping(), SOON_S)
            except ChannelBroken as exc:
                failed.append(exc)

        thread = threading.Thread(target=ask)
        thread.start()
        client.told.get(timeout=SOON_S)
        client.close()
        thread.join(SOON_S)
        assert len(failed) == 1


def test_what_was_sent_before_the_server_stopped_arrives() -> None:
    there = Listening()
    with there.client() as client:
        peer = there.opened.get(timeout=SOON_S)

        def talk() -> None:  # what is on its way to the server is no reason to throw away what is on its way from it
            while client.send(Ping()):
                pass

        talking = threading.Thread(target=talk)
        talking.start()
        for n in range(500):
            peer.send(Ping(number=n, load="x" * 1000))
        assert there.server.stop()
        assert [client.told.get(timeout=SOON_S)[0].number for _ in range(500)] == list(range(500))
        assert client.gone.get(timeout=SOON_S)
        talking.join(SOON_S)
        assert there.closed.get(timeout=SOON_S) == (peer, "the stream reader ends")
    assert there.died.empty()
    assert there.server.stop()
    with pytest.raises(ConnectionRefusedError):
        there.raw()


def test_a_peer_that_is_gone_when_the_server_stops_does_not_keep_it_from_stopping(
    caplog: pytest.LogCaptureFixture,
) -> None:
    there = Listening()
    connected, _ = proven(there)
    there.opened.get(timeout=SOON_S)
    loop, blocked, gate = there.server._loop, threading.Event(), threading.Event()
    assert loop is not None

    def block() -> None:
        blocked.set()
        gate.wait(SOON_S)

    loop.call_soon_threadsafe(block)
    assert blocked.wait(SOON_S)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connected.close()  # a reset, which the loop has no time to see
    stopped: list[bool] = []
    stopping = threading.Thread(target=lambda: stopped.append(there.server.stop(SOON_S)))
    stopping.start()
    threading.Event().wait(0.2)
    gate.set()
    stopping.join()
    assert stopped == [True] and there.closed.qsize() == 1
    assert "Exception" not in caplog.text


def test_without_the_secret_every_call_is_refused() -> None:
    with Listening() as there:
        client = there.client(secret=Secret.new())
        with pytest.raises(ChannelBroken, match="another run"):
            client.open(1.0)
        assert there.opened.empty() and there.heard.empty() and there.closed.empty()
        assert there.server.counts().refused
        there.serves()


def test_another_release_is_refused_by_its_name() -> None:
    with Listening(codec=Codec([Ping])) as there, pytest.raises(ChannelBroken, match="another release"):
        there.client().open(1.0)


@given(st.binary(min_size=1, max_size=2_000))
@settings(max_examples=50)
def test_garbage_closes_its_connection_and_no_other(data: bytes) -> None:
    with Listening() as there:
        with there.raw() as stranger, there.client() as client:
            stranger.sendall(data)
            assert client.request(Ping(number=1), SOON_S) == Pong(number=1)
            stranger.shutdown(socket.SHUT_WR)
            until_closed(stranger)
            host, port = stranger.getsockname()
        assert f"{host}:{port}" not in {there.opened.get().address for _ in range(there.opened.qsize())}


@given(st.binary(min_size=1, max_size=2_000), st.booleans())
@settings(max_examples=50)
def test_garbage_of_a_proven_peer_closes_its_connection_and_no_other(data: bytes, sealed: bool) -> None:
    with Listening() as there:
        connected, side = proven(there)
        with connected, there.client() as client:
            connected.sendall(side.seal("client").close(data) if sealed else framed(data))
            assert client.request(Ping(number=1), SOON_S) == Pong(number=1)
            until_closed(connected)
        reason = there.closed.get(timeout=SOON_S)[1]
        assert "proof is wrong" in reason or sealed
        assert there.heard.qsize() == 1


def test_a_stranger_may_send_little_and_nothing_of_a_long_frame_is_waited_for() -> None:
    with Listening() as there, there.raw() as stranger:
        stranger.sendall(struct.pack(">I", HANDSHAKE_BYTES_MAX + 1))
        assert b"refused" in until_closed(stranger)
        there.serves()


def test_a_proven_peers_frame_is_bounded_too() -> None:
    with Listening() as there:
        connected, _ = proven(there)
        with connected:
            connected.sendall(struct.pack(">I", FRAME_BYTES_MAX + 100))
            assert "frame of" in there.closed.get(timeout=SOON_S)[1]
            until_closed(connected)


def test_half_open_and_slow_connections_end_by_themselves_and_others_are_served() -> None:
    with Listening(limits=Limits(handshake_s=1.0)) as there:
        mute = [there.raw() for _ in range(50)]
        slow = there.raw()
        for byte in struct.pack(">I", 100):
            slow.sendall(bytes([byte]))
            there.serves()
        for each in (*mute, slow):
            assert b"refused" in until_closed(each)
            each.close()
        await_counts(there, connections=0)
        assert there.server.counts().refused == 51


def test_strangers_that_fill_the_places_of_strangers_do_not_keep_out_who_knows_the_secret() -> None:
    with Listening(limits=Limits(unproven=8)) as there:
        strangers = [there.raw() for _ in range(30)]
        for _ in range(3):
            there.serves()
        assert there.server.counts().unproven <= 8
        until_closed(strangers[0])  # the oldest went first
        for each in strangers:
            each.close()


def test_connections_are_counted_and_bounded() -> None:
    with Listening(limits=Limits(connections=2, unproven=2)) as there:
        with there.client() as first, there.client():
            third = there.client()
            with pytest.raises(ChannelBroken):
                third.open(0.5)
            assert first.request(Ping(number=1), SOON_S) == Pong(number=1)
        await_counts(there, connections=0)
        there.serves()


def test_a_peer_that_says_nothing_any_more_is_closed() -> None:
    with Listening(limits=Limits(idle_s=0.5)) as there:
        connected, _ = proven(there)
        with connected:
            assert "said nothing" in there.closed.get(timeout=SOON_S)[1]


def test_a_peer_that_takes_nothing_is_closed_at_its_bound_and_others_are_served() -> None:
    with Listening(limits=Limits(outbox_bytes=OUTBOX)) as there:
        connected, _ = proven(there)
        peer = there.opened.get(timeout=SOON_S)
        with connected, there.client() as client:
            load, sent = "x" * 100_000, 0
            while peer.send(Ping(load=load)):
                sent += 1
                assert sent < 1_000, "nothing bounds it"
                assert client.request(Ping(number=1), SOON_S) == Pong(number=1)
            assert "did not take" in there.closed.get(timeout=SOON_S)[1]
            assert sent * len(load) > OUTBOX, "it was closed before its bound"


def test_a_burst_beyond_the_bound_closes_the_peer_before_it_is_kept() -> None:
    with Listening(limits=Limits(outbox_bytes=1000)) as there, there.client():
        peer = there.opened.get(timeout=SOON_S)
        assert not peer.send(Ping(load="x" * 2000))
        assert "did not take" in there.closed.get(timeout=SOON_S)[1]


def test_a_peer_that_never_pauses_has_its_turn_and_no_more() -> None:
    with Listening() as there:
        connected, side = proven(there)
        seal = side.seal("client")
        flood = b"".join(seal.close(CODEC.encode(Envelope(Ping(number=-1)))) for _ in range(20_000))
        with connected, there.client() as client:
            connected.setblocking(False)
            sent = connected.send(flood)
            assert client.request(Ping(number=1), SOON_S) == Pong(number=1)
            heard = [there.heard.get(timeout=SOON_S)[1].number for _ in range(there.heard.qsize())]
            connected.setblocking(True)
            connected.sendall(flood[sent:])
            while len(heard) < 20_001:
                heard.append(there.heard.get(timeout=SOON_S)[1].number)
        assert heard.count(-1) == 20_000 and heard.count(1) == 1


def test_one_turn_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two turns of one peer the loop looks at the others."""
    with Listening() as there:
        connected, side = proven(there)
        peer = there.opened.get(timeout=SOON_S)
        turns: list[int] = []
        take = peer._take

        def counted() -> None:
            before = there.heard.qsize()
            take()
            turns.append(there.heard.qsize() - before)

        monkeypatch.setattr(type(peer), "_take", lambda _: counted())
        seal = side.seal("client")
        with connected:
            connected.sendall(b"".join(seal.close(CODEC.encode(Envelope(Ping()))) for _ in range(100)))
            for _ in range(100):
                there.heard.get(timeout=SOON_S)
                assert max(turns, default=0) <= FRAMES_A_TURN


def test_a_bug_of_ours_in_a_callback_is_told_and_ends_the_server() -> None:
    there = Listening()

    def broken(*_: object) -> None:
        raise KeyError("our bug")

    there.server._on_message = broken
    with there.client() as client:
        client.send(Ping())
        assert isinstance(there.died.get(timeout=SOON_S), KeyError)
        assert client.gone.get(timeout=SOON_S)
    assert there.server.stop()


def test_a_port_that_is_taken_is_said_with_the_remedy() -> None:
    with Listening() as there:
        second = Server(
            CODEC,
            Secret.new(),
            on_open=lambda *_: None,
            on_message=lambda *_: None,
            on_closed=lambda *_: None,
            died=lambda _: None,
            hosts=["127.0.0.1"],
            port=there.port,
        )
        with pytest.raises(ChannelBroken, match="coordinatorPort"):
            second.start()
        assert second.stop()


def test_it_listens_at_all_addresses_with_one_port() -> None:
    server = Server(
        CODEC,
        Secret.new(),
        on_open=lambda *_: None,
        on_message=lambda *_: None,
        on_closed=lambda *_: None,
        died=lambda _: None,
    )
    port = server.start()
    hosts = ["127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() else [])]
    for host in hosts:
        socket.create_connection((host, port), timeout=SOON_S).close()
    assert server.stop()


def test_half_of_the_files_of_a_process_are_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 4096))
    assert Limits.of_this_process().connections == 512
    monkeypatch.setattr("resource.getrlimit", lambda _: (20_000_000, 20_000_000))
    assert Limits.of_this_process().connections == 10_000


def test_no_secret_is_in_what_goes_over_the_wire_or_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    value = os.urandom(32)
    caplog.set_level("DEBUG")
    with Listening(secret=Secret(value)) as there:
        with pytest.raises(ChannelBroken) as refused:
            there.client(secret=Secret(b"other" * 7)).open(0.3)
        with there.raw() as stranger:
            stranger.sendall(framed(b"x"))
            told = until_closed(stranger)
        there.serves()
    for shown in (told, caplog.text.encode(), str(refused.value).encode(), repr(there.server).encode()):
        assert value not in shown and value.hex().encode() not in shown and b"other" * 2 not in shown
