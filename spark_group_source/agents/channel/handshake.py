"""How two ends of a connection prove that they know the run's secret, and how every message proves it again.

Runs in: the stream reader, agents, tasks. Deliberately absent: sockets, and chance: challenges are arguments.

All fields have 32 bytes::

    server  →  GREETING (with the version), its challenge
    client  →  its challenge, HMAC(secret, GREETING, "client", both challenges)
    server  →  HMAC(secret, GREETING, "server", both challenges)            or REFUSED

Both challenges are in every proof, so an old proof is worth nothing; the role is, so a proof sent back is none. The
secret is 32 random bytes: nobody finds it from proofs. The same values make a key for each direction, and each message
carries a MAC over itself and its number: nothing can be put in, left out, repeated or swapped. It is not encrypted.
"""

import hmac
import secrets
from typing import Any, Final

from spark_group_source.agents.channel.codec import WireError
from spark_group_source.agents.channel.frames import framed

FIELD_BYTES: Final = 32
VERSION: Final = 1
"""Of the handshake, the frames and the messages. Two ends of different versions do not talk."""
GREETING: Final = f"spark-group-source channel {VERSION}".encode().ljust(FIELD_BYTES)
REFUSED: Final = b"refused: another run".ljust(FIELD_BYTES)
MAC_BYTES: Final = 16


class Refused(Exception):
    """The other end is not of this run, or of another release. The text says which, and never a secret."""


class Secret:
    """What the processes of one run know, and nobody else. It can be pickled, and shows itself in no other way."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    @classmethod
    def new(cls) -> "Secret":
        """One that nobody knows."""
        return cls(secrets.token_bytes(FIELD_BYTES))

    def reveal(self) -> str:
        """For a pipe to another process of the run, and nothing else."""
        return self._value.hex()

    @classmethod
    def revealed(cls, text: str) -> "Secret":
        """The inverse."""
        return cls(bytes.fromhex(text))

    def sign(self, data: bytes) -> bytes:
        """A MAC over the data, of :data:`FIELD_BYTES`."""
        return hmac.digest(self._value, data, "sha256")

    def __repr__(self) -> str:
        return "Secret(***)"

    def __reduce__(self) -> tuple[Any, ...]:
        return Secret, (self._value,)


def challenge() -> bytes:
    """A new one."""
    return secrets.token_bytes(FIELD_BYTES)


class Seal:
    """One direction of a proven connection: closes messages at one end, opens them at the other, in their order."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def close(self, data: bytes) -> bytes:
        """The frame of a message."""
        return framed(self._mac(data) + data)

    def open(self, body: bytes) -> bytes:
        """The message in a frame's body.

        Raises:
            WireError: it is not what the other end sent, or not what it sent next.
        """
        data = body[MAC_BYTES:]
        if not hmac.compare_digest(body[:MAC_BYTES], self._mac(data)):
            raise WireError("the MAC of a message is wrong")
        return data

    def _mac(self, data: bytes) -> bytes:
        self._count += 1
        return hmac.digest(self._key, self._count.to_bytes(8, "big") + data, "sha256")[:MAC_BYTES]


class Handshake:
    """The proofs and keys that follow from a secret and the challenges of both ends."""

    def __init__(self, secret: Secret, *, server: bytes, client: bytes) -> None:
        self._secret, self._challenges = secret, server + client

    def proof(self, role: str) -> bytes:
        """That this end, ``client`` or ``server``, knows the secret."""
        return self._secret.sign(GREETING + role.encode().ljust(FIELD_BYTES) + self._challenges)

    def seal(self, role: str) -> Seal:
        """For what that end sends."""
        return Seal(self.proof(f"key of the {role}"))


def greeted(secret: Secret, greeting: bytes, mine: bytes) -> Handshake:
    """The client's side, from the first two fields that the server sent.

    Raises:
        Refused: it is no stream reader, or one of another release.
    """
    if greeting[:FIELD_BYTES] != GREETING:
        if greeting.startswith(GREETING.rstrip(b" 0123456789")):
            raise Refused("the stream reader has another release of spark-group-source than this executor; use one")
        raise Refused("what listens there is not a stream reader")
    return Handshake(secret, server=greeting[FIELD_BYTES:], client=mine)


def answered(secret: Secret, mine: bytes, answer: bytes) -> Handshake:
    """The server's side, from the two fields that the client answered.

    Raises:
        Refused: the client does not know the secret.
    """
    hands = Handshake(secret, server=mine, client=answer[:FIELD_BYTES])
    if not hmac.compare_digest(answer[FIELD_BYTES:], hands.proof("client")):
        raise Refused("the proof is wrong: it belongs to another run")
    return hands


def check_welcome(hands: Handshake, welcome: bytes) -> None:
    """The client's last step.

    Raises:
        Refused: the server refuses, or does not know the secret.
    """
    if welcome == REFUSED:
        raise Refused("the stream reader there belongs to another run")
    if not hmac.compare_digest(welcome, hands.proof("server")):
        raise Refused("what listens there does not know this run's secret")
