"""Messages as bytes: frozen dataclasses to bounded JSON and back, with nothing guessed.

Runs in: the stream reader, executor processes, tasks. Deliberately absent: sockets, and pickle, which would run what a
peer sends. A :class:`Codec` knows its messages before it sees a byte; whatever is not exactly one of them is refused.
"""

import json
import math
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from hashlib import sha256
from typing import Any, Final, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from spark_group_source.model import TopicPartition

FRAME_BYTES_MAX: Final = 1 << 20
"""One message. The largest are lists of partitions: one topic's 100,000 partitions are 700 KB."""
INT_MAX: Final = 2**63 - 1
"""Offsets are Java's longs."""
SHOWN_MAX: Final = 60
"""Characters of somebody else's text that go into a refusal."""


class WireError(ValueError):
    """These bytes, or this value, are no message. Says what was wrong and where."""


class Envelope(NamedTuple):
    """A message, and whether it is a question (``asks`` > 0), or the answer to one (``answers`` > 0)."""

    message: Any  # one of the codec's types
    asks: int = 0
    answers: int = 0


class _Kind(NamedTuple):
    """How one type of field is told, written and read. ``shape`` goes into the dialect."""

    shape: str
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


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
        self._kinds: dict[Any, _Kind] = {}
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
            raise WireError(f"{_shown(message)} is no message of this channel")
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
            raise WireError(f"no envelope: {_shown(parts)}")
        asks, answers, name, body = parts
        if type(asks) is not int or type(answers) is not int or not (0 <= asks <= INT_MAX and 0 <= answers <= INT_MAX):
            raise WireError(f"no numbers of a question: {_shown(parts[:2])}")
        message = self._messages.get(name)
        if message is None:
            raise WireError(f"unknown message {_shown(name)}")
        try:
            return Envelope(self._kind(message).read(body), asks, answers)
        except WireError as exc:
            raise WireError(f"{name}: {exc}") from None
        except Exception as exc:  # noqa: BLE001 - a message may check its own values when it is made
            raise WireError(f"{name}: {type(exc).__name__}: {_shown(str(exc))}") from None

    def _kind(self, hint: Any) -> _Kind:
        kind = self._kinds.get(hint)
        if kind is None:
            kind = self._kinds[hint] = self._made(hint)
        return kind

    def _made(self, hint: Any) -> _Kind:
        if hint in _PLAIN:
            return _PLAIN[hint]
        origin, arguments = get_origin(hint), get_args(hint)
        if origin is Literal:
            return _one_of({text: text for text in arguments})
        if origin is tuple and len(arguments) == 2 and arguments[1] is ...:
            return _many("tuple", tuple, self._kind(arguments[0]))
        if origin is frozenset and arguments[0] is TopicPartition:
            return _PARTITIONS
        if origin is frozenset:
            return _many("frozenset", frozenset, self._kind(arguments[0]))
        if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
            return _mapping(self._kind(arguments[0]), self._kind(arguments[1]))
        if origin in (Union, types.UnionType):
            return _union([(arm, self._kind(arm)) for arm in arguments])
        if isinstance(hint, type) and issubclass(hint, Enum):
            return _one_of({member.value: member for member in hint})
        if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
            return self._record(hint, hint._fields)
        if isinstance(hint, type) and is_dataclass(hint):
            return self._record(hint, tuple(field.name for field in fields(hint)))
        raise TypeError(f"{hint} cannot travel")

    def _record(self, made: type[Any], names: tuple[str, ...]) -> _Kind:
        """A class with fields: a list of their values, in order."""
        hints = get_type_hints(made)
        kinds = [(name, self._kind(hints[name])) for name in names]
        steps = [(name, kind.write, kind.read) for name, kind in kinds]
        in_order = issubclass(made, tuple)

        def write(value: Any) -> list[Any]:
            if type(value) is not made:
                raise WireError(f"{_shown(value)} is no {made.__name__}")
            return [write_one(getattr(value, name)) for name, write_one, _ in steps]

        def read(data: Any) -> Any:
            if type(data) is not list or len(data) != len(steps):
                raise WireError(f"{_shown(data)} is no {made.__name__}")
            values = [read_one(part) for part, (_, _, read_one) in zip(data, steps, strict=True)]
            return made(*values) if in_order else made(**dict(zip(names, values, strict=True)))

        shape = ",".join(f"{name}={kind.shape}" for name, kind in kinds)
        return _Kind(f"{made.__name__}({shape})", write, read)


def parse_json(data: bytes) -> Any:
    """JSON of bounded depth, without NaN, and without a name that occurs twice.

    Raises:
        WireError: it is not that.
    """
    try:
        return json.loads(data.decode(), parse_constant=_refused, object_pairs_hook=_once)
    except (ValueError, RecursionError) as exc:
        raise WireError(f"no JSON: {type(exc).__name__}: {_shown(data[:SHOWN_MAX])}") from None


def _refused(constant: str) -> Any:
    raise WireError(f"{constant} is no number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(made := dict(pairs)) != len(pairs):
        raise WireError("a name occurs twice")
    return made


def _shown(value: object) -> str:
    """Somebody else's value in a text of ours: short, on one line, and not more work than that."""
    if isinstance(value, list | dict | tuple):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, str | bytes):
        return repr(value[:SHOWN_MAX])
    return repr(value)[:SHOWN_MAX] if isinstance(value, bool | float | None) else type(value).__name__


# --- kinds ----------------------------------------------------------------------------------------------------------


def _exactly(wanted: type[Any], check: Callable[[Any], bool] = lambda _: True) -> _Kind:
    """bool is an int in Python; here it is not."""

    def same(value: Any) -> Any:
        if type(value) is not wanted or not check(value):
            raise WireError(f"{_shown(value)} is no {wanted.__name__}")
        return value

    return _Kind(wanted.__name__, same, same)


def _is_text(value: str) -> bool:
    try:  # JSON can name half of a character
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


_STR = _exactly(str, _is_text)
_INT = _exactly(int, lambda value: -INT_MAX - 1 <= value <= INT_MAX)
_PLAIN: Final[dict[Any, _Kind]] = {
    str: _STR,
    int: _INT,
    bool: _exactly(bool),
    float: _exactly(float, math.isfinite),
    type(None): _exactly(type(None)),
}


def _one_of(values: Mapping[Any, Any]) -> _Kind:
    if not all(type(text) is str for text in values):
        raise TypeError(f"{list(values)} are not all texts")
    names = {member: text for text, member in values.items()}

    def write(value: Any) -> str:
        if value not in names:
            raise WireError(f"{_shown(value)} is none of {sorted(values)}")
        return str(names[value])

    def read(data: Any) -> Any:
        if type(data) is not str or data not in values:
            raise WireError(f"{_shown(data)} is none of {sorted(values)}")
        return values[data]

    return _Kind("|".join(sorted(values)), write, read)


def _many(name: str, made: type[Any], kind: _Kind) -> _Kind:
    write_one, read_one = kind.write, kind.read

    def write(value: Any) -> list[Any]:
        if type(value) is not made:
            raise WireError(f"{_shown(value)} is no {name}")
        return [write_one(part) for part in value]

    def read(data: Any) -> Any:
        if type(data) is not list:
            raise WireError(f"{_shown(data)} is no {name}")
        value = made([read_one(part) for part in data])
        if len(value) != len(data):
            raise WireError(f"something occurs twice in a {name}")
        return value

    return _Kind(f"{name}[{kind.shape}]", write, read)


def _mapping(key: _Kind, value: _Kind) -> _Kind:
    def write(mapping: Any) -> list[Any]:
        if not isinstance(mapping, Mapping):
            raise WireError(f"{_shown(mapping)} is no mapping")
        return [[key.write(k), value.write(v)] for k, v in mapping.items()]

    def read(data: Any) -> dict[Any, Any]:
        if type(data) is not list or not all(type(pair) is list and len(pair) == 2 for pair in data):
            raise WireError(f"{_shown(data)} is no mapping")
        mapping = {key.read(k): value.read(v) for k, v in data}
        if len(mapping) != len(data):
            raise WireError("a key occurs twice")
        return mapping

    return _Kind(f"{{{key.shape}:{value.shape}}}", write, read)


def _write_partitions(value: Any) -> dict[str, list[int]]:
    if type(value) is not frozenset:
        raise WireError(f"{_shown(value)} is no set of partitions")
    topics: dict[str, list[int]] = {}
    for tp in value:
        if type(tp) is not TopicPartition:
            raise WireError(f"{_shown(tp)} is no TopicPartition")
        topics.setdefault(_STR.write(tp.topic), []).append(_INT.write(tp.partition))
    return topics


def _read_partitions(data: Any) -> frozenset[TopicPartition]:
    if type(data) is not dict or not all(type(numbers) is list for numbers in data.values()):
        raise WireError(f"{_shown(data)} is no set of partitions")
    found = frozenset(TopicPartition(_STR.read(t), _INT.read(p)) for t, numbers in data.items() for p in numbers)
    if len(found) != sum(len(numbers) for numbers in data.values()):
        raise WireError("a partition occurs twice")
    return found


_PARTITIONS: Final = _Kind("partitions", _write_partitions, _read_partitions)
"""The names of topics are long, and there are many partitions: each name is written once."""


def _or_none(kind: _Kind) -> _Kind:
    write_one, read_one = kind.write, kind.read
    return _Kind(
        f"{kind.shape}?",
        lambda value: None if value is None else write_one(value),
        lambda data: None if data is None else read_one(data),
    )


def _union(arms: list[tuple[Any, _Kind]]) -> _Kind:
    """Each arm by its name, so that a value of one is never read as another; but nothing beside None needs no name."""
    kinds = {getattr(arm, "__name__", str(arm)): kind for arm, kind in arms}
    if len(kinds) != len(arms):
        raise TypeError(f"{sorted(kinds)}: two of a union's types have one name")
    if len(kinds) == 2 and "NoneType" in kinds:
        return _or_none(next(kind for name, kind in kinds.items() if name != "NoneType"))

    def write(value: Any) -> list[Any] | None:
        if value is None and "NoneType" in kinds:
            return None
        for name, kind in kinds.items():
            try:
                return [name, kind.write(value)]
            except WireError:
                continue
        raise WireError(f"{_shown(value)} is none of {sorted(kinds)}")

    def read(data: Any) -> Any:
        if data is None and "NoneType" in kinds:
            return None
        if type(data) is not list or len(data) != 2 or type(data[0]) is not str or data[0] not in kinds:
            raise WireError(f"{_shown(data)} is none of {sorted(kinds)}")
        return kinds[data[0]].read(data[1])

    return _Kind("|".join(f"{name}={kind.shape}" for name, kind in kinds.items()), write, read)


# --- frames ---------------------------------------------------------------------------------------------------------

_LENGTH: Final = 4


def framed(body: bytes) -> bytes:
    """A body behind its length."""
    return len(body).to_bytes(_LENGTH, "big") + body


class Frames:
    """Cuts a stream of bytes into the bodies that :func:`framed` made.

    Args:
        bytes_max: the longest body that is taken. May be changed between two frames.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> bytes | None:
        """The next body, or None when more bytes are needed.

        Raises:
            WireError: it says that it is empty, or longer than may be: known before a byte of it is kept.
        """
        if len(self._buffer) < _LENGTH:
            return None
        length = int.from_bytes(self._buffer[:_LENGTH], "big")
        if not 0 < length <= self.bytes_max:
            raise WireError(f"a frame of {length} bytes; {self.bytes_max} are the most")
        end = _LENGTH + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH:end])
        del self._buffer[:end]  # cheap: a bytearray only moves its start
        return body
