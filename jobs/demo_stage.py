"""The parts of the demo: broker, topic, job and ordinary consumer, and their current state.

Runs in: ``demo.py``. Deliberately absent: the order in which things happen (``demo.py``), how they look
(``demo_screen``), what they prove (``demo_proof``).
"""

import os
import signal
from pathlib import Path

from demo_consumer import NAME as ORDINARY
from demo_processes import SCHEMA, Child, Orders, start_consumer, start_job
from demo_proof import DeltaLog, Evidence
from demo_screen import Described, View, shown
from kafka_tool import kafka_consumer_groups, parse_group_table

from spark_group_source import GroupError, describe
from spark_group_source.local.background import create_topics
from spark_group_source.local.broker import Broker

TOPIC, GROUP = "orders", "orders-to-delta"
EXECUTORS = 2
"""Executors of the job, each with one member."""

BACKLOG_S = 30
"""Producing pauses while the lag exceeds this many seconds of orders, on a busy machine."""


class DemoFailed(Exception):
    """A step failed; the message names it and contains the log of its child process."""


class Stage:
    """Broker, topic, job and ordinary consumer, and their current state.

    Args:
        directory: for the table, the checkpoint and the logs; the caller removes it.
    """

    def __init__(self, directory: Path, broker: Broker, *, partitions: int, rate: int, protocol: str) -> None:
        self.directory, self.protocol = directory, protocol
        self.servers = broker.bootstrap_servers
        create_topics(self.servers, {TOPIC: partitions})
        self.table = DeltaLog(directory / "table" / "orders")
        self.orders = Orders(self.servers, TOPIC, rate)
        self._lag_max = rate * BACKLOG_S
        self.view = View(partitions)
        self.job: Child | None = None
        self.consumer: Child | None = None
        self._starts = 0

    def start_job(self) -> None:
        self._starts += 1
        # A member learns of a rebalance with its next heartbeat. In KIP-848 groups the broker sets the interval.
        quick = {"kafka.heartbeat.interval.ms": "500"} if self.protocol == "classic" else {}
        options = {
            "bootstrap-servers": self.servers,
            "group": GROUP,
            "topics": TOPIC,
            "table": str(self.directory / "table" / "orders"),
            "checkpoint": str(self.directory / "checkpoint"),
            "schema": SCHEMA,
            "trigger": "1 second",
            "groupMembers": str(EXECUTORS),
            "memberHost": "executor",
            "coordinatorHost": "127.0.0.1",
            "minPartitions": str(EXECUTORS),
            "kafka.group.protocol": self.protocol,
            **quick,
        }
        self.job = start_job(self.directory, options, log=f"job-{self._starts}.log")

    def kill_executor(self) -> int:
        """SIGKILL the executor of the agent with the job's first member; returns its process id."""
        victim = self.view.executors[0]
        assert self.job is not None and victim in self.job.pids
        os.kill(victim, signal.SIGKILL)
        return victim

    def batch_in_flight(self) -> int | None:
        """The batch in flight according to the job's checkpoint; None between two batches."""
        offsets, commits = (self._last_batch(log) for log in ("offsets", "commits"))
        return offsets if offsets > commits else None

    def _last_batch(self, log: str) -> int:
        names = [path.name for path in (self.directory / "checkpoint" / log).glob("[0-9]*")]
        return max(map(int, names), default=-1)

    def start_consumer(self) -> None:
        options = {"bootstrap-servers": self.servers, "group": GROUP, "topic": TOPIC, "protocol": self.protocol}
        self.consumer = start_consumer(self.directory, {**options, "out": str(self._processed)})

    def close(self) -> None:
        for child in (self.job, self.consumer):
            if child is not None:
                child.kill()

    # --- what is known ----------------------------------------------------------------------------------------------

    @property
    def _processed(self) -> Path:
        return self.directory / "processed"

    def processed(self) -> list[tuple[int, int, int]]:
        """(partition, offset, order) of every record that the ordinary consumer processed."""
        if not self._processed.is_file():
            return []
        lines = self._processed.read_text(encoding="utf-8").split("\n")[:-1]  # the last one may be half written
        return [(int(p), int(offset), int(order)) for p, offset, order in map(str.split, lines)]

    def described(self) -> list[Described]:
        """The group's members as printed by Kafka's own tool and ``spark-group describe``."""
        printed = kafka_consumer_groups(self.servers, "--describe", "--group", GROUP, "--members", "--verbose")
        theirs = {}
        for row in parse_group_table(printed):
            instance = row.get("GROUP-INSTANCE-ID", "").strip("-")
            assigned = row.get("ASSIGNMENT") or row.get("CURRENT-ASSIGNMENT", "-")
            theirs[instance or row["CLIENT-ID"]] = row["HOST"], assigned
        found = []
        for member in describe(GROUP, self.servers).members:
            name, slot = member.instance_id or member.client_id, member.instance_id.rpartition(".")[2]
            at = f"executor {self.view.executors[int(slot)]}" if member.instance_id and self.view.executors else "-"
            mine = shown(sorted(tp.partition for tp in member.partitions))
            found.append(Described(name, *theirs.get(name, ("-", "-")), mine, at))
        return sorted(found)

    def look(self) -> None:
        """Update the view."""
        view = self.view
        view.produced = self.orders.acknowledged
        self.table.refresh()
        view.table = self.table.rows
        view.ordinary = len(self.processed())
        try:
            group = describe(GROUP, self.servers)
        except GroupError:  # not there yet, or a broker under load: the next look will tell
            return
        view.lag = sum((row.end or 0) - (row.committed or 0) for row in group.partitions)
        view.owned = {"job": [], "ordinary": []}
        for member in group.members:
            kind = "ordinary" if member.client_id == ORDINARY else "job"
            view.owned[kind] = sorted([*view.owned[kind], *(tp.partition for tp in member.partitions)])
        self.orders.hold = view.lag > self._lag_max
        run = group.runs[0] if group.runs else None
        view.generation = run["generation"] if run is not None and run["generation"] >= 0 else None
        # Empty unless each of the job's members is on an agent and owns partitions, and the run's statistics are as new
        # as the group: they follow a rebalance a moment later, and have the generation from before it until then.
        view.executors = []
        if (
            run is not None
            and all(run["agents"])
            and all(run["assigned"])
            and sum(run["assigned"]) == len(view.owned["job"])
        ):
            view.executors = [int(agent.rpartition("-")[2]) for agent in run["agents"]]

    def evidence(self, produced: int) -> Evidence:
        """The evidence: the table's files, the output of Kafka's own tool, and the ordinary consumer's file."""
        processed = self.processed()
        self.table.refresh()
        rows = parse_group_table(kafka_consumer_groups(self.servers, "--describe", "--group", GROUP))
        offsets = {
            column: {int(row["PARTITION"]): int(row[column]) for row in rows if row[column].isdecimal()}
            for column in ("LOG-END-OFFSET", "CURRENT-OFFSET")
        }
        return Evidence(
            produced=produced,
            table=self.table.column("order_id"),
            ordinary=[order for _, _, order in processed],
            ends=offsets["LOG-END-OFFSET"],
            committed=offsets["CURRENT-OFFSET"],
            ledger=self.table.ledger(GROUP, TOPIC),
            ordinary_last={p: offset + 1 for p, offset, _ in processed},
        )
