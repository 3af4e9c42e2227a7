"""Histories of a whole group with crashes, zombies, operators and an unreliable network: G2 to G6 hold in each of them.

A failure prints the history's story. ``python -m tests.simulation SEED PROTOCOL`` and ``pytest tests/simulation -k
protocol --seed SEED`` repeat it.
"""

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from kit.agent_faults import AgentFaults
from kit.books import Cause
from kit.calm import play_calm
from kit.cluster import Cluster
from kit.faults import Faults
from kit.invariants import Invariants
from kit.misfortune import Misfortune
from kit.scene import Scene
from kit.simulation import PROTOCOLS, Failed, Outcome, run, story_on_failure
from kit.sinks import Table
from kit.spark import GROUP, Trigger
from kit.world import World
from simulation.mutants import AGENT_SEEDS, SEEDS

CALM_SEEDS = 4
SOAK_SEEDS = 10_000
SOAK_CHUNK = 500
PRODUCED_MS = 15_000
"""Enough for each step of a directed history."""


@pytest.mark.proves("G8", level="simulation")
@pytest.mark.proves("G6", level="simulation")
@pytest.mark.proves("G5", level="simulation")
@pytest.mark.proves("G4", level="simulation")
@pytest.mark.proves("G3", level="simulation")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_record_is_processed_once_or_counted_and_nothing_is_skipped(protocol: str, only_seed: int | None) -> None:
    seeds = range(SEEDS) if only_seed is None else [only_seed]
    outcomes = [run(seed, protocol=protocol) for seed in seeds]
    if only_seed is None:
        _worth_running(outcomes)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_same_holds_for_members_placed_at_agents(protocol: str, only_seed: int | None) -> None:
    seeds = range(AGENT_SEEDS) if only_seed is None else [only_seed]
    outcomes = [run(seed, protocol=protocol, agents=True) for seed in seeds]
    if only_seed is None:
        kinds = {kind.name for kind in AgentFaults.kinds()} - {"break_placed_member"}  # in every calm history, below
        assert {fault for outcome in outcomes for fault in outcome.faults} >= kinds
        assert sum(outcome.moves for outcome in outcomes) > AGENT_SEEDS // 2  # none while transactions are refused
        assert sum(outcome.recalls for outcome in outcomes) > AGENT_SEEDS // 4


@pytest.mark.proves("G7", level="simulation")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_G7_placement_and_lost_agents_cause_no_rebalance(protocol: str) -> None:
    outcomes = [play_calm(seed, protocol) for seed in range(CALM_SEEDS)]
    assert sum(outcome.moves for outcome in outcomes) > CALM_SEEDS
    assert sum(outcome.recalls for outcome in outcomes) > CALM_SEEDS
    broken = sum(outcome.faults.get("break_placed_member", 0) for outcome in outcomes)
    assert broken >= CALM_SEEDS
    rebalances = sum(outcome.rebalances for outcome in outcomes)
    assert rebalances <= (2 * broken if protocol == "consumer" else 0)  # a session ended, and a join


@pytest.mark.parametrize("files", ["left", "lost"])
@pytest.mark.parametrize("trigger", ["default", "available now"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_rewind_into_the_last_batch_is_refused_after_a_normal_stop_if_the_run_files_are_left(
    protocol: str, trigger: Trigger, files: str
) -> None:
    """Without the run files, Kafka may not have had the batch: the table drops the rows that it has."""
    world = World(1)
    with story_on_failure(world, f"1 ({protocol})"):
        truth = Invariants(world)
        scene = Scene(world, Cluster(world, PROTOCOLS[protocol], truth), truth, protocol)
        world.loss, scene.cluster.misfortune, scene.cluster.transactions_allowed = 0.0, Misfortune(), True
        scene.tables[:] = [Table(world, truth, "table", GROUP)]
        truth.ledgers = True
        query = scene.queries[0]
        scene.queries[:] = [query]
        query.sink = scene.tables[0]
        options = query.habits.options | {"startingOffsets": "earliest"}
        query.habits = replace(query.habits, options=options, trigger=trigger, crash=0.0, interval_ms=0)
        scene._produce()
        world.run_until(PRODUCED_MS)
        scene.producing = False
        scene.start(query)
        world.run_until(2 * PRODUCED_MS)
        scene.closed = True
        query.runs[-1].stop()
        world.run_until(3 * PRODUCED_MS)
        assert scene.ends.keys() == {"ended"}
        last = query.checkpoint.last()
        assert last is not None

        def rewind() -> None:
            scene.operator.by_kafkas_tool(lambda _: {r.tp: r.start for r in last.batch()})
            if files == "lost":
                query.committed.clear()

        scene.operator.begin(rewind)
        world.run_until(5 * PRODUCED_MS)
        assert scene.operator.moves > 0
        assert scene.ends["LedgerConflict"] == (files == "left")


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, SOAK_SEEDS, SOAK_CHUNK))
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("agents", [False, True])
def test_thousands_of_histories(protocol: str, first: int, agents: bool) -> None:
    for seed in range(first, first + SOAK_CHUNK):
        run(seed, protocol=protocol, agents=agents)


def _worth_running(outcomes: list[Outcome]) -> None:
    """Check that all kinds of faults happened and that they exercised the rules."""
    faults: Counter[str] = Counter()
    causes: Counter[Cause] = Counter()
    ends: Counter[str] = Counter()
    for outcome in outcomes:
        faults.update(outcome.faults)
        causes.update(outcome.causes)
        ends.update(outcome.ends)
    assert faults.keys() == {kind.name for kind in Faults.kinds()}
    assert all(causes[cause] for cause in (Cause.DEAD, Cause.REPLAY, Cause.OPERATOR)), causes
    assert causes[Cause.REPORTED] or causes[Cause.UNREPORTED], causes
    assert all(ends[end] for end in ("ended", "LedgerConflict", "DataLoss", "Fenced")), ends
    assert sum(outcome.holds for outcome in outcomes) > SEEDS // 5, "revocations were hardly ever held"
    assert sum(outcome.processed for outcome in outcomes) > SEEDS * 500
    assert sum(outcome.twice for outcome in outcomes) * 10 < sum(outcome.processed for outcome in outcomes)


def test_a_seed_reproduces_its_outcome() -> None:
    code = "from kit.simulation import run; print([run(seed) for seed in range(5)])"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={
                **os.environ,
                "PYTHONHASHSEED": salt,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            },
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for salt in ("1", "2")
    }
    assert len(outputs) == 1


def test_a_failure_prints_its_story_and_the_command_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from spark_group_source.protocol.slots import Slots

    monkeypatch.setattr(Slots, "must_hold", lambda *_: False)  # revocations do not wait for the batch
    text = ""
    for seed in range(50):
        try:
            run(seed, protocol="consumer")
        except Failed as failed:
            text = str(failed)
            break
    assert "VIOLATION" in text and "Join(slot=0" in text
    assert text.splitlines()[-1].startswith("again: python -m tests.simulation ")
