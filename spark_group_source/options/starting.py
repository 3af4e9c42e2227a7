"""Where a partition starts when its group has never committed an offset for it.

Runs in: every process. Deliberately absent: asking a broker (``kafka`` turns a :class:`StartAt` into an offset) and the
decision *whether* a partition has a committed offset (``group``).
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from spark_group_source.errors import OptionError
from spark_group_source.model import EARLIEST, LATEST, StartAt, TopicPartition

LATEST_OFFSET = -1
"""In the JSON of ``startingOffsets``: the end of the partition."""
EARLIEST_OFFSET = -2
"""In the JSON of ``startingOffsets``: the first record still there."""
OFFSET_MAX = 2**63 - 1
PARTITION_MAX = 2**31 - 1
NAMED_MAX = 20
"""Partitions that an error message lists before it only counts them."""

NoMatch = Literal["error", "latest"]
PartitionValues = tuple[tuple[TopicPartition, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingPosition:
    """What the starting options say, after the most specific one has won.

    Exactly one of ``everywhere`` and ``each`` decides: ``each`` when it is not None. A partition that appears after
    the stream began starts at :data:`EARLIEST` whatever is said here, else its first records would be skipped;
    who finds the partition knows that it is new.
    """

    everywhere: StartAt = EARLIEST
    each: tuple[tuple[TopicPartition, StartAt], ...] | None = None
    no_match: NoMatch = "error"
    """For kind "time", when no record is that young: fail, or start at the end."""

    def resolve(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, StartAt]:
        """The start of every partition of a stream that begins now.

        Args:
            partitions: all partitions of the subscribed topics, not only those assigned to this process.

        Raises:
            OptionError: the JSON names other partitions than there are; ``fields``: specified, assigned.
        """
        if self.each is None:
            return dict.fromkeys(partitions, self.everywhere)
        named = dict(self.each)
        specified, assigned = sorted(named), sorted(set(partitions))
        if specified != assigned:
            raise OptionError(
                "the starting options name other partitions than the subscribed topics have: "
                f"specified {_listed(specified)}; assigned {_listed(assigned)}. "
                "Name every partition (-2 is earliest, -1 is latest) and no other",
                specified=[str(tp) for tp in specified],
                assigned=[str(tp) for tp in assigned],
            )
        return named

    def of(self, tp: TopicPartition) -> StartAt:
        """The start of one partition, with no check of the others; earliest where the JSON does not name it."""
        return self.everywhere if self.each is None else dict(self.each).get(tp, EARLIEST)


def start_at(offset: int) -> StartAt:
    """What one number in the JSON of ``startingOffsets`` means."""
    if offset == EARLIEST_OFFSET:
        return EARLIEST
    return LATEST if offset == LATEST_OFFSET else StartAt("offset", offset)


def parse_offsets(text: str) -> StartAt | PartitionValues:
    """Read ``startingOffsets``: earliest, latest (in any case) or ``{"topic":{"0":23,"1":-1}}``.

    Raises:
        ValueError: says what would be right. Below -2 nothing is accepted: the Kafka client gives those numbers
            meanings of its own (-1000 is "as committed").
    """
    word = text.strip().lower()
    if word in ("earliest", "latest"):
        return EARLIEST if word == "earliest" else LATEST
    if not word.startswith("{"):
        raise ValueError('it must be earliest, latest or JSON such as {"topic":{"0":23,"1":-1}}')
    return _parse_partition_json(
        text, at_least=EARLIEST_OFFSET, meaning="an offset, or -1 for latest, or -2 for earliest"
    )


def parse_timestamps(text: str) -> PartitionValues:
    """Read ``startingOffsetsByTimestamp``: ``{"topic":{"0":1700000000000}}``, in milliseconds since the epoch.

    Raises:
        ValueError: says what would be right. Negative times are refused: Kafka gives them special meanings.
    """
    return _parse_partition_json(text, at_least=0, meaning="milliseconds since the epoch, 0 or more")


def topics_of(values: PartitionValues) -> set[str]:
    """The topics that a per-partition JSON names."""
    return {tp.topic for tp, _ in values}


def _parse_partition_json(text: str, *, at_least: int, meaning: str) -> PartitionValues:
    try:
        doc = json.loads(text, object_pairs_hook=_no_twins)
    except json.JSONDecodeError as exc:
        raise ValueError(f"it is not JSON ({exc.msg} at character {exc.pos + 1})") from None
    if not isinstance(doc, dict) or not doc:
        raise ValueError('it must be JSON such as {"topic":{"0":23,"1":-1}}')
    found: dict[TopicPartition, int] = {}
    for topic, entry in doc.items():
        if not isinstance(entry, dict) or not entry:
            raise ValueError(f'topic {topic!r} must have partitions, such as {{"0":23}}')
        for number, value in entry.items():
            tp = TopicPartition(topic, _partition(topic, number))
            # bool is an int in Python and 1.0 == 1: only a plain JSON integer may pass.
            if type(value) is not int or not at_least <= value <= OFFSET_MAX:
                raise ValueError(f"partition {tp} has {value!r}; it must be {meaning}")
            found[tp] = value
    return tuple(sorted(found.items()))


def _partition(topic: str, number: str) -> int:
    if not number.isdecimal() or str(int(number)) != number or int(number) > PARTITION_MAX:
        raise ValueError(f"topic {topic!r} names partition {number!r}; it must be a whole number such as 0")
    return int(number)


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose key stands there twice would silently lose one of the two."""
    doc = dict(pairs)
    if len(doc) != len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it names {twin!r} twice")
    return doc


def _listed(partitions: list[TopicPartition]) -> str:
    shown = ", ".join(str(tp) for tp in partitions[:NAMED_MAX])
    more = len(partitions) - NAMED_MAX
    return f"[{shown}]" if more <= 0 else f"[{shown} and {more} more]"
