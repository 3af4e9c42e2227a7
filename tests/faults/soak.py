"""Random faults, drawn from a seed, against two queries and an ordinary consumer; and the account at the end.

Runs in: ``test_soak`` and ``tests.bench faults``. One query shares its group with an ordinary consumer (classic
protocol), the other has its own group (KIP-848); each writes to a Delta table. All three use the proxies of a cluster
of three nodes; the producer and the judge bypass them. A fault is applied for some seconds and healed; then both groups
must commit everything produced until then, which is the recovery time; then the next fault follows. Deliberately
absent: pytest.
"""

import contextlib
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import AdminClient
from kafka_helpers import await_until, create_topic
from kit.faulty_cluster import KINDS, Draw, Fault, FaultyCluster, Kind
from rebalance.accounts import Flow, Record, produced, records_in, stays, with_retries
from rebalance.conftest import make_options
from rebalance.ordinary import OrdinaryConsumer

from spark_group_source import DeltaSink
from spark_group_source.host import run_files

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

PARTITIONS = 6
RECORDS_PER_S = 200
SESSION_MS = 45_000
SETTINGS = {"group.consumer.session.timeout.ms": str(SESSION_MS)}
"""Of the brokers: Kafka's default in both protocols, so members survive faults that do not affect them."""
CALM_S = 1.0
"""The pause between a recovery and the next fault."""
FIRST_ROWS_S = 600
RECOVERED_S = 600
"""The timeout of a recovery: a query that needs longer hangs."""
REQUEST_S = 5.0
TOPIC = "soaked"


class Query:
    """One query of ``format("kafka-group")`` that writes to one table.

    Args:
        options: as a user writes them.
        folder: for the table and the checkpoint.
    """

    def __init__(self, spark: "SparkSession", options: Mapping[str, str], folder: Path) -> None:
        self.table = folder / "table"
        self._spark, self._options, self._checkpoint = spark, dict(options), folder / "checkpoint"
        self._sink = DeltaSink(str(self.table))
        self._query: StreamingQuery | None = None

    def start(self) -> None:
        frame = self._spark.readStream.format("kafka-group").options(**self._options).load()
        writer = frame.writeStream.foreachBatch(self._sink)
        self._query = writer.option("checkpointLocation", str(self._checkpoint)).start()

    @contextlib.contextmanager
    def running(self) -> Iterator["Query"]:
        self.start()
        try:
            yield self
        finally:
            self.stop()

    def stop(self) -> None:
        if self._query is not None:
            self._query.stop()

    def check(self) -> None:
        """Raise the query's error if it has stopped."""
        assert self._query is not None, "never started"
        if (error := self._query.exception()) is not None:
            raise AssertionError(f"the query ended: {error}") from error
        assert self._query.isActive

    @property
    def records(self) -> list[Record]:
        """Every row of the table, from the files in its log."""
        return records_in(self.table)


@dataclass
class Struck:
    """One fault, its duration, and the time from its end to full recovery."""

    fault: Fault
    lasted_s: float
    recovered_s: float
    moved: bool = False
    """Whether a group has another generation than before: all of its members should survive a fault this short."""


@dataclass
class Account:
    """The result of a soak."""

    seed: int
    struck: list[Struck] = field(default_factory=list)
    produced: int = 0
    lost: list[Record] = field(default_factory=list)
    doubled: list[Record] = field(default_factory=list)
    by_right: int = 0
    """Records processed twice because the ordinary consumer could not commit them, or a query counted them as lost."""

    @property
    def rebalances(self) -> int:
        """Faults after which a group had rebalanced."""
        return sum(one.moved for one in self.struck)

    @property
    def recovery_s(self) -> tuple[float, float]:
        """Median and maximum."""
        times = [one.recovered_s for one in self.struck]
        return statistics.median(times), max(times)

    def __str__(self) -> str:
        median_s, worst_s = self.recovery_s
        return (
            f"seed {self.seed}: {len(self.struck)} faults, {self.produced} records: {len(self.lost)} lost, "
            f"{len(self.doubled)} doubled, {self.by_right} twice by right, {self.rebalances} rebalances; "
            f"recovered after {median_s:.1f} s (median), {worst_s:.1f} s (worst)"
        )


class Soak:
    """Random faults of every kind.

    Args:
        cluster: three nodes behind proxies, healed.
        for_s: how long new faults are applied.
        report: receives each line of the report.
    """

    def __init__(
        self,
        spark: "SparkSession",
        cluster: FaultyCluster,
        folder: Path,
        *,
        seed: int,
        for_s: float,
        report: Callable[[str], None],
        kinds: Sequence[Kind] = KINDS,
    ) -> None:
        self._cluster, self._folder, self._for_s, self._report = cluster, folder, for_s, report
        self._draw = Draw(seed, nodes=tuple(cluster.broker.nodes), kinds=kinds)
        self.account = Account(seed)
        self._judge = AdminClient({"bootstrap.servers": cluster.direct_servers, "log_level": 0})
        self._topic = create_topic(self._judge, f"{TOPIC}-{seed}-{folder.name}", PARTITIONS)
        self._groups = {name: f"{name}-{self._topic}" for name in ("shared", "alone")}
        self._queries = [
            Query(spark, self._options(self._groups["shared"], "range"), folder / "shared"),
            Query(spark, self._options(self._groups["alone"], "consumer"), folder / "alone"),
        ]
        self._consumers = {group: self._open_consumer(group) for group in self._groups.values()}

    def _open_consumer(self, group: str) -> Consumer:
        return Consumer({"bootstrap.servers": self._cluster.direct_servers, "group.id": group, "log_level": 0})

    def _options(self, group: str, strategy: str) -> dict[str, str]:
        more = {"fetchOffset__retryIntervalMs": 1000}
        return make_options(
            self._cluster.bootstrap_servers, group, self._topic, strategy, session_ms=SESSION_MS, **more
        )

    def run(self) -> Account:
        """Run until the time is over and the last fault is recovered from. Raises if a query stopped or hangs."""
        shared = self._groups["shared"]
        self._report(f"soak: seed {self.account.seed}, new faults for {self._for_s:.0f} s")
        file = self._folder / "ordinary"
        flow = Flow(self._cluster.direct_servers, self._topic, PARTITIONS, per_s=RECORDS_PER_S)
        other = OrdinaryConsumer(self._cluster.bootstrap_servers, shared, [self._topic], file, session_ms=SESSION_MS)
        try:
            with flow, other:
                for query in self._queries:
                    query.start()
                await_until(self._begun, FIRST_ROWS_S, what="rows of both queries")
                other.await_partitions(PARTITIONS // 2, FIRST_ROWS_S)
                self._strike()
                flow.stop()
                self._await_whole("the end")
                assert other.process.poll() is None, "the ordinary consumer ended"
                other.close()
            self._settle(other)
        finally:
            self._cluster.heal()
            for query in self._queries:
                query.stop()
            for consumer in self._consumers.values():
                consumer.close()
        self._report(str(self.account))
        return self.account

    def _begun(self) -> bool:
        self._check()
        return all(query.records for query in self._queries)

    def _check(self) -> bool:
        for query in self._queries:
            query.check()
        return True

    def _strike(self) -> None:
        started_s = time.monotonic()
        for number, (fault, lasts_s) in zip(itertools.count(1), self._draw):
            if time.monotonic() - started_s > self._for_s:
                return
            before = self._generations()
            with self._cluster.suffering(fault):
                stays(self._check, lasts_s, "the queries")
            healed_s = time.monotonic()
            self._await_whole(f"fault {number} ({fault})")
            struck = Struck(fault, lasts_s, time.monotonic() - healed_s, self._generations() != before)
            self.account.struck.append(struck)
            self._report(
                f"{number:4} {healed_s - started_s:7.1f} s  {fault} for {lasts_s:.1f} s: whole after "
                f"{struck.recovered_s:.1f} s{', REBALANCED' if struck.moved else ''}"
            )
            stays(self._check, CALM_S, "the queries")

    def _generations(self) -> dict[str, list[int]]:
        """The generation of each group, as its runs know it: a rebalance changes it."""
        return {group: [int(run["generation"]) for run in run_files.read(group)] for group in self._groups.values()}

    def _await_whole(self, after: str) -> None:
        """Assert that both groups have committed everything produced by now."""
        ends = [with_retries(partial(self._end, p), RECOVERED_S) for p in range(PARTITIONS)]

        def whole() -> bool:
            self._check()
            return all(
                at >= end for group in self._consumers for at, end in zip(self._committed(group), ends, strict=True)
            )

        try:
            await_until(whole, RECOVERED_S, what="recovery")
        except BaseException as exc:
            at = [self._committed(group) for group in self._consumers]
            exc.add_note(f"after {after}, seed {self.account.seed}: the logs end at {ends}, committed {at}")
            raise

    def _end(self, partition: int) -> int:
        group = self._groups["alone"]
        try:
            found = self._consumers[group].get_watermark_offsets(
                KafkaPartition(self._topic, partition), timeout=REQUEST_S
            )
        except KafkaException as exc:  # retried, whatever the error
            self._reopen_consumer(group)
            raise TimeoutError("no answer of the cluster") from exc
        if found is None:
            raise TimeoutError("no answer of the cluster in time")
        return int(found[1])

    def _committed(self, group: str) -> list[int]:
        partitions = [KafkaPartition(self._topic, p) for p in range(PARTITIONS)]
        try:
            return [found.offset for found in self._consumers[group].committed(partitions, timeout=REQUEST_S)]
        except KafkaException:
            self._reopen_consumer(group)
            return [-1] * PARTITIONS

    def _reopen_consumer(self, group: str) -> None:
        """After a leader's death a client may send to the dead node forever; a new client finds the new leader at
        once."""
        self._consumers[group].close()
        self._consumers[group] = self._open_consumer(group)

    def _settle(self, other: OrdinaryConsumer) -> None:
        """Read the tables' files, the ordinary consumer's file, and the produced records from Kafka."""
        every = produced(self._judge, [self._topic])
        self.account.produced = len(every)
        twice = other.unconfirmed()
        counted = sum(
            int(run.get("possible_duplicates", 0)) for group in self._groups.values() for run in run_files.read(group)
        )
        for query, others in zip(self._queries, [other.processed(), []], strict=True):
            counts = Counter([*query.records, *others])
            self.account.lost += sorted(every - counts.keys())
            self.account.doubled += sorted(r for r, count in counts.items() if count > 1 and r not in twice)
            self.account.by_right += sum(1 for r, count in counts.items() if count > 1 and r in twice)
            in_table = Counter(query.records)
            assert not [record for record, count in in_table.items() if count > 1], "a table has a record twice"
        if len(self.account.doubled) <= counted:
            self.account.by_right += len(self.account.doubled)
            self.account.doubled = []
