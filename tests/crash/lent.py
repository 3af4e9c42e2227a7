"""A job whose members live beside its executors, as tests see it: its rows, its statistics, its agents.

Runs in: tests. Deliberately absent: what is done to it (``test_agents``), the job itself (``executors``).
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
from kafka_words import Produce, await_progress, committed_of, end_offsets_of
from streams import numbered, options_of

from crash.running import job, progress_of
from spark_group_source.agents.agent_folder import agents_directory
from spark_group_source.host import run_files

SESSION_MS = 15_000
"""Not so short that a busy machine ends it."""

Row = tuple[str, int, int]
"""Topic, partition, offset."""


@dataclass
class Where:
    """The cluster, and what of it is a test's own."""

    admin: AdminClient
    produce: Produce
    topic: str
    partitions: int
    group: str
    servers: str


class Watched:
    """A job with two members and two executors.

    Args:
        home: an empty directory.
        servers: where the job finds the brokers.
        more: options of its source.
    """

    def __init__(self, home: Path, where: Where, protocol: str, servers: str, **more: Any) -> None:
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
        """So many records to each partition."""
        count = each * self.where.partitions
        self.where.produce(self.topic, numbered(self.sent, self.sent + count - 1, self.where.partitions))
        self.sent += count

    def progress(self) -> object:
        """How far it is, for ``await_progress``: the job, its slots and its agents."""
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
        """All that was sent is in the table, once."""
        self.await_(lambda: len(self.rows()) >= self.sent, "the rows")
        assert (len(self.rows()), set(self.rows().values())) == (self.sent, {1})

    def await_committed(self) -> None:
        ends = end_offsets_of(self.where.admin, self.topic)
        self.await_(lambda: committed_of(self.where.admin, self.group) == ends, "the group's offsets")

    def await_spread(self, holds: Callable[[], object], what: str) -> None:
        """Batches go on meanwhile: slots move between two of them."""

        def moved() -> object:
            if len(self.rows()) == self.sent:
                self.send()
            return holds()

        self.await_(moved, what)

    def await_lent(self) -> None:
        """Both slots live at agents, and have what they had."""
        self.await_spread(self.lent, "both slots at agents")
        self.await_rows()
        self.await_committed()

    def rows(self) -> Counter[Row]:
        if not (self.home / "table" / "_delta_log").exists():
            return Counter()
        found = living_rows(self.home / "table", ["topic", "partition", "offset"])
        return Counter((row["topic"], row["partition"], row["offset"]) for row in found)

    def hold(self, offset: int) -> None:
        """Tasks that read this offset of a partition, or a later one, wait in the middle of it."""
        part = self.home / "hold.part"
        part.write_text(str(offset))
        part.rename(self.home / "hold")

    def let_go(self) -> None:
        (self.home / "hold").unlink()

    def said(self) -> list[dict[str, Any]]:
        """What tasks told while they read."""
        return [json.loads(path.read_text()) for path in (self.home / "said").glob("*") if not path.suffix]

    def forget(self) -> None:
        """What tasks told so far."""
        for path in (self.home / "said").iterdir():
            path.unlink()

    # --- where it is ------------------------------------------------------------------------------------------------

    @property
    def log(self) -> str:
        return (self.home / "log").read_text(errors="replace")

    @property
    def run(self) -> dict[str, Any]:
        """Its statistics."""
        return next(iter(run_files.read(self.group)), {})

    def lent(self) -> bool:
        run = self.run
        return bool(run) and all(run["agents"]) and sum(run["assigned"]) == self.where.partitions

    def executors(self) -> list[int]:
        """Those beside which its members live, slot by slot."""
        return [int(name.rpartition("-")[2]) for name in self.run["agents"] if name]


def living() -> list[int]:
    """Agents of this user."""
    return list(by_executor().values())


def by_executor() -> dict[int, int]:
    """Agents of this user, by the executor that each is for."""
    found = {}
    for lock in agents_directory().glob("*/lock"):
        with contextlib.suppress(OSError, ValueError, psutil.Error):
            pid = int(lock.read_text())
            if "spark-group-agent" in psutil.Process(pid).cmdline():
                found[int(lock.parent.name.split("-")[0])] = pid
    return found


def descendants(pid: int) -> list[int]:
    """A process, and all below it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return []


def environment(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def arguments() -> bytes:
    """Of every process of this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.parent.name != str(os.getpid()):
                found.append(path.read_bytes())
    return b"\n".join(found)
