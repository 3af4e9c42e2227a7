"""Rebalances with real Spark queries (G3, G4)."""

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from kafka_helpers import await_progress, await_until
from streams import Job

from rebalance.accounts import Flow, measured, produced, records_in, stays
from rebalance.conftest import GroupScene
from rebalance.runs import Record
from spark_group_source import DeltaSink
from spark_group_source.model import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = [pytest.mark.spark, pytest.mark.slow]

PARTITIONS = 4
HANG_S = 300
"""The longest time that a test keeps a batch in flight."""


class Query:
    """A running query whose batches can be kept in flight; a source of records for the account."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.gate = threading.Event()
        self.gate.set()
        self.inside = threading.Event()
        job.on_batch = self._wait

    def _wait(self, number: int) -> None:
        if not self.gate.is_set() and self.job.batches[-1][1]:
            self.inside.set()
            self.gate.wait(HANG_S)
            self.inside.clear()

    @property
    def records(self) -> list[Record]:
        done = self.job.batches[:-1] if self.inside.is_set() else self.job.batches
        return [(row.topic, row.partition, row.offset) for _, rows in done for row in rows]


@pytest.mark.proves("G3", level="spark")
def test_G3_a_query_releases_partitions_after_its_batch_and_gets_them_back(scene: GroupScene) -> None:
    name = scene.topic(PARTITIONS)
    query = Query(Job(scene.spark, scene.run_options(name, "consumer"), scene.folder / "checkpoint"))
    with query.job.running() as running, Flow(scene.servers, name, PARTITIONS) as flow:
        await_progress(lambda: query.records or running.exception(), lambda: running.status, what="the first batch")
        query.gate.clear()
        await_progress(query.inside.is_set, lambda: (running.status, len(query.job.batches)), what="a batch in flight")
        ends: dict[TopicPartition, int] = {}
        for _, rows in list(query.job.batches):
            for row in rows:
                ends[TopicPartition(row.topic, row.partition)] = row.offset + 1
        with scene.ordinary(name, strategy="consumer") as other:
            await_until(lambda: "ordinary" in scene.describe().members, what="the other in the group")
            before = scene.committed()
            stays(lambda: not other.partitions, 1.5, "the batch in flight")
            query.gate.set()
            let_go_s = time.monotonic()
            gained = other.await_partitions(2)
            took_s = other.first_assigned_at() - let_go_s
            measured(f"real Spark: {took_s * 1000:.0f} ms from the end of the sink to the new owner")
            assert took_s > 0, "before the sink ended"
            await_until(lambda: other.firsts().keys() == gained, what="a record of every partition there")
            assert other.firsts() == other.starts()
            assert all(at >= max(ends[tp], before.get(tp, 0)) for tp, at in other.starts_of(gained).items())
            assert other.starts() == {tp: ends[tp] for tp in gained}
            other.close()
        await_until(lambda: len(_ours(scene)) == PARTITIONS, what="all partitions back")
        flow.stop()
        scene.assert_once([name], [query], [other])
        scene.await_committed(name)
        assert running.exception() is None


@pytest.mark.proves("G4", level="spark")
@pytest.mark.parametrize("strategy", ["range", pytest.param("consumer", marks=pytest.mark.soak)])
def test_G4_two_queries_of_one_group_write_each_record_once_to_one_table(strategy: str, scene: GroupScene) -> None:
    name = scene.topic(PARTITIONS)
    table = scene.folder / "table"

    def start(number: int) -> "StreamingQuery":
        options = scene.run_options(name, strategy, leaveOnStop="always")
        return Job(scene.spark, options, scene.folder / f"checkpoint-{number}").start_into(DeltaSink(table))

    def progress() -> object:
        return len(list((table / "_delta_log").glob("*.json"))), first.status

    with Flow(scene.servers, name, PARTITIONS) as flow:
        first = start(1)
        try:
            await_progress(lambda: records_in(table), progress, what="the first rows")
            second = start(2)
            try:
                await_progress(
                    lambda: sorted(map(len, scene.describe().members.values())) == [2, 2],
                    progress,
                    what="two partitions for each query",
                )
                at = len(records_in(table))
                await_progress(lambda: len(records_in(table)) > at + 200, progress, what="rows of both")
            finally:
                second.stop()
            await_progress(lambda: len(_ours(scene)) == PARTITIONS, progress, what="all partitions back")
            flow.stop()
            every = produced(scene.admin, [name])
            await_progress(lambda: set(records_in(table)) == every, progress, what="every record")
            doubled = [record for record, count in Counter(records_in(table)).items() if count > 1]
            assert not doubled, doubled[:5]
            scene.await_committed(name)
            assert first.exception() is None and second.exception() is None
        finally:
            first.stop()


def _ours(scene: GroupScene) -> set[TopicPartition]:
    members = scene.describe().members
    names = [n for n in members if n.startswith((scene.group, "spark-group"))]
    return {tp for n in names for tp in members[n]} if len(members) == 1 else set()
