"""An outage of a minute or more, met by queries in every phase of a batch at once; and the account at the end.

Runs in: ``tests.bench faults --outage S``. The phases: in the middle of a task's read, planning while
nothing comes, from the sink to the echo, and a held revocation; with the classic protocol and with KIP-848, the read
with both values of ``failOnDataLoss``. All clients of the queries go through the proxies, the producer and the judge
past them. Deliberately absent: pytest, and a query that starts in an outage (``test_queries``).
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from kafka_words import Offsets, await_until, create_topic, end_offsets_of, produce_to
from kit.faulty_cluster import Fault, FaultyCluster
from kit.proxy import Direction, Line
from rebalance.accounts import asking, describe, produced, stays
from rebalance.conftest import make_options
from rebalance.ordinary import OrdinaryConsumer

from faults.queries import Query
from spark_group_source.host import runs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Phase = Literal["read", "planning", "echo", "revocation"]
PARTITIONS = 3
"""A leader on every node."""
FIRST, MORE, LATER = 30, 300, 60
LARGE = 60_000
RECORD = b"r" * 240
SESSION_MS = 45_000
NARROW = Line(bytes_per_s=1_000_000)
"""Of each node, to its clients: the reads take about a quarter of a minute."""
PASSED = 3_000_000
"""Bytes from all nodes until the outage begins."""
BEGIN_S = 240
WHOLE_S = 300
"""Bounds on a machine that is busy, from the start to the last first row, and from the outage's end to the last one."""


class Kind(NamedTuple):
    """One query: where it is when the outage begins."""

    phase: Phase
    strategy: str
    fail_on_data_loss: bool = True

    def __str__(self) -> str:
        protocol = "consumer" if self.strategy == "consumer" else "classic"
        return f"{self.phase}, {protocol}" + ", failOnDataLoss=false" * (not self.fail_on_data_loss)


KINDS = [
    *(Kind("read", strategy, fails) for strategy in ("range", "consumer") for fails in (True, False)),
    *(Kind(phase, strategy) for phase in ("planning", "echo", "revocation") for strategy in ("range", "consumer")),
]


class Subject:
    """One query with a group and a topic of its own. ``whole_s``: how long after the outage all was at Kafka."""

    def __init__(self, spark: "SparkSession", cluster: FaultyCluster, kind: Kind, folder: Path) -> None:
        self.kind, self._cluster = kind, cluster
        self.whole_s: float | None = None
        self.ordinary: OrdinaryConsumer | None = None
        self._folder = folder
        self._gate, self._inside = threading.Event(), threading.Event()
        self._gate.set()
        self._judge = judge_of(cluster)
        number = KINDS.index(kind)
        self.topic = create_topic(self._judge, f"outage-{folder.parent.name}-{number}", PARTITIONS)
        self.group = f"g-{self.topic}"
        options = make_options(
            cluster.bootstrap_servers,
            self.group,
            self.topic,
            kind.strategy,
            session_ms=SESSION_MS,
            failOnDataLoss=kind.fail_on_data_loss,
            fetchOffset__retryIntervalMs=1000,
        )
        self.query = Query(spark, options, folder)
        self.query.before_write = self._wait
        self.produce(FIRST)

    def _wait(self) -> None:
        if not self._gate.is_set():
            self._inside.set()
            self._gate.wait(BEGIN_S + WHOLE_S)

    def produce(self, count: int, record: bytes = b"x") -> None:
        producer = Producer({"bootstrap.servers": self._cluster.direct_servers, "log_level": 0, "linger.ms": 20})
        for partition in range(PARTITIONS):
            produce_to(producer, self.topic, [record] * (count // PARTITIONS), partition=partition)

    def take_position(self) -> None:
        """Bring the query to its phase, as far as it stays there by itself."""
        if self.kind.phase in ("echo", "revocation"):
            self._gate.clear()
            self.produce(MORE)
            self.query.await_(self._inside.is_set, f"{self.kind}: a batch in flight", BEGIN_S)
        if self.kind.phase == "revocation":
            self.ordinary = OrdinaryConsumer(
                self._cluster.direct_servers,
                self.group,
                [self.topic],
                self._folder / "ordinary",
                strategy=self.kind.strategy,
                session_ms=SESSION_MS,
            )
            await_until(lambda: "ordinary" in describe(self._judge, self.group).members, BEGIN_S, what="the other")

    def release(self) -> None:
        self._gate.set()

    def look(self, since_s: float) -> bool:
        """Whether the group has committed everything."""
        if self.whole_s is None:
            self.query.check()
            others = Counter(self.ordinary.processed()) if self.ordinary else Counter()
            reached = self.query.reached
            if self.ordinary or all(reached.get(tp) == end for tp, end in self._ends().items()):
                every = produced(self._judge, [self.topic])
                if every <= set(self.query.records) | others.keys():
                    self.whole_s = time.monotonic() - since_s
        return self.whole_s is not None

    def _ends(self) -> Offsets:
        return asking(partial(end_offsets_of, self._judge, self.topic))

    def account(self) -> tuple[int, int]:
        """Records that are missing, and those that came twice without being counted as lost on the group."""
        every = produced(self._judge, [self.topic])
        in_table = Counter(self.query.records)
        assert all(count == 1 for count in in_table.values()), f"{self.kind}: the table has a record twice"
        both = in_table + Counter(self.ordinary.processed() if self.ordinary else [])
        counted = sum(int(run.get("maybe_twice", 0)) for run in runs.read(self.group))
        doubled = sum(count - 1 for count in both.values())
        return len(every - both.keys()), max(0, doubled - counted)

    def close(self) -> None:
        self.release()
        if self.ordinary:
            self.ordinary.close()
        self.query.stop()


class Outage:
    """One outage.

    Args:
        nodes: which refuse; the judge reaches them all the same.
        say: where each line of the report goes.
    """

    def __init__(
        self,
        spark: "SparkSession",
        cluster: FaultyCluster,
        folder: Path,
        *,
        nodes: Sequence[int],
        lasts_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._cluster, self._nodes, self._lasts_s, self._say = cluster, nodes, lasts_s, say
        self._subjects = [Subject(spark, cluster, kind, folder / str(at)) for at, kind in enumerate(KINDS)]

    def run(self) -> int:
        """Raises if a query ended or hangs. Returns how many records were lost or doubled."""
        try:
            for subject in self._subjects:  # one by one: each start is several processes
                subject.query.start()
                subject.query.await_(partial(getattr, subject.query, "records"), f"{subject.kind}: rows", BEGIN_S)
            self._begin()
            stays(self._alive, self._lasts_s, "the queries")
            for subject in self._subjects:
                subject.produce(LATER)
            self._cluster.heal()
            healed_s = time.monotonic()
            await_until(lambda: self._whole(healed_s), WHOLE_S, what="every record")
            return self._report()
        finally:
            self._cluster.heal()
            for subject in self._subjects:
                subject.close()

    def _begin(self) -> None:
        """Every query is where its kind says, and then nothing can be reached."""
        for subject in self._subjects:
            subject.take_position()
        for proxy in self._cluster.proxies.values():
            proxy.lay(NARROW, Direction.TO_CLIENT)
        until = self._passed + PASSED
        for subject in self._subjects:
            if subject.kind.phase == "read":
                subject.produce(LARGE, RECORD)
        await_until(lambda: self._alive() and self._passed > until, BEGIN_S, what="the middle of the reads")
        for node in self._nodes:
            self._cluster.begin(Fault("refuse", node))
        for subject in self._subjects:
            subject.release()

    @property
    def _passed(self) -> int:
        return sum(proxy.passed[Direction.TO_CLIENT] for proxy in self._cluster.proxies.values())

    def _alive(self) -> bool:
        for subject in self._subjects:
            subject.query.check()
        return True

    def _whole(self, since_s: float) -> bool:
        looked = [subject.look(since_s) for subject in self._subjects]  # at each of them, every time
        return all(looked)

    def _report(self) -> int:
        nodes = "all brokers" if len(self._nodes) > 1 else "one broker of three"
        wrong = 0
        for subject in self._subjects:
            lost, doubled = subject.account()
            wrong += lost + doubled
            self._say(
                f"{nodes} refused for {self._lasts_s:.0f} s; {subject.kind}: {lost} lost, {doubled} doubled, whole "
                f"after {subject.whole_s or 0:.1f} s"
            )
        return wrong


def judge_of(cluster: FaultyCluster) -> AdminClient:
    return AdminClient({"bootstrap.servers": cluster.direct_servers, "log_level": 0})
