"""A job whose members are placed on its executors, as tests see it: its rows, its statistics, its agents.

Runs in: tests. Deliberately absent: faults (``test_agents``), the job's program (``executors``).
"""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from confluent_kafka.admin import AdminClient
from delta_files import living_rows
from kafka_helpers import Produce, await_progress, committed_of, end_offsets_of
from streams import numbered, options_of

from crash.running import job, progress_of
from spark_group_source.agents.agent_folder import agents_directory
from spark_group_source.host import run_files

SESSION_MS = 15_000
"""Long enough for a busy machine."""

Row = tuple[str, int, int]
"""Topic, partition, offset."""


@dataclass
class Target:
    """The cluster, and the topic and group of a test."""

    admin: AdminClient
    produce: Produce
    topic: str
    partitions: int
    group: str
    servers: str


class PlacedJob:
    """A job with two members and two executors.

    Args:
        home: an empty directory.
        servers: the bootstrap servers of the job.
        more: options of its source.
    """

    def __init__(self, home: Path, where: Target, protocol: str, servers: str, **more: Any) -> None:
        self.home, self.where, self.protocol = home, where, protocol
        self.group, self.topic = where.group, where.topic
        self.sent = 0
        own: dict[str, Any] = {"minPartitions": where.partitions, "groupMembers": 2, "memberHost": "executor"}
        if protocol == "classic":
            own["kafka__session__timeout__ms"] = SESSION_MS
        given = options_of(servers, where.group, protocol=protocol, **own | more)
        self._given = {name: text for name, text in given.items() if not name.endswith(("servers", "group.id"))}
        self._servers = servers
        self.process: Any = None

    @contextlib.contextmanager
    def running(self, **more: Any) -> Iterator[None]:
        before = set(living())
        given = {"servers": self._servers, "group": self.group, "topic": self.topic, **self._given, **more}
        with job(self.home, **given) as self.process:
            yield
        await_progress(lambda: set(living()) <= before, living, what="the end of every agent of the job")

    # --- records and rows -------------------------------------------------------------------------------------------

    def send(self, each: int = 2) -> None:
        """Produce ``each`` records to each partition."""
        count = each * self.where.partitions
        self.where.produce(self.topic, numbered(self.sent, self.sent + count - 1, self.where.partitions))
        self.sent += count

    def progress(self) -> object:
        """Progress for ``await_progress``: of the job, its slots and its agents."""
        run = self.run
        return (
            progress_of(self.home, self.process),
            [run.get(name) for name in ("slots", "agents", "assigned")],
            living(),
        )

    def await_(self, holds: Callable[[], Any], what: str) -> Any:
        found = await_progress(lambda: holds() or self.process.poll() is not None, self.progress, what=what)
        assert self.process.poll() is None, self.log[-4000:]
        return found

    def await_rows(self) -> None:
        """Wait until each record is in the table once."""
        self.await_(lambda: len(self.rows()) >= self.sent, "the rows")
        assert (len(self.rows()), set(self.rows().values())) == (self.sent, {1})

    def await_committed(self) -> None:
        ends = end_offsets_of(self.where.admin, self.topic)
        self.await_(lambda: committed_of(self.where.admin, self.group) == ends, "the group's offsets")

    def await_spread(self, holds: Callable[[], object], what: str) -> None:
        """Wait while batches go on: slots move between two batches."""

        def moved() -> object:
            if len(self.rows()) == self.sent:
                self.send()
            return holds()

        self.await_(moved, what)

    def await_placed(self) -> None:
        """Wait until both slots are placed on agents and have all partitions."""
        self.await_spread(self.is_placed, "both slots on agents")
        self.await_rows()
        self.await_committed()

    def rows(self) -> Counter[Row]:
        if not (self.home / "table" / "_delta_log").exists():
            return Counter()
        found = living_rows(self.home / "table", ["topic", "partition", "offset"])
        return Counter((row["topic"], row["partition"], row["offset"]) for row in found)

    def hold(self, offset: int) -> None:
        """Let tasks that read this offset of a partition, or a later one, wait."""
        part = self.home / "hold.part"
        part.write_text(str(offset))
        part.rename(self.home / "hold")

    def release(self) -> None:
        (self.home / "hold").unlink()

    def reports(self) -> list[dict[str, Any]]:
        """The reports that tasks wrote while they read."""
        return [json.loads(path.read_text()) for path in (self.home / "reports").glob("*") if not path.suffix]

    def forget_reports(self) -> None:
        """Delete the reports so far, but for those that tasks are writing."""
        for path in (self.home / "reports").glob("*"):
            if not path.suffix:
                path.unlink()

    # --- its state --------------------------------------------------------------------------------------------------

    @property
    def log(self) -> str:
        return (self.home / "log").read_text(errors="replace")

    @property
    def run(self) -> dict[str, Any]:
        """Its statistics."""
        return next(iter(run_files.read(self.group)), {})

    def is_placed(self) -> bool:
        run = self.run
        return bool(run) and all(run["agents"]) and sum(run["assigned"]) == self.where.partitions

    def executors(self) -> list[int]:
        """The executors on which its slots are placed, by slot."""
        return [int(name.rpartition("-")[2]) for name in self.run["agents"] if name]


def living() -> list[int]:
    """The running agents of this user."""
    return list(by_executor().values())


def by_executor() -> dict[int, int]:
    """The running agents of this user, by executor."""
    folders = {path.name for path in agents_directory().glob("*")}
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            if "spark-group-agent" in command and command[-1] in folders:
                found[int(command[-1].split("-")[0])] = process.pid
    return found


def environment(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def arguments() -> bytes:
    """The command lines of all processes of this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.parent.name != str(os.getpid()):
                found.append(path.read_bytes())
    return b"\n".join(found)
