"""What is on stage in the demo: broker, topic, job, ordinary consumer, and what is known of them.

Runs in: ``demo.py``. Deliberately absent: the order in which things happen (``demo.py``), how they look
(``demo_screen``), what they prove (``demo_proof``).
"""

import contextlib
import json
import os
import re
import signal
import threading
from pathlib import Path

from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # its stubs re-export these without saying so
    AdminClient,
    NewTopic,
    OffsetSpec,
)
from demo_consumer import NAME as ORDINARY
from demo_processes import SCHEMA, Child, Orders, start_consumer, start_job
from demo_proof import DeltaLog, Evidence
from demo_screen import Described, View, shown

from spark_group_source import describe
from spark_group_source.local.broker import Broker
from spark_group_source.local.tools import kafka_consumer_groups
from spark_group_source.local.tools import shown as kafkas_table

TOPIC, GROUP = "orders", "orders-to-delta"
EXECUTORS = 2
"""Of the job, each with one of its members beside it."""

ADMIN_S = 15
BACKLOG_S = 30
"""The orders pause while more than this many seconds of them wait: a busy machine is not buried under them."""
GENERATION = re.compile(r"generation (\d+), partitions by slot")


class DemoFailed(Exception):
    """A step did not come to its end; the message says which, and shows the log of the child it is about."""


class Stage:
    """Everything that is on stage: broker, topic, job, ordinary consumer, and what is known of them.

    Args:
        directory: for the table, the checkpoint and the logs; the caller removes it.
    """

    def __init__(self, directory: Path, broker: Broker, *, partitions: int, rate: int, protocol: str) -> None:
        self.directory, self.protocol = directory, protocol
        self.servers = broker.bootstrap_servers
        self.admin = AdminClient({"bootstrap.servers": self.servers, "log_level": 0})
        self.admin.create_topics([NewTopic(TOPIC, partitions, 1)])[TOPIC].result(ADMIN_S)
        # It asks for the group's offsets and joins nothing: the admin client's own call ends the process when the group
        # has no coordinator yet (librdkafka up to 2.16).
        self._asker = Consumer({"bootstrap.servers": self.servers, "group.id": GROUP, "log_level": 0})
        self._looking = threading.Lock()
        self.table = DeltaLog(directory / "table" / "orders")
        self.orders = Orders(self.servers, TOPIC, rate)
        self._lag_max = rate * BACKLOG_S
        self.view = View(partitions)
        self.job: Child | None = None
        self.consumer: Child | None = None
        self._starts = 0

    def start_job(self) -> None:
        self._starts += 1
        # A member hears of a rebalance with its next heartbeat. Under KIP-848 the broker sets the pace.
        quick = {"kafka.heartbeat.interval.ms": "500"} if self.protocol == "classic" else {}
        options = {
            "bootstrap-servers": self.servers,
            "group": GROUP,
            "topics": TOPIC,
            "table": str(self.directory / "table" / "orders"),
            "checkpoint": str(self.directory / "checkpoint"),
            "schema": SCHEMA,
            "trigger": "1 second",
            "members": str(EXECUTORS),
            "memberHost": "executor",
            "coordinatorHost": "127.0.0.1",
            "minPartitions": str(EXECUTORS),
            "kafka.group.protocol": self.protocol,
            **quick,
        }
        self.job = start_job(self.directory, options, log=f"job-{self._starts}.log")

    def kill_executor(self) -> int:
        """SIGKILL for the executor beside which the first of the job's members lives; returns its process id."""
        victim = self.view.executors[0]
        assert self.job is not None and victim in self.job.pids
        os.kill(victim, signal.SIGKILL)
        return victim

    def batch_in_flight(self) -> int | None:
        """The batch that the job's checkpoint has begun and not finished; None between two."""
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
        self._asker.close()

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

    def ends(self) -> dict[int, int]:
        asked = {TopicPartition(TOPIC, p): OffsetSpec.latest() for p in range(self.view.partitions)}
        return {tp.partition: found.result(ADMIN_S).offset for tp, found in self.admin.list_offsets(asked).items()}

    def committed(self) -> dict[int, int]:
        asked = [TopicPartition(TOPIC, p) for p in range(self.view.partitions)]
        return {tp.partition: tp.offset for tp in self._asker.committed(asked, timeout=ADMIN_S) if tp.offset >= 0}

    def described(self) -> list[Described]:
        """The group's members in the words of Kafka's own tool, and of ``spark-group describe``."""
        printed = kafka_consumer_groups(self.servers, "--describe", "--group", GROUP, "--members", "--verbose")
        theirs = {}
        for row in kafkas_table(printed):
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

    def members(self) -> list[tuple[str, str, list[int]]]:
        group = self.admin.describe_consumer_groups([GROUP])[GROUP].result(ADMIN_S)
        found = []
        for member in sorted(group.members, key=lambda m: m.client_id or ""):
            mine = sorted(tp.partition for tp in member.assignment.topic_partitions)
            slot = (member.client_id or "").rpartition("-")[2]
            ordinary = member.client_id == ORDINARY
            found.append(
                ("ordinary", "ordinary consumer", mine) if ordinary else ("job", f"Spark job, slot {slot}", mine)
            )
        return found

    def look(self) -> None:
        """Bring the view up to date; safe from several threads."""
        with self._looking:
            self._look()

    def _look(self) -> None:
        view = self.view
        view.produced = self.orders.acknowledged
        self.table.refresh()
        view.table, view.commits = self.table.rows, self.table.commits
        view.ordinary = len(self.processed())
        with contextlib.suppress(KafkaException):  # a broker under load: the next look will tell
            committed = self.committed()
            view.lag = sum(end - committed.get(p, 0) for p, end in self.ends().items())
            view.members = self.members()
        self.orders.hold = view.lag > self._lag_max
        view.generation = self._generation()
        view.executors = self._executors()

    def _generation(self) -> int | None:
        """The group's generation as the job's log tells it, at each rebalance; None before the first."""
        if self.job is None:
            return None
        told = GENERATION.findall(self.job.log.read_text(encoding="utf-8", errors="replace"))
        return int(told[-1]) if told else None

    def _executors(self) -> list[int]:
        """Beside which executors the job's members live, as ``spark-group describe`` tells; empty unless all do."""
        for path in (self.directory / "tmp").glob("spark-group-source-*/*.json"):
            with contextlib.suppress(OSError, ValueError):
                run = json.loads(path.read_text(encoding="utf-8"))
                if os.path.exists(f"/proc/{run['pid']}") and all(run["hosts"]) and all(run["assigned"]):
                    return [int(host.rpartition("-")[2]) for host in run["hosts"]]
        return []

    def evidence(self, produced: int) -> Evidence:
        processed = self.processed()
        self.table.refresh()
        return Evidence(
            produced=produced,
            table=self.table.column("order_id"),
            ordinary=[order for _, _, order in processed],
            ends=self.ends(),
            committed=self.committed(),
            ledger=self.table.ledger(GROUP, TOPIC),
            ordinary_last={p: offset + 1 for p, offset, _ in processed},
        )
