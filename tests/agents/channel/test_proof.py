"""Who knows the secret is believed, and nobody else; what was sent is what is read."""

import copy
import logging
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_group_source.agents.channel.codec import WireError
from spark_group_source.agents.channel.frames import length_of
from spark_group_source.agents.channel.handshake import (
    FIELD_BYTES,
    GREETING,
    REFUSED,
    Handshake,
    Refused,
    Seal,
    Secret,
    answered,
    challenge,
    check_welcome,
    greeted,
)

ONE, OTHER = b"1" * FIELD_BYTES, b"2" * FIELD_BYTES


def body(frame: bytes) -> bytes:
    assert length_of(frame[:4], 10_000) == len(frame) - 4
    return frame[4:]


def shaken(ours: Secret, theirs: Secret, server: bytes = ONE, client: bytes = OTHER) -> tuple[Handshake, Handshake]:
    """The server's end and the client's, after the client has answered."""
    there = greeted(theirs, GREETING + server, client)
    return answered(ours, server, client + there.proof("client")), there


def test_both_sides_prove_the_secret_and_talk_under_keys_of_their_own() -> None:
    secret = Secret.new()
    server, client = shaken(secret, pickle.loads(pickle.dumps(secret)), challenge(), challenge())
    check_welcome(client, server.proof("server"))
    for role in ("client", "server"):
        out, inwards = client.seal(role), server.seal(role)
        for data in (b"one", b"two"):
            assert inwards.open(body(out.close(data))) == data
    with pytest.raises(WireError):
        server.seal("server").open(body(client.seal("client").close(b"one")))


def test_a_client_without_the_secret_is_refused() -> None:
    with pytest.raises(Refused, match="another run"):
        shaken(Secret.new(), Secret.new())


def test_a_server_without_the_secret_is_refused() -> None:
    secret = Secret.new()
    _, client = shaken(secret, secret)
    with pytest.raises(Refused, match="does not know"):
        check_welcome(client, Handshake(Secret.new(), server=ONE, client=OTHER).proof("server"))
    with pytest.raises(Refused, match="another run"):
        check_welcome(client, REFUSED)


def test_an_old_proof_is_worth_nothing() -> None:
    secret = Secret.new()
    _, client = shaken(secret, secret)
    answered(secret, ONE, OTHER + client.proof("client"))
    with pytest.raises(Refused):
        answered(secret, challenge(), OTHER + client.proof("client"))


def test_a_clients_own_proof_sent_back_is_no_proof_of_the_server() -> None:
    secret = Secret.new()
    _, client = shaken(secret, secret)
    with pytest.raises(Refused):
        check_welcome(client, client.proof("client"))


def test_another_release_is_told_so() -> None:
    for greeting, why in ((b"spark-group-source channel 99", "another release"), (b"SSH-2.0-x", "not a stream reader")):
        with pytest.raises(Refused, match=why):
            greeted(Secret.new(), greeting.ljust(FIELD_BYTES) + ONE, OTHER)


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


@given(st.binary(max_size=2 * FIELD_BYTES))
def test_garbage_is_refused_by_both(data: bytes) -> None:
    secret = Secret.new()
    for hear in (
        lambda: answered(secret, ONE, data),
        lambda: greeted(secret, data, OTHER),
        lambda: check_welcome(Handshake(secret, server=ONE, client=OTHER), data),
    ):
        with pytest.raises(Refused):
            hear()


def test_a_secret_shows_itself_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    value = b"0123456789abcdef0123456789abcdef"
    secret = Secret(value)
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("test").info("%s %r %s", secret, secret, [secret])
    with pytest.raises(AttributeError):
        _ = secret.__dict__
    sent = Handshake(secret, server=ONE, client=OTHER).proof("server")
    for text in (caplog.text, str(sent), repr(secret), f"{secret}"):
        assert "012345" not in text and value.hex()[:12] not in text
