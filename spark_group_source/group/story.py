"""The last events of a run and what they led to: the text that explains a failure.

Runs in: the stream reader, tests. Deliberately absent: what an event means (``machine``).
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import fields
from itertools import islice

from spark_group_source.group import events as ev
from spark_group_source.group.offsets import StreamOffset
from spark_group_source.model import TopicPartition

STORY_LINES_MAX = 200
"""Enough for several rebalances, small enough for an error text."""

ITEMS_MAX = 8
CHARS_MAX = 200
"""What an event's partitions, and its line, are cut to."""


OFTEN = (ev.Boundary, ev.HostHeard)
"""What comes so often that it would leave no room for anything else; what it leads to is told."""


class Story:
    """The last :data:`STORY_LINES_MAX` events and commands."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=STORY_LINES_MAX)

    def happened(self, event: ev.Event, now_ms: int) -> None:
        if not isinstance(event, OFTEN):
            self._lines.append(f"{now_ms} {brief(event)}")

    def led_to(self, commands: Iterable[ev.Command], now_ms: int) -> None:
        self._lines.extend(f"{now_ms}   -> {brief(command)}" for command in commands)

    def text(self) -> str:
        """One line each, oldest first."""
        return "\n".join(self._lines)


def brief(value: object) -> str:
    """An event or command in one line. What is long is cut before it becomes text: plans have many partitions."""
    parts = [f"{f.name}={_short(getattr(value, f.name))}" for f in fields(value)]  # type: ignore[arg-type]
    text = f"{type(value).__name__}({', '.join(parts)})"
    return text if len(text) <= CHARS_MAX else text[:CHARS_MAX] + "…"


def _short(value: object) -> str:
    if isinstance(value, TopicPartition):
        return str(value)
    if isinstance(value, StreamOffset):
        return f"batch {value.seq} of {value.stream} {_short(value.ranges)}"
    if not isinstance(value, Mapping | tuple):
        return str(value)
    if isinstance(value, tuple) and value and isinstance(value[0], int):
        return f"[{value[0]},{value[-1]})"
    more = ["…"] if len(value) > ITEMS_MAX else []
    first = islice(value.items() if isinstance(value, Mapping) else value, ITEMS_MAX)
    if isinstance(value, Mapping):
        return f"{len(value)}{{{', '.join([f'{_short(key)}: {_short(item)}' for key, item in first] + more)}}}"
    return f"{len(value)}[{', '.join([_short(item) for item in first] + more)}]"
