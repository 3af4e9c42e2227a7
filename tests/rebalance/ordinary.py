"""An ordinary consumer in the group: :class:`OrdinaryConsumer` starts, commands, kills and freezes it.

Runs in: tests. Deliberately absent: the member itself (``member_process``, the program of the child process).
"""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kafka_helpers import STALLED_S, await_progress, size_of
from streams import LONG_SESSION_MS

from rebalance.child import Child
from spark_group_source.model import TopicPartition

PROGRAM = Path(__file__).with_name("member_process.py")
END_S = 300

KINDS = ("range", "cooperative-sticky", "consumer")
"""The assignors of a group: an eager and the incremental one of the classic protocol, and the broker's own
(KIP-848)."""

Record = tuple[str, int, int]
"""topic, partition, offset"""


def settings_of(strategy: str, *, session_ms: int = LONG_SESSION_MS) -> dict[str, object]:
    """librdkafka settings for one of :data:`KINDS`, another assignor, or a list of assignors."""
    if strategy == "consumer":  # the broker has the other settings
        return {"group.protocol": "consumer"}
    return {
        "group.protocol": "classic",
        "partition.assignment.strategy": strategy,
        "session.timeout.ms": session_ms,
        "heartbeat.interval.ms": 300,
    }


class OrdinaryConsumer(Child):
    """It runs in a child process. Every processed record and every commit is a line in ``file``.

    Args:
        settings: librdkafka settings besides the usual ones; see :func:`settings_of`.
        keep: process without committing.
    """

    def __init__(
        self,
        servers: str,
        group: str,
        topics: list[str],
        file: Path,
        *,
        strategy: str = "range",
        keep: bool = False,
        session_ms: int = LONG_SESSION_MS,
        **settings: object,
    ) -> None:
        super().__init__(file, END_S)
        self.events: list[dict[str, Any]] = []
        everything = {
            "bootstrap.servers": servers,
            "group.id": group,
            "client.id": "ordinary",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "topic.metadata.refresh.interval.ms": 500,
            "log_level": 3,
            **settings_of(strategy, session_ms=session_ms),
            **{name.replace("__", "."): value for name, value in settings.items()},
        }
        arguments = {
            "topics": topics,
            "file": str(file),
            "settings": everything,
            "keep": keep,
        }
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, name="ordinary", daemon=True)
        self._reader.start()

    # --- commands ---------------------------------------------------------------------------------------------------

    def send_command(self, order: str, **more: object) -> None:
        """Send a command; it is executed between two records."""
        self.send(json.dumps({"do": order, **more}))

    def do(self, order: str, **more: object) -> None:
        """Send a command and wait until it was executed."""
        before = len(self._executed(order))
        self.send_command(order, **more)
        await_progress(
            lambda: len(self._executed(order)) > before, self.progress, what=f"{order} of the ordinary consumer"
        )

    def kill(self) -> None:
        super().kill()
        self._reader.join(END_S)

    def close(self) -> None:
        """Leave the group and end."""
        self.end(json.dumps({"do": "close"}))
        self._reader.join(END_S)

    # --- events -----------------------------------------------------------------------------------------------------

    @property
    def partitions(self) -> set[TopicPartition]:
        """Its partitions, according to its events."""
        has: set[TopicPartition] = set()
        for event in list(self.events):
            named = {TopicPartition(*tp) for tp in event.get("partitions", ())}
            if event["event"] == "assigned":
                has |= named
            else:
                has -= named
        return has

    @property
    def joined(self) -> bool:
        """Whether it has had an assignment, possibly an empty one."""
        return bool(self.events_of("assigned"))

    def events_of(self, event: str) -> list[dict[str, Any]]:
        return [e for e in list(self.events) if e["event"] == event]

    def progress(self) -> object:
        """Its progress, for ``await_progress``: its events and written lines."""
        return len(self.events), size_of(self.file, self.file.with_suffix(".log"))

    def await_event(self, event: str, count: int = 1) -> dict[str, Any]:
        await_progress(
            lambda: len(self.events_of(event)) >= count, self.progress, what=f"{event} from the ordinary consumer"
        )
        return self.events_of(event)[count - 1]

    def await_partitions(self, count: int, stalled_s: float = STALLED_S) -> set[TopicPartition]:
        await_progress(
            lambda: len(self.partitions) == count,
            self.progress,
            stalled_s,
            what=f"{count} partitions at the ordinary consumer",
        )
        return self.partitions

    def first_assigned_at(self) -> float:
        """When it got its first partitions, on the host's monotonic clock."""
        return float(next(e["at"] for e in self.events_of("assigned") if e["partitions"]))

    def starts(self) -> dict[TopicPartition, int]:
        """The committed offset of each partition at its last assignment."""
        return {TopicPartition(t, p): offset for e in self.events_of("starts") for t, p, offset in e["offsets"]}

    def starts_of(self, tps: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The same for these partitions, once reported: it reads them after the assignment."""
        wanted = set(tps)
        await_progress(lambda: wanted <= self.starts().keys(), self.progress, what="the other's committed offsets")
        return {tp: at for tp, at in self.starts().items() if tp in wanted}

    def firsts(self) -> dict[TopicPartition, int]:
        """The first processed offset of each partition after its first assignment."""
        found: dict[TopicPartition, int] = {}
        for e in self.events_of("first"):
            found.setdefault(TopicPartition(e["topic"], e["partition"]), e["offset"])
        return found

    # --- written records --------------------------------------------------------------------------------------------

    def processed(self) -> list[Record]:
        """Every record that it processed, in order, from its file."""
        return [(topic, partition, offset) for word, topic, partition, offset in self._lines() if word == "P"]

    def unconfirmed(self) -> set[Record]:
        """Records that it processed but had not committed when it lost them or ended: the next member may read them
        again."""
        waiting: dict[tuple[str, int], set[Record]] = {}
        lost: set[Record] = set()
        for word, topic, partition, offset in self._lines():
            pending = waiting.setdefault((topic, partition), set())
            if word == "P":
                pending.add((topic, partition, offset))
                continue
            if word == "L":
                lost |= pending
            pending.clear()
        return lost.union(*waiting.values())

    def _lines(self) -> list[tuple[str, str, int, int]]:
        if not self.file.exists():
            return []
        whole = self.file.read_text(encoding="ascii").rpartition("\n")[0].splitlines()
        return [(w, t, int(p), int(o)) for w, t, p, o in (line.split() for line in whole)]

    def _executed(self, order: str) -> list[dict[str, Any]]:
        return [e for e in self.events_of("executed") if e["order"] == order]

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError):  # closed
            for line in self.process.stdout:
                self.events.append(json.loads(line))
