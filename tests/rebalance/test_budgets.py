"""Batches that take longer than the poll interval, with and without a rebalance during them (G3, G8)."""

import time

import pytest
from kafka_helpers import await_progress, await_until

from rebalance.accounts import Flow, measured, stays
from rebalance.conftest import GroupScene
from rebalance.runs import Run
from spark_group_source.options.table import HOLD_SHARE

PARTITIONS = 4
PROTOCOLS = ("range", "consumer")
POLL_MS = 8000
"""max.poll.interval.ms, which is also the group's rebalance timeout. A session is not longer: it ends while the machine
stalls for so long."""
SESSION_MS = POLL_MS


@pytest.mark.parametrize("strategy", PROTOCOLS)
def test_a_batch_longer_than_the_poll_interval_keeps_membership_and_rows(strategy: str, scene: GroupScene) -> None:
    name = scene.topic(PARTITIONS)
    slow = scene.run_options(name, strategy, session_ms=SESSION_MS, kafka__max__poll__interval__ms=POLL_MS)
    with Run(slow) as run, Flow(scene.servers, name, PARTITIONS) as flow:
        run.await_partitions(PARTITIONS)
        run.hold()
        before = run.statistics
        members = scene.describe()
        stays(
            lambda: scene.describe() == members and len(run.partitions) == PARTITIONS,
            POLL_MS / 1000 * 1.5,
            "the group",
        )
        run.let_go()
        flow.stop()
        scene.assert_once([name], [run])
        scene.await_committed(name)
        after = run.statistics
        same = ("generation", "rebalances", "partitions_lost", "hold_overruns", "possible_duplicates")
        assert {key: after[key] for key in same} == {key: before[key] for key in same}


@pytest.mark.parametrize("strategy", PROTOCOLS)
def test_a_hold_ends_within_its_budget_without_a_commit(strategy: str, scene: GroupScene) -> None:
    name = scene.topic(PARTITIONS)
    scene.fill(name, 10)
    slow = scene.run_options(name, strategy, session_ms=SESSION_MS, kafka__max__poll__interval__ms=POLL_MS)
    with Run(slow) as run:
        run.await_partitions(PARTITIONS)
        run.await_(lambda: len(run.records) == 40, "the first records")
        scene.await_committed(name)
        run.rest()  # one batch over all partitions
        scene.fill(name, 10)
        in_flight = {r.tp: (r.start, r.end) for r in run.hold().batch()}
        assert len(in_flight) == PARTITIONS
        with scene.ordinary(name, strategy=strategy, session_ms=SESSION_MS, max__poll__interval__ms=POLL_MS) as other:
            looked_s = 0.0

            def holds() -> bool:
                nonlocal looked_s
                looked_s = time.monotonic()
                return "revoking" in run.statistics["slots"]

            run.await_(holds, "Kafka to revoke partitions")
            gained = other.await_partitions(2)
            assert other.first_assigned_at() > looked_s, "while the run held them"
            counted = run.statistics
            budget_ms = POLL_MS * HOLD_SHARE
            measured(f"{strategy}: held for {counted['hold_max_ms']} ms of {budget_ms:.0f} ms")
            assert counted["hold_max_ms"] >= budget_ms
            assert counted["hold_overruns"] == 1, "the budget ended the hold: the batch is still in flight"
            assert set(other.starts_of(gained).values()) == {10}, "something of the batch in flight was committed"
            read_again = {(tp.topic, tp.partition, offset) for tp in gained for offset in range(*in_flight[tp])}
            await_progress(lambda: len(other.processed()) == 20, other.progress, what="the other's records")
            run.let_go()
            scene.assert_once([name], [run], [other], twice=read_again)
            scene.await_committed(name)
            # Every partition went in an eager rebalance, and only those that another got were read there.
            went = in_flight if strategy == "range" else {tp: in_flight[tp] for tp in gained}
            assert run.statistics["possible_duplicates"] == sum(end - start for start, end in went.values())
            await_until(lambda: len(run.partitions) == 2, what="two partitions for each")
            scene.fill(name, 10)
            scene.assert_once([name], [run], [other], twice=read_again)
            scene.await_committed(name)
