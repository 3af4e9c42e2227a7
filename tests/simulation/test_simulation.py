"""Histories of a whole group with crashes, zombies and a bad network: G2, G3 and G5 hold in each of them.

A failure prints the history's story. ``python -m tests.simulation SEED`` and ``pytest tests/simulation -k protocol
--seed SEED`` play it again.
"""

import subprocess
import sys
from collections import Counter

import pytest

from spark_group_source.testing.invariants import Cause
from spark_group_source.testing.simulation import PROTOCOLS, Failed, Outcome, run

SEEDS = 60
"""Histories of each protocol in the normal run: a few seconds each."""
SOAK_SEEDS = 5_000


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_record_is_processed_once_or_counted_and_nothing_is_skipped(protocol: str, only_seed: int | None) -> None:
    seeds = range(SEEDS) if only_seed is None else [only_seed]
    outcomes = [run(seed, protocol=protocol) for seed in seeds]
    if only_seed is None:
        _worth_running(outcomes)


@pytest.mark.soak
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_thousands_of_histories(protocol: str) -> None:
    for seed in range(SEEDS, SOAK_SEEDS):
        run(seed, protocol=protocol)


def _worth_running(outcomes: list[Outcome]) -> None:
    """Misfortune of every kind happened, and the rules were put to the test by it."""
    faults: Counter[str] = Counter()
    causes: Counter[Cause] = Counter()
    for outcome in outcomes:
        faults.update(outcome.faults)
        causes.update(outcome.causes)
    assert len(faults) == 12, f"only {sorted(faults)} happened"
    assert causes[Cause.TOLD] and causes[Cause.DEAD], "nothing was ever processed twice: the faults are too mild"
    assert sum(outcome.holds for outcome in outcomes) > SEEDS // 2, "revocations were hardly ever held"
    assert sum(outcome.processed for outcome in outcomes) > SEEDS * 500
    assert sum(outcome.twice for outcome in outcomes) * 10 < sum(outcome.processed for outcome in outcomes)


def test_a_seed_tells_the_same_story_every_time() -> None:
    code = "from spark_group_source.testing.simulation import run; print([run(seed) for seed in range(5)])"
    told = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": salt}, capture_output=True, text=True, check=True
        ).stdout
        for salt in ("1", "2")
    }
    assert len(told) == 1


def test_a_failure_prints_its_story_and_how_to_see_it_again() -> None:
    from simulation.mutants import NoHold

    text = ""
    for seed in range(50):
        try:
            run(seed, machine=NoHold)
        except Failed as failed:
            text = str(failed)
            break
    assert "VIOLATION" in text and "Planned(offset=batch" in text
    assert text.splitlines()[-1].startswith("again: python -m tests.simulation ")
