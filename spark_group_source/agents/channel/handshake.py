"""Authenticate both ends of a connection with the run's secret, and every message after that.

Runs in: the stream reader, agents, tasks. Deliberately absent: sockets, and random numbers: challenges are arguments.

All fields have 32 bytes::

    server  →  GREETING (with the version), its challenge
    client  →  its challenge, HMAC(secret, GREETING, "client", both challenges)
    server  →  HMAC(secret, GREETING, "server", both challenges)            or REFUSED

Every proof covers both challenges and the role, so a recorded proof cannot be replayed, nor a proof reflected. The
secret is 32 random bytes and cannot be derived from proofs. The secret and the challenges also give a key for each
direction. Each message carries a MAC over its sequence number and its bytes, so messages cannot be inserted, dropped,
repeated or reordered. Messages are not encrypted.
"""

import hmac
import secrets
from typing import Any, Final

from spark_group_source.agents.channel.wire import WireError, frame

FIELD_BYTES: Final = 32
VERSION: Final = 2
"""Version of the handshake, the frames and the messages. Two ends of different versions refuse each other."""
GREETING: Final = f"spark-group-source channel {VERSION}".encode().ljust(FIELD_BYTES)
REFUSED: Final = b"refused: another run".ljust(FIELD_BYTES)
MAC_BYTES: Final = 16


class HandshakeRefused(Exception):
    """The peer belongs to another run or another release. The text says which, and never contains a secret."""


class Secret:
    """The secret that the processes of one run share. It can be pickled; its repr does not show it."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    @classmethod
    def new(cls) -> "Secret":
        """Generate a secret."""
        return cls(secrets.token_bytes(FIELD_BYTES))

    def to_hex(self) -> str:
        """The secret as text, only for the standard input of another process of the run."""
        return self._value.hex()

    @classmethod
    def from_hex(cls, text: str) -> "Secret":
        """The inverse of :meth:`to_hex`."""
        return cls(bytes.fromhex(text))

    def sign(self, data: bytes) -> bytes:
        """A MAC over the data, of :data:`FIELD_BYTES`."""
        return hmac.digest(self._value, data, "sha256")

    def __repr__(self) -> str:
        return "Secret(***)"

    def __reduce__(self) -> tuple[Any, ...]:
        return Secret, (self._value,)


def new_challenge() -> bytes:
    """Generate a challenge."""
    return secrets.token_bytes(FIELD_BYTES)


class MessageSigner:
    """Signs the messages of one direction at one end of a connection, and verifies them at the other, in order."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def sign(self, message: bytes) -> bytes:
        """The frame of the next message, with its MAC."""
        return frame(self._mac(message) + message)

    def verify(self, body: bytes) -> bytes:
        """The message in the next frame's body.

        Raises:
            WireError: the peer did not send these bytes, or did not send them next.
        """
        message = body[MAC_BYTES:]
        if not hmac.compare_digest(body[:MAC_BYTES], self._mac(message)):
            raise WireError("the MAC of a message is wrong")
        return message

    def _mac(self, message: bytes) -> bytes:
        self._count += 1
        return hmac.digest(self._key, self._count.to_bytes(8, "big") + message, "sha256")[:MAC_BYTES]


class Handshake:
    """The proofs and keys that follow from the secret and the challenges of both ends. A role is client or server."""

    def __init__(self, secret: Secret, *, server: bytes, client: bytes) -> None:
        self._secret, self._challenges = secret, server + client

    def proof(self, role: str) -> bytes:
        """The proof that the end with this role knows the secret."""
        return self._secret.sign(GREETING + role.encode().ljust(FIELD_BYTES) + self._challenges)

    def signer(self, role: str) -> MessageSigner:
        """The signer of the messages that the end with this role sends."""
        return MessageSigner(self.proof(f"key of the {role}"))


def accept_greeting(secret: Secret, greeting: bytes, challenge: bytes) -> Handshake:
    """The client's first step.

    Args:
        greeting: the first two fields that the server sent.
        challenge: the client's own.

    Raises:
        HandshakeRefused: the server is no stream reader, or one of another release.
    """
    if greeting[:FIELD_BYTES] != GREETING:
        if greeting.startswith(GREETING.rstrip(b" 0123456789")):
            raise HandshakeRefused(
                "the stream reader has another release of spark-group-source than this executor; install the same one"
            )
        raise HandshakeRefused("the server at this address is not a stream reader")
    return Handshake(secret, server=greeting[FIELD_BYTES:], client=challenge)


def verify_client(secret: Secret, challenge: bytes, answer: bytes) -> Handshake:
    """The server's step.

    Args:
        challenge: the server's own.
        answer: the two fields that the client sent.

    Raises:
        HandshakeRefused: the client does not know the secret.
    """
    handshake = Handshake(secret, server=challenge, client=answer[:FIELD_BYTES])
    if not hmac.compare_digest(answer[FIELD_BYTES:], handshake.proof("client")):
        raise HandshakeRefused("the proof is wrong: the client belongs to another run")
    return handshake


def verify_server(handshake: Handshake, answer: bytes) -> None:
    """The client's last step.

    Raises:
        HandshakeRefused: the server refuses the client, or does not know the secret.
    """
    if answer == REFUSED:
        raise HandshakeRefused("the stream reader at this address belongs to another run")
    if not hmac.compare_digest(answer, handshake.proof("server")):
        raise HandshakeRefused("the server at this address does not know this run's secret")
