"""The handshake accepts only peers with the run's secret, and every message is authenticated."""

import copy
import logging
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_group_source.agents.channel.wire import (
    FIELD_BYTES,
    GREETING,
    REFUSED,
    Handshake,
    HandshakeRefused,
    MessageSigner,
    Secret,
    WireError,
    accept_greeting,
    body_length,
    new_challenge,
    verify_client,
    verify_server,
)

ONE, OTHER = b"1" * FIELD_BYTES, b"2" * FIELD_BYTES


def body_of(frame: bytes) -> bytes:
    assert body_length(frame[:4], 10_000) == len(frame) - 4
    return frame[4:]


def shake_hands(
    ours: Secret, theirs: Secret, server: bytes = ONE, client: bytes = OTHER
) -> tuple[Handshake, Handshake]:
    """The handshake as the server and as the client see it, after the client has answered."""
    theirs_handshake = accept_greeting(theirs, GREETING + server, client)
    return verify_client(ours, server, client + theirs_handshake.proof("client")), theirs_handshake


def test_both_ends_prove_the_secret_and_sign_with_separate_keys() -> None:
    secret = Secret.new()
    server, client = shake_hands(secret, pickle.loads(pickle.dumps(secret)), new_challenge(), new_challenge())
    verify_server(client, server.proof("server"))
    for role in ("client", "server"):
        sender, receiver = client.signer(role), server.signer(role)
        for data in (b"one", b"two"):
            assert receiver.verify(body_of(sender.sign(data))) == data
    with pytest.raises(WireError):
        server.signer("server").verify(body_of(client.signer("client").sign(b"one")))


def test_a_client_without_the_secret_is_refused() -> None:
    with pytest.raises(HandshakeRefused, match="another run"):
        shake_hands(Secret.new(), Secret.new())


def test_a_server_without_the_secret_is_refused() -> None:
    secret = Secret.new()
    _, client = shake_hands(secret, secret)
    with pytest.raises(HandshakeRefused, match="does not know"):
        verify_server(client, Handshake(Secret.new(), server=ONE, client=OTHER).proof("server"))
    with pytest.raises(HandshakeRefused, match="another run"):
        verify_server(client, REFUSED)


def test_a_replayed_proof_is_refused() -> None:
    secret = Secret.new()
    _, client = shake_hands(secret, secret)
    verify_client(secret, ONE, OTHER + client.proof("client"))
    with pytest.raises(HandshakeRefused):
        verify_client(secret, new_challenge(), OTHER + client.proof("client"))


def test_a_reflected_proof_is_refused() -> None:
    secret = Secret.new()
    _, client = shake_hands(secret, secret)
    with pytest.raises(HandshakeRefused):
        verify_server(client, client.proof("client"))


def test_another_release_is_refused_with_that_reason() -> None:
    for greeting, why in ((b"spark-group-source channel 99", "another release"), (b"SSH-2.0-x", "not a stream reader")):
        with pytest.raises(HandshakeRefused, match=why):
            accept_greeting(Secret.new(), greeting.ljust(FIELD_BYTES) + ONE, OTHER)


@given(st.binary(min_size=1, max_size=100), st.data())
def test_a_changed_repeated_or_dropped_frame_is_refused(data: bytes, draw: st.DataObject) -> None:
    key = b"k" * 32
    sender, receiver = MessageSigner(key), MessageSigner(key)
    first, second = body_of(sender.sign(data)), body_of(sender.sign(data))
    at = draw.draw(st.integers(0, len(first) - 1))
    changed = bytearray(first)
    changed[at] ^= draw.draw(st.integers(1, 255))
    with pytest.raises(WireError):
        copy.copy(receiver).verify(bytes(changed))
    with pytest.raises(WireError):
        copy.copy(receiver).verify(second)
    assert receiver.verify(first) == data
    with pytest.raises(WireError):
        copy.copy(receiver).verify(first)
    assert receiver.verify(second) == data


@given(st.binary(max_size=2 * FIELD_BYTES))
def test_both_ends_refuse_garbage(data: bytes) -> None:
    secret = Secret.new()
    for receive in (
        lambda: verify_client(secret, ONE, data),
        lambda: accept_greeting(secret, data, OTHER),
        lambda: verify_server(Handshake(secret, server=ONE, client=OTHER), data),
    ):
        with pytest.raises(HandshakeRefused):
            receive()


def test_the_secret_is_in_no_log_and_no_repr(caplog: pytest.LogCaptureFixture) -> None:
    value = b"0123456789abcdef0123456789abcdef"
    secret = Secret(value)
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("test").info("%s %r %s", secret, secret, [secret])
    with pytest.raises(AttributeError):
        _ = secret.__dict__
    sent = Handshake(secret, server=ONE, client=OTHER).proof("server")
    for text in (caplog.text, str(sent), repr(secret), f"{secret}"):
        assert "012345" not in text and value.hex()[:12] not in text
