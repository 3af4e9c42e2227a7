"""A group changes its subscription, assignment strategy or protocol, one member at a time, while records flow (G3,
G5)."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from kafka_helpers import ADMIN_S, await_progress, await_until

from rebalance.accounts import Flow, measured
from rebalance.conftest import GroupScene
from rebalance.runs import Run


@pytest.mark.parametrize("strategy", ["range", "consumer"])
def test_a_subscription_is_changed_one_member_at_a_time(strategy: str, scene: GroupScene) -> None:
    """Members with the old and the new subscription share the group meanwhile, each with partitions of its topics."""
    first = scene.topic(4)
    second = scene.topic(4, name=f"{first}.new")
    both = f"{first},{second}"
    with ExitStack() as stack:
        other = stack.enter_context(scene.ordinary(first, strategy=strategy))
        old = Run(scene.run_options(first, strategy))
        stack.callback(old.close)
        flows = [stack.enter_context(Flow(scene.servers, name, 4, per_s=100)) for name in (first, second)]
        old.await_partitions(2)
        old.await_(lambda: len(old.records) > 20, "records of the old subscription")
        old.close()  # as a query is stopped and restarted with another option
        new = stack.enter_context(Run(scene.run_options(both, strategy), log=old.engine.log))
        # The broker ignores a changed subscription of a static member that rejoins.
        new.await_(lambda: second in {tp.topic for tp in new.partitions}, "the topic that had no owner")
        other.send_command("subscribe", topics=[first, second])
        await_until(lambda: {tp.topic for tp in new.partitions | other.partitions} == {first, second}, what="both")
        await_until(lambda: len(new.partitions) == len(other.partitions) == 4, what="a fair share of eight")
        for flow in flows:
            flow.stop()
        scene.assert_once([first, second], [old, new], [other], twice=last_batch(old))
        scene.await_committed(first, second)


def test_an_assignment_strategy_is_changed_through_a_list_of_both(scene: GroupScene) -> None:
    """range -> `roundrobin,range` in one member -> in the other: the strategy changes with the last member."""
    name = scene.topic(4)
    with ExitStack() as stack:
        other = stack.enter_context(scene.ordinary(name, strategy="range"))
        run = Run(scene.run_options(name, "range", leaveOnStop="always"))
        stack.callback(run.close)
        flow = stack.enter_context(Flow(scene.servers, name, 4))
        run.await_partitions(2)
        assert _assignor(scene.admin, scene.group) == "range"
        runs, members = [run], [other]
        for ours in (True, False):
            if ours:
                run.close()
                run = stack.enter_context(
                    Run(scene.run_options(name, "roundrobin,range", leaveOnStop="always"), log=run.engine.log)
                )
                runs.append(run)
            else:
                other.close()
                other = stack.enter_context(scene.ordinary(name, strategy="roundrobin,range"))
                members.append(other)
            other.await_partitions(2)
            run.await_partitions(2)
            expected = "range" if ours else "roundrobin"
            await_until(partial(_is, _assignor, scene.admin, scene.group, expected), what=expected)
        flow.stop()
        scene.assert_once([name], runs, members, twice=last_batch(runs[0]))
        scene.await_committed(name)


def test_a_running_group_is_moved_between_the_classic_and_the_consumer_protocol(scene: GroupScene) -> None:
    """Another member stays classic all the time; the broker converts the group."""
    name = scene.topic(4)
    with ExitStack() as stack:
        other = stack.enter_context(scene.ordinary(name, strategy="range"))
        flow = stack.enter_context(Flow(scene.servers, name, 4))
        runs: list[Run] = []
        log: list[str] = []
        for strategy, kind in (("range", "classic"), ("consumer", "consumer"), ("range", "classic")):
            run = Run(scene.run_options(name, strategy, session_ms=6000, leaveOnStop="always"), log=log)
            runs.append(run)
            stack.callback(run.close)
            run.await_partitions(2)
            other.await_partitions(2)
            await_until(partial(_is, _kind, scene.admin, scene.group, kind), what=f"a {kind} group")
            run.await_(partial(_has_read, run, len(run.records) + 50), "records")
            if len(runs) < 3:
                run.close()
            log = run.engine.log
            measured(f"{kind} group with both kinds of members, {len(run.records)} records")
        flow.stop()
        twice = last_batch(runs[0]) | last_batch(runs[1]) | other.unconfirmed()
        scene.assert_once([name], runs, [other], twice=twice)
        scene.await_committed(name)


def test_a_classic_group_whose_assignor_keeps_data_cannot_be_converted(
    scene: GroupScene, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker refuses; the run retries, and joins as soon as the other member has left."""
    name = scene.topic(4)
    with scene.ordinary(name, strategy="cooperative-sticky") as other:
        other.await_partitions(4)
        scene.produce(name, [f"{n}" for n in range(20)])
        await_progress(lambda: len(other.processed()) == 20, other.progress, what="the other's records")
        with Run(scene.run_options(name, "cooperative-sticky", leaveOnStop="always")) as old:
            old.await_partitions(2)  # the assignor's data exists from a member's second generation on
        other.await_partitions(4)
        with Run(scene.run_options(name, "consumer"), log=old.engine.log) as run:
            run.await_(lambda: "members whose assignor keeps data of its own" in caplog.text, "the reason")
            assert len(other.partitions) == 4, "disturbed"
            other.close()
            run.await_partitions(4)
            scene.produce(name, [f"{n}" for n in range(20, 40)])
            scene.assert_once([name], [old, run], [other])
            scene.await_committed(name)


def last_batch(run: Run) -> set[tuple[str, int, int]]:
    """Offsets that become durable at the very end are committed at the next start of the stream, possibly after the
    next owner of a partition has started."""
    ranges = run.planned[-1].ranges.items()
    return {(tp.topic, tp.partition, offset) for tp, (start, end) in ranges for offset in range(start, end)}


def _has_read(run: Run, count: int) -> bool:
    return len(run.records) > count


def _is(value_of: Callable[[AdminClient, str], str], admin: AdminClient, group: str, expected: str) -> bool:
    return value_of(admin, group) == expected


def _assignor(admin: AdminClient, group: str) -> str:
    return str(_described(admin, group).partition_assignor)


def _kind(admin: AdminClient, group: str) -> str:
    return str(_described(admin, group).type.name.lower())


def _described(admin: AdminClient, group: str) -> Any:
    """The library's own timeout is out of reach: a late answer after it aborts the whole process."""
    return admin.describe_consumer_groups([group], request_timeout=3600)[group].result(ADMIN_S)
