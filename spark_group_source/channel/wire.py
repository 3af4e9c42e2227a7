"""Messages as bytes: frozen dataclasses to bounded JSON and back, with nothing guessed.

Runs in: the stream reader, executor processes, tasks. Deliberately absent: sockets, and pickle, which would run what a
peer sends. A :class:`Codec` knows its messages before it sees a byte; whatever is not exactly one of them is refused.
"""

import json
import types
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from hashlib import sha256
from typing import Any, Final, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from spark_group_source.channel.kinds import (
    INT_MAX,
    OF_PARTITIONS,
    PLAIN,
    Kind,
    WireError,
    many,
    mapping_of,
    one_of,
    partition_mapping,
    shown,
    union_of,
)
from spark_group_source.model import TopicPartition

__all__ = ["FRAME_BYTES_MAX", "Codec", "Envelope", "WireError", "parse_json"]

FRAME_BYTES_MAX: Final = 1 << 20
"""One message. The largest are lists of partitions: 100,000 partitions of one topic are 600 KB."""


class Envelope(NamedTuple):
    """A message, and whether it is a question (``asks`` > 0), or the answer to one (``answers`` > 0)."""

    message: Any  # one of the codec's types
    asks: int = 0
    answers: int = 0


class Codec:
    """Writes and reads the messages of one channel.

    Fields may be: str, int, float, bool, None, Literal and Enum of texts, tuple, frozenset, Mapping, named tuples,
    other dataclasses (named here or not), and unions of these.

    Args:
        messages: the frozen dataclasses that may be sent. Their names differ.

    Raises:
        TypeError: a message has a field of another type.
    """

    def __init__(self, messages: Iterable[type[Any]]) -> None:
        self._kinds: dict[Any, Kind] = {}
        self._messages = {message.__name__: message for message in messages}
        shapes = [f"{name}:{self._kind(self._messages[name]).shape}" for name in sorted(self._messages)]
        self.dialect: str = sha256("\n".join(shapes).encode()).hexdigest()[:16]
        """Stands for the names, fields and types of all messages: two sides that differ in it must not talk."""

    def encode(self, envelope: Envelope) -> bytes:
        """The bytes of a message.

        Raises:
            WireError: it is none of the codec's messages, a field has another type, or there are too many bytes.
        """
        message, asks, answers = envelope
        name = type(message).__name__
        if self._messages.get(name) is not type(message):
            raise WireError(f"{shown(message)} is no message of this channel")
        parts = [asks, answers, name, self._kind(type(message)).write(message)]
        data = json.dumps(parts, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        if len(data) > FRAME_BYTES_MAX:
            raise WireError(f"{name} would be {len(data)} bytes; {FRAME_BYTES_MAX} are the most")
        return data

    def decode(self, data: bytes) -> Envelope:
        """The message that these bytes are.

        Raises:
            WireError: they are none. Nothing else is ever raised, whatever the bytes.
        """
        parts = parse_json(data)
        if type(parts) is not list or len(parts) != 4 or type(parts[2]) is not str:
            raise WireError(f"no envelope: {shown(parts)}")
        asks, answers, name, body = parts
        if type(asks) is not int or type(answers) is not int or not (0 <= asks <= INT_MAX and 0 <= answers <= INT_MAX):
            raise WireError(f"no numbers of a question: {shown(parts[:2])}")
        message = self._messages.get(name)
        if message is None:
            raise WireError(f"unknown message {shown(name)}")
        try:
            return Envelope(self._kind(message).read(body), asks, answers)
        except WireError as exc:
            raise WireError(f"{name}: {exc}") from None
        except Exception as exc:  # noqa: BLE001 - a message may check its own values when it is made
            raise WireError(f"{name}: {type(exc).__name__}: {shown(str(exc))}") from None

    def _kind(self, hint: Any) -> Kind:
        kind = self._kinds.get(hint)
        if kind is None:
            kind = self._kinds[hint] = self._made(hint)
        return kind

    def _made(self, hint: Any) -> Kind:
        if hint in PLAIN:
            return PLAIN[hint]
        if hint in OF_PARTITIONS:
            return OF_PARTITIONS[hint]
        origin, arguments = get_origin(hint), get_args(hint)
        if origin is Literal:
            return one_of({text: text for text in arguments})
        if origin is tuple and len(arguments) == 2 and arguments[1] is ...:
            return many("tuple", tuple, self._kind(arguments[0]))
        if origin is frozenset:
            return many("frozenset", frozenset, self._kind(arguments[0]))
        if isinstance(origin, type) and issubclass(origin, Mapping):
            if arguments[0] is TopicPartition:
                return partition_mapping(self._kind(arguments[1]))
            return mapping_of(self._kind(arguments[0]), self._kind(arguments[1]))
        if origin in (Union, types.UnionType):
            return union_of([(arm, self._kind(arm)) for arm in arguments])
        if isinstance(hint, type) and issubclass(hint, Enum):
            return one_of({member.value: member for member in hint})
        if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
            return self._record(hint, hint._fields)
        if isinstance(hint, type) and is_dataclass(hint):
            return self._record(hint, tuple(field.name for field in fields(hint)))
        raise TypeError(f"{hint} cannot travel")

    def _record(self, made: type[Any], names: tuple[str, ...]) -> Kind:
        """A class with fields: a list of their values, in order."""
        hints = get_type_hints(made)
        kinds = [(name, self._kind(hints[name])) for name in names]
        steps = [(name, kind.write, kind.read) for name, kind in kinds]
        in_order = issubclass(made, tuple)

        def write(value: Any) -> list[Any]:
            if type(value) is not made:
                raise WireError(f"{shown(value)} is no {made.__name__}")
            return [write_one(getattr(value, name)) for name, write_one, _ in steps]

        def read(data: Any) -> Any:
            if type(data) is not list or len(data) != len(steps):
                raise WireError(f"{shown(data)} is no {made.__name__}")
            values = [read_one(part) for part, (_, _, read_one) in zip(data, steps, strict=True)]
            return made(*values) if in_order else made(**dict(zip(names, values, strict=True)))

        shape = ",".join(f"{name}={kind.shape}" for name, kind in kinds)
        return Kind(f"{made.__name__}({shape})", write, read)


def parse_json(data: bytes) -> Any:
    """JSON of bounded depth, without NaN, and without a name that occurs twice.

    Raises:
        WireError: it is not that.
    """
    try:
        return json.loads(data.decode(), parse_constant=_refused, object_pairs_hook=_once)
    except (ValueError, RecursionError) as exc:
        raise WireError(f"no JSON: {type(exc).__name__}: {shown(data)}") from None


def _refused(constant: str) -> Any:
    raise WireError(f"{constant} is no number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(made := dict(pairs)) != len(pairs):
        raise WireError("a name occurs twice")
    return made
