"""The file in which a reset is written down: as ``kafka-consumer-groups --export`` writes it and ``--from-file`` reads.

Runs in: a terminal. Deliberately absent: Kafka.

A line is ``topic,partition,offset``, without a header; Kafka's tool puts the group before it where it is told of
several groups (KIP-222, and ``CsvUtils`` of Kafka's tools).
"""

import csv
import io
from collections.abc import Mapping
from pathlib import Path

from spark_group_source.errors import OptionError
from spark_group_source.model import TopicPartition


def written(offsets: Mapping[TopicPartition, int]) -> str:
    """The lines of a plan, for one group."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    for tp, offset in sorted(offsets.items()):
        lines.writerow((tp.topic, tp.partition, offset))
    return text.getvalue()


def read(path: Path, group: str) -> dict[TopicPartition, int]:
    """The plan in a file; of a file with several groups, the lines of this one.

    Raises:
        OptionError: a line cannot be read, stands there twice, or none is of this group.
    """
    found: dict[TopicPartition, int] = {}
    for number, row in enumerate(csv.reader(path.read_text(encoding="utf-8").splitlines()), 1):
        if not row:
            continue
        whose, *rest = row if len(row) == 4 else (group, *row)
        numbers = [cell.strip() for cell in rest[1:]]
        if len(rest) != 3 or not all(cell.isascii() and cell.isdigit() for cell in numbers):
            raise OptionError(
                f"{path}, line {number}: {','.join(row)!r} is not topic,partition,offset, as "
                "kafka-consumer-groups --export writes it"
            )
        tp = TopicPartition(rest[0].strip(), int(numbers[0]))
        if whose.strip() != group:
            continue
        if tp in found:
            raise OptionError(f"{path}, line {number}: {tp} stands there twice")
        found[tp] = int(numbers[1])
    if not found:
        raise OptionError(f"{path} has no line of group {group!r}")
    return found
