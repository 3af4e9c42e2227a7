"""Who knows the secret is believed, and nobody else; what was sent is what is read."""

import copy
import json
import logging
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from channel.words import CODEC, Ping
from spark_group_source.channel.frames import Frames
from spark_group_source.channel.proof import ClientSide, Refused, Seal, Secret, ServerSide, challenge, refusal
from spark_group_source.channel.wire import Codec, WireError


def body(frame: bytes) -> bytes:
    frames = Frames(10_000)
    frames.feed(frame)
    found = frames.next()
    assert found is not None
    return found


def sides(ours: Secret, theirs: Secret) -> tuple[ServerSide, ClientSide]:
    return ServerSide(ours, CODEC, challenge()), ClientSide(theirs, CODEC, challenge())


def test_both_sides_are_shown_the_secret_and_speak_under_keys_of_their_own() -> None:
    secret = Secret.new()
    server, client = sides(secret, pickle.loads(pickle.dumps(secret)))
    client.check(body(server.welcome(body(client.answer(body(server.greeting()))))))
    for role in ("client", "server"):
        out, inwards = client.seal(role), server.seal(role)
        for data in (b"one", b"two"):
            assert inwards.open(body(out.close(data))) == data
    with pytest.raises(WireError):
        server.seal("server").open(body(client.seal("client").close(b"one")))


def test_a_client_without_the_secret_is_refused_before_it_learns_anything() -> None:
    server, client = sides(Secret.new(), Secret.new())
    with pytest.raises(Refused, match="another run"):
        server.welcome(body(client.answer(body(server.greeting()))))


def test_a_server_without_the_secret_is_refused() -> None:
    secret = Secret.new()
    server, client = sides(secret, secret)
    client.answer(body(server.greeting()))
    with pytest.raises(Refused, match="does not know"):
        client.check(json.dumps({"proof": challenge().hex()}).encode())
    with pytest.raises(Refused, match="'no'"):
        client.check(body(refusal("no")))


def test_an_old_proof_is_worth_nothing() -> None:
    secret = Secret.new()
    server, client = sides(secret, secret)
    heard = body(client.answer(body(server.greeting())))
    server.welcome(heard)
    with pytest.raises(Refused):
        ServerSide(secret, CODEC, challenge()).welcome(heard)


def test_a_clients_own_proof_sent_back_is_no_proof_of_the_server() -> None:
    secret = Secret.new()
    server, client = sides(secret, secret)
    own = json.loads(body(client.answer(body(server.greeting()))))
    with pytest.raises(Refused):
        client.check(json.dumps({"proof": own["proof"]}).encode())


def test_another_release_is_told_so() -> None:
    secret = Secret.new()
    server = ServerSide(secret, Codec([Ping]), challenge())
    with pytest.raises(Refused, match="another release"):
        ClientSide(secret, CODEC, challenge()).answer(body(server.greeting()))


@given(st.binary(min_size=1, max_size=100), st.data())
def test_a_frame_that_was_changed_repeated_or_left_out_is_refused(data: bytes, draw: st.DataObject) -> None:
    key = b"k" * 32
    first, second = (body(frame) for frame in map(Seal(key).close, (data, data)))
    sender, receiver = Seal(key), Seal(key)
    first, second = body(sender.close(data)), body(sender.close(data))
    at = draw.draw(st.integers(0, len(first) - 1))
    changed = bytearray(first)
    changed[at] ^= draw.draw(st.integers(1, 255))
    with pytest.raises(WireError):
        copy.copy(receiver).open(bytes(changed))
    with pytest.raises(WireError):
        copy.copy(receiver).open(second)
    assert receiver.open(first) == data
    with pytest.raises(WireError):
        copy.copy(receiver).open(first)
    assert receiver.open(second) == data


@given(st.binary(max_size=512))
def test_garbage_is_refused_by_both(data: bytes) -> None:
    server, client = sides(Secret.new(), Secret.new())
    for hear in (server.welcome, client.answer, client.check):
        with pytest.raises(Refused):
            hear(data)


def test_a_secret_shows_itself_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    value = b"0123456789abcdef0123456789abcdef"
    secret = Secret(value)
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("test").info("%s %r %s", secret, secret, [secret])
    with pytest.raises(AttributeError):
        _ = secret.__dict__
    sent = ServerSide(secret, CODEC, challenge()).greeting()
    for text in (caplog.text, str(sent), repr(secret), f"{secret}", str(hash(secret))):
        assert "012345" not in text and value.hex()[:12] not in text
    assert secret == Secret(value) != Secret.new()
