"""Messages as bytes: frozen dataclasses to bounded JSON and back.

Runs in: the stream reader, agents, tasks. Deliberately absent: sockets, and pickle, which would run what a peer sends.

A message is the list of its fields' values, in order; its types come from the annotations alone. What is decoded has
exactly the annotated types: anything else is a :class:`WireError`.
"""

import functools
import json
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from itertools import groupby
from typing import Any, Final, NamedTuple, Union, get_args, get_origin, get_type_hints

from spark_group_source.model import OffsetRange, TopicPartition

FRAME_BYTES_MAX: Final = 1 << 20
"""One message. The largest are lists of partitions: 100,000 partitions of one topic are 600 KB."""
INT_MAX: Final = 2**63 - 1
"""Offsets are Java's longs."""


class WireError(ValueError):
    """These bytes, or this value, are not a message. The text has one short line."""


class Envelope(NamedTuple):
    """A message, and whether it is a question (``asks`` > 0), or the answer to one (``answers`` > 0)."""

    message: Any  # one of the codec's types
    asks: int = 0
    answers: int = 0


class Codec:
    """Writes and reads a fixed set of messages.

    Args:
        messages: the dataclasses that may be sent; their names differ. Fields may be str, int, bool, None, tuples and
            mappings of these, tuples of partitions or ranges, mappings by partition, dataclasses, and unions of
            dataclasses and None.
        bytes_max: the longest message.

    Raises:
        TypeError: a field has another type.
    """

    def __init__(self, messages: Iterable[Any], *, bytes_max: int = FRAME_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self._kinds = {message.__name__: (message, _kind(message)) for message in messages}

    def encode(self, message: Any, *, asks: int = 0, answers: int = 0) -> bytes:
        """The bytes of a message.

        Raises:
            WireError: it is none of the codec's messages, or there are too many bytes.
        """
        name = type(message).__name__
        known, kind = self._kinds.get(name, (None, _NONE))
        if known is not type(message):
            raise WireError(f"{name} is not a message of this channel")
        try:
            parts = [asks, answers, name, kind.write(message)]
            data = json.dumps(parts, ensure_ascii=False, separators=(",", ":")).encode()
        except Exception as exc:  # noqa: BLE001 - a field with another type than it says
            raise WireError(f"{name} cannot be written: {_short(exc)}") from None
        if len(data) > self.bytes_max:
            raise WireError(f"{name} would be {len(data)} bytes; the maximum is {self.bytes_max}")
        return data

    def decode(self, data: bytes) -> Envelope:
        """The message that these bytes are.

        Raises:
            WireError: they are none. Nothing else is raised, whatever the bytes.
        """
        try:
            asks, answers, name, body = json.loads(data)
            if not (0 <= _INT.read(asks) <= INT_MAX and 0 <= _INT.read(answers) <= INT_MAX):
                raise WireError("the number of a question is negative")
            return Envelope(self._kinds[_STR.read(name)][1].read(body), asks, answers)
        except Exception as exc:  # noqa: BLE001 - RecursionError, whatever a message's own check raises, ...
            raise WireError(f"not a message of this channel: {_short(exc)}") from None


class _Kind(NamedTuple):
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def _plain(wanted: type[Any], fits: Callable[[Any], bool] = lambda _: True) -> _Kind:
    """Exactly this type: bool is an int in Python, here it is not."""

    def same(value: Any) -> Any:
        if type(value) is not wanted or not fits(value):
            raise WireError(f"not a valid {wanted.__name__}: {value!r:.60}")
        return value

    return _Kind(same, same)


_STR: Final = _plain(str, lambda text: text.isascii() or bool(text.encode()))  # JSON can name half of a character
_INT: Final = _plain(int, lambda number: -INT_MAX - 1 <= number <= INT_MAX)
_NONE: Final = _plain(type(None))
_PLAIN: Final[Mapping[Any, _Kind]] = {str: _STR, int: _INT, bool: _plain(bool), type(None): _NONE}


@functools.cache
def _kind(hint: Any) -> _Kind:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _PLAIN:
        return _PLAIN[hint]
    if origin is tuple and len(arguments) == 2 and arguments[1] is ...:
        return _tuple(arguments[0])
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(*arguments)
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if isinstance(hint, type) and is_dataclass(hint):
        return _record(hint)
    raise TypeError(f"{hint} cannot be sent over the channel")


def _record(made: type[Any]) -> _Kind:
    hints = get_type_hints(made)
    names = [field.name for field in fields(made)]
    kinds = [_kind(hints[name]) for name in names]

    def write(value: Any) -> list[Any]:
        if type(value) is not made:
            raise WireError(f"not a {made.__name__}: {type(value).__name__}")
        return [kind.write(getattr(value, name)) for name, kind in zip(names, kinds, strict=True)]

    def read(data: Any) -> Any:
        parts = zip(names, kinds, _list(data), strict=True)
        return made(**{name: kind.read(part) for name, kind, part in parts})

    return _Kind(write, read)


def _tuple(of: Any) -> _Kind:
    if of is TopicPartition:
        return _by_topic(_INT, lambda tps: tps, TopicPartition, tuple)
    if of is OffsetRange:
        rest = _fixed(_INT, _INT, _INT)
        return _by_topic(
            rest,
            lambda ranges: ((r.tp.topic, (r.tp.partition, r.start, r.end)) for r in ranges),
            lambda topic, part: OffsetRange(TopicPartition(topic, part[0]), part[1], part[2]),
            tuple,
        )
    kind = _kind(of)
    return _Kind(lambda values: [kind.write(one) for one in values], lambda data: tuple(map(kind.read, _list(data))))


def _mapping(key: Any, value: Any) -> _Kind:
    if key is TopicPartition:
        return _by_topic(
            _fixed(_INT, _kind(value)),
            lambda mapping: ((tp.topic, (tp.partition, one)) for tp, one in mapping.items()),
            lambda topic, part: (TopicPartition(topic, part[0]), part[1]),
            _once,
        )
    pair = _fixed(_kind(key), _kind(value))
    return _Kind(
        lambda mapping: [pair.write(item) for item in mapping.items()],
        lambda data: _once([pair.read(item) for item in _list(data)]),
    )


def _by_topic(
    rest: _Kind, split: Callable[[Any], Iterable[tuple[str, Any]]], join: Callable[[str, Any], Any], all_of: Any
) -> _Kind:
    """The values of partitions: the name of a topic is written once for all of its partitions in a row."""
    return _Kind(
        lambda value: [
            [_STR.write(topic), [rest.write(one) for _, one in group]]
            for topic, group in groupby(split(value), key=lambda pair: pair[0])
        ],
        lambda data: all_of(
            [join(_STR.read(topic), rest.read(one)) for topic, ones in _list(data) for one in _list(ones)]
        ),
    )


def _fixed(*kinds: _Kind) -> _Kind:
    return _Kind(
        lambda value: [kind.write(part) for kind, part in zip(kinds, value, strict=True)],
        lambda data: tuple(kind.read(part) for kind, part in zip(kinds, _list(data), strict=True)),
    )


def _union(arms: tuple[Any, ...]) -> _Kind:
    """A value of one arm is never read as another: it carries the arm's name, unless there is only one beside None."""
    kinds = {arm.__name__: _kind(arm) for arm in arms if arm is not type(None)}
    optional = len(kinds) < len(arms)
    only = next(iter(kinds.values())) if len(kinds) == 1 else None

    def write(value: Any) -> Any:
        if value is None and optional:
            return None
        name = type(value).__name__
        return only.write(value) if only else [name, kinds[name].write(value)]

    def read(data: Any) -> Any:
        if data is None and optional:
            return None
        if only:
            return only.read(data)
        name, body = _list(data)
        return kinds[_STR.read(name)].read(body)

    return _Kind(write, read)


def _list(data: Any) -> list[Any]:
    if type(data) is not list:
        raise WireError(f"not a list: {type(data).__name__}")
    return data


def _once(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    if len(made := dict(pairs)) != len(pairs):
        raise WireError("a key occurs twice")
    return made


def _short(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {str(exc)!r:.80}"
