"""The values of the starting options.

Runs in: every process. Deliberately absent: the position that follows from all of them (``protocol.rules``), and
requests to brokers (``kafka`` turns a :class:`StartAt` into an offset).
"""

import json
from typing import Any

from spark_group_source.model import EARLIEST, LATEST, StartAt, TopicPartition

LATEST_OFFSET = -1
"""In the JSON of ``startingOffsets``: the end of the log."""
EARLIEST_OFFSET = -2
"""In the JSON of ``startingOffsets``: the start of the log."""
OFFSET_MAX = 2**63 - 1
PARTITION_MAX = 2**31 - 1

PartitionValues = tuple[tuple[TopicPartition, int], ...]


def start_at(offset: int) -> StartAt:
    """Return the position that a number in the JSON of ``startingOffsets`` means."""
    if offset == EARLIEST_OFFSET:
        return EARLIEST
    return LATEST if offset == LATEST_OFFSET else StartAt("offset", offset)


def parse_offsets(text: str) -> StartAt | PartitionValues:
    """Parse ``startingOffsets``: earliest, latest (in any case) or ``{"topic":{"0":23,"1":-1}}``.

    Raises:
        ValueError: has the expected format. Numbers below -2 are refused, because the Kafka client gives them other
            meanings (-1000 is the committed offset).
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
    """Parse ``startingOffsetsByTimestamp``: ``{"topic":{"0":1700000000000}}``, in milliseconds since the epoch.

    Raises:
        ValueError: has the expected format. Negative times are refused, because Kafka gives them other meanings.
    """
    return _parse_partition_json(text, at_least=0, meaning="milliseconds since the epoch, 0 or more")


def topics_of(values: PartitionValues) -> set[str]:
    """Return the topics that a per-partition JSON names."""
    return {tp.topic for tp, _ in values}


def _parse_partition_json(text: str, *, at_least: int, meaning: str) -> PartitionValues:
    try:
        doc = json.loads(text, object_pairs_hook=_without_duplicates)
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
            # Only a JSON integer is accepted: bool is a subclass of int, and 1.0 == 1.
            if type(value) is not int or not at_least <= value <= OFFSET_MAX:
                raise ValueError(f"partition {tp} has {value!r}; it must be {meaning}")
            found[tp] = value
    return tuple(sorted(found.items()))


def _partition(topic: str, number: str) -> int:
    if not number.isdecimal() or str(int(number)) != number or int(number) > PARTITION_MAX:
        raise ValueError(f"topic {topic!r} has partition {number!r}; it must be an integer such as 0")
    return int(number)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; refuse duplicate keys, of which ``json`` would silently drop one."""
    doc = dict(pairs)
    if len(doc) != len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it names {duplicate!r} twice")
    return doc
