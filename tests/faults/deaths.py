"""Nodes that are killed in turn: the leader of a partition, a group's coordinator, the controller; and how long no rows
come. And nodes that are stopped in order.

Runs in: ``tests.bench faults --deaths N`` and ``--restarts S``. The queries are those of ``soak``. A node dies by
SIGKILL and is started again after 1 to 30 s. Three times are told of each death: when Kafka itself took a record of
each partition again (by the acknowledgements of a producer that waits for all replicas), when each query had rows that
were produced after the death, and when it had them of each of its partitions. Deliberately absent: pytest.
"""

import random
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from confluent_kafka import KafkaError, Message
from confluent_kafka.admin import AdminClient
from kafka_words import await_until
from kit.faulty_cluster import Fault, FaultyCluster
from rebalance.accounts import Flow, asking, describe, stays

from faults.queries import Query
from faults.soak import ASK_S, CALM_S, PARTITIONS, RECOVERED_S, Soak, Struck
from spark_group_source.local.broker import START_S

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Role = Literal["leader", "coordinator", "controller"]
ROLES: tuple[Role, ...] = get_args(Role)
DOWN_S = (1.0, 30.0)


class TimedFlow(Flow):
    """Notes when Kafka first took a record again that was sent after :meth:`mark`."""

    _since: tuple[int, dict[int, tuple[int, float]]] = (0, {})

    def mark(self) -> None:
        self._since = (self.sent, {})

    @property
    def taken(self) -> dict[int, tuple[int, float]]:
        """Partition -> the offset of that record, and when it was acknowledged."""
        return dict(self._since[1])

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        super()._delivered(error, message)
        first, taken = self._since
        partition, offset, value = message.partition(), message.offset(), message.value()
        if error is None and partition is not None and offset is not None and value and int(value) >= first:
            taken.setdefault(partition, (offset, time.monotonic()))


@dataclass
class Death:
    """One death, and after how many seconds what was so again; of two queries the later one."""

    role: Role
    node: int
    down_s: float
    kafka_s: float
    first_s: float
    all_s: float
    planning_s: float
    """The longest call that planned a batch meanwhile."""
    batch_s: float
    """The longest reading and writing of one."""
    rebalanced: bool

    def __str__(self) -> str:
        return (
            f"{self.role} (node {self.node}) down for {self.down_s:.0f} s: Kafka takes all again after "
            f"{self.kafka_s:.1f} s, first rows {self.first_s:.1f} s, rows of every partition {self.all_s:.1f} s"
            f" (longest planning {self.planning_s:.1f} s, batch {self.batch_s:.1f} s)"
            f"{', REBALANCED' if self.rebalanced else ''}"
        )


class Deaths(Soak):
    """Args as of :class:`Soak`; ``count`` deaths, each role in turn."""

    make_flow = TimedFlow

    def __init__(
        self,
        spark: "SparkSession",
        cluster: FaultyCluster,
        folder: Path,
        *,
        seed: int,
        count: int,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(spark, cluster, folder, seed=seed, for_s=0.0, say=say)
        self._random, self._count = random.Random(seed), count
        self.deaths: list[Death] = []

    def _strike(self) -> None:
        for number in range(1, self._count + 1):
            death = self._one(ROLES[number % len(ROLES)])
            self.deaths.append(death)
            self._say(f"{number:4} {death}")
            self._await_whole(f"death {number} ({death.role})")
            killed = Fault("kill", death.node)
            self.account.struck.append(Struck(killed, death.down_s, death.all_s, death.rebalanced))
            self._await_in_sync()
            stays(self._check, CALM_S, "the queries")

    def _one(self, role: Role) -> Death:
        node, down_s, before = self._node_of(role), self._random.uniform(*DOWN_S), self._generations()
        back = threading.Timer(down_s, self._cluster.start_node, [node])
        self._cluster.kill(node)
        assert isinstance(self._flow, TimedFlow)
        self._flow.mark()
        died_s, died_at = time.monotonic(), datetime.now(UTC)
        back.start()
        try:
            first_s, all_s = self._watch(self._flow, died_s)
        finally:
            back.join(down_s + START_S)
            self._cluster.heal()
        kafka_s = max(at_s for _, at_s in self._flow.taken.values()) - died_s
        came_at = datetime.now(UTC)  # rows are in a table before Spark tells of their batch
        await_until(
            lambda: all(query.ended_since(came_at) for query in self._queries), RECOVERED_S, what="next batches"
        )
        longest = [query.longest_s(died_at) for query in self._queries]
        planning_s, batch_s = (max(one[step] for one in longest) for step in ("latestOffset", "addBatch"))
        return Death(role, node, down_s, kafka_s, first_s, all_s, planning_s, batch_s, self._generations() != before)

    def _watch(self, flow: TimedFlow, died_s: float) -> tuple[float, float]:
        """Until both queries have rows of all of their partitions that were produced after the death."""
        first_s: dict[Query, float] = {}
        all_s: dict[Query, float] = {}

        def look() -> bool:
            self._check()
            for query in self._queries:
                held = {tp.partition: end for tp, end in query.reached.items()}
                taken = {p: offset for p, (offset, _) in flow.taken.items()}
                came = [p in taken and end > taken[p] for p, end in held.items()]
                if any(came):
                    first_s.setdefault(query, time.monotonic() - died_s)
                if came and all(came):
                    all_s.setdefault(query, time.monotonic() - died_s)
            return len(all_s) == len(self._queries) and len(flow.taken) == PARTITIONS

        await_until(look, RECOVERED_S, what="rows of every partition")
        return max(first_s.values()), max(all_s.values())

    def _node_of(self, role: Role) -> int:
        """Each time another partition or group, so that all nodes and both protocols have their turn."""
        turn = len(self.deaths) // len(ROLES)
        judge = AdminClient({"bootstrap.servers": self._cluster.direct_servers, "log_level": 0})
        match role:
            case "controller":
                return await_until(lambda: self._cluster.broker.controller, ASK_S, what="a controller")
            case "coordinator":
                return describe(judge, list(self._groups.values())[turn % len(self._groups)]).coordinator
            case "leader":
                found = asking(lambda: judge.list_topics(self._topic, timeout=ASK_S))
                return int(found.topics[self._topic].partitions[turn % PARTITIONS].leader)

    def table(self) -> str:
        """Median and worst of each role, and of all."""
        columns = "Kafka takes all     first rows   every partition   after Kafka"
        rows = [f"death of       deaths  {columns}   (seconds, median and worst)"]
        for role in (*ROLES, "any"):
            these = [death for death in self.deaths if role in (death.role, "any")]
            if these:
                figures = [[d.kafka_s for d in these], [d.first_s for d in these], [d.all_s for d in these]]
                figures.append([max(0.0, d.first_s - d.kafka_s) for d in these])
                shown = "".join(f"{statistics.median(f):9.1f} {max(f):6.1f}" for f in figures)
                rows.append(f"{role:12} {len(these):8}{shown}")
        return "\n".join(rows)


class Restarts(Soak):
    """Nodes that are stopped in order and started again: one after the other, and then all at once for ``down_s``.

    Args as of :class:`Soak`.
    """

    def __init__(
        self,
        spark: "SparkSession",
        cluster: FaultyCluster,
        folder: Path,
        *,
        seed: int,
        down_s: float,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(spark, cluster, folder, seed=seed, for_s=0.0, say=say)
        self._down_s = down_s

    def _strike(self) -> None:
        for node in self._cluster.broker.nodes:
            self._one(f"node {node} restarted", [node], 0.0)
        self._one(f"all nodes stopped for {self._down_s:.0f} s", list(self._cluster.broker.nodes), self._down_s)

    def _one(self, what: str, nodes: list[int], down_s: float) -> None:
        before = self._generations()
        self._cluster.broker.stop_node(*nodes)
        for node in nodes:
            self._cluster.proxies[node].refuse()
        stays(self._check, down_s, "the queries")
        self._cluster.heal()
        started_s = time.monotonic()
        self._await_whole(what)
        struck = Struck(what, down_s, time.monotonic() - started_s, self._generations() != before)
        self.account.struck.append(struck)
        self._say(f"{what}: whole {struck.recovered_s:.1f} s after it answers{', REBALANCED' if struck.moved else ''}")
        self._await_in_sync()
