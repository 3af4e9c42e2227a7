"""How the values in a message are written and read, type by type.

Runs in: the stream reader, executor processes, tasks. Deliberately absent: guessing. A value is exactly of its type, in
both directions: a whole number is no truth value, and a list no set.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from spark_group_source.model import OffsetRange, TopicPartition

INT_MAX: Final = 2**63 - 1
"""Offsets are Java's longs."""
SHOWN_MAX: Final = 60
"""Characters of somebody else's text that go into a refusal."""


class WireError(ValueError):
    """These bytes, or this value, are no message. Says what was wrong and where."""


class Kind(NamedTuple):
    """How one type of field is told, written and read. ``shape`` goes into the dialect."""

    shape: str
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


def shown(value: object) -> str:
    """Somebody else's value in a text of ours: short, on one line, and not more work than that."""
    if isinstance(value, list | dict | tuple):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, str | bytes):
        return repr(value[:SHOWN_MAX])
    return repr(value)[:SHOWN_MAX] if isinstance(value, bool | float | None) else type(value).__name__


def _exactly(wanted: type[Any], check: Callable[[Any], bool] = lambda _: True) -> Kind:
    """bool is an int in Python; here it is not."""

    def same(value: Any) -> Any:
        if type(value) is not wanted or not check(value):
            raise WireError(f"{shown(value)} is no {wanted.__name__}")
        return value

    return Kind(wanted.__name__, same, same)


def _is_text(value: str) -> bool:
    try:  # JSON can name half of a character
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


STR = _exactly(str, _is_text)
INT = _exactly(int, lambda value: -INT_MAX - 1 <= value <= INT_MAX)
PLAIN: Final[dict[Any, Kind]] = {
    str: STR,
    int: INT,
    bool: _exactly(bool),
    float: _exactly(float, math.isfinite),
    type(None): _exactly(type(None)),
}


def one_of(values: Mapping[Any, Any]) -> Kind:
    if not all(type(text) is str for text in values):
        raise TypeError(f"{list(values)} are not all texts")
    names = {member: text for text, member in values.items()}
    made = {type(member) for member in names}

    def write(value: Any) -> str:
        if type(value) not in made or value not in names:
            raise WireError(f"{shown(value)} is none of {sorted(values)}")
        return str(names[value])

    def read(data: Any) -> Any:
        if type(data) is not str or data not in values:
            raise WireError(f"{shown(data)} is none of {sorted(values)}")
        return values[data]

    return Kind("|".join(sorted(values)), write, read)


def many(name: str, made: type[Any], kind: Kind) -> Kind:
    write_one, read_one = kind.write, kind.read

    def write(value: Any) -> list[Any]:
        if type(value) is not made:
            raise WireError(f"{shown(value)} is no {name}")
        return [write_one(part) for part in value]

    def read(data: Any) -> Any:
        if type(data) is not list:
            raise WireError(f"{shown(data)} is no {name}")
        value = made([read_one(part) for part in data])
        if len(value) != len(data):
            raise WireError(f"something occurs twice in a {name}")
        return value

    return Kind(f"{name}[{kind.shape}]", write, read)


def mapping_of(key: Kind, value: Kind) -> Kind:
    def write(mapping: Any) -> list[Any]:
        if not isinstance(mapping, Mapping):
            raise WireError(f"{shown(mapping)} is no mapping")
        return [[key.write(k), value.write(v)] for k, v in mapping.items()]

    def read(data: Any) -> dict[Any, Any]:
        if type(data) is not list or not all(type(pair) is list and len(pair) == 2 for pair in data):
            raise WireError(f"{shown(data)} is no mapping")
        mapping = {key.read(k): value.read(v) for k, v in data}
        if len(mapping) != len(data):
            raise WireError("a key occurs twice")
        return mapping

    return Kind(f"{{{key.shape}:{value.shape}}}", write, read)


def _runs(name: str, kind: Kind, split: Callable[[Any], Iterable[tuple[str, Any]]], join: Callable[[Any], Any]) -> Kind:
    """Things of partitions: the names of topics are long, and there are many partitions, so that a name is written once
    for all that follow one another.

    Args:
        kind: of what there is beside the topic.
        split: topic and the rest, for each.
        join: the value, from pairs of these.
    """

    def write(value: Any) -> list[Any]:
        runs: list[Any] = []
        last = None
        for topic, rest in split(value):
            if topic != last:
                runs.append([STR.write(topic), []])
                last = topic
            runs[-1][1].append(kind.write(rest))
        return runs

    def read(data: Any) -> Any:
        if type(data) is not list:
            raise WireError(f"{shown(data)} is no {name}")
        found = []
        for run in data:
            if type(run) is not list or len(run) != 2 or type(run[1]) is not list:
                raise WireError(f"{shown(run)} is no topic with its partitions")
            topic = STR.read(run[0])
            found += [(topic, kind.read(rest)) for rest in run[1]]
        value = join(found)
        if len(value) != len(found):
            raise WireError(f"something occurs twice in a {name}")
        return value

    return Kind(f"{name}[{kind.shape}]", write, read)


def _parts(values: Any, wanted: type[Any], made: type[Any]) -> Any:
    if type(values) is not wanted or not all(type(value) is made for value in values):
        raise WireError(f"{shown(values)} is no {wanted.__name__} of {made.__name__}")
    return values


def _fixed(kinds: Sequence[Kind]) -> Kind:
    """A tuple with these parts."""

    def write(value: Any) -> list[Any]:
        return [kind.write(part) for kind, part in zip(kinds, value, strict=True)]

    def read(data: Any) -> tuple[Any, ...]:
        if type(data) is not list or len(data) != len(kinds):
            raise WireError(f"{shown(data)} is not {len(kinds)} values")
        return tuple(kind.read(part) for kind, part in zip(kinds, data, strict=True))

    return Kind(",".join(kind.shape for kind in kinds), write, read)


def partition_mapping(value: Kind) -> Kind:
    def split(mapping: Any) -> Iterable[tuple[str, Any]]:
        if not isinstance(mapping, Mapping):
            raise WireError(f"{shown(mapping)} is no mapping")
        _parts(tuple(mapping), tuple, TopicPartition)
        return ((tp.topic, (tp.partition, what)) for tp, what in mapping.items())

    return _runs(
        "mapping of partitions",
        _fixed([INT, value]),
        split,
        lambda pairs: {TopicPartition(topic, partition): what for topic, (partition, what) in pairs},
    )


def _or_none(kind: Kind) -> Kind:
    write_one, read_one = kind.write, kind.read
    return Kind(
        f"{kind.shape}?",
        lambda value: None if value is None else write_one(value),
        lambda data: None if data is None else read_one(data),
    )


def union_of(arms: list[tuple[Any, Kind]]) -> Kind:
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
        raise WireError(f"{shown(value)} is none of {sorted(kinds)}")

    def read(data: Any) -> Any:
        if data is None and "NoneType" in kinds:
            return None
        if type(data) is not list or len(data) != 2 or type(data[0]) is not str or data[0] not in kinds:
            raise WireError(f"{shown(data)} is none of {sorted(kinds)}")
        return kinds[data[0]].read(data[1])

    return Kind("|".join(f"{name}={kind.shape}" for name, kind in kinds.items()), write, read)


OF_PARTITIONS: Final[dict[Any, Kind]] = {
    frozenset[TopicPartition]: _runs(
        "frozenset of partitions",
        INT,
        lambda tps: sorted(_parts(tps, frozenset, TopicPartition)),
        lambda pairs: frozenset(TopicPartition(topic, partition) for topic, partition in pairs),
    ),
    tuple[TopicPartition, ...]: _runs(
        "tuple of partitions",
        INT,
        lambda tps: _parts(tps, tuple, TopicPartition),
        lambda pairs: tuple(TopicPartition(topic, partition) for topic, partition in pairs),
    ),
    tuple[OffsetRange, ...]: _runs(
        "tuple of ranges",
        _fixed([INT, INT, INT]),
        lambda ranges: ((r.tp.topic, (r.tp.partition, r.start, r.end)) for r in _parts(ranges, tuple, OffsetRange)),
        lambda pairs: tuple(OffsetRange(TopicPartition(topic, p), start, end) for topic, (p, start, end) in pairs),
    ),
}
