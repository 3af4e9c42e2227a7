"""An application whose members are placed on three executors, and the account of its records and rebalances.

Runs in: ``tests.bench agents`` and ``test_churn``. A producer writes to every partition all the time. Produced records
are read from Kafka, written rows from the table's files, rebalances from the broker's log. Deliberately absent: faults
(``kills``, ``channel_faults``)."""

import contextlib
import re
import statistics
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from confluent_kafka import Consumer, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import AdminClient
from delta_files import living_files
from kafka_helpers import await_progress, create_topic, end_offsets_of
from kit.broker_cluster import BrokerCluster
from rebalance.accounts import Flow, Record, produced, stays, with_retries
from streams import descendants, options_of

from crash.placed_job import living
from crash.running import JOB, progress_of, script
from spark_group_source.host import run_files

PARTITIONS = 6
EXECUTORS = 3
RECORDS_PER_S = 200
REQUEST_S = 5.0
LOOK_S = 0.25
SPARK = {
    "spark.task.maxFailures": "8",
    "spark.stage.maxConsecutiveAttempts": "20",
    "spark.deploy.maxExecutorRetries": "-1",  # the executors are killed on purpose
    "spark.speculation": "true",
    "spark.speculation.quantile": "0.5",
}
MARK = "SPARK_GROUP_CHURN"
"""Environment variable of all processes of one application, which distinguishes them from others."""


class Application:
    """The job with its producer, from :meth:`running` on.

    Args:
        folder: a new directory for table, checkpoint and log.
        protocol: classic or consumer.
        session_ms: session timeout of the members; the broker's setting has to agree under KIP-848.
        more: options of the source, as ``options_of`` takes them.
        channel: the port of a proxy through which tasks and agents reach the stream reader.
    """

    def __init__(
        self,
        broker: BrokerCluster,
        folder: Path,
        *,
        protocol: str,
        session_ms: int,
        channel: int = 0,
        **more: Any,
    ) -> None:
        self.folder, self.protocol, self.session_ms = folder, protocol, session_ms
        self.mark = uuid.uuid4().hex
        self.servers = broker.direct_servers
        self.judge = AdminClient({"bootstrap.servers": self.servers, "log_level": 0})
        self.topic = create_topic(self.judge, f"churn-{self.mark[:8]}", PARTITIONS)
        self.group = f"g-{self.topic}"
        self.flow = Flow(broker.direct_servers, self.topic, PARTITIONS, per_s=RECORDS_PER_S)
        self.process: Any = None
        self.pauses = CommitPauses(broker.direct_servers, self.group, self.topic, self.assigned)
        self._broker, self._channel = broker, channel
        own = {"minPartitions": PARTITIONS, "groupMembers": "auto", "memberHost": "executor", **more}
        if protocol == "classic":
            own["kafka__session__timeout__ms"] = session_ms
            own["kafka__heartbeat__interval__ms"] = min(3_000, session_ms // 5)
        given = options_of(broker.direct_servers, self.group, protocol=protocol, **own)
        self._given = {name: text for name, text in given.items() if not name.endswith(("servers", "group.id"))}

    @contextlib.contextmanager
    def running(self) -> Iterator["Application"]:
        """Wait until all members are placed on agents, then run the block. If it ends without an error, the table is
        complete."""
        self.folder.mkdir(parents=True)
        arguments: dict[str, Any] = {
            "servers": self._broker.direct_servers,
            "group": self.group,
            "topic": self.topic,
            "executors": EXECUTORS,
            "plain": True,
            "channel": self._channel,
            "spark": SPARK,
        }
        with (
            script(JOB, self.folder, arguments | self._given, {MARK: self.mark}) as self.process,
            self.pauses,
        ):
            self.await_(lambda: self.run, "the stream reader")
            with self.flow:
                self.await_(self.members_whole, "members on every executor")
                yield self
            ends = self.ends()
            self.await_(lambda: self.committed(ends), "the end of everything that was produced")

    def check(self) -> None:
        """Fail if the job has ended."""
        assert self.process.poll() is None, self.log()[-4000:]

    def await_(self, holds: Callable[[], object], what: str) -> None:
        def look() -> object:
            self.check()
            return holds()

        try:
            await_progress(look, self.progress, what=what)
        except BaseException as exc:
            exc.add_note(f"{self.run}\n{self.pauses.committed()}\n{self.log()[-6000:]}")
            raise

    def progress(self) -> object:
        """Progress for ``await_progress``: of the job, the group's offsets and its agents."""
        return progress_of(self.folder, self.process), self.pauses.committed(), living()

    def stays_alive(self, for_s: float) -> None:
        def alive() -> bool:
            self.check()
            return True

        stays(alive, for_s, "the job")

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    # --- its processes ----------------------------------------------------------------------------------------------

    def agents(self) -> list[int]:
        found = []
        for pid in living():
            with contextlib.suppress(psutil.Error):
                if psutil.Process(pid).environ().get(MARK) == self.mark:
                    found.append(pid)
        return found

    def executors(self) -> list[int]:
        below = descendants(self.process.pid)
        return [pid for pid, command in below.items() if "CoarseGrainedExecutorBackend" in command]

    def workers(self) -> list[int]:
        """Python workers of executors."""
        daemons = {pid for pid, command in descendants(self.process.pid).items() if "pyspark.daemon" in command}
        found = []
        for pid in self.executors():
            with contextlib.suppress(psutil.Error):
                below = psutil.Process(pid).children(recursive=True)
                found += [child.pid for child in below if child.ppid() in daemons]
        return found

    # --- the group --------------------------------------------------------------------------------------------------

    @property
    def run(self) -> dict[str, Any]:
        """Its statistics."""
        return next(iter(run_files.read(self.group)), {})

    def members_whole(self) -> bool:
        """Whether every slot is placed on an agent, and all partitions are assigned."""
        hosts = self.run.get("agents", ())
        return len(hosts) == EXECUTORS and all(hosts) and self.assigned()

    def assigned(self) -> bool:
        """Whether every partition has a member."""
        return bool(sum(self.run.get("assigned", ())) == PARTITIONS)

    def whole(self) -> bool:
        """The same, and every executor and agent is alive."""
        return len(self.executors()) == len(self.agents()) == EXECUTORS and self.members_whole()

    def rebalances(self) -> int:
        """The number of rebalances (classic) or group epochs (KIP-848), by the broker's log."""
        text = (self._broker.log_dir / "node-1.log").read_text(errors="replace")
        group = re.escape(self.group)
        pattern = {
            "classic": rf"Preparing to rebalance group {group} ",
            "consumer": rf"\[GroupId {group}\].*Bumped group epoch to",
        }[self.protocol]
        return len(re.findall(pattern, text))

    def ends(self) -> dict[int, int]:
        ends = with_retries(partial(end_offsets_of, self.judge, self.topic))
        return {tp.partition: end for tp, end in ends.items()}

    def committed(self, ends: dict[int, int]) -> bool:
        """Whether the group has committed up to these offsets."""
        there = self.pauses.committed()
        return all(there.get(p, -1) >= end for p, end in ends.items())

    # --- read back --------------------------------------------------------------------------------------------------

    def account(self) -> tuple[int, list[Record], list[Record]]:
        """The number of produced records, the lost and the duplicated ones."""
        every = produced(self.judge, [self.topic])
        counts = Counter(self._rows())
        lost = sorted(every - counts.keys())
        doubled = sorted(record for record, count in counts.items() if count > 1)
        assert counts.keys() <= every, "rows that were not produced"
        return len(every), lost, doubled

    def _rows(self) -> Iterator[Record]:
        import pyarrow.parquet as pq

        for path in living_files(self.folder / "table"):
            rows = pq.read_table(path, columns=["partition", "offset"])
            pairs = zip(rows["partition"].to_pylist(), rows["offset"].to_pylist(), strict=True)
            yield from ((self.topic, partition, offset) for partition, offset in pairs)


class CommitPauses:
    """Measures how long the group commits nothing of a partition although records are produced to it all the time, and
    how long some partition has no member, by the run's statistics."""

    def __init__(self, servers: str, group: str, topic: str, assigned: Callable[[], bool]) -> None:
        self._assigned = assigned
        self._consumer = Consumer({"bootstrap.servers": servers, "group.id": group, "log_level": 0})
        self._partitions = [KafkaPartition(topic, p) for p in range(PARTITIONS)]
        self._lock, self._over = threading.Lock(), threading.Event()
        self._at: dict[int, int] = {}
        self._since_s: dict[int, float] = {}
        self._worst_s = self._unassigned_s = 0.0
        self._unassigned_since_s: float | None = None
        self._thread = threading.Thread(target=self._watch, name="pauses", daemon=True)

    def __enter__(self) -> "CommitPauses":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(2 * REQUEST_S)
        self._consumer.close()

    def committed(self) -> dict[int, int]:
        """As of the last poll."""
        with self._lock:
            return dict(self._at)

    def reset(self) -> None:
        """Forget the pauses so far."""
        with self._lock:
            now_s = time.monotonic()
            self._worst_s = self._unassigned_s = 0.0
            self._unassigned_since_s = None
            self._since_s = dict.fromkeys(self._since_s, now_s)

    def worst_s(self) -> float:
        """Since the reset, the longest time in which the group committed nothing of some partition."""
        with self._lock:
            now_s = time.monotonic()
            return max([self._worst_s, *(now_s - since_s for since_s in self._since_s.values())])

    def unassigned_s(self) -> float:
        """Since the reset, the longest time in which some partition had no member."""
        with self._lock:
            return self._unassigned_s

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            assigned = self._assigned()
            with self._lock:
                since_s = self._unassigned_since_s
                self._unassigned_since_s = None if assigned else (since_s or time.monotonic())
                self._unassigned_s = max(self._unassigned_s, 0.0 if since_s is None else time.monotonic() - since_s)
            try:
                found = self._consumer.committed(self._partitions, timeout=REQUEST_S)
            except KafkaException:
                continue
            with self._lock:
                now_s = time.monotonic()
                for one in found:
                    if one.offset > self._at.get(one.partition, -1):
                        self._worst_s = max(self._worst_s, now_s - self._since_s.get(one.partition, now_s))
                        self._at[one.partition], self._since_s[one.partition] = one.offset, now_s


def figures(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.1f} s (median), {max(seconds):.1f} s (maximum)"


def broker_settings(session_ms: int) -> dict[str, str]:
    """Broker settings for KIP-848 members, which cannot set them themselves."""
    return {
        "group.consumer.session.timeout.ms": str(session_ms),
        "group.consumer.heartbeat.interval.ms": str(min(5_000, session_ms // 5)),
    }
