"""A member joins and leaves during a batch: nothing is read twice or skipped (G3, G5)."""

import pytest
from kafka_helpers import await_until

from rebalance.accounts import Flow, measured, stays
from rebalance.conftest import GroupScene
from rebalance.ordinary import KINDS
from rebalance.runs import Run

PARTITIONS = 4
QUIET_S = 1.0


@pytest.mark.proves("G3", level="kafka")
@pytest.mark.parametrize("strategy", KINDS)
def test_G3_G5_a_member_that_joins_during_a_batch_gets_its_partitions_after_it(
    strategy: str, scene: GroupScene
) -> None:
    name = scene.topic(PARTITIONS)
    with Run(scene.run_options(name, strategy)) as run, Flow(scene.servers, name, PARTITIONS) as flow:
        run.await_partitions(PARTITIONS)
        plan = run.hold()
        with scene.ordinary(name, strategy=strategy) as other:
            run.await_(lambda: "revoking" in run.statistics["slots"], "Kafka to revoke partitions")
            begins = {tp: start for tp, (start, _) in plan.ranges.items()}
            await_until(lambda: scene.committed() == begins, what="the commit of the batch before")
            stays(lambda: not other.partitions and run.planned[-1] == plan, QUIET_S, "the batch in flight")
            assert scene.committed() == begins, "committed while the batch was in flight"

            durable_at_s = run.let_go()
            gained = other.await_partitions(2)
            took_s = other.first_assigned_at() - durable_at_s
            measured(f"{strategy}: partitions at the new member {took_s * 1000:.0f} ms after the batch was durable")
            assert took_s > 0, "before the batch was durable"
            assert run.statistics["hold_overruns"] == 0, "the budget released them, not the durable batch"

            until = plan.positions()
            assert other.starts_of(gained) == {tp: until[tp] for tp in gained}
            await_until(lambda: other.firsts().keys() == gained, what="a record of every partition there")
            assert other.firsts() == {tp: until[tp] for tp in gained}

            run.await_partitions(2)
            kept = run.partitions
            run.hold()  # and it continues with the kept partitions
            run.let_go()
            assert set(run.planned[-1].ranges) <= kept

            other.close()
            run.await_partitions(PARTITIONS)
            gone_at = {(t, p): o + 1 for t, p, o in other.processed()}
            run.await_(lambda: set(run.planned[-1].ranges) == kept | gained, "a batch over all partitions")
            first = next(p for p in run.planned if p.ranges.keys() >= gained and p.seq > plan.seq)
            assert {tp: first.ranges[tp][0] for tp in gained} == {tp: gone_at[tp] for tp in gained}
        flow.stop()
        scene.assert_once([name], [run], [other])
        scene.await_committed(name)
        assert (
            run.statistics["possible_duplicates"]
            == run.statistics["hold_overruns"]
            == run.statistics["partitions_lost"]
            == 0
        )
