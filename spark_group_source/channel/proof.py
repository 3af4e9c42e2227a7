"""How two ends of a connection show each other that they know the run's secret, and how every message shows it again.

Runs in: the stream reader, executor processes, tasks. Deliberately absent: sockets, and chance: challenges are given.

::

    server  →  version, dialect, its challenge
    client  →  its challenge, HMAC(secret, "client", all of the above)
    server  →  HMAC(secret, "server", all of the above)            or why it refuses

Both challenges are in every proof, so an old proof is worth nothing; the role is, so a proof sent back is none. The
secret is 32 random bytes: nobody finds it from proofs. The same values make a key for each direction, and each message
carries a MAC over itself and its number: nothing can be put in, left out, repeated or swapped. It is not encrypted.
"""

import hmac
import json
import secrets
from typing import Any, Final

from spark_group_source.channel.frames import framed
from spark_group_source.channel.wire import Codec, WireError, parse_json

VERSION: Final = 1
"""Of greeting, proof and frames. What the messages are is the codec's dialect."""
HANDSHAKE_BYTES_MAX: Final = 512
"""All that a stranger may send."""
CHALLENGE_BYTES: Final = 32
MAC_BYTES: Final = 16
REFUSAL_MAX: Final = 200
"""Characters of a refusal that are believed enough to be shown."""


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
        return cls(secrets.token_bytes(32))

    def reveal(self) -> str:
        """For a pipe to another process of the run, and nothing else."""
        return self._value.hex()

    @classmethod
    def revealed(cls, text: str) -> "Secret":
        """The inverse."""
        return cls(bytes.fromhex(text))

    def sign(self, *parts: bytes) -> bytes:
        """A MAC over the parts, each behind its length, so that no other parts have the same."""
        return hmac.digest(self._value, b"".join(framed(part) for part in parts), "sha256")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._value, other._value)

    def __hash__(self) -> int:
        return hash(self.sign(b"hash"))

    def __repr__(self) -> str:
        return "Secret(***)"

    def __reduce__(self) -> tuple[Any, ...]:
        return Secret, (self._value,)


def challenge() -> bytes:
    """A new one."""
    return secrets.token_bytes(CHALLENGE_BYTES)


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
            raise WireError("a frame whose proof is wrong")
        return data

    def _mac(self, data: bytes) -> bytes:
        self._count += 1
        return hmac.digest(self._key, self._count.to_bytes(8, "big") + data, "sha256")[:MAC_BYTES]


class _Talk:
    """What both ends have said, as both ends sign it.

    Args:
        secret, codec: the run's.
        challenge: 32 bytes that were never used.
    """

    def __init__(self, secret: Secret, codec: Codec, challenge: bytes) -> None:
        self._secret, self._challenge, self._dialect = secret, challenge, codec.dialect
        self._about = (b"spark-group", str(VERSION).encode(), codec.dialect.encode())
        self._challenges: tuple[bytes, bytes] = (b"", b"")

    def sign(self, role: str) -> bytes:
        return self._secret.sign(role.encode(), *self._about, *self._challenges)

    def seal(self, role: str) -> Seal:
        """For what that side sends."""
        return Seal(self.sign(f"key of the {role}"))


class ServerSide(_Talk):
    """The stream reader's part."""

    def greeting(self) -> bytes:
        """What is said to whoever connects."""
        return _said(version=VERSION, dialect=self._dialect, challenge=self._challenge.hex())

    def welcome(self, answer: bytes) -> bytes:
        """The last word, when the answer to the greeting was right.

        Raises:
            Refused: it was not.
        """
        heard = _heard(answer, "challenge", "proof")
        self._challenges = (self._challenge, _bytes(heard["challenge"]))
        if not hmac.compare_digest(_bytes(heard["proof"]), self.sign("client")):
            raise Refused("the proof is wrong: it belongs to another run")
        return _said(proof=self.sign("server").hex())


def refusal(reason: str) -> bytes:
    """What a client is told instead of a welcome."""
    return _said(refused=reason[:REFUSAL_MAX])


class ClientSide(_Talk):
    """The part of whoever connects."""

    def answer(self, greeting: bytes) -> bytes:
        """What is said to the greeting.

        Raises:
            Refused: it is no greeting of this package, or of another release of it.
        """
        heard = _heard(greeting, "version", "dialect", "challenge")
        if (heard["version"], heard["dialect"]) != (VERSION, self._dialect):
            raise Refused("the stream reader has another release of spark-group-source than this executor; use one")
        self._challenges = (_bytes(heard["challenge"]), self._challenge)
        return _said(challenge=self._challenge.hex(), proof=self.sign("client").hex())

    def check(self, welcome: bytes) -> None:
        """Raises:
        Refused: the other end does not know the secret, or refused.
        """
        heard = _heard(welcome)
        if set(heard) == {"refused"}:
            raise Refused(f"refused: {str(heard['refused'])[:REFUSAL_MAX]!r}")
        if set(heard) != {"proof"} or not hmac.compare_digest(_bytes(heard["proof"]), self.sign("server")):
            raise Refused("what listens there does not know this run's secret")


def _said(**words: object) -> bytes:
    return framed(json.dumps(words).encode())


def _heard(body: bytes, *names: str) -> dict[str, Any]:
    try:
        heard = parse_json(body)
    except WireError:
        heard = None
    if not isinstance(heard, dict) or (names and set(heard) != set(names)):
        raise Refused("what it says is not the greeting of a stream reader or executor")
    return heard


def _bytes(text: object) -> bytes:
    """32 bytes of hexadecimal digits; challenges and proofs have the same length."""
    try:
        found = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        found = b""
    if len(found) != CHALLENGE_BYTES:
        raise Refused("what it says is not the greeting of a stream reader or executor")
    return found
