"""The commands of the current event, and a history of the last events and commands for error texts.

Runs in: the stream reader (inside ``run``), tests. Deliberately absent: the execution of commands, and the meaning of
events.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import fields
from itertools import islice

from spark_group_source.model import TopicPartition
from spark_group_source.protocol import events as ev
from spark_group_source.protocol.offsets import StreamOffset

HISTORY_LINES_MAX = 200
"""The lines of the history: enough for several rebalances, small enough for an error text."""

ITEMS_MAX = 8
CHARS_MAX = 200
"""The limits of one line: the items of a collection, and the characters."""
UNRECORDED = (
    ev.NextBatchRequested,
    ev.GroupDescribed,
    ev.AgentHeartbeat,
    ev.PrefetchReported,
    ev.LogEndsRead,
    ev.TargetRead,
    ev.TaskReported,
)
"""Events that are too frequent or too large for the history; the commands that follow from them are in it."""


class Outbox:
    """Collects the commands of one event; the caller of :meth:`begin` reads them afterwards."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.commands: list[ev.Command] = []
        self._history: deque[str] = deque(maxlen=HISTORY_LINES_MAX)

    def begin(self, now_ms: int) -> None:
        """Start with no commands, at the time ``now_ms``."""
        self.now_ms, self.commands = now_ms, []

    def record(self, event: ev.Event) -> None:
        """Add an event to the history."""
        if not isinstance(event, UNRECORDED):
            self._history.append(f"{self.now_ms} {brief(event)}")

    def order(self, command: ev.Command) -> None:
        """Add a command."""
        self._history.append(f"{self.now_ms}   -> {brief(command)}")
        self.commands.append(command)

    def log(self, text: str, *, warn: bool = False) -> None:
        """Add a line for the log, ``<event>; <consequence>``. ``warn``: at level WARNING."""
        self.order(ev.LogLine(text=text, warn=warn))

    def history(self) -> str:
        """The last :data:`HISTORY_LINES_MAX` events and commands, one per line, oldest first."""
        return "\n".join(self._history)


def brief(value: object) -> str:
    """An event or command as one line. Long collections are shortened before they become text: plans have many
    partitions."""
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
