"""A program that reads and sends requests while responses are corrupted, until its stdin ends. Each result is a line of
JSON on stdout.

Runs in: a child process of ``test_spoiled``, because a crash of the client library ends it. Deliberately absent:
assertions.
"""

import json
import logging
import select
import sys
from collections.abc import Callable
from typing import Any

from spark_group_source.errors import GroupError
from spark_group_source.kafka.admin import Admin
from spark_group_source.model import OffsetRange, Piece, TopicPartition
from spark_group_source.reader.range_reader import ReadOptions, read_ranges

DEADLINE_S = 5.0


def value(partition: int, offset: int) -> bytes:
    """The value of a record."""
    return (b"%d/%d " % (partition, offset)).ljust(1000, b"%d" % (offset % 10))


def read(given: dict[str, Any], ranges: list[OffsetRange], seconds: float = DEADLINE_S) -> str:
    """Read every record of the ranges; return how they differ from the expected ones."""
    settings = {"bootstrap.servers": given["servers"], "reconnect.backoff.max.ms": "500", **given["settings"]}
    came: dict[TopicPartition, list[int]] = {r.tp: [] for r in ranges}
    for batch in read_ranges(Piece(tuple(ranges)), ReadOptions(settings, progress_timeout_s=seconds)):
        columns = (batch.column(name).to_pylist() for name in ("partition", "offset", "value"))
        for partition, offset, content in zip(*columns, strict=True):
            came[TopicPartition(given["topic"], partition)].append(offset)
            if content != value(partition, offset):
                return f"another record at {partition}/{offset}"
    differs = [str(r) for r in ranges if came[r.tp] != list(range(r.start, r.end))]
    return f"other offsets in {differs}" if differs else "right"


def describe(given: dict[str, Any], ranges: list[OffsetRange]) -> str:
    """Read the end offsets, with a new admin client each time."""
    admin = Admin({"bootstrap.servers": given["servers"]}, retries=1, retry_interval_s=0.1)
    topics = admin.require_topics([given["topic"]])
    ends = admin.latest([r.tp for r in ranges])
    admin.describe_group(given["topic"])
    right = len(topics) == 1 and ends == {r.tp: r.end for r in ranges}
    return "right" if right else f"another answer: {topics} {ends}"


def main(given: dict[str, Any]) -> None:
    ranges = [OffsetRange(TopicPartition(given["topic"], int(p)), 0, end) for p, end in given["ends"].items()]
    turns: list[Callable[[dict[str, Any], list[OffsetRange]], str]] = [read, describe]
    while not select.select([sys.stdin], [], [], 0)[0]:
        for turn in turns:
            try:
                result = turn(given, ranges)
            except GroupError as exc:
                named = given["servers"].split(",")[0] in str(exc) or "broker" in str(exc).lower()
                result = "named" if named else str(exc)
            print(json.dumps(f"{turn.__name__}: {result}"), flush=True)  # noqa: T201


if __name__ == "__main__":
    logging.basicConfig(level="ERROR")
    main(json.loads(sys.argv[1]))
