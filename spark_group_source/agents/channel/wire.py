"""The bytes of the channel: the handshake, and messages as bounded JSON, in frames with a length prefix and a MAC.

Runs in: the stream reader, agents, tasks. Deliberately absent: pickle, which would run a peer's code; encryption; and
random numbers in the steps of the handshake: challenges are arguments.

A message is a frozen dataclass, encoded as the list of its fields' values, in order. The types come from the
annotations: a decoded message has exactly the annotated types, and anything else raises :class:`WireError`.

Both ends authenticate with the run's secret. All fields of the handshake have 32 bytes::

    server  →  GREETING (with the version), its challenge
    client  →  its challenge, HMAC(secret, GREETING, "client", both challenges)
    server  →  HMAC(secret, GREETING, "server", both challenges)            or REFUSED

Every proof covers both challenges and the role, so a recorded proof cannot be replayed, nor a proof reflected. The
secret is 32 random bytes and cannot be derived from proofs. The secret and the challenges also give a key for each
direction. Each message carries a MAC over its sequence number and its bytes, so messages cannot be inserted, dropped,
repeated or reordered.
"""

import functools
import hmac
import json
import secrets
import socket
import time
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from itertools import groupby
from typing import Any, Final, NamedTuple, Union, get_args, get_origin, get_type_hints

from spark_group_source.model import OffsetRange, TopicPartition

FRAME_BYTES_MAX: Final = 16 << 20
"""Size limit of one message. The largest ones list the partitions of an agent: 100,000 of one topic take 600 KB, and
the positions of 10,000 topics with the longest names that Kafka permits 12 MB."""
HEAD_BYTES: Final = 4
"""Length prefix of a frame, big-endian."""
INT_MAX: Final = 2**63 - 1
"""Offsets are Java longs."""
_RECEIVE_BYTES: Final = 1 << 20


class WireError(ValueError):
    """These bytes, or this value, are not a valid message. The text is one short line."""


class Codec:
    """Encodes and decodes a fixed set of messages.

    Args:
        messages: the dataclasses that may be sent, with different names. Fields may be str, int, bool, bytes,
            None, tuples and mappings of these, tuples of partitions or ranges, mappings by partition, dataclasses,
            named tuples, and unions of these and None.

    Raises:
        TypeError: a field has an unsupported type.
    """

    bytes_max = FRAME_BYTES_MAX

    def __init__(self, messages: Iterable[Any]) -> None:
        self._messages = {message.__name__: (message, _field_codec(message)) for message in messages}

    def encode(self, message: Any) -> bytes:
        """Encode a message.

        Raises:
            WireError: the message is not one of the codec's, has a field of a wrong type, or is too large.
        """
        name = type(message).__name__
        known, codec = self._messages.get(name, (None, _NONE))
        if known is not type(message):
            raise WireError(f"{name} is not a message of this channel")
        try:
            data = json.dumps([name, codec.write(message)], ensure_ascii=False, separators=(",", ":")).encode()
        except Exception as exc:  # noqa: BLE001 - a field of another type than annotated
            raise WireError(f"{name} cannot be encoded: {_shortened(exc)}") from None
        if len(data) > self.bytes_max:
            raise WireError(f"{name} has {len(data)} bytes; the limit is {self.bytes_max}")
        return data

    def decode(self, data: bytes) -> Any:
        """Decode a message.

        Raises:
            WireError: these bytes are not a message. No other error is raised, whatever the bytes.
        """
        try:
            name, body = json.loads(data)
            return self._messages[_STR.read(name)][1].read(body)
        except Exception as exc:  # noqa: BLE001 - RecursionError, errors of a message's own checks, ...
            raise WireError(f"not a message of this channel: {_shortened(exc)}") from None


# --- types of fields ------------------------------------------------------------------------------------------------


class _FieldCodec(NamedTuple):
    """Converts values of one type to JSON values and back. Both functions raise if a value has another type."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def _scalar(wanted: type[Any], is_valid: Callable[[Any], bool] = lambda _: True) -> _FieldCodec:
    """Accept exactly this type: bool is a subclass of int, and is not accepted as one."""

    def checked(value: Any) -> Any:
        if type(value) is not wanted or not is_valid(value):
            raise WireError(f"not a valid {wanted.__name__}: {value!r:.60}")
        return value

    return _FieldCodec(checked, checked)


_STR: Final = _scalar(str, lambda text: text.isascii() or bool(text.encode()))  # JSON can contain a lone surrogate
_INT: Final = _scalar(int, lambda number: -INT_MAX - 1 <= number <= INT_MAX)
_NONE: Final = _scalar(type(None))
_BYTES: Final = _FieldCodec(bytes.hex, lambda data: bytes.fromhex(_STR.read(data)))
_SCALARS: Final = {str: _STR, int: _INT, bool: _scalar(bool), bytes: _BYTES, type(None): _NONE}


@functools.cache
def _field_codec(hint: Any) -> _FieldCodec:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _SCALARS:
        return _SCALARS[hint]
    if origin is tuple and len(arguments) == 2 and arguments[1] is ...:
        return _tuple(arguments[0])
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(*arguments)
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if isinstance(hint, type) and (is_dataclass(hint) or hasattr(hint, "_fields")):
        return _record(hint)
    raise TypeError(f"{hint} cannot be sent over the channel")


def _record(cls: type[Any]) -> _FieldCodec:
    hints = get_type_hints(cls)
    names = [field.name for field in fields(cls)] if is_dataclass(cls) else cls._fields
    codecs = [_field_codec(hints[name]) for name in names]

    def write(value: Any) -> list[Any]:
        if type(value) is not cls:
            raise WireError(f"not a {cls.__name__}: {type(value).__name__}")
        return [codec.write(getattr(value, name)) for name, codec in zip(names, codecs, strict=True)]

    def read(data: Any) -> Any:
        parts = zip(names, codecs, _list(data), strict=True)
        return cls(**{name: codec.read(part) for name, codec, part in parts})

    return _FieldCodec(write, read)


def _tuple(of: Any) -> _FieldCodec:
    if of is TopicPartition:
        return _grouped_by_topic(_INT, lambda tps: tps, TopicPartition, tuple)
    if of is OffsetRange:
        rest = _sequence(_INT, _INT, _INT)
        return _grouped_by_topic(
            rest,
            lambda ranges: ((r.tp.topic, (r.tp.partition, r.start, r.end)) for r in ranges),
            lambda topic, part: OffsetRange(TopicPartition(topic, part[0]), part[1], part[2]),
            tuple,
        )
    codec = _field_codec(of)
    return _FieldCodec(
        lambda values: [codec.write(one) for one in values], lambda data: tuple(map(codec.read, _list(data)))
    )


def _mapping(key: Any, value: Any) -> _FieldCodec:
    if key is TopicPartition:
        return _grouped_by_topic(
            _sequence(_INT, _field_codec(value)),
            lambda mapping: ((tp.topic, (tp.partition, one)) for tp, one in mapping.items()),
            lambda topic, part: (TopicPartition(topic, part[0]), part[1]),
            _without_duplicates,
        )
    pair = _sequence(_field_codec(key), _field_codec(value))
    return _FieldCodec(
        lambda mapping: [pair.write(item) for item in mapping.items()],
        lambda data: _without_duplicates([pair.read(item) for item in _list(data)]),
    )


def _grouped_by_topic(
    rest: _FieldCodec, split: Callable[[Any], Iterable[tuple[str, Any]]], join: Callable[[str, Any], Any], all_of: Any
) -> _FieldCodec:
    """Encode values by partition: a topic's name is written once for each run of its partitions."""
    return _FieldCodec(
        lambda value: [
            [_STR.write(topic), [rest.write(one) for _, one in group]]
            for topic, group in groupby(split(value), key=lambda pair: pair[0])
        ],
        lambda data: all_of(
            [join(_STR.read(topic), rest.read(one)) for topic, ones in _list(data) for one in _list(ones)]
        ),
    )


def _sequence(*codecs: _FieldCodec) -> _FieldCodec:
    return _FieldCodec(
        lambda value: [codec.write(part) for codec, part in zip(codecs, value, strict=True)],
        lambda data: tuple(codec.read(part) for codec, part in zip(codecs, _list(data), strict=True)),
    )


def _union(types_: tuple[Any, ...]) -> _FieldCodec:
    """Encode a union. A value carries the name of its type, unless the union has only one type beside None."""
    codecs = {type_.__name__: _field_codec(type_) for type_ in types_ if type_ is not type(None)}
    optional = len(codecs) < len(types_)
    only = next(iter(codecs.values())) if len(codecs) == 1 else None

    def write(value: Any) -> Any:
        if value is None and optional:
            return None
        name = type(value).__name__
        return only.write(value) if only else [name, codecs[name].write(value)]

    def read(data: Any) -> Any:
        if data is None and optional:
            return None
        if only:
            return only.read(data)
        name, body = _list(data)
        return codecs[_STR.read(name)].read(body)

    return _FieldCodec(write, read)


def _list(data: Any) -> list[Any]:
    if type(data) is not list:
        raise WireError(f"not a list: {type(data).__name__}")
    return data


def _without_duplicates(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    if len(mapping := dict(pairs)) != len(pairs):
        raise WireError("a key occurs twice")
    return mapping


def _shortened(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {str(exc)!r:.80}"


# --- frames on a blocking socket ------------------------------------------------------------------------------------


def frame(body: bytes) -> bytes:
    """Prepend its length to a body."""
    return len(body).to_bytes(HEAD_BYTES, "big") + body


def body_length(head: bytes, bytes_max: int) -> int:
    """Decode a length prefix.

    Raises:
        WireError: the length is 0 or above ``bytes_max``; nothing of the body has been received yet.
    """
    length = int.from_bytes(head, "big")
    if not 0 < length <= bytes_max:
        raise WireError(f"a frame of {length} bytes; the limit is {bytes_max}")
    return length


def set_deadline(connection: socket.socket, until_s: float) -> None:
    """Let the socket's next call time out at ``until_s``, on the clock of ``time.monotonic``.

    Raises:
        TimeoutError: the deadline has passed.
    """
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    connection.settimeout(left_s)


def receive_frame(connection: socket.socket, bytes_max: int, until_s: float) -> bytes:
    """Receive the body of the next frame.

    Raises:
        WireError: the frame's length is invalid.
        OSError: the connection was closed, or the deadline passed.
    """
    return receive_exactly(
        connection, body_length(receive_exactly(connection, HEAD_BYTES, until_s), bytes_max), until_s
    )


def receive_exactly(connection: socket.socket, size: int, until_s: float) -> bytes:
    """Receive ``size`` bytes.

    Raises:
        OSError: the connection was closed, or the deadline passed.
    """
    received = bytearray()
    while len(received) < size:
        set_deadline(connection, until_s)
        part = connection.recv(min(_RECEIVE_BYTES, size - len(received)))
        if not part:
            raise ConnectionResetError("closed by the peer")
        received += part
    return bytes(received)


# --- authentication ---------------------------------------------------------------------------------------------------

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
