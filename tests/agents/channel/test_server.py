"""The real server over loopback: who is served, who is refused, and that nobody can stop it from serving the others."""

import itertools
import os
import socket
import struct
import threading
import time

import pytest
from channel_words import CODEC, SOON_S, Listening, Ping, Pong, until_closed
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_group_source.agents.channel.codec import FRAME_BYTES_MAX, Envelope
from spark_group_source.agents.channel.frames import exactly, framed
from spark_group_source.agents.channel.handshake import (
    FIELD_BYTES,
    REFUSED,
    Handshake,
    Secret,
    challenge,
    check_welcome,
    greeted,
)
from spark_group_source.agents.channel.server import MESSAGES_A_TURN, Limits, Server
from spark_group_source.errors import ChannelBroken

OUTBOX = 16 << 20
"""More than the system keeps for a connection."""


def proven(there: Listening) -> tuple[socket.socket, Handshake]:
    """A connection whose owner knows the secret, and writes frames by hand."""
    connected, mine, until_s = there.raw(), challenge(), time.monotonic() + SOON_S
    hands = greeted(there.secret, exactly(connected, 2 * FIELD_BYTES, until_s), mine)
    connected.sendall(mine + hands.proof("client"))
    check_welcome(hands, exactly(connected, FIELD_BYTES, until_s))
    return connected, hands


def await_connections(there: Listening, number: int) -> None:
    deadline_s = time.monotonic() + SOON_S
    while len(there.server._peers) != number:
        assert time.monotonic() < deadline_s, there.server._peers
        threading.Event().wait(0.01)


def test_messages_go_both_ways_and_questions_are_answered() -> None:
    with Listening() as there, there.client() as client:
        assert client.send(Ping(number=1))
        peer, heard = there.heard.get(timeout=SOON_S)
        assert heard == Ping(number=1)
        assert client.request(Ping(number=2), SOON_S) == Pong(number=2)
        assert peer.send(Pong(number=3))
        assert client.next() == Envelope(Pong(number=3))


def test_what_threads_say_at_once_arrives_whole_and_in_the_order_of_each() -> None:
    with Listening() as there, there.client() as client:
        client.send(Ping())
        peer = there.peer()

        def say(who: int) -> None:
            for n in range(200):
                assert peer.send(Ping(number=who * 1000 + n, load="x" * 1000))

        threads = [threading.Thread(target=say, args=(who,)) for who in range(4)]
        for thread in threads:
            thread.start()
        heard = [client.next().message.number for _ in range(800)]
        for who in range(4):
            assert [n % 1000 for n in heard if n // 1000 == who] == list(range(200))


def test_both_sides_learn_of_the_end_and_why() -> None:
    with Listening() as there:
        with there.client() as client:
            client.send(Ping())
            peer = there.peer()
        assert "closed by this side" in client.gone()
        assert there.closed.get(timeout=SOON_S) == (peer, "closed by the peer")
        assert not peer.send(Ping())
        assert not client.send(Ping())
        with there.client() as client:
            client.send(Ping())
            there.peer().drop("it was replaced")
            assert "closed by the other end" in client.gone()
            assert there.closed.get(timeout=SOON_S)[1] == "it was replaced"


def test_a_question_to_an_end_that_goes_away_is_answered_by_an_error() -> None:
    with Listening() as there, there.client() as client:
        there.server._on_message = lambda peer, *_: peer.drop("no answer")
        with pytest.raises(ChannelBroken, match="closed by the other end"):
            client.request(Ping(), SOON_S)


def test_what_was_sent_before_the_server_stopped_arrives() -> None:
    there = Listening()
    with there.client() as client:
        client.send(Ping())
        peer = there.peer()

        def talk() -> None:  # what is on its way to the server is no reason to throw away what is on its way from it
            while client.send(Ping()):
                pass

        talking = threading.Thread(target=talk)
        talking.start()
        for n in range(500):
            peer.send(Ping(number=n, load="x" * 1000))
        came: list[int] = []
        reading = threading.Thread(target=lambda: came.extend(client.next().message.number for _ in range(500)))
        reading.start()
        assert there.server.stop()
        reading.join(SOON_S)
        assert came == list(range(500))
        assert client.gone()
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
    connected, hands = proven(there)
    connected.sendall(hands.seal("client").close(CODEC.encode(Ping())))
    there.peer()
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
        with pytest.raises(ChannelBroken, match="another run"):
            there.client(secret=Secret.new(), within_s=1.0)
        assert there.heard.empty() and there.closed.empty()
        assert there.server.refused
        there.serves()


@given(st.binary(min_size=1, max_size=2_000))
@settings(max_examples=50)
def test_garbage_closes_its_connection_and_no_other(data: bytes) -> None:
    with Listening() as there:
        with there.raw() as stranger, there.client() as client:
            stranger.sendall(data)
            assert client.request(Ping(number=1), SOON_S) == Pong(number=1)
            stranger.shutdown(socket.SHUT_WR)
            until_closed(stranger)
        assert there.heard.qsize() == 1


@given(st.binary(min_size=1, max_size=2_000), st.booleans())
@settings(max_examples=50)
def test_garbage_of_a_proven_peer_closes_its_connection_and_no_other(data: bytes, sealed: bool) -> None:
    with Listening() as there:
        connected, hands = proven(there)
        with connected, there.client() as client:
            connected.sendall(hands.seal("client").close(data) if sealed else framed(data))
            assert client.request(Ping(number=1), SOON_S) == Pong(number=1)
            until_closed(connected)
        reason = there.closed.get(timeout=SOON_S)[1]
        assert "MAC" in reason or sealed
        assert there.heard.qsize() == 1


def test_a_proven_peers_frame_is_bounded_too() -> None:
    with Listening() as there:
        connected, _ = proven(there)
        with connected:
            connected.sendall(struct.pack(">I", FRAME_BYTES_MAX + 100))
            assert "a frame of" in there.closed.get(timeout=SOON_S)[1]
            until_closed(connected)


def test_half_open_and_slow_connections_end_by_themselves_and_others_are_served() -> None:
    with Listening(limits=Limits(handshake_s=1.0)) as there:
        mute = [there.raw() for _ in range(50)]
        slow = there.raw()
        for byte in b"slow":
            slow.sendall(bytes([byte]))
            there.serves()
        for each in (*mute, slow):
            assert until_closed(each).endswith(REFUSED)
            each.close()
        await_connections(there, 0)
        assert there.server.refused == 51


def test_strangers_that_fill_the_places_of_strangers_do_not_keep_out_who_knows_the_secret() -> None:
    with Listening(limits=Limits(unproven=8)) as there:
        strangers = [there.raw() for _ in range(30)]
        for _ in range(3):
            there.serves()
        assert len(there.server._unproven) <= 8
        until_closed(strangers[0])  # the oldest went first
        for each in strangers:
            each.close()


def test_connections_are_counted_and_bounded() -> None:
    with Listening(limits=Limits(connections=2, unproven=2)) as there:
        with there.client() as first, there.client():
            with pytest.raises(ChannelBroken):
                there.client(within_s=0.5)
            assert first.request(Ping(number=1), SOON_S) == Pong(number=1)
        await_connections(there, 0)
        there.serves()


def test_a_peer_that_says_nothing_any_more_is_closed() -> None:
    with Listening(limits=Limits(idle_s=0.5)) as there:
        connected, _ = proven(there)
        with connected:
            assert "sent nothing" in there.closed.get(timeout=SOON_S)[1]


def test_a_peer_that_takes_nothing_is_closed_at_its_bound_and_others_are_served() -> None:
    with Listening(limits=Limits(outbox_bytes=OUTBOX)) as there:
        connected, hands = proven(there)
        connected.sendall(hands.seal("client").close(CODEC.encode(Ping())))
        peer = there.peer()
        with connected, there.client() as client:
            load, sent = "x" * 100_000, 0
            while peer.send(Ping(load=load)):
                sent += 1
                assert sent < 1_000, "nothing bounds it"
                assert client.request(Ping(number=1), SOON_S) == Pong(number=1)
            assert "did not take" in there.closed.get(timeout=SOON_S)[1]
            assert sent * len(load) > OUTBOX, "it was closed before its bound"


def test_a_burst_beyond_the_bound_closes_the_peer_before_it_is_kept() -> None:
    with Listening(limits=Limits(outbox_bytes=1000)) as there, there.client() as client:
        client.send(Ping())
        peer = there.peer()
        assert not peer.send(Ping(load="x" * 2000))
        assert "did not take" in there.closed.get(timeout=SOON_S)[1]


def test_one_turn_is_bounded() -> None:
    """Between two turns of one peer the loop looks at the others."""
    with Listening() as there:
        connected, hands = proven(there)
        rounds, all_heard = [0], threading.Event()
        loop = there.server._loop
        assert loop is not None

        def look() -> None:
            rounds.append(there.heard.qsize())
            if rounds[-1] < 100:
                loop.call_soon(look)
            else:
                all_heard.set()

        seal = hands.seal("client")
        with connected:
            loop.call_soon_threadsafe(look)
            connected.sendall(b"".join(seal.close(CODEC.encode(Ping())) for _ in range(100)))
            assert all_heard.wait(SOON_S)
        assert max(after - before for before, after in itertools.pairwise(rounds)) <= MESSAGES_A_TURN


def test_a_bug_of_ours_in_a_callback_is_told_and_ends_the_server() -> None:
    there = Listening()

    def broken(*_: object) -> None:
        raise KeyError("our bug")

    there.server._on_message = broken
    with there.client() as client:
        client.send(Ping())
        assert isinstance(there.died.get(timeout=SOON_S), KeyError)
        assert client.gone()
    assert there.server.stop()


def test_a_port_that_is_taken_is_said_with_the_remedy() -> None:
    with Listening() as there:
        second = Server(
            CODEC,
            Secret.new(),
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
    with Listening(hosts=()) as there:
        for host in ["127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() else [])]:
            socket.create_connection((host, there.port), timeout=SOON_S).close()


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
            there.client(secret=Secret(b"other" * 7), within_s=0.3)
        with there.raw() as stranger:
            stranger.sendall(b"x" * 64)
            told = until_closed(stranger)
        there.serves()
    for shown in (told, caplog.text.encode(), str(refused.value).encode(), repr(there.server).encode()):
        assert value not in shown and value.hex().encode() not in shown and b"other" * 2 not in shown
